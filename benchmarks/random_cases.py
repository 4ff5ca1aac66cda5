"""The cases of `random_ops.py`: each kind (a function below) draws an op with its dims, axes and options, and gives it as a
function of rlx values and as one of torch tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import rlx

LEAST = 2048  # elements


@dataclass(frozen=True)
class Leaf:
    """Numbers of one operand: "normal", "positive", "near 1", "weight" (a param), "integer" (from 0, below `limit`), "divisor"
    (from 1), or "order" (the first of a random order of `limit` numbers along `axis`)."""

    numbers: str
    dims: tuple[int, ...]
    dtype: str
    limit: int = 100
    axis: int = 0


@dataclass(frozen=True)
class Case:
    """`picked`: the results are indices along this axis of the first operand, and what they pick is compared."""

    op: str
    leaves: list[Leaf]
    ours: Callable[..., rlx.Value]
    theirs: Callable[..., torch.Tensor]
    picked: int | None = None
    name: str = ""

    @property
    def label(self) -> str:
        return f"{self.op}: {' '.join('x'.join(map(str, leaf.dims)) for leaf in self.leaves)}"


class Draw(random.Random):
    """Draws the dtype and dims (round, odd, long or 1) of values of `least` to `elements` elements, or a share of them, and
    products of at most `work`."""

    def __init__(self, key: str, elements: int, work: float, least: int = LEAST) -> None:
        super().__init__(key)
        self.elements, self.least, self.work, self.dtype = elements, least, work, self.choice(("f32", "f32", "bf16", "f16"))

    def dims(self, *ranks: int, share: float = 1.0) -> tuple[int, ...]:
        """Dims of the least elements to the most, times a share."""
        total = share * 2 ** self.uniform(math.log2(self.least), math.log2(self.elements))
        parts = [self.random() ** 1.6 for _ in range(self.choice(ranks or (1, 2, 2, 3, 3, 4)))]
        dims = [max(1, round(total ** (part / sum(parts)))) for part in parts]
        return self.within(total, *(2 ** round(math.log2(d)) if self.random() < 0.3 else d for d in dims))

    def side(self, most: int, least: int = 1) -> int:
        usual = [n for n in (1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 256, 512, 768, 1000, 1024) if least <= n <= most]
        odd = int(2 ** self.uniform(math.log2(least), math.log2(most)))
        return self.choice(usual) if usual and self.random() < 0.35 else odd

    def within(self, most: float, *dims: int) -> tuple[int, ...]:
        """The dims, the longest halved until there are no more elements than that."""
        found = list(dims)
        while math.prod(found) > most and max(found) > 1:
            found[found.index(max(found))] //= 2
        return tuple(found)

    def normal(self, *dims: int) -> Leaf:
        return Leaf("normal", dims, self.dtype)

    def weight(self, *dims: int) -> Leaf:
        return Leaf("weight", dims, self.dtype)

    def moved(self, dims: tuple[int, ...]) -> Leaf:
        """An operand that is only moved or compared, of any dtype."""
        dtype = self.choice((self.dtype, self.dtype, self.dtype, "i8", "i32", "i64", "f64"))
        return Leaf("integer" if dtype[0] == "i" else "normal", dims, dtype)


def pointwise(draw: Draw) -> Case:
    m, kind, names = draw.choice((
        (F, "normal", "gelu silu softplus mish elu relu"),
        (torch, "normal", "exp tanh sigmoid erf sin cos atan sinh expm1 round abs"),
        (torch, "positive", "log sqrt rsqrt tan asin log1p reciprocal"),
    ))  # fmt: skip
    name, x = draw.choice(names.split()), Leaf(kind, draw.dims(), draw.dtype)
    to, theirs = draw.choice((("i32", torch.int32), ("f64", torch.float64), ("u8", torch.uint8), ("f16", torch.float16)))
    cast = Case(f"cast to {to}", [replace(x, numbers="divisor")], lambda x: x.astype(to), lambda x: x.to(theirs))
    return draw.choice([*[Case(name, [x], getattr(rlx, name), getattr(m, name))] * 6, cast])


def chain(draw: Draw) -> Case:
    dims, form = draw.dims(), draw.choice(("relu(x*y+z)", "where(x>y, 2x, y+z)", "(x-y)/(|z|+1)"))

    def of(m: Any, x: Any, y: Any, z: Any) -> Any:
        if form == "(x-y)/(|z|+1)":
            return (x - y) / (m.abs(z) + 1.0)
        return m.relu(x * y + z) if form == "relu(x*y+z)" else m.where(x > y, x * 2.0, y + z)

    others = [tuple(n if draw.random() < 0.6 else 1 for n in dims) for _ in range(2)]
    return Case(form, [draw.normal(*d) for d in (dims, *others)], partial(of, rlx), partial(of, torch))


def integers(draw: Draw) -> Case:
    x = Leaf("integer", draw.dims(), draw.choice(("i8", "u8", "i32", "i64")))
    name, theirs = draw.choice((("add", "add"), ("mul", "mul"), ("floor_div", "floor_divide"), ("mod", "remainder")))
    return Case(name, [x, replace(x, numbers="divisor")], getattr(rlx, name), getattr(torch, theirs))


def reduction(draw: Draw) -> Case:
    x = draw.normal(*draw.dims())
    axes = tuple(sorted(draw.sample(range(len(x.dims)), draw.randint(1, len(x.dims)))))
    variance = partial(torch.var, correction=0)
    several = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "variance": variance}
    name, theirs = draw.choice(list(several.items()))
    return Case(f"{name} {axes}", [x], partial(getattr(rlx, name), axis=axes), lambda x: theirs(x, axes))


def along(draw: Draw) -> Case:
    """Ops along one axis that have the same name in both libraries."""
    name = draw.choice("softmax softmax log_softmax cumsum cumsum cumprod argmax argmin prod".split())
    dims = draw.dims()
    axis, x = draw.randrange(len(dims)), Leaf("near 1" if "prod" in name else "normal", dims, draw.dtype)
    ours, theirs = getattr(rlx, name), getattr(torch, name)
    return Case(f"{name} {axis}", [x], lambda x: ours(x, axis=axis), lambda x: theirs(x, axis), axis if "arg" in name else None)


def norm(draw: Draw) -> Case:
    dims, (n, c, side) = draw.dims(), (draw.choice((1, 2, 5)), draw.choice((3, 8, 16, 33, 64, 96, 320)), max(2, draw.side(60)))
    groups, last = draw.choice([g for g in (1, 2, 3, 4, 8, c) if c % g == 0]), dims[-1:]
    x, w = draw.normal(*dims), draw.weight(*last)
    image = [draw.normal(*draw.within(draw.elements / side**2, n), c, side, side), draw.weight(c), draw.weight(c)]
    by_group = lambda x, w, b: F.group_norm(x, groups, w, b)  # noqa: E731
    return draw.choice((
        Case("rms_norm", [x, w], rlx.rms_norm, lambda x, w: F.rms_norm(x, last, w, 1e-6)),
        Case("layer_norm", [x, w, w], rlx.layer_norm, lambda x, w, b: F.layer_norm(x, last, w, b)),
        Case(f"norm of {groups} groups", image, partial(rlx.group_norm, groups=groups), by_group),
    ))  # fmt: skip


def order(draw: Draw) -> Case:
    x, down = draw.moved(draw.dims(share=1 / 6)), draw.random() < 0.4
    k, most = min(x.dims[-1], draw.choice((1, 2, 5, 8, 50, 100, 500))), "least" if down else "most"
    first = (lambda x: rlx.top_k(x, k=k, largest=not down)[0], lambda x: torch.topk(x, k, largest=not down)[0])
    whole = (lambda x: rlx.sort(x, descending=down)[0], lambda x: torch.sort(x, -1, descending=down)[0])
    return draw.choice((
        Case("argsort", [x], rlx.argsort, partial(torch.argsort, dim=-1, stable=True)),
        Case(f"sort, {most} last", [x], *whole),
        Case(f"{k} {most}", [x], *first),
    ))  # fmt: skip


def indexed(draw: Draw) -> Case:
    dims = draw.dims(share=0.5)
    axis = draw.randrange(len(dims))
    some = (*dims[:axis], draw.side(dims[axis]), *dims[axis + 1 :])
    x, u, at = draw.normal(*dims), draw.normal(*some), Leaf("integer", some, "i64", dims[axis], axis)
    row, distinct = replace(at, dims=some[axis : axis + 1]), replace(at, numbers="order")
    mode, theirs = draw.choice((("add", "sum"), ("max", "amax"), ("mul", "prod")))
    op, leaves, ours, peer = draw.choice((
        ("rows", [draw.moved(dims), row], rlx.gather, torch.index_select),
        ("elements", [draw.moved(dims), at], rlx.gather_elements, torch.gather),
        ("add rows", [x, row, u], rlx.scatter_add, torch.index_add),
        ("scatter", [x, distinct, u], rlx.scatter_elements, torch.scatter),
        (f"scatter {mode}", [x, at, u], partial(rlx.scatter_elements, mode=mode), partial(torch.scatter_reduce, reduce=theirs)),
    ))  # fmt: skip
    return Case(f"{op} {axis}", leaves, partial(ours, axis=axis), lambda x, *others: peer(x, axis, *others))


def moved(draw: Draw) -> Case:
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    dims, count = draw.dims(2, 3, 3, 4, 5, share=0.3), draw.choice((2, 2, 3, 5))
    dims = tuple(1 if draw.random() < 0.07 else n for n in dims)
    x, axis, axes = draw.moved(dims), draw.randrange(len(dims)), draw.sample(range(len(dims)), len(dims))
    parts = [x, *(replace(x, dims=(*dims[:axis], draw.side(dims[axis]), *dims[axis + 1 :])) for _ in range(count - 1))]
    low, high, steps = (tuple(draw.choice(some) for _ in dims) for some in ((0, 0, 1, 3), (0, 0, 1, 3), (1, 1, 2, 3, 5)))
    starts, sides = tuple(n // 4 for n in dims), [n for pair in zip(low[::-1], high[::-1]) for n in pair]
    at = tuple(slice(first, None, step) for first, step in zip(starts, steps))
    return draw.choice((
        Case(f"transpose {axes}", [x], lambda x: rlx.copy(rlx.transpose(x, axes=tuple(axes))), lambda x: copied(x.permute(axes))),
        Case(f"concat {axis}", parts, lambda *xs: rlx.concat(list(xs), axis=axis), lambda *xs: torch.cat(xs, axis)),
        Case(f"pad {low} {high}", [x], partial(rlx.pad, low=low, high=high), lambda x: F.pad(x, sides)),
        Case(f"{starts} by {steps}", [x], partial(rlx.slice, starts=starts, stops=dims, steps=steps), lambda x: copied(x[at])),
    ))  # fmt: skip


def product(draw: Draw) -> Case:
    """Products in which a side is often small, and another long."""
    batch, thin, form = draw.choice((1, 1, draw.side(200))), draw.randrange(4), draw.randrange(3)
    sides = [draw.choice((1, 2, 3, 4, 7, 16, 17, 33)) if n == thin else draw.side(20_000 if thin < 3 else 1500) for n in range(3)]
    while batch * math.prod(sides) > draw.work or batch * max(sides) * sorted(sides)[1] > draw.elements:
        sides[sides.index(max(sides))] //= 2
    m, n, k = sides
    if form == 0:
        leaves = [draw.normal(m, k), draw.weight(n, k), draw.weight(n)]
        return Case("gelu(x @ w.T + b)", leaves, lambda x, w, b: rlx.gelu(x @ w.T + b), lambda x, w, b: F.gelu(F.linear(x, w, b)))
    if form == 1:
        turned = lambda a, b: a @ b.T  # noqa: E731
        return Case("x @ y.T", [draw.normal(m, k), draw.normal(n, k)], turned, turned)
    first = (batch,) if batch > 1 else ()
    return Case("x @ y", [draw.normal(*first, m, k), draw.normal(*first, k, n)], lambda a, b: a @ b, torch.matmul)


def convolution(draw: Draw) -> Case:
    rank, window = draw.choice((1, 2, 2, 2, 3)), draw.choice((1, 3, 3, 5, 7))
    step, apart = draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    c, o = (draw.choice((1, 2, 3, 4, 16, 32, 64, 128, draw.side(300))) for _ in range(2))
    groups, depthwise = draw.choice([g for g in (1, 1, 1, 2, 4) if c % g == o % g == 0]), draw.random() < 0.4
    c, o, groups = (o, o * draw.choice((1, 1, 2)), o) if depthwise else (c, o, groups)
    n, side, pad = draw.choice((1, 1, 2, 8)), draw.side({1: 3000, 2: 100, 3: 24}[rank], 4), window // 2 * apart
    most = min(draw.elements / max(c, o), draw.work / (o * c // groups * window**rank))
    n, *sides = draw.within(most, n, *[side] * rank)
    sides = [max(s, window * apart) for s in sides]
    w, theirs = draw.weight(o, c // groups, *[window] * rank), getattr(F, f"conv{rank}d")
    every = {"strides": step, "low": pad, "high": pad, "dilation": apart, "groups": groups}
    op, leaves = f"conv by {step}, apart {apart}, {groups} groups", [draw.normal(n, c, *sides), w, draw.weight(o)]
    return Case(op, leaves, partial(rlx.conv, **every), lambda x, w, b: theirs(x, w, b, step, pad, apart, groups))


def convolution_transposed(draw: Draw) -> Case:
    rank, window, step = draw.choice((1, 2, 2)), draw.choice((2, 3, 4)), draw.choice((1, 2, 2))
    c, o = draw.side(96), draw.side(96)
    sides = draw.within(draw.work / (c * o * window**rank), *[draw.side({1: 1000, 2: 40}[rank], 2)] * rank)
    theirs = getattr(F, f"conv_transpose{rank}d")
    return Case(f"conv_transpose by {step}", [draw.normal(1, c, *sides), draw.weight(c, o, *[window] * rank)],
                partial(rlx.conv_transpose, strides=step), lambda x, w: theirs(x, w, stride=step))  # fmt: skip


def image(draw: Draw) -> Case:
    name, rank, window = draw.choice(("max", "avg")), draw.choice((1, 2, 2, 3)), draw.choice((2, 3, 5))
    n, c, side, to = draw.choice((1, 2, 8)), draw.side(256), draw.side({1: 4000, 2: 100, 3: 24}[rank], 8), draw.side(200, 4)
    n, c = draw.within(draw.elements / max(side**rank, to**2 * (rank == 2)), n, c)
    x, step = draw.normal(n, c, *[side] * rank), draw.choice((1, 2, 2, window))
    mode, theirs = draw.choice((("nearest", "nearest"), ("linear", "bilinear"), ("cubic", "bicubic")))
    if rank == 2 and draw.random() < 0.4:
        options = {"coordinates": "asymmetric", "rounding": "floor"} if mode == "nearest" else {}
        return Case(f"{mode} resize to {to}", [x], lambda x: rlx.resize(x, (to, to), (2, 3), mode=mode, **options),
                    lambda x: F.interpolate(x, (to, to), mode=theirs))  # fmt: skip
    ours, pooled = getattr(rlx, f"{name}_pool"), getattr(F, f"{name}_pool{rank}d")
    return Case(f"{name}_pool {window} by {step}", [x], partial(ours, window=(window,) * rank, strides=(step,) * rank),
                lambda x: pooled(x, window, step))  # fmt: skip


def attention(draw: Draw) -> Case:
    n, heads, depth = draw.side(8), draw.choice((1, 3, 8, 16)), draw.choice((16, 32, 40, 64, 72, 80, 128))
    keys, causal = draw.side(1500), draw.random() < 0.5
    n, rows = draw.within(draw.work / (2 * heads * depth * keys), n, draw.side(600))
    keys = rows if causal else keys
    leaves = [draw.normal(n, heads, length, depth) for length in (rows, keys, keys)]
    return Case(f"attention{', causal' * causal}", leaves, partial(rlx.attention, **{"mask": "causal"} if causal else {}),
                partial(F.scaled_dot_product_attention, is_causal=causal))  # fmt: skip


KINDS = {k.__name__: k for k in (pointwise, chain, integers, reduction, along, norm, order, indexed, moved, product, convolution,
                                 convolution_transposed, image, attention)}  # fmt: skip


def cases(seed: int, elements: int, work: float, only: list[str], least: int = LEAST) -> Iterator[Case]:
    """Cases of all kinds in turn; `only` those of these kinds, or named like "norm.3". A case is that of its name, the seed and
    the limits, whatever was drawn before it."""
    if unknown := [name for name in only if name.partition(".")[0] not in KINDS]:
        raise SystemExit(f"there is no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    for lap in range(10_000):
        for name, kind in KINDS.items():
            if not only or name in only or f"{name}.{lap}" in only:
                yield replace(kind(Draw(f"{seed} {name} {lap}", elements, work, least)), name=f"{name}.{lap}")

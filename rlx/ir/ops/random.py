"""Counter-based random numbers, and the threshold for top-k and top-p sampling.

Random ops are pure functions of a key and a counter, by Threefry-2x32 with 20 rounds (J. K. Salmon, M. A. Moraes, R. O. Dror
and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key and counter are operands, so that seed and step can
be state of a graph. The generator needs only additions, xors and rotations of 32-bit words, so every device gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import DType, f32, u32
from rlx.ir.kernel import Carry, Expr, Let, Load, Loop, Loops, Reduce, Store, Var, const, k
from rlx.ir.node import Node, Value
from rlx.ir.op import Attrs, Kind, Sample, as_dims
from rlx.ir.ops.activation import log1p
from rlx.ir.ops.elementwise import log, minimum, shift_right
from rlx.ir.ops.rules import lines, others
from rlx.ir.shape import DimLike, Shape

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
BELOW_ONE = 1 - 2.0**-24  # the greatest f32 below 1


class RandomAttrs(Attrs):
    dims: tuple[DimLike, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", as_dims(self.dims))


Word = TypeVar("Word")  # u32: an array or an expression
Rule = Callable[..., Any]


def _threefry(key: Sequence[Word], counter: Sequence[Word], word: Rule, add: Rule, xor: Rule, rotate: Rule) -> tuple[Word, Word]:
    """Two output words from two key words and two counter words, on any u32 type; `word` makes a constant of that type."""
    keys = (*key, xor(xor(*key), word(PARITY)))
    a, b = map(add, counter, key)
    for i in range(5):
        for by in ROTATIONS[i % 2]:
            a = add(a, b)
            b = xor(rotate(b, by), a)
        a, b = add(a, keys[(i + 1) % 3]), add(add(b, keys[(i + 2) % 3]), word(i + 1))
    return a, b


def threefry_array(key: Iterable[ArrayLike], counter: Iterable[ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32-20 of pairs of u32 arrays, in numpy."""
    one = [np.asarray(x, np.uint32) for x in (*key, *counter)]
    rotate = lambda x, by: (x << np.uint32(by)) | (x >> np.uint32(32 - by))  # noqa: E731
    with np.errstate(over="ignore"):
        return _threefry(one[:2], one[2:], np.uint32, np.add, np.bitwise_xor, rotate)


def seed_key(seed: int) -> np.ndarray:
    """The key u32 [2] of a seed in 0 … 2^64 - 1: high word, low word, as JAX has it."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _random_shape(dtype: DType) -> Callable[..., Shape]:
    def infer(attrs: RandomAttrs, key: Shape, counter: Shape) -> Shape:
        for what, found, dims in (("key", key, (2,)), ("counter", counter, ())):
            if found.dtype != u32:
                raise DTypeError(f"the {what} is u32, got {found.dtype}; cast it: x.astype('u32')")
            if found.dims != dims:
                raise ShapeError(f"the {what} has dims {dims}, got {found}")
        out = Shape(attrs.dims, dtype)
        if all(isinstance(d, int) for d in out.dims) and out.num_elements > 1 << 32:
            raise ShapeError(f"one counter gives 2^32 numbers, {out} has {out.num_elements}")
        return out

    return infer


def _bits_array(attrs: RandomAttrs, key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    dims = Shape(attrs.dims, u32).static
    a, b = threefry_array(key, (np.reshape(counter, 1), np.arange(math.prod(dims), dtype=np.uint32)))
    return (a ^ b).reshape(dims)


def _bits_element(ctx: Lowering, node: Node, result: int, coords: Coords) -> Expr:
    key, counter = node.inputs
    at = k.const(0)
    for c, d in zip(coords, node.shapes[0].static):
        at = k.add(k.mul(at, k.const(d)), c)
    word = lambda x: const(x, u32)  # noqa: E731
    a, b = _threefry(
        [ctx.element(key, (k.const(i),)) for i in range(2)], (ctx.element(counter, ()), k.cast(at, u32)), word, k.add, k.xor,
        lambda x, by: k.or_(k.shl(x, word(by)), k.shr(x, word(32 - by))),
    )  # fmt: skip
    return k.xor(a, b)


def _uniform_array(attrs: RandomAttrs, key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    return (_bits_array(attrs, key, counter) >> 8) * np.float64(2.0**-24)


def _gumbel_array(attrs: RandomAttrs, key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    u = (_bits_array(attrs, key, counter).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return -np.log(-np.log1p(-np.minimum(u, np.float32(BELOW_ONE)).astype(np.float64)))


def _gumbel(attrs: RandomAttrs, key: Value, counter: Value) -> Value:
    # small u gives the largest results, which win the argmax: u is finely spaced there, never 0, and never 1
    u = minimum((random_bits(key, counter, dims=attrs.dims).astype(f32) + 0.5) * 2.0**-32, BELOW_ONE)
    return -log(-log1p(-u))


WORDS = ("u32", "u32")
DRAWS = tuple(Sample(((2,), ()), {"dims": dims}, high=2.0**32, dtypes=WORDS) for dims in ((37,), (3, 17), (2, 3, 5), (), (0, 4)))
random_bits = op(
    "random_bits", kind=Kind.INDEX, infer=_random_shape(u32), attrs=RandomAttrs, arity=(2, 2), dtypes="u", samples=DRAWS,
    reference=_bits_array, element=_bits_element,
    doc="Uniform random u32 bits of shape `dims` from a key u32 [2] and a counter u32 (); equal operands give equal bits. With "
    "counter 0 the bits are those of JAX for the same key.",
)  # fmt: skip
random_uniform = op(
    "random_uniform", kind=Kind.COMPOSITE, infer=_random_shape(f32), attrs=RandomAttrs, arity=(2, 2), dtypes="u", samples=DRAWS,
    reference=_uniform_array,
    decompose=lambda a, key, counter: shift_right(random_bits(key, counter, dims=a.dims), 8).astype(f32) * 2.0**-24,
    doc="Uniform random f32 in [0, 1), multiples of 2^-24, from a key u32 [2] and a counter u32 ().",
)  # fmt: skip
gumbel = op(
    "gumbel", kind=Kind.COMPOSITE, infer=_random_shape(f32), attrs=RandomAttrs, arity=(2, 2), dtypes="u", samples=DRAWS,
    reference=_gumbel_array, decompose=_gumbel,
    doc="Random f32 from the standard Gumbel distribution: argmax(logits + gumbel) samples from softmax(logits).",
)  # fmt: skip


# -- threshold -----------------------------------------------------------------------------------------------------


class ThresholdAttrs(Attrs):
    """`weighted`: each element counts as its value (negative ones as 0); otherwise each counts as 1."""

    weighted: bool = False


LEAST = 0x007FFFFF  # the key of -inf
TINY = 2.0**-126


def _threshold_shape(attrs: ThresholdAttrs, x: Shape, amount: Shape) -> Shape:
    if (x.dtype, amount.dtype) != (f32, f32):
        raise DTypeError(f"the operands are f32, got {x.dtype} and {amount.dtype}; cast them")
    if not x.rank or amount.rank:
        raise ShapeError(f"takes a tensor with a last dim and an amount of dims (), got {x} and {amount}")
    return x.with_dims(x.dims[:-1])


def _threshold_array(attrs: ThresholdAttrs, x: np.ndarray, amount: np.ndarray) -> np.ndarray:
    down = -np.sort(-np.where(np.isnan(x), -np.inf, x), axis=-1)
    down = np.concatenate([down, np.full((*x.shape[:-1], 1), -np.inf, x.dtype)], axis=-1)  # the result if none suffices
    reached = np.cumsum(np.maximum(down, 0) if attrs.weighted else np.ones_like(down), axis=-1, dtype=np.float64)
    enough = reached >= np.maximum(amount, TINY)
    enough[..., -1] = True
    return np.take_along_axis(down, enough.argmax(-1)[..., None], axis=-1)[..., 0]


def _number(key: Expr) -> Expr:
    """The f32 of a key: u32 keys have the order of the floats. Keys below that of -inf are clamped to it."""
    key = k.select(k.lt(key, const(LEAST, u32)), const(LEAST, u32), key)
    negative = k.lt(key, const(1 << 31, u32))
    return k.bitcast(k.xor(key, k.select(negative, const(0xFFFFFFFF, u32), const(1 << 31, u32))), dtype=f32)


def _threshold_kernel(ctx: Lowering, node: Applied[ThresholdAttrs]) -> Loops:
    """Binary search for the threshold's key, from the highest bit: a bit stays set if the elements at or above the key still
    suffice. A float sum in a fixed order never grows when elements become 0, so rounding does not break the search."""
    x, amount = node.inputs
    n = ctx.dims(x)[-1]
    grid, coords = lines(ctx.dims(x), x.rank - 1)
    values, i, j = ctx.local(f32, n), Var("i"), Var("j")
    fill = Loop(i, n, (Store(values, i, ctx.element(x, coords(i))),), vector=True)
    want, bound, total = Var("want", f32), Var("bound", f32), Var("total", f32)
    found, bit, value = Var("found", u32), Var("bit", u32), Load(values, j)
    trial = k.or_(found, bit)
    weight = k.max(value, const(0, f32)) if node.attrs.weighted else const(1, f32)
    measure = Loop(j, n, (), vector=True, reduces=(Reduce(total, "add", k.select(k.le(bound, value), weight, const(0, f32))),))
    search = Loop(Var("step"), 32, (Let(bound, _number(trial)), measure), carries=(
        Carry(found, const(0, u32), k.select(k.le(want, total), trial, found)),
        Carry(bit, const(1 << 31, u32), k.shr(bit, const(1, u32))),
    ))  # fmt: skip
    least = Let(want, k.max(ctx.element(amount, ()), const(TINY, f32)))
    return grid, (fill, least, search, ctx.store(0, coords(None), _number(found)))


threshold = op(
    "threshold", kind=Kind.KERNEL, infer=_threshold_shape, attrs=ThresholdAttrs, arity=(2, 2), dtypes="f",
    reference=_threshold_array, kernel=_threshold_kernel, rows=others,
    samples=(
        Sample(((2, 17), ()), low=1, high=9, dtypes=("f32", "f32")),
        Sample(((3, 2, 33), ()), {"weighted": True}, low=-2, high=6, dtypes=("f32", "f32")),
        Sample(((70,), ()), low=-30, high=-3, dtypes=("f32", "f32")), Sample(((2, 0), ()), dtypes=("f32", "f32")),
        Sample(((4, 5), ()), {"weighted": True}, low=5, high=40, dtypes=("f32", "f32")),
    ),
    doc="For each row (last dim) of x, the largest element t such that at least `amount` elements are >= t or, with `weighted`, "
    "such that the elements >= t sum to at least `amount`; -inf if the whole row falls short. NaN is never counted. Nothing is "
    "sorted.",
)  # fmt: skip

"""Convolutions by multiply-adds that read the image in place: depthwise ones, and those with few results. Tensor cores would
multiply by zeros there, and copies of all windows would be many times the size of the image. Padding is not stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import WIDE, CudaWriter
from rlx.backends.cuda.schedule import MULTIPROCESSORS, WARP, Launch
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Kernel, Native, Store, Var, View, linear
from rlx.ir.ops import conv, pack, transpose
from rlx.ir.ops.conv import ConvAttrs
from rlx.ir.ops.view import transposed_axes
from rlx.ir.ops.windows import from_last, to_last
from rlx.records import record

DTYPES = ("f32", "f16", "bf16")
FEW = 8  # results of a convolution that sums over all channels
MOST_WINDOW, MOST_SUM = 16, 1 << 16  # elements along one axis, each in the code of a thread; products that are added in f32
BYTES, CHANNELS = 16, 4  # of a load of adjacent channels; channels of a thread, at most, if each has a sum
LONG, PLACES, FEW_PLACES = 5, 8, 4  # places of a thread, at most, and where windows have fewer elements along them than LONG
HELD, SUMS = 64, 32  # elements of the image, and sums, of a thread in registers
LOADED = 96  # elements of the image that are loaded before the first is waited for
BUSY, BUSIER = MULTIPROCESSORS * 256, MULTIPROCESSORS * 1024  # threads: fewer have fewer places each, or share the channels
THREADS, SHARES = 128, 8  # of a block; warps that share the channels


def claim(node: Node) -> str | None:
    """None if there is a kernel for this convolution; else the reason why not."""
    attrs, (x, w) = node.attrs, node.inputs[:2]
    assert isinstance(attrs, ConvAttrs)
    *window, inner, out = w.shape.static if attrs.channels_last else (*w.shape.static[2:], *w.shape.static[1::-1])
    if any(v.dtype.name not in DTYPES for v in node.inputs) or x.rank > 5:
        found = " and ".join((str(x.shape), *(v.dtype.name for v in node.inputs[1:])))
        return f"the direct kernel takes images of 1 to 3 spatial dims in {', '.join(DTYPES)}, not {found}"
    if max(window) > MOST_WINDOW or math.prod(window) * inner > MOST_SUM or 0 in (*x.shape.static, *node.shapes[0].static):
        return f"the direct kernel takes windows of 1 to {MOST_WINDOW} elements along an axis, not {window} of {x.shape}"
    if max(v.shape.num_elements for v in (x, w, node.results[0])) >= WIDE:
        return f"the direct kernel takes images of fewer than {WIDE} elements, not {x.shape}"
    if (inner > 1) if attrs.groups > 1 else (out > FEW):
        return f"the direct kernel takes groups of one channel, or {FEW} results: others are products"
    return None


def split(node: Node) -> Value | None:
    """The convolution with channels first, if its image is a view of one: adjacent threads store adjacent elements, too."""
    (x, w, *bias), how = node.inputs, vars(node.attrs)
    if not how["channels_last"] or claim(node) or x.node.op.name != "transpose" or transposed_axes(x.node)[-1] != 1:
        return None
    w = transpose(w, axes=(x.rank - 1, x.rank - 2, *range(x.rank - 2)))  # type: ignore[assignment]
    return to_last(conv(from_last(x, False), w, *bias, **{**how, "channels_last": False}), False)  # type: ignore[arg-type]


def packs(node: Node, *unused: object) -> Value | None:
    """The weights with the channels that adjacent threads read adjacent in memory; those of channels first are read one by one.
    The results come first, which a view's dims tell, unless they are as many as the channels that are added up."""
    *_, inner, out = node.inputs[1].shape.static
    axes = [*range(node.inputs[1].rank)]
    if 1 < inner != out:
        axes[-2:] = reversed(axes[-2:])
    return pack(node.inputs[1], layout=tuple((a, 1) for a in axes)) if node.attrs.channels_last else None  # type: ignore


class Axis(NamedTuple):
    """One axis of an image: elements of it and of the result, of a window; between windows, and between elements of one; of the
    padding in front; distances in memory of the image's elements and of the weights."""

    size: int = 1
    out: int = 1
    taps: int = 1
    stride: int = 1
    apart: int = 1
    low: int = 0
    x: int = 0
    w: int = 0

    def span(self, places: int) -> int:
        return (places - 1) * self.stride + (self.taps - 1) * self.apart + 1


@record
class DirectLaunch(Launch):
    """`along`: the axis along which a thread has `places`, `across`, the other one, and `deep`, a third in front of both. `last`:
    adjacent threads have adjacent channels, `channels` each; else they are adjacent along `across`. `shares`: threads that share
    all channels. `count`: threads, or those that share."""

    along: Axis = Axis()
    across: Axis = Axis()
    deep: Axis = Axis()
    last: bool = False
    channels: int = 1
    places: int = 1
    shares: int = 1
    count: int = 0


def conv_of(kernel: Kernel) -> Native | None:
    found = kernel.body[0] if kernel.body else None
    return found if isinstance(found, Native) and found.op == "conv" else None


def _of_last(native: Native) -> tuple[View, View, Sequence[int]]:
    """The image and the weights with channels last, and the order of the result's dims in which they are."""
    (x, w), rank, out = native.inputs[:2], len(native.inputs[0].dims), native.results[0][-1]
    order, weights = range(rank), range(rank)
    if not native.attrs.channels_last:  # type: ignore[union-attr]
        order, weights = (0, *range(2, rank), 1), (*range(2, rank), 1, 0)
    elif w.dims[-1] != out:
        weights = (*range(rank - 2), rank - 1, rank - 2)
    return _ordered(x, order), _ordered(w, weights), order


def _ordered(view: View, order: Sequence[int]) -> View:
    return View(view.buffer, tuple(view.dims[n] for n in order), tuple(view.strides[n] for n in order), view.offset)


def launch(kernel: Kernel, native: Native) -> DirectLaunch:
    (x, w, order), attrs = _of_last(native), native.attrs
    assert isinstance(attrs, ConvAttrs)
    (batch, *outs, results), channels, each = (native.results[0][n] for n in order), x.dims[-1], attrs.groups > 1
    facts = (attrs.each(name, len(outs)) for name in ("strides", "dilation", "low"))
    deep, rows, columns = [Axis(), Axis(), *map(Axis, x.dims[1:-1], outs, w.dims, *facts, x.strides[1:-1], w.strides)][-3:]
    last = x.strides[-1] == 1 and channels > 1
    along, across = (columns, rows) if last else (rows, columns)
    if len(outs) == 1 and not last:  # places of several images share weights
        along, batch = Axis(batch, batch, x=x.strides[0]), 1
    points, size = batch * deep.out * across.out * (results if each else 1), 1
    if last:
        size = CHANNELS if each else BYTES // max(v.buffer.dtype.itemsize for v in (x, w))
        own = not each or results == channels
        near = lambda n: own and channels % n == 0 and _near(x, n, -1) and (not each or _near(w, n, -1))  # noqa: E731
        while size > 1 and (not near(size) or along.span(1) * size > HELD or (each and points // size * along.out < BUSY)):
            size //= 2
    points, sums, shares = points // (size if each else 1), size if each else results, 1
    if last and not each:
        shares = min(WARP, 1 << (-(-channels // size) - 1).bit_length())
    while not (each or last) and shares < min(SHARES, channels) and points * along.out * shares < BUSIER:
        shares *= 2
    places = (PLACES if along.taps >= LONG else FEW_PLACES) if along.apart == 1 else 1
    while places > 1 and (
        along.span(places) * size > HELD or places * sums > SUMS or points * shares * -(-along.out // places) < BUSY
    ):
        places //= 2
    threads, count = THREADS if each or last else SHARES * WARP, points * -(-along.out // places)
    blocks = -(-count * shares // threads)
    return DirectLaunch(
        kernel, 1, threads, parts=blocks, along=along, across=across, deep=deep, last=last, channels=size, places=places,
        shares=shares, count=count,
    )  # fmt: skip


def _near(view: View, size: int, axis: int) -> bool:
    """Whether elements along the axis are adjacent, and `size` of them begin at multiples of `size`."""
    others = [s for n, s in enumerate(view.strides) if n != axis % len(view.dims) and view.dims[n] > 1]
    return view.strides[axis] == 1 and not any(n % size for n in (view.offset, *others))


class DirectWriter(CudaWriter):
    launch: DirectLaunch

    def coordinates(self) -> Iterator[str]:
        yield from ()

    def constants(self, native: Native) -> Iterator[str]:
        at, (x, w, order), bias = self.launch, _of_last(native), native.inputs[2:]
        results, each = native.results[0][order[-1]], native.attrs.groups > 1  # type: ignore[union-attr]
        for name, view in zip(("X", "W", "BIAS"), (*native.inputs, x)):
            yield f"#define WIDE_{name}(a) {CUDA.loads.get(view.buffer.dtype.name, '{0}').replace('[{1}]', '').format('a')}"
        values = {
            "EACH": int(each), "LAST": int(at.last), "NEAR": int(not each and _near(w, at.channels, -2)), "V": at.channels,
            "O": results, "P": at.places, "TEAM": at.shares, "POINTS": at.count, "CHANNELS": x.dims[-1], "THREADS": at.threads,
            "X_N": x.strides[0], "X_C": x.strides[-1], "W_C": w.strides[-2], "W_O": w.strides[-1], "BIASED": len(bias),
            "ROWS_AT_ONCE": min(at.across.taps, max(1, LOADED // (at.along.span(at.places) * at.channels))),
            "AT_ONCE": 4 if at.along.taps * at.across.taps == 1 else 1, "BIAS": bias[0].strides[0] if bias else 0,
        }  # fmt: skip
        for axis, sizes in (("A", at.along), ("B", at.across), ("D", at.deep)):
            values |= {f"{name.upper()}_{axis}": value for name, value in sizes._asdict().items()}
        yield f"constexpr int {', '.join(f'{name} = {value}' for name, value in values.items())};"

    def body(self) -> None:
        """`put`, which stores results of one place, and the convolution."""
        native = conv_of(self.kernel)
        assert native
        (x, w, order), at = _of_last(native), self.launch
        acc, axes, epilogue = native.acc, [v for v, _ in native.axes] or [Var("n") for _ in order], native.epilogue
        if acc is None:
            (out,) = native.outputs
            acc = Var("acc", out.buffer.dtype.compute)
            epilogue = (Store(out.buffer, linear(zip(axes, out.strides), out.offset), acc),)
        planes = ["n", "d", *("ba" if at.last else "ab")]
        places = {5: planes, 4: [planes[0], *planes[2:]], 3: ["n", "a"] if at.last else ["a", "b"]}[len(axes)]
        self.names.update(zip((axes[n] for n in order), [*places, "c"]))
        self.names[acc] = "values[v]"
        channel, size = axes[order[-1]], at.channels if native.attrs.groups > 1 else native.results[0][order[-1]]  # type: ignore
        head = f"const auto put = [&]({''.join(f'rlx_index {n}, ' for n in 'ndabc')}const float (&values)[SUMS]) {{"
        with self.scope([head]), self.alone():
            self.in_vectors(epilogue, (), channel, size, "c")
        image, weights, bias = [f"{self.names[v.buffer]} + {v.offset}" for v in (x, w, *native.inputs[2:], x)][:3]
        self.line(f"; rlx_convolution({image}, {weights}, {bias}, put);")

    def function(self, name: str, member: bool = False) -> str:
        native = conv_of(self.kernel)
        assert native
        header = (Path(__file__).parent / "direct.h").read_text()
        return "\n".join([*self.constants(native), header, super().function(name, member)])


__all__ = ["DirectLaunch", "DirectWriter", "claim", "conv_of", "launch", "packs", "split"]

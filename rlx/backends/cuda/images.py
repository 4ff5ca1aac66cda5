"""Left operands of convolutions, which bulk copies read from the image: a copy brings 64 channels of one pixel of each of many
windows, in the order of the rows of the product (im2col mode).

The image is what the strides of the operand say, not what the graph says: any dims by which the copies bring the same elements
are right. So padded images, slices, and views whose windows do not overlap need no rules of their own.
"""

from __future__ import annotations

import math

from rlx.backends.cuda.schedule import TensorMap
from rlx.ir.dtype import bf16, f16
from rlx.ir.kernel import Buffer, Contract, Kernel, Levels, Operand, const
from rlx.ir.layout import Layout, in_levels
from rlx.ir.node import Node
from rlx.records import record

BOX = 64  # channels
MOST_STEPS = 8  # pixels from window to window
REACH = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}  # pixels from the first of a window to others, by spatial dims
LEAST = 16  # rows and columns
ALIGNED = 8  # elements


def has_windows(kernel: Kernel) -> bool:
    """Whether it is a product whose left operand lies in levels."""
    return any(isinstance(s, Contract) and isinstance(s.a, Operand) and s.a.row_levels + s.a.col_levels for s in kernel.body)


@record
class Axis:
    """A spatial dim of an image: `places` windows, `step` pixels apart, of `window` elements, `dilation` pixels apart. Adjacent
    pixels are `stride` elements apart."""

    stride: int
    places: int = 1
    step: int = 1
    window: int = 1
    dilation: int = 1

    @property
    def beyond(self) -> int:
        """Pixels of a window behind its first one."""
        return (self.window - 1) * self.dilation

    @property
    def size(self) -> int:
        """Pixels that windows reach."""
        return (self.places - 1) * self.step + 1 + self.beyond


@record
class Image:
    """A matrix of windows: rows count these, columns are channels (innermost) of the pixels of a window. `axes`: innermost first.
    `order`: the axes whose windows the columns count, innermost first. Images of a batch are `stride` elements apart."""

    channels: int
    axes: tuple[Axis, ...]
    order: tuple[int, ...]
    batch: int
    stride: int

    def tensor(self, argument: int, first: int, dtype: str, rows: int) -> TensorMap:
        """For copies of so many rows."""
        strides = (*(2 * a.stride for a in self.axes), 2 * self.stride)
        dims = (self.channels, *(a.size for a in self.axes), self.batch)
        ends, steps = tuple(-a.beyond for a in self.axes), tuple(a.step for a in self.axes)
        return TensorMap(argument, first, dtype, dims, strides, (BOX, rows), ends, steps)

    def place(self, row: str, column: str) -> str:
        """In C, the coordinates of a box with this first row and column, and how far behind that its pixels are."""
        at, tap, found = f"({row})", f"({column}) / {self.channels}", [f"({column}) % {self.channels}"]
        for a in self.axes:
            own = f"{at} % {a.places}"
            found.append(f"{own} * {a.step}" if a.places > 1 else "0")
            at = f"{at} / {a.places}" if a.places > 1 else at
        offsets = ["0"] * len(self.axes)
        for n in self.order:
            offsets[n] = f"{tap} % {self.axes[n].window} * {self.axes[n].dilation}"
            tap = f"{tap} / {self.axes[n].window}"
        return ", ".join([*found, at, *(f"(uint16_t)({x})" for x in offsets)])


def image_of(o: Operand, m: int, k: int) -> Image | None:
    """The image whose windows are the rows of the operand [m, k]; None: copies do not bring them."""
    if o.col_stride != 1 or o.dtype not in (f16, bf16) or not o.row_levels + o.col_levels:
        return None
    rows, columns = _axes(m, o.row_stride, o.row_levels), _axes(k, 1, o.col_levels)
    run, taps = columns[0][0], columns[1:]
    channels = math.gcd(run, rows[0][1]) if rows[0][1] < run else run
    if channels < run:  # adjacent pixels of a window, which others have, too
        taps.insert(0, (run // channels, channels))
    found, order = [Axis(apart, count) for count, apart in rows], list[int]()
    for count, apart in taps:
        fits = [(n, joined) for n, a in enumerate(found) if n not in order and (joined := _joined(a, count, apart))]
        if fits:
            n, joined = min(fits, key=lambda x: x[1].step * x[1].dilation)
            found[n] = joined
        else:
            n = len(found)
            found.append(Axis(apart, window=count))
        order.append(n)
    # the last rows are images of a batch, unless they are windows along an axis
    batch = None if len(rows) - 1 in order or len(found) == 1 else found.pop(len(rows) - 1)
    order = [n - (batch is not None and n >= len(rows)) for n in order]
    count, stride = (batch.places, batch.stride) if batch else (1, found[-1].stride * found[-1].size)
    made = Image(channels, tuple(found), tuple(order), count, stride)
    return made if _has_copies(made) else None


def _has_copies(x: Image) -> bool:
    """Whether bulk copies can bring its boxes."""
    strides = (*(a.stride for a in x.axes), x.stride)
    if x.channels % BOX or any(s % ALIGNED or not 0 < s < 1 << 39 for s in strides) or len(x.axes) not in REACH:
        return False
    return all(a.beyond < REACH[len(x.axes)] and a.step <= MOST_STEPS and a.size < 1 << 31 for a in x.axes)


def _axes(size: int, stride: int, found: Levels) -> list[tuple[int, int]]:
    """(count, stride) of each level, innermost first."""
    counts, strides = [count for count, _ in found], [stride, *(s for _, s in found)]
    return list(zip((*counts, size // math.prod(counts)), strides))


def _joined(a: Axis, window: int, apart: int) -> Axis | None:
    """The axis, whose windows have so many elements so far apart."""
    stride = math.gcd(a.stride, apart)
    step, dilation = a.stride // stride, apart // stride
    return Axis(stride, a.places, step, window, dilation) if step <= MOST_STEPS else None


def reads_windows(arch: str, node: Node, layout: Layout) -> bool:
    """Target.in_place: of products on tensor cores whose right operand is copied in bulk, too. `layout`: of the left one."""
    left, right = node.inputs[:2]
    if arch != "sm_90a" or node.op.name != "flatten_matmul" or right.dtype != left.dtype or right.rank != 2:
        return False
    facts = node.op.contract(node.attrs, left.shape, right.shape)  # type: ignore[misc]
    if len(facts.a_sum) < 2:
        return False
    (row, row_levels), (column, col_levels) = (in_levels(layout, left.shape.static, a) for a in (facts.a_rows, facts.a_sum))
    (k, n), m = right.shape.static, math.prod(left.shape.static[a] for a in facts.a_rows)
    if m < LEAST or n < LEAST or n % ALIGNED or layout.offset % ALIGNED:
        return False
    buffer = Buffer("image", left.dtype, left.shape.num_elements)
    return image_of(Operand(buffer, const(0), row, column, row_levels=row_levels, col_levels=col_levels), m, k) is not None


__all__ = ["Image", "has_windows", "image_of", "reads_windows"]

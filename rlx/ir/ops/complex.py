"""Complex numbers.

c64 [...] is stored as f32 [..., 2], real part first. rlx.compiler.pairs rewrites c64 to such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.contexts import Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import c64, f32
from rlx.ir.kernel import Expr
from rlx.ir.layout import Layout
from rlx.ir.node import Node, Value, constant
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.rules import joined, pointwise
from rlx.ir.ops.view import broadcast_to
from rlx.ir.shape import Shape


def _no_element(ctx: Lowering, node: Node, result: int, coords: Coords) -> Expr:
    raise AssertionError(f"{node} has strides wherever it is left in a graph")  # the pass pairs sees to it


def _complex(attrs: object, re: np.ndarray, im: np.ndarray) -> np.ndarray:
    re, im = np.broadcast_arrays(re, im)
    out = np.empty(re.shape, np.complex64)
    out.real, out.imag = re, im
    return out


def _complex_shape(attrs: object, x: Shape) -> Shape:
    if x.dtype != f32 or not x.rank or x.dims[-1] != 2:
        raise ShapeError(f"pairs are f32 with a last dim of 2, got {x}")
    return Shape(x.dims[:-1], c64)


def _complex_strided(attrs: object, dims: Sequence[int], out: Sequence[int], layout: Layout, result: int = 0) -> Layout | None:
    *strides, last = layout.strides
    if last != 1 or layout.offset % 2 or any(s % 2 for s, d in zip(strides, out) if d != 1):
        return None
    return Layout(tuple(s // 2 for s in strides), layout.offset // 2)


view_as_real = op(
    "view_as_real", kind=Kind.VIEW, dtypes="c", infer=lambda attrs, x: Shape((*x.dims, 2), f32), element=_no_element,
    reference=lambda attrs, x: np.stack([x.real, x.imag], axis=-1), rows=lambda attrs, operand, axis, x: axis,
    strided=lambda a, dims, out, lay, result=0: Layout((*(2 * s for s in lay.strides), 1), 2 * lay.offset),
    samples=(Sample(((3, 17),)), Sample(((),)), Sample(((0, 2),))),
    doc="A view of c64 [...] as f32 [..., 2]: real and imaginary parts.",
)  # fmt: skip
view_as_complex = op(
    "view_as_complex", kind=Kind.VIEW, infer=_complex_shape, element=_no_element, strided=_complex_strided,
    reference=lambda attrs, x: _complex(attrs, x[..., 0], x[..., 1]),
    rows=lambda attrs, operand, axis, x: axis if axis < x.rank - 1 else None,
    samples=tuple(Sample((dims,), dtypes=("f32",)) for dims in ((3, 17, 2), (2,), (0, 2))),
    doc="A view of f32 [..., 2] as c64 [...]: the last dim holds the real and imaginary parts.",
)  # fmt: skip


def _parts_shape(attrs: object, x: Shape) -> Shape:
    return x.with_dtype(f32)


def _joined_shape(attrs: object, re: Shape, im: Shape) -> Shape:
    if (re.dtype, im.dtype) != (f32, f32):
        raise DTypeError(f"real and imaginary part are f32, got {re} and {im}; cast them: x.astype('f32')")
    return pointwise(attrs, re, im).with_dtype(c64)


COMPLEX = (Sample(((3, 17),)), Sample(((),)), Sample(((33,),)))
real = op(
    "real", kind=Kind.COMPOSITE, dtypes="c", infer=_parts_shape, reference=lambda attrs, x: x.real, samples=COMPLEX,
    decompose=lambda attrs, x: view_as_real(x)[..., 0], doc="The real part of c64, f32.",
)  # fmt: skip
imag = op(
    "imag", kind=Kind.COMPOSITE, dtypes="c", infer=_parts_shape, reference=lambda attrs, x: x.imag, samples=COMPLEX,
    decompose=lambda attrs, x: view_as_real(x)[..., 1], doc="The imaginary part of c64, f32.",
)  # fmt: skip
conj = op(
    "conj", kind=Kind.COMPOSITE, dtypes="c", infer=lambda attrs, x: x, reference=lambda attrs, x: np.conj(x), samples=COMPLEX,
    decompose=lambda attrs, x: view_as_complex(view_as_real(x) * constant([1.0, -1.0])), doc="Complex conjugate.",
)  # fmt: skip


def _make(attrs: object, re: Value, im: Value) -> Value:
    dims = pointwise(attrs, re.shape, im.shape).dims
    return view_as_complex(joined(*(x if x.dims == dims else broadcast_to(x, dims) for x in (re, im))))


complex = op(
    "complex", kind=Kind.COMPOSITE, infer=_joined_shape, arity=(2, 2), reference=_complex, decompose=_make,
    samples=tuple(Sample(shapes, dtypes=("f32", "f32")) for shapes in (((3, 17), (3, 17)), ((4, 1), (5,)), ((), (7,)))),
    doc="A c64 tensor from its real and imaginary parts, both f32.",
)  # fmt: skip

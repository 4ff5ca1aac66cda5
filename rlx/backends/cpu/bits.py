"""Kernels that only move elements of 16-bit and 8-bit floats move their bits: they are then integers of the same width. A load
would widen each to f32 and a store round it again, which takes longer than the copy and quiets NaNs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rlx.ir.dtype import DType, u8, u16
from rlx.ir.nest import changed, distinct, operands, postorder, stores

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Check, Const, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, const, expressions, k, walk,
)  # fmt: skip

PLAIN = (Loop, Store, Let, Check)  # statements whose expressions `expressions` lists


def moved_as_bits(kernel: Kernel) -> Kernel:
    """The kernel with integers in place of narrow floats, if it computes with none of them."""
    held = (*kernel.buffers, *kernel.locals)
    if not any(x.dtype.is_narrow for x in held) or not _only_moves(kernel.body):
        return kernel
    bits = {x: replace(x, dtype=_integer(x.dtype)) for x in held if x.dtype.is_narrow}

    def stored(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Store) or s.buffer not in bits:
            return None
        return (replace(s, buffer=bits[s.buffer], value=_bits(s.value, s.buffer.dtype, bits)),)

    buffers, own = (tuple(bits.get(x, x) for x in some) for some in (kernel.buffers, kernel.locals))
    return replace(kernel, buffers=buffers, locals=own, body=changed(kernel.body, stored))


def _integer(dtype: DType) -> DType:
    return u16 if dtype.bits == 16 else u8


def _only_moves(body: tuple[Stmt, ...]) -> bool:
    """Whether every narrow float is stored as it was loaded, or chosen from several by conditions on other values."""
    if not all(isinstance(s, PLAIN) for s in walk(body) if isinstance(s, Stmt)):
        return False
    narrow = [s for s in stores(body) if s.buffer.dtype.is_narrow]
    choices: dict[int, Expr] = {}
    for s in narrow:
        for e in postorder(s.value, choices, _chosen):
            choices[id(e)] = e
            if not _is_moved(e, s.buffer.dtype):
                return False
    others = [e for e in distinct(expressions(body)) if id(e) not in choices]
    read = [x for e in others for x in operands(e)] + [x for s in walk(body) for x in _read_by(s)]
    read += [x for e in choices.values() for x in (e.args[:1] if isinstance(e, Alu) else operands(e))]
    return not any(isinstance(x, Load) and x.buffer.dtype.is_narrow for x in read) and choices.keys().isdisjoint(
        id(x) for x in read if isinstance(x, Alu)
    )


def _chosen(e: Expr) -> tuple[Expr, ...]:
    """The values that a select chooses from; none of other expressions."""
    return e.args[1:] if isinstance(e, Alu) and e.op == "select" else ()


def _is_moved(e: Expr, dtype: DType) -> bool:
    """Whether this part of a choice is an element of that type, a constant that it holds, or a select."""
    if isinstance(e, Const):
        return dtype.bits == 16 or float(dtype.numpy.type(e.value)) == e.value
    return bool(_chosen(e)) or (isinstance(e, Load) and e.buffer.dtype == dtype)


def _read_by(s: object) -> tuple[Expr, ...]:
    """The expressions that a statement reads, without the element that it stores in narrow floats."""
    if isinstance(s, Store):
        own = () if s.buffer.dtype.is_narrow else (s.value,)
        return (*own, s.index, *(() if s.guard is None else (s.guard,)))
    if isinstance(s, Let | Check):
        return (s.value if isinstance(s, Let) else s.ok,)
    if isinstance(s, Loop):
        return (*(r.value for r in s.reduces), *(x for c in s.carries for x in (c.init, c.next)))
    return ()


def _bits(value: Expr, dtype: DType, bits: Mapping[Buffer | Local, Buffer | Local]) -> Expr:
    """The element as bits. A load that its guard skips gives those of 0.0."""
    made: dict[int, Expr] = {}
    for e in postorder(value, made, _chosen):
        if isinstance(e, Const):
            number = np.float32(e.value).astype(dtype.numpy)
            made[id(e)] = const(number.view(_integer(dtype).numpy), _integer(dtype))
        elif isinstance(e, Load):
            made[id(e)] = Load(bits[e.buffer], e.index, e.guard)
        else:
            condition, *ways = operands(e)
            made[id(e)] = k.select(condition, *(made[id(x)] for x in ways))
    return made[id(value)]

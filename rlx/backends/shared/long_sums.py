"""Long f32 sums in blocks: each block is summed in f32, the block sums in f64, so that the error does not grow with the length.

A plain sum in f32 loses digits in proportion to its length (7e-4 of a sum of 1e7 numbers). In blocks the relative error of a sum
of numbers of one sign is at most BLOCK / 2**24, whatever the length, and usually a few units of the last place. Every backend
keeps to this bound: a schedule (Target.schedule) for one that adds numbers in order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlx.backends.shared.nest import changed, renamed, substitute
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.kernel import RUNNING, Expr, Kernel, Let, Loop, Reduce, Stmt, Var, alu, const, k

SHORT = 8192  # up to this length a sum is not split: covers the rows of most networks
BLOCK = 2048


def long_sums(kernel: Kernel) -> Kernel:
    """The kernel with its long sums in blocks, those of serial loops in f64."""
    body = changed(kernel.body, _long)
    return kernel if body is kernel.body else replace(kernel, body=body)


def in_f64(op: str, dtype: DType, length: int) -> bool:
    """True if the reduction has too many partial results to add them in f32."""
    return op == "add" and dtype == f32 and length > SHORT


def _long(loop: Stmt) -> list[Stmt] | None:
    if not isinstance(loop, Loop) or loop.carries or not loop.reduces or any(r.op not in RUNNING for r in loop.reduces):
        return None
    if loop.vector:
        whole = not any(in_f64(r.op, r.result.dtype, loop.extent) for r in loop.reduces)
        return None if whole else in_blocks(replace(loop, body=changed(loop.body, _long)))
    nest = _nest(loop)
    total, *others = loop.reduces
    if others or not in_f64(total.op, total.result.dtype, math.prod(inner.extent for inner in nest)):
        return None
    wide: list[Stmt] = []
    for inner in reversed(nest):
        value = k.cast(inner.reduces[0].value if not wide else wide[0].reduces[0].result, f64)  # type: ignore[union-attr]
        body = (*changed(inner.body[: len(inner.body) - len(wide)], _long), *wide)
        wide = [replace(inner, body=body, reduces=(Reduce(Var("sum", f64), total.op, value),))]
    return [*wide, Let(total.result, k.cast(wide[0].reduces[0].result, f32))]  # type: ignore[union-attr]


def _nest(loop: Loop) -> list[Loop]:
    """The loops, from this one on, that are one reduction over several axes: each sums what the loop at its end sums."""
    nest = [loop]
    while isinstance(last := (nest[-1].body or (None,))[-1], Loop) and len(last.reduces) == 1 and not last.carries:
        reduce, outer = last.reduces[0], nest[-1].reduces[0]
        if outer.value is not reduce.result or outer.op != reduce.op:
            break
        nest.append(last)
    return nest


def in_blocks(loop: Loop) -> list[Stmt]:
    """The loop as blocks of iterations, and the rest. f32 sums are carried from block to block in f64, other reductions in their
    own dtype."""
    block, (blocks, rest) = Var("block"), divmod(loop.extent, BLOCK)
    inner = part(loop, k.mul(block, BLOCK), BLOCK)
    wide = [f64 if in_f64(r.op, r.result.dtype, loop.extent) else r.result.dtype for r in loop.reduces]
    outer = [Reduce(Var("part", d), r.op, k.cast(r.result, d)) for r, d in zip(inner.reduces, wide)]
    made: list[Stmt] = [Loop(block, blocks, (inner,), reduces=tuple(outer))]
    totals: list[Expr] = [r.result for r in outer]
    if rest:
        made.append(last := part(loop, const(blocks * BLOCK), rest))
        totals = [alu(r.op, t, k.cast(r.result, t.dtype)) for r, t in zip(last.reduces, totals)]
    return made + [Let(r.result, k.cast(t, r.result.dtype)) for r, t in zip(loop.reduces, totals)]


def part(loop: Loop, first: Expr, extent: int) -> Loop:
    """`extent` iterations of the loop, from iteration `first` on, with variables of their own."""
    at = Var(loop.var.name)
    body, reduces = substitute((loop.body, loop.reduces), {**renamed(loop), loop.var: k.add(first, at)})
    return replace(loop, var=at, extent=extent, body=body, reduces=reduces)

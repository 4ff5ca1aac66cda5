"""Long f32 sums in blocks: each block is summed in f32, the block sums in f64, so that the error does not grow with the length.
Long running totals are f64, or begin each block with the f64 total of those before it.

A plain sum in f32 loses digits in proportion to its length (7e-4 of a sum of 1e7 numbers). In blocks the relative error of a sum
of numbers of one sign is at most BLOCK / 2**24, whatever the length, and usually a few units of the last place. Every backend
keeps to this bound: a schedule (Target.schedule) for one that adds numbers in order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlx.ir.dtype import DType, f32, f64
from rlx.ir.kernel import RUNNING, Alu, Carry, Expr, Kernel, Let, Loop, Reduce, Stmt, Var, alu, const, k
from rlx.ir.nest import changed, renamed, substitute

SHORT = 8192  # up to this length a sum is not split: covers the rows of most networks
BLOCK = 2048


def long_sums(kernel: Kernel) -> Kernel:
    """The kernel with its long sums in blocks, those of serial loops in f64."""
    body = changed(kernel.body, _long)
    return kernel if body is kernel.body else replace(kernel, body=body)


def long_totals(kernel: Kernel) -> Kernel:
    """The kernel with its long f32 running totals in f64, rounded where they are read."""
    body, rounded = list[Stmt](), dict[int, Expr]()
    for s in kernel.body:
        if isinstance(s, Loop) and len(s.carries) == 1 and (found := _long_total(s)):
            (c,), (op, added), total = s.carries, found, Var("total", f64)
            following = alu(op, total, k.cast(added, f64))
            rounded |= {id(c.var): k.cast(total, f32), id(c.next): k.cast(following, f32)}
            s = replace(s, carries=(Carry(total, k.cast(c.init, f64), following),))
        body.append(substitute(s, {}, rounded))
    return replace(kernel, body=tuple(body)) if rounded else kernel


def totals_in_blocks(loop: Loop) -> tuple[Stmt, ...]:
    """The loop in blocks, if it carries one long total in lanes: each is in f32 and begins with that of those before it, in f64.
    The addends or factors of a block are combined in f64 once more: rounding errors of products add up from block to block, and
    the sum of a block alone may be no f32 where all totals are."""
    if len(loop.carries) != 1 or not loop.in_lanes or not (found := _long_total(loop)):
        return (loop,)
    (c,), (op, added), block, before = loop.carries, found, Var("block"), Var("before", f64)

    def block_from(first: Expr, extent: int) -> tuple[Let, Loop]:
        at, start, total = Var(loop.var.name), Var("start", f32), Var(c.var.name, f32)
        body, following, own = substitute((loop.body, c.next, added), {loop.var: k.add(first, at), c.var: total})
        own = k.cast(own, f64)
        reduces, carries = (Reduce(Var("own", own.dtype), op, own),), (Carry(total, start, following),)
        return Let(start, k.cast(before, f32)), Loop(at, extent, body, vector=True, reduces=reduces, carries=carries)

    blocks, rest = divmod(loop.extent, BLOCK)
    begin, inner = block_from(k.mul(block, BLOCK), BLOCK)
    carry = Carry(before, k.cast(c.init, f64), alu(op, before, k.cast(inner.reduces[0].result, f64)))
    whole = Loop(block, blocks, (begin, inner), carries=(carry,))
    return (whole, *(block_from(const(loop.extent - rest), rest) if rest else ()))


def _long_total(loop: Loop) -> tuple[str, Expr] | None:
    """The operation and the addend or factor of the total, where that is f32 and rounded too often."""
    (c,) = loop.carries
    if loop.extent <= SHORT or c.var.dtype != f32 or c.added is None or not isinstance(c.next, Alu):
        return None
    return (c.next.op, c.added) if c.next.op in ("add", "mul") else None


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

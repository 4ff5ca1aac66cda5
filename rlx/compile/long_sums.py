"""Long f32 sums in blocks: each block is summed in f32, the block sums in f64, so that the error does not grow with the length.

A plain sum in f32 loses digits in proportion to its length (7e-4 of a sum of 1e7 numbers). In blocks the relative error of a sum
of numbers of one sign is at most BLOCK / 2**24, whatever the length, and usually a few units of the last place.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir import kernel as K
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.kernel import k

SHORT = 8192  # up to this length a sum is not split: covers the rows of most networks
BLOCK = 2048


def in_f64(op: str, dtype: DType, length: int) -> bool:
    """True if the reduction has too many partial results to add them in f32."""
    return op == "add" and dtype == f32 and length > SHORT


def in_blocks(loop: Callable[[K.Expr, int], K.Loop], length: int) -> tuple[list[K.Stmt], list[K.Var]]:
    """Statements that reduce over `length` iterations, and the results. `loop(first, extent)` makes the loop over `extent`
    iterations from `first` on. f32 sums are carried from block to block in f64, other reductions in their own dtype."""
    block, (blocks, rest) = K.Var("block"), divmod(length, BLOCK)
    inner = loop(k.mul(block, BLOCK), BLOCK)
    wide = [f64 if in_f64(r.op, r.result.dtype, length) else r.result.dtype for r in inner.reduces]
    outer = [K.Reduce(K.Var("part", d), r.op, k.cast(r.result, d)) for r, d in zip(inner.reduces, wide)]
    made: list[K.Stmt] = [K.Loop(block, blocks, (inner,), reduces=tuple(outer))]
    totals: list[K.Expr] = [r.result for r in outer]
    if rest:
        made.append(last := loop(k.const(blocks * BLOCK), rest))
        totals = [K.alu(r.op, t, k.cast(r.result, t.dtype)) for r, t in zip(last.reduces, totals)]
    results = [K.Var("r", r.result.dtype) for r in inner.reduces]
    made += [K.Let(v, k.cast(t, v.dtype)) for v, t in zip(results, totals)]
    return made, results


__all__ = ["SHORT", "in_blocks", "in_f64"]

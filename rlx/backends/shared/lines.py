"""Extremes and sorts along an axis as plain loops, for renderers that have nothing faster.

NaN orders above every number.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.ir.dtype import bool_, index_
from rlx.ir.kernel import EXTREMES, Carry, Contract, Expr, Kernel, Let, Load, Local, Loop, Sort, Stmt, Store, Var, const, k
from rlx.ir.nest import changed, substitute


def in_loops(kernel: Kernel, extremes: bool = True) -> Kernel:
    """The same function without Sort, and, with `extremes`, without argmax and argmin."""
    kept = list(kernel.locals)
    per_row = any(isinstance(s, Contract) for s in kernel.body)

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        if isinstance(s, Sort):
            return bitonic(replace(s, body=changed(s.body, change)), kept, per_row)
        if extremes and isinstance(s, Loop) and any(r.op in EXTREMES for r in s.reduces):
            return carried(replace(s, body=changed(s.body, change)))
        return None

    body = changed(kernel.body, change)
    return kernel if body is kernel.body else replace(kernel, locals=tuple(kept), body=body)


def is_nan(x: Expr) -> Expr:
    return k.ne(x, x) if x.dtype.kind == "f" else const(False, bool_)


def better(op: str, value: Expr, best: Expr) -> Expr:
    """True if a later element replaces the best. NaN beats every number, and the first NaN stays."""
    worse = k.le(value, best) if op == "argmax" else k.le(best, value)
    return k.and_(k.not_(worse), k.eq(best, best)) if value.dtype.kind == "f" else k.not_(worse)


def carried(loop: Loop) -> tuple[Stmt, ...]:
    """The loop with two carried values, the best so far and its iteration, for each argmax and argmin."""
    found = [r for r in loop.reduces if r.op in EXTREMES]
    others = tuple(r for r in loop.reduces if r.op not in EXTREMES)
    if not loop.extent:
        return (replace(loop, reduces=others), *(Let(r.result, const(0)) for r in found))
    carries = list(loop.carries)
    for r in found:
        best, first = Var("best", r.value.dtype), substitute(r.value, {loop.var: const(0)})
        take = better(r.op, r.value, best)
        if loop.body:  # the value may depend on variables that only the body binds
            first, take = const(0, best.dtype), k.or_(k.eq(loop.var, 0), take)
        carries.append(Carry(best, first, k.select(take, r.value, best)))
        carries.append(Carry(r.result, const(0), k.select(take, loop.var, r.result)))
    return (replace(loop, vector=False, reduces=others, carries=tuple(carries)),)


def bitonic(s: Sort, kept: list[Local], per_row: bool) -> tuple[Stmt, ...]:
    """K. E. Batcher's bitonic network over a power of two of (value, position) pairs in two Locals, which `kept` receives.
    Positions from n on are padding and sort last. One loop over all passes: merges of `size` = 2, 4, 8 …, each in steps
    `size`/2 … 2, 1."""
    stages = max(s.n - 1, 0).bit_length()
    full = 1 << stages
    values, places = Local("values", s.value.dtype, full, per_row), Local("places", index_, full, per_row)
    kept += [values, places]
    j = Var("j")
    value = substitute(s.value, {}, guard=k.lt(s.i, const(s.n)))
    fill = Loop(s.i, full, (Store(values, s.i, value), Store(places, s.i, s.i)))
    size, step = Var("size"), Var("step")
    low = k.add(k.mul(k.mul(const(2), step), k.div(j, step)), k.rem(j, step))
    high = k.add(low, step)
    a, b, at_a, at_b = Load(values, low), Load(values, high), Load(places, low), Load(places, high)
    real_a, real_b = k.lt(at_a, const(s.n)), k.lt(at_b, const(s.n))
    first = lambda v, at, rv, w, at_w, rw: k.select(k.xor(rv, rw), rv, _precedes(v, at, w, at_w, s.descending))  # noqa: E731
    upward = k.eq(k.rem(k.div(low, size), const(2)), const(0))
    swap = k.select(upward, first(b, at_b, real_b, a, at_a, real_a), first(a, at_a, real_a, b, at_b, real_b))
    exchange = Loop(j, full // 2, (
        Store(values, low, k.select(swap, b, a)), Store(values, high, k.select(swap, a, b)),
        Store(places, low, k.select(swap, at_b, at_a)), Store(places, high, k.select(swap, at_a, at_b)),
    ), vector=True)  # fmt: skip
    ended = k.eq(step, const(1))
    passes = Loop(Var("t"), stages * (stages + 1) // 2, (exchange,), carries=(
        Carry(size, const(2), k.select(ended, k.mul(size, const(2)), size)),
        Carry(step, const(1), k.select(ended, size, k.div(step, const(2)))),
    ))  # fmt: skip
    out = Loop(s.to, s.kept, substitute(s.body, {s.held: Load(values, s.to), s.origin: Load(places, s.to)}))
    return (fill, passes, out) if stages else (fill, out)


def _precedes(a: Expr, at_a: Expr, b: Expr, at_b: Expr, descending: bool) -> Expr:
    """True where (a, at_a) sorts before (b, at_b): by value, NaN greatest, then by position. A total order."""
    ahead = k.lt(b, a) if descending else k.lt(a, b)
    tie = k.eq(a, b)
    if a.dtype.kind == "f":
        nan_a, nan_b = is_nan(a), is_nan(b)
        ahead = k.or_(ahead, k.and_(nan_a, k.not_(nan_b)) if descending else k.and_(nan_b, k.not_(nan_a)))
        tie = k.or_(tie, k.and_(nan_a, nan_b))
    return k.or_(ahead, k.and_(tie, k.lt(at_a, at_b)))

"""Rows of products whose factors the next product multiplies by (rlx.compiler.factors): sums over parts of a row that one leaves,
and factors of rows that the other makes of them."""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cuda.vectors import width
from rlx.ir.dtype import f32
from rlx.ir.kernel import Alu, Check, Contract, Expr, Kernel, Let, Load, Local, Loop, Store, Var, coefficient, const, walk
from rlx.ir.nest import substitute
from rlx.records import record

PART = 64  # columns of a part: as many as a warp of the epilogue has of a row at once
LEAST_ROWS, LEAST_COLUMNS = 128, 2048  # of a product whose norm takes longer than parts and factors do


@record
class Parts:
    """Sums of `terms`, which the epilogue stores, over PART columns each: the statement `put` stores the `total` of a `part`."""

    terms: Local
    part: Var
    total: Var
    put: Store


def parts_of(kernel: Kernel, c: Contract) -> Parts | None:
    """The sums that the statements of a row store, if they do nothing else."""
    loop = c.rows[0]
    if len(c.rows) != 1 or len(kernel.locals) != 1 or not isinstance(loop, Loop) or len(loop.body) != 2:
        return None
    (terms,), (sums, put) = kernel.locals, loop.body
    if not isinstance(sums, Loop) or not isinstance(put, Store) or sums.body or len(sums.reduces) != 1:
        return None
    (total,) = sums.reduces
    plain = total.op == "add" and total.value.dtype == f32 and put.value is total.result and put.guard is None
    if not plain or loop.carries or loop.reduces or sums.carries or sums.extent != PART:
        return None
    loads = [x for x in walk((c.epilogue, c.rows)) if isinstance(x, Load) and x.buffer is terms]
    stored = [(s.index, s.guard) for s in c.epilogue if isinstance(s, Store) and s.buffer is terms]
    steps = [(coefficient(x.index, loop.var), coefficient(x.index, sums.var)) for x in loads]
    if loads != [total.value] or steps != [(PART, 1)] or stored != [(c.j, None)]:
        return None
    whole = loop.extent * PART == c.n and c.m % 16 == 0
    vectors = all(isinstance(s, Let | Store | Check) for s in c.epilogue) and width(c.epilogue, (), c.j, c.n) > 1
    alone = not (kernel.limits or kernel.grid) and c.also is None and c.count is None
    return Parts(terms, loop.var, total.result, put) if whole and vectors and alone else None


def factor_of(c: Contract) -> Var | None:
    """The factor of a row, which the last statement before it makes of one sum: the epilogue multiplies sums by it, and does
    nothing else with it. None: there is no such one."""
    (first, *lets), sums = c.before, [x for x in (c.acc, c.also) if x is not None]
    total = isinstance(first, Loop) and not (first.body or first.carries) and [r.op for r in first.reduces] == ["add"]
    if not total or not all(isinstance(s, Let) and s.var.dtype == f32 for s in lets):
        return None
    own = {first.reduces[0].result, *(s.var for s in lets)}  # type: ignore[union-attr]
    factor: Var = c.before[-1].var  # type: ignore[union-attr]
    rest = substitute(c.epilogue, {}, _scaled(c, factor, const(0.0, f32)))
    return factor if rest is not c.epilogue and own.union(sums).isdisjoint(walk(rest)) else None


def unscaled(c: Contract) -> Contract:
    """The product whose sums have been multiplied by the factors of their rows before the epilogue."""
    factor = factor_of(c) if c.before else None
    return c if factor is None else replace(c, epilogue=substitute(c.epilogue, {}, _scaled(c, factor)))


def _scaled(c: Contract, factor: Var, to: Expr | None = None) -> dict[int, Expr]:
    """By id, the products of sums with the factor: `to`, or else the sum itself."""
    found = (x for x in walk(c.epilogue) if isinstance(x, Alu) and x.op == "mul" and x.args[1] is factor)
    return {id(x): to or x.args[0] for x in found if x.args[0] in (c.acc, c.also)}


__all__ = ["LEAST_COLUMNS", "LEAST_ROWS", "PART", "Parts", "factor_of", "parts_of", "unscaled"]

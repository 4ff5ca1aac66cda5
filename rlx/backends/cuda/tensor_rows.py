"""Rows of products whose factors the next product multiplies by (rlx.compiler.factors): sums over parts of a row that one leaves,
and factors of rows that the other makes of them."""

from __future__ import annotations

from rlx.backends.cuda.vectors import width
from rlx.ir.dtype import f32
from rlx.ir.kernel import Contract, Kernel, Let, Load, Local, Loop, Store, Var, coefficient, walk
from rlx.records import record

WIDTHS = (32, 64)  # columns of a part: as many as a warp of the epilogue has of a row at once, or half of them
LEAST_ROWS = 128  # of products whose tiles are as tall
LONG_ROW = 2048  # columns of rows in the wider parts


@record
class Parts:
    """Sums of `terms`, which the epilogue stores, over `width` columns each: the statement `put` stores the `total` of a `part`."""

    terms: Local
    width: int
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
    if not plain or loop.carries or loop.reduces or sums.carries or sums.extent not in WIDTHS:
        return None
    loads = [x for x in walk((c.epilogue, c.rows)) if isinstance(x, Load) and x.buffer is terms]
    stored = [(s.index, s.guard) for s in c.epilogue if isinstance(s, Store) and s.buffer is terms]
    steps = [(coefficient(x.index, loop.var), coefficient(x.index, sums.var)) for x in loads]
    if loads != [total.value] or steps != [(sums.extent, 1)] or stored != [(c.j, None)]:
        return None
    whole = loop.extent * sums.extent == c.n and c.m % 16 == 0 and c.n % max(WIDTHS) == 0
    vectors = all(isinstance(s, Let | Store) for s in c.epilogue) and width(c.epilogue, (), c.j, c.n) > 1
    alone = not (kernel.limits or kernel.grid) and c.also is None and c.count is None
    return Parts(terms, sums.extent, loop.var, total.result, put) if whole and vectors and alone else None


def factor_of(c: Contract) -> Var | None:
    """The one result of the statements before a row that its elements read: made of a sum. None: they are others."""
    first, *lets = c.before
    found = {s.var for s in lets if isinstance(s, Let)}.intersection(walk(c.epilogue))
    sums = isinstance(first, Loop) and not (first.body or first.carries) and [r.op for r in first.reduces] == ["add"]
    if not sums or len(found) != 1 or not all(isinstance(s, Let) and s.var.dtype == f32 for s in lets):
        return None
    return found.pop() if first.reduces[0].result not in {*walk(c.epilogue)} else None  # type: ignore[union-attr]


__all__ = ["LEAST_ROWS", "LONG_ROW", "WIDTHS", "Parts", "factor_of", "parts_of"]

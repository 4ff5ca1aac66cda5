"""Contractions as plain loops, for renderers without a tile generator: every element of the result is a sum over k."""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.shared.packed import panel as panel_of
from rlx.errors import CompileError
from rlx.ir.kernel import Computed, Contract, Expr, Kernel, Let, Load, Loop, Operand, Reduce, Stmt, Var, alu, k


def without_contract(kernel: Kernel) -> Kernel:
    """The same function without a Contract. The matrix rows become a grid dimension. The columns become another one, unless some
    statement works on a whole row. So a limit on rows is a limit of the grid, and memory private to a row (Local.per_row) is
    private to a grid point. CompileError: a grid point has rows of its own (Contract.count), a number known at run time only."""
    found = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if found is None:
        return kernel
    if found.count is not None:
        raise CompileError(f"kernel {kernel.name!r}: a target that claims segment_matmul renders groups of rows itself")
    step, dtype = Var("k"), found.acc.dtype
    before = (*found.before, *(_row(found.a, found.i) if isinstance(found.a, Computed) else ()))
    inside, a = _element(found.a, found.i, step, found.k)
    again = _row(found.b, step) if isinstance(found.b, Computed) else ()  # b is recomputed for every product that is summed
    body, products = (*inside, *again), list[Reduce]()
    for column, acc in ((found.j, found.acc), (k.add(found.j, found.n), found.also)):
        if acc is not None:
            inside_b, b = _element(found.b, step, column, found.k)
            body, products = (*body, *inside_b), [*products, Reduce(acc, "add", k.mul(k.cast(a, dtype), k.cast(b, dtype)))]
    element = (Loop(step, found.k, body, vector=not body, reduces=tuple(products)), *found.epilogue)
    grid = (*kernel.grid, (found.i, found.m))
    if not (found.rows or found.before or before[1:]):
        return replace(kernel, grid=(*grid, (found.j, found.n)), body=(*before, *element))
    return replace(kernel, grid=grid, body=(*before, Loop(found.j, found.n, element), *found.rows))


def _row(o: Computed, row: Expr) -> tuple[Stmt, ...]:
    return (Let(o.row, row), *o.before)


def _element(o: Operand | Computed, row: Expr, column: Expr, depth: int) -> tuple[tuple[Stmt, ...], Expr]:
    """Element (row, column) of an operand that sums `depth` products, and the statements that compute it."""
    if isinstance(o, Computed):
        return (Let(o.column, column), *o.body), k.cast(o.value, o.dtype)
    if o.blocks:
        p = panel_of(o.blocks)
        blocks = k.mul(k.div(column, p.rows), depth // p.plain.block * p.packed.nbytes)
        return (), p.packed.element(row, lambda at: Load(o.buffer, k.add(o.offset, k.add(blocks, at))), k.rem(column, p.rows))
    if not o.panel:
        index = o.place(row, column)
    else:  # [ceil(n/panel)][ceil(depth/group)][panel][group]
        panel, lane, block, step = k.div(column, o.panel), k.rem(column, o.panel), k.div(row, o.group), k.rem(row, o.group)
        groups = k.add(k.mul(panel, -(-depth // o.group)), block)
        index = k.add(k.mul(k.add(k.mul(groups, o.panel), lane), o.group), step)
    return (), Load(o.buffer, alu("add", o.offset, index))

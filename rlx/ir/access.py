"""The loads and stores of a kernel. The planner and the checker prove in-place safety from them, by different methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.ir import kernel as K
from rlx.ir.kernel import Buffer, Expr, Kernel, Let, Load, Local, Loop, Sort, Stmt, Var, walk
from rlx.records import record


@record
class Access:
    """One load or store. `path`: child indices from the body down to the statement; `loops`: (variable, extent) of the enclosing
    loops, one per level of the path but the last (a Contract's i and j, and a Native's axes, count as loops). `index` None:
    unknown."""

    buffer: Buffer | Local
    stores: bool
    index: Expr | None
    path: tuple[int, ...]
    loops: K.Grid
    again: bool = False


@K.kept
def accesses(kernel: Kernel) -> tuple[Access, ...]:
    """Every access of the limits and the body; the loads of a statement come before its store."""
    found: list[Access] = []

    def note(exprs: tuple[Expr | None, ...], path: tuple[int, ...], loops: K.Grid) -> None:
        found.extend(Access(e.buffer, False, e.index, path, loops) for e in walk(exprs) if isinstance(e, Load))

    def block(body: Sequence[Stmt], path: tuple[int, ...], loops: K.Grid, start: int = 0) -> None:
        for at, s in enumerate(body, start):
            here = (*path, at)
            if isinstance(s, Let):
                note((s.value,), here, loops)
            elif isinstance(s, K.Check):
                note((s.ok,), here, loops)
            elif isinstance(s, K.Store):
                note((s.index, s.value, s.guard), here, loops)
                found.append(Access(s.buffer, True, s.index, here, loops))
            elif isinstance(s, Loop):
                note(tuple(c.init for c in s.carries), here, loops)
                inside = (*loops, (s.var, s.extent))
                block(s.body, here, inside)
                note((*(r.value for r in s.reduces), *(c.next for c in s.carries)), (*here, len(s.body)), inside)
            elif isinstance(s, Sort):
                start = len(found)
                note((s.value,), (*here, 0), (*loops, (s.i, s.n)))
                found[start:] = [replace(a, again=True) for a in found[start:]]
                block(s.body, here, (*loops, (s.to, s.kept)), 1)
            elif isinstance(s, K.Contract):
                note((s.count,), here, loops)
                operand(s.a, (s.m, s.k), here, loops)
                operand(s.b, (s.k, s.width), here, loops)
                row = (*loops, (s.i, s.m))
                start = len(found)
                block(s.before, here, row, -len(s.before))
                found[start:] = [replace(a, again=True) for a in found[start:]]
                block(s.epilogue, (*here, 0), (*row, (s.j, s.n)))
                block(s.rows, here, row, 1)
            else:
                found.extend(Access(v.buffer, v in s.outputs, None, here, loops) for v in s.inputs + s.outputs)
                block(s.epilogue, (*here, *(0 for _ in s.axes[1:])), (*loops, *s.axes))

    def operand(o: K.Operand | K.Computed, dims: tuple[int, int], here: tuple[int, ...], loops: K.Grid) -> None:
        if isinstance(o, K.Operand):
            note((o.offset,), here, loops)
            found.append(Access(o.buffer, False, None, here, loops))
            return
        start, row = len(found), (*loops, (o.row, dims[0]))
        each = Loop(o.column, dims[1], (*o.body, Let(Var("value", o.value.dtype), o.value)))
        block((*o.before, each), here, row, -1 - len(o.before))
        found[start:] = [replace(a, again=True) for a in found[start:]]

    note(tuple(x.count for x in kernel.limits), (-1,), ())
    block(kernel.body, (), ())
    return tuple(found)

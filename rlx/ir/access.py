"""Where a kernel loads and stores: the plain facts from which in-place safety is proved, once by the planner and once,
by other means, by the checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.ir.kernel import Buffer, Check, Contract, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, Var, walk


@dataclass(frozen=True)
class Access:
    """One load or store. `path`: which child of which child the statement is; `loops`: (variable, extent) around it, one
    per level of the path but the last (a Contract's i and j count as loops). `index` None: anywhere."""

    buffer: Buffer | Local
    stores: bool
    index: Expr | None
    path: tuple[int, ...]
    loops: tuple[tuple[Var, int], ...]


def accesses(kernel: Kernel) -> list[Access]:
    """Every access of the limits and the body; the loads of a statement come before its store."""
    found: list[Access] = []

    def note(exprs: tuple[Expr | None, ...], path: tuple[int, ...], loops: tuple[tuple[Var, int], ...]) -> None:
        found.extend(Access(e.buffer, False, e.index, path, loops) for e in walk(exprs) if isinstance(e, Load))

    def block(body: Sequence[Stmt], path: tuple[int, ...], loops: tuple[tuple[Var, int], ...], start: int = 0) -> None:
        for at, s in enumerate(body, start):
            here = (*path, at)
            if isinstance(s, Let):
                note((s.value,), here, loops)
            elif isinstance(s, Check):
                note((s.ok,), here, loops)
            elif isinstance(s, Store):
                note((s.index, s.value, s.guard), here, loops)
                found.append(Access(s.buffer, True, s.index, here, loops))
            elif isinstance(s, Loop):
                note(tuple(c.init for c in s.carries), here, loops)
                inside = (*loops, (s.var, s.extent))
                block(s.body, here, inside)
                note((*(r.value for r in s.reduces), *(c.next for c in s.carries)), (*here, len(s.body)), inside)
            elif isinstance(s, Contract):
                note((s.a.offset, s.b.offset), here, loops)
                found.extend(Access(o.buffer, False, None, here, loops) for o in (s.a, s.b))
                row = (*loops, (s.i, s.m))
                block(s.epilogue, (*here, 0), (*row, (s.j, s.n)))
                block(s.rows, here, row, 1)
            else:
                found.extend(Access(v.buffer, v in s.outputs, None, here, loops) for v in s.inputs + s.outputs)

    note(tuple(x.count for x in kernel.limits), (-1,), ())
    block(kernel.body, (), ())
    return found

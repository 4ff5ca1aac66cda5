"""One section of a kernel: the points that read and write one of `count` equal, consecutive parts of its buffers.

Weights of experts are packed together by one kernel, and one expert at a time by a section of it, so that the bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlx.ir.kernel import Alu, Buffer, Check, Const, Expr, Kernel, Let, Load, Loop, Store, Var, coefficient, is_const, walk
from rlx.ir.program import Program

Bounds = Mapping[Expr, int]  # expression -> a number that it stays below


def section(kernel: Kernel, count: int) -> Kernel | None:
    """The kernel of the first section: with the addresses of section i, it does what `kernel` does in section i. None if that
    cannot be proved: the outermost index must move every buffer by whole sections, and decide nothing else."""
    loop = kernel.body[0] if len(kernel.body) == 1 else None
    inner = loop if isinstance(loop, Loop) and not (kernel.grid or loop.reduces or loop.carries) else None
    if kernel.limits or kernel.locals or not (kernel.grid or inner):
        return None
    var, extent = kernel.grid[0] if kernel.grid else (inner.var, inner.extent)  # type: ignore[union-attr]
    points, rest = divmod(extent, count)
    if rest or not points:
        return None
    parts = list(walk(kernel.body))
    known = (Alu, Buffer, Check, Const, Let, Load, Loop, Store, Var)
    loops = {x.var: x.extent for x in parts if isinstance(x, Loop)}
    bounds: Bounds = {**loops, **dict(kernel.grid), var: points}
    if not all(isinstance(x, known) and _only_moves(x, var, extent, count, bounds) for x in parts):
        return None
    if inner is None:
        return replace(kernel, name=f"{kernel.name}_section", grid=((var, points), *kernel.grid[1:]))
    return replace(kernel, name=f"{kernel.name}_section", body=(replace(inner, extent=points),))


def _only_moves(x: object, var: Var, extent: int, count: int, bounds: Bounds) -> bool:
    """Whether a part of a kernel depends on `var` only by an index that moves by whole sections, and stays in the first one as
    long as `var` does."""
    if isinstance(x, (Load, Store)):
        stride, inside = coefficient(x.index, var), dict(bounds)
        for guard in _conditions(x.guard):
            if isinstance(guard, Alu) and guard.op == "lt" and is_const(guard.args[1]):
                inside[guard.args[0]] = int(guard.args[1].value)  # type: ignore[union-attr]
        reach, size = _range(x.index, inside), x.buffer.size // count
        moves = stride is not None and stride * extent == x.buffer.size
        if not moves or reach is None or not 0 <= reach[0] <= reach[1] < size or _decides(x.guard, var):
            return False
        return not (isinstance(x, Store) and _decides(x.value, var))
    if isinstance(x, (Let, Check)):
        return not _decides(x.value if isinstance(x, Let) else x.ok, var)
    if isinstance(x, Loop):
        values = [*(r.value for r in x.reduces), *(v for c in x.carries for v in (c.init, c.next))]
        return not any(_decides(v, var) for v in values)
    return True


def _decides(e: Expr | None, var: Var) -> bool:
    """Whether an expression depends on `var` by more than the indices of its loads."""
    if isinstance(e, Load):
        return _decides(e.guard, var)
    return e is var or (isinstance(e, Alu) and any(_decides(a, var) for a in e.args))


def _conditions(guard: Expr | None) -> Iterator[Expr]:
    if isinstance(guard, Alu) and guard.op == "and":
        for a in guard.args:
            yield from _conditions(a)
    elif guard is not None:
        yield guard


def _range(e: Expr, bounds: Bounds) -> tuple[int, int] | None:
    """The least and the greatest value of an index; None: unknown."""
    if isinstance(e, Const):
        return int(e.value), int(e.value)
    if isinstance(e, Var):
        return (0, bounds[e] - 1) if e in bounds else None
    if not isinstance(e, Alu) or len(e.args) != 2:
        return None
    a, b = (_range(x, bounds) for x in e.args)
    if a is None or b is None:
        return None
    if e.op in ("add", "sub"):
        low, high = b if e.op == "add" else (-b[1], -b[0])
        found = a[0] + low, a[1] + high
    elif e.op == "mul":
        ends = [x * y for x in a for y in b]
        found = min(ends), max(ends)
    elif e.op in ("div", "rem") and is_const(e.args[1]) and b[0] > 0 and a[0] >= 0:
        found = (a[0] // b[0], a[1] // b[0]) if e.op == "div" else (0, min(a[1], b[0] - 1))
    else:
        return None
    return found[0], min(found[1], bounds.get(e, found[1] + 1) - 1)


def sections_of(program: Program) -> Iterator[tuple[int, Kernel]]:
    """The steps that prepare weights of experts, each with the kernel for one expert; without those that have none."""
    experts = {name: router.experts for router in program.routers for name in router.params}
    params = {id: program.buffers[id].name for id in program.params}
    for i, step in enumerate(program.prepare):
        count = experts.get(params.get(min(step.reads), "")) if len(step.reads) == len(step.writes) == 1 else None
        kernel = section(step.kernel, count) if count else None
        if kernel is not None:
            yield i, kernel


__all__ = ["section", "sections_of"]

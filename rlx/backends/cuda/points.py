"""Points that take few divisions to find: adjacent axes that are read and written like one become one, and the threads of a team
take the elements of a row that no vectors fit, which finds its place once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.cuda.vectors import lone
from rlx.ir.nest import distinct, operands, substitute

from rlx.ir.kernel import (  # isort: skip
    Check, Expr, Grid, Kernel, Let, Load, Loop, Stmt, Store, Var, coefficient, const, expressions, is_const, walk,
)  # fmt: skip

LEAST, ROWS = 64, 2048  # elements of a row of such a team, and rows, at least; few rows have more elements
LONG, FEW = 1024, 132


def merged(kernel: Kernel) -> Kernel:
    """The kernel with two axes as one, whose number of points is their product, wherever nothing tells one from the other: values
    and conditions may depend on the number of the point, too, unlike in nest.joined."""
    grid, body = list(kernel.grid), kernel.body
    if kernel.limits or kernel.locals or not all(isinstance(s, Let | Store | Check) for s in body):
        return kernel
    for at in range(len(grid) - 1, 0, -1):
        (slow, rows), (fast, n) = grid[at - 1 : at + 1]
        if _as_one(body, slow, fast, n):
            body = substitute(body, {slow: const(0)})
            grid[at - 1 : at + 1] = [(fast, rows * n)]
    return kernel if body is kernel.body else replace(kernel, grid=tuple(grid), body=body)


def _as_one(body: Sequence[Stmt], slow: Var, fast: Var, n: int) -> bool:
    """Whether everything that depends on the axes does so by slow * n + fast."""
    good, known = dict[int, bool](), (dict[int, int | None](), dict[int, int | None]())
    for e in distinct(expressions(body)):  # operands come first
        a, b = (coefficient(e, v, memo) for v, memo in zip((slow, fast), known))
        linear = not isinstance(e, Load) and a is not None and b is not None and a == n * b
        good[id(e)] = linear or (e not in (slow, fast) and all(good[id(x)] for x in operands(e)))
    return all(good[id(e)] for e in expressions(body))


def in_rows(kernel: Kernel) -> Kernel:
    """The kernel with its last axis as a loop, if that loads elements of a row one by one where they are inside of something:
    then the place of a point takes longer to find than the point to move."""
    *others, (var, extent) = kernel.grid or ((Var(""), 0),)
    points = math.prod(n for _, n in others)
    enough = (extent >= LEAST and points >= ROWS) or (extent >= LONG and points >= FEW)
    loads = [x for x in walk(kernel.body) if isinstance(x, Load)]
    guarded = loads and all(x.guard is not None and coefficient(x.index, var) == 1 for x in loads)
    divided = len(loads) > 1 or len([n for _, n in others if n > 1]) > 1  # else a point takes one division
    if not enough or not guarded or not divided or kernel.limits or kernel.locals:
        return kernel
    if not all(isinstance(s, Let | Store | Check) for s in kernel.body):
        return kernel
    loop = Loop(var, extent, kernel.body, vector=True)
    return replace(kernel, grid=tuple(others), body=(loop,)) if lone(loop) else kernel


def counts(index: Expr, axes: Grid) -> bool:
    """Whether the index is the number of a point, the last one of the axes fastest."""
    step, known = 1, {v for v, _ in axes}
    for var, n in reversed(axes):
        if n > 1 and coefficient(index, var) != step:
            return False
        step *= n
    inside = all(x in known for x in walk(index) if isinstance(x, Var | Load))
    return inside and is_const(substitute(index, dict.fromkeys(known, const(0))), 0)


__all__ = ["counts", "in_rows", "merged"]

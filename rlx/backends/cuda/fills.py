"""Numbers around values that other kernels store (rlx/compiler/within.py): a thread stores one, of whichever part it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlx.ir.kernel import Const, Expr, Kernel, Loop, Stmt, Store, Var, k
from rlx.ir.nest import substitute


def spread(kernel: Kernel) -> Kernel:
    """Such a kernel with all elements of its parts as an axis of the grid; another one as it is."""
    parts = [found for s in kernel.body if (found := _part(s))]
    if len(parts) < 2 or len(parts) < len(kernel.body) or len({_number(store) for _, store in parts}) > 1:
        return kernel
    at, first, index = Var("e"), 0, None
    for loops, store in parts:
        own = substitute(store.index, dict(zip((s.var for s in loops), _places(k.sub(at, first), loops))))
        index = own if index is None else k.select(k.lt(at, first), index, own)
        first += math.prod(s.extent for s in loops)
    assert index is not None
    return replace(kernel, grid=(*kernel.grid, (at, first)), body=(replace(parts[0][1], index=index),))


def _part(s: Stmt) -> tuple[list[Loop], Store] | None:
    """The loops around the store of a number."""
    loops = list[Loop]()
    while isinstance(s, Loop) and len(s.body) == 1 and not s.reduces and not s.carries:
        loops.append(s)
        (s,) = s.body
    return (loops, s) if loops and isinstance(s, Store) and s.guard is None and isinstance(s.value, Const) else None


def _number(store: Store) -> tuple[object, object]:
    assert isinstance(store.value, Const)
    return store.buffer, repr(store.value.value)


def _places(at: Expr, loops: Sequence[Loop]) -> list[Expr]:
    """The iteration of each loop in which all of them together are at iteration `at`."""
    found = list[Expr]()
    for s in reversed(loops):
        found.append(k.rem(at, s.extent))
        at = k.div(at, s.extent)
    return found[::-1]


__all__ = ["spread"]

"""Loops split where their conditions change, so that no iteration evaluates a branch that is not selected: a concat of parts
of a row is one loop per part, without guards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from rlx.ir.dtype import index_
from rlx.ir.nest import changed, operands, postorder, substitute

from rlx.ir.kernel import (  # isort: skip
    Alu, Check, Const, Expr, Kernel, Let, Load, Loop, Stmt, Store, Var, alu, coefficient, const, k, walk,
)  # fmt: skip

MOST = 4  # parts of a loop
EVEN = 32  # of which parts are multiples, so that they keep their vectors


def cut_at_edges(kernel: Kernel, apart: bool = True) -> Kernel:
    """Parts of equal extents become one loop, which loads shared operands once. `apart`: the others become loops too."""
    body = changed(kernel.body, partial(_parts, apart=apart))
    return kernel if body is kernel.body else replace(kernel, body=body)


def _parts(s: Stmt, apart: bool) -> Sequence[Stmt] | None:
    if not isinstance(s, Loop) or s.reduces or s.carries or not all(isinstance(x, Let | Store | Check) for x in s.body):
        return None
    ends = edges_along(s.body, s.var, s.extent)
    if not 2 < len(ends) < MOST + 2 or any(e % EVEN for e in ends):
        return None
    spans = [(low, high - low) for low, high in zip(ends, ends[1:])]
    if len({extent for _, extent in spans}) == 1 and all(isinstance(x, Store) for x in s.body):
        own = Var(s.var.name)
        loops = [_Part(s.var, *span, own).loop(s) for span in spans]
        return [replace(loops[0], body=tuple(x for loop in loops for x in loop.body))]
    return [_Part(s.var, *span, Var(s.var.name)).loop(s) for span in spans] if apart else None


def edges_along(body: Sequence[Stmt], var: Var, extent: int) -> list[int]:
    """0, where conditions change in order, and the extent."""
    compared = [x for x in walk(body) if isinstance(x, Alu) and x.op in ("lt", "le")]
    return sorted({0, extent, *(e for x in compared for e in _edge(x, var) if 0 < e < extent)})


def part_of(body: tuple[Stmt, ...], var: Var, first: int, extent: int, own: Var) -> tuple[Stmt, ...]:
    """Stores and loops around them for some values of `var`, which an axis of the grid or one of the loops has: with `own` from 0
    on in its place, and without conditions that are known for all of them."""
    part = _Part(var, first, extent, own)

    def made(s: Stmt) -> Sequence[Stmt] | None:
        if isinstance(s, Loop):
            return [part.loop(s)] if s.var is var else None
        return [part.statement(s)]

    return changed(body, made)


def _moved(a: Expr, by: Expr) -> Expr | None:
    """(x + c) - by of positions, which are exact, as one sum."""
    if not (isinstance(a, Alu) and a.op == "add" and isinstance(c := a.args[1], Const) and isinstance(by, Const)):
        return None
    return k.add(a.args[0], int(c.value) - int(by.value))


def _edge(e: Alu, var: Var) -> tuple[int, ...]:
    """The first value of `var` from which on the comparison changes."""
    a, b = e.args
    if not a.dtype.is_int:
        return ()
    step = coefficient(a, var), coefficient(b, var)
    zero = [substitute(x, {var: const(0)}) for x in (a, b)]
    if sorted(map(str, step)) != ["0", "1"] or not all(isinstance(x, Const) for x in zero):
        return ()
    first, second = (int(x.value) for x in zero)  # type: ignore[union-attr]
    edge = second - first if step[0] else first - second
    return (edge + ((e.op == "le") == bool(step[0])),)


class _Part:
    """`extent` iterations from `first` on, with the conditions that are known for all of them decided."""

    def __init__(self, var: Var, first: int, extent: int, own: Var) -> None:
        self.var, self.extent = own, extent
        self.to, self.memo = {var: k.add(own, first)}, dict[int, Expr]()

    def loop(self, s: Loop) -> Loop:
        return replace(s, var=self.var, extent=self.extent, body=tuple(map(self.statement, s.body)))

    def statement(self, s: Any) -> Any:
        parts = {f.name: getattr(s, f.name) for f in fields(s) if f.name != "var"}
        new: dict[str, Any] = {name: self.value(x) for name, x in parts.items() if isinstance(x, Expr)}
        if isinstance(guard := new.get("guard"), Const) and guard.value:
            new["guard"] = None
        return replace(s, **new)

    def value(self, root: Expr) -> Expr:
        for e in postorder(root, self.memo):
            self.memo[id(e)] = self.made(e, [self.memo[id(a)] for a in operands(e)])
        return self.memo[id(root)]

    def made(self, e: Expr, parts: list[Expr]) -> Expr:
        if isinstance(e, Var):
            return self.to.get(e, e)
        if isinstance(e, Load):
            if not isinstance(known := parts[-1], Const) or e.guard is None:
                return Load(e.buffer, *parts)
            return Load(e.buffer, parts[0]) if known.value else const(0, e.dtype)
        if not isinstance(e, Alu):
            return e
        if e.op in ("lt", "le") and (known := self.decided(e.op, parts)) is not None:
            return Const(known, e.dtype)
        if e.op == "and" and (left := [x for x in parts if not (isinstance(x, Const) and x.value)]) != parts:
            return left[0] if left else parts[0]
        if e.op == "and" and (no := [x for x in parts if isinstance(x, Const)]):
            return no[0]
        if e.op == "select" and isinstance(parts[0], Const):
            return parts[1 if parts[0].value else 2]
        if e.dtype == index_ and e.op == "sub" and (moved := _moved(*parts)) is not None:
            return moved
        return alu(e.op, *parts, dtype=e.dtype)

    def decided(self, op: str, parts: list[Expr]) -> bool | None:
        ends = [[substitute(x, {self.var: const(at)}) for x in parts] for at in (0, self.extent - 1)]
        if not all(isinstance(x, Const) for pair in ends for x in pair):
            return None
        first, last = ((a.value < b.value if op == "lt" else a.value <= b.value) for a, b in ends)  # type: ignore[union-attr]
        return first if first == last else None


__all__ = ["cut_at_edges", "edges_along", "part_of"]

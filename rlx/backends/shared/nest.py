"""Traversal of the kernel IR: the statements and expressions of a loop nest, in an order that suits a renderer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import numpy as np

from rlx.ir.dtype import DType
from rlx.ir.kernel import Alu, Buffer, Computed, Contract, Expr, Let, Load, Local, Loop, Operand, Stmt, Store, Var, alu, walk

Part = TypeVar("Part")
Inner = TypeVar("Inner", bound=Stmt | Operand | Computed)


def operands(e: Expr) -> tuple[Expr, ...]:
    if isinstance(e, Alu):
        return e.args
    if isinstance(e, Load):
        return (e.index,) if e.guard is None else (e.index, e.guard)
    return ()


def postorder(e: Expr, known: Mapping[int, object], below: Callable[[Expr], tuple[Expr, ...]] = operands) -> Iterator[Expr]:
    """`e` and its subexpressions (given by `below`) in postorder, without those whose id is in `known` when they are reached.

    Not recursive, because chains may be long."""
    pending = [e]
    while pending:
        node = pending[-1]
        waits = [] if id(node) in known else [c for c in below(node) if id(c) not in known]
        if waits:
            pending.extend(waits)
            continue
        pending.pop()
        if id(node) not in known:
            yield node


def distinct(parts: Iterable[Expr]) -> Iterator[Expr]:
    """All subexpressions of the expressions; shared ones once."""
    seen: dict[int, bool] = {}
    for e in parts:
        for node in postorder(e, seen):
            seen[id(node)] = True
            yield node


def nested(stmts: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement, including those inside loops."""
    for s in stmts:
        yield s
        if isinstance(s, Loop):
            yield from nested(s.body)


def stores(stmts: Iterable[Stmt]) -> list[Store]:
    return [s for s in nested(stmts) if isinstance(s, Store)]


def identity(op: str, dtype: DType) -> int | float | bool:
    """The initial value of a reduction with `op`."""
    if op in ("max", "min"):
        if dtype.is_float:
            return -math.inf if op == "max" else math.inf
        if dtype.kind == "b":
            return op == "min"
        info = np.iinfo(dtype.numpy)
        return int(info.min if op == "max" else info.max)
    return {"add": 0, "mul": 1, "or": 0, "and": True if dtype.kind == "b" else -1 if dtype.kind == "i" else 2**dtype.bits - 1}[op]


def substitute(part: Part, to: Mapping[Var, Expr], memo: dict[int, Expr] | None = None) -> Part:
    """An expression, a statement or a tuple of them with expressions in place of variables. Expressions that are shared inside
    `part` stay shared, and whatever does not change stays the same object."""
    memo = {} if memo is None else memo
    if isinstance(part, Expr):
        for e in postorder(part, memo):
            memo[id(e)] = _replaced(e, [memo[id(a)] for a in operands(e)], to)
        return memo[id(part)]  # type: ignore[return-value]
    if isinstance(part, tuple):
        made = tuple(substitute(x, to, memo) for x in part)
        return part if all(a is b for a, b in zip(made, part)) else made  # type: ignore[return-value]
    if not is_dataclass(part) or isinstance(part, (type, Buffer, Local, DType)):
        return part
    inner = {f.name: getattr(part, f.name) for f in fields(part)}
    new = {name: x for name, old in inner.items() if (x := substitute(old, to, memo)) is not old}
    return replace(part, **new) if new else part


def _replaced(e: Expr, parts: list[Expr], to: Mapping[Var, Expr]) -> Expr:
    if isinstance(e, Var):
        return to.get(e, e)
    if all(a is b for a, b in zip(parts, operands(e))):
        return e
    return alu(e.op, *parts, dtype=e.dtype) if isinstance(e, Alu) else Load(e.buffer, *parts)  # type: ignore[union-attr]


def renamed(part: object) -> dict[Var, Expr]:
    """A new variable for each one that the statements of `part` bind: a copy of them needs its own."""
    out: dict[Var, Expr] = {}
    for x in walk(part):
        own = [x.var] if isinstance(x, Let) else []
        if isinstance(x, Loop):
            own = [x.var, *(r.result for r in x.reduces), *(c.var for c in x.carries)]
        out |= {v: Var(v.name, v.dtype) for v in own}
    return out


BLOCKS = {Loop: ("body",), Contract: ("epilogue", "rows"), Computed: ("before", "body")}  # record -> its fields of statements


def change_loops(body: tuple[Stmt, ...], change: Callable[[Loop], Iterable[Stmt] | None]) -> tuple[Stmt, ...]:
    """The statements with change(loop) in place of each loop, outermost first; where it is None, the loops inside are changed.
    Loops of a Contract too. `body` itself if nothing changes."""
    out: list[Stmt] = []
    for s in body:
        made = change(s) if isinstance(s, Loop) else None
        out += [_changed_inside(s, change)] if made is None else made
    return body if len(out) == len(body) and all(a is b for a, b in zip(out, body)) else tuple(out)


def _changed_inside(x: Inner, change: Callable[[Loop], Iterable[Stmt] | None]) -> Inner:
    new: dict[str, object] = {name: change_loops(getattr(x, name), change) for name in BLOCKS.get(type(x), ())}
    if isinstance(x, Contract):
        new |= {"a": _changed_inside(x.a, change), "b": _changed_inside(x.b, change)}
    new = {name: part for name, part in new.items() if part is not getattr(x, name)}
    return replace(x, **new) if new else x  # type: ignore[arg-type]

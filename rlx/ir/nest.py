"""Traversal of the kernel IR: the statements and expressions of a loop nest, in an order that suits a renderer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import numpy as np

from rlx.ir import kernel as K
from rlx.ir.dtype import DType
from rlx.ir.kernel import Alu, Expr, Let, Load, Loop, Sort, Stmt, Store, Var, alu, k, walk

Part = TypeVar("Part")
Inner = TypeVar("Inner", bound=Stmt | K.Operand | K.Computed)


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


def substitute(part: Part, to: Mapping[Var, Expr], memo: dict[int, Expr] | None = None, *, guard: Expr | None = None) -> Part:
    """An expression, a statement or a tuple of them with expressions in place of variables. Expressions that are shared inside
    `part` stay shared, and whatever does not change stays the same object. With `guard`, nothing is loaded where it is false."""
    memo = {} if memo is None else memo
    if isinstance(part, Expr):
        for e in postorder(part, memo):
            memo[id(e)] = _replaced(e, [memo[id(a)] for a in operands(e)], to, guard)
        return memo[id(part)]  # type: ignore[return-value]
    if isinstance(part, tuple):
        made = tuple(substitute(x, to, memo, guard=guard) for x in part)
        return part if all(a is b for a, b in zip(made, part)) else made  # type: ignore[return-value]
    if not is_dataclass(part) or isinstance(part, (type, K.Buffer, K.Local, DType)):
        return part
    inner = {f.name: getattr(part, f.name) for f in fields(part)}
    new = {name: x for name, old in inner.items() if (x := substitute(old, to, memo, guard=guard)) is not old}
    return replace(part, **new) if new else part


def _replaced(e: Expr, parts: list[Expr], to: Mapping[Var, Expr], guard: Expr | None) -> Expr:
    if isinstance(e, Var):
        return to.get(e, e)
    if isinstance(e, Load) and guard is not None:
        return Load(e.buffer, parts[0], guard if e.guard is None else k.and_(guard, parts[1]))
    if all(a is b for a, b in zip(parts, operands(e))):
        return e
    return alu(e.op, *parts, dtype=e.dtype) if isinstance(e, Alu) else Load(e.buffer, *parts)  # type: ignore[union-attr]


def renamed(part: object) -> dict[Var, Expr]:
    """A new variable for each one that the statements of `part` bind: a copy of them needs its own."""
    out: dict[Var, Expr] = {}
    for x in walk(part):
        own = [x.var] if isinstance(x, Let) else [x.i, x.to, x.held, x.origin] if isinstance(x, Sort) else []
        if isinstance(x, Loop):
            own = [x.var, *(r.result for r in x.reduces), *(c.var for c in x.carries)]
        out |= {v: Var(v.name, v.dtype) for v in own}
    return out


# record -> its fields of statements
BLOCKS = {
    Loop: ("body",), Sort: ("body",), K.Contract: ("before", "epilogue", "rows"), K.Computed: ("before", "body"),
    K.Native: ("epilogue",),
}  # fmt: skip


Change = Callable[[Stmt], Iterable[Stmt] | None]


def changed(body: tuple[Stmt, ...], change: Change) -> tuple[Stmt, ...]:
    """The statements with change(statement) in place of each, outermost first; where it is None, those inside are changed, of a
    Contract too. `body` itself if nothing changes."""
    out: list[Stmt] = []
    for s in body:
        made = change(s)
        out += [_changed_inside(s, change)] if made is None else made
    return body if len(out) == len(body) and all(a is b for a, b in zip(out, body)) else tuple(out)


def _changed_inside(x: Inner, change: Change) -> Inner:
    new: dict[str, object] = {name: changed(getattr(x, name), change) for name in BLOCKS.get(type(x), ())}
    if isinstance(x, K.Contract):
        new |= {"a": _changed_inside(x.a, change), "b": _changed_inside(x.b, change)}
    new = {name: part for name, part in new.items() if part is not getattr(x, name)}
    return replace(x, **new) if new else x  # type: ignore[arg-type]


Dims = Sequence[tuple[Var, int]]  # loop variables with their extents, outermost first


def joined(dims: Dims, body: tuple[Stmt, ...]) -> tuple[Dims, tuple[Stmt, ...]]:
    """The dims of a loop nest and its body, with adjacent dims as one where every index is linear over both."""
    made = list(dims)
    for at in range(len(made) - 2, -1, -1):
        (high, n), (low, m) = made[at : at + 2]
        if 1 in (n, m) or _linear(body, high, low, m):
            kept, gone = (high, low) if m == 1 != n else (low, high)
            made[at : at + 2] = [(kept, n * m)]
            body = substitute(body, {gone: K.const(0)})
    return made, body


def _linear(body: tuple[Stmt, ...], high: Var, low: Var, size: int) -> bool:
    """Whether buffers, and Locals that depend on one of the two, are accessed at multiples of high * size + low, and nothing else
    depends on them."""
    found = [x for x in walk(body) if isinstance(x, Load | Store)]
    found = [x for x in found if isinstance(x.buffer, K.Buffer) or K.coefficient(x.index, low)]
    steps = [(K.coefficient(x.index, high), K.coefficient(x.index, low)) for x in found]
    memo: dict[int, Expr] = {id(x): K.const(0, x.buffer.dtype) for x in found if isinstance(x, Load) and x.guard is None}
    rest = [substitute(e, {}, memo) for e in K.expressions(body) if not any(e is x.index for x in found)]
    return all(a is not None and b is not None and a == b * size for a, b in steps) and {high, low}.isdisjoint(walk(tuple(rest)))

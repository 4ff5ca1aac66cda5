"""Traversal of the kernel IR: the statements and expressions of a loop nest, in an order that suits a renderer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from rlx.ir.dtype import DType
from rlx.ir.kernel import Alu, Expr, Load, Loop, Stmt, Store


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

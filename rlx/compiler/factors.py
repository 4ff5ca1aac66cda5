"""Factors of rows between two products: those of an RMS norm (Zhang and Sennrich, arXiv:1910.07467).

A kernel that scales the rows of a product, y[i, j] = f[i] * v[i, j], where v is x times numbers that are known before a run, and
f[i] is made of the sum of squares of x[i, j] over j, reads all of the product's result x and writes y for the next product.
y @ w is f * (v @ w). So the first product stores v in place of y, and sums of squares over parts of each row; the second one adds
these up, and multiplies its own sums by f. v is rounded to bf16 as y was, which has the range of f32 (where squares have a sum,
neither v nor its products leave it): the errors are those of rounded operands, as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TypeVar

from rlx.compiler.facts import Facts
from rlx.compiler.groups import Group
from rlx.compiler.lowering import Extra, Lowered, Place
from rlx.ir.dtype import bf16, f32, index_
from rlx.ir.graph import CONSTANT, PARAM, Value
from rlx.ir.nest import substitute
from rlx.ir.program import Region
from rlx.ir.shape import Shape
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Contract, Expr, Kernel, Let, Load, Local, Loop, Operand, Reduce, Store, Var, coefficient, is_const, k, walk,
)  # fmt: skip

Made = TypeVar("Made")


@record(eq=False)
class Scaled:
    """A kernel that makes rows of `columns` elements of those of `source`: element (row, `column`) of `result` is `value` times
    `factor`, in bf16, where `x` is that of the source. The statements `lets` compute the factor of `total`, the sum of `term`.
    `inputs`: other buffers, which the value is made of. `origin`: of the kernel."""

    rows: int
    columns: int
    source: Buffer
    result: Buffer
    x: Var
    column: Var
    term: Expr
    value: Expr
    total: Var
    lets: tuple[Let, ...]
    factor: Expr
    inputs: tuple[Buffer, ...]
    origin: tuple[str, ...]


def may_scale(group: Group, facts: Facts) -> bool:
    """Whether the kernel of a group may be one that scales rows, for a target where products can take it over."""
    if not facts.target.part_columns or "factors" in facts.compilation.options.disable:
        return False
    return group.anchor is None and not group.static and bool(group.row_reductions()) and math.prod(group.lines) > 1


def factored(lowered: Mapping[Group, Lowered], facts: Facts) -> dict[Group, Lowered]:
    """The kernels without those whose factors the products on both sides take over, where the target says so (Target.factors).
    The nodes of such a kernel become those of the first product's group."""
    found = _Factors(lowered, facts)
    for group in lowered:
        found.take(group)
    return found.lowered


class _Factors:
    def __init__(self, lowered: Mapping[Group, Lowered], facts: Facts) -> None:
        self.lowered, self.facts = dict(lowered), facts
        self.makers: dict[Place, list[Group]] = {}
        self.readers: dict[Place, list[Group]] = {}
        for group, (kernel, args) in lowered.items():
            for place, buffer in zip(args, kernel.buffers):
                (self.makers if buffer.writable else self.readers).setdefault(place, []).append(group)
        self.held = {facts.places.base(v) for v in (*facts.graph.outputs, *(v for _, v in facts.graph.assigns))}
        self.known: dict[Hashable, object] = {}

    def take(self, group: Group) -> None:
        kernel, args = self.lowered[group]
        scaled = self.once(scaled_rows, kernel)
        if scaled is None:
            return
        at = dict(zip(kernel.buffers, args))
        source, result = at.pop(scaled.source), at.pop(scaled.result)
        around = self.around(group, source, result)
        if around is None or not all(map(self.is_known, at.values())):
            return
        first, *readers = [self.lowered[g] for g in around]
        made, read = _buffer_of(source, first), [_buffer_of(result, x) for x in readers]
        whole = all(_reads_rows(x.kernel, b, scaled) for x, b in zip(readers, read))
        if not whole or not _stores_rows(first.kernel, made, scaled):
            return
        width = self.facts.target.part_columns
        if scaled.columns % width:
            return
        parts = Extra(Region.ARENA, Shape((scaled.rows, scaled.columns // width), f32), "sums of parts of rows")
        new = [Lowered(self.once(with_parts, first.kernel, made, scaled, width), (*first.args, result, parts, *at.values()))]
        new += [Lowered(self.once(with_factor, x.kernel, b, scaled, width), (*x.args, parts)) for x, b in zip(readers, read)]
        if not all(self.once(self.facts.target.factors, new[0].kernel, x.kernel) for x in new[1:]):
            return
        self.lowered.update(zip(around, new))
        del self.lowered[group]
        for own, its in zip((around[0].forms, around[0].stores), (group.forms, group.stores)):
            own.update(its)  # type: ignore[arg-type]
        around[0].absorbed |= group.absorbed

    def once(self, make: Callable[..., Made], *key: Hashable) -> Made:
        """make(*key), one object for all layers of a network: those have the same kernels."""
        if (make, key) not in self.known:
            self.known[make, key] = make(*key)
        return self.known[make, key]  # type: ignore[return-value]

    def around(self, group: Group, source: Place, result: Place) -> list[Group] | None:
        """The product whose result the group reads, and those that read its result, if nothing else touches that."""
        found = [*self.makers.get(source, ()), *self.readers.get(result, ())]
        alone = self.makers[result] == [group] and isinstance(result, Value) and self.facts.memory(result) is result
        products = all(g in self.lowered and not g.static and g.anchor is not None for g in found)
        once = len(set(found)) == len(found) > len(self.makers.get(source, ())) == 1
        return found if alone and result not in self.held and products and once else None

    def is_known(self, place: Place) -> bool:
        """Whether it is known before a run, so that the first product can read it."""
        return isinstance(place, Value) and (place.node.op in (PARAM, CONSTANT) or self.facts.compilation.is_static(place.node))


def _buffer_of(place: Place, lowered: Lowered) -> Buffer:
    return next(b for b, x in zip(lowered.kernel.buffers, lowered.args) if x is place)


def scaled_rows(kernel: Kernel) -> Scaled | None:
    """How a kernel scales rows by a factor of each; None: it does not, or it does more."""
    if len(kernel.grid) != 1 or kernel.limits or kernel.locals or len(kernel.body) < 2:
        return None
    ((row, rows),), (first, *lets, last) = kernel.grid, kernel.body
    if not (isinstance(first, Loop) and isinstance(last, Loop) and all(isinstance(s, Let) for s in lets)):
        return None
    one = len(first.reduces) == len(last.body) == 1 and not (first.body or first.carries or last.reduces or last.carries)
    if not one or not first.vector or not last.vector or first.extent != last.extent:
        return None
    (total,), (store,), columns = first.reduces, last.body, first.extent
    if total.op != "add" or total.value.dtype != f32 or not isinstance(store, Store) or store.guard is not None:
        return None
    own = {total.result, *(s.var for s in lets)}  # type: ignore[union-attr]
    factors, others = _factors(_unrounded(store.value), own)
    sources = {x.buffer for x in walk(total.value) if isinstance(x, Load)}
    if not factors or not others or len(sources) != 1 or store.buffer.dtype != bf16:
        return None
    (source,), x, column = sources, Var("x", f32), Var("j", index_)
    term = _of_element(total.value, source, (row, columns, first.var), x, column)
    parts = [_of_element(e, source, (row, columns, last.var), x, column) for e in others]
    plain = isinstance(source, Buffer) and isinstance(store.buffer, Buffer) and source.dtype == f32
    square = isinstance(term, Alu) and term.op == "mul" and term.args == (x, x)
    linear = parts.count(x) == 1 and all(e is x or (e is not None and x not in {*walk(e)}) for e in parts)
    if not (plain and square and linear) or not _is_element(store.index, row, columns, last.var):
        return None
    value = _product(parts)  # type: ignore[arg-type]
    of_row, of_element = {*walk((*lets, *factors))}, {*walk(value)}
    if any(isinstance(e, Load) or e in (row, last.var) for e in of_row) or row in of_element or own & of_element:
        return None
    inputs = tuple(b for b in kernel.buffers if b not in (source, store.buffer))
    made: tuple[object, ...] = (total.result, tuple(lets), _product(factors), inputs, kernel.origin)
    return Scaled(rows, columns, source, store.buffer, x, column, term, value, *made)  # type: ignore[arg-type]


def _unrounded(e: Expr) -> Expr:
    """Without the cast to the dtype of the buffer, which the store repeats."""
    while isinstance(e, Alu) and e.op == "cast" and e.args[0].dtype in (bf16, f32):
        e = e.args[0]
    return e


def _factors(e: Expr, own: set[Var]) -> tuple[list[Expr], list[Expr]]:
    """The factors of a product of f32, those made of these variables, and the others."""
    if isinstance(e, Alu) and e.dtype == f32 and e.op == "mul":
        (a, b), (c, d) = (_factors(x, own) for x in e.args)
        return a + c, b + d
    if isinstance(e, Alu) and e.dtype == f32 and e.op == "div" and not own.isdisjoint(walk(e.args[1])):
        a, b = _factors(e.args[0], own)
        return [*a, k.div(1.0, e.args[1])], b
    return ([], [e]) if own.isdisjoint(walk(e)) else ([e], [])


def _product(parts: list[Expr]) -> Expr:
    made = parts[0]
    for x in parts[1:]:
        made = k.mul(made, x)
    return made


def _is_element(index: Expr, row: Var, columns: int, column: Var) -> bool:
    """Whether the index is row * columns + column."""
    strides = coefficient(index, row), coefficient(index, column)
    return strides == (columns, 1) and is_const(substitute(index, {row: k.const(0), column: k.const(0)}), 0)


def _of_element(e: Expr, source: object, place: tuple[Var, int, Var], x: Var, column: Var) -> Expr | None:
    """The expression of an element of the source, `x`; None: it loads others."""
    row, columns, at = place
    memo: dict[int, Expr] = {}
    for load in (s for s in walk(e) if isinstance(s, Load)):
        if load.guard is not None or (load.buffer is source and not _is_element(load.index, row, columns, at)):
            return None
        if load.buffer is source:
            memo[id(load)] = x
    return substitute(e, {at: column}, memo)


def _product_of(kernel: Kernel) -> Contract | None:
    """The product of a kernel without a grid or Locals, of all rows."""
    c = next(iter(kernel.body), None)
    plain = isinstance(c, Contract) and not (kernel.grid or kernel.locals or kernel.limits or c.rows or c.before)
    return c if plain and c.count is None and c.acc.dtype == f32 else None  # type: ignore[union-attr, return-value]


def _stores_rows(kernel: Kernel, to: Buffer, scaled: Scaled) -> bool:
    """Whether a product stores the rows that are scaled."""
    c = _product_of(kernel)
    if c is None or c.also is not None or (c.m, c.n) != (scaled.rows, scaled.columns):
        return False
    found = [s for s in c.epilogue if isinstance(s, Store) and s.buffer is to]
    return len(found) == 1 and found[0].guard is None and _is_element(found[0].index, c.i, c.n, c.j)


def _reads_rows(kernel: Kernel, buffer: Buffer, scaled: Scaled) -> bool:
    """Whether a product reads the scaled rows as its left operand, and nothing else of them."""
    c = _product_of(kernel)
    if c is None or not isinstance(c.a, Operand) or (c.m, c.k) != (scaled.rows, scaled.columns) or c.a.buffer is not buffer:
        return False
    at = (c.a.row_stride, c.a.col_stride, c.a.row_levels, c.a.col_levels)
    others = [x.buffer for x in walk((c.b, c.epilogue)) if isinstance(x, Load | Operand)]
    return at == (c.k, 1, (), ()) and is_const(c.a.offset, 0) and buffer not in others


def with_parts(kernel: Kernel, to: Buffer, scaled: Scaled, width: int) -> Kernel:
    """The first product: it stores `scaled.value`, and sums of `scaled.term` over `width` columns each, behind all else. Its new
    arguments are these, and what the value is made of."""
    c, many = _product_of(kernel), len(kernel.buffers)
    assert c is not None
    shapes = [(bf16, c.m * c.n), (f32, c.m * c.n // width), *((b.dtype, b.size) for b in scaled.inputs)]
    new = [Buffer(f"b{many + n}", dtype, size, writable=n < 2) for n, (dtype, size) in enumerate(shapes)]
    result, parts, moved = new[0], new[1], dict(zip(scaled.inputs, new[2:]))
    x = Var("x", f32)  # not computed again, behind the store: the buffer may be that of an operand
    stored = next(s for s in c.epilogue if isinstance(s, Store) and s.buffer is to)
    first = c.epilogue[: c.epilogue.index(stored)]
    rest = c.epilogue[len(first) + 1 :]
    at: dict[Var, Expr] = {scaled.x: x, scaled.column: c.j}
    loads = [x for x in walk(scaled.value) if isinstance(x, Load)]
    memo: dict[int, Expr] = {id(x): Load(moved[x.buffer], substitute(x.index, at)) for x in loads}  # type: ignore[index]
    terms, place = Local("terms", f32, c.n, per_row=True), k.add(k.mul(c.i, c.n), c.j)
    behind = Store(terms, c.j, substitute(scaled.term, at)), Store(result, place, substitute(scaled.value, at, memo))
    part, column, total = Var("p", index_), Var("j", index_), Var("r", f32)
    term = Load(terms, k.add(k.mul(part, width), column))
    of_part = Loop(column, width, (), vector=True, reduces=(Reduce(total, "add", term),))
    put = Store(parts, k.add(k.mul(c.i, c.n // width), part), total)
    epilogue = (*first, Let(x, stored.value), replace(stored, value=x), *rest, *behind)
    made = replace(c, epilogue=epilogue, rows=(Loop(part, c.n // width, (of_part, put)),))
    origin = (*kernel.origin, *scaled.origin)
    return replace(kernel, buffers=(*kernel.buffers, *new), locals=(terms,), body=(made,), origin=origin)


def with_factor(kernel: Kernel, rows: Buffer, scaled: Scaled, width: int) -> Kernel:
    """The second product, of rows without their factor, from whose parts of sums it makes the factor: its last argument."""
    c = _product_of(kernel)
    assert c is not None and c.a.buffer is rows  # type: ignore[union-attr]
    count = scaled.columns // width
    parts, part, factor = Buffer(f"b{len(kernel.buffers)}", f32, c.m * count), Var("p", index_), Var("f", f32)
    term = Load(parts, k.add(k.mul(c.i, count), part))
    total = Loop(part, count, (), vector=True, reduces=(Reduce(scaled.total, "add", term),))
    sums = [x for x in (c.acc, c.also) if x is not None]
    scaled_sums: dict[Var, Expr] = {x: k.mul(x, factor) for x in sums}
    made = replace(c, epilogue=substitute(c.epilogue, scaled_sums), before=(total, *scaled.lets, Let(factor, scaled.factor)))
    return replace(kernel, buffers=(*kernel.buffers, parts), body=(made,))


__all__ = ["Scaled", "factored", "scaled_rows", "with_factor", "with_parts"]

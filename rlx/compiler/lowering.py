"""Lowering: turns a fusion group into a Kernel. The expression of every element comes from the ops' declarations.

A loop group runs *passes* over each row of its space: pass p computes what needs p finished reductions. A value that a
later pass needs is kept in a row-long Local if recomputing it would cost more than a load. A contraction group runs pass 0 in
the epilogue, which has `acc`, and the later passes, with its reductions, on finished rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlx.compiler.element import ZERO, KernelBuilder, aligned, collapsed, larger, split
from rlx.compiler.facts import Facts, Part
from rlx.compiler.groups import Group
from rlx.compiler.operands import is_expensive, row_axes
from rlx.compiler.packing import contraction, is_matrix, reduction
from rlx.ir import kernel as K
from rlx.ir.dtype import f32, index_
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import k
from rlx.ir.layout import TiledLayout, in_levels, one_stride
from rlx.ir.op import Kind
from rlx.ir.program import Region
from rlx.ir.shape import Shape, contiguous_strides
from rlx.records import record

LEAST_LINES = 4  # cache lines of f32 that a loop walks, at least, if it is a separate one that skips padding
MOST_LOADS_AGAIN = 2  # a value that needs more loads than this is kept, not recomputed

Grid = tuple[tuple[K.Var, int], ...]
Body = tuple[K.Stmt, ...]
Coords = Callable[[K.Expr], Sequence[K.Expr]]  # column -> its coordinates in the group's space


class _Points:
    """The grid being built, and its limits."""

    def __init__(self, builder: KernelBuilder) -> None:
        self.b, self.grid = builder, list[tuple[K.Var, int]]()

    def place(self, axes: Sequence[int]) -> K.Expr:
        """The flat position in these axes of the space."""
        first, size, each = self.start(axes)
        self.grid.append((K.Var("g"), size))
        if each:
            self.b.limit(self.grid[-1][0], each)
        return k.add(first, self.grid[-1][0])

    def start(self, axes: Sequence[int], least: int = 1) -> tuple[K.Expr, int, int]:
        """(first flat position, number of points, points per active row: 0 if these axes have none). The dims outside the active
        rows become grid axes if at least `least` points are left."""
        dims, active = self.b.group.dims, self.b.active
        size = math.prod(dims[a] for a in axes)
        if active is None or active.axis not in axes:
            return ZERO, size, 0
        each = active.inner * math.prod(dims[a] for a in axes if a > active.axis)
        inner = active.upper * each
        if inner == size or inner < least:
            return ZERO, size, each if inner == size else 0
        self.grid.append((K.Var("o"), size // inner))
        return k.mul(self.grid[-1][0], inner), inner, each


@record(eq=False)
class Extra:
    """A buffer that is no value of the graph around a sub-graph: its constant, its prepared weight, or its arena."""

    region: Region
    shape: Shape
    name: str
    data: np.ndarray | None = None
    layout: TiledLayout | None = None


Place = Value | Extra


class Lowered(NamedTuple):
    """A kernel and the base values bound to its buffers, in argument order."""

    kernel: K.Kernel
    args: tuple[Place, ...]


def lower_group(group: Group, facts: Facts) -> Lowered:
    """The kernel of one group."""
    builder, anchor = KernelBuilder(group, facts), group.anchor
    exchanged = anchor is not None and anchor.op.kind is Kind.COLLECTIVE
    if anchor is None:
        whole = next(iter(group.stores))
        left = facts.fills.get(whole)
        grid, body = _Rows(builder).loops() if left is None else _filled(builder, whole, left)
    elif exchanged or (facts.compilation.is_native(anchor) and not is_claimed_product(anchor, facts)):
        builder.active = None if exchanged else builder.active  # a collective moves the whole operand, on every rank
        grid, body = (), (_native(builder, anchor),)
    elif anchor.op.kernel is not None or anchor.op.update is not None:
        builder.open_stores(anchor.results)
        write = anchor.op.kernel or anchor.op.update
        grid, body = write(builder, anchor) if 1 not in group.operands else _rows_of_update(builder, anchor)  # type: ignore[misc]
        var = next(iter(builder.rows), None)
        if builder.active and builder.active.outer == len(builder.rows) == 1 and isinstance(var, K.Var) and var in dict(grid):
            builder.limit(var, builder.active.inner)
    else:
        grid, body = _contract(builder, anchor)
    origin = tuple(n.op.name for n in group.nodes)
    name = anchor.attrs.what if exchanged else "_".join(dict.fromkeys(origin))[:60]  # type: ignore[union-attr]
    buffers, kept, limits = tuple(builder.buffers.values()), tuple(builder.locals), tuple(builder.limits)
    kernel = K.Kernel(name, buffers, kept, tuple(grid), tuple(body), origin, limits)
    return Lowered(kernel, tuple(builder.buffers))


class _Rows:
    """The passes over the rows of a group: their levels, their results, and the values kept between them."""

    def __init__(self, builder: KernelBuilder, acc: Value | None = None, operand: Group | None = None) -> None:
        """`acc`: the contraction's result; its reductions run in pass 1, when the row is finished. `operand`: the group that
        computes an operand of the contraction, instead of the builder's group."""
        self.b, self.group = builder, operand or builder.group
        self.per_row = acc is not None or (operand is not None and builder.group.anchor.op.update is None)  # type: ignore[union-attr]
        self.reductions, self.axis = self.group.row_reductions(), self.group.axis
        self.level: dict[Node, int] = {}
        for node in self.group.nodes:
            if node not in self.group.absorbed:
                here = max(map(self.level_of, node.inputs), default=0)
                self.level[node] = max(here, int(acc is not None)) + 1 if node in self.reductions else here
        self.last = max(self.level[n] for n in [*self.reductions, *(v.node for v in self.group.stores)])
        self.kept: dict[Value, K.Local] = {}
        self.plan_kept()

    def level_of(self, value: Value) -> int:
        node = value.node if value.node in self.level else self.b.places.base(value).node
        if node in self.group.absorbed:
            return max(map(self.level_of, node.inputs), default=0)
        return self.level.get(node, 0)

    # -- what is kept

    def plan_kept(self) -> None:
        """Choose the values that a later pass reads from a Local instead of recomputing them."""
        kept: dict[int, list[Value]] = {}
        for p in range(self.last, -1, -1):
            reduced = [n.inputs[0] for n in self.reductions if self.level[n] == p + 1]
            for root in reduced + self.stored(p) + kept.get(p, []):
                for value in self.earlier(root, p):
                    if value not in self.kept and self.worth_keeping(value):
                        self.kept[value] = self.b.local(value.dtype.compute, self.group.dims[self.axis], per_row=self.per_row)
                        kept.setdefault(self.level[value.node], []).append(value)

    def stored(self, p: int) -> list[Value]:
        """Full values that pass p stores."""
        return [v for v in self.group.stores if self.group.forms[v.node] == "full" and self.level[v.node] == p]

    def earlier(self, root: Value, p: int) -> list[Value]:
        """Full values of earlier passes that computing `root` in pass p reads, nearest first."""
        out: list[Value] = []
        todo, seen = [root], set()
        while todo:
            value = todo.pop()
            if value in seen or value.node not in self.level or self.group.forms[value.node] != "full":
                continue
            seen.add(value)
            if self.level[value.node] < p:
                out.append(value)
                if self.worth_keeping(value):
                    continue
            todo += value.node.inputs
        return out

    def worth_keeping(self, value: Value) -> bool:
        """True if recomputing the value costs more than storing and loading it."""
        loads, seen, todo = 0, set(), [value]
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            if v.node not in self.group.forms:
                loads += v.shape.num_elements > 1
            elif self.group.forms[v.node] == "full":
                if v.node.op.kind is not Kind.POINTWISE or is_expensive(v.node):
                    return True
                todo += v.node.inputs
        return loads > MOST_LOADS_AGAIN

    # -- writing

    def loops(self) -> tuple[Grid, Body]:
        """Grid and body of a group without a contraction."""
        dims = self.group.dims
        self.b.open_stores(self.group.stores)
        if self.reductions:
            if self.b.active and self.b.active.axis == self.axis:
                self.b.active = None
            others = [a for a in range(len(dims)) if a != self.axis]
            groups = [*([others[n] for n in g] for g in collapsed(self.group.lines, self.accesses())), [self.axis]]
        elif all(n.op.kind in (Kind.POINTWISE, Kind.REDUCE) for n in self.group.nodes):
            groups = collapsed(dims, self.accesses())
        else:
            # an op that computes coordinates of its operands needs each result coordinate: recovering them from a flat one
            # would cost a division per element and make addresses non-affine
            groups = larger(dims)
        groups, points = groups or [[]], _Points(self.b)
        row = [points.place(g) for g in groups[:-1]]
        first, columns, each = points.start(groups[-1], LEAST_LINES * self.b.facts.target.line_bytes // 4)

        def coords(column: K.Expr) -> list[K.Expr]:
            parts = zip(groups, [*row, k.add(first, column)])
            found = {a: c for g, v in parts for a, c in zip(g, split(v, [dims[a] for a in g]))}
            return [found[a] for a in sorted(found)]

        passes = (self.one_pass(p, columns, coords, each) for p in range(self.last + 1))
        return tuple(points.grid), tuple(s for statements in passes for s in statements)

    def one_pass(self, p: int, columns: int, coords: Coords, each: int = 0) -> list[K.Stmt]:
        """The loop over columns of pass p (`each`: columns per active row), then the row values that its reductions complete."""
        reductions, column = [n for n in self.reductions if self.level[n] == p + 1], K.Var("c")
        if each:
            self.b.limit(column, each)
        body, reduces = self.pass_body(p, coords(column), column, reductions)
        loop = K.Loop(column, columns, tuple(body), vector=True, reduces=tuple(reduces))
        self.b.bound.update((node.results[0], r.result) for node, r in zip(reductions, reduces))
        return [*([loop] if body or reduces else []), *self.row_values(p + 1, coords)]

    def pass_body(
        self, p: int, at: Sequence[K.Expr], column: K.Expr, reductions: Sequence[Node] = ()
    ) -> tuple[list[K.Stmt], list[K.Reduce]]:
        """Statements and reductions of one pass at coordinates `at`."""
        b, outside = self.b, dict(self.b.bound)
        b.bound.update((v, K.Load(x, column)) for v, x in self.kept.items() if self.level[v.node] < p)
        b.block = []
        b.memo.clear()
        reduces = [self.reduce_of(n, at) for n in reductions]
        writes = [b.store_value(v, at, b.element(v, at)) for v in self.stored(p)]
        writes += [K.Store(x, column, b.element(v, at)) for v, x in self.kept.items() if self.level[v.node] == p]
        body, b.block, b.bound = [*b.block, *writes], [], outside
        b.memo.clear()
        return body, reduces

    def operand(self, value: Value, at: Coords, row: K.Var, column: K.Var, rows: Sequence[K.Expr]) -> K.Computed:
        """The operand `value`, element (row, column) of which has coordinates at(column). `rows`: those of its row in the space
        of the group, where there are reductions of rows."""
        before = [s for p in range(self.last) for s in self.one_pass(p, self.group.dims[-1], lambda c: (*rows, c))]
        b, outside = self.b, dict(self.b.bound)
        b.bound.update((v, K.Load(x, column)) for v, x in self.kept.items())
        b.block = []
        element = b.element(value, at(column))
        body, b.block, b.bound = b.block, [], outside
        b.memo.clear()
        while body and column not in K.walk(body[0]):  # for example the range check of an index that selects the row
            before.append(body.pop(0))
        return K.Computed(row, column, element, value.dtype, tuple(before), tuple(body))

    def reduce_of(self, node: Node, at: Sequence[K.Expr]) -> K.Reduce:
        value = self.b.element(node.inputs[0], aligned(node.inputs[0], at))
        return K.Reduce(K.Var("r", value.dtype), reduction(node).op, value)

    def row_values(self, p: int, coords: Coords) -> list[K.Stmt]:
        """Bind the row-shaped values of level p, and store those that are read elsewhere."""
        b, at = self.b, coords(ZERO)
        out: list[K.Stmt] = []
        for node, form in self.group.forms.items():
            if node in self.group.absorbed or form == "full" or self.level[node] != p:
                continue
            value, here = node.results[0], [*at[: self.axis], *at[self.axis + 1 :]] if form == "dropped" else at
            expr = b.element(value, here)
            out += b.block
            b.block = []
            if not isinstance(expr, K.Var):
                var = K.Var("row", expr.dtype)
                out.append(K.Let(var, expr))
                expr = var
            b.bound[value] = expr
            if value in self.group.stores:
                out.append(b.store_value(value, here, expr))
        b.memo.clear()
        return out

    def accesses(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(dims, strides) of every buffer the group touches element by element; without the columns if it has reductions."""
        out = []
        for node in self.group.nodes:
            if node in self.group.absorbed:
                continue
            values = [v for v in node.results if v in self.group.stores]
            if node.op.kind in (Kind.POINTWISE, Kind.REDUCE):
                across = node.op.kind is Kind.REDUCE and node not in self.reductions  # what it reads may be computed on the way
                values += [v for v in node.inputs if across or v.node not in self.group.forms]
                values += self.group.read_on_the_way(node.inputs) if across else []
            for v in values:
                dims, strides = v.shape.static, self.b.places.locate(v)[1].strides
                if node.op.reduce is not None and node not in self.reductions and v.node is not node:
                    facts, more = node.op.reduce(node.attrs, node.inputs[0].shape), node.inputs[0].rank - v.rank
                    dims, strides = (1,) * more + dims, (0,) * more + strides
                    left = [a for a in range(len(dims)) if facts.keepdims or a not in facts.axes]
                    dims, strides = tuple(1 if a in facts.axes else dims[a] for a in left), tuple(strides[a] for a in left)
                dropped = self.group.forms[node] == "dropped" and (v.node is node or node.op.kind is Kind.POINTWISE)
                row = self.axis - len(self.group.dims) + len(dims)  # its axis here, where dims are aligned from the right
                if self.reductions and row >= 0 and not dropped:
                    dims, strides = dims[:row] + dims[row + 1 :], strides[:row] + strides[row + 1 :]
                out.append((dims, strides))
        return out


def _filled(b: KernelBuilder, whole: Value, parts: Sequence[Part]) -> tuple[Grid, Body]:
    """Grid and body of a kernel that fills parts of `whole` with numbers."""
    b.open_stores([whole])
    dims, strides = whole.shape.static, contiguous_strides(whole.shape.static)
    shared = all(p.dims[0] == dims[0] for p in parts)
    grid = ((K.Var("g"), dims[0]),) if shared else ()
    return grid, tuple(_fill(b, whole, p, strides, [(v, strides[0]) for v, _ in grid]) for p in parts)


def _fill(b: KernelBuilder, whole: Value, part: Part, strides: Sequence[int], walked: list[tuple[K.Expr, int]]) -> K.Stmt:
    dims, rank = whole.shape.static, len(walked)
    inner = next((a for a in range(whole.rank - 1, rank, -1) if part.dims[a] != dims[a]), rank)  # from it on, elements adjoin
    loops = [(K.Var("i"), part.dims[a], strides[a]) for a in range(rank, inner)]
    column = K.Var("c")
    at = K.linear([*walked, *((v, s) for v, _, s in loops), (column, 1)], sum(map(int.__mul__, part.start, strides)))
    store = K.Store(b.buffer(whole), at, k.const(part.source, whole.dtype.compute))  # type: ignore[arg-type]
    made = K.Loop(column, math.prod(part.dims[inner:]), (store,), vector=True)
    for var, size, _ in reversed(loops):
        made = K.Loop(var, size, (made,))
    return made


def _native(b: KernelBuilder, anchor: Node) -> K.Native:
    """A claimed op or collective, with the other nodes of the group as its epilogue."""
    made, result = b.native(anchor), anchor.results[0]
    if made.acc is None:
        return made
    seen = next((n.results[0] for n in b.group.forms if b.places.is_alias(n)), result)
    merged, axes = b.places.merged(seen), [v for v, _ in made.axes]
    assert merged is not None, f"{seen} splits axes of {result}"
    b.bound |= {result: made.acc, seen: made.acc}
    epilogue, _ = _Rows(b, result).pass_body(0, [K.linear((axes[a], n) for a, n in part) for part in merged], axes[-1])
    if seen is not result and result in b.group.stores:
        epilogue.append(b.store_value(result, axes, made.acc))
    return replace(made, epilogue=tuple(epilogue))


def _rows_of_update(b: KernelBuilder, anchor: Node) -> tuple[Grid, Body]:
    """An update in place of rows that are computed in its kernel, each before it is written."""
    group, value = b.group.operands[1], anchor.inputs[1]
    b.bound[value] = element = K.Var("x", value.dtype.compute)
    grid, (*before, loop) = anchor.op.update(b, anchor)  # type: ignore[misc]
    del b.bound[value]
    assert isinstance(loop, K.Loop), f"{anchor.op.name} writes no rows"
    axes, outer = row_axes(b.places, value, group.forms), [v for v, _ in grid]
    rows = [ZERO if a is None else outer[a] for a in axes or ()]
    made = _Rows(b, operand=group).operand(value, lambda c: (*outer, c), K.Var("r"), loop.var, rows)
    body = (*made.body, K.Let(element, made.value), *loop.body)
    return grid, (*before, *made.before, replace(loop, body=body))


# -- contractions --------------------------------------------------------------------------------------------------


def is_claimed_product(node: Node, facts: Facts) -> bool:
    """True if the target claims the node as a contraction with an epilogue."""
    return facts.compilation.is_native(node) and node.op.product is not None and node.op.name in facts.target.followed


def _contract(b: KernelBuilder, anchor: Node) -> tuple[Grid, Body]:
    """Grid (batch dims, and row dims that share no stride) and the Contract with its epilogue and row passes."""
    facts, (left, right), dims = contraction(anchor), anchor.inputs[:2], b.group.dims
    _, layout = b.places.locate(left)
    # the longest run of trailing row axes with a common stride; the others become grid axes
    apart = next(n for n in range(len(facts.a_rows) + 1) if one_stride(layout, left.shape.static, facts.a_rows[n:]))
    in_place = b.facts.target.levels or b.facts.target.in_place(anchor, layout)
    apart = 0 if 0 in b.group.operands or (in_place and is_matrix(facts)) else apart
    batch, rows = len(facts.a_batch), facts.a_rows[apart:]
    grid, columns_at = _Points(b), len(dims) - len(facts.b_columns)
    points = [grid.place([axis]) for axis in range(batch + apart)]
    row_dims, column_dims = dims[batch + apart : columns_at], dims[columns_at:]
    i, j = K.Var("i"), K.Var("j")
    point, count = K.Var("group"), None
    if facts.group < 0:
        first, m, each = grid.start(range(batch + apart, columns_at), b.facts.target.tile_rows)
        if each:
            b.limit(i, each)
    else:
        m = dims[0]
        grid.grid.append((point, right.shape.static[0]))
        first, count = _rows_of_group(b, anchor.inputs[2], point, m)
    at_row = (*points, *split(k.add(first, i), row_dims))

    walked = [*zip(points, facts.a_batch), *zip(points[batch:], facts.a_rows)]
    if 0 in b.group.operands:
        row = K.Var("r")
        a = _computed(b, 0, left, row, [*walked, *zip(split(k.add(first, row), row_dims), rows)], facts.a_sum)
    else:
        plain = _operand(b, left, walked, rows, facts.a_sum)
        a = replace(plain, offset=k.add(plain.offset, plain.place(first, ZERO)))
    walked = [*zip(points, facts.b_batch), *([(point, 0)] if count is not None else [])]
    if right in b.places.tiles:
        other = _packed(b, anchor, walked)
    elif 1 in b.group.operands:
        row = K.Var("r")
        inner = split(row, [right.shape.static[axis] for axis in facts.b_sum])
        other = _computed(b, 1, right, row, [*walked, *zip(inner, facts.b_sum)], facts.b_columns)
    else:
        other = _operand(b, right, walked, facts.b_sum, facts.b_columns)
        assert not other.row_levels + other.col_levels, f"{right} has several strides along its rows or columns"
    result = anchor.results[0]
    acc = K.Var("acc", result.dtype.compute)  # narrow floats are summed in f32, integers in their own type
    b.open_stores(b.group.stores)
    views = [n.results[0] for n in b.group.forms.keys() - b.group.absorbed if b.places.is_alias(n)]
    halves = sorted(views, key=lambda v: b.places.locate(v)[1].offset)
    also = K.Var("acc", acc.dtype) if halves else None
    b.bound |= {result: acc, **dict(zip(halves, (acc, also)))}  # type: ignore[dict-item]
    passes, n = _Rows(b, result), math.prod(column_dims)

    def coords(column: K.Expr) -> tuple[K.Expr, ...]:
        return (*at_row, *split(column, column_dims))

    epilogue, _ = passes.pass_body(0, coords(j), j)
    if halves and result in b.group.stores:
        epilogue += [b.store_value(result, (*at_row, k.add(j, at)), x) for at, x in ((0, acc), (n, also))]  # type: ignore[arg-type]
    del b.bound[result]
    row_passes = [s for p in range(1, passes.last + 1) for s in passes.one_pass(p, n, coords)]
    depth = math.prod(left.shape.static[x] for x in facts.a_sum)
    rounded = b.facts.compilation.options.precision == "tf32" and all(v.dtype == f32 for v in anchor.inputs)
    contract = K.Contract(i, j, m, n, depth, a, other, acc, tuple(epilogue), tuple(row_passes), also, rounded, count)
    return tuple(grid.grid), (contract,)


def _packed(b: KernelBuilder, anchor: Node, walked: list[tuple[K.Expr, int]]) -> K.Operand:
    """The packed right operand: panels of numbers or of quantised blocks, also of each group; or axes in another order."""
    right, facts = anchor.inputs[1], contraction(anchor)
    tiles = b.places.tiles[right]
    apart = {axis: (tiles.shape[axis] > 1) * stride for (axis, _), stride in reversed([*zip(tiles.parts, tiles.strides)])}
    other = K.Operand(b.buffer(b.places.base(right)), K.linear([(v, apart[axis]) for v, axis in walked if axis >= 0]))
    if form := getattr(anchor.attrs, "format", ""):
        return replace(other, blocks=form, exact=anchor.attrs.exact)  # type: ignore[union-attr]
    if all(step == 1 for _, step in tiles.parts):
        return replace(other, row_stride=apart[facts.b_sum[0]], col_stride=apart[facts.b_columns[0]])
    (columns, panel), (summed, interleaved) = tiles.parts[:2] if facts.group < 0 else tiles.parts[1:3]
    assert ((columns,), (summed,)) == (facts.b_columns, facts.b_sum), f"{tiles} are no panels of columns"
    return replace(other, panel=panel, group=interleaved)


def _rows_of_group(b: KernelBuilder, ends: Value, group: K.Var, rows: int) -> tuple[K.Expr, K.Expr]:
    """(first row, number of rows) of a group: between two `ends`, or to the last row for the last group. Clamped, so that wrong
    ends give wrong results, and no access outside the operands."""

    def end(at: K.Expr, guard: K.Expr) -> K.Expr:
        return k.min(k.max(k.cast(b.element(ends, (at,), guard), index_), 0), rows)

    inner, last = k.lt(group, k.const(ends.shape.static[0] - 1)), k.const(rows)
    first = end(k.sub(group, 1), k.lt(k.const(0), group))
    stop = k.select(inner, end(group, inner), last)
    if b.active and b.active[:2] == (0, 1):
        stop = k.min(stop, b.extent(b.active.inner))
    return first, k.max(k.sub(stop, first), 0)


def _computed(
    b: KernelBuilder, side: int, value: Value, row: K.Var, walked: list[tuple[K.Expr, int]], columns: tuple[int, ...]
) -> K.Computed:
    """Operand number `side`, computed by the group that was absorbed for it. `walked`: as in _operand, those of its row too."""
    group, dims, column = b.group.operands[side], value.shape.static, K.Var("c")

    def at(column: K.Expr) -> tuple[K.Expr, ...]:
        places = dict(zip(columns, split(column, [dims[a] for a in columns])))
        places |= {axis: v for v, axis in walked if axis >= 0}
        return tuple(ZERO if d == 1 else places[axis] for axis, d in enumerate(dims))

    rows: Sequence[K.Expr] = at(ZERO)[:-1]
    if group.row_reductions() and dims != group.dims:  # a reshape that keeps the rows
        flat = K.linear(zip(rows, (math.prod(dims[a + 1 : -1]) for a in range(len(dims) - 1))))
        rows = split(flat, group.dims[:-1])
    return _Rows(b, operand=group).operand(value, at, row, column, rows)


def _operand(
    b: KernelBuilder, value: Value, walked: list[tuple[K.Expr, int]], rows: tuple[int, ...], columns: tuple[int, ...]
) -> K.Operand:
    """A strided matrix operand. `walked`: the axis that each coordinate walks, -1 where it has none."""
    base, layout = b.places.locate(value)
    dims = value.shape.static
    offset = K.linear([(v, layout.strides[a]) for v, a in walked if a >= 0 and dims[a] != 1], layout.offset)
    (row, row_levels), (column, col_levels) = (in_levels(layout, dims, axes) for axes in (rows, columns))
    return K.Operand(b.buffer(base), offset, row, column, row_levels=row_levels, col_levels=col_levels)

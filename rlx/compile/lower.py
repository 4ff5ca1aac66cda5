"""Lowering: a fusion group becomes a Kernel. Every element's expression comes from the ops' own declarations.

A loop group runs *passes* over each row of its space: pass p computes what needs p finished reductions. A value that a
later pass needs is kept in a row-long Local when computing it again would cost more than a load. A contraction group has
its pass 0 in the epilogue, where `acc` is at hand, and the later ones on finished rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlx.compile.fuse import Fusion, Group, contraction
from rlx.compile.place import Places
from rlx.ir import kernel as K
from rlx.ir.graph import CONSTANT, Node, Value
from rlx.ir.kernel import k
from rlx.ir.op import Kind
from rlx.ir.program import Layout

CHUNK_ELEMENTS = 4096  # one grid point of a long loop: small enough to share out, long enough to stream
EXPENSIVE = frozenset({"exp", "log", "sin", "cos", "tanh", "erf", "pow", "div", "sqrt", "rem"})
MOST_LOADS_AGAIN = 2  # a value made of more loads than this is kept rather than made again


@dataclass(frozen=True)
class Lowered:
    """A kernel and the base values behind its buffers, in argument order."""

    kernel: K.Kernel
    args: tuple[Value, ...]


def lower_group(group: Group, fusion: Fusion, natives: set[Node]) -> Lowered:
    """The kernel of one group."""
    builder = KernelBuilder(group, fusion)
    anchor = group.anchor
    if anchor is None:
        grid, body = _Rows(builder).loops()
    elif anchor in natives:
        grid, body = (), (builder.native(anchor),)
    elif anchor.op.kind is Kind.KERNEL:
        assert anchor.op.kernel is not None
        grid, body = anchor.op.kernel(builder, anchor)
        body = (*builder.block, *body)
    else:
        grid, body = _contract(builder, anchor)
    origin = tuple(n.op.name for n in group.nodes)
    name = "_".join(dict.fromkeys(origin))[:60]
    kernel = K.Kernel(name, tuple(builder.buffers.values()), tuple(builder.locals), tuple(grid), tuple(body), origin)
    return Lowered(kernel, tuple(builder.buffers))


class KernelBuilder:
    """What an op's `element` and `kernel` functions see as `ctx`, and the state of the kernel being written.

    `block` collects statements that the expressions made so far depend on; `bound` gives values that are at hand in the
    current scope (finished reductions, the accumulator, rows kept in a Local).
    """

    def __init__(self, group: Group, fusion: Fusion) -> None:
        self.group, self.fusion, self.places = group, fusion, fusion.places
        self.buffers: dict[Value, K.Buffer] = {}
        self.locals: list[K.Local] = []
        self.block: list[K.Stmt] = []
        self.bound: dict[Value, K.Expr] = {}
        self._memo: dict[tuple, tuple[K.Expr, tuple]] = {}
        self._within: K.Expr | None = None  # guard of the element that an op's `element` is computing

    # -- offered to op declarations

    def dims(self, value: Value) -> tuple[int, ...]:
        return value.shape.static

    def element(self, value: Value, coords: Sequence[K.Expr], guard: K.Expr | None = None) -> K.Expr:
        """The element of `value` at `coords` (one i64 expression per dim), in its compute dtype; zero where `guard` is false."""
        coords = tuple(coords)
        if value in self.bound and guard is None:
            return self.bound[value]
        if self._within is not None and guard is not self._within:
            guard = self._within if guard is None else k.and_(self._within, guard)
        key = (value, tuple(map(id, coords)), id(guard))
        if key not in self._memo:
            self._memo[key] = (self._element(value, coords, guard), (coords, guard))  # keeps ids alive
        return self._memo[key][0]

    def check(self, ok: K.Expr, code: int) -> None:
        """The run fails with `code` unless `ok` holds at every point that is asked for."""
        self.block.append(K.Check(ok if self._within is None else k.or_(ok, k.not_(self._within)), code))

    def local(self, dtype, size: int, per_row: bool = False) -> K.Local:
        made = K.Local(f"l{len(self.locals)}", dtype, size, per_row)
        self.locals.append(made)
        return made

    def store(self, result: int, coords: Sequence[K.Expr], value: K.Expr, guard: K.Expr | None = None) -> K.Store:
        """Write one element of the anchor's result number `result`."""
        assert self.group.anchor is not None
        return self.store_value(Value(self.group.anchor, result), coords, value, guard)

    # -- inside the compiler

    def buffer(self, base: Value, writable: bool = False) -> K.Buffer:
        if base not in self.buffers:
            self.buffers[base] = K.Buffer(f"b{len(self.buffers)}", base.dtype, base.shape.num_elements, writable)
        return self.buffers[base]

    def open_stores(self, values: Sequence[Value]) -> None:
        for v in values:
            self.buffer(v, writable=True)

    def store_value(self, value: Value, coords: Sequence[K.Expr], what: K.Expr, guard: K.Expr | None = None) -> K.Store:
        _, layout = self.places.locate(value)
        return K.Store(self.buffer(value, writable=True), index(layout, value.shape.static, coords), what, guard)

    def scope(self) -> None:
        """Forget expressions of a scope that has ended."""
        self._memo.clear()

    def view(self, value: Value) -> K.View:
        base, layout = self.places.locate(value)
        return K.View(self.buffer(base), value.shape.static, layout.strides, layout.offset)

    def native(self, node: Node) -> K.Native:
        inputs = tuple(self.view(v) for v in node.inputs)
        self.open_stores(node.results)
        return K.Native(node.op.name, node.attrs, inputs, tuple(self.view(v) for v in node.results))

    def _element(self, value: Value, coords: tuple[K.Expr, ...], guard: K.Expr | None) -> K.Expr:
        node = value.node
        if node.op is CONSTANT and value.shape.num_elements == 1:
            made = k.const(node.attrs.data.reshape(-1)[0].item(), value.dtype.compute)  # type: ignore[union-attr]
            return made if guard is None else k.select(guard, made, k.const(0, made.dtype))
        base, layout = self.places.locate(value)
        if base.node not in self.group.forms:
            return K.Load(self.buffer(base), index(layout, value.shape.static, coords), guard)
        if node.op.kind is Kind.POINTWISE:
            assert node.op.scalar is not None
            args = [self.element(v, aligned(v, coords), guard) for v in node.inputs]
            made = node.op.scalar(k, node.attrs, *args)
            return made if guard is None else k.select(guard, made, k.const(0, made.dtype))
        if node.op.kind is Kind.REDUCE:
            return self._reduction(node, coords, guard)
        assert node.op.element is not None, node
        outside, self._within = self._within, guard
        made = node.op.element(self, node, value.index, coords)
        self._within = outside
        return made if guard is None else k.select(guard, made, k.const(0, made.dtype))

    def _reduction(self, node: Node, coords: tuple[K.Expr, ...], guard: K.Expr | None) -> K.Expr:
        """A reduction over any axes, as serial loops inside the current scope."""
        assert node.op.reduce is not None
        source = node.inputs[0]
        facts = node.op.reduce(node.attrs, source.shape)
        dims = source.shape.static
        loop_vars = {axis: K.Var("r") for axis in facts.axes}
        outer = iter(c for i, c in enumerate(coords) if not (facts.keepdims and i in facts.axes))
        at = [loop_vars[axis] if axis in loop_vars else next(outer) for axis in range(len(dims))]
        kept, self.block = self.block, []
        value = self.element(source, at, guard)
        inner, self.block = self.block, kept
        for axis in reversed(facts.axes):
            result = K.Var("sum", value.dtype)
            loop = K.Loop(loop_vars[axis], dims[axis], tuple(inner), reduces=(K.Reduce(result, facts.op, value),))
            inner, value = [loop], result
        self.block += inner
        return value


# -- addresses -----------------------------------------------------------------------------------------------------


def aligned(value: Value, coords: Sequence[K.Expr]) -> tuple[K.Expr, ...]:
    """The coordinates of a broadcast operand, given those of the result."""
    dims = value.shape.static
    tail = coords[len(coords) - len(dims) :]
    return tuple(k.const(0) if d == 1 else c for d, c in zip(dims, tail))


def index(layout: Layout, dims: tuple[int, ...], coords: Sequence[K.Expr]) -> K.Expr:
    """offset + sum of coordinate * stride. Coordinates that split one variable are put together again where the strides
    let them, so that the address stays linear in the variable."""
    terms = [(c, s) for c, s, d in zip(coords, layout.strides, dims) if d != 1]
    at = 0
    while at + 1 < len(terms):
        (high, high_stride), (low, low_stride) = terms[at], terms[at + 1]
        whole = _whole(high, low)
        if whole is not None and high_stride == low_stride * whole[1]:
            terms[at : at + 2] = [(whole[0], low_stride)]
            at = max(at - 1, 0)
        else:
            at += 1
    return K.linear(terms, layout.offset)


def _whole(high: K.Expr, low: K.Expr) -> tuple[K.Expr, int] | None:
    """(x, d) if high is x div d and low is x rem d."""
    if isinstance(high, K.Alu) and isinstance(low, K.Alu) and (high.op, low.op) == ("div", "rem"):
        (x, d), (y, e) = high.args, low.args
        if x is y and isinstance(d, K.Const) and isinstance(e, K.Const) and d.value == e.value:
            return x, int(d.value)
    return None


def split(var: K.Expr, dims: Sequence[int]) -> list[K.Expr]:
    """Coordinates over `dims` of the flat row-major position `var`."""
    out: list[K.Expr] = []
    for d in reversed(dims[1:]):
        out.append(k.rem(var, d))
        var = k.div(var, d)
    return [var, *reversed(out)] if dims else []


def collapsed(dims: tuple[int, ...], layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[int]]:
    """Axes of a space in groups that every access can walk with one stride. `layouts`: (dims, strides) of each access,
    aligned to the space from the right."""
    groups: list[list[int]] = []
    for axis in range(len(dims)):
        if groups and all(_joins(dims, groups[-1][-1], axis, *access) for access in layouts):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _joins(space: tuple[int, ...], left: int, right: int, dims: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    def stride(axis: int) -> int:
        at = axis - (len(space) - len(dims))
        return strides[at] if at >= 0 and dims[at] != 1 else 0

    if space[left] == 1 or space[right] == 1:
        return True
    return stride(left) == stride(right) * space[right]


# -- loop groups ---------------------------------------------------------------------------------------------------


class _Rows:
    """Passes over the rows of a group: levels, what each pass computes, what is kept between them."""

    def __init__(self, builder: KernelBuilder, acc: Value | None = None) -> None:
        self.b, self.group, self.acc = builder, builder.group, acc
        self.level: dict[Node, int] = {}
        for node in self.group.nodes:
            if node not in self.group.absorbed:
                here = max((self.level.get(v.node, 0) for v in node.inputs), default=0)
                self.level[node] = here + (1 if self.is_row_reduction(node) else 0)
        self.reductions = self.group.row_reductions()
        self.last = max((self.level[n] for n in self.reductions), default=0)
        self.last = max([self.last, *(self.level[v.node] for v in self.group.stores)], default=0)
        self.kept: dict[Value, K.Local] = {}
        self.plan_kept()

    def is_row_reduction(self, node: Node) -> bool:
        return node.op.kind is Kind.REDUCE and self.group.forms[node] != "full"

    # -- what is kept

    def plan_kept(self) -> None:
        """Choose the values that a later pass reads from a Local instead of computing them again."""
        kept: dict[int, list[Value]] = {}
        for p in range(self.last, -1, -1):
            for root in self.roots(p) + kept.get(p, []):
                for value in self.frontier(root, p):
                    if value not in self.kept and self.worth_keeping(value):
                        self.kept[value] = self.b.local(value.dtype.compute, self.group.dims[-1], per_row=self.acc is not None)
                        kept.setdefault(self.level[value.node], []).append(value)

    def roots(self, p: int) -> list[Value]:
        """Full values that pass p must compute for a reduction or a store."""
        out = [n.inputs[0] for n in self.reductions if self.level[n] == p + 1]
        return out + [v for v in self.group.stores if self.group.forms[v.node] == "full" and self.level[v.node] == p]

    def frontier(self, root: Value, p: int) -> list[Value]:
        """Full values of earlier passes that computing `root` in pass p reads, nearest first."""
        out: list[Value] = []
        todo, seen = [root], set()
        while todo:
            value = todo.pop()
            node = value.node
            if value in seen or node not in self.level or self.group.forms[node] != "full":
                continue
            seen.add(value)
            if self.level[node] < p or (self.acc is not None and p > 0 and value == self.acc):
                out.append(value)
                if self.worth_keeping(value):
                    continue
            todo += node.inputs
        return out

    def worth_keeping(self, value: Value) -> bool:
        """Whether computing the value again costs more than storing and loading it."""
        loads, seen, todo = 0, set(), [value]
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            node = v.node
            if node not in self.group.forms:
                loads += v.shape.num_elements > 1
                continue
            if v == self.acc or node.op.kind not in (Kind.POINTWISE, Kind.REDUCE) or _is_expensive(node):
                return True
            if node.op.kind is Kind.REDUCE:
                if not self.is_row_reduction(node):
                    return True
                continue
            todo += node.inputs
        return loads > MOST_LOADS_AGAIN

    # -- writing

    def loops(self) -> tuple[tuple[tuple[K.Var, int], ...], tuple[K.Stmt, ...]]:
        """Grid and body of a group without a contraction."""
        dims = self.group.dims
        self.b.open_stores(self.group.stores)
        if self.reductions:
            groups = [[len(dims) - 1]]
            groups = collapsed(dims[:-1], self.accesses(rows_only=True)) + groups
        else:
            # an op that computes its operands' coordinates needs each of its own as it is: taking a flat one apart again
            # would cost a division per element and make the addresses irregular
            whole = all(n.op.kind in (Kind.POINTWISE, Kind.REDUCE) for n in self.group.nodes)
            groups = collapsed(dims, self.accesses()) if whole and dims else [[a] for a in range(len(dims))]
        extents = [_product(dims[a] for a in g) for g in groups]
        grid, row, chunk = [], [], None
        for extent in extents[:-1]:
            grid.append((K.Var("g"), extent))
            row.append(grid[-1][0])
        columns = extents[-1] if extents else 1
        if not self.reductions and columns > 2 * CHUNK_ELEMENTS:
            chunk = (K.Var("chunk"), -(-columns // CHUNK_ELEMENTS))
            grid.append(chunk)

        def coords(column: K.Expr) -> tuple[K.Expr, ...]:
            parts = [c for g, v in zip(groups, [*row, column]) for c in split(v, [dims[a] for a in g])]
            return tuple(parts)

        body: list[K.Stmt] = []
        for p in range(self.last + 1):
            body += self.one_pass(p, columns, coords, chunk[0] if chunk else None)
        return tuple(grid), tuple(body)

    def one_pass(self, p: int, columns: int, coords, chunk: K.Var | None = None) -> list[K.Stmt]:
        """The loop over columns of pass p, then the row values that its reductions complete."""
        b = self.b
        reductions = [n for n in self.reductions if self.level[n] == p + 1]
        stores = [v for v in self.group.stores if self.group.forms[v.node] == "full" and self.level[v.node] == p]
        keeps = [v for v in self.kept if self.level[v.node] == p]
        out: list[K.Stmt] = []
        reduces: list[K.Reduce] = []
        if reductions or stores or keeps:
            column = K.Var("c")
            extent, position, guard = columns, column, None
            if chunk is not None:
                extent = CHUNK_ELEMENTS
                position = k.add(k.mul(chunk, CHUNK_ELEMENTS), column)
                guard = k.lt(position, columns) if columns % CHUNK_ELEMENTS else None
            stmts, reduces = self.pass_body(p, coords(position), column, reductions, stores, keeps, guard)
            out.append(K.Loop(column, extent, tuple(stmts), vector=True, reduces=tuple(reduces)))
        for node, r in zip(reductions, reduces):
            b.bound[node.results[0]] = r.result
        out += self.row_values(p + 1, coords)
        return out

    def pass_body(self, p, at, column, reductions, stores, keeps, guard=None) -> tuple[list[K.Stmt], list[K.Reduce]]:
        """Statements and reductions of one pass at coordinates `at`."""
        b = self.b
        b.scope()
        bound = dict(b.bound)
        for v, local in self.kept.items():
            if self.level[v.node] < p:
                b.bound[v] = K.Load(local, column)
        b.block = []
        reduces = [self.reduce_of(n, at) for n in reductions]
        writes: list[K.Stmt] = [b.store_value(v, at, b.element(v, at, guard), guard) for v in stores]
        writes += [K.Store(self.kept[v], column, b.element(v, at, guard)) for v in keeps]
        stmts, b.block, b.bound = [*b.block, *writes], [], bound
        b.scope()
        return stmts, reduces

    def reduce_of(self, node: Node, at) -> K.Reduce:
        assert node.op.reduce is not None
        facts = node.op.reduce(node.attrs, node.inputs[0].shape)
        value = self.b.element(node.inputs[0], aligned(node.inputs[0], at))
        return K.Reduce(K.Var("r", value.dtype), facts.op, value)

    def row_values(self, p: int, coords) -> list[K.Stmt]:
        """Bind the row-shaped values of level p, and store those that are read elsewhere."""
        b = self.b
        at = coords(k.const(0))
        out: list[K.Stmt] = []
        for node in self.group.nodes:
            form = self.group.forms[node]
            if node in self.group.absorbed or form == "full" or self.level[node] != p:
                continue
            value = node.results[0]
            here = at[:-1] if form == "dropped" else at
            b.block = []
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
        b.scope()
        return out

    def accesses(self, rows_only: bool = False) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(dims, strides) of every buffer the group touches element by element."""
        out = []
        for node in self.group.nodes:
            if node in self.group.absorbed:
                continue
            values = [v for v in node.inputs if v.node not in self.group.forms] + [v for v in node.results if v in self.group.stores]
            if node.op.kind not in (Kind.POINTWISE, Kind.REDUCE):
                values = [v for v in node.results if v in self.group.stores]
            for v in values:
                _, layout = self.b.places.locate(v)
                dims, strides = v.shape.static, layout.strides
                if rows_only:
                    dropped = self.group.forms[node] == "dropped" and (v.node is node or node.op.kind is Kind.POINTWISE)
                    cut = len(dims) if dropped else len(dims) - 1
                    dims, strides = dims[: max(cut, 0)], strides[: max(cut, 0)]
                out.append((dims, strides))
        return out


def _is_expensive(node: Node) -> bool:
    """Whether one element of a pointwise node takes more than a few instructions, judged by what it lowers to."""
    if node.op.kind is not Kind.POINTWISE:
        return False
    assert node.op.scalar is not None
    made = node.op.scalar(k, node.attrs, *(K.Var("x", v.dtype.compute) for v in node.inputs))
    todo = [made]
    while todo:
        e = todo.pop()
        if isinstance(e, K.Alu):
            if e.op in EXPENSIVE:
                return True
            todo += e.args
    return False


def _product(xs) -> int:
    out = 1
    for x in xs:
        out *= x
    return out


# -- contractions --------------------------------------------------------------------------------------------------


def _contract(b: KernelBuilder, anchor: Node) -> tuple[tuple[tuple[K.Var, int], ...], tuple[K.Stmt, ...]]:
    """Grid (batch dims, and row dims that share no stride) and the Contract with its epilogue and row passes."""
    facts = contraction(anchor)
    left, right = anchor.inputs
    dims = anchor.shapes[0].static
    batch = len(facts.a_batch)
    rows = _row_axes(b.places, left, facts.a_rows)
    split_rows = len(facts.a_rows) - len(rows)
    grid = [(K.Var("g"), d) for d in dims[: batch + split_rows]]
    i, j = K.Var("i"), K.Var("j")
    m = _product(left.shape.static[a] for a in rows)
    n = _product(dims[len(dims) - len(facts.b_columns) :])
    depth = _product(left.shape.static[a] for a in facts.a_sum)
    at_i = split(i, [left.shape.static[a] for a in rows])
    at_j = split(j, dims[len(dims) - len(facts.b_columns) :])
    outer = [v for v, _ in grid]

    def coords(column: K.Expr) -> tuple[K.Expr, ...]:
        return (*outer, *at_i, *(at_j if column is j else [column]))

    a = _operand(b, left, outer[:batch], facts.a_batch, (facts.a_rows[:split_rows], outer[batch:]), rows, facts.a_sum)
    if anchor in b.fusion.packed:
        source = b.fusion.packed[anchor]
        operand_b = K.Operand(b.buffer(source), k.const(0), panel=source.shape.static[-1])
    else:
        operand_b = _operand(b, right, outer[:batch], facts.b_batch, ((), ()), facts.b_sum, facts.b_columns)
    acc = K.Var("acc", _accumulator(anchor))
    acc_value = anchor.results[0]
    program = _Rows(b, acc_value)
    b.open_stores(b.group.stores)
    b.bound[acc_value] = acc if acc.dtype == anchor.shapes[0].dtype.compute else k.cast(acc, anchor.shapes[0].dtype.compute)
    epilogue, row_stmts = _epilogue(program, coords, j, n)
    contract = K.Contract(i, j, m, n, depth, a, operand_b, acc, tuple(epilogue), tuple(row_stmts))
    return tuple(grid), (contract,)


def _epilogue(program: _Rows, coords, j: K.Var, n: int) -> tuple[list[K.Stmt], list[K.Stmt]]:
    """Pass 0 at (i, j) with the accumulator at hand; then the loops over each finished row."""
    b = program.b
    acc = program.acc
    assert acc is not None
    first = [v for v in program.group.stores if program.group.forms[v.node] == "full" and program.level[v.node] == 0]
    reduced = [node for node in program.reductions if program.level[node] == 1]
    for node in reduced:  # read back from the row when its turn comes
        source = node.inputs[0]
        if source not in program.kept:
            program.kept[source] = b.local(source.dtype.compute, n, per_row=True)
    keeps = [v for v in program.kept if program.level[v.node] == 0]
    epilogue, _ = program.pass_body(0, coords(j), j, [], first, keeps)
    del b.bound[acc]
    if not program.reductions:
        return epilogue, []
    body: list[K.Stmt] = []
    column = K.Var("c")
    b.scope()
    bound = dict(b.bound)
    b.bound.update({v: K.Load(program.kept[v], column) for v in keeps})
    reduces = [program.reduce_of(node, coords(column)) for node in reduced]
    body.append(K.Loop(column, n, (), vector=True, reduces=tuple(reduces)))
    b.bound = bound
    for node, r in zip(reduced, reduces):
        b.bound[node.results[0]] = r.result
    body += program.row_values(1, coords)
    for p in range(1, program.last + 1):
        body += program.one_pass(p, n, coords)
    return epilogue, body


def _accumulator(node: Node):
    """Sums of narrow floats are carried in f32; integers in their own type."""
    return node.shapes[0].dtype.compute


def _row_axes(places: Places, value: Value, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The longest run of trailing row axes that one stride walks."""
    _, layout = places.locate(value)
    for first in range(len(axes)):
        if _one_stride(layout, value.shape.static, axes[first:]):
            return axes[first:]
    return ()


def _operand(b: KernelBuilder, value: Value, batch_vars, batch_axes, extra, row_axes, col_axes) -> K.Operand:
    """A strided matrix operand. `batch_axes`: its axis for each batch variable, -1 where it has none; `extra`: further axes
    with a grid variable each."""
    base, layout = b.places.locate(value)
    dims = value.shape.static
    terms = [(v, layout.strides[a]) for v, a in zip(batch_vars, batch_axes, strict=True) if a >= 0 and dims[a] != 1]
    terms += [(v, layout.strides[a]) for a, v in zip(*extra, strict=True)]
    return K.Operand(b.buffer(base), K.linear(terms, layout.offset), _stride(layout, dims, row_axes), _stride(layout, dims, col_axes))


def _one_stride(layout: Layout, dims: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    real = [a for a in axes if dims[a] != 1]
    return all(layout.strides[high] == layout.strides[low] * dims[low] for high, low in zip(real, real[1:]))


def _stride(layout: Layout, dims: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The one stride that walks these axes (the innermost with more than one element)."""
    assert _one_stride(layout, dims, axes), f"axes {axes} of {dims} have no common stride in {layout}"
    real = [a for a in axes if dims[a] != 1]
    return layout.strides[real[-1]] if real else 0

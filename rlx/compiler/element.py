"""Element expressions: any value at any coordinates, built from the ops' declarations, and addresses in buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlx.compiler.facts import Facts
from rlx.compiler.groups import Group
from rlx.compiler.packing import reduction
from rlx.ir import kernel as K
from rlx.ir.contexts import Lowering
from rlx.ir.dtype import DType, index_
from rlx.ir.graph import CONSTANT, Node, Value
from rlx.ir.kernel import k
from rlx.ir.layout import Layout
from rlx.ir.op import Kind

ZERO = k.const(0)  # one object, so that memoized expressions at coordinate 0 are found again


class KernelBuilder(Lowering):
    """The `ctx` argument of an op's `element` and `kernel` functions, and the state of the kernel being built.

    `block` collects statements that the expressions so far depend on; `bound` maps values to expressions available in the
    current scope (finished reductions, the accumulator, rows kept in a Local). If `guard` is false, nothing is read or checked
    and the value of an expression is unused.
    """

    def __init__(self, group: Group, facts: Facts) -> None:
        self.group, self.facts, self.places = group, facts, facts.places
        self.buffers: dict[Value, K.Buffer] = {}
        self.locals: list[K.Local] = []
        self.block: list[K.Stmt] = []
        self.bound: dict[Value, K.Expr] = {}
        self.guard: K.Expr | None = None
        self.limits: list[K.Limit] = []
        self.rows: set[K.Expr] = set()  # rows of the active axis to which a whole-op kernel stores
        whole = {facts.active.get(v) for v in group.stores}  # else the rows of the group's space that the extent limits
        self.active = whole.pop() if len(whole) == 1 and 0 not in group.dims else None
        self.memo: dict[tuple, tuple[K.Expr, tuple]] = {}  # expressions of the current scope

    # -- offered to op declarations

    def dims(self, value: Value) -> tuple[int, ...]:
        return value.shape.static

    def element(self, value: Value, coords: Sequence[K.Expr], guard: K.Expr | None = None) -> K.Expr:
        """The element of `value` at `coords` (one index per dim), in its compute dtype; zero where `guard` is false."""
        if guard is not None:
            outside = self.guard
            self.guard = guard if outside is None else k.and_(outside, guard)
            made = self.element(value, coords)
            self.guard = outside
            is_zero = isinstance(made, K.Load) and made.guard is not None
            return made if is_zero else k.select(guard, made, k.const(0, made.dtype))
        if value in self.bound:
            return self.bound[value]
        coords = tuple(coords)
        key = (value, tuple(map(id, coords)), id(self.guard))
        if key not in self.memo:
            self.memo[key] = (self._element(value, coords), (coords, self.guard))  # keeps ids alive
        return self.memo[key][0]

    def in_tiles(self, value: Value) -> bool:
        """True if the value is stored in a tiled layout."""
        return value in self.places.tiles

    def stored(self, value: Value, place: Sequence[K.Expr]) -> K.Expr:
        """The element at a memory location of a value in a tiled layout."""
        tiles = self.places.tiles[value]
        return self._load(self.places.base(value), index(Layout(tiles.strides), tiles.dims, place), tiles.size)

    def check(self, ok: K.Expr, code: int) -> None:
        """The run fails with `code` unless `ok` holds at every point."""
        self.block.append(K.Check(ok if self.guard is None else k.or_(k.not_(self.guard), ok), code))

    def local(self, dtype: DType, size: int, per_row: bool = False) -> K.Local:
        self.locals.append(K.Local(f"l{len(self.locals)}", dtype, size, per_row))
        return self.locals[-1]

    def store(self, result: int, coords: Sequence[K.Expr], value: K.Expr, guard: K.Expr | None = None) -> K.Store:
        """Write one element of the anchor's result number `result`."""
        assert self.group.anchor is not None
        if self.active:
            self.rows.add(coords[self.active.axis])
        return self.store_value(Value(self.group.anchor, result), coords, value, guard)

    # -- inside the compiler

    def limit(self, var: K.Var, each: int) -> None:
        """Limits `var` by the extent; `each`: points of `var` per row of the active axis."""
        self.limits.append(K.Limit(var, self.extent(each)))

    def extent(self, each: int) -> K.Expr:
        """The number of active rows, times `each`."""
        extent = self.facts.graph.extent
        assert extent is not None
        return k.mul(k.cast(self.element(extent.leaf, ()), index_), each)

    def buffer(self, base: Value, writable: bool = False) -> K.Buffer:
        base = self.facts.memory(base)
        if base not in self.buffers:
            dtype, size = K.in_kernels(base.dtype, math.prod(self.places.memory(base)))
            self.buffers[base] = K.Buffer(f"b{len(self.buffers)}", dtype, size, writable)
        return self.buffers[base]

    def open_stores(self, values: Iterable[Value]) -> None:
        for v in values:
            self.buffer(v, writable=True)

    def store_value(self, value: Value, coords: Sequence[K.Expr], what: K.Expr, guard: K.Expr | None = None) -> K.Store:
        """Write one element; for a tiled layout `coords` is the memory location."""
        tiles = self.places.tiles.get(value)
        layout, dims = (Layout(tiles.strides), tiles.dims) if tiles else (self.places.locate(value)[1], value.shape.static)
        if value in self.places.finer:
            parts = self.places.finer[value]
            coords, dims = [c for at, own in zip(coords, parts) for c in split(at, own)], tuple(d for own in parts for d in own)
        return K.Store(self.buffer(value, writable=True), index(layout, dims, coords), what, guard)

    def native(self, node: Node) -> K.Native:
        """The claimed op or collective; its epilogue is empty."""

        def view(value: Value) -> K.View:
            if (tiles := self.places.tiles.get(value)) is not None:
                return K.View(self.buffer(self.places.base(value)), tiles.dims, tiles.strides)
            base, layout = self.places.locate(value)
            return K.View(self.buffer(base), value.shape.static, layout.strides, layout.offset)

        inputs, result, alone = tuple(map(view, node.inputs)), node.results[0], len(self.group.forms) == 1
        self.open_stores(node.results if alone else self.group.stores)
        axes, active = tuple((K.Var("n"), d) for d in result.shape.static), self.active and self.facts.active.get(result)
        if active and active.outer == 1:
            self.limit(axes[active.axis][0], active.inner)
        elif alone:
            axes = ()
        outputs, acc = (tuple(map(view, node.results)), None) if alone else ((), K.Var("acc", result.dtype.compute))
        return K.Native(node.op.name, node.attrs, inputs, outputs, axes, acc)

    def _element(self, value: Value, coords: tuple[K.Expr, ...]) -> K.Expr:
        node = value.node
        if node.op is CONSTANT and value.shape.num_elements == 1:
            return k.const(node.attrs.data.reshape(-1)[0].item(), value.dtype.compute)  # type: ignore[union-attr]
        if (base := self.places.base(value)).node not in self.group.forms:
            if (tiles := self.places.tiles.get(value)) is not None:
                return self.stored(value, tiles.place(coords))
            return self._load(base, index(self.places.locate(value)[1], value.shape.static, coords), base.shape.num_elements)
        if node.op.kind is Kind.POINTWISE:
            assert node.op.scalar is not None
            return node.op.scalar(k, node.attrs, *(self.element(v, aligned(v, coords)) for v in node.inputs))
        if node.op.kind is Kind.REDUCE:
            return self._reduction(node, coords)
        assert node.op.element is not None, node
        return node.op.element(self, node, value.index, coords)

    def _load(self, base: Value, at: K.Expr, size: int) -> K.Load:
        inside = isinstance(at, K.Const) and 0 <= at.value < size  # then the load needs no guard
        return K.Load(self.buffer(base), at, None if inside else self.guard)

    def _reduction(self, node: Node, coords: tuple[K.Expr, ...]) -> K.Expr:
        """A reduction over any axes, as serial loops inside the current scope."""
        source, facts, dims = node.inputs[0], reduction(node), node.inputs[0].shape.static
        loop_vars = {axis: K.Var("r") for axis in facts.axes}
        outer = iter(c for i, c in enumerate(coords) if not (facts.keepdims and i in facts.axes))
        at = [loop_vars[axis] if axis in loop_vars else next(outer) for axis in range(len(dims))]
        kept, self.block = self.block, []
        value = self.element(source, at)
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
    return tuple(ZERO if d == 1 else c for d, c in zip(dims, coords[len(coords) - len(dims) :]))


def index(layout: Layout, dims: tuple[int, ...], coords: Sequence[K.Expr]) -> K.Expr:
    """offset + sum of coordinate * stride. Coordinates that are div and rem of one variable are recombined if the strides allow
    it, so that the address stays linear in the variable."""
    terms = [(c, s) for c, s, d in zip(coords, layout.strides, dims) if d != 1]
    at = 0
    while at < len(terms):
        high, high_stride = terms[at]
        for n, (low, low_stride) in enumerate(terms[at + 1 :], at + 1):  # others between them: elements of a window
            if (whole := _whole(high, low)) is not None and high_stride == low_stride * whole[1]:
                terms[at] = whole[0], low_stride
                del terms[n]
                at = -1
                break
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
    """Coordinates over `dims` of the flat row-major position `var`. The outermost dim larger than 1 needs no remainder."""
    first = next((a for a, d in enumerate(dims) if d != 1), 0)
    out: list[K.Expr] = []
    for d in reversed(dims[first + 1 :]):
        out.append(k.rem(var, d))
        var = k.div(var, d)
    return [*[ZERO] * first, var, *reversed(out)] if dims else []


def larger(dims: Sequence[int]) -> list[list[int]]:
    """Groups of axes: each larger than 1 with those of 1 behind it, which have one coordinate and need no loop."""
    groups: list[list[int]] = []
    for a, d in enumerate(dims):
        if d == 1 and groups:
            groups[-1].append(a)
        else:
            groups.append([a])
    return groups


def collapsed(dims: tuple[int, ...], layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[int]]:
    """Groups of axes of a space that can be collapsed, because every access has one stride over them. `layouts`: (dims, strides)
    of each access, aligned to the space from the right."""

    def joins(left: int, right: int, inner: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        there = len(inner) - len(dims)  # axis of the access for axis 0 of the space
        high, low = (strides[a + there] if a + there >= 0 and inner[a + there] != 1 else 0 for a in (left, right))
        return high == low * dims[right]

    groups: list[list[int]] = []
    for axis, d in enumerate(dims):
        real = [a for a in groups[-1] if dims[a] != 1] if groups else []
        if groups and (d == 1 or not real or all(joins(real[-1], axis, *access) for access in layouts)):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups

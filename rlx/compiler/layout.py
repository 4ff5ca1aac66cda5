"""Layout assignment: which views are only strides on an existing buffer, and which need a kernel that copies.

The *base* of a value is the value whose buffer holds it: itself, or, through views that strides can express, an earlier
one. Buffers are row-major unless another order of the same dims makes a later reshape free (attention writes
[batch, heads, seq, dim] in an order that makes merging heads and dim free).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.layout import Layout, TiledLayout
from rlx.ir.op import Kind
from rlx.ir.shape import contiguous_strides


class Places:
    """Answers `locate(value) -> (base, Layout)`. `computed`: view nodes that strides cannot express."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes()
        self.computed: set[Node] = set()
        self.orders: dict[Value, tuple[int, ...]] = {}  # base -> strides, where not row-major
        self.hosts: dict[Value, tuple[Value, Layout]] = {}  # base -> the base in whose buffer it lies, and where in it
        self.finer: dict[Value, tuple[Sequence[int], ...]] = {}  # of those, only stored: dims that an axis has there, if several
        exchanged = [n for n in self.nodes if n.op.kind in (Kind.COLLECTIVE, Kind.CONTROL)]  # need row-major memory
        observed = [v for n in self.nodes if n.op.observed for v in n.results]  # read by the runtime
        self.fixed = _under_views([*graph.roots(), *observed, *(v for n in exchanged for v in (*n.inputs, *n.results))])
        self.tiles: dict[Value, TiledLayout] = {}  # tiled values, and views that only permute their axes
        self._memo: dict[Value, tuple[Value, Layout]] = {}
        self._views: dict[Value, list[Node]] = {}  # base -> the views of it that strides express, in order
        for node in self.nodes:
            if node.op.tiled is not None or (node.op.kind is Kind.VIEW and node.inputs[0] in self.tiles):
                self._tile(node)
            elif node.op.kind is Kind.VIEW and not self._addressable(node):
                self.computed.add(node)
        for value in (v for n in exchanged for v in n.inputs):
            if value.node.op.kind is Kind.VIEW and not self.is_row_major(value):
                self.computed.add(value.node)
                self._memo.clear()

    def locate(self, value: Value) -> tuple[Value, Layout]:
        """The base of `value`, and the layout of its elements in the base's buffer."""
        found = self._memo.get(value)
        if found is None:
            node = value.node
            assert value not in self.tiles, f"{value} lies in tiles, not in strides"
            if node.op.kind is Kind.VIEW and node not in self.computed:
                base, layout = self.locate(node.inputs[0])
                seen = seen_through(value, layout)
                assert seen is not None, f"{value} was addressable when placed"
                found = (base, seen)
            else:
                own = Layout(self.orders.get(value) or contiguous_strides(value.shape.static))
                found = (value, self.hosts[value][1] if value in self.hosts else own)
            self._memo[value] = found
        return found

    def is_alias(self, node: Node) -> bool:
        """True if the node's results are seen where they lie, in the memory of its operand."""
        return node.op.kind is Kind.VIEW and node not in self.computed

    def base(self, value: Value) -> Value:
        if (found := self._memo.get(value)) is not None:
            return found[0]
        while value in self.tiles and value.node.op.tiled is None:
            value = value.node.inputs[0]
        return value if value in self.tiles else self.locate(value)[0]

    def memory(self, base: Value) -> tuple[int, ...]:
        """Dims of the buffer that holds a base value."""
        return self.tiles[base].dims if base in self.tiles else base.shape.static

    def merged(self, view: Value) -> list[list[tuple[int, int]]] | None:
        """For each axis of a view, the axes of its base that it consists of, with their factors: the coordinate is the sum of
        coordinate * factor. None: an axis is not made of whole axes of the base, or not all elements are seen."""
        base, layout = self.locate(view)
        own, dims, out = self.locate(base)[1].strides, base.shape.static, []
        if layout.offset or base.shape.num_elements != view.shape.num_elements:
            return None
        if 0 in dims:  # strides say nothing
            return [[(a, 1)] for a in range(len(dims))] if view.shape.static == dims else None
        for d, s in zip(view.shape.static, layout.strides):
            inside = [a for a, n in enumerate(dims) if n != 1 and d != 1 and 0 < s <= own[a] < s * d and own[a] % s == 0]
            if math.prod(dims[a] for a in inside) != d:
                return None
            out.append([(a, own[a] // s) for a in inside])
        return out

    def is_row_major(self, value: Value) -> bool:
        """True if the value has the same elements in the same order as the base's buffer."""
        if value in self.tiles:
            return False
        base, layout = self.locate(value)
        dims, plain = value.shape.static, contiguous_strides(value.shape.static)
        whole = layout.offset == 0 and base.shape.size_bytes == value.shape.size_bytes  # complex numbers are read as pairs
        return whole and (0 in dims or all(d == 1 or x == y for d, x, y in zip(dims, layout.strides, plain)))

    def _tile(self, node: Node) -> None:
        """Records the tiled layout of a result, or of a view of one; a view that tiles cannot express is computed."""
        (value,), source = node.results[:1], node.inputs[0].shape
        if node.op.tiled is not None:
            self.tiles[value] = node.op.tiled(node.attrs, *(v.shape for v in node.inputs))
            return
        layout = seen_through(value, Layout(contiguous_strides(source.static))) if len(node.shapes) == 1 else None
        seen = layout and self.tiles[node.inputs[0]].viewed(layout, value.shape.static)
        if seen:
            self.tiles[value] = seen
        else:
            self.computed.add(node)

    def _addressable(self, node: Node) -> bool:
        base, layout = self.locate(node.inputs[0])
        views = self._views.setdefault(base, [])
        if not self._seen(node):
            order = self._order_for(base, node.inputs[0].shape.static, layout)
            if order is None:
                return False
            self.orders[base] = order
            self._forget(base)
            if not all(map(self._seen, [*views, node])):
                del self.orders[base]
                self._forget(base)
                return False
        views.append(node)
        return True

    def put(self, host: Value, layouts: Mapping[Value, Layout]) -> bool:
        """Put each of these bases into the buffer of `host`; False, and nothing changes, if strides cannot express their views
        then."""
        for base, layout in layouts.items():
            self.hosts[base] = host, layout
            self._forget(base)
        if all(map(self._seen, (view for base in layouts for view in self._views.get(base, ())))):
            return True
        for base in layouts:
            del self.hosts[base]
            self._forget(base)
        return False

    def put_finer(self, host: Value, base: Value, dims: tuple[Sequence[int], ...], layout: Layout) -> None:
        """Put a base that nothing reads into the buffer of `host`. `layout`: of the `dims` into which each axis is divided."""
        self.hosts[base], self.finer[base], self._memo[base] = (host, layout), dims, (base, layout)

    def _forget(self, base: Value) -> None:
        """Invalidates the layouts of the base and its views."""
        for value in (base, *(v for n in self._views.get(base, ()) for v in n.results)):
            self._memo.pop(value, None)

    def _seen(self, node: Node) -> bool:
        """True if strides can express the view over the current layout of its operand."""
        _, layout = self.locate(node.inputs[0])
        return all(seen_through(v, layout) is not None for v in node.results)

    def _order_for(self, base: Value, dims: tuple[int, ...], layout: Layout) -> tuple[int, ...] | None:
        """Strides of `base` that make the view (dims, layout) row-major, if the view only permutes the base's dims."""
        if base.node.op.kind is Kind.LEAF or base in self.orders or base in self.fixed or layout.offset:
            return None
        own = base.shape.static
        plain, wanted = contiguous_strides(own), contiguous_strides(dims)
        moved = {s: (d, w) for d, s, w in zip(dims, layout.strides, wanted) if d != 1}
        if {s: d for d, s in zip(own, plain) if d != 1} != {s: d for s, (d, _) in moved.items()}:
            return None
        return tuple(moved[s][1] if d != 1 else 1 for d, s in zip(own, plain))


def _under_views(values: Iterable[Value]) -> set[Value]:
    """The values, and the values of which they are views."""
    out: set[Value] = set()
    for value in values:
        out.add(value)
        while value.node.op.kind is Kind.VIEW:
            value = value.node.inputs[0]
            out.add(value)
    return out


def seen_through(value: Value, layout: Layout) -> Layout | None:
    """Layout of one result of a view node over its operand's layout; None if strides cannot express it."""
    node = value.node
    if node.op.strided is None:
        return None
    return node.op.strided(node.attrs, node.inputs[0].shape.static, value.shape.static, layout)

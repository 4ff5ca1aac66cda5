"""Values that a pad or a concat would copy are computed in the memory of its result, where their copies would be.

A group of pads and concats alone is then left with the numbers around these values, which its kernel fills in, or with nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from rlx.compiler.facts import Facts, Part
from rlx.compiler.groups import Group
from rlx.compiler.lowering import is_claimed_product
from rlx.ir.graph import Node, Value
from rlx.ir.layout import Layout
from rlx.ir.op import OPS, Kind
from rlx.ir.ops.index import PadAttrs
from rlx.ir.ops.rules import axis_of, held
from rlx.ir.ops.view import regroup, transposed_axes
from rlx.ir.shape import contiguous_strides

PAD, CONCAT, TRANSPOSE, RESHAPE = (OPS[name] for name in ("pad", "concat", "transpose", "reshape"))
Dims = tuple[int, ...]


def within(groups: Sequence[Group], facts: Facts) -> list[Group]:
    """The groups in order, without copies that are not needed: `facts` has the new places of values, and what is left to fill."""
    compilation = facts.compilation
    if facts.graph.extent is not None or compilation.nested or "within" in compilation.options.disable:
        return list(groups)
    return _Within(groups, facts).run()


class _Within:
    def __init__(self, groups: Sequence[Group], facts: Facts) -> None:
        self.groups, self.facts, self.places = groups, facts, facts.places
        self.hosts: set[Value] = set()

    @cached_property
    def made(self) -> dict[Value, Group]:
        """The group that stores a value."""
        return {v: g for g in self.groups for v in g.stores}

    @cached_property
    def readers(self) -> dict[Value, list[tuple[Group, Node]]]:
        """Those that read a base."""
        found: dict[Value, list[tuple[Group, Node]]] = {}
        for group in self.groups:
            for node in _nodes(group):
                for value in node.inputs:
                    found.setdefault(self.places.base(value), []).append((group, node))
        return found

    def run(self) -> list[Group]:
        return [made for group in self.groups for made in self.placed(group)]

    def placed(self, group: Group) -> list[Group]:
        """The groups that do what is left of this one."""
        (whole, *others) = group.stores
        plain = group.anchor is None and not others and not group.static and whole.node.op in (PAD, CONCAT)
        plain = plain and (self.facts.target.levels or self.joins_parts(group, whole) or self.has_windows(whole))
        if not plain or whole in self.places.orders or whole in self.places.tiles or whole.shape.num_elements == 0:
            return [group]
        parts = list(_parts(group, whole, (0,) * whole.rank))
        values = [p.source for p in parts if isinstance(p.source, Value)]
        inner = {v: _inside(group, v) for v in values if v.node in group.forms}
        apart = len({n for nodes in inner.values() for n in nodes}) == sum(map(len, inner.values()))
        worth = any(v not in inner or v.node.op.kind is Kind.REDUCE for v in values)
        once = len(set(values)) == len(values)
        if not (worth and apart and once and all(self.fits(v, group, inner.get(v, ()), {*values}) for v in values)):
            return [group]
        strides = contiguous_strides(whole.shape.static)
        put = {p.source: Layout(strides, sum(map(int.__mul__, p.start, strides))) for p in parts if isinstance(p.source, Value)}
        if not self.places.put(whole, put):
            return [group]
        self.hosts.add(whole)
        fills = [p for p in parts if not isinstance(p.source, Value)]
        layouts = {v: put[v] for v in inner}
        inner = {v: nodes for v, nodes in inner.items() if not self.stored_apart(v, group, layouts[v], {*values})}
        split = [Group(v.shape.static, False, None, dict.fromkeys(nodes, "full"), {*nodes} - {v.node}, stores={v: None})
                 for v, nodes in inner.items()]  # fmt: skip
        for node in {n for v in layouts for n in _inside(group, v)}:
            del group.forms[node]
            group.absorbed.discard(node)
        if fills:
            self.facts.fills[whole] = fills
        return [*split, *([group] if fills else ())]

    def joins_parts(self, group: Group, whole: Value) -> bool:
        """True if it is a concat of concats that nothing else reads."""
        apart = all(v.node.op is CONCAT and [g for g, _ in self.readers.get(v, ())] == [group] for v in whole.node.inputs)
        return whole.node.op is CONCAT and apart

    def has_windows(self, whole: Value) -> bool:
        """True if a contraction reads windows of it, on a target that reads no other operands in levels."""
        products = [node for _, node in self.readers.get(whole, ()) if node.op.kind is Kind.CONTRACT]
        return any(self.facts.target.in_place(node, self.places.locate(node.inputs[0])[1]) for node in products)

    def stored_apart(self, value: Value, group: Group, layout: Layout, values: set[Value]) -> bool:
        """True if `value`, a reshape of a transpose of a reshape of a product, as of phases of a transposed convolution, needs no
        kernel: the product is stored there, with an axis in parts."""
        chain, places = [value.node], self.places
        for op in (TRANSPOSE, RESHAPE):
            chain.append(chain[-1].inputs[0].node)
            if chain[-1].op is not op:
                return False
        (last, turned, first), dims = chain, value.shape.static
        (made,), fine, moved = first.inputs, first.shapes[0].static, turned.shapes[0].static
        maker = self.made.get(made)
        readers = [node for _, node in self.readers.get(made, ())]
        if last.op is not RESHAPE or maker is None or maker.anchor is None or readers != [last] or places.base(made) is not made:
            return False
        if not self.fits(made, group, (), values | {value}):
            return False
        merged, split = regroup(moved, dims), regroup(made.shape.static, fine)
        if any(len(right) != 1 for _, right in merged) or any(len(left) != 1 for left, _ in split):
            return False
        if fine[-1] * value.dtype.itemsize % self.facts.target.line_bytes:
            return False  # vectors of the product's columns would be torn
        axes, strides = transposed_axes(turned), [0] * len(fine)
        for left, (axis,) in merged:
            stride = layout.strides[axis]
            for a in reversed(left):
                strides[axes[a]], stride = stride, stride * moved[a]
        parts = {left[0]: right for left, right in split}
        inside = [parts.get(axis, ()) for axis in range(made.rank)]
        order = [a for own in inside for a in own or (-1,)]
        finer = Layout(tuple(strides[a] if a >= 0 else 0 for a in order), layout.offset)
        places.put_finer(places.hosts[value][0], made, tuple(tuple(fine[a] for a in own) or (1,) for own in inside), finer)
        return True

    def fits(self, value: Value, group: Group, inner: Collection[Node], values: set[Value]) -> bool:
        """True if a value that `group` copies may be computed in place: it has a kernel, or `inner` nodes for one, that can store
        it anywhere and reads none of `values`, and all readers take it as it lies then."""
        places = self.places
        taken = places.fixed, places.orders, places.hosts, self.hosts
        if places.base(value) is not value or any(value in others for others in taken):
            return False
        if not inner:
            maker = self.made.get(value)
            if maker is None or maker.static:
                return False
            anchor, inner = maker.anchor, [*_nodes(maker)]
            if anchor is not None and anchor.op.kind is not Kind.CONTRACT and not is_claimed_product(anchor, self.facts):
                return False
        alone = values.isdisjoint(places.base(v) for node in inner for v in node.inputs)
        return alone and all(reader is group or _reads_anywhere(node) for reader, node in self.readers.get(value, ()))


def _reads_anywhere(node: Node) -> bool:
    """True if a reader is as fast on an operand whose rows are apart: not products, which share rows among tiles."""
    return node.op.kind in (Kind.POINTWISE, Kind.REDUCE, Kind.INDEX)


def _nodes(group: Group) -> Iterator[Node]:
    for member in (*group.operands.values(), group):
        yield from member.forms


def _inside(group: Group, value: Value) -> dict[Node, None]:
    """The nodes of the group on which a value depends, also through views, which are no part of a group; operands first."""
    found, todo = set[Node](), [value.node]
    while todo:
        node = todo.pop()
        if node in group.forms and node not in found:
            found.add(node)
            todo += [v.node for v in node.inputs]
        elif node.op.kind is Kind.VIEW and node not in found:
            todo += [v.node for v in node.inputs]
    return {n: None for n in group.forms if n in found}


def _parts(group: Group, value: Value, start: Dims) -> Iterator[Part]:
    """The boxes of a value that `group` computes, whose element 0 is at `start` of the group's result."""
    node, dims = value.node, value.shape.static
    if node not in group.forms or node.op not in (PAD, CONCAT):
        yield Part(start, dims, value)
    elif node.op is CONCAT:
        assert node.attrs is not None
        axis, at = axis_of(node.attrs.axis, value.rank), start  # type: ignore[attr-defined]
        for part in node.inputs:
            yield from _parts(group, part, at)
            at = (*at[:axis], at[axis] + part.shape.static[axis], *at[axis + 1 :])
    else:
        attrs, (x,) = node.attrs, node.inputs
        assert isinstance(attrs, PadAttrs)
        own, number = x.shape.static, held(attrs.value, x.dtype, "value")
        first = tuple(map(int.__add__, start, attrs.low))
        yield from _parts(group, x, first)
        for axis, (low, high) in enumerate(zip(attrs.low, attrs.high)):
            for at, size in ((start[axis], low), (first[axis] + own[axis], high)):
                if size:
                    yield Part((*first[:axis], at, *start[axis + 1 :]), (*own[:axis], size, *dims[axis + 1 :]), number)


__all__ = ["within"]

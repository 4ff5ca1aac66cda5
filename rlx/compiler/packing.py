"""Weight packing: right operands that are known before a run are stored in the tiled layout that their kernel reads. Operands of
either side are stored in rows of whole multiples of some elements, if the target reads only such rows fast.

A table used both for row look-ups and for a matrix product (tied embeddings) would be stored twice. If look-ups are its only
other readers, they read the packed table too, and the plain table is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from rlx.compiler.compilation import Compilation
from rlx.ir.graph import PARAM, Graph, Node, Value, keep
from rlx.ir.op import OPS, Contraction, Kind, Reduction
from rlx.ir.ops import broadcast_to, pack, pad, quant_rows, slice, transpose
from rlx.ir.ops.pack import group_panels, panels
from rlx.ir.ops.rules import axis_of
from rlx.ir.ops.view import seen, transposed_axes

Readers = Mapping[Value, Sequence[Node]]
Alone = Callable[[Value, Node], bool]
Remake = Callable[[tuple[Value, ...]], Sequence[Value]]  # new inputs of a node -> its replacement


def packing(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with packed right operands, and look-ups that read a packed table instead of the plain one."""
    packs = {node: found for node in graph.nodes() if (found := _packed(node, graph, compilation)) is not None}
    made: dict[Hashable, Value] = {}

    def shared(packed: Value, right: Value) -> Value:
        """A pack of this operand in the same layout as `packed`."""
        node = packed.node
        return made.setdefault((node.op, node.attrs, right), keep(node, (right,))[0])

    packs = {node: shared(packed, node.inputs[1]) for node, packed in packs.items()}
    readers, roots = _readers(graph), {_base(v) for v in graph.roots()}
    instead = _look_ups(graph, packs, readers)

    def alone(value: Value, node: Node) -> bool:
        """Whether nothing else reads the memory of the value."""
        return _base(value) not in roots and [x for _, x in _plain_readers(_base(value), readers, {})] == [node]

    others = (node for node in graph.nodes() if node not in packs)
    copies = {node: found for node in others if any(found := _copies(node, graph, alone, compilation))}

    def in_rows(value: Value, multiple: int) -> Value:
        node, key = value.node, (multiple, value)
        if node.op is OPS["transpose"] and seen(node.inputs[0])[1].strides[-1] == 1 == seen(value)[1].strides[-2]:
            return keep(node, (in_rows(node.inputs[0], multiple),))[0]  # other readers of the operand may share the copy
        return made[key] if key in made else made.setdefault(key, _in_rows(value, multiple))

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node in packs:
            return keep(node, (inputs[0], shared(packs[node], inputs[1]), *inputs[2:]))
        if node in copies:
            return keep(node, (*(in_rows(x, m) if m else x for x, m in zip(inputs, copies[node])), *inputs[2:]))
        return instead[node](inputs) if node in instead else keep(node, inputs)

    return graph.rebuild(new) if packs or copies else graph


def _copies(node: Node, graph: Graph, alone: Alone, compilation: Compilation) -> tuple[int, int]:
    """Of the operands of a contraction, the multiple of elements that rows of their copies are apart; 0: as they lie. Weights of
    programs with states are not copied: others of fewer rows share them, and read them as they lie. An operand that no other node
    reads should have the rows of Target.rows.best if it is known, and of `made` if an elementwise kernel stores it."""
    if node.op.kind is not Kind.CONTRACT or compilation.is_static(node) or graph.extent is not None:
        return 0, 0
    rows, (left, right) = compilation.target.rows(node), node.inputs[:2]
    if rows.best == 1:
        return 0, 0
    shared = bool(graph.handles) and compilation.is_static(right.node)
    if shared and not _has_rows(right, min(rows.left, rows.right)):
        return 0, 0

    def copied(value: Value, least: int) -> int:
        if alone(value, node):
            least = rows.best if compilation.is_static(value.node) else rows.made if _is_elementwise(value) else least
        return 0 if _has_rows(value, least) else rows.best

    return copied(left, rows.left), 0 if shared else copied(right, rows.right)


def _is_elementwise(value: Value) -> bool:
    """Whether a value follows from inputs by elementwise ops alone, so that the kernel of no other op stores it."""
    todo, seen = [value.node], set[Node]()
    while todo:
        node = todo.pop()
        if node.inputs and node not in seen:
            if node.op.kind not in (Kind.POINTWISE, Kind.VIEW):
                return False
            seen.add(node)
            todo += [v.node for v in node.inputs]
    return value.node.op.kind is Kind.POINTWISE


def _has_rows(value: Value, multiple: int) -> bool:
    """Whether elements along one of the last two axes are adjacent, and rows of them whole multiples apart."""
    if multiple == 1:
        return True
    (_, layout), dims = seen(value), value.shape.static
    apart = [s for s, n in zip(layout.strides, dims) if n > 1]
    near = any(layout.strides[a] == 1 for a in (-1, -2) if dims[a] > 1)
    return near and layout.offset % multiple == 0 and sum(s % multiple > 0 for s in apart) == 1


def _in_rows(value: Value, multiple: int) -> Value:
    """The value as a view of a copy with such rows, of its matrices that are not the same again."""
    strides, dims, rank = seen(value)[1].strides, value.shape.static, value.rank
    axes = (*range(rank - 2), rank - 1, rank - 2) if strides[-2] == 1 < dims[-2] else tuple(range(rank))
    once = tuple(1 if strides[a] == 0 and a < rank - 2 else n for a, n in enumerate(dims))
    first, step = (0,) * rank, (1,) * rank
    source = transpose(slice(value, starts=first, stops=once, steps=step), axes=axes)
    wide = pad(source, low=first, high=(*first[1:], -source.shape.static[-1] % multiple))  # type: ignore[union-attr]
    rows = slice(wide, starts=first, stops=source.shape.static, steps=step)  # type: ignore[union-attr]
    return broadcast_to(transpose(rows, axes=axes), dims=dims)  # type: ignore[return-value]


def _packed(node: Node, graph: Graph, compilation: Compilation) -> Value | None:
    """The packed right operand of a contraction, or of a claimed op that supports packing."""
    target, is_native = compilation.target, compilation.is_native(node)
    packs = target.packs.get(node.op.name) if is_native or node.op.name not in target.natives else None
    if packs and (packed := packs(node, graph, compilation.options)) is not None:
        return packed
    product = node.op.product is not None if is_native else node.op.kind is Kind.CONTRACT
    if not product or compilation.is_static(node):
        return None
    (left, right), facts = node.inputs[:2], contraction(node)
    dtypes = right.dtype.name if left.dtype == right.dtype else f"{left.dtype} {right.dtype}"
    columns, group = target.panel(dtypes, right.shape.static[1] if len(facts.a_sum) > 1 else 0)
    if not columns or not compilation.is_static(right.node) or not (is_matrix(facts) or facts.group >= 0):
        return None
    return pack(right, layout=(panels if facts.group < 0 else group_panels)(columns, group))  # type: ignore[return-value]


def is_matrix(facts: Contraction) -> bool:
    """True if the right operand is one matrix [k, n] for all rows of the left one."""
    return not facts.b_batch and facts.b_sum == (0,) and facts.b_columns == (1,) and facts.group < 0


def contraction(node: Node) -> Contraction:
    """The Contraction facts of a contraction node."""
    facts = node.op.contract or node.op.product
    assert facts is not None
    return facts(node.attrs, *(v.shape for v in node.inputs))


def reduction(node: Node) -> Reduction:
    """The Reduction facts of a reduction node."""
    assert node.op.reduce is not None
    return node.op.reduce(node.attrs, node.inputs[0].shape)


def widens(node: Node) -> bool:
    """True for a cast that makes each element larger."""
    return node.op.name == "cast" and node.shapes[0].dtype.itemsize > node.inputs[0].dtype.itemsize


# -- look-ups out of packs -----------------------------------------------------------------------------------------


def _look_ups(graph: Graph, packs: Mapping[Node, Value], readers: Readers) -> dict[Node, Remake]:
    """Replacements of nodes that can read a pack instead of a param, if no other readers of the param remain."""
    out: dict[Node, Remake] = {}
    freed: set[Value] = set()
    for packed in dict.fromkeys(packs.values()):
        table = _base(packed.node.inputs[0])
        if table.node.op is not PARAM or table in freed or len(readers[table]) == 1:
            continue
        found = [_out_of(packed, v, reader, readers, graph) for v, reader in _plain_readers(table, readers, packs)]
        if None not in found and not any(_base(root) is table for root in graph.roots()):
            freed.add(table)
            for remade in found:
                out.update(remade or {})
    return out


def _readers(graph: Graph) -> Readers:
    found: dict[Value, list[Node]] = {}
    for node in graph.nodes():
        for value in dict.fromkeys(node.inputs):
            found.setdefault(value, []).append(node)
    return found


def _base(value: Value) -> Value:
    """The value whose memory a view shows."""
    while value.node.op.kind is Kind.VIEW:
        value = value.node.inputs[0]
    return value


def _plain_readers(value: Value, readers: Readers, packs: Mapping[Node, Value]) -> Iterator[tuple[Value, Node]]:
    """(value read, node) for every reader of the value, or of a view of it, that cannot use the packed form."""
    for node in readers.get(value, ()):
        if node.op.kind is Kind.VIEW:
            for v in node.results:
                yield from _plain_readers(v, readers, packs)
        elif node not in packs or value is node.inputs[0]:
            yield value, node


def _out_of(packed: Value, value: Value, reader: Node, readers: Readers, graph: Graph) -> dict[Node, Remake] | None:
    """The replacement of a node that looks up parts of `value`, or that of its decoding nodes, on the pack; None: impossible."""
    if reader.op is not OPS["gather"] or reader.inputs[0] is not value or value.shape.num_elements == 0:
        return None
    if packed.node.op is pack.op:  # type: ignore[attr-defined]
        again = _again(packed, value)
        return None if again is None else {reader: lambda inputs: keep(reader, (again, *inputs[1:]))}
    decoders, form = readers.get(reader.results[0], ()), packed.node.attrs.format  # type: ignore[union-attr]
    fits = value is packed.node.inputs[0] and axis_of(reader.attrs.axis, value.rank) == 0  # type: ignore[union-attr]
    same = all(n.op is OPS["dequantize"] and n.attrs.format == form for n in decoders)  # type: ignore[union-attr]
    if not (fits and same and decoders) or reader.results[0] in set(graph.roots()):
        return None

    def decoded(node: Node) -> Remake:
        columns = node.attrs.columns  # type: ignore[union-attr]
        return lambda inputs: quant_rows(packed, inputs[0].node.inputs[1], format=form, columns=columns).node.results

    return {node: decoded(node) for node in decoders}


def _again(packed: Value, value: Value) -> Value | None:
    """`value` as a view of the pack, if the packed matrix is `value` or its transpose; else None."""
    out, source = packed, packed.node.inputs[0]
    while source is not value:
        if source.node.op is not OPS["transpose"]:
            return None
        axes = transposed_axes(source.node)
        out = transpose(out, axes=tuple(axes.index(a) for a in range(source.rank)))  # type: ignore[assignment]
        source = source.node.inputs[0]
    return out


__all__ = ["contraction", "is_matrix", "packing", "reduction", "widens"]

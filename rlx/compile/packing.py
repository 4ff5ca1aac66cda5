"""Packed weights: right operands that are known before a run are kept in the tiles in which they are streamed.

A table that is looked up in rows and multiplied by (tied embeddings) would stand in memory twice. Where look-ups are all else
that reads it, they read the tiles too, and the plain table is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from rlx.compile.layout import static_nodes
from rlx.compile.legalise import decide
from rlx.compile.options import CompileOptions
from rlx.ir.graph import PARAM, Graph, Node, Value, keep
from rlx.ir.op import OPS, Contraction, Kind
from rlx.ir.ops import pack, quant_rows, transpose
from rlx.ir.ops.pack import panels
from rlx.ir.ops.rules import axis_of
from rlx.ir.target import Target

Remake = Callable[[tuple[Value, ...]], Sequence[Value]]  # new inputs of a node -> what stands in its place


def packing(graph: Graph, target: Target, options: CompileOptions) -> Graph:
    """`graph` with packs as the right operands that are packed, and look-ups that read a pack in place of the plain table."""
    static = static_nodes(graph.nodes())
    packs = {node: found for node in graph.nodes() if (found := _packed(node, target, static)) is not None}
    made: dict[Hashable, Value] = {}

    def shared(packed: Value, right: Value) -> Value:
        """The pack like `packed` of this operand."""
        node = packed.node
        return made.setdefault((node.op, node.attrs, right), keep(node, (right,))[0])

    packs = {node: shared(packed, node.inputs[1]) for node, packed in packs.items()}
    instead = _look_ups(graph, static, packs)

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node in packs:
            return keep(node, (inputs[0], shared(packs[node], inputs[1])))
        return instead[node](inputs) if node in instead else keep(node, inputs)

    return graph.rebuild(new) if packs else graph


def _packed(node: Node, target: Target, static: set[Node]) -> Value | None:
    """The right operand of a contraction, or of a native op that has a form for it, packed."""
    is_native = decide(node, target)[0] == "native"
    if is_native and node.op.name in target.packs:
        return target.packs[node.op.name](node)
    if is_native or node.op.kind is not Kind.CONTRACT or node in static:
        return None
    left, right = node.inputs
    columns, group = target.panel(right.dtype.name if left.dtype == right.dtype else f"{left.dtype} {right.dtype}")
    fits = columns and right.node in static and is_matrix(contraction(node))
    return pack(right, layout=panels(columns, group)) if fits else None  # type: ignore[return-value]


def is_matrix(facts: Contraction) -> bool:
    """Whether the right operand is [k, n] for all rows of the left one."""
    return not facts.b_batch and facts.b_sum == (0,) and facts.b_columns == (1,)


def contraction(node: Node) -> Contraction:
    """The Contraction facts of a contraction node."""
    facts = node.op.contract or node.op.product
    assert facts is not None
    return facts(node.attrs, *(v.shape for v in node.inputs))


# -- look-ups out of packs -----------------------------------------------------------------------------------------


def _look_ups(graph: Graph, static: set[Node], packs: Mapping[Node, Value]) -> dict[Node, Remake]:
    """How nodes are remade that read a pack in place of a param, where that leaves nothing that reads the param."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes():
        for value in dict.fromkeys(node.inputs):
            readers.setdefault(value, []).append(node)
    out: dict[Node, Remake] = {}
    freed: set[Value] = set()
    for packed in dict.fromkeys(packs.values()):
        table = packed.node.inputs[0]
        while table.node.op.kind is Kind.VIEW:
            table = table.node.inputs[0]
        if table.node.op is not PARAM or table in freed or len(readers[table]) == 1:
            continue
        found = [_out_of(packed, v, reader, readers, graph) for v, reader in _plain_readers(table, readers, packs)]
        whole = {table, *(v for n in static if n.op.kind is Kind.VIEW for v in n.results if _based(v, table))}
        if None not in found and whole.isdisjoint(graph.roots()):
            freed.add(table)
            for remade in found:
                out.update(remade or {})
    return out


def _based(value: Value, table: Value) -> bool:
    while value.node.op.kind is Kind.VIEW:
        value = value.node.inputs[0]
    return value is table


def _plain_readers(
    value: Value, readers: Mapping[Value, Sequence[Node]], packs: Mapping[Node, Value]
) -> Iterator[tuple[Value, Node]]:
    """(what it reads, node) of everything that needs the value, or a view of it, and not its packed form alone."""
    for node in readers.get(value, ()):
        if node.op.kind is Kind.VIEW:
            for v in node.results:
                yield from _plain_readers(v, readers, packs)
        elif node not in packs or value is node.inputs[0]:
            yield value, node


def _out_of(
    packed: Value, value: Value, reader: Node, readers: Mapping[Value, Sequence[Node]], graph: Graph
) -> dict[Node, Remake] | None:
    """How a node that looks up parts of `value` does so in the pack, or the nodes that decode them; None: it cannot."""
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
    """`value`, which the packed matrix is or is transposed from, as a view of the pack; None: it is neither."""
    out, source = packed, packed.node.inputs[0]
    while source is not value:
        if source.node.op is not OPS["transpose"]:
            return None
        axes = tuple(axis_of(a, source.rank) for a in source.node.attrs.axes) or tuple(reversed(range(source.rank)))  # type: ignore[union-attr]
        out = transpose(out, axes=tuple(axes.index(a) for a in range(source.rank)))  # type: ignore[assignment]
        source = source.node.inputs[0]
    return out


__all__ = ["contraction", "is_matrix", "packing"]

"""Packed weights: which right operands are streamed from a packed form, and who else can read that instead of the plain one.

A table that is looked up in rows and multiplied by (tied embeddings) would stand in memory twice. Where ops can read the rows
out of the pack (OpDef.unpacks), and nothing is left that reads the plain table, it is kept packed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.compile.layout import static_nodes
from rlx.compile.legalise import decide
from rlx.compile.options import CompileOptions
from rlx.ir.graph import PARAM, Graph, Node, Value, keep
from rlx.ir.op import OPS, Contraction, Kind
from rlx.ir.ops import pack_panels
from rlx.ir.target import Target

Packs = Mapping[Node, Value]  # the packed right operand of each node that has one


def packed_operands(graph: Graph, target: Target, natives: set[Node]) -> dict[Node, Value]:
    """The packed form of each right operand, of contractions and of native ops that have one, that is known before a run."""
    nodes = graph.nodes()
    static = static_nodes(nodes)
    made = {(n.op, n.attrs, n.inputs): n.results[0] for n in nodes if n in static and n.inputs}
    out: dict[Node, Value] = {}
    for node in nodes:
        pack = target.packs.get(node.op.name) if node in natives else None
        if pack:
            packed = pack(node)
        elif node.op.kind is Kind.CONTRACT and node not in natives | static and (panel := _panel(node, static, target)):
            packed: Value = pack_panels(node.inputs[1], **panel)  # type: ignore[assignment]
        else:
            continue
        out[node] = made.setdefault((packed.node.op, packed.node.attrs, packed.node.inputs), packed)
    return out


def _panel(node: Node, static: set[Node], target: Target) -> dict[str, int]:
    """How to pack a contraction's right operand; empty where that is not known before a run, or not a plain matrix."""
    left, right = node.inputs
    columns, group = target.panel(right.dtype.name if left.dtype == right.dtype else f"{left.dtype} {right.dtype}")
    return {"panel": columns, "group": group} if is_matrix(contraction(node)) and columns and right.node in static else {}


def is_matrix(facts: Contraction) -> bool:
    """Whether the right operand is [k, n] for all rows of the left one."""
    return not facts.b_batch and facts.b_sum == (0,) and facts.b_columns == (1,)


def contraction(node: Node) -> Contraction:
    """The Contraction facts of a contraction node."""
    assert node.op.contract is not None
    return node.op.contract(node.attrs, *(v.shape for v in node.inputs))


def rows_from_packs(graph: Graph, target: Target, options: CompileOptions) -> Graph:
    """`graph` with the readers of a param that is packed for others reading the pack, where that frees the plain one."""
    readers: dict[Value, int] = {}
    for value in (v for node in graph.nodes() for v in node.inputs):
        readers[value] = readers.get(value, 0) + 1
    for packed in dict.fromkeys(_packs(graph, target).values()):
        table = packed.node.inputs[0]
        while table.node.op.kind is Kind.VIEW:
            table = table.node.inputs[0]
        if table.node.op is PARAM and readers[table] > 1:
            changed = _reading(graph, packed.node)
            if not _is_read(changed, table, _packs(changed, target)):
                graph = changed
    return graph


def _packs(graph: Graph, target: Target) -> Packs:
    return packed_operands(graph, target, {n for n in graph.nodes() if decide(n, target)[0] == "native"})


def _reading(graph: Graph, pack: Node) -> Graph:
    """`graph` with everything that can read `pack` doing so."""
    static = static_nodes(graph.nodes())
    able = [op.unpacks for op in OPS.values() if op.unpacks]

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        found = (unpacks(results[0].node, pack) for unpacks in able) if node not in static else ()
        other = next((v for v in found if v is not None), None)
        return results if other is None else (other,)

    return graph.rebuild(new)


def _is_read(graph: Graph, value: Value, packs: Packs) -> bool:
    """Whether anything in a run needs the value itself, or a view of it, not its packed form alone."""
    made = {v.node for v in packs.values()}

    def reads(node: Node) -> bool:
        if node in made or (node in packs and value not in node.inputs[:1]):
            return False
        return node.op.kind is not Kind.VIEW or any(_is_read(graph, v, packs) for v in node.results)

    return value in graph.roots() or any(reads(node) for node in graph.nodes() if value in node.inputs)


__all__ = ["contraction", "is_matrix", "packed_operands", "rows_from_packs"]

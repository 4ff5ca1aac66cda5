"""Binds named dims, and decomposes composites that the target does not claim into core ops.

After these passes every shape is static, the target supports every dtype, and every node is a leaf, a core op, or a claimed op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlx.compiler.compilation import Compilation, Decompositions
from rlx.errors import CompileError, OptionError, UnboundDimError, Unsupported, known
from rlx.ir.body import Body
from rlx.ir.graph import CONSTANT, EXTENT, INPUT, Extent, Graph, LeafAttrs, NewNode, Node, Value, between, bound, keep
from rlx.ir.op import OPS, Attrs, Kind
from rlx.ir.shape import Dim, Shape, contiguous_strides
from rlx.ir.verify import where

# -- named dims ----------------------------------------------------------------------------------------------------


def bind_dims(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with the values of options.dims in every shape and attribute; shapes are inferred again.

    UnboundDimError: a name without a value. OptionError: a value for a name that the graph does not have.
    """
    options, nodes = compilation.options, graph.nodes()
    binding = options.binding
    first_use: dict[str, Node] = {}
    for node in nodes:
        for name in _dim_names((node.attrs, *[shape for shape in node.shapes if not shape.is_static])):
            first_use.setdefault(name, node)
    if unknown := sorted(binding.keys() - first_use.keys()):
        raise OptionError(f"dims={unknown}: graph {graph.name!r} has no dim of that name; it has {known(first_use)}")
    if missing := [n for n in first_use if n not in binding]:
        uses = "; ".join(f"{n!r} in {where(first_use[n])} {first_use[n].shapes[0]}" for n in missing)
        raise UnboundDimError(f"graph {graph.name!r}: no value for {uses}. Bind it: CompileOptions(dims={{{missing[0]!r}: …}})")
    if not binding:
        _check_sizes(graph)
        return graph
    done = bound(nodes, binding)
    out = Graph(graph.name)
    out.inputs, out.params, out.handles = ([done[v] for v in group] for group in (graph.inputs, graph.params, graph.handles))
    out.outputs, out.output_names = [done[v] for v in graph.outputs], list(graph.output_names)
    out.assigns, out.in_place = [(done[h], done[v]) for h, v in graph.assigns], set(graph.in_place)
    out.updates = [u.renamed(done.__getitem__) for u in graph.updates]
    if options.extent is not None:
        name, _ = options.extent
        named = ((done[v], tuple(i for i, d in enumerate(v.dims) if name in _dim_names(d))) for n in nodes for v in n.results)
        axes = {v: found for v, found in named if found}
        out.extent = Extent(out.input(EXTENT, (), "i64"), axes, {}, ((),) * len(out.outputs))
    _check_sizes(out)
    return out


def _check_sizes(graph: Graph) -> None:
    """CompileError for a value whose addresses do not fit 64 bits. A value without elements is checked by its strides, and a leaf
    or result as if dims of 0 were 1, since numpy has no array that is larger then."""
    outside = {*graph.roots(), *graph.leaves()}
    for node in graph.nodes():
        for i, shape in enumerate(node.shapes):
            spans = shape.size_bytes or max(contiguous_strides(shape.static))
            if not shape.size_bytes and Value(node, i) in outside:
                spans = max(spans, math.prod(max(d, 1) for d in shape.static) * shape.dtype.itemsize)
            if spans >= 1 << 63 or shape.size_bytes >= 1 << 62:
                raise CompileError(f"{where(node)}: {shape} spans {spans} bytes, more than any memory")


def _dim_names(x: Any) -> Iterable[str]:
    if isinstance(x, Dim):
        yield from x.names
    elif isinstance(x, Shape):
        yield from _dim_names(x.dims)
    elif isinstance(x, tuple):
        for inner in x:
            if type(inner) not in (int, bool, float, str):
                yield from _dim_names(inner)
    elif isinstance(x, Attrs):
        yield from _dim_names((*vars(x).values(),))
    elif isinstance(x, Body):
        yield from _dim_names(tuple((node.attrs, node.shapes) for node in x.nodes))


# -- composites ----------------------------------------------------------------------------------------------------


def legalise(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` in core ops and ops claimed by the target. CompileError, or Unsupported for control flow that the target
    has not, names the node that cannot be compiled, and why."""
    target = compilation.target

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op.tiled is not None:  # rlx.compiler.packing decides later what is packed
            return inputs
        results = keep(node, inputs)
        node = results[0].node
        how, why = compilation.decide(node)
        if how == "refused":
            error = Unsupported if node.op.kind is Kind.CONTROL else CompileError
            raise error(f"graph {graph.name!r}: {where(node)} cannot be compiled for {target.name}: {why}")
        splittable = how == "native" or node.op.name not in target.natives
        split = (target.splits if splittable else target.unclaimed).get(node.op.name)
        if split and (made := split(node)) is not None:
            return expand(node, new, made)
        return expand(node, new, seen=compilation.decompositions) if how == "decomposed" else results

    for leaf in graph.leaves():
        new(leaf.node, ())
    return graph.rebuild(new)


def expand(node: Node, new: NewNode, made: Any = None, seen: Decompositions | None = None) -> tuple[Value, ...]:
    """Results of a composite's decomposition, or of its replacement `made`, with every node passed through `new` as in
    Graph.rebuild. `made` may read values that the operands are made of one by one. `seen`: decompositions of earlier nodes, to be
    used again and added to.

    The nodes get the source line of the composite; the node of its result gets its name.
    """
    operands = node.inputs if made is None else tuple(dict.fromkeys(_chains(node.inputs)))
    given, made = _decomposed(node, seen) if made is None else (operands, made)
    results = made if isinstance(made, tuple) else (made,)
    found = tuple([v.shape for v in results])
    assert found == node.shapes, f"{node.op.name} is {node.shapes}, its decomposition gives {found}"
    last = results[0].node

    def labelled(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        name = node.name if inner is last else inner.name
        if (name, node.source) != (inner.name, inner.source):
            inner = Node(inner.op, inner.inputs, inner.attrs, inner.shapes, name, node.source)
        return new(inner, inputs)

    return between(given, results, labelled, operands)


def _chains(values: Iterable[Value]) -> Iterator[Value]:
    """The values, and those that each is made of by ops of one operand."""
    for v in values:
        yield v
        while len(v.node.inputs) == 1:
            yield (v := v.node.inputs[0])


def expand_through(node: Node, follow: Callable[[Node], object]) -> tuple[Value, ...]:
    """As `expand`, with every node made again of the operands before it, and then followed."""

    def new(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        made = Node(inner.op, inputs, inner.attrs, inner.shapes, inner.name, inner.source)
        follow(made)
        return made.results

    return expand(node, new)


def _decomposed(node: Node, seen: Decompositions | None) -> tuple[tuple[Value, ...], Value | tuple[Value, ...]]:
    """Values in place of the operands, and the results that the op's decomposition gives for them. Nodes of the same op,
    attributes and shapes, as in a network's layers, share them; a constant stands for itself, since its data may decide."""
    assert node.op.decompose is not None
    if seen is None:
        return node.inputs, node.op.decompose(node.attrs, *node.inputs)
    key = node.op, repr(node.attrs), *[id(v) if v.node.op is CONSTANT else v.shape for v in node.inputs]
    if key not in seen:
        given = [v if v.node.op is CONSTANT else Value(Node(INPUT, (), LeafAttrs(v.shape), (v.shape,))) for v in node.inputs]
        seen[key] = tuple(given), node.op.decompose(node.attrs, *given)
    return seen[key]


def into_contractions(node: Node, compilation: Compilation) -> list[int] | None:
    """Operands of a composite that reach one of its contractions unchanged, moved or scaled; None: it has no contraction."""
    contracted, seen = list[Value](), compilation.decompositions

    def visit(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if inner.op.kind is Kind.CONTRACT:
            contracted.extend(inputs)
        results = keep(inner, inputs)
        return expand(results[0].node, visit, seen=seen) if inner.op.kind is Kind.COMPOSITE and inner.op.decompose else results

    expand(node, visit, seen=seen)
    own, reached = set(node.inputs), set(contracted)
    for v in contracted:  # a worklist: it grows in the loop
        varying = [x for x in v.node.inputs if x.node.op is not CONSTANT]
        moved = v.node.op.kind in (Kind.VIEW, Kind.POINTWISE) and len(varying) == 1
        if v.node.op is OPS["gather"]:
            moved, varying = True, [v.node.inputs[0]]
        if v not in own and moved:
            contracted += varying
            reached.update(varying)
    return [i for i, v in enumerate(node.inputs) if v in reached] if contracted else None


__all__ = ["bind_dims", "expand", "into_contractions", "legalise"]

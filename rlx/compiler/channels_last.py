"""Convolution networks with channels last: [batch, *spatial, channels], where the target's kernels prefer it.

Each op that declares it (OpDef.last) is computed with channels last, between transposes. These move down through the ops behind
them, which then work on the transposed operand, until one meets its inverse; so a network transposes its input once, and a mean
over the positions takes the last one. A graph without such an op is unchanged.

A transpose stays where moving it would transpose more elements than it has, and in front of ops that do not say how their
attributes change (OpDef.permuted); an unclaimed composite is decomposed for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import expand, into_contractions
from rlx.compiler.packing import reduction
from rlx.ir.attrs import attribute_types
from rlx.ir.graph import Graph, Node, Value, apply, keep
from rlx.ir.op import OPS, Kind, OpDef
from rlx.ir.ops.view import regroup, transposed_axes

TRANSPOSE, RESHAPE = OPS["transpose"], OPS["reshape"]
Axes = tuple[int, ...]


def channels_last(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with channels last where ops declare it, and few transposes."""
    wanted = compilation.target.channels_last and graph.extent is None
    if not wanted or not any(node.op.last is not None for node in graph.nodes()):
        return graph
    return graph.rebuild(_Sinking(compilation).new)


def first(rank: int) -> Axes:
    """The transpose from channels last to channels first."""
    return (0, rank - 1, *range(1, rank - 1))


def last(rank: int) -> Axes:
    """The transpose from channels first to channels last."""
    return (0, *range(2, rank), 1)


def _inverse(axes: Axes) -> Axes:
    return tuple(axes.index(i) for i in range(len(axes)))


class _Sinking:
    """Rebuilds a graph, operands before users. `turned`: transposes that move down, with their operand and axes."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.turned: dict[Value, tuple[Value, Axes]] = {}

    def new(self, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        node = results[0].node
        step = self.compilation.target.step(inputs[0].dtype.name) if node.op.last is not None else 0
        if node.op.last is not None and (made := node.op.last(node.attrs, step, *inputs)) is not None:
            made = expand(node, self.new, _named_inside(made, node))
            self.turned |= {v: (v.node.inputs[0], transposed_axes(v.node)) for v in made if v.node.op is TRANSPOSE}
            return made
        if node.op is TRANSPOSE:
            return (self.transposed(inputs[0], transposed_axes(node), results[0]),)
        if not any(v in self.turned for v in inputs):
            return results
        if node.op is RESHAPE:
            return (self.reshaped(*self.turned[inputs[0]], results[0]),)
        if node.op.kind is Kind.REDUCE:
            return (self.reduced(node, *self.turned[inputs[0]]),)
        if len(results) == 1 and (made := self.permuted(node)) is not None:
            return (made,)
        return expand(node, self.new, seen=self.compilation.decompositions) if self.opens(node) else results

    def opens(self, node: Node) -> bool:
        """True if a composite may be decomposed here: legalise would do it, and no pass before that asks for it as a whole."""
        whole = node.op.name in self.compilation.target.splits or self.compilation.decide(node)[0] != "decomposed"
        return not whole and into_contractions(node, self.compilation) is None

    def transposed(self, x: Value, axes: Axes, made: Value | None = None) -> Value:
        """`x` transposed: merged with a transpose that it is, and a reshape if only dims of 1 change places."""
        source, before = self.turned.get(x, (x, tuple(range(x.rank))))
        if x.node.op is TRANSPOSE and x not in self.turned:
            source, before = x.node.inputs[0], transposed_axes(x.node)
        total = tuple(before[a] for a in axes)
        if total == tuple(range(len(total))):
            return source
        if (order := [a for a in total if source.dims[a] != 1]) == sorted(order):
            out = _apply(RESHAPE, source, dims=tuple(source.dims[a] for a in total))
        else:
            out = made if made is not None and source is x else _apply(TRANSPOSE, source, axes=total)
        if x in self.turned or (total == first(len(total)) and len(total) > 3):
            self.turned[out] = (source, total)
        return out

    def put(self, source: Value, axes: Axes, node: Node) -> Value:
        """The transpose of `source`, which moves down, in place of the result of `node`."""
        source = _named(source, node, axes)
        out = self.transposed(source, axes)
        if out is not source:
            self.turned[out] = (source, axes)
        return out

    def reshaped(self, source: Value, axes: Axes, result: Value) -> Value:
        """A reshape of transpose(source, axes): of the source, then transposed, if the axes that it merges are adjacent there.
        Else the result has channels last if it has at least 4 dims."""
        own, dims = [source.dims[a] for a in axes], result.shape.static
        if 0 in dims:
            return result
        groups = regroup(own, dims)  # type: ignore[arg-type]
        at = [[axes[i] for i in left] for left, _ in groups]
        real = [a for a in range(source.rank) if source.dims[a] != 1]
        places = [[real.index(a) for a in group] for group in at]
        spans = [_with_ones(right, dims) for _, right in groups]
        front = [i for i in range(len(dims)) if not any(i in span for span in spans)]
        if all(p == list(range(p[0], p[0] + len(p))) for p in places):
            order = sorted(range(len(groups)), key=lambda g: places[g][0])
        elif len(dims) > 3:  # one transpose is needed: to channels last, if whole groups allow that
            order = sorted(range(len(groups)), key=lambda g: last(len(dims)).index(groups[g][1][0]))
            moved = [i for g in order for i in groups[g][0]]
            rest = [i for i in range(len(own)) if i not in moved]
            source = self.transposed(source, tuple(axes[i] for i in (*rest, *moved)))
        else:
            return result
        out = (*front, *(i for g in order for i in spans[g]))
        return self.put(_apply(RESHAPE, source, dims=tuple(dims[i] for i in out)), _inverse(out), result.node)

    def reduced(self, node: Node, source: Value, axes: Axes) -> Value:
        """A reduction of transpose(source, axes): of the source, then transposed."""
        facts = reduction(node)
        made = _apply(node.op, source, axis=tuple(sorted(axes[a] for a in facts.axes)), keepdims=facts.keepdims)
        if not facts.keepdims:
            left = [a for i, a in enumerate(axes) if i not in facts.axes]
            axes = tuple(sorted(left).index(a) for a in left)
        return self.put(made, axes, node)

    def permuted(self, node: Node) -> Value | None:
        """An op on transposed operands: on their sources, the others transposed like them, then transposed. None: it cannot be,
        or more elements would be transposed."""
        rank, pointwise = node.shapes[0].rank, node.op.kind is Kind.POINTWISE
        which = [i for i, r in enumerate(node.op.roles.ljust(len(node.inputs), "x")) if pointwise or r == "x"]
        ours = [node.inputs[i] for i in which if node.inputs[i] in self.turned and node.inputs[i].rank == rank]
        if not ours or (not pointwise and any(node.inputs[i].rank != rank for i in which)):
            return None
        _, axes = self.turned[max(ours, key=lambda v: v.shape.num_elements)]
        back = _inverse(axes)
        saved = sum(v.shape.num_elements for v in dict.fromkeys(ours) if self.turned[v][1] == axes)
        changed: dict[str, object] | None = {}
        if not pointwise:
            changed = node.op.permuted and node.op.permuted(node.attrs, back, *(v.shape for v in node.inputs))
        others = {node.inputs[i] for i in which} - {v for v in ours if self.turned[v][1] == axes}
        if changed is None or sum(self.cost(v) for v in others) > saved:
            return None
        operands = [self.transposed(_ranked(v, rank), back) if i in which else v for i, v in enumerate(node.inputs)]
        return self.put(_again(node, operands, changed), axes, node)

    def cost(self, x: Value) -> int:
        """Elements that a transpose of `x` moves in each run."""
        moves = sum(d != 1 for d in x.dims) > 1 and not self.compilation.is_static(x.node)
        return x.shape.num_elements if moves else 0


def _with_ones(axes: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The axes of a group of a reshape's result, and the dims of 1 that follow them."""
    end = axes[-1] + 1
    while end < len(dims) and dims[end] == 1:
        end += 1
    return list(range(axes[0], end))


def _ranked(x: Value, rank: int) -> Value:
    """`x` with dims of 1 in front."""
    return x if x.rank == rank else _apply(RESHAPE, x, dims=(1,) * (rank - x.rank) + x.dims)


def _apply(op: OpDef, x: Value, **attrs: object) -> Value:
    return apply(op, (x,), attrs)  # type: ignore[return-value]


def _again(node: Node, operands: Iterable[Value], changed: dict[str, object]) -> Value:
    """The node on transposed operands, with some attributes changed."""
    own = {name: getattr(node.attrs, name) for name in attribute_types(type(node.attrs))} if node.attrs else {}
    return apply(node.op, tuple(operands), own | changed)  # type: ignore[return-value]


def transposed_name(name: str, axes: Axes) -> str:
    """The name of the value of this name, transposed."""
    return f"{name}.transpose({','.join(map(str, axes))})" if axes != tuple(range(len(axes))) else name


def _named(made: Value, node: Node, axes: Axes) -> Value:
    """`made`, whose transpose by `axes` is the result of `node`, with a name that says so: the node's stands for the value as the
    user has it."""
    return made if node.name is None else replace(made.node, name=transposed_name(node.name, _inverse(axes))).results[made.index]


def _named_inside(made: Value, node: Node) -> Value:
    """A replacement of `node`, with a name for the operand of the transpose that it ends in."""
    if made.node.op is not TRANSPOSE:
        return made
    axes = transposed_axes(made.node)
    return _apply(TRANSPOSE, _named(made.node.inputs[0], node, axes), axes=axes)


__all__ = ["channels_last", "first", "last"]

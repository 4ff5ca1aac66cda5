"""Padding: finds the values with padding rows, and masks them so that they never affect a result.

One named dim may be bound to its upper bound and stay *active* (CompileOptions.extent): each run sets the number of valid rows,
the extent. Ops that work row by row need no change. For an op that mixes rows of an active axis, the rows past the extent are
replaced by the identity element of its combination, or handled by its own declaration (OpDef.padded); otherwise compilation
fails with a CompileError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import expand, expand_through
from rlx.errors import CompileError
from rlx.ir.carried import carried
from rlx.ir.contexts import Made, PaddingPass
from rlx.ir.dtype import DType
from rlx.ir.graph import INPUT, Active, Extent, Graph, Node, Value, between, constant, keep
from rlx.ir.op import Kind
from rlx.ir.ops import valid_rows
from rlx.ir.verify import where

Actives = tuple[Active, ...]  # of one value: factors of its axes, outermost first


def active_axes(graph: Graph) -> dict[Value, Active]:
    """The outermost active axis of each value of a compiled graph whose rows past the extent (graph.extent.leaf) are not read,
    so kernels can skip them. Other values are needed completely, and so are results of state.valid_rows."""
    rows = Rows(graph)
    needed, out = rows.needed(graph), {}
    for value in (v for v in rows.actives if v.node.op is not valid_rows.op):  # type: ignore[attr-defined]
        if free := [a for a in rows.of(value) if (value, a) not in needed]:
            out[value] = free[0]
    return out


class Rows:
    """Active axes of the values of a graph, propagated from its inputs. `actives[value]` is () or missing if there are none."""

    def __init__(self, graph: Graph) -> None:
        self.actives: dict[Value, Actives] = {} if graph.extent is None else dict(graph.extent.inputs)
        if graph.extent is not None:
            for node in graph.nodes():
                self.follow(node)

    def of(self, value: Value) -> Actives:
        return self.actives.get(value, ())

    def follow(self, node: Node) -> None:
        """Records the active axes of the node's results."""
        if not any(map(self.of, node.inputs)):
            return
        if node.op.kind is Kind.COMPOSITE:
            self.through(node)
        else:
            self.actives.update((v, self.results(node, v)) for v in node.results)

    def through(self, node: Node) -> None:
        """The same for a composite, through its decomposition."""
        self.actives.update((v, self.of(w)) for v, w in zip(node.results, expand_through(node, self.follow)))

    def needed(self, graph: Graph) -> set[tuple[Value, Active]]:
        """Active axes of values whose padding must be computed although it does not affect results: a mask before a sum hides
        it (as in a decomposed attention), but the masked value must still be defined."""
        out: set[tuple[Value, Active]] = set()
        for node in reversed(graph.nodes() if self.actives else ()):
            mixes = node.op.reduce is not None or node.op.contract is not None
            for i, value in enumerate(node.inputs):
                for active in self.of(value):
                    there = [(r, carried(node, i, active, r)) for r in node.results]
                    if node.op.kind is Kind.COMPOSITE:
                        there = [(r, a) for r in node.results for a in self.of(r)]
                    if any(t in out for t in there) or (mixes and not any(a for _, a in there)):
                        out.add((value, active))
        return out

    def results(self, node: Node, result: Value) -> Actives:
        """Active axes of one result of a core op."""
        found = {a for i, v in enumerate(node.inputs) for active in self.of(v) if (a := carried(node, i, active, result))}
        return tuple(sorted(found, key=lambda a: (a.axis, -a.inner)))


def padding(graph: Graph, compilation: Compilation) -> Graph:
    """The bound graph, changed so that its results do not depend on the rows past the extent. CompileError names a node for
    which this is impossible."""
    extent = compilation.options.extent
    return graph if extent is None else Padding(graph, *extent).run()


class Padding(Rows, PaddingPass):
    """The pass, and the first argument of an op's `padded` function."""

    def __init__(self, graph: Graph, name: str, upper: int) -> None:
        assert graph.extent is not None
        self.graph, self.name, self.upper, self.axes = graph, name, upper, graph.extent.axes
        self.extent = graph.extent.leaf
        self.actives = {}
        self.changes = 0
        self.finals: set[Node] = set()

    def run(self) -> Graph:
        if self.upper == 1:  # one row is always valid: a run has at least one
            self.axes = {}
        for leaf in self.graph.leaves():
            self.actives[leaf] = self.leaf(leaf)
        out = self.graph.rebuild(self.new)
        inputs = {v: self.of(v) for v in out.inputs if self.of(v)}
        out.extent = Extent(self.extent, {}, inputs, tuple(map(self.of, out.outputs)))
        return out

    def leaf(self, leaf: Value) -> Actives:
        axes = self.axes.get(leaf, ())
        if axes and leaf.node.op is not INPUT:
            raise self.refusal(leaf.node, f"{leaf.node.op.name}s are set once, for every length; give it the dims of the longest")
        if any(leaf.shape.static[a] != self.upper for a in axes):
            raise self.refusal(leaf.node, "its axis holds more than the rows: give them an axis of their own, and reshape")
        return tuple(Active(a, 1, self.upper, 1) for a in axes)

    def new(self, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        """A node of the user's graph made right. Where the name stands in its shape, its rows must be known."""
        made = self.right(keep(node, inputs)[0].node)
        for old, value in zip(node.results, made):
            missing = set(self.axes.get(old, ())) - {a.axis for a in self.of(value)}
            for axis in sorted(missing):
                if value.shape.static[axis] != self.upper or not _by_position(node):
                    raise self.refusal(node, f"where the rows lie along axis {axis} of its result cannot be followed")
            self.actives[value] = tuple(sorted((*self.of(value), *(Active(a, 1, self.upper, 1) for a in missing))))
        return made

    def right(self, node: Node) -> Sequence[Value]:
        """The corrected results of a node whose operands are already corrected."""
        if node in self.finals or not any(map(self.of, node.inputs)):
            self.follow(node)
            return node.results
        if node.op.padded is not None:
            made = node.op.padded(self, node.attrs, *node.inputs)
            if isinstance(made, str):
                raise self.refusal(node, made)
            if made is not None:
                self.changes += 1
                return self.inside(node, made if isinstance(made, tuple) else (made,))
        if node.op.kind is Kind.COMPOSITE:
            before = self.changes
            made = expand(node, lambda inner, inputs: self.right(keep(inner, inputs)[0].node))
            if self.changes != before:
                return made
            self.actives.update(zip(node.results, map(self.of, made)))
            return node.results
        return self.core(node)

    def inside(self, node: Node, made: tuple[Value, ...]) -> Sequence[Value]:
        """The result of an op's `padded` function, with each of its nodes corrected."""

        def new(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
            results = keep(inner, inputs)
            if inner in self.finals:
                self.finals.add(results[0].node)
            return self.right(results[0].node)

        return between((*node.inputs, self.extent), made, new)

    def core(self, node: Node) -> Sequence[Value]:
        """The results of a core op, with operands masked that it combines along an active axis."""
        op, inputs, fill = node.op, list(node.inputs), "0"
        if op.reduce is not None:
            fill = IDENTITIES[op.reduce(node.attrs, inputs[0].shape).op]
        for i, value in enumerate(node.inputs):
            for active in self.of(value):
                if op.roles[i : i + 1] == "i":  # padding may hold invalid indices
                    inputs[i] = self.mask(inputs[i], active, guard=True)
                    self.actives[inputs[i]] = self.of(value)
                if all(carried(node, i, active, r) for r in node.results):
                    continue
                if op.reduce is None and op.contract is None:
                    raise self.refusal(node, f"it mixes rows along axis {active.axis} of operand {i} ({value.shape})")
                inputs[i] = self.mask(inputs[i], active, fill)
                self.actives[inputs[i]] = tuple(a for a in self.of(value) if a.axis != active.axis)
        results = keep(node, tuple(inputs))
        self.follow(results[0].node)
        for i, value in enumerate(inputs):
            for result, axis in ((r, a.axis) for r in results for a in self.of(r)):
                here = {b for a in self.of(value) if (b := carried(node, i, a, result)) and b.axis == axis}
                if here and here != {a for a in self.of(result) if a.axis == axis}:
                    raise self.refusal(node, f"along axis {axis} of its result the rows of its operands lie differently")
        return results

    # -- offered to ops

    def mask(self, value: Value, active: Active, fill: str = "0", guard: bool = False) -> Value:
        """`value` with its rows past the extent along an active axis replaced by one of state.FILLS; `guard`: see there."""
        self.changes += 1
        facts = {"axis": active.axis, "upper": active.upper, "inner": active.inner, "fill": fill, "guard": guard}
        return self.final(valid_rows(value, self.extent, **facts))

    def final(self, made: Made) -> Made:
        """The results of a node that needs no further change."""
        self.finals.add((made[0] if isinstance(made, tuple) else made).node)
        return made

    def masked(self, value: Value, axis: int, fill: str = "0", guard: bool = False) -> Value:
        """The same along every active part of `axis`."""
        for active in self.along(value, axis):
            value = self.mask(value, active, fill, guard)
        return value

    def along(self, value: Value, axis: int) -> Actives:
        """The active parts of one axis."""
        return tuple(a for a in self.of(value) if a.axis == axis)

    def valid(self, value: Value, axis: int) -> Value:
        """bool [size of `axis`]: True where it holds data."""
        out = constant(np.ones(value.shape.static[axis], np.bool_))
        for active in self.along(value, axis):
            out = valid_rows(out, self.extent, axis=0, upper=active.upper, inner=active.inner)
        return out

    def count(self, value: Value, axes: Iterable[int], dtype: DType) -> Value | None:
        """Number of valid elements along `axes`, (); None: all, in every run."""
        actives = [a for axis in axes for a in self.along(value, axis)]
        if not actives:
            return None
        rows = out = self.extent.astype(dtype)
        for _ in actives[1:]:
            out = out * rows
        return out * float(math.prod(value.shape.static[a] for a in axes) // math.prod(a.upper for a in actives))

    def refusal(self, node: Node, why: str) -> CompileError:
        return CompileError(
            f"graph {self.graph.name!r}: {where(node)} cannot be compiled for an active extent of {self.name!r} (at most "
            f"{self.upper}): {why}. Bind the length itself, bind_dims({self.name}=…), or leave this out of the graph"
        )


IDENTITIES = {"add": "0", "mul": "1", "max": "least", "min": "greatest", "or": "0", "and": "1"}


def _by_position(node: Node) -> bool:
    """True if a node whose operands have no rows creates them: by broadcasting, or from positions alone (iota)."""
    return node.op.kind is Kind.VIEW or (node.op.rows is not None and node.op.arity[1] == 0)

"""Building graphs: leaves, outputs and assignments of state. Passes build new graphs and leave their input unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rlx.errors import DTypeError, DuplicateNameError, GraphError, ShapeError, items, utf8
from rlx.ir.dtype import DType
from rlx.ir.handle import BufferHandle
from rlx.ir.op import OPS, Kind, OpDef
from rlx.ir.shape import Shape

from rlx.ir.node import (  # isort: skip
    CONSTANT, HANDLE, INPUT, PARAM, REPLACING, TRACING, LeafAttrs, Node, Value, apply, caller, constant, postorder, same_values,
)  # fmt: skip

NewNode = Callable[[Node, tuple[Value, ...]], Sequence[Value]]  # a node and its new inputs -> a Value for each result
EXTENT = "%extent"  # name of the input that the compiler adds


class Active(NamedTuple):
    """An active axis of a value: `axis` has size outer * upper * inner, and indices of the middle factor at or past the run's
    extent are padding."""

    axis: int
    outer: int
    upper: int
    inner: int


class Extent(NamedTuple):
    """The active extent of a bound graph. `leaf`, an input i64 (), is the number of valid rows in a run; a kernel reads it as
    ctx.element(leaf, ()). `axes`: the axes of each value that the user named so. The padding pass replaces them by the active
    axes of `inputs` and `outputs`."""

    leaf: Value
    axes: dict[Value, tuple[int, ...]]
    inputs: dict[Value, tuple[Active, ...]]
    outputs: tuple[tuple[Active, ...], ...]


class Update(NamedTuple):
    """One state updated in place (rlx/ir/updates.py). Values carried by a loop need no way back: `saved` and `undo` are None."""

    handle: Value
    result: Value
    saved: Value | None
    undo: Value | None

    def renamed(self, new: Callable[[Value], Value]) -> Update:
        """The same update in another graph; `new` gives the replacement of a value there."""
        saved, undo = (None if v is None else new(v) for v in self[2:])
        return Update(self.handle, new(self.result), saved, undo)


class Building:
    """Leaves in declaration order, outputs, and the next value of each assigned handle. Users make Graphs (rlx/ir/graph.py).

    Ops can be written as operators on Values, as functions (`rlx.gelu(x)`), or as methods (`g.gelu(x)`).
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = utf8("the name of a graph is text", name, GraphError)
        self.inputs: list[Value] = []
        self.params: list[Value] = []
        self.handles: list[Value] = []
        self.outputs: list[Value] = []
        self.output_names: list[str] = []
        self.assigns: list[tuple[Value, Value]] = []  # (handle, next value)
        self.weights: dict[str, Any] = {}  # arrays of params that came with the graph: a compile sets them
        self.in_place: set[str] = set()  # handles whose assignment must not copy
        self.updates: list[Update] = []  # made by the compiler (rlx/compiler/state.py)
        self.extent: Extent | None = None  # made by the compiler (rlx/compiler/padding.py)
        self._walked: tuple[list[Value], list[Node]] | None = None  # the values that `nodes` began at, and what it found
        self._named: dict[str | None, Value] = {}  # leaves; made again when their number is another one

    def __getstate__(self) -> dict[str, object]:
        """For copies and pickles: nodes first, operands before users, so that the recursion depth stays at one node."""
        return {"": tuple(self.nodes()), **vars(self), "_walked": None, "_named": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update({name: value for name, value in state.items() if name})

    @property
    def output_actives(self) -> Sequence[tuple[Active, ...]]:
        """The active axes of each output."""
        return self.extent.outputs if self.extent else ((),) * len(self.outputs)

    # -- leaves

    def input(self, name: str, dims: Any, dtype: DType | str) -> Value:
        """A tensor given at every run. `dims`: ints or names of symbolic dims."""
        return self._add(self.inputs, INPUT, name, Shape(dims, dtype))

    def param(self, name: str, dims: Any, dtype: DType | str) -> Value:
        """A tensor set once by `set_param` and kept."""
        return self._add(self.params, PARAM, name, Shape(dims, dtype))

    def handle(self, handle: BufferHandle) -> Value:
        """The value of the state `handle` before the run."""
        if not isinstance(handle, BufferHandle):
            raise GraphError(f"handle() takes a BufferHandle, got {type(handle).__name__}")
        return self._add(self.handles, HANDLE, handle.name, handle.shape)

    def constant(self, data: Any, dtype: DType | str | None = None, name: str | None = None) -> Value:
        return constant(data, dtype, name)

    def _add(self, group: list[Value], op: OpDef, name: str, shape: Shape) -> Value:
        name = utf8(f"{self.name}: an {op.name}'s name must be a non-empty string", name, GraphError, least=1)
        if len(self._named) != len(self.inputs) + len(self.params) + len(self.handles):
            self._named = {leaf.node.name: leaf for leaf in self.leaves()}
        if (other := self._named.get(name)) is not None:
            found = f"the {other.node.op.name} {name!r} ({other.shape})"
            raise DuplicateNameError(f"graph {self.name!r} already has {found}; names are unique")
        value = Value(Node(op, (), LeafAttrs(shape), (shape,), name, caller()))
        group.append(value)
        self._named[name] = value
        return value

    def leaves(self) -> list[Value]:
        return self.inputs + self.params + self.handles

    # -- ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in OPS or OPS[name].kind is Kind.LEAF:
            raise AttributeError(f"Graph has no attribute and no op named {name!r}")
        declared = OPS[name]
        return lambda *operands, shape=None, name=None, **attrs: apply(declared, operands, attrs, shape=shape, name=name)

    # -- results

    def assign(self, handle: Value, value: Value, in_place: bool = False) -> None:
        """After each run the state `handle` holds `value`; within the run every read sees the old state.

        A value that is the state with some rows replaced (rlx.update_rows) is written in place where that is provably the
        same. With `in_place` a compile that cannot prove it fails with the reason, instead of copying.
        """
        if TRACING.made:
            raise GraphError(
                f"assign to {handle!r} in the body of control flow, which may run any number of times: a state gets one next "
                "value a run. Carry the value through the body and assign the result behind it"
            )
        if not isinstance(handle, Value) or handle.node.op is not HANDLE or handle not in set(self.handles):
            raise GraphError(f"assign() takes a handle of graph {self.name!r}, got {handle!r}")
        if not isinstance(value, Value):
            raise GraphError(f"assign to handle {handle.name!r}: the next state is a Value, got {type(value).__name__}")
        if value.shape != handle.shape:
            error, how = (ShapeError, "") if value.dims != handle.dims else (DTypeError, f"; value.astype({handle.dtype.name!r})")
            raise error(f"assign to handle {handle.name!r}: it is {handle.shape}, the value is {value.shape}{how}")
        if any(h is handle for h, _ in self.assigns):
            raise DuplicateNameError(f"handle {handle.name!r} is assigned twice in graph {self.name!r}")
        self.assigns.append((handle, value))
        if in_place and handle.name:
            self.in_place.add(handle.name)

    def set_outputs(self, outputs: Iterable[Value], names: Iterable[str] | None = None) -> None:
        """Sets the results of a run, in this order. A Value may be given twice; an output may be an input."""
        wanted = f"graph {self.name!r}: outputs are a list of Values"
        outputs = items(wanted, None if isinstance(outputs, Value) else outputs, GraphError)
        for out in outputs:
            if not isinstance(out, Value):
                raise GraphError(f"graph {self.name!r}: an output is a Value, got {type(out).__name__}")
        if names is None:
            own = [out.name for out in outputs]
            names = [name if name and name not in own[:i] else f"output{i}" for i, name in enumerate(own)]
        wanted = f"graph {self.name!r}: names of outputs are a list of texts"
        names = [utf8(wanted, name, GraphError) for name in items(wanted, names, GraphError)]
        if len(names) != len(outputs) or len(set(names)) != len(names):
            raise DuplicateNameError(f"graph {self.name!r}: {len(outputs)} outputs need as many different names, got {names}")
        self.outputs, self.output_names = outputs, names

    # -- walking

    def roots(self) -> list[Value]:
        """All values that a run must compute: outputs, next states, and those that undo updates in place."""
        undone = [*(u.saved for u in self.updates), *(u.undo for u in reversed(self.updates))]
        return self.outputs + [v for _, v in self.assigns] + [v for v in undone if v is not None]

    def nodes(self) -> list[Node]:
        """Every node a run needs, and every declared leaf, operands before users."""
        leaves, roots = self.leaves(), self.roots()
        if self._walked is None or not same_values(self._walked[0], leaves + roots):  # passes ask several times for one graph
            self.remember(postorder(roots, (v.node for v in leaves))[0])
        return list(self._walked[1])  # type: ignore[index]

    def remember(self, nodes: list[Node]) -> None:
        """`nodes` are those of this graph in order, as the verifier found them."""
        self._walked = self.leaves() + self.roots(), nodes

    def rebuild(self, new: NewNode, name: str | None = None) -> Self:
        """A new graph with every non-leaf node replaced by what `new(node, new inputs)` returns (one Value per result).

        Leaves are kept, in order. Return `keep(node, inputs)` for a node that stays. Nodes that `new` makes have the source line
        of the node they replace.
        """
        leaves = {v.node for v in self.leaves()}
        now, out = rebuilt((node for node in self.nodes() if node not in leaves), new, {}), self.copy(name)
        out.outputs, out.assigns = [now(v) for v in self.outputs], [(h, now(v)) for h, v in self.assigns]
        out.updates = [u.renamed(now) for u in self.updates]
        return out

    def copy(self, name: str | None = None) -> Self:
        """A new graph of the same nodes, with lists of its own."""
        out = type(self)(name or self.name)
        out.inputs, out.params, out.handles = list(self.inputs), list(self.params), list(self.handles)
        out.outputs, out.output_names = list(self.outputs), list(self.output_names)
        out.assigns, out.in_place = list(self.assigns), set(self.in_place)
        out.updates, out.extent, out.weights = list(self.updates), self.extent, dict(self.weights)
        out._walked = self._walked
        return out


def rebuilt(nodes: Iterable[Node], new: NewNode, done: dict[Value, Value]) -> Callable[[Value], Value]:
    """Of a value, its replacement when each of `nodes` (operands before users) is replaced as in Building.rebuild. `done`: the
    replacements of other values; those that stay need none."""
    outer = REPLACING.source

    def now(value: Value) -> Value:
        return done.get(value, value)

    try:
        for node in nodes:
            REPLACING.source = node.source or ""
            made = new(node, node.inputs if done.keys().isdisjoint(node.inputs) else tuple(map(now, node.inputs)))
            if len(made) != len(node.shapes):
                raise ValueError(f"{node!r} is replaced by {len(made)} values")
            if len(made) != 1 or made[0].node is not node:
                done.update(zip(node.results, made))
    finally:
        REPLACING.source = outer
    return now


def between(given: Sequence[Value], results: Sequence[Value], new: NewNode, operands: Sequence[Value] = ()) -> tuple[Value, ...]:
    """`results` with the nodes between the values `given` and them replaced as in Building.rebuild, and with `operands`, if there
    are any, in place of `given`."""
    outside = {v.node: None for v in given}
    inside = postorder(results, outside)[0][len(outside) :]
    return tuple(map(rebuilt(inside, new, {a: b for a, b in zip(given, operands or given, strict=True) if a is not b}), results))


def keep(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
    """The same node over `inputs` (the very node if they are its own)."""
    if inputs is node.inputs or same_values(inputs, node.inputs):
        return node.results
    shapes, given = node.shapes, tuple([v.shape for v in inputs])
    if given != tuple([v.shape for v in node.inputs]):
        shapes = node.op.result_shapes(node.attrs, given)
    return Node(node.op, inputs, node.attrs, shapes, node.name, node.source).results


def bound(nodes: Iterable[Node], binding: Mapping[str, int]) -> dict[Value, Value]:
    """Values of new nodes for those of `nodes` (operands before users), with named dims as numbers; shapes are inferred again."""
    done: dict[Value, Value] = {}
    for node in nodes:
        if node.op is CONSTANT:
            done[node.results[0]] = node.results[0]
            continue
        inputs, attrs = tuple(done[v] for v in node.inputs), node.attrs and node.attrs.bind(binding)
        shapes = node.op.result_shapes(attrs, tuple(v.shape for v in inputs))
        done.update(zip(node.results, Node(node.op, inputs, attrs, shapes, node.name, node.source).results, strict=True))
    return done

"""Nodes, values and graphs. Nodes are frozen and typed at birth: an ill-typed node cannot exist.

A Value is one result of a Node and is what ops take and give. A Graph names the leaves, the outputs and the
assignments of state; passes make new Graphs and leave their input as it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import DTypeError, DuplicateNameError, GraphError, IndexRangeError, ShapeError
from rlx.ir.dtype import DType, as_dtype, bool_, i64
from rlx.ir.handle import BufferHandle
from rlx.ir.op import OPS, Attrs, Kind, OpDef
from rlx.ir.shape import DimLike, Shape
from rlx.ir.updates import Update

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One application of an op. Compared by identity; a pass removes duplicates."""

    op: OpDef
    inputs: tuple[Value, ...]
    attrs: Attrs | None
    shapes: tuple[Shape, ...]
    name: str | None = None
    source: str | None = field(default=None, repr=False)  # file:line of the call that made it

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<{self.op.name}{label} {', '.join(map(str, self.shapes))}>"

    @property
    def results(self) -> tuple[Value, ...]:
        return tuple(Value(self, i) for i in range(len(self.shapes)))


@dataclass(frozen=True, slots=True)
class Value:
    """One result of a node: an operand for other ops. Equality is identity of (node, index); use rlx.equal for tensors."""

    node: Node
    index: int = 0

    @property
    def shape(self) -> Shape:
        return self.node.shapes[self.index]

    @property
    def dims(self) -> tuple[DimLike, ...]:
        return self.shape.dims

    @property
    def dtype(self) -> DType:
        return self.shape.dtype

    @property
    def rank(self) -> int:
        return self.shape.rank

    @property
    def name(self) -> str | None:
        return self.node.name

    def __repr__(self) -> str:
        return f"{self.node!r}[{self.index}]" if len(self.node.shapes) > 1 else repr(self.node)

    def __bool__(self) -> bool:
        raise GraphError(f"{self!r} has no value before a run, so it cannot decide an if; use rlx.where")

    def __iter__(self) -> Iterator[Value]:
        raise GraphError(f"{self!r} cannot be iterated; use rlx.split")

    __array__ = None  # numpy must not try to turn a graph value into an array
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Value: return _call("add", self, other)
    def __radd__(self, other: Any) -> Value: return _call("add", other, self)
    def __sub__(self, other: Any) -> Value: return _call("sub", self, other)
    def __rsub__(self, other: Any) -> Value: return _call("sub", other, self)
    def __mul__(self, other: Any) -> Value: return _call("mul", self, other)
    def __rmul__(self, other: Any) -> Value: return _call("mul", other, self)
    def __truediv__(self, other: Any) -> Value: return _call("div", self, other)
    def __rtruediv__(self, other: Any) -> Value: return _call("div", other, self)
    def __pow__(self, other: Any) -> Value: return _call("pow", self, other)
    def __rpow__(self, other: Any) -> Value: return _call("pow", other, self)
    def __matmul__(self, other: Any) -> Value: return _call("matmul", self, other)
    def __rmatmul__(self, other: Any) -> Value: return _call("matmul", other, self)
    def __neg__(self) -> Value: return _call("neg", self)
    def __abs__(self) -> Value: return _call("abs", self)
    def __lt__(self, other: Any) -> Value: return _call("less", self, other)
    def __le__(self, other: Any) -> Value: return _call("less_equal", self, other)
    def __gt__(self, other: Any) -> Value: return _call("less", other, self)
    def __ge__(self, other: Any) -> Value: return _call("less_equal", other, self)
    def __and__(self, other: Any) -> Value: return _call("logical_and", self, other)
    def __or__(self, other: Any) -> Value: return _call("logical_or", self, other)
    def __invert__(self) -> Value: return _call("logical_not", self)

    def reshape(self, *dims: Any) -> Value:
        """The same elements in row-major order under other dims; one dim may be -1."""
        return _call("reshape", self, dims=tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims)

    def transpose(self, *axes: int) -> Value:
        """Dims permuted by `axes` (none given: reversed)."""
        return _call("transpose", self, axes=axes or tuple(reversed(range(self.rank))))

    def __getitem__(self, key: Any) -> Value:
        """x[1], x[:, 2:5], x[..., None, ::-1]: ints, slices, None and ... as in numpy. For other indices: rlx.gather."""
        return _indexed(self, key if isinstance(key, tuple) else (key,))

    @property
    def T(self) -> Value:
        return self.transpose()

    def astype(self, dtype: DType | str) -> Value:
        return _call("cast", self, dtype=as_dtype(dtype))


def _call(name: str, *operands: Any, **attrs: Any) -> Value:
    return apply(OPS[name], operands, attrs)  # type: ignore[return-value]


def _indexed(x: Value, keys: tuple[Any, ...]) -> Value:
    """A slice of x, then a reshape that drops the dims indexed by an int and adds those asked for by None."""
    end, dots = 2**63 - 1, [i for i, e in enumerate(keys) if e is Ellipsis]
    missing = x.rank - sum(e is not None and e is not Ellipsis for e in keys)
    if missing < 0 or len(dots) > 1:
        raise ShapeError(f"{x!r} has {x.rank} dims, indexed by {len(keys)} keys of which {len(dots)} are ...")
    at = dots[0] if dots else len(keys)
    ranges: list[tuple[int, int, int]] = []
    kept: list[int | None] = []  # dims of the result: an axis of the slice, or None for a dim of 1
    for e in (*keys[:at], *(slice(None),) * missing, *keys[at + 1 :]):
        if isinstance(e, slice):
            step = 1 if e.step is None else e.step
            start = e.start if e.start is not None else 0 if step > 0 else end
            kept.append(len(ranges))
            ranges.append((start, e.stop if e.stop is not None else end if step > 0 else -end, step))
        elif e is None:
            kept.append(None)
        elif isinstance(e, (int, np.integer)):
            i, dim = int(e), x.dims[len(ranges)]
            if isinstance(dim, int) and not -dim <= i < dim:
                raise IndexRangeError(f"index {i} of {x!r}: dim {len(ranges)} is {dim}")
            ranges.append((i, i + 1 if i != -1 else end, 1))
        else:
            raise GraphError(f"{x!r} indexed by {type(e).__name__}; use rlx.gather")
    starts, stops, steps = zip(*ranges) if ranges else ((), (), ())
    part = x if all(r == (0, end, 1) for r in ranges) else _call("slice", x, starts=starts, stops=stops, steps=steps)
    if kept == list(range(x.rank)):
        return part
    return _call("reshape", part, dims=tuple(1 if i is None else part.dims[i] for i in kept))


def _caller() -> str | None:
    """file:line of the nearest frame outside rlx: the line an error should point at."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


class ConstantAttrs(Attrs):
    """A constant's data: a read-only array in the dtype's host form. Compared by bytes."""

    data: np.ndarray

    @property
    def is_frozen(self) -> bool:
        return self.data.flags.c_contiguous and not self.data.flags.writeable

    def _key(self) -> tuple[Any, ...]:
        return self.data.dtype.name, self.data.shape, self.data.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantAttrs) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class LeafAttrs(Attrs):
    """What a named leaf promises: its shape."""

    shape: Shape


def _leaf(name: str, attrs: type[Attrs], shape_of: Callable[[Any], Shape]) -> OpDef:
    def reference(attrs: Any) -> np.ndarray:
        if not isinstance(attrs, ConstantAttrs):
            raise GraphError(f"a {name} has no value of its own; bind it")
        return attrs.data

    OPS[name] = OpDef(name=name, kind=Kind.LEAF, infer=shape_of, reference=reference, attrs=attrs, arity=(0, 0))
    return OPS[name]


INPUT = _leaf("input", LeafAttrs, lambda a: a.shape)
PARAM = _leaf("param", LeafAttrs, lambda a: a.shape)
HANDLE = _leaf("handle", LeafAttrs, lambda a: a.shape)
CONSTANT = _leaf("constant", ConstantAttrs, lambda a: Shape(a.data.shape, a.data.dtype))


def constant(data: Any, dtype: DType | str | None = None, name: str | None = None) -> Value:
    """A constant Value from anything numpy can hold; Python floats become f32 and ints i64 unless `dtype` says otherwise."""
    try:
        array = np.asarray(data, None if dtype is None else as_dtype(dtype).numpy)
    except (ValueError, OverflowError) as e:  # ragged lists, text, integers past the dtype's range
        kind = "" if dtype is None else f" of {as_dtype(dtype)}"
        raise DTypeError(f"a constant{kind} cannot hold {data!r:.60}: {e}") from e
    if dtype is None and array.dtype == np.float64 and not isinstance(data, (np.ndarray, np.generic)):
        array = array.astype(np.float32)
    array = np.array(array, order="C")  # a copy: the caller's array may change later
    array.flags.writeable = False
    attrs = ConstantAttrs(array)
    return Value(Node(CONSTANT, (), attrs, (Shape(array.shape, as_dtype(array.dtype)),), name, _caller()))


def apply(
    op: OpDef, operands: Sequence[Any], attrs: dict[str, Any], *, shape: Any = None, name: str | None = None
) -> Value | tuple[Value, ...]:
    """A node of `op`. Non-Value operands become constants: in the dtype of the first Value among the operands of the op's
    dtype, i64 where an index stands, bool where a condition stands (OpDef.roles).

    `shape`, where given, is compared with the inferred one (dims alone, or a Shape; a tuple of them for several results).
    """
    roles = op.roles.ljust(len(operands), "x")
    own = next((x.dtype for x, r in zip(operands, roles) if isinstance(x, Value) and r == "x"), None)
    like = {"x": own, "i": i64, "b": bool_}
    values = tuple(x if isinstance(x, Value) else _constant_operand(op, x, like[r]) for x, r in zip(operands, roles))
    made = op.make_attrs(attrs)
    shapes = op.result_shapes(made, tuple(v.shape for v in values))
    if shape is not None:
        _check_given(op, shape, shapes)
    node = Node(op, values, made, shapes, name, _caller())
    return node.results[0] if len(shapes) == 1 else node.results


def _constant_operand(op: OpDef, x: Any, like: DType | None) -> Value:
    if isinstance(x, (bool, int, float, np.generic)) and not isinstance(x, np.ndarray):
        if like is not None and like.is_int and isinstance(x, float) and not float(x).is_integer():
            raise DTypeError(f"{op.name}: the constant {x} does not fit {like}; cast the operand first")
        return constant(x, like)
    if isinstance(x, (np.ndarray, list, tuple)):
        return constant(x, None if isinstance(x, np.ndarray) else like)
    hint = "; pass a result of it: node.results[i]" if isinstance(x, Node) else ""
    raise GraphError(f"{op.name}: an operand is a Value, a number or an array, got {type(x).__name__}{hint}")


def _check_given(op: OpDef, given: Any, inferred: tuple[Shape, ...]) -> None:
    given_list = given if isinstance(given, tuple) and given and isinstance(given[0], (Shape, tuple)) else (given,)
    if len(given_list) != len(inferred):
        raise ShapeError(f"{op.name}: {len(given_list)} shapes given for {len(inferred)} results")
    for want, found in zip(given_list, inferred):
        want = want if isinstance(want, Shape) else found.with_dims(Shape(want, found.dtype).dims)
        if want != found:
            raise ShapeError(f"{op.name}: the given shape {want} is not the inferred {found}")


EXTENT = "%extent"  # name of the input that the compiler adds


class Active(NamedTuple):
    """Where a value has rows of which only some hold data: `axis` is of size outer * upper * inner, and indices of the middle
    factor from the run's extent on are padding."""

    axis: int
    outer: int
    upper: int
    inner: int


class Extent(NamedTuple):
    """A bound graph whose rows need not all hold data. `leaf`, an input i64 (), says how many do in a run; a kernel reads it as
    ctx.element(leaf, ()). `inputs` and `outputs`: where they have such rows. `axes`: where the dim's name stood in the user's
    graph, until this is known."""

    leaf: Value
    upper: int
    inputs: dict[Value, tuple[Active, ...]]
    outputs: tuple[tuple[Active, ...], ...] = ()
    axes: dict[Value, tuple[int, ...]] | None = None


class Graph:
    """A named tensor program: leaves in declaration order, outputs, and the next value of each assigned handle.

    Ops can be written as operators on Values, as functions (`rlx.gelu(x)`), or as methods (`g.gelu(x)`).
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.params: list[Value] = []
        self.handles: list[Value] = []
        self.outputs: list[Value] = []
        self.output_names: list[str] = []
        self.assigns: list[tuple[Value, Value]] = []  # (handle, next value)
        self.in_place: set[str] = set()  # handles whose assignment must not copy
        self.updates: list[Update] = []  # made by the compiler (rlx/compile/state.py)
        self.extent: Extent | None = None  # made by the compiler (rlx/compile/padding.py)

    # -- leaves

    def input(self, name: str, dims: Any, dtype: DType | str) -> Value:
        """A tensor given at every run. `dims`: ints or names of symbolic dims."""
        return self._add(self.inputs, INPUT, name, Shape(dims, dtype))

    def param(self, name: str, dims: Any, dtype: DType | str) -> Value:
        """A tensor set once by `set_param` and kept."""
        return self._add(self.params, PARAM, name, Shape(dims, dtype))

    def handle(self, handle: BufferHandle) -> Value:
        """The state `handle` as it stands before the run."""
        if not isinstance(handle, BufferHandle):
            raise GraphError(f"handle() takes a BufferHandle, got {type(handle).__name__}")
        return self._add(self.handles, HANDLE, handle.name, handle.shape)

    def constant(self, data: Any, dtype: DType | str | None = None, name: str | None = None) -> Value:
        return constant(data, dtype, name)

    def _add(self, group: list[Value], op: OpDef, name: str, shape: Shape) -> Value:
        if not isinstance(name, str) or not name:
            raise GraphError(f"{self.name}: an {op.name}'s name must be a non-empty string, got {name!r}")
        for other in self.leaves():
            if other.name == name:
                found = f"the {other.node.op.name} {name!r} ({other.shape})"
                raise DuplicateNameError(f"graph {self.name!r} already has {found}; names are unique")
        value = Value(Node(op, (), LeafAttrs(shape), (shape,), name, _caller()))
        group.append(value)
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
        if not isinstance(handle, Value) or handle.node.op is not HANDLE or handle not in self.handles:
            raise GraphError(f"assign() takes a handle of graph {self.name!r}, got {handle!r}")
        if not isinstance(value, Value):
            raise GraphError(f"assign to handle {handle.name!r}: the next state is a Value, got {type(value).__name__}")
        if value.shape != handle.shape:
            raise ShapeError(f"assign to handle {handle.name!r}: it is {handle.shape}, the value is {value.shape}")
        if any(h == handle for h, _ in self.assigns):
            raise DuplicateNameError(f"handle {handle.name!r} is assigned twice in graph {self.name!r}")
        self.assigns.append((handle, value))
        if in_place and handle.name:
            self.in_place.add(handle.name)

    def set_outputs(self, outputs: Iterable[Value], names: Iterable[str] | None = None) -> None:
        """What a run returns, in this order. The same Value may stand twice; an output may be an input."""
        if isinstance(outputs, Value) or not isinstance(outputs, Iterable):
            raise GraphError(f"graph {self.name!r}: outputs are a list of Values, got {type(outputs).__name__}")
        outputs = list(outputs)
        for out in outputs:
            if not isinstance(out, Value):
                raise GraphError(f"graph {self.name!r}: an output is a Value, got {type(out).__name__}")
        if names is None:
            own = [out.name for out in outputs]
            names = [name if name and name not in own[:i] else f"output{i}" for i, name in enumerate(own)]
        names = list(names)
        if len(names) != len(outputs) or len(set(names)) != len(names):
            raise DuplicateNameError(f"graph {self.name!r}: {len(outputs)} outputs need as many different names, got {names}")
        self.outputs, self.output_names = outputs, names

    # -- walking

    def roots(self) -> list[Value]:
        """Everything a run must compute: outputs, next states, and what undoes updates in place."""
        undone = [*(u.saved for u in self.updates), *(u.undo for u in reversed(self.updates))]
        return self.outputs + [v for _, v in self.assigns] + undone

    def nodes(self) -> list[Node]:
        """Every node a run needs, and every declared leaf, operands before users."""
        return postorder(self.roots(), (v.node for v in self.leaves()))[0]

    def rebuild(self, new: Callable[[Node, tuple[Value, ...]], Sequence[Value]], name: str | None = None) -> Graph:
        """A new graph with every non-leaf node replaced by what `new(node, new inputs)` returns (one Value per result).

        Leaves are kept, in order. Return `keep(node, inputs)` for a node that stays.
        """
        done: dict[Value, Value] = {v: v for v in self.leaves()}
        for node in self.nodes():
            if node.results[0] in done:
                continue
            made = new(node, tuple(done[v] for v in node.inputs))
            for old, value in zip(node.results, made, strict=True):
                done[old] = value
        out = Graph(name or self.name)
        out.inputs, out.params, out.handles = list(self.inputs), list(self.params), list(self.handles)
        out.outputs, out.output_names = [done[v] for v in self.outputs], list(self.output_names)
        out.assigns, out.in_place = [(h, done[v]) for h, v in self.assigns], set(self.in_place)
        out.updates, out.extent = [u.renamed(done) for u in self.updates], self.extent
        return out

    # -- facts derived elsewhere, offered here because users look for them here

    def verify(self) -> None:
        """Raise VerifyError listing every structural fault."""
        from rlx.ir.verify import verify

        verify(self)

    def fingerprint(self) -> str:
        """sha256 of the text form with node names and source lines left out: equal across processes and machines."""
        from rlx.ir.text import fingerprint

        return fingerprint(self)

    def __str__(self) -> str:
        from rlx.ir.text import print_graph

        return print_graph(self)

    @staticmethod
    def parse(text: str) -> Graph:
        """The graph that `str` printed."""
        from rlx.ir.text import parse_graph

        return parse_graph(text)


def postorder(roots: Iterable[Any], known: Iterable[Node] = ()) -> tuple[list[Node], Node | None]:
    """`known` nodes, then the others that the Values among `roots` need, operands before users; and one that needs itself,
    if there is one.

    What is no Value is passed over, here and among operands: the verifier reports it.
    """
    done: dict[Node, None] = dict.fromkeys(known)
    open_: set[Node] = set()
    cycle = None
    for root in roots:
        stack = [(root.node, iter(root.node.inputs))] if isinstance(root, Value) and root.node not in done else []
        while stack:
            node, todo = stack[-1]
            open_.add(node)
            for v in todo:
                if not isinstance(v, Value) or v.node in done:
                    continue
                if v.node not in open_:
                    stack.append((v.node, iter(v.node.inputs)))
                    break
                cycle = cycle or v.node
            else:
                stack.pop()
                done[node] = None
    return list(done), cycle


def keep(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
    """The same node over `inputs` (the very node if they are its own)."""
    if inputs == node.inputs:
        return node.results
    shapes = node.op.result_shapes(node.attrs, tuple(v.shape for v in inputs))
    return Node(node.op, inputs, node.attrs, shapes, node.name, node.source).results

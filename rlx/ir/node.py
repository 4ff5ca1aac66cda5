"""Nodes and values. Nodes are frozen and type-checked when they are made: an ill-typed node cannot exist.

A Value is one result of a Node; ops take and return Values. There is one Value object per result, so identity (`is`, dicts and
sets) distinguishes values. `==` is an op of the user's graph: it compares elements.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from threading import Lock, local
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError, unmasked
from rlx.ir.dtype import DType, as_dtype, bool_, i64
from rlx.ir.methods import FUNCTIONS, Methods
from rlx.ir.op import OPS, Attrs, Kind, OpDef
from rlx.ir.shape import DimLike, Shape
from rlx.records import record

Operand: TypeAlias = "Value | complex | np.ndarray[Any, Any] | np.generic | Sequence[object]"
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FRONTENDS = os.path.join(_PACKAGE, "frontends", "")  # code that builds networks: a line of it says more than that of load()


class _Replacing(local):
    """The source line that new nodes of this thread get, while a pass replaces a node of that line; "": none is known."""

    source: str | None = None


REPLACING = _Replacing()


class _Tracing(local):
    """`made`: for each sub-graph that this thread is tracing, the nodes made in it (rlx.ir.body.Traced), innermost last.
    `numbers`: nodes of a function that it is tracing that stand for Python's numbers, which adopt the dtype of other operands."""

    def __init__(self) -> None:
        self.made: list[set[Node]] = []
        self.numbers: set[Node] = set()


TRACING = _Tracing()


@record(eq=False, slots=True)
class Node:
    """One application of an op. Compared by identity; a pass removes duplicates."""

    op: OpDef
    inputs: tuple[Value, ...]
    attrs: Attrs | None
    shapes: tuple[Shape, ...]
    name: str | None = None
    source: str | None = field(default=None, repr=False)  # file:line of the call that made it
    # its Values in use, by index. Weak references: a Value holds its node, and reference cycles would outlive the graph
    _values: dict[int, ref[Value]] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<{self.op.name}{label} {', '.join(map(str, self.shapes))}>"

    @property
    def results(self) -> tuple[Value, ...]:
        if len(self.shapes) != 1:
            return tuple(Value(self, i) for i in range(len(self.shapes)))
        value = self._values.get(0, _GONE)()  # passes ask for it all the time
        return (Value(self, 0) if value is None else value,)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self  # immutable

    def __reduce__(self) -> tuple[object, ...]:
        inputs = tuple((v.node, v.index) for v in self.inputs)
        return _unpickled, (self.op.name, inputs, self.attrs, self.shapes, self.name, self.source)


def _unpickled(
    name: str,
    inputs: tuple[tuple[Node, int], ...],
    attrs: Attrs | None,
    shapes: tuple[Shape, ...],
    label: str | None,
    source: str | None,
) -> Node:
    if name not in OPS:
        raise GraphError(f"the graph was made with the op {name!r}, which is not in the op table; import its module first")
    return Node(OPS[name], tuple(Value(node, index) for node, index in inputs), attrs, shapes, label, source)


_GONE: ref[Value] = ref(set())  # type: ignore[assignment]  to nothing
_making = Lock()  # two threads may ask for the same result at the same time


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True, weakref_slot=True)
class Value(Methods):
    """One result of a node, and an operand for other ops. There is one object per result, so `is` compares identity."""

    node: Node
    index: int = 0
    shape: Shape = field(init=False)

    def __new__(cls, node: Node, index: int = 0) -> Value:
        if (value := node._values.get(index, _GONE)()) is not None:
            return value
        with _making:
            if (value := node._values.get(index, _GONE)()) is None:
                value = object.__new__(cls)
                object.__setattr__(value, "node", node)
                object.__setattr__(value, "index", index)
                if 0 <= index < len(node.shapes):  # the verifier reports others
                    object.__setattr__(value, "shape", node.shapes[index])
                node._values[index] = ref(value)
        return value

    def __copy__(self) -> Value: return self
    def __deepcopy__(self, memo: object) -> Value:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _result, (tuple(postorder([self])[0]), self.index)

    @property
    def dims(self) -> tuple[DimLike, ...]:
        return self.shape.dims

    @property
    def dtype(self) -> DType:
        return self.shape.dtype

    @property
    def rank(self) -> int:
        return self.shape.rank

    ndim = rank

    @property
    def size(self) -> int:
        """Elements. UnboundDimError: a dim is a name."""
        return self.shape.num_elements

    @property
    def name(self) -> str | None:
        return self.node.name

    def __repr__(self) -> str:
        return f"{self.node!r}[{self.index}]" if len(self.node.shapes) > 1 else repr(self.node)

    def __bool__(self) -> NoReturn:
        raise GraphError(
            f"{self!r} has no truth value before a run: to choose by element, use rlx.where; to ask whether two values are the "
            "same one, use `is` (a == b compares elements, and so do `in` and index() of a list)"
        )

    def __iter__(self) -> Iterator[Value]:
        raise GraphError(f"{self!r} has no elements before a run, so it cannot be iterated: use rlx.split or rlx.scan")

    def __float__(self, *_: object) -> NoReturn:
        how = "use rlx.where, rlx.cond, rlx.scan or rlx.while_loop, or make it a static argument of rlx.jit"
        raise GraphError(f"{self!r} has no elements before a run, so it is no number of Python's: {how}")

    __int__ = __complex__ = __index__ = __trunc__ = item = tolist = __float__

    def __format__(self, spec: str) -> str:
        return self.item() if spec else repr(self)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise GraphError(f"{self!r} has no elements before a run, so it cannot become a numpy array; use the functions of rlx")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: object, **options: object) -> Value:
        """`array + value` and `np.exp(value)` build the op; numpy functions without an op fail: a Value has no elements yet."""
        name = own = str(ufunc.__name__)
        if method == "__call__" and not options:
            if name in _OPERATORS:
                return _OPERATORS[name](*operands)
            name = _NAMES.get(name, name)
            if name in FUNCTIONS:
                return FUNCTIONS[name](*operands)
        hint = f"rlx.{name}" if name in OPS else "the functions of rlx"
        raise GraphError(f"np.{own} of {self!r}, which has no elements before a run; use {hint}")

    def __array_function__(self, function: object, _: object, operands: tuple[object, ...], options: dict[str, object]) -> object:
        """`np.stack([x, y])` builds the graph of rlx.stack; numpy functions that rlx lacks fail."""
        own = str(getattr(function, "__name__", function))
        name = _NAMES.get(own, own)
        made = FUNCTIONS.get(f"numpy.{name}") or FUNCTIONS.get(name)
        if made and getattr(function, "__module__", "") == "numpy":
            try:
                return made(*operands, **options)
            except TypeError as e:  # of an argument that only numpy's function has
                raise GraphError(f"np.{own} of {self!r} {str(e).partition(' ')[2]}; use the functions of rlx") from e
        raise GraphError(f"np.{own} of {self!r}, which has no elements before a run; use the functions of rlx")

    __hash__ = object.__hash__

    def __eq__(self, other: Operand) -> Value: return _call("equal", self, other)  # type: ignore[override]
    def __ne__(self, other: Operand) -> Value: return _call("not_equal", self, other)  # type: ignore[override]
    def __add__(self, other: Operand) -> Value: return _call("add", self, other)
    def __radd__(self, other: Operand) -> Value: return _call("add", other, self)
    def __sub__(self, other: Operand) -> Value: return _call("sub", self, other)
    def __rsub__(self, other: Operand) -> Value: return _call("sub", other, self)
    def __mul__(self, other: Operand) -> Value: return _call("mul", self, other)
    def __rmul__(self, other: Operand) -> Value: return _call("mul", other, self)
    def __truediv__(self, other: Operand) -> Value: return _call("div", self, other)
    def __rtruediv__(self, other: Operand) -> Value: return _call("div", other, self)
    def __floordiv__(self, other: Operand) -> Value: return _call("floor_div", self, other)
    def __rfloordiv__(self, other: Operand) -> Value: return _call("floor_div", other, self)
    def __mod__(self, other: Operand) -> Value: return _call("mod", self, other)
    def __rmod__(self, other: Operand) -> Value: return _call("mod", other, self)
    def __divmod__(self, other: Operand) -> tuple[Value, Value]: return self // other, self % other
    def __rdivmod__(self, other: Operand) -> tuple[Value, Value]: return self.__rfloordiv__(other), self.__rmod__(other)
    def __pow__(self, other: Operand) -> Value: return _power(self, other)
    def __rpow__(self, other: Operand) -> Value: return _call("pow", other, self)
    def __matmul__(self, other: Operand) -> Value: return _call("matmul", self, other)
    def __rmatmul__(self, other: Operand) -> Value: return _call("matmul", other, self)
    def __neg__(self) -> Value: return _call("neg", self)
    def __abs__(self) -> Value: return _call("abs", self)
    def __lt__(self, other: Operand) -> Value: return _call("less", self, other)
    def __le__(self, other: Operand) -> Value: return _call("less_equal", self, other)
    def __gt__(self, other: Operand) -> Value: return _call("less", other, self)
    def __ge__(self, other: Operand) -> Value: return _call("less_equal", other, self)
    def __and__(self, other: Operand) -> Value: return _bits("and", self, other)
    def __rand__(self, other: Operand) -> Value: return _bits("and", other, self)
    def __or__(self, other: Operand) -> Value: return _bits("or", self, other)
    def __ror__(self, other: Operand) -> Value: return _bits("or", other, self)
    def __xor__(self, other: Operand) -> Value: return _bits("xor", self, other)
    def __rxor__(self, other: Operand) -> Value: return _bits("xor", other, self)
    def __invert__(self) -> Value: return _bits("not", self)
    def __lshift__(self, other: Operand) -> Value: return _call("shift_left", self, other)
    def __rlshift__(self, other: Operand) -> Value: return _call("shift_left", other, self)
    def __rshift__(self, other: Operand) -> Value: return _call("shift_right", self, other)
    def __rrshift__(self, other: Operand) -> Value: return _call("shift_right", other, self)
    def __pos__(self) -> Value: return self
    def __round__(self) -> Value: return _call("round", self)

    def __len__(self) -> int:
        """The first dim, if it is known."""
        if not self.rank or not isinstance(self.dims[0], int):
            raise GraphError(f"{self!r} has no length: {'its first dim is a name' if self.rank else 'it has no dims'}")
        return self.dims[0]

    def reshape(self, *dims: Any) -> Value:
        """The same elements in row-major order with new dims; one of them may be -1 (inferred)."""
        return _call("reshape", self, dims=tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], Sequence) else dims)

    def transpose(self, *axes: int | Sequence[int]) -> Value:
        """Permutes the dims by `axes`, one by one or as a sequence; without axes, reverses them."""
        found = axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes
        return _call("transpose", self, axes=found or tuple(reversed(range(self.rank))))

    def __getitem__(self, key: object) -> Value:
        """As in numpy: x[1], x[:, 2:5], x[..., None, ::-1], x[[0, 2]], x[ids, 0] with arrays or Values of integers, and
        x[mask] where the mask is an array. IndexRangeError: out of range, for indices that are Values by the run."""
        return FUNCTIONS["indexed"](self, key if isinstance(key, tuple) else (key,))

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise GraphError(f"{self!r} cannot be assigned to, since values do not change: use rlx.where or rlx.update_rows")

    @property
    def T(self) -> Value:
        return self.transpose()

    def astype(self, dtype: DType | str) -> Value:
        return _call("cast", self, dtype=as_dtype(dtype))


_NAMES = {  # numpy functions and ufuncs -> op of the same meaning
    "absolute": "abs", "negative": "neg", "positive": "copy", "rint": "round", "around": "round", "isnan": "is_nan",
    "subtract": "sub", "multiply": "mul", "divide": "div", "fmod": "rem", "remainder": "mod", "floor_divide": "floor_div",
    "conjugate": "conj", "left_shift": "shift_left", "right_shift": "shift_right", "amax": "max", "amin": "min",
    "permute_dims": "transpose", "astype": "cast",
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., Value]] = {
    "greater": lambda x, y: _call("less", y, x), "greater_equal": lambda x, y: _call("less_equal", y, x),
    "power": lambda x, y: _power(x, y), "invert": lambda x: _bits("not", x),
    **{f"bitwise_{name}": partial(lambda name, x, y: _bits(name, x, y), name) for name in ("and", "or", "xor")},
}  # fmt: skip


def _bits(name: str, *operands: Operand) -> Value:
    """The operators of bool and of integers."""
    dtype = next(x.dtype for x in operands if isinstance(x, Value))
    return _call(f"logical_{name}" if dtype == bool_ else f"bitwise_{name}", *operands)


def _power(x: Operand, y: Operand) -> Value:
    """x ** y. Integers have no op for it: they take a small exponent, by products."""
    if not isinstance(x, Value) or not x.dtype.is_int or not isinstance(y, (int, np.integer)) or not 0 < y < 64:
        return _call("pow", x, y)
    half = x if y == 1 else _power(x, y // 2)
    return half if y == 1 else half * half * x if y % 2 else half * half


def _result(nodes: tuple[Node, ...], index: int) -> Value:
    return Value(nodes[-1], index)


def postorder(
    roots: Iterable[Any], known: Iterable[Node] = (), before: Mapping[Node, Sequence[Node]] = MappingProxyType({})
) -> tuple[list[Node], Node | None]:
    """(nodes, node on a cycle or None). The nodes are `known`, then the others that the Values among `roots` depend on, operands
    before users. `before`: other nodes that come before a node.

    Roots and operands that are not Values are skipped: the verifier reports them.
    """
    done: dict[Node, None] = dict.fromkeys(known)
    open_: set[Node] = set()  # on the path from the root: their operands are on the stack above them
    cycle = None
    for root in roots:
        stack = [root.node] if isinstance(root, Value) else []
        while stack:
            node = stack[-1]
            if node in open_ or node in done:
                open_.discard(stack.pop())
                done[node] = None
                continue
            waiting = [v.node for v in node.inputs if isinstance(v, Value) and v.node not in done]
            if before:
                waiting += [n for n in before.get(node, ()) if n not in done]
            if not waiting:
                done[stack.pop()] = None
                continue
            open_.add(node)
            if not open_.isdisjoint(waiting):
                cycle = cycle or next(n for n in waiting if n in open_)
                waiting = [n for n in waiting if n not in open_]
            waiting.reverse()
            stack += waiting
    return list(done), cycle


def same_values(a: Sequence[Value | None], b: Sequence[Value | None]) -> bool:
    """True if both hold the same values in the same order."""
    return len(a) == len(b) and all(map(is_, a, b))


def _call(name: str, *operands: object, **attrs: object) -> Value:
    return apply(OPS[name], operands, attrs)  # type: ignore[return-value]


def caller() -> str | None:
    """file:line of the nearest frame that builds a graph: one outside rlx, or in its frontends. In a pass: that of the node it
    replaces."""
    if REPLACING.source is not None:
        return REPLACING.source or None
    frame = sys._getframe(2)
    while frame is not None and (file := frame.f_code.co_filename).startswith(_PACKAGE) and not file.startswith(_FRONTENDS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


class ConstantAttrs(Attrs):
    """The data of a constant: a read-only array in the dtype's host form. Compared by bytes."""

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

    def __reduce__(self) -> tuple[object, ...]:
        return _constant_attrs, (self.data,)


def _constant_attrs(data: np.ndarray) -> ConstantAttrs:
    """Makes an unpickled array read-only again, as constants are."""
    data.flags.writeable = False
    return ConstantAttrs(data)


class LeafAttrs(Attrs):
    """The attribute of a named leaf: its shape."""

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
    """A constant Value from anything that numpy can convert. Without `dtype`, Python floats become f32, complex numbers c64 and
    ints i64. A float beyond the dtype's range is infinity, as in numpy and torch; an integer beyond it is a DTypeError."""
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(unmasked("a constant", data), None if dtype is None else as_dtype(dtype).numpy)
            if dtype is None and array.dtype.kind in "fc" and not isinstance(data, (np.ndarray, np.generic)):
                array = array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
    except (ValueError, OverflowError, TypeError) as e:  # complex for real, ragged lists, text, integers past the dtype's range
        kind = "" if dtype is None else f" of {as_dtype(dtype)}"
        raise DTypeError(f"a constant{kind} cannot hold {data!r:.60}: {e}") from e
    array = np.array(array, order="C")  # a copy: the caller's array may change later
    array.flags.writeable = False
    attrs = ConstantAttrs(array)
    return Value(Node(CONSTANT, (), attrs, (Shape(array.shape, as_dtype(array.dtype)),), name, caller()))


def apply(
    op: OpDef, operands: Sequence[Any], attrs: dict[str, Any], *, shape: Any = None, name: str | None = None
) -> Value | tuple[Value, ...]:
    """Makes a node of `op`. Operands that are not Values become constants: i64 for an index, bool for a condition (OpDef.roles),
    else in the dtype of the first Value among the operands of the op's dtype.

    `shape`, where given, is compared with the inferred one (dims alone, or a Shape; a tuple of them for several results).
    """
    roles = op.roles.ljust(len(operands), "x")
    operands, numbers = _adopting(operands, roles) if TRACING.numbers and op.attrs is None else (operands, False)
    own = next((x.dtype for x, r in zip(operands, roles) if isinstance(x, Value) and r == "x"), None)
    like = {"x": own, "i": i64, "b": bool_}
    values = tuple(x if isinstance(x, Value) else _constant_operand(op, x, like[r]) for x, r in zip(operands, roles))
    made = op.make_attrs(attrs)
    shapes = op.result_shapes(made, tuple(v.shape for v in values), (v.node.name for v in values))
    if shape is not None:
        _check_given(op, shape, shapes)
    node = Node(op, values, made, shapes, name, caller())
    if TRACING.made:
        TRACING.made[-1].add(node)
    if numbers and shapes[0].dims == () and shapes[0].dtype.kind in "if":
        TRACING.numbers.add(node)
    return node.results[0] if len(shapes) == 1 else node.results


def _adopting(operands: Sequence[Operand], roles: str) -> tuple[Sequence[Operand], bool]:
    """The operands, with those that stand for Python's numbers in the dtype of the others, if it holds their kind (f64 does not
    hold what was rounded to f32), and whether there are no others. An integer beside floats alone becomes f32."""
    mine = [x if r == "x" and isinstance(x, Value) and x.node in TRACING.numbers else None for x, r in zip(operands, roles)]
    if all(m is None for m in mine):
        return operands, False
    arrays = [x for x, r, m in zip(operands, roles, mine) if r == "x" and m is None and isinstance(x, (Value, np.ndarray))]
    floats = any(isinstance(x, float) or (m is not None and m.dtype.is_float) for x, m in zip(operands, mine))
    like = as_dtype(arrays[0].dtype if arrays else "f32" if floats else "i64")
    held = {"i": "iufc", "f": "fc" if like.bits <= 32 or like.kind == "c" else ""}
    fit = [m is not None and m.dtype != like and like.kind in held[m.dtype.kind] for m in mine]
    return [_call("cast", x, dtype=like) if f else x for x, f in zip(operands, fit)], not arrays


def _constant_operand(op: OpDef, x: Any, like: DType | None) -> Value:
    if isinstance(x, (bool, int, float, complex, np.generic)) and not isinstance(x, np.ndarray):
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

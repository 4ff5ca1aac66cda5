"""The op table. An op is declared by one `op(...)` expression in rlx/ir/ops; no other code refers to it by name.

A core op declares how one element is computed (`scalar`, `element`, `reduce`, `contract` or `kernel`, by its Kind); a composite
declares its decomposition into smaller ops (`decompose`). The numpy `reference` of an op defines its semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, cached_property
from inspect import CO_VARARGS
from itertools import groupby
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from rlx.ir.attrs import Attrs, attribute_types
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.kernel import Expr, Loops
from rlx.ir.layout import Layout, TiledLayout
from rlx.ir.shape import DimLike, Shape, as_dim, is_one
from rlx.records import record


class Kind(Enum):
    """Classes of ops: all that a pass needs to know of most ops."""

    LEAF = "leaf"  # input, param, constant, handle
    POINTWISE = "pointwise"  # out[c] = scalar(in0[c], in1[c], …), operands broadcast
    VIEW = "view"  # out[c] = in[f(c)]; `element`, and `strided` where no copy is needed
    INDEX = "index"  # out[c] is computed by `element` from any elements of the inputs (gather, pad, concat, iota)
    REDUCE = "reduce"  # `reduce` gives the combination and the axes (dropped, or kept as 1)
    CONTRACT = "contract"  # `contract` gives the batch, row, column and summed dims
    KERNEL = "kernel"  # `kernel` writes the loops of the whole op (argmax, cumsum, top_k, scatter)
    CONTROL = "control"  # its attributes hold sub-graphs, which run as often as the data says
    COLLECTIVE = "collective"  # every rank takes part; a step of its own (exchange)
    COMPOSITE = "composite"  # `decompose`


def as_ints(x: Any) -> tuple[int, ...]:
    """An int or a sequence of ints as a tuple of ints."""
    try:
        return (x.__index__(),) if hasattr(x, "__index__") else tuple(e.__index__() for e in x)
    except (AttributeError, TypeError):
        raise AttributeValueError(f"expected an int or a sequence of ints, got {x!r}") from None


def as_dims(x: Any) -> tuple[DimLike, ...]:
    """Dims from an int, a name, or a sequence of them. Shape refuses negative ones; reshape takes a -1."""
    dims = (x,) if is_one(x) else x
    if not isinstance(dims, Iterable):
        raise AttributeValueError(f"dims are ints and names, or one of them, got {x!r}")
    return tuple(d if isinstance(d, int) else as_dim(d) for d in dims)


Number = int | float  # an attribute that is combined with elements of any dtype


def as_number(x: Any) -> Any:
    """A number as a float if that is exact, else as an int: 3 and 3.0 get the same text, and 2**53 + 1 keeps all digits. True is
    1, as an element of bools."""
    if isinstance(x, (bool, np.bool_)):
        return float(x)
    if not fits(x, Number):
        return x
    try:
        return float(x) if not isinstance(x, Integral) or int(float(x)) == x else int(x)
    except OverflowError:
        return int(x)


# Looser forms that an op's constructor takes for an attribute of the annotated type.
_LOOSE: dict[Any, Callable[[Any], Any]] = {
    tuple[int, ...]: as_ints,
    tuple[DimLike, ...]: as_dims,
    int | tuple[int, ...]: lambda x: x if isinstance(x, int) else as_ints(x),
    DType: as_dtype,
    float: lambda x: float(x) if fits(x, float) else x,
    Number: as_number,
}


def fits(value: object, hint: Any) -> bool:
    """True if a value fits an annotation (int, float, bool, a class, tuple, union, Literal, Any)."""
    return _checker(hint)(value)


@cache
def _checker(hint: Any) -> Callable[[object], bool]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin is Literal:
        return lambda value: any(type(value) is type(a) and value == a for a in args)
    if origin in (Union, UnionType):
        ways = [_checker(a) for a in args]
        return lambda value: any(fits(value) for fits in ways)
    if origin is tuple and args[1:] == (...,):
        each = _checker(args[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if origin is tuple:
        parts = [_checker(a) for a in args]
        return lambda value: isinstance(value, tuple) and len(value) == len(parts) and all(f(x) for f, x in zip(parts, value))
    if (number := {int: Integral, float: Real}.get(hint)) is not None:
        return lambda value: type(value) is hint or (isinstance(value, number) and not isinstance(value, (bool, np.bool_)))
    return lambda value: isinstance(value, hint)


@record
class Sample:
    """One operand list that generated tests feed an op: operand shapes (any dtype of a family is tried), attributes,
    and the range the values are drawn from."""

    shapes: tuple[tuple[int, ...], ...]
    attrs: dict[str, Any] | None = None
    low: float = -2.0
    high: float = 2.0
    dtypes: tuple[str, ...] | None = None  # per-operand dtype where it is not the op's dtype under test ("" = under test)
    settle: Callable[[np.random.Generator, list[np.ndarray]], None] | None = None  # makes drawn operands valid, in place


@record
class Reduction:
    """Combination `op` (a scalar op of the kernel IR: add, mul, max, min, and, or) over `axes` (non-negative)."""

    op: str
    axes: tuple[int, ...]
    keepdims: bool


@record
class Contraction:
    """Dims of a contraction: out = batch + rows + columns, summed over k. Each entry is a tuple of axes of the operand.

    a_batch and b_batch are as long as each other and broadcast: axis -1 where the operand lacks that batch dim, and a
    batch dim of 1 in one operand stands for every index of the other's. `group`: the axis of b with a matrix for each group of
    rows; the rows of a group are consecutive, and operand 2 has the ends of the groups (-1: one matrix for all rows).
    """

    a_batch: tuple[int, ...]
    a_rows: tuple[int, ...]
    a_sum: tuple[int, ...]
    b_batch: tuple[int, ...]
    b_sum: tuple[int, ...]
    b_columns: tuple[int, ...]
    group: int = -1


@record(eq=False, repr=False)
class OpDef:
    """The declaration of one op."""

    name: str
    kind: Kind
    infer: Callable[..., Shape | tuple[Shape, ...]]  # (attrs, *Shape) -> result shape(s); raises ShapeError/DTypeError
    reference: Callable[..., Any]  # (attrs, *ndarray) -> ndarray or tuple: numpy, the meaning
    attrs: type[Attrs] | None = None
    arity: tuple[int, int | None] = (1, 1)  # least and most operands; None: any number
    scalar: Callable[..., Expr] | None = None  # POINTWISE: (k, attrs, *Expr) -> Expr, in compute dtype
    element: Callable[..., Expr] | None = None  # VIEW, INDEX: (ctx, node, result index, coords) -> Expr
    strided: Callable[..., Layout | None] | None = None  # VIEW: (attrs, in dims, out dims, in Layout); None: needs a copy
    reduce: Callable[..., Reduction] | None = None  # REDUCE: (attrs, Shape) -> Reduction
    contract: Callable[..., Contraction] | None = None  # CONTRACT: (attrs, Shape, Shape) -> Contraction
    product: Callable[..., Contraction] | None = None  # COMPOSITE: the equivalent contraction, if a backend claims the op
    kernel: Callable[..., Loops] | None = None  # KERNEL: (ctx, node) -> statements over the whole op
    # (attrs, operand, axis, *Shape) -> the result axis where index i depends only on index i of this axis of the operand, or
    # None if there is no such axis (a tuple: for each result); INDEX and KERNEL. For POINTWISE, VIEW, REDUCE and CONTRACT it
    # follows from other fields
    rows: Callable[..., int | tuple[int | None, ...] | None] | None = None
    # (padding, attrs, *Value) -> Value(s): the op with padding rows excluded (rlx.compiler.padding); None: follow its kind or
    # decomposition; a str: the reason why it is impossible
    padded: Callable[..., Any] | None = None
    # (partition, attrs, *Value) -> a (Value, Placement) per result: the op on one rank's shards of its operands
    # (rlx.compiler.partition); None: follow its kind or decomposition; a str: the reason why it needs replicated operands
    partitioned: Callable[..., Any] | None = None
    # COMPOSITE on [batch, channels, *spatial]: (attrs, Target.step of the first operand, *Value) -> the same value by the op with
    # channels last, between transposes; None: it has channels last already
    last: Callable[..., Any] | None = None
    # (attrs, axes, *Shape) -> the attributes that change where dim i of the result, and of each operand of role "x", is
    # dim axes[i] of this one's; None: there are none. POINTWISE and REDUCE follow from other fields
    permuted: Callable[..., dict[str, Any] | None] | None = None
    update: Callable[..., Loops] | None = None  # INDEX: operand 0 with a part replaced; (ctx, node) -> loops that write it
    # (attrs, *Shape) -> TiledLayout of the result, whose value is that of operand 0; `element` and `kernel` get tile coordinates
    tiled: Callable[..., TiledLayout] | None = None
    own_memory: bool = False  # INDEX: the result gets fresh memory in every run: never folded or prepared
    observed: bool = False  # INDEX: the result stays in memory to the end of a run, where the runtime reads it (Program.routers)
    flops: Callable[..., int] | None = None  # (operand dims, result dims, attrs) -> FLOPs of a backend's kernel for the whole op
    decompose: Callable[..., Any] | None = None  # COMPOSITE: (attrs, *Value) -> Value or tuple
    # (node, *Value) -> the op on complex numbers as pairs: each c64 operand is given as f32 [..., 2], and so is a c64 result
    # (rlx.compiler.pairs). None: the op is a composite, or takes no complex numbers
    parts: Callable[..., Any] | None = None
    # (attrs, operands of all ranks) -> results of all ranks, in numpy. It synchronizes ranks: never folded or prepared
    collective: Callable[..., Sequence[np.ndarray]] | None = None
    vjp: Callable[..., Any] | None = None  # (node, gradient of every result) -> gradient of the operand: Value
    dtypes: str = "f"  # kinds of the leading operand it accepts: letters of DType.kind
    as_stored: bool = False  # `reference` gets 16-bit and 8-bit floats as stored, not widened to f32
    roles: str = ""  # one letter per operand, for constants: "x" of the op's dtype (default), "i" an index, "b" a condition
    samples: tuple[Sample, ...] = ()
    doc: str = ""

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def operand_names(self) -> list[str]:
        """Names of the operands, from the functions of the declaration; `*name` for those that may be left out or are many."""
        least, most = self.arity
        if most is None:
            return ["*operands"]
        for function, before in ((self.scalar, 2), (self.infer, 1), (self.decompose, 1)):
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            found = list(code.co_varnames[before : code.co_argcount])
            if code.co_flags & CO_VARARGS:
                starred = [f"*{code.co_varnames[code.co_argcount + code.co_kwonlyargcount]}"]
                if len(found) == least < most:
                    return found + starred
            elif len(found) == most:
                return found
        return list("xyz"[:most])

    @cached_property
    def ahead(self) -> bool:
        """True if the results can be computed as soon as the operands are known: before any run, and by one rank alone."""
        return self.kind not in (Kind.LEAF, Kind.CONTROL) and self.collective is None and not self.own_memory

    def make_attrs(self, given: dict[str, Any]) -> Attrs | None:
        """The attribute record from keyword arguments; unknown or missing ones are an AttributeValueError."""
        if self.attrs is None:
            if given:
                raise AttributeValueError(f"{self.name} has no attributes, got {', '.join(sorted(given))}")
            return None
        types = attribute_types(self.attrs)
        if extra := sorted(set(given) - set(types)):
            raise AttributeValueError(f"{self.name} has no attribute {', '.join(extra)}; it has: {', '.join(types)}")
        try:
            found = {name: self._loose(name, types[name], value) for name, value in given.items()}
            kinds = {name: str if get_origin(types[name]) is Literal else types[name] for name in found}
            wrong = [self._unfit(name, types[name], value) for name, value in found.items() if not fits(value, kinds[name])]
            if not wrong and (missing := [n for n in types if n not in given and not hasattr(self.attrs, n)]):
                wrong = [f"{self.name} needs {', '.join(missing)}; its attributes are: {', '.join(types)}"]
            made = None if wrong else self.attrs(**found)  # it may compare values with others, which those of other types refuse
        except GraphError as e:
            raise type(e)(f"{self.name}: {e}") from None
        except TypeError as e:
            raise AttributeValueError(f"{self.name}: {e}; attributes are: {', '.join(types)}") from None
        if wrong := wrong or self.attribute_faults(made):
            raise AttributeValueError("; ".join(wrong))
        return made

    def _loose(self, name: str, hint: object, value: object) -> object:
        if value is None and getattr(self.attrs, name, None) == ():
            return ()  # as in numpy: all axes, or whatever else an empty tuple means
        return _LOOSE.get(hint, lambda x: x)(value)

    def attribute_faults(self, attrs: Attrs | None) -> list[str]:
        """Type errors of an attribute record and of the values in it, as messages."""
        if self.attrs is None:
            return [] if attrs is None else [f"{self.name} has no attributes, found {attrs!r}"]
        if type(attrs) is not self.attrs:
            return [f"attributes of {self.name} are {self.attrs.__name__}, found {type(attrs).__name__}"]
        out = []
        for name, hint in attribute_types(self.attrs).items():
            if not fits(value := getattr(attrs, name), hint):
                out.append(self._unfit(name, hint, value))
        return out

    def _unfit(self, name: str, hint: object, value: object) -> str:
        want = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        if get_origin(hint) is Literal:
            want = f"one of {', '.join(map(repr, get_args(hint)))}"
        return f"attribute {name} of {self.name} takes {want}, found {value!r}"

    def result_shapes(self, attrs: Attrs | None, shapes: tuple[Shape, ...], names: Iterable[object] = ()) -> tuple[Shape, ...]:
        """Result shapes for these operands, with the arity checked and the op and operands named in any error. `names`: those of
        the operands."""
        least, most = self.arity
        if len(shapes) < least or (most is not None and len(shapes) > most):
            want = str(least) if least == most else f"{least} to {most if most is not None else 'any number of'}"
            raise ShapeError(f"{self.name} takes {want} operands, got {len(shapes)}")
        try:
            if shapes and shapes[0].dtype.kind not in self.dtypes:
                takes = ", ".join(KINDS[letter] for letter in self.dtypes)
                raise DTypeError(f"the first operand is {shapes[0].dtype}, it takes {takes}; cast it first")
            out = self.infer(attrs, *shapes)
        except GraphError as e:
            runs = [(str(s), len([*same])) for s, same in groupby(shapes)]
            given = ", ".join(f"{n} x {s}" if n > MOST_SHOWN else ", ".join([s] * n) for s, n in runs)
            named = [(s, name) for s, name in zip(shapes, names) if name]
            named = named if len(named) <= MOST_SHOWN else [*{s: (s, name) for s, name in reversed(named)}.values()][::-1]
            known = "".join(f"; {name!r} is {s}" for s, name in named[:MOST_SHOWN])
            raise type(e)(f"{self.name}({given}{', ' + str(attrs) if attrs else ''}): {e}{known}") from None
        return out if isinstance(out, tuple) else (out,)


MOST_SHOWN = 8  # operands that an error lists one by one; of more, one of each shape has its name
OPS: dict[str, OpDef] = {}
KINDS = {"f": "floats", "i": "signed integers", "u": "unsigned integers", "b": "bool", "c": "complex"}

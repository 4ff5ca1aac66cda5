"""Kernel IR: one compiled function as loops over typed buffers. The IR is closed: a renderer handles all of it. All its records
are in this file, of more than 500 lines, since each refers to others.

A Kernel runs its body once for every point of `grid` (points are independent; a backend spreads them over threads or
blocks). Expressions are immutable and may be shared; a renderer emits a shared one once per scope. Arithmetic happens in
the expression's dtype; a Load or Store of a 16-bit or 8-bit float converts between it and f32 (round to nearest even).
Addresses and loop variables have dtype `index`, which each renderer maps to one of its integer types; casts convert between
data and index.

Aliasing: a written argument overlaps no other argument, except the (read, written) pairs that rlx.ir.overlap.may_overlap proves,
which may be the same memory, element on element. Arguments that are only read may overlap each other. So consecutive stores may
be delayed until all their values are known, and a load must not be moved past a store to its partner.

Statements: Let, Store, Loop, Sort, Contract, Native, Check. Loads outside a buffer are never issued: lowering guards them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, fields, is_dataclass
from functools import cache, wraps
from typing import Any, TypeVar

from rlx.ir.attrs import Attrs, CollectiveAttrs, FlowAttrs
from rlx.ir.dtype import DType, bool_, c64, f32, i64, index_
from rlx.records import record

# The closed set of scalar operations: name -> number of operands. Semantics, for every renderer and for numpy:
#   add sub mul wrap on integers. div: IEEE on floats; on integers truncates, x/0 = 0, and INT_MIN/-1 wraps.
#   rem: sign of the dividend, on floats C fmod; x rem 0 = 0 on integers. min, max: NaN if either operand is NaN; of 0 and -0
#   either one.
#   lt le eq ne give bool, and are IEEE (NaN compares false except ne). and or xor not shl shr: integers and bool
#   (shr is arithmetic on signed). select(c, a, b). cast: float to integer truncates, saturates, NaN gives 0; to bool is x != 0.
#   nearest: an f32 number below 2**24 as i32, ties to even.
#   bitcast: same width. tanh, erf, exp …: within 4 ulp in f32 over the whole range, NaN in gives NaN out.
SCALAR_OPS: dict[str, int] = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "rem": 2, "min": 2, "max": 2, "pow": 2, "fma": 3,
    "neg": 1, "abs": 1, "sqrt": 1, "exp": 1, "log": 1, "sin": 1, "cos": 1, "tanh": 1, "erf": 1,
    "floor": 1, "ceil": 1, "round": 1, "trunc": 1, "nearest": 1,
    "lt": 2, "le": 2, "eq": 2, "ne": 2, "and": 2, "or": 2, "xor": 2, "not": 1, "shl": 2, "shr": 2,
    "select": 3, "cast": 1, "bitcast": 1,
}  # fmt: skip
Found = TypeVar("Found")
RUNNING = frozenset({"add", "mul", "max", "min", "and", "or"})
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
EXTREMES = frozenset({"argmax", "argmin"})  # of a Reduce


@record(eq=False, slots=True)
class Buffer:
    """A kernel argument: `size` elements of `dtype`. Position in Kernel.buffers is its argument number."""

    name: str
    dtype: DType
    size: int
    writable: bool = False


def in_kernels(dtype: DType, count: int) -> tuple[DType, int]:
    """Dtype and size of a buffer of `count` elements as seen by kernels: complex numbers are pairs of f32."""
    return (f32, 2 * count) if dtype == c64 else (dtype, count)


@record(eq=False, slots=True)
class Local:
    """Memory private to one grid point (in a Contract with `per_row`: to one row i; `size` elements each)."""

    name: str
    dtype: DType
    size: int
    per_row: bool = False


@record(eq=False, slots=True)
class Const:
    value: int | float | bool
    dtype: DType


@record(eq=False, slots=True)
class Var:
    """A loop or grid index, a finished reduction, or a carried value."""

    name: str
    dtype: DType = index_


@record(eq=False, slots=True)
class Load:
    """buffer[index] in the buffer's compute dtype. Where `guard` is given and false: zero, and no access is made."""

    buffer: Buffer | Local
    index: Expr
    guard: Expr | None = None

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype.compute


@record(eq=False, slots=True)
class Alu:
    op: str
    args: tuple[Expr, ...]
    dtype: DType


Expr = Const | Var | Load | Alu


@record(eq=False, slots=True)
class Reduce:
    """Over one loop: result = combine(value of every iteration), from the identity of `op`
    (add, mul, max, min, and, or). `result` is readable after the loop. max and min let NaN through.

    The order in which values are combined is left to the schedule and the renderer; for one kernel it is always the same.

    argmax, argmin: the result, an index, is the first iteration with the greatest (least) value, or the first with a NaN; 0 if
    there is no iteration."""

    result: Var
    op: str
    value: Expr


@record(eq=False, slots=True)
class Carry:
    """Over one loop, in order: `var` starts as `init` and becomes `next` after each iteration; its last value stays."""

    var: Var
    init: Expr
    next: Expr

    @property
    def added(self) -> Expr | None:
        """The addend if this carry is a running total, `var = op(var, addend)`; else None."""
        if not isinstance(self.next, Alu) or self.next.op not in RUNNING or self.next.args[0] is not self.var:
            return None
        return self.next.args[1]


@record(eq=False, slots=True)
class Let:
    """`var = value`, computed here: hoists work out of a later loop that only reads it."""

    var: Var
    value: Expr


@record(eq=False, slots=True)
class Store:
    """buffer[index] = value (rounded to the buffer's dtype), skipped where `guard` is false."""

    buffer: Buffer | Local
    index: Expr
    value: Expr
    guard: Expr | None = None


@record(eq=False, slots=True)
class Check:
    """If `ok` is false at any executed point, the run fails with error `code` (see STATUS)."""

    ok: Expr
    code: int


STATUS = {1: "index out of range"}


@record(eq=False, slots=True)
class Loop:
    """for var in range(extent). `vector`: iterations are independent except for the reductions and carries, so a renderer may
    vectorize (see `in_lanes`; reductions and running totals may be reassociated, always in the same way)."""

    var: Var
    extent: int
    body: tuple[Stmt, ...]
    vector: bool = False
    reduces: tuple[Reduce, ...] = ()
    carries: tuple[Carry, ...] = ()

    @property
    def in_lanes(self) -> bool:
        """True if the loop can be vectorized: every carry is a running total whose addend depends on no carry."""
        carried = {c.var for c in self.carries}
        return self.vector and all(c.added is not None and carried.isdisjoint(walk(c.added)) for c in self.carries)


@record(eq=False, slots=True)
class Sort:
    """Sorts `value` of every i in range(n), then runs `body` for every `to` in range(kept): there `held` is the value at position
    `to` of the sorted ones, and `origin` its i. Equal values keep their order, and NaN is the greatest value. A renderer may
    compute values repeatedly; all of them are computed before the body runs."""

    i: Var
    n: int
    kept: int
    value: Expr
    descending: bool
    to: Var
    held: Var
    origin: Var
    body: tuple[Stmt, ...]


Levels = tuple[tuple[int, int], ...]


@record(eq=False, slots=True)
class Operand:
    """A matrix operand of a Contract: element (r, c) is buffer[offset + r*row_stride + c*col_stride].

    `row_levels`, `col_levels` (a only): rows or columns whose stride is not the same everywhere, as of the windows of a
    convolution. Each (count, stride) closes the level before it after `count` steps; `stride` is that of the next one:
    r = r0 + count*r1 is at r0*row_stride + r1*stride.
    `panel` > 0 (b only): packed as [ceil(n/panel)][ceil(k/group)][panel][group], strides unused. `offset` may use grid variables.
    `blocks` (b only): quantised blocks of that format, packed as the backend asked for (Target.packs), in place of both; unless
    `exact`, a renderer may round `a` to 8 bits.
    """

    buffer: Buffer
    offset: Expr
    row_stride: int = 0
    col_stride: int = 0
    panel: int = 0
    group: int = 1
    blocks: str = ""
    exact: bool = False
    row_levels: Levels = ()
    col_levels: Levels = ()

    @property
    def dtype(self) -> DType:
        """Dtype of an element."""
        return f32 if self.blocks else self.buffer.dtype

    def place(self, row: Expr, column: Expr) -> Expr:
        """The position of an element behind `offset`; in strides, not in panels."""
        found: Expr = const(0)
        for at, stride, levels in ((row, self.row_stride, self.row_levels), (column, self.col_stride, self.col_levels)):
            for count, next_stride in levels:
                found = alu("add", found, alu("mul", alu("rem", at, const(count)), const(stride)))
                at, stride = alu("div", at, const(count)), next_stride
            found = alu("add", found, alu("mul", at, const(stride)))
        return found


@record(eq=False, slots=True)
class Computed:
    """A matrix operand of a Contract that is computed when it is read: element (row, column) is `value` rounded to `dtype`.

    The statements `before` run once per row (they read `row`: the reductions of a norm), `body` once per element. The result is
    the same as if the whole matrix had been stored first. A renderer may compute a row more than once, so these statements write
    only Locals, which are private to one row of operand `a` (`per_row`).
    """

    row: Var
    column: Var
    value: Expr
    dtype: DType
    before: tuple[Stmt, ...] = ()
    body: tuple[Stmt, ...] = ()


@record(eq=False, slots=True)
class Contract:
    """acc[i, j] = sum over k of a[i, k] * b[k, j], in `acc.dtype`; then for each (i, j) the statements `epilogue`
    (they read `acc`, `i`, `j`), and, once all j of row i are done, the statements `rows` (they read `i`). With `also`, b has as
    many columns again, and the epilogue reads also[i, j], the sum for column j + n of b. `tf32`: a renderer may round the
    operands, which are f32, to 10 bits of fraction. With `count`, an index expression, a grid point has exactly that many rows
    instead of m; all points together have at most m. The statements `before` (they read `i`) run before all others of row i,
    which read their results, and store nothing; a renderer may run them more than once."""

    i: Var
    j: Var
    m: int
    n: int
    k: int
    a: Operand | Computed
    b: Operand | Computed
    acc: Var
    epilogue: tuple[Stmt, ...]
    rows: tuple[Stmt, ...] = ()
    also: Var | None = None
    tf32: bool = False
    count: Expr | None = None
    before: tuple[Stmt, ...] = ()

    @property
    def width(self) -> int:
        """Columns of b."""
        return self.n if self.also is None else 2 * self.n


@record(eq=False, slots=True)
class View:
    """A strided window on a buffer, in elements: element c is buffer[offset + sum(c*strides)]. Stride 0: broadcast."""

    buffer: Buffer
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


@record(eq=False, slots=True)
class Native:
    """A whole op computed by a kernel of the backend (Target.natives), or a collective on contiguous operands.

    `axes`: the coordinates of the first result, with their extents, where the kernel has limits or an epilogue. If `acc` is
    given, the first result is not in `outputs`: instead, the statements `epilogue` run once for each of its elements, when it is
    complete (they read `acc`, the element, and the axes)."""

    op: str
    attrs: Attrs | None
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    axes: tuple[tuple[Var, int], ...] = ()
    acc: Var | None = None
    epilogue: tuple[Stmt, ...] = ()

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """The dims of the results."""
        first = (tuple(n for _, n in self.axes),) if self.acc else ()
        return (*first, *(v.dims for v in self.outputs))


Stmt = Let | Store | Loop | Sort | Check | Contract | Native


@record(eq=False, slots=True)
class Limit:
    """Points where `var` (of the grid, of a vector Loop without reductions, a Contract's i, a Native's axis) is `count` or more
    may be skipped, but need not be. `count`: an index expression of constants and of loads that no point changes."""

    var: Var
    count: Expr


@record(eq=False, slots=True)
class Kernel:
    """One function: `body` at every point of `grid`. A Contract or a Native is the only statement of its body."""

    name: str
    buffers: tuple[Buffer, ...]
    locals: tuple[Local, ...]
    grid: tuple[tuple[Var, int], ...]
    body: tuple[Stmt, ...]
    origin: tuple[str, ...] = field(default=())  # names of the ops it computes, for display
    limits: tuple[Limit, ...] = ()
    known: dict[object, Any] = field(default_factory=dict, init=False, repr=False)  # results of functions (kept)

    @property
    def collective(self) -> Native | None:
        """The collective that this kernel runs, or None."""
        return next((s for s in self.body[:1] if isinstance(s, Native) and isinstance(s.attrs, CollectiveAttrs)), None)

    @property
    def flow(self) -> FlowAttrs | None:
        """How this kernel runs sub-programs, or None: it computes by itself."""
        attrs = next((s.attrs for s in self.body[:1] if isinstance(s, Native)), None)
        return attrs if isinstance(attrs, FlowAttrs) else None


Grid = tuple[tuple[Var, int], ...]
Loops = tuple[Grid, tuple[Stmt, ...]]  # a whole-op kernel: the grid, and the body at every grid point


# -- building expressions ------------------------------------------------------------------------------------------


def const(value: Any, dtype: DType = index_) -> Const:
    return Const({"f": float, "b": bool}.get(dtype.kind, int)(value), dtype)


def alu(op: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """An Alu node; constant index (and i64) arithmetic is folded, so that addresses stay affine and short."""
    if dtype is None:
        dtype = bool_ if op in COMPARISONS else args[1 if op == "select" else 0].dtype
    folded = _fold(op, args, dtype) if dtype in (index_, i64) else None
    return folded if folded is not None else Alu(op, args, dtype)


def _fold(op: str, args: tuple[Expr, ...], dtype: DType) -> Expr | None:
    if all(isinstance(a, Const) for a in args) and op in FOLD:
        return const(FOLD[op](*(a.value for a in args)), dtype)  # type: ignore[union-attr]
    if len(args) != 2:
        return None
    for a, b in (args, args[::-1]):  # sub, div and rem have only a right identity element
        if op == "mul" and is_const(b, 0):
            return b
        if op in _NEUTRAL and is_const(b, _NEUTRAL[op]) and (b is args[1] or op in ("add", "mul")):
            return a
    return const(0, dtype) if op == "rem" and is_const(args[1], 1) else None


def _quotient(a: int, b: int) -> int:
    """Integer division that truncates toward zero; 0 if b is 0."""
    size = abs(a) // abs(b) if b else 0
    return size if (a < 0) == (b < 0) else -size


FOLD: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
    "div": _quotient, "rem": lambda a, b: a - b * _quotient(a, b) if b else 0,
}  # fmt: skip
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


def is_const(e: Expr, value: Any = None) -> bool:
    return isinstance(e, Const) and (value is None or e.value == value)


class Builder:
    """k.add(a, b), k.select(c, a, b) …: one method per scalar op. Python numbers take the dtype of a sibling operand."""

    def __getattr__(self, op: str) -> Callable[..., Expr]:
        name = op.rstrip("_")  # k.and_, k.or_, k.not_
        if name not in SCALAR_OPS:
            raise AttributeError(f"no scalar op {op!r}")

        def make(*args: Any, dtype: DType | None = None) -> Expr:
            like = next((a.dtype for a in reversed(args) if isinstance(a, Expr)), index_)
            return alu(name, *(a if isinstance(a, Expr) else const(a, like) for a in args), dtype=dtype)

        vars(self)[op] = make  # found without this method from now on
        return make

    def cast(self, a: Expr, dtype: DType) -> Expr:
        if isinstance(a, Const) and a.dtype.is_int and dtype == index_:
            return const(a.value)  # stays a constant, so that conditions on it can be folded
        return a if a.dtype == dtype else alu("cast", a, dtype=dtype)

    const = staticmethod(const)


k = Builder()


def linear(terms: Iterable[tuple[Expr, int]], offset: int = 0) -> Expr:
    """offset + sum of expr * stride, with constants folded."""
    out: Expr = const(offset)
    for e, stride in terms:
        out = alu("add", out, alu("mul", e, const(stride)))
    return out


def coefficient(e: Expr, var: Var, known: dict[int, int | None] | None = None) -> int | None:
    """Stride of `e` in `var`: the difference for var + 1, if it is a constant int, else None. 0: independent of var. `known`: of
    the operations that this call has met, which several others may have as operands."""
    if e is var:
        return 1
    if isinstance(e, (Const, Var)):
        return 0
    if not isinstance(e, Alu):
        inside = [e.index] if e.guard is None else [e.index, e.guard]
        return 0 if all(coefficient(x, var, known) == 0 for x in inside) else None
    known = {} if known is None else known
    if id(e) not in known:
        known[id(e)] = _combined(e, [coefficient(a, var, known) for a in e.args])
    return known[id(e)]


def _combined(e: Alu, parts: Sequence[int | None]) -> int | None:
    """The stride of an operation from those of its operands."""
    if not any(parts) and None not in parts:
        return 0
    if e.op in ("add", "sub") and None not in parts:
        return parts[0] + parts[1] if e.op == "add" else parts[0] - parts[1]  # type: ignore[operator]
    if e.op == "mul" and None not in parts:
        for part, other in zip(parts, reversed(e.args)):
            if isinstance(other, Const):
                return part * int(other.value)  # type: ignore[operator]
    return None


def walk(root: Any) -> Iterator[Any]:
    """All statements and expressions in a statement, an expression or a tuple of them, itself included; shared ones once."""
    todo, seen = [root], set[int]()
    while todo:
        x = todo.pop()
        if isinstance(x, tuple):
            todo += x
        elif id(x) not in seen and (inner := _inner(type(x))) is not None:  # of the records above
            seen.add(id(x))
            yield x
            if inner:
                todo += inner(x)


@cache
def _inner(kind: type) -> Callable[[object], tuple[object, ...]] | tuple[()] | None:
    """A function from a record of this type to the values of those fields that can hold other records; () if there are no such
    fields; None for other types."""
    if not hasattr(kind, "__slots__") or not is_dataclass(kind):
        return None
    plain = ("str", "int", "bool", "int | float | bool", "DType", "Attrs | None", "Levels",
             "tuple[int, ...]", "tuple[str, ...]", "dict[object, Any]")  # fmt: skip
    names = [f.name for f in fields(kind) if f.type not in plain]
    return operator.attrgetter(names[0], *names) if names else ()  # the first one twice, so that it always gives a tuple


def expressions(stmts: Iterable[Stmt]) -> Iterator[Expr]:
    """All expressions that the statements evaluate, in loops too, except loops of extent 0."""
    for s in stmts:
        if isinstance(s, Store):
            yield from (s.index, s.value) if s.guard is None else (s.index, s.value, s.guard)
        elif isinstance(s, (Check, Let)):
            yield s.ok if isinstance(s, Check) else s.value
        elif isinstance(s, Loop):
            yield from (c.init for c in s.carries)
            if s.extent:
                yield from expressions(s.body)
                yield from (r.value for r in s.reduces)
                yield from (c.next for c in s.carries)


def kept(find: Callable[[Kernel], Found]) -> Callable[[Kernel], Found]:
    """A function of kernels, which do not change, that computes its result once for each: several stages ask for it. The result
    must not refer to the kernel, which would outlive its last use."""

    @wraps(find)
    def known(kernel: Kernel) -> Found:
        if find not in kernel.known:
            kernel.known[find] = find(kernel)
        return kernel.known[find]

    return known


@kept
def parts_of(kernel: Kernel) -> tuple[object, ...]:
    """All statements and expressions of the limits and the body, as by `walk`."""
    return tuple(walk((kernel.body, kernel.limits)))


@kept
def loaded_buffers(kernel: Kernel) -> frozenset[Buffer | Local]:
    """Buffers and Locals read by the body and the limits."""
    inputs = {v.buffer for x in parts_of(kernel) if isinstance(x, Native) for v in x.inputs}
    return frozenset(inputs | {x.buffer for x in parts_of(kernel) if isinstance(x, (Load, Operand))})

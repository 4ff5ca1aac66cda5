"""Control flow: ops whose attributes hold sub-graphs.

`rlx.cond`, `while_loop`, `counted_loop` and `scan` (rlx.ir.functions.control) make them from Python functions.

A loop has values that it carries from one iteration to the next, and values that it stacks, one row an iteration. Other values
that its body reads are further operands, the same in each iteration. A backend without control flow (Target.control) gets the
decompositions: both branches and a choice, or the iterations one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.attrs import Attrs
from rlx.ir.body import Body, Traced
from rlx.ir.contexts import Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import as_dtype, bool_, c64, f32, i64
from rlx.ir.node import Value, constant
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.elementwise import tanh, where
from rlx.ir.ops.index import concat
from rlx.ir.ops.state import take_rows
from rlx.ir.ops.view import broadcast_to, reshape, unsqueeze
from rlx.ir.shape import Shape

MOST_UNROLLED = 1024  # iterations that a decomposition repeats
FLAG = Shape((), bool_)


class BranchAttrs(Attrs):
    """Bodies with the same inputs, and results of the same shapes."""

    then_body: Body
    else_body: Body


class LoopAttrs(Attrs):
    """`carried`: so many operands are carried. The body's inputs are the number of the iteration (i64 ()), the carried values,
    and the other operands; its results are the next carried values, then rows of what is stacked. `tests`: the first carried
    value, a bool (), says whether there is an iteration, or another one. `limit`: iterations at most; -1: no limit."""

    body: Body
    carried: int = 0
    limit: int = -1
    tests: bool = False

    def __post_init__(self) -> None:
        if self.limit < -1 or self.carried < self.tests:
            raise AttributeValueError(f"limit is at least 0 (-1: none) and a test is carried, got {self.limit}, {self.carried}")
        if self.limit < 0 and not self.tests:
            raise AttributeValueError("a loop needs a test or a limit, else it does not end")

    @property
    def plain(self) -> bool:
        """True if it is no loop: it has one iteration or none, whatever the data are."""
        return self.limit == 0 or (self.limit == 1 and not self.tests)

    @property
    def why_not_unrolled(self) -> str:
        """Why this loop cannot be written as its iterations one after the other; "": it can."""
        if 0 <= self.limit <= MOST_UNROLLED:
            return ""
        found = f"it has up to {self.limit} iterations" if self.limit > 0 else "the number of its iterations depends on data"
        return (
            f"{found}, and without control flow at most {MOST_UNROLLED} are written one after the other: give a limit (limit=), "
            "or compile it for cpu or ref, with control flow"
        )


def _takes(body: Body, shapes: Sequence[Shape]) -> Body:
    """The body for operands of these shapes, whose named dims it binds. ShapeError, DTypeError: it takes others."""
    own = [v.shape for v in body.inputs]
    if len(own) != len(shapes):
        raise ShapeError(f"the body {body.name!r} has {len(own)} inputs for {len(shapes)} values")
    sizes: dict[str, int] = {}
    for have, given in zip(own, shapes):
        for dim, size in zip(have.dims, given.dims):
            if not isinstance(dim, int) and dim != size and isinstance(size, int) and len(dim.names) == 1:
                sizes.setdefault(dim.names[0], size // dim.factor)
    body = body.bind(sizes) if sizes else body
    for v, given in zip(body.inputs, shapes):
        if v.shape != given:
            asked = f"the body {body.name!r} takes {v.name} as {v.shape}, got {given}"
            raise ShapeError(asked) if v.dtype == given.dtype else DTypeError(f"{asked}; cast it: x.astype({v.dtype.name!r})")
    if any(s.dtype == c64 for s in (*shapes, *body.shapes)):
        raise DTypeError("sub-graphs take and give no complex numbers: use view_as_real outside and view_as_complex inside")
    return body


def _branch_shape(attrs: BranchAttrs, pred: Shape, *operands: Shape) -> tuple[Shape, ...]:
    if pred != FLAG:
        raise (DTypeError if pred.dtype != bool_ else ShapeError)(f"the condition is {FLAG}, got {pred}")
    one, other = (_takes(body, operands).shapes for body in (attrs.then_body, attrs.else_body))
    if one != other:
        shown = (", ".join(map(str, shapes)) for shapes in (one, other))
        dtypes = len(one) == len(other) and any(a.dtype != b.dtype for a, b in zip(one, other))
        raise (DTypeError if dtypes else ShapeError)("the branches give different results: {} and {}".format(*shown))
    return one


def _branch_array(attrs: BranchAttrs, pred: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return (attrs.then_body if pred else attrs.else_body).evaluate(arrays)


def _branch_decomposed(attrs: BranchAttrs, pred: Value, *operands: Value) -> tuple[Value, ...]:
    one, other = (body.inline(operands) for body in (attrs.then_body, attrs.else_body))
    return tuple(where(pred, a, b) for a, b in zip(one, other))


def _loop_shape(attrs: LoopAttrs, *operands: Shape) -> tuple[Shape, ...]:
    body = _takes(attrs.body, (Shape((), i64), *operands))
    carried, stacked = operands[: attrs.carried], body.shapes[attrs.carried :]
    if len(carried) < attrs.carried or len(body.shapes) < attrs.carried:
        raise ShapeError(f"{attrs.carried} values are carried, by {len(operands)} operands and {len(body.shapes)} results")
    for v, have, now in zip(body.inputs[1:], carried, body.shapes):
        if have != now:
            error, hint = (DTypeError, "; cast it") if have.dtype != now.dtype else (ShapeError, "")
            raise error(f"the carried value {v.name} is {have}, its next value is {now}: a loop keeps shape and dtype{hint}")
    if attrs.tests and carried[0] != FLAG:
        raise (DTypeError if carried[0].dtype != bool_ else ShapeError)(f"the test of a loop is {FLAG}, got {carried[0]}")
    if stacked and attrs.limit < 0:
        raise AttributeValueError("a loop that stacks results needs a limit, which is their first dim")
    return Shape((), i64), *carried, *(s.with_dims((attrs.limit, *s.dims)) for s in stacked)


def _loop_array(attrs: LoopAttrs, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    now, given, n = attrs.carried, arrays[attrs.carried :], 0
    shapes = [Shape(a.shape, as_dtype(a.dtype)) for a in arrays]
    stacked = [np.zeros(s.static, s.dtype.numpy) for s in _loop_shape(attrs, *shapes)[1 + now :]]
    carried = arrays[:now]
    body = _takes(attrs.body, (Shape((), i64), *shapes))
    while (attrs.limit < 0 or n < attrs.limit) and (not attrs.tests or carried[0]):
        found = body.evaluate((np.array(n, np.int64), *carried, *given))
        carried = found[:now]
        for rows, row in zip(stacked, found[now:]):
            rows[n] = row
        n += 1
    return np.array(n, np.int64), *carried, *stacked


def _loop_decomposed(attrs: LoopAttrs, *operands: Value) -> tuple[Value, ...]:
    """Iterations behind the end of a loop with a test are computed, too: they keep what is carried, and their rows are 0."""
    now, given, rows = operands[: attrs.carried], operands[attrs.carried :], list[tuple[Value, ...]]()
    count = constant(np.array(0 if attrs.tests else attrs.limit, np.int64))
    for n in range(attrs.limit):
        found = attrs.body.inline((constant(np.array(n, np.int64)), *now, *given))
        if attrs.tests:
            go, count = now[0], count + now[0].astype(i64)
            found = tuple(where(go, x, now[i] if i < attrs.carried else 0) for i, x in enumerate(found))
        now = found[: attrs.carried]
        rows.append(found[attrs.carried :])
    stacked = [concat([unsqueeze(row[i], 0) for row in rows], axis=0) for i in range(len(rows[0]))] if rows else [
        broadcast_to(constant(np.zeros((), s.dtype.numpy)), dims=(0, *s.dims)) for s in attrs.body.shapes[attrs.carried :]
    ]  # fmt: skip
    return count, *now, *stacked


def _alone(p: Partitioning, attrs: Attrs, *operands: Value) -> Parted:
    return "its sub-graphs are computed by each rank alone"


# -- samples


def _body(function: Callable[..., object], **inputs: Shape) -> Body:
    made = Traced("sample", inputs)
    return made.body(made.call(function, *made.inputs))


def _step(n: Value, h: Value, x: Value) -> tuple[Value, ...]:
    h = tanh(h * 0.5 + reshape(take_rows(x, n, count=1), (17,)))
    return h, h * 2.0


_ROW, _COUNT = Shape((17,), f32), Shape((), i64)
_BRANCH = {"x": Shape((3, 17), f32), "y": _ROW}
branch = op(
    "branch", kind=Kind.CONTROL, infer=_branch_shape, attrs=BranchAttrs, arity=(1, None), dtypes="b", as_stored=True,
    reference=_branch_array, decompose=_branch_decomposed, partitioned=_alone,
    samples=(
        Sample(
            ((), (3, 17), (17,)), dtypes=("bool", "f32", "f32"),
            attrs={"then_body": _body(lambda x, y: x * y, **_BRANCH), "else_body": _body(lambda x, y: tanh(x) - y, **_BRANCH)},
        ),
    ),
    doc="The results of one of two bodies on the operands behind the condition, a bool (). rlx.cond makes it.",
)  # fmt: skip
loop = op(
    "loop", kind=Kind.CONTROL, infer=_loop_shape, attrs=LoopAttrs, arity=(0, None), dtypes="fiub", as_stored=True,
    reference=_loop_array, decompose=_loop_decomposed, partitioned=_alone,
    samples=(
        Sample(
            ((17,), (4, 17)), dtypes=("f32", "f32"),
            attrs={"body": _body(_step, n=_COUNT, h=_ROW, x=Shape((4, 17), f32)), "carried": 1, "limit": 4},
        ),
    ),
    doc="Repeats `body` on the first `carried` operands, at most `limit` times and, with `tests`, while the first of them holds. "
    "Results: the number of iterations, the carried values, and the rows of the body's further results, [limit, ...] (zeros "
    "behind the last iteration). rlx.while_loop and rlx.scan make it.",
)  # fmt: skip

"""Type rules and errors of the ops, views without copies, corner values, and the evaluator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from op_cases import Case, cases

import rlx.ir.ops as o
from rlx.errors import (
    AttributeValueError,
    DTypeError,
    GraphError,
    IndexRangeError,
    InputDTypeError,
    InputShapeError,
    MissingInputError,
    ShapeError,
    UnknownNameError,
)
from rlx.ir.dtype import as_dtype, bool_, f32, i32, i64
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, apply
from rlx.ir.handle import BufferHandle
from rlx.ir.kernel import Alu, Const, Var
from rlx.ir.layout import Layout
from rlx.ir.op import OPS, Kind
from rlx.ir.shape import contiguous_strides

CASES = cases(awkward=False)
ONE_EACH = {c.op.name: c for c in reversed(CASES)}  # the first case of every op


def run(fn, *arrays, **attrs):
    """fn of these arrays as graph inputs, by the evaluator."""
    g = Graph("run")
    values = [g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(map(np.asarray, arrays))]
    out = fn(*values, **attrs)
    g.set_outputs(out if isinstance(out, tuple) else (out,))
    found, _ = evaluate(g, {f"x{i}": np.asarray(a) for i, a in enumerate(arrays)})
    return found if isinstance(out, tuple) else found[0]


def leaf(*dims, dtype=f32):
    return Graph().input("x", dims, dtype)


# -- errors that follow from the table -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_EACH)
def test_operands_attributes_and_dtypes_are_checked(name):
    case = ONE_EACH[name]
    (node,) = [n for n in case.graph().nodes() if n.op.kind is not Kind.LEAF]
    attrs, declared = dict(case.sample.attrs or {}), case.op
    with pytest.raises(AttributeValueError, match="nonsense"):
        apply(declared, node.inputs, attrs | {"nonsense": 1})
    if declared.arity[0]:
        with pytest.raises(ShapeError, match=f"{name} takes .* operands, got 0"):
            apply(declared, (), attrs)
        with pytest.raises(DTypeError, match=rf"{name}\(c64.*it takes"):
            wrong = [Graph().input("z", v.dims, "c64") if i == 0 else v for i, v in enumerate(node.inputs)]
            if "c" in declared.dtypes:
                raise DTypeError(f"{name}(c64 is what it takes too: nothing to refuse, it takes")
            apply(declared, wrong, attrs)
    if declared.arity[1] is not None:
        with pytest.raises(ShapeError, match=rf"got {declared.arity[1] + 1}"):
            apply(declared, (leaf(2),) * (declared.arity[1] + 1), attrs)


@pytest.mark.parametrize("name", [n for n, c in ONE_EACH.items() if len(c.dtypes) > 1 and c.dtypes[-1] == c.dtypes[-2]])
def test_operands_of_different_dtypes_say_cast(name):
    case = ONE_EACH[name]
    g = Graph()
    other = next(d for d in ("i64", "f64", "bool", "i32") if as_dtype(d) != case.dtypes[-1])
    values = [g.input(f"x{i}", dims, d) for i, (dims, d) in enumerate(zip(case.sample.shapes, [*case.dtypes[:-1], other]))]
    with pytest.raises(DTypeError, match=rf"{name}\(.*cast"):
        apply(case.op, values, dict(case.sample.attrs or {}))


ERRORS = [
    (lambda: leaf(2, 3) + leaf(4), ShapeError, r"add\(f32\[2,3\], f32\[4\]\): cannot broadcast"),
    (lambda: leaf(2, 3) @ leaf(4, 5), ShapeError, r"last dim of f32\[2,3\] is 3, dim 0 of f32\[4,5\] is 4"),
    (lambda: leaf() @ leaf(4), ShapeError, "use mul"),
    (lambda: leaf(2, 5, 3) @ leaf(3, 3, 2), ShapeError, "cannot broadcast"),
    (lambda: leaf(6).reshape(4, -1), ShapeError, "6 elements cannot be divided into dims of 4"),
    (lambda: leaf(6).reshape(-1, -1), AttributeValueError, "more than one size"),
    (lambda: leaf(6).reshape(5), ShapeError, "hold 5 elements, the operand 6"),
    (lambda: leaf(2, 3).transpose(0, 0), AttributeValueError, "not a permutation"),
    (lambda: o.sum(leaf(2, 3), axis=2), AttributeValueError, "axis 2 does not exist in 2 dims"),
    (lambda: o.sum(leaf(2, 3), axis=(0, -2)), AttributeValueError, "one dim twice"),
    (lambda: o.sum(leaf(2), axis="x"), AttributeValueError, "int or a sequence of ints"),
    (lambda: o.softmax(leaf(2), axis=1), AttributeValueError, "axis 1"),
    (lambda: o.slice(leaf(4), (0,), (4,), (0,)), AttributeValueError, "step of 0"),
    (lambda: o.slice(leaf(4), (0, 0), (4, 4)), AttributeValueError, "one entry for each of the 1 dims"),
    (lambda: o.slice(leaf("n"), (1,), (4,)), ShapeError, "needs a known size, the dim is n"),
    (lambda: o.split(leaf(7), 2), ShapeError, "dim of 7 cannot be split into 2"),
    (lambda: o.split(leaf(7), (3, 3)), ShapeError, "do not add up to the dim of 7"),
    (lambda: o.squeeze(leaf(2, 3), axes=0), ShapeError, "dim 0 is 2, not 1"),
    (lambda: o.broadcast_to(leaf(3), (3, 2)), ShapeError, "cannot"),
    (lambda: o.concat([leaf(2, 3), leaf(2, 4)], axis=0), ShapeError, "differ in more than dim 0"),
    (lambda: o.pad(leaf(3), (-1,), (0,)), AttributeValueError, "use slice to cut"),
    (lambda: o.pad(leaf(3, dtype="i32"), (1,), (0,), value=0.5), DTypeError, "0.5 does not fit i32"),
    (lambda: o.gather(leaf(3), leaf(2)), DTypeError, "indices must be integers"),
    (lambda: o.embedding(leaf(3), leaf(2, dtype=i64)), ShapeError, r"\[entries, width\]"),
    (lambda: o.scatter_add(leaf(3), leaf(2, dtype=i64), leaf(4)), ShapeError, r"updates must be f32\[2\]"),
    (lambda: o.linear(leaf(3), leaf(3, 4), leaf(3)), ShapeError, r"bias must be \[4\]"),
    (lambda: o.linear(leaf(3), leaf(2, 3, 4)), ShapeError, r"\[in, out\]"),
    (lambda: o.layer_norm(leaf(2, 3), leaf(2)), ShapeError, r"scale and bias must be \[3\]"),
    (lambda: o.group_norm(leaf(2, 5), groups=2), AttributeValueError, "5 channels cannot form 2"),
    (lambda: o.gelu(leaf(2), approximate="erf"), AttributeValueError, "'none' or 'tanh', got 'erf'"),
    (lambda: o.argmax(leaf(2, 0)), ShapeError, "no element"),
    (lambda: o.top_k(leaf(3), 4), AttributeValueError, "between 0 and the last dim, 3"),
    (lambda: o.iota((2,), axis=1), AttributeValueError, "axis 1"),
    (lambda: o.cast(leaf(2), "f31"), DTypeError, "not a dtype"),
    (lambda: o.attention(leaf(1, 2, 3, 4), leaf(1, 2, 3, 4), leaf(1, 2, 4, 4)), ShapeError, "v k's batch"),
    (lambda: o.attention(leaf(1, 3, 3, 4), leaf(1, 2, 3, 4), leaf(1, 2, 3, 4)), ShapeError, "3 query heads cannot share 2"),
    (lambda: o.attention_parts(*[leaf(1, 2, 3, 4)] * 3, block=0), AttributeValueError, "parts and block are at least 1"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, mask="full"), AttributeValueError, "mask is one of none, causal"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, mask="sliding_window"), AttributeValueError, "window of at least 1"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, mask="custom"), ShapeError, "takes a fourth operand"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(3, 3)), ShapeError, "takes no fourth operand"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(3, 3), mask="custom"), DTypeError, "must be bool, got f32"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(2, 3), mask="bias"), ShapeError, "broadcast"),
    (lambda: o.attention(leaf(1, 2, 5, 4), *[leaf(1, 2, 3, 4)] * 2, mask="causal"), ShapeError, "3 keys are fewer than 5"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, positioned=True), ShapeError, "takes a fourth operand, start"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(3, 3), mask="bias", positioned=True), ShapeError, "two more operands"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(), positioned=True), DTypeError, "start must be i32 or i64, got f32"),
    (lambda: o.attention(*[leaf(1, 2, 3, 4)] * 3, leaf(2, dtype=i32), positioned=True), ShapeError, "one per batch: .* or .1."),
    (lambda: o.attention(leaf(1, 2, 5, 4), *[leaf(1, 2, 3, 4)] * 2, leaf(dtype=i32), positioned=True), ShapeError, "every query"),
    (lambda: o.rope(leaf(2, 3, 5), leaf(3, dtype=i64)), ShapeError, "even head_dim"),
    (lambda: o.rope(leaf(2, 3, 4), leaf(2, dtype=i64)), ShapeError, r"positions are \[3\] or \[2,3\]"),
    (lambda: leaf(2, dtype="i32") + 0.5, DTypeError, "0.5 does not fit i32"),
    (lambda: leaf(2) & leaf(2), DTypeError, "it takes signed integers, unsigned integers; cast it first"),
    (lambda: o.relu(leaf(2), 3), AttributeValueError, "too many arguments"),
    (lambda: o.softmax(leaf(2), 0, axis=0), AttributeValueError, "softmax: axis given twice"),
    (lambda: o.concat([leaf(2), leaf(2)], 0, axis=0), AttributeValueError, "concat: axis given twice"),
    (lambda: o.concat([leaf(2), leaf(2)], 0, 1), AttributeValueError, "concat: 1 too many arguments"),
    (lambda: o.concat([leaf(2), leaf(2)], leaf(2)), AttributeValueError, "axis of concat takes int"),
    (lambda: o.pad(leaf(2), 1), AttributeValueError, "pad needs high; its attributes are: low, high, value"),
    (lambda: leaf(2, 3)[5], IndexRangeError, "index 5 of .* dim 0 is 2"),
    (lambda: leaf(2)[0, 0], ShapeError, "1 dims, indexed by 2"),
    (lambda: leaf(2)[[0, 2]], IndexRangeError, "index 2"),
    (lambda: o.add(leaf(2), "x"), GraphError, "a number or an array, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "error", "message"), ERRORS)
def test_errors_say_what_was_found(build, error, message):
    with pytest.raises(error, match=message) as caught:
        build()
    assert type(caught.value) is error


# -- shapes, constants, positional attributes --------------------------------------------------------------------------


def test_named_dims_flow():
    x = leaf("b", "s", 384)
    w = leaf(384, 384)
    assert str((x @ w + leaf(384)).shape) == "f32[b,s,384]"
    heads = x.reshape("b", "s", 12, 32).transpose(0, 2, 1, 3)
    assert str(o.attention(heads, heads, heads, mask="causal").shape) == "f32[b,12,s,32]"
    assert str(o.attention(heads, heads, heads, leaf("b", 1, 1, "s", dtype=bool_), mask="custom").shape) == "f32[b,12,s,32]"
    assert str(x.reshape(-1, 384).shape) == "f32[b*s,384]"
    assert str(o.embedding(leaf(100, 384), leaf("b", "s", dtype=i64)).shape) == "f32[b,s,384]"
    assert str(o.layer_norm(x, leaf(384)).shape) == "f32[b,s,384]"
    assert str(o.mean(x, axis=1).shape) == "f32[b,384]"
    assert str(x[:, 0].shape) == "f32[b,384]"
    assert str(o.iota(("s",)).shape) == "i64[s]"
    assert str(o.rope(heads, leaf("s", dtype=i64)).shape) == "f32[b,12,s,32]"


def test_constants_take_the_dtype_of_their_role():
    x, mask, ids = leaf(2, 3, dtype="f16"), leaf(2, 3, dtype=bool_), leaf(4, dtype="i32")
    assert o.where(mask, x, 0.0).dtype == o.where(mask, -math.inf, x).dtype == as_dtype("f16")
    assert o.where(True, x, 0.0).node.inputs[0].dtype == bool_
    assert o.gather(x, 1).dims == (3,) and o.gather(x, [1, 0, 1]).node.inputs[1].dtype == i64
    assert (2 - x).dtype == as_dtype("f16") and (ids * 2).dtype == as_dtype("i32")


def test_positional_attributes_and_lists():
    x = leaf(2, 3)
    assert o.reshape(x, (3, 2)).dims == (3, 2) and o.transpose(x, (1, 0)).dims == (3, 2)
    assert o.sum(x, -1).dims == (2,) and o.sum(x, (0,), True).dims == (1, 3) and o.cast(x, "f16").dtype == as_dtype("f16")
    assert o.concat([x, x], 1).dims == (2, 6)
    assert o.concat([x, x], axis=0).dims == (4, 3) and [v.dims for v in o.top_k(x, 2)] == [(2, 2)] * 2
    assert o.take is o.gather and o.astype is o.cast


KEYS = [
    1, -1, (slice(None), 2), (..., None, slice(None, None, -1)), (slice(1, None), ..., -1), (0, 1, 2), (None,), ..., (),
    (slice(None, None, 2), slice(3, 0, -2)), (np.int64(1), ..., slice(-2, None)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_indexing_is_numpys(key):
    a = np.arange(60.0).reshape(3, 4, 5)
    np.testing.assert_array_equal(run(lambda x: x[key], a), a[key])


# -- views -------------------------------------------------------------------------------------------------------------

VIEWS = [c for c in CASES if c.op.kind is Kind.VIEW and c.dtype == f32 and c.graph().outputs[0].dtype == f32]


def layouts(dims):
    """A row-major layout, one with gaps and an offset, one transposed, one that repeats its elements."""
    plain = contiguous_strides(dims)
    columns = tuple(reversed(contiguous_strides(tuple(reversed(dims)))))
    return [Layout(plain), Layout(tuple(3 * s for s in plain), 5), Layout(columns), Layout((0,) * bool(plain) + plain[1:], 2)]


def window(memory, dims, layout):
    return as_strided(memory[layout.offset :], dims, tuple(s * memory.itemsize for s in layout.strides))


@pytest.mark.parametrize("case", VIEWS, ids=repr)
def test_strided_view_holds_the_elements_of_the_reference(case: Case):
    (dims,) = case.sample.shapes
    (value,) = case.graph().outputs
    memory = np.arange(5 + 3 * math.prod(d or 1 for d in dims) + 3)
    for layout in layouts(dims):
        found = case.op.strided(value.node.attrs, dims, value.dims, layout, 0)
        if found is not None and math.prod(value.dims):
            want = case.op.reference(value.node.attrs, window(memory, dims, layout))
            np.testing.assert_array_equal(window(memory, value.dims, found), want)


class Coordinates:
    """Stands in for lowering: the element of an operand is its coordinates."""

    def dims(self, value):
        return value.shape.static

    def element(self, value, coords, guard=None):
        assert guard is None and len(coords) == value.rank
        return tuple(coords)


def number(e, at):
    """The value of an index expression where variables have the values `at`."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        return at[e]
    assert isinstance(e, Alu)
    a, b = (number(x, at) for x in e.args)
    return {"add": a + b, "sub": a - b, "mul": a * b, "div": a // b if b else 0, "rem": a % b if b else 0}[e.op]


@pytest.mark.parametrize("case", VIEWS, ids=repr)
def test_element_reads_what_the_reference_reads(case: Case):
    (dims,) = case.sample.shapes
    (value,) = case.graph().outputs
    axes = [Var("c") for _ in value.dims]
    source = case.op.element(Coordinates(), value.node, 0, tuple(axes))
    memory = np.arange(math.prod(dims)).reshape(dims)
    want = case.op.reference(value.node.attrs, memory)
    for at in np.ndindex(*value.dims):
        assert memory[tuple(number(e, dict(zip(axes, at))) for e in source)] == want[at]


DIMS = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4)


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_reshape_copies_exactly_where_numpy_must(data):
    dims = tuple(data.draw(DIMS))
    total, out = math.prod(dims), []
    while total > 1:
        out.append(data.draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0])))
        total //= out[-1]
    for at in data.draw(st.lists(st.integers(0, len(out)), max_size=2)):
        out.insert(at, 1)
    order = data.draw(st.permutations(range(len(dims))))
    strides = [0] * len(dims)
    for axis, s in zip(order, contiguous_strides(tuple(dims[i] for i in order))):
        strides[axis] = s * data.draw(st.sampled_from([1, 1, 2]))
    memory = np.arange(4000)
    x = window(memory, dims, Layout(tuple(strides)))
    found = OPS["reshape"].strided(None, dims, tuple(out), Layout(tuple(strides)), 0)
    try:
        want = np.reshape(x, tuple(out), copy=False)
    except ValueError:
        assert found is None
    else:
        assert found is not None
        np.testing.assert_array_equal(window(memory, tuple(out), found), want)


def test_reshape_leaves_dims_alone_that_it_does_not_regroup():
    """Only then do addresses stay linear in the loop variables."""
    value = leaf(5, 4, 6, 7).reshape(5, 3, 8, 1, 7)
    axes = [Var("c") for _ in value.dims]
    first, *_, last = OPS["reshape"].element(Coordinates(), value.node, 0, tuple(axes))
    assert first is axes[0] and last is axes[-1]
    merged = leaf(6, 7).reshape(2, 3, 7)
    axes = [Var("c") for _ in merged.dims]
    row, column = OPS["reshape"].element(Coordinates(), merged.node, 0, tuple(axes))
    assert column is axes[2] and "div" not in repr(row) and "rem" not in repr(row)


# -- contractions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.op.kind is Kind.CONTRACT and c.dtype == f32], ids=repr)
def test_contraction_names_every_axis_once_and_gives_the_result(case: Case):
    (value,) = case.graph().outputs
    a, b = value.node.inputs
    c = case.op.contract(value.node.attrs, a.shape, b.shape)
    assert sorted(i for i in (*c.a_batch, *c.a_rows, *c.a_sum) if i >= 0) == list(range(a.rank))
    assert sorted(i for i in (*c.b_batch, *c.b_sum, *c.b_columns) if i >= 0) == list(range(b.rank))
    assert len(c.a_batch) == len(c.b_batch) and (b.rank > 2 or not c.b_batch)
    letters = iter("abcdefghijklmnop")
    summed, batch = [next(letters) for _ in c.a_sum], [next(letters) for _ in c.a_batch]
    rows, columns = [next(letters) for _ in c.a_rows], [next(letters) for _ in c.b_columns]

    def name(rank, groups):
        return "".join({i: s for axes, labels in groups for i, s in zip(axes, labels)}[i] for i in range(rank))

    left = name(a.rank, [(c.a_batch, batch), (c.a_rows, rows), (c.a_sum, summed)])
    right = name(b.rank, [(c.b_batch, batch), (c.b_sum, ["".join(summed)]), (c.b_columns, columns)])
    x, y = case.inputs.values()
    (at,) = c.b_sum  # one axis, of all summed elements in order
    y = y.reshape(*y.shape[:at], *(x.shape[i] for i in c.a_sum), *y.shape[at + 1 :])
    sizes = {s: d for label, array in ((left, x), (right, y)) for s, d in zip(label, array.shape) if d != 1}
    spread = [np.broadcast_to(v, [sizes.get(s, 1) for s in label]) for label, v in ((left, x), (right, y))]
    found = np.einsum(f"{left},{right}->{''.join(batch + rows + columns)}", *(v.astype(np.float64) for v in spread))
    want = case.expected[0].astype(np.float64)
    np.testing.assert_allclose(found, want, rtol=max(1e-5, case.tolerance), atol=max(1e-5, case.tolerance))


# -- corner values -----------------------------------------------------------------------------------------------------

I8, F = np.int8, np.float32


@pytest.mark.parametrize(("fn", "operands", "want"), [
    (o.div, (I8([7, -7, 7, -7, 5, -128]), I8([2, 2, -2, -2, 0, -1])), [3, -3, -3, 3, 0, -128]),
    (o.rem, (I8([7, -7, 7, -7, 5, -128]), I8([2, 2, -2, -2, 0, -1])), [1, -1, 1, -1, 0, 0]),
    (o.mod, (I8([7, -7, 7, -7, 5, -128]), I8([2, 2, -2, -2, 0, -1])), [1, 1, -1, -1, 0, 0]),
    (o.floor_div, (I8([7, -7, 7, -7, 5, -128]), I8([2, 2, -2, -2, 0, -1])), [3, -4, -4, 3, 0, -128]),
    (o.shift_left, (I8([1, 1, -1, 3, 5]), I8([7, 8, 3, -1, 0])), [-128, 0, -8, 0, 5]),
    (o.shift_right, (I8([-128, -1, 64, -5, 5]), I8([7, 8, 3, -1, 100])), [-1, -1, 8, -1, 0]),
    (o.shift_right, (np.uint8([255, 255]), np.uint8([4, 200])), [15, 0]),
    (o.neg, (I8([-128, 1]),), [-128, -1]), (o.abs, (I8([-128, -1]),), [-128, 1]), (o.neg, (np.uint8([1, 0]),), [255, 0]),
    (o.sum, (I8([100, 100]),), -56), (o.mul, (np.int32([2**31 - 1]), np.int32([2])), [-2]),
    (o.pow, (F([0, 0, -2, -8, np.nan, 1, np.inf, -0.0, 2]), F([0, -1, 3, 1 / 3, 0, np.nan, 0, -1, -np.inf])),
     [1, np.inf, -8, np.nan, 1, 1, 1, -np.inf, 0]),
    (o.rem, (F([5.5, -5.5, 5, np.inf, 3]), F([2, 2, np.inf, 2, 0])), [1.5, -1.5, 5, np.nan, np.nan]),
    (o.mod, (F([5.5, -5.5, 5, -1]), F([-2, 2, np.inf, np.inf])), [-0.5, 0.5, 5, np.inf]),
    (o.floor_div, (np.float64([1.0, -1.0, 6.0, 1.0]), np.float64([0.1, 0.1, 2.0, 0.0])), [9, -10, 3, np.inf]),
    (o.maximum, (F([np.nan, 1, -np.inf]), F([1, np.nan, -np.inf])), [np.nan, np.nan, -np.inf]),
    (o.minimum, (F([np.nan, 1, np.inf]), F([1, np.nan, np.inf])), [np.nan, np.nan, np.inf]),
    (o.round, (F([0.5, 1.5, 2.5, -0.5, -1.5]),), [0, 2, 2, 0, -2]), (o.sign, (F([-3, 0, np.nan, 2]),), [-1, 0, np.nan, 1]),
    (o.relu, (F([np.nan, -1, 2]),), [np.nan, 0, 2]), (o.sqrt, (F([-1, 0, np.inf]),), [np.nan, 0, np.inf]),
    (o.log, (F([0, -1, np.inf]),), [-np.inf, np.nan, np.inf]), (o.sigmoid, (F([-1000, 1000, np.nan]),), [0, 1, np.nan]),
    (o.less, (F([np.nan, 1]), F([1, np.nan])), [False, False]), (o.not_equal, (F([np.nan]), F([np.nan])), [True]),
    (o.equal, (F([-0.0, np.nan]), F([0.0, np.nan])), [True, False]),
    (o.sum, (F([]),), 0), (o.prod, (F([]),), 1), (o.max, (F([]),), -np.inf), (o.min, (F([]),), np.inf),
    (o.mean, (F([]),), np.nan),
    (o.max, (np.int32([]),), -(2**31)), (o.any, (np.array([], bool),), False), (o.all, (np.array([], bool),), True),
    (o.max, (F([1, np.nan, 3]),), np.nan), (o.argmax, (F([1, np.nan, 3, np.nan]),), 1), (o.argmin, (F([1, -1, -1]),), 1),
    (o.softmax, (F([-np.inf, 0, -np.inf]),), [0, 1, 0]), (o.softmax, (F([1000, 1000]),), [0.5, 0.5]),
    (o.log_softmax, (F([0, 1000]),), [-1000, 0]), (o.gelu, (F([0, -20, 20]),), [0, 0, 20]),
    (o.softplus, (F([1000, -1000]),), [1000, 0]),
])  # fmt: skip
def test_corner_values(fn, operands, want):
    found = run(fn, *operands)
    np.testing.assert_array_equal(found, np.asarray(want).astype(found.dtype))


def test_negative_zero_survives():
    zero = F([-0.0])
    for fn in (lambda x: x * 1.0, o.floor, o.trunc, o.sqrt, o.sign, o.sin, o.tanh, o.erf, o.log1p, o.expm1, o.reshape, o.relu):
        found = run(fn, zero, dims=(1,)) if fn is o.reshape else run(fn, zero)
        assert found == 0
        assert np.signbit(found) or fn is o.relu, fn  # the greater of -0.0 and 0.0 may be either
    assert not np.signbit(run(lambda x: x + 0.0, zero))


@pytest.mark.parametrize(("value", "to", "want"), [
    (3.9, "i32", 3), (-3.9, "i32", -3), (300.0, "u8", 255), (-1.0, "u8", 0), (np.nan, "i8", 0), (np.inf, "i64", 2**63 - 1),
    (-np.inf, "i64", -(2**63)), (1e30, "u64", 2**64 - 1), (2.0**63, "i64", 2**63 - 1), (2147483648.0, "i32", 2**31 - 1),
    (0.1, "bool", True), (-0.0, "bool", False), (np.nan, "bool", True), (65520.0, "f16", np.inf), (1 + 2**-8, "bf16", 1.0),
    (1 + 3 * 2**-8, "bf16", 1 + 2**-6),
])  # fmt: skip
def test_float_casts_saturate(value, to, want):
    found = run(lambda x: x.astype(to), np.float64(value))
    assert found.dtype == as_dtype(to).numpy and found == np.asarray(want).astype(found.dtype)


def test_integer_casts_wrap():
    assert run(lambda x: x.astype("u8"), np.int32([-1, 256, 255])).tolist() == [255, 0, 255]
    assert run(lambda x: x.astype("i8"), np.int32([128, -129])).tolist() == [-128, 127]
    assert run(lambda x: x.astype("f32"), np.array([True, False])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("mask", ["custom", "bias"])
def test_a_query_that_may_attend_to_nothing_gets_zeros(mask):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 2, 3, 4)).astype(F)
    allowed = np.array([[True, False, True], [False] * 3, [True] * 3])
    operand = allowed if mask == "custom" else np.where(allowed, 0, -np.inf).astype(F)
    for fn in (o.attention, lambda *v, mask: OPS["attention"].decompose(OPS["attention"].make_attrs({"mask": mask}), *v)):
        found = run(fn, q, q, q, operand, mask=mask)
        assert not found[:, :, 1].any() and np.isfinite(found).all() and found[:, :, 0].all()


def test_rope_at_large_positions():
    """Positions are exact in f32 to 2**24; the angle is their product with an f32 frequency, as models are trained."""
    x, positions = np.ones((1, 2, 8), F), np.array([0, 100_000])
    found = run(o.rope, x, positions)
    frequency = (10000.0 ** -(np.arange(4) / 4)).astype(F)
    angle = (F(100_000) * frequency).astype(np.float64)
    turned = np.concatenate([np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)])
    np.testing.assert_allclose(found[0, 1], turned, atol=1e-6)
    np.testing.assert_array_equal(found[0, 0], x[0, 0])


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
@pytest.mark.parametrize("fn", [o.gather, o.embedding, lambda x, i: o.scatter_add(x, i, o.broadcast_to(x[0], (2, 3)))])
def test_indices_out_of_range_are_refused(fn, bad):
    with pytest.raises(IndexRangeError, match=rf"index {bad} at \[1\] is outside 0 … 4"):
        run(fn, np.ones((5, 3), F), np.array([0, bad]))


# -- the evaluator -----------------------------------------------------------------------------------------------------


def counter():
    g = Graph("counter")
    state, delta = g.handle(BufferHandle("total", ("n",), "f32")), g.input("delta", ("n",), "f32")
    other = g.handle(BufferHandle("kept", (2,), "i32"))
    g.assign(state, state + delta * g.param("w", (), "f32"))
    g.set_outputs([state, delta, other])
    return g


def test_a_next_state_has_the_dtype_and_the_dims_of_its_handle():
    g = counter()
    for wrong, error, message in (("n", DTypeError, r"value.astype\('f32'\)"), ("m", ShapeError, r"the value is f64\[m\]")):
        with pytest.raises(error, match=message):
            g.assign(g.handles[0], g.input(wrong, (wrong,), "f64"))


def test_evaluate_reads_old_state_and_returns_the_next():
    one, w = np.ones(3, F), np.asarray(2, F)
    (old, same, kept), following = evaluate(counter(), {"delta": one}, {"w": w}, {"total": F([1, 2, 3])})
    assert old.tolist() == [1, 2, 3] and following["total"].tolist() == [3, 4, 5]
    assert kept.tolist() == [0, 0] and following["kept"].tolist() == [0, 0]
    same[:] = 7  # results are the caller's own
    assert one.tolist() == [1, 1, 1]
    _, started = evaluate(counter(), {"delta": one}, {"w": w})
    assert started["total"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"inputs": {}}, MissingInputError, "no value for the input 'delta'"),
    ({"inputs": {"delta": np.ones(3, F), "x": np.ones(1)}}, UnknownNameError, "no input 'x'; it has: 'delta'"),
    ({"inputs": {"delta": np.ones(3)}}, InputDTypeError, "is f32.n., got an array of float64"),
    ({"inputs": {"delta": np.ones((3, 1), F)}}, InputShapeError, "got an array of .3,1."),
    ({"handles": {"total": np.ones(2, F)}}, InputShapeError, "handle 'total' is .*got .*.2., and n is 3 in the input 'delta'"),
    ({"params": {}}, MissingInputError, "no value for the param 'w'"),
])  # fmt: skip
def test_evaluate_checks_what_it_is_given(change, error, message):
    whole = {"inputs": {"delta": np.ones(3, F)}, "params": {"w": np.asarray(1, F)}, "handles": {}}
    with pytest.raises(error, match=message):
        evaluate(counter(), **(whole | change))


@pytest.mark.parametrize("x, y, to", [("f32", "i64", "f32"), ("i64", "f32", "f32"), ("i32", "i64", "i64"), ("f16", "f32", "f32")])
def test_the_cast_that_is_proposed_keeps_most(x: str, y: str, to: str) -> None:
    g = Graph("g")
    with pytest.raises(DTypeError, match=rf"operands are {x} and {y}; cast one of them: x.astype\('{to}'\)"):
        g.input("x", (2,), x) * g.input("y", (2,), y)

"""Every structural rule of a graph: a sound graph has no faults, and each way of breaking one is named."""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

import numpy as np
import pytest

import rlx
from rlx.errors import VerifyError
from rlx.ir import OPS, Attrs, BufferHandle, Dim, Graph, Kind, Node, OpDef, Shape, Value, constant, f32, faults, i32
from rlx.ir.graph import HANDLE, INPUT, PARAM, Active, Extent, LeafAttrs, apply
from rlx.ir.op import fits as _fits


class ScaleAttrs(Attrs):
    by: float
    axes: tuple[int, ...] = ()
    mode: Literal["a", "b"] = "a"


def _row(name: str, **facts) -> OpDef:
    return OpDef(name=name, kind=Kind.POINTWISE, reference=lambda attrs, *x: x[0], **facts)


def _two(attrs, x, y):
    return (x, y)


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    rows = (
        _row("t_scale", infer=lambda attrs, x: x, attrs=ScaleAttrs),
        _row("t_two", infer=_two, arity=(2, 2)),
        _row("t_axis", infer=lambda attrs, x: Shape(x.dims[: attrs.axes[0]], x.dtype), attrs=ScaleAttrs),
    )
    for row in rows:
        monkeypatch.setitem(OPS, row.name, row)


def sound() -> Graph:
    g = Graph("g")
    x = g.input("x", (2, 3), "f32")
    g.param("unused", (4,), "f32")
    h = g.handle(BufferHandle("h", (2, 3), "f32"))
    y = apply(OPS["t_scale"], (x,), {"by": 2.0}, name="y")
    a, b = apply(OPS["t_two"], (y, h), {})
    g.assign(h, b)
    g.set_outputs([a, y, constant(1.0)])
    return g


def test_a_sound_graph_has_no_faults():
    assert faults(sound()) == []
    sound().verify()


X, OTHER, SCALE = Shape((2, 3), f32), Shape((9,), f32), ScaleAttrs(2.0)


def put(op: str | OpDef, *shapes: Shape, attrs: Any = SCALE, inputs: Any = None):
    """Breaks a graph by an output made with the node constructor alone. Operand: the graph's input."""

    def change(g: Graph) -> None:
        operands = (g.inputs[0],) if inputs is None else inputs(g)
        g.outputs[0] = Value(Node(OPS[op] if isinstance(op, str) else op, operands, attrs, shapes))

    return change


def leaf(group: str, op: OpDef, name: str, shape: Shape = X):
    return lambda g: getattr(g, group).append(Value(Node(op, (), LeafAttrs(X), (shape,), name)))


def cycle(g: Graph) -> None:
    loop = Node(OPS["t_two"], (), None, (X, X), "loop")
    object.__setattr__(loop, "inputs", (Value(loop, 1), Value(loop, 0)))
    g.outputs[0] = Value(loop)


def writable_constant(g: Graph) -> None:
    node = constant(1.0).node
    object.__setattr__(node.attrs, "data", np.zeros((), np.float32))
    g.outputs[0] = Value(node)


def ghost(op: OpDef) -> Value:
    return Value(Node(op, (), LeafAttrs(X), (X,), "ghost"))


def extent(leaf: Any = None, axes: tuple[int, ...] = (), active: Active | None = None):
    """Gives the graph an extent: by default of a new input i64[], with no active axes."""

    def change(g: Graph) -> None:
        x, of = g.inputs[0], leaf(g) if leaf else g.input("%extent", (), "i64")
        g.extent = Extent(of, {x: axes} if axes else {}, {x: (active,)} if active else {}, ((),) * 3)

    return change


def clear(g: Graph) -> None:
    for group in (g.outputs, g.output_names, g.assigns):
        group.clear()


def test_an_input_of_another_graph_is_said_to_be_one():
    other, g = rlx.Graph("other"), rlx.Graph("here")
    x, mine = other.input("x", (2,), rlx.f32), g.input("x", (2,), rlx.f32)
    g.set_outputs([x + mine])
    with pytest.raises(rlx.RlxError, match="not declare input 'x': it belongs to another graph that has an input of this name"):
        rlx.compile(g)


# what breaks the sound graph -> part of the fault
BROKEN = {
    "shape": (put("t_scale", OTHER), "is f32[9], its shape rule gives f32[2,3]"),
    "dtype": (put("t_scale", Shape((2, 3), i32)), "is i32[2,3]"),
    "results": (put("t_scale", X, X), "is f32[2,3], f32[2,3]"),
    "arity": (put("t_two", X, X, attrs=None), "t_two takes 2 operands, got 1"),
    "no attributes": (put("t_scale", X, attrs=None), "are ScaleAttrs, found NoneType"),
    "attributes": (put("t_two", X, X), "t_two has no attributes"),
    "attribute float": (put("t_scale", X, attrs=ScaleAttrs("2")), "by of t_scale takes float, found '2'"),  # type: ignore[arg-type]
    "attribute tuple": (put("t_scale", X, attrs=ScaleAttrs(1.0, [1])), "takes tuple[int, ...], found [1]"),  # type: ignore[arg-type]
    "attribute literal": (put("t_scale", X, attrs=ScaleAttrs(1.0, (), "c")), "found 'c'"),  # type: ignore[arg-type]
    "rule trips": (put("t_axis", X), "its shape rule fails: tuple index out"),
    "foreign op": (put(_row("t_scale", infer=lambda attrs, x: x), X), "not the op table's entry"),
    "undeclared leaf": (put("t_scale", X, inputs=lambda g: (ghost(INPUT),)), "does not declare input 'ghost'"),
    "cycle": (cycle, "depends on its own result"),
    "operand index": (put("t_scale", X, inputs=lambda g: (Value(g.inputs[0].node, 1),)), "operand 0 is not the result"),
    "constant": (writable_constant, "read-only"),
    "output index": (lambda g: g.outputs.__setitem__(0, Value(g.inputs[0].node, 3)), "output 0 is not the result"),
    "output names": (lambda g: g.output_names.__setitem__(0, "y"), "two outputs have the name 'y'"),
    "output name": (lambda g: g.output_names.__setitem__(0, ""), "output 0's name"),
    "name count": (lambda g: g.output_names.pop(), "3 outputs have 2 names"),
    "nothing to do": (clear, "call set_outputs"),
    "leaf names": (leaf("params", PARAM, "x"), "input and param have the same name 'x'"),
    "leaf name": (leaf("inputs", INPUT, ""), "must be a non-empty string"),
    "leaf shape": (leaf("inputs", INPUT, "z", OTHER), "is f32[9]"),
    "leaf group": (lambda g: g.inputs.append(g.params[0]), "is listed with the inputs but is not one"),
    "assign shape": (
        lambda g: g.assigns.__setitem__(0, (g.handles[0], g.params[0])),
        "'h' is f32[2,3], its next value is f32[4]",
    ),
    "assign twice": (lambda g: g.assigns.append(g.assigns[0]), "assigned twice"),
    "assign input": (lambda g: g.assigns.append((g.inputs[0], g.inputs[0])), "which is not a declared handle"),
    "assign ghost": (lambda g: g.assigns.append((ghost(HANDLE), g.inputs[0])), "which is not a declared handle"),
    "extent leaf": (extent(lambda g: g.inputs[0]), "the extent <input 'x' f32[2,3]> is not an input i64[]"),
    "extent axes": (extent(axes=(2,)), "<input 'x' f32[2,3]> has no axes (2,) to be active"),
    "extent factors": (extent(active=Active(1, 1, 3, 2)), "<input 'x' f32[2,3]> has no active axis (1, 1, 3, 2)"),
    "extent axis": (extent(active=Active(2, 1, 3, 1)), "<input 'x' f32[2,3]> has no active axis (2, 1, 3, 1)"),
    "assign index": (lambda g: g.assigns.__setitem__(0, (g.handles[0], Value(g.inputs[0].node, 2))), "is assigned"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_named(name):
    change, expected = BROKEN[name]
    g = sound()
    change(g)
    found = faults(g)
    assert any(expected in fault for fault in found), found
    with pytest.raises(VerifyError) as e:
        g.verify()
    assert all(fault in str(e.value) for fault in found)
    str(g)  # a broken graph can still be printed


@pytest.mark.parametrize("wrong", ["x", None, constant(1.0).node], ids=["str", "None", "node"])
def test_what_is_no_value_is_named_too(wrong):
    g = sound()
    g.outputs[0] = wrong
    assert any("output 0 is not the result of a node" in fault for fault in faults(g))
    assert g.inputs[0].node in g.nodes() and "return y" not in str(g) and "%?" in str(g)
    g = sound()
    put("t_scale", X, inputs=lambda g: (wrong,))(g)
    assert any("operand 0 is not the result of a node" in fault for fault in faults(g))


def test_all_faults_are_reported_with_the_line_that_made_them():
    g = sound()
    bad = Node(OPS["t_scale"], (g.inputs[0],), ScaleAttrs(2.0), (Shape((3,), f32),), "hidden", "model.py:12")
    g.outputs[0] = Value(bad)
    g.output_names[0] = "y"
    with pytest.raises(VerifyError, match="2 faults") as e:
        g.verify()
    assert "two outputs have the name 'y'" in str(e.value)
    assert "'hidden' = t_scale(f32[2,3]) made at model.py:12: is f32[3]" in str(e.value)


def test_a_graph_that_only_updates_state_is_sound():
    g = Graph()
    h = g.handle(BufferHandle("h", (2,), "f32"))
    g.assign(h, apply(OPS["t_scale"], (h,), {"by": 2.0}))
    g.set_outputs([])
    g.verify()


def test_a_deep_graph_is_walked_without_recursion():
    g = Graph()
    v = g.input("x", (2,), "f32")
    for _ in range(5000):
        v = apply(OPS["t_scale"], (v,), {"by": 2.0})
    g.set_outputs([v])
    g.verify()
    assert len(g.nodes()) == 5001


@pytest.mark.parametrize(
    "value,hint,fits",
    [
        (1, int, True), (True, int, False), (np.int64(1), int, True), (1.0, int, False),
        (1, float, True), (1.5, float, True), (np.float32(1), float, True), (True, float, False), ("1", float, False),
        (None, int | None, True), ((1, 2), tuple[int, ...], True), ((1, "2"), tuple[int, ...], False),
        ((1, "2"), tuple[int, str], True), ((1,), tuple[int, str], False), ([1], tuple[int, ...], False),
        ((1, Dim("n")), tuple[int | Dim, ...], True), ("a", Literal["a"], True), (1, Literal[True], False),
        (object(), Any, True), (f32, type(f32), True), (None, str, False),
    ],
)  # fmt: skip
def test_attribute_types(value, hint, fits):
    assert _fits(value, hint) is fits


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.attrs], ids=lambda op: op.name)
def test_attribute_annotations_of_the_table_can_be_read(op):
    assert get_type_hints(op.attrs)

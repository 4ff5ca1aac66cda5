"""The text form: what is printed parses back to the same graph, and everything else is a ParseError with a line."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlx.errors import ParseError
from rlx.ir import DTYPES, OPS, Attrs, BufferHandle, Dim, DType, Graph, Kind, OpDef, Shape, constant, f32, i64
from rlx.ir.graph import apply
from rlx.ir.tokens import INLINE

QUICK = settings(max_examples=150, suppress_health_check=list(HealthCheck))


class EverythingAttrs(Attrs):
    """One field of every kind an attribute may have."""

    a: int = 1
    b: float = 0.5
    c: bool = False
    d: str = ""
    e: DType = f32
    f: Shape | None = None
    g: tuple[int, ...] = ()
    h: tuple[tuple[str, ...], ...] = ()
    i: tuple[int | Dim, ...] = ()
    j: Dim | None = None


class SplitAttrs(Attrs):
    count: int


def _row(name: str, **facts) -> OpDef:
    return OpDef(name=name, kind=Kind.POINTWISE, reference=lambda attrs, *x: x[0], **facts)


@pytest.fixture(autouse=True)
def ops(monkeypatch):
    """Three ops of our own, so that these tests say nothing about the real table."""
    rows = (
        _row("t_same", infer=lambda attrs, x, *more: x, arity=(1, None)),
        _row("t_all", infer=lambda attrs, x: x, attrs=EverythingAttrs),
        _row("t_split", infer=lambda attrs, x: (x,) * attrs.count, attrs=SplitAttrs),
    )
    for row in rows:
        monkeypatch.setitem(OPS, row.name, row)


def make(name, *operands, label=None, **attrs):
    return apply(OPS[name], operands, attrs, name=label)


def round_trip(g: Graph) -> Graph:
    text = str(g)
    parsed = Graph.parse(text)
    assert str(parsed) == text
    parsed.verify()
    return parsed


EXAMPLE = """graph counter
  input delta : f32[n,4]
  param unused : bf16[2*n]
  handle total : f32[4]
  %0 = constant(0.5) : f32[]
  %1 = t_same(%delta, %0) : f32[n,4] "scaled"
  %2 = t_split(%total, count=2) : f32[4], f32[4]
  assign total = %2.1
  return scaled = %1, "a b" = %2.0, delta = %delta"""


def test_the_text_is_what_the_documentation_shows():
    g = Graph("counter")
    delta = g.input("delta", ("n", 4), "f32")
    g.param("unused", (Dim("n", 2),), "bf16")
    total = g.handle(BufferHandle("total", (4,), "f32"))
    scaled = make("t_same", delta, constant(0.5), label="scaled")
    first, second = make("t_split", total, count=2)
    g.assign(total, second)
    g.set_outputs([scaled, first, delta], ["scaled", "a b", "delta"])
    assert str(g) == EXAMPLE
    parsed = round_trip(g)
    assert parsed.fingerprint() == g.fingerprint()
    assert [v.name for v in parsed.leaves()] == ["delta", "unused", "total"]
    assert parsed.params[0].dims == (Dim("n", 2),) and parsed.outputs[2] is parsed.inputs[0]


def test_comments_blank_lines_and_other_spacing_are_allowed():
    spaced = EXAMPLE.replace("\n", "  # note: %9 = (\r\n\n").replace(" = ", "=").replace(",", " , ")
    assert str(Graph.parse(spaced)) == EXAMPLE


SAMPLES = [(op, i) for op in OPS.values() for i in range(len(op.samples)) if op.kind is not Kind.LEAF]


@pytest.mark.parametrize("op,index", SAMPLES, ids=lambda x: getattr(x, "name", str(x)))
def test_every_op_of_the_table_round_trips(op, index):
    sample = op.samples[index]
    under_test = next(d for d in ("f32", "i32", "u8", "bool", "c64") if DTYPES[d].kind in op.dtypes)
    dtypes = [(sample.dtypes[i] if sample.dtypes else "") or under_test for i in range(len(sample.shapes))]
    g = Graph(op.name)
    operands = [g.input(f"x{i}", s, d) for i, (s, d) in enumerate(zip(sample.shapes, dtypes))]
    out = apply(op, operands, dict(sample.attrs or {}))
    g.set_outputs(out if isinstance(out, tuple) else [out])
    parsed = round_trip(g)
    assert parsed.outputs[0].node.attrs == g.outputs[0].node.attrs
    assert parsed.fingerprint() == g.fingerprint()


# -- constants


def constants_survive(*arrays: np.ndarray) -> None:
    g = Graph()
    g.set_outputs([constant(a) for a in arrays], [f"o{i}" for i in range(len(arrays))])
    for array, out in zip(arrays, round_trip(g).outputs):
        found = out.node.attrs.data
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == array.tobytes(), f"{array!r} became {found!r}"
        assert not found.flags.writeable


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.bits <= 16 and d.kind == "f"], ids=str)
def test_every_bit_pattern_of_a_small_float_survives_inline(dtype):
    patterns = np.arange(1 << dtype.bits, dtype=f"u{dtype.itemsize}").view(dtype.numpy)
    constants_survive(*patterns.reshape(-1, INLINE))


@given(st.data())
@QUICK
def test_constants_of_any_dtype_and_bytes_survive(data):
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    shape = data.draw(st.sampled_from([(), (0, 3), (1,), (2, 3), (INLINE,), (INLINE + 1,), (3, 5, 2)]))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (
        (raw & 1 if dtype.kind == "b" else raw).copy().view(dtype.numpy).reshape(shape) if size else np.empty(shape, dtype.numpy)
    )
    constants_survive(array)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=INLINE))
@QUICK
def test_f32_constants_survive_inline(bits):
    constants_survive(np.array(bits, np.uint32).view(np.float32))


def test_constant_edges_survive_and_read_well():
    constants_survive(np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x80000000, 1, 0x7F7FFFFF], np.uint32).view(np.float32))
    constants_survive(np.array([-0.0, 0.0, np.inf, -np.inf, 5e-324, 1.7976931348623157e308, 0.1]))
    constants_survive(np.array([-(2**63), 2**63 - 1]), np.array([2**64 - 1], np.uint64), np.array([True, False]))
    constants_survive(np.array([complex(-0.0, np.inf), 1 + 2j], np.complex64), np.arange(1000, dtype=np.int16))
    g = Graph()
    g.set_outputs([constant(np.array([0.1, 1e-5, -0.0, 3], np.float32)), constant(np.array([True, False]))])
    assert "constant(0.1, 1e-05, -0.0, 3.0)" in str(g) and "constant(true, false)" in str(g)


# -- attributes and names

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
DIMS = st.builds(
    Dim, st.lists(st.sampled_from(["n", "batch", "inf", "dim", "f32", "true"]), min_size=1, max_size=3), st.integers(2, 9)
)
SHAPES = st.builds(Shape, st.lists(st.integers(0, 99) | DIMS, max_size=3), st.sampled_from(list(DTYPES.values())))


@given(
    st.builds(
        EverythingAttrs, INTS, FLOATS, st.booleans(), st.text(), st.sampled_from(list(DTYPES.values())), SHAPES | st.none(),
        st.lists(INTS, max_size=3).map(tuple), st.lists(st.lists(st.text(), max_size=2).map(tuple), max_size=2).map(tuple),
        st.lists(INTS | DIMS, max_size=3).map(tuple), DIMS | st.none(),
    )
)  # fmt: skip
@QUICK
def test_attributes_of_every_kind_survive(attrs):
    g = Graph()
    node = make("t_all", g.input("x", (2,), "f32"), **{f: getattr(attrs, f) for f in EverythingAttrs.__dataclass_fields__})
    g.set_outputs([node])
    assert round_trip(g).outputs[0].node.attrs == attrs


def test_special_floats_and_numpy_integers_as_attributes():
    g = Graph()
    x = g.input("x", (2,), "f32")
    g.set_outputs([make("t_all", x, b=b) for b in (np.inf, -np.inf, np.nan, -0.0)] + [make("t_all", x, a=np.int64(7))])
    found = [v.node.attrs for v in round_trip(g).outputs]
    assert [str(a.b) for a in found[:4]] == ["inf", "-inf", "nan", "-0.0"] and found[4].a == 7


@given(st.lists(st.text(min_size=1), min_size=4, max_size=4, unique=True))
@QUICK
def test_any_name_survives(names):
    assume(all(c < "\ud800" or c > "\udfff" for c in "".join(names)))
    g = Graph(names[0])
    x = g.input(names[1], (2,), "f32")
    h = g.handle(BufferHandle(names[2], (2,), "f32"))
    y = make("t_same", x, h, label=names[3])
    g.assign(h, y)
    g.set_outputs([y, x], [names[3], names[0]])
    parsed = round_trip(g)
    assert [parsed.name, parsed.inputs[0].name, parsed.handles[0].name, parsed.outputs[0].name] == names
    assert parsed.output_names == [names[3], names[0]]


@pytest.mark.parametrize(
    "name", ["inf", "nan", "0", "1.5", "true", "return", "x.0", "%1", '"', "#", "f32", "a-b/c", "a\nb", "é", "base64"]
)
def test_names_that_look_like_something_else(name):
    g = Graph(name)
    x = g.input(name, ("inf",), "f32")
    g.set_outputs([make("t_same", x)], [name])
    assert round_trip(g).inputs[0].name == name


# -- malformed text

HEAD = "graph g\n  input x : f32[2]\n  handle h : f32[2]\n"
TAIL = "\n  return y = %x"
MALFORMED = [
    ("", 1, "graph NAME"),
    ("graph", 1, "the graph's name"),
    ("graph g", 1, "expected return"),
    ("module g\n", 1, "graph NAME"),
    ("graph g\ngraph h", 2, "the number of a sub-graph"),
    (HEAD + "  bogus", 4, "input, param, handle, %N, assign, update or return, found 'bogus'"),
    (HEAD + "  active %x ((0, 1, 2, 1),)", 4, "input, param, handle, %N"),
    (HEAD + "  extent %x\n  extent %x", 5, "input, param, handle, %N"),
    (HEAD + "  extent %x\n  active %x ((0, 1, 2),)", 5, r"tuples \(axis, outer, upper, inner\), found \(\(0, 1, 2\),\)"),
    (HEAD + "  input x : f32[2]", 4, "already has the input 'x'"),
    (HEAD + "  param : f32[2]", 4, "the leaf's name"),
    (HEAD + "  param p f32[2]", 4, "':'"),
    (HEAD + "  param p : q32[2]", 4, "a dtype"),
    (HEAD + "  param p : f32[2", 4, "expected '\\]', found the end of the line"),
    (HEAD + "  param p : f32[-2]", 4, "negative"),
    (HEAD + "  param p : f32[a.b]", 4, "identifier"),
    (HEAD + "  param p : f32[1.5]", 4, "a dim"),
    (HEAD + "  param p : f32[" + "9" * 5000 + "]", 4, "a dim"),
    (HEAD + '  param "\\q" : f32[2]', 4, "JSON"),
    (HEAD + '  param "" : f32[2]', 4, "non-empty"),
    (HEAD + '  param "open : f32[2]', 4, "no name, number or mark begins"),
    (HEAD + "  param p : f32[2] ? f32[2]", 4, "no name, number or mark begins"),
    (HEAD + "  param p : f32[2] p", 4, "the end of the line"),
    (HEAD + "  %0 = no_such_op(%x) : f32[2]", 4, "an op .*found 'no_such_op'"),
    (HEAD + "  %0 = input(%x) : f32[2]", 4, "input NAME : SHAPE"),
    (HEAD + "  %0 = t_same(%z) : f32[2]", 4, "no leaf 'z'"),
    (HEAD + "  %0 = t_same(%1) : f32[2]", 4, "%1 is not defined above"),
    (HEAD + "  %0 = t_same(%x.0.1) : f32[2]", 4, "no leaf 'x.0.1'"),
    (HEAD + "  %0 = t_same(%x) : f32[3]", 4, "shape rule of t_same gives f32\\[2\\], the text says f32\\[3\\]"),
    (HEAD + "  %0 = t_same() : f32[2]", 4, "takes"),
    (HEAD + "  %0 = t_same(%x %x) : f32[2]", 4, "expected '\\)', found '%x'"),
    (HEAD + "  %0 = t_same(%x) : f32[2]\n  %0 = t_same(%x) : f32[2]", 5, "a node number not used yet"),
    (HEAD + "  %0 = t_split(%x, count=2) : f32[2], f32[2]\n  %1 = t_same(%0) : f32[2]", 5, "%0.0 to %0.1"),
    (HEAD + "  %0 = t_split(%x, count=2) : f32[2], f32[2]\n  %1 = t_same(%0.2) : f32[2]", 5, "%0.0 to %0.1"),
    (HEAD + '  %0 = t_split(%x, count="2") : f32[2]', 4, "count of t_split takes int, found '2'"),
    (HEAD + "  %0 = t_split(%x, count=true) : f32[2]", 4, "takes int"),
    (HEAD + "  %0 = t_split(%x) : f32[2]", 4, "t_split needs count"),
    (HEAD + "  %0 = t_split(%x, count=1, count=1) : f32[2]", 4, "count is given twice"),
    (HEAD + "  %0 = t_split(%x, many=1) : f32[2]", 4, "no attribute many"),
    (HEAD + "  %0 = t_split(%x, count=) : f32[2]", 4, "an attribute's value"),
    (HEAD + "  %0 = t_split(%x, count=0x10) : f32[2]", 4, "0x10"),
    (HEAD + "  %0 = t_split(%x, count=__import__) : f32[2]", 4, "an attribute's value, found '__import__'"),
    (HEAD + "  %0 = t_all(%x, h=" + "(" * 100_000 + ") : f32[2]", 4, "at most 16 tuples"),
    (HEAD + "  %0 = t_all(%x, a=" + "1" * 100_000 + ") : f32[2]", 4, "takes int, found inf"),
    (HEAD + "  %0 = constant(1.0, 2.0) : f32[3]", 4, "takes 12 bytes, the text has 8"),
    (HEAD + "  %0 = constant(1.0) : f32[999999999999]", 4, "takes 3999999999996 bytes, the text has 4"),
    (HEAD + "  %0 = constant(1.0) : f32[n]", 4, "dim n"),
    (HEAD + "  %0 = constant(1e39) : f32[1]", 4, "1e39 is not of dtype f32"),
    (HEAD + "  %0 = constant(0x123456789) : f32[1]", 4, "is not of dtype f32"),
    (HEAD + "  %0 = constant(256) : u8[1]", 4, "256 is not of dtype u8"),
    (HEAD + "  %0 = constant(1.5) : i32[1]", 4, "1.5 is not of dtype i32"),
    (HEAD + "  %0 = constant(1) : bool[1]", 4, "1 is not of dtype bool"),
    (HEAD + "  %0 = constant(one) : f32[1]", 4, "one is not of dtype f32"),
    (HEAD + '  %0 = constant(base64 "AAAA") : f32[1]', 4, "takes 4 bytes, the text has 3"),
    (HEAD + '  %0 = constant(base64 "A=!") : f32[1]', 4, "line 4"),
    (HEAD + '  %0 = constant(base64 "Ag==") : bool[1]', 4, "0 or 1, found 2"),
    (HEAD + "  assign z = %x", 4, "no handle 'z'"),
    (HEAD + "  assign x = %x", 4, "takes a handle"),
    (HEAD + "  assign h = %h\n  assign h = %h", 5, "assigned twice"),
    (HEAD + "  param p : f32[3]\n  assign h = %p", 5, "assign to handle 'h'"),
    (HEAD + "  return y = %x, y = %x", 4, "different names"),
    (HEAD + "  return y = %x z = %x", 4, "','"),
    (HEAD + "  return %x", 4, "an output's name"),
    (HEAD + "  return y = %x\n  return", 5, "nothing after return"),
]


@pytest.mark.parametrize("text,line,expected", MALFORMED, ids=lambda x: str(x)[-40:] if isinstance(x, str) else "")
def test_malformed_text_is_a_parse_error_with_its_line(text, line, expected):
    with pytest.raises(ParseError) as e:
        Graph.parse(text)
    assert str(e.value).startswith(f"line {line}: ") and re.search(expected, str(e.value)), str(e.value)
    assert len(str(e.value)) < 500


def test_text_is_a_string():
    with pytest.raises(ParseError, match="got bytes"):
        Graph.parse(b"graph g")  # type: ignore[arg-type]


@given(st.data())
@QUICK
def test_damaged_text_parses_or_is_a_parse_error(data):
    text = (
        EXAMPLE.replace("constant(0.5) : f32[]", "constant(0.5, 0x7fc00001) : f32[2]")
        .replace("[n,4]", "[3,2]")
        .replace("[4]", "[3,2]")
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.text('%"()[]=,.:\\#\n 0x9enaif-', max_size=4)) + text[at + cut :]
    try:
        parsed = Graph.parse(text)
    except ParseError as e:
        assert re.match(r"line \d+: ", str(e))
    else:
        parsed.verify() if parsed.outputs or parsed.assigns else None
        assert str(Graph.parse(str(parsed))) == str(parsed)


# -- fingerprint


def small(node_name: str | None = None, leaf: str = "x", value: float = 1.5, big: int = 0) -> Graph:
    g = Graph("small")
    x = g.input(leaf, (2, "n"), "f32")
    y = make("t_same", x, constant(value), label=node_name)
    table = constant(np.arange(100, dtype=np.int64) + big, i64)
    g.set_outputs([y, table], ["y", "table"])
    return g


def test_fingerprint_counts_what_is_computed():
    assert small().fingerprint() == small(node_name="hidden").fingerprint()
    others = [small(leaf="z"), small(value=1.25), small(value=-0.0), small(value=0.0), small(big=1)]
    assert len({g.fingerprint() for g in [small(), *others]}) == 6
    assert str(small()) != str(small(node_name="hidden"))


def test_fingerprint_is_the_same_in_another_process_and_on_other_machines():
    code = (
        "import numpy as np, rlx.ir as ir\n"
        "g = ir.Graph('g'); x = g.input('x', (2, 'n'), 'f32')\n"
        "g.set_outputs([x, ir.constant(np.arange(100, dtype=np.int64)), ir.constant(0.1)], ['a', 'b', 'c'])\n"
        "print(g.fingerprint())"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, cwd="/")
        found.add(done.stdout.strip())
    digest = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in range(100))).hexdigest()
    text = (
        "graph g\n"
        "  input x : f32[2,n]\n"
        f'  %0 = constant(sha256 "{digest}") : i64[100]\n'
        "  %1 = constant(0.1) : f32[]\n"
        "  return a = %x, b = %0, c = %1"
    )
    assert found == {hashlib.sha256(text.encode()).hexdigest()}

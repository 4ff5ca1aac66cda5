"""Every op's reference against an outside source in float64, and every composite's decomposition against its reference."""

from __future__ import annotations

import numpy as np
import pytest
from op_cases import Case, assert_same, cases
from op_oracles import ORACLES

import rlx
from rlx.ir.dtype import as_dtype
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.op import OPS, Kind

CASES: dict[str, list[Case]] = {}
for case in cases():
    CASES.setdefault(case.op.name, []).append(case)

# rounding of one result in its dtype, and of the f32 or f64 sums behind it
ROUNDING = {"f64": 1e-12, "f32": 2e-6, "f16": 1e-3, "bf16": 8e-3, "c64": 2e-6}


def test_every_op_has_an_outside_source():
    assert set(CASES) == {name for name, d in OPS.items() if d.kind is not Kind.LEAF}
    assert set(CASES) - set(ORACLES) == set()


@pytest.mark.parametrize("name", CASES)
def test_reference_agrees_with_an_outside_source(name):
    for case in CASES[name]:
        (node,) = [n for n in case.graph().nodes() if n.op.kind is not Kind.LEAF]
        wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_, "c": np.complex128}
        with np.errstate(all="ignore"):
            want = ORACLES[name](case, node.attrs, *(a.astype(wide[d.kind]) for a, d in zip(case.inputs.values(), case.dtypes)))
            want = want if isinstance(want, tuple) else (want,)
            rounded = [w.astype(s.dtype.compute.numpy).astype(s.dtype.numpy) for w, s in zip(want, node.shapes, strict=True)]
        for found, w, shape in zip(case.expected, rounded, node.shapes, strict=True):
            assert_same(found, w, ROUNDING.get(shape.dtype.name, 0.0), repr(case))


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_inferred(name):
    for case in CASES[name]:
        for value, array in zip(case.graph().outputs, case.expected, strict=True):
            assert (array.shape, array.dtype) == (value.dims, value.dtype.numpy), case


def decomposed(graph: Graph) -> Graph:
    """`graph` in core ops alone."""

    def new(node: Node, inputs: tuple[Value, ...]):
        node = keep(node, inputs)[0].node
        if node.op.kind is not Kind.COMPOSITE:
            return node.results
        inner = Graph("inner")
        made = node.op.decompose(node.attrs, *node.inputs)
        inner.set_outputs(made if isinstance(made, tuple) else (made,))
        inner.inputs = list(dict.fromkeys(node.inputs))  # where this composite's own part of the graph begins
        return inner.rebuild(new).outputs

    return graph.rebuild(new)


@pytest.mark.parametrize("name", [name for name in CASES if OPS[name].kind is Kind.COMPOSITE])
def test_decomposition_equals_reference(name):
    for case in CASES[name]:
        core = decomposed(case.graph())
        assert all(n.op.kind is not Kind.COMPOSITE for n in core.nodes())
        assert [v.shape for v in core.outputs] == [v.shape for v in case.graph().outputs], case
        for found, want in zip(evaluate(core, case.inputs)[0], case.expected, strict=True):
            assert_same(found, want, case.tolerance, repr(case))


@pytest.mark.parametrize("name", [name for name in CASES if OPS[name].kind is Kind.COMPOSITE and "f" in OPS[name].dtypes])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_floats_are_rounded_once(name, dtype):
    """A decomposition in 16 bits rounds its result, not its steps: it stays within one unit in the last place."""
    unit = {"f16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    roomy = 2.0 if name == "linear" else 1.0  # a matmul, then a sum: two roundings, so that packed 16-bit weights serve
    for case in CASES[name]:
        if case.dtype == as_dtype(dtype) and case.dtypes[0] == case.dtype and not case.awkward:
            for found, want in zip(evaluate(decomposed(case.graph()), case.inputs)[0], case.expected, strict=True):
                assert_same(found, want, roomy * unit, repr(case))


@pytest.mark.parametrize("name", CASES)
def test_declaration_is_complete(name):
    """Each kind brings the facts that passes ask it for, and people can read what the op does."""
    needs = {
        Kind.POINTWISE: ("scalar",), Kind.VIEW: ("element", "strided"), Kind.INDEX: ("element",), Kind.REDUCE: ("reduce",),
        Kind.CONTRACT: ("contract",), Kind.KERNEL: ("kernel",), Kind.COMPOSITE: ("decompose",), Kind.COLLECTIVE: (),
        Kind.CONTROL: ("decompose",),
    }  # fmt: skip
    declared = OPS[name]
    for fact in {f for facts in needs.values() for f in facts}:
        assert (getattr(declared, fact) is not None) == (fact in needs[declared.kind]), fact
    assert declared.doc.strip().endswith((".", "…"))
    assert any(d % 8 for s in declared.samples for dims in s.shapes or (s.attrs["dims"],) for d in dims), "no odd tail"


def test_named_dims_in_attributes_take_the_sizes_of_the_arrays() -> None:
    g = rlx.Graph("named")
    x = g.input("x", ("n", 2), "f32")
    doubled = rlx.cond(rlx.sum(x) > 0, lambda v: v + rlx.ones(v.dims), lambda v: v, x)
    g.set_outputs([rlx.broadcast_to(x[:, :1], dims=x.dims), rlx.iota(dims=("n",)), rlx.reshape(x, dims=(2, "n")), *doubled])
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    wanted = np.repeat(array[:, :1], 2, 1), np.arange(3), array.reshape(2, 3), array + 1
    assert all((a == b).all() and a.shape == b.shape for a, b in zip(evaluate(g, {"x": array})[0], wanted, strict=True))

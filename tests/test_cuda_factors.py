"""Norms between products, whose factors the second product multiplies by (rlx.compiler.factors): against numpy in f64,
interpreted and on a GPU, and the kernels that it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import kernel_runs
import numpy as np
import pytest
from test_cuda import SOME_TILINGS, on_gpu
from test_cuda_results import fixed

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.tensor import TensorLaunch, Tiling, has_parts, on_tensor_cores
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.compiler.check import check_program
from rlx.errors import PlanError
from rlx.ir.kernel import Contract, Kernel
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.overlap import may_overlap
from rlx.ir.program import Program
from tests.cuda_kernels import reports

Norm = Callable[[rlx.Value, rlx.Value], rlx.Value]
End = Callable[[rlx.Value], rlx.Value]
EPS = 1e-5
NORMS: dict[str, Norm] = {
    "rms_norm": lambda x, scale: rlx.rms_norm(x, scale, eps=EPS),
    "by hand": lambda x, scale: scale * (x / rlx.sqrt(rlx.mean(x * x, axis=1, keepdims=True) + EPS)),
    "twice": lambda x, scale: rlx.rms_norm(x, scale, eps=EPS) * 2.0,
}


def gated(z: rlx.Value) -> rlx.Value:
    gate, up = rlx.split(z, 2, axis=1)
    return rlx.silu(gate) * up


ENDS: dict[str, End] = {
    "plain": lambda z: z, "gated": gated, "wide": lambda z: rlx.cast(z, "f32") * 3.0 + 1.0,
}  # fmt: skip
SHAPES = [(512, 192, 2048, 256), (128, 64, 2048, 128), (144, 128, 4096, 512), (256, 2048, 2112, 64), (176, 64, 3072, 3072)]


def network(m: int, k: int, n: int, last: int, norm: str = "rms_norm", end: str = "plain", **more: object) -> rlx.Graph:
    g = rlx.Graph("norm between products")
    a, r = g.input("a", (m, k), "bf16"), g.input("r", (m, n), "f32")
    w, scale, v = g.param("w", (n, k), "bf16"), g.param("scale", (n,), "f32"), g.param("v", (last, n), "bf16")
    x = rlx.cast(a @ rlx.transpose(w), "f32") + r
    y = rlx.cast(NORMS[norm](x, scale), "bf16")
    z = ENDS[end](y @ rlx.transpose(v))
    g.set_outputs([x, z, *(f(x, y) for f in more.values())])  # type: ignore[operator]
    return g


def numbers(g: rlx.Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    made = {}
    for leaf in (*g.inputs, *g.params):
        dims = leaf.shape.static
        size = dims[1] ** -0.5 if len(dims) == 2 and leaf.name in ("w", "v") else 1.0
        x = rng.standard_normal(dims) * size + (len(dims) == 1)
        made[str(leaf.name)] = x.astype(leaf.dtype.numpy)
    made["r"] *= 10.0 ** rng.integers(-3, 4, (len(made["r"]), 1))  # factors of all sizes
    return made


def wanted(of: dict[str, np.ndarray], norm: str, end: str) -> list[np.ndarray]:
    a, r, w, scale, v = (of[name].astype(np.float64) for name in ("a", "r", "w", "scale", "v"))
    x = a @ w.T + r
    z = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * scale * (2 if norm == "twice" else 1) @ v.T
    if end == "gated":
        gate, up = np.split(z, 2, 1)
        z = gate / (1 + np.exp(-gate)) * up
    return [x, z * 3 + 1 if end == "wide" else z]


def errors(found: list[np.ndarray], of: dict[str, np.ndarray], norm: str, end: str) -> list[float]:
    """The error of each result, of its largest row by row, root mean square."""
    out = []
    for got, want in zip(found, wanted(of, norm, end)):
        off = (got.astype(np.float64) - want) / np.abs(want).max(1, keepdims=True)
        assert np.abs(off).max() < 2.0**-6
        out.append(float(np.sqrt((off * off).mean())))
    return out


def interpreted(program: Program, of: dict[str, np.ndarray]) -> list[np.ndarray]:
    arrays = {b.id: np.full(b.shape.num_elements, 99, b.shape.dtype.numpy) for b in program.buffers}
    arrays |= {b.id: of[b.name].ravel() for b in program.buffers if b.name in of}
    for step in program.steps:
        assert run_kernel(step.kernel, [arrays[n] for n in step.args]) == 0
    return [arrays[o.buffer].reshape(o.shape.static) for o in program.outputs]


def products(program: Program) -> list[tuple[Kernel, Contract]]:
    return [(s.kernel, s.kernel.body[0]) for s in program.steps if isinstance(s.kernel.body[0], Contract)]


@pytest.mark.parametrize("norm, end", [("rms_norm", "plain"), ("rms_norm", "gated"), ("by hand", "wide"), ("twice", "plain")])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_products_are_all_that_runs(shape, norm, end):
    g = network(*shape, norm, end)
    program = lower(g, target("sm_90a"), rlx.CompileOptions())
    (first, one), (second, two) = products(program)
    assert len(program.steps) == 2 and one.rows and two.before
    for kernel in (first, second):
        assert print_kernel(parse_kernel(print_kernel(kernel))) == print_kernel(kernel)
        assert isinstance(launch_of(kernel), TensorLaunch)
    of = numbers(g)
    separate = lower(g, target("sm_90a"), rlx.CompileOptions(disable=("factors",)))
    assert program.plan.size_bytes <= separate.plan.size_bytes + shape[0] * shape[2] // 16
    pairs = zip(*(errors(interpreted(x, of), of, norm, end) for x in (program, separate)))
    assert all(own < 1.1 * other + 1e-6 for own, other in pairs)


def test_a_gather_in_front_of_the_norm_stays_in_a_product_on_tensor_cores():
    g = rlx.Graph("positions")
    a, at, table = g.input("a", (512, 64), "bf16"), g.input("at", (512,), "i64"), g.param("table", (100, 2048), "f32")
    w, scale, v = g.param("w", (2048, 64), "bf16"), g.param("scale", (2048,), "f32"), g.param("v", (64, 2048), "bf16")
    x = rlx.cast(a @ rlx.transpose(w), "f32") + rlx.take(table, at, axis=0)
    g.set_outputs([rlx.cast(rlx.rms_norm(x, scale), "bf16") @ rlx.transpose(v)])
    program = lower(g, target("sm_90a"), rlx.CompileOptions())
    found = products(program)
    assert [bool(c.rows) for _, c in found] == [True, False] and found[1][1].before
    assert all(isinstance(launch_of(kernel), TensorLaunch) for kernel, _ in found)


def test_results_do_not_take_the_memory_of_sums_that_other_tiles_read():
    """The result has as many bytes as the sums: one of each 64 columns."""
    g = network(2048, 64, 16384, 256, end="wide")
    x, z = g.outputs
    g.set_outputs([x, rlx.softmax(z, axis=1)])
    program = lower(g, target("sm_90a"), rlx.CompileOptions())
    reader = next(s for s in program.steps if isinstance(s.kernel.body[0], Contract) and s.kernel.body[0].before)
    assert may_overlap(reader.kernel) == set()
    result, sums = reader.args[2], reader.args[-1]
    assert program.plan.offsets[result] != program.plan.offsets[sums]
    offsets = dict(program.plan.offsets) | {result: program.plan.offsets[sums]}
    with pytest.raises(PlanError, match="which it still uses"):
        check_program(replace(program, plan=replace(program.plan, offsets=offsets)))


NO_NORMS: dict[str, Norm] = {
    "softmax": lambda x, scale: rlx.exp(x) / rlx.sum(rlx.exp(x), axis=1, keepdims=True) * scale,
    "sum of sizes": lambda x, scale: x / rlx.sum(rlx.abs(x), axis=1, keepdims=True) * scale,
    "more than the row": lambda x, scale: rlx.rms_norm(x, scale) + x,
    "squares": lambda x, scale: x * rlx.rms_norm(x, scale),
    "layer norm": lambda x, scale: rlx.layer_norm(x, scale, scale),
}


@pytest.mark.parametrize("norm", list(NO_NORMS))
def test_other_kernels_between_products_stay(monkeypatch, norm):
    monkeypatch.setitem(NORMS, norm, NO_NORMS[norm])
    program = lower(network(*SHAPES[0], norm), target("sm_90a"), rlx.CompileOptions())
    assert not any(c.rows or c.before for _, c in products(program))


@pytest.mark.parametrize(
    "more, shape",
    [({"y": lambda x, y: y}, SHAPES[0]), ({"y": lambda x, y: rlx.cast(y, "f32") + 1.0}, SHAPES[0]), ({}, (64, 64, 2048, 64)),
     ({}, (512, 64, 2080, 64)), ({}, (136, 64, 2048, 64)), ({}, (512, 64, 1024, 64))],
)  # fmt: skip
def test_norms_that_others_read_or_that_have_few_or_odd_rows_are_kernels(more, shape):
    program = lower(network(*shape, **more), target("sm_90a"), rlx.CompileOptions())
    assert not any(c.rows or c.before for _, c in products(program)) and len(program.steps) > 2


def test_statements_before_a_row_run_on_a_cpu_as_well():
    """No lowering for a CPU makes such kernels, but texts may have them."""
    g = network(128, 64, 2048, 128)
    program, rng = lower(g, target("sm_90a"), rlx.CompileOptions()), np.random.default_rng(3)
    _, (kernel, c) = products(program)
    assert c.before
    values = [None if b.writable else rng.standard_normal(b.size).astype(b.dtype.numpy) ** 2 for b in kernel.buffers]
    (found,), status = kernel_runs.run(kernel, values, kernel_runs.TARGETS["host"])
    arrays = [np.zeros(b.size, b.dtype.numpy) if v is None else v for b, v in zip(kernel.buffers, values)]
    assert status == run_kernel(kernel, arrays) == 0
    (want,) = [a for a, b in zip(arrays, kernel.buffers) if b.writable]
    np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=2**-7)


def test_other_architectures_and_the_option_keep_the_kernel():
    g = network(*SHAPES[0])
    for arch, options in (("sm_80", rlx.CompileOptions()), ("sm_90a", rlx.CompileOptions(disable=("factors",)))):
        program = lower(g, target(arch), options)
        assert len(program.steps) == 3 and not any(c.rows or c.before for _, c in products(program))


def with_tiling(monkeypatch, tiling: Tiling, of_first: bool) -> None:
    """Of the first product, or of the second one."""

    def chosen(kernel: Kernel) -> TensorLaunch | None:
        c = kernel.body[0]
        own = isinstance(c, Contract) and bool(c.rows if of_first else c.before)
        return on_tensor_cores(kernel, tiling=tiling if own else None)

    fixed(monkeypatch, "on_tensor_cores", chosen)


FIRST_TILINGS = [t for t in SOME_TILINGS if has_parts(t)]


@pytest.mark.parametrize("end, part", [("plain", 1), ("gated", 2)])
def test_kinds_of_tilings_compile_without_spills(end, part):
    """Of the second product those that its sums allow. A sixth of them each (test_cuda.py has the others)."""
    (first, _), (second, c) = products(lower(network(512, 192, 2048, 512, end=end), target("sm_90a"), rlx.CompileOptions()))
    some = SOME_TILINGS[part::6]
    pairs = [t for t in some if c.also is None or (t.columns % 64 == 0 and not t.swapped)]
    firsts = (on_tensor_cores(first, tiling=t) for t in some if t in FIRST_TILINGS)
    launches = [*firsts, *(on_tensor_cores(second, tiling=t) for t in pairs)]
    assert len(launches) > 2
    for at in launches:
        assert at is not None
        (report,) = reports(text_of(at, "k"), "sm_90a").values()
        assert report.spilled == report.stack == 0, at.tiling


@on_gpu
@pytest.mark.parametrize("norm, end", [("rms_norm", "plain"), ("rms_norm", "gated"), ("by hand", "wide")])
@pytest.mark.parametrize("shape", [*SHAPES, (512, 2048, 2048, 16384), (1040, 512, 4096, 6144)])
def test_results_agree_with_f64_on_a_gpu(shape, norm, end):
    g = network(*shape, norm, end)
    of = numbers(g)
    found = []
    for disable in ((), ("factors",)):
        compiled = rlx.Session("cuda").compile(g, disable=disable)
        for name in ("w", "scale", "v"):
            compiled.set_param(name, of[name])
        found.append(compiled.run({"a": of["a"], "r": of["r"]}))
        again = compiled.run({"a": of["a"], "r": of["r"]})
        assert all(x.tobytes() == y.tobytes() for x, y in zip(found[-1], again))
    pairs = zip(*(errors(x, of, norm, end) for x in found))
    assert all(own < 1.1 * other + 1e-6 for own, other in pairs)


@on_gpu
@pytest.mark.parametrize("tiling", SOME_TILINGS, ids=str)
def test_every_kind_of_tiling_agrees_with_f64(monkeypatch, tiling):
    with_tiling(monkeypatch, tiling, of_first=False)
    test_results_agree_with_f64_on_a_gpu((400, 256, 2048, 776), "rms_norm", "plain")
    if tiling in FIRST_TILINGS:
        with_tiling(monkeypatch, tiling, of_first=True)
        test_results_agree_with_f64_on_a_gpu((400, 1040, 2048, 776), "rms_norm", "plain")

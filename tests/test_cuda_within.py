"""Images of the CUDA backend that are computed inside their padding, where products read windows, and numbers around them."""

from __future__ import annotations

import operator

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import on_gpu

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.fills import spread
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Const, Contract, Store, Var

CASES = {  # dims of the image, channels last; attributes of convolutions, and how many; dtype
    "an input": ((2, 30, 31, 64), {"low": 1, "high": 1}, 1, "f32"),
    "a residual sum": ((2, 36, 37, 64), {"low": 1, "high": 1}, 1, "f32"),
    "a concat": ((2, 28, 30, 64), {"low": 1, "high": 1}, 1, "f32"),
    "a result": ((2, 30, 28, 64), {"low": 1, "high": 1}, 2, "f32"),
    "a result of steps": ((3, 29, 27, 64), {"low": (1, 0), "high": 2, "strides": 2}, 2, "f16"),
    "a result and an input, a concat": ((2, 20, 28, 64), {"low": 1, "high": 1}, 2, "bf16"),
}


def network(name: str) -> rlx.Graph:
    """Convolutions, one after the other. `concat`: of each one's image and an input."""
    image, how, count, dtype = CASES[name]
    g = rlx.Graph("g")
    x, b = g.input("x", image, dtype), g.param("b", (64,), dtype)
    y, made = g.input("y", image, dtype), x
    for n in range(count):
        seen = rlx.concat([made, y], axis=-1) if "concat" in name else made
        w = g.param(f"w{n}", (3, 3, seen.shape.static[-1], 64), dtype)
        made = rlx.relu(rlx.conv(seen, w, b, channels_last=True, **how))
        made = rlx.minimum(made + (x if "residual" in name else 0), 3.0)
    g.set_outputs([made])
    return g


def steps(name: str):
    return [s.kernel for s in lower(network(name), target("sm_90a"), rlx.CompileOptions(precision="bf16")).steps]


@pytest.mark.parametrize("name", CASES)
def test_images_are_computed_inside_their_padding(name):
    """No kernel copies a result of another one to put numbers around it, or windows of it."""
    found = steps(name)
    products = [kernel for kernel in found if isinstance(kernel.body[0], Contract)]
    launched = [launch_of(kernel) for kernel in products]
    assert len(products) == CASES[name][2] and "copy" not in {n for kernel in found for n in kernel.origin}
    assert all(isinstance(at, TensorLaunch) and at.sides[at.tiling.swapped].image for at in launched)
    assert all(cubin(text_of(at, "kernel"), "sm_90a") for at in launched)
    numbers = [k for k in found if isinstance(s := k.body[0], Store) and isinstance(s.value, Const)]
    assert all(len(kernel.buffers) == 1 for kernel in numbers) and len(numbers) == ("result" in name and "concat" not in name)


def test_all_numbers_around_an_image_are_one_axis():
    """The kernel stores what the loops of the parts would."""
    (loops,) = [x for x in steps("a result") if x.origin == ("pad",) and isinstance(x.body[0], Store)][-1:]
    (store,) = loops.body
    (g, images), (e, count) = loops.grid
    padded, whole = np.ones((2, 32, 30, 64)), np.zeros((2, 32, 30, 64))
    padded[:, 1:-1, 1:-1] = 0
    for n in range(images):
        for at in range(count):
            whole.reshape(-1)[_at(store.index, {g: n, e: at})] += 1
    np.testing.assert_array_equal(whole, padded)
    assert spread(loops) is loops  # which has no parts


def _at(e, known: dict[Var, int]) -> int:
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Var):
        return known[e]
    args = [_at(x, known) for x in e.args]
    ops = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv, "rem": operator.mod}
    return ops.get(e.op, {"lt": operator.lt, "select": lambda c, a, b: a if c else b}.get(e.op))(*args)


@pytest.mark.parametrize("name", CASES)
def test_kernels_leave_no_part_of_an_image_out(name):
    """The program's kernels, interpreted, in memory of no numbers: the steps of a run read what others have stored."""
    made = network(name)
    program, of = lower(made, target("sm_90a"), rlx.CompileOptions(precision="bf16")), drawn([*made.inputs, *made.params])
    arrays = {b.id: np.full(b.shape.num_elements, np.nan, b.shape.dtype.numpy) for b in program.buffers}
    arrays |= {b.id: of[b.name].ravel() for b in program.buffers if b.name in of}
    for step in (*program.prepare, *program.steps):
        assert run_kernel(step.kernel, [arrays[n] for n in step.args]) == 0
    (out,), names = program.outputs, [v.node.name for v in made.inputs]
    ((wanted,), _) = evaluate(made, {n: of[n] for n in names}, {n: x for n, x in of.items() if n not in names})
    agrees(arrays[out.buffer].reshape(out.shape.static), wanted)


def drawn(values) -> dict[str, np.ndarray]:
    """Small whole numbers, whose sums are exact."""
    rng = np.random.default_rng(0)
    return {v.node.name: rng.integers(-2, 3, v.dims).astype(v.dtype.numpy) for v in values}


def agrees(found: np.ndarray, wanted: np.ndarray) -> None:
    if found.dtype == np.float32:
        np.testing.assert_array_equal(found, wanted)
    else:  # rounded once, or at each op
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=2**-6, atol=2)


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_convolutions_agree_with_the_reference(name):
    made = network(name)
    given, params = drawn(made.inputs), drawn(made.params)
    compiled = rlx.Session("cuda").compile(made, rlx.CompileOptions(precision="bf16"))
    compiled.set_params(params)
    (found,), ((wanted,), _) = compiled.run(given), evaluate(made, given, params)
    agrees(found, wanted)

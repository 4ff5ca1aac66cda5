"""Arrays of torch, cupy and jax on a GPU: in from them and out to them, in order with what their libraries have queued.

Every producer here is late: its stream is at work for a tenth of a second before it writes the array that it hands over. Without
an event between the streams each of these tests reads the old contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.gpu import gpu, refusal
from rlx.errors import InputDTypeError, InputShapeError, TransferError

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
F, N = np.float32, 1 << 20
SLEEP = 200_000_000  # cycles of a GPU: at least a tenth of a second
SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@contextmanager
def late_torch(value: float) -> Iterator[Any]:
    torch = _torch()
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP)
        x.fill_(value)
        yield x


@contextmanager
def late_torch_interface(value: float) -> Iterator[Any]:
    """By `__cuda_array_interface__`, which torch gives without a stream: that of the default one."""
    torch = _torch()
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    x.fill_(value)
    yield SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__, kept=x)


@contextmanager
def late_cupy(value: float) -> Iterator[Any]:
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros(N, F)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        cupy.RawKernel(SPIN, "spin")((1,), (1,), (cupy.int64(SLEEP),))
        x.fill(value)
        yield x


@contextmanager
def late_cupy_interface(value: float) -> Iterator[Any]:
    with late_cupy(value) as x:
        yield SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__, kept=x)


@contextmanager
def late_jax(value: float) -> Iterator[Any]:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU")
    a = jax.numpy.ones((2048, 2048), F)

    @jax.jit
    def long(a: Any) -> Any:
        a = jax.lax.fori_loop(0, 200, lambda _, a: a @ a * 0, a)
        return jax.numpy.full(N, value, F) + a[0, 0]

    long(a).block_until_ready()
    yield long(a)


PRODUCERS = [late_torch, late_torch_interface, late_cupy, late_cupy_interface, late_jax]
producers = pytest.mark.parametrize("late", PRODUCERS, ids=lambda f: f.__name__.removeprefix("late_"))


def scaled() -> rlx.CompiledGraph:
    """x * w + h."""
    g = rlx.Graph("scaled")
    x, w, h = g.input("x", (N,), "f32"), g.param("w", (N,), "f32"), g.handle(rlx.BufferHandle("h", (N,), "f32"))
    g.assign(h, h)
    g.set_outputs([x * w + h])
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_param("w", np.ones(N, F))
    compiled.run({"x": np.zeros(N, F)})
    return compiled


def _bound(compiled: rlx.CompiledGraph, x: Any) -> np.ndarray:
    return np.asarray(compiled.bound([x])()[0])


def _as_param(compiled: rlx.CompiledGraph, w: Any) -> np.ndarray:
    compiled.set_param("w", w)
    return compiled.run({"x": np.ones(N, F)})[0]


def _as_handle(compiled: rlx.CompiledGraph, h: Any) -> np.ndarray:
    compiled.bind_handle("h", h)
    return compiled.run({"x": np.zeros(N, F)})[0]


def _queued(compiled: rlx.CompiledGraph, x: Any) -> np.ndarray:
    compiled.run_slots([x])
    return np.asarray(compiled.outputs_view()[0])


WAYS: dict[str, Callable[[rlx.CompiledGraph, Any], np.ndarray]] = {
    "run": lambda compiled, x: compiled.run({"x": x})[0],
    "run_slots": _queued,
    "bound": _bound,
    "run_pipelined": lambda compiled, x: compiled.run_pipelined([{"x": x}])[0][0],
    "set_param": _as_param,
    "bind_handle": _as_handle,
}


@producers
@pytest.mark.parametrize("way", WAYS)
def test_a_run_comes_after_what_the_library_of_its_array_has_queued(way: str, late: Callable) -> None:
    compiled = scaled()
    with late(7.0) as x:
        found = WAYS[way](compiled, x)
    assert (found == 7).all()


@producers
def test_without_the_event_the_old_contents_are_read(late: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: one of some runs reads the old contents (another program on the GPU may delay a run)."""
    compiled = scaled()
    if late is late_jax:
        pytest.skip("jax itself makes the stream wait")
    if late in (late_torch, late_torch_interface, late_cupy_interface):
        monkeypatch.setattr(gpu(0), "after", lambda stream: None)
    for _ in range(20):
        with late(7.0) as x:
            given = x
            if late is late_cupy:  # cupy makes our stream wait: let it be another one
                given = SimpleNamespace(
                    __dlpack_device__=x.__dlpack_device__, __dlpack__=lambda stream, x=x: x.__dlpack__(stream=-1)
                )
            found = compiled.run({"x": given})[0]  # type: ignore[dict-item]
        if not (found == 7).any():
            return
    pytest.fail("each run came after what the library had queued")


def products() -> rlx.CompiledGraph:
    """Some milliseconds of work, and then x[0, 0] + 1."""
    g = rlx.Graph("products")
    x = g.input("x", (4096, 4096), "f32")
    y = x
    for _ in range(4):
        y = (y @ x) * 0.0 + x
    g.set_outputs([y + 1.0])
    return rlx.Session("cuda").compile(g)


def test_torch_reads_outputs_after_the_run_that_makes_them_and_before_the_next_one() -> None:
    torch = _torch()
    compiled, side, found = products(), torch.cuda.Stream(), []
    inputs = [np.full((4096, 4096), value, F) for value in range(4)]
    compiled.run({"x": inputs[0]})
    with torch.cuda.stream(side):
        for x in inputs:
            compiled.run_slots([x])
            y = torch.from_dlpack(compiled.outputs_view()[0])
            torch.cuda._sleep(SLEEP // 4)
            found.append(y.clone())
    torch.cuda.synchronize()
    assert [y.unique().tolist() for y in found] == [[1], [2], [3], [4]]


@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_cupy_and_jax_read_outputs_after_the_run_that_makes_them(library: str) -> None:
    module, compiled = pytest.importorskip(library), products()
    compiled.run({"x": np.zeros((4096, 4096), F)})
    compiled.run_slots([np.ones((4096, 4096), F)])
    (view,) = compiled.outputs_view()
    if library == "cupy":
        with module.cuda.Stream(non_blocking=True):
            found = module.asnumpy(module.from_dlpack(view) * 1)
    else:
        found = np.asarray(module.dlpack.from_dlpack(view) * 1)
    assert (found == 2).all()


def test_memory_of_torch_is_kept_until_it_has_been_read() -> None:
    torch = _torch()
    compiled, small = products(), scaled()
    compiled.run({"x": np.zeros((4096, 4096), F)})
    for value in (3.0, 4.0):
        compiled.run_slots([compiled.input_view("x")])  # some milliseconds
        small.run_slots([torch.full((N,), value, device="cuda")])
        torch.full((N,), -1.0, device="cuda")  # torch gives it the memory of the one before, if that is free
        assert (np.asarray(small.outputs_view()[0]) == value).all()


def test_a_bound_tensor_is_found_where_it_lies_now() -> None:
    torch, compiled = _torch(), scaled()
    x = torch.full((N,), 2.0, device="cuda")
    call = compiled.bound([x])
    assert (np.asarray(call()[0]) == 2).all()
    x.fill_(3)
    assert (np.asarray(call()[0]) == 3).all()
    x.data = torch.full((N,), 4.0, device="cuda")
    assert (np.asarray(call()[0]) == 4).all()
    x.data = torch.zeros(3, device="cuda")
    with pytest.raises(InputShapeError):
        call()


def test_host_arrays_may_change_as_soon_as_a_run_is_queued() -> None:
    g = rlx.Graph("both")
    large, small = g.input("large", (3 << 20,), "f32"), g.input("small", (4,), "f32")
    g.set_outputs([large + 1.0, small + 1.0])
    compiled, busy = rlx.Session("cuda").compile(g), products()
    a, b = np.zeros(3 << 20, F), np.zeros(4, F)
    compiled.run_slots([a, b])
    busy.run({"x": np.zeros((4096, 4096), F)})
    for value in range(5):
        busy.run_slots([busy.input_view("x")])  # some milliseconds
        a[...], b[...] = value, value
        compiled.run_slots([a, b])
        a[...], b[...] = -1, -1
        found = compiled.outputs_view()
        assert (np.asarray(found[0]) == value + 1).all() and (np.asarray(found[1]) == value + 1).all()


@pytest.mark.parametrize("size", [3, 70_000, 5 << 20])
def test_a_pipeline_gives_what_single_runs_give(size: int) -> None:
    g = rlx.Graph("steps")
    x, h = g.input("x", (size,), "f32"), g.handle(rlx.BufferHandle("h", (size,), "f32"))
    g.assign(h, h * 0.5 + x)
    g.set_outputs([h + x, rlx.sum(x)])
    first, second = (rlx.Session("cuda").compile(g) for _ in range(2))
    rng = np.random.default_rng(0)
    sets = [{"x": rng.standard_normal(size).astype(F)} for _ in range(12)]
    for found, given in zip(first.run_pipelined(sets), sets, strict=True):
        for a, b in zip(found, second.run(given), strict=True):
            np.testing.assert_array_equal(a, b)


def test_arrays_that_do_not_fit_are_refused_with_advice() -> None:
    torch, compiled = _torch(), scaled()
    for given, error, match in (
        (torch.zeros(2 * N, device="cuda")[::2], TransferError, "contiguous"),
        (torch.zeros(N, device="cuda", dtype=torch.float64), InputDTypeError, "float32"),
        (torch.zeros(N // 2, 2, device="cuda"), InputShapeError, "dims"),
    ):
        with pytest.raises(error, match=match):
            compiled.run({"x": given})
    compiled.run({"x": torch.zeros(N)})  # type: ignore[dict-item]  one of the host is copied
    compiled.run({"x": torch.zeros(N, device="cuda", requires_grad=True)})  # a Parameter is read as it is

"""Memory of a GPU: what is stated is what is taken, runs take none, and every allocation may be refused without a loss."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from fake_cuda import GRANULE, FakeDriver, Status, installed
from small_models import VOCAB, make

import rlx
from rlx.backends.cuda import regions
from rlx.backends.cuda.gpu import check, gpu, refusal
from rlx.errors import DeviceError, MissingParamError, OutOfMemoryError, TransferError
from rlx.frontends.language import load
from rlx.frontends.sampling import Sampling

F = np.float32
GRANULARITY = 2 << 20  # of the driver's allocator
OF_ALL = "the driver counts the memory of all processes, and other workers of the tests use the GPU"
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason=OF_ALL)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    with installed(made, monkeypatch):
        yield made


def graph(size: int) -> rlx.Graph:
    """h += x * w, an index that may be wrong, a weight that is prepared, and a constant."""
    g = rlx.Graph("all regions")
    x, w, h = g.input("x", (size, 32), "f32"), g.param("w", (32, 32), "f32"), g.handle(rlx.BufferHandle("h", (size, 32), "f32"))
    scale, i = g.param("scale", (size, 32), "f32"), g.input("i", (), "i32")
    y = rlx.softmax(x @ w + h) * rlx.exp(scale)
    g.assign(h, h + x)
    g.set_outputs([y, rlx.gather(g.constant(np.arange(40, dtype=F)), i)])
    return g


def filled(size: int) -> rlx.CompiledGraph:
    compiled = rlx.Session("cuda").compile(graph(size))
    compiled.set_params({"w": np.eye(32, dtype=F), "scale": np.zeros((size, 32), F)})
    compiled.run(given(size))
    return compiled


def given(size: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((size, 32), F), "i": np.array(7, np.int32)}


# -- refused ---------------------------------------------------------------------------------------------------------


def _switch(compiled: rlx.CompiledGraph) -> None:
    here = compiled.handles
    compiled.use_handles(rlx.runtime.HandleStore())
    compiled.use_handles(here)


USES: dict[str, Callable[[rlx.CompiledGraph], object]] = {
    "another executable": lambda c: filled(6),
    "on the same weights and states": lambda c: rlx.Session("cuda").compile(graph(5), params=c.params, handles=c.handles),
    "weights": lambda c: c.set_params({"w": np.eye(32, dtype=F), "scale": np.zeros((5, 32), F)}),
    "clone": lambda c: c.clone(),
    "forks": lambda c: c.fork_handles(3),
    "snapshot": lambda c: c.restore_handles(c.snapshot_handles()),
    "another store": _switch,
    "runs": lambda c: (c.run_slots(list(given(5).values())), c.bound(given(5))(), c.restore_handles(c.snapshot_handles())),
}


@pytest.mark.parametrize("name", USES)
def test_each_allocation_may_be_refused_and_nothing_is_lost(name: str, driver: FakeDriver) -> None:
    for grants in count():
        compiled = filled(5)
        store, want = compiled.handles, compiled.handles.read("h")
        gc.collect()
        driver.run()
        free, driver.grants = driver.free, grants
        try:
            USES[name](compiled)
        except OutOfMemoryError as e:
            assert "no room" in str(e) or "bytes" in str(e)
        else:
            break
        finally:
            driver.grants = None
        if name != "runs":
            np.testing.assert_array_equal(compiled.handles.read("h"), want)
        gc.collect()
        driver.run()
        assert compiled.handles is store and (driver.free == free or name == "runs"), f"{free - driver.free} bytes after {grants}"
        if compiled.missing_params():
            assert name == "weights"
            with pytest.raises(MissingParamError):
                compiled.run(given(5))
            USES[name](compiled)  # the same again
        compiled.bind_handle("h", want)
        (y, picked), reference = compiled.run(given(5)), filled(5)
        reference.bind_handle("h", want)
        np.testing.assert_array_equal(y, reference.run(given(5))[0])
        assert picked == 7 and (compiled.read_handle("h") == want + 1).all()
        compiled.use_handles(rlx.runtime.HandleStore())
        assert compiled.run(given(5))[1] == 7 and (compiled.read_handle("h") == 1).all() and (store.read("h") == want + 1).all()
    assert grants or name == "weights"


def test_buffers_are_copied_to_a_gpu_and_back_and_given_back(driver: FakeDriver) -> None:
    rlx.Session("cuda")
    array = np.arange(6, dtype=F).reshape(2, 3)
    free, there = driver.free, rlx.driver.Buffer.from_numpy(array.T, "cuda")
    assert not there.is_host and free - driver.free == array.nbytes
    for found in (there.to_host(), there.to_device("cpu").numpy(), there.to_device("cpu").to_device("cuda:0").to_host()):
        np.testing.assert_array_equal(found, array.T)
    with pytest.raises(TransferError, match="not in host memory"):
        np.asarray(there)
    with pytest.raises(OutOfMemoryError, match="no room for f32.*, 17179869184 bytes|cuda:0: allocating 17179869184 bytes"):
        rlx.driver.Buffer.empty((1 << 32,), "f32", "cuda")
    there.release()
    gc.collect()
    driver.run()
    assert driver.free == free


def test_a_piece_that_no_kernel_may_read_is_given_back(driver: FakeDriver) -> None:
    rlx.Session("cuda")
    region, live, free = regions.Region(gpu(0), 4 * GRANULE, GRANULE), gpu(0).allocated["live_bytes"], driver.free
    driver.answers["cuMemSetAccess"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="changing the memory of experts"):
        region.hold(1)
    driver.answers.clear()
    assert (region.held, gpu(0).allocated["live_bytes"], driver.free) == (0, live, free) and not driver.mapped
    region.hold(1)
    assert (region.held, gpu(0).allocated["live_bytes"], driver.free) == (GRANULE, live + GRANULE, free - GRANULE)
    region.free()


def test_memory_of_experts_that_is_cut_may_be_wanted_by_another_thread(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlx.Session("cuda")
    region = regions.Region(gpu(0), 2 * GRANULE, GRANULE)
    region.hold(2 * GRANULE)
    thread, unmap = threading.Thread(target=region.hold, args=(2 * GRANULE,)), regions._unmap

    def slow(*args: Any) -> None:
        thread.start()
        thread.join(0.1)  # it maps these addresses again, or waits
        unmap(*args)

    with monkeypatch.context() as within:
        within.setattr(regions, "_unmap", slow)
        region.cut(GRANULE)
        thread.join()
    assert region.held == 2 * GRANULE == sum(driver.mapped.values())
    region.free()


# -- taken -----------------------------------------------------------------------------------------------------------


def taken(compiled: rlx.CompiledGraph) -> int:
    """Bytes that are stated, without code, which the driver keeps apart."""
    stated = compiled._executable.memory()
    assert all(stated[name] > 0 for name in ("arena", "scratch", "params", "prepared", "constants", "handles", "code")), stated
    return sum(n for name, n in stated.items() if name != "code")


def test_all_that_is_allocated_is_stated(driver: FakeDriver) -> None:
    before = dict(gpu(0).allocated)
    compiled = filled(1000)
    own = 16  # the account of failures of the store
    ring = compiled._executable.ring.table.nbytes
    assert gpu(0).allocated["live_bytes"] - before["live_bytes"] == taken(compiled) + own + ring


@on_gpu
def test_no_room_on_a_gpu_is_an_error_and_leaves_what_was_there() -> None:
    compiled = filled(8)
    want, whole = compiled.handles.read("h"), int(check(gpu(0).driver.cuDeviceTotalMem(gpu(0).device), "asking for memory"))
    for too_much in (lambda: rlx.driver.Buffer.empty((whole + 1,), "u8", "cuda"), lambda: filled(whole // (32 * 4))):
        with pytest.raises(OutOfMemoryError, match="no room"):
            too_much()
    np.testing.assert_array_equal(compiled.handles.read("h"), want)
    assert compiled.run(given(8))[1] == 7 and (compiled.handles.read("h") == want + 1).all()


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "bool", "c64"])
def test_buffers_on_a_gpu(dtype: str) -> None:
    rlx.Session("cuda")
    array = np.arange(2 * 3 * 70_001).reshape(3, -1).astype(rlx.ir.as_dtype(dtype).numpy)
    there = rlx.driver.Buffer.from_numpy(array.T, "cuda")
    assert there.to_host().tobytes() == there.to_device("cpu").to_device("cuda").to_host().tobytes() == array.T.tobytes()
    there.write(np.zeros_like(array.T))
    assert not there.to_host().view(np.uint8).any()


def test_code_is_unloaded_with_the_last_executable_and_graph(driver: FakeDriver) -> None:
    for _ in range(3):
        compiled = filled(5)
        twin = compiled.clone()
        call = compiled.bound(given(5))
        call()
        del compiled
        gc.collect()
        before = driver.calls["cuModuleUnload"]
        assert call()[1] == 7 and twin.run(given(5))[1] == 7
        assert driver.calls["cuModuleUnload"] == before < driver.calls["cuModuleLoadData"]
        del twin, call
        gc.collect()
        assert driver.calls["cuModuleUnload"] == driver.calls["cuModuleLoadData"] - 1  # that of short reads stays
        assert driver.calls["cuGraphExecDestroy"] == driver.calls["cuGraphInstantiate"]


def free_bytes() -> int:
    """Of the GPU, by its driver."""
    here = gpu(0)
    here.wait()
    return int(check(here.driver.cuMemGetInfo(), "asking for free memory")[0])


@on_gpu
@alone
def test_the_driver_takes_what_is_stated() -> None:
    held = filled(8)  # context, code and pools of small allocations
    before, counted = free_bytes(), gpu(0).allocated["count"]
    compiled = filled(1 << 20)  # about 600 MB
    allocations = gpu(0).allocated["count"] - counted
    assert abs(before - free_bytes() - taken(compiled)) <= GRANULARITY * (allocations + 1), compiled._executable.memory()
    del compiled
    gc.collect()
    assert abs(before - free_bytes()) <= GRANULARITY * (allocations + 1)
    assert held.run(given(8))[1] == 7


@on_gpu
@alone
def test_executables_that_end_leave_nothing_behind() -> None:
    for _ in range(5):
        filled(8).clone().bound(given(8))()
    gc.collect()
    before = free_bytes()
    for _ in range(100):
        filled(8).clone().bound(given(8))()
        gc.collect()
    assert free_bytes() >= before


@on_gpu
@alone
def test_runs_leave_the_driver_s_memory_as_it_is() -> None:
    compiled = filled(64)
    inputs = list(given(64).values())
    call = compiled.bound(inputs)
    for _ in range(70):  # more than a ring holds
        compiled.run_slots(inputs)
        call()
    before = free_bytes(), compiled.allocations().native_count
    for _ in range(2000):
        compiled.run_slots(inputs)
        call()
    assert (free_bytes(), compiled.allocations().native_count) == before


@on_gpu
def test_a_thousand_tokens_take_no_memory_and_are_the_same_again(tmp_path) -> None:
    pytest.importorskip("transformers")
    make("gemma3", tmp_path, seed=4, gain=4.0, max_position_embeddings=1100)
    found = []
    for _ in range(2):
        model, how = load(tmp_path, capacity=1040, session=rlx.Session("cuda")), Sampling()
        decoding = model.decoding(how, seed=0)
        prompt = np.random.default_rng(0).integers(0, VOCAB, 8).tolist()
        tokens = [decoding.first(prompt), *(decoding.next() for _ in range(3))]
        compiled, executables = model.executable(1, how.steps), len(model._compiled)
        before = compiled.allocations(), free_bytes()
        tokens += [decoding.next() for _ in range(1000)]
        after = compiled.allocations(), free_bytes()
        assert len(model._compiled) == executables and model.position == 1011
        assert (after[0].native_count, after[0].native_live_bytes) == (before[0].native_count, before[0].native_live_bytes)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            assert after[1] == before[1]
        found.append(tokens)
    assert found[0] == found[1] and len(set(found[0])) >= 10

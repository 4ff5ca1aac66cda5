"""The CUDA executable on a driver without a GPU (fake_cuda): runs that end later, failures, and what a driver may answer."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_conformance as conformance
import expert_graphs
import numpy as np
import pytest
from explain_pages import report_in
from fake_cuda import FakeDriver, Status, installed

import rlx
from rlx import knobs
from rlx.backends import available
from rlx.backends.cuda import backend, staging
from rlx.backends.cuda.backend import memory_of
from rlx.backends.cuda.schedule import ALONE
from rlx.cli import show
from rlx.compiler import lower
from rlx.driver.stream import Pending
from rlx.errors import (
    DeviceError,
    DeviceUnavailableError,
    IndexRangeError,
    OutOfMemoryError,
)
from rlx.host import disk
from rlx.ir.blocks import FORMATS
from rlx.ir.evaluate import evaluate
from rlx.ir.ops.quant import random_weights

F = np.float32


@pytest.mark.parametrize("name", [n for n, _ in conformance.checks("cuda") if not n.startswith(("op ", "ranks"))])
def test_it_conforms(name: str, driver: FakeDriver) -> None:
    """But for ranks: its one stream would wait for itself if several threads used it."""
    dict(conformance.checks("cuda"))[name]()


def test_functions_compiled_for_it_return_fresh_arrays(driver: FakeDriver) -> None:
    f = rlx.jit(lambda x, y: (x + y, x * y), device="cuda")
    x, y = np.arange(16, dtype=F), np.full(16, 2, F)
    found = [f(x + F(i), y) for i in range(3)]
    assert [float(a[0]) for a, _ in found] == [2, 3, 4] and all((b == (x + F(i)) * y).all() for i, (_, b) in enumerate(found))


@pytest.mark.parametrize("shared", [0, ALONE])
def test_all_kernels_divide_a_multiprocessor_alike_where_blocks_share_it(shared: int, driver: FakeDriver) -> None:
    g = rlx.Graph("two")
    x = g.input("x", (8,), "f32")
    g.set_outputs([rlx.exp(rlx.cumsum(x))])
    made = backend.CudaBackend()
    artifact = made.compile(lower(g, made.target(), rlx.CompileOptions()))
    steps = [replace(code, shared=shared) for code in artifact.coded["steps"]]
    made.load(replace(artifact, coded={**artifact.coded, "steps": steps}))
    carved = {name for name, what in driver.attributes if what.endswith("CARVEOUT")}
    assert carved == ({*backend.SUPPORT, *(code.name for code in steps)} if shared else set())


@pytest.mark.parametrize("form", FORMATS)
def test_weights_in_panels_of_quantised_blocks_are_decoded(form: str, driver: FakeDriver) -> None:
    """By the fake driver, run after run; joined ones, and those of groups, too."""
    g = rlx.Graph("product")
    x = g.input("x", (3, 256), "f32")
    left, right = (g.param(name, (40, FORMATS[form].row_bytes(256)), "u8") for name in ("left", "right"))
    y = rlx.silu(rlx.dequant_matmul(x, left, format=form)) * rlx.dequant_matmul(x, right, format=form)
    grouped = expert_graphs.block(g, x, "layer", 4, 2, 256, "f32", form)
    g.set_outputs([y, grouped])
    params, rng = expert_graphs.data(g), np.random.default_rng(1)
    for weights in (w for w in params.values() if w.dtype == np.uint8):
        random_weights(FORMATS[form])(rng, [weights, weights])
    given = rng.standard_normal((3, 256)).astype(F)
    want = evaluate(g, {"x": given}, params)[0]
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_params(params)
    found = [compiled.run({"x": given}) for _ in range(3)]
    for run in found:
        for a, b, wanted in zip(run, found[0], want, strict=True):
            np.testing.assert_allclose(a, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
            assert a.tobytes() == b.tobytes()


def picker(store: rlx.runtime.HandleStore | None = None) -> rlx.CompiledGraph:
    """total += table[i]. Rows past 3 are an IndexRangeError."""
    g = rlx.Graph("picker")
    table, i = g.constant(np.arange(4, dtype=F) + 1), g.input("i", (), "i32")
    total = g.handle(rlx.BufferHandle("total", (), "f32"))
    row = rlx.gather(table, i)
    g.assign(total, total + row)
    g.set_outputs([total + row])
    return rlx.Session("cuda").compile(g, handles=store)


def test_a_state_read_later_is_that_behind_the_runs_queued_before(driver: FakeDriver) -> None:
    """Several reads under way at once, finished in any order; their memory is used again."""
    compiled = picker()
    for _ in range(2):
        compiled.bind_handle("total", np.zeros((), F))
        reads = []
        for i in (0, 1, 2, 3):
            compiled.run_slots([at(i)["i"]])
            reads.append(compiled.handles.read_later("total"))
        assert [float(reads[n]()) for n in (2, 0, 3, 1)] == [6, 1, 10, 3]


def test_memory_of_a_read_that_nobody_waits_for_stays_until_the_gpu_has_written_it(driver: FakeDriver) -> None:
    compiled = picker()
    compiled.run_slots([at(0)["i"]])
    compiled.handles.read_later("total")()
    pinned = len(driver.pinned)
    for _ in range(3):  # the first takes the memory of the read before, the others are not executed yet
        compiled.run_slots([at(0)["i"]])
        compiled.handles.read_later("total")
    assert len(driver.pinned) == pinned + 2
    assert compiled.read_handle("total") == 4
    for _ in range(3):
        compiled.handles.read_later("total")()
    assert len(driver.pinned) == pinned + 2


def at(i: int) -> dict[str, np.ndarray]:
    return {"i": np.array(i, np.int32)}


def rows() -> rlx.CompiledGraph:
    """h[at] = x in place, and then a lookup that may fail."""
    g = rlx.Graph("rows")
    h, x = g.handle(rlx.BufferHandle("h", (8, 4), "f32")), g.input("x", (1, 4), "f32")
    row, i = g.input("at", (), "i32"), g.input("i", (), "i32")
    new = rlx.update_rows(h, x, row)
    g.assign(h, new)
    g.set_outputs([rlx.sum(new), rlx.gather(g.constant(np.arange(4, dtype=F)), i)])
    return rlx.Session("cuda").compile(g)


def row(value: float, row: int, i: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 4), value, F), "at": np.array(row, np.int32), "i": np.array(i, np.int32)}


def test_runs_behind_a_failed_one_change_no_state_of_any_executable_on_the_store(driver: FakeDriver) -> None:
    first = picker()
    second = picker(first.handles)
    for compiled, i in ((first, 1), (first, 9), (first, 2), (second, 3)):
        compiled.commit_no_wait(at(i))
    with pytest.raises(IndexRangeError, match="queued run 1 of 4.*the 2 behind it were not run"):
        first.sync_pending()
    assert first.read_handle("total") == 2
    first.commit_no_wait(at(3))
    second.run(at(0))
    assert first.read_handle("total") == 7


def test_other_threads_use_the_gpu_while_one_records_its_run(driver: FakeDriver) -> None:
    memory, gpu = memory_of(0), memory_of(0).gpu
    ours, theirs = memory.allocate(4), memory.allocate(4)

    def launch() -> None:
        gpu.fill(ours.address, 1, 4)
        other = threading.Thread(target=lambda: gpu.fill(theirs.address, 2, 4))
        other.start()
        other.join()

    def found(block: Any) -> list[int]:
        memory.copy_out(block, bytes_ := np.zeros(4, np.uint8))
        return bytes_.tolist()

    graph = gpu.recorded(launch)
    assert (found(ours), found(theirs)) == ([0] * 4, [2] * 4)
    memory.fill(theirs, 3)
    gpu.replay(graph)
    assert (found(ours), found(theirs)) == ([1] * 4, [3] * 4)


def test_a_failed_run_is_undone_with_what_it_saved_whatever_was_queued_behind_it(driver: FakeDriver) -> None:
    compiled = rows()
    assert compiled.program().abort
    for given in (row(1, 0), row(2, 1), row(3, 1, 7), *(row(9, k) for k in range(5))):
        compiled.commit_no_wait(given)
    with pytest.raises(IndexRangeError, match="queued run 2 of 8: .* in gather"):
        compiled.sync_pending()
    want = np.zeros((8, 4), F)
    want[0], want[1] = 1, 2
    np.testing.assert_array_equal(compiled.read_handle("h"), want)
    for bad in (row(5, 8), row(5, -1), row(6, 2, 4)):
        with pytest.raises(IndexRangeError):
            compiled.run(bad)
        np.testing.assert_array_equal(compiled.read_handle("h"), want)
    total, found = compiled.run(row(4, 3, 2))
    assert (total, found) == (28, 2)


def test_a_run_that_cannot_fail_is_not_waited_for(driver: FakeDriver) -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (3,), "f32") + 1.0])
    compiled = rlx.Session("cuda").compile(g)
    for _ in range(2):
        compiled.run_slots([np.zeros(3, F)])
    driver.calls.clear()
    for i in range(10):
        compiled.run_slots([np.full(3, i, F)])
    assert driver.calls == {"cuGraphLaunch": 10, "cuCtxSetCurrent": 10}
    assert compiled.outputs_view()[0].numpy().tolist() == [10, 10, 10]
    call = compiled.bound([given := np.zeros(3, F)])
    for i in range(200):  # more than the ring holds
        given[...] = i
        (out,) = call()
        if i % 90 == 0:
            assert out.numpy().tolist() == [i + 1] * 3


def test_the_status_of_a_run_arrives_later(driver: FakeDriver) -> None:
    compiled = picker()
    compiled.run(at(0))
    later = compiled._executable.run()
    assert isinstance(later, Pending) and not later.done()
    later.wait()
    assert later.done() and compiled.read_handle("total") == 2


def test_every_run_of_a_pipeline_keeps_its_outputs(driver: FakeDriver) -> None:
    g = rlx.Graph("two")
    x = g.input("x", (3, 5), "f32")
    g.set_outputs([x + 1.0, rlx.sum(x)])
    found = rlx.Session("cuda").compile(g).run_pipelined([{"x": np.full((3, 5), i, F)} for i in range(50)])
    assert all((a == i + 1).all() and b == 15 * i for i, (a, b) in enumerate(found))


@pytest.mark.parametrize("size", [15, 40_000])  # in the ring, and by streams of their own
def test_a_pipeline_waits_only_for_outputs_that_must_make_room(size: int, driver: FakeDriver) -> None:
    g = rlx.Graph("pipe")
    x, h = g.input("x", (size,), "f32"), g.handle(rlx.BufferHandle("h", (size,), "f32"))
    g.assign(h, h + x)
    g.set_outputs([h + x])
    compiled = rlx.Session("cuda").compile(g)
    given = np.zeros(size, F)
    compiled.run_pipelined([{"x": given}] * 4)
    driver.calls.clear()
    driver.waited.clear()
    found = compiled.run_pipelined([{"x": np.full(size, i, F)} for i in range(20)])
    assert [a[0][size - 1] for a in found] == np.cumsum(np.arange(20)).tolist()
    assert 7 not in driver.waited and driver.calls["cuMemAlloc"] == driver.calls["cuMemHostAlloc"] == 0


def test_host_arrays_may_change_as_soon_as_a_run_is_queued(driver: FakeDriver) -> None:
    g = rlx.Graph("later")
    large, small = g.input("large", (40_000,), "f32"), g.input("small", (3,), "f32")
    h = g.handle(rlx.BufferHandle("h", (), "f32"))
    g.assign(h, h * 10.0 + rlx.max(large) * 100.0 + rlx.max(small))
    g.set_outputs([h * 1.0])
    compiled, a, b = rlx.Session("cuda").compile(g), np.zeros(40_000, F), np.zeros(3, F)
    for i in range(1, 6):
        a[...], b[...] = i, i + 1
        compiled.run_slots([a, b])
        a[...], b[...] = -1, -1
    assert compiled.read_handle("h") == 12_345 * 100 + 23_456


def test_a_large_array_comes_from_pinned_memory_in_pieces(driver: FakeDriver) -> None:
    size = (2 * staging.PIECES + 3) * staging.PIECE // 4 + 5
    array = np.arange(size, dtype=F)
    g = rlx.Graph("copy")
    g.set_outputs([g.input("x", (size,), "f32") + g.param("w", (1,), "f32")])
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_param("w", np.ones(1, F))
    compiled._executable.write(compiled.program().inputs[0], array)
    np.testing.assert_array_equal(compiled._executable.read(compiled.program().inputs[0]), array)


def test_the_oldest_run_is_waited_for_without_those_behind_it(driver: FakeDriver) -> None:
    compiled = picker()
    compiled.run(at(0))
    first, *_, last = [compiled._executable.run() for _ in range(40)]
    assert isinstance(first, Pending) and isinstance(last, Pending)
    first.wait()
    assert first.done() and not last.done()


def test_states_stay_on_the_device(driver: FakeDriver) -> None:
    """Feeds, updates of rows, forks and snapshots: no copy to or from the host, and no wait."""
    g = rlx.Graph("states")
    x, h, fed = g.input("x", (1, 4), "f32"), *(g.handle(rlx.BufferHandle(n, (8, 4), "f32")) for n in ("h", "fed"))
    new = rlx.update_rows(h, x, g.constant(np.array(2, np.int32)))
    g.assign(h, new)
    g.set_outputs([new + fed])
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_gpu_handle_feed("fed", 0)
    compiled.commit_no_wait({"x": np.ones((1, 4), F)})
    driver.calls.clear()
    for _ in range(3):
        compiled.commit_no_wait({"x": np.ones((1, 4), F)})
    (fork,), snapshot = compiled.handles.fork(1), compiled.handles.snapshot()
    compiled.commit_no_wait({"x": np.ones((1, 4), F)})
    copies = {n: c for n, c in driver.calls.items() if n.startswith("cuMemcpy") or n.endswith("Synchronize")}
    assert copies == {"cuMemcpyDtoDAsync": 4}
    assert compiled.read_handle("fed")[2, 1] == 5  # type: ignore[index]
    assert fork.read("fed")[2, 1] == snapshot.states["fed"][2, 1] == 4


def test_another_extent_is_a_number_on_the_device(driver: FakeDriver) -> None:
    g = rlx.Graph("extent")
    x = g.input("x", ("n", 4), "f32")
    g.set_outputs([rlx.sum(x, axis=0)])
    compiled = rlx.Session("cuda").compile(g, rlx.CompileOptions().bind_extent("n", 8))
    ones = np.ones((8, 4), F)
    compiled.run_slots([ones])
    driver.calls.clear()
    for n in (3, 8, 5):
        compiled.set_active_extent((n, 8))
        compiled.run_slots([ones])
        assert np.asarray(compiled.outputs_view()[0]).tolist() == [n] * 4
    assert not driver.calls["cuGraphInstantiate"] and not driver.calls["cuLaunchKernelEx"]


def test_machine_code_starts_runs_that_may_fail(driver: FakeDriver) -> None:
    compiled, i = picker(), np.array(1, np.int32)
    call = compiled.bound([i])
    for _ in range(3):
        call()
    driver.calls.clear()
    call()
    assert driver.calls == {"cuCtxSetCurrent": 1, "cuGraphLaunch": 1}
    for index in (2, 9, 1, 1):
        i[...] = index
        call()
    with pytest.raises(IndexRangeError, match="queued run 5 of 8: .*the 2 behind it were not run"):
        compiled.sync_pending()
    assert compiled.read_handle("total") == 4 * 2 + 3
    i[...] = 9
    with pytest.raises(IndexRangeError, match="queued run 0 of"):
        for _ in range(200):  # the failure is known long before the last of them
            call()
    i[...] = 0
    call()
    assert compiled.read_handle("total") == 4 * 2 + 3 + 1


def test_a_store_that_was_used_before_has_its_graph(driver: FakeDriver) -> None:
    compiled = picker()
    stores = [compiled.handles, rlx.runtime.HandleStore()]
    for turn in range(6):
        compiled.use_handles(stores[turn % 2])
        if turn == 2:
            driver.calls.clear()
        compiled.run_slots([np.array(turn % 2, np.int32)])
    compiled.sync_pending()
    assert not driver.calls["cuGraphInstantiate"] and [store.read("total") for store in stores] == [3, 6]


def test_machine_code_starts_the_graph_of_the_store_in_use(driver: FakeDriver) -> None:
    g = rlx.Graph("count")
    h = g.handle(rlx.BufferHandle("h", (), "f32"))
    g.assign(h, h + 1.0)
    g.set_outputs([h + 1.0])
    compiled = rlx.Session("cuda").compile(g)
    call = compiled.bound([])
    for _ in range(100):
        call()
    driver.calls.clear()
    call()
    assert driver.calls == {"cuCtxSetCurrent": 1, "cuGraphLaunch": 1}
    first = compiled.handles
    compiled.use_handles(rlx.runtime.HandleStore())
    call()
    assert (first.read("h"), compiled.read_handle("h")) == (101, 1)
    driver.answers["cuGraphLaunch"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="replaying a run: .*lost"):
        call()


def test_another_store_is_used_by_every_part_of_a_run(driver: FakeDriver) -> None:
    """Graphs hold addresses: those of the commit too."""
    compiled = picker()
    compiled._executable.run_steps()
    compiled._executable.run_commit()
    old = compiled.handles
    compiled.use_handles(rlx.runtime.HandleStore())
    compiled._executable.run_steps()
    compiled._executable.run_commit()
    assert compiled.read_handle("total") == 1 and old.read("total") == 1


# -- from the cache on disk


def test_a_program_from_the_cache_runs_without_compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = FakeDriver()
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path)):
        with installed(driver, monkeypatch):
            disk._opened.cache_clear()
            assert picker().report().cache.state == "compiled"
            first = rows()
            first.run(row(1, 0))
        with installed(driver, monkeypatch), monkeypatch.context() as within:  # undone before the driver is
            within.setattr(backend, "compile_kernels", lambda *_: pytest.fail("compiled again"))
            again = rows()
            assert again.report().cache.state == "cached" and again.report().texts == first.report().texts
            with pytest.raises(IndexRangeError):
                again.run(row(6, 2, 4))
            assert not again.read_handle("h").any() and again.run(row(2, 1))[0] == 8  # type: ignore[union-attr]
    disk._opened.cache_clear()


def test_an_artifact_that_is_not_whole_is_refused(driver: FakeDriver) -> None:
    compiled = rows()
    artifact, made = compiled._executable.artifact, backend.CudaBackend()  # type: ignore[attr-defined]
    head, parts = made.to_parts(artifact)
    read = lambda **changed: made.from_parts(artifact.program, head | changed, parts, dict)  # noqa: E731
    assert read().launches == artifact.launches
    assert {c.name: (c.more, c.cubin) for c in read().codes} == {c.name: (c.more, c.cubin) for c in artifact.codes}
    (name, sizes, *rest), *others = head["codes"]
    for changed in (
        {"launches": {**artifact.launches, "steps": artifact.launches["steps"][1:]}},
        {"launches": {**artifact.launches, "commit": ((0,),)}}, {"coded": head["coded"] | {"steps": [1]}}, {"codes": others},
        {"codes": [[name, [-1, *sizes[1:]], *rest], *others]}, {"codes": [[name, sizes, [["halt", "x"]], *rest[1:]], *others]},
    ):  # fmt: skip
        with pytest.raises((ValueError, IndexError)):
            read(**changed)


def test_keys_of_the_cache_cover_the_headers_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], os.open
    monkeypatch.setattr(disk.os, "open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    disk.source_digest.__wrapped__()
    assert {Path(p).name for p in opened} >= {"attention.h", "prelude.h", "support.h", "c_prelude.h", "executable.py"}


# -- what a driver may answer --------------------------------------------------------------------------------------


def plus(size: int = 1 << 16) -> rlx.Graph:
    g = rlx.Graph("plus")
    g.set_outputs([g.input("x", (size,), "f32") + g.param("w", (size,), "f32")])
    return g


@pytest.mark.parametrize("nbytes,copies,refused", [
    (staging.SHORT, 0, "cuLaunchKernel"), (staging.SHORT + 4, 1, "cuMemcpyDtoHAsync"),
    (staging.SHORT + 4, 1, "cuStreamSynchronize"),
])  # fmt: skip
def test_little_memory_is_told_by_a_kernel_and_more_is_copied(
    nbytes: int, copies: int, refused: str, driver: FakeDriver
) -> None:
    compiled = rlx.Session("cuda").compile(plus(nbytes // 4))
    compiled.set_param("w", np.ones(nbytes // 4, F))
    x = np.arange(nbytes // 4, dtype=F)
    compiled.run_slots([x])
    free = driver.free
    driver.calls.clear()
    for n in range(3):
        compiled.run_slots([x + n])
        np.testing.assert_array_equal(compiled.outputs_view()[0].numpy(), x + n + 1)
    assert (driver.calls["cuLaunchKernel"], driver.calls["cuMemcpyDtoHAsync"]) == (3 - 3 * copies, 3 * copies)
    assert driver.free == free and not driver.calls["cuMemHostAlloc"]
    driver.answers[refused] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS.*lost"):
        compiled.outputs_view()[0].numpy()


def test_threads_that_read_at_once_get_their_own_bytes(driver: FakeDriver) -> None:
    rlx.Session("cuda").compile(plus())
    gpu = memory_of(0).gpu
    places = [gpu.allocate(64) for _ in range(4)]
    for n, place in enumerate(places):
        gpu.fill(place, n + 1, 64)
    found = np.zeros((4, 20, 64), np.uint8)

    def read(n: int) -> None:
        for to in found[n]:
            gpu.copy_out(to, places[n])

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found == np.arange(1, 5)[:, None, None]).all()


def test_no_room_is_an_error_and_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(memory=2 << 20)
    with installed(driver, monkeypatch):
        compiled = rlx.Session("cuda").compile(plus())
        compiled.set_param("w", np.ones(1 << 16, F))
        free = driver.free
        with pytest.raises(OutOfMemoryError, match="no room"):
            rlx.Session("cuda").compile(plus(1 << 18))
        assert driver.free == free
        assert compiled.run({"x": np.ones(1 << 16, F)})[0][7] == 2


def test_a_lost_gpu_is_an_error_that_says_so(driver: FakeDriver) -> None:
    compiled = picker()
    driver.answers["cuStreamQuery"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS.*lost.*new process"):
        compiled.run(at(0))
    driver.answers["cuGraphLaunch"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="replaying a run: .*lost"):
        compiled.run(at(0))


EVERY_PART = (  # of a driver that loading, runs and reading call
    "cuStreamCreate", "cuMemAlloc", "cuMemHostAlloc", "cuMemsetD8Async", "cuModuleLoadData",
    "cuModuleGetFunction", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuStreamBeginCapture", "cuLaunchKernelEx",
    "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphLaunch", "cuStreamQuery",
)  # fmt: skip


@pytest.mark.parametrize("part", EVERY_PART)
def test_whatever_fails_on_a_lost_gpu_is_an_error_of_ours(part: str, driver: FakeDriver) -> None:
    compiled = [picker()]

    def all_of_it() -> None:
        compiled.append(picker())
        compiled[-1].run(at(1))
        compiled[-1].read_handle("total")

    driver.answers[part] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS.*lost.*new process"):
        all_of_it()
    del driver.answers[part]
    compiled[0].run(at(1))  # the Python side is as it was
    assert compiled[0].read_handle("total") == 2


class NoLibrary(FakeDriver):
    def cuInit(self, flags: int) -> tuple[Any, ...]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")


@pytest.mark.parametrize("make,match", [
    (NoLibrary, "no NVIDIA driver is installed"),
    (lambda: None, r"pip install rlx\[cuda\]"),
    (lambda: FakeDriver(devices=()), "no NVIDIA GPU"),
    (lambda: FakeDriver(devices=(75,)), r"compute capability is 7.5; rlx needs 8.0"),
])  # fmt: skip
def test_a_machine_that_cannot_says_why(make, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(make(), monkeypatch):
        assert not rlx.is_available("cuda")
        with pytest.raises(DeviceUnavailableError, match=match):
            rlx.Session("cuda")


def test_a_gpu_opens_while_the_host_does_other_things(driver: FakeDriver) -> None:
    opening, go, retain = threading.Event(), threading.Event(), driver.cuDevicePrimaryCtxRetain

    def slow(device: int) -> tuple[Any, ...]:
        opening.set()
        assert go.wait(60)
        return retain(device)

    driver.cuDevicePrimaryCtxRetain = slow  # type: ignore[method-assign]
    session = rlx.Session("cuda")
    assert opening.wait(60)
    go.set()
    assert session.compile(plus()).missing_params() == ["w"]


def test_a_gpu_that_does_not_open_is_an_error_of_its_first_use(driver: FakeDriver) -> None:
    driver.answers["cuDevicePrimaryCtxRetain"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    session = rlx.Session("cuda")
    with pytest.raises(OutOfMemoryError, match="opening a context"):
        session.compile(plus())


def test_a_driver_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.answers["cuInit"] = Status.CUDA_ERROR_NO_DEVICE
    with installed(driver, monkeypatch), pytest.raises(DeviceUnavailableError, match="NO_DEVICE"):
        rlx.Session("cuda")


def test_the_list_of_devices_names_the_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with installed(FakeDriver(devices=(90, 75), memory=80 << 30), monkeypatch):
        show.devices()
    text = " ".join(capsys.readouterr().out.split())
    assert "Fake GPU, 80 GiB" in text and "capability 9.0" in text and "7.5" in text


def test_several_gpus_have_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(FakeDriver(devices=(90, 75, 90)), monkeypatch):
        found = available()
        assert found["cuda:0"] is None and found["cuda:2"] is None and "compute capability" in str(found["cuda:1"])
        compiled = rlx.Session("cuda:2").compile(plus())
        assert str(compiled.device) == "CUDA:2" and memory_of(2).gpu.index == 2
        with pytest.raises(DeviceUnavailableError, match=r"no such index|there is no cuda:3"):
            rlx.Session("cuda:3")


def test_steps_are_measured_by_events(driver: FakeDriver) -> None:
    """Two steps that share a launch have its time in common; what follows them has its own; states are as before."""
    g = rlx.Graph("measured")
    x, total = g.input("x", (64,), "f32"), g.handle(rlx.BufferHandle("total", (64,), "f32"))
    y, z = rlx.cumsum(x, axis=0), rlx.sort(x)[0]
    g.assign(total, total * 0.5 + y)
    g.set_outputs([rlx.cumsum(y + z, axis=0)])
    compiled = rlx.Session("cuda").compile(g)
    ones = np.ones(64, F)
    compiled.bind_handle("total", 4 * ones)
    found = compiled.profile(ones, runs=3)
    program = compiled.program()
    assert len(found.steps) == len(program.steps) + len(program.commit)
    spans = found.timeline.spans
    assert sorted(spans[:, 0].tolist()) == list(range(len(found.steps)))  # each once
    launches = compiled._executable.run_launches()  # type: ignore[attr-defined]
    assert len({(a, b) for a, b in spans[:, 2:].tolist()}) <= len(launches)
    assert (spans[:, 2] <= spans[:, 3]).all() and spans[:, 3].max() == found.timeline.end
    assert sum(s.seconds for s in found.steps) + found.overhead_seconds == pytest.approx(found.seconds)
    assert (compiled.read_handle("total") == 4).all()
    (out,) = compiled.run({"x": ones})
    assert np.allclose(out, np.cumsum(np.cumsum(ones) + ones)) and (compiled.read_handle("total") == 2 + np.cumsum(ones)).all()


def test_a_measured_run_that_fails_is_undone_and_its_events_go(driver: FakeDriver) -> None:
    compiled = rows()
    compiled.bind_handle("h", np.full((8, 4), 3, F))
    good = {d.name: np.zeros(d.shape.static, d.dtype.numpy) for d in compiled.inputs}
    assert compiled.profile(good, runs=1).steps
    gc.collect()
    assert not driver.passed and driver.calls["cuEventDestroy"] > 0
    bad = {name: a + 100 if a.dtype.kind == "i" else a for name, a in good.items()}
    with pytest.raises(rlx.errors.IndexRangeError):
        compiled.profile(bad, runs=1)
    assert (compiled.read_handle("h") == 3).all()


def test_a_page_of_a_gpu_has_times_and_no_threads(driver: FakeDriver, tmp_path: Path) -> None:
    g = rlx.Graph("page")
    g.set_outputs([rlx.softmax(g.input("x", (8, 64), "f32"))])
    compiled = rlx.Session("cuda").compile(g)
    compiled.explain(tmp_path / "page.html", compiled.profile(runs=1))
    text = (tmp_path / "page.html").read_text()
    found = report_in(text)
    assert found["profile"]["roofline"] is None and found["profile"]["steps"][0]["share"] is None
    assert found["machine"].startswith("a GPU") or "compute capability" in found["machine"]
    assert f"on {found['device']}, {found['machine']}</p>" in text

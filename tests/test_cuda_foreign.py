"""Arrays of other libraries on a driver without a GPU (fake_cuda): read where they lie, in order with their streams."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, words
from test_cuda_executable import plus

import rlx
from rlx import knobs
from rlx.backends.cuda.backend import memory_of
from rlx.backends.cuda.dlpack import from_capsule, to_capsule
from rlx.driver.foreign import DeviceArray
from rlx.errors import InputDTypeError, InputShapeError, TransferError

F = np.float32


class Tensor:
    """An array of another library, with DLPack or only `__cuda_array_interface__`. `streams`: those it was asked to order."""

    def __init__(self, driver: FakeDriver, array: np.ndarray, place: tuple[int, int] = (2, 0)) -> None:
        status, self.address = driver.cuMemAlloc(array.nbytes)
        assert status == 0
        self.shape, self.dtype, self.place, self.streams = array.shape, array.dtype, place, list[int]()
        self.fill(array)

    def fill(self, array: np.ndarray) -> None:
        ctypes.memmove(self.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: int) -> object:
        self.streams.append(stream)
        return to_capsule(DeviceArray(self.address, self.shape, self.dtype, self), *self.place)


class Interface:
    def __init__(self, tensor: Tensor, **more: object) -> None:
        where = {"shape": tensor.shape, "typestr": tensor.dtype.str, "data": (tensor.address, False), "version": 3}
        self.__cuda_array_interface__ = where | more


def scaled() -> rlx.CompiledGraph:
    """(x + h) * w, and h becomes that."""
    g = rlx.Graph("scaled")
    x, w, h = g.input("x", (4, 5), "f32"), g.param("w", (4, 5), "f32"), g.handle(rlx.BufferHandle("h", (4, 5), "f32"))
    y = (x + h) * w
    g.assign(h, y)
    g.set_outputs([y])
    return rlx.Session("cuda").compile(g)


def test_arrays_of_a_gpu_are_taken_everywhere_and_never_come_to_the_host(driver: FakeDriver) -> None:
    compiled, three = scaled(), np.full((4, 5), 3, F)
    x, w, h = (Tensor(driver, three * n) for n in (1, 2, 3))
    compiled.set_param("w", w)  # type: ignore[arg-type]
    assert compiled.bind_handle("h", h)  # type: ignore[arg-type]
    compiled.run_slots([np.zeros((4, 5), F)])
    compiled.bind_handle("h", h)  # type: ignore[arg-type]
    driver.calls.clear()
    compiled.run_slots([x])  # type: ignore[list-item]
    compiled.run_raw({"x": Interface(x, stream=9)})  # type: ignore[dict-item]
    assert not driver.calls["cuMemcpyHtoDAsync"] and not driver.calls["cuMemcpyDtoHAsync"]
    assert x.streams == w.streams == [7] and driver.order == [("record", 9), ("wait", 7)]
    np.testing.assert_array_equal(compiled.read_handle("h"), np.full((4, 5), ((3 + 9) * 6 + 3) * 6, F))


def test_bound_arrays_of_a_gpu_are_read_where_they_are(driver: FakeDriver) -> None:
    compiled = scaled()
    compiled.set_param("w", np.ones((4, 5), F))
    x = Tensor(driver, np.zeros((4, 5), F))
    call = compiled.bound([x])  # type: ignore[list-item]
    for i in range(3):
        driver.run()
        x.fill(np.full((4, 5), i, F))
        call()
    assert compiled.read_handle("h")[0, 0] == 3  # type: ignore[index]
    driver.calls.clear()
    call()
    assert driver.calls["cuGraphLaunch"] == 1 and not driver.calls["cuLaunchKernelEx"]
    compiled.use_handles(rlx.runtime.HandleStore())
    call()
    assert compiled.read_handle("h")[0, 0] == 2  # type: ignore[index]


def test_arrays_live_until_what_reads_them_has_ended(driver: FakeDriver) -> None:
    """Each of a run: asking for the second one does not free the first one."""
    g = rlx.Graph("two")
    g.set_outputs([g.input("x", (4, 5), "f32") + g.input("y", (4, 5), "f32")])
    compiled = rlx.Session("cuda").compile(g)
    compiled.run({n: np.zeros((4, 5), F) for n in "xy"})
    given = [Tensor(driver, np.ones((4, 5), F)) for _ in "xy"]
    alive = [weakref.ref(t) for t in given]
    call = compiled.bound(given[:])  # type: ignore[arg-type]
    call()
    compiled.run_slots(given)  # type: ignore[arg-type]
    del call, given
    gc.collect()
    assert all(t() is not None for t in alive)
    compiled.read_output_row(0, 0, 1)
    memory_of(0).gpu.wait()
    gc.collect()
    assert all(t() is None for t in alive)


def test_bound_arrays_of_a_gpu_are_found_where_they_lie_now(driver: FakeDriver) -> None:
    compiled = scaled()
    compiled.set_param("w", np.ones((4, 5), F))
    x, y = Tensor(driver, np.zeros((4, 5), F)), Tensor(driver, np.ones((4, 5), F))
    call = compiled.bound([x])  # type: ignore[list-item]
    call()
    x.address = y.address
    call()
    assert compiled.read_handle("h")[0, 0] == 1  # type: ignore[index]
    x.shape = (5, 4)
    with pytest.raises(InputShapeError):
        call()


def test_an_event_is_waited_for_before_another_thread_records_it(driver: FakeDriver) -> None:
    gpu, record = memory_of(0).gpu, driver.cuEventRecord
    other = threading.Thread(target=lambda: gpu.after(9))

    def slow(event: int, stream: int) -> tuple[Any, ...]:
        done = record(event, stream)
        if other.ident is None:
            other.start()
            other.join(0.1)
        return done

    gpu.use()
    driver.cuEventRecord = slow  # type: ignore[method-assign]
    gpu.after(3)
    other.join()
    assert driver.order == [("record", 3), ("wait", 7), ("record", 9), ("wait", 7)]


@pytest.mark.parametrize("python", [False, True])
def test_the_next_run_waits_for_the_streams_that_read_outputs(python: bool, driver: FakeDriver) -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (3,), "f32") + 1.0])
    with knobs.override(RLX_CALLS="python" if python else "native"):
        compiled = rlx.Session("cuda").compile(g)
        for _ in range(3):
            compiled.run_slots([np.zeros(3, F)])
    view, read = compiled.outputs_view()[0], []
    view.__dlpack__(stream=11)  # may have been destroyed by the next run
    view.__dlpack__(stream=None)
    address = compiled._executable.address(compiled.program().outputs[0].buffer)
    driver._queue(1, lambda: read.append(words(address, 3, F).tolist()))  # late
    for value in (5, 6):
        compiled.run_slots([np.full(3, value, F)])
    assert np.asarray(compiled.outputs_view()[0]).tolist() == [7] * 3 and read == [[1] * 3]
    assert driver.order == [("record", 7), ("wait", 11), ("record", 7), ("wait", 1), ("record", 1), ("wait", 7)]
    with pytest.raises(BufferError, match="without a copy"):
        view.__dlpack__(copy=True)


@pytest.mark.parametrize("change,error,match", [
    ({"place": (2, 1)}, TransferError, "cuda:1, the executable on cuda:0"),
    ({"array": np.zeros((4, 5), np.float64)}, InputDTypeError, "float64"),
    ({"array": np.zeros((5, 4), F)}, InputShapeError, r"\[5, 4\]"),
])  # fmt: skip
def test_other_arrays_are_refused(change: dict, error: type, match: str, driver: FakeDriver) -> None:
    compiled = scaled()
    compiled.set_param("w", np.ones((4, 5), F))
    with pytest.raises(error, match=match):
        compiled.run({"x": Tensor(driver, change.get("array", np.zeros((4, 5), F)), change.get("place", (2, 0)))})  # type: ignore[dict-item]
    with pytest.raises(TransferError, match="not C-contiguous"):
        compiled.run({"x": Interface(Tensor(driver, np.zeros((4, 5), F)), strides=(4, 16))})  # type: ignore[dict-item]
    for more, match in (({"mask": 1}, "mask"), ({"data": (compiled.input_view("x").ctypes.data, False)}, "memory of the host")):
        with pytest.raises(TransferError, match=match):
            compiled.run({"x": Interface(Tensor(driver, np.zeros((4, 5), F)), **more)})  # type: ignore[dict-item]
    assert not compiled.read_handle("h").any()  # type: ignore[union-attr]
    driver.order.clear()
    compiled.run({"x": Interface(Tensor(driver, np.zeros((4, 5), F)))})  # type: ignore[dict-item]
    assert driver.order == [("record", 1), ("wait", 7)]  # it says nothing of streams: the default one


def test_outputs_are_shared_where_they_lie(driver: FakeDriver) -> None:
    compiled = scaled()
    compiled.set_param("w", np.ones((4, 5), F))
    ((address, _),) = compiled.run_raw({"x": np.ones((4, 5), F)})
    (view,) = compiled.outputs_view()
    assert view.__dlpack_device__() == (2, 0) and view.__cuda_array_interface__["data"] == (address, True)
    found = from_capsule(view.__dlpack__(stream=11))
    assert (found.address, found.shape, found.dtype) == (address, (4, 5), np.dtype(F))
    assert driver.order == [("record", 7), ("wait", 11)]
    plain = rlx.Session("cpu").compile(plus())
    plain.set_param("w", np.ones(1 << 16, F))
    plain.run({"x": np.ones(1 << 16, F)})
    assert np.from_dlpack(plain.outputs_view()[0])[3] == 2 and not hasattr(plain.outputs_view()[0], "__cuda_array_interface__")


@pytest.mark.parametrize("dtype", rlx.DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 5), (1, 2, 1)], ids=str)
def test_a_capsule_says_what_it_holds(dtype: str, shape: tuple[int, ...]) -> None:
    given = DeviceArray(4096, shape, rlx.ir.as_dtype(dtype).numpy, None)
    found = from_capsule(to_capsule(given, 2, 3))
    assert (found.address, found.shape, found.dtype) == (4096, shape, given.dtype)


def test_a_consumer_that_refuses_a_capsule_says_so_and_holds_nothing(driver: FakeDriver) -> None:
    gc.collect()
    driver.run()
    free = driver.free
    compiled = rlx.Session("cuda").compile(plus())
    compiled.set_param("w", np.ones(1 << 16, F))
    (view,) = compiled.bound([np.ones(1 << 16, F)])()
    with pytest.raises((BufferError, RuntimeError), match="[Uu]nsupported device"):  # by numpy; it depends on its version
        np.from_dlpack(view)
    for request in ({"dl_device": (1, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match="np.asarray copies it to the host"):
            view.__dlpack__(**request)
    kept = view.__dlpack__(stream=-1, dl_device=(2, 0), max_version=(1, 0), copy=False)
    assert np.asarray(view)[5] == 2
    del compiled, view
    gc.collect()
    driver.run()
    assert free - driver.free > 1 << 18
    del kept
    gc.collect()
    driver.run()
    assert free - driver.free < 1 << 10  # the account of failures is that of a store

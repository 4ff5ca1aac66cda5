"""Devices and their registry, buffers (host and discrete), the arena, element conversions, streams, knobs."""

from __future__ import annotations

import gc
import pickle
import re
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import HiddenMemory

import rlx.backends as backends
from rlx import knobs
from rlx.driver import (
    Arena,
    Backend,
    Buffer,
    BufferHandle,
    CommandStream,
    Device,
    DeviceArena,
    HandleStore,
    HostMemory,
    Launch,
    Memory,
    SyncStream,
    bf16_to_f32,
    convert,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    memory_of,
    recording,
)
from rlx.driver import device as device_module
from rlx.driver.memory import MEMORIES
from rlx.errors import (
    BindingError,
    DeviceUnavailableError,
    InputDTypeError,
    InputShapeError,
    OptionError,
    PlanError,
    TransferError,
    UnknownDeviceError,
    UnknownNameError,
)
from rlx.ir import DTYPES, Shape, bf16, c64, f16, f32, f64, i8, i32, i64, u8, u64

# -- devices


def test_devices_by_member_name_and_index():
    names = ["CPU", "CUDA", "ROCM", "METAL", "MLX", "ANE", "TPU", "GPU", "VULKAN", "OPENGL", "DIRECTX", "WEBGPU"]
    assert [str(d) for d in Device.all()] == names
    assert all(getattr(Device, name) == Device.parse(name.lower()) == Device(name) for name in names)
    assert str(Device.CPU).startswith("CPU") and str(Device.CUDA.at(1)) == "CUDA:1" and repr(Device.CPU) == "Device('cpu:0')"
    assert Device.parse("cuda:1") == Device("cuda", 1) == Device.CUDA.at(1) != Device.CUDA
    assert len({Device.CUDA, Device.CUDA.at(0), Device.CUDA.at(1), Device.parse(" CUDA:1 ")}) == 2
    assert pickle.loads(pickle.dumps(Device.CUDA.at(1))) == Device.CUDA.at(1)
    assert Device.parse(Device.CPU) is Device.CPU
    assert Device.parse("ref").name == "ref" and Device.parse("null") not in Device.all()


@pytest.mark.parametrize(
    "text,expected",
    [
        ("cudda", "did you mean 'cuda'"), ("zzz", "known: 'ane', 'cpu'"), ("", "NAME or NAME:INDEX"),
        ("cuda:", "NAME or NAME:INDEX"),
        ("cuda:-1", "NAME or NAME:INDEX"), ("cuda:x", "got 'cuda:x'"), ("cuda:1:2", "NAME"), (7, "got 7"), (None, "got None"),
    ],
)  # fmt: skip
def test_unknown_devices(text, expected):
    with pytest.raises(UnknownDeviceError, match=expected):
        Device.parse(text)


def test_a_device_index_is_a_count():
    for index in (-1, 1.5, "1", True):
        with pytest.raises(UnknownDeviceError, match="an index from 0"):
            Device("cuda", index)  # type: ignore[arg-type]


# -- registry


def test_what_is_there_and_why_the_rest_is_not():
    found = backends.available()
    assert found["ref:0"] is None and found["null:0"] is None
    assert "no ROCM backend" in str(found["rocm:0"]) and "rlx.backends" in str(found["rocm:0"])
    assert found["cuda:0"] is None or re.search("pip install|driver|GPU|compute capability", found["cuda:0"])
    assert {key.partition(":")[0] for key in found} >= {d.name for d in Device.all()}
    assert backends.is_available("ref") and not backends.is_available(Device.ROCM) and not backends.is_available("ref:99")
    assert isinstance(backends.get("ref"), Backend) and backends.get("ref") is backends.get("ref")
    with pytest.raises(
        DeviceUnavailableError, match=r"ROCM:1 cannot be used: this version of rlx has no ROCM.*Usable here: .*ref:0"
    ):
        backends.backend_of("rocm:1")
    with pytest.raises(DeviceUnavailableError, match="no such index; this machine has ref:0"):
        backends.backend_of("ref:99")
    if not any(why is None for name, why in found.items() if name.startswith("cuda")):
        with pytest.raises(DeviceUnavailableError, match=re.escape(f"CUDA:99 cannot be used: {found['cuda:0']}")):
            backends.backend_of("cuda:99")
    with pytest.raises(UnknownDeviceError, match="did you mean 'rocm'"):
        backends.is_available("rcom")


def test_the_backends_of_this_tree_all_load():
    for name in backends.BACKENDS:
        backend = backends.get(name)
        assert isinstance(backend, Backend) and backend.name == name
        assert all(key.startswith(f"{name}:") for key in backend.probe())


class ThirdParty:
    name = "abacus"

    def probe(self):
        return {"abacus:0": None, "abacus:1": "its beads are stuck"}

    def target(self, index=0, threads=None): ...
    def compile(self, program): ...
    def load(self, artifact, params=None, index=0): ...


@pytest.fixture
def entry_points(monkeypatch):
    """Installed packages that add devices: one sound, one whose own dependency is missing, one without its class."""

    def point(name, load):
        return SimpleNamespace(name=name, load=load)

    def missing():
        raise ModuleNotFoundError("No module named 'beads'", name="beads")

    def empty():
        raise AttributeError("module 'x' has no attribute 'Backend'")

    points = [point("Abacus", lambda: ThirdParty), point("slide", missing), point("hollow", empty)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "rlx.backends" else [])
    device_module.extensions.cache_clear()
    backends.get.cache_clear()
    yield
    device_module.extensions.cache_clear()
    backends.get.cache_clear()


def test_installed_packages_add_devices(entry_points):
    assert backends.is_available("abacus") and not backends.is_available("abacus:1")
    assert isinstance(backends.backend_of(Device.parse("ABACUS")), ThirdParty)
    with pytest.raises(DeviceUnavailableError, match="its beads are stuck"):
        backends.backend_of("abacus:1")
    with pytest.raises(DeviceUnavailableError, match=r"SLIDE cannot be imported.*pip install beads"):
        backends.get("slide")
    with pytest.raises(DeviceUnavailableError, match="no attribute 'Backend'"):
        backends.get("hollow")
    assert backends.available()["abacus:0"] is None and "beads" in str(backends.available()["slide:0"])
    assert Device.parse("abacus") not in Device.all()


# -- buffers in host memory

SOME = list(DTYPES.values())


def sample(dtype, shape=(2, 3)) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_a_host_buffer_shares_the_array(dtype):
    array = sample(dtype)
    b = Buffer.from_numpy(array)
    assert (b.shape, b.dtype, b.dims, b.nbytes, b.device) == (Shape((2, 3), dtype), dtype, (2, 3), array.nbytes, Device.CPU)
    assert b.is_host and np.shares_memory(b.numpy(), array) and b.numpy().dtype == array.dtype
    b.numpy()[1, 2] = 1
    assert array[1, 2] == 1
    fresh = b.to_host()
    assert not np.shares_memory(fresh, array) and fresh.tobytes() == array.tobytes() and fresh.flags.writeable
    assert np.asarray(b).tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_scalar_and_empty_buffers(shape):
    array = sample(f32, shape)
    b = Buffer.from_numpy(array)
    assert b.numpy().shape == b.to_host().shape == shape and b.nbytes == array.nbytes
    b.write(array + 1)
    np.testing.assert_array_equal(b.numpy(), array)  # shared, so it changed as well
    assert Buffer.empty(shape, "bf16").numpy().shape == shape


def test_read_only_arrays_stay_read_only():
    array = sample(f32)
    array.flags.writeable = False
    b = Buffer.from_numpy(array)
    assert not b.numpy().flags.writeable and b.memoryview().readonly
    with pytest.raises(TransferError, match="read-only"):
        b.write(sample(f32))
    assert b.to_host().flags.writeable
    with pytest.raises(BufferError):
        b.__dlpack__()  # DLPack before 1.0 cannot say read-only


def test_only_contiguous_native_arrays_are_shared():
    with pytest.raises(TransferError, match="ascontiguousarray"):
        Buffer.from_numpy(sample(f32).T)
    with pytest.raises(TypeError, match="no rlx form"):
        Buffer.from_numpy(np.zeros(2, ">f4"))
    with pytest.raises(TypeError, match="no rlx form"):
        Buffer.from_numpy(np.array(["x"]))


def test_write_checks_before_it_changes_anything():
    b = Buffer.from_numpy(sample(f32))
    for wrong, error in (
        (np.ones((3, 2), np.float32), InputShapeError),
        (np.ones((2, 3)), InputDTypeError),
        (np.ones(6, "f4"), InputShapeError),
    ):
        with pytest.raises(error):
            b.write(wrong)
    np.testing.assert_array_equal(b.numpy(), sample(f32))
    b.write(np.asfortranarray(np.full((2, 3), 7, np.float32)))
    np.testing.assert_array_equal(b.numpy(), np.full((2, 3), 7))


def test_a_host_buffer_on_another_host_device_is_a_copy():
    array = sample(f32)
    b = Buffer.from_numpy(array)
    assert b.to_device("cpu") is b
    moved = b.to_device("ref")
    assert moved.device == Device.parse("ref") and moved.is_host and not np.shares_memory(moved.numpy(), array)
    np.testing.assert_array_equal(moved.numpy(), array)


@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_buffer_protocol(dtype):
    array = sample(dtype)
    view = Buffer.from_numpy(array).memoryview()
    assert view.shape == (2, 3) and view.tobytes() == array.tobytes() and not view.readonly
    b = Buffer.from_numpy(array)
    see = memoryview if sys.version_info >= (3, 12) else lambda b: b.__buffer__(0)
    if dtype.name in ("bf16", "f8e4m3", "f8e5m2"):
        with pytest.raises(BufferError, match="gives its bits"):
            see(b)
    else:
        assert see(b).tobytes() == array.tobytes()
    assert np.asarray(b).dtype == array.dtype and np.shares_memory(np.asarray(b), array)


def test_numpy_conversion_says_when_it_would_copy():
    b = Buffer.from_numpy(sample(f32))
    assert np.shares_memory(np.asarray(b), b.numpy()) and not np.shares_memory(np.array(b), b.numpy())
    assert np.asarray(b, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        b.__array__(np.float64, copy=False)


# -- DLPack


@pytest.mark.parametrize("dtype", [d for d in SOME if d.name not in ("bf16", "f8e4m3", "f8e5m2")], ids=str)
def test_dlpack_with_numpy_shares_memory(dtype):
    array = sample(dtype)
    b = Buffer.from_numpy(array)
    assert b.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(b), array)
    back = Buffer.from_dlpack(array)
    assert back.dtype == dtype and np.shares_memory(back.numpy(), array)
    assert np.shares_memory(Buffer.from_dlpack(b).numpy(), array)


@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_dlpack_with_torch_shares_memory(dtype):
    torch = pytest.importorskip("torch")
    if dtype.name in ("u64", "u32", "u16") and not hasattr(torch, "uint64"):
        pytest.skip("this torch has no unsigned types")
    array = sample(dtype)
    tensor = torch.from_dlpack(Buffer.from_numpy(array))
    assert tensor.data_ptr() == array.ctypes.data and tuple(tensor.shape) == (2, 3)
    names = {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "bf16": "bfloat16"}
    assert str(tensor.dtype) == "torch." + names.get(dtype.name, array.dtype.name)
    back = Buffer.from_dlpack(tensor)
    assert back.dtype == dtype and back.numpy().ctypes.data == array.ctypes.data
    assert back.to_host().tobytes() == array.tobytes()


def test_dlpack_keeps_the_memory_alive():
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(Buffer.from_numpy(np.full(1000, 3, ml_dtypes.bfloat16)))
    b = Buffer.from_dlpack(torch.full((1000,), 5, dtype=torch.bfloat16))
    gc.collect()
    garbage = [np.full(1000, 9, np.uint16) for _ in range(50)]
    assert (tensor == 3).all() and (b.numpy() == 5).all() and len(garbage) == 50


def test_dlpack_of_what_lies_elsewhere_or_is_strided_is_refused():
    foreign = SimpleNamespace(__dlpack_device__=lambda: (2, 0), __dlpack__=None)
    with pytest.raises(TransferError, match=r"DLPack device \(2, 0\), not in host memory"):
        Buffer.from_dlpack(foreign)
    with pytest.raises(TransferError, match="ascontiguousarray"):
        Buffer.from_dlpack(sample(f32).T)


# -- buffers in discrete memory


@pytest.fixture
def gpus(monkeypatch):
    memories = [HiddenMemory(Device.CUDA), HiddenMemory(Device.ROCM)]
    for memory in memories:
        assert isinstance(memory, Memory)
        monkeypatch.setitem(MEMORIES, memory.device, memory)
    return memories


def test_states_in_discrete_memory_are_read_and_written_by_copies(gpus):
    store, want = HandleStore(), np.arange(6, dtype=np.float32).reshape(2, 3)
    (entry,) = store.require([("h", Shape((2, 3), f32))], gpus[0])
    assert not store.read("h").any() and entry.block.nbytes == 24
    store.write("h", want)
    with pytest.raises(TransferError, match="'h' lies in memory that the host does not see"):
        entry.array  # noqa: B018
    (fork,) = store.fork()
    snapshot = store.snapshot()
    store.write("h", want + 1)
    np.testing.assert_array_equal(fork.read("h"), want)
    np.testing.assert_array_equal(snapshot.states["h"], want)
    store.rollback()
    np.testing.assert_array_equal(store.read("h"), want)
    with pytest.raises(InputShapeError, match=r"handle 'h' is f32\[2,3\], got an array float64\[6\]"):
        store.write("h", np.zeros(6))
    with pytest.raises(UnknownNameError, match="no state is called 'g'; there are 'h'"):
        store.read("g")
    with pytest.raises(BindingError, match="a store per device"):
        store.require([("h", Shape((2, 3), f32))], gpus[1])


@pytest.mark.parametrize("dtype", [f32, bf16, DTYPES["bool"]], ids=str)
def test_discrete_memory_takes_explicit_copies_only(gpus, dtype):
    array = sample(dtype).T  # copies may be of any strides
    with recording() as moved:
        b = Buffer.from_numpy(array, "cuda")
        on_other = b.to_device(Device.ROCM)
        back = on_other.to_device("cpu")
    assert [m.kind for m in moved] == ["copy_in", "copy_out", "copy_in", "copy_out"]
    assert all(m.nbytes == array.nbytes for m in moved) and moved[0] == Launch("copy_in", "CUDA", array.nbytes)
    assert not b.is_host and b.to_device("cuda") is b and "CUDA" in repr(b)
    for found in (b.to_host(), on_other.to_host(), back.numpy()):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    b.write(np.zeros_like(array))
    assert not b.to_host().any() and array.any()


def test_device_bytes_are_never_read_as_host_bytes(gpus):
    b = Buffer.from_numpy(sample(f32), "cuda")
    looks = [
        b.numpy,
        b.memoryview,
        b.__dlpack__,
        b.__dlpack_device__,
        b.__array__,
        lambda: np.asarray(b),
        lambda: np.from_dlpack(b),
    ]
    for look in looks:
        with recording() as moved, pytest.raises(TransferError, match="not in host memory"):
            look()
        assert not moved
    with pytest.raises(TransferError):
        np.add(b, 1)
    assert repr(b) == "Buffer(f32[2,3], CUDA)"  # printing copies nothing either


def test_discrete_memory_is_given_back(gpus):
    cuda = gpus[0]
    b, c = Buffer.empty((4,), "f32", "cuda"), Buffer.empty((4,), "f32", "cuda")
    assert len(cuda.live) == 2
    b.release()
    b.release()
    assert len(cuda.live) == 1 and b.released and "released" in repr(b)
    for use in (b.to_host, b.numpy, lambda: b.to_device("cpu"), lambda: b.write(np.zeros(4, "f4"))):
        with pytest.raises(TransferError, match="was released"):
            use()
    del c
    gc.collect()
    assert not cuda.live


def test_memory_of_a_device_without_backend():
    with pytest.raises(DeviceUnavailableError, match="TPU has no memory here"):
        Buffer.from_numpy(sample(f32), Device.TPU)
    assert memory_of("ref:1").device == Device.parse("ref:1")


# -- conversions


def bits32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.float32)


@pytest.mark.parametrize(
    "widen,narrow,host,infinity",
    [(bf16_to_f32, f32_to_bf16, ml_dtypes.bfloat16, 0x7F80), (f16_to_f32, f32_to_f16, np.float16, 0x7C00)],
    ids=["bf16", "f16"],
)
def test_all_16_bit_patterns(widen, narrow, host, infinity):
    bits = np.arange(65536, dtype=np.uint16)
    wide = widen(bits)
    nan = (bits & 0x7FFF) > infinity
    with np.errstate(invalid="ignore"):  # signalling NaNs
        np.testing.assert_array_equal(wide, bits.view(host).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(wide), nan)
    np.testing.assert_array_equal(np.signbit(wide), bits >= 0x8000)
    back = narrow(wide)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert ((back[nan] & 0x7FFF) > infinity).all() and ((back ^ bits) < 0x8000).all()  # NaN and sign kept


# halves between neighbours, their neighbours, overflow, subnormals, NaN of every kind
EDGES = [
    0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
    0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0x7FBFFFFF, 0x00000001, 0x80000001, 0x00008000, 0x00008001, 0x00018000,
    0x007FFFFF, 0x00800000, 0x80000000, 0, 0x477FEFFF, 0x477FF000, 0x477FE000, 0x33000000, 0x33000001,
    0x32FFFFFF, 0x33800000, 0x33C00000, 0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000,
]  # fmt: skip


@pytest.mark.parametrize("narrow,host", [(f32_to_bf16, ml_dtypes.bfloat16), (f32_to_f16, np.float16)], ids=["bf16", "f16"])
def test_rounding_is_to_nearest_even(narrow, host):
    rng = np.random.default_rng(0)
    raw = np.concatenate([np.array(EDGES, np.uint32), rng.integers(0, 2**32, 1_000_000, np.uint32)])
    halves = (rng.integers(0, 2**16, 100_000).astype(np.uint32) << 16) | 0x8000  # every tie of bf16 there is, often
    tens = (rng.integers(0, 2**19, 100_000).astype(np.uint32) << 13) | 0x1000  # the same for f16
    x = np.concatenate([raw, halves, tens]).view(np.float32)
    found = narrow(x).view(host)
    nan = np.isnan(x)
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    # the definition, in float64: no neighbour is nearer, and of two equally near the even one
    value = np.abs(x[~nan].astype(np.float64))
    bits = (found[~nan].view(np.uint16) & 0x7FFF).astype(np.int64)
    top = int(np.array(np.inf, host).view(np.uint16))  # where infinity is, the next finite power of two would be
    mantissa = 7 if host is ml_dtypes.bfloat16 else 10
    bias = 127 if host is ml_dtypes.bfloat16 else 15

    def value_of(b):
        exponent, fraction = b >> mantissa, b & ((1 << mantissa) - 1)
        scale = np.maximum(exponent, 1) - bias - mantissa
        return np.ldexp((fraction + np.where(exponent > 0, 1 << mantissa, 0)).astype(np.float64), scale)

    finite = np.isfinite(value)
    assert (bits[~finite] == top).all()
    value, bits = value[finite], bits[finite]
    error = np.abs(value_of(bits) - value)
    for step in (-1, 1):
        near = bits + step
        ok = (near >= 0) & (near <= top)
        other = np.abs(value_of(np.where(ok, near, bits)) - value)
        other = np.where(bits == top, np.where(step < 0, np.abs(value_of(bits - 1) - value), np.inf), other)
        own = np.where(bits == top, np.maximum(value_of(bits) - value, 0), error)
        assert (~ok | (own < other) | ((own == other) & (bits % 2 == 0))).all()
    np.testing.assert_array_equal(np.signbit(found.astype(np.float32))[~nan], np.signbit(x)[~nan])


def test_bf16_rounding_agrees_with_ml_dtypes():
    x = np.concatenate([bits32(*EDGES), np.random.default_rng(1).integers(0, 2**32, 500_000, np.uint32).view(np.float32)])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        theirs = x.astype(ml_dtypes.bfloat16)
    ours = f32_to_bf16(x).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))


def test_convert_is_the_cast_of_the_kernel_ir():
    x = np.array([1.9, -1.9, np.nan, np.inf, -np.inf, 300, -300, 2.0**31, 2.0**63, 2.0**64, -0.0], np.float32)
    np.testing.assert_array_equal(convert(x, i8), [1, -1, 0, 127, -128, 127, -128, 127, 127, 127, 0])
    np.testing.assert_array_equal(convert(x, u8), [1, 0, 0, 255, 0, 255, 0, 255, 255, 255, 0])
    big, small = 2**31 - 1, -(2**31)
    np.testing.assert_array_equal(convert(x, i32), [1, -1, 0, big, small, 300, -300, big, big, big, 0])
    big, small = 2**63 - 1, -(2**63)
    np.testing.assert_array_equal(convert(x, i64), [1, -1, 0, big, small, 300, -300, 2**31, big, big, 0])
    np.testing.assert_array_equal(convert(x, u64), [1, 0, 0, 2**64 - 1, 0, 300, 0, 2**31, 2**63, 2**64 - 1, 0])
    np.testing.assert_array_equal(convert(x, DTYPES["bool"]), [True] * 10 + [False])
    np.testing.assert_array_equal(convert(np.array([1e300, -1e300]), f32), [np.inf, -np.inf])
    assert convert(np.array([1e10, np.nan], ml_dtypes.bfloat16), i32).tolist() == [2**31 - 1, 0]
    assert convert(np.array([3 + 4j], np.complex64), i32).tolist() == [3] and convert(np.array([2.0]), c64).tolist() == [2 + 0j]
    assert convert(np.array([256, -1]), u8).tolist() == [0, 255]  # integers wrap
    assert np.isposinf(convert(np.array([70000.0], np.float32), f16))[0] and convert(np.array([1.5]), f64).tolist() == [1.5]


# -- arena


def arena(kind: str, slots: dict[str, tuple[int, int]], size: int) -> Arena:
    """Poisoned, in memory that the host sees or does not see."""
    memory = HostMemory(Device.CPU) if kind == "host" else HiddenMemory(Device.CUDA)
    made = Arena(memory, slots, size)
    memory.fill(made.block, 0xA5)
    return made


def contents(a: Arena) -> np.ndarray:
    out = np.empty(a.size_bytes, np.uint8)
    a._memory.copy_out(a.block, out)
    return out


KINDS = pytest.mark.parametrize("kind", ["host", "discrete"])


@KINDS
def test_arena_offsets_and_absent_slots(kind):
    found = arena(kind, {"x": (0, 16), "y": (64, 8)}, 128)
    assert isinstance(found, DeviceArena) and found.size_bytes == found.block.nbytes == 128 and found.block.address % 64 == 0
    assert (found.byte_offset("x"), found.byte_offset("y"), found.byte_offset("fused")) == (0, 64, None)
    assert found.has_buffer("y") and not found.has_buffer("fused") and found.slot("y").address == found.block.address + 64
    for use in (lambda: found.write_input_f32("fused", f32, [1]), lambda: found.read_output_f32("fused", f32, 1)):
        with pytest.raises(UnknownNameError, match="'fused' has no slot"):
            use()
    for slot in ((8, 16), (-8, 8), (0, -1)):
        with pytest.raises(PlanError, match="exceeds the 16-byte arena"):
            arena(kind, {"x": slot}, 16)


@KINDS
@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize("extra", [-2, 0, 3, 1000])
def test_arena_writes_cast_and_stay_inside_the_slot(kind, dtype, extra):
    count, offset = 5, 7  # an odd offset: slots need not be aligned to their elements
    nbytes = count * dtype.itemsize + (dtype.itemsize - 1)  # a rest too small for an element stays as it is
    a = arena(kind, {"x": (offset, nbytes)}, 512)
    data = np.resize(np.array([1, 2, 0, 3.5, 100], np.float32), count + extra)
    written = a.write_input_f32("x", dtype, data)
    assert written == min(count, data.size)
    end, memory = offset + written * dtype.itemsize, contents(a)
    assert (memory[:offset] == 0xA5).all() and (memory[end:] == 0xA5).all()
    expected = convert(data[:written], dtype)
    assert memory[offset:end].tobytes() == expected.tobytes()
    back = a.read_output_f32("x", dtype, written)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, expected.real.astype(np.float32) if dtype.kind == "c" else expected.astype(np.float32))
    back[...] = 0
    assert contents(a)[offset:end].tobytes() == expected.tobytes()
    with pytest.raises(TransferError, match="cannot read 6 .* of 'x': its slot has 5"):
        a.read_output_f32("x", dtype, count + 1)
    with pytest.raises(TransferError):
        a.read_output_f32("x", dtype, -1)


def test_arena_takes_lists_scalars_and_any_shape():
    a = arena("host", {"x": (0, 24)}, 24)
    assert a.write_input_f32("x", f32, [[1, 2], [3, 4]]) == 4 and a.write_input_f32("x", f32, 9.0) == 1
    assert a.read_output_f32("x", f32, 4).tolist() == [9, 2, 3, 4]
    assert a.write_input_f32("x", f32, []) == 0


@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from([f32, f16, bf16]), st.integers(0, 64))
@settings(max_examples=100)
def test_arena_never_touches_its_neighbours(values, dtype, nbytes):
    a = arena("host", {"before": (0, 100), "x": (100, nbytes), "after": (100 + nbytes, 50)}, 256)
    a.write_input_f32("x", dtype, np.array(values, np.float32))
    memory = contents(a)
    assert (memory[:100] == 0xA5).all() and (memory[100 + nbytes :] == 0xA5).all()


# -- streams


def test_a_sync_stream_runs_in_order_what_was_submitted():
    stream, done = SyncStream(), []
    assert isinstance(stream, CommandStream)
    stream.record("a", lambda: done.append("a"))
    stream.wait()
    assert done == []  # recorded, not submitted
    stream.submit()
    assert done == []  # submit never blocks
    stream.record("b", lambda: done.append("b"))
    with recording() as launches:
        stream.wait()
        assert done == ["a"]
        stream.submit_and_wait()
        stream.submit_and_wait()
    assert done == ["a", "b"] and launches == [Launch("launch", "a"), Launch("launch", "b")]


def test_an_error_ends_the_wait_and_drops_what_depended_on_it():
    stream, done = SyncStream(), []
    for name, command in (("a", lambda: done.append("a")), ("b", lambda: 1 // 0), ("c", lambda: done.append("c"))):
        stream.record(name, command)
    with pytest.raises(ZeroDivisionError):
        stream.submit_and_wait()
    stream.wait()
    assert done == ["a"]
    stream.record("d", lambda: done.append("d"))
    stream.submit_and_wait()
    assert done == ["a", "d"]


def test_recordings_nest_and_end():
    stream = SyncStream()
    with recording() as outer:
        with recording() as inner:
            stream.record("a", list)
            stream.submit_and_wait()
        stream.record("b", list)
        stream.submit_and_wait()
    stream.record("c", list)
    stream.submit_and_wait()
    assert [x.name for x in inner] == ["a"] and [x.name for x in outer] == ["b"]


# -- handles and knobs


def test_handle_sizes():
    handle = BufferHandle("kv", (2, 3), "bf16")
    assert (handle.byte_size, handle.num_elements, handle.dims) == (12, 6, (2, 3))


def test_knobs_read_the_environment_when_asked(monkeypatch):
    assert len({k.env for k in knobs.KNOBS}) == len(knobs.KNOBS) and all(k.help and k.env.startswith("RLX_") for k in knobs.KNOBS)
    monkeypatch.delenv("RLX_THREADS", raising=False)
    assert knobs.THREADS.get() == 0
    monkeypatch.setenv("RLX_THREADS", "3")
    assert knobs.THREADS.get() == 3
    monkeypatch.setenv("RLX_THREADS", "many")
    with pytest.raises(OptionError, match="RLX_THREADS is 'many', expected a number"):
        knobs.THREADS.get()
    with knobs.override(RLX_THREADS=2, RLX_DUMP="stages"):
        with knobs.override(RLX_THREADS=1):
            assert knobs.THREADS.get() == 1 and knobs.DUMP.get() == "stages"
        assert knobs.THREADS.get() == 2
    with pytest.raises(OptionError):
        knobs.THREADS.get()
    for wrong in ({"RLX_NOPE": 1}, {"RLX_THREADS": "2"}):
        with pytest.raises(OptionError), knobs.override(**wrong):
            pass

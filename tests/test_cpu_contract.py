"""Contraction kernels against numpy in float64 (exact integers for integer types).

Every buffer ends at an unreadable page in one run and starts right after one in another, so an access outside of it cannot
pass unseen; outputs and scratch are poisoned before each run; tasks run in an order of our own, on scratch of our own.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.backends.cpu.abi import KEPT
from rlx.backends.cpu.kernels import contract, tiles
from rlx.backends.cpu.kernels import product as products
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, NEAR, Plan, plan
from rlx.backends.cpu.target import host_target, target_for
from rlx.backends.ref.interpret import run_kernel
from rlx.host import jit
from rlx.host.parts import parted
from rlx.host.processor import machine_of, missing_features
from rlx.ir.dtype import DType, bf16, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from rlx.ir.kernel import (
    Buffer,
    Check,
    Computed,
    Contract,
    Kernel,
    Levels,
    Limit,
    Load,
    Local,
    Loop,
    Operand,
    Reduce,
    Store,
    Var,
    const,
    linear,
)
from rlx.ir.kernel import k as scalar
from rlx.ir.target import Target

TRIPLE = machine_of(host_target(1))[0]
CPUS = ("x86-64-v4", "x86-64-v3", "x86-64") if TRIPLE.startswith("x86_64") else ()
TARGETS = {"host": host_target(1)}  # and lower levels, one for each length of vector
for _name in CPUS:
    _target = target_for(TRIPLE, _name)
    if not missing_features(_target.features) and _target.vector_bytes not in {t.vector_bytes for t in TARGETS.values()}:
        TARGETS[_name] = _target
if TRIPLE.startswith("aarch64"):
    TARGETS |= {"dotprod": target_for(TRIPLE, "generic", ("neon", "dotprod")), "neon": target_for(TRIPLE, "generic", ("neon",))}
GROUPS = {  # dtypes -> (feature, number of products that its instruction sums), the first found counts
    "bf16": (("avx512bf16", 2), ("bf16", 4)), "u8 i8": (("avx512vnni", 4), ("i8mm", 8), ("dotprod", 4)),
}  # fmt: skip
PAGE = mmap.PAGESIZE
PROTECT = ctypes.CDLL(None).mprotect  # making a CDLL makes a class, too
Arrays = dict[str, np.ndarray]
DTypes = tuple[DType, DType, DType]  # of a, b and the result


# -- running a kernel ----------------------------------------------------------------------------------------------


class Fenced:
    """`nbytes` of memory with an unreadable page right after it, or right before it; poisoned."""

    def __init__(self, nbytes: int, at_end: bool) -> None:
        pages = -(-nbytes // PAGE)
        self.memory = mmap.mmap(-1, (pages + 2) * PAGE)
        whole = np.frombuffer(self.memory, np.uint8)
        whole[:] = 0xFF
        start = (pages + 1) * PAGE - nbytes if at_end else PAGE
        self.data = whole[start : start + nbytes]
        for page in (0, pages + 1):
            assert PROTECT(ctypes.c_void_p(whole.ctypes.data + page * PAGE), PAGE, 0) == 0
        self.address = whole.ctypes.data + start

    def array(self, value: np.ndarray) -> np.ndarray:
        out = self.data.view(value.dtype).reshape(value.shape)
        out[...] = value
        return out


@cache
def _compiled(text: str, target: Target) -> object:
    around, parts = parted(text)
    library = jit.load([jit.compile_object(module, target) for module in (around, *parts.values())], ["mm"], target)
    return library.function("mm", None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


def run(
    kernel: Kernel, target: Target, values: Arrays, same: dict[str, str] | None = None, code: int = 0,
    tiling: Mapping[str, int] = DEFAULT_TILING, spoiled: Sequence[str] = (),
) -> Arrays:  # fmt: skip
    """The written buffers after a run; buffers not in `values` are poisoned. `same`: a buffer in another one's memory. `code`:
    the status that the run ends with. `spoiled`: buffers that are poisoned behind the first task of those that keep its rows."""
    rendered = contract.render(kernel, target, "mm", tiling)
    function = _compiled(rendered.text, target)
    results = []
    for at_end in (True, False):
        held = {b.name: Fenced(b.size * b.dtype.itemsize, at_end) for b in kernel.buffers}
        for name, host in (same or {}).items():
            held[name] = held[host]
        for name, value in values.items():
            held[name].array(value)
        before = {b.name: held[b.name].data.copy() for b in kernel.buffers if not b.writable}
        table = (ctypes.c_void_p * max(1, len(held)))(*(held[b.name].address for b in kernel.buffers))
        status, scratch = ctypes.c_int32(0), Fenced(0, at_end)
        order = range(rendered.tasks) if at_end else reversed(range(rendered.tasks))
        for turn, task in enumerate(order):
            again = 0 if at_end or turn == 0 else rendered.keeps
            scratch = scratch if again else Fenced(-(-rendered.scratch_bytes // 64) * 64, at_end)
            for name in spoiled if again else ():
                held[name].data[:] = 0xFF
            function(table, task + again, ctypes.c_void_p(scratch.address), ctypes.byref(status))  # type: ignore[operator]
        assert status.value == code
        for name, old in before.items():
            assert same or name in spoiled or (held[name].data == old).all(), f"input {name} was written"
        results.append({b.name: held[b.name].data.view(b.dtype.numpy).copy() for b in kernel.buffers if b.writable})
    for name, value in results[0].items():
        assert value.tobytes() == results[1][name].tobytes(), f"{name} depends on the order of tasks or on its address"
    return results[0]


def packed(b: np.ndarray, panel: int) -> np.ndarray:
    """[..., k, n] as [..., ceil(n/panel)][k][panel], zero padded."""
    *batch, k, n = b.shape
    out = np.zeros((*batch, -(-n // panel), k, panel), b.dtype)
    for p in range(-(-n // panel)):
        part = b[..., p * panel : (p + 1) * panel]
        out[..., p, :, : part.shape[-1]] = part
    return out


# -- kernels -------------------------------------------------------------------------------------------------------

ROW, COL = Var("i"), Var("j")
F32 = (f32, f32, f32)


def matrix(rows: int, columns: int, layout: str, panel: int) -> tuple[int, tuple[int, int], int]:
    """(elements, (row stride, column stride), panel) of a rows x columns matrix."""
    if layout == "panel":
        return -(-columns // panel) * panel * rows, (0, 0), panel
    if layout == "rows":
        return rows * columns, (columns, 1), 0
    if layout == "padded":  # rows lie further apart than they are long
        return rows * (columns + 5), (columns + 5, 1), 0
    if layout == "columns":
        return rows * columns, (1, rows), 0
    if layout == "every other":
        return 2 * rows * columns, (2 * columns, 2), 0
    if layout == "one row":
        return columns, (0, 1), 0
    assert layout == "one column"
    return rows, (1, 0), 0


def product(
    m: int, n: int, k: int, a: str = "rows", b: str = "panel", dtypes: DTypes = (f32, f32, f32), panel: int = 0,
    group: int = 1,
) -> Kernel:  # fmt: skip
    """c = a @ b"""
    group = group if b == "panel" else 1
    deep = -(-k // group) * group if b == "panel" else k
    (size_a, strides_a, _), (size_b, strides_b, panel) = matrix(m, k, a, 0), matrix(deep, n, b, panel)
    left, right, out = Buffer("a", dtypes[0], size_a), Buffer("b", dtypes[1], size_b), Buffer("c", dtypes[2], m * n, True)
    acc = Var("acc", dtypes[2])
    body = Contract(
        ROW, COL, m, n, k, Operand(left, const(0), *strides_a), Operand(right, const(0), *strides_b, panel, group), acc,
        (Store(out, linear([(ROW, n), (COL, 1)]), acc),),
    )  # fmt: skip
    return Kernel("mm", (left, right, out), (), (), (body,))


def numbers(shape: tuple[int, ...] | int, dtype: DType, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return rng.standard_normal(shape).astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)


def dense(flat: np.ndarray, o: Operand, rows: int, columns: int) -> np.ndarray:
    """The operand as a matrix."""
    if not rows * columns:
        return np.zeros((rows, columns), flat.dtype)
    if o.panel:
        panels = flat.reshape(-1, -(-rows // o.group), o.panel, o.group)
        return panels.transpose(1, 3, 0, 2).reshape(-1, panels.shape[0] * o.panel)[:rows, :columns]
    axes = (rows, o.row_stride, o.row_levels), (columns, o.col_stride, o.col_levels)
    return flat[np.add.outer(*(places(np.arange(size), stride, levels) for size, stride, levels in axes))]


def places(at: np.ndarray, stride: int, levels: Levels) -> np.ndarray:
    if not levels:
        return at * stride
    (count, outer), *others = levels
    return at % count * stride + places(at // count, outer, tuple(others))


def check_product(kernel: Kernel, target: Target, seed: int = 0) -> None:
    (c,) = kernel.body
    assert isinstance(c, Contract)
    a = numbers(c.a.buffer.size, c.a.buffer.dtype, seed)
    b = numbers(c.b.buffer.size, c.b.buffer.dtype, seed + 1)
    got = run(kernel, target, {"a": a, "b": b})["c"].reshape(c.m, c.n)
    left, right = dense(a, c.a, c.m, c.k), dense(b, c.b, c.k, c.n)
    if not c.acc.dtype.is_float:
        to = c.acc.dtype.numpy
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, left.astype(to) @ right.astype(to))
        return
    left, right = left.astype(np.float64), right.astype(np.float64)
    bound = (4 + np.sqrt(c.k)) * np.finfo(c.acc.dtype.numpy).eps * (np.abs(left) @ np.abs(right))
    error = np.abs(got - left @ right)
    assert (error <= bound).all(), f"error {error.max()} where {bound.flat[error.argmax()]} is allowed"


# -- tests ---------------------------------------------------------------------------------------------------------

SHAPES = [
    (1, 1, 1), (1, 48, 7), (1, 100, 33), (2, 49, 16), (3, 47, 5), (4, 95, 64), (5, 16, 17), (7, 17, 9), (8, 48, 3),
    (9, 1, 40), (16, 96, 32), (17, 97, 31), (33, 130, 20), (100, 31, 12), (129, 50, 8), (140, 33, 1),
]  # fmt: skip


@pytest.fixture(params=[False, True], ids=["plain", "sized"])
def sized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of products as it is by default, and as if all tiles took long: then sizes are parameters of its functions."""
    if request.param:
        monkeypatch.setattr(contract, "LONG_TILE", 0)


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed(shape: tuple[int, int, int], cpu: str) -> None:
    target = TARGETS[cpu]
    check_product(product(*shape, panel=target.panel("f32")[0]), target)


def test_products_of_other_sizes_share_their_functions() -> None:
    """Of the same epilogue: the tile, and the function that finishes its rows, in panels of any width."""
    target = target_for("x86_64-unknown-linux-gnu", "x86-64-v4")
    shapes = (24, 96, 512), (32, 130, 700), (40, 960, 512)
    texts = [contract.render(residual_kernel(*shape, 48), target, f"mm{n}").text for n, shape in enumerate(shapes)]
    first, *others = (parted(text)[1] for text in texts)
    assert first and all(first.keys() <= parts.keys() for parts in others)
    assert all("optnone" in text and "optnone" not in part for text in texts for part in parted(text)[1].values())
    short = contract.render(residual_kernel(16, 96, 8, 48), target, "mm").text
    assert parted(short) == (short, {}) and "optnone" not in short


PARTED = [(9, 96, 97), (17, 97, 130), (140, 50, 64), (33, 144, 96), (8, 48, 200)]


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("shape", PARTED, ids=str)
def test_deep_panels_are_multiplied_in_parts(shape: tuple[int, int, int], cpu: str) -> None:
    """With the same bits where an element has one chain of sums: in tiles that are neither low nor narrow."""
    target, (m, n, k) = TARGETS[cpu], shape
    panel = target.panel("f32")[0]
    kernel = product(*shape, panel=panel)
    values = {"a": numbers(m * k, f32, 0), "b": numbers(kernel.buffers[1].size, f32, 1)}
    whole = run(kernel, target, values)["c"].reshape(m, n)
    target = replace(target, core_cache_bytes=8 * 4 * panel * 31)
    parted = plan(kernel, kernel.body[0], target)  # type: ignore[arg-type]
    assert (0 < parted.depth < k) == (m > 8 and k >= 93)
    check_product(kernel, target)
    same = slice(parted.tall * parted.rows), slice(n // panel * panel)
    assert parted.unroll(parted.rows, parted.vectors) == 1
    np.testing.assert_array_equal(run(kernel, target, values)["c"].reshape(m, n)[same], whole[same])


@pytest.mark.parametrize("b", ["panel", "rows", "columns"])
@pytest.mark.parametrize("dtypes", [(f64,) * 3, (bf16, bf16, f32), (u8, i8, i32), (f32, bf16, f32), (i16,) * 3], ids=str)
def test_parts_of_every_dtype(dtypes: DTypes, b: str) -> None:
    features = [f for f in TARGETS["host"].features if "=" not in f and not f.startswith("amx")]
    target = replace(target_for(TRIPLE, machine_of(TARGETS["host"])[1], features), core_cache_bytes=8 * 4 * 48 * 8)
    panel, group = target.panel("u8 i8" if dtypes[0] == u8 else dtypes[1].name)
    group = group if dtypes in ((bf16, bf16, f32), (u8, i8, i32)) else 1
    kernel = product(21, 70, 131, b=b, dtypes=dtypes, panel=panel or 48, group=group)
    found = plan(kernel, kernel.body[0], target)  # type: ignore[arg-type]
    assert 0 < found.depth < -(-131 // found.group) or target.vector_bytes < 64  # panels of 16 fit the cache as they are
    check_product(kernel, target)


STRIDED = [(1, 50, 20), (1, 300, 3), (2, 65, 7), (6, 33, 40), (80, 70, 33), (50, 1, 9), (50, 17, 1)]


@pytest.mark.parametrize("b", ["rows", "padded", "columns", "every other", "one row", "one column"])
@pytest.mark.parametrize("shape", STRIDED, ids=str)
def test_strided_b(shape: tuple[int, int, int], b: str) -> None:
    check_product(product(*shape, b=b), TARGETS["host"])


@pytest.mark.parametrize("cpu", [name for name in TARGETS if name != "host"])
@pytest.mark.parametrize("b", ["rows", "columns", "every other"])
@pytest.mark.parametrize("shape", [(1, 50, 20), (80, 70, 33)], ids=str)
def test_strided_b_elsewhere(shape: tuple[int, int, int], b: str, cpu: str) -> None:
    check_product(product(*shape, b=b), TARGETS[cpu])


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("a", ["padded", "columns", "every other", "one row", "one column"])
@pytest.mark.parametrize("shape", [(1, 20, 30), (19, 50, 33)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_strided_a(shape: tuple[int, int, int], a: str, dtype: DType) -> None:
    check_product(product(*shape, a=a, dtypes=(dtype, f32, f32), panel=48), TARGETS["host"])


FLOATS = [
    (f64, f64, f64), (f16, f16, f32), (bf16, bf16, f32), (f32, bf16, f32), (bf16, f32, f32), (f32, f16, f32), (f32, f64, f64),
]  # fmt: skip


FEW_ROWS = [(1, 75, 18), (11, 50, 33)]


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize(("few", "b"), [(True, "panel"), (True, "rows"), (True, "columns"), (False, "rows"), (False, "columns")])
@pytest.mark.parametrize("dtypes", FLOATS, ids=str)
def test_floats(dtypes: DTypes, few: bool, b: str, cpu: str) -> None:
    target, shape = TARGETS[cpu], FEW_ROWS[FLOATS.index(dtypes) % 2] if few else (75, 30, 9)
    check_product(product(*shape, b=b, dtypes=dtypes, panel=target.panel(dtypes[1].name)[0]), target)


def group_of(dtypes: str, target: Target) -> int:
    return next((n for feature, n in GROUPS[dtypes] if feature in target.features), 1)


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("b", ["rows", "padded", "columns"])
@pytest.mark.parametrize("dtypes", [(bf16, bf16, f32), (u8, i8, i32)], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 4), (9, 47, 33), (40, 97, 70), (33, 130, 385)], ids=str)
def test_operands_of_the_run_in_groups(shape: tuple[int, int, int], dtypes: DTypes, b: str, cpu: str) -> None:
    """A task interleaves rows of each panel, or groups of columns, for the instruction that sums them, where there is one."""
    target, kernel = TARGETS[cpu], product(*shape, b=b, dtypes=dtypes)
    check_product(kernel, target)
    name = "bf16" if dtypes[0] == bf16 else "u8 i8"
    found = plan(kernel, kernel.body[0], target)  # type: ignore[arg-type]
    assert found.group == (group_of(name, target) if target.vector_bytes == 64 else 1)


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("b", ["rows", "columns"])
def test_nan_behind_the_depth_of_an_operand_of_the_run(b: str, cpu: str) -> None:
    """An odd depth: the first elements of the next row, or of the next column, are not read."""
    (m, n, k), target = (16, 20, 33), TARGETS[cpu]
    kernel = product(m, n, k, b=b, dtypes=(bf16, bf16, f32))
    left, right = numbers((m, k), bf16, 0), numbers((k, n), bf16, 1)
    left[1::2] = right[:, 1::2] = np.nan
    flat = right if b == "rows" else right.T
    got = run(kernel, target, {"a": left.ravel(), "b": np.ascontiguousarray(flat).ravel()})["c"].reshape(m, n)
    assert (np.isfinite(got) == (np.add.outer(np.arange(m) % 2, np.arange(n) % 2) == 0)).all()


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("shape", [(8, 48, 2), (1, 50, 70), (3, 20, 6), (21, 97, 64), (140, 49, 96), (9, 30, 33)], ids=str)
@pytest.mark.parametrize("a", ["rows", "padded", "columns", "every other"])
def test_pairs_of_bf16(shape: tuple[int, int, int], a: str, cpu: str) -> None:
    """For the instruction that adds two products, where there is one; an odd depth or a turned `a` goes by a copy."""
    target = TARGETS[cpu]
    panel, group = target.panel("bf16")
    kernel = product(*shape, a=a, dtypes=(bf16, bf16, f32), panel=panel, group=group)
    check_product(kernel, target)
    assert plan(kernel, kernel.body[0], target).group == group == group_of("bf16", target)  # type: ignore[arg-type]


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("shape", [(1, 50, 70), (3, 20, 7), (21, 97, 64), (140, 49, 97), (9, 30, 1), (4, 5, 0)], ids=str)
@pytest.mark.parametrize("a", ["rows", "padded", "columns", "every other"])
def test_fours_of_bytes(shape: tuple[int, int, int], a: str, cpu: str) -> None:
    """u8 by i8, exact over their whole range, for the instruction that adds four products, where there is one."""
    target = TARGETS[cpu]
    panel, group = target.panel("u8 i8")
    kernel = product(*shape, a=a, dtypes=(u8, i8, i32), panel=panel, group=group)
    check_product(kernel, target)
    assert plan(kernel, kernel.body[0], target).group == group == group_of("u8 i8", target)  # type: ignore[arg-type]


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("dtypes", [(bf16, bf16, f32), (u8, i8, i32)], ids=str)
def test_groups_in_parts_of_k(dtypes: DTypes, cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of earlier parts are added, wherever the instruction keeps its own."""
    monkeypatch.setattr(tiles, "PART", 4096)
    target = TARGETS[cpu]
    panel, group = target.panel("bf16" if dtypes[0] is bf16 else "u8 i8")
    kernel = product(11, 70, 1030, dtypes=dtypes, panel=panel, group=group)
    check_product(kernel, target)
    found = plan(kernel, kernel.body[0], target)  # type: ignore[arg-type]
    assert found.depth or found.matrix


INTEGERS = [(d, d, d) for d in (i8, i16, i32, i64, u8, u16, u32, u64)]
INTEGERS += [(i8, i8, i32), (u8, i8, i32), (u8, u8, u32), (i32, i8, i64)]


@pytest.mark.parametrize("b", ["rows", "columns"])
@pytest.mark.parametrize("dtypes", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(3, 75, 9), (75, 20, 18)], ids=str)
def test_integers_wrap(shape: tuple[int, int, int], dtypes: DTypes, b: str) -> None:
    check_product(product(*shape, b=b, dtypes=dtypes), TARGETS["host"])


def test_half_precision_reaches_its_ends() -> None:
    """Denormals, infinities and NaN of the 16-bit formats survive the conversion."""
    for dtype in (f16, bf16):
        tiny = np.finfo(np.float16).smallest_subnormal if dtype == f16 else np.float32(2.0**-133)
        values = np.array([tiny, 1.0, np.inf, np.nan, -tiny], dtype.numpy)
        kernel = product(5, 1, 1, b="rows", dtypes=(dtype, dtype, f32))
        got = run(kernel, TARGETS["host"], {"a": values, "b": np.ones(1, dtype.numpy)})["c"]
        np.testing.assert_array_equal(got, values.astype(np.float32))


@pytest.mark.parametrize("b", ["panel", "rows", "columns", "every other"])
def test_no_steps(b: str) -> None:
    kernel = product(9, 20, 0, b=b, panel=48)
    assert (run(kernel, TARGETS["host"], {})["c"] == 0).all()


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_no_cells(m: int, n: int) -> None:
    assert contract.render(product(m, n, 4, b="rows"), TARGETS["host"], "mm").tasks == 0


@settings(max_examples=20)
@given(
    st.integers(1, 100), st.integers(1, 120), st.integers(0, 50),
    st.sampled_from(["rows", "padded", "columns", "every other"]),
    st.sampled_from(["panel", "rows", "padded", "columns", "every other"]),
    st.sampled_from([(f32, f32, f32), (f32, bf16, f32), (f64, f64, f64)]), st.sampled_from(sorted(TARGETS)), st.integers(1, 5),
)  # fmt: skip
def test_any_shape(m: int, n: int, k: int, a: str, b: str, dtypes: DTypes, cpu: str, threads: int) -> None:
    target = with_threads(TARGETS[cpu], threads)
    panel, _ = target.panel(dtypes[1].name)  # of one row: pairs are for bf16 by bf16
    check_product(product(m, n, k, a, b, dtypes, panel), target, seed=m)


def with_threads(target: Target, threads: int) -> Target:
    triple, cpu, _ = machine_of(target)
    return target_for(triple, cpu, [f for f in target.features if "=" not in f], threads)


# -- batches, epilogues, rows --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sized")
def test_batches_share_an_operand() -> None:
    """c[x, y] = a[x, y] @ b[y], and a 3-d grid whose first axis is broadcast in a."""
    x, y, m, n, k = 3, 2, 10, 40, 13
    gx, gy, acc = Var("x"), Var("y"), Var("acc", f32)
    a, b, c = Buffer("a", f32, y * m * k), Buffer("b", f32, x * k * n), Buffer("c", f32, x * y * m * n, True)
    body = Contract(
        ROW, COL, m, n, k, Operand(a, linear([(gy, m * k)]), k, 1), Operand(b, linear([(gx, k * n)]), n, 1), acc,
        (Store(c, linear([(gx, y * m * n), (gy, m * n), (ROW, n), (COL, 1)]), acc),),
    )  # fmt: skip
    kernel = Kernel("mm", (a, b, c), (), ((gx, x), (gy, y)), (body,))
    va, vb = numbers((y, m, k), f32, 0), numbers((x, k, n), f32, 1)
    for threads in (1, 2, 7):
        got = run(kernel, with_threads(TARGETS["host"], threads), {"a": va, "b": vb})["c"].reshape(x, y, m, n)
        np.testing.assert_allclose(got, va.astype(np.float64)[None] @ vb.astype(np.float64)[:, None], atol=1e-5)


def residual_kernel(m: int, n: int, k: int, panel: int) -> Kernel:
    """c = max(a @ b + bias, 0) * scale[i] + r"""
    a, b, bias = Buffer("a", f32, m * k), Buffer("b", f32, -(-n // panel) * panel * k), Buffer("bias", f32, n)
    scale, r, c = Buffer("scale", f32, m), Buffer("r", f32, m * n), Buffer("c", f32, m * n, True)
    acc, at = Var("acc", f32), linear([(ROW, n), (COL, 1)])
    value = scalar.mul(scalar.max(scalar.add(acc, Load(bias, COL)), 0.0), Load(scale, ROW))
    store = Store(c, at, scalar.add(value, Load(r, at)))
    body = Contract(ROW, COL, m, n, k, Operand(a, const(0), k, 1), Operand(b, const(0), panel=panel), acc, (store,))
    return Kernel("mm", (a, b, bias, scale, r, c), (), (), (body,))


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(1, 60, 8), (20, 100, 16), (131, 49, 5)], ids=str)
def test_epilogue(shape: tuple[int, int, int], in_place: bool) -> None:
    m, n, k = shape
    target = with_threads(TARGETS["host"], 2)
    values = {"a": numbers((m, k), f32, 0), "bias": numbers(n, f32, 2), "scale": numbers(m, f32, 3), "r": numbers((m, n), f32, 4)}
    b = numbers((k, n), f32, 1)
    kernel = residual_kernel(m, n, k, target.panel("f32")[0])
    same = {"c": "r"} if in_place else {}
    got = run(kernel, target, {**values, "b": packed(b, target.panel("f32")[0])}, same)["c"].reshape(m, n)
    wide = {name: v.astype(np.float64) for name, v in values.items()}
    want = np.maximum(wide["a"] @ b + wide["bias"], 0) * wide["scale"][:, None] + wide["r"]
    np.testing.assert_allclose(got, want, atol=2e-5)


def norm_kernel(m: int, n: int, k: int, panel: int, batch: int = 1) -> Kernel:
    """h = a @ b + bias + r (kept in a per-row local); c = (h - mean(h)) / sqrt(var(h) + 1e-5) * gain"""
    a, b = Buffer("a", f32, batch * m * k), Buffer("b", f32, -(-n // panel) * panel * k)
    bias, gain, r = Buffer("bias", f32, n), Buffer("gain", f32, n), Buffer("r", f32, batch * m * n)
    c, h = Buffer("c", f32, batch * m * n, True), Local("h", f32, n, per_row=True)
    acc, g, x, y, z = Var("acc", f32), Var("g"), Var("x"), Var("y"), Var("z")
    total, square = Var("total", f32), Var("square", f32)
    at = linear([(g, m * n), (ROW, n), (COL, 1)])
    epilogue = (Store(h, COL, scalar.add(scalar.add(acc, Load(bias, COL)), Load(r, at))),)
    mean = scalar.mul(total, 1.0 / n)
    off = scalar.sub(Load(h, y), mean)
    spread = scalar.sqrt(scalar.add(scalar.mul(square, 1.0 / n), 1e-5))
    result = scalar.mul(scalar.div(scalar.sub(Load(h, z), mean), spread), Load(gain, z))
    rows = (
        Loop(x, n, (), vector=True, reduces=(Reduce(total, "add", Load(h, x)),)),
        Loop(y, n, (), vector=True, reduces=(Reduce(square, "add", scalar.mul(off, off)),)),
        Loop(z, n, (Store(c, linear([(g, m * n), (ROW, n), (z, 1)]), result),), vector=True),
    )
    left = Operand(a, linear([(g, m * k)]), k, 1)
    body = Contract(ROW, COL, m, n, k, left, Operand(b, const(0), panel=panel), acc, epilogue, rows)
    return Kernel("mm", (a, b, bias, gain, r, c), (h,), ((g, batch),), (body,))


@pytest.mark.usefixtures("sized")
@pytest.mark.parametrize("shape", [(1, 60, 8, 1), (16, 100, 16, 1), (131, 49, 5, 2), (5, 20, 4, 6)], ids=str)
def test_rows(shape: tuple[int, int, int, int]) -> None:
    m, n, k, batch = shape
    target = with_threads(TARGETS["host"], 2)
    values = {"a": numbers((batch, m, k), f32, 0), "bias": numbers(n, f32, 2), "gain": numbers(n, f32, 3)}
    values["r"] = numbers((batch, m, n), f32, 4)
    b = numbers((k, n), f32, 1)
    panel, _ = target.panel("f32")
    got = run(norm_kernel(m, n, k, panel, batch), target, {**values, "b": packed(b, panel)})["c"].reshape(batch, m, n)
    h = values["a"].astype(np.float64) @ b + values["bias"] + values["r"]
    want = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * values["gain"]
    np.testing.assert_allclose(got, want, atol=2e-5)


# -- computed operands ---------------------------------------------------------------------------------------------


def computed_kernel(
    m: int, n: int, k: int, dtypes: DTypes = F32, panel: int = 0, group: int = 1, right: bool = False, batch: int = 1,
    limit: bool = False,
) -> Kernel:  # fmt: skip
    """c[g] = a[g] @ b, where row i of a is max(x[at[i]] - max(x[at[i]]), t). b is packed, or with `right` strided and computed
    as w * u. `limit`: rows up to `count` only."""
    x, at, t = Buffer("x", f32, batch * m * k), Buffer("at", i32, batch * m), Buffer("t", f32, k)
    size = n * k if right else -(-n // panel) * panel * -(-k // group) * group
    w, u = Buffer("w", dtypes[1], size), Buffer("u", f32, n)
    c, count, row = Buffer("c", dtypes[2], batch * m * n, True), Buffer("count", i64, 1), Local("row", f32, k, per_row=True)
    g, r, q, s, acc, most = Var("g"), Var("r"), Var("q"), Var("s"), Var("acc", dtypes[2]), Var("most", f32)
    place = scalar.cast(Load(at, linear([(g, m), (r, 1)])), i64)
    inside = scalar.and_(scalar.le(0, place), scalar.lt(place, m))
    read = scalar.add(Load(x, linear([(g, m * k), (place, k), (s, 1)]), inside), 0.0)
    before = (
        Check(inside, 1),
        Loop(s, k, (Store(row, s, read),), vector=True, reduces=(Reduce(most, "max", read),)),
    )
    left = Computed(r, q, scalar.max(scalar.sub(Load(row, q), most), Load(t, q)), dtypes[0], before)
    r2, q2 = Var("r"), Var("q")
    times = scalar.mul(scalar.cast(Load(w, linear([(r2, n), (q2, 1)])), f32), Load(u, q2)) if right else const(0)
    other = Computed(r2, q2, times, dtypes[1]) if right else Operand(w, const(0), panel=panel, group=group)
    store = Store(c, linear([(g, m * n), (ROW, n), (COL, 1)]), acc)
    body = Contract(ROW, COL, m, n, k, left, other, acc, (store,))
    limits = (Limit(ROW, Load(count, const(0))),) if limit else ()
    return Kernel("mm", (x, at, t, w, u, c, count), (row,), ((g, batch),), (body,), limits=limits)


def test_the_text_of_a_kernel_is_the_same_whenever_it_is_written() -> None:
    """Expressions made while a kernel is written die, and others get their ids: what is known of the dead ones is not theirs."""
    target = with_threads(TARGETS["host"], 2)
    kernels = (computed_kernel(33, 130, 21, (bf16, bf16, f32), 0, 1, True, 2) for _ in range(300))
    assert len({contract.render(kernel, target, "mm").text for kernel in kernels}) == 1


def check_computed(m: int, n: int, k: int, target: Target, dtypes: DTypes = F32, right: bool = False, batch: int = 1) -> None:
    """Small whole numbers, so that every sum is exact."""
    rng = np.random.default_rng(m + n + k)
    one = dtypes[0].name if dtypes[0] == dtypes[1] else f"{dtypes[0]} {dtypes[1]}"
    panel, group = (0, 1) if right else target.panel(one)
    kernel = computed_kernel(m, n, k, dtypes, panel, group, right, batch)
    x, w = rng.integers(-9, 9, (batch, m, k)).astype("f4"), rng.integers(-9, 9, (k, n)).astype(dtypes[1].numpy)
    at, t, u = rng.integers(0, m, (batch, m), np.int32), rng.integers(-9, 0, k).astype("f4"), rng.integers(1, 3, n).astype("f4")
    b = w
    if not right:
        deep = np.zeros((-(-k // group) * group, n), w.dtype)
        deep[:k] = w
        panels = packed(deep, panel)
        b = panels.reshape(panels.shape[0], -1, group, panel).swapaxes(-1, -2).copy()
    values = {"x": x, "at": at, "t": t, "w": b, "u": u}
    got = run(kernel, target, values)["c"].reshape(batch, m, n)
    flat = [values.get(x.name, np.zeros(x.size, x.dtype.numpy)).reshape(-1) for x in kernel.buffers]
    assert run_kernel(kernel, flat) == 0
    np.testing.assert_array_equal(got, flat[5].reshape(batch, m, n))
    rows = np.stack([part[i] for part, i in zip(x, at)])
    left = np.maximum(rows - rows.max(-1, keepdims=True), t).astype(dtypes[0].numpy).astype("f8")
    wide = w.astype("f8")
    np.testing.assert_array_equal(got, left @ ((wide * u).astype(dtypes[1].numpy).astype("f8") if right else wide))


PANELLED = [(f32, f32, f32), (bf16, bf16, f32), (f16, f16, f32), (f64, f64, f64)]


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("dtypes", PANELLED, ids=str)
@pytest.mark.parametrize("shape", [(1, 48, 7), (1, 100, 33), (5, 49, 64), (33, 130, 21), (140, 33, 1)], ids=str)
def test_a_computed_left_operand(shape: tuple[int, int, int], dtypes: DTypes, cpu: str) -> None:
    """Reductions of the row first, a gather, a rounding to the operand's dtype; odd depths of pairs are filled up."""
    for threads in (1, 3):
        check_computed(*shape, with_threads(TARGETS[cpu], threads), dtypes, batch=2 if threads > 1 else 1)


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("dtypes", [*PANELLED, (bf16, f32, f32)], ids=str)
@pytest.mark.parametrize("shape", [(1, 50, 7), (6, 1, 9), (33, 130, 21), (2, 7, 1)], ids=str)
def test_computed_operands_on_both_sides(shape: tuple[int, int, int], dtypes: DTypes, cpu: str) -> None:
    check_computed(*shape, with_threads(TARGETS[cpu], 2), dtypes, right=True, batch=2)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtypes", [F32, (bf16, bf16, f32)], ids=str)
def test_rows_of_one_block_are_computed_once_by_a_thread_that_fetches_weights_meanwhile(
    dtypes: DTypes, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more tasks than threads, so that none waits long for another. `run` adds KEPT for one of its two orders."""
    monkeypatch.setattr(products, "fetches_ahead", lambda features: ahead)
    panel, group = TARGETS["host"].panel(dtypes[0].name)
    if not panel:
        pytest.skip(f"{dtypes[0].name} weights are not packed for {TARGETS['host'].name}")
    kernel, found = computed_kernel(1, 40 * panel, 400, dtypes, panel, group), []
    x, w = numbers(400, f32, 0), numbers(kernel.buffers[3].size, dtypes[1], 1)
    for threads in (1, 3):
        target = with_threads(TARGETS["host"], threads)
        rendered = contract.render(kernel, target, "mm")
        assert (rendered.tasks > threads, rendered.keeps) == ((True, KEPT) if threads > 1 else (False, 0))
        assert rendered.streamed == (1 + kernel.buffers.index(kernel.buffers[3]) if ahead else 0)
        values = {"x": x, "at": np.zeros(1, np.int32), "t": x, "w": w}
        found.append(run(kernel, target, values, spoiled=("x", "at", "t") if rendered.keeps else ())["c"].tobytes())
    assert found[0] == found[1]


def test_a_check_in_a_computed_operand_fails_the_run_and_spares_rows_past_the_limit() -> None:
    target = TARGETS["host"]
    m, n, k = 20, target.panel("f32")[0], 8
    x, t, w = np.zeros((m, k), "f4"), np.zeros(k, "f4"), np.ones((1, k, n), "f4")
    at = np.zeros(m, np.int32)
    at[13] = m
    values = {"x": x, "at": at, "t": t, "w": w}
    run(computed_kernel(m, n, k, panel=n), target, values, code=1)
    for rows, code in ((13, 0), (14, 1)):
        values["count"] = np.array([rows])
        run(computed_kernel(m, n, k, panel=n, limit=True), target, values, code=code)


# -- how work is cut -----------------------------------------------------------------------------------------------


def plan_of(kernel: Kernel, threads: int) -> Plan:
    (c,) = kernel.body
    assert isinstance(c, Contract)
    return plan(kernel, c, with_threads(TARGETS["host"], threads))


def test_same_bits_at_any_thread_count() -> None:
    kernel = product(50, 500, 70, panel=TARGETS["host"].panel("f32")[0])
    values = {"a": numbers(50 * 70, f32, 0), "b": numbers(kernel.buffers[1].size, f32, 1)}
    results = [run(kernel, with_threads(TARGETS["host"], threads), values)["c"].tobytes() for threads in (1, 2, 3, 16)]
    assert len(set(results)) == 1
    assert plan_of(kernel, 16).tasks > plan_of(kernel, 1).tasks == 1


@pytest.mark.parametrize("threads", [2, 4, 16])
@pytest.mark.parametrize("shape", [(16, 384, 384), (128, 1536, 384), (1, 4096, 4096), (1024, 48, 1024)], ids=str)
def test_every_thread_has_work(shape: tuple[int, int, int], threads: int) -> None:
    assert plan_of(product(*shape, panel=TARGETS["host"].panel("f32")[0]), threads).tasks >= threads


@pytest.mark.parametrize("threads", [2, 6, 8])
@pytest.mark.parametrize("m", [392, 1568, 3136, 6272])
def test_few_tasks_are_whole_rounds(m: int, threads: int) -> None:
    """Threads end together: else one has a task more than others."""
    kernel = product(m, 512, 256, panel=48)
    (c,) = kernel.body
    assert isinstance(c, Contract)
    p = plan(kernel, c, target_for("x86_64-unknown-linux-gnu", "x86-64-v4", threads=threads))
    assert p.tasks % threads == 0 and p.tasks >= threads


def test_few_rows_read_b_in_place_and_many_copy_it() -> None:
    """The strided tests above cover both ways."""
    assert [plan_of(product(m, 70, 33, b="rows"), 1).stage_b for m in (6, 80)] == ["", "rows"]


def test_the_tiles_of_a_panel_prefetch_the_next_one_together() -> None:
    """The only tile of a panel prefetches from a little further on; low ones from weights that are too large for caches."""
    target = target_for("x86_64-unknown-linux-gnu", "x86-64-v4")
    cases = [(1, 96, 0), (5, 96, 0), (6, 96, 3), (8, 96, 3), (9, 96, 0), (10, 96, 2), (16, 96, 2), (24, 96, 1), (128, 96, 1)]
    for m, n, lines in [*cases, (7, 67200, 3), (2, 67200, 6), (1, 67200, 0)]:  # 17 MB are in no cache when the next run begins
        text = contract.render(product(m, n, 64, panel=48), target, "mm").text
        assert text.count("call void @llvm.prefetch") == lines, m
        share = 64 * -(-48 * 4 // -(-m // 8))  # bytes from one tile's part of the panel to that of the next
        after = NEAR if m <= 8 else 64 * 48 * 4
        assert not lines or (f"i64 {after}" in text and re.search(rf"mul i64 %\w+, {share}\b", text)), m


def test_one_row_fetches_cold_weights_ahead_where_that_gains() -> None:
    """A tile of one row takes four steps of k at a time, of three lines each."""
    target = target_for("x86_64-unknown-linux-gnu", "sapphirerapids")
    for n, lines in ((96, 0), (67200, 12)):
        text = contract.render(product(1, n, 64, panel=48), target, "mm").text
        assert text.count("call void @llvm.prefetch") == lines and (not lines or f"i64 {NEAR}" in text), n


@pytest.mark.parametrize("dtypes", [F32, (bf16, bf16, f32)], ids=str)
def test_fetching_ahead_changes_no_bit(dtypes: DTypes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it read past the weights: their last page is followed by one that cannot be read."""
    target = TARGETS["host"]
    panel, group = target.panel(dtypes[0].name)
    if not panel:
        pytest.skip(f"{dtypes[0].name} weights are not packed for {target.name}")
    monkeypatch.setattr(tiles, "COLD", 1)
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(tiles, "fetches_ahead", lambda features, ahead=ahead: ahead)
        kernel = product(1, 100, 300, dtypes=dtypes, panel=panel, group=group)
        assert ("llvm.prefetch" in contract.render(kernel, target, "mm").text) == ahead
        values = {"a": numbers(300, dtypes[0], 0), "b": numbers(kernel.buffers[1].size, dtypes[1], 1)}
        found.append(run(kernel, target, values)["c"].tobytes())
    assert found[0] == found[1]


def test_rows_stay_whole() -> None:
    """Two blocks of eight rows for two threads, over all panels."""
    p = plan_of(norm_kernel(16, 384, 384, 48), 2)
    assert p.groups == 1
    assert TARGETS["host"].vector_bytes != 64 or (p.tasks, p.block_rows) == (2, 8)


@pytest.mark.parametrize("m", range(1, 300, 7))
def test_row_tiles_are_even(m: int) -> None:
    p = plan_of(product(m, 48, 64, panel=48), 3)
    starts = [p.first_row(t) for t in range(p.row_tiles + 1)]
    heights = {after - before for before, after in pairwise(starts)}
    assert starts[0] == 0 and starts[-1] == m and heights <= {p.rows, p.rows - 1}


def test_code_does_not_grow_with_extents() -> None:
    panel, _ = TARGETS["host"].panel("f32")
    for shapes in [((64, 96, 32), (4096, 9600, 1024)), ((64, 96, 4096), (4096, 9600, 8192))]:
        small, large = (contract.render(product(*shape, panel=panel), TARGETS["host"], "mm").text for shape in shapes)
        assert len(large) < 1.3 * len(small)  # the large ones may have a loop over parts of k besides


def test_compiles_for_aarch64() -> None:
    arm = target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",))
    for kernel in (product(33, 70, 20, panel=16), product(40, 70, 33, b="columns"), norm_kernel(9, 40, 8, 16)):
        text = jit.assembly(contract.render(kernel, arm, "mm").text, arm)
        assert "fmla" in text


def test_uses_the_widest_registers() -> None:
    for cpu, register in (("x86-64-v4", "%zmm"), ("x86-64-v3", "%ymm")):
        if cpu not in CPUS:
            pytest.skip("x86-64 only")
        target = target_for(TRIPLE, cpu)
        text = jit.assembly(contract.render(product(64, 96, 32, panel=target.panel("f32")[0]), target, "mm").text, target)
        body = text[text.index("tile_") :]
        assert any("vfmadd" in line and register in line for line in body.splitlines())

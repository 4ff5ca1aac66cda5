"""Programs written by hand, on the CPU: regions, commit, params, clones, failures, and nothing allocated by a run."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from counting import traced_bytes

import rlx
from rlx.backends.cpu import abi, memory
from rlx.backends.cpu.abi import KEPT, LINE, Reading
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.cpu.copying import LEAST_BYTES
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.kernels import product as products
from rlx.driver.backend import Artifact, Backend, Executable
from rlx.driver.params import ParamStore
from rlx.errors import DeviceUnavailableError, IndexRangeError, InputShapeError, PlanError
from rlx.ir.dtype import DType, bf16, bool_, f32, i64
from rlx.ir.kernel import Alu, Buffer, Check, Kernel, Load, Loop, Reduce, Store, Var, k
from rlx.ir.program import ArenaPlan, BufferDecl, OutputDecl, Program, Region, Step
from rlx.ir.shape import Shape

CPU = CpuBackend()
N = 40  # elements of most buffers: no multiple of a vector


def map_kernel(name, make, reads, size=N, dtype=f32, origin=()) -> Kernel:
    """out[i] = make(b0[i], b1[i], …)."""
    bs = [Buffer(f"b{n}", dtype, size) for n in range(reads)]
    out, i = Buffer("out", dtype, size, writable=True), Var("i")
    body = Loop(i, size, (Store(out, i, make(*(Load(b, i) for b in bs))),), vector=True)
    return Kernel(name, (*bs, out), (), (), (body,), origin)


def add(size=N, name="add") -> Kernel:
    return map_kernel(name, k.add, 2, size)


def copy(size=N) -> Kernel:
    return map_kernel("copy", lambda x: x, 1, size)


def take(size=N) -> Kernel:
    """out[i] = table[at[i]], at checked."""
    table, at, out, i = Buffer("table", f32, size), Buffer("at", i64, size), Buffer("out", f32, size, True), Var("i")
    index = Load(at, i)
    inside = k.and_(k.le(k.const(0), index), k.lt(index, size))
    body = (Check(inside, 1), Store(out, i, Load(table, index, inside)))
    return Kernel("take", (table, at, out), (), (), (Loop(i, size, body, vector=True),), ("gather", "add"))


def heavy(rows=512, columns=300) -> Kernel:
    """out[r] = sum over c of exp(b[r, c]): enough work for several tasks."""
    b, out, r, c, total = Buffer("b", f32, rows * columns), Buffer("out", f32, rows, True), Var("r"), Var("c"), Var("t", f32)
    value = Alu("exp", (Load(b, k.add(k.mul(r, columns), c)),), f32)
    sums = Loop(c, columns, (), vector=True, reduces=(Reduce(total, "add", value),))
    return Kernel("heavy", (b, out), (), ((r, rows),), (sums, Store(out, r, total)))


def program(buffers, steps=(), commit=(), prepare=(), threads=1, name="p") -> Program:
    """`buffers`: (region, name, dims or data, dtype); ids count up. Phases: (kernel, buffer names …)."""
    decls, offsets, at = [], {}, 0
    for id, (region, label, what, *dtype) in enumerate(buffers):
        data = what if isinstance(what, np.ndarray) else None
        dims = what.shape if isinstance(what, np.ndarray) else what
        decls.append(decl := BufferDecl(id, region, Shape(dims, dtype[0] if dtype else f32), label, data))
        if region in (Region.ARENA, Region.INPUT, Region.OUTPUT):
            offsets[id], at = at, at + -(-decl.nbytes // 64) * 64
    ids = {d.name: d.id for d in decls}
    phases = [tuple(Step(kernel, tuple(ids[a] for a in args)) for kernel, *args in calls) for calls in (prepare, steps, commit)]
    of = {region: tuple(d.id for d in decls if d.region is region) for region in Region}
    return Program(
        name, CPU.target(threads=threads), tuple(decls), *phases, of[Region.INPUT], of[Region.PARAM], of[Region.HANDLE],
        tuple(OutputDecl(decls[i].name, i, decls[i].shape) for i in of[Region.OUTPUT]), ArenaPlan(offsets, at, 64, at, at),
    )  # fmt: skip


def load(p: Program, params: ParamStore | None = None) -> CpuExecutable:
    """In memory, everything poisoned that a run must write."""
    exe = CPU.load(CPU.compile(p), params)
    exe.poison()
    return exe


def ids(p: Program) -> dict[str, int]:
    return {b.name: b.id for b in p.buffers}


def floats(seed=0, size=N) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


ADDING = [(Region.INPUT, "x", (N,)), (Region.INPUT, "y", (N,)), (Region.OUTPUT, "o", (N,))]
# total' = total + x, moved into the handle by the commit; o = the table at `at`
COUNTER = [
    (Region.INPUT, "x", (N,)), (Region.INPUT, "at", (N,), i64), (Region.HANDLE, "total", (N,)), (Region.ARENA, "next", (N,)),
    (Region.OUTPUT, "o", (N,)),
]  # fmt: skip


def counter() -> Program:
    steps = [(add(), "total", "x", "next"), (take(), "x", "at", "o")]
    return program(COUNTER, steps, [(copy(), "next", "total")], name="counter")


# -- running -------------------------------------------------------------------------------------------------------


def test_it_satisfies_the_protocols():
    artifact = CPU.compile(program(ADDING, [(add(), "x", "y", "o")]))
    assert isinstance(CPU, Backend) and CPU.probe() == {"cpu:0": None}
    needed = {a for p in (Artifact, Executable) for a in vars(p) if not a.startswith("_")}
    exe = CPU.load(artifact)
    assert needed <= set(dir(artifact)) | set(dir(exe)) | {"program", "params"}
    with pytest.raises(DeviceUnavailableError, match="there is no cpu:3"):
        CPU.load(artifact, index=3)


def test_a_step():
    p = program(ADDING, [(add(), "x", "y", "o")])
    exe, b = load(p), ids(p)
    assert np.isnan(exe.read(b["o"])).all()
    for seed in range(3):
        x, y = floats(seed), floats(seed + 10)
        exe.write(b["x"], x)
        exe.view(b["y"])[...] = y
        exe.run()
        np.testing.assert_array_equal(exe.read(b["o"]), x + y)
    assert exe.address(b["o"]) == exe.arena_ptr + p.plan.offsets[b["o"]] == exe.view(b["o"]).ctypes.data
    assert exe.read(b["o"]).base is None  # fresh


def test_a_program_without_steps():
    exe = load(program([(Region.INPUT, "x", (0, 3))]))
    exe.run()
    assert exe.read(0).shape == (0, 3)


def test_a_write_of_another_shape_or_dtype_is_refused():
    p = program(ADDING, [(add(), "x", "y", "o")])
    exe, before = load(p), load(p).read(0)
    for wrong in (np.zeros(N + 1, np.float32), np.zeros((), np.float32), np.zeros(N)):
        with pytest.raises(InputShapeError, match=rf"'x' is f32\[{N}\], got an array {wrong.dtype}"):
            exe.write(0, wrong)
    np.testing.assert_array_equal(exe.read(0), before)


@pytest.mark.parametrize(("dtype", "host"), [(bf16, ml_dtypes.bfloat16), (bool_, np.bool_), (i64, np.int64)])
def test_views_have_the_host_dtype(dtype: DType, host):
    p = program(
        [(Region.INPUT, "x", (3, 5), dtype), (Region.OUTPUT, "o", (5, 3), dtype)],
        [(map_kernel("same", lambda x: x, 1, 15, dtype), "x", "o")],
    )
    exe = load(p)
    value = np.arange(15).reshape(3, 5).astype(host)
    exe.write(0, value)
    exe.run()
    assert exe.read(1).dtype == np.dtype(host)
    np.testing.assert_array_equal(exe.read(1), value.reshape(5, 3))


def test_equal_kernels_are_compiled_once():
    buffers = [*ADDING, (Region.ARENA, "a", (N,))]
    p = program(buffers, [(add(name="first"), "x", "y", "a"), (add(name="second"), "a", "y", "o")])
    artifact = CPU.compile(p)
    assert len(artifact.codes) == len(artifact.objects) == 1
    assert artifact.texts()["first"] == artifact.texts()["second"] and "define" in artifact.texts()["first"]
    exe = CPU.load(artifact)
    exe.poison()
    exe.write(0, floats(1))
    exe.write(1, floats(2))
    exe.run()
    np.testing.assert_array_equal(exe.read(2), floats(1) + floats(2) + floats(2))


def test_a_kernel_met_in_another_program_is_not_compiled_again():
    one = CPU.compile(program(ADDING, [(add(name="first"), "x", "y", "o")]))
    other = CPU.compile(program(COUNTER, [(add(), "total", "x", "next"), (take(), "x", "at", "o")]))
    assert len(other.objects) == 2 and [image is one.objects[0] for image in other.objects] == [True, False]
    assert CPU.compile(program(ADDING, [(add(), "x", "y", "o")], threads=3)).objects[0] is not one.objects[0]  # may cut it up
    assert CPU.compile(program(ADDING, [(map_kernel("add", k.sub, 2), "x", "y", "o")])).objects[0] != one.objects[0]


# -- commit and failures -------------------------------------------------------------------------------------------


def test_commit_moves_state_and_a_failed_check_prevents_it():
    p = counter()
    exe, b = load(p), ids(p)
    exe.write(b["x"], floats())
    exe.write(b["at"], np.arange(N)[::-1].copy())
    exe.run()
    exe.run()
    np.testing.assert_array_equal(exe.read(b["total"]), floats() + floats())
    np.testing.assert_array_equal(exe.read(b["o"]), floats()[::-1])
    for wrong in (N, -1, 1 << 40):
        exe.view(b["at"])[7] = wrong
        with pytest.raises(IndexRangeError, match=r"^counter: index out of range in take \(gather add\); nothing was committed"):
            exe.run()
        np.testing.assert_array_equal(exe.read(b["total"]), floats() + floats())
    exe.view(b["at"])[7] = 0  # and the next run is a good one
    exe.run()
    np.testing.assert_array_equal(exe.read(b["total"]), floats() * np.float32(2) + floats())


def test_steps_and_commit_by_themselves():
    p = counter()
    exe, b = load(p), ids(p)
    exe.write(b["x"], floats())
    exe.write(b["at"], np.zeros(N, np.int64))
    exe.run_steps()
    assert not exe.read(b["total"]).any()
    np.testing.assert_array_equal(exe.read(b["next"]), floats())
    exe.run_commit()
    np.testing.assert_array_equal(exe.read(b["total"]), floats())
    exe.view(b["at"])[0] = -5
    with pytest.raises(IndexRangeError):
        exe.run_steps()


# -- params --------------------------------------------------------------------------------------------------------

# o = x + twice(w), w also read as it is; twice is prepared
WEIGHTS = [
    (Region.INPUT, "x", (N,)), (Region.PARAM, "w", (N,)), (Region.PREPARED, "twice(w)", (N,)), (Region.OUTPUT, "o", (N,)),
]  # fmt: skip


def weighted(raw=False) -> Program:
    steps = [(add(), "x", "w" if raw else "twice(w)", "o")]
    return program(WEIGHTS, steps, prepare=[(map_kernel("twice", lambda w: k.add(w, w), 1), "w", "twice(w)")])


def test_params_are_shared_through_the_store():
    store = ParamStore()
    packed, raw = load(weighted(), store), load(weighted(raw=True), store)
    for seed in range(2):  # the second time: set again
        for exe in (packed, raw):
            exe.write(0, floats(9))
        packed.write(1, floats(seed))
        packed.prepare([0])
        packed.run()
        raw.run()
        np.testing.assert_array_equal(packed.read(3), floats(9) + 2 * floats(seed))
        np.testing.assert_array_equal(raw.read(3), floats(9) + floats(seed))
    clone = packed.clone()
    assert clone.address(1) == packed.address(1) == raw.address(1) and clone.address(2) == packed.address(2)
    assert clone.address(0) != packed.address(0)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_prepare_reads_a_given_array_and_keeps_nothing_of_it(shift):
    exe = load(weighted())
    assert exe.memory()["params"] == 0  # no step reads w itself: no memory for it
    whole = np.zeros(4 * N + 64, np.uint8)
    start = -whole.ctypes.data % 64 + shift
    given = whole[start : start + 4 * N].view(np.float32)  # aligned, or at an odd address
    given[...] = floats(3)
    references = sys.getrefcount(whole)
    exe.write(0, np.zeros(N, np.float32))
    exe.prepare([0], {1: given})
    exe.run()
    np.testing.assert_array_equal(exe.read(3), 2 * floats(3))
    assert exe.memory()["params"] == 0 and sys.getrefcount(whole) == references
    with pytest.raises(InputShapeError, match=r"'w' is f32"):
        exe.prepare([0], {1: given[1:]})


def test_a_store_with_other_sizes_is_refused():
    store = ParamStore()
    load(weighted(), store)
    other = [(Region.INPUT, "x", (N,)), (Region.PREPARED, "twice(w)", (2 * N,)), (Region.OUTPUT, "o", (N,))]
    with pytest.raises(InputShapeError, match=r"'twice\(w\)' is f32\[80\] \(320 bytes\), but the params to share hold 160 bytes"):
        load(program(other, [(add(), "x", "twice(w)", "o")]), store)


def test_constants_are_read_only_and_shared():
    p = program([*ADDING[:1], (Region.CONSTANT, "c", floats(5)), *ADDING[2:]], [(add(), "x", "c", "o")])
    exe = load(p)
    exe.write(0, floats(6))
    exe.run()
    np.testing.assert_array_equal(exe.read(2), floats(5) + floats(6))
    with pytest.raises(ValueError, match="read-only"):
        exe.view(1)[0] = 1
    assert exe.clone().address(1) == exe.address(1) and exe.memory()["constants"] == 4 * N


# -- clones, threads, lifetime -------------------------------------------------------------------------------------


def test_a_clone_starts_as_its_original_stands_and_goes_its_own_way():
    p = counter()
    exe, b = load(p), ids(p)
    exe.write(b["x"], floats(1))
    exe.write(b["at"], np.zeros(N, np.int64))
    exe.run()
    other = exe.clone()
    other.run()  # with the inputs that it took over
    other.write(b["x"], floats(2))
    other.run()
    exe.run()
    np.testing.assert_array_equal(exe.read(b["total"]), floats(1) + floats(1))
    np.testing.assert_array_equal(other.read(b["total"]), floats(1) + floats(1) + floats(2))


HEAVY = [(Region.INPUT, "x", (512, 300)), (Region.OUTPUT, "o", (512,))]


def test_thread_counts_change_no_bit():
    x, results = floats(4, (512, 300)), []
    for threads in (1, 2, 4):
        exe = load(program(HEAVY, [(heavy(), "x", "o")], threads=threads))
        exe.write(0, x)
        exe.run()
        first = exe.read(1)
        for _ in range(20):
            exe.poison()
            exe.run()
            np.testing.assert_array_equal(exe.read(1), first)
        results.append(first)
    np.testing.assert_array_equal(results[1], results[2])  # the number of tasks may differ, the rows do not
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_allclose(results[0], np.exp(x.astype(np.float64)).sum(1), rtol=1e-5)


def test_clones_run_at_once_and_outlive_their_original():
    exe = load(program(HEAVY, [(heavy(), "x", "o")], threads=2))
    assert max(c.tasks for c in exe._code.artifact.codes) > 1
    inputs = [floats(seed, (512, 300)) for seed in range(3)]
    expected = []
    for x in inputs:
        exe.write(0, x)
        exe.run()
        expected.append(exe.read(1))
    clones = [exe.clone() for _ in inputs]
    del exe  # while the clones run
    faults = []

    def work(clone: CpuExecutable, x: np.ndarray, want: np.ndarray) -> None:
        for _ in range(50):
            clone.write(0, x)
            clone.poison()
            clone.run()
            if not np.array_equal(clone.read(1), want):
                faults.append(clone)

    threads = [threading.Thread(target=work, args=a) for a in zip(clones, inputs, expected)]
    clones.clear()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


@pytest.mark.parametrize("size", [LEAST_BYTES // 4, LEAST_BYTES // 4 + 1, 151_937])
@pytest.mark.parametrize("threads", [4, 7])
def test_a_large_result_is_copied_by_all_threads(threads, size):
    """Whatever the last part is left with. The copy is the caller's, and later runs do not touch it."""
    g = rlx.Graph("large")
    x = g.input("x", (size,), rlx.f32)
    g.set_outputs([x + 1.0, (x * 2.0).astype("i32")])
    compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=threads))
    array = np.arange(size, dtype=np.float32)
    compiled.run_slots([array])
    copies = [np.array(view) for view in compiled.outputs_view()]
    compiled.run_slots([-array])
    assert (copies[0] == array + 1).all() and (copies[1] == (array * 2).astype(np.int32)).all()
    copies[0][...] = 0
    assert (np.array(compiled.outputs_view()[0]) == 1 - array).all()
    assert np.array(compiled.outputs_view()[0], np.float64).dtype == np.float64


def test_threads_copy_results_of_one_run():
    g = rlx.Graph("large")
    x = g.input("x", (LEAST_BYTES,), rlx.f32)
    g.set_outputs([x + 1.0, x * 2.0])
    compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=4))
    array, faults = np.arange(LEAST_BYTES, dtype=np.float32), []
    compiled.run_slots([array])

    def work(view, wanted) -> None:
        faults.extend(n for n in range(200) if not (np.array(view) == wanted).all())

    expected = array + 1, array * 2
    threads = [threading.Thread(target=work, args=a) for a in zip(compiled.outputs_view() * 2, expected * 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


def test_memory_goes_back_with_the_last_reference():
    gc.collect()
    gc.disable()  # nothing may wait for the cycle collector
    try:
        before = memory.allocations()["live_bytes"]
        p = program([*HEAVY, (Region.HANDLE, "h", (600_000,))], [(heavy(), "x", "o")])
        exe = load(p)
        clone = exe.clone()
        assert memory.allocations()["live_bytes"] - before == sum(
            e.memory()[kind] for e in (exe, clone) for kind in ("arena", "scratch", "handles")
        )
        view = exe.view(2)
        view[...] = 3
        del exe, clone
        assert (view == 3).all()
        assert memory.allocations()["live_bytes"] - before == view.nbytes
        del view
        assert memory.allocations()["live_bytes"] == before
    finally:
        gc.enable()


def test_memory_by_purpose():
    exe = load(weighted(raw=True))
    code = sum(map(len, exe._code.artifact.objects))
    expected = {"arena": 384, "scratch": 0, "params": 160, "prepared": 0, "constants": 0, "handles": 0, "code": code}
    assert exe.memory() == expected and code > 0
    exe.prepare([0])
    assert exe.memory()["prepared"] == 160


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_allocates_nothing(threads):
    exe = load(program(HEAVY, [(heavy(), "x", "o")], threads=threads))
    small = load(counter())
    runs = [exe.run] * 20 + [small.run] * 10_000
    for run in (exe.run, small.run):
        run()
    gc.collect()
    native, blocks = memory.allocations(), sys.getallocatedblocks()
    for run in runs:
        run()
    assert sys.getallocatedblocks() - blocks <= 10  # the interpreter's own, not one a run
    assert memory.allocations() == native
    grown, peak = traced_bytes([small.run], 10_000)
    assert grown < 1000 and peak < 1000


# -- programs that would reach outside their memory ----------------------------------------------------------------


def test_a_plan_that_leaves_the_arena_is_refused():
    good = program(ADDING, [(add(), "x", "y", "o")])
    for offsets in ({0: 0, 1: 192, 2: 480}, {0: 0, 1: 192}, {0: 0, 1: 192, 2: -64}, {0: 0, 1: 193, 2: 384}):
        plan = ArenaPlan(offsets, good.plan.size_bytes, 64, 0, 0)
        bad = Program(**{f: getattr(good, f) for f in good.__dataclass_fields__} | {"plan": plan})
        with pytest.raises(PlanError, match="is not in the arena"):
            CPU.load(CPU.compile(bad))


def test_a_kernel_larger_than_its_arguments_is_refused():
    with pytest.raises(PlanError, match="the buffers of add are larger than its arguments"):
        load(program(ADDING, [(add(N + 1), "x", "y", "o")]))
    with pytest.raises(PlanError, match="larger than its arguments"):
        load(program(ADDING, [(add(), "x", "o")]))


def test_a_constant_without_its_bytes_is_refused():
    with pytest.raises(PlanError, match="constant 'c' of 160 bytes has no"):
        load(program([(Region.CONSTANT, "c", (N,))]))


# -- regions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 100, memory.HUGE_PAGE - 1, memory.HUGE_PAGE, 3 * memory.HUGE_PAGE + 5])
def test_a_region(nbytes):
    before = memory.allocations()
    region = memory.allocate(nbytes)
    assert region.nbytes == nbytes and not region.data.any()
    assert region.address % (memory.HUGE_PAGE if nbytes >= memory.HUGE_PAGE else 64) == 0
    assert nbytes == 0 or region.address == region.data.ctypes.data
    after = memory.allocations()
    assert [after[key] - before[key] for key in ("count", "live_bytes", "total_bytes")] == [1, nbytes, nbytes]
    del region
    assert memory.allocations() == after | {"live_bytes": before["live_bytes"]}


def test_poison_is_no_number_and_alignment_is_kept():
    region = memory.allocate(256, alignment=4096)
    region.data[...] = memory.POISON
    assert region.address % 4096 == 0
    assert np.isnan(region.data.view(np.float32)).all() and np.isnan(region.data.view(np.float64)).all()
    assert np.isnan(region.data.view(ml_dtypes.bfloat16).astype(np.float32)).all()
    part = region.part(64, 192)
    assert (part.address, part.nbytes) == (region.address + 64, 192) and (part.data.view(np.int64) == -1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads about
def test_a_forked_child_writes_to_memory_of_its_own():
    regions = [memory.allocate(n) for n in (100, memory.HUGE_PAGE)]
    child = os.fork()
    if child == 0:
        for region in regions:
            region.data[...] = 1
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    assert not any(region.data.any() for region in regions)


def row_in_front(threads: int) -> rlx.runtime.CompiledGraph:
    """Two products of one row, the first with ops in front of it."""
    g = rlx.Graph("row")
    x, w, v = g.input("x", (1, 512), "f32"), g.param("w", (512, 4096), "f32"), g.param("v", (4096, 512), "f32")
    g.set_outputs([rlx.sigmoid((x * 0.5 - 1.0) @ w) @ v])
    made, rng = rlx.Session("cpu", threads=threads).compile(g), np.random.default_rng(0)
    made.set_params({p.name: rng.standard_normal(p.shape.static).astype(np.float32) for p in made.params})
    return made


def test_threads_keep_a_computed_row_and_know_which_weights_come_next(monkeypatch):
    monkeypatch.setattr(products, "fetches_ahead", lambda features: True)
    x = np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)
    one, two = row_in_front(1), row_in_front(2)
    first, second = (abi.Step(*map(int, row)) for row in two._executable._whole._steps)
    assert (first.again, second.again) == (KEPT, 0) and min(first.tasks, second.tasks) > 2
    near = Reading.from_address(first.ahead)
    assert second.ahead is None and near.near_bytes > 0 and near.later_bytes == 0
    assert near.near // LINE in [address // LINE for address in (ctypes.c_int64 * 3).from_address(second.args)]
    want = [one.run({"x": x * n})[0].tobytes() for n in range(50)]
    assert [two.run({"x": x * n})[0].tobytes() for n in range(50)] == want, "no row of an earlier run is used"
    assert np.bincount(two.profile({"x": x}, runs=1).timeline.spans[:, 0]).tolist() == [first.tasks, second.tasks]

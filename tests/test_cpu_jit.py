"""Objects, libraries and targets of the CPU backend."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import platform
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import knobs
from rlx.backends.cpu import backend
from rlx.backends.cpu import target as cpu
from rlx.errors import CompileError, DeviceUnavailableError, UnknownDeviceError
from rlx.host import jit, llvm, once, processor
from rlx.host.emit import Emitter, V
from rlx.host.jit import Library, assembly, compile_object, load
from rlx.host.once import at_once
from rlx.ir.target import Target

pytestmark = pytest.mark.usefixtures("own_compilers")
HOST = cpu.host_target(1)
ADD = "define i64 @add_{n}(i64 %x) {{\n  %y = add i64 %x, {n}\n  ret i64 %y\n}}\n"
ROOTS = """
declare double @exp(double)
declare double @erf(double)
define void @both(ptr %x) {
  %a = load double, ptr %x
  %b = call double @exp(double %a)
  %c = call double @erf(double %b)
  store double %c, ptr %x
  ret void
}
"""


def object_of(n: int) -> bytes:
    return compile_object(ADD.format(n=n), HOST)


def test_several_objects_in_one_library() -> None:
    library = Library([object_of(n) for n in range(5)], [f"add_{n}" for n in range(5)])
    for n in range(5):
        assert library.function(f"add_{n}", ctypes.c_int64, ctypes.c_int64)(100) == 100 + n
    assert len({library.address(f"add_{n}") for n in range(5)}) == 5


def test_libm_is_found() -> None:
    from math import erf, exp

    x = np.array([-0.5])
    Library([compile_object(ROOTS, HOST)], ["both"]).function("both", None, ctypes.c_void_p)(x.ctypes.data)
    assert x[0] == erf(exp(-0.5))


def test_a_function_keeps_its_code() -> None:
    calls = [Library([object_of(n)], [f"add_{n}"]).function(f"add_{n}", ctypes.c_int64, ctypes.c_int64) for n in range(20)]
    gc.collect()
    for _ in range(50):  # would reuse the pages of code that was dropped
        Library([object_of(77)], ["add_77"])
    assert [call(1) for call in calls] == [1 + n for n in range(20)]


def test_unloading_gives_memory_back() -> None:
    image = object_of(1)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(200):
        Library([image], ["add_1"])
    before = resident()
    for _ in range(800):
        Library([image], ["add_1"])
    assert resident() - before < 2 << 20


def test_code_outlives_the_interpreter_quietly() -> None:
    """Libraries that are alive at exit do not crash it."""
    script = (
        "from rlx.host.jit import *; from rlx.host.processor import host_target\n"
        f"keep = Library([compile_object({ADD.format(n=3)!r}, host_target(1))], ['add_3'])\n"
        "import builtins; builtins.keep = keep; keep.cycle = keep"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_faults_name_the_kernel() -> None:
    with pytest.raises(CompileError, match=r"kernel 'broken'.*\n?.*type"):
        compile_object("define void @broken() {\n  ret i32 1\n}\n", HOST)
    with pytest.raises(CompileError, match="kernel 'layer 3'"):
        compile_object("nonsense", HOST, "layer 3")
    with pytest.raises(CompileError, match="cannot link absent"):
        Library([object_of(1)], ["absent"])
    with pytest.raises(CompileError, match="cannot link add_1"):
        Library([b"not an object"], ["add_1"])


def test_code_for_another_cpu_is_refused() -> None:
    elsewhere = cpu.target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",))
    if HOST.features[0].startswith("triple=aarch64"):
        elsewhere = cpu.target_for("x86_64-unknown-linux-gnu", "x86-64-v3")
    image = compile_object(ADD.format(n=1), elsewhere)
    with pytest.raises(DeviceUnavailableError, match="needs a CPU with triple="):
        load([image], ["add_1"], elsewhere)
    unknown = cpu.target_for(processor.machine_of(HOST)[0], "generic", ("avx512fp16x",))
    with pytest.raises(DeviceUnavailableError, match="avx512fp16x"):
        load([image], ["add_1"], unknown)
    with pytest.raises(CompileError, match="not a CPU target"):
        compile_object(ADD.format(n=1), Target("cuda", frozenset()))


# -- targets -------------------------------------------------------------------------------------------------------


def test_levels() -> None:
    v4, v3, v1 = (cpu.target_for("x86_64-unknown-linux-gnu", f"x86-64{v}") for v in ("-v4", "-v3", ""))
    arm = cpu.target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",), threads=4)
    assert [t.vector_bytes for t in (v4, v3, v1, arm)] == [64, 32, 16, 16]
    assert [t.panel("f32") for t in (v4, v3, arm)] == [(48, 1), (16, 1), (16, 1)]
    assert [t.panel("f64") for t in (v4, v3, arm)] == [(24, 1), (8, 1), (8, 1)]
    assert v4.panel("i32") == (0, 1)
    assert arm.threads == 4
    assert (arm.panel("u8 i8"), arm.panel("bf16")) == ((16, 4), (16, 1))  # sdot
    for core in ("neoverse-n2", "neoverse-v2", "apple-m2"):  # two by two sums in an instruction
        newer = cpu.target_for("aarch64-linux-gnu", core)
        assert (newer.panel("u8 i8"), newer.panel("bf16"), newer.panel("f32")) == ((16, 8), (16, 4), (16, 1))
    assert {"f32", "bf16", "bool", "i64"} <= v4.dtypes and "f8e4m3" in v4.dtypes
    assert pickle.loads(pickle.dumps(v4)) == v4


def test_cpus_imply_their_features() -> None:
    def levels(name: str) -> str:
        return " ".join(cpu.target_for("x86_64-unknown-linux-gnu", name).features[2:])

    assert levels("skylake") == levels("x86-64-v3") == "avx2 fma f16c" and levels("generic") == ""
    assert levels("icelake-server") == f"{levels('x86-64-v4')} avx512vnni"
    assert levels("sapphirerapids").endswith("avx512fp16 amx-tile amx-bf16 amx-int8")
    apple, arm = cpu.target_for("arm64-apple-macosx", "apple-m2"), cpu.target_for("aarch64-linux-gnu", "neoverse-n2")
    assert apple.features[2:] == arm.features[2:] == tuple(processor.ARM)


@pytest.mark.parametrize("architecture", processor.CPUS)
def test_llvm_knows_the_cpus_that_targets_name(architecture: str) -> None:
    """It ends the process for an x86 CPU that it does not know."""
    script = (
        "from rlx.host.jit import *; from rlx.backends.cpu.target import target_for\n"
        f"for name in {['generic', *processor.CPUS[architecture]]}:\n"
        f"    compile_object({ADD.format(n=3)!r}, target_for('{architecture}-linux-gnu', name))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_cpus_and_triples_that_llvm_does_not_know_are_refused() -> None:
    """Before code is made, which may end the process."""
    for triple, name in (("x86_64-linux-gnu", "nonsense"), ("x86_64-linux-gnu", "apple-m1"), ("aarch64-linux-gnu", "x86-64-v3")):
        found = f"'{name}' is not among the CPUs of '{triple}': generic, .*; for another one give generic and its features"
        with pytest.raises(UnknownDeviceError, match=found):
            cpu.target_for(triple, name)
    with pytest.raises(UnknownDeviceError, match="'zz80-unknown-linux' is no triple such as 'aarch64-linux-gnu': .*compatible"):
        cpu.target_for("zz80-unknown-linux", "generic")


def test_features_decide_the_code() -> None:
    text = "define <16 x float> @f(<16 x float> %a) {\n  %b = fmul <16 x float> %a, %a\n  ret <16 x float> %b\n}\n"
    wide, narrow = (assembly(text, cpu.target_for("x86_64-unknown-linux-gnu", f"x86-64-{v}")) for v in ("v4", "v3"))
    assert "zmm" in wide and "zmm" not in narrow


@pytest.mark.parametrize(
    ("words", "has"),
    [
        ({16: 0b11}, "neon"),  # a Cortex-A72: floating point, vectors
        ({16: 1 << 1 | 1 << 10 | 1 << 20}, "neon fullfp16 dotprod"),  # a Neoverse N1
        ({16: 1 << 1 | 1 << 10 | 1 << 20 | 1 << 23, 26: 1 << 13 | 1 << 14}, "neon fullfp16 dotprod fp16fml i8mm bf16"),
    ],
)
def test_features_of_aarch64_are_those_that_linux_gives_each_process(words, has):
    found = processor._linux_arm(lambda entry: words.get(entry, 0))
    assert found == ("aarch64-unknown-linux-gnu", frozenset(has.split()))


def test_the_auxiliary_vector_is_not_asked_elsewhere():
    assert (processor._linux_arm() is None) == (platform.machine() != "aarch64")


def test_threads_from_argument_knob_and_machine() -> None:
    assert cpu.host_target(3).threads == 3
    with knobs.override(RLX_THREADS=5):
        assert cpu.host_target().threads == 5
        assert cpu.host_target(2).threads == 2
    with knobs.override(RLX_THREADS=0):
        assert cpu.host_target().threads == processor.available_threads() >= 1


@pytest.mark.parametrize(
    "membership, files, cpus",
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "20000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/elsewhere\n", {}, 1 << 30),
        (
            "3:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("3:cpu,cpuacct:/job\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 30),
        ("2:memory:/job\n", {"cpu.max": "100000 100000"}, 1 << 30),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, 1 << 30),
    ],
)
def test_cgroup_quotas(tmp_path: Path, membership: str, files: dict[str, str], cpus: int) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processor.cgroup_quota(tmp_path / "fs", tmp_path / "membership") == cpus
    assert processor.cgroup_quota(tmp_path / "fs", tmp_path / "none") == 1 << 30


@pytest.mark.parametrize(
    "second, first, size, found",
    [
        ("0", "0", "1024K", 1 << 20),
        ("0-1", "0-1", "2048K", 2 << 20),  # two threads of one core
        ("0-3", "0", "4096K", 1 << 20),  # four cores have it together
        ("0,8", "0,8", "1280K", 1280 << 10),
        ("0", "0", "nonsense", 1 << 20),
        ("", "0", "2048K", 1 << 20),
    ],
)
def test_core_caches(tmp_path: Path, second: str, first: str, size: str, found: int) -> None:
    caches = {"0": ("1", "Data", first, "48K"), "1": ("1", "Instruction", "0-63", "64K"), "2": ("2", "Unified", second, size)}
    for index, values in caches.items():
        (tmp_path / f"index{index}").mkdir()
        for name, text in zip(("level", "type", "shared_cpu_list", "size"), values):
            (tmp_path / f"index{index}" / name).write_text(f"{text}\n")
    assert processor.core_cache_bytes(tmp_path) == found
    assert processor.core_cache_bytes(tmp_path / "none") == 1 << 20


FORK = """
import os, threading, warnings
import numpy as np
import rlx
warnings.simplefilter("ignore", DeprecationWarning)  # Python dislikes forks of threaded processes; users do it
def compiled(n):
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (n,), "f32") * float(n)])
    return rlx.Session("cpu").compile(g)
stop = []
def forever():
    n = 0
    while not stop:
        compiled(n := n + 1)
compiled(1).run({"x": np.ones(1, np.float32)})  # all modules are imported: a fork within an import hangs by Python's own lock
other = threading.Thread(target=forever, daemon=True)
other.start()
for n in range(1000, 1006):
    child = os.fork()
    if child == 0:
        os._exit(int((compiled(n).run({"x": np.ones(n, np.float32)})[0] != n).any()))
    assert os.waitpid(child, 0)[1] == 0
stop.append(True)
other.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_forked_during_a_compile_compiles() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", FORK], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_threads_that_compile_the_same_kernel_at_once_compile_it_once(monkeypatch):
    """As ranks do that are threads. The first compile waits a while for the other thread to begin one too."""
    names, both, emit = [], threading.Barrier(2), jit.compile_object

    def slow(*args, **how):
        names.append(args[2])
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return emit(*args, **how)

    def compiled():
        g = rlx.Graph("once")
        g.set_outputs([rlx.softmax(g.input("x", (7, 61), "f32")) * 1.25])
        rlx.Session("cpu", threads=1).compile(g)

    monkeypatch.setattr(jit, "compile_object", slow)
    backend._compiled.cache_clear()
    threads = [threading.Thread(target=compiled) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert names and len(names) == len(set(names)), names


ONCE = """
import sys, threading
from rlx.host.once import Once
class Key:
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return hash((self.n,))
    def __eq__(self, other):
        return self.n == other.n
sys.setswitchinterval(1e-6)
made, right = [], []
once = Once(lambda key: made.append(key.n) or key.n, 100)
def work():
    right.append(all(once(Key(i % 3)) == i % 3 for i in range(5000)))
threads = [threading.Thread(target=work) for _ in range(6)]
for t in threads: t.start()
for t in threads: t.join()
assert right == [True] * 6 and sorted(made) == [0, 1, 2], (right, made)
"""


def test_results_made_once_are_found_by_many_threads() -> None:
    """Keys compare in Python, so threads meet amid the look-up. In a process of its own: a broken table ended the process."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", ONCE], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize("starting", [0, 1])
def test_work_is_done_where_the_system_gives_fewer_threads(monkeypatch: pytest.MonkeyPatch, starting: int) -> None:
    """As at the end of the interpreter, or at a limit on processes."""
    left, start = [None] * starting, threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(once, "available_threads", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", limited)
    said: list[int] = []
    assert at_once(lambda n: 2 * n, range(5), lambda done, total: said.append(done)) == [0, 2, 4, 6, 8]
    assert said == [0, 1, 2, 3, 4, 5]
    backend._load_compiler()
    monkeypatch.setattr(llvm, "loaded", lambda: False)
    ahead, asked = once.Ahead(lambda n: asked.append(n), 2), list[int]()
    for n in range(3):
        ahead(n)
    backend.CpuBackend().warm(HOST)
    assert not asked


def test_kernels_are_made_while_the_graph_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a compile asks for afterwards are the same ones."""
    g = rlx.Graph("foreseen")
    x, h = g.input("x", (5, 7), "f32"), g.handle(rlx.BufferHandle("h", (5, 3), rlx.f32))
    g.set_outputs([rlx.softmax(x @ g.param("w", (7, 3), "f32")) + h])
    g.assign(h, h * 2.0)
    foreseen: list[tuple[str, bool]] = []

    def ahead(make: Any, threads: int, weight: Any, handed: threading.Event) -> Any:
        return lambda job: (foreseen.append((job.key, job.once)), make(job))

    def at_once(make: Any, jobs: Any, progress: Any) -> Any:
        assert {(job.key, job.once) for job in jobs} == set(foreseen) and len(foreseen) == len(set(foreseen)) > 2
        assert {once for _, once in foreseen} == {True, False}
        before = make.misses
        made = [make(job) for job in jobs]
        assert make.misses == before
        return made

    monkeypatch.setattr(backend, "Ahead", ahead)
    monkeypatch.setattr(backend, "at_once", at_once)
    packed = [text for name, text in rlx.Session(threads=1).compile(g).report().texts.items() if name.startswith("pack")]
    assert foreseen and len(packed) == 1 and "optnone" in packed[0]


def test_the_heaviest_of_what_waits_is_made_next() -> None:
    begun, gate, made = threading.Event(), threading.Event(), list[int]()

    def make(n: int) -> None:
        begun.set()
        gate.wait(60)
        made.append(n)

    ahead = once.Ahead(make, 1, lambda n: n % 10)
    ahead(11)
    begun.wait(60)
    for n in (1, 5, 12, 3, 25):
        ahead(n)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "rlx compile":
            thread.join(60)
    assert made == [11, 5, 25, 3, 12, 1]


@pytest.mark.parametrize("hands", [True, False])
def test_whoever_begins_a_thread_waits_until_it_needs_no_gil(hands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or has made the item without that."""
    monkeypatch.setattr(once, "LONGEST", 60)
    handed, gate, made = threading.Event(), threading.Event(), list[int]()

    def make(n: int) -> None:
        made.append(n)
        if hands:
            handed.set()
            gate.wait(60)

    ahead = once.Ahead(make, 1, handed=handed)
    ahead(1)
    assert made == [1] and handed.is_set()
    begun = time.perf_counter()
    ahead(2)
    assert not hands or time.perf_counter() - begun < 30  # no thread begins
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "rlx compile":
            thread.join(60)
    assert made == [1, 2]


def test_kernels_that_take_llvm_longest_are_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("three")
    x, w = g.input("x", (1, 2, 8, 16), "f32"), g.input("w", (16, 16), "f32")
    g.set_outputs([rlx.softmax(x), rlx.attention(x, x, x) @ w])
    asked, all_of = list[str](), backend.at_once

    def at_once(make: Any, jobs: Any, progress: Any) -> Any:
        asked.extend(job.kernel.origin[0] for job in jobs)
        return all_of(make, jobs, progress)

    monkeypatch.setattr(backend, "at_once", at_once)
    rlx.Session(threads=1).compile(g)
    assert asked == ["attention", "matmul", "max"]


def test_what_is_made_ahead_is_made_in_few_threads_and_faults_are_left_out() -> None:
    running, most, made, gate = 0, 0, list[int](), threading.Lock()

    def make(n: int) -> None:
        nonlocal running, most
        with gate:
            running += 1
            most = max(most, running)
        if n % 3 == 1:
            with gate:
                running -= 1
            raise ValueError
        with gate:
            running -= 1
            made.append(n)

    ahead = once.Ahead(make, 2)
    for n in range(60):
        ahead(n)
    for thread in threading.enumerate():
        if thread.name == "rlx compile":
            thread.join()
    assert sorted(made) == [n for n in range(60) if n % 3 != 1] and most <= 2


def test_what_is_made_ahead_is_kept_until_it_is_asked_for() -> None:
    """More results than are kept otherwise: each would push out one that has not been asked for."""
    results = once.Once(lambda n: n * n, 4)
    ahead = once.Ahead(results.held, 2)
    for n in range(20):
        ahead(n)
    for thread in threading.enumerate():
        if thread.name == "rlx compile":
            thread.join()
    made = [results(n) for n in range(20)]
    assert made == [n * n for n in range(20)] and results.misses == 20
    del ahead
    gc.collect()
    assert results(0) == 0 and results.misses == 21


def test_work_ahead_does_not_delay_the_end_of_a_process() -> None:
    """The items in work are finished, and the others left out."""
    text = """
import threading, time
from rlx.host.once import Ahead
begun = threading.Event()
def make(n):
    begun.set()
    while threading.main_thread().is_alive():
        time.sleep(0.001)
    print(n, flush=True)
ahead = Ahead(make, 1)
for n in range(20):
    ahead(n)
begun.wait()
"""
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("0\n", "")


def test_a_kernel_of_runs_and_of_preparation_is_compiled_once() -> None:
    """The body's constant part is prepared, by a kernel with the text of another that runs: two codes would have one symbol."""
    g = rlx.Graph("both")
    x, w = g.input("x", (8, 8), "f32"), g.param("w", (8, 8), "f32")
    (out,), _, _ = rlx.counted_loop(lambda i, go, c: (go, c + rlx.softmax(w * 2.0)), x, limit=3)
    g.set_outputs([out, rlx.softmax(x * 2.0)])
    compiled = rlx.Session("cpu").compile(g)
    symbols = [code.symbol for code in compiled.artifact.codes if code.symbol]
    assert len({*symbols}) == len(symbols) and not any("optnone" in text for text in compiled.report().texts.values())


def test_a_fault_costs_no_machine() -> None:
    """One takes 28 KB, which are never freed."""
    triple, _, features = processor.machine_of(HOST)
    machine = triple, "x86-64" if triple.startswith("x86_64") else "generic", features  # of no compile in another thread
    known = llvm.code(ADD.format(n=1), machine)
    before = list(llvm._idle[machine])
    with pytest.raises(llvm.Rejected):
        llvm.code("nonsense", machine)
    assert len(before) == 1 and llvm._idle[machine] == before and llvm.code(ADD.format(n=1), machine) == known


@pytest.mark.parametrize("make", [lambda *m: llvm.Machine(llvm.load(), *m), llvm.PackageMachine], ids=["functions", "classes"])
def test_a_machine_that_llvm_does_not_know_is_rejected(make: Any) -> None:
    with pytest.raises(llvm.Rejected, match="nonsense"):
        make("nonsense-unknown-linux", "", "")


def test_different_kernels_are_compiled_at_once_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other one inside its work, so one thread alone would not end."""
    monkeypatch.setattr(once, "available_threads", lambda: 2)
    both = threading.Barrier(2)

    def make(n: int) -> bytes:
        both.wait(60)
        return llvm.code(ADD.format(n=n), processor.machine_of(HOST))

    assert at_once(make, [1, 2]) == [object_of(1), object_of(2)]


def test_the_first_fault_of_work_done_at_once_is_raised_and_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "available_threads", lambda: 1)  # of several, others may begin one more
    begun: list[int] = []

    def make(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise CompileError("three")
        return n

    with pytest.raises(CompileError, match="three"):
        at_once(make, range(10))
    assert begun == [0, 1, 2, 3] and "rlx compile" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    "other", [("compiler_version", lambda: "llvmlite-0.51.1"), ("_folder", lambda: "/a/system/with/libllvmlite.dylib")],
    ids=["version", "library"],
)
def test_other_versions_and_systems_compile_by_llvmlites_classes(monkeypatch: pytest.MonkeyPatch, other: tuple[str, Any]) -> None:
    known = object_of(1)
    monkeypatch.setattr(llvm, *other)
    monkeypatch.setattr(llvm, "_functions", {})
    monkeypatch.setattr(llvm, "_idle", defaultdict(list))
    machine = processor.machine_of(HOST)
    assert llvm.code(ADD.format(n=1), machine) == known and not llvm.load()
    assert b"add_1:" in llvm.code(ADD.format(n=1), machine, assembly=True)
    with pytest.raises(CompileError, match="kernel 'layer 3'"):
        compile_object("nonsense", HOST, "layer 3")


LOOP = """
define i64 @sum(i64 %n) ATTRIBUTES {
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%j, %loop]
  %x = phi i64 [0, %entry], [%y, %loop]
  %y = add i64 %x, %i
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, %n
  br i1 %more, label %loop, label %done
done:
  ret i64 %y
}
"""


@pytest.mark.parametrize("make", [lambda *m: llvm.Machine(llvm.load(), *m), llvm.PackageMachine], ids=["functions", "classes"])
def test_modules_that_are_quick_go_to_a_machine_that_does_not_optimise(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attribute alone would leave LLVM its register allocation and its passes, and most of their time."""
    quick, plain = (LOOP.replace("ATTRIBUTES", attributes) for attributes in (llvm.QUICK, "nounwind"))
    made = make(*processor.machine_of(HOST)).code(quick)
    monkeypatch.setattr(llvm, "LEVELS", {False: 3, True: 3})
    optimising = make(*processor.machine_of(HOST))
    assert len({made, optimising.code(quick), optimising.code(plain)}) == 3
    assert Library([made], ["sum"]).function("sum", ctypes.c_int64, ctypes.c_int64)(5) == 10


def test_this_version_of_llvmlite_is_used_without_its_classes() -> None:
    """It is the version that CI installs; if not, compiles are slower, and its functions are to be declared."""
    object_of(1)
    assert {type(found) for idle in llvm._idle.values() for found in idle} == {llvm.Machine}


CUT = """
import rlx
for out in (4, 5, 6, 7):
    g = rlx.Graph("cut")
    x, w = g.input("x", (1, 4, 11, 7), "f32"), g.param("w", (out, 4, 5, 1), "f32")
    g.set_outputs([rlx.conv(x, w, strides=2, low=1)])
    rlx.Session("cpu").compile(g, rlx.CompileOptions(precision="bf16"))
"""


def test_weights_of_few_columns_are_rounded_to_16_bits_ahead_of_runs() -> None:
    """LLVM aborts at vectors of 4 to 7 elements cut to 16 bits and widened again, in a function that it does not optimise."""
    root, env = Path(__file__).parents[1], {**os.environ, "RLX_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", CUT], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_threads_that_first_need_a_target_at_once_wait_until_all_of_it_is_there() -> None:
    """LLVM ends the process where a machine is made of a target of which only a part is registered."""
    calls, others, early = list[str](), list[threading.Thread](), list[str]()

    def called(name: str, *_: Any) -> Any:
        calls.append(name)
        if name == "InitializeAllTargetInfos" and not others:
            others.append(threading.Thread(target=llvm.Machine, args=(functions, *machine)))
            others[0].start()
            others[0].join(0.1)  # it would go on here
        if name == "CreateTargetMachine" and "InitializeAllAsmPrinters" not in calls:
            early.append(name)
        return "InitializeAllTargetInfos" in calls if name != "DisposeString" else None

    names = ["GetTargetFromTriple", "CreateTargetMachine", *llvm.SHORT, *llvm.LONG]
    functions = {name: partial(called, name) for name in names}
    machine = "aarch64-linux-gnu", "generic", ""
    llvm.Machine(functions, *machine)
    others[0].join()
    assert not early and calls.count("InitializeAllTargetInfos") == 1


def test_arithmetic_on_constants_is_done_when_code_is_written() -> None:
    """Code that LLVM does not optimise would do it at each run."""
    e, x = Emitter(), V("%x", "i64")
    two, three = e.i64(2), e.i64(3)
    assert [str(e.bin(op, two, three)) for op in ("add nsw", "sub", "mul")] == ["i64 5", "i64 -1", "i64 6"]
    assert [e.bin(op, x, n) for op, n in (("add", 0), ("sub", 0), ("mul", 1), ("udiv", 1))] == [x] * 4
    assert e.bin("mul", x, 0).text == "0"
    assert [e.cmp(order, two, three).text for order in ("eq", "ne", "slt", "sge")] == ["false", "true", "true", "false"]
    assert e.select(e.cmp("slt", two, three), x, two) is x and e.gep(V("%p", "ptr"), e.i64(0)).text == "%p" and not e.lines
    for op, a, b in (("udiv", two, e.i64(0)), ("sub", two, x), ("mul", e.i64(0), x), ("shl", x, two)):
        assert e.bin(op, a, b).text[0] == "%"
    assert len(e.lines) == 4 and e.cmp("ult", two, three).text[0] == "%"

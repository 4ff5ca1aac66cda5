"""Code shared by all benchmarks: the machine's limits by generated code, interleaved medians, tables, and a header with the
machine and the versions. Limits are measured in the same rounds as the code compared with them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.memory import allocate
from rlx.backends.cpu.target import host_target
from rlx.host import jit
from rlx.host.emit import ATTRIBUTES, Emitter, V, vector
from rlx.ir.target import Target

Call = Callable[[], object]


def interleaved(calls: Mapping[str, Call], rounds: int = 9, seconds: float = 0.01, threads: int = 1) -> dict[str, float]:
    """Median seconds per call of each. The calls alternate: each of `rounds` runs each of them for about `seconds`.

    With one thread it is the CPU time of the calling thread, which excludes other programs on the same core (they made the wall
    time of one loop of multiply-adds vary fourfold). With more threads it has to be wall time: run those on a quiet machine,
    and see `share`. Calls must do their work in the calling thread when `threads` is 1."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def share(rate: float, limit: float) -> str:
    """A rate as percent of a limit measured in the same rounds. A rate above the limit is impossible: then one of
    the two measurements was disturbed (or the code of the limit is not the fastest), and the text is marked with a `!`."""
    return f"{100 * rate / limit:.0f}%{'!' if rate > 1.03 * limit else ''}"


# -- limits of this machine ----------------------------------------------------------------------------------------


def fma_call(target: Target | None = None, steps: int = 200_000) -> tuple[Call, float]:
    """(call, floating-point operations per call): f32 multiply-adds on enough registers to hide their latency, one core."""
    target = target or host_target(1)
    lanes = target.vector_bytes // 4
    chains = 24 if target.vector_bytes == 64 else 12
    e = Emitter()
    ty = vector("float", lanes)
    scale, shift = (e.load(ty, e.gep(V("%args", "ptr"), at), 4) for at in (0, 64))
    with e.loop(0, steps, carried=[e.const(ty, float(n)) for n in range(chains)]) as loop:
        loop.next = [e.fma(scale, shift, total) for total in loop.carried]
    total = loop.results[0]
    for other in loop.results[1:]:
        total = e.bin("fadd", total, other)
    e.store(total, e.gep(V("%args", "ptr"), 128), 4)
    return _call(e, "fma_peak", target, 192), 2.0 * steps * chains * lanes


def dot_call(width: int, target: Target | None = None, steps: int = 20_000) -> tuple[Call, float]:
    """(call, operations per call) of the instruction that adds `width` products per lane (1: f32, 2: bf16, 4: u8 by i8), on
    registers of one core; on the matrix unit if the target uses it."""
    target = target or host_target(1)
    if width == 1:
        return fma_call(target, steps)
    e = Emitter()
    if amx.usable(target.features, width, amx.SIDE * width):
        amx.configure(e, V("%args", "ptr"), 2 * amx.SIDE)
        place, products = V("%args", "ptr"), amx.FEATURES[width][1]
        for tile in range(8):
            e.external("llvm.x86.tileloadd64", "void", V(str(tile), "i8"), place, e.i64(64))
        with e.loop(0, steps):
            for sums, a, b in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                e.external(f"llvm.x86.{products}", "void", *(V(str(tile), "i8") for tile in (sums, a, b)))
        amx.release(e)
        return _call(e, "dot_peak", target, 1024), 2.0 * steps * 4 * amx.SIDE**3 * width
    ty = vector("float" if width == 2 else "i32", 16)
    inner = vector("bfloat" if width == 2 else "i8", 16 * width)
    name = {2: "x86.avx512bf16.dpbf16ps.512", 4: "x86.avx512.vpdpbusd.512"}[width]
    a, b = (e.load(inner, e.gep(V("%args", "ptr"), at), 4) for at in (0, 64))
    with e.loop(0, steps, carried=[V("zeroinitializer", ty)] * 24) as loop:
        loop.next = [e.intrinsic(name, total, a, b, suffix=(), returns=ty) for total in loop.carried]
    for n, total in enumerate(loop.results):
        e.store(total, e.gep(V("%args", "ptr"), 128 + 64 * n), 4)
    return _call(e, "dot_peak", target, 128 + 64 * 24), 2.0 * steps * 24 * 16 * width


def read_call(nbytes: int, target: Target | None = None) -> tuple[Call, float]:
    """(call, bytes per call): reads that much memory once, in order, on one core."""
    target = target or host_target(1)
    lanes, streams = target.vector_bytes // 4, 8
    step = streams * target.vector_bytes
    nbytes = nbytes // step * step
    e = Emitter()
    ty = vector("i32", lanes)
    base = e.gep(V("%args", "ptr"), 64)
    with e.loop(0, nbytes, step, carried=[V("zeroinitializer", ty)] * streams) as loop:
        at = e.gep(base, loop.index)
        parts = [e.load(ty, e.gep(at, n * target.vector_bytes), 64) for n in range(streams)]
        loop.next = [e.bin("or", total, part) for total, part in zip(loop.carried, parts)]
    total = loop.results[0]
    for other in loop.results[1:]:
        total = e.bin("or", total, other)
    e.store(total, V("%args", "ptr"), 4)
    return _call(e, "read_all", target, nbytes + 64), float(nbytes)


def _call(e: Emitter, name: str, target: Target, nbytes: int) -> Call:
    """The emitted body as a call on `nbytes` of memory, all of it touched."""
    e.do("ret void")
    text = "\n".join([*e.declarations, ATTRIBUTES, e.function(name, "ptr %args")])
    library = jit.load([jit.compile_object(text, target)], [name], target)
    function = library.function(name, None, ctypes.c_void_p)
    memory = allocate(nbytes)
    memory.data[...] = 1
    address = ctypes.c_void_p(memory.address)
    return lambda keep=memory: function(address)


# -- output --------------------------------------------------------------------------------------------------------


def header(*packages: str) -> str:
    """Machine and versions, for the first lines of a result."""
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    family = {line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith(("cpu family", "model\t"))}
    features = [f for f in host_target(1).features if "=" not in f]
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages]
    return "\n".join(
        [
            f"{model} (family/model {'/'.join(sorted(family))}), {os.cpu_count()} CPUs, {' '.join(features)}",
            f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {', '.join(versions)}",
        ]
    )


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return lines.read().splitlines()
    except OSError:  # not Linux
        return []


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[x]) for row in cells) for x in range(len(heads))]
    lines = ["  ".join(c.ljust(w) if x == 0 else c.rjust(w) for x, (c, w) in enumerate(zip(row, widths))) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

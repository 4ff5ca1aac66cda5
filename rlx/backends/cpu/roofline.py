"""The roofline of this machine, measured by generated code: operations on registers, and reading memory. Kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time
from collections.abc import Callable
from functools import lru_cache

from rlx.backends.cpu.dots import dot_of
from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.tiles import registers_of
from rlx.backends.cpu.memory import allocate
from rlx.backends.cpu.target import host_target
from rlx.host import jit
from rlx.host.disk import disk_cache, source_digest
from rlx.host.emit import ATTRIBUTES, Emitter, V, vector
from rlx.host.processor import processor
from rlx.ir.cost import Roofline
from rlx.ir.target import Target

Call = Callable[[], object]
TRIALS = 9  # the best counts
READ = tuple(1 << n for n in (14, 16, 18, 20, 22, 25))  # bytes of each thread, from the first-level cache to memory
PIECE = 1 << 23  # bytes that one trial reads, at least
_known: dict[tuple[str, ...], Roofline] = {}  # of this process


def roofline(target: Target) -> Roofline:
    """That of as many threads as the target has. Measuring takes about half a second."""
    key = (processor(), *target.features, str(target.threads), source_digest())
    if key not in _known:
        entry, disk = f"roofline-{hashlib.sha256(repr(key).encode()).hexdigest()}", disk_cache()[0]
        found = _parsed(disk.get(entry)[0]) if disk is not None else None
        if found is None:
            found = _measured(target)
            if disk is not None:
                disk.put(entry, [json.dumps([dict(found.operations), found.reading]).encode()])
        _known[key] = found
    return _known[key]


def _parsed(content: bytes | None) -> Roofline | None:
    """None: there is no sound entry."""
    try:
        operations, reading = json.loads(content or b"")
        return Roofline({str(k): float(v) for k, v in operations.items()}, tuple((int(n), float(rate)) for n, rate in reading))
    except (ValueError, TypeError, AttributeError):
        return None


def _measured(target: Target) -> Roofline:
    widths = {"f32": 1}
    if dot_of(target, "bf16") or "amx-bf16" in target.features:
        widths["bf16"] = 2
    if dot_of(target, "u8 i8") or "amx-int8" in target.features:
        widths["i8"] = 4
    threads = target.threads
    operations = {name: _rate([dot_call(width, target) for _ in range(threads)]) for name, width in widths.items()}
    operations["f64"] = operations["f32"] / 2  # half as many lanes
    reading = [(size * threads, _rate([read_call(size, target, max(1, PIECE // size)) for _ in range(threads)])) for size in READ]
    return Roofline(operations, tuple(reading))


def _rate(calls: list[tuple[Call, float]]) -> float:
    """The work per second of calls in threads of their own, all at once. It is the CPU time of the threads that counts: other
    programs on the machine do not."""
    times = [[0] * TRIALS for _ in calls]
    barrier = threading.Barrier(len(calls))

    def work(at: int) -> None:
        for trial in range(TRIALS):
            barrier.wait()
            begin = time.thread_time_ns()
            calls[at][0]()
            times[at][trial] = time.thread_time_ns() - begin

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(amount / min(spent) for (_, amount), spent in zip(calls, times)) * 1e9


def fma_call(target: Target | None = None, steps: int = 200_000) -> tuple[Call, float]:
    """(call, floating-point operations per call): f32 multiply-adds on enough registers to hide their latency, one core."""
    target = target or host_target(1)
    lanes = target.vector_bytes // 4
    chains = 24 if registers_of(target) == 32 else 12
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
    """(call, operations per call) of the instruction that sums products (`width` 1: f32, 2: bf16, 4: u8 by i8), on registers of
    a core; on the matrix unit if the target uses it."""
    target = target or host_target(1)
    if width == 1:
        return fma_call(target, steps)
    e = Emitter()
    if amx.multiplies(target.features, width):
        amx.configure(e, V("%args", "ptr"), 2 * amx.SIDE)
        place, products = V("%args", "ptr"), amx.FEATURES[width][1]
        for tile in range(8):
            amx.do(e, "tileloadd64", tile, place, e.i64(64))
        with e.loop(0, steps):
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                amx.do(e, products, amx.SUMS[i][j], amx.A[i], amx.B[j])
        amx.release(e)
        return _call(e, "dot_peak", target, 1024), 2.0 * steps * 4 * amx.SIDE**3 * width
    dot = dot_of(target, "bf16" if width == 2 else "u8 i8")
    assert dot, f"{target.features} have no instruction that sums {width} products"
    ty, words = vector("float" if width == 2 else "i32", dot.lanes), vector("i32", dot.lanes)
    a, b = (dot.operand(e, e.load(words, e.gep(V("%args", "ptr"), at), 4)) for at in (0, 64))  # bfloat vectors are never loaded
    with e.loop(0, steps, carried=[V("zeroinitializer", ty)] * 24) as loop:
        loop.next = [dot.add(e, total, a, b) for total in loop.carried]
    for n, total in enumerate(loop.results):
        e.store(total, e.gep(V("%args", "ptr"), 128 + 64 * n), 4)
    return _call(e, "dot_peak", target, 128 + 64 * 24), 2.0 * steps * 24 * dot.lanes * dot.group


def read_call(nbytes: int, target: Target | None = None, times: int = 1) -> tuple[Call, float]:
    """(call, bytes per call): reads that much memory, in order, on one core, so many times."""
    target = target or host_target(1)
    lanes, streams = target.vector_bytes // 4, 8
    step = streams * target.vector_bytes
    nbytes = nbytes // step * step
    e = Emitter()
    ty = vector("i32", lanes)
    base = e.gep(V("%args", "ptr"), 64)
    with e.loop(0, times, carried=[V("zeroinitializer", ty)] * streams) as again:
        with e.loop(0, nbytes, step, carried=again.carried) as loop:
            at = e.gep(base, loop.index)
            parts = [e.load(ty, e.gep(at, n * target.vector_bytes), 64) for n in range(streams)]
            loop.next = [e.bin("or", total, part) for total, part in zip(loop.carried, parts)]
        again.next = loop.results
    total = again.results[0]
    for other in again.results[1:]:
        total = e.bin("or", total, other)
    e.store(total, V("%args", "ptr"), 4)
    return _call(e, "read_all", target, nbytes + 64), float(nbytes * times)


@lru_cache(64)
def _library(text: str, name: str, target: Target) -> jit.Library:
    return jit.load([jit.compile_object(text, target)], [name], target)


def _call(e: Emitter, name: str, target: Target, nbytes: int) -> Call:
    """The emitted body as a call on `nbytes` of memory, all of it touched."""
    e.do("ret void")
    text = "\n".join([*e.declarations, ATTRIBUTES, e.function(name, "ptr %args")])
    function = _library(text, name, target).function(name, None, ctypes.c_void_p)
    memory = allocate(nbytes)
    memory.data[...] = 1
    address = ctypes.c_void_p(memory.address)
    return lambda keep=memory: function(address)


__all__ = ["Call", "dot_call", "fma_call", "read_call", "roofline"]

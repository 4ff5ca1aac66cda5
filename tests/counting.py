"""Objects that calls leave behind, and allocations of Python meanwhile: the measurements for promises of no allocation."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable, Sequence

import rlx
from rlx.host.jit import Library, compile_object
from rlx.host.processor import host_target

DOMAINS = (1, 2)  # PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ


def check_allocates_nothing(compiled: rlx.CompiledGraph, call: Callable[[], object], runs: int) -> None:
    """No block of Python's and no native byte is there after `runs` calls that was not there before. Call it warmed up."""
    gc.collect()
    gc.disable()
    try:
        growth = []
        for count in (0, 0, runs, 0):  # without calls: what the readings themselves hold
            before = compiled.allocations()
            for _ in range(count):
                call()
            after = compiled.allocations()
            growth.append(after.python_blocks - before.python_blocks)
            assert (after.native_count, after.native_live_bytes) == (before.native_count, before.native_live_bytes)
    finally:
        gc.enable()
    assert growth[2] <= max(growth[0], growth[1], growth[3]) + 2, growth


def traced_bytes(calls: Sequence[Callable[[], object]], runs: int) -> tuple[int, int]:
    """Bytes of Python's that `runs` of each call leave, and the most that they hold meanwhile. The least of a few times: threads
    that are none of ours (pytest-xdist's) allocate now and then."""
    found = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for call in calls:
                call()
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(runs):
                for call in calls:
                    call()
            after, peak = tracemalloc.get_traced_memory()
            found.append((after - before, peak - before))
    finally:
        tracemalloc.stop()
    return min(grown for grown, _ in found), min(peak for _, peak in found)


class PythonAllocations:
    """A context that counts what Python takes from its allocators for memory and objects, by hooks in machine code: what is taken
    and given back at once counts too. Blocks that Python keeps ready on free lists of its own are no allocations."""

    FIELDS = ("malloc", "calloc", "realloc", "free")

    def __init__(self) -> None:
        functions = ["%seen = type { i64, ptr, ptr, ptr, ptr, ptr }"]
        for at, (name, result, *args) in enumerate((
            ("malloc", "ptr", "i64 %a"), ("calloc", "ptr", "i64 %a", "i64 %b"), ("realloc", "ptr", "ptr %a", "i64 %b"),
            ("free", "void", "ptr %a"),
        )):  # fmt: skip
            given = ", ".join(args)
            count = "" if name == "free" else "%n = load i64, ptr %s\n%m = add i64 %n, 1\nstore i64 %m, ptr %s\n"
            end = "ret void" if result == "void" else "ret ptr %r"
            value = "" if result == "void" else "%r = "
            functions.append(
                f"define {result} @count_{name}(ptr %s, {given}) {{\n{count}"
                f"%cp = getelementptr %seen, ptr %s, i64 0, i32 1\n%c = load ptr, ptr %cp\n"
                f"%fp = getelementptr %seen, ptr %s, i64 0, i32 {2 + at}\n%f = load ptr, ptr %fp\n"
                f"{value}call {result} %f(ptr %c, {given})\n{end}\n}}"
            )
        image = compile_object("\n".join(functions), host_target(1), "allocations")
        self._library = Library([image], tuple(f"count_{name}" for name in self.FIELDS))
        self._seen = [(ctypes.c_void_p * 6)() for _ in DOMAINS]
        self._before = [(ctypes.c_void_p * 5)() for _ in DOMAINS]
        self._set = ctypes.pythonapi.PyMem_SetAllocator

    @property
    def count(self) -> int:
        return sum(seen[0] or 0 for seen in self._seen)

    def __enter__(self) -> PythonAllocations:
        for domain, seen, before in zip(DOMAINS, self._seen, self._before):
            ctypes.pythonapi.PyMem_GetAllocator(domain, before)
            seen[1:] = list(before)
            ours = (ctypes.c_void_p * 5)(ctypes.addressof(seen), *(self._library.address(f"count_{n}") for n in self.FIELDS))
            self._set(domain, ours)
        return self

    def __exit__(self, *_: object) -> None:
        for domain, before in zip(DOMAINS, self._before):
            self._set(domain, before)

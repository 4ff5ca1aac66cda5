"""What calls leave behind: the one measurement that every promise of no allocation is tested by."""

from __future__ import annotations

import gc
from collections.abc import Callable

import rlx


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

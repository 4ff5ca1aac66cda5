"""Measured runs of a compiled graph (CompiledGraph.profile). They leave states unchanged; outputs are those of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.backends import backend_of
from rlx.driver.backend import Roofed, Timed, Timeline
from rlx.driver.handles import Snapshot
from rlx.errors import Unsupported, whole
from rlx.explain.profile import Profile, profile_of
from rlx.runtime.tune import typical

WARM, LEAST = 2, 3  # runs that do not count; runs that do, at least
LONGEST = 3.0  # seconds after which no further run begins


def profiled(compiled: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], runs: int) -> Profile:
    """`compiled`: the CompiledGraph."""
    program, executable = compiled.program(), compiled._executable
    if not isinstance(executable, Timed):
        raise Unsupported(
            f"{program.name}: {compiled.device} runs its steps without a time for each; profile the graph on cpu or cuda"
        )
    if program.collectives:
        raise Unsupported(f"{program.name}: the steps of graphs with collectives are not measured; profile the parts of one rank")
    runs = whole("runs", runs, 1)
    arrays = _arrays(compiled, inputs, named)
    compiled._drain()
    with compiled._lock, compiled._gate:
        compiled._ready()
        if arrays is not None:
            compiled._copy_in(arrays)
        compiled._capture.overwriting()
        compiled._gate.generation += 1  # views of earlier outputs end here
        states = Snapshot(compiled.handles.fork(1)[0]) if program.handles else None
        timelines, unmeasured = _measured(executable, runs, states)
    backend = backend_of(compiled.device)
    roofline = backend.roofline(program.target) if isinstance(backend, Roofed) else None
    try:
        origins = compiled._origins()
    except Unsupported:  # an artifact has no graph
        origins = None
    return profile_of(program, origins, compiled.report().work, str(compiled.device), timelines, unmeasured, roofline)


def _measured(executable: Any, runs: int, states: Snapshot | None) -> tuple[list[Timeline], list[float]]:
    """Measured and unmeasured runs in turn, each from the same states."""
    (measured, plain), timelines, unmeasured = executable.timed(), list[Timeline](), list[float]()
    until = time.perf_counter() + LONGEST
    try:
        for turn in range(WARM + runs):
            if turn >= WARM + LEAST and time.perf_counter() > until:
                break
            begin = time.perf_counter()
            plain()
            seconds = time.perf_counter() - begin
            if states is not None:
                executable.handles.restore(states)
            timeline = measured()
            if states is not None:
                executable.handles.restore(states)
            if turn >= WARM:
                timelines.append(timeline)
                unmeasured.append(seconds)
    finally:
        if states is not None:
            executable.handles.restore(states)
    return timelines, unmeasured


def _arrays(compiled: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[np.ndarray] | None:
    """The inputs in order. Without any: None, which keeps those of the last run, or typical ones before the first."""
    if len(inputs) == 1 and isinstance(inputs[0], Mapping) and not named:
        return compiled._given(inputs[0])
    if inputs or named:
        return compiled._given(compiled._named(inputs, named))
    return None if compiled._gate.generation else [typical(d.shape) for d in compiled.inputs]


__all__ = ["profiled"]

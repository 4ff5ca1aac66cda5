"""Params of one executable: which are set, which prepared buffers they feed, and which must be computed anew.

A param that only feeds one prepared buffer is read straight from the caller's array and not kept. One that a run reads,
or that is prepared together with others, is kept, so that setting any of them again reaches every packed copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from rlx.driver.backend import Executable
from rlx.driver.calls import Gate
from rlx.errors import MissingParamError, UnknownNameError, known
from rlx.ir.program import Program, Region
from rlx.runtime.binding import fits


class Weights:
    """Binds params by name and keeps prepared buffers in step with them."""

    def __init__(self, executable: Executable, gate: Gate) -> None:
        self.executable, self.store = executable, executable.params
        program = self.program = executable.program
        self.decls = {program.buffers[id].name: program.buffers[id] for id in program.params}
        self.sources = _sources(program)
        self.kept = _kept(program, self.sources)
        self._gate = gate
        gate.seen, gate.changes = -1, ctypes.addressof(self.store.changes)

    def set(self, name: str, array: object) -> None:
        """Copy a param in and recompute what depends on it. A wrong name, dims or dtype raises and changes nothing."""
        decl = self.decls.get(name)
        if decl is None:
            raise UnknownNameError(f"no param is called {name!r}; there are {known(self.decls)}")
        value = np.ascontiguousarray(fits(f"param {name!r}", array, decl.shape)).reshape(decl.shape.static)
        given = {} if name in self.kept else {decl.id: value}
        if name in self.kept:
            self.executable.write(decl.id, value)
            self.store.kept.add(name)
        self.store.changed(name)
        todo = [i for i, names in enumerate(self.sources) if name in names and all(n in self.store.versions for n in names)]
        self.run_constants()
        self.run(todo, given)
        self._gate.seen = -1

    def run_constants(self) -> None:
        """What is prepared from constants alone, for the first time; the other steps may read it."""
        self.run([i for i, names in enumerate(self.sources) if not names and self.is_stale(i)], {})

    def run(self, steps: list[int], given: Mapping[int, np.ndarray]) -> None:
        if steps:
            self.executable.prepare(steps, given)
        for i in steps:
            for id in self.program.prepare[i].writes:
                self.store.sources[self.program.buffers[id].name] = self.versions(i)

    def versions(self, step: int) -> tuple[int, ...]:
        return tuple(self.store.versions.get(n, 0) for n in sorted(self.sources[step]))

    def missing(self) -> list[str]:
        """Params that must be set before a run: never set, or needed anew because their bytes were not kept."""
        out: dict[str, None] = {}
        for name in self.decls:
            if name not in self.store.kept and (name in self.kept or name not in self.store.versions):
                out[name] = None
        for i, names in enumerate(self.sources):
            if self.is_stale(i):
                out.update(dict.fromkeys(sorted(names - self.store.kept)))
        return list(out)

    def is_stale(self, step: int) -> bool:
        """Whether a prepare step's results are older than the params they come from."""
        names = [self.program.buffers[id].name for id in self.program.prepare[step].writes]
        return any(self.store.sources.get(n) != self.versions(step) for n in names) or 0 in self.versions(step)

    def ready(self) -> None:
        """Make everything that a run reads current; MissingParamError names the params that are not there."""
        changes = self.store.changes.value
        if changes == self._gate.seen:
            return
        self.run_constants()
        stale = [i for i in range(len(self.sources)) if self.is_stale(i)]
        if missing := self.missing():
            raise MissingParamError(f"{self.program.name}: param {known(missing)} not set; call set_param first")
        self.run(stale, {})
        self._gate.seen = changes


def planned_bytes(program: Program) -> dict[str, int]:
    """Bytes by purpose of an executable of `program` with all its params set; scratch and code are not known yet."""
    names = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}
    total = {"arena": program.plan.size_bytes} | dict.fromkeys(names.values(), 0)
    kept = _kept(program, _sources(program))
    for b in program.buffers:
        if b.region in names and (b.region is not Region.PARAM or b.name in kept):
            total[names[b.region]] += b.nbytes
    return total


def _sources(program: Program) -> list[frozenset[str]]:
    """Of each prepare step: the params it depends on."""
    region = [b.region for b in program.buffers]
    out: list[frozenset[str]] = []
    feeds: dict[int, frozenset[str]] = {}
    for step in program.prepare:
        names: frozenset[str] = frozenset()
        for id in step.reads:
            names |= feeds.get(id, frozenset()) if region[id] is not Region.PARAM else {program.buffers[id].name}
        out.append(names)
        for id in step.writes:
            feeds[id] = names
    return out


def _kept(program: Program, sources: list[frozenset[str]]) -> frozenset[str]:
    """Params whose own bytes must stay: read by a run, or prepared together with others."""
    name = {id: program.buffers[id].name for id in program.params}
    out = {name[id] for step in program.steps + program.commit for id in step.reads if id in name}
    for names in sources:
        if len(names) > 1:
            out |= names
    return frozenset(out)

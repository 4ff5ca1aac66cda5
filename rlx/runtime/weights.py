"""Params of one executable: which are set, which prepared buffers depend on them, and which of these are stale.

A param that is only used for one prepared buffer is read directly from the caller's array and not stored. A param that a run
reads, or that is prepared together with others, is stored, so that every packed copy can be updated when one of them is set
again. Arrays in mapped files are read from the file (rlx.driver.files), by several threads if many are set at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from rlx.driver import files
from rlx.driver.backend import Executable
from rlx.driver.expert_source import ExpertSource
from rlx.driver.foreign import DeviceArray
from rlx.driver.params import ParamStore
from rlx.errors import MissingParamError, UnknownNameError, known
from rlx.host.gate import Gate
from rlx.ir.program import BufferDecl, Program, Region
from rlx.runtime.binding import Declared, fits, named

IN_THREADS = 4 << 20  # from this many bytes of params set at once, several threads share the work
MOST = 64  # threads of the host, since a GPU has many more


class Params(tuple[Declared, ...]):
    """The params of a compiled graph: name, shape, dtype. `store`: the weights, to be shared with other compiles."""

    store: ParamStore

    def __new__(cls, declared: Iterable[Declared], store: ParamStore) -> Params:
        made = super().__new__(cls, declared)
        made.store = store
        return made


class Weights:
    """Binds params by name and keeps prepared buffers up to date."""

    def __init__(self, executable: Executable, gate: Gate) -> None:
        self.executable, self.store = executable, executable.params
        program = self.program = executable.program
        self.decls = {program.buffers[id].name: program.buffers[id] for id in program.params}
        self.sources, self.kept = program.sources, program.kept
        self._gate = gate
        gate.seen, gate.changes = -1, ctypes.addressof(self.store.changes)

    def set(self, arrays: Mapping[str, object]) -> None:
        """Copy params in and recompute each dependent buffer once. A wrong name, dims or dtype, or a truncated file, raises and
        changes nothing. If a file is truncated meanwhile (CorruptFileError), or memory is refused, the params are missing."""
        values = {name: self._checked(name, array) for name, array in arrays.items()}
        with self.store.lock:
            self._set_all(values)
        self._gate.seen = -1

    def _set_all(self, values: Mapping[str, np.ndarray]) -> None:
        self.store.kept -= values.keys()  # until all are completely set
        for name in values:
            self.store.changed(name)  # before the first byte: executables on this store see it and wait for the lock
        self.run_constants()
        experts = self._set_experts(values)
        self.store.kept |= experts & self.kept
        self._set_whole({name: value for name, value in values.items() if name not in experts})

    def _set_whole(self, values: Mapping[str, np.ndarray]) -> None:
        there = values.keys() | self.store.kept
        todo = [i for i, names in enumerate(self.sources) if names & values.keys() and names <= there]
        jobs = _apart(values, {i: self.sources[i] for i in todo})
        jobs.sort(key=lambda job: -sum(values[name].nbytes for name in job[0]))
        several = len(jobs) > 1 and sum(v.nbytes for v in values.values()) >= IN_THREADS
        threads = min(len(jobs), self.program.target.threads, MOST) if several else 1
        tiers = self.store.experts
        with self.in_memory(values) if tiers and tiers.in_place else nullcontext():  # else those that are not are read later
            files.in_threads([partial(self._set, *job, values, threads > 1) for job in jobs], threads)
        self.store.kept |= values.keys() & self.kept
        self._made(todo)
        for name in values if self.store.experts else ():
            self.store.experts.replaced(name, self._source(name, values[name]))  # type: ignore[union-attr]

    def _set_experts(self, values: Mapping[str, Any]) -> set[str]:
        """Set params with experts one expert at a time, and only those that are resident: params given by a source, and arrays in
        mapped files if some experts are not resident. Returns their names."""
        tiers, done = self.store.experts, set[str]()
        for name, value in values.items() if tiers else ():
            given = isinstance(value, ExpertSource)
            source = value if given else self._source(name, value)
            if tiers and source and self._apart_in_memory(name) and (given or not tiers.all_resident(name)):
                tiers.refill(name, source)
                versions = (self.store.versions[name],)
                self.store.sources |= {part.name: versions for _, part in tiers.parts(name) if part.name != name}
                done.add(name)
        return done

    def _apart_in_memory(self, name: str) -> bool:
        """Whether the experts of a param lie apart in all buffers of this program that depend on it."""
        steps = [step for step, names in zip(self.program.prepare, self.sources) if name in names]
        made = {self.program.buffers[id].name for step in steps for id in step.writes} | ({name} & self.kept)
        return self.store.experts is not None and made <= {part.name for _, part in self.store.experts.parts(name)}

    def _source(self, name: str, array: Any) -> ExpertSource | None:
        """Where single experts of a param can be read from later."""
        found = self.store.experts.parts(name) if self.store.experts else []
        if not found or isinstance(array, DeviceArray):
            return None
        return ExpertSource.of_array(array, found[0][0].experts, name)

    def decl(self, name: str) -> BufferDecl:
        """UnknownNameError: there is no such param."""
        if named("param", name) not in self.decls:
            raise UnknownNameError(f"no param is called {name!r}; there are {known(self.decls)}")
        return self.decls[name]

    def _checked(self, name: str, array: object) -> Any:
        """The array, checked and C-contiguous, or a source of experts."""
        decl = self.decl(name)
        if isinstance(array, ExpertSource):
            if self._apart_in_memory(name):
                return array
            first, dims = array.read(0), decl.shape.static
            rows = len(first) if first.ndim == len(dims) else 1
            found = [first, *(array.read(e) for e in range(1, dims[0] // max(1, rows)))]
            array = np.concatenate(found) if first.ndim == len(dims) else np.stack(found)
        found = fits(f"param {name!r}", array, decl.shape, self.executable.adopt)
        if isinstance(found, DeviceArray):
            return found
        files.check(found)
        return np.asarray(found if found.flags.c_contiguous else files.in_memory(found))

    def _set(self, names: Sequence[str], steps: Sequence[int], values: Mapping[str, np.ndarray], alone: bool) -> None:
        given: dict[int, np.ndarray] = {}
        for name in names:
            if name in self.kept:
                self.executable.write(self.decls[name].id, values[name])
            else:
                value = values[name]
                given[self.decls[name].id] = value if isinstance(value, DeviceArray) else files.in_memory(value)
        if steps:
            self.executable.prepare(steps, given, alone)
        for array in (a for a in given.values() if isinstance(a, np.ndarray)):
            files.drop_pages(array)  # of a large one, which was read from the mapping: its packed copy is enough

    def in_memory(self, names: Iterable[str] | None = None) -> AbstractContextManager[None]:
        """All experts of these params (of all) are in memory meanwhile, also those that are not resident."""
        tiers = self.store.experts
        return tiers.everything(self.decls if names is None else names) if tiers else nullcontext()

    def run_constants(self) -> None:
        """Run the prepare steps that depend on constants only, if they are stale. Other prepare steps may read their results."""
        self.run([i for i, names in enumerate(self.sources) if not names and self.is_stale(i)])

    def run(self, steps: list[int]) -> None:
        if steps:
            self.executable.prepare(steps)
        self._made(steps)

    def _made(self, steps: Sequence[int]) -> None:
        """Record that these prepare steps have run."""
        for i in steps:
            for id in self.program.prepare[i].writes:
                self.store.sources[self.program.buffers[id].name] = self.versions(i)

    def versions(self, step: int) -> tuple[int, ...]:
        return tuple(self.store.versions.get(n, 0) for n in sorted(self.sources[step]))

    def missing(self) -> list[str]:
        """Params that must be set before a run: never set, or needed again because their bytes were not stored."""
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
        """Bring all prepared buffers up to date. MissingParamError names the params that are missing."""
        if self.store.changes.value == self._gate.seen:
            return
        with self.store.lock:  # waits until another executable has set all of its weights
            self.run_constants()
            stale = [i for i in range(len(self.sources)) if self.is_stale(i)]
            if missing := self.missing():
                raise MissingParamError(f"{self.program.name}: param {known(missing)} not set; call set_param first")
            with self.in_memory(frozenset().union(*(self.sources[i] for i in stale))):
                self.run(stale)
            self._gate.seen = self.store.changes.value


def planned_bytes(program: Program) -> dict[str, int]:
    """Bytes by purpose of an executable of `program` with all params set, without scratch and code, which are not known yet."""
    names = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}
    total = {"arena": program.plan.size_bytes} | dict.fromkeys(names.values(), 0)
    for b in program.buffers:
        if b.region in names and (b.region is not Region.PARAM or b.name in program.kept):
            total[names[b.region]] += b.nbytes
    return total


def _apart(names: Iterable[str], sources: Mapping[int, frozenset[str]]) -> list[tuple[list[str], list[int]]]:
    """Independent groups of params and of the prepare steps that depend on them."""
    groups: list[tuple[list[str], list[int]]] = [([name], []) for name in names]
    for step, needs in sources.items():
        joined = [g for g in groups if not needs.isdisjoint(g[0])]
        one = [n for g in joined for n in g[0]], sorted([i for g in joined for i in g[1]] + [step])
        groups = [g for g in groups if g not in joined] + [one]
    return groups

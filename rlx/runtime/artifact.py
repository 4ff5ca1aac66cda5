"""Artifacts: compiled programs with their weights in one file, loaded without the compiler. Format: docs/artifacts.md.

A program is stored as in the disk cache (rlx.runtime.stored), and weights in their prepared form, so a load maps them and
computes nothing. The file is a container (rlx.host.container), which compares sizes and checksums; rlx.compiler.check checks
every number in a program. Code that another user could have written is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.backends import get
from rlx.compiler.options import CompileOptions
from rlx.driver import files
from rlx.driver.backend import Backend, Executable, Storable
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.memory import HostBlock
from rlx.driver.params import ParamStore
from rlx.forks import Lock
from rlx.host import jit
from rlx.host.container import Container, begins_with
from rlx.host.disk import source_digest
from rlx.ir.handle import BufferHandle
from rlx.ir.program import BufferDecl, Program
from rlx.ir.shown import Shown, counted, sized, some
from rlx.ir.target import Target
from rlx.records import record
from rlx.runtime.cache import Buckets
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.experts import tiers_in
from rlx.runtime.report import CacheNote, CompileReport, Texts
from rlx.runtime.saving import ENTRY, GRAPHS, OPTIONS, weights_of
from rlx.runtime.stored import FORMAT, as_text, unpack

from rlx.errors import (  # isort: skip
    BindingError, CompileError, CorruptFileError, DeviceUnavailableError, FormatError, ModelError, OutOfMemoryError, RlxError,
    UnknownDeviceError, UnknownNameError, Unsupported, flag, known, whole,
)  # fmt: skip

if TYPE_CHECKING:
    from rlx.driver.experts import ExpertTiers

@record
class _Row:
    """A program in the manifest."""

    at: int
    name: str
    device: str
    features: tuple[str, ...]
    options: Mapping[str, Any]
    threads: int
    vector_bytes: int
    weights: int
    states: int


class ArtifactFile(Shown, Mapping[str, CompiledGraph]):
    """An open artifact: its compiled graphs by name, each loaded when it is first asked for. Weights are shared and mapped."""

    def __init__(
        self, path: str | PathLike[str], *, device: Device | str | None = None, threads: int | None = None, trust: bool = False,
        verify: bool = False,
    ) -> None:  # fmt: skip
        """`device`: where to run; None: the device of the first program. `threads` None: as many as at the compile, but no more
        than this process may use. `trust`: run machine code that another user could have written. `verify`: compare the
        checksums of the weights too, which reads all of the file.

        Raises OptionError (`threads`), ModelError (CorruptFileError, FormatError, UntrustedFileError), or DeviceUnavailableError:
        no program in the file runs on this machine."""
        self.path = Path(path)
        self._file = Container(path, flag("trust", trust))
        if flag("verify", verify):
            self._file.verify()
        self.manifest = self._file.manifest
        try:
            self.kind, rows = as_text(self.manifest["kind"]), [self._row(i, r) for i, r in enumerate(self.manifest["programs"])]
            self._weights = [(as_text(w["device"]), w["entries"], w.get("stored") is True) for w in self.manifest["weights"]]
            self._host = [as_text(key) for key in self.manifest["host"]]
            if not rows:
                raise ValueError("no programs")
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise self._damaged(f"the manifest is incomplete: {e!r:.100}") from None
        self.device = self._own_device(rows[0].device) if device is None else Device.parse(device)
        self._threads = None if threads is None else whole("threads", threads, 1)
        self._all, self._rows = rows, self._usable(rows)
        self._loaded: dict[str, CompiledGraph] = {}
        self._lock = Lock()
        self._params: dict[int, ParamStore] = {}
        self._tables: dict[int, dict[str, np.ndarray]] = {}  # number of weights -> their bytes by name
        self._handles: dict[int, HandleStore] = {}
        self.placed: Callable[[ExpertTiers], object] = lambda tiers: None  # called before weights are copied to a device

    def _line(self) -> str:
        return f"{self.path.name!r} on {self.device}: {self.kind}, {some(self._rows)}; {sized(self._file.nbytes)}"

    def __str__(self) -> str:
        """The contents of the file; no program is loaded."""
        lines = [f"{self.path}: {self.kind}, {sized(self._file.nbytes)}, written by rlx {self.manifest.get('rlx')}"]
        sizes = {name: sized(section.nbytes) for name, section in self._file.sections.items()}
        for r in self._all:
            used = "" if self._rows.get(r.name) is r else " (not used here)"
            needs = " ".join(f for f in r.features if "=" not in f) or "nothing"
            size = sizes.get(f"programs/{r.at}", "missing")
            lines.append(f"  {r.name} on {r.device}, {counted(r.threads, 'thread')}: {size}; needs {needs}{used}")
        lines += [f"  {name}: {size}" for name, size in sizes.items() if not name.startswith("programs/")]
        return "\n".join(lines)

    def __getitem__(self, name: str) -> CompiledGraph:
        if name not in self._rows:
            raise UnknownNameError(f"{self.path} has no program {name!r}; there are {known(self._rows)}")
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(self._rows[name])
            return self._loaded[name]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise BindingError(f"{self.path} holds the programs {known(self)}: call one of them, as file[{next(iter(self))!r}](x)")

    run = __call__

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:  # that of Mapping would load and compare every program
        return self is other

    __hash__ = object.__hash__  # type: ignore[assignment]

    def read(self, section: str) -> bytes:
        """A section that a model stored beside the programs."""
        return self._file.read(section)

    def handles(self, name: str) -> HandleStore:
        """The states of a program, shared with the programs that it shared them with when they were saved."""
        return self._handles.setdefault(self._rows[name].states, HandleStore())

    # -- programs

    def _row(self, at: int, r: Mapping[str, Any]) -> _Row:
        if _whole(r["format"]) != FORMAT:
            raise FormatError(
                f"{self.path}: program {r['name']!r} has format {r['format']}, from rlx {self.manifest.get('rlx')}; this version "
                f"reads {FORMAT}: save it again with this version"
            )
        threads, *numbers = (_whole(r[k]) for k in ("threads", "vector_bytes", "weights", "states"))
        if not 1 <= threads < 1 << 31:
            raise ValueError(f"{threads} threads")
        features = tuple(map(as_text, r["features"]))
        return _Row(at, as_text(r["name"]), as_text(r["device"]), features, dict(r["options"]), threads, *numbers)

    def _own_device(self, name: str) -> Device:
        try:
            return Device(name)
        except UnknownDeviceError as e:
            raise self._damaged(f"a program is for no device: {e}") from None

    def _usable(self, rows: Sequence[_Row]) -> dict[str, _Row]:
        """The first program of each name that runs on the device. DeviceUnavailableError: there is none for a name."""
        here = [r for r in rows if r.device == self.device.name]
        if not here:
            have = known({r.device for r in rows})
            raise DeviceUnavailableError(f"{self.path} has no program for {self.device}; it has some for {have}")
        backend, found, lacking = self._backend(), {}, {}
        for r in here:
            lacks = backend.missing(r.features, self.device.index)
            if lacks:
                lacking[r.name] = lacks
            else:
                found.setdefault(r.name, r)
        for name in (n for n in lacking if n not in found):
            raise DeviceUnavailableError(
                f"{self.path}: program {name!r} needs {', '.join(lacking[name])}, which {self.device} of this machine lacks: "
                "compile and save it on a machine like this one"
            )
        return found

    def _backend(self) -> Any:
        backend = get(self.device.name)
        if not isinstance(backend, Storable):
            raise DeviceUnavailableError(f"{self.device} runs no stored code")
        return backend

    def _load(self, row: _Row) -> CompiledGraph:
        begun = time.perf_counter()
        backend = self._backend()
        self._supply()
        target = self._target(backend, row)
        options = self._options(row)
        content = self._file.read(f"programs/{row.at}")
        try:
            _, artifact, work, tuning = unpack(content, backend, target)
        except CorruptFileError as e:
            raise self._damaged(f"program {row.name!r}: {e}") from e
        try:
            params = self._params.setdefault(row.weights, ParamStore())
            given = self._read_weights(row, artifact.program)
            read = time.perf_counter()
            if self.device.name == "cpu":  # in place
                params.entries |= {b.name: HostBlock(data) for b, data in given or () if b.name not in params.entries}
            executable = backend.load(artifact, params, self.device.index, self.handles(row.name))
            tiers = tiers_in(executable)
            if self.device.name != "cpu" and tiers is not None:
                self.placed(tiers)
            if given is not None:
                _count_as_set(params, artifact.program, executable, given if self.device.name != "cpu" else [])
            return self._graph(row, artifact, executable, options, (begun, read), tuning, lambda: work)
        except (MemoryError, OSError) as e:
            raise OutOfMemoryError(f"{self.path}: no room for program {row.name!r}: {e}") from e
        except (CompileError, BindingError) as e:  # of the linker, the plan, or states and weights that do not fit
            raise self._damaged(f"program {row.name!r} cannot be loaded: {e}") from e

    def _graph(
        self, row: _Row, artifact: Any, executable: Executable, options: CompileOptions, clock: tuple[float, float], tuning: Any,
        work: Callable[[], Any],
    ) -> CompiledGraph:  # fmt: skip
        program, now = artifact.program, time.perf_counter()
        if (options.extent is None) != (program.extent is None):
            raise self._damaged(f"program {row.name!r} has an extent that its options do not have")
        steps = len(program.prepare) + len(program.steps) + len(program.commit)
        seconds = {"read": clock[1] - clock[0], "load": now - clock[1]}
        note = CacheNote("artifact", row.name, str(self.path))
        report = CompileReport(
            program.name, str(self.device), program.nodes, steps, seconds, Texts(artifact.texts), {}, note, tuning, work
        )
        return CompiledGraph(executable, self.device, options, report, self._no_graph, artifact)

    def _no_graph(self) -> NoReturn:
        raise Unsupported(f"{self.path} is an artifact, which has programs and no graph: ask the graph that it was compiled from")

    def _target(self, backend: Backend, row: _Row) -> Target:
        own = backend.target(self.device.index, self._threads)
        threads = own.threads if self._threads else min(own.threads, row.threads)
        return replace(own, features=row.features, vector_bytes=row.vector_bytes, threads=threads)

    def _options(self, row: _Row) -> CompileOptions:
        try:
            given: dict[str, Any] = {k: row.options[k] for k in OPTIONS}
            given |= {k: tuple(v) for k in ("disable", "extent") if (v := given[k]) is not None}
            handles = tuple(BufferHandle(n, tuple(dims), dtype) for n, dims, dtype in row.options["handles"])
            given |= {"dims": dict(given["dims"]), "handles": handles, "threads": row.threads}
            return CompileOptions(**given)
        except (KeyError, TypeError, ValueError, RlxError) as e:
            raise self._damaged(f"the options of program {row.name!r} are wrong: {e!r:.200}") from None

    def _supply(self) -> None:
        """Give the loader the machine code of rlx itself, so that it need not be compiled. That of other sources is not used."""
        if self._host and self.manifest.get("sources") == source_digest():
            for i, key in enumerate(self._host):
                if key not in jit.own_objects:
                    jit.own_objects[key] = self._file.read(f"host/{i}")
        self._host = []

    # -- weights

    def _read_weights(self, row: _Row, program: Program) -> list[tuple[BufferDecl, np.ndarray]] | None:
        """Each buffer of weights of a program, with its bytes in the file. None: the file was saved without weights."""
        if row.weights not in self._tables:
            self._tables[row.weights] = self._table(row)
        table, wanted = self._tables[row.weights], weights_of(program)
        if not table and not self._weights[row.weights][2]:
            return None
        if missing := [b.name[:60] for b in wanted if b.name not in table]:
            raise self._damaged(f"program {row.name!r} lacks the weights of {known(missing)}")
        given = [(b, table[b.name]) for b in wanted]
        for b, data in given:
            if data.size != b.nbytes:
                raise self._damaged(f"{b.name[:60]!r} has {data.size} bytes of weights, the program needs {b.nbytes}")
        return given

    def _table(self, row: _Row) -> dict[str, np.ndarray]:
        """Name -> bytes of the weights in a section."""
        device, entries, _ = self._weights[row.weights] if row.weights < len(self._weights) else ("", None, False)
        if device != row.device or not isinstance(entries, list):
            raise self._damaged(f"program {row.name!r} names weights that are not there")
        table: dict[str, np.ndarray] = {}
        data, at = self._map(f"weights/{row.weights}") if entries else np.zeros(0, np.uint8), 0
        try:
            for name, offset, nbytes in entries:
                if as_text(name) in table or _whole(offset) != at or at + _whole(nbytes) > data.size:
                    raise ValueError(f"{name[:60]!r} at {str(offset)[:20]}, {str(nbytes)[:20]} bytes of {data.size}")
                table[name] = data[at : at + nbytes]
                at += nbytes + -nbytes % ENTRY
        except (ValueError, TypeError) as e:
            raise self._damaged(f"the table of weights is wrong: {e}") from None
        return table

    def _map(self, section: str) -> np.ndarray:
        """A section mapped, and known to rlx.driver.files, so that released parts of it can be read again."""
        data = self._file.map(section)
        if isinstance(whole := data.base, np.ndarray):
            number, offset = self._file.place(section)
            files.register(whole, self.path, number, offset - (data.ctypes.data - whole.ctypes.data), private=True)
        return data

    def _damaged(self, why: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: {why}")


def _count_as_set(
    store: ParamStore, program: Program, executable: Executable, given: Sequence[tuple[BufferDecl, np.ndarray]]
) -> None:
    """Copy weights to the device, and record that all weights of a program are as they were saved: of version 1. Those that were
    set after the file was opened keep their versions."""
    for b, data in given:
        executable.write(b.id, data.view(b.shape.dtype.numpy).reshape(b.shape.static))
    for id in program.params:
        store.versions.setdefault(program.buffers[id].name, 1)
    for names, step in zip(program.sources, program.prepare):
        for id in step.writes:
            store.sources.setdefault(program.buffers[id].name, (1,) * len(names))
    store.kept |= {name for name in program.kept if store.versions[name] == 1}


class StoredBuckets(Buckets):
    """Buckets read from an artifact. There is no graph, so no other sizes can be compiled."""

    def __init__(self, file: ArtifactFile) -> None:
        self._file, self._lock = file, Lock()
        try:
            facts = file.manifest["buckets"]
            self.name, self.dim, self.ladder = facts["name"], facts["dim"], tuple(map(int, facts["ladder"]))
            self._places = {str(name): tuple(map(int, axes)) for name, axes in facts["places"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CorruptFileError(f"{file.path}: the description of the buckets is wrong: {e!r:.100}") from None
        if not self.ladder or set(file) != {f"{self.name} {self.dim}={n}" for n in self.ladder}:
            raise CorruptFileError(f"{file.path}: the buckets {some(self.ladder)} are not those of its programs")

    def _line(self) -> str:
        return f"of graph {self.name!r} in {self._file.path.name!r}, dim {self.dim!r} of {some(self.ladder, 12)}"

    def bucket(self, rows: int) -> CompiledGraph:
        size = self._size(rows)
        found = self._file[f"{self.name} {self.dim}={size}"]
        if (found.options.extent or ("", 0))[1] != size:
            raise CorruptFileError(f"{self._file.path}: the bucket of {size} was compiled for {found.options.extent}")
        return found


def graphs_of(file: ArtifactFile) -> Any:
    """The compiled graph in a file; the file if there are several; or its buckets. ModelError: it holds something else."""
    if file.kind != GRAPHS:
        raise ModelError(f"{file.path} holds {file.kind!r}, which this version of rlx does not know: install a newer one")
    if "buckets" in file.manifest:
        return StoredBuckets(file)
    return file if len(file) > 1 else file[next(iter(file))]


def _whole(x: Any) -> int:
    if type(x) is not int or x < 0:
        raise ValueError(f"{str(x)[:40]!r} is not a whole number")
    return x


__all__ = ["ArtifactFile", "StoredBuckets", "begins_with", "graphs_of"]

"""Writes compiled graphs to an artifact (rlx.runtime.artifact reads it). The format: docs/artifacts.md."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.backends import get
from rlx.compiler.options import CompileOptions
from rlx.driver.backend import Artifact, Executable, Exporting, Storable
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.memory import bytes_of
from rlx.errors import BindingError, DuplicateNameError, MissingParamError, Unsupported, as_path, flag, known
from rlx.host import calls, jit
from rlx.host.container import Writer
from rlx.host.disk import source_digest
from rlx.ir.program import BufferDecl, Program, Region
from rlx.runtime.report import CompileReport
from rlx.runtime.stored import FORMAT, pack
from rlx.runtime.weights import Params

GRAPHS = "graphs"  # the kind of an artifact of compiled graphs; models have kinds of their own (rlx.frontends.artifact)
ENTRY = 64  # bytes; alignment of an array of weights
OPTIONS = ("precision", "disable", "alignment", "dims", "extent", "checked", "debug")  # of CompileOptions, stored as they are


@runtime_checkable
class Savable(Protocol):
    """The part of a CompiledGraph that is saved."""

    device: Device
    options: CompileOptions
    artifact: Artifact

    @property
    def params(self) -> Params: ...
    @property
    def handles(self) -> HandleStore: ...
    def program(self) -> Program: ...
    def report(self) -> CompileReport: ...
    def missing_params(self) -> list[str]: ...
    def settled(self) -> AbstractContextManager[Executable]: ...


def save(
    path: str | PathLike[str],
    graphs: Savable | Sequence[Savable] | Mapping[str, Savable],
    *,
    weights: bool = True,
    facts: Mapping[str, Any] | None = None,
    sections: Mapping[str, bytes] | None = None,
) -> int:
    """Write compiled graphs to one file, for rlx.load. Returns its size in bytes.

    `graphs`: one; several, named as their graphs are; or {name: graph}. Graphs of one name, compiled for other devices or
    instruction sets, are alternatives: a load takes the first that runs. Graphs that share weights or states share them again.
    `weights` False: without weights, which are set after each load. States are not stored. `facts`, `sections`: for models.

    MissingParamError: a weight is not set. Unsupported: the device generates no code to store, or the graph has collectives.
    """
    programs, weights = _named(graphs), flag("weights", weights)
    with ExitStack() as stack:  # experts that are not resident stay in memory until they are written
        for tiers in {id(t): t for _, graph in programs if weights and (t := graph.params.store.experts)}.values():
            stack.enter_context(tiers.everything(tiers.params))
        return _save(path, programs, weights, facts, sections)


def _save(
    path: str | PathLike[str], programs: Sequence[tuple[str, Savable]], weights: bool, facts: Mapping[str, Any] | None,
    sections: Mapping[str, bytes] | None,
) -> int:  # fmt: skip
    stores: dict[int, _Weights] = {}
    states: dict[int, int] = {}
    writer, rows = Writer(as_path(path)), []
    for i, (name, graph) in enumerate(programs):
        backend, program = get(graph.device.name), graph.program()
        if not isinstance(backend, Storable):
            raise Unsupported(f"{program.name}: the device {graph.device} generates no code, so there is nothing to save")
        if program.collectives:
            raise Unsupported(f"{program.name} exchanges data with other ranks; an artifact holds programs of one process")
        if weights and (missing := graph.missing_params()):
            raise MissingParamError(f"{program.name}: param {known(missing)} not set; set it, or save(weights=False)")
        store = stores.setdefault(id(graph.params.store), _Weights(len(stores), graph))
        if weights:
            store.take(graph)
        report = graph.report()
        writer.add(f"programs/{i}", pack(graph.artifact, backend, {}, report.tuning, report.work))
        rows.append({
            "name": name, "device": graph.device.name, "features": program.target.features, "threads": program.target.threads,
            "vector_bytes": program.target.vector_bytes, "format": FORMAT, "compiler": backend.compiler(),
            "options": _options_facts(graph.options), "weights": store.number,
            "states": states.setdefault(id(graph.handles), len(states)),
        })  # fmt: skip
    for store in (s for s in stores.values() if s.entries):
        writer.add(f"weights/{store.number}", store.parts, mapped=True)
    own = _own_code() if any(g.device.name == "cpu" for _, g in programs) else {}
    for i, code in enumerate(own.values()):
        writer.add(f"host/{i}", [code])
    for name, content in (sections or {}).items():
        writer.add(name, [content])
    version = sys.modules["rlx"].__version__  # not imported: the package imports this module
    about = {"kind": GRAPHS, "rlx": version, "sources": source_digest(), "programs": rows, "host": list(own)}
    about["weights"] = [{"device": s.device, "entries": s.entries, "stored": weights} for s in stores.values()]
    return writer.write({**about, **(facts or {})})


def _named(graphs: Any) -> list[tuple[str, Savable]]:
    """(name, graph), checked."""
    if isinstance(graphs, Savable):
        graphs = [graphs]
    if not isinstance(graphs, (Mapping, Sequence)) or isinstance(graphs, str):
        raise BindingError(f"save takes compiled graphs, got {type(graphs).__name__}")
    wrong = [g for g in (graphs.values() if isinstance(graphs, Mapping) else graphs) if not isinstance(g, Savable)]
    if wrong or not graphs:
        raise BindingError(f"save takes compiled graphs, got {type(wrong[0]).__name__ if wrong else 'none'}")
    pairs = [(str(n), g) for n, g in graphs.items()] if isinstance(graphs, Mapping) else [(g.program().name, g) for g in graphs]
    variants = [(name, g.device.name, g.program().target.features) for name, g in pairs]
    if twice := [v[0] for i, v in enumerate(variants) if v in variants[:i]]:
        raise DuplicateNameError(f"{known(twice)} names two graphs for the same device: save {{name: graph}}")
    return pairs


class _Weights:
    """The weights of one ParamStore, in the order of a file."""

    def __init__(self, number: int, graph: Savable) -> None:
        self.number, self.device, self.size = number, graph.device.name, 0
        self.entries: list[tuple[str, int, int]] = []  # name, offset, bytes
        self.parts: list[np.ndarray] = []

    def take(self, graph: Savable) -> None:
        """Add the weights of a graph that are not there yet. Those in host memory are not copied."""
        have = {name for name, _, _ in self.entries}
        with graph.settled() as executable:
            for b in weights_of(graph.program()):
                if b.name in have:
                    continue
                found = executable.view(b.id)
                data = bytes_of(executable.read(b.id) if found is None else found)
                pad = -data.size % ENTRY
                self.entries.append((b.name, self.size, data.size))
                self.parts += [data, np.zeros(pad, np.uint8)]
                self.size += data.size + pad


def export_c(graph: Savable, folder: str | PathLike[str]) -> Path:
    """See CompiledGraph.export_c."""
    backend, program, folder = get(graph.device.name), graph.program(), Path(as_path(folder))
    if not isinstance(backend, Exporting):
        raise Unsupported(f"{program.name}: C libraries are for programs of the CPU; this one is for {graph.device}")
    if graph.options.checked:
        raise Unsupported(f"{program.name} was compiled with checked=True, which needs Python; compile it without")
    if missing := graph.missing_params():
        raise MissingParamError(f"{program.name}: param {known(missing)} not set; a C library holds the weights")
    if not folder.is_dir():
        raise BindingError(f"export_c takes a folder that exists, got {str(folder)!r}")
    with graph.settled() as executable:
        weights = {b.id: bytes_of(executable.read(b.id)) for b in weights_of(program)}
    return backend.export(graph.artifact, weights, graph.options.extent, folder)


def weights_of(program: Program) -> list[BufferDecl]:
    """The buffers of a program that hold weights when it is ready to run."""
    kept = program.kept
    return [b for b in program.buffers if b.region is Region.PREPARED or (b.region is Region.PARAM and b.name in kept)]


def _own_code() -> dict[str, bytes]:
    """The machine code of rlx itself that a load of programs for the CPU needs."""
    if calls.refusal() is None:
        calls.library()
    return dict(jit.own_objects)


def _options_facts(options: CompileOptions) -> dict[str, Any]:
    facts = {name: getattr(options, name) for name in OPTIONS}
    return facts | {"handles": [(h.name, h.shape.static, h.dtype.name) for h in options.handles]}


__all__ = ["ENTRY", "GRAPHS", "OPTIONS", "export_c", "save", "weights_of"]

"""Session: a device to compile for. `build` is the whole story of a compile, one type per line."""

from __future__ import annotations

import time

from rlx import knobs
from rlx.backends import backend_of
from rlx.compile import lower
from rlx.compile.options import CompileOptions
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.errors import OptionError, OutOfMemoryError, known
from rlx.ir.graph import Graph
from rlx.ir.program import Program
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.report import CompileReport, MemoryPlan
from rlx.runtime.weights import planned_bytes

ADDRESSES = 1 << 47  # bytes that a process can address: what needs more is refused before code is made for it


class Session:
    """Compiles graphs for one device. DeviceUnavailableError, at once, if the device cannot be used here."""

    def __init__(self, device: Device | str = Device.CPU, threads: int | None = None) -> None:
        """`threads`: default for compiles whose options do not say (None: as many as the process may use)."""
        self.device = Device.parse(device)
        self.threads = threads
        self._backend = backend_of(self.device)

    def compile(
        self,
        graph: Graph,
        options: CompileOptions | None = None,
        params: ParamStore | None = None,
        handles: HandleStore | None = None,
    ) -> CompiledGraph:
        """An executable of `graph`. `params`: weights shared with another compile (compiled.params); `handles`: states
        shared likewise (compiled.handles), InputShapeError if one of them has another shape there.

        Raises VerifyError, CompileError, OptionError or UnboundDimError; the graph is left as it was.
        """
        if not isinstance(graph, Graph):
            raise OptionError(f"compile takes a Graph, got {type(graph).__name__}")
        for name, store, kind in (("params", params, ParamStore), ("handles", handles, HandleStore)):
            if store is not None and not isinstance(store, kind):
                raise OptionError(f"compile takes {name} as a {kind.__name__}, got {type(store).__name__}")
        if not isinstance(options := options or CompileOptions(), CompileOptions):
            raise OptionError(f"compile takes CompileOptions, got {type(options).__name__}")
        dump, verbose = options.dump or knobs.DUMP.get() or None, options.verbose or knobs.DEBUG.get() > 1
        options = options.replace(dump=dump, verbose=verbose)
        _check_handles(graph, options)
        return self._build(graph, options, params, handles)

    def plan(self, graph: Graph, options: CompileOptions | None = None) -> MemoryPlan:
        """Where the bytes of an executable would be, but for its code and scratch. Nothing is allocated for it."""
        options = options or CompileOptions()
        program = lower(graph, self._backend.target(self.device.index, options.threads or self.threads), options)
        return MemoryPlan.of(program, planned_bytes(program))

    def process_bytes(self) -> int:
        """Bytes that this process holds besides the memory of executables, with what a first compile will add; 0: not known."""
        return self._backend.process_bytes()

    def _build(
        self, graph: Graph, options: CompileOptions, params: ParamStore | None, handles: HandleStore | None
    ) -> CompiledGraph:
        clock = [time.perf_counter()]
        target = self._backend.target(self.device.index, options.threads or self.threads)
        program = lower(graph, target, options)
        if sum(planned_bytes(program).values()) >= ADDRESSES:
            raise OutOfMemoryError(f"no memory has room for {_room(program)}")
        clock.append(time.perf_counter())
        artifact = self._backend.compile(program)
        clock.append(time.perf_counter())
        try:
            executable = self._backend.load(artifact, params, self.device.index, handles)
        except (MemoryError, OSError) as e:
            raise OutOfMemoryError(f"{self.device} has no room for {_room(program)}: {e}") from e
        clock.append(time.perf_counter())
        seconds: dict[str, float] = {name: b - a for name, a, b in zip(("lower", "code", "load"), clock, clock[1:])}
        texts = artifact.texts()
        steps = len(program.prepare) + len(program.steps) + len(program.commit)
        report = CompileReport(program.name, str(self.device), program.nodes, len(texts), steps, seconds, texts, program.stages)
        for shown in ((report,), program.stages.values(), texts.values())[: max(knobs.DEBUG.get(), options.verbose)]:
            print(*shown, sep="\n")
        return CompiledGraph(executable, self.device, options, report)


def _room(program: Program) -> str:
    sizes = ", ".join(f"{what} {nbytes}" for what, nbytes in planned_bytes(program).items() if nbytes)
    return f"graph {program.name!r} (bytes: {sizes})"


def _check_handles(graph: Graph, options: CompileOptions) -> None:
    have = {v.name: v.shape for v in graph.handles}
    for handle in options.handles:
        found = have.get(handle.name)
        if found is None:
            raise OptionError(f"options bind the handle {handle.name!r}; graph {graph.name!r} has {known(have)}")
        if found != handle.shape:
            raise OptionError(f"handle {handle.name!r} is {handle.shape} in the options, {found} in graph {graph.name!r}")

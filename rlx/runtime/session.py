"""Session: compiles graphs for one device. `_build` shows all stages of a compile, from graph to executable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlx import knobs
from rlx.backends import backend_of
from rlx.compiler import lower
from rlx.compiler.options import CompileOptions
from rlx.driver.backend import Artifact, Counting, Executable, Opening, Warming
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.errors import CompileError, OptionError, OutOfMemoryError, called, known, whole
from rlx.garbage import Uncollected
from rlx.ir.cost import program_work
from rlx.ir.graph import Graph
from rlx.ir.program import Program
from rlx.ir.shown import Shown
from rlx.ir.target import Target
from rlx.ir.verify import where
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.report import CompileReport, MemoryPlan, Texts
from rlx.runtime.stored import ADDRESSES, CacheEntry
from rlx.runtime.tune import Progress, tune
from rlx.runtime.weights import Params, planned_bytes

if TYPE_CHECKING:
    from rlx.compiler.origins import Origins
    from rlx.driver.symmetric import SymmetricTransport


class Session(Shown):
    """Compiles graphs for one device. DeviceUnavailableError, at once, if the device cannot be used here."""

    def __init__(
        self, device: Device | str = Device.CPU, threads: int | None = None, progress: Progress | None = None,
        transport: SymmetricTransport | None = None,
    ) -> None:  # fmt: skip
        """`threads`: default for compiles whose options leave it open (None: as many as the process may use).
        `progress(done, total, step)` is called while a compile makes kernels ("compiling"), and while it measures steps
        (CompileOptions.tune; "tuning" and the step's name).
        `transport`: connects this rank to the others, for graphs with collectives. All ranks must then compile and run the same
        graphs in the same order."""
        self.device = Device.parse(device)
        self.threads = None if threads is None else whole("threads", threads, 1)
        self._progress, self.transport = called("progress", progress, "(done, total, step)"), transport
        if transport is not None:
            from rlx.driver.symmetric import SymmetricTransport  # imported late: most sessions have none

            if not isinstance(transport, SymmetricTransport):
                raise OptionError(f"transport is a SymmetricTransport, got {type(transport).__name__}")
        self._backend = backend_of(self.device)
        if self.threads:
            self.target()  # OptionError: too many
        if isinstance(self._backend, Opening):
            self._backend.begin(self.device.index)

    def _line(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        rank = f", rank {self.transport.this_rank} of {self.transport.num_ranks}" if self.transport else ""
        return f"on {self.device}{threads}{rank}"

    def compile(
        self,
        graph: Graph,
        options: CompileOptions | None = None,
        params: ParamStore | Params | None = None,
        handles: HandleStore | None = None,
        **more: Any,
    ) -> CompiledGraph:
        """Compile `graph` to an executable. `more`: fields of CompileOptions, changed in `options`. `params`: weights shared with
        another compile (compiled.params); None: those that came with the graph (Graph.weights) are set. `handles`: states shared
        in the same way (compiled.handles); InputShapeError if one of them has another shape there.

        Raises VerifyError, CompileError, OptionError or UnboundDimError. The graph is never changed. A graph with collectives
        waits at a barrier for the other ranks, which may raise CallMismatchError (a rank compiled other collectives),
        TransportError, or HeapBoundsError (the heap is too small).
        """
        _check_graph("compile", graph)
        params, handles = stores_of(params, handles)
        options = with_more(options, more)
        dump, verbose = options.dump or knobs.DUMP.get() or None, options.verbose or knobs.DEBUG.get() > 1
        options = options.replace(dump=dump, verbose=verbose)
        if options.open_dim:
            raise OptionError(f"dims: {options.open_dim!r} is 'auto', an executable has one size: use rlx.compile(graph, ...)")
        _check_handles(graph, options)
        _check_ranks(graph, self.transport)
        with Uncollected():  # collections would take a tenth of the time
            compiled = self._build(graph, options, params, handles)
        if params is None and graph.weights:
            compiled.set_params({name: array for name, array in graph.weights.items() if name in compiled.missing_params()})
        return compiled

    def plan(self, graph: Graph, options: CompileOptions | None = None, **more: Any) -> MemoryPlan:
        """The memory plan that an executable would have, without its code and scratch. Allocates no memory for it."""
        options = with_more(options, more)
        _check_graph("plan", graph)
        program = lower(graph, self._backend.target(self.device.index, options.threads or self.threads), options)
        return MemoryPlan.of(program, planned_bytes(program))

    def target(self) -> Target:
        """The facts about the device that compiles use."""
        return self._backend.target(self.device.index, self.threads)

    def process_bytes(self) -> int:
        """Bytes that this process holds besides the memory of executables, including those that a first compile will add. 0:
        unknown."""
        return self._backend.process_bytes()

    def _build(
        self, graph: Graph, options: CompileOptions, params: ParamStore | None, handles: HandleStore | None
    ) -> CompiledGraph:
        clock = {"": time.perf_counter()}  # phase -> when it ended
        target = self._backend.target(self.device.index, options.threads or self.threads)
        entry = CacheEntry(self._backend, graph, target, options)
        kept = self._cached(entry, params, handles)
        clock["look up"] = time.perf_counter()
        if kept is not None:
            artifact, executable = kept
        else:
            foresee = self._backend.warm(target) if isinstance(self._backend, Warming) else None
            program = lower(graph, target, options, None if options.tune else foresee)
            if sum(planned_bytes(program).values()) >= ADDRESSES:
                raise OutOfMemoryError(f"no memory has room for {_room(program)}")
            clock["lower"] = time.perf_counter()
            entry.tuning, tilings = tune(self._backend, self.device.index, program, options, self._progress)
            clock |= {"tune": time.perf_counter()} if options.tune else {}
            how: dict[str, Any] = {"tilings": tilings} if tilings else {}  # only a Tunable takes this argument
            if (say := self._progress) and isinstance(self._backend, Counting):
                how["progress"] = lambda done, total: say(done, total, "compiling")
            artifact = self._backend.compile(program, **how)
            clock["code"] = time.perf_counter()
            executable = self._load(artifact, params, handles)
            clock["load"] = time.perf_counter()
            if entry.tuning.unfinished:
                entry.disable("not all steps are measured: the next compile with this tune= continues")
            entry.write(artifact, entry.tuning)
        program, times = artifact.program, list(clock.values())
        seconds: dict[str, float] = {name: b - a for name, a, b in zip(list(clock)[1:], times, times[1:])}
        steps = len(program.prepare) + len(program.steps) + len(program.commit)
        texts = Texts(artifact.texts)
        report = CompileReport(
            program.name, str(self.device), program.nodes, steps, seconds, texts, program.stages,
            entry.note(cached=kept is not None), entry.tuning, entry.work or cache(partial(program_work, program)),
        )  # fmt: skip
        if (level := max(knobs.DEBUG.get(), options.verbose)) > 0:
            for shown in ((report,), program.stages.values(), texts.values())[:level]:
                print(*shown, sep="\n")
        origins = cache(partial(_origins, graph.copy(), target, options))
        return CompiledGraph(executable, self.device, options, report, origins, artifact)

    def _cached(
        self, entry: CacheEntry, params: ParamStore | None, handles: HandleStore | None
    ) -> tuple[Artifact, Executable] | None:
        """Load the entry of an earlier compile from disk. None: there is none, or it is damaged."""
        try:
            artifact = entry.read()
            return None if artifact is None else (artifact, self._load(artifact, params, handles))
        except (CompileError, OutOfMemoryError):
            return entry.discard()

    def _load(self, artifact: Artifact, params: ParamStore | None, handles: HandleStore | None) -> Executable:
        try:
            ranks = {} if self.transport is None else {"transport": self.transport}
            return self._backend.load(artifact, params, self.device.index, handles, **ranks)
        except (MemoryError, OSError) as e:
            raise OutOfMemoryError(f"{self.device} has no room for {_room(artifact.program)}: {e}") from e


def _origins(graph: Graph, target: Target, options: CompileOptions) -> Origins:
    from rlx.compiler.origins import origins  # on first use: as in rlx.compiler.lower

    return origins(graph, target, options)


def with_more(options: CompileOptions | None, more: Mapping[str, Any] | None = None) -> CompileOptions:
    """`options`, or the defaults, with more fields. OptionError: they are something else."""
    options = CompileOptions() if options is None else options
    if not isinstance(options, CompileOptions):
        raise OptionError(f"options are rlx.CompileOptions(...), got {type(options).__name__} {options!r:.60}")
    return options.replace(**more) if more else options


def stores_of(params: ParamStore | Params | None, handles: HandleStore | None) -> tuple[ParamStore | None, HandleStore | None]:
    """Stores to share. OptionError: they are something else."""
    store = params.store if isinstance(params, Params) else params
    for name, found, kind in (("params", store, ParamStore), ("handles", handles, HandleStore)):
        if found is not None and not isinstance(found, kind):
            raise OptionError(f"compile takes {name} as a {kind.__name__}, got {type(found).__name__}")
    return store, handles


def session_of(session: Session | None, device: Device | str = Device.CPU) -> Session:
    """`session`, or a new one. OptionError: it is something else."""
    if session is not None and not isinstance(session, Session):
        raise OptionError(f"session is an rlx.Session(...), got {type(session).__name__} {session!r:.60}")
    return Session(device) if session is None else session


def _room(program: Program) -> str:
    sizes = ", ".join(f"{region} {nbytes}" for region, nbytes in planned_bytes(program).items() if nbytes)
    return f"graph {program.name!r} (bytes: {sizes})"


def _check_graph(method: str, graph: object) -> None:
    if not isinstance(graph, Graph):
        how = "; of a function: rlx.jit(f), or rlx.compile(f, *arrays)" if callable(graph) else ""
        raise OptionError(f"{method} takes a Graph, got {type(graph).__name__}{how}")


def _check_ranks(graph: Graph, transport: SymmetricTransport | None) -> None:
    for node in graph.nodes() if transport else ():
        if node.op.collective and (ranks := node.attrs.ranks) not in (1, transport.num_ranks):  # type: ignore[union-attr]
            raise CompileError(
                f"graph {graph.name!r}: {where(node)} is of {ranks} ranks, the session's transport has {transport.num_ranks}"  # type: ignore[union-attr]
            )


def _check_handles(graph: Graph, options: CompileOptions) -> None:
    have = {v.name: v.shape for v in graph.handles}
    for handle in options.handles:
        found = have.get(handle.name)
        if found is None:
            raise OptionError(f"options bind the handle {handle.name!r}; graph {graph.name!r} has {known(have)}")
        if found != handle.shape:
            raise OptionError(f"handle {handle.name!r} is {handle.shape} in the options, {found} in graph {graph.name!r}")

"""CompiledGraph: one program in memory, bound to names. Every check is made before anything changes.

The fast paths are `bound` and `run_slots`: they compare dtype and dims, copy what is not in its slot and make one native call,
on the CPU in machine code (rlx.runtime.calls).

More than 500 lines: it is one class, the public surface of a compiled graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from rlx.compile.options import CompileOptions
from rlx.driver.backend import Executable
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore, Snapshot
from rlx.driver.params import ParamStore
from rlx.errors import (
    BindingError,
    DuplicateNameError,
    InputShapeError,
    NumericsError,
    OptionError,
    UnknownNameError,
    Unsupported,
    known,
)
from rlx.host.gate import FastCalls, Gate
from rlx.ir.dtype import DType
from rlx.ir.graph import Node, Value
from rlx.ir.program import BufferDecl, Program
from rlx.runtime.binding import by_name, by_position, each, fits, from_bytes, named, shaped
from rlx.runtime.calls import Beginning, bound, copies, in_machine_code
from rlx.runtime.checked import check_numbers
from rlx.runtime.outputs import OutputView
from rlx.runtime.report import Allocations, CompileReport, MemoryPlan
from rlx.runtime.weights import Weights


class CompiledGraph:
    """A graph compiled for one device. Made by Session.compile. One thread at a time runs it; `clone` it for more."""

    def __init__(
        self, executable: Executable, device: Device, options: CompileOptions, report: CompileReport,
        slots: Callable[[], Mapping[Value, int]] = dict,
    ) -> None:  # fmt: skip
        """`slots`: gives the byte offset of each value of the graph that has one."""
        program = executable.program
        self.device, self.options = device, options
        self._executable, self._program, self._report = executable, program, report
        self._slots_of = slots
        self._gate = Gate()
        self._weights = Weights(executable, self._gate)
        self._inputs = tuple(program.buffers[id] for id in program.inputs if id != program.extent)
        self._handles = {program.buffers[id].name: program.buffers[id] for id in program.handles}
        self._slots = tuple((program.plan.offsets[o.buffer], o.shape.num_elements) for o in program.outputs)
        self._input_views = tuple(self._host_view(b.id) for b in self._inputs)
        self._output_views = tuple(shaped(self._host_view(o.buffer), o.shape) for o in program.outputs)
        self._staged = tuple((b.id, v) for b, v in zip(self._inputs, self._input_views) if executable.view(b.id) is None)
        self._fast = tuple((v, v.dtype, v.shape, v.base) for v in self._input_views)
        self._beginning = Beginning(executable)  # of a run: all checks of what is given come within it
        self._feeds: dict[str, tuple[int, int]] = {}  # handle -> (its buffer, the output's)
        self._lock = self._gate.lock
        executable.handles.join(self._gate)
        self._core: CompiledGraph | None = None  # this, for calls in machine code to hold: without them, so without a cycle
        if isinstance(executable, FastCalls) and not options.checked:
            core = object.__new__(CompiledGraph)
            vars(core).update(vars(self))
            self._core = core
        self._set_extent(None)

    def _host_view(self, buffer: int) -> np.ndarray:
        """The buffer's own memory; where the host cannot see it, an array to stage it in."""
        view, shape = self._executable.view(buffer), self._program.buffers[buffer].shape
        return np.empty(shape.static, shape.dtype.numpy) if view is None else view

    # -- params

    @property
    def params(self) -> ParamStore:
        """The weights, to be shared with other compiles: Session.compile(graph, options, params=compiled.params)."""
        return self._weights.store

    def set_param(self, name: str, array: np.ndarray) -> None:
        """Copy a weight in; packed copies follow. `array`: the declared dims and dtype, any strides.

        UnknownNameError, InputShapeError, InputDTypeError; CorruptFileError: it lies in a mapped file that was cut off since.
        None of them changes anything.
        """
        self.set_params({named("param", name): array})

    def set_params(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set several weights at once: what depends on more than one is computed once, and threads share the work.

        Errors are those of set_param; none of them changes anything, but for a file cut off while it is read: then the
        params are missing (missing_params). A run that another executable on these weights (or a clone) begins meanwhile waits
        until all are there; one that is under way already may read some old and some new ones."""
        if not isinstance(arrays, Mapping):
            raise BindingError(f"set_params takes {{name: array}}, got {type(arrays).__name__}")
        self._drain()  # queued runs are to use the weights as they were
        with self._lock, self._gate:
            self._weights.set(arrays)

    def set_param_typed(self, name: str, data: bytes, dtype: DType | str) -> None:
        """The same from raw little-endian bytes of exactly the param's size."""
        decl = self._weights.decl(name)
        self.set_param(name, from_bytes(f"param {name!r}", data, dtype, decl.shape))

    def missing_params(self) -> list[str]:
        """Params to set before the next run."""
        return self._weights.missing()

    # -- running

    @in_machine_code("dict", lambda self: partial(copies, self._output_views), makes=True)
    def run(self, inputs: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
        """One run on named arrays; a fresh array per output."""
        arrays = self._given({} if inputs is None else inputs)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            return copies(self._current_outputs())

    def run_read_outputs(self, inputs: Mapping[str, np.ndarray], indices: Iterable[int] | None) -> list[np.ndarray]:
        """One run; fresh arrays of these outputs only. None: of all."""
        with self._beginning:
            given = range(len(self._program.outputs)) if indices is None else indices
            wanted = [self._output_index(i) for i in each("indices are those of outputs, or None for all", given)]
            arrays = by_name("input", inputs, self._inputs)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            views = self._current_outputs()
            return [views[i].copy() for i in wanted]

    @in_machine_code("dict", lambda self: partial(list, self._raw()), makes=True)
    def run_raw(self, inputs: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
        """One run; (address, element count) per output, in place. The bytes are valid until the next run."""
        arrays = self._given(inputs)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            return self._raw()

    def _raw(self) -> list[tuple[int, int]]:
        return [(self._executable.address(o.buffer), o.shape.num_elements) for o in self._program.outputs]

    def outputs_view(self) -> list[OutputView]:
        """The outputs of the last run in place, as array-likes (numpy, DLPack) that the next run overwrites."""
        self._drain()
        return [OutputView(self, i) for i in range(len(self._program.outputs))]

    @in_machine_code("list", lambda self: self._slots)
    def run_slots(self, inputs: Sequence[np.ndarray]) -> tuple[tuple[int, int], ...]:
        """The fast path: arrays by position; the fixed (byte offset in the arena, element count) of each output.

        In machine code nothing is allocated, not even an object of Python. Where Python does the same (RLX_CALLS=python, a Python
        that is not known), it makes about a dozen objects that are gone when it returns: no array, and nothing that stays. An
        input that is the array `input_view` gave is not copied.
        """
        at, ours = 0, False
        try:  # as in _ready
            if (type(inputs) is not list and type(inputs) is not tuple) or len(inputs) != len(self._fast):
                inputs = by_position("input", inputs, self._inputs)
            for view, dtype, shape, memory in self._fast:
                array = inputs[at]
                if array is not view:
                    same = type(array) is np.ndarray and (array.dtype is dtype or array.dtype == dtype) and array.shape == shape
                    if not same:
                        fits(f"input {self._inputs[at].name!r}", array, self._inputs[at].shape)
                    else:
                        ours = ours or array.base is memory
                at += 1
        except Exception:
            self._executable.run_refuse()
            raise
        if ours:
            inputs = self._apart(inputs)
        self._drain()
        with self._lock, self._gate:
            self._ready()
            at = 0
            for view, _, _, _ in self._fast:
                if inputs[at] is not view:
                    np.copyto(view, inputs[at])
                at += 1
            self._execute()
        return self._slots

    def bound(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> Callable[[], tuple[Any, ...]]:
        """The fastest path: a function without arguments that runs on these arrays. Each call reads what they hold then, where
        they lie if kernels can, and returns the outputs in place: the same read-only arrays every time, valid until the next
        run (in debug mode OutputViews, which raise when stale). It keeps the arrays, and this executable.

        BindingError: not numpy arrays, or one in the slot of another input. Each call raises as run_slots does."""
        return bound(self, inputs)

    def run_typed(self, inputs: Mapping[str, tuple[bytes, DType | str]]) -> list[tuple[bytes, DType]]:
        """One run on raw little-endian bytes; (bytes, dtype) per output."""
        decls = {b.name: b for b in self._inputs}
        with self._beginning:
            if not isinstance(inputs, Mapping) or any(not isinstance(v, tuple) or len(v) != 2 for v in inputs.values()):
                raise BindingError("run_typed takes {name: (bytes, dtype)}")
            arrays = {
                name: from_bytes(f"input {name!r}", data, dtype, decls[name].shape) if name in decls else None
                for name, (data, dtype) in inputs.items()
            }
        outputs = self.run(arrays)  # type: ignore[arg-type]
        return [(array.tobytes(), o.shape.dtype) for array, o in zip(outputs, self._program.outputs)]

    def arena_ptr(self) -> int:
        """Base address of the offsets that run_slots gives."""
        return self._executable.arena_ptr

    def input_view(self, name: str) -> np.ndarray:
        """The input's own slot, writable: fill it, pass it to run_slots, and nothing is copied."""
        for decl, view in zip(self._inputs, self._input_views):
            if decl.name == name:
                return view
        raise UnknownNameError(f"no input is called {name!r}; there are {known(b.name for b in self._inputs)}")

    def byte_offset(self, node: Value | Node) -> int | None:
        """Where in the arena a run leaves a value of the graph that was compiled (of a node: its first result), row-major in the
        dtype it is computed in; None: it has no slot, as it was fused away. Slots of values that are neither inputs nor outputs
        may be used again later in the run. The first call lowers the graph once more."""
        value = node.results[0] if isinstance(node, Node) else node
        if not isinstance(value, Value):
            raise BindingError(f"byte_offset takes a value or a node of the graph, got {type(node).__name__}")
        return self._slots_of().get(value)

    def has_buffer(self, node: Value | Node) -> bool:
        """Whether byte_offset knows a place."""
        return self.byte_offset(node) is not None

    def read_output_row(self, output: int, row: int, row_inner: int) -> np.ndarray:
        """Elements [row * row_inner, (row + 1) * row_inner) of an output of the last run, as a fresh array."""
        self._drain()
        flat = self._current_outputs()[self._output_index(output)].reshape(-1)
        whole = isinstance(row, (int, np.integer)) and isinstance(row_inner, (int, np.integer))
        if not whole or row_inner < 1 or row < 0 or (row + 1) * row_inner > flat.size:
            raise InputShapeError(f"output {output} has {flat.size} elements; row {row} of {row_inner} is outside")
        return flat[row * row_inner : (row + 1) * row_inner].copy()

    # -- queued runs

    def commit_no_wait(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Queue a run and return (where 64 wait already: when there is room). Inputs are checked and copied now; errors of
        the run come from sync_pending, or from the next call that has to wait for it: of any executable on these states, as later
        runs on one HandleStore come after those that are queued on it.

        A graph with collectives runs here and now, and has run when this returns: ranks come to their meetings in one order."""
        self._enqueue(self._given(inputs), None)

    def sync_pending(self) -> None:
        """Wait for every queued run. The first that failed ends the queue: its error is raised with its index, the states are
        as the run before it left them, and those behind it are not run."""
        self.handles.queue.wait()

    def run_pipelined(self, input_sets: Iterable[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
        """Queue a run per set, wait once; out[run][output], fresh arrays. All sets are checked before the first run; if one
        fails all the same, it is as sync_pending says, and there are no results."""
        with self._beginning:
            given = each("run_pipelined takes a sequence of {name: array}, one for each run", input_sets)
            sets = [by_name("input", inputs, self._inputs) for inputs in given]
        results: list[list[np.ndarray]] = [[] for _ in sets]
        self._drain()  # what was queued before is not of these
        for arrays, result in zip(sets, results):
            self._enqueue(arrays, result)
        self.sync_pending()
        return results

    def _enqueue(self, arrays: list[np.ndarray], result: list[np.ndarray] | None) -> None:
        own = arrays if self._program.collectives else [np.array(a, order="C") for a in arrays]  # the caller may change its own

        def job() -> None:
            with self._lock, self._gate:
                self._run(own)
                if result is not None:
                    result.extend(v.copy() for v in self._current_outputs())

        if self._program.collectives:
            self.handles.queue.at_once(job)
        else:
            self.handles.queue.submit(job)

    # -- state

    def bind_handle(self, name: str, array: np.ndarray) -> bool:
        """Set a state. False where the graph has no such handle; wrong dims or dtype raise and change nothing."""
        decl = self._handles.get(named("handle", name))
        if decl is None:
            return False
        value = np.ascontiguousarray(fits(f"handle {name!r}", array, decl.shape)).reshape(decl.shape.static)
        self._drain()  # queued runs are to see the state as it was
        with self._lock, self._gate:
            self._executable.write(decl.id, value)
            self.handles.mend([name])
        return True

    def read_handle(self, name: str) -> np.ndarray | None:
        """A fresh array with the state, or None where the graph has no such handle. A state never set is zeros."""
        decl = self._handles.get(named("handle", name))
        if decl is None:
            return None
        self._drain()
        self.handles.check()
        return self._executable.read(decl.id)

    bind_gpu_handle = bind_handle  # state lives where the device's memory is: one set of handles
    read_gpu_handle = read_handle

    def has_gpu_handle(self, name: str) -> bool:
        return named("handle", name) in self._handles

    def set_gpu_handle_feed(self, handle: str, output_index: int | None) -> bool:
        """After each run `handle` takes the value of that output, on the device. None ends the feed. False: there is no such
        handle in the graph, and nothing has changed."""
        if not self.has_gpu_handle(handle):
            return False
        feed = None if output_index is None else self._feed_of(handle, output_index)
        self._drain()  # queued runs are to feed what they fed
        with self._lock, self._gate:
            self._feeds.pop(handle, None)
            self._feeds.update({} if feed is None else {handle: feed})
            self._gate.barred = len(self._feeds)
        return True

    def run_feed_gpu_handle(self, inputs: Mapping[str, np.ndarray], handle: str, output_index: int) -> np.ndarray:
        """One run, after which `handle` takes that output's value, on the device; returns the output too."""
        with self._beginning:
            feed = self._feed_of(handle, output_index)
            arrays = by_name("input", inputs, self._inputs)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            self._executable.copy(*feed)
            return self._current_outputs()[output_index].copy()

    @property
    def handles(self) -> HandleStore:
        """The states, to be shared with other compiles: Session.compile(graph, options, handles=compiled.handles)."""
        return self._executable.handles

    def use_handles(self, store: HandleStore) -> None:
        """Run on the states of `store` from now on: a fork, or another sequence's. Those it lacks are made, zeroed; nothing
        is copied or compiled. InputShapeError: it has one of another shape; then nothing changes."""
        if not isinstance(store, HandleStore):
            raise BindingError(f"use_handles takes a HandleStore, got {type(store).__name__}")
        self._drain()
        with self._lock, self._gate:
            left = self.handles
            self._executable.use_handles(store)
            left.leave(self._gate)
            store.join(self._gate)

    def fork_handles(self, k: int) -> list[HandleStore]:
        """`k` stores (for use_handles) with the states as they are now; memory is shared until one of them is written."""
        self._drain()
        with self._lock, self._gate:
            return self.handles.fork(k)

    def snapshot_handles(self) -> Snapshot:
        """Every state of the store as it is now, for restore_handles; as cheap as a fork."""
        self._drain()
        with self._lock, self._gate:
            return self.handles.snapshot()

    def restore_handles(self, snapshot: Snapshot) -> None:
        """Put every state back as `snapshot` has it. The names, dims and dtypes must be those of the store."""
        self._drain()
        with self._lock, self._gate:
            self.handles.restore(snapshot)

    def rollback(self) -> None:
        """Put every state back as the store's last snapshot has it. BindingError: there is none."""
        self._drain()
        with self._lock, self._gate:
            self.handles.rollback()

    def set_active_extent(self, extent: tuple[int, int] | None) -> None:
        """(n, upper): from now on the first n rows of the active dim hold data, 1 <= n <= upper, the bound it was compiled with.
        None: all do. What lies in the others of an input never counts; in an output they mean nothing.

        OptionError: compiled without an active dim. InputShapeError: another bound, or no such n. Neither changes anything."""
        if (bound := self.options.extent) is None:
            if extent is not None:
                raise OptionError(f"{self._program.name} has no active dim: compile it with options.bind_extent(name, upper)")
            return
        if extent is not None:
            fine = isinstance(extent, tuple) and len(extent) == 2 and all(isinstance(e, (int, np.integer)) for e in extent)
            if not fine or extent[1] != bound[1] or not 0 < extent[0] <= bound[1]:
                want = f"(n, {bound[1]}) with n from 1 to {bound[1]}"
                raise InputShapeError(f"{self._program.name}: the active extent of dim {bound[0]!r} is {want}, got {extent!r}")
        self._drain()  # queued runs are to have the rows they had
        with self._lock, self._gate:
            self._set_extent(extent)

    def _set_extent(self, extent: tuple[int, int] | None) -> None:
        self._extent = extent
        if self._program.extent is not None and self.options.extent is not None:
            rows = self.options.extent[1] if extent is None else extent[0]
            self._executable.write(self._program.extent, np.array(rows, np.int64))

    def _no_experts(self, *_: object) -> NoReturn:
        raise Unsupported("mixture-of-experts residency and router capture are not in this version: all weights are resident")

    set_moe_resident_experts = set_moe_resident_experts_per_layer = _no_experts
    enable_moe_topk_capture = take_moe_topk_capture = take_moe_residency_stats = _no_experts

    # -- for people and tools

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsupported(
            f"{self._program.name}: a compiled graph is machine code and memory of this process: it is not copied or pickled; "
            "clone() makes another executable, and a graph can be copied, pickled and compiled again"
        )

    def clone(self) -> CompiledGraph:
        """An independent executable: shares code and weights, owns its arena and states (copied as they stand)."""
        self._drain()
        with self._lock, self._gate:
            twin = CompiledGraph(self._executable.clone(), self.device, self.options, self._report, self._slots_of)
        twin._feeds.update(self._feeds)
        twin._gate.barred = twin._gate.shut = len(twin._feeds)
        twin._set_extent(self._extent)
        return twin

    def program(self) -> Program:
        """The lowered program: buffers, steps, plan. str() prints it; `texts` of the report has the generated code."""
        return self._program

    def memory_plan(self) -> MemoryPlan:
        """Where every byte is, known before the first run."""
        return MemoryPlan.of(self._program, self._executable.memory())

    def allocations(self) -> Allocations:
        """Allocation counters, Python's and the device's; a run moves neither."""
        native = self._executable.allocations()
        return Allocations(sys.getallocatedblocks(), native["count"], native["live_bytes"])

    def report(self) -> CompileReport:
        """What became of each node, the kernels with their generated code, and where compile time went."""
        return self._report

    # -- inside

    def _given(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The inputs of a run, in order."""
        with self._beginning:
            return by_name("input", inputs, self._inputs)

    def _run(self, arrays: list[np.ndarray]) -> None:
        self._ready()
        self._copy_in(arrays)
        self._execute()

    def _ready(self) -> None:
        """What a run reads is there: weights and states."""
        try:  # and no context: this is on the fast path, where a context takes two objects
            self._weights.ready()
            self.handles.check()
        except Exception:
            self._executable.run_refuse()
            raise

    def _apart(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays, those that lie in another input's slot copied: filling that slot would change them."""
        views = self._input_views
        return [
            a.copy() if a.base is view.base and any(np.may_share_memory(a, v) for v in views if v is not view) else a
            for a, view in zip(arrays, views)
        ]

    def _copy_in(self, arrays: Sequence[np.ndarray]) -> None:
        arrays = self._apart(arrays)
        for view, array in zip(self._input_views, arrays):
            if array is not view:
                np.copyto(view, array)

    def _execute(self) -> None:
        for buffer, view in self._staged:
            self._executable.write(buffer, view)
        self._gate.generation += 1
        if self.options.checked:
            self._executable.run_steps()
            try:
                check_numbers(self._executable, self._extent and self._extent[0])
            except NumericsError:
                self._executable.run_abort()
                raise
            self._executable.run_commit()
        else:
            self._executable.run()
        for goal, source in self._feeds.values():
            self._executable.copy(goal, source)

    def _feed_of(self, handle: str, output: int) -> tuple[int, int]:
        """The buffers of a handle, and of the output that is to feed it."""
        decl, shape = self._handle(handle), self._program.outputs[self._output_index(output)].shape
        if shape != decl.shape:
            raise InputShapeError(f"handle {handle!r} is {decl.shape}, output {output} is {shape}: it cannot feed it")
        if any(decl.id in s.writes for s in (*self._program.steps, *self._program.commit)):
            raise DuplicateNameError(f"handle {handle!r} is assigned in the graph; a feed would overwrite that")
        return decl.id, self._program.outputs[output].buffer

    def _handle(self, name: str) -> BufferDecl:
        if named("handle", name) not in self._handles:
            raise UnknownNameError(f"no handle is called {name!r}; there are {known(self._handles)}")
        return self._handles[name]

    def _output_index(self, index: int) -> int:
        if type(index) is not int or not 0 <= index < len(self._program.outputs):
            names = [o.name for o in self._program.outputs]
            raise UnknownNameError(f"no output {index!r}; there are {len(names)}: {', '.join(map(repr, names))}")
        return index

    def _current_outputs(self) -> Sequence[np.ndarray]:
        if not self._gate.generation:
            raise BindingError(f"{self._program.name} has not run yet")
        if any(self._executable.view(o.buffer) is None for o in self._program.outputs[:1]):
            return [shaped(self._executable.read(o.buffer), o.shape) for o in self._program.outputs]
        return self._output_views

    def _drain(self) -> None:
        """Wait for the runs that are queued on these states, of whatever executable."""
        queue = self._executable.handles.queue
        if queue.last is not None:
            queue.wait()

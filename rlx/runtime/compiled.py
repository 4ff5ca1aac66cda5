"""CompiledGraph: one program in memory, bound to names. Every check is made before anything changes.

The fast paths are `bound` and `run_slots`. They compare dtype and dims, copy inputs that are not in their slots, and make one
call of compiled code. On the CPU all of this is machine code (rlx.runtime.calls).

More than 500 lines: it is one class, the public surface of a compiled graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.compiler.options import CompileOptions
from rlx.driver.backend import Artifact, Executable
from rlx.driver.device import Device
from rlx.driver.foreign import DeviceArray
from rlx.driver.handles import HandleStore, Snapshot
from rlx.driver.stream import Pending

from rlx.errors import (  # isort: skip
    BindingError, DuplicateNameError, InputShapeError, NumericsError, OptionError, UnknownNameError, Unsupported, items, known,
)  # fmt: skip
from rlx.host.gate import FastCalls, Gate
from rlx.ir.dtype import DType
from rlx.ir.graph import Node, Value
from rlx.ir.program import BufferDecl, Program
from rlx.ir.shown import Shown, counted, sized, some
from rlx.runtime.binding import Declared, by_name, by_position, converted, fits, from_bytes, named, shaped
from rlx.runtime.calls import Beginning, bound, copies, in_machine_code
from rlx.runtime.checked import check_numbers
from rlx.runtime.experts import Capture, offloaded, set_resident, take_stats, tiers_of
from rlx.runtime.outputs import OutputView
from rlx.runtime.report import Allocations, CompileReport, MemoryPlan
from rlx.runtime.weights import Params, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from rlx.compiler.origins import Origins
    from rlx.driver.expert_source import ExpertSource
    from rlx.driver.experts import ExpertTiers, ResidencyStats
    from rlx.explain.profile import Profile


class CompiledGraph(Shown):
    """A graph compiled for one device. Made by Session.compile. Only one thread at a time may run it; `clone` it for more."""

    def __init__(
        self, executable: Executable, device: Device, options: CompileOptions, report: CompileReport,
        origins: Callable[[], Origins], artifact: Artifact,
    ) -> None:  # fmt: skip
        """`origins`: lowers the graph once more, for facts that a compile does not record. `artifact`: the code, for `save`."""
        program = executable.program
        self.device, self.options, self.artifact = device, options, artifact
        self._executable, self._program, self._report = executable, program, report
        self._origins_of = origins
        self._gate = Gate()
        self._weights = Weights(executable, self._gate)
        self._inputs = tuple(program.buffers[id] for id in program.inputs if id != program.extent)
        self._handles = {program.buffers[id].name: program.buffers[id] for id in program.handles}
        self._slots = tuple((program.plan.offsets[o.buffer], o.shape.num_elements) for o in program.outputs)
        # None where the host does not see the device's memory
        self._input_views = tuple(executable.view(b.id) for b in self._inputs)
        views = [executable.view(o.buffer) for o in program.outputs]
        self._output_views = tuple(None if v is None else shaped(v, o.shape) for v, o in zip(views, program.outputs))
        self._visible = all(v is not None for v in (*self._input_views, *views))
        self._staging: dict[str, np.ndarray] = {}  # arrays that input_view returns, if not `_visible`
        shapes = [b.shape for b in self._inputs]
        bases = [self if v is None else v.base for v in self._input_views]  # `self`: the base of no array
        own = [object() if v is None else v for v in self._input_views]  # an object that no caller has
        self._fast = tuple((v, s.dtype.numpy, s.static, base) for v, s, base in zip(own, shapes, bases))
        self._beginning = Beginning(executable)  # context manager around the checks of a run's inputs
        self._feeds: dict[str, tuple[int, int]] = {}  # handle -> (its buffer, the output's)
        self._capture = Capture(executable)
        self._lock = self._gate.lock
        executable.handles.join(self._gate)
        self._core: CompiledGraph | None = None  # generated functions hold `_core` instead of the graph: no reference cycle
        if isinstance(executable, FastCalls) and not options.checked:
            core = object.__new__(CompiledGraph)
            vars(core).update(vars(self))
            self._core = core
        self._set_extent(None)

    def _line(self) -> str:
        inputs, outputs = (some(f"{d.name} {d.shape}" for d in found) for found in (self.inputs, self.outputs))
        params = f"; {counted(len(self.params), 'param')}" if self._weights.decls else ""
        return f"{self._program.name!r} on {self.device}: {inputs} -> {outputs}{params}; {sized(self.memory_plan().total_bytes)}"

    def __str__(self) -> str:
        return f"{self!r}\n{self.report()}\n{self.memory_plan()}"

    @property
    def inputs(self) -> tuple[Declared, ...]:
        """Name, shape and dtype of every input, in the order of run_slots."""
        return tuple(Declared(b.name, b.shape, b.shape.dtype) for b in self._inputs)

    @property
    def outputs(self) -> tuple[Declared, ...]:
        """As `inputs`, in the order of set_outputs."""
        return tuple(Declared(o.name, o.shape, o.shape.dtype) for o in self._program.outputs)

    # -- params

    @property
    def params(self) -> Params:
        """Name, shape and dtype of every weight. Also the weights, shared with another compile that is given them:
        Session.compile(graph, options, params=compiled.params)."""
        declared = (Declared(name, b.shape, b.shape.dtype) for name, b in self._weights.decls.items())
        return Params(declared, self._weights.store)

    def set_param(self, name: str, array: np.ndarray) -> None:
        """Copy a weight in and update its packed copies. `array`: the declared dims and dtype, any strides.

        Raises UnknownNameError, InputShapeError or InputDTypeError, or CorruptFileError if the array is in a mapped file that
        has been truncated since. None of these changes anything.
        """
        self.set_params({named("param", name): array})

    def set_params(self, arrays: Mapping[str, np.ndarray | ExpertSource]) -> None:
        """Set several weights at once. Values that depend on several weights are computed once, and threads share the work.

        Raises as set_param does. Nothing changes then, with two exceptions: if a file is truncated while it is read, or the
        device has no room for what it prepares (OutOfMemoryError), the params are missing afterwards (missing_params). If
        another executable on these weights (or a clone) starts a run meanwhile, that run waits until all weights are set. A run
        that has already started may read some old and some new weights."""
        if not isinstance(arrays, Mapping):
            raise BindingError(f"set_params takes {{name: array}}, got {type(arrays).__name__}")
        with self._alone():
            self._weights.set(arrays)

    def set_param_typed(self, name: str, data: bytes, dtype: DType | str) -> None:
        """As set_param, from raw little-endian bytes of `dtype`, exactly as many as the param needs. Floats of another width are
        rounded to the declared dtype (to nearest, ties to even); integers and floats are never mixed."""
        decl = self._weights.decl(name)
        self.set_param(name, from_bytes(f"param {name!r}", data, dtype, decl.shape))

    def missing_params(self) -> list[str]:
        """Names of the params that must be set before the next run."""
        return self._weights.missing()

    # -- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once, on inputs by position, by name or both: arrays, numbers and lists, which become arrays of the declared dtype.
        Returns a fresh array, or a tuple of them if the graph has another number of outputs than one.

        Raises as `run` does, and InputDTypeError for numbers that the declared dtype does not hold."""
        outputs = self.run(self._named(args, kwargs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs by position and by name, by name. BindingError: too many, one is given twice, or a dict of them is given."""
        if any(isinstance(x, Mapping) for x in args):
            raise BindingError("an input by position is an array; got a dict: call run(inputs), or unpack it with **inputs")
        if len(args) > len(self._inputs):
            raise BindingError(f"{len(self._inputs)} inputs ({known(d.name for d in self._inputs)}), got {len(args)} by position")
        given = {d.name: x for d, x in zip(self._inputs, args)}
        if twice := given.keys() & kwargs:
            raise BindingError(f"input {known(twice)} is given by position and by name")
        given |= kwargs  # type: ignore[arg-type]
        adopt = self._executable.adopt
        for d in self._inputs:
            if d.name in given:
                given[d.name] = converted(f"input {d.name!r}", given[d.name], d.shape, adopt)
        return given

    @in_machine_code("dict", lambda self: partial(copies, self._output_views), makes=True)
    def run(self, inputs: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
        """Run once on named arrays. Returns a fresh array per output."""
        arrays = self._given({} if inputs is None else inputs)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            return self._read(range(len(self._program.outputs)))

    def run_read_outputs(self, inputs: Mapping[str, np.ndarray], indices: Iterable[int] | None) -> list[np.ndarray]:
        """Run once. Returns fresh arrays of the outputs `indices`, or of all outputs if it is None."""
        with self._beginning:
            given = range(len(self._program.outputs)) if indices is None else indices
            wanted = [self._output_index(i) for i in items("indices are those of outputs, or None for all", given, BindingError)]
            arrays = by_name("input", inputs, self._inputs, self._executable.adopt)
        self._drain()
        with self._lock, self._gate:
            self._run(arrays)
            return self._read(wanted)

    @in_machine_code("dict", lambda self: partial(list, self._raw()), makes=True)
    def run_raw(self, inputs: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
        """Run once. Returns (address, element count) per output, in place. The bytes are valid until the next run."""
        arrays = self._given(inputs)
        with self._alone():
            self._run(arrays)
            return self._raw()

    def _raw(self) -> list[tuple[int, int]]:
        return [(self._executable.address(o.buffer), o.shape.num_elements) for o in self._program.outputs]

    @property
    def asynchronous(self) -> bool:
        """Whether run_slots may return before the run is finished."""
        return self._executable.asynchronous

    def outputs_view(self) -> list[OutputView]:
        """The outputs of the last run in place, as array-likes (numpy, DLPack) that the next run overwrites. Where the host does
        not see the device's memory, an output is copied when its contents are first asked for."""
        if not self._executable.asynchronous:
            self._drain()
        self._check_has_run()
        return [OutputView(self, i) for i in range(len(self._program.outputs))]

    @in_machine_code("list", lambda self: self._slots)
    def run_slots(self, inputs: Sequence[np.ndarray]) -> tuple[tuple[int, int], ...]:
        """The fast path: takes arrays by position, returns the fixed (byte offset in the arena, element count) of each output.

        The machine code version allocates nothing, not even a Python object. The Python version (RLX_CALLS=python, or an unknown
        Python) makes about a dozen objects, all freed when it returns, and no arrays. An input that is the array returned by
        `input_view` is not copied. On an asynchronous device the run may still be under way: what reads its results waits, and
        raises its error.
        """
        at, ours = 0, False
        try:  # no context manager, for the reason given in _ready
            if (type(inputs) is not list and type(inputs) is not tuple) or len(inputs) != len(self._fast):
                inputs = by_position("input", inputs, self._inputs, self._executable.adopt)
            for view, dtype, shape, memory in self._fast:
                array = inputs[at]
                if array is not view:
                    same = type(array) is np.ndarray and (array.dtype is dtype or array.dtype == dtype) and array.shape == shape
                    if not same:
                        inputs = by_position("input", inputs, self._inputs, self._executable.adopt)
                        ours = True
                        break
                    else:
                        ours = ours or array.base is memory
                at += 1
        except Exception:
            self._executable.run_refuse()
            raise
        if ours:
            inputs = self._apart(inputs)
        if not self._executable.asynchronous or self.handles.queue.failed:
            self._drain()
        with self._lock, self._gate:
            self._ready()
            if self._visible:
                at = 0
                for view, _, _, _ in self._fast:
                    if inputs[at] is not view:
                        np.copyto(view, inputs[at])  # type: ignore[arg-type]
                    at += 1
            else:
                self._copy_in(inputs)
            if (later := self._execute()) is not None:
                self.handles.queue.at_once(lambda: later)
        return self._slots

    def bound(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> Callable[[], tuple[Any, ...]]:
        """The fastest path: returns a function without arguments that runs on these arrays.

        Each call reads the arrays' current contents, without a copy if the kernels can read them in place. It returns the outputs
        in place: the same read-only arrays every time, valid until the next run (in debug mode, and where the host does not see
        the device's memory, OutputViews). The function keeps the arrays and this executable alive.

        BindingError: not numpy arrays, or an array in the slot of another input. Each call raises as run_slots does."""
        return bound(self, inputs)

    def run_typed(self, inputs: Mapping[str, tuple[bytes, DType | str]]) -> list[tuple[bytes, DType]]:
        """Run once on raw little-endian bytes of the dtypes named, converted as in set_param_typed. Returns (bytes, dtype) per
        output, in its declared dtype."""
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
        """Base address for the offsets that run_slots returns."""
        return self._executable.arena_ptr

    def input_view(self, name: str) -> np.ndarray:
        """The input's own slot, writable: fill it, pass it to run_slots, and nothing is copied. Where the host does not see the
        device's memory: an array of the host, always the same, which begins as a copy of the slot; runs copy it to the device."""
        for decl, view in zip(self._inputs, self._input_views):
            if decl.name == named("input", name):
                if name not in self._staging:
                    self._staging[name] = self._executable.read(decl.id) if view is None else view
                return self._staging[name]
        raise UnknownNameError(f"no input is called {name!r}; there are {known(b.name for b in self._inputs)}")

    def byte_offset(self, node: Value | Node) -> int | None:
        """The arena byte offset at which a run stores a value of the compiled graph (for a node: its first result), row-major, in
        the dtype it is computed in. None: it is not stored so, but fused away, transposed, or inside of a padded value. The slot
        of a value that is neither input nor output may be reused later in the run. The first call lowers the graph once more."""
        value = node.results[0] if isinstance(node, Node) else node
        if not isinstance(value, Value):
            raise BindingError(f"byte_offset takes a value or a node of the graph, got {type(node).__name__}")
        place = self._origins_of().places.get(value)
        return place.offset if place is not None and place.row_major else None

    def has_buffer(self, node: Value | Node) -> bool:
        """Whether byte_offset is not None."""
        return self.byte_offset(node) is not None

    def read_output_row(self, output: int, row: int, row_inner: int) -> np.ndarray:
        """Elements [row * row_inner, (row + 1) * row_inner) of an output of the last run, flattened, as a fresh array. Nothing
        else is read from the device."""
        self._drain()
        self._check_has_run()
        found = self._program.outputs[self._output_index(output)]
        whole = isinstance(row, (int, np.integer)) and isinstance(row_inner, (int, np.integer))
        size = found.shape.num_elements
        if not whole or row_inner < 1 or row < 0 or (row + 1) * row_inner > size:
            raise InputShapeError(f"output {output} has {size} elements; row {row} of {row_inner} is outside")
        dtype, stored = found.shape.dtype, self._program.buffers[found.buffer].shape.dtype
        per = dtype.itemsize // stored.itemsize  # a complex number is stored as a pair
        return self._executable.read(found.buffer, int(row * row_inner) * per, int(row_inner) * per).view(dtype.numpy)

    # -- queued runs

    def commit_no_wait(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Queue a run and return. If 64 runs are queued already, wait for room first.

        Inputs are checked and copied now. Errors of the run are raised by sync_pending, or by the next call that waits for the
        run. That may be a call of any executable on the same HandleStore: its runs come after those queued on the store.

        A graph with collectives runs before this returns, because all ranks must reach their barriers in the same order."""
        self._enqueue(self._given(inputs), lambda: None)

    def sync_pending(self) -> None:
        """Wait for every queued run. If one failed, its error is raised with its index, the states are as the run before it left
        them, and later runs are cancelled."""
        self.handles.queue.wait()

    def run_pipelined(self, input_sets: Iterable[Mapping[str, np.ndarray]]) -> list[list[np.ndarray]]:
        """Queue a run per input set and wait for all. Returns out[run][output], fresh arrays. All sets are checked before the
        first run. If a run fails all the same, this raises as sync_pending does and returns no results."""
        with self._beginning:
            given = items("run_pipelined takes a sequence of {name: array}, one for each run", input_sets, BindingError)
            sets = [by_name("input", inputs, self._inputs, self._executable.adopt) for inputs in given]
        outputs, results = [o.buffer for o in self._program.outputs], []
        self._drain()  # earlier queued runs do not belong to this call
        for arrays in sets:
            self._enqueue(arrays, lambda: results.append(self._executable.read_later(outputs)))
        self.sync_pending()
        return [self._shaped(result()) for result in results]

    def _enqueue(self, arrays: list[np.ndarray], then: Callable[[], None]) -> None:
        """Queue a run, and `then` behind it."""
        here = bool(self._program.collectives) or self._executable.asynchronous
        own = arrays if here else [np.array(a, order="C") for a in arrays]  # the caller may overwrite them

        def job() -> Pending | None:
            with self._lock, self._gate:
                self._ready()
                self._copy_in(own)
                later = self._execute()
                then()
                return later

        if here:
            self.handles.queue.at_once(job)
        else:
            self.handles.queue.record(self._program.name, job)
            self.handles.queue.submit()

    # -- state

    def bind_handle(self, name: str, array: np.ndarray) -> bool:
        """Set a state. Returns False if the graph has no such handle. Wrong dims or dtype raise and change nothing."""
        decl = self._handles.get(named("handle", name))
        if decl is None:
            return False
        value = fits(f"handle {name!r}", array, decl.shape, self._executable.adopt)
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value).reshape(decl.shape.static)
        with self._alone():
            self._executable.write(decl.id, value)
            self.handles.mend([name])
        return True

    def read_handle(self, name: str) -> np.ndarray | None:
        """A fresh array with the state, or None if the graph has no such handle. A state that was never set is zeros."""
        decl = self._handles.get(named("handle", name))
        if decl is None:
            return None
        self._drain()
        self.handles.check()
        return self._executable.read(decl.id)

    bind_gpu_handle = bind_handle  # states are always in device memory: there is one set of handles
    read_gpu_handle = read_handle

    def has_gpu_handle(self, name: str) -> bool:
        return named("handle", name) in self._handles

    def set_gpu_handle_feed(self, handle: str, output_index: int | None) -> bool:
        """After each run, copy that output to `handle` on the device. None ends the feed. Returns False, and changes nothing, if
        the graph has no such handle."""
        if not self.has_gpu_handle(handle):
            return False
        feed = None if output_index is None else self._feed_of(handle, output_index)
        with self._alone():
            self._feeds.pop(handle, None)
            self._feeds.update({} if feed is None else {handle: feed})
            self._bar()
        return True

    def run_feed_gpu_handle(self, inputs: Mapping[str, np.ndarray], handle: str, output_index: int) -> np.ndarray:
        """Run once, then copy that output to `handle` on the device. Returns the output too."""
        with self._beginning:
            feed = self._feed_of(handle, output_index)
            arrays = by_name("input", inputs, self._inputs, self._executable.adopt)
        with self._alone():
            self._run(arrays)
            self._executable.copy(*feed)
            return self._read([output_index])[0]

    @property
    def handles(self) -> HandleStore:
        """The states, to be shared with other compiles: Session.compile(graph, options, handles=compiled.handles)."""
        return self._executable.handles

    def use_handles(self, store: HandleStore) -> None:
        """Run on the states of `store` from now on: a fork, or those of another sequence. States that the store lacks are
        allocated, zeroed. Nothing is copied or compiled. InputShapeError: the store has a state of another shape; nothing has
        changed then."""
        if not isinstance(store, HandleStore):
            raise BindingError(f"use_handles takes a HandleStore, got {type(store).__name__}")
        with self._alone():
            left = self.handles
            self._executable.use_handles(store)
            left.leave(self._gate)
            store.join(self._gate)

    def fork_handles(self, k: int) -> list[HandleStore]:
        """`k` stores (for use_handles) with the current states. Memory is shared until one of them is written."""
        with self._alone():
            return self.handles.fork(k)

    def snapshot_handles(self) -> Snapshot:
        """A snapshot of every state of the store, for restore_handles. It costs as much as a fork."""
        with self._alone():
            return self.handles.snapshot()

    def restore_handles(self, snapshot: Snapshot) -> None:
        """Restore every state from `snapshot`. Its names, dims and dtypes must be those of the store."""
        with self._alone():
            self.handles.restore(snapshot)

    def rollback(self) -> None:
        """Restore every state from the store's last snapshot. BindingError: there is none."""
        with self._alone():
            self.handles.rollback()

    def set_active_extent(self, extent: tuple[int, int] | None) -> None:
        """(n, upper): from now on only the first n indices of the active dim hold data. `upper` is the bound that the graph was
        compiled with, 1 <= n <= upper. None: all hold data. Padding in an input never affects the result; in an output it is
        undefined.

        OptionError: compiled without an active dim. InputShapeError: another bound, or n out of range. Neither changes
        anything."""
        if (bound := self.options.extent) is None:
            if extent is not None:
                raise OptionError(f"{self._program.name} has no active dim: compile it with options.bind_extent(name, upper)")
            return
        if extent is not None:
            ints = [isinstance(e, (int, np.integer)) and not isinstance(e, bool) for e in extent] if type(extent) is tuple else []
            if ints != [True, True] or extent[1] != bound[1] or not 0 < extent[0] <= bound[1]:
                want = f"(n, {bound[1]}) with n from 1 to {bound[1]}"
                raise InputShapeError(f"{self._program.name}: the active extent of dim {bound[0]!r} is {want}, got {extent!r}")
        with self._alone():
            self._set_extent(extent)

    def _set_extent(self, extent: tuple[int, int] | None) -> None:
        self._extent = extent
        if self._program.extent is not None and self.options.extent is not None:
            rows = self.options.extent[1] if extent is None else extent[0]
            self._executable.write(self._program.extent, np.array(rows, np.int64))

    # -- experts

    def set_moe_resident_experts(self, mask: Sequence[bool] | np.ndarray) -> None:
        """Which experts' weights are resident, the same in every layer: a bool for each expert. Where the memory of the others is
        and how they come to a run that needs them: docs/experts.md. Results are the same bits whatever the mask. It holds for all
        executables on these weights, also for clones, and may change beside runs.

        InputShapeError, BindingError: the mask does not fit; nothing changes. Unsupported: the graph has no experts, or the mask
        leaves some out and the device has no slow tier. CorruptFileError: an expert cannot be read."""
        set_resident(self._executable, self.device, None, mask)

    def set_moe_resident_experts_per_layer(self, masks: Sequence[Sequence[bool] | np.ndarray]) -> None:
        """As set_moe_resident_experts, with a mask for each layer that has experts, in forward order."""
        given = items("set_moe_resident_experts_per_layer takes a mask for each layer", masks, BindingError)
        set_resident(self._executable, self.device, given)

    def expert_tiers(self) -> ExpertTiers:
        """The tiers of the experts of these weights, shared by all executables on them: single experts are promoted and demoted
        here. Unsupported: the graph has no experts, or the device has no slow tier."""
        return tiers_of(self._executable, self.device)

    def take_moe_residency_stats(self) -> ResidencyStats:
        """The work of each tier in the runs of this executable since the last call. Unsupported: as expert_tiers."""
        with self._alone():
            return take_stats(self._executable, self.device)

    def enable_moe_topk_capture(self, n: int) -> None:
        """Capture the first `n` choices of every token in the next run, however it is started. A capture that was not taken is
        dropped. OptionError: a router chooses fewer than `n`. Unsupported: the graph has no router."""
        with self._alone():
            self._capture.arm(n)
            self._bar()

    def take_moe_topk_capture(self) -> list[np.ndarray]:
        """The choices of the first run since enable_moe_topk_capture that did not fail: i32 [tokens, n] for each layer with
        experts, in forward order. Rows of padding are undefined. BindingError: no capture is enabled, or nothing has run."""
        with self._alone():
            found = self._capture.take()
            self._bar()
            return found

    def take_moe_topk_guesses(self) -> list[np.ndarray]:
        """The guesses of the run whose choices were taken last: i32 [tokens, n] for each router that keeps one (ops.route), of
        what the router after it will choose."""
        found, self._capture.guesses = self._capture.guesses, []
        return found

    # -- for people and tools

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsupported(
            f"{self._program.name}: a compiled graph is machine code and memory of this process; it cannot be copied or pickled. "
            "clone() makes another executable, and a graph can be copied, pickled and compiled again"
        )

    def clone(self) -> CompiledGraph:
        """An independent executable. It shares code and weights, and has its own arena and its own copy of the states."""
        with self._alone():
            twin = CompiledGraph(
                self._executable.clone(), self.device, self.options, self._report, self._origins_of, self.artifact
            )
        twin._feeds.update(self._feeds)
        twin._bar()
        twin._gate.shut = twin._gate.barred
        twin._set_extent(self._extent)
        return twin

    def program(self) -> Program:
        """The lowered program: buffers, steps, plan. str() prints it. The generated code is in report().texts."""
        return self._program

    def memory_plan(self) -> MemoryPlan:
        """The offset and size of every buffer, known before the first run."""
        return MemoryPlan.of(self._program, self._executable.memory(), offloaded(self._executable))

    def allocations(self) -> Allocations:
        """Allocation counters of Python and of the device. A run changes neither."""
        native = self._executable.allocations()
        return Allocations(sys.getallocatedblocks(), native["count"], native["live_bytes"])

    def report(self) -> CompileReport:
        """How each node was compiled, the kernels with their generated code, and where compile time went."""
        from rlx.runtime.explaining import described  # here and below: not needed by most programs

        return replace(self._report, describe=partial(described, self))

    def profile(self, *inputs: Any, runs: int = 40, **named: Any) -> Profile:
        """The time of each step: `runs` measured runs, on inputs given as in a call (or as one mapping); without any, on those of
        the last run, or on typical ones before the first. States are as before afterwards.

        Raises as `run` does. Unsupported: the device has no times of steps, or the graph has collectives."""
        from rlx.runtime.profiling import profiled

        return profiled(self, inputs, named, runs)

    def save(self, path: str | PathLike[str], weights: bool = True) -> int:
        """Write this graph, with machine code and weights, to an artifact file, which rlx.load reads without compiling. Returns
        its size in bytes. States are not stored. `weights` False: they are set after each load. See rlx.save."""
        from rlx.runtime.saving import save  # not needed by most programs

        return save(path, self, weights=weights)

    def export_c(self, folder: str | PathLike[str]) -> Path:
        """Write this graph as a shared library with a C interface: lib<name>.so and rlx.h, into a folder. Returns the path of the
        library, which has the weights in it and needs no Python. A C compiler makes it (`cc`; the knob RLX_CC).

        CompileError: there is no C compiler, or it fails. MissingParamError: a weight is not set. Unsupported: the device is not
        the CPU, or the graph has collectives."""
        from rlx.runtime.saving import export_c

        return export_c(self, folder)

    @contextmanager
    def settled(self) -> Iterator[Executable]:
        """The executable, with all weights prepared if none is missing, and all experts in memory. No run starts meanwhile."""
        with self._alone():
            if not self._weights.missing():
                self._weights.ready()
            with self._weights.in_memory():
                yield self._executable

    def explain(self, path: str | PathLike[str], profile: Profile | None = None) -> None:
        """Write one HTML page about this executable: its memory, its steps with their times and code, the graph.
        It needs no network. `profile`: the times to show; else they are measured, on the inputs of the last run. docs/explain.md.

        OptionError: the file cannot be written."""
        from rlx.runtime.explaining import explained

        explained(self, path, profile)

    # -- inside

    def _origins(self) -> Origins:
        return self._origins_of().checked(self._program)

    def _given(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The inputs of a run, in order."""
        with self._beginning:
            return by_name("input", inputs, self._inputs, self._executable.adopt)

    def _run(self, arrays: list[np.ndarray]) -> None:
        self._ready()
        self._copy_in(arrays)
        if (later := self._execute()) is not None:
            later.wait()  # the caller needs the results now

    def _ready(self) -> None:
        """Check that the weights and states that a run reads are set."""
        try:  # no context manager: this is the fast path, and a context manager allocates two objects
            self._weights.ready()
            self.handles.check()
        except Exception:
            self._executable.run_refuse()
            raise

    def _apart(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays, with copies of those that are stored in another input's slot: filling that slot would change them."""
        views = [v for v in self._input_views if v is not None]
        bases = {id(v.base) for v in views}
        return [
            a.copy() if id(a.base) in bases and any(np.may_share_memory(a, v) for v in views if v is not view) else a
            for a, view in zip(arrays, self._input_views)
        ]

    def _copy_in(self, arrays: Sequence[np.ndarray]) -> None:
        for decl, view, array in zip(self._inputs, self._input_views, self._apart(arrays)):
            if view is None:
                whole = isinstance(array, DeviceArray) or array.flags.c_contiguous
                self._executable.write(decl.id, array if whole else array.copy())
            elif array is not view:
                np.copyto(view, array)

    def _bar(self) -> None:
        """Leave runs to Python if it has to do something before or after them. Called within the gate."""
        self._gate.barred = len(self._feeds) + self._capture.waiting

    def _execute(self) -> Pending | None:
        if not self._capture.waiting:
            return self._execute_now()
        try:
            return self._capture.run(self._execute_now)
        finally:
            self._bar()

    def _execute_now(self) -> Pending | None:
        later = None
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
            later = self._executable.run()
        if self._feeds:
            for goal, source in self._feeds.values():
                self._executable.copy(goal, source)
        return later

    def _feed_of(self, handle: str, output: int) -> tuple[int, int]:
        """The buffers of a handle and of the output that will feed it."""
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
        whole = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
        if not whole or not 0 <= index < len(self._program.outputs):
            names = [o.name for o in self._program.outputs]
            raise UnknownNameError(f"no output {index!r}; there are {len(names)}: {', '.join(map(repr, names))}")
        return int(index)

    def _check_has_run(self) -> None:
        if not self._gate.generation:
            raise BindingError(f"{self._program.name} has not run yet, so it has no outputs to read: run it first")

    def _read(self, indices: Iterable[int]) -> list[np.ndarray]:
        """Fresh arrays of these outputs. The others are not read from the device."""
        outputs = [self._program.outputs[i] for i in indices]
        return [shaped(self._executable.read(o.buffer), o.shape) for o in outputs]

    def _shaped(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [shaped(a, o.shape) for a, o in zip(arrays, self._program.outputs, strict=True)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No run is queued, which would use the state before, and no other thread runs or changes this executable."""
        self._drain()
        with self._lock, self._gate:
            yield

    def _drain(self) -> None:
        """Wait for all runs queued on these states, also those of other executables."""
        queue = self._executable.handles.queue
        if queue.last is not None:
            queue.wait()

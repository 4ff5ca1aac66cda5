"""Executables kept for reuse: CompileCache by graph and options, BucketedCompileCache by the length of the inputs.

A bucket is a size that a graph is compiled for. A shorter run uses the smallest bucket that holds it: inputs are padded, the
active extent is set so that padding never affects the result (rlx/compiler/padding.py), and outputs are trimmed to the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from rlx.compiler.options import CompileOptions
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.errors import BindingError, InputShapeError, OptionError, UnknownNameError, items, known, unmasked, whole
from rlx.forks import Lock
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim
from rlx.ir.shown import Shown, counted, sized, some
from rlx.ir.text import digest_lines
from rlx.runtime.binding import filled_rows, fits
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session, session_of, stores_of, with_more
from rlx.runtime.weights import Params

MAX_BYTES = 1 << 30
REMEMBERED = 256  # reasons in the log, and keys of evicted executables


class Key(NamedTuple):
    """An executable is reused if all of this is equal."""

    fingerprint: str
    options: CompileOptions
    device: str
    threads: int | None
    params: int | None  # id() of the store that the caller passed
    handles: int | None
    transport: int | None


class CompileCache(Shown):
    """Executables by graph, options, device and stores. If all together take more than `max_bytes`, the least recently used are
    evicted first. `hits`, `misses`: counts so far. `why`: the reason of the last miss. `log`: (graph, reason) of the last 256
    misses."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.hits, self.misses, self.why = whole("max_bytes", max_bytes, 0), 0, 0, ""
        self.log: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
        self._kept: OrderedDict[Key, tuple[CompiledGraph, Graph]] = OrderedDict()
        self._evicted: deque[Key] = deque(maxlen=REMEMBERED)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def _line(self) -> str:
        return f"of {counted(len(self), 'executable')}, {sized(self.nbytes)}; {self.hits} hits, {self.misses} misses"

    def compile(
        self,
        session: Session,
        graph: Graph,
        options: CompileOptions | None = None,
        params: ParamStore | Params | None = None,
        handles: HandleStore | None = None,
        **more: Any,
    ) -> CompiledGraph:
        """As session.compile, but a cached executable is returned if there is one: the same object, with its state.

        Raises as session.compile does; nothing is cached then."""
        if not isinstance(session, Session) or not isinstance(graph, Graph):
            raise OptionError(f"compile takes a Session and a Graph, got {type(session).__name__} and {type(graph).__name__}")
        stores = stores_of(params, handles)
        return self._get(_key(session, graph, with_more(options, more), *stores), session, graph, *stores)

    def _get(
        self, key: Key, session: Session, graph: Graph, params: ParamStore | None, handles: HandleStore | None
    ) -> CompiledGraph:
        with self._lock:
            if found := self._kept.get(key):
                self.hits += 1
                self._kept.move_to_end(key)
                return found[0]
            reason = self._reason(key, graph)
            compiled = session.compile(graph, key.options, params, handles)
            self.misses, self.why = self.misses + 1, reason
            self.log.append((graph.name, reason))
            self._kept[key] = compiled, graph
            self._trim()
            return compiled

    @property
    def nbytes(self) -> int:
        """Bytes of all cached executables. A store that several of them share counts once."""
        own, stores = 0, {}
        for compiled, _ in self._kept.values():
            parts = compiled._executable.memory()
            own += sum(parts.get(name, 0) for name in ("arena", "scratch", "constants", "code"))
            stores[id(compiled.params.store)] = compiled.params.store.nbytes()
            stores[id(compiled.handles)] = compiled.handles.nbytes
        return own + sum(stores.values())

    def _trim(self) -> None:
        while self._kept and self.nbytes > self.max_bytes:
            key, _ = self._kept.popitem(last=False)
            self._evicted.append(key)

    def _reason(self, key: Key, graph: Graph) -> str:
        """The reason of a miss: how the most similar cached executable differs."""
        if key in self._evicted:
            return f"evicted: all together took more than {self.max_bytes} bytes"
        kept = list(reversed(self._kept.items()))
        same = [found for found, _ in kept if found.fingerprint == key.fingerprint]
        if same:
            return ", ".join(min((_differences(found, key) for found in same), key=len))
        for _, (_, other) in kept:
            if other.name == graph.name:
                lines = zip_longest(digest_lines(other), digest_lines(graph), fillvalue="(nothing)")
                old, new = next((a, b) for a, b in lines if a != b)
                return f"graph differs from the cached {other.name!r}: {old.strip()} -> {new.strip()}"
        return "first seen"


def _key(session: Session, graph: Graph, options: CompileOptions, params: ParamStore | None, handles: HandleStore | None) -> Key:
    stores = [None if s is None else id(s) for s in (params, handles, session.transport)]
    return Key(graph.fingerprint(), options, str(session.device), session.threads, *stores)


def _differences(old: Key, new: Key) -> list[str]:
    changes = [
        f"option {name}: {a!r} -> {b!r}" for name, a in vars(old.options).items() if a != (b := getattr(new.options, name))
    ]
    changes += [f"{name}: {a} -> {b}" for name, a, b in zip(("device", "threads"), old[2:4], new[2:4]) if a != b]
    stores = zip(("store of params", "store of handles", "transport"), old[4:], new[4:])
    return changes + [f"another {label}" for label, a, b in stores if a != b]


def power_of_two_ladder(least: int, most: int) -> tuple[int, ...]:
    """least, 2 * least, 4 * least and so on, and finally `most`. No input is padded to more than twice its length, or to `least`
    if it is shorter than that."""
    if (least := whole("least", least, 1)) > (most := whole("most", most)):
        raise OptionError(f"a ladder goes from at least 1 upwards, got {least} to {most}")
    return (*(least << i for i in range(((most - 1) // least).bit_length())), most)


class Buckets(Shown, ABC):
    """One graph in several sizes of a named dim. `ladder`: the sizes, ascending. All of them share the weights and states."""

    name: str
    dim: str
    ladder: tuple[int, ...]
    _places: Mapping[str, Sequence[int]]  # input -> its axes that have the dim
    _lock: Lock

    @abstractmethod
    def bucket(self, rows: int) -> CompiledGraph:
        """The executable of the smallest bucket of at least `rows`. InputShapeError: there is none."""

    def _size(self, rows: int) -> int:
        size = next((n for n in self.ladder if n >= whole("rows", rows)), None)
        if size is None or rows < 1:
            raise InputShapeError(f"{self.name}: dim {self.dim!r} is from 1 to {self.ladder[-1]}, got {rows}")
        return size

    def run_padded(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run once on named arrays of any length up to the largest bucket. Returns a fresh array per output, as long as its data.

        InputShapeError: inputs disagree on the length, or no bucket holds it. Otherwise raises as `run` does. Nothing has changed
        then."""
        if not isinstance(inputs, Mapping):
            raise BindingError(f"inputs are given by name, {{name: array}}; got {type(inputs).__name__}")
        arrays = {name: np.asarray(unmasked(f"input {name!r}", a)) for name, a in inputs.items()}
        rows = self._rows(arrays)
        with self._lock:
            compiled = self.bucket(rows)
            size = compiled.options.extent[1]  # type: ignore[index]
            padded = {name: _padded(a, self._places.get(name, ()), size) for name, a in arrays.items()}
            compiled.set_active_extent((rows, size))
            outputs = compiled.run(padded)
            return [filled_rows(a, o.active, rows) for a, o in zip(outputs, compiled.program().outputs)]

    def _rows(self, arrays: Mapping[str, np.ndarray]) -> int:
        found: dict[int, str] = {}
        for name, axes in self._places.items():
            for axis in axes if name in arrays else ():
                if axis >= arrays[name].ndim:
                    raise InputShapeError(f"input {name!r} has dim {self.dim!r} as its dim {axis}; got {arrays[name].ndim} dims")
                found.setdefault(arrays[name].shape[axis], name)
        if len(found) > 1:
            lengths = ", ".join(f"{rows} in {name!r}" for rows, name in found.items())
            raise InputShapeError(f"{self.name}: inputs disagree on dim {self.dim!r}: {lengths}")
        if not found:
            raise InputShapeError(f"{self.name}: no input with dim {self.dim!r} was given; there are {known(self._places)}")
        return next(iter(found))


class BucketedCompileCache(Buckets):
    """One graph with a named dim, compiled once for each bucket that is used. All buckets share the weights and states."""

    def __init__(
        self,
        graph: Graph,
        dim: str = "seq",
        ladder: Sequence[int] = power_of_two_ladder(16, 512),
        *,
        session: Session | None = None,
        options: CompileOptions | None = None,
        params: ParamStore | Params | None = None,
        handles: HandleStore | None = None,
        max_bytes: int = MAX_BYTES,
        **more: Any,
    ) -> None:
        """`ladder`: the bucket sizes, ascending. `params`, `handles`: stores to share. `max_bytes`: limit for all executables
        together. `more`: fields of CompileOptions."""
        if not isinstance(graph, Graph):
            raise OptionError(f"buckets are of a Graph, got {type(graph).__name__}")
        named = Dim(dim)
        self._places = {str(v.name): [a for a, d in enumerate(v.dims) if d == named] for v in graph.inputs}
        if not any(self._places.values()):
            raise OptionError(f"no input of graph {graph.name!r} has a dim {dim!r} of its own")
        rungs = tuple(whole("a size of the ladder", n, 1) for n in items("a ladder is sizes", ladder, OptionError))
        if not rungs or sorted(set(rungs)) != list(rungs):
            raise OptionError(f"a ladder is sizes of at least 1, ascending; got {ladder!r}")
        self.graph, self.name, self.dim, self.ladder = graph, graph.name, dim, rungs
        self.cache = CompileCache(max_bytes)
        store, handles = stores_of(params, handles)
        self.params, self.handles = store or ParamStore(), handles or HandleStore()
        self._session, self._options = session_of(session), with_more(options, more)
        self._given: dict[str, np.ndarray] = dict(graph.weights)
        self._keys: dict[int, Key] = {}  # by bucket: saves a fingerprint of the graph at every run
        self._current: dict[int, tuple[CompiledGraph, int]] = {}  # by bucket: the generation of the weights that are set in it
        self._lock = Lock()

    def _line(self) -> str:
        return f"of graph {self.graph.name!r}, dim {self.dim!r} of {some(self.ladder, 12)}; {len(self.cache)} compiled"

    def set_param(self, name: str, array: np.ndarray) -> None:
        """Set a weight in every bucket. The array is kept for buckets compiled later: by reference if it is read-only, else as a
        copy.

        Raises UnknownNameError, InputShapeError or InputDTypeError; none of them changes anything."""
        shapes = {v.name: v.shape.bind(self._options.binding) for v in self.graph.params}
        if name not in shapes:
            raise UnknownNameError(f"no param is called {name!r}; there are {known(shapes)}")
        own = fits(f"param {name!r}", array, shapes[name])
        with self._lock:
            for compiled, _ in reversed(self.cache._kept.values()):
                compiled.set_param(name, own)  # the other buckets see the new generation in the shared store
                break
            self._given[name] = own.copy() if own.flags.writeable else own

    def bucket(self, rows: int) -> CompiledGraph:
        size = self._size(rows)
        with self._lock:
            stores = self.params, self.handles
            if size not in self._keys:
                self._keys[size] = _key(self._session, self.graph, self._options.bind_extent(self.dim, size), *stores)
            compiled = self.cache._get(self._keys[size], self._session, self.graph, *stores)
            if self._current.get(size) != (compiled, self.params.generation):
                for name in compiled.missing_params():  # in another packing than in earlier buckets, or set since
                    if name in self._given:
                        compiled.set_param(name, self._given[name])
                self._current[size] = compiled, self.params.generation
            return compiled

    def save(self, path: str | PathLike[str], sizes: Sequence[int] | None = None, weights: bool = True) -> int:
        """Write buckets to an artifact, for rlx.load, which gives StoredBuckets. Returns its size in bytes. `sizes`: those to
        save, which are compiled if need be; None: the whole ladder. Otherwise as rlx.save."""
        from rlx.runtime.saving import save  # not needed by most programs

        given = self.ladder if sizes is None else items("sizes are some of the ladder", sizes, OptionError)
        chosen = tuple(sorted({whole("a size", n) for n in given}))
        if not chosen or (extra := set(chosen) - set(self.ladder)):
            raise OptionError(f"sizes are some of the ladder {self.ladder}, got {sizes!r}{f': {known(extra)}' if chosen else ''}")
        graphs = {f"{self.name} {self.dim}={n}": self.bucket(n) for n in chosen}
        facts = {"name": self.name, "dim": self.dim, "ladder": chosen, "places": self._places}
        return save(path, graphs, weights=weights, facts={"buckets": facts})


def _padded(array: np.ndarray, axes: Sequence[int], size: int) -> np.ndarray:
    if not axes:
        return array
    out = np.zeros([size if a in axes else d for a, d in enumerate(array.shape)], array.dtype)
    out[tuple(slice(d) for d in array.shape)] = array
    return out

"""Weights of experts in two tiers: resident experts lie packed in the device's memory; the others are read from where they are
kept, and packed, when a router picks them. Addresses and kernels do not change, so results are the same bits.

One ExpertTiers belongs to a ParamStore, and so to all executables on the same weights. A backend supplies the memory (Part) and
says where its executables stand (Window). An expert that leaves the fast tier is released once no kernel can read it: its word is
cleared first, so that runs that come to the layer later read it again, and runs that are inside the layer are waited for.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet, finalize

import numpy as np

from rlx.driver import files
from rlx.driver.expert_source import ExpertSource
from rlx.errors import BindingError, CorruptFileError, IndexRangeError, InputShapeError, OutOfMemoryError, whole
from rlx.forks import Lock, each_in_child
from rlx.records import record

AT_ONCE, LATER = 1, 2  # when an advisor learns of choices that were all resident
THREADS = 8  # at most, that read experts at once


@record
class TierStats:
    """The work of one tier: `tokens`, choices of a token; `experts`, those used by a run of a layer, each counted once; their
    `bytes` when packed; `seconds`."""

    tokens: int = 0
    experts: int = 0
    bytes: int = 0
    seconds: float = 0.0


@record
class ResidencyStats:
    """`resident.seconds`: in the steps that read experts. `offloaded.seconds`: in front of them, reading and packing. On a GPU
    neither is measured: the bytes at the rates of copies within its memory, and through the bus."""

    resident: TierStats
    offloaded: TierStats


class Part(Protocol):
    """One buffer with weights of all experts of a layer, `nbytes` each, one expert after another; computed from `param`."""

    name: str
    param: str
    nbytes: int

    def fill(self, expert: int, array: np.ndarray) -> None:
        """Pack one expert from its rows of the param. InputShapeError: they have other dims or another dtype."""
        ...

    def held(self, expert: int) -> np.ndarray:
        """The packed bytes of one expert in place, writable."""
        ...

    def release(self, expert: int) -> None:
        """Give the memory of one expert back; it is written before it is read again."""
        ...

    def prepare(self) -> None:
        """Experts will be released from now on."""
        ...


class Window(Protocol):
    """Where an executable stands in a layer. `count` changes when a run comes to the steps that read experts, and when it leaves
    them: it is odd in between."""

    @property
    def count(self) -> int: ...
    def tell(self) -> None:
        """When the run inside leaves, call ExpertTiers.finish."""
        ...

    def logged(self) -> np.ndarray:
        """The choices, i32 [forwards, tokens, k], that were all resident and that the advisor has not been told of."""
        ...

    def reset(self) -> None:
        """No run is inside."""
        ...


@dataclass(eq=False)
class ExpertLayer:
    """`name`: that of its first param. `words`: i32, not 0 for each resident expert. `users`: expert -> runs that have it in
    memory only for themselves. `leaving`: experts that are not resident any more, but that runs inside the layer may read."""

    name: str
    experts: int
    top_k: int
    words: np.ndarray
    parts: dict[str, Part] = field(default_factory=dict)
    windows: WeakSet[Any] = field(default_factory=WeakSet)
    users: Counter[int] = field(default_factory=Counter)
    leaving: dict[int, list[tuple[Window, int]]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of one packed expert."""
        return sum(part.nbytes for part in self.parts.values())

    def in_memory(self, expert: int) -> bool:
        return bool(self.words[expert]) or expert in self.leaving or self.users[expert] > 0

    def release(self, experts: Iterable[int]) -> None:
        for e in experts:
            for part in self.parts.values():
                part.release(e)


class Advisor(Protocol):
    """Decides, at the router of each layer, which of the experts that must be read stay resident. `each`: it is asked at every
    router; else it is asked where an expert must be read, and told of all other choices some time later. `landing`: where no run
    waits for experts (ExpertTiers.in_place), how many of each layer may come while runs read what has left."""

    each: bool
    landing: Sequence[int]

    def routed(self, layer: int, ids: np.ndarray, ahead: np.ndarray | None, resident: np.ndarray | None = None) -> Iterable[int]:
        """`ids`: i32 [tokens, k], valid during the call; `ahead`: a guess of the next layer's, if the graph makes one. It may
        promote and demote experts. An exception fails the run. `resident`: the experts that the run found resident, where it is
        told later (ExpertTiers.in_place)."""
        ...

    def queued(self) -> None:
        """A run has been queued where the advisor is told later. Returns at once."""
        ...

    def hits(self, layer: int, ids: np.ndarray) -> None:
        """Choices, i32 [forwards, tokens, k], that were all resident: those since the last call of `hits` or `routed`."""
        ...


class ExpertTiers:
    """The experts of one ParamStore, by layer in forward order. Its methods may be called beside runs, from any thread.
    `in_place`: kernels read experts that are not resident where they are, so that no run waits for them, and the advisor is told
    of the choices of a run when it has ended."""

    in_place = False

    def __init__(self, versions: Mapping[str, int], publish: Callable[[int, int], None]) -> None:
        """`versions`: of the store's params. `publish(address, value)`: writes a word, and orders it before all later reads."""
        self.layers: list[ExpertLayer] = []
        self.asking = ctypes.c_int32()  # 0: there is no advisor
        self._advisor: Advisor | None = None
        self._versions, self._publish = versions, publish
        self._sources: dict[str, ExpertSource] = {}
        self._kept: dict[tuple[str, int], tuple[files.Mapped, int]] = {}  # (part, expert) -> its packed bytes in a file
        self._spills: dict[str, files.Mapped] = {}  # param -> temporary file of packed experts
        self._joining = Lock()
        _all.add(self)

    # -- residency

    def expert_tiers(self) -> ExpertTiers:
        """As those who have tiers."""
        return self

    def resident(self, layer: int) -> np.ndarray:
        """bool [experts]."""
        return self._layer(layer).words != 0

    def promote(self, layer: int, expert: int) -> None:
        """Make an expert resident; returns when it is. IndexRangeError: there is none. CorruptFileError: it cannot be read."""
        self._promote(self._layer(layer, expert), [expert])

    def demote(self, layer: int, expert: int) -> None:
        """Take an expert out of the fast tier. If a run is reading it, its memory is released when that run leaves the layer.
        IndexRangeError: there is none."""
        at = self._layer(layer, expert)
        with at.lock:
            if not at.words[expert]:
                return
            for part in at.parts.values():
                part.prepare()
                self._keep(part, expert)
            self._mark(at, expert, 0)
            inside = [(w, count) for w in at.windows if (count := w.count) % 2]
            at.leaving[expert] = inside
            for window, _ in inside:
                window.tell()
            self._finish(at)

    def _layer(self, layer: int, expert: int = 0) -> ExpertLayer:
        """Negative numbers are no experts: their memory would be that in front of the weights."""
        if not 0 <= whole("a layer", layer) < len(self.layers):
            raise IndexRangeError(f"layers with experts are numbered from 0 to {len(self.layers) - 1}, got {layer}")
        experts = self.layers[layer].experts
        if not 0 <= whole("an expert", expert) < experts:
            raise IndexRangeError(f"experts of layer {layer} are numbered from 0 to {experts - 1}, got {expert}")
        return self.layers[layer]

    def set(self, masks: Sequence[Any]) -> None:
        """Make exactly these experts resident: a mask for each layer, of a bool for each expert.

        BindingError, InputShapeError: they are no such masks; nothing changes. CorruptFileError: an expert cannot be read; it is
        not resident then."""
        if len(masks) != len(self.layers):
            raise InputShapeError(f"{len(self.layers)} layers have experts, got {len(masks)} masks")
        masks = [mask_of(mask, at.experts, f"layer {i}") for i, (mask, at) in enumerate(zip(masks, self.layers))]
        for layer, mask in enumerate(masks):
            for e in np.flatnonzero(self.resident(layer) & ~mask):
                self.demote(layer, int(e))
        for at, mask in zip(self.layers, masks):
            self._promote(at, [int(e) for e in np.flatnonzero(mask)])

    def offloaded(self, names: Iterable[str]) -> int:
        """Bytes of these buffers that are not in memory."""
        wanted, total = set(names), 0
        for at in self.layers:
            each = sum(part.nbytes for name, part in at.parts.items() if name in wanted)
            total += each * sum(not at.in_memory(e) for e in range(at.experts))
        return total

    @property
    def advisor(self) -> Advisor | None:
        return self._advisor

    @advisor.setter
    def advisor(self, advisor: Advisor | None) -> None:
        for layer in range(len(self.layers)):
            self.tell_hits(layer)
        self._advisor = advisor
        self._advised(advisor)

    def _advised(self, advisor: Advisor | None) -> None:
        """The advisor is another one."""
        self.asking.value = 0 if advisor is None else AT_ONCE if advisor.each else LATER

    def drain(self, wait: bool = False) -> None:
        """Tell the advisor what routers chose, where it is told later. `wait`: in all runs that have begun."""

    def tell_hits(self, layer: int) -> None:
        """Tell the advisor of choices that were all resident."""
        at = self.layers[layer]
        with at.lock:
            found = [window.logged() for window in at.windows]
        for ids in found:
            if len(ids) and self._advisor is not None:
                self._advisor.hits(layer, ids)

    # -- for executables

    def join(self, name: str, experts: int, top_k: int, parts: Iterable[Part], window: Window) -> int:
        """Register an executable's buffers of a layer. Returns the layer's number."""
        with self._joining:
            at = next((n for n, layer in enumerate(self.layers) if layer.name == name), len(self.layers))
            if at == len(self.layers):
                self.layers.append(ExpertLayer(name, experts, top_k, np.ones(experts, np.int32)))
        layer = self.layers[at]
        if layer.experts != experts:
            raise InputShapeError(f"{name!r} has {layer.experts} experts in this store, {experts} in the graph")
        with layer.lock:
            for part in parts:
                if layer.parts.setdefault(part.name, part) is part:
                    place = files.mapping(part.held(0), private=True)
                    if place is not None:  # of an artifact, whose file has the packed bytes
                        file, offset, nbytes = place
                        self._kept |= {(part.name, e): (file, offset + e * nbytes) for e in range(experts)}
            layer.windows.add(window)
        return at

    def use(
        self, layer: int, experts: Iterable[int], keep: Iterable[int], enter: Callable[[], None]
    ) -> tuple[list[int], list[int]]:
        """Bring experts into memory for a run, which calls `done` when it has left the layer. Those in `keep` stay resident.
        `enter()` marks the run as inside. Returns the experts that were read, and those that `done` takes."""
        at, keep = self.layers[layer], set(keep)
        with at.lock:
            missing = [e for e in experts if not at.words[e]]
            read = [e for e in missing if not at.in_memory(e)]
            self._fill(at, read)
            own = [e for e in missing if e not in keep]
            at.users.update(own)
            for e in keep.intersection(missing):
                self._stay(at, e)
            enter()
        return read, own

    def done(self, layer: int, experts: Iterable[int]) -> None:
        at = self.layers[layer]
        with at.lock:
            at.users.subtract(experts)
            at.release([e for e in experts if not at.in_memory(e)])
            self._finish(at)

    def finish(self, layer: int) -> None:
        """Release the experts that left the fast tier and that no run can read any more."""
        with self.layers[layer].lock:
            self._finish(self.layers[layer])

    # -- for weights

    @property
    def params(self) -> set[str]:
        return {part.param for at in self.layers for part in at.parts.values()}

    def parts(self, param: str) -> list[tuple[ExpertLayer, Part]]:
        """The buffers computed from a param."""
        return [(at, part) for at in self.layers for part in at.parts.values() if part.param == param]

    def all_resident(self, param: str) -> bool:
        return all(at.words.all() for at, _ in self.parts(param))

    def refill(self, param: str, source: ExpertSource) -> None:
        """The param has changed: read the experts that are in memory from here, and the others when they are needed."""
        self._forget(param, source)
        for at, part in self.parts(param):
            with at.lock:
                in_threads([partial(self._fill_one, part, e) for e in range(at.experts) if at.in_memory(e)])

    def replaced(self, param: str, source: ExpertSource | None) -> None:
        """The param has changed, and all experts of its buffers are in memory. `source`: where they can be read again."""
        self._forget(param, source)
        for at, part in self.parts(param):
            with at.lock:
                for e in (e for e in range(at.experts) if not at.in_memory(e)):
                    self._keep(part, e)
                    part.release(e)

    @contextmanager
    def everything(self, params: Iterable[str]) -> Iterator[None]:
        """All experts of these params in memory meanwhile."""
        wanted = set(params)
        layers = [n for n, at in enumerate(self.layers) if any(p.param in wanted for p in at.parts.values())]
        added: list[tuple[int, list[int]]] = []
        try:
            for n in layers:
                _, own = self.use(n, range(self.layers[n].experts), (), lambda: None)
                added.append((n, own))
            yield
            for n in layers:  # buffers that were just made are kept in no file yet
                for part in self.layers[n].parts.values():
                    for e in np.flatnonzero(self.layers[n].words == 0):
                        self._keep(part, int(e))
        finally:
            for n, own in added:
                self.done(n, own)

    # -- inside; the layer's lock is held

    def _promote(self, at: ExpertLayer, experts: Sequence[int]) -> None:
        with at.lock:
            wanted = [e for e in experts if not at.words[e]]
            self._fill(at, [e for e in wanted if not at.in_memory(e)])
            for e in wanted:
                self._stay(at, e)

    def _stay(self, at: ExpertLayer, expert: int) -> None:
        at.leaving.pop(expert, None)
        self._mark(at, expert, 1)

    def _mark(self, at: ExpertLayer, expert: int, value: int) -> None:
        self._publish(at.words.ctypes.data + 4 * expert, value)

    def _finish(self, at: ExpertLayer) -> None:
        for e, inside in list(at.leaving.items()):
            if all(window.count != count for window, count in inside):
                del at.leaving[e]
                at.release([] if at.in_memory(e) else [e])

    def _fill(self, at: ExpertLayer, experts: Sequence[int]) -> None:
        """Read experts; none of them is in memory if one fails."""
        try:
            in_threads([partial(self._fill_one, part, e) for e in experts for part in at.parts.values()])
        except BaseException:
            at.release(experts)
            raise

    def _fill_one(self, part: Part, expert: int) -> None:
        if (place := self._kept.get((part.name, expert))) is not None:
            file, offset = place
            try:
                if file.stamp:
                    files.check_same(file)
                files.read(file, offset, part.held(expert))
            except (CorruptFileError, OSError) as error:
                raise CorruptFileError(f"expert {expert} of {part.param!r} cannot be read: {error}") from error
        elif (source := self._sources.get(part.param)) is not None:
            part.fill(expert, source.read(expert))

    def _keep(self, part: Part, expert: int) -> None:
        """Write a packed expert to a temporary file, if it can be read from nowhere."""
        param = part.param
        if (part.name, expert) in self._kept or param in self._sources or not self._versions.get(param):
            return
        try:
            if param not in self._spills:
                self._spills[param] = _temporary()
            file, data = self._spills[param], part.held(expert)
            offset, at = os.lseek(file.number, 0, os.SEEK_END), 0
            while at < data.size:
                at += os.pwrite(file.number, data[at : at + files.READ].data, offset + at)
        except OSError as error:
            raise OutOfMemoryError(
                f"expert {expert} of {param!r} is in no mapped file, and a temporary file takes no copy of it: {error}"
            ) from error
        self._kept[part.name, expert] = file, offset

    def _forget(self, param: str, source: ExpertSource | None) -> None:
        self._sources.pop(param, None)
        if source is not None:
            self._sources[param] = source
        self._spills.pop(param, None)
        names = {part.name for _, part in self.parts(param)}
        self._kept = {key: place for key, place in self._kept.items() if key[0] not in names}

    def _in_child(self) -> None:
        """After a fork: the runs and promotions of the parent's other threads do not continue in this process."""
        self._spills = {}  # the parent writes to its own
        for at in self.layers:
            for window in list(at.windows):
                window.reset()
            at.users.clear()
            at.leaving.clear()
            at.release(int(e) for e in np.flatnonzero(at.words == 0))


@runtime_checkable
class Tiered(Protocol):
    """An Executable of a device that has a slow tier."""

    @property
    def tiers(self) -> ExpertTiers | None:
        """None: the program has no experts."""
        ...

    @property
    def tier_layers(self) -> Sequence[int]:
        """For each router of the program, its layer in `tiers`; -1: the memory of its experts is not apart, or others read it."""
        ...

    def take_tier_stats(self) -> ResidencyStats:
        """The work of the tiers in the runs of this executable since the last call. No run may be under way."""
        ...


def mask_of(mask: object, experts: int, what: str) -> np.ndarray:
    """A mask of residency as a bool array. BindingError: it is not made of bools. InputShapeError: it has another length."""
    found = np.asarray(mask)
    if found.dtype != np.bool_:
        raise BindingError(f"the residency mask of {what} takes bools, one for each expert; got {found.dtype}")
    if found.shape != (experts,):
        raise InputShapeError(f"the residency mask of {what} is bool[{experts}], got bool{list(found.shape)}")
    return found


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    files.in_threads(jobs, max(1, min(THREADS, len(jobs), os.cpu_count() or 1)))


def _temporary() -> files.Mapped:
    """A file without a name, closed with the last reference to it."""
    import tempfile  # here and below: slow to import, and seldom needed
    from pathlib import Path

    with tempfile.TemporaryFile(prefix="rlx") as file:
        made = files.Mapped(Path("a temporary file"), os.dup(file.fileno()), 0, 0, ())
    finalize(made, os.close, made.number).atexit = False
    return made


_all = each_in_child(ExpertTiers._in_child)

__all__ = [
    "Advisor", "ExpertLayer", "ExpertSource", "ExpertTiers", "Part", "ResidencyStats", "TierStats", "Tiered", "Window",
    "in_threads", "mask_of",
]  # fmt: skip

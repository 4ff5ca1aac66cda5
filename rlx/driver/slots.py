"""Experts in two tiers on a device whose kernels read those of the slow tier in place, so that a run never waits for one.

Resident experts of a layer lie in slots, the same in each of its buffers. A table in the device's memory has the slot of each
expert, or FAR: then a kernel reads it from a store that has all experts, in memory of the host. A promotion copies one to a free
slot beside runs, and then changes the table, between two runs; what leaves is overwritten when the runs queued before have ended.
Until a first expert leaves, there is no store and no table, and kernels read the experts in order. The device supplies the
memory (SlotPart, Slots) and a log of what its routers choose, which is read when a run has ended.

An advisor that reads ahead is told while the run goes on: behind each router, the device writes its log and takes over the table
as the host wants it (`Slots.tell`). So an expert that was guessed, and whose copy has ended by then, is resident for the layer
behind the next router. Its slot must be free without waiting for the run: a few (`landing`) stay free for that. Results do not
depend on when a kernel looks: all that the table has said since a run was queued stays true until the run has ended.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from rlx.driver.experts import ExpertLayer, ExpertSource, ExpertTiers, Part, ResidencyStats, TierStats, Window, in_threads
from rlx.records import record

FAR = -1  # the slot of an expert that is in the store alone
MEASURED = 32 << 20, 128 << 20  # bytes of the copies by which the bus, and the device's memory, are measured
SPARE = 8  # slots without an expert stay for the next promotions, up to this part of a layer's experts
IS_FAR, NONE = 1 << 30, 2**31 - 1  # in a log: the bit of an expert that was not resident; no expert


class SlotPart(Part, Protocol):
    """A buffer of a layer's experts. `store`: of the host, with all experts; None: all are resident, in order."""

    store: np.ndarray | None

    def prepare(self) -> None:
        """Nothing: see Slots.begin."""

    def release(self, expert: int) -> None:
        """Nothing: see Slots.drop."""

    def begin(self) -> None:
        """Make the store."""
        ...

    def bring(self, expert: int, slot: int) -> None:
        """Begin the copy of an expert from the store to a slot that no run reads any more. OutOfMemoryError: there is no room."""
        ...

    def move(self, slot: int, to: int) -> None:
        """Copy an expert to another slot, in order with runs."""
        ...

    def cut(self, slots: int) -> None:
        """Give back the memory behind so many slots, which nothing that is queued reads."""
        ...


class Slots(ABC):
    """Where the experts of a layer are. `of`: the slot of each, FAR if it has none. `count`: slots. `begun`: there is a table.
    `landing`: slots that there may be beside those of resident experts, for experts that come while runs read what has left."""

    def __init__(self, experts: int) -> None:
        self.of, self.count, self.begun, self.landing = np.arange(experts, dtype=np.int32), experts, False, 0
        self.parts: list[Any] = []  # SlotPart

    @abstractmethod
    def make_table(self) -> None:
        """A table of `of` in the device's memory."""

    @abstractmethod
    def tell(self, expert: int) -> None:
        """Write the slot of an expert to the table, between two runs, or in front of a layer (see above)."""

    @abstractmethod
    def left(self, slot: int) -> None:
        """An expert has left a slot: copies to it that begin later wait for the runs queued so far."""

    @abstractmethod
    def ready(self, slot: int) -> bool:
        """Whether no run reads what has left a slot."""

    def begin(self) -> None:
        for part in self.parts:
            part.begin()
        self.make_table()
        self.begun = True

    def join(self, part: SlotPart) -> None:
        self.parts.append(part)
        if self.begun:
            part.begin()

    @property
    def free(self) -> int:
        """Slots without an expert."""
        return self.count - int(np.count_nonzero(self.of != FAR))

    def bring(self, experts: Iterable[int]) -> None:
        """Begin the copies of experts to free slots. OutOfMemoryError: there is no room; `drop` takes all of them back."""
        for expert in experts:
            slot = self._next()
            self.of[expert], self.count = slot, max(self.count, slot + 1)
            for part in self.parts:
                part.bring(expert, slot)

    def _next(self) -> int:
        """A slot for an expert that comes: if possible one that is ready."""
        holes = np.setdiff1d(np.arange(self.count), self.of).tolist()
        ready = next(filter(self.ready, holes), None)
        if ready is None and len(holes) <= self.landing and self.count < len(self.of):
            return self.count
        return holes[0] if ready is None else ready

    def waits(self) -> bool:
        """Whether the next expert that comes waits for runs that are queued."""
        return not self.ready(self._next())

    def open(self) -> int:
        """How many may come at once, each in place of another one."""
        holes = np.setdiff1d(np.arange(self.count), self.of).tolist()
        more = min(len(self.of) - self.count, self.landing - len(holes))
        return sum(map(self.ready, holes)) + max(0, more)

    def drop(self, expert: int) -> None:
        """The expert is not resident for runs that are queued from now on."""
        self._place(expert, FAR)

    def trim(self, wait: Callable[[], None]) -> None:
        """Give back the memory of slots without an expert. `wait()`: for all runs that are queued."""
        if not self.begun:
            return
        resident = np.flatnonzero(self.of != FAR)
        holes = np.setdiff1d(np.arange(len(resident)), self.of)
        moves = list(zip(resident[self.of[resident] >= len(resident)].tolist(), holes.tolist(), strict=True))
        for expert, hole in moves:
            for part in self.parts:
                part.move(int(self.of[expert]), hole)
        wait()  # a run that goes on may take over the table at once
        for expert, hole in moves:
            self._place(expert, hole)
        self.count = len(resident)
        wait()
        for part in self.parts:
            part.cut(self.count)

    def _place(self, expert: int, slot: int) -> None:
        """Runs that are queued from now on read the expert there; if it fails, or is interrupted, where they did before."""
        before = int(self.of[expert])
        try:
            self.of[expert] = slot
            self.tell(expert)
            if before != FAR:
                self.left(before)
        except BaseException:
            self.of[expert] = before
            self.tell(expert)
            raise


class Router:
    """rlx.driver.experts.Window of an executable: no run waits in its layer. `stale()`: a table has been made, of which what was
    recorded of runs does not know."""

    count = 0

    def __init__(self, stale: Callable[[], None]) -> None:
        self.stale = stale

    def tell(self) -> None:
        """Nothing: see `count`."""

    reset = tell

    def logged(self) -> np.ndarray:
        return np.empty((0, 0, 0), np.int32)


class SlotTiers(ExpertTiers, ABC):
    """`epoch` changes when a table is made, `lock` is held meanwhile. `logs`: of executables; `drain()` reads one (Tally)."""

    in_place = True

    def __init__(self, versions: Mapping[str, int]) -> None:
        super().__init__(versions, _publish)
        self.slots: dict[str, Slots] = {}
        self.lock, self.epoch, self.logs = threading.RLock(), 0, WeakSet[Any]()
        self._draining, self._setting, self._rates = threading.Lock(), False, dict[bool, float]()
        self._told_early = False  # `eager` as the last graphs know it

    @abstractmethod
    def make_slots(self, experts: int) -> Slots: ...

    @abstractmethod
    def wait(self, for_copies: bool) -> None:
        """For the copies to slots that have begun; else for all runs that are queued."""

    @abstractmethod
    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until the host has been told so, or nothing is queued."""

    @abstractmethod
    def copying(self, nbytes: int, near: bool) -> Callable[[], object]:
        """A copy of so many bytes from the host to the device, or within its memory, and the wait for it."""

    def rate(self, near: bool) -> float:
        """Bytes per second of copies from the host, or that copies within the device's memory read and write: measured once, the
        best of three."""
        if near not in self._rates:
            copy, times = self.copying(MEASURED[near], near), list[float]()
            for _ in range(3):
                self.wait(for_copies=False)
                begun = time.perf_counter()
                copy()
                times.append(time.perf_counter() - begun)
            self._rates[near] = (1 + near) * MEASURED[near] / min(times)
        return self._rates[near]

    def slots_of(self, name: str, experts: int) -> Slots:
        if name not in self.slots:
            self.slots[name] = self.make_slots(experts)
        return self.slots[name]

    def join(self, name: str, experts: int, top_k: int, parts: Iterable[Part], window: Window) -> int:
        given = list(parts)
        at = super().join(name, experts, top_k, (), window)
        layer, slots = self.layers[at], self.slots_of(name, experts)
        with layer.lock:
            for part in given:
                if part.name not in layer.parts:  # executables share a part, and its store is made once
                    layer.parts[part.name] = part
                    slots.join(part)  # type: ignore[arg-type]
        return at

    def set(self, masks: Sequence[Any]) -> None:
        self._setting = True
        try:
            super().set(masks)
        finally:
            self._setting = False
            for layer in self.layers:
                self._trim(layer)

    def demote(self, layer: int, expert: int) -> None:
        at = self._layer(layer, expert)
        slots = self.slots[at.name]
        with at.lock:
            if not slots.begun:
                with self.lock:
                    slots.begin()
                    self.epoch += 1
                for window in list(at.windows):
                    window.stale()
        super().demote(layer, expert)
        if slots.free > max(1, at.experts // SPARE) and not (self._setting or self.eager):  # who follows a run waits for none
            self._trim(at)

    def _trim(self, at: ExpertLayer) -> None:
        with at.lock:
            self._take_back(at)
            self.slots[at.name].trim(partial(self.wait, for_copies=False))

    @contextmanager
    def everything(self, params: Iterable[str]) -> Iterator[None]:
        """The store has all experts. None of these comes, leaves or moves: a thread of a pool would meet one that is written."""
        wanted = set(params)
        with ExitStack() as stack:
            for at in (at for at in self.layers if any(part.param in wanted for part in at.parts.values())):
                stack.enter_context(at.lock)
            yield

    def refill(self, param: str, source: ExpertSource) -> None:
        for at, part in self.parts(param):
            with at.lock:
                in_threads([partial(_refill, part, source, e) for e in range(at.experts)])

    def replaced(self, param: str, source: ExpertSource | None) -> None:
        """The store has been written."""

    def _keep(self, part: Part, expert: int) -> None:
        """The store keeps it."""

    def _fill(self, at: ExpertLayer, experts: Sequence[int]) -> None:
        if self.slots[at.name].begun and experts:
            self._take_back(at)
            try:
                self.slots[at.name].bring(experts)
                self.wait(for_copies=True)
            except BaseException:
                self._take_back(at)
                raise

    def _take_back(self, at: ExpertLayer) -> None:
        """The slots of experts that are not resident, because a promotion failed or was interrupted."""
        slots = self.slots[at.name]
        if len(found := np.flatnonzero((slots.of != FAR) & (at.words == 0))):
            self.wait(for_copies=True)
            for expert in found.tolist():
                slots.drop(expert)

    def _mark(self, at: ExpertLayer, expert: int, value: int) -> None:
        if value:
            self.slots[at.name].tell(expert)
        super()._mark(at, expert, value)
        if not value:
            self.slots[at.name].drop(expert)

    def _in_child(self) -> None:
        """Nothing: such devices do not work in a forked process."""

    # -- what routers choose

    @property
    def eager(self) -> bool:
        """Whether routers that guess tell what they choose while their run goes on."""
        return self.advisor is not None and self.advisor.each

    def _advised(self, advisor: Any) -> None:
        super()._advised(advisor)
        landing = advisor.landing if advisor is not None else [0] * len(self.layers)
        with self.lock:
            for at, count in zip(self.layers, landing):
                self.slots[at.name].landing = count
            same, self._told_early = self._told_early == self.eager, self.eager
            if same or not self.epoch:
                return
            self.epoch += 1
        for window in [window for at in self.layers for window in list(at.windows)]:
            window.stale()

    def slots_at(self, layer: int) -> Slots:
        return self.slots[self.layers[layer].name]

    def news(self) -> bool:
        """Whether a router has told what it chose, and the advisor does not know of it."""
        return any(log.news() for log in list(self.logs))

    def going(self) -> bool:
        """Whether a run is under way whose routers tell what they choose."""
        return any(log.inside and log.begun > log.runs for log in list(self.logs))

    def follow(self) -> None:
        """Wait until a router tells what it chose, or nothing is queued, and tell the advisor."""
        self.until(self.news)
        if not self.news():
            for log in list(self.logs):
                log.begun = log.runs
        self.drain()

    def tell_hits(self, layer: int) -> None:
        if layer == 0:
            self.drain()

    def drain(self, wait: bool = False) -> None:
        if wait:
            self.wait(for_copies=False)
        with self._draining:
            for log in list(self.logs):
                log.drain()

    def queued(self) -> None:
        """A run that logs has been queued."""
        if self.advisor is not None:
            self.advisor.queued()

    def ran(self, layer: int, ids: np.ndarray, ahead: np.ndarray | None, resident: np.ndarray | None) -> None:
        """Tell the advisor what a router chose, and guessed if that is of use. `resident`: the experts chosen that were
        resident; None: all."""
        advisor = self.advisor
        if advisor is not None and resident is None and not advisor.each:
            advisor.hits(layer, ids[None])
        elif advisor is not None:
            advisor.routed(layer, ids, ahead, resident)
        time.sleep(0)  # lets a thread that waits to queue a run do so


@record
class Choices:
    """The choices, i32, that a router of an executable leaves for `tokens` rows, and its guesses behind them."""

    layer: int
    tokens: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


class Tally:
    """Counts of an executable's choices."""

    def __init__(self, tiers: SlotTiers) -> None:
        self._tiers = tiers
        self._counts = np.zeros((2, 3), np.int64)  # of the fast and the slow tier: tokens, experts, bytes

    def add(self, record: np.ndarray, routers: Iterable[Choices], late: bool = True) -> None:
        """One run: i32, the numbers of some routers. `late`: the next router has chosen, so that guesses are of no use."""
        at = 0
        for r in routers:
            ids, at = record[at : at + r.size].reshape(r.shape), at + r.size
            self._add(r.layer, ids[: r.tokens], ids[r.tokens :] if len(ids) > r.tokens and not late else None)

    def _add(self, layer: int, ids: np.ndarray, ahead: np.ndarray | None) -> None:
        at = self._tiers.layers[layer]
        far = (ids >= IS_FAR) & (ids != NONE)
        ids = np.where(far, ids - IS_FAR, ids)
        there = (ids < at.experts) & ~far
        if not (there | far).any():  # behind a failure
            return
        near, missing = np.unique(ids[there]), len(np.unique(ids[far]))
        counted = int(there.sum()), len(near), len(near) * at.nbytes
        self._counts += counted, (int(far.sum()), missing, missing * at.nbytes)
        self._tiers.ran(layer, ids, ahead, near if missing or self._tiers.eager else None)

    def take(self) -> ResidencyStats:
        """Since the last call. OutOfMemoryError: the device has no room to measure a rate; nothing is lost."""
        counted = self._counts.copy()
        fast, slow = (TierStats(*row) for row in counted.tolist())
        timed = [replace(x, seconds=x.bytes / self._tiers.rate(x is fast)) if x.bytes else x for x in (fast, slow)]
        self._counts -= counted
        return ResidencyStats(*timed)


def _refill(part: Part, source: ExpertSource, expert: int) -> None:
    part.fill(expert, source.read(expert))


def _publish(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


__all__ = ["FAR", "Choices", "Router", "SlotPart", "SlotTiers", "Slots", "Tally"]

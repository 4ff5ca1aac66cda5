"""Slots of experts (rlx.driver.slots) without a device that reads the slow tier in place; and sections of kernels."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from rlx.driver import slots as slots_module
from rlx.driver.slots import IS_FAR, Choices, Router, SlotPart, Slots, SlotTiers, Tally
from rlx.errors import DeviceError, OutOfMemoryError
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.sections import section
from rlx.runtime.pool import ExpertPool


class SlotMemory(SlotPart):
    """Experts of one number each. `room`: slots that there may be."""

    def __init__(self, experts: int, room: int) -> None:
        self.name = self.param = "w"
        self.nbytes, self.store, self.slots, self.room = 8, None, list(range(experts)), room

    def fill(self, expert: int, array: np.ndarray) -> None:
        raise AssertionError("the store has it")

    def held(self, expert: int) -> np.ndarray:
        assert self.store is not None
        return self.store[expert : expert + 1]

    def begin(self) -> None:
        self.store = np.array(self.slots)

    def bring(self, expert: int, slot: int) -> None:
        if slot >= self.room:
            raise OutOfMemoryError("no room")
        self.slots += [-1] * (slot + 1 - len(self.slots))
        self.slots[slot] = int(self.held(expert)[0])

    def move(self, slot: int, to: int) -> None:
        self.slots[to] = self.slots[slot]

    def cut(self, slots: int) -> None:
        del self.slots[slots:]


class TableOfSlots(Slots):
    def make_table(self) -> None:
        self.table = self.of.tolist()

    def tell(self, expert: int) -> None:
        self.table[expert] = int(self.of[expert])

    def left(self, slot: int) -> None:
        """Nothing runs."""

    def ready(self, slot: int) -> bool:
        return True


class HostSlots(SlotTiers):
    def make_slots(self, experts: int) -> TableOfSlots:
        return TableOfSlots(experts)

    def wait(self, for_copies: bool) -> None:
        """Nothing runs."""

    def until(self, reached: Any) -> None:
        """Nothing runs."""

    def copying(self, nbytes: int, near: bool) -> Any:
        return lambda: None


def test_slots_hold_each_resident_expert_whatever_moves() -> None:
    rng, count, room = np.random.default_rng(0), 12, 8
    tiers, part, stale = HostSlots({}), SlotMemory(count, room), list[int]()
    window = Router(lambda: stale.append(1))
    assert tiers.join("w", count, 2, [part], window) == 0
    slots: Any = tiers.slots["w"]

    def check() -> None:
        resident = tiers.resident(0)
        assert [e for e in range(count) if slots.table[e] >= 0] == np.flatnonzero(resident).tolist()
        assert all(part.slots[slots.table[e]] == e for e in np.flatnonzero(resident))
        assert len({slots.table[e] for e in np.flatnonzero(resident)}) == resident.sum() <= len(part.slots)

    tiers.set([np.arange(count) < 3])
    assert len(part.slots) == 3 and stale == [1] and tiers.epoch == 1
    for _ in range(400):
        expert, resident = int(rng.integers(count)), tiers.resident(0)
        if rng.random() < 0.05:
            tiers.set([(mask := rng.permutation(count) < rng.integers(room + 1))])
            assert len(part.slots) == mask.sum()
        elif rng.random() < 0.5:
            tiers.demote(0, expert)
        elif resident.sum() < room or resident[expert]:
            tiers.promote(0, expert)
        else:
            with pytest.raises(OutOfMemoryError):
                tiers.promote(0, expert)
        check()
    tiers.set([np.arange(count) < room])
    with pytest.raises(OutOfMemoryError):  # after the last one there is room for
        tiers.set([np.ones(count, bool)])
    check()
    assert tiers.resident(0).sum() == room and stale == [1]


def test_statistics_are_there_later_if_a_rate_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, part = HostSlots({}), SlotMemory(4, 4)
    tiers.join("w", 4, 2, [part], Router(lambda: None))
    tally = Tally(tiers)
    tally.add(np.array([0, 1, 0, 2, IS_FAR + 3, 1], np.int32), [Choices(0, 3, (3, 2))])

    def full(nbytes: int, near: bool) -> Any:
        raise OutOfMemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(OutOfMemoryError):
        patch.setattr(tiers, "copying", full)
        tally.take()
    found = tally.take()
    assert (found.resident.tokens, found.resident.experts) == (5, 3)
    assert (found.offloaded.tokens, found.offloaded.experts) == (1, 1) and found.offloaded.seconds > 0
    assert tally.take().resident.tokens == tally.take().offloaded.tokens == 0


def test_interrupts_lose_no_slot() -> None:
    """At each line that is run when experts come, leave and move."""
    before, mask, after = (np.array([c == "1" for c in text]) for text in ("001111011", "111000111", "101100011"))

    def interrupt(frame: Any, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != slots_module.__file__ or frame.f_code.co_name == "set":
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    for line in itertools.count(1):
        tiers, part, left = HostSlots({}), SlotMemory(9, 9), line
        tiers.join("w", 9, 2, [part], Router(lambda: None))
        tiers.set([before])
        table, trace = tiers.slots["w"].table, sys.gettrace()  # type: ignore[attr-defined]
        sys.settrace(interrupt)
        try:
            tiers.set([mask])
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(trace)
        placed = [e for e in range(9) if table[e] >= 0]
        assert [part.slots[table[e]] for e in placed] == placed, "a run would read another expert"
        assert set(np.flatnonzero(tiers.resident(0))) <= set(placed)
        for wanted in (after, mask):
            tiers.set([wanted])
            assert [part.slots[slot] if slot >= 0 else -1 for slot in table] == [e if w else -1 for e, w in enumerate(wanted)]
            assert len(part.slots) == sum(wanted)
    assert line > 50


def test_an_error_of_the_device_while_work_is_looked_for_is_raised() -> None:
    """The thread died of it, and whoever waited for its work waited for ever."""
    tiers, window = HostSlots({}), Router(lambda: None)
    for name in "ab":
        tiers.join(name, 12, 2, [SlotMemory(12, 12)], window)
    with pytest.raises(DeviceError, match="gone"), ExpertPool(tiers, 12, "predict") as pool:
        tiers.going = _gone  # type: ignore[method-assign]
        pool.queued()
        while pool._thread is not None and pool._thread.is_alive() and pool._error is None:
            time.sleep(0.001)


def _gone() -> bool:
    raise DeviceError("gone")


def test_a_pool_closes_while_its_thread_reads_a_log() -> None:
    """A router of which it learns later changes nothing."""
    tiers, part, window = HostSlots({}), SlotMemory(12, 8), Router(lambda: None)
    tiers.join("w", 12, 2, [part], window)
    pool = ExpertPool(tiers, 6, "lru")
    inside, closing = threading.Event(), threading.Event()

    class Log:
        def drain(self) -> None:
            if not inside.is_set():
                inside.set()
                closing.wait(30)
                time.sleep(0.05)  # until the other thread waits for this one
                tiers.ran(0, np.array([[10, 11]], np.int32), None, np.array([], np.int32))

    def close() -> None:
        closing.set()
        pool.close()

    log = Log()
    tiers.logs.add(log)
    tiers.queued()
    assert inside.wait(30)
    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and tiers.advisor is None
    assert not pool.routed(0, np.array([[8, 9]], np.int32)) and not pool._promote and not pool._demote


@pytest.mark.parametrize(
    "load,store",
    [
        ("b1[add(mul(i0, 2), i1)]", "t0"),  # b1 does not move by whole sections
        ("b1[add(mul(i0, 4), mul(i1, 2))]", "t0"),  # reads another section
        ("b1[add(mul(i0, 4), i1)]", "t0 if lt(i0, 3):bool"),  # the section decides
        ("b1[add(mul(i0, 4), i1)] if lt(i0, 3):bool", "t0"),
        ("b1[add(mul(i0, 4), i1)]", "mul(t0, cast(i0):f32):f32"),
        ("b1[mul(rem(i0, 2), 4)]", "t0"),
    ],
)
def test_kernels_whose_sections_differ_have_none(load: str, store: str) -> None:
    def kernel(load: str, store: str) -> str:
        body = f"for i1 < 4:\n    t0 = {load}\n    b0[add(mul(i0, 4), i1)] = {store}"
        return f"kernel k of k\n(inout b0: f32[32], b1: f32[32]) grid (i0 < 8) {{\n  {body}\n}}\n"

    fine = parse_kernel(kernel("b1[add(mul(i0, 4), sub(3, i1))]", "t0"))
    found = section(fine, 4)
    assert found is not None and found.grid[0][1] == 2 and section(fine, 3) is None
    assert section(parse_kernel(kernel(load, store)), 4) is None

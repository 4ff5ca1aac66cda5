"""Timed runs: a CUDA graph of the launches of a run with GPU events between them.

Launches then wait for each other completely, where those of a normal run overlap. So a timed run takes 2.5 to 4 microseconds
per launch longer on an H200, which the times of the steps include.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.backends.cuda.gpu import check
from rlx.backends.cuda.runs import CudaRun, Owner, Replay
from rlx.driver.backend import Timeline
from rlx.errors import IndexRangeError

WITH_TIME, EXTERNAL = 0, 1  # flags: of an event; of its record, which becomes a node of the graph that is recorded
DOING = "measuring a run"


class TimedReplay(Replay):
    """The launches of a run, with an event in front of each and behind the last."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner, owner.run_launches())
        self._events = [check(owner.gpu.driver.cuEventCreate(WITH_TIME), DOING) for _ in range(len(self.launches) + 1)]
        weakref.finalize(self, owner.gpu.destroy, self._events).atexit = False

    def _launch(self) -> None:
        own = self.owner
        for event, (code, steps) in zip(self._events, self.launches):
            self._record(event)
            own.launch(code, steps, given=self._given, early=False, written=())
        self._record(self._events[-1])
        if self._watched:
            own.support("rlx_end", 1, own.end_arguments(), threads=1)

    def _record(self, event: Any) -> None:
        check(self.owner.gpu.driver.cuEventRecordWithFlags(event, self.owner.gpu.use(), EXTERNAL), DOING)

    def timeline(self) -> Timeline:
        """The times of the last run, which has ended. Steps of one launch share its time, as if on separate threads."""
        driver = self.owner.gpu.driver
        elapsed = getattr(driver, "cuEventElapsedTime_v2", None) or driver.cuEventElapsedTime  # in milliseconds
        times = [round(1e6 * check(elapsed(self._events[0], event), DOING)) for event in self._events]
        rows, commits = [], len(self.owner.program.steps)
        for begin, end, (_, steps) in zip(times, times[1:], self.launches):
            for place, (number, _) in enumerate(steps):
                rows.append((commits if number is None else number, place, begin, end))
                commits += number is None
        return Timeline(0, times[-1], np.array(rows, np.int64).reshape(-1, 4))


def timed(owner: Any) -> tuple[Callable[[], Timeline], Callable[[], None]]:
    """Timed protocol (rlx.driver.backend), of a CudaExecutable."""
    replay = TimedReplay(owner)

    def measured() -> Timeline:
        owner._flush()
        try:
            replay.run()
        except IndexRangeError:
            owner.undo(owner.done)
            raise
        owner.gpu.wait()
        return replay.timeline()

    def plain() -> None:
        pending: CudaRun | None = owner.run()
        if pending is not None:
            pending.wait()
        owner.gpu.wait()

    return measured, plain


__all__ = ["TimedReplay", "timed"]

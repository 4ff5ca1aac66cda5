"""Work that several threads share: results made once each, and many made at once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from rlx.forks import Lock
from rlx.host.processor import available_threads

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class _Result(Generic[Made]):
    """`made`: the result, or nothing yet; filled by the thread that holds `lock`."""

    def __init__(self) -> None:
        self.lock, self.made = Lock(), list[Made]()


class Once(Generic[Key, Made]):
    """The last `kept` results of a function, and those that are held. Threads that ask for different keys make them at once; of
    those that ask for the same key one makes it, and the others wait."""

    def __init__(self, make: Callable[[Key], Made], kept: int) -> None:
        self._make, self._kept, self.misses = make, kept, 0
        self._results: OrderedDict[Key, _Result[Made]] = OrderedDict()
        self._held: WeakValueDictionary[Key, _Result[Made]] = WeakValueDictionary()
        self._lock = Lock()  # keys compare in Python, so that other threads run amid the methods of the dict

    def __call__(self, key: Key) -> Made:
        return self.held(key).made[0]

    def held(self, key: Key) -> _Result[Made]:
        """The result, which is not made again while this object is kept."""
        with self._lock:
            result = self._results.pop(key, None) or self._held.get(key) or _Result()
            self._results[key] = self._held[key] = result  # the newest
            while len(self._results) > self._kept:
                self._results.popitem(last=False)
        with result.lock:
            if not result.made:
                self.misses += 1
                result.made.append(self._make(key))
        return result

    def cache_clear(self) -> None:
        with self._lock:
            self._results.clear()
            self._held.clear()


def started(work: Callable[[], None]) -> threading.Thread | None:
    """A thread that does this. None: the system gives no more threads, or the interpreter is about to end and allows none."""
    thread = threading.Thread(target=work, name="rlx compile")
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


LONGEST = 0.02  # seconds to wait for a thread that has begun: it may itself wait, for what another makes


class Ahead(Generic[Key]):
    """Calls a function with items given one by one, in up to `threads` threads, which end when nothing is left, or the process is
    about to end. Of those that wait, the one of the largest `weight` is next. Keeps the results as long as it is kept. Faults are
    left to those who ask for the results. `handed`, if given, is set when the function needs no GIL for long: a caller waits
    for it where a thread begins with its item, since that thread would get the GIL back only after 5 ms, each time that it gives
    it away."""

    def __init__(
        self, make: Callable[[Key], object], threads: int, weight: Callable[[Key], Any] = lambda item: 0,
        handed: threading.Event | None = None,
    ) -> None:  # fmt: skip
        self._make, self._threads, self._weight, self._made, self._running = make, threads, weight, list[object](), 0
        self._todo, self._lock, self._handed = deque[Key](), Lock(), handed or threading.Event()
        self._waits = handed is not None

    def __call__(self, item: Key) -> None:
        self._handed.clear()
        with self._lock:
            self._todo.append(item)
            begins = self._running < self._threads and started(self._work) is not None
            self._running += begins
        if begins and self._waits:
            self._handed.wait(LONGEST)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo or not threading.main_thread().is_alive():  # the exit waits for this thread
                    self._running -= 1
                    return
                self._todo.remove(item := max(self._todo, key=self._weight))
            with suppress(Exception):
                self._made.append(self._make(item))
            self._handed.set()


def at_once(make: Callable[[Key], Made], items: Sequence[Key], progress: Callable[[int, int], None] | None = None) -> list[Made]:
    """The result for each item, made by as many threads as this process may use, or by this one if none starts.
    `progress(done, total)` is called in this thread, before the first result and after each. Raises the first fault; items that
    are not begun by then are left out."""
    report = progress or (lambda done, total: None)
    made, todo = dict[int, Made](), iter(range(len(items)))  # `next` is atomic
    ended = SimpleQueue[tuple[int, Made] | BaseException]()

    def leave_out() -> None:
        for _ in todo:
            pass

    def work() -> None:
        while (at := next(todo, None)) is not None:
            try:
                ended.put((at, make(items[at])))
            except BaseException as fault:  # noqa: BLE001  raised below, in the thread that asked
                ended.put(fault)
                leave_out()

    threads, most = list[threading.Thread](), min(available_threads(), len(items))
    try:
        while len(threads) < most and (thread := started(work)):
            threads.append(thread)
        report(0, len(items))
        if not threads:
            work()
        for done in range(1, len(items) + 1):
            if isinstance(found := ended.get(), BaseException):
                raise found
            made[found[0]] = found[1]
            report(done, len(items))
    finally:
        leave_out()
        for thread in threads:
            thread.join()
    return [made[i] for i in range(len(items))]

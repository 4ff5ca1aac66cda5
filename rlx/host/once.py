"""Work that several threads share: results made once each, and many made at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

from rlx.forks import Lock
from rlx.host.processor import available_threads

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Once(Generic[Key, Made]):
    """The last `kept` results of a function. Threads that ask for different keys make them at once; of those that ask for the
    same key one makes it, and the others wait."""

    def __init__(self, make: Callable[[Key], Made], kept: int) -> None:
        self._make, self._kept, self.misses = make, kept, 0
        self._made: OrderedDict[Key, Made] = OrderedDict()
        self._locks: dict[Key, Lock] = {}

    def __call__(self, key: Key) -> Made:
        with self._locks.setdefault(key, Lock()):
            found = [self._made.pop(key)] if key in self._made else []
            if not found:
                self.misses += 1
                found.append(self._make(key))
            self._made[key] = found[0]  # the newest
            while len(self._made) > self._kept:
                self._made.popitem(last=False)
        self._locks.pop(key, None)
        return found[0]

    def cache_clear(self) -> None:
        self._made.clear()


def at_once(make: Callable[[Key], Made], items: Sequence[Key], progress: Callable[[int, int], None] | None = None) -> list[Made]:
    """The result for each item, made by as many threads as this process may use. `progress(done, total)` is called in this
    thread, before the first result and after each. Raises the first fault; items that are not begun by then are left out."""
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

    threads = [threading.Thread(target=work, name="rlx compile") for _ in range(min(available_threads(), len(items)))]
    for thread in threads:
        thread.start()
    try:
        report(0, len(items))
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

"""Updates that replace indexed destinations: the number of the last one for each is found by atomic maxima, in a word for each;
then every destination takes its update, or stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.scatter import name_pick, scatter_of, shares, unclamped, way_of
from rlx.backends.cuda.schedule import MULTIPROCESSORS, Launch
from rlx.ir.kernel import Kernel, Load, coefficient, walk
from rlx.records import record

THREADS, EACH = 256, 4  # indices, and places, of a thread at a time
MOST = 4 * MULTIPROCESSORS  # blocks


@record
class ReplaceLaunch(Launch):
    """`places` and `picks` of all lines."""

    places: int = 0
    picks: int = 0

    @property
    def blocks(self) -> int:
        return min(MOST, -(-max(self.places, self.picks) // (THREADS * EACH)))


def replacing(kernel: Kernel) -> ReplaceLaunch | None:
    """The launch of a scatter whose updates replace; None: it is something else, or done otherwise."""
    (found, way), lines = way_of(kernel), math.prod(n for _, n in kernel.grid)
    if not found or way != "words" or shares(kernel, found):
        return None
    places, picks = lines * found.end.extent, lines * found.count
    return ReplaceLaunch(kernel, 1, THREADS, counters=places + 3, places=places, picks=picks)


class ReplaceWriter(CudaWriter):
    launch: ReplaceLaunch
    headers = ("scatter.h", "replaced.h")

    def __init__(self, launch: ReplaceLaunch) -> None:
        super().__init__(launch)
        found = scatter_of(self.kernel)
        assert found
        self.found = unclamped(found)
        self.end = self.found.end.extent
        self.along = coefficient(self.found.last.index, self.found.end.var) == 1

    def coordinates(self) -> Iterator[str]:
        """Those of indices and of places are of their functions."""
        yield from ()

    def declare_locals(self) -> None:
        """A line stays in the memory of the result."""

    def begin(self) -> None:
        """Blocks of a halted run find the words and clear them, too."""
        self.line("rlx_begin();")
        self.line("const bool halted = rlx_halted(halt);")

    @contextmanager
    def of_line(self, head: str, extent: int, along: bool, name: str = "pick") -> Iterator[None]:
        """The function `head` of number `id` of its line's `extent` elements, adjacent ones `along` the line, or of lines."""
        lines = self.launch.places // self.end
        with self.scope([f"{head} {{"]):
            line, number = ("/ {0}", "% {0}") if along else ("% {1}", "/ {1}")
            self.line(f"const rlx_uindex line = id {line.format(extent, lines)};")
            if name:
                self.line(f"const rlx_index {name} = id {number.format(extent, lines)};")
            for text in self.of_point("line"):
                self.line(text)
            yield
        self.lines[-1] += ";"

    def body(self) -> None:
        index = next(x for x in walk((self.found.check, self.found.put.index)) if isinstance(x, Load))
        near = coefficient(index.index, self.found.picks[-1].var) == 1
        with self.alone():
            self.of_picks(index, near)
            self.of_updates(near)
            self.of_places()
        self.call()

    def call(self) -> None:
        at, functions = self.launch, "look, word, number, old, update, put"
        self.line(f"rlx_replace<{at.threads}, {EACH}>(rlx_counters, {at.places}, {at.picks}, halted, {functions});")

    def of_picks(self, index: Load, near: bool) -> None:
        found, seen, lines = self.found, self.type(index.dtype), self.launch.places // self.end
        with self.of_line(f"const auto look = [&](rlx_uindex id) -> {seen}", found.count, near):
            name_pick(self, found.picks)
            self.line(f"return {self.value(index)};")
        with self.of_line(f"const auto word = [&](rlx_uindex id, {seen} seen) -> rlx_index", found.count, near):
            name_pick(self, found.picks)
            self.memo[id(index)] = "seen"
            self.statement(found.check)
            place, inside = self.value(found.put.index), self.value(found.inside)
            self.line(f"return {inside} ? {f'line * {self.end} + {place}' if self.along else f'{place} * {lines} + line'} : -1;")

    def of_updates(self, near: bool) -> None:
        found, lines = self.found, self.launch.places // self.end
        number = f"id % {found.count}" if near else f"id / {lines}"
        self.line(f"const auto number = [&](rlx_uindex id) -> rlx_uindex {{ return {number}; }};")
        head = f"const auto update = [&](rlx_uindex id, rlx_index pick) -> {self.type(found.put.buffer.dtype)}"
        with self.of_line(head, self.end, self.along, ""):
            self.update()

    def update(self) -> None:
        """Return that of number `pick`."""
        name_pick(self, self.found.picks)
        self.memo[id(self.found.inside)] = "true"
        self.line(f"return {self.value(self.found.update)};")

    def of_places(self) -> None:
        found, kind = self.found, self.type(self.found.put.buffer.dtype)
        with self.of_line(f"const auto old = [&](rlx_uindex id) -> {kind}", self.end, self.along, name := self.fresh("i")):
            self.names[found.start.var] = name
            self.line(f"return {self.value(found.first.value)};")
        head = f"const auto put = [&](rlx_uindex id, {kind} held)"
        with self.of_line(head, self.end, self.along, name := self.fresh("i")):
            self.names[found.end.var] = name
            self.memo[id(found.last.value)] = "held"
            self.block((found.last,))


__all__ = ["ReplaceLaunch", "ReplaceWriter", "replacing"]

"""Algorithms of collectives, as data: what one rank copies, reduces and waits for, in order. And which one to take.

Every rank has scratch at the same place of its heap, as large as what it brings. A schedule uses it in pieces that stay in
the cache, by turns in its two halves: one meeting a piece is enough, since who fills a half again has met the others after
they read it. So of n ranks that bring S bytes each, memory sees little more than what the caller's arrays hold, read once
and written once; what goes between ranks is said with each algorithm.

Whatever the algorithm, elements are combined in the order of ranks, carried in the accumulating dtype: the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

MINE, OUT = -1, -2  # places that are no rank's scratch: the caller's array, and the one for the result
SMALL = 4096  # bytes up to which everyone reads everyone, whatever the figures
# Bytes of a piece, from measurements (benchmarks/collectives.py): two of all ranks fit a shared cache; or hide a link's delay
PIECE = MappingProxyType({"shared": 1 << 20, "remote": 4 << 20, "ring": 256 << 10})


class What(IntEnum):
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL = 1, 2, 3, 4, 5


class Place(NamedTuple):
    where: int  # a rank: its scratch; MINE; OUT
    at: int  # bytes


class Step(NamedTuple):
    """copy: `nbytes` of one source. reduce: sources combined in order, `nbytes` of the result, rounded; carry: left in the
    accumulating dtype. The first source is in that if `carried`. meet: nothing is done until all ranks are here."""

    op: Literal["copy", "reduce", "carry", "meet"]
    out: Place = Place(MINE, 0)
    sources: tuple[Place, ...] = ()
    nbytes: int = 0  # in the array's dtype
    carried: bool = False


@dataclass(frozen=True)
class Job:
    """What rank `me` of `ranks` is to do with an array of `count` elements. `wide`: bytes of an accumulator. `in_place`: the
    array lies in the scratch itself."""

    what: What
    ranks: int
    me: int
    count: int
    itemsize: int
    wide: int
    root: int = 0
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank beginning with another one."""
        return [(self.me + i) % self.ranks for i in range(1, self.ranks)]


MEETING = Step("meet")


def _copy(out: Place, source: Place, nbytes: int) -> Iterator[Step]:
    if nbytes and out != source:
        yield Step("copy", out, (source,), nbytes)


def _of_all(job: Job, at: int, own: Place) -> tuple[Place, ...]:
    """A place of every rank's scratch, in order; this rank's own where it came from: lines that others read as well are slow."""
    return tuple(own if r == job.me else Place(r, at) for r in range(job.ranks))


def _pieces(job: Job, rows: int, piece: int) -> Iterator[tuple[int, int, list[int]]]:
    """Pieces of `rows` equal parts of the array: (first byte in the part, bytes, where each row lies in the scratch)."""
    size, width = job.nbytes // rows, max(piece // rows // 64 * 64, 64)
    if size <= width:
        width = max(size, 1)
    elif not job.in_place:  # two halves
        width = min(width, size // 2 // 64 * 64 or size // 2 // job.itemsize * job.itemsize)
    for k, first in enumerate(range(0, size, width)):
        at = [row * size + first if job.in_place else (k % 2 * rows + row) * width for row in range(rows)]
        yield first, min(width, size - first), at


def one_shot(job: Job, piece: int) -> Iterator[Step]:
    """Everyone reads from everyone what it needs: two meetings, and of all_reduce and all_gather (n-1) S bytes to each rank, of
    reduce_scatter and all_to_all (n-1) S/n; of broadcast S from the root to each."""
    me, parts = job.me, job.what in (What.REDUCE_SCATTER, What.ALL_TO_ALL)
    rows, size = (job.ranks, job.nbytes // job.ranks) if parts else (1, job.nbytes)
    brings = not job.in_place and (job.what != What.BROADCAST or me == job.root)
    for first, nbytes, at in _pieces(job, rows, piece):
        for row in range(rows if brings else 0):
            yield from _copy(Place(me, at[row]), Place(MINE, row * size + first), nbytes)
        yield MEETING
        mine = at[me] if parts else at[0]
        if job.what in (What.ALL_REDUCE, What.REDUCE_SCATTER):
            goal, own = MINE if job.what == What.ALL_REDUCE else OUT, Place(MINE, (me * size if parts else 0) + first)
            yield Step("reduce", Place(goal, first), _of_all(job, mine, own), nbytes)
        elif job.what == What.BROADCAST:
            yield from _copy(Place(MINE, first), Place(job.root, mine), nbytes if me != job.root else 0)
        else:
            yield from _copy(Place(OUT, me * size + first), Place(MINE, (me * size if parts else 0) + first), nbytes)
            for r in job.others:
                yield from _copy(Place(OUT, r * size + first), Place(r, mine), nbytes)
    yield MEETING


def two_shot(job: Job, piece: int) -> Iterator[Step]:
    """Everyone takes its part, all_reduce: from all, combined; broadcast: from the root; and then reads the other parts where
    they are: one meeting more, and 2 (n-1) S/n bytes to each rank."""
    me, reduces = job.me, job.what == What.ALL_REDUCE
    for first, nbytes, (at,) in _pieces(job, 1, piece):
        per = -(-nbytes // job.ranks // 64) * 64
        cuts = [(min(r * per, nbytes), max(0, min(per, nbytes - r * per))) for r in range(job.ranks)]
        start, own = cuts[me]
        if not job.in_place and (reduces or me == job.root):
            yield from _copy(Place(me, at), Place(MINE, first), nbytes)
        yield MEETING
        if reduces and own:
            yield Step("reduce", Place(me, at + start), _of_all(job, at + start, Place(MINE, first + start)), own)
        elif not reduces:
            yield from _copy(Place(me, at + start), Place(job.root, at + start), own if me != job.root else 0)
        yield MEETING
        for r in (*job.others, me) if reduces or me != job.root else ():
            if not (job.in_place and r == me):
                yield from _copy(Place(MINE, first + cuts[r][0]), Place(r, at + cuts[r][0]), cuts[r][1])
    yield MEETING


def tree(job: Job, piece: int) -> Iterator[Step]:
    """Broadcast along a binomial tree: log2 n rounds, in each those who have it give it to as many others; S bytes to each."""
    rank = (job.me - job.root) % job.ranks  # counted from the root
    if rank == 0 and not job.in_place:
        yield from _copy(Place(job.me, 0), Place(MINE, 0), job.nbytes)
    for j in range((job.ranks - 1).bit_length()):
        yield MEETING
        if 1 << j <= rank < 2 << j:
            yield from _copy(Place(job.me, 0), Place((job.me - (1 << j)) % job.ranks, 0), job.nbytes)
    if rank and not job.in_place:
        yield from _copy(Place(MINE, 0), Place(job.me, 0), job.nbytes)
    yield MEETING


def _ring_piece(job: Job, piece: int) -> int:
    """Elements of a piece: two partial ones and two results fit the scratch; at most an eighth, that ranks work at once."""
    return min(piece // job.wide, job.nbytes // (2 * (job.wide + job.itemsize)), max(64, job.count // 8))


def ring(job: Job, piece: int) -> Iterator[Step]:
    """All_reduce along the chain of ranks, in pieces: rank r adds its own to what r-1 carries, the last one rounds, and the
    result goes on around. At each beat all ranks work, each on another piece: S bytes (and S in accumulators) from one
    neighbour to the other, whatever n; a meeting a beat."""
    me, last, size = job.me, job.ranks - 1, _ring_piece(job, piece)
    wide, narrow = size * job.wide, size * job.itemsize
    count = -(-job.count // size)

    def cut(k: int) -> tuple[int, int]:
        return k * narrow, min(narrow, job.nbytes - k * narrow)

    for beat in range(count + 2 * last):
        k = beat - me
        if 0 <= k < count:
            (first, nbytes), half = cut(k), k % 2
            own = Place(MINE, first)
            sources = (Place(me - 1, half * wide), own) if me else (own,)
            if me < last:
                yield Step("carry", Place(me, half * wide), sources, nbytes, bool(me))
            else:
                yield Step("reduce", own, sources, nbytes, bool(me))
                yield from _copy(Place(me, 2 * wide + half * narrow), own, nbytes)
        k = beat - job.ranks - me
        if 0 <= k < count and me < last:
            (first, nbytes), at = cut(k), 2 * wide + k % 2 * narrow
            yield from _copy(Place(MINE, first), Place((me - 1) % job.ranks, at), nbytes)
            if me < last - 1:
                yield from _copy(Place(me, at), Place(MINE, first), nbytes)
        yield MEETING


Algorithm = Literal["one_shot", "two_shot", "tree", "ring"]
ALGORITHMS: Mapping[str, Callable[[Job, int], Iterator[Step]]] = MappingProxyType(
    {"one_shot": one_shot, "two_shot": two_shot, "tree": tree, "ring": ring}
)


def possible(job: Job) -> list[Algorithm]:
    """The algorithms that can do it; the first one where there is nothing to choose by."""
    if job.what == What.BROADCAST:
        return ["one_shot", "two_shot", "tree"]
    if job.what != What.ALL_REDUCE:
        return ["one_shot"]
    if job.in_place:  # the others write to the array before everybody has read it
        return ["two_shot"]
    chain: list[Algorithm] = ["ring"] if job.ranks > 1 and _ring_piece(job, PIECE["ring"]) else []
    return ["one_shot", "two_shot", *chain]


def schedule(job: Job, algorithm: Algorithm, shared: bool) -> list[Step]:
    """What this rank does. Nothing of the caller's arrays is written before the first meeting."""
    kind = "ring" if algorithm == "ring" else "shared" if shared else "remote"
    return list(ALGORITHMS[algorithm](job, PIECE[kind]))


# -- the choice ----------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Of a transport, in seconds: a meeting; to begin to read from another rank; each byte from the next rank, and from the one
    opposite, while all ranks read."""

    meeting: float
    delay: float
    near: float
    far: float


def seconds(job: Job, algorithm: Algorithm, f: Figures, shared: bool) -> float:
    """What the algorithm takes: a delay and a time per byte for each message (Hockney, The communication challenge for MPP,
    1994; the counts as in Thakur, Rabenseifner and Gropp, Optimization of collective communication operations, 2005)."""
    n, size = job.ranks, job.nbytes
    pieces = max(1, math.ceil(size / PIECE["shared" if shared else "remote"]))
    if algorithm == "ring":
        per = _ring_piece(job, PIECE["ring"])
        beats = math.ceil(job.count / per) + 2 * n - 2
        return beats * (f.meeting + 2 * f.delay + per * (job.wide + job.itemsize) * f.near)
    if algorithm == "tree":
        rounds = (n - 1).bit_length()
        return (rounds + 1) * f.meeting + rounds * (f.delay + size * f.far)
    if algorithm == "one_shot":  # of a broadcast, too, n-1 copies leave the root
        return (pieces + 1) * f.meeting + (n - 1) * (pieces * f.delay + size * f.far)
    return (2 * pieces + 1) * f.meeting + 2 * (n - 1) * (pieces * f.delay + size / n * f.far)


def choose(job: Job, f: Figures | None, shared: bool) -> Algorithm:
    """The algorithm that takes least by these figures; the same on all ranks if the figures are."""
    ways = possible(job)
    return ways[0] if f is None else min(ways, key=lambda way: seconds(job, way, f, shared))

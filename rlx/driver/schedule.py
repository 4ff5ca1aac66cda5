"""Algorithms of collectives as data: the copies, reductions and barriers of one rank, in order. Also the selection of one.

Every rank has scratch at the same offset of its heap, as large as its array. A schedule works in pieces that stay in the cache,
double-buffered in the two halves of the scratch: one barrier per piece is enough, because it separates the reads of a half from
its reuse. For n ranks with S bytes each, memory traffic is little more than one read and one write of the callers' arrays. The
docstring of each algorithm gives the traffic between ranks.

All algorithms combine elements in rank order, in the accumulator's dtype, so all of them give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from rlx.records import record

MINE, OUT = -1, -2  # values of Address.where besides ranks: the caller's array, and the result's array
SMALL = 4096  # up to this many bytes every rank reads from every other one, regardless of the figures
# Bytes of a piece, from measurements (benchmarks/collectives.py). shared: two pieces of all ranks fit a shared cache. remote: a
# piece hides the delay of a link
PIECE = MappingProxyType({"shared": 1 << 20, "remote": 4 << 20, "ring": 256 << 10})


class What(IntEnum):
    ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL = 1, 2, 3, 4, 5


class Address(NamedTuple):
    where: int  # a rank (in its scratch), MINE or OUT
    at: int  # offset in bytes


class Step(NamedTuple):
    """copy: copy `nbytes` of one source. reduce: combine the sources in order to `nbytes` of the result, and round. carry: the
    same, but the result stays in the accumulator's dtype. `carried`: the first source is in the accumulator's dtype. barrier: a
    barrier of all ranks."""

    op: Literal["copy", "reduce", "carry", "barrier"]
    out: Address = Address(MINE, 0)
    sources: tuple[Address, ...] = ()
    nbytes: int = 0  # in the array's dtype
    carried: bool = False


@record
class Job:
    """A collective as rank `me` of `ranks` executes it on an array of `count` elements. `wide`: bytes of an accumulator.
    `in_place`: the array is the scratch itself."""

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
        """The other ranks, rotated so that each rank begins with a different one."""
        return [(self.me + i) % self.ranks for i in range(1, self.ranks)]


BARRIER = Step("barrier")


def _copy(out: Address, source: Address, nbytes: int) -> Iterator[Step]:
    if nbytes and out != source:
        yield Step("copy", out, (source,), nbytes)


def _of_all(job: Job, at: int, own: Address) -> tuple[Address, ...]:
    """The same offset in every rank's scratch, in rank order. For this rank it is `own`, where its data came from: cache lines
    that other ranks read too are slow."""
    return tuple(own if r == job.me else Address(r, at) for r in range(job.ranks))


def _pieces(job: Job, rows: int, piece: int) -> Iterator[tuple[int, int, list[int]]]:
    """Split `rows` equal parts of the array into pieces: (first byte in the part, bytes, scratch offset for each part)."""
    size, width = job.nbytes // rows, max(piece // rows // 64 * 64, 64)
    if size <= width:
        width = max(size, 1)
    elif not job.in_place:  # two halves
        width = min(width, size // 2 // 64 * 64 or size // 2 // job.itemsize * job.itemsize)
    for k, first in enumerate(range(0, size, width)):
        at = [row * size + first if job.in_place else (k % 2 * rows + row) * width for row in range(rows)]
        yield first, min(width, size - first), at


def one_shot(job: Job, piece: int) -> Iterator[Step]:
    """Every rank reads what it needs from every other rank, with two barriers. Each rank receives (n-1) S bytes in all_reduce and
    all_gather, (n-1) S/n in reduce_scatter and all_to_all, and S (from the root) in broadcast."""
    me, parts = job.me, job.what in (What.REDUCE_SCATTER, What.ALL_TO_ALL)
    rows, size = (job.ranks, job.nbytes // job.ranks) if parts else (1, job.nbytes)
    brings = not job.in_place and (job.what != What.BROADCAST or me == job.root)
    for first, nbytes, at in _pieces(job, rows, piece):
        for row in range(rows if brings else 0):
            yield from _copy(Address(me, at[row]), Address(MINE, row * size + first), nbytes)
        yield BARRIER
        mine = at[me] if parts else at[0]
        if job.what in (What.ALL_REDUCE, What.REDUCE_SCATTER):
            goal, own = MINE if job.what == What.ALL_REDUCE else OUT, Address(MINE, (me * size if parts else 0) + first)
            yield Step("reduce", Address(goal, first), _of_all(job, mine, own), nbytes)
        elif job.what == What.BROADCAST:
            yield from _copy(Address(MINE, first), Address(job.root, mine), nbytes if me != job.root else 0)
        else:
            yield from _copy(Address(OUT, me * size + first), Address(MINE, (me * size if parts else 0) + first), nbytes)
            for r in job.others:
                yield from _copy(Address(OUT, r * size + first), Address(r, mine), nbytes)
    yield BARRIER


def two_shot(job: Job, piece: int) -> Iterator[Step]:
    """Each rank first handles one part: in all_reduce it combines that part of all ranks, in broadcast it reads it from the root.
    Then it reads the other parts from the other ranks. One more barrier than one_shot; each rank receives 2 (n-1) S/n bytes."""
    me, reduces = job.me, job.what == What.ALL_REDUCE
    for first, nbytes, (at,) in _pieces(job, 1, piece):
        per = -(-nbytes // job.ranks // 64) * 64
        parts = [(min(r * per, nbytes), max(0, min(per, nbytes - r * per))) for r in range(job.ranks)]
        start, own = parts[me]
        if not job.in_place and (reduces or me == job.root):
            yield from _copy(Address(me, at), Address(MINE, first), nbytes)
        yield BARRIER
        if reduces and own:
            yield Step("reduce", Address(me, at + start), _of_all(job, at + start, Address(MINE, first + start)), own)
        elif not reduces:
            yield from _copy(Address(me, at + start), Address(job.root, at + start), own if me != job.root else 0)
        yield BARRIER
        for r in (*job.others, me) if reduces or me != job.root else ():
            if not (job.in_place and r == me):
                yield from _copy(Address(MINE, first + parts[r][0]), Address(r, at + parts[r][0]), parts[r][1])
    yield BARRIER


def tree(job: Job, piece: int) -> Iterator[Step]:
    """Broadcast along a binomial tree: log2 n rounds, each of which doubles the ranks that have the data. Each rank receives S
    bytes."""
    rank = (job.me - job.root) % job.ranks  # counted from the root
    if rank == 0 and not job.in_place:
        yield from _copy(Address(job.me, 0), Address(MINE, 0), job.nbytes)
    for j in range((job.ranks - 1).bit_length()):
        yield BARRIER
        if 1 << j <= rank < 2 << j:
            yield from _copy(Address(job.me, 0), Address((job.me - (1 << j)) % job.ranks, 0), job.nbytes)
    if rank and not job.in_place:
        yield from _copy(Address(MINE, 0), Address(job.me, 0), job.nbytes)
    yield BARRIER


def _ring_piece(job: Job, piece: int) -> int:
    """Elements of a piece. Two partial pieces and two results fit the scratch. A piece is at most an eighth of the array, so that
    ranks work concurrently."""
    return min(piece // job.wide, job.nbytes // (2 * (job.wide + job.itemsize)), max(64, job.count // 8))


def ring(job: Job, piece: int) -> Iterator[Step]:
    """All_reduce along the chain of ranks, pipelined in pieces. Rank r adds its own data to the partial result of rank r-1, the
    last rank rounds, and the result travels on around the ring. In each beat all ranks work, each on another piece. A neighbour
    receives S bytes (and S in accumulators) for every n. One barrier per beat."""
    me, last, size = job.me, job.ranks - 1, _ring_piece(job, piece)
    wide, narrow = size * job.wide, size * job.itemsize
    count = -(-job.count // size)

    def cut(k: int) -> tuple[int, int]:
        return k * narrow, min(narrow, job.nbytes - k * narrow)

    for beat in range(count + 2 * last):
        k = beat - me
        if 0 <= k < count:
            (first, nbytes), half = cut(k), k % 2
            own = Address(MINE, first)
            sources = (Address(me - 1, half * wide), own) if me else (own,)
            if me < last:
                yield Step("carry", Address(me, half * wide), sources, nbytes, bool(me))
            else:
                yield Step("reduce", own, sources, nbytes, bool(me))
                yield from _copy(Address(me, 2 * wide + half * narrow), own, nbytes)
        k = beat - job.ranks - me
        if 0 <= k < count and me < last:
            (first, nbytes), at = cut(k), 2 * wide + k % 2 * narrow
            yield from _copy(Address(MINE, first), Address((me - 1) % job.ranks, at), nbytes)
            if me < last - 1:
                yield from _copy(Address(me, at), Address(MINE, first), nbytes)
        yield BARRIER


Algorithm = Literal["one_shot", "two_shot", "tree", "ring"]
ALGORITHMS: Mapping[str, Callable[[Job, int], Iterator[Step]]] = MappingProxyType(
    {"one_shot": one_shot, "two_shot": two_shot, "tree": tree, "ring": ring}
)


def possible(job: Job) -> list[Algorithm]:
    """The algorithms that can execute the job. The first one is the default if there are no figures."""
    if job.what == What.BROADCAST:
        return ["one_shot", "two_shot", "tree"]
    if job.what != What.ALL_REDUCE:
        return ["one_shot"]
    if job.in_place:  # in the other algorithms, ranks write to the array before all ranks have read it
        return ["two_shot"]
    chain: list[Algorithm] = ["ring"] if job.ranks > 1 and _ring_piece(job, PIECE["ring"]) else []
    return ["one_shot", "two_shot", *chain]


def schedule(job: Job, algorithm: Algorithm, shared: bool) -> list[Step]:
    """The steps of this rank. The caller's arrays are not written before the first barrier."""
    kind = "ring" if algorithm == "ring" else "shared" if shared else "remote"
    return list(ALGORITHMS[algorithm](job, PIECE[kind]))


# -- selection -----------------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """Measured times of a transport, in seconds. `barrier`: of a barrier. `delay`: latency of a read from another rank. `near`,
    `far`: per byte, from the next rank and from the opposite one, while all ranks read."""

    barrier: float
    delay: float
    near: float
    far: float


def seconds(job: Job, algorithm: Algorithm, f: Figures, shared: bool) -> float:
    """Predicted time of an algorithm: a delay and a time per byte for each message (Hockney, The communication challenge for MPP,
    1994; message counts as in Thakur, Rabenseifner and Gropp, Optimization of collective communication operations, 2005)."""
    n, size = job.ranks, job.nbytes
    pieces = max(1, math.ceil(size / PIECE["shared" if shared else "remote"]))
    if algorithm == "ring":
        per = _ring_piece(job, PIECE["ring"])
        beats = math.ceil(job.count / per) + 2 * n - 2
        return beats * (f.barrier + 2 * f.delay + per * (job.wide + job.itemsize) * f.near)
    if algorithm == "tree":
        rounds = (n - 1).bit_length()
        return (rounds + 1) * f.barrier + rounds * (f.delay + size * f.far)
    if algorithm == "one_shot":  # also in a broadcast: n-1 copies leave the root
        return (pieces + 1) * f.barrier + (n - 1) * (pieces * f.delay + size * f.far)
    return (2 * pieces + 1) * f.barrier + 2 * (n - 1) * (pieces * f.delay + size / n * f.far)


def choose(job: Job, f: Figures | None, shared: bool) -> Algorithm:
    """The algorithm with the least predicted time. It is the same on all ranks if the figures are."""
    ways = possible(job)
    return ways[0] if f is None else min(ways, key=lambda way: seconds(job, way, f, shared))

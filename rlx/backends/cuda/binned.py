"""Scatters of many updates of single elements: tiles of updates are sorted by bins of places; then each block has the sums of a
bin in shared memory, and each of its warps adds the updates of some places to them, in order."""

from __future__ import annotations

import math

from rlx.backends.cuda.replaced import ReplaceLaunch, ReplaceWriter
from rlx.backends.cuda.scatter import STREAM_THREADS, STREAMING, Bins, bins_of, shares, way_of
from rlx.backends.cuda.schedule import WARP
from rlx.backends.cuda.sorts import DIGITS
from rlx.ir.kernel import Kernel
from rlx.records import record

STATIC = 20 << 10  # bytes of shared memory of a block beside its sums and the tile that it sorts, at most
WORDS = 3  # of rlx_in_parts


@record
class BinLaunch(ReplaceLaunch):
    bins: Bins | None = None

    @property
    def blocks(self) -> int:
        assert self.bins
        return _blocks(self.bins)


def _blocks(at: Bins) -> int:
    return min(STREAMING * STREAM_THREADS // at.threads, max(at.bins, at.tiles))


def binned(kernel: Kernel, most: int) -> BinLaunch | None:
    """The launch of a scatter whose updates are sorted by bins, in at most so many bytes of shared memory of a block; None: it is
    something else, or done otherwise."""
    (found, way), lines = way_of(kernel), math.prod(n for _, n in kernel.grid)
    at = bins_of(kernel) if way == "binned" else None
    if not found or not at or shares(kernel, found):
        return None
    size, sums = at.threads * at.each, -(-at.width * found.put.buffer.dtype.compute.itemsize // 16) * 16
    shared = 4 * DIGITS * (at.threads // WARP + 2) + max(8 * size, sums + 8 * at.threads * at.more)  # of rlx_tile
    scratch = -(-(8 * at.tiles * size + 4 * at.bins * at.tiles) // (16 * _blocks(at))) * 16
    places, picks = lines * found.end.extent, lines * found.count
    made = BinLaunch(kernel, 1, at.threads, shared, scratch, counters=WORDS, places=places, picks=picks, bins=at)
    return made if shared + STATIC <= most else None


class BinWriter(ReplaceWriter):
    launch: BinLaunch
    headers = ("scatter.h", "sort.h", "radix.h", "binned.h")

    def __init__(self, launch: BinLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {1024 // launch.threads}"

    def of_updates(self, near: bool) -> None:
        head = f"const auto added = [&](rlx_uindex id) -> {self.type(self.found.put.buffer.dtype)}"
        with self.of_line(head, self.found.count, near):
            self.update()

    def call(self) -> None:
        at, b, kind, op = self.launch, self.launch.bins, self.type(self.found.update.dtype), self.found.op
        assert b
        last = f"[]({kind}, {kind} b) -> {kind} {{ return b; }}"
        combined = self.function_of(op, self.found.update.dtype) if op else last
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        sizes = f"{b.threads}, {b.each}, {b.more}, {b.width}, {b.bins}, {b.tiles}, {self.type(self.found.put.buffer.dtype)}"
        memory = f"rlx_shared, rlx_scratch, rlx_counters, {at.places}, {at.picks}, halted"
        self.line(f"rlx_in_bins<{sizes}>({memory}, look, word, added, {combined}, old, put);")


__all__ = ["BinLaunch", "BinWriter", "binned"]

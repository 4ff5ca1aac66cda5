"""Sorts of rows: a warp sorts chunks in its registers, which the block merges in shared memory. Long rows are divided among
several blocks, which merge their parts through global memory."""

from __future__ import annotations

import math
from pathlib import Path

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import THREADS, WARP, Launch
from rlx.ir.kernel import Kernel, Let, Sort
from rlx.records import record

EACH = 8  # elements of a thread in registers, at most
MOST_BYTES = 4096  # of the keys' values in registers of a block: more threads would have too few registers
PART_THREADS = (256, 512, 1024)  # of a block that has a part of a row
ALONE = 4096  # elements that one block sorts as fast as several, which would wait for each other
FEW = 4  # blocks for each multiprocessor; with more, rows keep the GPU busy


@record
class SortLaunch(Launch):
    """`each`: elements in registers of a thread at once."""

    each: int = EACH

    @property
    def sort(self) -> Sort:
        last = self.kernel.body[-1]
        assert isinstance(last, Sort)
        return last


def sorted_rows(kernel: Kernel, most: int, multiprocessors: int) -> SortLaunch | None:
    """`kernel` as a sort in at most so many bytes of shared memory of a block; None: it is none, or has longer rows."""
    *before, last = kernel.body or (None,)
    if not isinstance(last, Sort) or kernel.locals or kernel.limits or not last.n or not all(isinstance(s, Let) for s in before):
        return None
    parted = _in_parts(kernel, last, most, multiprocessors)
    if parted and last.n > ALONE and parted.blocks <= FEW * multiprocessors:
        return parted
    full = 1 << (last.n - 1).bit_length()
    each, itemsize = max(1, min(EACH, full // WARP)), max(4, last.value.dtype.compute.itemsize)
    team = max(WARP, min(MOST_BYTES // itemsize, full // each))
    room = -(-last.n // (WARP * each)) * WARP * each
    threads = THREADS if team == WARP else team
    shared = (room + room // 8) * 2 * itemsize * (threads // team)
    return SortLaunch(kernel, team, threads, shared=shared, each=each) if shared <= most else parted


def _in_parts(kernel: Kernel, sort: Sort, most: int, multiprocessors: int) -> SortLaunch | None:
    """With as few threads for a part as let all parts of a row run at once, since they wait for each other. Of longer rows, the
    largest blocks have several runs each."""
    rows, itemsize, found = math.prod(n for _, n in kernel.grid), max(4, sort.value.dtype.compute.itemsize), None
    for threads in PART_THREADS:
        run, key = threads * EACH, 2 * itemsize
        runs, shared = -(-sort.n // run), (run + run // 8) * key
        if threads * itemsize > MOST_BYTES or shared > most:
            break
        each = -(-runs // multiprocessors)
        scratch, parts = 2 * each * run * key, -(-runs // each)
        found = SortLaunch(kernel, threads, threads, shared, scratch, 1, rows, parts=parts, part=each * run, adjacent=True)
        if each == 1:
            break
    return found if sort.n < 1 << 30 else None


class SortWriter(CudaWriter):
    launch: SortLaunch

    def body(self) -> None:
        at, s = self.launch, self.launch.sort
        self.block(self.kernel.body[:-1])
        value, order = self.type(s.value.dtype), "true" if s.descending else "false"
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        mine = f"threadIdx.x / {at.team} * {at.shared // (at.threads // at.team)}"
        self.line(f"rlx_key<{value}>* const keys = (rlx_key<{value}>*)(rlx_shared + {mine});")
        i = self.name(s.i, "i")
        with self.alone():
            with self.scope([f"const auto value = [&](rlx_index {i}) -> {value} {{"]):
                self.line(f"return {self.value(s.value)};")
            self.line(";")
            if at.parts > 1:
                self.in_parts(value, order)
            else:
                self.line(f"rlx_sort<{at.team}, {at.each}, {s.n}, {order}, {value}>(keys, me, value);")
                self.put(value, order, "0", str(s.kept))

    def in_parts(self, value: str, order: str) -> None:
        at, s, run = self.launch, self.launch.sort, self.launch.team * self.launch.each
        with self.scope(["const auto sort = [&](int first) {"]):
            self.line(f"rlx_sort<{at.team}, {at.each}, {run}, {order}, {value}>(keys, me, value, first, {s.n} - first);")
        with self.scope(["; const auto emit = [&](int first) {"]):
            self.put(value, order, "first", f"min({s.kept}, first + {run})")
        memory = f"(rlx_key<{value}>*)(rlx_scratch + (size_t)line * {at.parts * at.scratch})"
        sizes = f"{at.team}, {at.each}, {at.parts}, {at.part // run}"
        self.line(f"; rlx_merge<{sizes}>(keys, {memory}, (int)part, rlx_counters + line, sort, emit);")

    def put(self, value: str, order: str, first: str, end: str) -> None:
        """Store the sorted elements from `first` to `end`; the first key is that of the first one."""
        s, to = self.launch.sort, self.name(self.launch.sort.to, "i")
        with self.scope([f"for (rlx_index {to} = {first} + me; {to} < {end}; {to} += {self.launch.team}) {{"]):
            self.line(f"const rlx_key<{value}> key = keys[rlx_spread({to} - {first})];")
            self.names[s.held] = self.fix("x", s.value.dtype, f"rlx_of_key<{order}, {value}>(key)")
            self.line(f"const rlx_index {self.name(s.origin, 'o')} = key.below >> 1;")
            self.block(s.body)

    def function(self, name: str) -> str:
        return (Path(__file__).parent / "sort.h").read_text() + super().function(name)


__all__ = ["SortLaunch", "SortWriter", "sorted_rows"]

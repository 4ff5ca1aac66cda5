"""Sorts of rows. By comparisons: a warp sorts chunks in its registers, which the block merges in shared memory; several blocks
have a long row, and merge their parts through global memory. Longer rows are sorted by the digits of keys, by a block or more."""

from __future__ import annotations

import math

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import RESERVED, THREADS, WARP, Launch
from rlx.ir.dtype import f32
from rlx.ir.kernel import Kernel, Let, Load, Sort
from rlx.records import record

EACH = 8  # elements of a thread in registers, at most
MOST_BYTES = 4096  # of the keys' values in registers of a block: more threads would have too few registers
PART_THREADS = (256, 512, 1024)  # of a block that has a part of a row
ALONE = 4096  # elements that one block merges as fast as several, which would wait for each other
FEW = 4  # blocks for each multiprocessor; with more, rows keep the GPU busy
DIGIT_THREADS = 512  # of a block that sorts by digits, a multiple of the digits
DIGIT_EACH = {2: 14, 4: 14, 8: 8}  # keys of so many bytes of a thread, at most: more leave the registers
DIGIT_LEAST = 4  # the same, at least: shorter runs of a digit would take as long
TILE_LEAST = 2048  # elements: a block sorts as many by comparisons in the time of a few digits
DIGIT_WORTH = 16_384  # elements of all rows for each byte of a key, from which on a few rows take less time than by merges
DIGIT_SCRATCH = 256 << 20  # bytes of global memory for rows that one block could sort without any
DIGITS, GROUP, HEAD = 256, 16, 8  # as in radix.h


@record
class SortLaunch(Launch):
    """`each`: elements in registers of a thread at once."""

    each: int = EACH

    @property
    def sort(self) -> Sort:
        last = self.kernel.body[-1]
        assert isinstance(last, Sort)
        return last


@record
class DigitLaunch(SortLaunch):
    """A block sorts a row, which is one tile, or `tiles` tiles of its part of one. `key`: bytes of a key."""

    key: int = 4
    tiles: int = 1

    @property
    def waiting(self) -> int:
        return self.parts if self.parts > 1 else 0


def sorted_rows(kernel: Kernel, most: int, multiprocessors: int) -> SortLaunch | None:
    """`kernel` as a sort in at most so many bytes of shared memory of a block; None: it is none, or has longer rows."""
    if not (last := sort_of(kernel)):
        return None
    merged, digits = _in_parts(kernel, last, most, multiprocessors), _by_digits(kernel, last, most, multiprocessors)
    if digits and digits.parts == 1:
        return digits
    if merged and last.n > ALONE and merged.blocks <= FEW * multiprocessors:
        return digits if digits and last.n * digits.lines >= DIGIT_WORTH * digits.key else merged
    if digits and digits.blocks * digits.scratch <= DIGIT_SCRATCH:
        return digits
    full = 1 << (last.n - 1).bit_length()
    each, itemsize = max(1, min(EACH, full // WARP)), max(4, last.value.dtype.compute.itemsize)
    team = max(WARP, min(MOST_BYTES // itemsize, full // each))
    room = -(-last.n // (WARP * each)) * WARP * each
    threads = THREADS if team == WARP else team
    shared = (room + room // 8) * 2 * itemsize * (threads // team)
    return SortLaunch(kernel, team, threads, shared=shared, each=each) if shared <= most else digits or merged


def sort_of(kernel: Kernel) -> Sort | None:
    """The sort of a kernel that does nothing else."""
    *before, last = kernel.body or (None,)
    if not isinstance(last, Sort) or kernel.locals or kernel.limits or not last.n or not all(isinstance(s, Let) for s in before):
        return None
    return last


def _by_digits(kernel: Kernel, sort: Sort, most: int, multiprocessors: int) -> DigitLaunch | None:
    """With few keys in a thread where all rows then run at once; all blocks of a row do."""
    n, rows, team, key = sort.n, math.prod(n for _, n in kernel.grid), DIGIT_THREADS, key_bytes(sort)
    if not TILE_LEAST < n < 1 << 30:
        return None
    each = DIGIT_EACH[key]
    if n <= team * each:
        each = -(-n // team)
        return DigitLaunch(kernel, team, team, _tile_bytes(key, each), each=each, key=key)
    at_once = min(2, (most + RESERVED) // (_tile_bytes(key, each) + 2 * RESERVED)) * multiprocessors
    if at_once < 2:
        return None
    tiles = -(-n // (team * each * at_once))
    lines = rows if tiles == 1 else 1  # that run at once
    each = max(DIGIT_LEAST, min(each, -(-n * lines // (team * at_once * tiles))))
    parts = -(-n // (tiles * team * each))
    each = max(DIGIT_LEAST, -(-n // (tiles * team * parts)))  # keys of all parts alike
    part = tiles * team * each
    parts = -(-n // part)
    scratch, groups = (1 + (key > 2)) * part * (key + 4) + 4 * DIGITS, -(-parts // GROUP)
    words = HEAD + 2 * groups * DIGITS
    return DigitLaunch(
        kernel, team, team, _tile_bytes(key, each), scratch, counters=rows * words, parts=parts, part=part, words=words,
        adjacent=True, each=each, key=key, tiles=tiles,
    )  # fmt: skip


def key_bytes(sort: Sort) -> int:
    """16-bit floats in memory, and narrower ones, have keys of 16 bits."""
    x, computed = sort.value, sort.value.dtype.compute
    narrow = isinstance(x, Load) and x.buffer.dtype.is_float and x.buffer.dtype.itemsize <= 2
    return 2 if narrow and computed == f32 else max(4, computed.itemsize)


def _tile_bytes(key: int, each: int) -> int:
    """Of rlx_tile in radix.h."""
    return DIGIT_THREADS * each * (key + 4) + (DIGIT_THREADS // WARP + 2) * 4 * DIGITS


def _in_parts(kernel: Kernel, sort: Sort, most: int, multiprocessors: int) -> SortLaunch | None:
    """With as few threads for a part as let all parts of a row run at once, since they wait for each other."""
    rows, itemsize = math.prod(n for _, n in kernel.grid), max(4, sort.value.dtype.compute.itemsize)
    for threads in PART_THREADS:
        run, key = threads * EACH, 2 * itemsize
        parts, shared = -(-sort.n // run), (run + run // 8) * key
        if threads * itemsize > MOST_BYTES or shared > most:
            break
        if parts <= multiprocessors:
            return SortLaunch(kernel, threads, threads, shared, 2 * run * key, 1, rows, parts=parts, part=run, adjacent=True)
    return None


class SortWriter(CudaWriter):
    launch: SortLaunch
    headers = ("sort.h",)

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
            self.keys(value, order)

    def keys(self, value: str, order: str) -> None:
        """Sort, and store."""
        at, s = self.launch, self.launch.sort
        if at.parts > 1:
            return self.in_parts(value, order)
        self.line(f"rlx_sort<{at.team}, {at.each}, {s.n}, {order}, {value}>(keys, me, value);")
        self.put(value, order, "0", str(s.kept))

    def in_parts(self, value: str, order: str) -> None:
        at, s, run = self.launch, self.launch.sort, self.launch.team * self.launch.each
        with self.scope(["const auto sort = [&](int first) {"]):
            self.line(f"rlx_sort<{at.team}, {at.each}, {run}, {order}, {value}>(keys, me, value, first, {s.n} - first);")
        with self.scope(["; const auto emit = [&](int first) {"]):
            self.put(value, order, "first", f"min({s.kept}, first + {run})")
        memory = f"(rlx_key<{value}>*)(rlx_scratch + (size_t)line * {at.parts * at.scratch})"
        sizes = f"{at.team}, {at.each}, {at.parts}"
        self.line(f"; rlx_merge<{sizes}>(keys, {memory}, (int)part, rlx_counters + line, sort, emit);")

    def put(self, value: str, order: str, first: str, end: str) -> None:
        """Store the sorted elements from `first` to `end`; the first key is that of the first one."""
        s, to = self.launch.sort, self.name(self.launch.sort.to, "i")
        with self.scope([f"for (rlx_index {to} = {first} + me; {to} < {end}; {to} += {self.launch.team}) {{"]):
            self.line(f"const rlx_key<{value}> key = keys[rlx_spread({to} - {first})];")
            self.names[s.held] = self.fix("x", s.value.dtype, f"rlx_of_key<{order}, {value}>(key)")
            self.line(f"const rlx_index {self.name(s.origin, 'o')} = key.below >> 1;")
            self.block(s.body)


class DigitWriter(SortWriter):
    launch: DigitLaunch
    headers = ("sort.h", "radix.h")

    def __init__(self, launch: DigitLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {1024 // launch.threads}"
        x = launch.sort.value
        self.half = launch.key == 2 and isinstance(x, Load) and x.buffer.dtype.name != "bf16"  # in the upper half of a float

    def body(self) -> None:
        at, s = self.launch, self.launch.sort
        self.block(self.kernel.body[:-1])
        value, key = self.type(s.value.dtype), {2: "uint16_t", 4: "uint32_t", 8: "unsigned long long"}[at.key]
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"auto& tile = *(rlx_tile<{at.team}, {at.each}, {key}>*)rlx_shared;")
        i, to, held, origin = self.name(s.i, "i"), self.name(s.to, "i"), self.fresh("x"), self.name(s.origin, "o")
        with self.alone():
            with self.scope([f"const auto value = [&](rlx_index {i}) -> {value} {{"]):
                text = self.value(s.value)
                self.line(f"return {f'rlx_raise({text})' if self.half else text};")
            with self.scope([f"; const auto emit = [&](rlx_index {to}, {value} {held}, rlx_index {origin}) {{"]):
                if s.kept < s.n:
                    self.line(f"if ({to} >= {s.kept}) return;")
                self.names[s.held] = self.fix("x", s.value.dtype, f"rlx_lower({held})" if self.half else held)
                self.block(s.body)
            sizes, order = f"{at.team}, {at.each}, {s.n}", f"{'true' if s.descending else 'false'}, {key}, {value}"
            if at.parts == 1:
                self.line(f"; rlx_sort_tile<{sizes}, {order}>(tile, value, emit);")
            else:
                sizes = f"{sizes}, {at.parts}, {at.tiles}, {order}"
                memory, words = f"(size_t)line * {at.parts * at.scratch}", f"(size_t)line * {at.words}"
                self.line(f"; rlx_parted_sort<{sizes}> sort = {{tile, rlx_scratch + {memory}}};")
                self.line(f"sort.counts = {{rlx_counters + {words}, (unsigned*)(sort.memory + sort.KEYS), (int)part}};")
                self.line("sort.run(value, emit);")


__all__ = ["DigitLaunch", "DigitWriter", "SortLaunch", "SortWriter", "key_bytes", "sort_of", "sorted_rows"]

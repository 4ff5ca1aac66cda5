"""Long rows, as of layer_norm: clusters of blocks stay for several rows. A block keeps its part of the parameters in shared
memory, where its part of the next row arrives while it computes this one from registers. Otherwise each row would read the
parameters again, and blocks would load nothing while they wait for each other's sums. Clusters draw rows: some are slower."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from itertools import pairwise, product

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import Key, Row, expr_key, is_exp, key_of, recomputed, row_loops, row_of, stores_in_loops
from rlx.backends.cuda.schedule import ALIGNED, CLUSTER, FOUND, LARGEST, MULTIPROCESSORS, RESERVED, WARP, Launch, parted
from rlx.backends.cuda.vectors import BYTES, loads
from rlx.ir.dtype import f32
from rlx.ir.kernel import EXTREMES, Alu, Buffer, Kernel, Let, Load, Local, Loop, Store, Var, is_const, walk
from rlx.ir.overlap import may_overlap
from rlx.records import record

PARTS, WIDE = (1, 2, 4, 8), (2 * CLUSTER,)  # blocks of a cluster; where fewer have no room for a row and its parameters
AT_ONCE = range(1, 7)  # blocks of a multiprocessor
ROUNDS = range(2, 17)  # vectors of a thread in a row
LEAST_TEAM, MOST_TEAM, THREADS = 96, 512, (448, 1024)  # threads of a block, and of a multiprocessor
FILE, REST, EACH = 64 << 10, 44, 4  # registers of a multiprocessor; of a thread besides its elements; for 32 warps of a cluster
FLYING = 85_000  # bytes of rows that are on their way from and to memory at once, of a multiprocessor
LONG, LONG_FLYING = (300_000, 400_000), 170_000  # bytes of rows of a softmax of f32 that gain, too; on their way then
OVER, LONE, SHORT = 0.5, 0.3, 0.1  # more bytes lose less than fewer; a block that is alone, and two vectors, lose
LEAST = {2: 16 << 10, 4: 40 << 10}  # bytes read and written of a row, at least, by those of an element
PLAIN = 48 << 10  # bytes of a row without parameters, at most
CACHED, CACHED_ROW = 80 << 20, 40 << 10  # bytes of all rows that the second-level cache keeps; of a row, then, at least
TURNS = 3  # rows of a cluster, at least
LEAST_COPY, SHORT_ROW = (8, 4), 80 << 10  # bytes: of a vector, at least, in rows of less than so many, and in longer ones
LINE = 128  # bytes: parts of rows that begin elsewhere touch another line of the cache
DRAWN = 2  # words: how many rows clusters have drawn, and how many clusters are done
ANY = 1 << 30  # registers
Loads = dict[Key, tuple[Load, Var]]  # each with the variable of its loop


@record
class StayingLaunch(Launch):
    """`given`: loads of a row's own elements. `kept`: of parameters."""

    given: Loads = field(default_factory=dict)
    kept: Loads = field(default_factory=dict)
    at_once: int = 1

    @property
    def blocks(self) -> int:
        return min(self.points, (FOUND if self.parts > 2 else MULTIPROCESSORS) * self.at_once // self.parts) * self.parts


def staying(at: Launch, most: int) -> Launch:
    """The launch of rows for which clusters of blocks stay; else `at` itself. `most`: bytes of a block."""
    return min(forms(at, most), key=lambda x: x[0], default=(0, at))[1]


def forms(at: Launch, most: int) -> list[tuple[float, Launch]]:
    """The launches of rows for which clusters stay, each with a number that is less for a better one."""
    plain = type(at) is Launch and at.team > 1 and at.lanes == 1 and not at.peel and at.points >= TURNS * FOUND // PARTS[-1]
    if not plain or most < LARGEST or not (found := _rows(at)):
        return []
    kernel, row, given, kept = found
    loops, own, made = row_loops(kernel), sum(_sizes(given)), list[tuple[float, Launch]]()
    stored = [x.buffer for s in loops for x in s.body if isinstance(x, Store) and isinstance(x.buffer, Buffer)]
    moved = own + sum(b.dtype.itemsize for b in stored)
    small = at.points * row.extent * moved < CACHED and not (kept and row.extent * own >= CACHED_ROW)
    if small or row.extent * moved < LEAST[2 if max(_sizes(given)) <= 2 else 4]:
        return []
    held = [*(k[0].dtype.itemsize for k in row.keys), *(4 for _ in row.locals)]  # type: ignore[attr-defined]
    whole = LINE // min(_sizes(given))
    flying = FLYING if kept or max(_sizes(given)) <= 2 or at.parts > CLUSTER else LONG_FLYING
    wide = WIDE if max(_sizes(given)) <= 4 else ()  # of f64 they were not timed
    for known, clusters in product((kept, {}), (PARTS, wide)):  # without room for parameters, each row reads them again
        for parts, at_once, rounds in product(clusters, AT_ONCE, ROUNDS) if not made else ():
            part = -(-row.extent // (whole * parts)) * whole
            team = -(-part // (row.size * rounds * WARP)) * WARP
            shared, warps = sum(_room(part * n) for n in _sizes(known | given)), parts * team // WARP
            told, registers = _room(2 * 8 * (warps + 2)), REST + rounds * row.size * sum(held) // 4 + EACH * (warps // WARP)
            room = min((most + RESERVED) // (shared + told + RESERVED), FILE // (team * registers))
            fits = LEAST_TEAM <= team <= MOST_TEAM and THREADS[0] <= team * at_once <= THREADS[1]
            if not fits or room < at_once or row.extent <= part * (parts - 1):
                continue
            form = StayingLaunch(
                kernel, team, team, shared, row=replace(row, rounds=rounds), parts=parts, part=part, adjacent=True,
                words=4 * parts * sum(len(s.reduces) for s in loops) + 1, counters=DRAWN, given=given, kept=known,
                clustered=True, at_once=at_once,
            )  # fmt: skip
            if at.points * parts >= TURNS * form.blocks:
                off, idle = math.log(at_once * part * moved / flying), rounds * row.size * team / part - 1
                made.append((max(-off, OVER * off) + idle + LONE * (at_once == 1) + SHORT * (rounds == 2), form))
    return made


def _rows(at: Launch) -> tuple[Kernel, Row, Loads, Loads] | None:
    """The kernel of rows for which clusters may stay, a row as one thread has it, and what `_loaded` finds; None if that gains
    nothing."""
    again = recomputed(at.kernel, narrow=False)
    kernel = again if again and _pairs(again) else recomputed(at.kernel) or at.kernel
    found = row_of(kernel, (1,), ANY, packed=True) or row_of(kernel, (1,), ANY)
    if not found or not parted(kernel, may_overlap(kernel)) or not stores_in_loops(kernel):
        return None
    row, loops = found[1], row_loops(kernel)
    given, kept = _loaded(at, kernel, row, loops) or ({}, {})
    if not given or row.size * min(_sizes(kept | given)) < LEAST_COPY[row.extent * sum(_sizes(given)) >= SHORT_ROW]:
        return None
    once, wide = sum(len(s.reduces) for s in loops) - len(_pairs(kernel)) == 1, max(_sizes(given))
    short = wide <= 2 and row.size * wide == BYTES and row.extent * sum(_sizes(given)) <= PLAIN
    softened = any(r.op == "max" for s in loops for r in s.reduces) and _sizes(given) == [4] and row.size * 4 == BYTES
    long = (softened and LONG[0] < row.extent * 4 <= LONG[1]) or at.parts > CLUSTER
    return (kernel, row, given, kept) if kept or (once and (short or long)) else None


def _sizes(found: Loads) -> list[int]:
    """Bytes of an element of each."""
    return [x.buffer.dtype.itemsize for x, _ in found.values()]


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _loaded(at: Launch, kernel: Kernel, row: Row, loops: list[Loop]) -> tuple[Loads, Loads] | None:
    """The loads of a row's own elements, all of which the first loop does, and those of parameters. None: there are others."""
    grid, found = {v for v, _ in kernel.grid}, list[Loads]()
    for s in loops:
        own = loads(s.body, [r.value for r in s.reduces], s.var, row.size)
        inside = [x for x in walk((s.body, s.reduces)) if isinstance(x, Load) and not isinstance(x.buffer, Local)]
        known = all(e is s.var or e in grid for x in own for e in walk(x.index) if isinstance(e, Var | Load))
        searched = any(r.op in EXTREMES for r in s.reduces)
        if {*map(id, own)} != {*map(id, inside)} or any(x.guard is not None for x in own) or not known or searched:
            return None
        found.append({key_of(x, s.var): (x, s.var) for x in own})
    every = {key: load for each in found[::-1] for key, load in each.items()}
    kept = {key: (x, var) for key, (x, var) in every.items() if grid.isdisjoint(walk(x.index))}
    given = {key: load for key, load in every.items() if key not in kept}
    alone = {b for b, free in zip(kernel.buffers, at.unaliased) if free and not b.writable}
    return (given, kept) if given.keys() <= found[0].keys() and alone.issuperset(x.buffer for x, _ in kept.values()) else None


def _pairs(kernel: Kernel) -> dict[int, Loop]:
    """Loops that are computed with the one in front, by that one's id: then blocks wait for each other once."""
    found = dict[int, Loop]()
    for s, t in pairwise(row_loops(kernel)):
        plain = all(isinstance(x, Let) for x in (*s.body, *t.body)) and len(s.reduces) == len(t.reduces) == 1
        if plain and not any(s is x for x in found.values()) and (_is_variance(kernel, s, t) or _is_exponentials(s, t)):
            found[id(s)] = t
    return found


def _is_exponentials(greatest: Loop, summed: Loop) -> bool:
    """Whether a loop only adds the exponentials of what elements are away from the greatest one, which another loop finds."""
    (most,), (total,) = greatest.reduces, summed.reduces
    if (most.op, total.op) != ("max", "add") or {most.value.dtype, total.value.dtype} != {f32} or not is_exp(total.value):
        return False
    (off,) = total.value.args  # type: ignore[union-attr]
    if not isinstance(off, Alu) or off.op != "sub" or off.args[1] is not most.result:
        return False
    return expr_key(off.args[0], summed.var) == expr_key(most.value, greatest.var)


def _is_variance(kernel: Kernel, summed: Loop, squared: Loop) -> bool:
    """Whether a loop only adds the squares of what elements are away from their mean, by the sum of another loop."""
    (total,), (r,) = summed.reduces, squared.reduces
    if {total.op, r.op} != {"add"} or r.value.dtype != f32 or not isinstance(r.value, Alu):
        return False
    means = [s.var for s in kernel.body if isinstance(s, Let) and isinstance(s.value, Alu) and s.value.op == "div"
             and s.value.args[0] is total.result and is_const(s.value.args[1], summed.extent)]  # fmt: skip
    off, other = (*r.value.args, None, None)[:2]
    if r.value.op != "mul" or off is not other or not isinstance(off, Alu) or off.op != "sub" or off.args[1] not in means:
        return False
    return expr_key(off.args[0], squared.var) == expr_key(total.value, summed.var)


class StayingWriter(CudaWriter):
    launch: StayingLaunch
    headers = ("staying.h",)
    aligned = ALIGNED
    following = False  # whether the copies of the next row have been started

    def __init__(self, launch: StayingLaunch) -> None:
        super().__init__(launch)
        self.occupancy, self.places = f", {launch.at_once}", dict[Key, str]()
        self.pairs = _pairs(launch.kernel)

    def coordinates(self) -> Iterator[str]:
        yield f"const int me = threadIdx.x % {self.launch.team};"
        yield f"const rlx_index part = blockIdx.x % {self.launch.parts};"

    def body(self) -> None:
        at, row, offset = self.launch, self.row, 0
        assert row is not None
        last = row.extent - at.part * (at.parts - 1)
        self.line(f"const rlx_index own = {at.part if last == at.part else f'part == {at.parts - 1} ? {last} : {at.part}'};")
        if not self.kernel.locals:  # else declare_locals has declared it
            self.line(f"extern __shared__ __align__({ALIGNED}) unsigned char rlx_shared[];")
        for key, (x, _) in (at.kept | at.given).items():
            self.places[key], element = self.fresh("h"), CUDA.element(x.buffer.dtype)
            self.line(f"{element}* const {self.places[key]} = ({element}*)(rlx_shared + {offset});")
            offset += _room(at.part * x.buffer.dtype.itemsize)
        with self.scope([f"for (rlx_index i = me * {row.size}; i < own; i += {at.team * row.size}) {{"]):
            self.bring(at.kept, row.size)
        with self.scope(["const auto copy = [&](rlx_uindex line) {"]):
            with self.scope([f"if (line < {at.points}) {{"]):
                self.of_line()
                place = f"const rlx_index i = (n * {at.team} + me) * {row.size};"
                with self.scope(["#pragma unroll", f"for (int n = 0; n < {row.rounds}; n++) {{", place, "if (i < own) {"], 2):
                    self.bring(at.given, row.size)
            self.line("rlx_copies_end();")
        self.lines[-1] += ";"
        clusters = f"gridDim.x / {at.parts}"
        self.line(f"rlx_uindex line = blockIdx.x / {at.parts}, next = line + {clusters};")
        self.line("copy(line);")
        sizes = f"{at.team}, {at.parts}, {at.part // row.size}, {last // row.size}, {row.size}"
        self.line(f"rlx_staying<{sizes}> all = {{(int)part, rlx_counters, 2 * {clusters}}};")
        self.line("all.start();")
        with self.scope([f"for (; line < {at.points}; line = next, next = all.next) {{"]):
            self.line("all.draw();")
            self.of_line()
            self.line("const bool spare = false;  // no other cluster has this row, too")
            self.line("rlx_copies_wait<0>();")
            self.block(self.kernel.body)
        self.line(f"all.forget({clusters});")

    def of_line(self) -> None:
        for text in self.of_point("line"):
            self.line(text)

    def bring(self, found: Loads, size: int) -> None:
        """Start copies of the vector at element i of this block's part."""
        for key, (x, var) in found.items():
            index = self.at_first(x.index, var, f"(part * {self.launch.part} + i)")
            self.names.pop(var)
            self.line(f"rlx_bring<{size}>({self.places[key]} + i, {self.names[x.buffer]} + {index});")

    def part_of_row(self, s: Loop, row: Row, first: str, body: Callable[[], None]) -> None:
        super().part_of_row(s, row, first, body)
        if not self.following:  # the first loop has read all of this row
            self.line("copy(next);")
            self.following = True

    def spread(self, s: Loop) -> None:
        if any(s is t for t in self.pairs.values()):
            return
        if (other := self.pairs.get(id(s))) is None:
            return super().spread(s)
        found = self.moments(s) if s.reduces[0].op == "add" else self.exponentials(s, other)
        self.names[s.reduces[0].result], self.names[other.reduces[0].result] = f"{found}.first", f"{found}.second"

    def over_row(self, s: Loop, combine: Callable[[list[str]], None]) -> None:
        row, i = self.row, self.fresh("i")
        assert row is not None
        self.part_of_row(s, row, i, lambda: self.in_vectors(s.body, [r.value for r in s.reduces], s.var, row.size, i, combine))

    def moments(self, s: Loop) -> str:
        first, away, squares, found = map(self.fresh, ("first", "away", "squares", "found"))
        self.line(f"float {first} = 0, {away} = 0, {squares} = 0;")

        def combine(values: list[str]) -> None:
            self.line(f"if ({self.round} == 0 && v == 0) {first} = {values[0]};")
            off = self.fix("d", f32, f"{values[0]} - {first}")
            self.line(f"{away} += {off}, {squares} = __fmaf_rn({off}, {off}, {squares});")

        self.over_row(s, combine)
        self.line(f"const rlx_pair {found} = all.moments({first}, {away}, {squares});")
        return found

    def exponentials(self, s: Loop, other: Loop) -> str:
        """The sum is of what elements are away from the greatest one of the warp, until all are known."""
        top, near, total, found = map(self.fresh, ("top", "near", "total", "found"))
        self.line(f"float {top} = -INFINITY, {total} = 0;")
        self.over_row(s, lambda values: self.line(f"{top} = rlx_max({top}, {values[0]});"))
        self.line(f"const float {near} = all.near({top});")
        self.names[s.reduces[0].result] = near
        self.over_row(other, lambda values: self.line(f"{total} += {values[0]};"))
        self.line(f"const rlx_pair {found} = all.exponentials({top}, {near}, {total});")
        return found

    def beyond(self, row: Row, first: str, place: str) -> str:
        return f"{place} >= own"

    def fetch_vector(self, x: Load, to: str, var: Var, size: int, first: str, how: str) -> None:
        if (place := self.places.get(key_of(x, var))) is None:
            return super().fetch_vector(x, to, var, size, first, how)
        self.line(f"rlx_fetch<{size}>({to}, {place} + ({first} - part * {self.launch.part}));")


__all__ = ["StayingLaunch", "StayingWriter", "staying"]

"""Register tiles: the building blocks of contractions and attention, each parametrised by plain numbers.

`tile_function` multiplies a few rows of `a` by a panel of `b`, with the sums in registers. The other functions copy a matrix to
scratch in the dtype of the sums, as it is or transposed, if its layout or dtype would slow down every tile. Offsets are folded
into addresses when the code is generated, so that a tile's loop has only loads, broadcasts and multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from rlx.backends.cpu.abi import LINE
from rlx.backends.cpu.dots import Dot
from rlx.backends.cpu.kernels.module import divided, step
from rlx.host import alu
from rlx.host.emit import Emitter, V, stored, vector
from rlx.ir.dtype import DType
from rlx.ir.kernel import Levels
from rlx.records import record

UNROLLED = 64  # copies of vectors in the code of a row's levels
HALF_OFFSETS = 0x40404040  # 64 for each element of a group of four: half of what is subtracted to make a u8 an i8


@record
class Layout:
    """Layout of a matrix: (r, c) is stored `row` * r + `column` * c elements of `dtype` after its base. With levels (as of
    rlx.ir.kernel.Operand) that holds inside the innermost level; rows and columns that are numbers are inside it. `pitches`: odd
    multiples of the bytes of a row, 1, 3, 5 …, where these are known at run time only; for rows that are numbers."""

    dtype: DType
    row: int
    column: int = 1
    row_levels: Levels = ()
    col_levels: Levels = ()
    pitches: tuple[V, ...] = ()

    def byte(self, r: int, c: int) -> int:
        return (r * self.row + c * self.column) * self.dtype.itemsize

    def at(self, e: Emitter, base: V, r: V | int, c: V | int = 0) -> V:
        """The address of (r, c)."""
        if self.pitches and isinstance(r, int) and r:
            even = r & -r  # a factor that addresses of x86 have, up to 8
            base, r = e.gep(base, e.bin("shl", self.pitches[r // even // 2], even.bit_length() - 1)), 0
        for index, nbytes, levels in ((r, self.byte(1, 0), self.row_levels), (c, self.byte(0, 1), self.col_levels)):
            if isinstance(index, int):
                base = e.gep(base, index * nbytes)
                continue
            for count, stride in levels:
                inside, index = divided(e, index, count)
                base, nbytes = step(e, base, inside, nbytes), stride * self.dtype.itemsize
            base = step(e, base, index, nbytes)
        return base

    def with_pitch(self, e: Emitter, pitch: V, rows: int) -> Layout:
        """The same with so many bytes for a row, of which there are at most `rows`."""
        return replace(self, pitches=(pitch, *(e.bin("mul", pitch, n) for n in range(3, rows, 2))))

    def in_groups(self, word: DType, group: int) -> Layout:
        """The same matrix with `group` adjacent elements of a row as one element."""
        rows = tuple((count, stride // group) for count, stride in self.row_levels)
        columns = tuple((count // (group if n == 0 else 1), stride // group) for n, (count, stride) in enumerate(self.col_levels))
        return Layout(word, self.row // group, 1, rows, columns)


@record
class Tile:
    """`rows` x (`vectors` x `lanes`) sums of `acc`, rows `pitch` sums apart; `unroll` steps of k have separate sums. `tail`:
    columns of the last vector that b has in memory (0: all of them); the others are not read. `careful`: a zero element of a
    gives zero products even if b is NaN or infinite. `group`: an element is two bf16 numbers (denormals count as zero), or four
    integers, u8 in a and i8 in b; one instruction sums all their products. `ahead`, `rows_ahead`: bytes to prefetch per step of
    k, from one place each. `ahead_of`: those of them that are wanted, 0: all. `near`: steps of k by which b is prefetched
    into the L1 cache, 0: it is not. `adds`: to the previous sums."""

    rows: int
    vectors: int
    lanes: int
    unroll: int
    tail: int
    acc: DType
    pitch: int
    careful: bool = False
    dot: Dot | None = None
    ahead: int = 0
    rows_ahead: int = 0
    ahead_of: int = 0
    near: int = 0
    adds: bool = False


def convert(e: Emitter, raw: V, source: DType, to: DType) -> V:
    """Convert an element (or a vector) as loaded from memory to its compute dtype; integers wrap."""
    return alu.cast(e, alu.from_memory(e, raw, source), source, to)


def lane_mask(lanes: int, valid: int) -> V:
    """A mask of the first `valid` lanes."""
    return V("<" + ", ".join(f"i1 {str(x < valid).lower()}" for x in range(lanes)) + ">", vector("i1", lanes))


def load_line(e: Emitter, at: V, source: Layout, lanes: int, to: DType, tail: int = 0, mask: V | None = None) -> V:
    """Load `lanes` elements of a row from `at` on, converted to `to`. Lanes past `tail` (0: no tail) or off in `mask` are not
    read and give zero. With a column stride of 0, one element is broadcast to all lanes, whatever the mask."""
    dtype, align = source.dtype, source.dtype.itemsize
    ty = vector(alu.memory_type(dtype), lanes)
    if source.column == 0:
        return e.splat(convert(e, e.load(alu.memory_type(dtype), at, align), dtype, to), lanes)
    if tail % lanes:
        mask = lane_mask(lanes, tail)
    if mask is None and (source.column == 1 or lanes == 1):
        return convert(e, e.load(ty, at, align), dtype, to)
    kind, places = "masked.load", at
    if source.column != 1:
        offsets = "<" + ", ".join(f"i64 {source.byte(0, x)}" for x in range(lanes)) + ">"
        kind, places = "masked.gather", e.op(vector("ptr", lanes), f"getelementptr i8, {at}, <{lanes} x i64> {offsets}")
    args = V(f"align {align} {places.text}", places.ty), mask or lane_mask(lanes, lanes), V("zeroinitializer", ty)
    return convert(e, e.intrinsic(kind, *args, suffix=(ty, places.ty), returns=ty), dtype, to)


def tile_function(
    e: Emitter, a: V, b: V, sums: V, k: int | V, factors: V | None = None, *ahead: V,
    t: Tile, from_a: Layout, from_b: Layout, first: V | None = None, runs: tuple[V, ...] | None = None, paces: Sequence[V] = (),
) -> None:  # fmt: skip
    """sums[rows][vectors*lanes] = a[rows, k] @ b[k, vectors*lanes]. If k is only known at run time, it is at least 1, and whole
    turns of the loop. `factors`: one per row; the previous sums, times the factor, are added. `ahead`: where t.ahead, and
    t.rows_ahead, bytes per step of k are prefetched from. `first`: the column of a at which k begins, if a's columns lie in
    levels: k is whole runs of the innermost one. `runs`: the steps of a run, and the bytes from one to the next, if there is
    one level, and a begins with k. `paces`: what t.ahead and t.rows_ahead are in a turn, if only their lines are known here."""
    ty, size, dot = vector(stored(t.acc), t.lanes), t.acc.itemsize, t.dot
    side, signed = (dot.side, dot.signed) if dot else (1, False)
    heights, across = -(-t.rows // side) + signed, t.vectors * side  # sums; if signed, a further row sums b alone
    count = heights * across
    places = [(r * t.pitch + v * t.lanes) * size for r in range(t.rows) for v in range(t.vectors)]
    totals = [V("zeroinitializer", ty)] * (t.unroll * count)
    in_place = count == len(places) and side == 1  # a sum is where the result has it
    if t.adds and in_place:
        totals[:count] = [e.load(ty, e.gep(sums, at), size) for at in places]
    if factors is not None:
        scales = [e.splat(e.load(stored(t.acc), e.gep(factors, r * size), size), t.lanes) for r in range(t.rows)]
        totals = [e.bin("fmul", e.load(ty, e.gep(sums, at), size), scales[x // t.vectors]) for x, at in enumerate(places)]

    element, lanes = (dot.word, t.lanes // side) if dot else (t.acc, t.lanes)

    def one(at_a: V, at_b: V, u: int, partial: list[V]) -> list[V]:
        """Step u of k, relative to the addresses."""
        if t.near:
            prefetch(e, [from_b.at(e, at_b, u + t.near)], from_b.byte(0, t.vectors * t.lanes), level=1)
        tails = [0] * (across - 1) + [t.tail]
        lines = [from_b.at(e, at_b, u, v * lanes) for v in range(across)]
        if side == 2:
            rows, out = [left(e, t, from_a, at_a, r, u) for r in range(heights)], list(partial)
            for x, line in enumerate(lines):
                column = load_line(e, line, from_b, lanes, element)
                for r, row in enumerate(rows):
                    out[r * across + x] = multiply_add(e, t, row, column, partial[r * across + x])
            return out
        columns = [load_line(e, line, from_b, lanes, element, tail) for line, tail in zip(lines, tails)]
        out: list[V] = []
        for r in range(heights):
            row = left(e, t, from_a, at_a, r, u)
            sums_of_row = partial[r * across : (r + 1) * across]
            out += [multiply_add(e, t, row, column, total) for column, total in zip(columns, sums_of_row)]
        return out

    totals = _over_k(e, t, one, k, [a, b, *ahead], totals, (from_a, from_b), first, runs, paces)
    for at, total in zip(places, finished(e, t, totals)):
        if t.adds and not in_place:
            total = e.bin("fadd" if t.acc.is_float else "add", e.load(ty, e.gep(sums, at), size), total)
        e.store(total, e.gep(sums, at), size)


def _over_k(
    e: Emitter, t: Tile, one: Callable[[V, V, int, list[V]], list[V]], k: int | V, start: list[V], totals: list[V],
    layouts: tuple[Layout, Layout], first: V | None, runs: tuple[V, ...] | None, paces: Sequence[V],
) -> list[V]:  # fmt: skip
    """The sums of tile_function. `one`: adds one step, relative to addresses of a and b, to sums. `start`: these addresses, and
    that to prefetch from if there is one. `totals`: the first values of all separate sums."""
    (from_a, from_b), (a, *others), count = layouts, start, len(totals) // t.unroll
    held = len(others) - 1  # addresses to prefetch from

    def steps(k: int | V, a: V, carried: Sequence[V]) -> list[V]:
        """Whole unrolled steps: addresses behind them, and totals."""
        with e.loop(0, k, t.unroll, carried=[a, *carried], nonempty=True) as loop:
            at_a, at_b, *now = loop.carried
            loop.next = [from_a.at(e, at_a, 0, t.unroll), from_b.at(e, at_b, t.unroll)]
            for n, (place, each) in enumerate(zip(now[:held], [n for n in (t.ahead, t.rows_ahead) if n])):
                loop.next += prefetch(e, [place], t.unroll * each, each, t.ahead_of, pace=paces[n] if paces else None)
            for u in range(t.unroll):
                loop.next += one(at_a, at_b, u, now[held + u * count :][:count])
        return loop.results

    if runs:
        rest = 0
        with e.loop(0, k, runs[0], carried=[a, *others, *totals], nonempty=True) as loop:
            at_a, *carried = loop.carried
            loop.next = [e.gep(at_a, runs[1]), *steps(runs[0], at_a, carried)[1:]]
        at_a, at_b, *found = loop.results
    elif first is None:
        rest = k % t.unroll if isinstance(k, int) else 0
        at_a, at_b, *found = steps(k - rest if isinstance(k, int) else k, a, [*others, *totals])
    else:
        assert isinstance(k, int), "a depth known at run time has no levels"
        run, mine, rest = from_a.col_levels[0][0], slice(held, held + count), 0
        odd = run % t.unroll
        with e.loop(0, k, run, carried=[*others, *totals]) as loop:
            at_a, at_b, *now = steps(run - odd, from_a.at(e, a, 0, e.bin("add", first, loop.index)), loop.carried)
            for u in range(odd):
                now[mine] = one(at_a, at_b, u, now[mine])
            loop.next = [from_b.at(e, at_b, odd), *now]
        at_a, (at_b, *found) = a, loop.results
    found = found[held:]
    while len(found) > count:
        half = len(found) // 2
        found = [e.bin("fadd" if t.acc.is_float else "add", x, y) for x, y in zip(found[:half], found[half:])]
    for u in range(rest):
        found = one(at_a, at_b, u, found)
    return found


def multiply_add(e: Emitter, t: Tile, row: V, column: V, total: V) -> V:
    if t.dot:
        return t.dot.add(e, total, row, column)
    if not t.acc.is_float:
        return e.bin("add", total, e.bin("mul", row, column))
    added = e.intrinsic("fmuladd", row, column, total)
    return e.select(e.cmp("une", row, e.const(row.ty, 0.0)), added, total) if t.careful else added


def left(e: Emitter, t: Tile, source: Layout, at: V, r: int, u: int) -> V:
    """The left operand for row r of a tile's sums at step u: an element in all lanes; or those of two rows, if an instruction has
    two; or 64 in each byte, for the sums of b alone."""
    if t.dot and t.dot.side == 2:
        pair = V("poison", vector("i64", 2))
        for x in range(2):
            word = e.load("i64", source.at(e, at, min(2 * r + x, t.rows - 1), u), 1)
            pair = e.op(pair.ty, f"insertelement {pair}, {word}, i64 {x}")
        return pair
    if r == t.rows:
        return e.const(vector("i32", t.lanes), HALF_OFFSETS)
    row = load_line(e, source.at(e, at, r, u), Layout(source.dtype, 0, 0), t.lanes, t.dot.word if t.dot else t.acc)
    return e.bin("xor", row, 2 * HALF_OFFSETS - (1 << 32)) if t.dot and t.dot.signed else row  # u8 to i8: minus 128


def finished(e: Emitter, t: Tile, totals: list[V]) -> list[V]:
    """The sums of a tile, row by row."""
    if t.dot and t.dot.signed:
        offsets = [e.bin("shl", x, 1) for x in totals[-t.vectors :]]
        return [e.bin("add", x, offsets[n % t.vectors]) for n, x in enumerate(totals[: -t.vectors])]
    return rows_of_blocks(e, totals, 2 * t.vectors) if t.dot and t.dot.side == 2 else totals


def rows_of_blocks(e: Emitter, blocks: list[V], across: int) -> list[V]:
    """Blocks of 2 x 2 sums, `across` in a row of blocks, as vectors along rows of sums."""
    out: list[V] = []
    for at in range(0, len(blocks), across):
        row = blocks[at : at + across]
        for picks in (0, 1, 4, 5), (2, 3, 6, 7):
            out += [e.shuffle(x, picks, y) for x, y in zip(row[::2], row[1::2])]
    return out


def prefetch(
    e: Emitter, places: list[V], nbytes: int, pitch: int = 0, wanted: int = 0, level: int = 2, pace: V | None = None
) -> list[V]:
    """Prefetch that many bytes from each place into the caches from `level` on; returns the places after them, or `pace` bytes
    further on. `wanted`: if not 0, only so many of each `pitch` bytes."""
    lines = range(0, nbytes, LINE) if not wanted else [x + y for x in range(0, nbytes, pitch) for y in range(0, wanted, LINE)]
    for at in places:
        for line in lines:
            e.prefetch(e.gep(at, line), level)
    return [e.gep(at, pace or nbytes) for at in places]


def stage_levels_function(
    e: Emitter, start: V, out: V, first: V, stop: V, columns: int, source: Layout, to: Layout, lanes: int, group: int
) -> None:
    """Rows `first` to `stop` of a matrix in levels, as stage_rows_function has them, except that rows of `to` are padded to one
    vector more. `start`: where row 0 is. Inner levels of up to UNROLLED copies have no loops: their places are constants."""
    lanes, counts = lanes if source.column == 1 else 1, [count for count, _ in source.col_levels]
    sizes, strides = [*counts, columns // prod(counts)], [source.column, *(stride for _, stride in source.col_levels)]

    def copied(level: int, here: V, there: V) -> None:
        """All columns of the levels up to this one."""
        steps = strides[level] * source.dtype.itemsize, to.byte(0, prod(sizes[:level]))
        if level == 0:
            _copy_run(e, here, there, sizes[0], source, to, lanes, unrolled=True)
        elif prod(sizes[: level + 1]) // min(lanes, sizes[0]) <= UNROLLED:
            for n in range(sizes[level]):
                copied(level - 1, e.gep(here, n * steps[0]), e.gep(there, n * steps[1]))
        else:
            with e.loop(0, sizes[level]) as at:
                copied(level - 1, step(e, here, at.index, steps[0]), step(e, there, at.index, steps[1]))

    with e.loop(first, stop) as row:
        line, copy = source.at(e, start, row.index), to.at(e, out, e.bin("sub", row.index, first))
        copied(len(sizes) - 1, line, copy)
        for column in range(columns, -(-columns // group) * group):
            e.store(e.const(stored(to.dtype), 0), to.at(e, copy, 0, column), to.dtype.itemsize)


def _copy_run(e: Emitter, start: V, out: V, columns: int, source: Layout, to: Layout, lanes: int, unrolled: bool) -> None:
    """Columns of a row that follow each other."""
    whole, line = columns - columns % lanes, Layout(source.dtype, 0, source.column)

    def move(column: V | int, tail: int) -> None:
        value = load_line(e, line.at(e, start, 0, column), source, lanes, to.dtype, tail)
        e.store(value, to.at(e, out, 0, column), to.dtype.itemsize)

    if unrolled and whole <= UNROLLED * lanes:
        for column in range(0, whole, lanes):
            move(column, 0)
    else:
        with e.loop(0, whole, lanes) as at:
            move(at.index, 0)
    if columns % lanes:
        move(whole, columns % lanes)


def stage_rows_function(
    e: Emitter, start: V, out: V, rows: V, columns: int, source: Layout, to: Layout, lanes: int, group: int = 1
) -> None:
    """out[rows, columns] = start[rows, columns] in the dtype of `to`, whose rows are padded to whole vectors. The padding is
    zero, at least up to a multiple of `group`."""
    lanes = lanes if source.column == 1 else 1
    with e.loop(0, rows) as row:
        line, copy = source.at(e, start, row.index), to.at(e, out, row.index)
        _copy_run(e, line, copy, columns, source, to, lanes, unrolled=False)
        for column in range(columns, -(-columns // group) * group) if lanes == 1 else ():
            e.store(e.const(stored(to.dtype), 0), to.at(e, copy, 0, column), to.dtype.itemsize)


def transpose_function(
    e: Emitter, start: V, out: V, rows: V, first: V, stop: V,
    height: int, columns: int, source: Layout, to: Layout, side: int, scale: float = 1.0,
) -> None:  # fmt: skip
    """out[c - first][r] = start[r, c] * scale for r < height and columns c from `first` to `stop` of `columns`, in squares
    transposed in registers. Rows from `rows` on repeat the last one. A square that would reach past the last column starts
    earlier: then, if first > 0, up to `side` rows before `out` are written too."""
    have = min(side, columns)
    with e.loop(0, height, side) as group:
        at_rows = [e.bin("add", group.index, e.i64(r)) for r in range(side)]
        last = e.bin("sub", rows, e.i64(1))
        offsets = [e.bin("mul", e.intrinsic("smin", r, last), e.i64(source.byte(1, 0))) for r in at_rows]
        with e.loop(first, stop, side, nonempty=True) as at:
            column = e.intrinsic("smin", at.index, e.i64(columns - have))
            line = source.at(e, start, 0, column)
            lines = [load_line(e, e.gep(line, offset), source, side, to.dtype, have) for offset in offsets]
            if scale != 1.0:
                lines = [e.bin("fmul", x, e.const(x.ty, scale)) for x in lines]
            place = to.at(e, out, e.bin("sub", column, first), group.index)
            for c, value in enumerate(transposed(e, lines, to.dtype.itemsize)[:have]):
                e.store(value, to.at(e, place, c), to.dtype.itemsize)


def halves(e: Emitter, a: V, b: V, block: int) -> tuple[V, V]:
    """Two vectors hold 2x2 squares of blocks of `block` lanes. Returns the upper and the lower rows of the transposed squares."""
    lanes = a.lanes
    upper = [x if not x & block else lanes + x - block for x in range(lanes)]
    lower = [x + block if not x & block else lanes + x for x in range(lanes)]
    masks = ("<" + ", ".join(f"i32 {x}" for x in m) + ">" for m in (upper, lower))
    above, below = (e.op(a.ty, f"shufflevector {a}, {b}, <{lanes} x i32> {m}") for m in masks)
    return above, below


def transposed(e: Emitter, rows: list[V], itemsize: int) -> list[V]:
    """Transpose a square of lanes x lanes values: first elements are interleaved inside blocks of 128 bits, then whole blocks are
    exchanged. Each of these shuffles is one instruction, of a kind that LLVM recognises soon."""
    n, step, rows = len(rows), 1, list(rows)
    block = min(n, 16 // itemsize)
    columns = [list(range(n)) for _ in rows]  # of the lanes of each row
    while step < n:
        half = block // 2
        starts = [b + g for b in range(0, n, block) for g in range(0, half, step)] if step < block else range(0, n, 2 * block)
        length, apart = (step, half) if step < block else (block, block)
        runs = [[s + n * second + i for i in range(length)] for s in starts for second in (0, 1)]
        if step >= block:
            runs.sort()  # all blocks of the first row before those of the second
        low = [i for run in runs for i in run]
        for r in (r for r in range(n) if not r & step):
            a, b, both = rows[r], rows[r + step], columns[r] + columns[r + step]
            for at, picks in ((r, low), (r + step, [i + apart for i in low])):
                rows[at], columns[at] = e.shuffle(a, picks, b), [both[i] for i in picks]
        step *= 2
        if step == block < n:
            rows = [e.fence(row) for row in rows]
    return [row for _, row in sorted(zip((c[0] for c in columns), rows), key=lambda found: found[0])]

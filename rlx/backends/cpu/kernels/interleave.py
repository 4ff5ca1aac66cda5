"""Right operands that are made in the run, in groups of rows as dot instructions and the matrix unit sum them.

Weights are packed so before the first run (`rlx.compiler.packing`). These are copied to scratch, a panel at a time. A word holds
`group` rows of a column, the first one lowest; behind the last row are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.backends.cpu.kernels.module import step
from rlx.backends.cpu.kernels.tile import Layout, lane_mask, load_line
from rlx.host.emit import Emitter, V, stored, vector

LANES, CHUNK = 16, 4  # words in a vector, and in 128 bits of it
INFINITE = 0x7F80  # bits of a bf16 without its sign: from here on, infinite or NaN


def interleave_rows(
    e: Emitter, start: V, out: V, rows: V, *, source: Layout, columns: int, group: int, to: Layout, check: bool = False
) -> V:
    """out[words][columns] = start[rows][columns], whose rows are adjacent elements; zeros past the columns, up to whole vectors.
    `check`: returns whether all numbers, of bf16, are finite. Else true."""
    halves, bits, ty = vector("i16", 2 * LANES), 8 * source.dtype.itemsize, stored(to.dtype)

    def element(row: V, column: int, whole: bool) -> V:
        tail = min(LANES, columns - column)
        mask = None if whole else e.bin("and", e.splat(e.cmp("slt", row, rows), LANES), lane_mask(LANES, tail))
        line = load_line(e, source.at(e, start, row, column), source, LANES, source.dtype, 0 if mask else tail, mask)
        return e.convert("zext", line, ty)

    greatest, complete = e.const(halves, 0), e.bin("and", rows, -group)
    end = e.bin("and", e.bin("add", rows, LANES * group - 1), -LANES * group)
    for begin, stop, whole in ((e.i64(0), complete, True), (complete, end, False)):
        with e.loop(begin, stop, group, carried=[greatest]) as at:
            line, found = to.at(e, out, e.bin("udiv", at.index, group)), at.carried[0]
            for c in range(0, columns, LANES):
                parts = [element(e.bin("add", at.index, n), c, whole) for n in range(group)]
                word = parts[0]
                for n, part in enumerate(parts[1:], 1):
                    word = e.bin("or", word, e.bin("shl", part, n * bits))
                e.store(word, to.at(e, line, 0, c), to.dtype.itemsize)
                if check:
                    size = e.bin("and", e.op(halves, f"bitcast {word} to {halves}"), 0x7FFF)
                    found = e.intrinsic("umax", found, size)
            at.next = [found]
        (greatest,) = at.results
    return e.cmp("ult", e.intrinsic("vector.reduce.umax", greatest, returns="i16"), INFINITE)


def interleave_columns(e: Emitter, start: V, out: V, columns: V, *, k: int, source: Layout, group: int, to: Layout) -> None:
    """The same of columns whose elements are adjacent, LANES at a time. Those past the last one, up to whole LANES, repeat it;
    others are undefined."""
    every = CHUNK * group
    with e.loop(0, columns, LANES) as across:
        at, place = source.at(e, start, 0, across.index), to.at(e, out, 0, across.index)
        left = e.bin("sub", columns, across.index)
        full, last = e.cmp("sge", left, e.i64(LANES)), e.bin("sub", left, 1)
        near = [e.intrinsic("smin", e.i64(n), last) for n in range(LANES)]
        for here, offsets in ((full, [e.i64(n) for n in range(LANES)]), (e.bin("xor", full, True), near)):
            with e.when(here):
                chunk = partial(_turned, e, place, [source.at(e, at, 0, n) for n in offsets], Layout(source.dtype, 1), every, to)
                with e.loop(0, k // every) as turn:
                    chunk(turn.index, 0)
                if k % every:
                    chunk(e.i64(k // every), k % every)
        with e.loop(-(-k // every) * CHUNK, -(-k // (LANES * group)) * LANES) as row:
            e.store(e.const(vector("i32", LANES), 0), to.at(e, place, row.index), to.dtype.itemsize)


def _turned(e: Emitter, out: V, lines: Sequence[V], raw: Layout, every: int, to: Layout, number: V, few: int) -> None:
    """CHUNK words of each of LANES columns. Four words of four columns come into place as they are loaded; the squares of 128
    bits are then transposed."""
    ty, part, rows = vector("i32", LANES), vector("i32", CHUNK), list[V]()
    for r in range(CHUNK):
        row = V("poison", ty)
        for n in range(0, LANES, CHUNK):
            words = load_line(e, step(e, lines[r + n], number, every * raw.dtype.itemsize), raw, every, raw.dtype, few)
            words = e.op(part, f"bitcast {words} to {part}")
            row = e.intrinsic("vector.insert", row, words, e.i64(n), suffix=(ty, part), returns=ty)
        rows.append(row)
    rows = [x for n in (0, 2) for x in _interleaved(e, rows[n], rows[n + 1], 1)]
    for n, (left, right) in enumerate(zip(rows[:2], rows[2:])):
        for m, words in enumerate(_interleaved(e, left, right, 2)):
            e.store(words, to.at(e, out, e.bin("add", e.bin("mul", number, CHUNK), 2 * n + m)), to.dtype.itemsize)


def _interleaved(e: Emitter, a: V, b: V, width: int) -> tuple[V, V]:
    """Groups of `width` lanes of a and b in turn: those of the lower and of the upper half of each 128 bits."""
    runs = [[at + i for i in range(width)] for at in range(0, CHUNK // 2, width)]
    low = [n + i for n in range(0, LANES, CHUNK) for run in runs for i in (*run, *(LANES + i for i in run))]
    return e.shuffle(a, low, b), e.shuffle(a, [i + CHUNK // 2 for i in low], b)

"""The building blocks of fused attention besides tiles: masks and softmax steps, each parametrised by plain numbers.
Scores are stored as [key][row] ("wide": a vector runs along query rows, so that no step of the softmax crosses lanes) or as
[row][key] ("narrow": a vector runs along keys). Nothing here depends on the whole attention kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

from rlx.backends.cpu.kernels.module import step
from rlx.backends.cpu.kernels.tile import LINE, Layout, halves, lane_mask, load_line, prefetch
from rlx.host import alu
from rlx.host.emit import Emitter, V, vector
from rlx.host.math import LN2, LOG2_E, SHIFT, log, polynomial, tanh
from rlx.ir.dtype import f32
from rlx.records import record

F32 = 4  # bytes
NEAR_ONE = (0.00831246841698885, 0.041890256106853485, 0.16667115688323975, 0.499992311000824, 1.0, 1.0)  # as math.EXP, to 1.1e-7
BESIDE = 2  # keys whose weights are computed together: each weight is a chain of dependent operations
NEAR_KEYS = 8  # how far keys and values are prefetched from the L2 cache into the L1 cache
STRETCH = 16  # vectors of a key that are multiplied in unrolled code


@record
class Mask:
    """Which keys a query sees. `kind`: "none"; "band": its own position and earlier ones, only the last `window` of
    them if that is not 0; "keep": one byte per key, 0: hidden; "add": a term added to the score."""

    kind: str
    window: int = 0


def lanes_of(e: Emitter, index: V, lanes: int) -> V:
    """Broadcast an i64 to all lanes, as i32."""
    return e.splat(e.convert("trunc", index, "i32"), lanes)


def masked(e: Emitter, m: Mask, score: V, key: V, row: V, term: V | None) -> V:
    """The scores of (row, key), positions in i32, with the mask applied: -inf where a key is hidden, even if the score was
    NaN."""
    tests = []
    if m.kind == "add" and term is not None:
        return e.bin("fadd", score, term)
    if m.kind == "keep" and term is not None:
        tests.append(e.cmp("une", term, e.const(term.ty, 0.0)))
    if m.kind == "band":
        tests.append(e.cmp("sle", key, row))
    if m.window:
        tests.append(e.cmp("sgt", key, e.bin("sub", row, m.window)))
    for seen in tests:
        score = e.select(seen, score, e.const(score.ty, -math.inf))
    return score


def seen_keys(e: Emitter, mask: V, source: Layout, keys: V, lanes: int) -> tuple[V, V]:
    """For a byte mask shared by all rows: one past the last visible key (at least 1), and whether an earlier key is
    hidden."""
    count = vector("i32", lanes)
    ones, zeros, places = (e.const(count, 1), e.const(count, 0), e.iota(lanes, "i32"))
    with e.loop(0, keys, lanes, carried=[ones, zeros]) as at:
        valid = e.cmp("slt", places, lanes_of(e, e.bin("sub", keys, at.index), lanes))
        line = load_line(e, source.at(e, mask, 0, at.index), source, lanes, f32, mask=valid)
        seen = e.bin("and", valid, e.cmp("une", line, e.const(line.ty, 0.0)))
        past = e.bin("add", e.bin("add", places, ones), lanes_of(e, at.index, lanes))
        at.next = [e.select(seen, past, at.carried[0]), e.bin("add", at.carried[1], e.select(seen, ones, zeros))]
    last, some = (e.intrinsic(f"vector.reduce.{how}", x, returns="i32") for how, x in zip(("smax", "add"), at.results))
    return e.convert("sext", last, "i64"), e.cmp("ne", last, some)


def fetch(e: Emitter, start: V, source: Layout, first: V, stop: V, columns: int) -> None:
    """Prefetch rows of a matrix into the L2 cache."""
    with e.loop(first, stop) as row:
        line = source.at(e, start, row.index)
        for nbytes in range(0, source.byte(0, columns), LINE):
            e.prefetch(e.gep(line, nbytes), level=2)


def lanes_at(e: Emitter, x: V, places: Sequence[int]) -> V:
    """These lanes of x."""
    picks = ", ".join(f"i32 {n}" for n in places)
    return e.op(vector(x.scalar, len(places)), f"shufflevector {x}, {x.ty} poison, <{len(places)} x i32> <{picks}>")


def across_lines(e: Emitter, lines: list[V], combine: Callable[[V, V], V]) -> V:
    """As many lines as they have lanes. Lane x of the result: the lanes of line x, combined while a square is transposed."""
    block = 1
    while len(lines) > 1:
        lines = [combine(*halves(e, a, b, block)) for a, b in zip(lines[::2], lines[1::2])]
        block *= 2
    return lines[0]


def highest(e: Emitter, a: V, b: V) -> V:
    """The larger of a and b; b if a is NaN. A NaN score still makes its row's sum NaN, through its weight."""
    return e.select(e.cmp("ogt", a, b), a, b)


def weight_of(e: Emitter, x: V) -> V:
    """e^x for x <= 0, exactly 0 below -87 and for -inf, NaN for NaN; relative error below 4e-7. Half the operations of a
    general exp: there is no overflow, denormals become 0, and r = x - n ln2 loses bits that matter only for tiny weights."""
    shifted = e.fma(x, e.const(x.ty, LOG2_E), e.const(x.ty, SHIFT))  # its low bits are n = round(x log2 e)
    r = e.fma(e.bin("fsub", shifted, e.const(x.ty, SHIFT)), e.const(x.ty, -LN2), x)
    bits = e.convert("bitcast", shifted, "i32")
    bits = e.bin("add", e.bin("shl", bits, e.const(bits.ty, 23)), e.const(bits.ty, 0x3F800000))
    value = e.bin("fmul", polynomial(e, r, NEAR_ONE), e.convert("bitcast", bits, "float"))
    return e.select(e.cmp("olt", x, e.const(x.ty, -87.0)), e.const(x.ty, 0.0), value)


def finite_or_zero(e: Emitter, top: V) -> V:
    """Replace -inf by 0, so that a row that sees no key has weights exp(-inf - 0) = 0."""
    return e.select(e.cmp("oeq", top, e.const(top.ty, -math.inf)), e.const(top.ty, 0.0), top)


# -- wide: scores are [key][row] -----------------------------------------------------------------------------------


def cap_wide_function(e: Emitter, scores: V, keys: V, vectors: int, lanes: int, cap: float) -> None:
    """Replace scores, already divided by the cap, by cap tanh(score)."""
    ty, line = vector("float", lanes), Layout(f32, vectors * lanes)
    with e.loop(0, keys) as at:
        for v in range(vectors):
            place = line.at(e, scores, at.index, v * lanes)
            e.store(e.bin("fmul", tanh(e, e.load(ty, place, F32)), cap), place, F32)


def mask_wide_function(
    e: Emitter, scores: V, mask: V, keys: V, key0: V, row0: V, m: Mask, source: Layout | None, vectors: int, lanes: int
) -> None:
    """Mask the scores of `keys` keys from key0 on, for rows at positions from row0 on. `source`: layout of the mask's terms as
    [key][row]."""
    ty, line = vector("float", lanes), Layout(f32, vectors * lanes)
    first = e.bin("add", lanes_of(e, row0, lanes), e.iota(lanes, "i32"))
    with e.loop(0, keys) as at:
        key, changes = lanes_of(e, e.bin("add", key0, at.index), lanes), e.const("i1", True)
        if source and not source.column and m.kind == "keep":  # skip keys seen by all rows, as most are
            changes = e.cmp("eq", e.load("i8", source.at(e, mask, at.index), 1), e.const("i8", 0))
        with e.when(changes):
            for v in range(vectors):
                place = line.at(e, scores, at.index, v * lanes)
                row = e.bin("add", first, e.const(first.ty, v * lanes))
                term = load_line(e, source.at(e, mask, at.index, v * lanes), source, lanes, f32) if source else None
                e.store(masked(e, m, e.load(ty, place, F32), key, row, term), place, F32)


def softmax_wide_function(e: Emitter, scores: V, stats: V, keys: V, rows: int, first: bool) -> None:
    """Replace scores by weights exp(score - highest so far), in vectors of all `rows`. `stats`: per row, its highest score, the
    sum of its weights, and the factor that rescales earlier sums. `first`: there are no earlier blocks."""
    ty, line = vector("float", rows), Layout(f32, rows)
    whole = e.bin("and", keys, -BESIDE)

    def over_keys(start: V, combine: Callable[[V, V], V], value: Callable[[V, V], V]) -> V:
        """Combine `start` with value(scores, their address) of every key, several keys at a time."""
        for begin, stop, count in ((e.i64(0), whole, BESIDE), (whole, keys, 1)):
            with e.loop(begin, stop, count, carried=[start]) as at:
                place = line.at(e, scores, at.index)
                both = value(e.load(vector("float", count * rows), place, F32), place)
                parts = [lanes_at(e, both, range(n * rows, n * rows + rows)) for n in range(count)]
                at.next = [reduce(combine, parts, at.carried[0])]
            (start,) = at.results
        return start

    def weigh(score: V, place: V) -> V:
        weight = weight_of(e, e.bin("fsub", score, lanes_at(e, shift, [n % rows for n in range(score.lanes)])))
        e.store(weight, place, F32)
        return weight

    before = e.const(ty, -math.inf) if first else e.load(ty, stats, F32)
    top = over_keys(before, lambda high, x: highest(e, x, high), lambda score, _: score)
    shift = finite_or_zero(e, top)
    total = over_keys(e.const(ty, 0.0), partial(e.bin, "fadd"), weigh)
    if not first:
        shrink = weight_of(e, e.bin("fsub", before, shift))
        e.store(shrink, line.at(e, stats, 2), F32)
        total = e.fma(e.load(ty, line.at(e, stats, 1), F32), shrink, total)
    e.store(top, stats, F32)
    e.store(total, line.at(e, stats, 1), F32)


# -- narrow: scores are [row][key] ---------------------------------------------------------------------------------


def dots_function(
    e: Emitter, keys: V, query: V, sums: V, out: V, values: V | None = None, *,
    source: Layout, rows: Layout, to: Layout, height: int, count: int, columns: int, lanes: int, held: bool,
    beside: tuple[Layout, int] | None = None,
) -> None:  # fmt: skip
    """out[r][x] = row r . key x for `height` rows, f32 and padded to whole vectors, and `count` keys, together no more than
    `lanes`. `held`: the rows fit into registers. `sums`: scratch, a vector for each pair. The loop over keys reads them in
    memory order, which suits the hardware prefetcher; reading several keys in parallel has a third of the speed. `beside`: layout
    of `values`, and bytes of a row of them that are prefetched with each key: few at a time, so that its own loads do not
    wait."""
    ty, span, line = vector("float", lanes), STRETCH * lanes, Layout(f32, count * lanes, lanes)

    def added(key: V, index: V | int, have: int, totals: list[V]) -> list[V]:
        """The sums of one key after adding `have` columns from `index` on."""
        at_row, at_key = rows.at(e, query, 0, index), source.at(e, key, 0, index)
        for c in range(0, have, lanes):
            value = load_line(e, source.at(e, at_key, 0, c), source, lanes, f32, min(lanes, have - c))
            parts = kept[c // lanes] if held else [e.load(ty, rows.at(e, at_row, r, c), F32) for r in range(height)]
            totals = [e.intrinsic("fmuladd", part, value, total) for part, total in zip(parts, totals)]
        return totals

    every = range(0, columns, lanes)
    kept = [[e.load(ty, rows.at(e, query, r, c), F32) for r in range(height)] for c in every] if held else []
    whole = 0 if held else columns - columns % span
    with e.loop(0, count) as x:
        key, totals = source.at(e, keys, x.index), [e.const(ty, 0.0)] * height
        if values and beside:
            prefetch(e, [source.at(e, key, NEAR_KEYS)], source.byte(0, columns), level=1)
            prefetch(e, [beside[0].at(e, values, x.index)], beside[1])
        if whole:
            with e.loop(0, whole, span, carried=totals) as at:
                at.next = added(key, at.index, span, at.carried)
            totals = at.results
        for r, total in enumerate(added(key, whole, columns - whole, totals)):
            e.store(total, line.at(e, line.at(e, sums, r), 0, x.index), F32)
    totals = [e.load(ty, line.at(e, sums, r, x), F32) for r in range(height) for x in range(count)]
    total = across_lines(e, totals + totals[:1] * (lanes - len(totals)), partial(e.bin, "fadd"))
    for r in range(height):
        picks = ", ".join(f"i32 {r * count + x}" for x in range(count))
        part = e.op(f"<{count} x float>", f"shufflevector {total}, {ty} poison, <{count} x i32> <{picks}>")
        e.store(part, to.at(e, out, r), F32)


def softmax_narrow_function(
    e: Emitter, scores: V, mask: V, stats: V, keys: V, key0: V, row: V,
    m: Mask, source: Layout | None, lanes: int, scale: float, cap: float, rows: int,
) -> None:  # fmt: skip
    """The scores of the row at position `row` are scaled, capped (`scale` includes the division by the cap), masked by `mask`
    (its elements from key0 on, as columns of `source`) and replaced by weights, zero past `keys` up to a whole vector. `stats`:
    those of this row, as in softmax_wide_function, `rows` floats apart."""
    ty, line = vector("float", lanes), Layout(f32, rows)
    before, summed = (e.load("float", line.at(e, stats, what), F32) for what in (0, 1))
    position = lanes_of(e, row, lanes)
    with e.loop(0, keys, lanes, carried=[e.const(ty, -math.inf)], nonempty=True) as at:
        place = line.at(e, scores, 0, at.index)
        valid = e.cmp("slt", e.iota(lanes, "i32"), lanes_of(e, e.bin("sub", keys, at.index), lanes))
        key = e.bin("add", lanes_of(e, e.bin("add", key0, at.index), lanes), e.iota(lanes, "i32"))
        term = load_line(e, source.at(e, mask, 0, at.index), source, lanes, f32, mask=valid) if source else None
        score = e.bin("fmul", e.load(ty, place, F32), scale)
        score = e.bin("fmul", tanh(e, score), cap) if cap else score
        score = masked(e, m, score, key, position, term)
        score = e.select(valid, score, e.const(ty, -math.inf))
        e.store(score, place, F32)
        at.next = [highest(e, score, at.carried[0])]
    top = highest(e, alu.across(e, "max", f32, at.results[0]), before)
    shift = finite_or_zero(e, top)
    wide = e.splat(shift, lanes)
    with e.loop(0, keys, lanes, carried=[e.const(ty, 0.0)], nonempty=True) as at:
        place = line.at(e, scores, 0, at.index)
        weight = weight_of(e, e.bin("fsub", e.load(ty, place, F32), wide))
        e.store(weight, place, F32)
        at.next = [e.bin("fadd", weight, at.carried[0])]
    (total,) = at.results
    shrink = weight_of(e, e.bin("fsub", before, shift))
    total = e.fma(summed, shrink, alu.across(e, "add", f32, total))
    for what, value in enumerate((top, total, shrink)):
        e.store(value, line.at(e, stats, what), F32)


# -- values and results --------------------------------------------------------------------------------------------


def finite_function(e: Emitter, values: V, keys: V, source: Layout, columns: int, lanes: int) -> V:
    """Whether all values of these keys are finite. If so, a zero weight needs no special handling."""
    zero, every = e.const(vector("float", lanes), 0.0), range(0, columns, lanes)
    with e.loop(0, keys, carried=[zero] * len(every), nonempty=True) as at:
        row = source.at(e, values, at.index)
        lines = (load_line(e, source.at(e, row, 0, c), source, lanes, f32, min(lanes, columns - c)) for c in every)
        at.next = [e.intrinsic("fmuladd", line, zero, total) for line, total in zip(lines, at.carried)]
    total, *others = at.results
    for other in others:
        total = e.bin("fadd", total, other)
    return e.intrinsic("vector.reduce.and", e.cmp("oeq", total, zero), returns="i1")


def share_of(e: Emitter, totals: V, row: V, lanes: int) -> V:
    """1 / totals[row] in every lane, zero for a row that saw no key."""
    zero, total = e.const("float", 0.0), e.load("float", step(e, totals, row, F32), F32)
    return e.splat(e.select(e.cmp("oeq", total, zero), zero, e.bin("fdiv", e.const("float", 1.0), total)), lanes)


def finish_function(
    e: Emitter, sums: V, totals: V, out: V, rows: V, source: Layout, to: Layout, columns: int, lanes: int
) -> None:
    """out[row, column] = sums[row, column] / totals[row], zero for a row that saw no key."""
    with e.loop(0, rows) as at:
        share = share_of(e, totals, at.index, lanes)
        row, line = source.at(e, sums, at.index), to.at(e, out, at.index)
        for c in range(0, columns, lanes):
            value = e.bin("fmul", e.load(share.ty, source.at(e, row, 0, c), F32), share)
            store_line(e, value, to.at(e, line, 0, c), to, min(lanes, columns - c))


def logs_function(e: Emitter, tops: V, totals: V, out: V, rows: V, to: Layout) -> None:
    """out[row] = log of the sum of exp(scores): -inf for a row that saw no key."""
    with e.loop(0, rows) as at:
        top, total = (e.load("float", step(e, x, at.index, F32), F32) for x in (tops, totals))
        e.store(alu.to_memory(e, e.bin("fadd", top, log(e, total)), to.dtype), to.at(e, out, at.index), to.dtype.itemsize)


def store_line(e: Emitter, value: V, at: V, to: Layout, count: int) -> None:
    """Store the first `count` f32 lanes as elements of a row of `to`."""
    raw, align = alu.to_memory(e, value, to.dtype), to.dtype.itemsize
    if to.column != 1 or count == 1:  # a masked store of one lane may write 4 bytes: see scope._masked
        for x in range(count):
            e.store(e.op(raw.scalar, f"extractelement {raw}, i64 {x}"), to.at(e, at, 0, x), align)
    elif count == value.lanes:
        e.store(raw, at, align)
    else:
        place = V(f"align {align} {at.text}", "ptr")
        e.intrinsic("masked.store", raw, place, lane_mask(raw.lanes, count), suffix=(raw.ty, "ptr"), returns="void")

"""The functions that fused attention is made of, each described by plain numbers: squares turned, softmax steps, the
product with the values. Scores lie as [key][row] ("wide": a vector runs along query rows, so that no step of the softmax
crosses lanes) or as [row][key] ("narrow": a vector runs along keys). Nothing here knows a whole attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlx.backends.cpu import alu
from rlx.backends.cpu.emit import Emitter, V, vector
from rlx.backends.cpu.kernels.tile import Layout, convert, load_vector, transposed
from rlx.backends.cpu.math import EXP, LN2, LOG2_E, SHIFT, polynomial
from rlx.ir.dtype import DType, f32

F32 = 4  # bytes


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `kind`: "none", "band" (below + row <= key <= above + row), "keep" (a byte a key, 0: not
    seen) or "add" (a term added to the score). None: no bound on that side."""

    kind: str
    below: int | None = None
    above: int | None = None


def step(e: Emitter, base: V, count: V, nbytes: int) -> V:
    """base + count * nbytes"""
    return e.gep(base, e.bin("mul", count, e.i64(nbytes))) if nbytes else base


def below(e: Emitter, count: V, lanes: int) -> V:
    """The first `count` lanes, `count` known at run time."""
    return e.cmp("slt", e.iota(lanes, "i32"), e.splat(e.convert("trunc", count, "i32"), lanes))


def line(e: Emitter, at: V, dtype: DType, stride: int, lanes: int, tail: int = 0, mask: V | None = None) -> V:
    """`lanes` elements `stride` apart as f32; of those that `mask` leaves out, or that lie past `tail`, nothing is read
    and they are zero."""
    if stride == 1 and mask is None:
        return convert(e, load_vector(e, at, dtype, lanes, tail), dtype, f32)
    if mask is None:
        mask = below(e, e.i64(tail or lanes), lanes)
    ty = vector(alu.memory_type(dtype), lanes)
    if stride == 1:
        place, name, places = V(f"align {dtype.itemsize} {at.text}", "ptr"), "masked.load", "ptr"
    else:
        offsets = "<" + ", ".join(f"i64 {x * stride * dtype.itemsize}" for x in range(lanes)) + ">"
        places = vector("ptr", lanes)
        many = e.op(places, f"getelementptr i8, {at}, <{lanes} x i64> {offsets}")
        place, name = V(f"align {dtype.itemsize} {many.text}", places), "masked.gather"
    raw = e.intrinsic(name, place, mask, V("zeroinitializer", ty), suffix=(ty, places), returns=ty)
    return _as_float(e, raw, dtype)


def _as_float(e: Emitter, raw: V, dtype: DType) -> V:
    """An element or vector from memory as f32: bool as 0 and 1."""
    if dtype.kind == "b":
        return e.convert("uitofp", alu.from_memory(e, raw, dtype), "float")
    return convert(e, raw, dtype, f32)


def turn_function(
    e: Emitter, start: V, out: V, rows: V, columns: V, source: Layout, pitch: int, lanes: int, scale: float
) -> None:
    """out[column][row] = start[row, column] * scale for a square of lanes x lanes, rows of `out` `pitch` floats apart.
    Only `rows` x `columns` of it are read; the rest is zero."""
    seen = below(e, columns, lanes)
    nothing = e.const(seen.ty, False)
    lines = []
    for r in range(lanes):
        mask = e.op(seen.ty, f"select {e.cmp('slt', e.i64(r), rows)}, {seen}, {nothing}")
        value = line(e, e.gep(start, source.byte(r, 0)), source.dtype, source.column, lanes, mask=mask)
        lines.append(value if scale == 1.0 else e.bin("fmul", value, e.const(value.ty, scale)))
    for c, value in enumerate(transposed(e, lines)):
        e.store(value, e.gep(out, c * pitch * F32), F32)


# -- wide: scores are [key][row] -----------------------------------------------------------------------------------


def mask_wide_function(
    e: Emitter, scores: V, mask: V, keys: V, key0: V, row0: V, m: Mask, vectors: int, lanes: int, uniform: Layout | None
) -> None:
    """Scores of keys that a row does not see become -inf ("add": get their term). `mask`: [key][row] floats, or, where
    all rows see the same, the mask's own elements, in steps of `uniform`."""
    ty, pitch = vector("float", lanes), vectors * lanes * F32
    never = e.const(ty, -math.inf)
    first = e.bin("add", e.splat(e.convert("trunc", row0, "i32"), lanes), e.iota(lanes, "i32"))
    with e.loop(0, keys) as at:
        line_of_scores, line_of_mask = step(e, scores, at.index, pitch), step(e, mask, at.index, pitch)
        key = e.splat(e.convert("trunc", e.bin("add", key0, at.index), "i32"), lanes)
        raw = None
        if uniform is not None:
            raw = e.load(alu.memory_type(uniform.dtype), step(e, mask, at.index, uniform.byte(1, 0)), uniform.dtype.itemsize)

        def masked(v: int) -> V:
            if raw is not None and m.kind == "keep":  # only reached where the key is hidden
                return never
            score = e.load(ty, e.gep(line_of_scores, v * lanes * F32), F32)
            if m.kind == "band":
                place = e.bin("add", first, e.const(first.ty, v * lanes))
                return e.select(_in_band(e, m, key, place), score, never)
            if raw is not None and uniform is not None:
                return _masked(e, m, score, e.splat(_as_float(e, raw, uniform.dtype), lanes))
            return _masked(e, m, score, e.load(ty, e.gep(line_of_mask, v * lanes * F32), F32))

        hidden = e.cmp("eq", raw, e.const(raw.ty, 0)) if raw is not None and m.kind == "keep" else e.const("i1", True)
        with e.when(hidden):
            for v in range(vectors):
                e.store(masked(v), e.gep(line_of_scores, v * lanes * F32), F32)


def last_seen(e: Emitter, mask: V, source: Layout, keys: int) -> V:
    """One past the last key that a mask of bytes, the same for all rows, lets be seen; at least 1."""
    with e.loop(0, keys, carried=[e.i64(1)]) as at:
        seen = e.cmp("ne", e.load("i8", step(e, mask, at.index, source.byte(0, 1)), 1), e.const("i8", 0))
        at.next = [e.select(seen, e.bin("add", at.index, e.i64(1)), at.carried[0])]
    return at.results[0]


def _masked(e: Emitter, m: Mask, score: V, term: V) -> V:
    """A score under its element of the mask; "keep" forgets a score that is not seen even if it is NaN."""
    if m.kind == "add":
        return e.bin("fadd", score, term)
    return e.select(e.cmp("une", term, e.const(term.ty, 0.0)), score, e.const(score.ty, -math.inf))


def _in_band(e: Emitter, m: Mask, key: V, row: V) -> V:
    """below + row <= key <= above + row, on vectors of i32 of which one is the same in all lanes."""
    tests = []
    if m.above is not None:
        tests.append(e.cmp("sle", key, e.bin("add", row, e.const(row.ty, m.above))))
    if m.below is not None:
        tests.append(e.cmp("sge", key, e.bin("add", row, e.const(row.ty, m.below))))
    return tests[0] if len(tests) == 1 else e.bin("and", *tests)


def softmax_wide_function(e: Emitter, scores: V, stats: V, keys: V, vectors: int, lanes: int, first: bool) -> None:
    """Scores become weights exp(score - highest so far). `stats`: per row, its highest score, the sum of its weights, and
    the factor by which what was summed before shrinks. `first`: nothing was before."""
    ty, pitch = vector("float", lanes), vectors * lanes * F32
    part = lambda what, v: e.gep(stats, what * pitch + v * lanes * F32)  # noqa: E731
    before = [e.const(ty, -math.inf) if first else e.load(ty, part(0, v), F32) for v in range(vectors)]
    with e.loop(0, keys, carried=before, nonempty=True) as at:
        for v, top in enumerate(at.carried):
            score = e.load(ty, e.gep(step(e, scores, at.index, pitch), v * lanes * F32), F32)
            at.next.append(highest(e, score, top))
    tops = at.results
    shifts = [finite_or_zero(e, top) for top in tops]
    with e.loop(0, keys, carried=[e.const(ty, 0.0)] * vectors, nonempty=True) as at:
        for v, total in enumerate(at.carried):
            place = e.gep(step(e, scores, at.index, pitch), v * lanes * F32)
            weight = weight_of(e, e.bin("fsub", e.load(ty, place, F32), shifts[v]))
            e.store(weight, place, F32)
            at.next.append(e.bin("fadd", total, weight))
    for v, total in enumerate(at.results):
        if not first:
            shrink = weight_of(e, e.bin("fsub", before[v], shifts[v]))
            e.store(shrink, part(2, v), F32)
            total = e.fma(e.load(ty, part(1, v), F32), shrink, total)
        e.store(tops[v], part(0, v), F32)
        e.store(total, part(1, v), F32)


def highest(e: Emitter, a: V, b: V) -> V:
    """The larger; b where a is NaN: a NaN score makes its row's sum NaN by its weight."""
    return e.select(e.cmp("ogt", a, b), a, b)


def weight_of(e: Emitter, x: V) -> V:
    """e^x for x <= 0, exactly 0 below -87 and for -inf, NaN for NaN; relative error below 4e-7. Half the steps of a general
    exp: nothing overflows, denormals are dropped, and r = x - n ln2 may lose what only tiny weights notice."""
    shifted = e.fma(x, e.const(x.ty, LOG2_E), e.const(x.ty, SHIFT))  # its low bits are n = round(x log2 e)
    r = e.fma(e.bin("fsub", shifted, e.const(x.ty, SHIFT)), e.const(x.ty, -LN2), x)
    bits = e.convert("bitcast", shifted, "i32")
    bits = e.bin("add", e.bin("shl", bits, e.const(bits.ty, 23)), e.const(bits.ty, 0x3F800000))
    value = e.bin("fmul", polynomial(e, r, EXP), e.convert("bitcast", bits, "float"))
    return e.select(e.cmp("olt", x, e.const(x.ty, -87.0)), e.const(x.ty, 0.0), value)


def finite_or_zero(e: Emitter, top: V) -> V:
    """0 in place of -inf: a row that sees no key has weights exp(-inf - 0) = 0."""
    return e.select(e.cmp("oeq", top, e.const(top.ty, -math.inf)), e.const(top.ty, 0.0), top)


# -- the product with the values, and the end ----------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """sums[rows][vectors*lanes] over keys. Weight (row, key) is `weights`; `tail`: valid lanes of the last vector (0: all).
    `first`: the sums start at zero, else at what they were times a factor per row. `careful`: a weight of zero keeps NaN
    and infinity of its value out."""

    rows: int
    vectors: int
    lanes: int
    tail: int
    weights: Layout
    values: Layout
    pitch: int  # floats between rows of sums
    first: bool
    careful: bool


def product_function(e: Emitter, weights: V, values: V, sums: V, factors: V, keys: V, p: Product) -> None:
    """The tile of `p`, in registers over all keys."""
    ty, lane_bytes = vector("float", p.lanes), p.lanes * p.values.dtype.itemsize * p.values.column
    place = lambda r, v: e.gep(sums, (r * p.pitch + v * p.lanes) * F32)  # noqa: E731
    start = []
    for r in range(p.rows):
        factor = None if p.first else e.splat(e.load("float", e.gep(factors, r * F32), F32), p.lanes)
        for v in range(p.vectors):
            start.append(e.const(ty, 0.0) if factor is None else e.bin("fmul", e.load(ty, place(r, v), F32), factor))
    with e.loop(0, keys, carried=start, nonempty=True) as at:
        value_row = step(e, values, at.index, p.values.byte(1, 0))
        columns = []
        for v in range(p.vectors):
            tail = p.tail if v == p.vectors - 1 else 0
            columns.append(line(e, e.gep(value_row, v * lane_bytes), p.values.dtype, p.values.column, p.lanes, tail))
        weight_row = step(e, weights, at.index, p.weights.byte(0, 1))
        for r in range(p.rows):
            weight = e.splat(e.load("float", e.gep(weight_row, p.weights.byte(r, 0)), F32), p.lanes)
            counts = e.cmp("une", weight, e.const(ty, 0.0)) if p.careful else None
            for v in range(p.vectors):
                total = at.carried[r * p.vectors + v]
                added = e.intrinsic("fmuladd", weight, columns[v], total)
                at.next.append(added if counts is None else e.select(counts, added, total))
    for r in range(p.rows):
        for v in range(p.vectors):
            e.store(at.results[r * p.vectors + v], place(r, v), F32)


def finite_function(e: Emitter, values: V, keys: V, source: Layout, columns: int, lanes: int) -> None:
    """Returns whether no value of these keys is NaN or infinite (then no weight of zero needs care)."""
    ty = vector("float", lanes)
    zero = e.const(ty, 0.0)
    offsets = range(0, columns, lanes)
    with e.loop(0, keys, carried=[zero] * len(offsets), nonempty=True) as at:
        row = step(e, values, at.index, source.byte(1, 0))
        for c, total in zip(offsets, at.carried):
            value = line(e, e.gep(row, source.byte(0, c)), source.dtype, source.column, lanes, min(lanes, columns - c))
            at.next.append(e.intrinsic("fmuladd", value, zero, total))
    total, *others = at.results
    for other in others:
        total = e.bin("fadd", total, other)
    same = e.cmp("oeq", total, zero)
    e.do(f"ret i1 {e.intrinsic('vector.reduce.and', same, returns='i1').text}")


def finish_function(
    e: Emitter, sums: V, totals: V, out: V, rows: V, target: Layout, columns: int, pitch: int, lanes: int
) -> None:
    """out[row, column] = sums[row][column] / totals[row], zero for a row that saw no key."""
    with e.loop(0, rows) as at:
        total = e.load("float", step(e, totals, at.index, F32), F32)
        nothing = e.cmp("oeq", total, e.const("float", 0.0))
        share = e.select(nothing, e.const("float", 0.0), e.bin("fdiv", e.const("float", 1.0), total))
        share = e.splat(share, lanes)
        row, to = step(e, sums, at.index, pitch * F32), step(e, out, at.index, target.byte(1, 0))
        for c in range(0, columns, lanes):
            value = e.bin("fmul", e.load(share.ty, e.gep(row, c * F32), F32), share)
            store_line(e, value, e.gep(to, target.byte(0, c)), target, min(lanes, columns - c))


def store_line(e: Emitter, value: V, at: V, target: Layout, count: int) -> None:
    """The first `count` lanes of f32 to memory, in the dtype and column stride of `target`."""
    raw = alu.to_memory(e, value, target.dtype)
    align, lanes = target.dtype.itemsize, value.lanes
    if target.column != 1:
        for x in range(count):
            e.store(e.op(raw.scalar, f"extractelement {raw}, i64 {x}"), e.gep(at, target.byte(0, x)), align)
    elif count == lanes:
        e.store(raw, at, align)
    else:
        mask, place = below(e, e.i64(count), lanes), V(f"align {align} {at.text}", "ptr")
        e.intrinsic("masked.store", raw, place, mask, suffix=(raw.ty, "ptr"), returns="void")


# -- narrow: scores are [row][key] ---------------------------------------------------------------------------------


def dots_function(e: Emitter, row: V, keys: V, out: V, source: Layout, columns: int, lanes: int, have: int) -> None:
    """out[0:lanes] = row . key for `lanes` keys in turn; only `have` of them are in memory (the last is taken again).
    `row`: f32, padded to whole vectors."""
    ty = vector("float", lanes)
    totals = [e.const(ty, 0.0)] * lanes

    def add(at_row: V, at_keys: V, tail: int, totals: list[V]) -> list[V]:
        query = e.load(ty, at_row, F32)
        parts = []
        for x, total in enumerate(totals):
            key = line(e, e.gep(at_keys, source.byte(min(x, have - 1), 0)), source.dtype, source.column, lanes, tail)
            parts.append(e.intrinsic("fmuladd", query, key, total))
        return parts

    whole = columns - columns % lanes
    if whole:
        with e.loop(0, whole, lanes, carried=totals) as at:
            at.next = add(step(e, row, at.index, F32), step(e, keys, at.index, source.byte(0, 1)), 0, at.carried)
        totals = at.results
    if columns % lanes:
        totals = add(e.gep(row, whole * F32), e.gep(keys, source.byte(0, whole)), columns % lanes, totals)
    e.store(sums_of(e, totals), out, F32)


def sums_of(e: Emitter, lines: list[V]) -> V:
    """Lane x: the sum over lane of line x. Pairs of lines are folded onto each other, log2(lanes) rounds."""
    lanes, ty, fold = len(lines), lines[0].ty, 1
    while len(lines) > 1:
        upper = [x if not x & fold else lanes + x - fold for x in range(lanes)]
        lower = [x + fold if not x & fold else lanes + x for x in range(lanes)]
        folded = []
        for a, b in zip(lines[::2], lines[1::2]):
            halves = ("<" + ", ".join(f"i32 {x}" for x in pick) + ">" for pick in (upper, lower))
            folded.append(e.bin("fadd", *(e.op(ty, f"shufflevector {a}, {b}, <{lanes} x i32> {h}") for h in halves)))
        lines, fold = folded, fold * 2
    return lines[0]


def softmax_narrow_function(
    e: Emitter,
    scores: V,
    mask: V,
    stats: V,
    keys: V,
    key0: V,
    row: V,
    m: Mask,
    source: Layout | None,
    lanes: int,
    scale: float,
    rows: int,
) -> None:
    """One row of scores: scaled, masked by `mask` (the row's elements from key0 on, `source.column` apart) and turned into
    weights, zero past `keys` up to a whole vector. `stats`: this row's, as in softmax_wide_function, `rows` floats apart."""
    ty = vector("float", lanes)
    parts = [e.load("float", e.gep(stats, what * rows * F32), F32) for what in (0, 1)]
    position = e.splat(e.convert("trunc", row, "i32"), lanes)

    def score_at(index: V, valid: V) -> V:
        score = e.bin("fmul", e.load(ty, step(e, scores, index, F32), F32), e.const(ty, scale))
        seen = valid
        if m.kind == "band":
            first = e.splat(e.convert("trunc", e.bin("add", key0, index), "i32"), lanes)
            seen = e.bin("and", seen, _in_band(e, m, e.bin("add", first, e.iota(lanes, "i32")), position))
        elif source is not None:
            term = line(e, step(e, mask, index, source.byte(0, 1)), source.dtype, source.column, lanes, mask=valid)
            score = _masked(e, m, score, term)
        return e.select(seen, score, e.const(ty, -math.inf))

    with e.loop(0, keys, lanes, carried=[e.const(ty, -math.inf)], nonempty=True) as at:
        score = score_at(at.index, below(e, e.bin("sub", keys, at.index), lanes))
        e.store(score, step(e, scores, at.index, F32), F32)
        at.next = [highest(e, score, at.carried[0])]
    top = highest(e, alu.across(e, "max", f32, at.results[0]), parts[0])
    shift = finite_or_zero(e, top)
    wide_shift = e.splat(shift, lanes)
    with e.loop(0, keys, lanes, carried=[e.const(ty, 0.0)], nonempty=True) as at:
        place = step(e, scores, at.index, F32)
        weight = weight_of(e, e.bin("fsub", e.load(ty, place, F32), wide_shift))
        e.store(weight, place, F32)
        at.next = [e.bin("fadd", at.carried[0], weight)]
    shrink = weight_of(e, e.splat(e.bin("fsub", parts[0], shift), lanes))
    shrink = e.op("float", f"extractelement {shrink}, i64 0")
    total = e.fma(parts[1], shrink, alu.across(e, "add", f32, at.results[0]))
    for what, value in enumerate((top, total, shrink)):
        e.store(value, e.gep(stats, what * rows * F32), F32)

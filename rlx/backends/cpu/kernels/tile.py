"""Register tiles: the functions a contraction is made of, each described by plain numbers. Nothing about kernels.

`tile_function` multiplies a few rows of `a` with a panel of `b` over the whole k, sums in registers. The stage functions
copy an operand into scratch in the dtype of the sums, where its place in memory or its dtype would slow every tile.
Offsets are folded into addresses at generation time, so that a tile's loop is loads, broadcasts and multiply-adds only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.backends.cpu import alu
from rlx.backends.cpu.emit import Emitter, V, stored, vector
from rlx.ir.dtype import DType


@dataclass(frozen=True)
class Layout:
    """Elements of a matrix operand: (r, c) is `row` x r + `column` x c elements of `dtype` after its base."""

    dtype: DType
    row: int
    column: int

    def byte(self, r: int, c: int) -> int:
        return (r * self.row + c * self.column) * self.dtype.itemsize


@dataclass(frozen=True)
class Tile:
    """`rows` x (`vectors` x `lanes`) sums of `acc` over k steps, `unroll` of them summed apart. `tail`: columns of the
    last vector that b has in memory (0: all of them); the others are not read."""

    rows: int
    vectors: int
    lanes: int
    unroll: int
    tail: int
    acc: DType

    @property
    def ty(self) -> str:
        return vector(stored(self.acc), self.lanes)

    @property
    def row_bytes(self) -> int:
        return self.vectors * self.lanes * self.acc.itemsize


def convert(e: Emitter, raw: V, source: DType, to: DType) -> V:
    """An element (or vector of them) from memory in the dtype it is summed in; integers wrap."""
    if not source.is_float:
        if to.is_float:
            return e.convert("sitofp" if source.kind == "i" else "uitofp", raw, stored(to))
        if source.bits == to.bits:
            return raw
        return e.convert("trunc" if source.bits > to.bits else "sext" if source.kind == "i" else "zext", raw, stored(to))
    return alu.cast(e, alu.from_memory(e, raw, source), source.compute, to)


def lane_mask(lanes: int, valid: int) -> V:
    """The first `valid` lanes."""
    return V("<" + ", ".join(f"i1 {str(x < valid).lower()}" for x in range(lanes)) + ">", vector("i1", lanes))


def load_vector(e: Emitter, address: V, dtype: DType, lanes: int, tail: int = 0) -> V:
    """`lanes` elements as they are stored; with `tail` only the first that many are read, the others are zero."""
    ty = vector(alu.memory_type(dtype), lanes)
    if not tail or tail == lanes:
        return e.load(ty, address, dtype.itemsize)
    place = V(f"align {dtype.itemsize} {address.text}", "ptr")
    args = place, lane_mask(lanes, tail), V("zeroinitializer", ty)
    return e.intrinsic("masked.load", *args, suffix=(ty, "ptr"), returns=ty)


def multiply_add(e: Emitter, a: V, b: V, total: V, acc: DType) -> V:
    """total + a*b: fused on floats where the CPU can, wrapping on integers."""
    if acc.is_float:
        return e.intrinsic("fmuladd", a, b, total)
    return e.bin("add", total, e.bin("mul", a, b))


def tile_function(e: Emitter, base_a: V, base_b: V, sums: V, t: Tile, k: int, a: Layout, b: Layout) -> None:
    """sums[rows][vectors*lanes] = a[rows, k] @ b[k, vectors*lanes]; b's column stride is 1."""
    cells = [(r, v) for r in range(t.rows) for v in range(t.vectors)]
    totals = [V("zeroinitializer", t.ty)] * (t.unroll * len(cells))

    def step(at_a: V, at_b: V, u: int, partial: list[V]) -> list[V]:
        lane_bytes = t.lanes * b.dtype.itemsize
        columns = []
        for v in range(t.vectors):
            tail = t.tail if v == t.vectors - 1 else 0
            loaded = load_vector(e, e.gep(at_b, b.byte(u, 0) + v * lane_bytes), b.dtype, t.lanes, tail)
            columns.append(convert(e, loaded, b.dtype, t.acc))
        out = []
        for r in range(t.rows):
            element = e.load(alu.memory_type(a.dtype), e.gep(at_a, a.byte(r, u)), a.dtype.itemsize)
            row = e.splat(convert(e, element, a.dtype, t.acc), t.lanes)
            sums_of_row = partial[r * t.vectors : (r + 1) * t.vectors]
            out += [multiply_add(e, row, column, total, t.acc) for column, total in zip(columns, sums_of_row)]
        return out

    whole = k - k % t.unroll
    at_a, at_b = base_a, base_b
    if whole:
        with e.loop(0, whole, t.unroll, carried=[base_a, base_b, *totals]) as loop:
            at_a, at_b, *now = loop.carried
            loop.next = [e.gep(at_a, a.byte(0, t.unroll)), e.gep(at_b, b.byte(t.unroll, 0))]
            for u in range(t.unroll):
                loop.next += step(at_a, at_b, u, now[u * len(cells) : (u + 1) * len(cells)])
        at_a, at_b, *totals = loop.results
    add = "fadd" if t.acc.is_float else "add"
    groups = [totals[u * len(cells) : (u + 1) * len(cells)] for u in range(t.unroll)]
    while len(groups) > 1:
        groups = [[e.bin(add, x, y) for x, y in zip(*pair)] for pair in zip(groups[::2], groups[1::2])]
    totals = groups[0]
    for u in range(k - whole):
        totals = step(at_a, at_b, u, totals)
    for (r, v), total in zip(cells, totals):
        e.store(total, e.gep(sums, r * t.row_bytes + v * t.lanes * t.acc.itemsize), t.acc.itemsize)


def stage_rows_function(e: Emitter, start: V, out: V, count: V, k: int, source: Layout, to: Layout, lanes: int) -> None:
    """out[count, k] = start[count, k] in the dtype of `to`, whose rows are padded to whole vectors. (A block of a.)"""
    with e.loop(0, count) as rows:
        line = e.gep(start, e.bin("mul", rows.index, e.i64(source.byte(1, 0))))
        copy = e.gep(out, e.bin("mul", rows.index, e.i64(to.byte(1, 0))))
        _copy_line(e, line, copy, k, source, to.dtype, lanes if source.column == 1 else 1)


def _copy_line(e: Emitter, line: V, to: V, count: int, source: Layout, acc: DType, lanes: int) -> None:
    """to[0:count] = the elements of one row of `source`, `lanes` at a time (1 if they are not neighbours)."""

    def move(index: V | int, tail: int) -> None:
        scaled = (lambda size: e.bin("mul", index, e.i64(size))) if isinstance(index, V) else (lambda size: e.i64(index * size))
        value = load_vector(e, e.gep(line, scaled(source.byte(0, 1))), source.dtype, lanes, tail)
        value = convert(e, value, source.dtype, acc)
        e.store(value, e.gep(to, scaled(acc.itemsize)), acc.itemsize)

    if count // lanes:
        with e.loop(0, count - count % lanes, lanes) as at:
            move(at.index, 0)
    if count % lanes:
        move(count - count % lanes, count % lanes)  # writes whole vectors: lines are padded to them


def stage_panel_function(e: Emitter, start: V, out: V, how: str, k: int, t: Tile, source: Layout) -> None:
    """out[k][vectors*lanes] = k rows of a panel of b in `t.acc`. `how`: see Plan.stage_b. What lies right of the matrix
    is undefined; no lane of it reaches a result."""
    columns = (t.vectors - 1) * t.lanes + (t.tail or t.lanes)
    if how == "columns":
        for v in range(t.vectors):
            _transpose(e, e.gep(start, source.byte(0, v * t.lanes)), e.gep(out, v * t.lanes * t.acc.itemsize), k, t, source, v)
    else:
        with e.loop(0, k) as rows:
            line = e.gep(start, e.bin("mul", rows.index, e.i64(source.byte(1, 0))))
            to = e.gep(out, e.bin("mul", rows.index, e.i64(t.row_bytes)))
            if how == "any":
                _copy_line(e, line, to, columns, source, t.acc, 1)
            else:
                for v in range(t.vectors):
                    tail = t.tail if v == t.vectors - 1 else 0
                    value = load_vector(e, e.gep(line, source.byte(0, v * t.lanes)), source.dtype, t.lanes, tail)
                    value = convert(e, value, source.dtype, t.acc)
                    e.store(value, e.gep(to, v * t.lanes * t.acc.itemsize), t.acc.itemsize)


def _transpose(e: Emitter, start: V, out: V, k: int, t: Tile, source: Layout, v: int) -> None:
    """One vector of columns, each contiguous along k: lanes x lanes blocks are transposed in registers. The last block
    overlaps the one before rather than reading past k; columns past the matrix repeat its last one."""
    have = t.tail if v == t.vectors - 1 and t.tail else t.lanes

    def block(first: V, rows: int) -> None:
        lines = []
        for x in range(t.lanes):
            at = e.gep(start, source.byte(0, min(x, have - 1)))
            at = e.gep(at, e.bin("mul", first, e.i64(source.dtype.itemsize)))
            lines.append(convert(e, load_vector(e, at, source.dtype, t.lanes, rows % t.lanes), source.dtype, t.acc))
        to = e.gep(out, e.bin("mul", first, e.i64(t.row_bytes)))
        for r, line in enumerate(transposed(e, lines)[:rows]):
            e.store(line, e.gep(to, r * t.row_bytes), t.acc.itemsize)

    if k < t.lanes:
        block(e.i64(0), k)
        return
    with e.loop(0, k, t.lanes) as at:
        block(e.intrinsic("smin", at.index, e.i64(k - t.lanes)), t.lanes)


def transposed(e: Emitter, lines: list[V]) -> list[V]:
    """A square of lanes x lanes values turned: swaps of 2x2 blocks of growing size, log2(lanes) rounds."""
    lanes, lines = len(lines), list(lines)
    ty = lines[0].ty
    step = 1
    while step < lanes:
        upper = [x if not x & step else lanes + x - step for x in range(lanes)]
        lower = [x + step if not x & step else lanes + x for x in range(lanes)]
        for r in range(lanes):
            if not r & step:
                pair = f"shufflevector {lines[r]}, {lines[r + step]}"
                masks = ("<" + ", ".join(f"i32 {x}" for x in m) + ">" for m in (upper, lower))
                lines[r], lines[r + step] = (e.op(ty, f"{pair}, <{lanes} x i32> {m}") for m in masks)
        step *= 2
    return lines

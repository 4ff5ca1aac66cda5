"""Contractions of f32 by multiply-adds, at the rate of the arithmetic units.

A block computes a tile of the result, a thread some rows and columns of it in groups of 4, a warp 4 x 8 times as many.
Asynchronous copies keep a ring of slices of both operands in shared memory full. An operand that is contiguous along the summed
axis keeps that order, its chunks of 4 elements exchanged within a row against bank conflicts; else the summed axis is outermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import WARP, Tiled
from rlx.backends.cuda.vectors import aligned, width
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Kernel, Operand, Stmt, Var, const, k

DEPTH = 32  # of a slice: 8 chunks of 4, one for each group of 4 banks
PAD = 4  # floats behind a row of a slice, against bank conflicts
STAGES = 3
RESIDENT = 16  # warps of a multiprocessor, by registers
BUSY = 8  # warps that keep a multiprocessor's arithmetic busy


@dataclass(frozen=True)
class Size:
    """`rows` x `columns` of a block, `down` x `across` of a thread."""

    rows: int
    columns: int
    down: int
    across: int

    @property
    def threads(self) -> int:
        return self.rows // self.down * (self.columns // self.across)

    def cost(self, c: Contract, points: int, multiprocessors: int) -> float:
        """Multiply-adds of one multiprocessor, slower where it has too few warps or threads load much for each product."""
        tiles = -(-points * -(-c.m // self.rows) * -(-c.n // self.columns) // multiprocessors)
        warps = min(RESIDENT, tiles * self.threads // WARP)
        loads = 1 + 2 / self.down + 2 / self.across
        return tiles * self.rows * self.columns * max(1, BUSY / warps) ** 0.5 * loads


SIZES = tuple(Size(*s) for s in ((128, 128, 16, 8), (128, 64, 16, 8), (64, 64, 8, 8), (64, 64, 4, 4), (32, 32, 4, 4)))


@dataclass(frozen=True)
class FmaLaunch(Tiled):
    size: Size = SIZES[0]


def by_fma(kernel: Kernel, multiprocessors: int = 132, size: Size | None = None) -> FmaLaunch | None:
    """The launch of a contraction of stored f32 operands; None: it is none."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or c.also or kernel.locals or c.acc.dtype != f32 or 0 in (c.m, c.n, c.k):
        return None
    if any(not isinstance(o, Operand) or o.panel or o.blocks or o.dtype != f32 for o in (c.a, c.b)):
        return None
    points = math.prod(n for _, n in kernel.grid)
    along = _strides(c.a, "a")[1] == 1 and _strides(c.b, "b")[1] == 1  # type: ignore[arg-type]
    sizes = [s for s in SIZES if along or s.down <= 8]  # more rows spill where an operand's columns are read one by one
    chosen = size or min(sizes, key=lambda s: s.cost(c, points, multiprocessors))
    shared = STAGES * DEPTH * (chosen.rows + chosen.columns + 2 * PAD) * 4
    threads = chosen.threads
    return FmaLaunch(kernel, threads, threads, shared, rows=chosen.rows, columns=chosen.columns, size=chosen)


class FmaWriter(CudaWriter):
    launch: FmaLaunch
    occupancy = ", 2"

    def coordinates(self) -> Iterator[str]:
        rows, columns = self.launch.tiles
        yield "rlx_index point = blockIdx.x;"
        yield from self.divided(("tile_n", columns), ("tile_m", rows))

    def statement(self, s: Stmt) -> None:
        if isinstance(s, Contract):
            with self.alone():
                self.tile(s)
        else:
            super().statement(s)

    def tile(self, c: Contract) -> None:
        size, across = self.launch.size, self.launch.size.columns // (8 * self.launch.size.across)
        m = self.limits.get(c.i) or self.limit(c.i, c.m) or str(c.m)
        self.line(f"const rlx_index row0 = tile_m * {size.rows}, column0 = tile_n * {size.columns};")
        self.line(f"if (row0 >= {m}) return;")
        self.line("extern __shared__ __align__(128) float rlx_ring[];")
        self.line("const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;")
        self.line(f"const int row = warp / {across} * {4 * size.down} + lane / 8 * 4;")
        self.line(f"const int column = warp % {across} * {8 * size.across} + lane % 8 * 4;")
        self.line(f"float sum[{size.down}][{size.across}] = {{}};")
        steps = -(-c.k // DEPTH)
        with self.scope(["auto fetch = [&](int step) {"]):
            self.fetch(c)
        self.lines[-1] += ";"
        for step in range(STAGES - 1):
            self.line(f"if ({step} < {steps}) fetch({step});")
            self.line("rlx_copies_end();")
        with self.scope([f"for (int step = 0; step < {steps}; step++) {{"]):
            self.line(f"rlx_copies_wait<{STAGES - 2}>();")
            self.line("__syncthreads();")
            self.line(f"if (step + {STAGES - 1} < {steps}) fetch(step + {STAGES - 1});")
            self.line("rlx_copies_end();")
            self.multiply(c)
        self.epilogue(c, m)

    def parts(self, step: str) -> str:
        """Where a slice of each operand is."""
        rows, columns = (DEPTH * (n + PAD) for n in (self.launch.size.rows, self.launch.size.columns))
        return f"rlx_ring + {step} % {STAGES} * {rows + columns}, *const b = a + {rows};"

    def fetch(self, c: Contract) -> None:
        """Start the copies of slice `step`. Zero outside the matrices."""
        size = self.launch.size
        self.line(f"const rlx_index k0 = (rlx_index)step * {DEPTH};")
        self.line(f"float* const a = {self.parts('step')}")
        for to, o, extent, place in (("a", c.a, size.rows, ("row0", c.m)), ("b", c.b, size.columns, ("column0", c.n))):
            assert isinstance(o, Operand)
            self.copies(to, o, _strides(o, to), extent, place, c.k)

    def copies(self, to: str, o: Operand, strides: tuple[int, int], size: int, place: tuple[str, int], depth: int) -> None:
        """A slice of `size` rows (or columns): 16 bytes at once where they are contiguous and aligned, else an element."""
        side, step = strides
        first, most = place
        length, stride = (depth, side) if step == 1 else (most, step)
        wide = 1 in strides and length % 4 == 0 and stride % 4 == 0 and aligned(o.offset, None, 4)
        each = 4 if wide else 1
        if step == 1:
            where, d = f"e / {DEPTH // each}", f"e % {DEPTH // each} * {each}"
            target = "at * 32 + (d / 4 ^ at / 4 % 8) * 4 + d % 4"
        else:
            where, d = f"e % {size // each} * {each}", f"e / {size // each}"
            target = f"d * {size + PAD} + at"
        head = f"for (int e = threadIdx.x; e < {size * DEPTH // each}; e += {self.launch.threads}) {{"
        with self.scope(["#pragma unroll 4", head]):
            self.line(f"const int at = {where}, d = {d};")
            at, down = Var("at", index_), Var("down", index_)
            self.names[at], self.names[down] = f"({first} + at)", "(k0 + d)"
            index = k.add(o.offset, k.add(k.mul(at, const(side)), k.mul(down, const(step))))
            self.line(f"const bool inside = {first} + at < {most} && k0 + d < {depth};")
            # outside, the copy reads nothing, from an address that exists
            text = f"{self.names[o.buffer]} + (inside ? {self.made(index)} : 0)"
            self.line(f"rlx_copy<{4 * each}>({to} + {target}, {text}, inside);")

    def multiply(self, c: Contract) -> None:
        """The products of a slice, 4 elements of the summed axis at once."""
        size = self.launch.size
        self.line(f"const float* const a = {self.parts('step')}")
        at_once = 1 if size.down > 8 else 2  # more spills, and was slower: 0.51 of cuBLAS instead of 0.74 at 4096^3
        with self.scope([f"#pragma unroll {at_once}", f"for (int d = 0; d < {DEPTH}; d += 4) {{"]):
            assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
            self.line(f"float y[{size.across}][4];")
            with self.scope(["#pragma unroll", f"for (int g = 0; g < {size.across}; g += 4) {{"]):
                self.chunks("y + g", "b", "column + g / 4 * 32", size.columns, _strides(c.b, "b")[1] == 1)
            with self.scope(["#pragma unroll", f"for (int g = 0; g < {size.down}; g += 4) {{"]):
                self.line("float x[4][4];")
                self.chunks("x", "a", "row + g / 4 * 16", size.rows, _strides(c.a, "a")[1] == 1)
                heads = [f"for (int {v} = 0; {v} < {n}; {v}++) {{" for v, n in (("r", 4), ("q", 4), ("s", size.across))]
                with self.scope([text for head in heads for text in ("#pragma unroll", head)], 3):
                    self.line("sum[g + r][s] = fmaf(x[r][q], y[s][q], sum[g + r][s]);")

    def chunks(self, to: str, source: str, place: str, size: int, along: bool) -> None:
        """4 elements of the summed axis for each of 4 rows (or columns)."""
        with self.scope(["#pragma unroll", "for (int v = 0; v < 4; v++) {"]):
            if along:
                at = f"({place} + v)"
                self.line(f"*(float4*)({to})[v] = *(const float4*)({source} + {at} * 32 + (d / 4 ^ {at} / 4 % 8) * 4);")
            else:
                self.line(f"const float4 got = *(const float4*)({source} + {place} + (d + v) * {size + PAD});")
                self.line(", ".join(f"({to})[{n}][v] = got.{name}" for n, name in enumerate("xyzw")) + ";")

    def epilogue(self, c: Contract, m: str) -> None:
        size, own = min(4, width(c.epilogue, (), c.j, c.n)), self.launch.size
        i, j0 = self.name(c.i, "i"), self.fresh("j")
        heads = [f"for (int r = 0; r < {own.down}; r++) {{", f"for (int s = 0; s < {own.across}; s += {size}) {{"]
        with self.scope([text for head in heads for text in ("#pragma unroll", head)], 2):
            self.line(f"const rlx_index {i} = row0 + row + r % 4 + r / 4 * 16, {j0} = column0 + column + s % 4 + s / 4 * 32;")
            self.line(f"if ({i} >= {m} || {j0} >= {c.n}) continue;")
            self.names[c.acc] = "sum[r][s + v]" if size > 1 else "sum[r][s]"
            if size > 1:
                self.in_vectors(c.epilogue, (), c.j, size, j0)
            else:
                self.names[c.j] = j0
                self.block(c.epilogue)


def _strides(o: Operand, side: str) -> tuple[int, int]:
    """Along the rows (or columns) of the result, and along the summed axis."""
    return (o.row_stride, o.col_stride) if side == "a" else (o.col_stride, o.row_stride)


__all__ = ["SIZES", "FmaLaunch", "FmaWriter", "Size", "by_fma"]

"""Contractions of any dtype by plain multiply-adds: a block computes a tile of the result from tiles of both operands in
shared memory. Every thread has a small square of the tile in registers, and prefetches the operands' next tiles into registers
too. The epilogue runs on the finished elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Tiled
from rlx.backends.shared.contract_loops import without_contract
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Expr, Kernel, Let, Load, Loop, Operand, Stmt, Var, const, k
from rlx.ir.nest import substitute
from rlx.records import record

DEPTH = 32  # products per element between barriers
FEW_COLUMNS, FEW_OTHER = 4, 8  # with so few, most of a tile would be empty: of f32, whose tiles are fast, and of other dtypes
FEW_PRODUCTS = 2  # of a sum
FEW_SUMS, LONG = 64, 4096  # elements of the result, and products of each, for which blocks of a tile would be too few


@record
class Tile(Tiled):
    """A block has SIDE x SIDE threads."""

    SIDE: ClassVar[int] = 16


def has_tiles(kernel: Kernel) -> bool:
    """Whether tiled() takes the kernel: stored operands, and nothing that needs a finished row."""
    found = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if found is None or found.rows or found.also or kernel.locals:
        return False
    return all(isinstance(o, Operand) and not o.panel and not o.blocks for o in (found.a, found.b))


def in_sums(kernel: Kernel) -> Kernel | None:
    """The kernel with a sum for each element in place of tiles: it has few columns, and a left operand whose rows or columns are
    adjacent in memory; few elements, and long rows of both operands; or a sum has next to no products. None: tiles are better."""
    found = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if found is None or not has_tiles(kernel) or found.count is not None or 0 in (found.m, found.n, found.k):
        return None
    assert isinstance(found.a, Operand) and isinstance(found.b, Operand)
    points = found.m * found.n * math.prod(n for _, n in kernel.grid)
    long = points <= FEW_SUMS and found.k >= LONG and found.a.col_stride == found.b.row_stride == 1
    few = FEW_COLUMNS if all(o.dtype == f32 for o in (found.a, found.b)) else FEW_OTHER  # type: ignore[union-attr]
    if found.k > FEW_PRODUCTS and not long and (found.n > few or 1 not in (found.a.col_stride, found.a.row_stride)):
        return None
    made = without_contract(kernel)
    if found.k == 1:
        made = replace(made, body=tuple(x for s in made.body for x in _single(s)))
    if found.n <= few and found.a.col_stride != 1 == found.a.row_stride:  # adjacent threads have adjacent rows
        made = replace(made, grid=(*made.grid[:-2], made.grid[-1], made.grid[-2]))
    return made


def _single(s: Stmt) -> list[Stmt]:
    """A loop of one iteration without it."""
    if not isinstance(s, Loop):
        return [s]
    first: dict[Var, Expr] = {s.var: const(0)}
    return [*substitute(s.body, first), *(Let(r.result, substitute(r.value, first)) for r in s.reduces)]


def tiled(kernel: Kernel) -> Tile:
    (found,) = kernel.body
    assert isinstance(found, Contract)
    small = found.m * found.n * math.prod(n for _, n in kernel.grid) < 132 * 64 * 64
    side = 32 if small or min(found.m, found.n) <= 32 else 64
    return Tile(kernel, Tile.SIDE**2, Tile.SIDE**2, rows=side, columns=side)


class TileWriter(CudaWriter):
    launch: Tile

    def coordinates(self) -> Iterator[str]:
        rows, columns = self.launch.tiles
        yield "rlx_index point = blockIdx.x;"
        yield from self.divided(("tile_m", rows), ("tile_n", columns))

    def statement(self, s: Stmt) -> None:
        if isinstance(s, Contract):
            self.tile(s)
        else:
            super().statement(s)

    def tile(self, c: Contract) -> None:
        assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
        at, t = self.launch, self.type(c.acc.dtype)
        down, across = at.rows // at.SIDE, at.columns // at.SIDE
        m = self.limits.get(c.i) or self.limit(c.i, c.m) or str(c.m)
        self.line(f"const rlx_index row0 = tile_m * {at.rows}, column0 = tile_n * {at.columns};")
        self.line(f"if (row0 >= {m}) return;")
        self.line(f"__shared__ {t} tile_a[{DEPTH}][{at.rows + 1}], tile_b[{DEPTH}][{at.columns + 1}];")
        self.line(f"const int ty = threadIdx.x / {at.SIDE}, tx = threadIdx.x % {at.SIDE};")
        zero = CUDA.literal(0, c.acc.dtype)
        self.line(f"{t} sum[{down}][{across}];")
        self.line(f"for (int r = 0; r < {down}; r++) for (int s = 0; s < {across}; s++) sum[r][s] = {zero};")
        put = [
            self.fetch("a", c.a, c, at.rows, "row0", m, left=True),
            self.fetch("b", c.b, c, at.columns, "column0", str(c.n), left=False),
        ]
        self.line("fetch_a(0), fetch_b(0);")
        with self.scope([f"for (rlx_index k0 = 0; k0 < {c.k}; k0 += {DEPTH}) {{"]), self.alone():
            for text in (*put, "__syncthreads();", f"if (k0 + {DEPTH} < {c.k}) fetch_a(k0 + {DEPTH}), fetch_b(k0 + {DEPTH});"):
                self.line(text)
            product = CUDA.apply("fma", ("a[r]", "b[s]", "sum[r][s]"), c.acc.dtype, c.acc.dtype)
            with self.scope(["#pragma unroll", f"for (int d = 0; d < {DEPTH}; d++) {{"]):
                self.line(f"{t} a[{down}], b[{across}];")
                self.line(f"for (int r = 0; r < {down}; r++) a[r] = tile_a[d][ty + r * {at.SIDE}];")
                self.line(f"for (int s = 0; s < {across}; s++) b[s] = tile_b[d][tx + s * {at.SIDE}];")
                self.line(f"for (int r = 0; r < {down}; r++) for (int s = 0; s < {across}; s++) sum[r][s] = {product};")
            self.line("__syncthreads();")
        heads = [
            "#pragma unroll",
            f"for (int r = 0; r < {down}; r++) {{",
            "#pragma unroll",
            f"for (int s = 0; s < {across}; s++) {{",
        ]
        with self.scope(heads, 2), self.alone():
            self.line(f"const rlx_index {self.name(c.i, 'i')} = row0 + ty + r * {at.SIDE};")
            self.line(f"const rlx_index {self.name(c.j, 'j')} = column0 + tx + s * {at.SIDE};")
            self.line(f"if ({self.names[c.i]} >= {m} || {self.names[c.j]} >= {c.n}) continue;")
            self.names[c.acc] = self.fix("acc", c.acc.dtype, "sum[r][s]")
            self.block(c.epilogue)

    def fetch(self, name: str, o: Operand, c: Contract, size: int, first: str, most: str, left: bool) -> str:
        """Declare `fetch_NAME(k0)`, which loads `size` x DEPTH elements into registers, zero outside the matrix: adjacent threads
        take adjacent elements in memory. Returns the statement that puts them into shared memory."""
        depth_stride, side_stride = (o.col_stride, o.row_stride) if left else (o.row_stride, o.col_stride)
        at, d = ("e / {0}", "e % {0}") if depth_stride == 1 and side_stride != 1 else ("e % {1}", "e / {1}")
        t, threads = self.type(c.acc.dtype), self.launch.threads
        each, of_thread = size * DEPTH // threads, f"const int e = n * {threads} + threadIdx.x;"
        place_of = [f"const int at = {at.format(DEPTH, size)}, d = {d.format(DEPTH, size)};"]
        self.line(f"{t} got_{name}[{each}];")
        heads = [f"const auto fetch_{name} = [&](rlx_index k0) {{", "#pragma unroll", f"for (int n = 0; n < {each}; n++) {{"]
        with self.scope([*heads, of_thread, *place_of], 2), self.alone():
            place, step = Var("place", index_), Var("step", index_)
            self.names[place], self.names[step] = f"({first} + at)", "(k0 + d)"
            index = k.add(o.offset, k.add(k.mul(place, const(side_stride)), k.mul(step, const(depth_stride))))
            self.line(f"got_{name}[n] = {CUDA.literal(0, c.acc.dtype)};")
            with self.scope([f"if ({first} + at < {most} && k0 + d < {c.k}) {{"]):
                self.line(f"got_{name}[n] = {self.value(k.cast(Load(o.buffer, index), c.acc.dtype))};")
        self.lines[-1] += ";"
        return f"for (int n = 0; n < {each}; n++) {{ {of_thread} {place_of[0]} tile_{name}[d][at] = got_{name}[n]; }}"


__all__ = ["Tile", "TileWriter", "has_tiles", "tiled"]

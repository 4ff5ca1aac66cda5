"""Contractions of f32 by multiply-adds, at the rate of the arithmetic units.

A block computes a tile of the result, a thread some rows and columns of it in groups of 4, a warp 4 x 8 times as many.
Asynchronous copies keep a ring of slices of both operands in shared memory full, with the summed axis outermost: copies of
single elements transpose an operand that is contiguous along it. If there are few tiles, groups of a block's threads and
blocks of a cluster share the summed axis; their sums are added in a fixed order. If there are many, the last blocks may share
evenly the slices of tiles that would not fill a last round ("Stream-K", Osama et al., 2023). A tile at an edge is shifted
inwards instead of reading past it, and stores only elements that no other tile stores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import Any

from rlx.backends.cuda.render import CudaWriter, may_fail
from rlx.backends.cuda.schedule import WARP, Tiled, apart, busy_points
from rlx.backends.cuda.vectors import aligned, width
from rlx.backends.shared.packed import is_known
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.kernel import Contract, Kernel, Operand, Stmt
from rlx.ir.ops.pack import pack, panels
from rlx.records import record

MANY_ROWS = 1024  # for which a weight is stored anew
PAD = 4  # floats behind a row of a slice, against bank conflicts
SHARED = 227 << 10  # bytes of a block

# Costs in clock cycles of a multiprocessor, fitted to the times of 26 products in 4 to 14 sizes on an H200: the choice takes 0.6%
# longer than the best on average.
PRODUCTS = 128  # multiply-adds
LOADS, COPIES = 0.81, 13.2  # instructions for each element that a thread loads, and that a block copies
FILLED, RISE = 16, 0.032  # warps that keep a multiprocessor busy, and the power of their number by which fewer are slower
COPIED = 9.5  # bytes, by copies of single elements
TILE, MEET = 247, 12.3  # of each sum of a thread; where groups add theirs
EXCHANGE, GIVEN = 2860, 1.9  # between blocks: the least, and sums that all of them give in a cycle
HANDED = 13000  # for each block that shares a tile of the last round: to leave its sums, and for another one to add them
MOST_SHARES = 4  # blocks of such a tile, on average
TWELVE = 0.955  # times as long as the other terms say, with 12 rows of a thread and one group


@record
class Size:
    """`rows` x `columns` of a block, `down` x `across` of a thread. `groups` of a block's threads and `parts` (blocks of a
    cluster) share the summed axis. `depth` of a slice."""

    rows: int
    columns: int
    down: int
    across: int
    groups: int = 1
    parts: int = 1
    resident: int = 2
    depth: int = 16
    stages: int = 4

    @property
    def threads(self) -> int:
        return self.rows // self.down * (self.columns // self.across) * self.groups

    @property
    def shared(self) -> int:
        """Bytes of the ring, in which sums are combined at the end."""
        slices = self.stages * self.depth * (self.rows + self.columns + 2 * PAD)
        return 4 * max(slices, self.rows * self.columns * self.groups * (self.groups * self.parts > 1))

    def cost(self, c: Contract, points: int, multiprocessors: int) -> tuple[float, tuple[int, int] | None]:
        """An estimate in cycles: full rounds of resident blocks, then the rest of them; and the tiles that are left for the last
        round and the blocks that share them, if they take less time so."""
        steps, tiles = -(-c.k // self.depth), points * -(-c.m // self.rows) * -(-c.n // self.columns)
        depth, sums = self.depth * -(-c.k // (self.depth * self.parts)), self.rows * self.columns // self.threads
        blocks, slots = -(-tiles * self.parts // multiprocessors), self.resident * multiprocessors

        def at_once(count: int) -> float:
            busy = min(1, count * self.threads / WARP / FILLED) ** RISE
            each = 1 + LOADS / self.down + LOADS / self.across + COPIES / self.rows + COPIES / self.columns
            products = self.rows * self.columns * each / PRODUCTS / busy * (TWELVE if (self.down, self.groups) == (12, 1) else 1)
            return count * depth * max(products, 4 * (self.rows + self.columns) / COPIED)

        (full, rest), shares = divmod(blocks, self.resident), None
        main = full * at_once(self.resident) + (at_once(rest) if rest else 0)
        rounds, left = divmod(tiles, slots)
        sharing = min(slots, MOST_SHARES * left)  # not with 12 rows of a thread, whose sums leave too few registers
        if self.groups * self.parts == 1 and self.down == 8 and rounds and left and 2 * sharing <= left * steps:
            shared = (rounds + left / sharing) * at_once(self.resident) + HANDED * sharing / left
            main, shares = (shared, (left, sharing)) if shared < main else (main, None)
        ends = TILE * blocks * sums / min(blocks, self.resident) + MEET * sums * self.groups * (self.groups > 1)
        exchange = (EXCHANGE + self.rows * self.columns * self.parts / GIVEN) * (self.parts > 1)
        return main + ends + exchange, shares


_TABLE = [(96, 128, 12, 8, 1, 1, 3), (128, 128, 8, 8, 1, 1, 2), (64, 128, 8, 8, 2, 1, 2), (64, 32, 8, 4, 4, 1, 2)]
_TABLE += [(64, 64, 8, 8, 2, parts, 3) for parts in (1, 2, 4)] + [(64, 64, 8, 8, 4, parts, 2, 32, 3) for parts in (1, 2)]
_TABLE += [(64, 96, 8, 12, 4, 2, 1), (64, 96, 8, 12, 2, 1, 2), (96, 96, 8, 12, 2, 1, 2), (96, 128, 12, 8, 2, 1, 1)]
_TABLE += [(128, 96, 8, 12, 2, 2, 1), (32, 96, 4, 12, 4, 1, 2)]
_TABLE += [(32, 32, 4, 4, 4, parts, 4) for parts in (1, 2)] + [(16, 32, 4, 4, 4, parts, 4) for parts in (1, 2, 4, 8)]
SIZES = tuple(Size(*numbers) for numbers in _TABLE)


def packs(node: Node, graph: Graph, options: Any) -> Value | None:
    """The weight of a product of many rows, stored anew so that its columns are adjacent: then chunks of slices are copied, not
    elements. None: it is so already, or programs of fewer rows, which share the state, share it too."""
    x, w = node.inputs
    turned = w.rank == 2 and w.node.op.name == "transpose" and w.shape.static[1] % 4 == 0 and is_known(w)
    if not turned or math.prod(x.shape.static[:-1]) < MANY_ROWS or not x.dtype == w.dtype == f32:
        return None
    return None if graph.handles or options.precision == "tf32" else pack(w, layout=panels(w.shape.static[1]))  # type: ignore[return-value]


def by_rows(kernel: Kernel) -> Kernel:
    """A right operand that is one panel of all columns is a matrix row by row."""

    def plain(s: Stmt) -> Stmt:
        whole = isinstance(s, Contract) and isinstance(s.b, Operand) and s.b.panel == s.n and s.b.group == 1
        return replace(s, b=replace(s.b, row_stride=s.n, col_stride=1, panel=0)) if whole else s  # type: ignore[type-var]

    body = tuple(map(plain, kernel.body))
    return kernel if all(map(is_, body, kernel.body)) else replace(kernel, body=body)


@record
class FmaLaunch(Tiled):
    """`shares`: leftover tiles, and the blocks that share them."""

    size: Size = SIZES[0]
    shares: tuple[int, int] | None = None

    @property
    def blocks(self) -> int:
        left, sharing = self.shares or (0, 0)
        return super().blocks * self.size.parts - left + sharing


def by_fma(
    kernel: Kernel, multiprocessors: int = 132, size: Size | None = None, clusters: bool = True, most: int = SHARED
) -> FmaLaunch | None:
    """The launch of a contraction of stored f32 operands; None: it is none. `clusters`: the GPU has clusters of blocks. `most`:
    bytes of shared memory of a block."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or c.also or kernel.locals or c.acc.dtype != f32 or 0 in (c.m, c.n, c.k):
        return None
    if any(not isinstance(o, Operand) or o.panel or o.blocks or o.dtype != f32 for o in (c.a, c.b)):
        return None
    points = busy_points(kernel, None)
    sizes = [s for s in SIZES if s.shared <= most and (clusters or s.parts == 1)]
    chosen = size or min(sizes, key=lambda s: s.cost(c, points, multiprocessors)[0])
    threads = chosen.threads
    made = FmaLaunch(kernel, threads, threads, chosen.shared, rows=chosen.rows, columns=chosen.columns, size=chosen)
    whole = made.blocks and not kernel.limits and not may_fail(kernel)  # blocks that wait for others need all of them to run
    if whole and (shares := chosen.cost(c, points, multiprocessors)[1]):
        made = replace(made, shares=shares, counters=shares[1])
        made = replace(made, scratch=16 * -(-chosen.rows * chosen.columns * shares[1] // (4 * made.blocks)))
    return replace(made, shared=apart(made, multiprocessors, most))


class FmaWriter(CudaWriter):
    launch: FmaLaunch

    @property
    def occupancy(self) -> str:  # type: ignore[override]
        return f", {self.launch.size.resident}"

    @property
    def attributes(self) -> str:  # type: ignore[override]
        return f"__cluster_dims__({self.launch.size.parts}) " if self.launch.size.parts > 1 else ""

    def function(self, name: str, member: bool = False) -> str:
        own = self.launch.size
        names = {"ROWS": own.rows, "COLUMNS": own.columns, "DOWN": own.down, "ACROSS": own.across, "GROUPS": own.groups}
        names |= {"PARTS": own.parts, "DEPTH": own.depth, "STAGES": own.stages}
        constants = ", ".join(f"{key} = {value}" for key, value in names.items())
        shared = (Path(__file__).parent / "fma.h").read_text()
        return f"constexpr int {constants};\n{shared}\n" + super().function(name, member)

    def coordinates(self) -> Iterator[str]:
        if not self.launch.shares:
            yield from self.place(f"blockIdx.x / {self.launch.size.parts}")
            yield f"const int rank = blockIdx.x % {self.launch.size.parts};  // in the cluster"

    def place(self, tile: str) -> Iterator[str]:
        """The coordinates of a tile."""
        rows, columns = self.launch.tiles
        yield f"rlx_index point = {tile};"
        yield from self.divided(("tile_n", columns), ("tile_m", rows))

    def body(self) -> None:
        if not self.launch.shares:
            return super().body()
        c = self.launch.contract
        left, sharing = self.launch.shares
        sizes = f"{self.launch.blocks - sharing}, {left}, {sharing}, {-(-c.k // self.launch.size.depth)}"
        self.line(f"using tiles = rlx_tiles<{sizes}>;")
        with self.scope(["for (int n = 0;; n++) {"]):
            self.line("const rlx_piece piece = tiles::piece(blockIdx.x, n);")
            self.line("if (piece.begin == piece.end) return;")
            self.line("if (n > 0) __syncthreads();  // the ring is done with")
            for text in self.place("piece.tile"):
                self.line(text)
            super().body()

    def statement(self, s: Stmt) -> None:
        if isinstance(s, Contract):
            with self.alone():
                self.tile(s)
        else:
            super().statement(s)

    def tile(self, c: Contract) -> None:
        size = self.launch.size
        across, members = size.columns // (8 * size.across), size.threads // size.groups
        m = self.limits.get(c.i) or self.limit(c.i, c.m) or str(c.m)
        self.line(f"const rlx_index row0 = tile_m * {size.rows}, column0 = tile_n * {size.columns};")
        self.line(f"if (row0 >= {m}) return;")
        for name, first, extent, own in (("top", "row0", c.m, size.rows), ("side", "column0", c.n, size.columns)):
            inside = extent % own == 0 or extent < own
            self.line(f"const rlx_index {name} = {first if inside else f'{first} < {extent - own} ? {first} : {extent - own}'};")
        self.line("extern __shared__ __align__(128) float rlx_ring[];")
        # lanes: two adjacent rows, 8 columns, twice: then a load by 16 bytes passes in two turns
        self.line(f"const int warp = threadIdx.x % {members} / 32, lane = threadIdx.x % 32;")
        self.line(f"const int row = warp / {across} * {4 * size.down} + (lane / 16 * 2 + lane % 2) * 4;")
        self.line(f"const int column = warp % {across} * {8 * size.across} + lane / 2 % 8 * 4;")
        steps = -(-c.k // size.depth)
        if self.launch.shares:
            self.line("const int begin = piece.begin, end = piece.end;")
        else:
            self.line(f"const int begin = {steps} * rank / {size.parts}, end = {steps} * (rank + 1) / {size.parts};")
        for name, o, first, extent in (("a", c.a, "top", c.m), ("b", c.b, "side", c.n)):
            assert isinstance(o, Operand)
            side, step = (o.row_stride, o.col_stride) if o is c.a else (o.col_stride, o.row_stride)
            wide = side == 1 and extent % 4 == 0 and step % 4 == 0 and aligned(o.offset, None, 4)
            own = size.rows if o is c.a else size.columns
            kind = f"rlx_slices<{own}, {extent}, {side}, {step}, {c.k}, {str(wide).lower()}>"
            self.line(f"const {kind} {name}({self.names[o.buffer]} + {self.value(o.offset)}, {first}, begin * {size.depth});")
        self.line(f"float sum[{size.down}][{size.across}] = {{}};")
        self.line(f"rlx_multiply(sum, a, b, rlx_ring, row, column, end - begin, {c.k} - begin * {size.depth});")
        if self.launch.shares:
            self.line("if (tiles::join(sum, piece, (float4*)rlx_scratch, rlx_counters)) continue;")
        if size.groups * size.parts > 1:
            self.shared_sums(c, m)
        else:
            self.own_sums(c, m)

    def own_sums(self, c: Contract, m: str) -> None:
        size, own = min(4, width(c.epilogue, (), c.j, c.n)), self.launch.size
        heads = [f"for (int r = 0; r < {own.down}; r++) {{", f"for (int s = 0; s < {own.across}; s += {size}) {{"]
        with self.scope([text for head in heads for text in ("#pragma unroll", head)], 2):
            i, j0 = "top + row + r % 4 + r / 4 * 16", "side + column + s % 4 + s / 4 * 32"
            self.element(c, m, (i, j0), size, "sum[r][s + v]" if size > 1 else "sum[r][s]")

    def shared_sums(self, c: Contract, m: str) -> None:
        size, own = min(4, width(c.epilogue, (), c.j, c.n)), self.launch.size
        share = own.rows * own.columns // own.parts
        self.line("rlx_leave(sum, rlx_ring, row, column);")
        head = f"for (int e = threadIdx.x * {size}; e < {share}; e += {own.threads * size}) {{"
        with self.scope(["#pragma unroll 1", head]):
            self.line(f"const int at = rank * {share} + e;")
            self.line(f"float acc[{size}];")
            self.line("rlx_meet(acc, rlx_ring, at);")
            place = f"top + at / {own.columns}", f"side + at % {own.columns}"
            self.element(c, m, place, size, "acc[v]" if size > 1 else "acc[0]")
        if own.parts > 1:
            self.line("rlx_cluster_shares();  // no block leaves while another one still reads its memory")

    def element(self, c: Contract, m: str, place: tuple[str, str], size: int, value: str) -> None:
        """The epilogue of `size` adjacent sums, if this tile stores them."""
        i, j0, own = self.fresh("i"), self.fresh("j"), self.launch.size
        self.line(f"const rlx_index {i} = {place[0]}, {j0} = {place[1]};")
        tests = [f"{i} >= {m}", *[f"{i} < row0"] * (c.m > own.rows), *[f"{j0} < column0"] * (c.n > own.columns)]
        tests += [f"{j0} >= {c.n}"] * (c.n < own.columns)
        self.line(f"if ({' || '.join(tests)}) continue;")
        self.names[c.i], self.names[c.acc] = i, value
        if size > 1:
            self.in_vectors(c.epilogue, (), c.j, size, j0)
        else:
            self.names[c.j] = j0
            self.block(c.epilogue)


__all__ = ["SIZES", "FmaLaunch", "FmaWriter", "Size", "by_fma", "by_rows", "packs"]

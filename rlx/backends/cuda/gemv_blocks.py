"""Products with quantised weights (rlx.ir.blocks.Panel) and few rows, bound by reading the weights once.

A block takes panels of 32 columns, one after the other, for some rows. Its warps share the summed axis, and so do the blocks of
a cluster, which add their sums through shared memory in a fixed order; every warp keeps the loads of some turns in flight, also
from one panel to the next. Weights become bf16 without rounding: they are integers of at most 8 bits. The left operand lies in
shared memory as bf16 numbers that add up to it exactly, each in its own column of a tensor-core product, so products and sums are
those of f32. Sums of a turn are scaled in f32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Kernel, Load, Operand, Stmt, Var, const, k

WARPS = 8
THREADS = 32 * WARPS
PIECES = {"bf16": 1, "f16": 2, "f32": 3}  # bf16 numbers that add up to one
MOST_PIECES = 32  # of all rows of a block: four tiles of a product
SHARED_BYTES = 220 << 10  # of the blocks on a multiprocessor
CLUSTERS = (1, 2, 4, 8)  # blocks
AT_ONCE = (4, 2, 1)  # turns of a warp whose loads are in flight
PANEL_TURNS = 2  # the time of a panel besides its turns, in turns of a warp


@dataclass(frozen=True)
class BlocksLaunch(Launch):
    """`rows` of a block; `parts`: blocks of a cluster; `turns` of each; `at_once`: those of a warp in flight. `each`: clusters
    that share the panels of some rows. `resident`: blocks of a multiprocessor."""

    rows: int = 1
    parts: int = 1
    turns: int = 1
    at_once: int = 1
    each: int = 1
    resident: int = 2

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def early(self) -> int:
        """The weights are read before earlier kernels have ended."""
        assert isinstance(self.contract.b, Operand)
        return self.kernel.buffers.index(self.contract.b.buffer)

    @property
    def panels(self) -> int:
        return -(-self.contract.n // PANEL)

    @property
    def passes(self) -> int:
        return -(-self.contract.m // self.rows)

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.passes * self.each * self.parts

    @property
    def columns(self) -> int:
        """Of the tensor-core product."""
        return self.rows * PIECES[self.contract.a.dtype.name]

    @property
    def tiles(self) -> int:
        return -(-self.columns // 8)

    @property
    def pitch(self) -> int:
        """Bytes between columns in shared memory, half of the banks apart."""
        return -(-self.turns * STEP * 2 // 128) * 128 + 64

    @property
    def bytes(self) -> int:
        """The left operand, sums of each warp, and those of a panel and the one before it."""
        locals_ = sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        return locals_ + self.columns * (self.pitch + (WARPS + 2) * PANEL * 4)

    @property
    def cost(self) -> float:
        """Turns of a warp, one after the other."""
        own = -(-self.turns // (WARPS * self.at_once)) * self.at_once
        return -(-self.panels // self.each) * (own + PANEL_TURNS)


def of_blocks(kernel: Kernel, multiprocessors: int = 132, clusters: bool = True, most: int = SHARED_BYTES) -> BlocksLaunch | None:
    """The launch of a product with quantised weights; None: it is none. `clusters`: the GPU has clusters of blocks. `most`: bytes
    of shared memory of a block."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or not isinstance(c.b, Operand) or not c.b.blocks or c.acc.dtype != f32 or 0 in (c.m, c.n, c.k):
        return None
    if c.a.dtype.name not in PIECES or any(x.var is not c.i for x in kernel.limits) or not turn_of(c.b.blocks).exact:
        return None
    rows = -(-c.m // -(-c.m // (MOST_PIECES // PIECES[c.a.dtype.name])))
    while rows:
        for resident in (2, 1):
            found = [_shared_out(kernel, rows, *how, resident * multiprocessors) for how in product(CLUSTERS, AT_ONCE)]
            fits = [x for x in found if x and x.bytes * resident <= min(most, SHARED_BYTES) and (clusters or x.parts == 1)]
            if fits and (resident == 1 or fits[0].tiles == 1):
                best = min(fits, key=lambda x: x.cost)
                return replace(best, shared=best.bytes, resident=resident)
        rows //= 2
    return None


def _shared_out(kernel: Kernel, rows: int, parts: int, at_once: int, most: int) -> BlocksLaunch | None:
    """The launch with at most this many blocks, if turns can be loaded in this way."""
    at = BlocksLaunch(kernel, THREADS, THREADS, rows=rows, parts=parts, at_once=at_once)
    turns = at.contract.k // STEP
    if turns % at_once:
        return None
    each = max(1, most // at.blocks)
    each = -(-at.panels // -(-at.panels // each))  # as few as take the panels in as many rounds
    return replace(at, turns=-(-turns // (parts * at_once)) * at_once, each=each)


class BlocksWriter(CudaWriter):
    launch: BlocksLaunch

    def __init__(self, launch: BlocksLaunch) -> None:
        super().__init__(launch)
        c = launch.contract
        assert isinstance(c.b, Operand)
        self.contract, self.weights = c, c.b
        self.turn = turn_of(c.b.blocks)
        self.tiles = launch.tiles
        self.occupancy = f", {launch.resident}"

    def arguments(self) -> list[str]:
        return [*super().arguments(), "long long early"]

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield "const int me = threadIdx.x, warp = me / 32, lane = me % 32, g = lane / 4, t = lane % 4;"
        yield f"const int part = blockIdx.x % {at.parts}, slot = blockIdx.x / {at.parts} % {at.each};"
        yield f"rlx_index point = blockIdx.x / {at.parts * at.each};"
        yield f"const int row0 = point % {at.passes} * {at.rows};"
        yield f"point /= {at.passes};"
        for var, extent in reversed(self.kernel.grid):
            yield f"const rlx_index {self.name(var, 'g')} = point % {extent};"
            yield f"point /= {extent};"

    def declare_locals(self) -> None:
        at = self.launch
        super().declare_locals()
        used = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        if not self.kernel.locals:
            self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"unsigned char* const rlx_x = rlx_shared + {used};  // the left operand as bf16")
        self.line(f"float* const of_warps = (float*)(rlx_x + {at.columns * at.pitch});")
        self.line(f"float* const of_panel = of_warps + {WARPS * at.columns * PANEL};")

    def begin(self) -> None:
        """The first loads may be in flight before earlier kernels have ended."""
        at, f = self.launch, self.turn.panel.packed
        turns, inner = self.contract.k // STEP, f.block // STEP
        self.line(f"const int first = part * {at.turns}, last = {turns} - first < {at.turns} ? {turns} : first + {at.turns};")
        self.line(f"const int own = first + warp * {at.at_once};")
        start = f"{self.names[self.weights.buffer]} + {self.made(self.weights.offset)}"
        self.line(f"const unsigned char* const weights = {start};")
        self.line(f"rlx_turn held[{at.at_once}];")
        self.line("const auto fetch = [&](int v, unsigned panel, unsigned u) {")
        many = max(1, at.at_once // inner)  # blocks of the turns in flight
        block = f"weights + ((size_t)panel * {turns // inner} + u / {inner} + v / {at.at_once // many}) * {f.nbytes}"
        self.line(f"  const unsigned char* const block = {block};")
        self.line(f"  if (v % {at.at_once // many} == 0) rlx_load_numbers(held[v], block, lane);")
        self.line(f"  rlx_load_turn(held[v], block, u % {inner} + v % {at.at_once // many}, lane);")
        self.line("};")
        self.line("const auto start = [&]() {")
        self.line("  #pragma unroll")
        self.line(f"  for (int v = 0; v < {at.at_once}; v++) if (own < last) fetch(v, slot, own);")
        self.line("};")
        self.line("if (early) start();")
        super().begin()
        self.line("if (!early) start();")

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at = self.launch
        most = self.limit(s.i, s.m) or str(s.m)
        self.line(f"const int rows = {most} - row0 < {at.rows} ? {most} - row0 : {at.rows};")
        self.line("if (rows <= 0) return;")
        self.stage(s)
        self.line("__syncthreads();")
        with self.alone():
            self.line(f"const unsigned char* x_at[{at.tiles}];")
            self.line("#pragma unroll")
            self.line(f"for (int n = 0; n < {at.tiles}; n++)")
            self.line(f"  x_at[n] = rlx_x + (g + 8 * n < {at.columns} ? g + 8 * n : 0) * {at.pitch};")
            head = f"for (int panel = slot, round = 0; panel < {at.panels}; panel += {at.each}, round++) {{"
            with self.scope(["#pragma unroll 1", head]):
                self.products()
                self.add_up()
                self.finish()
            if at.parts > 1:
                self.line("rlx_cluster_sync();  // the other blocks have read this one's memory")
        return None

    # -- the left operand

    def stage(self, c: Contract) -> None:
        row, column, span = Var("row", index_), Var("column", index_), self.launch.turns * STEP
        self.names[row] = "(rlx_index)(row0 + r)"
        if isinstance(c.a, Computed):
            name = self.name(c.a.column, "i")
            with self.scope(["for (int r = 0; r < rows; r++) {"]):
                self.names[c.a.row] = self.names[c.i] = self.names[row]
                self.block(c.a.before)
                head = f"for (rlx_index {name} = first * {STEP} + me; {name} < last * {STEP}; {name} += {THREADS}) {{"
                with self.scope(["#pragma unroll 4", head]), self.alone():
                    self.split(c.a.body, k.cast(k.cast(c.a.value, c.a.dtype), f32), name)
                self.exchanged(*c.a.before, *c.a.body)
            return
        index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
        name = self.name(column, "i")
        with self.scope(["#pragma unroll 8", f"for (int e = me; e < rows * {span}; e += {THREADS}) {{"]), self.alone():
            self.line(f"const int r = e / {span};")
            self.line(f"const rlx_index {name} = first * {STEP} + e % {span};")
            with self.scope([f"if ({name} < last * {STEP}) {{"]):
                self.split((), k.cast(Load(c.a.buffer, index), f32), name)

    def split(self, body: tuple[Stmt, ...], value: Expr, column: str) -> None:
        """Store an element as bf16 numbers that add up to it."""
        self.own.append(value)
        (text,) = self.block(body, [value])
        pieces = PIECES[self.contract.a.dtype.name]
        self.line(f"float rest = {text};")
        for piece in range(pieces):
            self.line(f"const uint32_t high{piece} = __float_as_uint(rest) >> 16;")
            place = f"rlx_x + (r * {pieces} + {piece}) * {self.launch.pitch}"
            self.line(f"((uint16_t*)({place}))[{column} - first * {STEP}] = high{piece};")
            if piece + 1 < pieces:
                whole = f"__uint_as_float(high{piece} << 16)"
                self.line(f"rest = rest == {whole} ? 0.0f : rest - {whole};")

    # -- the products

    def products(self) -> None:
        """A turn is replaced by a later one, of this panel or the next, before it is used."""
        at, step = self.launch, self.launch.at_once
        self.line(f"float sum[2][{at.tiles}][4] = {{}};")
        with self.scope(["#pragma unroll 1", f"for (int u = own; u < last; u += {WARPS * step}) {{"]):
            self.line("rlx_numbers numbers;")
            self.line(f"const bool more = u + {WARPS * step} < last;")
            self.line(f"const int next = more ? u + {WARPS * step} : own, at = more ? panel : panel + {at.each};")
            with self.scope(["#pragma unroll", f"for (int v = 0; v < {step}; v++) {{"]):
                self.line("const rlx_turn turn = held[v];")
                self.line(f"if (v % {min(step, self.turn.panel.packed.block // STEP)} == 0) numbers = rlx_wide_numbers(turn);")
                self.line(f"if (at < {at.panels}) fetch(v, at, next);")
                self.line(f"rlx_multiply_turn(turn, numbers, t, x_at, (u - first + v) * {2 * STEP}, sum);")

    # -- sums of warps and blocks

    def add_up(self) -> None:
        """all[column][row of the panel]: the sums of the warps."""
        columns, sums = self.launch.columns, self.launch.columns * PANEL
        with self.scope(["#pragma unroll", f"for (int e = 0; e < {self.launch.tiles * 8}; e++) {{"]):
            self.line("const int column = e / 8 * 8 + 2 * t + e % 2, row = 4 * g + e / 2 % 4;")
            place = f"of_warps[(warp * {columns} + column) * {PANEL} + row]"
            self.line(f"if (column < {columns}) {place} = sum[e / 4 % 2][e / 8][e % 4];")
        self.line("__syncthreads();")
        self.line(f"float* const all = of_panel + round % 2 * {sums};")
        with self.scope([f"for (int e = me; e < {sums}; e += {THREADS}) {{"]):
            self.line("float one = of_warps[e];")
            self.line("#pragma unroll")
            self.line(f"for (int w = 1; w < {WARPS}; w++) one += of_warps[w * {sums} + e];")
            self.line("all[e] = one;")
        self.line("rlx_cluster_sync();" if self.launch.parts > 1 else "__syncthreads();")

    def finish(self) -> None:
        """The epilogue of a panel, in one block of the cluster."""
        at, c = self.launch, self.contract
        pieces = PIECES[c.a.dtype.name]
        with self.scope([f"for (int e = me; e < {at.rows * PANEL} && part == round % {at.parts}; e += {THREADS}) {{"]):
            self.line(f"const int r = e / {PANEL}, j = panel * {PANEL} + e % {PANEL};")
            self.line(f"if (r >= rows || j >= {c.n}) continue;")
            self.line("float result = 0;")
            place = f"all + (r * {pieces} + piece) * {PANEL} + e % {PANEL}"
            if at.parts > 1:
                self.line(f"for (int other = 0; other < {at.parts}; other++)")
                self.line(f"  for (int piece = 0; piece < {pieces}; piece++) result += rlx_of_block({place}, other);")
            else:
                self.line(f"for (int piece = 0; piece < {pieces}; piece++) result += *({place});")
            self.names[c.i], self.names[c.j] = self.fix("i", index_, "row0 + r"), self.fix("j", index_, "j")
            self.names[c.acc] = "result"
            self.block(c.epilogue)

    @property
    def attributes(self) -> str:  # type: ignore[override]
        return f"__cluster_dims__({self.launch.parts}) " if self.launch.parts > 1 else ""

    def function(self, name: str, member: bool = False) -> str:
        return self.turn.header() + super().function(name, member)


__all__ = ["BlocksLaunch", "BlocksWriter", "of_blocks"]

"""Products with quantised weights (rlx.ir.blocks.Panel) and few rows, bound by reading the weights once.

A block computes the 32 columns of a panel for some rows; its warps share the summed axis, and so do the blocks of a cluster,
which add their sums through shared memory in a fixed order. In a lane, each 16-byte load brings 4 columns. Weights become bf16
without rounding: they are integers of at most 8 bits. The left operand lies in shared memory as bf16 numbers that add up to it
exactly, each in its own column of a tensor-core product, so products and sums are those of f32. Sums of a turn are scaled in f32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Computed, Contract, Kernel, Load, Operand, Stmt, Var, const, k

WARPS = 8
THREADS = 32 * WARPS
PIECES = {"bf16": 1, "f16": 2, "f32": 3}  # bf16 numbers that add up to one
MOST_PIECES = 32  # of all rows of a block: four tiles of a product
SHARED_BYTES = 160 << 10
RESIDENT = 4  # blocks of a multiprocessor
CLUSTER = 8  # blocks, at most
AT_ONCE = 4  # turns whose loads are under way together
WARP_TURNS = 2 * AT_ONCE  # of a warp, before more blocks share the summed axis


@dataclass(frozen=True)
class BlocksLaunch(Launch):
    """`rows` of a block; `parts`: blocks of a cluster; `turns` of each; `at_once`: turns of a loop iteration."""

    rows: int = 1
    parts: int = 1
    turns: int = 1
    at_once: int = 1

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def panels(self) -> int:
        return -(-self.contract.n // PANEL)

    @property
    def passes(self) -> int:
        return -(-self.contract.m // self.rows)

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.passes * self.panels * self.parts

    @property
    def columns(self) -> int:
        """Of the tensor-core product."""
        return self.rows * PIECES[self.contract.a.dtype.name]

    @property
    def pitch(self) -> int:
        """Bytes between columns in shared memory, half of the banks apart."""
        return -(-self.turns * STEP * 2 // 128) * 128 + 64


def of_blocks(kernel: Kernel, multiprocessors: int = 132) -> BlocksLaunch | None:
    """The launch of a product with quantised weights; None: it is none."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or not isinstance(c.b, Operand) or not c.b.blocks or c.acc.dtype != f32 or 0 in (c.m, c.n, c.k):
        return None
    if c.a.dtype.name not in PIECES or any(x.var is not c.i for x in kernel.limits) or not turn_of(c.b.blocks).exact:
        return None
    turns, locals_ = c.k // STEP, sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in kernel.locals)
    at_once = next(n for n in (AT_ONCE, 2, 1) if turns % n == 0)
    rows = -(-c.m // -(-c.m // (MOST_PIECES // PIECES[c.a.dtype.name])))
    while rows:
        for parts in (1, 2, 4, CLUSTER):
            each = -(-turns // (parts * at_once)) * at_once
            at = BlocksLaunch(kernel, THREADS, THREADS, rows=rows, parts=parts, turns=each, at_once=at_once)
            shared = locals_ + max(at.columns * at.pitch, WARPS * at.columns * PANEL * 4)
            more = at.blocks < RESIDENT * multiprocessors and each >= 2 * WARPS * WARP_TURNS
            if shared <= SHARED_BYTES and (not more or parts == CLUSTER):
                return BlocksLaunch(kernel, THREADS, THREADS, shared, rows=rows, parts=parts, turns=each, at_once=at_once)
        rows //= 2
    return None


class BlocksWriter(CudaWriter):
    launch: BlocksLaunch

    def __init__(self, launch: BlocksLaunch) -> None:
        super().__init__(launch)
        c = launch.contract
        assert isinstance(c.b, Operand)
        self.contract, self.weights = c, c.b
        self.turn = turn_of(c.b.blocks)
        self.tiles = -(-launch.columns // 8)
        self.occupancy = ", 2" if self.tiles == 1 else ", 1"

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield "const int me = threadIdx.x, warp = me / 32, lane = me % 32, g = lane / 4, t = lane % 4;"
        yield f"const int part = blockIdx.x % {at.parts}, panel = blockIdx.x / {at.parts} % {at.panels};"
        yield f"rlx_index point = blockIdx.x / {at.parts * at.panels};"
        yield f"const int row0 = point % {at.passes} * {at.rows};"
        yield f"point /= {at.passes};"
        for var, extent in reversed(self.kernel.grid):
            yield f"const rlx_index {self.name(var, 'g')} = point % {extent};"
            yield f"point /= {extent};"

    def declare_locals(self) -> None:
        super().declare_locals()
        used = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        if not self.kernel.locals:
            self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"unsigned char* const rlx_x = rlx_shared + {used};  // the left operand as bf16, then sums of each warp")

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at = self.launch
        most = self.limit(s.i, s.m) or str(s.m)
        self.line(f"const int rows = {most} - row0 < {at.rows} ? {most} - row0 : {at.rows};")
        self.line("if (rows <= 0) return;")
        total = s.k // STEP
        self.line(f"const int first = part * {at.turns}, last = {total} - first < {at.turns} ? {total} : first + {at.turns};")
        self.stage(s)
        self.line("__syncthreads();")
        with self.alone():
            self.products()
            self.add_up()
            self.finish()
        return None

    # -- the left operand

    def stage(self, c: Contract) -> None:
        pieces = PIECES[c.a.dtype.name]
        with self.scope(["for (int r = 0; r < rows; r++) {"]):
            row, column = Var("row", index_), Var("column", index_)
            self.names[row] = "(rlx_index)(row0 + r)"
            if isinstance(c.a, Computed):
                self.names[c.a.row] = self.names[c.i] = "(rlx_index)(row0 + r)"
                self.block(c.a.before)
                column, body, value = c.a.column, c.a.body, k.cast(k.cast(c.a.value, c.a.dtype), f32)
            else:
                index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
                body, value = (), k.cast(Load(c.a.buffer, index), f32)
            name = self.name(column, "i")
            head = f"for (rlx_index {name} = first * {STEP} + me; {name} < last * {STEP}; {name} += {THREADS}) {{"
            with self.scope(["#pragma unroll 4", head]), self.alone():
                self.own.append(value)
                (text,) = self.block(body, [value])
                self.line(f"float rest = {text};")
                for piece in range(pieces):
                    self.line(f"const uint32_t high{piece} = __float_as_uint(rest) >> 16;")
                    place = f"rlx_x + (r * {pieces} + {piece}) * {self.launch.pitch}"
                    self.line(f"((uint16_t*)({place}))[{name} - first * {STEP}] = high{piece};")
                    if piece + 1 < pieces:
                        whole = f"__uint_as_float(high{piece} << 16)"
                        self.line(f"rest = rest == {whole} ? 0.0f : rest - {whole};")
            self.exchanged(*(c.a.before if isinstance(c.a, Computed) else ()), *body)

    # -- the products

    def products(self) -> None:
        at, f = self.launch, self.turn.panel.packed
        step, inner = at.at_once, f.block // STEP
        row_bytes = self.contract.k // f.block * f.nbytes
        start = f"{self.names[self.weights.buffer]} + {self.made(self.weights.offset)} + (size_t)panel * {row_bytes}"
        self.line(f"const unsigned char* const weights = {start};")
        self.line(f"const unsigned char* x_at[{self.tiles}];")
        self.line("#pragma unroll")
        self.line(f"for (int n = 0; n < {self.tiles}; n++)")
        self.line(f"  x_at[n] = rlx_x + (g + 8 * n < {at.columns} ? g + 8 * n : 0) * {at.pitch};")
        self.line(f"float sum[2][{self.tiles}][4] = {{}};")
        with self.scope(["#pragma unroll 1", f"for (int u = first + warp * {step}; u < last; u += {WARPS * step}) {{"]):
            self.line(f"rlx_turn turn[{step}];")
            self.line("#pragma unroll")
            self.line(f"for (int v = 0; v < {step}; v++)")
            # turns of one iteration that have one block have one load of its numbers
            block, number = ("u", f"u % {inner} + v") if inner >= step else ("(u + v)", f"(u + v) % {inner}")
            self.line(f"  turn[v] = rlx_load_turn(weights + (size_t)({block} / {inner}) * {f.nbytes}, {number}, lane);")
            self.line("#pragma unroll")
            self.line(f"for (int v = 0; v < {step}; v++)")
            self.line(f"  rlx_multiply_turn(turn[v], t, x_at, (u - first + v) * {2 * STEP}, sum);")

    # -- sums of warps and blocks

    def add_up(self) -> None:
        """sums[column][row of the panel], in the memory of the left operand."""
        columns = self.launch.columns
        self.line("float* const sums = (float*)rlx_x;")
        self.line("__syncthreads();")
        with self.scope(["#pragma unroll", f"for (int e = 0; e < {self.tiles * 8}; e++) {{"]):
            self.line("const int column = e / 8 * 8 + 2 * t + e % 2, row = 4 * g + e / 2 % 4;")
            place = f"sums[(warp * {columns} + column) * {PANEL} + row]"
            self.line(f"if (column < {columns}) {place} = sum[e / 4 % 2][e / 8][e % 4];")
        self.line("__syncthreads();")
        with self.scope([f"for (int e = me; e < {columns * PANEL}; e += {THREADS}) {{"]):
            self.line("float all = sums[e];")
            self.line(f"for (int w = 1; w < {WARPS}; w++) all += sums[w * {columns * PANEL} + e];")
            self.line("sums[e] = all;")

    def finish(self) -> None:
        at, c = self.launch, self.contract
        pieces = PIECES[c.a.dtype.name]
        self.line("rlx_cluster_sync();" if at.parts > 1 else "__syncthreads();")
        with self.scope([f"for (int e = me; e < {at.rows * PANEL} && part == 0; e += {THREADS}) {{"]):
            self.line(f"const int r = e / {PANEL}, j = panel * {PANEL} + e % {PANEL};")
            self.line(f"if (r >= rows || j >= {c.n}) continue;")
            self.line("float all = 0;")
            place = f"sums + (r * {pieces} + piece) * {PANEL} + e % {PANEL}"
            if at.parts > 1:
                self.line(f"for (int other = 0; other < {at.parts}; other++)")
                self.line(f"  for (int piece = 0; piece < {pieces}; piece++) all += rlx_of_block({place}, other);")
            else:
                self.line(f"for (int piece = 0; piece < {pieces}; piece++) all += *({place});")
            self.names[c.i], self.names[c.j] = self.fix("i", index_, "row0 + r"), self.fix("j", index_, "j")
            self.names[c.acc] = "all"
            self.block(c.epilogue)
        if at.parts > 1:
            self.line("rlx_cluster_sync();  // the other blocks' memory has been read")

    def function(self, name: str, member: bool = False) -> str:
        text, at = super().function(name, member), self.launch
        text = text.replace("__launch_bounds__", f"__cluster_dims__({at.parts}) __launch_bounds__", 1) if at.parts > 1 else text
        return self.turn.header() + text


__all__ = ["BlocksLaunch", "BlocksWriter", "of_blocks"]

"""Tiles of quantised weights and of 8-bit floats for the tensor cores, decoded by the warps that copy.

A warp decodes turns of 32 elements of 32 columns; a thread widens 16 floats. It loads their bytes, and its part of a left operand
in f32, a stage ahead.
"""

from __future__ import annotations

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.tensor import GROUP, LINE, TensorLaunch, blocks_of, kind
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Operand, Var, const, k

DEPTH = LINE // 2  # elements of a line that are decoded


class PackedCopies(CudaWriter):
    """`turn`: how weights are read, None if they are no quantised blocks."""

    launch: TensorLaunch
    most: str  # rows of the product

    def __init__(self, launch: TensorLaunch) -> None:
        super().__init__(launch)
        form = blocks_of(launch.contract)
        self.turn, self.f16 = turn_of(form) if form else None, str(kind(launch.contract)[0] == "f16").lower()

    @property
    def units(self) -> int:
        """Turns of a stage for each warp."""
        return -(-self.launch.tiling.columns // PANEL * (DEPTH // STEP) // (4 * self.launch.copying))

    def each_unit(self) -> list[str]:
        t = self.launch.tiling
        all_units, warps = t.columns // PANEL * (DEPTH // STEP), 4 * self.launch.copying
        inside = [f"if (warp + n * {warps} < {all_units}) {{"] if all_units % warps else ["{"]
        return ["#pragma unroll", f"for (int n = 0; n < {self.units}; n++) {{", *inside]

    def ahead(self, c: Contract, k0: str) -> None:
        """Load the turns of this warp from `k0` on into `held`. There are no panels behind the last one: the last one instead."""
        assert self.turn and isinstance(c.b, Operand)
        f = self.turn.panel.packed
        inner, panels = f.block // STEP, -(-c.n // PANEL)
        if k0 == "begin":
            self.line(f"rlx_turn held[{self.units}];")
            base = self.made(c.b.offset)
            self.line(f"const unsigned char* const blocks = {self.names[c.b.buffer]} + {base};")
        with self.scope(self.each_unit(), 2):
            self.line(f"const int unit = warp + n * {4 * self.launch.copying}, u = ({k0}) / {STEP} + unit % {DEPTH // STEP};")
            self.line(f"const int column = column0 / {PANEL} + unit / {DEPTH // STEP};")
            self.line(f"const int panel = column < {panels} ? column : {panels - 1};")
            self.line(f"if (u >= {c.k // STEP}) continue;")
            place = f"((size_t)panel * {c.k // f.block} + u / {inner}) * {f.nbytes}"
            self.line(f"rlx_load_numbers<rlx_far>(held[n], blocks + {place}, lane);")
            self.line(f"rlx_load_turn<rlx_far>(held[n], blocks + {place}, u % {inner}, lane);")
        if c.a.dtype == f32:
            self.ahead_rows(c, k0)

    def ahead_bytes(self, c: Contract, k0: str) -> None:
        """Load the 8-bit floats of this thread from `k0` on into `held`: 16 of each line."""
        assert isinstance(c.b, Operand)
        along, threads = self.launch.sides[1].along, self.launch.copying * GROUP
        row, column = Var("row", index_), Var("column", index_)
        self.names[row], self.names[column] = "(rlx_index)d", "(rlx_index)at"
        index = k.add(c.b.offset, k.add(k.mul(row, const(c.b.row_stride)), k.mul(column, const(c.b.col_stride))))
        count = self.launch.tiling.columns * 4 // threads
        if k0 == "begin":
            self.line(f"uint4 held[{count}];")
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {count}; n++) {{"]):
            self.line(f"const int line = (threadIdx.x + n * {threads}) / 4, part = threadIdx.x % 4 * 16;")
            places = ("line", "part") if along else ("line / 64 * 64 + part", "line % 64")
            self.line(f"const int at = column0 + {places[0]}, d = {k0} + {places[1]};")
            self.line("held[n] = make_uint4(0, 0, 0, 0);")
            place = f"{self.names[c.b.buffer]} + {self.made(index)}"
            self.line(f"if (at < {c.n} && d < {c.k}) held[n] = *(const uint4*)({place});")

    def widened(self, c: Contract, start: int) -> None:
        """The tile of 8-bit floats, as those of the left operand."""
        count, threads = self.launch.tiling.columns * 4 // (self.launch.copying * GROUP), self.launch.copying * GROUP
        self.line(f"uint8_t now[{count}][2][8];")
        self.line(f"memcpy(now, held, {16 * count});")
        self.ahead_bytes(c, f"k0 + {DEPTH}")
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {2 * count}; n++) {{"]):
            self.line(f"const int line = (threadIdx.x + n / 2 * {threads}) / 4, chunk = threadIdx.x % 4 * 2 + n % 2;")
            to = f"(uint16_t*)(to + {start} + line * 128 + (chunk ^ line % 8) * 16)"
            self.line(f"rlx_put_{c.b.dtype}<{self.f16}>({to}, now[n / 2][n % 2]);")

    @property
    def quads(self) -> int:
        """Runs of four f32 elements of the left operand for each thread."""
        return self.launch.tiling.rows * DEPTH // 4 // (self.launch.copying * GROUP)

    def ahead_rows(self, c: Contract, k0: str) -> None:
        """Load the thread's part of the rows of the left operand, in f32, from `k0` on into `wide`."""
        assert isinstance(c.a, Operand)
        row, column = Var("row", index_), Var("column", index_)
        self.names[row], self.names[column] = "(rlx_index)at", "(rlx_index)d"
        index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), column))
        if k0 == "begin":
            self.line(f"float4 wide[{self.quads}];")
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {self.quads}; n++) {{"]):
            self.line(f"const int at = row0 + threadIdx.x / 16 + n * {self.launch.copying * GROUP // 16};")
            self.line(f"const int d = {k0} + threadIdx.x % 16 * 4;")
            self.line("wide[n] = make_float4(0, 0, 0, 0);")
            place = f"{self.names[c.a.buffer]} + {self.made(index)}"
            self.line(f"if (at < {self.most} && d < {c.k}) wide[n] = *(const float4*)({place});")

    def rounded(self, c: Contract) -> None:
        """The tile of the left operand, rounded to the dtype of the products."""
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {self.quads}; n++) {{"]):
            self.line(f"const int line = threadIdx.x / 16 + n * {self.launch.copying * GROUP // 16}, quad = threadIdx.x % 16;")
            pairs = ", ".join(f"rlx_near_pair<{self.f16}>(wide[n].{a}, wide[n].{b})" for a, b in ("xy", "zw"))
            self.line(f"*(uint2*)(to + line * 128 + (quad / 2 ^ line % 8) * 16 + quad % 2 * 8) = make_uint2({pairs});")

    def decoded(self, c: Contract, start: int) -> None:
        """The tile of quantised weights; elements behind the summed axis are zeros."""
        self.line(f"rlx_turn now[{self.units}];")
        self.line(f"for (int n = 0; n < {self.units}; n++) now[n] = held[n];")
        self.ahead(c, f"k0 + {DEPTH}")
        with self.scope(self.each_unit(), 2):
            self.line(f"const int unit = warp + n * {4 * self.launch.copying};")
            self.line(f"unsigned char* const lines = to + {start} + unit / {DEPTH // STEP} * {PANEL * DEPTH * 2};")
            self.line(f"const int chunk = unit % {DEPTH // STEP} * {STEP // 8};")
            decode = f"rlx_decode_turn<{self.f16}>(now[n], lane, lines, chunk);"
            if c.k % DEPTH:
                self.line(f"if (k0 + chunk * 8 < {c.k}) {decode}")
                self.line("else rlx_clear_turn(lane, lines, chunk);")
            else:
                self.line(decode)


__all__ = ["PackedCopies"]

"""Tiles of quantised weights and of 8-bit floats for the tensor cores, decoded by the producer warps.

A warp decodes 32 elements of 32 columns at a time; a thread widens 16 floats. Warps load their bytes, and their part of a left
operand in f32, one stage ahead; bulk copies bring 8-bit floats, and f32 operands that are transposed.
"""

from __future__ import annotations

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.tensor import GROUP, LINE, RAW, TensorLaunch, blocks_of, itemsize, kind
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Operand, Var, const, k

DEPTH = LINE // 2  # elements of a line that are decoded
WAITING = 2  # turns of a warp that are on their way from memory; 3 are too many registers for some formats


class PackedCopies(CudaWriter):
    """`turn`: how weights are read, None if they are no quantised blocks."""

    launch: TensorLaunch
    most: str  # rows of the product

    def __init__(self, launch: TensorLaunch) -> None:
        super().__init__(launch)
        form = blocks_of(launch.contract)
        self.turn, self.f16 = turn_of(form) if form else None, str(kind(launch.contract)[0] == "f16").lower()

    @property
    def waiting(self) -> int:
        """Stages whose weights a warp has loaded, or waits for, before it decodes the first; one where a left operand in f32
        takes the registers."""
        return max(1, WAITING // self.units) if self.turn and self.launch.contract.a.dtype != f32 else 1

    @property
    def units(self) -> int:
        """Turns of a stage for each warp."""
        return -(-self.launch.tiling.columns // PANEL * (DEPTH // STEP) // (4 * self.launch.copying))

    def each_unit(self) -> list[str]:
        t = self.launch.tiling
        all_units, warps = t.columns // PANEL * (DEPTH // STEP), 4 * self.launch.copying
        inside = [f"if (warp + n * {warps} < {all_units}) {{"] if all_units % warps else ["{"]
        return ["#pragma unroll", f"for (int n = 0; n < {self.units}; n++) {{", *inside]

    def first_ahead(self, c: Contract) -> None:
        assert isinstance(c.b, Operand)
        self.line(f"const unsigned char* const blocks = {self.names[c.b.buffer]} + {self.value(c.b.offset)};")
        for n in range(self.waiting):
            self.line(f"rlx_turn held{n}[{self.units}];")
            self.ahead(c, f"begin + {n * DEPTH}", f"held{n}")
        if c.a.dtype == f32:
            self.ahead_rows(c, "begin")

    def ahead(self, c: Contract, k0: str, held: str) -> None:
        """Load the turns of this warp from `k0` on into `held`. There are no panels behind the last one: the last one instead."""
        assert self.turn and isinstance(c.b, Operand)
        f = self.turn.panel.packed
        inner, panels = f.block // STEP, -(-c.n // PANEL)
        with self.scope(self.each_unit(), 2):
            self.line(f"const int unit = warp + n * {4 * self.launch.copying}, u = ({k0}) / {STEP} + unit % {DEPTH // STEP};")
            self.line(f"const int column = column0 / {PANEL} + unit / {DEPTH // STEP};")
            self.line(f"const int panel = column < {panels} ? column : {panels - 1};")
            self.line(f"if (u >= {c.k // STEP}) continue;")
            place = f"((size_t)panel * {c.k // f.block} + u / {inner}) * {f.nbytes}"
            self.line(f"rlx_load_numbers<rlx_far>({held}[n], blocks + {place}, lane);")
            self.line(f"rlx_load_turn<rlx_far>({held}[n], blocks + {place}, u % {inner}, lane);")

    def raw_copies(self, c: Contract) -> None:
        """Bulk copies of the right operand as it is in memory, stages ahead. `fetch_raw(turn, k0)` starts those of a stage."""
        t, side = self.launch.tiling, self.launch.sides[1]
        assert side.tensor
        inner, depth = side.tensor.box[0], LINE // itemsize(c)
        more = "".join(f", (int){self.names[v]}" for v in side.axes)
        along = side.along and not c.tf32
        with self.scope(["const auto fetch_raw = [&](int turn, int k0) {"]):
            self.line(f"uint64_t* const arrived = raw + turn % {RAW};")
            self.line(f"unsigned char* const slot = rlx_ring + {t.stages * t.stage} + turn % {RAW} * {t.raw};")
            self.line(f"rlx_expect(arrived, {t.raw});")
            for part in range(1 if along else t.columns // inner):
                place = f"k0, column0{more}" if along else f"column0 + {part * inner}, k0{more}"
                self.line(f"rlx_load_box(slot + {part * 4096}, &map_b, arrived, {place});")
        self.lines[-1] += ";"
        self.line("if (threadIdx.x == 0)")
        self.line(f"  for (int n = 0; n < {RAW} && begin + n * {depth} < end; n++) fetch_raw(turn + n, begin + n * {depth});")

    def made_of_raw(self, c: Contract, start: int) -> None:
        """A tile of the right operand from `raw`. There, line r of 128 bytes of f32 has chunk n of 16 bytes at n ^ (r % 8)."""
        t, threads, depth = self.launch.tiling, self.launch.copying * GROUP, LINE // itemsize(c)
        self.line(f"rlx_await(raw + turn % {RAW}, turn / {RAW} & 1);")
        self.line(f"const unsigned char* const slot = rlx_ring + {t.stages * t.stage} + turn % {RAW} * {t.raw};")
        count = t.columns * (8 if c.tf32 else 4) // threads
        with self.scope([f"#pragma unroll {4 if c.tf32 else count}", f"for (int n = 0; n < {count}; n++) {{"]):
            if c.tf32:  # a chunk of a line, for each warp
                self.line(f"const int unit = warp + n * {threads // 32}, line = unit / 8 * 32 + lane, chunk = unit % 8;")
                self.line("uint32_t got[4];")
                with self.scope(["for (int v = 0; v < 4; v++) {"]):
                    self.line("const int row = chunk * 4 + v, place = (line / 4 % 8 ^ row % 8) * 16 + line % 4 * 4;")
                    self.line("got[v] = *(const uint32_t*)(slot + line / 32 * 4096 + row * 128 + place);")
                self.line(f"rlx_put<4>((uint32_t*)(to + {start} + line * 128 + (chunk ^ line % 8) * 16), got);")
            else:
                self.line(f"const int line = (threadIdx.x + n * {threads}) / 4, part = threadIdx.x % 4;")
                self.line("uint8_t got[2][8];")
                self.line("*(uint4*)got = *(const uint4*)(slot + line * 64 + part * 16);")
                for v in range(2):
                    to = f"to + {start} + line * 128 + (part * 2 + {v} ^ line % 8) * 16"
                    self.line(f"rlx_put_{c.b.dtype}<{self.f16}>((uint16_t*)({to}), got[{v}]);")
        self.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
        self.line(f'asm volatile("bar.sync 1, {threads};" ::: "memory");')
        self.line(f"if (threadIdx.x == 0 && k0 + {RAW * depth} < end) fetch_raw(turn + {RAW}, k0 + {RAW * depth});")

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
            place = f"{self.names[c.a.buffer]} + {self.value(index)}"
            self.line(f"if (at < {self.most} && d < {c.k}) wide[n] = *(const float4*)({place});")

    def rounded(self, c: Contract) -> None:
        """The tile of the left operand, rounded to the dtype of the products."""
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {self.quads}; n++) {{"]):
            self.line(f"const int line = threadIdx.x / 16 + n * {self.launch.copying * GROUP // 16}, quad = threadIdx.x % 16;")
            pairs = ", ".join(f"rlx_near_pair<{self.f16}>(wide[n].{a}, wide[n].{b})" for a, b in ("xy", "zw"))
            self.line(f"*(uint2*)(to + line * 128 + (quad / 2 ^ line % 8) * 16 + quad % 2 * 8) = make_uint2({pairs});")

    def decoded(self, c: Contract, start: int, held: str) -> None:
        """The tile of quantised weights; elements behind the summed axis are zeros."""
        self.line(f"rlx_turn now[{self.units}];")
        self.line(f"for (int n = 0; n < {self.units}; n++) now[n] = {held}[n];")
        self.ahead(c, f"k0 + {self.waiting * DEPTH}", held)
        if c.a.dtype == f32:
            self.ahead_rows(c, f"k0 + {DEPTH}")
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

"""CUDA C++ of products with rings of weights (gemv_blocks.py)."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.backends.cuda.blocks import FOLDER, turn_of
from rlx.backends.cuda.gemv_blocks import LINE, LINES_AT, THREADS, UNROLLED, WARPS, ZEROS, BlocksLaunch, weights
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f16, f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Load, Stmt, Var, const, k


class BlocksWriter(CudaWriter):
    launch: BlocksLaunch

    def __init__(self, launch: BlocksLaunch) -> None:
        super().__init__(launch)
        self.contract, self.weights = launch.contract, weights(launch.contract)
        self.tiles = launch.tiles
        self.occupancy = f", {launch.resident}"

    def arguments(self) -> list[str]:
        maps = ["const __grid_constant__ rlx_ring_map lines"] * self.launch.plain
        return [*maps, *super().arguments(), "long long early"]

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield "const int me = threadIdx.x, warp = me / 32, lane = me % 32, g = lane / 4, t = lane % 4;"
        yield f"const int part = blockIdx.x % {at.cluster}, slot = blockIdx.x / {at.cluster} % {at.each};"
        yield f"rlx_index point = blockIdx.x / {at.cluster * at.each};"
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
        self.line(f"unsigned char* const zeros = rlx_x + {at.columns * at.pitch};")
        self.line(f"float* const totals = (float*)(zeros + {ZEROS});")
        self.line(f"float* const of_warps = totals + {at.totals // 4};")
        self.line(f"float* const of_panel = of_warps + {WARPS * at.columns * at.sum_pitch};")
        held = used + at.held
        pad = f" + (-(rlx_ring_at(rlx_shared) + {held}) & {LINES_AT - 1})" if at.plain else ""
        self.line(f"unsigned char* const rings = rlx_shared + {held}{pad}, *const ring = rings + warp * {at.slots * at.item};")
        self.line(f"uint64_t* const filled = (uint64_t*)(rings + {WARPS * at.slots * at.item}) + warp * {at.slots};")

    def begin(self) -> None:
        """The first copies may be in flight before earlier kernels have ended."""
        at, turns = self.launch, self.contract.k // STEP
        self.line(f"const int first = part * {at.turns}, last = {turns} - first < {at.turns} ? {turns} : first + {at.turns};")
        self.line(f"const int own = first + warp * {at.at_once};")
        if not at.plain:
            start = f"{self.names[self.weights.buffer]} + {self.value(self.weights.offset)}"
            self.line(f"const unsigned char* const weights = {start};")
        self.line("int coming = slot, next = own;  // panel and turn of the next copy")
        with self.scope(["const auto fetch = [&](int place) {"]):
            self.fetch(turns)
        self.lines[-1] += ";"
        self.line("const auto start = [&]() {")
        self.line(f"  for (int place = 0; place < {at.slots}; place++) fetch(place);")
        self.line("};")
        self.line(f"rlx_ring_begin(filled, {at.slots}, lane);")
        self.line("if (early) start();")
        self.line("rlx_begin();")
        self.line("// copies end before the block does")
        with self.scope(["if (rlx_halted(halt)) {"]):
            own = f"first + (warp + {WARPS} * place) * {at.at_once} < last || coming > slot"
            self.line(f"for (int place = 0; early && place < {at.slots} && ({own}); place++)")
            self.line("  rlx_ring_await<1>(filled + place, 0);")
            self.line("return;")
        self.line("if (!early) start();")

    def fetch(self, turns: int) -> None:
        """Start the copy of a piece to place `place` of the ring."""
        at, inner = self.launch, self.launch.inner
        with self.scope([f"if (next < last && coming < {at.panels}) {{"]):
            self.line(f"unsigned char* const to = ring + place * {at.item};")
            self.line(f"rlx_ring_expect(filled + place, {at.item}, lane);")
            if at.plain:
                self.line(f"for (int n = 0; n < {at.at_once // inner}; n++)")
                box = f"next * {STEP} + n * {LINE // 2}, coming * {PANEL}, lane"
                self.line(f"  rlx_ring_box(to + n * {PANEL * LINE}, &lines, filled + place, {box});")
            elif at.at_once % inner == 0:
                self.line(f"rlx_ring_copy(to, {self.block_at(turns)}, {at.item}, filled + place, lane);")
            else:
                p = at.panel
                self.line(f"const unsigned char* const block = {self.block_at(turns)};")
                self.line(f"rlx_ring_copy(to, block, {p.turns_at}, filled + place, lane);")
                source = f"block + {p.turns_at} + next % {inner} * {p.turn_bytes}"
                self.line(f"rlx_ring_copy(to + {p.turns_at}, {source}, {at.item - p.turns_at}, filled + place, lane);")
            self.line(f"next += {WARPS * at.at_once};")
            self.line(f"if (next >= last) next = own, coming += {at.each};")
        self.line("rlx_ring_end();")

    def block_at(self, turns: int) -> str:
        """Where the block of the next piece begins."""
        inner = self.launch.inner
        return f"weights + ((size_t)coming * {turns // inner} + next / {inner}) * {self.launch.panel.packed.nbytes}"

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at = self.launch
        most = self.limit(s.i, s.m) or str(s.m)
        self.line(f"const int rows = {most} - row0 < {at.rows} ? {most} - row0 : {at.rows};")
        self.line("if (rows <= 0) return;")
        self.stage(s)
        self.line(f"if (me < {ZEROS // 4}) ((uint32_t*)zeros)[me] = 0;")
        self.line("__syncthreads();")
        with self.alone():
            self.line(f"const unsigned char* x_at[{at.tiles}];")
            self.line("#pragma unroll")
            self.line(f"for (int n = 0; n < {at.tiles}; n++)")
            column = f"(g + 8 * n) % {8 // at.spread}" if at.spread > 1 else "g + 8 * n"
            self.line(f"  x_at[n] = rlx_x + ({column} < {at.columns} ? {column} : 0) * {at.pitch};")
            self.line("int place = 0, phase = 0;")
            head = f"for (int panel = slot, round = 0; panel < {at.panels}; panel += {at.each}, round++) {{"
            with self.scope(["#pragma unroll 1", head]):
                self.products()
                self.add_up()
                self.finish()
            if at.cluster > 1:
                self.line("rlx_cluster_sync();  // the other blocks have read this one's memory")
        return None

    # -- the left operand

    def stage(self, c: Contract) -> None:
        if self.launch.digits:
            return self.stage_digits(c)
        row, column, span = Var("row", index_), Var("column", index_), self.launch.turns * STEP
        self.names[row] = "(rlx_index)(row0 + r)"
        if isinstance(c.a, Computed):
            name = self.name(c.a.column, "i")
            with self.scope(["for (int r = 0; r < rows; r++) {"]):
                self.names[c.a.row] = self.names[c.i] = self.names[row]
                self.block(c.a.before)
                begin, end = f"rlx_index {name}_0 = first * {STEP} + me * 4", f"{name}_0 < last * {STEP}"
                head = ["#pragma unroll 4", f"for ({begin}; {end}; {name}_0 += {4 * THREADS}) {{"]
                with self.scope(head), self.alone():
                    self.split(c.a.body, k.cast(k.cast(c.a.value, c.a.dtype), f32), c.a.column, f"{name}_0")
                self.exchanged(*c.a.before, *c.a.body)
            return
        index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
        name, quads = self.name(column, "i"), span // 4
        with self.scope(["#pragma unroll 4", f"for (int e = me; e < rows * {quads}; e += {THREADS}) {{"]), self.alone():
            self.line(f"const int r = e / {quads};")
            self.line(f"const rlx_index {name}_0 = first * {STEP} + e % {quads} * 4;")
            with self.scope([f"if ({name}_0 < last * {STEP}) {{"]):
                self.split((), k.cast(Load(c.a.buffer, index), f32), column, f"{name}_0")
        return None

    def stage_digits(self, c: Contract) -> None:
        """The one row as digits of integers: first its greatest element, for which a thread keeps its own elements."""
        at, row, column = self.launch, Var("row", index_), Var("column", index_)
        self.names[row] = "(rlx_index)row0"
        body: tuple[Stmt, ...] = ()
        if isinstance(c.a, Computed):
            self.names[c.a.row] = self.names[c.i] = self.names[row]
            self.block(c.a.before)
            column, body, value = c.a.column, tuple(c.a.body), k.cast(k.cast(c.a.value, c.a.dtype), f32)
        else:
            index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
            value = k.cast(Load(c.a.buffer, index), f32)
        self.alive.append(value)
        name = self.name(column, "i")
        self.line(f"float four[{at.quads}][4] = {{}}, most = 0;")
        head = ["#pragma unroll", f"for (int q = 0; q < {at.quads}; q++) {{"]
        with self.scope(head), self.alone():
            self.line(f"const rlx_index {name}_0 = first * {STEP} + (me + q * {THREADS}) * 4;")
            with self.scope([f"if ({name}_0 < last * {STEP}) {{"]):
                self.in_vectors(body, [value], column, 4, f"{name}_0", lambda v: self.line(f"four[q][v] = {v[0]};"))
            self.line("for (int v = 0; v < 4; v++) most = rlx_max_f32(most, fabsf(four[q][v]));")
        self.line(f"most = rlx_reduce<{THREADS}>(most, [](float a, float b) {{ return rlx_max_f32(a, b); }});")
        self.line("float inverse;")
        self.line("const float unit = rlx_unit(most, inverse);")
        with self.scope(head):
            self.line(f"const int quad = me + q * {THREADS};")
            self.line(f"if (quad < {-(-at.turns * STEP // 128) * 32})")
            self.line(f"  rlx_digits_4(rlx_x + quad * 4, {at.pitch}, totals + quad / {8 // at.groups}, four[q], inverse, lane);")

    def split(self, body: tuple[Stmt, ...], value: Expr, column: Var, first: str) -> None:
        """Store four elements as bf16 (or f16) numbers that add up to them."""
        at = self.launch
        self.alive.append(value)
        self.line("float four[4];")
        self.in_vectors(body, [value], column, 4, first, lambda v: self.line(f"four[v] = {v[0]};"))
        narrow = at.plain and self.contract.a.dtype == f16
        how = f"{at.pieces}, {str(narrow).lower()}, {str(not at.plain).lower()}"
        place = f"rlx_x + r * {at.pieces * at.pitch} + ({first} - first * {STEP}) * 2"
        self.line(f"rlx_split_4<{how}>({place}, {at.pitch}, four);")

    # -- the products

    def products(self) -> None:
        """A piece is replaced by a later one, of this panel or another, as soon as it is used."""
        at = self.launch
        self.line(f"float sum[2][{at.tiles}][4] = {{}};")
        with self.scope(["#pragma unroll 1", f"for (int u = own; u < last; u += {WARPS * at.at_once}) {{"]):
            self.line(f"rlx_ring_await<{at.slots}>(filled + place, phase);")
            self.plain_turns() if at.plain else self.block_turns()
            self.line("__syncwarp();")
            self.line("fetch(place);")
            self.line(f"if (++place == {at.slots}) place = 0, phase ^= 1;")

    def plain_turns(self) -> None:
        at, inner = self.launch, self.launch.inner
        with self.scope(["#pragma unroll", f"for (int v = 0; v < {at.at_once}; v += {inner}) {{"]):
            self.line(f"const unsigned char* const block = ring + place * {at.item} + v / {inner} * {PANEL * LINE};")
            f16s = str(self.contract.a.dtype == f16).lower()
            self.line(f"rlx_multiply_lines<{f16s}>(block, g, t, x_at, (u - first + v) * {2 * STEP}, sum);")

    def block_turns(self) -> None:
        at, inner, p = self.launch, self.launch.inner, self.launch.panel
        self.line("rlx_numbers numbers;")
        if at.digits:
            return self.digit_turns()
        with self.scope([f"#pragma unroll {UNROLLED // at.tiles or 1}", f"for (int v = 0; v < {at.at_once}; v++) {{"]):
            self.line(f"const unsigned char* const block = ring + place * {at.item} + v / {inner} * {p.packed.nbytes};")
            self.line("rlx_turn turn;")
            with self.scope([f"if (v % {inner} == 0) {{"]):
                self.line("rlx_load_numbers<rlx_near>(turn, block, lane);")
                self.line(f"numbers = rlx_wide_numbers(turn, {1 / (128 + p.packed.zero)!r}f);")
            self.line(f"rlx_load_turn<rlx_near>(turn, block, v % {inner}, lane);")
            self.line(f"rlx_multiply_turn(turn, numbers, t, x_at, (u - first + v) * {2 * STEP}, sum);")

    def digit_turns(self) -> None:
        at, inner = self.launch, self.launch.inner
        self.line(f"const unsigned char* const block = ring + place * {at.item};")
        own = inner == 1
        if not own:
            self.line("rlx_turn head;")
            self.line("rlx_load_numbers<rlx_near>(head, block, lane);")
            self.line("numbers = rlx_wide_numbers(head, 1.0f);")
        with self.scope(["#pragma unroll", f"for (int v = 0; v < {at.at_once}; v += {max(1, at.spread // at.groups)}) {{"]):
            place = f"x_at[0] + (u - first + v) * {STEP}, zeros, totals + (u - first + v) * {at.groups}, sum"
            self.line(f"rlx_multiply_units<{at.spread}, {str(own).lower()}>(block, v, numbers, lane, {place});")

    # -- sums of warps and blocks

    def add_up(self) -> None:
        """all[column][row of the panel]: the sums of the warps."""
        columns, sums, added = self.launch.columns, self.launch.columns * PANEL, self.launch.at_once_added
        if self.launch.spread > 1:
            self.line(f"rlx_add_units<{self.launch.spread}>(sum);")
        scaled = ""
        if self.launch.digits:
            self.line("const float by_digit[2] = {t ? unit * 65536 : unit, unit * 256};")
            scaled = " * by_digit[e % 2]"
        self.line(f"float* const all = of_{'warps' if added else 'panel'} + round % 2 * {sums * (WARPS if added else 1)};")
        with self.scope(["#pragma unroll", f"for (int e = 0; e < {self.launch.tiles * 8}; e++) {{"]):
            row = "g + e / 2 % 4 * 8" if self.launch.plain else "4 * g + e / 2 % 4"
            self.line(f"const int column = e / 8 * 8 + 2 * t + e % 2, row = {row};")
            place = f"{'all' if added else 'of_warps'}[(warp * {columns} + column) * {self.launch.sum_pitch} + row]"
            self.line(f"if (column < {columns}) {place} = sum[e / 4 % 2][e / 8][e % 4]{scaled};")
        self.line("__syncthreads();")
        if added:
            return
        with self.scope([f"for (int e = me; e < {sums}; e += {THREADS}) {{"]):
            pitch = self.launch.sum_pitch
            self.line(f"const float* const one = of_warps + e / {PANEL} * {pitch} + e % {PANEL};")
            self.line("float sum = *one;")
            self.line("#pragma unroll")
            self.line(f"for (int w = 1; w < {WARPS}; w++) sum += one[w * {columns * pitch}];")
            self.line("all[e] = sum;")
        self.line("rlx_cluster_sync();" if self.launch.cluster > 1 else "__syncthreads();")

    def finish(self) -> None:
        """The epilogue of a panel, in one block of the cluster."""
        at, c = self.launch, self.contract
        pieces = at.pieces
        # another warp of another block begins with each panel
        first = f"(me + {PANEL} * round) % {THREADS} + (part + round) % {at.cluster} * {THREADS}"
        with self.scope([f"for (int e = {first}; e < {at.rows * PANEL}; e += {THREADS * at.cluster}) {{"]):
            self.line(f"const int r = e / {PANEL}, j = panel * {PANEL} + e % {PANEL};")
            self.line(f"if (r >= rows || j >= {c.n}) continue;")
            self.line("float result = 0;")
            place = f"all + (r * {pieces} + piece) * {PANEL} + e % {PANEL}"
            if at.at_once_added:
                self.line("#pragma unroll")
                self.line(f"for (int w = 0; w < {WARPS}; w++)")
                self.line(f"  for (int piece = 0; piece < {pieces}; piece++) result += ({place})[w * {at.columns * PANEL}];")
            elif at.cluster > 1:
                self.line("#pragma unroll")
                self.line(f"for (int other = 0; other < {at.cluster}; other++)")
                self.line(f"  for (int piece = 0; piece < {pieces}; piece++) result += rlx_of_block({place}, other);")
            else:
                self.line(f"for (int piece = 0; piece < {pieces}; piece++) result += *({place});")
            self.names[c.i], self.names[c.j] = self.fix("i", index_, "row0 + r"), self.fix("j", index_, "j")
            self.names[c.acc] = "result"
            self.block(c.epilogue)

    @property
    def attributes(self) -> str:  # type: ignore[override]
        return f"__cluster_dims__({self.launch.cluster}) " if self.launch.cluster > 1 else ""

    def function(self, name: str, member: bool = False) -> str:
        plain = (FOLDER / "ring.h").read_text() if self.launch.plain else ""
        return (plain or turn_of(self.weights.blocks).header()) + super().function(name, member)


__all__ = ["BlocksWriter"]

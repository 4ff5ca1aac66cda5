"""CUDA C++ of products with rings of weights (gemv_blocks.py)."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.backends.cuda.ahead import AheadWriter
from rlx.backends.cuda.blocks import FOLDER, turn_of
from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.gemv_blocks import LINE, LINES_AT, RUN, SCALED, UNROLLED, ZEROS, BlocksLaunch, weights
from rlx.backends.cuda.rows import Key, Row, key_of
from rlx.backends.cuda.schedule import COPIED
from rlx.backends.cuda.vectors import loads
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import f16, f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Let, Load, Loop, Stmt, Var, const, k, walk

FETCHED = 64  # elements that a thread loads before it uses the first


class BlocksWriter(AheadWriter):
    launch: BlocksLaunch
    aligned = COPIED

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
        yield f"const int part = blockIdx.x % {at.shares}, slot = blockIdx.x / {at.shares} % {at.each};"
        yield f"rlx_index point = blockIdx.x / {at.shares * at.each};"
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
            self.line(f"extern __shared__ __align__({self.aligned}) unsigned char rlx_shared[];")
        self.line(f"unsigned char* const rlx_x = rlx_shared + {used};  // the left operand as bf16")
        self.line(f"unsigned char* const zeros = rlx_x + {at.columns * at.pitch};")
        self.line(f"float* const totals = (float*)(zeros + {ZEROS});")
        if at.digits:
            self.line(f"float* const units = totals + {at.scales * SCALED // STEP * at.groups};")
        self.line(f"float* const of_warps = totals + {at.totals // 4};")
        self.line(f"float* const of_panel = of_warps + {at.warps * at.added * at.sum_pitch};")
        pad = f" + (-(rlx_ring_at(rlx_shared) + {at.ring_at}) & {LINES_AT - 1})" if at.plain else ""
        self.line(f"unsigned char* const ring = rlx_shared + {at.ring_at}{pad};")
        self.line(f"uint64_t* const filled = (uint64_t*)(ring + {at.slots * at.slot});")
        self.line(f"uint64_t* const used = filled + {at.slots};")
        if at.digits:
            self.line(f"volatile int* const waited = (int*)(used + {at.slots});  // 1: earlier kernels have ended")

    def begin(self) -> None:
        """The first copies may be in flight before earlier kernels have ended."""
        at, turns = self.launch, self.contract.k // STEP
        self.line(f"const int first = part * {at.turns}, last = {turns} - first < {at.turns} ? {turns} : first + {at.turns};")
        if not at.plain:
            start = f"{self.names[self.weights.buffer]} + {self.value(self.weights.offset)}"
            self.line(f"const unsigned char* const weights = {start};")
        stages = at.stages if turns == at.shares * at.turns else f"(last - first + {at.whole - 1}) / {at.whole}"
        self.line(f"const int stages = {stages};  // of a panel")
        for name, of in (("begin", "slot"), ("end", "slot + 1")):
            count = "stages" if at.both == 1 else "2 * stages"
            self.line(f"const int {name} = ({of}) * {at.panels} / {at.each} * {count};")
        with self.scope(["const auto fetch = [&](int number) {  // starts the copy of that stage"]):
            self.fetch(turns)
        self.lines[-1] += ";"
        self.line(f"if (warp == 0) rlx_ring_begin(filled, {at.slots}, {at.warps // at.teams}, lane);")
        if at.digits:
            self.line("if (me == 0) *waited = !early;")
            self.line("__syncthreads();")
        self.line("if (!early) rlx_begin();")
        self.line("int ahead = 0;  // stages that the first warp has asked for")
        with self.scope(["#pragma unroll 1", f"while (warp == 0 && ahead < {at.first_slots}) {{"]):
            self.line("fetch(begin + ahead++);")
            if at.digits:
                self.line("if (!rlx_ring_paced(filled + ahead - 1, waited)) break;")
        self.line("if (early) rlx_begin();")
        if at.digits:
            self.line("if (warp == 1) *waited = 1;")
        with self.scope(["const auto leave = [&]() {  // copies end before the block does"]):
            self.line("__syncthreads();")
            self.line("for (int place = 0; place < ahead && begin + place < end; place++) rlx_ring_await(filled + place, 0);")
        self.lines[-1] += ";"
        with self.scope(["if (rlx_halted(halt)) {"]):
            self.line("leave();")
            self.line("return;")

    def fetch_rest(self) -> None:
        """Start the copies for which the ring has room."""
        self.line("#pragma unroll 1")
        self.line(f"for (; warp == 0 && ahead < {self.launch.slots}; ahead++) fetch(begin + ahead);")

    def fetch(self, turns: int) -> None:
        at, inner = self.launch, self.launch.inner
        self.line("if (number >= end) return;")
        panel = "number / stages" if at.both == 1 else f"number / stages / 2 + number / stages % 2 * {at.panels}"
        self.line(f"const int panel = {panel}, turn = first + number % stages * {at.whole};")
        self.line(f"const int place = (number - begin) % {at.slots};")
        self.line(f"unsigned char* const to = ring + place * {at.slot};")
        if at.plain:
            self.line(f"rlx_ring_expect(filled + place, {at.stage}, lane);")
            self.line(f"rlx_ring_box(to, &lines, filled + place, panel * {PANEL}, turn / {inner}, lane);")
            return
        size = f"(last - turn < {at.whole} ? last - turn : {at.whole}) / {inner} * {at.panel.packed.nbytes}"
        self.line(f"const int size = {size};")
        if at.segments:
            copy = f"rlx_ring_copy_far(to, {self.block_at(turns)}, size, filled + place, lane)"
            self.line(f"if (is_far) return {copy};")
        self.line("rlx_ring_expect(filled + place, size, lane);")
        self.line(f"rlx_ring_copy(to, {self.block_at(turns)}, size, filled + place, lane);")

    def block_at(self, turns: int) -> str:
        """Where the block with turn `turn` of panel `panel` begins."""
        inner = self.launch.inner
        return f"weights + ((size_t)panel * {turns // inner} + turn / {inner}) * {self.launch.panel.packed.nbytes}"

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at = self.launch
        most = self.limit(s.i, s.m) or str(s.m)
        self.line(f"const int rows = {most} - row0 < {at.rows} ? {most} - row0 : {at.rows};")
        if at.passes > 1 or most != str(s.m):
            with self.scope(["if (rows <= 0) {"]):
                self.line("leave();")
                self.line("return;")
        self.stage(s)
        self.line(f"if (me < {ZEROS // 4}) ((uint32_t*)zeros)[me] = 0;")
        self.line("__syncthreads();")
        with self.alone():
            if not at.digits:
                self.fetch_rest()
            self.line(f"const int within = warp % {at.warps // at.teams} * {at.at_once};  // turns of a stage before the warp's")
            if not at.plain:
                self.line(f"const unsigned char* const own = ring + within / {at.inner} * {at.panel.packed.nbytes};")
            if at.digits:
                self.digits_at()
            else:
                self.line(f"const unsigned char* x_at[{at.tiles}];")
                self.line("#pragma unroll")
                self.line(f"for (int n = 0; n < {at.tiles}; n++)")
                self.line(f"  x_at[n] = rlx_x + (g + 8 * n < {at.columns} ? g + 8 * n : 0) * {at.pitch};")
            self.line(f"int number = begin + warp / {at.warps // at.teams}, place = number - begin, phase = 0;")
            head = "for (int from = begin, round = 0; from < end; from += stages, round++) {"
            with self.scope(["#pragma unroll 1", head]), self.alone():
                self.line(f"const int finished = (me + {PANEL} * round) % {at.threads};  // another warp begins with each panel")
                self.line(f"const int panel = from / stages / {at.both};")
                if at.rows * PANEL <= at.threads and at.both == 1:
                    inside = f"finished < {PANEL} * rows && panel * {PANEL} + finished % {PANEL} < {s.n}"
                    self.load_ahead(s, inside, self.place)
                self.products()
                self.add_up()
                if at.both > 1:
                    self.line("if (round % 2 == 0) continue;  // the other sums of the same elements are next")
                self.finish()
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
                head = ["#pragma unroll 4", f"for ({begin}; {end}; {name}_0 += {4 * self.launch.threads}) {{"]
                with self.scope(head), self.alone():
                    self.split(c.a.body, k.cast(k.cast(c.a.value, c.a.dtype), f32), c.a.column, f"{name}_0")
                self.exchanged(*c.a.before, *c.a.body)
            return
        index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
        name, quads = self.name(column, "i"), span // 4
        head = ["#pragma unroll 4", f"for (int e = me; e < rows * {quads}; e += {self.launch.threads}) {{"]
        with self.scope(head), self.alone():
            self.line(f"const int r = e / {quads};")
            self.line(f"const rlx_index {name}_0 = first * {STEP} + e % {quads} * 4;")
            with self.scope([f"if ({name}_0 < last * {STEP}) {{"]):
                self.split((), k.cast(Load(c.a.buffer, index), f32), column, f"{name}_0")
        return None

    def stage_digits(self, c: Contract) -> None:
        """The one row as digits of integers: a warp has the elements that are multiples of one power of two."""
        at, row, column = self.launch, Var("row", index_), Var("column", index_)
        self.names[row] = "(rlx_index)row0"
        body: tuple[Stmt, ...] = ()
        head = ["#pragma unroll", f"for (int q = 0; q < {at.runs}; q++) {{"]
        fetched: dict[Key, str] = {}
        if isinstance(c.a, Computed):
            self.names[c.a.row] = self.names[c.i] = self.names[row]
            column, body, value = c.a.column, tuple(c.a.body), k.cast(k.cast(c.a.value, c.a.dtype), f32)
            self.alive.append(value)
            fetched = self.fetched_ahead(c, head)
            self.fetch_rest()  # behind the loads, which would wait for the copies
            if fetched and (row := self.own_row(c.a.before)):
                self.registers, self.loaded, self.row = fetched, set(fetched), row
            self.block(c.a.before)
            self.row = None
        else:
            index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
            value = k.cast(Load(c.a.buffer, index), f32)
            self.alive.append(value)
        self.registers, self.loaded, self.round = fetched, set(fetched), "q"
        name = self.name(column, "i")
        self.line(f"float run[{at.runs}][{RUN}] = {{}};")
        with self.scope(head), self.alone():
            self.line(f"const rlx_index {name}_0 = first * {STEP} + (me + q * {at.threads}) * {RUN};")
            with self.scope([f"if ({name}_0 < last * {STEP}) {{"]):
                self.in_vectors(body, [value], column, RUN, f"{name}_0", lambda v: self.line(f"run[q][v] = {v[0]};"))
        if not isinstance(c.a, Computed):
            self.fetch_rest()
        with self.scope(head):
            self.line(f"const int n = me + q * {at.threads};")
            self.line(f"if (n >= {at.scales * 32}) continue;")
            total = f"totals + n / {4 // at.groups}"
            self.line(f"const float unit = rlx_digits<{RUN}>(rlx_x + n * {RUN}, {at.pitch}, {total}, run[q], lane);")
            self.line("if (lane == 0) units[n / 32] = unit;")

    def own_row(self, before: tuple[Stmt, ...]) -> Row | None:
        """How threads have the row, if loops over it may read the elements that they have already loaded."""
        at, c, loops = self.launch, self.contract, [s for s in before if isinstance(s, Loop)]
        flat = all(s.vector and not s.carries and s.extent == c.k and all(isinstance(x, Let) for x in s.body) for s in loops)
        return Row(c.k, RUN, at.runs, frozenset(), frozenset()) if flat and at.shares == 1 and not self.kernel.locals else None

    def fetched_ahead(self, c: Contract, head: list[str]) -> dict[Key, str]:
        """Arrays of the operands that a thread loads for its elements, before the sums are ready."""
        at, a, found = self.launch, c.a, dict[Key, Load]()
        assert isinstance(a, Computed)
        known = {a.column, a.row, c.i, *(v for v, _ in self.kernel.grid)}
        for x in loads(a.body, [a.value], a.column, RUN):
            if x.guard is None and not any(isinstance(e, Load) or (isinstance(e, Var) and e not in known) for e in walk(x.index)):
                found[key_of(x, a.column)] = x
        if len(found) * at.runs * RUN > FETCHED:
            return {}
        names = {key: self.fresh("q") for key in found}
        for key, x in found.items():
            self.line(f"{CUDA.element(x.buffer.dtype)} {names[key]}[{at.runs}][{RUN}];")
        with self.scope(head):
            self.line(f"const rlx_index d = first * {STEP} + (me + q * {at.threads}) * {RUN};")
            self.line(f"if (d >= last * {STEP}) continue;")
            for key, x in found.items():
                self.line(f"rlx_fetch<{RUN}>({names[key]}[q], {self.names[x.buffer]} + {self.at_first(x.index, a.column, 'd')});")
        return names

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
        """The last warp that has used a stage fills it again, with a later one of this panel or another."""
        at = self.launch
        self.line("rlx_digit_sums sums;" if at.digits else f"float sum[2][{at.tiles}][4] = {{}};")
        with self.scope(["#pragma unroll 1", f"for (; number < from + stages; number += {at.teams}) {{"]):
            self.line("rlx_ring_await(filled + place, phase);")
            self.line(f"const int u = (number - from) * {at.whole} + within;")
            with self.scope(["if (first + u < last) {"]):
                self.plain_turns() if at.plain else self.block_turns()
            by_all = ", is_far" * (at.segments is not None)
            self.line(f"if (rlx_ring_used(used + place, lane{by_all})) fetch(number + {at.slots});")
            self.line(f"if ((place += {at.teams}) >= {at.slots}) place -= {at.slots}, phase ^= 1;")

    def digits_at(self) -> None:
        """Where the lane finds its digits, or zeros."""
        at = self.launch
        self.line("// the lane's weights and its column are of one unit")
        self.line(f"const bool mine = g / 4 == t / 2 && g % 4 < {at.columns};")
        place = f"g % 4 * {at.pitch} + t / 2 * {STEP // at.groups} + t % 2 * 8"
        self.line(f"const unsigned char* const digits = mine ? rlx_x + {place} : zeros;")
        self.line("const int moves = mine ? ~0 : 0;")

    def plain_turns(self) -> None:
        at, inner = self.launch, self.launch.inner
        how = f"{str(self.contract.a.dtype == f16).lower()}, {min(inner, at.at_once)}"
        with self.scope(["#pragma unroll", f"for (int v = 0; v < {at.at_once}; v += {inner}) {{"]):
            line = f"(within + v) / {inner} * {PANEL * LINE}"
            half, place = f"within % {inner}", f"(u + v) / {inner} * {LINE}"
            self.line(f"rlx_multiply_lines<{how}>(ring + place * {at.slot} + {line}, {half}, g, t, x_at, {place}, sum);")

    def block_turns(self) -> None:
        at, inner, p = self.launch, self.launch.inner, self.launch.panel
        self.line(f"const unsigned char* const piece = own + place * {at.slot};")
        if at.digits:
            return self.digit_turns()
        self.line("rlx_numbers numbers;")
        with self.scope([f"#pragma unroll {UNROLLED // at.tiles or 1}", f"for (int v = 0; v < {at.at_once}; v++) {{"]):
            self.line(f"const unsigned char* const block = piece + v / {inner} * {p.packed.nbytes};")
            self.line("rlx_turn turn;")
            with self.scope([f"if (v % {min(inner, at.at_once)} == 0) {{"]):
                self.line("rlx_load_numbers<rlx_near>(turn, block, lane);")
                self.line(f"numbers = rlx_wide_numbers(turn, {1 / (128 + p.packed.zero)!r}f);")
            self.line(f"rlx_load_turn<rlx_near>(turn, block, within % {inner} + v % {inner}, lane);")
            self.line(f"rlx_multiply_turn(turn, numbers, t, x_at, (u + v) * {2 * STEP}, sum);")
        return None

    def digit_turns(self) -> None:
        at = self.launch
        how, digits = f"{at.spread}, {at.at_once}", f"digits + (u & moves) * {STEP}"
        units = f"totals + u * {at.groups}, units[u / {SCALED // STEP}]"
        turns = f"piece + {at.panel.turns_at} + within % {at.inner} * {at.panel.turn_bytes}"
        self.line(f"rlx_add_turns<{how}>(sums, piece, {turns}, lane, {digits}, {units});")

    # -- sums of warps and blocks

    def add_up(self) -> None:
        """all[column][row of the panel]: the sums of the warps."""
        at = self.launch
        columns, sums, added = at.added, at.added * PANEL, at.at_once_added
        own = f"round % {2 * at.both} * {sums * (at.warps if added else 1)}"
        self.line(f"float* const all = of_{'warps' if added else 'panel'} + {own};")
        if at.digits:
            self.line(f"rlx_add_units<{at.spread}>(all + warp * {PANEL} + g * 4, sums, lane);")
        else:
            with self.scope(["#pragma unroll", f"for (int e = 0; e < {at.tiles * 8}; e++) {{"]):
                row = "g + e / 2 % 4 * 8" if at.plain else "4 * g + e / 2 % 4"
                self.line(f"const int column = e / 8 * 8 + 2 * t + e % 2, row = {row};")
                place = f"{'all' if added else 'of_warps'}[(warp * {columns} + column) * {at.sum_pitch} + row]"
                self.line(f"if (column < {columns}) {place} = sum[e / 4 % 2][e / 8][e % 4];")
        self.line("__syncthreads();")
        if added:
            return
        with self.scope([f"for (int e = me; e < {sums}; e += {at.threads}) {{"]):
            self.line(f"const float* const one = of_warps + e / {PANEL} * {at.sum_pitch} + e % {PANEL};")
            self.line("float sum = *one;")
            self.line("#pragma unroll")
            self.line(f"for (int w = 1; w < {at.warps}; w++) sum += one[w * {columns * at.sum_pitch}];")
            self.line("all[e] = sum;")
        self.line("__syncthreads();")

    def finish(self) -> None:
        """The epilogue of a panel, in one of the blocks that share it."""
        at, c = self.launch, self.contract
        names = ["result"] if c.also is None else ["result", "other"]
        with self.scope([f"for (int e = finished; e < {at.rows * PANEL}; e += {self.launch.threads}) {{"]):
            self.line(f"const int r = e / {PANEL}, j = panel * {PANEL} + e % {PANEL};")
            self.line(f"if (r >= rows || j >= {c.n}) continue;")
            for name in names:
                self.total(name, names[-1])
            if at.told:
                self.exchange(names)
            self.at_element(c, "r", "j")
            self.names[c.acc] = names[0]
            if c.also is not None:
                self.names[c.also] = names[-1]
            self.block(c.epilogue)

    def place(self, c: Contract) -> None:
        self.at_element(c, f"finished / {PANEL}", f"panel * {PANEL} + finished % {PANEL}")

    def at_element(self, c: Contract, row: str, column: str) -> None:
        self.names[c.i], self.names[c.j] = self.fix("i", index_, f"row0 + {row}"), self.fix("j", index_, column)

    def total(self, name: str, last: str) -> None:
        """A sum of the panel that has just been added up, or of the one before it."""
        at, added = self.launch, self.launch.at_once_added
        pieces = at.added // at.rows
        before = at.added * PANEL * (at.warps if added else 1) * (name != last)
        place = f"all + (r * {pieces} + piece) * {PANEL} + e % {PANEL}{f' - {before}' * (before > 0)}"
        self.line(f"float {name} = 0;")
        if added:
            self.line("#pragma unroll")
            self.line(f"for (int w = 0; w < {at.warps}; w++)")
            self.line(f"  for (int piece = 0; piece < {pieces}; piece++) {name} += ({place})[w * {at.added * PANEL}];")
        else:
            self.line(f"for (int piece = 0; piece < {pieces}; piece++) {name} += *({place});")

    def exchange(self, names: list[str]) -> None:
        """The first of the blocks that share a panel adds the sums that the others tell it."""
        at, each = self.launch, self.launch.rows * PANEL
        own = each * at.both
        place = f"(blockIdx.x / {at.shares * at.each} * {at.panels} + panel) * {at.shares} + part"
        self.line(f"uint64_t* const word = (uint64_t*)rlx_counters + (size_t)({place}) * {own} + e;")
        with self.scope(["if (part) {"]):
            for n, name in enumerate(names):
                self.line(f"rlx_tell(word + {n * each}, {name});")
            self.line("continue;")
        for n, name in enumerate(names):
            self.line(f"rlx_hear<{at.shares - 1}>({name}, word + {own + n * each}, {own});")

    def function(self, name: str, member: bool = False) -> str:
        plain = "".join((FOLDER / x).read_text() for x in ("words.h", "ring.h")) if self.launch.plain else ""
        return (plain or turn_of(self.weights.blocks).header()) + super().function(name, member)


__all__ = ["BlocksWriter"]

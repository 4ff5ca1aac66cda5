"""From the accumulators of a tile to results: reduction across groups and blocks, and the epilogue (rlx.backends.cuda.tensor)."""

from __future__ import annotations

from typing import NamedTuple

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import key_of
from rlx.backends.cuda.tensor import CHUNK, GROUP, TensorLaunch
from rlx.backends.cuda.tensor_rows import PART, Parts
from rlx.backends.cuda.vectors import loads, width
from rlx.ir.dtype import f32
from rlx.ir.kernel import Contract, Load, Loop, Store, Var, walk


class Pieces(NamedTuple):
    """Of the tile of a warp: 16 rows by `wide` columns, `each` side by side. A lane has `size` adjacent elements at a time.
    `swapped`: of the tile of a group, 64 rows, whose elements are adjacent."""

    count: int
    each: int
    size: int
    wide: int
    swapped: bool
    once: bool = False  # the first round alone

    @property
    def rounds(self) -> int:
        return 1 if self.once else -(-16 * self.wide // (32 * self.size))

    @property
    def same_columns(self) -> bool:
        """Whether a lane has elements of the same columns in each round."""
        return self.swapped or 32 * self.size % self.wide == 0

    def loop(self) -> list[str]:
        head = f"for (int n = 0; n < {self.rounds}; n++) {{"
        each, lane = (64, "threadIdx.x % 128") if self.swapped else (16, "lane")
        some = f"if (e < {each * self.wide}) " if self.wide % (2 * self.size) else ""
        return ["#pragma unroll", head, f"const int e = (n * {2 * each} + {lane}) * {self.size}; {some}{{"]

    @property
    def place(self) -> tuple[str, str]:
        """The row and the column of element `e`."""
        return ("e % 64", "e / 64") if self.swapped else (f"e / {self.wide}", f"e % {self.wide}")


class TileEnds(CudaWriter):
    launch: TensorLaunch
    most: str  # rows of the product

    def halves(self) -> None:
        """Each group adds up the sums of half of the columns. It is the last tile of the block, so that the ring is free."""
        count = self.launch.tiling.columns // 4
        self.line('asm volatile("bar.sync 1, 256;" ::: "memory");  // both groups are done with the ring')
        self.line(f"float4* const half = (float4*)rlx_ring + threadIdx.x % {GROUP};")
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {count}; n += 4) {{"]):
            given = (f"group ? sum[0][n + {v}] : sum[0][n + {count + v}]" for v in range(4))
            self.line(f"half[(group * {count} + n) / 4 * {GROUP}] = make_float4({', '.join(given)});")
        self.line('asm volatile("bar.sync 1, 256;" ::: "memory");')
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {count}; n += 4) {{"]):
            self.line(f"const float4 other = half[((1 - group) * {count} + n) / 4 * {GROUP}];")
            for v, name in enumerate("xyzw"):
                self.line(f"sum[0][n + {v}] = (group ? sum[0][n + {count + v}] : sum[0][n + {v}]) + other.{name};")

    def exchange(self) -> None:
        """The sums of the whole axis: each block adds up its share of the columns, in an order of its own."""
        t = self.launch.tiling
        share = t.columns // 2 // t.shares
        count, start = share * t.parts, t.columns * 2 * GROUP if t.alternate else 0  # after the groups' exchange area
        if not t.alternate:
            self.line('asm volatile("bar.sync 1, 256;" ::: "memory");  // both groups are done with the ring')
        self.line(f"float4* const mine = (float4*)(rlx_ring + {start}) + threadIdx.x - {self.launch.copying * GROUP};")
        for slab in range(t.slabs):
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {count}; n += 4) {{"]):
                values = ", ".join(f"sum[{slab}][n + {v}]" for v in range(4))
                self.line(f"mine[({slab * count} + n) / 4 * {2 * GROUP}] = make_float4({values});")
        self.line("rlx_cluster_shares();")
        for slab in range(t.slabs):
            self.add_share(slab, share)

    def add_share(self, slab: int, share: int) -> None:
        t = self.launch.tiling
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {share}; n += 4) {{"]):
            first = f"{slab * share * t.parts} + rank * {share}"
            self.line(f"const float4* const from = mine + ({first} + n) / 4 * {2 * GROUP};")
            self.line("float4 all = *from;")
            with self.scope(["#pragma unroll", f"for (int p = 1; p < {t.parts}; p++) {{"]):
                self.line(f"const float4 other = rlx_from_block(from, (rank + p) % {t.parts});")
                self.line("all.x += other.x, all.y += other.y, all.z += other.z, all.w += other.w;")
            for v, name in enumerate("xyzw"):
                self.line(f"sum[{slab}][n + {v}] = all.{name};")

    def queue(self, c: Contract) -> None:
        """Rounded sums to boxes of 16 rows by 64 columns, which bulk copies store."""
        t, side = self.launch.tiling, self.launch.results
        assert side is not None and side.tensor is not None
        f16, more = str(side.tensor.dtype == "f16").lower(), "".join(f", (int){self.names[v]}" for v in side.axes)
        self.line("unsigned char* const boxes = (unsigned char*)staged + lane / 4 * 128 + lane % 4 * 4;")
        self.line("rlx_stored();  // those of the tile before")
        with self.scope(["#pragma unroll", f"for (int q = 0; q < {t.slabs * t.columns // 8}; q++) {{"]):
            self.line("unsigned char* const to = boxes + q / 8 * 2048 + (q % 8 ^ lane / 4) * 16;")
            self.line("const float* const from = sum[0] + q * 4;")
            self.line(f"*(uint32_t*)to = rlx_rounded<{f16}>(from[0], from[1]);")
            self.line(f"*(uint32_t*)(to + 1024) = rlx_rounded<{f16}>(from[2], from[3]);")
        self.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
        self.line("__syncwarp();")
        with self.scope(["if (lane == 0) {"]):
            group = "" if t.turns else f"group * {t.slabs * 64} + "
            for n in range(t.slabs * t.columns // 64):
                slab, column = divmod(n * 64, t.columns)
                row = f"row0 + {group}{slab * 64} + warp % 4 * 16"
                self.line(f"rlx_store_box(&map_out, (unsigned char*)staged + {n * 2048}, column0 + {column}, {row}{more});")
            self.line('asm volatile("cp.async.bulk.commit_group;" ::: "memory");')

    def factors(self, c: Contract) -> None:
        """The factors of a tile's rows, to shared memory: three warps that copy nothing make them while others multiply, each 32
        at once. Eight threads add up the sums of each of eight rows, then each of them has the total of one."""
        t, (total, *lets) = self.launch.tiling, c.before
        assert isinstance(total, Loop)
        row, most = (c.j, c.n) if t.swapped else (c.i, c.m)
        i, p, own = self.fresh("i"), self.fresh("p"), "base + lane % 8 * 4 + lane / 8"
        self.names |= {row: i, total.var: p, total.reduces[0].result: "whole"}
        self.line(f"if (taken >= {1 + t.turns}) rlx_await(used{self.own_turn}, {self.turn_number} + 1 & 1);")
        with self.scope([f"for (int base = warp * 32 - 32; base < {t.scaled}; base += 96) {{"]):
            self.line("float s[8] = {};")
            with self.scope(["#pragma unroll", "for (int n = 0; n < 8; n++) {"]):
                self.line(f"const rlx_index at = {self.first_scaled} + base + n * 4 + lane / 8;")
                self.line(f"const rlx_index {i} = at < {most} ? at : {most - 1};")
                with self.scope(["#pragma unroll 4", f"for (rlx_index {p} = lane % 8; {p} < {total.extent}; {p} += 8) {{"]):
                    self.line(f"s[n] += {self.value(total.reduces[0].value)};")
            self.line("const float whole = rlx_sums_of_rounds<8>(s);")
            self.block(lets)
            self.line(f"if ({own} < {t.scaled}) {self.own_factors}[{own}] = {self.names[lets[-1].var]};")  # type: ignore[union-attr]
        self.line("__syncwarp();")
        self.line(f"if (lane == 0) rlx_arrive(ready{self.own_turn});")
        self.line("taken++;")

    @property
    def own_turn(self) -> str:
        return " + taken % 2" if self.launch.tiling.turns else ""

    @property
    def turn_number(self) -> str:
        """Of the tile, among those with the same barriers."""
        return "taken / 2" if self.launch.tiling.turns else "taken"

    @property
    def own_factors(self) -> str:
        t = self.launch.tiling
        return f"(factors + taken % 2 * {t.scaled})" if t.turns else "factors"

    @property
    def first_scaled(self) -> str:
        """The first row of those whose factors a tile needs."""
        return "column0" if self.launch.tiling.swapped else "row0"

    def scale(self) -> None:
        """Sums of a group times the factors of their rows: two of a thread, or if swapped two in each eight columns."""
        t = self.launch.tiling
        group = "" if t.turns or t.alternate or t.swapped else f"group * {t.slabs * 64} + "
        first, second = ("lane % 4 * 2 + n * 2", 1) if t.swapped else (f"{group}slab * 64 + warp % 4 * 16 + lane / 4", 8)
        self.line(f"rlx_await(ready{self.own_turn}, {self.turn_number} & 1);")
        heads = ["#pragma unroll", f"for (int slab = 0; slab < {t.slabs}; slab++) {{"]
        heads += ["#pragma unroll", f"for (int n = 0; n < {t.columns // 2}; n += 4) {{"]
        with self.scope(heads, 2):
            self.line(f"const float* const of_row = {self.own_factors} + {first};")
            self.line("float* const of = sum[slab] + n;")
            order = (0, 1, 0, 1) if t.swapped else (0, 0, 1, 1)
            self.line(", ".join(f"of[{v}] *= of_row[{second * which}]" for v, which in enumerate(order)) + ";")
        self.line("__syncwarp();")
        self.line(f"if (lane == 0) rlx_arrive(used{self.own_turn});")

    def epilogue(self, c: Contract) -> None:
        """Piece after piece, in a loop: the code for all of them would not stay in the instruction cache."""
        pieces = self.pieces(c)
        t, count = self.launch.tiling, str(pieces.count)
        if self.launch.rounds[1] and t.parts > 1 and t.slabs == 1:
            count = f"(shared ? {-(-t.columns // t.parts // self.chunk)} : {pieces.count})"
        with self.scope(["#pragma unroll 1", f"for (int piece = 0; piece < {count}; piece++) {{"]):
            self.place_piece(c, pieces)
            self.line("if (first_column >= last_column) continue;")
            if pieces.count > 1:
                self.loads_of_piece(c, pieces)
            with self.scope(["#pragma unroll", f"for (int p = 0; p < {pieces.count}; p++) {{", "if (p == piece) {"], 2):
                self.to_rows(c, pieces)
            meet = 'asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory");' if t.swapped else "__syncwarp();"
            self.line(meet)
            if parts := self.launch.parts_of_rows:
                self.line(f"float part[{pieces.rounds}] = {{}};")
            with self.scope(pieces.loop(), 2):
                self.elements(c, pieces)
            if parts:
                self.store_parts(c, parts, pieces)
            self.line(meet)
        for known in (self.registers, self.loaded, self.same):
            known.clear()

    def pieces(self, c: Contract) -> Pieces:
        t, size = self.launch.tiling, width(c.epilogue, (), *self.launch.tiling.adjacent(c))
        size = min(size, 4) if c.rows else size  # threads 32 bytes apart read a bank of shared memory in turn
        each = -(-self.finished // self.chunk)
        return Pieces(t.slabs * each, each, size, self.chunk if c.also is None else self.chunk // 2, t.swapped)

    @property
    def chunk(self) -> int:
        """Columns that the epilogue stages at once."""
        return min(CHUNK // 2 if self.launch.tiling.swapped else CHUNK, self.finished)

    @property
    def finished(self) -> int:
        """Columns whose sums a group has in the end, at most."""
        t = self.launch.tiling
        return t.columns // (t.shares if t.alternate or not self.launch.rounds[1] else 1)

    def place_piece(self, c: Contract, pieces: Pieces) -> None:
        t = self.launch.tiling
        group = "" if t.turns or t.alternate else f"group * {t.slabs * 64} + "
        first = "column0" + (f" + (shared ? rank * {t.columns // t.shares} : 0)" if t.parts > 1 else "")
        first += f" + group * {t.columns // 2}" if t.alternate else ""
        own = str(self.finished)
        if t.parts > 1 and own != str(t.columns // t.shares):
            own = f"(shared ? {t.columns // t.shares} : {own})"
        last = f"{first} + {own}"
        first, last = (f"({x}) / 2" if c.also is not None else x for x in (first, last))
        self.line(f"const int last_column = min({c.n}, {last});")
        self.line(f"const int first_row = row0 + {group}piece / {pieces.each} * 64{'' if t.swapped else ' + warp % 4 * 16'};")
        self.line(f"const int first_column = {first} + piece % {pieces.each} * {pieces.wide};")

    def place_elements(self, c: Contract, pieces: Pieces) -> str:
        """Names the row of the elements from `e` on; their first column."""
        i, j = self.fresh("i"), self.fresh("j")
        row, column = pieces.place
        self.line(f"const rlx_index {i} = first_row + {row}, {j} = first_column + {column};")
        self.line(f"if ({i} >= {self.most} || {j} >= last_column) continue;")
        if self.launch.tiling.swapped:
            self.names[c.j] = j
            return i
        self.names[c.i] = i
        return j

    def store(self, s: Store, value: str) -> str:
        parts = self.launch.parts_of_rows
        return f"part[n] += {value};" if parts and s.buffer is parts.terms else super().store(s, value)

    def store_parts(self, c: Contract, parts: Parts, pieces: Pieces) -> None:
        """Sums over parts of the rows of a piece. Adjacent lanes, `each` of them, have elements of the same part in every round:
        they exchange halves of their sums, until each lane has its part of one round, or some lanes have the same one."""
        each, rounds = PART // pieces.size, pieces.rounds
        self.line(f"const float total = rlx_sums_of_rounds<{each}>(part);")
        own = f"lane % {each // rounds} == 0 && " * (each > rounds)
        with self.scope([f"if ({own}first_row < {self.most}) {{"]):  # all rows of a warp, or none
            self.line(f"const int e = (lane % {each} / {each // rounds} * 32 + lane / {each} * {each}) * {pieces.size};")
            row, column = pieces.place
            self.names[c.i], self.names[parts.total] = f"(first_row + {row})", "total"
            self.names[parts.part] = f"((first_column + {column}) / {PART})"
            self.block([parts.put])

    def loads_of_piece(self, c: Contract, pieces: Pieces) -> None:
        """Start all loads of a piece before the first one is waited for; before its products, where it is all of the tile."""
        var, _ = self.launch.tiling.adjacent(c)
        found = loads(c.epilogue, (), var, pieces.size) if pieces.size > 1 else []
        for key, x in {key_of(x, var): x for x in found if x.guard is None}.items():
            self.round, held = "n", self.fresh("q")
            alone = {v for v in walk(x.index) if isinstance(v, Load | Var)} <= {var, *(v for v, _ in self.kernel.grid)}
            same = pieces.same_columns and alone and not self.launch.segments  # of which other variables count rows, too
            own = pieces._replace(once=same)
            self.line(f"{self.dialect.element(x.buffer.dtype)} {held}[{own.rounds}][{pieces.size}];")
            with self.scope(own.loop(), 2):
                j0 = self.place_elements(c, pieces)
                self.line(f"rlx_fetch<{pieces.size}>({held}[n], {self.names[x.buffer]} + {self.at_first(x.index, var, j0)});")
            self.registers[key] = held
            self.loaded.add(key)
            if same:
                self.same.add(key)

    def elements(self, c: Contract, pieces: Pieces) -> None:
        size, wide, first = pieces.size, pieces.wide, self.place_elements(c, pieces)
        adjacent, _ = self.launch.tiling.adjacent(c)
        sums = {"acc": (c.acc, 0)} if c.also is None else {"acc": (c.acc, 0), "also": (c.also, wide)}
        for name, (var, column) in sums.items():
            self.line(f"float {name}[{size}];")
            if self.launch.tiling.swapped:
                self.line(f"rlx_staged_column({name}, staged, {', '.join(pieces.place)});")
            else:
                self.line(f"rlx_staged({name}, staged, e / {wide}, {column} + e % {wide});")
            text = f"{name}[{'v' if size > 1 else 0}]"
            self.names[var] = text if var.dtype == f32 else f"({self.type(var.dtype)})__float_as_int({text})"
        if size > 1:
            self.in_vectors(c.epilogue, (), adjacent, size, first)
        else:
            self.names[adjacent] = first
            self.block(c.epilogue)

    def to_rows(self, c: Contract, pieces: Pieces) -> None:
        """Sums of a piece from the registers of a warp to rows in shared memory, integers by their bits."""
        bits, chunk = "" if c.acc.dtype == f32 else "__int_as_float", self.chunk
        with self.scope(["#pragma unroll", f"for (int q = 0; q < {chunk // 8}; q++) {{"]):
            if self.finished % chunk:
                self.line(f"if (p % {pieces.each} * {chunk} + q * 8 >= {self.finished}) break;")
            swapped = self.launch.tiling.swapped
            at = "rlx_column_at(warp % 4 * 16 + " if swapped else "rlx_staged_at("
            self.line(f"float* const to = staged + {at}lane / 4, q * 8 + lane % 4 * 2);")
            self.line(f"const auto* const from = sum[p / {pieces.each}] + p % {pieces.each} * {chunk // 2} + q * 4;")
            if swapped:
                self.line(f"float* const below = staged + {at}lane / 4 + 8, q * 8 + lane % 4 * 2);")
                self.line(f"to[0] = {bits}(from[0]), to[64] = {bits}(from[1]);")
                self.line(f"below[0] = {bits}(from[2]), below[64] = {bits}(from[3]);")
                return
            self.line(f"*(float2*)to = make_float2({bits}(from[0]), {bits}(from[1]));")
            self.line(f"*(float2*)(to + {8 * CHUNK}) = make_float2({bits}(from[2]), {bits}(from[3]));")


__all__ = ["TileEnds"]

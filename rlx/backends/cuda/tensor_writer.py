"""CUDA C++ of contractions on tensor cores (rlx.backends.cuda.tensor)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.backends.cuda import tensor
from rlx.backends.cuda.tensor import AT_WORK, CHUNK, GROUP, KINDS, LINE, RAW, WARPS, Side, TensorLaunch, depth, kind
from rlx.backends.cuda.tensor_blocks import PackedCopies
from rlx.backends.cuda.tensor_ends import TileEnds
from rlx.backends.cuda.vectors import aligned
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Operand, Stmt, Var, const, k

SLAB = 64 * LINE  # bytes of 64 rows (or columns) of a stage
UNIT = 16  # bytes, of addresses in matrix descriptors
AT_ONCE = 16  # lines that a warp loads at once


class TensorWriter(PackedCopies, TileEnds):
    launch: TensorLaunch
    occupancy = ", 1"
    tile_by_block = False

    def arguments(self) -> list[str]:
        both = [x for name, side in zip("ab", self.launch.sides) for x in ((name, side.tensor), (f"{name}_last", side.last))]
        names = [name for name, x in both if x] + ["far"] * self.launch.boxes_far
        maps = [f"const __grid_constant__ rlx_map map_{name}" for name in [*names, *["out"] * self.launch.tiling.queued]]
        return [*maps, *super().arguments(), *["long long early"] * (self.launch.early is not None)]

    @property
    def attributes(self) -> str:  # type: ignore[override]
        return f"__cluster_dims__({self.launch.tiling.parts}) " if self.launch.tiling.parts > 1 else ""

    def declare_locals(self) -> None:
        """Sums take the place of the Local that they are made of."""

    def coordinates(self) -> Iterator[str]:
        yield "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;"
        if self.launch.tiling.parts > 1:
            yield f"const int rank = blockIdx.x % {self.launch.tiling.parts};  // in the cluster"

    def statement(self, s: Stmt) -> None:
        if isinstance(s, Contract):
            self.product(self.launch.contract)
        else:
            super().statement(s)

    def begin(self) -> None:
        """Barriers and descriptors are ready before the kernel in front ends."""
        at, t = self.launch, self.launch.tiling
        producers = at.copying * GROUP if at.by_threads else 1
        self.line("extern __shared__ __align__(1024) unsigned char rlx_ring[];")
        own = "warp / 4 % 2 * 4" if t.swapped else "warp % 8"
        self.line(f"float* const staged = (float*)(rlx_ring + {t.ring} + {own} * {t.pitch});")
        self.line(f"uint64_t* const full = (uint64_t*)(rlx_ring + {t.ring + WARPS * t.pitch});")
        self.line(f"uint64_t* const empty = full + {t.stages}, *const raw = empty + {t.stages};")
        if t.factors:
            self.line(f"uint64_t* const ready = raw + {RAW}, *const used = ready + 2;  // factors of rows")
            self.line("float* const factors = (float*)(used + 2);")
        released = 4 if t.turns or t.alternate else 8
        with self.scope(["if (threadIdx.x == 0) {"]):
            self.line(f"for (int s = 0; s < {t.stages}; s++)")
            self.line(f"  rlx_barrier(full + s, {producers}), rlx_barrier(empty + s, {released});")
            if t.raw:
                self.line(f"for (int s = 0; s < {RAW}; s++) rlx_barrier(raw + s, 1);")
            if t.factors:
                self.line(f"for (int g = 0; g < 2; g++) rlx_barrier(ready + g, 3), rlx_barrier(used + g, {4 if t.turns else 8});")
            self.line('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
            for name, side in zip("ab", at.sides):
                if side.tensor:
                    self.line(f"rlx_prefetch(&map_{name});")
        self.line("rlx_meet_cluster();" if t.parts > 1 else "__syncthreads();")
        if at.early is not None:
            self.line("early = early && !halt;  // what is copied arrives before the block ends")
            self.first_copies(at.contract)
        super().begin()

    def product(self, c: Contract) -> None:
        at, t = self.launch, self.launch.tiling
        producers, kept, taken = (at.copying * GROUP, 104, 152) if at.by_threads else (1, 40, 232)
        if t.raw and at.sides[0].tensor:
            kept, taken = 72, 216
        if c.before:  # some of the copying warps make factors
            kept, taken = 56, 224
        self.line("int turn = 0;")
        with self.scope([f"if (warp < {4 * at.copying}) {{"]), self.alone():
            self.line(f"rlx_keep<{kept}>();")
            with self.scope([f"if (threadIdx.x < {producers}) {{", *self.tile_loop()], 2):
                self.copies(c)
            if c.before:
                with self.scope(["else if (warp > 0) {"]), self.alone():
                    self.line("int taken = 0;")
                    with self.scope(self.tile_loop()):
                        self.place(c)
                        self.factors(c)
            if t.parts > 1:
                self.line(f"if ({self.sharing}) rlx_cluster_shares();")
        with self.scope(["else {"]), self.alone():
            self.line(f"rlx_take<{taken}>();")
            self.line(f"const int group = __shfl_sync(0xffffffffu, warp / 4 - {at.copying}, 0);  // in a uniform register")
            if t.turns or c.before:
                self.line("int taken = 0;")
            if t.turns:
                self.line("if (group == 1) rlx_group_next(0);")
            with self.scope(self.tile_loop()):
                self.multiply(c)
                if c.before:
                    self.scale()
                if t.alternate:
                    self.halves()
                if t.parts > 1:
                    with self.scope(["if (shared) {"]):
                        self.exchange()
                if t.queued:
                    with self.scope(["if (!shared) {" if t.parts > 1 else "{"]):
                        self.queue(c)
                if not t.queued:
                    self.epilogue(c)
                elif t.parts > 1:
                    with self.scope(["if (shared) {"]):
                        self.line("rlx_stored();")
                        self.epilogue(c)
                if t.turns or c.before:
                    self.line("taken++;")
            if t.queued:
                self.line("rlx_stored();")
        if t.parts > 1:  # no block leaves while another one still reads its memory
            self.line("rlx_meet_cluster();")

    # -- tiles

    @property
    def sharing(self) -> str:
        """Whether the blocks of this cluster share a tile."""
        return f"blockIdx.x / {self.launch.tiling.parts} < {self.launch.rounds[2]}"

    def tile_loop(self, first: bool = False) -> list[str]:
        """The loop over the tiles of a block. `first`: only its first one."""
        at, blocks, rounds, parts = self.launch, self.launch.blocks, self.launch.rounds[1], self.launch.tiling.parts
        if parts == 1:
            end = "gridDim.x" if first else str(at.count)
            return [f"for (int tile = blockIdx.x; tile < {end}; tile += {blocks}) {{"]
        heads = [f"for (int round = 0; round < {1 if first else f'{rounds} + ({self.sharing})'}; round++) {{"]
        heads.append(f"const bool shared = round == {rounds};" if rounds else "constexpr bool shared = true;")
        heads.append(f"const int tile = shared ? {rounds * blocks} + blockIdx.x / {parts} : round * {blocks} + blockIdx.x;")
        return heads

    def place(self, c: Contract) -> None:
        """Names for the tile's grid point, first row and first column."""
        t = self.launch.tiling
        sides = zip(("row0", "column0"), t.tiles(c), (t.rows, t.columns))
        # adjacent blocks share the larger part of their operands
        (near, many, span), (far, others, other_span) = sorted(sides, key=lambda side: side[2])
        self.line(f"int point = tile / {many * others};")
        self.line(f"const int flat = tile % {many * others}, band = flat / {AT_WORK * others} * {AT_WORK};")
        self.line(f"const int high = {many} - band < {AT_WORK} ? {many} - band : {AT_WORK}, rest = flat - band * {others};")
        self.line(f"const int {near} = (band + rest % high) * {span}, {far} = rest / high * {other_span};")
        for var, extent in reversed(self.kernel.grid):
            name = self.names[var] = self.fresh("g")
            self.line(f"const rlx_index {name} = point % {extent};")
            self.line(f"point /= {extent};")
        if self.launch.segments:
            self.find_tile(self.launch.segments, "break")
            if self.launch.boxes_far:
                self.line("const rlx_map* const map_weights = is_far ? &map_far : &map_b;")
        m = self.limit(c.i, c.m)
        self.most = m or str(c.m)
        if m:
            self.line(f"if ({'!shared && ' * (t.parts > 1)}row0 >= {m}) continue;")
        steps = -(-c.k // depth(c))
        if t.parts > 1:
            self.line(f"const int begin = shared ? {steps} * rank / {t.parts} * {depth(c)} : 0;")
            self.line(f"const int end = (shared ? {steps} * (rank + 1) / {t.parts} : {steps}) * {depth(c)};")
        else:
            self.line(f"constexpr int begin = 0, end = {steps * depth(c)};")

    # -- the copying group

    def boxes(self, c: Contract) -> None:
        """Names for the maps of the tile's boxes, and for the bytes that copies bring of a stage. None lies outside a matrix."""
        at, t, found = self.launch, self.launch.tiling, []
        for n, (side, name) in enumerate(zip(at.sides, "ab")):
            first, most, span = (("row0", c.m, t.rows), ("column0", c.width, t.columns))[n]
            if side.last:
                self.line(f"const bool last_{name} = {first} > {most - span};")
                self.line(f"const rlx_map* const boxes_{name} = last_{name} ? &map_{name}_last : &map_{name};")
                found.append(f"(last_{name} ? {at.copied(n, True)} : {at.copied(n)})")
            elif at.copied(n) and self.is_cut(side, most, span):
                found.append(f"min({at.copied(n)}, ({most} - {first} + {CHUNK - 1}) / {CHUNK} * {CHUNK * LINE})")
            else:
                found.append(str(at.copied(n)))
        if at.maps:
            self.line(f"const int copied = {' + '.join(found)};")

    @staticmethod
    def is_cut(side: Side, most: int, span: int) -> bool:
        """Whether some boxes of the last tile would lie outside the matrix: not `along`, they are of a chunk of rows each."""
        return not side.along and side.start is None and -(-most // span) * span - most + -span % CHUNK >= CHUNK

    def copies(self, c: Contract) -> None:
        at, t = self.launch, self.launch.tiling
        self.place(c)
        self.boxes(c)
        if self.turn:
            self.first_ahead(c)
        if t.raw:
            self.raw_copies(c)
        if (start := at.sides[0].start) is not None:
            self.value(start)  # outside the loop
        if (count := self.waiting) == 1:
            with self.scope([f"for (int k0 = begin; k0 < end; k0 += {depth(c)}, turn++) {{"]):
                self.stage_copies(c, "held0")
            return
        with self.scope([f"for (int first = begin; first < end; first += {count * depth(c)}) {{"]):
            for n in range(count):
                with self.scope([f"if (const int k0 = first + {n * depth(c)}; k0 < end) {{"]):
                    self.stage_copies(c, f"held{n}")
                    self.line("turn++;")

    def stage_copies(self, c: Contract, held: str) -> None:
        """One stage, from k0 on. `held`: quantised weights of it."""
        at, t = self.launch, self.launch.tiling
        self.line(f"const int s = turn % {t.stages};")
        self.line(f"if (turn >= {t.stages}) rlx_await(empty + s, (turn / {t.stages} - 1) & 1);")
        self.line(f"unsigned char* const to = rlx_ring + s * {t.stage};")
        sizes, starts = (t.rows, t.columns + t.spare), (0, t.rows * LINE)
        begun = f"!early || turn >= {min(t.stages, -(-c.k // depth(c)))}" if at.early is not None else "true"
        if copied := at.copied(0) + at.copied(1):
            with self.scope(["if (threadIdx.x == 0) {"]):
                with self.scope([f"if ({begun}) {{"]):
                    self.line("rlx_expect(full + s, copied);")
                    (self.left_copies if t.swapped else self.right_copies)(c)
                (self.right_copies if t.swapped else self.left_copies)(c)
        if at.by_threads:
            for side, o, first, size, start in zip(at.sides, (c.a, c.b), ("row0", "column0"), sizes, starts):
                if side.tensor is None and self.turn and o is c.b:
                    self.decoded(c, start, held)
                elif side.raw:
                    self.made_of_raw(c, start)
                elif side.tensor is None and self.turn and o.dtype == f32:
                    self.rounded(c)
                elif side.tensor is None:
                    load = self.loads if tensor.itemsize(c) == 2 else self.words
                    load(side, o, c, first, size, start)  # type: ignore[arg-type]
            self.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
            self.line("if (threadIdx.x > 0) rlx_arrive(full + s);" if copied else "rlx_arrive(full + s);")

    def first_copies(self, c: Contract) -> None:
        """The right operand's part of the first stages, before the kernel in front ends."""
        t = self.launch.tiling
        with self.scope(["if (early && threadIdx.x == 0) {", *self.tile_loop(first=True)], 2), self.alone():
            self.place(c)
            self.boxes(c)
            with self.scope([f"for (int s = 0, k0 = begin; s < {t.stages} && k0 < end; s++, k0 += {depth(c)}) {{"]):
                self.line(f"unsigned char* const to = rlx_ring + s * {t.stage};")
                self.line("rlx_expect(full + s, copied);")
                (self.left_copies if t.swapped else self.right_copies)(c)

    def left_copies(self, c: Contract) -> None:
        self.bulk_copies(self.launch.sides[0], "a", "row0", self.launch.tiling.rows, 0, 0)

    def right_copies(self, c: Contract) -> None:
        t = self.launch.tiling
        size = t.columns + t.spare
        self.bulk_copies(self.launch.sides[1], "b", "column0", size, t.rows * LINE, c.n if c.also is not None else 0)

    def bulk_copies(self, side: Side, name: str, first: str, size: int, start: int, half: int) -> None:
        """`half`: columns between those of a pair of sums, which are half a chunk apart in the tile; 0: no pairs."""
        if side.tensor is None or side.raw:
            return
        more = "".join(f", (int){self.names[v]}" for v in side.axes)
        more += ", rlx_once()" * self.launch.is_streamed("ab".index(name))
        first = first if side.start is None else f"(int){self.value(side.start)}"
        wide = CHUNK // 2 if half else size if side.along else 64
        source = "map_weights" if name == "b" and self.launch.boxes_far else f"boxes_{name}" if side.last else f"&map_{name}"
        c, t = self.launch.contract, self.launch.tiling
        most, span = (c.m, t.rows) if name == "a" else (c.width, t.columns)
        if side.image:
            self.line(f"rlx_load_windows(to + {start}, {source}, full + s, {side.image.place(first, 'k0')});")
            return
        for part in range(size // wide):
            at = f"{first} / 2 + {part // 2 * wide + part % 2 * half}" if half else f"{first} + {part * wide}"
            inner, outer = ("k0", at) if side.along else (at, "k0")
            guard = f"if ({at} < {most}) " if part and self.is_cut(side, most, span) else ""
            self.line(f"{guard}rlx_load_box(to + {start + part * wide * LINE}, {source}, full + s, {inner}, {outer}{more});")

    def loads(self, side: Side, o: Operand, c: Contract, first: str, size: int, start: int) -> None:
        """The tile of an operand, loaded by threads and written as a bulk copy with 128-byte swizzle would write it: line r of 8
        chunks of 16 bytes has chunk n at n ^ (r % 8). A warp loads lines of 64 elements, a lane two adjacent ones of each."""
        left, most = o is c.a, c.m if o is c.a else c.n
        stride, step = (o.row_stride, o.col_stride) if left else (o.col_stride, o.row_stride)
        apart, beside, extent = (stride, step, c.k) if side.along else (step, stride, most)
        paired = beside == 1 and apart % 2 == 0 and extent % 2 == 0 and aligned(o.offset, None, 2)
        step_lines = 4 * self.launch.copying
        at_once = min(AT_ONCE, size // step_lines)
        with self.scope([f"for (int from = warp; from < {size}; from += {step_lines * at_once}) {{"]):
            self.line(f"uint32_t got[{at_once}];")
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {at_once}; n++) {{"]):
                self.line(f"const int line = from + n * {step_lines};")
                if side.along:
                    self.line(f"const int at = {first} + line, d = k0 + 2 * lane;")
                    places = (("at", "d"), ("at", "d + 1"))
                else:
                    self.line(f"const int at = {first} + line / 64 * 64 + 2 * lane, d = k0 + line % 64;")
                    places = (("at", "d"), ("at + 1", "d"))
                for part, (row, column) in enumerate(places[:1] if paired else places):
                    place, down = Var("place", index_), Var("down", index_)
                    self.names[place], self.names[down] = f"(rlx_index)({row})", f"(rlx_index)({column})"
                    index = self.value(k.add(o.offset, k.add(k.mul(place, const(stride)), k.mul(down, const(step)))))
                    self.line(f"const bool in{part} = {row} < {most} && {column} < {c.k};")
                    # unconditional, from an address that exists: a branch would wait for each load
                    found = f"{self.names[o.buffer]} + (in{part} ? {index} : 0)"
                    self.line(f"const uint32_t e{part} = *{'(const uint32_t*)' * paired}({found});")
                self.line("got[n] = (in0 ? e0 : 0)" + (";" if paired else " | (in1 ? e1 << 16 : 0);"))
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {at_once}; n++) {{"]):
                self.line(f"const int line = from + n * {step_lines};")
                text = f"*(uint32_t*)(to + {start} + line * 128 + (lane / 4 ^ line % 8) * 16 + lane % 4 * 4) = got[n];"
                self.line(text if size % (step_lines * at_once) == 0 else f"if (line < {size}) {text}")

    def words(self, side: Side, o: Operand, c: Contract, first: str, size: int, start: int) -> None:
        """The same for elements of 1 or 4 bytes, which lie along the summed axis in shared memory. Where they do in memory too, a
        warp loads a line of 4 bytes for each lane; else 16 bytes of 32 adjacent lines."""
        left, most, per = o is c.a, c.m if o is c.a else c.n, 4 // tensor.itemsize(c)
        stride, step = (o.row_stride, o.col_stride) if left else (o.col_stride, o.row_stride)
        warps, many = 4 * self.launch.copying, 1 if step == 1 else 4
        count = size // warps if step == 1 else size * 8 // (32 * warps)
        place, down = Var("place", index_), Var("down", index_)
        self.names[place], self.names[down] = f"(rlx_index)({first} + line)", "(rlx_index)d"
        index = k.add(o.offset, k.add(k.mul(place, const(stride)), k.mul(down, const(step))))
        with self.scope([f"#pragma unroll {AT_ONCE // (many * per)}", f"for (int n = 0; n < {count}; n++) {{"]):
            unit = f"warp + n * {warps}"
            self.line(f"const int line = {unit if step == 1 else f'({unit}) / 8 * 32 + lane'};")
            self.line(f"const int word = {'lane' if step == 1 else f'({unit}) % 8 * 4'};")
            self.line(f"uint32_t got[{many}] = {{}};")
            with self.scope(["#pragma unroll", f"for (int e = 0; e < {many * per}; e++) {{"]):
                self.line(f"const int d = k0 + word * {per} + e;")
                self.line(f"const bool inside = {first} + line < {most} && d < {c.k};")
                # unconditional, from an address that exists: a branch would wait for each load
                found = f"{self.names[o.buffer]}[inside ? {self.value(index)} : 0]"
                found = f"rlx_near_tf32({found})" if per == 1 else f"(uint32_t)(uint8_t){found} << e % 4 * 8"
                self.line(f"got[e / {per}] |= inside ? {found} : 0;")
            to = f"to + {start} + line * 128 + (word / 4 ^ line % 8) * 16"
            self.line(f"*(uint32_t*)({to} + word % 4 * 4) = got[0];" if step == 1 else f"rlx_put<4>((uint32_t*)({to}), got);")

    # -- the multiplying groups

    def multiply(self, c: Contract) -> None:
        t = self.launch.tiling
        a, b = self.launch.sides
        self.place(c)
        if t.turns:
            self.line(f"if (taken % 2 != group) {{ taken++, turn += {-(-c.k // depth(c))}; continue; }}")
        if (pieces := self.pieces(c)).count == 1:
            self.line("constexpr int piece = 0;")
            self.place_piece(c, pieces)
            self.loads_of_piece(c, pieces)
        if t.turns:
            self.line(
                "rlx_group_wait(group);  // the other one has read its stages: phases of barriers tell only the last two apart"
            )
        self.line(f"{'float' if c.acc.dtype == f32 else 'int'} sum[{t.slabs}][{t.columns // 2}]{' = {}' * tensor.promoted(c)};")
        into = "sum"
        if tensor.promoted(c):
            into = "part"
            self.line(f"float part[{t.slabs}][{t.columns // 2}];")
        first, each = "begin", 1
        if t.alternate:
            first, each = f"begin + group * {depth(c)}", 2
            self.line("turn += group;")
        with self.scope([f"for (int k0 = {first}; k0 < end; k0 += {each * depth(c)}, turn += {each}) {{"]):
            self.line(f"const int s = turn % {t.stages};")
            self.line(f"const uint32_t at = rlx_tile(rlx_ring + s * {t.stage}, {SLAB});")
            self.line(f"rlx_await(full + s, turn / {t.stages} & 1);")
            self.line("rlx_products_begin();")
            for part, slab in ((p, n) for p in range(LINE // 32) for n in range(t.slabs)):
                own = "" if t.turns or t.alternate else f"group * {t.slabs * SLAB // UNIT} + "
                left = f"at + {own}{(slab * SLAB + part * (32 if a.along else 2048)) // UNIT}"
                right = f"at + {(t.rows * LINE + part * (32 if b.along else 2048)) // UNIT}"
                add = 1 if part else 0 if tensor.promoted(c) else f"k0 > {first}"
                self.line(f"rlx_product({into}[{slab}], {left}, {right}, {add});")
            self.line("rlx_products_end();")
            if tensor.promoted(c):  # the other group multiplies meanwhile
                self.line("rlx_products_wait<0>();")
                self.release("true", "turn")
                self.line("#pragma unroll")
                self.line(f"for (int n = 0; n < {t.slabs * t.columns // 2}; n++) sum[0][n] += part[0][n];")
            else:
                self.line("rlx_products_wait<1>();")
                self.release(f"k0 > {first}", f"(turn - {each})")
        if t.turns:
            self.line("rlx_group_next(1 - group);")
        if not tensor.promoted(c):
            self.line("rlx_products_wait<0>();")
            self.release("true", f"(turn - {each})")

    def release(self, condition: str, turn: str) -> None:
        """A stage may be filled again."""
        self.line(f"if ({condition} && lane == 0) rlx_arrive(empty + {turn} % {self.launch.tiling.stages});")

    def function(self, name: str) -> str:
        at = self.launch
        own = self.turn.header() if self.turn else ""
        return own + product_function(at.tiling.columns, at.sides, KINDS[kind(at.contract)]) + super().function(name)


def product_function(columns: int, sides: Sequence[Side], kind: str) -> str:
    """rlx_product(sum, a, b, add): sum = a @ b (+ sum), 64 rows by `columns`, 32 bytes deep. a and b: as rlx_tile gives them."""
    count, whole = columns // 2, kind.startswith("s32")
    registers = ", ".join(f"%{n}" for n in range(count))
    outputs = ", ".join(f'"+{"r" if whole else "f"}"(d[{n}])' for n in range(count))
    turned = [0 if s.along else 1 for s in sides] if "16" in kind else []
    signs = "" if whole else "".join(f", {n}" for n in (1, 1, *turned))
    shape = f"m64n{columns}k{16 if turned else 8 if 'tf32' in kind else 32}.{kind}"
    return (
        f"RLX_FN void rlx_product({'int' if whole else 'float'} (&d)[{count}], uint32_t a, uint32_t b, int add) {{\n"
        f'  asm volatile("{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %{count + 2}, 0; "\n'
        f'    "mov.b64 a, {{%{count}, " RLX_TILES "}}; mov.b64 b, {{%{count + 1}, " RLX_TILES "}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, a, b, p{signs}; }}"\n'
        f'    : {outputs}\n    : "r"(a), "r"(b), "r"(add));\n}}\n'
    )


__all__ = ["TensorWriter"]

"""Contractions of narrow floats, 8-bit integers and f32 that may be rounded, on the tensor cores of every GPU since compute
capability 8.0 (mma.sync).

A block of 8 warps computes a tile of the result. Tiles of both operands pass through a ring in shared memory, which is filled
by asynchronous copies of 16 bytes where an operand's strides allow them, else element by element. Tiles are counted in units
of 2 bytes: an instruction takes 16 units along the summed axis, whatever their dtype. 8-bit floats are converted exactly to
f16 or bf16 if the other operand has that dtype or the GPU has no 8-bit product. The epilogue runs on rows staged in shared
memory, with vector accesses. tensor.py has the faster kernel for capability 9.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Tiled
from rlx.backends.cuda.vectors import aligned, width
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Contract, Kernel, Operand, Stmt, Var, const, k
from rlx.records import record

EIGHT = {"f8e4m3": "e4m3", "f8e5m2": "e5m2"}
WHOLE = {("u8", "i8", "i32"): "u8_s8", ("i8", "i8", "i8"): "s8_s8", ("u8", "u8", "u8"): "u8_u8"}
WITH_EIGHT = 89  # the first compute capability with products of 8-bit floats
LEAST, LEAST_OF_MANY = 8, 4  # rows, columns and products of a sum that are worth it; of so many tiles
MANY_TILES = 128
THREADS, DOWN, ACROSS = 256, 2, 4  # a block's warps cover its tile as DOWN x ACROSS
DEPTH, STAGES = 32, 4  # units of the summed axis in a tile; tiles of the ring
CHUNK = 8  # units of 16 bytes, by which rows are padded too: matrices are then read without bank conflicts
TILES = ((128, 128), (128, 64), (64, 64))
MULTIPROCESSORS = 108
L2_ROWS = 8  # tiles of rows that are walked together, so that blocks at work share operands in the L2 cache


@record
class Source:
    """One operand. `along`: the contiguous axis of its tile is the summed one; `turned`: in memory it is the other one. `copied`:
    by 16 bytes at a time."""

    along: bool
    copied: bool
    turned: bool = False

    def pitch(self, size: int) -> int:
        """Units between the rows of its tile in shared memory."""
        return (DEPTH if self.along else size) + CHUNK

    def elements(self, size: int) -> int:
        return (size if self.along else DEPTH) * self.pitch(size)


@record
class Form:
    """An instruction, and `item`: the bytes of its operands' elements. `whole`: its sums are i32. `promoted`: the sums of a tile
    are added to others outside the tensor cores, which keep 14 bits of sums of 8-bit floats."""

    product: str
    item: int
    whole: bool = False
    promoted: bool = False


@record
class WarpLaunch(Tiled):
    sources: tuple[Source, ...] = ()
    form: Form = Form("bf16", 2)


def on_warps(kernel: Kernel, multiprocessors: int = MULTIPROCESSORS, capability: int = 80) -> WarpLaunch | None:
    """The launch of a contraction on tensor cores; None: it is none, or too small."""
    c = kernel.body[0] if len(kernel.body) == 1 else None
    if not isinstance(c, Contract) or c.rows or c.also or kernel.locals or min(c.m, c.n, c.k) < LEAST_OF_MANY:
        return None
    if not (isinstance(c.a, Operand) and isinstance(c.b, Operand)) or c.a.panel or c.a.blocks or c.b.panel or c.b.blocks:
        return None
    form = _form(c, capability)
    if form is None or any(x.var is not c.i for x in kernel.limits):
        return None
    sources = (
        _source(c.a, form, c.a.row_stride, c.a.col_stride, (c.m, c.k)),
        _source(c.b, form, c.b.col_stride, c.b.row_stride, (c.n, c.k)),
    )
    points, (rows, columns) = math.prod(n for _, n in kernel.grid), TILES[-1]
    if min(c.m, c.n, c.k) < LEAST and points * -(-c.m // rows) * -(-c.n // columns) < MANY_TILES:
        return None
    tiles = TILES[1:] if form.promoted else TILES  # its sums take twice the registers
    rows, columns = min(tiles, key=lambda tile: _cost(c, points, tile, multiprocessors))
    nbytes = STAGES * 2 * (sources[0].elements(rows) + sources[1].elements(columns))
    return WarpLaunch(kernel, THREADS, THREADS, shared=nbytes, rows=rows, columns=columns, sources=sources, form=form)


def _form(c: Contract, capability: int) -> Form | None:
    a, b, acc = c.a.dtype.name, c.b.dtype.name, c.acc.dtype.name
    if (a, b, acc) in WHOLE:
        return Form(WHOLE[a, b, acc], 1, whole=True)
    if acc != "f32" or c.tf32:
        return Form("tf32", 4) if c.tf32 else None
    if a in EIGHT and b in EIGHT:
        return Form(f"{EIGHT[a]}_{EIGHT[b]}", 1, promoted=True) if capability >= WITH_EIGHT else Form("f16", 2)
    wide = {a, b}.difference(EIGHT)
    return Form(wide.pop(), 2) if wide in ({"f16"}, {"bf16"}) else None


def _source(o: Operand, form: Form, stride: int, step: int, extents: tuple[int, int]) -> Source:
    """Rows (or columns) `stride` elements apart, of elements `step` apart. Chunks that are widened are whole ones."""
    along = step == 1 or stride != 1
    if not along and form.item != 2:  # whose pairs the matrix loads exchange
        return Source(True, False, turned=True)
    contiguous, other = (step, stride) if along else (stride, step)
    each = 16 // form.item
    whole = o.dtype.itemsize == form.item or extents[along] % each == 0
    return Source(along, contiguous == 1 and other % each == 0 and whole and aligned(o.offset, None, each))


def _cost(c: Contract, points: int, tile: tuple[int, int], multiprocessors: int) -> float:
    """Rounds of all multiprocessors, two blocks each, times the work of a tile: its products, and reading its operands."""
    rows, columns = tile
    rounds = -(-(points * -(-c.m // rows) * -(-c.n // columns)) // (2 * multiprocessors))
    return rounds * (rows * columns + 48 * (rows + columns))


class WarpWriter(CudaWriter):
    launch: WarpLaunch
    headers = ("warps.h",)
    occupancy = ", 2"

    def coordinates(self) -> Iterator[str]:
        rows, columns = self.launch.tiles
        yield "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;"
        yield f"rlx_index point = blockIdx.x / {rows * columns};"
        yield f"const int flat = blockIdx.x % {rows * columns}, band = flat / {L2_ROWS * columns} * {L2_ROWS};"
        yield f"const int high = {rows} - band < {L2_ROWS} ? {rows} - band : {L2_ROWS}, rest = flat - band * {columns};"
        yield f"const int row0 = (band + rest % high) * {self.launch.rows}, column0 = rest / high * {self.launch.columns};"
        yield from self.divided()

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        most = self.limit(s.i, s.m) or str(s.m)
        self.line(f"if (row0 >= {most}) return;")
        self.line("extern __shared__ __align__(16) unsigned char rlx_ring[];")
        with self.alone():
            self.copying(s, most)
            self.products(s)
            self.epilogue(s, most)
        return None

    def copying(self, c: Contract, most: str) -> None:
        """The function that fills one stage of the ring."""
        at, (left, right), depth = self.launch, self.launch.sources, self.deep
        assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
        size = left.elements(at.rows)
        self.line(f"const auto copy = [&](int step) {{  // tiles of {depth} products")
        with self.scope([f"if (step * {depth} < {c.k}) {{"]):
            self.line(f"const int k0 = step * {depth};")
            start = f"(uint16_t*)rlx_ring + step % {STAGES} * {size + right.elements(at.columns)}"
            self.line(f"uint16_t* const left = {start}, *const right = left + {size};")
            for name, source, o, first, count, end in (
                ("left", left, c.a, "row0", at.rows, most), ("right", right, c.b, "column0", at.columns, str(c.n)),
            ):  # fmt: skip
                self.chunks(name, source, o, c, first, count, end)
        self.line("rlx_fetched(); };")

    @property
    def deep(self) -> int:
        """Elements of the summed axis in a tile."""
        return DEPTH * 2 // self.launch.form.item

    def chunks(self, name: str, source: Source, o: Operand, c: Contract, first: str, count: int, end: str) -> None:
        stride, step = (o.row_stride, o.col_stride) if o is c.a else (o.col_stride, o.row_stride)
        item, each = self.launch.form.item, 16 // self.launch.form.item
        across = (DEPTH if source.along else count) // CHUNK  # chunks of a row of the tile
        slow, fast = (f"e % {count}", f"e / {count}") if source.turned else (f"e / {across}", f"e % {across}")
        with self.scope(["#pragma unroll", f"for (int e = threadIdx.x; e < {count * DEPTH // CHUNK}; e += {THREADS}) {{"]):
            inner = f"{fast} * {each}"
            self.line(f"const int at = {first} + {slow if source.along else inner}, d = k0 + {inner if source.along else slow};")
            self.line(f"uint16_t* const to = {name} + {slow} * {source.pitch(count)} + {fast} * {CHUNK};")
            if source.copied and o.dtype.itemsize == item:
                have, inside = (f"{c.k} - d", f"at < {end}") if source.along else (f"{end} - at", f"d < {c.k}")
                self.line(f"int n = {inside} ? {have} : 0;")
                self.line(f"n = n < 0 ? 0 : n < {each} ? n : {each};")
                index = self.element(o, "(n ? at : 0)", "(n ? d : 0)", stride, step)
                self.line(f"rlx_fetch_16(to, {self.names[o.buffer]} + {index}, n * {item});")
                return
            self.line(f"uint{8 * o.dtype.itemsize}_t got[{each}] = {{}};")
            if source.copied:
                with self.scope([f"if (at < {end} && d < {c.k}) {{"]):
                    self.line(f"rlx_fetch<{each}>(got, {self.names[o.buffer]} + {self.element(o, 'at', 'd', stride, step)});")
            else:
                self.elements(o, c, source, each, end)
            wider = o.dtype.itemsize < item
            self.line(f"rlx_put_{o.dtype}<{str(self.launch.form.product == 'f16').lower()}>(to, got);" if wider else
                      f"rlx_put<{each}>((uint{8 * item}_t*)to, got);")  # fmt: skip

    def elements(self, o: Operand, c: Contract, source: Source, each: int, end: str) -> None:
        """A chunk into `got`, element by element; zeros outside the matrix."""
        stride, step = (o.row_stride, o.col_stride) if o is c.a else (o.col_stride, o.row_stride)
        with self.scope(["#pragma unroll", f"for (int v = 0; v < {each}; v++) {{"]):
            place, depth = ("at", "d + v") if source.along else ("at + v", "d")
            with self.scope([f"if ({place} < {end} && {depth} < {c.k}) {{"]):
                found = f"{self.names[o.buffer]}[{self.element(o, place, depth, stride, step)}]"
                self.line(f"got[v] = {f'__float_as_uint({found})' if o.dtype == f32 else found};")

    def element(self, o: Operand, place: str, depth: str, stride: int, step: int) -> str:
        """Where the operand has the element of row (or column) `place` and product `depth`."""
        at, d = Var("place", index_), Var("depth", index_)
        self.names[at], self.names[d] = f"(rlx_index)({place})", f"(rlx_index)({depth})"
        return self.value(k.add(o.offset, k.add(k.mul(at, const(stride)), k.mul(d, const(step)))))

    def products(self, c: Contract) -> None:
        at, (left, right), steps, form = self.launch, self.launch.sources, -(-c.k // self.deep), self.launch.form
        tall, wide = at.rows // DOWN, at.columns // ACROSS
        self.line(f"const int row_in = warp / {ACROSS} * {tall}, column_in = warp % {ACROSS} * {wide};")
        kind, sizes = "int" if form.whole else "float", f"[{tall // 16}][{wide // 8}][4]"
        self.line(f"{kind} sum{sizes} = {{}};")
        self.line(f"for (int step = 0; step < {STAGES - 1}; step++) copy(step);")
        with self.scope([f"for (int step = 0; step < {steps}; step++) {{"]):
            self.line(f"rlx_await<{STAGES - 2}>();")
            self.line("__syncthreads();  // the tiles of this step are there, those of the last one are not read any more")
            self.line(f"copy(step + {STAGES - 1});")
            size = left.elements(at.rows)
            start = f"(const uint16_t*)rlx_ring + step % {STAGES} * {size + right.elements(at.columns)}"
            self.line(f"const uint16_t* const left = {start}, *const right = left + {size};")
            if form.promoted:
                self.line(f"{kind} part{sizes} = {{}};")
            with self.scope(["#pragma unroll", f"for (int d = 0; d < {DEPTH}; d += 16) {{"]):
                self.line(f"uint32_t a[{tall // 16}][4], b[{wide // 16}][4];")
                for name, side, source, count, n in (
                    ("a", "left", left, at.rows, tall // 16), ("b", "right", right, at.columns, wide // 16),
                ):  # fmt: skip
                    how = f"{str(source.along).lower()}, {source.pitch(count)}"
                    inner = "row_in" if side == "left" else "column_in"
                    self.line("#pragma unroll")
                    self.line(f"for (int n = 0; n < {n}; n++) rlx_{side}<{how}>({name}[n], {side}, {inner} + n * 16, d);")
                    if form.product == "tf32":
                        self.line("#pragma unroll")
                        self.line(f"for (int n = 0; n < {4 * n}; n++) {name}[n / 4][n % 4] = ")
                        self.line(f"  rlx_near_tf32(__uint_as_float({name}[n / 4][n % 4]));")
                loops = [f"for (int r = 0; r < {tall // 16}; r++) {{", f"for (int n = 0; n < {wide // 8}; n++) {{"]
                with self.scope([text for head in loops for text in ("#pragma unroll", head)], 2):
                    into = "part" if form.promoted else "sum"
                    self.line(f"rlx_product_{form.product}({into}[r][n], a[r], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);")
            if form.promoted:
                self.line("#pragma unroll")
                self.line(f"for (int n = 0; n < {tall * wide // 32}; n++) (&sum[0][0][0])[n] += (&part[0][0][0])[n];")
        self.line("__syncthreads();")

    def epilogue(self, c: Contract, most: str) -> None:
        at, size = self.launch, width(c.epilogue, (), c.j, c.n)
        tall, wide = at.rows // DOWN, at.columns // ACROSS
        pitch, whole = wide + 4, self.launch.form.whole
        pair = "make_float2(__int_as_float({0}), __int_as_float({1}))" if whole else "make_float2({0}, {1})"
        self.line(f"float* const staged = (float*)rlx_ring + warp * {16 * pitch};")
        with self.scope(["#pragma unroll", f"for (int r = 0; r < {tall // 16}; r++) {{"]):
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {wide // 8}; n++) {{"]):
                self.line(f"float* const to = staged + lane / 4 * {pitch} + n * 8 + lane % 4 * 2;")
                self.line(f"*(float2*)to = {pair.format('sum[r][n][0]', 'sum[r][n][1]')};")
                self.line(f"*(float2*)(to + 8 * {pitch}) = {pair.format('sum[r][n][2]', 'sum[r][n][3]')};")
            self.line("__syncwarp();")
            with self.scope(["#pragma unroll 1", f"for (int e = lane * {size}; e < {16 * wide}; e += {32 * size}) {{"]):
                i, j0 = self.fresh("i"), self.fresh("j")
                self.line(f"const rlx_index {i} = row0 + row_in + r * 16 + e / {wide};")
                self.line(f"const rlx_index {j0} = column0 + column_in + e % {wide};")
                self.line(f"if ({i} >= {most} || {j0} >= {c.n}) continue;")
                self.names[c.i] = i
                acc = f"staged[e / {wide} * {pitch} + e % {wide}{' + v' * (size > 1)}]"
                self.names[c.acc] = f"({self.type(c.acc.dtype)})__float_as_int({acc})" if whole else acc
                if size > 1:
                    self.in_vectors(c.epilogue, (), c.j, size, j0)
                else:
                    self.names[c.j] = j0
                    self.block(c.epilogue)
            self.line("__syncwarp();")


__all__ = ["WarpLaunch", "WarpWriter", "on_warps"]

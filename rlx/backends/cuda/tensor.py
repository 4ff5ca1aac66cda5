"""Contractions of f16 and bf16 on the tensor cores of compute capability 9.0.

A block is one warp group that copies and two that multiply. The copying one keeps a ring of tiles in shared memory full with bulk
tensor copies; each of the others multiplies 64 rows by all columns of the block's tile (wgmma), then runs the epilogue on rows
of 64 columns staged in shared memory, with vector accesses. Blocks take tile after tile, so that the copies of the next tile
overlap the epilogue of this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch, TensorMap
from rlx.backends.cuda.vectors import width
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Const, Contract, Expr, Kernel, Operand, Stmt, Var, coefficient, const, k

NARROW = ("f16", "bf16")
ROWS, DEPTH = 128, 64  # of a tile; 64 elements of 2 bytes are the 128 bytes of a swizzled row
GROUP_ROWS = 64  # rows of one multiplying warp group
GROUP, THREADS = 128, 384
CHUNK = 64  # columns staged at once by the epilogue
PITCH = CHUNK + 4  # floats between staged rows, against bank conflicts
STAGING = 8 * 16 * PITCH * 4  # bytes: 16 rows for each of 8 warps
SHARED = 227 << 10
L2_ROWS = 8  # tiles of rows that are walked together, so that blocks at work share operands in the L2 cache


@dataclass(frozen=True)
class Side:
    """One operand of the product. `along`: its contiguous axis is the summed one. `tensor`: where bulk copies can fetch it, with
    the grid variables `axes` that select a matrix; else threads load its elements one by one."""

    along: bool
    tensor: TensorMap | None = None
    axes: tuple[Var, ...] = ()


@dataclass(frozen=True)
class TensorLaunch(Launch):
    columns: int = 256
    stages: int = 4
    sides: tuple[Side, ...] = ()
    multiprocessors: int = 132

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        return tuple(side.tensor for side in self.sides if side.tensor)

    @property
    def contract(self) -> Contract:
        return _contract(self.kernel)  # type: ignore[return-value]

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.contract.m // ROWS), -(-self.contract.n // self.columns)

    @property
    def count(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * math.prod(self.tiles)

    @property
    def blocks(self) -> int:
        return min(self.multiprocessors, self.count)


def _contract(kernel: Kernel) -> Contract | None:
    return next((s for s in kernel.body if isinstance(s, Contract)), None)


def on_tensor_cores(kernel: Kernel, multiprocessors: int = 132) -> TensorLaunch | None:
    """The launch of a kernel on tensor cores; None: it is no contraction of narrow floats that is worth it."""
    c = _contract(kernel)
    if c is None or c.rows or kernel.locals or len(kernel.grid) > 3 or c.acc.dtype != f32 or c.m < 16 or c.n < 16:
        return None
    if not (isinstance(c.a, Operand) and isinstance(c.b, Operand)) or c.a.dtype != c.b.dtype or c.a.dtype.name not in NARROW:
        return None
    if c.a.panel or c.a.blocks or c.b.panel or c.b.blocks:
        return None
    if any(x.var is not c.i for x in kernel.limits):
        return None
    columns = _columns(c, math.prod(n for _, n in kernel.grid), multiprocessors)
    a = _side(kernel, c.a, c.m, c.k, c.a.row_stride, c.a.col_stride, ROWS)
    b = _side(kernel, c.b, c.n, c.k, c.b.col_stride, c.b.row_stride, columns)
    stage = (ROWS + columns) * DEPTH * 2
    stages = min(8, (SHARED - STAGING) // (stage + 16))
    return TensorLaunch(
        kernel, THREADS, THREADS, shared=stages * (stage + 16) + STAGING, columns=columns, stages=stages, sides=(a, b),
        multiprocessors=multiprocessors,
    )  # fmt: skip


def _columns(c: Contract, points: int, multiprocessors: int) -> int:
    """Columns of a tile: the widest with little waste, counted as rounds of all multiprocessors times the work of a tile."""
    rows = -(-c.m // ROWS) * points

    def cost(size: int) -> float:
        rounds = -(-(rows * -(-c.n // size)) // multiprocessors)
        return rounds * (size + 24)  # 24: what a tile costs besides its columns

    return min((256, 192, 128, 64), key=cost)


def _side(kernel: Kernel, o: Operand, size: int, depth: int, stride: int, step: int, tile: int) -> Side:
    """`size` rows (or columns) `stride` elements apart, of `depth` elements `step` apart."""
    along = step == 1 and depth > 1
    axes = [(v, n, coefficient(o.offset, v)) for v, n in kernel.grid]
    if (not along and stride != 1) or any(c is None for _, _, c in axes):
        return Side(along or stride != 1)
    first = _constant(o.offset, [(v, c or 0) for v, _, c in axes])
    item, outer = o.dtype.itemsize, stride if along else step
    used = [(v, n, c or 0) for v, n, c in axes if c and n > 1]
    strides = (outer * item, *(c * item for _, _, c in used))
    if first is None or first < 0 or first * item % 16 or any(s % 16 or not 0 < s < 1 << 40 for s in strides):
        return Side(along)
    dims = (depth, size) if along else (size, depth)
    box = (DEPTH, tile) if along else (64, DEPTH)
    if any(d >= 1 << 31 for d in dims):
        return Side(along)
    argument = kernel.buffers.index(o.buffer)
    tensor = TensorMap(
        argument, first * item, o.dtype.name, (*dims, *(n for _, n, _ in used)), strides, (*box, *(1 for _ in used))
    )
    return Side(along, tensor, tuple(v for v, _, _ in used))


def _constant(offset: Expr, terms: Sequence[tuple[Var, int]]) -> int | None:
    """The constant part of an affine offset."""
    values = dict.fromkeys((v for v, _ in terms), 0)

    def at(e: Expr) -> int | None:
        if isinstance(e, Const):
            return int(e.value)
        if isinstance(e, Var):
            return values.get(e)
        if not hasattr(e, "args") or e.op not in ("add", "sub", "mul"):  # type: ignore[union-attr]
            return None
        a, b = (at(x) for x in e.args)  # type: ignore[union-attr]
        if a is None or b is None:
            return None
        return a + b if e.op == "add" else a - b if e.op == "sub" else a * b  # type: ignore[union-attr]

    return at(offset)


class TensorWriter(CudaWriter):
    launch: TensorLaunch
    occupancy = ", 1"

    def arguments(self) -> list[str]:
        maps = [f"const __grid_constant__ rlx_map map_{name}" for name, side in zip("ab", self.launch.sides) if side.tensor]
        return [*maps, *super().arguments()]

    def coordinates(self) -> Iterator[str]:
        yield "const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;"

    def statement(self, s: Stmt) -> None:
        if isinstance(s, Contract):
            self.product(s)
        else:
            super().statement(s)

    def product(self, c: Contract) -> None:
        at = self.launch
        stage = (ROWS + at.columns) * DEPTH * 2
        by_threads = any(side.tensor is None for side in at.sides)
        producers, kept, taken = (GROUP, 88, 208) if by_threads else (1, 40, 232)
        self.line("extern __shared__ __align__(1024) unsigned char rlx_ring[];")
        self.line(f"float* const staged = (float*)(rlx_ring + {at.stages * stage}) + (warp % 8) * {16 * PITCH};")
        self.line(
            f"uint64_t* const full = (uint64_t*)(rlx_ring + {at.stages * stage + STAGING}), *const empty = full + {at.stages};"
        )
        with self.scope(["if (threadIdx.x == 0) {"]):
            self.line(f"for (int s = 0; s < {at.stages}; s++) rlx_barrier(full + s, {producers}), rlx_barrier(empty + s, 8);")
            self.line('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
        self.line("__syncthreads();")
        self.line("int turn = 0;")
        with self.scope(["if (warp < 4) {"]), self.alone():
            self.line(f"rlx_keep<{kept}>();")
            with self.scope([f"if (threadIdx.x < {producers}) {{", *self.tile_loop()], 2):
                self.copies(c, stage)
        with self.scope(["else {"]), self.alone():
            self.line(f"rlx_take<{taken}>();")
            self.line("const int group = warp / 4 - 1;")
            with self.scope(self.tile_loop()):
                self.multiply(c, stage)
                self.epilogue(c)

    def tile_loop(self) -> list[str]:
        return [f"for (int tile = blockIdx.x; tile < {self.launch.count}; tile += gridDim.x) {{"]

    def place(self, c: Contract) -> None:
        """Names for the tile's grid point, first row and first column."""
        rows, columns = self.launch.tiles
        self.line(f"int point = tile / {rows * columns};")
        self.line(f"const int flat = tile % {rows * columns}, band = flat / {L2_ROWS * columns} * {L2_ROWS};")
        self.line(f"const int high = {rows} - band < {L2_ROWS} ? {rows} - band : {L2_ROWS}, rest = flat - band * {columns};")
        self.line(f"const int row0 = (band + rest % high) * {ROWS}, column0 = rest / high * {self.launch.columns};")
        for var, extent in reversed(self.kernel.grid):
            name = self.names[var] = self.fresh("g")
            self.line(f"const rlx_index {name} = point % {extent};")
            self.line(f"point /= {extent};")
        m = self.limit(c.i, c.m)
        self.most = m or str(c.m)
        if m:
            self.line(f"if (row0 >= {m}) continue;")

    def copies(self, c: Contract, stage: int) -> None:
        at = self.launch
        self.place(c)
        with self.scope([f"for (int k0 = 0; k0 < {c.k}; k0 += {DEPTH}, turn++) {{"]):
            self.line(f"const int s = turn % {at.stages};")
            self.line(f"if (turn >= {at.stages}) rlx_await(empty + s, (turn / {at.stages} - 1) & 1);")
            self.line(f"unsigned char* const to = rlx_ring + s * {stage};")
            sizes, starts = (ROWS, at.columns), (0, ROWS * DEPTH * 2)
            if copied := sum(size * DEPTH * 2 for size, side in zip(sizes, at.sides) if side.tensor):
                with self.scope(["if (threadIdx.x == 0) {"]):
                    self.line(f"rlx_expect(full + s, {copied});")
                    for side, name, first, size, start in zip(at.sides, "ab", ("row0", "column0"), sizes, starts):
                        self.bulk_copies(side, name, first, size, start)
            if copied < stage:
                for side, o, first, size, start in zip(at.sides, (c.a, c.b), ("row0", "column0"), sizes, starts):
                    if side.tensor is None:
                        self.loads(side, o, c, first, size, start)  # type: ignore[arg-type]
                self.line('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");')
                self.line("if (threadIdx.x > 0) rlx_arrive(full + s);" if copied else "rlx_arrive(full + s);")

    def bulk_copies(self, side: Side, name: str, first: str, size: int, start: int) -> None:
        more = "".join(f", (int){self.names[v]}" for v in side.axes)
        for part in range(0 if side.tensor is None else 1 if side.along else size // 64):
            inner, outer = ("k0", first) if side.along else (f"{first} + {part * 64}", "k0")
            self.line(f"rlx_load_box(to + {start + part * 64 * DEPTH * 2}, &map_{name}, full + s, {inner}, {outer}{more});")

    def loads(self, side: Side, o: Operand, c: Contract, first: str, size: int, start: int) -> None:
        """The tile of an operand, loaded element by element and written as a bulk copy with 128-byte swizzle would write it: row
        r of 8 chunks of 8 elements has chunk n at n ^ (r % 8)."""
        left, most = o is c.a, c.m if o is c.a else c.n
        stride, step = (o.row_stride, o.col_stride) if left else (o.col_stride, o.row_stride)
        with self.scope(["#pragma unroll 2", f"for (int e = threadIdx.x; e < {size * DEPTH // 8}; e += {GROUP}) {{"]):
            self.line("uint16_t got[8];")
            with self.scope(["#pragma unroll", "for (int v = 0; v < 8; v++) {"]):
                if side.along:
                    self.line(f"const int d = k0 + e % 8 * 8 + v, at = {first} + e / 8;")
                else:
                    self.line(f"const int d = k0 + e / 8 % {DEPTH}, at = {first} + e / {8 * DEPTH} * 64 + e % 8 * 8 + v;")
                place, depth = Var("place", index_), Var("depth", index_)
                self.names[place], self.names[depth] = "(rlx_index)at", "(rlx_index)d"
                index = k.add(o.offset, k.add(k.mul(place, const(stride)), k.mul(depth, const(step))))
                self.line("got[v] = 0;")
                with self.scope([f"if (at < {most} && d < {c.k}) {{"]):
                    self.line(f"got[v] = {self.names[o.buffer]}[{self.made(index)}];")
            row = "e / 8" if side.along else f"e / 8 % {DEPTH} + e / {8 * DEPTH} * {DEPTH}"
            self.line(f"const int r = {row};")
            self.line(f"rlx_put<8>((uint16_t*)(to + {start} + r * 128 + (e % 8 ^ r % 8) * 16), got);")

    def multiply(self, c: Contract, stage: int) -> None:
        at = self.launch
        count = at.columns // 2
        self.place(c)
        self.line(f"float sum[{count}];")
        a, b = at.sides
        with self.scope([f"for (int k0 = 0; k0 < {c.k}; k0 += {DEPTH}, turn++) {{"]):
            self.line(f"const int s = turn % {at.stages};")
            self.line(f"rlx_await(full + s, turn / {at.stages} & 1);")
            self.line(f"const unsigned char* const at = rlx_ring + s * {stage};")
            self.line("rlx_products_begin();")
            for part in range(DEPTH // 16):
                left = (
                    f"at + group * {GROUP_ROWS * DEPTH * 2} + {part * 32}"
                    if a.along
                    else f"at + group * {64 * DEPTH * 2} + {part * 2048}"
                )
                right = f"at + {ROWS * DEPTH * 2} + {part * 32 if b.along else part * 2048}"
                self.line(
                    f"rlx_product(sum, rlx_tile({left}, {64 * DEPTH * 2}), rlx_tile({right}, {64 * DEPTH * 2}), "
                    f"{'k0 > 0' if part == 0 else 1});"
                )
            self.line("rlx_products_end();")
            self.line("rlx_products_wait<1>();")
            self.line(f"if (k0 > 0 && lane == 0) rlx_arrive(empty + (turn - 1) % {at.stages});")
        self.line("rlx_products_wait<0>();")
        self.line(f"if (lane == 0) rlx_arrive(empty + (turn - 1) % {at.stages});")

    def epilogue(self, c: Contract) -> None:
        at = self.launch
        size = width(c.epilogue, (), c.j, c.n)
        head = ["#pragma unroll", f"for (int chunk = 0; chunk < {at.columns // CHUNK}; chunk++) {{"]
        with self.scope(head):
            self.line(f"if (column0 + chunk * {CHUNK} >= {c.n}) break;")
            with self.scope(["#pragma unroll", f"for (int q = 0; q < {CHUNK // 8}; q++) {{"]):
                self.line(f"float* const to = staged + lane / 4 * {PITCH} + q * 8 + lane % 4 * 2;")
                self.line(f"const float* const from = sum + chunk * {CHUNK // 2} + q * 4;")
                self.line(
                    f"*(float2*)to = make_float2(from[0], from[1]), *(float2*)(to + 8 * {PITCH}) = make_float2(from[2], from[3]);"
                )
            self.line("__syncwarp();")
            with self.scope(["#pragma unroll 1", f"for (int e = lane * {size}; e < {16 * CHUNK}; e += {32 * size}) {{"]):
                i, j0 = self.fresh("i"), self.fresh("j")
                self.line(f"const rlx_index {i} = row0 + group * {GROUP_ROWS} + warp % 4 * 16 + e / {CHUNK};")
                self.line(f"const rlx_index {j0} = column0 + chunk * {CHUNK} + e % {CHUNK};")
                self.line(f"if ({i} >= {self.most} || {j0} >= {c.n}) continue;")
                self.names[c.i] = i
                self.names[c.acc] = f"staged[e / {CHUNK} * {PITCH} + e % {CHUNK}" + (" + v]" if size > 1 else "]")
                if size > 1:
                    self.in_vectors(c.epilogue, (), c.j, size, j0)
                else:
                    self.names[c.j] = j0
                    self.block(c.epilogue)
            self.line("__syncwarp();")

    def function(self, name: str) -> str:
        return product_function(self.launch.columns, self.launch.sides, self.launch.contract.a.dtype.name) + super().function(
            name
        )


def product_function(columns: int, sides: Sequence[Side], dtype: str) -> str:
    """rlx_product(sum, a, b, add): sum = a @ b (+ sum), 64 rows by `columns`, 16 deep."""
    count = columns // 2
    registers = ", ".join(f"%{n}" for n in range(count))
    outputs = ", ".join(f'"+f"(d[{n}])' for n in range(count))
    transposed = ", ".join("0" if s.along else "1" for s in sides)
    shape = f"m64n{columns}k16.f32.{dtype}.{dtype}"
    return (
        f"RLX_FN void rlx_product(float (&d)[{count}], uint64_t a, uint64_t b, int add) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; wgmma.mma_async.sync.aligned.{shape} "\n'
        f'    "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {transposed}; }}"\n'
        f'    : {outputs}\n    : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


__all__ = ["TensorLaunch", "TensorWriter", "on_tensor_cores"]

"""Contractions with few rows, bound by reading the right operand once.

A block first puts its rows of the left operand into shared memory; they may be computed there (a norm in front of the product).
Where columns of the right operand are contiguous, each warp takes some of them at a time and its lanes share the summed axis: a
lane has a batch of 16-byte loads in flight, and replaces each as soon as it has used it. The first batch is loaded before the
kernels in front end, if no kernel of a run writes it (`early`). Where rows are contiguous, each lane has adjacent columns and the
warps share the summed axis. Sums are in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.ir.dtype import f8e4m3, f8e5m2, f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Kernel, Load, Operand, Stmt, Var, coefficient, const, k

MOST_ROWS = 8
THREADS, WARPS = 256, 8
MOST_COLUMNS = 4  # of a warp at a time
IN_FLIGHT, FEWER = 16, 8  # loads of a lane; with more rows, whose sums take registers, or of f32, where 16 spill
RESIDENT = 2  # blocks of a multiprocessor
SHARED_BYTES = 160 << 10
BYTES = 16  # of one load
EIGHT = (f8e4m3, f8e5m2)


@dataclass(frozen=True)
class GemvLaunch(Launch):
    along: bool = True
    size: int = 1  # elements of a load
    each: int = 1  # blocks of a grid point
    columns: int = 1  # of a warp at a time
    ahead: int = 1  # loads of a lane from each of its columns at a time
    batches: int = 1  # of these along the summed axis

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.each

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def pitch(self) -> int:
        """Elements of a row in shared memory; behind the row are zeros."""
        return self.batches * self.ahead * 32 * self.size if self.along else self.contract.k

    @property
    def early(self) -> int | None:
        """The buffer that is read before earlier kernels end, if no kernel of a run writes it."""
        assert isinstance(self.contract.b, Operand)
        return self.kernel.buffers.index(self.contract.b.buffer) if self.along else None


def few_rows(kernel: Kernel, multiprocessors: int = 132, most: int = SHARED_BYTES) -> GemvLaunch | None:
    """The launch of a contraction with few rows; None: it is none. `most`: bytes of shared memory of a block."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or c.also or c.acc.dtype != f32 or not 0 < c.m <= MOST_ROWS or 0 in (c.n, c.k):
        return None
    if not isinstance(c.b, Operand) or c.b.panel or c.b.blocks or (isinstance(c.a, Operand) and (c.a.panel or c.a.blocks)):
        return None
    along = c.b.row_stride == 1 or c.k == 1
    if not along and c.b.col_stride != 1 and c.n > 1:
        return None
    if any(x.var is not c.i for x in kernel.limits):
        return None
    item = c.b.dtype.itemsize
    stride, extent = (c.b.col_stride, c.k) if along else (c.b.row_stride, c.n)
    size = BYTES // item if along else max(1, 4 // item)
    while size > 1 and (extent % size or stride % size or not multiple(c.b.offset, kernel, size)):
        size //= 2
    points = math.prod(n for _, n in kernel.grid)
    blocks = max(1, RESIDENT * multiprocessors // points)
    rounds = -(-c.n // (blocks * WARPS * MOST_COLUMNS))
    columns = -(-c.n // (blocks * WARPS * rounds)) if along else 1
    chunks = -(-c.k // (32 * size))
    batches = -(-chunks * columns // (IN_FLIGHT if c.m == 1 and item < 4 else FEWER))
    tiles = -(-c.n // (WARPS * columns if along else 32 * size))
    found = GemvLaunch(
        kernel, THREADS, THREADS, along=along, size=size, each=min(tiles, blocks) if along else tiles, columns=columns,
        ahead=-(-chunks // batches), batches=batches,
    )  # fmt: skip
    held = sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in kernel.locals) + 4 * c.m * found.pitch
    return replace(found, shared=held) if held <= min(most, SHARED_BYTES) else None


def multiple(offset: Expr, kernel: Kernel, size: int) -> bool:
    """True if the offset is a multiple of `size` elements at every grid point, and affine."""
    steps = [coefficient(offset, v) for v, _ in kernel.grid]
    if any(s is None or s % size for s in steps):
        return False
    rest = offset
    while not isinstance(rest, Var) and hasattr(rest, "value") is False and hasattr(rest, "args"):
        parts = [a for a in rest.args if not any(coefficient(a, v) for v, _ in kernel.grid)]  # type: ignore[union-attr]
        if rest.op != "add" or len(parts) != 1:  # type: ignore[union-attr]
            return rest.op == "mul" and any(coefficient(rest, v) for v, _ in kernel.grid)  # type: ignore[union-attr]
        rest = parts[0]
    return int(getattr(rest, "value", 0)) % size == 0


class GemvWriter(CudaWriter):
    launch: GemvLaunch

    def coordinates(self) -> Iterator[str]:
        yield "const int me = threadIdx.x, warp = me / 32, lane = me % 32;"
        yield f"rlx_index point = blockIdx.x / {self.launch.each};"
        yield f"const int slot = blockIdx.x % {self.launch.each};"
        for var, extent in reversed(self.kernel.grid):
            yield f"const rlx_index {self.name(var, 'g')} = point % {extent};"
            yield f"point /= {extent};"

    def declare_locals(self) -> None:
        c = self.launch.contract
        super().declare_locals()
        used = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        if not self.kernel.locals:
            self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"float* const rows = (float*)(rlx_shared + {used});  // {c.m} rows of the left operand")

    occupancy = f", {RESIDENT}"

    def arguments(self) -> list[str]:
        return super().arguments() + ["long long early"] * self.launch.along

    def begin(self) -> None:
        """The launch's first loads may be of weights."""
        if self.launch.along:
            self.declare_batch()
            self.line("if (early) first();")
        super().begin()
        if self.launch.along:
            self.line("if (!early) first();")

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        m = self.limit(s.i, s.m) or str(s.m)
        self.stage(s)
        self.line("__syncthreads();")
        with self.alone():
            (self.by_columns if self.launch.along else self.by_rows)(s, m)
        return None

    def at(self, step: str) -> str:
        """Where element `step` of a row is staged: the first 4 of every load, then the next, so that lanes read adjacent ones."""
        size = self.launch.size
        if size <= 4:
            return step
        return f"{step} / {size} * 4 + {step} % 4 + {step} % {size} / 4 * {self.launch.pitch * 4 // size}"

    def stage(self, c: Contract) -> None:
        with self.scope([f"for (int r = 0; r < {c.m}; r++) {{"]):
            row, column = Var("row", index_), Var("column", index_)
            self.names[row] = "(rlx_index)r"
            if isinstance(c.a, Computed):
                self.names[c.a.row] = self.names[c.i] = "(rlx_index)r"
                self.block(c.a.before)
                column, body, value = c.a.column, c.a.body, k.cast(k.cast(c.a.value, c.a.dtype), f32)
            else:
                index = k.add(c.a.offset, k.add(k.mul(row, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
                body, value = (), k.cast(Load(c.a.buffer, index), f32)
            self.alive.append(value)
            self.stage_row(body, value, column)
            if self.launch.pitch > c.k:
                name = self.fresh("i")
                with self.scope([f"for (int {name} = {c.k} + me; {name} < {self.launch.pitch}; {name} += {THREADS}) {{"]):
                    self.line(f"rows[r * {self.launch.pitch} + {self.at(name)}] = 0;")
            self.exchanged(*(c.a.before if isinstance(c.a, Computed) else ()), *body)

    def stage_row(self, body: Sequence[Stmt], value: Expr, column: Var) -> None:
        """Elements of row r, as many adjacent ones by a thread as lets all threads work and their loads start together."""
        c, pitch = self.launch.contract, self.launch.pitch
        name, size = self.name(column, "i"), 1
        if c.k % (4 * THREADS) == 0 and pitch % 4 == 0:
            size = 4
        loop = f"for (int {name}_0 = me * {size}; {name}_0 < {c.k}; {name}_0 += {size * THREADS}) {{"
        with self.scope(["#pragma unroll 8", loop]), self.alone():
            if size == 1:
                self.names[column] = f"{name}_0"
                (text,) = self.block(body, [value])
                self.line(f"rows[r * {pitch} + {self.at(f'{name}_0')}] = {text};")
            else:
                self.line("float staged[4];")
                self.in_vectors(body, [value], column, 4, f"{name}_0", lambda v: self.line(f"staged[v] = {v[0]};"))
                self.line(f"rlx_put<4>(rows + r * {pitch} + {self.at(f'{name}_0')}, staged);")

    def address(self, o: Operand, row: str, column: str) -> str:
        """The address of an element of the right operand."""
        r, c = Var("r", index_), Var("c", index_)
        self.names[r], self.names[c] = f"(rlx_index)({row})", f"(rlx_index)({column})"
        index = self.value(k.add(o.offset, k.add(k.mul(r, const(o.row_stride)), k.mul(c, const(o.col_stride)))))
        return f"{self.names[o.buffer]} + {index}"

    def widened(self, o: Operand, size: int, held: str, name: str) -> None:
        """float NAME[size] from the elements HELD[size]."""
        if o.dtype in EIGHT:
            self.line(f"float {name}[{size}];")
            self.line(f"rlx_wide_{o.dtype}({name}, {held});")
            return
        wide = CUDA.loads.get(o.dtype.name, "{0}[{1}]").format(held, "v")
        self.line(f"float {name}[{size}];")
        self.line(f"for (int v = 0; v < {size}; v++) {name}[v] = {wide};")

    def declare_batch(self) -> None:
        """A batch of loads in flight; `fetch(u, column, batch)` starts number u, `first()` all of the first batch."""
        at, c = self.launch, self.launch.contract
        assert isinstance(c.b, Operand)
        self.line(f"{CUDA.element(c.b.dtype)} held[{at.ahead}][{at.columns}][{at.size}];")
        with self.lambda_("const auto fetch = [&](int u, int column0, int batch) {"):
            self.line(f"const int d = ((batch * {at.ahead} + u) * 32 + lane) * {at.size};")
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {at.columns}; n++) {{"]):
                if at.pitch > c.k:  # zeros, since infinity times the zeros behind a row is NaN
                    self.line(f"for (int v = 0; v < {at.size}; v++) held[u][n][v] = 0;")
                    self.line(f"if (d >= {c.k}) continue;")
                column = f"column0 + n < {c.n} ? column0 + n : {c.n - 1}"
                self.line(f"rlx_stream<{at.size}>(held[u][n], {self.address(c.b, 'd', column)});")
        with self.lambda_("const auto first = [&]() {"):
            self.line("#pragma unroll")
            self.line(f"for (int u = 0; u < {at.ahead}; u++) fetch(u, (slot * {WARPS} + warp) * {at.columns}, 0);")

    @contextmanager
    def lambda_(self, opening: str) -> Iterator[None]:
        with self.scope([opening]):
            yield
        self.lines[-1] += ";"

    def by_columns(self, c: Contract, m: str) -> None:
        """Lanes share the summed axis; the last lanes of a warp write the columns."""
        at, many = self.launch, self.launch.columns
        step = at.each * WARPS * many
        with self.scope([f"for (int column0 = (slot * {WARPS} + warp) * {many}; column0 < {c.n}; column0 += {step}) {{"]):
            self.line(f"float sum[{many}][{c.m}] = {{}};")
            with self.scope(["#pragma unroll 1", f"for (int batch = 0; batch < {at.batches}; batch++) {{"]):
                self.line(f"const bool last = batch == {at.batches - 1};")
                self.line(f"const int column1 = last ? column0 + {step} : column0;")
                with self.scope(["#pragma unroll", f"for (int u = 0; u < {at.ahead}; u++) {{"]):
                    self.products(c)
            self.line("float mine = 0;")
            with self.scope(["#pragma unroll", f"for (int e = 0; e < {many * c.m}; e++) {{"]):
                self.line(f"float all = sum[e / {c.m}][e % {c.m}];")
                self.line("for (int by = 16; by > 0; by /= 2) all += rlx_from(all, 32, by);")
                self.line("if (lane == e) mine = all;")
            with self.scope([f"if (lane < {many * c.m} && column0 + lane / {c.m} < {c.n} && lane % {c.m} < {m}) {{"]):
                self.finish(c, f"lane % {c.m}", f"column0 + lane / {c.m}", "mine")

    def products(self, c: Contract) -> None:
        """Uses load number u of the batch, and puts the one `ahead` loads later in its place. 4 elements are widened at a
        time: 16 of several columns take too many registers."""
        at, size, o = self.launch, self.launch.size, self.launch.contract.b
        assert isinstance(o, Operand)
        element, part = CUDA.element(o.dtype), min(4, size)
        self.line(f"{element} raw[{at.columns}][{size}];")
        self.line(f"for (int n = 0; n < {at.columns}; n++) memcpy(raw[n], held[u][n], {size * o.dtype.itemsize});")
        self.line(f"if (column1 < {c.n}) fetch(u, column1, last ? 0 : batch + 1);")
        with self.scope(["#pragma unroll", f"for (int part = 0; part < {size // part}; part++) {{"]):
            self.line(f"float w[{at.columns}][{part}];")
            with self.scope(["#pragma unroll", f"for (int n = 0; n < {at.columns}; n++) {{"]):
                self.widened(o, part, f"(*(const {element}(*)[{part}])(raw[n] + part * {part}))", "wide")
                self.line(f"for (int v = 0; v < {part}; v++) w[n][v] = wide[v];")
            with self.scope(["#pragma unroll", f"for (int r = 0; r < {c.m}; r++) {{"]):
                self.line(f"float x[{part}];")
                place = f"((batch * {at.ahead} + u) * 32 + lane) * {part} + part * {at.pitch * part // size}"
                self.line(f"rlx_fetch<{part}>(x, rows + r * {at.pitch} + {place});")
                self.line(f"for (int n = 0; n < {at.columns}; n++)")
                self.line(f"  for (int v = 0; v < {part}; v++) sum[n][r] = fmaf(x[v], w[n][v], sum[n][r]);")

    def by_rows(self, c: Contract, m: str) -> None:
        """A lane has adjacent columns; the warps share the summed axis and add their sums in shared memory."""
        size = self.launch.size
        assert isinstance(c.b, Operand)
        self.line(f"const int column0 = (slot * 32 + lane) * {size};")
        self.line(f"float sum[{c.m}][{size}] = {{}};")
        with (
            self.scope([f"if (column0 < {c.n}) {{"]),
            self.scope(["#pragma unroll 8", f"for (int d = warp; d < {c.k}; d += {WARPS}) {{"]),
        ):
            self.line(f"{CUDA.element(c.b.dtype)} held[{size}];")
            self.line(f"rlx_fetch<{size}>(held, {self.address(c.b, 'd', 'column0')});")
            self.widened(c.b, size, "held", "w")
            with self.scope(["#pragma unroll", f"for (int r = 0; r < {c.m}; r++) {{"]):
                self.line(f"const float x = rows[r * {self.launch.pitch} + {self.at('d')}];")
                self.line(f"for (int v = 0; v < {size}; v++) sum[r][v] = fmaf(x, w[v], sum[r][v]);")
        self.line(f"__shared__ float parts[{WARPS}][{c.m}][{32 * size}];")
        self.line(f"for (int r = 0; r < {c.m}; r++)")
        self.line(f"  for (int v = 0; v < {size}; v++) parts[warp][r][lane * {size} + v] = sum[r][v];")
        self.line("__syncthreads();")
        with self.scope([f"for (int e = me; e < {c.m * 32 * size}; e += {THREADS}) {{"]):
            self.line(f"const int r = e / {32 * size}, at = e % {32 * size}, j = slot * {32 * size} + at;")
            self.line(f"if (j >= {c.n} || r >= {m}) break;" if c.m == 1 else f"if (j >= {c.n} || r >= {m}) continue;")
            self.line("float all = 0;")
            self.line(f"for (int w = 0; w < {WARPS}; w++) all += parts[w][r][at];")
            self.finish(c, "r", "j", "all")

    def finish(self, c: Contract, i: str, j: str, acc: str) -> None:
        self.names[c.i], self.names[c.j] = self.fix("i", index_, i), self.fix("j", index_, j)
        self.names[c.acc] = acc
        self.block(c.epilogue)


__all__ = ["GemvLaunch", "GemvWriter", "few_rows", "multiple"]

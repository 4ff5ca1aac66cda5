"""Contractions with few rows, bound by reading the right operand once.

A block first puts its rows of the left operand into shared memory; they may be computed there (a norm in front of the product).
Where columns of the right operand are contiguous, each warp takes some of them at a time and its lanes share the summed axis;
where rows are, each lane has adjacent columns and the warps share the summed axis. Sums are in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.ir.dtype import f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Kernel, Load, Operand, Stmt, Var, coefficient, const, k

MOST_ROWS = 8
THREADS, WARPS = 256, 8
AT_ONCE = 2  # columns of a warp
RESIDENT = 4  # blocks of a multiprocessor
SHARED_BYTES = 160 << 10
BYTES = 16  # of one load


@dataclass(frozen=True)
class GemvLaunch(Launch):
    along: bool = True
    size: int = 1
    each: int = 1  # blocks of a grid point

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.each


def few_rows(kernel: Kernel, multiprocessors: int = 132) -> GemvLaunch | None:
    """The launch of a contraction with few rows; None: it is none."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or c.m > MOST_ROWS or c.acc.dtype != f32 or not isinstance(c.b, Operand) or 0 in (c.m, c.n, c.k):
        return None
    if c.b.panel or c.b.blocks or (isinstance(c.a, Operand) and (c.a.panel or c.a.blocks)):
        return None
    along = c.b.row_stride == 1 or c.k == 1
    if not along and c.b.col_stride != 1 and c.n > 1:
        return None
    staged = 4 * c.m * -(-c.k // 8) * 8
    locals_ = sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in kernel.locals)
    if staged + locals_ > SHARED_BYTES or any(x.var is not c.i for x in kernel.limits):
        return None
    item = c.b.dtype.itemsize
    stride, extent = (c.b.col_stride, c.k) if along else (c.b.row_stride, c.n)
    size = BYTES // item if along else max(1, 4 // item)
    while size > 1 and (extent % size or stride % size or not _multiple(c.b.offset, kernel, size)):
        size //= 2
    points = math.prod(n for _, n in kernel.grid)
    tiles = -(-c.n // (WARPS * AT_ONCE if along else 32 * size))
    each = min(tiles, max(1, RESIDENT * multiprocessors // points)) if along else tiles
    return GemvLaunch(kernel, THREADS, THREADS, shared=staged + locals_, along=along, size=size, each=each)


def _multiple(offset: Expr, kernel: Kernel, size: int) -> bool:
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
        c = self.contract
        super().declare_locals()
        used = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        if not self.kernel.locals:
            self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"float* const rows = (float*)(rlx_shared + {used});  // {c.m} rows of the left operand")

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def pitch(self) -> int:
        return -(-self.contract.k // 8) * 8

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
        """Where element `step` of a row is staged: the even and the odd groups of 4 apart, so that lanes read adjacent ones."""
        return f"({step}) / 8 * 4 + ({step}) % 4 + ({step}) / 4 % 2 * {self.pitch // 2}" if self.launch.size == 8 else f"({step})"

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
            name = self.name(column, "i")
            with self.scope([f"for (rlx_index {name} = me; {name} < {c.k}; {name} += {THREADS}) {{"]), self.alone():
                self.own.append(value)
                (text,) = self.block(body, [value])
                self.line(f"rows[r * {self.pitch} + {self.at(name)}] = {text};")
            self.exchanged(*(c.a.before if isinstance(c.a, Computed) else ()), *body)

    def operand(self, o: Operand, size: int, row: str, column: str, name: str) -> None:
        """float NAME[size]: consecutive elements of the right operand from (row, column) on."""
        r, c = Var("r", index_), Var("c", index_)
        self.names[r], self.names[c] = f"(rlx_index)({row})", f"(rlx_index)({column})"
        index = self.made(k.add(o.offset, k.add(k.mul(r, const(o.row_stride)), k.mul(c, const(o.col_stride)))))
        element = CUDA.element(o.dtype)
        self.line(f"{element} {name}_[{size}];")
        self.line(f"rlx_fetch<{size}>({name}_, {self.names[o.buffer]} + {index});")
        self.line(f"float {name}[{size}];")
        wide = CUDA.loads.get(o.dtype.name, "{0}[{1}]").format(f"{name}_", "v")
        self.line(f"for (int v = 0; v < {size}; v++) {name}[v] = {wide};")

    def by_columns(self, c: Contract, m: str) -> None:
        """Lanes share the summed axis; the last lanes of a warp write the columns."""
        at, size = self.launch, self.launch.size
        assert isinstance(c.b, Operand)
        step = WARPS * AT_ONCE
        with self.scope(
            [f"for (int column0 = slot * {step} + warp * {AT_ONCE}; column0 < {c.n}; column0 += {at.each * step}) {{"]
        ):
            self.line(f"float sum[{AT_ONCE}][{c.m}] = {{}};")
            with self.scope(["#pragma unroll 4", f"for (int d = lane * {size}; d < {c.k}; d += {32 * size}) {{"]):
                for n in range(AT_ONCE):
                    column = f"column0 + {n} < {c.n} ? column0 + {n} : {c.n - 1}"
                    self.operand(c.b, size, "d", column, f"w{n}")
                with self.scope(["#pragma unroll", f"for (int r = 0; r < {c.m}; r++) {{"]):
                    self.line(f"float x[{size}];")
                    if size == 8:
                        self.line(f"const float* const from = rows + r * {self.pitch} + d / 2;")
                        self.line(
                            f"*(float4*)x = *(const float4*)from, *(float4*)(x + 4) = *(const float4*)(from + {self.pitch // 2});"
                        )
                    else:
                        self.line(f"for (int v = 0; v < {size}; v++) x[v] = rows[r * {self.pitch} + d + v];")
                    for n in range(AT_ONCE):
                        self.line(f"for (int v = 0; v < {size}; v++) sum[{n}][r] = fmaf(x[v], w{n}[v], sum[{n}][r]);")
            self.line("float mine = 0;")
            with self.scope(["#pragma unroll", f"for (int e = 0; e < {AT_ONCE * c.m}; e++) {{"]):
                self.line(f"float all = sum[e / {c.m}][e % {c.m}];")
                self.line("for (int by = 16; by > 0; by /= 2) all += rlx_from(all, 32, by);")
                self.line("if (lane == e) mine = all;")
            with self.scope([f"if (lane < {AT_ONCE * c.m} && column0 + lane / {c.m} < {c.n} && lane % {c.m} < {m}) {{"]):
                self.finish(c, f"lane % {c.m}", f"column0 + lane / {c.m}", "mine")

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
            self.operand(c.b, size, "d", "column0", "w")
            with self.scope(["#pragma unroll", f"for (int r = 0; r < {c.m}; r++) {{"]):
                self.line(f"const float x = rows[r * {self.pitch} + {self.at('d')}];")
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


__all__ = ["GemvLaunch", "GemvWriter", "few_rows"]

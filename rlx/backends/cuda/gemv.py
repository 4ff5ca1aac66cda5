"""Contractions with few rows, bound by reading the right operand once.

A block first puts its rows of the left operand into shared memory; they may be computed there (a norm before the product). If
columns of the right operand are contiguous, each warp takes some of them at a time and its lanes share the summed axis: a lane
has a batch of 16-byte loads in flight, and replaces each as soon as it has used it. If rows are contiguous, each lane has
adjacent columns and the warps share the summed axis. Where columns are too few for all multiprocessors, blocks share it, too: the
last of them adds what the others tell it, in a fixed order. (gemv_ring.py is faster where it applies.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter, may_fail
from rlx.backends.cuda.schedule import Launch, Segments, busy_points
from rlx.backends.cuda.vectors import aligned
from rlx.ir.dtype import f8e4m3, f8e5m2, f32, index_
from rlx.ir.kernel import Computed, Contract, Expr, Kernel, Load, Loop, Operand, Reduce, Stmt, Var, const, k
from rlx.records import record

MOST_ROWS = 8
MORE_ROWS, NARROW = 16, 64  # of few columns that tensor cores do not take, whose summed axis blocks share
THREADS, WARPS = 256, 8
MOST_COLUMNS = 4  # of a warp at a time
IN_FLIGHT, FEWER = 16, 8  # loads of a lane; with more rows, whose sums take registers, or of f32, where 16 spill
RESIDENT = 2  # blocks of a multiprocessor
SHARED_BYTES = 160 << 10
BYTES = 16  # of one load
MOST_SHARES, LEAST, UNIT = 32, 128, 32  # blocks that share the summed axis; elements of it that a block has, and a multiple
LONG, HEARD = 1 << 15, 16  # elements of an axis that twice as many share; sums that a thread hears at once
EIGHT = (f8e4m3, f8e5m2)


@record
class GemvLaunch(Launch):
    along: bool = True
    size: int = 1  # elements of a load
    each: int = 1  # blocks of a grid point
    columns: int = 1  # of a warp at a time
    ahead: int = 1  # loads of a lane from each of its columns at a time
    batches: int = 1  # of these along the summed axis
    shares: int = 1  # blocks that share the summed axis
    span: int = 0  # elements of it that a block has

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.each * self.shares

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def pitch(self) -> int:
        """Elements of a row in shared memory; behind the row are zeros."""
        return self.batches * self.ahead * 32 * self.size if self.along else self.span


def contract_of(kernel: Kernel, most_rows: int, pairs: bool = False, blocks: bool = False) -> Contract | None:
    """The contraction of a kernel that has few rows, the right operand as it is; None: it has none. `pairs`: an epilogue may read
    two sums; `blocks`: weights may be quantised."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or (c.also and not pairs) or c.acc.dtype != f32 or not 0 < c.m <= most_rows or 0 in (c.n, c.k):
        return None
    packed = any(isinstance(x, Operand) and (x.panel or (x.blocks and not blocks)) for x in (c.a, c.b))
    fits = isinstance(c.b, Operand) and not packed and all(x.var is c.i for x in kernel.limits)
    return c if fits else None


def loops_of(c: Contract) -> list[Loop]:
    """Over the elements of a row of the left operand: those in front, and one whose "result" are the elements."""
    none = Var("none", f32)
    if isinstance(c.a, Computed):
        value = k.cast(k.cast(c.a.value, c.a.dtype), f32)
        own = Loop(c.a.column, c.k, tuple(c.a.body), True, (Reduce(none, "add", value),))
        return [*(s for s in c.a.before if isinstance(s, Loop)), own]
    column = Var("column", index_)
    index = k.add(c.a.offset, k.add(k.mul(c.i, const(c.a.row_stride)), k.mul(column, const(c.a.col_stride))))
    return [Loop(column, c.k, (), True, (Reduce(none, "add", k.cast(Load(c.a.buffer, index), f32)),))]


def few_rows(
    kernel: Kernel, multiprocessors: int = 132, most: int = SHARED_BYTES, segments: Segments | None = None
) -> GemvLaunch | None:
    """The launch of a contraction with few rows; None: it is none. `most`: bytes of shared memory of a block."""
    c = contract_of(kernel, MORE_ROWS)
    if c is None or not isinstance(c.b, Operand):
        return None
    along = c.b.row_stride == 1 or c.k == 1
    if c.m > MOST_ROWS:
        tensor = min(c.m, c.n) >= MORE_ROWS and not (c.k % 8 or (not along and c.n % 8))
        if c.n > NARROW or c.b.dtype.itemsize != 2 or tensor:
            return None
    apart = not along and c.b.col_stride != 1 and c.n > 1
    if apart and not segments:
        return None
    along, item = along or apart, c.b.dtype.itemsize
    stride, extent = (c.b.col_stride, c.k) if along else (c.b.row_stride, c.n)
    size = BYTES // item if along else max(1, 4 // item)
    while size > 1 and (apart or extent % size or stride % size or not aligned(c.b.offset, None, size)):
        size //= 2
    points = busy_points(kernel, segments)
    blocks = max(1, RESIDENT * multiprocessors // points)
    rounds = -(-c.n // (blocks * WARPS * MOST_COLUMNS))
    columns = -(-c.n // (blocks * WARPS * rounds)) if along else 1
    tiles = -(-c.n // (WARPS * columns if along else 32 * size))
    each = min(tiles, blocks) if along else tiles
    whole = segments or kernel.limits or isinstance(c.a, Computed) or may_fail(kernel)  # a block that fails tells nothing
    most_shares = 1 if whole else MOST_SHARES * (2 if c.k >= LONG else 1)
    shares = max(1, min(most_shares, multiprocessors // (points * each), c.k // LEAST))
    unit = UNIT * size if along else UNIT
    span = c.k if shares == 1 else -(-c.k // (shares * unit)) * unit
    shares, chunks = -(-c.k // span), -(-span // (32 * size))
    if (c.m > MOST_ROWS and shares == 1) or c.m == c.n == 1 < shares:
        return None
    batches = -(-chunks * columns // (IN_FLIGHT if c.m == 1 and item < 4 else FEWER))
    found = GemvLaunch(
        kernel, THREADS, THREADS, along=along, size=size, each=each, columns=columns, ahead=-(-chunks // batches),
        batches=batches, segments=segments, shares=shares, span=span,
        counters=2 * points * shares * c.m * c.n if shares > 1 else 0,
    )  # fmt: skip
    held = sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in kernel.locals) + 4 * c.m * found.pitch
    return replace(found, shared=held) if held <= min(most, SHARED_BYTES) else None


class GemvWriter(CudaWriter):
    launch: GemvLaunch

    def __init__(self, launch: GemvLaunch) -> None:
        super().__init__(launch)
        self.headers = ("words.h",) * (launch.shares > 1) + self.headers

    def coordinates(self) -> Iterator[str]:
        yield f"const int me = threadIdx.x % {self.launch.team}, warp = threadIdx.x / 32, lane = threadIdx.x % 32;"
        at = self.launch
        yield f"rlx_index point = blockIdx.x / {at.each * at.shares};"
        yield f"const int slot = blockIdx.x{f' / {at.shares}' * (at.shares > 1)} % {at.each};"
        if at.shares > 1:  # elements first <= d < first + many of the summed axis
            k, span = at.contract.k, at.span
            yield f"const int share = blockIdx.x % {at.shares}, first = share * {span};"
            yield f"const int many = {k} - first < {span} ? {k} - first : {span};"
            yield "const rlx_index of_point = point;"
        yield from self.divided()

    def declare_locals(self) -> None:
        super().declare_locals()
        used = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        if not self.kernel.locals:
            self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line(f"{self.element}* const rows = ({self.element}*)(rlx_shared + {used});  // of the left operand")

    occupancy = f", {RESIDENT}"
    headers = ("gemv.h",)
    together = False  # the rows are staged together
    element, staged = "float", 4  # of `rows`, and as many that a thread puts there at once, at most

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at, o, m = self.launch, s.b, self.limit(s.i, s.m) or str(s.m)
        assert isinstance(o, Operand)
        first, many = ("first + ", "many") if at.shares > 1 else ("", str(s.k))
        self.before(s)
        with self.alone():
            with self.lambda_("const auto from = [&](int d, int column) {"):
                self.line(f"return {self.address(o, f'{first}d', 'column')};")
            with self.lambda_("const auto put = [&](int row, int column, float all) {"):
                self.line(f"if (row >= {m}) return;")
                if at.shares > 1:
                    self.exchange(s)
                self.names[s.i], self.names[s.j] = self.fix("i", index_, "row"), self.fix("j", index_, "column")
                self.names[s.acc] = "all"
                self.block(s.epilogue)
        self.multiply(s, o, many)
        return None

    def before(self, c: Contract) -> None:
        """The left operand in shared memory, before functions of its product are declared."""
        self.stage(c)
        self.line("__syncthreads();")

    def multiply(self, s: Contract, o: Operand, many: str) -> None:
        at = self.launch
        with self.alone():
            self.declare_wide(o, min(4, at.size))
        how = f"{s.m}, {s.n}, {at.pitch}, {at.size}, {CUDA.element(o.dtype)}"
        if at.along:
            start, step = f"(slot * {WARPS} + warp) * {at.columns}", at.each * WARPS * at.columns
            how += f", {at.columns}, {at.ahead}, {at.batches}"
            self.line(f"rlx_columns<{how}>(rows, {many}, from, wide, put, {start}, {step}, lane);")
        else:
            self.line(f"rlx_rows<{how}>(rows, {many}, from, wide, put, slot, warp, lane);")

    def exchange(self, c: Contract) -> None:
        """The last of the blocks that share the summed axis adds the sums of the others, which started before it."""
        at, results = self.launch, c.m * c.n
        place = f"of_point * {at.shares * results} + row * {c.n} + column"
        self.line(f"uint64_t* const word = (uint64_t*)rlx_counters + {place};")
        self.line(f"if (share < {at.shares - 1}) return rlx_tell(word + share * {results}, all);")
        for n in range(0, at.shares - 1, HEARD):
            self.line(f"rlx_hear<{min(HEARD, at.shares - 1 - n)}>(all, word + {n * results}, {results});")

    def at(self, step: str) -> str:
        """Where element `step` of a row is staged: the first 4 of every load, then the next, so that lanes read adjacent ones."""
        size = self.launch.size
        if size <= 4:
            return step
        return f"{step} / {size} * 4 + {step} % 4 + {step} % {size} / 4 * {self.launch.pitch * 4 // size}"

    def stage(self, c: Contract) -> None:
        rows = self.limit(c.i, c.m) if self.launch.segments else None  # behind those of a group there may be none
        if self.launch.shares > 1 or self.together:
            return self.stage_shares(c)
        with self.scope([f"for (int r = 0; r < {rows or c.m}; r++) {{"]):
            self.names[c.i], last = "(rlx_index)r", loops_of(c)[-1]
            self.alive.append(last.reduces[0].value)
            if isinstance(c.a, Computed):
                self.names[c.a.row] = "(rlx_index)r"
                self.block(c.a.before)
            self.stage_row(last.body, last.reduces[0].value, last.var)
            if self.launch.pitch > c.k:
                name, at = self.fresh("i"), self.launch
                with self.scope([f"for (int {name} = {c.k} + me; {name} < {at.pitch}; {name} += {at.team}) {{"]):
                    self.line(f"rows[r * {at.pitch} + {self.at(name)}] = 0;")
            self.exchanged(*(c.a.before if isinstance(c.a, Computed) else ()), *last.body)

    def stage_shares(self, c: Contract) -> None:
        """The block's elements of all rows together, with zeros behind them."""
        at, last = self.launch, loops_of(c)[-1]
        size, name = math.gcd(c.k, self.staged), self.name(last.var, "i")
        first, many = ("first + at", "many") if at.shares > 1 else ("at", str(c.k))
        each = at.pitch // size
        loop = f"for (int e = me; e < {c.m * each}; e += {at.threads}) {{"
        with self.scope([f"#pragma unroll {self.staged}", loop]), self.alone():
            self.names[c.i] = "(rlx_index)r"
            self.line(f"const int r = e / {each}, at = e % {each} * {size};")
            self.line(f"const int {name}_0 = {first};")
            self.line(f"{self.element} staged[{size}] = {{}};")
            with self.scope([f"if (at < {many}) {{"]):
                value = last.reduces[0].value
                self.in_vectors(last.body, [value], last.var, size, f"{name}_0", self.keep)
            self.line(f"rlx_put<{size}>(rows + r * {at.pitch} + {self.at('at')}, staged);")

    def stage_row(self, body: Sequence[Stmt], value: Expr, column: Var) -> None:
        """Elements of row r, as many adjacent ones by a thread as lets all threads work and their loads start together."""
        c, pitch, team = self.launch.contract, self.launch.pitch, self.launch.team
        name, size = self.name(column, "i"), 4 if c.k % (4 * team) == 0 and pitch % 4 == 0 else 1
        loop = f"for (int {name}_0 = me * {size}; {name}_0 < {c.k}; {name}_0 += {size * team}) {{"
        with self.scope(["#pragma unroll 8", loop]), self.alone():
            self.line(f"{self.element} staged[{size}];")
            self.in_vectors(body, [value], column, size, f"{name}_0", self.keep)
            self.line(f"rlx_put<{size}>(rows + r * {pitch} + {self.at(f'{name}_0')}, staged);")

    def keep(self, values: list[str]) -> None:
        self.line(f"staged[v] = {values[0]};")

    def address(self, o: Operand, row: str, column: str) -> str:
        """The address of an element of the right operand."""
        r, c = Var("r", index_), Var("c", index_)
        self.names[r], self.names[c] = f"(rlx_index)({row})", f"(rlx_index)({column})"
        index = self.value(k.add(o.offset, k.add(k.mul(r, const(o.row_stride)), k.mul(c, const(o.col_stride)))))
        return f"{self.names[o.buffer]} + {index}"

    def declare_wide(self, o: Operand, size: int) -> None:
        """`wide(w, raw)` makes f32 of elements."""
        with self.lambda_(f"const auto wide = [](float (&w)[{size}], const {CUDA.element(o.dtype)} (&raw)[{size}]) {{"):
            if o.dtype in EIGHT:
                self.line(f"rlx_wide_{o.dtype}(w, raw);")
            else:
                one = CUDA.loads.get(o.dtype.name, "{0}[{1}]").format("raw", "v")
                self.line(f"for (int v = 0; v < {size}; v++) w[v] = {one};")

    @contextmanager
    def lambda_(self, opening: str) -> Iterator[None]:
        with self.scope([opening]):
            yield
        self.lines[-1] += ";"


__all__ = ["GemvLaunch", "GemvWriter", "contract_of", "few_rows", "loops_of"]

"""Contractions with few rows whose weights pass through a ring in shared memory, from compute capability 9.0 on.

A multiprocessor has one block, which computes a range of the columns. A ninth warp copies their weights, piece by piece, to the
ring, by bulk copies that start before the kernels in front end, if no kernel of a run writes them (`early`). That warp waits for
nothing but the ring. Half of a multiprocessor stays free: the block of the next product is there too and has its first weights
while this one computes (rlx.backends.cuda.executable.spaced). Each thread keeps its elements of the left operand in registers; a
norm in front is computed there. The eight other warps share the summed axis or, where that is short, take different columns.
Their sums meet in shared memory once for up to 256 columns, and are added in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from rlx.backends.cuda.ahead import AheadWriter
from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.gemv import GemvLaunch, GemvWriter, contract_of, loops_of
from rlx.backends.cuda.rows import Row, key_of, own_locals, repeated
from rlx.backends.cuda.schedule import ALONE, BESIDE, COPIED, LONG, MULTIPROCESSORS, busy_points
from rlx.backends.cuda.vectors import aligned, loads
from rlx.ir.dtype import bf16, f16, f32, index_
from rlx.ir.kernel import Computed, Contract, Kernel, Loop, Native, Operand, Sort, Stmt, Var, walk
from rlx.records import record

MOST_ROWS = 3
WARPS, LANES = 8, 32  # of the warps that compute
THREADS = LANES * (WARPS + 1)
BYTES = 16  # of one load; bulk copies need addresses and sizes that are multiples of it
MOST_COLUMNS, PIECE_BYTES = 8, 16 << 10  # of a warp at a time; of a slot of the ring
MOST_SLOTS, WINDOW_BYTES = 16, (48 << 10, 64 << 10)  # of the ring; in flight, of long products the latter
EARLY = 1  # pieces in flight until earlier kernels have ended
LONG_BYTES = 128 << 10  # of a block, from which on a product is long
MOST_TENSOR = 4  # runs of a row that a thread keeps for tensor cores
KEPT, FETCHED = 64, 64  # elements of the left operand that a thread keeps; of rows that it loads before it uses the first
FINISHED, RESERVED = 256, 256  # sums that meet at once; bytes of what is declared besides
# of loads of so many elements; the loss by more copies where warps take different columns
VALUE, APART = {16: 1.0, 8: 1.0, 4: 0.97, 2: 0.8, 1: 0.5}, 0.1


@record
class RingLaunch(GemvLaunch):
    """A run is what the threads of a team read of a column at once, `size` elements each. A piece has a run of `columns` columns
    of each team; `ahead` runs make a column. `span`: columns whose sums meet in shared memory at once. `slots` of the ring,
    `window` of them in flight."""

    span: int = 1
    slots: int = 2
    window: int = 2

    @property
    def early(self) -> int:
        """The weights are read before earlier kernels have ended."""
        return self.kernel.buffers.index(_weights(self.contract).buffer)

    @property
    def warps(self) -> int:
        """Warps that share the summed axis: one, or all."""
        return self.team // LANES

    @property
    def run(self) -> int:
        return self.team * self.size

    @property
    def wide(self) -> int:
        """Columns of weights of a piece."""
        return self.columns * (WARPS // self.warps)

    @property
    def item(self) -> int:
        return _weights(self.contract).dtype.itemsize

    @property
    def piece(self) -> int:
        return self.wide * self.run * self.item

    @property
    def both(self) -> int:
        """2: an epilogue reads the sums of columns j and j + n, and half of a piece is of the latter. Else 1."""
        return self.contract.width // self.contract.n

    @property
    def own(self) -> int:
        """Columns of weights of a block, at most."""
        return -(-self.contract.n // self.each) * self.both

    @property
    def tensor(self) -> bool:
        """Tensor cores multiply: one row in the dtype of the weights, by whole runs that all warps share."""
        c, w = self.contract, _weights(self.contract)
        fits = self.warps == WARPS and self.columns * self.size == LANES and c.k == self.ahead * self.run
        return fits and c.m == 1 and self.ahead <= MOST_TENSOR and c.a.dtype == w.dtype and w.dtype in (bf16, f16)

    @property
    def sums(self) -> int:
        """Bytes of sums of warps."""
        return 4 * self.contract.m * self.span * self.warps


def ring_of(kernel: Kernel, multiprocessors: int = MULTIPROCESSORS, most: int = LONG) -> RingLaunch | None:
    """The launch of a contraction with few rows through a ring; None: it is none. `most`: bytes of shared memory of a block."""
    c = contract_of(kernel, MOST_ROWS, pairs=True)
    if c is None or most < LONG:
        return None
    b, points, item = _weights(c), busy_points(kernel, None), _weights(c).dtype.itemsize
    unit = BYTES // item  # of what bulk copies can fetch
    if b.row_stride != 1 or c.k % unit or (c.n > 1 and b.col_stride % unit) or not aligned(b.offset, None, unit):
        return None
    found = _kept(c.m, c.k, item)
    if not found:
        return None
    _, warps, size, ahead = max(found)
    each = min(c.n, max(1, multiprocessors // points))
    shared = ALONE if -(-c.width // each) * c.k * item <= LONG_BYTES else LONG
    at = RingLaunch(kernel, LANES * warps, THREADS, shared=shared, size=size, each=each, ahead=ahead)
    row = _row(at)
    return _with_ring(replace(at, row=row)) if row else None


def _kept(m: int, k: int, item: int) -> list[tuple[float, int, int, int]]:
    """How threads may keep m rows of k elements: (value, warps that share a row, elements of a load, loads of a row)."""
    found = []
    for warps, size in product((WARPS, 1), (n for n in VALUE if n * item <= BYTES and k % n == 0)):
        run = LANES * warps * size
        ahead = -(-k // run)
        if ahead * size * m <= KEPT:
            found.append((k / (ahead * run) * VALUE[size] - APART * (warps == 1), warps, size, ahead))
    return found


def takes(m: int, k: int, item: int) -> bool:
    """True if products of m rows of k elements pass through a ring, where columns of weights are adjacent in memory."""
    return k > 0 and m <= MOST_ROWS and k % (BYTES // item) == 0 and bool(_kept(m, k, item))


def _with_ring(at: RingLaunch) -> RingLaunch | None:
    teams, run = WARPS // at.warps, WARPS * LANES * at.size * at.item  # a lane copies a column
    columns = min(MOST_COLUMNS, LANES // teams, PIECE_BYTES // run, -(-at.own // teams))
    at, m = replace(at, columns=columns), at.contract.m
    at = replace(at, span=max(1, min(FINISHED // m // at.wide, -(-at.own // at.wide))) * at.wide)
    slots = min(MOST_SLOTS, (BESIDE[at.shared] - RESERVED - at.sums - 16 * MOST_SLOTS) // at.piece)
    return replace(at, slots=slots, window=min(slots, max(1, WINDOW_BYTES[at.shared == LONG] // at.piece))) if slots > 1 else None


def _weights(c: Contract) -> Operand:
    assert isinstance(c.b, Operand)
    return c.b


def _row(at: RingLaunch) -> Row | None:
    """The rows of the left operand in registers; None: it is computed in another way than by loops over them."""
    c, loops = at.contract, loops_of(at.contract)
    before = tuple(c.a.before) if isinstance(c.a, Computed) else ()
    inside = [s for s in walk(before) if isinstance(s, Loop | Sort | Native)]
    if any(s not in loops for s in inside) or any(not s.vector or s.carries or s.extent != c.k for s in loops):
        return None
    kept = frozenset(own_locals(replace(at.kernel, body=before), loops))
    return Row(c.k, at.size, at.ahead, kept, repeated(loops, at.size)) if len(kept) == len(at.kernel.locals) else None


class RingWriter(AheadWriter, GemvWriter):
    launch: RingLaunch
    occupancy, aligned = ", 2", COPIED
    headers = ("ring.h", "gemv_ring.h")

    # -- the block

    def arguments(self) -> list[str]:
        return [*super().arguments(), "long long early"]

    def declare_locals(self) -> None:
        at, c = self.launch, self.launch.contract
        super(GemvWriter, self).declare_locals()  # registers
        if not self.kernel.locals:
            self.line(f"extern __shared__ __align__({self.aligned}) unsigned char rlx_shared[];")
        self.line(f"float* const sums = (float*)(rlx_shared + {at.slots * at.piece});  // behind the ring: sums of warps")
        place = at.slots * at.piece + at.sums
        self.line(f"uint64_t* const filled = (uint64_t*)(rlx_shared + {place}), *const used = filled + {at.slots};")
        self.line(f"volatile int* const waited = (int*)(used + {at.slots});")
        for name, text in (("first", "slot"), ("last", "(slot + 1)")):
            self.line(f"const int {name} = (int)((long long){text} * {c.n} / {at.each});")

    def begin(self) -> None:
        at, c, b = self.launch, self.launch.contract, _weights(self.launch.contract)
        pitch = b.col_stride * at.item
        how = f"{at.slots}, {min(at.window, EARLY)}, {at.window}, {at.wide}, {at.run * at.item}, {c.k * at.item}"
        how += f", {pitch}ll, {pitch * c.n * (at.both - 1)}ll"
        weights = f"(const unsigned char*)({self.address(b, '0', 'first')})"
        self.line(f"if (rlx_ring_copies<{how}>(rlx_shared, filled, used, waited, {weights}, last - first, early)) return;")
        self.line("rlx_begin();")
        self.line("*waited = 1;")
        self.line("const bool halted = halt && *(const volatile int*)halt;  // then nothing is stored")

    def statement(self, s: Stmt) -> None:
        if not isinstance(s, Contract):
            return super().statement(s)
        at, m, b = self.launch, self.limit(s.i, s.m) or str(s.m), _weights(s)
        self.stage(s)
        if not at.tensor:
            self.declare_wide(b, at.size)
        self.line("int place = 0, phase = 0;")
        span = at.span // at.both
        head = f"for (int at = first; at < last; at += {span}) {{"
        with self.scope(["#pragma unroll 1", head]), self.alone():
            self.line(f"const int end = last - at < {span} ? last : at + {span};")
            self.line("if (at > first) rlx_sync<256>();  // the sums in front have been read")
            self.load_ahead(s, f"threadIdx.x < (end - at) * {s.m}", self.place)
            count = f"(end - at) * {at.both}" if at.both > 1 else "end - at"
            given = "rlx_shared, filled, used, place, phase, x"
            if at.tensor:
                how = f"{at.slots}, {at.columns}, {at.span}, {str(b.dtype == f16).lower()}"
                self.line(f"rlx_ring_tensor<{how}>({given}, {count}, sums);")
            else:
                how = f"{at.slots}, {at.columns}, {at.warps}, {s.k}, {at.span}, {CUDA.element(b.dtype)}"
                self.line(f"rlx_ring_sums<{how}>({given}, wide, {count}, sums, me);")
            self.line("rlx_sync<256>();")
            row = f" && threadIdx.x % {s.m} < {m}" * (m != str(s.m))
            with self.scope([f"if (threadIdx.x < (end - at) * {s.m} && !halted{row}) {{"]):
                self.place(s)
                total, half = f"rlx_ring_total<{at.warps}, {at.span * s.m}>", at.wide // 2 * s.m
                place = "threadIdx.x" if s.also is None else f"threadIdx.x / {half} * {2 * half} + threadIdx.x % {half}"
                self.names[s.acc] = self.fix("all", f32, f"{total}(sums + {place})")
                if s.also is not None:
                    self.names[s.also] = self.fix("also", f32, f"{total}(sums + {place} + {half})")
                self.block(s.epilogue)
        return None

    def place(self, c: Contract) -> None:
        """The element that this thread finishes."""
        self.names[c.i] = self.fix("i", index_, f"threadIdx.x % {c.m}")
        self.names[c.j] = self.fix("j", index_, f"at + threadIdx.x / {c.m}")

    # -- the left operand

    def stage(self, c: Contract) -> None:
        """x[r][q]: the thread's elements of run q of row r."""
        at = self.launch
        self.line(f"float x[{c.m}][{at.ahead}][{at.size}] = {{}};")
        with self.scope(["#pragma unroll", f"for (int r = 0; r < {c.m}; r++) {{"]):
            self.names[c.i] = "(rlx_index)r"
            *_, last = loops = loops_of(c)
            (made,) = last.reduces
            self.alive.append(made.value)
            if isinstance(c.a, Computed):
                self.names[c.a.row] = "(rlx_index)r"
                self.fetch_rows(loops, c.a.row)
                self.block(c.a.before)
            first = self.fresh("d")
            assert self.row
            keep = lambda v: self.line(f"x[r][{self.round}][v] = {v[0]};")  # noqa: E731
            take = lambda: self.in_vectors(last.body, [made.value], last.var, at.size, first, keep)  # noqa: E731
            self.part_of_row(last, self.row, first, take)

    def fetch_rows(self, loops: list[Loop], row: Var) -> None:
        """Start all loads of a row together, so that those of one loop do not wait for the sums of another."""
        at, c = self.launch, self.launch.contract
        found = {
            key_of(x, s.var): (x, s.var)
            for s in loops
            for x in loads(s.body, [r.value for r in s.reduces], s.var, at.size)
            if x.guard is None and self.known(x.index, s.var, row, c.i)
        }
        if len(found) * at.ahead * at.size > FETCHED:
            return
        for key, (x, _) in found.items():
            self.registers[key] = self.fresh("q")
            self.line(f"{CUDA.element(x.buffer.dtype)} {self.registers[key]}[{at.ahead}][{at.size}];")
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {at.ahead}; n++) {{"]):
            self.line(f"const rlx_index d = (n * {at.team} + me) * {at.size};")
            if c.k < at.ahead * at.run:
                self.line(f"if (d >= {c.k}) continue;")
            for key, (x, var) in found.items():
                place = f"{self.names[x.buffer]} + {self.at_first(x.index, var, 'd')}"
                self.line(f"rlx_fetch<{at.size}>({self.registers[key]}[n], {place});")
        self.loaded |= set(found)


__all__ = ["RingLaunch", "RingWriter", "ring_of"]

"""Columns kept in shared memory: softmax down columns and the like. A cluster of blocks has all rows of a strip of adjacent
columns. Each thread copies its own elements there, all of them at once, and waits for no other thread before it reads them in
each loop. Registers would hold fewer bytes: too few would be on their way while blocks wait for each other's sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import LONG_SUM, CudaWriter, Partial
from rlx.backends.cuda.rows import Key, key_of, recomputed, repeated, row_loops
from rlx.backends.cuda.vectors import BYTES, loads, width
from rlx.ir.kernel import EXTREMES, Check, Kernel, Let, Load, Loop, Reduce, Store, Var, walk
from rlx.ir.nest import joined, substitute
from rlx.ir.overlap import may_overlap
from rlx.records import record

from rlx.backends.cuda.schedule import (  # isort: skip
    ALIGNED, CLUSTER, COLUMN_BYTES, FOUND, LARGEST, MULTIPROCESSORS, PART_WARPS, PARTS, REGISTERS, RESERVED, WARP, Launch,
    lanes_down,
)  # fmt: skip

ELEMENT, WIDEST = 4, 256  # bytes: of an element, and of a row of a strip, at most
MANY = 4096  # bytes of a row of f32, at least
THREADS = 256
# bytes of a row of a strip, blocks of a multiprocessor, and blocks of a cluster at most, the best numbers first, by bytes of an
# element: memory stores wide rows faster, and some blocks compute or wait while another loads or stores
FORMS = {
    2: [(128, 3, CLUSTER), (64, 4, CLUSTER), (64, 3, 2 * CLUSTER), (64, 2, CLUSTER)],
    4: [(WIDEST, 4, CLUSTER), (WIDEST, 2, CLUSTER), (128, 3, 2 * CLUSTER), (128, 2, 2 * CLUSTER), (64, 2, 2 * CLUSTER)],
}
WAITS, UNROLLED = 4, 2  # groups of copies that a thread waits for in turn; vectors of a thread at once in the later loops
LEAST = 1 << 20  # elements
SPARE = 11 << 10  # bytes of a block for what it tells others
SHORT = PART_WARPS * REGISTERS  # rows that a block keeps in registers
WORD = 4  # bytes of the least copy
ROUNDS = 1.5  # of blocks: with fewer, and more than one, many multiprocessors have nothing to do in the last one
MANY_ROUNDS = 4  # from which two wide blocks of a multiprocessor, without room for a third, are faster than three narrow ones
IDLE = 1.1  # times as much time lost by the last round: enough for another kernel


@record
class StripsLaunch(Launch):
    """A strip has `across` vectors of adjacent columns; a thread has one of them in `rounds` rows, and keeps the loads with these
    `keys`. `at_once`: blocks of a multiprocessor."""

    across: int = 1
    rounds: int = 1
    keys: frozenset[Key] = frozenset()
    at_once: int = 1

    @property
    def lines(self) -> int:
        return -(-self.points // self.across)

    @property
    def rows(self) -> int:
        """Rows of a round."""
        return self.threads // self.across


def strips(kernel: Kernel, clusters: bool, most: int) -> StripsLaunch | None:
    """The launch of a kernel of loops, if several of them go down the same columns, which shared memory keeps. `most`: bytes of a
    block."""
    shared = may_overlap(kernel)
    kernel = _one_row(recomputed(kernel, narrow=False) or kernel)
    loops = row_loops(kernel)
    if len(loops) < 2 or kernel.locals or not kernel.grid or not lanes_down(kernel, loops) or not _plain(kernel):
        return None
    tops = {s.buffer for s in kernel.body if isinstance(s, Store)}
    if any(kernel.buffers[written] in tops for _, written in shared):  # another block may read it later
        return None
    extent, points, (column, columns) = loops[0].extent, math.prod(n for _, n in kernel.grid), kernel.grid[-1]
    size = min(width(s.body, [r.value for r in s.reduces], column, columns) for s in loops)
    keys = repeated(loops, size, column)
    bytes_ = [k[0].dtype.itemsize for k in keys]  # type: ignore[attr-defined]
    while keys and size > 1 and size * max(bytes_) > BYTES:
        size //= 2
    little = extent <= SHORT or points * extent < LEAST
    if not clusters or not keys or little or max(bytes_) > ELEMENT or size * min(bytes_) < (WORD if max(bytes_) <= 2 else BYTES):
        return None
    reduces = [r for x in loops for r in x.reduces]
    totals = sum(8 if r.op == "add" and extent > LONG_SUM else r.value.dtype.compute.itemsize for r in reduces)
    found = dict[tuple[int, int], StripsLaunch]()  # by bytes of a row and blocks of a multiprocessor
    for wide, at_once, parts in _forms(max(bytes_), extent * len(keys), most, points):
        across, part, warps = min(WARP, max(1, wide // (size * max(bytes_)))), -(-extent // parts), THREADS // WARP
        held = part * across * size * sum(bytes_)
        told = totals * (warps + parts) * WARP * max(1, size * across // WARP) + 8 * len(reduces)
        at = StripsLaunch(
            kernel, warps, THREADS, held, vector=size, lanes=WARP, parts=parts, part=part, adjacent=True, clustered=True,
            words=4 * WARP * parts * len(reduces) + 1, across=across, rounds=-(-part * across // THREADS), keys=keys,
            at_once=at_once,
        )  # fmt: skip
        if (wide, at_once) == (WIDEST, 2) and (3 * held <= most or at.blocks < MANY_ROUNDS * 2 * MULTIPROCESSORS):
            continue
        if held + -(-told // ALIGNED) * ALIGNED <= (most + RESERVED) // at_once - RESERVED and at.blocks >= MULTIPROCESSORS:
            found.setdefault((wide, at_once), at)
    first, second = [*found.values(), None, None][:2]
    return second if first and second and 1 <= first.blocks / (first.at_once * MULTIPROCESSORS) < ROUNDS else first


def _forms(itemsize: int, rows: int, most: int, columns: int = 0) -> list[tuple[int, int, int]]:
    """Bytes of a row of a strip, blocks of a multiprocessor, and those of a cluster, the best first. `most`: bytes of a block."""
    forms, blocks = FORMS[max(2, itemsize)], 1 << (-(-rows // SHORT) - 1).bit_length()
    kept, own = (max(1.0, columns * CLUSTER / (WARP * FOUND * n)) for n in (2, 3))  # rounds of clusters: by registers, of strips
    busier = most == LARGEST and blocks == CLUSTER and own > 1 and math.ceil(kept) / kept > IDLE * math.ceil(own) / own
    if itemsize > 2 and blocks <= CLUSTER and 8 * rows > 7 * blocks * SHORT and not busier:  # registers, which are as fast
        forms = [form for form in forms if form[0] == WIDEST]
    room = 2 * CLUSTER if most == LARGEST and rows > CLUSTER * SHORT else CLUSTER
    return [(wide, at_once, n) for wide, at_once, largest in forms for n in PARTS if n <= min(largest, room)]


def keeps(outer: int, length: int, inner: int, itemsize: int, most: int) -> bool:
    """Whether clusters of blocks can keep strips of columns of so many rows, of whole vectors of `inner` elements, and it is not
    as fast to read them twice. `most`: bytes of a block."""
    row, (least, vector) = outer * inner * itemsize, (0, WORD) if itemsize <= 2 else (MANY, BYTES)
    if itemsize > ELEMENT or row < least or inner * itemsize % vector or length * ELEMENT > COLUMN_BYTES:
        return False  # or the compiler divides sums in steps
    busy = (form for form in _forms(itemsize, length, most) if row // form[0] * form[2] >= MULTIPROCESSORS)
    return any(length * wide <= parts * ((most + RESERVED) // at_once - SPARE) for wide, at_once, parts in busy)


def _plain(kernel: Kernel) -> bool:
    inside = list(walk(kernel.body))
    stored, loaded = ({x.buffer for x in inside if isinstance(x, kind)} for kind in (Store, Load))
    reduces = [x for x in inside if isinstance(x, Reduce)]
    fits = all(isinstance(x, Let | Store) for s in kernel.body if isinstance(s, Loop) for x in s.body)
    several = not any(isinstance(x, Check) for x in inside) and all(r.op not in EXTREMES for r in reduces)
    return bool(reduces) and fits and several and stored.isdisjoint(loaded)


def _one_row(kernel: Kernel) -> Kernel:
    """The kernel with one variable for the rows of all loops, so that equal loads look equal."""
    grid, body = joined(kernel.grid, kernel.body) if kernel.grid else (kernel.grid, kernel.body)
    loops = [s for s in body if isinstance(s, Loop)]
    return replace(kernel, grid=grid, body=substitute(body, {s.var: loops[0].var for s in loops}))


class StripsWriter(CudaWriter):
    launch: StripsLaunch
    headers = ("strips.h",)
    in_rows = True

    def __init__(self, launch: StripsLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {launch.at_once}"
        self.each = ["#pragma unroll", f"for (int v = 0; v < {launch.vector}; v++) {{"]
        self.spare = launch.points % launch.across > 0
        self.copied = dict[Key, str]()

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield f"const int me = threadIdx.x / {at.across};  // its first row"
        yield f"const rlx_index line = blockIdx.x / {at.parts}, part = blockIdx.x % {at.parts};"
        stops = [f"const bool spare = point >= {at.points};", f"if (spare) point = {at.points - 1};"]
        stops = stops if self.spare else ["const bool spare = false;"]
        yield from self.of_point(f"(rlx_uindex)line * {at.across} + threadIdx.x % {at.across}", *stops)

    def body(self) -> None:
        at, (column, _), loops = self.launch, self.kernel.grid[-1], row_loops(self.kernel)
        self.first, self.column, self.row_var = self.names[column] + "_0" * (at.vector > 1), column, loops[0].var
        self.line_of_parts()
        self.copy(loops)
        for s in self.kernel.body:
            if isinstance(s, Loop):
                self.over_rows(s)
            elif isinstance(s, Let):
                self.names[s.var] = self.of_columns(s.var, lambda s=s: self.value(s.value))  # type: ignore[misc]
            else:
                with self.columns():
                    self.block([s])

    def columns(self):  # type: ignore[no-untyped-def]
        self.names[self.column] = name = self.fresh("i")
        return self.scope([*self.each, f"const rlx_index {name} = {self.first} + v;"])

    def of_columns(self, var: Var, value: Callable[[], str]) -> str:
        """An element of an array with a value for each column of a lane."""
        name = self.fresh("r")
        self.line(f"{self.type(var.dtype)} {name}[{self.launch.vector}];")
        with self.columns():
            self.line(f"{name}[v] = {value()};")
        return f"{name}[v]"

    def rounds(self, start: int, end: int, unrolled: int = 0) -> Iterator[bool]:
        """The rows of these rounds of a thread, each time in a scope; the last one where rows end in it."""
        at, extent = self.launch, row_loops(self.kernel)[0].extent
        whole = min(end, max(start, (extent - (at.parts - 1) * at.part) // at.rows))
        for low, high, last in ((start, whole, False), (whole, end, True)):
            if low >= high:
                continue
            self.names[self.row_var] = i = self.fresh("i")
            row = f"const rlx_index {i} = part * {at.part} + n * {at.rows} + me;"
            head = [f"#pragma unroll{f' {unrolled}' * bool(unrolled)}", f"for (int n = {low}; n < {high}; n++) {{", row]
            with self.scope([*head, *[f"if ({i} < end) {{"] * last], 1 + last):
                yield last

    def groups(self) -> list[tuple[int, int]]:
        ends = [self.launch.rounds * n // WAITS for n in range(WAITS + 1)]
        return [(start, end) for start, end in zip(ends, ends[1:]) if start < end]

    def copy(self, loops: Sequence[Loop]) -> None:
        at, offset, found = self.launch, 0, {key_of(x, self.column): x for s in loops for x in self.kept(s)}
        self.line(f"extern __shared__ __align__({ALIGNED}) unsigned char rlx_shared[];")
        self.line(f"const rlx_index end = min((part + 1) * {at.part}, (rlx_index){loops[0].extent});")
        for key, x in found.items():
            self.copied[key], element = self.fresh("q"), CUDA.element(x.buffer.dtype)
            self.line(f"{element}* const {self.copied[key]} = ({element}*)(rlx_shared + {offset}) + threadIdx.x * {at.vector};")
            offset += at.part * at.across * at.vector * x.buffer.dtype.itemsize
        for start, end in self.groups():
            for _ in self.rounds(start, end):
                for key, x in found.items():
                    place = f"{self.names[x.buffer]} + {self.at_first(x.index, self.column, self.first)}"
                    nbytes = at.vector * x.buffer.dtype.itemsize
                    near = "_near" * (at.across * nbytes < WIDEST)
                    self.line(f"rlx_copy{near}<{nbytes}>((float*)({self.place(key)}), (const float*)({place}), true);")
            self.line("rlx_copies_end();")

    def place(self, key: Key) -> str:
        return f"{self.copied[key]} + n * {self.launch.threads * self.launch.vector}"

    def kept(self, s: Loop) -> list[Load]:
        found = loads(s.body, [r.value for r in s.reduces], self.column, self.launch.vector)
        return [x for x in found if x.guard is None and key_of(x, self.column) in self.launch.keys]

    def over_rows(self, s: Loop) -> None:
        at, ends, stored = self.launch, [r.value for r in s.reduces], any(isinstance(x, Store) for x in s.body)
        parts = [self.partial(r, s.extent, ".at[v]") for r in s.reduces]
        for p in parts:
            self.line(f"rlx_several<{p.type}, {at.vector}> {p.name};")
            if p.near:
                self.line(f"rlx_several<float, {at.vector}> {p.near} = {{}};")
            self.line(f"for (int v = 0; v < {at.vector}; v++) {p.name}.at[v] = {p.init};")

        def combine(values: list[str]) -> None:
            for p, value in zip(parts, values):
                self.line(p.add(value, self.names[self.row_var]))

        waits = self.groups()
        for n, (start, end) in enumerate(waits if self.copied and not self.waited else [(0, at.rounds)]):
            if not self.waited:
                self.line(f"rlx_copies_wait<{len(waits) - 1 - n}>();")
            for _ in self.rounds(start, end, 0 if not self.waited else UNROLLED):
                with self.scope(["if (!spare) {"] if stored and self.spare else ["{"]), self.alone():
                    self.turn(s, ends, combine)
        self.waited = True
        for r, p in zip(s.reduces, parts):
            if p.near:
                self.line(f"for (int v = 0; v < {at.vector}; v++) {p.name}.at[v] += {p.near}.at[v];")
            total = self.total(p)
            self.names[r.result] = self.of_columns(r.result, lambda p=p, total=total: p.result(f"{total}.at[v]"))  # type: ignore[misc]

    waited = False

    def turn(self, s: Loop, ends: Sequence, combine: Callable[[list[str]], None]) -> None:  # type: ignore[type-arg]
        at = self.launch
        for x in self.kept(s):
            key = key_of(x, self.column)
            if key not in self.registers:
                self.registers[key] = held = self.fresh("h")
                self.line(f"{CUDA.element(x.buffer.dtype)} {held}[1][{at.vector}];")
                self.line(f"rlx_fetch<{at.vector}>({held}[0], {self.place(key)});")
                self.same.add(key)
                self.loaded.add(key)
        self.in_vectors(s.body, ends, self.column, at.vector, self.first, combine)
        self.registers.clear()

    def total(self, p: Partial) -> str:
        at, name, op = self.launch, self.fresh("t"), f"{p.combine('a', 'b')}"
        function = f"[]({p.type} a, {p.type} b) -> {p.type} {{ return {op}; }}"
        self.line(f"const auto {name} = rlx_down_strip<{at.across}>(all, {self.told}, {p.name}, ({p.type}){p.init}, {function});")
        self.told += 4 * at.lanes * at.parts
        return name


__all__ = ["StripsLaunch", "StripsWriter", "keeps", "strips"]

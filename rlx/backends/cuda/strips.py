"""Columns of 16 bits kept in shared memory: softmax down columns and the like. A cluster of blocks has all rows of a strip of
adjacent columns. Each thread copies its own elements there, all of them at once, and waits for no other thread before it reads
them in each loop. Registers would hold fewer bytes: too few would be on their way while blocks wait for each other's sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter, Partial
from rlx.backends.cuda.rows import Key, key_of, recomputed, repeated, row_loops
from rlx.backends.cuda.vectors import BYTES, loads, width
from rlx.ir.kernel import EXTREMES, Check, Kernel, Let, Load, Loop, Reduce, Stmt, Store, Var, walk
from rlx.ir.nest import joined, substitute
from rlx.ir.overlap import may_overlap
from rlx.records import record

from rlx.backends.cuda.schedule import (  # isort: skip
    CLUSTER, MULTIPROCESSORS, PART_WARPS, REGISTERS, RESERVED, WARP, Launch, lanes_down,
)  # fmt: skip

WIDTHS = (128, 64)  # bytes of a row of a strip, the best number first: memory moves 64 at once
ELEMENT = 2  # bytes, at most: registers keep wider ones as fast
THREADS = 256
AT_ONCE = (3, 2)  # blocks of a multiprocessor, the best number first: some compute or wait while another loads or stores
WAITS = 4  # groups of copies that a thread waits for, one after the other
UNROLLED = 2  # vectors of a thread at once in the later loops
LEAST = 1 << 20  # elements
SPARE = 8 << 10  # bytes of a block for what it tells others
SHORT = PART_WARPS * REGISTERS  # rows that a block keeps in registers
WORD = 4  # bytes of the least copy


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
        """Rows of a round of all blocks of a strip."""
        return self.threads // self.across * self.parts


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
    if not clusters or not keys or max(bytes_) > ELEMENT or size * min(bytes_) < WORD:
        return None
    if extent <= SHORT or points * extent < LEAST:
        return None
    for wide, at_once in itertools.product(WIDTHS, AT_ONCE):
        across = min(WARP, max(1, wide // (size * max(bytes_))))
        kept = max(1, size * across // WARP)
        for parts in (2, 4, CLUSTER):
            rounds = -(-extent // (THREADS // across * parts))
            held, warps = rounds * THREADS * size * sum(bytes_), THREADS // WARP
            told = sum(len(s.reduces) for s in loops) * (warps + parts) * WARP * kept * 8
            if held + told > (most + RESERVED) // at_once - RESERVED:
                continue
            words = 4 * WARP * parts * sum(len(s.reduces) for s in loops) + 1
            at = StripsLaunch(
                kernel, warps, THREADS, held, vector=size, lanes=WARP, parts=parts, adjacent=True, words=words,
                clustered=True, across=across, rounds=rounds, keys=keys, at_once=at_once,
            )  # fmt: skip
            if at.blocks >= MULTIPROCESSORS:
                return at
    return None


def keeps(outer: int, length: int, inner: int, itemsize: int, most: int) -> bool:
    """Whether clusters of blocks can keep strips of columns of so many rows, of whole vectors of `inner` elements. `most`: bytes
    of a block."""
    each, strips = (most + RESERVED) // AT_ONCE[-1] - SPARE, outer * inner * itemsize // WIDTHS[-1]
    fits = length * WIDTHS[-1] <= CLUSTER * each and strips * CLUSTER >= MULTIPROCESSORS
    return itemsize <= ELEMENT and inner * itemsize % WORD == 0 and fits


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

    def renamed(s: Stmt) -> Stmt:
        return s if not isinstance(s, Loop) else replace(
            s, var=loops[0].var, body=substitute(s.body, {s.var: loops[0].var}),
            reduces=substitute(s.reduces, {s.var: loops[0].var}),
        )  # fmt: skip

    return replace(kernel, grid=grid, body=tuple(map(renamed, body)))


class StripsWriter(CudaWriter):
    launch: StripsLaunch
    in_rows = True

    def __init__(self, launch: StripsLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {launch.at_once}"
        self.each = ["#pragma unroll", f"for (int v = 0; v < {launch.vector}; v++) {{"]
        self.spare = launch.points % launch.across > 0
        self.copied = dict[Key, str]()

    def function(self, name: str, member: bool = False) -> str:
        return (Path(__file__).parent / "strips.h").read_text() + super().function(name, member)

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield f"const int me = threadIdx.x / {at.across};  // its first row"
        yield f"const rlx_index line = blockIdx.x / {at.parts}, part = blockIdx.x % {at.parts};"
        stops = [f"const bool spare = point >= {at.points};", f"if (spare) point = {at.points - 1};"] if self.spare else []
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
        return self.scope([*self.each, f"const rlx_index {self.named()} = {self.first} + v;"])

    def named(self) -> str:
        self.names[self.column] = self.fresh("i")
        return self.names[self.column]

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
        ends = extent % at.rows > 0 and end == at.rounds
        for low, high, last in ((start, end - ends, False), (end - 1, end, True))[: 1 + ends]:
            if low >= high:
                continue
            self.names[self.row_var] = i = self.fresh("i")
            row = f"const rlx_index {i} = (n * {at.parts} + part) * {at.rows // at.parts} + me;"
            head = [f"#pragma unroll{f' {unrolled}' * bool(unrolled)}", f"for (int n = {low}; n < {high}; n++) {{", row]
            with self.scope([*head, *[f"if ({i} < {extent}) {{"] * last], 1 + last):
                yield last

    def groups(self) -> list[tuple[int, int]]:
        count = min(WAITS, self.launch.rounds)
        ends = [self.launch.rounds * n // count for n in range(count + 1)]
        return list(zip(ends, ends[1:]))

    def copy(self, loops: Sequence[Loop]) -> None:
        at, offset, found = self.launch, 0, dict[Key, Load]()
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        for x in (x for s in loops for x in self.kept(s)):
            found.setdefault(key_of(x, self.column), x)
        for key, x in found.items():
            self.copied[key], element = self.fresh("q"), CUDA.element(x.buffer.dtype)
            self.line(f"{element}* const {self.copied[key]} = ({element}*)(rlx_shared + {offset}) + threadIdx.x * {at.vector};")
            offset += at.rounds * at.threads * at.vector * x.buffer.dtype.itemsize
        for start, end in self.groups():
            for _ in self.rounds(start, end):
                for key, x in found.items():
                    place = f"{self.names[x.buffer]} + {self.at_first(x.index, self.column, self.first)}"
                    nbytes = at.vector * x.buffer.dtype.itemsize
                    self.line(f"rlx_copy<{nbytes}>((float*)({self.place(key)}), (const float*)({place}), true);")
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
            near = f" {p.near}.at[v] = 0;" if p.near else ""
            if near:
                self.line(f"rlx_several<float, {at.vector}> {p.near};")
            self.line(f"for (int v = 0; v < {at.vector}; v++) {{ {p.name}.at[v] = {p.init};{near} }}")

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

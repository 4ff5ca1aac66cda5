"""Vectors that all rows read, as the scale of a norm: else they come from the L2 cache for each row anew.

Blocks, or clusters, that have rows in turn read them once into shared memory. A thread of a kernel without reductions has
elements of a few rows, and reads them once into registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import Key, Row, key_of, row_loops
from rlx.backends.cuda.schedule import BUSY_THREADS, MULTIPROCESSORS, REGISTERS, RESERVED, WARP, Launch
from rlx.backends.cuda.vectors import loads
from rlx.ir.kernel import Buffer, Let, Load, Loop, Store, Var, walk
from rlx.records import field, record

STATIC = 1 << 10  # bytes of shared memory that exchanging totals takes
CLOSE = 16  # multiprocessors that can run one cluster, of which the GPU has MULTIPROCESSORS // CLOSE sets
LINE = 4  # vectors of a part, which is a multiple of them, so that no two parts share a line of the cache
LEAST = 3  # turns that are worth it
REDUCED, EVERY, AHEAD = False, False, False  # to be measured
MOST_ROWS = 4  # of which a thread has vectors on their way


@record(eq=False)
class TurnLaunch(Launch):
    """A block, or cluster, has rows that are `at_once` apart; a multiprocessor has `resident` blocks.
    `each`: elements of a part. `shared_loads`: those that are in shared memory, with the variable of
    their loop, and where, in bytes."""

    at_once: int = 1
    resident: int = 1
    each: int = 0
    shared_loads: Mapping[Key, tuple[Load, Var, int]] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return self.at_once


@record(eq=False)
class DownLaunch(Launch):
    """A thread has a vector of each of `rows` adjacent rows. `alike`: loads that are the same for all of them."""

    rows: int = 1
    alike: tuple[Load, ...] = ()

    @property
    def points(self) -> int:
        rows = self.kernel.grid[-2][1]
        return super().points // rows * -(-rows // self.rows)


def in_turn(at: Launch, most: int) -> Launch:
    """`at`, so that what all rows read is read once for several of them. `most`: bytes of shared memory of a block."""
    return (_down(at) if at.team == 1 else _in_turn(at, most)) if type(at) is Launch else at


def _down(at: Launch) -> Launch:
    """Several rows of each thread."""
    kernel = at.kernel
    plain = at.vector > 1 and at.repeats == at.lanes == 1 and all(isinstance(s, Let | Store) for s in kernel.body)
    if not plain or len(kernel.grid) < 2:
        return at
    (row, extent), (var, columns) = kernel.grid[-2:]
    found = {key_of(x, var): x for x in walk(kernel.body) if isinstance(x, Load)}
    vectors = {key_of(x, var): x for x in loads(kernel.body, (), var, at.vector) if x.guard is None and _is_read(x)}
    alike = {key: x for key, x in vectors.items() if row not in walk(x.index)}
    own = len(vectors) - len(alike)
    rows = min(extent, MOST_ROWS // max(1, own))
    while rows > 1 and at.points // rows < BUSY_THREADS:
        rows //= 2
    if found.keys() != vectors.keys() or columns % at.vector or not alike or not own or rows < 2:
        return at
    return DownLaunch(**_fields(at), rows=rows, alike=tuple(alike.values()))


def _is_read(x: Load) -> bool:
    """Whether the kernel only reads the buffer."""
    return isinstance(x.buffer, Buffer) and not x.buffer.writable


def _fields(at: Launch) -> dict[str, Any]:
    return {n: getattr(at, n) for n in at.__dataclass_fields__}


def _in_turn(at: Launch, most: int) -> Launch:
    """`at`, with rows in turn if there are enough of them, and vectors that all of them read. `most`: bytes of shared memory."""
    row = at.row
    if not row or at.team <= WARP or at.lanes > 1 or at.peel or (at.parts > 1 and not at.clustered):
        return at
    whole = row.rounds * row.size * at.team
    part, line = -(-row.extent // at.parts), LINE * row.size
    part = min(whole, -(-part // line) * line) if at.parts > 1 else min(whole, row.extent)
    resident = max(1, (768 if row.large else 1024 if _registers(row) <= REGISTERS else 512) // at.threads)
    room = (most + RESERVED) // resident - RESERVED - STATIC
    held, used = dict[Key, tuple[Load, Var, int]](), 0
    for key, (x, var) in _alike(at, row).items():
        nbytes = -(-part * x.buffer.dtype.itemsize // 16) * 16
        if used + nbytes <= room:
            held[key], used = (x, var, used), used + nbytes
    lines = MULTIPROCESSORS // CLOSE * max(1, CLOSE * resident // at.parts) if at.parts > 1 else MULTIPROCESSORS * resident
    if not (held or (REDUCED if _only_reduces(at) else EVERY)) or at.points <= lines * (LEAST - 1):
        return at
    own: dict[str, Any] = _fields(at) | {"shared": used}
    return TurnLaunch(**own, at_once=lines, resident=resident, each=part, shared_loads=held)


def _only_reduces(at: Launch) -> bool:
    """Whether its loops store nothing: the registers of a row are free before its last totals are exchanged."""
    return not any(isinstance(x, Store) for s in row_loops(at.kernel) for x in s.body)


def _registers(row: Row) -> int:
    return row.rounds * row.size * max(1, len(row.keys) + len(row.locals)) // (1 + row.packed)


def _alike(at: Launch, row: Row) -> dict[Key, tuple[Load, Var]]:
    """The loads of vectors that are the same for all rows."""
    found = dict[Key, tuple[Load, Var]]()
    for s in row_loops(at.kernel):
        for x in loads(s.body, [r.value for r in s.reduces], s.var, row.size):
            fixed = x.guard is None and {v for v in walk(x.index) if isinstance(v, Var | Load)} == {s.var}
            if fixed and _is_read(x) and x.buffer.dtype.itemsize * row.size % 4 == 0:
                found.setdefault(key_of(x, s.var), (x, s.var))
    return {key: x for key, x in found.items() if key not in row.keys}


class TurnWriter(CudaWriter):
    launch: TurnLaunch

    def __init__(self, launch: TurnLaunch) -> None:
        super().__init__(launch)
        self.occupancy, self.looks_ahead = f", {launch.resident}", AHEAD or _only_reduces(launch)
        self.coming: list[tuple[Load, Var, Key]] = []  # the loads of a row

    def coordinates(self) -> Iterator[str]:
        parts = self.launch.parts
        yield "const int me = threadIdx.x;"
        yield f"const rlx_index line = blockIdx.x / {parts}, part = blockIdx.x % {parts};"

    def body(self) -> None:
        at, row = self.launch, self.row
        assert row
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line_of_parts()
        self.line(f"const rlx_index start = part * {at.each}, left = {row.extent} - start;")
        self.line(f"const rlx_index most = left < {at.each} ? left : {at.each};")
        self.fetch_shared()
        if self.looks_ahead:
            self.declare_row()
            self.fetch_point("line")
        with self.scope([f"for (rlx_uindex turn = line; turn < {at.points}; turn += {at.lines}) {{"]):
            for text in self.of_point("turn"):
                self.line(text)
            self.block(at.kernel.body)
            if at.clustered:
                self.line("all.next();")

    def declare_row(self) -> None:
        """Registers for the elements of a row: those of the next one are loaded before the last exchange of totals."""
        row = self.row
        assert row
        for s in row_loops(self.kernel):
            for x in loads(s.body, [r.value for r in s.reduces], s.var, row.size):
                key = key_of(x, s.var)
                if key in row.keys and key not in self.registers:
                    self.registers[key] = self.fresh("q")
                    self.loaded.add(key)
                    self.coming.append((x, s.var, key))
                    self.line(f"{CUDA.element(x.buffer.dtype)} {self.registers[key]}[{row.rounds}][{row.size}];")

    def fetch_point(self, number: str) -> None:
        """Load the elements of row `number` if there is such a row."""
        row, before, names, self.memo = self.row, self.memo, dict(self.names), type(self.memo)()
        assert row
        with self.scope([f"if ({number} < {self.launch.points}) {{"]):
            for text in self.of_point(number):
                self.line(text)
            self.round, first = self.fresh("n"), self.fresh("i")
            head = ["#pragma unroll", f"for (int {self.round} = 0; {self.round} < {row.rounds}; {self.round}++) {{"]
            with self.scope(head), self.alone():
                self.place_in_row(row, first)
                for x, var, key in self.coming:
                    how = "rlx_stream" if x.buffer.dtype.itemsize <= 2 else "rlx_fetch"
                    self.fetch_vector(x, f"{self.registers[key]}[{self.round}]", var, row.size, first, how)
        self.memo, self.names = before, names

    def fetch_shared(self) -> None:
        """Each thread copies the elements that it reads itself, so that nobody waits for others."""
        at, row = self.launch, self.row
        assert row
        for x, var, offset in at.shared_loads.values():
            self.round, first = self.fresh("n"), self.fresh("i")
            head = ["#pragma unroll", f"for (int {self.round} = 0; {self.round} < {row.rounds}; {self.round}++) {{"]
            with self.scope(head), self.alone():
                self.place_in_row(row, first)
                to = f"({CUDA.element(x.buffer.dtype)}*)(rlx_shared + {offset}) + own_{first}"
                self.line(f"rlx_copy_vector<{row.size}>({to}, {self.names[x.buffer]} + {self.at_first(x.index, var, first)});")
        self.line("rlx_copies_end();")

    def place_in_row(self, row: Row, first: str) -> None:
        at, turn = self.launch, self.launch.team * row.size
        self.line(f"const rlx_index own_{first} = {self.round} * {turn} + me * {row.size};")
        least = row.extent - (at.parts - 1) * at.each  # of the last part
        if least < row.rounds * turn:
            self.line(f"if ({self.round} >= {least // turn} && own_{first} >= most) continue;")
        self.line(f"const rlx_index {first} = start + own_{first};")

    def part_of_row(self, s: Loop, row: Row, first: str, body: Callable[[], None]) -> None:
        found = loads(s.body, [r.value for r in s.reduces], s.var, row.size)
        if not self.launch.shared_loads.keys().isdisjoint(key_of(x, s.var) for x in found):
            self.line("rlx_copies_wait<0>();")
        super().part_of_row(s, row, first, body)
        if self.looks_ahead and s is row_loops(self.kernel)[-1]:
            self.fetch_point(f"turn + {self.launch.at_once}")

    def fetch_vector(self, x: Load, to: str, var: Var, size: int, first: str, how: str) -> None:
        if (held := self.launch.shared_loads.get(key_of(x, var))) is None:
            return super().fetch_vector(x, to, var, size, first, how)
        at = f"(const {CUDA.element(x.buffer.dtype)}*)(rlx_shared + {held[2]}) + own_{first}"
        return self.line(f"rlx_fetch<{size}>({to}, {at});")


class DownWriter(CudaWriter):
    launch: DownLaunch

    def beside_each_other(self, axis: int) -> int:
        return self.launch.rows if axis == 1 else super().beside_each_other(axis)

    def body(self) -> None:
        at, body = self.launch, self.kernel.body
        (row, extent), (var, _) = self.kernel.grid[-2:]
        first, row0, even = f"{self.names[var]}_0", f"{self.names[row]}_0", extent % at.rows == 0
        vectors = {key_of(x, var): x for x in loads(body, (), var, at.vector)}
        self.same = {key_of(x, var) for x in at.alike}
        for key, x in vectors.items():
            self.registers[key] = self.fresh("q")
            count = 1 if key in self.same else at.rows
            self.line(f"{CUDA.element(x.buffer.dtype)} {self.registers[key]}[{count}][{at.vector}];")
        for key in (key for key in vectors if key in self.same):
            self.fetch_vector(vectors[key], f"{self.registers[key]}[0]", var, at.vector, first, "rlx_fetch")
        self.loaded = {*vectors}
        self.round = "u"
        unrolled = ["#pragma unroll", f"for (int u = 0; u < {at.rows}; u++) {{"]
        name = self.names[row] = self.fresh("g")
        with self.scope(unrolled):
            last = "" if even else f" < {extent} ? {row0} + u : {extent - 1}"
            self.line(f"const rlx_index {name} = {row0} + u{last};")
            for key in (key for key in vectors if key not in self.same):
                self.fetch_vector(vectors[key], f"{self.registers[key]}[u]", var, at.vector, first, "rlx_fetch")
        with self.scope(unrolled):
            self.line(f"const rlx_index {name} = {row0} + u;")
            if not even:
                self.line(f"if ({name} >= {extent}) break;")
            self.in_vectors(body, (), var, at.vector, first)


__all__ = ["DownLaunch", "DownWriter", "TurnLaunch", "TurnWriter", "in_turn"]

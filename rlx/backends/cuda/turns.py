"""Rows that blocks, or clusters of them, have in turn: what all rows read alike, as the scale of a norm, is read once by each block
and stays in its shared memory. Else it would come from the L2 cache for each row, as often as the row itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import Key, Row, key_of, row_loops
from rlx.backends.cuda.schedule import MULTIPROCESSORS, REGISTERS, RESERVED, WARP, Launch
from rlx.backends.cuda.vectors import loads
from rlx.ir.kernel import Load, Loop, Var, walk
from rlx.records import field, record

STATIC = 1 << 10  # bytes of shared memory that exchanging totals takes
CLOSE = 16  # multiprocessors that can run one cluster, of which the GPU has MULTIPROCESSORS // CLOSE sets
LINE = 4  # vectors of a part, which is a multiple of them, so that no two parts share a line of the cache
LEAST = 2  # turns that are worth it


@record(eq=False)
class TurnLaunch(Launch):
    """A block, or cluster, has `turns` rows, `lines` apart; a multiprocessor has `resident` blocks.
    `each`: elements of a part. `shared_loads`: those that are in shared memory, with the variable of
    their loop, and where, in bytes."""

    turns: int = 1
    resident: int = 1
    each: int = 0
    shared_loads: Mapping[Key, tuple[Load, Var, int]] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return -(-self.points // self.turns)


def in_turn(at: Launch, most: int) -> Launch:
    """`at`, with rows in turn if there are enough of them, and vectors that all of them read. `most`: bytes of shared memory."""
    row = at.row
    if type(at) is not Launch or not row or at.team <= WARP or at.lanes > 1 or at.peel or (at.parts > 1 and not at.clustered):
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
    lines = MULTIPROCESSORS // CLOSE * (CLOSE * resident // at.parts) if at.parts > 1 else MULTIPROCESSORS * resident
    turns = -(-at.points // lines)
    if not held or turns < LEAST:
        return at
    own = {n: getattr(at, n) for n in at.__dataclass_fields__} | {"shared": used}
    return TurnLaunch(**own, turns=turns, resident=resident, each=part, shared_loads=held)


def _registers(row: Row) -> int:
    return row.rounds * row.size * max(1, len(row.keys) + len(row.locals)) // (1 + row.packed)


def _alike(at: Launch, row: Row) -> dict[Key, tuple[Load, Var]]:
    """The loads of vectors that are the same for all rows."""
    found = dict[Key, tuple[Load, Var]]()
    for s in row_loops(at.kernel):
        for x in loads(s.body, [r.value for r in s.reduces], s.var, row.size):
            fixed = x.guard is None and {v for v in walk(x.index) if isinstance(v, Var | Load)} == {s.var}
            if fixed and not x.buffer.writable and x.buffer.dtype.itemsize * row.size % 4 == 0:
                found.setdefault(key_of(x, s.var), (x, s.var))
    return {key: x for key, x in found.items() if key not in row.keys}


class TurnWriter(CudaWriter):
    launch: TurnLaunch

    def __init__(self, launch: TurnLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {launch.resident}"

    def coordinates(self) -> Iterator[str]:
        parts = self.launch.parts
        yield "const int me = threadIdx.x;"
        yield f"const rlx_index line = blockIdx.x / {parts}, part = blockIdx.x % {parts};"

    def body(self) -> None:
        at = self.launch
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        self.line_of_parts()
        self.line(f"const rlx_index start = part * {at.each}, left = {at.row.extent} - start;")
        self.line(f"const rlx_index most = left < {at.each} ? left : {at.each};")
        self.fetch_shared()
        with self.scope([f"for (rlx_uindex turn = line; turn < {at.points}; turn += {at.lines}) {{"]):
            for text in self.of_point("turn"):
                self.line(text)
            self.block(at.kernel.body)
            if at.clustered:
                self.line("all.next();")

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

    def fetch_vector(self, x: Load, to: str, var: Var, size: int, first: str, how: str) -> None:
        if (held := self.launch.shared_loads.get(key_of(x, var))) is None:
            return super().fetch_vector(x, to, var, size, first, how)
        at = f"(const {CUDA.element(x.buffer.dtype)}*)(rlx_shared + {held[2]}) + own_{first}"
        return self.line(f"rlx_fetch<{size}>({to}, {at});")


__all__ = ["TurnLaunch", "TurnWriter", "in_turn"]

"""Long rows with parameters, as of layer_norm: clusters of blocks stay for several rows. A block keeps its part of the parameters
in shared memory, where its part of the next row arrives while it computes this one from registers. Otherwise each row would read
the parameters again, and blocks would load nothing while they wait for each other's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from itertools import pairwise

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import Key, Row, expr_key, key_of, row_loops
from rlx.backends.cuda.schedule import ALIGNED, FOUND, RESERVED, WARP, Launch
from rlx.backends.cuda.vectors import loads
from rlx.ir.dtype import f32
from rlx.ir.kernel import EXTREMES, Alu, Kernel, Let, Load, Local, Loop, Var, is_const, walk
from rlx.records import record

TEAM = 256
ROUNDS = 7  # vectors of a thread in a row, if a cluster of so many blocks is enough for it
PARTS = (2, 4, 8)
AT_ONCE = 2  # blocks of a multiprocessor; with a third one, all of them take longer
FILE, REST = 64 << 10, 44  # registers of a multiprocessor; of a thread besides those of its elements
SEVERAL, SINGLE = 20_000, 40_000  # columns, at least, of rows of several operands and of one
WIDE = 8  # bytes of the operands' elements, at least, where blocks wait for each other once for a row anyway
TURNS = 4  # rows of a cluster, at least
WORD = 4  # bytes of the least copy
Loads = dict[Key, tuple[Load, Var]]  # each with the variable of its loop


@record
class StayingLaunch(Launch):
    """`given`: loads of a row's own elements. `kept`: of parameters."""

    given: Loads = field(default_factory=dict)
    kept: Loads = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return min(self.points, FOUND * AT_ONCE // self.parts) * self.parts


def staying(at: Launch, most: int) -> Launch:
    """The launch of rows that clusters keep, if it gains by clusters that stay; else `at` itself. `most`: bytes of a block."""
    row, loops = at.row, row_loops(at.kernel)
    if type(at) is not Launch or not at.clustered or row is None or at.lanes > 1 or at.peel:
        return at
    given, kept = _loaded(at, row, loops) or ({}, {})
    bytes_of = lambda found: [x.buffer.dtype.itemsize for x, _ in found.values()]  # noqa: E731
    if not kept or row.extent < (SEVERAL if len(given) > 1 else SINGLE) or row.size * min(bytes_of(kept | given)) < WORD:
        return at
    if sum(bool(s.reduces) for s in loops) < 2 and (len(given) < 2 or sum(bytes_of(given)) < WIDE):
        return at
    parts = next((n for n in PARTS if row.extent <= n * ROUNDS * row.size * TEAM), PARTS[-1])
    part = -(-row.extent // (row.size * parts)) * row.size
    rounds = -(-part // (row.size * TEAM))
    shared = sum(_room(part * n) for n in (*bytes_of(kept), *bytes_of(given)))
    held = [*(k[0].dtype.itemsize for k in row.keys), *(4 for _ in row.locals)]  # type: ignore[attr-defined]
    registers = REST + rounds * row.size * sum(held) // 4
    told = _room(2 * 8 * (parts * TEAM // WARP + 1))
    room = min((most + RESERVED) // (shared + told + RESERVED), FILE // (TEAM * registers))
    if room < AT_ONCE or at.points * parts < TURNS * FOUND * AT_ONCE:
        return at
    words = 4 * parts * sum(len(s.reduces) for s in loops) + 1
    return StayingLaunch(
        at.kernel, TEAM, TEAM, shared, row=replace(row, rounds=rounds), parts=parts, part=part, words=words, adjacent=True,
        clustered=True, given=given, kept=kept,
    )  # fmt: skip


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _loaded(at: Launch, row: Row, loops: list[Loop]) -> tuple[Loads, Loads] | None:
    """The loads of a row's own elements, all of which the first loop does, and those of parameters. None: there are others."""
    grid, found = {v for v, _ in at.kernel.grid}, list[Loads]()
    for s in loops:
        own = loads(s.body, [r.value for r in s.reduces], s.var, row.size)
        inside = [x for x in walk((s.body, s.reduces)) if isinstance(x, Load) and not isinstance(x.buffer, Local)]
        known = all(e is s.var or e in grid for x in own for e in walk(x.index) if isinstance(e, Var | Load))
        searched = any(r.op in EXTREMES for r in s.reduces)
        if {*map(id, own)} != {*map(id, inside)} or any(x.guard is not None for x in own) or not known or searched:
            return None
        found.append({key_of(x, s.var): (x, s.var) for x in own})
    every = {key: load for each in found[::-1] for key, load in each.items()}
    kept = {key: (x, var) for key, (x, var) in every.items() if grid.isdisjoint(walk(x.index))}
    given = {key: load for key, load in every.items() if key not in kept}
    alone = {b for b, free in zip(at.kernel.buffers, at.unaliased) if free and not b.writable}
    return (given, kept) if given.keys() <= found[0].keys() and alone.issuperset(x.buffer for x, _ in kept.values()) else None


def _is_variance(kernel: Kernel, summed: Loop, squared: Loop) -> bool:
    """Whether a loop does nothing but to add the squares of what elements are away from their mean, by the sum of another one."""
    only = all(isinstance(x, Let) for x in squared.body) and len(summed.reduces) == len(squared.reduces) == 1
    (total,), (r,) = (summed.reduces, squared.reduces) if only else ((None,), (None,))
    if not total or not r or {total.op, r.op} != {"add"} or r.value.dtype != f32 or not isinstance(r.value, Alu):
        return False
    means = [s.var for s in kernel.body if isinstance(s, Let) and isinstance(s.value, Alu) and s.value.op == "div"
             and s.value.args[0] is total.result and is_const(s.value.args[1], summed.extent)]  # fmt: skip
    off, other = (*r.value.args, None, None)[:2]
    if r.value.op != "mul" or off is not other or not isinstance(off, Alu) or off.op != "sub" or off.args[1] not in means:
        return False
    return expr_key(off.args[0], squared.var) == expr_key(total.value, summed.var)


class StayingWriter(CudaWriter):
    launch: StayingLaunch
    headers = ("staying.h",)
    aligned = ALIGNED
    following = False  # whether the copies of the next row have been started

    def __init__(self, launch: StayingLaunch) -> None:
        super().__init__(launch)
        self.occupancy, self.places = f", {AT_ONCE}", dict[Key, str]()
        # loops that find a variance, by the one in front that sums
        self.squared = dict[int, Loop]()
        for s, t in pairwise(row_loops(launch.kernel)):
            skipped = any(s is x for x in self.squared.values())  # the squares of a variance, which may have one themselves
            if not skipped and _is_variance(launch.kernel, s, t):
                self.squared[id(s)] = t

    def coordinates(self) -> Iterator[str]:
        yield f"const int me = threadIdx.x % {TEAM};"
        yield f"const rlx_index part = blockIdx.x % {self.launch.parts};"

    def body(self) -> None:
        at, row, offset = self.launch, self.row, 0
        assert row is not None
        last = row.extent - at.part * (at.parts - 1)
        self.line(f"const rlx_index own = {at.part if last == at.part else f'part == {at.parts - 1} ? {last} : {at.part}'};")
        if not self.kernel.locals:  # else declare_locals has declared it
            self.line(f"extern __shared__ __align__({ALIGNED}) unsigned char rlx_shared[];")
        for key, (x, _) in (at.kept | at.given).items():
            self.places[key], element = self.fresh("h"), CUDA.element(x.buffer.dtype)
            self.line(f"{element}* const {self.places[key]} = ({element}*)(rlx_shared + {offset});")
            offset += _room(at.part * x.buffer.dtype.itemsize)
        with self.scope([f"for (rlx_index i = me * {row.size}; i < own; i += {TEAM * row.size}) {{"]):
            self.bring(at.kept, row.size)
        with self.scope(["const auto copy = [&](rlx_uindex line) {"]):
            with self.scope([f"if (line < {at.points}) {{"]):
                self.of_line()
                place = f"const rlx_index i = (n * {TEAM} + me) * {row.size};"
                with self.scope(["#pragma unroll", f"for (int n = 0; n < {row.rounds}; n++) {{", place, "if (i < own) {"], 2):
                    self.bring(at.given, row.size)
            self.line("rlx_copies_end();")
        self.lines[-1] += ";"
        self.line(f"rlx_uindex line = blockIdx.x / {at.parts};")
        self.line("copy(line);")
        sizes = f"{TEAM}, {at.parts}, {at.part // row.size}, {last // row.size}, {row.size}"
        self.line(f"rlx_staying<{sizes}> all = {{(int)part}};")
        self.line("all.start();")
        step = f"gridDim.x / {at.parts}"
        with self.scope([f"for (rlx_uindex next = line + {step}; line < {at.points}; line = next, next += {step}) {{"]):
            self.of_line()
            self.line("const bool spare = false;  // no other cluster has this row, too")
            self.line("rlx_copies_wait<0>();")
            self.block(self.kernel.body)

    def of_line(self) -> None:
        for text in self.of_point("line"):
            self.line(text)

    def bring(self, found: Loads, size: int) -> None:
        """Start copies of the vector at element i of this block's part."""
        for key, (x, var) in found.items():
            index = self.at_first(x.index, var, f"(part * {self.launch.part} + i)")
            self.names.pop(var)
            self.line(f"rlx_bring<{size}>({self.places[key]} + i, {self.names[x.buffer]} + {index});")

    def part_of_row(self, s: Loop, row: Row, first: str, body: Callable[[], None]) -> None:
        super().part_of_row(s, row, first, body)
        if not self.following:  # the first loop has read all of this row
            self.line("copy(next);")
            self.following = True

    def spread(self, s: Loop) -> None:
        """Sums for a variance are computed with those for its mean: then blocks wait for each other once."""
        if any(s is t for t in self.squared.values()):
            return
        if (squared := self.squared.get(id(s))) is None:
            return super().spread(s)
        assert self.row is not None
        first, away, squares, found, i = map(self.fresh, ("first", "away", "squares", "found", "i"))
        self.line(f"float {first} = 0, {away} = 0, {squares} = 0;")

        def combine(values: list[str]) -> None:
            self.line(f"if ({self.round} == 0 && v == 0) {first} = {values[0]};")
            off = self.fix("d", f32, f"{values[0]} - {first}")
            self.line(f"{away} += {off}, {squares} = __fmaf_rn({off}, {off}, {squares});")

        ends = [r.value for r in s.reduces]
        self.part_of_row(s, self.row, i, lambda: self.in_vectors(s.body, ends, s.var, self.row.size, i, combine))  # type: ignore[union-attr]
        self.line(f"const rlx_moments {found} = all.moments({first}, {away}, {squares});")
        self.names[s.reduces[0].result], self.names[squared.reduces[0].result] = f"{found}.sum", f"{found}.squares"

    def beyond(self, row: Row, first: str, place: str) -> str:
        return f"{place} >= own"

    def fetch_vector(self, x: Load, to: str, var: Var, size: int, first: str, how: str) -> None:
        self.line(f"rlx_fetch<{size}>({to}, {self.places[key_of(x, var)]} + ({first} - part * {self.launch.part}));")


__all__ = ["StayingLaunch", "StayingWriter", "staying"]

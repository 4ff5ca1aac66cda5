"""AMX, the matrix unit of x86 CPUs: a tile of a contraction is up to 2 x 2 blocks of 16 x 16 sums.

A block is a register of 16 rows of 64 bytes. One instruction multiplies a block of a (16 rows of 16 groups; a group is two bf16
or four u8) by a block of b (16 rows of groups, 16 columns) and adds the product to a block of sums. Panels store b in this
layout. The tile configuration (rows and bytes of each register) is state of the thread. `configure` sets it for all tiles of one
height and `release` clears it; until then the system saves it at every context switch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.kernels.tile import Layout, prefetch
from rlx.host.emit import Emitter, V

SIDE = 16  # rows of a block; its columns, of 4 bytes; groups that one instruction sums over
LEAST_STEP = 6  # groups; a step takes as long as one of 16. Windows of three pixels with four channels of bf16 are runs of 6
FEATURES = {2: ("amx-bf16", "tdpbf16ps"), 4: ("amx-int8", "tdpbusd")}  # elements in a group -> feature, instruction
CONFIG_BYTES = 64
BLOCK = SIDE * 4 * SIDE  # bytes
L1 = 48 << 10  # bytes; every processor with AMX so far has this L1 cache of data, and an L2 cache of 2 MB
SUMS, A, B = ((0, 1), (2, 3)), (4, 5), (6, 7)  # registers


def multiplies(features: tuple[str, ...], group: int) -> bool:
    """Whether a target with these features has AMX for groups of this size."""
    return group in FEATURES and {"amx-tile", FEATURES[group][0]} <= set(features)


def step_of(features: tuple[str, ...], group: int, depth: int) -> int:
    """Groups of this size that an instruction sums on a target with these features, at least LEAST_STEP: the depth is whole
    steps. 0: there is no such step, or no AMX."""
    whole = multiplies(features, group) and depth > 0 and depth % group == 0
    return next((n for n in range(SIDE, LEAST_STEP - 1, -1) if whole and depth // group % n == 0), 0)


def configure(e: Emitter, at: V, rows: int, step: int = SIDE) -> None:
    """Load the tile configuration for tiles of `rows` rows and this step; `at`: CONFIG_BYTES of scratch memory."""
    upper, lower = min(rows, SIDE), max(rows - SIDE, 0)
    heights = [upper, upper, lower, lower, upper, lower, step, step]  # rows of each register, in order; 0: not used
    widths = [4 * (step if n in A else SIDE) if height else 0 for n, height in enumerate(heights)]
    table = bytes([1, *[0] * 15]) + b"".join(w.to_bytes(2, "little") for w in widths) + bytes(16) + bytes(heights) + bytes(8)
    for place in range(0, CONFIG_BYTES, 8):
        e.store(e.i64(int.from_bytes(table[place : place + 8], "little")), e.gep(at, place), 8)
    do(e, "ldtilecfg", at)


def release(e: Emitter) -> None:
    do(e, "tilerelease")


def begin_sums(e: Emitter, sums: V, above: range, across: range, pitch: int, kept: V | None) -> dict[int, V]:
    """Registers of sums with their places in memory: zero, or where `kept` as they are there."""
    places = {SUMS[i][j]: e.gep(sums, 4 * SIDE * (i * pitch + j)) for i in above for j in across}
    for tile in places:
        do(e, "tilezero", tile)
    if kept is not None:
        with e.when(kept):
            for tile, place in places.items():
                do(e, "tileloadd64", tile, place, e.i64(4 * pitch))
    return places


def blocks_function(
    e: Emitter, a: V, b: V, sums: V, k: int | V, kept: V | None = None, ahead: V | None = None, *,
    rows: int, vectors: int, group: int, from_a: Layout, from_b: Layout, step_a: int = 0, pitch: int = 0, share: int = 0,
    streamed: str = "", keep: int = 0, beside: Callable[[V], None] | None = None, first: V | None = None, step: int = SIDE,
    rest: Sequence[V] = (),
) -> None:  # fmt: skip
    """sums[rows][vectors * SIDE] = a[rows, k] @ b[k, vectors * SIDE], k counted in groups, a multiple of `step`. `kept`: whether
    the previous sums are added (None: never). The unit is configured for this height and step. `step_a`: bytes from a step of a
    to the next, if they are not in a row. `pitch`: distance of rows of sums, if it is not their length. `ahead`: where `share`
    bytes per step are prefetched from. `streamed`: "a" or "b", which need not stay in the L1 cache. `keep`: of the other one only
    so many groups need, if k is a number and more. `beside`: emits other work of the step at an index, done while the unit
    multiplies. `first`: the column of a at which k begins, if a's columns lie in levels. `rest`: whether the last step of b is
    read from a copy, and that, with zeros behind k; a has zeros there too. Other values there, in either operand, may be
    infinite or NaN."""
    above, across, pitch = range(-(-rows // SIDE)), range(vectors), pitch or SIDE * vectors
    places = begin_sums(e, sums, above, across, pitch, kept)

    def steps(begin: int, stop: int | V, passing: str, carried: Sequence[V]) -> Sequence[V]:
        """Those from `begin` on; operands in `passing` go by the L1 cache. Returns the addresses behind them."""
        loads = {x: "tileloaddt164" if x in passing else "tileloadd64" for x in "ab"}
        with e.loop(begin, stop, step, carried=carried) as loop:
            at, at_b, *now = loop.carried
            after = at if first else e.gep(at, step_a or from_a.byte(0, step))
            loop.next = [after, from_b.at(e, at_b, step), *prefetch(e, now, share)]
            at = from_a.at(e, at, 0, e.bin("add", first, loop.index)) if first else at
            if rest:
                last = e.bin("and", rest[0], e.cmp("sge", e.bin("add", loop.index, step), e.i64(k)))
                at_b = e.select(last, rest[1], at_b)

            def load(x: str, n: int) -> None:
                if x == "a":
                    do(e, loads[x], A[n], from_a.at(e, at, SIDE * n), e.i64(from_a.byte(1, 0)))
                else:
                    do(e, loads[x], B[n], from_b.at(e, at_b, 0, SIDE * n), e.i64(from_b.byte(1, 0)))

            for i in above:
                load("a", i)
                for j in across:
                    if i == 0:
                        load("b", j)
                    do(e, FEATURES[group][1], SUMS[i][j], A[i], B[j])
            if beside:
                beside(loop.index)
        return loop.results

    start = [a, b, *([ahead] if ahead else [])]
    if isinstance(k, int) and 0 < keep < k:
        steps(keep, k, "ab", steps(0, keep, streamed, start))
    else:
        steps(0, k, streamed, start)
    for tile, place in places.items():
        do(e, "tilestored64", tile, place, e.i64(4 * pitch))


def do(e: Emitter, name: str, *args: V | int) -> None:
    """An instruction of the unit; numbers are registers."""
    e.external(f"llvm.x86.{name}", "void", *(V(str(x), "i8") if isinstance(x, int) else x for x in args))

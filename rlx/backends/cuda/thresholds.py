"""Thresholds of long rows, as of top-k and top-p sampling: blocks share a row, and find the digits of the threshold's key by
counts, or sums, of all elements that have a digit."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Const, Expr, Kernel, Let, Loop, Stmt, Store, Var
from rlx.records import record

LEAST, MOST = 2048, 1 << 22  # elements of a row: a block keeps a shorter one; of a longer one, sums would round more than f32
THREADS, AT_ONCE = 512, 16  # of a block; elements that a thread loads at once
PART, RESIDENT = 4096, 2  # elements of a block, at least; blocks of a multiprocessor
BITS = 44  # of fractions in sums, of rows in which that many leave room for the sum of all
DIGITS, FEW, HEAD, TURN = 3, 4096, 4, 4096  # as in threshold.h


class Threshold(NamedTuple):
    """`var` of `n` elements of `value`; `want`: what they should reach; `found`: the key, which `last` stores as a number."""

    var: Var
    n: int
    value: Expr
    want: Let
    found: Var
    weighted: bool
    last: tuple[Stmt, ...]


def threshold_of(kernel: Kernel) -> Threshold | None:
    """The threshold that a kernel looks for, bit by bit, and does nothing else."""
    grid = {v for v, _ in kernel.grid}
    if kernel.origin != ("threshold",) or not all(x.var in grid for x in kernel.limits):
        return None
    match kernel.body:
        case (Loop(body=(Store() as fill,)) as row, Let() as want, Loop(body=(_, Loop(reduces=(r,))), carries=(found, _)), *last):
            _, weight, _ = r.value.args  # type: ignore[union-attr]
            return Threshold(row.var, row.extent, fill.value, want, found.var, not isinstance(weight, Const), tuple(last))
    return None


@record
class ThresholdLaunch(Launch):
    """A thread loads `rounds` vectors of `size` at once."""

    size: int = 1
    rounds: int = 1


def threshold(kernel: Kernel, multiprocessors: int) -> ThresholdLaunch | None:
    """`kernel` as a threshold of long rows; None: it is none, or has short ones."""
    found = threshold_of(kernel)
    if not found or not LEAST <= found.n <= MOST:
        return None
    n, rows, size = found.n, math.prod(n for _, n in kernel.grid), width((), (found.value,), found.var, found.n)
    parts = max(1, min(RESIDENT * multiprocessors // max(1, rows), multiprocessors, -(-n // PART)))
    part = -(-n // (parts * size)) * size
    parts, turns = -(-n // part), -(-part // (THREADS * size))
    scratch, words = (-(-4 * FEW // (16 * parts)) * 16, HEAD + DIGITS * TURN) if parts > 1 else (0, 0)
    return ThresholdLaunch(
        kernel, THREADS, THREADS, scratch=scratch, counters=rows * words, parts=parts, part=part, words=words, adjacent=True,
        size=size, rounds=-(-turns // -(-turns * size // AT_ONCE)),
    )  # fmt: skip


class ThresholdWriter(CudaWriter):
    launch: ThresholdLaunch
    headers = ("sort.h", "threshold.h")
    occupancy = f", {RESIDENT}"

    def declare_locals(self) -> None:
        """The row stays in memory."""

    def body(self) -> None:
        at, s = self.launch, threshold_of(self.kernel)
        assert s
        self.block((s.want,))
        with self.alone(), self.scope([f"const auto values = [&](rlx_index first, float (&x)[{at.size}]) {{"]):
            self.in_vectors((), (s.value,), s.var, at.size, "first", lambda found: self.line(f"x[v] = {found[0]};"))
        bits = min(BITS, 62 - s.n.bit_length()) if s.weighted else 0
        sizes = f"{at.team}, {s.n}, {at.parts}, {at.part}, {bits}, {'unsigned long long' if bits else 'unsigned'}"
        memory = f"rlx_counters + line * {at.words}, (unsigned*)(rlx_scratch + line * {at.parts * at.scratch}), (int)part"
        self.line(f"; rlx_threshold<{sizes}> threshold = {{{memory if at.parts > 1 else '0, 0, 0'}, {self.names[s.want.var]}}};")
        self.line(f"unsigned key; if (!threshold.run<{at.rounds}, {at.size}>(key, values)) return;")
        self.names[s.found] = "key"
        with self.alone(), self.scope(["if (me == 0) {"]):  # of the block that is last, whichever part it has
            self.block(s.last)


__all__ = ["ThresholdLaunch", "ThresholdWriter", "threshold", "threshold_of"]

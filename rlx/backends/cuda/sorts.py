"""Sorts of rows that fit in shared memory: a warp sorts chunks in its registers, which the block merges."""

from __future__ import annotations

from pathlib import Path

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import THREADS, WARP, Launch
from rlx.ir.kernel import Kernel, Let, Sort
from rlx.records import record

EACH = 8  # elements of a thread in registers, at most
MOST_BYTES = 4096  # of the keys' values in registers of a block: more threads would have too few registers


@record
class SortLaunch(Launch):
    """`each`: elements in registers of a thread at once."""

    each: int = EACH

    @property
    def sort(self) -> Sort:
        last = self.kernel.body[-1]
        assert isinstance(last, Sort)
        return last


def sorted_rows(kernel: Kernel, most: int) -> SortLaunch | None:
    """`kernel` as a sort in at most so many bytes of shared memory; None: it is none, or has longer rows."""
    *before, last = kernel.body or (None,)
    if not isinstance(last, Sort) or kernel.locals or kernel.limits or not last.n or not all(isinstance(s, Let) for s in before):
        return None
    full = 1 << (last.n - 1).bit_length()
    each, itemsize = max(1, min(EACH, full // WARP)), max(4, last.value.dtype.compute.itemsize)
    team = max(WARP, min(MOST_BYTES // itemsize, full // each))
    room = -(-last.n // (WARP * each)) * WARP * each
    threads = THREADS if team == WARP else team
    shared = (room + room // 8) * 2 * itemsize * (threads // team)
    return SortLaunch(kernel, team, threads, shared=shared, each=each) if shared <= most else None


class SortWriter(CudaWriter):
    launch: SortLaunch

    def body(self) -> None:
        at, s = self.launch, self.launch.sort
        self.block(self.kernel.body[:-1])
        value, order = self.type(s.value.dtype), "true" if s.descending else "false"
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        mine = f"threadIdx.x / {at.team} * {at.shared // (at.threads // at.team)}"
        self.line(f"rlx_key<{value}>* const keys = (rlx_key<{value}>*)(rlx_shared + {mine});")
        i = self.name(s.i, "i")
        with self.alone():
            with self.scope([f"const auto value = [&](rlx_index {i}) -> {value} {{"]):
                self.line(f"return {self.value(s.value)};")
            self.line(";")
            self.line(f"rlx_sort<{at.team}, {at.each}, {s.n}, {order}, {value}>(keys, me, value);")
            to = self.name(s.to, "i")
            with self.scope([f"for (rlx_index {to} = me; {to} < {s.kept}; {to} += {at.team}) {{"]):
                self.line(f"const rlx_key<{value}> key = keys[rlx_spread({to})];")
                self.names[s.held] = self.fix("x", s.value.dtype, f"rlx_of_key<{order}, {value}>(key)")
                self.line(f"const rlx_index {self.name(s.origin, 'o')} = key.below >> 1;")
                self.block(s.body)

    def function(self, name: str) -> str:
        return (Path(__file__).parent / "sort.h").read_text() + super().function(name)


__all__ = ["SortLaunch", "SortWriter", "sorted_rows"]

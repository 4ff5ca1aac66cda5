"""Scatters of many updates by indices of their own: a block has the sums of a tile of places in shared memory, and
all updates of these lines pass by, in order."""

from __future__ import annotations

from rlx.backends.cuda.scatter import CLAIMS, STREAM_THREADS, ScatterLaunch, ScatterWriter, shares, stream_of, way_of
from rlx.ir.kernel import Kernel
from rlx.records import record


@record
class StreamLaunch(ScatterLaunch):
    """A block has `rows` places of `groups` adjacent points."""


def streamed(kernel: Kernel) -> StreamLaunch | None:
    """The launch of a scatter whose updates pass by tiles of sums; None: it is something else, or done otherwise."""
    found, way = way_of(kernel)
    if not found or way != "streamed" or shares(kernel, found):
        return None
    at = stream_of(kernel, found)
    held = at.rows * at.columns * found.put.buffer.dtype.compute.itemsize
    return StreamLaunch(kernel, 1, STREAM_THREADS, shared=held, groups=at.columns, rows=at.rows, tiles=at.tiles)


class StreamWriter(ScatterWriter):
    headers = ("streamed.h",)
    with_seen = True

    def call(self, kind: str, functions: str) -> None:
        at = self.launch
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        sizes = f"{at.threads}, {at.groups}, {CLAIMS}, {kind}"
        self.line(f"rlx_stream_picks<{sizes}>(({kind}*)rlx_shared, first, end, {self.found.count}, own, {functions});")


__all__ = ["StreamLaunch", "StreamWriter", "streamed"]

"""How the points and loops of a kernel are spread over blocks and threads. All decisions are here; render.py carries them out.

A *team* of T threads runs one grid point. T is 1 (a point per thread), 32 (a warp), or a whole block. The statements of a point
run in every thread of the team with the same values; the iterations of its vector loops are shared out among the threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlx.backends.cuda.vectors import width
from rlx.backends.shared.contract_loops import without_contract
from rlx.backends.shared.lines import in_loops
from rlx.backends.shared.long_sums import long_sums
from rlx.backends.shared.nest import nested
from rlx.ir.kernel import Kernel, Let, Load, Local, Loop, Stmt, Var, coefficient, walk

THREADS = 256  # of a block of small teams
WARP = 32
BLOCK_SIZES = (64, 128, 256, 512, 1024)
PER_THREAD = 8  # elements of a row for each thread of its team, at least
FEW_POINTS = 2048  # with fewer points than this, a point gets a larger team: not every multiprocessor is busy otherwise
MANY_POINTS = 8192  # with as many points, adjacent ones in adjacent threads read columns at full rate
BUSY_THREADS = 132 * 512  # threads that keep a large GPU busy
SHARED_BYTES = 96 << 10  # Locals of a block that still let two blocks share a multiprocessor; larger ones go to global memory


@dataclass(frozen=True)
class TensorMap:
    """A tensor for bulk copies: buffer argument, first byte, dims, byte strides of all but the innermost axis, and the box that
    one copy fetches. The innermost axis comes first."""

    argument: int
    offset: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """`kernel`: with vector loops moved into the grid. `team` and `threads` of a block; a block has threads // team points.
    `vector`: consecutive points of the last axis for each thread.
    `scratch`: bytes of global memory that each block needs, as for Locals that are not in shared memory (`shared` bytes).
    `counters`: 32-bit words of global memory that are zero before and after the launch."""

    kernel: Kernel
    team: int
    threads: int
    shared: int = 0
    scratch: int = 0
    vector: int = 1
    counters: int = 0

    @property
    def points(self) -> int:
        """Threads or teams: points of the grid over `vector`."""
        return math.prod(n for _, n in self.kernel.grid) // self.vector

    @property
    def blocks(self) -> int:
        return -(-self.points // (self.threads // self.team))

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """Tensors that the kernel copies in bulk: their descriptors are its first arguments."""
        return ()


def launch(kernel: Kernel) -> Launch:
    """The mapping of a kernel as loops."""
    kernel = _flattened(in_loops(without_contract(kernel), extremes=False))
    team = _team(kernel)
    threads = THREADS if team <= WARP else team
    if team == 1:
        kernel = in_loops(long_sums(kernel))
        return Launch(kernel, 1, threads, vector=_vector(kernel))
    held = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in kernel.locals) * (threads // team)
    return Launch(kernel, team, threads, held) if held <= SHARED_BYTES else Launch(kernel, team, threads, 0, held)


def _flattened(kernel: Kernel) -> Kernel:
    """A vector loop without results whose siblings are values only becomes the fastest axis of the grid."""
    *before, last = kernel.body or (None,)
    if kernel.locals or not isinstance(last, Loop) or not all(isinstance(s, Let) for s in before):
        return kernel
    if not last.vector or last.reduces or last.carries:
        return kernel
    return replace(kernel, grid=(*kernel.grid, (last.var, last.extent)), body=(*before, *last.body))


def _team(kernel: Kernel) -> int:
    shared = [s for s in _of_a_point(kernel.body) if s.extent >= WARP]
    if not shared:
        return 1 if not kernel.locals else WARP
    points, longest = math.prod(n for _, n in kernel.grid), max(s.extent for s in shared)
    if not kernel.locals and points >= MANY_POINTS and kernel.grid and not any(_contiguous(s, s.var) for s in shared):
        return 1
    if longest <= WARP * PER_THREAD * 4 and points >= FEW_POINTS:
        return WARP
    return next((n for n in BLOCK_SIZES if n * PER_THREAD >= longest), BLOCK_SIZES[-1])


def _vector(kernel: Kernel) -> int:
    """Points of the last axis that a thread computes at once: as many as leave every multiprocessor busy."""
    if not kernel.grid or any(x.var is kernel.grid[-1][0] for x in kernel.limits):
        return 1
    (var, extent), points = kernel.grid[-1], math.prod(n for _, n in kernel.grid)
    size = width(kernel.body, (), var, extent)
    while size > 1 and points // size < BUSY_THREADS:
        size //= 2
    return size


def _of_a_point(body: tuple[Stmt, ...]) -> list[Loop]:
    """The loops whose iterations a team shares: the outermost vector loops."""
    out: list[Loop] = []
    for s in body:
        if isinstance(s, Loop):
            out += [s] if is_shared(s) else _of_a_point(s.body)
    return out


def is_shared(loop: Loop) -> bool:
    return loop.vector and (not loop.carries or (loop.in_lanes and _independent(loop)))


def _independent(loop: Loop) -> bool:
    """True if the addends of the running totals depend on nothing that the body computes."""
    own = {s.var for s in nested(loop.body) if isinstance(s, Let)}
    own |= {r.result for s in nested(loop.body) if isinstance(s, Loop) for r in s.reduces}
    return all(own.isdisjoint(walk(c.added)) for c in loop.carries)


def _contiguous(loop: Loop, var: Var) -> bool:
    """True if consecutive iterations load consecutive elements."""
    loads = [x for x in walk((loop,)) if isinstance(x, Load) and not isinstance(x.buffer, Local)]
    return any(coefficient(x.index, var) == 1 for x in loads)

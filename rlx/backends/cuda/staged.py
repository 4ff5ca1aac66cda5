"""Short rows through shared memory: a block copies adjacent rows there as a whole, each of its threads has one of them, and
results go back in the same way. A warp for each row would have few bytes on their way, and threads that each read a row of memory
would read a few bytes of many lines at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.points import counts
from rlx.backends.cuda.render import UNROLLED, CudaWriter
from rlx.backends.cuda.rows import recomputed, row_loops
from rlx.backends.cuda.schedule import MULTIPROCESSORS, RESIDENT, SHORT, Launch
from rlx.backends.cuda.vectors import width
from rlx.backends.shared.contract_loops import without_contract
from rlx.backends.shared.lines import in_loops
from rlx.ir.kernel import EXTREMES, Buffer, Expr, Kernel, Load, Local, Loop, Stmt, Store, Var, coefficient, walk
from rlx.ir.nest import substitute
from rlx.ir.overlap import unaliased
from rlx.records import record

THREADS = 128
LEAST, LONGEST = 9, 112  # elements of a row whose results are a row, too: longer ones have enough for a warp
MOST = 400  # bytes of a row in all tensors: then a multiprocessor has enough of them on their way
FEW = RESIDENT * MULTIPROCESSORS * THREADS  # rows
BANKS = 32
Place = tuple[Buffer, Local, int, int]


@record
class StagedLaunch(Launch):
    """`rows`: a buffer, its rows in shared memory, the byte where the first one begins, and elements from one to the next.
    Results may have the place of what is read. `narrow`: all results have 16 bits or less. `given`: the kernel with rows in
    memory."""

    rows: tuple[Place, ...] = ()
    narrow: bool = False
    given: Kernel | None = None

    @property
    def unaliased(self) -> tuple[bool, ...]:
        return unaliased(self.given or self.kernel)


def staged(kernel: Kernel) -> StagedLaunch | None:
    """The launch of a kernel of short rows; None: it is something else, or has vectors of its own."""
    kernel = in_loops(without_contract(kernel), extremes=False)
    points, loops = math.prod(n for _, n in kernel.grid), row_loops(kernel, carries=True)
    reduced, running = [r for s in loops for r in s.reduces], any(s.carries for s in loops)
    if not (reduced or running) or points < FEW or any(r.op in EXTREMES for r in reduced):
        return None
    given, kernel = kernel, recomputed(kernel, narrow=False) or kernel
    loops, extent = row_loops(kernel, carries=True), loops[0].extent
    if kernel.locals or not all(isinstance(x, Store) for s in loops for x in s.body):
        return None
    if extent <= SHORT and not running and all(width(s.body, [r.value for r in s.reduces], s.var, extent) > 1 for s in loops):
        return None  # a thread reads its row in vectors
    found = [[x for x in walk(_parts(s)) if _of_row(x, s.var, kernel, extent)] for s in loops]
    order, own = list(enumerate(found)), dict[Buffer, Local]()

    def loop_of(kind: type[Load | Store], order: list[tuple[int, list[Load | Store]]]) -> dict[Buffer, int]:
        """The last loop, by number, of those in `order` that loads from, or stores to, each buffer."""
        return {b: n for n, xs in order for x in xs if isinstance(x, kind) and isinstance(b := x.buffer, Buffer)}

    near = {id(x) for xs in found for x in xs}
    apart = [(x, s.var) for s in loops for x in walk(_parts(s)) if isinstance(x, Load) and id(x) not in near]
    read, written = loop_of(Load, order), loop_of(Store, order[::-1])
    stored = {x.buffer for x in walk(kernel.body) if isinstance(x, Store)}
    fits = LEAST <= extent <= LONGEST if written else extent > SHORT  # a thread reads few elements of its own as fast
    if not read or not fits or any(x.buffer in stored for x in walk(kernel.body) if isinstance(x, Load)):
        return None
    if any(not _together(x, var, kernel) for x, var in apart):
        return None
    for b in (*read, *written):
        own[b] = Local(f"row{len(own)}", b.dtype, extent)
    rows, shared = _places(own, read, written)
    if shared > MOST * THREADS:
        return None
    moved = {id(s): _moved(s, own, xs) for s, xs in zip(loops, found)}
    kernel = replace(kernel, body=tuple(moved.get(id(s), s) for s in kernel.body), locals=tuple(own.values()))
    narrow = all(b.dtype.itemsize <= 2 for b in stored)
    return StagedLaunch(kernel, 1, THREADS, shared=shared, rows=rows, narrow=narrow, given=given)


def _parts(s: Loop) -> tuple[object, ...]:
    return s.body, s.reduces, tuple(c.next for c in s.carries)


def _of_row(x: object, var: Var, kernel: Kernel, extent: int) -> bool:
    """Whether a load or store in the loop over `var` is at that element of the point's own row: rows are adjacent in memory."""
    if not isinstance(x, Load | Store) or isinstance(x.buffer, Local) or x.guard is not None:
        return False
    return counts(x.index, (*kernel.grid, (var, extent)))


def _together(x: Load, var: Var, kernel: Kernel) -> bool:
    """Whether the lanes of a warp load one element, or adjacent ones; or each thread one for all of its row."""
    strides = [coefficient(x.index, axis) for axis, n in kernel.grid if n > 1]
    return coefficient(x.index, var) == 0 or all(n == 0 for n in strides) or strides[-1] == 1


def _places(own: dict[Buffer, Local], last: dict[Buffer, int], first: dict[Buffer, int]) -> tuple[tuple[Place, ...], int]:
    """The rows of a launch, and its bytes of shared memory. A result that loop number `first` and later ones store takes the
    place of rows whose `last` loop is no later one."""
    rows, free, end = list[Place](), dict[Buffer, int](), 0
    for b, row in own.items():
        pitch, element = _pitch(row), CUDA.element(row.dtype)
        same = next((x for x in free if b in first and last[x] <= first[b] and CUDA.element(x.dtype) == element), None)
        at = end if same is None else free.pop(same)
        end = max(end, at + THREADS * pitch * b.dtype.itemsize)
        if b in last:
            free[b] = at
        rows.append((b, row, at, pitch))
    return tuple(rows), end


def _pitch(row: Local) -> int:
    """Elements from one row to the next: threads that read the same element of theirs should find it in different banks."""
    words, odd = divmod(row.size * row.dtype.itemsize, 4)
    return row.size if odd or math.gcd(words, BANKS) <= 2 else row.size + max(1, 4 // row.dtype.itemsize)


def _moved(s: Loop, own: dict[Buffer, Local], found: list[Load | Store]) -> Loop:
    """The loop with rows in shared memory."""
    memo: dict[int, Expr] = {id(x): Load(own[x.buffer], s.var) for x in found if isinstance(x, Load)}  # type: ignore[index]
    stores, body = {id(x) for x in found}, list[Stmt]()
    for x in s.body:
        made = substitute(x, {}, memo)
        body.append(replace(made, buffer=own[x.buffer], index=s.var) if isinstance(x, Store) and id(x) in stores else made)  # type: ignore[index, call-overload]
    carries = tuple(replace(c, next=substitute(c.next, {}, memo)) for c in s.carries)
    return replace(s, body=tuple(body), reduces=substitute(s.reduces, {}, memo), carries=carries)


class StagedWriter(CudaWriter):
    launch: StagedLaunch
    headers = ("staged.h",)
    in_rows = True

    def __init__(self, launch: StagedLaunch) -> None:
        super().__init__(launch)
        self.narrow = launch.narrow

    def coordinates(self) -> Iterator[str]:
        """Where rows of 16 bits begin in the middle of words, a warp has every second one: those are in different banks."""
        odd = any(row.dtype.itemsize == 2 and pitch % 2 for _, row, _, pitch in self.launch.rows)
        yield f"const int me = {'threadIdx.x / 64 * 64 + threadIdx.x % 32 * 2 + threadIdx.x / 32 % 2' if odd else 'threadIdx.x'};"
        yield f"const rlx_uindex row = (rlx_uindex)blockIdx.x * {THREADS} + me;"
        yield from self.of_point("row")

    def declare_locals(self) -> None:
        self.line("extern __shared__ __align__(16) unsigned char rlx_shared[];")
        for _, row, at, pitch in self.launch.rows:
            element = CUDA.element(row.dtype)
            self.line(f"{element}* const {self.name(row, 'l')} = ({element}*)(rlx_shared + {at}) + me * {pitch};")

    def body(self) -> None:
        """Every thread copies, and meets the others; those behind the last row have none."""
        at = self.launch
        stored = {x.buffer for x in walk(self.kernel.body) if isinstance(x, Store)}
        left = f"{at.points} - (rlx_index)blockIdx.x * {THREADS}"
        self.line(f"const int count = {left} < {THREADS} ? {left} : {THREADS};")
        self.copies("rlx_stage", [r for r in at.rows if r[1] not in stored])
        self.line("rlx_staged();")
        with self.scope([f"if (row < {at.points}) {{"]):
            self.block(self.kernel.body)
        if results := [r for r in at.rows if r[1] in stored]:
            self.line("__syncthreads();")
            self.copies("rlx_unstage", results)

    def head(self, s: Loop, text: str, size: int = 1) -> list[str]:
        return [f"#pragma unroll {UNROLLED}", text]

    def copies(self, function: str, rows: list[Place]) -> None:
        for b, row, at, pitch in rows:
            place = f"({CUDA.element(b.dtype)}*)(rlx_shared + {at})"
            there = f"{self.names[b]} + (rlx_index)blockIdx.x * {THREADS * row.size}"
            self.line(f"{function}<{THREADS}, {row.size}, {pitch}>({place}, {there}, count);")


__all__ = ["StagedLaunch", "StagedWriter", "staged"]

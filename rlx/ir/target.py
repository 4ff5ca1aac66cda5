"""Target: the device facts that the compiler uses, as plain data. Making a Target does not access the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from rlx.ir.dtype import DType
from rlx.records import record

if TYPE_CHECKING:
    from rlx.ir.graph import Node, Value
    from rlx.ir.kernel import Kernel
    from rlx.ir.layout import Layout


@record
class Producer:
    """A candidate for a computed operand of a contraction. `side`: 0 left, 1 right.

    The product is [m, k] @ [k, n], `batch` times; `repeats` of these share the operand. `work`: operations per element.
    """

    side: int
    m: int
    n: int
    k: int
    batch: int
    repeats: int
    dtype: DType
    work: float


def _always(node: Node) -> bool:
    return True


def _never(what: object) -> bool:
    return False


def _never_both(one: object, other: object) -> bool:
    return False


def _as_lowered(kernel: Kernel) -> Kernel:
    return kernel


def _unpacked(dtype: str, columns: int = 0) -> tuple[int, int]:
    return 0, 1


@record
class Rows:
    """Elements of which the rows of a contraction's `left` and `right` operand should be whole multiples apart; of one that an
    elementwise kernel stores for it (`made`); of one that is known and that nothing else reads, and of every copy (`best`)."""

    left: int = 1
    right: int = 1
    made: int = 1
    best: int = 1


def _any_rows(node: Node) -> Rows:
    return Rows()


def _single(dtype: str) -> int:
    return 1


@record
class Target:
    """Facts of one device.

    `dtypes`: names of the supported dtypes. `natives`: op name -> claim(node), which returns None if the backend has a kernel for
    the whole node, else the reason why not; other ops are decomposed or lowered to loops.
    `packs`: op name -> pack(node, its graph, options): the second operand of a contraction or of a claimed node in the form that
    its kernel reads; each run makes it, unless the operand is known before. None: as `panel` says.
    `rows(node)`: the rows of a contraction's operands that its kernel reads fast; others are copied into such rows, before runs
    if they are known then.
    `splits`: op name -> split(node): a node, claimed if the op can be, as smaller ops with more parallelism or
    less traffic; or None. `unclaimed`: the same for nodes of claimed ops that the target has no kernel for.
    `followed`: claimed ops whose kernel supports an epilogue (pointwise ops on its result; products: on finished rows too);
    `follows(node)`: True if the epilogue is faster for this node than a separate kernel.
    `computes(producer)`: True if a contraction is faster when it computes this operand where it reads it than when another
    kernel writes the operand to memory first.
    `pairs(node)`: True if this contraction has the sums of columns j and j + n / 2 at once, for an epilogue that reads both.
    `panel(dtype name)`: (columns per packed panel of a contraction's right operand, 0: never packed; number of its rows that are
    interleaved). For operands of two dtypes, both names: "u8 i8". `panel(dtype name, columns)`: that of a convolution with so
    many columns; other products, of any number of rows and columns, read panels of one width.
    `step(dtype name)`: elements of a row of the left operand that a contraction sums at a time, best in whole runs.
    `widens`: dtypes of operands, left and right ("bf16 f8e4m3"), of contractions that read the right one in its own dtype.
    `levels`: contractions read a left operand whose rows and columns lie in levels (Operand.row_levels), where it lies; without
    it, such an operand is copied first. `in_place(contraction, layout of its left operand)`: it does for this one, at least.
    `control`: steps of a program run as often as its data says (Program.bodies); without it, control flow is decomposed.
    `part_columns`: columns over which a product can store sums of squares, of which the next product makes the factors of rows
    (rlx/compiler/factors.py); 0: never. `factors(product, reader)`: True if these two kernels, which do so, are faster than
    others with a norm between them.
    `schedule(kernel)`: the kernel in the loop order, blocking and grid that suit the device: it computes the same from the same
    buffers. Lowering leaves these open. The kernel itself if nothing changes.
    """

    name: str
    dtypes: frozenset[str]
    features: tuple[str, ...] = ()  # instruction-set features that change generated code; part of every cache key
    vector_bytes: int = 16
    threads: int = 1
    alignment: int = 64  # bytes, of every buffer
    points_per_thread: float = 4  # grid points that keep the threads busy; below 1 where a block of threads runs a point
    point_elements: int = 1 << 14  # elements that a point reads: with fewer, starting it costs more than it saves
    cache_bytes: int = 32 << 10  # memory that a point has near: first-level cache, shared memory
    core_cache_bytes: int = 1 << 20  # memory that a core has alone behind that: second-level cache
    line_bytes: int = 64  # of a cache line, the unit of transfers from memory
    row_terms: int = 1 << 31  # of each sum of a contraction that reduces its own rows, at most
    part_columns: int = 0
    column_bytes: int = 0  # of a line along another axis than the last one, at most, that a kernel may reduce and read again
    shares_rows: bool = False  # several points reduce one row, of any length, of elements computed of those in memory
    stores_narrow: bool = False  # a contraction stores rows that are reduced before their cast to a wider float: less traffic
    channels_last: bool = False  # contractions of a convolution read operands with channels last
    few_kernels: bool = False  # a kernel costs more than elements computed twice: updates in place and rows are fused further
    rest_bytes: int = 0  # buffers up to this size keep their memory for some steps after their last use: launches can be joined
    reread: int = 0  # bytes of weights that a thread may read again for each of its rows; 0: any, since shared caches are fast
    tile_rows: int = 16  # rows of a contraction that are computed together
    flops_per_ns: float = 50  # of one thread
    bytes_per_ns: float = 10  # of one thread
    sync_ns: float = 2000  # a barrier of all threads
    status_late: bool = False  # each step reports a failed check by itself, and a run ends before any report is read
    natives: Mapping[str, Callable[[Node], str | None]] = field(default_factory=dict, compare=False)
    packs: Mapping[str, Callable[..., Value | None]] = field(default_factory=dict, compare=False)
    rows: Callable[[Node], Rows] = field(default=_any_rows, compare=False)
    splits: Mapping[str, Callable[[Node], Value | tuple[Value, ...] | None]] = field(default_factory=dict, compare=False)
    unclaimed: Mapping[str, Callable[[Node], Value | None]] = field(default_factory=dict, compare=False)
    levels: bool = False
    in_place: Callable[[Node, Layout], bool] = field(default=_never_both, compare=False)
    control: bool = False
    quick: frozenset[str] = frozenset()  # narrow floats that contractions are fast in, besides those that features name
    followed: frozenset[str] = frozenset()
    widens: frozenset[str] = frozenset()
    follows: Callable[[Node], bool] = field(default=_always, compare=False)
    computes: Callable[[Producer], bool] = field(default=_never, compare=False)
    pairs: Callable[[Node], bool] = field(default=_never, compare=False)
    factors: Callable[[Kernel, Kernel], bool] = field(default=_never_both, compare=False)
    panel: Callable[..., tuple[int, int]] = field(default=_unpacked, compare=False)
    step: Callable[[str], int] = field(default=_single, compare=False)
    schedule: Callable[[Kernel], Kernel] = field(default=_as_lowered, compare=False)

    @property
    def points(self) -> int:
        """Number of grid points that keep all threads busy."""
        return max(1, round(self.points_per_thread * self.threads))

    @property
    def run_columns(self) -> int:
        """Columns that one point reduces together: their totals in f32 take half of the memory near it."""
        return self.cache_bytes // 8

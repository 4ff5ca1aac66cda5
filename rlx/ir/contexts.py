"""The passes as the functions of an op see them: lowering (rlx.compile.element), padding, partition. And nodes with the
attributes of one op.

Ops are declared below the compiler, and so is what they may ask of it: the passes say by inheritance that they offer this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from rlx.ir.building import Active
from rlx.ir.dtype import DType
from rlx.ir.kernel import Expr, Local, Store
from rlx.ir.node import Value
from rlx.ir.op import OpDef
from rlx.ir.placement import Placement, Split
from rlx.ir.shape import Shape

Attributes = TypeVar("Attributes", covariant=True)
Made = TypeVar("Made", Value, tuple[Value, ...])

Coords = Sequence[Expr]
Padded = Value | tuple[Value, ...] | str | None  # OpDef.padded
Parted = Sequence[tuple[Value, Placement]] | str | None  # OpDef.partitioned


class Applied(Protocol[Attributes]):
    """A Node whose attributes are known: those of the op that declares the function."""

    @property
    def op(self) -> OpDef: ...
    @property
    def inputs(self) -> tuple[Value, ...]: ...
    @property
    def attrs(self) -> Attributes: ...
    @property
    def shapes(self) -> tuple[Shape, ...]: ...
    @property
    def results(self) -> tuple[Value, ...]: ...


class Lowering(Protocol):
    """`ctx` of OpDef.element, kernel and update."""

    @property
    def threads(self) -> int:
        """That share the points of the grid; no result depends on it."""
        ...

    def dims(self, value: Value) -> tuple[int, ...]: ...

    def element(self, value: Value, coords: Coords, guard: Expr | None = None) -> Expr:
        """The element of `value` at `coords` (one index per dim), in its compute dtype; zero where `guard` is false."""
        ...

    def in_tiles(self, value: Value) -> bool:
        """Whether the value lies in memory in tiles."""
        ...

    def stored(self, value: Value, place: Coords) -> Expr:
        """What lies at a place in the memory of a value in tiles."""
        ...

    def check(self, ok: Expr, code: int) -> None:
        """The run fails with `code` unless `ok` holds at every point."""
        ...

    def local(self, dtype: DType, size: int, per_row: bool = False) -> Local: ...

    def store(self, result: int, coords: Coords, value: Expr, guard: Expr | None = None) -> Store:
        """Write one element of the op's result number `result`."""
        ...

    def cut(self, axis: int) -> bool:
        """Whether the extent cuts this axis of the results: points along it are better points of the grid."""
        ...


class PaddingPass(Protocol):
    """The first argument of OpDef.padded."""

    extent: Value

    def of(self, value: Value) -> tuple[Active, ...]:
        """Its active axes."""
        ...

    def along(self, value: Value, axis: int) -> tuple[Active, ...]:
        """The active parts of one axis."""
        ...

    def masked(self, value: Value, axis: int, fill: str = "0", guard: bool = False) -> Value:
        """`value` with what lies past the extent along `axis` replaced by one of state.FILLS."""
        ...

    def final(self, made: Made) -> Made:
        """The results of a node that is right as it is."""
        ...

    def valid(self, value: Value, axis: int) -> Value:
        """bool [size of `axis`]: where it holds data."""
        ...

    def count(self, value: Value, axes: Iterable[int], dtype: DType) -> Value | None:
        """How many elements along `axes` hold data, (); None: all, whatever the run."""
        ...


class Partitioning(Protocol):
    """The first argument of OpDef.partitioned."""

    @property
    def ranks(self) -> int: ...
    @property
    def home(self) -> Mapping[Value, Placement]:
        """Where each value lies."""
        ...

    def at(self, value: Value, to: Placement) -> Value:
        """The value as one rank has it in the placement `to`, by a collective if it must be."""
        ...

    def split_of(self, value: Value) -> Split | None:
        """Its split, if that is its home."""
        ...

    def first(self, size: int) -> Value:
        """i64 (): where this rank's part begins of an axis of that size."""
        ...

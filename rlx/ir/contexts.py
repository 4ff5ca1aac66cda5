"""Interfaces of the passes for the functions of an op: lowering (rlx.compiler.element), padding and partition. Also nodes typed
by the attributes of one op.

Ops are declared in a layer below the compiler, so these interfaces are declared here, and the passes inherit from them.
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
    """A Node whose attributes have a known type: that of the op that declares the function."""

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

    def dims(self, value: Value) -> tuple[int, ...]: ...

    def element(self, value: Value, coords: Coords, guard: Expr | None = None) -> Expr:
        """The element of `value` at `coords` (one index per dim), in its compute dtype; zero where `guard` is false."""
        ...

    def in_tiles(self, value: Value) -> bool:
        """True if the value is stored in a tiled layout."""
        ...

    def stored(self, value: Value, place: Coords) -> Expr:
        """The element at a memory location of a value in a tiled layout."""
        ...

    def check(self, ok: Expr, code: int) -> None:
        """The run fails with `code` unless `ok` holds at every point."""
        ...

    def local(self, dtype: DType, size: int, per_row: bool = False) -> Local: ...

    def store(self, result: int, coords: Coords, value: Expr, guard: Expr | None = None) -> Store:
        """Write one element of the op's result number `result`."""
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
        """`value` with its rows past the extent along `axis` replaced by one of state.FILLS."""
        ...

    def final(self, made: Made) -> Made:
        """The results of a node that needs no further change."""
        ...

    def valid(self, value: Value, axis: int) -> Value:
        """bool [size of `axis`]: True where it holds data."""
        ...

    def count(self, value: Value, axes: Iterable[int], dtype: DType) -> Value | None:
        """Number of valid elements along `axes`, (); None: all, in every run."""
        ...


class Partitioning(Protocol):
    """The first argument of OpDef.partitioned."""

    @property
    def ranks(self) -> int: ...
    @property
    def home(self) -> Mapping[Value, Placement]:
        """The placement in which each value was made."""
        ...

    def at(self, value: Value, to: Placement) -> Value:
        """One rank's part of the value in the placement `to`, made by a collective if necessary."""
        ...

    def split_of(self, value: Value) -> Split | None:
        """The split of the value, if it was made in one."""
        ...

    def first(self, size: int) -> Value:
        """i64 (): the start of this rank's part of an axis of this size."""
        ...

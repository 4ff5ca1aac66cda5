"""Attributes of ops: the base of their records, and of those of the op in which ranks take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, dataclass_transform, get_type_hints

from rlx.ir.shape import Dim, Shape
from rlx.records import record


class Part:
    """Base of what an attribute may hold besides plain data: a sub-graph (rlx.ir.body.Body). It is immutable and hashable."""

    def bind(self, binding: Mapping[str, int]) -> Part:
        """This with the named dims in it replaced by their values."""
        raise TypeError(f"{type(self).__name__} binds no dims")


@dataclass_transform(frozen_default=True)
class Attrs:
    """Base of an op's attributes. A subclass is a frozen dataclass of ints, floats, bools, strings, Dims, DTypes, Shapes,
    sub-graphs and tuples of them, so that attributes are hashable and print and parse as text."""

    def __init_subclass__(cls) -> None:
        record(cls, eq=False, repr=False)  # both below

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join([f'{name}={value!r}' for name, value in vars(self).items()])})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and tuple(vars(self).values()) == tuple(vars(other).values())

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def bind(self, binding: Mapping[str, int]) -> Attrs:
        """These attributes with the named dims in them replaced by their values."""

        def bound(x: Any) -> Any:
            if isinstance(x, (Dim, Shape, Part)):
                return x.bind(binding)
            return tuple(bound(e) for e in x) if isinstance(x, tuple) else x

        return replace(self, **{name: bound(getattr(self, name)) for name in attribute_types(type(self))})  # type: ignore[type-var]


@cache
def attribute_types(attrs: type[Attrs]) -> dict[str, Any]:
    """Name -> annotation of every attribute, in order of declaration."""
    return get_type_hints(attrs)


class CollectiveAttrs(Attrs):
    """Attributes of a core op in which all ranks take part. A kernel that calls an op with such attributes is a collective."""


FLOW = "flow"  # the op of a Native (rlx.ir.kernel) that has FlowAttrs


class FlowAttrs(Attrs):
    """How a step runs sub-programs (Program.bodies), in arguments of its kernel. A branch has two `bodies`, and runs the first if
    `test` holds; a loop has one, and a `count`: the number of the iteration.

    `wires`: for each body, the argument that is each of its params, then of its handles. `copies`: (from, to) before anything
    runs: a loop carries `to`. `zeroed`: arguments that are zero then. A loop ends when `count` is `limit` (-1: none), or `test`
    (-1: none) does not hold. `scratch`: the arena of the bodies (-1: they have none)."""

    bodies: tuple[int, ...]
    wires: tuple[tuple[int, ...], ...]
    copies: tuple[tuple[int, int], ...] = ()
    zeroed: tuple[int, ...] = ()
    test: int = -1
    count: int = -1
    limit: int = -1
    scratch: int = -1

    @property
    def in_place(self) -> frozenset[tuple[int, int]]:
        """The (read, written) arguments that may share memory: what is copied, if nothing else reads it."""
        used = [n for wire in self.wires for n in wire] + [n for n, _ in self.copies] + [self.test]
        return frozenset(pair for pair in self.copies if used.count(pair[0]) == 1)

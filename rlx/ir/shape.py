"""Shapes: dims (ints or named symbols) plus an element type; broadcasting; contiguous strides.

A named dim is a monomial: an integer times a product of names, so that (batch, sequence) can be flattened while both are
unknown. Sums of names are not supported: bind the dims first.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, total_ordering
from itertools import accumulate
from operator import mul
from typing import TypeGuard, overload

from rlx.errors import IndexRangeError, ShapeError, UnboundDimError, items, whole
from rlx.ir.dtype import DType, as_dtype
from rlx.records import field, record


@total_ordering
@record(repr=False)
class Dim:
    """A named dim: `factor` times the product of `names` (sorted). `Dim("n")` is the symbol n."""

    names: tuple[str, ...]
    factor: int = 1

    def __init__(self, names: str | Iterable[str], factor: int = 1) -> None:
        found = [names] if isinstance(names, str) else items("a dim has names", names, ShapeError)
        for name in found:
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ShapeError(f"a dim's name must be an identifier, got {name!r}")
        object.__setattr__(self, "names", tuple(sorted(found)))
        object.__setattr__(self, "factor", whole("the factor of a dim", factor))

    def __str__(self) -> str:
        return "*".join(([] if self.factor == 1 else [str(self.factor)]) + list(self.names))

    __repr__ = __str__

    def __lt__(self, other: Dim) -> bool:
        return (self.names, self.factor) < (other.names, other.factor) if isinstance(other, Dim) else NotImplemented

    def __mul__(self, other: DimLike) -> DimLike:
        if isinstance(other, Dim):
            return Dim(self.names + other.names, self.factor * other.factor)
        return 0 if other == 0 else Dim(self.names, self.factor * other)

    __rmul__ = __mul__

    def bind(self, binding: Mapping[str, int]) -> DimLike:
        """This dim with the bound names replaced by their values."""
        free = tuple(n for n in self.names if n not in binding)
        value = self.factor * math.prod(binding[n] for n in self.names if n in binding)
        return Dim(free, value) if free else value


DimLike = int | Dim
MAX_RANK = 64  # numpy's


def is_one(dims: object) -> TypeGuard[int | str | Dim]:
    """True of a dim that stands alone: also a number of numpy, or an array without dims, which cannot be iterated."""
    return isinstance(dims, (int, str, Dim)) or getattr(dims, "ndim", 1) == 0


def as_dim(x: int | str | Dim) -> DimLike:
    """An int (≥ 0), a Dim, or a name."""
    if isinstance(x, Dim):
        return x
    if isinstance(x, str):
        return Dim(x)
    try:
        value = operator.index(x)
    except TypeError:
        raise ShapeError(f"a dim is an int or a name, got {x!r}") from None
    if value < 0:
        raise ShapeError(f"a dim cannot be negative, got {value}")
    return value


@record(eq=False)
class Shape:
    """Dims and element type of one tensor. Indexed, measured and iterated it is the tuple of its dims, to which it also compares:
    `x.shape == (2, 3)`. Two Shapes are equal if their dtypes are, too."""

    dims: tuple[DimLike, ...]
    dtype: DType
    is_static: bool = field(init=False, repr=False)  # no dim is a name

    def __init__(self, dims: Iterable[int | str | Dim] | int | str, dtype: DType | str) -> None:
        if type(dims) is not tuple:  # the usual case, made often
            dims = (dims,) if is_one(dims) else tuple(items("dims are ints and names, or one of them", dims, ShapeError))
        if len(dims) > MAX_RANK:
            raise ShapeError(f"a tensor has at most {MAX_RANK} dims, got {len(dims)}")
        plain = all(type(d) is int and d >= 0 for d in dims)
        object.__setattr__(self, "dims", dims if plain else tuple(as_dim(d) for d in dims))
        object.__setattr__(self, "dtype", as_dtype(dtype))
        object.__setattr__(self, "is_static", plain or not any(isinstance(d, Dim) for d in self.dims))

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.dims))}]"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Shape):
            return self.dims == other.dims and self.dtype is other.dtype
        return self.dims == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.dims)  # of a tuple that it is equal to

    def __len__(self) -> int:
        return len(self.dims)

    def __bool__(self) -> bool:
        return True  # also without dims

    def __iter__(self) -> Iterator[DimLike]:
        return iter(self.dims)

    @overload
    def __getitem__(self, axis: int) -> DimLike: ...
    @overload
    def __getitem__(self, axis: slice) -> tuple[DimLike, ...]: ...
    def __getitem__(self, axis: int | slice) -> DimLike | tuple[DimLike, ...]:
        if isinstance(axis, int) and not -self.rank <= axis < self.rank:
            raise IndexRangeError(f"dim {axis} of {self}, which has {self.rank} dims")
        return self.dims[axis]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def static(self) -> tuple[int, ...]:
        """The dims as ints; raises if one is still a name."""
        for d in self.dims:
            if not isinstance(d, int):
                raise UnboundDimError(f"dim {d} of {self} has no value; bind it: CompileOptions(dims={{'{d}': …}})")
        return self.dims  # type: ignore[return-value]

    @property
    def num_elements(self) -> int:
        return math.prod(self.static)

    @cached_property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def with_dims(self, dims: Iterable[DimLike]) -> Shape:
        return Shape(dims, self.dtype)

    def with_dtype(self, dtype: DType) -> Shape:
        return Shape(self.dims, dtype)

    def bind(self, binding: Mapping[str, int]) -> Shape:
        return Shape((d if isinstance(d, int) else d.bind(binding) for d in self.dims), self.dtype)


def broadcast_dims(*shapes: tuple[DimLike, ...]) -> tuple[DimLike, ...]:
    """numpy's broadcasting rule over dims that may be named: equal, or one of them is 1."""
    if shapes and shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max((len(s) for s in shapes), default=0)
    out: list[DimLike] = []
    for axis in range(rank):
        here: DimLike = 1
        for s in shapes:
            at = axis - (rank - len(s))
            d = s[at] if at >= 0 else 1
            if d == 1 or d == here:
                continue
            if here != 1:
                text = " with ".join("[" + ",".join(map(str, s)) + "]" for s in shapes)
                raise ShapeError(f"cannot broadcast {text}: dim {axis - rank} is {here} and {d}")
            here = d
        out.append(here)
    return tuple(out)


def contiguous_strides(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(accumulate(dims[:0:-1], mul, initial=1))[::-1][: len(dims)]

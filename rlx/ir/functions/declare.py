"""A function made of ops: its declaration, and helpers that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain, repeat
from typing import Any, TypeVar

from rlx.errors import AttributeValueError, GraphError, ShapeError, whole
from rlx.ir.methods import FUNCTIONS, attach
from rlx.ir.node import Operand, Value, constant
from rlx.ir.shape import Dim

Dims = int | str | Dim | Sequence[int | str | Dim]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


# by the begin of an annotation: a method of those that fit, and how a message calls them
_WANTED = {
    "Callable": ("__call__", "a function of values"), "float": ("__float__", "a number"), "Sequence[": ("__iter__", "a sequence"),
}  # fmt: skip


def function(f: F) -> F:
    """Makes `f` known by its name; one whose first argument is `x` is a method of values, too. It takes arrays and numbers for
    values."""
    own = getattr(f, "__wrapped__", f)
    names = own.__code__.co_varnames[: own.__code__.co_argcount]

    def taken(name: str, x: object) -> object:
        kind = own.__annotations__.get(name, "")
        for start, (has, what) in _WANTED.items():
            if kind.startswith(start) and "Operand" not in kind and not hasattr(x, has) and not (x is None and "None" in kind):
                raise AttributeValueError(f"{own.__name__}: {name} is {what}, got {type(x).__name__} {x!r:.60}")
        if not kind.startswith("Value") or isinstance(x, Value) or (x is None and "None" in kind):
            return whole(name, x, error=AttributeValueError) if kind == "int" else x
        return constant(x)

    @wraps(f)
    def run(*operands: object, **named: object) -> object:
        return f(*map(taken, chain(names, repeat("")), operands), **{name: taken(name, x) for name, x in named.items()})

    FUNCTIONS[f.__name__] = run
    if names[:1] == ("x",):
        attach(Value, f.__name__, run)
    return run  # type: ignore[return-value]


def widened(f: F) -> F:
    """`f` computed in f32 where its first operand is a 16-bit or 8-bit float, and rounded once at the end."""

    @wraps(f)
    def run(x: Operand, *operands: Any, **attributes: Any) -> Any:
        x = as_value(x)
        if x.dtype == x.dtype.compute:
            return f(x, *operands, **attributes)
        wide = lambda o: o.astype(o.dtype.compute) if isinstance(o, Value) and o.dtype.is_float else o  # noqa: E731
        made = f(wide(x), *map(wide, operands), **{name: wide(o) for name, o in attributes.items()})
        return made.astype(x.dtype)

    return run  # type: ignore[return-value]


def as_value(x: Operand) -> Value:
    return x if isinstance(x, Value) else constant(x)


def own_axis(x: Value, axis: int, more: int = 0) -> int:
    """The axis as a non-negative number; with `more` new dims in x."""
    rank = x.rank + more
    if not -rank <= whole("axis", axis, error=AttributeValueError) < rank:
        raise AttributeValueError(f"axis {axis} of {x!r}, which has {rank} dims" + (" with the new one" if more else ""))
    return axis % rank


def one_each(x: Value, label: str, given: Sequence[T], axes: Sequence[int]) -> list[tuple[T, int]]:
    """Pairs of what is given for an axis of x, and the axis. AttributeValueError: there are not as many of both."""
    if len(given) != len(axes):
        raise AttributeValueError(f"{label}: {len(given)} for {len(axes)} axes of {x!r}")
    return [*zip(given, axes)]


MOST = 1 << 26  # elements of a constant that a function computes


def computed(label: str, count: float) -> None:
    """Refuses constants so large that a wrong size must be the reason."""
    if count > MOST:
        raise ShapeError(f"{label} would need a constant of {count:.3g} elements, more than {MOST}: check the sizes")


def known_dim(x: Value, axis: int) -> int:
    dim = x.dims[axis] if -x.rank <= axis < x.rank else f"number {axis}, which is missing,"
    if not isinstance(dim, int):
        raise GraphError(f"dim {dim} of {x!r} must be known")
    return dim

"""Nested tuples, lists, dicts, namedtuples and dataclasses as a flat list of leaves, and back.

None is a tree without leaves. Everything else that is no container is a leaf.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rlx.errors import OptionError
from rlx.records import record


@record
class Tree:
    """The form of a tree: equal for trees that differ in leaves alone. `kind`: a class of containers, None for a leaf."""

    kind: type | None
    names: tuple[object, ...] = ()  # keys of a dict, fields; the index elsewhere
    parts: tuple[Tree, ...] = ()

    @property
    def leaves(self) -> int:
        return 1 if self.kind is None else sum(p.leaves for p in self.parts)

    def paths(self, before: str = "") -> Iterator[str]:
        """A name for each leaf: `before`, then names and indices with dots between them."""
        if self.kind is None:
            yield before
        for name, part in zip(self.names, self.parts):
            yield from part.paths(f"{before}.{name}" if before else str(name))

    def build(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves, `self.leaves` of them."""
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        parts = [p._build(leaves) for p in self.parts]
        if self.kind is type(None):
            return None
        if issubclass(self.kind, dict):
            return self.kind(zip(self.names, parts))
        if is_dataclass(self.kind):
            return self.kind(**{str(n): p for n, p in zip(self.names, parts)})
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


LEAF, NOTHING = Tree(None), Tree(type(None))
DEEPEST = 100  # levels of containers


def flatten(x: object, leaves: list[Any], is_leaf: Callable[[object], bool] = lambda _: False, level: int = 0) -> Tree:
    """Appends the leaves of x to `leaves`, dicts in the order of their keys, and returns the form of x. OptionError: its levels
    have no end, or are too many."""
    if level > DEEPEST:
        raise OptionError(f"containers of arrays have at most {DEEPEST} levels; this {type(x).__name__} contains itself, or more")
    if x is None:
        return NOTHING
    if is_leaf(x):
        leaves.append(x)
        return LEAF
    if isinstance(x, dict):
        names = _in_order(x)
        children = [x[name] for name in names]
    elif isinstance(x, (tuple, list)):
        names, children = tuple(getattr(x, "_fields", range(len(x)))), list(x)
    elif is_dataclass(x) and not isinstance(x, type):
        names = tuple(f.name for f in fields(x))
        children = [getattr(x, str(name)) for name in names]
    else:
        leaves.append(x)
        return LEAF
    kind = dict if isinstance(x, (Counter, defaultdict)) else type(x)  # these are not made of pairs alone
    return Tree(kind, names, tuple([flatten(child, leaves, is_leaf, level + 1) for child in children]))


def _in_order(names: Iterable[object]) -> tuple[object, ...]:
    try:
        return tuple(sorted(names, key=lambda name: (str(type(name)), name)))  # type: ignore[arg-type]
    except TypeError:  # keys without an order, as those of an Enum
        return tuple(sorted(names, key=lambda name: (str(type(name)), repr(name))))


__all__ = ["LEAF", "NOTHING", "Tree", "flatten"]

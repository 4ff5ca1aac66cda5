"""`record`: a dataclass that is cheap to declare, and frozen unless it says otherwise.

`dataclass` writes and compiles six functions for each class, which takes 240 µs. The classes of a start took 35 ms, as long as
importing numpy. Records share all functions, and records with as many fields share the code of their `__init__`. `fields`,
`replace`, `match`, copies and pickles work as with a dataclass: what `dataclasses` wants to know is made when it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field, make_dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
from types import CodeType, FunctionType, MemberDescriptorType
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

MANY = 8  # fields of a record that take longer to be made than to be set in a loop
Class = TypeVar("Class", bound=type)
_PLAIN: Any = make_dataclass("Plain", (), init=False, repr=False, eq=False, namespace={"__doc__": "It has no fields."})


@overload
def record(cls: Class, /, *, eq: bool = True, repr: bool = True, slots: bool = False, frozen: bool = True) -> Class: ...
@overload
def record(*, eq: bool = True, repr: bool = True, slots: bool = False, frozen: bool = True) -> Callable[[Class], Class]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, eq: bool = True, repr: bool = True, slots: bool = False, frozen: bool = True) -> Any:
    """Class decorator. The options are those of `dataclass`; one that is not frozen and has `eq` is not hashable."""
    if cls is None:
        return lambda cls: _record(cls, eq, repr, slots, frozen)
    return _record(cls, eq, repr, slots, frozen)


def _record(cls: type, eq: bool, shown: bool, slots: bool, frozen: bool) -> type:
    declared: dict[str, Any] = {}  # name -> what field() made, or would make
    for base in reversed(cls.__mro__[1:]):
        declared |= vars(base).get("_declared", {})
    own = {name: kind for name, kind in get_annotations(cls).items() if not str(kind).startswith("ClassVar")}
    for name, kind in own.items():
        given = vars(cls).get(name, MISSING)
        declared[name] = f = given if isinstance(given, Field) else _Given(given)
        f.type = kind
        if f is given:
            delattr(cls, name) if f.default is MISSING else setattr(cls, name, f.default)
    made = _slotted(cls, own) if slots else cls
    shared: dict[str, Any] = {"__setattr__": _refuse, "__delattr__": _refuse} if frozen else {}
    shared |= {"_declared": declared, "__dataclass_fields__": _Fields(made), "__dataclass_params__": _PLAIN.__dataclass_params__}
    shared["__match_args__"] = tuple([name for name, f in declared.items() if f.init])
    if "__init__" not in vars(made):
        shared["__init__"] = _Initialiser(made)
    if shown and "__repr__" not in vars(made):
        shared["__repr__"] = _text
    if eq:
        shared["_compared"] = _getter([name for name, f in declared.items() if f.compare])
        shared |= {"__eq__": _equal} if "__eq__" not in vars(made) else {}
        shared |= {"__hash__": _hash if frozen else None} if vars(made).get("__hash__") is None else {}
    if slots:
        shared |= {"__getstate__": _state, "__setstate__": _restore}
    for name, value in shared.items():
        setattr(made, name, value)
    return made


class _Given:
    """The same as `field(default=…)`, made in a tenth of the time."""

    default_factory, init, repr, compare = MISSING, True, True, True
    type: Any

    def __init__(self, default: Any) -> None:
        self.default = default


def _slotted(cls: type, own: dict[str, Any]) -> type:
    """The class once more, with slots for its `own` fields."""
    there = {name for base in cls.__mro__ for name in vars(base).get("__slots__", ())}
    held = {name: x for name, x in vars(cls).items() if name not in own and name not in ("__dict__", "__weakref__")}
    made = type(cls)(cls.__name__, cls.__bases__, held | {"__slots__": tuple([name for name in own if name not in there])})
    made.__qualname__ = cls.__qualname__
    return made


class _Fields:
    """The dict of fields by which `dataclasses` knows a class, made when it is first asked for."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __get__(self, made: Any, _: Any = None) -> dict[str, Field[Any]]:
        found = self._cls._declared.items()
        given = [(name, f.type, f if isinstance(f, Field) else field(default=f.default)) for name, f in found]
        alike: Any = make_dataclass("Alike", given, init=False, repr=False, eq=False, namespace={"__doc__": "."})
        self._cls.__dataclass_fields__ = found = alike.__dataclass_fields__
        return found


class _Initialiser:
    """`__init__` of a record, written when it is first asked for: most starts need half of them."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __get__(self, made: Any, _: Any = None) -> Callable[..., None]:
        self._cls.__init__ = found = _initialiser(self._cls)
        return found if made is None else found.__get__(made)  # type: ignore[attr-defined]


def _initialiser(cls: Any) -> Callable[..., None]:
    """`__init__`, which assigns each field, and then calls `__post_init__` if there is one."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_each": _each, "_missing": MISSING, "_names": (fields := list[str]())}
    params, defaults, kinds = ["self"], list[Any](), list[str]()
    for name, f in cls._declared.items():
        makes = f.default_factory is not MISSING
        if not makes and not f.init:
            continue  # `__post_init__` sets it
        if f.init:
            params.append(name)
            if makes or f.default is not MISSING:
                defaults.append(f.default)  # MISSING: one is made
            elif defaults:
                raise TypeError(f"non-default argument {name!r} of {cls.__name__} follows default arguments")
        slot, i = getattr(cls, name, None), len(kinds)
        fields.append(name)
        names |= {f"_name{i}": name, f"_make{i}": f.default_factory}
        if isinstance(slot, MemberDescriptorType):  # 0.47 µs instead of 0.63 for two fields
            names[f"_put{i}"] = slot.__set__
        kinds.append("p" * (f"_put{i}" in names) + "m" * makes + "t" * f.init)
    code = _template(tuple(kinds), hasattr(cls, "__post_init__"))
    code = code.replace(co_varnames=tuple(params), co_qualname=f"{cls.__qualname__}.__init__")
    made = FunctionType(code, names, "__init__", tuple(defaults))
    made.__module__ = cls.__module__
    made.__annotations__ = {name: cls._declared[name].type for name in params[1:]} | {"return": None}
    return made


@cache
def _template(kinds: tuple[str, ...], then: bool) -> CodeType:
    """The code of an `__init__`, whose parameters are to be named: compiling it takes ten times as long as that. A kind of field
    has the letters of what it has: (p)ut of a slot, (m)ake a default, (t)ake an argument. `then`: there is a `__post_init__`."""
    params, values = ["self", *(f"x{i}" for i, kind in enumerate(kinds) if "t" in kind)], list[str]()
    for i, kind in enumerate(kinds):
        made = f"_make{i}() if x{i} is _missing else x{i}" if "t" in kind else f"_make{i}()"
        values.append(made if "m" in kind else f"x{i}")
    puts = (f"_put{i}(self, " if "p" in kind else f"_set(self, _name{i}, " for i, kind in enumerate(kinds))
    lines = [f"{put}{value})" for put, value in zip(puts, values)]
    lines = lines if len(kinds) <= MANY else [f"_each(self, _names, ({', '.join(values)}))"]  # half the time to compile
    lines += ["self.__post_init__()"] if then else []
    names: dict[str, Any] = {}
    exec(f"def __init__({', '.join(params)}):\n " + ("\n ".join(lines) or "pass"), names)
    return names["__init__"].__code__


def _each(self: Any, names: list[str], values: tuple[Any, ...]) -> None:
    for name, value in zip(names, values):
        object.__setattr__(self, name, value)


def field_names(cls: Any) -> list[str]:
    """Names of a record's fields, in order of declaration."""
    return list(cls._declared)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of these attributes as a tuple."""
    if len(names) > 1:
        return staticmethod(attrgetter(*names))
    return staticmethod((lambda x: (getattr(x, names[0]),)) if names else lambda x: ())


def _refuse(self: Any, name: str, value: Any = None) -> NoReturn:
    raise FrozenInstanceError(f"cannot change field {name!r} of a {type(self).__name__}: it is immutable")


def _text(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, f in self._declared.items() if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _equal(self: Any, other: object) -> Any:
    if self.__class__ is not other.__class__:
        return NotImplemented
    return self is other or self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self._declared]


def _restore(self: Any, state: list[Any]) -> None:
    for name, value in zip(self._declared, state, strict=True):
        object.__setattr__(self, name, value)


__all__ = ["field", "field_names", "record"]

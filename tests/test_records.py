"""rlx.records: a record is to its users what a frozen dataclass is."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from rlx.garbage import Uncollected
from rlx.records import record


def declared(make: Callable[..., Any], **how: Any) -> tuple[Any, Any]:
    """A class and a subclass of it, declared by `make`."""

    @make(**how)
    class Point:
        """Documented."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        hidden: str = field(default="h", repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "hidden", self.hidden.upper())

    @make(**how)
    class Named(Point):
        name: str = "n"
        made: dict[str, int] = field(default_factory=dict, init=False, compare=False)

    return Point, Named


@record
class Pair:
    a: int
    b: tuple[int, ...] = ()


@record(slots=True)
class Slotted:
    a: int
    b: tuple[int, ...] = ()


@record(eq=False)
class Alone:
    a: int


@pytest.mark.parametrize("how", [{}, {"eq": False}, {"repr": False}], ids=str)
def test_it_is_made_as_a_frozen_dataclass_is(how: dict[str, bool]) -> None:
    plain, ours = declared(dataclass, frozen=True, **how), declared(record, **how)
    for a, b in zip(plain, ours):
        first, second = a(1, tags=["t"], hidden="q"), b(1, tags=["t"], hidden="q")
        assert vars(first) == vars(second) and asdict(first) == asdict(second)
        assert [(f.name, f.type) for f in fields(a)] == [(f.name, f.type) for f in fields(b)]
        assert list(inspect.signature(a).parameters) == list(inspect.signature(b).parameters)
        assert (a(1) == a(1, 2)) == (b(1) == b(1, 2)) and (a(1) == a(1, 3)) == (b(1) == b(1, 3))
        assert (hash(a(1)) == hash(a(1))) == (hash(b(1)) == hash(b(1)))
        assert vars(replace(second, x=5)) == vars(replace(first, x=5)) and is_dataclass(b)
        assert a.__match_args__ == b.__match_args__
        assert (repr(first) == object.__repr__(first)) == (repr(second) == object.__repr__(second))
    assert how.get("repr") is False or repr(plain[1](1)) == repr(ours[1](1))
    assert ours[0](1).tags is not ours[0](1).tags


def test_values_of_other_classes_are_not_equal() -> None:
    assert Pair(1) != Slotted(1) and Pair(1) != (1, ()) and Alone(1) != Alone(1) and len({Pair(1), Pair(1), Pair(2)}) == 2
    base, derived = declared(record)
    assert base(1) != derived(1)


@pytest.mark.parametrize("value", [Pair(1, (2,)), Slotted(1, (2,))], ids=["plain", "slots"])
def test_it_cannot_be_changed_and_copies_and_pickles_are_equal(value: Any) -> None:
    for change in (lambda: setattr(value, "a", 2), lambda: delattr(value, "a"), lambda: setattr(value, "new", 2)):
        with pytest.raises(FrozenInstanceError):
            change()
    assert value.a == 1 and hasattr(value, "__dict__") == isinstance(value, Pair)
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


def test_missing_and_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"Pair\.__init__\(\) missing 1 required positional argument: 'a'"):
        Pair()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        Pair(1, c=2)  # type: ignore[call-arg]


def test_one_that_is_not_frozen_can_be_changed_and_is_not_hashable() -> None:
    plain, ours = declared(dataclass), declared(record, frozen=False)
    for a, b in zip(plain, ours):
        first, second = a(1, tags=["t"]), b(1, tags=["t"])
        first.x = second.x = 7
        assert vars(first) == vars(second) and second == b(7, tags=[]) and a.__hash__ is b.__hash__ is None


def test_many_fields_are_set_as_few_are() -> None:
    names = [f"f{i}" for i in range(40)]
    made = record(type("Many", (), {"__annotations__": dict.fromkeys(names, "int"), "f39": 39}))
    wanted = {name: i for i, name in enumerate(names)}
    assert vars(made(*range(39))) == vars(made(*range(30), **{f"f{i}": i for i in range(30, 39)})) == wanted


def test_a_field_without_a_default_cannot_follow_one_that_has_it() -> None:
    with pytest.raises(TypeError, match="non-default argument 'b' of Wrong follows default arguments"):
        record(type("Wrong", (), {"__annotations__": {"a": "int", "b": "int"}, "a": 1}))(1, 2)


def test_dataclasses_is_told_of_the_fields_when_it_asks() -> None:
    point, named = declared(record)
    assert not isinstance(vars(named)["__dataclass_fields__"], dict)
    assert [f.name for f in fields(named)] == ["x", "y", "tags", "hidden", "name", "made"]
    assert isinstance(vars(named)["__dataclass_fields__"], dict) and not isinstance(vars(point)["__dataclass_fields__"], dict)

    @dataclass
    class Mixed(point):
        more: int = 3

    assert [f.name for f in fields(Mixed)] == ["x", "y", "tags", "hidden", "more"]


def test_its_init_is_written_when_it_is_first_asked_for() -> None:
    point, named = declared(record)
    assert not inspect.isfunction(vars(point)["__init__"])
    assert [*inspect.signature(named).parameters] == ["x", "y", "tags", "hidden", "name"]
    assert inspect.isfunction(vars(named)["__init__"]) and not inspect.isfunction(vars(point)["__init__"])
    assert point(3).x == 3 and point.__init__ is vars(point)["__init__"]


@pytest.mark.parametrize("stays", [True, False])
def test_objects_that_stay_are_old_afterwards_and_others_young(stays: bool) -> None:
    """A compile that is dropped leaves garbage, which a collection of everything would find much later."""
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(0)  # nothing is collected by itself while the test looks
    gc.unfreeze()
    with Uncollected(stays):
        made = [[] for _ in range(5000)]
        assert not gc.isenabled()
    young = {id(x) for x in gc.get_objects(generation=0)}
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert len(young & {id(x) for x in made}) == (0 if stays else 5000)
    gc.disable()
    with Uncollected(stays):
        pass
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    with Uncollected(stays):
        pass
    assert gc.get_freeze_count() > 0
    gc.set_threshold(*usual)
    if not frozen:
        gc.unfreeze()


def test_all_of_them_share_their_functions() -> None:
    """The reason for records: nothing but `__init__` is compiled for each."""
    shared = ("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__")
    assert all(getattr(Pair, name) is getattr(Slotted, name) for name in shared)

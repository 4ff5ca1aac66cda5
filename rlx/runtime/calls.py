"""Calls of a CompiledGraph in machine code, where its executable offers them (rlx.host.gate).

A method's Python body stays what it means: machine code does the plain case, and leaves it all others. What is made holds the
graph's `_core`, which lacks what is made: so nothing holds itself, and memory goes back with the last reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import numpy as np

from rlx.driver.backend import Executable
from rlx.errors import BindingError
from rlx.host.gate import FastCall
from rlx.runtime.binding import by_name, by_position

M = TypeVar("M", bound=Callable[..., Any])


class _Method:
    """A method that becomes a function in machine code at its first use on an object, if it can; then the object has it."""

    def __init__(self, body: Any, form: Literal["list", "dict"], result: Callable[[Any], Any], makes: bool) -> None:
        self._body, self._result = body, result
        self._wanted = partial(FastCall, body.__name__, body.__doc__, form, makes=makes)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        body, core = self._body, getattr(owner, "_core", None)
        if core is not None:
            wanted = self._wanted(MethodType(body, core), self._result(core), core._gate)
            if (made := core._executable.fast_call(wanted)) is not None:
                vars(owner)[body.__name__] = made
                return made
        return body if owner is None else MethodType(body, owner)


def in_machine_code(form: Literal["list", "dict"], result: Callable[[Any], Any], makes: bool = False) -> Callable[[M], M]:
    """Decorator of a method of one argument, of that form, and what gives its result (see FastCall)."""
    return lambda body: cast(M, _Method(body, form, result, makes))


class Beginning:
    """A context for the checks before a run: an error in it means that this rank does not begin the run. The others, who do,
    hear of it at once."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._executable.run_refuse()


def copies(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [a.copy() for a in arrays]


def bound(graph: Any, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> Callable[[], tuple[Any, ...]]:
    """CompiledGraph.bound."""
    named = isinstance(inputs, Mapping)
    for given in inputs.values() if named else inputs if isinstance(inputs, Sequence) else ():
        if not isinstance(given, np.ndarray):
            raise BindingError(f"an input is bound to a {type(given).__name__}: only a numpy array can be read at each call")
    arrays = by_name("input", inputs, graph._inputs) if named else by_position("input", inputs, graph._inputs)
    for decl, array, apart in zip(graph._inputs, arrays, graph._apart(arrays)):
        if array is not apart:
            raise BindingError(f"what is bound to input {decl.name!r} lies in the memory of another input, which would change it")
    core, run_slots = graph._core or graph, type(graph).run_slots
    outputs = None
    if not graph.options.debug and not graph._staged:
        outputs = tuple(v.view() for v in graph._output_views)
        for view in outputs:
            view.flags.writeable = False

    def slow() -> tuple[Any, ...]:
        run_slots(core, arrays)
        return tuple(core.outputs_view()) if outputs is None else outputs

    if graph._core is None or outputs is None:
        return slow
    doc = "Run on the arrays that are bound; the outputs, in place."
    wanted = FastCall("bound", doc, "none", slow, outputs, core._gate, arrays=arrays)
    return core._executable.fast_call(wanted) or slow

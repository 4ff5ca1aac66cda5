"""Methods of CompiledGraph as machine code, if its executable supports that (rlx.host.gate).

The Python body of a method defines its behaviour. Machine code handles the common case and calls the Python body for all others.
Generated functions hold the graph's `_core` instead of the graph, to avoid a reference cycle: memory is freed with the last
reference.
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
from rlx.runtime.outputs import OutputView

M = TypeVar("M", bound=Callable[..., Any])


class _Method:
    """Descriptor of a method. At its first use on an object it generates a machine code function, if possible, and stores it in
    the object."""

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
    """Decorator for a method with one argument. `form`, `makes`: as in FastCall. `result`: from the graph to FastCall.result."""
    return lambda body: cast(M, _Method(body, form, result, makes))


class Beginning:
    """A context manager for the checks before a run. After an error this rank does not start the run, and the other ranks are
    told at once."""

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
        if not isinstance(given, np.ndarray) and graph._executable.adopt(given) is None:
            raise BindingError(f"bound takes numpy arrays, which each call reads again; got {type(given).__name__}")
    adopt = graph._executable.adopt
    arrays = by_name("input", inputs, graph._inputs, adopt) if named else by_position("input", inputs, graph._inputs, adopt)
    given = [inputs[d.name] for d in graph._inputs] if isinstance(inputs, Mapping) else list(inputs)
    for decl, array, apart in zip(graph._inputs, arrays, graph._apart(arrays)):
        if array is not apart:
            raise BindingError(f"the array bound to input {decl.name!r} is in another input's slot, which each call overwrites")
    core, run_slots = graph._core or graph, type(graph).run_slots
    outputs = None
    if not graph.options.debug:
        in_place = [OutputView(core, i) if v is None else v.view() for i, v in enumerate(graph._output_views)]
        for view in in_place:
            if isinstance(view, np.ndarray):
                view.flags.writeable = False
        outputs = tuple(in_place)

    def slow(*args: Any, **named: Any) -> tuple[Any, ...]:
        if args or named:
            how = "write new contents into them, or call the compiled graph on other arrays"
            raise BindingError(f"a bound call takes no arguments, since it reads the arrays that bound was given: {how}")
        run_slots(core, given)
        return tuple(core.outputs_view()) if outputs is None else outputs

    if graph._core is None or outputs is None:
        return slow
    doc = "Run on the bound arrays. Returns the outputs in place."
    wanted = FastCall("bound", doc, "none", slow, outputs, core._gate, arrays=given)
    return core._executable.fast_call(wanted) or slow


def positional(
    graph: Any, slow: Callable[[Any], Any], build: Callable[[list[np.ndarray]], Any] | None
) -> Callable[[Any], Any] | None:
    """A function of a list or tuple of arrays that runs and returns fresh outputs: build(outputs), or without it the only one.
    Arrays of another number, dtype or dims, strided ones and all other cases go to `slow`. None: not supported, or the host does
    not see the outputs."""
    views = graph._output_views
    if graph._core is None or any(v is None for v in views):
        return None
    result = views[0].copy if build is None else lambda: build([v.copy() for v in views])
    wanted = FastCall("run", "Run once on arrays by position.", "list", slow, result, graph._core._gate, makes=True)
    return graph._core._executable.fast_call(wanted)

"""An ONNX model that runs: compiled for the dims of its inputs when they are first seen, and again when these change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import onnx

from rlx.errors import BindingError, InputDTypeError, MissingInputError, UnknownNameError, known
from rlx.forks import Lock
from rlx.frontends.onnx.importer import Importer, check, flat, from_onnx
from rlx.frontends.onnx.proto import Source, numpy_type, stored
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape
from rlx.runtime import CompiledGraph, CompileOptions, Session
from rlx.runtime.weights import store_of

REMEMBERED = 32  # compiled signatures of a model; the oldest is dropped first


class _Compiled(NamedTuple):
    compiled: CompiledGraph | None  # None: all outputs are known
    names: tuple[str, ...]  # inputs of the graph
    outputs: tuple[Any, ...]  # an array, a name of an output of the graph, a list of them, or None, for each output
    counts: Mapping[str, tuple[int, str]]  # output of the graph -> the axis that is cut, and the output that says where


class OnnxModel:
    """A model that is compiled for the dims and dtypes of its inputs, once for each combination. Inputs that hold shapes or axes
    are compiled for their contents. `reasons`: why it was compiled, once for each time."""

    def __init__(
        self, model: onnx.ModelProto | bytes | str | PathLike[str], *, session: Session | None = None, device: str = "cpu",
        options: CompileOptions | None = None,
    ) -> None:  # fmt: skip
        self._source = model if isinstance(model, Source) else Source(model)
        self.session, self.options = session or Session(device), options or CompileOptions()
        self.reasons: list[str] = []
        self._kinds = {i.name: i.type for i in self._source.inputs}
        self._outputs = list(self._source.model.graph.output)
        self._known: set[str] = set()  # inputs whose contents are compiled in
        self._kept: OrderedDict[Any, _Compiled] = OrderedDict()
        self._params: Any = None
        self._lock = Lock()

    @property
    def inputs(self) -> list[str]:
        return list(self._kinds)

    @property
    def outputs(self) -> list[str]:
        return [o.name for o in self._outputs]

    def graph(self, dims: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None) -> Graph:
        """The graph of the model; see rlx.from_onnx."""
        return from_onnx(self._source, dims, values)  # type: ignore[arg-type]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run once on named arrays: lists of them for sequences, None for an optional that is absent. Returns a fresh array for
        each output, or a list or None."""
        given = self._given(inputs)
        with self._lock:
            found = self._get(given)
            feeds = {name: x for key, value in given.items() for name, x in flat(key, value)}
            results: dict[str, np.ndarray] = {}
            if found.compiled is not None:
                arrays = found.compiled.run({name: feeds[name] for name in found.names})
                results = {o.name: a for o, a in zip(found.compiled.outputs, arrays)}
        for name, (axis, count) in found.counts.items():
            results[name] = results[name][(slice(None),) * axis + (slice(int(results[count])),)]
        return {o.name: _built(tree, results, _element(o.type)) for o, tree in zip(self._outputs, found.outputs)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once on inputs by position and by name. Returns an array, or a tuple if the model has several outputs."""
        if len(args) > len(self._kinds):
            raise BindingError(f"the model has {len(self._kinds)} inputs ({known(self._kinds)}), got {len(args)} by position")
        results = tuple(self.run({**dict(zip(self._kinds, args)), **kwargs}).values())
        return results[0] if len(results) == 1 else results

    # -- signatures

    def _given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if extra := sorted(set(inputs) - set(self._kinds)):
            raise UnknownNameError(f"the model has no input {extra[0]!r}; it has {known(self._kinds)}")
        missing = [n for n, k in self._kinds.items() if n not in inputs and not k.HasField("optional_type")]
        if missing:
            raise MissingInputError(f"no value for input {known(missing)}")
        return {name: _arrays(name, inputs.get(name), kind) for name, kind in self._kinds.items()}

    def _get(self, given: Mapping[str, Any]) -> _Compiled:
        while True:
            signature = {name: _described(x, name in self._known) for name, x in given.items()}
            key = tuple(signature.items())
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            importer = Importer(self._source, {}, {n: _shown(x, n in self._known) for n, x in given.items()})
            importer.run()
            fresh = {n for n in importer.wanted if n in given} - self._known
            if not fresh:
                break
            self._known |= fresh
        check(importer)
        made = self._compile(importer)
        self.reasons.append(self._reason(signature))
        self._kept[key] = made
        if len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)
        return made

    def _compile(self, importer: Importer) -> _Compiled:
        graph = importer.graph
        names = dict(zip(graph.outputs, graph.output_names))
        trees = []
        for info, x in zip(self._outputs, importer.outputs):
            kept = iter(flat(info.name, x))
            trees.append(_tree(x, kept))
        counts = {n: (b.axis, names[b.count]) for v, n in names.items() if (b := importer.bounds.get(v))}
        compiled = None
        if graph.outputs:
            compiled = self.session.compile(graph, self.options, self._params)
            if self._params is None:
                self._params = store_of(compiled.params)
            compiled.set_params({name: graph.weights[name] for name in compiled.missing_params()})
        return _Compiled(compiled, tuple(str(v.name) for v in graph.inputs), tuple(trees), counts)

    def _reason(self, new: Mapping[str, Any]) -> str:
        if not self._kept:
            return "first call"
        last = dict(next(reversed(self._kept)))
        changed = [f"{n} is {_text(x)}, was {_text(last.get(n))}" for n, x in new.items() if x != last.get(n)]
        return "; ".join(changed) or "dropped, as too many were kept"


def _arrays(name: str, x: Any, kind: onnx.TypeProto) -> Any:
    """An input in the dtypes that rlx keeps it in."""
    if kind.HasField("optional_type"):
        return None if x is None else _arrays(name, x, kind.optional_type.elem_type)
    if kind.HasField("sequence_type"):
        if not isinstance(x, (list, tuple)):
            raise BindingError(f"input {name!r} is a sequence, a list of arrays, got {type(x).__name__}")
        return [_arrays(f"{name}.{i}", e, kind.sequence_type.elem_type) for i, e in enumerate(x)]
    want = numpy_type(kind.tensor_type.elem_type, f"input {name!r}")
    array = np.asarray(x)
    if array.dtype not in (want, stored(want)):
        if isinstance(x, np.ndarray) or array.dtype.kind not in "biuf":
            raise InputDTypeError(f"input {name!r} is of {want}, got an array of {array.dtype}")
        array = array.astype(want)
    return array.astype(stored(want), copy=False)


def _described(x: Any, contents: bool) -> Any:
    if isinstance(x, list):
        return tuple(_described(e, contents) for e in x)
    if x is None:
        return None
    return (str(x.dtype), x.shape, x.tobytes()) if contents else (str(x.dtype), x.shape)


def _text(x: Any) -> str:
    if not (isinstance(x, tuple) and x and isinstance(x[0], str)):
        return "absent" if x is None else f"a sequence of {len(x)}"
    shown = f"{x[0]}[{','.join(map(str, x[1]))}]"
    return shown if len(x) == 2 else f"{shown} {np.frombuffer(x[2], x[0]).tolist()!s:.60}"


def _shown(x: Any, contents: bool) -> Any:
    """What an import is told about an input."""
    if isinstance(x, list):
        return [_shown(e, contents) for e in x]
    return x if x is None or contents else Shape(x.shape, x.dtype)


def _tree(x: Any, names: Iterator[tuple[str, Any]]) -> Any:
    """An output with the names of the graph's outputs in place of Values."""
    if isinstance(x, list):
        return [_tree(e, names) for e in x]
    if x is None:
        return None
    return next(names)[0]


def _element(kind: onnx.TypeProto) -> int:
    while not kind.HasField("tensor_type"):
        if kind.HasField("sequence_type"):
            kind = kind.sequence_type.elem_type
        elif kind.HasField("optional_type"):
            kind = kind.optional_type.elem_type
        else:
            return 0
    return kind.tensor_type.elem_type


def _built(tree: Any, results: Mapping[str, np.ndarray], code: int) -> Any:
    if isinstance(tree, list):
        return [_built(e, results, code) for e in tree]
    if tree is None:
        return None
    array = results[tree]
    if not code:
        return array
    want = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    return array.astype(want) if array.dtype != want and array.dtype == stored(want) else array


__all__ = ["OnnxModel"]

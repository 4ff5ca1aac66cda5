"""An ONNX model that runs: compiled for the dims of its inputs when they are first seen, and again when these change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from rlx.errors import (  # isort: skip
    BindingError, InputDTypeError, InputShapeError, MissingInputError, ModelError, UnknownNameError, Unsupported,
    check_apart, known, whole,
)  # fmt: skip
from rlx.forks import Lock
from rlx.frontends.onnx.call import flat, is_text
from rlx.frontends.onnx.importer import Importer, check, from_onnx, imported
from rlx.frontends.onnx.proto import TEXT, Source, dims_of, numpy_type, stored, text_of
from rlx.frontends.onnx.states import MASK, MORE, differing, in_place, pairs
from rlx.ir.dtype import as_dtype
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape
from rlx.ir.shown import Shown, counted
from rlx.runtime import CompiledGraph, CompileOptions, HandleStore, ParamStore, Session
from rlx.runtime.session import session_of, with_more

REMEMBERED = 32  # compiled signatures of a model; the oldest is dropped first


class Input(NamedTuple):
    """An input or output of a model. `shape`: None for a sequence, for text, and where the model does not declare it. `kind`:
    "tensor", "text", "sequence" or "optional"."""

    name: str
    shape: Shape | None
    kind: str = "tensor"


class _Compiled(NamedTuple):
    compiled: CompiledGraph | None  # None: all outputs are known
    names: tuple[str, ...]  # inputs of the graph
    outputs: tuple[Any, ...]  # a name of an output of the graph, an array of text, a list of them, or None, for each output
    counts: Mapping[str, tuple[int, str]]  # output of the graph -> the axis that is cut, and the output that says where
    rows: int  # that a run adds to the states


class OnnxModel(Shown):
    """A model that is compiled for the dims and dtypes of its inputs, once for each combination. Inputs that hold shapes or axes
    are compiled for their contents. `reasons`: why it was compiled, once for each time."""

    def __init__(
        self, model: Source | onnx.ModelProto | bytes | str | PathLike[str], *, session: Session | None = None,
        device: str = "cpu", options: CompileOptions | None = None, states: int | None = None,
    ) -> None:  # fmt: skip
        """`states`: so many rows of past keys and values are kept on the device between runs, if the model has inputs and outputs
        for them (past_key_values.0.key and present.0.key), which are then no arguments and results of a run; attention_mask is
        given for the filled rows and the new ones, and padded for the others.

        ModelError: the file is damaged, or contradicts itself, or it has no inputs for `states`, or none that hides rows of them.
        Unsupported nodes are refused by the first run, or `compile`."""
        states = None if states is None else whole("states, rows of past keys and values,", states, 1)
        self._source = model if isinstance(model, Source) else Source(model)
        self.session, self.options, self.states = session_of(session, device), with_more(options), states
        self.reasons: list[str] = []
        self.filled = 0  # rows of the states
        self._pairs = pairs(self._source) if states else {}
        if states and not self._pairs:
            raise ModelError(f"{self._source.name} has no past… inputs with present… outputs, which states= is for: leave it out")
        self._in_place = in_place(self._source, self._pairs)
        if self._pairs and not self._in_place and all(i.name != MASK for i in self._source.inputs):
            raise ModelError(
                f"{self._source.name} has no input {MASK!r}, which would hide the rows of the states that are not filled: leave "
                "states= out, and give the past to each run"
            )
        self._kinds = {i.name: i.type for i in self._source.inputs if i.name not in self._pairs}
        gone = set(self._pairs.values())
        self._outputs = [o for o in self._source.model.graph.output if o.name not in gone]
        self._known: set[str] = set()  # inputs whose contents are compiled in
        self._kept: OrderedDict[Any, _Compiled] = OrderedDict()
        self._params, self._handles = ParamStore(), HandleStore()
        self._lock = Lock()

    def _line(self) -> str:
        names = ", ".join(self._kinds), ", ".join(o.name for o in self._outputs)
        return f"{self._source.name} on {self.session.device}: {names[0]} -> {names[1]}; {counted(len(self._kept), 'signature')}"

    @property
    def proto(self) -> onnx.ModelProto:
        """The model, without the bytes of large initialisers of a file."""
        return self._source.model

    @property
    def path(self) -> Path | None:
        """Of its file, if it is from one."""
        return self._source.path

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Name and shape of every input. Named dims may have any size."""
        return tuple(Input(name, _declared(name, kind), _sort(kind)) for name, kind in self._kinds.items())

    @property
    def outputs(self) -> tuple[Input, ...]:
        return tuple(Input(o.name, _declared(o.name, o.type), _sort(o.type)) for o in self._outputs)

    # -- graphs and executables

    def graph(self, dims: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None) -> Graph:
        """The graph of the model; see rlx.from_onnx."""
        return from_onnx(self._source, dims, values)

    def compile(self, dims: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None) -> CompiledGraph:
        """An executable with the weights, for these sizes of named dims, and these contents or Shapes of inputs. All executables
        of a model share the weights."""
        return self.compiled(self.graph(dims, values))

    def executable(self, inputs: Mapping[str, Any]) -> CompiledGraph | None:
        """The executable that a run on these inputs uses, compiled if need be. None: all outputs are known without a run."""
        with self._lock:
            return self._get(self._given(inputs)).compiled

    def initialisers(self) -> dict[str, np.ndarray]:
        """The initialisers of the model's graph."""
        return {t.name: self._source.array(t) for t in self.proto.graph.initializer}

    def imported(self, inputs: Mapping[str, Any]) -> Importer:
        """The import for such inputs: its graph, and the values of the model by name."""
        with self._lock:
            return self._import(self._given(inputs))

    def save(self, path: str | PathLike[str], inputs: Mapping[str, Any], weights: bool = True) -> int:
        """Write the executable for such inputs to an artifact, for rlx.load. Returns its size in bytes. Outputs whose size
        depends on data are whole there, beside their counts. Unsupported: an output is text."""
        check_apart(self._source.path, path)
        with self._lock:
            found = self._get(self._given(inputs))
        if text := [o.name for o, tree in zip(self._outputs, found.outputs) if any(is_text(x) for _, x in flat("", tree))]:
            raise Unsupported(f"{self._source.name}: output {known(text)} is text, which an artifact does not hold")
        if found.compiled is None:
            raise BindingError(f"{self._source.name} has nothing to save: its outputs are known without a run")
        return found.compiled.save(path, weights=weights)

    # -- running

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Run once on arrays: lists of them for sequences, None for an optional that is absent. Returns a fresh array for each
        output (or a list, or None): {name: array} for inputs by name, a list for inputs by position."""
        if isinstance(inputs, (list, tuple)):
            return list(self.run(self._named(inputs)).values())
        if not isinstance(inputs, Mapping):
            raise BindingError(f"run takes {{name: array}}, or a list of arrays by position; got {type(inputs).__name__}")
        with self._lock:
            given = self._given(inputs)
            found = self._get(given)
            self._check_room(found.rows)
            feeds = {name: x for key, value in given.items() for name, x in flat(key, value)}
            results: dict[str, np.ndarray] = {}
            if found.compiled is not None:
                arrays = found.compiled.run({name: feeds[name] for name in found.names})
                results = {o.name: a for o, a in zip(found.compiled.outputs, arrays)}
            self.filled += found.rows
        for name, (axis, count) in found.counts.items():
            results[name] = results[name][(slice(None),) * axis + (slice(int(results[count])),)]
        return {o.name: _built(tree, results, _element(o.type)) for o, tree in zip(self._outputs, found.outputs)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once on inputs by position and by name. Returns an array, or a tuple if the model has several outputs."""
        given = self._named(args)
        if twice := given.keys() & kwargs:
            raise BindingError(f"input {known(twice)} is given by position and by name")
        results = tuple(self.run({**given, **kwargs}).values())
        return results[0] if len(results) == 1 else results

    def reset(self) -> None:
        """States are empty again."""
        with self._lock:
            self._handles, self.filled = HandleStore(), 0
            for found in self._kept.values():
                if found.compiled is not None:
                    found.compiled.use_handles(self._handles)

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        if len(inputs) > len(self._kinds):
            raise BindingError(f"the model has {len(self._kinds)} inputs ({known(self._kinds)}), got {len(inputs)} by position")
        return dict(zip(self._kinds, inputs))

    def _given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if extra := sorted(set(inputs) - set(self._kinds)):
            raise UnknownNameError(f"the model has no input {extra[0]!r}; it has {known(self._kinds)}")
        missing = [n for n, k in self._kinds.items() if n not in inputs and not k.HasField("optional_type")]
        if missing:
            raise MissingInputError(f"no value for input {known(missing)}")
        given = {name: _arrays(name, inputs.get(name), kind) for name, kind in self._kinds.items()}
        if self._pairs and MASK in given and given[MASK].ndim == 2:
            whole, states = given[MASK].shape[1], self.states or 0
            self._check_room(whole - self.filled)
            room = (0, states - whole) if self._in_place else (states - self.filled, 0)  # rows that are not filled
            given[MASK] = np.pad(given[MASK], ((0, 0), room))
        return given

    def _check_room(self, rows: int) -> None:
        if self._pairs and self.filled + rows > (self.states or 0):
            raise InputShapeError(f"the states hold {self.states} rows, {self.filled} are filled, and {rows} more come: reset()")

    # -- signatures

    def _get(self, given: Mapping[str, Any]) -> _Compiled:
        if (found := self._kept.get(key := self._key(given))) is not None:
            self._kept.move_to_end(key)
            return found
        importer = self._import(given)
        if self._pairs and not self._in_place and given[MASK].ndim == 2:
            longer = {**given, MASK: np.pad(given[MASK], ((0, 0), (MORE, 0)))}
            if found := differing(importer.graph, self._import(longer, MORE).graph):
                raise ModelError(
                    f"{self._source.name}: {found} depends on the rows that the states have room for, as positions that are "
                    "counted by the dims of the past: export it with position_ids as an input, or leave states= out"
                )
        key = self._key(given)  # which has the contents of inputs that the import asked for
        made = self._signature(importer)
        self.reasons.append(self._reason(dict(key)))
        self._kept[key] = made
        if len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)
        return made

    def _key(self, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return tuple((name, _described(x, name in self._known)) for name, x in given.items())

    def _import(self, given: Mapping[str, Any], more: int = 0) -> Importer:
        """An import for these inputs, and states with `more` rows: again, if it asks for the contents of some."""
        while True:
            about = {n: _shown(x, n in self._known) for n, x in given.items()}
            control = self.session.target().control and "control" not in self.options.disable
            importer = imported(self._source, self._sizes(given), about, self._pairs, (self.states or 0) + more, control)
            if self._known.issuperset(importer.wanted):
                check(importer)
                return importer
            self._known |= set(importer.wanted)

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The named dims of inputs, from arrays. InputShapeError: an array does not have the declared dims."""
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}  # the input that has set each
        for name, x in given.items():
            kind = self._kinds[name]
            if not kind.tensor_type.HasField("shape") or not isinstance(x, np.ndarray):
                continue
            dims = dims_of(name, kind, {})
            asked = f"input {name!r} is {_declared(name, kind) or f'text{dims}'}, got dims {list(x.shape)}"
            if len(dims) != x.ndim:
                raise InputShapeError(asked)
            for dim, size in zip(dims, x.shape):
                if (sizes.setdefault(dim, size) if isinstance(dim, str) else dim) != size:
                    was = f", and {dim} is {sizes[dim]} in input {first[dim]!r}" if isinstance(dim, str) else ""
                    raise InputShapeError(f"{asked}{was}")
                first.setdefault(str(dim), name)
        return sizes

    def _signature(self, importer: Importer) -> _Compiled:
        graph = importer.graph
        trees = [_tree(x, (name for name, _ in flat(info.name, x))) for info, x in zip(self._outputs, importer.outputs)]
        compiled = self.compiled(graph) if graph.outputs or graph.assigns else None
        return _Compiled(compiled, tuple(str(v.name) for v in graph.inputs), tuple(trees), importer.cuts, importer.rows)

    def compiled(self, graph: Graph) -> CompiledGraph:
        """An executable of a graph of this model, perhaps with more ops, with the weights that all executables share."""
        compiled = self.session.compile(graph, self.options, self._params, self._handles)
        compiled.set_params({name: graph.weights[name] for name in compiled.missing_params()})
        return compiled

    def _reason(self, new: Mapping[str, Any]) -> str:
        if not self._kept:
            return "first call"
        last = dict(next(reversed(self._kept)))
        changed = [f"{n} is {_text(x)}, was {_text(last.get(n))}" for n, x in new.items() if x != last.get(n)]
        return "; ".join(changed) or "dropped, as too many were kept"


def _sort(kind: onnx.TypeProto) -> str:
    plain = "text" if kind.tensor_type.elem_type == onnx.TensorProto.STRING else "tensor"
    return next((n for n in ("sequence", "optional") if kind.HasField(f"{n}_type")), plain)


def _declared(name: str, kind: onnx.TypeProto) -> Shape | None:
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    host = numpy_type(kind.tensor_type.elem_type, f"{name!r}")
    return None if host == TEXT else Shape(dims_of(name, kind, {}), as_dtype(stored(host)))


def _arrays(name: str, x: Any, kind: onnx.TypeProto) -> Any:
    """An input in the dtypes that rlx keeps it in."""
    if kind.HasField("optional_type"):
        return None if x is None else _arrays(name, x, kind.optional_type.elem_type)
    if kind.HasField("sequence_type"):
        if not isinstance(x, (list, tuple)):
            raise BindingError(f"input {name!r} is a sequence, a list of arrays, got {type(x).__name__}")
        return [_arrays(f"{name}.{i}", e, kind.sequence_type.elem_type) for i, e in enumerate(x)]
    want = numpy_type(kind.tensor_type.elem_type, f"input {name!r}")
    try:
        array = np.asarray(x)
    except ValueError:
        raise BindingError(f"input {name!r} is an array, got lists of different lengths") from None
    if want == TEXT:
        return text_of(name, array)
    if array.dtype not in (want, stored(want)):
        if isinstance(x, np.ndarray) or array.dtype.kind not in "biuf":
            how = f"convert it: array.astype({want.name!r})"
            raise InputDTypeError(f"input {name!r} is of {want}, got an array of {array.dtype}; {how}")
        with np.errstate(all="ignore"):
            given, array = array, array.astype(want)
        if array.dtype.kind in "biu" and not np.array_equal(array, given):
            raise InputDTypeError(f"input {name!r} is of {want}, which does not hold all of the numbers given")
    return array.astype(stored(want), copy=False)


def _described(x: Any, contents: bool) -> Any:
    if isinstance(x, list):
        return tuple(_described(e, contents) for e in x)
    if x is None:
        return None
    if is_text(x):
        return "text", x.shape, tuple(x.reshape(-1))
    return (str(x.dtype), x.shape, x.tobytes()) if contents else (str(x.dtype), x.shape)


def _text(x: Any) -> str:
    if not (isinstance(x, tuple) and x and isinstance(x[0], str)):
        return "absent" if x is None else f"a sequence of {len(x)}"
    shown = f"{x[0]}[{','.join(map(str, x[1]))}]"
    if len(x) == 2:
        return shown
    return f"{shown} {([*x[2]] if x[0] == 'text' else np.frombuffer(x[2], x[0]).tolist())!s:.60}"


def _shown(x: Any, contents: bool) -> Any:
    """The facts about an input that an import needs."""
    if isinstance(x, list):
        return [_shown(e, contents) for e in x]
    return x if x is None or contents or is_text(x) else Shape(x.shape, x.dtype)


def _tree(x: Any, names: Iterator[str]) -> Any:
    """An output with the names of the graph's outputs in place of tensors; text is as it is."""
    if isinstance(x, list):
        return [_tree(e, names) for e in x]
    name = None if x is None else next(names)
    return x if is_text(x) else name


def _element(kind: onnx.TypeProto) -> int:
    """0 for maps and sparse tensors."""
    for inner in ("sequence_type", "optional_type"):
        if kind.HasField(inner):
            return _element(getattr(kind, inner).elem_type)
    return kind.tensor_type.elem_type


def _built(tree: Any, results: Mapping[str, np.ndarray], code: int) -> Any:
    """An output in the element type that the model declares."""
    if isinstance(tree, list):
        return [_built(e, results, code) for e in tree]
    if tree is None:
        return None
    if is_text(tree):
        return tree.copy()
    array = results[tree]
    want = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code)) if code else array.dtype
    return array.astype(want) if array.dtype != want and array.dtype == stored(want) else array


__all__ = ["Input", "OnnxModel"]

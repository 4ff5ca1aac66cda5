"""From an ONNX model to a graph: walks the nodes and calls the handler of each operator.

Values that are known at import are computed at import: a node whose operands are all known is evaluated by the references of the
ops that its handler made. Nodes without a handler are replaced by the function body that the model, or ONNX's schema, has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import onnx

from rlx.errors import GraphError, RlxError, UnknownNameError, Unsupported, known
from rlx.frontends.onnx import functions, text
from rlx.frontends.onnx.call import UNROLLED, Call, NotKnown, Operand, Refused, flat, is_text
from rlx.frontends.onnx.counted import Bound, follow
from rlx.frontends.onnx.proto import TEXT, Source, as_dtype_or_none, check_dims, dims_of, numpy_type, stored, text_of
from rlx.frontends.onnx.states import following
from rlx.frontends.onnx.structure import opsets, schema_of
from rlx.frontends.onnx.table import find
from rlx.frontends.onnx.tidy import tidied
from rlx.ir.dtype import as_dtype
from rlx.ir.evaluate import evaluate_node
from rlx.ir.graph import CONSTANT, PARAM, Graph
from rlx.ir.handle import BufferHandle
from rlx.ir.node import Node, Value, constant, postorder
from rlx.ir.op import OPS, Kind
from rlx.ir.shape import Shape

FEW = 64  # initialisers of integers of at most this many elements are known at import, and floats of one element
FOLDED = 1 << 22  # bytes of a value that is computed at import; larger ones are computed by the compiled graph
RESHAPE = OPS["reshape"]
DEEP = 64  # graphs and function bodies inside each other
MOST = 1 << 18  # nodes that graphs and function bodies inside nodes are written out to, each time that they are


class _Missing:
    """The result of a refused node: nodes that read it are skipped."""


MISSING = _Missing()


class Skipped(RlxError):
    """A graph inside a node has refused nodes, which are listed already."""


class GraphScope:
    """The names of one graph, with those of the graphs around it. `attrs`: the attributes of the function that it is the body
    of. `place`: where it is, for messages."""

    def __init__(
        self, importer: Importer, outer: GraphScope | None, opsets: Mapping[str, int],
        attrs: Mapping[str, onnx.AttributeProto] | None = None, place: str = "",
    ) -> None:  # fmt: skip
        self.importer, self.outer, self.opsets, self.place = importer, outer, opsets, place
        self.attrs = attrs if attrs is not None else outer.attrs if outer else {}
        self.names: dict[str, Any] = {"": None}

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if self.outer is None:
            raise Refused(f"no node before it and no input makes {name!r}, which it reads")
        return self.outer[name]

    def opset(self, domain: str) -> int:
        return self.opsets.get("" if domain == "ai.onnx" else domain, 1)

    def contents(self, value: Value) -> np.ndarray | None:
        """The array of a constant or of an initialiser; None: known at run time only."""
        return self.importer.contents(value)

    def graph(self, proto: onnx.GraphProto | onnx.FunctionProto, operands: Sequence[Operand] | None = None) -> list[Any]:
        """The outputs of a graph or of a function body."""
        inputs, outputs = ([x if isinstance(x, str) else x.name for x in found] for found in (proto.input, proto.output))
        if isinstance(proto, onnx.GraphProto):
            for tensor in (*proto.initializer, *proto.sparse_initializer):
                self.names[_name(tensor)] = self.importer.initialiser(tensor, self.place)
        elif operands is not None:  # trailing operands of functions may be left out
            operands = [*operands, *[None] * (len(inputs) - len(operands))]
        if operands is not None:
            if len(inputs) != len(operands):
                raise Refused(f"{self.place}the graph has {len(inputs)} inputs, and {len(operands)} are given")
            self.names.update(zip(inputs, operands))
        for at, node in enumerate(proto.node):
            self.node(node, at)
        return [self[name] for name in outputs]

    def inner(self, proto: Any, operands: Sequence[Operand], where: str, function: functions.Body | None = None) -> list[Any]:
        """The outputs of a graph in an attribute of a node, or of the function body that stands for the node."""
        self.importer.depth += 1
        try:
            if self.importer.depth > DEEP:
                raise Refused(f"{where}: more than {DEEP} graphs and functions are inside each other")
            self.importer.nodes += len((function.proto if function else proto).node)
            if self.importer.nodes > MOST:
                raise Refused(f"{where}: with it, graphs and functions inside nodes are written out to more than {MOST} nodes")
            if function is None:
                made = GraphScope(self.importer, self, self.opsets, place=f"{where}, ").graph(proto, operands)
            else:
                scope = GraphScope(self.importer, None, function.opsets, function.attrs, f"{where}, in its function body, ")
                made = scope.graph(proto, operands)
        finally:
            self.importer.depth -= 1
        if any(x is MISSING for x in made):
            raise Skipped("its graph has refused nodes")
        return made

    def node(self, node: onnx.NodeProto, at: int) -> None:
        where = f"{self.place}node {at} {node.op_type}" + (f" {node.name!r}" if node.name else "")
        results: Sequence[Any] = [MISSING] * len(node.output)
        try:
            inputs = [self[name] for name in node.input]
            domain = "" if node.domain == "ai.onnx" else node.domain
            call = Call(self, node.op_type, domain, self.opset(domain), inputs, list(node.output), {}, where)
            call.overload = node.overload
            if any(x is MISSING for x in inputs):
                functions.check_known(self.importer.source.model, call)
            else:
                call.protos = {a.name: found for a in node.attribute if (found := self.resolved(a)) is not None}
                call.attrs = {name: self.importer.source.attribute(a) for name, a in call.protos.items()}
                results = self.applied(call)
        except Skipped:
            pass
        except NotKnown as e:
            self.importer.not_known(e)
        except Unsupported as e:
            self.importer.refusals.append(f"{where}: {e}")
        except RlxError as e:
            self.importer.refusals.append(str(e) if isinstance(e, Refused) and str(e).startswith(where) else f"{where}: {e}")
        except (IndexError, KeyError, TypeError, ValueError, ArithmeticError, MemoryError) as e:
            # ONNX has many rules for operands and attributes, and handlers check those that they see
            self.importer.refusals.append(f"{where}: its operands or attributes do not fit the operator ({e!r:.200})")
        for name, x in zip(node.output, results):
            if name:
                self.names[name] = x

    def resolved(self, a: onnx.AttributeProto) -> onnx.AttributeProto | None:
        """An attribute, or that of the function that it refers to; None: the function is called without it."""
        if not a.ref_attr_name:
            return a
        if a.ref_attr_name not in self.attrs:
            return None
        found = onnx.AttributeProto()
        found.CopyFrom(self.attrs[a.ref_attr_name])
        found.name = a.name
        return found

    def apply(
        self, op: str, domain: str, opset: int, inputs: Sequence[Operand], outputs: Sequence[str],
        attrs: dict[str, Any], where: str,
    ) -> list[Any]:  # fmt: skip
        """The results of one operator, as many as `outputs`."""
        return self.applied(Call(self, op, domain, opset, inputs, outputs, attrs, where))

    def applied(self, call: Call) -> list[Any]:
        function = functions.of_model(self.importer.source.model, call)
        handle = find(call.domain, call.op, call.opset) if function is None else None
        if handle is None:
            function = function or functions.of_schema(call)
            if function is None:
                raise functions.unknown(call)
            made: Any = tuple(self.inner(function.proto, call.inputs, call.where, function))
        elif text.moves(call):
            made = text.moved(call, handle, self.importer.folded)
        else:
            made = handle(call)
            if schema_of(call.op, call.opset, call.domain) is None:
                call.check_read()
        results = list(made) if isinstance(made, tuple) else [made]
        results += [None] * (len(call.outputs) - len(results))
        results = [self.importer.folded(x) for x in results[: len(call.outputs)]]
        if handle is not None:
            self.importer.follow(call, results)
        return results


class Importer:
    """One import. `dims`: sizes of named dims. `given`: facts about inputs: a Shape, the contents (an array) if these must be
    known, a list of them for a sequence, None for an optional that is absent."""

    def __init__(
        self, source: Source, dims: Mapping[str, int], given: Mapping[str, Any], states: Mapping[str, str] | None = None,
        capacity: int = 0, control: bool = True, written: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`states`: inputs that are states of `capacity` rows, and the outputs that are their next values. `control`: the device
        has control flow. `written`: nodes, by their places, whose graphs are written out, not made sub-graphs."""
        self.source, self.dims, self.given, self.control, self.written = source, dims, given, control, written
        self.states, self.capacity, self.rows = states or {}, capacity, 0
        self.again: set[str] = set()  # such nodes that this import found: it is no good without them
        self.flows: dict[Node, str] = {}  # control flow with sub-graphs, and its place
        self.draws: Counter[str] = Counter()  # of random numbers, by place
        self.graph = Graph(source.model.graph.name or "onnx")
        self.refusals: list[str] = []
        self.wanted: dict[str, str] = {}  # input whose contents must be known -> why
        self.bounds: dict[Value, Bound] = {}
        self.quantities: dict[Value, Any] = {}
        self.scaled: dict[Value, tuple[Value, Value]] = {}
        self.added: dict[Value, int] = {}
        self.made = source.made
        self.types: dict[Value, int] = {}  # ONNX's element type of values that are stored in a wider one
        self.named: dict[str, Any] = {}  # what the names of the model's own graph stand for
        self.weights: Mapping[str, np.ndarray] = {}  # those of the params that these depend on; the graph's are what outputs need
        self.outputs: list[Any] = []  # a Value, an array, a list of them, or None, for each output
        self.cuts: dict[str, tuple[int, str]] = {}  # output -> the axis that is cut, and the output that says where
        self.depth, self.nodes = 0, 0
        self._live: set[Value] = set()  # values that are known to depend on a leaf that is no constant
        self._constants: dict[int, tuple[np.ndarray, Value]] = {}
        self._params: set[str] = set()
        self._initial: dict[tuple[str, str], Operand] = {}  # initialisers by the place of their graph, and name

    def run(self) -> Graph:
        """The graph. NotKnown and Unsupported are not raised: see `wanted` and `refusals`."""
        proto = self.source.model.graph
        scope = GraphScope(self, None, opsets(self.source.model))
        try:
            for info in self.source.inputs:
                past = info.name in self.states
                given = self.given.get(info.name, Ellipsis)
                scope.names[info.name] = self.past(info) if past else self.input(info.name, info.type, given)
            self.outputs = scope.graph(proto)
            self.named = scope.names
        except (Refused, GraphError) as e:
            self.refusals.append(str(e))
        if self.refusals or self.wanted or self.again:
            return self.graph
        self.assign({o.name: x for o, x in zip(proto.output, self.outputs)})
        kept = [(o, x) for o, x in zip(proto.output, self.outputs) if o.name not in self.states.values()]
        self.outputs, names, values = [x for _, x in kept], [], []
        for info, x in kept:
            for name, value in flat(info.name, x):
                if not is_text(value):
                    names.append(name)
                    values.append(value if isinstance(value, Value) else self.constant(value))
        counts = {b.count: f"{name}.count" for name, v in zip(names, values) if (b := self.bounds.get(v))}
        self.graph.set_outputs([*values, *counts], [*names, *counts.values()])
        self.cuts = {n: (b.axis, counts[b.count]) for n, v in zip(names, values) if (b := self.bounds.get(v))}
        self.weights = self.graph.weights
        self.graph = tidied(self.graph, self.made)
        used = {v for n in self.graph.nodes() for v in n.inputs} | set(self.graph.outputs)
        self.graph.params = [p for p in self.graph.params if p in used]
        left = {p.name for p in self.graph.params}
        self.graph.weights = {name: array for name, array in self.graph.weights.items() if name in left}
        return self.graph

    # -- leaves

    def input(self, name: str, kind: onnx.TypeProto, given: Any) -> Operand:
        if kind.HasField("optional_type"):
            if given is None:
                return None
            kind = kind.optional_type.elem_type
        if kind.HasField("sequence_type"):
            if not isinstance(given, (list, tuple)):
                raise Refused(f"input {name!r} is a sequence: its length must be known when the model is imported")
            return [self.input(f"{name}.{i}", kind.sequence_type.elem_type, x) for i, x in enumerate(given)]
        if not kind.HasField("tensor_type"):
            raise Refused(f"input {name!r} is no tensor, sequence or optional: maps and sparse tensors are not supported")
        code = kind.tensor_type.elem_type
        host = numpy_type(code, f"input {name!r}")
        if given is not Ellipsis and not isinstance(given, Shape):
            try:
                return text_of(name, np.asarray(given)) if host == TEXT else np.asarray(given, host)
            except (ValueError, TypeError, OverflowError):
                shown = "text" if host == TEXT else host
                raise Refused(f"input {name!r}: its contents {given!r:.60} are no array of {shown}") from None
        if host == TEXT:
            raise Refused(f"input {name!r} is text, which must be known when the model is compiled: give values={{{name!r}: …}}")
        dtype = as_dtype(stored(host))
        if given is Ellipsis:
            if not kind.tensor_type.HasField("shape"):
                raise Refused(f"input {name!r} has no declared rank: give its dims when the model is imported")
            given = dims_of(name, kind, self.dims)
        value = self.graph.input(name, tuple(given), dtype)
        if dtype != as_dtype_or_none(code):
            self.types[value] = code
        return value

    def past(self, info: onnx.ValueInfoProto) -> Value:
        """The state in place of an input."""
        dims = dims_of(info.name, info.type, self.dims)
        open_ = {d for d in dims if not isinstance(d, int)}
        if len(open_) > 1:
            raise Refused(f"input {info.name!r} is a state with the open dims {known(open_)}: one of them alone may be its rows")
        dtype = as_dtype(stored(numpy_type(info.type.tensor_type.elem_type, f"input {info.name!r}")))
        return self.graph.handle(BufferHandle(info.name, tuple(self.capacity if d in open_ else d for d in dims), dtype))

    def assign(self, outputs: Mapping[str, Any]) -> None:
        """Sets the next values of states."""
        for handle in list(self.graph.handles):
            name = str(handle.name)
            if name in self.states:
                value, rows = following(name, handle, outputs[self.states[name]], self.added)
                self.rows = max(self.rows, rows)
                self.graph.assign(handle, value)

    def initialiser(self, tensor: onnx.TensorProto | onnx.SparseTensorProto, place: str) -> Operand:
        """One of the graph at this place, the same each time that the graph is written out."""
        if (found := self._initial.get((place, _name(tensor)))) is None:
            found = self._initial[place, _name(tensor)] = self._initialised(tensor)
        return found

    def _initialised(self, tensor: onnx.TensorProto | onnx.SparseTensorProto) -> Operand:
        array = self.source.array(tensor)
        if array.dtype == TEXT or array.size <= (FEW if array.dtype.kind in "iub" else 1):
            return array
        name = base = _name(tensor) or "initialiser"
        while name in self._params:  # of a graph inside a node
            name = f"{base}.{len(self._params)}"
        self._params.add(name)
        kept = stored(array.dtype)
        value = self.graph.param(name, array.shape, as_dtype(kept))
        self.graph.weights[name] = array if kept == array.dtype else array.astype(kept)
        if kept != array.dtype:
            self.types[value] = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return value

    def constant(self, array: np.ndarray) -> Value:
        """A known array as a Value, the same for the same array."""
        found = self._constants.get(id(array))
        if array.dtype == TEXT:
            raise Refused("text is where numbers are needed; operators that move, compare, split or count it take it")
        if found is None:
            kept = stored(array.dtype)
            value = constant(array if kept == array.dtype else array.astype(kept))
            if kept != array.dtype:
                self.types[value] = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            found = self._constants[id(array)] = array, value
        return found[1]

    # -- what is known at import

    def contents(self, value: Value) -> np.ndarray | None:
        """The contents of a value that depends on constants and initialisers alone; None: it depends on a run."""
        return self.evaluated(value, params=True)

    def folded(self, x: Any) -> Any:
        """`x` as an array if it depends on constants alone."""
        if isinstance(x, list):
            return [self.folded(e) for e in x]
        if not isinstance(x, Value) or x in self.types:
            return x
        found = self.evaluated(x)
        if found is None:
            self._live.add(x)
        return x if found is None else found

    def evaluated(self, x: Value, params: bool = False) -> np.ndarray | None:
        """The contents of a value, by references. None: it depends on a leaf that is not known, or is too large."""
        found: dict[Value, np.ndarray] = {}
        todo = [x]
        while todo:
            value = todo[-1]
            node = value.node
            if value in found:
                todo.pop()
            elif node.op is PARAM and params:
                found[value] = self.graph.weights[node.name or ""]
            elif not (_foldable(node) or (params and node.op is RESHAPE)) or (value in self._live and not params):
                return None
            elif missing := [v for v in node.inputs if v not in found]:
                todo += missing
            else:
                with np.errstate(all="ignore"):
                    found.update(zip(node.results, evaluate_node(node, tuple(found[v] for v in node.inputs))))
        return found[x]

    def not_known(self, e: NotKnown) -> None:
        """Records the inputs that a handler needs the contents of, or the control flow that hides them."""
        found, _ = postorder([e.value])
        if hidden := {self.flows[n] for n in found if n in self.flows}:
            self.again |= hidden
            return
        own, needed = set(self.graph.inputs), [v for n in found if not n.inputs and n.op is not CONSTANT for v in n.results]
        if not needed or not own.issuperset(needed):
            self.refusals.append(f"{e}, and these depend on state or on a value inside a loop")
        for v in own.intersection(needed):
            self.wanted.setdefault(str(v.name), str(e))

    def traced(self, where: str, make: Callable[[], Any]) -> Any:
        """The results of `make`, which makes the graphs of the node at `where` sub-graphs. None: they are to be written out. That
        is also so where they cannot be sub-graphs: the model is imported again then."""
        if where in self.written:
            return None
        refused = len(self.refusals)
        try:
            made = make()
        except NotKnown:
            raise
        except Skipped:
            made = MISSING
        except RlxError:
            made, refused = MISSING, -1
        if len(self.refusals) > refused:
            self.again.add(where)
        if made is MISSING:
            raise Skipped("its graph has refused nodes")
        return made

    def flow(self, result: Value, where: str) -> None:
        """Says that a result, perhaps moved, is of the control flow at `where`."""
        while result.node.op.kind is not Kind.CONTROL:
            (result,) = result.node.inputs
        self.flows[result.node] = where

    # -- values with a count

    def count(self, value: Value) -> tuple[int, Value] | None:
        return self.bounds.get(value)

    def bound(self, value: Value, axis: int, count: Value) -> None:
        self.bounds[value] = Bound(axis, count)

    def follow(self, call: Call, results: list[Any]) -> None:
        """Finds which results have a size that depends on data. GraphError: a result mixes data with undefined elements."""
        given = [(i, v) for i, x in enumerate(call.inputs) for _, v in flat("", x)]
        bounded = [i for i, v in given if isinstance(v, Value) and v in self.bounds]
        if not bounded or call.counts:
            return
        own = {id(v) for _, v in given}  # operands that are passed on
        inside = all(isinstance(call.inputs[i], list) for i in bounded)
        for x in (x for _, x in flat("", results) if id(x) not in own):
            if follow(x, self.bounds) is None if isinstance(x, Value) else not inside:
                call.refuse(f"the size of operand {bounded[0]} depends on data, and a result does not say how far it is defined")


def _foldable(node: Node) -> bool:
    ends = node.op.kind is Kind.CONTROL and 0 <= getattr(node.attrs, "limit", 0) <= UNROLLED
    small = all(s.is_static and s.size_bytes <= FOLDED for s in node.shapes)
    return node.op is CONSTANT or ((node.op.ahead or ends) and small)


def _name(tensor: onnx.TensorProto | onnx.SparseTensorProto) -> str:
    return tensor.values.name if isinstance(tensor, onnx.SparseTensorProto) else tensor.name


def from_onnx(
    model: Source | onnx.ModelProto | bytes | str | PathLike[str], dims: Mapping[str, int] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Graph:  # fmt: skip
    """The graph of an ONNX model: a path, the bytes of a file, or a ModelProto. `dims`: sizes of its named dims; others stay
    names. `values`: contents of inputs that must be known at import, Shapes of inputs without declared dims, lists for sequences.
    The graph's `weights` are set when it is compiled.

    ModelError: the file is damaged. Unsupported: lists every node that is refused."""
    source = model if isinstance(model, Source) else Source(model)
    check_dims(source, dims or {})
    if extra := (values or {}).keys() - {i.name for i in source.inputs}:
        have = known(i.name for i in source.inputs)
        raise UnknownNameError(f"{source.name}: the model has no input {known(extra)}; it has {have}")
    importer = imported(source, dims or {}, values or {})
    check(importer)
    if any(is_text(x) for _, x in flat("", importer.outputs)):
        raise Unsupported(f"{source.name} has an output of text, which a graph cannot have: use rlx.load")
    return importer.graph


def imported(
    source: Source, dims: Mapping[str, int], given: Mapping[str, Any], states: Mapping[str, str] | None = None,
    capacity: int = 0, control: bool = True,
) -> Importer:  # fmt: skip
    """An import that was run, with as little written out as can be."""
    written: set[str] = set()
    while True:
        importer = Importer(source, dims, given, states, capacity, control, written)
        importer.run()
        if not importer.again:
            return importer
        written |= importer.again


def check(importer: Importer) -> None:
    """Unsupported: the import was refused."""
    found = [f"{why}, and they depend on input {name!r}: give values={{{name!r}: …}}" for name, why in importer.wanted.items()]
    if refusals := list(dict.fromkeys(importer.refusals + found)):
        title = "a node is refused" if len(refusals) == 1 else f"{len(refusals)} nodes are refused"
        inside = [f"{n!r} = {x.tolist()!s:.60}" for n, x in importer.given.items() if isinstance(x, np.ndarray)]
        about = f" (compiled for the contents of inputs: {', '.join(inside)})" if inside else ""
        raise Unsupported(f"{importer.source.name}: {title}: {'; '.join(refusals)}{about}")

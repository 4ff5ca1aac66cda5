"""A node of an ONNX graph while it is imported: operands, attributes, and the ways in which a handler refuses.

An operand is a Value (known at run time), a numpy array (known at import: constants, shapes, text, and what is computed from
them), a list (a sequence), or None (left out). Initialisers of more than a few elements are params, which are Values, too;
`known` finds their contents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import onnx

from rlx.errors import RlxError
from rlx.frontends.onnx.proto import TEXT, Source
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import DimLike

Operand = Value | np.ndarray | list | None
_REQUIRED: Any = object()
ELEMENTS = 1 << 26  # of an array that a handler makes at import
UNROLLED = 1024  # steps of a loop that is written out


def is_text(x: Any) -> bool:
    """True for an array of text."""
    return isinstance(x, np.ndarray) and x.dtype == TEXT


def flat(name: str, x: Any) -> Iterable[tuple[str, Any]]:
    """The tensors in an operand, with names."""
    if isinstance(x, list):
        for i, e in enumerate(x):
            yield from flat(f"{name}.{i}", e)
    elif x is not None:
        yield name, x


class Refused(RlxError):
    """A node that cannot be imported; the importer collects all of them into one Unsupported."""


class NotKnown(RlxError):
    """A handler needs the contents of a Value that is known at run time only."""

    def __init__(self, value: Value, why: str) -> None:
        super().__init__(why)
        self.value = value


class Importing(Protocol):
    """The facts about values that an import records."""

    graph: Graph  # the one that is built
    made: dict[str, np.ndarray]  # weights in other layouts, kept between the imports of a model
    source: Source
    types: dict[Value, int]  # ONNX's element type of values that are kept in a wider dtype
    quantities: dict[Value, Any]  # the integers, scales and zero points of values that DequantizeLinear made
    scaled: dict[Value, tuple[Value, Value]]  # sums in i32 and their factor, of values that convolutions of such values made
    control: bool  # the device has control flow
    draws: Counter[str]  # of random numbers, by place
    added: dict[Value, int]  # rows that were written into a past in place

    def constant(self, array: np.ndarray) -> Value:
        """A known array as a Value."""
        ...

    def count(self, value: Value) -> tuple[int, Value] | None:
        """(axis, count) of a value whose size depends on data."""
        ...

    def bound(self, value: Value, axis: int, count: Value) -> None:
        """Records these."""
        ...

    def traced(self, where: str, make: Callable[[], Any]) -> Any:
        """The results of `make`, which makes the graphs of the node at `where` sub-graphs. None: they are to be written out."""
        ...

    def flow(self, result: Value, where: str) -> None:
        """Says that a result, perhaps moved, is of the control flow at `where`."""
        ...


class Scope(Protocol):
    """The graph that a node is in: `scope` of a Call."""

    @property
    def importer(self) -> Importing: ...

    def opset(self, domain: str) -> int:
        """The version of this domain that the model asks for."""
        ...

    def contents(self, value: Value) -> np.ndarray | None:
        """The array of a constant or of an initialiser; None: known at run time only."""
        ...

    def inner(self, proto: Any, operands: Sequence[Operand], where: str) -> list[Any]:
        """The outputs of a GraphProto of an attribute."""
        ...

    def apply(
        self, op: str, domain: str, opset: int, inputs: Sequence[Operand], outputs: Sequence[str],
        attrs: dict[str, Any], where: str,
    ) -> list[Any]:  # fmt: skip
        """The results of one operator, as many as `outputs`."""
        ...


class Call:
    """One node. `op`, `domain`, `opset`: the operator, and the version of its domain. `inputs`:
    operands, with None for those left out. `outputs`: names, "" where not wanted. `scope`: the graph that it is in."""

    def __init__(
        self, scope: Scope, op: str, domain: str, opset: int, inputs: Sequence[Operand], outputs: Sequence[str],
        attrs: dict[str, Any], where: str,
    ) -> None:  # fmt: skip
        self.scope, self.op, self.domain, self.opset = scope, op, domain, opset
        self.inputs, self.outputs, self.attrs, self.where = list(inputs), list(outputs), attrs, where
        self.protos: dict[str, onnx.AttributeProto] | None = None  # the attributes as they are in the model
        self.overload, self.counts = "", False
        self._read: set[str | int] = set()  # operands and attributes that the handler has asked for

    # -- operands

    def has(self, i: int) -> bool:
        """True if operand i is given."""
        self._read.add(i)
        return i < len(self.inputs) and self.inputs[i] is not None

    def value(self, i: int) -> Value:
        """Operand i as a Value; an array becomes a constant."""
        found = self._operand(i)
        return found if isinstance(found, Value) else self.scope.importer.constant(found)

    def values(self) -> list[Value]:
        """All operands as Values."""
        return [self.value(i) for i in range(len(self.inputs))]

    def maybe(self, i: int) -> Value | None:
        """Operand i as a Value, or None if it is left out."""
        return self.value(i) if self.has(i) else None

    def known(self, i: int, default: Any = _REQUIRED) -> Any:
        """The contents of operand i, which must be known at import; `default` if it is left out. A model for which that is an
        input of the run is compiled for the contents of that input."""
        if not self.has(i) and default is not _REQUIRED:
            return default
        found = self._operand(i)
        if isinstance(found, np.ndarray):
            return found
        contents = self.scope.contents(found)
        if contents is None:
            raise NotKnown(found, f"{self.where} needs the contents of operand {i} when it is compiled")
        return contents

    def ints(self, i: int, attr: str | None = None, default: Any = None) -> Any:
        """A tuple of ints: operand i, known at import, or the attribute of older opsets."""
        if self.has(i):
            return tuple(int(x) for x in np.asarray(self.known(i)).reshape(-1))
        found = self.attr(attr, None) if attr else None
        return default if found is None else tuple(found)

    def dims(self, i: int) -> tuple[DimLike, ...]:
        found = self._operand(i)
        return found.dims if isinstance(found, Value) else found.shape

    def sizes(self, i: int) -> tuple[int, ...]:
        """Dims of operand i, all of which must be integers."""
        if named := [d for d in self.dims(i) if not isinstance(d, int)]:
            self.refuse(f"dim {named[0]} of operand {i} must be known: give its size when the model is imported")
        return self.dims(i)  # type: ignore[return-value]

    def rank(self, i: int) -> int:
        return len(self.dims(i))

    def dtype(self, i: int) -> DType:
        """The dtype in which operand i is kept: i8 for int4, f32 for the 4-bit and 8-bit floats that rlx does not have."""
        return self.value(i).dtype

    def element_type(self, i: int) -> int:
        """ONNX's element type of operand i (onnx.TensorProto.INT4)."""
        if is_text(self._operand(i)):
            return onnx.TensorProto.STRING
        found = self.value(i)
        return self.scope.importer.types.get(found) or onnx.helper.np_dtype_to_tensor_dtype(found.dtype.numpy)

    def typed(self, value: Value, code: int) -> Value:
        """Says that `value` holds elements of ONNX's type `code`, in a wider dtype: for results that are int4 and the like."""
        self.scope.importer.types[value] = code
        return value

    def count(self, i: int) -> tuple[int, Value] | None:
        """(axis, i64 () count of the indices that are data) of operand i, if its size depends on data. A handler that asks
        answers for its results itself; results of others follow from the ops that they are made of, or are refused."""
        self.counts = True
        found = self._operand(i)
        return self.scope.importer.count(found) if isinstance(found, Value) else None

    def bounded(self, value: Value, axis: int, count: Value) -> Value:
        """Says that the first `count` (i64 ()) indices of `axis` of a result are data, and the rest is undefined: for results
        whose size depends on data. Where such a value is an output of the model, it is cut."""
        self.scope.importer.bound(value, axis, count)
        return value

    def sequence(self, i: int) -> list[Any]:
        """Operand i, a sequence."""
        found = self.inputs[i] if i < len(self.inputs) else None
        if not isinstance(found, list):
            self.refuse(f"operand {i} is no sequence whose length is known at import")
        return found

    def _operand(self, i: int) -> Any:
        if not self.has(i):
            self.refuse(f"operand {i} is left out")
        if isinstance(self.inputs[i], list):
            self.refuse(f"operand {i} is a sequence, and a tensor is needed")
        return self.inputs[i]

    # -- attributes

    def attr(self, name: str, default: Any = _REQUIRED) -> Any:
        """An attribute as int, float, str, tuple of these, ndarray, or GraphProto."""
        self._read.add(name)
        if name in self.attrs:
            return self.attrs[name]
        if default is _REQUIRED:
            self.refuse(f"attribute {name!r} is missing")
        return default

    def others(self, *names: str) -> dict[str, Any]:
        """The attributes apart from these, for another operator."""
        self._read.update(self.attrs)
        return {k: v for k, v in self.attrs.items() if k not in names}

    def check_read(self) -> None:
        """Refuses operands and attributes that the handler never asked for, unless the attribute is 0 or empty: those of an
        operator without a schema have nothing else that knows them."""
        operands = [i for i, x in enumerate(self.inputs) if x is not None and i not in self._read]
        attrs = [a for a, x in self.attrs.items() if a not in self._read and x not in (0, "", "NONE")]
        if found := [f"operand {i}" for i in operands] + [f"attribute {a!r}" for a in attrs]:
            self.refuse(f"not supported: {', '.join(found)}")

    def wants(self, i: int) -> bool:
        """True if output i has a name."""
        return i < len(self.outputs) and bool(self.outputs[i])

    def axis(self, default: int | None = None, rank: int | None = None, name: str = "axis") -> int:
        """The attribute `axis`, counted from the front. `rank`: of operand 0 if it is not given."""
        rank = self.rank(0) if rank is None else rank
        axis = self.attr(name) if default is None else self.attr(name, default)
        if not -max(rank, 1) <= axis < max(rank, 1):
            self.refuse(f"{name} {axis} is out of range for {rank} dims")
        return axis % max(rank, 1)

    # -- refusing, and graphs in attributes

    def refuse(self, why: str) -> NoReturn:
        """The model is refused; `why` says what of this node is not supported."""
        raise Refused(f"{self.where}: {why}")

    def run(self, op: str, *inputs: Operand, outputs: int = 1, domain: str = "", opset: int | None = None, **attrs: Any) -> Any:
        """The results of another ONNX operator on these operands: for operators that are made of others."""
        names = [f"{self.op}.{i}" for i in range(outputs)]
        self._read.update(i for i, x in enumerate(self.inputs) if any(x is given for given in inputs))
        version = self.scope.opset(domain) if opset is None else opset
        made = self.scope.apply(op, domain, version, inputs, names, attrs, self.where)
        return made[0] if outputs == 1 else made

    def check_size(self, elements: int) -> None:
        """Refuses to compute so many elements at import: past 2**26 they belong into the plan of a run."""
        if elements > ELEMENTS:
            self.refuse(f"{elements} elements would be computed when the model is imported, at most {ELEMENTS} are")

    def subgraph(self, name: str, operands: Sequence[Operand]) -> list[Operand]:
        """The outputs of the graph in attribute `name` on these operands; it sees the values of the graphs around it."""
        return self.scope.inner(self.attr(name), operands, f"{self.where}, {name}")

    def body(self, name: str) -> Callable[..., list[Operand]]:
        """The graph in attribute `name` as a function of its inputs."""
        return lambda *operands: self.subgraph(name, operands)

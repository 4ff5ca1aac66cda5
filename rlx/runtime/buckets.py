"""A graph compiled with dims={"batch": "auto"}: one executable per bucket of the open dim, compiled when a run first needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from rlx.compiler.options import CompileOptions
from rlx.errors import BindingError, InputShapeError, Unsupported, known
from rlx.ir.graph import Graph
from rlx.ir.shape import Dim, Shape
from rlx.ir.shown import Shown, counted, some
from rlx.records import record
from rlx.runtime.binding import Declared, converted
from rlx.runtime.cache import BucketedCompileCache, power_of_two_ladder
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.report import CompileReport
from rlx.runtime.session import Session
from rlx.runtime.weights import Params

MOST = 1 << 20  # of an open dim


@record(repr=False)
class BucketReport(Shown):
    """`dim`: the open one; its buckets are powers of two. `compiled`: the report of each bucket that was compiled, by size."""

    name: str
    dim: str
    compiled: Mapping[int, CompileReport]

    def _line(self) -> str:
        return f"{self.name!r}: dim {self.dim!r} is open, in buckets of powers of two; compiled: {some(self.compiled, 20)}"

    def __str__(self) -> str:
        return "\n".join([self._line(), *(f"bucket of {size}: {report}" for size, report in self.compiled.items())])


class BucketedGraph(Shown):
    """A graph with one open dim, compiled for the smallest power of two that holds the inputs of a run. Weights and states are
    shared by all buckets, results are those of the rows that were given. `bucket(rows)` is the CompiledGraph of a size, with the
    fast calls. Only one thread at a time may run it."""

    def __init__(self, session: Session, graph: Graph, options: CompileOptions, dim: str) -> None:
        """`options`: without the open dim. Compiles the bucket of 1, and so raises as Session.compile does.
        OptionError: no input has the dim."""
        self.graph, self.dim, self.options, self.device = graph, dim, options, session.device
        self._buckets = BucketedCompileCache(graph, dim, power_of_two_ladder(1, MOST), session=session, options=options)
        self._reports: dict[int, CompileReport] = {}
        self._first = self.bucket(1)

    def _line(self) -> str:
        inputs, outputs = (some(f"{d.name} {d.shape}" for d in found) for found in (self.inputs, self.outputs))
        return f"{self.graph.name!r} on {self.device}: {inputs} -> {outputs}; {counted(len(self._reports), 'bucket')} compiled"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(CompiledGraph, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise Unsupported(
            f"{name} is that of one size, and dim {self.dim!r} of graph {self.graph.name!r} is open: use .bucket(rows).{name}"
        )

    @property
    def inputs(self) -> tuple[Declared, ...]:
        """Name, shape and dtype of every input; the open dim by its name."""
        return tuple(Declared(str(v.name), v.shape, v.dtype) for v in self.graph.inputs)

    @property
    def outputs(self) -> tuple[Declared, ...]:
        return tuple(Declared(d.name, v.shape, v.dtype) for d, v in zip(self._first.outputs, self.graph.outputs))

    @property
    def params(self) -> Params:
        """As of a CompiledGraph."""
        return self._first.params

    def set_param(self, name: str, array: np.ndarray) -> None:
        """As of a CompiledGraph, in every bucket; the array is kept for those to come (a copy of it, unless it is read-only)."""
        self._buckets.set_param(name, array)

    def set_params(self, arrays: Mapping[str, np.ndarray]) -> None:
        """As set_param, for several."""
        if not isinstance(arrays, Mapping):
            raise BindingError(f"set_params takes {{name: array}}, got {type(arrays).__name__}")
        for name, array in arrays.items():
            self.set_param(name, array)

    def missing_params(self) -> list[str]:
        """Names of the params that must be set before the next run."""
        return self._first.missing_params()

    def bucket(self, rows: int) -> CompiledGraph:
        """The executable that runs of this size use. InputShapeError: the size is not from 1 to 2**20."""
        compiled = self._buckets.bucket(rows)
        self._reports.setdefault(compiled.options.binding[self.dim], compiled.report())
        return compiled

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run once on named arrays, of any size of the open dim. Returns a fresh array per output.

        InputShapeError: inputs disagree on that size. Otherwise raises as CompiledGraph.run does. Nothing has changed then."""
        outputs = self._buckets.run_padded(inputs)
        self.bucket(self._buckets._rows({name: np.asarray(a) for name, a in inputs.items()}))
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of a CompiledGraph: inputs by position, by name or both, as arrays, numbers and lists."""
        declared = self.inputs
        if len(args) > len(declared):
            raise BindingError(f"{len(declared)} inputs ({known(d.name for d in declared)}), got {len(args)} by position")
        given: dict[str, Any] = {d.name: x for d, x in zip(declared, args)}
        if twice := given.keys() & kwargs:
            raise BindingError(f"input {known(twice)} is given by position and by name")
        given |= kwargs
        for d in declared:
            if d.name in given and not isinstance(given[d.name], np.ndarray):
                given[d.name] = converted(f"input {d.name!r}", given[d.name], self._sized(d, given[d.name]))
        outputs = self.run(given)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _sized(self, declared: Declared, given: Any) -> Shape:
        """The declared shape with the sizes that the open dim has in the given arrays."""
        found, dims = np.shape(given), declared.shape.dims
        if len(found) != len(dims):
            raise InputShapeError(f"input {declared.name!r} is {declared.shape}; got dims {list(found)}")
        open_dim = Dim(self.dim)
        return Shape([n if d == open_dim else d for n, d in zip(found, dims)], declared.dtype).bind(self.options.binding)

    def save(self, path: str | PathLike[str], sizes: Sequence[int] | None = None, weights: bool = True) -> int:
        """Write buckets to an artifact file; rlx.load gives StoredBuckets. `sizes`: powers of two, which are compiled if need be;
        None: those compiled so far. Otherwise as rlx.save."""
        return self._buckets.save(path, sorted(self._reports) if sizes is None else sizes, weights)

    def report(self) -> BucketReport:
        """The buckets that were compiled, and the report of each."""
        return BucketReport(self.graph.name, self.dim, dict(sorted(self._reports.items())))


__all__ = ["BucketReport", "BucketedGraph"]

"""Verifies a compiled program: its memory plan, and each value that a run stores against the op's numpy reference in float64.

The graph is compiled once more with separate memory for every buffer, so that all values which kernels write can be read after
the run. A value is compared with the references of the nodes between it and the values stored before it, applied to those
stored values, so errors do not accumulate from kernel to kernel. Then the program with the real memory plan must give the same
bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rlx.compiler.options import CompileOptions
from rlx.errors import GraphError
from rlx.explain.profile import described
from rlx.ir.dtype import DType
from rlx.ir.evaluate import evaluate_node
from rlx.ir.graph import CONSTANT, HANDLE, INPUT, PARAM, Graph, Node, Value
from rlx.ir.shown import Shown, counted
from rlx.records import record
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.session import Session, with_more

# Relative to the greatest magnitude of the row: rounding of the operands, and of sums of thousands of terms
TOLERANCE = {"f64": 1e-11, "f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2, "f8e4m3": 0.13, "f8e5m2": 0.26, "c64": 2e-5}
# Kernels of these ops round the rows of x to 8 bits for each block, as the op's contract allows
COARSE = {"dequant_matmul": 3e-2}
APART = ("reuse", "inplace")  # passes left out so that no buffer is overwritten
LEAVES = (INPUT, PARAM, HANDLE, CONSTANT)
Weights = Callable[[str], np.ndarray]  # a param by name


@record
class Difference:
    """`what`: the value. `kernel`: the kernels that compute it. `index`: of the element that is furthest off."""

    what: str
    kernel: str
    index: tuple[int, ...]
    found: float
    expected: float
    share: float  # of the elements, that differ by more than the tolerance
    tolerance: float

    def __str__(self) -> str:
        where = f" in {self.kernel}" if self.kernel else ""
        numbers = f"{self.found:.9g} at {list(self.index)}, the reference says {self.expected:.9g}"
        return f"{self.what}{where}: {numbers}; {self.share:.1%} of the elements differ by more than {self.tolerance:.1g}"


@record(repr=False)
class Verified(Shown):
    """`values`: number of values compared with the reference; `nodes`: of nodes that these cover. `unsure`: integers and bools
    that depend on rounding inside a kernel, not compared. `worst`: the greatest error, as a part of its tolerance. `difference`:
    the first one, or None; nothing after it was compared."""

    name: str
    values: int
    nodes: int
    unsure: int
    worst: float
    difference: Difference | None = None

    def _line(self) -> str:
        unsure = f", {self.unsure} not compared" if self.unsure else ""
        found = f"first difference: {self.difference}" if self.difference else f"greatest error {self.worst:.0%} of its tolerance"
        return f"{self.name!r}: {counted(self.values, 'value')} of {counted(self.nodes, 'node')}{unsure}; {found}"


def verify(
    graph: Graph, weights: Weights, inputs: Mapping[str, np.ndarray], *, session: Session, options: CompileOptions | None = None,
    states: Mapping[str, np.ndarray] | None = None, progress: Callable[[int, int], None] | None = None,
) -> Verified:  # fmt: skip
    """Compile and run a graph without named dims, and compare it. `states`: values of handles before the run; others are zero.
    `progress(done, total)` counts nodes.

    PlanError: the memory plan is wrong. Other errors are those of a compile and of a run."""
    from rlx.compiler.check import check_program

    options, states = with_more(options), states or {}
    compiled = session.compile(graph, options)
    check_program(compiled._origins().program)  # with complete kernels, also where the code came from the disk cache
    apart = session.compile(graph, options.replace(disable=(*options.disable, *APART)), params=compiled.params)
    for executable in (compiled, apart):
        for name in executable.missing_params():
            executable.set_param(name, weights(name))
        for name, array in states.items():
            executable.bind_handle(name, array)
    outputs = [apart.run(inputs), compiled.run(inputs)]
    checked = _Comparison(graph, apart, weights, inputs, states).run(progress)
    if checked.difference is None and (other := _other_bits(graph, apart, compiled, *outputs)):
        return Verified(**{**vars(checked), "difference": other})
    return checked


class _Comparison:
    """`values`: in float64, the stored ones where there are any, else those of the references. `loose`: the tolerance of each."""

    def __init__(
        self, graph: Graph, compiled: CompiledGraph, weights: Weights, inputs: Mapping[str, np.ndarray],
        states: Mapping[str, np.ndarray],
    ) -> None:  # fmt: skip
        self.graph, self.compiled, self.weights, self.inputs, self.states = graph, compiled, weights, inputs, states
        self.origins = compiled._origins()
        program = compiled.program()
        self.starts = sorted((at, id) for id, at in program.plan.offsets.items())
        self.values: dict[Value, np.ndarray] = {}
        self.loose: dict[Value, float] = {}
        coarse = compiled.options.precision != "f32"
        self.least = TOLERANCE["bf16"] if coarse else 0.0
        self.left = Counter(v for node in graph.nodes() for v in node.inputs)
        self.assigned: dict[Value, list[str]] = {}
        for handle, value in graph.assigns:
            self.assigned.setdefault(value, []).append(str(handle.name))
        self.left.update(self.assigned.keys())

    def run(self, progress: Callable[[int, int], None] | None) -> Verified:
        nodes, compared, unsure, worst = self.graph.nodes(), 0, 0, 0.0
        own = dict(zip(nodes, self.origins.nodes))  # the compile has a copy of the graph
        difference = None
        for at, node in enumerate(nodes):
            if progress is not None:
                progress(at, len(nodes))
            if node.op in LEAVES:
                self.loose[node.results[0]] = 0.0
                continue
            self.values.update(zip(node.results, self._computed(node)))
            for value, found in self._stored(node, own[node]):
                if not value.dtype.is_float and self.loose[value] and not np.array_equal(found, self.values[value]):
                    unsure += 1
                    continue
                error, difference = self._compare(node, value, found, self.values[value])
                compared, worst = compared + 1, max(worst, error)
                if difference is not None:
                    break
                self.values[value], self.loose[value] = _wide(found), 0.0  # a state that is a copy of it has the same bits
            if difference is not None:
                break
            self._forget(node)
        if progress is not None:
            progress(len(nodes), len(nodes))
        return Verified(self.graph.name, compared, len(nodes), unsure, worst, difference)

    def _value(self, value: Value) -> np.ndarray:
        """Leaves are read where they are used: all weights together could be too large."""
        name, op = str(value.name), value.node.op
        if op is CONSTANT:
            return evaluate_node(value.node, ())[0]
        if op is HANDLE:
            return np.asarray(self.states[name]) if name in self.states else np.zeros(value.shape.static, value.dtype.numpy)
        return self.values[value] if op not in LEAVES else np.asarray(self.inputs[name] if op is INPUT else self.weights(name))

    def _computed(self, node: Node) -> tuple[np.ndarray, ...]:
        operands = [self._value(v) for v in node.inputs]
        try:
            results = evaluate_node(node, tuple(map(_wide, operands)))
        except GraphError:  # an op of one dtype alone
            own = (a.astype(v.dtype.numpy) if v.dtype.is_float else a for a, v in zip(operands, node.inputs))
            results = evaluate_node(node, tuple(own))
        before = max((max(self.loose[v], _tolerance(v.dtype)) for v in node.inputs), default=0.0)
        least = max(before, self.least, 0.0 if getattr(node.attrs, "exact", False) else COARSE.get(node.op.name, 0.0))
        for value in node.results:
            self.loose[value] = max(least, _tolerance(value.dtype))
            if not value.dtype.is_float and all(self.loose[v] == 0 for v in node.inputs):
                self.loose[value] = 0.0  # exact: all that it reads is known to the bit
        return results

    def _stored(self, node: Node, own: Node) -> Iterator[tuple[Value, np.ndarray]]:
        """The run's values of a node's results (`own`: the node in the compile's copy of the graph), then the states that they
        became. Complex numbers are stored as parts, and left out."""
        for mine, value in zip(own.results, node.results):
            place = self.origins.places.get(mine)
            if place is not None and value.shape.num_elements and value.dtype.kind != "c":
                start, id = self.starts[bisect_right(self.starts, (place.offset, 1 << 62)) - 1]
                raw = self.compiled._executable.read(id).reshape(-1).view(np.uint8)[place.offset - start :]
                dims, size = value.shape.static, value.dtype.itemsize
                reach = 1 + sum((n - 1) * s for n, s in zip(dims, place.strides))
                yield value, as_strided(raw[: reach * size].view(value.dtype.numpy), dims, [s * size for s in place.strides])
            for name in self.assigned.get(value, ()) if value.dtype.kind != "c" else ():
                yield value, np.asarray(self.compiled.read_handle(name))

    def _compare(self, node: Node, value: Value, found: np.ndarray, want: np.ndarray) -> tuple[float, Difference | None]:
        """(error as a part of the tolerance, the difference). Rows are those of `found` in memory."""
        a, b = _wide(found), _wide(want)
        tolerance = self.loose[value] if value.dtype.is_float else 0.0
        if value.dtype.is_float:
            limit = float(np.finfo(np.float32).max) if value.dtype.name in ("f32", "bf16") else np.inf
            with np.errstate(all="ignore"):
                size = np.where(np.isfinite(b), np.abs(b), 0)
                inner = min(range(b.ndim), key=lambda i: (found.shape[i] == 1, found.strides[i]), default=0)
                row = size.max(axis=inner, keepdims=True) if b.ndim else size
                error = np.abs(a - b) / (tolerance * np.maximum(row, 1e-30))
                same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (np.abs(b) > limit) & (np.sign(a) == np.sign(b)))
                error = np.where(same, 0, np.where(np.isnan(error), np.inf, error))
        else:
            error = np.where(a == b, 0, np.inf)
        most = float(error.max(initial=0))
        if most <= 1:
            return most, None
        at = np.unravel_index(int(error.argmax()), error.shape)
        index = tuple(int(i) for i in at)
        share = float((error > 1).mean())
        where = self._kernel(node)
        return most, Difference(described(node), where, index, float(a[at]), float(b[at]), share, tolerance)

    def _kernel(self, node: Node) -> str:
        at = self.graph.nodes().index(node)
        steps = self.compiled.program().steps
        names = [s.kernel.name for s, o in zip(steps, self.origins.steps["steps"]) if at in o.nodes]
        return ", ".join(dict.fromkeys(names))

    def _forget(self, node: Node) -> None:
        """Free values that no later node reads."""
        for v in node.inputs:
            self.left[v] -= 1
            if not self.left[v]:
                self.values.pop(v, None)


def _other_bits(
    graph: Graph, apart: CompiledGraph, compiled: CompiledGraph, want: list[np.ndarray], found: list[np.ndarray]
) -> Difference | None:
    """The first output or state of the real program that differs from that of the program in which no buffer shares memory."""
    pairs = [(f"output {d.name!r}", a, b) for d, a, b in zip(apart.outputs, want, found)]
    for name in (str(h.name) for h in graph.handles):
        a, b = apart.read_handle(name), compiled.read_handle(name)
        pairs += [(f"state {name!r}", a, b)] if a is not None and b is not None else []
    for what, a, b in pairs:
        if a.tobytes() != b.tobytes():
            differ = np.array([x != y for x, y in zip(_bits(a), _bits(b))])
            at = np.unravel_index(int(differ.argmax()), a.shape)
            numbers = float(_wide(b)[at]), float(_wide(a)[at])
            what = f"{what} with shared memory (a wrong memory plan)"
            return Difference(what, "", tuple(int(i) for i in at), *numbers, float(differ.mean()), 0.0)
    return None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"V{array.itemsize}")


def _wide(array: np.ndarray) -> np.ndarray:
    """Floats in float64, complex numbers in complex128; integers and bools as they are."""
    kind = np.dtype(array.dtype).kind
    if kind == "c":
        return array.astype(np.complex128)
    return array if kind in "biu" else array.astype(np.float64)


def _tolerance(dtype: DType) -> float:
    return TOLERANCE.get(dtype.name, 0.0)

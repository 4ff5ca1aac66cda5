"""Values of every node of a model beside those of ONNX Runtime, where that package is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from rlx.frontends.onnx.model import OnnxModel
from rlx.ir.evaluate import evaluate_node
from rlx.ir.graph import HANDLE, INPUT, PARAM, Graph
from rlx.ir.node import Value

NARROW = ("float16", "bfloat16")
TOLERANCE, OF_NARROW = 1e-3, 3e-2  # of the greatest magnitude
HALVES = 0.01  # of bytes that are rounded sums: so many may be on the other side of a half, and one off


class Compared(NamedTuple):
    """`values`: those that are equal. `difference`: the first one that is not, or None. `refused`: ONNX Runtime's reason."""

    values: int
    difference: str | None
    refused: str | None = None


def compare(model: OnnxModel, inputs: Mapping[str, np.ndarray]) -> Compared | None:
    """The values of the model's nodes, by the references of their ops, beside ONNX Runtime's. Each node reads ONNX Runtime's
    values, so that roundings do not add up. None: it is not installed. Random values, and those whose size depends on data, are
    not compared."""
    try:
        import onnxruntime  # type: ignore[import-not-found]
    except ImportError:
        return None
    imported = model.imported(inputs)
    graph, nodes = imported.graph, list(enumerate(model.proto.graph.node))
    named = {n: v for _, node in nodes for n in node.output if isinstance(v := imported.named.get(n), Value)}
    named = {n: v for n, v in named.items() if v not in imported.bounds}
    if not named:
        return Compared(0, None)
    graph.set_outputs(list(named.values()), list(named))
    whole = onnx.load(model.path) if model.path else onnx.ModelProto.FromString(model.proto.SerializeToString())
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=n) for n in named)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        theirs = dict(zip(named, map(np.asarray, session.run(list(named), dict(inputs)))))
    except Exception as e:  # noqa: BLE001  (its errors have no common class but this)
        return Compared(0, None, " ".join(str(e).split())[:200])
    makers = {n: (at, node) for at, node in nodes for n in node.output}
    count = 0
    for name, own in _own(graph, named, theirs, {**inputs, **imported.weights}):
        if found := difference(own, theirs[name]):
            at, node = makers[name]
            label = f"node {at} {node.op_type}" + (f" {node.name!r}" if node.name else "")
            return Compared(count, f"{label}, its output {name!r}: {found}")
        count += 1
    return Compared(count, None)


def _own(
    graph: Graph, named: Mapping[str, Value], theirs: Mapping[str, np.ndarray], leaves: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """The values that have names, each computed from those of `theirs`. Values that depend on a random state are left out."""
    names, values, random = {v: n for n, v in named.items()}, dict[Value, np.ndarray](), set[Value]()
    for node in graph.nodes():
        if node.op is HANDLE:
            found: Sequence[np.ndarray] = (np.zeros(node.shapes[0].static, node.shapes[0].dtype.numpy),)
        elif node.op in (INPUT, PARAM):
            found = (leaves[str(node.name)],)
        else:
            found = evaluate_node(node, tuple(values[v] for v in node.inputs))
        if node.op is HANDLE or not random.isdisjoint(node.inputs):
            random.update(node.results)
        for value, own in zip(node.results, found):
            if (name := names.get(value)) is not None and node.op not in (INPUT, PARAM):
                if value not in random:
                    yield name, own
                random.discard(value)
                own = theirs[name].astype(own.dtype)
            values[value] = own


def difference(own: np.ndarray, theirs: np.ndarray) -> str:
    """The element that is furthest off; "": none is past the tolerance."""
    if own.shape != theirs.shape:
        return f"its dims are {list(own.shape)}, and {list(theirs.shape)} for ONNX Runtime"
    if not own.size:
        return ""
    a, b = own.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    share = OF_NARROW if own.dtype.name in NARROW else TOLERANCE if own.dtype.kind == "f" else 0.0
    most = share * max(np.abs(b[np.isfinite(b)]).max(initial=0.0), 1e-3)
    rounded = own.dtype.name in ("int8", "uint8") and off.max() <= 1 and (off > 0).mean() <= HALVES
    if off.max() <= most or rounded:
        return ""
    at = np.unravel_index(int(off.argmax()), own.shape)
    place = [int(i) for i in at]
    return f"{a[at]:.9g} at {place}, ONNX Runtime has {b[at]:.9g}; {(off > most).mean():.1%} of the elements differ"


__all__ = ["Compared", "compare"]

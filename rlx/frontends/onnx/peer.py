"""Values of every node of a model beside those of ONNX Runtime, where that package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx

from rlx.frontends.onnx.model import OnnxModel
from rlx.ir.evaluate import evaluate
from rlx.ir.node import Value

NARROW = ("float16", "bfloat16")
TOLERANCE, OF_NARROW = 1e-3, 3e-2  # of the greatest magnitude


class Compared(NamedTuple):
    """`values`: those that are equal. `difference`: the first one that is not, or None. `refused`: ONNX Runtime's reason."""

    values: int
    difference: str | None
    refused: str | None = None


def compare(model: OnnxModel, inputs: Mapping[str, np.ndarray]) -> Compared | None:
    """The values of the model's nodes, by the references of their ops, beside ONNX Runtime's. None: it is not installed."""
    try:
        import onnxruntime  # type: ignore[import-not-found]
    except ImportError:
        return None
    imported = model.imported(inputs)
    graph, nodes = imported.graph, list(enumerate(model.proto.graph.node))
    named = {n: v for _, node in nodes for n in node.output if isinstance(v := imported.named.get(n), Value)}
    graph.set_outputs(list(named.values()), list(named))
    feeds = {str(v.name): inputs[str(v.name)] for v in graph.inputs}
    own = dict(zip(named, evaluate(graph, feeds, graph.weights)[0]))
    whole = onnx.load(model.path) if model.path else onnx.ModelProto.FromString(model.proto.SerializeToString())
    del whole.graph.output[:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=n) for n in named)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        theirs = dict(zip(named, session.run(list(named), dict(inputs))))
    except Exception as e:  # noqa: BLE001  (its errors have no common class but this)
        return Compared(0, None, " ".join(str(e).split())[:200])
    makers = {n: (at, node) for at, node in nodes for n in node.output}
    for count, name in enumerate(named):
        if found := difference(own[name], np.asarray(theirs[name])):
            at, node = makers[name]
            label = f"node {at} {node.op_type}" + (f" {node.name!r}" if node.name else "")
            return Compared(count, f"{label}, its output {name!r}: {found}")
    return Compared(len(named), None)


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
    if off.max() <= most:
        return ""
    at = np.unravel_index(int(off.argmax()), own.shape)
    place = [int(i) for i in at]
    return f"{a[at]:.9g} at {place}, ONNX Runtime has {b[at]:.9g}; {(off > most).mean():.1%} of the elements differ"


__all__ = ["Compared", "compare"]

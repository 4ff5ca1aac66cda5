"""The reference evaluator: runs a graph with each op's numpy reference. Backends are compared with its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.errors import AttributeValueError, InputDTypeError, InputShapeError, MissingInputError, UnknownNameError, known
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Kind

Arrays = Mapping[str, np.ndarray]  # by name


def evaluate_node(
    node: Node, operands: tuple[np.ndarray, ...], sizes: Mapping[str, int] | None = None
) -> tuple[np.ndarray, ...]:
    """The results of one node for these operands, in the node's dtypes. `sizes`: of the named dims in its attributes."""
    out = node.op.reference(node.attrs.bind(sizes) if sizes and node.attrs is not None else node.attrs, *operands)
    return out if isinstance(out, tuple) else (np.asarray(out),)


def evaluate(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    params: Mapping[str, np.ndarray] | None = None,
    handles: Mapping[str, np.ndarray] | None = None,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """(outputs in order, next value of every handle). Arguments are by name and are not changed; results are fresh arrays.

    Named dims take the sizes of the arrays given. A handle that is not given starts as zeros.
    """
    return evaluate_ranks(graph, [inputs], [params or {}], [handles or {}])[0]


def evaluate_ranks(
    graph: Graph, inputs: Sequence[Arrays], params: Sequence[Arrays] | None = None, handles: Sequence[Arrays] | None = None
) -> list[tuple[list[np.ndarray], dict[str, np.ndarray]]]:
    """`evaluate` on several ranks together, each with its own arguments: node by node, and a collective gets the operands of
    all ranks. Arguments and results are by rank. AttributeValueError: a collective of another number of ranks."""
    groups = [group or [{}] * len(inputs) for group in (inputs, params, handles)]
    sizes: list[dict[str, int]] = [{} for _ in inputs]
    ranks = [_bind_leaves(graph, own, *given) for own, given in zip(sizes, zip(*groups, strict=True), strict=True)]
    for node in graph.nodes():
        if node.op.kind is Kind.LEAF and node.results[0] in ranks[0]:
            continue
        operands = [tuple(values[v] for v in node.inputs) for values in ranks]
        together = node.op.collective is not None and len(ranks) > 1
        results = _together(node, operands) if together else [evaluate_node(node, *own) for own in zip(operands, sizes)]
        for values, found in zip(ranks, results, strict=True):
            values.update(zip(node.results, found, strict=True))
    return [_results(graph, values) for values in ranks]


def _together(node: Node, operands: Sequence[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, ...]]:
    """The result of a collective on every rank, rounded once to its dtype."""
    if (wanted := getattr(node.attrs, "ranks", None)) not in (1, len(operands)):
        raise AttributeValueError(f"{node.op.name} is of {wanted} ranks, and {len(operands)} were given")
    if wanted == 1:
        return [evaluate_node(node, own) for own in operands]
    dtype = node.results[0].dtype
    with np.errstate(all="ignore"):
        made = node.op.collective(node.attrs, [x.astype(dtype.compute.numpy, copy=False) for (x,) in operands])  # type: ignore[misc]
        return [(np.asarray(m).astype(dtype.numpy, copy=False),) for m in made]


def _results(graph: Graph, values: Mapping[Value, np.ndarray]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    outputs = [np.array(values[v], order="C") for v in graph.outputs]
    following = {h.name or "": values[h] for h in graph.handles} | {h.name or "": values[v] for h, v in graph.assigns}
    return outputs, {name: np.array(array, order="C") for name, array in following.items()}


def _bind_leaves(graph: Graph, sizes: dict[str, int], *groups: Mapping[str, np.ndarray]) -> dict[Value, np.ndarray]:
    """The values of the leaves. `sizes` gets those of named dims."""
    values: dict[Value, np.ndarray] = {}
    first: dict[str, str] = {}  # the leaf that has set each
    for kind, leaves, given in zip(("input", "param", "handle"), (graph.inputs, graph.params, graph.handles), groups):
        names = [v.name or "" for v in leaves]
        if unknown := sorted(set(given) - set(names)):
            raise UnknownNameError(f"graph {graph.name!r} has no {kind} {unknown[0]!r}; it has: {known(names)}")
        for v, name in zip(leaves, names):
            if name in given:
                values[v] = _bind_leaf(v, np.asarray(given[name]), sizes, first)
            elif kind != "handle":
                raise MissingInputError(f"graph {graph.name!r}: no value for the {kind} {v.name!r} ({v.shape})")
    for v in graph.handles:
        if v not in values:
            values[v] = np.zeros(v.shape.bind(sizes).static, v.dtype.numpy)
    return values


def _bind_leaf(v: Value, array: np.ndarray, sizes: dict[str, int], first: dict[str, str]) -> np.ndarray:
    if array.dtype != v.dtype.numpy:
        raise InputDTypeError(f"{v.node.op.name} {v.name!r} is {v.shape}, got an array of {array.dtype}")
    if array.ndim == v.rank:
        for dim, size in zip(v.dims, array.shape):
            if not isinstance(dim, int) and len(dim.names) == 1 and size % dim.factor == 0:
                sizes.setdefault(dim.names[0], size // dim.factor)
                first.setdefault(dim.names[0], f"{v.node.op.name} {v.name!r}")
        if v.shape.bind(sizes).dims == array.shape:
            return array
    said = (f", and {n} is {sizes[n]} in the {first[n]}" for d in v.dims if not isinstance(d, int) for n in d.names if n in first)
    found = f"got an array of [{','.join(map(str, array.shape))}]{''.join(dict.fromkeys(said))}"
    raise InputShapeError(f"{v.node.op.name} {v.name!r} is {v.shape}, {found}")

"""Graphs with collectives for tests: every op in every form, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx
from rlx.driver.symmetric import LocalTransport
from rlx.ir import ops
from rlx.ir.dtype import as_dtype
from rlx.ir.graph import Graph
from rlx.ir.op import OPS

HEAP = 1 << 20
DTYPES = {"f": ("f32", "f64", "f16", "bf16"), "i": ("i8", "i64"), "u": ("u8", "u64"), "b": ("bool",), "c": ()}
# op, attributes but ranks, dims with "n" for the number of ranks
CASES: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    *(("all_reduce", {"kind": kind}, (3, 7)) for kind in ("sum", "mean", "max", "min")),
    ("all_reduce", {}, ()), ("all_reduce", {}, (0, 3)), ("all_reduce", {}, (1037,)),
    ("all_gather", {"axis": 0}, (5,)), ("all_gather", {"axis": -1}, (2, 3, 5)), ("all_gather", {"axis": 1}, (3, 1, 7)),
    ("all_gather", {"axis": 1}, (3, 0)),
    *(("reduce_scatter", {"kind": kind, "axis": 1}, (3, "n")) for kind in ("sum", "mean", "max", "min")),
    ("reduce_scatter", {}, ("n", 5)), ("reduce_scatter", {"axis": -1}, (0, "n")),
    ("broadcast_rank", {"root": 0}, (3, 7)), ("broadcast_rank", {"root": 1}, ()),
    ("all_to_all", {"split_axis": 0, "concat_axis": 0}, ("n", 3)), ("all_to_all", {"split_axis": 1, "concat_axis": 0}, (3, "n")),
    ("all_to_all", {"split_axis": 0, "concat_axis": 2}, ("n", 1, 5)),
    ("rank_slice", {"axis": 0}, ("n", 3)), ("rank_slice", {"axis": -1}, (3, 1, "n")),
]  # fmt: skip
NAMES = sorted({name for name, _, _ in CASES})


def together(transports: list[Any], act: Callable[[Any], Any]) -> list[Any]:
    """The results of `act`, or its errors, on every rank."""
    found: list[Any] = [None] * len(transports)

    def rank(i: int) -> None:
        try:
            found[i] = act(transports[i])
        except Exception as e:  # noqa: BLE001  for the caller
            found[i] = e

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(transports))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return found


def good(found: list[Any]) -> list[Any]:
    for f in found:
        if isinstance(f, Exception):
            raise f
    return found


def local(ranks: int, heap: int = HEAP, timeout: float = 60.0) -> list[LocalTransport]:
    return LocalTransport.fan_out(ranks, heap, timeout)


def compiled_on(transports: list[Any], graph: Graph, device: str = "cpu", **options: Any) -> list[Any]:
    chosen = rlx.CompileOptions(**options)
    return good(together(transports, lambda t: rlx.Session(device, threads=1, transport=t).compile(graph, chosen)))


def run_all(transports: list[Any], compiled: list[Any], inputs: list[dict[str, np.ndarray]]) -> list[Any]:
    return together(transports, lambda t: compiled[t.this_rank.index].run(inputs[t.this_rank.index]))


def draw(rng: np.random.Generator, dims: tuple[int, ...], dtype: str) -> np.ndarray:
    numpy = as_dtype(dtype).numpy
    if dtype == "bool":
        return np.asarray(rng.random(dims) < 0.5)
    if numpy.kind in "iu":
        limits = np.iinfo(numpy)
        return np.asarray(rng.integers(limits.min, limits.max, dims, numpy, endpoint=True))
    made = np.asarray(rng.standard_normal(dims) * 10)
    if made.size > 2:
        made.reshape(-1)[rng.integers(made.size, size=3)] = np.nan, np.inf, -0.0
    return made.astype(numpy)


def same(found: np.ndarray, want: np.ndarray, what: str = "") -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape), what
    wide = (lambda a: a.astype(np.float64)) if want.dtype.kind not in "iub" else (lambda a: a)
    np.testing.assert_array_equal(wide(found), wide(want), err_msg=what)


def all_cases(name: str, ranks: int) -> tuple[Graph, list[dict[str, np.ndarray]], list[str]]:
    """One graph with every case of an op in every dtype, and each rank's inputs."""
    g, rng = Graph(f"every_{name}"), np.random.default_rng(len(name) * ranks)
    inputs: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
    outputs, what = [], []
    for case, (_, attrs, dims) in enumerate(c for c in CASES if c[0] == name):
        sizes = tuple(3 * ranks if d == "n" else d for d in dims)
        for dtype in (d for letter in OPS[name].dtypes for d in DTYPES[letter]):
            x = g.input(f"x{case}_{dtype}", sizes, dtype)
            outputs.append(getattr(ops, name)(x, ranks=ranks, **attrs))
            what.append(f"{name} {attrs} {dtype}{list(sizes)}")
            for rank in inputs:
                rank[str(x.name)] = draw(rng, sizes, dtype)
    g.set_outputs(outputs)
    return g, inputs, what


def mlp(ranks: int, rows: int = 3) -> Graph:
    """A tensor-parallel block between pointwise ops, its result gathered and cut again."""
    g = Graph("mlp")
    x, w, v = g.input("x", (rows, 20), "f32"), g.param("w", (20, 24 // ranks), "f32"), g.param("v", (24 // ranks, 20), "f32")
    bias = g.param("bias", (20,), "f32")
    out = ops.all_reduce(ops.gelu(ops.silu(x) @ w + 0.5) @ v, ranks=ranks)
    out = ops.rms_norm(x + ops.tanh(out + bias), g.param("scale", (20,), "f32"))
    g.set_outputs([out, ops.all_gather(ops.relu(out * 2), axis=1, ranks=ranks) + 1])
    return g

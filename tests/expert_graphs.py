"""Graphs of mixture-of-experts layers, their data, and what they compute, in numpy and float64."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import rlx
from rlx.driver.experts import ResidencyStats
from rlx.ir.blocks import FORMATS
from rlx.ir.graph import Graph, Value
from rlx.ir.ops.quant import random_weights
from rlx.runtime import CompiledGraph


def scored(g: Graph, x: Value, name: str, experts: int) -> Value:
    """The scores of a layer's experts."""
    made = [p for p in g.params if p.node.name == f"{name}.gate"]
    gate = made[0] if made else g.param(f"{name}.gate", (experts, x.dims[-1]), "f32")
    return rlx.astype(x, "f32") @ gate.T


def block(
    g: Graph, x: Value, name: str, experts: int, k: int, ffn: int, dtype: str, form: str = "", then: str | None = None,
    **route: Any,
) -> Value:  # fmt: skip
    """One layer of experts on x [tokens, width], with its params. `then`: the layer whose choice it guesses."""
    tokens, width = x.dims
    many = experts * 2 * ffn, experts * width
    if form:
        rows = FORMATS[form].row_bytes
        up = g.param(f"{name}.up", (experts, 2 * ffn, rows(width)), "u8")
        down = g.param(f"{name}.down", (experts, width, rows(ffn)), "u8")
    else:
        up = g.param(f"{name}.up", (many[0], width), dtype).reshape((experts, 2 * ffn, width)).transpose(0, 2, 1)
        down = g.param(f"{name}.down", (many[1], ffn), dtype).reshape((experts, width, ffn)).transpose(0, 2, 1)
    guess = [] if then is None else [rlx.top_k(scored(g, x, then, experts), k=k)[1].astype("i32")]
    ids, weights = rlx.route(scored(g, x, name, experts), *guess, k=k, **route)
    order, place, ends = rlx.group_rows(ids.reshape((tokens * k,)), groups=experts)
    rows = rlx.gather(x, order // k)
    hidden = rlx.segment_matmul(rows, up, ends, format=form)
    hidden = rlx.silu(hidden[:, :ffn]) * hidden[:, ffn:]
    made = rlx.gather(rlx.segment_matmul(hidden, down, ends, format=form), place.reshape((tokens, k)))
    return rlx.sum(made.astype("f32") * weights.reshape((tokens, k, 1)), axis=1).astype(x.dtype)


def layers(
    tokens: Any, width: int, ffn: int, experts: int, k: int, dtype: str = "f32", form: str = "", count: int = 1,
    lookahead: bool = False,
) -> Graph:  # fmt: skip
    g = Graph("experts")
    x = g.input("x", (tokens, width), dtype)
    for n in range(count):
        then = f"layer{n + 1}" if lookahead and n + 1 < count else None
        x = x + block(g, x, f"layer{n}", experts, k, ffn, dtype, form, then, renormalise=True)
    g.set_outputs([x])
    return g


def data(g: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values of all params."""
    rng, out = np.random.default_rng(seed), {}
    for v in g.params:
        made = (rng.standard_normal(v.shape.static) / np.sqrt(v.shape.static[-1])).astype(v.dtype.numpy)
        if v.dtype.name == "u8":
            nbytes = {f.row_bytes(256): f for f in FORMATS.values()}
            made = np.zeros(v.shape.static, np.uint8)
            random_weights(nbytes[v.shape.static[-1]])(rng, [made, made])
        out[v.node.name or ""] = made
    return out


def expected(x: np.ndarray, params: dict[str, np.ndarray], ffn: int, k: int, form: str = "", count: int = 1) -> np.ndarray:
    """The result of `layers`: one token and expert after the other."""
    x = x.astype(np.float64)
    for n in range(count):
        gate, up, down = (params[f"layer{n}.{part}"] for part in ("gate", "up", "down"))
        experts, width = gate.shape
        if form:
            up, down = FORMATS[form].decode_rows(up, width), FORMATS[form].decode_rows(down, ffn)
        up, down = up.astype(np.float64).reshape(experts, 2 * ffn, width), down.astype(np.float64).reshape(experts, width, ffn)
        made = np.zeros_like(x)
        for t, row in enumerate(x):
            scores = gate.astype(np.float64) @ row
            best = np.argsort(-scores, kind="stable")[:k]
            weights = np.exp(scores[best] - scores[best].max())
            for e, weight in zip(best, weights / weights.sum()):
                hidden = up[e] @ row
                hidden = hidden[:ffn] * 0.5 * (1 + np.tanh(hidden[:ffn] / 2)) * hidden[ffn:]
                made[t] += weight * (down[e] @ hidden)
        x = x + made
    return x


def checked_statistics(
    compiled: CompiledGraph, given: Iterable[dict[str, np.ndarray]], k: int, near: int, choices: int
) -> ResidencyStats:
    """Run these inputs and compare the statistics with the choices of the runs, so many in all. `near`: the experts below it are
    resident."""
    used, slow = list[set[int]](), 0
    for inputs in given:
        compiled.enable_moe_topk_capture(k)
        compiled.run(inputs)
        for ids in compiled.take_moe_topk_capture():
            used.append(set(ids.reshape(-1).tolist()))
            slow += int((ids >= near).sum())
    stats, nbytes = compiled.take_moe_residency_stats(), compiled.expert_tiers().layers[0].nbytes
    assert (stats.resident.tokens, stats.offloaded.tokens) == (choices - slow, slow)
    assert stats.resident.experts == sum(len([e for e in each if e < near]) for each in used)
    assert stats.offloaded.experts == sum(len([e for e in each if e >= near]) for each in used) > 0
    assert stats.offloaded.bytes == stats.offloaded.experts * nbytes and stats.offloaded.seconds > 0
    again = compiled.take_moe_residency_stats()
    assert again.resident.tokens == again.offloaded.tokens == 0
    return stats


@contextmanager
def moving(tiers: Any, layers: int, experts: int, movers: int, demoted: float = 0.6) -> Iterator[None]:
    """Threads demote and promote random experts meanwhile. `demoted`: the share of the moves that demote."""
    stop, faults = threading.Event(), list[BaseException]()

    def move(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                layer, expert = int(rng.integers(layers)), int(rng.integers(experts))
                (tiers.demote if rng.random() < demoted else tiers.promote)(layer, expert)
        except BaseException as fault:  # noqa: BLE001
            faults.append(fault)

    threads = [threading.Thread(target=move, args=(seed,)) for seed in range(movers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults, faults[0]

"""Contractions with computed operands, and claimed ops (products with packed weights, attention) with an epilogue: one kernel
against several.

    python benchmarks/fused_operands.py [--threads 1 2] [--seconds 2] [--cases norm … attention] [--force]

Each pair is the same graph compiled twice, normally and with the fusion disabled ("operands": of producers into a product;
"followers": of an epilogue into a claimed op; "quantised": of decoding weights into their product). The two run alternately.
`kernels` counts the steps of both. With --force every operand that can be computed is computed, against the rule of the target:
the rule is right if `as is` is the faster form. One thread is measured in its CPU time; the median counts. More threads are
measured in wall time per call; the 2nd percentile counts, which is that of calls without interference by other programs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("RLX_CACHE", "0")  # forced forms must not enter the cache

import numpy as np

import rlx
from benchmarks.measure import Call, header, table
from rlx.backends.cpu import backend
from rlx.ir.blocks import FORMATS
from rlx.ir.graph import Graph, Value
from rlx.ir.ops import dequant_matmul

ROWS, DEPTHS = (1, 16, 128, 512), (384, 1024, 4096)
FORMATS_MEASURED, QUANTISED_ROWS = ("q8_0", "q4_k", "int8"), (1, 16, 128)
WIDTH, HEAD_DIMS, CHUNKS = 768, (32, 64, 128), ((1, 128), (1, 1024), (128, 128), (512, 512))  # queries, keys
Made = tuple[str, Graph, str]  # name, graph, the fusion disabled in the other form


def norm(rows: int, d: int) -> Graph:
    g = rlx.Graph("norm")
    x, s, w = g.input("x", (rows, d), rlx.f32), g.param("s", (d,), rlx.f32), g.param("w", (d, d), rlx.f32)
    g.set_outputs([rlx.rms_norm(x, s) @ w])
    return g


def cast(rows: int, d: int) -> Graph:
    g = rlx.Graph("cast")
    x, w = g.input("x", (rows, d), rlx.f32), g.param("w", (d, d), rlx.bf16)
    g.set_outputs([(x.astype("bf16") @ w).astype("f32")])
    return g


def gather(rows: int, d: int) -> Graph:
    g = rlx.Graph("gather")
    t, ids, w = g.param("t", (2048, d), rlx.f32), g.input("ids", (rows,), rlx.i32), g.param("w", (d, d), rlx.f32)
    g.set_outputs([rlx.gather(t, ids, axis=0) @ w])
    return g


def gated(rows: int, d: int) -> Graph:
    """The second product of a gated MLP; its operand is silu(a) * b, from an input of twice the width."""
    g = rlx.Graph("gated")
    x, w = g.input("x", (rows, 2, d), rlx.f32), g.param("w", (d, d), rlx.f32)
    up, down = (part.reshape((rows, d)) for part in rlx.split(x, 2, axis=1))
    g.set_outputs([(rlx.silu(up) * down) @ w])
    return g


def dequant(rows: int, d: int, form: str) -> Graph:
    g = rlx.Graph("dequant")
    x, r, b = g.input("x", (rows, d), rlx.f32), g.input("r", (rows, d), rlx.f32), g.param("b", (d,), rlx.f32)
    w = g.param("w", (d, FORMATS[form].row_bytes(d)), rlx.u8)
    g.set_outputs([rlx.silu(dequant_matmul(x, w, format=form) + b) + r])
    return g


def block(rows: int, d: int, form: str) -> Graph:
    """A norm in front of a product with packed weights."""
    g = rlx.Graph("block")
    x, s = g.input("x", (rows, d), rlx.f32), g.param("s", (d,), rlx.f32)
    w = g.param("w", (d, FORMATS[form].row_bytes(d)), rlx.u8)
    g.set_outputs([dequant_matmul(rlx.rms_norm(x, s), w, format=form)])
    return g


def decoded(rows: int, d: int, form: str) -> Graph:
    """A plain product with decoded weights; the other form decodes them once, before the runs, to f32 in memory."""
    g = rlx.Graph("decoded")
    x, w = g.input("x", (rows, d), rlx.f32), g.param("w", (d, FORMATS[form].row_bytes(d)), rlx.u8)
    g.set_outputs([x @ rlx.dequantize(w, format=form, columns=d).T])
    return g


def attended(rows: int, keys: int, d: int, follower: str) -> Graph:
    """Attention of WIDTH / d heads, its result as [rows, WIDTH], and what follows it."""
    g = rlx.Graph("attended")

    def heads(name: str, n: int) -> Value:
        return g.input(name, (1, n, WIDTH), rlx.f32).reshape((1, n, WIDTH // d, d)).transpose(0, 2, 1, 3)

    out = rlx.attention(heads("q", rows), heads("k", keys), heads("v", keys), mask="causal")
    out = out.transpose(0, 2, 1, 3).reshape((1, rows, WIDTH))
    r = None if follower == "cast" else g.input("r", (1, rows, WIDTH), rlx.f32)
    g.set_outputs([out.astype("bf16") if r is None else out + r if follower == "residual" else out * rlx.sigmoid(r)])
    return g


def cases(names: list[str]) -> Iterator[Made]:
    before: dict[str, Callable[[int, int], Graph]] = {"norm": norm, "cast": cast, "gather": gather, "gated": gated}
    for name in names:
        for rows in ROWS if name in before else ():
            for d in DEPTHS:
                yield f"{name} {rows} x {d}", before[name](rows, d), "operands"
        for form in FORMATS_MEASURED if name == "decoded" else ():
            for rows in QUANTISED_ROWS:
                for d in DEPTHS[1:]:
                    yield f"x @ dequantize({form}).T, {rows} x {d}", decoded(rows, d, form), "quantised"
        for rows, keys in CHUNKS if name == "attention" else ():
            for d in HEAD_DIMS:
                for follower in ("cast", "residual", "gate"):
                    graph = attended(rows, keys, d, follower)
                    yield f"attention {rows} x {keys}, heads of {d}, {follower}", graph, "followers"
        for form in FORMATS_MEASURED if name == "dequant" else ():
            for rows in QUANTISED_ROWS:
                yield f"silu(dequant {form} + b) + r, {rows} x 4096", dequant(rows, 4096, form), "followers"
        for form in FORMATS_MEASURED if name == "block" else ():
            for rows in QUANTISED_ROWS:
                yield f"norm, dequant {form}, {rows} x 4096", block(rows, 4096, form), "operands"


def value_of(leaf: Value, rng: np.random.Generator) -> np.ndarray:
    dims = leaf.shape.static
    if leaf.dtype == rlx.u8:
        return rng.integers(0, 60, dims, np.uint8)  # scales stay small
    if leaf.dtype == rlx.i32:
        return rng.integers(0, 2048, dims, np.int32)
    return (rng.standard_normal(dims, np.float32) / np.sqrt(dims[-1])).astype(leaf.dtype.numpy)


def compiled(graph: Graph, threads: int, disable: tuple[str, ...]) -> tuple[Call, np.ndarray, int]:
    """(call, result, kernels of a run)"""
    made = rlx.Session(rlx.Device.CPU).compile(graph, rlx.CompileOptions(threads=threads, disable=disable))
    rng = np.random.default_rng(0)
    for leaf in graph.params:
        made.set_param(leaf.node.name or "", value_of(leaf, rng))
    slots = [made.input_view(leaf.node.name or "") for leaf in graph.inputs]
    for slot, leaf in zip(slots, graph.inputs):
        slot[...] = value_of(leaf, rng)
    result = made.run({leaf.node.name or "": slot.copy() for leaf, slot in zip(graph.inputs, slots)})[0]
    return made.bound(slots), result, len(made.program().steps)


def alternated(calls: list[Call], seconds: float, threads: int) -> list[float]:
    """Seconds of each call; the calls alternate."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 20:
        for call, found in zip(calls, times):
            start = clock()
            call()
            found.append(clock() - start)
    return [float(np.quantile(found[2:], 0.5 if threads == 1 else 0.02)) for found in times]


def measure(threads: int, seconds: float, names: list[str]) -> None:
    lines = []
    for name, graph, fusion in cases(names):
        (one, found, few), (other, expected, more) = (compiled(graph, threads, off) for off in ((), (fusion,)))
        error = 1e-5 * np.abs(expected).max() if fusion == "quantised" else 0  # sums of one row are in another order
        if not np.allclose(found, expected, 0, error):
            raise SystemExit(f"{name}: the forms differ by {np.abs(found.astype('f4') - expected.astype('f4')).max()}")
        times = alternated([one, other], seconds, threads)
        micros = [f"{t * 1e6:.1f}" for t in times]
        lines.append([name, f"{few} / {more}", *micros, f"{times[1] / times[0]:.3f}" if few < more or error else "-"])
    print(f"\n{threads} thread(s), us; {'thread CPU time' if threads == 1 else 'wall time'}")
    print(table(["case", "kernels", "as is", "apart", "apart / as is"], lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    every = "norm cast gather gated dequant block decoded attention".split()
    parser.add_argument("--cases", nargs="+", default=every, choices=every, metavar="CASE", help=", ".join(every))
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    if args.force:
        usual = backend.with_natives
        backend.with_natives = lambda target: replace(usual(target), computes=lambda producer: True)
    print(header("numpy", "llvmlite"), flush=True)
    for threads in args.threads:
        measure(threads, args.seconds, args.cases)


if __name__ == "__main__":
    main()

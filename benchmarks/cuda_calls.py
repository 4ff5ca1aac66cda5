"""Calls and copies on one GPU: the time to start a run, copies of host arrays, pipelines whose copies overlap their runs.

    python benchmarks/cuda_calls.py [calls] [copies] [pipelines]

Times are of the host. `burst`: of each of 40 calls to an idle GPU, which takes them all without a wait. `sustained`: of each of
1,000 calls, which the GPU may slow down. Both are medians; outputs are compared with numpy's first. `hidden`: how much of the
shorter ones of graph, copies in and copies out a pipeline hides behind the longest one.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_measure import header, wait_all
from rlx import knobs
from rlx.backends.cuda.gpu import gpu

F = np.float32
SIDE = 1024
SETS = 24


def each(call: Callable[[], object], count: int, rounds: int = 9) -> float:
    """Median seconds of a call of the host."""
    times = []
    for _ in range(rounds):
        wait_all()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - begun) / count)
    wait_all()
    return statistics.median(times)


def calls() -> None:
    import torch

    g = rlx.Graph("one")
    g.set_outputs([g.input("x", (16,), "f32") + 1.0])
    compiled, x, tensor = rlx.Session("cuda").compile(g), np.arange(16, dtype=F), torch.arange(16.0, device="cuda")
    with knobs.override(RLX_CALLS="python"):
        plain = rlx.Session("cuda").compile(g).bound([x])
    bound, there, out = compiled.bound([x]), compiled.bound([tensor]), torch.empty(16, device="cuda")
    for call in (bound, there, plain):
        for value in range(3):
            x[...] = value
            tensor.fill_(value)
            assert (np.asarray(call()[0]) == value + 1).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(tensor, 1.0, out=out)
    launch = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(gpu(0).entry("cuGraphLaunch"))
    graphs = [int(replay.graph()) for replay in (compiled._executable._whole, compiled._executable._fed)]  # type: ignore[attr-defined]
    stream = int(gpu(0).use())
    rows = {
        "bound, numpy": bound, "run_slots, numpy": lambda: compiled.run_slots([x]), "bound, torch tensor": there,
        "run_slots, torch tensor": lambda: compiled.run_slots([tensor]),  # type: ignore[list-item]
        "bound, numpy, calls in Python": plain, "torch eager, out=": lambda: torch.add(tensor, 1.0, out=out),
        "torch CUDAGraph.replay": graph.replay,
        "cuGraphLaunch alone, 1 kernel, by ctypes": lambda: launch(graphs[0], stream),
        "cuGraphLaunch alone, 2 kernels, by ctypes": lambda: launch(graphs[1], stream),
    }  # fmt: skip
    print("| x + 1, 16 elements | burst, us | sustained, us |\n| --- | --- | --- |")
    for name, call in rows.items():
        print(f"| {name} | {each(call, 40) * 1e6:.2f} | {each(call, 1000) * 1e6:.2f} |", flush=True)


def copies() -> None:
    import torch

    device, nbytes = gpu(0), 256 << 20
    host, address, pinned = np.ones(nbytes, np.uint8), gpu(0).allocate(nbytes), gpu(0).pinned(nbytes)
    tensor, stream = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), device.use()
    there = pinned.ctypes.data
    rows: dict[str, Callable[[], object]] = {
        "to the GPU, rlx": lambda: device.copy_in(address, host),
        "to the GPU, torch": lambda: tensor.copy_(torch.from_numpy(host)),
        "to the GPU, from pinned memory": lambda: device.enqueue("cuMemcpyHtoDAsync", address, there, nbytes, stream),
        "to the host, rlx, a fresh array": lambda: device.copy_out(np.empty(nbytes, np.uint8), address),
        "to the host, torch, a fresh tensor": lambda: tensor.cpu(),
        "to the host, to pinned memory": lambda: device.enqueue("cuMemcpyDtoHAsync", there, address, nbytes, stream),
    }
    print("\n| 256 MB | GB/s |\n| --- | --- |")
    for name, copy in rows.items():

        def finished(copy: Callable[[], object] = copy) -> None:
            copy()
            wait_all()

        print(f"| {name} | {nbytes / each(finished, 1, 5) / 1e9:.1f} |", flush=True)
    device.free(address, nbytes)


def pipelines() -> None:
    print("\n| in and out, MB each | products | run_pipelined, ms a run | run | graph alone | copies in | copies out | hidden |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rows, products in ((256, 8), (4096, 0), (4096, 8), (16384, 8)):
        times = _pipeline(rows, products)
        parts = [times[name] for name in ("graph", "in", "out")]
        hidden = (sum(parts) - times["pipelined"]) / (sum(parts) - max(parts))
        ms = " | ".join(f"{t * 1e3:.3f}" for t in times.values())
        print(f"| {rows * SIDE * 4 >> 20} | {products} | {ms} | {hidden:.0%} |", flush=True)


def _pipeline(rows: int, products: int) -> dict[str, float]:
    """Seconds a run."""
    g, rng = rlx.Graph("pipeline"), np.random.default_rng(0)
    y, w = g.input("x", (rows, SIDE), "f32"), g.param("w", (SIDE, SIDE), "f32")
    for _ in range(products):
        y = rlx.tanh(y @ w)
    g.set_outputs([y + rlx.sum(w)])
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_param("w", (rng.standard_normal((SIDE, SIDE)) / 32).astype(F))
    different = [rng.standard_normal((rows, SIDE), F) for _ in range(4)]
    inputs = [{"x": different[i % 4]} for i in range(SETS)]
    compiled.run_pipelined(inputs[:8])
    pipelined, found = _seconds(lambda: compiled.run_pipelined(inputs))
    single, want = _seconds(lambda: [compiled.run(given) for given in inputs])
    assert all((a == b).all() for one, other in zip(found, want, strict=True) for a, b in zip(one, other, strict=True))
    executable: Any = compiled._executable
    (x,), out = compiled.program().inputs, compiled.program().outputs[0].buffer
    alone = {
        "graph": lambda: [executable._whole.queue() for _ in inputs],
        "in": lambda: [executable.write(x, given["x"]) for given in inputs],
        "out": lambda: [executable.read(out) for _ in inputs],
    }
    times = {"pipelined": pipelined, "run": single} | {name: _seconds(part)[0] for name, part in alone.items()}
    return {name: t / SETS for name, t in times.items()}


def _seconds(call: Callable[[], Any], rounds: int = 3) -> tuple[float, Any]:
    times, found = [], None
    for _ in range(rounds):
        gpu(0).wait()
        begun = time.perf_counter()
        found = call()
        gpu(0).wait()
        times.append(time.perf_counter() - begun)
    return statistics.median(times), found


SECTIONS = {"calls": calls, "copies": copies, "pipelines": pipelines}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help=", ".join(SECTIONS))
    wanted = parser.parse_args().sections
    print(header())
    for name in wanted or SECTIONS:
        SECTIONS[name]()

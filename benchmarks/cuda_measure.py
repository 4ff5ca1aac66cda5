"""Code shared by the CUDA benchmarks: times on the GPU, the kernels of a program with their times, the copy bandwidth."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlx.backends.cuda.gpu import check, gpu
from rlx.backends.cuda.runs import Replay
from rlx.ir.kernel import Contract, Kernel

Call = Callable[[], object]
MODES = {"torch.compile": "max-autotune-no-cudagraphs", "default": "default"}  # of torch.compile; "default" compiles faster


def interleaved(calls: Mapping[str, Call], rounds: int = 7, seconds: float = 0.01) -> dict[str, float]:
    """Median seconds per call of each, by wall clock with one wait at the end. The calls alternate in every round."""
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        wait_all()
        start = time.perf_counter()
        call()
        wait_all()
        repeats[name] = max(2, min(1000, int(seconds / max(time.perf_counter() - start, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            wait_all()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def wait_all() -> None:
    import torch

    gpu(0).wait()
    torch.cuda.synchronize()


def replay(compiled: Any) -> Call:
    """The graph of a compiled program, replayed without copies of inputs and outputs, and without a wait."""
    parts = compiled._executable._steps

    def run() -> None:
        for part in parts:
            part.queue()

    return run


def torch_engines(network: Callable[..., Any], inputs: Sequence[Any], engines: Iterable[str]) -> dict[str, Call]:
    """Calls of those engines that are torch's: "eager", and what torch.compile makes in the modes above, recorded as one CUDA
    graph: the inputs stay where they are, so that nothing is copied and Python takes no part in a replay."""
    import torch

    calls: dict[str, Call] = {}
    for engine in engines:
        if engine == "eager":
            calls[engine] = lambda: network(*inputs)
        elif engine in MODES:
            run, graph = torch.compile(network, mode=MODES[engine], dynamic=False), torch.cuda.CUDAGraph()
            for _ in range(3):
                run(*inputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                kept = run(*inputs)
            calls[engine] = lambda graph=graph, kept=kept: graph.replay()
    return calls


def kernel_times(compiled: Any, repeats: int = 20) -> list[tuple[str, int, float, int, int]]:
    """(ops, launches, microseconds, bytes, operations of all of them) of the kernels of a run, slowest first. Each is repeated on
    its memory. Bytes are those of whole buffers, each once."""
    executable, device = compiled._executable, gpu(0)
    d, stream, found = device.driver, device.use(), dict[str, list[Any]]()
    first, last = (check(d.cuEventCreate(0), "timing") for _ in range(2))
    elapsed = getattr(d, "cuEventElapsedTime_v2", None) or d.cuEventElapsedTime
    for launched, steps in executable.step_launches:
        many = Replay(executable, [(launched, steps)] * repeats)
        many.queue()
        check(d.cuEventRecord(first, stream), "timing")
        many.queue()
        check(d.cuEventRecord(last, stream), "timing")
        check(d.cuEventSynchronize(last), "timing")
        kernels = [step.kernel for _, step in steps]
        row = found.setdefault(" | ".join(" ".join(kernel.origin) for kernel in kernels), [0, 0.0, 0, 0])
        us = check(elapsed(first, last), "timing") / repeats * 1e3
        for n, more in enumerate((1, us, *map(sum, zip(*map(work_of, kernels))))):
            row[n] += more
    rows = [(name, *row) for name, row in found.items()]
    return sorted(rows, key=lambda row: -row[2])  # type: ignore[return-value]


def work_of(kernel: Kernel) -> tuple[int, int]:
    """Bytes of the buffers, and operations of the products."""
    points = math.prod(n for _, n in kernel.grid)
    products = (2 * s.m * s.n * s.k * points for s in kernel.body if isinstance(s, Contract))
    return sum(b.size * b.dtype.itemsize for b in kernel.buffers), sum(products)


def print_kernels(compiled: Any) -> None:
    for ops, count, us, moved, done in kernel_times(compiled):
        rates = f"{moved / us / 1e6:6.2f} TB/s {done / us / 1e6:6.0f} TFLOP/s"
        print(f"  {us:9.1f} us  {count:3} x {us / count:8.2f} {rates}  {ops[:100]}", flush=True)


def header() -> str:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and a torch that was built for CUDA")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


__all__ = ["header", "interleaved", "kernel_times", "print_kernels", "replay", "torch_engines", "wait_all"]

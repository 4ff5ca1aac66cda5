"""Code shared by the CUDA benchmarks: times on the GPU, the kernels of a program with their times, the copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rlx.backends.cuda.gpu import check, gpu
from rlx.backends.cuda.runs import Replay

Call = Callable[[], object]


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


def kernel_times(compiled: Any, repeats: int = 20) -> list[tuple[str, int, float]]:
    """(ops, launches, microseconds of all of them) of the kernels of a run, slowest first. Each is repeated on its memory."""
    executable, device = compiled._executable, gpu(0)
    d, stream, total, count = device.driver, device.use(), Counter[str](), Counter[str]()
    first, last = (check(d.cuEventCreate(0), "timing") for _ in range(2))
    elapsed = getattr(d, "cuEventElapsedTime_v2", None) or d.cuEventElapsedTime
    for launched, steps in executable.step_launches:
        many = Replay(executable, [(launched, steps)] * repeats)
        many.queue()
        check(d.cuEventRecord(first, stream), "timing")
        many.queue()
        check(d.cuEventRecord(last, stream), "timing")
        check(d.cuEventSynchronize(last), "timing")
        code = " | ".join(" ".join(step.kernel.origin) for _, step in steps)
        total[code] += check(elapsed(first, last), "timing") / repeats * 1e3  # type: ignore[assignment]
        count[code] += 1
    return [(name, count[name], us) for name, us in total.most_common()]


def header() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


__all__ = ["header", "interleaved", "kernel_times", "replay", "wait_all"]

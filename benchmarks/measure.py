"""Code shared by all benchmarks: interleaved medians, tables, and a header with the machine and the versions. The limits of the
machine (rlx.backends.cpu.roofline) are measured in the same rounds as the code compared with them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.backends.cpu.roofline import Call, dot_call, fma_call, read_call
from rlx.backends.cpu.target import host_target

SETTLED = 0.03  # seconds; OpenBLAS's idle workers spin for 20 ms, those of other libraries for a few

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

__all__ = ["DOCUMENT", "Call", "append", "dot_call", "fma_call", "header", "interleaved", "read_call", "share", "table"]


def interleaved(calls: Mapping[str, Call], rounds: int = 9, seconds: float = 0.01, threads: int = 1) -> dict[str, float]:
    """Median seconds per call of each. The calls alternate: each of `rounds` runs each of them for about `seconds`.

    With one thread it is the CPU time of the calling thread, which excludes other programs on the same core (they made the wall
    time of one loop of multiply-adds vary fourfold). With more threads it has to be wall time: run those on a quiet machine,
    and see `share`; before each turn the workers of the one before come to rest: they would take a core. Calls must do their work
    in the calling thread when `threads` is 1."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if threads > 1:
                time.sleep(SETTLED)
                call()
            start = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def share(rate: float, limit: float) -> str:
    """A rate as percent of a limit measured in the same rounds. A rate above the limit is impossible: then one of
    the two measurements was disturbed (or the code of the limit is not the fastest), and the text is marked with a `!`."""
    return f"{100 * rate / limit:.0f}%{'!' if rate > 1.03 * limit else ''}"


# -- output --------------------------------------------------------------------------------------------------------


def header(*packages: str) -> str:
    """Machine and versions, for the first lines of a result."""
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    family = {line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith(("cpu family", "model\t"))}
    features = [f for f in host_target(1).features if "=" not in f]
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages]
    return "\n".join(
        [
            f"{model} (family/model {'/'.join(sorted(family))}), {os.cpu_count()} CPUs, {' '.join(features)}",
            f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {', '.join(versions)}",
        ]
    )


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            return lines.read().splitlines()
    except OSError:  # not Linux
        return []


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[x]) for row in cells) for x in range(len(heads))]
    lines = ["  ".join(c.ljust(w) if x == 0 else c.rjust(w) for x, (c, w) in enumerate(zip(row, widths))) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def append(title: str, about: str, lines: Sequence[str]) -> None:
    """Add a section to docs/benchmarks.md: the rows of a table among `lines`, then the others as notes."""
    rows, notes = ([x for x in lines if x.startswith("|") is wanted] for wanted in (True, False))
    noted = f"\n\n{'; '.join(notes)}." if notes else ""
    with DOCUMENT.open("a", encoding="utf-8") as f:
        f.write(f"\n## {title}\n\n{about}\n\n" + "\n".join(rows) + noted + "\n")

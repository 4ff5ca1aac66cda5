"""Time from process start to the first token of the Qwen3-0.6B shape on one GPU (bf16, batch 1), without loading of weights.

    python benchmarks/cuda_startup.py [--rounds 5]

Each start is a new process: cold, and from the disk cache. Weights are zeros, of the right size, that nobody has set. Times are
medians, in milliseconds. `session` has the start of the driver; its context on the GPU is made meanwhile, by another thread;
`compile` also loads the code and allocates the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PARTS = ("python", "imports", "session", "graph", "compile", "first token", "second token")


def start(begun: float) -> dict[str, float]:
    """The parts, in ms. `begun`: when the process was started."""
    marks = [begun, time.perf_counter()]
    import numpy as np

    import rlx
    from benchmarks.qwen_shape import CONFIG
    from rlx.frontends.models.decoder import build
    from rlx.frontends.models.families import config_of

    marks.append(time.perf_counter())
    session = rlx.Session("cuda")
    marks.append(time.perf_counter())
    graph = build(config_of(CONFIG), 1, 1, 512, "bf16", cache="bf16", steps=())
    marks.append(time.perf_counter())
    compiled = session.compile(graph)
    marks.append(time.perf_counter())
    store = compiled._weights.store
    for name in compiled._weights.decls:
        store.changed(name)
        store.kept.add(name)
    compiled._weights._made(range(len(compiled._weights.sources)))
    for _ in range(2):
        compiled.run_slots(())
        assert np.asarray(compiled.outputs_view()[0]).size == 1
        marks.append(time.perf_counter())
    return {name: (b - a) * 1e3 for name, a, b in zip(PARTS, marks[:-1], marks[1:], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        print(json.dumps(start(args.worker)))
        return
    from rlx.backends import is_available

    if not is_available("cuda"):
        raise SystemExit("this benchmark needs an NVIDIA GPU")
    print(f"| | {' | '.join(PARTS)} | all but the second token | graph, compile, first token |\n|{' --- |' * (len(PARTS) + 3)}")
    with tempfile.TemporaryDirectory() as folder:
        for name, rounds in (("cold", 1), ("from the cache", args.rounds)):
            found = [_process(folder) for _ in range(rounds)]
            parts = [statistics.median(f[part] for f in found) for part in PARTS]
            sums = [statistics.median(sum(f[p] for p in of) for f in found) for of in (PARTS[:-1], PARTS[3:-1])]
            print(f"| {name} | {' | '.join(f'{ms:.0f}' for ms in (*parts, *sums))} |", flush=True)


def _process(folder: str) -> dict[str, float]:
    env = os.environ | {"RLX_CACHE": "1", "RLX_CACHE_DIR": folder, "PYTHONPATH": str(ROOT)}
    worker = [sys.executable, __file__, "--worker", str(time.perf_counter())]
    return json.loads(subprocess.run(worker, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)


if __name__ == "__main__":
    main()

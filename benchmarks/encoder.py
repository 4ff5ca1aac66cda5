"""Sentence encoders on rlx and every installed peer: MiniLM-L6, or the size of BERT-base with random weights.

    python benchmarks/encoder.py [--model minilm bert-base] [--precision f32 bf16 int8] [--threads 1 2] [--shapes 1x16] [--write]

Each engine runs in a separate process, and the engines alternate. The others wait on a pipe meanwhile, so that no idle worker
spins during a measurement. Every peer gets the same ids and mask and returns the same normalised embeddings, which are compared
first. Times are medians and 99th percentiles of single runs through the public call. With one thread it is the CPU time of the
engine's process, which excludes other programs. With more threads it is wall time, without the runs in which the system preempted
the engine, unless no other runs are left. The limit is the time of the model's multiply-adds at the peak of one core times the
threads: of f32, or of the instruction for bf16 or for bytes (the matrix unit's, if there is one). That peak is measured just
before and after each turn, and the share is the median over turns. torch gets the library that lets its MKL use its fast kernels
on AMD processors. An engine may be installed in another environment: --python MAX=PATH names its interpreter.

bf16: weights and activations, in OpenVINO by its hint. int8: rlx and torch quantise activations at run time; OpenVINO and ONNX
Runtime run a model that onnxruntime.quantization made, calibrated with the ids of the benchmark itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.encoder_peers import ENGINES, RUNNERS, Task
from benchmarks.measure import append, dot_call, fma_call, header
from benchmarks.mkl import mkl_on_amd

SHAPES = {"minilm": ("1x16", "1x128", "8x128", "32x128"), "bert-base": ("1x128", "8x512")}
PACKAGES = {"OpenVINO": "openvino", "MAX": "max", "JAX": "jax", "torch": "torch", "torch.compile": "torch"}
PACKAGES |= {"rlx": "llvmlite", "rlx, tuned": "llvmlite"}
LIMITS = "limits"
TURN = 0.3  # seconds of runs in a turn; at least one run
LONG = 0.5  # seconds; a run this long needs no separate warm-up
TOLERANCE = {"f32": 2e-4, "bf16": 2e-2, "int8": 0.2}  # between unit vectors; peers have one int8 scale for all rows
WIDTHS = {"bf16": 2, "int8": 4}  # products that one instruction's lane sums
RESULTS = 2048  # numbers of a result that are compared


@dataclass(frozen=True)
class Workload:
    """The workload of a benchmark. `shapes`: of each model. `runners`: by engine; runner(task) returns a function that runs it
    once. `task`: (model, batch, length, threads) -> a task with `flops`, `threads` and `precision`. `program`: the file that each
    engine's process runs. `engines`: by precision, those that have it. A model in any but f32 is called "MODEL PRECISION".
    `tolerance`: by precision, the greatest difference between two engines."""

    program: str
    title: str
    shapes: Mapping[str, tuple[str, ...]]
    runners: Mapping[str, Callable[[Any], Callable[[], np.ndarray]]]
    task: Callable[[str, int, int, int], Any]
    engines: Mapping[str, tuple[str, ...]]
    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)


def package(engine: str) -> str:
    return PACKAGES.get(engine, "onnxruntime")


# -- a process of an engine ----------------------------------------------------------------------------------------


def worker(engine: str, task: Any, runners: Mapping[str, Callable[[Any], Callable[[], np.ndarray]]]) -> None:
    """Answers each line on stdin with a turn's result."""
    answers, sys.stdout = sys.stdout, sys.stderr
    clock = time.process_time if task.threads == 1 else time.perf_counter
    if engine == LIMITS:
        call, work = dot_call(WIDTHS[task.precision]) if task.precision in WIDTHS else fma_call(steps=20_000)
        run, clock = (lambda: call() or np.array(work)), time.thread_time
    else:
        run = runners[engine](task)

    def timed() -> float:
        begun = clock()
        run()
        return clock() - begun

    result = run().ravel()[:RESULTS].tolist()
    once = timed()
    once = once if once > LONG else min(timed() for _ in range(3))
    count = max(1, int((TURN / 6 if engine == LIMITS else TURN) / once))
    print(json.dumps({"result": result, "flops": task.flops if engine == "rlx" else 0}), file=answers, flush=True)
    for _ in sys.stdin:
        if once < LONG:
            run()  # restores caches and clock rate after other engines
        times, taken = [], [resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw]
        for _ in range(count):
            times.append(timed())
            taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)
        alone = [t for t, before, after in zip(times, taken, taken[1:]) if before == after] if task.threads > 1 else times
        print(json.dumps(alone or times), file=answers, flush=True)


@dataclass
class Engine:
    """A worker process, connected by two pipes."""

    name: str
    process: subprocess.Popen[str]
    turns: list[list[float]] = field(default_factory=list)

    @staticmethod
    def start(program: str, name: str, model: str, shape: str, threads: int, interpreter: str) -> Engine:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if name.startswith("torch"):
            environment |= mkl_on_amd()
        command = [interpreter, program, "--worker", name, model, shape, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return Engine(name, subprocess.Popen(command, **pipes, env=environment))

    def ready(self) -> dict:
        """The message that the worker sends when it has started. SystemExit: it did not start."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} did not start")
        return json.loads(line)

    def turn(self) -> None:
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        self.turns.append(json.loads(self.process.stdout.readline()))

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def take_turns(running: list[Engine], limits: Engine, rounds: int) -> None:
    """Engines in turn, and the limits before and after each. All processes end."""
    limits.turn()
    for _ in range(rounds):
        for engine in running:
            time.sleep(0.02)
            engine.turn()
            limits.turn()
    for engine in (*running, limits):
        engine.end()


# -- the table -----------------------------------------------------------------------------------------------------


def compare(
    w: Workload, engines: Sequence[str], model: str, shape: str, threads: int, rounds: int, pythons: dict[str, str]
) -> list[str]:
    """Table rows of one shape. SystemExit: a peer's result differs."""
    running, said = [], {}
    for name in [*engines, LIMITS]:  # one after the other: some take a gigabyte and both cores to start
        running.append(Engine.start(w.program, name, model, shape, threads, pythons.get(name, sys.executable)))
        said[name] = running[-1].ready()
    limits = running.pop()
    ours = np.array(said["rlx"]["result"])
    apart = {name: float(np.abs(np.array(said[name]["result"]) - ours).max()) for name in engines}
    if max(apart.values()) > w.tolerance.get(model.split()[-1], w.tolerance["f32"]):
        raise SystemExit(f"{model} {shape}: the peers disagree: {apart}")
    take_turns(running, limits, rounds)
    (work,) = said[LIMITS]["result"]
    peaks = [work / statistics.median(t) * threads for t in limits.turns]
    medians = {e.name: statistics.median(t for turn in e.turns for t in turn) for e in running}
    rows = []
    for at, engine in enumerate(running):
        near = [(peaks[t] + peaks[t + 1]) / 2 for t in range(at, len(peaks) - 1, len(running))]
        turns = [said["rlx"]["flops"] / statistics.median(turn) for turn in engine.turns]
        share = statistics.median(rate / peak for rate, peak in zip(turns, near, strict=True))
        p99 = float(np.quantile([t for turn in engine.turns for t in turn], 0.99))
        beside = [statistics.median(theirs) / statistics.median(own) for theirs, own in zip(engine.turns, running[0].turns)]
        ratio = "" if engine.name == "rlx" else f"{statistics.median(beside):.2f}"
        cells = [f"{model} {shape.replace('x', ' × ')}", threads, engine.name, f"{medians[engine.name] * 1e3:.3f}"]
        cells += [f"{p99 * 1e3:.3f}", f"{share:.0%}", ratio, f"{apart[engine.name]:.0e}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
        print(rows[-1], flush=True)
    return rows


def main(w: Workload, about: str) -> None:
    """The command. `about`: its description for --help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(w.shapes), choices=w.shapes)
    parser.add_argument("--precision", nargs="+", default=["f32"], choices=w.engines)
    parser.add_argument("--shapes", nargs="+", help="batch x length, instead of the model's own")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engines", nargs="+", default=list(w.runners), choices=w.runners)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="of another environment")
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        engine, model, shape, threads = args.worker
        worker(engine, w.task(model, *map(int, shape.split("x")), int(threads)), w.runners)
        return
    pythons = dict(pair.split("=", 1) for pair in args.python)
    there = [e for e in args.engines if e in pythons or importlib.util.find_spec(package(e))]
    engines = ["rlx", *(e for e in there if e != "rlx")]
    about = header(*dict.fromkeys(package(e) for e in engines if e not in pythons))
    about += "".join(f"; {e} is not installed" for e in args.engines if e not in engines)
    heads = ["model", "threads", "engine", "median, ms", "p99, ms", "of the limit", "rlx is faster by", "max abs difference"]
    head = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    print(about, *head, sep="\n", flush=True)
    rows: list[str] = []
    for model, precision in ((m, p) for m in args.model for p in args.precision):
        able = [e for e in engines if e in w.engines[precision]]
        name = model if precision == "f32" else f"{model} {precision}"
        for shape, threads in ((s, t) for s in args.shapes or w.shapes[model] for t in args.threads):
            rows += compare(w, able, name, shape, threads, args.rounds, pythons)
    if args.write:
        append(f"{w.title}, {time.strftime('%Y-%m-%d')}", about, [*head, *rows])


if __name__ == "__main__":
    main(Workload(__file__, "Encoders, `make bench`", SHAPES, RUNNERS, Task, ENGINES), __doc__ or "")

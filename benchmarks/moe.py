"""One layer of a mixture of experts (64, of which each token takes 8; width 1024, inner width 512) on rlx and installed peers.

    python benchmarks/moe.py [--tokens 1 16 128] [--dtype f32] [--threads 2] [--engines ...] [--rounds 7] [--write]

Each engine runs in a separate process, and the engines alternate; the others wait on a pipe. A run is the whole layer: router,
choice, experts, weighted sum. Runs take several sets of tokens in turn, so that the experts of a few tokens are not left in the
caches by the run before. Results are compared with float64 first. Times are medians of single runs through the public call: with
one thread the CPU time of the process, which excludes other programs, else wall time, without the runs in which the system
preempted the engine, unless no others are left. The limit is the greater of two times: reading the experts in use once, at the
rate of generated code that only reads with as many threads, and multiplying, at the peak of one core times the threads. Both are
measured just before and after each turn; the share is the median over turns (marked with ! if above 103%: then one of the two was
disturbed).
torch gets the library that lets its MKL use its fast kernels on AMD processors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.encoder import LIMITS, Engine, package, take_turns
from benchmarks.gemv import read_calls
from benchmarks.measure import append, dot_call, header, share
from benchmarks.moe_peers import EXPERTS, ONLY, RUNNERS, Layer, Run

TURN = 0.4  # seconds of runs in a turn; at least one run of each set of tokens
TOLERANCE = {"f32": 1e-5, "bf16": 0.06}  # of the root mean square; rounded scores may choose another expert


def needed(engine: str) -> str:
    """The package of an engine."""
    return package("torch" if engine.startswith("torch") else engine)


def clock(layer: Layer) -> float:
    return time.process_time() if layer.threads == 1 else time.perf_counter()


def limits(layer: Layer) -> Callable[[], list[float]]:
    """Measures (bytes per second, multiplies and adds per second)."""
    read, nbytes = read_calls(layer.threads, times=3)  # long enough to make the start of the threads negligible
    dot, work = dot_call(2 if layer.dtype == "bf16" else 1)

    def turn() -> list[float]:
        begun = clock(layer)
        read()
        middle = clock(layer)
        for _ in range(10):
            dot()
        return [nbytes / (middle - begun), 10 * work * layer.threads / (clock(layer) - middle)]

    return turn


def checked(run: Run, layer: Layer) -> float:
    """The root mean square of the error, relative to the result's."""
    want = layer.expected(layer.x[0])
    apart = run(layer.x[0]).reshape(want.shape) - want
    return float(np.sqrt(np.mean(apart**2) / np.mean(want**2)))


def timed(run: Run, layer: Layer) -> Callable[[], list[float]]:
    """Measures a turn's seconds per run."""
    begun = time.perf_counter()
    for x in layer.x:
        run(x)
    again = max(1, int(TURN / (time.perf_counter() - begun)))

    def turn() -> list[float]:
        run(layer.x[-1])  # restores clock rate and workers after other engines
        times, taken = [], [resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw]
        for x in layer.x * again:
            begun = clock(layer)
            run(x)
            times.append(clock(layer) - begun)
            taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)
        alone = [t for t, before, after in zip(times, taken, taken[1:]) if before == after] if layer.threads > 1 else times
        return alone or times

    return turn


def worker(engine: str, layer: Layer) -> None:
    """Answers each line on stdin with a turn's result."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if engine == LIMITS:
        turn, said = limits(layer), {"work": layer.work}
    else:
        run = RUNNERS[engine](layer)
        said = {"error": checked(run, layer)}
        for name in ("gate_up", "down"):  # 400 MB
            vars(layer).pop(name)
        turn = timed(run, layer)
    turn()
    print(json.dumps(said), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answers, flush=True)


def compare(engines: list[str], layer: Layer, rounds: int) -> list[str]:
    """Table rows of one number of tokens. SystemExit: a result is wrong."""
    running, said = [], {}
    for name in [*engines, LIMITS]:  # one after the other: some take a gigabyte and both cores to start
        running.append(Engine.start(__file__, name, layer.dtype, str(layer.tokens), layer.threads, sys.executable))
        said[name] = running[-1].ready()
    rates = running.pop()
    wrong = {name: said[name]["error"] for name in engines if not said[name]["error"] < TOLERANCE[layer.dtype]}
    if wrong:
        raise SystemExit(f"{layer.tokens} tokens, {layer.dtype}: wrong results: {wrong}")
    take_turns(running, rates, rounds)
    floors = [max(amount / rate for amount, rate in zip(said[LIMITS]["work"], turn)) for turn in rates.turns]
    rows = []
    for at, engine in enumerate(running):
        near = [(floors[t] + floors[t + 1]) / 2 for t in range(at, len(floors) - 1, len(running))]
        turns = [statistics.median(turn) for turn in engine.turns]
        of = statistics.median(floor / turn for floor, turn in zip(near, turns, strict=True))
        beside = statistics.median(turn / statistics.median(own) for turn, own in zip(turns, running[0].turns))
        median = statistics.median(t for turn in engine.turns for t in turn)
        cells = [layer.tokens, layer.dtype, engine.name, f"{median * 1e3:.2f}", share(of, 1)]
        cells += ["" if at == 0 else f"{beside:.2f}", f"{said[engine.name]['error']:.0e}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
        print(rows[-1], flush=True)
    nbytes, work = said[LIMITS]["work"]
    read, peak = (statistics.median(turn[n] for turn in rates.turns) for n in range(2))
    note = f"{layer.tokens} tokens, {layer.dtype}: {nbytes / 1e6:.0f} MB at {read / 1e9:.1f} GB/s: {nbytes / read * 1e3:.2f} ms, "
    note += f"{work / 1e9:.2f} GFLOP at {peak / 1e9:.0f} GFLOP/s: {work / peak * 1e3:.2f} ms"
    print(note, flush=True)
    return [*rows, note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--dtype", nargs="+", default=["f32"], choices=TOLERANCE)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=list(RUNNERS), choices=RUNNERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        engine, dtype, tokens, threads = args.worker
        worker(engine, Layer(int(tokens), dtype, int(threads)))
        return
    there = [e for e in args.engines if importlib.util.find_spec(needed(e))]
    engines = ["rlx", *(e for e in there if e != "rlx")]
    about = header(*dict.fromkeys(map(needed, engines)))
    about += "".join(f"; {e} is not installed" for e in args.engines if e not in engines)
    heads = ["tokens", "dtype", "engine", "median, ms", "of the limit", "rlx is faster by", "error"]
    head = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    print(about, *head, sep="\n", flush=True)
    lines: list[str] = []
    for dtype in args.dtype:
        fit = [e for e in engines if ONLY.get(e, dtype) == dtype]
        lines += [line for n in args.tokens for line in compare(fit, Layer(n, dtype, args.threads), args.rounds)]
    if args.write:
        command = f"python benchmarks/moe.py --threads {args.threads}"
        append(f"One layer of {EXPERTS} experts, {time.strftime('%Y-%m-%d')}, `{command}`", about, [*head, *lines])


if __name__ == "__main__":
    main()

"""Scaling of an encoder with cores: `python benchmarks/scaling.py [--model bert-base] [--threads 1 2 4 8 16] [--batch 8]`.

Random weights. Executables for each number of threads, and torch if it is installed, alternate; medians of wall time. The
limit is the multiply-add rate of one core, measured in the same rounds, times the threads.

--copies: what several cores can gain at best. One thread alone, as many copies of it as threads, each a process on a core of its
own, and one program on so many threads take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.encoder_peers import Run, flops
from benchmarks.measure import fma_call, header, table
from rlx.frontends.models import bert

MODELS = {"bert-base": bert.BertConfig(30522, 768, 12, 12, 3072, 512), "minilm": bert.BertConfig(30522, 384, 6, 12, 1536, 512)}
TURN = 0.5  # seconds that copies and threads run in a turn


def run_rlx(config: bert.BertConfig, batch: int, length: int, threads: int, precision: str) -> Run:
    options = rlx.CompileOptions(threads=threads, precision=precision)
    compiled = rlx.Session().compile(bert.build(config, batch, length), options)
    rng = np.random.default_rng(0)
    for name in compiled.missing_params():
        dims = next(b.shape.static for b in compiled.program().buffers if b.name == name)
        compiled.set_param(name, rng.standard_normal(dims, np.float32) * np.float32(0.05))
    slots = [compiled.input_view("input_ids"), compiled.input_view("attention_mask")]
    slots[0][...], slots[1][...] = rng.integers(1000, 20000, (batch, length)), True

    def run() -> np.ndarray:
        compiled.run_slots(slots)
        return compiled.outputs_view()[0].numpy()

    return run


def run_torch(config: bert.BertConfig, batch: int, length: int, precision: str) -> Run:
    import torch
    from transformers import BertConfig, BertModel

    sizes = {n: getattr(config, n) for n in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    how = {"intermediate_size": config.intermediate_size, "attn_implementation": "sdpa"}
    network = BertModel(BertConfig(**sizes, **how)).eval()
    network = network.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    ids = torch.randint(1000, 20000, (batch, length))

    def run() -> np.ndarray:
        with torch.inference_mode():
            return network(input_ids=ids).last_hidden_state.mean(1).float().numpy()

    return run


def worker(ends: Connection, cpus: set[int], *sizes: object) -> None:
    """Runs of so many seconds at each word; answers their median. Sizes are run_rlx's."""
    os.sched_setaffinity(0, cpus)
    run = run_rlx(*sizes)  # type: ignore[arg-type]
    run()
    ends.send(0.0)
    while (seconds := ends.recv()) > 0:
        end, times = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        ends.send(statistics.median(times))


def copies(config: bert.BertConfig, batch: int, length: int, threads: int, precision: str, rounds: int) -> None:
    cpus, ask = sorted(os.sched_getaffinity(0))[:threads], multiprocessing.get_context("spawn")
    sets = [*({cpu} for cpu in cpus), set(cpus)]  # a copy a core; then one program on all of them
    pipes = [ask.Pipe() for _ in sets]
    for (_, end), mine in zip(pipes, sets):
        ask.Process(target=worker, args=(end, mine, config, batch, length, len(mine), precision), daemon=True).start()
    *each, shared = (pipe for pipe, _ in pipes)

    def turn(*those: Connection) -> list[float]:
        for pipe in those:
            pipe.send(TURN)
        return [pipe.recv() for pipe in those]

    for pipe in (*each, shared):
        pipe.recv()
    found = [(*turn(each[0]), statistics.mean(turn(*each)), *turn(shared)) for _ in range(rounds)]
    alone, gain, most = (statistics.median(x) for x in zip(*((a, a / s, threads * a / c) for a, c, s in found)))
    for pipe in (*each, shared):
        pipe.send(0)  # they end
    print(f"| {batch} × {length} | {precision} | {threads} | {alone * 1e3:.2f} | {gain:.2f} | {most:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--precision", default="f32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="bert-base", choices=MODELS)
    parser.add_argument("--copies", action="store_true")
    args = parser.parse_args()
    config, shape = MODELS[args.model], (args.batch, args.length)
    if args.copies:
        print(header("llvmlite"))
        print("| shape | precision | threads | one, ms | threads gain | copies gain |", "| --- " * 6 + "|", sep="\n")
        for n in args.threads:
            if n > 1:
                copies(config, *shape, n, args.precision, args.rounds)
        return
    runs = {f"rlx {n}": run_rlx(config, *shape, n, args.precision) for n in args.threads}
    want = runs[f"rlx {args.threads[0]}"]().copy()
    for name, run in runs.items():
        if (apart := float(np.abs(run() - want).max())) > 1e-4:
            raise SystemExit(f"{name} differs by {apart}")
    peers = {}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        import torch

        peer = run_torch(config, *shape, args.precision)
        peers = {f"torch {n}": (n, peer) for n in args.threads[-1:]}
    fma, work = fma_call(steps=200_000)
    times: dict[str, list[float]] = {name: [] for name in (*runs, *peers, "fma")}
    for _ in range(args.rounds):
        for name, run in (*runs.items(), *peers.items(), ("fma", fma)):
            if isinstance(run, tuple):
                torch.set_num_threads(run[0])
                run = run[1]
            time.sleep(0.1)
            run()
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    median = {name: statistics.median(t) for name, t in times.items()}
    peak, first = work / median.pop("fma"), median[f"rlx {args.threads[0]}"]
    rows = []
    for name, seconds in median.items():
        limit = flops(config, *shape) / peak / int(name.split()[1])
        rows.append([name, f"{seconds * 1e3:.1f}", f"{first / seconds:.2f}", f"{limit / seconds:.0%}"])
    print(header("llvmlite", *(["torch"] if peers else [])))
    print(f"{args.model} {args.batch} x {args.length}, {args.precision}; multiply-adds {peak / 1e9:.0f} GFLOP/s on one core")
    print(table(["engine, threads", "ms", "times one thread", "of f32 limit"], rows))


if __name__ == "__main__":
    main()

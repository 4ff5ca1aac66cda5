"""One greedy answer of the Qwen3-0.6B shape, random weights: one single-thread process, and single-thread ranks that share the
model.

    python benchmarks/tensor_parallel.py [--ranks 2] [--weights f32] [--tokens 100] [--pause] [--write]

All are loaded first, then alternate in turns of `--turn` tokens, while the others wait on a pipe. Before each turn, generated
code that only reads measures the read rate of one core, and of `--ranks` cores concurrently. Rank r runs on the r-th allowed CPU,
the single process on the first. Decoding reads every matrix once, so the ratio of the two read rates bounds the speed-up. Then,
also alternating, a prompt of 128 tokens is processed, which is compute-bound. Times are medians over tokens (prompts), wall time
of the call. With f32 the tokens must be equal. Needs the weights twice in memory (5 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import qwen_shape
from benchmarks.qwen_shape import CONFIG
from rlx import knobs

PROMPT = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], 128).tolist()
SHORT = PROMPT[:32]
BITS = {"f32": 32, "bf16": 16, "q8_0": 8.5, "q4_k": 4.5}


def answering(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """Load the model, alone or with the other ranks. The returned function continues its answer for one turn."""
    import rlx
    from rlx.driver import connect
    from rlx.frontends.sampling import Sampling
    from rlx.models import load

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[args.rank]})
    path = qwen_shape.folder(args.folder) if args.weights in ("f32", "bf16") else qwen_shape.gguf_file(args.folder, args.weights)
    weights = args.weights if args.weights in ("f32", "bf16") else None
    session, options = rlx.Session(transport=connect(timeout=600)), rlx.CompileOptions(threads=1)
    model: Any = load(path, weights=weights, capacity=256, session=session, options=options)
    decoding = model.decoding(Sampling(), 0)
    decoding.first(PROMPT)
    tokens = [decoding.first(SHORT), decoding.next()]
    report = "" if model.ranks == 1 else str(model.partitioned(model.whole_graph(1, steps=())).report).splitlines()[0]
    memory = model.memory(len(PROMPT), ())

    def turn(command: str) -> dict[str, Any]:
        seconds = []
        for _ in range(args.turn if command == "answer" else 1):
            begun = time.perf_counter()
            if command == "answer":
                tokens.append(decoding.next())
            else:
                decoding.first(PROMPT)
            seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds, "tokens": tokens, "read": model.checkpoint.nbytes, "report": report, "memory": memory}

    return turn


def reading(args: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """Bytes per second read by one core, and by several concurrently."""
    from benchmarks.gemv import read_calls

    calls = [read_calls(cores) for cores in (1, args.ranks)]

    def turn(command: str) -> dict[str, Any]:
        rates = []
        for call, nbytes in calls:
            begun = time.perf_counter()
            call()
            rates.append(nbytes / (time.perf_counter() - begun))
        return {"rates": rates}

    return turn


class Worker:
    """A process connected by two pipes. It reports when it is ready, and answers each line with the result of a turn."""

    def __init__(self, command: str, rank: int, **environment: object) -> None:
        command = [sys.executable, *sys.argv, "--worker", command, "--rank", str(rank)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=knobs.environment(OMP_NUM_THREADS=1, **environment), **pipes)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def ready(self) -> None:
        if self.stdout.readline() != "ready\n":
            raise SystemExit("a worker did not start")

    def ask(self, command: str) -> None:
        print(command, file=self.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        return json.loads(self.stdout.readline())


def serve(args: argparse.Namespace) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    turn = (answering if args.worker == "answer" else reading)(args)
    print("ready", file=answers, flush=True)
    for command in sys.stdin:
        print(json.dumps(turn(command.strip())), file=answers, flush=True)


def measure(args: argparse.Namespace) -> list[str]:
    """The table and the lines below it."""
    from rlx.cli.launch import guard

    with guard(job := f"bench-{secrets.token_hex(4)}"):
        ranks = [Worker("answer", r, RLX_JOB=job, RLX_RANK=r, RLX_RANKS=args.ranks) for r in range(args.ranks)]
        one, limits = Worker("answer", 0), Worker("read", 0)
        for worker in (*ranks, one, limits):
            worker.ready()
        if args.pause:
            input("ready; press Enter to measure\n")
        rates, alone, shared, prompts = [], [], [], ([], [])
        turns = [*["answer"] * -(-(args.tokens - 2) // args.turn), *["prompt"] * 7]
        for command in turns:
            answers = command == "answer"
            for group, out in (([limits], rates), ([one], alone), (ranks, shared)) if answers else zip(([one], ranks), prompts):
                for worker in group:
                    worker.ask(command)
                out.append([worker.answer() for worker in group])
        for worker in (*ranks, one, limits):
            worker.stdin.close()
            worker.process.wait()
    read = [statistics.median(r[0]["rates"][i] for r in rates) for i in (0, 1)]
    same = all(w["tokens"][: args.tokens] == alone[-1][0]["tokens"][: args.tokens] for w in shared[-1])
    groups = {"one process": (alone, prompts[0], read[0]), f"{args.ranks} ranks": (shared, prompts[1], read[1])}
    heads = ["", "tokens/s", "faster by", "weights read, GB/s", "read rate of the cores, GB/s", "of it", "128 tokens, ms",
             "faster by", "weights of a rank, GB", "read from files by a rank, GB"]  # fmt: skip
    return [
        f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *table(groups, args.weights), "",
        f"{args.weights}, {args.tokens} greedy tokens: {'the same' if same else 'NOT the same'} on all ranks and in one process. "
        f"The read rate of {args.ranks} cores is {read[1] / read[0]:.2f} times that of one: decoding that only reads weights "
        f"cannot gain more. {shared[-1][0]['report']}.",
    ]  # fmt: skip


def table(groups: dict[str, Any], weights: str) -> list[str]:
    """The table rows; `groups`: name -> (turns of the answer, turns with a prompt, read rate)."""
    c = CONFIG
    heads = c["num_attention_heads"] + c["num_key_value_heads"]
    layer = c["hidden_size"] * (2 * c["head_dim"] * heads + 3 * c["intermediate_size"])
    nbytes = (c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]) * BITS[weights] / 8
    rows, first = [], (0.0, 0.0)
    for name, (turns, prompts, rate) in groups.items():
        token = statistics.median(s for t in turns for s in t[0]["seconds"])
        prompt = statistics.median(t[0]["seconds"][0] for t in prompts)
        first, last = first if rows else (token, prompt), turns[-1][0]
        held = (last["memory"]["params"] + last["memory"]["prepared"]) / 1e9
        cells = [
            name, f"{1 / token:.2f}", f"{first[0] / token:.2f}", f"{nbytes / token / 1e9:.1f}", f"{rate / 1e9:.1f}",
            f"{nbytes / token / rate:.0%}", f"{prompt * 1e3:.0f}", f"{first[1] / prompt:.2f}", f"{held:.2f}",
            f"{last['read'] / 1e9:.2f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--weights", default="f32", choices=BITS)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turn", type=int, default=14, help="tokens before the others have their turn")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "rlx-qwen3"))
    parser.add_argument("--pause", action="store_true", help="load everything, then wait for Enter")
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    parser.add_argument("--worker", choices=("answer", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    from benchmarks.measure import DOCUMENT, header

    about = header("llvmlite")
    lines = measure(args)
    print(about, *lines, sep="\n", flush=True)
    if args.write:
        command = f"python benchmarks/tensor_parallel.py --ranks {args.ranks} --weights {args.weights}"
        title = f"\n## Ranks that share a model, Qwen3-0.6B shape, {time.strftime('%Y-%m-%d')}, `{command}`\n\n{about}\n\n"
        DOCUMENT.write_text(DOCUMENT.read_text() + title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

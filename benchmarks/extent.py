"""An encoder compiled once for up to `--upper` tokens and run at shorter lengths, against one compiled for each length.

    python benchmarks/extent.py [--batch 1] [--upper 128] [--lengths 16 32 64 96 128] [--threads 1] [--rounds 15]

MiniLM-L6's shape, random weights. One thread is measured in CPU time of that thread, more threads in wall time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.measure import header, interleaved, table
from rlx.frontends.models import bert
from rlx.ir.shape import Dim
from rlx.runtime.compiled import CompiledGraph

CONFIG = bert.BertConfig(30522, 384, 6, 12, 1536, 512)


def filled(compiled: CompiledGraph) -> CompiledGraph:
    rng, program = np.random.default_rng(0), compiled.program()
    for b in (program.buffers[i] for i in program.params):
        compiled.set_param(b.name, rng.standard_normal(b.shape.static, np.float32) * 0.05 + b.name.endswith("Norm.weight"))
    return compiled


def compare(bounded: CompiledGraph, exact: CompiledGraph, batch: int, n: int, upper: int, rounds: int) -> list[str]:
    """A row of the table."""
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (batch, upper), np.int32)
    given = {"input_ids": ids, "attention_mask": np.ones(ids.shape, bool)}
    short = {name: array[:, :n].copy() for name, array in given.items()}
    bounded.set_active_extent((n, upper))
    (a,), (b,) = bounded.run(given), exact.run(short)
    if not (error := float(np.abs(a - b).max())) < 1e-5:
        raise SystemExit(f"wrong by {error} at {n} tokens")
    calls = {"bounded": lambda: bounded.run(given), "exact": lambda: exact.run(short)}
    times = interleaved(calls, rounds, threads=exact.options.threads or 1)
    cells = [f"{1e3 * times[name]:.2f}" for name in calls]
    return [f"{batch} x {n}", *cells, f"{times['bounded'] / times['exact']:.3f}", f"{error:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("upper", 128), ("threads", 1), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 96, 100, 128])
    args = parser.parse_args()
    session, options = rlx.Session(rlx.Device.CPU), rlx.CompileOptions(threads=args.threads)
    bounded = filled(session.compile(bert.build(CONFIG, args.batch, Dim("tokens")), options.bind_extent("tokens", args.upper)))
    rows = []
    for n in args.lengths:
        exact = session.compile(bert.build(CONFIG, args.batch, n), options, params=bounded.params)
        rows.append(compare(bounded, exact, args.batch, n, args.upper, args.rounds))
    print(header("llvmlite"))
    print(table(["tokens", f"compiled for {args.upper}, ms", "for the length, ms", "ratio", "max difference"], rows))


if __name__ == "__main__":
    main()

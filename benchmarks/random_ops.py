"""Random ops of random shapes, beside torch: checks the results and finds the shapes that nobody tuned for.

    python benchmarks/random_ops.py [--device cpu|cuda] [--seed 0] [--count 100] [--only norm order.7 ...] [--seconds 60]
        [--elements 2048 16777216]

Each case (random_cases.py) is an rlx graph and the same in eager torch. The results are compared with torch in f64; more error is
accepted if torch, in the dtype of the case, has half of it (products of millions of numbers). Then both are timed in turn: on the
CPU calls on bound arrays (one thread: thread CPU time), results of torch in memory that the process keeps, as an `out` buffer is;
on a GPU CUDA graphs of several calls each. Rows are sorted by torch's time over rlx's, the slowest first. `--only` takes kinds,
or names of rows; `--elements` are the least and the most of a value. Ops that torch lacks for a dtype are named and left out:
there is nothing to compare with. The exit status is 1 if a result is wrong. On a GPU, `--jobs` processes compile ahead, into the
disk cache.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks import cuda_measure, measure
from benchmarks.random_cases import LEAST, Case, Leaf, cases

SLACK = {"f32": 1e-4, "bf16": 2e-2, "f16": 3e-3, "f64": 1e-10}  # of an element and of the mean, together
LIMITS = {"cpu": (1 << 21, 3e8), "cuda": (1 << 24, 1e11)}  # elements of a value, multiplications of a product
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
          "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8}  # fmt: skip
HEADS = ("case", "dtype", "rlx us", "torch us", "torch/rlx", "op")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)


def graph(case: Case) -> rlx.Graph:
    g = rlx.Graph("case")
    kinds = [g.param if leaf.numbers == "weight" else g.input for leaf in case.leaves]
    values = [kind(f"x{n}", leaf.dims, leaf.dtype) for n, (kind, leaf) in enumerate(zip(kinds, case.leaves))]
    g.set_outputs([case.ours(*values)])
    return g


def operand(leaf: Leaf, device: str) -> torch.Tensor:
    dtype, dims = DTYPES[leaf.dtype], leaf.dims
    if leaf.numbers in ("integer", "divisor"):
        return torch.randint(int(leaf.numbers == "divisor"), leaf.limit, dims, device=device).to(dtype)
    if leaf.numbers == "order":
        whole = (*dims[: leaf.axis], leaf.limit, *dims[leaf.axis + 1 :])
        return torch.rand(whole, device=device).argsort(leaf.axis).narrow(leaf.axis, 0, dims[leaf.axis]).contiguous()
    if leaf.numbers == "positive":
        return (torch.rand(dims, device=device) * 0.6 + 0.02).to(dtype)
    x = torch.randn(dims, device=device)
    if leaf.numbers == "near 1":
        return (1 + 0.001 * x).to(dtype)
    return (x / math.prod(dims[1:]) ** 0.5 if leaf.numbers == "weight" else x).to(dtype)


def array(x: torch.Tensor) -> np.ndarray:
    """The memory of a tensor of the CPU."""
    return x.view(torch.int16).numpy().view(rlx.bf16.numpy) if x.dtype == torch.bfloat16 else x.numpy()


def tensor(a: np.ndarray) -> torch.Tensor:
    a = np.array(a)
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == rlx.bf16.numpy else torch.from_numpy(a)


def fault(case: Case, got: torch.Tensor, operands: list[torch.Tensor]) -> str:
    """How the result is wrong; empty if it is as exact as its dtype allows."""
    exact = [x.double() if x.is_floating_point() and "cast" not in case.op else x for x in operands]
    wanted = case.theirs(*exact)
    if wanted.shape != got.shape:
        return f"has dims {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if case.picked is not None:
        got, wanted = (exact[0].gather(case.picked, index.long().unsqueeze(case.picked)) for index in (got, wanted))
    elif not got.is_floating_point():
        return "" if torch.equal(got.long(), wanted.long()) else f"differs in {int((got != wanted).sum())} elements"
    least = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps  # numbers of that size have no more digits
    mean = wanted.abs().nanmean()

    def most(found: torch.Tensor) -> float:
        error = ((found.double() - wanted).abs() - least).clamp(0)
        error = torch.where(found.double() == wanted, 0.0, error / (wanted.abs() + mean + 1e-6))
        return float(error.nan_to_num(math.inf, math.inf).max()) if error.numel() else 0.0

    slack = SLACK[next(name for name, dtype in DTYPES.items() if dtype == got.dtype)] if case.picked is None else 0.0
    off = most(got)
    if case.picked is None and slack < off < math.inf:
        slack = 2 * most(case.theirs(*operands))
    return "" if off <= slack < math.inf else f"is off by {off:.1e}"


# -- timed calls ---------------------------------------------------------------------------------------------------


def on_cpu(case: Case, operands: list[torch.Tensor], threads: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The result, and seconds of a call."""
    compiled = rlx.Session("cpu").compile(graph(case), rlx.CompileOptions(threads=threads))
    held = {f"x{n}": (leaf, array(x)) for n, (leaf, x) in enumerate(zip(case.leaves, operands))}
    for name in (name for name, (leaf, _) in held.items() if leaf.numbers == "weight"):
        compiled.set_param(name, held[name][1])
    call = compiled.bound({name: x for name, (leaf, x) in held.items() if leaf.numbers != "weight"})
    got = tensor(call()[0])
    return got, measure.interleaved({"rlx": call, "torch": lambda: case.theirs(*operands)}, 5, 0.004, threads)


def on_cuda(case: Case, operands: list[torch.Tensor], threads: int) -> tuple[torch.Tensor, dict[str, float]]:
    from rlx.backends.cuda.runs import Replay

    compiled = rlx.Session("cuda").compile(graph(case))
    for n in (n for n, leaf in enumerate(case.leaves) if leaf.numbers == "weight"):
        compiled.set_param(f"x{n}", operands[n])
    torch.cuda.synchronize()
    compiled.run_slots([x for leaf, x in zip(case.leaves, operands) if leaf.numbers != "weight"])
    got = tensor(compiled.outputs_view()[0].numpy()).cuda()
    several = Replay(compiled._executable, list(compiled._executable.step_launches) * (calls := 10))  # type: ignore[attr-defined]
    with torch.cuda.stream(torch.cuda.Stream()):
        case.theirs(*operands)  # loads what it needs before it is recorded
    torch.cuda.synchronize()
    recorded, kept = torch.cuda.CUDAGraph(), []
    gc.collect()
    gc.disable()  # memory of the case before that is freed while torch records would end that
    try:
        with torch.cuda.graph(recorded):
            for _ in range(calls):
                kept[:] = [case.theirs(*operands)]
    finally:
        gc.enable()
    times = cuda_measure.interleaved({"rlx": several.queue, "torch": recorded.replay}, 5, 0.004)
    return got, {name: seconds / calls for name, seconds in times.items()}


def drawn(args: argparse.Namespace) -> Iterator[Case]:
    most, work = LIMITS[args.device]
    least, most = args.elements or (LEAST, most)
    return itertools.islice(cases(args.seed, most, work, args.only, least), args.count)


def compiled_ahead(args: argparse.Namespace, part: slice) -> None:
    """Compiles some of the cases; how they fail is said when they are measured."""
    for case in itertools.islice(drawn(args), part.start, part.stop, part.step):
        try:
            rlx.Session("cuda").compile(graph(case))
        except rlx.RlxError:
            continue


# -- output --------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> tuple[list[tuple[float, list[str]]], list[str], list[str]]:
    """(torch's time over rlx's, cells) of each case, the wrong ones, and those that torch lacks."""
    rows, wrong, apart, end = [], [], [], time.monotonic() + args.seconds
    run = on_cpu if args.device == "cpu" else on_cuda
    for case in drawn(args):
        if time.monotonic() > end:
            break
        torch.manual_seed(args.seed)
        try:
            operands = [operand(leaf, args.device) for leaf in case.leaves]
            got, times = run(case, operands, args.threads)
            found = fault(case, got, operands)
        except NotImplementedError as e:  # torch's: it has no kernel of this op for this dtype
            said = str(e).partition("\n")[0]
            apart.append(f"not compared, as torch lacks it: {case.name} {case.leaves[0].dtype}: {said:.60}")
            continue
        except rlx.RlxError as e:
            found, times = f"{type(e).__name__}: {e}", {}
        if found:
            wrong.append(f"WRONG {case.name} {case.leaves[0].dtype} {case.label}: {found}")
            print(wrong[-1], file=sys.stderr, flush=True)
        if times:
            ratio = times["torch"] / times["rlx"]
            cells = [f"{seconds * 1e6:.1f}" for seconds in times.values()]
            rows.append((ratio, [case.name, case.leaves[0].dtype, *cells, f"{ratio:.2f}", case.label]))
    return sorted(rows), wrong, apart


def report(rows: list[tuple[float, list[str]]], wrong: list[str], apart: list[str]) -> str:
    ratios = [ratio for ratio, _ in rows]
    counts = [f"{sum(r > 1 for r in ratios)} faster than torch"]
    counts += [f"{sum(r < 1 / n for r in ratios)} take over {n} times as long" for n in (2, 10)]
    mean = math.exp(sum(map(math.log, ratios)) / max(1, len(ratios)))
    summary = f"{len(rows)} cases: {', '.join(counts)}, {len(wrong)} wrong; on average {mean:.2f}"
    return "\n".join([measure.table(HEADS, [cells for _, cells in rows]), *apart, *wrong, summary])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=LIMITS, default="cpu")
    for name, default in (("seed", 0), ("count", 100), ("threads", 1), ("jobs", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--elements", type=int, nargs=2, metavar=("LEAST", "MOST"), help="of a value")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after this time")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    args = parser.parse_args(arguments)
    if args.elements and not 0 < args.elements[0] <= args.elements[1]:
        parser.error(f"--elements {args.elements[0]} {args.elements[1]}: give a number from 1 on, and one that is no less")
    print(measure.header("torch", "numpy") if args.device == "cpu" else cuda_measure.header())
    if args.device == "cuda" and args.jobs > 1:
        parts = [slice(n, args.count, args.jobs) for n in range(args.jobs)]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            list(pool.map(partial(compiled_ahead, args), parts))
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        rows, wrong, apart = measured(args)
    print(report(rows, wrong, apart), flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)  # freed memory stays with the process
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, -1)
    main()

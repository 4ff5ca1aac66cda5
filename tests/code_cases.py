"""Graphs for which every kernel must become machine code: each op × sample × dtype × neighbours before and after it.

    python tests/code_cases.py                    # all cases for all processors, in processes that may die: a few hours
    python tests/code_cases.py --every 50         # one of 50
    python tests/code_cases.py --case 1234 avx2   # one case in this process

LLVM's code generator ends the process where it meets a type that it cannot place; which ones it meets hangs on what fusion
puts beside an op. Nothing is run, so that code is made for processors that are not here. The order of cases is fixed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from op_cases import Case, cases  # noqa: E402

import rlx  # noqa: E402
from rlx.backends.cpu.backend import CpuBackend, with_natives  # noqa: E402
from rlx.backends.cpu.target import target_for  # noqa: E402
from rlx.compiler import CompileOptions, lower  # noqa: E402
from rlx.errors import GraphError  # noqa: E402
from rlx.host.processor import X86  # noqa: E402
from rlx.ir.graph import Graph, Value, apply  # noqa: E402
from rlx.ir.target import Target  # noqa: E402

TRIPLE = "x86_64-unknown-linux-gnu"
TARGETS: dict[str, Target] = {
    "avx512fp16": target_for(TRIPLE, "x86-64-v4", X86), "avx512": target_for(TRIPLE, "x86-64-v4", ("avx512vnni",)),
    "avx2": target_for(TRIPLE, "x86-64-v3"), "aarch64": target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",)),
}  # fmt: skip
CASTS = ("f32", "bf16", "f16", "f64", "i8", "u8", "i64", "bool", "f8e4m3", "f8e5m2", "c64")


class Leaves:
    """Inputs of a graph, each with a name of its own."""

    def __init__(self, g: Graph) -> None:
        self.g = g

    def __call__(self, dims: Any, dtype: Any) -> Value:
        return self.g.input(f"x{len(self.g.inputs)}", tuple(dims), dtype)


def one(x: Value) -> Value:
    """The number 1, or True, in the dtype of x."""
    return rlx.constant(np.ones((), x.dtype.numpy))


def reverse(x: Value) -> Value:
    return x[(slice(None, None, -1),) * x.rank]


# Each makes a value of these dims and dtype, or raises GraphError where the op takes no such thing.
Before = Callable[[Leaves, tuple[int, ...], rlx.DType], Value]
BEFORE: dict[str, Before] = {
    "leaf": lambda leaf, dims, d: leaf(dims, d),
    **{f"cast {name}": lambda leaf, dims, d, name=name: leaf(dims, name).astype(d) for name in CASTS},
    "pad": lambda leaf, dims, d: rlx.pad(leaf([max(n, 1) - 1 for n in dims], d), [0] * len(dims), [min(n, 1) for n in dims], 2.0),
    "valid_rows": lambda leaf, dims, d: rlx.valid_rows(leaf(dims, d), rlx.constant(1), axis=-1, fill="least"),
    "where": lambda leaf, dims, d: rlx.where(leaf(dims, "bool"), x := leaf(dims, d), one(x)),
    "constant": lambda leaf, dims, d: rlx.broadcast_to(rlx.constant(np.ones((), d.numpy)), dims),
    "transpose": lambda leaf, dims, d: leaf(dims[::-1], d).T,
    "reverse": lambda leaf, dims, d: reverse(leaf(dims, d)),
    "concat": lambda leaf, dims, d: rlx.concat([leaf((n := dims[0] // 2, *dims[1:]), d), leaf((dims[0] - n, *dims[1:]), d)]),
    "gather": lambda leaf, dims, d: rlx.gather(leaf((7, *dims[1:]), d), leaf(dims[:1], "i32")),
    "add": lambda leaf, dims, d: (x := leaf(dims, d)) + one(x),
    "compare": lambda leaf, dims, d: rlx.less(leaf(dims, "bf16"), 1.0).astype(d),
    "max": lambda leaf, dims, d: rlx.max(leaf((3, *dims), d), axis=0),
    "sum": lambda leaf, dims, d: rlx.sum(leaf((*dims, 5), d), axis=-1),
    "matmul": lambda leaf, dims, d: leaf((*dims[:-1], 6), d) @ leaf((6, dims[-1]), d),
}
After = Callable[[Leaves, Value], Value]
AFTER: dict[str, After] = {
    "output": lambda leaf, y: y,
    **{f"cast {name}": lambda leaf, y, name=name: y.astype(name) for name in CASTS},
    "cast and back": lambda leaf, y: y.astype("bf16" if y.dtype.name != "bf16" else "f16").astype(y.dtype),
    "pad": lambda leaf, y: rlx.pad(y, (1,) * y.rank, (2,) * y.rank, 3.0),
    "valid_rows": lambda leaf, y: rlx.valid_rows(y, rlx.constant(0), axis=-1),
    "where": lambda leaf, y: rlx.where(leaf(y.dims, "bool"), y, one(y)),
    "transpose": lambda leaf, y: y.T + one(y),
    "reverse": lambda leaf, y: reverse(y),
    "concat": lambda leaf, y: rlx.concat([y, leaf((2, *y.dims[1:]), y.dtype), y]),
    "gather": lambda leaf, y: rlx.gather(y, leaf((3,), "i64"), axis=-1),
    "add": lambda leaf, y: y + one(y),
    "mul": lambda leaf, y: y * leaf(y.dims[-1:], y.dtype),
    "compare": lambda leaf, y: rlx.equal(y, one(y)),
    "exp": lambda leaf, y: rlx.exp(y),
    "sum": lambda leaf, y: rlx.sum(y, axis=-1),
    "columns": lambda leaf, y: rlx.sum(y, axis=0),
    "max": lambda leaf, y: rlx.max(y),
    "softmax": lambda leaf, y: rlx.softmax(y),
    "argmax": lambda leaf, y: rlx.argmax(y, axis=-1),
    "cumsum": lambda leaf, y: rlx.cumsum(y, axis=0),
    "top_k": lambda leaf, y: rlx.top_k(y, k=1)[0],
    "matmul": lambda leaf, y: y.reshape((-1, y.dims[-1])) @ leaf((y.dims[-1], 33), y.dtype),
    "weight": lambda leaf, y: leaf((3, y.dims[-2]), y.dtype) @ y,
    "state": lambda leaf, y: state(leaf.g, y),
}


def state(g: Graph, y: Value) -> Value:
    """`y` as the next value of a handle."""
    handle = g.handle(rlx.BufferHandle(f"state{len(g.handles)}", y.shape.static, y.dtype))
    g.assign(handle, y)
    return rlx.sum(handle) if y.dtype.kind in "fiu" else handle


def graph(case: Case, before: str, after: str) -> Graph | None:
    """The case's op between two neighbours; None: one of them does not take what it would get."""
    g = Graph(f"{case!r}_{before}_{after}".replace("-", "_").replace(" ", "_"))
    leaf = Leaves(g)
    try:
        operands = [
            BEFORE[before if given in ("", None) else "leaf"](leaf, dims, d)
            for dims, d, given in zip(case.sample.shapes, case.dtypes, case.sample.dtypes or ("",) * len(case.dtypes))
        ]
        out = apply(case.op, operands, dict(case.sample.attrs or {}))
        g.set_outputs([AFTER[after](leaf, y) for y in ([out] if isinstance(out, Value) else out)])
    except (GraphError, IndexError):  # a dtype that is not taken; an axis that is not there
        return None
    return g


class Every(Sequence[tuple[Case, str, str]]):
    """All cases in an order in which any stretch has many ops, dtypes and neighbours. There are millions: each is made when it is
    asked for."""

    def __init__(self) -> None:
        self.cases = [c for c in cases(awkward=False) if not c.op.collective]
        self.neighbours = [(b, a) for b in BEFORE for a in AFTER]
        self.stride = 1_000_003  # a prime that no total so far is a multiple of
        assert len(self) % self.stride

    def __len__(self) -> int:
        return len(self.cases) * len(self.neighbours)

    @overload
    def __getitem__(self, n: int) -> tuple[Case, str, str]: ...
    @overload
    def __getitem__(self, n: slice) -> list[tuple[Case, str, str]]: ...
    def __getitem__(self, n: int | slice) -> tuple[Case, str, str] | list[tuple[Case, str, str]]:
        if isinstance(n, slice):
            return [self[i] for i in range(len(self))[n]]
        neighbours, case = divmod(range(len(self))[n] * self.stride % len(self), len(self.cases))
        return self.cases[case], *self.neighbours[neighbours]


@cache
def every() -> Every:
    return Every()


def compile_case(number: int, processor: str) -> bool:
    """Machine code of the case's kernels. False: there is no such graph."""
    target = with_natives(TARGETS[processor])
    g = graph(*every()[number])
    if g is None or not {v.dtype.name for n in g.nodes() for v in n.results} <= target.dtypes:
        return False
    CpuBackend().compile(lower(g, target, CompileOptions()))
    return True


def failures(numbers: Sequence[int], processor: str) -> Iterator[str]:
    """The failures of the cases `numbers`, which are compiled in other processes, one at a time."""
    todo = list(numbers)
    while todo:
        command = [sys.executable, __file__, "--child", processor, *map(str, islice(todo, 2000))]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLX_CACHE": "0"}, check=False)
        lines = done.stdout.splitlines()
        for line in lines:
            if "\t" in line:
                yield line
        started = [int(line.split()[0]) for line in lines if line.split()[0].isdigit()]
        last = started[-1] if started else todo[0]
        if done.returncode:
            yield f"{last}\t{every()[last]} {processor}: the process ended with {done.returncode}: {done.stderr[-400:]}"
        todo = todo[todo.index(last) + 1 :]


def child(processor: str, numbers: Sequence[int]) -> None:
    for number in numbers:
        print(number, flush=True)
        try:
            compile_case(number, processor)
        except Exception as e:  # noqa: BLE001  (whatever it is, it is reported and the next case is tried)
            text = str(e).replace("\n", " ").replace("\t", " ")[:400]
            print(f"{number}\t{every()[number]} {processor}: {type(e).__name__}: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="take one case of so many")
    parser.add_argument("--case", nargs=2, metavar=("NUMBER", "PROCESSOR"))
    parser.add_argument("--processors", nargs="*", default=list(TARGETS))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], [int(n) for n in given.child[1:]])
        return 0
    if given.case:
        print(graph(*every()[int(given.case[0])]))
        print(compile_case(int(given.case[0]), given.case[1]))
        return 0
    bad = 0
    for processor in given.processors:
        for line in failures(range(0, len(every()), given.every), processor):
            bad += 1
            print(line, flush=True)
    print(f"{bad} of {len(range(0, len(every()), given.every)) * len(given.processors)} cases failed")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())

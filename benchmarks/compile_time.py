"""Compile time by number of nodes: a chain, and a random graph in which nodes read earlier nodes at any distance.

    python benchmarks/compile_time.py [--nodes 100 1000 10000] [--code]

Prints seconds from graph to checked program, and per node; with --code also the time to machine code, without the disk cache.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

import rlx
from rlx.backends import get
from rlx.compiler import lower
from rlx.host.processor import processor

UNARY = (rlx.exp, rlx.tanh, rlx.relu, rlx.abs, rlx.neg, rlx.sqrt)
BINARY = (rlx.add, rlx.mul, rlx.maximum, rlx.sub)


def chain(nodes: int) -> rlx.Graph:
    """Each node reads the previous one; some are transposes, sums of rows, or products with weights."""
    g = rlx.Graph(f"chain of {nodes}")
    w = g.param("w", (8, 8), "f32")
    x = g.input("x", (8, 8), "f32")
    for i in range(nodes):
        if i % 50 == 49:
            x = rlx.matmul(x, w)
        elif i % 20 == 19:
            x = rlx.transpose(x)
        else:
            x = UNARY[i % len(UNARY)](x)
    g.set_outputs([x])
    return g


def random_graph(nodes: int) -> rlx.Graph:
    """Each node reads one or two earlier ones; half of these reads go back a few nodes, half any distance."""
    g, rng = rlx.Graph(f"random graph of {nodes}"), np.random.default_rng(0)
    values = [g.input("x", (8, 8), "f32"), g.param("w", (8, 8), "f32")]

    def earlier() -> rlx.Value:
        near = rng.random() < 0.5
        return values[-int(rng.integers(1, 1 + min(8 if near else len(values), len(values))))]

    while len(values) < nodes + 2:
        kind = rng.random()
        if kind < 0.05:
            made = rlx.softmax(earlier()) if kind < 0.01 else rlx.matmul(earlier(), earlier())
        elif kind < 0.1:
            made = rlx.transpose(earlier())
        elif kind < 0.4:
            made = UNARY[int(rng.integers(len(UNARY)))](earlier())
        else:
            made = BINARY[int(rng.integers(len(BINARY)))](earlier(), earlier())
        values.append(made)
    read = {v for value in values for v in value.node.inputs}
    g.set_outputs([v for v in values[2:] if v not in read])
    return g


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--code", action="store_true")
    given = parser.parse_args()
    backend = get("cpu")
    target = backend.target(threads=2)
    print(f"{processor()}, one core\n\n| graph | nodes | kernels | CPU seconds | ms per node |{' with code |' * given.code}")
    print("| --- | ---: | ---: | ---: | ---: |" + " ---: |" * given.code)
    for build in (chain, random_graph):
        for nodes in given.nodes:
            g = build(nodes)
            gc.collect()
            gc.disable()  # as Session.compile does
            begin = time.process_time()
            program = lower(g, target, rlx.CompileOptions(threads=2))
            seconds = time.process_time() - begin
            gc.enable()
            label = f"| {build.__name__.replace('_', ' ')} | {nodes} | {len(program.steps)} |"
            line = f"{label} {seconds:.2f} | {1000 * seconds / nodes:.2f} |"
            if given.code:
                with rlx.knobs.override(RLX_CACHE=0):
                    backend.compile(program)
                line += f" {time.process_time() - begin:.1f} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()

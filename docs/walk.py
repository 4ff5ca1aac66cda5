"""A tour of rlx: one small graph through every stage, down to machine code. Run it: python docs/walk.py

Each stage is printed, then checked against numpy. The text of a stage is what you would put into a bug report.
"""

from __future__ import annotations

import math

import numpy as np

import rlx
from rlx.backends import get
from rlx.compiler import lower
from rlx.ir.kernel_text import print_kernel

F = np.float32
STAGES = {  # by name; the others are passes
    "groups": "nodes that share kernels (rlx.compiler.fuse)",
    "lower": "kernels as lowered, without a schedule (rlx.compiler.lowering)",
    "schedule": "the same kernels as the target orders them (Target.schedule)",
}


def show(title: str, text: object, lines: int = 40) -> None:
    """A headed block of text, cut to `lines` lines."""
    body = str(text).splitlines()
    print(f"\n── {title} " + "─" * max(0, 100 - len(title)))
    print("\n".join(body[:lines]) + (f"\n… {len(body) - lines} more lines" if len(body) > lines else ""))


def graph() -> rlx.Graph:
    """gelu(x @ w + b), and a counter of runs that stays on the device."""
    g = rlx.Graph("walk")
    x = g.input("x", (2, 4), rlx.f32)
    w, b = g.param("w", (4, 3), rlx.f32), g.param("b", (3,), rlx.f32)
    runs = g.handle(rlx.BufferHandle("runs", (1,), rlx.i32))
    g.assign(runs, runs + 1)
    g.set_outputs([rlx.gelu(x @ w + b)], names=["y"])
    return g


def main() -> None:
    g = graph()
    show("1. the graph (rlx.ir.Graph); Graph.parse reads this text back", g)
    assert str(rlx.Graph.parse(str(g))) == str(g)

    backend = get("cpu")
    target = backend.target(threads=1)
    show("2. what the compiler may know of the device (rlx.ir.Target)", target)

    program = lower(g, target, rlx.CompileOptions(threads=1, verbose=True))
    for name, text in program.stages.items():
        if name != "graph":
            show(f"3. {STAGES.get(name, f'after the pass {name!r} (rlx.compiler.pipeline)')}", text)
    for phase in ("prepare", "steps", "commit"):
        for step in getattr(program, phase):
            show(f"4. kernel IR of a step of {phase!r} (rlx.compiler.lowering)", print_kernel(step.kernel))
    show("5. the program with its memory plan (rlx.ir.Program), checked by rlx.compiler.check", program)

    artifact = backend.compile(program)
    text = artifact.texts()[program.steps[0].kernel.name]
    show("6. its first step as LLVM IR (rlx.backends.cpu)", text[text.index("define ") :], 30)
    from rlx.host.jit import assembly

    show("7. and as machine code", assembly(text, target), 30)

    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=1))
    show("8. what became of each node", compiled.report())
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(dims).astype(F) for dims in ((2, 4), (4, 3), (3,)))
    compiled.set_param("w", w)
    compiled.set_param("b", b)
    (y,) = compiled.run({"x": x})
    compiled.run({"x": x})
    z = (x @ w + b).astype(np.float64)
    np.testing.assert_allclose(y, 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2))), rtol=1e-5, atol=1e-6)
    show("9. the result of a run, and the state after two", f"y = {y}\nruns = {compiled.read_handle('runs')}")
    show("10. where every byte is", compiled.memory_plan())


if __name__ == "__main__":
    main()

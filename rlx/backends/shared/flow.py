"""Steps that run sub-programs, one kernel at a time: the meaning of FlowAttrs, for backends whose purpose is checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.backends.shared.loaded import POISON
from rlx.ir.attrs import FlowAttrs
from rlx.ir.kernel import Kernel
from rlx.ir.program import Program

RunKernel = Callable[[Kernel, Sequence[np.ndarray]], int]
Failed = tuple[int, Kernel]  # the code of a failed Check, and its kernel


def run_flow(program: Program, flow: FlowAttrs, args: Sequence[np.ndarray], run: RunKernel) -> Failed | None:
    """Run a step of the program on flat arrays, as its kernel takes them. The arena of a body is poisoned before it runs."""
    for source, goal in flow.copies:
        np.copyto(args[goal], args[source])
    for n in flow.zeroed:
        args[n][...] = 0
    if flow.count == -1:
        return _body(program, flow, 0 if args[flow.test][0] else 1, args, run)
    args[flow.count][0] = 0
    while (flow.limit == -1 or args[flow.count][0] < flow.limit) and (flow.test == -1 or args[flow.test][0]):
        if failed := _body(program, flow, 0, args, run):
            return failed
        args[flow.count][0] += 1
    return None


def _body(program: Program, flow: FlowAttrs, which: int, args: Sequence[np.ndarray], run: RunKernel) -> Failed | None:
    body, wire = program.bodies[flow.bodies[which]], flow.wires[which]
    scratch = args[flow.scratch] if flow.scratch != -1 else np.zeros(0, np.uint8)
    scratch[...] = POISON
    memory = {id: args[n].view(np.uint8) for id, n in zip((*body.params, *body.handles), wire)}
    memory |= {id: scratch[at : at + body.buffers[id].nbytes] for id, at in body.plan.offsets.items()}
    for step in (*body.steps, *body.commit):
        arrays = [memory[a].view(b.dtype.numpy) for a, b in zip(step.args, step.kernel.buffers)]
        if step.kernel.flow:
            failed = run_flow(body, step.kernel.flow, arrays, run)
        else:
            status = run(step.kernel, arrays)
            failed = (status, step.kernel) if status else None
        if failed:
            return failed
    return None


__all__ = ["run_flow"]

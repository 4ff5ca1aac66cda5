"""The checker's rules for steps that run sub-programs: every wire fits, what is written is written before it is read, and the
arena of the bodies has room. It shares no code with rlx/compiler/control.py. Numbers may come from a file: none is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.ir import kernel as K
from rlx.ir.attrs import FlowAttrs
from rlx.ir.dtype import bool_, i64, u8
from rlx.ir.program import Program


def flow_faults(program: Program, kernel: K.Kernel) -> Iterator[str]:
    """Every broken rule of a kernel of the program that runs bodies."""
    flow, count = kernel.flow, len(kernel.buffers)
    assert flow is not None
    numbers = [n for wire in flow.wires for n in wire] + [n for pair in flow.copies for n in pair] + [*flow.zeroed]
    numbers += [n for n in (flow.test, flow.count, flow.scratch) if n != -1]
    loop = flow.count != -1
    if any(not 0 <= n < count for n in numbers) or flow.limit < -1:
        yield f"an argument of {flow} is not among the {count}"
    elif any(not 0 <= b < len(program.bodies) for b in flow.bodies) or len(flow.bodies) != (1 if loop else 2):
        yield f"bodies {flow.bodies}: a loop has one and a branch two, of {len(program.bodies)}"
    elif len(flow.wires) != len(flow.bodies):
        yield f"{len(flow.bodies)} bodies have the wires of {len(flow.wires)}"
    elif flow.test == -1 and (not loop or flow.limit == -1):
        yield "neither a test nor a limit ends it"
    else:
        yield from _scalar_faults(flow, kernel.buffers)
        yield from _scratch_faults(flow, program, kernel.buffers)
        made = [set[int]() for _ in flow.bodies]
        for number, wire, written in zip(flow.bodies, flow.wires, made):
            found = _wire_faults(program.bodies[number], wire, kernel.buffers, written)
            yield from (f"body {number}: {fault}" for fault in found)
        yield from _unwritten(flow, [program.bodies[n] for n in flow.bodies], kernel.buffers, made)


def _scalar_faults(flow: FlowAttrs, buffers: Sequence[K.Buffer]) -> Iterator[str]:
    if flow.test != -1 and (buffers[flow.test].dtype, buffers[flow.test].size) != (bool_, 1):
        yield f"the test is {buffers[flow.test].dtype}[{buffers[flow.test].size}], not one bool"
    if flow.count != -1 and ((b := buffers[flow.count]).dtype != i64 or b.size != 1 or not b.writable):
        yield f"the count is {b.dtype}[{b.size}], not one i64 that is written"
    for source, goal in flow.copies:
        a, b = buffers[source], buffers[goal]
        if (a.dtype, a.size) != (b.dtype, b.size) or a.writable or not b.writable:
            yield f"argument {source} cannot be copied to {goal}"
    if any(not buffers[n].writable for n in flow.zeroed):
        yield "it sets arguments to zero that are only read"


def _scratch_faults(flow: FlowAttrs, program: Program, buffers: Sequence[K.Buffer]) -> Iterator[str]:
    for number in flow.bodies:
        plan = program.bodies[number].plan
        if plan.size_bytes and flow.scratch == -1:
            yield f"body {number} has an arena and the step none"
        elif plan.size_bytes and (buffers[flow.scratch].dtype != u8 or buffers[flow.scratch].size < plan.size_bytes):
            yield f"the arena of body {number} takes {plan.size_bytes} bytes, it gets {buffers[flow.scratch].size}"
        if plan.alignment > program.plan.alignment:
            yield f"body {number} is aligned to {plan.alignment} bytes, its arena to {program.plan.alignment}"
    if flow.scratch != -1 and not buffers[flow.scratch].writable:
        yield "the arena of the bodies is only read"
    used = [n for wire in flow.wires for n in wire] + [n for pair in flow.copies for n in pair]
    if flow.scratch != -1 and flow.scratch in (*used, *flow.zeroed, flow.test, flow.count):
        yield "the arena of the bodies is an argument of theirs"


def _wire_faults(body: Program, wire: Sequence[int], buffers: Sequence[K.Buffer], written: set[int]) -> Iterator[str]:
    """`written` receives the arguments that the body writes."""
    outer = [*body.params, *body.handles]
    if body.inputs or body.outputs or body.prepare or body.abort or body.routers or len(wire) != len(outer):
        yield f"it has {len(outer)} params and states, for {len(wire)} wires, and nothing else from outside"
        return
    if any(b.region.value not in ("arena", "param", "handle") for b in body.buffers):
        yield "its buffers are in its arena, params or states"
    stored = {id for s in (*body.steps, *body.commit) for id in s.writes}
    for id, n in zip(outer, wire):
        shape = body.buffers[id].shape
        dtype, size = K.in_kernels(shape.dtype, shape.num_elements)
        if (buffers[n].dtype, buffers[n].size) != (dtype, size):
            yield f"%{id} is {shape}, wired to {buffers[n].dtype}[{buffers[n].size}]"
        if id in stored and not buffers[n].writable:
            yield f"it writes %{id}, wired to an argument that is only read"
        if buffers[n].writable and list(wire).count(n) > 1:
            yield f"%{id} is wired to argument {n}, as another buffer is, and one of them is written"
        written |= {n} if id in stored else set()


def _early_reads(body: Program, wires: dict[int, int], begun: set[int]) -> Iterator[str]:
    """Buffers from outside that a body reads before anything is written there."""
    known = {id for id, n in wires.items() if n in begun}
    for s in (*body.steps, *body.commit):
        for id in sorted((s.reads & wires.keys()) - known):
            yield f"{s.kernel.name} of {body.name} reads %{id}, which nothing has written"
        known |= s.writes


def _unwritten(
    flow: FlowAttrs, bodies: Sequence[Program], buffers: Sequence[K.Buffer], made: Sequence[set[int]]
) -> Iterator[str]:
    """Results that a run may leave as they were, and reads of them before they are written."""
    begun = {flow.count, flow.scratch, *flow.zeroed, *(b for _, b in flow.copies)}
    begun |= {n for n, b in enumerate(buffers) if not b.writable}
    for body, wire in zip(bodies, flow.wires):
        yield from _early_reads(body, dict(zip((*body.params, *body.handles), wire)), begun)
    if flow.count == -1 or (flow.test == -1 and flow.limit):  # all of the bodies' results are written: one runs at least once
        begun |= set.intersection(*made)
    for n, b in enumerate(buffers):
        if b.writable and b.size and n not in begun:
            yield f"argument {n} is a result that may stay unwritten"
    if flow.count in made[0]:
        yield "the body writes the count"


__all__ = ["flow_faults"]

"""The independent checker of a Program: every read must see the bytes that were written for it.

It replays the steps on a map from arena bytes to the buffer that owns them, while the planner compares lifetimes, and shares no
code with rlx/compiler/memory.py and rlx/ir/overlap.py. It runs in every build. A fault is a compiler bug, not a user error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import prod

from rlx.compiler.check_flow import flow_faults
from rlx.errors import PlanError
from rlx.ir import kernel as K
from rlx.ir.access import Access, accesses
from rlx.ir.attrs import FlowAttrs
from rlx.ir.program import BufferDecl, Program, Region, Step
from rlx.ir.shape import contiguous_strides
from rlx.records import field, record

IN_ARENA = frozenset({Region.ARENA, Region.INPUT, Region.OUTPUT})
GIVEN = frozenset({Region.INPUT, Region.PARAM, Region.CONSTANT, Region.HANDLE})  # hold a value before anything runs
PREPARE_READS = frozenset({Region.PARAM, Region.CONSTANT, Region.PREPARED})  # the other phases read any region
_MAY_WRITE = {
    "prepare": {Region.PREPARED}, "steps": {Region.ARENA, Region.OUTPUT, Region.HANDLE}, "commit": {Region.HANDLE},
    "abort": {Region.HANDLE},
}  # fmt: skip


def check_program(program: Program, nested: bool = False) -> None:
    """Raise PlanError listing every fault of the program's offsets, arguments and order of steps, and of its bodies. `nested`: it
    is a body, whose states are values that a loop carries: nothing restores them."""
    if bad := program_faults(program, nested=nested):
        found = "\n  ".join(bad)
        raise PlanError(f"program {program.name!r} for {program.target.name} has a bad plan:\n  {found}\n{program}")


def program_faults(program: Program, replay: bool = True, nested: bool = False) -> list[str]:
    """Every fault found, as sentences. Empty: the program is sound. `replay`: check the steps too, which needs the kernels."""
    bad: list[str] = []
    decls = {b.id: b for b in program.buffers}
    if len(decls) != len(program.buffers):
        bad.append("two buffers have one id")
    _check_signature(program, decls, bad)
    _check_routers(program, decls, bad)
    _check_offsets(program, decls, bad)
    facts: dict[K.Kernel, _Facts] = {}
    if not nested:
        _check_updates(program, bad)
    for i, body in enumerate(program.bodies):
        bad += [f"body {i}, {body.name}: {fault}" for fault in program_faults(body, replay, nested=True)]
    for phase, steps in program.phases.items():
        for at, step in enumerate(steps):
            if step.kernel not in facts:
                facts[step.kernel] = _Facts(step.kernel)
            if step.concurrent and (phase != "steps" or not at):
                bad.append(f"{phase}[{at}] {step.kernel.name}: only later steps of a run may be concurrent with the step before")
            where = f"{phase}[{at}] {step.kernel.name}"
            _check_arguments(where, phase, step, facts[step.kernel], decls, bad)
            if step.kernel.flow is not None:
                bad += [f"{where}: {fault}" for fault in flow_faults(program, step.kernel)]
    if replay and not bad:  # the replay needs valid offsets and arguments
        _Replay(program, facts, bad).run()
    return bad


def _check_updates(program: Program, bad: list[str]) -> None:
    """A handle that a step writes is written only once (not by the commit too) and can be restored: an abort step reads data
    that an earlier step saved."""
    handles, committed = set(program.handles), {id for s in program.commit for id in s.writes}
    undo = {id: (at, step) for at, step in program.abort for id in step.writes}
    written = [id for step in program.steps for id in step.writes]
    for i, step in enumerate(program.steps):
        for id in sorted(step.writes & handles):
            saved, back = undo.get(id, (i, step))
            if saved >= i or not program.steps[saved].writes & back.reads:
                bad.append(f"steps[{i}] {step.kernel.name}: writes %{id} in place, and no abort step can restore it")
            if id in committed or written.count(id) > 1:
                bad.append(f"steps[{i}] {step.kernel.name}: writes %{id}, which another step writes too")


def _check_signature(program: Program, decls: dict[int, BufferDecl], bad: list[str]) -> None:
    for ids, region in ((program.inputs, Region.INPUT), (program.params, Region.PARAM), (program.handles, Region.HANDLE)):
        if sorted(ids) != sorted(b.id for b in program.buffers if b.region is region):
            bad.append(f"the {region.value}s {list(ids)} are not the buffers of region {region.value}")
    for b in program.buffers:
        fits = b.data is not None and (b.data.dtype, b.data.size) == (b.shape.dtype.numpy, b.shape.num_elements)
        if b.region is Region.CONSTANT and not fits:
            bad.append(f"constant %{b.id} {b.shape} has no data of its dtype and size")
    for out in program.outputs:
        b = decls.get(out.buffer)
        if b is None:
            bad.append(f"output {out.name!r} is in buffer %{out.buffer}, which does not exist")
        elif b.region is Region.ARENA:
            bad.append(f"output {out.name!r} is in %{b.id}, whose memory the next step may reuse")
        elif K.in_kernels(b.shape.dtype, b.shape.num_elements) != K.in_kernels(out.shape.dtype, out.shape.num_elements):
            bad.append(f"output {out.name!r} is {out.shape}, its buffer %{b.id} is {b.shape}")


def _check_routers(program: Program, decls: dict[int, BufferDecl], bad: list[str]) -> None:
    written, names = {id for s in program.steps for id in s.writes}, {decls[id].name for id in program.params if id in decls}
    for r in program.routers:
        b = decls.get(r.buffer)
        if b is None or b.region is not Region.OUTPUT or b.shape != r.shape or b.id not in written:
            bad.append(f"the router in %{r.buffer} {r.shape} is not a buffer that a step writes and that is kept: {b}")
        if r.ahead and r.tokens <= 0:
            bad.append(f"the router in %{r.buffer} has {r.ahead} rows of guesses, its buffer has {r.shape.static[0]}")
        if unknown := sorted({*r.params} - names):
            bad.append(f"the router in %{r.buffer} has weights in {unknown[0]!r}, which is no param")


def _check_offsets(program: Program, decls: dict[int, BufferDecl], bad: list[str]) -> None:
    plan = program.plan
    if plan.alignment < 1 or plan.alignment & (plan.alignment - 1):
        bad.append(f"alignment {plan.alignment} is not a power of two")
        return
    extra = plan.offsets.keys() - {b.id for b in program.buffers if b.region in IN_ARENA}
    bad.extend(f"%{id} has an offset in the arena and is not an arena buffer" for id in sorted(extra))
    for b in program.buffers:
        if b.region not in IN_ARENA:
            continue
        at = plan.offsets.get(b.id)
        if at is None:
            bad.append(f"%{b.id} {b.region.value} has no offset in the arena")
        elif at < 0 or at + b.nbytes > plan.size_bytes:
            bad.append(f"%{b.id} at {at}..{at + b.nbytes} is outside the arena of {plan.size_bytes} bytes")
        elif at % plan.alignment:
            bad.append(f"%{b.id} at {at} is not aligned to {plan.alignment}")


def _check_arguments(where: str, phase: str, step: Step, facts: _Facts, decls: dict[int, BufferDecl], bad: list[str]) -> None:
    kernel = step.kernel
    if len(step.args) != len(kernel.buffers):
        bad.append(f"{where}: {len(step.args)} arguments for {len(kernel.buffers)} buffers")
        return
    if (op := kernel.collective) and not _is_contiguous(op):
        bad.append(f"{where}: {op.attrs} must read one whole buffer and write another of the resulting size")
    bad.extend(f"{where}: accesses {name!r}, which is not among its buffers" for name in facts.undeclared)
    for arg, b in zip(step.args, kernel.buffers):
        decl = decls.get(arg)
        if decl is None:
            bad.append(f"{where}: argument %{arg} does not exist")
            continue
        dtype, size = K.in_kernels(decl.shape.dtype, decl.shape.num_elements)
        if b.dtype != dtype or b.size > size:
            bad.append(f"{where}: {b.name!r} is {b.dtype}[{b.size}], %{arg} is {decl.shape}")
        if (b in facts.stored) != b.writable and b.size:
            marked = "is marked as written and never stored to" if b.writable else "is stored to and not marked as written"
            bad.append(f"{where}: {b.name!r} (%{arg}) {marked}")
        if b.writable and decl.region not in _MAY_WRITE[phase]:
            bad.append(f"{where}: writes %{arg}, which is {decl.region.value}")
        if phase == "prepare" and b in facts.loaded and decl.region not in PREPARE_READS:
            bad.append(f"{where}: reads %{arg}, which is {decl.region.value}")


def _is_contiguous(op: K.Native) -> bool:
    """True if a collective goes from one whole contiguous buffer to another of the right size."""
    views = (*op.inputs, *op.outputs)
    sizes = [prod(v.dims) for v in views]
    strides = [(n, have, want) for v in views for n, have, want in zip(v.dims, v.strides, contiguous_strides(v.dims))]
    in_order = not any(v.offset for v in views) and (0 in sizes or all(n == 1 or have == want for n, have, want in strides))
    whole = sizes == [v.buffer.size for v in views] and len({v.buffer.dtype for v in views}) == 1
    return len(views) == 2 and in_order and whole and sizes[1] == op.attrs.elements(sizes[0])  # type: ignore[union-attr]


# -- replay --------------------------------------------------------------------------------------------------------


@record(repr=False, eq=False, frozen=False)
class _Replay:
    """The owner of each arena byte while the steps run. The boundaries of all buffers divide the arena into segments."""

    program: Program
    facts: dict[K.Kernel, _Facts]
    bad: list[str]
    written: set[int] = field(default_factory=set)
    group: list[tuple[str, Step, set[int]]] = field(default_factory=list)  # (where, step, buffers it reads) of the current group
    proofs: dict[tuple[K.Kernel, int, int], bool] = field(default_factory=dict)  # by kernel, argument read, argument written

    def run(self) -> None:
        p = self.program
        self.written = {b.id for b in p.buffers if b.region in GIVEN}
        self.nbytes = {b.id: b.nbytes for b in p.buffers}
        ranges = {id: (at, at + self.nbytes[id]) for id, at in p.plan.offsets.items()}
        edges = sorted({edge for ends in ranges.values() for edge in ends})
        self.segments = {id: range(bisect_left(edges, a), bisect_left(edges, b)) for id, (a, b) in ranges.items()}
        self.owner: list[int | None] = [None] * len(edges)
        for id in p.inputs:
            if any(self.owner[s] is not None for s in self.segments[id]):
                self.bad.append(f"input %{id} shares bytes with input %{next(self.owner[s] for s in self.segments[id])}")
            self.own(id)
        committed: set[int] = set()
        for phase, steps in p.phases.items():
            for at, step in enumerate(steps):
                where = f"{phase}[{at}] {step.kernel.name}"
                reads = self.reads(step)
                if phase == "commit" and (stale := committed & reads):
                    self.bad.append(f"{where}: reads the next state of %{min(stale)}; within a run a handle keeps its old state")
                if phase == "prepare" and (both := reads & step.writes):
                    self.bad.append(f"{where}: computes %{min(both)} from itself, so it cannot run again")
                self.group = [*self.group, (where, step, reads)] if step.concurrent else [(where, step, reads)]
                self.check_group(where, step, reads)
                self.step(where, step, reads)
                if phase == "commit":
                    committed |= step.writes
        for out in p.outputs:
            if out.buffer in committed:
                self.bad.append(f"output {out.name!r} is in %{out.buffer}, which the commit overwrites with the next state")
            self.expect(f"output {out.name!r}", out.buffer)
        for r in p.routers:
            self.expect("a router", r.buffer)
        for id in p.inputs:
            self.expect("at the end", id)

    def check_group(self, where: str, step: Step, reads: set[int]) -> None:
        """No other step of the group accesses bytes that this step writes, or writes bytes that this step reads."""
        for other, its, read in self.group[:-1]:
            clashes = [(a, b) for a in step.writes for b in its.writes | read if self.together(a, b)]
            clashes += [(b, a) for a in reads for b in its.writes if self.together(a, b)]
            if clashes:
                written, used = min(clashes)
                self.bad.append(f"{where}: concurrent with {other}; one writes %{written}, which overlaps %{used} of the other")

    def own(self, id: int) -> None:
        for s in self.segments.get(id, ()):
            self.owner[s] = id

    def expect(self, where: str, id: int) -> None:
        """Checks that the buffer was written and still owns all its bytes."""
        if not self.nbytes[id]:
            return
        if id not in self.written:
            self.bad.append(f"{where}: %{id} is read before it is written")
        lost = next((o for s in self.segments.get(id, ()) if (o := self.owner[s]) != id), None)
        if lost is not None and id in self.written:
            self.bad.append(f"{where}: %{id} was overwritten by %{lost}")

    def reads(self, step: Step) -> set[int]:
        loaded = self.facts[step.kernel].loaded
        return {arg for arg, b in zip(step.args, step.kernel.buffers) if b in loaded}

    def step(self, where: str, step: Step, reads: set[int]) -> None:
        writes = step.writes
        for id in sorted(reads):
            self.expect(where, id)
        for id in sorted(writes & self.written):  # the parts that earlier steps wrote must still be intact
            if id in self.segments and id not in reads:
                self.expect(where, id)
        for w, (written, buffer) in enumerate(zip(step.args, step.kernel.buffers)):
            if not buffer.writable:
                continue
            for r, (other, second) in enumerate(zip(step.args, step.kernel.buffers)):
                used = r != w and (second.writable or other in reads)
                if used and self.together(written, other) and (second.writable or not self.proved(step, r, w)):
                    self.bad.append(f"{where}: writes %{written} over %{other}, which it still uses")
        for id in sorted(writes):
            self.own(id)
        self.written |= writes

    def together(self, a: int, b: int) -> bool:
        """True if two buffers have a byte in common."""
        if a == b:
            return self.nbytes[a] > 0
        x, y = self.segments.get(a, range(0)), self.segments.get(b, range(0))
        return bool(x) and bool(y) and x.start < y.stop and y.start < x.stop

    def proved(self, step: Step, r: int, w: int) -> bool:
        """True if argument w may be written over argument r while the kernel reads it."""
        if self.segments.get(step.args[r]) != self.segments.get(step.args[w]):
            return False
        key = (step.kernel, r, w)
        if key not in self.proofs:
            self.proofs[key] = _overwrites_after_reading(self.facts[step.kernel], r, w)
        return self.proofs[key]


# -- a proof of in-place safety, by other means than the planner's ----------------------------------------------------


class _Facts:
    """Loads and stores of a kernel."""

    def __init__(self, kernel: K.Kernel) -> None:
        self.kernel = kernel
        self.accesses = accesses(kernel)
        self.loaded = frozenset(a.buffer for a in self.accesses if not a.stores)
        self.stored = frozenset(a.buffer for a in self.accesses if a.stores)
        self.undeclared = sorted(b.name for b in (self.loaded | self.stored) - {*kernel.buffers, *kernel.locals})


def _overwrites_after_reading(facts: _Facts, r: int, w: int) -> bool:
    """Every element of buffer w is written once, by the only iteration that reads that element of r, after the read.

    Compared by signature: the address where all indices are 0, and the stride and extent of each grid and loop index.
    """
    kernel, accesses = facts.kernel, facts.accesses
    if kernel.collective:
        return kernel.collective.attrs.in_place  # type: ignore[union-attr]
    if kernel.flow:
        return _copies_once(kernel.flow, r, w)
    read, written = kernel.buffers[r], kernel.buffers[w]
    if read.dtype.itemsize != written.dtype.itemsize:
        return False
    mine = [a for a in accesses if a.buffer is read and not a.stores]
    its = [a for a in accesses if a.buffer is written and a.stores]
    if any(a.buffer is (read if a.stores else written) for a in accesses):
        return False
    signatures = {_signature(kernel, a) for a in mine + its}
    if len(signatures) > 1 or not its:
        return not mine and bool(its)
    (signature,) = signatures
    return signature is not None and _one_to_one(signature) and all(_precedes(a, b) for a in mine for b in its)


def _copies_once(flow: FlowAttrs, r: int, w: int) -> bool:
    """The first that a step does with argument r is to copy it to w, and nothing reads r afterwards."""
    again = {n for wire in flow.wires for n in wire} | {flow.test}
    return [(a, b) for a, b in flow.copies if a == r] == [(r, w)] and r not in again


_Signature = tuple[int, tuple[tuple[int, int], ...]]


def _signature(kernel: K.Kernel, a: Access) -> _Signature | None:
    """(element at index 0, ((stride, extent) per grid index, then per loop)), or None if the index is not affine."""
    around = (*kernel.grid, *a.loops)
    known = {v for v, _ in around}
    if a.again or a.index is None:
        return None
    if any(isinstance(e, K.Load) or (isinstance(e, K.Var) and e not in known) for e in K.walk(a.index)):
        return None
    strides = [K.coefficient(a.index, v) for v, _ in around]
    origin = _at_zero(a.index)
    if None in strides or origin is None:
        return None
    return origin, tuple((s, n) for s, (_, n) in zip(strides, around))  # type: ignore[misc]


_AT_ZERO: dict[str, Callable[..., int]] = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}


def _at_zero(e: K.Expr) -> int | None:
    if isinstance(e, K.Const):
        return int(e.value)
    if isinstance(e, K.Var):
        return 0
    parts = [_at_zero(x) for x in e.args] if isinstance(e, K.Alu) and e.op in _AT_ZERO else [None]
    return None if None in parts else _AT_ZERO[e.op](*parts)  # type: ignore[union-attr]


def _one_to_one(signature: _Signature) -> bool:
    """Injective: every stride is larger than the reach of all smaller strides together."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in signature[1] if n > 1):
        if stride <= reach:
            return False
        reach += stride * (extent - 1)
    return True


def _precedes(load: Access, store: Access) -> bool:
    """The load runs before the store does, in each iteration of the loops around both.

    Paths agree down to the common loops. If either has further loops, those of the load must end before those of the store
    begin; otherwise the order of the statements decides.
    """
    apart = next(((a, b) for a, b in zip(load.path, store.path) if a != b), None)
    return apart[0] < apart[1] if apart else len(load.path) == len(store.path)


__all__ = ["check_program", "program_faults"]

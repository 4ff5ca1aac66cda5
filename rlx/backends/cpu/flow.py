"""Rows of the executor's table for steps that run sub-programs: the rows of their steps, with jumps around them.

A jump is a row like any other one: its function writes the row after which the run continues to its first argument, where the
executor reads it (rlx.backends.cpu.abi.JUMP). So a loop takes no Python, no memory and no call but those of its kernels, and its
kernels use all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.table import Place, Rows, joins
from rlx.host.emit import V
from rlx.host.functions import Body, Functions
from rlx.host.jit import Library, kept_object
from rlx.ir.attrs import FlowAttrs
from rlx.ir.kernel import Kernel
from rlx.ir.program import Program, Step

_functions = Functions()
FOREVER = (1 << 63) - 1


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_jump(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """args: next row (written), counter, mask, addend, limit, flag, row where the counter is below the limit and the flag is set,
    row where not. The counter is masked and gets the addend first."""
    words = [e.gep(args, 8 * i) for i in range(8)]
    counter, flag = (e.load("ptr", words[i], 8) for i in (1, 5))
    mask, addend, limit, yes, no = (e.load("i64", words[i], 8) for i in (2, 3, 4, 6, 7))
    now = e.bin("add", e.bin("and", e.load("i64", counter, 8), mask), addend)
    e.store(now, counter, 8)
    below = e.cmp("slt", now, limit)
    held = e.cmp("ne", e.load("i8", flag, 1), 0)
    e.store(e.select(e.bin("and", below, held), yes, no), words[0], 8)


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_copy(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """args: goal, source, bytes."""
    goal, source = (e.load("ptr", e.gep(args, 8 * i), 8) for i in range(2))
    with e.when(e.cmp("ne", goal, source)):
        size = e.load("i64", e.gep(args, 16), 8)
        e.intrinsic("memcpy", goal, source, size, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_zero(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """args: goal, bytes."""
    goal, size = e.load("ptr", args, 8), e.load("i64", e.gep(args, 8), 8)
    e.intrinsic("memset", goal, e.const("i8", 0), size, e.const("i1", False), suffix=("ptr", "i64"), returns="void")


SYMBOLS = "rlx_jump", "rlx_copy", "rlx_zero"


@cache
def library() -> Library:
    return Library([kept_object("control flow", lambda: _functions.module_text(Body))], list(SYMBOLS))


class FlowRows:
    """Adds the rows of a step that runs sub-programs. `at`: the number of the step in its program."""

    def __init__(
        self, rows: Rows, at: int, coded: Mapping[str, Sequence[tuple[Step, Rendered]]], address: Callable[[str], int]
    ) -> None:
        """`coded`: the code of the steps by phase (Program.every_phase), at `address` by its symbol."""
        self.rows, self.at, self.coded, self.address = rows, at, coded, address
        self.jump, self.copy, self.zero = map(library().address, SYMBOLS)
        rows.kept.append(words := np.array([0, 1], np.int64))
        self.unread, self.one = Place(words.ctypes.data), Place(words.ctypes.data + 8)

    def row(self, function: int, args: Sequence[Place | int], kernel: Kernel, tasks: int = 1, joined: bool = False) -> int:
        """Adds a row and gives its number."""
        first = len(self.rows.addresses)
        found = [(first + i, a.moving) for i, a in enumerate(args) if isinstance(a, Place) and a.moving is not None]
        self.rows.moving += found
        plain = (a.address if isinstance(a, Place) else a for a in args)
        self.rows.add(self.at, function, *plain, kernel=kernel, tasks=tasks, joined=joined)
        return len(self.rows.steps) - 1

    def add(self, program: Program, phase: str, step: Step, args: Sequence[Place]) -> None:
        """`phase`: the prefix of the names of its bodies' phases."""
        flow = step.kernel.flow
        assert flow is not None
        sizes = [b.size * b.dtype.itemsize for b in step.kernel.buffers]
        for source, goal in flow.copies:
            self.row(self.copy, (args[goal], args[source], sizes[goal]), step.kernel)
        for n in flow.zeroed:
            self.row(self.zero, (args[n], sizes[n]), step.kernel)
        flag, limit = self.one if flow.test == -1 else args[flow.test], FOREVER if flow.limit == -1 else flow.limit
        if flow.count != -1:
            first = self.jumping(step.kernel, args[flow.count], False, limit, flag)
            self.body(program, phase, flow, 0, args)
            again = self.jumping(step.kernel, args[flow.count], True, limit, flag)
            self.leads(first, first + 1, again + 1)
            self.leads(again, first + 1, again + 1)
        else:
            choice = self.jumping(step.kernel, self.unread, False, 1, flag)
            self.body(program, phase, flow, 0, args)
            end = self.jumping(step.kernel, self.unread, False, 1, self.one)
            self.body(program, phase, flow, 1, args)
            self.leads(choice, choice + 1, end + 1)
            self.leads(end, len(self.rows.steps), len(self.rows.steps))

    def jumping(self, kernel: Kernel, counter: Place, counts: bool, limit: int, flag: Place) -> int:
        """A jump, whose targets are not known yet. `counts`: it adds one to the counter, else it sets it to 0."""
        row = self.row(self.jump, (0, counter, -1 if counts else 0, int(counts), limit, flag, 0, 0), kernel)
        self.rows.jumps.append(row)
        return row

    def leads(self, jump: int, yes: int, no: int) -> None:
        """The rows to which a jump leads."""
        words = self.rows.steps[jump][1]
        self.rows.targets += [(words + 6, yes), (words + 7, no)]

    def body(self, program: Program, phase: str, flow: FlowAttrs, which: int, args: Sequence[Place]) -> None:
        number = flow.bodies[which]
        body, name = program.bodies[number], f"{phase}body{number}."
        places = dict(zip((*body.params, *body.handles), (args[n] for n in flow.wires[which])))
        start = args[flow.scratch].address if flow.scratch != -1 else 0
        places |= {id: Place(start + at) for id, at in body.plan.offsets.items()}
        for part in ("steps", "commit"):
            coded = self.coded[name + part]
            for (step, code), joined in zip(coded, joins(coded)):
                own = [places[a] for a in step.args]
                if step.kernel.flow is not None:
                    self.add(body, name, step, own)
                else:
                    self.row(self.address(code.symbol), own, step.kernel, code.tasks, joined)


__all__ = ["FlowRows"]

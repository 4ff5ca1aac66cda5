"""Collectives as steps of a run: functions that the walker calls as it calls kernels (ABI: rlx.host.emit.Rendered).

Where all heaps lie in this process's memory, machine code walks a collective's table (rlx.driver.transports.shm_walk) without
Python, unless a meeting is not over at once. Other transports are called in Python.

Python that machine code calls may be interrupted (Ctrl-C) before its first line, and ctypes would swallow that: so what is
called is the `send` of a generator, which wakes up inside a `try`, and has failed unless it says otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

import numpy as np

from rlx.backends.cpu.target import host_target
from rlx.driver.collective import abandon, collectives_of
from rlx.driver.exchange import Exchanges
from rlx.errors import CollectiveError
from rlx.host.abi import I64, P
from rlx.host.emit import V
from rlx.host.functions import Body, Functions, fields_of
from rlx.host.jit import Library, compile_object
from rlx.ir.kernel import Buffer, Native

FAILED = 1 << 16  # ExchangeCalls.FAILED
ANSWER = ctypes.CFUNCTYPE(None, I64)


class Block(ctypes.Structure):
    """A step's third argument. `walk`, `begin`: see rank_walk; `answer`: void (i64), Python that clears `failed`; `copied`: bytes
    of the operand to be copied to the result, which is then worked on in place; 0: it is not."""

    _fields_ = [("walk", P), ("begin", P), ("answer", P), ("copied", I64), ("failed", I64)]


class StepBody(Body):
    fields = fields_of(Block)


_functions = Functions()


@_functions.native("void", block="ptr", what="i64", status="ptr")
def ask(e: Body, block: V, what: V, status: V) -> None:
    e.put(block, "failed", 1)
    e.call(e.get(block, "answer"), "void", what)
    with e.when(e.cmp("ne", e.get(block, "failed"), 0)):
        e.store(e.const("i32", FAILED), status, 4)


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_exchange_in_python(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    ask(e, e.load("ptr", e.gep(args, 16), 8), e.convert("ptrtoint", args, "i64"), status)


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_exchange(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    source, goal, block = (e.load("ptr", e.gep(args, 8 * i), 8) for i in range(3))
    size = e.get(block, "copied")
    in_place = e.cmp("ne", size, 0)
    with e.when(e.bin("and", in_place, e.cmp("ne", source, goal))):
        e.intrinsic("memcpy", goal, source, size, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
    code = e.call(e.get(block, "begin"), "i64", e.get(block, "walk"), e.select(in_place, goal, source), goal)
    with e.when(e.cmp("ne", code, 0)):
        ask(e, block, code, status)


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_exchange_release(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    e.store_atomic(e.i64(0), e.load("ptr", args, 8), "release")


@cache
def _library() -> Library:
    text = _functions.module_text(StepBody)
    symbols = "rlx_exchange", "rlx_exchange_in_python", "rlx_exchange_release"
    return Library([compile_object(text, host_target(1), "exchange", keep=True)], symbols)


class ExchangeCalls:
    """Functions for the collectives of one executable. They live as long as this object."""

    FAILED = FAILED  # the status of a step that leaves an error for `error`

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.errors: list[BaseException] = []
        self._busy = collectives_of(exchanges.transport).busy if exchanges.steps else ctypes.c_int64()
        self._made: dict[Native | str, tuple[int, int, Any]] = {}

    def begin(self) -> tuple[int, ...]:
        """What comes before the first step: the address of its function, and its arguments."""
        if "begin" not in self._made:
            self._made["begin"] = self._in_python(lambda args, exchanges=self.exchanges: exchanges.begin())
        function, block, _ = self._made["begin"]
        return function, 0, 0, block

    def release(self) -> tuple[int, ...]:
        """What comes behind all meetings, as `begin`: Exchanges.release."""
        return _library().address("rlx_exchange_release"), ctypes.addressof(self._busy)

    def agreement(self) -> tuple[int, ...] | None:
        """What comes behind the last step, if anything does; as `begin`."""
        from rlx.driver.transports import shm_walk

        table = self.exchanges.agreement
        if table is None:
            return None
        if "agree" not in self._made:
            in_python = lambda args, exchanges=self.exchanges: exchanges.agree()  # noqa: E731
            in_code = isinstance(table, shm_walk.Table)
            self._made["agree"] = self._in_code(table, 0) if in_code else self._in_python(in_python)
        function, block, _ = self._made["agree"]
        return function, 0, 0, block

    def step(self, step: Native) -> tuple[int, int]:
        """Of a collective: the address of its function, and the argument behind those of operand and result."""
        from rlx.driver.transports import shm_walk  # compiles what most programs do not need

        if step not in self._made:
            table = self.exchanges.tables.get(step)
            in_code = isinstance(table, shm_walk.Table)
            x = step.inputs[0].buffer
            copied = x.size * x.dtype.itemsize if step.attrs.in_place else 0  # type: ignore[union-attr]
            self._made[step] = self._in_code(table, copied) if in_code else self._in_python(self._performs(step))
        return self._made[step][:2]

    def _performs(self, step: Native) -> Callable[[int], None]:
        exchanges, (source,), (goal,) = self.exchanges, step.inputs, step.outputs

        def act(args: int) -> None:
            at = (I64 * 2).from_address(args)
            exchanges.perform(step, _array(source.buffer, at[0]), _array(goal.buffer, at[1]))

        return act

    def _in_python(self, act: Callable[[int], None]) -> tuple[int, int, Any]:
        return self._calling("rlx_exchange_in_python", Block(), act)

    def _in_code(self, table: Any, copied: int) -> tuple[int, int, Any]:
        from rlx.driver.transports import shm_walk

        block = Block(walk=table.address, begin=shm_walk.begin_address(), copied=copied)
        return self._calling("rlx_exchange", block, table.settle)

    def _calling(self, function: str, block: Block, act: Callable[[int], None]) -> tuple[int, int, Any]:
        """A function of machine code, its block, and what both need."""
        answers = _answers(act, block, self.errors, self.exchanges.transport)
        next(answers)  # to where it waits
        answer = ANSWER(answers.send)
        block.answer = ctypes.cast(answer, P).value
        return _library().address(function), ctypes.addressof(block), (block, answer, _library())

    def error(self, where: str, error: BaseException | None = None) -> BaseException:
        """What a step that failed left, or this."""
        if error is None:
            error = self.errors.pop() if self.errors else KeyboardInterrupt(f"{where} was interrupted")
        self.errors.clear()
        if not isinstance(error, CollectiveError):
            return error
        told = type(error)(f"{where}: {error}; nothing was committed")
        told.__cause__ = error
        return told


def _answers(act: Callable[[int], None], block: Block, errors: list[BaseException], transport: Any) -> Generator[None, int, None]:
    """Each `send(x)` is act(x); what that raises is left in `errors` for ExchangeCalls.error, where Python goes on."""
    while True:
        try:
            while True:
                act((yield))
                block.failed = 0
        except GeneratorExit:
            return
        except BaseException as e:  # noqa: BLE001
            errors.append(e)
            if transport is not None and not isinstance(e, CollectiveError):
                abandon(transport)


def _array(buffer: Buffer, address: int) -> np.ndarray:
    dtype = buffer.dtype.numpy
    return np.ctypeslib.as_array((ctypes.c_ubyte * (buffer.size * dtype.itemsize)).from_address(address)).view(dtype)

"""Collectives as steps of a run: functions that the executor calls like kernels (ABI: rlx.host.emit.Rendered).

If all heaps are mapped in this process, machine code runs a collective's table (rlx.driver.transports.shm_walk) without Python,
unless it has to wait at a barrier. Other transports are called in Python.

A Python callback of machine code may be interrupted (Ctrl-C) before its first line, and ctypes would swallow that. So the
callback is the `send` of a generator, which resumes inside a `try`; it counts as failed unless it clears `failed`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

import numpy as np

from rlx.backends.cpu.target import host_target
from rlx.driver.collective import collectives_of
from rlx.driver.exchange import Exchanges
from rlx.driver.symmetric import abandon
from rlx.errors import CollectiveError
from rlx.host.abi import I64, P
from rlx.host.emit import V
from rlx.host.functions import Body, Functions, fields_of
from rlx.host.jit import Library, compile_object
from rlx.ir.kernel import Buffer, Native

FAILED = 1 << 16  # ExchangeCalls.FAILED
ANSWER = ctypes.CFUNCTYPE(None, I64)


class Block(ctypes.Structure):
    """A step's third argument. `walk`, `begin`: see rank_walk; `answer`: void (i64), Python that clears `failed`. `copied`: bytes
    of the operand to copy to the result, for collectives that work in place on the result; 0: no copy."""

    _fields_ = [("walk", P), ("begin", P), ("answer", P), ("copied", I64), ("failed", I64)]


class StepBody(Body):
    fields = fields_of(Block)


_functions = Functions()


def asking(functions: Functions, failed: int) -> Callable[..., V]:
    """The function `ask` of a module: it calls the `answer` of a block, and sets the status to `failed` unless that cleared the
    block's `failed`."""

    @functions.native("void", block="ptr", argument="i64", status="ptr")
    def ask(e: Body, block: V, argument: V, status: V) -> None:
        e.put(block, "failed", 1)
        e.call(e.get(block, "answer"), "void", argument)
        with e.when(e.cmp("ne", e.get(block, "failed"), 0)):
            e.store(e.const("i32", failed), status, 4)

    return ask


ask = asking(_functions, FAILED)


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
    """The functions for the collectives of one executable. They live as long as this object."""

    FAILED = FAILED  # status of a step whose error is returned by `error`

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.errors: list[BaseException] = []
        self._busy = collectives_of(exchanges.transport).busy if exchanges.steps else ctypes.c_int64()
        self._made: dict[Native | str, tuple[int, int, Any]] = {}

    def begin(self) -> tuple[int, ...]:
        """The step before the first one: the address of its function, and its arguments."""
        if "begin" not in self._made:
            self._made["begin"] = self._in_python(lambda args, exchanges=self.exchanges: exchanges.begin())
        function, block, _ = self._made["begin"]
        return function, 0, 0, block

    def release(self) -> tuple[int, ...]:
        """The step after all barriers (Exchanges.release), in the form of `begin`."""
        return _library().address("rlx_exchange_release"), ctypes.addressof(self._busy)

    def agreement(self) -> tuple[int, ...] | None:
        """The step after the last one, in the form of `begin`; None: not needed."""
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
        """For a collective: the address of its function, and the argument that follows those of operand and result."""
        from rlx.driver.transports import shm_walk  # imported late: it compiles code that most programs do not need

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
        """The address of `function`, that of its block, and an object that keeps both alive."""
        asked = answers(act, block, self.errors, self.exchanges.transport)
        next(asked)  # run to its first yield
        answer = ANSWER(asked.send)
        block.answer = ctypes.cast(answer, P).value
        return _library().address(function), ctypes.addressof(block), (block, answer, _library())

    def error(self, where: str, error: BaseException | None = None) -> BaseException:
        """`error`, else the error that a failed step left, else KeyboardInterrupt. CollectiveErrors say `where`."""
        if error is None:
            error = self.errors.pop() if self.errors else KeyboardInterrupt(f"{where} was interrupted")
        self.errors.clear()
        if not isinstance(error, CollectiveError):
            return error
        told = type(error)(f"{where}: {error}; nothing was committed")
        told.__cause__ = error
        return told


def answers(act: Callable[[int], None], block: Any, errors: list[BaseException], transport: Any) -> Generator[None, int, None]:
    """Each `send(x)` runs act(x). An exception is appended to `errors`; ExchangeCalls.error raises it later, from Python."""
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

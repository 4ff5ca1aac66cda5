"""Collectives as steps of a run: functions that the walker calls as it calls kernels (ABI: rlx.backends.cpu.emit.Rendered).

Where all heaps lie in this process's memory, machine code walks a collective's table (rlx.backends.cpu.rank_walk) without
Python, unless a meeting is not over at once. Other transports are called in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from rlx.backends.cpu.emit import V
from rlx.backends.cpu.jit import Library, compile_object
from rlx.backends.cpu.target import host_target
from rlx.backends.cpu.walker import I64, Body, Functions, P, fields_of
from rlx.driver.exchange import Exchanges
from rlx.errors import CollectiveError
from rlx.ir.kernel import Buffer, Native

FAILED = 1 << 16  # ExchangeCalls.FAILED
FUNCTION = ctypes.CFUNCTYPE(None, P, I64, P, P)
SETTLE = ctypes.CFUNCTYPE(ctypes.c_int32, I64)


class Block(ctypes.Structure):
    """A step's third argument. `walk`, `begin`: see rank_walk; `settle`: i32 (i64 code), FAILED or 0; `copied`: bytes of the
    operand to be copied to the result, which is then worked on in place; 0: it is not."""

    _fields_ = [("walk", P), ("begin", P), ("settle", P), ("copied", I64)]


class StepBody(Body):
    fields = fields_of(Block)


_functions = Functions()


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_exchange(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    source, goal, block = (e.load("ptr", e.gep(args, 8 * i), 8) for i in range(3))
    size = e.get(block, "copied")
    in_place = e.cmp("ne", size, 0)
    with e.when(e.bin("and", in_place, e.cmp("ne", source, goal))):
        e.intrinsic("memcpy", goal, source, size, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
    code = e.call(e.get(block, "begin"), "i64", e.get(block, "walk"), e.select(in_place, goal, source), goal)
    with e.when(e.cmp("ne", code, 0)):
        failed = e.call(e.get(block, "settle"), "i32", code)
        with e.when(e.cmp("ne", failed, 0)):
            e.store(failed, status, 4)


@cache
def _library() -> Library:
    text = _functions.module_text(StepBody)
    return Library([compile_object(text, host_target(1), "exchange", keep=True)], ("rlx_exchange",))


class ExchangeCalls:
    """Functions for the collectives of one executable. They live as long as this object."""

    FAILED = FAILED  # the status of a step that leaves an error for `error`

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.errors: list[BaseException] = []
        self._made: dict[Native | None, tuple[int, int, Any]] = {}

    def begin(self) -> int:
        """Address of what comes before the first step."""
        if None not in self._made:
            self._made[None] = self._in_python(lambda args, exchanges=self.exchanges: exchanges.begin())
        return self._made[None][0]

    def step(self, step: Native) -> tuple[int, int]:
        """Of a collective: the address of its function, and the argument behind those of operand and result."""
        from rlx.backends.cpu import rank_walk  # compiles what most programs do not need

        if step not in self._made:
            table = self.exchanges.tables.get(step)
            in_code = isinstance(table, rank_walk.Table)
            self._made[step] = self._in_code(step, table) if in_code else self._in_python(self._performs(step))
        return self._made[step][:2]

    def _performs(self, step: Native) -> Callable[[int], None]:
        exchanges, (source,), (goal,) = self.exchanges, step.inputs, step.outputs

        def act(args: int) -> None:
            at = (I64 * 2).from_address(args)
            exchanges.perform(step, _array(source.buffer, at[0]), _array(goal.buffer, at[1]))

        return act

    def _in_python(self, act: Callable[[int], None]) -> tuple[int, int, Any]:
        guarded = partial(_guarded, self.errors)

        def call(args: int, task: int, scratch: int, status: int) -> None:
            if failed := guarded(act, args):
                ctypes.c_int32.from_address(status).value = failed

        function = FUNCTION(call)
        return _address(function), 0, function

    def _in_code(self, step: Native, table: Any) -> tuple[int, int, Any]:
        from rlx.backends.cpu import rank_walk

        settle, x = SETTLE(partial(_guarded, self.errors, table.settle)), step.inputs[0].buffer
        copied = x.size * x.dtype.itemsize if step.attrs.in_place else 0  # type: ignore[union-attr]
        begin = rank_walk.begin_address()
        block = Block(walk=table.address, begin=begin, settle=_address(settle), copied=copied)
        return _library().address("rlx_exchange"), ctypes.addressof(block), (block, settle, table, _library())

    def error(self, where: str) -> BaseException:
        """What a step that failed left."""
        error = self.errors.pop()
        self.errors.clear()
        if not isinstance(error, CollectiveError):
            return error
        told = type(error)(f"{where}: {error}; nothing was committed")
        told.__cause__ = error
        return told


def _guarded(errors: list[BaseException], act: Callable[[int], None], arg: int) -> int:
    """FAILED, and the error in `errors`, if `act` raises; else 0."""
    try:
        act(arg)
    except BaseException as e:  # noqa: BLE001  for ExchangeCalls.error, where Python goes on
        errors.append(e)
        return FAILED
    return 0


def _address(function: Any) -> int:
    return ctypes.cast(function, P).value or 0


def _array(buffer: Buffer, address: int) -> np.ndarray:
    dtype = buffer.dtype.numpy
    return np.ctypeslib.as_array((ctypes.c_ubyte * (buffer.size * dtype.itemsize)).from_address(address)).view(dtype)

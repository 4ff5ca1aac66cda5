"""Collectives as steps of a run: functions that the walker calls as it calls kernels (ABI: rlx.backends.cpu.emit.Rendered)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from rlx.driver.exchange import Exchanges
from rlx.errors import CollectiveError
from rlx.ir.kernel import Buffer, Native

FAILED = 1 << 16  # status of a step whose error waits in `errors`
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


class ExchangeCalls:
    """Functions for the collectives of one executable. They live as long as this object."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.errors: list[BaseException] = []
        self._functions: dict[Native | None, tuple[int, object]] = {}

    def begin(self) -> int:
        """Address of what comes before the first step."""
        exchanges = self.exchanges
        return self._address(None, lambda args: exchanges.begin())

    def step(self, step: Native) -> int:
        """Address of the function of a collective; args: addresses of operand and result."""
        exchanges, (source,), (goal,) = self.exchanges, step.inputs, step.outputs

        def act(args: int) -> None:
            at = (ctypes.c_int64 * 2).from_address(args)
            exchanges.perform(step, _array(source.buffer, at[0]), _array(goal.buffer, at[1]))

        return self._address(step, act)

    def _address(self, key: Native | None, act: Callable[[int], None]) -> int:
        errors = self.errors  # and not self, which would then hold itself

        def call(args: int, task: int, scratch: int, status: int) -> None:
            try:
                act(args)
            except BaseException as e:  # noqa: BLE001  for `error`, where Python goes on
                errors.append(e)
                ctypes.c_int32.from_address(status).value = FAILED

        if key not in self._functions:
            function = FUNCTION(call)
            self._functions[key] = ctypes.cast(function, ctypes.c_void_p).value or 0, function
        return self._functions[key][0]

    def error(self, where: str) -> BaseException:
        """What a step that failed left."""
        error = self.errors.pop()
        self.errors.clear()
        if not isinstance(error, CollectiveError):
            return error
        told = type(error)(f"{where}: {error}; nothing was committed")
        told.__cause__ = error
        return told


def _array(buffer: Buffer, address: int) -> np.ndarray:
    dtype = buffer.dtype.numpy
    return np.ctypeslib.as_array((ctypes.c_ubyte * (buffer.size * dtype.itemsize)).from_address(address)).view(dtype)

"""The experts of one param: the rows of one, and where they are read from, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from rlx.driver import files
from rlx.errors import CorruptFileError, InputShapeError
from rlx.ir.program import BufferDecl
from rlx.records import record


@record
class ExpertRows:
    """The rows of one expert as its param has them."""

    param: str
    dims: tuple[int, ...]
    dtype: np.dtype

    @staticmethod
    def of(param: BufferDecl, experts: int) -> ExpertRows:
        count, *rest = param.shape.static
        return ExpertRows(param.name, (count // experts, *rest), param.shape.dtype.numpy)

    def check(self, array: np.ndarray) -> None:
        """InputShapeError: the array has other dims or another dtype. One row may come without its axis."""
        dims = self.dims[1:] if self.dims[0] == 1 and array.ndim < len(self.dims) else self.dims
        if array.shape != dims or array.dtype != self.dtype:
            found = f"{array.dtype}{list(array.shape)}"
            raise InputShapeError(f"an expert of {self.param!r} is {self.dtype}{list(self.dims)}, got {found}")


class ExpertSource:
    """The experts of one param, wherever they are: `read(expert)` returns the rows of one as the param has them. `over`: arrays
    over the mapped files that it reads from; each must stay as it was when it was opened."""

    def __init__(self, read: Callable[[int], np.ndarray], name: str, over: Iterable[np.ndarray] = ()) -> None:
        self.name, self._read = name, read
        found = (files.mapping(array) for array in over)
        self._files = {place[0].number: place[0] for place in found if place}

    @staticmethod
    def of_array(array: np.ndarray, experts: int, name: str) -> ExpertSource | None:
        """The experts of an array that lies in a mapped file. None: it does not."""
        if files.mapping(array) is None:
            return None
        rows = len(array) // experts
        return ExpertSource(lambda e: array[e * rows : (e + 1) * rows], name, [array])

    def read(self, expert: int) -> np.ndarray:
        """One expert, in memory. CorruptFileError: its file is no longer what it was."""
        try:
            for file in self._files.values():
                files.check_same(file)
            found = self._read(expert)
            if files.mapping(found) is not None or not found.flags.c_contiguous:
                made = np.empty(found.shape, found.dtype)
                files.copy(made, found)
                found = made
            for file in self._files.values():  # it may have changed meanwhile
                files.check_same(file)
        except (CorruptFileError, OSError) as error:
            raise CorruptFileError(f"expert {expert} of {self.name!r} cannot be read: {error}") from error
        return found


__all__ = ["ExpertRows", "ExpertSource"]

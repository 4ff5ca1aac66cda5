"""Outputs in place, as array-likes."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import StaleViewError


class OutputView:
    """One output in place: `np.asarray(view)` and `np.from_dlpack(view)` share the executable's memory, read-only.

    In debug mode (CompileOptions(debug=True)) each access raises StaleViewError after another run has started.
    """

    def __init__(self, owner: Any, index: int) -> None:
        self._owner, self._index, self._generation = owner, index, owner._gate.generation
        self._array = owner._current_outputs()[index].view()
        self._array.flags.writeable = False

    def numpy(self) -> np.ndarray:
        """The output's memory, valid until the next run."""
        if self._owner.options.debug and self._generation != self._owner._gate.generation:
            raise StaleViewError(
                f"output {self._index} was viewed after run {self._generation}, and run {self._owner._gate.generation} has "
                "overwritten it; take a copy, or a new outputs_view()"
            )
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        return self._array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None and not copy else np.array(array, dtype=dtype, copy=bool(copy))

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.numpy().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __repr__(self) -> str:
        return f"OutputView({self._index}, {self.dtype}{list(self.shape)})"

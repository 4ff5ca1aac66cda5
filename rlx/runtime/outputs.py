"""Outputs in place, as array-likes."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import StaleViewError


class OutputView(np.lib.mixins.NDArrayOperatorsMixin):
    """One output in place: `np.asarray(view)` and `np.from_dlpack(view)` share the executable's memory, read-only. Operators and
    methods are those of the array. On a device whose memory the host does not see, they copy the output once for each run.

    In debug mode (CompileOptions(debug=True)) each access raises StaleViewError after another run has started.
    """

    def __init__(self, owner: Any, index: int) -> None:
        self._owner, self._index, self._generation = owner, index, owner._gate.generation
        self._shape = owner._program.outputs[index].shape
        self._copied = -1, np.empty(0)  # generation, and a copy where the host does not see the device's memory

    def _check(self) -> None:
        """StaleViewError, in debug mode: another run has started."""
        generation = self._owner._gate.generation
        if self._owner.options.debug and self._generation != generation:
            raise StaleViewError(
                f"output {self._index} was viewed after run {self._generation}, and run {generation} has "
                "overwritten it; take a copy, or a new outputs_view()"
            )

    def numpy(self) -> np.ndarray:
        """The output's memory, valid until the next run. Where the host does not see it: a copy, made when first asked for."""
        self._check()
        generation = self._owner._gate.generation
        array = self._owner._output_views[self._index]
        if array is None:
            if self._copied[0] != generation:
                self._owner._drain()
                self._copied = generation, self._owner._read([self._index])[0]
            array = self._copied[1]
        array = array.view()
        array.flags.writeable = False
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape.static

    @property
    def dtype(self) -> np.dtype:
        return self._shape.dtype.numpy

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy and dtype in (None, self.dtype):
            self._check()
            self._owner._drain()
            return self._owner._read([self._index])[0]  # the backend may copy faster than numpy
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        inputs, options = _arrays(inputs), options | ({"out": _arrays(options["out"])} if "out" in options else {})
        return getattr(ufunc, method)(*inputs, **options)

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __len__(self) -> int:
        return len(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"neither an output nor an array has an attribute {name!r}")
        return getattr(self.numpy(), name)

    def _shared(self) -> Any:
        """The output in place, for other libraries."""
        owner = self._owner
        self._check()
        there = owner._executable.export(owner._program.outputs[self._index].buffer, self._shape)
        return self.numpy() if there is None else there

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._shared().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._shared().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._shared().__cuda_array_interface__  # AttributeError: the output is not on such a device

    def __repr__(self) -> str:
        return f"OutputView({self._index}, {self.dtype}{list(self.shape)})"


def _arrays(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.numpy() if isinstance(v, OutputView) else v for v in values)

"""Arrays of other libraries in the memory of a device, not copied. Backends make them (Executable.adopt)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """C-contiguous elements at `address` of a device. `owner` keeps them alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: object
    base = None  # as of a numpy array: it is no view of another one

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

"""Matrices of 8-bit floats with a factor for each block of rows and columns, as DeepSeek-V3's and Qwen3's fp8 folders hold them.

In: the tensors of a folder, and "quantization_config" of its config.json. Out: views that are cut like arrays and decoded in
parts: a product of f32, which is what those models' own conversion to bf16 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, ModelError
from rlx.ir.dtype import as_dtype
from rlx.records import record
from rlx.runtime import in_memory

FACTORS = "_scale_inv"  # ends the name of the factors of a tensor; weights are multiplied by them
FORMAT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float", "expert_dtype": "fp8"}
BLOCK = (128, 128)


@record(eq=False)
class Scaled:
    """`at`: the row and the column of the first element, counted from where blocks begin."""

    data: np.ndarray
    factors: np.ndarray
    block: tuple[int, int]
    at: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __getitem__(self, key: slice | tuple[slice, slice]) -> Scaled:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        starts = (k.indices(n)[0] for k, n in zip((rows, columns), self.shape))
        row, column = (at + start for at, start in zip(self.at, starts))
        return replace(self, data=self.data[rows, columns], at=(row, column))

    def decoded(self) -> np.ndarray:
        """f32. CorruptFileError: the file has been truncated."""
        rows, columns = ((at + np.arange(n)) // size for at, n, size in zip(self.at, self.shape, self.block))
        first, end = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
        factors = in_memory(self.factors[first:end]).astype(np.float32)
        return in_memory(self.data).astype(np.float32) * factors[rows - first][:, columns]


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, if config.json says that weights are scaled. ModelError: they are quantised in another way."""
    found = config.get("quantization_config")
    if found is None:
        return None
    known = isinstance(found, Mapping) and all(found.get(key, value) in (value, None) for key, value in FORMAT.items())
    block = found.get("weight_block_size", BLOCK) if known and found.get("quant_method") else None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ModelError(
            f"configuration: quantization_config = {str(found)[:300]} is not supported: rlx reads fp8 (e4m3) with a factor for "
            "each block of a matrix, and activations that are scaled at run time"
        )
    return block[0], block[1]


def with_factors(tensors: Mapping[str, np.ndarray], block: tuple[int, int] | None, source: object) -> dict[str, Any]:
    """The tensors, those that have factors as `Scaled`. CorruptFileError: factors do not fit their matrix."""
    factors = {name.removesuffix(FACTORS): name for name in tensors if name.endswith(FACTORS)}
    found: dict[str, Any] = {name: array for name, array in tensors.items() if not name.endswith(FACTORS)}
    for name, of in factors.items():
        array, scale = tensors.get(name), tensors[of]
        if block is None:
            raise CorruptFileError(f"{source}: {of!r} has factors, and config.json has no quantization_config")
        if array is None:
            raise CorruptFileError(f"{source}: {of!r} has factors of {name!r}, which is not there")
        kinds = as_dtype(array.dtype).name, as_dtype(scale.dtype).name
        grid = tuple(-(-n // size) for n, size in zip(array.shape, block))
        if array.ndim != 2 or kinds[0] != "f8e4m3" or kinds[1] not in ("f32", "bf16", "f16") or scale.shape != grid:
            what = f"{kinds[0]}{list(array.shape)} with factors {kinds[1]}{list(scale.shape)}"
            raise CorruptFileError(f"{source}: {name!r} is {what}; blocks of {block[0]} x {block[1]} need f32{list(grid)}")
        found[name] = Scaled(array, scale, block)
    return found


__all__ = ["Scaled", "block_of", "with_factors"]

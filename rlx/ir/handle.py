"""BufferHandle: a stable name and shape for state that outlives a run."""

from __future__ import annotations

from rlx.errors import GraphError, utf8
from rlx.ir.dtype import DType
from rlx.ir.shape import DimLike, Shape
from rlx.records import record


@record
class BufferHandle:
    """Named state: a KV-cache, an optimizer moment, a counter. Equal names in two graphs mean the same state."""

    name: str
    shape: Shape

    def __init__(self, name: str, dims: tuple[DimLike | str, ...] | int, dtype: DType | str) -> None:
        object.__setattr__(self, "name", utf8("a handle needs a name, which is text", name, GraphError, least=1))
        object.__setattr__(self, "shape", Shape(dims, dtype))

    def __repr__(self) -> str:
        return f"BufferHandle({self.name!r}, {self.shape})"

    @property
    def dims(self) -> tuple[DimLike, ...]:
        return self.shape.dims

    @property
    def dtype(self) -> DType:
        return self.shape.dtype

    @property
    def byte_size(self) -> int:
        return self.shape.size_bytes

    @property
    def num_elements(self) -> int:
        return self.shape.num_elements

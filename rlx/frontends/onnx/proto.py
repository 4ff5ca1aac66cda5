"""Reading ONNX files: the model, and the arrays of its initialisers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from rlx.errors import DTypeError, Unsupported
from rlx.ir.dtype import as_dtype

_WIDER = {  # element types that rlx does not have, and the one that holds their values
    "int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8, "float4_e2m1fn": np.float32,
    "float8_e4m3fnuz": np.float32, "float8_e5m2fnuz": np.float32, "float8_e8m0fnu": np.float32,
}  # fmt: skip


class Source:
    """A model, with what is needed to read its arrays. `name`: for messages."""

    def __init__(self, model: onnx.ModelProto | bytes | str | PathLike[str]) -> None:
        if isinstance(model, onnx.ModelProto):
            self.model, self.name = model, model.graph.name or "the model"
        elif isinstance(model, bytes):
            self.model, self.name = onnx.load_from_string(model), "the model"
        else:
            self.model, self.name = onnx.load(model), str(Path(model))
        self._arrays: dict[int, np.ndarray] = {}
        own = {t.name for t in self.model.graph.initializer}
        self.inputs = [i for i in self.model.graph.input if i.name not in own]

    def array(self, tensor: onnx.TensorProto | onnx.SparseTensorProto) -> np.ndarray:
        """The contents of an initialiser."""
        if isinstance(tensor, onnx.SparseTensorProto):
            return _dense(tensor)
        return numpy_helper.to_array(tensor)


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    out = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        out.reshape(-1)[indices] = values
    else:
        out[tuple(indices.T)] = values
    return out


def attribute(proto: onnx.AttributeProto) -> Any:
    """An attribute as int, float, str, tuple of these, ndarray, or GraphProto."""
    kinds = onnx.AttributeProto
    found = onnx.helper.get_attribute_value(proto)
    if proto.type == kinds.TENSOR:
        return numpy_helper.to_array(found)
    if proto.type == kinds.SPARSE_TENSOR:
        return _dense(found)
    if proto.type == kinds.STRING:
        return found.decode("utf-8", "replace")
    if proto.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
        return tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in found)
    return found


def stored(kind: np.dtype) -> np.dtype:
    """The numpy dtype in which rlx keeps elements of a dtype: itself, or a wider one of the same values."""
    return np.dtype(_WIDER.get(kind.name, kind))


def numpy_type(code: int, label: str) -> np.dtype:
    """The numpy dtype of an element type of ONNX. Unsupported: rlx has none."""
    try:
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
        as_dtype(stored(kind))
    except (KeyError, DTypeError):
        named = onnx.TensorProto.DataType.Name(code) if code in onnx.TensorProto.DataType.values() else str(code)
        hint = ": text is not computed with; leave it out of the model" if code == onnx.TensorProto.STRING else ""
        raise Unsupported(f"{label} has elements of type {named}, which rlx does not have{hint}") from None
    return kind

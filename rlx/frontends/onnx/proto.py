"""Reading ONNX files: the model, and the arrays of its initialisers, each size checked before it is used.

Raw bytes of a file, and of the files of its external data, are mapped: they are read when the weights are set.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import numpy_helper, version_converter

from rlx.errors import (  # isort: skip
    CorruptFileError, DTypeError, InputDTypeError, ModelError, OptionError, UnknownNameError, Unsupported, as_path, known,
)  # fmt: skip
from rlx.frontends.onnx.structure import OLDEST, faults, opsets
from rlx.frontends.onnx.wire import split
from rlx.ir.dtype import DType, as_dtype
from rlx.runtime import drop_pages, map_file

TEXT = np.dtype(object)  # of arrays of str
_WIDER = {  # element types that rlx does not have, and the one that holds their values
    "int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8, "float4_e2m1fn": np.float32,
    "float6_e2m3fn": np.float32, "float6_e3m2fn": np.float32, "float8_e4m3fnuz": np.float32, "float8_e5m2fnuz": np.float32,
    "float8_e8m0fnu": np.float32,
}  # fmt: skip
_BITS = {"int4": 4, "int2": 2, "uint4": 4, "uint2": 2, "float4_e2m1fn": 4}  # of an element in a file, where it is no byte
_DATA = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_IN_INT64, _IN_UINT64 = ("int64",), ("uint32", "uint64")


class Source:
    """A model with its arrays. `name`: for messages. `folder`: of its external data; None: it has none. Opsets before 7 are
    converted to 7 (`converted`)."""

    def __init__(self, model: onnx.ModelProto | bytes | str | PathLike[str]) -> None:
        self.folder: Path | None = None
        self.path: Path | None = None
        self._raw: dict[str, memoryview] = {}
        self.made: dict[str, np.ndarray] = {}  # weights in other layouts, for later imports
        self._files: dict[str, memoryview] = {}
        if isinstance(model, onnx.ModelProto):
            self.model, self.name = model, model.graph.name or "the model"
        elif isinstance(model, (bytes, bytearray, memoryview)):
            self.model, self.name = self._parsed(memoryview(model).cast("B"), "the model"), "the model"
        elif isinstance(model, (str, PathLike)):
            self.path = Path(as_path(model))
            self.name, self.folder = str(self.path), self.path.parent
            self.model = self._parsed(_mapped(self.path), self.name)
        else:
            raise OptionError(f"a model is a path, the bytes of a file, or an onnx.ModelProto, got {type(model).__name__}")
        if found := faults(self.model):
            raise ModelError(f"{self.name}: {'; '.join(found[:50])}" + ("; and more" if len(found) > 50 else ""))
        self.converted = opsets(self.model).get("", OLDEST) < OLDEST
        if self.converted:
            self.model = _converted(self.model, self.name)
        own = {t.name for t in self.model.graph.initializer}
        self.inputs = [i for i in self.model.graph.input if i.name not in own]

    def _parsed(self, data: memoryview, name: str) -> onnx.ModelProto:
        rest, self._raw = split(data, name)
        drop_pages(np.frombuffer(data, np.uint8))  # the system maps large parts of a file around each byte that is read
        try:
            return onnx.ModelProto.FromString(rest)
        except DecodeError as e:
            raise CorruptFileError(f"{name}: no ONNX file, or damaged: {e}") from None

    # -- arrays

    def array(self, tensor: Message) -> np.ndarray:
        """The contents of a tensor. CorruptFileError: its dims and its bytes contradict each other. Unsupported: its type."""
        if isinstance(tensor, onnx.SparseTensorProto):
            return self._dense(tensor)
        assert isinstance(tensor, onnx.TensorProto)
        label = f"{self.name}: tensor {tensor.name!r}"
        kind, dims = numpy_type(tensor.data_type, label), tuple(tensor.dims)
        if any(d < 0 for d in dims) or len(dims) > 64 or tensor.HasField("segment"):
            raise CorruptFileError(f"{label} has the dims {str(list(dims))[:80]}")
        elements = math.prod(dims)
        if kind == TEXT:
            if len(tensor.string_data) != elements:
                raise CorruptFileError(f"{label} of text has the dims {list(dims)}, and {len(tensor.string_data)} elements")
            return text_array([x.decode("utf-8", "replace") for x in tensor.string_data], dims)
        nbytes = (elements * _BITS.get(kind.name, 8 * kind.itemsize) + 7) // 8
        raw: memoryview | None = None
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raw = self._external(tensor, nbytes, label)
        elif tensor.HasField("raw_data"):
            raw = memoryview(tensor.raw_data)
        elif not any(len(getattr(tensor, field)) for field in _DATA):
            raw = self._raw.get(tensor.name)
        if raw is None:
            return _typed(tensor, kind, elements, label)
        if raw.nbytes != nbytes:
            raise CorruptFileError(f"{label} of {kind}{list(dims)} takes {nbytes} bytes, and the file has {raw.nbytes}")
        if kind.name in _BITS:
            return _unpacked(raw, kind, dims)
        found = np.frombuffer(raw, kind).reshape(dims) if elements else np.zeros(dims, kind)
        if kind == np.bool_ and (found.view(np.uint8) > 1).any():
            raise CorruptFileError(f"{label} is of bool, and has elements that are neither 0 nor 1")
        return found

    def _dense(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        values, indices, dims = self.array(sparse.values), self.array(sparse.indices), tuple(sparse.dims)
        label = f"{self.name}: sparse tensor {sparse.values.name!r}"
        if any(d < 0 for d in dims) or math.prod(dims) > 1 << 28 or indices.dtype != np.int64 or values.ndim != 1:
            raise CorruptFileError(f"{label} has dims, values or indices that are not supported")
        if indices.ndim == 2 and indices.shape[1] == len(dims):
            inside = ((indices >= 0) & (indices < np.array(dims, np.int64))).all()
            indices = indices @ np.array([math.prod(dims[i + 1 :]) for i in range(len(dims))], np.int64) if inside else indices
        if indices.shape != values.shape or (indices.size and not 0 <= indices.min() <= indices.max() < math.prod(dims)):
            raise CorruptFileError(f"{label} has indices outside of its dims {list(dims)}")
        out = np.zeros(math.prod(dims), values.dtype)
        out[indices] = values
        return out.reshape(dims)

    def _external(self, tensor: onnx.TensorProto, nbytes: int, label: str) -> memoryview:
        """The bytes of a tensor in another file, which is in the model's folder."""
        about = {e.key: e.value for e in tensor.external_data}
        place = about.get("location", "")
        if self.folder is None or self.path is None:
            raise ModelError(f"{label} is in the file {place!r} beside the model: give the model's path instead of its contents")
        parts = Path(place).parts
        if not parts or Path(place).is_absolute() or ".." in parts or "\0" in place or "\\" in place:
            raise CorruptFileError(f"{label} is in the file {place[:80]!r}, which is no path inside the model's folder")
        file = self.folder / place
        inside = [os.path.realpath(f) + os.sep for f in (self.folder, Path(os.path.realpath(self.path)).parent)]
        if not os.path.realpath(file).startswith(tuple(inside)):
            raise CorruptFileError(f"{label} is in the file {file}, a link to outside of the model's folder")
        if place not in self._files:
            self._files[place] = _mapped(file, f"{label} is in it")
        data = self._files[place]
        try:
            start, length = int(about.get("offset") or 0), int(about.get("length") or nbytes)
        except ValueError:
            start = length = -1
        if length != nbytes or start < 0 or start + length > data.nbytes:
            raise CorruptFileError(
                f"{label} takes {nbytes} bytes, and is given as {about.get('length', nbytes)!s:.30} bytes from "
                f"{about.get('offset', 0)!s:.30} on in {file}, which has {data.nbytes}"
            )
        return data[start : start + length]

    def attribute(self, proto: onnx.AttributeProto) -> Any:
        """An attribute as int, float, str, tuple of these, ndarray, or GraphProto."""
        kinds = onnx.AttributeProto
        if proto.type in (kinds.TENSOR, kinds.SPARSE_TENSOR):
            return self.array(proto.t if proto.type == kinds.TENSOR else proto.sparse_tensor)
        try:
            found = onnx.helper.get_attribute_value(proto)
        except ValueError as e:
            raise ModelError(f"attribute {proto.name!r} has no value: {e}") from None
        if proto.type == kinds.STRING:
            return found.decode("utf-8", "replace")
        if proto.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
            return tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in found)
        return found


def _converted(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    try:
        return version_converter.convert_version(model, OLDEST)
    except (RuntimeError, ValueError, version_converter.ConvertError) as e:
        found = " ".join(str(e).split())[:200]
        raise ModelError(f"{name}: opsets before {OLDEST} are converted to it, and onnx cannot do it: {found}") from None


def _mapped(path: Path, needed: str = "an ONNX file is needed") -> memoryview:
    try:
        if not path.is_file():
            raise ModelError(f"{path} is {'a folder' if path.is_dir() else 'missing'}; {needed}")
        if not path.stat().st_size:
            raise CorruptFileError(f"{path} is empty")
        return map_file(path)
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}") from None


def _typed(tensor: onnx.TensorProto, kind: np.dtype, elements: int, label: str) -> np.ndarray:
    """A tensor in a field of numbers."""
    field = "int64_data" if kind.name in _IN_INT64 else "uint64_data" if kind.name in _IN_UINT64 else "int32_data"
    field = {"float32": "float_data", "complex64": "float_data", "float64": "double_data"}.get(kind.name, field)
    count = elements * 2 if kind.name == "complex64" else (elements * _BITS.get(kind.name, 8) + 7) // 8
    if (found := len(getattr(tensor, field))) != count:
        raise CorruptFileError(f"{label} of {kind}{list(tensor.dims)} needs {count} numbers in {field}, and has {found}")
    try:
        with np.errstate(all="ignore"):
            return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OverflowError) as e:
        raise CorruptFileError(f"{label} has numbers that do not fit {kind}: {e}") from None


def _unpacked(raw: memoryview, kind: np.dtype, dims: tuple[int, ...]) -> np.ndarray:
    """Elements of less than a byte, the first in the lowest bits."""
    bits = _BITS[kind.name]
    data = np.frombuffer(raw, np.uint8)
    parts = np.stack([data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).reshape(-1)[: math.prod(dims)]
    if kind.name.startswith("int"):
        parts = (parts ^ 1 << bits - 1).astype(np.int8) - (1 << bits - 1)
        return parts.astype(kind).reshape(dims)
    return (parts.view(kind) if kind.name.startswith("float") else parts.astype(kind)).reshape(dims)


def text_array(items: Sequence[str], dims: Sequence[int]) -> np.ndarray:
    """An array of text."""
    made = np.empty(len(items), TEXT)
    made[:] = items
    return made.reshape(tuple(dims))


def text_of(name: str, array: np.ndarray) -> np.ndarray:
    """An input as text. InputDTypeError: it is none."""
    found = [x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in array.reshape(-1).tolist()]
    if not all(isinstance(x, str) for x in found):
        raise InputDTypeError(f"input {name!r} is text, an array of str, got an array of {array.dtype}")
    return text_array(found, array.shape)


def stored(kind: np.dtype) -> np.dtype:
    """The numpy dtype in which rlx keeps elements of a dtype: itself, or a wider one of the same values."""
    return np.dtype(_WIDER.get(kind.name, kind))


def numpy_type(code: int, label: str) -> np.dtype:
    """The numpy dtype of an element type of ONNX. Unsupported: rlx has none."""
    try:
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
        if kind != TEXT:
            as_dtype(stored(kind))
    except (KeyError, DTypeError):
        named = onnx.TensorProto.DataType.Name(code) if code in onnx.TensorProto.DataType.values() else str(code)
        raise Unsupported(f"{label} has elements of type {named}, which rlx does not have") from None
    return kind


def dims_of(name: str, kind: onnx.TypeProto, sizes: Mapping[str, int]) -> list[int | str]:
    """The declared dims of an input, with the sizes of those that have one; the others by name, as identifiers."""
    dims: list[int | str] = []
    for axis, d in enumerate(kind.tensor_type.shape.dim):
        own = identifier(d.dim_param or f"{name}_{axis}")
        dims.append(d.dim_value if d.HasField("dim_value") else sizes.get(own, sizes.get(d.dim_param, own)))
    return dims


def identifier(name: str) -> str:
    """The name of a dim in a graph: `batch size` is batch_size."""
    made = re.sub(r"\W", "_", name)
    return made if re.match(r"[A-Za-z_]", made) else f"_{made}"


def check_dims(source: Source, dims: Mapping[str, int]) -> None:
    """OptionError, or UnknownNameError: these are no sizes of named dims of the model."""
    if not isinstance(dims, Mapping) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in dims.values()):
        raise OptionError(f"{source.name}: dims are {{name: size}}, got {dims!r:.80}")
    found = [d for i in source.inputs for d in dims_of(i.name, i.type, {}) if isinstance(d, str)]
    declared = {d.dim_param for i in source.inputs for d in i.type.tensor_type.shape.dim}
    if extra := dims.keys() - {*found, *declared}:
        raise UnknownNameError(f"{source.name}: no input has a dim called {known(extra)}; there are {known(found)}")


def as_dtype_or_none(code: int) -> DType | None:
    """The dtype of an element type, None if rlx stores it in a wider one."""
    kind = onnx.helper.tensor_dtype_to_np_dtype(code)
    return as_dtype(kind) if stored(kind) == kind else None


__all__ = [
    "TEXT", "Source", "as_dtype_or_none", "check_dims", "dims_of", "identifier", "numpy_type", "stored", "text_array", "text_of",
]  # fmt: skip

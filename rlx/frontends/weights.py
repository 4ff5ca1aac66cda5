"""Weights of a model folder: safetensors files, mapped into memory, every size and offset checked before use.

In: a folder with model.safetensors, or with model.safetensors.index.json and its shards. Out: name -> read-only array.
The header is untrusted: it is checked against the file's real size before it is used to allocate or address anything.
Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, ModelError, known
from rlx.ir.dtype import DTYPES, DType
from rlx.runtime import map_file

MAX_HEADER_BYTES = 100_000_000  # the limit that the format's own reader sets
_LENGTH_BYTES = 8

_NAMES = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split()
_DTYPES = {name: DTYPES[name.lower().replace("_", "")] for name in _NAMES}


def read_weights(folder: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder by name, as read-only arrays over mapped files (nothing is read until it is used).

    Raises ModelError if the folder has no safetensors weights, CorruptFileError if a file contradicts itself.
    """
    folder = Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return read_file(single)
    if index.is_file():
        return _read_shards(index)
    found = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".h5", ".onnx", ".safetensors"))
    raise ModelError(
        f"{folder} has no model.safetensors (nor model.safetensors.index.json); found: {known(found)}. "
        "rlx reads safetensors only: save the model with save_pretrained(…, safe_serialization=True)"
    )


def weight_files(path: Path) -> list[Path]:
    """The files that a model's weights are read from: `path` itself, or those in that folder."""
    index = path / "model.safetensors.index.json"
    if path.is_file() or (path / "model.safetensors").is_file() or not index.is_file():
        return [path if path.is_file() else path / "model.safetensors"]
    return [index, *(path / name for name in sorted(set(read_json(index).get("weight_map", {}).values())))]


def reference(path: Path, files: Iterable[Path]) -> dict[str, Any]:
    """A description of the files of a model, for an artifact file without weights: where they are, and their checksums."""
    return {"path": str(path.resolve()), "files": {file.name: _sha256(file) for file in files}}


def referenced(about: Mapping[str, Any], path: Any, source: str) -> Path:
    """The model that `about` (as from `reference`) describes, at `path`, or where it was. `source`: the artifact file.

    ModelError: a file is missing, or is not the one that was there when the artifact file was saved."""
    found = Path(about["path"] if path is None else path)
    folder = found if found.is_dir() else found.parent
    for name, digest in about["files"].items():
        if Path(str(name)).name != name:
            raise CorruptFileError(f"{source}: the weight file {name!r} must be a plain file name")
        if not (folder / name).is_file():
            raise ModelError(f"{source} has no weights, and reads them from {folder / name}, which is missing: give model=…")
        if _sha256(folder / name) != digest:
            raise ModelError(f"{folder / name} is not the file that {source} was saved with: its checksum differs; save it again")
    return found


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    """The tensors listed in the index, each from the shard given there."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise CorruptFileError(f"{index}: 'weight_map' must map tensor names to file names")
    shards: dict[str, dict[str, np.ndarray]] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            raise CorruptFileError(f"{index}: the shard {file!r} must be a plain file name in the same folder")
        if not (index.parent / file).is_file():
            raise ModelError(f"{index} names the shard {file!r}, which is not in {index.parent}")
        shards[file] = read_file(index.parent / file)
    for name, file in where.items():
        if name not in shards[file]:
            raise CorruptFileError(f"{index} places the tensor {name!r} in {file!r}, which does not hold it")
    return {name: shards[file][name] for name, file in where.items()}


def read_file(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file, mapped read-only. CorruptFileError states the contradiction."""
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(_LENGTH_BYTES)
        header_bytes = int.from_bytes(head, "little")
        if len(head) < _LENGTH_BYTES or header_bytes > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
            raise CorruptFileError(
                f"{path}: the header claims {header_bytes} bytes, the file has {max(size - _LENGTH_BYTES, 0)} after the "
                "length field; it is truncated or not a safetensors file"
            )
        header = _parse(f.read(header_bytes), f"{path}: the header", dict, _no_duplicates)
    start = _LENGTH_BYTES + header_bytes
    spans = [(name, *_span(path, name, entry)) for name, entry in header.items() if name != "__metadata__"]
    _check_cover(path, spans, size - start)
    mapped = map_file(path)
    return {name: np.ndarray(shape, dtype.numpy, buffer=mapped, offset=start + begin) for name, dtype, shape, begin, _ in spans}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name appears twice")
    return dict(pairs)


def _parse(text: bytes, label: str, kind: type, hook: Callable[..., Any] | None = None) -> Any:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=hook)
        if b"\\ud" in text.lower():  # perhaps half of a character, which no text can hold
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise CorruptFileError(f"{label} is not valid JSON ({e})") from None
    if not isinstance(parsed, kind):
        raise CorruptFileError(f"{label} must be a JSON {'object' if kind is dict else 'list'}, got {type(parsed).__name__}")
    return parsed


def _span(path: Path, name: str, entry: Any) -> tuple[DType, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one tensor; begin and end in bytes from the start of the data."""
    fault = f"{path}: tensor {name!r}: "
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError(fault + "needs exactly dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise CorruptFileError(fault + f"the dtype {entry['dtype']!r} is unknown; known: {known(_DTYPES)}")
    dtype = _DTYPES[entry["dtype"]]
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > 32 or math.prod(d or 1 for d in shape) * dtype.itemsize >= 2**62:
        raise CorruptFileError(fault + f"the shape {str(shape)[:80]} is not a list of at most 32 sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CorruptFileError(fault + f"data_offsets must be two sizes, got {str(offsets)[:80]}")
    (begin, end), needs = offsets, math.prod(shape) * dtype.itemsize
    if end - begin != needs:
        raise CorruptFileError(fault + f"{entry['dtype']}{shape} takes {needs} bytes, data_offsets give {end - begin}")
    return dtype, tuple(shape), begin, end


def _naturals(x: Any) -> bool:
    return isinstance(x, list) and all(type(v) is int and v >= 0 for v in x)


def _check_cover(path: Path, spans: list[tuple[str, DType, tuple[int, ...], int, int]], data_bytes: int) -> None:
    """The tensors must tile the data: no gap, no overlap, nothing outside."""
    at = 0
    for name, _, _, begin, end in sorted(spans, key=lambda s: s[3:]):
        if begin != at:
            raise CorruptFileError(f"{path}: tensor {name!r} begins at byte {begin} of the data, byte {at} was expected")
        at = end
    if at != data_bytes:
        raise CorruptFileError(f"{path}: the tensors take {at} bytes, the file holds {data_bytes} bytes of data")


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON object (or list) from a file of a model folder; ModelError if it is missing, CorruptFileError if it is not
    valid."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}; a model folder needs it")
    return _parse(path.read_bytes(), str(path), kind)

"""The bytes of large initialisers, found in a file before it is parsed: they are mapped, not copied, and the rest is small.

An ONNX file is a protobuf message: fields, each a tag (number and wire type) and a value. Field 7 of the model is the graph,
field 5 of the graph is an initialiser, and field 9 of that its raw bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.errors import CorruptFileError

LARGE = 1024  # bytes of an initialiser that stays outside of the parsed model
_GRAPH, _INITIALISER, _NAME, _RAW = 7, 5, 8, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def split(data: memoryview, label: str) -> tuple[bytes, dict[str, memoryview]]:
    """The model without the raw bytes of its large initialisers, and these by name. CorruptFileError: fields do not fit."""
    raw: dict[str, memoryview] = {}
    parts = []
    for number, start, begin, end in _fields(data, 0, len(data), label):
        if number == _GRAPH:
            inner = _graph(data, begin, end, label, raw)
            parts += [_tag(_GRAPH), _varint(sum(map(len, inner))), *inner]
        else:
            parts.append(data[start:end])
    return b"".join(parts), raw


def _graph(data: memoryview, begin: int, end: int, label: str, raw: dict[str, memoryview]) -> list[bytes | memoryview]:
    """The graph without these bytes, in parts."""
    parts: list[bytes | memoryview] = []
    kept = begin
    for number, start, inner, stop in _fields(data, begin, end, label):
        if number != _INITIALISER or stop - inner < LARGE:
            continue
        fields = list(_fields(data, inner, stop, label))
        found = [(a, b) for n, _, a, b in fields if n == _RAW]
        names = [bytes(data[a:b]).decode("utf-8", "replace") for n, _, a, b in fields if n == _NAME]
        if found and names and names[-1] not in raw:
            raw[names[-1]] = data[found[-1][0] : found[-1][1]]
            rest = b"".join(data[s:b] for n, s, _, b in fields if n != _RAW)
            parts += [data[kept:start], _tag(_INITIALISER), _varint(len(rest)), rest]
            kept = stop
    return [*parts, data[kept:end]]


def _fields(data: memoryview, at: int, end: int, label: str) -> Iterator[tuple[int, int, int, int]]:
    """(number, start of the tag, begin and end of the value) of each field of a message."""
    while at < end:
        start = at
        tag, at = _read(data, at, end, label)
        kind, size = tag & 7, 0
        if kind == _VARINT:
            begin, (_, at) = at, _read(data, at, end, label)
            yield tag >> 3, start, begin, at
            continue
        if kind == _BYTES:
            size, at = _read(data, at, end, label)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise CorruptFileError(f"{label}: no ONNX file, or damaged: byte {start} is no field of one")
        if size > end - at:
            raise CorruptFileError(f"{label}: truncated or damaged: the field at byte {start} has {size} bytes, not {end - at}")
        yield tag >> 3, start, at, at + size
        at += size


def _read(data: memoryview, at: int, end: int, label: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at + shift // 7 >= end:
            break
        byte = data[at + shift // 7]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + shift // 7 + 1
    raise CorruptFileError(f"{label}: truncated or damaged: no number ends at byte {at}")


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _BYTES])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])

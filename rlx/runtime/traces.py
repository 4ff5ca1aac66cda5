"""Traces: the experts that each forward of a model chose, in a file (docs/experts.md has the format).

A reader does not trust the file: the header and each record have checksums, and a record's size follows from its header and is
compared with the size of the file before anything is allocated.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from rlx.errors import CorruptFileError, FormatError, InputShapeError, ModelError, OptionError, RlxError, as_path, writing
from rlx.ir.shown import Shown, counted
from rlx.records import record

MAGIC, FORMAT = b"\x93rlxmoe\n", 1
HEADER = struct.Struct("<8sIII")  # magic, format, bytes of the JSON text that follows, its crc32
RECORD = struct.Struct("<IIIffQ")  # crc32 of the rest and the choices, tokens, rows of guesses, then the numbers of Forward
MAX_HEADER, MAX_LAYERS, MAX_EXPERTS = 1 << 20, 4096, 1 << 18  # bytes; experts of all layers together


@record
class MoELayer:
    """A layer with experts. `top_k`: experts that a token uses. `nbytes`: of one expert in memory, all its weights."""

    name: str
    experts: int
    top_k: int
    nbytes: int


class Forward(NamedTuple):
    """The choices of one forward. `chosen`: i32 [tokens, top_k] per layer. `ahead`: the same for each layer but the first, as
    guessed from the router input of the layer before; None: no guesses. `seconds`: the time of the forward, `slow_seconds` of it
    for `slow_bytes` of experts that were read from the slow tier; 0: not measured."""

    chosen: Sequence[np.ndarray]
    ahead: Sequence[np.ndarray] | None = None
    seconds: float = 0.0
    slow_seconds: float = 0.0
    slow_bytes: int = 0


class Row:
    """The layout of a record's choices: tokens after tokens, layer after layer, in one dtype."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self.layers = tuple(layers)
        self.dtype = np.dtype("u1" if all(x.experts <= 256 for x in layers) else "<u2")
        self.ends = np.cumsum([x.top_k for x in layers]).tolist()
        self.nbytes = sum(x.top_k for x in layers) * self.dtype.itemsize  # of one token

    def joined(self, what: str, arrays: Sequence[np.ndarray]) -> bytes:
        """InputShapeError: not an array [tokens, top_k] of experts for each layer."""
        found = [np.asarray(a) for a in arrays]
        fine = len(found) == len(self.layers) and all(a.ndim == 2 and len(a) == len(found[0]) > 0 for a in found)
        if not fine or any(a.shape[1] != x.top_k for a, x in zip(found, self.layers)):
            want = ", ".join(f"[tokens, {x.top_k}]" for x in self.layers[:4]) + (", …" if len(self.layers) > 4 else "")
            raise InputShapeError(f"{what} of {counted(len(self.layers), 'layer')} are {want}, got {[a.shape for a in found]}")
        for a, x in zip(found, self.layers):
            if a.dtype.kind not in "iu" or a.min() < 0 or a.max() >= x.experts:
                numbers = f"{a.dtype}, {a.min()} to {a.max()}"
                raise InputShapeError(f"{what} of {x.name!r} are integers from 0 to {x.experts - 1}, got {numbers}")
        return np.concatenate(found, axis=1).astype(self.dtype).tobytes()

    def split(self, raw: bytes, where: str) -> list[np.ndarray]:
        """CorruptFileError: an expert that a layer does not have."""
        rows = np.frombuffer(raw, self.dtype).reshape(-1, self.ends[-1]).astype(np.int32)
        parts = np.split(rows, self.ends[:-1], axis=1)
        for part, x in zip(parts, self.layers):
            if part.max() >= x.experts:
                raise CorruptFileError(f"{where}: expert {part.max()} of {x.name!r}, which has {x.experts}")
        return parts


class TraceFile(Shown):
    """A trace that is read: iterate over its forwards. Raises ModelError: no trace; FormatError, CorruptFileError: also while it
    is iterated over."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(as_path(path, "the path of a trace"))
        try:
            with self.path.open("rb") as f:
                self.nbytes = os.fstat(f.fileno()).st_size
                self.model, self.layers = self._header(f)
                self.start = f.tell()
        except OSError as e:
            raise ModelError(f"{path} cannot be opened: {e.strerror}") from e
        self._chosen, self._ahead = Row(self.layers), Row(self.layers[1:])

    def _line(self) -> str:
        return f"{str(self.path)!r}: {counted(len(self.layers), 'layer')} of {self.model!r}"

    def __iter__(self) -> Iterator[Forward]:
        row, guessed = self._chosen.nbytes, self._ahead.nbytes
        with self.path.open("rb") as f:
            f.seek(at := self.start)
            left, number = self.nbytes - at, 0
            while left:
                where = f"{self.path}: record {number}, at byte {at}"
                head = f.read(min(RECORD.size, left))
                if len(head) < RECORD.size:
                    raise CorruptFileError(f"{where}: {len(head)} bytes are less than its header: the file is truncated")
                crc, tokens, guesses, *numbers = RECORD.unpack(head)
                size = tokens * row + guesses * guessed
                if not tokens or guesses not in (0, tokens * bool(guessed)) or RECORD.size + size > left:
                    raise CorruptFileError(f"{where}: {tokens} tokens of {row} bytes, {left} are left: truncated or damaged")
                raw = f.read(size)
                if len(raw) < size or zlib.crc32(raw, zlib.crc32(head[4:])) != crc:
                    raise CorruptFileError(f"{where}: its checksum is wrong: the file is damaged")
                if not all(0 <= x < float("inf") for x in numbers):
                    raise CorruptFileError(f"{where}: {numbers} are no times and bytes")
                chosen = self._chosen.split(raw[: tokens * row], where)
                yield Forward(chosen, self._ahead.split(raw[tokens * row :], where) if guesses else None, *numbers)
                left, at, number = left - RECORD.size - size, at + RECORD.size + size, number + 1

    def _header(self, f: Any) -> tuple[str, tuple[MoELayer, ...]]:
        head = f.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise ModelError(f"{self.path} is not a trace of experts: it does not begin with its mark")
        if len(head) < HEADER.size:
            raise CorruptFileError(f"{self.path}: {len(head)} bytes are less than a header: the file is truncated")
        _, format_, size, crc = HEADER.unpack(head)
        if format_ != FORMAT:
            raise FormatError(f"{self.path} has format {format_}, this version reads {FORMAT}: record it again")
        if size > min(MAX_HEADER, self.nbytes - HEADER.size):
            raise CorruptFileError(f"{self.path}: a header of {size} bytes, the file has {self.nbytes}: truncated or damaged")
        if zlib.crc32(text := f.read(size)) != crc:
            raise CorruptFileError(f"{self.path}: the checksum of the header is wrong: the file is damaged")
        try:
            facts = json.loads(text)
            layers = tuple(MoELayer(**x) for x in facts["layers"])
            if not isinstance(facts["model"], str) or not 0 < len(layers) <= MAX_LAYERS:
                raise ValueError(f"{len(layers)} layers")
            for x in layers:
                numbers = all(type(n) is int for n in (x.experts, x.top_k, x.nbytes)) and isinstance(x.name, str)
                if not numbers or not 0 < x.top_k <= x.experts <= 1 << 16 or not 0 <= x.nbytes < 1 << 50:
                    raise ValueError(f"a layer {str(x)[:100]}")
            if sum(x.experts for x in layers) > MAX_EXPERTS:
                raise ValueError(f"{sum(x.experts for x in layers)} experts, at most {MAX_EXPERTS} are read")
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise CorruptFileError(f"{self.path}: the header is wrong: {e}") from None
        return facts["model"], layers


class TraceWriter:
    """Writes a trace, a context manager. `append`: continues a file of the same model and layers, if there is one.

    OptionError: it cannot be written there, or the file is of another model. ModelErrors: it is damaged, or no trace."""

    def __init__(self, path: str | os.PathLike[str], model: str, layers: Sequence[MoELayer], append: bool = False) -> None:
        self.path, self._chosen, self._ahead = Path(as_path(path, "the path of a trace")), Row(layers), Row(layers[1:])
        text = json.dumps({"model": model, "layers": [asdict(x) for x in layers]}).encode()
        self._file: Any = None
        goes_on = append and self.path.exists()
        if goes_on:
            found = TraceFile(path)
            if found.layers != self._chosen.layers or found.model != model:
                raise OptionError(f"{path} is a trace of {found.model!r}: it cannot be continued with {model!r}")
            for _ in found:  # each record is whole, so that further records can be read
                pass
        with writing(path):
            self._file = self.path.open("ab" if goes_on else "wb", buffering=0)  # so that an interrupt loses nothing
        finalize(self, self._file.close)
        if not goes_on:
            self._write(HEADER.pack(MAGIC, FORMAT, len(text), zlib.crc32(text)) + text)

    def add(self, forward: Forward) -> None:
        """Append one forward. InputShapeError: its choices are not of these layers; OptionError: the disk is full. Then
        nothing is written."""
        if self._file.closed:
            raise RlxError(f"{self.path} is closed")
        raw = self._chosen.joined("choices", forward.chosen)
        tokens, ahead = len(forward.chosen[0]), b""
        if forward.ahead:
            ahead = self._ahead.joined("guesses", forward.ahead)
            if len(forward.ahead[0]) != tokens:
                raise InputShapeError(f"guesses are of {tokens} tokens, as the choices, got {len(forward.ahead[0])}")
        rest = RECORD.pack(0, tokens, tokens * bool(ahead), forward.seconds, forward.slow_seconds, forward.slow_bytes)[4:]
        crc = zlib.crc32(raw + ahead, zlib.crc32(rest))
        self._write(struct.pack("<I", crc) + rest + raw + ahead)

    def _write(self, raw: bytes) -> None:
        """All of it or nothing, so that the file can still be read, and continued."""
        begun = self._file.tell()
        try:
            while raw:
                raw = raw[self._file.write(raw) :]
        except OSError as e:
            with suppress(OSError):  # not a file
                self._file.truncate(begun)
                self._file.seek(begun)
            raise OptionError(f"cannot write {str(self.path)!r}: {e.strerror}") from e

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["Forward", "MoELayer", "TraceFile", "TraceWriter"]

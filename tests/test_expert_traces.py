"""Trace files: what is written is read, a file can be continued, and no damaged file is read as something else."""

from __future__ import annotations

import errno
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from expert_choices import guessed, layers, skewed

from rlx.errors import CorruptFileError, FormatError, InputShapeError, ModelError, OptionError, RlxError
from rlx.runtime.traces import HEADER, MAGIC, Forward, MoELayer, TraceFile, TraceWriter

LAYERS = [MoELayer("a", 8, 2, 100), MoELayer("b", 300, 3, 200), MoELayer("c", 8, 1, 50)]


def some(seed: int = 0, of: list[MoELayer] = LAYERS, forwards: int = 6) -> list[Forward]:
    rng = np.random.default_rng(seed)
    found = []
    for at in range(forwards):
        tokens = int(rng.integers(1, 5))
        forward = Forward([rng.integers(0, x.experts, (tokens, x.top_k), np.int32) for x in of], None, 0.5 * at, 0.25, 7 * at)
        found.append(guessed(forward, rng) if at % 2 else forward)
    return found


def written(path: Path, forwards: list[Forward], of: list[MoELayer] = LAYERS, **how: bool) -> Path:
    with TraceWriter(path, "some model", of, **how) as writer:
        for forward in forwards:
            writer.add(forward)
    return path


def same(a: Forward, b: Forward) -> bool:
    guesses = (a.ahead is None) == (b.ahead is None) and all(map(np.array_equal, a.ahead or [], b.ahead or []))
    return guesses and all(map(np.array_equal, a.chosen, b.chosen)) and a[2:] == b[2:]


@pytest.mark.parametrize("of", [LAYERS, LAYERS[:1], layers(3, 256, 8)])
def test_a_trace_is_read_as_it_was_written(tmp_path, of):
    forwards = [f._replace(ahead=f.ahead or None) for f in some(1, of)]
    file = TraceFile(written(tmp_path / "t", forwards, of))
    assert (file.model, file.layers) == ("some model", tuple(of))
    read = list(file)
    assert len(read) == len(forwards) and all(map(same, read, forwards))
    assert all(a.dtype == np.int32 for f in read for a in f.chosen)


def test_an_expert_takes_one_byte_where_one_is_enough(tmp_path):
    of = layers(48, 128, 8)
    small = written(tmp_path / "s", [], of).stat().st_size
    assert written(tmp_path / "t", list(skewed(0, of, 10)), of).stat().st_size - small == 10 * (48 * 8 + 28)


def test_a_trace_can_be_continued(tmp_path):
    forwards = some()
    path = written(tmp_path / "t", forwards[:2])
    written(path, forwards[2:], append=True)
    assert all(map(same, TraceFile(path), forwards)) and len(list(TraceFile(path))) == len(forwards)
    with pytest.raises(OptionError, match="'some model'.*cannot be continued with 'other'"):
        TraceWriter(path, "other", LAYERS, append=True)
    with pytest.raises(OptionError, match="cannot be continued"):
        TraceWriter(path, "some model", LAYERS[:2], append=True)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="record 5"):
        TraceWriter(path, "some model", LAYERS, append=True)
    written(path, forwards[:1])  # without `append`: a new file
    assert len(list(TraceFile(path))) == 1


def test_wrong_choices_are_refused_and_nothing_is_written(tmp_path):
    (good,) = some(0, forwards=1)
    path = tmp_path / "t"
    with TraceWriter(path, "m", LAYERS) as writer:
        for wrong in (
            good._replace(chosen=good.chosen[:2]),
            good._replace(chosen=[c[:, :1] for c in good.chosen]),
            good._replace(chosen=[good.chosen[0] + 8, *good.chosen[1:]]),
            good._replace(chosen=[good.chosen[0] - 9, *good.chosen[1:]]),
            good._replace(chosen=[c.astype(np.float32) for c in good.chosen]),
            good._replace(chosen=[c[:0] for c in good.chosen]),
            good._replace(ahead=good.chosen),
            good._replace(ahead=[np.repeat(c, 2, axis=0) for c in good.chosen[1:]]),
        ):
            with pytest.raises(InputShapeError):
                writer.add(wrong)
        writer.add(good)
    (read,) = TraceFile(path)
    assert same(read, good)
    with pytest.raises(RlxError, match="is closed"):
        writer.add(good)
    with pytest.raises(OptionError, match="cannot write"):
        TraceWriter(tmp_path / "none" / "t", "m", LAYERS)


class FullDisk(io.FileIO):
    """Writes a few bytes at a time, `room` of them."""

    room = 150

    def write(self, raw) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= (count := super().write(raw[: min(20, self.room)]))
        return count


def test_a_disk_that_fills_leaves_a_trace_that_can_be_read_and_continued(tmp_path):
    forwards = [f._replace(ahead=None) for f in some(0, forwards=6)]
    path = written(tmp_path / "t", forwards[:1])
    writer = TraceWriter(path, "some model", LAYERS, append=True)
    writer.close()
    writer._file = FullDisk(path, "ab")
    with pytest.raises(OptionError, match="cannot write .*No space left"):
        for forward in forwards[1:]:
            writer.add(forward)
    kept = len(list(TraceFile(path)))
    assert 1 < kept < len(forwards)
    writer._file.room = 10_000
    for forward in forwards[kept:]:
        writer.add(forward)
    writer.close()
    assert len(list(TraceFile(path))) == len(forwards) and all(map(same, TraceFile(path), forwards))


def test_files_that_are_no_traces(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(ModelError, match="cannot be opened"):
        TraceFile(path)
    path.write_bytes(b"GGUF and more than that")
    with pytest.raises(ModelError, match="is not a trace of experts"):
        TraceFile(path)
    with pytest.raises(ModelError, match="cannot be opened"):
        TraceFile(tmp_path)
    path.write_bytes(MAGIC)
    with pytest.raises(CorruptFileError, match="less than a header"):
        TraceFile(path)
    path.write_bytes(HEADER.pack(MAGIC, 9, 0, 0))
    with pytest.raises(FormatError, match="format 9"):
        TraceFile(path)


LAYER = {"name": "a", "experts": 8, "top_k": 2, "nbytes": 1}


@pytest.mark.parametrize(
    "facts",
    [
        [], {}, {"model": "m"}, {"model": 1, "layers": [LAYER]}, {"model": "m", "layers": []}, {"model": "m", "layers": [1]},
        {"model": "m", "layers": [LAYER] * 5000}, {"model": "m", "layers": [LAYER | {"more": 1}]},
        {"model": "m", "layers": [{"name": "a"}]}, {"model": "m", "layers": [LAYER | {"top_k": 9}]},
        {"model": "m", "layers": [LAYER | {"top_k": 0}]}, {"model": "m", "layers": [LAYER | {"experts": 1 << 40}]},
        {"model": "m", "layers": [LAYER | {"experts": 8.0}]}, {"model": "m", "layers": [LAYER | {"nbytes": -1}]},
        {"model": "m", "layers": [LAYER | {"nbytes": True}]}, {"model": "m", "layers": [LAYER | {"experts": 1 << 16}] * 9},
    ],
)  # fmt: skip
def test_headers_that_say_nonsense_are_refused(tmp_path, facts):
    text = json.dumps(facts).encode()
    path = tmp_path / "t"
    path.write_bytes(HEADER.pack(MAGIC, 1, len(text), zlib.crc32(text)) + text)
    with pytest.raises(CorruptFileError, match="the header is wrong"):
        TraceFile(path)


def test_a_record_with_a_right_checksum_is_checked_too(tmp_path):
    path = written(tmp_path / "t", [], LAYERS[:1])
    empty = path.read_bytes()

    def with_record(tokens: int, guesses: int, seconds: float, raw: bytes) -> None:
        rest = struct.pack("<IIffQ", tokens, guesses, seconds, 0, 0)
        path.write_bytes(empty + struct.pack("<I", zlib.crc32(raw, zlib.crc32(rest))) + rest + raw)

    with_record(1, 0, 1.0, b"\1\7")
    assert [f.chosen[0].tolist() for f in TraceFile(path)] == [[[1, 7]]]
    for wrong, why in [
        ((1, 0, 1.0, b"\1\10"), "expert 8 of 'a', which has 8"),
        ((0, 0, 1.0, b""), "truncated or damaged"),
        ((1 << 31, 0, 1.0, b"\1\1"), "truncated or damaged"),
        ((1, 1, 1.0, b"\1\1"), "truncated or damaged"),
        ((1, 0, float("nan"), b"\1\1"), "no times"),
        ((1, 0, -1.0, b"\1\1"), "no times"),
    ]:
        with_record(*wrong)
        with pytest.raises(CorruptFileError, match=why):
            list(TraceFile(path))


def test_damage_anywhere_is_found(tmp_path):
    whole = written(tmp_path / "t", some()).read_bytes()
    rng, path, found = np.random.default_rng(0), tmp_path / "u", 0
    for at in range(len(whole)):  # one bit of each byte
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << int(rng.integers(8)))]) + whole[at + 1 :])
        with pytest.raises(ModelError):
            list(TraceFile(path))
    for cut in range(len(whole)):  # the end is missing, but at the end of a record
        path.write_bytes(whole[:cut])
        try:
            found += len(list(TraceFile(path))) < 6
        except ModelError:
            found += 1
    assert found == len(whole)

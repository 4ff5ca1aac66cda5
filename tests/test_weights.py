"""safetensors files: what is read equals what the format's own package wrote; damaged files give clear errors."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.errors import CorruptFileError, ModelError
from rlx.frontends.weights import read_file, read_weights


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(-9, 9, (2, 2, 2)),
        "half": rng.standard_normal(7).astype(np.float16),
        "flag": np.array([True, False, True]),
        "scalar": np.array(2.5),
        "nothing": np.zeros((0, 4), np.float32),
    }


@pytest.fixture
def path(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})
    return tmp_path / "model.safetensors"


def test_agrees_with_the_formats_own_reader(path, tensors):
    ours, theirs = read_weights(path.parent), load_file(path)
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and ours[name].shape == array.shape
        np.testing.assert_array_equal(ours[name], array)
        assert not ours[name].flags.writeable


def test_bfloat16(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    values = torch.randn(4, 6, dtype=torch.bfloat16)
    save_torch({"w": values}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(read_weights(tmp_path)["w"].astype(np.float32), values.float().numpy())


def test_shards(tmp_path):
    first, second = {"a": np.arange(4.0)}, {"b": np.ones((2, 3), np.float32)}
    save_file(first, tmp_path / "m-1.safetensors")
    save_file(second, tmp_path / "m-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    found = read_weights(tmp_path)
    assert list(found) == ["a", "b"] and found["b"].shape == (2, 3)
    index.write_text(json.dumps({"weight_map": {"a": "m-2.safetensors"}}))
    with pytest.raises(CorruptFileError, match=r"'a' in 'm-2\.safetensors', which does not hold it"):
        read_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "m-3.safetensors"}}))
    with pytest.raises(ModelError, match=r"m-3\.safetensors"):
        read_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../m-1.safetensors"}}))
    with pytest.raises(CorruptFileError, match="plain file name"):
        read_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(CorruptFileError, match="weight_map"):
        read_weights(tmp_path)


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no model\.safetensors .*found: 'pytorch_model\.bin'.*save_pretrained"):
        read_weights(tmp_path)


def _file(tmp_path, header: bytes, data: bytes = b"", claimed: int | None = None):
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(header) if claimed is None else claimed).to_bytes(8, "little") + header + data)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_HEADERS = [
    (b"[]", "JSON object"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"a": {}, "a": {}}', "appears twice"),
    ({"w": 3}, "exactly dtype, shape and data_offsets"),
    ({"w": {**ONE, "more": 1}}, "exactly dtype, shape and data_offsets"),
    ({"w": {**ONE, "dtype": "F31"}}, "dtype 'F31' is unknown"),
    ({"w": {**ONE, "dtype": ["F32"]}}, "is unknown"),
    ({"w": {**ONE, "shape": [-2]}}, "not a list"),
    ({"w": {**ONE, "shape": [2.0]}}, "not a list"),
    ({"w": {**ONE, "shape": [True]}}, "not a list"),
    ({"w": {**ONE, "shape": [1] * 40 + [2]}}, "at most 32"),
    ({"w": {**ONE, "shape": [2**62]}}, "not a list"),
    ({"w": {**ONE, "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, "not a list"),
    ({"w": {**ONE, "data_offsets": [0]}}, "two sizes"),
    ({"w": {**ONE, "data_offsets": [8, 0]}}, "data_offsets give -8"),
    ({"w": {**ONE, "data_offsets": [0, 4]}}, "takes 8 bytes, data_offsets give 4"),
    ({"w": {**ONE, "data_offsets": [4, 12]}}, "begins at byte 4"),
    ({"w": {**ONE, "shape": [4], "data_offsets": [0, 16]}}, "take 16 bytes, the file holds 8"),
    ({"v": ONE, "w": ONE}, "begins at byte 0 of the data, byte 8"),
    ({}, "take 0 bytes, the file holds 8"),
]


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_bad_headers(tmp_path, header, message):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CorruptFileError, match=message):
        read_file(_file(tmp_path, raw, bytes(8)))


@pytest.mark.parametrize("claimed", [3, 10**6, 2**63, 2**64 - 1])
def test_header_length_is_checked_before_use(tmp_path, claimed):
    with pytest.raises(CorruptFileError):
        read_file(_file(tmp_path, json.dumps({"w": ONE}).encode(), bytes(8), claimed))


def test_truncated_anywhere(path):
    whole = path.read_bytes()
    for cut in (0, 1, 7, 8, 9, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFileError):
            read_file(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptFileError, match="bytes of data"):
        read_file(path)


def test_a_thousand_mutations(path, tensors):
    """Any damage to the header is an error or leaves tensors that lie inside the file; nothing else may happen."""
    whole = path.read_bytes()
    header_bytes = int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        mutated = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(8 + header_bytes)
            action = rng.randrange(4)
            if action == 0:
                mutated[at] ^= 1 << rng.randrange(8)
            elif action == 1:
                mutated[at] = rng.choice(b'0123456789{}[]",:-e.\\')
            elif action == 2:
                del mutated[at : at + rng.randrange(1, 30)]
            else:
                mutated[at:at] = bytes(mutated[at : at + rng.randrange(1, 30)])
        path.write_bytes(mutated)
        try:
            found = read_file(path)
        except CorruptFileError as e:
            refused += 1
            assert path.name in str(e)
        else:
            assert sum(a.nbytes for a in found.values()) <= len(whole)
            assert all(a.tobytes() is not None for a in found.values())
    assert refused > 800

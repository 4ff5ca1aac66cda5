"""Packed weights: every format against the gguf package's own decoding, to the bit; our encodings; the ops' errors."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from devices import TWO
from op_cases import cases

import rlx
from rlx.errors import AttributeValueError, DTypeError, IndexRangeError, NumericsError, ShapeError
from rlx.ir.blocks import FORMATS
from rlx.ir.ops.quant import dequant_matmul, dequantize

GGUF = [name for name in FORMATS if name.startswith("q")]
OURS = [name for name, form in FORMATS.items() if form.quantise]


def outside(name: str, packed: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name.upper()])


@pytest.mark.parametrize("name", GGUF)
def test_every_format_decodes_as_its_own_implementation(name):
    """Random bytes: scales of every kind, infinities and NaN too."""
    form = FORMATS[name]
    packed = np.random.default_rng(1).integers(0, 256, (40, 3 * form.nbytes), np.uint8)
    found = form.decode_rows(packed)
    assert found.shape == (40, 3 * form.block) and found.dtype == np.float32
    np.testing.assert_array_equal(found, outside(name, packed))
    assert np.isfinite(found).any() and len(np.unique(found)) > 1000
    np.testing.assert_array_equal(form.decode(packed.reshape(5, 8, 3, -1)), found.reshape(5, 8, -1))


@pytest.mark.parametrize("name", GGUF)
def test_sizes_are_the_formats_own(name):
    form = FORMATS[name]
    assert (form.block, form.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert form.row_bytes(2 * form.block) == 2 * form.nbytes and form.row_bytes(form.block + 1) == 2 * form.nbytes
    for at in form.numbers:  # without the number the block means something else
        block = np.full((1, form.nbytes), 0x21, np.uint8)
        whole = form.decode_rows(block)
        block[:, at : at + 2] = 0
        assert not np.array_equal(form.decode_rows(block), whole)


@pytest.mark.parametrize("device", TWO)
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_to_the_bit(name, device):
    """Every value of a scale's high byte, in a column count that ends inside a block."""
    form = FORMATS[name]
    packed = np.random.default_rng(2).integers(0, 256, (256, 2 * form.nbytes), np.uint8)
    packed[:, form.numbers[0] + 1] = np.arange(256)
    columns = 2 * form.block - 15
    g = rlx.Graph("all")
    g.set_outputs([dequantize(g.input("w", packed.shape, "u8"), format=name, columns=columns)])
    (found,) = rlx.Session(device).compile(g).run({"w": packed})
    np.testing.assert_array_equal(found, form.decode_rows(packed, columns))


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_of_a_block_is_read_once(name):
    form = FORMATS[name]
    used = [bit for at in form.numbers for bit in range(8 * at, 8 * at + 16)]
    for part in (p for integers in (form.q, form.scales, form.mins) if integers for p in integers.parts):
        for digits in np.ndindex(*(count for count, _ in part.digits)):
            first = part.first + sum(digit * stride for digit, (_, stride) in zip(digits, part.digits))
            assert first // 8 == (first + part.bits - 1) // 8
            used += range(first, first + part.bits)
    assert sorted(used) == list(range(8 * form.nbytes))


# -- our own encodings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,bound", [("int8", 1 / 127), ("int4", 1 / 8)])
@pytest.mark.parametrize("columns", [64, 75])
def test_encoding_stays_close(name, bound, columns):
    form = FORMATS[name]
    weights = (np.random.default_rng(3).standard_normal((9, columns)) * np.logspace(-3, 3, 9)[:, None]).astype(np.float32)
    packed = form.encode(weights)
    assert packed.shape == (9, form.row_bytes(columns)) and packed.dtype == np.uint8
    error = np.abs(form.decode_rows(packed, columns) - weights)
    padded = np.pad(np.abs(weights), ((0, 0), (0, -columns % 32))).reshape(9, -1, 32)
    peak = np.repeat(padded.max(-1), 32, axis=1)[:, :columns]
    assert np.all(error <= 1.2 * bound * peak)
    assert np.mean((error / peak) ** 2) < (bound / 2) ** 2  # half a step at most, on the whole


@pytest.mark.parametrize("name,plain", [("int8", "q8_0"), ("int4", "q4_0")])
def test_encoding_is_no_worse_than_the_formats_own(name, plain):
    weights = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32)
    theirs = outside(plain, gguf.quants.quantize(weights, gguf.GGMLQuantizationType[plain.upper()]))
    ours = FORMATS[name].decode_rows(FORMATS[name].encode(weights))
    assert np.square(ours - weights).mean() <= np.square(theirs - weights).mean() * 1.001


@pytest.mark.parametrize("name", OURS)
def test_encoding_of_what_the_format_holds_exactly(name):
    form = FORMATS[name]
    held = np.tile(np.float32(0.25) * np.array([*range(-8, 8), *range(-8, 8)] if name == "int4" else range(-127, -95)), (2, 3, 1))
    np.testing.assert_array_equal(form.decode_rows(form.encode(held)), held)
    zeros = np.zeros((2, 40), np.float16)
    np.testing.assert_array_equal(form.decode_rows(form.encode(zeros), 40), zeros)
    assert form.encode(np.zeros((0, 64), np.float32)).shape == (0, form.row_bytes(64))


@pytest.mark.parametrize("name", OURS)
def test_large_matrices_are_encoded_in_pieces(name, monkeypatch):
    weights = np.random.default_rng(5).standard_normal((7, 2, 33)).astype(np.float32)
    whole = FORMATS[name].encode(weights)
    monkeypatch.setattr("rlx.ir.blocks._CHUNK", 70)
    np.testing.assert_array_equal(FORMATS[name].encode(weights), whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6])
def test_weights_without_a_scale_are_refused(bad):
    with pytest.raises(NumericsError, match="int8.*not finite"):
        FORMATS["int8"].encode(np.array([[1.0, bad]], np.float32))


# -- the ops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_product_with_weights_of_a_model(dtype):
    """Packed weights as a param; the result is in x's dtype."""
    weights = np.random.default_rng(6).standard_normal((48, 80)).astype(np.float32)
    packed = FORMATS["int8"].encode(weights)
    x = np.random.default_rng(7).standard_normal((2, 3, 80)).astype(rlx.ir.dtype.as_dtype(dtype).numpy)
    g = rlx.Graph("linear")
    g.set_outputs([dequant_matmul(g.input("x", x.shape, dtype), g.param("w", packed.shape, "u8"), format="int8")])
    compiled = rlx.Session("cpu").compile(g)
    compiled.set_param("w", packed)
    (found,) = compiled.run({"x": x})
    want = x.astype(np.float64) @ FORMATS["int8"].decode_rows(packed, 80).astype(np.float64).T
    assert found.dtype == x.dtype and found.shape == (2, 3, 48)
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=1e-2 if dtype == "bf16" else 2e-3, atol=1e-2)


def test_samples_reach_every_format():
    for op in ("dequantize", "dequant_matmul"):
        assert {c.sample.attrs["format"] for c in cases() if c.op.name == op} == set(FORMATS)


def refused(kind, match, op, *shapes, **attrs):
    g = rlx.Graph("bad")
    with pytest.raises(kind, match=match):
        op(*(g.input(f"x{i}", dims, dtype) for i, (dims, dtype) in enumerate(shapes)), **attrs)


def test_what_does_not_fit_is_refused():
    refused(AttributeValueError, "'q9'.*known.*'q8_0'", dequantize, ((2, 34), "u8"), format="q9", columns=32)
    refused(AttributeValueError, "negative", dequantize, ((2, 34), "u8"), format="q8_0", columns=-1)
    refused(ShapeError, "33 columns in q8_0 take 68 bytes.*34", dequantize, ((2, 34), "u8"), format="q8_0", columns=33)
    refused(DTypeError, "u8", dequantize, ((2, 34), "u32"), format="q8_0", columns=32)
    refused(ShapeError, "q4_k take 144", dequant_matmul, ((3, 256), "f32"), ((5, 140), "u8"), format="q4_k")
    refused(ShapeError, r"\[n, row bytes\]", dequant_matmul, ((3, 32), "f32"), ((34,), "u8"), format="q8_0")
    refused(DTypeError, "floats", dequant_matmul, ((3, 32), "i32"), ((5, 34), "u8"), format="q8_0")
    with pytest.raises(ShapeError, match="no whole number of q8_0 blocks"):
        FORMATS["q8_0"].decode_rows(np.zeros((2, 35), np.uint8))


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_no_row_of_an_empty_table_is_read(device: str) -> None:
    """An index is out of range there, whatever it is; with none, the result is empty."""
    for count in (3, 0):
        g = rlx.Graph("rows")
        table, ids = g.input("table", (0, 68), "u8"), g.input("ids", (count,), "i32")
        g.set_outputs([rlx.ops.quant_rows(table, ids, format="q8_0", columns=64)])
        compiled, given = rlx.compile(g, device=device), {"table": np.zeros((0, 68), np.uint8), "ids": np.zeros(count, np.int32)}
        if count:
            with pytest.raises(IndexRangeError, match="out of range"):
                compiled.run(given)
        else:
            assert compiled.run(given)[0].shape == (0, 64)

"""GGUF files: what the gguf package writes reads back equal; a damaged file is a clear error; tokenizers as the originals."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from rlx.errors import CorruptFileError, ModelError, RlxError, Unsupported
from rlx.frontends.gguf import build_tokenizer, read_gguf
from rlx.ir.blocks import FORMATS

RNG = np.random.default_rng(11)
F = gguf.GGMLQuantizationType
TEXTS = (
    "The quick brown fox jumps over the lazy dog.", "  two  spaces,\n\nlines\t and 12345 numbers", "I'll say it's DON'T, we've",
    "naïve café — “quotes” … 日本語 🙂", "", " ", "x", "def f(x):\n    return x**2  # why\r\n", "<|user|> hi <|end|>",
    "HTMLParser camelCase \u0301AB A\u0301b a\u0301 \u0301 X1y22z333", "cafe\u0301",
)  # fmt: skip


def tensors() -> dict[str, tuple[np.ndarray, F]]:
    """One of every type: the array given to the writer and its type."""
    weights = RNG.standard_normal((3, 512)).astype(np.float32)
    out = {
        "f32": (weights, F.F32), "one": (weights[0, :1], F.F32), "f16": (weights.reshape(2, 3, 4, 64).astype(np.float16), F.F16),
        "bf16": (weights.astype(ml_dtypes.bfloat16).view(np.uint8), F.BF16), "f64": (weights[:, :5].astype(np.float64), F.F64),
        "i8": (RNG.integers(-128, 128, (3, 7), np.int8), F.I8), "i64": (RNG.integers(-9, 9, 5), F.I64),
    }  # fmt: skip
    for name, form in FORMATS.items():
        if name.startswith("q"):
            packed = RNG.integers(0, 256, (3, 512 // form.block * form.nbytes), np.uint8)
            out[name] = packed, F[name.upper()]
    return out


def write(path: Path, given: dict[str, tuple[np.ndarray, F]], endian=gguf.GGUFEndian.LITTLE, fill=None, alignment=None) -> Path:
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    if alignment:
        writer.add_custom_alignment(alignment)
    (fill or (lambda w: None))(writer)
    for name, (array, kind) in given.items():
        writer.add_tensor(name, array, raw_dtype=kind if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settings(w: gguf.GGUFWriter) -> None:
    w.add_uint8("a.u8", 200)
    w.add_int8("a.i8", -3)
    w.add_uint16("a.u16", 60000)
    w.add_int16("a.i16", -30000)
    w.add_uint32("llama.block_count", 22)
    w.add_int32("a.i32", -(2**31))
    w.add_uint64("a.u64", 2**64 - 1)
    w.add_int64("a.i64", -(2**63))
    w.add_float32("a.f32", 0.5)
    w.add_float64("a.f64", 1e-300)
    w.add_bool("a.yes", True)
    w.add_string("a.text", "naïve 日本 🙂")
    w.add_array("a.ints", [1, -2, 3])
    w.add_array("a.floats", [0.5, 1.5])
    w.add_array("a.flags", [True, False])
    w.add_array("a.texts", ["", "x", "日"])
    w.add_chat_template("{{ messages }}")


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_what_the_writer_writes_reads_back_equal(tmp_path, alignment):
    given = tensors()
    file = read_gguf(write(tmp_path / "a.gguf", given, fill=settings, alignment=alignment))
    assert list(file.tensors) == list(given)
    for name, (array, kind) in given.items():
        shape, found, data = file.tensors[name]
        assert found == kind.name.lower() and not data.flags.writeable
        if found in FORMATS:
            assert shape == (3, 512) and data.dtype == np.uint8
        else:
            assert shape == data.shape and data.dtype.name == {"bf16": "bfloat16"}.get(found, array.dtype.name)
        np.testing.assert_array_equal(data.view(np.uint8).reshape(-1), array.reshape(-1).view(np.uint8))
    m = file.metadata
    assert (m["a.u8"], m["a.i8"], m["a.u16"], m["a.i16"], m["llama.block_count"]) == (200, -3, 60000, -30000, 22)
    assert (m["a.i32"], m["a.u64"], m["a.i64"], m["a.f32"], m["a.f64"]) == (-(2**31), 2**64 - 1, -(2**63), 0.5, 1e-300)
    assert m["a.yes"] is True and m["a.text"] == "naïve 日本 🙂" and m["a.texts"] == ["", "x", "日"]
    assert (m["a.ints"].tolist(), m["a.floats"].tolist(), m["a.flags"].tolist()) == ([1, -2, 3], [0.5, 1.5], [True, False])
    assert m["general.architecture"] == "llama" and file.chat_template == "{{ messages }}"


def test_as_the_gguf_packages_reader(tmp_path):
    path = write(tmp_path / "a.gguf", tensors(), fill=settings)
    theirs, ours = gguf.GGUFReader(path), read_gguf(path)
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in theirs.tensors} == {n: t.shape for n, t in ours.tensors.items()}
    for t in theirs.tensors:
        np.testing.assert_array_equal(t.data.view(np.uint8).reshape(-1), ours.tensors[t.name].data.view(np.uint8).reshape(-1))
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}


def test_a_file_without_tensors_and_an_older_version(tmp_path):
    path = write(tmp_path / "a.gguf", {}, fill=settings)
    assert read_gguf(path).tensors == {} and read_gguf(path).token_id("bos") is None
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert read_gguf(path).metadata["a.u8"] == 200


# -- damaged files -------------------------------------------------------------------------------------------------


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def info(name: bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def raw(pairs: list[bytes] = (), infos: list[bytes] = (), data: bytes = b"", version: int = 3, counts=None) -> bytes:  # type: ignore[assignment]
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(infos), len(pairs)))) + b"".join([*pairs, *infos])
    return head + bytes(-len(head) % 32) + data


U32 = struct.pack("<I", 7)
BAD = {
    "not a GGUF file": b"",
    "begins with b'GGML'": b"GGML" + bytes(40),
    "version 1": raw(version=1),
    "version 77": raw(version=77),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8),
    "metadata pairs need": raw(counts=(0, 2**60)),
    "tensor descriptions need": raw(counts=(2**60, 0)),
    "bytes of a metadata key are needed": raw([struct.pack("<Q", 2**63) + b"abc" * 9]),
    "is not UTF-8": raw([pair(b"\xff\xfe", 4, U32)]),
    "'k' appears twice": raw([pair(b"k", 4, U32)] * 2),
    "unknown type 13": raw([pair(b"k", 13, U32)]),
    "bool that is 2": raw([pair(b"k", 7, b"\x02")]),
    "entries of metadata 'k'": raw([pair(b"k", 9, struct.pack("<IQ", 8, 2**61))]),
    "values of metadata 'k'": raw([pair(b"k", 9, struct.pack("<IQ", 12, 2**61))]),
    "unknown type 9": raw([pair(b"k", 9, struct.pack("<IQ", 9, 1) * 5 + bytes(64))]),
    "power of two, it is 48": raw([pair(b"general.alignment", 4, struct.pack("<I", 48))]),
    "power of two, it is 0": raw([pair(b"general.alignment", 4, bytes(4))]),
    "power of two, it is 'x'": raw([pair(b"general.alignment", 8, string(b"x"))]),
    "one of 3 parts": raw([pair(b"split.count", 2, b"\x03\x00")]),
    "'w' appears twice": raw([], [info(b"w", (4,), 0, 0), info(b"w", (4,), 0, 32)], bytes(48)),
    "has 5 dims": raw([], [info(b"w", (1,) * 5, 0, 0)], bytes(4)),
    "unknown type 99": raw([], [info(b"w", (4,), 99, 0)], bytes(16)),
    "GGUF's type 10; rlx reads": raw([], [info(b"w", (256,), 10, 0)], bytes(84)),
    "cannot have the shape [0]": raw([], [info(b"w", (0,), 0, 0)], bytes(16)),
    "cannot have the shape [4611686018427387904": raw([], [info(b"w", (2**62, 2**62), 0, 0)], bytes(16)),
    "blocks of 32": raw([], [info(b"w", (33,), 8, 0)], bytes(68)),
    "begins at byte 16 of the data, byte 0": raw([], [info(b"w", (4,), 0, 16)], bytes(64)),
    "byte 32 was expected": raw([], [info(b"w", (4,), 0, 0), info(b"v", (4,), 0, 0)], bytes(64)),
    "the tensors take bytes": raw([], [info(b"w", (16,), 0, 0)], bytes(60)),
    "the file has": raw([], [info(b"w", (4,), 0, 0)], bytes(16 + 64)),
    "no tensors": raw([], [], bytes(64)),
}


@pytest.mark.parametrize("match", BAD)
def test_a_contradiction_is_named(tmp_path, match):
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[match])
    with pytest.raises((CorruptFileError, Unsupported)) as e:
        read_gguf(path)
    assert match in str(e.value) and str(path) in str(e.value)


def test_the_hand_written_form_is_sound(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(raw([pair(b"k", 4, U32)], [info(b"w", (2, 3), 0, 0)], np.arange(6, dtype="<f4").tobytes()))
    file = read_gguf(path)
    assert file.metadata == {"k": 7} and file.tensors["w"].data.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ModelError, match="no tokenizer"):
        build_tokenizer(file)


def mutated(data: bytes, head: int, n: int) -> bytes:
    """The n-th damaged form of a file: cut, grown, or with bytes of its head replaced."""
    rng = np.random.default_rng(n)
    if n % 10 == 0:
        return data[: rng.integers(len(data))]
    if n % 10 == 1:
        return data + rng.bytes(int(rng.integers(32, 200)))
    out = bytearray(data)
    at = int(rng.integers(head - 8))
    if n % 10 < 6:
        out[at] = rng.choice([0, 255, out[at] ^ (1 << rng.integers(8)), rng.integers(256)])
    elif n % 10 < 9:
        out[at : at + 8] = struct.pack("<Q", (0, 1, 2**31, 2**32, 2**62, 2**63)[rng.integers(6)])
    else:
        del out[at : at + int(rng.integers(1, 9))]
    return bytes(out)


def test_a_thousand_damaged_files(tmp_path):
    """Each is refused by an error of ours, or is still a file: then its arrays and its tokenizer can be used. Memory stays."""
    path = write(tmp_path / "a.gguf", tensors(), fill=lambda w: (settings(w), byte_level(w, small_bpe()[1])))
    data = path.read_bytes()
    head = len(data) - sum(-(-a.nbytes // 32) * 32 for a, _ in tensors().values())
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(1000):
        damaged = mutated(data, head, n)
        path = tmp_path / "damaged.gguf"
        path.unlink(missing_ok=True)  # an older mapping keeps its own file
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
            for t in file.tensors.values():
                t.data.view(np.uint8).max(initial=0)
            build_tokenizer(file).encode("hello it's 42")
        except RlxError as e:
            assert str(path) in str(e) or "damaged" in str(e)
            refused += 1
        else:
            assert n % 10 > 1, "a file that is cut or grown is refused"
    assert refused > 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_big_endian_file(tmp_path):
    floats = {"w": (np.ones((2, 2), np.float32), F.F32)}
    with pytest.raises(Unsupported, match="big-endian.*convert"):
        read_gguf(write(tmp_path / "a.gguf", floats, gguf.GGUFEndian.BIG, settings))


# -- tokenizers ----------------------------------------------------------------------------------------------------


def small_bpe(split: pre_tokenizers.PreTokenizer | None = None) -> tuple[tokenizers.Tokenizer, list[str]]:
    """A byte-level BPE trained here, with two special tokens, and its tokens in order."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|user|>", "<|end|>"], show_progress=False
    )
    made.train_from_iterator([*TEXTS, Path(__file__).read_text()], trainer)
    return made, [t for t, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]


def byte_level(w: gguf.GGUFWriter, tokens: list[str], made: tokenizers.Tokenizer | None = None, pre: str = "gpt-2") -> None:
    made = made or small_bpe()[0]
    merges = json.loads(made.to_str())["model"]["merges"]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([3 if t.startswith("<|") else 1 for t in tokens])
    w.add_token_merges([" ".join(m) for m in merges])
    w.add_eos_token_id(1)


def cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    """As in the tokenizer.json files of models of the kind."""
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
THIRD = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "deepseek-v3": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")] + [cut(THIRD)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": cut(LLAMA3),
    "qwen2": cut(LLAMA3.replace("{1,3}", "")),
    "tekken": cut(TEKKEN),
    "gpt-4o": cut(TEKKEN.replace("]+|[", f"]+{ENDING}[").replace(r"]*|\p{N}", rf"]*{ENDING}\p{{N}}{{1,3}}")),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizer_is_the_original(tmp_path, pre):
    original, tokens = small_bpe(SPLITS[pre])
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    fill = lambda w: (byte_level(w, tokens, original, pre), w.add_add_bos_token(False))  # noqa: E731
    file = read_gguf(write(tmp_path / "a.gguf", {}, fill=fill))
    ours = build_tokenizer(file)
    assert ours.get_vocab_size() == original.get_vocab_size() and file.token_id("eos") == 1
    for text in (*TEXTS, Path(__file__).read_text()):
        want = original.encode(text).ids
        assert ours.encode(text).ids == want, text
        assert ours.decode(want) == original.decode(want)
        cuts = [[piece for piece, _ in t.pre_tokenizer.pre_tokenize_str(text)] for t in (ours, original)]
        assert cuts[0] == cuts[1]
    assert ours.encode("<|user|>").ids == [tokens.index("<|user|>")] and ours.decode(ours.encode(TEXTS[3]).ids) == TEXTS[3]


def sentence_pieces(w: gguf.GGUFWriter, made: tokenizers.Tokenizer) -> None:
    """A BPE with byte fallback as GGUF keeps it: merged pieces have scores by their rank, and no merges are written."""
    rank = {"".join(m): i for i, m in enumerate(json.loads(made.to_str())["model"]["merges"])}
    tokens = [t for t, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]
    kind = lambda t: 2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1  # noqa: E731
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([-float(rank.get(t, 1e6)) for t in tokens])
    w.add_token_types([kind(t) for t in tokens])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_uint32("tokenizer.ggml.unknown_token_id", 0)


def test_sentence_piece_tokenizer_is_the_original(tmp_path):
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    original = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = "the quick brown fox jumps over lazy dogs and then it is said that numbers 1 2 3 follow".split()
    lines = [" ".join(np.random.default_rng(i).permutation(words)) for i in range(50)]
    original.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False))
    model = json.loads(original.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    original.model = models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    file = read_gguf(write(tmp_path / "a.gguf", {}, fill=lambda w: sentence_pieces(w, original)))
    ours, tokens = build_tokenizer(file), file.metadata["tokenizer.ggml.tokens"]
    for text in (*lines[:5], *TEXTS):
        want = original.encode(text).ids
        assert ours.encode(text, add_special_tokens=False).ids == want, text
        assert ours.encode(text).ids == [1, *want]
        plain = [i for i in want if i != 0]  # byte tokens are no special ones in GGUF
        assert ours.decode([1, *want]) == original.decoder.decode([tokens[i] for i in plain])
    assert ours.decode(ours.encode(TEXTS[3]).ids) == TEXTS[3]


@pytest.mark.parametrize(
    "change,error,match",
    [
        (lambda w: w.add_tokenizer_model("bert"), Unsupported, "'bert'.*'gpt2', 'llama'"),
        (lambda w: w.add_tokenizer_model("gpt2"), CorruptFileError, "no list of tokens"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a", "a"])), CorruptFileError, "1 tokens appear twice"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])), CorruptFileError, "no list of merges"),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])), CorruptFileError, "as many scores"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"]), w.add_token_merges(["a b"])),
            CorruptFileError,
            "'a' and 'b' names no tokens",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("klingon"), w.add_token_list(["a"])),
            Unsupported,
            "'klingon'; rlx has.*'llama3'",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"]), w.add_token_scores([0.0]), w.add_bos_token_id(5)),
            CorruptFileError,
            "bos token is 5, ids are 0 … 0",
        ),
        (lambda w: w.add_array("tokenizer.ggml.model", [1, 2]), Unsupported, "tokenizer is a"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_uint8("tokenizer.ggml.tokens", 1)),
            CorruptFileError,
            "no list of tokens",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_made(tmp_path, change, error, match):
    file = read_gguf(write(tmp_path / "a.gguf", {}, fill=change))
    with pytest.raises(error, match=match):
        build_tokenizer(file)

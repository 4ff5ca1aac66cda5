"""GGUF files: metadata, tensors mapped into memory, and the tokenizer that the metadata describes.

In: a file of version 2 or 3, little-endian. Out: GgufFile, whose arrays are read-only views of the mapped file.
The file is untrusted: every count, length, type, offset and size is checked against the file's real size before it is used, so
that no allocation trusts the file. CorruptFileError states the contradiction; Unsupported states the missing feature.

Format: "GGUF", u32 version, u64 tensors, u64 pairs; pairs (string key, u32 type, value); tensors (string name, u32 dims, u64
sizes with the innermost first, u32 type, u64 offset); padding to `general.alignment`; the tensors' bytes, each padded alike.
A string is a u64 length and UTF-8 bytes; an array a u32 type, a u64 count and the values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import CorruptFileError, ModelError, Unsupported, known
from rlx.frontends.text import tokenising
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DTYPES
from rlx.records import record
from rlx.runtime import map_file

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_MAX_DIMS, _MAX_NESTING = 4, 4
_TYPES = {0: "f32", 1: "f16", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16"}
_TYPES |= {f.gguf: f.name for f in FORMATS.values() if f.gguf is not None}
_LAST_TYPE = 63  # numbers up to this may be types that rlx does not know; with a larger one the file counts as corrupt


class GgufTensor(NamedTuple):
    """`shape` outermost dim first. `data`: [shape] in the dtype called `type`, or u8 [*shape[:-1], row bytes] of the packed
    format called `type` (rlx.ir.blocks.FORMATS). A read-only view of the file."""

    shape: tuple[int, ...]
    type: str
    data: Any  # np.ndarray, or rlx.frontends.scaled.Scaled


@record(eq=False)
class GgufFile:
    """The contents of a file. Values of `metadata`: int, float, bool, str, a list of str, or a read-only numeric array."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that turns messages into a prompt."""
        found = self.metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    def token_id(self, name: str) -> int | None:
        """The id of the token with this role ("bos", "eos", "unknown", "padding"), or None."""
        found = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        count = len(tokens) if isinstance(tokens, list) else 0
        if found is not None and not (type(found) is int and 0 <= found < count):
            raise CorruptFileError(f"{self.path}: the {name} token is {found!r}, ids are 0 … {count - 1}")
        return found


def read_gguf(path: str | Path) -> GgufFile:
    """Read the head of a file and map its tensors; no tensor is read until it is used.

    Raises CorruptFileError, or Unsupported for big-endian files, other versions and tensor types that rlx lacks.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as f:
        magic = f.read(4)
    if size < 24 or magic != b"GGUF":
        raise CorruptFileError(f"{path} is not a GGUF file: it has {size} bytes and begins with {magic!r}")
    head = _Head(path, map_file(path))
    version = head.number("<u4")
    if version in (2 << 24, 3 << 24):
        raise Unsupported(f"{path} is big-endian; rlx reads little-endian GGUF files: convert it again without --bigendian")
    if version not in (2, 3):
        raise Unsupported(f"{path} is GGUF version {version}; rlx reads versions 2 and 3")
    tensors, pairs = head.number("<u8"), head.number("<u8")
    head.room(pairs, 13, "metadata pairs")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = head.string("a metadata key")
        if key in metadata:
            raise head.corrupt(f"the metadata key {key!r} appears twice")
        metadata[key] = head.value(head.number("<u4"), f"metadata {key!r}")
    if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
        raise Unsupported(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")
    return GgufFile(path, metadata, _tensors(head, tensors, metadata))


class _Head:
    """A cursor over a mapped file that never moves past its end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 4  # after the magic

    def corrupt(self, label: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: {label} (near byte {self.at}); the file is damaged or cut short")

    def room(self, count: int, each: int, label: str) -> None:
        """Check that `count` items of at least `each` bytes fit in the rest of the file."""
        if count * each > len(self.data) - self.at:
            raise self.corrupt(f"{count} {label} need at least {count * each} bytes, {len(self.data) - self.at} are left")

    def array(self, dtype: str, count: int, label: str) -> np.ndarray:
        host = np.dtype(dtype)
        self.room(count, host.itemsize, label)
        found = np.frombuffer(self.data, host, count, self.at)
        self.at += found.nbytes
        return found

    def number(self, dtype: str) -> Any:
        return self.array(dtype, 1, "numbers")[0].item()

    def string(self, label: str) -> str:
        start = self.at + 8
        end = start + int.from_bytes(self.data[self.at : start], "little")
        if end > len(self.data):
            raise self.corrupt(f"{end - start} bytes of {label} are needed, {max(len(self.data) - start, 0)} are left")
        self.at = end
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as e:
            raise self.corrupt(f"{label} is not UTF-8: {e.reason} at its byte {e.start}") from None

    def value(self, kind: int, label: str, nesting: int = 0) -> Any:
        """A scalar, a string, or an array."""
        if kind == _STRING:
            return self.string(label)
        if kind == _ARRAY and nesting < _MAX_NESTING:
            inner, count = self.number("<u4"), self.number("<u8")
            if inner not in (_STRING, _ARRAY):
                return self.scalars(inner, count, label)
            self.room(count, 8 if inner == _STRING else 12, f"entries of {label}")
            if inner == _STRING:
                return [self.string(label) for _ in range(count)]
            return [self.value(inner, label, nesting + 1) for _ in range(count)]
        return self.scalars(kind, 1, label)[0].item()

    def scalars(self, kind: int, count: int, label: str) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.corrupt(f"{label} is of the unknown type {kind}")
        found = self.array(_SCALARS[kind], count, f"values of {label}")
        if kind != _BOOL:
            return found
        if found.max(initial=0) > 1:
            raise self.corrupt(f"{label} holds a bool that is {found.max()}")
        return found.view(np.bool_)


def _tensors(head: _Head, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    """The tensors' descriptions, checked against each other and the file: they must be stored in sequence, without gaps,
    up to its end."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise head.corrupt(f"general.alignment must be a power of two, it is {alignment!r}")
    head.room(count, 32, "tensor descriptions")
    found: dict[str, tuple[tuple[int, ...], str, int]] = {}
    end = 0  # in bytes from the start of the data
    for _ in range(count):
        name = head.string("a tensor's name")
        shape, kind, offset = _description(head, name)
        if name in found:
            raise head.corrupt(f"the tensor {name!r} appears twice")
        if offset != (want := _padded(end, alignment)):
            raise head.corrupt(f"tensor {name!r} begins at byte {offset} of the data, byte {want} was expected")
        found[name] = shape, kind, offset
        end = offset + _row_bytes(kind, shape) * math.prod(shape[:-1])
    start, size = _padded(head.at, alignment), len(head.data)
    if count and not start + end <= size <= start + _padded(end, alignment):
        raise head.corrupt(f"the tensors take bytes {start} to {start + end}, the file has {size}")
    if not count and size > start:
        raise head.corrupt(f"the file has {size} bytes and no tensors, byte {start} was expected to be the last")
    return {name: GgufTensor(shape, kind, _window(head, shape, kind, start + at)) for name, (shape, kind, at) in found.items()}


def _description(head: _Head, name: str) -> tuple[tuple[int, ...], str, int]:
    """(shape, type, offset in the data) of the next tensor."""
    rank = head.number("<u4")
    if rank > _MAX_DIMS:
        raise head.corrupt(f"tensor {name!r} has {rank} dims, at most {_MAX_DIMS} are allowed")
    shape = tuple(reversed(head.array("<u8", rank, "sizes").tolist()))
    number, offset = head.number("<u4"), head.number("<u8")
    if number > _LAST_TYPE:
        raise head.corrupt(f"tensor {name!r} is of the unknown type {number}")
    if number not in _TYPES:
        raise Unsupported(f"{head.path}: tensor {name!r} is of GGUF's type {number}; rlx reads {known(_TYPES.values())}")
    kind = _TYPES[number]
    if not all(shape) or math.prod(shape) > 8 * len(head.data):  # no type takes less than a bit
        raise head.corrupt(f"tensor {name!r} cannot have the shape {list(shape)} in a file of {len(head.data)} bytes")
    if kind in FORMATS and (not rank or shape[-1] % FORMATS[kind].block):
        raise head.corrupt(f"tensor {name!r} has rows of {shape[-1:]} elements, {kind} has blocks of {FORMATS[kind].block}")
    return shape, kind, offset


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _row_bytes(kind: str, shape: tuple[int, ...]) -> int:
    columns = shape[-1] if shape else 1
    return FORMATS[kind].row_bytes(columns) if kind in FORMATS else columns * DTYPES[kind].itemsize


def _window(head: _Head, shape: tuple[int, ...], kind: str, at: int) -> np.ndarray:
    if kind in FORMATS:
        return np.ndarray((*shape[:-1], _row_bytes(kind, shape)), np.uint8, buffer=head.data, offset=at)
    return np.ndarray(shape, DTYPES[kind].numpy, buffer=head.data, offset=at)


# -- tokenizer -----------------------------------------------------------------------------------------------------

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # types of tokens that match themselves in a text; a _USER token is not special
_SPACE = "\u2581"  # SentencePiece's sign for a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return "|".join((_ENDINGS, _LEAD + r"\p{L}+", digits, r" ?[^\s\p{L}\p{N}]+[\r\n]*", _SPACES))


def _cased(digits: str, ending: str = "") -> str:
    """Pattern that also splits words between a lower-case and an upper-case letter."""
    words = (f"{_LEAD}{_UPPER}*{_LOWER}+{ending}", f"{_LEAD}{_UPPER}+{_LOWER}*{ending}")
    return "|".join((*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES))


# Letters with case, as DeepSeek-V2 lists them: without some of Armenian, Georgian, mathematics, and later additions
_CASED = (
    r"[\p{Ll}\p{Lu}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
_SIGNS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_EAST = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_2 = (r"[\r\n]", rf"\s?{_CASED}+", _SIGNS, r"\s+$", _EAST, r"\p{N}+")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip


class _Split(NamedTuple):
    """Pre-tokenizer: the split of a text before byte pairs are merged. `whole`: a piece that is a token skips the merges."""

    patterns: tuple[str, ...]
    whole: bool = False
    compose: bool = False  # characters are composed first (NFC)
    begins: bool = False  # the first token is "bos" unless the file says otherwise


_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _Split((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Split((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Split((_words(r"\p{N}{1,3}"),), whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split((_words(r"\p{N}{1,3}"),))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split((_words(r"\p{N}"),), compose=True)),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split((_cased(r"\p{N}{1,3}", _ENDINGS + "?"),))),
    "deepseek-llm": _Split(_DEEPSEEK_2),
    "deepseek-v3": _Split(_DEEPSEEK_3),
    "tekken": _Split((_cased(r"\p{N}"),), whole=True, begins=True),
}


def build_tokenizer(file: GgufFile) -> Any:
    """The `tokenizers.Tokenizer` that the metadata describes: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises ModelError without a tokenizer in the file, Unsupported for other kinds, CorruptFileError if its lists disagree.
    """
    try:
        import tokenizers
    except ImportError as e:
        raise ModelError("text input needs the package `tokenizers`: pip install 'rlx[models]'") from e
    if "tokenizer.ggml.model" not in file.metadata:
        raise ModelError(f"{file.path} has no tokenizer (metadata tokenizer.ggml.model)")
    kind = str(file.metadata["tokenizer.ggml.model"])
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if kind not in makers:
        raise Unsupported(f"{file.path}: the tokenizer is a {kind!r}; rlx has {known(makers)}")
    tokens = _entries(file, "tokens")
    types = _numbers(file, "token_type", len(tokens)) if "tokenizer.ggml.token_type" in file.metadata else [1] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CorruptFileError(f"{file.path}: {len(tokens) - len(vocab)} tokens appear twice in the vocabulary")
    with tokenising(f"{file.path}: no tokenizer can be built from the vocabulary"):
        made, begins = makers[kind](file, vocab, types)
        whole = [(token, role) for token, role in zip(tokens, types) if token and role in (_UNKNOWN, _CONTROL, _USER)]
        made.add_tokens([tokenizers.AddedToken(token, special=role != _USER, normalized=False) for token, role in whole])
        made.post_processor = _ends(file, tokens, begins)
    return made


def _byte_level(file: GgufFile, vocab: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """(tokenizer, whether it adds "bos" by default). Merges are "left right", the earliest first."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if name not in _SPLITS:
        raise Unsupported(f"{file.path}: the pre-tokenizer is {name!r}; rlx has {known(_SPLITS)}")
    split = _SPLITS[name]
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _entries(file, "merges"))]
    for left, right in merges:
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CorruptFileError(f"{file.path}: the merge of {left!r} and {right!r} names no tokens")
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.compose:
        made.normalizer = normalizers.NFC()
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix") is True
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made, split.begins


def _sentence_pieces(file: GgufFile, vocab: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """SentencePiece BPE: pairs merge into the piece with the highest score; characters without a token become byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(file, "scores", len(vocab))
    found: list[tuple[float, int, int, str, str]] = []
    for (piece, i), score, role in zip(vocab.items(), scores, types):
        if role == 1:
            cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            found += [(-score, i, vocab[a], a, b) for a, b in cuts if a in vocab and b in vocab]
    merges = [(left, right) for *_, left, right in sorted(found)]
    unknown = file.token_id("unknown")
    unk = list(vocab)[unknown] if unknown is not None else None
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made, True


def _ends(file: GgufFile, tokens: list[str], begins: bool) -> Any:
    """The post-processor that adds tokens before and after a text."""
    from tokenizers import processors

    wanted = lambda name, default: file.metadata.get(f"tokenizer.ggml.add_{name}_token", default) is True  # noqa: E731
    ids = {name: file.token_id(name) for name, default in (("bos", begins), ("eos", False)) if wanted(name, default)}
    parts = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for name, i in ids.items() if i is not None]
    at = {part["id"]: part["id"] for part in parts}
    single = [part for part in (at.get("bos"), "$A", at.get("eos")) if part]
    pair = [*single, *(part.replace("A", "B") + ":1" for part in single)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=parts)


def _entries(file: GgufFile, name: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise CorruptFileError(f"{file.path}: the tokenizer has no list of {name}")
    return found


def _numbers(file: GgufFile, name: str, count: int) -> list[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, np.ndarray) or len(found) != count:
        raise CorruptFileError(f"{file.path}: the tokenizer has {count} tokens and no list of as many {name}")
    return found.tolist()

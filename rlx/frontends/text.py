"""Text to token ids, by the model folder's own tokenizer.json (the `tokenizers` package).

In: strings. Out: one list of ids per string, special tokens added, truncated to the model's length, not padded: the code
that builds batches pads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlx.errors import CorruptFileError, InputDTypeError, ModelError, RlxError
from rlx.frontends.weights import read_json

IDS = 1 << 31  # ids are below this: networks take them as i32
LARGE = b"0" * len(str(IDS))
_DIGITS = bytes(ord("0") if chr(c).isdigit() and c < 128 else ord(" ") for c in range(256))
DAMAGED = "the model's tokenizer cannot take a text: its file contradicts itself"
_CHUNK = 1024  # texts tokenised at once: bounds the memory that the tokenizer's own records take


class Tokenizer:
    """Texts are truncated to `max_length` tokens, including special ones, and in lower case first if `lower`."""

    def __init__(self, tokenizer: Any, lower: bool, max_length: int, source: str) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`. `source`: its origin, for errors."""
        self._tokenizer, self.lower, self.max_length = tokenizer, lower, max_length
        self._tokenizer.enable_truncation(self.max_length)
        if (special := len(self([""])[0])) > self.max_length:
            raise ModelError(f"{source}: a maximum length of {self.max_length} has no room for the {special} special tokens")

    @property
    def vocab_size(self) -> int:
        """All ids are below this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text."""
        texts = [checked(text, f"text {i}") for i, text in enumerate(texts)]
        texts = [text.lower() for text in texts] if self.lower else texts
        chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
        with tokenising(DAMAGED):
            return [e.ids for chunk in chunks for e in self._tokenizer.encode_batch_fast(chunk)]

    def to_json(self) -> bytes:
        """The content of a tokenizer.json."""
        return self._tokenizer.to_str().encode()


def folder_tokenizer(folder: str | Path, positions: int) -> Tokenizer:
    """From tokenizer.json of `folder`. `positions`: most tokens that the network accepts; the folder's configuration may set
    fewer."""
    folder = Path(folder)
    made = read_tokenizer(folder)
    return Tokenizer(made, *_limits(folder, positions), str(folder))


def read_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` in the folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer with its fast form (save_pretrained)")
    return tokenizer_of(path.read_bytes(), str(path))


def tokenizer_of(content: bytes, source: str) -> Any:
    """The `tokenizers.Tokenizer` in the content of a tokenizer.json. `source`: its origin, for errors."""
    try:
        import tokenizers
    except ImportError as e:
        raise ModelError("text input needs the package `tokenizers`: pip install 'rlx[models]'") from e
    with tokenising(f"{source} is not a tokenizer"):
        made = tokenizers.Tokenizer.from_buffer(content)
        made.no_padding()  # before anything is encoded: it may be by any length
        made.no_truncation()
        _check_ids(content, made, made.encode("").ids, source)
    return made


@contextmanager
def tokenising(says: str) -> Iterator[None]:
    """CorruptFileError in place of what the package raises for every fault of a file: bare Exception, and the panics of its Rust
    code, which are none. `says`: what is wrong."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, RlxError) or not (isinstance(e, Exception) or type(e).__name__ == "PanicException"):
            raise
        raise CorruptFileError(f"{says} ({e})") from None


def _check_ids(content: bytes, tokenizer: Any, around: list[int], source: str) -> None:
    """CorruptFileError: an id of the tokenizer, or `around` every text, does not fit the i32 that networks take. The whole
    vocabulary is checked only if the file contains a number that large, since that takes as long as reading the file."""
    if LARGE not in content.translate(_DIGITS):
        return
    ids = [(f"token {token!r}", id) for token, id in tokenizer.get_vocab(with_added_tokens=True).items()]
    for label, id in [*ids, *(("a token around every text", id) for id in around)]:
        if id >= IDS:
            raise CorruptFileError(f"{source}: {label} has the id {id}; ids are below {IDS}")


def checked(text: object, name: str) -> str:
    """`text`, if a tokenizer can encode it. `name`: its name in the error."""
    if not isinstance(text, str):
        raise InputDTypeError(f"{name} is a {type(text).__name__}, not a str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputDTypeError(f"{name} is not valid unicode: {e.reason} at character {e.start}") from None
    return text


def _limits(folder: Path, positions: int) -> tuple[bool, int]:
    """(whether to lower-case the text first, maximum length): the least maximum that the folder's files and the network give."""
    lengths, lower = [positions], False
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).is_file():
            config = read_json(folder / file)
            value = config.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):  # 1e30 means "no limit"
                if not value >= 1:  # NaN, too
                    raise CorruptFileError(f"{folder / file}: {key} is {value}, it must be at least 1")
                lengths.append(int(min(value, positions)))
            lower = lower or (key == "max_seq_length" and config.get("do_lower_case") is True)
    return lower, min(lengths)

"""Text to tokens and back for language models, from a folder's tokenizer.json or a GGUF file's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlx.errors import CorruptFileError, InputDTypeError, flag
from rlx.frontends.gguf import GgufFile, build_tokenizer
from rlx.frontends.text import DAMAGED, IDS, checked, read_tokenizer, tokenising
from rlx.frontends.weights import read_json


class TextCodec:
    """`ends`: ids that end an answer. `chat_template`: a Jinja template from messages to a prompt, or None.
    `special`: the text of "bos_token" and "eos_token" where it exists, in the form that templates use."""

    def __init__(self, tokenizer: Any, ends: Iterable[int], chat_template: str | None, special: dict[str, str]) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`."""
        self._tokenizer, self.ends, self.chat_template, self.special = tokenizer, frozenset(ends), chat_template, special

    def described(self) -> dict[str, Any]:
        """All but the tokenizer, for JSON."""
        return {"ends": sorted(self.ends), "chat_template": self.chat_template, "special": self.special}

    def to_json(self) -> bytes:
        """The content of a tokenizer.json."""
        return self._tokenizer.to_str().encode()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. `special`: add the tokens that the model expects around every text (a rendered template has them)."""
        text, special = checked(text, "the prompt"), flag("special", special)
        with tokenising(DAMAGED):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`. `special`: include tokens such as "<|end|>". InputDTypeError: they are no ids."""
        try:
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)
        except (TypeError, ValueError, OverflowError):
            raise InputDTypeError(f"decode takes a list of token ids, got {ids!r:.60}") from None


def folder_codec(folder: str | Path) -> TextCodec:
    """From tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja of a Hugging Face folder."""
    folder = Path(folder)
    made = read_tokenizer(folder)
    files = ("config.json", "generation_config.json", "tokenizer_config.json")
    network, generation, words = (read_json(folder / f) if (folder / f).is_file() else {} for f in files)
    special = {}
    for key in ("bos_token", "eos_token"):
        token = words.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[key] = token
    given = [made.token_to_id(special["eos_token"])] if "eos_token" in special else []
    for file, source in zip(files, (network, generation)):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if large := [i for i in ids if type(i) is int and i >= IDS]:
            raise CorruptFileError(f"{folder / file}: eos_token_id is {large[0]}; ids are below {IDS}")
        given += ids
    ends = [i for i in given if type(i) is int]
    return TextCodec(made, ends, _chat_template(folder / "chat_template.jinja", words.get("chat_template")), special)


def _chat_template(file: Path, configured: object) -> str | None:
    """The content of the file, else the one that tokenizer_config.json has: alone, or as "default" in a list of several."""
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as e:
            raise CorruptFileError(f"{file} is not UTF-8 text: byte {e.start} cannot be read") from None
    if isinstance(configured, list):
        named = [t.get("template") for t in configured if isinstance(t, dict) and t.get("name") == "default"]
        configured = named[0] if named else None
    return configured if isinstance(configured, str) else None


def gguf_codec(file: GgufFile) -> TextCodec:
    """From the metadata of a GGUF file."""
    made = build_tokenizer(file)
    ids = {key: file.token_id(key) for key in ("bos", "eos", "eot", "eom")}
    special = {f"{k}_token": made.id_to_token(i) for k in ("bos", "eos") if (i := ids[k]) is not None}
    return TextCodec(made, {i for k in ("eos", "eot", "eom") if (i := ids[k]) is not None}, file.chat_template, special)

"""Cache keys generated from the fields of records, so that a new field is part of every key."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import Field, fields
from typing import Any

UNSEEN = {"changes code": False}  # metadata of a field that is left out of keys because it does not affect code


def key_facts(record: Any) -> dict[str, str]:
    """Name -> text of every field of a frozen dataclass that equality compares, except UNSEEN ones; stable across processes."""
    return {f.name: _text(getattr(record, f.name)) for f in fields(record) if _counts(f)}


def _counts(f: Field[Any]) -> bool:
    return f.compare and f.metadata.get("changes code", True)


def _text(value: Any) -> str:
    """repr, with dicts and sets in an order that does not depend on hashes."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(k)}: {_text(v)}' for k, v in value.items()))}}}"
    return f"{{{', '.join(sorted(map(_text, value)))}}}" if isinstance(value, Set) else repr(value)

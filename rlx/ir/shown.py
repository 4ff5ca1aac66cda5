"""How objects show themselves: one line in a prompt, their whole text in a notebook."""

from __future__ import annotations

from collections.abc import Iterable

UNITS = ("bytes", "kB", "MB", "GB", "TB")


class Shown:
    """Base of a class with a text form. `repr` is a line: `<Name line>`; notebooks show the text."""

    __slots__ = ()

    def _line(self) -> str:
        """The rest of the line."""
        return ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._line()}>"

    def _repr_html_(self) -> str:
        from html import escape  # only notebooks need it

        text = str(self)
        return f"<pre>{escape(repr(self) if text == repr(self) else text)}</pre>"


def sized(nbytes: int) -> str:
    """`nbytes` in a unit of a power of 1,000: "91.1 MB"."""
    size, unit = float(nbytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{int(unit > 0)}f} {UNITS[unit]}"


def some(things: Iterable[object], most: int = 6) -> str:
    """The first of them, with commas, and how many more there are."""
    listed = [str(x) for x in things]
    more = f", and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more or "nothing"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


__all__ = ["Shown", "counted", "sized", "some"]

"""Full matches of regular expressions in RE2's syntax, by sets of states: the time is at most that of states times characters.

Python's `re` goes back and tries again, which a pattern of a model can make take for ever; it is used for single characters only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

STATES, STEPS, DEEP, TIMES = 10_000, 1 << 23, 100, 1000  # of a pattern, of all its matches, groups inside each other, repetitions
_POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ", "upper": "A-Z",
    "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|x\{([0-9A-Fa-f]{1,6})\}|([0-7]{2,3}|0)|(.))", re.DOTALL)
_END = chr(0x10FFFF)
_SETS = {  # Python's own take characters that are not ASCII, or, as \s, more of ASCII
    "d": "0-9", "D": rf"\x00-/:-{_END}", "s": r"\t\n\f\r ", "S": rf"\x00-\x08\v\x0e-\x1f!-{_END}",
    "w": "0-9A-Za-z_", "W": rf"\x00-/:-@\[-\^`{{-{_END}",
}  # fmt: skip
_WORD = re.compile(r"\w", re.ASCII).match
_AT: dict[str, Callable[[str, str], bool]] = {  # by the characters before and behind, "" where the text ends
    "A": lambda a, b: not a, "z": lambda a, b: not b, "^": lambda a, b: a in ("", "\n"), "$": lambda a, b: b in ("", "\n"),
    "b": lambda a, b: bool(_WORD(a)) != bool(_WORD(b)), "B": lambda a, b: bool(_WORD(a)) == bool(_WORD(b)),
}  # fmt: skip


class Pattern:
    """A pattern. ValueError: it is none of RE2, or of more than STATES states."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth, self.steps = text, 0, 0, 0
        self.next: list[tuple[Any, tuple[int, ...]]] = [(None, ())]  # what a state needs to go on, and where; 0: the end
        tree = self._either("")
        if self.at < len(text):
            self._wrong("a ) without (")
        self.emitted = 0
        self.start = self._emit(tree, 0)

    def matches(self, text: str) -> bool:
        """True if the whole text matches. ValueError: the matches took STEPS steps together."""
        now = {self.start}
        for before, char in zip(("", *text), (*text, "")):
            reached = self._reached(now, before, char)
            if not char or not reached:
                return 0 in reached
            now = {n for s in reached for n in self.next[s][1] if callable(self.next[s][0]) and self.next[s][0](char)}
        return False

    def _reached(self, states: set[int], before: str, behind: str) -> set[int]:
        """The states that are reached from these without a character."""
        seen, todo = set(states), list(states)
        while todo:
            needs, nexts = self.next[todo.pop()]
            if needs is None or (isinstance(needs, str) and _AT[needs](before, behind)):
                todo += (fresh := [n for n in nexts if n not in seen])
                seen.update(fresh)
        self.steps += len(seen)
        if self.steps > STEPS:
            raise ValueError(f"matching {self.text[:60]!r} takes more than {STEPS} steps")
        return seen

    # -- states

    def _emit(self, tree: Any, then: int) -> int:
        """The first state of a tree that goes on to state `then`."""
        self.emitted += 1
        if self.emitted > STATES:
            raise ValueError(f"the pattern {self.text[:60]!r} has more than {STATES} states")
        if not isinstance(tree, tuple):
            return self._state(tree, then)
        kind, *parts = tree
        if kind == "either":
            return self._state(None, *(self._emit(x, then) for x in parts))
        if kind == "row":
            for x in reversed(parts):
                then = self._emit(x, then)
            return then
        body, least, most = parts
        if most is None:
            loop = self._state(None, then)
            self.next[loop] = None, (self._emit(body, loop), then)
            then = loop
        for _ in range((most or least) - least):
            then = self._state(None, self._emit(body, then), then)
        for _ in range(least):
            then = self._emit(body, then)
        return then

    def _state(self, needs: Any, *nexts: int) -> int:
        self.next.append((needs, nexts))
        return len(self.next) - 1

    # -- syntax

    def _wrong(self, why: str) -> NoReturn:
        raise ValueError(f"{self.text[:60]!r} is no regular expression of RE2: {why} at character {self.at}")

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _either(self, flags: str) -> Any:
        self.depth += 1
        if self.depth > DEEP:
            self._wrong(f"more than {DEEP} groups are inside each other")
        rows, row = [], ["row"]
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self._take("|"):
                rows, row = [*rows, tuple(row)], ["row"]
            elif found := re.compile(r"\(\?(?!\))([ims]*)(?:-([ims]+))?([:)])").match(self.text, self.at):
                self.at = found.end()
                now = "".join({*flags, *found[1]} - {*(found[2] or "")})
                if found[3] == ":":
                    row.append(self._repeated(self._group(now)))
                else:
                    flags = now
            else:
                row.append(self._repeated(self._one(flags)))
        self.depth -= 1
        return ("either", *rows, tuple(row))

    def _group(self, flags: str) -> Any:
        made = self._either(flags)
        return made if self._take(")") else self._wrong("a ( without )")

    def _repeated(self, tree: Any) -> Any:
        operator = re.compile(r"([*+?])|\{(\d{1,5})(,)?(\d{1,5})?\}").match
        counts = operator(self.text, self.at)
        if not counts or (counts[4] and not counts[3]):
            return tree
        self.at = counts.end()
        self._take("?")  # the shortest one first: of no account for a full match
        least = int(counts[2]) if counts[2] else int(counts[1] == "+")
        most = 1 if counts[1] == "?" else None if counts[1] else int(counts[4]) if counts[4] else None if counts[3] else least
        if max(least, most or 0) > TIMES or (most is not None and most < least):
            self._wrong(f"a repetition of more than {TIMES} times, or of fewer at most than at least")
        if operator(self.text, self.at):
            self._wrong("a repetition of a repetition")
        return "repeat", tree, least, most

    def _one(self, flags: str) -> Any:
        """A group, a place, or a function that says whether it takes a character."""
        if self._take("("):
            named = re.compile(r"\?P?<\w+>").match(self.text, self.at)
            if not named and self._take("?"):
                self._wrong("a group that is not supported")
            self.at = named.end() if named else self.at
            return self._group(flags)
        if self._take("["):
            return _takes(self._class(), flags)
        char = self.text[self.at]
        if char in "*+?":
            self._wrong("nothing to repeat")
        if char == "\\":
            found = self._escape()
            return found[1] if found[0] == "@" else _takes(f"[{found}]", flags)
        self.at += 1
        if char in "^$":
            return char if "m" in flags else "A" if char == "^" else "z"
        return _takes(char if char == "." else re.escape(char), flags)

    def _escape(self) -> str:
        """The inside of a class that an escape stands for; `@b`: a place."""
        found = _ESCAPE.match(self.text, self.at)
        if not found:
            self._wrong("an escape that is not supported")
        self.at = found.end()
        code = int(found[1] or found[2], 16) if found[1] or found[2] else int(found[3], 8) if found[3] else None
        if code is not None:
            return re.escape(chr(code)) if code < 0x110000 else self._wrong("no character")
        char = found[4]
        if char in "AzbB":
            return f"@{char}"
        if char in _SETS:
            return _SETS[char]
        if char.isalnum() and char not in "afnrtv":
            self._wrong(f"the escape \\{char}, which is not supported,")
        return f"\\{char}" if char.isascii() else char

    def _class(self) -> str:
        """The class behind a [, as Python writes it."""
        made, first = "[^" if self._take("^") else "[", True
        while first or not self._take("]"):
            first, (member, alone) = False, self._member()
            if alone and not self.text.startswith("-]", self.at) and self._take("-"):
                end, alone = self._member()
                member = f"{member}-{end}" if alone else self._wrong("a range that ends in a class")
            made += member
        return f"{made}]"

    def _member(self) -> tuple[str, bool]:
        """A member of a class, and whether it is one character."""
        if self.at >= len(self.text):
            self._wrong("a [ without ]")
        if self.text[self.at] == "\\":
            found = self._escape()
            return (found, found not in _SETS.values()) if found[0] != "@" else self._wrong("a place in a class")
        if posix := re.compile(r"\[:(\^?)(\w+):\]").match(self.text, self.at):
            if posix[1] or posix[2] not in _POSIX:
                self._wrong(f"the class {posix[0]}, which is not supported,")
            self.at = posix.end()
            return _POSIX[posix[2]], False
        self.at += 1
        return re.escape(self.text[self.at - 1]), True


def _takes(one: str, flags: str) -> Callable[[str], bool]:
    """A function that says whether a pattern for one character takes a character."""
    mode = (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0)
    try:
        match = re.compile(one, mode).fullmatch
    except re.error as e:
        raise ValueError(f"{one[:60]!r} is no class of characters: {e}") from None

    return cache(lambda char: match(char) is not None)


__all__ = ["Pattern"]

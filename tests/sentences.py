"""Varied texts, the same on every machine: 1 to 300 words, scripts, punctuation, digits, emoji, blanks, nothing at all."""

from __future__ import annotations

import random

_WORDS = (
    "a the of and to in is was he for on are with they be at one have this from or had by hot but some what there we can out "
    "other were all your when up use word how said each she which do their time if will way about many then them would write "
    "like so these her long make thing see him two has look more day could go come did my sound no most number who over know "
    "water than call first people may down side been now find any new work part take get place made live where after back "
    "little only round man year came show every good me give our under name very through just form much great think say help "
    "quantum photosynthesis Reykjavik cappuccino jurisprudence onomatopoeia antidisestablishmentarianism xylophone"
).split()
_SPECIAL = (
    "", " ", "\t\n", ".", "?!…", "1234567890", "3.14159 × 10⁻²³", "naïve café façade", "Ελληνικά και Ιστορία", "Привет, мир!",
    "日本語のテキストです。", "한국어 문장입니다", "مرحبا بالعالم", "שלום עולם",
    "👩‍👩‍👧‍👦 🚀🚀 🇺🇳", "ﬁ ligature, ½, №, ™", "e\u0301 combining a\u0308",
    "zero\u200bwidth\u00a0space\ufeff", "\x00 control \x07 chars \x1b[0m", "[CLS] [SEP] [MASK] [PAD]", "http://example.org/a?b=c&d=e#f",
    "def f(x):\n    return x**2", "<html><body>&amp;</body></html>", "A" * 300, "don't can't o'clock", "UPPER lower MiXeD",
    "\U00010348 gothic \U0001f9ec", "tab\tseparated\tvalues", "....", "-" * 80,
)  # fmt: skip


def sentences(count: int, longest: int = 300) -> list[str]:
    """`count` texts, deterministic; all special ones first, then words with lengths spread evenly on a log scale."""
    rng = random.Random(7)
    out = list(_SPECIAL[:count])
    rest = count - len(out)
    for i in range(rest):
        n = max(1, round(longest ** (i / max(1, rest - 1))))
        words = [rng.choice(_WORDS) for _ in range(n)]
        out.append(" ".join(words).capitalize() + rng.choice((".", "?", "!", "")))
    rng.shuffle(out)
    return out

"""Finds constructs that make LLVM's code generator abort the process, in the text of a module before LLVM sees it.

LLVM's verifier accepts them, because they are well-formed. Instruction selection then ends in an assertion or a fatal error,
which no exception handler can catch. Renderers avoid them by construction; if one does not, this check names the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# intrinsics of processors and the features that each needs; of an architecture, the first matching prefix counts
_NEEDS = {
    "x86": {
        "avx512bf16.cvtneps2bf16.256": ("avx512bf16", "avx512vl"), "avx512bf16.": ("avx512bf16",),
        "avx512.vpdpbusd": ("avx512vnni",), "avx512.fpclass.ps.256": ("avx512dq", "avx512vl"),
        "avx512.fpclass.": ("avx512dq",), "avx512.": ("avx512f",), "tdpbf16ps": ("amx-tile", "amx-bf16"),
        "tdpbusd": ("amx-tile", "amx-int8"), "ldtilecfg": ("amx-tile",), "tile": ("amx-tile",), "sse": (),
    },
    "aarch64": {
        "neon.bf": ("bf16",), "neon.us": ("i8mm",), "neon.ummla": ("i8mm",), "neon.smmla": ("i8mm",), "neon.sdot": ("dotprod",),
        "hint": (),
    },
}  # fmt: skip
_TRIPLES = {"x86": r"triple=(x86_64|i\d86)", "aarch64": r"triple=(aarch64|arm64)"}
_CALLED = re.compile(r"^declare .*@llvm\.(x86|aarch64)\.([\w.]+)")
_BITS_IN_MEMORY = re.compile(r"\b(?:load|store) (?:<\d+ x )?i1\b|@llvm\.masked\.(?:load|store|gather|scatter)\.v\d+i1\b")
_MOVES = re.compile(r" = bitcast |^declare |@llvm\.(?:x86\.avx512bf16|aarch64\.neon)\.")  # the only legal uses of bfloat vectors
_SCALAR_BFLOAT = re.compile(r"(?<!x )\bbfloat\b")
_HALF = re.compile(r"\bhalf\b")
_CONVERTS = re.compile(r" = (?:bitcast|fpext|fptrunc|load) ")  # the only legal uses of half without AVX512-FP16


def faults(text: str, features: Sequence[str]) -> list[str]:
    """Constructs in a module that would abort LLVM's code generator for a CPU with `features` (of a Target)."""
    triple = next((f for f in features if f.startswith("triple=")), "triple=")
    out = []
    declared = (line for kind in _NEEDS for line in _lines(text, f"@llvm.{kind}."))
    for kind, name in (found.groups() for line in declared if (found := _CALLED.search(line))):
        needs = next((needs for prefix, needs in _NEEDS[kind].items() if name.startswith(prefix)), None)
        lacks = [kind] if not re.match(_TRIPLES[kind], triple) else [f for f in needs or () if f not in features]
        if needs is None or lacks:
            out.append(f"llvm.{kind}.{name} needs {', '.join(lacks) or 'features that this check does not know'}")
    out += [f"i1 in memory: {line.strip()}" for line in _lines(text, "i1") if _BITS_IN_MEMORY.search(line)]
    narrow = [line for line in _lines(text, "bfloat") if not _MOVES.search(line) or _SCALAR_BFLOAT.search(line)]
    if "bf16" in features:  # of aarch64, whose registers hold it
        narrow = [line for line in narrow if " = fptrunc " not in line and not _MOVES.search(line)]
    halves = (line for line in _lines(text, "half") if _HALF.search(line) and "bfloat" not in line)
    native = not {"avx512fp16", "fullfp16"}.isdisjoint(features)
    narrow += [line for line in halves if not native and not _CONVERTS.search(line)]
    return out + [f"arithmetic on 16-bit floats: {line.strip()}" for line in narrow]


def _lines(text: str, word: str) -> Iterator[str]:
    """The lines that contain `word`; far faster than a regular expression, which is tried at each character of the text."""
    at = text.find(word)
    while at >= 0:
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[text.rfind("\n", 0, at) + 1 : end]
        at = text.find(word, end)

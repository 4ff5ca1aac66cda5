"""Tuning results: the tiling of each kernel, as measured, read from a file, or given in the options.

A tiling maps the tuning parameters of a kernel (rlx.driver.backend.Tunable) to values. The key of a step is made of its
operation, shapes, dtypes and target, so a tiling applies wherever the same step is compiled for the same target. No tiling
changes a result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from os import PathLike
from typing import Any

from rlx.errors import OptionError, writing
from rlx.ir.kernel import Contract, Kernel, Native
from rlx.ir.kernel_text import kernel_key
from rlx.ir.keys import key_facts
from rlx.ir.target import Target
from rlx.records import record

Tiling = Mapping[str, int]
HEAD = "rlx tuning"  # identifies the file format
FORMAT = 1
NO_TIME = "not measured: out of time"  # the next compile with this budget continues
TOO_LONG = "not measured: takes longer than the time given"  # no race was run, and the next compile got no further


def step_key(kernel: Kernel, target: Target) -> str:
    """The key of a kernel, equal for equal kernels and targets on any machine: a short description and a digest."""
    first = next(iter(kernel.body), None)
    if isinstance(first, Contract):
        a, b, acc = first.a.dtype, first.b.dtype, first.acc.dtype
        batch = prod(extent for _, extent in kernel.grid)
        step = f"contract {f'{batch} x ' if batch > 1 else ''}{first.m}x{first.n}x{first.k} {a} {b} {acc}"
    elif isinstance(first, Native):
        step = f"{first.op} {' '.join('x'.join(map(str, dims)) for dims in (*first.results, *(v.dims for v in first.inputs)))}"
    else:
        step = f"loops {' '.join(f'{b.dtype}[{b.size}]' for b in kernel.buffers)}"
    given = repr((key_facts(target), kernel_key(kernel)))
    return f"{step}, {target.threads} threads, {hashlib.sha256(given.encode()).hexdigest()[:16]}"


@record(repr=False)
class Tilings:
    """Step key -> tiling, hashable, in order of keys."""

    steps: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]

    @staticmethod
    def of(given: Any) -> Tilings:
        """From a Tuning, a mapping of mappings, or the path of a file that Tuning.save wrote. OptionError: it is none of them."""
        if isinstance(given, Tilings):
            return given
        if isinstance(given, (str, PathLike)):
            return Tilings.of(_read(given))
        found = given.tilings if isinstance(given, Tuning) else given
        if not isinstance(found, Mapping) or not all(isinstance(c, Mapping) for c in found.values()):
            raise OptionError(f"tune maps step keys to tilings, as report().tuning.tilings does; got {str(given)[:80]!r}")
        for key, tiling in found.items():
            if not isinstance(key, str) or not all(isinstance(n, str) and type(v) is int for n, v in tiling.items()):
                raise OptionError(f"tune: a tiling maps names to whole numbers; step {key!r} has {dict(tiling)!r}")
        return Tilings(tuple((key, tuple(sorted(found[key].items()))) for key in sorted(found)))

    def __repr__(self) -> str:
        return f"<tilings for {len(self.steps)} steps, {hashlib.sha256(repr(self.steps).encode()).hexdigest()[:16]}>"


@record
class TunedStep:
    """The tuning of one step. `tiling`: all parameters that affect its code; () for the defaults. `how`: "measured", "kept"
    (measured by an earlier compile), "given", or the reason why there is no tiling. Times are nanoseconds per step, 0: unknown;
    `tried`: number of measured candidates."""

    key: str
    how: str
    tiling: tuple[tuple[str, int], ...] = ()
    default: tuple[tuple[str, int], ...] = ()
    default_ns: int = 0
    tiling_ns: int = 0
    tried: int = 0

    def __str__(self) -> str:
        changes = [f"{n} {value} for {old}" for (n, value), (_, old) in zip(self.tiling, self.default) if value != old]
        values = ", ".join(changes) or "default tiling"
        times = f", {self.default_ns / 1e3:.1f} -> {self.tiling_ns / 1e3:.1f} us" if changes and self.default_ns else ""
        return f"{self.key}: {values}{times} ({self.how}{f', {self.tried} tried' if self.tried else ''})"


@record
class Tuning:
    """The tuning of a program's steps. `why`: the reason why nothing was tuned; "" if it was tuned."""

    steps: tuple[TunedStep, ...] = ()
    why: str = "not asked for"

    @property
    def unfinished(self) -> int:
        """Steps left to measure: the next compile with the same budget continues with them."""
        return sum(s.how == NO_TIME for s in self.steps)

    @property
    def tilings(self) -> dict[str, dict[str, int]]:
        """The tilings of all steps: pass them as CompileOptions(tune=…) to get the same code later or on another machine."""
        return {s.key: dict(s.tiling) for s in self.steps if s.tiling}

    def save(self, path: str | PathLike[str]) -> None:
        """The tilings as a JSON file, whose path CompileOptions(tune=…) takes. OptionError: it cannot be written."""
        with writing(path) as place, open(place, "w", encoding="utf-8") as file:
            file.write(json.dumps({HEAD: FORMAT, "steps": self.tilings}, indent=1) + "\n")

    def __str__(self) -> str:
        changed = sum(s.tiling != s.default for s in self.steps)
        head = f"tuning: {self.why or f'{changed} of {len(self.steps)} distinct steps have another tiling than the default'}"
        return "\n".join([head, *(f"  {s}" for s in self.steps)])


NOT_TUNED = Tuning()


def _read(path: str | PathLike[str]) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as e:
        raise OptionError(f"tune={str(path)!r}: cannot read tilings from there: {e}") from e
    version = found.get(HEAD) if isinstance(found, dict) else None
    if type(version) is not int or version != FORMAT or not isinstance(found.get("steps"), dict):
        raise OptionError(f"tune={str(path)!r} is no file of tilings, format {FORMAT}; report().tuning.save(path) writes one")
    return found["steps"]

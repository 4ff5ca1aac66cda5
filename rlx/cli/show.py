"""Output of the command `rlx`, as rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlx.cli.options import printable
from rlx.ir.shown import sized

if TYPE_CHECKING:
    from rlx.frontends.embedding import EmbeddingModel

_out = Console(highlight=False)


def similarities(texts: list[str], vectors: np.ndarray) -> None:
    """Cosine of every pair of texts."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    room = _out.width - 8 * len(texts) - 4  # a number takes 5 columns, its frame 3
    columns = [Column(str(i + 1), justify="right", min_width=5, no_wrap=True) for i in range(len(texts))]
    table = Table(
        Column("text", max_width=max(room, 10), no_wrap=True), *columns, title="cosine similarity", title_justify="left"
    )
    for i, text in enumerate(texts):
        table.add_row(_plain(f"{i + 1} {text}"), *(f"{c:.2f}" for c in unit[i] @ unit.T))
    _out.print(table)


def vector(numbers: np.ndarray, most: int = 6) -> None:
    """The first of the numbers, and how many there are."""
    first = ", ".join(f"{x:.4f}" for x in numbers[:most])
    _out.print(f"[{first}{', ...' if len(numbers) > most else ''}]  {len(numbers)} numbers", markup=False)


def _plain(text: str) -> Text:
    """Literal text: brackets are not markup, and control characters are replaced."""
    return Text(printable(text))


def summary(model: EmbeddingModel, n: int, first: float, warm: float | None, output: Path | None) -> None:
    """`first`: seconds of the first pass, compilation included. `warm`: seconds of a later pass over the same texts."""
    _out.print(f"{n} text{'s' * (n != 1)} -> float32 [{n}, {model.dim}] in {first:.2f} s, compilation included")
    if warm is not None:
        _out.print(f"once compiled: {warm / n * 1e3:.2f} ms per text")
    rows, length = max(model.shapes, key=lambda s: s[0] * s[1])
    planned = ", ".join(f"{what} {sized(nbytes)}" for what, nbytes in model.memory(rows, length).items() if nbytes)
    _out.print(f"memory planned for {rows} x {length} tokens: {planned}")
    if output is not None:
        _out.print(_plain(f"written to {output}"))


def account(seconds: dict[str, float]) -> None:
    """Time per phase, in the order of execution."""
    table = Table("phase", Column("ms", justify="right"), title="where the time went", title_justify="left")
    for phase, spent in seconds.items():
        table.add_row(phase, f"{spent * 1e3:.1f}")
    table.add_row("sum", f"{sum(seconds.values()) * 1e3:.1f}", style="bold")
    _out.print(table)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table with numbers and sizes to the right."""
    made = Table(title=title, title_justify="left")
    rows = [tuple(row) for row in rows]
    for at, name in enumerate(columns):
        right = at > 0 and all(str(row[at])[:1].isdigit() for row in rows)
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(_plain(f"{x:,}" if type(x) is int else str(x)) for x in row))
    _out.print(made)


def devices() -> None:
    """Every device, with the reason if it is not usable here."""
    from rlx.backends import available, get

    rows = []
    for name, reason in available().items():
        kind, _, index = name.partition(":")
        title = getattr(get(kind), "title", None) if reason is None else None
        yes = f"yes: {title(int(index))}" if title else "yes"
        rows.append((name, yes if reason is None else f"no: {reason}"))
    table("", ("device", "usable here"), rows)


def cache(clear: bool) -> None:
    """The location and size of the cache on disk. `clear`: empty it first."""
    from rlx.host.disk import disk_cache

    kept, why = disk_cache()
    if kept is None:
        _out.print(_plain(f"nothing is kept on disk: {why}"))
        return
    if clear:
        _out.print(f"{kept.clear()} entries removed")
    entries = kept.entries()
    programs = [e for e in entries if e.name.startswith("program-")]
    used = f"{sized(sum(e.nbytes for e in entries))} of {sized(kept.max_bytes)}"
    _out.print(_plain(kept.folder))
    tuned = [e for e in entries if e.name.startswith("tuning-")]
    kernels = f"kernels: {len(entries) - len(programs) - len(tuned)}{f', tuned steps: {len(tuned)}' if tuned else ''}"
    _out.print(_plain(f"programs: {len(programs)}, {kernels}, {used}"))


def knobs() -> None:
    """Every environment variable that rlx reads, with its value."""
    from rlx.knobs import KNOBS

    rows = [(knob.env, str(knob.get()), str(knob.default), knob.help) for knob in KNOBS]
    table("", ("variable", "value", "default", "what it does"), rows)

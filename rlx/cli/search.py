"""`rlx search FOLDER QUERY`: the passages of a folder's text files that are closest to a query."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars

if TYPE_CHECKING:
    from rlx.frontends.search import Changes

NAMED = 3  # skipped files that are named, of each kind


def search(
    folder: Annotated[Path, typer.Argument(help="Folder of text files.", metavar="FOLDER", show_default=False)],
    query: Annotated[str, typer.Argument(help="What to search for, in your own words.", metavar="QUERY", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="Passages to print.")] = 5,
    glob: Annotated[list[str] | None, typer.Option(help="Only files that match, as '*.md'; can be given several times.")] = None,
    model: o.Encoder = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
) -> None:
    """Search the text files of a folder by meaning, and print the best passages.

    The vectors of all passages are kept in FOLDER/.rlx-search; later searches embed only files that changed.

    Examples:

        rlx search notes "how do I undo a commit"

        rlx search src "where are sizes of files checked" --glob "*.py" --top 10
    """
    from rlx.frontends.search import TextIndex, checked_folder, checked_query

    with o.usage():
        checked_query(query)
    with Bars() as bars:
        index = TextIndex(checked_folder(folder), o.open_encoder(model, bars, device, threads, tune))
        changes = index.update(glob or (), bars.files)
        found = index.search(query, top, glob or ())
    _tell(changes)
    if not found:
        print(f"rlx: {folder} has no text to search{' in files that match' if glob else ''}", file=sys.stderr)
        raise typer.Exit(1)
    for passage in found:
        print(o.printable(f"{folder / passage.path}:{passage.line}  {passage.score:.3f}"))
        print("    " + o.printable(shorten(passage.text, 300, placeholder=" …")))


def _tell(changes: Changes) -> None:
    """Say on stderr what was not searched."""
    if changes.why:
        print(f"rlx: {changes.why}", file=sys.stderr)
    reasons: dict[str, list[str]] = defaultdict(list)
    for path, reason in changes.skipped.items():
        reasons[reason].append(path)
    for reason, paths in sorted(reasons.items()):
        names = ", ".join(paths[:NAMED]) + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")
        print(o.printable(f"rlx: skipped, {reason}: {names}"), file=sys.stderr)

"""Progress bars of the commands, on stderr. They are silent if stderr is no terminal, and leave nothing behind."""

from __future__ import annotations

import sys
from typing import Any

from rlx.ir.shown import sized


class Bars:
    """A bar for each kind of work under way. As a context manager, it ends them also after errors and Ctrl-C."""

    def __init__(self) -> None:
        self._shown: Any = None  # rich.progress.Progress, while there are bars
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.clear()
        if self._shown is not None:
            self._shown.stop()
            self._shown = None

    def show(self, work: str, done: int, total: int, count: str = "", detail: str = "") -> None:
        """`done` of `total` of this `work`; the bar ends when all is done. `count`: both as text."""
        if (done >= total and work not in self._tasks) or not sys.stderr.isatty():
            return
        if self._shown is None:
            self._shown = _started()
        if work not in self._tasks:
            self._tasks[work] = self._shown.add_task(work, total=total, count="")
        label = f"{work} {detail}".strip()
        self._shown.update(self._tasks[work], completed=done, total=total, description=label, count=count or f"{done}/{total}")
        if done >= total:
            self._shown.refresh()
            self._shown.remove_task(self._tasks.pop(work))
            if not self._tasks:
                self.__exit__()

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights, as LanguageModel counts them."""
        self.show("loading", done, total, f"{sized(done)} of {sized(total)}")

    def step(self, done: int, total: int, step: str) -> None:
        """Kernels compiled, and steps measured, as Session counts them."""
        work, _, detail = step.partition(" ")
        self.show(work, done, total, detail=detail.partition(",")[0])

    def texts(self, done: int, total: int) -> None:
        """Texts embedded."""
        self.show("embedding", done, total)

    def files(self, done: int, total: int) -> None:
        """Bytes of files embedded."""
        self.show("embedding", done, total, f"{sized(done)} of {sized(total)}")


def _started() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    label, count = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}")
    columns = label, BarColumn(), TaskProgressColumn(), count
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.start()
    return shown

"""`--tune`: the option, and a bar on a terminal's stderr while steps are measured; elsewhere nothing is shown."""

from __future__ import annotations

import sys
from typing import Any

import typer

Tune = typer.Option(
    min=0, help="Seconds to spend on measuring how kernels are best cut here; kept for later.", show_default="0: as usual"
)


class TuningBar:
    """One bar at a time: each compile that measures something has its own."""

    def __init__(self) -> None:
        self._bar: Any = None

    def progress(self, done: int, total: int, step: str) -> None:
        if self._bar is None and total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("tuning", total=total)
        if self._bar is not None:
            what = f"tuning {step.partition(',')[0]}"
            self._bar.update(self._task, completed=done, description=what)
            if not step:
                self._bar.stop()
                self._bar = None

"""Options that several commands have; with `--tune`, a progress bar on stderr while steps are measured, if it is a terminal."""

from __future__ import annotations

import sys
from typing import Any

import typer

DeviceName = typer.Option("--device", help="Device to run on, such as cpu, cuda or cuda:1; `rlx devices` lists them.")
Threads = typer.Option(min=1, help="Threads of the CPU device.", show_default="all allowed")
Tune = typer.Option(
    min=0, help="Seconds to spend on autotuning kernels; results are kept on disk.", show_default="0: default tilings"
)


class TuningBar:
    """One progress bar for each compile that measures steps."""

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
            self._bar.update(self._task, completed=done, description=f"tuning {step.partition(',')[0]}")
            if not step:
                self._bar.stop()
                self._bar = None

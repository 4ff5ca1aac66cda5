"""`Uncollected`: for work that makes many objects and little garbage."""

from __future__ import annotations

import gc


class Uncollected:
    """No garbage is collected within it."""

    def __init__(self, stays: bool = False) -> None:
        """`stays`: all that is made there, so it counts as old afterwards: the next collection of young objects would look at
        each of them, which takes as long as several imports. Of what is dropped sooner, garbage would stay for long."""
        self._stays = stays

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            if self._stays and not gc.get_freeze_count():  # else the program keeps objects frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


__all__ = ["Uncollected"]

"""`Uncollected`: for work that makes many objects that stay, and little garbage."""

from __future__ import annotations

import gc


class Uncollected:
    """No garbage is collected within it. The objects made there count as old ones afterwards: the next collection of young ones
    would look at each of them, which takes as long as several imports."""

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            if not gc.get_freeze_count():  # else the program keeps objects frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


__all__ = ["Uncollected"]

"""A model's time by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Seconds(defaultdict[str, float]):
    """Phase -> seconds spent in it so far."""

    def __init__(self) -> None:
        super().__init__(float)

    @contextmanager
    def spent(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`, even if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self[phase] += time.perf_counter() - start

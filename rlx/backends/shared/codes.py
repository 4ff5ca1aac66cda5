"""A cache of compiled kernels: equal kernels, in one program or in several, share their code."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import kernel_key

KEPT = 256  # kernels whose code stays cached in this process: compiling a graph for other sizes reuses many of them
Code = TypeVar("Code")


class Codes(Generic[Code]):
    """LRU cache of code by kernel_key, with `kept` entries. `make` compiles the missing kernels in one batch, and gets the
    `progress` of the call too, if there is one."""

    def __init__(self, make: Callable[..., Sequence[Code]], kept: int = KEPT) -> None:
        self._make, self._kept, self._lock = make, kept, threading.Lock()
        self._codes: OrderedDict[str, Code] = OrderedDict()

    def of(self, kernels: Iterable[Kernel]) -> dict[str, Code]:
        """The code of each kernel, by its key."""
        return self.of_keys({kernel_key(kernel): kernel for kernel in {id(x): x for x in kernels}.values()})

    def of_keys(self, wanted: Mapping[str, Any], progress: Callable[[int, int], None] | None = None) -> dict[str, Code]:
        """The code of anything that `make` takes, by a key that says all of it."""
        with self._lock:
            found = {key: self._codes[key] for key in wanted if key in self._codes}
            missing = [(key, kernel) for key, kernel in wanted.items() if key not in found]
            made = self._make(missing, *([progress] if progress else [])) if missing else ()
            found |= zip((key for key, _ in missing), made, strict=True)
            for key in wanted:
                self._codes[key] = found[key]
                self._codes.move_to_end(key)
            while len(self._codes) > self._kept:
                self._codes.popitem(last=False)
        return found


def whole(numbers: Sequence[Any]) -> list[int]:
    """Check numbers read from a file. ValueError: one is not an integer, is negative, or does not fit machine code's."""
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"{str(numbers)[:80]} are not whole numbers")
    return list(numbers)

"""Machine code of equal text is made once in a run of the tests, by whichever process needs it first.

Tests of one network on several paths, and workers beside each other, compile the same kernels. The code follows from what these
functions are given: text and machine. Tests of the compilers themselves take the fixture `own_compilers`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import ModuleType
from typing import Any

FOLDER = "RLX_TEST_CODE"
OWN: dict[ModuleType, tuple[str, Callable[..., bytes]]] = {}  # the compilers without the folder, by module
_made = ""  # the folder, in the process that has made it


def once(make: Callable[..., bytes]) -> Callable[..., bytes]:
    """`make`, whose results are kept in the folder by its arguments. Faults are raised each time."""

    @wraps(make)
    def kept(*args: Any, **named: Any) -> bytes:
        given = repr((make.__module__, args, named))
        path = f"{os.environ[FOLDER]}/{hashlib.sha256(given.encode()).hexdigest()}"
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            return file.read()
        made, part = make(*args, **named), f"{path}.{os.urandom(8).hex()}"
        with open(part, "wb") as file:
            file.write(made)
        os.rename(part, path)  # other processes see all of it or nothing
        return made

    return kept


def share() -> None:
    """Make the folder, in the first process, and use it, before tests import the functions by name."""
    global _made
    from rlx.backends.cuda import code as cuda_code
    from rlx.host import llvm

    if FOLDER not in os.environ:
        os.environ[FOLDER] = _made = tempfile.mkdtemp(prefix="rlx-code-")
    for module, name in ((llvm, "code"), (cuda_code, "cubin")):
        OWN[module] = name, getattr(module, name)
        setattr(module, name, once(getattr(module, name)))


def remove() -> None:
    if _made:
        shutil.rmtree(_made, ignore_errors=True)

"""Bytecode where none may be written beside the sources (PYTHONDONTWRITEBYTECODE): one folder for all processes of a run.

Hundreds of processes that tests start would compile the package first, and each worker of pytest-xdist all files of tests, of
which pytest rewrites the assertions.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

NONE, PREFIX, SHARED = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "RLX_TEST_BYTECODE"
HERE = Path(__file__).parent
OURS = {"rlx", "tests", "benchmarks", *(file.stem for file in HERE.glob("*.py"))}
_made = ""  # the folder, in the process that has made it


class _Ours(MetaPathFinder):
    """Finds nothing. Before each import, it says where bytecode is: of the tree in the shared folder, of libraries where they
    were installed, since compiling those takes longer than the tests of some files."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        ours = name.partition(".")[0] in OURS
        sys.pycache_prefix, sys.dont_write_bytecode = (os.environ[SHARED], False) if ours else (None, True)


def share() -> None:
    """Make the folder, in the first process, and use it: for processes that are started from here all bytecode is there."""
    global _made
    if not sys.dont_write_bytecode or PREFIX in os.environ:
        return
    if SHARED not in os.environ:
        os.environ[SHARED] = _made = tempfile.mkdtemp(prefix="rlx-bytecode-")
    os.environ[PREFIX] = os.environ[SHARED]
    os.environ.pop(NONE, None)
    sys.meta_path.insert(0, _Ours())


def link_libraries() -> None:
    """Processes started from here look for all bytecode in the shared folder, and would compile two thousand files of libraries:
    it gets links to the bytecode of those packages that this process has imported."""
    if SHARED not in os.environ:
        return
    imported = defaultdict[str, set[str]](set)  # folder -> modules
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.partition(".")[0] not in OURS and spec and spec.has_location and spec.origin:
            folder, _, file = spec.origin.rpartition("/")
            imported[folder].add(file.removesuffix(".py"))
    for folder, modules in imported.items():
        place, compiled = f"{os.environ[SHARED]}{folder}", f"{folder}/__pycache__"
        os.makedirs(place, exist_ok=True)
        for file in os.listdir(compiled) if os.path.isdir(compiled) else ():
            if file.partition(".")[0] in modules:
                with suppress(OSError):  # it is there, or the library is on another disk
                    os.link(f"{compiled}/{file}", f"{place}/{file}")


def copied(folder: Path, copy: Path) -> None:
    """A tree was copied with the times of its files: the bytecode of one is that of the other."""
    if SHARED in os.environ:
        shared = os.environ[SHARED]
        shutil.copytree(f"{shared}{folder}", f"{shared}{copy}", copy_function=os.link, dirs_exist_ok=True)


def before_workers() -> None:
    """Workers of pytest-xdist start as this process did."""
    if _made:
        del os.environ[PREFIX]
        os.environ[NONE] = "1"


def remove() -> None:
    if _made:
        shutil.rmtree(_made, ignore_errors=True)


def import_part(worker: int, workers: int, args: Sequence[str]) -> None:
    """In a worker, before it collects all tests: import every n-th file, others than the other workers. So they rewrite each file
    once between them, and not once each. `args`: of pytest; where they name files, nothing is gained."""
    written = SHARED in os.environ or not sys.dont_write_bytecode
    if not written or any(Path(arg.partition("::")[0]).is_file() for arg in args):
        return
    for file in sorted(HERE.glob("test_*.py"))[worker::workers]:
        with suppress(Exception, pytest.skip.Exception):  # the collection will say so
            importlib.import_module(file.stem)

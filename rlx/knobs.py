"""Every environment variable that rlx reads, in one table. Knobs are for debugging; programs use CompileOptions.

A variable is read at each use, so that it can be set after `import rlx`. `override` sets variables for one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from rlx.errors import OptionError, known
from rlx.records import record

T = TypeVar("T", int, str)


@record
class Knob(Generic[T]):
    """One variable. Its type is the type of its default."""

    env: str
    default: T
    help: str

    def get(self) -> T:
        """The overridden value, else the environment's, else the default. OptionError if it does not parse."""
        if self.env in _overrides:
            return type(self.default)(_overrides[self.env])
        text = os.environ.get(self.env, "")
        if not text:
            return self.default
        if isinstance(self.default, int) and not text.strip().isdecimal():
            raise OptionError(f"environment variable {self.env} is {text!r}, expected a number of at least 0: {self.help}")
        return type(self.default)(text)


_overrides: dict[str, int | str] = {}

DEBUG = Knob("RLX_DEBUG", 0, "print at each compile: 1 its report, 2 also the graph after each pass, 3 also the generated code")
DUMP = Knob("RLX_DUMP", "", "folder for the graph after each pass, unless a compile's options name one")
THREADS = Knob("RLX_THREADS", 0, "default number of threads of a compile; 0: as many as this process may use")
AMX = Knob("RLX_AMX", 1, "0: contractions do not use AMX, the CPU's matrix unit; read at the first use of the CPU device")
CACHE = Knob("RLX_CACHE", 1, "1: cache compiled code on disk for later processes; 0: neither read nor write it")
CACHE_DIR = Knob("RLX_CACHE_DIR", "", "folder of the cache; default: rlx in XDG_CACHE_HOME, which is ~/.cache if not set")
CACHE_MB = Knob("RLX_CACHE_MB", 1024, "maximum MB of the cache; least recently used entries are evicted first")
CALLS = Knob("RLX_CALLS", "native", "run, run_slots and bound: native (machine code, if this Python is supported) or python")
CC = Knob("RLX_CC", "cc", "C compiler for compiled.export_c")
JOB = Knob("RLX_JOB", "", "set by rlx launch: the name of the group of ranks, by which they connect")
RANK = Knob("RLX_RANK", 0, "set by rlx launch: the rank of this process, from 0")
RANKS = Knob("RLX_RANKS", 1, "set by rlx launch: the number of ranks")

KNOBS: tuple[Knob[int] | Knob[str], ...] = (DEBUG, DUMP, THREADS, AMX, CALLS, CACHE, CACHE_DIR, CACHE_MB, CC, JOB, RANK, RANKS)

# The number of processes, as other launchers set it: Open MPI; MPICH and Intel MPI; MVAPICH; srun. SLURM_NTASKS is not used: it
# is also set in a batch script, which is one process.
OTHERS_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def ranks_by_others() -> tuple[str, int] | None:
    """If an MPI launcher started this process: the variable that shows it, and the number of ranks (0: unknown). Else None."""
    for name in OTHERS_RANKS:
        if (text := os.environ.get(name, "")).isdecimal():
            return name, int(text)
    return ("PMIX_RANK", 0) if "PMIX_RANK" in os.environ else None


@contextmanager
def unless_set(name: str, value: str) -> Iterator[None]:
    """An environment variable has this value meanwhile, unless it has one."""
    kept = os.environ.get(name)
    os.environ[name] = kept or value
    try:
        yield
    finally:
        if not kept:
            del os.environ[name]


def environment(**values: object) -> dict[str, str]:
    """This process's environment with these variables added, for a child process."""
    return {**os.environ, **{name: str(value) for name, value in values.items()}}


def drop_columns() -> None:
    """Remove COLUMNS if it is 0 or blank: libraries would print nothing."""
    if not os.environ.get("COLUMNS", "1").strip("0 "):
        del os.environ["COLUMNS"]


def cache_folder() -> str:
    """The folder of the disk cache: CACHE_DIR, else by the XDG base directory rules. "": there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return CACHE_DIR.get() or (os.path.join(base, "rlx") if os.path.isabs(base) else "")


def hub_folder() -> str:
    """The folder in which huggingface_hub keeps models, by its own variables."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.expanduser(os.path.expandvars(folder))


@contextmanager
def override(**values: int | str) -> Iterator[None]:
    """Within the block, the named variables have these values, regardless of the environment: override(RLX_DEBUG=3)."""
    by_env = {knob.env: knob for knob in KNOBS}
    for env, value in values.items():
        if env not in by_env:
            raise OptionError(f"there is no knob {env!r}; knobs: {known(by_env)}")
        if not isinstance(value, type(by_env[env].default)):
            raise OptionError(f"knob {env} takes {type(by_env[env].default).__name__}, got {value!r}")
    before = dict(_overrides)
    _overrides.update(values)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)

"""CompileOptions: everything a caller may ask of the compiler. Frozen, hashable, printable: part of every cache key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from math import inf
from os import PathLike
from typing import Any

import numpy as np

from rlx.errors import OptionError, as_path, flag, items, known, whole
from rlx.ir.handle import BufferHandle
from rlx.ir.kernel import Kernel
from rlx.ir.keys import UNSEEN, key_facts
from rlx.ir.tuning import Tilings, Tuning
from rlx.records import record

PRECISIONS = ("f32", "tf32", "f16", "bf16", "int8", "auto")
OPTIONAL_PASSES = (
    "canonicalise", "tidy", "scores", "folding", "channels_last", "fuse", "operands", "followers", "quantised", "inplace",
    "reuse", "concurrent", "control", "within", "factors",
)  # fmt: skip
RENAMED_PASSES = {"beside": "concurrent"}
TUNE_SECONDS = 10.0  # tuning time per compile with tune=True
AUTO = "auto"  # the size of a dim that is left open
Foresee = Callable[[Kernel, bool], None]  # see rlx.compiler.lower
ALIGNMENTS = tuple(1 << n for n in range(6, 31))  # bytes: from one AVX-512 register, one cache line, to one huge page


@record
class CompileOptions:
    """Options of a compile. Bad values raise OptionError when the options are made.

    precision: "f32" computes as declared; "tf32" as well, but contractions of f32 may round their operands to 10 bits of
    fraction, which a GPU does and the CPU does not; "f16" and "bf16" run contractions on that dtype with f32 accumulation,
    and round the values that convolutions read, outputs too; "auto" does so with bf16 where the target is fast at it. "int8":
    contractions with weights run on 8-bit integers, scaled per row (convolutions: per image) and per column
    (rlx.compiler.int8), attention as by "auto", the others as declared. `disable`: names of passes to leave out. `alignment`:
    bytes between buffer starts, None: the target's. `dims`: values of named dims; one may be "auto" (rlx.compile). `extent`:
    a named dim that stays active, and the most it can be in a run. `handles`: states the caller will bind. `threads`: None:
    as many as the process may use. `deterministic`: True, as every run of a graph gives the same bits at a given number of
    threads; False is refused, as nothing would be faster for it. `checked`: raise NumericsError where a NaN appears. `debug`:
    guard stale views. `verbose`: keep and print the text of every stage. `dump`: folder that receives it. `tune`: True, or
    the number of seconds a compile may spend on tuning the tiling of kernels on this machine (see README); or earlier
    tilings: a report's `tuning`, its `tilings`, or the path of a file of them. Results are the same bits.
    """

    precision: str = "f32"
    disable: tuple[str, ...] | Iterable[str] = ()
    alignment: int | None = None
    dims: tuple[tuple[str, int | str], ...] | Mapping[str, int | str] = ()
    extent: tuple[str, int] | None = None
    handles: tuple[BufferHandle, ...] = ()
    threads: int | None = None
    deterministic: bool = True
    checked: bool = False
    debug: bool = field(default=False, metadata=UNSEEN)
    verbose: bool = field(default=False, metadata=UNSEEN)
    dump: str | PathLike[str] | None = field(default=None, metadata=UNSEEN)
    tune: bool | float | Tilings | Tuning | Mapping[str, Mapping[str, int]] | str | PathLike[str] = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            raise OptionError(f"precision={self.precision!r} is not a policy; choose one of {known(PRECISIONS)}")
        for name in ("checked", "debug", "verbose"):
            flag(name, getattr(self, name))
        if self.deterministic is not True:
            raise OptionError(
                f"deterministic={self.deterministic!r}: runs always give the same bits, and none is faster without; leave it out"
            )
        if self.threads is not None and whole("threads", self.threads) < 1:
            raise OptionError(f"threads={self.threads}: give at least 1, or None for all that the process may use")
        if (a := self.alignment) is not None and whole("alignment", a) not in ALIGNMENTS:
            raise OptionError(f"alignment={a}: give a power of two from {ALIGNMENTS[0]} to {ALIGNMENTS[-1]} bytes, or None")
        normal = {
            "disable": _pass_names(self.disable),
            "dims": _dim_values(self.dims),
            "extent": _active(self.extent, self.dims),
            "handles": _handles(self.handles),
            "dump": None if self.dump is None else as_path(self.dump, "dump"),
            "tune": _tuned(self.tune),
        }
        vars(self).update(normal)  # the record is frozen from here on

    def __str__(self) -> str:
        shown = [f"{k}={v!r}" for k, v in vars(self).items() if v != getattr(CompileOptions, k, None)]
        return f"CompileOptions({', '.join(shown)})"

    def replace(self, **changes: Any) -> CompileOptions:
        """The same options with these fields changed."""
        if extra := sorted(set(changes) - set(vars(self))):
            raise OptionError(f"no option is called {', '.join(extra)}; there are {known(vars(self))}")
        return replace(self, **changes)

    def bind_handle(self, handle: BufferHandle) -> CompileOptions:
        """With `handle` among the states that the caller binds."""
        return replace(self, handles=(*self.handles, handle))

    def bind_dims(self, binding: Mapping[str, int] | None = None, **dims: int) -> CompileOptions:
        """With values for named dims, added to the existing ones; a later value replaces an earlier one."""
        return replace(self, dims={**self.binding, **dict(_dim_values(() if binding is None else binding)), **dims})

    def bind_extent(self, name: str, upper: int) -> CompileOptions:
        """With the named dim bound to its upper bound, and active: CompiledGraph.set_active_extent sets the number of valid rows
        for the following runs. The contents of the other rows do not affect results."""
        return replace(self, extent=(name, upper))

    @property
    def open_dim(self) -> str | None:
        """The dim that is "auto"."""
        return next((name for name, value in self.dims if value == AUTO), None)

    @property
    def closed(self) -> CompileOptions:
        """Without the open dim."""
        return replace(self, dims=dict(self._fixed))

    @property
    def _fixed(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, value) for name, value in self.dims if value != AUTO)  # type: ignore[misc]

    @property
    def binding(self) -> dict[str, int]:
        """Values of named dims, by name."""
        return dict((*self._fixed, *(() if self.extent is None else (self.extent,))))  # type: ignore[arg-type]

    @property
    def wants_text(self) -> bool:
        """True if the texts of the stages are needed."""
        return self.verbose or self.dump is not None

    @property
    def key(self) -> str:
        """Text of the options that can change compiled code, equal across processes: for cache keys."""
        return repr(key_facts(self))


def _pass_names(names: Any) -> tuple[str, ...]:
    names = items(f"disable is a collection of pass names, of {known(OPTIONAL_PASSES)}", names, OptionError)
    if wrong := [n for n in names if n not in OPTIONAL_PASSES]:
        renamed = "".join(f"; {old!r} is now called {new!r}" for old, new in RENAMED_PASSES.items() if old in wrong)
        raise OptionError(f"disable={wrong}: not passes that can be left out; those are {known(OPTIONAL_PASSES)}{renamed}")
    return tuple(sorted(set(names)))


def _dim_values(dims: Any) -> tuple[tuple[str, int | str], ...]:
    try:
        given = dict(dims)
    except (TypeError, ValueError):
        raise OptionError(f"dims maps names to sizes, as {{'batch': 8}}; got {dims!r}") from None
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"dims: a dim's name is an identifier, got {name!r}")
        if isinstance(value, str) and value != AUTO:
            raise OptionError(f"dims[{name!r}]={value!r}: a size is a number, or 'auto'")
        if not isinstance(value, str):
            given[name] = whole(f"dims[{name!r}]", value, 0)
    if len(found := [name for name, value in given.items() if value == AUTO]) > 1:
        raise OptionError(f"dims: one dim can be 'auto', got {', '.join(found)}")
    return tuple(sorted(given.items()))


def _active(extent: Any, dims: Any) -> tuple[str, int] | None:
    if extent is None:
        return None
    if not isinstance(extent, tuple) or len(extent) != 2 or not isinstance(extent[0], str):
        raise OptionError(f"extent is (name, upper bound), as ('seq', 128); got {extent!r}")
    ((name, upper),) = _dim_values({extent[0]: extent[1]})
    if isinstance(upper, str):
        raise OptionError(f"extent={extent}: the upper bound is a number")
    if upper < 1 or dict(dims).get(name, upper) != upper:
        raise OptionError(f"extent={extent}: " + ("a row at least" if upper < 1 else f"dims bind {name!r} to another value"))
    return name, upper


def _tuned(tune: Any) -> float | Tilings:
    """Seconds to spend, or tilings."""
    if isinstance(tune, (bool, np.bool_)):
        return TUNE_SECONDS * tune
    if not isinstance(tune, (int, float, np.number)):
        return Tilings.of(tune)
    if not 0 <= tune < inf:
        raise OptionError(f"tune={tune!r}: give the seconds to spend, True for {TUNE_SECONDS:g}, or tilings made before")
    return float(tune)


def _handles(handles: Any) -> tuple[BufferHandle, ...]:
    by_name: dict[str, BufferHandle] = {}
    for handle in items("handles are BufferHandles", handles, OptionError):
        if not isinstance(handle, BufferHandle):
            raise OptionError(f"handles are BufferHandles, got {handle!r}")
        other = by_name.setdefault(handle.name, handle)
        if other != handle:
            raise OptionError(f"handle {handle.name!r} is bound as {other.shape} and as {handle.shape}; use two names")
    return tuple(by_name.values())

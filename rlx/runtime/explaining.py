"""Information about a compiled graph, for reports and the page (rlx.explain)."""

from __future__ import annotations

import platform
import sys
from os import PathLike
from typing import Any

import numpy as np

from rlx.backends import backend_of
from rlx.driver.backend import Assembling, Storable, Tunable
from rlx.errors import MissingParamError, OptionError, Unsupported, as_path
from rlx.explain.profile import Profile, write


def described(compiled: Any, profile: Profile | None = None, unmeasured: str = "") -> dict[str, Any]:
    """The report of a CompiledGraph as data."""
    from rlx.explain.report import Compiled, report_data  # on first use: it needs the passes

    if not isinstance(profile, (Profile, type(None))):
        raise OptionError(f"a profile is what CompiledGraph.profile returns, got {type(profile).__name__}")
    report, program, backend = compiled._report, compiled.program(), backend_of(compiled.device)
    read = backend.assembly if isinstance(backend, Assembling) else lambda text, target: ""
    made: dict[str, str] = {}  # text -> assembly: labels share texts
    assembly = {label: made.setdefault(text, "") or read(text, program.target) for label, text in report.texts.items()}
    versions = {"rlx": sys.modules["rlx"].__version__, "numpy": np.__version__}
    if isinstance(backend, Storable):
        versions["compiler"] = backend.compiler()
    tuned = [{"step": s.key, "how": s.how, "tiling": dict(s.tiling), "default": dict(s.default)} for s in report.tuning.steps]
    facts = Compiled(
        program, str(compiled.device), compiled.options, compiled._executable.memory(),
        frozenset(compiled.params.store.entries), report.texts, assembly, versions,
        _machine(backend, compiled.device.index),
        {"seconds": dict(report.seconds), "cache": report.cache.state, "why": report.cache.why, "tuning": tuned},
    )  # fmt: skip
    return report_data(facts, compiled._origins(), profile, unmeasured)


def _machine(backend: Any, index: int) -> str:
    """The GPU, or else the processor."""
    title = getattr(backend, "title", None)
    machine = backend.machine() if isinstance(backend, Tunable) else platform.processor() or platform.machine()
    return title(index) if title else machine


def explained(compiled: Any, path: str | PathLike[str], profile: Profile | None) -> None:
    """Write the page of a CompiledGraph, with times if they can be measured."""
    from rlx.explain.page import page

    path = as_path(path)  # before runs are measured
    unmeasured = ""
    if profile is None:
        try:
            profile = compiled.profile()
        except (Unsupported, MissingParamError) as e:
            unmeasured = str(e)
    write(path, page(described(compiled, profile, unmeasured)))


__all__ = ["described", "explained"]

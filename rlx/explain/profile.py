"""Profile: the time of each step of a run, beside its bytes, its operations and the roofline of the machine.

The time of an instant belongs to the steps that threads are in then; instants without any are overhead. So the times of steps and
the overhead add up to the run, also where steps run at the same time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlx.driver.backend import Timeline
from rlx.errors import writing
from rlx.ir.cost import ProgramWork, Roofline, arithmetic
from rlx.ir.node import Node
from rlx.ir.program import Program, Step, kernel_labels
from rlx.ir.shown import Shown, counted, sized
from rlx.records import record

if TYPE_CHECKING:
    from rlx.compiler.origins import Origins

T = TypeVar("T")
MOST_ROWS = 24  # steps that the text of a profile lists
_ABOVE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")


@record
class StepTime:
    """One step. `label`: its kernel. `nodes`: the user's nodes, with the lines that made them. `seconds`: its part of a run.
    `moved_bytes`, `least_bytes`, `flops`: see rlx.ir.cost. `share`: the part of the time that the machine needs at least, by its
    roofline; `bound`: for "memory" or "arithmetic". None: the roofline is not known."""

    phase: str
    label: str
    nodes: tuple[str, ...]
    seconds: float
    moved_bytes: int
    least_bytes: int
    flops: int | None
    share: float | None = None
    bound: str = ""


@record(repr=False)
class Profile(Shown):
    """The times of the steps of one compiled graph: means over the quickest eighth of `runs`, since other programs on the
    machine only take from it. `seconds`: of a measured run; `unmeasured_seconds`: of runs without clocks, between those.
    `timeline`: the one of those of median time."""

    name: str
    device: str
    threads: int
    runs: int
    seconds: float
    unmeasured_seconds: float
    steps: tuple[StepTime, ...]
    timeline: Timeline = field(repr=False, compare=False)
    roofline: Roofline | None = None

    @property
    def overhead_seconds(self) -> float:
        """The part of the measured run that is in no step: starting steps, waiting for threads, readings of the clock between."""
        return max(0.0, self.seconds - sum(s.seconds for s in self.steps))  # below 0 by rounding only

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write `timeline` in Chrome's trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing: one row for each thread.
        OptionError: the file cannot be written."""
        write_trace(path, [self])

    def data(self) -> dict[str, Any]:
        """The part `profile` of the report (docs/explain.md)."""
        begin, end, spans = self.timeline
        roof = self.roofline
        roof = roof and {"operations": dict(roof.operations), "reading": [list(r) for r in roof.reading]}
        return {
            "runs": self.runs, "threads": self.threads, "seconds": self.seconds, "unmeasured_seconds": self.unmeasured_seconds,
            "overhead_seconds": self.overhead_seconds, "roofline": roof,
            "steps": [{"seconds": s.seconds, "share": s.share, "bound": s.bound} for s in self.steps],
            "timeline": {"nanoseconds": end - begin, "spans": (spans - [0, 0, begin, begin]).tolist()},
        }  # fmt: skip

    def _line(self) -> str:
        return f"of {self.name!r} on {self.device}: {timed(self.seconds)} in {counted(len(self.steps), 'step')}, {self.runs} runs"

    def _rows(self) -> list[tuple[str, ...]]:
        """Steps of the same kernel and lines together, by time; then the overhead."""
        alike: dict[tuple[str, tuple[str, ...]], list[StepTime]] = {}
        for s in self.steps:
            alike.setdefault((s.label, s.nodes), []).append(s)
        groups = sorted(alike.values(), key=lambda group: -sum(s.seconds for s in group))
        rows = [_row(group, self.seconds) for group in groups[:MOST_ROWS]]
        if rest := [s for group in groups[MOST_ROWS:] for s in group]:
            rows.append(("others", *_row(rest, self.seconds)[1:4], "", "", "", ""))
        over = self.overhead_seconds
        return [*rows, ("overhead", "", timed(over), _percent(over, self.seconds), "", "", "", "")]

    def __str__(self) -> str:
        rows = [HEADS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(c.ljust(w) if at in (0, 7) else c.rjust(w) for at, (c, w) in enumerate(zip(r, widths))) for r in rows]
        threads = f"; {counted(self.threads, 'thread')}" if self.device == "CPU" else ""
        note = f"{self!r}; without measuring {timed(self.unmeasured_seconds)}{threads}"
        return "\n".join([note, *("  " + line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        cells = [(tag, row) for tag, rows in (("th", [HEADS]), ("td", self._rows())) for row in rows]
        body = "".join("<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in row) + "</tr>" for tag, row in cells)
        return f"<table><caption>{escape(repr(self))}</caption>{body}</table>"


HEADS = ("step", "times", "time", "of run", "of roofline", "bytes", "GFLOP/s", "nodes")


def _row(group: Sequence[StepTime], run: float) -> tuple[str, ...]:
    """The cells of steps of the same kernel, together."""
    first, spent = group[0], sum(s.seconds for s in group)
    known = spent > 0 and all(s.share is not None for s in group)
    share = sum((s.share or 0) * s.seconds for s in group) / spent if known else 0
    flops = sum(s.flops or 0 for s in group)
    return (
        first.label, str(len(group)), timed(spent), _percent(spent, run), f"{100 * share:.0f}% {first.bound}" if known else "",
        sized(sum(s.least_bytes for s in group)), f"{flops / spent / 1e9:.1f}" if flops and spent else "",
        ", ".join(dict.fromkeys(first.nodes)),
    )  # fmt: skip


def timed(seconds: float) -> str:
    """In a unit that fits: "12.3 us"."""
    for unit, least in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def write_trace(path: str | os.PathLike[str], profiles: Sequence[Profile]) -> None:
    """Several profiles in Chrome's trace format: a process for each. OptionError: the file cannot be written."""
    events = [event for number, profile in enumerate(profiles, 1) for event in _events(number, profile)]
    write(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _events(process: int, profile: Profile) -> Iterator[dict[str, Any]]:
    begin, end, spans = profile.timeline
    yield _name(process, 0, "process_name", f"{profile.name} on {profile.device}")
    whole = {"runs": profile.runs, "unmeasured_seconds": profile.unmeasured_seconds}
    yield _span(process, 0, "run", 0, end - begin, whole)
    for thread in sorted({int(row[1]) for row in spans}):
        yield _name(process, thread + 1, "thread_name", f"thread {thread}")
    for step, thread, first, last in spans.tolist():
        s = profile.steps[step]
        facts = {"step": step, "phase": s.phase, "nodes": list(s.nodes), "least_bytes": s.least_bytes, "flops": s.flops}
        yield _span(process, thread + 1, s.label, first - begin, last - first, facts)


def _span(process: int, thread: int, name: str, begin: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    """`begin`, `length` in nanoseconds; the format has microseconds."""
    times = {"ts": begin / 1e3, "dur": length / 1e3}
    return {"name": name, "cat": "rlx", "ph": "X", "pid": process, "tid": thread, **times, "args": args}


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def write(path: str | os.PathLike[str], text: str) -> None:
    """OptionError: it is no path, or the file cannot be written."""
    with writing(path) as place, open(place, "w", encoding="utf-8") as file:
        file.write(text)


def described(node: Node) -> str:
    """A node of the user's graph in one line: "'q' = linear at model.py:12"."""
    label = f"{node.name!r} = " if node.name else ""
    return f"{label}{node.op.name}" + (f" at {short(node.source)}" if node.source else "")


def short(source: str) -> str:
    """A source line with a path from the working directory, or from the folder of the package, where it is inside."""
    for folder in (os.path.join(os.getcwd(), ""), _ABOVE):
        if source.startswith(folder):
            return source[len(folder) :]
    return source


def spent(timeline: Timeline, steps: int) -> np.ndarray:
    """Nanoseconds of each step: every instant is divided among the steps that threads are in, by the number of these threads."""
    step, _, begin, end = timeline.spans.T
    when = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(step), np.int64), -np.ones(len(step), np.int64)])
    which = np.concatenate([step, step])
    order = np.argsort(when, kind="stable")
    total, active = np.zeros(steps), dict[int, int]()
    last = 0
    for now, more, at in zip(when[order].tolist(), change[order].tolist(), which[order].tolist()):
        if active and now > last:
            each = (now - last) / sum(active.values())
            for running, count in active.items():
                total[running] += count * each
        last = now
        active[at] = active.get(at, 0) + more
        if not active[at]:
            del active[at]
    return total


def _quickest(runs: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """The quickest eighth, at least three if there are so many."""
    return sorted(runs, key=seconds)[: max(-(-len(runs) // 8), 3)]


def profile_of(
    program: Program, origins: Origins | None, work: ProgramWork, device: str, timelines: Sequence[Timeline],
    unmeasured: Sequence[float], roofline: Roofline | None,
) -> Profile:  # fmt: skip
    """The profile of a program's measured runs. `origins` None: the graph is not known. `unmeasured`: seconds of runs without
    clocks."""
    whole = program if origins is None else origins.program  # that of a cache has no loops
    run: list[tuple[str, Step]] = [(p, s) for p in ("steps", "commit") for s in whole.phases[p]]
    labels = kernel_labels(whole)
    made = [None for _ in run] if origins is None else [m for p in ("steps", "commit") for m in origins.steps[p]]
    count, timelines = len(timelines), _quickest(timelines, lambda t: t.end - t.begin)
    each = np.mean([spent(t, len(run)) for t in timelines], axis=0) / 1e9
    steps = []
    for (phase, step), origin, cost, seconds in zip(run, made, work.kernels, each.tolist(), strict=True):
        nodes = step.kernel.origin
        if origins is not None and origin is not None:
            nodes = tuple(described(origins.nodes[i]) for i in origin.nodes)
        share, bound = None, ""
        if roofline is not None and seconds > 0:
            least, bound = roofline.least(cost.least_bytes, cost.flops or 0, arithmetic(step.kernel))
            share = least / seconds
        moved = cost.read_bytes + cost.written_bytes
        steps.append(StepTime(phase, labels[step.kernel], nodes, seconds, moved, cost.least_bytes, cost.flops, share, bound))
    middle, plain = timelines[len(timelines) // 2], _quickest(unmeasured, float)
    return Profile(
        program.name, device, program.target.threads, count, float(np.mean([t.end - t.begin for t in timelines])) / 1e9,
        float(np.mean(plain)), tuple(steps), middle, roofline,
    )  # fmt: skip


__all__ = ["Profile", "StepTime", "described", "profile_of", "short", "spent", "timed", "write", "write_trace"]

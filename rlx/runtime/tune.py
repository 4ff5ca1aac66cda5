"""The autotuner: measures alternative tilings of a program's steps, and keeps those that are faster on this machine.

Each distinct step runs alone, on buffers of its own with the program's shapes, with the program's threads. Weights are replicated
so that they are as cold in the cache as in the program. Candidates are timed alternately. One must beat the default tiling by
MARGIN, and again in a second race, or the default is kept; very short steps always keep it. The result of each race is stored on
disk at once. So if a compile is interrupted or runs out of time, the next one continues there, and a later one measures nothing.
All candidates compute the same bits (rlx.driver.backend.Tunable).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from rlx.compiler.options import CompileOptions
from rlx.driver.backend import Backend, Executable, Tunable
from rlx.driver.params import ParamStore
from rlx.errors import OptionError, known
from rlx.host.disk import disk_cache
from rlx.ir.cost import program_work
from rlx.ir.kernel_text import kernel_key
from rlx.ir.program import ArenaPlan, BufferDecl, Program, Region, Step
from rlx.ir.shape import Shape
from rlx.ir.tuning import NO_TIME, NOT_TUNED, TOO_LONG, Tiling, Tilings, TunedStep, Tuning, step_key
from rlx.runtime.stored import source_digest

MARGIN = 0.03  # fraction of the time that a candidate must save: repeated measurements differ by less
ROUNDS, FINAL_ROUNDS = 5, 9
SAMPLE, LONGEST = 0.002, 0.008  # seconds: least of one measurement; most of one run over all copies
SHORT = 5e-6  # seconds: below this, memory alignment and call overhead differ by more than tilings do
FAR = 64 << 20  # bytes of weights that evict each other from any cache before they are read again
COPIES = 32  # most copies of the weights of a step
LASTING = (Region.PARAM, Region.PREPARED, Region.CONSTANT, Region.HANDLE)
FORMAT = 2  # version of the entries on disk

Progress = Callable[[int, int, str], None]  # done, number, "tuning" and the key of the next step
Pairs = tuple[tuple[str, int], ...]


class _OutOfTime(Exception): ...


def tune(
    backend: Backend, index: int, program: Program, options: CompileOptions, progress: Progress | None = None
) -> tuple[Tuning, dict[str, Tiling]]:
    """The tiling of each distinct step of a run, according to `options.tune`; and the same as an argument of Tunable.compile.

    OptionError: a given tiling is for a step that is not in the program, or is not available for that step."""
    if not (wanted := options.tune):
        return NOT_TUNED, {}
    if not isinstance(backend, Tunable):
        if isinstance(wanted, Tilings):
            _refuse_unknown(wanted, {}, program)
        return Tuning(why=f"the device {backend.name} has one tiling for each step"), {}
    steps = {kernel_key(s.kernel): s for s in (*program.steps, *program.commit)}
    keys = {step_key(s.kernel, program.target): text for text, s in steps.items()}
    axes = {key: dict(backend.axes(steps[text].kernel, program.target)) for key, text in keys.items()}
    if isinstance(wanted, Tilings):
        _refuse_unknown(wanted, axes, program)
        found = [_given(key, axes[key], dict(tiling)) for key, tiling in wanted.steps]
    else:
        found = _Tuner(backend, index, program, options, progress).measured({k: steps[t] for k, t in keys.items()}, axes)
    return Tuning(tuple(found), ""), {keys[s.key]: dict(s.tiling) for s in found if s.tiling != s.default}


def _refuse_unknown(given: Tilings, axes: Mapping[str, Mapping[str, Sequence[int]]], program: Program) -> None:
    if missing := [key for key, _ in given.steps if key not in axes]:
        raise OptionError(
            f"tune: {program.name!r} has no step {known(missing)}; tilings fit the same graph, options, device and number of "
            f"threads ({program.target.threads} here). Its steps: {known(axes)}"
        )
    for key, tiling in given.steps:
        for name, value in tiling:
            if value not in axes[key].get(name, ()):
                offered = ", ".join(f"{n} of {known(values)}" for n, values in axes[key].items()) or "nothing"
                raise OptionError(f"tune: step {key!r} cannot have {name}={value}; it offers {offered}")


def _defaults(axes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {name: values[0] for name, values in axes.items()}


def _pairs(tiling: Tiling) -> Pairs:
    return tuple(sorted(tiling.items()))


def _given(key: str, axes: Mapping[str, Sequence[int]], tiling: Tiling) -> TunedStep:
    return TunedStep(key, "given", _pairs({**_defaults(axes), **tiling}), _pairs(_defaults(axes)))


class _Tuner:
    def __init__(self, backend: Any, index: int, program: Program, options: CompileOptions, progress: Progress | None) -> None:
        self._backend, self._index, self._program = backend, index, program
        self._budget = float(options.tune)  # type: ignore[arg-type]
        self._deadline = time.perf_counter() + self._budget
        self._extent = program.extent, options.extent[1] if options.extent else 0
        self._disk = disk_cache()[0]
        self._advanced, self._variants = False, 0  # whether a race was run; number of variants compiled for races
        self._progress = progress or (lambda done, total, step: None)
        self._clock = time.thread_time if program.target.threads == 1 else time.perf_counter
        used = {a for s in program.steps for a in s.args}
        self._lasting = sum(b.nbytes for b in program.buffers if b.region in LASTING and b.id in used)

    def measured(self, steps: Mapping[str, Step], axes: Mapping[str, Mapping[str, Sequence[int]]]) -> list[TunedStep]:
        """All steps in order. Those with the largest share of a run are measured first."""
        found = {key: TunedStep(key, "has one tiling") for key in steps if not axes[key]}
        begun = {key: self._kept(key, axes[key]) for key in steps if axes[key]}
        found |= {key: step for key, (step, raced) in begun.items() if raced > len(axes[key])}
        weights = self._weights()
        todo = sorted((key for key in steps if key not in found), key=lambda key: -weights[kernel_key(steps[key].kernel)])
        for at, key in enumerate(todo):
            self._progress(at, len(todo), f"tuning {key}")
            try:
                found[key] = _Trial(self, steps[key]).best(axes[key], *begun[key])
            except _OutOfTime:
                continue
        self._progress(len(todo), len(todo), "tuning")
        why = TOO_LONG if not self._advanced and self._stuck([key for key in todo if key not in found]) else NO_TIME
        return [found.get(key, TunedStep(key, why)) for key in steps]

    def _stuck(self, left: Sequence[str]) -> bool:
        """Whether an earlier compile with the same steps and time budget also ended before its first race, and got as far as this
        one. Until then, each compile finds more code on disk than the one before and gets further."""
        entry = self._entry(f"stuck {self._budget} {left}")
        content = None if self._disk is None else self._disk.get(entry)[0]
        if content is not None and int.from_bytes(content, "little") >= self._variants:
            return True
        if self._disk is not None and left:
            self._disk.put(entry, [self._variants.to_bytes(8, "little")])
        return False

    def keep(self, step: TunedStep, raced: int) -> TunedStep:
        """Store on disk the result of the first `raced` races. All are done if that is one more than the names in a tiling."""
        self._advanced = True
        if self._disk is not None:
            content = json.dumps([step.tiling, step.default_ns, step.tiling_ns, step.tried, raced])
            self._disk.put(self._entry(step.key), [content.encode()])
        return step

    def _weights(self) -> dict[str, float]:
        """kernel_key -> estimated share of a run."""
        weights: dict[str, float] = {}
        for step, work in zip((*self._program.steps, *self._program.commit), program_work(self._program).kernels):
            cost = (work.flops or 0) / 10 + work.read_bytes + work.written_bytes
            key = kernel_key(step.kernel)
            weights[key] = weights.get(key, 0) + cost
        return weights

    def _entry(self, key: str) -> str:
        given = repr((FORMAT, key, self._backend.machine(), source_digest()))
        return f"tuning-{hashlib.sha256(given.encode()).hexdigest()}"

    def _kept(self, key: str, axes: Mapping[str, Sequence[int]]) -> tuple[TunedStep, int]:
        """The step and number of races that an earlier compile stored; the default tiling and 0 if there is no valid entry."""
        content, _ = self._disk.get(self._entry(key)) if self._disk is not None else (None, "")
        nothing = replace(_given(key, axes, {}), how="kept"), 0
        try:
            tiling, *numbers, raced = json.loads(content or b"")
            tiling = dict(tiling)
            sound = set(tiling) == set(axes) and all(type(v) is int and v in axes[n] for n, v in tiling.items())
            if not sound or len(numbers) != 3 or not all(type(n) is int and n >= 0 for n in (*numbers, raced)):
                return nothing
            return replace(nothing[0], tiling=_pairs(tiling), **dict(zip(("default_ns", "tiling_ns", "tried"), numbers))), raced
        except (ValueError, TypeError, RecursionError):
            return nothing


class _Trial:
    """One step alone, compiled in several variants."""

    def __init__(self, tuner: _Tuner, step: Step) -> None:
        self._tuner, self._step, self._params = tuner, step, ParamStore()
        self._made: dict[Pairs, tuple[str, Executable]] = {}
        self._copies = 1
        self._alone = _alone(tuner._program, step, 1)
        own = sum(b.nbytes for b in self._alone.buffers if b.region is Region.PARAM)
        run = self._variant(()).run_steps
        run()
        self._once = max(min(self._seconds(run, 1) for _ in range(3)), 1e-7)
        if own and self._once < SAMPLE:
            far = ceil(min(FAR, tuner._lasting) / own)
            self._copies = max(1, min(COPIES, far, ceil(LONGEST / self._once)))
            self._alone, self._params = _alone(tuner._program, step, self._copies), ParamStore()
        self._made.clear()

    def best(self, axes: Mapping[str, Sequence[int]], begun: TunedStep, raced: int) -> TunedStep:
        """Coordinate search: tunes one name at a time, with the best values so far for the others. Continues from `begun`, the
        result of an earlier compile. _OutOfTime: the time budget is spent."""
        default, best, tried = _defaults(axes), dict(begun.tiling), begun.tried
        for at, (name, values) in enumerate(axes.items()):
            if at < raced or self._once <= SHORT:
                continue
            rivals = self._different([best | {name: v} for v in (best[name], *(v for v in values if v != best[name]))])
            times = self._race(rivals, ROUNDS)
            ratios = [_ratio(mine, times[0]) for mine in times]
            tried += len(rivals) - 1
            if min(ratios) < 1 - MARGIN:
                best = rivals[ratios.index(min(ratios))]
            self._made = {_pairs(c): self._made[_pairs(c)] for c in (default, best) if _pairs(c) in self._made}
            self._tuner.keep(replace(begun, tiling=_pairs(best), tried=tried), at + 1)
        default_ns = tiling_ns = 0
        if best != default:
            times = self._race([default, best], FINAL_ROUNDS)
            default_ns, tiling_ns = (round(float(np.median(t)) * 1e9) for t in times)
            best = best if _ratio(times[1], times[0]) < 1 - MARGIN else default
        made = TunedStep(begun.key, "measured", _pairs(best), _pairs(default), default_ns, tiling_ns, tried)
        return self._tuner.keep(made, len(axes) + 1)

    def _different(self, tilings: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """The tilings without duplicates: the first of those that give the same code."""
        texts: dict[str, dict[str, int]] = {}
        for tiling in tilings:
            self._variant(_pairs(tiling))
            texts.setdefault(self._made[_pairs(tiling)][0], tiling)
        return list(texts.values())

    def _variant(self, tiling: Pairs) -> Executable:
        if tiling not in self._made:
            if time.perf_counter() > self._tuner._deadline:
                raise _OutOfTime
            backend, kernel, fresh = self._tuner._backend, self._step.kernel, not self._params.entries
            artifact = backend.compile(self._alone, {kernel_key(kernel): dict(tiling)})
            made = backend.load(artifact, self._params, self._tuner._index)
            self._tuner._variants += 1
            for b in self._alone.buffers:
                if fresh or b.region is not Region.PARAM:
                    extent, most = self._tuner._extent
                    made.write(b.id, np.full((), most, np.int64) if b.name == f"{extent}" else typical(b.shape))
            self._made[tiling] = artifact.texts()[kernel.name], made
        return self._made[tiling][1]

    def _race(self, tilings: Sequence[dict[str, int]], rounds: int) -> list[list[float]]:
        """Seconds of a step for each tiling, by round. Each round measures all tilings, and starts with another one."""
        runs = [self._variant(_pairs(tiling)).run_steps for tiling in tilings]
        for run in runs:
            run()
        once = max(self._seconds(runs[0], 1), 1e-7)
        count = max(1, ceil(SAMPLE / once))
        if time.perf_counter() + rounds * len(runs) * count * once > self._tuner._deadline:
            raise _OutOfTime  # before measuring: there may be time for shorter steps
        times: list[list[float]] = [[] for _ in runs]
        for n in range(rounds):
            for at in (*range(n % len(runs), len(runs)), *range(n % len(runs))):
                if time.perf_counter() > self._tuner._deadline:
                    raise _OutOfTime
                times[at].append(self._seconds(runs[at], count) / (count * self._copies))
        return times

    def _seconds(self, run: Callable[[], None], count: int) -> float:
        begun = self._tuner._clock()
        for _ in range(count):
            run()
        return self._tuner._clock() - begun


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The larger of the median ratio of pairs, which is robust against drift, and the ratio of medians, which is robust against
    outliers."""
    return float(max(np.median([a / b for a, b in zip(times, others)]), np.median(times) / np.median(others)))


def _alone(program: Program, step: Step, copies: int) -> Program:
    """A program that runs the step `copies` times, each time with its own copy of weights and other lasting buffers."""
    decls, alignment = {b.id: b for b in program.buffers}, program.plan.alignment
    buffers: list[BufferDecl] = []
    shared: dict[int, int] = {}
    offsets, steps, at = dict[int, int](), [], 0
    for copy in range(copies):
        own: dict[int, int] = {}
        for arg in step.args:
            lasting = decls[arg].region in LASTING
            places = own if lasting else shared
            if arg in places:
                continue
            places[arg] = id = len(buffers)
            name = f"{copy} {arg}" if lasting else f"{arg}"
            buffers.append(BufferDecl(id, Region.PARAM if lasting else Region.ARENA, decls[arg].shape, name))
            if not lasting:
                offsets[id], at = at, at + -(-buffers[id].nbytes // alignment) * alignment
        steps.append(Step(step.kernel, tuple((shared | own)[arg] for arg in step.args)))
    plan = ArenaPlan(offsets, at, alignment, at, at)
    params = tuple(b.id for b in buffers if b.region is Region.PARAM)
    return Program("tuning", program.target, tuple(buffers), (), tuple(steps), (), (), params, (), (), plan)


def typical(shape: Shape) -> np.ndarray:
    """Data with typical timing: floats of normal magnitude, indices in range, masks that hide nothing."""
    if shape.dtype.kind == "f":
        some = np.random.default_rng(0).uniform(0.5, 1, 4093).astype(shape.dtype.numpy)
        return np.resize(some, shape.static)
    value = {"u8": 0x3C, "bool": 1}.get(shape.dtype.name, 0)  # u8: packed weights, whose floats get normal magnitude
    return np.full(shape.static, value, shape.dtype.numpy)

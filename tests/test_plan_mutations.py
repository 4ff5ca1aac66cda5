"""Good programs with one thing broken: the checker refuses each mutant, or the mutant is shown to be sound by running it.

Sound means well defined: the same results in the mutant's own plan and in one without any sharing, whatever bytes the
arena holds before the run. (A mutant may compute something else than its original; that is not the plan's business.)
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from small_programs import COLUMNS, TARGET, Maker, pointwise, run, same, sample_program, transposed
from test_memory_plan import encoder_block

from rlx.backends.cuda.backend import target as gpu_target
from rlx.backends.ref import interpret
from rlx.backends.shared import stepwise
from rlx.compiler import CompileOptions, check, lower
from rlx.compiler.check import program_faults
from rlx.compiler.memory import plan_arena
from rlx.ir import ops
from rlx.ir.dtype import i32
from rlx.ir.graph import Graph
from rlx.ir.program import OutputDecl, Program, Region, Step

PHASES = ("prepare", "steps", "commit")
IN_ARENA = (Region.ARENA, Region.INPUT, Region.OUTPUT)


def well_defined(program: Program, monkeypatch: pytest.MonkeyPatch) -> bool:
    steps = (*program.steps, *program.commit)
    outputs = {o.buffer for o in program.outputs}
    apart = replace(program, plan=plan_arena(program.buffers, steps, outputs, 64, reuse=False))
    results = []
    for poison, plans in ((0xCB, (program, apart)), (0x3E, (program,))):
        for module in (stepwise, interpret):
            monkeypatch.setattr(module, "POISON", poison)
        results += [run(p) for p in plans]
    return all(same(results[0], r) for r in results[1:])


# -- mutations: each yields programs with one change ---------------------------------------------------------------


def moved(p: Program, offsets: dict[int, int], **plan) -> Program:
    return replace(p, plan=replace(p.plan, offsets={**p.plan.offsets, **offsets}, **plan))


def buffer_onto_another(p: Program) -> Iterator[Program]:
    for a in p.plan.offsets:
        for b in p.plan.offsets:
            if p.plan.offsets[a] != p.plan.offsets[b]:
                yield moved(p, {a: p.plan.offsets[b]})


def buffer_shifted(p: Program) -> Iterator[Program]:
    for a, at in p.plan.offsets.items():
        for by in (-p.plan.alignment, p.plan.alignment):
            yield moved(p, {a: at + by})


def buffer_misaligned(p: Program) -> Iterator[Program]:
    for a, at in p.plan.offsets.items():
        yield moved(p, {a: at + 4}, size_bytes=p.plan.size_bytes + 64)


def buffer_without_place(p: Program) -> Iterator[Program]:
    for a in p.plan.offsets:
        yield replace(p, plan=replace(p.plan, offsets={b: at for b, at in p.plan.offsets.items() if b != a}))


def arena_too_small(p: Program) -> Iterator[Program]:
    for size in (max_end(p) - 1, 0, -1):
        yield moved(p, {}, size_bytes=size)


def alignment_senseless(p: Program) -> Iterator[Program]:
    for alignment in (0, -64, 48):
        yield moved(p, {}, alignment=alignment)


def step_dropped(p: Program) -> Iterator[Program]:
    for phase in PHASES:
        steps = getattr(p, phase)
        for i in range(len(steps)):
            yield replace(p, **{phase: steps[:i] + steps[i + 1 :]})


def step_moved(p: Program) -> Iterator[Program]:
    for phase in PHASES:
        steps = getattr(p, phase)
        for i in range(len(steps)):
            for j in range(len(steps)):
                if i != j:
                    rest = [*steps[:i], *steps[i + 1 :]]
                    rest.insert(j, steps[i])
                    yield replace(p, **{phase: tuple(rest)})


def step_repeated(p: Program) -> Iterator[Program]:
    for i, s in enumerate(p.steps):
        for j in range(i, len(p.steps)):
            yield replace(p, steps=(*p.steps[: j + 1], s, *p.steps[j + 1 :]))


def step_in_another_phase(p: Program) -> Iterator[Program]:
    for here in PHASES:
        for there in PHASES:
            for i, s in enumerate(getattr(p, here)):
                if here != there:
                    steps = getattr(p, here)
                    yield replace(p, **{here: steps[:i] + steps[i + 1 :], there: (*getattr(p, there), s)})


def argument_replaced(p: Program) -> Iterator[Program]:
    decls = {b.id: b for b in p.buffers}
    for phase in PHASES:
        for i, s in enumerate(getattr(p, phase)):
            for at, arg in enumerate(s.args):
                for b in p.buffers:
                    if b.id != arg and b.shape.num_elements == decls[arg].shape.num_elements:
                        yield with_step(p, phase, i, replace(s, args=(*s.args[:at], b.id, *s.args[at + 1 :])))


def argument_count_wrong(p: Program) -> Iterator[Program]:
    for phase in PHASES:
        for i, s in enumerate(getattr(p, phase)):
            yield with_step(p, phase, i, replace(s, args=s.args[:-1]))
            yield with_step(p, phase, i, replace(s, args=(*s.args, s.args[0])))
            yield with_step(p, phase, i, replace(s, args=(10**6, *s.args[1:])))


def output_in_another_buffer(p: Program) -> Iterator[Program]:
    for i, o in enumerate(p.outputs):
        for b in p.buffers:
            if b.id != o.buffer:
                yield replace(p, outputs=(*p.outputs[:i], OutputDecl(o.name, b.id, b.shape), *p.outputs[i + 1 :]))


def region_changed(p: Program) -> Iterator[Program]:
    for i, b in enumerate(p.buffers):
        for region in Region:
            if region is not b.region and (region in IN_ARENA) == (b.region in IN_ARENA):
                yield replace(p, buffers=(*p.buffers[:i], replace(b, region=region), *p.buffers[i + 1 :]))


def signature_changed(p: Program) -> Iterator[Program]:
    for group in ("inputs", "params", "handles"):
        for i in range(len(getattr(p, group))):
            yield replace(p, **{group: getattr(p, group)[:i] + getattr(p, group)[i + 1 :]})


def dtype_changed(p: Program) -> Iterator[Program]:
    for i, b in enumerate(p.buffers):
        if b.shape.num_elements and any(b.id in s.args for s in (*p.prepare, *p.steps, *p.commit)):
            yield replace(p, buffers=(*p.buffers[:i], replace(b, shape=b.shape.with_dtype(i32)), *p.buffers[i + 1 :]))


def size_changed(p: Program) -> Iterator[Program]:
    for i, b in enumerate(p.buffers):
        if b.shape.num_elements > 1 and any(b.id in s.args for s in (*p.prepare, *p.steps, *p.commit)):
            yield replace(p, buffers=(*p.buffers[:i], replace(b, shape=b.shape.with_dims((1,))), *p.buffers[i + 1 :]))


def with_step(p: Program, phase: str, i: int, step: Step) -> Program:
    steps = getattr(p, phase)
    return replace(p, **{phase: (*steps[:i], step, *steps[i + 1 :])})


ALWAYS_HARMFUL = (
    buffer_misaligned, buffer_without_place, arena_too_small, alignment_senseless, argument_count_wrong, signature_changed,
    dtype_changed, size_changed, step_in_another_phase,
)  # fmt: skip
SOMETIMES_HARMFUL = (
    buffer_onto_another, buffer_shifted, step_dropped, step_moved, step_repeated, argument_replaced, output_in_another_buffer,
    region_changed,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels_are_judged_once():
    """Thousands of mutants share a few kernels, whose facts and proofs depend on nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_Facts", "_overwrites_after_reading"):
            patch.setattr(check, name, cache(getattr(check, name)))
        yield


@pytest.fixture(scope="module", params=["by hand", "compiled", "compiled unfused", "compiled for a GPU"])
def program(request):
    if request.param == "by hand":
        return sample_program().program()
    on = gpu_target("sm_90a") if "GPU" in request.param else TARGET
    return lower(encoder_block(), on, CompileOptions(disable=("fuse",) if "unfused" in request.param else ()))


@pytest.mark.parametrize("mutate", ALWAYS_HARMFUL, ids=lambda f: f.__name__)
def test_harmful_mutants_are_refused(program, mutate):
    assert program_faults(program) == []
    mutants = list(mutate(program))
    assert mutants
    for mutant in mutants:
        assert program_faults(mutant), mutant


@pytest.mark.parametrize("mutate", SOMETIMES_HARMFUL, ids=lambda f: f.__name__)
def test_accepted_mutants_are_sound(program, mutate, monkeypatch):
    """About 12 accepted mutants of a kind are run, evenly chosen; every kind has refused ones."""
    mutants = list(mutate(program))
    accepted = [m for m in mutants if not program_faults(m)]
    assert len(accepted) < len(mutants)
    for mutant in accepted[:: 1 + len(accepted) // 12]:
        assert well_defined(mutant, monkeypatch), f"accepted, and its results depend on the arena:\n{mutant}"


def test_the_oracle_itself_sees_harm(monkeypatch):
    """Running finds what the checker finds: most refused placements and step orders do change results."""
    program = sample_program().program()
    for mutate in (buffer_onto_another, step_moved, step_dropped):
        refused = [m for m in mutate(program) if program_faults(m)]
        harmful = sum(not well_defined(m, monkeypatch) for m in refused[::5] if m.plan.size_bytes >= max_end(m))
        assert harmful > len(refused[::5]) // 2, mutate.__name__


def max_end(p: Program) -> int:
    return max(at + p.buffers[b].nbytes for b, at in p.plan.offsets.items())


# -- groups: running one step after the other cannot show harm, so the bytes that steps touch decide ------------------


@cache
def branches(threads: int) -> Program:
    """Two chains of small steps that meet at the end."""
    g = Graph("branches")
    x, y = g.input("x", (4, 8), "f32"), g.input("y", (4, 8), "f32")
    for i in range(3):
        x, y = (ops.softmax(v @ g.param(f"{name}{i}", (8, 8), "f32"), axis=1) for name, v in (("wx", x), ("wy", y)))
    g.set_outputs([x, y, x + y])
    return lower(g, replace(TARGET, threads=threads), CompileOptions())


def bytes_of(p: Program, buffers: Iterable[int]) -> set[tuple[int, int]]:
    """(memory, byte) of each: the arena is memory -1."""
    at = p.plan.offsets
    return {(-1, at[b] + n) if b in at else (b, n) for b in buffers for n in range(p.buffers[b].nbytes)}


def clashes(p: Program) -> bool:
    """Whether a step writes a byte that another one of its group touches."""
    groups: list[list[Step]] = []
    for step in p.steps:
        groups = [*groups[:-1], [*groups[-1], step]] if step.concurrent and groups else [*groups, [step]]
    return any(
        bytes_of(p, a.writes) & bytes_of(p, b.reads | b.writes) for group in groups for a in group for b in group if a is not b
    )


def steps_grouped(p: Program) -> Iterator[Program]:
    for i in range(1, len(p.steps)):
        for last in range(i, min(i + 3, len(p.steps))):
            yield replace(p, steps=tuple(replace(s, concurrent=True) if i <= n <= last else s for n, s in enumerate(p.steps)))


def test_a_group_is_refused_where_its_steps_touch_what_one_writes(program):
    for base in (program, branches(1), branches(2)):
        mutants = list(steps_grouped(base))
        assert [bool(program_faults(m)) for m in mutants] == [clashes(m) for m in mutants]
        assert any(map(clashes, mutants))


def test_a_compiled_group_may_not_lose_its_places():
    """Buffers that keep apart because two branches run at once, put onto each other."""
    p = branches(2)
    assert sum(s.concurrent for s in p.steps) >= 3 and not any(s.concurrent for s in branches(1).steps)
    assert program_faults(p) == [] and not clashes(p)
    mutants = [m for mutate in (buffer_onto_another, buffer_shifted, step_moved, argument_replaced) for m in mutate(p)]
    harmful = [m for m in mutants if m.plan.size_bytes >= max_end(m) and clashes(m)]
    assert len(harmful) > 20 and all(map(program_faults, harmful))


def test_only_steps_of_a_run_have_a_step_before_them():
    program = sample_program().program()
    for phase in PHASES:
        first = replace(getattr(program, phase)[0], concurrent=True)
        assert any("only later steps of a run may be" in f for f in program_faults(with_step(program, phase, 0, first)))


# -- marks and rules that the mutations above cannot reach -----------------------------------------------------------


def small(kernel, **marks):
    """x -> t -> out with `kernel` first, its buffers marked as told."""
    m = Maker()
    x, t, out = m.buffer(Region.INPUT), m.buffer(Region.ARENA), m.buffer(Region.OUTPUT)
    m.step(kernel, x, t)
    m.step(pointwise(1), t, out)
    m.output(out)
    program = m.program()
    for at, writable in marks.items():
        object.__setattr__(kernel.buffers[int(at[1:])], "writable", writable)
    return program


def test_wrong_write_marks_are_refused():
    assert program_faults(small(pointwise(1))) == []
    assert any("'out' (%1) is stored to and not marked" in f for f in program_faults(small(pointwise(1), b1=False)))
    faults = program_faults(small(pointwise(1), b0=True))
    assert any("writes %0, which is input" in f for f in faults) and any("never stored to" in f for f in faults)


def test_buffers_outside_the_arguments_are_refused():
    kernel = pointwise(2)
    assert any(
        "accesses 'b1'" in f for f in program_faults(small(replace(kernel, buffers=(kernel.buffers[0], kernel.buffers[2]))))
    )


def test_next_states_are_committed_at_once():
    """Two handles that swap need a copy; a commit that reads what it already overwrote is refused."""
    m = Maker()
    a, b, t, out = m.buffer(Region.HANDLE), m.buffer(Region.HANDLE), m.buffer(Region.ARENA), m.buffer(Region.OUTPUT)
    m.step(pointwise(1), b, t)
    m.step(pointwise(1), b, out)
    m.output(out)
    m.step(pointwise(1), a, b, phase="commit")
    sound = replace(m.program(), commit=(*m.commit, Step(pointwise(1), (t, a))))
    assert program_faults(replace(sound, plan=plan_arena(sound.buffers, sound.steps + sound.commit, {out}, 64))) == []
    m.step(pointwise(1), b, a, phase="commit")
    assert any("reads the next state of %1" in f for f in program_faults(m.program()))


def test_an_output_in_a_committed_handle_is_refused():
    m = Maker()
    x, state = m.buffer(Region.INPUT), m.buffer(Region.HANDLE)
    m.step(pointwise(1), x, state, phase="commit")
    m.output(state)
    assert any("the commit overwrites" in f for f in program_faults(m.program()))


def test_what_prepares_a_param_can_be_run_again():
    m = Maker()
    w, packed, x, out = m.buffer(Region.PARAM), m.buffer(Region.PREPARED), m.buffer(Region.INPUT), m.buffer(Region.OUTPUT)
    m.step(pointwise(1), w, packed, phase="prepare")
    m.step(pointwise(2), packed, x, out)
    m.output(out)
    assert program_faults(m.program()) == []
    m.step(pointwise(1), packed, packed, phase="prepare")
    assert any("cannot run again" in f for f in program_faults(m.program()))


def test_an_unproved_in_place_step_is_refused():
    m = Maker()
    x, t, out = m.buffer(Region.INPUT), m.buffer(Region.ARENA), m.buffer(Region.OUTPUT)
    m.step(pointwise(1), x, t)
    m.step(transposed(), t, out)
    m.output(out)
    program = m.program(pairs=lambda kernel: {(0, 1)})
    assert program.plan.offsets[t] == program.plan.offsets[out]
    assert program_faults(program) == ["steps[1] transposed: writes %2 over %1, which it still uses"]


def test_a_constant_without_its_data_is_refused():
    program = sample_program().program()
    i = next(i for i, b in enumerate(program.buffers) if b.region is Region.CONSTANT)
    for data in (None, np.zeros(COLUMNS, "f4"), np.zeros(COLUMNS * COLUMNS, "f8")):
        broken = replace(
            program, buffers=(*program.buffers[:i], replace(program.buffers[i], data=data), *program.buffers[i + 1 :])
        )
        assert any("has no data of its dtype and size" in f for f in program_faults(broken))

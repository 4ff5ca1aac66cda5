"""The text of groups, and of every other stage: it reads back, and what is lowered is what the last text says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import known_programs
import pytest

import rlx
from rlx.backends import get
from rlx.compiler import alike, lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.facts import facts_of
from rlx.compiler.fuse import fuse
from rlx.compiler.groups import parse_groups, print_groups
from rlx.compiler.lowering import lower_group
from rlx.compiler.options import CompileOptions
from rlx.compiler.pipeline import run_passes
from rlx.compiler.within import within
from rlx.errors import ParseError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.handle import BufferHandle
from rlx.ir.kernel import Kernel, Loop
from rlx.ir.kernel_parse import parse_kernels
from rlx.ir.kernel_text import kernel_key, print_kernel
from rlx.ir.op import Kind
from rlx.ir.program import Program, print_program
from rlx.ir.target import Target

TARGET = replace(get("ref").target(1), threads=2)
EVERY = {"ops-f32": 9, "large-ops": 4, "small-encoder": 5, "decoders": 4, "quantised": 4, "extents": 1, "ranks": 3}


def compiled(name: str) -> Iterator[tuple[str, Program]]:
    """Some of the known programs of a set, with their stages."""
    for i, (what, graph, options, target) in enumerate(known_programs.SETS[name]()):
        if i % EVERY[name] == 0:
            yield what, lower(graph, known_programs.TARGETS[target], options.replace(verbose=True))


@pytest.mark.parametrize("name", EVERY)
def test_every_stage_reads_back_and_the_last_is_what_is_lowered(name: str) -> None:
    for what, program in compiled(name):
        graphs = [name for name in program.stages if name not in ("groups", "lower", "schedule")]
        last, rest = graphs[-1], list(program.stages)[len(graphs) :]
        assert rest in (["groups"], ["groups", "lower", "schedule"])
        for stage in graphs:
            assert str(Graph.parse(program.stages[stage])) == program.stages[stage], (what, stage)
        for stage in rest[1:]:
            assert "\n".join(map(print_kernel, parse_kernels(program.stages[stage]))) == program.stages[stage], (what, stage)
        graph = Graph.parse(program.stages[last])
        found = parse_groups(program.stages["groups"], graph)
        assert print_groups(found, graph) == program.stages["groups"]
        facts = facts_of(graph, Compilation(program.target, rlx.CompileOptions()))
        found = within(found, facts)
        loops = [group for group in found if group.anchor is None or group.anchor.op.kind is not Kind.CONTROL]
        kernels = [print_kernel(program.target.schedule(lower_group(group, facts).kernel)) for group in loops]
        steps = [s for phase in ("prepare", "steps", "abort") for s in program.phases[phase] if s.kernel.flow is None]
        assert sorted(kernels) == sorted(print_kernel(s.kernel) for s in steps), what


def groups_of(build, **options) -> tuple[str, Graph]:
    g = Graph("g")
    g.set_outputs(build(g))
    stages = lower(g, TARGET, rlx.CompileOptions(verbose=True, **options)).stages
    return stages["groups"], Graph.parse(stages["packing"])


def counter() -> Graph:
    """Two kernels, and the copy of a state."""
    g = Graph("g")
    total = g.handle(rlx.BufferHandle("total", (3, 4), "f32"))
    g.assign(total, total + 1.0)
    g.set_outputs([rlx.sum(g.input("y", (3, 4), "f32"), axis=1)])
    return g


def test_the_target_schedules_every_kernel_and_the_stages_show_those_it_changes() -> None:
    def schedule(kernel: Kernel) -> Kernel:
        return replace(kernel, name="of_rows") if kernel.grid else kernel

    def lowered(target: Target) -> Program:
        return lower(counter(), target, rlx.CompileOptions(verbose=True))

    seen: list[Kernel] = []
    program = lowered(replace(TARGET, schedule=lambda kernel: seen.append(kernel) or kernel))
    steps = [s for phase in ("prepare", "steps", "commit", "abort") for s in program.phases[phase]]
    assert len(seen) == len(steps) and set(seen) == {s.kernel for s in steps}, "every kernel once, copies of states too"
    assert {"lower", "schedule"}.isdisjoint(program.stages), "nothing changed"
    gridded = [print_kernel(kernel) for kernel in seen if kernel.grid]
    assert gridded and len(gridded) < len(seen)
    program = lowered(replace(TARGET, schedule=schedule))
    *_, before, after = program.stages
    assert (before, after) == ("lower", "schedule") and program.stages["lower"] == "\n".join(gridded)
    assert {k.name for k in parse_kernels(program.stages["schedule"])} == {"of_rows"}
    assert print_program(program).count("kernel of_rows") == len(gridded), "the program has the scheduled kernels"


def test_a_schedule_that_changes_the_arguments_is_refused() -> None:
    def schedule(kernel: Kernel) -> Kernel:
        return replace(kernel, buffers=kernel.buffers[:-1])

    with pytest.raises(VerifyError, match="the schedule of target 'ref' changed the arguments of a kernel"):
        lower(counter(), replace(TARGET, schedule=schedule), rlx.CompileOptions())


def test_the_text_says_what_is_where_and_why_nodes_are_apart() -> None:
    def build(g: Graph) -> list[rlx.Value]:
        x, w = g.input("x", (2, 6), "f32"), g.param("w", (6, 6), "f32")
        best, places = rlx.top_k(rlx.softmax(x @ w), k=2)
        return [best, places]

    text, _ = groups_of(build)
    assert text.startswith("groups g\n  prepared group (") and "    full %0 stores %0\n" in text
    assert "  group (2, 6) from %1\n    full %1 stores %1\n" in text
    assert '"not joined: the kernel of matmul computes 2x6, ' in text and "    row %" in text
    assert re.search(r"full %(\d+) stores %\1.0, %\1.1$", text, re.MULTILINE)
    absorbed, _ = groups_of(lambda g: [rlx.concat(rlx.exp(g.input("x", (2, 6), "f32"))[::-1], g.input("y", (2, 6), "f32"))])
    assert "    absorbed %" in absorbed
    apart, _ = groups_of(lambda g: [rlx.exp(g.input("x", (2, 6), "f32") * 2.0)], disable=("fuse",))
    assert '"not joined: fusion is left out"' in apart


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("groups g", "group g"), "line 1: expected groups NAME"),
        (("full %", "fool %"), "line 3: expected prepared, group, or one of operand, absorbed, full"),
        (("full %1", "full %99"), "line 3: the graph has no node %99"),
        (("stores %1", "stores %0"), "%0 is not a result of"),
        (("group (4, 6)", "group (4, true)"), "the dims of a group are a tuple of integers"),
        (("full %1 stores %1", "full %1 stores %1 %1"), "line 3: expected"),
    ],
)
def test_malformed_text_is_a_parse_error_with_its_line(changed: tuple[str, str], message: str) -> None:
    text, graph = groups_of(lambda g: [rlx.exp(g.input("x", (4, 6), "f32") * 2.0)])
    text = "groups g\n  group (4, 6)\n    full %1 stores %1"
    assert print_groups(parse_groups(text, graph), graph) == text and changed[0] in text
    with pytest.raises(ParseError, match=message):
        parse_groups(text.replace(*changed), graph)


def test_reports_say_why_a_node_is_in_a_kernel_of_its_own() -> None:
    g = Graph("g")
    g.set_outputs([rlx.softmax(g.input("x", (2, 6), "f32") @ g.param("w", (6, 6), "f32"))])
    nodes = lower(g, TARGET, rlx.CompileOptions()).nodes
    assert any(n.why.startswith("not joined: the kernel of matmul") for n in nodes)


# -- groups that are alike ------------------------------------------------------------------------------------------


def lowered_apart(monkeypatch, graph, target):
    """(groups, groups that were lowered by themselves), after comparing every kernel and its arguments with one so lowered."""
    compilation = Compilation(target, CompileOptions())
    facts = facts_of(run_passes(graph, compilation), compilation)
    groups, own = fuse(facts), []
    monkeypatch.setattr(alike, "lower_group", lambda g, facts: own.append(g) or lower_group(g, facts))
    once = alike.Alike(facts)
    for group in groups:
        found, wanted = once.lowered(group), lower_group(group, facts)
        assert (kernel_key(found.kernel), found.args) == (kernel_key(wanted.kernel), wanted.args)
    return len(groups), len(own)


def test_equal_layers_are_lowered_once(monkeypatch):
    counts = {}
    for layers in (3, 7):
        g = Graph("layers")
        x = g.input("x", (16, 32), "f32")
        for i in range(layers):
            w, b = g.param(f"w{i}", (32, 32), "f32"), g.param(f"b{i}", (32,), "f32")
            x = rlx.layer_norm(rlx.gelu(x @ w) + x, b, b) * 0.5
        g.set_outputs([x])
        counts[layers] = lowered_apart(monkeypatch, g, get("cpu").target())
    assert counts[7][0] > counts[3][0] and counts[7][1] == counts[3][1]


def test_unlike_groups_are_lowered_apart(monkeypatch):
    """They differ in a number, its sign, an offset, a stride, the operand that is read twice, or the dtype."""
    g = Graph("unlike")
    x, y, rows = g.input("x", (8, 6), "f32"), g.input("y", (8, 6), "f32"), g.input("rows", (3,), "i32")
    h = g.handle(BufferHandle("h", (8, 6), rlx.f32))
    whole = [x * 2.0, x * 3.0, x + x, x + y, y + y, x.astype("bf16") + y.astype("bf16"), x * h]
    parts = [x[2:4] + 1.0, x[3:5] + 1.0, x[::4] + 1.0, y[2:4] + 1.0, x.T[2:4] + 1.0, x[rows] + 1.0, y[rows] + 1.0]
    pads = [rlx.pad(v, low=(1, 0), high=(0, 0), value=value) for v in (x, y) for value in (0.0, -0.0, 1.0)]
    g.assign(h, rlx.update_rows(h, x[1:3], rows[0]))
    g.set_outputs([rlx.cumsum(v, axis=0) for v in (*whole, *parts, *pads)])
    for name in ("cpu", "ref"):
        groups, own = lowered_apart(monkeypatch, g, get(name).target())
        assert own < groups


@pytest.mark.parametrize(("dims", "grid", "columns"), [((9, 40, 1), [5], 40), ((9, 1, 40), [5], 40), ((9, 3, 1, 8), [5, 3], 8)])
def test_dims_of_1_have_no_loops(dims: tuple[int, ...], grid: list[int], columns: int) -> None:
    """Also where an op needs each coordinate of its result: adjacent elements are the lanes."""
    g = Graph("rows")
    g.set_outputs([rlx.gather(g.input("x", dims, "f32"), g.input("at", (5,), "i64"), axis=0)])
    (step,) = lower(g, TARGET, CompileOptions()).steps
    (loop,) = step.kernel.body
    assert isinstance(loop, Loop) and loop.vector and loop.extent == columns
    assert [n for _, n in step.kernel.grid] == grid

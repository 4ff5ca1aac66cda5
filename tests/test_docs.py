"""The documents that are programs run: the walk prints every stage, the page of ops is as the op table is, the chart as the
tables of measurements are."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import rlx
from rlx.ir.op import OPS, Kind
from rlx.ir.ops import OWN

DOCS = Path(__file__).parent.parent / "docs"


def test_the_walk_shows_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "walk.py"), run_name="__main__")
    text = capsys.readouterr().out
    for stage in ("1. the graph", "after the pass 'legalise'", "a step of 'prepare'", "contract ", "erf(", "define "):
        assert stage in text
    assert ".text" in text.split("machine code")[1] and "runs = [2]" in text


def test_the_first_hour_runs(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(DOCS.parent)}
    command = [sys.executable, DOCS / "first_hour.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "x is f32[3,64], was f32[8,64]" in done.stdout and "<MemoryPlan of" in done.stdout and "overhead" in done.stdout
    assert "notes/lunch.txt:1" in done.stdout.splitlines()[-2]
    assert {"network.rlx", "network.html", "trace.json"} < {p.name for p in tmp_path.iterdir()}


def test_the_page_of_ops_is_as_the_table_is() -> None:
    made = runpy.run_path(str(DOCS / "ops.py"))
    assert (DOCS / "ops.md").read_text(encoding="utf-8") == made["page"](), "the op table has changed: run python docs/ops.py"
    shown = [op.name for _, ops in made["families"]() for op in ops]
    assert sorted(shown) == sorted(op.name for op in OWN if op.kind is not Kind.LEAF)


def test_the_table_of_onnx_operators_is_as_the_handlers_are() -> None:
    made = runpy.run_path(str(DOCS / "onnx_table.py"))["page"]()
    assert (DOCS / "onnx.md").read_text(encoding="utf-8") == made, "handlers have changed: run python docs/onnx_table.py"


def test_the_chart_is_as_the_tables_of_measurements_are() -> None:
    made = runpy.run_path(str(DOCS / "chart.py"))
    assert (DOCS / "speed.svg").read_text(encoding="utf-8") == made["chart"](), "a table has changed: run python docs/chart.py"
    bars = [bar for _, group in made["groups"]() for bar in group]
    assert len(bars) > 20 and min(bar.ratio for bar in bars) < 1 < max(bar.ratio for bar in bars)
    with pytest.raises(LookupError, match="no row with"):
        made["rows"]("Encoders, 2026-11-20", model="minilm 0 × 0")


def test_links_within_the_page_of_measurements_lead_to_sections() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}
    anchors |= set(re.findall(r'<a id="([\w-]+)">', text))
    links = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert len(links) > 10 and links <= anchors
    pages = {f"measurements/{page.name}" for page in (DOCS / "measurements").glob("*.md")}
    assert set(re.findall(r"\]\((measurements/\w+\.md)\)", text)) == pages


def test_the_picture_of_memory_has_a_box_for_each_value(tmp_path: Path) -> None:
    g = rlx.Graph("<net>")
    x = g.input("x", (64, 64), "f32")
    g.set_outputs([rlx.softmax(rlx.softmax(x @ x) @ x)])
    compiled = rlx.Session("ref").compile(g)
    compiled.report().save(tmp_path / "report.json")
    drawn = runpy.run_path(str(DOCS / "memory.py"))["picture"](json.loads((tmp_path / "report.json").read_text("utf-8")))
    boxes = [e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("rect") and e.get("class") != "page"]
    assert len(boxes) == len(compiled.memory_plan().slots) >= 3
    assert "&lt;net&gt;" in drawn and f"{compiled.memory_plan().arena_bytes / 1e6:.2f} MB" in drawn


def command_lines() -> list[str]:
    """Every call of the command `rlx` in the README and the pages."""
    texts = [p.read_text(encoding="utf-8") for p in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return sorted({line for block in blocks for line in block.splitlines() if line.startswith("rlx ")})


@pytest.mark.parametrize("line", command_lines())
def test_commands_of_the_pages_parse(line: str) -> None:
    """The command and its options are those that rlx has; models and files of the examples need not be there."""
    import typer

    from rlx.cli.main import app

    name, *given = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, given, resilient_parsing=False)


def test_every_page_is_in_the_site() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    api = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", api, re.MULTILINE):
        assert pydoc.locate(name) is not None, name


OWN_TESTS = {"add_a_backend.md", "add_an_op.md", "ranks.md"}  # test_c_backend.py, test_add_an_op_doc.py, test_ranks_doc.py


@pytest.mark.parametrize("page", [p for p in sorted(DOCS.glob("*.md")) if p.name not in OWN_TESTS], ids=lambda p: p.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks in order, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks)
    if '"cuda' in code and not rlx.is_available("cuda"):
        pytest.skip(f"no GPU: {rlx.backends.available().get('cuda:0', 'the CUDA backend is not installed')}")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {"__name__": "__main__"})


def test_the_stubs_are_as_the_table_is() -> None:
    for path, text in runpy.run_path(str(DOCS / "ops.py"))["stubs"]().items():
        assert path.read_text(encoding="utf-8") == text, "the op table has changed: run python docs/ops.py"


def test_signatures_of_constructors_name_operands_and_attributes() -> None:
    found = {name: str(inspect.signature(getattr(rlx, name))) for name in ("gelu", "concat", "variance", "layer_norm", "reshape")}
    assert found == {
        "gelu": "(x, /, approximate='none', *, shape=None, name=None) -> 'Value'",
        "concat": "(*operands, axis=0, shape=None, name=None) -> 'Value'",
        "variance": "(x, /, axis=(), keepdims=False, correction=0, *, shape=None, name=None) -> 'Value'",  # some are inherited
        "layer_norm": "(x, /, *affine, axis=-1, eps=1e-05, shape=None, name=None) -> 'Value'",
        "reshape": "(x, /, dims, *, shape=None, name=None) -> 'Value'",
    }


def test_entries_of_the_page_of_ops() -> None:
    entry = runpy.run_path(str(DOCS / "ops.py"))["entry"]
    assert "`concat(*operands, axis: int = 0)`" in entry(OPS["concat"])
    assert "`linear(x, w, [b])`" in entry(OPS["linear"])
    assert "`gelu(x, approximate: 'none' | 'tanh' = 'none')`" in entry(OPS["gelu"])
    assert "`iota(dims: tuple[int | Dim, ...], axis: int = 0, dtype: DType = i64)`" in entry(OPS["iota"])
    assert "*index; floats, signed integers, unsigned integers, bool; at: an index (integers)*" in entry(OPS["take_rows"])


def test_tables_of_benchmarks_have_a_line_of_notes_if_there_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from benchmarks import measure

    monkeypatch.setattr(measure, "DOCUMENT", tmp_path / "benchmarks.md")
    measure.append("Rows", "About", ["| a |", "| 1 |"])
    measure.append("Both", "About", ["| a |", "| 1 |", "one", "| 2 |", "other"])
    rows, both = "## Rows\n\nAbout\n\n| a |\n| 1 |\n", "## Both\n\nAbout\n\n| a |\n| 1 |\n| 2 |\n\none; other.\n"
    assert measure.DOCUMENT.read_text("utf-8") == f"\n{rows}\n{both}"


def test_benchmarks_of_one_processor_leave_those_of_others_and_other_parts_alone():
    from benchmarks.cpu import replaced

    text = "# Benchmarks\n\n## First, 2 CPUs\n\n### start\n\nold\n\n### encoders\n\nkept\n\n## Other\n\n### start\n\ntheirs\n"
    found = replaced(text, "First, 2 CPUs", {"start": "new", "chains": "added"})
    assert found == text.replace("old\n\n### encoders\n\nkept\n", "new\n\n### encoders\n\nkept\n\n### chains\n\nadded\n")
    made = replaced(text, "Third, 4 CPUs", {"start": "new"})
    assert made == text + "\n## Third, 4 CPUs\n\n### start\n\nnew\n"
    assert replaced(made, "Third, 4 CPUs", {"start": "newer"}) == made.replace("new\n", "newer\n")

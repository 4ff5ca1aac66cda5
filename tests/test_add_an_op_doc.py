"""docs/add_an_op.md is followed: its edits are made in a copy of the tree, its program and its checks are run there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import bytecode
import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "add_an_op.md"


def program(text: str) -> str:
    """The Python blocks at their own line numbers, everything else blank."""
    lines, inside = [], False
    for line in text.split("\n"):
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


def edits(text: str) -> list[tuple[str, str, str]]:
    """(kind, file, block) of every block that is an edit: "python" lines are appended, "diff" lines replaced."""
    return re.findall(r"^```(python|diff) (\S+)\n(.*?)^```$", text, re.M | re.S)


def edited(text: str, kind: str, block: str) -> str:
    """A file's text after one edit. Lines that a diff takes away are there once."""
    if kind == "python":
        return f"{text}\n\n{block}"
    for before, after in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block, re.M):
        old, new = (re.sub("^[-+]", "", part, flags=re.M).rstrip("\n") for part in (before, after))
        assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the edits of the page."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("rlx", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name)
    bytecode.copied(ROOT, copy)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, copy)
    found = edits(PAGE.read_text())
    assert {file for _, file, _ in found} == {
        "rlx/ir/ops/activation.py", "rlx/ir/ops/elementwise.py", "rlx/ir/ops/__init__.py", "tests/op_oracles.py",
    }  # fmt: skip
    for kind, file, block in found:
        path = copy / file
        path.write_text(edited(path.read_text(), kind, block))
    return copy


def run(command: list[str], tree: Path) -> None:
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)[-200:]}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_page_runs(tree: Path) -> None:
    run([sys.executable, "-c", program(PAGE.read_text())], tree)


def test_checks_of_the_page_pass(tree: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    commands = [shlex.split(line) for line in block.splitlines()]
    assert len(commands) == 5 and all(c[0] == "python" for c in commands)
    for command in commands:
        run([sys.executable, *command[1:]], tree)


def test_page_names_facts_that_exist():
    from rlx.ir.op import Kind, OpDef

    rows = re.findall(r"^\| ([A-Z]+) \| (.*?) \|", PAGE.read_text(), re.M)
    assert {kind for kind, _ in rows} == {k.name for k in Kind} - {"LEAF", "COMPOSITE"}
    for _, facts in rows:
        for name in re.findall(r"`(\w+)", facts):
            assert name in OpDef.__dataclass_fields__


def test_a_failing_block_is_seen():
    page = program("text\n```python\nassert False\n```")
    assert page == "\n\nassert False\n"
    done = subprocess.run([sys.executable, "-c", page], capture_output=True, text=True, check=False)
    assert done.returncode and "line 3" in done.stderr

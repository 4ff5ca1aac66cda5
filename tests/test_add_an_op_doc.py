"""docs/add_an_op.md is a program: its Python blocks run in order, in a process of their own (they add to the op table)."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "add_an_op.md"


def program(text: str) -> str:
    """The Python blocks at their own line numbers, everything else blank."""
    lines, inside = [], False
    for line in text.split("\n"):
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


def test_page_runs():
    text = PAGE.read_text()
    assert len(re.findall("^```python$", text, re.M)) >= 4
    done = subprocess.run(
        [sys.executable, "-c", program(text)], cwd=PAGE.parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{PAGE.name}:\n{done.stderr[-3000:]}"


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

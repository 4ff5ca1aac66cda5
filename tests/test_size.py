"""The size budget: code lines (no blank lines, comments, docstrings) per folder, and limits per file and function.

pytest tests/test_size.py -s       prints the table
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlx"
FILES = sorted(PACKAGE.rglob("*.py"))
BUDGET = 45_212  # code lines of the package without the folders below
BACKENDS = {"backends/cuda": 11_770}  # code lines of the backends that other devices need
FILE_SOFT, FILE_HARD = 500, 800  # lines of a file; past the soft one its docstring says why ("500 lines")
FUNCTION = 60  # code lines
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of strings that stand alone as statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@cache  # not of the trees: the garbage collector would look at them again and again
def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source))


def long_functions(source: str) -> list[str]:
    lines = code_lines(source)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count = len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if count > FUNCTION:
                found.append(f"{node.name} has {count} code lines, at most {FUNCTION}: split it")
    return found


def test_counting():
    source = '"""Doc\nstring."""\n\n# comment\nx = 1  # why\n\n\n'
    source += 'def f(a,\n      b):\n    """Doc."""\n    return """text\n    of two"""\n'
    assert code_lines(source) == {5, 8, 9, 11, 12}
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == ["f has 61 code lines, at most 60: split it"]
    assert long_functions("def f():\n    'doc'\n" + "    x = 1\n\n    # why\n" * 59) == []


def test_the_package_stays_within_its_budget(capsys):
    folders: Counter[str] = Counter()
    for f in FILES:
        inner = f.relative_to(PACKAGE).parts
        folder = "/".join(inner[:2]) if inner[0] == "backends" and len(inner) > 2 else inner[0] if len(inner) > 1 else "(top)"
        folders[folder] += len(code_lines(f.read_text()))
    total = sum(count for name, count in folders.items() if name not in BACKENDS)
    table = "\n".join(f"{count:6}  {name}" for name, count in sorted(folders.items()))
    print(f"\n{table}\n{total:6}  of {BUDGET}")
    assert total <= BUDGET, f"{total} code lines, the budget is {BUDGET}:\n{table}"
    over = {name: folders[name] for name, most in BACKENDS.items() if folders[name] > most}
    assert not over, f"{over} code lines, the budgets are {BACKENDS}"
    assert total > 0 and "ir" in folders


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_and_functions_stay_readable(file):
    source = file.read_text()
    lines = source.count("\n")
    assert lines <= FILE_HARD, f"{file.name} has {lines} lines: split it"
    reason = ast.get_docstring(ast.parse(source)) or ""
    assert lines <= FILE_SOFT or "500 lines" in reason, f"{file.name} has {lines} lines and does not say why it is over 500 lines"
    long = long_functions(source)
    assert not long, "\n".join(long)

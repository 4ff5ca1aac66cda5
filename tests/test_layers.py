"""The architecture as a test: who may import whom, which package lives in which folder, and a few habits."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from rlx import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rlx"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "forks", "garbage", "knobs", "records"}
MAY_IMPORT = {
    "errors": set(),
    "forks": set(),
    "garbage": set(),
    "knobs": {"errors", "records"},
    "records": set(),
    "ir": BASE,
    "autodiff": BASE | {"ir"},
    "compiler": BASE | {"ir"},
    "host": BASE | {"ir"},
    "driver": BASE | {"ir", "host"},
    "backends": BASE | {"ir", "host", "driver"},
    "explain": BASE | {"ir", "compiler", "driver"},
    "runtime": BASE | {"ir", "compiler", "host", "driver", "backends", "explain"},
    "frontends": BASE | {"ir", "autodiff", "runtime"},
    "models": {"errors", "frontends"},  # rlx.models, a public name for a part of frontends
    "cli": BASE | {"ir", "autodiff", "compiler", "host", "driver", "backends", "explain", "runtime", "frontends", "models"}
    | {"__version__"},
    "__init__": BASE | {"ir", "autodiff", "driver", "backends", "runtime", "frontends", "models"},
    "__main__": {"cli"},
}
ARRAYS = {"numpy", "ml_dtypes"}
THIRD_PARTY = {  # the longest prefix of the file's path decides
    "errors": set(),
    "forks": set(),
    "garbage": set(),
    "knobs": set(),
    "records": set(),
    "ir": ARRAYS,
    "autodiff": ARRAYS,
    "compiler": ARRAYS,
    "host": ARRAYS | {"llvmlite"},
    "driver": ARRAYS,
    "driver/transports": ARRAYS | {"mpi4py"},
    "backends": ARRAYS,
    "backends/cpu": ARRAYS | {"llvmlite"},
    "backends/cuda": ARRAYS | {"cuda"},
    "explain": {"numpy"},
    "runtime": ARRAYS,
    "frontends": ARRAYS | {"huggingface_hub", "jinja2", "safetensors", "tokenizers"},
    "frontends/onnx": ARRAYS | {"onnx", "google", "onnxruntime"},  # google: protobuf, which onnx needs
    "models": set(),
    "cli": ARRAYS | {"typer", "rich"},
    "__init__": set(),
    "__main__": set(),
}
# never loaded by `import rlx`
HEAVY = {"ml_dtypes", "llvmlite", "typer", "rich", "tokenizers", "safetensors", "huggingface_hub", "torch", "onnx"}


Import = tuple[ast.Import | ast.ImportFrom, str, bool]


def imports(tree: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    """(statement, absolute module name, whether it stands under TYPE_CHECKING) of every import. `from rlx import x` is rlx.x."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for inner in node.body:
                yield from imports(ast.Module([inner], []), True)
            for inner in node.orelse:
                yield from imports(ast.Module([inner], []), typing_only)
        elif isinstance(node, ast.Import):
            yield from ((node, a.name, typing_only) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module in ("rlx", "rlx.backends", "rlx.frontends"):
                yield from ((node, f"{module}.{a.name}", typing_only) for a in node.names)
            else:
                yield node, module, typing_only
        elif not isinstance(node, ast.expr):  # expressions hold no statements
            yield from imports(node, typing_only)


class Found(NamedTuple):
    """Everything that the tests below ask about a source; the lines where it touches the environment and where it swallows an
    exception, and how often `Any` stands in it as a type."""

    imports: list[Import]
    environment: list[int]
    swallowed: list[int]
    untyped: int


@cache
def found_in(source: str) -> Found:
    """One walk, since the tree of a source is large and dozens of tests ask for it."""
    tree = ast.parse(source)
    found = Found(list(imports(tree)), [], [], 0)
    untyped = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            untyped += node.id == "Any"
        elif isinstance(node, ast.Attribute):
            if node.attr in ("environ", "environb", "getenv", "putenv"):
                found.environment.append(node.lineno)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"}:
                found.environment.append(node.lineno)
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(s, ast.Pass) for s in node.body):
                found.swallowed.append(node.lineno)
    return found._replace(untyped=untyped)


def parts_of(path: str) -> list[str]:
    """Path inside the package, without the suffix: rlx/ir/text.py -> ["ir", "text"]."""
    return path.removesuffix(".py").split("/")


def import_faults(path: str, source: str) -> list[str]:
    """Imports of the file `path` (inside rlx) against the law."""
    here = parts_of(path)
    package = here[0]
    found = []
    for node, name, typing_only in found_in(source).imports:
        fault = None
        root, *rest = name.split(".")
        if name.startswith("."):
            fault = "relative import: write it out"
        elif root == "rlx":
            fault = rlx_import_fault(here, rest, typing_only)
        elif root not in sys.stdlib_module_names:
            allowed = max((p for p in THIRD_PARTY if "/".join(here).startswith(p)), key=len)
            if root not in THIRD_PARTY[allowed]:
                fault = f"rlx.{package} may not import {root}"
            elif root in HEAVY and package in ("ir", "host", "driver", "compiler") and node.col_offset == 0:
                fault = f"{root} is imported on first use, inside a function"
        if fault:
            found.append(f"rlx/{path}:{node.lineno}: {fault}")
    return found


def rlx_import_fault(here: list[str], there: list[str], typing_only: bool) -> str | None:
    package, name = here[0], ".".join(["rlx", *there])
    if not there:
        return "import the module that has the name, not all of rlx"
    if there[0] != package:
        if there[0] not in MAY_IMPORT[package]:
            how = " (nor for its types)" if typing_only else ""
            return f"rlx.{package} may not import {name}{how}"
        if there[0] == "backends" and len(there) > 1 and (PACKAGE / "backends" / there[1]).is_dir():
            return f"rlx.{package} reaches a backend through rlx.backends.get(name), not by importing {name}"
    elif package == "backends" and len(here) > 2 and len(there) > 1 and there[1] != here[1]:
        if there[1] != "shared" and (PACKAGE / "backends" / there[1]).is_dir():
            return f"backend {here[1]} may not import backend {there[1]}"
    return None


def test_imports_follow_the_arrows():
    faults = [fault for f in FILES for fault in import_faults(f.relative_to(PACKAGE).as_posix(), f.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "path,source,expected",
    [
        ("backends/cpu/render.py", "from rlx.compiler.fuse import fuse", "rlx.backends may not import rlx.compiler.fuse"),
        ("compiler/fuse.py", "import rlx.backends", "rlx.compiler may not import rlx.backends"),
        ("ir/graph.py", "from rlx import driver", "rlx.ir may not import rlx.driver"),
        ("ir/graph.py", "if TYPE_CHECKING:\n    from rlx.compiler.fuse import X", "nor for its types"),
        ("ir/graph.py", "def f():\n    from rlx.runtime import X", "rlx.ir may not import rlx.runtime"),
        ("ir/graph.py", "from ..compile import X", "relative import"),
        ("ir/graph.py", "import scipy", "rlx.ir may not import scipy"),
        ("ir/graph.py", "import ml_dtypes", "on first use"),
        ("backends/ref/backend.py", "import llvmlite.binding", "rlx.backends may not import llvmlite"),
        ("backends/cpu/x.py", "from rlx.backends.ref.backend import X", "backend cpu may not import backend ref"),
        ("backends/cpu/x.py", "from rlx.backends import ref", "backend cpu may not import backend ref"),
        ("backends/shared/x.py", "from rlx.backends.cpu.scope import Scope", "backend shared may not import backend cpu"),
        ("backends/shared/x.py", "import llvmlite.binding", "rlx.backends may not import llvmlite"),
        ("runtime/session.py", "from rlx.backends.shared import nest", "through rlx.backends.get"),
        ("runtime/session.py", "from rlx.backends.cpu import target", "through rlx.backends.get"),
        ("runtime/session.py", "from rlx.backends import cpu", "through rlx.backends.get"),
        ("runtime/session.py", "import rich", "rlx.runtime may not import rich"),
        ("driver/buffer.py", "import rlx", "not all of rlx"),
        ("frontends/onnx/load.py", "from rlx.compiler import lower", "rlx.frontends may not import rlx.compiler"),
    ],
)
def test_the_law_bites(path, source, expected):
    (fault,) = import_faults(path, source)
    assert expected in fault and fault.startswith(f"rlx/{path}:")


@pytest.mark.parametrize(
    "path,source",
    [
        ("cli/main.py", "import rlx.ir.graph, typer"),
        ("ir/dtype.py", "def f():\n    import ml_dtypes"),
        ("ir/op.py", "if TYPE_CHECKING:\n    from rlx.ir.graph import Value"),
        (
            "backends/cpu/jit.py",
            "import llvmlite.binding as llvm\nfrom rlx.host.emit import V\nfrom rlx.driver import Device",
        ),
        ("runtime/session.py", "from rlx.backends import get, is_available"),
        ("backends/ref/backend.py", "from rlx.backends.shared.flow import run_flow"),
    ],
)
def test_the_law_allows(path, source):
    assert import_faults(path, source) == []


def test_every_package_has_its_row():
    packages = {parts_of(f.relative_to(PACKAGE).as_posix())[0] for f in FILES}
    assert packages <= set(MAY_IMPORT) and {p.partition("/")[0] for p in THIRD_PARTY} == set(MAY_IMPORT)


def test_importing_rlx_loads_nothing_heavy():
    code = f"import sys, rlx; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_only_knobs_reads_the_environment():
    assert found_in("import os\nx = os.environ['A']").environment == found_in("1\nfrom os import getenv").environment == [2]
    found = {str(f.relative_to(ROOT)): found_in(f.read_text()).environment for f in FILES if f.name != "knobs.py"}
    assert not {f: lines for f, lines in found.items() if lines}


def habits_broken(name: str, source: str) -> list[str]:
    """Habits that a reviewer would name: (file name, text) -> sentences."""
    found = []
    if name in ("utils.py", "common.py", "helpers.py", "misc.py"):
        found.append(f"{name} does not say what it is")
    for number, line in enumerate(source.split("\n"), 1):
        if re.search(r"\b(TO[D]O|FIX[M]E|X[X]X|NotImplemented[E]rror)\b", line):  # brackets: no match for itself
            found.append(f"line {number}: unfinished work")
        if re.search(r"""["'](/home/|/root/|/work/|[A-Z]:\\)""", line):
            found.append(f"line {number}: a path of one machine")
    return found + [f"line {number}: a swallowed exception" for number in found_in(source).swallowed]


def test_habits():
    broken = [f"{f.relative_to(ROOT)}: {fault}" for f in FILES for fault in habits_broken(f.name, f.read_text())]
    assert not broken, "\n".join(broken)


def test_the_habits_bite():
    assert habits_broken("utils.py", "") and habits_broken("a.py", "x = 1  # TO" + "DO later")
    assert habits_broken("a.py", "try: f()\nexcept Exception: pass") and habits_broken("a.py", "x = '/ho" + "me/me/x'")
    assert not habits_broken("a.py", "try: f()\nexcept OSError: pass")


def test_the_words_page_names_what_exists():
    text = (ROOT / "docs" / "words.md").read_text()
    names = re.findall(r"`(rlx\.[\w.]+)`", text)
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not (ROOT / (name.replace(".", "/") + ".py")).exists():
            assert hasattr(importlib.import_module(module), attribute), name
    words = re.findall(r"^- \*\*(.+?)\*\*:", text, re.MULTILINE)
    assert len(words) == len(set(words)) and {"node", "region", "kernel", "slot", "active extent"} <= set(words)


ERRORS = {name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, errors.RlxError)}


@pytest.mark.parametrize("package,module", [
    ("ir", "rlx.ir"), ("compiler", "rlx.compiler"), ("driver", "rlx.driver"), ("runtime", "rlx.runtime"),
    ("backends", "rlx.runtime"), ("compiler", "rlx.runtime"), ("driver", "rlx.runtime"), ("frontends", "rlx.models"),
])  # fmt: skip
def test_errors_can_be_imported_where_they_are_raised(package: str, module: str) -> None:
    """Also through the runtime, which passes on what lies below it."""
    there = importlib.import_module(module)
    raised = {
        alias.name
        for file in (PACKAGE / package).rglob("*.py")
        for node, name, _ in found_in(file.read_text()).imports
        if name == "rlx.errors" and isinstance(node, ast.ImportFrom)
        for alias in node.names
    } & ERRORS
    assert raised and sorted(raised - set(there.__all__)) == []
    assert all(getattr(there, name) is getattr(errors, name) for name in raised)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among `sources` (name -> text) that it imports: at the top, inside functions, or for types only."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node, *_ in found_in(source).imports:
            if isinstance(node, ast.Import):
                found[name] |= {a.name for a in node.names}
            else:
                inner = {f"{node.module}.{a.name}" for a in node.names}
                found[name] |= (inner & sources.keys()) or {f"{node.module}"}
    return {name: (there & sources.keys()) - {name} for name, there in found.items()}


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that import each other, directly or through others: those left when modules without imports go, in turn."""
    left = {name: set(there) for name, there in graph.items()}
    for turned in (False, True):  # then those that nobody imports, which only reach a cycle
        if turned:
            left = {name: {other for other in left if name in left[other]} for name in left}
        while free := [name for name, there in left.items() if not there]:
            left = {name: there - set(free) for name, there in left.items() if name not in free}
    return sorted(left)


def test_no_module_imports_itself_through_others():
    names = (".".join(["rlx", *parts_of(f.relative_to(PACKAGE).as_posix())]).removesuffix(".__init__") for f in FILES)
    sources = dict(zip(names, (f.read_text() for f in FILES)))
    assert cycles(import_graph(sources)) == [], "an import inside a function or under TYPE_CHECKING hides a cycle: split a module"


def test_cycles_are_found():
    lazy = "def f():\n    from rlx.b import x"
    typed = "if TYPE_CHECKING:\n    from rlx import a"
    around = {"rlx.c": "import rlx.a", "rlx.d": "", "rlx.e": "import rlx.c"}
    assert cycles(import_graph({"rlx.a": lazy, "rlx.b": typed, **around})) == ["rlx.a", "rlx.b"]
    assert cycles(import_graph({"rlx.a": lazy, "rlx.b": "from rlx.c import y", "rlx.c": "import os"})) == []


@pytest.mark.parametrize("folder,most", [("ir", 123), ("compiler", 13)])
def test_types_are_said(folder, most):
    assert found_in("from typing import Any\nx: Any = Any\ny: dict[str, Any]").untyped == 3
    found = {f.relative_to(PACKAGE).as_posix(): found_in(f.read_text()).untyped for f in (PACKAGE / folder).rglob("*.py")}
    assert sum(found.values()) <= most, f"Any stands {sum(found.values())} times: {found}"

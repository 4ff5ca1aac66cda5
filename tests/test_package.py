"""The package as a user meets it: what `import rlx` gives and loads, and the README's examples."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from op_cases import cases

import rlx
from rlx.ir import functions, ops
from rlx.ir.body import Body
from rlx.ir.dtype import DType
from rlx.ir.first import BLAS_SPIN
from rlx.ir.methods import ATTRIBUTES
from rlx.ir.op import Kind
from rlx.ir.ops import OWN

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("llvmlite", "ml_dtypes", "typer", "rich", "click", "torch", "tokenizers", "safetensors", "scipy", "transformers")


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_loads_nothing_heavy():
    """No module but its own, so it takes no longer than numpy; and nothing heavy once every public name is there."""
    before, bare, every = json.loads(_python(
        "import sys, json, typing, importlib; before = list(sys.modules); import rlx; bare = list(sys.modules)\n"
        "for name in rlx.__all__: getattr(rlx, name) if name not in ('models', 'load', 'from_onnx') else None\n"
        "print(json.dumps([before, bare, list(sys.modules)]))"
    ))  # fmt: skip
    assert set(bare) - set(before) <= {"rlx", "__future__", "gc"}
    loaded = {name.partition(".")[0] for name in every}
    assert {"numpy", "rlx"} <= loaded and not set(HEAVY) & loaded
    assert "rlx.backends.cpu" not in every and "rlx.frontends" not in every


def test_the_first_use_of_a_name_loads_no_slow_modules() -> None:
    """Modules of the standard library that take milliseconds, and that numpy has not loaded; the compiler's passes; and what
    ranks and experts need."""
    slow = {"asyncio", "concurrent.futures", "decimal", "difflib", "email", "fractions", "http", "importlib.metadata",
            "importlib.resources", "importlib.util", "logging", "multiprocessing", "numpy.random", "numpy.typing", "pathlib",
            "shutil", "socket", "statistics", "subprocess", "tempfile", "unittest", "urllib", "zipfile"}  # fmt: skip
    slow |= {"rlx.compiler.assemble", "rlx.compiler.partition"}
    slow |= {f"rlx.driver.{name}" for name in ("collective", "exchange", "experts", "launch", "symmetric", "transports.shm")}
    loaded = json.loads(_python(
        "import sys, json, typing, numpy; before = set(sys.modules); import rlx; rlx.Graph; rlx.Session\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    ))  # fmt: skip
    assert "rlx.runtime.session" in loaded and not slow & set(loaded)


@pytest.mark.parametrize("chosen", [None, "20"])
def test_numpy_is_imported_with_threads_that_sleep_soon_and_the_environment_stays(chosen: str | None) -> None:
    name, cycles = BLAS_SPIN
    code = (
        f"import os, sys, rlx; os.environ.pop({name!r}, None); os.environ |= {{k: v for k, v in {[(name, chosen)]} if v}}\n"
        f"seen, find = [], lambda module, *_: seen.append(os.environ.get({name!r})) if module == 'numpy' else None\n"
        f"sys.meta_path.insert(0, type('Finder', (), {{'find_spec': find}}))\n"
        f"for package in rlx._WITHOUT_NUMPY: getattr(rlx, package.removeprefix('rlx.'))\n"
        f"print(seen); rlx.Graph; print(seen[0], os.environ.get({name!r}))"
    )
    assert _python(code).splitlines() == ["[]", f"{chosen or cycles} {chosen}"]


def test_names_are_where_type_checkers_find_them() -> None:
    tree = ast.parse((ROOT / "rlx" / "__init__.py").read_text())
    typing = next(n for n in tree.body if isinstance(n, ast.If))
    named = {a.asname or a.name for n in typing.body if isinstance(n, ast.ImportFrom) for a in n.names} - {"*", "_functions"}
    (listed,) = (ast.literal_eval(n.value) for n in typing.body if isinstance(n, ast.Assign))
    assert named == set(rlx._HOME) | (rlx._PACKAGES & named) and set(listed) <= named
    assert set(rlx.__all__) == {*listed, *ops.__all__, *functions.__all__} == set(dir(rlx))


def test_internal_modules_do_not_hide_behind_public_names() -> None:
    for name in ("view", "elementwise", "OWN", "np", "methods"):
        with pytest.raises(AttributeError, match=name):
            getattr(rlx, name)


def test_objects_show_themselves_in_a_line_and_in_notebooks() -> None:
    g = rlx.Graph("net")
    g.set_outputs([g.input("x", (2, 3), rlx.f32) @ g.param("w", (3, 3), rlx.f32)])
    session, cache = rlx.Session("cpu", threads=1), rlx.CompileCache()
    compiled = cache.compile(session, g)
    lines = {
        "Graph": (g, "<Graph 'net': x f32[2,3] -> output0 f32[2,3]; 1 param>"),
        "Session": (session, "<Session on CPU, 1 threads>"),
        "CompiledGraph": (compiled, "<CompiledGraph 'net' on CPU: x f32[2,3] -> output0 f32[2,3]; 1 param; "),
        "Params": (compiled.params, "(w f32[3,3],)"), "MemoryPlan": (compiled.memory_plan(), "<MemoryPlan of "),
        "CompileReport": (compiled.report(), "<CompileReport 'net' on CPU: 2 steps, 2 kernels, "),
        "Program": (compiled.program(), "<Program 'net' for cpu: 1 step, 1 before"),
        "CompileCache": (cache, "<CompileCache of 1 executable, "),
    }  # fmt: skip
    for shown, line in lines.values():
        assert repr(shown).startswith(line) and "\n" not in repr(shown) and " at 0x" not in repr(shown)
        page = getattr(shown, "_repr_html_", lambda: "<pre>")()
        assert page.startswith("<pre>") and "<Graph" not in page
    assert "%0" in g._repr_html_() or "matmul" in g._repr_html_()


USER = """
import numpy as np
import rlx

g = rlx.Graph("g")
x, ids = g.input("x", (4, 8), rlx.f32), g.input("ids", (2,), rlx.i64)
best, at = rlx.top_k(x, k=2)
rows: rlx.Value = x[ids, 0] + x.relu().sum(axis=1)[0]
even = (ids % 2 == 0) & ~(ids > 1) | (ids // 2 < 3)
y = rlx.einsum("ab,cb->ac", x, x).std(axis=0) + rlx.zeros((4,)) + np.ones(4, np.float32)
first = x.shape[0]


def step(h: rlx.Value, row: rlx.Value) -> tuple[rlx.Value, ...]:
    return h + row, h


(last,), (seen,) = rlx.scan(step, x[0], x)
(chosen,) = rlx.cond(last.sum() > 0.0, lambda: last, lambda: -last)
g.set_outputs([chosen, seen, rlx.gelu(y, approximate="tanh"), best, at, rows, even, x.ndim * x.T])
"""
WRONG = {
    "an attribute that is not there": 'rlx.gelu(x, approx="tanh")',
    "a word that is not allowed": 'rlx.gelu(x, approximate="fast")',
    "a missing operand": "rlx.matmul(x)",
    "a result too many": "a, b, c = rlx.top_k(x, k=2)",
    "text for an operand's attribute": 'x.sum(axis="rows")',
    "an op that is not there": "rlx.relux(x)",
    "a method that is not there": "x.relux()",
}


def written(value: object) -> str:
    """As a user writes it."""
    if not isinstance(value, DType):
        return repr(value)
    return f"rlx.{'bool_' if value.name == 'bool' else value}"  # bool is Python's type


def every_op() -> str:
    """A user's program with a call of each op, its operands and attributes those of a sample, as a function and as a method."""
    lines, known = ["import rlx", "", "g = rlx.Graph('g')"], cases(awkward=False)
    for op in sorted((op for op in OWN if op.kind is not Kind.LEAF), key=lambda op: op.name):
        case = next(c for c in known if c.op is op)
        if any(isinstance(v, Body) for v in (case.sample.attrs or {}).values()):
            continue  # users call rlx.cond and rlx.while_loop, which make the bodies
        args = []
        for i, (dims, dtype) in enumerate(zip(case.sample.shapes, case.dtypes)):
            lines.append(f"{op.name}_{i} = g.input('{op.name}_{i}', {dims}, {written(dtype)})")
            args.append(f"{op.name}_{i}")
        words = [f"{k}={written(v)}" for k, v in (case.sample.attrs or {}).items()]
        lines.append(f"rlx.{op.name}({', '.join(args + words)})")
        if op.name not in ATTRIBUTES and getattr(rlx.Value, op.name, None) is getattr(rlx, op.name):
            lines.append(f"{args[0]}.{op.name}({', '.join(args[1:] + words)})")
    return "\n".join(lines) + "\n"


def test_type_checkers_know_every_op(tmp_path: Path) -> None:
    """pyright in its strict mode: no error in right code, and one for each wrong call."""
    checker = Path(sys.executable).with_name("pyright")
    if not checker.exists():
        pytest.skip("pyright is not installed in this environment (make lint installs it)")
    (tmp_path / "right.py").write_text(USER)
    exec(every := every_op(), {})
    (tmp_path / "every.py").write_text(every)
    (tmp_path / "wrong.py").write_text("import rlx\n\nx = rlx.Graph('g').input('x', (4,), rlx.f32)\n" + "\n".join(WRONG.values()))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}))
    done = subprocess.run(
        [checker, "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [d for d in found if not d["file"].endswith("wrong.py")]
    lines = {d["range"]["start"]["line"] for d in found if d["file"].endswith("wrong.py") and d["severity"] == "error"}
    assert lines == set(range(3, 3 + len(WRONG)))


FOREIGN = """
import sys, os, importlib.abc
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "resource", "pwd", "grp", "termios", "posix", "syslog", "tty", "pty"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import numpy, shutil  # which are made for the platform
sys.meta_path.insert(0, Refuse())
sys.platform, only_posix = %r, %r
for name in only_posix:
    for known in [n for n in vars(os) if n == name or n.startswith(name + "_")]: delattr(os, known)
for name in ("fcntl", "resource", "pwd", "grp", "termios"): sys.modules.pop(name, None)
import rlx
for name in rlx.__all__: getattr(rlx, name)
import rlx.driver.transports.mpi
reason = rlx.backends.available()["cpu:0"]
assert sys.platform in reason and "Linux" in reason, reason
try: rlx.Session("cpu")
except rlx.errors.DeviceUnavailableError as e: assert reason in str(e)
else: raise SystemExit("no error")
g = rlx.Graph("g")
x = g.input("x", (2,), "f32")
g.set_outputs([x + 1.0])
assert rlx.Session("ref").compile(g).run({"x": numpy.ones(2, "f4")})[0].tolist() == [2, 2]
try: rlx.driver.ShmTransport("a", 0, 1, 10)
except rlx.errors.TransportError as e: print(e)
"""
POSIX = ("register_at_fork", "fork", "getuid", "sched", "memfd", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "posix", "statvfs")


@pytest.mark.parametrize("platform,gone", [("win32", POSIX), ("darwin", ("sched", "memfd", "posix_fallocate"))])
def test_other_systems_can_import_it_and_are_told_what_is_missing(platform: str, gone: tuple[str, ...]) -> None:
    code = FOREIGN % (platform, gone)
    code = code.replace("import rlx\n", "import rlx, rlx.driver.transports.shm as shm; shm.FOLDER = 'nowhere'\n", 1)
    assert "there is no nowhere here, which the shared memory of ranks needs" in _python(code)


def test_public_names():
    for name in ("Graph", "Session", "CompileOptions", "CompiledGraph", "Device", "BufferHandle", "DType", "Shape", "RlxError"):
        assert getattr(rlx, name).__name__ == name
    for dtype in ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool_", "c64"):
        assert getattr(rlx, dtype) is rlx.DTYPES[dtype.rstrip("_")]
    assert rlx.is_available(rlx.Device.CPU)
    assert all(hasattr(rlx, name) for name in rlx.__all__)
    assert len(set(rlx.__all__)) == len(rlx.__all__)


def test_every_op_of_the_table_is_a_function():
    from rlx.ir.op import OPS, Kind

    for name, declared in OPS.items():
        if declared.kind is not Kind.LEAF:
            assert getattr(rlx, name).op is declared


def test_models_are_loaded_when_asked_for():
    there = "'rlx.models' in sys.modules"
    assert _python(f"import sys, rlx; before = {there}; rlx.models.load; print(before, {there})") == "False True\n"


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'gelo'"):
        _ = rlx.gelo


def test_version_is_the_packages():
    import tomllib

    assert rlx.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", _examples(), ids=range(len(_examples())))
def test_readme(example, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})  # each example stands alone


def test_readme_names_both_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in text and "make test" in text


def test_readme_names_files_that_exist():
    names = set(re.findall(r"`((?:docs/)?[\w.]+\.(?:md|py))`", (ROOT / "README.md").read_text("utf-8")))
    assert len(names) > 3 and not [n for n in names if not (ROOT / n).is_file()]


def test_no_path_of_one_machine_in_the_tree():
    folders = [ROOT / f for f in ("rlx", "tests", "docs", "benchmarks", ".ci")]
    files = [p for f in folders for p in f.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files += [ROOT / f for f in ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md")]
    assert len(files) > 50
    pattern = re.compile("/(?:work|farm|root|home)/[a-z]")
    assert not [str(p) for p in files if pattern.search(p.read_text("utf-8", "replace"))]


def test_tests_hear_ctrl_c_where_sigint_was_ignored():
    """As it is in the background jobs of a script; what they start then hears it too."""
    code = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
here = "import signal; assert signal.getsignal(signal.SIGINT) is signal.{}"
subprocess.run([sys.executable, "-c", here.format("SIG_IGN")], check=True)
sys.path.insert(0, "tests")
import conftest
assert conftest and signal.getsignal(signal.SIGINT) is signal.default_int_handler
subprocess.run([sys.executable, "-c", here.format("default_int_handler")], check=True)
print("heard")
"""
    assert _python(code) == "heard\n"

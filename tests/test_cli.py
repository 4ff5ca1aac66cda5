"""The command: results, files, streams, and one clean line for each error. In a process of its own, as a user runs it,
but for what needs none: a start costs more than the test."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import rlx
from rlx.cli.main import run
from rlx.models import default_folder, load

TEXTS = ["A man is eating food.", "A man eats.", "The sky is blue."]


def rlx_command(*args: str, text: str | bytes | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    given = text.encode() if isinstance(text, str) else text
    environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **env}
    done = subprocess.run([sys.executable, "-m", "rlx", *args], input=given, capture_output=True, env=environment, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def on_a_terminal(*args: str, **env: str) -> tuple[int, str]:
    """(exit code, what the command writes to stderr, which is a terminal)."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command, environment = [sys.executable, "-m", "rlx", *args], {**os.environ, "COLUMNS": "160", "TERM": "xterm", **env}
        with subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    part = terminal.read(4096)
                except OSError:  # the other side is closed
                    break
                if not part:
                    break
                shown += part
        return process.returncode, shown.decode()


def exit_code(*args: str) -> int:
    """Of the command in this process."""
    try:
        run(list(args))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands that find the default model's code on disk, as all do but the first of a user."""
    return {"RLX_CACHE": "1", "RLX_CACHE_DIR": str(tmp_path_factory.mktemp("kept"))}


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return load(default_folder()).embed(TEXTS)


def test_version():
    done = rlx_command("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rlx {rlx.__version__}\n", "")


def test_embed_prints_similarities_time_and_memory(vectors):
    done = rlx_command("embed", *TEXTS, "--stats", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    assert f"{vectors[0] @ vectors[1]:.2f}" in done.stdout and "1.00" in done.stdout
    assert "float32 [3, 384]" in done.stdout and re.search(r"\d+\.\d+ ms per text", done.stdout)
    assert re.search(r"memory planned for 4 x 8 tokens: .*arena \d", done.stdout)
    phases = "python and imports,read model,read tokenizer,build graph,compile: lower,compile: code,set weights,run".split(",")
    assert all(phase in done.stdout for phase in phases)
    assert done.stderr == ""


def test_one_text_gets_the_first_numbers_of_its_vector(vectors, kept):
    done = rlx_command("embed", TEXTS[0], **kept)
    assert done.returncode == 0, done.stderr
    first = ", ".join(f"{x:.4f}" for x in vectors[0][:6])
    assert done.stdout.splitlines()[0] == f"[{first}, ...]  384 numbers" and "similarity" not in done.stdout


@pytest.mark.parametrize(
    "words, found",
    [("rlx em", "embed"), ("rlx ch", "chat"), ("rlx sea", "search"), ("rlx b", "bench"), ("rlx i", "inspect"),
     ("rlx v", "verify"), ("rlx chat --sy", "--system"), ("rlx search --gl", "--glob")],
)  # fmt: skip
def test_shells_complete_commands(words, found):
    done = rlx_command(_RLX_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert done.stdout.split() == [found], done.stderr


COMMANDS = "embed generate chat search inspect explain verify bench launch devices cache knobs".split()


def test_help_lists_every_command_and_each_has_examples(capsys):
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│ ") and line.split()[1] in COMMANDS] == COMMANDS
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for command in COMMANDS:
        assert exit_code(command, "--help") == 0
        shown = capsys.readouterr().out
        assert f"`rlx {command}" in readme
        assert "Examples:" in shown or command in ("devices", "cache", "knobs"), command


def test_numbers_fit_a_narrow_terminal_and_markup_is_shown_as_text(vectors, kept):
    done = rlx_command("embed", *TEXTS[:2], "x" * 200, "[bold]x[/bold]", "\x1b[31mred", COLUMNS="80", **kept)
    assert done.returncode == 0 and f"{vectors[0] @ vectors[1]:.2f}" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 5 and all(len(re.findall(r"-?[01]\.\d\d ", row)) == 5 and len(row) <= 80 for row in rows)
    assert "[bold]x[/bold]" in done.stdout and "\x1b" not in done.stdout


def test_output_is_what_python_gives(tmp_path, vectors, kept):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS[1:]) + "\n", "utf-8")
    out = tmp_path / "vectors.data"
    done = rlx_command("embed", TEXTS[0], "--file", str(lines), "--output", str(out), **kept)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(out), vectors)
    assert str(out) in done.stdout.replace("\n", "")


def test_standard_input_with_a_blank_line(tmp_path, vectors, kept):
    """A blank line is a text."""
    out = tmp_path / "vectors.npy"
    done = rlx_command("embed", "--file", "-", "--output", str(out), text="\n".join([TEXTS[0], "", *TEXTS[1:]]), **kept)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    assert found.shape == (4, 384)
    np.testing.assert_array_equal(found[[0, 2, 3]], vectors)


def test_long_input_shows_progress_on_a_terminal_only(tmp_path, capsys, kept):
    lines = tmp_path / "lines.txt"
    lines.write_text("word\n" * 256, "utf-8")
    assert exit_code("embed", "--file", str(lines)) == 0
    shown_here = capsys.readouterr()
    assert shown_here.err == "" and "256 texts" in shown_here.out and "similarity" not in shown_here.out
    code, shown = on_a_terminal("embed", "--file", str(lines), **kept)
    assert code == 0 and "embedding" in shown and "100%" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["embed", "--model", "no/such/folder", "x"], "no/such/folder is not a folder"),
        (["embed", "--file", "no-such-file.txt"], "rlx: no-such-file.txt: No such file or directory\n"),
        (["embed", "x", "--output", "no/such/folder/x.npy"], "no/such/folder/x.npy"),
        (["embed", "x", "--output", "."], "it is a folder"),
        (["embed", "x", "--device", "cpu:1"], "device CPU:1 cannot be used: there is no such index"),
        (
            ["generate", "no/model", "x", "--device", "rocm"],
            "device ROCM cannot be used: this version of rlx has no ROCM backend",
        ),
    ],
)
def test_errors_are_one_line(args, message, capsys):
    assert exit_code(*args) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("rlx: ") and message in shown
    assert shown.count("\n") == 1 and "Traceback" not in shown


def test_the_device_is_the_one_asked_for(tmp_path, vectors, monkeypatch):
    """The interpreter's vectors are the CPU's within rounding."""
    devices, compile_ = set(), rlx.Session.compile

    def watched(session: rlx.Session, *given, **how):
        devices.add(session.device)
        return compile_(session, *given, **how)

    monkeypatch.setattr(rlx.Session, "compile", watched)
    out = tmp_path / "vectors.npy"
    assert exit_code("embed", *TEXTS, "--device", "ref", "--output", str(out)) == 0
    np.testing.assert_allclose(np.load(out), vectors, atol=1e-5)
    assert devices == {rlx.Device("ref")}


def test_input_that_is_not_text():
    done = rlx_command("embed", "--file", "-", text=b"fine\n\xff\xfe")
    assert (done.returncode, done.stderr) == (1, "rlx: standard input is not UTF-8 text: byte 5 cannot be read\n")


@pytest.mark.parametrize("line", ["embed", "embed --threads 0 x", "embed --threads many x", "embed --nonsense", "nonsense"])
def test_wrong_usage(line, capsys):
    assert exit_code(*line.split()) == 2
    shown = capsys.readouterr().err
    assert shown and "Traceback" not in shown


def test_empty_input():
    done = rlx_command("embed", "--file", "-", text="")
    assert done.returncode == 2 and "nothing to embed" in done.stderr


def test_devices():
    done = rlx_command("devices")
    assert done.returncode == 0
    assert re.search(r"cpu:0\s+│ yes", done.stdout) and re.search(r"cuda:0\s+│ (yes|no: )", done.stdout)


def test_knobs():
    from rlx.knobs import KNOBS

    done = rlx_command("knobs", RLX_DEBUG="0", RLX_DUMP="some-folder")
    assert done.returncode == 0 and "some-folder" in done.stdout
    assert all(k.env in done.stdout for k in KNOBS)
    done = rlx_command("knobs", RLX_DEBUG="loud")
    assert done.returncode == 1 and "RLX_DEBUG" in done.stderr and done.stderr.count("\n") == 1


def test_the_command_starts_without_the_rest():
    code = "import sys, rlx.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"llvmlite", "tokenizers", "torch", "rich.progress", "rlx.frontends.embedding"} & set(done.stdout.split())


def test_script_and_module_are_the_same():
    import tomllib

    root = Path(__file__).resolve().parent.parent
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"] == {"rlx": "rlx.cli.entry:run"}


def test_cache(tmp_path):
    kept = {"RLX_CACHE": "1", "RLX_CACHE_DIR": str(tmp_path / "kept"), "RLX_CACHE_MB": "50"}
    assert "nothing is kept on disk: RLX_CACHE=0" in rlx_command("cache").stdout
    assert rlx_command("embed", "Hello", "--threads", "1", **kept).returncode == 0
    done = rlx_command("cache", **kept)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.replace("\n", "").startswith(str(tmp_path / "kept"))
    assert re.search(r"programs: 1, kernels: \d\d, \d+\.\d [kM]B of 52\.4 MB\n", done.stdout)
    done = rlx_command("cache", "clear", **kept)
    assert re.search(r"\d\d entries removed\n.*\nprograms: 0, kernels: 0, 0 bytes of", done.stdout)
    assert list((tmp_path / "kept").iterdir()) == []
    assert rlx_command("cache", "burn", **kept).returncode == 2
    (tmp_path / "file").touch()
    done = rlx_command("embed", "Hello", "--threads", "1", **{**kept, "RLX_CACHE_DIR": str(tmp_path / "file")})
    assert done.returncode == 0 and done.stderr.startswith("rlx: compiled code is not kept: ") and done.stderr.count("\n") == 1


def test_tuning_shows_a_bar_on_a_terminal_only(tmp_path):
    args = "embed", "one text", "--tune", "600", "--threads", "1"  # more than it takes, on a busy machine too
    kept = {"RLX_CACHE": "1", "RLX_CACHE_DIR": str(tmp_path / "kept")}
    code, shown = on_a_terminal(*args, **kept)
    assert code == 0 and "tuning contract" in shown
    assert "tuning" not in on_a_terminal(*args, **kept)[1]  # what was found is kept
    done = rlx_command(*args, **kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"tuned steps: \d", rlx_command("cache", **kept).stdout)
    assert rlx_command("embed", "one text", "--tune", "-1").returncode == 2


# -- terminals of all kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_terminal_without_width_gets_the_usual_one(columns: str) -> None:
    done = rlx_command("devices", COLUMNS=columns)
    assert done.returncode == 0 and "cpu:0" in done.stdout, done
    assert "devices" in rlx_command("--help", COLUMNS=columns).stdout


def test_letters_that_the_terminal_has_not_are_written_as_codes(kept: dict[str, str]) -> None:
    done = rlx_command("embed", "h\u00e9llo", "b", PYTHONIOENCODING="ascii", PYTHONUTF8="0", **kept)
    assert done.returncode == 0 and "h\\xe9llo" in done.stdout and not done.stderr, done
    done = rlx_command("embed", "--model", "d\u00e9", "x", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 1 and done.stderr.startswith("rlx: d\\xe9"), done


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_importing_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from rlx.cli.entry import run; run()"
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("line", "says"), [
    ("generate MODEL hi --temperature -1", "temperature is a number from 0.0 to 10000.0, got -1.0"),
    ("generate MODEL hi --seed -1", "a seed is a whole number from 0"), ("chat MODEL --top-k -1", "top_k is a whole number"),
    ("chat MODEL --stop=", "a stop string is a str that is not empty"),
    ("generate MODEL hi --expert-budget much", "a budget of experts is bytes"),
    ("embed --device q hi", "no device is called 'q'"), ("generate MODEL x --device cudda", "did you mean 'cuda'"),
    ("embed x --device cuda:x", "a device is written NAME or NAME:INDEX"),
    ("generate MODEL hi --expert-policy lru", "expert_policy='lru' needs an expert_budget"),
    ("generate MODEL hi --expert-budget 8 --expert-policy best", "no policy is called 'best'"),
    ("generate MODEL hi --record-experts /proc/none/trace", "there is no folder /proc/none"),
    ("bench MODEL --dim n=2", "--dim: MODEL is no ONNX model"), ("bench MODEL --dim n", "--dim is name=size"),
    ("explain MODEL --batch 2", "--batch: MODEL is no encoder and no ONNX model"),
    ("verify MODEL --dim n=", "--dim is name=size"),
    ("save MODEL FILE --shape 1x8", "--shape: MODEL is no encoder and no ONNX model"),
    ("save MODEL FILE --shape 0x8", "--shape is texts x tokens"),
    ("inspect MODEL --input x", "--input is name=file.npy; got 'x'"),
    ("inspect MODEL --dim n=2", "--dim: MODEL is no ONNX model"),
    ("bench MODEL --cache f8", "--cache is f32, bf16 or f16"), ("run MODEL --graph g", "--graph is for artifact files"),
    ("run MODEL.onnx --dim n=2 --dim n=3", "--dim n is given twice"),
    ("moe simulate MODEL --budget none", "a budget of experts is bytes"),
    ("moe simulate MODEL --budget 8 --policy best", "no policy is called 'best'"),
    ("moe simulate MODEL --budget 8 --slow-rate 5", "--slow-rate is bytes per second"),
    ("embed --output /proc/none/x hi", "there is no folder /proc/none"),
    ("search nowhere hi --model MODEL", "nowhere is not a folder"),
])  # fmt: skip
def test_options_are_checked_before_any_file_is_read(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is not there, which would be an error too."""
    monkeypatch.chdir(tmp_path)
    assert exit_code(*line.split()) == (1 if "folder" in says else 2)  # folders are not as wanted: that is no wrong usage
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["generate MODEL hi --record-experts there", "embed hi --output there", "save MODEL there"])
def test_folders_and_files_that_refuse_writing_are_found_before_any_file_is_read(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for refusing in (".", "there"):
        monkeypatch.setattr(os, "access", lambda path, how, refusing=refusing: how != os.W_OK or str(path) != refusing)
        assert exit_code(*line.split()) == 1
        assert capsys.readouterr().err == "rlx: cannot write there: the system permits no writing there\n"
        (tmp_path / "there").touch()


@pytest.mark.parametrize("line", [
    "save MODEL MODEL", "save . a.safetensors", "explain MODEL --output ./MODEL", "embed hi --model . --output a.safetensors",
    "generate MODEL hi --trace MODEL", "generate . hi --record-experts a.safetensors",
])  # fmt: skip
def test_no_output_replaces_the_weights_of_the_model(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "a.safetensors"):
        (tmp_path / name).write_text("weights")
    assert exit_code(*line.split()) == 1
    assert "it is a file of the model" in capsys.readouterr().err
    assert {file.read_text() for file in tmp_path.iterdir()} == {"weights"}


@pytest.mark.parametrize(("line", "code", "says"), [
    ("embed --file - <&-", 2, "nothing to embed"), ("generate nowhere - <&-", 1, "rlx: nowhere is neither a folder"),
    ("devices >&-", 0, ""), ("devices >&- 2>&-", 0, ""), ("generate nowhere hi >&- <&-", 1, "rlx: nowhere is neither a folder"),
])  # fmt: skip
def test_closed_streams_are_empty(line: str, code: int, says: str) -> None:
    command = ["sh", "-c", f"'{sys.executable}' -m rlx {line}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_no_word_is_lost_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rlx.cli.show._out", Console(highlight=False, width=30))  # made once in a process: COLUMNS would stay
    for command in ("devices", "knobs"):
        assert exit_code(command) == 0 and "…" not in capsys.readouterr().out


def test_wrong_usage_is_found_before_any_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*"moe simulate MODEL --budget 8 --resident-rate 0".split()) == 2
    assert "Invalid value" in capsys.readouterr().err

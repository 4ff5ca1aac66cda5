"""`rlx launch`: what ranks are given, whose output is whose, and that none outlives a failure or the launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_cli import exit_code

from rlx.cli import launch
from rlx.driver.transports import shm

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "160"}

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from rlx.driver import Rank, SymmetricBuffer, connect

case, here, me = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])


def asleep():
    (here / f"asleep {me}").write_text(str(os.getpid()))
    time.sleep(600)


if case == "variables":
    names = ("RLX_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RLX_THREADS")
    os.write(1, f"{' '.join(os.environ[name] for name in names)}\\n{sys.argv[3:]}\\n".encode())  # one write: ranks share the pipe
if case == "connect":
    for heap_size in (100, 200):
        t = connect(heap_size)
        t.heap.bytes(SymmetricBuffer(t.this_rank, 0, 1))[...] = me + heap_size
        t.barrier()
        print(heap_size, *(t.heap.bytes(SymmetricBuffer(Rank(r), 0, 1))[0] for r in range(t.num_ranks)))
if case == "lines":
    for i in range(200):
        print(f"{me}" * 500, flush=True)
    sys.stdout.write("no end")
if case == "many":
    (here / f"asleep {me}").write_text(str(os.getpid()))
    for i in range(600):
        print(f"{me}" * 100)
    sys.stdout.write("no end")
if case == "leaves":  # a process that keeps the output open
    print(subprocess.Popen(["sleep", "600"]).pid)
    sys.stdout.write("no end")
if case == "read":
    print(sys.stdin.read().strip().upper(), flush=True)
if case in ("exit", "kill", "raise"):
    t = connect(100, timeout=600)
    t.barrier()
    if me == 1:
        time.sleep(0.2)
        if case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "raise":
            raise ValueError("of rank 1")
        os._exit(7)
    t.barrier()
if case == "alone":  # rank 1 fails, the others do not notice: one does not listen either
    if me == 1:
        sys.exit(9)
    if me == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asleep()
if case == "absent":  # rank 1 ends well, and never connects; rank 2 looks for it only when that is known
    if me == 1:
        sys.exit(0)
    while me == 2 and not list(Path("/dev/shm").glob(f"rlx-*-{os.environ['RLX_JOB']}.ended")):
        time.sleep(0.01)
    connect(100, timeout=600)
if case == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + me))
    asleep()
if case == "asleep":
    asleep()
if case == "half":  # only one has come when the launcher is killed
    if me == 0:
        connect(100, timeout=600)
    asleep()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("scripts") / "work.py"
    file.write_text(SCRIPT)
    return file


def start(ranks: int, script: Path, case: str, here: Path, *args: str, options: Sequence[str] = (), **env: str):
    command = [sys.executable, "-m", "rlx", "launch", "-n", str(ranks), *options, str(script), case, str(here), *args]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **streams, env={**ENV, **env}, text=True, cwd=here)


def finish(process: subprocess.Popen, text: str = "") -> tuple[int, list[str], str]:
    """Exit code, lines of output in order of their text, errors."""
    out, err = process.communicate(text, timeout=120)
    return process.returncode, sorted(out.splitlines()), err


def asleep(process: subprocess.Popen, here: Path, ranks: int) -> list[int]:
    """The process numbers of so many ranks, once they sleep."""
    while len(found := [f for f in here.glob("asleep *") if f.read_text()]) < ranks:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return [int(f.read_text()) for f in found]


def gone(pids: Sequence[int]) -> bool:
    """Whether all have ended; waits, as long as a kill takes."""
    while any(shm.process(pid)[0] not in ("", "Z") for pid in pids):
        time.sleep(0.01)
    return True


def test_ranks_know_who_they_are(script, tmp_path):
    code, out, err = finish(start(3, script, "variables", tmp_path, "-n", "5", "--prefix", "a b", RLX_THREADS=""))
    threads = max(len(os.sched_getaffinity(0)) // 3, 1)
    given = [f"[{r}] ['-n', '5', '--prefix', 'a b']" for r in range(3)]
    assert (code, out, err) == (0, sorted(given + [f"[{r}] {r} {r} {r} 3 3 {threads}" for r in range(3)]), "")
    code, out, _ = finish(start(2, script, "variables", tmp_path, options=["--no-prefix"], RLX_THREADS="5"))
    assert (code, out) == (0, sorted(["[]", "[]", "0 0 0 2 2 5", "1 1 1 2 2 5"]))


def test_ranks_connect_as_often_as_they_like(script, tmp_path):
    code, out, err = finish(start(2, script, "connect", tmp_path))
    assert (code, out, err) == (0, ["[0] 100 100 101", "[0] 200 200 201", "[1] 100 100 101", "[1] 200 200 201"], "")


def test_a_module(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "work.py").write_text("import sys; print(sys.argv[1:], __name__)")
    command = [sys.executable, "-m", "rlx", "launch", "-n", "1", "-m", "pack.work", "-m", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] ['-m', 'x'] __main__\n", "")


def test_lines_stay_whole(script, tmp_path):
    _, out, _ = finish(start(3, script, "lines", tmp_path))
    assert out == sorted([f"[{r}] " + f"{r}" * 500 for r in range(3)] * 200 + [f"[{r}] no end" for r in range(3)])


def test_a_slow_reader_gets_everything(script, tmp_path):
    """Ranks have long ended: what they wrote fits into their pipes, but not all of it into the reader's."""
    process = start(2, script, "many", tmp_path)
    assert gone(asleep(process, tmp_path, 2))
    code, out, err = finish(process)
    assert (code, len(out), err) == (0, 1202, "")
    assert out == sorted([f"[{r}] " + f"{r}" * 100 for r in range(2)] * 600 + [f"[{r}] no end" for r in range(2)])


def test_what_a_rank_leaves_behind_is_not_waited_for(script, tmp_path):
    code, out, _ = finish(start(2, script, "leaves", tmp_path))
    left = [int(line.split()[1]) for line in out if line.split()[1].isdigit()]
    try:
        assert code == 0 and len(left) == 2 and out[1::2] == ["[0] no end", "[1] no end"]
        assert all(shm.process(pid)[0] == "S" for pid in left)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def test_the_first_rank_reads_what_the_launcher_is_given(script, tmp_path):
    assert finish(start(2, script, "read", tmp_path), "some words") == (0, ["[0] SOME WORDS", "[1] "], "")


@pytest.mark.parametrize(
    "case,code,said", [("exit", 7, "exit code 7"), ("kill", 137, "SIGKILL"), ("raise", 1, "exit code 1")]
)
def test_a_failure_ends_all_and_is_passed_on(script, tmp_path, case, code, said):
    found, _, err = finish(start(3, script, case, tmp_path, options=["--timeout", "100"]))
    assert found == code and re.search(rf"^rlx: rank 1 \(process \d+\) ended with {said}$", err, re.M), err
    assert all(re.search(rf"^\[{rank}\] rlx.errors.TransportError: rank 1 ", err, re.M) for rank in (0, 2)), err
    assert (case == "raise") == ("[1] ValueError: of rank 1" in err)


def test_ranks_hear_of_one_that_ends_without_connecting(script, tmp_path):
    process = start(3, script, "absent", tmp_path, options=["--timeout", "100"])
    code, _, err = finish(process)
    assert code == 1
    for rank in (0, 2):
        assert re.search(rf"^\[{rank}\] rlx.errors.TransportError: rank 1 ended before it called connect", err, re.M), err
    assert not [name for name in os.listdir(shm.FOLDER) if name.startswith(f"rlx-{os.getuid()}-{process.pid}-")]


def test_who_does_not_notice_a_failure_is_ended(script, tmp_path):
    process = start(3, script, "alone", tmp_path, options=["--timeout", "1.5"])
    code, _, err = finish(process)
    assert code == 9 and "rank 1" in err
    assert gone(asleep(process, tmp_path, 0))


def test_signals_reach_the_ranks(script, tmp_path):
    process = start(2, script, "handler", tmp_path)
    pids = asleep(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code in (40, 41) and f"ended with exit code {code}" in err and gone(pids)


def test_ctrl_c(script, tmp_path):
    process = start(2, script, "asleep", tmp_path)
    pids = asleep(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and err.count("KeyboardInterrupt") == 2 and gone(pids)


def test_a_killed_launcher_leaves_nothing(script, tmp_path):
    process = start(3, script, "half", tmp_path)
    asleep(process, tmp_path, 2)
    job = f"rlx-{os.getuid()}-{process.pid}-"
    named = lambda: [name for name in os.listdir(shm.FOLDER) if name.startswith(job)]  # noqa: E731
    while not named():
        time.sleep(0.01)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 4  # the ranks, and who removes names
    process.kill()
    process.communicate()
    assert gone(children) and not named()


@pytest.mark.parametrize("args,code,said", [
    (["-n", "2", "no-such.py"], 1, "rlx: there is no script no-such.py"),
    (["-n", "2", "-m", "no_such.thing"], 1, "rlx: there is no module no_such.thing"),
    (["-n", "0", "x.py"], 2, "-n"), (["x.py"], 2, "-n"), (["-n", "2"], 2, "SCRIPT"),
    (["-n", "2", "--nonsense", "x.py"], 2, "--nonsense"),
])  # fmt: skip
def test_mistakes(args, code, said, capfd, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert exit_code("launch", *args) == code
    assert said in capfd.readouterr().err


def test_cpus_are_shared_out():
    allowed = os.sched_getaffinity(0)
    for ranks in (1, 2, 3, 64):
        shares = launch.cpus_of(ranks)
        assert len(shares) == ranks and len({len(s) for s in shares}) == 1
        given = [cpu for share in shares for cpu in share]
        assert len(set(given)) == len(given) == len(allowed) // ranks * ranks and set(given) <= allowed
    assert launch.cpus_of(len(allowed) + 1) == [[]] * (len(allowed) + 1)

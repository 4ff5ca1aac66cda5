"""Ranks over MPI, as mpirun starts them: on this machine, and in two network namespaces with a link that is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mpi_rank.py")
ROOT = SCRIPT.parent.parent
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(
    not (MPIRUN and find_spec("mpi4py")), reason="needs mpi4py and mpirun: pip install mpi4py mpich"
)


def mpirun(case: str, ranks: int, folder: Path, *options: str, outliving: tuple[int, ...] = ()) -> tuple[dict[int, str], int]:
    """The lines that each rank wrote, and mpirun's exit code. `outliving`: ranks that may work on after mpirun has ended."""
    open_mpi = b"Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True).stdout
    general = ["--allow-run-as-root", "--oversubscribe"] if open_mpi else []
    folder.mkdir(exist_ok=True)
    command = [MPIRUN, *general, *options, "-n", str(ranks), sys.executable, str(SCRIPT), case, str(folder)]
    path = f"{ROOT}:{SCRIPT.parent}"
    ran = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": path}, cwd=folder)
    for _ in range(600):
        if all((folder / f"{rank}").exists() for rank in outliving):
            break
        time.sleep(0.1)
    found = {int(f.name): f.read_text() for f in folder.iterdir() if f.name.isdigit()}
    if not found:
        pytest.fail(ran.stdout.decode() + ran.stderr.decode())
    return found, ran.returncode


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_is_put_is_there_after_the_barrier(ranks: int, tmp_path: Path) -> None:
    assert mpirun("passed_on", ranks, tmp_path) == (dict.fromkeys(range(ranks), "right"), 0)


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    each = "HeapBoundsError HeapBoundsError UnknownRankError UnknownRankError CallMismatchError CallMismatchError"
    assert mpirun("refused", 2, tmp_path) == ({0: each, 1: each}, 0)


@pytest.mark.parametrize("case", ["disagree", "heaps"])
def test_ranks_that_disagree_all_hear_of_it(case: str, tmp_path: Path) -> None:
    found, _ = mpirun(case, 3, tmp_path)
    assert len(found) == 3 and len(set(found.values())) == 1
    assert found[0].startswith("CallMismatchError: ranks disagree") and "rank 1: " in found[0]


@pytest.mark.parametrize(
    ("case", "said"), [("silent", "rank 1 did not come"), ("closed", "rank 1 left"), ("exits", "rank 1 left")]
)
def test_a_rank_that_does_not_come_is_named_by_the_others(case: str, said: str, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    found, _ = mpirun(case, 3, tmp_path)
    for rank in (0, 2):
        assert found[rank].startswith("TransportError: ") and said in found[rank]
    assert set(Path("/dev/shm").glob("mpich_shm_*")) <= before, "MPI's shared memory is still there"


def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    """Where the launcher lets them live; by default it ends the whole job at once."""
    if b"HYDRA" not in subprocess.run([MPIRUN, "--version"], capture_output=True).stdout:
        pytest.skip("this mpirun always ends the whole job: MPICH's has -disable-auto-cleanup")
    found, code = mpirun("dead", 3, tmp_path, "-disable-auto-cleanup", outliving=(0, 2))
    assert code != 0 and sorted(found) == [0, 2]
    for said in found.values():
        assert said.startswith("TransportError: ") and "rank 1" in said


def test_a_call_that_is_interrupted_never_counts_as_done(tmp_path: Path) -> None:
    found, _ = mpirun("interrupted", 3, tmp_path)
    assert all(found[rank].startswith("TransportError: ") and "rank 1" in found[rank] for rank in range(3)), found
    assert "interrupted" in found[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_conform(ranks: int, tmp_path: Path) -> None:
    assert mpirun("collectives", ranks, tmp_path) == (dict.fromkeys(range(ranks), "right"), 0)


def test_collectives_in_graphs(tmp_path: Path) -> None:
    assert mpirun("graphs", 2, tmp_path) == ({0: "right", 1: "right"}, 0)


# -- two hosts: network namespaces of this machine, each with addresses, a host name and a /dev/shm of its own

# Addresses and names of this process's own: several may run these tests at once. Control address -> host name, address for data
NET, TAG = f"10.79.{os.getpid() % 256}", os.getpid() % 100_000
HOSTS = {f"{NET}.1": (f"rlx-{TAG}-a", "10.77.0.1"), f"{NET}.5": (f"rlx-{TAG}-b", "10.77.0.2")}
A, B = (name for name, _ in HOSTS.values())


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[str]]:
    """mpirun's options for two hosts. They reach each other by the link `data`; the launcher reaches them by others."""
    if not shutil.which("ip") or b"HYDRA" not in subprocess.run([MPIRUN, "--version"], capture_output=True).stdout:
        pytest.skip("needs `ip` and MPICH's mpirun")
    if os.geteuid() or subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("may not make network namespaces: needs root")
    shell = tmp_path / "shell"  # stands for ssh: HOST COMMAND…
    places = " ".join(f"{address}) host={name};;" for address, (name, _) in HOSTS.items())
    inside = "hostname $host; mount -t tmpfs tmpfs /dev/shm; export UCX_NET_DEVICES=data FI_PROVIDER=tcp FI_TCP_IFACE=data; $*"
    skip = 'while [ "${1#-}" != "$1" ]; do shift; done'
    shell.write_text(
        f"#!/bin/sh\n{skip}\ncase $1 in {places} esac\nshift\n"
        f'exec ip netns exec $host unshare --uts --ipc --mount sh -c "{inside}"\n'
    )
    shell.chmod(0o755)
    try:
        for name in (A, B):
            _ip("netns", "add", name)
        _ip("link", "add", "data", "netns", A, "type", "veth", "peer", "name", "data", "netns", B)
        for i, (control, (name, data)) in enumerate(HOSTS.items()):
            outside = control.rsplit(".", 1)[0] + f".{4 * i + 2}"
            _ip("link", "add", f"rlx{TAG}c{i}", "type", "veth", "peer", "name", "control", "netns", name)
            _ip("addr", "add", f"{outside}/30", "dev", f"rlx{TAG}c{i}")
            _ip("link", "set", f"rlx{TAG}c{i}", "up")
            for device, address in (("control", f"{control}/30"), ("data", f"{data}/24")):
                _ip("-n", name, "addr", "add", address, "dev", device)
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "route", "add", "default", "via", outside)
        while not all("state UP" in _ip("-n", name, "link", "show", "data") for name in (A, B)):  # MPI looks for it once
            time.sleep(0.05)
        launcher = ["-launcher", "ssh", "-launcher-exec", str(shell), "-localhost", f"{NET}.2"]
        yield [*launcher, "-hosts", ",".join(HOSTS), "-ppn", "1"]
    finally:
        for name, _ in HOSTS.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for i, _ in enumerate(HOSTS):  # else it goes when the last process inside has gone
            subprocess.run(["ip", "link", "del", f"rlx{TAG}c{i}"], capture_output=True)


def _received(host: str) -> int:
    """Bytes that came over the data link to `host`."""
    lines = subprocess.run(["ip", "netns", "exec", host, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    return next(int(line.split()[1]) for line in lines.splitlines() if line.strip().startswith("data:"))


def test_two_hosts_give_the_bits_of_numpy(hosts: list[str], tmp_path: Path) -> None:
    assert mpirun("collectives", 2, tmp_path / "two", *hosts) == ({0: "right", 1: "right"}, 0)
    assert _received(B) > 100_000, "the data did not go over the link"


def test_a_link_that_is_cut_ends_in_errors(hosts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    command = [MPIRUN, *hosts, "-n", "2", sys.executable, str(SCRIPT), "until_cut", str(folder)]
    job = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{SCRIPT.parent}"}, stderr=subprocess.DEVNULL)
    try:
        while not all((folder / f"started-{r}").exists() for r in (0, 1)):
            assert job.poll() is None
            time.sleep(0.05)
        time.sleep(0.3)
        _ip("-n", A, "link", "set", "data", "down")
        job.wait(timeout=60)
    finally:
        job.kill()
    for rank in (0, 1):
        said = (folder / str(rank)).read_text()
        assert said.startswith("TransportError: ") and f"rank {1 - rank}" in said, said
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True).stdout
    assert not left, "a rank is still there"

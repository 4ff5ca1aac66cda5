"""One rank of tests/test_ranks_mpi.py, started by mpirun: CASE FOLDER. Writes what it found to FOLDER/<rank>."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from conformance import conform

from rlx.driver import Rank, SymmetricBuffer, all_reduce
from rlx.driver.barrier import Call
from rlx.driver.symmetric import SymmetricTransport
from rlx.driver.transports.mpi import MpiTransport
from rlx.errors import CollectiveError

HEAP = 40 << 20
INDEX = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def passed_on(t: SymmetricTransport) -> str:
    """Every rank writes to the next one's heap and reads back; large copies go in pieces."""
    me, n = t.this_rank.index, t.num_ranks
    after = Rank((me + 1) % n)
    for nbytes in (1, 8, 1023, 0, (17 << 20) + 5):
        sent = np.random.default_rng([me, nbytes]).integers(0, 256, nbytes, np.uint8)
        t.put(SymmetricBuffer(after, 3, nbytes), sent)
        t.barrier()
        own, theirs = (np.full(nbytes, 77, np.uint8) for _ in range(2))
        t.get(SymmetricBuffer(t.this_rank, 3, nbytes), own)
        t.get(SymmetricBuffer(after, 3, nbytes), theirs)
        np.testing.assert_array_equal(own, np.random.default_rng([(me - 1) % n, nbytes]).integers(0, 256, nbytes, np.uint8))
        np.testing.assert_array_equal(theirs, sent)
        t.barrier()
    for i in range(200):  # a rank that is ahead by one barrier is not mistaken for one that is not
        if i % n == me:
            time.sleep(0.001)
        t.barrier(Call(1, i, 0, 0))
    return "right"


def refused(t: SymmetricTransport) -> str:
    """Wrong places are refused before anything moves, and the transport goes on."""
    found = []
    for buffer, nbytes in (
        (SymmetricBuffer(Rank(0), HEAP - 1, 2), 2),
        (SymmetricBuffer(Rank(t.num_ranks), 0, 2), 2),
        (SymmetricBuffer(Rank(0), 0, 2), 3),
    ):
        for copy in (t.put, t.get):
            try:
                copy(buffer, np.zeros(nbytes, np.uint8))
            except CollectiveError as e:
                found.append(type(e).__name__)
    t.barrier()
    return " ".join(found)


def disagree(t: SymmetricTransport) -> str:
    t.barrier(Call(1, 0, 8 + t.this_rank.index))
    return "no error"


def go_without(t: SymmetricTransport) -> str:
    """Rank 1 is not there when the others come to a barrier: CASE says how."""
    t.barrier()
    if t.this_rank.index == 1:
        if CASE == "silent":
            time.sleep(2 * t.timeout)
        elif CASE == "dead":
            os.kill(os.getpid(), 9)
        elif CASE == "closed":
            t.close()
        else:
            sys.exit(3)
    t.barrier()
    return "no error"


def until_cut(t: SymmetricTransport) -> str:
    """Copies and meets until the link is cut."""
    peer, data = Rank(1 - t.this_rank.index), np.zeros(1 << 20, np.uint8)
    (FOLDER / f"started-{INDEX}").touch()
    for _ in range(100_000):
        t.put(SymmetricBuffer(peer, 0, data.nbytes), data)
        t.barrier()
        t.get(SymmetricBuffer(peer, 0, data.nbytes), data)
        t.barrier()
    return "no error"


def interrupted(t: SymmetricTransport) -> str:
    """Rank 1 is interrupted in a call, and goes on as if nothing had happened."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    x, scratch = np.ones(100, np.float32), SymmetricBuffer(t.this_rank, 0, 400)
    all_reduce(t, scratch, x)
    if t.this_rank.index == 1:
        signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            all_reduce(t, scratch, x)
        except KeyboardInterrupt:
            (FOLDER / "interrupted").touch()
    else:
        while not (FOLDER / "interrupted").exists():
            time.sleep(0.01)
    for _ in range(2):
        all_reduce(t, scratch, x)
    return "no error"


def collectives(t: SymmetricTransport) -> str:
    conform(t, int(os.environ.get("RLX_TEST_COLLECTIVES", 60)), seed=5)
    return "right"


def graphs(t: SymmetricTransport) -> str:
    """Every collective op in compiled graphs, against the evaluator."""
    from collective_graphs import NAMES, all_cases, same
    from test_graph_collectives import every_case_here

    from rlx.ir.evaluate import evaluate_ranks

    for name, outputs in zip(NAMES, every_case_here(t)[0], strict=True):
        g, inputs, what = all_cases(name, t.num_ranks)
        for found, want, text in zip(outputs, evaluate_ranks(g, inputs)[t.this_rank.index][0], what, strict=True):
            same(found, want, text)
    return "right"


def go_on_in_a_child() -> None:
    """In a session of its own. When one rank dies, MPICH's launcher now and then kills the others too, though told not to: it
    knows the parents, which end as their children do."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
    os.setsid()


CASES = {f.__name__: f for f in (passed_on, refused, disagree, until_cut, interrupted, collectives, graphs)}

if __name__ == "__main__":
    CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
    if CASE == "dead":
        go_on_in_a_child()
    try:
        heap = HEAP + (CASE == "heaps" and INDEX == 1)
        transport = MpiTransport(heap, timeout=60.0 if CASE in ("passed_on", "collectives", "graphs") else 3.0)
        said = CASES.get(CASE, go_without)(transport)
        transport.close()
    except CollectiveError as e:
        said = f"{type(e).__name__}: {e}"
    (FOLDER / f"{INDEX}.part").write_text(said)
    (FOLDER / f"{INDEX}.part").rename(FOLDER / str(INDEX))  # whole when it is seen

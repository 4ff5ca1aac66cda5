"""The transport of a process that was started as one of many ranks. The launcher describes the ranks in environment variables."""

from __future__ import annotations

from rlx import knobs
from rlx.driver.symmetric import TIMEOUT, LocalTransport, SymmetricTransport
from rlx.errors import OptionError, TransportError

HEAP_SIZE = 64 << 20  # bytes


def connect(heap_size: int = HEAP_SIZE, timeout: float = TIMEOUT) -> SymmetricTransport:
    """Connect to all processes that were started together with this one. Each of them must call this, with the same `heap_size`
    (bytes of each rank's heap). Every wait for other ranks ends after `timeout` seconds.

    The transport is shared memory under `rlx launch`, and MPI under mpirun or srun. A process started alone is the only rank."""
    job, ranks = knobs.JOB.get(), knobs.RANKS.get()
    if job:
        from rlx.driver.transports.shm import ShmTransport

        return ShmTransport(job, knobs.RANK.get(), ranks, heap_size, timeout)
    if ranks != 1:
        raise OptionError(f"{knobs.RANKS.env} is {ranks}, but {knobs.JOB.env} is not set: both are set by rlx launch")
    by, count = knobs.ranks_by_others() or ("", 1)
    if count == 1:
        return LocalTransport.fan_out(1, heap_size, timeout)[0]
    from rlx.driver.transports.mpi import MpiTransport

    found = MpiTransport(heap_size, timeout)
    if count and found.num_ranks != count:
        seen = found.num_ranks
        found.close()
        raise TransportError(
            f"{by} says that there are {count} ranks, MPI knows of {seen}: mpi4py was built for another MPI than the one that "
            "started this process (see `python -m mpi4py --mpi-lib-version`, `mpirun --version`)"
        )
    return found


__all__ = ["connect"]

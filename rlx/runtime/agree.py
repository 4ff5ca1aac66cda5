"""What ranks agree on before they begin something together that no size or dtype would give away.

The scratch is at the heap's end (rlx.driver.exchange): what a user put at its beginning stays as it is.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rlx.driver import Rank, SymmetricTransport, broadcast
from rlx.driver.barrier import AGREE, Call
from rlx.driver.exchange import at_end


def agreed(transport: SymmetricTransport, number: int, *what: object) -> int:
    """Rank 0's number, 0 … 2^64 - 1, on every rank. CallMismatchError, on every rank: they are not about to do the same, which
    `what` says, by its repr. HeapBoundsError: the heap has less than 8 bytes."""
    scratch = at_end(transport, 8, "an agreement takes")
    digest = hashlib.sha256(repr(what).encode()).digest()
    transport.barrier(Call(AGREE, detail=int.from_bytes(digest[:7], "little")))
    found = np.array([number], np.uint64)
    broadcast(transport, scratch, found, Rank(0))
    return int(found[0])


def of_first(transport: SymmetricTransport, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank. HeapBoundsError: the heap has less."""
    found = np.zeros(agreed(transport, len(data), "bytes"), np.uint8)
    scratch = at_end(transport, found.nbytes, "to hand on what rank 0 has takes")
    if transport.this_rank.index == 0:
        found[:] = np.frombuffer(data, np.uint8)
    broadcast(transport, scratch, found, Rank(0))
    return found.tobytes()

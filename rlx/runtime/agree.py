"""Checks that ranks are about to do the same thing, where sizes and dtypes would not show a difference, and data shared by
rank 0.

The scratch is at the end of the heap (rlx.driver.exchange), so user data at its beginning is not overwritten.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rlx.driver import Rank, SymmetricTransport, broadcast
from rlx.driver.barrier import AGREE, Call
from rlx.driver.exchange import at_end


def agreed(transport: SymmetricTransport, number: int, *call: object) -> int:
    """Rank 0's `number`, 0 … 2^64 - 1, on every rank. `call` describes the operation that follows. CallMismatchError, on every
    rank: its repr is not equal on all ranks. HeapBoundsError: the heap has fewer than 8 bytes."""
    scratch = at_end(transport, 8, "an agreement takes")
    digest = hashlib.sha256(repr(call).encode()).digest()
    transport.barrier(Call(AGREE, detail=int.from_bytes(digest[:7], "little")))
    found = np.array([number], np.uint64)
    broadcast(transport, scratch, found, Rank(0))
    return int(found[0])


def of_first(transport: SymmetricTransport, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank. HeapBoundsError: the heap is smaller than that."""
    found = np.zeros(agreed(transport, len(data), "bytes"), np.uint8)
    scratch = at_end(transport, found.nbytes, "to share the data of rank 0 takes")
    if transport.this_rank.index == 0:
        found[:] = np.frombuffer(data, np.uint8)
    broadcast(transport, scratch, found, Rank(0))
    return found.tobytes()

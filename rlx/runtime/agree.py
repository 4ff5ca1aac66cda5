"""What ranks agree on before they begin something together that no size or dtype would give away."""

from __future__ import annotations

import hashlib

import numpy as np

from rlx.driver import Rank, SymmetricBuffer, SymmetricTransport, broadcast
from rlx.driver.symmetric import Call

AGREE = 2001  # Call.what


def agreed(transport: SymmetricTransport, number: int, *what: object) -> int:
    """Rank 0's number, 0 … 2^64 - 1, on every rank. CallMismatchError, on every rank: they are not about to do the same, which
    `what` says, by its repr."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    transport.barrier(Call(AGREE, detail=int.from_bytes(digest[:7], "little")))
    found = np.array([number], np.uint64)
    broadcast(transport, SymmetricBuffer(transport.this_rank, 0, found.nbytes), found, Rank(0))
    return int(found[0])


def of_first(transport: SymmetricTransport, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank."""
    found = np.zeros(agreed(transport, len(data), "bytes"), np.uint8)
    if transport.this_rank.index == 0:
        found[:] = np.frombuffer(data, np.uint8)
    broadcast(transport, SymmetricBuffer(transport.this_rank, 0, found.nbytes), found, Rank(0))
    return found.tobytes()

"""Vectors of every second element of memory, every third and so on: all that lies between is read, and these are picked out. A
gather takes a load for each lane."""

from __future__ import annotations

from rlx.host.emit import Emitter, V

MASKS = frozenset({"avx512f", "avx512bw", "avx512vl"})  # with these, part of a vector of any type is read as fast as all of it


def reads_between(em: Emitter, stride: int, lanes: int, mask: V | None) -> bool:
    """Whether `strided` is the way to load lanes with this stride."""
    return 1 < stride <= lanes // 2 and (mask is None or set(em.features) >= MASKS)


def strided(em: Emitter, where: V, stride: int, ty: str, size: int, lanes: int, mask: V | None) -> V:
    """`lanes` elements of `size` bytes, `stride` elements apart, from the address `where` on; zero where the mask is off. Nothing
    is read but what is between two active lanes with no inactive one between them."""
    found: V | None = None
    last = (lanes - 1) * stride
    for part in range(stride):
        first = part * lanes if mask is not None or part < stride - 1 else last - (lanes - 1)  # no element behind the last lane's
        at, places = em.gep(where, first * size), range(first, first + lanes)
        if mask is None:
            loaded = em.load(ty, at, size)
        else:
            below = em.shuffle(mask, [min(p // stride, lanes) for p in places])
            above = em.shuffle(mask, [min(-(-p // stride), lanes) for p in places])
            on, zero = em.bin("and", below, above), V("zeroinitializer", ty)
            loaded = em.intrinsic("masked.load", V(f"align {size} {at.text}", at.ty), on, zero, suffix=(ty, at.ty), returns=ty)
        lower = [n if n * stride < first else None for n in range(lanes)]
        here = [lanes + n * stride - first if n * stride in places else None for n in range(lanes)]
        picks = [b if a is None else a for a, b in zip(lower, here)]
        found = em.shuffle(found or loaded, [0 if p is None else p for p in picks], loaded)
    assert found is not None
    return found

"""Collectives on an axis that is split part by part: gathering all shards, and taking a rank's shard."""

from __future__ import annotations

import numpy as np

import rlx.ir.ops as ops
from rlx.ir.graph import Value
from rlx.ir.ops.view import slice_axis
from rlx.ir.placement import Split


def all_parts(x: Value, split: Split, ranks: int) -> Value:
    """The whole value, gathered from the shards of all ranks."""
    out, axis = ops.all_gather(x, ranks=ranks, axis=split.axis), split.axis
    lead, tail = out.dims[:axis], out.dims[axis + 1 :]
    if len(split.parts) == 1:
        return out
    if len(set(split.parts)) == 1:  # [rank, part, element] -> [part, rank, element]
        out = out.reshape(*lead, ranks, len(split.parts), split.parts[0] // ranks, *tail)
        order = (*range(axis), axis + 1, axis, *range(axis + 2, out.rank))
        return out.transpose(*order).reshape(*lead, sum(split.parts), *tail)
    pieces, share, at = [], sum(split.parts) // ranks, 0
    for part in split.parts:
        pieces += [slice_axis(out, axis, r * share + at, r * share + at + part // ranks) for r in range(ranks)]
        at += part // ranks
    return ops.concat(*pieces, axis=axis)


def own_part(x: Value, split: Split, ranks: int) -> Value:
    """This rank's shard of the whole value."""
    axis, lead, tail = split.axis, x.dims[: split.axis], x.dims[split.axis + 1 :]
    if len(split.parts) == 1:
        return ops.rank_slice(x, ranks=ranks, axis=axis)
    if len(set(split.parts)) == 1:
        apart = x.reshape(*lead, len(split.parts), split.parts[0], *tail)
        return ops.rank_slice(apart, ranks=ranks, axis=axis + 1).reshape(*lead, sum(split.parts) // ranks, *tail)
    ends = np.cumsum(split.parts).tolist()
    pieces = [slice_axis(x, axis, end - part, end) for part, end in zip(split.parts, ends)]
    return ops.concat(*(ops.rank_slice(p, ranks=ranks, axis=axis) for p in pieces), axis=axis)

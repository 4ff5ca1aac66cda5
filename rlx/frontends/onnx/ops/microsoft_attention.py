"""Attention operators of ONNX Runtime (com.microsoft)."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.attention import heads_first, heads_last, turned
from rlx.frontends.onnx.ops.index import written
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value

MS = "com.microsoft"
HIDES = -10000.0  # a key whose score is so much lower takes no part


def _angles(n: Call, i: int, positions: Value) -> tuple[Value, Value]:
    """Rows of the tables in operands i and i + 1."""
    cos, sin = (ops.unsqueeze(ops.gather(n.value(at), positions), axes=(1,)) for at in (i, i + 1))
    return cos, sin


@handler("RotaryEmbedding", domain=MS)
def rotary_embedding(n: Call) -> Value:
    """Position ids are those of each token, or the first one's for all rows."""
    rank, width = n.rank(0), 2 * n.sizes(2)[1]
    if n.attr("is_packed_batching", 0) or n.attr("scale", 1.0) != 1.0:
        n.refuse("packed batches and scales are not supported")
    x = heads_first(n, n.value(0), n.attr("num_heads", 0) or known_dim(n, 0, 2) // width)
    if width != (turns := n.attr("rotary_embedding_dim", 0) or x.shape.static[3]):
        n.refuse(f"tables of {width // 2} angles are for {width} columns of a head, and {turns} are to be turned")
    at = n.value(1).astype(i64)
    if at.rank == 1:
        at = at.reshape((1, 1)) + ops.iota(dims=(1, known_dim(n, 0, rank - 2)), axis=1)
    return heads_last(turned(x, *_angles(n, 2, at), bool(n.attr("interleaved", 0))), rank)


@handler("MultiHeadAttention", domain=MS)
def multi_head_attention(n: Call) -> Any:
    """Operands: q, k, v (k and v may have heads already, or all three are packed in q), bias, padding mask of keys, bias of
    scores, past keys and values. Results: the attended values, keys, values."""
    heads, q = n.attr("num_heads"), n.value(0)
    if any(n.has(i) for i in (8, 9)) or n.wants(3):
        n.refuse("shared buffers of the past, indirections and scores as a result are not supported")
    if q.rank == 5:  # [batch, rows, heads, 3, head_dim]
        q, k, v = (ops.transpose(q[:, :, :, i], axes=(0, 2, 1, 3)) for i in range(3))
    elif not n.has(2):
        n.refuse("keys and values packed in one operand are not supported")
    else:
        given = [q, n.value(1), n.value(2)]
        if n.has(3):
            sizes = tuple(heads * x.shape.static[-1] if x.rank == 4 else x.shape.static[-1] for x in given)
            parts = ops.split(n.value(3), parts=sizes, axis=0)
            given = [x if x.rank == 4 else x + b for x, b in zip(given, parts)]
        q, k, v = (heads_first(n, x, heads) for x in given)
    past = known_dim(n, 6, 2) if n.has(6) else 0
    if n.has(6):
        k, v = ops.concat(n.value(6), k, axis=2), ops.concat(n.value(7), v, axis=2)
    return heads_last(_attended(n, q, k, v, past, 4), 3), k, v


@handler("Attention", domain=MS)
def attention(n: Call) -> Any:
    """Projections of x to q, k and v by one matrix, then attention. The past has keys and values in one tensor."""
    heads, x, w = n.attr("num_heads"), n.value(0), n.value(1)
    if n.attr("do_rotary", 0) or n.has(6):
        n.refuse("rotary embedding and shared buffers of the past are not supported")
    sizes = n.attr("qkv_hidden_sizes", None) or (w.shape.static[1] // 3,) * 3
    made = ops.matmul(x, w)
    made = made + n.value(2) if n.has(2) else made
    q, k, v = (heads_first(n, part, heads) for part in ops.split(made, parts=tuple(sizes), axis=-1))
    past = known_dim(n, 4, 3) if n.has(4) else 0
    if n.has(4):
        k, v = (ops.concat(n.value(4)[i], part, axis=2) for i, part in enumerate((k, v)))
    return heads_last(_attended(n, q, k, v, past, 3), 3), functions.stack([k, v], 0) if n.wants(1) else None


def _padding(n: Call, i: int, keys: int) -> Value | None:
    """The padding mask in operand i, as bool that broadcasts to scores: lengths, or numbers that are 0 where a key is padding."""
    if not n.has(i):
        return None
    mask = n.value(i)
    if mask.rank == 1:
        if mask.dims != n.dims(0)[:1]:
            n.refuse("masks by start and end of each row are not supported")
        return ops.less(ops.iota(dims=(1, 1, 1, keys), axis=3), mask.reshape((-1, 1, 1, 1)).astype(i64))
    seen = ops.not_equal(mask, 0)
    return ops.unsqueeze(seen, axes=(1, 2) if mask.rank == 2 else (1,)) if mask.rank < 4 else seen


def _attended(n: Call, q: Value, k: Value, v: Value, past: int, mask: int) -> Value:
    """Attention under the padding mask in operand `mask`, a bias of scores in operand 5, and the attribute `unidirectional`.
    `past`: the number of keys before those of this call."""
    queries, keys, bias, causal = q.shape.static[2], k.shape.static[2], n.maybe(5), bool(n.attr("unidirectional", 0))
    seen, least = _padding(n, mask, keys), n.attr("mask_filter_value", HIDES)
    facts: dict[str, Any] = {"scale": n.attr("scale", 0.0) or 0.0}
    if causal and queries > 1 and keys != past + queries:
        n.refuse(f"unidirectional attention of {queries} queries to {keys} keys, {past} of them past, is not supported")
    if seen is None and bias is None:
        return ops.attention(q, k, v, mask="causal" if causal else "none", **facts)
    row, column = (ops.iota(dims=(1, 1, queries, keys), axis=axis) for axis in (2, 3))
    before = ops.less_equal(column, row + (keys - queries)) if causal else None
    if bias is None and least <= HIDES:
        both = reduce(ops.logical_and, [x for x in (seen, before) if x is not None])
        return ops.attention(q, k, v, both, mask="custom", **facts)
    shift = None if seen is None else ops.where(seen, 0.0, least).astype(q.dtype)
    bias = reduce(ops.add, [x for x in (bias, shift) if x is not None])
    return ops.attention(q, k, v, bias if before is None else ops.where(before, bias, -math.inf), mask="bias", **facts)


@handler("GroupQueryAttention", domain=MS)
def group_query_attention(n: Call) -> Any:
    """Operands: q, k, v (or all in q), past keys and values, the last position of each row, the greatest number of keys, tables
    of cosines and sines, position ids, bias of scores, scales of norms of q and k. Where the past has room for all keys, new ones
    are written into it."""
    window = n.attr("local_window_size", -1)
    if n.has(11) or n.attr("smooth_softmax", 0) > 0 or n.wants(3) or not n.attr("causal", 1) or not window:
        n.refuse("sinks, smooth softmax, later keys, windows of 0 keys and scores as a result are not supported")
    heads, groups, rows = n.attr("num_heads"), n.attr("kv_num_heads"), known_dim(n, 0, 1)
    if n.has(1):
        parts: Any = (n.value(0), n.value(1), n.value(2))
    else:
        width = known_dim(n, 0, 2) // (heads + 2 * groups)
        parts = ops.split(n.value(0), parts=(heads * width, groups * width, groups * width), axis=-1)
    q, k, v = (heads_first(n, x, count) for x, count in zip(parts, (heads, groups, groups)))
    eps = n.attr("qk_norm_epsilon", 1e-6)
    eps = n.attr("q_norm_epsilon", eps), n.attr("k_norm_epsilon", eps)
    if n.has(14) or n.has(15):
        q, k = (ops.rms_norm(x, n.value(i), eps=e) for x, i, e in zip((q, k), (14, 15), eps))
    past = known_dim(n, 3, 2) if n.has(3) and n.has(4) else 0
    size = max(past, int(np.asarray(n.known(6)).reshape(-1)[0]))
    start = ops.maximum(n.value(5).astype(i64).reshape((-1,)) + (1 - rows), 0)  # a row shorter than its prompt starts at 0
    given, paired = [n.has(i) for i in (7, 8, 9)], bool(n.attr("rotary_interleaved", 0))
    if n.attr("do_rotary", 0):
        at = n.value(9).astype(i64) if given[2] else start.reshape((-1, 1)) + ops.iota(dims=(1, rows), axis=1)
        angles = _angles(n, 7, at)
        q, k = (turned(x, *angles, paired) for x in (q, k))
    if past:
        k, v = (_joined(n, i, x, start, size) for i, x in ((3, k), (4, v)))
    facts: dict[str, Any] = {"scale": n.attr("scale", 0.0) or 0.0, "cap": n.attr("softcap", 0.0)}
    if n.has(10):
        behind = start.reshape((-1, 1, 1, 1)) + ops.iota(dims=(1, 1, rows, 1), axis=2) - ops.iota(dims=(1, 1, 1, size), axis=3)
        seen = [ops.less_equal(0, behind)] + ([ops.less(behind, window)] if window > 0 else [])
        bias = n.value(10)  # of the keys that there are; the past may have room for more
        bias = ops.pad(bias, low=(0,) * 4, high=(0, 0, 0, max(0, size - known_dim(n, 10, 3))))
        bias = ops.where(reduce(ops.logical_and, seen), bias, -math.inf)
        return heads_last(ops.attention(q, k, v, bias, mask="bias", **facts), 3), k, v
    facts |= {"mask": "sliding_window", "window": window} if window > 0 else {"mask": "causal"}
    if size == rows or (n.dims(0)[0] == 1 and size == past + rows):
        return heads_last(ops.attention(q, k, v, **facts), 3), k, v
    return heads_last(ops.attention(q, k, v, start, positioned=True, **facts), 3), k, v


def _joined(n: Call, i: int, fresh: Value, start: Value, size: int) -> Value:
    """The past in operand i with new rows from the position `start` of each row of the batch on. With as many rows as the past it
    is a state in place."""
    past, rows = n.value(i), fresh.shape.static[2]
    room = size - past.shape.static[2]
    if n.dims(0)[0] == 1 and room == rows:
        return ops.concat(past, fresh, axis=2)
    wide = ops.pad(past, low=(0,) * 4, high=(0, 0, room, 0)) if room else past
    if n.dims(0)[0] == 1:
        made = ops.update_rows(wide, fresh, start.reshape(()), axis=2)
    else:
        made = written(wide, fresh, start, 2)
    n.scope.importer.added[made] = rows
    return made

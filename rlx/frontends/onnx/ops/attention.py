"""Attention of opset 23 and later, and rotary position embedding."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import bool_, i64
from rlx.ir.node import Value


def heads_first(n: Call, x: Value, count: int) -> Value:
    """[batch, heads, sequence, head_dim], from three dims by their number."""
    if x.rank == 4:
        return x
    b, s, width = x.dims
    if not count or not isinstance(width, int) or width % count:
        n.refuse(f"{width} columns are not {count} heads")
    return ops.transpose(x.reshape((b, s, count, width // count)), axes=(0, 2, 1, 3))


def heads_last(x: Value, rank: int) -> Value:
    """The inverse of heads_first."""
    b, h, s, d = x.dims
    return x if rank == 4 else ops.transpose(x, axes=(0, 2, 1, 3)).reshape((b, s, h * d))


@handler("Attention", since=23)
def attention(n: Call) -> Any:
    """Results: the attended values; keys and values with those of the past; and scores, after a step by qk_matmul_output_mode."""
    rank = n.rank(0)
    q = heads_first(n, n.value(0), n.attr("q_num_heads", 0))
    k, v = heads_first(n, n.value(1), n.attr("kv_num_heads", 0)), heads_first(n, n.value(2), n.attr("kv_num_heads", 0))
    if n.has(4):
        k, v = ops.concat(n.value(4), k, axis=2), ops.concat(n.value(5), v, axis=2)
    facts: dict[str, Any] = {"scale": n.attr("scale", 0.0) or 0.0, "cap": n.attr("softcap", 0.0)}
    kind, masks = _masks(n, q, k)
    window = {"window": n.attr("left_window_size", -1) + 1} if kind == "sliding_window" else {}
    out = ops.attention(q, k, v, *masks, mask=kind, **window, **facts)
    scores = _scores(n, q, k, facts) if n.wants(3) else None
    return heads_last(out, rank), k, v, scores


def _masks(n: Call, q: Value, k: Value) -> tuple[Any, list[Value]]:
    """The mask of ops.attention that has all conditions of the node, and its operand."""
    left, right = _reach(n)
    at_end = (known_dim(n, 4, 2) if n.has(4) else 0) == k.shape.static[2] - q.shape.static[2]
    if right == 0 and at_end and not n.has(3) and not n.has(6):
        return "causal" if left < 0 else "sliding_window", []
    seen, bias = _conditions(n, q, k)
    if bias is None:
        return ("none", []) if seen is None else ("custom", [seen])
    return "bias", [bias if seen is None else ops.where(seen, bias, -math.inf)]


def _reach(n: Call) -> tuple[int, int]:
    """The numbers of keys before and behind its own position that a query attends to; -1: all."""
    return n.attr("left_window_size", -1), 0 if n.attr("is_causal", 0) else n.attr("right_window_size", -1)


def _conditions(n: Call, q: Value, k: Value) -> tuple[Value | None, Value | None]:
    """bool by query and key, True where a query attends (None: everywhere), and the bias of the scores. A query is behind as many
    keys as the past has; with `nonpad_kv_seqlen`, the last query is at the last of so many keys."""
    queries, keys, seen, bias = q.shape.static[2], k.shape.static[2], [], None
    place = ops.iota(dims=(1, 1, 1, keys), axis=3)
    offset: Any = known_dim(n, 4, 2) if n.has(4) else 0
    if n.has(3):
        mask = n.value(3)
        short = (0,) * (mask.rank - 1) + (max(0, keys - mask.shape.static[-1]),)
        mask = ops.pad(mask, low=(0,) * mask.rank, high=short, value=0 if mask.dtype == bool_ else -math.inf)
        seen, bias = ([mask], None) if mask.dtype == bool_ else ([], mask.astype(q.dtype))
    if n.has(6):
        count = n.value(6).astype(i64).reshape((-1, 1, 1, 1))
        seen.append(ops.less(place, count))
        offset = offset if n.has(4) else count - queries
    left, right = _reach(n)
    behind = ops.iota(dims=(1, 1, queries, 1), axis=2) + offset - place
    seen += [ops.less_equal(behind, left)] if left >= 0 else []
    seen += [ops.less_equal(-right, behind)] if right >= 0 else []
    return reduce(ops.logical_and, seen) if seen else None, bias


def _scores(n: Call, q: Value, k: Value, facts: dict[str, Any]) -> Value:
    """Scores: scaled (0), after the soft cap (1), with the mask (2), or their softmax (3)."""
    mode, group, cap = n.attr("qk_matmul_output_mode", 0), q.shape.static[1] // k.shape.static[1], facts["cap"]
    wide = q.astype(q.dtype.compute) * (facts["scale"] or 1 / math.sqrt(q.shape.static[3]))
    scores = ops.matmul(wide, ops.transpose(functions.repeat(k, group, 1), axes=(0, 1, 3, 2)).astype(wide.dtype))
    scores = ops.tanh(scores * (1 / cap)) * cap if cap and mode else scores
    if mode >= 2:
        seen, bias = _conditions(n, q, k)
        scores = scores if bias is None else scores + bias.astype(scores.dtype)
        scores = scores if seen is None else ops.where(seen, scores, -math.inf)
    if mode == 3:
        top = ops.max(scores, axis=-1, keepdims=True)
        nothing = ops.equal(top, -math.inf)
        scores = ops.where(nothing, 0.0, ops.softmax(ops.where(nothing, 0.0, scores)))
    return scores.astype(q.dtype)


@handler("RotaryEmbedding", since=23)
def rotary_embedding(n: Call) -> Value:
    """Pairs of the first `rotary_embedding_dim` columns of each head, rotated by the angles whose cosines and sines are given,
    by position where there are position ids."""
    x = heads_first(n, n.value(0), n.attr("num_heads", 0))
    cos, sin = n.value(1), n.value(2)
    if n.has(3):
        cos, sin = (ops.gather(table, n.value(3)) for table in (cos, sin))
    cos, sin = (ops.unsqueeze(table, axes=(1,)) for table in (cos, sin))
    return heads_last(turned(x, cos, sin, bool(n.attr("interleaved", 0))), n.rank(0))


def turned(x: Value, cos: Value, sin: Value, paired: bool) -> Value:
    """The first columns of each head, rotated; angles [batch or 1, 1, rows, pairs]."""
    half = cos.shape.static[-1]
    own, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (own[..., 0::2], own[..., 1::2]) if paired else (own[..., :half], own[..., half:])
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    parts = [a * cos - b * sin, a * sin + b * cos]
    out = functions.stack(parts, -1).reshape(own.dims) if paired else ops.concat(*parts, axis=-1)
    return ops.concat(out, rest, axis=-1) if x.shape.static[-1] > 2 * half else out

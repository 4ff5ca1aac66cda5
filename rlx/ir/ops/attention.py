"""Attention with masks and grouped heads, and rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.contexts import Padded, PaddingPass
from rlx.ir.declare import op
from rlx.ir.dtype import bf16, bool_, f16, f32
from rlx.ir.graph import Node, Value, constant
from rlx.ir.op import Attrs, Kind, Sample, attribute_types
from rlx.ir.ops.contract import matmul
from rlx.ir.ops.elementwise import cos, equal, exp, less, less_equal, log, logical_and, sin, tanh, where
from rlx.ir.ops.index import check_range, concat, gather, iota
from rlx.ir.ops.reduce import any, max, sum
from rlx.ir.ops.rules import divide, integer, same_dtype, widened
from rlx.ir.ops.view import slice_axis
from rlx.ir.shape import Shape, broadcast_dims

Mask = Literal["none", "causal", "sliding_window", "custom", "bias"]
Product = Callable[[Value, Value], Value]
MASKS = get_args(Mask)


class AttentionAttrs(Attrs):
    """`scale` 0.0 means 1 / sqrt(head_dim). `cap`: soft cap, scores s become cap · tanh(s / cap) before masking; 0: no cap.
    `mask`: "none"; "causal": a query attends to its own position and earlier ones; "sliding_window": as causal, but only
    the last `window` positions; "custom": a bool operand, True where to attend; "bias": an operand added to the scores.
    The last query is aligned with the last key. With `positioned`, the last operand is the position of the first query
    instead, and keys past the last query are ignored."""

    scale: float = 0.0
    mask: Mask = "none"
    window: int = 0
    positioned: bool = False
    cap: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cap < math.inf:
            raise AttributeValueError(f"cap is a positive number or 0, got {self.cap}")
        if self.mask not in MASKS:
            raise AttributeValueError(f"mask is one of {', '.join(MASKS)}, got {self.mask!r}")
        if (self.mask == "sliding_window") != (self.window > 0):
            found = f"got {self.mask!r} and {self.window}"
            raise AttributeValueError(f"mask 'sliding_window' and a window of at least 1 go together, {found}")

    @property
    def masked(self) -> bool:
        """True if the mask is an operand."""
        return self.mask in ("custom", "bias")

    def split(self, operands: tuple[Any, ...]) -> tuple[Any, Any]:
        """(mask, start) from the operands after v; None where absent."""
        want = {(False, False): "no fourth operand", (True, False): "a fourth operand, the mask",
                (False, True): "a fourth operand, start", (True, True): "two more operands, the mask and start"}  # fmt: skip
        if len(operands) != self.masked + self.positioned:
            how = ", positioned," if self.positioned else ""
            raise ShapeError(f"mask {self.mask!r}{how} takes {want[self.masked, self.positioned]}")
        return operands[0] if self.masked else None, operands[-1] if self.positioned else None


def _attention_shape(attrs: AttentionAttrs, q: Shape, k: Shape, v: Shape, *operands: Shape) -> Shape:
    same_dtype(k, v)
    if k.dtype not in (f16, bf16):
        same_dtype(q, k)
    if not q.rank == k.rank == v.rank == 4:
        raise ShapeError("q, k and v are [batch, heads, sequence, head_dim]")
    batch, heads, queries, width = q.dims
    if k.dims[:3] != v.dims[:3] or k.dims[0] != batch or k.dims[3] != width:
        raise ShapeError("k must have q's batch and head_dim, and v k's batch, heads and sequence")
    if heads != k.dims[1] and divide(heads, k.dims[1]) is None:
        raise ShapeError(f"{heads} query heads cannot share {k.dims[1]} key heads equally")
    keys, ordered = k.dims[2], attrs.mask in ("causal", "sliding_window")
    if (ordered or attrs.positioned) and isinstance(queries, int) and isinstance(keys, int) and keys < queries:
        why = "every query stands at a key" if attrs.positioned else f"mask {attrs.mask!r} puts the last query at the last key"
        raise ShapeError(f"{why}: {keys} keys are fewer than {queries} queries")
    mask, start = attrs.split(operands)
    if mask is not None:
        dtype = bool_ if attrs.mask == "custom" else q.dtype
        if mask.dtype != dtype:
            raise DTypeError(f"the mask operand must be {dtype}, got {mask.dtype}; cast it")
        want = (batch, heads, queries, keys)
        if broadcast_dims(mask.dims, want) != want:
            raise ShapeError(f"the mask operand must broadcast to [{','.join(map(str, want))}], got {mask}")
    if start is not None and start.dtype.name not in ("i32", "i64"):
        raise DTypeError(f"start must be i32 or i64, got {start.dtype}; cast it: start.astype('i32')")
    if start is not None and start.dims not in ((), (batch,)):
        raise ShapeError(f"start is one position or one per batch: [] or [{batch}], got {start}")
    return q.with_dims((*q.dims[:3], v.dims[3]))


class PartsAttrs(AttentionAttrs):
    """Blocks of `block` keys are dealt out in turn: part i has the blocks whose number is i modulo `parts`."""

    parts: int = 2
    block: int = 1


def _parts_shape(attrs: PartsAttrs, q: Shape, k: Shape, v: Shape, *operands: Shape) -> tuple[Shape, Shape]:
    if min(attrs.parts, attrs.block) < 1:
        raise AttributeValueError(f"parts and block are at least 1, got {attrs.parts} and {attrs.block}")
    out = _attention_shape(attrs, q, k, v, *operands)
    return out.with_dims((attrs.parts, *out.dims)), out.with_dims((attrs.parts, *out.dims[:3]))


def _scale(attrs: AttentionAttrs, width: int) -> float:
    return attrs.scale or 1 / math.sqrt(width or 1)


def _positions_seen(attrs: AttentionAttrs, queries: int, keys: int, start: Value | None) -> Value | None:
    """bool [batch or 1, 1, queries or 1, keys]: keys that each query attends to, from its position; None: all keys."""
    key = iota(dims=(1, 1, 1, keys), axis=3)
    if start is None:
        last = iota(dims=(1, 1, queries, 1), axis=2) + (keys - queries)
    else:
        at = start.reshape((start.shape.num_elements, 1)) + iota(dims=(1, queries), axis=1, dtype=start.dtype)
        last = gather(iota(dims=(keys,)), at.reshape((start.shape.num_elements, 1, queries, 1)))  # the same, each one checked
    if attrs.mask in ("causal", "sliding_window"):
        causal = less_equal(key, last)
        return causal if attrs.mask == "causal" else logical_and(causal, less(last - attrs.window, key))
    return None if start is None else less_equal(key, max(last, axis=2, keepdims=True))


def _scored(
    attrs: AttentionAttrs, q: Value, k: Value, v: Value, *operands: Value, product: Product | None = None
) -> tuple[Value, Value]:
    """Masked scores [batch, heads, queries, keys], and v in q's dtype, zeroed where no query attends. `product`: multiplies q by
    k as they are, in f32; v stays as it is."""
    batch, heads, queries, width = q.shape.static
    shared, keys = k.shape.static[1:3]
    mask, start = attrs.split(operands)
    if product is None:
        k, v, q = k.astype(q.dtype), v.astype(q.dtype), q * _scale(attrs, width)
    seen = _positions_seen(attrs, queries, keys, start)
    if start is not None:  # the unused part of a cache is undefined and may hold NaN
        used = any(seen, axis=2)
        v = where(used.reshape((used.shape.static[0], 1, keys, 1)), v, 0.0)
    if attrs.mask == "custom":
        seen = mask if seen is None else logical_and(seen, mask)
    together = heads // shared * queries if shared else 0  # queries of heads that share a key head are rows of one matrix
    scores = (product or matmul)(q.reshape((batch, shared, together, width)), k.transpose(0, 1, 3, 2))
    scores = (scores * _scale(attrs, width) if product else scores).reshape((batch, heads, queries, keys))
    scores = tanh(scores * (1 / attrs.cap)) * attrs.cap if attrs.cap else scores
    scores = scores + mask if attrs.mask == "bias" else scores
    return scores if seen is None else where(seen, scores, -math.inf), v


def _weights(scores: Value, axis: int = -1) -> tuple[Value, Value]:
    """(softmax of scores, zeros where all are -inf; logsumexp of the scores, with keepdims)."""
    top = max(scores, axis=axis, keepdims=True)
    e = exp(scores - where(equal(top, -math.inf), 0.0, top))  # a row of only -inf gives e = 0, not NaN
    total = sum(e, axis=axis, keepdims=True)
    return e / where(equal(total, 0.0), 1.0, total), top + log(total)


def _weighted(weights: Value, v: Value, product: Product = matmul) -> Value:
    (batch, heads, queries, keys), (_, shared, _, width) = weights.shape.static, v.shape.static
    together = heads // shared * queries if shared else 0
    return product(weights.reshape((batch, shared, together, keys)), v).reshape((batch, heads, queries, width))


def _attention(attrs: AttentionAttrs, q: Value, k: Value, v: Value, *operands: Value) -> Value:
    scores, v = _scored(attrs, q, k, v, *operands)
    return _weighted(_weights(scores)[0], v)


def by_products(node: Node, product: Product) -> Value:
    """Attention whose two contractions are `product`, of f32 or narrow rows by narrow columns, in f32."""
    q, k, v, *operands = node.inputs
    operands = [x.astype(f32) if x.dtype.is_float else x for x in operands]
    scores, v = _scored(node.attrs, q, k, v, *operands, product=product)  # type: ignore[arg-type]
    return _weighted(_weights(scores)[0], v, product).astype(q.dtype)


def _parts_of_keys(attrs: PartsAttrs, keys: int) -> list[np.ndarray]:
    """bool [keys] per part: True for the keys of that part."""
    return [np.arange(keys) // attrs.block % attrs.parts == part for part in range(attrs.parts)]


def _parts(attrs: PartsAttrs, q: Value, k: Value, v: Value, *operands: Value) -> tuple[Value, Value]:
    scores, v = _scored(attrs, q, k, v, *operands)
    found = [_weights(where(constant(own), scores, -math.inf)) for own in _parts_of_keys(attrs, k.shape.static[2])]
    outs, logs = [_weighted(w, v) for w, _ in found], [x for _, x in found]
    dims = outs[0].shape.static
    return concat([x.reshape((1, *dims)) for x in outs], axis=0), concat([x.reshape((1, *dims[:3])) for x in logs], axis=0)


def in_parts(node: Node, parts: int, block: int) -> Value:
    """Attention as attention_parts plus the merge of the parts, in f32 at least: more tasks, each of which reads fewer keys."""
    attrs = {name: getattr(node.attrs, name) for name in attribute_types(AttentionAttrs)}
    q, k, v, *others = node.inputs
    narrow = q.dtype
    if narrow.is_narrow:
        q, *others = (x.astype(f32) if x.dtype == narrow else x for x in (q, *others))
    outs, logs = attention_parts(q, k, v, *others, parts=parts, block=block, **attrs)
    return sum(outs * _weights(logs, axis=0)[0].reshape((*logs.shape.static, 1)), axis=0).astype(narrow)


def _attention_padded(p: PaddingPass, attrs: AttentionAttrs, q: Value, k: Value, v: Value, *operands: Value) -> Padded:
    """Padding keys are masked out and their values are not read, since 0 * NaN is NaN."""
    queries, keys = p.along(q, 2), p.along(k, 2) or p.along(v, 2)
    mask, start = attrs.split(operands)
    facts = {name: getattr(attrs, name) for name in attribute_types(type(attrs))}
    again = attention_parts if isinstance(attrs, PartsAttrs) else attention
    if (p.along(q, 3) or p.along(k, 3)) and not attrs.scale:
        return "the scale is made from head_dim; give it"
    if start is not None and (queries or keys):
        return "the first query stands where the extent does not say"
    if start is not None and p.of(start):
        return p.final(again(q, k, v, *operands[:-1], p.masked(start, 0, guard=True), **facts))
    ordered = attrs.mask in ("causal", "sliding_window")
    if ordered and queries != keys:
        if queries or len(keys) != 1 or keys[0].outer * keys[0].inner > 1:
            return f"mask {attrs.mask!r} puts the last query at the last key, which need not hold data"
        start = p.extent - q.shape.static[2]  # the last query at the last key that holds data
        return p.final(again(q, k, p.masked(v, 2), start, **{**facts, "positioned": True}))
    if not keys:
        return None
    if not ordered:
        if mask is None:
            mask, facts["mask"] = p.valid(k, 2).reshape((1, 1, 1, k.shape.static[2])), "custom"
        elif p.along(mask, mask.rank - 1):
            mask = p.masked(mask, mask.rank - 1, "0" if attrs.mask == "custom" else "least")
        else:
            there = p.valid(k, 2)
            mask = logical_and(mask, there) if attrs.mask == "custom" else where(there, mask, -math.inf)
        k = p.masked(k, 2) if attrs.mask == "bias" else k  # adding a bias does not hide a NaN score
    return p.final(again(q, k, p.masked(v, 2), *(() if ordered else (mask,)), **facts))


def _scored_array(
    attrs: AttentionAttrs, q: np.ndarray, k: np.ndarray, v: np.ndarray, *operands: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Masked scores, and v repeated for every query head and zeroed where no query attends."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) * _scale(attrs, q.shape[3])
    scores = np.tanh(scores / attrs.cap) * attrs.cap if attrs.cap else scores
    queries, keys = scores.shape[2:]
    mask, start = attrs.split(operands)
    last = np.reshape(keys - queries if start is None else start, (-1, 1, 1, 1)) + np.arange(queries)[:, None]
    behind, there = last - np.arange(keys), np.True_
    if attrs.mask in ("causal", "sliding_window"):
        there = (behind >= 0) & ((behind < attrs.window) | (attrs.mask == "causal"))
    elif start is not None:
        there = np.any(behind >= 0, axis=2, keepdims=True)
    if start is not None:
        check_range(last, keys, "attention")
        v = np.where(np.any(there, axis=2)[..., None], v, 0)
    if attrs.mask == "bias":
        scores = scores + mask
    elif attrs.mask == "custom":
        there = there & np.asarray(mask)
    return np.where(there, scores, -np.inf), v


def _softmax_array(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(softmax(scores) @ v, logsumexp of the scores)."""
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(e, axis=-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", e / np.where(total == 0, 1, total), v), (top + np.log(total))[..., 0]


def _attention_array(attrs: AttentionAttrs, *operands: np.ndarray) -> np.ndarray:
    return _softmax_array(*_scored_array(attrs, *operands))[0]


def _parts_array(attrs: PartsAttrs, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
    scores, v = _scored_array(attrs, *operands)
    every = (_softmax_array(np.where(own, scores, -np.inf), v) for own in _parts_of_keys(attrs, v.shape[2]))
    return tuple(map(np.stack, zip(*every)))


QKV = ((2, 4, 5, 8),) * 3
GROUPED = ((2, 4, 3, 8), (2, 2, 17, 8), (2, 2, 17, 8))
def _flops(operands: Sequence[Sequence[int]], results: object, attrs: object) -> int:
    """Every query-key pair counts, masked or not: q @ kᵀ and the product with v."""
    q, k, v = operands[:3]
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


attention = op(
    "attention", kind=Kind.COMPOSITE, infer=_attention_shape, attrs=AttentionAttrs, arity=(3, 5), roles="xxxxi",
    reference=_attention_array, decompose=widened(_attention), padded=_attention_padded, flops=_flops,
    samples=(
        Sample(QKV), Sample(QKV, {"mask": "causal"}), Sample(GROUPED, {"mask": "causal"}), Sample(GROUPED, {"scale": 0.3}),
        Sample(GROUPED, {"mask": "sliding_window", "window": 3}), Sample(((1, 3, 1, 16), (1, 1, 33, 16), (1, 1, 33, 16))),
        Sample((*QKV, (2, 1, 1, 5)), {"mask": "custom"}, dtypes=("", "", "", "bool")),
        Sample((*GROUPED, (3, 17)), {"mask": "custom"}, dtypes=("", "", "", "bool")), Sample((*QKV, (4, 5, 5)), {"mask": "bias"}),
        Sample((*GROUPED, (2, 1, 1, 17)), {"mask": "bias"}), Sample(((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6))),
        Sample((*GROUPED, ()), {"mask": "causal", "positioned": True}, low=0, high=4, dtypes=("", "", "", "i32")),
        Sample((*GROUPED, (2,)), {"positioned": True}, low=0, high=4, dtypes=("", "", "", "i64")),
        Sample(
            (*GROUPED, (2,)), {"mask": "sliding_window", "window": 2, "positioned": True}, low=0, high=4,
            dtypes=("", "", "", "i32"),
        ),
        Sample(
            (*GROUPED, (2, 1, 1, 17), ()), {"mask": "custom", "positioned": True}, low=0, high=4,
            dtypes=("", "", "", "bool", "i32"),
        ),
        Sample((*GROUPED, (4, 3, 17), (2,)), {"mask": "bias", "positioned": True}, low=0, high=4, dtypes=("", "", "", "", "i64")),
        Sample(GROUPED, {"mask": "causal", "cap": 0.7}), Sample((*QKV, (4, 5, 5)), {"mask": "bias", "cap": 2.0, "scale": 0.5}),
        *(Sample((*GROUPED, ()), {"mask": "causal", "positioned": True}, low=0, high=4, dtypes=("", narrow, narrow, "i32"))
          for narrow in ("f16", "bf16")),
    ),
    doc="Scaled dot-product attention: softmax(q @ kᵀ * scale + mask) @ v over [batch, heads, sequence, head_dim]. With grouped "
    "heads, k and v have fewer heads, each shared by the same number of consecutive query heads. k and v may be f16 or bf16 "
    "with any dtype of q; the result has q's dtype. A fully masked row gives zeros. With `positioned`, the last operand, "
    "start ([] or [batch]), is the position of the first query; k and v may be a whole KV cache, and keys past the last query "
    "are ignored. A query past the last key is an IndexRangeError.",
)  # fmt: skip


LONG = ((1, 2, 1, 4), (1, 1, 300, 4), (1, 1, 300, 4))
attention_parts = op(
    "attention_parts", kind=Kind.COMPOSITE, infer=_parts_shape, attrs=PartsAttrs, arity=(3, 5), roles="xxxxi",
    reference=_parts_array, decompose=widened(_parts), padded=_attention_padded, flops=_flops,
    samples=(
        Sample(LONG, {"cap": 2.0, "block": 128}),
        Sample((*LONG, ()), {"mask": "causal", "positioned": True, "parts": 3, "block": 128}, low=0, high=290,
        dtypes=("f32", "f16", "f16", "i32")),
        Sample((*LONG, (300,)), {"mask": "custom", "block": 128}, dtypes=("f32", "f32", "f32", "bool")), Sample(QKV),
    ),
    doc="Split-key attention: the partial result for each part of the keys, [parts, batch, heads, sequence, head_dim] (zeros "
    "where a part has no visible key), and its logsumexp, [parts, batch, heads, sequence], used to merge the parts.",
)  # fmt: skip


# -- rope ----------------------------------------------------------------------------------------------------------


class RopeAttrs(Attrs):
    """`interleaved`: pairs are elements (2i, 2i+1) of head_dim; otherwise (i, i + head_dim/2)."""

    theta: float = 10000.0
    interleaved: bool = False


def _rope_shape(attrs: RopeAttrs, x: Shape, positions: Shape) -> Shape:
    integer("positions", positions)
    if x.rank < 2 or not isinstance(x.dims[-1], int) or x.dims[-1] % 2:
        raise ShapeError(f"x is [..., sequence, head_dim] with an even head_dim, got {x}")
    if positions.dims not in ((x.dims[-2],), (x.dims[0], x.dims[-2])) or (positions.rank == 2 and x.rank < 3):
        raise ShapeError(f"positions are [{x.dims[-2]}] or [{x.dims[0]},{x.dims[-2]}], got {positions}")
    return x


def _frequencies(attrs: RopeAttrs, width: int) -> np.ndarray:
    """Rotation in radians per position for each pair: theta ** (-2i / head_dim), in f32 as in training."""
    return (1.0 / attrs.theta ** (np.arange(0, width, 2) / width)).astype(np.float32)


def _rope(attrs: RopeAttrs, x: Value, positions: Value) -> Value:
    *lead, length, width = x.shape.static
    half = width // 2
    dims = (length, 1) if positions.rank == 1 else (lead[0], *(1,) * (len(lead) - 1), length, 1)
    angle = positions.astype("f32").reshape(dims) * constant(_frequencies(attrs, width))
    c, s = cos(angle.astype(x.dtype)), sin(angle.astype(x.dtype))
    if attrs.interleaved:
        pairs = x.reshape((*lead, length, half, 2))
        a, b = (slice_axis(pairs, -1, i, i + 1).reshape((*lead, length, half)) for i in (0, 1))
        turned = [v.reshape((*lead, length, half, 1)) for v in (a * c - b * s, b * c + a * s)]
        return concat(turned, axis=-1).reshape((*lead, length, width))
    a, b = slice_axis(x, -1, 0, half), slice_axis(x, -1, half, width)
    return concat([a * c - b * s, b * c + a * s], axis=-1)


def _rope_array(attrs: RopeAttrs, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Each pair times exp(i · angle), as complex numbers."""
    width = x.shape[-1]
    if positions.ndim == 2:
        positions = positions.reshape((positions.shape[0],) + (1,) * (x.ndim - 3) + positions.shape[1:])
    angle = positions.astype(np.float32)[..., None] * _frequencies(attrs, width)
    a, b = (x[..., 0::2], x[..., 1::2]) if attrs.interleaved else (x[..., : width // 2], x[..., width // 2 :])
    z = np.empty(a.shape, np.complex128)
    z.real, z.imag = a, b
    z = z * np.exp(1j * angle.astype(np.float64))
    out = np.empty(x.shape, np.float64)
    if attrs.interleaved:
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., : width // 2], out[..., width // 2 :] = z.real, z.imag
    return out


rope = op(
    "rope", kind=Kind.COMPOSITE, infer=_rope_shape, attrs=RopeAttrs, arity=(2, 2), roles="xi",
    reference=_rope_array, decompose=widened(_rope),
    samples=(
        Sample(((2, 3, 5, 8), (5,)), low=0, high=9, dtypes=("", "i64")),
        Sample(((2, 3, 5, 8), (2, 5)), {"theta": 500000.0}, low=0, high=9, dtypes=("", "i32")),
        Sample(((1, 17, 6), (17,)), {"interleaved": True}, low=0, high=9, dtypes=("", "i64")),
        Sample(((2, 1, 3, 4), (2, 3)), {"interleaved": True}, low=0, high=9, dtypes=("", "i64")),
    ),
    doc="Rotary position embedding: rotates pair i of x [..., sequence, head_dim] by position * theta ** (-2i / head_dim) "
    "radians. positions: [sequence], or [batch, sequence] where dim 0 of x is the batch.",
)  # fmt: skip

"""The results of each op by others: torch and scipy in float64, Python's own integers, or loops written out.

ORACLES[name](case, attrs, *arrays) takes floats as float64, integers as int64 and complex numbers as complex128; it gives
such numbers, bool, or a tuple.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import scipy.special
import torch
import torch.nn.functional as F

from rlx.ir.dtype import DTYPES, DType
from tests import conv_oracles


def torch_(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle of torch tensors: fn(attrs, *tensors)."""

    def run(case: Any, attrs: Any, *arrays: np.ndarray) -> Any:
        out = fn(attrs, *(torch.from_numpy(np.array(a)) for a in arrays))
        return tuple(t.numpy() for t in out) if isinstance(out, (tuple, list)) else out.numpy()

    return run


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle of operands alone, in torch."""
    return torch_(lambda attrs, *tensors: fn(*tensors))


def numbers(for_ints: Callable[[int, int, DType], int], for_floats: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Element by element in Python's integers; floats by torch."""

    def run(case: Any, attrs: Any, x: np.ndarray, y: np.ndarray) -> Any:
        if x.dtype.kind in "fc":
            assert for_floats is not None
            return for_floats(torch.from_numpy(x), torch.from_numpy(y)).numpy()
        x, y = np.broadcast_arrays(x, y)
        made = [wrap(for_ints(int(a), int(b), case.dtype), case.dtype) for a, b in zip(x.flat, y.flat)]
        return np.array(made, np.int64).reshape(x.shape)

    return run


def wrap(value: int, dtype: DType) -> int:
    """The integer that the low bits of `value` are in `dtype` (in 64 bits always signed: numpy takes it from there)."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "i" and value >> (dtype.bits - 1) else value


def truncated(x: int, y: int, dtype: DType) -> int:
    return 0 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def shifted_right(x: int, count: int, dtype: DType) -> int:
    return x >> (count if 0 <= count < dtype.bits else dtype.bits)


def cast(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
    def one(v: Any) -> Any:
        if attrs.dtype.kind == "b":
            return v != 0
        v = v.real if attrs.dtype.kind != "c" else v
        if not attrs.dtype.is_int:
            return v if isinstance(v, complex) else float(v)
        if isinstance(v, int):
            return wrap(v, attrs.dtype)
        low, high = np.iinfo(attrs.dtype.numpy).min, np.iinfo(attrs.dtype.numpy).max
        return 0 if math.isnan(v) else low if v < low else high if v > high else int(v)

    kind = {"b": np.bool_, "f": np.float64, "c": np.complex128}.get(attrs.dtype.kind, np.int64)
    return np.array([one(v) for v in x.reshape(-1).tolist()], kind).reshape(x.shape)


def same_bits(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
    """By torch's own view of other bits."""
    names = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    names |= {d.name: {"i": "int", "u": "uint"}[d.kind] + str(d.bits) for d in DTYPES.values() if d.is_int}
    wanted = [getattr(torch, names[d.name]) for d in (case.dtypes[0], attrs.dtype)]
    found = torch.from_numpy(x).to(wanted[0]).view(wanted[1])
    return found.to(torch.float64 if attrs.dtype.is_float else torch.int64).numpy()


def axes(attrs: Any, x: torch.Tensor) -> tuple[int, ...]:
    return attrs.axis or tuple(range(x.ndim))


def one_by_one(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A reduction that torch does over one dim at a time."""

    def run(attrs: Any, x: torch.Tensor) -> torch.Tensor:
        for axis in sorted((a % x.ndim for a in axes(attrs, x)), reverse=True):
            x = fn(x, dim=axis, keepdim=attrs.keepdims)
        return x

    return torch_(run)


def extreme(fn: Callable[..., torch.Tensor], sign: int) -> Callable[..., Any]:
    """amax or amin, which torch leaves undefined over nothing."""

    def run(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
        if x.size:
            return fn(torch.from_numpy(x), dim=axes(attrs, torch.from_numpy(x)), keepdim=attrs.keepdims).numpy()
        shape = [d for i, d in enumerate(x.shape) if i not in {a % x.ndim for a in attrs.axis}]
        ends = np.iinfo(case.dtype.numpy) if case.dtype.is_int else np.array([-np.inf, np.inf])
        return np.full(shape, (ends.min if sign > 0 else ends.max) if case.dtype.is_int else ends[0 if sign > 0 else 1])

    return run


def arg(better: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def pick(row: np.ndarray) -> int:
        best = 0
        for i, v in enumerate(row.tolist()):
            if v != v:
                return i
            best = i if better(v, row[best]) else best
        return best

    def run(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
        rows = np.moveaxis(x, attrs.axis, -1)
        out = np.array([pick(rows[at]) for at in np.ndindex(rows.shape[:-1])], np.int64).reshape(rows.shape[:-1])
        return np.expand_dims(out, attrs.axis) if attrs.keepdims else out

    return run


def running(fn: Callable[..., torch.Tensor], unit: int) -> Callable[..., Any]:
    def run(attrs: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.flip(attrs.axis) if attrs.reverse else x
        total = fn(x, attrs.axis)
        if attrs.exclusive:
            before = total.narrow(attrs.axis, 0, x.shape[attrs.axis] - 1)
            total = torch.cat([torch.full_like(total.narrow(attrs.axis, 0, 1), unit), before], attrs.axis)
        return total.flip(attrs.axis) if attrs.reverse else total

    return torch_(run)


def gather(attrs: Any, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    axis = attrs.axis % x.ndim
    return torch.index_select(x, axis, indices.reshape(-1)).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def update_rows(attrs: Any, state: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.slice_scatter(state, rows, attrs.axis, int(at), int(at) + rows.shape[attrs.axis])


def numbers_of_rows(case: Any, attrs: Any, x: np.ndarray, extent: np.ndarray) -> np.ndarray:
    """Index by index."""
    out, axis = np.array(x), attrs.axis % x.ndim
    limits = np.finfo(np.float64) if x.dtype.kind == "f" else np.iinfo(case.dtype.numpy) if x.dtype.kind == "i" else None
    far = 448 if case.dtype.name == "f8e4m3" else np.inf  # it has no infinities
    ends = {"0": 0, "1": 1, "least": -far, "greatest": far}
    if x.dtype.kind == "i":
        ends |= {"least": limits.min, "greatest": limits.max}
    for at in np.ndindex(x.shape):
        if at[axis] // attrs.inner % (attrs.upper or x.shape[axis] // attrs.inner) >= extent:
            out[at] = ends[attrs.fill] if x.dtype.kind != "b" else attrs.fill in ("1", "greatest")
    return out


def scatter_add(attrs: Any, x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    flat = updates.reshape(*x.shape[: attrs.axis], indices.numel(), *x.shape[attrs.axis + 1 :])
    return x.index_add(attrs.axis, indices.reshape(-1), flat)


def scatter_elements(case: Any, attrs: Any, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """By torch; where the last update stays, which torch leaves open, by Python's dict."""
    if attrs.mode != "replace":
        kind = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[attrs.mode]
        return torch.from_numpy(np.array(x)).scatter_reduce(attrs.axis, *map(torch.from_numpy, (indices, updates)), kind).numpy()
    axis = attrs.axis % x.ndim
    last = {(*at[:axis], int(i), *at[axis + 1 :]): updates[at] for at, i in np.ndenumerate(indices)}
    return np.array([last.get(at, old) for at, old in np.ndenumerate(x)], x.dtype).reshape(x.shape)


def non_max_suppression(case: Any, attrs: Any, boxes: np.ndarray, scores: np.ndarray) -> Any:
    """Box by box in the order of scores: one stays unless it overlaps one that has stayed."""
    batch, classes, n = scores.shape
    ids, counts = np.full((batch, classes, min(attrs.most, n)), -1), np.zeros((batch, classes), np.int64)

    def overlap(x: list[float], y: list[float]) -> float:
        sides = [
            np.minimum(np.maximum(x[i], x[i + 2]), np.maximum(y[i], y[i + 2]))
            - np.maximum(np.minimum(x[i], x[i + 2]), np.minimum(y[i], y[i + 2])) for i in (0, 1)
        ]  # fmt: skip
        areas = [abs(z[2] - z[0]) * abs(z[3] - z[1]) for z in (x, y)]
        common = sides[0] * sides[1] if min(sides) > 0 else 0.0
        return common / (sum(areas) - common) if common > 0 and min(areas) > 0 else 0.0

    for b, c in np.ndindex(batch, classes):
        stay: list[int] = []
        for i in sorted((i for i in range(n) if scores[b, c, i] > attrs.least), key=lambda i: (-scores[b, c, i], i)):
            if len(stay) < attrs.most and not any(overlap(boxes[b, i], boxes[b, j]) > attrs.overlap for j in stay):
                stay.append(i)
        ids[b, c, : len(stay)], counts[b, c] = stay, len(stay)
    return ids, counts


def quant_rows(case: Any, attrs: Any, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return dequantize(case, attrs, w)[ids.astype(int)]


def attention(case: Any, attrs: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    """Query by query: a softmax over the keys that it may attend to, and no others."""
    *outer, width = q.shape
    group, late = q.shape[1] // k.shape[1], [k.shape[2] - q.shape[2]] * len(q)
    masked = attrs.mask in ("custom", "bias")
    operand = np.broadcast_to(operands[0], (*outer, k.shape[2])) if masked else np.zeros((*outer, k.shape[2]))
    if attrs.positioned:
        late = list(np.broadcast_to(operands[-1], len(q)))
    out = np.zeros((*outer, v.shape[3]))
    for b, h, i in np.ndindex(*outer):
        here, keys = late[b] + i, list(range(late[b] + q.shape[2] if attrs.positioned else k.shape[2]))
        if attrs.mask in ("causal", "sliding_window"):
            keys = [j for j in keys if j <= here and (attrs.mask == "causal" or here - j < attrs.window)]
        elif attrs.mask == "custom":
            keys = [j for j in keys if operand[b, h, i, j]]
        scores = k[b, h // group, keys] @ q[b, h, i] * (attrs.scale or width**-0.5)
        scores = np.tanh(scores / attrs.cap) * attrs.cap if attrs.cap else scores
        scores = scores + operand[b, h, i, keys] if attrs.mask == "bias" else scores
        if not np.all(scores == -np.inf):
            out[b, h, i] = scipy.special.softmax(scores) @ v[b, h // group, keys]
    return out


def attention_parts(case: Any, attrs: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, *operands: np.ndarray) -> Any:
    """The keys of each part alone, by a mask; and scipy's logsumexp, but that infinity less infinity is no number."""
    outs, logs = [], []
    for part in range(attrs.parts):
        own = np.arange(k.shape[2]) // attrs.block % attrs.parts == part
        keep = np.broadcast_to(own if attrs.mask != "custom" else own & operands[0], (*q.shape[:3], k.shape[2]))
        if attrs.positioned:
            keep = keep & (np.arange(k.shape[2]) <= operands[-1] + np.arange(q.shape[2])[:, None])
        scores = np.einsum("bhqd,bhkd->bhqk", q, np.repeat(k, q.shape[1] // k.shape[1], 1)) * q.shape[3] ** -0.5
        scores = np.where(keep, np.tanh(scores / attrs.cap) * attrs.cap if attrs.cap else scores, -np.inf)
        logs.append(np.where(np.isposinf(scores).any(-1), np.nan, scipy.special.logsumexp(scores, axis=-1)))
        plain = types.SimpleNamespace(mask="custom", positioned=False, cap=attrs.cap, scale=0.0)
        outs.append(attention(case, plain, q, k, v, keep))
    return np.stack(outs), np.stack(logs)


def rope(case: Any, attrs: Any, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pair by pair, each turned by a 2 × 2 matrix; angles are products of f32 numbers, as in the models."""
    width = x.shape[-1]
    out = np.array(x)
    for at in np.ndindex(x.shape[:-1]):
        position = positions[at[-1]] if positions.ndim == 1 else positions[at[0], at[-1]]
        for i in range(width // 2):
            pair = [2 * i, 2 * i + 1] if attrs.interleaved else [i, i + width // 2]
            angle = float(np.float32(position) * np.float32(attrs.theta ** (-2 * i / width)))
            turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            with np.errstate(invalid="ignore"):
                out[(*at, pair)] = (turn * x[(*at, pair)]).sum(axis=1)
    return out


def normalised(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch's layer_norm or rms_norm over the dims from attrs.axis on."""
    return torch_(lambda a, x, *affine: fn(x, x.shape[a.axis % x.ndim :], *affine, eps=a.eps))


def ordered(x: torch.Tensor, descending: bool) -> tuple[torch.Tensor, ...]:
    return tuple(torch.sort(x, dim=-1, stable=True, descending=descending))


def unsqueezed(attrs: Any, x: torch.Tensor) -> torch.Tensor:
    rank = x.ndim + len(attrs.axes)
    for axis in sorted(a % rank for a in attrs.axes):
        x = x.unsqueeze(axis)
    return x


def sliced(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
    return x[tuple(slice(*bounds) for bounds in zip(attrs.starts, attrs.stops, attrs.steps))]


def ends(sizes: tuple[int, ...]) -> list[int]:
    return list(itertools.accumulate(sizes))[:-1]


def padded(attrs: Any, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, [n for pair in reversed(list(zip(attrs.low, attrs.high))) for n in pair], value=attrs.value)


def dequantize(case: Any, attrs: Any, packed: np.ndarray) -> np.ndarray:
    """The gguf package's own; int8 and int4 have the layouts of two of its formats."""
    name = {"int8": "q8_0", "int4": "q4_0"}.get(attrs.format, attrs.format)
    kind = gguf.GGMLQuantizationType[name.upper()]
    return gguf.quants.dequantize(packed.astype(np.uint8), kind)[..., : attrs.columns].astype(np.float64)


def packed_blocks(format: str, w: np.ndarray) -> np.ndarray:
    """The memory of pack_quant: the integers, scales and mins of each block first; then a panel's bytes one after the other."""
    nbytes = {"q8_0": 34, "q4_0": 18, "q5_0": 22, "q4_k": 144, "q5_k": 176, "q6_k": 210}[format]
    numbers = 4 if format in ("q4_k", "q5_k") else 2
    b = np.zeros((-(-len(w) // 32) * 32, w.shape[1] // nbytes, nbytes), np.uint8)
    b[: len(w)] = w.reshape(len(w), -1, nbytes)
    scales, mins = b[..., :0], b[..., :0]
    head, rest = (b[..., 208:], b) if format == "q6_k" else (b[..., :numbers], b[..., numbers:])
    halves = lambda x, size: np.stack((x.reshape(*b.shape[:2], -1, size) & 15, x.reshape(*b.shape[:2], -1, size) >> 4), -2)  # noqa: E731
    if format == "q8_0":
        q = rest ^ 128
    elif format == "q4_0":
        q = halves(rest, 16)
    elif format == "q5_0":
        q = halves(rest[..., 4:], 16).reshape(*b.shape[:2], 32) | np.unpackbits(rest[..., :4], -1, bitorder="little") << 4
    elif format == "q6_k":
        high = np.stack([rest[..., 128:192].reshape(*b.shape[:2], 2, 32) >> s & 3 for s in (0, 2, 4, 6)], -2)
        q, scales = halves(rest[..., :128], 64).reshape(high.shape) | high << 4, rest[..., 192:208]
    else:
        s = rest[..., :12]
        scales = np.concatenate((s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4), -1)
        mins = np.concatenate((s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4), -1)
        q = halves(rest[..., -128:], 32).reshape(*b.shape[:2], -1)
        if format == "q5_k":
            q |= (np.stack([rest[..., 12:44] >> g & 1 for g in range(8)], -2) << 4).reshape(q.shape)
    q = q.reshape(*b.shape[:2], -1)
    above = {"q5_0": 1, "q5_k": 1, "q6_k": 2}.get(format, 0)
    out: list[int] = []

    def dwords(r: int, block: int, start: int, shift: int, bits: int) -> None:
        for row in range(r, r + 32):
            for byte in range(4):
                part = [int(x) >> shift & (1 << bits) - 1 for x in q[row, block, start + byte : start + 32 // bits : 4]]
                out.append(sum(x << i * bits for i, x in enumerate(part)))

    for r in range(0, len(b), 32):
        for block in range(b.shape[1]):
            for n in range(0, numbers, 2):
                out += head[r : r + 32, block, n : n + 2].ravel().tolist()
            for turn in range(q.shape[2] // 32):
                each = scales.shape[2] * 32 // q.shape[2]
                out += scales[r : r + 32, block, turn * each : (turn + 1) * each].T.ravel().tolist()
                out += mins[r : r + 32, block, turn : turn + 1].ravel().tolist()
                for at in range(32 * turn, 32 * turn + 32, 4 if format == "q8_0" else 8):
                    if above and at % (32 // above) == 0:
                        dwords(r, block, at, 4, above)
                    dwords(r, block, at, 0, 8 if format == "q8_0" else 4)
    return np.array(out).reshape(len(b) // 32, -1)


def dequant_matmul(case: Any, attrs: Any, x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    return x @ dequantize(case, SimpleNamespace(format=attrs.format, columns=x.shape[-1]), packed).T


def threefry(key: np.ndarray, counter: int, count: int) -> np.ndarray:
    """The two words of Threefry-2x32-20 xored, for blocks (counter, 0 … count - 1), in Python's integers."""
    out, full = [], 2**32 - 1
    keys = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]
    for i in range(count):
        a, b = counter + keys[0] & full, i + keys[1] & full
        for r in range(20):
            a = a + b & full
            by = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
            b = (b << by | b >> 32 - by) & full ^ a
            if r % 4 == 3:
                n = r // 4 + 1
                a, b = a + keys[n % 3] & full, b + keys[(n + 1) % 3] + n & full
        out.append(a ^ b)
    return np.array(out, np.int64)


def random_numbers(finish: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """An oracle of ops that draw: `finish` turns 32 random bits into a number."""
    return lambda c, a, key, counter: finish(threefry(key, int(counter), math.prod(a.dims)).reshape(a.dims))


def gumbel(bits: np.ndarray) -> np.ndarray:
    u = ((bits.astype(np.float32) + np.float32(0.5)) / np.float32(2**32)).astype(np.float64)
    return -np.log(-np.log1p(-np.minimum(u, 1 - 2**-24)))


def threshold(case: Any, attrs: Any, x: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Every element tried."""
    rows = []
    for row in x.reshape(math.prod(x.shape[:-1]), x.shape[-1]):
        weights = np.maximum(row, 0) if attrs.weighted else np.ones_like(row)
        fits = [e for e in row if weights[row >= e].sum() >= max(float(amount), 2.0**-126)]
        rows.append(max(fits, default=-math.inf))
    return np.array(rows).reshape(x.shape[:-1])


def route(attrs: Any, scores: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Whole tensors, as in the routers of DeepSeek-V3: masks made by scatter."""
    is_sigmoid = attrs.scoring == "sigmoid"
    p = torch.sigmoid(scores) if is_sigmoid else torch.softmax(scores, -1)
    choice = scores if bias is None and not (is_sigmoid and attrs.groups > 1) else p if bias is None else p + bias
    tokens, experts = scores.shape
    if attrs.groups > 1:
        members = ordered(choice.view(tokens, attrs.groups, -1), True)[0]
        best = ordered(members[..., :2].sum(-1) if is_sigmoid else members[..., 0], True)[1][:, : attrs.top_groups]
        mask = torch.zeros(tokens, attrs.groups).scatter(1, best, 1).repeat_interleave(experts // attrs.groups, 1)
        choice = choice.masked_fill(mask == 0, -math.inf)
    ids = ordered(choice, True)[1][:, : attrs.k]
    weights = p.gather(1, ids)
    if attrs.renormalise or attrs.scoring == "top_k_softmax":
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20 * is_sigmoid)
    return ids, weights * attrs.scale


def group_rows(attrs: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    order = torch.argsort(ids, stable=True)
    return order, torch.argsort(order), torch.cumsum(torch.bincount(ids, minlength=attrs.groups), 0)


def segment_matmul(case: Any, attrs: Any, x: np.ndarray, w: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Row by row, by the number of groups that end before it."""
    if attrs.format:
        w = np.stack([dequantize(case, SimpleNamespace(format=attrs.format, columns=x.shape[1]), part).T for part in w])
    rows = [row @ w[min(int(np.sum(ends <= r)), len(w) - 1)] for r, row in enumerate(x)]
    return np.array(rows).reshape(len(x), w.shape[2])


def alone(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
    """A collective among one rank."""
    return x


def looped(case, attrs, h, x):
    """The body of the sample of `loop`, written out."""
    rows = []
    for row in x:
        h = np.tanh(h * 0.5 + row)
        rows.append(h * 2)
    return np.int64(len(rows)), h, np.stack(rows)


ORACLES: dict[str, Callable[..., Any]] = {
    "neg": plain(torch.neg), "abs": plain(torch.abs), "sqrt": plain(torch.sqrt), "rsqrt": plain(torch.rsqrt),
    "reciprocal": plain(torch.reciprocal), "exp": plain(torch.exp), "log": plain(torch.log), "sin": plain(torch.sin),
    "cos": plain(torch.cos), "tanh": plain(torch.tanh), "erf": plain(torch.erf), "floor": plain(torch.floor),
    "ceil": plain(torch.ceil), "round": plain(torch.round), "trunc": plain(torch.trunc), "sign": lambda c, a, x: np.sign(x),
    "is_nan": plain(torch.isnan), "logical_not": plain(torch.logical_not), "bitwise_not": plain(torch.bitwise_not),
    "add": plain(torch.add), "sub": plain(torch.sub), "mul": plain(torch.mul), "div": numbers(truncated, torch.div),
    "rem": numbers(lambda x, y, d: x - y * truncated(x, y, d) if y else 0, torch.fmod),
    "mod": numbers(lambda x, y, d: x % y if y else 0, torch.remainder),
    "floor_div": numbers(lambda x, y, d: x // y if y else 0, lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "pow": plain(torch.pow), "maximum": plain(torch.maximum), "minimum": plain(torch.minimum), "less": plain(torch.lt),
    "less_equal": plain(torch.le), "equal": plain(torch.eq), "not_equal": plain(torch.ne),
    "logical_and": plain(torch.logical_and), "logical_or": plain(torch.logical_or), "logical_xor": plain(torch.logical_xor),
    "bitwise_and": plain(torch.bitwise_and), "bitwise_or": plain(torch.bitwise_or), "bitwise_xor": plain(torch.bitwise_xor),
    "shift_left": numbers(lambda x, n, d: x << n if 0 <= n < d.bits else 0), "shift_right": numbers(shifted_right),
    "where": plain(torch.where), "cast": cast, "multiply_add": plain(lambda x, y, z: x * y + z),
    "sum": torch_(lambda a, x: torch.sum(x, axes(a, x), keepdim=a.keepdims)), "prod": one_by_one(torch.prod),
    "max": extreme(torch.amax, 1), "min": extreme(torch.amin, -1), "any": one_by_one(torch.any), "all": one_by_one(torch.all),
    "mean": torch_(lambda a, x: torch.mean(x, axes(a, x), keepdim=a.keepdims)),
    "variance": torch_(lambda a, x: torch.var(x, axes(a, x), correction=a.correction, keepdim=a.keepdims)),
    "softmax": torch_(lambda a, x: torch.softmax(x, a.axis)), "log_softmax": torch_(lambda a, x: torch.log_softmax(x, a.axis)),
    "argmax": arg(lambda x, best: x > best), "argmin": arg(lambda x, best: x < best),
    "cumsum": running(torch.cumsum, 0), "cumprod": running(torch.cumprod, 1),
    "sort": torch_(lambda a, x: ordered(x, a.descending)), "argsort": torch_(lambda a, x: ordered(x, a.descending)[1]),
    "top_k": torch_(lambda a, x: tuple(t[..., : a.k] for t in ordered(x, a.largest))),
    "top_few": torch_(lambda a, x: tuple(t[..., : a.k] for t in ordered(x, True))),
    "reshape": torch_(lambda a, x: x.reshape(a.dims)), "broadcast_to": torch_(lambda a, x: x.expand(a.dims)),
    "transpose": torch_(lambda a, x: x.permute(a.axes or tuple(reversed(range(x.ndim))))), "slice": sliced,
    "split": torch_(lambda a, x: torch.tensor_split(x, a.parts if isinstance(a.parts, int) else ends(a.parts), a.axis)),
    "squeeze": torch_(lambda a, x: x.squeeze(a.axes)), "unsqueeze": torch_(unsqueezed),
    "matmul": plain(torch.matmul), "int8_matmul": plain(torch.matmul),
    "linear": plain(lambda x, w, b=None: F.linear(x, w.T, b)), "pack": plain(torch.clone),
    "quant_rows": quant_rows,
    "update_rows": torch_(update_rows), "take_rows": torch_(lambda a, x, at: torch.narrow(x, a.axis, int(at), a.count)),
    "valid_rows": numbers_of_rows,
    "view_as_real": plain(torch.view_as_real), "view_as_complex": plain(lambda x: torch.complex(x[..., 0], x[..., 1])),
    "complex": plain(torch.complex), "real": plain(torch.real), "imag": plain(torch.imag), "conj": plain(torch.conj_physical),
    "route": torch_(route), "router": plain(torch.clone), "group_rows": torch_(group_rows), "segment_matmul": segment_matmul,
    "group_ends": plain(lambda sizes: torch.cumsum(sizes, 0)),
    "grouped_matmul": lambda c, a, x, w, sizes: segment_matmul(c, a, x, w, np.cumsum(sizes)),
    "gather": torch_(gather), "embedding": plain(lambda table, ids: F.embedding(ids, table)), "scatter_add": torch_(scatter_add),
    "gather_elements": torch_(lambda a, x, i: torch.gather(x, a.axis, i)), "scatter_elements": scatter_elements,
    "copy": plain(torch.clone), "concat": torch_(lambda a, *xs: torch.cat(xs, a.axis)), "pad": torch_(padded),
    "iota": lambda c, a: np.fromfunction(lambda *at: at[a.axis], a.dims, dtype=np.int64),
    "relu": plain(torch.relu), "sigmoid": plain(torch.sigmoid), "silu": plain(F.silu),
    "softplus": lambda c, a, x: -scipy.special.log_expit(-x), "gelu": torch_(lambda a, x: F.gelu(x, approximate=a.approximate)),
    "clip": torch_(lambda a, x: torch.clamp(x, a.low, a.high)), "log1p": plain(torch.log1p), "expm1": plain(torch.expm1),
    **{n: plain(getattr(torch, n)) for n in "tan asin acos atan sinh cosh asinh acosh atanh".split()}, "bitcast": same_bits,
    "non_max_suppression": non_max_suppression,
    "layer_norm": normalised(F.layer_norm), "rms_norm": normalised(F.rms_norm),
    "batch_norm": torch_(
        lambda a, x, *p: torch.movedim(F.batch_norm(torch.movedim(x, a.axis, 1), p[2], p[3], p[0], p[1], eps=a.eps), 1, a.axis)
    ),
    "group_norm": torch_(lambda a, x, *affine: F.group_norm(x, a.groups, *affine, eps=a.eps)),
    "attention": attention, "attention_parts": attention_parts,
    "rope": rope, "dequantize": dequantize, "pack_quant": plain(torch.clone), "dequant_matmul": dequant_matmul,
    "threshold": threshold, "random_bits": random_numbers(lambda bits: bits),
    "random_uniform": random_numbers(lambda bits: (bits >> 8) / 2**24), "gumbel": random_numbers(gumbel),
    # among one rank; among more: test_graph_collectives.py
    "all_reduce": alone, "all_gather": alone, "reduce_scatter": alone, "broadcast_rank": alone, "all_to_all": alone,
    "rank_slice": alone,
    **conv_oracles.ORACLES,
    "branch": lambda c, a, go, x, y: x * y if go else np.tanh(x) - y, "loop": looped,
    "exchange": lambda c, a, x: {"all_gather": x[None], "rank_part": x[0]}.get(a.what, x),
}  # fmt: skip

"""Fused attention on the CPU against torch's attention in float64: shapes, strides, masks, dtypes, and what it may touch."""

import ctypes
import functools
import itertools
import mmap
import sys

import numpy as np
import pytest
import torch

import rlx
from rlx.backends.cpu.kernels import attention_vectors
from rlx.backends.cpu.kernels.attention import claim, render
from rlx.backends.cpu.target import host_target, target_for
from rlx.errors import IndexRangeError
from rlx.host.emit import Emitter, V
from rlx.host.jit import compile_object, load
from rlx.host.processor import host_features, missing_features
from rlx.ir import ops
from rlx.ir.dtype import as_dtype
from rlx.ir.graph import Graph
from rlx.ir.kernel import Buffer, Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs

MARGIN = 40  # elements before and after every buffer that the kernel must leave alone
CANARY = 77
SIGNATURE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
WINDOWS = [("causal", 0), ("sliding_window", 1), ("sliding_window", 20), ("sliding_window", 150), ("sliding_window", 1 << 40)]
F32, BF16 = np.float32, as_dtype("bf16").numpy
TOLERANCE = {F32: 3e-6, BF16: 2e-2}  # of results around 1
PAIRS = pytest.mark.skipif("avx512bf16" not in host_features(), reason="no instruction sums products of pairs of bf16 here")
BOTH = pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=PAIRS)], ids=["f32", "bf16"])
BSHD, BHSD, BHDS = (0, 2, 1, 3), (0, 1, 2, 3), (0, 1, 3, 2)  # which dims lie outermost to innermost in memory


def placed(array, order=BHSD, pad=0):
    """`array` in a flat one with margins, its dims in memory as `order` says, the innermost padded: (flat, strides, offset)."""
    shape = [array.shape[a] for a in order] or [1]
    shape[-1] += pad
    flat = np.full(int(np.prod(shape)) + 2 * MARGIN, CANARY, array.dtype)
    inside = flat[MARGIN : flat.size - MARGIN].reshape(shape)[..., : shape[-1] - pad]
    inside[...] = array.transpose(order)
    strides = [0] * array.ndim
    for axis, stride in zip(order, inside.strides):
        strides[axis] = stride // array.itemsize if array.shape[axis] > 1 else 0
    return flat, tuple(strides), MARGIN


@functools.cache
def compiled(target, rendered):
    return load([compile_object(rendered.text, target)], [rendered.symbol], target)


def attend(q, k, v, *operands, orders=(BHSD,) * 4, pad=0, target=None, backwards=False, status=0, **attrs):
    """The kernel's output on operands laid out as asked; checks margins, that every task wrote only its own, and the status."""
    target = target or host_target(2)
    arrays = [placed(x, order, pad) for x, order in zip((q, k, v), orders)]
    arrays += [placed(x, tuple(range(x.ndim))) for x in operands]
    shape = (*q.shape[:3], v.shape[3])
    out = placed(np.full(shape, np.nan, q.dtype), orders[3], pad)
    dims = [x.shape for x in (q, k, v, *operands)] + [shape]
    every = [*arrays, out]
    buffers = tuple(Buffer(f"b{i}", as_dtype(x[0].dtype), x[0].size, x is out) for i, x in enumerate(every))
    views = tuple(View(b, d, strides, offset) for b, d, (_, strides, offset) in zip(buffers, dims, every))
    kernel = Kernel("attention", buffers, (), (), (Native("attention", AttentionAttrs(**attrs), views[:-1], views[-1:]),))
    rendered = render(kernel, target, "attention")
    function = compiled(target, rendered).function("attention", None, *SIGNATURE)
    before = [flat.copy() for flat, _, _ in arrays]
    args = np.array([flat.ctypes.data for flat, _, _ in every], np.int64)
    scratch = np.full(rendered.scratch_bytes + 128, 0xFF, np.uint8)  # NaN as floats
    start = -scratch.ctypes.data % 64
    tasks, found = range(rendered.tasks), ctypes.c_int32(0)
    for task in reversed(tasks) if backwards else tasks:
        function(args.ctypes.data, task, scratch.ctypes.data + start, ctypes.addressof(found))
    assert found.value == status
    assert (scratch[start + rendered.scratch_bytes :] == 0xFF).all(), "wrote past its scratch"
    for old, (flat, _, _) in zip(before, arrays):
        assert old.tobytes() == flat.tobytes(), "wrote on an operand"
    flat, strides, offset = out
    result = np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * flat.itemsize for s in strides]).copy()
    np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * flat.itemsize for s in strides])[...] = CANARY
    assert (flat == CANARY).all(), "wrote outside of its output"
    return result


def seen(rows, keys, mask="none", window=0):
    behind = np.arange(rows)[:, None] + keys - rows - np.arange(keys)
    return (
        (behind >= 0) & ((behind < window) | (mask == "causal"))
        if mask in ("causal", "sliding_window")
        else np.full(behind.shape, True)
    )


def expected(q, k, v, operand=None, cap=0.0, **attrs):
    """torch's attention in float64; rows that see nothing are zero."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    shape = (*q.shape[:3], k.shape[2])
    kind = attrs.get("mask", "none")
    allowed = np.broadcast_to(operand if kind == "custom" else seen(*shape[2:], kind, attrs.get("window", 0)), shape)
    bias = np.where(allowed, 0.0, -np.inf) + (np.asarray(operand, np.float64) if kind == "bias" else 0.0)
    k, v = (torch.from_numpy(np.repeat(x, q.shape[1] // x.shape[1], axis=1)) for x in (k, v))
    scale = attrs.get("scale") or None
    if cap:  # which torch's has not: capped scores as a bias, of queries of zero
        scores = np.einsum("bhqd,bhkd->bhqk", q, k.numpy()) * (scale or q.shape[3] ** -0.5)
        q, bias = np.zeros_like(q), bias + np.tanh(scores / cap) * cap
    out = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(q), k, v, attn_mask=torch.from_numpy(bias), scale=scale
    ).numpy()
    return np.where(np.broadcast_to(np.isneginf(bias), shape).all(-1)[..., None], 0.0, out)


def operands(batch, heads, key_heads, rows, keys, size, width=None, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, rows, size), (batch, key_heads, keys, size), (batch, key_heads, keys, width or size)
    return [rng.normal(size=s).astype(np.float32).astype(dtype) for s in shapes]


def check(got, want, tolerance=3e-6):
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance)


def in_cache(q, k, v, *operands, mask="none", window=0, **attrs):
    """`expected` of the visible part of a cache: positions as an operand mask, keys past the last query cut off."""
    starts = np.broadcast_to(operands[-1], len(q))
    out = []
    for b, start in enumerate(starts):
        rows, end = q.shape[2], start + q.shape[2]
        one = slice(b, b + 1)
        behind = start + np.arange(rows)[:, None] - np.arange(end)
        if mask in ("custom", "bias"):
            operand = np.broadcast_to(operands[0], (*q.shape[:3], k.shape[2]))[one, ..., :end]
            out.append(expected(q[one], k[one, :, :end], v[one, :, :end], operand, mask=mask, **attrs))
        else:
            keep = (behind >= 0) & (behind < (window or end)) if mask != "none" else behind < end
            out.append(expected(q[one], k[one, :, :end], v[one, :, :end], keep, mask="custom", **attrs))
    return np.concatenate(out)


SHAPES = [  # batch, heads, key heads, rows, keys, head size, value size
    (1, 2, 2, 1, 1, 16), (2, 3, 3, 7, 7, 8), (1, 2, 2, 16, 16, 32), (2, 2, 2, 33, 33, 64), (1, 1, 1, 128, 128, 64),
    (1, 2, 1, 5, 300, 24), (1, 4, 2, 50, 129, 40), (1, 3, 3, 17, 3, 1), (1, 2, 2, 48, 130, 80, 33), (1, 1, 1, 31, 260, 7, 130),
    (2, 4, 2, 1, 70, 64), (1, 8, 1, 1, 513, 128), (1, 16, 1, 1, 40, 16), (1, 1, 1, 138, 20, 16), (2, 6, 3, 3, 1030, 33, 20),
    (1, 2, 2, 4, 5, 100),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    q, k, v = operands(*shape)
    check(attend(q, k, v), expected(q, k, v))


@pytest.mark.parametrize(("mask", "window"), WINDOWS)
@pytest.mark.parametrize("shape", [SHAPES[x] for x in (1, 3, 5, 10, 14)], ids=str)
def test_positional_masks(shape, mask, window):
    q, k, v = operands(*shape)
    check(attend(q, k, v, mask=mask, window=window), expected(q, k, v, mask=mask, window=window))


@pytest.mark.parametrize("shape", [(0, 2, 2, 3, 5, 8), (1, 0, 0, 1, 5, 8), (1, 0, 2, 40, 5, 8), (1, 2, 2, 0, 5, 8)], ids=str)
def test_nothing_to_compute(shape):
    assert attend(*operands(*shape)).shape == (*shape[:2], shape[3], shape[5])


def mask_shapes(shape):
    batch, heads, _, rows, keys, *_ = shape
    return [(batch, heads, rows, keys), (batch, 1, 1, keys), (rows, keys), (1, heads, 1, 1), (heads, rows, 1)]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("shape", [SHAPES[x] for x in (6, 11, 14)], ids=str)
def test_operand_masks(shape, which):
    q, k, v = operands(*shape)
    dims = mask_shapes(shape)[which]
    rng = np.random.default_rng(1)
    keep = rng.random(dims) < 0.4
    got = attend(q, k, v, keep, mask="custom")
    check(got, expected(q, k, v, keep, mask="custom"))
    if which < 2:  # a term for each row, one for all: the rest is as above
        bias = np.where(rng.random(dims) < 0.7, rng.normal(size=dims), -np.inf).astype(np.float32)
        check(attend(q, k, v, bias, mask="bias"), expected(q, k, v, bias, mask="bias"))


@BOTH
@pytest.mark.parametrize("shape", [(2, 2, 2, 33, 140, 64), (1, 2, 1, 2, 600, 24), (1, 1, 1, 40, 600, 32)], ids=str)
def test_rows_that_see_nothing_are_zero(shape, dtype):
    q, k, v = operands(*shape, dtype=dtype)
    keep = np.random.default_rng(2).random((shape[0], 1, shape[3], shape[4])) < 0.5
    keep[:, :, 1] = False
    keep[0] = False
    got = attend(q, k, v, keep, mask="custom")
    check(got, expected(q, k, v, keep, mask="custom"), TOLERANCE[dtype])
    assert (got[0] == 0).all() and (got[:, :, 1] == 0).all()
    bias = np.where(keep, 0, -np.inf).astype(dtype)
    check(attend(q, k, v, bias, mask="bias"), np.asarray(got, np.float64), TOLERANCE[dtype] if dtype == BF16 else 0)


@BOTH
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(2, 2, 2, 33, 140, 64), (2, 2, 1, 2, 600, 24), (1, 1, 1, 16, 16, 32)], ids=str)
def test_hidden_keys_and_values_add_nothing_whatever_they_hold(shape, poison, dtype):
    q, k, v = operands(*shape, dtype=dtype)
    rows, keys = shape[3:5]
    keep = np.full((shape[0], 1, 1, keys), True)
    keep[0, ..., keys // 2 :] = False
    want = expected(q, k, v, keep, mask="custom")
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[0, :, keys // 2 :] = bad_v[0, :, keys // 2 :] = poison
    check(attend(q, bad_k, bad_v, keep, mask="custom"), want, TOLERANCE[dtype])
    check(attend(q, bad_k, bad_v, np.repeat(keep, rows, axis=2), mask="custom"), want, TOLERANCE[dtype])
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, -1] = bad_v[:, :, -1] = poison  # only the last query sees it
    got = attend(q, bad_k, bad_v, mask="causal")
    check(got[:, :, :-1], expected(q, k, v, mask="causal")[:, :, :-1], TOLERANCE[dtype])
    assert np.isnan(got[:, :, -1]).all()
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, 0] = bad_v[:, :, 0] = poison  # out of every query's window but that of the first ones
    got = attend(q, bad_k, bad_v, mask="sliding_window", window=4)
    first = max(0, 4 - (keys - rows))
    check(got[:, :, first:], expected(q, k, v, mask="sliding_window", window=4)[:, :, first:], TOLERANCE[dtype])


@BOTH
def test_nan_in_a_query_stays_in_its_row(dtype):
    q, k, v = operands(1, 2, 2, 20, 50, 32, dtype=dtype)
    q[0, 1, 3] = np.nan
    got = attend(q, k, v)
    assert np.isnan(got[0, 1, 3]).all() and np.isnan(got).sum() == 32
    k[0, 0, 7] = np.nan
    assert np.isnan(attend(q, k, v)[0, 0]).all()


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(
    "orders",
    [(BSHD, BSHD, BSHD, BSHD), (BHSD, BSHD, BHDS, BSHD), (BHDS, BHDS, BHSD, BHDS), ((2, 0, 1, 3),) * 4, ((3, 2, 1, 0),) * 4],
    ids=str,
)
def test_strides(orders, pad, rows):
    q, k, v = operands(2, 4, 2, rows, 45, 20)
    check(attend(q, k, v, orders=orders, pad=pad, mask="causal"), expected(q, k, v, mask="causal"))


def test_slices_of_one_buffer():
    batch, heads, rows, size = 2, 3, 21, 16
    qkv = np.random.default_rng(3).normal(size=(batch, rows, 3, heads, size)).astype(np.float32)
    q, k, v = (qkv[:, :, x].transpose(0, 2, 1, 3) for x in range(3))
    x = Buffer("qkv", as_dtype("f32"), qkv.size)
    o = Buffer("o", as_dtype("f32"), batch * rows * heads * size, writable=True)
    dims, strides = (batch, heads, rows, size), (rows * 3 * heads * size, size, 3 * heads * size, 1)
    inputs = tuple(View(x, dims, strides, n * heads * size) for n in range(3))
    output = View(o, dims, (rows * heads * size, size, heads * size, 1))
    kernel = Kernel("packed", (x, o), (), (), (Native("attention", AttentionAttrs(), inputs, (output,)),))
    target = host_target(1)
    rendered = render(kernel, target, "packed")
    function = compiled(target, rendered).function("packed", None, *SIGNATURE)
    got = np.full((batch, rows, heads, size), np.nan, np.float32)
    args = np.array([qkv.ctypes.data, got.ctypes.data], np.int64)
    scratch = np.full(rendered.scratch_bytes + 64, 0xFF, np.uint8)
    for task in range(rendered.tasks):
        function(args.ctypes.data, task, scratch.ctypes.data + -scratch.ctypes.data % 64, 0)
    check(got.transpose(0, 2, 1, 3), expected(q, k, v))


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("shape", [(1, 4, 2, 40, 140, 24), (1, 4, 2, 1, 600, 64)], ids=str)
def test_sixteen_bit_floats(shape, dtype, tolerance):
    q, k, v = operands(*shape, dtype=as_dtype(dtype).numpy)
    check(attend(q, k, v, mask="causal"), expected(q, k, v, mask="causal"), tolerance)
    bias = np.random.default_rng(5).normal(size=(shape[3], shape[4])).astype(q.dtype)
    check(attend(q, k, v, bias, mask="bias", orders=(BHDS, BHDS, BHDS, BHDS)), expected(q, k, v, bias, mask="bias"), tolerance)


PAIRED = [  # some of every way to cut rows, keys, depth and columns: batch, heads, key heads, rows, keys, head size, value size
    (1, 2, 2, 9, 5, 2), (1, 2, 2, 16, 16, 32), (2, 3, 3, 17, 33, 64), (2, 3, 1, 40, 140, 80, 33), (1, 2, 2, 64, 300, 128),
    (1, 1, 1, 300, 600, 256, 20), (1, 2, 1, 33, 1, 32),
]  # fmt: skip


@PAIRS
@pytest.mark.parametrize("shape", PAIRED, ids=str)
def test_pairs_of_bf16(shape):
    q, k, v = operands(*shape, dtype=BF16)
    rng, rows, keys = np.random.default_rng(1), *shape[3:5]
    every = [((), how) for how in ({}, {"cap": 2.0}, {"scale": -0.3}, {"scale": 3.0})]
    every += [((), {"mask": mask, "window": window}) for mask, window in WINDOWS if rows <= keys]
    for dims in mask_shapes(shape):
        every.append(((rng.random(dims) < 0.4,), {"mask": "custom"}))
        every.append(((np.where(rng.random(dims) < 0.7, rng.normal(size=dims), -np.inf).astype(BF16),), {"mask": "bias"}))
    for mask, how in every:
        check(attend(q, k, v, *mask, **how), expected(q, k, v, *mask, **how), TOLERANCE[BF16])


@PAIRS
def test_pairs_are_multiplied_by_their_instruction():
    """If elements of a row are adjacent; others are left to the other kernel."""
    buffers = Buffer("x", as_dtype("bf16"), 1 << 16), Buffer("o", as_dtype("bf16"), 1 << 16, writable=True)
    for stride in (1, 2):
        inputs = tuple(View(buffers[0], (1, 2, 40, 32), (0, 40 * 64, 64, stride)) for _ in range(3))
        native = Native("attention", AttentionAttrs(), inputs, (View(buffers[1], (1, 2, 40, 32), (0, 1280, 32, 1)),))
        text = render(Kernel("a", buffers, (), (), (native,)), host_target(1), "a").text
        assert ("dpbf16ps" in text) == (stride == 1)


@pytest.mark.skipif("x86_64" not in host_features()[0], reason="needs an x86-64 host")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_narrower_vectors(level):
    target = target_for(host_features()[0].split("=")[1], level)
    for shape in ((1, 2, 1, 19, 140, 20), (1, 4, 2, 1, 600, 24)):
        q, k, v = operands(*shape)
        keep = np.random.default_rng(1).random((shape[3], shape[4])) < 0.5
        check(attend(q, k, v, keep, mask="custom", target=target), expected(q, k, v, keep, mask="custom"))


@pytest.mark.skipif("x86_64" not in host_features()[0], reason="needs an x86-64 host")
@pytest.mark.parametrize("level", ["x86-64-v4", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("width", [9, 17, 33])
def test_a_last_vector_of_one_element_writes_no_more(level, width):
    """16-bit results without an instruction that narrows: a store of one lane is as wide as that lane."""
    target = target_for(host_features()[0].split("=")[1], level)
    if missing_features(target.features):
        pytest.skip(f"this processor is below {level}")
    for rows in (1, 12):
        q, k, v = operands(1, 1, 1, rows, 20, 8, width, dtype=BF16)
        check(attend(q, k, v, target=target), expected(q, k, v), TOLERANCE[BF16])


def test_compiles_for_aarch64():
    target = target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",))
    for rows in (1, 40):
        dims = (1, 4, rows, 64)
        buffers = tuple(Buffer(f"b{i}", as_dtype("f32"), 4 * rows * 64, i == 3) for i in range(4))
        views = tuple(View(b, dims, (0, rows * 64, 64, 1)) for b in buffers)
        native = Native("attention", AttentionAttrs(mask="causal"), views[:3], views[3:])
        rendered = render(Kernel("a", buffers, (), (), (native,)), target, "a")
        assert compile_object(rendered.text, target)[:4] == b"\x7fELF"


@BOTH
@pytest.mark.parametrize("how", [{"mask": "causal"}, {"mask": "sliding_window", "window": 290}], ids=str)
def test_results_do_not_depend_on_threads_or_order(dtype, how):
    q, k, v = operands(2, 4, 2, 270, 600, 32, dtype=dtype)
    once = attend(q, k, v, **how, target=host_target(1))
    for threads in (2, 16):
        assert attend(q, k, v, **how, target=host_target(threads), backwards=True).tobytes() == once.tobytes()


@pytest.mark.parametrize("shape", [SHAPES[x] for x in (3, 6, 9, 11, 14)], ids=str)
def test_capped_scores(shape):
    """Before the mask; what is hidden stays so, whatever it holds."""
    q, k, v = operands(*shape)
    rows, keys = shape[3:5]
    check(attend(q * 9, k, v, cap=4.0), expected(q * 9, k, v, cap=4.0))
    how = {"cap": 30.0, "mask": "causal", "scale": 1.0}
    check(attend(q * 9, k, v, **how), expected(q * 9, k, v, **how), 2e-5)
    keep = np.arange(keys)[None] < max(1, keys // 2)
    want = expected(q, k, v, keep, mask="custom", cap=1.0)
    k[:, :, max(1, keys // 2) :] = np.inf
    check(attend(q, k, v, keep, mask="custom", cap=1.0), want)


def test_large_scores_and_scale():
    q, k, v = operands(1, 2, 2, 40, 300, 64)
    check(attend(q * 30, k * 30, v), expected(q * 30, k * 30, v), 2e-5)
    check(attend(q, k, v, scale=3.0), expected(q, k, v, scale=3.0), 5e-5)


def test_claim_takes_what_render_serves_and_says_why_not():
    g = Graph("g")
    q = g.input("q", (1, 2, 3, 4), "f32")
    assert claim(ops.attention(q, q, q, mask="causal").node) is None
    wide = g.input("w", (1, 2, 3, 4), "f64")
    assert "f64" in claim(ops.attention(wide, wide, wide).node)
    none = g.input("n", (1, 2, 0, 4), "f32")
    assert "no keys" in claim(ops.attention(q, none, none).node)
    flat = g.input("f", (1, 2, 3, 0), "f32")
    assert "no keys" in claim(ops.attention(flat, flat, q).node)
    assert claim(ops.attention_parts(q, q, q, block=128)[0].node) is None
    assert "blocks of 128 keys, not of 1" in claim(ops.attention_parts(q, q, q)[0].node)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages by mprotect")


def guarded(array, order=BHSD, pad=0):
    """Like `placed`, dims in their own order: the last element ends where a page begins that may not be touched."""
    page = mmap.PAGESIZE
    body = -(-array.nbytes // page) * page
    flat = np.frombuffer(mmap.mmap(-1, body + page), np.uint8)  # which keeps the memory
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(flat.ctypes.data + body), page, 0) == 0
    flat = flat[body - array.nbytes : body].view(array.dtype)
    flat[:] = array.reshape(-1)
    return flat, tuple(stride // array.itemsize for stride in array.strides), 0


@linux
@BOTH
@pytest.mark.parametrize("shape", [(1, 2, 2, 7, 9, 5), (1, 1, 1, 33, 131, 20), (2, 2, 1, 1, 23, 20), (1, 1, 1, 4, 530, 17, 33)])
def test_nothing_is_read_or_written_past_a_buffer(shape, dtype, monkeypatch):
    """An access past one ends the process."""
    monkeypatch.setattr(sys.modules[__name__], "placed", guarded)
    q, k, v = operands(*shape, dtype=dtype)
    keep = np.random.default_rng(0).random((shape[3], shape[4])) < 0.5
    check(attend(q, k, v, keep, mask="custom"), expected(q, k, v, keep, mask="custom"), TOLERANCE[dtype])
    check(attend(q, k, v), expected(q, k, v), TOLERANCE[dtype])


# -- a cache of which the first keys are there ----------------------------------------------------------------------

CACHES = [  # batch, heads, key heads, rows, capacity, head size, value size; starts
    ((1, 16, 8, 1, 140, 128), [0, 1, 6, 7, 8, 127, 139]), ((1, 4, 2, 3, 600, 40), [0, 400, 597]),
    ((1, 2, 2, 140, 700, 32), [0, 130, 560]), ((1, 2, 2, 1, 1, 16), [0]), ((1, 4, 1, 1, 1100, 20), [3, 511, 512, 1099]),
    ((1, 12, 1, 1, 70, 24), [0, 40, 69]), ((1, 7, 1, 1, 33, 300), [9, 32]), ((1, 6, 2, 2, 37, 33, 7), [0, 1, 15, 35]),
    ((1, 8, 4, 4, 40, 64), [0, 13, 36]), ((1, 2, 1, 6, 50, 24), [0, 3, 44]),
    ((1, 2, 2, 8, 300, 16), [0, 120, 292]), ((1, 2, 1, 40, 300, 24), [0, 1, 100, 260]),
]  # fmt: skip
KINDS = [("causal", 0), ("sliding_window", 9), ("none", 0), ("sliding_window", 1), ("sliding_window", 140)]


def starting(*positions, dtype=np.int32):
    return np.array(positions if len(positions) > 1 else positions[0], dtype)


@BOTH
@pytest.mark.parametrize("case", [*itertools.product(CACHES[:3], KINDS), *itertools.product(CACHES[3:], KINDS[:2])], ids=str)
def test_a_cache_filled_in_part(case, dtype):
    """At every position as torch has it from the visible part alone; what lies elsewhere is NaN."""
    (shape, starts), (mask, window) = case
    q, k, v = operands(*shape, dtype=dtype)
    rows, capacity = shape[3:5]
    for start in starts:
        bad = np.arange(capacity) >= start + rows
        if window:
            bad |= np.arange(capacity) <= start - window
        some = np.where(bad[:, None], np.nan, k).astype(dtype), np.where(bad[:, None], np.nan, v).astype(dtype)
        got = attend(q, *some, starting(start), mask=mask, window=window, positioned=True)
        check(got, in_cache(q, k, v, starting(start), mask=mask, window=window), TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "dtype"), [(1, np.int32), (3, np.int64), (40, np.int32)])
def test_every_batch_has_its_own_position(rows, dtype):
    q, k, v = operands(4, 4, 2, rows, 333, 40)
    starts = starting(0, 200, 293, 7, dtype=dtype)
    for attrs in ({"mask": "sliding_window", "window": 20}, {"mask": "none", "scale": 0.4}):
        got = attend(q, k, v, starts, positioned=True, **attrs)
        check(got, in_cache(q, k, v, starts, **attrs))
        one = attend(q[2:3], k[2:3], v[2:3], starts[2], positioned=True, **attrs)
        assert one.tobytes() == got[2:3].tobytes(), "the result depends on the rest of the batch"


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_operand_masks_over_a_cache(rows):
    q, k, v = operands(2, 4, 2, rows, 150, 24)
    rng, starts = np.random.default_rng(4), starting(10, 90)
    k[0, :, 10 + rows :] = v[0, :, 10 + rows :] = np.nan
    for dims in ((2, 4, rows, 150), (2, 1, 1, 150), (rows, 150)):
        keep = rng.random(dims) < 0.5
        check(attend(q, k, v, keep, starts, mask="custom", positioned=True), in_cache(q, k, v, keep, starts, mask="custom"))
        bias = rng.normal(size=dims).astype(np.float32)
        check(attend(q, k, v, bias, starts, mask="bias", positioned=True), in_cache(q, k, v, bias, starts, mask="bias"))


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_sixteen_bit_caches(rows, dtype, tolerance):
    """Beside queries of the same dtype, and of f32: then nothing is rounded."""
    q, k, v = operands(1, 4, 2, rows, 700, 72, dtype=as_dtype(dtype).numpy)
    for start in (0, 97, 530, 700 - rows):
        want = in_cache(q, k, v, starting(start), mask="causal")
        check(attend(q, k, v, starting(start), mask="causal", positioned=True), want, tolerance)
        check(attend(q.astype(np.float32), k, v, starting(start), mask="causal", positioned=True), want)


@linux
@pytest.mark.parametrize("rows", [1, 4, 30])
@pytest.mark.parametrize("start", [-1, -(1 << 40), 101, 1 << 40])
def test_a_position_out_of_range_fails_the_run_and_reads_nothing_outside(rows, start, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "placed", guarded)
    q, k, v = operands(2, 2, 1, rows, 100, 20)
    for starts in (np.array(start), np.array([5, start])):
        got = attend(q, k, v, starts, mask="causal", positioned=True, status=1)
        if starts.ndim:
            check(got[:1], in_cache(q, k, v, np.array(5), mask="causal")[:1])
    attend(q, k, v, np.array(100 - rows), mask="causal", positioned=True)  # the last one in range
    attend(q, k, v, np.array(101 - rows), mask="causal", positioned=True, status=1)


@linux
@pytest.mark.parametrize("rows", [1, 40])
def test_keys_that_no_query_sees_are_not_read(rows):
    """The pages of the cache around the window may not be touched."""
    capacity, size, start, window = 4096, 64, 2000, 100
    page_rows = mmap.PAGESIZE // (4 * size)
    q, *small = operands(1, 2, 1, rows, capacity, size)
    low, high = (start - window) // page_rows * page_rows, -(-(start + rows) // page_rows) * page_rows
    caches = []
    for x in small:
        memory = np.frombuffer(mmap.mmap(-1, x.nbytes), np.float32)
        memory[:] = x.reshape(-1)
        for first, last in ((0, low), (high, capacity)):
            at = ctypes.c_void_p(memory.ctypes.data + first * 4 * size)
            assert ctypes.CDLL(None).mprotect(at, (last - first) * 4 * size, 0) == 0
        caches.append(memory)
    output = np.full(q.shape, np.nan, np.float32)
    flats = [q.reshape(-1), *caches, np.array([start]), output.reshape(-1)]
    dims = [q.shape, (1, 1, capacity, size), (1, 1, capacity, size), (), q.shape]
    buffers = tuple(Buffer(f"b{i}", as_dtype(x.dtype), x.size, i == 4) for i, x in enumerate(flats))
    strides = [tuple(s // 4 for s in q.strides), (0, 0, size, 1), (0, 0, size, 1), (), tuple(s // 4 for s in q.strides)]
    views = tuple(View(b, d, s) for b, d, s in zip(buffers, dims, strides))
    attrs = AttentionAttrs(mask="sliding_window", window=window, positioned=True)
    kernel = Kernel("windowed", buffers, (), (), (Native("attention", attrs, views[:4], views[4:]),))
    rendered = render(kernel, host_target(1), "windowed")
    function = compiled(host_target(1), rendered).function("windowed", None, *SIGNATURE)
    args, scratch = np.array([x.ctypes.data for x in flats], np.int64), np.full(rendered.scratch_bytes + 64, 0xFF, np.uint8)
    for task in range(rendered.tasks):
        function(args.ctypes.data, task, scratch.ctypes.data + -scratch.ctypes.data % 64, 0)
    check(output, in_cache(q, *small, np.array(start), mask="sliding_window", window=window))


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
@pytest.mark.parametrize("mask", ["none", "causal", "sliding_window"])
def test_every_device_agrees_on_a_cache(device, mask):
    """The reference, its decomposition and the fused kernel: what lies where no query looks adds nothing, and no query stands
    outside of the cache."""
    q, k, v = operands(2, 4, 2, 3, 20, 8)
    window = {"window": 4} if mask == "sliding_window" else {}
    starts = np.array([9, 5], np.int32)
    want = in_cache(q, k, v, starts, mask=mask, **window)
    k[:, :, 12:] = v[:, :, 12:] = np.nan
    if window:
        k[:, :, :2] = v[:, :, :2] = np.inf
    g = Graph("cache")
    made = [g.input(n, x.shape, "f32") for n, x in (("q", q), ("k", k), ("v", v))]
    g.set_outputs([ops.attention(*made, g.input("start", (2,), "i32"), mask=mask, positioned=True, **window)])
    run = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2)).run
    check(run({"q": q, "k": k, "v": v, "start": starts})[0], want, 1e-5)
    for bad in ([0, 18], [-1, 0], [2**31 - 1, 0]):
        with pytest.raises(IndexRangeError):
            run({"q": q, "k": k, "v": v, "start": np.array(bad, np.int32)})


@pytest.mark.parametrize(("queries", "narrow"), [("f32", "f32"), ("f32", "f16"), ("bf16", "bf16")])
@pytest.mark.parametrize(("batch", "key_heads", "rows", "capacity", "threads", "parts"), [
    (1, 1, 1, 2100, 2, 2), (1, 8, 1, 4096, 16, 2), (2, 1, 5, 1600, 7, 3), (1, 3, 1, 1024, 2, 2), (1, 2, 1, 4096, 64, 8),
    (1, 2, 1, 1000, 64, 1), (1, 2, 1, 4096, 2, 1), (1, 2, 9, 4096, 64, 1),
])  # fmt: skip
def test_a_long_cache_is_read_in_parts_where_threads_would_be_idle(
    batch, key_heads, rows, capacity, threads, parts, queries, narrow
):
    """At every length, whole parts without a key among them; a hidden key adds nothing."""
    q, k, v = operands(batch, 2 * key_heads, key_heads, rows, capacity, 24)
    q, k, v = (x.astype(as_dtype(name).numpy) for x, name in zip((q, k, v), (queries, narrow, narrow)))
    g = Graph("cache")
    made = [g.input(n, x.shape, as_dtype(x.dtype)) for n, x in (("q", q), ("k", k), ("v", v))]
    window = {"mask": "sliding_window", "window": 700} if rows == 5 else {"mask": "causal"}
    g.set_outputs([ops.attention(*made, g.input("start", (batch,), "i32"), positioned=True, **window)])
    compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=threads))
    found = [s.kernel.body[0].attrs for s in compiled.program().steps if isinstance(s.kernel.body[0], Native)]
    assert [getattr(a, "parts", 1) for a in found] == [parts]
    for start in (0, 127, 128, 600, capacity - rows):
        starts = np.array([start, 5][:batch], np.int32)
        bad_k, bad_v = k.copy(), v.copy()
        for b, at in enumerate(starts):
            bad_k[b, :, at + rows :] = bad_v[b, :, at + rows :] = np.nan
        got = compiled.run({"q": q, "k": bad_k, "v": bad_v, "start": starts})[0]
        check(got, in_cache(q, k, v, starts, **window), TOLERANCE[BF16 if queries == "bf16" else F32])
    with pytest.raises(IndexRangeError):
        compiled.run({"q": q, "k": k, "v": v, "start": np.full(batch, capacity, np.int32)})


@linux
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "shape", [(1, 8, 2, 1, 700, 64), (2, 4, 4, 3, 300, 20), (1, 2, 1, 2, 129, 300), (1, 2, 2, 1, 1, 16)], ids=str
)
def test_a_cache_that_is_fetched_ahead(shape, dtype, monkeypatch):
    """As on processors whose caches are slow: in shorter blocks, and never past the last key that a row sees."""
    monkeypatch.setattr(attention_vectors, "fetches_ahead", lambda features: True)
    monkeypatch.setattr(sys.modules[__name__], "placed", guarded)
    q, k, v = operands(*shape, dtype=dtype)
    last = shape[4] - shape[3]
    for start in {0, min(100, last), last}:
        got = attend(q, k, v, starting(start), mask="causal", positioned=True)
        check(got, in_cache(q, k, v, starting(start), mask="causal"), TOLERANCE[dtype])


@linux
def test_the_lines_that_are_fetched_ahead(monkeypatch):
    """Of 129 keys that are seen, in blocks of 65 and 64: all values; keys of the second block, and of the first one where the
    thread has had another head before. A block fetches as many keys as it has itself, so one too few or too many."""
    log, placed_at = np.zeros(1 << 16, np.int64), []

    def logged(e, address, level=1):
        if level != 2:
            return
        count = V(f"inttoptr (i64 {log.ctypes.data} to ptr)", "ptr")
        have = e.bin("add", e.load("i64", count, 8), 1)
        e.store(have, count, 8)
        e.store(e.convert("ptrtoint", address, "i64"), e.gep(count, e.bin("mul", have, 8)), 8)

    def noted(*args):
        placed_at.append(guarded(*args))
        return placed_at[-1]

    monkeypatch.setattr(Emitter, "prefetch", logged)
    monkeypatch.setattr(attention_vectors, "fetches_ahead", lambda features: True)
    monkeypatch.setattr(sys.modules[__name__], "placed", noted)
    heads, keys, size = 4, 512, 64
    attend(*operands(1, 2 * heads, heads, 1, keys, size), starting(128), mask="causal", positioned=True)
    for operand in (1, 2):
        rows = (log[1 : log[0] + 1] - placed_at[operand][0].ctypes.data) // (4 * size)
        for head in range(heads):
            found = set(rows[rows // keys == head] % keys)
            if operand == 2:
                assert found == set(range(129))
            else:
                first = range(64) if head in (1, 3) else ()  # the second ones of the two threads
                assert found == {*first, *range(65, 130)}


def test_claim_of_positioned_attention():
    g = Graph("g")
    q, start = g.input("q", (1, 2, 3, 4), "f32"), g.input("s", (), "i32")
    keep = g.input("keep", (3, 3), "bool")
    assert claim(ops.attention(q, q, q, start, positioned=True).node) is None
    assert claim(ops.attention(q, q, q, keep, start, mask="custom", positioned=True).node) is None


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_a_cache_gives_the_same_bits_on_any_threads(rows):
    q, k, v = operands(2, 8, 4, rows, 900, 40)
    how = {"mask": "causal", "positioned": True}
    once = attend(q, k, v, starting(700, 5), target=host_target(1), **how)
    for threads in (2, 16):
        again = attend(q, k, v, starting(700, 5), target=host_target(threads), backwards=True, **how)
        assert again.tobytes() == once.tobytes()

"""Fused attention: softmax(q k' * scale + mask) v without a matrix of scores in memory. A Kernel whose body is one Native.

Keys and values are read in place, one block of keys at a time. For a block of query rows, the highest score, the sum of weights
and the sums of weighted values are carried from block to block (the online softmax of Milakov and Gimelshein, 2018). This
file chooses the kernel: attention_pairs.py has instructions that sum products of pairs of bf16, attention_vectors.py the rest.

A row that sees no key gives zeros. A key hidden by a boolean or positional mask contributes nothing, whatever its bytes.

With a position for the first query, k and v may be a partly filled cache. The range of keys is then computed at run time, so the
time depends on the number of keys seen, not on the capacity. A single query row then needs no mask.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.kernels.attention_items import PART_KEY_BLOCK, Attention
from rlx.backends.cpu.kernels.attention_pairs import PairAttention, in_pairs
from rlx.backends.cpu.kernels.attention_vectors import NARROW_ROWS, VectorAttention
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, distinct, other_tasks
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Kernel, Native
from rlx.ir.ops.attention import AttentionAttrs, PartsAttrs, in_parts
from rlx.ir.target import Target

DTYPES = ("f32", "f16", "bf16")
MOST_PARTS = 16  # most parts into which the keys of a head are split
LEAST_KEYS = 512  # fewest keys in a part, when the cache is full


def claim(node: Node) -> str | None:
    """None if `render` has a kernel for this node; else the reason why not."""
    for value in node.inputs[:3]:
        if value.dtype.name not in DTYPES:
            return f"fused attention computes {', '.join(DTYPES)}, not {value.dtype.name}"
        if value.rank != 4:
            return f"fused attention takes [batch, heads, sequence, head size], not {value.shape}"
    if 0 in node.inputs[1].dims[2:]:
        return "fused attention needs keys of some size; there are no keys here"
    assert isinstance(node.attrs, AttentionAttrs)
    if isinstance(node.attrs, PartsAttrs) and node.attrs.block != PART_KEY_BLOCK:
        return f"fused attention deals out blocks of {PART_KEY_BLOCK} keys, not of {node.attrs.block}"
    mask, _ = node.attrs.split(node.inputs[3:])
    if mask is not None and mask.dtype.name not in (*DTYPES, "bool"):
        return f"fused attention takes a mask of {', '.join(DTYPES)} or bool, not {mask.dtype.name}"
    return None


def split(node: Node, threads: int) -> Value | None:
    """A decoding step with its keys split into parts that keep `threads` busy; None if that saves less than 20% of the time."""
    (batch, _, rows, _), (_, key_heads, keys, _) = (v.shape.static for v in node.inputs[:2])
    if rows > NARROW_ROWS:
        return None
    least = {n: -(-batch * key_heads * n // threads) / n for n in range(1, min(MOST_PARTS, keys // LEAST_KEYS) + 1)}
    parts = min(least, key=lambda n: (least[n], n), default=1)
    return in_parts(node, parts, PART_KEY_BLOCK) if parts > 1 and least[parts] <= 0.8 * least[1] else None


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """A module for a kernel whose body is one Native attention: q [b, h, m, d], k [b, g, n, d], v [b, g, n, e], for some
    masks [b, h, m, n] (dims may be 1), and with a position [] or [b]; all with any strides. The output o [b, h, m, e], or the
    buffers that the epilogue writes, must not share memory with them."""
    (native,) = kernel.body
    assert isinstance(native, Native), f"kernel {kernel.name} is no native op"
    return _made(kernel, native, target, tiling).written(symbol)


def axes(kernel: Kernel, native: Native, target: Target) -> dict[str, tuple[int, ...]]:
    """Tuning parameters: `vectors` (of query rows in a block), `tasks`. Empty if the time depends on a position in the data."""
    default = _made(kernel, native, target)
    if default.start is not None:
        return {}
    asked = {"vectors": (1, 2), "tasks": other_tasks(target.threads)}

    def tiled(tiling: Mapping[str, int]) -> tuple[int, int]:
        made = _made(kernel, native, target, tiling)
        made = made if made.order == default.order else default
        return made.vectors, made.tasks()

    return distinct({"vectors": default.vectors, "tasks": default.tasks()}, asked, tiled)


def _made(kernel: Kernel, native: Native, target: Target, tiling: Mapping[str, int] = DEFAULT_TILING) -> Attention:
    kind = PairAttention if in_pairs(native, target) else VectorAttention
    return kind(kernel, native, target, tiling)

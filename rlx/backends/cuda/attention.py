"""Fused attention: which nodes have a kernel, and the constants that attention.h is compiled with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.backends.cuda.render import CudaWriter, may_fail
from rlx.backends.cuda.schedule import Launch
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs, PartsAttrs, in_parts

NARROW, DTYPES = ("f16", "bf16"), ("f32", "f16", "bf16")
MOST_SIZE = 256  # of a head
THREADS = 128
PART_KEYS = 128  # dealt out to a part at a time: whole blocks of keys, which have 64 at most
LEAST_KEYS = 256  # of a part
MOST_PARTS = 64


def claim(node: Node) -> str | None:
    """None if there is a kernel for this node; else the reason why not."""
    for value in node.inputs[:3]:
        if value.dtype.name not in DTYPES:
            return f"fused attention computes {', '.join(DTYPES)}, not {value.dtype.name}"
    (*_, size), (*_, keys, width) = node.inputs[0].dims, node.inputs[2].dims
    if not all(isinstance(n, int) and 0 < n <= MOST_SIZE for n in (size, width)):
        return f"fused attention takes heads of at most {MOST_SIZE} elements, not {size} and {width}"
    if isinstance(node.attrs, PartsAttrs) and node.attrs.block % 64:
        return f"fused attention deals out keys by multiples of 64, not {node.attrs.block}"
    if keys == 0:
        return "fused attention needs keys; there are none"
    return None


def split(node: Node, multiprocessors: int) -> Value | None:
    """A decoding step with its keys split into parts that keep all multiprocessors busy; None where heads alone do."""
    (batch, heads, queries, _), (_, shared, keys, _) = (v.shape.static for v in node.inputs[:2])
    if not shared or heads // shared * queries > 16:
        return None
    parts = min(MOST_PARTS, keys // LEAST_KEYS, 2 * multiprocessors // max(1, batch * shared))
    return in_parts(node, parts, PART_KEYS) if parts > 1 else None


@dataclass(frozen=True)
class AttentionLaunch(Launch):
    tall: int = 64
    tensor: bool = True
    tiles: int = 1

    @property
    def points(self) -> int:
        return self.tiles

    @property
    def blocks(self) -> int:
        return self.tiles


def native_of(kernel: Kernel) -> Native | None:
    found = next((s for s in kernel.body if isinstance(s, Native)), None)
    return found if found is not None and found.op in ("attention", "attention_parts") else None


def launch(kernel: Kernel) -> AttentionLaunch:
    native = native_of(kernel)
    assert native is not None
    q, k, v = native.inputs[:3]
    (batch, heads, queries, size), (_, shared, _, width) = q.dims, v.dims
    same = q.buffer.dtype == k.buffer.dtype and q.buffer.dtype.name in NARROW
    tensor = same and size % 16 == width % 16 == 0 and _in_chunks(k) and _in_chunks(v)
    rows = heads // max(1, shared) * queries
    tall = (64 if rows > 32 else 32 if rows > 16 else 16) if tensor else 16
    if tensor:
        across = 64 // tall
        block = 32 if max(size, width) > 128 and across < 4 else 64
        nbytes = max(4 * block * (size + width + 16), 4 * across * tall * (2 + width))
    else:
        pitch = -(-size // 4) * 4 + 4
        nbytes = 4 * ((tall + 32) * pitch + 32 * -(-width // 32) * 32)
    parts = native.attrs.parts if isinstance(native.attrs, PartsAttrs) else 1
    tiles = -(-rows // tall) * batch * shared * parts
    return AttentionLaunch(kernel, THREADS, THREADS, shared=nbytes, tall=tall, tensor=tensor, tiles=tiles)


def _in_chunks(view: View) -> bool:
    """True if rows are contiguous and start at multiples of 16 bytes."""
    return view.strides[3] == 1 and view.offset % 8 == 0 and all(s % 8 == 0 for s, n in zip(view.strides[:3], view.dims) if n > 1)


class AttentionWriter(CudaWriter):
    launch: AttentionLaunch

    def function(self, name: str) -> str:
        native, at = native_of(self.kernel), self.launch
        assert native is not None
        arguments = ", ".join(self.arguments())
        lines = [*self.constants(native), (Path(__file__).parent / "attention.h").read_text()]
        lines += [f'extern "C" __global__ void __launch_bounds__({THREADS})', f"{name}({arguments}) {{"]
        lines += ["  extern __shared__ __align__(16) unsigned char shared[];", "  int tile = blockIdx.x;"]
        tall = -(-(native.inputs[0].dims[1] // native.inputs[2].dims[1]) * native.inputs[0].dims[2] // at.tall)
        for var, n in (("row0", tall), ("g", "SHARED"), ("b", "BATCH")):
            lines += [f"  const int {var} = tile % {n}{f' * {at.tall}' * (var == 'row0')};", f"  tile /= {n};"]
        mask, start = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
        given = "0"
        if start is not None:
            given = f"{self.names[start.buffer]}[{start.offset} + b * {start.strides[0] if start.strides else 0}]"
        status = "status" if may_fail(self.kernel) else "(int*)0"
        lines.append(f"  const rlx_span span = rlx_keys(row0, {given}, tile == 0 ? {status} : (int*)0);")
        operands = [self.pointer(v) for v in native.inputs[:3]]
        operands.append("(const unsigned char*)0" if mask is None else self.pointer(mask))
        operands += [self.pointer(v) for v in native.outputs]
        if len(native.outputs) == 1:
            operands.append(f"({ELEMENTS[native.outputs[0].buffer.dtype.name]}*)0")
        way = "tensor" if at.tensor else "plain"
        memory = "shared" if at.tensor else "(float*)shared"
        lines.append(f"  rlx_attention_{way}({', '.join(operands)}, b, g, tile, row0, span, {memory});")
        return "\n".join([*lines, "}", ""])

    def pointer(self, view: View) -> str:
        """A view's first element; its offset is in the macro of its coordinates."""
        const = "" if view.buffer.writable else "const "
        return f"({const}{ELEMENTS[view.buffer.dtype.name]}*){self.names[view.buffer]}"

    def constants(self, native: Native) -> Iterator[str]:
        (batch, heads, queries, size), (_, shared, keys, width) = native.inputs[0].dims, native.inputs[2].dims
        attrs = native.attrs
        assert isinstance(attrs, AttentionAttrs)
        mask, _ = attrs.split(native.inputs[3:])
        parts, block = (attrs.parts, attrs.block) if isinstance(attrs, PartsAttrs) else (1, keys)
        masked = {"custom": 1, "bias": 2}.get(attrs.mask, 0)
        window = attrs.window if attrs.mask == "sliding_window" and attrs.window < keys else 0
        yield from (
            f"#define {name} {value}"
            for name, value in {
                "BATCH": batch, "HEADS": heads, "SHARED": shared, "QUERIES": queries, "KEYS": keys, "SIZE": size, "WIDTH": width,
                "PARTS": parts, "GROUP": heads // shared, "PART_KEYS": block, "TALL": self.launch.tall,
                "ORDERED": int(attrs.mask in ("causal", "sliding_window")), "WINDOW": window,
                "POSITIONED": int(attrs.positioned), "MASKED": masked,
                "SCALE": f"{attrs.scale or size**-0.5:.9e}f", "CAP": f"{attrs.cap:.9e}f",
            }.items()
        )  # fmt: skip
        if self.launch.tensor:
            yield f'#define NARROW "{native.inputs[0].buffer.dtype.name}"'
        q, k, v = native.inputs[:3]
        out, *logs = native.outputs
        partial = len(out.dims) == 5
        yield from (at_macro(name, "bhmd", view) for name, view in (("Q", q),))
        yield from (at_macro(name, "bgnd", view) for name, view in (("K", k), ("V", v)))
        yield at_macro("O", "pbhmd", out if partial else View(out.buffer, (1, *out.dims), (0, *out.strides), out.offset))
        yield at_macro("LOG", "pbhm", logs[0]) if logs else "#define LOG_AT(p, b, h, m) 0"
        if mask is not None:
            lead = 4 - len(mask.dims)
            yield at_macro("MASK", "bhmn", View(mask.buffer, (1,) * lead + mask.dims, (0,) * lead + mask.strides, mask.offset))


ELEMENTS = {"f32": "float", "f16": "rlx_f16", "bf16": "rlx_bf16", "bool": "unsigned char"}


def at_macro(name: str, axes: str, view: View) -> str:
    terms = [f"(rlx_index)({a}) * {s}" for a, s, n in zip(axes, view.strides, view.dims, strict=True) if n > 1 and s]
    return f"#define {name}_AT({', '.join(axes)}) ({' + '.join([*terms, str(view.offset)])})"


__all__ = ["AttentionLaunch", "AttentionWriter", "claim", "launch", "native_of", "split"]

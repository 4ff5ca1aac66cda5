"""Fused attention: which nodes have a kernel, and the constants that attention.h is compiled with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.backends.cuda.render import BEGIN, CudaWriter, may_fail
from rlx.backends.cuda.schedule import Launch
from rlx.ir.graph import Node
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs

NARROW, DTYPES = ("f16", "bf16"), ("f32", "f16", "bf16")
MOST_SIZE = 256  # of a head
THREADS = 128
FEW_ROWS, FEW_THREADS = 16, 256  # queries of all heads of a key head that one block takes without tensor cores
MOST_PARTS = 64


def claim(node: Node) -> str | None:
    """None if there is a kernel for this node; else the reason why not."""
    for value in node.inputs[:3]:
        if value.dtype.name not in DTYPES:
            return f"fused attention computes {', '.join(DTYPES)}, not {value.dtype.name}"
    (*_, size), (*_, keys, width) = node.inputs[0].dims, node.inputs[2].dims
    if not all(isinstance(n, int) and 0 < n <= MOST_SIZE for n in (size, width)):
        return f"fused attention takes heads of at most {MOST_SIZE} elements, not {size} and {width}"
    if keys == 0:
        return "fused attention needs keys; there are none"
    return None


@dataclass(frozen=True)
class AttentionLaunch(Launch):
    """For few rows only: `lanes` of one key, `ahead` keys that a lane loads at once, `parts` of the keys; else 0, 0, 1."""

    tall: int = 64
    tensor: bool = True
    tiles: int = 1
    lanes: int = 0
    ahead: int = 0
    parts: int = 1

    @property
    def points(self) -> int:
        return self.tiles

    @property
    def blocks(self) -> int:
        return self.tiles * self.parts


def native_of(kernel: Kernel) -> Native | None:
    found = next((s for s in kernel.body if isinstance(s, Native)), None)
    return found if found is not None and found.op == "attention" else None


def launch(kernel: Kernel, multiprocessors: int = 132) -> AttentionLaunch:
    native = native_of(kernel)
    assert native is not None
    q, k, v = native.inputs[:3]
    (batch, heads, queries, size), (_, shared, keys, width) = q.dims, v.dims
    rows = heads // max(1, shared) * queries
    if 0 < rows <= FEW_ROWS and size % 8 == width % 8 == 0 and _in_chunks(k) and _in_chunks(v):
        lanes = 1 << (-(-max(size, width) // 8) - 1).bit_length()
        groups, ahead = FEW_THREADS // lanes, 4 if rows <= 8 else 2
        parts = min(MOST_PARTS, -(-keys // (groups * ahead)), max(1, 2 * multiprocessors // max(1, batch * shared)))
        record = 4 * rows * (width + 2)
        return AttentionLaunch(
            kernel, FEW_THREADS, FEW_THREADS, shared=32 * rows * lanes + groups * record, scratch=record if parts > 1 else 0,
            counters=batch * shared if parts > 1 else 0, tall=rows, tensor=False, tiles=batch * shared, lanes=lanes, ahead=ahead,
            parts=parts,
        )  # fmt: skip
    same = q.buffer.dtype == k.buffer.dtype and q.buffer.dtype.name in NARROW
    tensor = same and size % 16 == width % 16 == 0 and _in_chunks(k) and _in_chunks(v)
    tall = (64 if rows > 32 else 32 if rows > 16 else 16) if tensor else 16
    if tensor:
        across = 64 // tall
        block = 32 if max(size, width) > 128 and across < 4 else 64
        nbytes = max(4 * block * (size + width + 16), 4 * across * tall * (2 + width))
    else:
        pitch = -(-size // 4) * 4 + 4
        nbytes = 4 * ((tall + 32) * pitch + 32 * -(-width // 32) * 32)
    tiles = -(-rows // tall) * batch * shared
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
        lines += [f'extern "C" __global__ void __launch_bounds__({at.threads})', f"{name}({arguments}) {{", BEGIN]
        lines += ["  extern __shared__ __align__(16) unsigned char shared[];", f"  int tile = blockIdx.x / {at.parts};"]
        lines += [f"  const int part = blockIdx.x % {at.parts};"]
        tall = -(-(native.inputs[0].dims[1] // native.inputs[2].dims[1]) * native.inputs[0].dims[2] // at.tall)
        for var, n in (("row0", tall), ("g", "SHARED")):
            lines += [f"  const int {var} = tile % {n}{f' * {at.tall}' * (var == 'row0')};", f"  tile /= {n};"]
        mask, start = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
        given = "0"
        if start is not None:
            given = f"{self.names[start.buffer]}[{start.offset} + tile * {start.strides[0] if start.strides else 0}]"
        status = "status" if may_fail(self.kernel) else "(rlx_status*)0"
        lines.append(f"  const rlx_span span = rlx_keys(row0, {given}, part == 0 ? {status} : (rlx_status*)0);")
        operands = [self.pointer(v) for v in native.inputs[:3]]
        operands.append("(const unsigned char*)0" if mask is None else self.pointer(mask))
        operands += [self.pointer(native.outputs[0]), "tile", "g"]
        if at.lanes:
            parted = ["(float*)rlx_scratch", "rlx_counters"] if at.counters else ["(float*)0", "(unsigned*)0"]
            operands += ["part", "span", "(float*)shared", *parted]
        else:
            operands += ["row0", "span", "shared" if at.tensor else "(float*)shared"]
        way = "few" if at.lanes else "tensor" if at.tensor else "plain"
        lines.append(f"  rlx_attention_{way}({', '.join(operands)});")
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
        masked = {"custom": 1, "bias": 2}.get(attrs.mask, 0)
        window = attrs.window if attrs.mask == "sliding_window" and attrs.window < keys else 0
        yield from (
            f"#define {name} {value}"
            for name, value in {
                "BATCH": batch, "HEADS": heads, "SHARED": shared, "QUERIES": queries, "KEYS": keys, "SIZE": size, "WIDTH": width,
                "PARTS": self.launch.parts, "GROUP": heads // shared, "TALL": self.launch.tall,
                "ORDERED": int(attrs.mask in ("causal", "sliding_window")), "WINDOW": window,
                "POSITIONED": int(attrs.positioned), "MASKED": masked,
                "SCALE": f"{attrs.scale or size**-0.5:.9e}f", "CAP": f"{attrs.cap:.9e}f",
            }.items()
        )  # fmt: skip
        if self.launch.lanes:
            yield f"#define FEW\n#define LANES {self.launch.lanes}\n#define AHEAD {self.launch.ahead}"
        if self.launch.tensor:
            yield f'#define NARROW "{native.inputs[0].buffer.dtype.name}"'
        q, k, v = native.inputs[:3]
        yield from (at_macro(name, "bhmd", view) for name, view in (("Q", q), ("O", native.outputs[0])))
        yield from (at_macro(name, "bgnd", view) for name, view in (("K", k), ("V", v)))
        if mask is not None:
            lead = 4 - len(mask.dims)
            yield at_macro("MASK", "bhmn", View(mask.buffer, (1,) * lead + mask.dims, (0,) * lead + mask.strides, mask.offset))


ELEMENTS = {"f32": "float", "f16": "rlx_f16", "bf16": "rlx_bf16", "bool": "unsigned char"}


def at_macro(name: str, axes: str, view: View) -> str:
    terms = [f"(rlx_index)({a}) * {s}" for a, s, n in zip(axes, view.strides, view.dims, strict=True) if n > 1 and s]
    return f"#define {name}_AT({', '.join(axes)}) ({' + '.join([*terms, str(view.offset)])})"


__all__ = ["AttentionLaunch", "AttentionWriter", "claim", "launch", "native_of"]

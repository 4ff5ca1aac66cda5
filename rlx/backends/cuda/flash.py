"""Attention of many queries on the tensor cores of compute capability 9.0: the shapes that flash.h is compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.backends.cuda.attention import NARROW, AttentionLaunch, AttentionWriter, header, in_chunks, native_of, stored_width
from rlx.backends.cuda.render import BEGIN
from rlx.backends.cuda.schedule import TensorMap
from rlx.ir.kernel import Kernel, Native, View
from rlx.records import record

ROWS = 64  # queries of a warp group
LEAST_QUERIES, LEAST_ODD = 48, 17  # the latter where other tensor core kernels do not take the size of a head
CHUNK = 32  # columns staged for stores
SHARED = 227 << 10
L2_BYTES = 32 << 20  # of keys and values that blocks at work share
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}  # groups: registers of a copying thread, and of the others


@record
class Shape:
    """The shape of a tile: warp groups of 64 queries, keys per block, blocks of keys in the ring."""

    groups: int
    block: int
    stages: int


def shape_of(size: int, queries: int, tiles: int, multiprocessors: int) -> Shape:
    """`size`: of a head, the larger of keys and values. `tiles`: of 64 queries."""
    alone = queries <= ROWS or tiles <= multiprocessors  # groups of their own multiprocessors do not wait for each other
    groups = 1 if alone else 3 if size <= 64 and queries > 1024 else 2
    return Shape(groups, 64 if size > 128 else 128, 2)


@record
class FlashLaunch(AttentionLaunch):
    shape: Shape = Shape(2, 128, 2)
    multiprocessors: int = 132
    tensors: tuple[TensorMap, ...] = ()

    @property
    def blocks(self) -> int:
        return min(self.multiprocessors, self.tiles)

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        return self.tensors


def launch(kernel: Kernel, multiprocessors: int = 132) -> FlashLaunch | None:
    """The launch of an attention of many queries; None: attention.py has the kernel."""
    native = native_of(kernel)
    assert native is not None
    q, k, v = native.inputs[:3]
    (batch, heads, queries, size), width = q.dims, v.dims[3]
    names = {x.buffer.dtype.name for x in (q, k, v)}
    least = LEAST_ODD if size % 16 or width % 16 else LEAST_QUERIES
    if native.op != "attention" or queries < least or size % 8 or width % 8 or len(names) > 1 or not names <= {*NARROW}:
        return None
    if not all(in_chunks(x) and all(s or n == 1 for s, n in zip(x.strides, x.dims)) for x in (q, k, v)):
        return None
    shape = shape_of(max(size, width), queries, batch * heads * -(-queries // ROWS), multiprocessors)
    tall = ROWS * shape.groups
    maps = tuple(_map(kernel, x, rows) for x, rows in ((q, tall), (k, shape.block), (v, shape.block)))
    parts, threads = (-(-size // 64), -(-width // 64)), 128 * (1 + shape.groups)
    ring = 128 * (parts[0] * tall + sum(parts) * shape.block * shape.stages) + 4 * shape.groups * 16 * (CHUNK + 4) * 4
    return FlashLaunch(
        kernel, threads, threads, shared=ring + 8 * (2 + 4 * shape.stages), tall=tall,
        tiles=batch * heads * -(-queries // tall), shape=shape, multiprocessors=multiprocessors, tensors=maps,
    )  # fmt: skip


def _map(kernel: Kernel, x: View, rows: int) -> TensorMap:
    item, (batch, heads, length, size) = x.buffer.dtype.itemsize, x.dims
    strides = [s * item if n > 1 else 16 for s, n in zip(x.strides[2::-1], x.dims[2::-1])]
    argument = kernel.buffers.index(x.buffer)
    return TensorMap(
        argument, x.offset * item, x.buffer.dtype.name, (size, length, heads, batch), tuple(strides), (64, rows, 1, 1)
    )


class FlashWriter(AttentionWriter):
    launch: FlashLaunch

    def arguments(self) -> list[str]:
        return [*(f"const __grid_constant__ rlx_map map_{name}" for name in "qkv"), *super().arguments()]

    def function(self, name: str) -> str:
        native, at = native_of(self.kernel), self.launch
        assert native is not None
        arguments = ", ".join(self.arguments())
        dtype, vector = native.inputs[0].buffer.dtype.name, stored_width(native, 8)
        lines = [*self.constants(native), *self.shape(native, vector), header("softmax.h"), header("hopper.h")]
        lines += [*product_functions(at.shape.block, native.inputs[2].dims[3], dtype), header("flash.h")]
        lines += [f'extern "C" __global__ void __launch_bounds__({at.threads}, 1)', f"{name}({arguments}) {{", BEGIN]
        lines += ["  extern __shared__ __align__(1024) unsigned char shared[];", *self.put(native, vector)]
        lines += [f"  const auto start = [&](int b) -> int64_t {{ return {self.start(native, 'b')}; }};"]
        lines.append(f"  rlx_flash(&map_q, &map_k, &map_v, shared, start, {self.mask(native)}, put, {self.status});")
        return "\n".join([*lines, "}", ""])

    def shape(self, native: Native, vector: int) -> Iterator[str]:
        at, heads = self.launch.shape, native.inputs[0].dims[1]
        (_, shared, keys, width), size = native.inputs[2].dims, native.inputs[0].dims[3]
        band = max(1, L2_BYTES // (2 * keys * (size + width))) * (heads // shared)
        kept, taken = REGISTERS[at.groups]
        values = {"HEAD_BAND": band, "VECTOR": vector}
        values |= {"GROUPS": at.groups, "BLOCK": at.block, "STAGES": at.stages}
        yield from (f"#define {name} {value}" for name, value in {**values, "KEPT": kept, "TAKEN": taken}.items())


def product_functions(block: int, width: int, dtype: str) -> Iterator[str]:
    """rlx_scores and rlx_values of flash.h."""
    for name, n, left in (("scores", block, "uint32_t a"), ("values", width, "const uint32_t (&a)[4]")):
        count, more = n // 2, 4 if name == "values" else 1
        registers = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if more == 4 else "a"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if more == 4 else '"r"(a)'
        halves = "" if more == 4 else f'mov.b64 a, {{%{count}, " RLX_TILES "}}; '
        halves += f'mov.b64 b, {{%{count + more}, " RLX_TILES "}}; '
        transposed = "1" if more == 4 else "0, 0"
        yield (
            f"RLX_FN void rlx_{name}(float (&d)[{count}], {left}, uint32_t b, int add) {{\n"
            f'  asm volatile("{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %{count + more + 1}, 0; {halves}"\n'
            f'    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "\n'
            f'    "{{{registers}}}, {a}, b, p, 1, 1, {transposed}; }}"\n'
            f'    : {outputs}\n    : {inputs}, "r"(b), "r"(add));\n}}'
        )


__all__ = ["FlashLaunch", "FlashWriter", "Shape", "launch", "shape_of"]

"""Attention of many queries on the tensor cores of compute capability 9.0: the shapes that flash.h is compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlx.backends.cuda import attention
from rlx.backends.cuda.attention import NARROW, ORDERED, PAIR, AttentionLaunch, AttentionWriter, header, in_chunks, native_of
from rlx.backends.cuda.schedule import TensorMap
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs
from rlx.records import record

ROWS = 64  # of a warp group: queries of a head, or of the heads that share a key head
LEAST_QUERIES, LEAST_ODD = 48, 17  # the latter where other tensor core kernels do not take the size of a head
CHUNK = 32  # columns staged for stores
SHARED = 227 << 10
PARTS = (2, 3, 4, 6, 8)  # blocks of a cluster, which share the keys of a tile
# Costs in keys that a block multiplies by the rows of one group meanwhile, fitted to the times of 47 shapes on an H200.
PAIRED, FIRST = 1.3, 300  # two groups by one; what both do before the one can hide the other
BOTH = 1.35  # two blocks of a multiprocessor by one
SECOND = 900  # a second round of pairs, which have the shorter tiles of a causal mask
JOIN, JOINED = 200, 30  # a cluster adds up its sums: twice what that takes, so that ties have none; for each group and block
# The same beside costs of other kernels of few rows, fitted to the times of 60 shapes: bytes of keys and values that come at once
# here, in decode.h and without tensor cores; a later begin, and kernels in front, which decode.h runs itself; its first units.
RATE, DECODING_RATE, LANES_RATE, LATER, FRONTS, UNIT = 37_000, 41_000, 28_000, 70, 300, 95
L2_BYTES = 32 << 20  # of keys and values that blocks at work share
# Groups, and blocks of a multiprocessor: registers of a copying thread, and of the others; 0: as the compiler has it.
REGISTERS = {(1, 1): (0, 0), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160)}


@record
class Shape:
    """The shape of a tile: warp groups of 64 rows, keys per block, blocks of keys in the ring; heads that share a key head, whose
    queries are rows of one tile; blocks of a cluster, which share its keys; blocks of a multiprocessor."""

    groups: int
    block: int
    stages: int
    pack: int = 1
    parts: int = 1
    resident: int = 1

    def tiles(self, q: View) -> int:
        batch, heads, queries, _ = q.dims
        return batch * heads // self.pack * -(-queries // (ROWS // self.pack * self.groups))


def shape_of(size: int, queries: int, tiles: int, multiprocessors: int) -> Shape:
    """`size`: of a head, the larger of keys and values. `tiles`: of 64 queries."""
    alone = queries <= ROWS or tiles <= multiprocessors  # groups of their own multiprocessors do not wait for each other
    groups = 1 if alone else 3 if size <= 64 and queries > 1024 else 2
    return Shape(groups, 64 if size > 128 else 128, 2)


def of_few(native: Native, whole: Shape, multiprocessors: int) -> Shape:
    """`whole`, or a shape for queries so few that its tiles would be mostly empty, or do not fill the GPU."""
    q, (_, shared, keys, width), attrs = native.inputs[0], native.inputs[2].dims, native.attrs
    assert isinstance(attrs, AttentionAttrs)
    _, heads, queries, size = q.dims
    together = max(1, heads // max(1, shared))
    pack = 1 if attrs.masked or keys <= whole.block or together > ROWS else together
    packed = [replace(whole, groups=groups, pack=pack) for groups in ((1, 2) if queries > ROWS // pack else (1,))]
    halves = attrs.mask == "causal" and not attrs.positioned and queries == keys

    def fits(at: Shape) -> bool:
        count = attention.at_once(at.parts, multiprocessors)
        return at.tiles(q) * at.parts <= (2 * count if halves and at.parts == PAIR else count)

    some = packed if pack > 1 and queries < LEAST_QUERIES else [whole]
    several = [at for shape in packed for n in PARTS if fits(at := replace(shape, parts=n))]
    best = min([*some, *several], key=lambda at: cost(at, native, multiprocessors))
    tall = best.groups > 1 or best.parts > 1 or queries > ROWS // best.pack
    alone = multiprocessors if best.pack < together else multiprocessors * 3 // 4  # tiles with keys of their own wait for memory
    if tall or max(size, width) > 128 or best.tiles(q) <= alone:
        return best
    return replace(best, block=64 if max(size, width) > 64 else 128, resident=2)


def keys_of(native: Native) -> int:
    """Of a tile, as many as it sees at most."""
    queries, keys, attrs = native.inputs[0].dims[2], native.inputs[1].dims[2], native.attrs
    assert isinstance(attrs, AttentionAttrs)
    seen = max(queries, keys // 2) if attrs.positioned else keys  # a cache may be nearly empty
    return min(seen, queries + attrs.window) if attrs.window else seen


def cost(at: Shape, native: Native, multiprocessors: int) -> float:
    blocks, seen, groups = at.tiles(native.inputs[0]) * at.parts, keys_of(native), PAIRED if at.groups > 1 else 1
    ends = (FIRST if at.groups > 1 else 0) + joined(at)
    if at.parts > 1 and blocks > multiprocessors:
        return seen / at.parts * groups * max(1, blocks / multiprocessors / 2) + SECOND + ends
    both, alone = divmod(-(-blocks // multiprocessors), at.resident)
    return (both * (BOTH if at.resident > 1 else 1) + alone) * -(-seen // (at.block * at.parts)) * at.block * groups + ends


def joined(at: Shape) -> float:
    return JOIN + JOINED * at.groups * at.parts if at.parts > 1 else 0


def loses(at: Shape, other: AttentionLaunch, native: Native, multiprocessors: int) -> bool:
    """Whether `other`, a kernel for few rows, takes less time. Warps of decode.h have in registers what is on its way: few warps,
    few bytes."""
    (batch, shared, _, width), size, seen = native.inputs[2].dims, native.inputs[0].dims[3], keys_of(native)
    moved, sides = 2 * batch * shared * seen * (size + width), 1.5 if width > 128 else 1  # which load the same keys
    own = max(cost(at, native, multiprocessors) - joined(at) / 2, moved / RATE) + LATER
    own += FRONTS if native.attrs.positioned and other.cluster else 0  # type: ignore[union-attr]
    if not other.cluster:
        return moved / LANES_RATE <= own
    warps, slots = other.threads // attention.LANES, multiprocessors * other.resident
    full, rest = divmod(other.blocks, slots)
    wide = ((size + width) / 256) ** 0.5  # wider rows are longer on their way
    busy = warps * wide / (attention.WARPS * multiprocessors)
    times = sum(n * each / min(1, each * busy) ** 0.5 for n, each in ((full, slots), (1, rest)) if each)
    begins = (full + (rest > 0)) * wide * UNIT * min(3, -(-seen // (16 * warps * other.parts)))
    return begins + sides * moved / DECODING_RATE * times / other.blocks <= own


@record
class FlashLaunch(AttentionLaunch):
    shape: Shape = Shape(2, 128, 2)
    multiprocessors: int = 132
    tensors: tuple[TensorMap, ...] = ()

    @property
    def blocks(self) -> int:
        return self.tiles * self.parts if self.parts > 1 else min(self.multiprocessors * self.shape.resident, self.tiles)

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
    if native.op != "attention" or size % 8 or width % 8 or len(names) > 1 or not names <= {*NARROW}:
        return None
    if not all(in_chunks(x) and all(s or n == 1 for s, n in zip(x.strides, x.dims)) for x in (q, k, v)):
        return None
    shape = shape_of(max(size, width), queries, batch * heads * -(-queries // ROWS), multiprocessors)
    shape = of_few(native, shape, multiprocessors)
    least = LEAST_ODD if size % 16 or width % 16 else LEAST_QUERIES
    rows, other = heads // max(1, k.dims[1]) * queries, attention.launch(kernel, multiprocessors)
    if shape.parts * shape.pack > 1:
        least = attention.TILE // shape.pack + 1
    few = rows <= attention.TILE and (other.lanes > 0 or other.cluster > 0)
    if (few and loses(shape, other, native, multiprocessors)) or (not few and queries < least):
        return None
    tall = ROWS * shape.groups
    maps = (_map_of_queries(kernel, q, shape.pack), *(_map(kernel, x, shape.block) for x in (k, v)))
    parts, threads = (-(-size // 64), -(-width // 64)), 128 * (1 + shape.groups)
    ring = 128 * (parts[0] * tall + sum(parts) * shape.block * shape.stages) + 4 * shape.groups * 16 * (CHUNK + 4) * 4
    both = 128 * parts[0] * tall + 4 * tall * (width + 4) if shape.parts > 1 else 0
    several = shape.parts == 1 and shape.tiles(q) > multiprocessors * shape.resident  # of a block
    drawn = several and native.attrs.mask in ORDERED  # type: ignore[union-attr]
    return FlashLaunch(
        kernel, threads, threads, shared=max(ring + 8 * (3 + 4 * shape.stages), both), counters=int(drawn), tall=tall,
        tiles=shape.tiles(q), parts=shape.parts, shape=shape, multiprocessors=multiprocessors, tensors=maps,
    )  # fmt: skip


def _map_of_queries(kernel: Kernel, q: View, pack: int) -> TensorMap:
    """A box has the rows of a warp group."""
    (batch, heads, length, size), (s_batch, s_head, s_row, _) = q.dims, q.strides
    apart = View(q.buffer, (batch, heads // pack, length, pack, size), (s_batch, s_head * pack, s_row, s_head, 1), q.offset)
    return _map(kernel, apart, pack, ROWS // pack)


def _map(kernel: Kernel, x: View, *rows: int) -> TensorMap:
    """`rows`: of a box, from the innermost axis of them out."""
    item = x.buffer.dtype.itemsize
    strides = [s * item if n > 1 else 16 for s, n in zip(x.strides[-2::-1], x.dims[-2::-1])]
    box = (64, *rows, *(1,) * (len(x.dims) - 1 - len(rows)))
    return TensorMap(
        kernel.buffers.index(x.buffer), x.offset * item, x.buffer.dtype.name, x.dims[::-1], tuple(strides), box
    )


class FlashWriter(AttentionWriter):
    launch: FlashLaunch

    def arguments(self) -> list[str]:
        return [*(f"const __grid_constant__ rlx_map map_{name}" for name in "qkv"), *super().arguments()]

    def function(self, name: str) -> str:
        native, at = native_of(self.kernel), self.launch
        assert native is not None
        arguments = ", ".join(self.arguments())
        dtype, vector = native.inputs[0].buffer.dtype.name, attention.stored_width(native, 8)
        lines = [*self.constants(native), *self.shape(native, vector), header("softmax.h"), header("hopper.h")]
        lines += [*product_functions(at.shape.block, native.inputs[2].dims[3], dtype), header("flash.h")]
        cluster = f"__cluster_dims__({at.parts}) " if at.parts > 1 else ""
        bounds = f"__launch_bounds__({at.threads}, {at.shape.resident})"
        lines += [f'extern "C" __global__ void {cluster}{bounds}', f"{name}({arguments}) {{"]
        lines += ["  rlx_begin();", "  extern __shared__ __align__(1024) unsigned char shared[];", *self.put(native, vector)]
        lines += [f"  const auto start = [&](int b) -> int64_t {{ return {self.start(native, 'b')}; }};"]
        drawn = "rlx_counters" if at.counters else "(unsigned*)0"
        last = f"{self.mask(native)}, put, {drawn}, {self.status}, halt"
        lines.append(f"  rlx_flash(&map_q, &map_k, &map_v, shared, start, {last});")
        return "\n".join([*lines, "}", ""])

    def shape(self, native: Native, vector: int) -> Iterator[str]:
        at, heads = self.launch.shape, native.inputs[0].dims[1]
        (_, shared, keys, width), size = native.inputs[2].dims, native.inputs[0].dims[3]
        band = max(1, L2_BYTES // (2 * keys * (size + width))) * (heads // shared) // at.pack
        kept, taken = REGISTERS[at.groups, at.resident]
        values = {"HEAD_BAND": band, "VECTOR": vector, "DRAWN": self.launch.counters}
        values |= {"GROUPS": at.groups, "BLOCK": at.block, "STAGES": at.stages, "PACK": at.pack}
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

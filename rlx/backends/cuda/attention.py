"""Fused attention: which nodes have a kernel, and the constants that attention.h is compiled with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import BEGIN, CudaWriter, may_fail
from rlx.backends.cuda.schedule import RESERVED, Launch, apart
from rlx.backends.cuda.vectors import width
from rlx.ir.graph import Node
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs
from rlx.records import record

NARROW, DTYPES = ("f16", "bf16"), ("f32", "f16", "bf16")
MOST_SIZE = 256  # of a head
THREADS = 128
FEW_ROWS, FEW_THREADS = 16, 256  # queries of all heads of a key head that one block takes without tensor cores
FEW_KEYS = 256  # up to which tensor cores take the larger half of these rows, one block for all keys
MOST_PARTS = 16
TILE, WARPS, LANES = 8, 8, 32  # rows of a tile of tensor cores; warps of its block
PAIR, LONG, LONGER = 2, 2048, 8192  # blocks of a cluster where keys are as many; keys from which on they have all WARPS
CLUSTER = 8  # blocks, at most: as many as every GPU with clusters has
SHARING, SHARING_SMALL = (2,), (2, 3, 4)  # blocks of half the WARPS that share a multiprocessor; with heads of at most 64
EACH = 3  # times that a block loads keys before further ones go to other blocks, whose sums have to be added
FEW_BYTES = 96 << 10  # of keys and values on their way to such a block
ORDERED = ("causal", "sliding_window")  # masks
REGISTERS, OTHERS = 65536, 60  # of a multiprocessor; of a thread, beside sums and scores
LOW = 64  # rows of a tile without tensor cores, or as few as there are
# Costs of tiles without tensor cores, fitted to the times of 29 shapes in 7 ways each on an H200.
BUSY_WARPS, FEWER = 12, 0.35  # of a multiprocessor, and the power of their number by which fewer are slower
FIRST_KEYS = 90  # that could be multiplied while a lone block waits for its first ones; of n blocks, each waits 1 / n^2 as long
LARGE = 1.22  # times as fast with twice as many scores and sums of a thread


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


@record
class AttentionLaunch(Launch):
    """For few rows only: `lanes` of one key, `ahead` keys that a lane loads at once, `parts` of the keys; else 0, 0, 1; `stages`
    of such loads, and the bytes of their `area`. `resident`: blocks of a multiprocessor. Without tensor cores: `block`, keys at
    once; `across`, threads of a row."""

    tall: int = 64
    tensor: bool = True
    tiles: int = 1
    lanes: int = 0
    ahead: int = 0
    parts: int = 1
    block: int = 0
    stages: int = 1
    area: int = 0
    cluster: int = 0
    across: int = 16
    resident: int = 1

    @property
    def points(self) -> int:
        return self.tiles

    @property
    def early(self) -> tuple[int, ...] | None:
        """The buffers that are read before earlier kernels end, if none of them writes them: keys, values and the position."""
        native = native_of(self.kernel)
        if not self.cluster or native is None:
            return None
        _, start = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
        views = [*native.inputs[1:3], *([start] if start is not None else [])]
        return tuple(self.kernel.buffers.index(view.buffer) for view in views)

    @property
    def blocks(self) -> int:
        return self.tiles * self.parts


def native_of(kernel: Kernel) -> Native | None:
    found = next((s for s in kernel.body if isinstance(s, Native)), None)
    return found if found is not None and found.op == "attention" else None


def launch(kernel: Kernel, multiprocessors: int = 132, most: int = 227 << 10, clusters: bool = True) -> AttentionLaunch:
    """`most`: bytes of shared memory of a block."""
    native = native_of(kernel)
    assert native is not None
    q, k, v = native.inputs[:3]
    (batch, heads, queries, size), (_, shared, keys, width) = q.dims, v.dims
    rows = heads // max(1, shared) * queries
    same = q.buffer.dtype == k.buffer.dtype and q.buffer.dtype.name in NARROW
    tensor = same and size % 16 == width % 16 == 0 and in_chunks(k) and in_chunks(v)
    few = 0 < rows <= FEW_ROWS and not (tensor and rows > FEW_ROWS // 2 and keys <= FEW_KEYS)
    exact = k.buffer.dtype.name == "bf16" and q.buffer.dtype.name == "f32"
    narrow = k.buffer.dtype.name in NARROW and v.buffer.dtype == k.buffer.dtype and (exact or same)
    fits = size % 32 == width % (128 if width > 128 else 64) == 0 and in_chunks(k) and in_chunks(v)
    if clusters and narrow and 0 < rows <= TILE and fits:
        return _decoding(kernel, batch * shared, rows, multiprocessors)
    if few and size % 8 == width % 8 == 0 and in_chunks(k) and in_chunks(v):
        lanes = 1 << (-(-max(size, width) // 8) - 1).bit_length()
        groups, ahead = FEW_THREADS // lanes, min(lanes, 4 if rows <= 8 else 2)
        parts = min(MOST_PARTS, -(-keys // (groups * ahead)), max(1, 2 * multiprocessors // max(1, batch * shared)))
        record, weights = 16 * -(-rows * (width + 2) // 4), 4 * rows * (max(groups, parts) + 2)
        step = 2 * ahead * FEW_THREADS * 8 * k.buffer.dtype.itemsize  # bytes of a step's keys and values
        room = min(FEW_BYTES, most - 32 * rows * lanes - weights)
        stages = min(-(-keys // (groups * ahead * parts)), max(1, room // step))
        area = max(groups * record, stages * step)
        return AttentionLaunch(
            kernel, FEW_THREADS, FEW_THREADS, shared=32 * rows * lanes + area + weights,
            scratch=record if parts > 1 else 0, counters=batch * shared if parts > 1 else 0, tall=rows, tensor=False,
            tiles=batch * shared, lanes=lanes, ahead=ahead, parts=parts, stages=stages, area=area,
        )  # fmt: skip
    if tensor:
        tall = 64 if rows > 32 else 32 if rows > 16 else 16
        while (nbytes := tensor_bytes(size, width, tall)) > most and tall < 64:
            tall *= 2
        return AttentionLaunch(kernel, THREADS, THREADS, shared=nbytes, tall=tall, tiles=-(-rows // tall) * batch * shared)
    return plain_launch(kernel, multiprocessors, most)


def _decoding(kernel: Kernel, tiles: int, rows: int, multiprocessors: int) -> AttentionLaunch:
    """Few rows on tensor cores. Blocks of half the WARPS share a multiprocessor; where key heads are few, they leave room for
    blocks of the product behind them, whose weights are then there in time. As many blocks share keys as run at once."""
    native = native_of(kernel)
    assert native is not None
    size, (*_, keys, width) = native.inputs[0].dims[3], native.inputs[2].dims
    sharing = SHARING_SMALL if max(size, width) <= 64 else SHARING
    parts = CLUSTER
    while parts > 1 and tiles * parts > at_once(parts, sharing[-1] * multiprocessors):
        parts //= 2
    shares = max(1, multiprocessors // (tiles * PAIR)) if keys >= LONG else 1
    shares, parts = (shares, PAIR) if shares > 1 and shares * PAIR >= parts else (1, parts)
    pairs = shares == 1 and parts == PAIR and keys >= LONG // 2  # which leave no room to others anyhow
    warps = WARPS if (keys >= LONGER or pairs) and tiles * parts <= multiprocessors else WARPS // 2
    rounds = {n: -(-tiles * parts * shares // at_once(parts, n * multiprocessors)) for n in sharing}
    slots = warps // (2 if width > 128 else 1)
    nbytes = 32 * size + 4 * slots * rows * (width + 4 * parts)
    return AttentionLaunch(
        kernel, LANES * warps, LANES * warps, shared=nbytes, scratch=8 * rows * width // parts if shares > 1 else 0,
        counters=tiles * parts if shares > 1 else 0, tall=rows, tensor=False, tiles=tiles, parts=parts * shares, cluster=parts,
        resident=1 if warps == WARPS else min(sharing, key=lambda n: (rounds[n] * n, -n)),
    )  # fmt: skip


def at_once(cluster: int, blocks: int) -> int:
    """Of so many blocks, those that run at once in clusters: larger ones than pairs leave some multiprocessors out."""
    return blocks if cluster <= PAIR else blocks * 3 // 4


def tensor_bytes(size: int, width: int, tall: int) -> int:
    """Of the blocks of keys and values, and of the sums that warps exchange at the end."""
    across = 64 // tall
    block = 32 if max(size, width) > 128 and across < 4 else 64
    return max(4 * block * (size + width + 16), 4 * across * tall * (2 + width))


def plain_launch(kernel: Kernel, multiprocessors: int, most: int) -> AttentionLaunch:
    """A launch without tensor cores, in the tiles that cost least."""
    native = native_of(kernel)
    assert native is not None
    (batch, heads, queries, size), (_, shared, _, width) = native.inputs[0].dims, native.inputs[2].dims
    rows, block = heads // max(1, shared) * queries, 64 if max(size, width) <= 128 else 32

    def most_threads(across: int) -> int:
        """Of a multiprocessor, so that their sums and scores are in registers."""
        step = plain_step(width, across)
        sums = 8 * step * -(-width // (across * step))
        return min(32 * across, REGISTERS // (sums + 8 * block // across + OTHERS))

    def made(tall: int, across: int) -> AttentionLaunch:
        nbytes, threads = plain_bytes(size, width, tall, block, across), tall // 8 * across
        resident = min((most + RESERVED) // (nbytes + RESERVED), most_threads(across) // threads)
        return AttentionLaunch(
            kernel, threads, threads, shared=nbytes, tall=tall, tensor=False, tiles=-(-rows // tall) * batch * shared,
            block=block, across=across, resident=max(1, resident),
        )  # fmt: skip

    large = [(2 * LOW, 8)] * (max(size, width) <= 64)  # others would take too many registers
    fits = [at for shape in ((16, 16), (32, 16), (LOW, 16), (2 * LOW, 16), *large) if (at := made(*shape)).shared <= most]
    sizes = [at for at in fits if min(LOW, rows) <= at.tall] or fits[-1:]
    chosen = min(sizes, key=lambda at: plain_cost(at, native, multiprocessors))
    return replace(chosen, shared=apart(chosen, multiprocessors, most))


def plain_cost(at: AttentionLaunch, native: Native, multiprocessors: int) -> float:
    """A relative time: rounds of blocks on a multiprocessor, each by the rows and keys of its tiles. A causal mask leaves some
    tile all keys, and that takes as long whatever the others do."""
    keys, mask = native.inputs[2].dims[2], native.attrs.mask  # type: ignore[union-attr]
    mean = min(keys, (keys + at.tall) / 2) if mask in ORDERED else keys
    full, rest = divmod(-(-at.tiles // multiprocessors), at.resident)

    def at_once(count: int, keys: float) -> float:
        rate = min(1, count * at.threads / 32 / BUSY_WARPS) ** FEWER
        return count * at.tall * (keys + FIRST_KEYS / at.resident**2) / rate

    time = full * at_once(at.resident, mean) + (at_once(rest, mean) if rest else 0)
    return max(time, at_once(1, keys) if mask == "causal" else 0) / (LARGE if at.across == 8 else 1)


def plain_step(width: int, across: int) -> int:
    """Adjacent columns of a thread: as few as possible are computed in vain."""
    return min((4, 2, 1), key=lambda step: (-(-width // (across * step)) * step, -step))


def plain_bytes(size: int, width: int, tall: int, block: int, across: int) -> int:
    """Of queries, keys, values and weights in shared memory."""
    step, pitch = across * plain_step(width, across), -(-size // 4) * 4 | 4
    return 4 * ((tall + block) * pitch + block * -(-width // step) * step + tall * (block + across))


def in_chunks(view: View, size: int = 8) -> bool:
    """True if rows are contiguous and start at multiples of `size` elements."""
    outer = zip(view.strides[:3], view.dims)
    return view.strides[3] == 1 and view.offset % size == 0 and all(s % size == 0 for s, n in outer if n > 1)


def stored_width(native: Native, most: int) -> int:
    """Elements of the result that are stored at once."""
    if native.acc is not None:
        return min(most, width(native.epilogue, (), *native.axes[-1]))
    (out,) = native.outputs
    return next(n for n in (8, 4, 2, 1) if n == 1 or (n <= most and in_chunks(out, n) and out.dims[3] % n == 0))


def header(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


class AttentionWriter(CudaWriter):
    launch: AttentionLaunch

    def function(self, name: str, parameters: Sequence[str] = (), fronts: Sequence[str] = ()) -> str:
        """`parameters` and `fronts`: of the kernels in front that the blocks run, and the statements that do so."""
        native, at = native_of(self.kernel), self.launch
        assert native is not None
        self.alone_in_launch = not fronts
        arguments = ", ".join([*parameters, *self.arguments(), *["long long early"] * (at.cluster > 0)])
        way = "decode" if at.cluster else "few" if at.lanes else "mma" if at.tensor else "plain"
        whole = 4 if at.cluster else 1
        vector = stored_width(native, 2 if at.tensor else plain_step(native.inputs[2].dims[3], at.across) if at.block else whole)
        lines = [*self.constants(native), f"#define VECTOR {vector}", f"#define FRONTS {int(bool(fronts))}", header("softmax.h")]
        lines += [header(f"{file}.h") for file in (["attention"], ["attention", "warps", "decode"])[at.cluster > 0]]
        lines += [] if at.lanes or at.cluster else [header(f"{way}.h")]
        few = at.cluster > 0 and at.threads < LANES * WARPS  # blocks that share a multiprocessor
        bound = f", {at.resident}" if few or at.block else ""
        cluster = f"__cluster_dims__({at.cluster}) " if at.cluster > 1 else ""
        lines += [f'extern "C" __global__ void {cluster}__launch_bounds__({at.threads}{bound})', f"{name}({arguments}) {{"]
        lines += [] if at.cluster else [BEGIN]
        lines += ["  extern __shared__ __align__(16) unsigned char shared[];", f"  int tile = blockIdx.x / {at.parts};"]
        lines += [f"  const int part = blockIdx.x % {at.parts};"]
        lines += self.ready(fronts) if at.cluster else []
        lines += ["  const int row0 = rlx_row_of(tile), g = tile % SHARED;", "  tile /= SHARED;"]
        position, status = self.start(native, "tile"), f"part == 0 ? {self.status} : (rlx_status*)0"
        if at.cluster:
            lines.append(f"  const auto span_of = [&](rlx_status* to) {{ return rlx_keys(row0, {position}, to); }};")
        else:
            lines.append(f"  const rlx_span span = rlx_keys(row0, {position}, {status});")
        lines += self.put(native, vector)
        operands = [*map(self.pointer, native.inputs[:3]), self.mask(native), "put", "tile", "g"]
        if at.cluster:
            operands += ["part", "span_of", "ready", "early", status, "shared"]
            operands += ["(float4*)rlx_scratch", "rlx_counters"] if at.counters else ["(float4*)0", "(unsigned*)0"]
        elif at.lanes:
            parted = ["(float*)rlx_scratch", "rlx_counters"] if at.counters else ["(float*)0", "(unsigned*)0"]
            operands += ["part", "span", "(float*)shared", *parted]
        else:
            operands += ["row0", "span", "shared" if at.tensor else "(float*)shared"]
        lines.append(f"  rlx_attention_{way}({', '.join(operands)});")
        return "\n".join([*lines, "}", ""])

    def ready(self, fronts: Sequence[str]) -> list[str]:
        """`ready()`: waits for the kernels in front, and runs those that are this launch's. True: a run has failed."""
        own = [f"    {line}" for line in fronts] + ["    return rlx_halted(halt);"]
        return ["  const int own = tile;", "  const auto ready = [&]() {", "    rlx_begin();", *own, "  };"]

    @property
    def status(self) -> str:
        return "status" if may_fail(self.kernel) else "(rlx_status*)0"

    def start(self, native: Native, batch: str) -> str:
        """The position of the first query."""
        _, start = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
        if start is None:
            return "0"
        return f"{self.names[start.buffer]}[{start.offset} + {batch} * {start.strides[0] if start.strides else 0}]"

    def mask(self, native: Native) -> str:
        mask, _ = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
        return "(const unsigned char*)0" if mask is None else self.pointer(mask)

    def put(self, native: Native, size: int) -> list[str]:
        """`put(b, h, m, d, values)`: stores elements d to d + size of the result, or runs the epilogue on them."""
        before, self.lines = self.lines, []
        if native.acc is None:
            (out,) = native.outputs
            store = CUDA.stores.get(out.buffer.dtype.name, "{0}[{1}] = {2};").format("made", "v", "values[v]")
            self.line(f"{CUDA.element(out.buffer.dtype)} made[{size}];")
            self.line(f"for (int v = 0; v < {size}; v++) {store}")
            self.line(f"rlx_put<{size}>({self.names[out.buffer]} + O_AT(at_b, at_h, at_m, at_d), made);")
        else:
            self.names.update(zip((v for v, _ in native.axes), ("at_b", "at_h", "at_m", "at_d")))
            self.names[native.acc] = "values[v]" if size > 1 else "values[0]"
            with self.alone():
                if size > 1:
                    self.in_vectors(native.epilogue, (), native.axes[-1][0], size, "at_d")
                else:
                    self.block(native.epilogue)
        body, self.lines = self.lines, before
        head = "const auto put = [&](rlx_index at_b, rlx_index at_h, rlx_index at_m, rlx_index at_d, const float* values) {"
        return [f"  {head}", *(f"  {line}" for line in body), "  };"]

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
        of_keys = mask is not None and (len(mask.dims) < 2 or mask.dims[-2] == 1 or mask.strides[-2] == 0)
        window = attrs.window if attrs.mask == "sliding_window" and attrs.window < keys else 0
        yield from (
            f"#define {name} {value}"
            for name, value in {
                "BATCH": batch, "HEADS": heads, "SHARED": shared, "QUERIES": queries, "KEYS": keys, "SIZE": size, "WIDTH": width,
                "PARTS": self.launch.cluster or self.launch.parts, "GROUP": heads // shared, "TALL": self.launch.tall,
                "ORDERED": int(attrs.mask in ORDERED), "WINDOW": window,
                "POSITIONED": int(attrs.positioned), "MASKED": masked, "MASK_OF_KEYS": int(of_keys),
                "SCALE": f"{attrs.scale or size**-0.5:.9e}f", "CAP": f"{attrs.cap:.9e}f",
            }.items()
        )  # fmt: skip
        if self.launch.lanes:
            yield f"#define FEW\n#define LANES {self.launch.lanes}\n#define AHEAD {self.launch.ahead}\n#define EACH {EACH}"
            yield f"#define STAGES {self.launch.stages}\n#define AREA {self.launch.area}"
        if self.launch.cluster:
            yield f"#define WARPS {self.launch.threads // LANES}\n#define SHARES {self.launch.parts // self.launch.cluster}"
        if self.launch.block:
            across = self.launch.across
            alike = mask is None or heads == shared or len(mask.dims) < 3 or mask.dims[-3] == 1 or mask.strides[-3] == 0  # heads
            yield f"#define ONE_MASK {int(of_keys and alike)}"
            yield f"#define BLOCK {self.launch.block}\n#define ACROSS {across}\n#define STEP {plain_step(width, across)}"
            for name, view in zip("QKV", native.inputs):
                chunks = view.buffer.dtype.name == "f32" and in_chunks(view, 4) and view.dims[3] % 4 == 0
                yield f"#define {name}_CHUNKS {int(chunks)}"
        if self.launch.tensor:
            yield f'#define NARROW "{native.inputs[0].buffer.dtype.name}"'
        q, k, v = native.inputs[:3]
        yield from (at_macro(name, "bhmd", view) for name, view in (("Q", q), *(("O", view) for view in native.outputs)))
        yield from (at_macro(name, "bgnd", view) for name, view in (("K", k), ("V", v)))
        if mask is not None:
            lead = 4 - len(mask.dims)
            yield at_macro("MASK", "bhmn", View(mask.buffer, (1,) * lead + mask.dims, (0,) * lead + mask.strides, mask.offset))


ELEMENTS = {"f32": "float", "f16": "rlx_f16", "bf16": "rlx_bf16", "bool": "unsigned char"}


def at_macro(name: str, axes: str, view: View) -> str:
    terms = [f"(rlx_index)({a}) * {s}" for a, s, n in zip(axes, view.strides, view.dims, strict=True) if n > 1 and s]
    return f"#define {name}_AT({', '.join(axes)}) ({' + '.join([*terms, str(view.offset)])})"


__all__ = ["AttentionLaunch", "AttentionWriter", "claim", "header", "in_chunks", "launch", "native_of", "stored_width"]

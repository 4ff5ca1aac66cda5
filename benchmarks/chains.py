"""Elementwise chains, reductions and data movement against memory bandwidth and peers: `python benchmarks/chains.py [--write]`.

The limit of a row is a generated loop that reads and writes as many bytes in as many streams (plain or non-temporal stores,
whichever is faster), on the same threads through the same worker pool, in the same rounds. rlx and the limit are called the
same way, so that only kernels are compared. Peers' columns: their time over rlx's; every result is compared with numpy in
double precision first.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.chains_peers import Jax, Numpy, Onnx, Rlx, Torch
from benchmarks.measure import DOCUMENT, Call, header, interleaved, share, table
from rlx.backends.cpu import pool
from rlx.backends.cpu.abi import Step
from rlx.backends.cpu.memory import allocate
from rlx.backends.cpu.target import host_target
from rlx.host import jit
from rlx.host.emit import ATTRIBUTES, PARAMETERS, Emitter, V, vector

PEERS = ("numpy", "torch", "onnxruntime", "openvino", "jax")
SLACK = {"f32": 2e-5, "bf16": 2e-2, "f16": 2e-3, "i8": 0.0}
MARK = "## Chains, `python benchmarks/chains.py`"


@dataclass(frozen=True)
class Case:
    """`make(m, *xs)` computes the result with the functions of a namespace `m` and operators; `dims` of each operand."""

    name: str
    make: Callable[..., Any]
    dims: tuple[tuple[int, ...], ...]
    dtype: str = "f32"

    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [(rng.standard_normal(d, np.float32) + np.float32(0.25)).astype(getattr(rlx, self.dtype).numpy) for d in self.dims]


def chain(m: Any, x: Any, y: Any, z: Any) -> Any:
    return m.relu(x * y + z)


def cases() -> list[Case]:
    out: list[Case] = []
    for n in (1 << 14, 1 << 16, 1 << 20, 1 << 24):
        out.append(Case(f"relu(x*y+z) {_size(n)}", chain, ((n,),) * 3))
    out.append(Case("relu(x*y+z) 64 M", chain, ((1 << 26,),) * 3))
    for n in (1 << 16, 1 << 20, 1 << 24):
        out.append(Case(f"relu(x*y+z) {_size(n)}", chain, ((n,),) * 3, "bf16"))
        out.append(Case(f"relu(x*y+z) {_size(n)}", chain, ((n,),) * 3, "f16"))
        out.append(Case(f"x+y {_size(n)}", lambda m, x, y: x + y, ((n,),) * 2, "f16"))
        out.append(Case(f"x*2+1 {_size(n)}", lambda m, x: x * 2.0 + 1.0, ((n,),)))
    for rows in (128, 1024, 16384):
        out.append(Case(f"x*row+row {rows}x1024", lambda m, x, r, s: x * r + s, ((rows, 1024), (1024,), (1024,))))
    out.append(Case("x*column 1024x1024", lambda m, x, c: x * c, ((1024, 1024), (1024, 1))))
    out.append(Case("x*row+row 1000x1001", lambda m, x, r, s: x * r + s, ((1000, 1001), (1001,), (1001,))))
    for name in ("exp", "tanh", "gelu", "silu"):
        for n in (1 << 16, 1 << 20, 1 << 24):
            out.append(Case(f"{name} {_size(n)}", lambda m, x, name=name: getattr(m, name)(x), ((n,),)))
    for dims in ((256, 64), (1024, 384), (1000, 1001), (512, 4096), (8192, 2048)):
        size = "x".join(map(str, dims))
        last = dims[-1:]
        out.append(Case(f"softmax {size}", lambda m, x: m.softmax(x), (dims,)))
        out.append(Case(f"layer_norm {size}", lambda m, x, w, b: m.layer_norm(x, w, b), (dims, last, last)))
        out.append(Case(f"rms_norm {size}", lambda m, x, w: m.rms_norm(x, w), (dims, last)))
    for dims in ((256, 256), (1024, 1024), (1000, 1001), (4096, 4096)):
        size = "x".join(map(str, dims))
        for name, axis in (("sum", (1,)), ("sum", (0,)), ("sum", (0, 1)), ("max", (1,)), ("max", (0,)), ("mean", (0, 1))):
            label = {(1,): "last", (0,): "first", (0, 1): "all"}[axis]
            out.append(Case(f"{name} {label} {size}", lambda m, x, n=name, a=axis: m.reduce(n, x, a), (dims,)))
    out.append(Case("sum last 4096x4096", lambda m, x: m.reduce("sum", x, (1,)), ((4096, 4096),), "bf16"))
    out.append(Case("sum first 4096x4096", lambda m, x: m.reduce("sum", x, (0,)), ((4096, 4096),), "bf16"))
    out.append(Case("sum all 4096x4096", lambda m, x: m.reduce("sum", x, (0, 1)), ((4096, 4096),), "bf16"))
    out.append(Case("sum middle 32x512x256", lambda m, x: m.reduce("sum", x, (1,)), ((32, 512, 256),)))
    out.append(Case("sum first, last 64x128x512", lambda m, x: m.reduce("sum", x, (0, 2)), ((64, 128, 512),)))
    out.append(Case("sum all 16 M", lambda m, x: m.reduce("sum", x, (0,)), ((1 << 24,),)))
    for dims, axis in (((256, 256), 1), ((1024, 1024), 1), ((1024, 1024), 0), ((1000, 1001), 1)):
        label = f"{'last' if axis else 'first'} {dims[0]}x{dims[1]}"
        out.append(Case(f"argmax {label}", lambda m, x, axis=axis: m.argmax(x, axis), (dims,)))
        out.append(Case(f"cumsum {label}", lambda m, x, axis=axis: m.cumsum(x, axis), (dims,)))
    for dims, count in (((100, 64), 8), ((16, 1000), 5), ((8, 4235), 50), ((1, 151936), 50), ((8, 4235), 4235)):
        out.append(Case(f"top {count} {_dims(dims)}", lambda m, x, count=count: m.top(x, count), (dims,)))
    for n in (256, 1024, 4096):
        out.append(Case(f"transpose {n}x{n}", lambda m, x: m.transpose(x, (1, 0)), ((n, n),)))
    for dims in ((1000, 1000), (2000, 3000), (128, 65536), (65536, 128)):
        out.append(Case(f"transpose {dims[0]}x{dims[1]}", lambda m, x: m.transpose(x, (1, 0)), (dims,)))
    for dtype in ("bf16", "i8"):
        for n in (1024, 4096):
            out.append(Case(f"transpose {n}x{n}", lambda m, x: m.transpose(x, (1, 0)), ((n, n),), dtype))
    out.append(Case("transpose heads 8x128x12x64", lambda m, x: m.transpose(x, (0, 2, 1, 3)), ((8, 128, 12, 64),)))
    for dims in ((1, 16, 2048, 64), (32, 16, 1024, 64)):
        out.append(Case(f"transpose keys {_dims(dims)}", lambda m, x: m.transpose(x, (0, 1, 3, 2)), (dims,)))
    for n, c, side in ((8, 256, 14), (1, 64, 56), (1, 3, 224), (8, 3, 640)):  # images, to channels last and back
        for dims, axes in (((n, c, side, side), (0, 2, 3, 1)), ((n, side, side, c), (0, 3, 1, 2))):
            out.append(Case(f"transpose {_dims(dims)}", lambda m, x, axes=axes: m.transpose(x, axes), (dims,)))
    for n in (1 << 8, 1 << 12):
        out.append(Case(f"concat last {n}x(1024+1024)", lambda m, x, y: m.concat(x, y, 1), ((n, 1024),) * 2))
    out.append(Case("concat first 2x(1024x1024)", lambda m, x, y: m.concat(x, y, 0), ((1024, 1024),) * 2))
    return out


def _dims(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def _size(n: int) -> str:
    return f"{n >> 20} M" if n >= 1 << 20 else f"{n >> 10} K"


# -- calls ---------------------------------------------------------------------------------------------------------

Made = tuple[Call, Callable[[], np.ndarray]]  # the timed call, and a function that returns the result after it


def rlx_calls(case: Case, arrays: Sequence[np.ndarray], threads: int) -> Made:
    g = rlx.Graph("case")
    xs = [g.input(f"x{i}", d, case.dtype) for i, d in enumerate(case.dims)]
    g.set_outputs([case.make(Rlx(), *xs)])
    compiled = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
    for i, a in enumerate(arrays):
        compiled.input_view(f"x{i}")[...] = a
    views = [compiled.input_view(f"x{i}") for i in range(len(arrays))]
    compiled.run_slots(views)
    call = compiled._executable._whole.call  # type: ignore[attr-defined]  # called like the limit
    return lambda keep=compiled: call(), lambda: compiled.outputs_view()[0].numpy()


def numpy_calls(case: Case, arrays: Sequence[np.ndarray], threads: int) -> Made | None:
    if case.dtype != "f32" or threads > 1:
        return None
    call = lambda: case.make(Numpy(), *arrays)  # noqa: E731
    return call, call


def torch_calls(case: Case, arrays: Sequence[np.ndarray], threads: int) -> Made:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.int8}[case.dtype]
    xs = [torch.from_numpy(np.asarray(a, np.float32)).to(dtype) for a in arrays]
    m = Torch()
    return lambda: case.make(m, *xs), lambda: case.make(m, *xs).to(torch.float64).numpy()


def onnxruntime_calls(case: Case, arrays: Sequence[np.ndarray], threads: int, out: np.ndarray) -> Made | None:
    if case.dtype != "f32":
        return None
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads == 1 else "1")
    made = Onnx()
    model = made.model(case.make, case.dims, out.shape, out.dtype)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    held = np.empty(out.shape, np.int64 if out.dtype.kind == "i" else np.float32)
    for i, a in enumerate(arrays):
        bound.bind_ortvalue_input(f"x{i}", ort.OrtValue.ortvalue_from_numpy(a))
    bound.bind_output(session.get_outputs()[0].name, "cpu", 0, held.dtype, held.shape, held.ctypes.data)
    session.run_with_iobinding(bound)
    return lambda keep=(arrays, bound, held): session.run_with_iobinding(bound), lambda: held


def openvino_calls(case: Case, arrays: Sequence[np.ndarray], threads: int, out: np.ndarray) -> Made | None:
    if case.dtype != "f32":
        return None
    import openvino as ov

    core = ov.Core()
    model = core.read_model(Onnx().model(case.make, case.dims, out.shape, out.dtype))
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", options).create_infer_request()
    for i, a in enumerate(arrays):
        request.set_input_tensor(i, ov.Tensor(a, shared_memory=True))
    return lambda keep=arrays: request.infer(), lambda: request.get_output_tensor(0).data


def jax_calls(case: Case, arrays: Sequence[np.ndarray], threads: int) -> Made:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    xs = [jnp.asarray(a) for a in arrays]
    function = jax.jit(lambda *xs: case.make(Jax(jnp), *xs))
    call = lambda: function(*xs).block_until_ready()  # noqa: E731
    return call, lambda: np.asarray(call().astype(jnp.float32))


def limit_calls(reads: int, writes: int, nbytes: int, threads: int) -> dict[str, Call]:
    """Loops over `reads` input and `writes` output streams of `nbytes` each, with plain and with non-temporal stores."""
    kinds = ("plain", "streaming") if writes else ("plain",)
    return {f"limit {kind}": _stream(reads, writes, nbytes, threads, kind == "streaming") for kind in kinds}


def _stream(reads: int, writes: int, nbytes: int, threads: int, streaming: bool) -> Call:
    target, e = host_target(1), Emitter()
    width, unroll = target.vector_bytes, 4 if writes else 8
    ty, step = vector("i32", width // 4), width * unroll
    tasks = 1 if threads == 1 else threads * (6 if nbytes * (reads + writes) >= 1 << 21 else 1)
    part = max(nbytes // tasks // step, 1) * step
    stride = -(-part * tasks // 4096) * 4096 + 64 * 33  # avoids 4K aliasing between streams
    base = e.gep(V("%args", "ptr"), e.bin("mul nsw", V("%task", "i64"), part))
    totals = [V("zeroinitializer", ty)] * (0 if writes else unroll * reads)
    with e.loop(0, part, step, carried=totals) as loop:
        at = [e.gep(e.gep(base, loop.index), s * stride) for s in range(reads + writes)]
        found = [[e.load(ty, e.gep(at[r], n * width), 64) for n in range(unroll)] for r in range(reads)]
        sums = found[0]
        for other in found[1:]:
            sums = [e.bin("add", a, b) for a, b in zip(sums, other)]
        for w in range(writes):
            for n, value in enumerate(sums):
                mark = ", !nontemporal !0" if streaming else ""
                e.do(f"store {value}, {e.gep(at[reads + w], n * width)}, align 64{mark}")
        loop.next = [] if writes else [e.bin("or", t, v) for t, v in zip(loop.carried, [v for vs in found for v in vs])]
    if not writes:
        total = loop.results[0]
        for other in loop.results[1:]:
            total = e.bin("or", total, other)
        e.store(total, e.gep(V("%scratch", "ptr"), 0), 4)
    if streaming:
        e.intrinsic("x86.sse.sfence", suffix=(), returns="void")
    e.do("ret void")
    text = "\n".join([*e.declarations, ATTRIBUTES, e.function("stream", PARAMETERS), "!0 = !{i32 1}"])
    library = jit.load([jit.compile_object(text, target)], ["stream"], target)
    memory, scratch = allocate(stride * (reads + writes)), allocate(128 * threads)
    memory.data[...] = 1
    step = Step(library.address("stream"), memory.address, tasks)
    control = pool.pool(threads).address if threads > 1 else None
    run = pool.Run(ctypes.addressof(step), ctypes.addressof(step) + ctypes.sizeof(step), scratch.address, 128, control)
    call = pool.callable_of(run)
    return lambda keep=(library, memory, scratch, step, run): call()


# -- measuring -----------------------------------------------------------------------------------------------------


def calls_of(case: Case, threads: int, peers: Sequence[str]) -> tuple[dict[str, Call], list[int], np.ndarray]:
    """All timed calls, [read streams, written streams, total bytes], and the result in double precision."""
    arrays = case.arrays()
    exact = np.float64 if arrays[0].size <= 1 << 24 else np.float32  # cases without sums need no more
    wanted = np.asarray(case.make(Numpy(), *(np.asarray(a, exact) for a in arrays)))
    makers: dict[str, Callable[[], Made | None]] = {
        "rlx": lambda: rlx_calls(case, arrays, threads),
        "numpy": lambda: numpy_calls(case, arrays, threads),
        "torch": lambda: torch_calls(case, arrays, threads),
        "onnxruntime": lambda: onnxruntime_calls(case, arrays, threads, wanted),
        "openvino": lambda: openvino_calls(case, arrays, threads, wanted),
        "jax": lambda: jax_calls(case, arrays, threads),
    }
    calls: dict[str, Call] = {}
    scale = float(np.abs(wanted).max())
    for name in ("rlx", *peers):
        made = makers[name]()
        if made is None:
            continue
        call, result = made
        call()
        error = float(np.abs(np.asarray(result(), np.float64) - wanted).max()) / scale
        if not error <= SLACK[case.dtype] and not (name != "rlx" and error <= 2e-3):  # a peer's exp or sum may be less exact
            raise SystemExit(f"{case.name} {case.dtype}: {name} is off by {error:.1e}")
        calls[name] = call
    each = [a.nbytes for a in arrays]
    big = [n for n in each if 2 * n >= max(each)]
    out = wanted.size * (8 if wanted.dtype.kind == "i" else getattr(rlx, case.dtype).itemsize)
    writes = int(2 * out >= max(each))
    nbytes = sum(each) + out
    return calls, [len(big) if out <= max(each) or not writes else 1, writes, nbytes], wanted


def measure(threads: int, rounds: int, peers: Sequence[str], only: str) -> str:
    rows = []
    for case in cases():
        if only and only not in f"{case.name} {case.dtype}":
            continue
        calls, (reads, writes, nbytes), _ = calls_of(case, threads, peers)
        limits = limit_calls(reads, writes, nbytes // (reads + writes), threads)
        times = interleaved({**limits, **calls}, rounds, 0.004, threads)
        limit = min(times[name] for name in limits)
        elements = max(math.prod(d) for d in case.dims)
        cells = [case.name, case.dtype, f"{times['rlx'] * 1e6:.1f}", f"{nbytes / times['rlx'] / 1e9:.1f}"]
        cells += [f"{nbytes / limit / 1e9:.1f}", share(nbytes / times["rlx"], nbytes / limit)]
        cells.append(f"{elements / times['rlx'] / 1e9:.2f}")
        rows.append([*cells, *(f"{times[p] / times['rlx']:.2f}" if p in times else "-" for p in peers)])
        if sys.stderr.isatty():
            print(*rows[-1], file=sys.stderr)
    clock = "thread CPU time" if threads == 1 else "wall time"
    heads = ["case", "dtype", "us", "GB/s", "limit", "share", "Gelem/s", *(f"{p} x" for p in peers)]
    return f"{threads} thread(s); {clock}; peers: their time / rlx's\n{table(heads, rows)}"


def write(text: str) -> None:
    """Put the results in place of those under this benchmark's heading of docs/benchmarks.md; the text before them stays."""
    before, mark, after = DOCUMENT.read_text().partition(MARK)
    words, _, rest = after.partition("```\n")
    _, _, rest = rest.partition("```\n")
    DOCUMENT.write_text(f"{before}{mark or chr(10) + MARK}{words or chr(10) * 2}```\n{text}\n```\n{rest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    args = parser.parse_args()
    peers = () if args.alone else tuple(p for p in PEERS if importlib.util.find_spec(p))
    if inner := os.environ.get("RLX_BENCHMARK_THREADS"):
        peers = tuple(p for p in peers if p != "jax" or inner != "1")  # its own threads compute, and are not measured
        print(measure(int(inner), args.rounds, peers, args.only), flush=True)
        return
    parts = [header("numpy", "llvmlite", *(p for p in peers if p != "numpy"))]
    for threads in args.threads:  # numpy, torch and jax read their thread counts when first imported
        count: Mapping[str, str] = {n: str(threads) for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if threads == 1 else ""
        environment = {
            **os.environ,
            **count,
            "RLX_BENCHMARK_THREADS": str(threads),
            "XLA_FLAGS": one,
            "JAX_PLATFORMS": "cpu",
            "RLX_CACHE": "0",
        }
        done = subprocess.run([sys.executable, *sys.argv], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        parts.append(done.stdout.strip())
        print(parts[-1], flush=True)
    if args.write:
        write("\n\n".join(parts))


if __name__ == "__main__":
    main()

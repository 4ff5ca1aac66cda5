"""Single convolutions, channels last with bias and relu: rlx against torch's oneDNN, and against the machine's own limits.

    python benchmarks/conv.py [--threads 1 2] [--networks resnet50 mobilenet_v2] [--batch 1] [--kinds f32 bf16] [--rounds 7]

The distinct layers of each network, padded by the convolution itself; depthwise layers are marked with dw. torch runs in its best
form: weights in oneDNN's own format, the activation fused. The limit is that of multiply-adds on registers; depthwise layers also
show bytes per second of x and the result, since memory limits them. One thread is measured in CPU time, more in wall time; each
number of threads runs in a separate process.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.measure import Call, dot_call, header, interleaved, share, table
from rlx.ir.ops import conv

WIDTHS = {"f32": 1, "bf16": 2}


class Layer(NamedTuple):
    """A square image of `size`; `outputs` 0: channels are kept apart."""

    size: int
    inputs: int
    outputs: int
    window: int = 1
    stride: int = 1

    def __str__(self) -> str:
        to = f" to {self.outputs}" if self.outputs else " dw"
        stride = f" / {self.stride}" if self.stride > 1 else ""
        return f"{self.window}x{self.window}{stride}, {self.inputs}{to}, {self.size}"


NETWORKS = {
    "resnet50": [
        Layer(224, 3, 64, 7, 2), Layer(56, 64, 64), Layer(56, 64, 64, 3), Layer(56, 64, 256), Layer(56, 256, 64),
        Layer(56, 256, 128), Layer(56, 128, 128, 3, 2), Layer(56, 256, 512, 1, 2), Layer(28, 128, 512), Layer(28, 512, 128),
        Layer(28, 128, 128, 3), Layer(28, 512, 256), Layer(28, 256, 256, 3, 2), Layer(28, 512, 1024, 1, 2), Layer(14, 256, 1024),
        Layer(14, 1024, 256), Layer(14, 256, 256, 3), Layer(14, 1024, 512), Layer(14, 512, 512, 3, 2),
        Layer(14, 1024, 2048, 1, 2), Layer(7, 512, 2048), Layer(7, 2048, 512), Layer(7, 512, 512, 3),
    ],
    "mobilenet_v2": [
        Layer(224, 3, 32, 3, 2), Layer(112, 32, 0, 3), Layer(112, 32, 16), Layer(112, 16, 96), Layer(112, 96, 0, 3, 2),
        Layer(56, 96, 24), Layer(56, 24, 144), Layer(56, 144, 0, 3), Layer(56, 144, 24), Layer(56, 144, 0, 3, 2),
        Layer(28, 144, 32), Layer(28, 32, 192), Layer(28, 192, 0, 3), Layer(28, 192, 32), Layer(28, 192, 0, 3, 2),
        Layer(14, 192, 64), Layer(14, 64, 384), Layer(14, 384, 0, 3), Layer(14, 384, 96), Layer(14, 96, 576),
        Layer(14, 576, 0, 3), Layer(14, 576, 0, 3, 2), Layer(7, 576, 160), Layer(7, 160, 960), Layer(7, 960, 0, 3),
        Layer(7, 960, 320), Layer(7, 320, 1280),
    ],
}  # fmt: skip


class Problem:
    """relu(conv(x, w) + b), random, checked against torch in f64."""

    def __init__(self, layer: Layer, batch: int, kind: str) -> None:
        rng, dtype = np.random.default_rng(0), rlx.as_dtype(kind).numpy
        self.layer, self.kind, (size, inputs, outputs, window, self.stride) = layer, kind, layer
        self.groups, self.pad = (1, window // 2) if outputs else (inputs, window // 2)
        inner = inputs // self.groups
        self.x = rng.standard_normal((batch, size, size, inputs), np.float32).astype(dtype)
        w = rng.standard_normal((window, window, inner, outputs or inputs), np.float32) / np.float32(window * inner**0.5)
        self.w, self.b = w.astype(dtype), rng.standard_normal(outputs or inputs, np.float32).astype(dtype)
        side = (size - 1) // self.stride + 1
        self.elements = batch * side * side * (outputs or inputs)
        self.operations = 2.0 * self.elements * window * window * inner
        self.bytes = (self.x.size + self.elements) * self.x.itemsize

    def check(self, got: np.ndarray) -> None:
        import torch

        x, w, b = (torch.from_numpy(a.astype(np.float64)) for a in (self.x, self.w, self.b))
        x, w = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)
        want = torch.conv2d(x, w, b, self.stride, self.pad, 1, self.groups).relu().permute(0, 2, 3, 1).numpy()
        error, allowed = np.abs(got.astype(np.float64) - want), 1e-4 if self.kind == "f32" else 2.0**-7 * (1 + np.abs(want))
        if not (error <= allowed).all():
            raise SystemExit(f"{self.kind} {self.layer} is wrong by {error.max()}")


def rlx_call(p: Problem, threads: int) -> Call:
    g = rlx.Graph("conv")
    x, w, b = g.input("x", p.x.shape, p.kind), g.param("w", p.w.shape, p.kind), g.param("b", p.b.shape, p.kind)
    g.set_outputs([rlx.relu(conv(x, w, b, strides=p.stride, low=p.pad, high=p.pad, groups=p.groups, channels_last=True))])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=threads))
    compiled.set_param("w", p.w)
    compiled.set_param("b", p.b)
    if importlib.util.find_spec("torch"):
        p.check(compiled.run({"x": p.x})[0])
    slot = [compiled.input_view("x")]
    slot[0][...] = p.x
    return lambda: compiled.run_slots(slot)


def torch_call(p: Problem, threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    x, w, b = (torch.from_numpy(a.astype(np.float32)).to(getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[p.kind]))
               for a in (p.x, p.w, p.b))  # fmt: skip
    x, pads, strides = x.permute(0, 3, 1, 2), [p.pad, p.pad], [p.stride, p.stride]
    w = w.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    packed = torch.ops.mkldnn._reorder_convolution_weight(w, pads, strides, [1, 1], p.groups, list(x.shape))
    run = torch.ops.mkldnn._convolution_pointwise.default
    return lambda: run(x, packed, b, pads, strides, [1, 1], p.groups, "relu", [], "")


def rows_of(layers: list[Layer], kind: str, batch: int, threads: int, rounds: int, peers: bool) -> list[list[str]]:
    rows, (peak, per_call) = [], dot_call(WIDTHS[kind])
    for layer in layers:
        p = Problem(layer, batch, kind)
        calls: dict[str, Call] = {"peak": peak, "rlx": rlx_call(p, threads)}
        if peers:
            calls["torch"] = torch_call(p, threads)
        times = interleaved(calls, rounds, threads=threads)
        rate, limit = p.operations / times["rlx"], per_call / times["peak"] * threads
        ratio = f"{times['torch'] / times['rlx']:.2f}" if peers else "-"
        moved = "" if layer.outputs else f"{p.bytes / times['rlx'] / 1e9:.0f}"
        rows.append([str(layer), f"{1e6 * times['rlx']:.0f}", f"{rate / 1e9:.0f}", share(rate, limit), moved, ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--kinds", nargs="+", choices=WIDTHS, default=["f32"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="without torch")
    args = parser.parse_args()
    if len(args.threads) > 1:  # pools of the peers keep their size: a process for each
        given = [f"--{name}" for name in ("alone",) if getattr(args, name)]
        given += ["--networks", *args.networks, "--kinds", *args.kinds, "--batch", str(args.batch), "--rounds", str(args.rounds)]
        for n in args.threads:
            subprocess.run([sys.executable, __file__, *given, "--threads", str(n)], check=True)
        return
    peers = not args.alone and importlib.util.find_spec("torch") is not None
    print(header(*(["torch"] if peers else []), "numpy"))
    for network in args.networks:
        for kind in args.kinds:
            rows = rows_of(NETWORKS[network], kind, args.batch, args.threads[0], args.rounds, peers)
            heads = ["window, channels, image", "µs", "GFLOP/s", "of the limit", "GB/s", "torch / rlx"]
            print(f"\n{network}, {kind}, batch {args.batch}, threads {args.threads[0]}\n\n{table(heads, rows)}", flush=True)


if __name__ == "__main__":
    main()

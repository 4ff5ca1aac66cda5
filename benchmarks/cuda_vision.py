"""Networks for images with random weights on one GPU: rlx beside torch.compile (in one CUDA graph) and torch eager.

    python benchmarks/cuda_vision.py [--models resnet50] [--shapes 8x224] [--dtypes bf16 f32] [--engines default] [--kernels]

The network is torch's; rlx reads the ONNX model that torch exports of it. torch has channels last, and in bf16 the whole network,
where rlx rounds operands of products, and images that convolutions read (precision="bf16"). Times are medians of wall clock per
call, the engines alternate. `replay` is rlx's CUDA graph alone, `rlx` copies the image and the result as well; torch's inputs
stay on the device. The limit is the time of the multiply-adds, at the rate of torch's product of 8192 (bf16; f32 without TF32) in
this run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_measure import header, interleaved, print_kernels, replay, torch_engines
from benchmarks.vision import SHAPES, TOLERANCE, Task

SIZE = 8192


def calls_of(task: Task, engines: list[str]) -> tuple[dict[str, Callable[[], object]], Any, float]:
    """The timed calls, the compiled program, and rlx's largest difference from torch in f32."""
    import torch

    options = rlx.CompileOptions(precision=task.precision)  # type: ignore[arg-type]
    compiled = rlx.Session("cuda").compile(rlx.from_onnx(task.exported), options)
    compiled.run_slots([task.image])
    image, network = torch.from_numpy(task.image).cuda(), task.network.cuda()
    wanted = network(image)
    off = float((torch.from_numpy(compiled.outputs_view()[0].numpy()) - wanted.cpu()).abs().max())
    assert off < TOLERANCE[task.precision], f"{task}: off by {off}"
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[task.precision]
    how = {"dtype": dtype, "memory_format": torch.channels_last}
    image, network = image.to(**how), network.to(**how)
    calls = {"replay": replay(compiled), "rlx": lambda: compiled.run_slots([task.image])}
    return calls | torch_engines(network, (image,), engines), compiled, off


def rate(precision: str) -> float:
    """Operations per second of a large product."""
    import torch

    x = torch.randn(SIZE, SIZE, device="cuda", dtype={"f32": torch.float32, "bf16": torch.bfloat16}[precision])
    return 2 * SIZE**3 / interleaved({"mm": lambda: x @ x}, rounds=5)["mm"]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet-v2"], choices=SHAPES)
    parser.add_argument("--shapes", nargs="+", default=["1x224", "8x224"])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"], choices=("bf16", "f32"))
    parser.add_argument("--engines", nargs="*", default=["torch.compile", "eager"], choices=("torch.compile", "default", "eager"))
    parser.add_argument("--kernels", action="store_true", help="the kernels of each program with their times")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    about = header()
    rates = {dtype: rate(dtype) for dtype in args.dtypes}
    print(about, ", ".join(f"{dtype} {r / 1e12:.0f} TFLOP/s" for dtype, r in rates.items()), flush=True)
    for name, shape, dtype in product(args.models, args.shapes, args.dtypes):
        batch, size = map(int, shape.split("x"))
        task = Task(f"{name} {dtype}", batch, size, 0)
        least = task.flops / rates[dtype]
        with torch.inference_mode():
            calls, compiled, off = calls_of(task, args.engines)
            times = interleaved(calls)
        text = ", ".join(f"{engine} {1e3 * t:.3f} ms ({t / times['replay']:.2f})" for engine, t in times.items())
        share = f"limit {1e3 * least:.3f} ms ({least / times['replay']:.0%})"
        print(f"{name} {shape} {dtype}: {text}; {share}; off by {off:.0e}", flush=True)
        if args.kernels:
            print_kernels(compiled)


if __name__ == "__main__":
    main()

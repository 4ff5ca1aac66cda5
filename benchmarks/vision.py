"""Networks for images on rlx and every installed peer, from one ONNX file that torch exports.

    python benchmarks/vision.py [--model resnet50 unet] [--precision f32 bf16] [--threads 1 2] [--shapes 1x224] [--write]

Shapes are batch × height (and width). Engines run and alternate as in benchmarks/encoder.py, and every result is compared with
rlx's; torch runs the network itself. The limit is the time of the network's multiply-adds, counted by torch. int8 is as in
benchmarks/encoder.py, with convolutions; rlx also runs the Q/DQ model of the peers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.encoder import Workload, main
from benchmarks.encoder_peers import Run, onnx_session, openvino_request

SHAPES = dict.fromkeys(("resnet50", "mobilenet-v2", "convnext-tiny", "vit-b16"), ("1x224", "8x224")) | {
    "unet": ("1x256", "8x256"), "resnet18": ("1x224",), "mobilenet-v3": ("1x224",), "efficientnet-b0": ("1x224",),
    "detector": ("1x640",),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One network ("resnet50 bf16": in that precision) at one shape."""

    model: str
    batch: int
    size: int
    threads: int

    @property
    def name(self) -> str:
        return self.model.split()[0]

    @property
    def precision(self) -> str:
        return (self.model.split() + ["f32"])[1]

    @cached_property
    def network(self) -> Any:
        from benchmarks.vision_models import MODELS

        return MODELS[self.name](**({"size": self.size} if self.name == "vit-b16" else {}))

    @cached_property
    def image(self) -> np.ndarray:
        return np.random.default_rng(0).standard_normal((self.batch, 3, self.size, self.size), np.float32)

    @property
    def flops(self) -> float:
        """Multiplies and adds of convolutions and products."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            self.network(torch.from_numpy(self.image))
        return float(counter.get_total_flops())

    @property
    def given(self) -> Any:
        """The ONNX model for engines that run it in this precision: int8 needs one with quantised convolutions and products."""
        from benchmarks.encoder_onnx import quantised

        made = self.exported
        return quantised(made, {"image": self.image}, ("Conv", "Gemm", "MatMul")) if self.precision == "int8" else made

    @cached_property
    def exported(self) -> Any:
        """The ONNX model, with its weights inside. The file is kept for other processes."""
        import onnx
        import torch

        path = Path(tempfile.gettempdir()) / f"rlx-vision-{self.name}-{self.batch}x{self.size}-{torch.__version__}.onnx"
        if not path.exists():
            image = torch.from_numpy(self.image)
            made = path.with_suffix(f".{os.getpid()}")
            how = {"input_names": ["image"], "dynamo": True, "external_data": False, "verbose": False}
            torch.onnx.export(self.network, (image,), made, **how)
            made.rename(path)
        return onnx.load(path)


def run_rlx(task: Task, given: bool = False) -> Run:
    import rlx

    graph, precision = rlx.from_onnx(task.given if given else task.exported), "f32" if given else task.precision
    compiled = rlx.Session().compile(graph, rlx.CompileOptions(threads=task.threads, precision=precision))
    inputs = [compiled.input_view("image")]
    inputs[0][...] = task.image

    def run() -> np.ndarray:
        compiled.run_slots(inputs)
        return compiled.outputs_view()[0].numpy()

    return run


def run_onnx(task: Task) -> Run:
    found = task.given
    (first, *_) = found.graph.output
    dims = tuple(d.dim_value for d in first.type.tensor_type.shape.dim)
    return onnx_session(found, task.threads, {"image": task.image}, (first.name, dims))


def run_openvino(task: Task) -> Run:
    return openvino_request(task.given, task.threads, [task.image], "f32" if task.precision == "f32" else "bf16")


def run_torch(task: Task) -> Run:
    import torch

    torch.set_num_threads(task.threads)
    network = task.network.to(memory_format=torch.channels_last)
    image = torch.from_numpy(task.image).to(memory_format=torch.channels_last)
    if task.precision == "bf16":
        network, image = network.bfloat16(), image.bfloat16()

    def run() -> np.ndarray:
        with torch.inference_mode():
            out = network(image)
            return (out[0] if isinstance(out, tuple) else out).float().numpy()

    return run


RUNNERS: dict[str, Callable[[Task], Run]] = {
    "rlx": run_rlx,
    "rlx, Q/DQ": lambda task: run_rlx(task, given=True),
    "ONNX Runtime": run_onnx,
    "OpenVINO": run_openvino,
    "torch": run_torch,
}
ENGINES = {
    "f32": ("rlx", "ONNX Runtime", "OpenVINO", "torch"), "bf16": ("rlx", "OpenVINO", "torch"),
    "int8": ("rlx", "rlx, Q/DQ", "ONNX Runtime", "OpenVINO"),
}  # fmt: skip
TOLERANCE = {"f32": 1e-3, "bf16": 0.3, "int8": 1.0}  # of results up to 10; int8 has one scale for all activations of a tensor

if __name__ == "__main__":
    main(Workload(__file__, "Networks for images, `make bench-cpu`", SHAPES, RUNNERS, Task, ENGINES, TOLERANCE), __doc__ or "")

"""Networks for images, exported by torch to ONNX: the results of torch, and few steps."""

from __future__ import annotations

import io
import warnings
from functools import cache

import numpy as np
import onnx
import pytest
import torch

import rlx
from benchmarks.vision_models import MODELS, SMALL
from rlx.backends import get
from rlx.compiler import lower
from tests.onnx_quantised import in_float64, quantised

STEPS = {"detector": 2.5, "unet": 2.2}  # at most so many per product, where 2 are too few: borders of padded images are steps
MOVES = frozenset({"transpose", "reshape", "copy"})


@cache
def exported(name: str, batch: int, dynamo: bool) -> tuple[onnx.ModelProto, np.ndarray, list[np.ndarray]]:
    """The model, an image, and torch's results."""
    sizes, size = SMALL[name]
    network = MODELS[name](**sizes)
    image = torch.from_numpy(np.random.default_rng(batch).standard_normal((batch, 3, size, size), np.float32))
    file = io.BytesIO()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = network(image)
        torch.onnx.export(network, (image,), file, input_names=["image"], dynamo=dynamo, external_data=False, verbose=False)
    results = found if isinstance(found, tuple) else (found,)
    return onnx.load_from_string(file.getvalue()), image.numpy(), [r.numpy() for r in results]


@pytest.mark.parametrize(("name", "batch"), [(name, 1 + i % 2) for i, name in enumerate(MODELS)])
def test_networks_have_the_results_of_torch(name: str, batch: int) -> None:
    model, image, want = exported(name, batch, dynamo=False)
    graph = rlx.from_onnx(model)
    found = rlx.Session("cpu").compile(graph, rlx.CompileOptions(threads=2)).run({"image": image})
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    steps = lower(graph, get("cpu").target(), rlx.CompileOptions()).steps
    interleaved = sum(node.op_type == "ConvTranspose" for node in model.graph.node)  # its phases
    moved = sum(MOVES.issuperset(s.kernel.origin) for s in steps) - interleaved
    assert moved <= (name == "unet"), "a tensor is copied to another layout"
    products = sum(node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") for node in model.graph.node)
    assert len(steps) <= STEPS.get(name, 2) * products, [s.kernel.name for s in steps]


def test_the_newer_exporter_gives_the_same_results() -> None:
    """torch.export's graphs: other operators for means, shapes and attention."""
    for name in ("mobilenet-v3", "vit-b16"):
        model, image, want = exported(name, 2, dynamo=True)
        (found,) = rlx.Session("cpu").compile(rlx.from_onnx(model)).run({"image": image})
        np.testing.assert_allclose(found, want[0], rtol=1e-4, atol=1e-5 * np.abs(want[0]).max())


@pytest.mark.parametrize(("name", "batch"), [("resnet18", 1), ("resnet50", 2)])
def test_a_quantised_resnet_is_computed_on_integers(name: str, batch: int) -> None:
    model, image, floats = exported(name, batch, dynamo=False)
    proto = quantised(model, image)
    want = in_float64(proto, image)
    graph = rlx.from_onnx(proto)
    found = rlx.Session("cpu").compile(graph).run({"image": image})[0]
    np.testing.assert_allclose(found, want, atol=np.abs(want).max() / 255)  # a sum may be rounded to the next integer
    assert np.abs(found - floats[0]).max() < 0.15 * np.abs(floats[0]).max()
    products = [node for node in graph.nodes() if node.op.name in ("conv", "matmul", "int8_matmul")]
    assert len(products) == sum(node.op_type in ("Conv", "Gemm") for node in proto.graph.node)
    assert all(x.dtype == kind for node in products for x, kind in zip(node.inputs, (rlx.u8, rlx.i8)))

"""rlx as a backend of ONNX: `prepare`, `run_model`, `run_node`, `supports_device`, as onnx.backend.base has them.

    import rlx.frontends.onnx.backend as backend
    outputs = backend.run_model(onnx.load("model.onnx"), [x])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend import base

from rlx.errors import BindingError, DeviceError, known
from rlx.frontends.onnx.model import OnnxModel
from rlx.runtime import Session


class RlxRep(base.BackendRep):
    """A prepared model."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, for inputs by position or by name."""
        if isinstance(inputs, Mapping):
            return tuple(self.model.run(inputs).values())
        return tuple(self.model.run(inputs if isinstance(inputs, (list, tuple)) else [inputs]))


class RlxBackend(base.Backend):
    """The backend as a class, as onnx.backend.test.runner takes it."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> RlxRep:
        """A model that is ready to run; it compiles when it first does. `kwargs` are not used."""
        return RlxRep(OnnxModel(model, device=_device(device)))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """The results of one node. `opset_version`: of the node's domain; the newest by default."""
        names = [n for n in node.input if n]
        if not isinstance(inputs, Mapping) and len(inputs) > len(names):
            raise BindingError(f"node {node.op_type} has {len(names)} operands ({known(names)}), got {len(inputs)} by position")
        given = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, inputs))
        makes = onnx.helper.make_tensor_value_info
        infos = [makes(n, _code(np.asarray(x)), np.shape(x)) for n, x in given.items()]
        outs = [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n]
        for out, (dtype, _) in zip(outs, outputs_info or ()):
            out.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        version = kwargs.get("opset_version") or onnx.defs.onnx_opset_version()
        opsets = [onnx.helper.make_opsetid(node.domain, version)]
        graph = onnx.helper.make_graph([node], node.op_type, infos, outs)
        return cls.run_model(onnx.helper.make_model(graph, opset_imports=opsets), given, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """True for CPU, and for CUDA where a GPU can be used."""
        try:
            return isinstance(device, str) and bool(Session(_device(device)))
        except DeviceError:
            return False


def _device(name: str) -> str:
    """rlx's name of a device: CUDA:1 is cuda:1."""
    return name.lower()


def _code(x: np.ndarray) -> int:
    return onnx.helper.np_dtype_to_tensor_dtype(x.dtype)


prepare, run_model, run_node = RlxBackend.prepare, RlxBackend.run_model, RlxBackend.run_node
supports_device = RlxBackend.supports_device

__all__ = ["RlxBackend", "RlxRep", "prepare", "run_model", "run_node", "supports_device"]

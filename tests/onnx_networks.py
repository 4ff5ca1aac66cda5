"""Language and speech networks of transformers as ONNX: exported by torch, and written with ONNX Runtime's operators."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"
DIMS = {"input_ids": "rows", "attention_mask": "total", "position_ids": "rows"}  # dim 1 of these
LLAMA = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 40,
    "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}  # fmt: skip


def _settled(network: Any) -> Any:
    """Weights of every kind random, so that a wrong one shows."""
    torch.manual_seed(1)
    for name, p in network.named_parameters():
        torch.nn.init.uniform_(p, 0.7, 1.3) if "norm.weight" in name else torch.nn.init.normal_(p, 0.0, 0.15)
    return network.eval().requires_grad_(False)


@cache
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _settled(LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa")))


@cache
def whisper() -> Any:
    from transformers import WhisperConfig, WhisperModel

    return _settled(WhisperModel(WhisperConfig(**WHISPER, attn_implementation="sdpa")))


# -- exported ------------------------------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = whisper().encoder

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        return self.network(mel, return_dict=False)[0]


def encoder(dynamo: bool) -> bytes:
    return exported(Encoder(), {"mel": torch.randn(1, 16, 40)}, ["hidden"], dynamo=dynamo)


class Decoder(torch.nn.Module):
    """A decoder whose keys and values of the past are operands, and those of past and present results."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.layers = network, network.config.num_hidden_layers

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, at: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache, EncoderDecoderCache

        image, past = rest[: -2 * self.layers], rest[-2 * self.layers :]
        cache = DynamicCache()
        for i in range(self.layers):
            cache.update(past[2 * i], past[2 * i + 1], i)
        own: Any = {"attention_mask": mask, "position_ids": at, "use_cache": True, "return_dict": False, "past_key_values": cache}
        if image:
            own |= {"encoder_hidden_states": image[0], "past_key_values": EncoderDecoderCache(cache, DynamicCache())}
        out = self.network(ids, **own)[0]
        return out, *(x for layer in cache.layers for x in (layer.keys, layer.values))


def exported(network: torch.nn.Module, operands: dict[str, torch.Tensor], results: Sequence[str], **how: Any) -> bytes:
    """The ONNX file of a network."""
    file = io.BytesIO()
    names = {"input_names": list(operands), "output_names": list(results)}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, tuple(operands.values()), file, **names, external_data=False, verbose=False, **how)
    return file.getvalue()


def decoder(network: Any, width: int, image: torch.Tensor | None = None) -> bytes:
    """`network` with past_key_values.0.key and so on: `width` heads of 16 elements."""
    kinds = [f"{i}.{kind}" for i in range(network.config.num_hidden_layers) for kind in ("key", "value")]
    whole = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
    whole |= {"position_ids": torch.arange(3, 5)[None]} | ({} if image is None else {"encoder_hidden_states": image})
    whole |= {f"past_key_values.{kind}": torch.randn(1, width, 3, 16) for kind in kinds}
    axes = {name: {0: "batch", 2: "past"} for name in whole if name.startswith("past")}
    axes |= {name: {0: "batch", 1: dim} for name, dim in DIMS.items()}
    return exported(Decoder(network), whole, ["hidden", *(f"present.{kind}" for kind in kinds)], dynamo=False, dynamic_axes=axes)


# -- written with ONNX Runtime's operators -------------------------------------------------------------------------------


def blocked(w: np.ndarray, bits: int = 4, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Rows as integers around 0 [n, k], and an f16 scale for each block of a row, as f32 [n, k / block]."""
    groups = w.reshape(len(w), -1, block)
    scales = (np.abs(groups).max(-1) / ((1 << bits - 1) - 1)).astype(np.float16).astype(np.float32)
    return np.rint(groups / scales[..., None]).reshape(w.shape).astype(np.int8), scales


def nibbles(q: np.ndarray, zero: int = 8) -> np.ndarray:
    """Integers from -8 to 7, plus `zero`, two in a byte, the first in the low bits."""
    raw = (q + zero).view(np.uint8) & 15
    return raw[..., 0::2] | raw[..., 1::2] << 4


class GenAI:
    """A Llama as onnxruntime-genai writes it. `weights`: "f32", "nbits" (MatMulNBits and GatherBlockQuantized, 4 bits), or "int4"
    (blocked DequantizeLinear of ONNX). `values` has the weights that its integers stand for."""

    def __init__(self, network: Any, weights: str = "f32") -> None:
        self.config, self.weights, self.values = network.config, weights, dict(network.state_dict())
        self.nodes: list[onnx.NodeProto] = []
        self.consts: dict[str, Any] = {}

    def node(self, op: str, inputs: Sequence[str], name: str = "", results: Sequence[str] = (), **attrs: Any) -> str:
        domain = MS if op in RUNTIME else ""
        made = list(results) or [name or f"v{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), made, domain=domain, **attrs))
        return made[0]

    def const(self, name: str, value: Any) -> str:
        self.consts[name] = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        return name

    def packed(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        w = self.values[name].numpy()
        q, scales = blocked(w)
        self.values[name] = torch.from_numpy((q.reshape(*scales.shape, -1) * scales[..., None]).reshape(w.shape))
        return q, scales

    def product(self, x: str, *names: str) -> str:
        """x times the transposes of matrices, one behind the other."""
        name = names[0]
        if self.weights == "f32":
            w = np.concatenate([self.values[n].numpy() for n in names])
            return self.node("MatMul", [x, self.const(name, np.ascontiguousarray(w.T))])
        q, scales = (np.concatenate(parts) for parts in zip(*map(self.packed, names)))
        if self.weights == "int4":
            narrow = helper.make_tensor(name, TensorProto.INT4, q.T.shape, nibbles(q.T.reshape(-1), 0).tobytes(), raw=True)
            scale = self.const(f"{name}.s", np.ascontiguousarray(scales.T))
            w = self.node("DequantizeLinear", [self.const(name, narrow), scale], axis=0, block_size=32)
            return self.node("MatMul", [x, w])
        operands = [x, self.const(name, nibbles(q.reshape(*scales.shape, -1))), self.const(f"{name}.s", scales.reshape(-1))]
        return self.node("MatMulNBits", operands, K=q.shape[1], N=len(q), bits=4, block_size=32)

    def embedded(self, name: str) -> str:
        if self.weights == "f32":
            return self.node("Gather", [self.const(name, self.values[name].numpy()), "input_ids"])
        q, scales = self.packed(name)
        if self.weights == "int4":
            narrow = helper.make_tensor(name, TensorProto.INT4, q.shape, nibbles(q.reshape(-1), 0).tobytes(), raw=True)
        else:
            narrow = nibbles(q)
        operands = [self.const(name, narrow), "input_ids", self.const(f"{name}.s", scales)]
        return self.node("GatherBlockQuantized", operands, bits=4, block_size=32, quantize_axis=1)

    def scale(self, name: str) -> str:
        return self.const(name, self.values[name].numpy())

    def model(self) -> onnx.ModelProto:
        c, eps = self.config, self.config.rms_norm_eps
        count = self.node("ReduceSum", ["attention_mask", self.const("one", np.int64([1]))])
        last = self.node("Cast", [self.node("Sub", [count, "one"])], to=TensorProto.INT32)
        total = self.node("Gather", [self.node("Shape", ["attention_mask"]), self.const("at", np.int64(1))])
        total = self.node("Cast", [total], to=TensorProto.INT32)
        angles = np.arange(c.max_position_embeddings)[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
        tables = [self.const("cos", np.cos(angles).astype("f4")), self.const("sin", np.sin(angles).astype("f4"))]
        x = self.embedded("model.embed_tokens.weight")
        added = ""
        for i in range(c.num_hidden_layers):
            name = f"model.layers.{i}"
            x, h = self.norm(x, added, f"{name}.input_layernorm.weight", eps)
            inside = bool(i % 2)  # rotated by the attention operator, or before it
            if inside:
                qkv = [self.product(h, *(f"{name}.self_attn.{k}_proj.weight" for k in "qkv")), "", ""]
            else:
                qkv = [self.product(h, f"{name}.self_attn.{k}_proj.weight") for k in "qkv"]
                qkv[:2] = (self.node("RotaryEmbedding", [part, "position_ids", *tables]) for part in qkv[:2])
            past, present = ([f"{kind}.{i}.{own}" for own in ("key", "value")] for kind in ("past_key_values", "present"))
            operands = [*qkv, *past, last, total, *(tables if inside else [])]
            facts = {"num_heads": c.num_attention_heads, "kv_num_heads": c.num_key_value_heads, "do_rotary": int(inside)}
            h = self.node("GroupQueryAttention", operands, results=[f"attended{i}", *present], **facts)
            added = self.product(h, f"{name}.self_attn.o_proj.weight")
            x, h = self.norm(x, added, f"{name}.post_attention_layernorm.weight", eps)
            gate, up = (self.product(h, f"{name}.mlp.{k}_proj.weight") for k in ("gate", "up"))
            gate = self.node("Mul", [gate, self.node("Sigmoid", [gate])])
            added = self.product(self.node("Mul", [gate, up]), f"{name}.mlp.down_proj.weight")
        _, h = self.norm(x, added, "model.norm.weight", eps)
        self.node("Identity", [self.product(h, "lm_head.weight")], "logits")
        return self.built()

    def norm(self, x: str, added: str, scale: str, eps: float) -> tuple[str, str]:
        """The sum of x and `added`, and its norm."""
        if not added:
            return x, self.node("SimplifiedLayerNormalization", [x, self.scale(scale)], axis=-1, epsilon=eps, stash_type=1)
        results, operands = [f"n{len(self.nodes)}", "", "", f"s{len(self.nodes)}"], [x, added, self.scale(scale)]
        return results[3], self.node("SkipSimplifiedLayerNormalization", operands, results=results, epsilon=eps)

    def built(self) -> onnx.ModelProto:
        c, info = self.config, helper.make_tensor_value_info
        kinds = [f"{i}.{kind}" for i in range(c.num_hidden_layers) for kind in ("key", "value")]
        cache = ["batch", c.num_key_value_heads, "past", 16]
        inputs = [info(name, TensorProto.INT64, ["batch", dim]) for name, dim in DIMS.items()]
        inputs += [info(f"past_key_values.{kind}", TensorProto.FLOAT, cache) for kind in kinds]
        outputs = [info("logits", TensorProto.FLOAT, ["batch", "rows", c.vocab_size])]
        outputs += [info(f"present.{kind}", TensorProto.FLOAT, None) for kind in kinds]
        inits = list(self.consts.values())
        for name, tensor in self.consts.items():
            tensor.name = name
        graph = helper.make_graph(self.nodes, "llama", inputs, outputs, inits)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)], ir_version=10)


RUNTIME = {
    "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "RotaryEmbedding", "SkipSimplifiedLayerNormalization",
}  # fmt: skip

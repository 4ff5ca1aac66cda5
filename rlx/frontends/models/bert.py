"""BERT-type encoders with pooling: the sentence-embedding networks of Hugging Face and sentence-transformers folders.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018); pooling as in Reimers & Gurevych,
"Sentence-BERT" (2019). Params have the names of the Hugging Face checkpoint. Activations are 2-D, [batch * length, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import rlx.ir.ops as ops
from rlx.errors import CorruptFileError, ModelError, known
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Value
from rlx.ir.ops.rules import static_dim
from rlx.ir.shape import DimLike
from rlx.records import record

MOST_LAYERS = 1000  # of a configuration that can be meant
ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "gelu": lambda x: ops.gelu(x),
    "gelu_new": lambda x: ops.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, approximate="tanh"),
    "relu": lambda x: ops.relu(x),
    "silu": lambda x: ops.silu(x),
    "swish": lambda x: ops.silu(x),
}
POOLINGS = ("mean", "cls")


@record
class BertConfig:
    """Sizes and options, named as in config.json; `pooling` and `normalize` come from modules.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    pad_token_id: int = 0
    pooling: str = "mean"
    normalize: bool = False

    def __post_init__(self) -> None:
        for name in [f.name for f in fields(self) if f.type == "int" and f.name != "pad_token_id"]:
            value = getattr(self, name)
            most = MOST_LAYERS if name == "num_hidden_layers" else 2**31 - 1
            if type(value) is not int or not 1 <= value <= most:
                raise CorruptFileError(f"config.json: {name} must be a positive size, at most {most}, got {value!r:.80}")
        if type(pad := self.pad_token_id) is not int or not 0 <= pad < self.vocab_size:
            raise CorruptFileError(f"config.json: pad_token_id must be an id below vocab_size={self.vocab_size}, got {pad!r}")
        if self.hidden_size % self.num_attention_heads:
            raise CorruptFileError(
                f"config.json: hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported; supported: {known(ACTIVATIONS)}")
        if self.pooling not in POOLINGS:
            raise ModelError(f"pooling {self.pooling!r} is not supported; supported: {known(POOLINGS)}")

    @staticmethod
    def parse(config: dict[str, Any], pooling: str = "mean", normalize: bool = False) -> BertConfig:
        """From the contents of config.json; keys without effect here are ignored."""
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ModelError(f"position_embedding_type {config['position_embedding_type']!r} is not supported, only 'absolute'")
        if config.get("is_decoder"):
            raise ModelError("a BERT decoder (is_decoder) is not supported, only encoders")
        given = {f.name: config[f.name] for f in fields(BertConfig) if f.name in config}
        if given.get("pad_token_id", 0) is None:  # no padding token: any id works, since padding is masked
            del given["pad_token_id"]
        try:
            return BertConfig(**{**given, "pooling": pooling, "normalize": normalize})
        except TypeError as e:
            raise CorruptFileError(f"config.json: {e}") from None

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


def build(config: BertConfig, batch: DimLike, length: DimLike, dtype: str = "f32") -> Graph:
    """input_ids i32 [batch, length], attention_mask bool [batch, length] (True: a token, False: padding) ->
    embedding f32 [batch, hidden]. Token types are all 0. Either size may be a named dim. `dtype`: of the params, and of the
    activations up to the pooling."""
    g = Graph(f"bert_{batch}x{length}")
    hidden = config.hidden_size
    ids = g.input("input_ids", (batch, length), "i32")
    mask = g.input("attention_mask", (batch, length), "bool")

    sizes = {"word": config.vocab_size, "position": config.max_position_embeddings, "token_type": config.type_vocab_size}
    words, positions, types = (g.param(f"embeddings.{n}_embeddings.weight", (m, hidden), dtype) for n, m in sizes.items())
    place = _first(positions, length) + _first(types, 1)  # [length, hidden]; depends on params only, so computed once
    x = ops.embedding(words, ids) + place  # [batch, length, hidden]
    x = _norm(g, config, "embeddings.LayerNorm", x.reshape(batch * length, hidden))

    allowed = mask.reshape(batch, 1, 1, length)  # every query may look at every token of its own row
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        attended = _linear(g, f"{layer}.attention.output.dense", _attention(g, config, layer, x, allowed), hidden)
        x = _norm(g, config, f"{layer}.attention.output.LayerNorm", attended + x)
        inner = ACTIVATIONS[config.hidden_act](_linear(g, f"{layer}.intermediate.dense", x, config.intermediate_size))
        x = _norm(g, config, f"{layer}.output.LayerNorm", _linear(g, f"{layer}.output.dense", inner, hidden) + x)

    pooled = pool(x.reshape(batch, length, hidden), mask, config.pooling, config.normalize)
    g.set_outputs([pooled], names=["embedding"])
    return g


def _attention(g: Graph, config: BertConfig, layer: str, x: Value, allowed: Value) -> Value:
    """Self-attention before its output projection, [tokens, hidden] -> [tokens, hidden]. One contraction computes q, k and v."""
    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
    batch, _, _, length = allowed.dims
    parts = [_params(g, f"{layer}.attention.self.{name}", hidden, hidden, x.dtype) for name in ("query", "key", "value")]
    weight = ops.concat(*(w for w, _ in parts), axis=0)  # [3 * hidden, hidden]
    bias = ops.concat(*(b for _, b in parts), axis=0)  # [3 * hidden]
    qkv = ops.linear(x, weight.T, bias)  # [tokens, 3 * hidden]
    q, k, v = (
        part.reshape(batch, length, heads, size).transpose(0, 2, 1, 3) for part in ops.split(qkv, parts=3, axis=1)
    )  # each [batch, heads, length, size]
    out = ops.attention(q, k, v, allowed, mask="custom")  # [batch, heads, length, size]
    return out.transpose(0, 2, 1, 3).reshape(batch * length, hidden)


def _first(table: Value, rows: DimLike) -> Value:
    if not isinstance(rows, int):
        return ops.embedding(table, ops.iota(dims=(rows,), axis=0, dtype="i32"))
    return table[:rows]


def _params(g: Graph, name: str, rows: int, columns: int, dtype: DType) -> tuple[Value, Value]:
    """Weight [rows, columns] = [out, in], as the checkpoint stores it, and bias [rows]."""
    return g.param(f"{name}.weight", (rows, columns), dtype), g.param(f"{name}.bias", (rows,), dtype)


def _linear(g: Graph, name: str, x: Value, width: int) -> Value:
    weight, bias = _params(g, name, width, static_dim(x.dims[-1], "a projection"), x.dtype)
    return ops.linear(x, weight.T, bias)


def _norm(g: Graph, config: BertConfig, name: str, x: Value) -> Value:
    scale, bias = (g.param(f"{name}.{part}", (config.hidden_size,), x.dtype) for part in ("weight", "bias"))
    return ops.layer_norm(x, scale, bias, eps=config.layer_norm_eps)


def pool(x: Value, mask: Value, kind: str, normalize: bool) -> Value:
    """[batch, length, hidden] -> [batch, hidden]: the mean over tokens that are not padding, or the first token ("cls")."""
    batch, length, _ = x.dims
    x = x.astype("f32")
    if kind == "cls":
        pooled = x[:, 0]
    else:
        weight = mask.astype("f32").reshape(batch, length, 1)
        count = ops.maximum(ops.sum(weight, axis=1), 1.0)  # [batch, 1]
        pooled = ops.sum(x * weight, axis=1) / count
    if normalize:
        norm = ops.sqrt(ops.sum(pooled * pooled, axis=1, keepdims=True))
        pooled = pooled / ops.maximum(norm, 1e-12)  # the lower bound of torch's normalize
    return pooled

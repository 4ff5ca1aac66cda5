"""Decoder-only language models: Llama (Touvron et al. 2023), and the families that differ from it in a few options.

Mistral, Qwen2, Qwen3, SmolLM, Phi-3 and Gemma 1–3 share the block of RMS norms, rotary positions and a gated MLP; Phi-1/2
and GPT-2 have layer norms and a plain MLP. Params have the names of a Hugging Face Llama checkpoint, with the parts of one
contraction concatenated in `qkv_proj` and `gate_up_proj`; every matrix is [out, in]. State: `position`, and per layer `k.i`
and `v.i`, [batch, kv_heads, capacity, head_dim], of which the first `position` rows are filled, in f32 or rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import rlx.ir.ops as ops
from rlx.errors import ModelError, known
from rlx.frontends.models.bert import ACTIVATIONS
from rlx.frontends.sampling import choose
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.handle import BufferHandle

Formats = Mapping[str, str] | str
EMBEDDED = "embedded"  # name of the node that looks up the rows of the embedding table

@dataclass(frozen=True)
class Rope:
    """Rotary positions. `frequencies`: radians per position of each rotated pair, after scaling; other pairs of a head are not
    rotated. `scale`: factor of cosine and sine. `far`: frequencies if the capacity exceeds `trained` positions; empty and 0:
    none."""

    frequencies: tuple[float, ...]
    scale: float = 1.0
    far: tuple[float, ...] = ()
    trained: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options. `biases`: the projections with a bias ("qkv_proj", "o_proj", "mlp", "lm_head"). `norm_offset` is added
    to the scale of every norm. `ropes`, `windows`: per layer; None: no rotation, 0: no window. `attention_scale` 0:
    1 / sqrt(head_dim). `attention_cap`, `logit_cap`: c · tanh(x / c) of scores and logits, 0: none."""

    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    ropes: tuple[Rope | None, ...]
    windows: tuple[int, ...]
    eps: float = 1e-6
    activation: str = "silu"
    norm: str = "rms"
    norm_offset: float = 0.0
    gated: bool = True
    parallel: bool = False  # attention and MLP read the same normalised input
    post_norms: bool = False  # also norms after attention and MLP
    qk_norm: bool = False
    learned_positions: bool = False
    interleaved: bool = False  # rotated pairs are (2i, 2i+1), otherwise (i, i + half)
    tied: bool = False  # the output projection is the embedding table
    biases: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"the activation {self.activation!r} is not supported; supported: {known(ACTIVATIONS)}")

    def states(self, batch: int, capacity: int, cache: str = "f32") -> list[BufferHandle]:
        """All handles of the graphs with this batch and capacity."""
        dims = (batch, self.num_key_value_heads, capacity, self.head_dim)
        layers = range(self.num_hidden_layers)
        return [BufferHandle("position", (), "i32"), *(BufferHandle(f"{s}.{i}", dims, cache) for i in layers for s in "kv")]


def build(
    config: DecoderConfig,
    batch: int,
    tokens: int,
    capacity: int,
    formats: Formats = "f32",
    all_logits: bool = False,
    cache: str = "f32",
    steps: tuple[str, ...] | None = None,
) -> Graph:
    """tokens i32 [batch, tokens], count i32 (): number of valid ones -> logits f32 [batch, vocab] after the last valid
    token, or [batch, tokens, vocab]. The tokens are at `position` and after; position then advances by `count`.

    `formats`: storage format of each matrix (a float dtype or a name of quant.FORMATS), by param; or one for all. `cache`: the
    dtype of keys and values. `steps` (Sampling.steps): the graph also samples the next token, i32 [batch], which is its output
    and the state `token`. With tokens=1 such a graph has no inputs: it reads that state.
    """
    g = Graph(f"{config.family}_{batch}x{tokens}")
    token = None if steps is None else g.handle(BufferHandle("token", (batch,), "i32"))
    if token is not None and tokens == 1:
        ids, count = token.reshape(batch, 1), g.constant(1, "i32")
    else:
        ids, count = g.input("tokens", (batch, tokens), "i32"), g.input("count", (), "i32")
    net = _Network(g, config, batch, tokens, config.states(batch, capacity, cache), formats)
    x = net.embed(ids)
    for i in range(config.num_hidden_layers):
        x = net.layer(i, x)
    if not all_logits:
        x = ops.gather(x.reshape(batch, tokens, config.hidden_size), count - 1, axis=1)  # [batch, hidden]
    logits = net.logits(net.norm("model.norm", x))
    g.assign(net.states["position"], net.start + count)
    if token is not None and steps is not None:
        chosen = choose(g, logits, steps)
        g.assign(token, chosen)
        g.set_outputs([chosen], names=["token"])
    else:
        g.set_outputs([logits.reshape(batch, tokens, config.vocab_size) if all_logits else logits], names=["logits"])
    return g


class _Network:
    """The parts of one graph. Activations are f32 [batch * tokens, width]."""

    def __init__(
        self, g: Graph, config: DecoderConfig, batch: int, tokens: int, states: Sequence[BufferHandle], formats: Formats
    ) -> None:
        self.g, self.config, self.batch, self.tokens, self.formats = g, config, batch, tokens, formats
        self.states = {s.name: g.handle(s) for s in states}
        self.start = self.states["position"]
        self.positions = self.start + ops.iota(dims=(tokens,), dtype=DTYPES["i32"])  # [tokens]
        self.angles: dict[Rope, tuple[Value, Value]] = {}

    # -- pieces with weights

    def matrix(self, name: str, rows: int, columns: int) -> tuple[Value, str]:
        """The param [rows, columns], packed in its format (u8 [rows, bytes per row]) or plain; and the format's name."""
        name = f"{name}.weight"
        form = self.formats if isinstance(self.formats, str) else self.formats[name]
        for p in self.g.params:
            if p.name == name:  # a tied table is read twice
                return p, form
        if form in FORMATS:
            return self.g.param(name, (rows, FORMATS[form].row_bytes(columns)), "u8"), form
        return self.g.param(name, (rows, columns), form), form

    def linear(self, name: str, x: Value, width: int, bias: bool = False, narrow: bool = False) -> Value:
        """x [n, k] -> [n, width], both f32; a narrow float weight multiplies x rounded to the weight's dtype, and the result is
        of that dtype too if it may be `narrow`."""
        w, form = self.matrix(name, width, x.shape.static[-1])
        y = ops.dequant_matmul(x, w, format=form) if form in FORMATS else ops.matmul(x.astype(form), w.T)
        y = y if narrow and not bias else y.astype("f32")
        return y + self.g.param(f"{name}.bias", (width,), "f32") if bias else y

    def parts(
        self, prefix: str, fused: str, names: Sequence[str], x: Value, widths: Sequence[int], bias: bool
    ) -> Sequence[Value]:
        """Several projections of x, as one contraction if their weights have the same format. Whoever reads a part widens it."""
        if isinstance(self.formats, str) or f"{prefix}.{fused}.weight" in self.formats:
            y = self.linear(f"{prefix}.{fused}", x, sum(widths), bias, narrow=True)
            return ops.split(y, parts=tuple(widths), axis=1)
        return [self.linear(f"{prefix}.{n}", x, width, bias) for n, width in zip(names, widths)]

    def norm(self, name: str, x: Value) -> Value:
        """The norm over the last dim."""
        c = self.config
        scale, x = self.g.param(f"{name}.weight", (x.dims[-1],), "f32"), x.astype("f32")
        if c.norm == "layer":
            return ops.layer_norm(x, scale, self.g.param(f"{name}.bias", (x.dims[-1],), "f32"), eps=c.eps)
        return ops.rms_norm(x, scale + c.norm_offset if c.norm_offset else scale, eps=c.eps)

    def embed(self, ids: Value) -> Value:
        c, n = self.config, self.batch * self.tokens
        table, form = self.matrix("model.embed_tokens", c.vocab_size, c.hidden_size)
        rows = ops.gather(table, ids.reshape(n), axis=0, name=EMBEDDED)
        x = ops.dequantize(rows, format=form, columns=c.hidden_size) if form in FORMATS else rows.astype("f32")
        x = x * c.embedding_scale if c.embedding_scale != 1 else x
        if c.learned_positions:
            places = self.g.param("model.embed_positions.weight", (c.max_position_embeddings, c.hidden_size), "f32")
            last = ops.minimum(self.positions, c.max_position_embeddings - 1)  # tokens past the end are padding
            x = (x.reshape(self.batch, self.tokens, c.hidden_size) + ops.embedding(places, last)).reshape(n, c.hidden_size)
        return x

    def logits(self, x: Value) -> Value:
        c = self.config
        y = self.linear("model.embed_tokens" if c.tied else "lm_head", x, c.vocab_size, "lm_head" in c.biases)
        return _capped(y, c.logit_cap)

    # -- the block

    def layer(self, i: int, x: Value) -> Value:
        c, name = self.config, f"model.layers.{i}"
        normed = self.norm(f"{name}.input_layernorm", x)
        attended = self.attention(i, f"{name}.self_attn", normed)
        if c.parallel:
            return x + attended + self.mlp(f"{name}.mlp", normed)
        if c.post_norms:
            x = x + self.norm(f"{name}.post_attention_layernorm", attended)
            out = self.mlp(f"{name}.mlp", self.norm(f"{name}.pre_feedforward_layernorm", x))
            return x + self.norm(f"{name}.post_feedforward_layernorm", out)
        x = x + attended
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def mlp(self, name: str, x: Value) -> Value:
        c, bias = self.config, "mlp" in self.config.biases
        act, width = ACTIVATIONS[c.activation], c.intermediate_size
        if c.gated:
            gate, up = self.parts(name, "gate_up_proj", ("gate_proj", "up_proj"), x, (width, width), bias)
            inner = act(gate.astype("f32")) * up.astype("f32")
        else:
            inner = act(self.linear(f"{name}.up_proj", x, width, bias))
        return self.linear(f"{name}.down_proj", inner, c.hidden_size, bias)

    def attention(self, i: int, name: str, x: Value) -> Value:
        """Append this chunk's keys and values to the cache, then attend to all of them."""
        c = self.config
        heads, shared, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        widths = (heads * size, shared * size, shared * size)
        parts = self.parts(name, "qkv_proj", ("q_proj", "k_proj", "v_proj"), x, widths, "qkv_proj" in c.biases)
        q, k, v = (p.reshape(self.batch, self.tokens, n, size) for p, n in zip(parts, (heads, shared, shared)))
        if c.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if (rope := c.ropes[i]) is not None:
            q, k = self.rotated(q, rope), self.rotated(k, rope)
        states = []
        for state, rows in ((self.states[f"k.{i}"], k), (self.states[f"v.{i}"], v)):
            rows = rows.astype(state.dtype).transpose(0, 2, 1, 3)  # [batch, heads, tokens, size]
            states.append(ops.update_rows(state, rows, self.start, axis=2))
            self.g.assign(state, states[-1], in_place=True)
        out = self.attend(q.astype("f32").transpose(0, 2, 1, 3), states[0], states[1], c.windows[i])
        out = out.transpose(0, 2, 1, 3).reshape(self.batch * self.tokens, heads * size)
        return self.linear(f"{name}.o_proj", out, c.hidden_size, "o_proj" in c.biases)

    def attend(self, q: Value, k: Value, v: Value, window: int) -> Value:
        c, mask = self.config, "sliding_window" if window else "causal"
        how = {"mask": mask, "window": window, "scale": c.attention_scale, "cap": c.attention_cap}
        return ops.attention(q, k, v, self.start, positioned=True, **how)

    def rotated(self, x: Value, rope: Rope) -> Value:
        """x [batch, tokens, heads, size] with its first pairs rotated by position times frequency."""
        if rope not in self.angles:
            frequencies = rope.far if rope.far and self.states["k.0"].shape.static[2] > rope.trained else rope.frequencies
            angle = self.positions.astype("f32").reshape(self.tokens, 1, 1) * self.g.constant(frequencies, "f32")
            self.angles[rope] = (ops.cos(angle) * rope.scale, ops.sin(angle) * rope.scale)  # each [tokens, 1, pairs]
        cos, sin = self.angles[rope]
        pairs, (*lead, size) = len(rope.frequencies), x.shape.static
        if self.config.interleaved:
            split = x[..., : 2 * pairs].reshape(*lead, pairs, 2)
            a, b = (split[..., n].astype("f32") for n in (0, 1))
            rotated = ops.concat(*(t.reshape(*lead, pairs, 1) for t in (a * cos - b * sin, b * cos + a * sin)), axis=-1)
            out = [rotated.reshape(*lead, 2 * pairs)]
        else:
            a, b = (x[..., n * pairs : (n + 1) * pairs].astype("f32") for n in (0, 1))
            out = [a * cos - b * sin, b * cos + a * sin]
        return ops.concat(*out, *([x[..., 2 * pairs :].astype("f32")] if 2 * pairs < size else ()), axis=-1)


def _capped(x: Value, cap: float) -> Value:
    return ops.tanh(x * (1 / cap)) * cap if cap else x

"""Decoder-only language models: Llama (Touvron et al. 2023), and the families that differ from it in a few options.

Mistral, Qwen2, Qwen3, SmolLM, Phi-3 and Gemma 1–3 share the block of RMS norms, rotary positions and a gated MLP; Phi-1/2
and GPT-2 have layer norms and a plain MLP; Mixtral, the MoE models of Qwen, OLMoE and DeepSeek have experts in place of the
MLP, and DeepSeek has latent attention. Params have the names of a Hugging Face Llama checkpoint, with the parts of one
contraction concatenated in `qkv_proj` and `gate_up_proj`; every matrix is [out, in], those of a layer's experts one below the
other. State: `position`, and per layer `k.i` and `v.i`, [batch, kv_heads, capacity, head_dim], of which the first `position`
rows are filled, in f32 or rounded to 16 bits; with latent attention only `k.i`, [batch, 1, capacity, latent and rotated part].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import rlx.ir.ops as ops
from rlx.errors import ModelError, known
from rlx.frontends.models.bert import ACTIVATIONS
from rlx.frontends.sampling import choose
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.ops.experts import Scoring
from rlx.records import record

Formats = Mapping[str, str] | str
EMBEDDED = "embedded"  # name of the node that looks up the rows of the embedding table

@record
class Rope:
    """Rotary positions. `frequencies`: radians per position of each rotated pair, after scaling; other pairs of a head are not
    rotated. `scale`: factor of cosine and sine. `far`: frequencies if the capacity exceeds `trained` positions; empty and 0:
    none."""

    frequencies: tuple[float, ...]
    scale: float = 1.0
    far: tuple[float, ...] = ()
    trained: int = 0


@record
class Experts:
    """The MLP of some `layers`: each token goes to the `used` best of `count` gated MLPs of this `width`. `scoring`,
    `renormalise`, `scale`, `groups` and `top_groups` as in ops.route. `bias`: is added to the scores for the choice alone.
    `shared`: width of one more MLP, for every token; 0: none; `shared_gate`: its output is weighted by a sigmoid."""

    layers: tuple[int, ...]
    count: int
    used: int
    width: int
    scoring: Scoring = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False


@record
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024). A position is kept as `rank` elements, from which each head's key and
    value of `value` elements are projections, and `rotated` elements of the key that all heads share. The other `plain`
    elements of a query are projected to the latent space, so that keys and values are never expanded. `q_rank`: width of the
    queries' own latent, 0: none."""

    rank: int
    plain: int
    rotated: int
    value: int
    q_rank: int = 0
    eps: float = 1e-6  # of the norms of both latents


@record
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
    qk_norm: bool = False  # of each head
    wide_qk_norm: bool = False  # of all heads together
    learned_positions: bool = False
    interleaved: bool = False  # rotated pairs are (2i, 2i+1), otherwise (i, i + half)
    tied: bool = False  # the output projection is the embedding table
    biases: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"the activation {self.activation!r} is not supported; supported: {known(ACTIVATIONS)}")

    def states(self, batch: int, capacity: int, cache: str = "f32") -> list[BufferHandle]:
        """All handles of the graphs with this batch and capacity."""
        dims, kinds = (batch, self.num_key_value_heads, capacity, self.head_dim), "kv"
        if self.latent is not None:
            dims, kinds = (batch, 1, capacity, self.latent.rank + self.latent.rotated), "k"
        layers = range(self.num_hidden_layers)
        return [BufferHandle("position", (), "i32"), *(BufferHandle(f"{s}.{i}", dims, cache) for i in layers for s in kinds)]


def build(
    config: DecoderConfig,
    batch: int,
    tokens: int,
    capacity: int,
    formats: Formats = "f32",
    all_logits: bool = False,
    cache: str = "f32",
    steps: tuple[str, ...] | None = None,
    lookahead: bool = False,
) -> Graph:
    """tokens i32 [batch, tokens], count i32 (): number of valid ones -> logits f32 [batch, vocab] after the last valid
    token, or [batch, tokens, vocab]. The tokens are at `position` and after; position then advances by `count`.

    `formats`: storage format of each matrix (a float dtype or a name of quant.FORMATS), by param; or one for all. `cache`: the
    dtype of keys and values. `steps` (Sampling.steps): the graph also samples the next token, i32 [batch], which is its output
    and the state `token`. With tokens=1 such a graph has no inputs: it reads that state. `lookahead`: with tokens=1, each layer
    with experts guesses from its router's input what the next such layer will choose (ops.route).
    """
    g = Graph(f"{config.family}_{batch}x{tokens}")
    token = None if steps is None else g.handle(BufferHandle("token", (batch,), "i32"))
    if token is not None and tokens == 1:
        ids, count = token.reshape(batch, 1), g.constant(1, "i32")
    else:
        ids, count = g.input("tokens", (batch, tokens), "i32"), g.input("count", (), "i32")
    net = _Network(g, config, batch, tokens, config.states(batch, capacity, cache), formats, count, lookahead and tokens == 1)
    x, end = net.embed(ids), config.num_hidden_layers - 1
    # the choices of experts are captured for all tokens
    early = not all_logits and tokens > 1 and end >= 0 and not (config.experts and end in config.experts.layers)
    for i in range(config.num_hidden_layers):
        x = net.layer(i, x, only_last=early and i == end)
    if not all_logits and not early:
        x = net.last(x)
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
        self, g: Graph, config: DecoderConfig, batch: int, tokens: int, states: Sequence[BufferHandle], formats: Formats,
        count: Value, lookahead: bool,
    ) -> None:  # fmt: skip
        self.lookahead = lookahead
        self.g, self.config, self.batch, self.tokens, self.formats, self.count = g, config, batch, tokens, formats, count
        self.states = {s.name: g.handle(s) for s in states}
        self.start = self.states["position"]
        self.positions = self.start + ops.iota(dims=(tokens,), dtype=DTYPES["i32"])  # [tokens]
        self.angles: dict[Rope, tuple[Value, Value]] = {}

    def last(self, x: Value) -> Value:
        """x [batch * tokens, width] -> [batch, width]: of the last valid token."""
        return ops.gather(x.reshape(self.batch, self.tokens, x.shape.static[1]), self.count - 1, axis=1)

    # -- pieces with weights

    def matrix(self, name: str, rows: int, columns: int, packs: bool = True) -> tuple[Value, str]:
        """The param [rows, columns], packed in its format (u8 [rows, bytes per row]) or plain; and the format's name. `packs`
        False: one format for all matrices is not for this one if it is packed."""
        name = f"{name}.weight"
        form = self.formats if isinstance(self.formats, str) else self.formats[name]
        form = form if packs or form not in FORMATS else "f32"
        if form in FORMATS:
            return self.param(name, (rows, FORMATS[form].row_bytes(columns)), "u8"), form
        return self.param(name, (rows, columns), form), form

    def param(self, name: str, dims: tuple[int, ...], dtype: str) -> Value:
        """Made once: a tied table, and a router that is guessed, are read twice."""
        made = [p for p in self.g.params if p.name == name]
        return made[0] if made else self.g.param(name, dims, dtype)

    def product(self, name: str, x: Value, width: int, ends: Value | None) -> Value:
        """x [n, k] times a matrix -> [n, width]. `ends`: where the rows of each group end, and each has its own matrix."""
        groups, depth = 1 if ends is None else ends.shape.static[0], x.shape.static[-1]
        w, form = self.matrix(name, groups * width, depth)
        x = x if form in FORMATS else x.astype(form)
        if ends is None:
            return ops.dequant_matmul(x, w, format=form) if form in FORMATS else ops.matmul(x, w.T)
        w = w.reshape(groups, width, w.shape.static[1])
        if form in FORMATS:
            return ops.segment_matmul(x, w, ends, format=form)
        return ops.segment_matmul(x, w.transpose(0, 2, 1), ends)

    def linear(
        self, name: str, x: Value, width: int, bias: bool = False, narrow: bool = False, ends: Value | None = None
    ) -> Value:
        """x [n, k] -> [n, width], both f32; a narrow float weight multiplies x rounded to the weight's dtype, and the result is
        of that dtype too if it may be `narrow`. `ends` as in `product`."""
        y = self.product(name, x, width, ends)
        y = y if narrow and not bias else y.astype("f32")
        return y + self.g.param(f"{name}.bias", (width,), "f32") if bias else y

    def parts(
        self, prefix: str, fused: str, names: Sequence[str], x: Value, widths: Sequence[int], bias: bool,
        ends: Value | None = None,
    ) -> Sequence[Value]:
        """Several projections of x, as one contraction if their weights have the same format. The readers of a part widen it."""
        if isinstance(self.formats, str) or f"{prefix}.{fused}.weight" in self.formats:
            y = self.linear(f"{prefix}.{fused}", x, sum(widths), bias, narrow=True, ends=ends)
            return ops.split(y, parts=tuple(widths), axis=1)
        return [self.linear(f"{prefix}.{n}", x, width, bias, ends=ends) for n, width in zip(names, widths)]

    def norm(self, name: str, x: Value, eps: float | None = None) -> Value:
        """The norm over the last dim."""
        c, eps = self.config, self.config.eps if eps is None else eps
        scale, x = self.g.param(f"{name}.weight", (x.dims[-1],), "f32"), x.astype("f32")
        if c.norm == "layer":
            return ops.layer_norm(x, scale, self.g.param(f"{name}.bias", (x.dims[-1],), "f32"), eps=eps)
        return ops.rms_norm(x, scale + c.norm_offset if c.norm_offset else scale, eps=eps)

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
        return ops.tanh(y * (1 / c.logit_cap)) * c.logit_cap if c.logit_cap else y

    # -- the block

    def layer(self, i: int, x: Value, only_last: bool) -> Value:
        """`only_last`: for the last valid token, [batch, width]; keys and values are appended of all tokens."""
        c, name = self.config, f"model.layers.{i}"
        normed = self.norm(f"{name}.input_layernorm", x)
        attended = (self.attention if c.latent is None else self.latent_attention)(i, f"{name}.self_attn", normed, only_last)
        x, normed = (self.last(x), self.last(normed)) if only_last else (x, normed)
        if c.parallel:
            return x + attended + self.mlp(i, f"{name}.mlp", normed)
        if c.post_norms:
            x = x + self.norm(f"{name}.post_attention_layernorm", attended)
            out = self.mlp(i, f"{name}.mlp", self.norm(f"{name}.pre_feedforward_layernorm", x))
            return x + self.norm(f"{name}.post_feedforward_layernorm", out)
        x = x + attended
        return x + self.mlp(i, f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))

    def mlp(self, i: int, name: str, x: Value) -> Value:
        c = self.config
        if c.experts is not None and i in c.experts.layers:
            return self.mixture(i, name, x, c.experts)
        return self.plain_mlp(name, x, c.intermediate_size, "mlp" in c.biases)

    def plain_mlp(self, name: str, x: Value, width: int, bias: bool = False, ends: Value | None = None) -> Value:
        """One MLP, or with `ends` one for each group of rows."""
        c, act = self.config, ACTIVATIONS[self.config.activation]
        if c.gated:
            gate, up = self.parts(name, "gate_up_proj", ("gate_proj", "up_proj"), x, (width, width), bias, ends)
            inner = act(gate.astype("f32")) * up.astype("f32")
        else:
            inner = act(self.linear(f"{name}.up_proj", x, width, bias))
        return self.linear(f"{name}.down_proj", inner, c.hidden_size, bias, ends=ends)

    def mixture(self, i: int, name: str, x: Value, m: Experts) -> Value:
        """Every token through its experts: their rows are grouped by expert, then weighted and added up by token."""
        n, width = x.shape.static
        ids, weights = self.routed(i, name, x, m)
        order, place, ends = ops.group_rows(ids.reshape(n * m.used), groups=m.count)
        out = self.plain_mlp(f"{name}.experts", ops.gather(x, order // m.used, axis=0), m.width, ends=ends)
        rows = ops.gather(out, place.reshape(n, m.used), axis=0)
        y = ops.sum(rows * weights.reshape(n, m.used, 1), axis=1)
        if not m.shared:
            return y
        shared = self.plain_mlp(f"{name}.shared_experts", x, m.shared)
        if m.shared_gate:
            gate = ops.matmul(x, self.g.param(f"{name}.shared_expert_gate.weight", (width,), "f32"))
            shared = shared * ops.sigmoid(gate).reshape(n, 1)
        return y + shared

    def routed(self, i: int, name: str, x: Value, m: Experts) -> tuple[Value, Value]:
        """(experts of each token, their weights), i32 and f32 [n, used]."""
        scores, *more = self.scored(name, x, m)
        if self.tokens > 1:  # padding goes where the last token goes, and not to experts that no token needs
            last = ops.minimum(ops.iota(dims=(self.tokens,), dtype=DTYPES["i32"]), self.count - 1)
            scores = ops.gather(scores.reshape(self.batch, self.tokens, m.count), last, axis=1).reshape(scores.shape.static)
        if self.lookahead and (later := m.layers[m.layers.index(i) + 1 :]):
            guess, *bias = self.scored(f"model.layers.{later[0]}.mlp", x, m)
            more.append(ops.top_k(ops.sigmoid(guess) + bias[0] if bias else guess, k=m.used)[1].astype("i32"))
        how = {"renormalise": m.renormalise, "scale": m.scale, "groups": m.groups, "top_groups": m.top_groups}
        return ops.route(scores, *more, k=m.used, scoring=m.scoring, **how)

    def scored(self, name: str, x: Value, m: Experts) -> list[Value]:
        """The scores of experts, f32 [n, count], and their bias, if there is one. The router is never packed, and reads x as it
        is."""
        scores = ops.matmul(x, self.matrix(f"{name}.gate", m.count, x.shape.static[1], packs=False)[0].T).astype("f32")
        return [scores, self.param(f"{name}.gate.bias", (m.count,), "f32")] if m.bias else [scores]

    def attention(self, i: int, name: str, x: Value, only_last: bool) -> Value:
        """Append this chunk's keys and values to the cache, then attend to all of them, from the last token `only_last`."""
        c = self.config
        heads, shared, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        widths = (heads * size, shared * size, shared * size)
        parts = self.parts(name, "qkv_proj", ("q_proj", "k_proj", "v_proj"), x, widths, "qkv_proj" in c.biases)
        if c.wide_qk_norm:
            parts = [self.norm(f"{name}.q_norm", parts[0]), self.norm(f"{name}.k_norm", parts[1]), parts[2]]
        parts = [self.last(parts[0]) if only_last else parts[0], *parts[1:]]
        q, k, v = (p.reshape(self.batch, -1, n, size) for p, n in zip(parts, (heads, shared, shared)))
        if c.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if (rope := c.ropes[i]) is not None:
            q, k = self.rotated(q, rope, only_last), self.rotated(k, rope)
        held = [self.appended(f"{kind}.{i}", rows) for kind, rows in (("k", k), ("v", v))]
        out = self.attend(q.astype("f32").transpose(0, 2, 1, 3), held[0], held[1], c.windows[i], only_last)
        out = out.transpose(0, 2, 1, 3).reshape(-1, heads * size)
        return self.linear(f"{name}.o_proj", out, c.hidden_size, "o_proj" in c.biases)

    def latent_attention(self, i: int, name: str, x: Value, only_last: bool) -> Value:
        """As `attention`, on latents: one key head of `rank` and `rotated` elements, whose first `rank` are the values."""
        c, m = self.config, self.config.latent
        assert m is not None
        heads, lead = c.num_attention_heads, (self.batch, self.tokens)
        names = ("q_a_proj" if m.q_rank else "q_proj", "kv_a_proj_with_mqa")
        q, kv = self.parts(name, "qkv_a_proj", names, x, (m.q_rank or heads * c.head_dim, m.rank + m.rotated), False)
        q = self.last(q) if only_last else q
        if m.q_rank:
            q = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", q, m.eps), heads * c.head_dim)
        latent = self.norm(f"{name}.kv_a_layernorm", kv[:, : m.rank], m.eps).reshape(*lead, 1, m.rank)
        shared, n = kv[:, m.rank :].reshape(*lead, 1, m.rotated), q.shape.static[0]
        q = q.astype("f32").reshape(self.batch, -1, heads, c.head_dim)
        turned = q[..., m.plain :]
        if (rope := c.ropes[i]) is not None:
            turned, shared = self.rotated(turned, rope, only_last), self.rotated(shared, rope)
        held = self.appended(f"k.{i}", ops.concat(latent, shared.astype("f32"), axis=-1))
        seen = self.by_head(f"{name}.k_b_proj", q[..., : m.plain].transpose(2, 0, 1, 3).reshape(heads, n, m.plain), m.rank)
        query = ops.concat(seen.reshape(heads, self.batch, -1, m.rank), turned.transpose(2, 0, 1, 3), axis=-1)
        # [batch, heads, tokens or 1, rank]
        out = self.attend(query.transpose(1, 0, 2, 3), held, held[..., : m.rank], c.windows[i], only_last)
        out = self.by_head(f"{name}.v_b_proj", out.transpose(1, 0, 2, 3).reshape(heads, n, m.rank), m.value)
        return self.linear(f"{name}.o_proj", out.transpose(1, 0, 2).reshape(n, heads * m.value), c.hidden_size)

    def by_head(self, name: str, x: Value, width: int) -> Value:
        """x [heads, n, k] times each head's own matrix -> f32 [heads, n, width]."""
        heads, n, depth = x.shape.static
        w, form = self.matrix(name, heads * width, depth)
        if form in FORMATS:
            ends = self.g.constant([n * (head + 1) for head in range(heads)], "i32")
            return self.product(name, x.reshape(heads * n, depth), width, ends).reshape(heads, n, width)
        return ops.matmul(x.astype(form), w.reshape(heads, width, depth).transpose(0, 2, 1)).astype("f32")

    def appended(self, state: str, rows: Value) -> Value:
        """The state with rows [batch, tokens, heads, size] written at this chunk's positions."""
        held = self.states[state]
        held = ops.update_rows(held, rows.astype(held.dtype).transpose(0, 2, 1, 3), self.start, axis=2)
        self.g.assign(self.states[state], held, in_place=True)
        return held

    def attend(self, q: Value, k: Value, v: Value, window: int, only_last: bool) -> Value:
        c, mask = self.config, "sliding_window" if window else "causal"
        how = {"mask": mask, "window": window, "scale": c.attention_scale, "cap": c.attention_cap}
        return ops.attention(q, k, v, self.start + (self.count - 1) if only_last else self.start, positioned=True, **how)

    def rotated(self, x: Value, rope: Rope, only_last: bool = False) -> Value:
        """x [batch, tokens, heads, size], `only_last`: of one token, with its first pairs rotated by position times frequency:
        their first elements, their second ones, and the rest."""
        if rope not in self.angles:
            frequencies = rope.far if rope.far and self.states["k.0"].shape.static[2] > rope.trained else rope.frequencies
            angle = self.positions.astype("f32").reshape(self.tokens, 1, 1) * self.g.constant(frequencies, "f32")
            self.angles[rope] = (ops.cos(angle) * rope.scale, ops.sin(angle) * rope.scale)  # each [tokens, 1, pairs]
        cos, sin = (ops.gather(a, self.count - 1, axis=0) if only_last else a for a in self.angles[rope])
        pairs, (*lead, size) = len(rope.frequencies), x.shape.static
        if self.config.interleaved:
            split = x[..., : 2 * pairs].reshape(*lead, pairs, 2)
            a, b = (split[..., n].astype("f32") for n in (0, 1))
        else:
            a, b = (x[..., n * pairs : (n + 1) * pairs].astype("f32") for n in (0, 1))
        # Adjacent pairs are parted too: queries and keys are permuted alike, and nothing else reads them
        rest = [x[..., 2 * pairs :].astype("f32")] if 2 * pairs < size else []
        return ops.concat(a * cos - b * sin, b * cos + a * sin, *rest, axis=-1)

"""Models on several ranks: the axis along which each weight and cache is split.

Tensor-parallel decoders as in Shoeybi et al. 2019 (Megatron-LM): projections to heads and to the MLP's width are split by rows of
their [out, in] matrices, the projections back by columns, so that a layer needs two all_reduces. Keys and values are split by
head. The embedding table and the output projection are split by vocabulary, or by width if the vocabulary does not divide
equally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.errors import ModelError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.placement import Split
from rlx.runtime import Session
from rlx.runtime.session import session_of

if TYPE_CHECKING:
    from rlx.frontends.models.decoder import DecoderConfig
    from rlx.runtime import SymmetricTransport

Marks = dict[str, Split | None]
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def decoder_marks(graph: Graph, config: DecoderConfig, ranks: int, block: Callable[[str], int]) -> Marks:
    """The marks of a graph of decoder.build. `block(param)`: block size of its rows, in elements.

    ModelError: heads, the MLP's width, or the blocks of a quantised row do not divide equally among the ranks.
    """
    from rlx.frontends.models.decoder import EMBEDDED  # encoders, which need `together`, do without

    if config.experts is not None or config.latent is not None:
        raise ModelError(f"{config.family} runs on one rank: experts and latent attention are not split among ranks")
    heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for label, found in (("num_attention_heads", heads), ("intermediate_size", config.intermediate_size)):
        if found % ranks:
            raise ModelError(f"{ranks} ranks cannot share {label}={found} equally: {found % ranks} would be left over")
    if shared % ranks and shared > 1:
        raise ModelError(f"{ranks} ranks cannot share num_key_value_heads={shared} equally: {shared % ranks} would be left over")
    own = not shared % ranks  # else there is one key head, which every rank computes
    width, kv, inner = heads * size, shared * size, config.intermediate_size
    by_rows = {"q_proj": (width,), "gate_proj": (inner,), "up_proj": (inner,), "gate_up_proj": (inner, inner)}
    by_rows |= {"k_proj": (kv,), "v_proj": (kv,), "qkv_proj": (width, kv, kv)} if own else {}

    def columns(name: str, count: int) -> Marks:
        """Split by columns, if whole blocks divide equally."""
        return {name: Split(1)} if not count % (block(name) * ranks) else {}

    marks: Marks = {str(h.name): Split(1) for h in graph.handles if h.rank == 4 and own}
    for p in graph.params:
        name = str(p.name)
        *_, layer, kind = ["", *name.split(".")]
        if name in TABLES:
            by_width = config.vocab_size % ranks != 0  # replicated if the width does not divide either
            marks |= columns(name, config.hidden_size) if by_width else {name: Split(0)}
            marks |= {EMBEDDED: None} if by_width else {}
        elif layer in by_rows:
            marks[name] = Split(0, by_rows[layer])
        elif layer in ("o_proj", "down_proj") and kind == "weight":
            if not (split := columns(name, count := width if layer == "o_proj" else inner)):
                whole = f"rows of {count} elements, in whole blocks of {block(name)}"
                raise ModelError(f"{ranks} ranks cannot share {name!r}, {whole}, equally")
            marks |= split
    return marks


def shared_session(session: Session | None, transport: SymmetricTransport | None) -> Session:
    """The session for a model, from the given session or transport, or a new one. OptionError: the two do not belong together."""
    session = Session(transport=transport) if session is None else session_of(session)
    if transport is not None and session.transport is not transport:
        raise OptionError("the transport is not the session's: give it to the session alone, Session(transport=…)")
    return session


def together(session: Session) -> tuple[SymmetricTransport | None, int, int]:
    """(transport, ranks, this rank); transport None: there is no other rank."""
    transport = session.transport
    if transport is None or transport.num_ranks == 1:
        return None, 1, 0
    return transport, transport.num_ranks, transport.this_rank.index

"""Chains of products and attentions on CUDA (rlx/backends/cuda/chain.py): which launches become one, the order in which blocks
may use words again, and on a GPU the logits beside those of the same network on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from cuda_kernels import MODELS, OTHERS, PLAIN, SIZES, reports
from test_cuda import HOPPER, nvrtc, on_gpu

import rlx
from rlx.backends.cuda import code
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.chain import Chain
from rlx.backends.cuda.chain_parts import Attention, Product, Stage
from rlx.backends.cuda.chain_writer import ARGUMENT, HEADS, WORDS, written
from rlx.backends.cuda.code import launches_of, prologue
from rlx.compiler import lower
from rlx.errors import DeviceUnavailableError
from rlx.frontends.models.decoder import _Network, build
from rlx.frontends.models.families import config_of
from rlx.ir.blocks import FORMATS
from rlx.ir.kernel import walk
from rlx.ir.ops.quant import random_weights
from rlx.ir.program import Program

assert nvrtc
BLOCKS = 132
NAMES = ("mistral", "qwen2", "gemma", "phi")
WIDE = {n: PLAIN | dict(zip(SIZES, OTHERS[n])) | {"model_type": n} for n in NAMES}
SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 640, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"}, "qwen3": {"model_type": "qwen3"}, "qwen2": {"model_type": "qwen2"},
    "gemma": {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": 50, "head_dim": 128, "num_attention_heads": 2},
    "wide": {
        "model_type": "qwen3", "hidden_size": 1152, "num_attention_heads": 18, "num_key_value_heads": 6, "num_hidden_layers": 3,
    },
    "packed": {
        "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 1280, "intermediate_size": 5376, "num_attention_heads": 20,
        "num_key_value_heads": 4,
    },  # panels shared by blocks, beside whole ones and alone
}  # fmt: skip
MEETING = {  # two blocks for a head, wide heads, and pairs that meet in every other layer
    "broad": {"model_type": "llama", "num_attention_heads": 40, "num_key_value_heads": 8},
    "wide heads": {"model_type": "qwen3", "head_dim": 128},
    "alternating": {
        "model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 100,
    },
}  # fmt: skip
PLACES = [(200, 0), (200, 130), (3000, 2500)]  # keys of the cache, those in use at first
PACKED = ("q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k", "mixed")  # formats


def formats_of(config, form: str) -> str | dict[str, str]:
    """The format of each matrix; mixed: as files have them, some matrices in more bits."""
    if form != "mixed":
        return form
    wider = {"embed": "bf16", "down": "q6_k", "v_proj": "q5_k"}
    params = build(config_of(config), 1, 1, 8, "q4_k", cache="bf16").params
    return {n: next((f for key, f in wider.items() if key in n), "q4_k") for p in params if "norm" not in (n := str(p.name))}


def decoder(config, form: str = "bf16") -> Program:
    """A step of four layers. Several tests look at the same ones."""
    return _decoder(tuple(config.items()), form)


@cache
def _decoder(items: tuple[tuple[str, object], ...], form: str) -> Program:
    config = dict(items)
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = 4
    formats = formats_of(config, form)
    return lower(build(config_of(config), 1, 1, 300, formats, cache="bf16", steps=()), HOPPER, rlx.CompileOptions())


def chains(program: Program) -> list[Chain]:
    return [x for x in launches_of(program, "sm_90a") if isinstance(x, Chain)]


# -- which launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MODELS["qwen3"], MODELS["llama"], WIDE["mistral"], WIDE["qwen2"], WIDE["gemma"]])
def test_all_layers_of_a_token_and_the_vocabulary_are_one_launch(config):
    """In front of it rows are saved and the first one is looked up; behind it the likeliest token is found."""
    launches = launches_of(decoder(config), "sm_90a")
    assert [isinstance(x, Chain) for x in launches] == [False, True, False]
    stages = next(x.stages for x in launches if isinstance(x, Chain))
    assert len(stages) == 4 * 5 + 1 and sum(isinstance(s, Attention) for s in stages) == 4


def sampling(config, *steps: str):
    return build(config_of(config), 1, 1, 300, "bf16", cache="bf16", steps=steps)


def test_so_they_are_where_tokens_are_drawn():
    """The last product divides by a temperature, which the host may change from token to token."""
    steps = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    program = lower(sampling(SMALL | FAMILIES["qwen3"], *steps), HOPPER, rlx.CompileOptions())
    (found,) = chains(program)
    assert len(found.stages) == 4 * 5 + 1
    (report,) = reports(prologue(False) + written(found, program, BLOCKS).text, "sm_90a").values()
    assert report.spilled == report.stack == 0


def test_a_column_that_waits_for_another_one_of_the_chain_is_in_none(monkeypatch):
    linear = _Network.linear

    def scaled(self, name, x, *rest, **more):
        return linear(self, name, x, *rest, **more) * (x[:, 5:6].astype("f32") if "down_proj" in name else 1.0)

    monkeypatch.setattr(_Network, "linear", scaled)
    program = lower(sampling(SMALL | FAMILIES["llama"]), HOPPER, rlx.CompileOptions())
    assert not chains(program)
    assert any("an epilogue reads other columns than its own" in x for x in CudaBackend().compile(program).texts().values())


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MODELS["gpt2"], "a norm that subtracts the mean"), (WIDE["phi"], "a norm that subtracts the mean"),
        (MODELS["gemma2"], "products follow each other without other kernels between them"),
        (SMALL | FAMILIES["llama"] | {"intermediate_size": 1 << 16}, "a row of 65536 elements leaves too little shared memory"),
    ],
)  # fmt: skip
def test_other_networks_keep_their_launches_and_the_text_of_a_kernel_says_why(config, why):
    program = decoder(config, "q8_0" if config.get("intermediate_size") == 1 << 16 else "bf16")
    assert not chains(program)
    assert any(why in text for text in CudaBackend().compile(program).texts().values())


def test_a_prompt_is_no_chain_and_neither_are_older_gpus():
    graph = build(config_of(SMALL | FAMILIES["llama"]), 1, 40, 300, "bf16", cache="bf16")
    assert not chains(lower(graph, HOPPER, rlx.CompileOptions()))
    assert not any(isinstance(x, Chain) for x in launches_of(decoder(SMALL | FAMILIES["llama"]), "sm_80"))


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "bf16") for name in FAMILIES if name not in ("llama", "packed")), ("packed", "q8_0"), ("packed", "mixed")],
)
def test_a_chain_compiles_without_spills_and_fits_a_block(name, form):
    program = decoder(SMALL | FAMILIES[name], form)
    (found,) = chains(program)
    made = written(found, program, BLOCKS)
    (report,) = reports(prologue(False) + made.text, "sm_90a").values()
    assert report.spilled == report.stack == 0 and made.shared + report.shared <= 227 << 10


@pytest.mark.parametrize(("columns", "early"), [(4096, True), (6144, False)])
def test_ends_of_gated_columns_are_loaded_early_only_where_a_block_ends_them_at_once(columns, early):
    """32 results at once of pairs of columns: a block has up to 32 of 4,096 and 48 of 6,144."""
    g = rlx.Graph("gated")
    x = g.input("x", (1, 1024), "bf16")
    for i in range(6):
        y = x @ rlx.transpose(g.param(f"w{i}", (2 * columns, 1024), "bf16"))
        bias = g.param(f"b{i}", (columns,), "bf16")
        x = x + (rlx.silu(y[:, :columns] + bias) * y[:, columns:]) @ rlx.transpose(g.param(f"d{i}", (1024, columns), "bf16"))
    g.set_outputs([x])
    program = lower(g, HOPPER, rlx.CompileOptions())
    (found,) = chains(program)
    text = written(found, program, BLOCKS).text
    ends = [part.split("const auto end")[0] for part in text.split("const auto ahead")[1:]]
    gated = [s for s in found.stages if isinstance(s, Product) and s.contract.also is not None]
    assert gated and any("early0 =" in part for part in ends[:1]) == early


def test_the_table_has_an_entry_for_each_operand():
    program = decoder(MODELS["qwen3"])
    (found,) = chains(program)
    made = written(found, program, BLOCKS)
    arguments = sum(len(program.steps[n].args) for s in found.stages for n in s.steps) + sum(map(len, made.more))
    assert {kind for kind, _ in made.table} == {HEADS, ARGUMENT, WORDS}
    assert all(0 <= n < arguments for kind, n in made.table if kind == ARGUMENT)
    assert all(n % 128 < 4 and n < made.words for kind, n in made.table if kind == WORDS)
    place = rows = 0
    while made.table[place][1] & 255 != 255:  # heads lead from row to row
        place, rows = place + (made.table[place][1] >> 8), rows + 1
    assert rows == len(found.stages) and place == len(made.table) - 1


def test_an_artifact_keeps_its_chain():
    backend, program = CudaBackend(), decoder(SMALL | FAMILIES["llama"])
    artifact = backend.compile(program)
    head, parts = backend.to_parts(artifact)
    again = backend.from_parts(program, head, parts, artifact.texts)
    assert [c.table for c in again.coded["steps"]] == [c.table for c in artifact.coded["steps"]]
    assert any(c.table for c in again.coded["steps"])


def test_a_gpu_with_fewer_multiprocessors_refuses_it(driver):
    """Its blocks wait for one another, so all must run at once."""
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (8,), "f32") * 2.0])
    backend = CudaBackend()
    artifact = backend.compile(lower(g, HOPPER, rlx.CompileOptions()))
    wider = [replace(c, table=((HEADS, 255),), blocks=BLOCKS + 1) for c in artifact.coded["steps"]]
    with pytest.raises(DeviceUnavailableError, match="133 multiprocessors, and .* has 132: compile it for this GPU"):
        backend.load(replace(artifact, coded={**artifact.coded, "steps": wider}))
    driver.most_clusters, driver.clusters = 65, {c.name: 2 for c in artifact.coded["steps"]}
    whole = [replace(c, table=((HEADS, 255),), blocks=BLOCKS) for c in artifact.coded["steps"]]
    with pytest.raises(DeviceUnavailableError, match="132 of them in pairs, and .* runs 130 at once: use a whole GPU"):
        backend.load(replace(artifact, coded={**artifact.coded, "steps": whole}))


def test_a_gpu_that_runs_no_cluster_of_so_many_blocks_refuses_it(driver):
    """Only clusters of more than 8 blocks need to be allowed, and may have no room on a part of a GPU."""
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (8,), "f32") * 2.0])
    backend, name = CudaBackend(), "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"
    artifact = backend.compile(lower(g, HOPPER, rlx.CompileOptions()))
    for blocks, clusters in ((8, 0), (16, 8)):
        driver.most_clusters, driver.clusters = clusters, {c.name: blocks for c in artifact.coded["steps"]}
        backend.load(artifact)
        assert [v for (_, attribute), v in driver.attributes.items() if attribute == name] == [1] * (blocks > 8)
    driver.most_clusters = 0
    with pytest.raises(DeviceUnavailableError, match="no room for a cluster of the blocks of .*: compile it for this GPU"):
        backend.load(artifact)


def test_blocks_are_pairs_where_their_number_is_even():
    program = decoder(SMALL | FAMILIES["llama"])
    for count, pairs in ((114, True), (131, False)):
        (found,) = [x for x in launches_of(program, "sm_90a", count) if isinstance(x, Chain)]
        assert ("__cluster_dims__(2)" in written(found, program, count).text) == pairs


def test_attention_whose_result_is_scaled_by_a_param_is_in_no_chain(monkeypatch):
    linear = _Network.linear

    def scaled(self, name, x, *rest, **more):
        return linear(self, name, x * self.g.param(f"{name}.gate", x.shape, "f32") if "o_proj" in name else x, *rest, **more)

    monkeypatch.setattr(_Network, "linear", scaled)
    graph = build(config_of(SMALL | FAMILIES["llama"]), 1, 1, 300, "bf16", cache="bf16", steps=())
    texts = CudaBackend().compile(lower(graph, HOPPER, rlx.CompileOptions())).texts().values()
    assert any("attention whose results are stored with other values" in text for text in texts)


# -- the order of blocks, by code that is not the planner's ----------------------------------------------------------


def owners(s: Product) -> list[set[int]]:
    """The columns of each block."""
    unit = 32 if s.pieces.weights.blocks else 8 if s.contract.also is None else 4
    groups = s.contract.n // unit
    cuts = [groups * b // BLOCKS for b in range(BLOCKS + 1)]
    if s.pieces.weights.blocks:  # as many whole panels as each block can have, then some blocks one more, from the last one on
        cuts = [groups // BLOCKS * b for b in range(BLOCKS + 1)]
    out = [set(range(a * unit, b * unit)) for a, b in zip(cuts, cuts[1:])]
    for n in range(cuts[-1], groups):
        out[BLOCKS - 1 - (n - cuts[-1]) * BLOCKS // (groups - cuts[-1])] |= set(range(n * unit, (n + 1) * unit))
    return out


def helpers(s: Stage) -> list[tuple[int, int]]:
    """Blocks that tell another one their share of its sums: (block, the other). Pairs of blocks of a head have met before."""
    if isinstance(s, Attention):
        heads, splits = splits_of(s)
        return [(head * splits + n, head * splits) for head in range(heads) for n in range(2, splits, 2)]
    if not (words := s.pieces.words(BLOCKS)):
        return []
    rest = s.contract.n // 32 % BLOCKS
    shares = 1 + words // (rest * 32 * (1 if s.contract.also is None else 2))
    ends = [BLOCKS - 1 - n * BLOCKS // rest for n in range(rest)]
    return [(end - share, end) for end in ends for share in range(1, shares)]


def splits_of(s: Attention) -> tuple[int, int]:
    """Heads, and the blocks of each."""
    heads = s.native.inputs[0].dims[1]
    return heads, next(2**n for n in range(3, -1, -1) if 2**n * heads <= BLOCKS)


def readers(s: Stage, buffer: int, program: Program, every: bool = False) -> Iterator[tuple[int, set[int]]]:
    """The blocks that read words of a buffer, and which: of attention those that always do, or `every` one that may."""
    size = program.buffers[buffer].shape.num_elements
    if isinstance(s, Product):
        busy = {b for b, own in enumerate(owners(s)) if own} | {b for b, _ in helpers(s)}
        yield from ((b, set(range(size))) for b in sorted(busy))
        return
    (heads, splits), tiles = splits_of(s), s.at.tiles
    for b in range(0, heads * splits, 1 if every else splits):  # the blocks with the first share always read
        tile = b // splits // (heads // tiles)
        yield b, {first + tile * by + i for first, by, n in s.ranges[buffer] for i in range(n)}


def writers(s: Stage, buffer: int, program: Program) -> list[set[int]]:
    if isinstance(s, Product):
        return owners(s)
    (heads, splits), size = splits_of(s), s.native.inputs[0].dims[3]
    out = [set[int]() for _ in range(BLOCKS)]
    for head in range(heads):
        out[head * splits] = set(range(head * size, (head + 1) * size))
    return out


def heard(s: Stage, program: Program) -> set[int]:
    """The buffers whose words a stage reads: not those of which an epilogue reads its own column."""
    if isinstance(s, Attention):
        return {x for n in s.steps for x in program.steps[n].reads}
    ids = dict(zip(s.kernel.buffers, program.steps[s.step].args))
    return {ids[b] for b in (getattr(x, "buffer", None) for x in walk((s.contract.a,))) if b in ids}


def faults(found: Chain, program: Program) -> list[str]:
    """Words that a block may write while another one still has to read those that were there."""
    wrote: dict[int, tuple[int, list[set[int]]]] = {}
    done = np.full((BLOCKS, BLOCKS), -1)  # done[b, c]: the last stage that block c has certainly ended where block b now is
    before: dict[int, tuple[int, list[int]]] = {}  # by first word: the stage that read it, and the blocks
    users: dict[tuple[int, int], list[int]] = {}
    out: list[str] = []
    ends: list[np.ndarray] = []
    met = -1  # the last attention, whose blocks send their shares to the block in front of each
    for i, s in enumerate(found.stages):
        sources = [a for a in wrote if a in heard(s, program) and a in found.words]
        for a in sources:
            stage, columns = wrote[a]
            for b, wanted in readers(s, a, program):
                users.setdefault((stage, a), []).append(b)
                wrote_some = [c for c, own in enumerate(columns) if not own.isdisjoint(wanted)]
                done[b] = np.maximum(done[b], ends[stage][wrote_some].max(axis=0, initial=-1))
                done[b, wrote_some] = np.maximum(done[b, wrote_some], stage)
        for a in sources:
            before[found.areas[wrote[a][0], a][0]] = i, users[wrote[a][0], a]
        for (stage, a), (first, _) in found.areas.items():
            if stage != i:
                continue
            active = [b for b, own in enumerate(writers(s, a, program)) if own] if a >= 0 else [b for b, _ in helpers(s)]
            if first in before:
                last, those = before[first]
                out += [f"stage {i} writes words of {last}" for b in active for c in those if c != b and done[b, c] < last]
        if isinstance(s, Attention):
            known, (heads, splits) = done.copy(), splits_of(s)
            for a in sources:
                stage, columns = wrote[a]
                for b, wanted in readers(s, a, program, every=True):
                    wrote_some = [c for c, own in enumerate(columns) if not own.isdisjoint(wanted)]
                    known[b] = np.maximum(known[b], ends[stage][wrote_some].max(axis=0, initial=-1))
            second = range(1, heads * splits, 2) if splits > 1 else ()
            out += [f"stage {i}: block {b} sends before {b - 1} has read stage {met}" for b in second if known[b, b - 1] < met]
            met = i
        for b, other in helpers(s):
            done[other] = np.maximum(done[other], done[b])
            if isinstance(s, Attention):  # it has met its pair before it told
                done[other, b] = i
        if (i, -1) in found.areas:
            before[found.areas[i, -1][0]] = i, sorted({other for _, other in helpers(s)})
        done[np.arange(BLOCKS), np.arange(BLOCKS)] = i
        ends.append(done.copy())
        for a in program.steps[s.step].writes & found.words:
            wrote[a] = i, writers(s, a, program)
    return out


def unmarked(found: Chain, program: Program, runs: int = 3) -> list[str]:
    """Words that carry their mark before they are written: their readers would not wait for them."""
    marks, out = np.zeros(found.size, int), []
    for run, ((i, a), (first, use)) in product(range(runs), sorted(found.areas.items(), key=lambda item: item[0][0])):
        mark = use + 1 + run * found.uses[first] & 1
        copies, count = (found.copies, program.buffers[a].shape.num_elements) if a >= 0 else (1, shared_words(found.stages[i]))
        words = first + np.add.outer(np.arange(copies) * (-(-count // 32) * 32), np.arange(count)).ravel()
        out += [f"run {run}, stage {i}, buffer {a}: {(marks[words] == mark).sum()} words"] * bool((marks[words] == mark).any())
        marks[words] = mark
    return out


def shared_words(s: Stage) -> int:
    if isinstance(s, Product):
        return 32 * len(helpers(s)) * (1 if s.contract.also is None else 2)
    return (s.native.inputs[0].dims[3] + 4) * len(helpers(s))


def few_heads(hidden: int, inner: int, heads: int, size: int, kv: int) -> dict[str, object]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_key_value_heads")
    return SMALL | FAMILIES["packed"] | dict(zip(names, (hidden, inner, heads, size, kv)))


def branches() -> Program:
    """Three products of one row, then one of theirs."""
    g = rlx.Graph("branches")
    x = g.input("x", (1, 2048), "f32")
    for i in range(4):
        a, b, c = (rlx.dequant_matmul(x, g.param(f"{n}{i}", (5120, 2048 // 256 * 144), "u8"), format="q4_k") for n in "abc")
        x = x + rlx.dequant_matmul(rlx.silu(a) * b * c, g.param(f"d{i}", (2048, 5120 // 256 * 144), "u8"), format="q4_k")
    g.set_outputs([x])
    return lower(g, HOPPER, rlx.CompileOptions())


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (MODELS["qwen3"], "bf16"), (WIDE["qwen2"], "bf16"), (SMALL | FAMILIES["gemma"], "bf16"),
        (SMALL | FAMILIES["wide"], "bf16"), (SMALL | FAMILIES["packed"], "q4_k"), (few_heads(4096, 10752, 4, 128, 2), "q4_k"),
        (few_heads(4608, 5376, 4, 64, 2), "q8_0"), (few_heads(1024, 5376, 20, 64, 4), "q4_k"), (None, "q4_k"),
    ],
)  # fmt: skip
def test_words_are_written_again_only_where_every_block_has_read_them(config, form):
    program = decoder(config, form) if config else branches()
    (found,) = chains(program)
    assert not faults(found, program)
    assert not unmarked(found, program)
    assert len(found.uses) < len(found.areas), "words are used again"


def test_the_check_finds_shares_that_are_sent_too_early():
    """Two attentions with no words between them."""
    program = decoder(MODELS["qwen3"])
    (found,) = chains(program)
    first, second, *_ = (i for i, s in enumerate(found.stages) if isinstance(s, Attention))
    between = {a for s in found.stages[first:second] for a in program.steps[s.step].writes}
    assert any("sends before" in fault for fault in faults(replace(found, words=found.words - between), program))


def test_the_check_finds_words_that_are_used_again_too_early():
    program = decoder(MODELS["qwen3"])
    (found,) = chains(program)
    places = {key: value for key, value in found.areas.items() if key[1] >= 0}
    first = next(iter(places.values()))
    bad = replace(found, areas=dict(found.areas) | dict.fromkeys(list(places)[:3], first))
    assert faults(bad, program)
    assert unmarked(bad, program), "the marks of the second use are those of the first"


# -- on a GPU ------------------------------------------------------------------------------------------------------


def stepped(
    config, params, tokens, device: str, weights: str | dict[str, str], cache: str, keys: int, start: int, full: np.ndarray
) -> np.ndarray:
    graph = build(config_of(config), 1, 1, keys, weights, cache=cache)
    compiled = rlx.Session(device).compile(graph)
    compiled.set_params({str(p.name): params[str(p.name)].astype(p.dtype.numpy) for p in graph.params})
    for h in graph.handles:
        if h.shape.dims:
            row = full[: int(np.prod(h.shape.static))].reshape(h.shape.static)
            compiled.bind_handle(str(h.name), row.astype(h.dtype.numpy))
        else:
            compiled.bind_handle(str(h.name), np.full((), start, h.dtype.numpy))
    inputs = [{"tokens": np.full((1, 1), t, np.int32), "count": np.array(1, np.int32)} for t in tokens]
    return np.stack([compiled.run(given)[0][0] for given in inputs])


def weights_of(config, form: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Params in a form, and the numbers that they are."""
    rng, bf16 = np.random.default_rng(0), rlx.as_dtype("bf16").numpy
    given, plain = dict[str, np.ndarray](), dict[str, np.ndarray]()
    formats = formats_of(config, form)
    for p in build(config_of(config), 1, 1, 8, formats, cache="bf16").params:
        name, dims = str(p.name), p.shape.static
        packed = FORMATS.get(formats if isinstance(formats, str) else formats.get(name, ""))
        if packed and len(dims) == 2:
            given[name] = np.zeros(dims, np.uint8)
            random_weights(packed)(rng, [given[name]] * 2)
            plain[name] = packed.decode_rows(given[name])
        else:
            plain[name] = (rng.standard_normal(dims) * 0.06 + (len(dims) == 1)).astype(bf16).astype(np.float32)
            given[name] = plain[name]
    return given, plain


@on_gpu
@pytest.mark.parametrize(
    ("name", "form", "keys", "start"),
    [
        *((*x, *at) for x in [*((n, "bf16") for n in FAMILIES), *(("packed", f) for f in PACKED)] for at in PLACES),
        *((n, "bf16", 900, start) for n in ("llama", *MEETING) for start in (70, 150, 310, 630)),
    ],
)  # fmt: skip
def test_logits_are_as_close_to_those_in_f32_as_by_launches(name, form, keys, start, monkeypatch):
    """The same weights and a cache of numbers of bf16, on the CPU in f32; tokens are given, so errors do not add up. In the last
    cases blocks become more while tokens are made: 80 keys of 128 elements, or 160 of 64, for each."""
    config = SMALL | (FAMILIES | MEETING)[name]
    params, plain = weights_of(config, form)
    formats = formats_of(config, form)
    handles = build(config_of(config), 1, 1, keys, formats, cache="bf16").handles
    full = np.random.default_rng(1).standard_normal(max(int(np.prod(h.shape.static)) for h in handles))
    full = full.astype(rlx.as_dtype("bf16").numpy).astype(np.float32)
    tokens = np.random.default_rng(2).integers(0, 1000, 24)
    want = stepped(config, plain, tokens, "cpu", "f32", "f32", keys, start, full)
    found = stepped(config, params, tokens, "cuda", formats, "bf16", keys, start, full)
    again = stepped(config, params, tokens, "cuda", formats, "bf16", keys, start, full)
    monkeypatch.setattr(code, "in_chains", lambda program, launches, *rest: launches)
    with monkeypatch.context() as patch:
        patch.setattr("rlx.frontends.models.decoder.Graph", _renamed)  # another graph: the session keeps compiled ones
        launches = stepped(config, params, tokens, "cuda", formats, "bf16", keys, start, full)
    np.testing.assert_array_equal(found, again)
    off, other = (np.linalg.norm(x - want, axis=1) / np.linalg.norm(want, axis=1) for x in (found, launches))
    assert not np.array_equal(found, launches), "the chain rounds otherwise"
    assert off.mean() < 0.02 and off.mean() < 1.25 * other.mean() and off.max() < 1.5 * other.max(), (off, other)


@on_gpu
def test_tokens_are_drawn_by_the_temperature_of_the_run():
    """By a chain, whose last product reads it: the likeliest token where one is kept, and others where it is high."""
    config = SMALL | FAMILIES["qwen3"]
    params, _ = weights_of(config, "bf16")

    def tokens(steps: tuple[str, ...], **numbers: float) -> list[int]:
        graph = sampling(config, *steps)
        compiled = rlx.Session("cuda").compile(graph)
        compiled.set_params({str(p.name): params[str(p.name)].astype(p.dtype.numpy) for p in graph.params})
        for h in graph.handles:
            name, dims = str(h.name), h.shape.static
            compiled.bind_handle(name, np.full(dims, numbers.get(name.removeprefix("sampling."), 0), h.dtype.numpy))
        return [int(compiled.run({})[0][0]) for _ in range(40)]

    best, drawn = tokens(()), ("temperature", "top_k", "top_p", "min_p")
    assert tokens(drawn, temperature=0.5, top_k=1, top_p=0.9, min_p=0.1) == best
    assert tokens(("temperature",), temperature=1e-7) == best
    high = tokens(("temperature",), temperature=1e4)
    assert len(set(high)) > 30, "nearly all are alike"


def _renamed(name: str):
    return rlx.Graph(f"{name}_launches")

"""A language model takes the memory that `memory()` said before: resident bytes of a process of its own, from start to answer."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LIBRARIES = 48 << 20  # bytes of LLVM's library that the system may keep resident or not: it maps more or less around what is used
HEAP = 24 << 20  # bytes of graphs and of the compiler's heap, 20 to 23 MB: its threads have arenas, code for AVX2 is the longest
VOCAB, HIDDEN, LAYERS, INNER = 40_000, 768, 4, 2048
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 96, "intermediate_size": INNER, "max_position_embeddings": 1024, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
RUN = """
import json, sys
import rlx
def resident(what):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(what))
model = rlx.models.load(sys.argv[1], weights=sys.argv[2] or None, capacity=512)
stated, before = model.memory(prompt=128), resident("RssAnon")
model.step(list(range(128)))
for token in range(8):
    model.step([token])
peak = resident("VmHWM")
grown = peak - resident("RssFile") - before
print(json.dumps({"peak": peak, "grown": grown, "stated": stated, "again": model.memory(prompt=128)}))
"""


def write_model(folder: Path, tied: bool) -> None:
    """A folder with random bf16 weights."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        sizes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        inner = {
            "self_attn.q_proj": (768, HIDDEN), "self_attn.k_proj": (384, HIDDEN), "self_attn.v_proj": (384, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 768), "self_attn.q_norm": (96,), "self_attn.k_norm": (96,),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        sizes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in inner.items()}
    head, at, rng = {}, 0, np.random.default_rng(0)
    for name, shape in sizes.items():
        end = at + 2 * int(np.prod(shape))
        head[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for shape in sizes.values():
            values = rng.standard_normal(int(np.prod(shape)), np.float32) * 0.02
            f.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model that is tied, and one that is not."""
    found = {tied: tmp_path_factory.mktemp("model") for tied in (True, False)}
    for tied, folder in found.items():
        write_model(folder, tied)
    return found


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("tied", "weights"), [(True, "f32"), (False, ""), (True, "int8")])
def test_the_peak_is_what_was_stated(tied, weights, folders):
    """Within 5%, but for pages of libraries' files, which are the system's to keep; what is no file's is within 5% of the
    model's own bytes and a heap. The table of a tied model is counted, and there, once."""
    done = subprocess.run([sys.executable, "-c", RUN, str(folders[tied]), weights], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    peak, stated = found["peak"], sum(found["stated"].values())
    assert 0.95 * stated - LIBRARIES < peak < 1.05 * stated + LIBRARIES, found
    own = stated - found["stated"]["process"]
    assert 0.95 * own < found["grown"] < 1.05 * own + HEAP, found
    params = found["stated"]["params"] + found["stated"]["prepared"]
    elements = VOCAB * HIDDEN * (1 if tied else 2) + LAYERS * HIDDEN * (4 * 576 + 3 * INNER)
    assert params < 1.02 * elements * {"f32": 4, "": 2, "int8": 34 / 32}[weights]
    assert 0.95 * peak - LIBRARIES < sum(found["again"].values()) < 1.05 * peak + LIBRARIES  # also once it is there

"""Compiles kernels of the CUDA backend without a GPU, and judges what the assembler reports about them.

    python -m tests.cuda_kernels                                    # all, for every architecture below
    python -m tests.cuda_kernels --arch sm_90a --only softmax       # of the cases and models with that word in their name

Kernels of every conformance case, and of language models and encoders in the shapes of real ones. A kernel is faulty if it spills
registers, keeps arrays in local memory though it declares none, or needs more shared memory than a block of its architecture has.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parent))  # where the tests' modules find one another

import device_conformance as conformance
from op_cases import cases

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import launch_of, options_of, text_of
from rlx.backends.cuda.schedule import Launch
from rlx.compiler import lower
from rlx.frontends.models import bert, decoder
from rlx.frontends.models.families import config_of
from rlx.ir.graph import Graph
from rlx.ir.kernel import Alu, walk
from rlx.ir.kernel_text import kernel_key

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100": 227 << 10}  # of a block, at most
REGISTERS = 65536  # of a multiprocessor
REDUCTION = 40  # bytes of local memory by which CUDA's sin and cos reduce large angles
TOGETHER = 60  # kernels of a translation unit: reading the common functions takes longer than most kernels
PLAIN = {"max_position_embeddings": 4096, "rope_theta": 1e4, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **PLAIN, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "llama": {
        **PLAIN, "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    },
    "gemma2": {
        **PLAIN, "model_type": "gemma2", "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 3072, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "qwen3_moe": {
        **PLAIN, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 1000, "n_embd": 768, "n_layer": 1, "n_head": 12, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    },
}  # fmt: skip
OTHERS = {  # the other families: hidden size, heads, heads of keys, size of a head, inner size
    "mistral": (4096, 32, 8, 128, 14336), "qwen2": (896, 14, 2, 64, 4864), "smollm3": (2048, 16, 4, 128, 11008),
    "phi3": (3072, 32, 32, 96, 8192), "phi": (2560, 32, 32, 80, 10240), "gemma": (2048, 8, 1, 256, 16384),
    "gemma3_text": (1152, 4, 1, 256, 6912),
}  # fmt: skip
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
TWO_KINDS = {"gemma3_text": {"sliding_window_pattern": 2, "sliding_window": 512}, "smollm3": {"no_rope_layers": [1, 0]}}
ENCODER = bert.BertConfig.parse({
    "vocab_size": 1000, "hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 1536,
    "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
})  # fmt: skip


# -- graphs --------------------------------------------------------------------------------------------------------


def graphs(arch: str, sample: bool = False) -> Iterator[tuple[str, Graph, rlx.CompileOptions]]:
    """All graphs by name, with the options of their compile. `sample`: the first dtype of every other case of each op, the
    smaller of the models."""
    plain = rlx.CompileOptions()
    chosen = cases(awkward=False, dtypes=target(arch).dtypes)
    if sample:
        chosen = list({(c.op.name, str(c.sample)): c for c in reversed(chosen)}.values())
    for name, found in groupby(sorted(chosen, key=lambda c: c.op.name), key=lambda c: c.op.name):
        yield f"op {name}", conformance.together(name, list(found)[:: 1 + sample])[0], plain
    for tokens in (1, 2):
        yield "states", conformance.log_graph(tokens), plain
    for name, build in conformance.LENGTHS.items():
        yield f"length, {name}", conformance.lengths_graph(build), plain.bind_extent("n", 13)
    yield from models(sample)


def models(sample: bool) -> Iterator[tuple[str, Graph, rlx.CompileOptions]]:
    sampled = ("repetition_penalty", "temperature", "top_k", "top_p")
    formats = [("bf16", "bf16"), ("f32", "f32"), ("int8", "f32"), ("q4_k", "bf16")]
    for name, config in list(MODELS.items())[: 1 if sample else None]:
        for weights, cache in formats[: 1 if sample else 3 if name == "gpt2" else None]:
            for tokens in (1, 128) if sample else (1, 8, 128):
                steps = sampled if tokens == 1 else None
                g = decoder.build(config_of(config), 1, tokens, 2048, weights, cache=cache, steps=steps)
                yield f"model {name} {weights} {tokens}", g, rlx.CompileOptions()
    for name, sizes in () if sample else OTHERS.items():
        config = {"model_type": name, "max_position_embeddings": 4096, "vocab_size": 32000, **dict(zip(SIZES, sizes))}
        config |= {"num_hidden_layers": 2, **TWO_KINDS[name]} if name in TWO_KINDS else {"num_hidden_layers": 1}
        for tokens in (1, 128):
            g = decoder.build(config_of(config), 1, tokens, 2048, "bf16", cache="bf16")
            yield f"model {name} {tokens}", g, rlx.CompileOptions()
    for rows, length in ((1, 16), (8, 128)):
        for precision in ("f32", "bf16")[sample:]:
            options = rlx.CompileOptions(precision=precision)
            yield f"model bert {precision} {rows}x{length}", bert.build(ENCODER, rows, length), options


# -- kernels -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A kernel's launch and text. `where`: the graph that it comes from."""

    where: str
    name: str
    launch: Launch
    text: str

    @property
    def functions(self) -> str:
        """The text in front of the kernel. Kernels that have the same fit into one translation unit."""
        return self.text[: self.text.index('extern "C"')]


def kernels(arch: str, only: str = "", sample: bool = False) -> list[Built]:
    """Each distinct kernel once."""
    found: dict[str, Built] = {}
    for where, g, options in graphs(arch, sample):
        for steps in lower(g, target(arch), options).phases.values() if only in where else ():
            for kernel in (s.kernel for s in steps if not s.kernel.collective):
                if (key := kernel_key(kernel)) not in found:
                    at, name = launch_of(kernel, arch), f"kernel{len(found)}"
                    found[key] = Built(f"{where}: {' '.join(kernel.origin)}", name, at, text_of(at, name))
    return list(found.values())


@dataclass(frozen=True)
class Report:
    """The assembler's figures of one kernel: bytes of local memory, of registers stored there, of shared memory; registers."""

    stack: int
    spilled: int
    shared: int
    registers: int


def units(built: list[Built]) -> Iterator[tuple[str, list[Built]]]:
    """Translation units. Kernels behind the same functions share them; other functions are in a namespace of their own, and their
    macros end with it: NVRTC takes longer to start than to read them."""
    ordered = sorted(built, key=lambda b: b.functions)
    for members in (ordered[i : i + TOGETHER] for i in range(0, len(ordered), TOGETHER)):
        text = ""
        for n, (functions, alike) in enumerate(groupby(members, key=lambda b: b.functions)):
            ends = "".join(f"#undef {name}\n" for name in re.findall(r"^#define (\w+)", functions, re.M))
            kernels = "".join(b.text.removeprefix(functions) for b in alike)
            text += f"namespace unit{n} {{\n{functions}{kernels}\n}}\n{ends}"
        yield text, members


def assembled(text: str, arch: str) -> str:
    """The reports of compiler and assembler on a translation unit. A line that is new each time keeps a compiler that has a cache
    from answering out of it, without a word."""
    from cuda.core import Program  # type: ignore[reportAttributeAccessIssue]

    log = io.StringIO()
    options = options_of(arch, ptxas_options=["-v"], disable_warnings=True, no_cache=True)
    Program(f"{text}\n// {uuid4()}\n", "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def reports(text: str, arch: str) -> dict[str, Report]:
    """The report on each kernel of a translation unit, by name."""
    found = {}
    for part in assembled(text, arch).split("Compiling entry function '")[1:]:
        words = (r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes smem", r"Used (\d+) registers")
        numbers = [int(m[1]) if (m := re.search(word, part)) else 0 for word in words]
        found[part.partition("'")[0]] = Report(*numbers)
    return found


def faults(built: list[Built], arch: str) -> list[str]:
    """A line for each kernel that is not as it should be."""
    import cuda.core  # type: ignore[reportMissingImports]  # noqa: F401  before the threads: its import is not safe in several at once

    def of_unit(unit: tuple[str, list[Built]]) -> list[str]:
        text, members = unit
        try:
            found = reports(text, arch)
        except Exception as e:  # noqa: BLE001  it is reported
            if len(members) > 1:  # one of them is at fault
                return [fault for b in members for fault in of_unit((b.text, [b]))]
            return [f"{members[0].where}: NVRTC rejects it: {re.sub(chr(92) + 's+', ' ', str(e))[:500]}"]
        return [f"{b.where}: {fault}" for b in members for fault in judged(b, found[b.name], arch)]

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as threads:
        return [fault for found in threads.map(of_unit, units(built)) for fault in found]


def judged(b: Built, report: Report, arch: str) -> Iterator[str]:
    """Registers that are saved around the slow path of a division or a root, which is a call, are no fault: ptxas does that with
    registers to spare."""
    blocks = int(m[1]) if (m := re.search(r"__launch_bounds__\(\d+, (\d+)\)", b.text)) else 1
    allowed = min(255, REGISTERS // (b.launch.threads * blocks) // 8 * 8)
    if report.spilled and report.registers > allowed - 8:
        yield f"spills {report.spilled} bytes: it has {allowed} registers"
    inside = list(walk(b.launch.kernel.body))
    reduces = any(isinstance(x, Alu) and x.op in ("sin", "cos") for x in inside)
    own = b.launch.kernel.locals and b.launch.team == 1
    if (kept := report.stack - -(-report.spilled // 8) * 8) > REDUCTION * reduces and not own:
        yield f"keeps {kept} bytes in local memory"
    if (needed := b.launch.shared + report.shared) > SHARED_BYTES[arch]:
        yield f"needs {needed} bytes of shared memory, {arch} has {SHARED_BYTES[arch]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--arch", action="append", choices=ARCHITECTURES)
    options.add_argument("--only", default="", help="graphs with this in their name, such as 'op soft' or 'model qwen3'")
    options.add_argument("--sample", action="store_true", help="the part that the tests compile")
    given = options.parse_args()
    failed = False
    for arch in given.arch or ARCHITECTURES:
        start = time.perf_counter()
        built = kernels(arch, given.only, given.sample)
        found = faults(built, arch)
        print(*(f"{arch}: {fault}" for fault in found), sep="\n", end="\n" if found else "")
        print(f"{arch}: {len(built)} kernels, {len(found)} faults, in {time.perf_counter() - start:.0f} s", flush=True)
        failed |= bool(found) or not built
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

"""The text of a fixed set of programs and of their kernels, compiled for fixed targets: what tests/test_kernel_texts.py compares.

    python tests/known_programs.py            # say which texts differ from the stored ones
    python tests/known_programs.py --accept   # store the texts as they are now
    python tests/known_programs.py --accept ops   # those of the sets whose name starts so, such as after a new op
    python tests/known_programs.py --ir DIR   # also write the generated code, to compare it between two checkouts

Nothing here depends on the processor: targets are written out. Float constants are left out, since numpy computes some of
them and rounds by the processor's vector instructions. A kernel equal to an earlier one of its file is printed once. Of the
generated LLVM IR, or of CUDA C++ without the common functions, only a hash is stored; --ir shows what changed.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a script: the package beside this folder

import numpy as np
from collective_graphs import all_cases as collective_cases
from collective_graphs import mlp as parallel_mlp
from expert_graphs import layers
from op_cases import cases

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.render import render
from rlx.backends.cpu.target import target_for
from rlx.backends.cuda.backend import target as cuda_target
from rlx.backends.cuda.code import is_wide, launch_of, prologue
from rlx.backends.cuda.code import text_of as cuda_text
from rlx.compiler import lower
from rlx.frontends.models import bert, decoder, families
from rlx.frontends.parallel import decoder_marks
from rlx.frontends.sampling import Sampling
from rlx.ir.blocks import FORMATS
from rlx.ir.graph import Graph
from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import kernel_key, print_kernel
from rlx.ir.program import Program
from rlx.ir.shape import Dim
from rlx.ir.target import Target

FOLDER = Path(__file__).parent / "kernel_texts"
ACCEPT = "python tests/known_programs.py --accept"

LINUX = "x86_64-unknown-linux-gnu"
TARGETS = {
    "avx512 x 2": with_natives(target_for(LINUX, "x86-64-v4", ("avx512bf16", "avx512vnni"), threads=2)),
    "avx2 x 1": with_natives(target_for(LINUX, "x86-64-v3", threads=1)),
    "amx x 16": with_natives(
        target_for(LINUX, "x86-64-v4", ("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"), threads=16)
    ),
    "neon x 4": with_natives(target_for("aarch64-linux-gnu", "generic", ("neon",), threads=4)),
}
WIDE, NARROW, AMX, NEON = CPUS = tuple(TARGETS)
MATRICES = "neoverse-n2 x 2"
TARGETS[MATRICES] = with_natives(target_for("aarch64-linux-gnu", "neoverse-n2", threads=2))
HOPPER = "sm_90a"
TARGETS[HOPPER] = cuda_target(HOPPER)

# -- graphs: (what it shows, graph, options, target) ----------------------------------------------------------------

Known = tuple[str, Graph, rlx.CompileOptions, str]
PLAIN = rlx.CompileOptions()


def op_table(dtype: str) -> Iterator[Known]:
    """Every sample of every op in f32 (or in the dtypes that it fixes); in others the first two, as loops are the same."""
    for case in cases(awkward=False):
        if case.dtype.name == dtype and not case.op.collective and (dtype == "f32" or case.index < 2):
            yield repr(case), case.graph(), PLAIN, WIDE


def large_ops() -> Iterator[Known]:
    """Ops whose loops depend on the size: beyond the caches, with few and with many rows."""

    def unary(name: str, op: Callable[[Any], Any], *dims: int) -> Known:
        g = Graph(name)
        g.set_outputs([op(g.input("x", dims, "f32"))])
        return name, g, PLAIN, WIDE

    def product(name: str, m: int, k: int, n: int, dtype: str = "f32", target: str = WIDE, packed: bool = True) -> Known:
        g = Graph(name)
        x = g.input("x", (m, k), dtype)
        w = g.param("w", (k, n), dtype) if packed else g.input("w", (k, n), dtype)
        g.set_outputs([rlx.gelu(rlx.cast(x @ w, rlx.f32) + g.param("b", (n,), "f32"))])
        return name, g, PLAIN, target

    yield unary("sum of columns", lambda x: rlx.sum(x, axis=0), 5000, 300)
    yield unary("sum of all", lambda x: rlx.sum(x), 2_000_000)
    yield unary("softmax of long rows", lambda x: rlx.softmax(x), 4, 200_000)
    yield unary("norm of rows", lambda x: rlx.layer_norm(x), 2048, 1024)
    yield unary("transpose", lambda x: rlx.exp(x.T), 2000, 3000)
    yield unary("cumsum down", lambda x: rlx.cumsum(x, axis=0), 1000, 500)
    yield unary("argmax", lambda x: rlx.argmax(x, axis=-1), 3, 100_000)
    yield unary("argmax down", lambda x: rlx.argmax(x, axis=0), 301, 4096)
    yield unary("sort", lambda x: rlx.top_k(x, k=40)[0], 3, 50_000)
    for target in CPUS:
        for dtype in ("f32", "bf16"):
            yield product(f"product {dtype} {target}", 130, 768, 3072, dtype, target)
    yield product(f"product bf16 {MATRICES}", 130, 768, 3072, "bf16", MATRICES)
    yield product("product of one row", 1, 768, 3072)
    yield product("product without weights", 130, 500, 700, packed=False)
    yield product("product f64", 33, 91, 49, "f64")


def minilm() -> Iterator[Known]:
    config = bert.BertConfig(30522, 384, 6, 12, 1536, 512, normalize=True)
    yield "minilm 8 x 128", bert.build(config, 8, 128), PLAIN, WIDE
    yield "minilm 1 x 16, one thread", bert.build(config, 1, 16), PLAIN, NARROW


def small_encoder() -> Iterator[Known]:
    """The encoder under every option that changes the arithmetic or leaves a pass out, and on every target."""
    config = bert.BertConfig(211, 48, 2, 4, 96, 64, pooling="cls")
    for target in CPUS:
        for precision in ("f32", "bf16", "int8"):
            yield f"encoder {precision} on {target}", bert.build(config, 3, 24), PLAIN.replace(precision=precision), target
    for left_out in ("canonicalise", "tidy", "fuse", "inplace", "reuse", "concurrent"):
        yield f"encoder without {left_out}", bert.build(config, 3, 24), PLAIN.replace(disable=(left_out,)), WIDE


def two_layers(model_type: str = "qwen3", **more: Any) -> decoder.DecoderConfig:
    sizes = {
        "model_type": model_type, "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 768, "max_position_embeddings": 512,
    }  # fmt: skip
    return families.config_of({**sizes, **more})


def decoders() -> Iterator[Known]:
    config = two_layers()
    for tokens in (1, 8, 128):
        yield f"qwen3, {tokens} tokens", decoder.build(config, 1, tokens, 512), PLAIN, WIDE
    yield "qwen3, two sequences", decoder.build(config, 2, 1, 512, cache="bf16"), PLAIN, WIDE
    yield "qwen3, bf16 weights", decoder.build(config, 1, 1, 512, "bf16"), PLAIN, WIDE
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1).steps
    yield "qwen3, sampled", decoder.build(config, 1, 1, 512, steps=sampling), PLAIN, WIDE
    yield "qwen3, greedy prefill", decoder.build(config, 1, 8, 512, steps=()), PLAIN, WIDE
    yield "gemma2", decoder.build(two_layers("gemma2", sliding_window=16, tie_word_embeddings=True), 1, 8, 64), PLAIN, NARROW
    gpt2 = {"num_key_value_heads": 8, "head_dim": None}
    yield "gpt2", decoder.build(two_layers("gpt2", **gpt2), 1, 8, 64, all_logits=True), PLAIN, NARROW


def quantised() -> Iterator[Known]:
    sizes = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
    config = two_layers(**sizes)  # few distinct shapes of matrices
    for form in FORMATS:
        yield form, decoder.build(config, 1, 1, 256, form), PLAIN, WIDE
    yield "q8_0, prefill", decoder.build(config, 1, 8, 256, "q8_0"), PLAIN, WIDE
    yield "q4_k, prefill on avx2", decoder.build(config, 1, 8, 256, "q4_k"), PLAIN, NARROW
    for form in ("q8_0", "q4_k"):
        g = Graph(form)
        right = g.param("w", (70, 512 // FORMATS[form].block * FORMATS[form].nbytes), "u8")
        g.set_outputs([rlx.dequant_matmul(g.input("x", (8, 512), "f32"), right, format=form)])
        yield f"{form} on {MATRICES}", g, PLAIN, MATRICES
    yield "int8, tied", decoder.build(two_layers(**sizes, tie_word_embeddings=True), 1, 1, 256, "int8"), PLAIN, WIDE


def extents() -> Iterator[Known]:
    config = bert.BertConfig(211, 48, 1, 4, 96, 64)
    yield "encoder by length", bert.build(config, 2, Dim("n")), PLAIN.bind_extent("n", 48), WIDE
    yield "encoder by batch", bert.build(config, Dim("n"), 12), PLAIN.bind_extent("n", 16), WIDE
    yield "encoder by length, int8", bert.build(config, 1, Dim("n")), PLAIN.bind_extent("n", 48).replace(precision="int8"), NARROW
    g = Graph("rows")
    x = g.input("x", ("n", 300), "f32")
    g.set_outputs([rlx.sum(x, axis=0), rlx.cumsum(x, axis=0), rlx.softmax(x, axis=0), rlx.max(x), x.T])
    yield "rows", g, PLAIN.bind_extent("n", 1000), WIDE


def ranks() -> Iterator[Known]:
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast_rank", "all_to_all", "rank_slice"):
        yield f"every {name}", collective_cases(name, 2)[0], PLAIN, WIDE
    yield "parallel mlp", parallel_mlp(2), PLAIN, WIDE
    config = two_layers()
    for form in ("f32", "q8_0"):
        whole = decoder.build(config, 1, 1, 256, form)
        block = FORMATS[form].block if form in FORMATS else 1
        part = rlx.partition(whole, decoder_marks(whole, config, 2, lambda _, block=block: block), 2)
        yield f"decoder of two ranks, {form}", part.graph, PLAIN, WIDE


def experts() -> Iterator[Known]:
    """Layers of experts with one token, a few, and many."""
    for tokens in (1, 16, 128):
        yield f"{tokens} tokens", layers(tokens, 256, 128, 16, 4), PLAIN, WIDE
    yield "bf16, matrix unit", layers(64, 256, 128, 8, 4, "bf16"), PLAIN, AMX
    yield "f16, one thread", layers(3, 256, 128, 8, 2, "f16"), PLAIN, NARROW
    yield "two layers by length", layers(Dim("n"), 96, 64, 8, 2, count=2), PLAIN.bind_extent("n", 24), NEON
    for form, target in (("q4_k", WIDE), ("q8_0", NARROW)):
        yield f"{form}, 8 tokens", layers(8, 256, 256, 8, 2, "f32", form), PLAIN, target


def cuda() -> Iterator[Known]:
    """A kernel of each kind, and steps of a network with plain and with packed weights."""

    def unary(name: str, op: Callable[[Any], Any], *dims: int) -> Known:
        g = Graph(name)
        g.set_outputs([op(g.input("x", dims, "bf16"))])
        return name, g, PLAIN, HOPPER

    for tokens, form in ((1, ""), (64, ""), (4, "q4_k")):
        yield f"experts, {form or 'bf16'}, {tokens} tokens", layers(tokens, 256, 256, 16, 4, "bf16", form), PLAIN, HOPPER
    yield unary("gelu", rlx.gelu, 512, 1024)
    yield unary("transpose", lambda x: rlx.copy(x.T), 512, 1024)
    yield unary("softmax of rows", rlx.softmax, 1000, 50_257)
    yield unary("softmax of columns", lambda x: rlx.softmax(x, axis=0), 4096, 4096)
    yield unary("running totals", lambda x: rlx.cumsum(x, axis=0), 4096, 1024)
    yield unary("greatest", lambda x: rlx.argmax(x, axis=1), 4096, 4096)
    yield unary("sort", lambda x: rlx.sort(x)[0], 100, 3000)
    config = two_layers()
    for weights in ("bf16", "q8_0"):
        yield f"qwen3, {weights}", decoder.build(config, 1, 1, 512, weights, cache="bf16"), PLAIN, HOPPER
    yield "qwen3, 128 tokens", decoder.build(config, 1, 128, 512, "bf16", cache="bf16"), PLAIN, HOPPER


SETS: dict[str, Callable[[], Iterator[Known]]] = {
    **{f"ops-{d}": lambda d=d: op_table(d) for d in ("f32", "bf16", "i32", "u8", "bool")},
    "large-ops": large_ops, "minilm": minilm, "small-encoder": small_encoder, "decoders": decoders, "quantised": quantised,
    "extents": extents, "ranks": ranks, "experts": experts, "cuda": cuda,
}  # fmt: skip


# -- text ----------------------------------------------------------------------------------------------------------


@cache
def programs(name: str) -> tuple[tuple[str, str, Program], ...]:
    """(what it shows, its target, the program) of each of the set `name`."""
    return tuple((what, target, lower(graph, TARGETS[target], options)) for what, graph, options, target in SETS[name]())


def text_of(name: str) -> str:
    """The text of the set `name`: each program with its buffers and steps, and each of its kernels that is not yet above."""
    seen: dict[str, str] = {}
    codes: dict[tuple[str, str], str] = {}
    parts: list[str] = []
    for what, target, program in programs(name):
        parts.append(f"==== {what}  [{target}]\n{program_text(program)}")
        kernels = {id(s.kernel): s.kernel for steps in program.every_phase.values() for s in steps}
        for kernel in kernels.values():
            here, known = f"{kernel.name} of {what}", (target, kernel_key(kernel))
            if (first := seen.setdefault(known[1], here)) == here and known in codes:
                continue
            if known not in codes:
                codes[known] = hashlib.sha256(code_of(kernel, program.target).encode()).hexdigest()[:16]
            text = print_kernel(kernel) if first == here else f"{print_kernel(kernel).splitlines()[0]}\nas {first}"
            parts.append(f"{text}\n{launched(kernel) if target == HOPPER else 'llvm ir'} {codes[known]}")
    return "\n\n".join(parts) + "\n"


def code_of(kernel: Kernel, target: Target) -> str:
    """The LLVM IR, or CUDA C++, generated for `kernel`; "" where it is a collective, or runs sub-programs."""
    if kernel.collective or kernel.flow:
        return ""
    if target.name != "cuda":
        return render(kernel, target, "kernel").text
    at = launch_of(kernel, HOPPER)
    return cuda_text(at, "kernel").removeprefix(prologue(is_wide(at)))


def launched(kernel: Kernel) -> str:
    at = launch_of(kernel, HOPPER)
    return f"{type(at).__name__}, {at.blocks} x {at.threads} threads, {at.shared} bytes:"


def program_text(program: Program) -> str:
    """Buffers and steps. Hashes in the names of prepared buffers become numbers, since they stand for printed things; constants
    of integers say what is in them."""
    hashes: dict[str, int] = {}
    text = re.sub(r":([0-9a-f]{24})\[", lambda m: f"#{hashes.setdefault(m[1], len(hashes))}[", str(program))
    for b in program.buffers:
        if b.data is not None and b.data.dtype.kind in "iub":
            content = hashlib.sha256(np.ascontiguousarray(b.data).tobytes()).hexdigest()[:12]
            text = re.sub(rf"^(  %{b.id} .*)$", rf"\1  # content {content}", text, count=1, flags=re.MULTILINE)
    return text


def stored(name: str) -> str:
    path = FOLDER / f"{name}.txt"
    return path.read_text() if path.exists() else ""


def difference(name: str, lines: int = 150) -> str:
    """The first lines of a unified diff from the stored text to what the compiler makes now; "" where they are the same."""
    before, now = stored(name).split("\n"), text_of(name).split("\n")
    if before == now:
        return ""
    found = list(difflib.unified_diff(before, now, f"stored {name}", f"compiled {name}", n=6, lineterm=""))
    more = [f"... {len(found) - lines} more lines of difference"] if len(found) > lines else []
    return "\n".join(found[:lines] + more)


def accept(names: Iterable[str] = SETS) -> list[str]:
    """Store these texts as they are now; the names of those that changed."""
    FOLDER.mkdir(exist_ok=True)
    changed = []
    for name in names:
        if (text := text_of(name)) != stored(name):
            changed.append(name)
            (FOLDER / f"{name}.txt").write_text(text)
    for path in FOLDER.glob("*.txt"):
        if path.stem not in SETS:
            changed.append(path.stem)
            path.unlink()
    return changed


def write_ir(folder: Path, names: Iterable[str]) -> None:
    """LLVM IR, or CUDA C++, of every kernel of these sets, a file for each distinct one."""
    for name in names:
        for what, target, program in programs(name):
            kernels = {kernel_key(s.kernel): s.kernel for steps in program.every_phase.values() for s in steps}
            for kernel in (k for k in kernels.values() if not (k.collective or k.flow)):
                place = folder / re.sub(r"\W+", "-", f"{name} {what} {target}")
                place.mkdir(parents=True, exist_ok=True)
                ending = "cu" if target == HOPPER else "ll"
                (place / f"{kernel.name}.{ending}").write_text(code_of(kernel, program.target))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("--ir", type=Path)
    parser.add_argument("sets", nargs="*", metavar="SET", help="the start of the names of the sets; all by default")
    given = parser.parse_args()
    chosen = [name for name in SETS if name.startswith(tuple(given.sets) or "")]
    if unknown := [start for start in given.sets if not any(name.startswith(start) for name in SETS)]:
        parser.error(f"no set starts with {', '.join(unknown)}: there are {', '.join(SETS)}")
    if given.ir:
        write_ir(given.ir, chosen)
    if given.accept:
        print("stored:", ", ".join(accept(chosen)) or "nothing, all texts are as they were")
    else:
        print("\n".join(filter(None, map(difference, chosen))) or "all texts are as stored")

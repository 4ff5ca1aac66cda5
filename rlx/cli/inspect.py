"""`rlx inspect MODEL`: family, sizes, weights, tokenizer, and what would be compiled; of artifact files, their programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import CorruptFileError, OptionError, RlxError

if TYPE_CHECKING:
    import numpy as np

    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.ir.graph import Graph

Tensor = tuple[str, str, str, tuple[int, ...], int]  # name, format in the file and in memory, dims, bytes in the file
SHAPES = ((1, 16), (1, 128), (32, 128))  # rows and tokens, of encoders
CHUNKS = (1, 32, 512)  # tokens, of language models


def inspect(
    context: typer.Context,
    model: o.Model,
    params: Annotated[bool, typer.Option("--params", help="List every tensor.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled/--files", help="Also plan the graphs that would be compiled.")] = True,
    dim: o.Dims = None,
    given: o.Given = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
) -> None:
    """Show what a model consists of, without running it.

    Of an artifact file, it shows programs, devices and instruction sets; no code in it is executed.

    Examples:

        rlx inspect model.q4_k.gguf --params

        rlx inspect Qwen/Qwen3-0.6B --files
    """
    from rlx.frontends.hub import model_path
    from rlx.frontends.load import load
    from rlx.runtime import CompileOptions, Session

    kind, saved = o.kind_of(path := model_path(model))
    if saved:
        o.refuse(context, f"{path} is an artifact file, whose programs are listed", "dim", "given", "params", "device", "threads")
        return _artifact(path)
    session, options = Session(device, threads), CompileOptions()
    if kind == "onnx":
        graphs = _onnx(path, dim, given, params, compiled)
        return _planned(graphs, session, options) if graphs else None
    o.refuse(context, f"{path} is no ONNX model", "dim", "given")
    found = load(path, session=session, options=options)
    print(o.printable(f"{path}: {'encoder' if kind == 'encoder' else 'language model'}"))
    graphs = _encoder(found, params) if kind == "encoder" else _decoder(found, params)
    if compiled:
        _planned(graphs, session, options)


def _onnx(path: Path, dim: list[str] | None, given: list[str] | None, params: bool, compiled: bool) -> list[Graph]:
    """Prints the model, and returns its graph if the sizes of all dims are given."""
    from rlx.cli.run import arrays, check_dims, declared
    from rlx.frontends.load import load

    net = load(path)
    proto, weights = net.proto, net.initialisers()
    check_dims(o.sizes(dim), (i.shape for i in net.inputs))
    opsets = ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in proto.opset_import)
    made = f", made by {proto.producer_name} {proto.producer_version}".rstrip() if proto.producer_name else ""
    print(o.printable(f"{path}: ONNX model of IR version {proto.ir_version}, opsets {opsets}{made}"))
    for label, found in (("inputs", net.inputs), ("outputs", net.outputs)):
        shown = (f"{i.name} {i.shape or ('(no declared dims)' if i.kind == 'tensor' else i.kind)}" for i in found)
        print(o.printable(f"  {label}: " + ", ".join(shown)))
    ops = Counter(n.op_type for n in proto.graph.node)
    print(o.printable("  nodes: " + ", ".join(f"{count} {name}" for name, count in ops.most_common())))
    _weights([_initialiser(name, array) for name, array in weights.items()], params)
    if not compiled:
        return []
    try:
        return [net.imported(arrays(declared(net, given), given, dim)).graph]
    except OptionError as e:
        if given:
            raise
        print(o.printable(f"the program that it would become is not shown: {e}"))
        return []


def _initialiser(name: str, array: np.ndarray) -> Tensor:
    from rlx.frontends.onnx.proto import TEXT, stored
    from rlx.ir.dtype import as_dtype

    if array.dtype == TEXT:
        return name, "text", "text", array.shape, sum(len(text.encode()) for text in array.flat)
    return name, array.dtype.name, as_dtype(stored(array.dtype)).name, array.shape, array.nbytes


def _encoder(model: EmbeddingModel, params: bool) -> list[Graph]:
    from rlx.frontends.models import bert
    from rlx.ir.dtype import as_dtype

    config = model.config
    _facts("network", [(f.name, getattr(config, f.name)) for f in fields(config)])
    _facts("tokenizer", [("tokens", model._tokenizer.vocab_size), ("longest text", f"{model.max_length} tokens")])
    rows = [(name, as_dtype(a.dtype).name, "f32", a.shape, a.nbytes) for name, a in model.weights.items()]
    _weights(rows, params)
    return [bert.build(config, rows, min(tokens, model.max_length)) for rows, tokens in SHAPES]


def _decoder(model: LanguageModel, params: bool) -> list[Graph]:
    config, skip = model.config, ("ropes", "windows", "experts", "latent")
    facts = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name not in skip]
    if windows := sum(w > 0 for w in config.windows):
        facts.append(("layers with a sliding window", windows))
    _facts("network", facts)
    if (m := config.experts) is not None:
        each = [(f.name, getattr(m, f.name)) for f in fields(m) if f.name != "layers"]
        _facts("experts", [("layers", len(m.layers)), *each])
    if config.latent is not None:
        _facts("latent attention", [(f.name, getattr(config.latent, f.name)) for f in fields(config.latent)])
    try:
        codec = model.codec
        words: list[tuple[str, object]] = [("tokens", codec.vocab_size), ("ends", sorted(codec.ends))]
        _facts("tokenizer", [*words, ("chat template", "yes" if codec.chat_template else "none: it continues text")])
    except RlxError as e:  # prompts of token ids need none
        print(o.printable(f"  tokenizer: {e}"))
    check = model.checkpoint
    kept = {part: check.formats.get(param, "f32") for param, parts in check.parts.items() for part in parts}
    rows = [(n, t.type, kept[n], t.shape, t.data.nbytes) for n, t in check.tensors.items()]
    _weights(rows, params)
    return [model.graph(n, steps=() if n == 1 else None) for n in CHUNKS if n <= model.capacity]


def _facts(title: str, facts: Iterable[tuple[str, object]]) -> None:
    """Those that are set."""
    texts = (f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts if value)
    print(o.printable(f"  {title}: " + ", ".join(texts)))


def _weights(rows: Sequence[Tensor], each: bool) -> None:
    from rlx.cli import show
    from rlx.ir.shown import sized

    groups: dict[tuple[str, str], list[int]] = {}
    for _, stored, kept, dims, nbytes in rows:
        total = groups.setdefault((stored, kept), [0, 0, 0])
        for i, n in enumerate((1, math.prod(dims), nbytes)):
            total[i] += n
    groups["all", ""] = [sum(g[i] for g in groups.values()) for i in range(3)]
    lines = [(stored, kept, count, elements, sized(n)) for (stored, kept), (count, elements, n) in groups.items()]
    show.table("weights", ("in the file", "in memory", "tensors", "elements", "bytes in the file"), lines)
    if each:
        listed = [(n, stored, kept, "x".join(map(str, dims)), sized(nbytes)) for n, stored, kept, dims, nbytes in rows]
        show.table("tensors", ("name", "in the file", "in memory", "dims", "bytes in the file"), listed)


def _planned(graphs: Sequence[Graph], session: Any, options: Any) -> None:
    """Lower each graph, and show the program that it would become."""
    from rlx.cli import show
    from rlx.compiler import lower
    from rlx.ir.cost import program_work
    from rlx.ir.kernel_text import kernel_key
    from rlx.ir.shown import sized

    rows = []
    with Bars() as bars:
        for at, graph in enumerate(graphs):
            bars.show("planning", at, len(graphs))
            program, plan = lower(graph, session.target(), options), session.plan(graph, options)
            work, kernels = program_work(program), len({kernel_key(s.kernel) for s in program.steps})
            memory = {name: sized(plan.regions.get(name, 0)) for name in ("prepared", "handles")}
            rows.append(
                (graph.name, len(graph.nodes()), len(program.steps), kernels, sized(plan.arena_bytes), *memory.values(),
                 f"{work.flops / 1e9:.3g}", sized(work.least_bytes))
            )  # fmt: skip
        bars.show("planning", len(graphs), len(graphs))
    columns = ("graph", "nodes", "steps", "kernels", "arena", "prepared", "states", "GFLOP", "least bytes of a run")
    show.table(f"what would be compiled for {session.device}", columns, rows)


def _artifact(path: Path) -> None:
    from rlx.cli import show
    from rlx.host.container import Container
    from rlx.ir.shown import sized

    file = Container(path, trust=True)  # nothing in it is executed
    try:
        about, programs, weights = file.manifest, file.manifest["programs"], file.manifest["weights"]
        print(o.printable(f"{path}: artifact file, {about['kind']}, {sized(file.nbytes)}, saved by rlx {about['rlx']}"))
        if isinstance(about.get("model"), dict):
            config = {k: v for k, v in about["model"].get("config", {}).items() if not isinstance(v, (list, dict))}
            _facts("network", config.items())
        rows = [(p["name"], p["device"], p["threads"], p["compiler"], " ".join(p["features"])) for p in programs]
        stored = [(w["device"], len(w["entries"]), sized(sum(e[2] for e in w["entries"]))) for w in weights]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise CorruptFileError(f"{path}: the manifest is incomplete: {e!r:.100}") from None
    show.table("programs", ("name", "device", "threads", "compiler", "needs"), rows)
    show.table("weights", ("device", "tensors", "bytes"), stored)

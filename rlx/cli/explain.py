"""`rlx explain MODEL`, and the option `--trace`: what the compiler knows of a model's programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import Unsupported, check_writable

if TYPE_CHECKING:
    from rlx.explain.profile import Profile
    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.frontends.onnx import OnnxModel
    from rlx.runtime import CompiledGraph

CONTEXT = 128  # tokens before the explained step of a language model, if they fit


def explain(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(help=f"Folder, .gguf or .onnx file, {o.HUB}.", metavar="MODEL", show_default="all-MiniLM-L6-v2"),
    ] = None,
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("explain.html"),
    report: Annotated[Path | None, typer.Option(help="Also write the data of the page to this JSON file.")] = None,
    trace: o.Trace = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a run, for an encoder.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text, for an encoder.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a run, for a language model; 1: a step of decoding.")] = 1,
    held: Annotated[
        int | None, typer.Option("--context", min=0, help="Tokens before those, for a language model.", show_default=str(CONTEXT))
    ] = None,
    dim: o.Dims = None,
    given: o.Given = None,
    capacity: o.Capacity = None,
    cache: o.CacheDType = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
) -> None:
    """Write a page with what the compiler knows of a model: memory, times, the graph, the code of each step.

    Examples:

        rlx explain --batch 8 --length 128

        rlx explain model.q4_k.gguf --output decode.html

        rlx explain path/to/folder --tokens 128 --context 0 --report report.json
    """
    check_writable(output, report, trace, model=model)
    from rlx.cli.generate import open_model
    from rlx.cli.run import open_onnx, sizes_of
    from rlx.explain.profile import timed, write_trace
    from rlx.frontends.embedding import default_folder
    from rlx.frontends.hub import model_path
    from rlx.ir.shown import counted, sized

    place = default_folder() if model is None else model_path(model)
    kind, saved = o.kind_of(place)
    if saved:
        raise Unsupported(f"{place} is an artifact, which has programs and no graph: explain the model that it was saved from")
    of_encoders, of_decoders = ("batch", "length"), ("tokens", "held", "capacity", "cache")
    with Bars() as bars:
        if kind == "onnx":
            o.refuse(context, sizes_of(place), *of_encoders, *of_decoders)
            found, profile = of_onnx(*open_onnx(place, bars, given, dim, True, device, threads, tune))
        elif kind == "encoder":
            o.refuse(context, f"{place} is an encoder", "dim", "given", *of_decoders)
            found, profile = of_encoder(o.open_encoder(place, bars, device, threads, tune), batch, length)
        else:
            o.refuse(context, f"{place} is no encoder and no ONNX model", "dim", "given", *of_encoders)
            decoder = open_model(place, bars, capacity, cache, device, threads, tune)
            found, profile = of_language(decoder, tokens, held)
    found.explain(output, profile)
    if report is not None:
        found.report().save(report, profile)
    if trace is not None:
        write_trace(trace, [profile] if profile else [])
    program, time = found.program(), f", {timed(profile.unmeasured_seconds)} a run" if profile else ""
    memory = sized(found.memory_plan().total_bytes)
    print(f"{program.name} on {found.device}: {counted(len(program.steps), 'step')}{time}, {memory}")
    print(f"written to {output}")


def of_encoder(model: EmbeddingModel, batch: int, length: int) -> tuple[CompiledGraph, Profile | None]:
    compiled = model.executable(batch, length)
    return compiled, measured(compiled, {})


def of_onnx(model: OnnxModel, inputs: dict[str, Any]) -> tuple[CompiledGraph, Profile | None]:
    from rlx.errors import Unsupported

    if (compiled := model.executable(inputs)) is None:
        raise Unsupported("all outputs of the model are known without a run: there is nothing to explain")
    return compiled, measured(compiled, {d.name: inputs[d.name] for d in compiled.inputs})


def of_language(model: LanguageModel, tokens: int, context: int | None) -> tuple[CompiledGraph, Profile | None]:
    """The program for `tokens` tokens behind `context` others: for one token with the choice of the next, as in generation."""
    compiled = model.executable(tokens, () if tokens == 1 else None)
    if context is None:
        context = max(0, min(CONTEXT, model.capacity - tokens))
    model.move(context, tokens)
    import numpy as np

    ids = np.zeros((model.batch, tokens), np.int32)
    profile = measured(compiled, {} if tokens == 1 else {"tokens": ids, "count": np.array(tokens, np.int32)})
    model.reset()
    return compiled, profile


def measured(compiled: CompiledGraph, inputs: dict[str, Any]) -> Profile | None:
    """None: the device has no times of steps."""
    from rlx.errors import Unsupported

    try:
        return compiled.profile(inputs) if inputs else compiled.profile()
    except Unsupported:
        return None

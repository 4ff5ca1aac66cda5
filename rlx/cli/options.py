"""Arguments and options that several commands have, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.errors import OptionError

if TYPE_CHECKING:
    from rlx.cli.progress import Bars
    from rlx.frontends.embedding import EmbeddingModel

HUB = "or a name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
HUB_ENCODER = "or a name on the Hugging Face Hub, such as sentence-transformers/all-MiniLM-L6-v2"


class UsageError(OptionError):
    """An error of the command line, which ends the command with exit code 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Also a decorator: errors of options are those of the command line."""
    try:
        yield
    except OptionError as e:
        raise UsageError(str(e)) from None


def sizes(dim: list[str] | None) -> dict[str, int]:
    """The named dims of `--dim name=size`."""
    found: dict[str, int] = {}
    for text in dim or ():
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal():
            raise UsageError(f"--dim is name=size, as batch=8; got {text!r}")
        if found.setdefault(name, int(size)) != int(size):
            raise UsageError(f"--dim {name} is given twice: {found[name]} and {size}")
    return found


def pairs(given: list[str] | None) -> dict[str, str]:
    """The files of `--input name=file.npy`."""
    found: dict[str, str] = {}
    for text in given or ():
        name, _, file = text.partition("=")
        if not name or not file:
            raise UsageError(f"--input is name=file.npy; got {text!r}")
        if name in found:
            raise UsageError(f"--input {name} is given twice: {found[name]} and {file}")
        found[name] = file
    return found


def cache_dtype(name: str | None) -> str | None:
    if name not in (None, "f32", "bf16", "f16"):
        raise UsageError(f"--cache is f32, bf16 or f16; got {name!r}")
    return name


# callbacks read an option before any file is read; the command gets it as it was given
Model = Annotated[
    Path, typer.Argument(help=f"Folder, .gguf or .onnx file, artifact file, {HUB}.", metavar="MODEL", show_default=False)
]  # fmt: skip
Encoder = Annotated[
    Path | None, typer.Option("--model", help=f"BERT-type folder, artifact file, {HUB_ENCODER}.", show_default="all-MiniLM-L6-v2")
]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", help="A named dim of an ONNX model, batch=8; several times.", callback=lambda x: (sizes(x), x)[1]),
]
Given = Annotated[
    list[str] | None,
    typer.Option(
        "--input", help="An input of an ONNX model: name=file.npy; several times.", show_default=False,
        callback=lambda given: (pairs(given), given)[1],
    ),
]
DeviceName = Annotated[str, typer.Option("--device", help="Device to run on: cpu, cuda, cuda:1 …; `rlx devices` lists them.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the CPU device.", show_default="all allowed")]
Tune = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds to spend on autotuning kernels; results are kept on disk.", show_default="0: default tilings"
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Measure the steps of a run, and write them to this JSON file for ui.perfetto.dev.", show_default=False),
]


def given(context: typer.Context, name: str) -> bool:
    """Whether this parameter of the command was given, and is not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse(context: typer.Context, why: str, *names: str) -> None:
    """UsageError: one of these parameters was given. `why`: the reason why they are of no use."""
    options = {p.name: p.opts[0] for p in context.command.params}
    if wrong := [options[name] for name in names if given(context, name)]:
        raise UsageError(f"{', '.join(wrong)}: {why}")


def kind_of(path: Path) -> tuple[str, bool]:
    """The kind of model at a path, "onnx", "encoder", "decoder", or another one of artifact files, and whether it is such a file.
    Nothing is loaded."""
    from rlx.frontends.embedding import is_encoder
    from rlx.host.container import Container
    from rlx.runtime.artifact import begins_with

    if begins_with(path):
        return str(Container(path, trust=True).manifest.get("kind")), True  # nothing in it is executed
    return "onnx" if path.suffix == ".onnx" else "encoder" if is_encoder(path) else "decoder", False


# -- language models

MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer (tokens).", show_default="what fits")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: always the likeliest token.")]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the fewest tokens with this total probability.")]
MinP = Annotated[float, typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.")]
Penalty = Annotated[float, typer.Option(help="Above 1: repeated tokens become less likely.")]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling.", show_default="a new one")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; can be given several times.")]
Capacity = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens of prompt and answer together.", show_default="4096, or what the model has"),
]
Refresh = Annotated[int, typer.Option(min=1, help="Forwards between changes of the resident experts.")]
ExpertBudget = Annotated[
    str | None,
    typer.Option(help="Memory for experts, as 2GB, or their number; others are read when needed.", show_default="all resident"),
]
ExpertPolicy = Annotated[
    str | None,
    typer.Option(help="Which experts stay: static, lru, lfu, hysteresis or predict.", show_default="hysteresis"),
]
ExpertProfile = Annotated[Path | None, typer.Option(help="Begin with the experts that this trace used most.", show_default=False)]
RecordExperts = Annotated[
    Path | None, typer.Option(help="Write a trace of the experts chosen, for `rlx moe simulate`.", show_default=False)
]  # fmt: skip
CACHE = "Dtype of the KV cache: f32, bf16 or f16."
CacheDType = Annotated[str | None, typer.Option(help=CACHE, show_default="f32", callback=cache_dtype)]


def open_encoder(model: Path | None, bars: Bars, device: str, threads: int | None, tune: float) -> EmbeddingModel:
    from rlx.frontends.embedding import default_folder
    from rlx.frontends.load import load_encoder

    how = compiling(bars, device, threads, tune)
    return load_encoder(model or default_folder(), **how)


def compiling(bars: Bars, device: str, threads: int | None, tune: float, transport: Any = None) -> dict[str, Any]:
    """The arguments of models that say how they are compiled."""
    from rlx.runtime import CompileOptions, Session

    session = Session(device, progress=bars.step, transport=transport)
    return {"session": session, "options": CompileOptions(threads=threads, tune=tune)}


def printable(text: str) -> str:
    """A line of text, with control characters replaced, because a terminal would interpret them."""
    return "".join(c if c.isprintable() else " " for c in text)

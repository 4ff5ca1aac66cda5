"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HUB = "or a name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
HUB_ENCODER = "or a name on the Hugging Face Hub, such as sentence-transformers/all-MiniLM-L6-v2"

Model = Annotated[
    Path, typer.Argument(help=f"Folder or .gguf file of a model, artifact file, {HUB}.", metavar="MODEL", show_default=False)
]  # fmt: skip
DeviceName = Annotated[str, typer.Option("--device", help="Device to run on: cpu, cuda, cuda:1 …; `rlx devices` lists them.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the CPU device.", show_default="all allowed")]
Tune = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds to spend on autotuning kernels; results are kept on disk.", show_default="0: default tilings"
    ),
]

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
CacheDType = Annotated[str, typer.Option(help="Dtype of the KV cache: f32, bf16 or f16.")]

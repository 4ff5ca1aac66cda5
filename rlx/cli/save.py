"""`rlx save MODEL FILE`: compiles a model ahead of time, into an artifact file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import Unsupported, check_writable


def save(
    context: typer.Context,
    model: o.Model,
    file: Annotated[Path, typer.Argument(help="The artifact file to write.", metavar="FILE", show_default=False)],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Encoders: texts x tokens, as 8x64; several times.", show_default="1 and 8 texts, all lengths"),
    ] = None,
    dim: o.Dims = None,
    given: o.Given = None,
    capacity: o.Capacity = None,
    cache: o.CacheDType = None,
    weights: Annotated[bool, typer.Option(help="Store the weights; without, their files and checksums.")] = True,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
) -> None:
    """Compile a model, and save it as one file that runs without the compiler.

    The other commands take the file in place of the model. It holds machine code: see docs/artifacts.md.

    Examples:

        rlx save Qwen/Qwen3-0.6B qwen3.rlx --capacity 2048

        rlx save resnet50.onnx resnet50.rlx --dim batch=1 && rlx run resnet50.rlx --random

        rlx save path/to/folder encoder.rlx --shape 1x16 --shape 8x64 && rlx embed --model encoder.rlx "Hello"
    """
    check_writable(file, model=model)
    from rlx.cli.generate import open_model
    from rlx.frontends.hub import model_path
    from rlx.ir.shown import sized

    shapes = [_shape(text) for text in shape] if shape else None
    kind, saved = o.kind_of(place := model_path(model))
    if saved:
        raise Unsupported(f"{place} is an artifact file already: copy it, or save the model that it was made from")
    with Bars() as bars:
        if kind == "onnx":
            from rlx.cli.run import open_onnx, sizes_of

            o.refuse(context, sizes_of(place), "shape", "capacity", "cache")
            net, inputs = open_onnx(place, bars, given, dim, True, device, threads, tune)
            nbytes = net.save(file, inputs, weights)
        elif kind == "encoder":
            o.refuse(context, f"{place} is an encoder", "dim", "given", "capacity", "cache")
            nbytes = o.open_encoder(place, bars, device, threads, tune).save(file, shapes=shapes, weights=weights)
        else:
            o.refuse(context, f"{place} is no encoder and no ONNX model", "dim", "given", "shape")
            nbytes = open_model(place, bars, capacity, cache, device, threads, tune).save(file, weights=weights)
    print(f"{file}: {sized(nbytes)}")


def _shape(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text, re.ASCII)):
        raise o.UsageError(f"--shape is texts x tokens, as 8x64; got {text!r:.40}")
    return int(found[1]), int(found[2])

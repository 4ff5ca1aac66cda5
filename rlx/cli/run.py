"""`rlx run MODEL`: runs a model of ONNX, or compiled graphs of an artifact file, once on arrays."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import ModelError, OutOfMemoryError, RlxError, Unsupported, known

if TYPE_CHECKING:
    import numpy as np

    from rlx.frontends.onnx import OnnxModel
    from rlx.ir.shape import Shape
    from rlx.runtime import CompiledGraph

Arrays = dict[str, Any]


def run(
    model: Annotated[
        Path, typer.Argument(help="An .onnx file, or an artifact file of graphs.", metavar="MODEL", show_default=False)
    ],
    given: o.Given = None,
    random: Annotated[bool, typer.Option("--random", help="Random numbers for inputs that are not given.")] = False,
    dim: o.Dims = None,
    output: Annotated[Path | None, typer.Option(help="Write each output to a .npy file in this folder.")] = None,
    graph: Annotated[str | None, typer.Option(help="The graph of an artifact file that has several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
) -> None:
    """Run a model once, and show what comes out.

    Examples:

        rlx run resnet50.onnx --random --dim batch=8

        rlx run model.onnx --input input_ids=ids.npy --input attention_mask=mask.npy --output results
    """
    import numpy as np

    from rlx.cli import show
    from rlx.ir.shown import sized
    from rlx.runtime.artifact import begins_with

    if output is not None:
        near = next(p for p in (output, *output.absolute().parents) if p.exists())
        if not near.is_dir() or not os.access(near, os.W_OK):
            why = "it" if near == output else str(near)
            raise RlxError(f"cannot write to {output}: {why} is {'not writable' if near.is_dir() else 'no folder'}")
    of_file = begins_with(model)
    if graph is not None and not of_file:
        raise o.UsageError(f"--graph is for artifact files, and {model} is none")
    begun = time.perf_counter()
    with Bars() as bars:
        if of_file:
            opened = stored(model, graph, device, threads, tune)
            inputs = arrays({d.name: d.shape for d in opened.inputs}, given, dim, random, seed)
            compiled: CompiledGraph | None = opened
            loaded = time.perf_counter()
            found = dict(zip((d.name for d in opened.outputs), opened.run(inputs)))
        else:
            net, inputs = open_onnx(model, bars, given, dim, random, device, threads, tune, seed)
            compiled = net.executable(inputs)
            loaded = time.perf_counter()
            found = net.run(inputs)
    done = time.perf_counter()
    flat = {name: np.asarray(x) for key, value in found.items() for name, x in _flat(key, value)}
    flat = {name: x.astype(str) if x.dtype == object else x for name, x in flat.items()}  # as .npy files hold text
    rows = [(o.printable(n), str(x.dtype), "x".join(map(str, x.shape)) or "-", *_range(x)) for n, x in flat.items()]
    show.table("outputs", ("name", "dtype", "dims", "least", "mean", "greatest"), rows)
    if compiled is not None:
        report, memory = compiled.report(), compiled.memory_plan().total_bytes
        threads = compiled.program().target.threads
        cache = f"cache: {report.cache.state}"
        print(f"on {compiled.device}, {threads} threads: loaded and compiled in {loaded - begun:.2f} s ({cache}), ", end="")
        print(f"run in {(done - loaded) * 1e3:.2f} ms, {sized(memory)}")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for file, x in zip(_files(flat), flat.values()):
            np.save(output / file, x)
        print(f"written to {output}")


def _flat(name: str, x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, list):
        return [found for i, e in enumerate(x) for found in _flat(f"{name}.{i}", e)]
    return [] if x is None else [(name, x)]


def _files(names: Iterable[str]) -> list[str]:
    """A file name for each output: its name without characters that a file name may not have, numbered if two are alike."""
    found: dict[str, str] = {}
    for name in names:
        base = made = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        while made in found:
            made = f"{base}.{len(found)}"
        found[made] = f"{made}.npy"
    return list(found.values())


def _range(x: np.ndarray) -> tuple[str, str, str]:
    if not x.size or x.dtype.kind not in "biufV":
        return "", "", ""
    wide = x.astype("float64")
    return f"{wide.min():.6g}", f"{wide.mean():.6g}", f"{wide.max():.6g}"


def stored(path: Path, name: str | None, device: str, threads: int | None, tune: float) -> CompiledGraph:
    """The graph of an artifact file, or that of this name."""
    from rlx.runtime.artifact import ArtifactFile
    from rlx.runtime.saving import GRAPHS

    if tune:
        raise o.UsageError(f"--tune is for compiles, and {path} is an artifact file, whose programs are compiled")
    file = ArtifactFile(path, device=None if device == "cpu" else device, threads=threads)
    if file.kind != GRAPHS:
        raise Unsupported(f"{path} holds a model that takes text: rlx embed or rlx generate runs it")
    if name not in file and (name is not None or len(file) > 1):
        raise o.UsageError(f"{path} holds the graphs {known(file)}: choose one with --graph")
    compiled = file[name or next(iter(file))]
    if missing := compiled.missing_params():
        raise ModelError(f"{path} was saved without its weights ({known(missing)}): save it with them, or set them from Python")
    return compiled


# -- ONNX models in commands


def open_onnx(
    path: Path, bars: Bars, given: list[str] | None, dim: list[str] | None, random: bool, device: str, threads: int | None,
    tune: float = 0.0, seed: int = 0,
) -> tuple[OnnxModel, Arrays]:  # fmt: skip
    """An ONNX model, and arrays for its inputs: from files, others random."""
    from rlx.frontends.load import load

    if path.suffix != ".onnx":
        raise ModelError(f"{path} is no .onnx file and no artifact file of graphs, which are what rlx run takes")
    net = load(path, **o.compiling(bars, device, threads, tune))
    if lists := [i.name for i in net.inputs if i.kind == "sequence"]:
        how = "run the model from Python: rlx.load(path).run({name: [array, …]})"
        raise Unsupported(f"{path}: input {known(lists)} is a sequence, and a .npy file holds one array; {how}")
    return net, arrays(declared(net, given), given, dim, random, seed)


def sizes_of(path: Path) -> str:
    """The reason why options for models of text are refused. `path`: an .onnx file, or an artifact file of graphs."""
    how = "given by --dim" if path.suffix == ".onnx" else "those that it was saved with"
    return f"{path} is no model of text; its sizes are {how}"


def declared(net: OnnxModel, given: list[str] | None = None) -> dict[str, Shape | None]:
    """The inputs that a run needs: those that are not optional, or that are given."""
    files = {text.partition("=")[0] for text in given or ()}
    return {i.name: i.shape for i in net.inputs if i.kind != "optional" or i.name in files}


def arrays(
    inputs: Mapping[str, Shape | None], given: list[str] | None, dim: list[str] | None, random: bool = True, seed: int = 0
) -> Arrays:
    """An array for each input: of `--input name=file.npy`, or random of the declared dims with the sizes of `--dim`."""
    import numpy as np

    made, bound = {name: _read(name, file, inputs) for name, file in o.pairs(given).items()}, o.sizes(dim)
    check_dims(bound, inputs.values())
    first = dict.fromkeys(bound, "--dim")  # where the size of each named dim comes from
    for name, array in made.items():
        shape = inputs[name]
        for d, n in zip(shape.dims if shape else (), array.shape):
            where = first.setdefault(str(d), f"input {name!r}")
            if not isinstance(d, int) and bound.setdefault(str(d), n) != n:
                found = f"{list(array.shape)}, and {d} is {bound[str(d)]} in {where}"
                raise o.UsageError(f"input {name!r} is {shape}, got dims {found}")
    missing = [f"{name} {shape or '(no declared dims)'}" for name, shape in inputs.items() if name not in made]
    if missing and not random:
        raise o.UsageError(f"no value for input {', '.join(missing)}: --input name=file.npy for each, or --random")
    rng = np.random.default_rng(seed)
    for name, shape in inputs.items():
        if name in made:
            continue
        if shape is None:
            raise o.UsageError(f"input {name!r} is text, or has no declared dims: give it, --input {name}=file.npy")
        if left := [str(d) for d in shape.dims if not isinstance(d, int) and str(d) not in bound]:
            raise o.UsageError(f"input {name!r} is {shape}: give the size of {left[0]}, as --dim {left[0]}=1")
        dims = tuple(d if isinstance(d, int) else bound[str(d)] for d in shape.dims)
        try:
            made[name] = random_array(dims, shape.dtype, rng)
        except (MemoryError, ValueError) as e:  # more than an array can have, or than there is memory
            why = f"there is no room for random numbers of dims {list(dims)}: {e}"
            raise OutOfMemoryError(f"input {name!r} is {shape}: {why}") from None
    return made


def check_dims(given: Mapping[str, int], shapes: Iterable[Shape | None]) -> None:
    """UsageError: no input has a dim of this name."""
    named = {str(d) for shape in shapes if shape for d in shape.dims if not isinstance(d, int)}
    if extra := sorted(given.keys() - named):
        raise o.UsageError(f"--dim {extra[0]}: no input has a dim of this name; there are {known(named)}")


def random_array(dims: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    """Normal floats; integers and bools of 0 and 1, which are masks, and indices of every table."""
    if dtype.kind == "f":
        return rng.standard_normal(dims).astype(dtype.numpy)
    return rng.integers(0, 2, dims).astype(dtype.numpy)


def _read(name: str, file: str, inputs: Mapping[str, Shape | None]) -> Any:
    """The array in a .npy file. numpy writes elements that it does not have (bf16) as bytes."""
    import numpy as np

    if name not in inputs:
        raise o.UsageError(f"--input {name}: there is no such input; there are {known(inputs)}")
    try:
        with open(file, "rb") as f:
            if f.read(6) != b"\x93NUMPY":
                raise ValueError("it does not begin as one")
            f.seek(0)
            array = np.load(f, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as e:
        raise RlxError(f"--input {name}: {file} cannot be read as a .npy file: {e}") from None
    kind = shape.dtype.numpy if (shape := inputs[name]) else array.dtype
    return array.view(kind) if array.dtype == f"V{kind.itemsize}" else array

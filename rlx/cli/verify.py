"""`rlx verify MODEL`: compares what is compiled with numpy's references in float64, and checks memory plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import PlanError, RlxError
from rlx.ir.shown import counted

if TYPE_CHECKING:
    import numpy as np

    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.ir.graph import Graph

HELD = 5  # tokens in the state before a chunk is verified


def verify(
    context: typer.Context,
    model: o.Model,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the network that is verified.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once, of an encoder.")] = 2,
    text: Annotated[str | None, typer.Option(help="Text to run on.", show_default="random tokens")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    dim: o.Dims = None,
    given: o.Given = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
) -> None:
    """Verify that a model is compiled right on this machine.

    Its network runs on random tokens, or on a text. Every value that a kernel stores is compared with the references of the
    ops in float64.
    Nodes of an ONNX model are compared with ONNX Runtime too, if it is installed.
    The memory plan is checked twice: by the checker, and by comparing bits with a run in which no buffer shares memory. It ends
    at the first difference, and names node, source line and kernel. Of an artifact file, checksums and plans are checked.

    Examples:

        rlx verify path/to/folder

        rlx verify resnet50.onnx --dim batch=1

        rlx verify Qwen/Qwen3-0.6B --length 64 --device cuda
    """
    import numpy as np

    from rlx.cli.run import sizes_of
    from rlx.frontends.hub import model_path
    from rlx.runtime import CompileOptions, Session
    from rlx.runtime.verifying import verify

    of_text, of_onnx, of_runs = ("batch", "length", "text"), ("dim", "given"), ("seed", "device", "threads")
    kind, saved = o.kind_of(path := model_path(model))
    if saved:
        o.refuse(context, f"{path} is an artifact file, which is not run", *of_text, *of_onnx, *of_runs)
        return _stored(path)
    with Bars() as bars:
        session, options = Session(device, threads, progress=bars.step), CompileOptions()
        if kind == "onnx":
            o.refuse(context, sizes_of(path), *of_text)
            cases = _onnx(path, bars, given, dim, device, threads, seed)
        else:
            o.refuse(context, f"{path} is no ONNX model", *of_onnx)
            if kind != "encoder":
                o.refuse(context, f"{path} is no encoder: one text is verified", "batch")
            cases = _cases(path, session, options, batch, length, text, np.random.default_rng(seed))
        for case in cases:
            found = verify(
                case.graph, case.weights, case.inputs, session=session, options=options, states=case.states,
                progress=lambda done, total: bars.show("verifying", done, total),
            )  # fmt: skip
            name = f"{case.graph.name} on {session.device}"
            if found.difference is not None:
                raise RlxError(f"{name}: {found.difference}")
            unsure = f" ({found.unsure} that depend on rounding were not)" if found.unsure else ""
            print(
                f"{name}: the memory plan is sound; {found.values} values that kernels of {found.nodes} nodes store were compared"
                f"{unsure}, the greatest error is {found.worst:.0%} of its tolerance"
            )


class _Case(NamedTuple):
    graph: Graph
    weights: Callable[[str], np.ndarray]
    inputs: dict[str, np.ndarray]
    states: dict[str, np.ndarray]


def _cases(
    path: Path, session: Any, options: Any, batch: int, length: int, text: str | None, rng: np.random.Generator
) -> Iterator[_Case]:
    import numpy as np

    from rlx.errors import OptionError
    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.load import load

    model = load(path, session=session, options=options)
    if isinstance(model, EmbeddingModel):
        if length > model.max_length:
            raise OptionError(f"--length {length}: the model takes at most {model.max_length} tokens")
        ids = None if text is None else np.tile(model._tokenizer([text])[0], (batch, 1)).astype(np.int32)
        yield _encoder(model, batch, length, ids, rng)
    else:
        ids = None if text is None else np.array([model.codec.encode(text)], np.int32)
        length = length if ids is None else ids.shape[1]
        if not length:
            raise OptionError(f"--text {text!r} has no tokens")
        room = model.config.max_position_embeddings
        if length + HELD > room:
            raise OptionError(f"--length {length}: the model has {room} positions, and {HELD} hold earlier tokens")
        model = load(path, session=session, options=options, capacity=min(room, length + 2 * HELD))
        for tokens in dict.fromkeys((length, 1)):
            yield _decoder(model, tokens, ids, rng)


def _onnx(
    path: Path, bars: Bars, given: list[str] | None, dim: list[str] | None, device: str, threads: int | None, seed: int
) -> Iterator[_Case]:
    from rlx.cli.run import open_onnx
    from rlx.frontends.onnx.peer import compare

    net, inputs = open_onnx(path, bars, given, dim, True, device, threads, seed=seed)
    graph = net.imported(inputs).graph
    if graph.outputs:
        yield _Case(graph, graph.weights.__getitem__, {str(v.name): inputs[str(v.name)] for v in graph.inputs}, {})
    found = compare(net, inputs)
    if found is None:
        print("ONNX Runtime is not installed: nothing was compared with it")
    elif found.refused is not None:
        print(o.printable(f"ONNX Runtime does not run the model: {found.refused}"))
    elif found.difference is not None:
        raise RlxError(f"{path}: {found.difference}")
    else:
        print(f"{path}: {found.values} values of nodes are those of ONNX Runtime")


def _encoder(model: EmbeddingModel, batch: int, length: int, ids: np.ndarray | None, rng: np.random.Generator) -> _Case:
    import numpy as np

    from rlx.frontends.models import bert

    weights = model.weights
    if ids is None:
        ids = rng.integers(0, model.config.vocab_size, (batch, length), np.int32)
        mask = np.arange(length) < rng.integers(1, length + 1, (batch, 1))
    else:
        mask = np.ones(ids.shape, np.bool_)
    graph = bert.build(model.config, *ids.shape)
    return _Case(graph, lambda name: np.asarray(weights[name], np.float32), {"input_ids": ids, "attention_mask": mask}, {})


def _decoder(model: LanguageModel, tokens: int, ids: np.ndarray | None, rng: np.random.Generator) -> _Case:
    """A chunk behind some earlier tokens; one token is a step of decoding, which also chooses the next."""
    import numpy as np

    graph = model.graph(tokens, steps=() if tokens == 1 else None)
    vocab, states = model.config.vocab_size, dict[str, np.ndarray]()
    for handle in graph.handles:
        dims, dtype, name = handle.shape.static, handle.dtype.numpy, str(handle.name)
        values = {"position": HELD, "token": rng.integers(0, vocab)}
        states[name] = np.full(dims, values[name], dtype) if name in values else rng.standard_normal(dims).astype(dtype)
    ids = rng.integers(0, vocab, (1, tokens), np.int32) if ids is None else ids[:, :tokens]
    named = {"tokens": ids, "count": np.array(tokens, np.int32)}
    inputs = {str(v.name): named[str(v.name)] for v in graph.inputs}
    return _Case(graph, model.checkpoint.read, inputs, states)


def _stored(path: Path) -> None:
    from rlx.compiler.check import program_faults
    from rlx.runtime.artifact import ArtifactFile

    file = ArtifactFile(path, verify=True)
    for name in file:
        if faults := program_faults(file[name].program(), replay=False):
            raise PlanError(f"{path}: program {name!r} has a bad plan: {'; '.join(faults)}")
    plans = counted(len(file), "memory plan")
    print(f"{path}: all checksums are right; {plans} checked and sound (kernels are machine code: not compared)")

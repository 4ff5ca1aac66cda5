"""`rlx bench MODEL`: latency and throughput of a model on this machine, beside what the machine can do."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.records import record

if TYPE_CHECKING:
    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.ir.cost import Roofline
    from rlx.runtime import CompiledGraph

WARM, LEAST = 2, 5  # runs that do not count; runs that do, at least


@record
class Timing:
    """`tokens`: of a run. `limit`: seconds that a run needs at least at the machine's measured rates, and what bounds it."""

    what: str
    tokens: int
    seconds: tuple[float, ...]
    limit: tuple[float, str] | None

    def data(self) -> dict[str, Any]:
        import numpy as np

        median, p90 = (float(np.percentile(self.seconds, q)) for q in (50, 90))
        limit, bound = self.limit or (None, None)
        return {
            "what": self.what, "runs": len(self.seconds), "median_seconds": median, "p90_seconds": p90,
            "tokens_per_second": self.tokens / median, "limit_seconds": limit, "bound": bound,
        }  # fmt: skip


def bench(
    context: typer.Context,
    model: o.Model,
    batch: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text, or of a prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, of a language model.")] = 64,
    seconds: Annotated[float, typer.Option(min=0, help="Time to measure for; at least five runs are measured.")] = 2.0,
    dim: o.Dims = None,
    given: o.Given = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    cache: o.CacheDType = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
) -> None:
    """Time a model: encoding, prefill and decoding, or runs of an ONNX model on random numbers.

    The limit is the time that a run needs at least, for the bytes that it must read and its arithmetic at the rates that were
    measured on this machine. Other programs that run at the same time make both the times and the rates worse.

    Examples:

        rlx bench path/to/encoder --batch 32 --length 128

        rlx bench resnet50.onnx --dim batch=8 --threads 2

        rlx bench model.q4_k.gguf --length 512 --threads 4 --json
    """
    from rlx.cli.run import arrays, open_onnx, stored
    from rlx.frontends.hub import model_path
    from rlx.frontends.load import load
    from rlx.runtime.saving import GRAPHS

    with Bars() as bars:
        begun = time.perf_counter()
        kind, saved = o.kind_of(place := model_path(model))
        _refuse_others(context, model, kind)
        if kind == "onnx":
            net, inputs = open_onnx(model, bars, given, dim, True, device, threads, tune)
            loaded = time.perf_counter() - begun
            prepared = _graph(net.executable(inputs), inputs)
        elif kind == GRAPHS:
            compiled = stored(model, None, device, threads, tune)
            loaded = time.perf_counter() - begun
            prepared = _graph(compiled, arrays({d.name: d.shape for d in compiled.inputs}, given, dim))
        else:
            how = o.compiling(bars, device, threads, tune)
            if kind == "decoder" and not saved:
                how |= {"batch": batch, "capacity": length + new_tokens, "progress": bars.loading, "cache": cache or "f32"}
            found = load(place, **how)
            loaded = time.perf_counter() - begun
            if kind == "encoder":
                prepared = _encoder(found, batch, length)
            else:
                if (found.batch, found.cache) != (batch, cache or found.cache):
                    fixed = f"--batch {found.batch} --cache {found.cache}"
                    o.refuse(context, f"{model} was saved with {fixed}", "batch", "cache")
                batch = found.batch
                prepared = _decoder(found, length, new_tokens)
    results, compiled, memory = prepared(seconds)  # without bars, whose thread would disturb the times
    reports = [c.report() for c in compiled]
    facts = {
        "model": str(model), "device": str(compiled[0].device), "threads": compiled[0].program().target.threads, "batch": batch,
        "length": length, "load_seconds": loaded, "compile_seconds": sum(sum(r.seconds.values()) for r in reports),
        "cache": "/".join(dict.fromkeys(r.cache.state for r in reports)), "memory_bytes": memory,
        "results": [r.data() for r in results],
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, roofline_of(compiled[0]))


def _refuse_others(context: typer.Context, model: Path, kind: str) -> None:
    """UsageError: an option was given that models of this kind do not have."""
    from rlx.cli.run import sizes_of

    if kind in ("encoder", "decoder"):
        o.refuse(context, f"{model} is no ONNX model", "dim", "given")
    else:
        o.refuse(context, sizes_of(model), "batch", "length", "new_tokens", "cache")
    if kind == "encoder":
        o.refuse(context, f"{model} is an encoder", "new_tokens", "cache")


class Results(NamedTuple):
    """`programs`: those that ran. `memory`: bytes by purpose."""

    timings: list[Timing]
    programs: list[CompiledGraph]
    memory: dict[str, int]


def _encoder(model: EmbeddingModel, batch: int, length: int) -> Callable[[float], Results]:
    """Compiles; the function measures for so many seconds."""
    import numpy as np

    compiled = model.executable(batch, length)
    rows, tokens = compiled.inputs[0].shape.static
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, tokens), np.int32)
    inputs = {"input_ids": ids, "attention_mask": np.ones((rows, tokens), np.bool_)}

    def results(seconds: float) -> Results:
        spent = measured(lambda: compiled.run(inputs), seconds)
        timing = Timing(f"encode {rows} x {tokens}", rows * tokens, spent, limit_of([compiled]))
        return Results([timing], [compiled], dict(compiled.memory_plan().regions))

    return results


def _graph(compiled: CompiledGraph | None, inputs: dict[str, Any]) -> Callable[[float], Results]:
    """A run of a graph counts as one token, so that the rate is in runs."""
    from rlx.errors import Unsupported

    if compiled is None:
        raise Unsupported("all outputs of the model are known without a run: there is nothing to time")
    call = compiled.bound({d.name: inputs[d.name] for d in compiled.inputs})
    dims = ", ".join(f"{d.name} {d.shape}" for d in compiled.inputs)

    def results(seconds: float) -> Results:
        timing = Timing(f"run on {dims}", 1, measured(call, seconds), limit_of([compiled]))
        return Results([timing], [compiled], dict(compiled.memory_plan().regions))

    return results


def _decoder(model: LanguageModel, length: int, new: int) -> Callable[[float], Results]:
    """Greedy decoding, as `rlx generate` does it; several texts at once by steps that return logits."""
    import numpy as np

    from rlx.frontends.sampling import Sampling

    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (model.batch, length), np.int32)
    steps, sizes, left = (() if model.batch == 1 else None), [], length
    while left > 0:
        sizes.append(size := model.chunk_size(left, model.capacity - length + left))
        left -= size
    chunks, one = [model.executable(size, steps) for size in sizes], model.executable(1, steps)
    decoding = model.decoding(Sampling(), 0)
    at, waiting = length, deque[Callable[[], Any]]()  # tokens in the state; reads of a token that the next one does not wait for

    def prefill() -> None:
        nonlocal at
        at = length
        if steps is None:
            model.reset()
            model.step(prompt)
        else:
            decoding.first(prompt[0].tolist())

    def decode() -> None:
        nonlocal at
        if at == length + new:
            at = length  # the state of the prompt alone; what it decodes does not matter
            model.move(at)
        at += 1
        if steps is None:
            model.step(prompt[:, :1])
        else:
            one.run_slots(())
            waiting.append(model.handles.read_later("token"))
            if len(waiting) > 1:
                waiting.popleft()()

    def results(seconds: float) -> Results:
        spent = measured(prefill, seconds / 2), measured(decode, seconds / 2)
        timings = [
            Timing(f"prefill {model.batch} x {length}", model.batch * length, spent[0], limit_of(chunks)),
            Timing(f"decode {model.batch} x 1", model.batch, spent[1], limit_of([one])),
        ]
        return Results(timings, list(dict.fromkeys([*chunks, one])), model.memory(length, steps))

    return results


def measured(run: Callable[[], object], seconds: float) -> tuple[float, ...]:
    """Seconds of each run."""
    for _ in range(WARM):
        run()
    spent: list[float] = []
    begun = last = time.perf_counter()
    while len(spent) < LEAST or last - begun < seconds:
        run()
        now = time.perf_counter()
        spent.append(now - last)
        last = now
    return tuple(spent)


def roofline_of(compiled: CompiledGraph) -> Roofline | None:
    from rlx.backends import backend_of
    from rlx.driver.backend import Roofed

    backend = backend_of(compiled.device)
    return backend.roofline(compiled.program().target) if isinstance(backend, Roofed) else None


def limit_of(programs: Sequence[CompiledGraph]) -> tuple[float, str] | None:
    """The time that these programs need at least, one after the other. None: no rates are known, or no graph is (an artifact)."""
    from rlx.errors import Unsupported
    from rlx.ir.cost import arithmetic

    roofline = roofline_of(programs[0])
    if roofline is None:
        return None
    reading = computing = 0.0
    for compiled in programs:
        try:
            program = compiled._origins().program  # that of the disk cache has no loops
        except Unsupported:
            return None
        work = compiled.report().work
        reading += roofline.least(work.least_bytes, 0, "f32")[0]
        steps = (*program.steps, *program.commit)
        for cost, step in zip(work.kernels, steps, strict=True):
            computing += roofline.least(0, cost.flops or 0, arithmetic(step.kernel))[0]
    return max(reading, computing), "memory" if reading >= computing else "arithmetic"


def _print(facts: dict[str, Any], roofline: Roofline | None) -> None:
    from rlx.cli import show
    from rlx.explain.profile import timed
    from rlx.ir.shown import sized

    print(o.printable(f"{facts['model']} on {facts['device']}, {facts['threads']} threads"))
    print(f"loaded and compiled in {facts['load_seconds'] + facts['compile_seconds']:.2f} s", end="")
    print(f", compilation {facts['compile_seconds']:.2f} s of it (cache: {facts['cache']})")
    print("memory: " + ", ".join(f"{name} {sized(n)}" for name, n in facts["memory_bytes"].items() if n))
    rows = []
    for r in facts["results"]:
        limit, rate = r["limit_seconds"], r["tokens_per_second"]
        share = (timed(limit), f"{limit / r['median_seconds']:.0%}", r["bound"]) if limit else ("?", "", "")
        rate = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
        rows.append((r["what"], timed(r["median_seconds"]), timed(r["p90_seconds"]), rate, *share))
    rate = "runs/s" if facts["results"][0]["what"].startswith("run on") else "tokens/s"
    show.table("", ("run", "median", "p90", rate, "limit", "reached", "bound by"), rows)
    if roofline is not None:
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {kind}" for kind, rate in roofline.operations.items())
        print(f"this machine: reads {roofline.reading[-1][1] / 1e9:.1f} GB/s from memory, {rates}")

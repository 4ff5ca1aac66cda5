"""`rlx generate MODEL PROMPT`: streams text from a language model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli.options import DeviceName, Threads, Tune, TuningBar
from rlx.errors import RlxError

if TYPE_CHECKING:
    from rlx.frontends.generate import Generator
    from rlx.frontends.language import LanguageModel

ETX = 130  # exit code after Ctrl-C, as in shells


def generate(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder or .gguf file.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer (tokens).", show_default="what fits")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the fewest tokens with this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeated tokens become less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.", show_default="a new one")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; can be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a chat message: apply the model's template.")] = False,
    capacity: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of prompt and answer together.")] = None,
    cache: Annotated[str, typer.Option(help="Dtype of the KV cache: f32, bf16 or f16.")] = "f32",
    device: Annotated[str, DeviceName] = "cpu",
    threads: Annotated[int | None, Threads] = None,
    tune: Annotated[float, Tune] = 0.0,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed, time per phase, and memory use.")] = False,
) -> None:
    """Continue a prompt, or answer a message, with a language model."""
    from rlx.frontends.generate import Generator, prepare
    from rlx.frontends.language import load
    from rlx.runtime import CompileOptions, Session, connect, of_first

    transport, loading = connect(), _Loading()  # with several ranks, only the first one prints
    first, text = transport.this_rank.index == 0, prompt
    if prompt == "-":
        text = of_first(transport, _standard_input().encode() if first else b"").decode()
    with loading:
        options = CompileOptions(threads=threads, tune=tune)
        session = Session(device, progress=TuningBar().progress, transport=transport)
        loaded = load(
            model, capacity=capacity, cache=cache, options=options, progress=loading.progress, session=session
        )  # fmt: skip
        answer = Generator(
            loaded, [{"role": "user", "content": text}] if chat else text, max_new_tokens=max_new_tokens, stop=stop or (),
            seed=seed, on_text=_show if first else None, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        prepare(answer)
    try:
        answer.run()
    except KeyboardInterrupt:
        answer.finish = "interrupted"
        raise typer.Exit(ETX) from None
    finally:
        if first:
            print(flush=True)
        if first and stats:
            _account(loaded, answer)
        transport.close()


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise RlxError(f"standard input is not UTF-8 text: byte {e.start} cannot be read") from None


def _show(text: str) -> None:
    """Print the text. Control characters are replaced on a terminal, because it would interpret them."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


class _Loading:
    """A progress bar on stderr while weights are read, if stderr is a terminal."""

    def __enter__(self) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            parts = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
            self._bar = Progress(*parts, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("loading", total=None)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


def _account(model: LanguageModel, answer: Generator) -> None:
    """Print statistics to stderr, so that stdout has only the answer."""
    s, memory = answer.stats, model.memory(len(answer.prompt), answer.how.steps)
    lines = [
        f"prompt: {s.prompt_tokens} tokens, {s.prefill_rate:.1f} tokens/s",
        f"answer: {s.new_tokens} tokens, {s.decode_rate:.1f} tokens/s, first after {s.prefill_seconds:.3f} s",
        f"ended by: {answer.finish}; seed {answer.seed}",
        "seconds: " + ", ".join(f"{phase} {spent:.3f}" for phase, spent in model.seconds.items()),
        "memory: " + ", ".join(f"{what} {n / 1e6:.1f} MB" for what, n in memory.items() if n),
    ]
    print(*lines, sep="\n", file=sys.stderr)

"""`rlx generate MODEL PROMPT` and `rlx chat MODEL`: stream text from a language model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import options as o
from rlx.cli.progress import Bars
from rlx.errors import OptionError, RlxError, check_writable

if TYPE_CHECKING:
    from rlx.driver import SymmetricTransport
    from rlx.frontends.generate import Generator
    from rlx.frontends.language import LanguageModel

ETX = 130  # exit code after Ctrl-C, as in shells
MOST_BYTES = 1 << 24  # of a prompt or message from standard input: more than any context holds


def generate(
    model: o.Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)],
    max_new_tokens: o.MaxNewTokens = None,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.Penalty = 1.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a chat message: apply the model's template.")] = False,
    capacity: o.Capacity = None,
    cache: o.CacheDType = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
    expert_budget: o.ExpertBudget = None,
    expert_policy: o.ExpertPolicy = None,
    expert_profile: o.ExpertProfile = None,
    record_experts: o.RecordExperts = None,
    trace: o.Trace = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed, time per phase, and memory use.")] = False,
) -> None:
    """Continue a prompt, or answer a message, with a language model.

    Examples:

        rlx generate path/to/folder "Once upon a time" --max-new-tokens 100 --temperature 0.8

        rlx generate Qwen/Qwen3-0.6B "Why is the sky blue?" --chat

        cat question.txt | rlx generate model.q4_k.gguf - --chat --stats

        rlx generate Qwen/Qwen3-30B-A3B "Once upon a time" --expert-budget 8GB --record-experts trace.moe
    """
    from rlx.frontends.generate import Generator, prepare
    from rlx.runtime import connect, of_first

    check_writable(trace, record_experts, model=model)
    experts = expert_options(expert_budget, expert_policy, expert_profile, record_experts)
    how = answer_options(max_new_tokens, stop, seed, temperature, top_k, top_p, min_p, repetition_penalty)
    transport = connect()  # with several ranks, only the first one prints
    first, text = transport.this_rank.index == 0, prompt
    if prompt == "-":
        text = of_first(transport, standard_input(bounded=True).encode() if first else b"").decode()
    with Bars() as bars:
        loaded = open_model(model, bars, capacity, cache, device, threads, tune, transport, **experts)
        answer = Generator(loaded, [{"role": "user", "content": text}] if chat else text, on_text=_show if first else None, **how)
        prepare(answer)
    try:
        _run(answer, loaded, first, stats)
    finally:
        transport.close()
    if trace is not None:
        from rlx.explain.profile import write_trace

        write_trace(trace, loaded.profiles())


def _run(answer: Generator, model: LanguageModel, first: bool, stats: bool) -> None:
    """Run the answer to its end. Only the `first` rank prints."""
    if first:
        _tell_experts(model)
    try:
        answer.run()
    except KeyboardInterrupt:
        answer.finish = "interrupted"
        raise typer.Exit(ETX) from None
    finally:
        if first:
            print(flush=True)
        if first and stats:
            _account(model, answer)


def chat(
    model: o.Model,
    system: Annotated[str | None, typer.Option(help="System prompt: instructions for the whole conversation.")] = None,
    max_new_tokens: o.MaxNewTokens = None,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.Penalty = 1.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    capacity: o.Capacity = None,
    cache: o.CacheDType = None,
    device: o.DeviceName = "cpu",
    threads: o.Threads = None,
    tune: o.Tune = 0.0,
    expert_budget: o.ExpertBudget = None,
    expert_policy: o.ExpertPolicy = None,
    expert_profile: o.ExpertProfile = None,
    record_experts: o.RecordExperts = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and memory use after each answer.")] = False,
) -> None:
    """Talk with a language model, with the chat template that it was trained on.

    Each line is a message. Ctrl-C stops an answer; /new begins a new conversation; /exit or Ctrl-D ends. Between messages the
    keys and values of the conversation stay on the device, so that only new tokens are processed.

    Examples:

        rlx chat Qwen/Qwen3-0.6B --temperature 0.7 --top-p 0.9

        rlx chat model.q4_k.gguf --system "Answer in one sentence." --capacity 8192

        printf 'Hello\\nWhy?\\n' | rlx chat path/to/folder
    """
    from rlx.frontends.chat import Chat

    how = answer_options(max_new_tokens, stop, seed, temperature, top_k, top_p, min_p, repetition_penalty)
    experts = expert_options(expert_budget, expert_policy, expert_profile, record_experts)
    bars = Bars()
    with bars:
        loaded = open_model(model, bars, capacity, cache, device, threads, tune, **experts)
        talk = Chat(loaded, system, on_text=_show, **how)
    terminal = sys.stdin.isatty()
    if terminal:
        print("/exit or Ctrl-D ends, /new begins a new conversation, Ctrl-C stops an answer", file=sys.stderr)
    text = ""
    while text not in (None, "/exit"):
        try:
            if text == "/new":
                talk.reset()
            elif text:
                _answer(talk, text, bars, stats)
            text = _message(terminal)
        except OptionError as e:  # no room for the message
            if not terminal:
                raise
            print(f"rlx: {e}; /new begins a new conversation", file=sys.stderr)
            text = ""
        except KeyboardInterrupt:  # while no answer is under way
            if not terminal:
                raise typer.Exit(ETX) from None
            print("\n/exit or Ctrl-D ends", file=sys.stderr)
            text = ""


def _answer(talk: Any, text: str, bars: Bars, stats: bool) -> None:
    from rlx.frontends.generate import prepare

    answer, first = talk.ask(text), talk.model.pool is None
    try:
        with bars:
            prepare(answer)
        if first:
            _tell_experts(talk.model)
        answer.run()
    except KeyboardInterrupt:
        answer.finish = "interrupted"
    print(flush=True)
    if answer.finish == "length" and answer.limit == answer.room:
        print(f"rlx: the answer ends here: the context of {talk.model.capacity} tokens is full (--capacity)", file=sys.stderr)
    if stats:
        _account(talk.model, answer)


def _message(terminal: bool) -> str | None:
    """The next line of standard input, or None at its end."""
    if terminal and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import_module("readline")  # input() then has a history
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    if terminal:
        print("> ", end="", file=sys.stderr, flush=True)
    line = _bounded(sys.stdin.buffer.readline, "a message")
    return _text(line).strip() if line else None


def expert_options(budget: str | None, policy: str | None, profile: Path | None, record: Path | None) -> dict[str, Any]:
    """The arguments of LanguageModel that only models with experts take, checked."""
    from rlx.frontends.experts import placed

    check_writable(record)
    with o.usage():
        placed(budget, policy, profile)
    return {"expert_budget": budget, "expert_policy": policy, "expert_profile": profile, "record_experts": record}


@o.usage()
def answer_options(most: int | None, stop: list[str] | None, seed: int | None, *sampling: Any) -> dict[str, Any]:
    """The arguments of Generator, checked. `sampling`: the fields of Sampling, in order."""
    from rlx.frontends.generate import StopStrings
    from rlx.frontends.sampling import Sampling, checked_seed

    how, _, _ = vars(Sampling(*sampling)), checked_seed(seed), StopStrings(stop or ())
    return {**how, "max_new_tokens": most, "stop": stop or (), "seed": seed}


def open_model(
    model: Path, bars: Bars, capacity: int | None, cache: str | None, device: str, threads: int | None, tune: float,
    transport: SymmetricTransport | None = None, **experts: Any,
) -> LanguageModel:  # fmt: skip
    """`experts`: as from expert_options."""
    from rlx.frontends.load import load_decoder

    how = o.compiling(bars, device, threads, tune, transport)
    given = {"capacity": capacity, "cache": cache, **experts}
    how |= {name: value for name, value in given.items() if value is not None}
    return load_decoder(model, progress=bars.loading, **how)


def _tell_experts(model: LanguageModel) -> None:
    """Say on stderr which experts are resident."""
    if model.pool is not None:
        print(f"rlx: {model.pool.report()}", file=sys.stderr)


def standard_input(bounded: bool = False) -> str:
    return _text(_bounded(sys.stdin.buffer.read, "a prompt") if bounded else sys.stdin.buffer.read())


def _bounded(read: Callable[[int], bytes], what: str) -> bytes:
    """OptionError: there is more than any context holds, as in a device that never ends."""
    raw = read(MOST_BYTES)
    if len(raw) == MOST_BYTES:
        raise OptionError(f"{what} has less than {MOST_BYTES >> 20} MiB; standard input has more")
    return raw


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise RlxError(f"standard input is not UTF-8 text: byte {e.start} cannot be read") from None


def _show(text: str) -> None:
    """Print the text. Control characters are replaced on a terminal, because it would interpret them."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _account(model: LanguageModel, answer: Generator) -> None:
    """Print statistics to stderr, so that stdout has only the answer."""
    s, memory = answer.stats, model.memory(len(answer.prompt), answer.how.steps)
    kept = f" ({s.reused_tokens} of them kept from before)" if s.reused_tokens else ""
    lines = [
        f"prompt: {s.prompt_tokens} tokens{kept}, {s.prefill_rate:.1f} tokens/s",
        f"answer: {s.new_tokens} tokens, {s.decode_rate:.1f} tokens/s, first after {s.prefill_seconds:.3f} s",
        f"ended by: {answer.finish}; seed {answer.seed}",
        "seconds: " + ", ".join(f"{phase} {spent:.3f}" for phase, spent in model.seconds.items()),
        "memory: " + ", ".join(f"{what} {n / 1e6:.1f} MB" for what, n in memory.items() if n),
    ]
    print(*lines, sep="\n", file=sys.stderr)
    if model.pool is not None:
        print(f"experts: {model.pool.report()}", file=sys.stderr)

"""Conversations: what stays in the state, what is processed again, and the command `rlx chat`."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_models

from rlx.cli import generate as commands
from rlx.cli.main import run
from rlx.errors import ModelError, OptionError
from rlx.frontends.chat import Chat
from rlx.frontends.generate import Generator, prepare
from rlx.frontends.language import LanguageModel

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    return folder, small_models.talker(folder)


@pytest.fixture
def model(folder):
    return LanguageModel(folder[0], capacity=256)


def right(folder, answer: Generator) -> list[int]:
    """The tokens that transformers gives, from the whole prompt. (The end token is in it, and must not count as padding.)"""
    tokens = small_models.greedy(folder[1], answer.prompt, answer.limit, pad_token_id=299)
    return tokens[: len(answer.tokens)]


def test_only_new_tokens_are_processed_and_answers_are_those_of_transformers(folder, model):
    sizes, chunks = [], model._chunks
    model._chunks = lambda tokens, steps=None: (sizes.append(tokens.shape[1]), chunks(tokens, steps))[1]
    talk = Chat(model, "Be brief.", max_new_tokens=12)
    told = []
    for text in ("Hello there", "Why?", "And then?"):
        answer = talk.ask(text)
        prepare(answer)
        compiled = set(model._compiled)
        answer.run()
        assert set(model._compiled) == compiled  # prepare knows what is kept
        assert answer.tokens == right(folder, answer)
        told.append(answer)
    first, second, third = told
    assert first.stats.reused_tokens == 0 and sizes[0] == len(first.prompt)
    for before, after, size in ((first, second, sizes[1]), (second, third, sizes[2])):
        held = len(before.prompt) + len(before.tokens) - 1  # its last token was not processed: the answer was cut at 12
        assert before.finish == "length" and after.prompt[:held] == [*before.prompt, *before.tokens][:held]
        assert after.stats.reused_tokens == held and size == len(after.prompt) - held
    roles = [m["role"] for m in talk.messages]
    assert roles == ["system", *["user", "assistant"] * 3] and talk.messages[-1]["content"] == third.text
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert talk.ask("Hello there").run().tokens == first.tokens


def test_the_tokens_of_an_answer_are_kept_though_its_text_has_others(model):
    talk = Chat(model)
    answer = talk.ask("a")
    answer.run()  # bytes in no order: decoded, many are no characters
    again = model.codec.encode(answer.text, special=False)
    assert again != answer.tokens[: len(again)]
    assert talk.ask("b") if len(answer.prompt) + len(answer.tokens) < 200 else True
    short = Chat(model, max_new_tokens=5)
    one = short.ask("a").run()
    two = short.ask("b")
    assert two.prompt[: len(one.prompt) + 5] == [*one.prompt, *one.tokens]


def test_a_stopped_answer_is_part_of_the_conversation(folder, model):
    talk = Chat(model, max_new_tokens=20)
    answer = talk.ask("Hello")
    for _ in range(4):
        answer.step()
    next_one = talk.ask("Go on")  # without running the first to its end
    assert [m["role"] for m in talk._said] == ["user", "assistant"] and talk._said[1]["content"] == answer.text
    assert next_one.run().tokens == right(folder, next_one)
    assert next_one.stats.reused_tokens >= len(answer.prompt)


def test_nothing_is_kept_after_other_runs_on_the_state(folder, model):
    prompt = [int(i) for i in np.random.default_rng(0).integers(2, 290, 20)]

    def answer(**how) -> Generator:
        return Generator(model, prompt, ends=(), max_new_tokens=10, **how).run()

    want = answer().tokens
    assert answer(reuse=True).stats.reused_tokens == 19  # all but the last, whose logits are needed
    assert answer(reuse=True).tokens == want == small_models.greedy(folder[1], prompt, 10, pad_token_id=299)
    model.step(np.array([3, 4]))
    assert answer(reuse=True).stats.reused_tokens == 0
    store = model.handles.fork(1)[0]
    model.use_handles(store)
    assert answer(reuse=True).stats.reused_tokens == 0 and model.held([*prompt[:7], 299]) == 7
    model.reset()
    assert model.held(prompt) == 0
    assert answer(reuse=True).tokens == want


def test_an_interrupted_prefill_is_done_again(model, monkeypatch):
    prompt = [int(i) for i in np.random.default_rng(0).integers(2, 290, 60)]
    want = Generator(model, prompt, ends=(), max_new_tokens=3).run().tokens
    other = [5, *prompt]
    executable, count = model.executable, []

    def interrupted(*args):
        count.append(args)
        if len(count) == 2:
            raise KeyboardInterrupt
        return executable(*args)

    monkeypatch.setattr(model, "executable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Generator(model, other, reuse=True).run()
    assert 0 < model.position < 60 and model.held(other) == 0
    assert Generator(model, prompt, ends=(), max_new_tokens=3, reuse=True).run().tokens == want


def test_a_message_without_room_changes_nothing(model):
    talk = Chat(model, max_new_tokens=4)
    talk.ask("Hello").run()
    before = talk.messages
    with pytest.raises(OptionError, match=r"context is full: with this message the conversation has \d{3} tokens, the model 256"):
        talk.ask("x" * 300)
    assert talk.messages == before and talk.ask("Hello").run().stats.reused_tokens > 0


def test_a_model_that_cannot_chat(tmp_path):
    small_models.talker(tmp_path, None)
    with pytest.raises(ModelError, match="has no chat template"):
        Chat(LanguageModel(tmp_path))
    small_models.talker(tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x")
    assert Chat(LanguageModel(tmp_path)).messages == []
    with pytest.raises(ModelError, match="no system role"):
        Chat(LanguageModel(tmp_path), "Be brief.")


# -- the command ---------------------------------------------------------------------------------------------------


def command(monkeypatch, given: str | bytes, *args: str) -> int:
    """Exit code of the command in this process."""
    raw = given.encode() if isinstance(given, str) else given
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    try:
        run(["chat", *args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_lines_are_messages(folder, model, monkeypatch, capfdbinary):
    talk = Chat(model, "Be brief.", max_new_tokens=8)
    want = b"".join(talk.ask(t).run().text.encode() + b"\n" for t in ("Hello", "Why?"))
    talk.reset()
    want += talk.ask("Hello").run().text.encode() + b"\n"
    lines = "Hello\n\nWhy?\n/new\nHello\n/exit\nnever read\n"
    options = ["--system", "Be brief.", "--max-new-tokens", "8", "--capacity", "256", "--stats"]
    assert command(monkeypatch, lines, str(folder[0]), *options) == 0
    shown = capfdbinary.readouterr()
    assert shown.out == want
    kept = re.findall(r"prompt: \d+ tokens( \(\d+ of them kept from before\))?,", shown.err.decode())
    assert [bool(k) for k in kept] == [False, True, True]  # the system prompt is kept for the new conversation


def test_in_a_process_of_its_own(folder):
    args = [sys.executable, "-m", "rlx", "chat", str(folder[0]), "--max-new-tokens", "4"]
    done = subprocess.run(args, input=b"Hello\nWhy?", capture_output=True, env={**os.environ}, check=False)
    assert done.returncode == 0 and done.stderr == b"" and done.stdout.endswith(b"\n"), done


@pytest.mark.parametrize(("args", "what"), [(["chat"], "a message"), (["generate"], "a prompt")])
def test_input_without_an_end_is_refused(folder, args, what):
    args = [sys.executable, "-m", "rlx", *args, str(folder[0]), *(["-"] if args == ["generate"] else [])]
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(args, stdin=zeros, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (1, f"rlx: {what} has less than 16 MiB; standard input has more\n")


def test_ctrl_c_stops_the_answer_only(folder, monkeypatch, capfdbinary):
    shown, count = commands._show, []

    def show(text: str) -> None:
        shown(text)
        count.append(text)
        if len(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_show", show)
    assert command(monkeypatch, "Hello\nGo on\n", str(folder[0]), "--capacity", "256", "--stats", "--max-new-tokens", "9") == 0
    err = capfdbinary.readouterr().err.decode()
    assert re.findall("ended by: (\\w+);", err) == ["interrupted", "length"]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_between_messages_ends_a_pipe_without_a_traceback(folder):
    args = [sys.executable, "-m", "rlx", "chat", str(folder[0]), "--max-new-tokens", "4", "--stats"]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        shown = b""
        while b"memory:" not in shown:  # the statistics after the answer end with it
            shown += process.stderr.readline()
        process.send_signal(signal.SIGINT)
        shown += process.stderr.read()
        assert process.wait(60) == 130 and b"Traceback" not in shown and b"Aborted" not in shown


def test_a_full_context_is_said(folder, monkeypatch, capfd):
    assert command(monkeypatch, "Hello\nmore\n", str(folder[0]), "--capacity", "40") == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first == "rlx: the answer ends here: the context of 40 tokens is full (--capacity)"
    assert re.fullmatch(r"rlx: the context is full: with this message the conversation has \d\d tokens, the model 40", second)


@pytest.mark.parametrize(
    "args, given, code, text",
    [
        (["no-such-model"], "", 1, "no-such-model is neither a folder"),
        (["EMPTY"], "", 1, "has no config.json"),
        (["ENCODER"], "", 1, "'bert' is not supported"),
        (["TALKER", "--top-p", "2"], "x\n", 2, "top_p is a number from 0.0 to 1.0"),
        (["TALKER", "--capacity", "0"], "", 2, "capacity"),
        (["TALKER", "--capacity", "1000"], "", 1, "the model has 256 positions"),
        (["TALKER"], b"\xff\n", 1, "standard input is not UTF-8 text"),
        (["TALKER", "--system", "\udcff"], "", 1, "not valid unicode"),
        ([], "", 2, "MODEL"),
    ],
)
def test_errors(folder, tmp_path, monkeypatch, capsys, args, given, code, text):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "empty").mkdir()
    names = {"EMPTY": tmp_path / "empty", "ENCODER": tmp_path / "encoder", "TALKER": folder[0]}
    assert command(monkeypatch, given, *(str(names.get(a, a)) for a in args)) == code
    shown = capsys.readouterr().err
    assert text in " ".join(shown.split()) and "Traceback" not in shown


def test_on_a_terminal(folder):
    """A prompt for each message, and a bar while weights are read."""
    import pty

    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parent.parent)}
    args = [sys.executable, "-m", "rlx", "chat", str(folder[0]), "--max-new-tokens", "4"]
    process = subprocess.Popen(args, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    with os.fdopen(ours, "r+b", buffering=0) as terminal, process:
        shown = b""
        terminal.write(b"Hello\n/exit\n")
        while select.select([terminal], [], [], 100)[0]:
            try:
                part = terminal.read(4096)
            except OSError:  # the other side is closed
                break
            shown += part
            if not part:
                break
    assert process.returncode == 0, shown
    assert b"/exit or Ctrl-D ends" in shown and shown.count(b"> ") >= 2 and b"compiling" in shown, shown

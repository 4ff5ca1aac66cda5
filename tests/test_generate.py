"""Generation: text as it becomes certain, ends and stops, chat templates against transformers', answers of real small models."""

from __future__ import annotations

import datetime
import subprocess
import sys

import numpy as np
import pytest
import small_models
from counting import check_allocates_nothing

from rlx.errors import BindingError, ModelError, NumericsError, OptionError
from rlx.frontends.beams import beam_search
from rlx.frontends.generate import Generator, HostDecoding, StopStrings, TextDecoder, prepare, render_chat
from rlx.frontends.language import LanguageModel
from rlx.frontends.sampling import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
END = 256  # the fake model's; tokens below are bytes
TEXT = "naïve €5 – 😀👩‍👩‍👧 日本語 done."


def generate(model, prompt, **options) -> Generator:
    return Generator(model, prompt, **options).run()


class ByteCodec:
    ends, special = (END,), {}
    chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [*([0] if special else []), *text.encode()]

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace").replace("\0", "")


class Script:
    """A model that says `answer` after any prompt, and then ends; `flat`: every token is as likely."""

    def __init__(self, answer: str | bytes, capacity: int = 1000, flat: bool = False) -> None:
        self.answer = [*(answer.encode() if isinstance(answer, str) else answer), END]
        self.capacity, self.codec, self.flat, self.taken = capacity, ByteCodec(), flat, []
        self.calls: list[int] = []
        self.prompt = 0

    @property
    def position(self) -> int:
        return len(self.taken)

    def reset(self) -> None:
        self.taken = []

    def step(self, tokens) -> np.ndarray:
        self.calls.append(len(tokens))
        self.prompt = self.prompt if self.taken else len(tokens)
        self.taken += [int(t) for t in tokens]
        assert len(self.taken) <= self.capacity
        logits = np.zeros((1, 257), np.float32)
        if not self.flat:
            logits[0, self.answer[len(self.taken) - self.prompt]] = 30
        return logits


# -- the loop ------------------------------------------------------------------------------------------------------


def test_an_answer_token_by_token():
    model, heard = Script("Hello!"), []
    answer = Generator(model, "Say it", on_text=heard.append)
    tokens = list(answer)
    assert [t.text for t in tokens] == [*"Hello!", ""] and tokens[-1].id == END
    assert answer.tokens == list(b"Hello!") and answer.text == "Hello!" == "".join(heard)
    assert answer.finish == "end" and answer.step() is None
    assert model.calls == [7, 1, 1, 1, 1, 1, 1] and model.taken == [0, *b"Say itHello!"]
    assert (answer.stats.prompt_tokens, answer.stats.new_tokens) == (7, 7)
    assert answer.stats.prefill_seconds > 0 and answer.stats.decode_rate > 0


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(None, {}), (5, {}), ([-1], {}), ([2**40], {}), ([1.0], {}), ([1, "a"], {}), ("a", {"stop": 3}), ("a", {"ends": "ab"}),
     ("a", {"ends": [1.5]})],
)  # fmt: skip
def test_what_is_no_prompt_and_no_end(prompt, options):
    with pytest.raises(OptionError):
        Generator(Script("abc"), prompt, **options)


def test_limits():
    short = generate(Script("abcdef"), "x", max_new_tokens=3)
    assert (short.text, short.finish) == ("abc", "length")
    full = generate(Script("abcdefghij", capacity=5), "xy")  # 3 of the prompt, 2 of the answer, and one not taken in
    assert (full.text, full.finish) == ("abc", "length")
    assert generate(Script("ab"), [1, 2, 3], ends=(ord("b"),)).tokens == [ord("a")]
    assert generate(Script("abc"), [1], max_new_tokens=1).stats.decode_rate == 0


def test_numbers_of_numpy_are_numbers():
    """Settings often come out of arrays."""
    asked = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 7}
    given = {"max_new_tokens": np.int64(4), "temperature": np.float32(0.5), "top_k": np.int8(3), "top_p": np.float64(0.75)}
    answers = [generate(Script("abcdef", flat=True), "x", **how).tokens for how in (asked, {**given, "seed": np.uint64(7)})]
    assert answers[0] == answers[1]


def interrupted_once(monkeypatch, owner: type, name: str) -> None:
    """The next call of this method is a Ctrl-C; later ones are the method's."""
    own = getattr(owner, name)

    def interrupt(*_):
        monkeypatch.setattr(owner, name, own)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupt)


def test_an_interrupt_behind_the_last_token_does_not_lift_the_limit(monkeypatch):
    answer = Generator(Script("one two three"), "x", max_new_tokens=3)
    assert answer.step() and answer.step()
    interrupted_once(monkeypatch, ByteCodec, "decode")
    with pytest.raises(KeyboardInterrupt):
        answer.step()
    answer.run()
    assert (answer.text, len(answer.tokens), answer.finish) == ("one", 3, "length")


def test_an_interrupted_step_does_not_pass_for_a_finished_one(monkeypatch):
    """A model that the host samples from: the token before is not processed twice."""
    answer = Generator(Script("one two three"), "x")
    answer.step()
    interrupted_once(monkeypatch, HostDecoding, "_choose")
    with pytest.raises(KeyboardInterrupt):
        answer.step()
    with pytest.raises(BindingError, match="run or reset in between"):
        answer.step()


@pytest.mark.parametrize(
    "prompt, options, text",
    [
        ("x" * 20, {}, "21 tokens"), ([], {}, "0 tokens"), ("x", {"max_new_tokens": 0}, "max_new_tokens"),
        ([1.5], {}, "token ids"),
        ("x", {"stop": ""}, "stop string"), ("x", {"temprature": 1}, "temprature"), ("x", {"top_p": 2}, "top_p"),
        ("x", {"seed": -1}, "seed"),
    ],
)  # fmt: skip
def test_options_without_meaning(prompt, options, text):
    with pytest.raises(OptionError, match=text):
        Generator(Script("a", capacity=20), prompt, **options)


def test_a_model_that_was_used_in_between():
    model = Script("abc")
    first, second = Generator(model, "x"), Generator(model, "longer")
    first.step()
    second.step()
    with pytest.raises(BindingError, match="holds 7 tokens"):
        first.step()
    assert second.run().text == "abc"


def test_seeds():
    how = {"temperature": 1.0, "max_new_tokens": 20}
    a, b, c = (generate(Script("", flat=True), "x", seed=s, ends=(), **how).tokens for s in (1, 1, 2))
    assert a == b != c and len(set(a)) > 10
    free = generate(Script("", flat=True), "x", ends=(), **how)
    assert generate(Script("", flat=True), "x", ends=(), seed=free.seed, **how).tokens == free.tokens


def test_a_penalty_sees_the_prompt():
    model = Script("", flat=True)
    step, rising = model.step, np.arange(1, 258, dtype=np.float32)
    model.step = lambda tokens: step(tokens) + rising  # the end is likeliest, 255 next
    answer = generate(model, [END, 255, 254], repetition_penalty=100.0, max_new_tokens=2)
    assert answer.tokens == [253, 252]


def test_nan_ends_in_an_error():
    model = Script("a")
    model.step = lambda tokens: np.full((1, 257), np.nan, np.float32)
    with pytest.raises(NumericsError):
        generate(model, "x")


# -- text ----------------------------------------------------------------------------------------------------------


def test_streamed_text_has_no_broken_characters():
    pieces = [t.text for t in Generator(Script(TEXT), "x")]
    assert "".join(pieces) == TEXT and "\ufffd" not in "".join(pieces)
    assert "😀" in pieces  # in one piece, when its last byte is there
    cut = generate(Script(TEXT.encode()[:-9] + "é".encode()[:1]), "x")
    assert cut.text.endswith("\ufffd") and cut.text[:-1] == TEXT.encode()[:-9].decode("utf-8", "ignore")
    assert generate(Script(b"\xff" * 40 + b"ok"), "x").text == "\ufffd" * 40 + "ok"


def byte_level(texts=(TEXT, "the cat sat on the mat, the end"), size: int = 290):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": size, "special_tokens": ["<|end|>", "<|user|>"], "show_progress": False}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **how))
    return made


def with_fallback():
    """As Llama 2's: spaces are marks, unknown characters are bytes, the first space of a text is no part of it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.▁,"]
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    d = tokenizers.decoders
    made.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    return made


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_pieces_make_up_the_text(make):
    tokenizer = make()
    prompt = tokenizer.encode("the prompt €").ids
    for text in (TEXT, "a b  c\n", " spaces  before", "😀😀 x 😀", "日本"):
        everything = tokenizer.encode("the prompt €" + text).ids
        assert everything[: len(prompt)] == prompt
        decoder = TextDecoder(tokenizer, prompt)
        pieces = [decoder.add(t) for t in everything[len(prompt) :]]
        assert "".join(pieces) + decoder.rest() == tokenizer.decode(everything)[len(tokenizer.decode(prompt)) :] == text
        assert "\ufffd" not in "".join(pieces)


def test_pieces_of_random_tokens():
    """Bytes in no order: what the pieces add up to differs from the whole at most in how many signs stand for broken bytes."""
    tokenizer, rng = byte_level(), np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(2, 290, 30).tolist()
        decoder = TextDecoder(tokenizer)
        text = "".join(decoder.add(t) for t in ids) + decoder.rest()
        assert text.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "stops, want",
    [
        (["STOP"], "one ST two SSTO"), (["two", "STOP"], "one ST "), (["xyz"], "one ST two SSTOSTOP end ST"),
        (["STOP", "SSTO"], "one ST two "),
    ],
)  # fmt: skip
def test_stop_strings_wherever_pieces_are_cut(cut, stops, want):
    whole, filter = "one ST two SSTOSTOP end ST", StopStrings(stops)
    out = [filter.add(whole[i : i + cut]) for i in range(0, len(whole), cut)]
    assert all(want.startswith("".join(out[:i])) for i in range(len(out) + 1))  # nothing is ever taken back
    assert "".join(out) + filter.rest() == want and filter.found == (want != whole)


def test_an_answer_stops():
    heard = []
    answer = generate(Script("first\nUser: no"), "x", stop=["\nUser:"], on_text=heard.append)
    assert (answer.text, answer.finish, "".join(heard)) == ("first", "stop", "first")
    assert bytes(answer.tokens) == b"first\nUser:"
    assert generate(Script("first\nUs"), "x", stop="\nUser:").text == "first\nUs"


# -- chat ----------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Who's \"é\" <b>?"},
            {"role": "assistant", "content": "Me."}, {"role": "user", "content": "Ok"}]  # fmt: skip
TEMPLATES = [
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ bos_token }}\n{%- for m in messages %}\n  {%- if m.role == 'system' %}\n[SYS]{{ m.content | trim }}[/SYS]\n"
    "  {%- elif loop.last %}\n[LAST]{{ m.content }}{{ eos_token }}\n  {%- else %}\n{{ m | tojson }}\n  {%- endif %}\n"
    "{%- endfor %}",
    "{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}\n{% set ns = namespace(n=0) %}\n"
    "    {% for m in messages %}\n{% if loop.index > 2 %}{% break %}{% endif %}\n"
    "{% set ns.n = ns.n + 1 %}\n{{ ns.n }}: {{ m['content'] }}\n"
    "    {% endfor %}\n{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_as_transformers_renders_them(template):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **special)
    want = tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render_chat(template, MESSAGES, special) == want


def test_messages_are_put_through_the_template():
    model = Script("yes")
    answer = generate(model, [{"role": "user", "content": "hi"}])
    assert answer.text == "yes" and answer.prompt == list(b"[hi]")
    model.codec.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Generator(model, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template, text",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{% for %}", "chat template"),
        ("{{ messages[9].content }}", "chat template"), ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"), ("{{ 1 / 0 }}", "chat template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"), ("{{ 'x' * 10**13 }}", "MemoryError"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested"),
    ],
)  # fmt: skip
def test_templates_that_fail(template, text):
    with pytest.raises(ModelError, match=text):
        render_chat(template, MESSAGES, {})


def test_without_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModelError, match="pip install jinja2"):
        render_chat("x", MESSAGES, {})


# -- real models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3 with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("qwen3")
    network = small_models.make("qwen3", folder, vocab_size=300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATES[0]
    tokenizer.save_pretrained(folder)
    return folder, network


@pytest.fixture(scope="module")
def model(folder):
    return LanguageModel(folder[0], capacity=256)


def test_greedy_answers_are_those_of_transformers(folder, model):
    _, network = folder
    prompt = [int(i) for i in np.random.default_rng(2).integers(2, 290, 41)]
    answer = Generator(model, prompt, ends=(), max_new_tokens=200)
    prepare(answer)
    assert answer.run().tokens == small_models.greedy(network, prompt, 200)
    again = model.generate(prompt, ends=(), max_new_tokens=30)
    assert again.tokens == answer.tokens[:30]
    penalised = model.generate(prompt, ends=(), max_new_tokens=150, repetition_penalty=1.3).tokens
    assert penalised == small_models.greedy(network, prompt, 150, repetition_penalty=1.3) and len(set(penalised)) >= 15
    how = {"ends": (), "max_new_tokens": 30, "temperature": 2.0, "top_p": 0.9, "seed": 4}
    assert generate(model, prompt, **how).tokens == generate(model, prompt, **how).tokens != again.tokens


SETTINGS = [
    {}, {"repetition_penalty": 1.4}, {"temperature": 1.3}, {"temperature": 1.5, "top_k": 7}, {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.02, "repetition_penalty": 1.7},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
]  # fmt: skip


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_tokens_chosen_on_the_device_are_those_chosen_from_logits(model, given):
    """Prompts of one chunk and of several, the last of them a single token; every choice again from logits on the host."""
    how = Sampling(**given)
    for length in (5, 41):
        prompt = [int(i) for i in np.random.default_rng(length).integers(2, 290, length)]
        host, device = HostDecoding(model, how, 11), model.decoding(how, 11)
        want = [host.first(prompt), *(host.next() for _ in range(40))]
        assert [device.first(prompt), *(device.next() for _ in range(40))] == want
        assert model.position == length + 40 and len(set(want)) > 5 * ("temperature" in given)
        answer = generate(model, prompt, ends=(), seed=11, max_new_tokens=41, **given)
        assert answer.tokens == want and (answer.stats.prompt_tokens, answer.stats.new_tokens) == (length, 41)


def test_a_step_has_no_inputs_and_allocates_nothing(model):
    """The token stays on the device: an i32 is all that a step gives, and what the next one takes. No executable is made."""
    how = Sampling(temperature=1.5, top_k=40, repetition_penalty=1.1)
    decoding = model.decoding(how, 3)
    decoding.first([5, 6, 7])
    compiled, executables = model.executable(1, how.steps), len(model._compiled)
    program = compiled.program()
    assert program.inputs == () and [(o.name, str(o.shape)) for o in program.outputs] == [("token", "i32[1]")]
    for _ in range(3):
        token = decoding.next()
        assert compiled.outputs_view()[0].numpy().tolist() == compiled.read_handle("token").tolist() == [token]
    check_allocates_nothing(compiled, decoding.next, 200)
    assert len(model._compiled) == executables and model.position == 206


def test_what_was_seen_and_drawn_is_part_of_the_state(model):
    how = Sampling(temperature=1.5, repetition_penalty=1.3)
    decoding = model.decoding(how, 8)
    decoding.first([5, 6, 7])
    compiled = model.executable(1, how.steps)

    def run(steps: int) -> list[int]:
        out = []
        for _ in range(steps):
            compiled.run_slots(())
            out.append(int(compiled.outputs_view()[0][0]))
        return out

    run(10)
    snapshot, (branch,) = compiled.snapshot_handles(), compiled.fork_handles(1)
    want = run(20)
    compiled.restore_handles(snapshot)
    assert run(20) == want
    seen = np.flatnonzero(compiled.read_handle("seen")[0])
    assert {5, 6, 7, *want} <= set(seen.tolist()) and len(seen) <= 34
    own = model.handles
    model.use_handles(branch)
    assert run(20) == want
    model.use_handles(own)


def test_answers_that_take_turns_are_refused(model):
    first, second = (Generator(model, prompt, ends=(), seed=2, temperature=2.0) for prompt in ([3, 4, 5], [9, 8, 7]))
    first.step()
    second.step()
    assert model.position == 3
    with pytest.raises(BindingError, match="run or reset in between"):
        first.step()
    assert second.step() is not None
    model.step([1])
    with pytest.raises(BindingError, match="run or reset in between"):
        second.step()
    third = Generator(model, [3, 4, 5], ends=())
    third.step(), third.step()
    model.executable(1, ()).run_slots(())
    with pytest.raises(BindingError, match="holds 5 tokens, this answer needs 4"):
        third.step()


def test_nan_on_the_device(folder):
    broken = LanguageModel(folder[0], capacity=32)
    settings: list[dict] = [{}, {"temperature": 1.0, "top_p": 0.5}]
    for how in settings:
        answer = Generator(broken, [1, 2, 3], **how)
        prepare(answer)
        for steps in ((), answer.how.steps):
            compiled = broken.executable(8, steps)
            compiled.set_param("model.norm.weight", np.full(broken.config.hidden_size, np.nan, np.float32))
        with pytest.raises(NumericsError, match="NaN"):
            answer.run()


@pytest.mark.parametrize(
    "beams, length_penalty, ends", [(1, 1.0, ()), (3, 1.0, (5, 17, 40)), (4, 0.0, (9, 77)), (5, 2.0, tuple(range(90, 140)))]
)
def test_beams_are_those_of_transformers(folder, model, beams, length_penalty, ends):
    _, network = folder
    prompt = [int(i) for i in np.random.default_rng(beams).integers(2, 290, 11)]
    with torch.inference_mode():
        want = network.generate(
            torch.tensor([prompt]), num_beams=beams, num_return_sequences=beams, max_new_tokens=20, do_sample=False,
            eos_token_id=list(ends) or None, pad_token_id=0, length_penalty=length_penalty, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    found = beam_search(model, prompt, beams=beams, max_new_tokens=20, length_penalty=length_penalty, ends=ends)
    rows = want.sequences[:, len(prompt) :].tolist()
    cut = [row[: next((i for i, t in enumerate(row) if t in ends), len(row))] for row in rows]
    assert [b.tokens for b in found] == cut
    if beams > 1:
        np.testing.assert_allclose([b.score for b in found], want.sequences_scores.numpy(), rtol=1e-4)
    assert model.position == 0 and generate(model, prompt, ends=(), max_new_tokens=3).tokens  # the state is the model's own again


def test_beams_that_do_not_fit(model):
    with pytest.raises(OptionError, match="capacity is 256"):
        beam_search(model, list(range(10)), beams=2, max_new_tokens=248)
    for wrong in ("x", float("nan"), -1e5, None, True):
        with pytest.raises(OptionError, match="length_penalty is a number"):
            beam_search(model, [1], beams=2, max_new_tokens=8, length_penalty=wrong)
    with pytest.raises(OptionError, match="beams is a whole number of at least 1, got 0"):
        beam_search(model, [1], beams=0, max_new_tokens=8)


def command(*args: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    whole = [sys.executable, "-m", "rlx", "generate", *args]
    return subprocess.run(whole, input=text, capture_output=True, check=False)


def test_command(folder, model):
    path, _ = folder
    how = {"max_new_tokens": 24, "temperature": 1.5, "top_k": 50, "seed": 9}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    want = generate(model, [{"role": "user", "content": "the cat"}], **how)
    done = command(str(path), "-", "--chat", "--stats", "--threads=1", *options, text=b"the cat")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == want.text + "\n"
    notes = done.stderr.decode()
    assert all(x in notes for x in (f"answer: {want.stats.new_tokens} tokens", "tokens/s", "seed 9", "memory: "))
    quiet = command(str(path), "the cat", "--max-new-tokens=3")
    assert (quiet.returncode, quiet.stderr) == (0, b"")


def test_command_on_two_ranks(folder, model):
    """The first one shows what both made."""
    how = ["generate", str(folder[0]), "-", "--max-new-tokens=40", "--temperature=0.8", "--seed=3", "--threads=1", "--stats"]
    launch = [sys.executable, "-m", "rlx", "launch", "-n", "2", "--no-prefix", "-m", "rlx"]
    done = subprocess.run([*launch, *how], input=b"the cat", capture_output=True, check=False)  # only one of them gets it
    assert done.returncode == 0, done.stderr.decode()
    want = model.generate("the cat", max_new_tokens=40, temperature=0.8, seed=3)
    assert done.stdout.decode() == want.text + "\n" and done.stderr.decode().count("answer: ") == 1


@pytest.mark.parametrize(
    "args, text",
    [
        (["/nowhere", "x"], "nowhere"), (["{}", ""], "0 tokens"),
        (["{}", "x", "--capacity=9999"], "256"),
    ],
)  # fmt: skip
def test_errors_of_the_command_are_one_line(folder, args, text):
    done = command(*(a.format(folder[0]) for a in args))
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("rlx: ") and text in lines[0], lines


def test_year_of_templates_is_now():
    before = datetime.datetime.now().strftime("%Y")
    assert render_chat("{{ strftime_now('%Y') }}", [], {}) in (before, datetime.datetime.now().strftime("%Y"))

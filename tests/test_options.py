"""CompileOptions: values, refusals with advice, chaining, and the cache key."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path

import pytest

import rlx
from rlx.backends import get
from rlx.compiler import CompileOptions
from rlx.errors import CompileError, OptionError
from rlx.ir import BufferHandle
from rlx.ir.kernel import Kernel
from rlx.ir.keys import UNSEEN
from rlx.ir.target import Target
from rlx.ir.tuning import step_key
from rlx.records import record
from rlx.runtime.stored import given_to_compile

STATE = BufferHandle("state", (4,), "f32")


def test_defaults_say_little():
    options = CompileOptions()
    assert str(options) == "CompileOptions()"
    assert (options.precision, options.threads, options.deterministic, options.checked) == ("f32", None, True, False)
    assert not options.wants_text and CompileOptions(verbose=True).wants_text and CompileOptions(dump="x").wants_text


def test_frozen_hashable_and_equal_by_value():
    a = CompileOptions(dims={"n": 3, "b": 2}, disable={"fuse", "inplace"}, handles=[STATE])  # type: ignore[arg-type]
    b = CompileOptions(dims={"b": 2, "n": 3}, disable=("inplace", "fuse", "fuse")).bind_handle(STATE)
    assert a == b and hash(a) == hash(b) and str(a) == str(b)
    assert a.disable == ("fuse", "inplace") and a.binding == {"b": 2, "n": 3}
    with pytest.raises(AttributeError):
        a.precision = "f16"  # type: ignore[misc]


def test_chaining_makes_new_options():
    start = CompileOptions()
    chained = start.bind_handle(STATE).bind_dims(batch=8).bind_dims({"batch": 4, "n": 2}).replace(precision="bf16")
    assert start == CompileOptions()
    assert chained.handles == (STATE,) and chained.binding == {"batch": 4, "n": 2} and chained.precision == "bf16"
    assert chained.bind_handle(STATE) == chained
    assert str(chained) == (
        "CompileOptions(precision='bf16', dims=(('batch', 4), ('n', 2)), handles=(BufferHandle('state', f32[4]),))"
    )


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"precision": "f8"}, "precision='f8' is not a policy; choose one of 'auto', 'bf16', 'f16', 'f32'"),
        ({"disable": "fuse"}, "a collection of pass names, of .*; got str 'fuse'"),
        ({"disable": ("legalise",)}, r"disable=\['legalise'\]: not passes that can be left out; those are 'canonicalise', "),
        ({"disable": ("beside",)}, "not passes that can be left out; .*; 'beside' is now called 'concurrent'"),
        ({"alignment": 32}, "alignment=32: give a power of two from 64 to"),
        ({"alignment": 96}, "power of two"),
        ({"alignment": "64"}, "alignment is a whole number, got '64'"),
        ({"threads": 0}, "threads=0: give at least 1, or None"),
        ({"threads": True}, "threads is a whole number, got True"),
        ({"dims": {"n": -1}}, r"dims\['n'\] is a whole number of at least 0, got -1"),
        ({"dims": {"n": 2.5}}, r"dims\['n'\] is a whole number of at least 0, got 2.5"),
        ({"dims": {3: 3}}, "a dim's name is an identifier, got 3"),
        ({"dims": 7}, "dims maps names to sizes"),
        ({"checked": 1}, "checked is True or False, got 1"),
        ({"handles": ("state",)}, "handles are BufferHandles, got 'state'"),
        (
            {"handles": (STATE, BufferHandle("state", (5,), "f32"))},
            r"'state' is bound as f32\[4\] and as f32\[5\]; use two names",
        ),
        ({"dump": 3}, "dump is text or a pathlib.Path, got 3"),
    ],
)
def test_bad_values_say_what_to_do(bad, says):
    with pytest.raises(OptionError, match=says) as caught:
        CompileOptions(**bad)
    assert isinstance(caught.value, (CompileError, ValueError))


def test_replace_knows_its_fields():
    with pytest.raises(OptionError, match="no option is called thread; there are 'alignment', 'checked'"):
        CompileOptions().replace(thread=2)


@pytest.mark.parametrize("threads", [0, -5, 2.5, True, "2"])
def test_threads_of_a_session_are_a_whole_number(threads):
    with pytest.raises(OptionError, match="threads is a whole number of at least 1, got"):
        rlx.Session("cpu", threads=threads)


def test_threads_are_at_most_1024(monkeypatch):
    with pytest.raises(OptionError, match="threads=1025: give at most 1,024; this process may use"):
        rlx.Session("cpu", threads=1025)
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4,), "f32") * 2])
    with pytest.raises(OptionError, match="threads=5000: give at most 1,024"):
        rlx.Session("cpu").compile(g, threads=5000)
    monkeypatch.setenv("RLX_THREADS", "5000")
    with pytest.raises(OptionError, match="threads=5000: give at most 1,024"):
        rlx.Session("cpu").compile(g)
    assert rlx.Session("cpu", threads=1024).target().threads == 1024


@pytest.mark.parametrize("options", [5, {"threads": 1}])
def test_options_are_options(options):
    for compiled in (rlx.jit, rlx.compile):
        with pytest.raises(OptionError, match=rf"options are rlx.CompileOptions\(...\), got {type(options).__name__}"):
            compiled(lambda x: x, options=options)


def test_the_key_holds_what_changes_code_and_is_the_same_in_another_process():
    plain = CompileOptions(disable={"fuse", "inplace", "reuse"}, dims={"n": 2})
    assert plain.key == plain.replace(verbose=True, dump="there", debug=True).key
    changes = {"precision": "bf16", "alignment": 128, "threads": 1, "checked": True, "dims": {"n": 3}}
    keys = {plain.replace(**{name: value}).key for name, value in changes.items()} | {plain.key, plain.bind_handle(STATE).key}
    assert len(keys) == len(changes) + 2
    code = "from rlx.compiler import CompileOptions as C; print(C(disable={'fuse','inplace','reuse'}, dims={'n': 2}).key)"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert other.stdout.strip() == plain.key


def test_dump_takes_any_path(tmp_path):
    assert CompileOptions(dump=tmp_path).dump == str(tmp_path)


@pytest.mark.parametrize("value", [False, None, 1, "yes"])
def test_results_are_always_repeatable(value) -> None:
    """No code is faster for giving other bits from run to run, so there is nothing to turn off."""
    assert CompileOptions(deterministic=True) == CompileOptions()
    with pytest.raises(OptionError, match="runs always give the same bits"):
        CompileOptions(deterministic=value)


def test_a_field_that_is_added_is_in_every_key():
    @record
    class Wider(Target):
        banks: int = 4
        cost: Callable[[int], int] = field(default=abs, compare=False)

    @record
    class More(CompileOptions):
        unroll: int = 1
        colour: str = field(default="blue", metadata=UNSEEN)

    backend, g, plain = get("cpu"), rlx.Graph("g"), Target("any", frozenset({"f32", "bf16"}))
    g.set_outputs([g.input("x", (4,), "f32")])
    target, options = Wider("any", plain.dtypes), More()
    base = given_to_compile(backend, g, plain, CompileOptions())
    key = given_to_compile(backend, g, target, options)
    assert set(key) - set(base) == {"target banks", "option unroll"} and key["target dtypes"] == "{'bf16', 'f32'}"
    assert {"option debug", "option verbose", "option dump", "target natives"}.isdisjoint(key) and "option threads" in key
    assert given_to_compile(backend, g, replace(target, banks=8), options) != key
    assert given_to_compile(backend, g, target, replace(options, unroll=2)) != key
    assert given_to_compile(backend, g, replace(target, cost=len), replace(options, colour="red", debug=True)) == key
    kernel = Kernel("k", (), (), (), ())
    assert step_key(kernel, target) == step_key(kernel, replace(target, cost=len)) != step_key(kernel, replace(target, banks=8))
    assert options.key == replace(options, colour="red").key != replace(options, unroll=2).key

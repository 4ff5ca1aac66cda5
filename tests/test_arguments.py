"""Arguments of wrong type, at every door of the package: they end in an RlxError that says what is wanted and what was found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import DEVICES

import rlx
from rlx.errors import (
    AttributeValueError,
    BindingError,
    DTypeError,
    GraphError,
    ModelError,
    OptionError,
    RlxError,
    ShapeError,
    TransferError,
)

F = np.float32
SURE = rlx.models.Sampling()
QKV = [rlx.zeros((1, 1, 2, 4))] * 3
X, W, STATE = np.ones((2, 4), F), np.ones((4, 3), F), np.zeros((2, 3), F)


class Odd:
    """No text, no number, no collection."""


HUGE = 2**70
ODD: list[Any] = [
    None, True, 5, -1, HUGE, 0.5, float("nan"), "x", "", b"x", "\ud800", (), (1, 2), [], [1], {}, {"a": 1}, {1: 2}, Odd(), int,
    abs, np.zeros(3), F(2), np.array(["a"]), np.array(None), Path("nope"), ..., slice(1, 2), 1j,
]  # fmt: skip


def graph() -> rlx.Graph:
    g = rlx.Graph("odd")
    y = g.input("x", (2, 4), "f32") @ g.param("w", (4, 3), "f32")
    h = g.handle(rlx.BufferHandle("h", (2, 3), "f32"))
    g.assign(h, h + y)
    g.set_outputs([y + h])
    return g


def rows() -> rlx.Graph:
    g = rlx.Graph("rows")
    g.set_outputs([rlx.relu(g.input("x", ("n", 4), "f32"))])
    return g


@cache
def on_ref() -> rlx.Session:
    return rlx.Session("ref")


@cache
def buckets() -> rlx.BucketedCompileCache:
    return rlx.BucketedCompileCache(rows(), "n", (1, 8), session=on_ref())


@pytest.fixture(scope="module", params=DEVICES)
def compiled(request: pytest.FixtureRequest) -> rlx.CompiledGraph:
    found = rlx.compile(graph(), device=request.param)
    found.set_param("w", W)
    return found


CALLS: dict[str, Callable[[rlx.CompiledGraph, Any], Any]] = {
    "call": lambda c, x: c(x), "call x": lambda c, x: c(x=x), "run": lambda c, x: c.run(x), "run x": lambda c, x: c.run({"x": x}),
    "run_raw": lambda c, x: c.run_raw(x), "bound": lambda c, x: c.bound(x), "bound x": lambda c, x: c.bound([x]),
    "run_slots": lambda c, x: c.run_slots(x), "run_slots x": lambda c, x: c.run_slots([x]),
    "run_pipelined": lambda c, x: c.run_pipelined(x), "run_pipelined x": lambda c, x: c.run_pipelined([{"x": x}]),
    "commit_no_wait": lambda c, x: c.commit_no_wait(x), "run_read_outputs": lambda c, x: c.run_read_outputs({"x": X}, x),
    "run_typed": lambda c, x: c.run_typed(x), "run_typed data": lambda c, x: c.run_typed({"x": (x, "f32")}),
    "run_typed dtype": lambda c, x: c.run_typed({"x": (X.tobytes(), x)}), "byte_offset": lambda c, x: c.byte_offset(x),
    "set_param name": lambda c, x: c.set_param(x, W), "set_param": lambda c, x: c.set_param("w", x),
    "set_params": lambda c, x: c.set_params(x), "set_param_typed": lambda c, x: c.set_param_typed("w", x, "f32"),
    "set_param_typed dtype": lambda c, x: c.set_param_typed("w", W.tobytes(), x), "input_view": lambda c, x: c.input_view(x),
    "read_output_row": lambda c, x: c.read_output_row(x, 0, 3), "row": lambda c, x: c.read_output_row(0, x, 3),
    "row_inner": lambda c, x: c.read_output_row(0, 0, x), "bind_handle name": lambda c, x: c.bind_handle(x, STATE),
    "bind_handle": lambda c, x: c.bind_handle("h", x), "read_handle": lambda c, x: c.read_handle(x),
    "has_gpu_handle": lambda c, x: c.has_gpu_handle(x), "feed of": lambda c, x: c.set_gpu_handle_feed(x, 0),
    "feed": lambda c, x: c.set_gpu_handle_feed("h", x), "run_feed": lambda c, x: c.run_feed_gpu_handle({"x": X}, "h", x),
    "use_handles": lambda c, x: c.use_handles(x), "restore_handles": lambda c, x: c.restore_handles(x),
    "fork_handles": lambda c, x: c.fork_handles(x) if x is not HUGE else None, "extent": lambda c, x: c.set_active_extent(x),
    "masks": lambda c, x: c.set_moe_resident_experts_per_layer(x), "mask": lambda c, x: c.set_moe_resident_experts(x),
    "capture": lambda c, x: c.enable_moe_topk_capture(x),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_methods_of_compiled_graphs(compiled: rlx.CompiledGraph, name: str) -> None:
    for odd in ODD:
        try:
            CALLS[name](compiled, odd)
        except RlxError as e:
            assert len(str(e)) > 20, (name, odd)
    compiled.sync_pending()
    compiled.bind_handle("h", STATE)
    compiled.set_param("w", W)
    assert (compiled(X) == 4).all() and (compiled.read_handle("h") == 4).all()


def options(name: str) -> Callable[[Any], Any]:
    return lambda x: rlx.CompileOptions(**{name: x})


DOORS: dict[str, Callable[[Any], Any]] = {
    **{f"CompileOptions {name}": options(name) for name in vars(rlx.CompileOptions())},
    "replace": lambda x: rlx.CompileOptions().replace(threads=x), "bind_handle": lambda x: rlx.CompileOptions().bind_handle(x),
    "bind_dims": lambda x: rlx.CompileOptions().bind_dims(x), "bind_dims n": lambda x: rlx.CompileOptions().bind_dims(n=x),
    "bind_extent": lambda x: rlx.CompileOptions().bind_extent(x, 8), "upper": lambda x: rlx.CompileOptions().bind_extent("n", x),
    "Session": lambda x: rlx.Session(x), "Session threads": lambda x: rlx.Session("ref", threads=x),
    "progress": lambda x: rlx.Session("ref", progress=x), "transport": lambda x: rlx.Session("ref", transport=x),
    "compile graph": lambda x: on_ref().compile(x), "compile options": lambda x: on_ref().compile(graph(), x),
    "compile params": lambda x: on_ref().compile(graph(), params=x), "handles": lambda x: on_ref().compile(graph(), handles=x),
    "plan": lambda x: on_ref().plan(x), "plan options": lambda x: on_ref().plan(graph(), x),
    "rlx.compile": lambda x: rlx.compile(x), "rlx.compile device": lambda x: rlx.compile(graph(), device=x),
    "jit": lambda x: rlx.jit(x), "jit static": lambda x: rlx.jit(np.tanh, static=x),
    "jit donate": lambda x: rlx.jit(len, donate=x),
    "jit dims": lambda x: rlx.jit(len, dims=x), "jit dims of": lambda x: rlx.jit(lambda x: x, device="ref", dims={"x": x})(X),
    "jit options": lambda x: rlx.jit(len, options=x), "save": lambda x: rlx.save("x.rlx", x), "load": lambda x: rlx.load(x),
    "ExpertPool": lambda x: rlx.ExpertPool(x, 8), "CompileCache": lambda x: rlx.CompileCache(x),
    "cache": lambda x: rlx.CompileCache().compile(on_ref(), x), "cache session": lambda x: rlx.CompileCache().compile(x, graph()),
    "buckets": lambda x: rlx.BucketedCompileCache(x), "dim": lambda x: rlx.BucketedCompileCache(rows(), x),
    "ladder": lambda x: rlx.BucketedCompileCache(rows(), "n", x), "run_padded": lambda x: buckets().run_padded(x),
    "buckets session": lambda x: rlx.BucketedCompileCache(rows(), "n", session=x),
    "run x": lambda x: buckets().run_padded({"x": x}),
    "bucket": lambda x: buckets().bucket(x), "sizes": lambda x: buckets().save("x.rlx", x),
    "most": lambda x: rlx.power_of_two_ladder(1, x),
    "least": lambda x: rlx.power_of_two_ladder(x, 8), "Graph": rlx.Graph, "parse": rlx.Graph.parse,
    "input name": lambda x: graph().input(x, 2, "f32"), "dims": lambda x: graph().input("y", x, "f32"),
    "dtype": lambda x: graph().input("y", 2, x), "outputs": lambda x: graph().set_outputs(x),
    "assign": lambda x: graph().assign(x, x),
    "names": lambda x: (g := graph()).set_outputs(g.outputs, x), "handle": lambda x: graph().handle(x), "constant": rlx.constant,
    "BufferHandle": lambda x: rlx.BufferHandle(x, 2, "f32"), "handle dims": lambda x: rlx.BufferHandle("h", x, "f32"),
    "Shape": lambda x: rlx.Shape(x, "f32"), "Shape dtype": lambda x: rlx.Shape(2, x), "Dim": rlx.Dim, "as_dtype": rlx.as_dtype,
    "factor": lambda x: rlx.Dim("n", x), "is_available": rlx.is_available, "Device": rlx.Device.parse,
    "Buffer": lambda x: rlx.Buffer.empty(x, "f32") if x is not HUGE else None, "Buffer dtype": lambda x: rlx.Buffer.empty(2, x),
    "from_dlpack": rlx.Buffer.from_dlpack, "partition": lambda x: rlx.partition(x, {}, 2),
    "ranks": lambda x: rlx.partition(graph(), {}, x),
    "marks": lambda x: rlx.partition(graph(), x, 2), "mark": lambda x: rlx.partition(graph(), {"w": x}, 2),
    "Split": lambda x: rlx.partition(graph(), {"w": rlx.Split(x)}, 2),
    "parts": lambda x: rlx.partition(graph(), {"w": rlx.Split(0, x)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_what_makes_and_compiles_graphs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for odd in ODD:
        try:
            DOORS[name](odd)
        except RlxError as e:
            assert len(str(e)) > 20, (name, odd)


def artifact(folder: Path) -> str:
    c = rlx.compile(graph(), device="cpu", threads=1)
    c.set_param("w", W)
    c.save(folder / "odd.rlx")
    return str(folder / "odd.rlx")


@pytest.mark.parametrize("name", ["session", "options", "device", "threads", "trust", "verify", "model", "progress"])
def test_arguments_of_load(name: str, tmp_path: Path) -> None:
    path = artifact(tmp_path)
    for odd in ODD:
        try:
            rlx.load(path, **{name: odd})
        except RlxError as e:
            assert len(str(e)) > 20, (name, odd)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> rlx.models.LanguageModel:
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    from small_models import talker

    talker(folder := tmp_path_factory.mktemp("talker"))
    return rlx.models.LanguageModel(folder, capacity=16)


def answer(m: rlx.models.LanguageModel, **how: Any) -> Any:
    return m.generate([1], **{"max_new_tokens": 1, **how})


OF_MODELS: dict[str, Callable[[rlx.models.LanguageModel, Any], Any]] = {
    "Chat": lambda m, x: rlx.models.Chat(x), "system": lambda m, x: rlx.models.Chat(m, x),
    "on_text": lambda m, x: rlx.models.Chat(m, on_text=x), "option": lambda m, x: rlx.models.Chat(m, temperature=x),
    "ask": lambda m, x: rlx.models.Chat(m).ask(x), "executable": lambda m, x: m.executable(x),
    "executable steps": lambda m, x: m.executable(1, x), "memory": lambda m, x: m.memory(x),
    "memory steps": lambda m, x: m.memory(1, x), "chunk_size": lambda m, x: m.chunk_size(x, 8),
    "room": lambda m, x: m.chunk_size(1, x), "graph": lambda m, x: m.graph(x), "all_logits": lambda m, x: m.graph(1, x),
    "graph steps": lambda m, x: m.graph(1, steps=x), "compile": lambda m, x: m.compile(x), "step": lambda m, x: m.step(x),
    "partitioned": lambda m, x: m.partitioned(x), "use_handles": lambda m, x: m.use_handles(x),
    "held": lambda m, x: m.held(x), "decoding": lambda m, x: m.decoding(x, 0),
    "seed of decoding": lambda m, x: m.decoding(SURE, x),
    "reuse of decoding": lambda m, x: m.decoding(SURE, 0, x),
    "prompt": lambda m, x: answer(m) and m.generate(x, max_new_tokens=1),
    **{name: lambda m, x, name=name: answer(m, **{name: x}) for name in ("stop", "ends", "seed", "on_text", "reuse", "top_k")},
    "sizes": lambda m, x: m.save("x.rlx", x), "sampling": lambda m, x: m.save("x.rlx", [1], x),
    "weights": lambda m, x: m.save("x.rlx", [1], (), x), "save": lambda m, x: m.save(x, [1], ()),
    "beam_search": lambda m, x: rlx.models.beam_search(m, x, beams=1, max_new_tokens=1),
    "beams": lambda m, x: rlx.models.beam_search(m, [1], beams=x, max_new_tokens=1),
    "ends of beams": lambda m, x: rlx.models.beam_search(m, [1], beams=1, max_new_tokens=1, ends=x),
    "model of beams": lambda m, x: rlx.models.beam_search(x, [1], beams=1, max_new_tokens=1),
    "encode": lambda m, x: m.codec.encode(x), "decode": lambda m, x: m.codec.decode(x),
    "tokens": lambda m, x: m.codec.decode([x]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_MODELS)
def test_what_language_models_are_asked_for(
    talker: rlx.models.LanguageModel, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for odd in ODD:
        try:
            OF_MODELS[name](talker, odd)
        except RlxError as e:
            assert len(str(e)) > 20, (name, odd)


@pytest.mark.parametrize(("how", "wanted"), [
    ({"session": "cpu"}, r"session is an rlx.Session\(...\), got str 'cpu'"),
    ({"options": "x"}, r"options are rlx.CompileOptions\(...\), got str 'x'"),
    ({"options": {}}, r"options are rlx.CompileOptions\(...\), got dict \{\}"),
    ({"trust": "no"}, "trust is True or False, got 'no'"), ({"verify": 1}, "verify is True or False, got 1"),
    ({"model": "folder"}, "needs no other files, got model='folder'"),
])  # fmt: skip
def test_what_load_took_or_failed_on(how: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=wanted):
        rlx.load(artifact(tmp_path), **how)


@pytest.mark.parametrize(("call", "error", "wanted"), [
    (lambda: rlx.Session("ref", progress=5), OptionError, "progress is called with .*, got int 5"),
    (lambda: on_ref().compile(graph(), ""), OptionError, "options are rlx.CompileOptions"),
    (lambda: rlx.save("x.rlx", on_ref().compile(graph()), weights="no"), OptionError, "weights is True or False, got 'no'"),
    (lambda: rlx.Shape(b"x", "f32"), ShapeError, "dims are ints and names, or one of them; got bytes b'x'"),
    (lambda: rlx.Dim(b"x"), ShapeError, "a dim has names; got bytes"),
    (lambda: rlx.Graph("\ud800"), GraphError, r"the name of a graph is text, got '\\ud800'"),
    (lambda: (g := graph()).set_outputs(g.outputs, [5]), GraphError, "names of outputs are a list of texts, got 5"),
    (lambda: rlx.CompileOptions(alignment=2**70), OptionError, "a power of two from 64 to 1073741824"),
    (lambda: rlx.ExpertPool(graph(), 8), BindingError, "an ExpertPool is of a CompiledGraph or a model, got Graph"),
    (lambda: rlx.swapaxes(rlx.zeros(2), "a", 0), AttributeValueError, "is a whole number, got 'a'"),
    (lambda: rlx.repeat(rlx.zeros(2), 2, "a"), AttributeValueError, "axis is a whole number, got 'a'"),
    (lambda: rlx.tril("x"), DTypeError, "<U1"),
    (lambda: rlx.zeros(2, rlx.zeros(2)), DTypeError, "is not a dtype"),
    (lambda: rlx.space_to_depth(rlx.zeros(2), 2), ShapeError, r"an image is \[batch, channels, height, width\], got"),
    (lambda: rlx.depth_to_space(rlx.zeros((4, 2)), 2), ShapeError, r"an image is \[batch, channels, height, width\], got"),
    (lambda: rlx.depth_to_space(rlx.zeros((1, 4, 1, 1)), 0), AttributeValueError, "block is a whole number of at least 1, got 0"),
    (lambda: rlx.depth_to_space(rlx.zeros((1, 4, 1, 1)), [2]), AttributeValueError, r"block is a whole number, got \[2\]"),
    (lambda: rlx.roll(rlx.zeros((2, 3, 4)), (1, 2), (0, 1, 2)), AttributeValueError, "shifts of roll: 2 for 3 axes"),
    (lambda: rlx.center_crop_pad(rlx.zeros((2, 3)), (1, 1, 1)), AttributeValueError, "dims of center_crop_pad: 3 for 2 axes"),
    (lambda: rlx.resize(rlx.zeros((2, 3)), (4,)), AttributeValueError, "dims of resize: 1 for 2 axes"),
    (lambda: rlx.resize(rlx.zeros((2, 3)), (4, 6), scales=(2,)), AttributeValueError, "scales of resize: 1 for 2 axes"),
    (lambda: rlx.resize(rlx.zeros((2, 3)), (4, 6), coordinates=[2]), AttributeValueError, "coordinates is one of"),
    (lambda: rlx.tensordot(rlx.zeros(2), rlx.zeros((2, 2)), 2), AttributeValueError, "axis -2 of .* has 1 dims"),
    (lambda: rlx.tensordot(rlx.zeros((2, 2)), rlx.zeros((2, 2)), ([0, 1], [0])), AttributeValueError, "two sequences"),
    (lambda: rlx.tensordot(rlx.zeros((2, 2)), rlx.zeros((2, 2)), ([0, 0], [0, 1])), AttributeValueError, "different axes"),
    (lambda: rlx.nonzero(rlx.zeros(3), size=2.5), AttributeValueError, "size is a whole number of at least 0, got 2.5"),
    (lambda: rlx.cond(True, rlx.zeros(2), rlx.zeros(2)), AttributeValueError, "cond: then_branch is a function of values"),
    (lambda: rlx.scan(rlx.zeros(2), 1), AttributeValueError, "scan: body is a function of values, got Value"),
    (lambda: rlx.load(bytes(1 << 20)), ModelError, "a name on the Hub, got b'.{20,80}$"),
    (lambda: rlx.shrink(rlx.zeros(2), "x"), AttributeValueError, "shrink: threshold is a number, got str 'x'"),
    (lambda: rlx.cosine_window(4, 0.5), AttributeValueError, "coefficients is a sequence, got float 0.5"),
    (lambda: rlx.attention(*QKV, mask=np.ones((2, 2))), AttributeValueError, "attribute mask of attention takes"),
    (lambda: rlx.attention(*QKV, mask=rlx.zeros(2)), AttributeValueError, "attribute mask of attention takes"),
    (lambda: rlx.ones(np.array(2.5)), ShapeError, "a dim is an int or a name, got"),
    (lambda: rlx.stack(2), GraphError, "stack takes a sequence of values; got int 2"),
    (lambda: rlx.einsum(2, rlx.zeros(2)), GraphError, "the subscripts of einsum are text, got 2"),
    (lambda: rlx.BucketedCompileCache(rows(), "n", b"x"), OptionError, "a ladder is sizes; got bytes"),
])  # fmt: skip
def test_what_was_taken(call: Callable[[], Any], error: type[RlxError], wanted: str) -> None:
    with pytest.raises(error, match=wanted):
        call()


def test_tensors_without_memory_of_the_host_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.empty(3, device="meta"), torch.empty(3, requires_grad=True), np.array(["a"]), 5):
        with pytest.raises(TransferError, match="from_dlpack takes an object with __dlpack__, got"):
            rlx.Buffer.from_dlpack(tensor)


def test_masked_arrays_are_refused() -> None:
    """numpy would give the elements under the mask."""
    masked, plain = np.ma.masked_array(np.ones(4, np.float32), [0, 1, 0, 0]), np.ones(4, np.float32)
    g, state = rlx.Graph("g"), rlx.BufferHandle("s", (4,), "f32")
    x, w, s = g.input("x", (4,), "f32"), g.param("w", (4,), "f32"), g.handle(state)
    g.assign(s, s + x)
    g.set_outputs([x * w])
    c = rlx.Session("cpu").compile(g, rlx.CompileOptions().bind_handle(state))
    c.set_param("w", plain)
    c.bind_handle("s", plain)
    open_dim = rlx.Graph("open")
    open_dim.set_outputs([open_dim.input("x", ("n",), "f32") * 2])
    calls: list[Callable[[], Any]] = [
        lambda: c.set_param("w", masked), lambda: c.bind_handle("s", masked), lambda: c.run({"x": masked}), lambda: c(masked),
        lambda: c.run_slots([masked]), lambda: c.bound([masked]), lambda: c.run_raw({"x": masked}),
        lambda: c.run_pipelined([{"x": masked}]), lambda: rlx.jit(lambda a: a * 2)(masked),
        lambda: rlx.jit(lambda a: a * masked)(plain), lambda: rlx.constant(masked),
        lambda: rlx.compile(open_dim, dims={"n": "auto"}).run({"x": masked}),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        with pytest.raises(BindingError, match=r"a masked array has elements without a value; fill them: array.filled\(0\)"):
            call()
            raise AssertionError(number)
    np.testing.assert_array_equal(c(masked.filled(3)), [1, 3, 1, 1])


def test_sizes_that_numpy_takes() -> None:
    """Numbers and arrays without dims as dims; axes of numpy's numbers; dims beyond 63 bits."""
    g = rlx.Graph("sizes")
    assert rlx.ones(np.int64(3)).dims == rlx.ones(np.array(3)).dims == g.input("x", np.int32(3), "f32").dims == (3,)
    x, y = np.arange(12, dtype=F).reshape(3, 4), np.arange(8, dtype=F).reshape(4, 2)
    found = rlx.jit(lambda x, y: (rlx.tensordot(x, y, np.int64(1)), rlx.tensordot(x, y, (1, 0))))(x, y)
    for a, b in zip(found, (x @ y, x @ y)):
        assert (a == b).all()
    assert rlx.slice(g.input("large", 2**65, "i8"), starts=1, stops=2**64).dims == (2**64 - 1,)

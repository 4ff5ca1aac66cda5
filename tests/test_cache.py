"""Caches of executables: what is found again and why not, how much is kept, and runs of any length on buckets."""

from __future__ import annotations

import numpy as np
import pytest
from devices import ASKED

import rlx
from rlx.errors import (
    BindingError,
    CompileError,
    InputDTypeError,
    InputShapeError,
    MissingParamError,
    OptionError,
    UnknownNameError,
    Unsupported,
)
from rlx.frontends.models import bert
from rlx.runtime import CompileCache, power_of_two_ladder

SEQ, BATCH = rlx.Dim("seq"), rlx.Dim("batch")
F = np.float32


@pytest.fixture(scope="module")
def session() -> rlx.Session:
    return rlx.Session("cpu", threads=1)


def scaled(name: str = "scaled", by: float = 2.0, dims=(3,)) -> rlx.Graph:
    g = rlx.Graph(name)
    g.set_outputs([g.input("x", dims, "f32") * by])
    return g


# -- CompileCache --------------------------------------------------------------------------------------------------


def test_equal_graphs_are_one_executable_and_misses_say_why(session):
    cache = CompileCache()
    first = cache.compile(session, scaled())
    assert (cache.hits, cache.misses, cache.why, len(cache)) == (0, 1, "first seen", 1)
    assert cache.compile(session, scaled(), rlx.CompileOptions()) is first and (cache.hits, cache.misses) == (1, 1)
    assert cache.compile(session, scaled(), rlx.CompileOptions(precision="bf16")) is not first
    assert cache.why == "option precision: 'f32' -> 'bf16'"
    cache.compile(session, scaled(by=3.0))
    assert cache.why == "graph differs from the cached 'scaled': %0 = constant(2.0) : f32[] -> %0 = constant(3.0) : f32[]"
    cache.compile(session, scaled(), params=first.params)
    assert cache.why == "another store of params"
    cache.compile(rlx.Session("ref"), scaled())
    assert cache.why == "device: CPU -> REF, threads: 1 -> None"
    cache.compile(session, scaled("other"))
    assert cache.why == "first seen" and cache.misses == 6
    assert [name for name, _ in cache.log] == ["scaled"] * 5 + ["other"] and cache.log[-1][1] == cache.why


def test_the_least_recently_used_goes_first_and_bytes_are_bounded(session):
    graphs = [scaled(f"g{i}", dims=(4096,)) for i in range(4)]
    one = CompileCache()
    one.compile(session, graphs[0])
    each = one.nbytes
    assert each > 2 * 4096 * 4
    cache = CompileCache(max_bytes=int(3.5 * each))
    a, b, c = (cache.compile(session, g) for g in graphs[:3])
    assert len(cache) == 3 and cache.compile(session, graphs[0]) is a  # b is now the oldest
    cache.compile(session, graphs[3])
    assert len(cache) == 3 and cache.nbytes <= cache.max_bytes
    assert cache.compile(session, graphs[0]) is a and cache.compile(session, graphs[2]) is c
    assert cache.compile(session, graphs[1]) is not b
    assert cache.why == f"evicted: all together took more than {cache.max_bytes} bytes"
    none = CompileCache(max_bytes=0)
    assert none.compile(session, graphs[0]).run({"x": np.ones(4096, F)})[0][0] == 2 and len(none) == none.nbytes == 0


def test_shared_weights_count_once(session):
    def layer(rows: int) -> rlx.Graph:
        g = rlx.Graph(f"layer{rows}")
        g.set_outputs([g.input("x", (rows, 256), "f32") @ g.param("w", (256, 512), "f32")])
        return g

    cache, w = CompileCache(), np.ones((256, 512), F)
    first = cache.compile(session, layer(1))
    first.set_param("w", w)
    before = cache.nbytes
    second = cache.compile(session, layer(2), params=first.params)
    second.run({"x": np.ones((2, 256), F)})
    assert w.nbytes < before and cache.nbytes - before < w.nbytes // 2


def test_a_failing_compile_is_not_kept(session):
    cache, bad = CompileCache(), rlx.Graph("bad")
    bad.set_outputs([bad.input("x", ("n",), "f32") + 1.0])
    with pytest.raises(CompileError):
        cache.compile(session, bad)
    assert (len(cache), cache.hits, cache.misses) == (0, 0, 0)
    for wrong in (-1, "1", True):
        with pytest.raises(OptionError):
            CompileCache(max_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        cache.compile(bad, session)  # type: ignore[arg-type]


# -- buckets -------------------------------------------------------------------------------------------------------


def test_ladders():
    assert power_of_two_ladder(16, 512) == (16, 32, 64, 128, 256, 512)
    assert power_of_two_ladder(3, 20) == (3, 6, 12, 20) and power_of_two_ladder(5, 5) == (5,)
    for wrong in ((0, 4), (5, 4), (1.0, 2), (True, 2)):
        with pytest.raises(OptionError):
            power_of_two_ladder(*wrong)  # type: ignore[arg-type]


def pooled() -> rlx.Graph:
    """[2, seq, 8] -> rows of their own, the mean row, the last row."""
    g = rlx.Graph("pooled")
    x, w = g.input("x", (2, SEQ, 8), "f32"), g.param("w", (8, 4), "f32")
    y = x @ w
    g.set_outputs([y, rlx.mean(y, axis=1), y[:, -1], (y.reshape(2 * SEQ, 4) + g.input("b", (4,), "f32"))])
    return g


def test_every_length_runs_on_the_least_bucket(session):
    buckets = rlx.BucketedCompileCache(pooled(), ladder=power_of_two_ladder(4, 16), session=session)
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(8, 4)).astype(F), rng.normal(size=4).astype(F)
    buckets.set_param("w", w)
    kept = w.copy()
    w[:] = np.nan  # the caller's array is the caller's
    for n in (3, 4, 5, 16, 1, 9):
        x = rng.normal(size=(2, n, 8)).astype(F)
        found = buckets.run_padded({"x": x, "b": b})
        y = x @ kept
        for a, want in zip(found, (y, y.mean(1), y[:, -1], y.reshape(-1, 4) + b), strict=True):
            np.testing.assert_allclose(a, want, rtol=1e-4, atol=1e-5)
            assert a.flags.owndata or a.base is None or not np.shares_memory(a, buckets.bucket(n).input_view("x"))
    assert buckets.cache.misses == 3 and buckets.cache.why == "option extent: ('seq', 8) -> ('seq', 16)"
    assert buckets.bucket(16).params.store is buckets.bucket(1).params.store
    with pytest.raises(OptionError, match="rows is a whole number, got 'a'"):
        buckets.bucket("a")
    buckets.set_param("w", 2 * kept)
    for n in (2, 7, 13):
        x = rng.normal(size=(2, n, 8)).astype(F)
        np.testing.assert_allclose(buckets.run_padded({"x": x, "b": b})[0], x @ (2 * kept), rtol=1e-4, atol=1e-5)


def test_mistakes_are_named_and_change_nothing(session):
    g = pooled()
    buckets = rlx.BucketedCompileCache(g, ladder=(4, 8), session=session)
    x, b = np.ones((2, 3, 8), F), np.zeros(4, F)
    with pytest.raises(MissingParamError, match="'w'"):
        buckets.run_padded({"x": x, "b": b})
    with pytest.raises(UnknownNameError, match="no param is called 'v'; there are 'w'"):
        buckets.set_param("v", b)
    buckets.set_param("w", np.ones((8, 4), F))
    for error, text, inputs in (
        (InputShapeError, "dim 'seq' is from 1 to 8, got 9", {"x": np.ones((2, 9, 8), F), "b": b}),
        (InputShapeError, "from 1 to 8, got 0", {"x": np.ones((2, 0, 8), F), "b": b}),
        (InputShapeError, "has dim 'seq' as its dim 1; got 1 dims", {"x": b, "b": b}),
        (InputShapeError, "no input with dim 'seq' was given", {"b": b}),
        (InputShapeError, "got dims", {"x": np.ones((3, 3, 8), F), "b": b}),
        (InputDTypeError, "astype", {"x": x.astype(np.float64), "b": b}),
        (UnknownNameError, "'y'", {"x": x, "b": b, "y": b}),
        (BindingError, "by name", [x, b]),
    ):
        with pytest.raises(error, match=text):
            buckets.run_padded(inputs)  # type: ignore[arg-type]
    with pytest.raises(InputShapeError, match="param 'w' is"):
        buckets.set_param("w", b)
    np.testing.assert_array_equal(buckets.run_padded({"x": x, "b": b})[0], np.full((2, 3, 4), 8))
    for wrong in ((), (8, 4), (0, 4), (4, 4), ("4",)):
        with pytest.raises(OptionError, match="ladder"):
            rlx.BucketedCompileCache(g, ladder=wrong, session=session)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no input of graph 'pooled' has a dim 'len'"):
        rlx.BucketedCompileCache(g, "len", session=session)


def test_inputs_that_disagree(session):
    g = rlx.Graph("two")
    g.set_outputs([rlx.sum(g.input("x", (SEQ,), "f32") * g.input("y", (SEQ,), "f32"))])
    buckets = rlx.BucketedCompileCache(g, ladder=(8,), session=session)
    with pytest.raises(InputShapeError, match="inputs disagree on dim 'seq': 3 in 'x', 4 in 'y'"):
        buckets.run_padded({"x": np.ones(3, F), "y": np.ones(4, F)})
    assert buckets.run_padded({"x": np.ones(3, F), "y": np.ones(3, F)})[0] == 3


def test_states_go_with_every_bucket_and_stay_where_a_run_fails(session):
    g = rlx.Graph("counted")
    total = rlx.BufferHandle("total", (2,), "f32")
    state, table = g.handle(total), g.param("table", (5, 2), "f32")
    rows = rlx.embedding(table, g.input("ids", (SEQ,), "i32"))
    after = state + rlx.sum(rows, axis=0)
    g.assign(state, after)
    g.set_outputs([after])
    buckets = rlx.BucketedCompileCache(g, ladder=(2, 4, 8), session=session)
    buckets.set_param("table", np.arange(10, dtype=F).reshape(5, 2))
    seen: list[int] = []
    for ids in ([1], [2, 3, 4], [0, 1, 2, 3, 4, 0], [4, 4]):
        seen += ids
        (out,) = buckets.run_padded({"ids": np.array(ids, np.int32)})
        want = [sum(2 * i for i in seen), sum(2 * i + 1 for i in seen)]
        np.testing.assert_array_equal(out, want)
        with pytest.raises(rlx.errors.IndexRangeError):
            buckets.run_padded({"ids": np.array([*ids, 5], np.int32)})
        np.testing.assert_array_equal(buckets.bucket(1).read_handle("total"), want)  # type: ignore[arg-type]
    assert buckets.cache.misses == 3


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", *ASKED])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("dim", ["seq", "batch"])
def test_an_encoder_on_buckets_is_the_encoder(device, dim, pooling):
    config = bert.BertConfig(50, 32, 2, 4, 64, 40, pooling=pooling, normalize=True)
    rng = np.random.default_rng(3)
    g = bert.build(config, *((3, SEQ) if dim == "seq" else (BATCH, 6)))
    weights = {str(p.name): rng.normal(0, 0.2, p.shape.static).astype(F) for p in g.params}
    buckets = rlx.BucketedCompileCache(g, dim, power_of_two_ladder(4, 32), session=rlx.Session(device, threads=1))
    plain = rlx.Session("ref:1")
    for name, array in weights.items():
        buckets.set_param(name, array)
    for n in (1, 5, 7, 30):
        rows, length = (3, n) if dim == "seq" else (n, 6)
        mask = rng.random((rows, length)) < 0.7
        mask[:, 0] = True
        inputs = {"input_ids": rng.integers(0, 50, (rows, length)).astype(np.int32), "attention_mask": mask}
        compiled = plain.compile(bert.build(config, rows, length))
        for name, array in weights.items():
            compiled.set_param(name, array)
        np.testing.assert_allclose(buckets.run_padded(inputs)[0], compiled.run(inputs)[0], rtol=1e-4, atol=1e-5)
    assert buckets.cache.misses == 3


def decoder(length) -> rlx.Graph:
    """Token ids -> scores of the next token: one block of causal attention with rotated positions and grouped heads."""
    g = rlx.Graph("decoder")
    ids = g.input("ids", (2, length), "i32")
    table, qkv, out = g.param("table", (40, 32), "f32"), g.param("qkv", (32, 64), "f32"), g.param("out", (32, 32), "f32")
    x = rlx.embedding(table, ids)  # [2, length, 32]
    place = rlx.iota(dims=(length,))
    q, k, v = rlx.split(rlx.rms_norm(x) @ qkv, (32, 16, 16), 2)
    q, k, v = (t.reshape(2, length, t.dims[2] // 8, 8).transpose(0, 2, 1, 3) for t in (q, k, v))
    a = rlx.attention(rlx.rope(q, place), rlx.rope(k, place), v, mask="causal")
    x = x + a.transpose(0, 2, 1, 3).reshape(2, length, 32) @ out
    g.set_outputs([rlx.rms_norm(x)[:, -1] @ table.T])
    return g


@pytest.mark.parametrize("device", ["ref:0", "cpu", *ASKED])
def test_a_prefill_on_buckets_is_the_prefill(device):
    rng = np.random.default_rng(4)
    g = decoder(SEQ)
    weights = {str(p.name): rng.normal(0, 0.3, p.shape.static).astype(F) for p in g.params}
    buckets, plain = rlx.BucketedCompileCache(g, ladder=(8, 16), session=rlx.Session(device)), rlx.Session("ref:1")
    for name, array in weights.items():
        buckets.set_param(name, array)
    for n in (1, 6, 8, 13):
        ids = rng.integers(0, 40, (2, n)).astype(np.int32)
        compiled = plain.compile(decoder(n))
        for name, array in weights.items():
            compiled.set_param(name, array)
        np.testing.assert_allclose(buckets.run_padded({"ids": ids})[0], compiled.run({"ids": ids})[0], rtol=1e-4, atol=1e-5)


# -- an open dim ---------------------------------------------------------------------------------------------------


def opened() -> rlx.Graph:
    g = rlx.Graph("opened")
    x, w = g.input("x", ("batch", "width"), "f32"), g.param("w", ("width", 4), "f32")
    y = (x @ w).relu()
    g.set_outputs([y, y.sum(axis=0)])
    return g


def test_an_open_dim_is_compiled_for_the_powers_of_two_that_runs_reach() -> None:
    net = rlx.compile(opened(), dims={"batch": "auto", "width": 8})
    assert net.missing_params() == ["w"] and repr(net.inputs + net.outputs) == (
        "(x f32[batch,width], output0 f32[batch,4], output1 f32[4])"
    )
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 4)).astype(F)
    net.set_params({"w": w})
    for n in (1, 3, 4, 5, 17):
        x = rng.normal(size=(n, 8)).astype(F)
        for y, total in (net(x), net(x=x), net.run({"x": x}), net(x.tolist())):
            want = np.maximum(x @ w, 0)
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(total, want.sum(0), rtol=1e-4, atol=1e-4)
    report = net.report()
    assert list(report.compiled) == [1, 4, 8, 32]
    assert "dim 'batch' is open" in str(report) and "bucket of 32: opened" in str(report)
    assert net.bucket(17).params.store is net.params.store and "4 buckets compiled" in repr(net)


def test_an_open_dim_says_what_it_cannot_do() -> None:
    net = rlx.compile(opened(), dims={"batch": "auto", "width": 8})
    x = np.ones((3, 8), F)
    for error, words, act in (
        (Unsupported, r"use \.bucket\(rows\)\.run_slots", lambda: net.run_slots([x])),
        (AttributeError, "no attribute 'runs'", lambda: net.runs),
        (InputShapeError, "from 1 to 1048576, got 0", lambda: net.bucket(0)),
        (InputShapeError, "got dims \\[4, 7\\]", lambda: net(np.ones((3, 7), F))),
        (InputShapeError, "x' is f32\\[batch,width\\]; got dims \\[1\\]", lambda: net([1.0])),
        (BindingError, "by position and by name", lambda: net(x, x=x)),
        (BindingError, "1 inputs .* got 2", lambda: net(x, x)),
        (OptionError, "a size is a number, or 'auto'", lambda: rlx.compile(opened(), dims={"batch": "all"})),
        (OptionError, "one dim can be 'auto', got a, b", lambda: rlx.compile(opened(), dims={"a": "auto", "b": "auto"})),
        (OptionError, "no input .* dim 'rows'", lambda: rlx.compile(opened(), dims={"rows": "auto"})),
        (OptionError, "use rlx.compile", lambda: rlx.Session().compile(opened(), dims={"batch": "auto"})),
        (OptionError, "of a function: rlx.jit", lambda: rlx.compile(lambda x: x, x, dims={"batch": "auto"})),
    ):
        with pytest.raises(error, match=words):
            act()

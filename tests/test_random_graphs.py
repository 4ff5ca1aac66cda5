"""Random graphs, compiled for every device that computes, against the reference evaluator; with and without fusion."""

from __future__ import annotations

import numpy as np
from devices import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.compiler.check import program_faults
from rlx.errors import GraphError
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.op import OPS, Kind
from rlx.ir.program import Program, print_program
from rlx.ir.program_parse import digest_of, parse_program

UNARY = sorted(
    n for n, d in OPS.items() if d.kind is Kind.POINTWISE and d.arity == (1, 1) and d.attrs is None and "f" in d.dtypes
)  # by fact, so that a new op takes part
BINARY = ("add", "sub", "mul", "maximum", "minimum")
DIMS = st.lists(st.sampled_from([1, 2, 3, 4, 4, 5, 17]), min_size=1, max_size=3).map(tuple)  # equal dims meet by chance


def unary(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    if a.dtype.is_int:
        return rlx.div(a, draw(st.sampled_from((2, 3)))) if draw(st.booleans()) else -a
    out = getattr(rlx, draw(st.sampled_from(UNARY)))(a)
    return out if out.dtype == a.dtype else rlx.where(out, a, 0.5)


def binary(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    return getattr(rlx, draw(st.sampled_from(BINARY)))(a, draw(st.sampled_from(pool)))


def reduce(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    axes = draw(st.sets(st.integers(0, a.rank - 1), min_size=1))
    how = draw(st.sampled_from((rlx.sum, rlx.max) if a.dtype.is_int else (rlx.sum, rlx.max, rlx.prod, rlx.mean, rlx.min)))
    return how(a, axis=tuple(axes), keepdims=draw(st.booleans()))


def norm(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    if draw(st.booleans()):
        return rlx.softmax(a, axis=draw(st.integers(0, a.rank - 1)))
    scale, shift = (g.param(f"p{len(g.params) + i}", (a.dims[-1],), a.dtype) for i in range(2))
    return rlx.layer_norm(a, scale, shift)


def view(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    what = draw(st.integers(0, 4))
    if what == 0:
        return a.transpose(*draw(st.permutations(range(a.rank))))
    if what == 1:
        dims = list(a.dims)
        for i, d in enumerate(dims):  # take a dim apart, or put two together
            if d in (4, 16) and draw(st.booleans()):
                dims[i : i + 1] = [2, d // 2]
                return a.reshape(dims)
        return a.reshape((-1, *dims[2:])) if len(dims) > 1 else rlx.unsqueeze(a, axes=(0,))
    if what == 2:
        return rlx.slice(a, starts=(0,) * a.rank, stops=tuple(max(1, d // 2) for d in a.dims))
    if what == 3:
        steps = (-1, *(1,) * (a.rank - 1))
        return rlx.slice(a, starts=(a.dims[0] - 1, *(0,) * (a.rank - 1)), stops=(-a.dims[0] - 1, *a.dims[1:]), steps=steps)
    return rlx.broadcast_to(a, (draw(st.sampled_from([2, 3])), *a.dims))


def contract(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    if draw(st.booleans()):
        return a @ g.param(f"p{len(g.params)}", (a.dims[-1], draw(st.sampled_from([1, 4, 7]))), a.dtype)
    flat = a.reshape((-1, a.dims[-1]))
    return flat @ flat.T if draw(st.booleans()) else flat @ g.param(f"p{len(g.params)}", (a.dims[-1],), a.dtype)


def attention(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    q = a.reshape((1, 1, -1, a.dims[-1])) if draw(st.booleans()) else a.reshape((1, -1, 1, a.dims[-1])).transpose(0, 2, 1, 3)
    out = rlx.attention(q, q, rlx.tanh(q), mask=draw(st.sampled_from(("none", "causal"))))
    return out.reshape(a.dims)


def index(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    what, axis = draw(st.integers(0, 4)), draw(st.integers(0, a.rank - 1))
    if what == 0:
        indices = rlx.constant([0, a.dims[axis] - 1, a.dims[axis] // 2])
        return rlx.gather(a, indices, axis=axis)
    if what == 1:
        others = [v for v in pool if v.dtype == a.dtype and v.dims == a.dims]
        return rlx.concat(a, draw(st.sampled_from(others)), axis=axis)
    if what == 2:
        return rlx.pad(a, low=(1,) * a.rank, high=(0, 2, 1)[: a.rank], value=draw(st.sampled_from((0.0, 2.0))))
    if what == 3:
        return rlx.cumsum(a, axis=axis)
    condition = rlx.less(a if a.dtype.is_int else pool[0], 0)  # of a computed float it would hang on its last bit
    return rlx.where(condition, a, draw(st.sampled_from(pool)))


def order(draw, g: Graph, pool: list[Value], a: Value) -> Value:
    values, places = rlx.top_k(a, k=max(1, a.dims[-1] // 2))
    if not a.dtype.is_int:
        return values
    what = draw(st.integers(0, 2))
    if what == 0:
        return rlx.gather(a, rlx.argmax(a, axis=-1), axis=a.rank - 1)
    return values if what == 1 else values * places.astype(a.dtype)


GROWTH = (unary, unary, binary, binary, binary, reduce, reduce, norm, view, view, contract, attention, index, index, order)


@st.composite
def graphs(draw) -> Graph:
    """All in one dtype: i32, where everything is exact, or floats, where ops that jump see only what is not computed."""
    g, dtype = Graph("random"), draw(st.sampled_from((rlx.f32, rlx.f32, rlx.i32, rlx.f16)))
    pool = [g.input(f"x{i}", draw(DIMS), dtype) for i in range(draw(st.integers(1, 2)))]
    handle = g.handle(rlx.BufferHandle("state", draw(DIMS), dtype)) if draw(st.booleans()) else None
    pool += [handle] if handle is not None else []
    for _ in range(draw(st.integers(1, 10))):
        a = draw(st.sampled_from(pool[-3:] if draw(st.booleans()) else pool))
        try:
            made = draw(st.sampled_from(GROWTH))(draw, g, pool, a)
        except GraphError:  # what was drawn does not fit
            continue
        if made.shape.num_elements <= 20000 and made.rank:
            pool.append(made)
    if handle is not None:
        nexts = [v for v in pool if v.shape == handle.shape and v is not handle]
        g.assign(handle, draw(st.sampled_from(nexts)) if nexts else handle + handle)
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    g.set_outputs([*outputs, pool[-1]])
    return g


@given(graphs(), st.integers(0, 2**31))
@settings(max_examples=60, derandomize=True)
def test_every_device_agrees_with_the_reference(g: Graph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = lambda v: rng.uniform(-2.5, 2.5, v.shape.static).astype(v.dtype.numpy)  # noqa: E731
    inputs, params, states = ({v.name: draw(v) for v in leaves} for leaves in (g.inputs, g.params, g.handles))
    with np.errstate(all="ignore"):
        want, following = evaluate(g, inputs, params, states)
        parsed = Graph.parse(str(g))
        assert str(parsed) == str(g) and parsed.fingerprint() == g.fingerprint()
        for device, options in (
            ("ref", rlx.CompileOptions()),
            ("ref:1", rlx.CompileOptions(disable=("canonicalise", "tidy"))),
            ("cpu", rlx.CompileOptions()),
            ("cpu", rlx.CompileOptions(disable=("fuse",), threads=1)),
            *((device, rlx.CompileOptions()) for device in ASKED),
        ):
            compiled = rlx.Session(device).compile(parsed, options)
            check_text(compiled.program())
            for name, value in params.items():
                compiled.set_param(name, value)
            for name, value in states.items():
                compiled.bind_handle(name, value)
            found = [*compiled.run(inputs), *(compiled.read_handle(name) for name in following)]
            for array, expected in zip(found, [*want, *following.values()], strict=True):
                compare(array, expected, f"{device} {options}\n{g}\n{compiled.program()}")


def check_text(program: Program) -> None:
    """A program's text reads back, unless its kernels came without their loops from the cache on disk."""
    constants = {digest_of(b.data): b.data for b in program.buffers if b.data is not None}
    again = parse_program(text := print_program(program), program.target, constants)
    assert print_program(again) == text and not program_faults(again)


def compare(found: np.ndarray, want: np.ndarray, where: str) -> None:
    """Equal up to rounding; where values are steep or cancel (tan of a large angle, 1/x near 0), up to their own size.
    A fused chain of f16 ops rounds once where the reference rounds each; what grows out of its range is not compared."""
    found, want, narrow = found.astype(np.float64), want.astype(np.float64), want.dtype == np.float16
    inside = np.isfinite(want) & np.isfinite(found) if narrow else np.isfinite(want)
    scale = np.maximum(1.0, np.max(np.abs(want[inside]), initial=0.0))
    if narrow:
        found, want = found[inside], want[inside]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want), err_msg=where)
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=(5e-2 if narrow else 1e-4) * scale, err_msg=where)

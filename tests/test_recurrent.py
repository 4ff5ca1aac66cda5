"""lstm, gru and rnn beside torch in float64, and beside ONNX's equations written out in numpy where torch has no such option."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import rlx
from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.evaluate import evaluate

LENGTH, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
FUNCTIONS: dict[str, Callable[..., tuple[rlx.Value, ...]]] = {"lstm": rlx.lstm, "gru": rlx.gru, "rnn": rlx.rnn}
RNG = np.random.default_rng(3)


def drawn(kind: str, directions: int, layout: int = 0, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Every operand, by name."""
    gates = GATES[kind] * HIDDEN
    state = (BATCH, directions, HIDDEN) if layout else (directions, BATCH, HIDDEN)
    dims = {
        "x": (BATCH, LENGTH, INPUT) if layout else (LENGTH, BATCH, INPUT), "w": (directions, gates, INPUT),
        "r": (directions, gates, HIDDEN), "b": (directions, 2 * gates), "initial_h": state,
    }  # fmt: skip
    dims |= {"initial_c": state, "p": (directions, 3 * HIDDEN)} if kind == "lstm" else {}
    return {name: RNG.normal(size=d).astype(dtype) * 0.5 for name, d in dims.items()}


def graph_of(kind: str, given: dict[str, np.ndarray], **options: object) -> rlx.Graph:
    g = rlx.Graph(kind)
    weights = ("w", "r", "b", "p")
    values = {n: (g.param if n in weights else g.input)(n, a.shape, a.dtype.name) for n, a in given.items()}
    g.set_outputs(FUNCTIONS[kind](**values, **options))
    return g


def split(given: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    weights = {n: a for n, a in given.items() if n in ("w", "r", "b", "p")}
    return {n: a for n, a in given.items() if n not in weights}, weights


def referred(kind: str, given: dict[str, np.ndarray], **options: object) -> list[np.ndarray]:
    return evaluate(graph_of(kind, given, **options), *split(given))[0]


BACK = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn": (0,)}  # ONNX's gates in torch's order: iofc as ifgo, zrh as rzn


def in_torch(kind: str, given: dict[str, np.ndarray], directions: int, relu: bool = False) -> list[np.ndarray]:
    options = {"nonlinearity": "relu"} if relu else {}
    made = getattr(torch.nn, kind.upper())(INPUT, HIDDEN, bidirectional=directions == 2, **options).double()
    rows = np.concatenate([np.arange(g * HIDDEN, (g + 1) * HIDDEN) for g in BACK[kind]])
    with torch.no_grad():
        for d in range(directions):
            end = "_l0" + "_reverse" * d
            wb, rb = np.split(given["b"][d], 2)
            for name, array in (("weight_ih", given["w"][d]), ("weight_hh", given["r"][d]), ("bias_ih", wb), ("bias_hh", rb)):
                getattr(made, name + end).copy_(torch.from_numpy(array[rows]))
        h = torch.from_numpy(given["initial_h"])
        y, last = made(torch.from_numpy(given["x"]), (h, torch.from_numpy(given["initial_c"])) if kind == "lstm" else h)
    y = y.reshape(LENGTH, BATCH, directions, HIDDEN).movedim(2, 1)
    return [y.numpy(), *(t.numpy() for t in (last if kind == "lstm" else (last,)))]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_as_torch(kind: str, directions: int) -> None:
    given = drawn(kind, directions)
    given.pop("p", None)
    options: dict[str, object] = {"direction": "bidirectional" if directions == 2 else "forward"}
    options |= {"linear_before_reset": True} if kind == "gru" else {}
    for found, want in zip(referred(kind, given, **options), in_torch(kind, given, directions), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


def test_rnn_with_relu_as_torch() -> None:
    given = drawn("rnn", 1)
    for found, want in zip(referred("rnn", given, activations=["Relu"]), in_torch("rnn", given, 1, relu=True), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_as_the_reference_of_onnx(kind: str, layout: int) -> None:
    """Forward with every operand it knows; peepholes, and gru's reset in front of the product."""
    given = drawn(kind, 1, layout, "float32")
    order = ["x", "w", "r", "b", "", "initial_h"] + (["initial_c", "p"] if kind == "lstm" else [])
    outputs = ["y", "h", "c"][: 3 if kind == "lstm" else 2]
    node = helper.make_node(kind.upper(), order, outputs, hidden_size=HIDDEN, layout=layout)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in given.items()]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    made = helper.make_model(helper.make_graph([node], kind, infos, results))
    for found, want in zip(referred(kind, given, layout=layout), ReferenceEvaluator(made).run(None, given), strict=False):
        np.testing.assert_allclose(found.reshape(want.shape), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_sequences_of_other_lengths_are_as_if_alone(kind: str, direction: str) -> None:
    given = drawn(kind, 2 if direction == "bidirectional" else 1)
    lens = np.array([5, 2, 0], np.int32)
    found = referred(kind, given | {"sequence_lens": lens}, direction=direction)
    for i, n in enumerate(lens):
        one = {name: a if name in ("w", "r", "b", "p") else a[:, i : i + 1] for name, a in given.items()}
        if n:
            want = referred(kind, one | {"x": one["x"][:n]}, direction=direction)
        else:
            want = [np.zeros((0, *found[0].shape[1:2], 1, HIDDEN)), *(one[s] for s in ("initial_h", "initial_c") if s in one)]
        np.testing.assert_allclose(found[0][:n, :, i : i + 1], want[0], rtol=1e-12)
        assert not found[0][n:, :, i].any()
        for have, end in zip(found[1:], want[1:], strict=True):
            np.testing.assert_allclose(have[:, i : i + 1], end, rtol=1e-12)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_options_of_lstm_written_out() -> None:
    """Clip, coupled gates, peepholes, and activations with numbers of their own, from the end."""
    given = drawn("lstm", 1)
    names, alpha, beta = ["HardSigmoid", "ScaledTanh", "Affine"], [0.3, 1.2, 0.7], [0.4, 0.9, -0.1]
    options = {"activations": names, "alpha": alpha, "beta": beta, "clip": 0.8, "input_forget": True, "direction": "reverse"}
    found = referred("lstm", given, **options)
    clip = lambda v: np.clip(v, -0.8, 0.8)  # noqa: E731
    f = lambda v: np.clip(0.3 * clip(v) + 0.4, 0, 1)  # noqa: E731
    h, c, rows = given["initial_h"][0], given["initial_c"][0], np.zeros((LENGTH, 1, BATCH, HIDDEN))
    pi, po, _ = np.split(given["p"][0], 3)
    for t in reversed(range(LENGTH)):
        gates = given["x"][t] @ given["w"][0].T + h @ given["r"][0].T + sum(np.split(given["b"][0], 2))
        i, o, _, new = np.split(gates, 4, axis=1)
        i = f(i + pi * c)
        c = (1 - i) * c + i * 1.2 * np.tanh(0.9 * clip(new))
        h = f(o + po * c) * (0.7 * clip(c) - 0.1)
        rows[t, 0] = h
    for have, want in zip(found, (rows, h[None], c[None]), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12)


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_devices_agree_with_the_reference(kind: str, device: str) -> None:
    given = drawn(kind, 2, dtype="float32") | {"sequence_lens": np.array([5, 3, 1], np.int32)}
    g = graph_of(kind, given, direction="bidirectional")
    inputs, params = split(given)
    compiled = rlx.Session(device).compile(g)
    for name, array in params.items():
        compiled.set_param(name, array)
    for found, want in zip(compiled.run(inputs), evaluate(g, inputs, params)[0], strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    given = drawn("lstm", 1)
    with pytest.raises(ShapeError, match="weights of the state has dims"):
        graph_of("lstm", given, direction="bidirectional")
    with pytest.raises(AttributeValueError, match="direction is forward"):
        graph_of("lstm", given, direction="sideways")
    with pytest.raises(AttributeValueError, match="forward needs 3 activations"):
        graph_of("lstm", given, activations=["tanh"])
    with pytest.raises(AttributeValueError, match="no activation 'Cube'"):
        graph_of("lstm", given, activations=["Cube", "tanh", "tanh"])
    with pytest.raises(ShapeError, match="biases has dims"):
        graph_of("lstm", given | {"b": given["b"][:, 1:]})

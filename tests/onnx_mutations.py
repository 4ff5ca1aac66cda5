"""Damaged and contradictory ONNX models: each is refused with a clear error, or gives the right result.

    python -m tests.onnx_mutations [--count 2000] [--seed 0]

Bytes are flipped, cut and moved, and fields of the parsed model are changed: dims, types, attributes, names, operators, versions.
Mutants run in processes of their own: a crash, a hang, or more memory than LIMIT fails the run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import rlx
from rlx.errors import RlxError
from rlx.frontends.onnx import OnnxModel

SECONDS, LIMIT, ELEMENTS = 20, 4 << 30, 1 << 20  # of one mutant: time, memory, and elements of its inputs for a run
EXTREMES = (0, -1, 1, 2, 3, 7, 64, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))

_TEXTS = {
    "reduce": """<ir_version: 10, opset_import: ["" : 21]> net (float[2,3,8] x) => (float[2,1,8] y)
        <int64[1] axes = {1}> { a = Relu(x) b = Softmax<axis = -1>(a) c = Add(b, x) y = ReduceSum<keepdims = 1>(c, axes) }""",
    "shapes": """<ir_version: 10, opset_import: ["" : 21]> net (float[4,6] x, int64[2] to) => (float[a,b] y)
        <int64[2] starts = {0, 1}, int64[2] ends = {3, 6}, int64[2] axes = {0, 1}, int64[2] twice = {2, 1}>
        { s = Slice(x, starts, ends, axes) t = Transpose<perm = [1, 0]>(s) r = Reshape(t, to) q = Tile(r, twice)
          n = Shape(q) m = ConstantOfShape(n) k = Add(q, m) y = Concat<axis = 0>(k, q) }""",
    "gather": """<ir_version: 10, opset_import: ["" : 21]> net (int64[2,3] ids) => (float[2,3] y)
        <float[5,3] table = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}>
        { g = Gather<axis = 0>(table, ids) z = Cast<to = 1>(ids) l = LayerNormalization<axis = -1>(g, w) w0 = Identity(l)
          m = ReduceMean<keepdims = 0>(w0, last) y = Mul(m, z) }""",
    "branch": """<ir_version: 10, opset_import: ["" : 21]> net (float[3] x) => (float[3] y)
        { s = ReduceSum<keepdims = 0>(x) zero = Constant<value = float {0.0}>() c = Greater(s, zero)
          y = If (c) <then_branch = yes () => (float[3] a) { a = Exp(x) },
                      else_branch = no () => (float[3] b) { b = Neg(x) }> }""",
    "text": """<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 4]>
        net (string[2] w, float[4,2] t) => (float[a,2] y, bool[2] r, float[2,4] f)
        { n = StringNormalizer<case_change_action = "LOWER", stopwords = ["b"]>(w)
          i = ai.onnx.ml.LabelEncoder<keys_strings = ["a","c"], values_int64s = [0, 1], default_int64 = 2>(n)  y = Gather(t, i)
          r = RegexFullMatch<pattern = "(a|b)+[a-z]{0,3}">(w)  s = StringConcat(w, w)
          p, c = StringSplit<delimiter = "a">(s)
          f = TfIdfVectorizer<mode = "TFIDF", min_gram_length = 1, max_gram_length = 2, max_skip_count = 1, ngram_counts = [0, 2],
              ngram_indexes = [3, 0, 1, 2], pool_strings = ["a", "b", "a", "b", "b", "a"], weights = [0.5, 2.0, 3, 4.0]>(p) }""",
    "scan": """<ir_version: 10, opset_import: ["" : 21]> net (float[3] h, float[40,3] x) => (float[3] last, float[40,3] rows)
        { last, rows = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] x1) => (float[3] t, float[3] row)
            { t = Sub (x1, s)  row = Tanh (t) }> (h, x) }""",
    "function": """<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> net (float[3] x) => (float[3] y)
        { y = mine.f<k = 2.0>(x) }
        <opset_import: ["" : 21], domain: "mine"> f <k: float> (a) => (c) { e = Elu<alpha: float = @k>(a) c = Mul(e, a) }""",
}  # fmt: skip


def seeds() -> list[onnx.ModelProto]:
    """The models that are changed."""
    out = []
    for name, text in _TEXTS.items():
        proto = parser.parse_model(text)
        if name == "gather":
            proto.graph.initializer.extend([
                numpy_helper.from_array(np.ones(3, np.float32), "w"), numpy_helper.from_array(np.array([2]), "last"),
            ])  # fmt: skip
        out.append(proto)
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(40, 30)).astype(np.float32), "b": rng.normal(size=30).astype(np.float32)}
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["h"], alpha=0.5), helper.make_node("Gelu", ["h"], ["y"])]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", ["n", 40]), ("y", ["n", 30]))]
    tensors = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "net", infos[:1], infos[1:], tensors)
    return [*out, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)]


def mutants(count: int, seed: int) -> Iterator[bytes]:
    """Half of them are changed in their bytes, half in their fields."""
    kept = seeds()
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        proto = onnx.ModelProto()
        proto.CopyFrom(kept[i % len(kept)])
        yield _bytes(proto.SerializeToString(), rng) if rng.integers(2) else _fields(proto, rng)


def _bytes(data: bytes, rng: np.random.Generator) -> bytes:
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 3))):
        at, to = sorted(int(x) for x in rng.integers(0, max(len(out), 1), 2))
        way = rng.integers(5)
        if way == 0 and out:
            out[at] ^= 1 << int(rng.integers(8))
        elif way == 1:
            del out[at:to]
        elif way == 2:
            out[at:at] = out[at : min(to, at + 50)]
        elif way == 3:
            out[at : at + 4] = bytes(rng.integers(0, 256, 4, np.uint8))
        else:
            del out[at:]
    return bytes(out)


def _fields(proto: onnx.ModelProto, rng: np.random.Generator) -> bytes:
    places = list(_messages(proto, 0))
    for _ in range(int(rng.integers(1, 3))):
        message, field = places[int(rng.integers(len(places)))]
        value, many = getattr(message, field.name), not isinstance(getattr(message, field.name), (int, float, str, bytes))
        if many and not len(value):
            continue
        at = int(rng.integers(len(value))) if many else 0
        if many and rng.integers(3) == 0:
            del value[at]
        elif (old := value[at] if many else value) is not None and isinstance(old, (int, float, str, bytes)):
            new = _other(old, rng, places)
            try:
                if many:
                    value[at] = new
                else:
                    setattr(message, field.name, new)
            except (ValueError, TypeError):  # past the field's range
                continue
    return proto.SerializeToString()


def _messages(message: object, depth: int) -> Iterator[tuple[object, object]]:
    for field, value in message.ListFields():
        if field.message_type is None:
            yield message, field
        elif hasattr(value, "ListFields"):
            yield from _messages(value, depth + 1)
        else:
            yield message, field
            for each in value:
                yield from _messages(each, depth + 1)


def _other(old: object, rng: np.random.Generator, places: list) -> object:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return EXTREMES[int(rng.integers(len(EXTREMES)))] if rng.integers(2) else old + int(rng.integers(-3, 4))
    if isinstance(old, float):
        return float(rng.choice([0.0, -1.0, np.inf, np.nan, 1e30, 0.5]))
    if isinstance(old, bytes):
        return old[: int(rng.integers(len(old) + 1))]
    texts = [v for m, f in places if isinstance(v := getattr(m, f.name), str) and v]
    return str(rng.choice([*texts, "", "Conv", "Loop", "é\0x"]))


def outcome(data: bytes) -> str:
    """`right` or `refused`. AssertionError: the result is not that of ONNX's own evaluator."""
    try:
        net = OnnxModel(data)
        inputs = {i.name: _given(i) for i in net.inputs}
        if any(x is None for x in inputs.values()):
            rlx.Session("cpu").plan(net.graph(dict.fromkeys(_named(net), 2)))
            return "planned"
        found = net.run(inputs)
    except RlxError as e:
        assert str(e) and len(str(e)) < 20_000, "an error without a message"
        return "refused"
    return _compared(data, inputs, found)


def _named(net: OnnxModel) -> set[str]:
    return {str(d) for i in net.inputs if i.shape for d in i.shape.dims if not isinstance(d, int)}


def _given(i: object) -> np.ndarray | None:
    if i.kind == "text":
        return np.array(["abA", "c"], object)
    if i.shape is None or sum(1 for _ in i.shape.dims) > 8:
        return None
    dims = tuple(d if isinstance(d, int) else 2 for d in i.shape.dims)
    if np.prod([float(d) for d in dims]) > ELEMENTS:
        return None
    if i.shape.dtype.kind == "f":
        return (np.arange(int(np.prod(dims))).reshape(dims) % 7 - 3).astype(i.shape.dtype.numpy)
    values = np.array([3, 5] if dims == (2,) else np.arange(int(np.prod(dims))) % 5)
    return (values[0:0] if not values.size else np.resize(values, dims)).astype(i.shape.dtype.numpy).reshape(dims)


def _compared(data: bytes, inputs: dict[str, np.ndarray], found: dict) -> str:
    try:
        proto = onnx.ModelProto.FromString(data)
        onnx.checker.check_model(proto, full_check=True)
        expected = ReferenceEvaluator(proto).run(None, inputs)
    except Exception:  # noqa: BLE001  (ONNX's tools fail in many ways on such models: then there is nothing to compare with)
        return "ran"
    for name, want in zip(found, expected):
        own, want = np.asarray(found[name]), np.asarray(want)
        assert own.shape == want.shape, f"output {name!r} has dims {own.shape}, and should have {want.shape}"
        with np.errstate(all="ignore"):
            assert np.allclose(own.astype(float), want.astype(float), 1e-3, 1e-3, equal_nan=True), f"output {name!r} is wrong"
    return "right"


def _work(todo: list[tuple[int, bytes]], results: multiprocessing.SimpleQueue) -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + LIMIT,) * 2)
    for i, data in todo:
        results.put((i, "begun", ""))
        signal.alarm(SECONDS)  # ends the process
        try:
            results.put((i, outcome(data), ""))
        except Exception as e:  # noqa: BLE001  (each is a fault that is reported)
            results.put((i, "fault", f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"))
        signal.alarm(0)


def _mapped() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def run(count: int, seed: int = 0, batch: int = 100) -> tuple[Counter[str], list[str]]:
    """Outcomes and faults of so many mutants."""
    todo, counts, faults = list(enumerate(mutants(count, seed))), Counter[str](), list[str]()
    context = multiprocessing.get_context("fork")
    while todo:
        results = context.SimpleQueue()
        process = context.Process(target=_work, args=(todo[:batch], results))
        process.start()
        last = -1
        states: dict[int, str] = {}
        while process.is_alive() or not results.empty():
            if results.empty():
                process.join(0.02)
                continue
            last, state, why = results.get()
            states[last] = state
            if state == "fault":
                faults.append(f"mutant {last}: {why}")
        if process.exitcode:
            end = "takes too long" if process.exitcode == -signal.SIGALRM else f"ends the process ({process.exitcode})"
            faults.append(f"mutant {last} {end}")
            states[last] = "fault"
        counts.update(states.values())
        todo = [(i, data) for i, data in todo if i > last] if last >= 0 else []
    return counts, faults


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    counts, faults = run(given.count, given.seed)
    print(*faults, sep="\n")
    print(", ".join(f"{n} {state}" for state, n in sorted(counts.items())))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

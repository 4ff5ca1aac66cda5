"""Random bits against published vectors and JAX's; distributions; thresholds; the choosing of tokens against transformers'."""

from __future__ import annotations

import numpy as np
import pytest
from devices import TWO

import rlx
from rlx.errors import DTypeError, NumericsError, OptionError, ShapeError
from rlx.frontends.sampling import Sampler, Sampling, choose
from rlx.ir import ops
from rlx.ir.graph import Graph
from rlx.ir.ops.random import seed_key, threefry_array

# Random123, kat_vectors: threefry 2x32, 20 rounds (counter, key, result)
VECTORS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
# jax.random.bits(jax.random.key(seed), …, "uint32"), JAX 0.10.2
JAX = {
    0: [4070199207, 4202968722, 1427181096, 2012915765, 2447653815, 710830403, 1332275837, 2961296638],
    7: [2895194379, 4185947648, 1300703658, 1906787632, 3139134342, 2709822315, 1926509400, 1767298410],
    2**40 + 3: [3377107418, 234348654, 1894791269, 1996855720, 3883329781],
}


def run(build, device: str = "cpu", **inputs):
    """The outputs of a graph over these inputs."""
    g = Graph("test")
    made = build(*(g.input(name, a.shape, a.dtype) for name, a in inputs.items()))
    g.set_outputs(made if isinstance(made, (list, tuple)) else [made])
    return rlx.Session(device).compile(g, rlx.CompileOptions(threads=2)).run(inputs)


@pytest.mark.parametrize("counter, key, want", VECTORS)
def test_threefry_gives_the_published_words(counter, key, want):
    assert tuple(int(x) for x in threefry_array(key, counter)) == want


@pytest.mark.parametrize("device", TWO)
@pytest.mark.parametrize("seed", JAX)
def test_bits_are_those_of_jax(seed, device):
    n = len(JAX[seed])
    (bits,) = run(lambda k, c: ops.random_bits(k, c, (n,)), device, key=seed_key(seed), counter=np.uint32(0).reshape(()))
    assert bits.tolist() == JAX[seed]


def test_draws_of_equal_operands_are_equal_and_others_are_not():
    key, counter = seed_key(5), np.array(9, np.uint32)
    a, b, c, d = run(
        lambda k, c: [ops.random_bits(k, c, (64,)), ops.random_bits(k, c, (64,)), ops.random_bits(k, c + 1, (64,)),
                      ops.random_bits(k + 1, c, (64,))], key=key, counter=counter,
    )  # fmt: skip
    assert (a == b).all()
    assert (a != c).mean() > 0.9 and (a != d).mean() > 0.9 and (c != d).mean() > 0.9


def test_distributions():
    n = 200_000
    uniform, gumbel = run(
        lambda k, c: [ops.random_uniform(k, c, (n,)), ops.gumbel(k, c, (n,))], key=seed_key(11), counter=np.array(3, np.uint32)
    )
    assert uniform.min() >= 0 and uniform.max() < 1
    from scipy import stats  # a second, which each process that collects this file would take

    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert stats.kstest(gumbel, "gumbel_r").pvalue > 1e-3
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize(
    "build, error, text",
    [
        (lambda k, c: ops.random_bits(k.astype("u64"), c, (3,)), DTypeError, "key is u32"),
        (lambda k, c: ops.random_bits(k, c.astype("i32"), (3,)), DTypeError, "counter is u32"),
        (lambda k, c: ops.gumbel(k, k, (3,)), ShapeError, "counter has dims"),
        (lambda k, c: ops.random_bits(k, c, (1 << 20, 1 << 20)), ShapeError, "2\\^32"),
        (lambda k, c: ops.threshold(k.astype("f64"), 1.0), DTypeError, "f32"),
        (lambda k, c: ops.threshold(k.astype("f32"), k.astype("f32")), ShapeError, "amount"),
    ],
)
def test_wrong_operands(build, error, text):
    g = Graph("wrong")
    with pytest.raises(error, match=text):
        build(g.input("key", (2,), "u32"), g.input("counter", (), "u32"))


# -- thresholds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", TWO)
def test_threshold_finds_the_kth_greatest(device):
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=1001), rng.normal(size=1001) - 50, rng.integers(-3, 3, 1001), np.full(1001, -np.inf)])
    x = np.concatenate([x, x * 1e30, x * 1e-42]).astype(np.float32)
    for k in (1, 2, 40, 1000, 1001):
        (found,) = run(lambda x, k: ops.threshold(x, k), device, x=x, k=np.array(k, np.float32))
        np.testing.assert_array_equal(found, np.sort(x, axis=-1)[:, -k])


@pytest.mark.parametrize("k", [0.0, -3.0])
def test_an_amount_of_nothing_keeps_the_greatest(k):
    (found,) = run(lambda x, k: ops.threshold(x, k), x=np.array([[3, 9, 2]], np.float32), k=np.array(k, np.float32))
    assert found.tolist() == [9]


def test_what_cannot_be_reached_cuts_nothing_off():
    x = np.array([[3, 9, np.nan], [np.inf, 1, 2]], np.float32)
    for amount in (4.0, np.nan, np.inf):
        (found,) = run(lambda x, k: ops.threshold(x, k), x=x, k=np.array(amount, np.float32))
        assert found.tolist() == [-np.inf] * 2


# -- choosing ------------------------------------------------------------------------------------------------------

VOCAB, WHOLE = 211, 256  # tokens: of the latter, groups of 128 are whole
SETTINGS = [
    {}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 7}, {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "repetition_penalty": 1.7}, {"repetition_penalty": 1.4},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 500, "top_p": 0.999}, {"temperature": 1.1, "top_k": 20, "min_p": 0.05},
]  # fmt: skip


def chances(logits: np.ndarray, seen: list[int], how: Sampling) -> np.ndarray:
    """Probability of each token, by transformers' own processors, and greedy where the temperature is 0."""
    torch = pytest.importorskip("torch")
    t = pytest.importorskip("transformers")
    scores, ids = torch.tensor(logits[None]), torch.tensor([seen])
    if how.repetition_penalty != 1:
        scores = t.RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(ids, scores)
    if not how.temperature:
        return (scores[0] == scores.max()).numpy().astype(np.float64)
    steps = [t.TemperatureLogitsWarper(float(how.temperature))]
    steps += [t.TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [t.TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    steps += [t.MinPLogitsWarper(how.min_p)] if how.min_p else []
    for step in steps:
        scores = step(ids, scores)
    return torch.softmax(scores[0].double(), -1).numpy()


@pytest.mark.parametrize("vocab", [VOCAB, WHOLE])
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_tokens_come_as_often_as_transformers_says(given, vocab):
    """4096 rows of one graph draw at once; none draws what has no chance."""
    from scipy import stats

    how, rows = Sampling(**given), 4096
    logits = (np.random.default_rng(3).normal(size=vocab) * 2).astype(np.float32)
    seen = [int(i) for i in np.argsort(logits)[[-1, -2, -5, 3, 100]]]
    sampler = Sampler(how, vocab, batch=rows, seed=17)
    sampler.start(seen)
    counts = np.bincount(sampler(np.tile(logits, (rows, 1))), minlength=vocab)
    want = chances(logits, seen, how)
    assert not counts[want == 0].any()
    often = want * rows >= 5
    observed, expected = np.append(counts[often], counts[~often].sum()), np.append(want[often], want[~often].sum()) * rows
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4 or keep.sum() == 1
    assert observed[keep].sum() == rows


@pytest.mark.parametrize("vocab", [VOCAB, WHOLE])
def test_what_is_cut_off_is_what_transformers_cuts_off(vocab):
    """Supports are equal for many logits, also with equal ones among them."""
    rng = np.random.default_rng(5)
    for i in range(20):
        logits = (np.round(rng.normal(size=vocab) * 3, 1 if i % 2 else 6)).astype(np.float32)
        how = Sampling(temperature=0.5 + rng.random(), top_k=int(rng.integers(5, 60)), min_p=float(rng.random() * 0.1))
        want = chances(logits, [0], how) > 0
        sampler = Sampler(how, vocab, batch=512, seed=i)
        drawn = np.zeros(vocab, bool)
        for _ in range(4):
            drawn[sampler(np.tile(logits, (512, 1)))] = True
        assert not (drawn & ~want).any(), how


def test_streams():
    """Equal seeds, equal tokens; the tokens of a stream differ, and a stream begun again is the same again."""
    logits = np.zeros((1, VOCAB), np.float32)
    how = Sampling(temperature=1.0)
    a, b, c = (Sampler(how, VOCAB, seed=s) for s in (3, 3, 4))
    first = [int(a(logits)[0]) for _ in range(12)]
    assert first == [int(b(logits)[0]) for _ in range(12)] != [int(c(logits)[0]) for _ in range(12)]
    assert len(set(first)) > 6
    a.start(())
    assert first == [int(a(logits)[0]) for _ in range(12)]
    assert Sampler(how, VOCAB).seed != Sampler(how, VOCAB).seed


def test_chosen_tokens_count_as_seen():
    """With a great penalty, greedy choices never repeat: the state follows the choices, row by row."""
    logits = np.sort(np.random.default_rng(1).random((2, 9)).astype(np.float32) + 1)
    logits[1] = logits[1, ::-1]
    sampler = Sampler(Sampling(repetition_penalty=100.0), 9, batch=2)
    found = np.array([sampler(logits) for _ in range(9)])
    assert found.T.tolist() == [list(range(8, -1, -1)), list(range(9))]


@pytest.mark.parametrize("vocab", [VOCAB, WHOLE])
def test_nan_is_an_error(vocab):
    logits = np.zeros((1, vocab), np.float32)
    logits[0, 5] = np.nan
    for how in (Sampling(), Sampling(temperature=1.0, top_k=5, top_p=0.5), Sampling(temperature=1.0, top_k=5, min_p=0.5)):
        with pytest.raises(NumericsError, match="NaN"):
            Sampler(how, vocab)(logits)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"temperature": -1.0}, "temperature is a number from 0"), ({"temperature": float("nan")}, "got nan"),
        ({"top_k": 2.5}, "top_k is a whole number"), ({"top_k": -1}, "top_k"), ({"top_p": 1.5}, "top_p"),
        ({"min_p": "x"}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"top_k": True}, "top_k"),
    ],
)  # fmt: skip
def test_settings_without_meaning(given, text):
    with pytest.raises(OptionError, match=text):
        Sampling(**given)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, True])
def test_seeds_without_meaning(seed):
    with pytest.raises(OptionError, match="seed"):
        Sampler(Sampling(), VOCAB, seed=seed)


def test_nothing_is_sorted():
    g = Graph("choose")
    logits = g.input("logits", (1, VOCAB), "f32")
    g.set_outputs([choose(g, logits, Sampling(1.0, 5, 0.5, 0.1, 1.1).steps)])
    found = {n.op.name for n in g.nodes()}
    assert "threshold" in found and not found & {"sort", "argsort", "top_k"}

"""Experts in two tiers: the same bits whatever is resident, memory within the budget, files that change, runs beside promotions;
and the capture of what routers choose."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import check_allocates_nothing
from expert_graphs import block, checked_statistics, moving

import rlx
from rlx.driver.experts import ExpertSource
from rlx.driver.files import map_file
from rlx.errors import (
    BindingError,
    CorruptFileError,
    IndexRangeError,
    InputShapeError,
    OptionError,
    RlxError,
    UnknownNameError,
    Unsupported,
)  # fmt: skip
from rlx.ir.blocks import FORMATS
from rlx.runtime import CompiledGraph
from rlx.runtime.pool import ExpertPool

F = np.float32
Sizes = tuple[int, int, int, int]  # experts, choices of a token, width, width inside an expert
T, E, K, D, FFN, LAYERS = 3, 8, 2, 128, 96, 2


def model(form: str = "f32", sizes: Sizes = (E, K, D, FFN), tokens: int = T, layers: int = LAYERS) -> rlx.Graph:
    """Layers of experts with a router each, and a state that every run changes."""
    experts, k, d, ffn = sizes
    g = rlx.Graph("moe")
    h = g.input("x", (tokens, d), rlx.f32) + (state := g.handle(rlx.BufferHandle("state", (tokens, d), rlx.f32)))
    for layer in range(layers):
        x, packed = (h, form) if form in FORMATS else (h.astype(form), "")
        h = h + block(g, x, f"l{layer}", experts, k, ffn, form, packed).astype("f32")
        h = rlx.rms_norm(h, rlx.ones((d,)))
    g.assign(state, h * 0.5)
    g.set_outputs([h])
    return g


def compiled_model(form: str = "f32", threads: int = 2, **more: object) -> CompiledGraph:
    return rlx.Session("cpu", threads=threads).compile(model(form, **more))  # type: ignore[arg-type]


def weights(compiled: CompiledGraph, form: str = "f32", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for p in compiled.params:
        *dims, columns = p.shape.static
        if p.dtype == rlx.u8:
            blocks = rng.integers(0, 256, (*dims, columns // FORMATS[form].nbytes, FORMATS[form].nbytes), np.uint8)
            for at in FORMATS[form].numbers:  # f16 factors of a block
                blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            found[p.name] = blocks.reshape(*dims, columns)
        else:
            found[p.name] = (rng.standard_normal((*dims, columns)) / np.sqrt(columns)).astype(p.dtype.numpy)
    return found


def inputs(count: int, seed: int = 1, tokens: int = T, d: int = D) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((tokens, d)).astype(F)} for _ in range(count)]


def outputs(compiled: CompiledGraph, count: int = 4) -> np.ndarray:
    """Of several runs from zero state."""
    compiled.bind_handle("state", np.zeros((T, D), F))
    return np.stack([compiled.run(given)[0] for given in inputs(count)])


def mapped(array: np.ndarray, path: Path) -> np.ndarray:
    """The array in a mapped file."""
    path.write_bytes(array.tobytes())
    return np.frombuffer(map_file(path), array.dtype).reshape(array.shape)


def experts_of(name: str) -> bool:
    return not name.endswith(".gate")


MASKS = [[[False] * E] * LAYERS, [[True, False] * (E // 2)] * LAYERS, [[True] * E, [False] * (E - 1) + [True]]]


@pytest.mark.parametrize("given", ["arrays", "mapped", "sources", "masks first"])
@pytest.mark.parametrize("form", ["f32", "bf16", "q4_k", "q8_0"])
def test_results_are_the_same_bits_whatever_is_resident(form: str, given: str, tmp_path: Path) -> None:
    sizes = (E, K, 256, 256) if form == "q4_k" else (E, K, D, FFN)
    compiled = compiled_model(form, sizes=sizes)
    arrays = weights(compiled, form)
    compiled.set_params(arrays)
    d = sizes[2]

    def run(c: CompiledGraph) -> np.ndarray:
        c.bind_handle("state", np.zeros((T, d), F))
        return np.stack([c.run(x)[0] for x in inputs(4, d=d)])

    expected = run(compiled)
    other = compiled_model(form, sizes=sizes)
    if given == "masks first":
        other.set_moe_resident_experts_per_layer(MASKS[1])
    if given in ("mapped", "sources", "masks first"):
        arrays = {n: mapped(a, tmp_path / n) if experts_of(n) else a for n, a in arrays.items()}
    if given in ("sources", "masks first"):
        part = lambda a, e: a[e * (len(a) // E) : (e + 1) * (len(a) // E)]  # noqa: E731
        arrays = {n: ExpertSource(partial(part, a), n, [a]) if experts_of(n) else a for n, a in arrays.items()}
    other.set_params(arrays)
    for masks in ([[True] * E] * LAYERS, *MASKS, [[True] * E] * LAYERS):
        if given == "masks first" and masks[0][0] and masks[0][1]:
            continue
        other.set_moe_resident_experts_per_layer(masks)
        np.testing.assert_array_equal(run(other), expected)


def test_memory_says_what_is_resident() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    whole = compiled.memory_plan().regions
    compiled.set_moe_resident_experts([True] * 2 + [False] * 6)
    tiers = compiled.expert_tiers()
    less = sum(whole.values()) - compiled.memory_plan().total_bytes
    assert compiled.memory_plan().offloaded == less and f"experts not resident: {less} bytes" in str(compiled.memory_plan())
    assert less == 6 * sum(layer.nbytes for layer in tiers.layers) > 0
    assert [layer.experts for layer in tiers.layers] == [E, E] and [layer.top_k for layer in tiers.layers] == [K, K]
    assert all(tiers.resident(layer).tolist() == [True] * 2 + [False] * 6 for layer in range(LAYERS))


def test_statistics_count_each_choice_once() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    compiled.set_moe_resident_experts([True] * 4 + [False] * 4)
    compiled.take_moe_residency_stats()
    twin = compiled.clone()
    stats, nbytes = checked_statistics(compiled, inputs(3), K, 4, 3 * LAYERS * T * K), compiled.expert_tiers().layers[0].nbytes
    assert stats.resident.bytes == stats.resident.experts * nbytes and stats.resident.seconds > 0
    assert twin.take_moe_residency_stats().resident.tokens == 0  # of one executable alone


@pytest.mark.parametrize(
    "mask,error",
    [
        ([True] * (E - 1), InputShapeError), ([True] * (E + 1), InputShapeError), (np.ones((E, 1), bool), InputShapeError),
        ([1] * E, BindingError), (True, InputShapeError), (["a"] * E, BindingError), (None, BindingError),
    ],
)  # fmt: skip
def test_a_wrong_mask_changes_nothing(mask: object, error: type[RlxError]) -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    compiled.set_moe_resident_experts([False] + [True] * (E - 1))
    before = [compiled.expert_tiers().resident(layer) for layer in range(LAYERS)]
    with pytest.raises(error, match="mask"):
        compiled.set_moe_resident_experts(mask)  # type: ignore[arg-type]
    with pytest.raises(error, match="mask of layer 1"):
        compiled.set_moe_resident_experts_per_layer([[False] * E, mask])  # type: ignore[list-item]
    for count in (0, 1, 3):
        with pytest.raises(InputShapeError, match="2 layers with experts"):
            compiled.set_moe_resident_experts_per_layer([[False] * E] * count)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(compiled.expert_tiers().resident(layer), before[layer])


@pytest.mark.parametrize(
    "place,error",
    [((0, E), IndexRangeError), ((0, -1), IndexRangeError), ((LAYERS, 0), IndexRangeError), ((-1, 0), IndexRangeError),
     (("a", 0), OptionError), ((0, 1.0), OptionError), ((0, None), OptionError)],
)  # fmt: skip
def test_experts_that_are_none_are_not_promoted_or_demoted(place: tuple[Any, Any], error: type[RlxError]) -> None:
    """The memory of expert -1 would be that in front of the weights."""
    tiers = compiled_model().expert_tiers()
    for act in (tiers.promote, tiers.demote):
        with pytest.raises(error):
            act(*place)
    if place[0] != 0:
        with pytest.raises(error):
            tiers.resident(place[0])
    assert all(tiers.resident(n).all() and not tiers.layers[n].leaving for n in range(LAYERS))


def test_masks_are_not_set_behind_the_back_of_a_pool() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    with ExpertPool(compiled, E, tokens=1) as pool:
        before = pool.tiers.resident(0)
        with pytest.raises(BindingError, match="ExpertPool places the experts"):
            compiled.set_moe_resident_experts([True] * E)
        np.testing.assert_array_equal(pool.tiers.resident(0), before)
    compiled.set_moe_resident_experts([True] * E)
    assert pool.tiers.resident(0).all()


def test_devices_without_a_slow_tier_say_so() -> None:
    compiled = rlx.Session("ref").compile(model())
    given = weights(compiled)
    down = given["l0.down"]
    compiled.set_params({**given, "l0.down": ExpertSource(lambda e: down[e * D : (e + 1) * D], "l0.down")})
    with pytest.raises(InputShapeError):
        compiled.set_params({"l0.down": ExpertSource(lambda e: np.zeros((D, FFN + 1), F), "l0.down")})
    compiled.set_moe_resident_experts([True] * E)
    with pytest.raises(Unsupported, match="REF has no slow tier"):
        compiled.set_moe_resident_experts([True] * (E - 1) + [False])
    with pytest.raises(InputShapeError):
        compiled.set_moe_resident_experts([True])
    compiled.enable_moe_topk_capture(1)
    compiled.run(inputs(1)[0])
    cpu = compiled_model()
    cpu.set_params(given)
    cpu.enable_moe_topk_capture(1)
    cpu.run(inputs(1)[0])
    for ours, theirs in zip(compiled.take_moe_topk_capture(), cpu.take_moe_topk_capture(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_experts_whose_weights_have_other_readers_stay_resident() -> None:
    g = rlx.Graph("read twice")
    h = g.input("x", (T, D), rlx.f32)
    h = h + block(g, h, "l0", E, K, FFN, "f32")
    h = h + block(g, h, "l1", E, K, FFN, "f32")
    shared = [p for p in g.params if p.node.name in ("l0.up", "l0.down")]
    g.set_outputs([h, *(rlx.sum(p) for p in shared)])
    compiled = rlx.Session("cpu", threads=2).compile(g)
    compiled.set_params(weights(compiled))
    given = inputs(1)[0]
    expected = compiled.run(given)
    compiled.set_moe_resident_experts_per_layer([[True] * E, [False] * E])
    with pytest.raises(Unsupported, match="layer 0 stay resident"):
        compiled.set_moe_resident_experts([True] * (E - 1) + [False])
    compiled.enable_moe_topk_capture(K)
    for found, want in zip(compiled.run(given), expected, strict=True):
        np.testing.assert_array_equal(found, want)
    assert len(compiled.take_moe_topk_capture()) == 2 and compiled.memory_plan().offloaded


def test_a_pool_of_experts_that_all_stay_resident_says_so() -> None:
    g = rlx.Graph("ids only")
    ids, share = rlx.ops.route(g.input("scores", (T, E), rlx.f32), k=K)
    g.set_outputs([ids, share])
    compiled = rlx.Session("cpu").compile(g)
    with pytest.raises(Unsupported, match="no experts can leave memory"):
        ExpertPool(compiled, E)
    assert compiled.expert_tiers().advisor is None


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_sources_of_params_with_an_axis_of_experts(device: str) -> None:
    compiled = rlx.Session(device).compile(model("q8_0"))
    arrays = weights(compiled, "q8_0")
    compiled.set_params(arrays)
    expected = outputs(compiled, 2)
    for cut in (lambda a, e: a[e], lambda a, e: a[e : e + 1]):
        sources = {n: ExpertSource(partial(cut, a), n) for n, a in arrays.items() if experts_of(n)}
        compiled.set_params(sources)  # type: ignore[arg-type]
        np.testing.assert_array_equal(outputs(compiled, 2), expected)


def test_graphs_without_experts_say_so() -> None:
    g = rlx.Graph("plain")
    g.set_outputs([g.input("x", (2,), rlx.f32) + g.param("w", (2,), rlx.f32)])
    compiled = rlx.Session("cpu").compile(g)
    for call in (
        lambda: compiled.set_moe_resident_experts([True]), lambda: compiled.set_moe_resident_experts_per_layer([[True]]),
        lambda: compiled.enable_moe_topk_capture(1), compiled.take_moe_topk_capture, compiled.take_moe_residency_stats,
        compiled.expert_tiers,
    ):  # fmt: skip
        with pytest.raises(Unsupported, match="no router"):
            call()
    compiled.set_params({"w": ExpertSource(lambda e: np.full(1, e, F), "w")})
    np.testing.assert_array_equal(compiled.run({"x": np.zeros(2, F)})[0], [0, 1])
    with pytest.raises(UnknownNameError):
        compiled.set_params({"v": ExpertSource(lambda e: np.zeros(2, F), "v")})


# -- weights


def test_weights_set_under_a_mask_are_the_new_ones() -> None:
    compiled, fresh = compiled_model(), compiled_model()
    compiled.set_params(weights(compiled))
    compiled.set_moe_resident_experts([True, False] * (E // 2))
    outputs(compiled)
    new = weights(compiled, seed=5)
    compiled.set_params(new)
    fresh.set_params(new)
    np.testing.assert_array_equal(outputs(compiled), outputs(fresh))
    compiled.set_moe_resident_experts([True] * E)
    np.testing.assert_array_equal(outputs(compiled), outputs(fresh))


def test_a_source_whose_experts_have_other_dims_is_refused() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    with pytest.raises(InputShapeError, match=r"an expert of 'l0.down' is float32\[128, 96\], got float32\[96, 128\]"):
        compiled.set_param("l0.down", ExpertSource(lambda e: np.zeros((FFN, D), F), "l0.down"))  # type: ignore[arg-type]
    assert compiled.missing_params() == ["l0.down"]


def test_artifacts_hold_all_experts_and_read_them_from_the_file(tmp_path: Path) -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    expected = outputs(compiled)
    compiled.set_moe_resident_experts([True, False] * (E // 2))
    compiled.save(tmp_path / "moe.rlx")
    np.testing.assert_array_equal(compiled.expert_tiers().resident(0), [True, False] * (E // 2))
    loaded = rlx.load(tmp_path / "moe.rlx")
    np.testing.assert_array_equal(outputs(loaded), expected)
    for masks in MASKS:
        loaded.set_moe_resident_experts_per_layer(masks)
        np.testing.assert_array_equal(outputs(loaded), expected)
    os.rename(tmp_path / "moe.rlx", tmp_path / "away")
    loaded.set_moe_resident_experts([False] * E)
    with pytest.raises(CorruptFileError, match=r"expert \d of 'l0.*moe.rlx was moved away"):
        outputs(loaded)
    os.rename(tmp_path / "away", tmp_path / "moe.rlx")
    np.testing.assert_array_equal(outputs(loaded), expected)


# -- files that change


@pytest.mark.parametrize("how", ["truncated", "replaced", "changed"])
@pytest.mark.parametrize("large", [False, True])
def test_a_file_that_changes_while_experts_are_read(how: str, large: bool, tmp_path: Path) -> None:
    compiled = compiled_model(sizes=(E, K, D, 8 * FFN) if large else (E, K, D, FFN))
    arrays, path = weights(compiled), tmp_path / "l1.down"
    arrays = {n: mapped(a, tmp_path / n) if experts_of(n) else a for n, a in arrays.items()}
    compiled.set_params(arrays)
    expected = outputs(compiled)
    compiled.set_moe_resident_experts([False] * E)
    compiled.bind_handle("state", np.zeros((T, D), F))
    first = compiled.run(inputs(4)[0])[0]
    state, content, stamp = compiled.read_handle("state"), path.read_bytes(), path.stat()
    if how == "truncated":
        os.truncate(path, len(content) // E // 2)
    elif how == "replaced":
        os.rename(path, tmp_path / "original")
        path.write_bytes(content)
    else:
        path.write_bytes(bytes(len(content)))
    for call in (partial(compiled.run, inputs(4)[1]), partial(compiled.run_slots, [inputs(4)[1]["x"]])):
        with pytest.raises(CorruptFileError, match=r"expert \d of 'l1.down' cannot be read: .*l1.down was (truncated|changed)"):
            call()
        np.testing.assert_array_equal(compiled.read_handle("state"), state)
    with pytest.raises(CorruptFileError, match="put it back"):
        compiled.expert_tiers().promote(1, 3)
    assert not compiled.expert_tiers().resident(1)[3]
    if how == "replaced":
        os.rename(tmp_path / "original", path)
    else:
        path.write_bytes(content)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    results = [first, *(compiled.run(given)[0] for given in inputs(4)[1:])]
    np.testing.assert_array_equal(np.stack(results), expected)
    compiled.expert_tiers().promote(1, 3)


def test_a_run_that_fails_between_a_layers_steps_leaves_it() -> None:
    g = rlx.Graph("fails")
    x, at = g.input("x", (T, D), rlx.f32), g.input("at", (T * K,), rlx.i32)
    up, down = (g.param(name, (E * D, D), rlx.f32).reshape((E, D, D)).transpose(0, 2, 1) for name in ("up", "down"))
    ids, _ = rlx.route(x @ g.param("gate", (D, E), rlx.f32), k=K)
    order, _, ends = rlx.group_rows(ids.reshape((T * K,)), groups=E)
    rows = rlx.segment_matmul(rlx.gather(x, order // K), up, ends)
    g.set_outputs([rlx.segment_matmul(rlx.gather(rows, at), down, ends)])
    compiled = rlx.Session("cpu", threads=2).compile(g)
    compiled.set_params(weights(compiled))
    given, places = inputs(1)[0], np.arange(T * K, dtype=np.int32)
    expected = compiled.run({**given, "at": places})[0]
    compiled.set_moe_resident_experts([False] * E)
    layer = compiled.expert_tiers().layers[0]
    for wrong in (-1000, 1000):
        with pytest.raises(IndexRangeError):
            compiled.run({**given, "at": places + wrong})
        assert any(window.count for window in layer.windows) and not any(window.count % 2 for window in layer.windows)
        assert not any(layer.in_memory(e) for e in range(E))
    np.testing.assert_array_equal(compiled.run({**given, "at": places})[0], expected)


# -- beside runs


def test_promotions_beside_runs_of_clones_never_change_a_result() -> None:
    compiled = compiled_model(sizes=(E, K, D, 8 * FFN))
    compiled.set_params(weights(compiled))
    expected, faults, tiers = outputs(compiled, 8), list[BaseException](), compiled.expert_tiers()

    def repeat(mine: CompiledGraph) -> None:
        try:
            for _ in range(12):
                np.testing.assert_array_equal(outputs(mine, 8), expected)
        except BaseException as fault:  # noqa: BLE001
            faults.append(fault)

    runners = [threading.Thread(target=repeat, args=(c,)) for c in (compiled, compiled.clone(), compiled.clone())]
    with moving(tiers, LAYERS, E, movers=2):
        for thread in runners:
            thread.start()
        for thread in runners:
            thread.join()
    assert not faults, faults[0]
    for layer in range(LAYERS):
        at = tiers.layers[layer]
        tiers.finish(layer)
        assert not at.leaving and not +at.users
        assert [at.in_memory(e) for e in range(E)] == tiers.resident(layer).tolist()


class Asked:
    """An advisor that is asked at every router."""

    each = True

    def hits(self, layer: int, ids: np.ndarray) -> None:
        raise AssertionError("it was asked already")

    def queued(self) -> None:
        raise AssertionError("it is asked in the run")


def test_an_expert_that_a_run_reads_is_released_when_the_run_leaves() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    expected, tiers = outputs(compiled, 1), compiled.expert_tiers()

    class Demotes(Asked):
        """Keeps every missing expert, and demotes all others at each router."""

        def routed(
            self, layer: int, ids: np.ndarray, ahead: np.ndarray | None, resident: np.ndarray | None = None
        ) -> list[int]:
            chosen = set(ids.reshape(-1).tolist())
            for other in range(LAYERS):
                for e in range(E):
                    tiers.demote(other, e)
            return sorted(chosen)

    tiers.advisor = Demotes()
    compiled.enable_moe_topk_capture(K)
    np.testing.assert_array_equal(outputs(compiled, 1), expected)
    chosen = compiled.take_moe_topk_capture()
    assert set(np.flatnonzero(tiers.resident(1)).tolist()) == set(chosen[1].reshape(-1).tolist())
    assert not tiers.resident(0).any()

    class Fails(Asked):
        def routed(
            self, layer: int, ids: np.ndarray, ahead: np.ndarray | None, resident: np.ndarray | None = None
        ) -> list[int]:
            raise OptionError("the budget is gone")

    tiers.advisor = Fails()
    with pytest.raises(OptionError, match="the budget is gone"):
        outputs(compiled, 1)
    np.testing.assert_array_equal(compiled.read_handle("state"), np.zeros((T, D), F))
    tiers.advisor = None
    np.testing.assert_array_equal(outputs(compiled, 1), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_its_own_residency() -> None:
    compiled = compiled_model(threads=1)
    compiled.set_params(weights(compiled))
    expected, tiers, stop = outputs(compiled), compiled.expert_tiers(), threading.Event()

    def move() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            (tiers.demote if rng.random() < 0.5 else tiers.promote)(int(rng.integers(LAYERS)), int(rng.integers(E)))

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(5):
            child = os.fork()
            if not child:
                fine = False
                try:
                    fine = (outputs(compiled) == expected).all()
                    compiled.set_moe_resident_experts([False] * E)
                    fine = fine and (outputs(compiled) == expected).all()
                finally:
                    os._exit(0 if fine else 1)
            assert os.waitpid(child, 0)[1] == 0
            np.testing.assert_array_equal(outputs(compiled), expected)
    finally:
        stop.set()
        mover.join()


BUDGET = """
import sys
import numpy as np
from test_expert_residency import compiled_model, inputs, resident, weights
sizes, layers, steps = (32, 2, 64, 128), 4, 1000
compiled = compiled_model(sizes=sizes, tokens=1, layers=layers)
compiled.set_params(weights(compiled))
steps_in = inputs(steps, tokens=1, d=64)
expected = [compiled.run(x)[0].argmax() for x in steps_in]
compiled.bind_handle("state", np.zeros((1, 64), np.float32))
tiers, rng = compiled.expert_tiers(), np.random.default_rng(3)
each = tiers.layers[0].nbytes
compiled.set_moe_resident_experts([False] * 32)
floor, most, found = resident(), 0, []
for x in steps_in:
    masks = [rng.permutation(32) < 3 for _ in range(layers)]
    compiled.set_moe_resident_experts_per_layer(masks)
    found.append(compiled.run(x)[0].argmax())
    most = max(most, resident() - floor)
assert found == expected, "other tokens"
print(each, most, 3 * layers * each + 2 * each)
"""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="the resident memory is read from /proc")
def test_a_thousand_steps_stay_within_the_budget() -> None:
    """The mask changes at every step; the budget is three experts of each layer, and one layer's experts in use."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", BUDGET], env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    each, most, budget = map(int, done.stdout.split())
    assert most <= budget + (2 << 20) < 32 * 4 * each / 2  # 2 MB for what else the process allocates


def test_the_last_reference_frees_memory_and_files() -> None:
    open_files = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = open_files()
    gc.disable()
    try:
        compiled = compiled_model()
        compiled.set_params(weights(compiled))
        compiled.set_moe_resident_experts([False] * E)
        call = compiled.bound([inputs(1)[0]["x"]])
        call()
        alive = [weakref.ref(compiled._executable), weakref.ref(compiled.expert_tiers())]
        assert open_files() > before  # the packed experts of arrays
        del compiled, call
        assert [found() for found in alive] == [None, None] and open_files() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("checked", [False, True])
def test_profiles_and_checked_runs_read_experts_too(checked: bool) -> None:
    compiled = rlx.Session("cpu", threads=2).compile(model(), rlx.CompileOptions(checked=checked))
    compiled.set_params(weights(compiled))
    expected = outputs(compiled)
    compiled.set_moe_resident_experts([False] * E)
    if not checked:
        profile = compiled.profile(inputs(1)[0], runs=3)
        assert len(profile.steps) == len(compiled.program().steps) + len(compiled.program().commit)
    np.testing.assert_array_equal(outputs(compiled), expected)
    assert compiled.take_moe_residency_stats().offloaded.tokens >= 4 * LAYERS * T * K


# -- capture


def chosen(compiled: CompiledGraph, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The choices of the routers for this input from zero state."""
    compiled.bind_handle("state", np.zeros((T, D), F))
    compiled.enable_moe_topk_capture(K)
    compiled.run(given)
    return compiled.take_moe_topk_capture()


@pytest.mark.parametrize("form", ["run", "run_slots", "bound", "call", "queued", "run_raw", "pipelined"])
@pytest.mark.parametrize("mode", ["native", "python"])
def test_capture_takes_the_next_run_only(form: str, mode: str) -> None:
    with rlx.knobs.override(RLX_CALLS=mode):
        compiled = compiled_model()
        compiled.set_params(weights(compiled))
        first, second = inputs(2)
        expected = chosen(compiled, first)
        assert [ids.shape for ids in expected] == [(T, K)] * LAYERS and all(ids.dtype == np.int32 for ids in expected)
        other = chosen(compiled, second)
        assert any((a != b).any() for a, b in zip(expected, other))
        compiled.bind_handle("state", np.zeros((T, D), F))
        array = first["x"].copy()
        call = {
            "run": lambda: compiled.run({"x": array}), "run_slots": lambda: compiled.run_slots([array]),
            "bound": compiled.bound([array]), "call": lambda: compiled(array),
            "queued": lambda: compiled.commit_no_wait({"x": array}),
            "run_raw": lambda: compiled.run_raw({"x": array}), "pipelined": lambda: compiled.run_pipelined([{"x": array}]),
        }[form]  # fmt: skip
        compiled.enable_moe_topk_capture(1)
        call()
        compiled.sync_pending()
        array[...] = second["x"]
        for _ in range(3):
            call()
        compiled.sync_pending()
        found = compiled.take_moe_topk_capture()
    for ids, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ids, want[:, :1])


def test_capture_says_when_there_is_nothing_to_take() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    with pytest.raises(BindingError, match="no capture is enabled"):
        compiled.take_moe_topk_capture()
    compiled.run(inputs(1)[0])
    compiled.enable_moe_topk_capture(K)
    with pytest.raises(BindingError, match="has not run since"):
        compiled.take_moe_topk_capture()
    compiled.run(inputs(1)[0])
    twin = compiled.clone()
    compiled.take_moe_topk_capture()
    for c in (compiled, twin):
        with pytest.raises(BindingError, match="no capture is enabled"):
            c.take_moe_topk_capture()
    for n in (0, -1, True, 1.0, "2", None):
        with pytest.raises(OptionError, match="of at least 1"):
            compiled.enable_moe_topk_capture(n)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="layer 0 chooses 2"):
        compiled.enable_moe_topk_capture(K + 1)


def test_a_run_that_failed_is_not_captured(tmp_path: Path) -> None:
    compiled = compiled_model()
    arrays = {n: mapped(a, tmp_path / n) if experts_of(n) else a for n, a in weights(compiled).items()}
    compiled.set_params(arrays)
    first, second = inputs(2)
    expected = chosen(compiled, second)
    compiled.bind_handle("state", np.zeros((T, D), F))
    compiled.set_moe_resident_experts([False] * E)
    compiled.enable_moe_topk_capture(K)
    os.rename(tmp_path / "l0.down", tmp_path / "away")
    with pytest.raises(CorruptFileError):
        compiled.run(first)
    os.rename(tmp_path / "away", tmp_path / "l0.down")
    compiled.run(second)
    for ids, want in zip(compiled.take_moe_topk_capture(), expected, strict=True):
        np.testing.assert_array_equal(ids, want)


def test_a_captured_run_allocates_nothing() -> None:
    compiled = compiled_model()
    compiled.set_params(weights(compiled))
    call = compiled.bound([inputs(1)[0]["x"]])

    def captured() -> None:
        call()

    captured()
    compiled.enable_moe_topk_capture(K)
    captured()
    check_allocates_nothing(compiled, captured, 100)
    compiled.take_moe_topk_capture()


# -- sections of kernels


def test_a_section_packs_one_expert_with_the_bits_of_the_whole() -> None:
    for form in ("f32", "bf16", "q4_0"):
        compiled = compiled_model(form, threads=1)
        arrays = weights(compiled, form)
        compiled.set_params(arrays)
        for part in (part for layer in compiled.expert_tiers().layers for part in layer.parts.values()):
            rows = arrays[part.param]
            for e in (0, 3, E - 1):
                whole = part.held(e).copy()
                part.held(e)[:] = 0xAA
                part.fill(e, rows[e * (len(rows) // E) : (e + 1) * (len(rows) // E)])
                np.testing.assert_array_equal(part.held(e), whole)

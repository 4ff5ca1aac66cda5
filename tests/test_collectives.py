"""Collectives over ranks that are threads and ranks that are processes (tests/conformance.py holds what all must do), their
compiled reductions, schedules, and the choice of an algorithm. `--collectives 10000`: so many random ones over each transport."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import threading
import time
from typing import Any

import conformance
import ml_dtypes
import numpy as np
import pytest
import ranks
from conformance import HEAP, on_threads, reduced, same_bits

from rlx import knobs
from rlx.driver import ReduceKind, SymmetricBuffer, all_reduce, barrier, broadcast, collective, reduce_code
from rlx.driver.collective import collectives_of
from rlx.driver.reduction import Form
from rlx.driver.schedule import ALGORITHMS, MINE, OUT, Figures, Job, What, choose, possible, schedule
from rlx.driver.symmetric import LocalTransport
from rlx.errors import OutOfMemoryError, TransportError
from rlx.ir.dtype import DTYPES, bf16, f8e4m3, f8e5m2, f16, f32, f64, i64, u64

REDUCED = conformance.REDUCED
SUM, MEAN, MAX, MIN = ReduceKind


def raise_first(found: list[Any]) -> list[Any]:
    for x in found:
        if isinstance(x, BaseException) and "left" not in str(x):
            raise x
    return found


def conforms(transport: Any, count: int, seed: int, folder: str) -> bool:
    """In a process of its own, with compiled code from `folder`."""
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=folder):
        conformance.conform(transport, count, seed)
    return True


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A folder for compiled reductions: each process would make them again."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_heaps_that_no_memory_holds_are_refused(nbytes):
    with pytest.raises(OutOfMemoryError, match="there is no room for"):
        LocalTransport.fan_out(1, nbytes)


SHARE = {1: 0.05, 2: 0.35, 3: 0.25, 4: 0.25, 8: 0.1}  # of the random collectives, by number of ranks


@pytest.mark.parametrize("n", SHARE)
def test_threads_conform(n, request):
    count = round(request.config.getoption("--collectives") * SHARE[n])
    raise_first(on_threads(n, lambda t: conformance.conform(t, count, n)))


@pytest.mark.parametrize("n", SHARE)
def test_processes_conform(n, request, kept):
    count = round(request.config.getoption("--collectives") * SHARE[n])
    seed = 100  # of all, so that most reductions are there when there are many ranks
    assert ranks.run(n, conforms, count, seed, kept, heap_size=HEAP) == [True] * n


class Plain:
    """A transport whose other heaps cannot be seen: put and get only."""

    def __init__(self, inner: LocalTransport) -> None:
        self.num_ranks, self.this_rank, self.heap_size, self.timeout = inner.num_ranks, inner.this_rank, inner.heap_size, 30.0
        self.put, self.get, self.barrier, self.close = inner.put, inner.get, inner.barrier, inner.close


@pytest.mark.parametrize("n", [2, 5])
def test_transports_without_shared_memory_conform(n):
    raise_first(on_threads(n, lambda t: conformance.conform(Plain(t), 60, 200 + n)))


# -- the same bits, whatever the way -------------------------------------------------------------------------------


def every_way(transport: Any, count: int, dtype: Any) -> list[bytes]:
    """Results of all algorithms, twice."""
    found = []
    for way in (*possible(Job(What.ALL_REDUCE, transport.num_ranks, 0, count, dtype.itemsize, 4)), None) * 2:
        x = (np.random.default_rng(transport.this_rank.index).standard_normal(count) * 100).astype(dtype)
        all_reduce(transport, SymmetricBuffer(transport.this_rank, 64, x.nbytes), x, SUM, way)
        found.append(x.tobytes())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_algorithm_gives_the_same_bits_on_every_rank_in_every_run(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    runs = [every for n in (5,) for every in raise_first(on_threads(n, lambda t: every_way(t, 50_001, dtype)))]
    runs += ranks.run(5, every_way, 50_001, dtype, heap_size=HEAP)
    assert len(runs[0]) == 8 and len({bits for run in runs for bits in run}) == 1


# -- the compiled reductions ---------------------------------------------------------------------------------------


def operand(dtype: Any, count: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits, and numbers of all sizes."""
    raw = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype.numpy)
    if dtype.is_int:
        return raw
    with np.errstate(all="ignore"):
        numbers = (rng.standard_normal(count) * 10.0 ** rng.integers(-12, 12, count)).astype(dtype.numpy)
    return np.where(rng.random(count) < 0.5, raw, numbers)


def compiled(form: Form, sources: list[np.ndarray], shift: int = 0) -> np.ndarray:
    """By the compiled function, on memory that is not aligned, with poison around the result."""
    count, wide = sources[-1].size, collective.accumulator(form.dtype)
    goal = (wide if form.carries else form.dtype).numpy
    out = np.full(count * goal.itemsize + 128, 0xA5, np.uint8)
    table = (ctypes.c_void_p * len(sources))(*(s.ctypes.data for s in sources))
    reduce_code.function(form)(out.ctypes.data + 64 + shift, ctypes.addressof(table), len(sources), count, form.ranks)
    size = count * goal.itemsize
    assert (out[: 64 + shift] == 0xA5).all() and (out[64 + shift + size :] == 0xA5).all()
    return out[64 + shift : 64 + shift + size].view(goal)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reductions(dtype):
    rng = np.random.default_rng(1)
    for kind, n, count in itertools.product(ReduceKind, (1, 2, 3, 7), (0, 1, 5, 31, 64, 67, 401)):
        sources = [operand(dtype, count, rng) for _ in range(n)]
        form = Form(kind, dtype, n)
        assert same_bits(compiled(form, sources, count % 3), reduced(kind, sources)), (form, count)


@pytest.mark.parametrize("dtype", [f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, u64, DTYPES["i8"]], ids=str)
@pytest.mark.parametrize("kind", ReduceKind)
def test_reductions_in_links_of_a_chain(dtype, kind):
    rng = np.random.default_rng(2)
    sources = [operand(dtype, 133, rng) for _ in range(4)]
    carried = compiled(Form(kind, dtype, 4, False, True), sources[:1])
    for source in sources[1:3]:
        carried = compiled(Form(kind, dtype, 4, True, True), [carried, source])
    found = compiled(Form(kind, dtype, 4, True, False), [carried, sources[3]])
    assert same_bits(found, reduced(kind, sources))


@pytest.mark.parametrize("dtype", [f8e4m3, f8e5m2], ids=str)
def test_eight_bit_floats_round_as_ml_dtypes_does(dtype):
    every = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    values = np.sort(every[np.isfinite(every.astype(np.float32))].astype(np.float32))
    halves = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf), values * 1.01, values * 40])
    x = np.concatenate([x, np.float32([np.nan, np.inf, -np.inf, 464, 480, 61440, 1e30, 1e-30, -1e-30, 0.0, -0.0])])
    with np.errstate(all="ignore"):
        wanted = x.astype(dtype.numpy)
    assert same_bits(compiled(Form(SUM, dtype, 1, True, False), [x, np.full(x.size, -0.0).astype(dtype.numpy)]), wanted)
    assert same_bits(compiled(Form(SUM, dtype, 1, False, True), [every]), every.astype(np.float32))


def test_order_and_rounding_are_what_is_promised():
    """The sum of f16 values is rounded once, at the end; of f32 values it is taken from left to right."""
    ones = [np.full(3, v, np.float16) for v in (2048, 1, 1, 1)]  # f16 alone would stay at 2048
    assert (compiled(Form(SUM, f16, 4), ones) == 2052).all()  # 2051, halfway between 2050 and 2052
    big = [np.full(3, v, np.float32) for v in (1e8, 1, -1e8)]
    assert (compiled(Form(SUM, f32, 3), big) == 0).all() and (compiled(Form(SUM, f32, 3), big[::2] + big[1:2]) == 1).all()
    assert compiled(Form(MEAN, DTYPES["i8"], 2), [np.int8([-100, 127]), np.int8([-101, 126])]).tolist() == [-100, 126]
    zeros = [np.float32([0.0, -0.0]), np.float32([-0.0, 0.0])]
    assert np.signbit(compiled(Form(MAX, f32, 2), zeros)).tolist() == [False, True]
    assert np.isnan(compiled(Form(MIN, f32, 2), [np.float32([np.nan, 1]), np.float32([1, np.nan])])).all()


# -- schedules and the choice --------------------------------------------------------------------------------------


def jobs() -> list[Job]:
    sizes = (0, 1, 2, 63, 64, 65, 1000, 4096, 70_001)
    return [
        Job(what, n, 0, count // n * n if what in (What.REDUCE_SCATTER, What.ALL_TO_ALL) else count, itemsize, wide, n - 1, where)
        for what in What for n in (1, 2, 3, 8) for count in sizes for itemsize, wide in ((1, 4), (4, 4), (8, 8))
        for where in (False, True)
    ]  # fmt: skip


def test_no_schedule_leaves_the_scratch_or_writes_where_others_read():
    """Between two barriers nothing is written that another rank reads or writes; ranks have equally many barriers."""
    for job in jobs():
        for way in possible(job):
            every = [list(ALGORITHMS[way](Job(**{**vars(job), "me": me}), 4096)) for me in range(job.ranks)]
            assert len({sum(s.op == "barrier" for s in steps) for steps in every}) == 1
            spans: list[list[tuple[int, int, int, int, bool]]] = [[]]  # of each phase: rank, heap, first, end, writes
            for me, steps in enumerate(every):
                phase = 0
                for step in steps:
                    if step.op == "barrier":
                        phase += 1
                        spans += [[]] if phase == len(spans) else []
                        continue
                    wide = step.nbytes // job.itemsize * job.wide
                    places = [(step.out, wide if step.op == "carry" else step.nbytes, True)]
                    places += [(s, wide if step.carried and not i else step.nbytes, False) for i, s in enumerate(step.sources)]
                    for place, size, writes in places:
                        heap = place.where if place.where >= 0 or not (job.in_place and place.where == MINE) else me
                        if place.where == OUT or heap < 0:
                            continue
                        assert place.at >= 0 and place.at + size <= job.nbytes, (way, job, step)
                        assert not writes or heap == me, "a rank writes to another's heap"
                        spans[phase].append((me, heap, place.at, place.at + size, writes))
            for phase_spans in spans if job.nbytes <= 300_000 else ():
                written = [s for s in phase_spans if s[4]]
                for a, b in itertools.product(written, phase_spans):
                    assert a[0] == b[0] or a[1] != b[1] or a[2] >= b[3] or b[2] >= a[3], (way, job, a, b)


def test_nothing_of_the_callers_is_written_before_the_first_barrier():
    for job in jobs():
        for way in possible(job):
            for step in schedule(job, way, shared=True):
                if step.op == "barrier":
                    break
                assert step.out.where == job.me


def test_the_choice_follows_the_figures():
    late_at_barriers, slow_links = Figures(1e-3, 1e-4, 1e-10, 1e-10), Figures(1e-6, 1e-6, 1e-9, 1e-9)
    near_only = Figures(1e-6, 1e-6, 1e-9, 1e-7)  # a bottleneck between halves

    def chosen(figures: Figures, nbytes: int, n: int = 8, what: What = What.ALL_REDUCE) -> str:
        return choose(Job(what, n, 0, nbytes // 4, 4, 4), figures, False)

    assert chosen(late_at_barriers, 10_000) == "one_shot"
    assert chosen(slow_links, 64 << 20) == "two_shot" and chosen(slow_links, 1 << 10) == "one_shot"
    assert chosen(near_only, 64 << 20) == "ring"
    assert (
        chosen(slow_links, 1 << 10, 64, What.BROADCAST) == "tree"
        and chosen(slow_links, 64 << 20, 8, What.BROADCAST) == "two_shot"
    )


def test_ranks_choose_by_the_figures_of_rank_0():
    def figures(t: Any) -> Figures:
        x = np.zeros(100_000, np.float32)
        all_reduce(t, SymmetricBuffer(t.this_rank, 0, x.nbytes), x, SUM)
        return collectives_of(t).figures

    found = raise_first(on_threads(3, figures))
    assert len(set(found)) == 1 and min(found[0].barrier, found[0].near, found[0].far) > 0


def test_words_of_a_call_have_a_place_each():
    most = {name: (1 << bits) - 1 for name, bits in barrier.DETAIL.items()}
    alone = [barrier.detail_of(**{name: value}) for name, value in most.items()]
    assert sum(alone) == barrier.detail_of(**most) < 1 << 63
    assert [word.bit_count() for word in alone] == [barrier.DETAIL[name] for name in most]
    assert len(ALGORITHMS) < 1 << barrier.DETAIL["way"] and len(DTYPES) < 1 << barrier.DETAIL["dtype"]
    for wrong in ({"way": 16}, {"root": -1}, {"else": 0}):
        with pytest.raises(AssertionError):
            barrier.detail_of(**wrong)


# -- what goes wrong -----------------------------------------------------------------------------------------------


def fails_at_the_third(transport: Any, by: str) -> str:
    """Rank 1 does not come to the third of equal calls."""
    me, x = transport.this_rank.index, np.ones(8, np.float32)
    scratch = SymmetricBuffer(transport.this_rank, 0, x.nbytes)
    for i in range(5):
        if me == 1 and i == 2:
            if by == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if by == "close":
                transport.close()
                return "left"
            while not all(transport._lines[rank].fault for rank in (0, 2)):
                time.sleep(0.001)
            return "slept"
        if by == "sleep" and i == 2:
            ranks.all_ready_but(transport, 1)
            transport.timeout = 1.0
        try:
            all_reduce(transport, scratch, x, SUM)
        except TransportError as e:
            assert i == 2
            for _ in range(2):  # and nothing works any more
                with pytest.raises(TransportError, match="1"):
                    all_reduce(transport, scratch, x, SUM)
            with pytest.raises(TransportError, match="1"):
                broadcast(transport, SymmetricBuffer(transport.this_rank, 64, 32), x, 0)
            return str(e)
    return "no error"


@pytest.mark.parametrize("by,word", [("kill", "died"), ("close", "left"), ("sleep", "did not come")])
def test_a_rank_that_fails_is_named_by_all_others(by, word):
    found = ranks.start(3, fails_at_the_third, by, timeout=60.0).outcomes()
    assert all(re.match(rf"rank 1 .*{word}", str(found[rank])) for rank in (0, 2)), found


@pytest.mark.parametrize("call", ["barrier", "all_reduce"])
def test_a_thread_that_is_interrupted_in_a_call_has_left(call):
    first, second = LocalTransport.fan_out(2, HEAP)
    x = np.ones(8, np.float32)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def when_it_waits(caller: int) -> None:
        while True:
            with first._barrier.condition:  # the caller waits for it, or has not come yet
                if first._barrier.calls[0] is not None:
                    return signal.pthread_kill(caller, signal.SIGALRM)
            time.sleep(0.001)

    before = signal.signal(signal.SIGALRM, interrupt)
    other = threading.Thread(target=when_it_waits, args=(threading.get_ident(),))
    try:
        with pytest.raises(KeyboardInterrupt):
            other.start()
            first.barrier() if call == "barrier" else all_reduce(first, SymmetricBuffer(first.this_rank, 0, 32), x)
    finally:
        other.join()
        signal.signal(signal.SIGALRM, before)
    for t in (second, first):
        with pytest.raises(TransportError, match="rank 0 left"):
            all_reduce(t, SymmetricBuffer(t.this_rank, 0, 32), x)


def test_a_thread_that_fails_is_named_by_all_others():
    def act(t: Any) -> None:
        x = np.ones(8, np.float32)
        for i in range(3):
            if t.this_rank.index == 1 and i == 2:
                raise RuntimeError("of its own")
            all_reduce(t, SymmetricBuffer(t.this_rank, 0, 32), x, SUM)

    found = on_threads(3, act)
    assert isinstance(found[1], RuntimeError)
    assert all(isinstance(found[r], TransportError) and "rank 1 left" in str(found[r]) for r in (0, 2))

"""The duties of every transport, as plain functions of one rank's transport; all ranks call the same ones.

    python -m tests.conformance --device cpu                          # a device instead: see device_conformance
    python -m tests.conformance --count 1000                          # threads of one process, 2 to 8 ranks
    mpirun -n 4 python -m tests.conformance --transport mpi --count 1000
    rlx launch -n 4 tests/conformance.py --transport shm

Every rank makes the operands of all ranks from a seed, so each one checks its own result, bit for bit, against numpy.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.driver import ReduceKind, SymmetricBuffer, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from rlx.driver.barrier import PLAIN, Call
from rlx.driver.symmetric import LocalTransport, SharedMemory
from rlx.errors import CallMismatchError, HeapBoundsError, UnknownRankError
from rlx.ir.dtype import DTYPES

HEAP = 3 << 20
REDUCED = [d for d in DTYPES.values() if d.kind in "fiu"]
SIZES = (0, 1, 1, 2, 3, 5, 7, 16, 31, 33, 64, 100, 127, 255, 1000, 1023, 1025, 2048, 4096, 4097, 20_000)


# -- the oracle ----------------------------------------------------------------------------------------------------


def reduced(kind: ReduceKind, arrays: list[np.ndarray]) -> np.ndarray:
    """In rank order; narrow floats in f32, integers in 64 bits."""
    dtype = arrays[0].dtype
    is_float = dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))
    wide = np.dtype({"i": "i8", "u": "u8"}.get(dtype.kind, "f8" if dtype == np.float64 else "f4"))
    with np.errstate(all="ignore"):
        xs = [a.astype(wide) for a in arrays]
        if kind in (ReduceKind.MAX, ReduceKind.MIN):
            better = np.greater if kind == ReduceKind.MAX else np.less
            total = functools.reduce(lambda a, b: np.where(np.isnan(b) | better(b, a), b, a), xs)
        else:
            total = functools.reduce(np.add, xs)
            if kind == ReduceKind.MEAN and is_float:
                total = total / wide.type(len(xs))
            elif kind == ReduceKind.MEAN:
                whole = [abs(int(t)) // len(xs) * (1 if t >= 0 else -1) for t in total.ravel()]
                total = np.array(whole, wide).reshape(total.shape)
        return total.astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Any NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    with np.errstate(all="ignore"):
        nan = (a != a) & (b != b)
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, x.itemsize) for x in (a, b)]
    return bool(((raw[0] == raw[1]).all(axis=1) | nan.reshape(-1)).all())


# -- random collectives --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    what: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    kind: ReduceKind
    root: int
    algorithm: str | None
    in_place: bool  # the array is the scratch
    seed: tuple[int, ...]

    def operand(self, rank: int) -> np.ndarray:
        rng = np.random.default_rng((*self.seed, rank))
        size = int(np.prod(self.shape))
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype.numpy)
            return rng.integers(limits.min, limits.max, size, self.dtype.numpy, endpoint=True).reshape(self.shape)
        if self.dtype.kind == "b":
            return rng.integers(0, 2, self.shape).astype(bool)
        x = rng.standard_normal(size, np.float32) * np.float32(10.0) ** rng.integers(-3, 4)
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-8, -1e-40, 448, 65504, 3e38], np.float32)
        where = rng.random(size) < (0.1 if rng.random() < 0.3 else 0)
        with np.errstate(all="ignore"):
            return np.where(where, rng.choice(odd, size), x).astype(self.dtype.numpy).reshape(self.shape)


def random_case(seed: int, number: int, ranks: int, heap: int, shared: bool) -> Case:
    rng = np.random.default_rng((seed, number))
    what = str(rng.choice(["all_reduce"] * 4 + ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]))
    dtype = rng.choice(REDUCED if "reduce" in what else list(DTYPES.values()))
    count = int(rng.choice(SIZES))
    if rng.random() < 0.02:  # in several pieces
        count = int(rng.integers(1, heap // dtype.itemsize + 1))
    count = min(count, heap // dtype.itemsize)
    shape: tuple[int, ...] = (count,) if rng.random() < 0.8 or count % 3 else (count // 3, 3)
    if what in ("reduce_scatter", "all_to_all"):
        shape = (shape[0] // ranks * ranks, *shape[1:])
    elif count == 1 and rng.random() < 0.5:
        shape = ()
    nbytes = int(np.prod(shape)) * dtype.itemsize
    offset = int(rng.integers(0, heap - nbytes + 1)) if rng.random() < 0.5 else 0
    in_place = bool(shared and rng.random() < 0.15 and nbytes)
    if in_place:
        offset = offset // 64 * 64
    ways: list[str | None] = [None, None, "one_shot"]
    if what == "all_reduce":
        ways = [None, "two_shot"] if in_place else [*ways, "two_shot"]
        if not in_place and count > 64 and ranks > 1:
            ways.append("ring")
    elif what == "broadcast":
        ways += ["two_shot", "tree"]
    algorithm = ways[int(rng.integers(len(ways)))] if what in ("all_reduce", "broadcast") else None
    kind = list(ReduceKind)[int(rng.integers(4))]
    return Case(what, dtype, shape, offset, kind, int(rng.integers(ranks)), algorithm, in_place, (seed, number))


def result_of(case: Case, transport: Any) -> np.ndarray:
    """The result on this rank."""
    me, mine = transport.this_rank, case.operand(transport.this_rank.index)
    scratch = SymmetricBuffer(me, case.offset, mine.nbytes)
    if case.in_place:
        view = transport.heap.view(scratch, mine.dtype, mine.shape)
        view[...] = mine
        mine = view
    if case.what == "all_reduce":
        all_reduce(transport, scratch, mine, case.kind, case.algorithm)  # pyright: ignore
    elif case.what == "broadcast":
        broadcast(transport, scratch, mine, case.root, case.algorithm)  # pyright: ignore
    elif case.what == "reduce_scatter":
        return reduce_scatter(transport, scratch, mine, case.kind)
    else:
        out = None
        if case.seed[-1] % 2:
            dims = case.shape if case.what == "all_to_all" else (transport.num_ranks, *case.shape)
            out = np.full(dims, 7, mine.dtype) if mine.dtype.kind != "b" else np.ones(dims, bool)
        given = {"all_gather": all_gather, "all_to_all": all_to_all}[case.what](transport, scratch, mine, out)
        assert out is None or given is out
        assert case.in_place or same_bits(mine, case.operand(me.index)), f"{case}: the operand has changed"
        return given
    return mine.copy()


def expected(case: Case, rank: int, ranks: int) -> np.ndarray:
    xs = [case.operand(r) for r in range(ranks)]
    if case.what == "all_gather":
        return np.stack(xs)
    if case.what == "broadcast":
        return xs[case.root]
    if case.what == "all_to_all":
        return np.concatenate([np.split(x, ranks)[rank] for x in xs])
    total = reduced(case.kind, xs)
    return total if case.what == "all_reduce" else np.split(total, ranks)[rank]


def run_case(case: Case, transport: Any) -> None:
    found = result_of(case, transport)
    wanted = expected(case, transport.this_rank.index, transport.num_ranks)
    if not same_bits(found, wanted):
        at = [i for i, (a, b) in enumerate(zip(found.reshape(-1), wanted.reshape(-1))) if not same_bits(a, b)][:5]
        pairs = [(i, found.reshape(-1)[i], wanted.reshape(-1)[i]) for i in at]
        who = f"rank {transport.this_rank.index} of {transport.num_ranks}"
        raise AssertionError(f"{case}, {who}: (at, got, expected) {pairs}")


def random_collectives(transport: Any, count: int = 100, seed: int = 0) -> None:
    """`count` random collectives against numpy."""
    for number in range(count):
        run_case(random_case(seed, number, transport.num_ranks, transport.heap_size, hasattr(transport, "heap")), transport)


# -- what must not work --------------------------------------------------------------------------------------------


def refused(error: type[Exception], act: Callable[[], object], *words: str) -> None:
    try:
        act()
    except error as e:
        assert all(w in str(e) for w in words), f"{e!r} does not say {words}"
        return
    raise AssertionError(f"no {error.__name__}")


def bad_calls(transport: Any) -> None:
    """Calls that are wrong in themselves are refused at once, on this rank alone; then things go on."""
    me, heap = transport.this_rank, transport.heap_size
    x, parts = np.ones(16, np.float32), np.ones(transport.num_ranks, np.float32)
    place = functools.partial(SymmetricBuffer, me)
    SUM = ReduceKind.SUM
    refused(HeapBoundsError, lambda: all_reduce(transport, place(heap - 63, 64), x, SUM), str(heap))
    refused(HeapBoundsError, lambda: all_reduce(transport, place(-1, 64), x, SUM))
    large = np.ones(heap // 4 + 1, np.float32)
    refused(HeapBoundsError, lambda: all_reduce(transport, place(0, large.nbytes), large, SUM))
    refused(UnknownRankError, lambda: all_reduce(transport, SymmetricBuffer(type(me)(99), 0, 64), x, SUM), "99")
    refused(UnknownRankError, lambda: broadcast(transport, place(0, 64), x, transport.num_ranks), str(transport.num_ranks))
    wrong: list[tuple[Any, str]] = [
        (lambda: all_reduce(transport, place(0, 60), x, SUM), "60"),
        (lambda: all_reduce(transport, place(0, 64), np.ones((8, 4), np.float32)[:, ::2], SUM), "contiguous"),
        (lambda: all_reduce(transport, place(0, 64), [1.0] * 16, SUM), "list"),  # pyright: ignore
        (lambda: all_reduce(transport, place(0, 16), np.ones(16, bool), SUM), "bool"),
        (lambda: all_reduce(transport, place(0, 128), np.ones(16, np.complex64), SUM), "c64"),
        (lambda: all_reduce(transport, place(0, 64), x, "sum"), "SUM"),  # pyright: ignore
        (lambda: all_reduce(transport, place(0, 64), x, SUM, "best"), "one_shot"),  # pyright: ignore
        (lambda: all_reduce(transport, place(0, 64), np.frombuffer(bytes(64), np.float32), SUM), "read-only"),
        (lambda: all_gather(transport, place(0, 64), x, np.ones(16, np.float32)), "16"),
        (lambda: all_to_all(transport, place(0, parts.nbytes), parts, parts), "operand"),
        (lambda: reduce_scatter(transport, place(0, 4), np.ones((), np.float32), SUM), "first dim"),
    ]
    masked, matrix = np.ma.masked_array(x, x > 0), x.reshape(4, 4).view(np.matrix)
    wrong += [
        (lambda: all_reduce(transport, place(0, 64), masked, SUM), "MaskedArray"),
        (lambda: broadcast(transport, place(0, 64), matrix), "matrix"),
        (lambda: all_gather(transport, place(0, 64), masked), "MaskedArray"),
        (lambda: all_gather(transport, place(0, 64), x, np.ma.zeros((transport.num_ranks, 16), np.float32)), "out"),
        (lambda: all_to_all(transport, place(0, 64), [[1.0], [1.0, 2.0]]), "list"),  # pyright: ignore
        (lambda: all_reduce(transport, place(0, 64), x, SUM, ["ring"]), "ring"),  # pyright: ignore
        (lambda: broadcast(transport, place(0, 64), x, 0, {}), "tree"),  # pyright: ignore
    ]
    if transport.num_ranks > 1:
        theirs = place(0, 64).on(type(me)((me.index + 1) % transport.num_ranks))
        wrong += [
            (lambda: all_reduce(transport, theirs, x, SUM), "own heap"),
            (lambda: broadcast(transport, theirs, x), "own heap"),
            (lambda: all_gather(transport, theirs, x), "own heap"),
        ]
    if isinstance(transport, SharedMemory):
        wrong += list(_over_scratch(transport))
    for act, word in wrong:
        refused(CallMismatchError, act, word)
    for root in ("a", 0.0, None, [0], type(me)("a")):  # pyright: ignore
        refused(UnknownRankError, lambda root=root: broadcast(transport, place(0, 64), x, root), "root")  # pyright: ignore
    frozen = np.frombuffer(bytes(8), np.uint8)
    copies: list[tuple[Callable[[], object], str]] = [
        (lambda: transport.put(place(0, 8), np.ones(9, np.uint8)), "9 bytes"),
        (lambda: transport.put(place(0, 8), np.array([None])), "object"),
        (lambda: transport.get(place(0, 8), frozen), "read-only"),
        (lambda: transport.get(place(0, 8), np.ones(16, np.uint8)[::2]), "strides"),
        (lambda: transport.barrier(None), "Call"),
    ]
    for act, word in copies:
        refused(CallMismatchError, act, word)
    assert place(np.int16(32500), np.int16(1000)) == place(32500, 1000), "the sum of these would overflow"
    refused(HeapBoundsError, lambda: place(0.5, 8), "0.5")
    assert (x == 1).all()
    transport.barrier()


def _over_scratch(transport: Any) -> Iterator[tuple[Callable[[], object], str]]:
    """Arrays and results that lie over a part of any rank's scratch, or over that of another one."""
    me, n, view = transport.this_rank.index, transport.num_ranks, transport.heap.view
    for nbytes in (64, 1 << 16):
        scratch, x = SymmetricBuffer(transport.this_rank, 4096, nbytes), np.ones(nbytes // 4, np.float32)
        for r in range(n):
            for shift in (0, 4 - nbytes, -4, 8, nbytes - 4):
                at = SymmetricBuffer(type(transport.this_rank)(r), 4096 + shift, nbytes)
                if (r == me and not shift) or at.offset < 0:
                    continue  # an array may be the scratch itself
                y = view(at, np.float32)
                yield lambda y=y, s=scratch: all_reduce(transport, s, y, ReduceKind.MAX), "scratch"
                yield lambda y=y, s=scratch: all_reduce(transport, s, y, ReduceKind.MAX, "one_shot"), "scratch"
                yield lambda y=y, s=scratch: broadcast(transport, s, y, 0), "scratch"
                yield lambda y=y, s=scratch: all_gather(transport, s, y), "scratch"
            out = view(SymmetricBuffer(type(transport.this_rank)(r), 4096, n * nbytes), np.float32, (n, nbytes // 4))
            yield lambda o=out, s=scratch, x=x: all_gather(transport, s, x, o), "scratch"


def mismatches(transport: Any) -> None:
    """Ranks that do not do the same all hear of it, no array has changed, and the next call works."""
    SUM, MAX = ReduceKind.SUM, ReduceKind.MAX
    me, last = transport.this_rank, transport.this_rank.index == transport.num_ranks - 1

    def place(x: np.ndarray, at: int = 0) -> SymmetricBuffer:
        return SymmetricBuffer(me, at, x.nbytes)

    def disagreements() -> Iterator[tuple[Callable[[], object], np.ndarray, str, str]]:
        """A call that differs on the last rank, its array, and how the error describes the call of the others and of the last."""
        for size in (16, 1 << 15):
            x = np.full(size, me.index, np.float32)
            short = x[:-1]
            other = x.view(np.int32)
            usual = f"all_reduce of f32[{size}], SUM, scratch at byte 0"
            yield lambda x=x: all_reduce(transport, place(x), x, MAX if last else SUM), x, usual, usual.replace("SUM", "MAX")
            yield (
                lambda x=x, y=short: all_reduce(transport, place(y if last else x), y if last else x, SUM), x,
                usual, usual.replace(f"[{size}]", f"[{size - 1}]"),
            )  # fmt: skip
            yield (
                lambda x=x, y=other: all_reduce(transport, place(x), y if last else x, SUM),
                x,
                usual,
                usual.replace("f32", "i32"),
            )
            moved = usual.replace("byte 0", "byte 4")
            yield lambda x=x: all_reduce(transport, place(x, 4 if last else 0), x, SUM), x, usual, moved
            one, two = (f"{usual}, algorithm '{way}_shot'" for way in ("one", "two"))
            yield lambda x=x: all_reduce(transport, place(x), x, SUM, "two_shot" if last else "one_shot"), x, one, two
            ring = f"{usual}, algorithm 'ring'"
            yield lambda x=x: all_reduce(transport, place(x), x, SUM, "ring" if last else None), x, usual, ring
            roots = [f"broadcast of f32[{size}], root {r}, scratch at byte 0" for r in (0, 1)]
            yield lambda x=x: broadcast(transport, place(x), x, int(last)), x, *roots
            yield (
                lambda x=x: broadcast(transport, place(x), x, 0) if last else all_reduce(transport, place(x), x, SUM), x,
                usual, roots[0],
            )  # fmt: skip
            yield lambda x=x: transport.barrier(Call(77) if last else PLAIN), x, "barrier()", "Call(77, 0, 0, 0)"
            yield lambda x=x: transport.barrier() if last else all_reduce(transport, place(x), x, SUM), x, usual, "barrier()"

    ranks = [", ".join(map(str, range(transport.num_ranks - 1))), transport.num_ranks - 1]
    for act, x, *calls in disagreements():
        before = x.copy()
        said = "; ".join(f"rank {rank}: {call}" for rank, call in zip(ranks, calls))
        refused(CallMismatchError, act, f"ranks disagree on the call. {said}")
        assert same_bits(x, before)
        y = np.full(5, me.index + 1, np.int32)
        all_reduce(transport, place(y, 8), y, ReduceKind.SUM)
        assert (y == sum(range(1, transport.num_ranks + 1))).all()


def prepared_calls_disagree(transport: Any) -> None:
    """The same of calls that were made before, and may be known to machine code."""
    last = transport.this_rank.index == transport.num_ranks - 1
    x, y = np.ones(64, np.float32), np.ones(64, np.int32)
    scratch = SymmetricBuffer(transport.this_rank, 0, 256)
    calls = [(x, ReduceKind.SUM), (x, ReduceKind.MAX), (y, ReduceKind.MIN)]
    for _ in range(3):
        for array, kind in calls:
            all_reduce(transport, scratch, array, kind)
    before = x.copy(), y.copy()
    for mine, theirs in ((0, 1), (1, 2), (2, 0)):
        array, kind = calls[theirs if last else mine]
        refused(CallMismatchError, lambda a=array, k=kind: all_reduce(transport, scratch, a, k), "disagree")
        assert same_bits(x, before[0]) and same_bits(y, before[1])
        all_reduce(transport, scratch, x, ReduceKind.MAX)
    assert same_bits(x, before[0])


def repeated(transport: Any) -> None:
    """The same call again and again, by turns with others: what was prepared for it is used, and stays right."""
    me, n = transport.this_rank.index, transport.num_ranks
    x, y, large = np.empty(100, np.float32), np.empty((2, 3), np.int64), np.empty(100_000, np.float32)
    bx, by, bl = (SymmetricBuffer(transport.this_rank, 0, a.nbytes) for a in (x, y, large))
    for i in range(50):
        x[...] = np.arange(100) * (me + 1) + i
        all_reduce(transport, bx, x, ReduceKind.SUM)
        assert (x == np.arange(100, dtype=np.float32) * (n * (n + 1) // 2) + i * n).all()
        y[...] = (me * 7 + i) % 5
        all_reduce(transport, by, y, ReduceKind.MAX)
        assert (y == max((r * 7 + i) % 5 for r in range(n))).all()
        if i % 10 == 0:
            large[...] = me + i
            all_reduce(transport, bl, large, ReduceKind.MEAN)
            assert (large == np.float32(sum(r + i for r in range(n))) / np.float32(n)).all()
            fresh = np.full(100, me, np.float32)  # other memory, the same call
            all_reduce(transport, SymmetricBuffer(transport.this_rank, 0, fresh.nbytes), fresh, ReduceKind.MIN)
            assert (fresh == 0).all()
        if i % 7 == 0:
            transport.barrier()


def conform(transport: Any, count: int = 100, seed: int = 0) -> None:
    """The whole suite, `count` random collectives among it."""
    bad_calls(transport)
    repeated(transport)
    if transport.num_ranks > 1:
        mismatches(transport)
        prepared_calls_disagree(transport)
    random_collectives(transport, count, seed)


def on_threads(ranks: int, act: Callable[[LocalTransport], Any], heap: int = HEAP, timeout: float = 30.0) -> list[Any]:
    """`act` on each of that many ranks: what it returned or raised."""
    transports, found = LocalTransport.fan_out(ranks, heap, timeout), [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = act(transports[rank])
        except BaseException as e:  # noqa: BLE001  given to the caller
            found[rank] = e
            transports[rank].close()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def check_devices(devices: list[str], only: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # where the tests' modules find one another
    from device_conformance import conform, installed

    for text in devices:
        name, _, backend = text.partition("=")
        with installed(name, backend) if backend else nullcontext():
            conform(name, only)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--transport", default="local", choices=["local", "shm", "mpi"])
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], help="of threads")
    options.add_argument("--device", action="append", help="check this one, by name or as NAME=MODULE:CLASS, and no transport")
    options.add_argument("--only", nargs="+", default=[""], help="of a device: checks with one of these in their names")
    given = options.parse_args()
    if given.device:
        check_devices(given.device, given.only)
        return
    if given.transport == "local":
        for ranks in given.ranks:
            for found in on_threads(ranks, lambda t: conform(t, given.count // len(given.ranks), given.seed)):
                if isinstance(found, BaseException):
                    traceback.print_exception(found)
                    raise SystemExit(1)
        print(f"local, {given.ranks} ranks: {given.count} collectives conform")
        return
    if given.transport == "mpi":
        from rlx.driver.transports.mpi import MpiTransport

        transport: Any = MpiTransport(HEAP)
    else:
        from rlx.driver.launch import connect

        transport = connect(HEAP)
    conform(transport, given.count, given.seed)
    transport.barrier()
    if transport.this_rank.index == 0:
        print(f"{given.transport}, {transport.num_ranks} ranks: {given.count} collectives conform")
    transport.close()


if __name__ == "__main__":
    main()

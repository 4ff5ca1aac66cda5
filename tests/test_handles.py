"""States as objects: shared by executables, interleaved on one, forked, put back, and given back."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from devices import TWO as DEVICES

import rlx
from rlx.backends.cpu import memory
from rlx.errors import BindingError, IndexRangeError, InputShapeError, OptionError, Unsupported
from rlx.runtime import CompiledGraph, HandleStore, Session

F = np.float32
SHARED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are shared on Linux alone")


@pytest.fixture(params=DEVICES)
def session(request: pytest.FixtureRequest) -> Session:
    return Session(request.param)


def cache(tokens: int = 1, rows: int = 16, columns: int = 8) -> rlx.Graph:
    """Writes `tokens` rows at `length`, and gives sums over all rows. The same states at every number of tokens."""
    g = rlx.Graph(f"append {tokens}")
    kept = g.handle(rlx.BufferHandle("rows", (2, rows, columns), rlx.f32))
    length = g.handle(rlx.BufferHandle("length", (), rlx.i32))
    new = g.input("new", (2, tokens, columns), rlx.f32)
    grown = rlx.update_rows(kept, new, length, axis=1)
    g.assign(kept, grown, in_place=True)
    g.assign(length, length + tokens)
    g.set_outputs([rlx.sum(grown * grown, axis=1)])
    return g


def tokens(seed: int, count: int = 1, columns: int = 8) -> dict[str, np.ndarray]:
    return {"new": np.random.default_rng(seed).standard_normal((2, count, columns)).astype(F)}


def states(compiled: CompiledGraph) -> dict[str, bytes]:
    return {name: compiled.handles.read(name).tobytes() for name in compiled.handles.entries}


def read(compiled: CompiledGraph, name: str) -> np.ndarray:
    found = compiled.read_handle(name)
    assert found is not None
    return found


# -- sharing and interleaving


def test_executables_on_one_store_see_each_others_states(session: Session) -> None:
    prefill = session.compile(cache(tokens=5))
    decode = session.compile(cache(), handles=prefill.handles)
    alone = session.compile(cache())
    assert decode.handles is prefill.handles and alone.handles is not prefill.handles
    chunk = tokens(0, 5)
    prefill.run(chunk)
    assert int(read(decode, "length")) == 5
    for i in range(5):
        alone.run({"new": np.ascontiguousarray(chunk["new"][:, i : i + 1])})
    for i in range(6):
        assert decode.run(tokens(i))[0].tobytes() == alone.run(tokens(i))[0].tobytes()
    prefill.run(tokens(9, 5))
    assert int(read(decode, "length")) == 16
    np.testing.assert_array_equal(read(decode, "rows")[:, 11:], tokens(9, 5)["new"])


def test_a_store_made_first_is_filled_by_whoever_asks(session: Session) -> None:
    store = HandleStore()
    compiled = session.compile(cache(), handles=store)
    assert compiled.handles is store and set(store.entries) == {"rows", "length"} and store.nbytes == 2 * 16 * 8 * 4 + 4
    assert not store.read("rows").any()
    assert compiled.memory_plan().regions["handles"] == store.nbytes


def test_many_states_on_one_executable_equal_executables_of_their_own(session: Session) -> None:
    one, own = session.compile(cache()), [session.compile(cache()) for _ in range(3)]
    stores = [HandleStore() for _ in own]
    order = np.random.default_rng(1).permutation(np.repeat(range(3), 16))
    for step, which in enumerate(order):
        one.use_handles(stores[which])
        assert one.run(tokens(step))[0].tobytes() == own[which].run(tokens(step))[0].tobytes()
    for store, other in zip(stores, own):
        one.use_handles(store)
        assert states(one) == states(other) and int(read(one, "length")) == 16


def test_checked_runs_and_queued_runs_use_the_current_store(session: Session) -> None:
    compiled = session.compile(cache(), rlx.CompileOptions(checked=True))
    first, second = compiled.handles, HandleStore()
    compiled.run(tokens(0))
    compiled.commit_no_wait(tokens(1))
    compiled.use_handles(second)  # after what is queued
    compiled.run(tokens(2))
    assert [int(s.read("length")) for s in (first, second)] == [2, 1]


def test_feeds_follow_the_store(session: Session) -> None:
    g = rlx.Graph("feed")
    h = g.handle(rlx.BufferHandle("h", (3,), rlx.f32))
    g.set_outputs([h + g.input("x", (3,), rlx.f32)])
    compiled = session.compile(g)
    compiled.set_gpu_handle_feed("h", 0)
    one = {"x": np.ones(3, F)}
    stores = compiled.handles, HandleStore()
    for which in (0, 1, 0, 0):
        compiled.use_handles(stores[which])
        compiled.run(one)
    assert [s.read("h").tolist() for s in stores] == [[3] * 3, [1] * 3]


def test_a_state_of_another_shape_changes_nothing(session: Session) -> None:
    compiled = session.compile(cache())
    compiled.run(tokens(0))
    before, store = states(compiled), compiled.handles
    wide = session.compile(cache(columns=9)).handles
    for refused in (
        lambda: session.compile(cache(columns=9), handles=store),
        lambda: compiled.use_handles(wide),
        lambda: compiled.restore_handles(session.compile(cache(columns=9)).snapshot_handles()),
    ):
        with pytest.raises(InputShapeError, match=r"'rows' is f32\[2,16,.\].*f32\[2,16,.\]"):
            refused()
    assert compiled.handles is store and states(compiled) == before and set(store.entries) == {"rows", "length"}
    partial = HandleStore()
    session.compile(_named("length", (4,)), handles=partial)
    with pytest.raises(InputShapeError):
        compiled.use_handles(partial)
    assert set(partial.entries) == {"length"}  # not even the other state was made
    for wrong in ({}, None):
        with pytest.raises(BindingError):
            compiled.use_handles(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        session.compile(cache(), handles={})  # type: ignore[arg-type]


def test_a_store_lies_on_one_device() -> None:
    store = Session("ref").compile(cache()).handles
    with pytest.raises(BindingError, match="another kind of device"):
        Session("cpu").compile(cache(), handles=store)
    with pytest.raises(BindingError, match="another kind of device"):
        Session("cpu").compile(cache()).restore_handles(store.snapshot())


def _named(name: str, dims: tuple[int, ...]) -> rlx.Graph:
    g = rlx.Graph("other")
    g.set_outputs([g.handle(rlx.BufferHandle(name, dims, rlx.f32)) * 2.0])
    return g


# -- forks


@pytest.mark.parametrize("columns", [8, 4096])  # 1 KB of state, and 512 KB: pages of its own
def test_forks_go_their_own_way(session: Session, columns: int) -> None:
    compiled = session.compile(cache(columns=columns))
    for i in range(3):
        compiled.run(tokens(i, columns=columns))
    parent, address = compiled.handles, compiled.handles.entries["rows"].block.address
    before = states(compiled)
    forks = compiled.fork_handles(3)
    assert states(compiled) == before and parent.entries["rows"].block.address == address
    twins = [compiled.clone() for _ in forks]
    (deeper,) = forks[1].fork()
    for i, store in enumerate(forks):
        compiled.use_handles(store)
        assert states(compiled) == before
        for step in range(5):
            got = compiled.run(tokens(10 * i + step, columns=columns))[0]
            assert got.tobytes() == twins[i].run(tokens(10 * i + step, columns=columns))[0].tobytes()
    forks += forks[1].fork(2)  # of what was written since
    twins += [twins[1].clone() for _ in range(2)]
    for i in (3, 4):
        compiled.use_handles(forks[i])
        assert states(compiled) == states(twins[i])
        compiled.run(tokens(50 + i, columns=columns))
        twins[i].run(tokens(50 + i, columns=columns))
    for store, twin in zip(forks, twins):
        compiled.use_handles(store)
        assert states(compiled) == states(twin)
    for store in (deeper, parent):
        compiled.use_handles(store)
        assert states(compiled) == before
    compiled.run(tokens(99, columns=columns))  # the parent writes: no fork sees it
    compiled.use_handles(deeper)
    assert states(compiled) == before


def test_numbers_of_forks(session: Session) -> None:
    compiled = session.compile(cache())
    assert compiled.fork_handles(0) == [] and len(compiled.fork_handles(2)) == 2
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(OptionError, match="number of forks"):
            compiled.fork_handles(wrong)  # type: ignore[arg-type]
    assert session.compile(_named("h", (0, 3))).fork_handles(1)[0].read("h").shape == (0, 3)
    (empty,) = HandleStore().fork()
    assert not empty.entries and empty.nbytes == 0


def test_random_forks_equal_copies() -> None:
    """A tree of forks, each writing here and there, beside arrays that are copied."""
    rng = np.random.default_rng(3)
    compiled = Session("cpu").compile(_named("h", (64, 1024)))  # 64 pages
    stores, arrays = [compiled.handles], [np.zeros((64, 1024), F)]
    for step in range(150):
        at = int(rng.integers(len(stores)))
        row, kind = int(rng.integers(64)), rng.integers(4)
        if kind < 2:
            rows = slice(row, row + (60 if step % 10 == 0 else 1))
            stores[at].entries["h"].array[rows] = arrays[at][rows] = step + 1
        elif kind == 2:
            made = stores[at].fork(2)
            stores += made
            arrays += [arrays[at].copy() for _ in made]
        elif len(stores) > 3:
            del stores[at], arrays[at]
        for store, array in zip(stores, arrays):
            np.testing.assert_array_equal(store.entries["h"].array, array)


def smaps(address: int) -> dict[str, int]:
    """Bytes by kind of the mappings of 64 MB from `address` on."""
    totals: dict[str, int] = {}
    inside = False
    with open("/proc/self/smaps") as f:
        for line in f:
            head = line.split()
            if "-" in head[0]:
                start, end = (int(n, 16) for n in head[0].split("-"))
                inside = start < address + BIG and end > address
            elif inside and head[-1] == "kB":
                totals[head[0][:-1]] = totals.get(head[0][:-1], 0) + int(head[1]) * 1024
    return totals


BIG = 64 << 20


@SHARED
def test_memory_is_shared_until_it_is_written() -> None:
    compiled = Session("cpu").compile(_named("h", (BIG // 4096, 1024)))
    parent = compiled.handles
    parent.entries["h"].array[...] = 1
    start = compiled.allocations()
    forks = compiled.fork_handles(4)
    addresses = [s.entries["h"].block.address for s in (parent, *forks)]
    assert len(set(addresses)) == 5
    after = compiled.allocations()
    assert after.native_count - start.native_count >= 5 and abs(after.native_live_bytes - start.native_live_bytes) < 1 << 20
    for store in forks:
        assert store.entries["h"].array.sum(dtype=np.float64) == BIG // 4  # every page is read
    assert sum(smaps(a)["Pss"] for a in addresses) < 1.1 * BIG
    assert all(smaps(a)["Private_Dirty"] <= 1 << 20 for a in addresses)
    forks[0].entries["h"].array[:100] = 2
    deeper = forks[0].fork()[0]
    assert deeper.entries["h"].array[99, 0] == 2 and deeper.entries["h"].array[100, 0] == 1
    assert 100 * 4096 <= smaps(addresses[1])["Private_Dirty"] <= 200 * 4096
    assert 100 * 4096 <= smaps(deeper.entries["h"].block.address)["Private_Dirty"] <= 200 * 4096
    grown = compiled.allocations().native_live_bytes - after.native_live_bytes
    assert 200 * 4096 <= grown <= 400 * 4096
    assert parent.entries["h"].array[0, 0] == forks[1].entries["h"].array[0, 0] == 1
    forks[1].entries["h"].array[::2] = 9  # so much that it is frozen anew, and not copied for each fork
    late = forks[1].fork()[0].entries["h"]
    assert smaps(late.block.address)["Private_Dirty"] <= 1 << 20 and late.array[:2, 0].tolist() == [9, 1]


@SHARED
def test_an_untouched_state_takes_no_memory_when_forked() -> None:
    compiled = Session("cpu").compile(_named("h", (BIG // 4096, 1024)))
    compiled.handles.entries["h"].array[5] = 1
    (fork,) = compiled.fork_handles(1)
    file = fork.entries["h"].block.pages.file
    assert os.fstat(file.number).st_blocks * 512 <= 4 << 20  # two huge pages, not 64 MB
    assert fork.entries["h"].array[5, 7] == 1


def test_where_pages_cannot_be_shared_forks_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_shares", lambda: False)
    compiled = Session("cpu").compile(_named("h", (64, 1024)))
    compiled.bind_handle("h", np.full((64, 1024), 3, F))
    (fork,) = compiled.fork_handles(1)
    assert fork.entries["h"].block.pages.file is None
    fork.entries["h"].array[0] = 4
    assert compiled.handles.entries["h"].array[0, 0] == 3 and fork.entries["h"].array[1, 0] == 3


@SHARED
def test_a_refused_fork_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Session("cpu").compile(_named("h", (64, 1024)))
    compiled.bind_handle("h", np.full((64, 1024), 3, F))

    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    for name in ("pwrite", "ftruncate"):
        with monkeypatch.context() as m:
            m.setattr(memory.os, name, refuse)
            with pytest.raises(MemoryError, match="no memory or mappings left"):
                compiled.fork_handles(1)
        np.testing.assert_array_equal(read(compiled, "h"), np.full((64, 1024), 3))
    assert compiled.fork_handles(1)[0].entries["h"].array[63, 1023] == 3


# -- snapshots


@pytest.mark.parametrize("columns", [8, 4096])
def test_a_restored_snapshot_continues_to_the_bit(session: Session, columns: int) -> None:
    compiled = session.compile(cache(columns=columns))
    other = session.compile(cache(tokens=2, columns=columns), handles=compiled.handles)
    with pytest.raises(BindingError, match="no snapshot"):
        compiled.rollback()
    for i in range(3):
        compiled.run(tokens(i, columns=columns))
    early = compiled.snapshot_handles()
    want = {name: array.copy() for name, array in early.states.items()}
    first = [compiled.run(tokens(10 + i, columns=columns))[0].tobytes() for i in range(4)]
    compiled.restore_handles(early)
    assert int(read(other, "length")) == 3  # whoever runs on the store sees it
    assert [compiled.run(tokens(10 + i, columns=columns))[0].tobytes() for i in range(4)] == first
    compiled.snapshot_handles()
    end = states(compiled)
    for _ in range(2):
        other.run(tokens(20, 2, columns))
        other.rollback()
        assert states(compiled) == end
    compiled.restore_handles(early)
    for name, array in early.states.items():
        np.testing.assert_array_equal(array, want[name])
        np.testing.assert_array_equal(read(compiled, name), want[name])
        assert not array.flags.writeable
    twin = session.compile(cache(columns=columns))
    twin.restore_handles(early)  # of the same states, elsewhere
    assert [twin.run(tokens(10 + i, columns=columns))[0].tobytes() for i in range(4)] == first
    assert int(read(compiled, "length")) == 3


def test_a_snapshot_of_other_states_is_refused(session: Session) -> None:
    compiled, other = session.compile(cache()), session.compile(_named("h", (3,)))
    compiled.run(tokens(0))
    before = states(compiled)
    with pytest.raises(InputShapeError, match=r"'rows' is f32\[2,16,8\]; the snapshot has no such handle"):
        compiled.restore_handles(session.compile(_named_length()).snapshot_handles())
    snapshot = compiled.snapshot_handles()
    other.use_handles(compiled.handles)
    other.bind_handle("h", np.ones(3, F))
    with pytest.raises(InputShapeError, match="'h' is f32"):  # made since
        compiled.restore_handles(snapshot)
    with pytest.raises(InputShapeError, match="'h' is not in the store; the snapshot has f32"):
        session.compile(cache()).restore_handles(compiled.snapshot_handles())
    with pytest.raises(BindingError):
        compiled.restore_handles({"h": np.zeros(3, F)})  # type: ignore[arg-type]
    assert states(compiled) == before | {"h": np.ones(3, F).tobytes()}


def _named_length() -> rlx.Graph:
    g = rlx.Graph("length")
    g.set_outputs([g.handle(rlx.BufferHandle("length", (), rlx.i32)) + 1])
    return g


def test_a_failed_run_leaves_the_store_it_ran_on(session: Session) -> None:
    compiled = session.compile(cache(rows=4, columns=8192))
    for i in range(4):
        compiled.run(tokens(i, columns=8192))
    full = states(compiled)
    (fork,) = compiled.fork_handles(1)
    empty = HandleStore()
    for store in (compiled.handles, fork):
        compiled.use_handles(empty)
        compiled.run(tokens(0, columns=8192))
        compiled.use_handles(store)
        with pytest.raises(IndexRangeError):
            compiled.run(tokens(9, columns=8192))
        assert states(compiled) == full
    assert int(empty.read("length")) == 2


def failing() -> rlx.Graph:
    g = rlx.Graph("failing")
    a = g.handle(rlx.BufferHandle("a", (4, 3), rlx.f32))
    new = rlx.update_rows(a, g.input("row", (1, 3), rlx.f32), g.input("at", (), rlx.i32))
    g.assign(a, new, in_place=True)
    g.set_outputs([rlx.gather(new, g.input("pick", (1,), rlx.i32))])  # fails once `a` has been changed
    return g


def test_what_a_failed_run_wrote_is_put_back_on_the_current_store(session: Session) -> None:
    compiled = session.compile(failing())
    compiled.bind_handle("a", np.full((4, 3), 7, F))
    stores = [compiled.handles, *compiled.fork_handles(1), HandleStore()]
    for store in stores:
        compiled.use_handles(store)
        before = states(compiled)
        with pytest.raises(IndexRangeError):
            compiled.run({"row": np.ones((1, 3), F), "at": np.array(2, np.int32), "pick": np.array([9], np.int32)})
        assert states(compiled) == before
    assert [s.read("a")[2, 0] for s in stores] == [7, 7, 0]


# -- memory


def test_interleaved_runs_allocate_nothing() -> None:
    compiled = Session("cpu").compile(cache(rows=4000, columns=4))
    new = [tokens(0, columns=4)["new"]]
    fork, other = compiled.fork_handles(2)
    stores = [compiled.handles, fork, HandleStore()]
    for store in stores:
        compiled.use_handles(store)
        for entry in store.entries.values():
            entry.array[...] = 0  # its own pages, all of them
        compiled.run_slots(new)
    gc.collect()
    gc.disable()
    try:
        growth = []
        for runs in (300, 0, 0, 10_000, 0):  # the first warms up; without runs: what the readings themselves hold
            before = compiled.allocations()
            for i in range(runs):
                compiled.use_handles(stores[i % 3])
                compiled.run_slots(new)
            after = compiled.allocations()
            growth.append(after.python_blocks - before.python_blocks)
            assert after.native_count == before.native_count and after.native_live_bytes == before.native_live_bytes
    finally:
        gc.enable()
    assert growth[3] <= max(growth[1], growth[2], growth[4]) + 2, growth
    assert sum(int(s.entries["length"].array) for s in stores) == 10_303
    assert not other.entries["rows"].array.any()


@pytest.fixture
def no_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()  # nothing may wait for the cycle collector
    yield
    gc.enable()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_memory_goes_back_in_any_order(no_cycles: None, order: tuple[int, ...]) -> None:
    memory._shares()
    before, files = memory.allocations()["live_bytes"], _open_files()
    compiled = Session("cpu").compile(_named("h", (64, 1024)))
    compiled.handles.entries["h"].array[...] = 1
    children = compiled.fork_handles(1)
    held: list[object] = [compiled, children[0], children[0].fork()[0], compiled.snapshot_handles()]
    view = children[0].entries["h"].array
    view[3] = 5
    del compiled, children
    for i in order:
        held[i] = None
    assert view[3, 0] == 5 and view[4, 0] == 1  # a view keeps its bytes
    live = memory.allocations()["live_bytes"] - before
    assert view.nbytes <= live <= 2 * view.nbytes  # what was frozen, and a page written
    del view
    assert memory.allocations()["live_bytes"] == before and _open_files() == files


def test_states_in_one_area_are_shared_and_freed_each_for_itself(no_cycles: None) -> None:
    """Together they fill a huge page: each still begins on a page of its own, forks copy-on-write, and counts its own bytes."""
    before, sizes = memory.allocations()["live_bytes"], [900_000, 1_300_000, 4, memory.OWN_PAGES]
    wanted = [(f"h{n}", rlx.BufferHandle(f"h{n}", (size,), rlx.u8).shape) for n, size in enumerate(sizes)]
    store = HandleStore()
    entries = store.require(wanted, memory.MEMORY)
    starts = [e.block.address for e in entries]
    assert all(at % memory.PAGE == 0 for at in starts) and max(starts) - min(starts) < sum(sizes) + 4 * memory.PAGE
    assert memory.allocations()["live_bytes"] - before == sum(sizes)
    for number, entry in enumerate(entries, 1):
        entry.array[...] = number
    child = store.fork(1)[0]
    child.entries["h0"].array[-1] = 9  # the last byte in front of the next state's page
    store.entries["h1"].array[0] = 8
    assert [e.array[-1] for e in entries] == [1, 2, 3, 4] and child.entries["h1"].array[0] == 2
    assert [e.array[-1] for e in child.entries.values()] == [9, 2, 3, 4]
    del store, entries, entry, child
    assert memory.allocations()["live_bytes"] == before


def _open_files() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return len(os.listdir("/proc/self/fd"))


def test_a_clone_has_a_store_of_its_own(session: Session) -> None:
    compiled = session.compile(cache())
    session.compile(_named("h", (3,)), handles=compiled.handles)
    compiled.run(tokens(0))
    twin = compiled.clone()
    assert twin.handles is not compiled.handles and states(twin) == states(compiled)
    twin.run(tokens(1))
    assert (int(read(compiled, "length")), int(read(twin, "length"))) == (1, 2)


def test_threads_on_stores_of_their_own() -> None:
    compiled = Session("cpu").compile(cache(columns=4096), rlx.CompileOptions(threads=2))
    compiled.run(tokens(0, columns=4096))
    serial = compiled.clone()
    want = [serial.run(tokens(i, columns=4096))[0].tobytes() for i in range(1, 12)]
    workers = [compiled.clone() for _ in range(3)]
    wrong: list[int] = []

    def work(own: CompiledGraph, store: HandleStore, seed: int) -> None:
        for _ in range(4):
            own.use_handles(store.fork()[0])
            got = [own.run(tokens(i, columns=4096))[0].tobytes() for i in range(1, 12)]
            if got != want:
                wrong.append(seed)

    pairs = zip(workers, compiled.fork_handles(3))
    threads = [threading.Thread(target=work, args=(own, store, i)) for i, (own, store) in enumerate(pairs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_states_are_not_pickled_but_their_arrays_are():
    g = rlx.Graph("pickled")
    h = g.handle(rlx.BufferHandle("s", (2,), "f32"))
    g.assign(h, h + 1.0)
    compiled = rlx.compile(g)
    compiled.run({})
    snapshot = compiled.snapshot_handles()
    for held in (snapshot, *compiled.fork_handles(1)):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(Unsupported, match=r"states are memory of this process; .* snapshot\.states has arrays"):
                copied(held)
    assert pickle.loads(pickle.dumps(dict(snapshot.states)))["s"].tolist() == [1, 1]

"""Experts in two tiers on the CPU: their memory, and the steps around those that read them.

The memory of all experts of a layer stays reserved; the pages of experts that are not resident are given back to the system. A
run calls machine code in front of the first step that reads a layer's experts, and behind the last one. The first looks up each
choice of the router; if all chosen experts are resident it only counts, else it calls Python, which reads the missing ones.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from rlx.backends.cpu import memory
from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.exchange import ANSWER, answers, asking
from rlx.backends.cpu.timing import MONOTONIC
from rlx.backends.shared.loaded import Loaded
from rlx.driver.expert_source import ExpertRows
from rlx.driver.experts import AT_ONCE, LATER, ExpertTiers, ResidencyStats, TierStats
from rlx.driver.memory import Block, bytes_of
from rlx.host.abi import I64, P
from rlx.host.emit import V
from rlx.host.functions import Body, Functions, fields_of
from rlx.host.jit import Library, kept_object
from rlx.ir.program import BufferDecl, Region, RouterDecl, Step

FAILED = 1 << 17  # status of a step whose error is in ExpertSteps.errors
ENTER, LEAVE = 0, 1  # the argument of `answer`
LOGGED = 4096  # choices that are logged before Python is called for them
SCRATCH_ALIGNMENT = 64  # see Rendered
Sections: TypeAlias = "Mapping[int, tuple[Library, Rendered]]"  # step of prepare -> the code for one expert
SYMBOLS = "rlx_experts_enter", "rlx_experts_leave", "rlx_experts_publish"


class Place(ctypes.Structure):
    """One router of one executable. `ids`: its choices, `chosen` of them. `words`, `asking`: of ExpertTiers. `seen`: u8 for each
    expert. `count`: see Window; `told`: call Python when leaving. `answer`: void (i64), Python that clears `failed`. `tokens`,
    `used`, `nanoseconds`: statistics of resident experts. `log`: a ring of `room` forwards' choices, `entry` bytes each; `logged`
    and `taken` count those that were ever written and read."""

    _fields_ = [
        ("ids", P), ("chosen", I64), ("words", P), ("experts", I64), ("asking", P), ("seen", P), ("count", I64), ("told", I64),
        ("answer", P), ("failed", I64), ("tokens", I64), ("used", I64), ("nanoseconds", I64), ("begun", I64),
        ("clock_seconds", I64), ("clock_rest", I64), ("log", P), ("room", I64), ("entry", I64), ("logged", I64), ("taken", I64),
    ]  # fmt: skip


class PlaceBody(Body):
    fields = fields_of(Place)


_functions = Functions()


ask = asking(_functions, FAILED)


@_functions.native("i64", place="ptr")
def now(e: Body, place: V) -> None:
    e.external("clock_gettime", "i32", V(str(MONOTONIC), "i32"), e.at(place, "clock_seconds"))
    e.ret(e.bin("add", e.bin("mul", e.get(place, "clock_seconds"), 1_000_000_000), e.get(place, "clock_rest")))


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_experts_enter(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """A kernel (rlx.backends.cpu.abi.Rendered): look up the router's choices."""
    place = e.load("ptr", args, 8)
    e.change("add", place, "count", 1)
    e.put(place, "begun", now(e, place))
    ids, words, seen, experts = (e.get(place, name) for name in ("ids", "words", "seen", "experts"))
    e.intrinsic("memset", seen, e.const("i8", 0), experts, e.const("i1", False), suffix=("ptr", "i64"), returns="void")
    with e.loop(0, e.get(place, "chosen"), carried=[e.i64(0), e.i64(0), e.i64(0)]) as each:
        found = e.convert("zext", e.load("i32", e.gep(ids, e.bin("shl", each.index, 2)), 4), "i64")
        valid = e.cmp("ult", found, experts)  # others choose no expert, or a Check will find them
        expert = e.select(valid, found, e.i64(0))
        resident = e.cmp("ne", e.load_atomic("i32", e.gep(words, e.bin("shl", expert, 2))), 0)
        hit, miss = e.bin("and", valid, resident), e.bin("and", valid, e.bin("xor", resident, V("true", "i1")))
        before = e.load("i8", e.gep(seen, expert), 1)
        new = e.bin("and", hit, e.cmp("eq", before, 0))
        e.store(e.select(hit, e.const("i8", 1), before), e.gep(seen, expert), 1)
        each.next = [e.bin("add", c, e.convert("zext", x, "i64")) for c, x in zip(each.carried, (hit, new, miss))]
    tokens, used, missing = each.results
    asking, logged, room = e.load_atomic("i32", e.get(place, "asking")), e.get(place, "logged"), e.get(place, "room")
    logs, full = e.cmp("eq", asking, LATER), e.cmp("uge", e.bin("sub", logged, e.get(place, "taken")), room)
    asks = e.bin("or", e.cmp("eq", asking, AT_ONCE), e.bin("and", logs, full))
    with e.when(e.bin("or", asks, e.cmp("ne", missing, 0))):
        ask(e, place, e.i64(ENTER), status)
        e.ret()
    with e.when(logs):
        entry = e.get(place, "entry")
        goal = e.gep(e.get(place, "log"), e.bin("mul", e.bin("urem", logged, room), entry))
        e.intrinsic("memcpy", goal, ids, entry, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
        e.put(place, "logged", e.bin("add", logged, 1), "release")
    e.put(place, "tokens", e.bin("add", e.get(place, "tokens"), tokens))
    e.put(place, "used", e.bin("add", e.get(place, "used"), used))


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_experts_leave(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    place = e.load("ptr", args, 8)
    took = e.bin("sub", now(e, place), e.get(place, "begun"))
    e.put(place, "nanoseconds", e.bin("add", e.get(place, "nanoseconds"), took))
    e.change("add", place, "count", 1)
    with e.when(e.cmp("ne", e.get(place, "told", "seq_cst"), 0)):
        ask(e, place, e.i64(LEAVE), status)


@_functions.native("void", word="ptr", value="i32")
def rlx_experts_publish(e: Body, word: V, value: V) -> None:
    """Write a word, in one order with the atomic accesses above, and before all later reads."""
    e.update_atomic("xchg", word, value)
    e.do("fence seq_cst")


@cache
def _library() -> Library:
    return Library([kept_object("experts", lambda: _functions.module_text(PlaceBody))], SYMBOLS)


@cache
def _publish() -> Any:
    return _library().function("rlx_experts_publish", None, P, ctypes.c_int32)


# -- memory


class Part:
    """rlx.driver.experts.Part in host memory."""

    def __init__(self, block: Block, name: str, experts: int, param: BufferDecl, packer: Packer | None = None) -> None:
        """`packer`: None: experts are stored as they are in the param."""
        self.name, self.param, self.nbytes, self._block = name, param.name, block.nbytes // experts, block
        self._rows, self._packer, self._small = ExpertRows.of(param, experts), packer, False

    def fill(self, expert: int, array: np.ndarray) -> None:
        self._rows.check(array)
        if self._packer is None:
            self.held(expert)[:] = bytes_of(array)
        else:
            source = array if array.ctypes.data % max(array.itemsize, 1) == 0 else array.copy()
            self._packer(self._block.address + expert * self.nbytes, source.ctypes.data)

    def held(self, expert: int) -> np.ndarray:
        assert self._block.data is not None
        return self._block.data[expert * self.nbytes : (expert + 1) * self.nbytes]

    def release(self, expert: int) -> None:
        memory.release(self._block.address + expert * self.nbytes, self.nbytes)

    def prepare(self) -> None:
        if not self._small:
            memory.in_small_pages(self._block.address, self._block.nbytes)
            self._small = True


class Packer:
    """The code that packs one expert, as a function of the addresses of its place and of its rows."""

    def __init__(self, library: Library, code: Rendered, step: Step) -> None:
        self._function, self._code = library.function(code.symbol, None, P, I64, P, P), code
        self._writes = [b.writable for b in step.kernel.buffers]

    def __call__(self, goal: int, source: int) -> None:
        scratch = memory.allocate(self._code.scratch_bytes, SCRATCH_ALIGNMENT)
        places = np.array([*(goal if w else source for w in self._writes), 0], np.int64)  # the arguments, and a status
        for task in range(self._code.tasks):
            self._function(places.ctypes.data, task, scratch.address, places[-1:].ctypes.data)


def _parts(executable: Loaded, sections: Sections, experts: int, params: frozenset[str]) -> Iterator[Part]:
    """The buffers of these params in which each expert lies apart."""
    program, decls = executable.program, executable.decls
    for i, (library, code) in sections.items():
        step, names = program.prepare[i], program.sources[i]
        if names <= params:
            (made,), (param,) = step.writes, step.reads
            yield Part(executable.block(made), decls[made].name, experts, decls[param], Packer(library, code, step))
    for b in (decls[i] for i in program.params):
        if b.name in params & program.kept and b.shape.static[0] % experts == 0:
            yield Part(executable.block(b.id), b.name, experts, b)


def tiers_of(executable: Loaded) -> ExpertTiers:
    """The tiers of the executable's weights, made by its first use."""
    store = executable.params
    with store.lock:
        if store.experts is None:
            store.experts = ExpertTiers(store.versions, _publish())
        return store.experts


# -- steps


class _Router:
    """One router of one executable (Window)."""

    def __init__(self, ids: np.ndarray, ahead: np.ndarray | None, experts: int) -> None:
        self.ids, self.ahead, self._seen = ids, ahead, np.zeros(experts, np.uint8)
        self._log = np.zeros((max(1, LOGGED // max(1, ids.size)), *ids.shape), np.int32)
        self.place = Place(
            ids=ids.ctypes.data, chosen=ids.size, experts=experts, seen=self._seen.ctypes.data, log=self._log.ctypes.data,
            room=len(self._log), entry=ids.nbytes,
        )  # fmt: skip
        self.layer = -1
        self.own: list[int] = []  # experts in memory for this run only
        self.slow = TierStats()

    @property
    def count(self) -> int:
        return self.place.count

    def step(self) -> None:
        """Begin or end the stay in the layer."""
        self.place.count += 1

    def logged(self) -> np.ndarray:
        place = self.place
        first, end = place.taken, place.logged
        found = self._log[np.arange(first, end) % len(self._log)]
        place.taken = end
        return found

    def tell(self) -> None:
        _publish()(ctypes.addressof(self.place) + Place.told.offset, 1)

    def reset(self) -> None:
        self.place.count += self.place.count % 2
        self.place.told, self.own = 0, []


class ExpertSteps:
    """The routers of one executable. `around`: step -> (rows in front of it, rows behind it), each (function, its argument).
    `layers`: for each router of the program, its layer in the tiers; -1: its experts are not apart."""

    FAILED = FAILED

    def __init__(self, executable: Loaded, sections: Sections, groups: Sequence[int]) -> None:
        """`groups`: for each step of a run, the first step of its group."""
        self.tiers, self.errors = tiers_of(executable), list[BaseException]()
        self.routers: list[_Router] = []
        self.layers: list[int] = []
        self.around: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        self._kept: list[Any] = [_library()]
        for router in executable.program.routers:
            self.layers.append(self._add(executable, sections, router, groups))

    def _add(self, executable: Loaded, sections: Sections, router: RouterDecl, groups: Sequence[int]) -> int:
        program = executable.program
        ids = executable.view(router.buffer)
        assert ids is not None
        params = frozenset(router.params)
        parts = list(_parts(executable, sections, router.experts, params))
        names = {part.name for part in parts}
        weights = {b.id for b in program.buffers if b.region in (Region.PARAM, Region.PREPARED) and b.name in names}
        readers = [n for n, step in enumerate(program.steps) if weights.intersection(step.args)]
        if not readers:
            return -1
        made = _Router(ids[: router.tokens], ids[router.tokens :] if router.ahead else None, router.experts)
        name = min(params)
        made.layer = self.tiers.join(name, router.experts, ids.shape[-1], parts, made)
        made.place.words = self.tiers.layers[made.layer].words.ctypes.data
        made.place.asking = ctypes.addressof(self.tiers.asking)
        asked = answers(partial(_answer, ref(self), len(self.routers)), made.place, self.errors, None)
        next(asked)  # run to its first yield
        answer = ANSWER(asked.send)
        made.place.answer = ctypes.cast(answer, P).value
        self._kept += [answer]
        self.routers.append(made)
        last = max(n for n, first in enumerate(groups) if first == groups[readers[-1]])
        for at, side, function in ((groups[readers[0]], 0, SYMBOLS[0]), (last, 1, SYMBOLS[1])):
            rows = self.around.setdefault(at, ([], []))[side]
            rows.append((_library().address(function), ctypes.addressof(made.place)))
        return made.layer

    def answer(self, at: int, leaving: int) -> None:
        router = self.routers[at]
        if leaving:
            self._leave(router)
        else:
            self._enter(router)

    def _enter(self, router: _Router) -> None:
        """Read the experts that are missing. The run is outside of the layer meanwhile, so that no one waits for it."""
        tiers, place, begun = self.tiers, router.place, time.perf_counter_ns()
        router.step()
        layer = tiers.layers[router.layer]
        chosen = np.bincount(router.ids[(router.ids >= 0) & (router.ids < layer.experts)], minlength=layer.experts)
        with layer.lock:  # experts that are being promoted count as resident
            fast = layer.words != 0
        keep: Iterable[int] = ()
        tiers.tell_hits(router.layer)
        if tiers.advisor is not None:
            keep = tiers.advisor.routed(router.layer, router.ids, router.ahead)
        read, router.own = tiers.use(router.layer, np.flatnonzero(chosen).tolist(), keep, router.step)
        if router.own:
            router.tell()
        place.tokens += int(chosen[fast].sum())
        place.used += int(np.count_nonzero(chosen[fast]))
        place.begun = time.perf_counter_ns()
        slow, seconds = router.slow, (place.begun - begun) / 1e9
        tokens, experts = int(chosen[~fast].sum()), int(np.count_nonzero(chosen[~fast]))
        nbytes = len(read) * layer.nbytes
        router.slow = TierStats(slow.tokens + tokens, slow.experts + experts, slow.bytes + nbytes, slow.seconds + seconds)

    def _leave(self, router: _Router) -> None:
        own, router.own, router.place.told = router.own, [], 0
        self.tiers.done(router.layer, own)

    def failed(self) -> None:
        """A run has failed: it is inside no layer any more."""
        for router in self.routers:
            if router.count % 2:
                router.step()
            self._leave(router)

    def error(self) -> BaseException:
        """The error of the step that failed."""
        found = self.errors.pop() if self.errors else KeyboardInterrupt("reading experts was interrupted")
        self.errors.clear()
        return found

    def take_stats(self) -> ResidencyStats:
        """Since the last call. No run is under way."""
        fast, slow = [0, 0, 0, 0.0], [0, 0, 0, 0.0]
        for router in self.routers:
            place, each = router.place, self.tiers.layers[router.layer].nbytes
            found = place.tokens, place.used, place.used * each, place.nanoseconds / 1e9
            fast = [a + b for a, b in zip(fast, found)]
            s = router.slow
            slow = [a + b for a, b in zip(slow, (s.tokens, s.experts, s.bytes, s.seconds))]
            place.tokens = place.used = place.nanoseconds = 0
            router.slow = TierStats()
        return ResidencyStats(TierStats(*fast), TierStats(*slow))  # type: ignore[arg-type]


def _answer(steps: Any, at: int, leaving: int) -> None:
    steps().answer(at, leaving)


def group_starts(joined: Sequence[bool]) -> list[int]:
    """For each step, the first step of its group. `joined`: whether it is in the group of the step before it."""
    starts: list[int] = []
    for at, joins in enumerate(joined):
        starts.append(starts[-1] if joins else at)
    return starts


__all__ = ["ExpertSteps", "Part", "group_starts", "tiers_of"]

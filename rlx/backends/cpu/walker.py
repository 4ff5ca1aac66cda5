"""The walker: compiled code that takes a flat table of steps, alone or together with threads that stay inside it.

A run offers its table to whoever is awake. One word, the ticket, holds a generation (high half) and how many tasks of the
current step are left (low half, above BIAS); taking a task is one atomic subtraction. Nobody waits for a thread that
has no task: a step ends when its tasks are done, and the thread that did the last one takes the next step. It runs
steps of one task itself and publishes the others with a new generation. A worker that comes late, or never, costs
nothing but its help, so a run is right with any number of workers, down to none.

Who holds no task touches only the Control block, which lives as long as the process; so a table may be freed as soon
as its run returns. Waiting is bounded spinning, then sched_yield, then a futex on the generation.

Each function below decorated with `@_native` writes the body of one native function; called from another one, it writes
a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rlx.backends.cpu.emit import Emitter, V

MAX_THREADS = 1024
MAX_TASKS = 1 << 31
MAX_CPUS = 1024  # those with higher numbers are never marked as pinned
ATTEND = -1  # what a run returns when all went well, but `Pool.attend` should be called before the next


class Step(ctypes.Structure):
    """One kernel call: fn(args, task, scratch, status) for every task in range(tasks)."""

    _fields_ = [("fn", ctypes.c_void_p), ("args", ctypes.c_void_p), ("tasks", ctypes.c_int64)]


class Run(ctypes.Structure):
    """A table of steps [first, end) and its surroundings. `scratch`: `stride` bytes per thread. `control`: the pool's
    block, or null to walk alone. `failed`: the last step begun when `status` became nonzero."""

    _fields_ = [
        ("first", ctypes.c_void_p), ("end", ctypes.c_void_p), ("scratch", ctypes.c_void_p), ("stride", ctypes.c_int64),
        ("control", ctypes.c_void_p), ("failed", ctypes.c_void_p), ("status", ctypes.c_int32),
    ]  # fmt: skip


class Control(ctypes.Structure):
    """A pool's shared words. All that changes in a run lies on one cache line; the rest is constant. `pinned`, by CPU:
    ATTEND where a worker is pinned to it, else 0."""

    _fields_ = [
        ("ticket", ctypes.c_uint64), ("step", ctypes.c_void_p), ("run", ctypes.c_void_p), ("done", ctypes.c_int32),
        ("sleepers", ctypes.c_int32), ("lock", ctypes.c_int32), ("workers", ctypes.c_int32), ("caller_asleep", ctypes.c_int32),
        ("stop", ctypes.c_int32), ("pad", ctypes.c_int64 * 2),
        ("idle_spins", ctypes.c_int64), ("busy_spins", ctypes.c_int64), ("yields", ctypes.c_int64),
        ("wait", ctypes.c_void_p), ("sched_yield", ctypes.c_void_p), ("getcpu", ctypes.c_void_p),
        ("pinned", ctypes.c_int8 * MAX_CPUS),
    ]  # fmt: skip


BIAS = 1 << 16  # threads that come too late subtract from this; at most two per thread and generation
END = 1 << 15  # low half between runs
GENERATION = 1 << 32  # one of them, in the high half
FIELDS = {  # name -> LLVM type and byte offset; no two of the structures share a name
    name: ("ptr" if kind is ctypes.c_void_p else f"i{8 * ctypes.sizeof(kind)}", getattr(structure, name).offset)
    for structure in (Step, Run, Control)
    for name, kind in structure._fields_  # pyright: ignore
}
STEP_BYTES = ctypes.sizeof(Step)
NULL = V("null", "ptr")
EVERYBODY = V("2147483647", "i32")


class _Body(Emitter):
    """The body of one function, for a processor (platform.machine()) and a futex system call (its number; 0: none)."""

    def __init__(self, machine: str, futex: int) -> None:
        super().__init__()
        self.machine, self.futex = machine, futex

    def at(self, base: V, name: str) -> V:
        return self.gep(base, FIELDS[name][1])

    def get(self, base: V, name: str, order: str = "") -> V:
        """A field of the structure at `base`; atomically if an order is given."""
        ty, place = FIELDS[name][0], self.at(base, name)
        return self.load_atomic(ty, place, order) if order else self.load(ty, place, 4)

    def put(self, base: V, name: str, value: V | int, order: str = "") -> None:
        value, place = _value(value, FIELDS[name][0]), self.at(base, name)
        self.store_atomic(value, place, order) if order else self.store(value, place, 4)

    def change(self, op: str, base: V, name: str, by: V | int) -> V:
        """Atomically; the value before."""
        return self.update_atomic(op, self.at(base, name), _value(by, FIELDS[name][0]))

    def test(self, predicate: str, a: V, b: V | int) -> V:
        return self.cmp(predicate, a, _value(b, a.ty))

    def tasks_left(self, ticket: V) -> V:
        """Tasks to be taken if positive."""
        return self.bin("sub", self.bin("and", ticket, self.i64(GENERATION - 1)), self.i64(BIAS))

    def between_runs(self, ticket: V) -> V:
        return self.test("sle", self.tasks_left(ticket), END - BIAS)

    def turn(self, c: V) -> V:
        """One turn of a waiting loop: the generation, after a short pause."""
        if self.machine in ("x86_64", "AMD64"):
            self.intrinsic("x86.sse2.pause", suffix=(), returns="void")
        elif self.machine in ("aarch64", "arm64"):
            self.intrinsic("aarch64.hint", V("1", "i32"), suffix=(), returns="void")
        return self.bin("lshr", self.get(c, "ticket", "acquire"), self.i64(32))

    def sleep(self, c: V, generation: V) -> None:
        """While the generation is this one; may return early. Without futex: half a millisecond."""
        if self.futex:
            self._futex(c, 128, self.convert("trunc", generation, "i32"))
        else:
            self.call(self.get(c, "wait"), "i32", V("500", "i32"))

    def wake(self, c: V, sleepers: V) -> None:
        if self.futex:  # else there is nobody to wake
            self._futex(c, 129, sleepers)

    def _futex(self, c: V, operation: int, value: V) -> None:
        """`operation`: 128 and more are private to the process."""
        word = self.gep(c, FIELDS["ticket"][1] + 4)
        args = self.i64(self.futex), word, V(str(operation), "i32"), value, NULL, NULL, self.i64(0)
        self.call(self.get(c, "wait"), "i64 (i64, ...)", *args)

    def python(self, name: str, returns: str, *args: V) -> V:
        """A call of CPython's C interface."""
        self.declare(f"declare {returns} @{name}({', '.join(a.ty for a in args)})")
        return self.call(name, returns, *args)


def _value(value: V | int, ty: str) -> V:
    return value if isinstance(value, V) else V(str(value), ty)


class _Native:
    """A native function: what writes its body, given its parameters (name -> type)."""

    def __init__(self, write: Callable[..., None], returns: str, parameters: dict[str, str]) -> None:
        self.name, self.write, self.returns, self.parameters = write.__name__, write, returns, parameters

    def __call__(self, e: Emitter, *args: V) -> V:
        return e.call(self.name, self.returns, *args)

    def text(self, e: _Body) -> str:
        self.write(e, *(V(f"%{name}", ty) for name, ty in self.parameters.items()))
        params = ", ".join(f"{ty} %{name}" for name, ty in self.parameters.items())
        return e.function(self.name, params, linkage="" if self.name.startswith("rlx_") else "internal", returns=self.returns)


_natives: list[_Native] = []


def _native(returns: str, **parameters: str) -> Callable[[Callable[..., None]], _Native]:
    """Decorator of what writes the body of a native function; rlx_… are seen from outside."""

    def made(write: Callable[..., None]) -> _Native:
        _natives.append(_Native(write, returns, parameters))
        return _natives[-1]

    return made


def module_text(machine: str, futex: int) -> str:
    """The walker as LLVM IR for a processor (platform.machine()), with the number of its futex system call (0: none)."""
    bodies = [_Body(machine, futex) for _ in _natives]
    functions = [native.text(e) for native, e in zip(_natives, bodies)]
    declarations = dict.fromkeys(text for e in bodies for text in e.declarations)
    return "\n".join([*declarations, "attributes #0 = { nounwind }", *functions])


# -- steps and tasks -----------------------------------------------------------------------------------------------


def _kernel(e: _Body, run: V, step: V, tid: V) -> Callable[[V], V]:
    """What writes a call of the step's function for a task, on the scratch of thread `tid`."""
    fn, args, status = e.get(step, "fn"), e.get(step, "args"), e.at(run, "status")
    scratch = e.gep(e.get(run, "scratch"), e.bin("mul", e.get(run, "stride"), tid))
    return lambda task: e.call(fn, "void", args, task, scratch, status)


@_native("void", c="ptr", low="i64")
def publish(e: _Body, c: V, low: V) -> None:
    """A new generation with `low` in the low half."""
    with e.loop(0, None, carried=[e.get(c, "ticket", "monotonic")]) as attempt:
        (old,) = attempt.carried
        next_generation = e.bin("add", e.bin("or", old, e.i64(GENERATION - 1)), e.i64(1))
        found, stored = e.exchange_if(e.at(c, "ticket"), old, e.bin("or", next_generation, low))
        with e.when(stored):
            e.branch(attempt.done)
        attempt.next = [found]
    e.ret()


@_native("i1", c="ptr", run="ptr", done="ptr", tid="i64")
def advance(e: _Body, c: V, run: V, done: V, tid: V) -> None:
    """All tasks of `done` are done: go on. Runs steps of one task here (all steps where `c` is null). True: a larger step
    is published, its task 0 kept for this thread. False: the run has ended; nothing of it may be touched any more."""
    pooled = e.test("ne", c, NULL)
    end = e.get(run, "end")
    address = lambda pointer: e.op("i64", f"ptrtoint {pointer} to i64")  # noqa: E731
    with e.loop(address(done), address(end), STEP_BYTES) as each:
        last = e.op("ptr", f"inttoptr {each.index} to ptr")  # the last step that is done
        with e.when(e.test("ne", e.get(run, "status"), 0)):
            e.put(run, "failed", last)
            e.branch(each.done)
        step = e.gep(last, STEP_BYTES)
        with e.when(e.test("eq", step, end)):
            e.branch(each.done)
        tasks = e.get(step, "tasks")
        with e.when(e.bin("and", pooled, e.test("sgt", tasks, 1))):
            e.put(c, "step", step)
            e.put(c, "done", 0)
            rest = e.bin("sub", tasks, e.i64(1))
            publish(e, c, e.bin("add", rest, e.i64(BIAS)))
            sleepers = e.get(c, "sleepers", "seq_cst")
            with e.when(e.test("sgt", sleepers, 0)):
                # only here is the count lowered, and task 0, still in hand, keeps a second publisher away: it never falls too low
                called = e.intrinsic("smin", e.convert("trunc", rest, "i32"), sleepers)
                e.change("sub", c, "sleepers", called)
                e.wake(c, called)
            e.ret(V("true", "i1"))
        call = _kernel(e, run, step, tid)
        with e.loop(0, tasks) as task:
            call(task.index)
    with e.when(pooled):
        publish(e, c, e.i64(END))
        with e.when(e.test("ne", e.get(c, "caller_asleep", "seq_cst"), 0)):
            e.wake(c, EVERYBODY)
    e.ret(V("false", "i1"))


@_native("void", c="ptr", tid="i64", ticket="i64")
def wait(e: _Body, c: V, tid: V, ticket: V) -> None:
    """For a generation other than the ticket's; may return early."""
    seen = e.bin("lshr", ticket, e.i64(32))
    spins = e.select(e.between_runs(ticket), e.get(c, "idle_spins"), e.get(c, "busy_spins"))
    with e.loop(0, spins), e.when(e.test("ne", e.turn(c), seen)):
        e.ret()
    with e.loop(0, e.get(c, "yields")):
        e.call(e.get(c, "sched_yield"), "i32")
        with e.when(e.test("ne", e.turn(c), seen)):
            e.ret()
    caller = e.test("eq", tid, 0)
    with e.when(caller):
        e.put(c, "caller_asleep", 1, "seq_cst")
    e.change("add", c, "sleepers", 1)
    e.sleep(c, seen)
    with e.when(caller):
        e.put(c, "caller_asleep", 0, "seq_cst")
    e.ret()


@_native("i64", c="ptr", tid="i64")
def take(e: _Body, c: V, tid: V) -> None:
    """Wait for a task of a published step: its number; -1: the run has ended (for the caller, tid 0), or the pool stops."""
    with e.loop(0, None):
        ticket = e.get(c, "ticket", "seq_cst")
        with e.when(e.test("sgt", e.tasks_left(ticket), 0)):
            left = e.tasks_left(e.change("sub", c, "ticket", 1))
            with e.when(e.test("sgt", left, 0)):
                e.ret(e.bin("sub", e.get(e.get(c, "step"), "tasks"), left))
        stopped = e.test("ne", e.get(c, "stop", "seq_cst"), 0)
        with e.when(e.select(e.test("eq", tid, 0), e.between_runs(ticket), stopped)):
            e.ret(e.i64(-1))
        wait(e, c, tid, ticket)
    e.do("unreachable")


@_native("i64", c="ptr", tid="i64", first="i64")
def work(e: _Body, c: V, tid: V, first: V) -> None:
    """Do task `first` of the published step, and more as long as there are some. Returns the next task to do, as `take`."""
    run, step = e.get(c, "run"), e.get(c, "step")
    tasks = e.get(step, "tasks")
    call = _kernel(e, run, step, tid)
    with e.loop(0, None, carried=[first]) as each:
        (task,) = each.carried
        call(task)
        with e.when(e.test("eq", e.bin("add", task, e.i64(1)), tasks)):
            e.branch(each.done)
        left = e.tasks_left(e.change("sub", c, "ticket", 1))
        with e.when(e.test("sle", left, 0)):
            e.branch(each.done)
        each.next = [e.bin("sub", tasks, left)]
    mine = e.convert("trunc", e.bin("add", each.index, e.i64(1)), "i32")
    all_done = e.bin("add", e.change("add", c, "done", mine), mine)
    with e.when(e.test("eq", all_done, e.convert("trunc", tasks, "i32"))), e.when(advance(e, c, run, step, tid)):
        e.ret(e.i64(0))
    e.ret(take(e, c, tid))


@_native("void", c="ptr", tid="i64", first="i64")
def share(e: _Body, c: V, tid: V, first: V) -> None:
    """Take part from task `first` on: the caller (tid 0) until its run has ended, a worker until the pool stops."""
    with e.loop(0, None, carried=[first]) as each:
        (task,) = each.carried
        with e.when(e.test("slt", task, 0)):
            e.branch(each.done)
        each.next = [work(e, c, tid, task)]
    e.ret()


@_native("i32", c="ptr", run="ptr", before="ptr")
def together(e: _Body, c: V, run: V, before: V) -> None:
    """A run that holds the pool's lock; `before`: the place of a step before the first. The status, or ATTEND: the pool has
    no workers, or we are on the CPU of one, which then cannot run."""
    helped = e.test("ne", e.get(c, "workers"), 0)
    e.put(c, "run", run)
    with e.when(advance(e, e.select(helped, c, NULL), run, before, e.i64(0))):
        share(e, c, e.i64(0), e.i64(0))
    status = e.get(run, "status")
    e.put(c, "lock", 0, "release")
    with e.when(e.test("ne", status, 0)):
        e.ret(status)
    getcpu = e.get(c, "getcpu")
    with e.when(e.bin("and", helped, e.test("ne", getcpu, NULL))):
        cpu = e.convert("zext", e.call(getcpu, "i32"), "i64")
        with e.when(e.test("ult", cpu, MAX_CPUS)):
            pinned = e.load("i8", e.gep(e.at(c, "pinned"), cpu), 1)
            e.ret(e.convert("sext", pinned, "i32"))
    e.ret(e.select(helped, V("0", "i32"), V(str(ATTEND), "i32")))


# -- entries -------------------------------------------------------------------------------------------------------


@_native("i32", run="ptr")
def rlx_run(e: _Body, run: V) -> None:
    """The whole run: its status, or ATTEND. Alone if another run has the pool."""
    e.put(run, "status", 0)
    before = e.gep(e.get(run, "first"), -STEP_BYTES)
    c = e.get(run, "control")
    with e.when(e.test("ne", c, NULL)):
        _, free = e.exchange_if(e.at(c, "lock"), V("0", "i32"), V("1", "i32"))
        with e.when(free):
            e.ret(together(e, c, run, before))
    advance(e, NULL, run, before, e.i64(0))
    e.ret(e.get(run, "status"))


@_native("ptr", self="ptr", unused="ptr")
def rlx_run_py(e: _Body, self: V, unused: V) -> None:
    """rlx_run as a CPython function of no arguments: `self` is an int, the Run's address. Other Python threads go on."""
    run = e.python("PyLong_AsVoidPtr", "ptr", self)
    thread = e.python("PyEval_SaveThread", "ptr")
    status = rlx_run(e, run)
    e.python("PyEval_RestoreThread", "void", thread)
    e.ret(e.python("PyLong_FromLong", "ptr", e.convert("sext", status, "i64")))


@_native("void", c="ptr", tid="i64")
def rlx_work(e: _Body, c: V, tid: V) -> None:
    """What a worker does, until the pool stops."""
    share(e, c, tid, take(e, c, tid))
    e.ret()


@_native("void", c="ptr")
def rlx_stop(e: _Body, c: V) -> None:
    """Let every worker leave; may be called at any time."""
    e.put(c, "stop", 1, "seq_cst")
    e.change("add", c, "ticket", GENERATION)
    e.wake(c, EVERYBODY)
    e.ret()


@_native("i64", c="ptr", turns="i64")
def rlx_spin(e: _Body, c: V, turns: V) -> None:
    """Turns of the waiting loop, to learn how long one takes."""
    with e.loop(0, turns):
        e.turn(c)
    e.ret(turns)

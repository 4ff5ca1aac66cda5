"""The executor: machine code that runs a flat table of steps, on one thread or with worker threads that stay inside it.

A run offers its table to every thread that is awake. Independent steps form a group. A group runs like one step: its tasks are
those of its steps, numbered step after step. One word, the ticket, holds the generation and the number of tasks of the current
group. Each thread has a part of the tasks, those of adjacent numbers, and takes the last ones of others' parts when its own is
used up. So a thread mostly reads the rows that it wrote in the step before, from its own cache, and while it waits it fetches the
weights that its part of the next steps reads (`look_ahead`), since memory is idle then.

Taking a task is one compare-and-swap on the word of its part: the generation, and how many tasks are taken. A word of an earlier
generation stands for a part of which none is taken, so nobody has to prepare the words of a group, and a thread's own word stays
in its cache. A late thread takes nothing from a later group: words change only from a smaller generation to a larger one, or
to more tasks taken, and a group ends when all of its tasks are done, so that its words are full.

No thread waits for a thread without a task: the thread that finished the last task of a group starts the next group, or the one
to which a jump leads (rlx.backends.cpu.flow). That thread runs groups of one task itself and publishes larger ones with a new
generation. A late or missing worker only means less parallelism, so a run is correct with any number of workers, including none.

A thread without a task touches only the Control block, which lives as long as the process. So a table may be freed as soon
as its run returns. Waiting is bounded spinning, then sched_yield, then a futex on the generation.

Each function below decorated with `@_native` emits the body of one function in machine code. Called from another such function,
it emits a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rlx.backends.cpu.abi import ATTEND, GENERATION, JUMP, LINE, MAX_CPUS, MAX_PARTS, STOP, Control, Reading, Run, Step
from rlx.host.emit import V
from rlx.host.functions import EVERYBODY, NULL, Body, Functions, fields_of

STEP_BYTES = ctypes.sizeof(Step)
LINES = 8  # fetched at a time by a thread that waits: few, so that it sees the next group soon
LINES_BESIDE = 32  # fetched by a thread before each step that it runs alone: as many as may be on their way at once
COUNT = 16  # bits of a part's word for the number of tasks that its own thread has taken, then as many for other threads
RENEWED = GENERATION << 24  # between these generations all words of parts are renewed
WAIT, WAKE = 128, 129  # futex operations, private to the process


class ExecutorBody(Body):
    """Emits the body of a function that works on a Control block, a Run, its Steps and Readings."""

    fields = fields_of(Step, Run, Control, Reading)

    def tasks_of(self, ticket: V) -> V:
        """The number of tasks of the current group; 0: between runs."""
        return self.bin("and", ticket, STOP - 1)

    def between_runs(self, ticket: V) -> V:
        return self.cmp("eq", self.tasks_of(ticket), 0)

    def spin(self, c: V) -> V:
        """One iteration of a spin loop: a short pause, then the high half of the ticket."""
        self.pause()
        return self.bin("lshr", self.get(c, "ticket", "acquire"), 32)

    def futex(self, c: V, operation: int, value: V) -> None:
        """WAIT while the high half of the ticket is `value`, or less long; WAKE that many sleepers. Without futex, WAIT sleeps
        for 0.5 ms."""
        if self.futex_call:
            word = self.gep(c, self.fields["ticket"][1] + 4)
            args = self.i64(self.futex_call), word, self.const("i32", operation), value, NULL, NULL, self.i64(0)
            self.call(self.get(c, "wait"), "i64 (i64, ...)", *args)
        elif operation == WAIT:
            self.call(self.get(c, "wait"), "i32", self.const("i32", 500))


_functions = Functions()
_native = _functions.native


def module_text(machine: str, futex: int, python: bool = True) -> str:
    """The executor as LLVM IR for a processor (platform.machine()). `futex`: number of its futex system call (0: none). `python`:
    with the functions that Python calls."""
    return _functions.module_text(lambda: ExecutorBody(machine, futex), without=() if python else ("rlx_run_py", "rlx_copy_part"))


# -- steps and tasks -----------------------------------------------------------------------------------------------


def _tasks(e: ExecutorBody, step: V) -> V:
    """The number of tasks from this step to the end of its group."""
    return e.bin("add", e.get(step, "tasks"), e.get(step, "after"))


def _kernel(e: ExecutorBody, run: V, step: V, tid: V) -> Callable[[V], V]:
    """Returns a function that emits the call of the step's kernel for a task, on the scratch of thread `tid`."""
    fn, args, status = e.get(step, "fn"), e.get(step, "args"), e.at(run, "status")
    scratch = e.gep(e.get(run, "scratch"), e.bin("mul", e.get(run, "stride"), tid))
    return lambda task: e.call(fn, "void", args, task, scratch, status)


@_native("ptr", run="ptr", step="ptr", tid="i64", task="i64", before="ptr")
def perform(e: ExecutorBody, run: V, step: V, tid: V, task: V, before: V) -> None:
    """Run task number `task` of the group that starts with this step. Returns the step that it belongs to. `before`: that of the
    thread's last task in this group, or null."""
    with e.loop(0, None, STEP_BYTES, carried=[task]) as each:
        here, (task,) = e.gep(step, each.index), each.carried
        tasks = e.get(here, "tasks")
        with e.when(e.cmp("slt", task, tasks)):
            again = e.select(e.cmp("eq", here, before), e.get(here, "again"), e.i64(0))
            _kernel(e, run, here, tid)(e.bin("add", task, again))
            e.ret(here)
        each.next = [e.bin("sub", task, tasks)]
    e.do("unreachable")


@_native("ptr", step="ptr")
def last_of(e: ExecutorBody, step: V) -> None:
    """The last step in the group of this one."""
    with e.loop(0, None, STEP_BYTES) as each:
        here = e.gep(step, each.index)
        with e.when(e.cmp("eq", e.get(here, "after"), 0)):
            e.ret(here)
    e.do("unreachable")


def _unit(e: ExecutorBody, tasks: V) -> V:
    """How many tasks are taken at once: 1, unless they are so many that a word could not count them."""
    return e.bin("add", e.bin("lshr", tasks, COUNT), 1)


def _part(e: ExecutorBody, c: V, tasks: V, part: V) -> tuple[V, V, V, V]:
    """(number of parts of a group of so many tasks, address of a part's word, its first unit of tasks, one past its last)."""
    unit = _unit(e, tasks)
    units = e.bin("udiv", e.bin("sub", e.bin("add", tasks, unit), 1), unit)
    parts = e.intrinsic("umin", e.convert("zext", e.get(c, "threads"), "i64"), units)
    part = e.bin("urem", part, parts)
    start, stop = (e.bin("udiv", e.bin("mul", units, x), parts) for x in (part, e.bin("add", part, 1)))
    return parts, e.gep(e.at(c, "taken"), e.bin("mul", part, LINE)), start, stop


@_native("i64", c="ptr", tid="i64", tasks="i64")
def publish(e: ExecutorBody, c: V, tid: V, tasks: V) -> None:
    """Publish a new generation of so many tasks; 0: the run has ended. Returns the first unit of the thread's part, which is
    taken for it."""
    with e.loop(0, None, carried=[e.get(c, "ticket", "monotonic")]) as attempt:
        (old,) = attempt.carried
        following = e.bin("mul", e.bin("add", e.bin("udiv", old, GENERATION), 1), GENERATION)
        with e.when(e.cmp("eq", e.bin("and", following, RENEWED - 1), 0)), e.loop(0, MAX_PARTS * LINE, LINE) as part:
            e.store_atomic(following, e.gep(e.at(c, "taken"), part.index))  # words of rarely used parts would seem to be later
        with e.when(e.cmp("ne", tasks, 0)):
            _, word, _, _ = _part(e, c, tasks, tid)
            e.store_atomic(e.bin("or", following, 1), word)  # a later one than all groups, until the ticket has that generation
        following = e.bin("or", e.bin("or", following, e.bin("and", old, STOP)), tasks)
        found, stored = e.exchange_if(e.at(c, "ticket"), old, following)
        with e.when(stored):
            e.branch(attempt.done)
        attempt.next = [found]
    with e.when(e.cmp("eq", tasks, 0)):
        e.ret(e.i64(0))
    e.ret(_part(e, c, tasks, tid)[2])


@_native("i64", c="ptr", tid="i64", ticket="i64", most="i64")
def claim(e: ExecutorBody, c: V, tid: V, ticket: V, most: V) -> None:
    """Take a unit of the tasks of the ticket's group: the next one of the thread's own part, or the last one of another part, of
    `most` parts in all. Returns its number; -1: there is none left in them."""
    tasks, generation = e.tasks_of(ticket), e.bin("and", ticket, -GENERATION)
    parts = e.intrinsic("umin", _part(e, c, tasks, e.i64(0))[0], most)
    with e.loop(0, parts) as each:
        _, place, start, stop = _part(e, c, tasks, e.bin("add", tid, each.index))
        own = e.cmp("eq", each.index, 0)
        more = e.select(own, e.i64(1), e.i64(1 << COUNT))
        with e.loop(0, None, carried=[e.load_atomic("i64", place, "monotonic")]) as attempt:
            (old,) = attempt.carried
            later = e.bin("ashr", e.bin("sub", e.bin("and", old, -GENERATION), generation), 33)
            with e.when(e.cmp("sgt", later, 0)):
                e.ret(e.i64(-1))
            word = e.select(e.cmp("eq", later, 0), old, generation)
            first, last = e.bin("and", word, (1 << COUNT) - 1), e.bin("and", e.bin("lshr", word, COUNT), (1 << COUNT) - 1)
            with e.when(e.cmp("sge", e.bin("add", first, last), e.bin("sub", stop, start))):
                e.branch(attempt.done)
            found, stored = e.exchange_if(place, old, e.bin("add", word, more))
            with e.when(stored):
                e.ret(e.select(own, e.bin("add", start, first), e.bin("sub", e.bin("sub", stop, 1), last)))
            attempt.next = [found]
    e.ret(e.i64(-1))


def _fetching(e: ExecutorBody, c: V, tid: V) -> V:
    """The address of the thread's line of `Control.fetching`."""
    return e.gep(e.at(c, "fetching"), e.bin("mul", tid, LINE))


@_native("void", c="ptr", tid="i64", step="ptr")
def look_ahead(e: ExecutorBody, c: V, tid: V, step: V) -> None:
    """Note what the thread's part of the steps after this one reads, unless it is noted already: then some of it is fetched."""
    ahead, own = e.get(step, "ahead"), _fetching(e, c, tid)
    with e.when(e.cmp("uge", tid, MAX_PARTS)):
        e.ret()
    with e.when(e.cmp("ne", ahead, e.load("ptr", own, 8))):
        e.store(ahead, own, 8)
        noted = e.gep(own, 8)
        e.put(noted, "near_bytes", 0)
        e.put(noted, "later_bytes", 0)
        with e.when(e.cmp("ne", ahead, NULL)):
            reading = e.gep(ahead, e.bin("mul", tid, ctypes.sizeof(Reading)))
            for field in Reading._fields_:
                e.put(noted, field[0], e.get(reading, field[0]))


@_native("i1", c="ptr", tid="i64", lines="i64")
def fetched(e: ExecutorBody, c: V, tid: V, lines: V) -> None:
    """Fetch the next lines, up to so many, of what the thread has noted. Returns whether there were any."""
    with e.when(e.cmp("ult", tid, MAX_PARTS)):
        reading = e.gep(_fetching(e, c, tid), 8)
        for place, size in (("near", "near_bytes"), ("later", "later_bytes")):
            left = e.get(reading, size)
            with e.when(e.cmp("sgt", left, 0)):
                at, nbytes = e.get(reading, place), e.intrinsic("smin", e.bin("mul", lines, LINE), left)
                with e.loop(0, nbytes, LINE) as line:
                    e.prefetch(e.gep(at, line.index), level=2)
                e.put(reading, place, e.gep(at, nbytes))
                e.put(reading, size, e.bin("sub", left, nbytes))
                e.ret(e.const("i1", True))
    e.ret(e.const("i1", False))


def _workers_are_free(e: ExecutorBody, c: V) -> V:
    """Whether there are fewer concurrent runs than workers. Otherwise the callers of those runs need the CPUs."""
    return e.cmp("slt", e.get(c, "alone", "monotonic"), e.get(c, "workers"))


@_native("i64", c="ptr", run="ptr", done="ptr", tid="i64")
def advance(e: ExecutorBody, c: V, run: V, done: V, tid: V) -> None:
    """Continue after the step `done`; all tasks up to its own are done. Runs groups of one task here (all steps if `c` is null).
    Returns the unit of tasks of a larger group, now published, that is taken for this thread; -1: the run has ended, and none of
    its memory may be touched any more."""
    pooled, end = e.cmp("ne", c, NULL), e.get(run, "end")
    address = lambda pointer: e.op("i64", f"ptrtoint {pointer} to i64")  # noqa: E731
    with e.loop(0, None, carried=[address(done)]) as each:
        last = e.op("ptr", f"inttoptr {each.carried[0]} to ptr")  # the last step done
        with e.when(e.cmp("ne", e.get(run, "status"), 0)):
            e.put(run, "failed", last)
            e.branch(each.done)
        step = e.gep(last, STEP_BYTES)
        with e.when(e.cmp("eq", step, end)):
            e.branch(each.done)
        tasks = _tasks(e, step)
        with e.when(e.bin("and", pooled, e.cmp("sgt", tasks, 1))), e.when(_workers_are_free(e, c)):
            e.put(c, "step", step)
            e.put(c, "done", 0)
            own = publish(e, c, tid, tasks)
            sleepers = e.get(c, "sleepers", "seq_cst")
            with e.when(e.bin("and", e.cmp("sgt", sleepers, 0), e.cmp("eq", e.get(step, "quiet"), 0))):
                # the count is lowered only here, and the unit still held excludes a second publisher: so it never falls too low
                called = e.intrinsic("smin", e.convert("trunc", e.bin("sub", tasks, 1), "i32"), sleepers)
                e.change("sub", c, "sleepers", called)
                e.futex(c, WAKE, called)
            e.ret(own)
        with e.when(pooled):
            fetched(e, c, tid, e.i64(LINES_BESIDE))
        call = _kernel(e, run, step, tid)
        with e.loop(0, e.get(step, "tasks")) as task:
            call(e.bin("add", task.index, e.select(e.cmp("eq", task.index, 0), e.i64(0), e.get(step, "again"))))
        jumps = e.cmp("eq", e.get(step, "after"), JUMP)
        each.next = [e.select(jumps, e.load("i64", e.get(step, "args"), 8), address(step))]
    with e.when(pooled):
        publish(e, c, tid, e.i64(0))
        with e.when(e.cmp("ne", e.get(c, "caller_asleep", "seq_cst"), 0)):
            e.futex(c, WAKE, EVERYBODY)
    e.ret(e.i64(-1))


@_native("void", c="ptr", tid="i64", ticket="i64")
def wait(e: ExecutorBody, c: V, tid: V, ticket: V) -> None:
    """Wait until the high half of the ticket changes; may return early. First fetches what the thread reads next."""
    seen = e.bin("lshr", ticket, 32)
    with e.loop(0, None) as each:
        with e.when(e.bin("xor", fetched(e, c, tid, e.i64(LINES)), e.const("i1", True))):
            e.branch(each.done)
        with e.when(e.cmp("ne", e.bin("lshr", e.get(c, "ticket", "acquire"), 32), seen)):
            e.ret()
    spins = e.select(e.between_runs(ticket), e.get(c, "idle_spins"), e.get(c, "busy_spins"))
    with e.loop(0, spins), e.when(e.cmp("ne", e.spin(c), seen)):
        e.ret()
    with e.loop(0, e.get(c, "yields")):
        e.call(e.get(c, "sched_yield"), "i32")
        with e.when(e.cmp("ne", e.spin(c), seen)):
            e.ret()
    caller = e.cmp("eq", tid, 0)
    with e.when(caller):
        e.put(c, "caller_asleep", 1, "seq_cst")
    e.change("add", c, "sleepers", 1)
    e.futex(c, WAIT, e.convert("trunc", seen, "i32"))
    with e.when(caller):
        e.put(c, "caller_asleep", 0, "seq_cst")


@_native("i64", c="ptr", tid="i64", seen="i64")
def take(e: ExecutorBody, c: V, tid: V, seen: V) -> None:
    """Wait for tasks of a published group and return the number of a unit. -1: the run has ended (caller, tid 0), or the pool
    stops. `seen`: a ticket that has none left."""
    with e.loop(0, None, carried=[seen]) as each:
        ticket, stop = e.get(c, "ticket", "seq_cst"), e.get(c, "stop", "seq_cst")
        idle = e.between_runs(ticket)
        with e.when(e.cmp("ne", ticket, e.select(idle, ticket, each.carried[0]))):
            unit = claim(e, c, tid, ticket, e.i64(MAX_PARTS))
            with e.when(e.cmp("sge", unit, 0)):
                e.ret(unit)
        with e.when(e.select(e.cmp("eq", tid, 0), idle, e.cmp("ne", stop, 0))):
            e.ret(e.i64(-1))
        wait(e, c, tid, ticket)
        each.next = [ticket]
    e.do("unreachable")


@_native("i64", c="ptr", tid="i64", first="i64")
def work(e: ExecutorBody, c: V, tid: V, first: V) -> None:
    """Do the unit `first` of the published group's tasks, then the rest of the thread's part, then tasks of other parts while any
    are left. Returns the next unit, as `take` does."""
    run, step, ticket = e.get(c, "run"), e.get(c, "step"), e.get(c, "ticket", "seq_cst")
    tasks = e.tasks_of(ticket)
    size = _unit(e, tasks)
    e.prefetch(e.gep(e.get(step, "ahead"), e.bin("mul", tid, ctypes.sizeof(Reading))))  # for `look_ahead`
    with e.loop(0, None, carried=[first, NULL]) as each:
        with e.when(e.cmp("slt", each.carried[0], 0)):
            e.branch(each.done)
        with e.loop(0, None, carried=[*each.carried, e.i64(0)]) as own:
            unit, before, mine = own.carried
            with e.when(e.cmp("slt", unit, 0)):
                e.branch(own.done)
            begin = e.bin("mul", unit, size)
            end = e.intrinsic("umin", e.bin("add", begin, size), tasks)
            with e.loop(begin, end, carried=[before], nonempty=True) as task:
                task.next = [perform(e, run, step, tid, task.index, *task.carried)]
            own.next = [claim(e, c, tid, ticket, e.i64(1)), *task.results, e.bin("sub", e.bin("add", mine, end), begin)]
        look_ahead(e, c, tid, step)  # before the tasks count as done: the table may be freed then
        mine = e.convert("trunc", mine, "i32")
        all_done = e.bin("add", e.change("add", c, "done", mine), mine)
        with e.when(e.cmp("eq", all_done, e.convert("trunc", tasks, "i32"))):
            unit = advance(e, c, run, last_of(e, step), tid)
            with e.when(e.cmp("sge", unit, 0)):
                e.ret(unit)
            e.branch(each.done)
        each.next = [claim(e, c, tid, ticket, e.i64(MAX_PARTS)), before]
    e.ret(take(e, c, tid, ticket))


@_native("void", c="ptr", tid="i64", first="i64")
def share(e: ExecutorBody, c: V, tid: V, first: V) -> None:
    """Work from the unit `first` on: the caller (tid 0) until its run has ended, a worker until the pool stops."""
    with e.loop(0, None, carried=[first]) as each:
        (unit,) = each.carried
        with e.when(e.cmp("slt", unit, 0)):
            e.branch(each.done)
        each.next = [work(e, c, tid, unit)]


@_native("i32", c="ptr", run="ptr", before="ptr")
def together(e: ExecutorBody, c: V, run: V, before: V) -> None:
    """A run that holds the pool's lock. `before`: address of the step before the first. Returns the status, or ATTEND: the pool
    has no workers, or this thread runs on the CPU that a worker is pinned to, which keeps that worker from running."""
    helped = e.cmp("ne", e.get(c, "workers"), 0)
    e.put(c, "run", run)
    share(e, c, e.i64(0), advance(e, e.select(helped, c, NULL), run, before, e.i64(0)))
    status = e.get(run, "status")
    e.put(c, "lock", 0, "release")
    with e.when(e.cmp("ne", status, 0)):
        e.ret(status)
    getcpu = e.get(c, "getcpu")
    with e.when(e.bin("and", _workers_are_free(e, c), e.cmp("ne", getcpu, NULL))):  # the pool has workers
        cpu = e.convert("zext", e.call(getcpu, "i32"), "i64")
        with e.when(e.cmp("ult", cpu, MAX_CPUS)):
            pinned = e.load("i8", e.gep(e.at(c, "pinned"), cpu), 1)
            e.ret(e.convert("sext", pinned, "i32"))
    e.ret(e.select(helped, e.const("i32", 0), e.const("i32", ATTEND)))


# -- entries -------------------------------------------------------------------------------------------------------


@_native("i32", run="ptr")
def rlx_run(e: ExecutorBody, run: V) -> None:
    """The whole run. Returns its status, or ATTEND. Runs on this thread alone if another run holds the pool."""
    e.put(run, "status", 0)
    before = e.gep(e.get(run, "first"), -STEP_BYTES)
    c = e.get(run, "control")
    with e.when(e.cmp("ne", c, NULL)):
        _, free = e.exchange_if(e.at(c, "lock"), e.const("i32", 0), e.const("i32", 1))
        with e.when(free):
            e.ret(together(e, c, run, before))
        e.change("add", c, "alone", 1)
        advance(e, NULL, run, before, e.i64(0))
        e.change("sub", c, "alone", 1)
        e.ret(e.get(run, "status"))
    advance(e, NULL, run, before, e.i64(0))
    e.ret(e.get(run, "status"))


@_native("ptr", self="ptr", unused="ptr")
def rlx_run_py(e: ExecutorBody, self: V, unused: V) -> None:
    """rlx_run as a CPython function of no arguments: `self` is an int, the Run's address. The GIL is released meanwhile."""
    run = e.python("PyLong_AsVoidPtr", "ptr", self)
    thread = e.python("PyEval_SaveThread", "ptr")
    status = rlx_run(e, run)
    e.python("PyEval_RestoreThread", "void", thread)
    e.ret(e.python("PyLong_FromLong", "ptr", e.convert("sext", status, "i64")))


@_native("void", c="ptr", tid="i64")
def rlx_work(e: ExecutorBody, c: V, tid: V) -> None:
    """The main function of a worker; returns when the pool stops."""
    share(e, c, tid, take(e, c, tid, e.i64(0)))


@_native("void", c="ptr")
def rlx_stop(e: ExecutorBody, c: V) -> None:
    """Make every worker return; may be called at any time."""
    e.put(c, "stop", 1, "seq_cst")
    e.change("or", c, "ticket", STOP)
    e.futex(c, WAKE, EVERYBODY)


@_native("i64", c="ptr", spins="i64")
def rlx_spin(e: ExecutorBody, c: V, spins: V) -> None:
    """Iterations of the spin loop, for timing it."""
    with e.loop(0, spins):
        e.spin(c)
    e.ret(spins)


@_native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_copy_part(e: ExecutorBody, args: V, task: V, scratch: V, status: V) -> None:
    """A kernel for `copying.Copies`. args: goal, source, bytes, number of parts. Copies part number `task`, in whole lines; the
    last one has the rest."""
    goal, source = (e.load("ptr", e.gep(args, 8 * i), 8) for i in range(2))
    nbytes, parts = (e.load("i64", e.gep(args, 8 * i), 8) for i in (2, 3))
    each = e.bin("mul", e.bin("udiv", e.bin("udiv", nbytes, LINE), parts), LINE)
    start = e.bin("mul", task, each)
    size = e.select(e.cmp("eq", e.bin("add", task, 1), parts), e.bin("sub", nbytes, start), each)
    no = e.const("i1", False)
    e.intrinsic("memcpy", e.gep(goal, start), e.gep(source, start), size, no, suffix=("ptr", "ptr", "i64"), returns="void")

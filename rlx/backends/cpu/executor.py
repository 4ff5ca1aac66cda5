"""The executor: machine code that runs a flat table of steps, on one thread or with worker threads that stay inside it.

A run offers its table to every thread that is awake. Independent steps form a group. A group runs like one step: its tasks are
those of its steps, numbered step after step. One word, the ticket, holds a generation (high half) and the number of tasks left in
the current group (low half, above BIAS); taking a task is one atomic subtraction. Where threads are few, another word tells which
task that is: each thread has a part of the tasks, those of adjacent numbers, and takes the last ones of others' parts when its
own is used up. So a thread mostly reads the rows that it wrote in the step before, from its own cache. No thread waits for a
thread without a task: a group ends when its tasks are done, and the thread that finished the last one starts the next group, or
the one to which a jump leads (rlx.backends.cpu.flow). That thread runs groups of one task itself and publishes larger ones with a
new generation. A late or missing worker only means less parallelism, so a run is correct with any number of workers, including
none.

A thread without a task touches only the Control block, which lives as long as the process. So a table may be freed as soon
as its run returns. Waiting is bounded spinning, then sched_yield, then a futex on the generation.

Each function below decorated with `@_native` emits the body of one function in machine code. Called from another such function,
it emits a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rlx.backends.cpu.abi import ATTEND, BIAS, END, GENERATION, JUMP, MAX_CPUS, MAX_PARTS, PART_BYTES, Control, Run, Step
from rlx.host.emit import V
from rlx.host.functions import EVERYBODY, NULL, Body, Functions, fields_of

STEP_BYTES = ctypes.sizeof(Step)
OTHERS = 32  # bits in front of the number of tasks that other threads took from a part
WAIT, WAKE = 128, 129  # futex operations, private to the process


class ExecutorBody(Body):
    """Emits the body of a function that works on a Control block, a Run and its Steps."""

    fields = fields_of(Step, Run, Control)

    def tasks_left(self, ticket: V) -> V:
        """The number of tasks left, if positive."""
        return self.bin("sub", self.bin("and", ticket, GENERATION - 1), BIAS)

    def between_runs(self, ticket: V) -> V:
        return self.cmp("sle", self.tasks_left(ticket), END - BIAS)

    def spin(self, c: V) -> V:
        """One iteration of a spin loop: a short pause, then the current generation."""
        self.pause()
        return self.bin("lshr", self.get(c, "ticket", "acquire"), 32)

    def futex(self, c: V, operation: int, value: V) -> None:
        """WAIT while the generation is `value`, or less long; WAKE that many sleepers. Without futex, WAIT sleeps for 0.5 ms."""
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
    with the function that Python calls."""
    return _functions.module_text(lambda: ExecutorBody(machine, futex), without=() if python else ("rlx_run_py",))


# -- steps and tasks -----------------------------------------------------------------------------------------------


def _tasks(e: ExecutorBody, step: V) -> V:
    """The number of tasks from this step to the end of its group."""
    return e.bin("add", e.get(step, "tasks"), e.get(step, "after"))


def _kernel(e: ExecutorBody, run: V, step: V, tid: V) -> Callable[[V], V]:
    """Returns a function that emits the call of the step's kernel for a task, on the scratch of thread `tid`."""
    fn, args, status = e.get(step, "fn"), e.get(step, "args"), e.at(run, "status")
    scratch = e.gep(e.get(run, "scratch"), e.bin("mul", e.get(run, "stride"), tid))
    return lambda task: e.call(fn, "void", args, task, scratch, status)


@_native("void", run="ptr", step="ptr", tid="i64", task="i64")
def perform(e: ExecutorBody, run: V, step: V, tid: V, task: V) -> None:
    """Run task number `task` of the group that starts with this step."""
    with e.loop(0, None, STEP_BYTES, carried=[task]) as each:
        here, (task,) = e.gep(step, each.index), each.carried
        tasks = e.get(here, "tasks")
        with e.when(e.cmp("slt", task, tasks)):
            _kernel(e, run, here, tid)(task)
            e.ret()
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


@_native("void", c="ptr", low="i64")
def publish(e: ExecutorBody, c: V, low: V) -> None:
    """Publish a new generation with `low` in the low half."""
    with e.loop(0, None, carried=[e.get(c, "ticket", "monotonic")]) as attempt:
        (old,) = attempt.carried
        next_generation = e.bin("add", e.bin("or", old, GENERATION - 1), 1)
        found, stored = e.exchange_if(e.at(c, "ticket"), old, e.bin("or", next_generation, low))
        with e.when(stored):
            e.branch(attempt.done)
        attempt.next = [found]


@_native("void", c="ptr", tasks="i64")
def divide(e: ExecutorBody, c: V, tasks: V) -> None:
    """Begin a group of so many tasks: a part for each thread, none of it taken; none if the threads are many."""
    threads = e.bin("add", e.convert("zext", e.get(c, "workers"), "i64"), 1)
    parts = e.select(e.cmp("ule", threads, MAX_PARTS), e.intrinsic("umin", threads, tasks), e.i64(0))
    e.put(c, "parts", e.convert("trunc", parts, "i32"))
    with e.loop(0, parts) as part:
        e.store(e.i64(0), e.gep(e.at(c, "taken"), e.bin("mul", part.index, PART_BYTES)), 8)


@_native("i64", c="ptr", tid="i64", tasks="i64", left="i64")
def claim(e: ExecutorBody, c: V, tid: V, tasks: V, left: V) -> None:
    """The number of a task of the current group, for a thread that has taken one from the ticket: the next one of its own part,
    or the last one of another. There is one, since the ticket gives no more than there are. `left`: tasks that were left with
    it, 0 for the reserved one; without parts they are numbered by that."""
    parts = e.convert("zext", e.get(c, "parts"), "i64")
    with e.when(e.cmp("eq", parts, 0)):
        e.ret(e.bin("urem", e.bin("sub", tasks, left), tasks))
    with e.loop(0, None, carried=[e.bin("urem", tid, parts)]) as each:
        (part,) = each.carried
        start, stop = (e.bin("udiv", e.bin("mul", tasks, x), parts) for x in (part, e.bin("add", part, 1)))
        own = e.cmp("eq", each.index, 0)
        more = e.select(own, e.i64(1), e.i64(1 << OTHERS))
        taken = e.update_atomic("add", e.gep(e.at(c, "taken"), e.bin("mul", part, PART_BYTES)), more)
        first, last = e.bin("and", taken, (1 << OTHERS) - 1), e.bin("lshr", taken, OTHERS)
        with e.when(e.cmp("slt", e.bin("add", first, last), e.bin("sub", stop, start))):
            e.ret(e.select(own, e.bin("add", start, first), e.bin("sub", e.bin("sub", stop, 1), last)))
        each.next = [e.bin("urem", e.bin("add", part, 1), parts)]
    e.do("unreachable")


def _workers_are_free(e: ExecutorBody, c: V) -> V:
    """Whether there are fewer concurrent runs than workers. Otherwise the callers of those runs need the CPUs."""
    return e.cmp("slt", e.get(c, "alone", "monotonic"), e.get(c, "workers"))


@_native("i1", c="ptr", run="ptr", done="ptr", tid="i64")
def advance(e: ExecutorBody, c: V, run: V, done: V, tid: V) -> None:
    """Continue after the step `done`; all tasks up to its own are done. Runs groups of one task here (all steps if `c` is null).
    True: a larger group was published, and one of its tasks is reserved for this thread. False: the run has ended, and none of
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
            divide(e, c, tasks)
            rest = e.bin("sub", tasks, 1)
            publish(e, c, e.bin("add", rest, BIAS))
            sleepers = e.get(c, "sleepers", "seq_cst")
            with e.when(e.cmp("sgt", sleepers, 0)):
                # the count is lowered only here, and the task still held excludes a second publisher: so it never falls too low
                called = e.intrinsic("smin", e.convert("trunc", rest, "i32"), sleepers)
                e.change("sub", c, "sleepers", called)
                e.futex(c, WAKE, called)
            e.ret(e.const("i1", True))
        call = _kernel(e, run, step, tid)
        with e.loop(0, e.get(step, "tasks")) as task:
            call(task.index)
        jumps = e.cmp("eq", e.get(step, "after"), JUMP)
        each.next = [e.select(jumps, e.load("i64", e.get(step, "args"), 8), address(step))]
    with e.when(pooled):
        publish(e, c, e.i64(END))
        with e.when(e.cmp("ne", e.get(c, "caller_asleep", "seq_cst"), 0)):
            e.futex(c, WAKE, EVERYBODY)
    e.ret(e.const("i1", False))


@_native("void", c="ptr", tid="i64", ticket="i64")
def wait(e: ExecutorBody, c: V, tid: V, ticket: V) -> None:
    """Wait until the generation differs from the ticket's; may return early."""
    seen = e.bin("lshr", ticket, 32)
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


@_native("i64", c="ptr", tid="i64")
def take(e: ExecutorBody, c: V, tid: V) -> None:
    """Wait for a task of a published group and return its number. -1: the run has ended (caller, tid 0), or the pool stops."""
    with e.loop(0, None):
        ticket = e.get(c, "ticket", "seq_cst")
        with e.when(e.cmp("sgt", e.tasks_left(ticket), 0)):
            left = e.tasks_left(e.change("sub", c, "ticket", 1))
            with e.when(e.cmp("sgt", left, 0)):
                e.ret(claim(e, c, tid, _tasks(e, e.get(c, "step")), left))
        stopped = e.cmp("ne", e.get(c, "stop", "seq_cst"), 0)
        with e.when(e.select(e.cmp("eq", tid, 0), e.between_runs(ticket), stopped)):
            e.ret(e.i64(-1))
        wait(e, c, tid, ticket)
    e.do("unreachable")


@_native("i64", c="ptr", tid="i64", first="i64")
def work(e: ExecutorBody, c: V, tid: V, first: V) -> None:
    """Do task `first` of the published group, then further ones while any are left. Returns the next task, as `take` does."""
    run, step = e.get(c, "run"), e.get(c, "step")
    tasks = _tasks(e, step)
    with e.loop(0, None, carried=[first]) as each:
        (task,) = each.carried
        perform(e, run, step, tid, task)
        left = e.tasks_left(e.change("sub", c, "ticket", 1))
        with e.when(e.cmp("sle", left, 0)):
            e.branch(each.done)
        each.next = [claim(e, c, tid, tasks, left)]
    mine = e.convert("trunc", e.bin("add", each.index, 1), "i32")
    all_done = e.bin("add", e.change("add", c, "done", mine), mine)
    with e.when(e.cmp("eq", all_done, e.convert("trunc", tasks, "i32"))), e.when(advance(e, c, run, last_of(e, step), tid)):
        e.ret(claim(e, c, tid, _tasks(e, e.get(c, "step")), e.i64(0)))
    e.ret(take(e, c, tid))


@_native("void", c="ptr", tid="i64", first="i64")
def share(e: ExecutorBody, c: V, tid: V, first: V) -> None:
    """Work from task `first` on: the caller (tid 0) until its run has ended, a worker until the pool stops."""
    with e.loop(0, None, carried=[first]) as each:
        (task,) = each.carried
        with e.when(e.cmp("slt", task, 0)):
            e.branch(each.done)
        each.next = [work(e, c, tid, task)]


@_native("i32", c="ptr", run="ptr", before="ptr")
def together(e: ExecutorBody, c: V, run: V, before: V) -> None:
    """A run that holds the pool's lock. `before`: address of the step before the first. Returns the status, or ATTEND: the pool
    has no workers, or this thread runs on the CPU that a worker is pinned to, which keeps that worker from running."""
    helped = e.cmp("ne", e.get(c, "workers"), 0)
    e.put(c, "run", run)
    with e.when(advance(e, e.select(helped, c, NULL), run, before, e.i64(0))):
        share(e, c, e.i64(0), claim(e, c, e.i64(0), _tasks(e, e.get(c, "step")), e.i64(0)))
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
    share(e, c, tid, take(e, c, tid))


@_native("void", c="ptr")
def rlx_stop(e: ExecutorBody, c: V) -> None:
    """Make every worker return; may be called at any time."""
    e.put(c, "stop", 1, "seq_cst")
    e.change("add", c, "ticket", GENERATION)
    e.futex(c, WAKE, EVERYBODY)


@_native("i64", c="ptr", spins="i64")
def rlx_spin(e: ExecutorBody, c: V, spins: V) -> None:
    """Iterations of the spin loop, for timing it."""
    with e.loop(0, spins):
        e.spin(c)
    e.ret(spins)

"""The walker: compiled code that takes a flat table of steps, alone or together with threads that stay inside it.

A run offers its table to whoever is awake. One word, the ticket, holds a generation (high half) and how many tasks of the
current step are left (low half, above BIAS); taking a task is one atomic subtraction. Nobody waits for a thread that
has no task: a step ends when its tasks are done, and the thread that did the last one takes the next step. It runs
steps of one task itself and publishes the others with a new generation. A worker that comes late, or never, costs
nothing but its help, so a run is right with any number of workers, down to none.

Who holds no task touches only the Control block, which lives as long as the process; so a table may be freed as soon
as its run returns. Waiting is bounded spinning, then sched_yield, then a futex on the generation.
"""

from __future__ import annotations

import ctypes
from string import Template

MAX_THREADS = 1024
MAX_TASKS = 1 << 31
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
    """A pool's shared words. All that changes in a run lies on one cache line; the second line is constant."""

    _fields_ = [
        ("ticket", ctypes.c_uint64), ("step", ctypes.c_void_p), ("run", ctypes.c_void_p), ("done", ctypes.c_int32),
        ("sleepers", ctypes.c_int32), ("lock", ctypes.c_int32), ("workers", ctypes.c_int32), ("caller_asleep", ctypes.c_int32),
        ("stop", ctypes.c_int32), ("pad", ctypes.c_int64 * 2),
        ("idle_spins", ctypes.c_int64), ("busy_spins", ctypes.c_int64), ("yields", ctypes.c_int64),
        ("wait", ctypes.c_void_p), ("sched_yield", ctypes.c_void_p), ("getcpu", ctypes.c_void_p),
        ("pinned", ctypes.c_uint8 * 128),
    ]  # fmt: skip


BIAS = 1 << 16  # threads that come too late subtract from this; at most two per thread and generation
END = 1 << 15  # low half between runs
PAUSE = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "AMD64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
    "arm64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
# Sleep until the generation is no longer %seen (may return early), and wake `n` sleepers: by futex, private to the process.
FUTEX = """
  call i64 (i64, ...) %wait(i64 $futex, ptr %word, i32 $operation, i32 $value, ptr null, ptr null, i64 0)"""
# Without futex: sleep half a millisecond; there is nobody to wake.
NAP = """
  call i32 %wait(i32 500)"""

# $step_args, $control_lock …: byte offsets of the fields above. `seen` and generations are i64 (ticket >> 32).
TEXT = """
$pause_declaration
attributes #0 = { nounwind }

; one call of the step's function per task, from %first up to %tasks
define internal void @call(ptr %run, ptr %step, i64 %task, i64 %tid) #0 {
  %fn = load ptr, ptr %step
  %args.p = getelementptr i8, ptr %step, i64 $step_args
  %args = load ptr, ptr %args.p
  %scratch.p = getelementptr i8, ptr %run, i64 $run_scratch
  %scratch = load ptr, ptr %scratch.p
  %stride.p = getelementptr i8, ptr %run, i64 $run_stride
  %stride = load i64, ptr %stride.p
  %offset = mul i64 %stride, %tid
  %mine = getelementptr i8, ptr %scratch, i64 %offset
  %status = getelementptr i8, ptr %run, i64 $run_status
  call void %fn(ptr %args, i64 %task, ptr %mine, ptr %status)
  ret void
}

; the status; if it is an error, %step is noted as the failed one
define internal i32 @outcome(ptr %run, ptr %step) #0 {
  %status.p = getelementptr i8, ptr %run, i64 $run_status
  %status = load i32, ptr %status.p
  %good = icmp eq i32 %status, 0
  br i1 %good, label %out, label %bad
bad:
  %failed.p = getelementptr i8, ptr %run, i64 $run_failed
  store ptr %step, ptr %failed.p
  br label %out
out:
  ret i32 %status
}

; every step on this thread
define internal i32 @alone(ptr %run) #0 {
entry:
  %first = load ptr, ptr %run
  %end.p = getelementptr i8, ptr %run, i64 $run_end
  %end = load ptr, ptr %end.p
  br label %look
look:
  %step = phi ptr [%first, %entry], [%next, %after]
  %over = icmp eq ptr %step, %end
  br i1 %over, label %good, label %open
open:
  %tasks.p = getelementptr i8, ptr %step, i64 $step_tasks
  %tasks = load i64, ptr %tasks.p
  br label %more
more:
  %task = phi i64 [0, %open], [%task.next, %one]
  %some = icmp slt i64 %task, %tasks
  br i1 %some, label %one, label %after
one:
  call void @call(ptr %run, ptr %step, i64 %task, i64 0)
  %task.next = add i64 %task, 1
  br label %more
after:
  %status = call i32 @outcome(ptr %run, ptr %step)
  %next = getelementptr i8, ptr %step, i64 $step_bytes
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %out, label %look
good:
  br label %out
out:
  %result = phi i32 [0, %good], [%status, %after]
  ret i32 %result
}

; new generation with %low in the low half
define internal void @publish(ptr %c, i64 %low) #0 {
entry:
  %before = load atomic i64, ptr %c monotonic, align 64
  br label %try
try:
  %old = phi i64 [%before, %entry], [%found, %try]
  %cleared = and i64 %old, -4294967296
  %higher = add i64 %cleared, 4294967296
  %new = or i64 %higher, %low
  %pair = cmpxchg ptr %c, i64 %old, i64 %new seq_cst seq_cst, align 64
  %found = extractvalue { i64, i1 } %pair, 0
  %ok = extractvalue { i64, i1 } %pair, 1
  br i1 %ok, label %out, label %try
out:
  ret void
}

define internal void @wake(ptr %c, i32 %n) #0 {
  %word = getelementptr i8, ptr %c, i64 4
  %wait.p = getelementptr i8, ptr %c, i64 $control_wait
  %wait = load ptr, ptr %wait.p$wake
  ret void
}

define internal void @doze(ptr %c, i32 %seen) #0 {
  %word = getelementptr i8, ptr %c, i64 4
  %wait.p = getelementptr i8, ptr %c, i64 $control_wait
  %wait = load ptr, ptr %wait.p$doze
  ret void
}

; All tasks of %done are done: go on. Runs steps of one task here; returns the next larger step, published, its task 0
; kept for this thread; or null: the run has ended, and nothing of it may be touched any more.
define internal ptr @advance(ptr %c, ptr %run, ptr %done, i64 %tid) #0 {
entry:
  %end.p = getelementptr i8, ptr %run, i64 $run_end
  %end = load ptr, ptr %end.p
  %status = call i32 @outcome(ptr %run, ptr %done)
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %finish, label %following
following:
  %before = phi ptr [%done, %entry], [%step, %small], [%step, %one]
  %step = getelementptr i8, ptr %before, i64 $step_bytes
  %over = icmp eq ptr %step, %end
  br i1 %over, label %finish, label %open
open:
  %tasks.p = getelementptr i8, ptr %step, i64 $step_tasks
  %tasks = load i64, ptr %tasks.p
  %many = icmp sgt i64 %tasks, 1
  br i1 %many, label %large, label %small
small:
  %some = icmp eq i64 %tasks, 1
  br i1 %some, label %one, label %following
one:
  call void @call(ptr %run, ptr %step, i64 0, i64 %tid)
  %status.one = call i32 @outcome(ptr %run, ptr %step)
  %bad.one = icmp ne i32 %status.one, 0
  br i1 %bad.one, label %finish, label %following
large:
  %step.p = getelementptr i8, ptr %c, i64 $control_step
  store ptr %step, ptr %step.p
  %done.p = getelementptr i8, ptr %c, i64 $control_done
  store atomic i32 0, ptr %done.p monotonic, align 4
  %left = sub i64 %tasks, 1
  %low = add i64 %left, $bias
  call void @publish(ptr %c, i64 %low)
  %sleepers.p = getelementptr i8, ptr %c, i64 $control_sleepers
  %sleepers = load atomic i32, ptr %sleepers.p seq_cst, align 4
  %any = icmp sgt i32 %sleepers, 0
  br i1 %any, label %call, label %out
call:
  ; only here is the count lowered, and task 0, still in hand, keeps a second publisher away: it never falls too low
  %left.32 = trunc i64 %left to i32
  %n = call i32 @llvm.smin.i32(i32 %left.32, i32 %sleepers)
  %x = atomicrmw sub ptr %sleepers.p, i32 %n seq_cst
  call void @wake(ptr %c, i32 %n)
  br label %out
out:
  ret ptr %step
finish:
  call void @publish(ptr %c, i64 $end)
  %asleep.p = getelementptr i8, ptr %c, i64 $control_caller_asleep
  %asleep = load atomic i32, ptr %asleep.p seq_cst, align 4
  %calls = icmp ne i32 %asleep, 0
  br i1 %calls, label %rouse, label %ended
rouse:
  call void @wake(ptr %c, i32 2147483647)
  br label %ended
ended:
  ret ptr null
}
declare i32 @llvm.smin.i32(i32, i32)

; Take part: the caller (tid 0) until its run has ended, a worker until the pool stops. %mine: a step whose task 0 is ours.
define internal void @share(ptr %c, i64 %tid, ptr %mine) #0 {
entry:
  %caller = icmp eq i64 %tid, 0
  %step.p = getelementptr i8, ptr %c, i64 $control_step
  %run.p = getelementptr i8, ptr %c, i64 $control_run
  %done.p = getelementptr i8, ptr %c, i64 $control_done
  %sleepers.p = getelementptr i8, ptr %c, i64 $control_sleepers
  %asleep.p = getelementptr i8, ptr %c, i64 $control_caller_asleep
  %stop.p = getelementptr i8, ptr %c, i64 $control_stop
  %idle.p = getelementptr i8, ptr %c, i64 $control_idle_spins
  %busy.p = getelementptr i8, ptr %c, i64 $control_busy_spins
  %yields.p = getelementptr i8, ptr %c, i64 $control_yields
  %yield.p = getelementptr i8, ptr %c, i64 $control_sched_yield
  %have = icmp ne ptr %mine, null
  br i1 %have, label %tasks, label %look
look:
  %t = load atomic i64, ptr %c seq_cst, align 64
  %t.low = and i64 %t, 4294967295
  %left = icmp ugt i64 %t.low, $bias
  br i1 %left, label %claim, label %dry
claim:
  %c.old = atomicrmw sub ptr %c, i64 1 seq_cst
  %c.low = and i64 %c.old, 4294967295
  %c.got = icmp ugt i64 %c.low, $bias
  br i1 %c.got, label %claimed, label %dry
claimed:
  %c.step = load ptr, ptr %step.p
  %c.size.p = getelementptr i8, ptr %c.step, i64 $step_tasks
  %c.size = load i64, ptr %c.size.p
  %c.rest = sub i64 %c.low, $bias
  %c.task = sub i64 %c.size, %c.rest
  br label %tasks
tasks:
  %step = phi ptr [%mine, %entry], [%c.step, %claimed], [%following, %advance]
  %first = phi i64 [0, %entry], [%c.task, %claimed], [0, %advance]
  %run = load ptr, ptr %run.p
  %size.p = getelementptr i8, ptr %step, i64 $step_tasks
  %size = load i64, ptr %size.p
  %final = sub i64 %size, 1
  br label %one
one:
  %task = phi i64 [%first, %tasks], [%task.next, %again]
  %count = phi i32 [1, %tasks], [%count.next, %again]
  call void @call(ptr %run, ptr %step, i64 %task, i64 %tid)
  %last = icmp eq i64 %task, %final
  br i1 %last, label %report, label %again
again:
  %a.old = atomicrmw sub ptr %c, i64 1 seq_cst
  %a.low = and i64 %a.old, 4294967295
  %a.got = icmp ugt i64 %a.low, $bias
  %a.rest = sub i64 %a.low, $bias
  %task.next = sub i64 %size, %a.rest
  %count.next = add i32 %count, 1
  br i1 %a.got, label %one, label %report
report:
  %before = atomicrmw add ptr %done.p, i32 %count seq_cst
  %total = add i32 %before, %count
  %size.32 = trunc i64 %size to i32
  %all = icmp eq i32 %total, %size.32
  br i1 %all, label %advance, label %look
advance:
  %following = call ptr @advance(ptr %c, ptr %run, ptr %step, i64 %tid)
  %ended = icmp eq ptr %following, null
  br i1 %ended, label %look, label %tasks

; nothing to take: wait for a generation other than the one that was found empty
dry:
  %empty = phi i64 [%t, %look], [%c.old, %claim]
  %empty.low = and i64 %empty, 4294967295
  %seen = lshr i64 %empty, 32
  %between = icmp ule i64 %empty.low, $end
  br i1 %caller, label %dry.caller, label %dry.worker
dry.caller:
  br i1 %between, label %out, label %spin.start
dry.worker:
  %stop = load atomic i32, ptr %stop.p seq_cst, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %out, label %spin.start
spin.start:
  %budget.p = select i1 %between, ptr %idle.p, ptr %busy.p
  %budget = load i64, ptr %budget.p
  br label %spin
spin:
  %i = phi i64 [0, %spin.start], [%i.next, %spin.more]
  $pause
  %s = load atomic i64, ptr %c acquire, align 64
  %s.high = lshr i64 %s, 32
  %s.same = icmp eq i64 %s.high, %seen
  br i1 %s.same, label %spin.more, label %look
spin.more:
  %i.next = add i64 %i, 1
  %spinning = icmp slt i64 %i.next, %budget
  br i1 %spinning, label %spin, label %yield.start
yield.start:
  %yields = load i64, ptr %yields.p
  %yield = load ptr, ptr %yield.p
  br label %give
give:
  %j = phi i64 [0, %yield.start], [%j.next, %give.more]
  %y = call i32 %yield()
  %g = load atomic i64, ptr %c acquire, align 64
  %g.high = lshr i64 %g, 32
  %g.same = icmp eq i64 %g.high, %seen
  br i1 %g.same, label %give.more, label %look
give.more:
  %j.next = add i64 %j, 1
  %giving = icmp slt i64 %j.next, %yields
  br i1 %giving, label %give, label %sleep
sleep:
  %caller.32 = zext i1 %caller to i32
  br i1 %caller, label %sleep.caller, label %sleep.all
sleep.caller:
  store atomic i32 1, ptr %asleep.p seq_cst, align 4
  br label %sleep.all
sleep.all:
  %q = atomicrmw add ptr %sleepers.p, i32 1 seq_cst
  %seen.32 = trunc i64 %seen to i32
  call void @doze(ptr %c, i32 %seen.32)
  br i1 %caller, label %woken.caller, label %look
woken.caller:
  store atomic i32 0, ptr %asleep.p seq_cst, align 4
  br label %look
out:
  ret void
}

; The entry. Returns the status; $attend: no error, but the pool has no workers,
; or we are on the CPU of one, which then cannot run.
define i32 @rlx_run(ptr %run) #0 {
entry:
  %first = load ptr, ptr %run
  %status.p = getelementptr i8, ptr %run, i64 $run_status
  store i32 0, ptr %status.p
  %control.p = getelementptr i8, ptr %run, i64 $run_control
  %c = load ptr, ptr %control.p
  %single = icmp eq ptr %c, null
  br i1 %single, label %alone, label %lock
lock:
  %lock.p = getelementptr i8, ptr %c, i64 $control_lock
  %pair = cmpxchg ptr %lock.p, i32 0, i32 1 acquire monotonic
  %free = extractvalue { i32, i1 } %pair, 1
  br i1 %free, label %held, label %alone
alone:
  %r.alone = call i32 @alone(ptr %run)
  ret i32 %r.alone
held:
  %workers.p = getelementptr i8, ptr %c, i64 $control_workers
  %workers = load i32, ptr %workers.p
  %some = icmp ne i32 %workers, 0
  br i1 %some, label %together, label %empty
empty:
  %r.empty = call i32 @alone(ptr %run)
  store atomic i32 0, ptr %lock.p release, align 4
  %good = icmp eq i32 %r.empty, 0
  %r.none = select i1 %good, i32 $attend, i32 %r.empty
  ret i32 %r.none
together:
  %run.p = getelementptr i8, ptr %c, i64 $control_run
  store ptr %run, ptr %run.p
  %zeroth = getelementptr i8, ptr %first, i64 -$step_bytes
  %step = call ptr @advance(ptr %c, ptr %run, ptr %zeroth, i64 0)
  %shared = icmp ne ptr %step, null
  br i1 %shared, label %join, label %out
join:
  call void @share(ptr %c, i64 0, ptr %step)
  br label %out
out:
  %status = load i32, ptr %status.p
  store atomic i32 0, ptr %lock.p release, align 4
  %getcpu.p = getelementptr i8, ptr %c, i64 $control_getcpu
  %getcpu = load ptr, ptr %getcpu.p
  %known = icmp ne ptr %getcpu, null
  %well = icmp eq i32 %status, 0
  %ask = and i1 %known, %well
  br i1 %ask, label %where, label %back
where:
  %cpu = call i32 %getcpu()
  %byte = lshr i32 %cpu, 3
  %inside = icmp ult i32 %byte, 128
  br i1 %inside, label %test, label %back
test:
  %pinned = getelementptr i8, ptr %c, i64 $control_pinned
  %byte.p = getelementptr i8, ptr %pinned, i32 %byte
  %bits = load i8, ptr %byte.p
  %shift = and i32 %cpu, 7
  %bits.32 = zext i8 %bits to i32
  %moved = lshr i32 %bits.32, %shift
  %bit = and i32 %moved, 1
  %clash = icmp ne i32 %bit, 0
  %answer = select i1 %clash, i32 $attend, i32 0
  br label %back
back:
  %result = phi i32 [%status, %out], [0, %where], [%answer, %test]
  ret i32 %result
}

; the entry as a CPython function of no arguments: %self is an int, the address of the Run; other Python threads go on
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyLong_FromLong(i64)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
define ptr @rlx_run_py(ptr %self, ptr %unused) #0 {
  %run = call ptr @PyLong_AsVoidPtr(ptr %self)
  %thread = call ptr @PyEval_SaveThread()
  %status = call i32 @rlx_run(ptr %run)
  call void @PyEval_RestoreThread(ptr %thread)
  %long = sext i32 %status to i64
  %result = call ptr @PyLong_FromLong(i64 %long)
  ret ptr %result
}

define void @rlx_work(ptr %c, i64 %tid) #0 {
  call void @share(ptr %c, i64 %tid, ptr null)
  ret void
}

; let every worker leave; may be called at any time
define void @rlx_stop(ptr %c) #0 {
  %stop.p = getelementptr i8, ptr %c, i64 $control_stop
  store atomic i32 1, ptr %stop.p seq_cst, align 4
  %x = atomicrmw add ptr %c, i64 4294967296 seq_cst
  call void @wake(ptr %c, i32 2147483647)
  ret void
}

; %n turns of the waiting loop, to learn how long one takes
define i64 @rlx_spin(ptr %c, i64 %n) #0 {
entry:
  br label %spin
spin:
  %i = phi i64 [0, %entry], [%i.next, %spin]
  $pause
  %s = load atomic i64, ptr %c acquire, align 64
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %n
  br i1 %more, label %spin, label %out
out:
  ret i64 %s
}
"""


def module_text(machine: str, futex: int) -> str:
    """The walker as LLVM IR for a processor (platform.machine()), with the number of its futex system call (0: none)."""
    declaration, pause = PAUSE.get(machine, ("", ""))
    sleep = Template(FUTEX if futex else NAP)
    words = {
        "doze": sleep.safe_substitute(futex=futex, operation=128, value="%seen"),
        "wake": sleep.safe_substitute(futex=futex, operation=129, value="%n") if futex else "",
        "pause_declaration": declaration, "pause": pause, "step_bytes": ctypes.sizeof(Step),
        "bias": BIAS, "end": END, "attend": ATTEND,
    }  # fmt: skip
    places = {f"{t.__name__.lower()}_{name}": getattr(t, name).offset for t in (Step, Run, Control) for name, *_ in t._fields_}
    return Template(TEXT).substitute(words | places)

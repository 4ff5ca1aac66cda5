"""Kernels and programs of a few lines for the plan tests, and an executor that runs one kernel point by point.

The executor is the plainest reading of the kernel IR: one grid point after another (in any order given), one iteration
after another, every load when its statement runs. Unlike the vectorised ones it shows what overwriting a buffer does.
"""

from __future__ import annotations

import numpy as np

from rlx.backends.ref.backend import RefBackend
from rlx.compiler.memory import plan_arena
from rlx.ir.dtype import f32
from rlx.ir.kernel import (
    Alu,
    Buffer,
    Check,
    Const,
    Contract,
    Kernel,
    Let,
    Load,
    Loop,
    Operand,
    Reduce,
    Store,
    Var,
    k,
    linear,
)
from rlx.ir.overlap import may_overlap
from rlx.ir.program import BufferDecl, OutputDecl, Program, Region, Step
from rlx.ir.shape import Shape

TARGET = RefBackend().target()
N = 24  # elements of every buffer in the small programs: 4 rows of 6
ROWS, COLUMNS = 4, 6

# -- kernels: f32 buffers of N elements, the last one written ------------------------------------------------------


def buffers(reads, size=N, dtype=f32):
    return (*(Buffer(f"b{i}", dtype, size) for i in range(reads)), Buffer("out", dtype, size, writable=True))


def pointwise(reads=2, size=N, weights=None, dtype=f32):
    """out[i] = sum of weight * b[i]."""
    bs = buffers(reads, size, dtype)
    g, i = Var("g"), Var("i")
    rows, columns = (ROWS, size // ROWS) if size % ROWS == 0 else (1, size)
    at = linear([(g, columns), (i, 1)])
    value = k.const(0.5, dtype)
    for n, b in enumerate(bs[:-1]):
        value = k.add(value, k.mul(Load(b, at), k.const((weights or (2.0, -3.0, 0.25))[n % 3], dtype)))
    return Kernel("pointwise", bs, (), ((g, rows),), (Loop(i, columns, (Store(bs[-1], at, value),), vector=True),))


def transposed():
    """out[c, r] = b[r, c]: each element goes where another one is still to be read."""
    b, out = buffers(1)
    r, c = Var("r"), Var("c")
    store = Store(out, linear([(c, ROWS), (r, 1)]), k.mul(Load(b, linear([(r, COLUMNS), (c, 1)])), 2.0))
    return Kernel("transposed", (b, out), (), ((r, ROWS),), (Loop(c, COLUMNS, (store,)),))


def shifted(by=1):
    """out[i] = b[i] + b[i + by], 0 past the ends."""
    b, out = buffers(1)
    i = Var("i")
    beside = k.add(i, by)
    inside = k.lt(beside, N) if by > 0 else k.le(k.const(0), beside)
    return Kernel("shifted", (b, out), (), ((i, N),), (Store(out, i, k.add(Load(b, i), Load(b, beside, inside))),))


def row_sums(reads=1, before=False):
    """out[r, c] = b0[r, c] - sum of row r of the last read buffer; `before`: the store loop comes first (of what it has)."""
    *bs, out = buffers(reads)
    r, c, d, total = Var("r"), Var("c"), Var("d"), Var("total", f32)

    def at(v):
        return linear([(r, COLUMNS), (v, 1)])

    sums = Loop(c, COLUMNS, (), vector=True, reduces=(Reduce(total, "add", Load(bs[-1], at(c))),))
    store = Loop(d, COLUMNS, (Store(out, at(d), k.sub(Load(bs[0], at(d)), k.const(0.0, f32) if before else total)),), vector=True)
    return Kernel("row_sums", (*bs, out), (), ((r, ROWS),), (store, sums) if before else (sums, store))


def product(residual=True):
    """out = a @ b + residual, of 4 x 6 by 6 x 6 (b's first 36 of N are not there: b is its own size)."""
    a, extra, out = Buffer("a", f32, N), Buffer("extra", f32, N), Buffer("out", f32, N, writable=True)
    b = Buffer("b", f32, COLUMNS * COLUMNS)
    i, j, acc = Var("i"), Var("j"), Var("acc", f32)
    at = linear([(i, COLUMNS), (j, 1)])
    value = k.add(acc, Load(extra, at)) if residual else acc
    body = Contract(
        i, j, ROWS, COLUMNS, COLUMNS, Operand(a, k.const(0), COLUMNS, 1), Operand(b, k.const(0), COLUMNS, 1), acc,
        (Store(out, at, value),),
    )  # fmt: skip
    return Kernel("product", (a, b, extra, out) if residual else (a, b, out), (), (), (body,))


def convolution(a=f32, b=f32, result=f32):
    """out[n, h, w] = the windows of 2 x 3 x 2 elements, 2 apart, of x [2, 5, 9, 2], @ w [12, 4]: rows and columns in levels."""
    x, w, out = Buffer("x", a, 180), Buffer("w", b, 48), Buffer("out", result, 64, writable=True)
    i, j, acc = Var("i"), Var("j"), Var("acc", result.compute)
    windows = Operand(x, k.const(0), 4, 1, row_levels=((4, 36), (2, 90)), col_levels=((6, 18),))
    body = Contract(i, j, 16, 4, 12, windows, Operand(w, k.const(0), 4, 1), acc, (Store(out, linear([(i, 4), (j, 1)]), acc),))
    return Kernel("convolution", (x, w, out), (), (), (body,))


def convolved(x, w):
    """The result of `convolution` by numpy."""
    windows = np.lib.stride_tricks.sliding_window_view(x.reshape(2, 5, 9, 2), (2, 3), (1, 2))[:, ::2, ::2]
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(16, 12) @ w.reshape(12, 4)


# -- programs ------------------------------------------------------------------------------------------------------


class Maker:
    """Collects buffers and steps of one program."""

    def __init__(self):
        self.decls, self.prepare, self.steps, self.commit, self.outputs = [], [], [], [], []

    def buffer(self, region, size=N, dtype=f32, data=None):
        made = BufferDecl(len(self.decls), region, Shape((size,), dtype), f"v{len(self.decls)}", data)
        self.decls.append(made)
        return made.id

    def step(self, kernel, *args, phase="steps"):
        getattr(self, phase).append(Step(kernel, args))

    def program(self, pairs=may_overlap, reuse=True, alignment=64):
        steps = (*self.steps, *self.commit)
        plan = plan_arena(self.decls, steps, {o.buffer for o in self.outputs}, alignment, pairs, reuse)

        def ids(region):
            return tuple(b.id for b in self.decls if b.region is region)

        return Program(
            "small", TARGET, tuple(self.decls), tuple(self.prepare), tuple(self.steps), tuple(self.commit),
            ids(Region.INPUT), ids(Region.PARAM), ids(Region.HANDLE), tuple(self.outputs), plan,
        )  # fmt: skip

    def output(self, buffer):
        self.outputs.append(OutputDecl(f"out{len(self.outputs)}", buffer, self.decls[buffer].shape))


def sample_program():
    """Two inputs, a param and what is prepared from it, a constant, a handle; chains that can share memory and run in place."""
    m = Maker()
    x, y = m.buffer(Region.INPUT), m.buffer(Region.INPUT)
    w, packed, packed2 = m.buffer(Region.PARAM), m.buffer(Region.PREPARED), m.buffer(Region.PREPARED)
    matrix = m.buffer(Region.CONSTANT, COLUMNS * COLUMNS, data=np.linspace(-1, 1, COLUMNS * COLUMNS, dtype="f4"))
    state = m.buffer(Region.HANDLE)
    t = [m.buffer(Region.ARENA) for _ in range(7)]
    out0, out1 = m.buffer(Region.OUTPUT), m.buffer(Region.OUTPUT)
    m.step(transposed(), w, packed, phase="prepare")
    m.step(pointwise(2), w, packed, packed2, phase="prepare")
    m.step(pointwise(2), x, y, t[0])
    m.step(product(), t[0], matrix, x, t[1])
    m.step(row_sums(), t[1], t[2])
    m.step(transposed(), t[2], t[3])
    m.step(pointwise(2), t[3], packed2, out0)
    m.step(pointwise(3), t[3], state, out0, t[4])
    m.step(shifted(), t[4], t[5])
    m.step(product(), t[5], matrix, t[4], t[6])
    m.step(pointwise(2), t[6], y, out1)
    m.step(pointwise(1), t[6], state, phase="commit")
    m.output(out0)
    m.output(out1)
    return m


def run(program, runs=2):
    """Outputs of each run, handles after the last and inputs after it, on the reference backend with poisoned memory."""
    executable = RefBackend().load(RefBackend().compile(program))
    decls = {b.id: b for b in program.buffers}
    rng = np.random.default_rng(0)
    found = []
    for id in program.params:
        executable.write(id, rng.normal(size=decls[id].shape.static).astype("f4"))
    executable.prepare(range(len(program.prepare)))
    for _ in range(runs):
        for id in program.inputs:
            executable.write(id, rng.normal(size=decls[id].shape.static).astype("f4"))
        executable.run()
        found += [executable.read(o.buffer) for o in program.outputs]
    return found + [executable.read(i) for i in (*program.handles, *program.inputs)]


def same(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


# -- point by point ------------------------------------------------------------------------------------------------


def run_points(kernel, memory, order):
    """Run `kernel` on `memory` (an array per buffer; they may be one array), grid points in the order of their numbers."""
    arrays = dict(zip(kernel.buffers, memory))
    extents = [n for _, n in kernel.grid]
    for number in order:
        env = dict(zip((v for v, _ in kernel.grid), np.unravel_index(number, extents) if extents else ()))
        local = {x: np.full((kernel.body[0].m if x.per_row else 1) * x.size, np.nan, x.dtype.numpy) for x in kernel.locals}
        _block(kernel.body, env, arrays | local)


def _block(body, env, arrays):
    for s in body:
        if isinstance(s, Let):
            env[s.var] = _value(s.value, env, arrays)
        elif isinstance(s, Store):
            value = _value(s.value, env, arrays)
            if s.guard is None or _value(s.guard, env, arrays):
                arrays[s.buffer][_value(s.index, env, arrays)] = value
        elif isinstance(s, Loop):
            totals = {r.result: 0.0 for r in s.reduces}
            for i in range(s.extent):
                inner = {**env, s.var: i}
                _block(s.body, inner, arrays)
                for r in s.reduces:
                    assert r.op == "add"
                    totals[r.result] += _value(r.value, inner, arrays)
            env.update(totals)
        elif isinstance(s, Contract):
            a, b = (_value(o.offset, env, arrays) for o in (s.a, s.b))
            for i in range(s.m):
                for j in range(s.n):
                    total = sum(
                        arrays[s.a.buffer][a + _value(s.a.place(k.const(i), k.const(q)), env, arrays)]
                        * arrays[s.b.buffer][b + _value(s.b.place(k.const(q), k.const(j)), env, arrays)]
                        for q in range(s.k)
                    )
                    _block(s.epilogue, {**env, s.i: i, s.j: j, s.acc: total}, arrays)
                _block(s.rows, {**env, s.i: i}, arrays)
        else:
            assert isinstance(s, Check), s


_SCALARS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "rem": lambda a, b: a % b, "div": lambda a, b: a // b,
}  # fmt: skip


def _value(e, env, arrays):
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        return env[e]
    if isinstance(e, Load):
        if e.guard is not None and not _value(e.guard, env, arrays):
            return 0.0
        return arrays[e.buffer][_value(e.index, env, arrays)]
    assert isinstance(e, Alu)
    return _SCALARS[e.op](*(_value(a, env, arrays) for a in e.args))

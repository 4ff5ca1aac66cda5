"""Statements and loops: serial, or vectorised as full vectors (several at a time) and one masked tail."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from rlx.backends.cpu.abi import LINE
from rlx.backends.cpu.half import in_half
from rlx.backends.cpu.index_split import parts
from rlx.backends.cpu.scope import Scope, access, address, check, expr, value_to_store
from rlx.backends.cpu.strided import MASKS
from rlx.errors import CompileError
from rlx.host import alu
from rlx.host.emit import V, vector
from rlx.ir.dtype import f16, i64, index_
from rlx.ir.kernel import Alu, Check, Const, Expr, Let, Load, Loop, Stmt, Store, Var, coefficient, expressions, walk
from rlx.ir.nest import nested, operands, stores

MAX_LANES = 16
TASKS_PER_THREAD = 6  # of a kernel, at most; several, so that a preempted thread does not hold up the others
STRAIGHT, SHORT = 8, 128  # most vectors of a copy without a loop, and of one whose loop is not unrolled
UNROLLED = 4  # serial loops of at most this many iterations, if small, are fully unrolled
UNROLLED_WEIGHT = 64  # weight of all their iterations together
# Cost of the scalar operations that cost more than an addition, in additions.
WEIGHTS = {"exp": 14, "log": 16, "sin": 24, "cos": 24, "tanh": 18, "erf": 24, "pow": 60, "div": 4, "rem": 40, "sqrt": 4}


Held = list[tuple[Store, V, Scope]]  # pending stores: their values are computed, but not written yet


def emit_statements(stmts: Iterable[Stmt], scope: Scope) -> None:
    """Emit the statements in order. Adjacent stores are written together, after all of their values are computed: a buffer
    that is read may alias one that is written (rlx.ir.overlap) where their indices are equal."""
    _write(_emit(stmts, scope))


def _value_to_store(s: Store, scope: Scope) -> V:
    found = in_half(s.value, scope) if s.buffer.dtype == f16 else None
    return value_to_store(s, scope) if found is None else found


def _emit(stmts: Iterable[Stmt], scope: Scope) -> Held:
    """Emit the statements, but return the trailing stores as pending."""
    held: Held = []
    for s in stmts:
        if isinstance(s, Store):
            _write_if_read(expressions([s]), held, scope)
            held.append((s, _value_to_store(s, scope), scope))
            continue
        _write(held)
        if isinstance(s, Let):
            scope.bind(s.var, expr(s.value, scope.scalar if scope.spreads(s.value) else scope))
        elif isinstance(s, Check):
            check(s, scope)
        elif isinstance(s, Loop):
            emit_loop(s, scope)
        else:
            raise CompileError(f"a {type(s).__name__} must be a kernel's only statement; loops and epilogues cannot contain it")
    return held


def _write(held: Held) -> None:
    for s, value, scope in held:
        access(s, scope, value)
    held.clear()


def _write_if_read(parts: Iterable[Expr], held: Held, scope: Scope) -> None:
    """Write the pending stores if one of the next expressions loads from a buffer that they write."""
    if held and frozenset().union(*map(scope.names_in, parts)) & {s.buffer for s, _, _ in held}:
        _write(held)


def hoist(stmts: Sequence[Stmt], scope: Scope) -> None:
    """Loop-invariant code motion: emit here the largest subexpressions of the statements that depend only on variables bound
    here, and load from no buffer that the statements write. For use before a loop, or before several copies of the statements."""
    written = {s.buffer for s in stores(stmts)}
    places = {s.index for s in stores(stmts)}  # a uniform index is only needed as a scalar
    seen: set[tuple[Expr, bool]] = set()
    pending = [(e, e in places) for e in expressions(stmts)]
    while pending:
        e, is_index = pending.pop()
        if (e, is_index) in seen or isinstance(e, Const):
            continue
        seen.add((e, is_index))
        names = scope.names_in(e)
        if not names & written and all(scope.has(v) for v in names if isinstance(v, Var)):
            expr(e, scope.scalar if is_index and scope.spreads(e) else scope)
        else:
            pending += [(a, is_index or (isinstance(e, Load) and a is e.index)) for a in operands(e)]


def weight(stmts: Iterable[Stmt]) -> int:
    """Cost of the distinct operations and loads in the statements, in additions; a loop counts with all its iterations."""
    stmts = tuple(stmts)
    flat = [s for s in stmts if not isinstance(s, Loop)]
    total = sum(map(_weight_of, walk((*expressions(flat),)))) + sum(isinstance(s, Store) for s in flat)
    for s in stmts:
        if isinstance(s, Loop):
            ends = [Let(r.result, r.value) for r in s.reduces] + [Let(c.var, c.next) for c in s.carries]
            total += s.extent * weight((*s.body, *ends))
    return total


def _weight_of(node: object) -> int:
    if isinstance(node, Alu):
        return 0 if node.dtype in (index_, i64) else WEIGHTS.get(node.op, 1)  # i64: mostly index arithmetic
    return int(isinstance(node, Load))


# -- choosing the loop to vectorise --------------------------------------------------------------------------------------


def emit_loop(loop: Loop, scope: Scope) -> None:
    """Emit a loop: vectorised if that is allowed and no enclosing loop is vectorised."""
    if loop.in_lanes and scope.lanes == 1 and loop.extent > 1 and not prefers_inner(loop):
        emit_vector_loop(loop, scope)
    else:
        emit_serial_loop(loop, scope)


def prefers_inner(loop: Loop) -> bool:
    """Whether an inner vector loop has more contiguous accesses than this one would have."""
    inner = [s for s in nested(loop.body) if isinstance(s, Loop) and s.in_lanes and s.extent > 1]
    return bool(inner) and max(contiguity(s, s.var) for s in inner) > contiguity(loop, loop.var)


def contiguity(loop: Loop, var: Var) -> int:
    """Number of accesses in the loop that are contiguous in `var` minus the number of strided and scattered ones."""
    indices = [s.index for s in stores([loop])]
    indices += [node.index for node in walk((*expressions([loop]),)) if isinstance(node, Load)]
    steps = [coefficient(index, var) for index in indices]
    return sum(0 if step == 0 else 1 if step in (1, -1) else -1 for step in steps)


def _totals(loop: Loop) -> list[Expr]:
    """The expressions that the loop reduces or adds to running totals."""
    return [*(r.value for r in loop.reduces), *(c.next for c in loop.carries)]


def moves(loop: Loop) -> bool:
    """Whether an iteration copies one of adjacent elements, or stores a constant, and nothing else. To do it twice changes
    nothing, even if both are in the same memory."""
    match loop.body:
        case (Store(buffer, index, Load() as x, None),):
            adjacent = x.guard is None and coefficient(x.index, loop.var) == coefficient(index, loop.var) == 1
            return adjacent and x.buffer.dtype == buffer.dtype and not _totals(loop)
        case (Store(_, index, Const(), None),):
            return coefficient(index, loop.var) == 1 and not _totals(loop)
    return False


def lanes_of(loop: Loop, vector_bytes: int) -> int:
    """Lanes that fill a register with the widest type that the loop computes or stores; a power of two, at most 16 where it
    computes."""
    if moves(loop):
        return max(2, min(vector_bytes // stores([loop])[0].buffer.dtype.itemsize, 1 << (loop.extent - 1).bit_length()))
    dtypes = [x.dtype for x in walk((*expressions([loop]),)) if isinstance(x, Expr) and x.dtype.is_float]
    dtypes += [s.buffer.dtype for s in stores([loop])] + [x.dtype for x in _totals(loop)]
    lanes = min(MAX_LANES, vector_bytes // max((d.compute.itemsize for d in dtypes), default=1))
    while lanes >= 2 * max(loop.extent, 1):
        lanes //= 2
    return max(lanes, 2)


# -- serial loops --------------------------------------------------------------------------------------------------


def emit_serial_loop(loop: Loop, scope: Scope) -> None:
    """Emit a serial loop. In a vector scope each iteration computes all lanes, and reductions are vectors."""
    em, lanes = scope.e, scope.lanes
    first = [expr(c.init, scope) for c in loop.carries]
    first += [alu.identity(em, r.op, r.value.dtype, lanes) for r in loop.reduces]
    if loop.extent > 1:
        hoist([loop], scope)
    if loop.extent <= 1 or (loop.extent <= UNROLLED and weight([loop]) <= UNROLLED_WEIGHT):
        last = first
        for i in range(loop.extent):
            last = _iteration(loop, scope, em.i64(i), last)
    else:
        with em.loop(0, loop.extent, carried=first) as state:
            state.next = _iteration(loop, scope, state.index, state.carried)
        last = state.results
    for var, value in zip([*(c.var for c in loop.carries), *(r.result for r in loop.reduces)], last):
        scope.bind(var, value)


def _iteration(loop: Loop, scope: Scope, index: V, carried: Sequence[V]) -> list[V]:
    """Emit one iteration at `index`. Takes the carried values and reductions before it; returns those after it."""
    inner = scope.child({loop.var: index, **{c.var: v for c, v in zip(loop.carries, carried)}})
    emit_statements(loop.body, inner)
    after = [expr(c.next, inner) for c in loop.carries]
    for r, total in zip(loop.reduces, carried[len(loop.carries) :]):
        after.append(alu.combine(scope.e, r.op, r.value.dtype, total, expr(r.value, inner)))
    return after


# -- vector loops --------------------------------------------------------------------------------------------------


class VectorLoop:
    """Emits a vectorised loop, `whole` or a part of it that is known when it runs. Each reduction has `unroll` accumulators,
    combined in a fixed order at the end."""

    def __init__(self, loop: Loop, scope: Scope, whole: bool) -> None:
        self.loop, self.scope, self.em = loop, scope, scope.e
        self.lanes = lanes_of(loop, scope.vector_bytes)
        self.again = moves(loop) and not set(self.em.features) >= MASKS  # then the last vector begins earlier, instead of a mask
        while self.again and self.lanes > loop.extent:
            self.lanes //= 2
        self.unroll = self._unroll(whole)
        self.outer = scope.child(lanes=self.lanes)
        hoist([loop], self.outer)
        self.everywhere = self.outer.memo
        self.neutral = [alu.identity(self.em, r.op, r.value.dtype, self.lanes) for r in loop.reduces]
        self.totals = self.neutral * self.unroll  # [copy * reductions + reduction]
        # float max and min: lanes that met a NaN; tested for two values at once, not at every step
        extremes = [n for n, r in enumerate(loop.reduces) if r.op in ("max", "min") and r.value.dtype.is_float]
        self.nans = {n: self.em.const(vector("i1", self.lanes), False) for n in extremes}
        self.before = [self.em.splat(expr(c.init, scope), self.lanes) for c in loop.carries]  # running totals, in every lane

    def _unroll(self, whole: bool) -> int:
        work, vectors = weight([self.loop]) // self.loop.extent, self.loop.extent // self.lanes
        if whole and vectors < SHORT and moves(self.loop):  # a few vectors, or one loop: the end of each is a misprediction
            return vectors if 0 < vectors <= STRAIGHT else 1
        # Measured: unrolling pays for bodies of few instructions; longer ones only take longer to compile.
        most = 1 if any(isinstance(s, Loop) for s in self.loop.body) else 4 if work <= 6 else 2 if work <= 12 else 1
        most = 8 if work <= 3 and not self.loop.body else most  # pure reductions: enough to hide the latency of one step
        while most > 1 and most * self.lanes > self.loop.extent:
            most //= 2
        return most

    def know(self, truths: Mapping[int, bool]) -> None:
        """Set the conditions that are constant in all iterations emitted from now on."""
        constants = {e: self.em.const(vector("i1", self.lanes), value) for e, value in truths.items()}
        self.outer.memo = {**self.everywhere, **constants}

    def vectors(self, base: int | V, copies: int = 1, mask: V | None = None) -> None:
        """Emit `copies` vectors of iterations from `base` on; copy c adds to accumulator c. If no reduction reads a stored value,
        all copies load before any of them stores. Iterations are independent, and a store may delay later loads whose address
        has the same low 12 bits (4K aliasing)."""
        held: Held = []
        found: list[list[V]] = [[] for _ in self.loop.reduces]
        for c in range(copies):
            at = c * self.lanes
            first = base + at if isinstance(base, int) else self.em.bin("add nsw", base, at) if c else base
            inner = self.outer.child(vector=self.loop.var, base=self.em.i64(first), mask=mask)
            self.scan(inner, held)
            self.fetch(inner)
            held += _emit(self.loop.body, inner)
            _write_if_read([r.value for r in self.loop.reduces], held, inner)
            for n, r in enumerate(self.loop.reduces):
                value = expr(r.value, inner)
                if mask is not None:
                    value = self.em.select(mask, value, self.neutral[n])
                slot = c * len(self.neutral) + n
                self.totals[slot] = self.combine(n, self.totals[slot], value)
                found[n].append(value)
        for n, before in self.nans.items():
            for a, b in zip(found[n][::2], found[n][1::2] + found[n][-1:]):
                before = self.em.bin("or", before, self.em.cmp("uno", a, b))
            self.nans[n] = before
        _write(held)

    def combine(self, n: int, a: V, b: V) -> V:
        """Emit one step of reduction number n."""
        r = self.loop.reduces[n]
        return alu.best_number(self.em, r.op, a, b) if n in self.nans else alu.combine(self.em, r.op, r.value.dtype, a, b)

    def fetch(self, inner: Scope) -> None:
        """Prefetch for the next grid point (`scope.ahead`), or for after the loop (`scope.beside`), if this is the loop during
        which that is done."""
        if (beside := inner.beside) and beside.during is self.loop.var:
            first = self.em.gep(beside.first, self.em.bin("mul", inner.scalar.bindings[self.loop.var], beside.nbytes))
            for line in range(0, self.lanes * beside.nbytes, LINE):
                self.em.prefetch(self.em.gep(first, line), level=2)
        if (ahead := inner.ahead) and ahead.during is self.loop:
            at = self.scope.child({ahead.var: inner.scalar.bindings[self.loop.var]})
            for load, nbytes in ahead.loads:
                if not all(at.has(v) for v in at.names_in(load.index) if isinstance(v, Var)):
                    continue  # depends on a variable bound inside the pass, as that of an inner reduction loop
                self.em.prefetch(self.em.gep(address(load.buffer, load.index, at), nbytes))

    def scan(self, inner: Scope, held: Held) -> None:
        """Bind the carries in each lane: a prefix scan of the vector, on top of the total of all earlier vectors."""
        em, last = self.em, [self.lanes - 1] * self.lanes
        for n, c in enumerate(self.loop.carries):
            assert isinstance(c.next, Alu) and c.added is not None
            op, value, dtype = c.next.op, c.added, c.var.dtype
            _write_if_read([value], held, inner)
            own = expr(value, inner)
            if inner.mask is not None:
                own = em.select(inner.mask, own, alu.identity(em, op, dtype, self.lanes))
            own, before = alu.prefixes(em, op, dtype, own), self.before[n]
            inner.memo[id(c.next)] = up_to = alu.combine(em, op, dtype, before, own)
            inner.bind(c.var, em.shuffle(before, range(self.lanes - 1, 2 * self.lanes - 1), up_to))
            self.before[n] = alu.combine(em, op, dtype, before, em.shuffle(own, last))

    def run(self, start: int | V, stop: int | V, copies: int, *, last: V | None = None) -> None:
        """Emit vectors from start to stop, `copies` per iteration. With `last`, lanes from `last` on are masked off."""
        step = copies * self.lanes
        if isinstance(start, int) and isinstance(stop, int) and stop - start <= step:
            if start < stop:
                self.vectors(start, copies)
            return
        active = copies * len(self.neutral)
        with self.em.loop(start, stop, step, carried=self.state(active)) as state:
            self.keep(state.carried, active)
            mask = None
            if last is not None:
                left = self.em.splat(self.em.bin("sub nsw", last, state.index), self.lanes)
                mask = self.em.cmp("slt", self.em.iota(self.lanes), left)
            self.vectors(state.index, copies, mask)
            state.next = self.state(active)
        self.keep(state.results, active)

    def state(self, active: int) -> list[V]:
        return [*self.before, *self.nans.values(), *self.totals[:active]]

    def keep(self, values: Iterable[V], active: int) -> None:
        values = iter(values)
        self.before = [next(values) for _ in self.before]
        self.nans = {n: next(values) for n in self.nans}
        self.totals[:active] = values

    def finish(self) -> None:
        """Bind the results of carries and reductions."""
        for c, total in zip(self.loop.carries, self.before):
            self.scope.bind(c.var, self.em.op(total.scalar, f"extractelement {total}, i64 0"))
        for n, r in enumerate(self.loop.reduces):
            parts = self.totals[n :: len(self.neutral)]
            while len(parts) > 1:
                parts = [self.combine(n, a, b) for a, b in zip(parts[::2], parts[1::2])]
            total = alu.across(self.em, r.op, r.value.dtype, parts[0], partial(self.combine, n))
            if n in self.nans:
                total = self._or_nan(self.em.intrinsic("vector.reduce.or", self.nans[n], returns="i1"), total)
            self.scope.bind(r.result, total)

    def _or_nan(self, is_nan: V, total: V) -> V:
        """NaN or the total, selected as integers: LLVM would select floats with a mask made of the low byte of a register, and
        wait for whatever wrote the other bytes, in the iteration before."""
        em, bits = self.em, "i64" if total.scalar == "double" else "i32"
        nan = em.convert("bitcast", em.const(total.ty, math.nan), bits)
        return em.convert("bitcast", em.select(is_nan, nan, em.convert("bitcast", total, bits)), total.ty)


def emit_vector_loop(loop: Loop, scope: Scope, bounds: tuple[V, V] | None = None) -> None:
    """Emit all iterations, or those in `bounds` = [start, stop), vectorised: full vectors, then a masked remainder."""
    state = VectorLoop(loop, scope, bounds is None)
    lanes, unroll, em = state.lanes, state.unroll, scope.e
    for first, end, known in parts(loop, lanes):
        state.know(known)
        if bounds is not None:
            start = em.intrinsic("smax", bounds[0], em.i64(first)) if first else bounds[0]
            stop = em.intrinsic("smin", bounds[1], em.i64(end)) if end < loop.extent else bounds[1]
            stop = em.intrinsic("smax", start, stop)  # the bounds may not overlap this part
            whole = em.bin("and", em.bin("sub nsw", stop, start), -lanes * unroll)
            middle = em.bin("add nsw", start, whole)
            state.run(start, middle, unroll)
            state.run(middle, stop, 1, last=stop)
            continue
        full = end // lanes * lanes
        rounds = first + (full - first) // (lanes * unroll) * lanes * unroll
        state.run(first, rounds, unroll)
        state.run(rounds, full, 1)
        if full < end and state.again:
            state.outer.streams = frozenset()  # it is not aligned
            state.vectors(end - lanes)
        elif full < end:
            on = ", ".join(f"i1 {'true' if full + i < end else 'false'}" for i in range(lanes))
            state.vectors(full, mask=V(f"<{on}>", vector("i1", lanes)))
    state.finish()

"""Expressions, loads and stores of the kernel IR as LLVM IR: what is in scope, one SIMD variable, masks, shared values.

A Scope is a place in the code. Where a variable is vectorised, an expression that does not depend on the lane is computed
once as a scalar (in `scope.scalar`, the scope's lane-0 twin) and spread; an index that grows by one from lane to lane
becomes a contiguous vector access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlx.backends.cpu import alu
from rlx.backends.cpu.emit import Emitter, V, computed, vector
from rlx.ir.kernel import Alu, Buffer, Check, Const, Expr, Load, Local, Store, Var, coefficient


@dataclass(frozen=True)
class Facts:
    """Of one expression: the variables in it, and the buffers it loads."""

    vars: frozenset[Var]
    loads: frozenset[Buffer | Local]


class Scope:
    """Where code is being emitted, and what names mean there.

    `pointers`: Buffer or Local -> address of its element 0. `status`: address of the i32 that failed Checks write.
    `bindings`: Var -> its value, scalar or one per lane. `vector`: the vectorised Var, whose lane 0 is `base`, with
    `lanes` lanes; `mask` (<lanes x i1>): lanes that count, None for all. Scopes with lanes > 1 and no `vector` hold
    vectors that do not depend on the lane, for scopes below them. `vector_bytes`: of a register (Target).
    """

    def __init__(
        self,
        emitter: Emitter,
        pointers: Mapping[Buffer | Local, V],
        status: V,
        bindings: Mapping[Var, V] | None = None,
        *,
        vector: Var | None = None,
        base: V | None = None,
        lanes: int = 1,
        mask: V | None = None,
        vector_bytes: int = 64,
    ) -> None:
        self.e, self.pointers, self.status, self.vector_bytes = emitter, pointers, status, vector_bytes
        self.vector, self.lanes, self.mask = vector, lanes, mask
        self.bindings: dict[Var, V] = {}  # of this many lanes; those of scalars are in self.scalar
        self.memo: dict[int, V] = {}
        self.facts: dict[int, Facts] = {}
        self.scalar: Scope = self if lanes == 1 else Scope(emitter, pointers, status, vector_bytes=vector_bytes)
        self.scalar.facts = self.facts
        for var, value in (bindings or {}).items():
            self.bind(var, value)
        if vector is not None:
            assert base is not None, "a vectorised variable needs the value of its lane 0"
            self.scalar.bindings[vector] = base

    def child(
        self,
        bindings: Mapping[Var, V] | None = None,
        *,
        vector: Var | None = None,
        base: V | None = None,
        lanes: int | None = None,
        mask: V | None = None,
        pointers: Mapping[Buffer | Local, V] | None = None,
    ) -> Scope:
        """A scope that sees all that was emitted here, and keeps what is emitted there to itself. What is not given stays
        as it is here; `pointers` are added."""
        lanes = self.lanes if lanes is None else lanes
        if lanes != self.lanes and self.lanes != 1:
            raise AssertionError(f"a scope of {self.lanes} lanes cannot hold one of {lanes}")
        places = {**self.pointers, **pointers} if pointers else self.pointers
        out = Scope(self.e, places, self.status, lanes=lanes, vector_bytes=self.vector_bytes)
        out.vector, out.mask = self.vector, mask if mask is not None else self.mask
        out.facts = out.scalar.facts = self.facts
        out.scalar.memo, out.scalar.bindings = dict(self.scalar.memo), dict(self.scalar.bindings)
        if self.lanes == lanes and lanes > 1:
            out.memo, out.bindings = dict(self.memo), dict(self.bindings)
        for var, value in (bindings or {}).items():
            out.bind(var, value)
        if vector is not None:
            assert base is not None and self.vector is None
            out.vector, out.scalar.bindings[vector] = vector, base
        return out

    def bind(self, var: Var, value: V) -> None:
        """`var` means `value` from here on."""
        where = self if value.lanes == self.lanes else self.scalar
        where.bindings[var] = value

    def has(self, var: Var) -> bool:
        return var in self.bindings or var in self.scalar.bindings

    def varies(self, e: Expr) -> bool:
        """Whether `e` may differ from lane to lane."""
        if self.lanes == 1:
            return False
        return any(v is self.vector or v in self.bindings for v in self.facts_of(e).vars)

    def facts_of(self, e: Expr) -> Facts:
        known = self.facts
        for node in postorder(e, known):
            parts = [known[id(c)] for c in operands(node)]
            own_vars = frozenset((node,)) if isinstance(node, Var) else frozenset()
            own_loads = frozenset((node.buffer,)) if isinstance(node, Load) else frozenset()
            known[id(node)] = Facts(own_vars.union(*(p.vars for p in parts)), own_loads.union(*(p.loads for p in parts)))
        return known[id(e)]


def operands(e: Expr) -> tuple[Expr, ...]:
    if isinstance(e, Alu):
        return e.args
    if isinstance(e, Load):
        return (e.index,) if e.guard is None else (e.index, e.guard)
    return ()


def postorder(e: Expr, known: Mapping[int, object]) -> Iterator[Expr]:
    """The expressions under `e` whose id is not in `known` yet, operands first, without recursion: chains may be long."""
    pending = [e]
    while pending:
        node = pending[-1]
        waits = [] if id(node) in known else [c for c in operands(node) if id(c) not in known]
        if waits:
            pending.extend(waits)
            continue
        pending.pop()
        if id(node) not in known:
            yield node


# -- expressions ---------------------------------------------------------------------------------------------------


def expr(e: Expr, scope: Scope) -> V:
    """The value of `e` in `scope`: a scalar, or one per lane. The same expression is emitted once per scope."""
    memo, pending = scope.memo, [e]
    while pending:  # a stack, not recursion: chains may be long
        node = pending[-1]
        waits = [a for a in operands(node) if id(a) not in memo] if isinstance(node, Alu) and not _spreads(node, scope) else ()
        if waits and id(node) not in memo:
            pending.extend(waits)
            continue
        pending.pop()
        if id(node) not in memo:
            memo[id(node)] = _value(node, scope)
    return memo[id(e)]


def _spreads(node: Expr, scope: Scope) -> bool:
    """Whether the value is a scalar in every lane."""
    return scope.lanes > 1 and not scope.varies(node)


def _value(node: Expr, scope: Scope) -> V:
    em = scope.e
    if isinstance(node, Const):
        return alu.constant(em, node, scope.lanes)
    if _spreads(node, scope):
        return em.splat(expr(node, scope.scalar), scope.lanes)
    if isinstance(node, Var):
        return _variable(node, scope)
    if isinstance(node, Load):
        return _load(node, scope)
    return alu.emit_alu(em, node, [scope.memo[id(a)] for a in node.args])


def _variable(var: Var, scope: Scope) -> V:
    if var in scope.bindings:
        return scope.bindings[var]
    if var is scope.vector:
        first = scope.e.splat(scope.scalar.bindings[var], scope.lanes)
        return scope.e.bin("add nsw", first, scope.e.iota(scope.lanes))
    raise AssertionError(f"variable {var.name!r} is not bound here")


def _load(load: Load, scope: Scope) -> V:
    em, dtype = scope.e, load.buffer.dtype
    raw = alu.memory_type(dtype)
    if scope.lanes == 1:
        if load.guard is None:
            return alu.from_memory(em, em.load(raw, address(load.buffer, load.index, scope), dtype.itemsize), dtype)
        ok, before, zero = expr(load.guard, scope), em.block, em.const(computed(dtype), 0)
        with em.when(ok):
            found = alu.from_memory(em, em.load(raw, address(load.buffer, load.index, scope.child()), dtype.itemsize), dtype)
            inside = em.block
        return em.op(found.ty, f"phi {found.ty} [{zero.text}, %{before}], [{found.text}, %{inside}]")
    ty, mask = vector(raw, scope.lanes), _active(load.guard, scope)
    if _stride(load.index, scope) == 1:
        where = address(load.buffer, load.index, scope.scalar)
        if mask is None:
            found = em.load(ty, where, dtype.itemsize)
        else:
            found = _masked(em, "load", ty, where, dtype.itemsize, mask)
    else:
        every = mask or em.const(vector("i1", scope.lanes), True)
        found = _masked(em, "gather", ty, _addresses(load.buffer, load.index, scope), dtype.itemsize, every)
    return alu.from_memory(em, found, dtype)


def _masked(em: Emitter, what: str, ty: str, where: V, align: int, mask: V) -> V:
    """llvm.masked.load or .gather: zero in the lanes that are off."""
    place = V(f"align {align} {where.text}", where.ty)  # a parameter attribute from LLVM 22 on
    return em.intrinsic(f"masked.{what}", place, mask, V("zeroinitializer", ty), suffix=(ty, where.ty), returns=ty)


def _stride(index: Expr, scope: Scope) -> int | None:
    """Elements from lane to lane, if that is a constant."""
    if any(v in scope.bindings for v in scope.facts_of(index).vars):
        return None
    return coefficient(index, scope.vector) if scope.vector is not None else None


def _active(guard: Expr | None, scope: Scope) -> V | None:
    """The lanes that are on in this scope and pass the guard; None: all."""
    if guard is None:
        return scope.mask
    passed = expr(guard, scope)
    return passed if scope.mask is None else scope.e.bin("and", passed, scope.mask)


def address(buffer: Buffer | Local, index: Expr, scope: Scope) -> V:
    """Of buffer[index], a scalar; in a vector scope's lane-0 twin that of lane 0."""
    em, size = scope.e, buffer.dtype.itemsize
    base = scope.pointers[buffer]
    if isinstance(index, Const):
        return em.gep(base, int(index.value) * size)
    at = expr(index, scope)
    return em.op("ptr", f"getelementptr {alu.memory_type(buffer.dtype)}, {base}, {at}")


def _addresses(buffer: Buffer | Local, index: Expr, scope: Scope) -> V:
    """Of buffer[index] in every lane, as a vector of pointers."""
    em, lanes, raw = scope.e, scope.lanes, alu.memory_type(buffer.dtype)
    stride = _stride(index, scope)
    if stride is None:
        return em.op(vector("ptr", lanes), f"getelementptr {raw}, {scope.pointers[buffer]}, {expr(index, scope)}")
    first = address(buffer, index, scope.scalar)
    steps = "<" + ", ".join(f"i64 {i * stride}" for i in range(lanes)) + ">"
    return em.op(vector("ptr", lanes), f"getelementptr {raw}, {first}, <{lanes} x i64> {steps}")


# -- statements without loops ------------------------------------------------------------------------------------------


def value_to_store(s: Store, scope: Scope) -> V:
    """The store's value as its buffer keeps it."""
    value, to = expr(s.value, scope), s.buffer.dtype
    if s.value.dtype.compute != to.compute:
        value = alu.cast(scope.e, value, s.value.dtype, to)
    return alu.to_memory(scope.e, value, to)


def store(s: Store, value: V, scope: Scope) -> None:
    """Write `value_to_store`'s result where the guard and the mask allow."""
    em, size = scope.e, s.buffer.dtype.itemsize
    if scope.lanes == 1:
        if s.guard is None:
            em.store(value, address(s.buffer, s.index, scope), size)
            return
        with em.when(expr(s.guard, scope)):
            em.store(value, address(s.buffer, s.index, scope.child()), size)
        return
    mask = _active(s.guard, scope)
    if _stride(s.index, scope) == 1:
        where = address(s.buffer, s.index, scope.scalar)
        if mask is None:
            em.store(value, where, size)
            return
        what = "store"
    else:  # lanes are written in order: where they meet, the last one stays, as it would in a serial loop
        what, where = "scatter", _addresses(s.buffer, s.index, scope)
    every = mask or em.const(vector("i1", scope.lanes), True)
    if size < 4:  # LLVM before 23 writes 4 bytes where it knows that one lane of a narrowing store is on (its issue 179489)
        every = em.bin("and", every, em.splat(em.cmp("ne", scope.status, V("null", "ptr")), scope.lanes))
    place = V(f"align {size} {where.text}", where.ty)
    em.intrinsic(f"masked.{what}", value, place, every, suffix=(value.ty, where.ty), returns="void")


def check(s: Check, scope: Scope) -> None:
    """Set the status if `ok` is false in a lane that counts."""
    em = scope.e
    ok = expr(s.ok, scope)
    failed = em.bin("xor", ok, em.const(ok.ty, True))
    if scope.lanes > 1:
        failed = failed if scope.mask is None else em.bin("and", failed, scope.mask)
        failed = em.intrinsic("vector.reduce.or", failed, returns="i1")
    with em.when(failed):
        em.do(f"store atomic i32 {s.code}, {scope.status} monotonic, align 4")

"""Expressions, loads and stores of the kernel IR as LLVM IR: bindings, one SIMD variable, masks, shared values.

A Scope is a region of the emitted code. If a variable is vectorised, an expression that does not depend on the lane is computed
once as a scalar (in `scope.scalar`, the scope's lane-0 twin) and broadcast. An index that grows by one from lane to lane
becomes a contiguous vector access.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce

from rlx.backends.cpu.abi import LINE
from rlx.backends.cpu.strided import reads_between, strided
from rlx.host import alu
from rlx.host.emit import Emitter, V, vector
from rlx.ir.kernel import Alu, Buffer, Check, Const, Expr, Kernel, Load, Local, Loop, Store, Var, coefficient, const, walk
from rlx.ir.nest import operands, postorder, substitute
from rlx.records import record

Pointers = Mapping[Buffer | Local, V]
Bindings = Mapping[Var, V]
Names = frozenset[Var | Buffer | Local]


@record
class Prefetch:
    """A prefetch for the next grid point, issued while the loop `during` runs: `loads` of a loop over `var`, each with its
    distance in bytes."""

    during: Loop
    var: Var
    loads: tuple[tuple[Load, int], ...]


@record
class Beside:
    """A prefetch of memory that is read after the loop over `during`, which itself reads none: `nbytes` from `first` on in each
    of its iterations."""

    during: Var | None
    first: V
    nbytes: int


class Scope:
    """The region where code is being emitted, and its bindings.

    `pointers`: Buffer or Local -> address of its element 0. `status`: address of the i32 that failed Checks write.
    `bindings`: Var -> its value, scalar or one per lane. `vector`: the vectorised Var, whose lane 0 is `base`, with
    `lanes` lanes; `mask` (<lanes x i1>): the active lanes, None for all. Scopes with lanes > 1 and no `vector` hold
    vectors that do not depend on the lane, for scopes below them. `vector_bytes`: size of a vector register (Target).
    """

    def __init__(
        self, e: Emitter, pointers: Pointers, status: V, bindings: Bindings | None = None, *, lanes: int = 1, vector_bytes: int
    ) -> None:
        self.e, self.pointers, self.status, self.vector_bytes, self.lanes = e, pointers, status, vector_bytes, lanes
        self.vector: Var | None = None
        self.mask: V | None = None
        self.bindings: dict[Var, V] = {}  # values with this many lanes; scalar ones are in self.scalar
        self.memo: dict[int, V] = {}
        self.names: dict[int, Names] = {}
        self.alive: list[Expr] = []  # all whose id is in a memo of this kernel: another expression would get the id of a dead one
        self.streams: frozenset[Buffer] = frozenset()  # write-only and too large to stay in cache
        self.far: Mapping[Buffer | Local, int] = {}  # bytes from a vector to what is prefetched with it
        self.ahead: Prefetch | None = None
        self.beside: Beside | None = None
        self.origin: tuple[Scope, Mapping[Var, int]] | None = None  # see `moved`
        self.places: dict[tuple[int, int], V] = {}  # addresses that scopes moved from this one share, by buffer and index
        self.scalar: Scope = self if lanes == 1 else Scope(e, pointers, status, vector_bytes=vector_bytes)
        self.scalar.alive = self.alive
        for var, value in (bindings or {}).items():
            self.bind(var, value)

    def child(
        self, bindings: Bindings | None = None, *, vector: Var | None = None, base: V | None = None, lanes: int | None = None,
        mask: V | None = None, pointers: Pointers | None = None,
    ) -> Scope:  # fmt: skip
        """A nested scope. It sees all values emitted here; values emitted there are not visible here. Parameters that are not
        given are inherited; `pointers` are added."""
        lanes = lanes or self.lanes
        assert self.lanes in (1, lanes), f"a scope of {self.lanes} lanes cannot hold one of {lanes}"
        places = {**self.pointers, **pointers} if pointers else self.pointers
        out = Scope(self.e, places, self.status, lanes=lanes, vector_bytes=self.vector_bytes)
        out.vector, out.mask = self.vector, mask or self.mask
        out.names = out.scalar.names = self.names
        out.alive = out.scalar.alive = self.alive
        out.streams, out.far, out.ahead, out.beside = self.streams, self.far, self.ahead, self.beside
        out.scalar.memo, out.scalar.bindings = dict(self.scalar.memo), dict(self.scalar.bindings)
        if self.lanes == lanes and lanes > 1:
            out.memo, out.bindings = dict(self.memo), dict(self.bindings)
        for var, value in (bindings or {}).items():
            out.bind(var, value)
        if vector is not None:
            assert base is not None and self.vector is None
            out.vector, out.scalar.bindings[vector] = vector, base
        return out

    def moved(self, origin: Scope, steps: Mapping[Var, int]) -> Scope:
        """This scope, known to be `origin` with each variable of `steps` so much larger, in the same block. Its addresses are
        then constant distances from those of `origin`, which LLVM would spend most of its time on finding out."""
        self.scalar.origin = origin.scalar, steps
        return self

    def bind(self, var: Var, value: V) -> None:
        """`var` means `value` from here on."""
        where = self if value.lanes == self.lanes else self.scalar
        where.bindings[var] = value

    def has(self, var: Var) -> bool:
        return var in self.bindings or var in self.scalar.bindings

    def spreads(self, e: Expr) -> bool:
        """Whether there are several lanes and `e` is the same in all of them."""
        return self.lanes > 1 and not any(v is self.vector or v in self.bindings for v in self.names_in(e))

    def names_in(self, e: Expr) -> Names:
        """The variables in `e`, and the buffers it loads."""
        for node in postorder(e, self.names) if id(e) not in self.names else ():  # at each level of a nest
            own = [node] if isinstance(node, Var) else [node.buffer] if isinstance(node, Load) else []
            self.alive.append(node)
            self.names[id(node)] = frozenset(own).union(*(self.names[id(c)] for c in operands(node)))
        return self.names[id(e)]


# -- expressions ---------------------------------------------------------------------------------------------------


def expr(e: Expr, scope: Scope) -> V:
    """The value of `e` in `scope`: a scalar, or one per lane. The same expression is emitted once per scope."""

    def below(node: Expr) -> tuple[Expr, ...]:
        return node.args if isinstance(node, Alu) and not scope.spreads(node) else ()

    for node in postorder(e, scope.memo, below) if id(e) not in scope.memo else ():
        scope.alive.append(node)
        scope.memo[id(node)] = _value(node, scope)
    return scope.memo[id(e)]


def _value(node: Expr, scope: Scope) -> V:
    em = scope.e
    if isinstance(node, Const):
        return alu.constant(em, node, scope.lanes)
    if scope.spreads(node):
        return em.splat(expr(node, scope.scalar), scope.lanes)
    if isinstance(node, Var):
        if node is scope.vector:
            return em.bin("add nsw", em.splat(scope.scalar.bindings[node], scope.lanes), em.iota(scope.lanes))
        assert node in scope.bindings, f"variable {node.name!r} is not bound here"
        return scope.bindings[node]
    if isinstance(node, Load):
        return alu.from_memory(em, access(node, scope), node.buffer.dtype)
    if pair := _nan_tests(node):
        return em.cmp("uno", *(expr(x, scope) for x in pair))
    return alu.emit_alu(em, node, [scope.memo[id(a)] for a in node.args])


def _nan_tests(node: Alu) -> tuple[Expr, ...]:
    """(a, b) of `a is NaN or b is NaN`, which is one comparison; () if the node is something else."""
    tests = node.args if node.op == "or" else ()
    is_test = [isinstance(x, Alu) and x.op == "ne" and x.args[0] is x.args[1] and x.args[0].dtype.is_float for x in tests]
    return tuple(x.args[0] for x in tests if isinstance(x, Alu)) if tests and all(is_test) else ()


def limit_of(var: Var, extent: int, kernel: Kernel, scope: Scope) -> V | None:
    """The active extent of `var` under the kernel's limits, 0 to `extent`; None: no limit."""
    e, least = scope.e, None
    for x in kernel.limits:
        if x.var is var:
            count = e.intrinsic("smax", expr(x.count, scope), e.i64(0))
            least = e.intrinsic("smin", count, e.i64(extent) if least is None else least)
    return least


# -- memory --------------------------------------------------------------------------------------------------------


def access(x: Load | Store, scope: Scope, value: V | None = None) -> V:
    """Load: the value in the dtype of memory, zero in lanes where the guard or the mask is off. Store: write `value` in lanes
    where both are on."""
    em, size = scope.e, x.buffer.dtype.itemsize
    ty = vector(alu.memory_type(x.buffer.dtype), scope.lanes)

    def plain(where: V) -> V:
        return em.load(ty, where, size) if value is None else em.store(value, where, size)

    whole = scope.lanes > 1 and scope.mask is None and _stride(x.index, scope) == 1  # or nothing, where the guard has no lanes
    if scope.lanes == 1 or (value is None and whole and x.guard is not None and scope.spreads(x.guard)):
        if x.guard is None:
            return plain(address(x.buffer, x.index, scope))
        one = scope if scope.lanes == 1 else scope.scalar
        ok, before = expr(x.guard, one), em.block
        with em.when(ok):
            found = plain(address(x.buffer, x.index, one.child()))
            inside = em.block
        return em.phi((em.const(ty, 0), before), (found, inside)) if value is None else found
    mask, stride = _active(x.guard, scope), _stride(x.index, scope)
    contiguous, backward = stride in (1, -1), range(scope.lanes - 1, -1, -1)
    outer = [part for part in _parts(x.guard) if scope.spreads(part)] if value is None else []
    if value is None and not contiguous:
        if not outer:
            return _apart(x, stride, mask, ty, scope)
        ok, before = reduce(partial(em.bin, "and"), [expr(part, scope.scalar) for part in outer]), em.block
        with em.when(ok):
            found = _apart(x, stride, mask, ty, scope.child())
            inside = em.block
        return em.phi((em.const(ty, 0), before), (found, inside))
    where = address(x.buffer, x.index, scope.scalar) if contiguous else _addresses(x.buffer, x.index, scope)
    for part in outer:  # where no lane is on, processors take long for addresses that are not mapped
        where = em.select(expr(part, scope.scalar), where, scope.pointers[x.buffer])
    if stride == -1:  # contiguous from the last lane; the lanes are reversed
        where, mask = em.gep(where, (1 - scope.lanes) * size), mask and em.shuffle(mask, backward)
        value = value and em.shuffle(value, backward)
    if contiguous and mask is None:
        if value is not None and x.buffer in scope.streams and stride == 1 and _is_multiple(x.index, scope.lanes, scope):
            em.stream(value, where, min(LINE, size * scope.lanes))
            return value
        if distance := scope.far.get(x.buffer):
            em.prefetch(em.gep(where, distance if stride == 1 else -distance))
        found = plain(where)
    else:
        found = _masked(where, mask or em.const(vector("i1", scope.lanes), True), contiguous, ty, size, scope, value)
    return em.shuffle(found, backward) if stride == -1 and value is None else found


def _apart(x: Load | Store, stride: int | None, mask: V | None, ty: str, scope: Scope) -> V:
    """A load of lanes that are not adjacent."""
    em, size = scope.e, x.buffer.dtype.itemsize
    if stride is not None and reads_between(em, stride, scope.lanes, mask):
        return strided(em, address(x.buffer, x.index, scope.scalar), stride, ty, size, scope.lanes, mask)
    every = em.const(vector("i1", scope.lanes), True)
    return _masked(_addresses(x.buffer, x.index, scope), mask or every, False, ty, size, scope, None)


def _parts(guard: Expr | None) -> list[Expr]:
    """The conditions that all have to hold."""
    if isinstance(guard, Alu) and guard.op == "and":
        return [part for arg in guard.args for part in _parts(arg)]
    return [] if guard is None else [guard]


def _masked(where: V, mask: V, contiguous: bool, ty: str, size: int, scope: Scope, value: V | None) -> V:
    em = scope.e
    place = V(f"align {size} {where.text}", where.ty)  # a parameter attribute from LLVM 22 on
    if value is None:
        name = "masked.load" if contiguous else "masked.gather"
        return em.intrinsic(name, place, mask, V("zeroinitializer", ty), suffix=(ty, where.ty), returns=ty)
    if size < 4:  # LLVM before 23 writes 4 bytes where it knows that one lane of a narrowing store is on (its issue 179489)
        mask = em.bin("and", mask, em.splat(em.cmp("ne", scope.status, V("null", "ptr")), scope.lanes))
    # lanes are scattered in order: of equal addresses the last lane wins, as in a serial loop
    name = "masked.store" if contiguous else "masked.scatter"
    return em.intrinsic(name, value, place, mask, suffix=(ty, where.ty), returns="void")


def _stride(index: Expr, scope: Scope) -> int | None:
    """The stride from lane to lane in elements, if it is constant."""
    if scope.vector is None or any(v in scope.bindings for v in scope.names_in(index)):
        return None
    return coefficient(index, scope.vector)


def _is_multiple(index: Expr, of: int, scope: Scope) -> bool:
    """Whether the index of lane 0 is a multiple of `of`: vector loops start at multiples of their lanes."""
    if index is scope.vector or remainder(index, scope.vector, of) == 0:
        return True
    if isinstance(index, Const):
        return index.value % of == 0
    if isinstance(index, Alu) and index.op in ("add", "sub"):
        return all(_is_multiple(a, of, scope) for a in index.args)
    return isinstance(index, Alu) and index.op == "mul" and any(isinstance(a, Const) and a.value % of == 0 for a in index.args)


def remainder(index: Expr, var: Var | None, of: int) -> int | None:
    """The index modulo `of` where `var` is a multiple of it, if it is the same for all values of the other variables."""
    others = [x for x in walk(index) if isinstance(x, Var | Load) and x is not var]
    steps = [coefficient(index, x) if isinstance(x, Var) else None for x in others]
    if any(step is None or step % of for step in steps):
        return None
    first = substitute(index, {x: const(0) for x in (*others, var) if isinstance(x, Var)})
    return int(first.value) % of if isinstance(first, Const) else None


def _active(guard: Expr | None, scope: Scope) -> V | None:
    """The lanes that are active in this scope and pass the guard; None: all."""
    if guard is None:
        return scope.mask
    passed = expr(guard, scope)
    return scope.e.bin("and", passed, scope.mask) if scope.mask else passed


def address(buffer: Buffer | Local, index: Expr, scope: Scope) -> V:
    """The scalar address of buffer[index]; in a vector scope's lane-0 twin, that of lane 0."""
    if scope.origin is not None:
        origin, steps = scope.origin
        each = [(coefficient(index, var), n) for var, n in steps.items()]
        if all(c is not None for c, _ in each):
            if (key := (id(buffer), id(index))) not in origin.places:
                origin.places[key] = scope.e.freeze(address(buffer, index, origin))
            return scope.e.gep(origin.places[key], sum(c * n for c, n in each if c) * buffer.dtype.itemsize)
    at = expr(index, scope)
    return scope.e.op("ptr", f"getelementptr {alu.memory_type(buffer.dtype)}, {scope.pointers[buffer]}, {at}")


def _addresses(buffer: Buffer | Local, index: Expr, scope: Scope) -> V:
    """The address of buffer[index] in every lane, as a vector of pointers."""
    em, lanes, raw = scope.e, scope.lanes, alu.memory_type(buffer.dtype)
    stride = _stride(index, scope)
    if stride is None:
        return em.op(vector("ptr", lanes), f"getelementptr {raw}, {scope.pointers[buffer]}, {expr(index, scope)}")
    first = address(buffer, index, scope.scalar)
    steps = "<" + ", ".join(f"i64 {i * stride}" for i in range(lanes)) + ">"
    return em.op(vector("ptr", lanes), f"getelementptr {raw}, {first}, <{lanes} x i64> {steps}")


# -- statements without loops ------------------------------------------------------------------------------------------


def value_to_store(s: Store, scope: Scope) -> V:
    """The store's value in the dtype of its buffer."""
    source, to = s.value, s.buffer.dtype
    while isinstance(source, Alu) and source.op == "cast" and {source.dtype, source.args[0].dtype} == {to, to.compute}:
        source = source.args[0]  # the conversion for memory rounds it, once
    value = expr(source, scope)
    if source.dtype.compute != to.compute:
        value = alu.cast(scope.e, value, source.dtype, to)
    return alu.to_memory(scope.e, value, to)


def check(s: Check, scope: Scope) -> None:
    """Set the status if `ok` is false in an active lane."""
    em = scope.e
    failed = em.bin("xor", expr(s.ok, scope), True)
    if scope.lanes > 1:
        failed = em.bin("and", failed, scope.mask) if scope.mask else failed
        failed = em.intrinsic("vector.reduce.or", failed, returns="i1")
    with em.when(failed):
        em.do(f"store atomic i32 {s.code}, {scope.status} monotonic, align 4")

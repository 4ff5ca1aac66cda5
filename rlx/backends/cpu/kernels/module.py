"""The base of hand-written kernels: one LLVM module whose internal functions are emitted at their first call, and its scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.scope import Scope, limit_of
from rlx.host.emit import AROUND, ATTRIBUTES, PARAMETERS, STREAMS, Emitter, V
from rlx.ir.kernel import Buffer, Kernel, Native

ARGS, TASK, SCRATCH, STATUS = V("%args", "ptr"), V("%task", "i64"), V("%scratch", "ptr"), V("%status", "ptr")


def argument_pointers(e: Emitter, buffers: Sequence[Buffer], args: V = ARGS) -> dict[Buffer, V]:
    """The address of each buffer, read from the argument table."""
    return {b: e.load("ptr", e.gep(args, 8 * i), 8) for i, b in enumerate(buffers)}


def outside(e: Emitter, buffers: Sequence[Buffer], vector_bytes: int) -> Scope:
    """The scope of a kernel's body, outside of all loops."""
    return Scope(e, {**argument_pointers(e, buffers)}, STATUS, vector_bytes=vector_bytes)


def axis_limits(kernel: Kernel, native: Native, e: Emitter) -> list[V | None]:
    """The active extent of each axis of the first result under the kernel's limits; None: all of it."""
    if not kernel.limits:
        return [None] * len(native.results[0])
    scope = outside(e, kernel.buffers, 0)
    return [limit_of(v, n, kernel, scope) for v, n in native.axes]


class Module:
    """Internal functions isolate the register allocation of hot loops from the surrounding code. Methods that take an Emitter
    write into it."""

    around = False  # whether all loops over much data are in internal functions: what is around them is not optimised

    def __init__(self) -> None:
        self.scratch_bytes = 0
        self._texts: list[str] = []
        self._declarations: dict[str, None] = {}
        self._returns: dict[str, str] = {}

    def reserve(self, nbytes: int) -> int:
        """Reserve scratch on separate cache lines; returns its offset."""
        at = self.scratch_bytes
        self.scratch_bytes += -(-nbytes // 64) * 64
        return at

    def call(self, e: Emitter, name: str, body: Callable[..., V | None], *args: V) -> V:
        """Emit a call of the internal function `name`. At the first call, `body(emitter, *parameters)` emits its code and returns
        the value that the function returns."""
        if name not in self._returns:
            inner, params = Emitter(e.features), [V(f"%p{n}", a.ty) for n, a in enumerate(args)]
            result = body(inner, *params)
            inner.ret(result)
            returns = self._returns[name] = result.ty if result else "void"
            self._add(inner, name, ", ".join(map(str, params)), linkage="internal", returns=returns)
        return e.call(name, self._returns[name], *args)

    def rendered(self, e: Emitter, symbol: str, tasks: int) -> Rendered:
        """The whole module. `e` holds the kernel function."""
        if STREAMS in {**self._declarations, **e.declarations} and any(f.startswith("triple=x86") for f in e.features):
            e.intrinsic("x86.sse.sfence", suffix=(), returns="void")  # non-temporal stores are not ordered with later stores
        e.ret()
        self._add(e, symbol, PARAMETERS, attributes="#1" if self.around else "#0")
        attributes = [ATTRIBUTES, AROUND] if self.around else [ATTRIBUTES]
        return Rendered(symbol, "\n".join([*self._declarations, *attributes, *self._texts]), tasks, self.scratch_bytes)

    def _add(self, e: Emitter, name: str, params: str, **how: str) -> None:
        self._declarations |= e.declarations
        self._texts.append(e.function(name, params, **how))


def step(e: Emitter, base: V, count: V, nbytes: int) -> V:
    """base + count * nbytes"""
    return e.gep(base, e.bin("mul", count, e.i64(nbytes))) if nbytes else base


def divided(e: Emitter, value: V, by: int | V) -> tuple[V, V]:
    """(value % by, value // by)"""
    if by == 1:
        return e.i64(0), value
    return e.bin("urem", value, e.i64(by)), e.bin("udiv", value, e.i64(by))


def share(e: Emitter, index: V, items: int | V, parts: int) -> tuple[V, V]:
    """[start, stop) of part `index` if `items` are split into `parts`, whose sizes differ by at most one."""
    if parts == 1:
        return e.i64(0), e.i64(items)
    start, stop = (e.bin("udiv", e.bin("mul", x, e.i64(items)), e.i64(parts)) for x in (index, e.bin("add", index, e.i64(1))))
    return start, stop

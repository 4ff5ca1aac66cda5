"""Interprets one Kernel with numpy: slow, plain, and strict. Renderers must agree with it.

The grid is one array axis (its points are independent), and every parallel loop is another. An expression is an array over
these axes, of size 1 along those it does not depend on. Loops with carried values, or whose iterations may see each other's
stores, run one iteration at a time. Violations of the kernel IR's rules (an unguarded access outside a buffer, two grid points
writing one element) raise VerifyError: they are bugs of the compiler that built the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NoReturn

import numpy as np

from rlx.backends.ref.scalar import compute, convert, reduce_ufunc
from rlx.backends.shared.lines import carried
from rlx.backends.shared.loaded import POISON
from rlx.errors import VerifyError
from rlx.ir import kernel as K
from rlx.ir.kernel import Buffer, Expr, Kernel, Load, Local, Stmt
from rlx.ir.nest import identity
from rlx.ir.op import OPS

_EXTREMES = {"argmax": np.argmax, "argmin": np.argmin}  # the first on ties, the first NaN if there is one
MAX_POINTS = 1 << 21  # most elements of an array over a kernel's grid and parallel loops


def run_kernel(kernel: Kernel, args: Sequence[np.ndarray]) -> int:
    """Run `kernel` on flat arrays, one per kernel.buffers, each of the buffer's dtype and at least its size.

    Returns 0, or the code of a failed Check. Raises VerifyError if the kernel breaks a rule of the kernel IR.
    """
    memory = {}
    for buffer, array in zip(kernel.buffers, args, strict=True):
        fits = array.ndim == 1 and array.dtype == buffer.dtype.numpy and array.size >= buffer.size
        assert fits, f"{array.dtype}{array.shape} for {buffer}"
        memory[buffer] = array[: buffer.size]
    kernel, points = _limited(kernel, memory)
    ragged = any(isinstance(s, K.Contract) and s.count is not None for s in kernel.body)
    chunk = 1 if ragged else max(1, MAX_POINTS // max(1, _volume(kernel.body)))
    owners: dict[Buffer, np.ndarray] = {}
    status = 0
    with np.errstate(all="ignore"):
        for start in range(0, points, chunk):
            status = _Chunk(kernel, memory, owners, start, min(points, start + chunk)).run() or status
    return status


def _limited(kernel: Kernel, memory: dict[Buffer, np.ndarray]) -> tuple[Kernel, int]:
    """The kernel with extents reduced to the limits given in `memory`, and its number of grid points."""
    counts: dict[K.Var, int] = {}
    for x in kernel.limits:
        counts[x.var] = max(0, int(_Chunk(kernel, memory, {}, 0, 0).value(x.count).item()))

    def block(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(map(statement, body))

    def statement(s: Stmt) -> Stmt:
        if isinstance(s, K.Loop):
            return replace(s, extent=min(s.extent, counts.get(s.var, s.extent)), body=block(s.body))
        if isinstance(s, K.Contract):
            return replace(s, m=min(s.m, counts.get(s.i, s.m)))
        if isinstance(s, K.Native) and s.axes:
            axes, views = tuple((v, min(n, counts.get(v, n))) for v, n in s.axes), s.outputs
            if s.acc is None:
                views = (replace(views[0], dims=tuple(n for _, n in axes)), *views[1:])
            return replace(s, outputs=views, axes=axes)
        return s

    if counts:
        grid = tuple((v, min(n, counts.get(v, n))) for v, n in kernel.grid)
        kernel = replace(kernel, grid=grid, body=block(kernel.body), limits=())
    return kernel, math.prod(n for _, n in kernel.grid)


def _volume(body: Sequence[Stmt]) -> int:
    """The largest number of array elements for one grid point."""
    most = 1
    for s in body:
        if isinstance(s, K.Loop):
            most = max(most, (s.extent if _vectorisable(s) else 1) * _volume(s.body))
        elif isinstance(s, K.Sort):
            most = max(most, s.n * _volume(s.body))
        elif isinstance(s, K.Contract):
            inner = max(_volume(s.before), s.n * _volume(s.epilogue), _volume(s.rows), s.k * _volume_of(s.a))
            most = max(most, s.m * inner, s.k * s.width * _volume_of(s.b))
        elif isinstance(s, K.Native):
            most = max(most, math.prod(n for _, n in s.axes) * _volume(s.epilogue))
    return most


def _volume_of(o: K.Operand | K.Computed) -> int:
    return max(_volume(o.before), _volume(o.body)) if isinstance(o, K.Computed) else 1


def _in_levels(at: np.ndarray, stride: int, levels: K.Levels) -> np.ndarray:
    """The positions of rows or columns of an Operand."""
    found = np.zeros_like(at)
    for count, outer in levels:
        found, at, stride = found + at % count * stride, at // count, outer
    return found + at * stride


@lru_cache(4096)
def _vectorisable(loop: K.Loop) -> bool:
    """Whether the loop can be vectorised: running each statement for all iterations before the next gives the same result."""
    if loop.carries or loop.vector:
        return not loop.carries
    parts = list(K.walk(loop))
    stored = [s.buffer for s in parts if isinstance(s, K.Store)]
    return len(set(stored)) == len(stored) and not any(isinstance(x, Load) and x.buffer in stored for x in parts)


def _depth(body: Sequence[Stmt]) -> int:
    """The number of array axes needed in addition to the grid's."""
    most = 0
    for s in body:
        if isinstance(s, (K.Loop, K.Sort)):
            most = max(most, 1 + _depth(s.body))
        elif isinstance(s, K.Contract):
            most = max(most, 1 + _depth(s.before), 2 + _depth(s.epilogue), 1 + _depth(s.rows))
            for o in (s.a, s.b):
                most = max(most, 1 + _depth(o.before), 2 + _depth(o.body)) if isinstance(o, K.Computed) else most
        elif isinstance(s, K.Native):
            most = max(most, len(s.axes) + _depth(s.epilogue))
    return most


class _Chunk:
    """One run of a kernel's body over grid points start..stop. Axis 0 is the grid; axis d is the loop at depth d."""

    def __init__(
        self, kernel: Kernel, memory: dict[Buffer, np.ndarray], owners: dict[Buffer, np.ndarray], start: int, stop: int
    ) -> None:
        self.kernel, self.memory, self.owners = kernel, memory, owners
        self.rank = 1 + _depth(kernel.body)
        self.depth = 1  # the next free axis
        self.size = stop - start  # elements of the axes in use
        self.status = 0
        self.scopes: list[dict[int, np.ndarray]] = [{}]  # memoised values of expressions, one dict per scope
        self.point = self.along(np.arange(start, stop), 0)
        self.row: np.ndarray | None = None  # row index of the Contract being run
        indices = np.unravel_index(np.arange(start, stop), [extent for _, extent in kernel.grid]) if kernel.grid else ()
        self.env = {var: self.along(np.asarray(i, np.int64), 0) for (var, _), i in zip(kernel.grid, indices)}
        self.locals: dict[Local, np.ndarray] = {}
        rows = next((s.m for s in kernel.body if isinstance(s, K.Contract)), 1)
        for x in kernel.locals:
            shape = (stop - start, rows if x.per_row else 1, x.size)
            poison = np.full(math.prod(shape) * x.dtype.itemsize, POISON, np.uint8)
            self.locals[x] = poison.view(x.dtype.numpy).reshape(shape)

    def run(self) -> int:
        self.block(self.kernel.body)
        return self.status

    def along(self, values: np.ndarray, axis: int) -> np.ndarray:
        return values.reshape((1,) * axis + (-1,) + (1,) * (self.rank - axis - 1))

    @contextmanager
    def scope(self, axes: int, size: int) -> Iterator[None]:
        """Use `axes` more axes, of `size` elements in total, inside the `with`; values memoised there are dropped after it."""
        outside = self.depth, self.size
        self.depth, self.size = self.depth + axes, self.size * size
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.depth, self.size = outside

    # -- statements

    def block(self, body: Sequence[Stmt]) -> None:
        for s in body:
            if isinstance(s, K.Store):
                self.store(s)
            elif isinstance(s, K.Let):
                self.env[s.var] = self.value(s.value)
            elif isinstance(s, K.Check):
                if not self.value(s.ok).all():
                    self.status = s.code
            elif isinstance(s, K.Loop):
                self.loop(s)
            elif isinstance(s, K.Sort):
                self.sort(s)
            elif isinstance(s, K.Contract):
                self.contract(s)
            else:
                self.native(s)

    def loop(self, loop: K.Loop) -> None:
        for c in loop.carries:
            self.env[c.var] = self.value(c.init)
        if loop.extent and _vectorisable(loop) and self.size * loop.extent * _volume(loop.body) <= 2 * MAX_POINTS:
            self.spread(loop)
        elif any(r.op in K.EXTREMES for r in loop.reduces):
            self.block(carried(loop))
        else:
            self.iterate(loop)

    def spread(self, loop: K.Loop) -> None:
        axis = self.depth
        self.env[loop.var] = self.along(np.arange(loop.extent), axis)
        with self.scope(1, loop.extent):
            self.block(loop.body)
            for r in loop.reduces:
                value = self.value(r.value)
                whole = np.broadcast_to(value, [loop.extent if a == axis else n for a, n in enumerate(value.shape)])
                if r.op in K.EXTREMES:
                    self.env[r.result] = _EXTREMES[r.op](whole, axis=axis, keepdims=True)
                else:
                    ufunc = reduce_ufunc(r.op, value.dtype)
                    self.env[r.result] = ufunc.reduce(whole, axis=axis, dtype=value.dtype, keepdims=True)

    def iterate(self, loop: K.Loop) -> None:
        for r in loop.reduces:
            self.env[r.result] = self.full(identity(r.op, r.value.dtype), r.value.dtype.compute.numpy)
        for i in range(loop.extent):
            self.env[loop.var] = self.full(i, np.dtype(np.int64))
            with self.scope(0, 1):
                self.block(loop.body)
                after = {c.var: self.value(c.next) for c in loop.carries}
                after |= {r.result: self.combined(r, self.value(r.value)) for r in loop.reduces}
            self.env |= after

    def combined(self, r: K.Reduce, value: np.ndarray) -> np.ndarray:
        return reduce_ufunc(r.op, value.dtype)(self.env[r.result], value)

    def sort(self, s: K.Sort) -> None:
        axis = self.depth
        self.env[s.i], self.env[s.to] = self.along(np.arange(s.n), axis), self.along(np.arange(s.kept), axis)
        with self.scope(1, s.n):
            value = self.value(s.value)
            value = np.broadcast_to(value, [s.n if a == axis else n for a, n in enumerate(value.shape)])
            order = np.argsort(np.flip(value, axis) if s.descending else value, axis=axis, kind="stable")
            order = s.n - 1 - np.flip(order, axis) if s.descending else order  # reversed twice: ties keep their order
            order = np.take(order, np.arange(s.kept), axis)
            self.env |= {s.held: np.take_along_axis(value, order, axis), s.origin: order}
        if s.kept:
            with self.scope(1, s.kept):
                self.block(s.body)

    def contract(self, c: K.Contract) -> None:
        if c.count is not None:
            found = int(self.value(c.count).item())
            if not 0 <= found <= c.m:
                self.broken(f"has {found} rows at a grid point, of {c.m}")
            c = replace(c, m=found, count=None)
        rows, columns, dtype = np.arange(c.m), np.arange(c.n), c.acc.dtype.numpy
        a, b = self.operand(c.a, c.m, c.k, c.k).astype(dtype), self.operand(c.b, c.k, c.width, c.k).astype(dtype)
        acc = np.matmul(a, b)
        self.env[c.i] = self.row = self.along(rows, 1)
        self.env[c.j] = self.along(columns, 2)
        for n, var in enumerate([c.acc] if c.also is None else [c.acc, c.also]):
            own = acc[..., n * c.n : (n + 1) * c.n]
            self.env[var] = own.reshape(own.shape + (1,) * (self.rank - 3))
        for axes, size, body in ((1, c.m, c.before), (2, c.m * c.n, c.epilogue), (1, c.m, c.rows)):
            with self.scope(axes, size):
                if size:
                    self.block(body)
        self.row = None

    def operand(self, o: K.Operand | K.Computed, rows: int, columns: int, k: int) -> np.ndarray:
        """The operand's matrix at every grid point (1 if it is the same at all of them): [points or 1, rows, columns]."""
        if isinstance(o, K.Computed):
            return self.computed(o, rows, columns)
        if o.blocks:
            self.broken(f"multiplies by {o.blocks} blocks in panels, which only a backend that claims such products decodes")
        r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
        offset = self.value(o.offset).reshape(-1, 1, 1)
        if o.panel:
            at = (r // o.group * o.panel + c % o.panel) * o.group + r % o.group
            index = offset + (c // o.panel) * (-(-k // o.group) * o.group * o.panel) + at
        else:
            index = offset + _in_levels(r, o.row_stride, o.row_levels) + _in_levels(c, o.col_stride, o.col_levels)
        self.bounds(o.buffer, index, None, "reads")
        return convert(self.memory[o.buffer][index], o.buffer.dtype, o.buffer.dtype.compute)

    def computed(self, o: K.Computed, rows: int, columns: int) -> np.ndarray:
        if not rows * columns:
            return np.zeros((1, rows, columns), o.dtype.compute.numpy)
        self.env[o.row] = self.row = self.along(np.arange(rows), 1)
        with self.scope(1, rows):
            self.block(o.before)
            self.env[o.column] = self.along(np.arange(columns), 2)
            with self.scope(1, columns):
                self.block(o.body)
                value = convert(self.value(o.value), o.value.dtype.compute, o.dtype)
        self.row = None
        value = convert(value, o.dtype, o.dtype.compute)
        points = value.shape[0]
        return np.broadcast_to(value, (points, rows, columns, *value.shape[3:])).reshape(points, rows, columns)

    def native(self, s: K.Native) -> None:
        inputs = [self.window(v) for v in s.inputs]
        found = OPS[s.op].reference(s.attrs, *inputs)
        results = list(found if isinstance(found, tuple) else (found,))
        if s.acc:
            dims = [n for _, n in s.axes]
            first = np.asarray(results.pop(0))[tuple(map(slice, dims))].astype(s.acc.dtype.numpy)
            self.env[s.acc] = first.reshape((1, *dims, *(1,) * (self.rank - 1 - len(dims))))
            self.env |= {v: self.along(np.arange(n), axis) for axis, (v, n) in enumerate(s.axes, 1)}
        for view, result in zip(s.outputs, results, strict=True):
            self.window(view)[...] = np.asarray(result)[tuple(map(slice, view.dims))].astype(view.buffer.dtype.numpy)
        with self.scope(len(s.axes), math.prod(n for _, n in s.axes)):
            self.block(s.epilogue)

    def window(self, v: K.View) -> np.ndarray:
        """The strided view as a numpy array on the buffer's own memory."""
        memory = self.memory[v.buffer]
        if 0 in v.dims:
            return np.empty(v.dims, memory.dtype)
        reach = [(n - 1) * stride for n, stride in zip(v.dims, v.strides)]
        low, high = v.offset + sum(min(r, 0) for r in reach), v.offset + sum(max(r, 0) for r in reach)
        self.bounds(v.buffer, np.array([low, high]), None, "views")
        strides = [s * memory.itemsize for s in v.strides]
        words = memory[v.offset :].view(f"u{memory.itemsize}")  # as_strided does not support numpy's 8-bit floats
        return np.lib.stride_tricks.as_strided(words, v.dims, strides).view(memory.dtype)

    def store(self, s: K.Store) -> None:
        value = convert(self.value(s.value), s.value.dtype.compute, s.buffer.dtype)
        index, guard = self.place(s, "writes")
        memory, at = self.memory_of(s.buffer, index)
        if guard is not None:
            *at, value, guard = np.broadcast_arrays(*at, value, guard)
            at, value = tuple(a[guard] for a in at), value[guard]
        if isinstance(s.buffer, Buffer):
            self.own(s.buffer, index, guard)
        memory[at] = value

    def own(self, buffer: Buffer, index: np.ndarray, guard: np.ndarray | None) -> None:
        """Record which grid point writes which element; two points that write the same element are a race."""
        if not buffer.writable:
            self.broken(f"writes {buffer.name}, which is not writable")
        index, point = np.broadcast_arrays(index, self.point)
        if guard is not None:
            index, point = (np.broadcast_to(x, guard.shape)[guard] for x in (index, point))
        owner = self.owners.setdefault(buffer, np.full(buffer.size, -1))
        before = owner[index]
        owner[index] = point
        if np.count_nonzero((before != -1) & (before != point)) or np.count_nonzero(owner[index] != point):
            self.broken(f"two grid points write one element of {buffer.name}")

    # -- expressions

    def full(self, value: int | float | bool, dtype: np.dtype) -> np.ndarray:
        return np.asarray(value).astype(dtype).reshape((1,) * self.rank)

    def value(self, e: Expr) -> np.ndarray:
        """The expression at every point, in its compute dtype: an array of rank `rank`."""
        if isinstance(e, K.Var):
            return self.env[e]
        for scope in reversed(self.scopes):
            if (known := scope.get(id(e))) is not None:
                return known
        if isinstance(e, K.Alu):  # not in a function of its own, as Python bounds the depth of calls
            out = compute(e.op, [(self.value(a), a.dtype) for a in e.args], e.dtype)
        else:
            out = self.load(e) if isinstance(e, Load) else self.full(e.value, e.dtype.compute.numpy)
        self.scopes[-1][id(e)] = out
        return out

    def load(self, e: Load) -> np.ndarray:
        index, guard = self.place(e, "reads")
        if guard is not None and not guard.any():
            return np.zeros(index.shape, e.dtype.numpy)
        memory, at = self.memory_of(e.buffer, index if guard is None else np.where(guard, index, 0))
        out = convert(memory[at], e.buffer.dtype, e.dtype)
        if isinstance(e.buffer, Buffer) and (owner := self.owners.get(e.buffer)) is not None:
            foreign = (owner[at] != -1) & (owner[at] != self.point)
            if np.count_nonzero(foreign if guard is None else foreign & guard):
                self.broken(f"one grid point reads an element that another wrote in {e.buffer.name}")
        return out if guard is None else np.where(guard, out, np.zeros((), out.dtype))

    # -- memory

    def place(self, x: Load | K.Store, does: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Index and guard of an access, checked to be in bounds."""
        index = self.value(x.index)
        guard = None if x.guard is None else self.value(x.guard)
        self.bounds(x.buffer, index, guard, does)
        return index, guard

    def memory_of(self, buffer: Buffer | Local, index: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The array of a buffer, and the array index of `index` at every point."""
        if isinstance(buffer, Buffer):
            return self.memory[buffer], (index,)
        row = np.zeros_like(self.point[:1])
        if buffer.per_row:
            assert self.row is not None, f"{buffer.name} is per row and used outside a Contract"
            row = self.row
        return self.locals[buffer], (self.point - self.point.flat[0], row, index)

    def bounds(self, buffer: Buffer | Local, index: np.ndarray, guard: np.ndarray | None, does: str) -> None:
        outside = index.view(np.uint64) >= np.uint64(buffer.size)  # a negative index, too, is a large one
        outside = outside if guard is None else outside & guard
        if np.count_nonzero(outside):  # for small arrays a tenth of the time of any()
            at = np.broadcast_to(index, outside.shape)[outside].flat[0]
            self.broken(f"{does} {buffer.name}[{at}], which has {buffer.size} elements")

    def broken(self, rule: str) -> NoReturn:
        raise VerifyError(f"kernel {self.kernel.name!r} {rule}:\n{self.kernel}")

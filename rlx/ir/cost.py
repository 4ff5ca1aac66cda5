"""Cost of a program, counted from its kernels: bytes moved, the lower bound of bytes, and FLOPs.

A pass is a statement of a kernel's body. It moves every element that it touches once, at whatever level of the cache
hierarchy. FLOPs are the scalar operations on floats, one each (an fma is two), elementary functions included; conversions,
comparisons and selections are not counted. Data-dependent accesses (rows of a gather) count as if all were different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from rlx.ir import kernel as K
from rlx.ir.access import accesses
from rlx.ir.attrs import FlowAttrs
from rlx.ir.kernel import COMPARISONS, EXTREMES, Alu, Buffer, Contract, Expr, Kernel, Let, Loop, Sort, Stmt, Var, walk
from rlx.ir.op import OPS
from rlx.ir.program import Program, Region, received_bytes
from rlx.records import record

FREE = COMPARISONS | EXTREMES | {"select", "cast", "bitcast", "and", "or", "xor", "not", "shl", "shr"}


@record(frozen=False)
class Touched:
    """Element counts of one buffer: read by all passes together, by the pass that reads most, and written."""

    read: int = 0
    once: int = 0
    written: int = 0


@record
class KernelWork:
    """Cost of one step. `least_bytes`: each operand and result once. `flops` None: unknown, the op does not declare it."""

    kernel: str
    read_bytes: int
    written_bytes: int
    least_bytes: int
    flops: int | None
    received_bytes: int = 0  # from other ranks, at the least


@record
class ProgramWork:
    """Cost of one run. `least_bytes`: inputs, weights and states read, and outputs and states written, once each."""

    kernels: tuple[KernelWork, ...]
    least_bytes: int

    @cached_property
    def moved_bytes(self) -> int:
        return sum(w.read_bytes + w.written_bytes for w in self.kernels)

    @cached_property
    def received_bytes(self) -> int:
        return sum(w.received_bytes for w in self.kernels)

    @cached_property
    def flops(self) -> int:
        return sum(w.flops or 0 for w in self.kernels)

    def __str__(self) -> str:
        ratio = f", {self.moved_bytes / self.least_bytes:.2f} times that" if self.least_bytes else ""
        head = f"a run: {self.flops} FLOPs; {self.moved_bytes} bytes moved{ratio} of the least possible, {self.least_bytes}"
        rows: list[tuple[str, ...]] = [("step", "read", "written", "least", "FLOPs")]
        for w in self.kernels:
            numbers = map(str, (w.read_bytes, w.written_bytes, w.least_bytes))
            rows.append((w.kernel, *numbers, "?" if w.flops is None else str(w.flops)))
        if self.received_bytes:
            head += f"; {self.received_bytes} bytes come from other ranks"
            rows = [(*row, str(n)) for row, n in zip(rows, ("from ranks", *(w.received_bytes for w in self.kernels)))]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(c.ljust(w) if at == 0 else c.rjust(w) for at, (c, w) in enumerate(zip(r, widths))) for r in rows]
        return "\n".join([head, *("  " + line for line in lines)])


@record
class Roofline:
    """The measured limits of a device. `operations`: floating-point or integer operations per second, by `arithmetic`.
    `reading`: rising (bytes, bytes per second): the rate at which all threads together read that many bytes again and again."""

    operations: Mapping[str, float]
    reading: tuple[tuple[int, float], ...]

    def least(self, nbytes: int, flops: int, kind: str) -> tuple[float, str]:
        """Seconds that a step needs at least, and what bounds it: "memory" or "arithmetic"."""
        rate = next((rate for size, rate in self.reading if nbytes <= size), self.reading[-1][1])
        times = nbytes / rate, flops / self.operations.get(kind, self.operations["f32"])
        return max(times), "memory" if times[0] >= times[1] else "arithmetic"


def arithmetic(kernel: Kernel) -> str:
    """The kind of a kernel's operations: "bf16" or "i8" if it multiplies matrices of these, "f64", else "f32"."""
    for s in kernel.body:
        if isinstance(s, Contract):
            a, b = (o.buffer.dtype if isinstance(o, K.Operand) else o.value.dtype for o in (s.a, s.b))
            return "i8" if a.is_int and b.is_int else "bf16" if (a.name, b.name) == ("bf16", "bf16") else s.acc.dtype.name
    return "f64" if any(b.dtype.name == "f64" for b in kernel.buffers) else "f32"


def program_work(program: Program) -> ProgramWork:
    """The cost of one run: its steps and the commit."""
    rows, needed = [], dict[tuple[int, str], int]()
    outer = {b.id for b in program.buffers if b.region not in (Region.ARENA, Region.OUTPUT)}
    kept = {b.id for b in program.buffers if b.region in (Region.OUTPUT, Region.HANDLE)}
    for step in (*program.steps, *program.commit):
        found, operations = touched(step.kernel), flops(step.kernel)
        read = written = least = 0
        for arg, b in zip(step.args, step.kernel.buffers):
            t, size = found.get(b, Touched()), b.dtype.itemsize
            read, written, least = read + t.read * size, written + t.written * size, least + (t.once + t.written) * size
            for what, n, counts in (("read", t.once, arg in outer), ("written", t.written, arg in kept)):
                if counts:
                    needed[arg, what] = max(needed.get((arg, what), 0), n * size)
        if (flow := step.kernel.flow) is not None:
            read, written, operations = _flow_work(program, flow)
        rows.append(KernelWork(step.kernel.name, read, written, least, operations, received_bytes(step.kernel)))
    return ProgramWork(tuple(rows), sum(needed.values()))


def _flow_work(program: Program, flow: FlowAttrs) -> tuple[int, int, int | None]:
    """Bytes read and written, and operations, of a step that runs bodies: of the larger branch, of all iterations of a loop. If
    data says how many these are, the bytes of one, and no operations."""
    inner = [program_work(program.bodies[number]).kernels for number in flow.bodies]
    known = flow.count == -1 or flow.test == -1
    times = flow.limit if flow.count != -1 and known else 1
    read, written = (max(sum(w) for w in by) * times for by in zip(*(
        ([k.read_bytes for k in kernels], [k.written_bytes for k in kernels]) for kernels in inner
    )))  # fmt: skip
    counts = [[k.flops for k in kernels] for kernels in inner]
    sums = [sum(n for n in body if n is not None) for body in counts if None not in body]
    return read, written, max(sums) * times if known and len(sums) == len(inner) else None


@K.kept
def touched(kernel: Kernel) -> dict[Buffer, Touched]:
    """Elements that the kernel reads and writes, per buffer."""
    found: dict[tuple[Buffer, bool, int], dict[int, int]] = {}  # (buffer, whether written, pass) -> elements by index
    grid = dict(kernel.grid)
    for a in accesses(kernel):
        if isinstance(a.buffer, Buffer) and a.index is not None:
            places = found.setdefault((a.buffer, a.stores, a.path[0]), {})
            places[id(a.index)] = _places(a.index, grid | dict(a.loops))
    for at, s in enumerate(kernel.body):
        for buffer, writes, n in _whole(s, grid):
            found.setdefault((buffer, writes, at), {})[0] = n
    out: dict[Buffer, Touched] = {}
    for (buffer, writes, _), places in found.items():
        t, n = out.setdefault(buffer, Touched()), min(sum(places.values()), buffer.size)
        if writes:
            t.written = min(t.written + n, buffer.size)
        else:
            t.read, t.once = t.read + n, max(t.once, n)
    return out


def _places(index: Expr, around: Mapping[Var, int]) -> int:
    """Upper bound of the number of distinct values of an index; a variable of no loop may differ at every point."""
    names = [v for v in walk(index) if isinstance(v, Var)]
    return math.prod(around.values()) if any(v not in around for v in names) else math.prod(around[v] for v in names)


def _whole(s: Stmt, grid: Mapping[Var, int]) -> Iterator[tuple[Buffer, bool, int]]:
    """(buffer, written, elements) of the operands of a Contract or Native, which are not among the plain accesses."""
    if isinstance(s, Contract):
        for x, n in ((s.a, s.m * s.k), (s.b, s.k * s.width)):
            if isinstance(x, K.Operand):  # the loads of a Computed operand are among the accesses
                whole = x.buffer.size if x.panel or x.blocks else n * _places(x.offset, grid)
                if s.count is not None and x is s.b and (every := math.prod(grid.values())):
                    whole = whole * min(every, s.m) // every  # no more points than that have rows
                yield x.buffer, False, whole
    elif isinstance(s, K.Native):
        for v in (*s.inputs, *s.outputs):
            yield v.buffer, v in s.outputs, math.prod(d for d, stride in zip(v.dims, v.strides) if stride)


@K.kept
def flops(kernel: Kernel) -> int | None:
    """Float operations of all grid points; None if a Native does not declare its FLOPs."""
    counts = [_flops(kernel.body)] if not any(isinstance(s, K.Native) for s in kernel.body) else []
    for s in kernel.body:
        if isinstance(s, K.Native):
            if s.op not in OPS or (count := OPS[s.op].flops) is None:
                return None
            own = count([v.dims for v in s.inputs], s.results, s.attrs)
            counts.append(own + math.prod(n for _, n in s.axes) * _flops(s.epilogue))
    return points(kernel) * sum(counts)


def points(kernel: Kernel) -> int:
    """Grid points, or 1 for a Contract whose points have m rows together."""
    shared = any(isinstance(s, Contract) and s.count is not None for s in kernel.body)
    return 1 if shared else math.prod(n for _, n in kernel.grid)


def _flops(body: Iterable[Stmt]) -> int:
    total, seen = 0, set[int]()

    def count(*parts: Expr | None) -> int:
        new = [e for e in walk(parts) if isinstance(e, Alu) and id(e) not in seen]
        seen.update(map(id, new))
        return sum(1 + (e.op == "fma") for e in new if e.dtype.is_float and e.op not in FREE)

    for s in body:
        if isinstance(s, K.Store):
            total += count(s.value, s.guard)
        elif isinstance(s, (Let, K.Check)):
            total += count(s.value if isinstance(s, Let) else s.ok)
        elif isinstance(s, Loop):
            ends = [Let(r.result, Alu(r.op, (r.value, r.value), r.value.dtype)) for r in s.reduces]
            ends += [Let(c.var, c.next) for c in s.carries]
            total += s.extent * _flops((*s.body, *ends))
        elif isinstance(s, Sort):
            total += s.n * _flops((Let(s.held, s.value),)) + s.kept * _flops(s.body)
        elif isinstance(s, Contract):
            total += 2 * s.m * s.width * s.k + s.m * (_flops(s.before) + s.n * _flops(s.epilogue) + _flops(s.rows))
            for o, rows, columns in ((s.a, s.m, s.k), (s.b, s.k, s.width)):
                if isinstance(o, K.Computed):
                    each = (*o.body, Let(Var("value", o.value.dtype), o.value))
                    total += rows * (_flops(o.before) + columns * _flops(each))
    return total


__all__ = ["KernelWork", "ProgramWork", "Roofline", "arithmetic", "flops", "program_work", "touched"]

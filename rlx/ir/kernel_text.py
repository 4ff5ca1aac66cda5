"""The text form of a kernel, and its cache key. rlx/ir/kernel_parse.py reads the text back.

    kernel row_sums of mul sum
    (b0: f32[600], inout b1: f32[20]) grid (g2 < 20) {
      vector for i3 < 30:
        t0 = b0[add(mul(g2, 30), i3)]
        t1 = mul(t0, 2.0:f32):f32
        reduce r4:f32 = add t1
      b1[g2] = r4
    }

Indentation shows the nesting in loops and epilogues. `t0` names an expression, not a point of evaluation: an expression that is
shared between loops is written at its first use. Index arithmetic is written inline unless it is shared. Buffers and variables
are numbered in order of first use, so the caller's names are not in the text; without its first line the text is the same for
equal kernels.
"""

from __future__ import annotations

import struct
from math import isnan

from rlx.ir import kernel as K
from rlx.ir.dtype import index_
from rlx.ir.tokens import attribute_texts, name_text

PLAIN = index_  # the default dtype, which is not written
LEVELS = 32  # maximum nesting of ops in one line, and of loops
_NAN = struct.pack("<d", float("nan"))


@K.kept
def print_kernel(kernel: K.Kernel) -> str:
    """Text that `parse_kernel` reads back to an equal kernel; deterministic."""
    return _Printer(kernel).text()


def kernel_key(kernel: K.Kernel) -> str:
    """Text without name and origin: kernels with equal keys are compiled once."""
    return print_kernel(kernel).split("\n", 1)[1]


class _Printer:
    def __init__(self, kernel: K.Kernel) -> None:
        self.kernel = kernel
        self.names: dict[K.Var | K.Buffer | K.Local | K.Computed, str] = {}
        self.written: dict[int, tuple[str, int]] = {}  # by id: the text of an expression, and its nesting depth
        self.lines: list[str] = []
        self.temps = 0
        used, self.shared = set[K.Expr](), set[K.Expr]()
        for x in K.parts_of(kernel):
            for e in _operands(x):
                (self.shared if e in used else used).add(e)

    def text(self) -> str:
        k = self.kernel
        origin = f" of {' '.join(map(name_text, k.origin))}" if k.origin else ""
        args = ", ".join(f"{'inout ' if b.writable else ''}{self.name(b, 'b')}: {b.dtype}[{b.size}]" for b in k.buffers)
        grid = ", ".join(f"{self.var(v, 'g')} < {extent}" for v, extent in k.grid)
        head = f"kernel {name_text(k.name)}{origin}\n({args}) grid ({grid}) {{"
        for x in k.locals:
            self.line(1, f"local {self.name(x, 'l')}: {x.dtype}[{x.size}]{' per row' if x.per_row else ''}")
        for limit in k.limits:
            count = self.expr(limit.count, 1)
            self.line(1, f"limit {self.name(limit.var, 'i')} < {count}")
        self.block(k.body, 1)
        return "\n".join([head, *self.lines, "}"])

    def line(self, depth: int, text: str) -> None:
        self.lines.append("  " * depth + text)

    def name(self, x: K.Var | K.Buffer | K.Local | K.Computed, prefix: str) -> str:
        return self.names.setdefault(x, f"{prefix}{len(self.names)}")

    def var(self, v: K.Var, prefix: str) -> str:
        """A variable where it is bound, with its dtype."""
        return self.name(v, prefix) + ("" if v.dtype == PLAIN else f":{v.dtype}")

    def guard(self, guard: K.Expr | None, depth: int) -> str:
        return "" if guard is None else f" if {self.expr(guard, depth)}"

    def expr(self, e: K.Expr, depth: int) -> str:
        """The text of `e`, after lines for the subexpressions that get a name. Not recursive, because chains may be long."""
        todo, written = [e], self.written
        while todo:
            x = todo[-1]
            if id(x) in written or isinstance(x, (K.Const, K.Var)):
                todo.pop()
            elif waiting := [part for part in _operands(x) if id(part) not in written and type(part) not in _NAMED]:
                waiting.reverse()
                todo += waiting
            else:
                self.write(x, depth)
        return self.known(e)[0]

    def known(self, e: K.Expr) -> tuple[str, int]:
        """The text of an expression that is already written, and its nesting depth."""
        if isinstance(e, K.Const):
            return const_text(e.value) + ("" if e.dtype is PLAIN else f":{e.dtype.name}"), 0
        return (self.name(e, "v"), 0) if isinstance(e, K.Var) else self.written[id(e)]

    def write(self, e: K.Load | K.Alu, depth: int) -> None:
        """Chooses the text of `e`: a name, after the line that defines it, or an inline index expression."""
        if isinstance(e, K.Load):
            guard = "" if e.guard is None else f" if {self.known(e.guard)[0]}"
            text, levels = f"{self.name(e.buffer, 'b')}[{self.known(e.index)[0]}]{guard}", 0
        else:
            args = [self.known(a) for a in e.args]
            levels = 1 + max(n for _, n in args)
            text = f"{e.op}({', '.join([t for t, _ in args])})" + ("" if e.dtype is PLAIN else f":{e.dtype.name}")
        if isinstance(e, K.Load) or e.dtype is not PLAIN or e in self.shared or levels == LEVELS:
            self.line(depth, f"t{self.temps} = {text}")
            text, levels = f"t{self.temps}", 0
            self.temps += 1
        self.written[id(e)] = text, levels

    def block(self, stmts: tuple[K.Stmt, ...], depth: int) -> None:
        for s in stmts:
            self.stmt(s, depth)

    def stmt(self, s: K.Stmt, depth: int) -> None:
        if isinstance(s, K.Let):
            value = self.expr(s.value, depth)
            self.line(depth, f"let {self.var(s.var, 'x')} = {value}")
        elif isinstance(s, K.Store):
            index, value, guard = self.expr(s.index, depth), self.expr(s.value, depth), self.guard(s.guard, depth)
            self.line(depth, f"{self.name(s.buffer, 'b')}[{index}] = {value}{guard}")
        elif isinstance(s, K.Check):
            self.line(depth, f"check {self.expr(s.ok, depth)} else {s.code}")
        elif isinstance(s, K.Loop):
            self.loop(s, depth)
        elif isinstance(s, K.Sort):
            some = f" kept {s.kept}" if s.kept != s.n else ""
            self.line(depth, f"sort {'descending ' if s.descending else ''}{self.var(s.i, 'i')} < {s.n}{some}:")
            value = self.expr(s.value, depth + 1)
            self.line(depth + 1, f"value {value}")
            held, origin = self.var(s.held, "v"), self.var(s.origin, "i")
            self.line(depth, f"then value {held} from {origin} to {self.var(s.to, 'i')}")
            self.block(s.body, depth + 1)
        elif isinstance(s, K.Contract):
            count = "" if s.count is None else self.expr(s.count, depth)
            a, b = self.operand(s.a, (s.m, s.k), depth), self.operand(s.b, (s.k, s.width), depth)
            i, j, acc = self.var(s.i, "i"), self.var(s.j, "j"), self.var(s.acc, "acc")
            acc += "" if s.also is None else f", {self.var(s.also, 'acc')}"
            rows = f"{s.m} exact {count}" if count else str(s.m)
            self.line(depth, f"contract {i} < {rows}, {j} < {s.n}, k < {s.k}: {acc} = {a} @ {b}{' tf32' * s.tf32}")
            if s.before:
                self.line(depth, "each row first:")
                self.block(s.before, depth + 1)
                self.line(depth, "then:")
            self.block(s.epilogue, depth + 1)
            if s.rows:
                self.line(depth, "then each row:")
                self.block(s.rows, depth + 1)
        else:
            outputs, inputs = (", ".join(map(self.view, views)) for views in (s.outputs, s.inputs))
            axes = ", ".join(f"{self.var(v, 'i')} < {n}" for v, n in s.axes)
            axes = (f" at {axes}" if axes else "") + (f": {self.var(s.acc, 'acc')}" if s.acc else "")
            head = f"native {name_text(s.op)}({', '.join(attribute_texts(s.attrs))})"
            self.line(depth, " ".join(filter(None, (head, outputs + axes if outputs else axes.strip(), "=", inputs))))
            self.block(s.epilogue, depth + 1)

    def loop(self, s: K.Loop, depth: int) -> None:
        inits = [self.expr(c.init, depth) for c in s.carries]
        self.line(depth, f"{'vector ' if s.vector else ''}for {self.var(s.var, 'i')} < {s.extent}:")
        for c, init in zip(s.carries, inits):
            self.line(depth + 1, f"carry {self.var(c.var, 'c')} = {init}")
        self.block(s.body, depth + 1)
        for r in s.reduces:
            value = self.expr(r.value, depth + 1)
            self.line(depth + 1, f"reduce {self.var(r.result, 'r')} = {r.op} {value}")
        for c in s.carries:
            self.line(depth + 1, f"next {self.name(c.var, 'c')} = {self.expr(c.next, depth + 1)}")

    def view(self, v: K.View) -> str:
        return f"{self.name(v.buffer, 'b')}[{v.offset}; {', '.join(map(str, v.dims))}; {', '.join(map(str, v.strides))}]"

    def operand(self, o: K.Operand | K.Computed, dims: tuple[int, int], depth: int) -> str:
        if isinstance(o, K.Computed):
            self.line(depth, f"computed {self.name(o, 'm')}:{o.dtype} rows {self.var(o.row, 'i')} < {dims[0]}:")
            self.block(o.before, depth + 1)
            self.line(depth + 1, f"columns {self.var(o.column, 'i')} < {dims[1]}:")
            self.block(o.body, depth + 2)
            value = self.expr(o.value, depth + 2)
            self.line(depth + 2, f"value {value}")
            return self.name(o, "m")
        if o.blocks:
            return f"{self.name(o.buffer, 'b')}[{self.expr(o.offset, depth)}; blocks {o.blocks}{' exact' * o.exact}]"
        panels = f"; panels {o.panel}, {o.group}" if o.panel or o.group != 1 else ""
        strides = "" if panels and not (o.row_stride or o.col_stride) else f"; {o.row_stride}, {o.col_stride}"
        levels = "".join(
            f"; {name} {', '.join(f'{n} to {stride}' for n, stride in found)}"
            for name, found in (("rows", o.row_levels), ("columns", o.col_levels))
            if found
        )
        return f"{self.name(o.buffer, 'b')}[{self.expr(o.offset, depth)}{strides}{panels}{levels}]"


_NAMED = (K.Const, K.Var)


def _operands(x: object) -> tuple[K.Expr, ...]:
    """The direct subexpressions of a record, with repetitions."""
    if isinstance(x, K.Alu):
        return x.args
    if isinstance(x, (K.Load, K.Store)):
        guard = () if x.guard is None else (x.guard,)
        return (x.index, *guard) if isinstance(x, K.Load) else (x.index, x.value, *guard)
    if isinstance(x, K.Carry):
        return x.init, x.next
    if isinstance(x, (K.Reduce, K.Let, K.Computed, K.Sort)):
        return (x.value,)
    if isinstance(x, K.Check):
        return (x.ok,)
    if isinstance(x, K.Contract):
        return () if x.count is None else (x.count,)
    return (x.count,) if isinstance(x, K.Limit) else (x.offset,) if isinstance(x, K.Operand) else ()


def const_text(value: int | float | bool) -> str:
    """As Python writes it; a NaN by its bits in f64, unless they are the usual ones."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and isnan(value) and (raw := struct.pack("<d", value)) != _NAN:
        return f"0x{int.from_bytes(raw, 'little'):016x}"
    return repr(value)

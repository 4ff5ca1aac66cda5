"""Renders kernel IR as source text of a C-like language; the dialect (c_dialect) supplies the syntax.

Each value gets a name when it is computed, once per scope, in the order of the kernel's statements. Only index arithmetic that
is used once is written inline.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rlx.backends.shared.c_dialect import Dialect
from rlx.backends.shared.contract_loops import without_contract
from rlx.backends.shared.lines import in_loops
from rlx.errors import CompileError
from rlx.ir import kernel as K
from rlx.ir.dtype import DType, index_
from rlx.ir.kernel import Alu, Buffer, Expr, Kernel, Load, Local, Loop, Stmt, Store, Var, expressions, parts_of, walk
from rlx.ir.nest import identity, operands, postorder

INLINE = 60  # characters; longer index expressions get a name even if they are used once


def render(kernel: Kernel, dialect: Dialect, name: str) -> str:
    """One function called `name`. CompileError: the kernel has a claimed op, which only its own backend can render."""
    return Writer(in_loops(without_contract(kernel)), dialect).function(name)


class Writer:
    def __init__(self, kernel: Kernel, dialect: Dialect) -> None:
        self.kernel, self.dialect = kernel, dialect
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[Buffer | Local | Var, str] = {}
        self.count: Counter[str] = Counter()
        self.memo: ChainMap[int, str] = ChainMap()  # id of an expression -> its text in the open scopes
        self.alive: list[Expr] = []  # those expressions, since another one would get the id of a dead one
        exprs = [e for e in parts_of(kernel) if isinstance(e, (Alu, Load))]
        self.uses = Counter(id(a) for e in exprs for a in operands(e))

    # -- the function

    def function(self, name: str) -> str:
        k, d = self.kernel, self.dialect
        assert d.function and d.points, f"{d.name} needs a Writer of its own"
        head = [f"// {' '.join(k.origin)}", *d.function(name, [(self.name(b, "b"), b) for b in k.buffers])]
        for x in k.locals:
            self.line(d.local(d.element(x.dtype), self.name(x, "l"), x))
        self.limits = {v: text for v, n in self.ranges() if (text := self.limit(v, n))}
        opening, braces = d.points([(self.name(v, "g"), self.limits.get(v) or d.literal(n, index_)) for v, n in k.grid])
        with self.scope(opening, braces):
            self.block(k.body)
        return "\n".join([*head, *self.lines, "}", ""])

    def ranges(self) -> Iterator[tuple[Var, int]]:
        yield from self.kernel.grid
        yield from ((s.var, s.extent) for s in walk(self.kernel.body) if isinstance(s, Loop))

    def limit(self, var: Var, extent: int) -> str | None:
        """The name that holds the active extent of `var`; None: all of it."""
        bound, d = None, self.dialect
        for x in self.kernel.limits:
            if x.var is var:
                least = d.apply("min", (self.value(x.count), bound or d.literal(extent, index_)), index_, index_)
                bound = self.fix("n", index_, least)
        return bound

    # -- lines, names, scopes

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def fresh(self, prefix: str) -> str:
        self.count[prefix] += 1
        return f"{prefix}{self.count[prefix] - 1}"

    def name(self, x: Buffer | Local | Var, prefix: str) -> str:
        if x not in self.names:
            self.names[x] = self.fresh(prefix)
        return self.names[x]

    def fix(self, prefix: str, dtype: DType, text: str) -> str:
        """Declare a constant with the value `text`; returns its name."""
        name = self.fresh(prefix)
        self.line(self.dialect.fix.format(self.type(dtype), name, text))
        return name

    def type(self, dtype: DType) -> str:
        return self.dialect.types[dtype.compute.name]

    @contextmanager
    def scope(self, opening: Sequence[str], braces: int = 1) -> Iterator[None]:
        """Write `opening`, then the body of the `with`, then the closing braces. Names made in the body end with it."""
        for text in opening:
            self.line(text)
            self.depth += text.endswith("{")
        self.memo = self.memo.new_child()
        yield
        self.memo = self.memo.parents
        for _ in range(braces):
            self.depth -= 1
            self.line("}")

    # -- expressions

    def value(self, e: Expr) -> str:
        """A name, a literal or text in parentheses for the value of `e`. The operations it depends on are emitted here."""
        for node in postorder(e, self.memo):
            self.alive.append(node)
            self.memo[id(node)] = self.atom(node)
        return self.memo[id(e)]

    def atom(self, e: Expr) -> str:
        if isinstance(e, K.Const):
            return self.dialect.literal(e.value, e.dtype)
        if isinstance(e, Var):
            return self.names[e]
        if isinstance(e, Load):
            return self.load(e)
        text = self.alu(e)
        if e.dtype == index_ and self.uses[id(e)] == 1 and len(text) < INLINE:
            return f"({text})"
        return self.fix("t", e.dtype, text)

    def load(self, e: Load) -> str:
        text = self.dialect.loads.get(e.buffer.dtype.name, "{0}[{1}]").format(self.names[e.buffer], self.memo[id(e.index)])
        if e.guard is not None:
            zero = self.dialect.literal(0, e.dtype)
            text = self.dialect.apply("select", (self.memo[id(e.guard)], f"({text})", zero), e.dtype, e.dtype)
        return self.fix("x", e.dtype, text)

    def alu(self, e: Alu) -> str:
        d, args, operand = self.dialect, [self.memo[id(a)] for a in e.args], e.args[-1].dtype
        if e.op == "cast":
            return d.cast(args[0], operand, e.dtype)
        if e.op == "bitcast":
            return d.bitcast(args[0], operand, e.dtype)
        text = d.apply(e.op, args, operand, e.dtype)
        return d.rounded[e.dtype.name].format(f"({text})") if e.dtype.name in d.rounded else text

    # -- statements

    def block(self, stmts: Iterable[Stmt], ends: Sequence[Expr] = ()) -> list[str]:
        """The statements in order, then the values of `ends`. Adjacent stores are written only after all their values, and
        those of `ends`, are computed: buffers with different names may alias where their indices are equal."""
        held: list[Store] = []
        for s in stmts:
            if isinstance(s, Store):
                self.write_if_read(expressions([s]), held)
                for e in (s.index, s.value, *(() if s.guard is None else (s.guard,))):
                    self.value(e)
                held.append(s)
                continue
            self.write(held)
            self.statement(s)
        self.write_if_read(ends, held)
        texts = [self.value(e) for e in ends]
        self.write(held)
        return texts

    def write_if_read(self, coming: Iterable[Expr], held: list[Store]) -> None:
        """Write the held stores if one of these expressions, not computed yet, loads from a buffer that they write."""
        if not held:
            return
        loaded, seen = set[Buffer | Local](), self.memo.new_child()
        for node in (x for e in coming for x in postorder(e, seen)):
            seen[id(node)] = ""
            if isinstance(node, Load):
                loaded.add(node.buffer)
        if loaded & {s.buffer for s in held}:
            self.write(held)

    def write(self, held: list[Store]) -> None:
        for s in held:
            d, to = self.dialect, s.buffer.dtype
            value = self.value(s.value)
            if s.value.dtype.compute != to.compute:
                value = d.cast(value, s.value.dtype, to)
            text = self.store(s, value)
            self.line(text if s.guard is None else f"if ({self.value(s.guard)}) {{ {text} }}")
        held.clear()

    def store(self, s: Store, value: str) -> str:
        template = self.dialect.stores.get(s.buffer.dtype.name, "{0}[{1}] = {2};")
        return template.format(self.names[s.buffer], self.value(s.index), value)

    def statement(self, s: Stmt) -> None:
        if isinstance(s, K.Let):
            self.names[s.var] = self.fix("v", s.var.dtype, self.value(s.value))
        elif isinstance(s, K.Check):
            self.line(self.dialect.check.format(self.value(s.ok), s.code))
        elif isinstance(s, Loop):
            self.loop(s)
        else:
            raise CompileError(f"kernel {self.kernel.name!r}: C-style code has no {type(s).__name__} {getattr(s, 'op', '')!r}")

    def loop(self, s: Loop) -> None:
        """Reductions and carried values are variables, updated at the end of an iteration; the carried ones all together."""
        d = self.dialect
        inits = [(c.var, self.value(c.init)) for c in s.carries]
        inits += [(r.result, d.literal(identity(r.op, r.value.dtype), r.value.dtype.compute)) for r in s.reduces]
        for var, init in inits:
            self.line(d.vary.format(self.type(var.dtype), self.name(var, "r"), init))
        extent = self.limits.get(s.var) or d.literal(s.extent, index_)
        with self.scope(self.head(s, d.loop.format(self.type(index_), self.name(s.var, "i"), extent))):
            ends = self.block(s.body, [*(c.next for c in s.carries), *(r.value for r in s.reduces)])
            carried, values = ends[: len(s.carries)], ends[len(s.carries) :]
            for r, value in zip(s.reduces, values):
                total, compute = self.names[r.result], r.value.dtype.compute
                self.line(f"{total} = {d.apply(r.op, (total, value), compute, compute)};")
            changing = {self.names[c.var] for c in s.carries}
            carried = [self.fix("t", c.var.dtype, x) if x in changing else x for c, x in zip(s.carries, carried)]
            for c, x in zip(s.carries, carried):
                self.line(f"{self.names[c.var]} = {x};")
            self.end_iteration(s)

    def head(self, s: Loop, text: str) -> list[str]:
        """The opening lines of a loop that one thread runs in order, given its `for`."""
        return [text]

    def end_iteration(self, s: Loop) -> None:
        """Written at the end of the body of a loop that one thread runs in order. Nothing by default."""

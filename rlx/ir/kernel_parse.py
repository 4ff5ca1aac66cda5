"""Parser for the text of kernels (rlx/ir/kernel_text.py). The text is untrusted: bad text is a ParseError that names the line.

The result is well formed: names are defined before their uses, dtypes agree, stores go to writable buffers. The parser does
not check that accesses are inside their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from rlx.errors import GraphError, ParseError
from rlx.ir import kernel as K
from rlx.ir.attrs import FLOW, FlowAttrs, attribute_types
from rlx.ir.dtype import DType, bool_, index_
from rlx.ir.expression_parse import ExpressionParser
from rlx.ir.kernel_text import LEVELS
from rlx.ir.op import OPS, Attrs, fits

B = TypeVar("B", bound=K.Buffer | K.Local)


def parse_kernel(text: str) -> K.Kernel:
    """The kernel that `print_kernel` printed. ParseError, naming the line, for any other text."""
    parser = KernelParser(text, "a kernel")
    kernel = parser.kernel()
    parser.skip_blank()
    if not parser.ended:
        parser.fail("nothing after the kernel")
    return kernel


def parse_kernels(text: str) -> list[K.Kernel]:
    """The kernels of a text with one after another. ParseError, naming the line, for any other text."""
    parser, kernels = KernelParser(text, "a kernel"), list[K.Kernel]()
    parser.skip_blank()
    while not parser.ended:
        kernels.append(parser.kernel())
        parser.skip_blank()
    return kernels


class KernelParser(ExpressionParser):
    """Reads kernels from lines, one at a time, from the current line on."""

    # -- the kernel

    def kernel(self) -> K.Kernel:
        self.vars, self.unbound, self.buffers, self.temps, self.computed = {}, {}, {}, {}, {}
        self.skip_blank()
        self.expect("kernel", "kernel NAME")
        name = self.name("the kernel's name")
        origin: list[str] = []
        if self.accept("of"):
            while self.kind != "end":
                origin.append(self.name("an op's name"))
        self.advance()
        self.expect("(")
        buffers = tuple(self.argument() for _ in self.items(")"))
        self.expect("grid")
        self.expect("(")
        grid = tuple(self.counted("a grid variable") for _ in self.items(")"))
        self.expect("{")
        self.advance()
        locals_: list[K.Local] = []
        while self.depth == 1 and self.text == "local":
            locals_.append(self.local())
        limits: list[K.Limit] = []
        body = self.block(1, limits)
        self.expect("}")
        self.advance()
        for var, line in self.unbound.items():
            raise ParseError(f"line {line}: no loop or grid of the kernel has the variable {var}")
        return K.Kernel(name, buffers, tuple(locals_), grid, body, tuple(origin), tuple(limits))

    def argument(self) -> K.Buffer:
        writable = self.text == "inout" and self.following != ":"
        self.at += writable
        return self.declare(lambda name, dtype, size: K.Buffer(name, dtype, size, writable))

    def local(self) -> K.Local:
        self.at += 1
        made = self.declare(K.Local)
        if self.accept("per"):
            self.expect("row")
            made = self.buffers[made.name] = K.Local(made.name, made.dtype, made.size, True)
        self.advance()
        return made

    def declare(self, make: Callable[[str, DType, int], B]) -> B:
        name = self.unused("a buffer's name")
        self.expect(":")
        dtype = self.dtype()
        self.expect("[")
        self.buffers[name] = made = make(name, dtype, self.count("a size"))
        self.expect("]")
        return made

    def counted(self, label: str) -> tuple[K.Var, int]:
        """VAR < COUNT"""
        var = self.position(label)
        self.expect("<")
        return var, self.count(f"the number of {label}s")

    # -- statements

    def block(self, depth: int, limits: list[K.Limit] | None = None, ends: tuple[str, ...] = ()) -> tuple[K.Stmt, ...]:
        """The statements at the current indentation, and names of expressions. `limits`: receives the kernel's limits, if they
        are allowed here. `ends`: first words of lines that end the block."""
        found: list[K.Stmt] = []
        while not self.ended:
            if self.kind == "end":  # an empty line, or a comment
                self.advance()
            elif self.depth != depth or self.text in ends:
                break
            elif limits is not None and self.text == "limit" and not found:
                limits.append(self.limit())
            elif self.kind == "word" and self.following == "=":
                self.temp()
            elif self.text == "computed":
                self.computed_operand(depth)
            else:
                found.append(self.stmt(depth))
        if self.depth > depth:
            self.error(f"the line is indented by {self.depth} steps, expected {depth}")
        return tuple(found)

    def limit(self) -> K.Limit:
        self.at += 1
        name = self.next("word", "a variable")
        if name not in self.vars:
            if name in self.buffers or name in self.temps:
                self.error(f"{name} is not a variable")
            self.vars[name], self.unbound[name] = K.Var(name), self.number
        self.expect("<")
        made = K.Limit(self.vars[name], self.index())
        self.advance()
        return made

    def stmt(self, depth: int) -> K.Stmt:
        words = {"let": self.let, "check": self.check}
        if self.kind == "word" and self.following == "[":
            return self.store()
        if self.text in ("vector", "for"):
            return self.loop(depth)
        if self.text in ("contract", "sort"):
            return self.contract(depth) if self.text == "contract" else self.sort(depth)
        if self.accept("native"):
            return self.native(depth)
        made = self.choose(words, "a statement: NAME = …, BUFFER[INDEX] = …, let, check, for, sort, contract or native")()
        self.advance()
        return made

    def let(self) -> K.Let:
        var = self.bind("a variable")
        self.expect("=")
        return K.Let(var, self.value(var.dtype, f"the value of {var.name}"))

    def check(self) -> K.Check:
        ok = self.value(bool_, "the condition")
        self.expect("else", "else CODE")
        code = self.count("the error's code")
        if code not in K.STATUS:
            self.error(f"no error has the code {code}; there are {', '.join(map(str, K.STATUS))}")
        return K.Check(ok, code)

    def store(self) -> K.Store:
        buffer = self.memory()
        if isinstance(buffer, K.Buffer) and not buffer.writable:
            self.error(f"the argument {buffer.name} is not written: it is not inout")
        self.expect("[")
        index = self.index()
        self.expect("]")
        self.expect("=")
        made = K.Store(buffer, index, self.value(buffer.dtype.compute, f"a value for {buffer.name}"), self.guard())
        self.advance()
        return made

    def loop(self, depth: int) -> K.Loop:
        if depth > LEVELS:
            self.error(f"loops nested more than {LEVELS} deep")
        vector = self.accept("vector")
        self.expect("for")
        var, extent = self.counted("iteration")
        self.expect(":")
        self.advance()
        starts: list[tuple[K.Var, K.Expr]] = []
        while self.depth == depth + 1 and self.accept("carry"):
            carried = self.bind("a variable")
            self.expect("=")
            starts.append((carried, self.value(carried.dtype, f"the first value of {carried.name}")))
            self.advance()
        body = self.block(depth + 1, ends=("reduce", "next"))
        reduces = tuple(self.reductions(depth + 1))
        carries = []
        for carried, init in starts:
            self.block_of_temps(depth + 1)
            self.expect("next", f"next {carried.name}")
            if self.next("word", "a carried variable") != carried.name:
                self.error(f"expected next {carried.name}")
            self.expect("=")
            carries.append(K.Carry(carried, init, self.value(carried.dtype, f"the next value of {carried.name}")))
            self.advance()
        return K.Loop(var, extent, body, vector, reduces, tuple(carries))

    def block_of_temps(self, depth: int) -> None:
        """Names of expressions, before a line that ends a loop or gives the value that is sorted."""
        if found := self.block(depth, ends=("reduce", "next", "value")):
            self.error(f"a {type(found[0]).__name__} is where only names of expressions are allowed")

    def reductions(self, depth: int) -> Iterator[K.Reduce]:
        while self.depth == depth and self.accept("reduce"):
            var = self.bind("a variable")
            self.expect("=")
            names = sorted(K.RUNNING | K.EXTREMES)
            op = self.choose({name: name for name in names}, f"one of {', '.join(names)}")
            if op in K.EXTREMES and var.dtype != index_:
                self.error(f"the result of {op} is index, {var.name} is {var.dtype}")
            value = self.ordered(op) if op in K.EXTREMES else self.value(var.dtype, f"a value for {var.name}")
            yield K.Reduce(var, op, value)
            self.advance()
            self.block_of_temps(depth)

    def ordered(self, label: str) -> K.Expr:
        """An expression whose values have an order."""
        found = self.expr()
        return found if found.dtype.kind in "fiu" else self.error(f"{label} takes numbers, found {found.dtype}")

    def sort(self, depth: int) -> K.Sort:
        self.at += 1
        descending = self.accept("descending")
        i, n = self.counted("position")
        kept = self.count("the number of values kept") if self.accept("kept") else n
        if kept > n:
            self.error(f"{kept} are kept of {n}")
        self.expect(":")
        self.advance()
        self.block_of_temps(depth + 1)
        self.expect("value")
        value = self.ordered("sort")
        self.advance()
        if self.depth != depth or not (self.accept("then") and self.accept("value")):
            self.fail("then value VARIABLE from VARIABLE to VARIABLE")
        held = self.bind("a value")
        if held.dtype != value.dtype:
            self.error(f"{held.name} is {held.dtype}, the values are {value.dtype}")
        self.expect("from")
        origin = self.position("a position")
        self.expect("to")
        to = self.position("a position")
        self.advance()
        return K.Sort(i, n, kept, value, descending, to, held, origin, self.block(depth + 1))

    def contract(self, depth: int) -> K.Contract:
        self.at += 1
        i, m = self.counted("row")
        exact = self.index() if self.accept("exact") else None
        self.expect(",")
        j, n = self.counted("column")
        self.expect(",")
        self.expect("k")
        self.expect("<")
        k = self.count("the depth")
        self.expect(":")
        acc = self.bind("the sum's variable")
        also = self.bind("the other sum's variable") if self.accept(",") else None
        self.expect("=")
        a = self.operand((m, k))
        self.expect("@")
        b = self.operand((k, n if also is None else 2 * n))
        tf32 = self.accept("tf32")
        self.advance()
        before = self.block(depth + 1) if self.titled(depth, "each", "row", "first") else ()
        if before:
            self.expect("then")
            self.expect(":")
            self.advance()
        epilogue = self.block(depth + 1)
        rows = self.block(depth + 1) if self.titled(depth, "then", "each", "row") else ()
        return K.Contract(i, j, m, n, k, a, b, acc, epilogue, rows, also, tf32, exact, before)

    def titled(self, depth: int, *words: str) -> bool:
        """Whether the next line, of this depth, has these words and a colon; it is read then."""
        if self.depth != depth or not self.accept(words[0]):
            return False
        for word in (*words[1:], ":"):
            self.expect(word)
        self.advance()
        return True

    def computed_operand(self, depth: int) -> None:
        self.at += 1
        name = self.unused("an operand's name")
        self.expect(":")
        dtype = self.dtype()
        self.expect("rows")
        row, m = self.counted("row")
        self.expect(":")
        self.advance()
        before = self.block(depth + 1, ends=("columns",))
        self.expect("columns")
        column, n = self.counted("column")
        self.expect(":")
        self.advance()
        body = self.block(depth + 2, ends=("value",))
        self.expect("value")
        self.computed[name] = K.Computed(row, column, self.value(dtype.compute, "an element"), dtype, before, body), (m, n)
        self.advance()

    def operand(self, dims: tuple[int, int]) -> K.Operand | K.Computed:
        if self.text in self.computed:
            made, found = self.computed[self.next("word", "an operand")]
            return made if found == dims else self.error(f"the operand is {dims[0]} x {dims[1]}, found {found[0]} x {found[1]}")
        buffer = self.argument_named()
        self.expect("[")
        offset, strides, panels = self.index(), (0, 0), (0, 1)
        self.expect(";")
        if self.accept("blocks"):
            form, exact = self.name("a format"), self.accept("exact")
            self.expect("]")
            return K.Operand(buffer, offset, blocks=form, exact=exact)
        if self.text != "panels":
            strides = self.pair()
        if self.text == "panels" or (self.following == "panels" and self.accept(";")):
            self.expect("panels")
            panels = self.pair()
        rows, columns = (self.outer(name) for name in ("rows", "columns"))
        self.expect("]")
        return K.Operand(buffer, offset, *strides, *panels, row_levels=rows, col_levels=columns)

    def outer(self, name: str) -> K.Levels:
        if self.following != name or not self.accept(";"):
            return ()
        self.expect(name)
        return tuple(self.listed(self.level))

    def level(self) -> tuple[int, int]:
        count = self.count("steps of a level")
        self.expect("to")
        return count or self.error("a level has at least one step"), self.integer("a stride")

    def pair(self) -> tuple[int, int]:
        first = self.integer("an integer")
        self.expect(",")
        return first, self.integer("an integer")

    def native(self, depth: int) -> K.Native:
        op = self.name("an op's name")
        self.expect("(")
        given: dict[str, object] = {}
        for _ in self.items(")"):
            self.named_attribute(given)
        outputs = self.views()
        axes = self.listed(lambda: self.counted("a coordinate")) if self.accept("at") else []
        acc = self.bind("the element's variable") if axes and self.accept(":") else None
        self.expect("=")
        made, inputs = self.attributes(op, given), self.views()
        self.advance()
        return K.Native(op, made, inputs, outputs, tuple(axes), acc, self.block(depth + 1) if acc else ())

    def attributes(self, op: str, given: dict[str, object]) -> Attrs | None:
        if op == FLOW:
            return self.flow(given)
        if op not in OPS:
            return self.error(f"no op is called {op!r}, so it has no attributes") if given else None
        try:
            return OPS[op].make_attrs(given) if given or OPS[op].attrs else None
        except (GraphError, ValueError, TypeError, OverflowError) as e:
            self.error(str(e), e)

    def flow(self, given: dict[str, object]) -> FlowAttrs:
        types = attribute_types(FlowAttrs)
        if set(given) != set(types) or not all(fits(value, types[name]) for name, value in given.items()):
            self.error(f"a flow has the attributes {', '.join(types)}: integers, and tuples of them")
        return FlowAttrs(**given)  # type: ignore[arg-type]

    def views(self) -> tuple[K.View, ...]:
        return tuple(self.listed(self.view)) if self.kind == "word" and self.text != "at" else ()

    def view(self) -> K.View:
        buffer = self.argument_named()
        self.expect("[")
        offset = self.integer("an offset")
        self.expect(";")
        dims = tuple(self.count("a dim") for _ in self.items(";"))
        strides = tuple(self.integer("a stride") for _ in self.items("]"))
        if len(dims) != len(strides):
            self.error(f"{len(dims)} dims have as many strides, found {len(strides)}")
        return K.View(buffer, dims, strides, offset)

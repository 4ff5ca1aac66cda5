"""Parser for the expressions in the text of kernels: lines, names of variables, buffers and expressions, and scalar ops."""

from __future__ import annotations

import struct

from rlx.ir import kernel as K
from rlx.ir.dtype import DTYPES, DType, bool_, f64, index_
from rlx.ir.kernel_text import LEVELS, PLAIN
from rlx.ir.tokens import Tokens


class ExpressionParser(Tokens):
    """Reads lines, from the current one on, with the names that are defined so far."""

    def __init__(self, text: str, described: str) -> None:
        super().__init__(text, described)
        self.vars: dict[str, K.Var] = {}
        self.unbound: dict[str, int] = {}  # variables named only by limits so far, with the line
        self.buffers: dict[str, K.Buffer | K.Local] = {}
        self.temps: dict[str, K.Expr] = {}
        self.computed: dict[str, tuple[K.Computed, tuple[int, int]]] = {}  # operands defined above, with rows and columns
        self.levels = 0  # nesting depth of ops around the current expression

    # -- lines

    def skip_blank(self) -> None:
        while not self.ended and self.kind == "end":
            self.advance()

    @property
    def depth(self) -> int:
        """Indentation of the line in steps of two spaces; -1: the line is empty."""
        if self.kind == "end":
            return -1
        line = self.lines[self.number - 1]
        return (len(line) - len(line.lstrip(" "))) // 2

    # -- names

    def unused(self, label: str) -> str:
        name = self.next("word", label)
        if any(name in taken for taken in (self.vars, self.buffers, self.temps, self.computed)):
            self.error(f"the name {name} is taken")
        return name

    def bind(self, label: str) -> K.Var:
        """NAME or NAME:DTYPE, a variable that is bound here. Sibling loops may use the same variable."""
        name = self.next("word", label) if self.text in self.vars else self.unused(label)
        dtype = self.dtype() if self.accept(":") else PLAIN
        var = self.vars.setdefault(name, K.Var(name, dtype))
        if var.dtype != dtype:
            self.error(f"{name} is {var.dtype} above, {dtype} here")
        self.unbound.pop(name, None)
        return var

    def position(self, label: str) -> K.Var:
        """A variable that counts: its dtype is index."""
        var = self.bind(label)
        return var if var.dtype == PLAIN else self.error(f"{var.name} is index, found {var.dtype}")

    def dtype(self) -> DType:
        return self.choose({**DTYPES, "index": index_}, "a dtype")

    def memory(self) -> K.Buffer | K.Local:
        name = self.next("word", "a buffer's name")
        if name not in self.buffers:
            self.error(f"no buffer is called {name}; there are {', '.join(self.buffers) or 'none'}")
        return self.buffers[name]

    def argument_named(self) -> K.Buffer:
        found = self.memory()
        if not isinstance(found, K.Buffer):
            self.error(f"{found.name} is local, an argument of the kernel is needed here")
        return found

    # -- expressions

    def expr(self) -> K.Expr:
        """A constant, a variable, an expression named above, or one of them in a scalar op."""
        text = self.text
        if self.kind == "number" or (self.kind == "word" and text in ("true", "false", "nan", "inf")):
            return self.constant_here()
        if self.kind != "word":
            self.fail("an expression")
        if self.following == "(":
            return self.scalar()
        self.at += 1
        found = self.temps.get(text) or (None if text in self.unbound else self.vars.get(text))
        if found is None:
            self.error(f"{text} is not defined above")
        return found

    def constant_here(self) -> K.Const:
        text = self.text
        self.at += 1
        dtype = self.dtype() if self.accept(":") else PLAIN
        try:
            if dtype == bool_:
                return K.Const({"true": True, "false": False}[text], dtype)
            if not dtype.is_float:
                return K.Const(int(text), dtype)
            if text.startswith("0x"):
                return K.Const(struct.unpack("<d", int(text, 16).to_bytes(f64.itemsize, "little"))[0], dtype)
            if text in ("true", "false"):
                raise ValueError
            return K.Const(float(text), dtype)
        except (KeyError, ValueError, OverflowError):
            self.error(f"{text[:60]} is not of dtype {dtype}")

    def scalar(self) -> K.Alu:
        """OP(ARGUMENTS) or OP(ARGUMENTS):DTYPE"""
        op = self.next("word", "a scalar op")
        if op not in K.SCALAR_OPS:
            self.error(f"no scalar op is called {op!r}; there are {', '.join(K.SCALAR_OPS)}")
        self.expect("(")
        self.levels += 1
        if self.levels > LEVELS:
            self.error(f"ops nested more than {LEVELS} deep: give a name to some of them")
        args = tuple(self.expr() for _ in self.items(")"))
        self.levels -= 1
        if len(args) != K.SCALAR_OPS[op]:
            self.error(f"{op} takes {K.SCALAR_OPS[op]} operands, found {len(args)}")
        dtype = self.dtype() if self.accept(":") else PLAIN
        like = args[1:] if op == "select" else args
        wrong = op == "select" and args[0].dtype != bool_
        wrong |= len({a.dtype for a in like}) > 1
        wrong |= op not in ("cast", "bitcast") and dtype != (bool_ if op in K.COMPARISONS else like[0].dtype)
        if wrong:
            self.error(f"{op} of {', '.join(str(a.dtype) for a in args)} does not give {dtype}")
        return K.Alu(op, args, dtype)

    def value(self, dtype: DType, label: str) -> K.Expr:
        """An expression of this dtype."""
        found = self.expr()
        if found.dtype != dtype:
            self.error(f"{label} is {dtype}, found {found.dtype}")
        return found

    def index(self) -> K.Expr:
        return self.value(PLAIN, "an index")

    def guard(self) -> K.Expr | None:
        return self.value(bool_, "a guard") if self.accept("if") else None

    def temp(self) -> None:
        """NAME = EXPRESSION, or NAME = BUFFER[INDEX] if GUARD"""
        name = self.unused("a name")
        self.expect("=")
        if self.following == "[":
            buffer = self.memory()
            self.expect("[")
            index = self.index()
            self.expect("]")
            self.temps[name] = K.Load(buffer, index, self.guard())
        else:
            self.temps[name] = self.expr()
        self.advance()

"""Emitter: writes textual LLVM IR. SSA names, blocks, structured loops with carried values; it knows nothing about kernels.

A V is an SSA name or constant with its LLVM type. The interface to LLVM is text, because parsing it takes less time than building
llvmlite objects, and because the generated code is readable.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rlx.host.llvm import QUICK
from rlx.ir.dtype import DType
from rlx.records import record

LLVM_TYPES = {  # bool in memory; in registers it is i1
    "index": "i64",
    "f64": "double", "f32": "float", "f16": "half", "bf16": "bfloat",
    "i64": "i64", "i32": "i32", "i16": "i16", "i8": "i8",
    "u64": "i64", "u32": "i32", "u16": "i16", "u8": "i8", "bool": "i8", "f8e4m3": "i8", "f8e5m2": "i8",
}  # fmt: skip


@record(slots=True)
class V:
    text: str
    ty: str

    def __str__(self) -> str:
        return f"{self.ty} {self.text}"

    @property
    def lanes(self) -> int:
        return int(self.ty[1 : self.ty.index(" ")]) if self.ty[0] == "<" else 1

    @property
    def scalar(self) -> str:
        return scalar_of(self.ty)


def vector(scalar: str, lanes: int) -> str:
    """The LLVM type of `lanes` lanes of `scalar`; the scalar itself if there is one lane."""
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


def scalar_of(ty: str) -> str:
    return ty[ty.index("x ") + 2 : -1] if ty[0] == "<" else ty


_ORDERS = {"eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "sge": operator.ge}


def _folded(op: str, a: V, b: int) -> V | None:
    """a op b where it is a constant, or `a`: code that LLVM does not optimise would compute it."""
    op = op.partition(" ")[0]
    if (b == 0 and op in ("add", "sub")) or (b == 1 and op in ("mul", "udiv")):
        return a
    if b == 0 and op == "mul":
        return V("0", a.ty)
    known = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}.get(op)
    return V(str(known(int(a.text), b)), a.ty) if known and a.text[0] != "%" else None


def sanitised(name: str) -> str:
    """LLVM type text inside an intrinsic's name: <16 x float> -> v16f32."""
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}
    scalar = scalar_of(name)
    return (f"v{V('', name).lanes}" if name[0] == "<" else "") + short.get(scalar, scalar)


class Emitter:
    """The body of one function. `block`: label of the current block, for phis. `features`: of the Target."""

    def __init__(self, features: Collection[str] = ()) -> None:
        self.lines: list[str] = []
        self.declarations: dict[str, None] = {}
        self.block = "entry"
        self.features = features
        self._count = 0

    # -- text

    def fresh(self, stem: str = "t") -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def op(self, ty: str, text: str) -> V:
        """%new = text, of type ty."""
        name = "%" + self.fresh()
        self.lines.append(f"  {name} = {text}")
        return V(name, ty)

    def do(self, text: str) -> None:
        self.lines.append("  " + text)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    def declare(self, text: str) -> None:
        self.declarations[text] = None

    def function(self, name: str, params: str, *, linkage: str = "", returns: str = "void", attributes: str = "#0") -> str:
        body = "\n".join(self.lines)
        return f"define {linkage}{' ' if linkage else ''}{returns} @{name}({params}) {attributes} {{\nentry:\n{body}\n}}\n"

    # -- values

    def const(self, ty: str, value: V | float | int | bool) -> V:
        """A constant in every lane of `ty`. A V is returned unchanged."""
        if isinstance(value, V):
            return value
        scalar = scalar_of(ty)
        if scalar in ("double", "float"):  # as its bit pattern, so that no digit is lost
            value = ctypes.c_float(value).value if scalar == "float" else value  # rounded; infinite where it overflows
            text = f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
        elif scalar == "half":
            text = f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
        else:
            text = str(bool(value)).lower() if scalar == "i1" else str(int(value))
        return V(text if ty[0] != "<" else f"splat({scalar} {text})", ty)

    def i64(self, value: int | V) -> V:
        return self.const("i64", value)

    def bin(self, op: str, a: V, b: V | float) -> V:
        """fadd, fsub, fmul, fdiv, add, sub, mul, and, or, xor, shl, lshr, ashr … A number `b` becomes a constant of a's type."""
        other = self.const(a.ty, b).text
        if a.ty == "i64" and other[0] != "%" and (known := _folded(op, a, int(other))):
            return known
        return self.op(a.ty, f"{op} {a}, {other}")

    def cmp(self, predicate: str, a: V, b: V | float) -> V:
        """fcmp for float types, icmp otherwise; an i1 per lane."""
        if a.ty == "i64" and a.text[0] != "%" and (other := self.const(a.ty, b).text)[0] != "%" and predicate in _ORDERS:
            return V(str(_ORDERS[predicate](int(a.text), int(other))).lower(), "i1")
        kind = "fcmp" if a.scalar in ("float", "double", "half", "bfloat") else "icmp"
        return self.op(f"<{a.lanes} x i1>" if a.ty[0] == "<" else "i1", f"{kind} {predicate} {a}, {self.const(a.ty, b).text}")

    def freeze(self, a: V) -> V:
        """`a`, without its computation for the passes over loops: of many addresses at constant distances from a frozen one they
        see one value, not as many induction variables, over which they take most of the time of code generation."""
        return self.op(a.ty, f"freeze {a}")

    def fence(self, a: V) -> V:
        """Floats `a`, which LLVM does not combine with their computation: chains of shuffles take it twice the time to select.
        Other values are returned unchanged."""
        return self.intrinsic("arithmetic.fence", a) if a.scalar in ("float", "double") else a

    def select(self, c: V, a: V | float, b: V) -> V:
        if c.text in ("true", "false"):
            return self.const(b.ty, a) if c.text == "true" else b
        return self.op(b.ty, f"select {c}, {self.const(b.ty, a)}, {b}")

    def convert(self, op: str, a: V, scalar: str) -> V:
        """fpext, fptrunc, sext, zext, trunc, sitofp, uitofp, bitcast … to the same number of lanes of `scalar`."""
        ty = f"<{a.lanes} x {scalar}>" if a.ty[0] == "<" else scalar
        return self.op(ty, f"{op} {a} to {ty}")

    def intrinsic(self, stem: str, *args: V, suffix: Sequence[str] | None = None, returns: str | None = None) -> V:
        """llvm.<stem>.<suffix>(args). The suffix and the result type default to the first argument's type."""
        names = map(sanitised, (args[0].ty,) if suffix is None else suffix)
        return self.external(".".join(["llvm", stem, *names]), returns or args[0].ty, *args)

    def external(self, name: str, returns: str, *args: V) -> V:
        """A call of a symbol from outside this module."""
        self.declare(f"declare {returns} @{name}({', '.join([a.ty for a in args])})")
        return self.call(name, returns, *args)

    def call(self, callee: str | V, returns: str, *args: V) -> V:
        """Call a function of this module or a declared symbol by name, or a function by address."""
        name = callee.text if isinstance(callee, V) else "@" + callee
        text = f"call {returns} {name}({', '.join(map(str, args))})"
        if returns == "void":
            self.do(text)
            return V("", "void")
        return self.op(returns, text)

    def fma(self, a: V | float, b: V, c: V | float) -> V:
        return self.intrinsic("fma", self.const(b.ty, a), b, self.const(b.ty, c))

    def splat(self, a: V, lanes: int) -> V:
        """A scalar in every lane. The scalar itself if `lanes` is 1."""
        if lanes == 1:
            return a
        ty = vector(a.ty, lanes)
        one = self.op(ty, f"insertelement {ty} poison, {a}, i64 0")
        return self.op(ty, f"shufflevector {one}, {ty} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, a: V, picks: Sequence[int], b: V | None = None) -> V:
        """Select lanes of the concatenation of `a` and `b` (default: zeros) by index."""
        indices = ", ".join([f"i32 {i}" for i in picks])
        other = b or V("zeroinitializer", a.ty)
        return self.op(f"<{len(picks)} x {a.scalar}>", f"shufflevector {a}, {other}, <{len(picks)} x i32> <{indices}>")

    def iota(self, lanes: int, scalar: str = "i64") -> V:
        """<0, 1, 2, …>"""
        if lanes == 1:
            return V("0", scalar)
        return V("<" + ", ".join(f"{scalar} {i}" for i in range(lanes)) + ">", vector(scalar, lanes))

    # -- memory (addresses are `ptr`; offsets are bytes)

    def gep(self, base: V, offset: int | V) -> V:
        at = self.i64(offset)
        return base if at.text == "0" else self.op("ptr", f"getelementptr i8, {base}, {at}")

    def load(self, ty: str, address: V, align: int) -> V:
        return self.op(ty, f"load {ty}, {address}, align {align}")

    def store(self, value: V, address: V, align: int) -> V:
        self.do(f"store {value}, {address}, align {align}")
        return value

    def stream(self, value: V, address: V, align: int) -> None:
        """Nontemporal store. `align` is the value's size, at most 64. A fence must follow before other threads may read it."""
        self.declare(STREAMS)
        self.do(f"store {value}, {address}, align {align}, !nontemporal !0")

    def prefetch(self, address: V, level: int = 1, writes: bool = False) -> None:
        """Bring the cache line at `address` into the caches from `level` on; `writes`: to be written. It may be outside of any
        memory of the process."""
        self.intrinsic("prefetch", address, *(V(x, "i32") for x in f"{writes:d}{4 - level}1"), suffix=("p0",), returns="void")

    # -- atomic memory access; aligned to the size of the type; memory orders as LLVM names them

    def load_atomic(self, ty: str, address: V, order: str = "seq_cst") -> V:
        return self.op(ty, f"load atomic {ty}, {address} {order}, align {int(ty[1:]) // 8}")

    def store_atomic(self, value: V, address: V, order: str = "seq_cst") -> None:
        self.do(f"store atomic {value}, {address} {order}, align {int(value.ty[1:]) // 8}")

    def update_atomic(self, op: str, address: V, value: V) -> V:
        """add, sub, xchg … Returns the old value."""
        return self.op(value.ty, f"atomicrmw {op} {address}, {value} seq_cst")

    def exchange_if(self, address: V, old: V, new: V) -> tuple[V, V]:
        """Compare and swap `old` by `new`. Returns the value found, and an i1: whether it was `old`."""
        pair = self.op(f"{{ {old.ty}, i1 }}", f"cmpxchg {address}, {old}, {new} seq_cst seq_cst")
        return self.op(old.ty, f"extractvalue {pair}, 0"), self.op("i1", f"extractvalue {pair}, 1")

    # -- control

    def ret(self, value: V | None = None) -> None:
        self.do(f"ret {value or 'void'}")

    def branch(self, label: str) -> None:
        """Branch to `label`, unless the block has ended already by a ret or a branch."""
        if not (self.lines and self.lines[-1].startswith(("  br ", "  ret "))):
            self.do(f"br label %{label}")

    def branch_if(self, c: V, yes: str, no: str) -> None:
        self.do(f"br {c}, label %{yes}, label %{no}")

    def phi(self, *ways: tuple[V, str]) -> V:
        """A phi node. `ways`: (value, label of the predecessor block)."""
        return self.op(ways[0][0].ty, _phi(*ways))

    @contextmanager
    def loop(
        self, start: int | V, stop: int | V | None, step: int | V = 1, carried: Sequence[V] = (), nonempty: bool = False
    ) -> Iterator[Loop]:
        """for index in range(start, stop, step), i64. `carried`: initial values of loop-carried variables. The body sets
        loop.next, one value for each. After the loop, loop.results holds the final values. `nonempty`: the caller guarantees at
        least one iteration. `stop` None: loop for ever, without results.

        The body may branch to loop.done if nothing is carried or `stop` is None."""
        begin, end = self.i64(start), self.i64(stop or 0)
        if isinstance(start, int) and isinstance(stop, int):
            nonempty = start < stop  # if empty, the body is still emitted, but never entered
        head, done, before = self.fresh("loop"), self.fresh("done"), self.block

        def enter(at: V, always: bool) -> None:
            if always:
                self.branch(head)
            else:
                self.branch_if(self.cmp("slt", at, end), head, done)

        enter(begin, nonempty or stop is None)
        self.label(head)
        index = V("%" + self.fresh("i"), "i64")
        phis = [V("%" + self.fresh("c"), c.ty) for c in carried]
        at = len(self.lines)
        state = Loop(index, phis, done)
        yield state
        if len(state.next) != len(carried):
            raise AssertionError(f"loop carries {len(carried)} values, its body set {len(state.next)}")
        following = self.bin("add nsw", index, step)
        latch = self.block
        enter(following, stop is None)
        rounds = [((first, before), (last, latch)) for first, last in zip((begin, *carried), (following, *state.next))]
        self.lines[at:at] = [f"  {v.text} = {_phi(*ways)}" for v, ways in zip((index, *phis), rounds)]
        self.label(done)
        if nonempty:
            state.results = list(state.next)
        elif stop is not None:
            state.results = [self.phi(*ways) for ways in rounds[1:]]

    @contextmanager
    def when(self, condition: V) -> Iterator[None]:
        """if condition: body."""
        if condition.text == "true":
            yield
            return
        yes, after = self.fresh("then"), self.fresh("after")
        self.branch_if(condition, yes, after)
        self.label(yes)
        yield
        self.branch(after)
        self.label(after)


def _phi(*ways: tuple[V, str]) -> str:
    return f"phi {ways[0][0].ty} " + ", ".join([f"[{v.text}, %{block}]" for v, block in ways])


class Loop:
    """An open loop: `index`, `carried` (values in this iteration), `next` (set by the body), `results` (valid after the loop),
    `done` (the label after the loop)."""

    def __init__(self, index: V, carried: list[V], done: str) -> None:
        self.index, self.carried, self.done = index, carried, done
        self.next: list[V] = []
        self.results: list[V] = []


def stored(dtype: DType) -> str:
    """The LLVM type of an element in memory."""
    return LLVM_TYPES[dtype.name]


def computed(dtype: DType) -> str:
    """The LLVM type of an element in a register: its compute dtype, and i1 for bool."""
    return "i1" if dtype.kind == "b" else LLVM_TYPES[dtype.compute.name]


STREAMS = "!0 = !{i32 1}"  # metadata of nontemporal stores, declared if there are any
PARAMETERS = "ptr %args, i64 %task, ptr %scratch, ptr %status"  # of a kernel; see Rendered
ATTRIBUTES = 'attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" "no-builtins" }\n'
AROUND = ATTRIBUTES.replace("#0", "#1").replace("nounwind", QUICK)  # of a kernel all of whose hot loops are in functions


def quick(text: str) -> str:
    """The text of a module, with functions that LLVM does not optimise."""
    assert ATTRIBUTES in text
    return text.replace(ATTRIBUTES, ATTRIBUTES.replace("nounwind", QUICK))

"""Running totals by a team of threads: in each round a thread adds its adjacent elements to the total of all before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.vectors import loads, stores, width
from rlx.backends.shared.nest import identity, nested
from rlx.ir.dtype import DType
from rlx.ir.kernel import Alu, Buffer, Carry, Expr, Let, Load, Loop, Store, walk

LEAST = 4  # elements of a thread and a round, at least
LEAST_DOWN = 8  # where the loop runs down columns


@dataclass
class Total:
    """The names of one running total: `whole`, of all rounds so far; `part`, an array of the addends of this thread; `own`, their
    sum; `before`, the total before the next element."""

    carry: Carry
    added: Expr
    dtype: DType
    op: str
    type: str
    whole: str
    part: str
    own: str
    before: str

    def sum(self, a: str, b: str) -> str:
        return CUDA.apply(self.op, (a, b), self.dtype, self.dtype)


class Scan:
    """Writes the loop `s`, whose carries are running totals, with `writer`, a CudaWriter."""

    def __init__(self, writer: Any, s: Loop) -> None:
        self.w, self.s, self.team = writer, s, writer.launch.team
        self.totals = [self.total(c) for c in s.carries]
        self.ends: Sequence[Expr] = [t.added for t in self.totals]
        self.size = max(width(s.body, self.ends, s.var, s.extent), LEAST_DOWN if writer.down else LEAST)
        while self.size > 1 and s.extent < self.size * self.team:
            self.size //= 2
        self.i, self.extent = writer.name(s.var, "i"), writer.extent(s)
        limited = s.var in writer.limits
        self.even = not limited and s.extent % (self.team * self.size) == 0
        self.vectors = not limited and s.extent % self.size == 0

    def total(self, c: Carry) -> Total:
        assert isinstance(c.next, Alu) and c.added is not None
        names = [self.w.fresh(x) for x in ("r", "a", "s", "c")]
        return Total(c, c.added, c.var.dtype.compute, c.next.op, self.w.type(c.var.dtype), *names)

    def write(self) -> None:
        w, s, size, first = self.w, self.s, self.size, self.w.fresh("first")
        for t in self.totals:
            w.line(f"{t.type} {t.whole} = {w.value(t.carry.init)};")
        with w.scope([f"for (rlx_index {first} = 0; {first} < {self.extent}; {first} += {self.team * size}) {{"]):
            w.line(f"const rlx_index {self.i}_0 = {first} + me * {size};")
            with w.alone():
                held = self.fetch()
                for t in self.totals:
                    self.addends(t, held)
            for t in self.totals:
                function = w.function_of(t.op, t.dtype)
                w.line(f"{t.type} {t.before} = rlx_scan{w.down}<{self.team}>({t.own}, {t.whole}, {function});")
                w.names[t.carry.var] = t.before
            with w.alone():
                self.elements(held)
            w.exchanged(s)
        for t in self.totals:
            w.names[t.carry.var] = t.whole

    def each(self) -> list[str]:
        """The opening lines of the loop over the elements of this thread."""
        lines = ["#pragma unroll", f"for (int v = 0; v < {self.size}; v++) {{", f"const rlx_index {self.i} = {self.i}_0 + v;"]
        return lines + ["{" if self.even else f"if ({self.i} < {self.extent}) {{"]

    def fetch(self) -> dict[int, str]:
        """Registers with the elements in memory that both passes read, by the id of the load."""
        w, s, held = self.w, self.s, dict[int, str]()
        vectors = {id(x) for x in loads(s.body, self.ends, s.var, self.size)} if self.vectors else set()
        for x in dict.fromkeys(x for x in walk((s.body, self.ends)) if isinstance(x, Load) and _free(x, s)):
            name = held[id(x)] = w.fresh("q")
            w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.size}];")
            if id(x) in vectors:
                text = f"rlx_fetch<{self.size}>({name}, {w.names[x.buffer]} + {w.at_first(x.index, s.var, f'{self.i}_0')});"
                w.line(text if self.even else f"if ({self.i}_0 < {self.extent}) {text}")
                continue
            with w.scope(self.each(), 2):
                w.line(f"{name}[v] = {w.names[x.buffer]}[{w.value(x.index)}];")
        return held

    def addends(self, t: Total, held: dict[int, str]) -> None:
        w = self.w
        w.line(f"{t.type} {t.part}[{self.size}];")
        if not self.even:
            w.line(f"for (int v = 0; v < {self.size}; v++) {t.part}[v] = {CUDA.literal(identity(t.op, t.dtype), t.dtype)};")
        with w.scope(self.each(), 2):
            w.vector_loads = held
            w.line(f"{t.part}[v] = {w.value(t.added)};")
            w.vector_loads = {}
        w.line(f"{t.type} {t.own} = {t.part}[0];")
        w.line(f"for (int v = 1; v < {self.size}; v++) {t.own} = {t.sum(t.own, f'{t.part}[v]')};")

    def elements(self, held: dict[int, str]) -> None:
        """The body of the loop for each element of this thread."""
        w, s = self.w, self.s
        out = {id(x): (x, w.fresh("o")) for x in stores(s.body, s.var, self.size) if x.guard is None} if self.vectors else {}
        for x, name in out.values():
            w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.size}];")
        with w.scope(self.each(), 2):
            w.vector_loads, w.vector_stores = held, {n: name for n, (_, name) in out.items()}
            w.block(s.body)
            w.vector_loads, w.vector_stores = {}, {}
            for t in self.totals:
                w.line(f"{t.before} = {t.sum(t.before, f'{t.part}[v]')};")
        for x, name in out.values():
            text = f"rlx_put<{self.size}>({w.names[x.buffer]} + {w.at_first(x.index, s.var, f'{self.i}_0')}, {name});"
            w.line(text if self.even else f"if ({self.i}_0 < {self.extent}) {text}")


def _free(x: Load, s: Loop) -> bool:
    """True for an unconditional load from memory that depends on nothing that the body of `s` computes or writes."""
    own = {c.var for c in s.carries} | {y.var for y in nested(s.body) if isinstance(y, Let)}
    own |= {y.buffer for y in nested(s.body) if isinstance(y, Store)}
    inside = list(walk(x.index))
    return (
        x.guard is None
        and isinstance(x.buffer, Buffer)
        and own.isdisjoint([x.buffer, *inside])
        and not any(isinstance(e, Load) for e in inside)
    )


__all__ = ["Scan"]

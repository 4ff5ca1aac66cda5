"""Prefix sums (running totals): a team keeps a part of a line in registers, and adds the total of the preceding parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.schedule import WARP
from rlx.backends.cuda.vectors import loads, stores, width
from rlx.ir.dtype import index_
from rlx.ir.kernel import Alu, Buffer, Expr, Let, Load, Loop, Store, coefficient, is_const, walk
from rlx.ir.nest import identity, nested


class Scan:
    """Writes the loop `s`, whose carry is a running total, with `writer`, a CudaWriter. A thread has `rounds` groups of `size`
    adjacent elements; names of arrays by round: `own`, the sum of a group, then the total before it; `part`, the addends."""

    def __init__(self, writer: Any, s: Loop) -> None:
        self.w, self.s, self.at = writer, s, writer.launch
        (self.carry,), each = s.carries, self.at.part // self.at.team
        assert isinstance(self.carry.next, Alu) and self.carry.added is not None
        self.added, self.dtype, self.op = self.carry.added, self.carry.var.dtype.compute, self.carry.next.op
        self.type, self.zero = writer.type(self.dtype), CUDA.literal(identity(self.op, self.dtype), self.dtype)
        self.peel = self.at.peel
        extent = self.peel.whole if self.peel else s.extent
        self.size = each if writer.down else min(each, width(s.body, (self.added,), s.var, extent))
        self.rounds, self.part, self.own = each // self.size, writer.fresh("a"), writer.fresh("s")
        self.i, self.extent = writer.name(s.var, "i"), writer.extent(s)
        limited = s.var in writer.limits
        self.even = not limited and not self.peel and s.extent % self.at.part == 0
        self.vectors = not limited and (self.peel or s.extent % self.size == 0)
        self.first = f"{self.i}_0{' + head' * bool(self.peel)}"
        self.inside = "((rlx_uindex)({0} + head) < {1})" if self.peel else "({0} < {1})"

    def write(self) -> None:
        w, function = self.w, self.w.function_of(self.op, self.dtype)
        start = w.value(self.carry.init)
        with w.alone():
            held = self.fetch()
            self.addends(held)
            w.line(f"all.scan({self.own}, ({self.type}){start}, ({self.type}){self.zero}, {function});")
            w.names[self.carry.var] = f"{self.own}[n]"
            self.elements(held)

    @contextmanager
    def each_round(self) -> Iterator[None]:
        place = "me" if self.w.down else f"((me / {WARP} * {self.rounds} + n) * {WARP} + me % {WARP})"
        first = f"(rlx_index)part * {self.at.part} + " if self.at.parts > 1 else ""
        with self.w.scope(["#pragma unroll", f"for (int n = 0; n < {self.rounds}; n++) {{"]):
            self.w.line(f"const rlx_index {self.i}_0 = {first}{place} * {self.size};")
            yield

    def each(self, parts: object = None, held: Collection[int] = ()) -> list[str]:
        """The opening lines of the loop over the adjacent elements; where `parts`, all of whose accesses are `held` ones of
        registers, are computed for elements outside a peeled line, too."""
        lines = ["#pragma unroll", f"for (int v = 0; v < {self.size}; v++) {{", f"const rlx_index {self.i} = {self.i}_0 + v;"]
        harmless = self.peel and parts and all(id(x) in held for x in walk(parts) if isinstance(x, Load | Store))
        return lines + ["{" if self.even or harmless else f"if {self.inside.format(self.i, self.extent)} {{"]

    def fetch(self) -> dict[int, str]:
        """Registers with the elements in memory that both passes read, by the id of the load."""
        w, s, held = self.w, self.s, dict[int, str]()
        ends = (self.added,)
        vectors = {id(x) for x in loads(s.body, ends, s.var, self.size)} if self.vectors else set()
        for x in dict.fromkeys(x for x in walk((s.body, ends)) if isinstance(x, Load) and _free(x, s)):
            name = w.fresh("q")
            held[id(x)] = f"{name}[n]"
            w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.rounds}][{self.size}];")
            with self.each_round():
                if id(x) in vectors:
                    place = f"{w.names[x.buffer]} + {w.at_first(x.index, s.var, f'{self.i}_0')}"
                    text = f"rlx_fetch<{self.size}>({name}[n], {place});"  # of a peeled row, elements beside it, too
                    w.line(text if self.even else f"if ({self.first} < {self.extent}) {text}")
                    continue
                with w.scope(self.each(), 2):
                    w.line(f"{name}[n][v] = {w.names[x.buffer]}[{w.value(x.index)}];")
        return held

    def addends(self, held: dict[int, str]) -> None:
        w, part, own = self.w, f"{self.part}[n]", f"{self.own}[n]"
        w.line(f"{self.type} {self.part}[{self.rounds}][{self.size}], {self.own}[{self.rounds}];")
        with self.each_round():
            if not self.even:
                w.line(f"for (int v = 0; v < {self.size}; v++) {part}[v] = {self.zero};")
            with w.scope(self.each(self.added, held), 2):
                w.vector_loads = held
                w.line(f"{part}[v] = {w.value(self.added)};")
                w.vector_loads = {}
            if self.peel:
                w.line(f"rlx_clear_outside({part}, {self.zero}, {self.first}, {self.extent});")
            w.line(f"{own} = {part}[0];")
            w.line(f"for (int v = 1; v < {self.size}; v++) {own} = {self.sum(own, f'{part}[v]')};")

    def sum(self, a: str, b: str) -> str:
        return CUDA.apply(self.op, (a, b), self.dtype, self.dtype)

    def elements(self, held: dict[int, str]) -> None:
        """The body of the loop for each element of this thread."""
        w, s, before = self.w, self.s, f"{self.own}[n]"
        out = {id(x): (x, w.fresh("o")) for x in stores(s.body, s.var, self.size) if x.guard is None} if self.vectors else {}
        with self.each_round():
            for x, name in out.values():
                w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.size}];")
            with w.scope(self.each(s.body, {*held, *out}), 2):
                w.vector_loads, w.vector_stores = held, {n: name for n, (_, name) in out.items()}
                w.block(s.body)
                w.vector_loads, w.vector_stores = {}, {}
                w.line(f"{before} = {self.sum(before, f'{self.part}[n][v]')};")
            for x, name in out.values():
                place = f"{w.names[x.buffer]} + {w.at_first(x.index, s.var, f'{self.i}_0')}"
                some = f"rlx_put_inside<{self.size}>({place}, {name}, {self.first}, {self.extent});"
                text = some if self.peel else f"rlx_put<{self.size}>({place}, {name});"
                w.line(text if self.even else f"if ({self.first} < {self.extent}) {text}")


def chosen(s: Loop) -> Expr | None:
    """The condition on which iterations store, if they number those that do, so that no two store at one place; None: a loop does
    anything else."""
    added = s.carries[0].added if len(s.carries) == 1 else None
    if s.reduces or not isinstance(added, Alu) or added.op != "select" or s.carries[0].var.dtype != index_:
        return None
    (carry,), (test, one, zero) = s.carries, added.args
    written = [x.buffer for x in s.body if isinstance(x, Store) and x.guard is test]
    apart = all(isinstance(x, Store) and (x.index is carry.var or coefficient(x.index, s.var)) for x in s.body)
    fits = apart and len({*written}) == len(s.body) and is_const(one, 1) and is_const(zero, 0) and carry.var not in walk(test)
    return test if fits and not any(isinstance(x, Load) and x.buffer in written for x in walk(s.body)) else None


def place(w: Any, s: Loop, test: Expr) -> None:
    """Writes such a loop with a CudaWriter: a thread of the team has some adjacent iterations at a time."""
    (carry,), team, base, first = s.carries, w.launch.team, w.fresh("i"), w.fresh("i")
    each = next(n for n in (8, 4, 1) if n * team <= max(s.extent, team))
    start, total, i, extent = w.value(carry.init), w.name(carry.var, "r"), w.name(s.var, "i"), w.extent(s)
    loop = ["#pragma unroll", f"for (int v = 0; v < {each}; v++) {{"]
    w.line(f"rlx_index {total} = {start};")
    with w.scope([f"for (rlx_index {base} = 0; {base} < {extent}; {base} += {team * each}) {{"]), w.alone():
        w.line(f"const rlx_index {first} = {base} + me * {each};")
        w.line("unsigned mine = 0;  // a bit for each iteration")
        with w.scope(loop):
            w.line(f"const bool inside = {first} + v < {extent};")
            w.line(f"const rlx_index {i} = inside ? {first} + v : {extent} - 1;")
            w.line(f"mine |= (unsigned)(inside && {w.value(test)}) << v;")
        w.line("int all;")
        w.line(f"rlx_index place = {total} + rlx_chosen_before<{team}>(__popc(mine), all);")
        w.names[carry.var] = "place"
        with w.scope([*loop, "if (mine >> v & 1) {"], 2):
            w.line(f"const rlx_index {i} = {first} + v;")
            w.block(s.body)
            w.line("place++;")
        w.line(f"{total} += all;")
    w.names[carry.var] = total


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


__all__ = ["Scan", "chosen", "place"]

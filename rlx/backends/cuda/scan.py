"""Prefix sums (running totals): a team keeps a part of a line in registers, and adds the total of the preceding parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.schedule import WARP, running_size
from rlx.backends.cuda.vectors import loads, stores
from rlx.ir.dtype import index_
from rlx.ir.kernel import Alu, Buffer, Expr, Let, Load, Loop, Store, coefficient, is_const, walk
from rlx.ir.nest import identity, nested


class Scan:
    """Writes the loop `s`, whose carry is a running total, with `writer`, a CudaWriter. A thread has `rounds` groups of `size`
    adjacent elements; `own`: the name of an array, for each round the sum of a group, then the total before it."""

    def __init__(self, writer: Any, s: Loop) -> None:
        self.w, self.s, self.at = writer, s, writer.launch
        (self.carry,), each = s.carries, self.at.part // self.at.team
        assert isinstance(self.carry.next, Alu) and self.carry.added is not None
        self.added, self.dtype, self.op = self.carry.added, self.carry.var.dtype.compute, self.carry.next.op
        self.type, self.zero = writer.type(self.dtype), CUDA.literal(identity(self.op, self.dtype), self.dtype)
        self.peel = self.at.peel
        self.size = running_size(s, self.peel, each)
        self.rounds, self.own = each // self.size, writer.fresh("s")
        self.i, self.extent = writer.name(s.var, "i"), writer.extent(s)
        limited = s.var in writer.limits
        self.even = not limited and not self.peel and s.extent % self.at.part == 0
        self.vectors = not limited and (self.peel or s.extent % self.size == 0)
        # threads behind the end of a line load what is before it: a branch would keep each load behind the use of the one before
        self.near = not limited and not self.peel and not self.even
        self.first = f"{self.i}_0{' + head' * bool(self.peel)}"
        inside = f"(rlx_uindex)({self.i} + head)" if self.peel else self.i
        self.inside = f"{inside} < {self.extent}"

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
        place = f"((me / {WARP} * {self.rounds} + n) * {WARP} + me % {WARP})"
        first = f"(rlx_index)part * {self.at.part} + " if self.at.parts > 1 else ""
        with self.w.scope(["#pragma unroll", f"for (int n = 0; n < {self.rounds}; n++) {{"]):
            self.w.line(f"const rlx_index {self.i}_0 = {first}{place} * {self.size};")
            yield

    def each(self, parts: object = None, held: Collection[int] = (), near: bool = False) -> list[str]:
        """The opening lines of the loop over the adjacent elements; where `parts`, all of whose accesses are `held` ones of
        registers, are computed for elements outside a line, too. `near`: those have the place of its last element."""
        place = f"min({self.i}_0 + v, (rlx_index){self.extent} - 1)" if near else f"{self.i}_0 + v"
        lines = ["#pragma unroll", f"for (int v = 0; v < {self.size}; v++) {{", f"const rlx_index {self.i} = {place};"]
        return lines + ["{" if self.even or near or self.known(parts, held) else f"if ({self.inside}) {{"]

    def known(self, parts: object, held: Collection[int]) -> bool:
        return bool((self.peel or self.near) and parts and _all_held(parts, held))

    @property
    def whole(self) -> str:
        begins = f"{self.first} >= 0 && " * bool(self.peel)
        return f"{begins}{self.first} + {self.size} <= {self.extent}"

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
                    first = f"min({self.i}_0, (rlx_index){self.extent} - {self.size})" if self.near else f"{self.i}_0"
                    place = f"{w.names[x.buffer]} + {w.at_first(x.index, s.var, first)}"
                    text = f"rlx_fetch<{self.size}>({name}[n], {place});"  # of a peeled row, elements beside it, too
                    w.line(f"if ({self.first} < {self.extent}) {text}" if self.peel else text)
                    continue
                plain = [f"if ({self.whole}) {{", *self.each()[:3], "{"]
                for lines in [plain, ["else {", *self.each(near=True)]] if self.near else [["{", *self.each()]]:
                    with w.scope(lines, 3):
                        w.line(f"{name}[n][v] = {w.names[x.buffer]}[{w.value(x.index)}];")
        return held

    def addends(self, held: dict[int, str]) -> None:
        w, own, part = self.w, f"{self.own}[n]", self.w.fresh("a")
        w.line(f"{self.type} {self.own}[{self.rounds}];")
        some = self.known(self.added, held)  # few threads have some elements of a line: so the program branches
        with self.each_round():
            w.line(f"{own} = {self.zero};")
            for head in [f"if ({self.whole}) {{", "else {"] if some else ["{"]:
                with w.scope([head, *self.each(self.added, held)], 3):
                    w.vector_loads = held
                    value = w.value(self.added)
                    w.vector_loads = {}
                    text = f"{self.inside} ? {value} : {self.zero}" if head == "else {" else value
                    w.line(f"const {self.type} {part} = {text};")
                    w.line(f"{own} = v == 0 ? {part} : {self.sum(own, part)};")

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
                after = w.value(self.carry.next)
                w.line(f"{before} = {f'{self.first} + v < 0 ? {before} : {after}' if self.peel else after};")
            for x, name in out.values():
                place = f"{w.names[x.buffer]} + {w.at_first(x.index, s.var, f'{self.i}_0')}"
                some = f"rlx_put_inside<{self.size}>({place}, {name}, {self.first}, {self.extent});"
                put = some if self.peel else f"rlx_put<{self.size}>({place}, {name});"
                text = w.stored * isinstance(x.buffer, Buffer) + put
                w.line(text if self.even else f"if ({self.first} < {self.extent}) {text}")


class ScanDown:
    """The same down columns: lanes of a warp have adjacent ones, `vector` each, and a thread has `rows` rows of them. Registers
    keep its elements if it has all of these rows; the few threads where a column ends read them again."""

    def __init__(self, writer: Any, s: Loop) -> None:
        self.w, self.s, at = writer, s, writer.launch
        (self.carry,), self.rows, self.size = s.carries, at.part // at.team, at.vector
        assert isinstance(self.carry.next, Alu) and self.carry.added is not None
        self.added, self.dtype, self.op = self.carry.added, self.carry.var.dtype.compute, self.carry.next.op
        self.type, self.zero = writer.type(self.dtype), CUDA.literal(identity(self.op, self.dtype), self.dtype)
        self.column, self.i, self.extent = writer.kernel.grid[-1][0], writer.name(s.var, "i"), writer.extent(s)
        self.own, self.held = writer.fresh("s"), dict[int, str]()
        self.even = s.var not in writer.limits and s.extent % at.part == 0
        self.first = f"{writer.names[self.column]}{'_0' * (self.size > 1)}"

    def write(self) -> None:
        w, kind, own = self.w, f"rlx_several<{self.type}, {self.size}>", f"{self.own}[0].at[v]"
        before = f"(rlx_index)part * {w.launch.part} + " if w.launch.parts > 1 else ""
        with w.alone():
            w.line(f"const rlx_index {self.i}_0 = {before}me * {self.rows};")
            w.line(f"const bool whole = {'true' if self.even else f'{self.i}_0 + {self.rows} <= {self.extent}'};")
            if not self.even:
                w.line(f"const int beyond = whole ? 0 : min({self.i}_0 + {self.rows} - {self.extent}, (rlx_index){self.rows});")
            w.line(f"{kind} {self.own}[1], start, none;")
            start = w.value(self.carry.init)
            with w.scope(self.each_column(named=False)):
                w.line(f"{own} = none.at[v] = {self.zero};")
                w.line(f"start.at[v] = {start};")
            packed = self.fetch()
            self.twice(self.addends)
            for name in packed:
                w.line(f"rlx_again({name});")
            sums = f"for (int v = 0; v < {self.size}; v++) c.at[v] = {self.sum('a.at[v]', 'b.at[v]')};"
            function = f"[]({kind} a, {kind} b) -> {kind} {{ {kind} c; {sums} return c; }}"
            w.line(f"all.scan({self.own}, start, none, {function});")
            w.names[self.carry.var] = own
            self.twice(self.elements)

    def twice(self, body: Callable[[], None]) -> None:
        """The rows of a thread: all of them, or those of the column. The latter are as many steps of the program, too: no branch
        divides their loads. Comparisons made once for both times would take registers."""
        w, parts = self.w, [["if (whole) {", *self.each_row()]]
        if not self.even:
            left = f'int left = {self.rows} - beyond; asm volatile("" : "+r"(left));'
            parts.append(["else {", left, *self.each_row(), "if (n < left) {"])
        for lines in parts:
            with w.scope(lines, 2 if lines is parts[0] else 3):
                w.vector_loads, w.in_words = self.held, True
                body()
                w.vector_loads, w.in_words = {}, False

    def each_row(self, near: bool = False) -> list[str]:
        """`near`: rows behind the column are its last one."""
        lines = ["#pragma unroll", f"for (int n = 0; n < {self.rows}; n++) {{"]
        place = f"{self.i}_0 + n"
        if near:
            place = f"max(min({place}, (rlx_index){self.extent} - 1), (rlx_index)0)"
        return [*lines, f"const rlx_index {self.i} = {place};"]

    def each_column(self, named: bool = True) -> list[str]:
        lines = ["#pragma unroll", f"for (int v = 0; v < {self.size}; v++) {{"]
        if self.size > 1 and named:
            self.w.names[self.column] = name = self.w.fresh("g")
            lines.append(f"const rlx_index {name} = {self.first} + v;")
        return lines

    def fetch(self) -> list[str]:
        """Loads the elements in memory that both passes read into arrays; returns the names of those of whole words."""
        w, s = self.w, self.s
        found = {x: w.fresh("q") for x in walk((s.body, self.added)) if isinstance(x, Load) and _free(x, s)}
        for x, name in found.items():
            w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.rows}][{self.size}];")
        if found:
            with w.scope(self.each_row(near=not self.even)):
                for x, name in found.items():
                    place = f"{w.names[x.buffer]} + {w.at_first(x.index, self.column, self.first)}"
                    w.line(f"rlx_fetch<{self.size}>({name}[n], {place});")
        self.held = {id(x): f"{name}[n]" for x, name in found.items()}
        return [name for x, name in found.items() if x.buffer.dtype.itemsize < 4 and self.size * x.buffer.dtype.itemsize % 4 == 0]

    def addends(self) -> None:
        with self.w.scope(self.each_column()):
            own = f"{self.own}[0].at[v]"
            self.w.line(f"{own} = {self.sum(own, self.w.value(self.added))};")

    def elements(self) -> None:
        """The body of the loop for a row of this thread."""
        w, s = self.w, self.s
        out = {id(x): (x, w.fresh("o")) for x in stores(s.body, self.column, self.size)} if self.size > 1 else {}
        for x, name in out.values():
            w.line(f"{CUDA.element(x.buffer.dtype)} {name}[{self.size}];")
        with w.scope(self.each_column()):
            w.vector_stores = {n: name for n, (_, name) in out.items()}
            w.block(s.body)
            w.line(f"{self.own}[0].at[v] = {w.value(self.carry.next)};")
            w.vector_stores = {}
        for x, name in out.values():
            place = f"{w.names[x.buffer]} + {w.at_first(x.index, self.column, self.first)}"
            w.line(f"{w.stored * isinstance(x.buffer, Buffer)}rlx_put<{self.size}>({place}, {name});")

    def sum(self, a: str, b: str) -> str:
        return CUDA.apply(self.op, (a, b), self.dtype, self.dtype)


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


def _all_held(parts: object, held: Collection[int]) -> bool:
    """Whether all accesses are `held` ones of registers."""
    return all(id(x) in held for x in walk(parts) if isinstance(x, Load | Store))


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


__all__ = ["Scan", "ScanDown", "chosen", "place"]

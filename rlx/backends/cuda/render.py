"""Renders a kernel and its launch as CUDA C++. Over 500 lines: the statements of teams and of single threads share one state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from rlx.backends.cuda.blocks import FOLDER
from rlx.backends.cuda.dialect import CUDA, unrounded
from rlx.backends.cuda.peel import HEAD, ORIGIN, Peel
from rlx.backends.cuda.points import counts
from rlx.backends.cuda.rows import Key, Row, key_of, only_added, stores_in_loops
from rlx.backends.cuda.scan import Scan, ScanDown, chosen, place
from rlx.backends.cuda.schedule import FLYING, PART_THREADS, SHORT, WARP, Launch, Segments, checked_late, is_shared, least_bytes
from rlx.backends.cuda.vectors import BYTES, loads, loads_ahead, lone, stores, width
from rlx.backends.shared.c_style import Writer
from rlx.ir.dtype import DType, bf16, f32, f64, index_
from rlx.ir.nest import identity

from rlx.ir.kernel import (  # isort: skip
    EXTREMES, Alu, Buffer, Check, Expr, Kernel, Let, Load, Local, Loop, Native, Reduce, Stmt, Store, Var, coefficient, is_const,
    walk,
)  # fmt: skip

UNROLLED = 8  # iterations of a reduction by one thread
LOADED = 32  # registers of a thread for elements that it loads before it moves the first
LANE = f"threadIdx.x % {WARP}"
LONG_SUM = 8192  # numbers that are added in f32, at most; longer sums are carried in f64
BEGIN = "rlx_begin(); if (rlx_halted(halt)) return;"  # in every kernel, before it reads memory that others write
WORD = 4  # bytes
WIDE = 1 << 31  # positions from here on need 64 bits


def may_fail(kernel: Kernel) -> bool:
    found = walk(kernel.body)
    return any(isinstance(s, Check) or (isinstance(s, Native) and getattr(s.attrs, "positioned", False)) for s in found)


class Partial(NamedTuple):
    """The running result of a reduction in one thread: its C++ type and first value, and texts that combine two of them, add a
    value and its iteration, and get the result. `near`: the f32 that a few numbers are added in before they are converted."""

    name: str
    type: str
    init: str
    combine: Callable[[str, str], str]
    add: Callable[[str, str], str]
    result: Callable[[str], str]
    near: str = ""


class CudaWriter(Writer):
    """`shared`: whether the statements being written run in every thread of the team, with the same values."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch.kernel, CUDA)
        self.launch, self.shared = launch, launch.team > 1
        self.vector_loads: dict[int, str] = {}
        self.vector_stores: dict[int, str] = {}
        self.sync = "__syncwarp();" if launch.team == WARP and launch.lanes == 1 else "__syncthreads();"
        self.down = "_down" if launch.lanes > 1 else ""  # of the functions that combine the values of a team
        inside = list(walk(launch.kernel.body))
        stored = {s.buffer for s in inside if isinstance(s, Store)}
        self.narrow = all(b.dtype.itemsize <= 2 for b in stored if isinstance(b, Buffer))
        self.row, self.round = launch.row, ""  # the latter: the number of the part of a row, in its loop
        if (launch.part and launch.parts > 1) or (self.row and self.row.packed):  # so that the parts of a line run at once
            self.occupancy = f", {(768 if self.row and self.row.large else 1024) // launch.threads}"
        self.told = 0  # words of a line that reductions have used
        self.registers: dict[Key, str] = {}  # loads of a row -> the array that holds it
        self.edges: dict[Key, str] = {}  # those of an iteration before or behind the vectors of a row
        self.loaded: set[Key] = set()
        self.fetched: dict[int, str] = {}  # loads for several vectors of a thread -> the array that holds those of vector u
        self.same: set[Key] = set()  # of the former, those that are the same in all parts of a row
        registers = self.row.locals if self.row else frozenset()
        # memory by which threads exchange values
        self.passed = stored.difference(registers) & {x.buffer for x in inside if isinstance(x, Load)}

    # -- the function

    headers: tuple[str, ...] = ()  # files of device functions, which stand in front of the kernel
    block_number = "blockIdx.x"
    alone_in_launch = True  # nothing else in the launch writes memory that the kernel reads
    occupancy = ""  # ", N": blocks of a multiprocessor, at least
    attributes = ""  # of the function, besides
    aligned = 16  # bytes, of the shared memory of a launch
    stored = ""  # in front of stores of vectors to memory
    in_rows = False  # a thread has a row
    in_words = False  # elements that were loaded in vectors are being read
    unrolled = UNROLLED  # iterations of which a thread loads the elements before it waits for the first
    tile_by_block = True  # of `segments`: a block has one

    def arguments(self) -> list[str]:
        found = []
        for b, free in zip(self.kernel.buffers, self.launch.unaliased):
            restrict = " __restrict__" * (free and self.alone_in_launch)
            found.append(f"{'' if b.writable else 'const '}{CUDA.element(b.dtype)}*{restrict} {self.name(b, 'b')}")
        if s := self.launch.segments:
            found += ["const int* slots", f"const {CUDA.element(s.weights.dtype)}* __restrict__ far"]
        if self.launch.scratch:
            found.append("unsigned char* rlx_scratch")
        if self.launch.counters:
            found.append("unsigned* rlx_counters")
        return [*found, *["rlx_status* status"] * may_fail(self.kernel), "const int* halt"]

    def function(self, name: str, member: bool = False) -> str:
        """`member`: as a function of the device, whose last argument is the number of the block among its own."""
        k, at = self.kernel, self.launch
        cluster = f"__cluster_dims__({at.parts}) " * at.clustered
        how = f'extern "C" __global__ void {cluster}{self.attributes}__launch_bounds__({at.threads}{self.occupancy})'
        if member:
            how, self.block_number = "RLX_FN void", "rlx_block"
        arguments = self.arguments()
        if member:
            arguments.append("unsigned rlx_block")
            for text in self.enter():
                self.line(text)
        head = [f"// {' '.join(k.origin)}", how, f"{name}({', '.join(arguments)}) {{"]
        for text in self.coordinates():
            self.line(text)
        self.declare_locals()
        if at.segments:
            self.list_tiles(at.segments)
        if not member:
            self.begin()
        self.limits = {v: text for v, n in self.ranges() if (text := self.limit(v, n))}
        for var, _ in k.grid:
            if var in self.limits:
                self.line(f"if ({self.names[var]} >= {self.limits[var]}) return;")
        self.body()
        functions = "".join((FOLDER / x).read_text() for x in self.headers)
        return functions + "\n".join([*head, *self.lines, "}", ""])

    def enter(self) -> Iterator[str]:
        """The first statements of a member."""
        yield from ()

    def body(self) -> None:
        k, at = self.kernel, self.launch
        stmts = checked_late(at) if type(at) is Launch else k.body
        if at.vector > 1 and at.repeats == at.lanes:
            self.vector_of_point(stmts, *k.grid[-1])
        elif at.vector > 1 and at.lanes == 1:
            self.vectors_apart(stmts)
        elif at.repeats > 1:
            self.repeated(stmts)
        else:
            if at.peel:
                self.name_head(at.peel)
            self.line_of_parts()
            self.block(stmts)
        if at.part and at.parts > 1:
            self.line("all.forget();")

    def name_head(self, p: Peel) -> None:
        """Names for the row's first vector: that of running totals has the row's first element, others are all in the row."""
        running = any(s.carries for s in self.kernel.body if isinstance(s, Loop))
        head = f"-(start & {p.size - 1})" if running else f"-start & {p.size - 1}"
        self.line(f"const rlx_index start = {self.value(p.start)}, head = {head};")
        self.line(f"const rlx_index origin = (start + head) / {p.size};")
        self.names[HEAD], self.names[ORIGIN] = "head", "origin"

    def vector_of_point(self, stmts: Sequence[Stmt], var: Var, extent: int) -> None:
        """The statements for a vector, one by one where the axis ends within it."""
        size, first = self.launch.vector, f"{self.names[var]}_0"
        if extent % size == 0:
            return self.in_vectors(stmts, (), var, size, first)
        with self.scope([f"if ({first} <= {extent - size}) {{"]):
            self.in_vectors(stmts, (), var, size, first)
        self.names[var] = name = self.fresh("i")
        with self.scope([f"else for (rlx_index {name} = {first}; {name} < {extent}; {name}++) {{"]):
            self.block(stmts)

    def vectors_apart(self, stmts: Sequence[Stmt]) -> None:
        """The statements for several vectors of a thread, a block apart: all loads come first, and the checks, by which a program
        is divided, last."""
        at, var, ahead = self.launch, self.kernel.grid[-1][0], {*map(id, loads_ahead(stmts))}
        checks = [s for s in stmts if isinstance(s, Check)]
        moves = [s for s in stmts if s not in checks]
        found = [x for x in loads(moves, (), var, at.vector) if id(x) in ahead]
        for x in found:
            held = self.fetched[id(x)] = self.fresh("q")
            empty = " = {}" * (x.guard is not None)
            self.line(f"{CUDA.element(x.buffer.dtype)} {held}[{at.repeats}][{at.vector}]{empty};")

        def fetch(first: str) -> None:
            for x in found:
                self.fetch_vector(x, f"{self.fetched[id(x)]}[u]", var, at.vector, first, "rlx_fetch")

        turns = [fetch] * bool(found)
        turns += [partial(self.in_vectors, some, (), var, at.vector) for some in (moves, checks) if some]
        stop = [f"if (point >= {at.points}) break;"] * (at.points % (at.threads * at.repeats) > 0)
        for turn in turns:
            with self.scope(["#pragma unroll", f"for (int u = 0; u < {at.repeats}; u++) {{"]):
                for text in self.of_point(f"first + u * {at.threads}", *stop):
                    self.line(text)
                turn(f"{self.names[var]}_0")

    def repeated(self, stmts: Sequence[Stmt]) -> None:
        """The statements for several points of a thread, a block apart."""
        at = self.launch
        inside = [f"const rlx_uindex point_v = first + v * {at.threads};", f"if (point_v < {at.points}) {{"]
        numbers = {id(s.index): "point_v" for s in stmts if isinstance(s, Store) and counts(s.index, self.kernel.grid)}

        def begin() -> None:
            for text in self.of_point("point_v"):
                self.line(text)
            self.memo.update(numbers)

        self.ahead(stmts, at.repeats, inside, begin)

    def in_order(self, s: Loop, start: str = "0", step: int = 1, teams: int = 1) -> None:
        """A loop of which one thread does every iteration number `step` from `start` on, some at once, as `teams` do in turn."""
        words = sum(-(-x.buffer.dtype.itemsize // 4) for x in loads_ahead(s.body) if id(x) not in self.memo)
        turns, most = -(-s.extent // (step * teams)), min(UNROLLED, max(1, LOADED // max(1, words)))
        count = -(-turns // -(-turns // most)) if turns else 1  # equal numbers
        i, first, by = self.name(s.var, "i"), self.fresh("i"), step * teams * count
        start = f"part * {step * count} + {start}" if teams > 1 else start
        with self.scope([f"for (rlx_index {first} = {start}; {first} < {self.extent(s)}; {first} += {by}) {{"]):
            inside = [f"const rlx_index {i} = {first} + v * {step};", f"if ({i} < {self.extent(s)}) {{"]
            self.ahead(s.body, count, inside, lambda: None)

    def apart(self, s: Loop) -> None:
        """A loop of a team, or of several blocks of one; the loads of all iterations come first, their checks last."""
        at, fixed = self.launch, [x for x in s.body if isinstance(x, Check) and s.var not in walk(x.ok)]
        with self.alone():
            for x in (x for x in loads_ahead(s.body) if coefficient(x.index, s.var) == 0 and x.guard is None):
                self.value(x)
            self.in_order(replace(s, body=tuple(x for x in s.body if x not in fixed)), "me", at.team, at.parts)
            self.block(fixed)

    def ahead(self, stmts: Sequence[Stmt], count: int, inside: Sequence[str], begin: Callable[[], object]) -> None:
        """The statements `count` times, in the scope `inside` for each v, which `begin` opens; all of their loads come first."""
        held, found = dict[int, str](), [x for x in loads_ahead(stmts) if id(x) not in self.memo]
        head = ["#pragma unroll", f"for (int v = 0; v < {count}; v++) {{", *inside]
        for x in found:
            held[id(x)] = self.fresh("q")
            self.line(f"{CUDA.element(x.buffer.dtype)} {held[id(x)]}[{count}] = {{}};")
        before = self.vector_loads
        self.vector_loads = {}
        with self.scope(head, 2):
            begin()
            for x in found:  # those that the places of others depend on come first
                index = self.value(x.index)
                guard = "" if x.guard is None else f"if ({self.value(x.guard)}) "
                self.line(f"{guard}{held[id(x)]}[v] = {self.names[x.buffer]}[{index}];")
                self.vector_loads[id(x)] = held[id(x)]
        with self.scope(head, 2):
            begin()
            self.block(stmts)
        self.vector_loads = before

    def line_of_parts(self) -> None:
        """Declare `all`, by which the blocks of a line tell each other totals."""
        at = self.launch
        words = f"(unsigned long long*)rlx_counters + (size_t)line * {at.words}, {at.words}, (int)part"
        if at.clustered:
            self.line(f"rlx_cluster<{at.team}, {at.lanes}, {at.parts}, {at.words}> all = {{(int)part}}; all.start();")
        elif at.part:
            self.line(f"rlx_line<{at.team}, {at.lanes}, {at.parts}> all = {{{words if at.parts > 1 else '0, 0, 0'}}};")

    def begin(self) -> None:
        if not self.launch.segments:
            self.line(BEGIN)

    def list_tiles(self, s: Segments) -> None:
        """Count the tiles of all groups, which depends on earlier kernels; find this block's."""
        self.line(BEGIN)
        self.line(f"__shared__ int tiles_before[{s.groups + 1}], slot_of[{s.groups}];")
        self.near = self.names[s.weights]
        with self.scope(["const auto rows_of = [&](rlx_index group) {"]):
            self.names[s.group] = "group"
            self.line(f"return (int){self.value(s.count)};")
        self.lines[-1] += ";"
        self.line(f"rlx_list_tiles<{s.groups}, {s.rows}>(tiles_before, slot_of, slots, rows_of);")
        if self.tile_by_block:
            self.find_tile(s, "return")

    def find_tile(self, s: Segments, leave: str) -> None:
        """Names for the group of a tile, its first row there, and its weights; `leave`: how to, if there are fewer tiles."""
        tile, group, first = self.names[s.tile], self.fresh("group"), self.fresh("first")
        self.line(f"if ({tile} >= tiles_before[{s.groups}]) {leave};")
        self.line(f"const rlx_index {group} = rlx_group_of_tile<{s.groups}>(tiles_before, {tile});")
        self.line(f"const rlx_index {first} = ({tile} - tiles_before[{group}]) * {s.rows};")
        self.names[s.group], self.names[s.first] = group, first
        slot, weights = self.fresh("slot"), self.fresh("weights")
        self.line(f"const bool is_far = slot_of[{group}] < 0;")
        self.line(f"const rlx_index {slot} = is_far ? {group} : slot_of[{group}];")
        self.line(f"const auto* const {weights} = is_far ? far : {self.near};")
        self.names[s.slot], self.names[s.weights] = slot, weights

    def atom(self, e: Expr) -> str:
        s = self.launch.segments
        if s and isinstance(e, Var) and e in s.moved:
            return f"({self.names[s.moved[e]]} + {self.names[s.first]})"
        return super().atom(e)

    def coordinates(self) -> Iterator[str]:
        """The grid point of this thread, from the last axis to the first."""
        at = self.launch
        each = at.threads // at.team
        me, place = (f"threadIdx.x % {at.team}", f"threadIdx.x / {at.team}") if at.lanes == 1 else (f"threadIdx.x / {WARP}", LANE)
        me, place = ("0", "threadIdx.x") if at.team == 1 else (me, place)
        yield f"const int me = {me};"
        mine = "" if each == 1 else f" * {each} + {place}"
        number = self.block_number
        if at.parts > 1:
            each, other = ("/ {0}", "% {0}") if at.adjacent else ("% {1}", "/ {1}")
            texts = (f"{number} {text.format(at.parts, at.lines)}" for text in (each, other))
            yield "const rlx_index line = {}, part = {};".format(*texts)
            number = "line"
        if at.repeats > 1:
            yield f"const rlx_uindex first = (rlx_uindex){number} * {each * at.repeats} + {place};"
            return
        # every lane of a cluster counts: spare lanes repeat the last one
        stops = [f"if (point >= {at.points}) return;"]
        if at.clustered:
            stops = [f"const bool spare = point >= {at.points};", f"if (spare) point = {at.points - 1};"]
        yield from self.of_point(self.first_point(f"(rlx_uindex){number}{mine}"), *stops)

    def of_point(self, number: str, *stop: str) -> Iterator[str]:
        """The coordinates of a point."""
        at = self.launch
        yield f"rlx_uindex point = {number};"
        yield from stop
        left = at.points
        for n, (var, extent) in enumerate(reversed(self.kernel.grid)):
            name, size = self.name(var, "g"), at.vector if n == 0 else 1
            count = -(-extent // size)
            left //= max(1, count)
            # the loop over the points of a vector declares the axis itself
            text = ("point" + f" % {count}" * (left > 1) if count > 1 else "0") + f" * {size}" * (size > 1)
            yield f"const rlx_index {name}{'_0' * (size > 1)} = {text};"
            if left > 1 < count:
                yield f"point /= {count};"

    def first_point(self, text: str) -> str:
        return text

    def divided(self, *tiles: tuple[str, int]) -> Iterator[str]:
        """Divide `point` into the coordinates of the grid and of `tiles` (name, count), the last one fastest."""
        axes = [(self.name(var, "g"), extent) for var, extent in self.kernel.grid]
        for name, extent in reversed([*axes, *tiles]):
            yield f"const rlx_index {name} = point % {extent};"
            yield f"point /= {extent};"

    def declare_locals(self) -> None:
        at, offset = self.launch, 0
        if self.kernel.locals and at.shared:
            self.line(f"extern __shared__ __align__({self.aligned}) unsigned char rlx_shared[];")
        for x in self.kernel.locals:
            element, name = CUDA.element(x.dtype), self.name(x, "l")
            if at.row:
                self.line(f"{element} {name}[{at.row.rounds + bool(at.peel)}][{at.row.size}];")
                continue
            if at.team == at.lanes == 1:
                self.line(CUDA.local(element, name, x))
                continue
            base = "rlx_shared" if at.shared else f"rlx_scratch + (size_t){self.block_number} * {at.scratch}"
            each, bytes_ = at.threads // at.team, -(-max(1, x.size) * x.dtype.itemsize // 16) * 16
            mine = (
                ""
                if each == 1
                else f" + threadIdx.x / {at.team} * {bytes_}"
                if at.lanes == 1
                else f" + {LANE} * {x.dtype.itemsize}"
            )
            kind = f"{element}*" if at.lanes == 1 else f"rlx_spaced<{element}>"
            self.line(f"{kind} const {name} = {{({element}*)({base} + {offset}{mine})}};")
            offset += bytes_ * each

    # -- vectors

    def in_vectors(
        self,
        stmts: Sequence[Stmt],
        ends: Sequence[Expr],
        var: Var,
        size: int,
        first: str,
        each: Callable[[list[str]], object] | None = None,
    ) -> None:
        """The statements for `size` values of `var` from `first` on, loads and stores of adjacent elements as vectors. `each`
        gets the values of `ends` of every iteration."""
        name = self.fresh("i")
        held: dict[int, str] = {}
        for x in loads(stmts, ends, var, size):
            key, fetch = key_of(x, var), "rlx_fetch"
            if id(x) in self.fetched:
                held[id(x)] = f"{self.fetched[id(x)]}[u]"
                continue
            if key in self.registers and x.guard is None:
                fetch = _kept_by(x)
                held[id(x)] = f"{self.registers[key]}[{'0' if key in self.same else self.round}]"
                if key in self.loaded:
                    continue
                self.loaded.add(key)
            else:
                held[id(x)] = self.fresh("q")
                self.line(f"{CUDA.element(x.buffer.dtype)} {held[id(x)]}[{size}]{' = {}' * (x.guard is not None)};")
            self.fetch_vector(x, held[id(x)], var, size, first, fetch)
        out = {id(s): (s, self.fresh("o")) for s in stores(stmts, var, size)}
        for s, made in out.values():
            self.line(f"{CUDA.element(s.buffer.dtype)} {made}[{size}];")
        own = {var, *(s.var for s in stmts if isinstance(s, Let))}
        once = [s for s in stmts if isinstance(s, Check) and own.isdisjoint(walk(s.ok))]
        self.block(once)
        with self.scope(["#pragma unroll", f"for (int v = 0; v < {size}; v++) {{"]):
            self.line(f"const rlx_index {name} = {first} + v;")
            self.names[var] = name
            self.vector_loads, self.vector_stores = held, {n: made for n, (_, made) in out.items()}
            self.in_words = True
            values = self.block([s for s in stmts if s not in once], ends)
            self.in_words = False
            if each:
                each(values)
            self.vector_loads, self.vector_stores = {}, {}
        for s, made in out.values():
            guard = "" if s.guard is None else f"if ({self.at_first(s.guard, var, first)}) "
            guard += self.stored * isinstance(s.buffer, Buffer)
            self.line(f"{guard}rlx_put<{size}>({self.names[s.buffer]} + {self.at_first(s.index, var, first)}, {made});")

    def at_first(self, e: Expr, var: Var, first: str) -> str:
        """The value of `e` where `var` is `first`, outside the loop over `var`."""
        before, own, self.memo, self.names[var] = self.memo, self.names.get(var, first), self.memo.new_child(), first
        text = self.value(e)
        self.memo, self.names[var] = before, own
        return text

    def alu(self, e: Alu) -> str:
        """Parts of gelu and silu have functions of their own."""
        if e.dtype == f32 and (of := _plus_1(e, "erf")) is not None:
            return f"rlx_erf_plus_1({self.memo[id(of)]})"
        if e.dtype == f32 and (of := _plus_1(e, "tanh")) is not None:
            return f"rlx_tanh_plus_1({self.memo[id(of)]})"
        if e.dtype == f32 and self.narrow and e.op == "div" and (of := _plus_1(e.args[1], "exp")) is not None:
            return f"rlx_over_exp_plus_1({self.memo[id(e.args[0])]}, {self.memo[id(of)]})"
        if e.dtype == f32 and e.op == "exp" and (self.row or self.in_rows):
            added = only_added(self.kernel)  # their sums are 1 at least, and need fewer digits of small ones
            if self.narrow or (added and not stores_in_loops(self.kernel)):
                return f"rlx_exp_17{'_flushed' * added}({self.memo[id(e.args[0])]})"
        return super().alu(e)

    def load(self, e: Load) -> str:
        if self.row and e.buffer in self.row.locals:
            return self.fix("x", e.dtype, CUDA.loads.get(e.buffer.dtype.name, "{0}[{1}]").format(self.own_part(e.buffer), "v"))
        if id(e) not in self.vector_loads:
            return super().load(e)
        text = "rlx_wide_bf16({0}, {1})" if self.in_words and e.buffer.dtype == bf16 else None
        text = text or CUDA.loads.get(e.buffer.dtype.name, "{0}[{1}]")
        return self.fix("x", e.dtype, text.format(self.vector_loads[id(e)], "v"))

    def own_part(self, x: Buffer | Local) -> str:
        return f"{self.names[x]}[{self.round}]"

    def store(self, s: Store, value: str) -> str:
        if self.row and s.buffer in self.row.locals:
            return CUDA.stores.get(s.buffer.dtype.name, "{0}[{1}] = {2};").format(self.own_part(s.buffer), "v", value)
        value = value if (x := unrounded(s)) is s.value else self.value(x)
        if id(s) not in self.vector_stores:
            return super().store(s, value)
        return CUDA.stores.get(s.buffer.dtype.name, "{0}[{1}] = {2};").format(self.vector_stores[id(s)], "v", value)

    # -- statements of a team

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Statements that each thread runs for itself."""
        before, self.shared = self.shared, False
        yield
        self.shared = before

    def exchanged(self, *parts: Stmt | Expr) -> None:
        """Wait for the team after statements that touch memory by which its threads exchange values."""
        if self.shared and any(getattr(x, "buffer", None) in self.passed for x in walk(parts)):
            self.line(self.sync)

    def write(self, held: list[Store]) -> None:
        if not self.shared or not held:
            return super().write(held)
        stores = tuple(held)
        written = {s.buffer for s in stores}
        if any(isinstance(x, Load) and x.buffer in written for x in walk(stores)):
            self.line(self.sync)  # every thread has read the values that the first one overwrites
        every = self.launch.adjacent and not self.launch.leaving  # block of a line comes here
        with self.scope([f"if (me == 0{' && part == 0' * every}{' && !spare' * self.launch.clustered}) {{"]):
            super().write(held)
        self.exchanged(*stores)

    def statement(self, s: Stmt) -> None:
        super().statement(s)
        if not isinstance(s, Loop):
            self.exchanged(s)

    def loop(self, s: Loop) -> None:
        if not self.shared and (size := self.of_short_row(s)) > 1:
            self.short_row(s, size)
        elif not self.shared:
            self.in_order(s) if _only_stores(s) and (self.launch.shared or self.launch.scratch) else super().loop(s)
        elif s.carries and self.launch.part:
            (ScanDown if self.down else Scan)(self, s).write()
        elif self.launch.lanes == 1 and self.launch.parts == 1 and (test := chosen(s)) is not None:
            place(self, s, test)
            self.exchanged(s)
        elif self.launch.parts == 1 and _only_stores(s):
            with self.scope(["if (me == 0) {"]), self.alone():
                self.in_order(s)
            self.exchanged(s)
        elif not is_shared(s):
            super().loop(s)
            self.exchanged(s)
        else:
            divided = self.row or self.launch.peel or self.launch.lanes > 1 or self.kernel.locals or s.var in self.limits
            self.apart(s) if lone(s) and not divided else self.spread(s)
            self.exchanged(s)

    def of_short_row(self, s: Loop) -> int:
        """The size of the vectors in which a thread has a short row for itself; 1: it does not, or not in vectors."""
        at = self.launch
        alone = type(at) is Launch and at.team == at.lanes == at.vector == at.repeats == 1 and not at.peel
        plain = s.vector and not s.carries and not any(r.op in EXTREMES for r in s.reduces) and s.var not in self.limits
        fits = alone and plain and s.extent <= SHORT and not any(isinstance(x, Check) for x in s.body)
        return width(s.body, [r.value for r in s.reduces], s.var, s.extent) if fits else 1

    def short_row(self, s: Loop, size: int) -> None:
        names, first = [self.name(r.result, "r") for r in s.reduces], self.fresh("i")
        for r, name in zip(s.reduces, names):
            start = CUDA.literal(identity(r.op, r.value.dtype), r.value.dtype.compute)
            self.line(f"{self.type(r.result.dtype)} {name} = {start};")

        def combine(values: list[str]) -> None:
            for r, name, value in zip(s.reduces, names, values):
                compute = r.value.dtype.compute
                self.line(f"{name} = {CUDA.apply(r.op, (name, value), compute, compute)};")

        head = f"for (rlx_index {first} = 0; {first} < {s.extent}; {first} += {size}) {{"
        with self.scope(["#pragma unroll", head]):
            self.in_vectors(s.body, [r.value for r in s.reduces], s.var, size, first, combine)

    def head(self, s: Loop, text: str, size: int = 1) -> list[str]:
        """A thread that reduces loads several elements, or vectors of `size`, before it waits for the first. Unrolled as a whole,
        short loops over bytes would keep them in local memory."""
        simple = (s.reduces or s.carries) and all(isinstance(x, Let | Check) for x in s.body) and not self.kernel.locals
        if self.launch.team == self.launch.lanes == 1 and self.kernel.locals and s.extent <= SHORT:
            return ["#pragma unroll", text]  # so that Locals are registers
        return [f"#pragma unroll {self.at_once(s, size)}", text] if simple else [text]

    def at_once(self, s: Loop, size: int) -> int:
        """Vectors of a thread that its loop loads before it uses the first."""
        at, least = self.launch, least_bytes(s)
        if not at.leaving:
            return max(4, self.unrolled // size)
        turns, count = at.part // (at.team * size), UNROLLED  # without a rest, whose loads would wait for each other
        while turns % count or count * size * least > FLYING or count > max(4, turns // 4):
            count //= 2
        return count

    def end_iteration(self, s: Loop) -> None:
        if self.shared:
            self.exchanged(s)

    def extent(self, s: Loop) -> str:
        return self.limits.get(s.var) or CUDA.literal(s.extent, index_)

    def function_of(self, op: str, dtype: DType) -> str:
        t = self.type(dtype)
        return f"[]({t} a, {t} b) -> {t} {{ return {CUDA.apply(op, ('a', 'b'), dtype, dtype)}; }}"

    def spread(self, s: Loop) -> None:
        """The iterations of a vector loop over the threads of the team, then its reductions."""
        at, team, parts = self.launch, self.launch.team, [self.partial(r, s.extent) for r in s.reduces]
        for p in parts:
            self.line(f"{p.type} {p.name} = {p.init};")
        extent, i, ends = self.extent(s), self.name(s.var, "i"), [r.value for r in s.reduces]

        def combine(values: list[str]) -> None:
            for p, value in zip(parts, values):
                self.line(f"{p.name}_of[v] = {value};" if searched else p.add(value, self.names[s.var]))

        size = self.row.size if self.row else 1 if s.var in self.limits or self.down else width(s.body, ends, s.var, s.extent)
        while size > 1 and not self.row and s.extent < size * team:
            size //= 2
        simple = size > 1 and not self.row and all(isinstance(x, Let) for x in s.body)
        searched = simple and bool(s.reduces) and all(r.op in EXTREMES for r in s.reduces)
        start, near = "", [p for p in parts if p.near]
        if at.adjacent:
            start, end = f"part * {at.part} + ", f"(rlx_index)(part + 1) * {at.part}"
            extent = f"({end} < {extent} ? {end} : {extent})"
        first = f"{i}_0" if size > 1 or self.row else i

        def turn() -> None:
            if size == 1 and not self.row:
                return combine(self.block(s.body, ends))
            for r, p in zip(s.reduces, parts * searched):
                self.line(f"{self.type(r.value.dtype)} {p.name}_of[{size}];")
            self.in_vectors(s.body, ends, s.var, size, first, combine)
            for p in parts * searched:
                self.line(p.add(f"{p.name}_of", first))

        if row := self.row:
            self.sum_of_few(near, lambda: self.part_of_row(s, row, first, turn))
        else:
            self.turns(s, first, f"{start}me{f' * {size}' * (size > 1)}", extent, size, near, turn)
        if at.peel:
            self.beside(s, at.peel, parts)
        found = list[tuple[str, str]]()  # the total of the team, and what follows it in a call that combines totals
        for p in parts:
            function = f"[]({p.type} a, {p.type} b) -> {p.type} {{ return {p.combine('a', 'b')}; }}"
            text = p.name if at.clustered else f"rlx_reduce{self.down}<{team}>({p.name}, {function})"
            found.append((text, f"{p.type}({p.init}), {function})"))
        each = 4 * at.lanes * at.parts
        if at.leaving:
            for n, (text, _) in enumerate(found):
                self.line(f"all.give({n * each}, {text});")
            self.line("if (!all.last()) return;")
        for r, p, (text, function) in zip(s.reduces, parts, found):
            if at.adjacent:
                text = f"all.gather({self.told}, {function}" if at.leaving else f"all.all({self.told}, {text}, {function}"
                self.told += each
            self.names[r.result] = self.search(s, r, text, size) if searched else self.fix("r", r.result.dtype, p.result(text))
        if at.adjacent and s.reduces and self.told == at.words - 1 and not at.leaving:
            self.line("all.leave();")

    def sum_of_few(self, near: Sequence[Partial], body: Callable[[], object]) -> None:
        """f32 numbers that `body` adds are added to the sums in f64."""
        for p in near:
            self.line(f"float {p.near} = 0;")
        body()
        for p in near:
            self.line(f"{p.name} += {p.near};")

    def beside(self, s: Loop, p: Peel, parts: Sequence[Partial]) -> None:
        """The iterations before and behind those in vectors, one of a thread."""
        ends = [r.value for r in s.reduces]
        self.round = str(self.row.rounds) if self.row else ""
        kept = {id(x): key_of(x, s.var) for x in loads(s.body, ends, s.var, self.row.size)} if self.row else {}

        def one() -> None:
            self.vector_loads = {n: self.edges[key] for n, key in kept.items() if key in self.edges}
            for r, x, value in zip(s.reduces, parts, self.block(s.body, ends)):
                better = f"{x.name} = {x.combine(x.name, f'{x.type}{{{value}, {i}}}')};"
                self.line(better if r.op in EXTREMES else x.add(value, i))

            self.vector_loads = {}

        with self.at_edge(s.var, p) as i:
            self.line("const int v = 0;")
            self.sum_of_few([x for x in parts if x.near], one)

    @contextmanager
    def at_edge(self, var: Var, p: Peel) -> Iterator[str]:
        """The iteration before or behind those in vectors that this thread has, if it has one."""
        self.names[var] = i = self.fresh("i")
        with self.scope([f"if (me < {p.beside}{' && part == 0' * self.launch.adjacent}) {{"]), self.alone():
            self.line(f"const rlx_index {i} = me - head + (me < head ? 0 : {p.whole});")
            yield i

    def turns(self, s: Loop, i: str, start: str, end: str, size: int, near: list[Partial], turn: Callable[[], None]) -> None:
        """The loop over the vectors of `size` iterations of a thread. Sums of some of them are added to those in f64."""
        step = self.launch.team * size
        head = self.head(s, f"for (rlx_index {i} = {i + 's' if near else start}; {i} < {end}; {i} += {step}) {{", size)
        if near:
            narrow = self.launch.vector == 1 and all(x.buffer.dtype.itemsize <= 2 for x in walk(s.body) if isinstance(x, Load))
            count = self.at_once(s, size) * (1 + (narrow and not self.launch.leaving)) if len(head) > 1 else 1
            self.line(f"rlx_index {i}s = {start};")
            with self.scope([f"for (; {i}s + {(count - 1) * step} < {end}; {i}s += {count * step}) {{"]):
                some = ["#pragma unroll", f"for (rlx_index {i} = {i}s; {i} < {i}s + {count * step}; {i} += {step}) {{"]
                self.sum_of_few(near, lambda: self.looped(some, turn))
        self.looped(head, lambda: self.sum_of_few(near, turn))

    def looped(self, head: Sequence[str], body: Callable[[], None]) -> None:
        with self.scope(head), self.alone():
            body()

    def search(self, s: Loop, r: Reduce, best: str, size: int) -> str:
        """The position of an extreme of which only the first iteration of its vector is known: that vector is computed again."""
        at, found = self.fresh("r"), self.fresh("f")
        self.line(f"const auto {found} = {best};")
        self.line(f"rlx_index {at} = RLX_NOWHERE;")

        def compare(values: list[str]) -> None:
            self.line(f"if ({at} == RLX_NOWHERE && rlx_is({values[0]}, {found}.value)) {at} = {self.names[s.var]};")

        vector = "{"
        if p := self.launch.peel:
            self.line(f"if ({found}.at < 0 || {found}.at >= {p.whole}) {at} = {found}.at;")
            vector = "else {"
        with self.scope([vector]), self.alone():
            self.in_vectors(s.body, [r.value], s.var, size, f"{found}.at", compare)
        return at

    def part_of_row(self, s: Loop, row: Row, first: str, body: Callable[[], None]) -> None:
        """The iterations of this thread, unrolled, so that arrays of its elements are registers."""
        own = {x.var for x in s.body if isinstance(x, Let)}
        ahead: list[tuple[Load, Key]] = []
        for x in loads(s.body, [r.value for r in s.reduces], s.var, row.size):
            key = key_of(x, s.var)
            if key in row.keys and key not in self.registers:
                self.registers[key] = self.fresh("q")
                self.line(f"{CUDA.element(x.buffer.dtype)} {self.registers[key]}[{row.rounds}][{row.size}];")
                # others hide the latency of shorter loads of one tensor; two large blocks would load at once, and then wait
                whole = len(row.keys) > 1 or row.size * x.buffer.dtype.itemsize == BYTES
                apart = whole and not (self.launch.adjacent and self.launch.threads > PART_THREADS)
                ahead += [(x, key)] * ((row.packed or apart) and x.guard is None and own.isdisjoint(walk(x.index)))
            elif key in row.keys and row.packed:
                self.line(f"rlx_again({self.registers[key]});")
        self.round, at, team = self.fresh("n"), self.launch, self.launch.team
        head = ["#pragma unroll", f"for (int {self.round} = 0; {self.round} < {row.rounds}; {self.round}++) {{"]
        start, parts = (f"part * {at.part} + ", at.parts) if at.adjacent else ("", 1)
        ends = row.extent < row.rounds * team * row.size * parts
        if at.peel and ahead:
            self.fetch_edge(ahead, s.var, at.peel)
        for do in (lambda: self.fetch_row(ahead, s.var, row.size, first), body)[not (ahead and ends) :]:
            with self.scope(head), self.alone():
                place = f"({self.round} * {team} + me) * {row.size}"
                self.line(f"const rlx_index {first} = {start}{place};")
                if ends:
                    self.line(f"if ({self.beyond(row, first, place)}) continue;")
                do()
            for x, key in ahead if do is not body else ():
                if row.size * x.buffer.dtype.itemsize >= WORD:
                    self.line(f"rlx_together({self.registers[key]}, gridDim.z - 1);")

    def beyond(self, row: Row, first: str, place: str) -> str:
        """Whether the iteration `first` of a row, which is at `place` in a block's part of it, has no element."""
        return f"{first} >= {row.extent}"

    def fetch_row(self, found: Sequence[tuple[Load, Key]], var: Var, size: int, first: str) -> None:
        """Load elements of a row before any is used: else each would be awaited before the end of the row is looked for again."""
        for x, key in found:
            self.loaded.add(key)
            self.fetch_vector(x, f"{self.registers[key]}[{self.round}]", var, size, first, _kept_by(x))

    def fetch_edge(self, found: Sequence[tuple[Load, Key]], var: Var, p: Peel) -> None:
        """The same for the iteration before or behind the vectors."""
        for x, key in found:
            self.edges[key] = self.fresh("q")
            self.line(f"{CUDA.element(x.buffer.dtype)} {self.edges[key]}[1] = {{}};")
        with self.at_edge(var, p) as i:
            for x, key in found:
                self.line(f"{self.edges[key]}[0] = {self.names[x.buffer]}[{self.at_first(x.index, var, i)}];")

    def fetch_vector(self, x: Load, to: str, var: Var, size: int, first: str, how: str) -> None:
        guard = "" if x.guard is None else f"if ({self.at_first(x.guard, var, first)}) "
        self.line(f"{guard}{how}<{size}>({to}, {self.names[x.buffer]} + {self.at_first(x.index, var, first)});")

    def partial(self, r: Reduce, count: int, own: str = "") -> Partial:
        """The running result that a thread keeps while its team reduces `count` values; `own`: the part that is added to."""
        dtype, name = r.value.dtype.compute, self.fresh("p")
        if r.op in EXTREMES:
            place, largest = f"rlx_place<{self.type(dtype)}>", "true" if r.op == "argmax" else "false"
            return Partial(
                name, place, f"{{{CUDA.literal(0, dtype)}, RLX_NOWHERE}}", lambda a, b: f"rlx_first<{largest}>({a}, {b})",
                lambda value, at: f"rlx_next<{largest}>({name}, {value}, {at});", lambda text: f"{text}.at",
            )  # fmt: skip
        wide = f64 if r.op == "add" and dtype == f32 and count > LONG_SUM else dtype
        combine = lambda a, b: CUDA.apply(r.op, (a, b), wide, wide)  # noqa: E731
        near = self.fresh("s") if wide != dtype else ""
        return Partial(
            name, self.type(wide), CUDA.literal(identity(r.op, wide), wide), combine,
            lambda value, at: f"{near}{own} += {value};" if near else
            f"{name}{own} = {combine(name + own, f'({self.type(wide)}){value}')};",
            lambda text: f"({self.type(dtype)}){text}", near,
        )  # fmt: skip


def _kept_by(x: Load) -> str:
    """The function that loads elements into registers for several loops; narrow ones leave the L1 cache to shared operands."""
    return "rlx_stream" if x.buffer.dtype.itemsize <= 2 else "rlx_fetch"


def _only_stores(s: Loop) -> bool:
    """Whether iterations in order only store: one thread does them faster than a team that waits for it after each."""
    plain = not s.carries and not s.reduces and all(isinstance(x, Let | Check | Store) for x in s.body)
    return plain and not is_shared(s)


def _plus_1(e: Expr, op: str) -> Expr | None:
    """x if the expression is op(x) + 1."""
    if not isinstance(e, Alu) or e.op != "add" or not any(is_const(a, 1) for a in e.args):
        return None
    return next((a.args[0] for a in e.args if isinstance(a, Alu) and a.op == op), None)


def arguments_of(launch: Launch) -> Sequence[str]:
    """Additional arguments after the buffers, in order."""
    early = getattr(launch, "early", None) is not None
    return (["slots", "far"] * (launch.segments is not None) + ["scratch"] * bool(launch.scratch)
            + ["counters"] * bool(launch.counters) + ["status"] * may_fail(launch.kernel)
            + ["halt"] + ["early"] * early)  # fmt: skip


__all__ = ["BEGIN", "WIDE", "CudaWriter", "arguments_of", "may_fail"]

"""The text of a chain's stages: a product of one row, or attention of one query with the kernels in front of it (chain.py).

A stage is a function of the chain's state and of a row of its table, whose entries are its operands. Stages that differ in
those alone have the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

from rlx.backends.cuda.ahead import AheadWriter
from rlx.backends.cuda.attention import ELEMENTS
from rlx.backends.cuda.chain import MIDDLE, SHORT, Chain, largest_bytes, pitch_of
from rlx.backends.cuda.chain_parts import AHEAD, Attention, Product, Stage, shares_of
from rlx.backends.cuda.chain_pieces import WARPS
from rlx.backends.cuda.chain_table import ARGUMENT, Entry, Operands
from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.fronts import FrontWriter
from rlx.backends.cuda.render import CudaWriter, arguments_of
from rlx.backends.cuda.schedule import WARP, Launch
from rlx.backends.cuda.vectors import loads
from rlx.ir.dtype import DType, f16, f32, index_
from rlx.ir.kernel import Alu, Buffer, Const, Contract, Load, Native, Stmt, Store, Var, View, const, is_const, k, walk
from rlx.ir.ops.attention import AttentionAttrs
from rlx.ir.program import Program, Region
from rlx.records import record

KIND = "RLX_KIND"  # in place of the number of a stage's kind
# pieces in flight, of chains whose largest product is shorter than SHORT, than MIDDLE, longer; cycles from one to the next, since
# weights that come in bursts hold up the words; more pieces of the last product, behind which nothing waits
WINDOWS, PACES, MORE = (2, 5, 6), (1200, 0, 0), 3
PANELS = (2, 2, 4)  # in flight, of quantised weights: their stages are shorter, so that words count for more
LOG2E = 1.4426950408889634
ALIGNED = 128  # bytes, of what shared memory has for a stage


class Roots(CudaWriter):
    def alu(self, e: Alu) -> str:
        """1 / sqrt(x) is one instruction, right to 22 bits: results that wait for it are rounded to 16 bits, or multiply such."""
        if e.op == "div" and e.dtype == f32 and is_const(e.args[0], 1):
            root = e.args[1]
            if isinstance(root, Alu) and root.op == "sqrt":
                return f"rlx_over_sqrt({self.memo[id(root.args[0])]})"
        return super().alu(e)


class ChainFrontWriter(Roots, FrontWriter):
    """A kernel in front of a chain's attention."""


class StageWriter(Roots, AheadWriter):
    """`entries`: of the stage's row. `call`: the statement that runs the stage; `feed`: statements by which the copying warp
    finds its weights."""

    call, feed = "", ""

    def __init__(self, operands: Operands, number: int, stage: Stage, blocks: int) -> None:
        super().__init__(Launch(stage.kernel, 1, WARP * WARPS))
        self.operands, self.number, self.step, self.blocks = operands, number, stage.step, blocks
        self.ids = dict(zip(stage.kernel.buffers, operands.program.steps[stage.step].args))
        self.entries: list[Entry] = []
        self.given: list[str] = []  # names of arguments of the kernel
        self.marks: dict[Buffer, str] = {}
        self.plain: dict[Buffer, str] = {}
        self.tried = isinstance(stage, Product)  # its end may run once without effect, with `live` false

    def entry(self, entry: Entry) -> str:
        self.entries.append(entry)
        return f"row[{len(self.entries)}]"

    def argument(self, step: int, position: int) -> str:
        program, flat = self.operands.program, self.operands.argument(step, position)
        if program.buffers[program.steps[step].args[position]].region not in (Region.INPUT, Region.OUTPUT):
            return self.entry((ARGUMENT, flat))
        direct = self.operands.direct
        if flat not in direct:
            direct.append(flat)
        name = f"direct{direct.index(flat)}"
        self.given += [name] * (name not in self.given)
        return name

    def pointer_to(self, b: Buffer, step: int, position: int) -> str:
        return f"({'' if b.writable else 'const '}{CUDA.element(b.dtype)}*){self.argument(step, position)}"

    def declare(self, b: Buffer, prefix: str = "b") -> None:
        position = list(self.ids).index(b)
        self.line(f"const auto {self.name(b, prefix)} = {self.pointer_to(b, self.step, position)};")

    def declare_results(self, buffers: Sequence[Buffer]) -> None:
        """The words and the plain memory that the stage stores to."""
        chain = self.operands.chain
        for b in buffers:
            a, name = self.ids[b], self.name(b, "told")
            if a in chain.words:
                entry = self.entry(self.operands.words(self.number, a))
                self.marks[b] = self.fresh("mark")
                self.line(f"uint32_t* const {name} = rlx_words_at({entry});")
                self.line(f"const uint32_t {self.marks[b]} = rlx_mark_of({entry}, run);")
            if a in chain.plain or a not in chain.words:
                self.plain[b] = self.fresh("plain")
                place = self.pointer_to(b, self.step, list(self.ids).index(b))
                self.line(f"{CUDA.element(b.dtype)}* const {self.plain[b]} = {place};")
        if self.plain:
            self.line(f"const int* const halt = (const int*){self.entry((ARGUMENT, self.operands.named(self.step, 'halt')))};")
            self.line("const int halted = halt ? *(const volatile int*)halt : 0;  // waited for where it is used")

    def store(self, s: Store, value: str) -> str:
        assert isinstance(s.buffer, Buffer)
        index, texts, dtype = self.value(s.index), [], s.buffer.dtype.name
        if s.buffer in self.marks:
            word = f"rlx_word({CUDA.rounded.get(dtype, '{0}').format(value)}, {self.marks[s.buffer]})"
            place = f"{self.names[s.buffer]} + {index}, {pitch_of(s.buffer.size)}"
            texts.append(f"{'if (live) ' * self.tried}rlx_tell_words<RLX_COPIES>({place}, {word});")
        if s.buffer in self.plain:
            stored = CUDA.stores.get(dtype, "{0}[{1}] = {2};").format(self.plain[s.buffer], index, value)
            texts.append(f"if ({'live && ' * self.tried}!halted) {stored}")
        return " ".join(texts)

    @contextmanager
    def function_of_stage(self, opening: str) -> Iterator[None]:
        """A lambda."""
        with self.scope([f"const auto {opening} {{"]):
            yield
        self.lines[-1] += ";"

    def finished(self, name: str, parameters: str, arguments: str) -> str:
        """The function with the lines so far."""
        more = "".join(f", unsigned long long {x}" for x in self.given)
        self.call = f"{name}({arguments}{''.join(f', {x}' for x in self.given)});"
        return "\n".join([f"RLX_FN void {name}({parameters}{more}) {{", *self.lines, "}", ""])


class ProductWriter(StageWriter):
    def __init__(self, operands: Operands, number: int, stage: Product, blocks: int) -> None:
        super().__init__(operands, number, stage, blocks)
        self.product, self.reading = stage, True

    @property
    def contract(self) -> Contract:
        return self.product.contract

    def written(self) -> str:
        p, c = self.product, self.contract
        ends = [p.value, *([p.square] if p.square is not None else [])]
        known = [x for x in loads((), ends, p.columns[0], 4) if x.buffer is not p.source and x.buffer not in p.copies]
        fields = "".join(f" {CUDA.element(x.buffer.dtype)} q{n}[4];" for n, x in enumerate(known))
        self.feed = self.weights()
        self.listen()
        again = {x.buffer for x in walk(c.epilogue) if isinstance(x, Load) and isinstance(x.buffer, Buffer)}
        for b in p.kernel.buffers:
            if b in {x.buffer for x in known} | again:
                self.declare(b)
        self.declare_results([b for b in p.kernel.buffers if b.writable])
        self.make(known)
        self.reading = False
        self.end()
        flags, more = ", ".join(str(x).lower() for x in (c.also is not None, p.square is not None)), f"rlx_more_{KIND}"
        product = p.pieces.product(f"{c.n}, {c.k}, RLX_SLOTS, {flags}, {more}", self.blocks)
        self.line(f"{product}(own, hear, ready, fetch, make, ahead, end{self.shares()});")
        parameters = "rlx_chain& own, const uint64_t* row, uint32_t run"
        return f"struct {more} {{{fields} }};\n" + self.finished(f"rlx_stage_{KIND}", parameters, "own, row, run")

    def shares(self) -> str:
        """Arguments: the words by which blocks tell each other sums of the same columns, and their mark."""
        if self.product.pieces.words(self.blocks):
            entry = self.entry(self.operands.words(self.number, -1))
            return f", rlx_words_at({entry}), rlx_mark_of({entry}, run)"
        return ", 0, 0" * bool(self.product.pieces.weights.blocks)

    def weights(self) -> str:
        p, c, stages = self.product, self.contract, self.operands.chain.stages
        b = p.pieces.weights
        place = self.entry((ARGUMENT, self.operands.argument(p.step, p.kernel.buffers.index(b.buffer))))
        largest, last = largest_bytes(stages, self.blocks), max(i for i, s in enumerate(stages) if isinstance(s, Product))
        size = (largest >= SHORT) + (largest >= MIDDLE)
        windows = PANELS if b.blocks else WINDOWS
        window, pace = (windows[size], PACES[size]) if self.number < last else (windows[size] + MORE, 0)
        assert isinstance(b.offset, Const)
        first = f"(const unsigned char*){place} + {int(b.offset.value) * b.buffer.dtype.itemsize}ll"
        copies = p.pieces.copies(f"{c.n}, {c.k}, RLX_SLOTS, {window}, {pace}", self.blocks)
        return f"{copies}(own, rlx_shared, filled, used, {first});"

    def listen(self) -> None:
        """`hear(d)`: four elements of the row from d on, as f32 or as words; `ready`: whether these have come."""
        p = self.product
        a, dtype = self.ids[p.source], p.source.dtype
        if a in self.operands.chain.words:
            entry = self.entry(self.operands.heard(a))
            copy = f"blockIdx.x % RLX_COPIES * {pitch_of(p.source.size)}"
            self.line(f"const uint32_t* const source = rlx_words_at({entry}) + {copy};")
            self.line(f"const uint32_t mark = rlx_mark_of({entry}, run);")
            self.line("const auto hear = [&](int d) { return rlx_hear_words(source + d); };")
            self.line("const auto ready = [&](const uint4& got) { return rlx_marked(got, mark); };")
            return
        self.line(f"const auto source = {self.pointer_to(p.source, p.step, list(self.ids).index(p.source))};")
        wide = CUDA.loads.get(dtype.name, "{0}[{1}]")
        with self.function_of_stage("hear = [&](int d)"):
            self.line(f"{CUDA.element(dtype)} raw[4];")
            self.line("rlx_fetch<4>(raw, source + d);")
            texts = ", ".join(f"__float_as_uint({wide.format('raw', n)})" for n in range(4))
            self.line(f"return make_uint4({texts});")
        self.line("const auto ready = [&](const uint4&) { return true; };")

    def make(self, known: Sequence[Load]) -> None:
        """`fetch`: the vectors that elements are computed of besides, such as a norm's weights. `make`: the elements to
        multiply."""
        p = self.product
        with self.function_of_stage(f"fetch = [&](rlx_more_{KIND}& more, int d)"):
            for n, x in enumerate(known):
                self.line(f"rlx_fetch<4>(more.q{n}, {self.names[x.buffer]} + {self.at_first(x.index, p.columns[0], 'd')});")
        opening = f"make = [&](const rlx_more_{KIND}& more, const uint4& got, float (&out)[4], float& square)"
        words = self.ids[p.source] in self.operands.chain.words
        with self.function_of_stage(opening):
            self.line("const uint32_t words[4] = {got.x, got.y, got.z, got.w};")
            self.names |= dict.fromkeys(p.columns, "0")  # loads name their places by the word that they are
            with self.scope(["#pragma unroll", "for (int v = 0; v < 4; v++) {"]):
                self.heard = self.fix("heard", f32, f"{'rlx_of_word' if words else '__uint_as_float'}(words[v])")
                self.vector_loads = {id(x): f"more.q{n}" for n, x in enumerate(known)}
                if p.square is not None:
                    self.line(f"square += {self.value(p.square)};")
                self.line(f"out[v] = {self.value(p.value)};")
                self.vector_loads = {}

    def load(self, e: Load) -> str:
        if self.reading and (e.buffer is self.product.source or e.buffer in self.product.copies):
            return self.heard
        return super().load(e)

    def end(self) -> None:
        """`ahead(j)`: loads that the end of a column needs, where a thread ends one column; `end(j, ...)`: the epilogue."""
        p, c = self.product, self.contract
        self.names[c.i] = "0"
        found: list[Load] = []
        if -(-(c.n // p.unit) // self.blocks) * p.unit <= p.pieces.finished:
            own = (x for x in walk(c.epilogue) if isinstance(x, Load) and x.guard is None and self.known(x.index, c.i, c.j))
            found = list({id(x): x for x in own}.values())
        early = {id(x): self.fresh("early") for x in found}
        for x in found:
            self.line(f"{self.type(x.dtype)} {early[id(x)]} = 0;")
        with self.function_of_stage("ahead = [&](int j)"):
            self.names[c.j] = "j"
            for x in found:
                self.line(f"{early[id(x)]} = {self.value(x)};")
        self.held = early
        with self.function_of_stage("end = [&](int j, float all, float also, const float* squares, bool live = true)"):
            factor = ""
            if p.total is not None and p.factor is not None:
                self.names[p.total] = self.fix("total", f32, "rlx_chain_total(squares)")
                for s in p.lets:
                    self.statement(s)
                factor = f" * {self.names[p.factor]}"
            self.names[c.acc] = self.fix("sum", f32, f"all{factor}")
            if c.also is not None:
                self.names[c.also] = self.fix("sum", f32, f"also{factor}")
            self.block(c.epilogue)


@record(eq=False)
class Places:
    """Bytes of shared memory at which attention has its values: buffers that other blocks write (`staged`), with their dtypes;
    the queries and the new row of keys and of values (`kept`); the sums of warps; keys and values on their way (`later`)."""

    staged: dict[int, tuple[int, DType]]
    kept: dict[int, int]
    sums: int
    later: int
    nbytes: int


def places_of(s: Attention, chain: Chain, program: Program, blocks: int) -> Places:
    q, k, v = s.native.inputs[:3]
    ids = dict(zip(s.kernel.buffers, program.steps[s.step].args))
    written = {a for n in s.steps[:-1] for a in program.steps[n].writes}
    at = 0

    def take(nbytes: int) -> int:
        nonlocal at
        first, at = at, at + -(-nbytes // ALIGNED) * ALIGNED
        return first

    shapes = {a: program.buffers[a].shape for a in sorted(set(s.ranges) - written) if a in chain.words}
    staged = {a: (take(shape.size_bytes), shape.dtype) for a, shape in shapes.items()}
    rows = ((q, q.dims[1] // s.at.tiles * q.dims[3]), (k, k.dims[3]), (v, v.dims[3]))
    kept = {ids[x.buffer]: take(count * x.buffer.dtype.itemsize) for x, count in rows if ids[x.buffer] in written}
    sums = take(4 * WARPS * (q.dims[3] + 2))
    splits, at_once = shares_of(s, blocks)[0], AHEAD * WARPS * (WARP // lanes_of(s))
    later = take(2 * AHEAD * WARPS * WARP * 16 if k.dims[2] > splits * at_once else 0)
    return Places(staged, kept, sums, later, at)


class AttentionWriter(StageWriter):
    def __init__(self, operands: Operands, number: int, stage: Attention, blocks: int) -> None:
        super().__init__(operands, number, stage, blocks)
        self.attention = s = stage
        self.places = places_of(s, operands.chain, operands.program, blocks)
        self.pointers: dict[int, str] = {}  # of what is in shared memory, by buffer
        self.q, self.k, self.v = s.native.inputs[:3]
        self.group, (self.splits, _) = self.q.dims[1] // s.at.tiles, shares_of(s, blocks)
        attrs = s.native.attrs
        assert isinstance(attrs, AttentionAttrs)
        self.window = attrs.window if attrs.mask == "sliding_window" and attrs.window < self.k.dims[2] else 0

    def written(self) -> str:
        fronts = [[ChainFrontWriter(m, self.attention.at.tiles) for _, m in stage] for stage in self.attention.fronts]
        every = [w for stage in fronts for w in stage]
        texts = [w.function(f"rlx_front_{KIND}_{n}", member=True) for n, w in enumerate(every)]
        caches = [self.cache(self.k, "k"), self.cache(self.v, "v")]
        units, group, splits = self.q.dims[1] * self.splits, self.group, self.splits
        self.line(f"if (blockIdx.x >= {units}) return;")
        self.line(f"const int head = blockIdx.x / {splits}, tile = head / {group}, split = blockIdx.x % {splits};")
        self.line(f"const rlx_chain_share of = rlx_chain_share_of<rlx_heads>(position, {self.window}, split);")
        self.line("float out = 0, top = -1e30f, total = 0;")
        self.place_row()
        self.meet()
        self.stage_words()
        self.line(f"const bool placed = head % {self.group} == 0 && split == 0 && !stopped && given == position;")
        self.keep_rows()
        self.run_fronts(fronts)
        self.attend(caches)
        self.finish()
        self.line("rlx_sync<256>();  // the next stage uses the same shared memory")
        parameters = "rlx_chain& own, rlx_chain_keys<rlx_heads>& keys, const uint64_t* row, uint32_t run, const int position"
        own = self.finished(f"rlx_stage_{KIND}", parameters, "own, keys, row, run, position")
        return "\n".join([*texts, *self.early(caches, units), own])

    def cache(self, view: View, name: str) -> str:
        """A pointer to the keys or values of the tile."""
        element, at = ELEMENTS[view.buffer.dtype.name], self.argument(self.step, list(self.ids).index(view.buffer))
        return f"{element}* const {name} = ({element}*){at} + (long long)tile * {view.strides[1]} + {view.offset};"

    def early(self, caches: Sequence[str], units: int) -> list[str]:
        """A function that loads the first keys and values: the stage in front has not begun then."""
        parameters = "rlx_chain_keys<rlx_heads>& keys, const uint64_t* row, int position"
        lines = [f"if (blockIdx.x >= {units}) return;"]
        lines.append(f"const int tile = blockIdx.x / {self.splits * self.group}, split = blockIdx.x % {self.splits};")
        lines += [*caches, f"const rlx_chain_share of = rlx_chain_share_of<rlx_heads>(position, {self.window}, split);"]
        lines.append("if (split < of.active) rlx_chain_load(keys, k, v, of);")
        return [f"RLX_FN void rlx_stage_{KIND}_early({parameters}) {{", *(f"  {x}" for x in lines), "}"]

    def meet(self) -> None:
        """Blocks whose share has no keys tell so; all words are written in each run, so that their marks change."""
        place = "(uint32_t*)0, 0"
        if self.splits > 2:
            entry = self.entry(self.operands.words(self.number, -1))
            place = f"rlx_words_at({entry}) + head * {(self.splits // 2 - 1) * (self.q.dims[3] + 4)}, rlx_mark_of({entry}, run)"
        self.line(f"const auto meet = [&]() {{ return rlx_chain_meet<rlx_heads>(own, of, {place}, out, top, total); }};")
        if self.splits > 1:
            self.line("if (split >= of.active) { meet(); return; }")

    def stage_words(self) -> None:
        """Bring the tile's elements of what other blocks write to shared memory."""
        for a, (offset, dtype) in self.places.staged.items():
            entry, element = self.entry(self.operands.heard(a)), CUDA.element(dtype)
            name, text, left = self.fresh("staged"), "", 0
            for first, by, n in self.attention.ranges[a]:
                place = f"{first - left} + tile * {by} + at"
                text, left = (f"at >= {left} ? {place} : {text}" if text else place), left + n
            self.pointers[a] = name
            pitch = pitch_of(self.operands.program.buffers[a].shape.num_elements)
            self.line(f"{element}* const {name} = ({element}*)(own.x + {offset});")
            with self.scope([f"for (int at = threadIdx.x * 4; at < {left}; at += {4 * WARPS * WARP}) {{"]):
                self.line(f"const int d = {text};")
                self.line(f"const uint32_t* const from = rlx_words_at({entry}) + blockIdx.x % RLX_COPIES * {pitch} + d;")
                self.line(f"const uint32_t mark = rlx_mark_of({entry}, run);")
                self.line("uint4 got = rlx_hear_words(from);")
                self.line("while (!rlx_marked(got, mark)) got = rlx_hear_words(from);")
                self.line("const uint32_t words[4] = {got.x, got.y, got.z, got.w};")
                self.line(f"{element} made[4];")
                store = CUDA.stores.get(dtype.name, "{0}[{1}] = {2};").format("made", "v", "rlx_of_word(words[v])")
                self.line(f"for (int v = 0; v < 4; v++) {store}")
                self.line(f"rlx_put<4>({name} + d, made);")
        self.line("rlx_sync<256>();")

    def keep_rows(self) -> None:
        """Places for the queries and the new row of keys and of values, and pointers that the kernels in front reach them by:
        they count from the start of the buffer that they would write."""
        for view, name in ((self.q, "query"), (self.k, "new_k"), (self.v, "new_v")):
            if (a := self.ids[view.buffer]) not in self.places.kept:
                continue
            kind, by = CUDA.element(view.buffer.dtype), (self.group if view is self.q else 1) * view.strides[1]
            row = "" if view is self.q else f" + position * {view.strides[2]}ll"
            self.line(f"{kind}* const {name} = ({kind}*)(own.x + {self.places.kept[a]});")
            self.line(f"{kind}* const {name}_at = {name} - ({view.offset} + tile * {by}ll{row});")
            self.pointers[a] = f"{name}_at"

    def run_fronts(self, fronts: Sequence[Sequence[FrontWriter]]) -> None:
        """The kernels in front, each item by a warp."""
        number = 0
        for stage, writers in zip(self.attention.fronts, fronts):
            total, begun = sum(w.items for w in writers), 0
            with self.scope(["#pragma unroll 1", f"for (int item = threadIdx.x / 32; item < {total}; item += {WARPS}) {{"]):
                for (step, m), w in zip(stage, writers):
                    arguments = ", ".join(self.front_arguments(step, m))
                    call = f"rlx_front_{KIND}_{number}({arguments}, tile * {w.items} + item - {begun});"
                    begun, number = begun + w.items, number + 1
                    self.line(f"{'else ' * (begun > w.items)}if (item < {begun}) {call}")
            self.line("rlx_sync<256>();")

    def front_arguments(self, step: int, m: Launch) -> Iterator[str]:
        for n, (b, a) in enumerate(zip(m.kernel.buffers, self.operands.program.steps[step].args)):
            yield self.pointers.get(a) or self.pointer_to(b, step, n)
        for name in arguments_of(m):  # what they store is in shared memory, also where a run has failed
            status = f"split ? (rlx_status*)0 : (rlx_status*){self.entry((ARGUMENT, self.operands.named(step, name)))}"
            yield status if name == "status" else "(const int*)0"

    def attend(self, caches: Sequence[str]) -> None:
        q, cache = self.q, ELEMENTS[self.k.buffer.dtype.name]
        query = f"(const {ELEMENTS[q.buffer.dtype.name]}*){self.pointers[self.ids[q.buffer]]}"
        query += f" + {q.offset} + head * {q.strides[1]}"
        for text in caches:
            self.line(text)
        rows, places = f"(const {cache}*)new_k, (const {cache}*)new_v", self.places
        shared = f"(float*)(own.x + {places.sums}), own.x + {places.later}"
        self.line(f"rlx_chain_attend<rlx_heads>(keys, k, v, {query}, {rows}, of, {shared}, out, top, total);")

    def place_row(self) -> None:
        """`stopped`, `given`: whether a run has failed, and the position. They are on their way while words are."""
        s, program, start = self.attention, self.operands.program, self.attention.start
        step = next(n for stage in s.fronts for n, _ in stage if self.ids[self.k.buffer] in program.steps[n].writes)
        given = f"(const {CUDA.element(start.buffer.dtype)}*){self.argument(s.step, list(self.ids).index(start.buffer))}"
        self.line(f"const int* const ended = (const int*){self.entry((ARGUMENT, self.operands.named(step, 'halt')))};")
        self.line("const int stopped = ended ? *(const volatile int*)ended : 0;")
        self.line(f"const auto given = ({given})[{start.offset}];")

    def finish(self) -> None:
        """The result of a head, by its first block; the new rows of the cache, by the first block of the tile."""
        s, native, size, program = self.attention, self.attention.native, self.q.dims[3], self.operands.program
        self.declare_results([b for b in s.kernel.buffers if self.ids[b] in program.steps[s.step].writes])
        axes, acc, epilogue = _ends(native)
        with self.scope([f"if (meet() && threadIdx.x < {size}) {{"]):
            for var, text in zip(axes, ("0", "head", "0", "threadIdx.x")):
                self.names[var] = self.fix("at", index_, text)
            self.names[acc] = self.fix("result", f32, "total == 0 ? 0 : out * rlx_over(total)")
            self.block(epilogue)
        with self.scope([f"if (placed && threadIdx.x < {size // 8}) {{"]):
            for name, view in (("k", self.k), ("v", self.v)):
                place = f"(uint4*)({name} + (long long)position * {view.strides[2]})"
                self.line(f"({place})[threadIdx.x] = ((const uint4*)new_{name})[threadIdx.x];")


def _ends(native: Native) -> tuple[tuple[Var, ...], Var, tuple[Stmt, ...]]:
    """The axes of the result, its element, and the statements that store it."""
    if native.acc is not None:
        return tuple(var for var, _ in native.axes), native.acc, native.epilogue
    (out,), acc = native.outputs, Var("acc", f32)
    axes = tuple(Var("at", index_) for _ in out.dims)
    place = reduce(k.add, (k.mul(at, stride) for at, stride in zip(axes, out.strides)), const(out.offset))
    return axes, acc, (Store(out.buffer, place, k.cast(acc, out.buffer.dtype)),)


def heads_text(s: Attention, blocks: int) -> Iterator[str]:
    """`rlx_heads`: the sizes of a chain's attention."""
    q, k, v = s.native.inputs[:3]
    attrs, size = s.native.attrs, q.dims[3]
    assert isinstance(attrs, AttentionAttrs)
    scale = attrs.scale or size**-0.5
    score = f"s * {scale * LOG2E:.9e}f"
    if attrs.cap:
        score = f"{attrs.cap * LOG2E:.9e}f * tanhf(s * {scale / attrs.cap:.9e}f)"
    yield "struct rlx_heads {"
    yield f"  static constexpr int SIZE = {size}, LANES = {lanes_of(s)}, AHEAD = {AHEAD}, SPLITS = {shares_of(s, blocks)[0]};"
    yield f"  static constexpr long long K_ROW = {k.strides[2]}, V_ROW = {v.strides[2]};"
    yield f"  static constexpr bool F16 = {str(k.buffer.dtype == f16).lower()};"
    yield f"  RLX_FN float score(float s) {{ return {score}; }}  // in units of log2"
    yield "};"


def lanes_of(s: Attention) -> int:
    """Lanes that have 8 elements each of a key: a power of two."""
    return 1 << (-(-s.native.inputs[0].dims[3] // 8) - 1).bit_length()


def row_bytes(s: Stage, chain: Chain, program: Program, blocks: int) -> int:
    """Of shared memory for the row of a product, or for attention."""
    if isinstance(s, Attention):
        return places_of(s, chain, program, blocks).nbytes
    return s.pieces.row


__all__ = ["KIND", "AttentionWriter", "ProductWriter", "StageWriter", "heads_text", "row_bytes"]

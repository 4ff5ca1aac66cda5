"""Products of one row, and the attentions between them, as one launch: the layers of a decoder for one token.

A launch for each product costs a hop of 1.5 us and more, and weights stop coming while attention runs. Here every
multiprocessor has one block for the whole *chain* of stages. One warp of it copies the block's weights of all products, in
their order, through one ring in shared memory; eight warps compute. A value goes from stage to stage as words that carry a mark
(chain.h), so blocks need neither barriers nor fences. A residual, which the same block writes and reads again, is in plain
memory besides.

`in_chains` finds chains among the launches of a run and plans them; chain_writer.py writes their text. `Refused` says why a
launch, or a chain, stays as it is.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations

import numpy as np

from rlx.backends.cuda.attention import AttentionLaunch, in_chunks, native_of
from rlx.backends.cuda.chain_pieces import MOST_ROW, Pieces, pieces_of
from rlx.backends.cuda.fronts import Footprint, Unknown, front_of
from rlx.backends.cuda.gemv import contract_of
from rlx.backends.cuda.gemv_blocks import BlocksLaunch
from rlx.backends.cuda.gemv_ring import RingLaunch
from rlx.backends.cuda.groups import Stages, overlaps
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import in_vector
from rlx.ir.ops.attention import AttentionAttrs
from rlx.ir.program import NEVER_WRITTEN, Program, Region
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Check, Const, Contract, Expr, Kernel, Let, Load, Local, Loop, Native, Operand, Store, Var, View, walk,
)  # fmt: skip

LEAST, LINE = 8, 32  # products of a chain; words of a line of memory
AHEAD, SPLITS, THREADS = 5, 8, 256  # keys that a lane loads at once; blocks that share those of a head, at most


SHORT, MIDDLE = 128 << 10, 512 << 10  # bytes of weights of a product in a block: longer ones have more pieces in flight


class Refused(Exception):
    """Why a launch cannot be in a chain."""


@record(eq=False)
class Product:
    """`source`: the buffer of the row; `copies`: Locals that hold it. `value`: an element of the row that is multiplied, over the
    factor of a norm, which follows from `total` by `lets`: the sum of `square` over the row, whose loops have `columns`."""

    step: int
    kernel: Kernel
    contract: Contract
    source: Buffer
    copies: frozenset[Local]
    columns: tuple[Var, ...]
    value: Expr
    square: Expr | None = None
    total: Var | None = None
    lets: tuple[Let, ...] = ()
    factor: Var | None = None

    @cached_property
    def pieces(self) -> Pieces:
        return pieces_of(self.contract)

    @property
    def unit(self) -> int:
        """Columns of the result that a block has at least."""
        return self.pieces.unit

    @property
    def steps(self) -> tuple[int, ...]:
        return (self.step,)


@record(eq=False)
class Attention:
    """`fronts`: the stages of kernels in front, with their launches. `ranges`: by buffer that other blocks write, the runs of
    elements that a tile reads: (first of tile 0, step from tile to tile, count)."""

    step: int
    kernel: Kernel
    at: AttentionLaunch
    fronts: tuple[tuple[tuple[int, Launch], ...], ...]
    ranges: Mapping[int, tuple[tuple[int, int, int], ...]]

    @property
    def native(self) -> Native:
        found = native_of(self.kernel)
        assert found is not None
        return found

    @property
    def steps(self) -> tuple[int, ...]:
        return (*(n for stage in self.fronts for n, _ in stage), self.step)

    @property
    def start(self) -> View:
        _, start = self.native.attrs.split(self.native.inputs[3:])  # type: ignore[union-attr]
        assert start is not None
        return start


Stage = Product | Attention


@record(eq=False)
class Chain:
    """Stages with the buffers that they exchange by words (`heard`: buffer -> stages that write it, all in the chain) and those
    that are in plain memory."""

    stages: tuple[Stage, ...]
    launches: tuple[Stages, ...]
    words: frozenset[int]
    plain: frozenset[int]
    areas: Mapping[tuple[int, int], tuple[int, int]]  # (stage, buffer) -> first word, number of its use in a run
    uses: Mapping[int, int]  # of an area, by its first word: uses in a run
    size: int  # words in all
    copies: int


# -- single launches


def product_of(n: int, program: Program, kernel: Kernel) -> Product:
    c = contract_of(kernel, 1, pairs=True, blocks=True)
    if c is None or kernel.limits or math.prod(e for _, e in kernel.grid) != 1:
        raise Refused("it is no product of one row")
    pieces, step = pieces_of(c), program.steps[n]
    region = {buffer: program.buffers[a].region for buffer, a in zip(kernel.buffers, step.args)}
    if fault := pieces.fault():
        raise Refused(fault)
    if pieces.row > MOST_ROW:
        raise Refused(f"a row of {c.k} elements leaves too little shared memory for weights")
    if c.n % pieces.unit or region[pieces.weights.buffer] not in NEVER_WRITTEN:
        raise Refused(f"the weights are not known before the run, or their columns are no multiple of {pieces.unit}")
    made = _row_of(n, kernel, c, {x for x, r in region.items() if r not in NEVER_WRITTEN})
    _check_epilogue(made)
    return made


def _row_of(n: int, kernel: Kernel, c: Contract, varying: set[Buffer]) -> Product:
    if isinstance(c.a, Operand):
        if c.a.buffer not in varying or c.a.col_stride != 1 or not (isinstance(c.a.offset, Const) and c.a.offset.value == 0):
            raise Refused("its row is not a whole buffer")
        column = Var("column", c.j.dtype)
        return Product(n, kernel, c, c.a.buffer, frozenset(), (column,), Load(c.a.buffer, column))
    before = [s for s in c.a.before if not _always(s)]
    loops, lets = [s for s in before if isinstance(s, Loop)], tuple(s for s in before if isinstance(s, Let))
    if len(loops) > 1 or len(loops) + len(lets) < len(before) or any(not isinstance(s, Let) for s in c.a.body):
        raise Refused("its row is computed in several passes (a norm that subtracts the mean)")
    found = {x.buffer for x in walk((c.a.before, c.a.body, c.a.value)) if isinstance(x, Load) and x.buffer in varying}
    if len(found) != 1 or c.a.body:
        raise Refused("its row is computed of several others")
    (source,) = found
    copies, square, total, columns = set[Local](), None, None, (c.a.column,)
    for loop in loops:
        stores = [s for s in loop.body if isinstance(s, Store)]
        copied = all(isinstance(s.value, Load) and s.value.buffer is source and s.index is loop.var for s in stores)
        one = len(loop.reduces) == 1 and loop.reduces[0].op == "add" and not loop.carries and loop.extent == c.k
        if not (one and copied) or any(not (isinstance(s, Store) or _always(s)) for s in loop.body):
            raise Refused("its norm is not one sum over the row")
        copies |= {s.buffer for s in stores if isinstance(s.buffer, Local)}
        square, total, columns = loop.reduces[0].value, loop.reduces[0].result, (c.a.column, loop.var)
    factor = lets[-1].var if lets and total is not None else None
    value = c.a.value if factor is None else _over(c.a.value, factor)
    if value is None or any(s.var in walk(value) for s in lets) or (lets and factor is None):
        raise Refused("its norm is no factor of the row")
    for x in walk((value, square)):
        if isinstance(x, Load) and x.buffer is not source and x.buffer not in copies:
            if x.buffer in varying or x.guard is not None or not in_vector(x, c.a.column, 4):
                raise Refused("its row is computed of more than adjacent elements")
        elif isinstance(x, Load) and x.index not in columns:
            raise Refused("its row is read in another order")
    return Product(n, kernel, c, source, frozenset(copies), columns, value, square, total, lets, factor)


def _always(s: object) -> bool:
    """A Check of constants, which hold."""
    return isinstance(s, Check) and not any(isinstance(x, Load | Var) for x in walk(s.ok)) and bool(_constant(s.ok))


def _constant(e: Expr) -> int | float | bool:
    if isinstance(e, Const):
        return e.value
    assert isinstance(e, Alu)
    args = [_constant(a) for a in e.args]
    known = {"le": operator.le, "lt": operator.lt, "and": operator.and_, "cast": lambda a: a}
    return known[e.op](*args) if e.op in known else False


def _over(e: Expr, factor: Var) -> Expr | None:
    """`e` without a factor that it has once; None: it is no product with it."""
    if not isinstance(e, Alu):
        return None
    if e.op == "cast":
        inner = _over(e.args[0], factor)
        return None if inner is None else replace(e, args=(inner,))
    if e.op != "mul":
        return None
    for own, other in (e.args, e.args[::-1]):
        if own is factor:
            return other
        if factor in walk(own) and (inner := _over(own, factor)) is not None:
            return replace(e, args=(inner, other))
    return None


def offset_of(e: Expr, var: Var) -> int | None:
    """c if `e` is var + c."""
    if e is var:
        return 0
    if isinstance(e, Alu) and e.op == "add" and var in e.args:
        other = e.args[e.args[0] is var]
        return int(other.value) if isinstance(other, Const) else None
    return None


def _check_epilogue(p: Product) -> None:
    c = p.contract
    if c.rows or any(not isinstance(s, Let | Store) for s in c.epilogue):
        raise Refused("its epilogue does more than store elements")
    for s in walk(c.epilogue):
        if isinstance(s, Store) and (s.guard is not None or offset_of(s.index, c.j) is None):
            raise Refused("it does not store its columns one by one")


def attention_of(stages: Stages, program: Program, found: Sequence[Launch | None]) -> Attention:
    n = stages[-1][-1]
    at, step = found[n], program.steps[n]
    assert isinstance(at, AttentionLaunch)
    native = native_of(at.kernel)
    assert native is not None and isinstance(native.attrs, AttentionAttrs)
    q, k, v = native.inputs[:3]
    mask, start = native.attrs.split(native.inputs[3:])
    (batch, heads, queries, size), (*_, width) = q.dims, v.dims
    ordered = native.attrs.mask in ("causal", "sliding_window") and mask is None and start is not None
    if batch * queries != 1 or not ordered or at.kernel.limits:
        raise Refused("attention of more than one query, or with another mask than of the positions")
    if any(isinstance(x, Load) for x in walk(native.epilogue)):
        raise Refused("attention whose results are stored with other values")
    if size != width or size % 8 or heads > THREADS or not (in_chunks(k) and in_chunks(v)) or size > THREADS:
        raise Refused(f"attention of heads of {size} and {width} elements")
    known = [front_of(stage, program, found) for stage in stages[:-1]]
    fronts = tuple(tuple(zip(stage, [x for _, x in front])) for stage, front in zip(stages, known) if front)
    if len(fronts) < len(stages) - 1:
        raise Refused("the kernels in front of attention are not run by its blocks")
    written = {a for stage in fronts for m, _ in stage for a in program.steps[m].writes}
    buffers = dict(zip(at.kernel.buffers, step.args))
    if not {buffers[k.buffer], buffers[v.buffer]} <= written or written - {buffers[x.buffer] for x in (q, k, v)}:
        raise Refused("the new keys and values are not written in front of attention")
    if q.strides[1] != size or q.strides[3] != 1 or k.strides[3] != 1 or v.strides[3] != 1:
        raise Refused("heads of queries do not follow each other in memory")
    return Attention(n, at.kernel, at, fronts, _ranges(fronts, at, program, step.args, q))


def _ranges(
    fronts: Sequence[Sequence[tuple[int, Launch]]], at: AttentionLaunch, program: Program, args: Sequence[int], q: View
) -> dict[int, tuple[tuple[int, int, int], ...]]:
    reads: dict[int, list[np.ndarray]] = {}
    try:
        for m, launch in (x for stage in fronts for x in stage):
            ids = dict(zip(launch.kernel.buffers, program.steps[m].args))
            for buffer, writes, index in Footprint(launch, at.tiles, 0).found:
                if not writes:
                    reads.setdefault(ids[buffer], []).append(np.where(index < 0, index.max(axis=1, keepdims=True), index))
    except Unknown:
        raise Refused("the kernels in front of attention compute their indices") from None
    own = dict(zip(at.kernel.buffers, args))[q.buffer]
    each = q.dims[1] // at.tiles * q.dims[3]
    reads.setdefault(own, []).append(q.offset + np.arange(at.tiles * each).reshape(at.tiles, each))
    return {id: _runs(np.concatenate(index, axis=1)) for id, index in reads.items() if program.buffers[id].region is Region.ARENA}


def _runs(index: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Runs of elements by tile; none: they do not step evenly from tile to tile."""
    tiles = [np.unique(row) for row in index]
    steps = [np.split(t, np.flatnonzero(np.diff(t) != 1) + 1) for t in tiles]
    if len({tuple(map(len, s)) for s in steps}) != 1:
        return ()
    firsts = np.array([[run[0] for run in s] for s in steps])
    by = firsts[1] - firsts[0] if len(firsts) > 1 else np.zeros(firsts.shape[1], int)
    if (firsts != firsts[0] + np.arange(len(firsts))[:, None] * by).any():
        return ()
    return tuple((int(a), int(b), len(run)) for a, b, run in zip(firsts[0], by, steps[0]))


# -- chains


def in_chains(
    program: Program, launches: Sequence[Stages], found: Sequence[Launch | None], multiprocessors: int,
    refused: Callable[[Stages, str], object] = lambda stages, why: None,
) -> Iterator[Stages | Chain]:
    """The launches, with chains in place of those that can be one. `refused` is told why others cannot."""
    open: list[tuple[Stage, Stages]] = []

    def close() -> Iterator[Stages | Chain]:
        stages, those = tuple(s for s, _ in open), tuple(x for _, x in open)
        open.clear()
        count = sum(isinstance(s, Product) for s in stages)
        try:
            if count < LEAST:
                raise Refused(f"{count} products follow each other without other kernels between them; a chain has {LEAST}")
            yield chained(program, stages, those, multiprocessors)
        except Refused as why:
            for launch in those:
                refused(launch, str(why))
            yield from those

    for stages in launches:
        n = stages[-1][-1]
        try:
            if isinstance(at := found[n], RingLaunch | BlocksLaunch) and len(stages) == len(stages[0]) == 1:
                open.append((product_of(n, program, at.kernel), stages))
                continue
            if isinstance(at, AttentionLaunch) and at.cluster:
                open.append((attention_of(stages, program, found), stages))
                continue
        except Refused as why:
            refused(stages, str(why))
        yield from close()
        yield stages
    yield from close()


def chained(program: Program, stages: tuple[Stage, ...], launches: tuple[Stages, ...], multiprocessors: int) -> Chain:
    wrote = {a: i for i, s in enumerate(stages) for a in _results(s, program)}
    heard = {a for s in stages for a in _sources(s, program) if a in wrote}
    plain = set[int]()
    for i, s in enumerate(stages):
        for a in _again(s, program) & wrote.keys():
            w = stages[wrote[a]]
            same = isinstance(s, Product) and isinstance(w, Product) and s.contract.n == w.contract.n and s.unit == w.unit
            if not same:
                raise Refused(f"stage {i} reads again what other blocks have written")
            plain.add(a)
    last = {a: n for n, step in enumerate(program.steps) for a in step.reads}
    mine = {n for s in stages for n in s.steps}
    behind = {a for n, step in enumerate(program.steps) if n not in mine for a in step.reads}
    behind |= {a for step in program.commit for a in step.reads} | {o.buffer for o in program.outputs}
    plain |= {a for a in wrote if a in behind or a not in last or program.buffers[a].region is not Region.ARENA}
    _check_heads(stages, program, multiprocessors)
    _check_order(stages, program, wrote)
    _check_memory(stages, program, heard, plain, wrote)
    copies = _copies(stages, multiprocessors)
    areas, uses, size = _areas(stages, program, heard, copies, multiprocessors)
    return Chain(stages, launches, frozenset(heard), frozenset(plain), areas, uses, size, copies)


def _results(s: Stage, program: Program) -> set[int]:
    """Buffers that a stage writes for others: not the queries and rows of a cache, which attention keeps."""
    return set(program.steps[s.step].writes)


def _sources(s: Stage, program: Program) -> set[int]:
    if isinstance(s, Product):
        return {program.steps[s.step].args[s.kernel.buffers.index(s.source)]}
    kept = {a for n in s.steps[:-1] for a in program.steps[n].writes}
    return set(s.ranges) - kept


def _again(s: Stage, program: Program) -> set[int]:
    """Buffers of which an epilogue reads its own column."""
    if not isinstance(s, Product):
        return set()
    ids = dict(zip(s.kernel.buffers, program.steps[s.step].args))
    found = [x for x in walk(s.contract.epilogue) if isinstance(x, Load) and isinstance(x.buffer, Buffer)]
    those = {ids[x.buffer] for x in found}  # type: ignore[index]
    if any(offset_of(x.index, s.contract.j) != 0 and program.buffers[ids[x.buffer]].region not in NEVER_WRITTEN for x in found):  # type: ignore[index]
        raise Refused("an epilogue reads other columns than its own")
    return those


def _check_heads(stages: Sequence[Stage], program: Program, multiprocessors: int) -> None:
    """All attentions must be of one shape, since their keys are kept in the same registers, and hear all that is told them."""
    those = [s for s in stages if isinstance(s, Attention)]
    shapes = {
        (s.native.inputs[0].dims, s.native.inputs[1].dims, s.native.inputs[1].strides, s.native.inputs[2].strides,
         s.native.inputs[1].buffer.dtype, s.native.inputs[0].buffer.dtype, s.native.attrs.scale, s.native.attrs.cap)  # type: ignore[union-attr]
        for s in those
    }  # fmt: skip
    places = {program.steps[s.step].args[s.kernel.buffers.index(s.start.buffer)] for s in those}
    if len(shapes) > 1 or len(places) > 1:
        raise Refused("attentions of different shapes")
    for s in those:
        if s.native.inputs[0].dims[1] > multiprocessors:
            raise Refused(f"{s.native.inputs[0].dims[1]} heads for {multiprocessors} multiprocessors")
        for a in _sources(s, program):
            runs = s.ranges[a]
            covered = {r + t * by + i for r, by, n in runs for t in range(s.at.tiles) for i in range(n)}
            if len(covered) != program.buffers[a].shape.num_elements or any(x % 4 for run in runs for x in run):
                raise Refused("attention does not read all that is computed for it")


def _check_order(stages: Sequence[Stage], program: Program, wrote: Mapping[int, int]) -> None:
    """A block sends its share of a head to the other one of its pair, which must have read that of the attention before: words
    that follow from the results of all heads say so."""
    after = set[int]()  # the last attention, and stages with words that follow from it
    for i, s in enumerate(stages):
        follows = any(wrote.get(a, -1) in after for a in _sources(s, program))
        if isinstance(s, Attention):
            if after and not follows:
                raise Refused("two attentions of which neither waits for the other")
            after = {i}
        elif follows:
            after.add(i)


def _check_memory(stages: Sequence[Stage], program: Program, heard: set[int], plain: set[int], wrote: Mapping[int, int]) -> None:
    """Stages overlap in time, so memory must not be written again while blocks may still use it. Where a block has all words of
    a stage, every block has read what it needed for them, so a later stage may write there. An element that one thread alone
    reads and writes may be written at any time."""
    share = overlaps(program)
    for i, s in enumerate(stages):
        kept = {a for n in s.steps[:-1] for a in program.steps[n].writes}  # in shared memory
        for a in {a for n in s.steps for a in program.steps[n].reads} - (heard - plain) - kept:
            for b in plain - {a}:
                own = a in _again(s, program) and _same_place(a, b, program)
                if share(a, b) and not own and wrote[b] <= i and wrote.get(a, -1) <= wrote[b]:
                    raise Refused("a value would be overwritten while blocks still read it")
    for a, b in permutations(plain, 2):
        if share(a, b) and not _same_place(a, b, program) and 0 <= wrote[b] - wrote[a] < 2:
            raise Refused("two values that follow each other share memory")


def _same_place(a: int, b: int, program: Program) -> bool:
    offsets = program.plan.offsets
    return offsets.get(a) == offsets.get(b) and program.buffers[a].shape == program.buffers[b].shape


def largest_bytes(stages: Sequence[Stage], multiprocessors: int) -> float:
    """Of weights of a product in a block; the last product, which may be that of a vocabulary, is not counted."""
    products = [s for s in stages if isinstance(s, Product)]
    return max(s.pieces.nbytes for s in products[:-1]) / multiprocessors


def _copies(stages: Sequence[Stage], multiprocessors: int) -> int:
    """Of words, for blocks to poll: more of them where stages are short."""
    return 2 if largest_bytes(stages, multiprocessors) < MIDDLE else 1


def _areas(
    stages: Sequence[Stage], program: Program, heard: set[int], copies: int, multiprocessors: int
) -> tuple[dict[tuple[int, int], tuple[int, int]], dict[int, int], int]:
    """Places of words. One is used again, by exactly as many words so that the marks of all of them change, once every block that
    writes there is sure that all have ended the stage that read them last."""
    sure = _sure(stages, program, multiprocessors)
    read = {a: i for i, s in enumerate(stages) for a in _sources(s, program)}
    free: list[tuple[tuple[int, int], int, int]] = []  # copies and their words, first word, stage of the last reading
    areas: dict[tuple[int, int], tuple[int, int]] = {}
    uses, size = Counter[int](), 0
    for i, s in enumerate(stages):
        told = sorted(_results(s, program) & heard)
        wanted = [(a, (copies, program.buffers[a].shape.num_elements), read[a]) for a in told]
        if count := shares_of(s, multiprocessors)[1] if isinstance(s, Attention) else s.pieces.words(multiprocessors):
            wanted.append((-1, (1, count), i))
        for a, kind, until in wanted:
            fits = [x for x in free if x[0] == kind and x[2] <= sure[i]]
            if fits:
                free.remove(fits[0])
                first = fits[0][1]
            else:
                first, size = size, size + kind[0] * pitch_of(kind[1])
            areas[i, a] = first, uses[first]
            uses[first] += 1
            free.append((kind, first, until))
    return areas, dict(uses), size


def _sure(stages: Sequence[Stage], program: Program, multiprocessors: int) -> list[int]:
    """By stage, the last stage that all blocks have ended where one of them writes words of that stage; -1: none. The words of
    a product in which every block has columns say that all have ended it; those of others only what their writers had heard. A
    block without keys of an attention hears nothing there: it knows what the last product of which it had columns told it."""
    whole = [isinstance(s, Product) and s.contract.n // s.unit >= multiprocessors for s in stages]
    wrote = {a: i for i, s in enumerate(stages) for a in _results(s, program)}
    source = [max((wrote[a] for a in _sources(s, program) if a in wrote), default=-1) for s in stages]
    ended, known, sure = list[int](), -1, list[int]()
    for i, s in enumerate(stages):
        heard = ended[source[i]] if source[i] >= 0 else -1
        ended.append(i if whole[i] else heard)
        sure.append(known if isinstance(s, Attention) else heard)
        known = heard if whole[i] else known
    return sure


def shares_of(s: Attention, multiprocessors: int) -> tuple[int, int]:
    """Blocks that share the keys of a head of queries, in pairs, and the words by which pairs tell each other their sums."""
    _, heads, _, size = s.native.inputs[0].dims
    splits = 1
    while splits < SPLITS and 2 * splits * heads <= multiprocessors and multiprocessors % 2 == 0:
        splits *= 2
    return splits, heads * max(0, splits // 2 - 1) * (size + 4)


def pitch_of(count: int) -> int:
    """Words from one copy of `count` to the next: whole lines of memory."""
    return -(-count // LINE) * LINE


__all__ = [
    "AHEAD", "MIDDLE", "SHORT", "THREADS", "Attention", "Chain", "Product", "Refused", "Stage", "in_chains", "largest_bytes",
    "pitch_of", "shares_of",
]  # fmt: skip

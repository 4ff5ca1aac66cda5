"""Products of one row, and the attentions between them, as one launch: the layers of a decoder for one token.

A launch for each product costs a hop of 1.5 us and more, and weights stop coming while attention runs. Here every
multiprocessor has one block for the whole *chain* of stages. One warp of it copies the block's weights of all products, in
their order, through one ring in shared memory; eight warps compute. A value goes from stage to stage as words that carry a mark
(chain.h), so blocks need neither barriers nor fences. A residual, which the same block writes and reads again, is in plain
memory besides.

`in_chains` finds chains among the launches of a run and plans them; chain_parts.py has their stages, chain_writer.py writes their
text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

from rlx.backends.cuda.attention import AttentionLaunch
from rlx.backends.cuda.gemv_blocks import BlocksLaunch
from rlx.backends.cuda.gemv_ring import RingLaunch
from rlx.backends.cuda.groups import Stages, overlaps
from rlx.backends.cuda.schedule import Launch
from rlx.ir.kernel import Buffer, Load, walk
from rlx.ir.program import Program, Region
from rlx.records import record

from rlx.backends.cuda.chain_parts import (  # isort: skip
    Attention, Product, Refused, Stage, attention_of, offset_of, product_of, shares_of,
)  # fmt: skip

LEAST, LINE = 8, 32  # products of a chain; words of a line of memory
SHORT, MIDDLE = 128 << 10, 512 << 10  # bytes of weights of a product in a block: longer ones have more pieces in flight


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
        own, others = _again(s, program)
        if others & wrote.keys():
            raise Refused("an epilogue reads other columns than its own")
        for a in own & wrote.keys():
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


def _again(s: Stage, program: Program) -> tuple[set[int], set[int]]:
    """Buffers of which an epilogue reads its own column alone, and those of which it reads other elements."""
    if not isinstance(s, Product):
        return set(), set()
    ids = dict(zip(s.kernel.buffers, program.steps[s.step].args))
    found = [x for x in walk(s.contract.epilogue) if isinstance(x, Load) and isinstance(x.buffer, Buffer)]
    others = {ids[x.buffer] for x in found if offset_of(x.index, s.contract.j) != 0}  # type: ignore[index]
    return {ids[x.buffer] for x in found} - others, others  # type: ignore[index]


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
                own = a in _again(s, program)[0] and _same_place(a, b, program)
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


def pitch_of(count: int) -> int:
    """Words from one copy of `count` to the next: whole lines of memory."""
    return -(-count // LINE) * LINE


__all__ = ["MIDDLE", "SHORT", "Chain", "in_chains", "largest_bytes", "pitch_of"]

"""The stages of a chain (chain.py): a product of one row, or attention of one query with the kernels in front of it. `Refused`
says why a launch, or a chain, stays as it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from rlx.backends.cuda.attention import AttentionLaunch, in_chunks, native_of
from rlx.backends.cuda.chain_pieces import MOST_ROW, Pieces, pieces_of
from rlx.backends.cuda.fronts import Footprint, Unknown, front_of
from rlx.backends.cuda.gemv import contract_of
from rlx.backends.cuda.groups import Stages
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import in_vector
from rlx.ir.ops.attention import AttentionAttrs
from rlx.ir.program import NEVER_WRITTEN, Program, Region
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Check, Const, Contract, Expr, Kernel, Let, Load, Local, Loop, Native, Operand, Store, Var, View, walk,
)  # fmt: skip

AHEAD, SPLITS = 5, 8  # keys that a lane loads at once; blocks that share those of a head, at most
THREADS = 256  # that compute: at most so many elements of a head, and heads


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


def shares_of(s: Attention, multiprocessors: int) -> tuple[int, int]:
    """Blocks that share the keys of a head of queries, in pairs, and the words by which pairs tell each other their sums."""
    _, heads, _, size = s.native.inputs[0].dims
    splits = 1
    while splits < SPLITS and 2 * splits * heads <= multiprocessors and multiprocessors % 2 == 0:
        splits *= 2
    return splits, heads * max(0, splits // 2 - 1) * (size + 4)


__all__ = ["AHEAD", "THREADS", "Attention", "Product", "Refused", "Stage", "attention_of", "offset_of", "product_of", "shares_of"]

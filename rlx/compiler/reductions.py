"""Rewrites reductions to a fast form: over one axis each, with sequential reads and enough parallelism for all threads. Adjacent
axes are merged; of several axes the last is reduced first; a reduction with too few results is done in two steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import Places
from rlx.compiler.packing import reduction, widens
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph, Node, Value, apply, keep
from rlx.ir.layout import is_line, one_stride
from rlx.ir.op import OPS, Kind
from rlx.ir.target import Target

LEAST_PARTS = 8  # a reduction with work for fewer is not divided: the second step would take as long
VECTOR = 8  # elements, of 16 bits, of a vector that every target has
MOST_PARTS = 32  # times as many as are wanted, where an axis has few divisors
FEW_RESULTS = 16  # threads for each: with more, a thread sums all elements of one
NARROW = 16  # times the columns of a block of threads: in wider rows few lanes are idle
WIDE = 1 << 12  # columns of parts that lie side by side, at least
LONG = 256  # elements of such a part, at least
SHARED_ROW = 1 << 20  # elements: two kernels for a shorter row are faster than one whose blocks tell each other their results
KEPT = 8  # times the elements that all points read: no kernel keeps a longer row, to read it again


def reductions(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with reductions over several axes, or with few results, in steps. Partial sums of narrow floats are f32."""
    if graph.extent is not None:  # padding is skipped along the declared axes, so these must not change
        return graph
    readers: dict[Value, set[Node]] = {}
    for node in graph.nodes():
        for value in node.inputs:
            readers.setdefault(value, set()).add(node)
    outside, places = set(graph.roots()), list[Places]()

    def views(value: Value) -> list[Value]:
        """The views that this value is computed of on the way, element by element."""
        found, todo, done = list[Value](), [value], set[Value]()
        while todo:
            x = todo.pop()
            if x.node.op.kind is Kind.VIEW:
                found.append(x)
            elif x.node.op.kind is Kind.POINTWISE and x not in done and len(readers[x]) == 1 and x not in outside:
                done.add(x)
                todo += [i for i in x.node.inputs if i.rank == x.rank]
        return found

    def apart(node: Node) -> bool:
        """True if it reduces several axes of a view, such as windows, where axes that would be merged have no common stride. If
        the elements are computed of the view, only where results that are adjacent read elements close to each other."""
        source, axes = node.inputs[0], reduction(node).axes
        if len(axes) == 1 or not (found := views(source)):
            return False
        places[:] = places or [Places(graph)]
        layouts = [(places[0].locate(v)[1], v.shape.static) for v in found]
        kept = [axis for axis in range(source.rank) if axis not in axes]
        if found[0] is not source and not any(is_line(dims[a], layout.strides[a]) for layout, dims in layouts for a in kept):
            return False
        runs = [tuple(run) for _, run in groupby(range(source.rank), key=axes.__contains__)]
        return not all(one_stride(layout, dims, run) for layout, dims in layouts for run in runs)

    def along_rows(node: Node) -> bool:
        """True if elements along the last axis are adjacent in memory, as far as they are of views."""
        if found := views(node.inputs[0]):
            places[:] = places or [Places(graph)]
        layouts = [(places[0].locate(v)[1].strides, v.shape.static) for v in found]
        return all(next((s for s, d in zip(strides[::-1], dims[::-1]) if d != 1), 1) == 1 for strides, dims in layouts)

    target, whole = compilation.target, set[Node]()  # new reductions that are in one step
    alone: set[Node] = set()  # new nodes whose original had one reader
    same: dict[tuple[Value, tuple[int, ...]], Value] = {}  # results of one element each, so that equal ones are one node

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        kept = keep(node, inputs)
        if node.op.kind is Kind.POINTWISE and len(readers.get(node.results[0], ())) == 1 and node.results[0] not in outside:
            alone.add(kept[0].node)
        if node.op.kind is not Kind.REDUCE:
            return kept
        only_reader = len(readers[node.inputs[0]]) == 1 and not (target.few_kernels and _reads_results(kept[0].node, whole))
        made = _in_steps(kept[0].node, only_reader, alone, same, target, apart(node), lambda: along_rows(node))
        if made is None:
            whole.add(kept[0].node)
            return kept
        source = kept[0].node.inputs[0]
        if made is source or made is same.get((source, made.shape.static)):
            return (made,)
        return (replace(made.node, name=node.name, source=node.source).results[0],)

    return graph.rebuild(new)


def _reads_results(node: Node, whole: set[Node]) -> bool:
    """True if a reduction is of elements computed of results of one of these along the same axis: one kernel can do both."""
    source, facts = node.inputs[0], reduction(node)
    todo, done = [source], set[Node]()
    while todo:
        before = todo.pop().node
        if before in whole and before.inputs[0].dims == source.dims and reduction(before).axes == facts.axes:
            return True
        if before.op.kind is Kind.POINTWISE and before not in done:
            done.add(before)
            todo += before.inputs
    return False


def _in_steps(
    node: Node,
    only_reader: bool,
    alone: set[Node],
    same: dict[tuple[Value, tuple[int, ...]], Value],
    target: Target,
    apart: bool,
    along_rows: Callable[[], bool],
) -> Value | None:
    """The result of a reduction in several simpler nodes; None if it needs no change."""
    source, result = node.inputs[0], node.shapes[0]
    dims, axes = source.shape.static, reduction(node).axes
    real = [(a in axes, d) for a, d in enumerate(dims) if d != 1]
    runs = [(reduced, math.prod(d for _, d in run)) for reduced, run in groupby(real, key=lambda x: x[0])]
    todo = [i for i, (reduced, _) in enumerate(runs) if reduced]
    if not todo and 0 not in dims:  # each result is one element
        return _as(source if dims == result.static else _reshaped(source, result.static, alone, same), result.dtype)
    # rows of less than a cache line of f32 get no reduction of their own; where results are few for many threads, they come last
    short = len(todo) > 1 and todo[-1] == len(runs) - 1 and runs[-1][1] < target.line_bytes // 4
    if 0 in dims or (short and FEW_RESULTS * math.prod(d for reduced, d in runs if not reduced) >= target.threads):
        return None
    sizes, last = [d for _, d in runs], todo[-1]
    kept = sizes[last] <= KEPT * target.points * target.point_elements
    near = sizes[last] * source.dtype.compute.itemsize <= target.column_bytes
    read_again = not only_reader and (near or (last == len(runs) - 1 and kept))
    parts = 1 if read_again or short else _parts(sizes, last, target)
    long = only_reader and last == len(runs) - 1 and sizes[last] > SHARED_ROW
    if target.shares_rows and long and _of_memory(source) and along_rows():
        parts = 1
    if len(axes) == parts == 1 or (apart and len(todo) == parts == 1):
        return None
    beside = _parts_beside(sizes, last, target) if parts > 1 else 0
    divided = (*sizes[:last], sizes[last] // beside, beside, *sizes[last + 1 :]) if beside else _divided(sizes, last, parts)
    value = _as(_reshaped(source, divided, alone, {}), source.dtype.compute)
    for gone, i in enumerate(todo if short else reversed(todo)):  # from the back, earlier axes keep their numbers
        i -= gone * short
        if (short or i != last) and (parts := _parts(value.shape.static, i, target)) > 1:  # type: ignore[union-attr]
            value = value.reshape(_divided(value.shape.static, i, parts))  # type: ignore[union-attr]
        for axis in (i, i) if beside and i == last else (i + 1, i) if parts > 1 else (i,):
            value = apply(node.op, (value,), {"axis": (axis,)})
    made = _as(value, result.dtype)  # type: ignore[arg-type]
    return made if made.shape == result else made.reshape(result.static)  # a view would keep readers out of its kernel


def _of_memory(source: Value) -> bool:
    """True if it is computed, element by element, of values that are in memory at known places."""
    todo, done = [source.node], set[Node]()
    while todo:
        node = todo.pop()
        if node.op.kind in (Kind.POINTWISE, Kind.VIEW) and node not in done:
            done.add(node)
            todo += (v.node for v in node.inputs)
        elif node.op.kind in (Kind.CONTRACT, Kind.INDEX):
            return False
    return True


def _as(value: Value, dtype: DType) -> Value:
    return value if value.dtype == dtype else apply(OPS["cast"], (value,), {"dtype": dtype})  # type: ignore[return-value]


def _parts(dims: Sequence[int], axis: int, target: Target) -> int:
    """Number of equal parts of this axis to reduce in parallel; 1 if the other axes give enough work, or no divisor fits."""
    outer, inner = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
    most = dims[axis] * inner // target.point_elements
    if target.threads == 1 or outer * dims[axis] * inner < LEAST_PARTS * target.point_elements:
        return 1
    wanted = -(-target.points // (outer * -(-inner // target.run_columns)))
    least = min(wanted, most)
    fits = (n for n in range(max(2, least), min(MOST_PARTS * wanted, most) + 1) if dims[axis] % n == 0)
    # parts that begin where a vector does, then as few as possible
    return min(fits, key=lambda n: (-math.gcd(dims[axis] // n * inner, VECTOR), n), default=1) if least > 1 else 1


def _parts_beside(dims: Sequence[int], axis: int, target: Target) -> int:
    """Number of parts of this axis that lie side by side, each of every so many elements, where the rows behind it are so short
    that lanes of blocks of threads would be idle; 0: they are not, or no divisor fits."""
    inner, lanes = math.prod(dims[axis + 1 :]), target.run_columns
    if target.points_per_thread >= 1 or inner == 1 or inner % lanes == 0 or inner > NARROW * lanes:
        return 0
    most = min(4 * WIDE // inner, dims[axis] // LONG)
    fits = (n for n in range(-(-WIDE // inner), most + 1) if dims[axis] % n == 0)
    return min(fits, key=lambda n: (-math.gcd(n * inner, 4 * lanes), n), default=0)


def _divided(dims: Sequence[int], axis: int, parts: int) -> tuple[int, ...]:
    """The dims with one axis split into two: the number of parts, and the size of a part."""
    return (*dims[:axis], *((parts,) if parts > 1 else ()), dims[axis] // parts, *dims[axis + 1 :])


def _reshaped(value: Value, dims: tuple[int, ...], alone: set[Node], made: dict[tuple[Value, tuple[int, ...]], Value]) -> Value:
    """`value` reshaped, with the reshape moved above pointwise nodes that have no other reader, so that they can be fused, and
    above a cast to a wider dtype, which each reader does itself: the narrow value is in memory. `made`: of the same walk, so that
    each node is moved once."""
    node, own, key = value.node, value.shape.static, (value, dims)
    wide = widens(node) and node not in alone
    if own == dims and not wide:
        return value
    if key not in made:
        inputs = node.inputs
        if wide:
            inputs = (inputs[0] if own == dims else inputs[0].reshape(dims),)
        elif node in alone and None not in (found := [_broadcast(v.shape.static, own, dims) for v in inputs]):
            inputs = tuple(_reshaped(v, to, alone, made) for v, to in zip(inputs, found))  # type: ignore[arg-type]
        else:
            made[key] = value.reshape(dims)
            return made[key]
        shapes = node.op.result_shapes(node.attrs, tuple(v.shape for v in inputs))
        made[key] = replace(node, inputs=inputs, shapes=shapes).results[0]
    return made[key]


def _broadcast(value: tuple[int, ...], own: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Dims of an operand with dims `value`, whose result changes its dims from `own` to `dims`. None: of axes that become one,
    or that one becomes, it has some."""
    if value == own or math.prod(value) == 1:
        return dims if value == own else ()
    value, out, at = (1,) * (len(own) - len(value)) + value, list[int](), 0
    for axes, to in _alike(own, dims):
        part, at = value[at : at + len(axes)], at + len(axes)
        if part != axes and math.prod(part) > 1:
            return None
        out += to if part == axes else (1,) * len(to)
    return tuple(out)


def _alike(own: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of both that have equal products; the last ones with the 1s behind them."""
    i = j = 0
    while i < len(own) and j < len(dims):
        a, b = i + 1, j + 1
        while (left := math.prod(own[i:a])) != (right := math.prod(dims[j:b])):
            a, b = (a + 1, b) if left < right else (a, b + 1)
        if math.prod(own[a:]) == 1:
            a, b = len(own), len(dims)
        yield own[i:a], dims[j:b]
        i, j = a, b


__all__ = ["reductions"]

"""numpy's functions: zeros, arange, stack, einsum, tril and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, GraphError, ShapeError, items, utf8
from rlx.ir import ops
from rlx.ir.dtype import DType, f32, i64
from rlx.ir.functions.declare import Dims, as_value, computed, function, known_dim, one_each, own_axis
from rlx.ir.methods import FUNCTIONS
from rlx.ir.node import Operand, Value, constant
from rlx.ir.op import as_dims, as_ints
from rlx.ir.shape import Dim, DimLike

# -- new values ----------------------------------------------------------------------------------------------------


@function
def full(dims: Dims, value: Operand, dtype: DType | str | None = None) -> Value:
    """`value` everywhere. Without `dtype`: of `value`, as in rlx.constant."""
    return ops.broadcast_to(value if isinstance(value, Value) else constant(value, dtype), dims=as_dims(dims))


@function
def zeros(dims: Dims, dtype: DType | str = f32) -> Value:
    return full(dims, 0, dtype)


@function
def ones(dims: Dims, dtype: DType | str = f32) -> Value:
    return full(dims, 1, dtype)


@function
def full_like(x: Value, value: Operand, dtype: DType | str | None = None) -> Value:
    return full(as_value(x).dims, value, dtype or x.dtype)


@function
def zeros_like(x: Value, dtype: DType | str | None = None) -> Value:
    return full_like(x, 0, dtype)


@function
def ones_like(x: Value, dtype: DType | str | None = None) -> Value:
    return full_like(x, 1, dtype)


@function
def arange(start: float | str | Dim, stop: float | None = None, step: float = 1, dtype: DType | str | None = None) -> Value:
    """start, start + step, ... below stop: i64, or f32 if one of them is a float. `arange("n")` counts a named dim."""
    if isinstance(start, (str, Dim)):
        return ops.iota(dims=start, dtype=dtype or i64)
    first, end = (0, start) if stop is None else (start, stop)
    if not all(isinstance(n, (int, float, np.number)) and n == n for n in (first, end, step)) or not step:
        raise AttributeValueError(f"arange takes numbers, and a step that is not 0; got {first!r}, {end!r} and {step!r}")
    whole = all(isinstance(n, (int, np.integer)) for n in (first, end, step))
    dtype = dtype or (i64 if whole else f32)
    if whole and first == 0 and step == 1 and end > 0:
        return ops.iota(dims=int(end), dtype=dtype)
    computed("arange", (end - first) / step)
    return constant(np.arange(first, end, step), dtype)


@function
def linspace(start: float, stop: float, num: int = 50, endpoint: bool = True, dtype: DType | str = f32) -> Value:
    """`num` numbers at equal distances from start to stop (without stop: `endpoint=False`)."""
    if not all(isinstance(n, (int, float, np.number)) for n in (start, stop)):
        raise AttributeValueError(f"linspace takes numbers, got {start!r} and {stop!r}")
    computed("linspace", size := _whole("num of linspace", num))
    return constant(np.linspace(start, stop, size, endpoint), dtype)


@function
def eye(rows: int, columns: int | None = None, k: int = 0, dtype: DType | str = f32) -> Value:
    """Ones on diagonal k, zeros elsewhere."""
    height = _whole("rows of eye", rows)
    width = height if columns is None else _whole("columns of eye", columns)
    computed("eye", height * width)
    return constant(np.eye(height, width, _whole("k of eye", k, -math.inf)), dtype)


def _whole(label: str, n: object, least: float = 0) -> int:
    if not hasattr(n, "__index__") or (found := int(n)) < least:  # type: ignore[call-overload]
        raise AttributeValueError(f"{label} is a whole number{'' if least else ' of at least 0'}, got {n!r}")
    return found


# -- shape ---------------------------------------------------------------------------------------------------------


@function
def stack(values: Sequence[Operand], axis: int = 0) -> Value:
    """The values beside each other along a new axis."""
    made = [as_value(x) for x in items("stack takes a sequence of values", values, GraphError)]
    if not made:
        raise ShapeError("stack takes at least one value")
    at = own_axis(made[0], axis, 1)
    return ops.concat([ops.unsqueeze(x, axes=at) for x in made], axis=at)


@function
def expand_dims(x: Value, axis: int | Sequence[int]) -> Value:
    """New dims of 1 at these axes of the result."""
    return ops.unsqueeze(x, axes=as_ints(axis))


@function
def swapaxes(x: Value, axis1: int, axis2: int) -> Value:
    a, b = own_axis(x, axis1), own_axis(x, axis2)
    return ops.transpose(x, axes=tuple(b if i == a else a if i == b else i for i in range(x.rank)))


@function
def moveaxis(x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    sources, places = ([own_axis(x, i) for i in as_ints(axes)] for axes in (source, destination))
    if len(sources) != len(places) or len(set(sources)) < len(sources) or len(set(places)) < len(places):
        raise AttributeValueError(f"moveaxis: {source} and {destination} must be as many different axes")
    order = [i for i in range(x.rank) if i not in sources]
    for place, axis in sorted(zip(places, sources)):
        order.insert(place, axis)
    return ops.transpose(x, axes=order)


@function
def flip(x: Value, axis: int | Sequence[int] | None = None) -> Value:
    """The elements in reverse order along the axes; of all axes: None."""
    axes = {own_axis(x, i) for i in (range(x.rank) if axis is None else as_ints(axis))}
    return x[tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.rank))]


@function
def roll(x: Value, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Value:
    """The elements moved by `shift` along the axes, those past the end at the start; without axes: in row-major order."""
    if axis is None:
        return ops.reshape(roll(ops.reshape(x, dims=-1), shift, 0), dims=x.dims)
    shifts, axes = as_ints(shift), as_ints(axis)
    shifts = shifts * len(axes) if len(shifts) == 1 else shifts
    for by, at in one_each(x, "shifts of roll", shifts, [own_axis(x, i) for i in axes]):
        size = known_dim(x, at)
        cut = -by % size if size else 0
        if cut:
            before = (slice(None),) * at
            x = ops.concat([x[(*before, slice(cut, None))], x[(*before, slice(0, cut))]], axis=at)
    return x


@function
def tile(x: Value, repeats: int | Sequence[int]) -> Value:
    """The whole of x, `repeats` times along each axis."""
    counts = as_ints(repeats)
    rank = max(x.rank, len(counts))
    counts, dims = (1,) * (rank - len(counts)) + counts, (1,) * (rank - x.rank) + x.dims
    apart = ops.reshape(x, dims=tuple(d for dim in dims for d in (1, dim)))
    wide = ops.broadcast_to(apart, dims=tuple(d for pair in zip(counts, dims) for d in pair))
    return ops.reshape(wide, dims=tuple(n * d for n, d in zip(counts, dims)))


@function
def repeat(x: Value, repeats: int, axis: int | None = None) -> Value:
    """Each element (along the axis) `repeats` times; without an axis: of x as one row."""
    if axis is None:
        return repeat(ops.reshape(x, dims=-1), repeats, 0)
    at = own_axis(x, axis) + 1
    wide = ops.broadcast_to(ops.unsqueeze(x, axes=at), dims=(*x.dims[:at], repeats, *x.dims[at:]))
    return ops.reshape(wide, dims=(*x.dims[: at - 1], x.dims[at - 1] * repeats, *x.dims[at:]))


@function
def tril(x: Value, k: int = 0) -> Value:
    """Zeros above diagonal k of the last two dims."""
    return _triangle(x, lambda row, column: column <= row + k)


@function
def triu(x: Value, k: int = 0) -> Value:
    """Zeros below diagonal k of the last two dims."""
    return _triangle(x, lambda row, column: row + k <= column)


def _triangle(x: Value, inside: Callable[[Value, Value], Value]) -> Value:
    if x.rank < 2:
        raise ShapeError(f"a triangle has two dims, {x!r} has {x.rank}")
    row, column = (ops.iota(dims=x.dims[-2:], axis=axis, dtype=i64) for axis in (0, 1))
    return ops.where(inside(row, column), x, 0)


# -- elements ------------------------------------------------------------------------------------------------------


@function
def square(x: Value) -> Value:
    return x * x


@function
def log2(x: Value) -> Value:
    return ops.log(x) * (1 / math.log(2))


@function
def log10(x: Value) -> Value:
    return ops.log(x) * (1 / math.log(10))


@function
def isinf(x: Value, negative: bool = True, positive: bool = True) -> Value:
    """True at infinities: of both signs, or of one."""
    if negative and positive:
        return ops.equal(ops.abs(x), math.inf)
    return ops.equal(x, math.inf) if positive else ops.equal(x, -math.inf) if negative else ops.less(x, x)


@function
def isfinite(x: Value) -> Value:
    """False for NaN and both infinities."""
    return ops.less(ops.abs(x), math.inf)


@function
def logaddexp(x: Value, y: Operand) -> Value:
    """log(exp(x) + exp(y)) without overflow. As in numpy for equal infinities."""
    high, low = ops.maximum(x, y), ops.minimum(x, y)
    return high + ops.where(ops.equal(high, low), math.log(2), ops.log1p(ops.exp(low - high)))


# -- reductions and products ---------------------------------------------------------------------------------------


@function
def var(x: Value, axis: int | Sequence[int] | None = None, keepdims: bool = False, ddof: int = 0) -> Value:
    """The mean square distance from the mean; of n elements, the sum over n - ddof."""
    axes = tuple(own_axis(x, i) for i in (range(x.rank) if axis is None else as_ints(axis)))
    away = square(x - ops.mean(x, axis=axes, keepdims=True))
    if not ddof:
        return ops.mean(away, axis=axes, keepdims=keepdims)
    return ops.sum(away, axis=axes, keepdims=keepdims) / float(math.prod(known_dim(x, i) for i in axes) - ddof)


@function
def std(x: Value, axis: int | Sequence[int] | None = None, keepdims: bool = False, ddof: int = 0) -> Value:
    """The square root of rlx.var."""
    return ops.sqrt(var(x, axis, keepdims, ddof))


@function
def outer(x: Value, y: Operand) -> Value:
    """Every product of an element of x and one of y: [x.size, y.size]."""
    x, y = as_value(x), as_value(y)
    return ops.reshape(x, dims=(-1, 1)) * ops.reshape(y, dims=(1, -1))


@function
def dot(x: Value, y: Operand) -> Value:
    """numpy's dot: a product by a number, or the sum over the last dim of x and the last but one of y."""
    x, y = as_value(x), as_value(y)
    if not x.rank or not y.rank:
        return x * y
    return tensordot(x, y, ([x.rank - 1], [max(0, y.rank - 2)]))


@function
def tensordot(x: Value, y: Operand, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Value:
    """The sum of products over pairs of axes; over the last n of x and the first n of y: `axes=n`."""
    x, y = as_value(x), as_value(y)
    wanted = "axes of tensordot are a number, or two sequences of as many different axes"
    pair = [range(-axes, 0), range(axes)] if isinstance(axes, (int, np.integer)) else items(wanted, axes, AttributeValueError)
    both = [[own_axis(v, i) for i in as_ints(of)] for v, of in zip((x, y), pair)]
    if len(pair) != 2 or {len(both[0])} != {len({*of}) for of in both}:
        raise AttributeValueError(f"{wanted}; got {axes!r}")
    names = list(range(x.rank)), list(range(x.rank, x.rank + y.rank))
    for a, b in zip(*both):
        names[1][b] = names[0][a]
    return _contracted(x, names[0], y, names[1], [n for n in names[0] + names[1] if (n in names[0]) != (n in names[1])])


@function
def det(x: Value) -> Value:
    """Determinants of matrices [..., n, n]: each step takes the row with the greatest first element as the pivot, and leaves the
    matrix of one row and one column less. For small n: steps are unrolled."""
    if x.rank < 2 or x.dims[-1] != x.dims[-2]:
        raise ShapeError(f"a determinant is of square matrices, got {x!r}")
    n, out = known_dim(x, -1), full(x.dims[:-2], 1, x.dtype)
    for size in range(n, 0, -1):
        at = ops.argmax(ops.abs(x[..., :1]), axis=-2, keepdims=True)
        row = ops.gather_elements(x, ops.broadcast_to(at, dims=(*x.dims[:-2], 1, size)), axis=-2)
        pivot = row[..., :1]
        out = out * ops.where(ops.equal(at, 0), pivot, -pivot)[..., 0, 0]
        chosen = ops.equal(ops.iota(dims=(size, 1)), at)
        rest = ops.where(chosen, x[..., :1, :], x)[..., 1:, :]  # the first row takes the place of the pivot's
        x = rest[..., 1:] - rest[..., :1] / ops.where(ops.equal(pivot, 0), 1, pivot) * row[..., 1:]
    return out


@function
def einsum(subscripts: str, *operands: Operand) -> Value:
    """numpy's einsum: "bik,bkj->bij", "...i,i", "ii" (the trace). Each pair of operands is one matmul; the pair with the smallest
    result beside its operands comes first."""
    inputs, output = _subscripts(subscripts, [as_value(x) for x in operands])
    values = [_diagonal(as_value(x), names) for x, names in zip(operands, inputs)]
    inputs = [list(dict.fromkeys(names)) for names in inputs]
    while len(values) > 1:
        a, b = _best_pair(inputs, values)
        (y, by), (x, ax) = ((values.pop(i), inputs.pop(i)) for i in (b, a))
        later = {*output, *(n for names in inputs for n in names)}
        kept = [n for n in dict.fromkeys([*ax, *by]) if n in later]
        values.append(_contracted(x, ax, y, by, kept))
        inputs.append(kept)
    return _reordered(*_summed(values[0], inputs[0], set(output)), output)


Names = list[Any]  # of axes: a letter, or the place of an axis under ...


def _subscripts(text: str, values: Sequence[Value]) -> tuple[list[Names], Names]:
    """The names of the axes of each operand, and of the result."""
    given, arrow, result = utf8("the subscripts of einsum are text", text, GraphError).replace(" ", "").partition("->")
    parts = given.split(",")
    if len(parts) != len(values):
        raise AttributeValueError(f"einsum {text!r} names {len(parts)} operands, got {len(values)}")
    inputs = [_axis_names(part, v.rank, text) for part, v in zip(parts, values)]
    open_ = max((sum(isinstance(n, int) for n in names) for names in inputs), default=0)
    dots: Names = list(range(-open_, 0))
    if arrow:
        output = _axis_names(result, len(result.replace("...", "")) + open_, text) if "..." in result else list(result)
    else:
        letters = [n for names in inputs for n in names if isinstance(n, str)]
        output = dots + sorted(n for n in set(letters) if letters.count(n) == 1)
    known = {n for names in inputs for n in names}
    if unknown := [n for n in output if n not in known] or len(set(output)) < len(output):
        raise AttributeValueError(f"einsum {text!r}: the result has {unknown if unknown is not True else 'an index twice'}")
    return inputs, output


def _axis_names(part: str, rank: int, text: str) -> Names:
    before, dots, after = part.partition("...")
    names: Names = [*before, *(range(-(rank - len(before) - len(after)), 0) if dots else ()), *after]
    letters = [n for n in names if isinstance(n, str)]
    if len(names) != rank or not all(n.isalpha() for n in letters):
        raise AttributeValueError(f"einsum {text!r}: {part!r} does not name each of {rank} dims")
    return names


def _diagonal(x: Value, names: Names) -> Value:
    """x where the axes of one name have one index: they become one axis, at the place of the first."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            size = known_dim(x, first)
            if x.dims[second] != size:
                raise ShapeError(f"index {name!r} is {size} and {x.dims[second]} in one operand: {x!r}")
            last = moveaxis(x, (first, second), (-2, -1))
            x = moveaxis(ops.reshape(last, dims=(*last.dims[:-2], size * size))[..., :: size + 1], -1, first)
            names = [*names[:second], *names[second + 1 :]]
    return x


def _best_pair(inputs: Sequence[Names], values: Sequence[Value]) -> tuple[int, int]:
    """The pair of operands whose result is smallest beside its operands."""

    def growth(pair: tuple[int, int]) -> float:
        sizes = {n: d if isinstance(d, int) else 1024 for i in pair for n, d in zip(inputs[i], values[i].dims)}
        rest = {n for i, names in enumerate(inputs) if i not in pair for n in names}
        apart = [math.prod(sizes[n] for n in inputs[i]) for i in pair]
        return math.prod(size for n, size in sizes.items() if n in rest or sum(n in inputs[i] for i in pair) == 1) - sum(apart)

    return min(((a, b) for b in range(len(values)) for a in range(b)), key=growth)


def _summed(x: Value, names: Names, kept: set[Any]) -> tuple[Value, Names]:
    """x without the axes that are not in `kept`."""
    axes = tuple(i for i, n in enumerate(names) if n not in kept)
    return (ops.sum(x, axis=axes) if axes else x), [n for n in names if n in kept]


def _reordered(x: Value, names: Names, wanted: Names) -> Value:
    order = tuple(names.index(n) for n in wanted)
    return x if order == tuple(range(x.rank)) else ops.transpose(x, axes=order)


def _contracted(x: Value, ax: Names, y: Value, by: Names, kept: Names) -> Value:
    """The product of x and y summed over the axes that are not in `kept`, with axes in the order of `kept`."""
    x, ax = _summed(x, ax, {*kept, *by})
    y, by = _summed(y, by, {*kept, *ax})
    sizes: dict[Any, DimLike] = {}
    for n, d in [*zip(ax, x.dims), *zip(by, y.dims)]:
        if sizes.setdefault(n, d) != d:
            raise ShapeError(f"index {n!r} is {sizes[n]} in one operand and {d} in another: {x!r}, {y!r}")
    batch = [n for n in ax if n in by and n in kept]
    over = [n for n in ax if n in by and n not in kept]
    rows, columns = [n for n in ax if n not in by], [n for n in by if n not in ax]
    group = {name: _product([sizes[n] for n in names]) for name, names in (("m", rows), ("k", over), ("n", columns))}
    lead = tuple(sizes[n] for n in batch)
    left = ops.reshape(_reordered(x, ax, batch + rows + over), dims=(*lead, group["m"], group["k"]))
    right = ops.reshape(_reordered(y, by, batch + over + columns), dims=(*lead, group["k"], group["n"]))
    made = ops.reshape(ops.matmul(left, right), dims=(*lead, *(sizes[n] for n in rows + columns)))
    return _reordered(made, batch + rows + columns, kept)


def _product(dims: Sequence[DimLike]) -> DimLike:
    out: DimLike = 1
    for d in dims:
        out = out * d
    return out


# -- numpy's own signatures ----------------------------------------------------------------------------------------


def _sort(x: Value, axis: int = -1) -> Value:
    return moveaxis(ops.sort(moveaxis(x, axis, -1))[0], -1, axis)


def _argsort(x: Value, axis: int = -1) -> Value:
    return moveaxis(ops.argsort(moveaxis(x, axis, -1)), -1, axis)


def _split(x: Value, parts: int | Sequence[int], axis: int = 0) -> tuple[Value, ...]:
    if not isinstance(parts, int):
        raise GraphError("np.split of a Value takes the number of parts; for other parts, slice it")
    return ops.split(x, parts=parts, axis=axis)


def _where(*operands: Operand) -> Value:
    if len(operands) != 3:
        raise DTypeError("np.where of a condition alone has a size that is not known before a run")
    return ops.where(*operands)


def _take(x: Value, indices: object, axis: int | None = None) -> Value:
    return ops.reshape(x, dims=-1)[indices] if axis is None else x[(slice(None),) * own_axis(x, axis) + (indices,)]


def _pad(x: Value, pad_width: int | Sequence[object], mode: str = "constant", constant_values: float = 0) -> Value:
    if mode != "constant":
        raise GraphError(f"np.pad of a Value has mode 'constant', got {mode!r}")
    try:
        low, high = np.broadcast_to(np.asarray(pad_width), (x.rank, 2)).T.tolist()
    except ValueError:
        raise ShapeError(f"np.pad: pad_width is a number, (before, after), or one such pair for each of {x.rank} dims") from None
    return ops.pad(x, low=low, high=high, value=constant_values)


def _over_all(reduced: Callable[..., Value]) -> Callable[..., Value]:
    """A reduction for which, as in numpy, `axis=()` means no axis."""
    return lambda x, axis=None, *more, **options: x if axis == () else reduced(x, axis, *more, **options)


def _best(found: Callable[..., Value]) -> Callable[..., Value]:
    """argmax or argmin; without an axis, of all elements."""

    def run(x: Value, axis: int | None = None, *, keepdims: bool = False) -> Value:
        if axis is not None:
            return found(x, axis=axis, keepdims=keepdims)
        made = found(ops.reshape(x, dims=-1))
        return ops.reshape(made, dims=(1,) * x.rank) if keepdims else made

    return run


def _running(made: Callable[..., Value]) -> Callable[..., Value]:
    """cumsum or cumprod; without an axis, of all elements."""
    return lambda x, axis=None: made(ops.reshape(x, dims=-1)) if axis is None else made(x, axis=axis)


def _refused(name: str, use: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise GraphError(f"np.{name} of a Value, whose elements are not known before a run; use {use}")

    return refuse


FUNCTIONS |= {
    **{f"numpy.{f.__name__}": _over_all(f) for f in (ops.sum, ops.prod, ops.max, ops.min, ops.mean, ops.any, ops.all)},
    **{f"numpy.{f.__name__}": _best(f) for f in (ops.argmax, ops.argmin)},
    **{f"numpy.{f.__name__}": _running(f) for f in (ops.cumsum, ops.cumprod)},
    **{f"numpy.{n}": _refused(n, f"rlx.{n}, which has other arguments and results") for n in (
        "nonzero", "unique", "compress", "resize")},
    "numpy.pad": _pad, "numpy.concatenate": lambda arrays, axis=0: ops.concat(arrays, axis=axis),
    "numpy.sort": _sort, "numpy.argsort": _argsort, "numpy.split": _split, "numpy.where": _where, "numpy.take": _take,
    "numpy.ravel": lambda x: ops.reshape(x, dims=-1), "numpy.shape": lambda x: x.dims, "numpy.ndim": lambda x: x.rank,
    "numpy.reshape": lambda x, shape: ops.reshape(x, dims=shape),
    "numpy.transpose": lambda x, axes=(): ops.transpose(x, axes=axes or ()),
    "numpy.broadcast_to": lambda x, shape: ops.broadcast_to(x, dims=shape),
    "numpy.squeeze": lambda x, axis=None: ops.squeeze(
        x, axes=[i for i, d in enumerate(x.dims) if d == 1] if axis is None else as_ints(axis)),
    "numpy.clip": lambda x, a_min=None, a_max=None: ops.clip(x, low=-math.inf if a_min is None else a_min,
                                                            high=math.inf if a_max is None else a_max),
}  # fmt: skip
__all__ = [
    "arange", "det", "dot", "einsum", "expand_dims", "eye", "flip", "full", "full_like", "isfinite", "isinf", "linspace", "log10",
    "log2", "logaddexp", "moveaxis", "ones", "ones_like", "outer", "repeat", "roll", "square", "stack", "std", "swapaxes",
    "tensordot", "tile", "tril", "triu", "var", "zeros", "zeros_like",
]  # fmt: skip

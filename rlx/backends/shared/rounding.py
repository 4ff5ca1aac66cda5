"""Rounding to bytes in fewer instructions, with the same bits.

Networks of bytes round every result: round(x / scale) + zero, between the least and the greatest byte. Then they read the byte as
a number again, (byte - zero) * scale, and round the result of an activation with another scale. Here

- limits come before rounding, so that one instruction rounds and converts, and nothing that it gets is infinite or NaN;
- a byte that is read again is not converted back: its number is known before it is converted;
- a division by a constant is a product and a multiply-add with its reciprocal in two parts. Quotients on which the result
  depends are those near the middle of two integers: all of them are compared when the code is made;
- a function of one byte, from a number to the next rounding, is a product with one factor, if that gives the same for all of
  its at most 256 values.

A NaN becomes 0, as in any cast to integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlx.ir.dtype import f32, i8, i32, u8
from rlx.ir.kernel import Alu, Const, Expr, Kernel, Load, alu, k, walk
from rlx.ir.nest import operands, postorder, substitute
from rlx.records import record

MOST_ZERO = 1 << 10  # of zero points
SCALES = (2.0**-60, 2.0**60)  # of divisors whose residues neither vanish nor overflow
NEAR = np.arange(-4, 5, dtype=np.int32)  # floats around a product that may be the dividend of a quotient between two integers
SURE = 2.0**-50  # part of a sum in f64 by which it may be wrong
RANGES = {u8: (0, 255), i8: (-128, 127)}
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {  # steps of functions of one byte
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@record(slots=True)
class Whole:
    """An integer in f32, least to most: as is `free`, kept within these (NaN: `least`)."""

    least: int
    most: int
    free: Expr


@record(slots=True)
class Rounding:
    """A byte: round(value), kept in least..most, plus zero; NaN is 0. `source`: the value, or the dividend if it is a quotient
    by `scale`."""

    value: Expr
    least: int
    most: int
    zero: int
    source: Expr
    scale: float


@lru_cache(64)
def in_fewer(kernel: Kernel) -> Kernel:
    """The kernel with the same results."""
    alus = [x for x in walk(kernel.body) if isinstance(x, Alu)]
    if not any(x.dtype in RANGES for x in alus):
        return kernel
    work, memo = _Bytes(), dict[int, Expr]()
    for e in alus:
        for node in postorder(e, memo):
            memo[id(node)] = work.rewritten(node, [memo[id(x)] for x in operands(node)])
    return replace(kernel, body=substitute(kernel.body, {}, memo))


class _Bytes:
    """Facts of expressions, by their id: integers in f32; (number, zero point) of bytes, and of sums of them. They are
    `kept`, so that no other one gets the id."""

    def __init__(self) -> None:
        self.whole, self.sums, self.kept = dict[int, Whole](), dict[int, tuple[Expr, int]](), list[Expr]()

    def rewritten(self, node: Expr, parts: list[Expr]) -> Expr:
        """`node`, with these in place of its operands."""
        if not all(a is b for a, b in zip(parts, operands(node))):
            node = alu(node.op, *parts, dtype=node.dtype) if isinstance(node, Alu) else Load(node.buffer, *parts)  # type: ignore[union-attr]
        self.kept.append(node)
        if isinstance(node, Alu) and node.op == "cast":
            return self._number(node) if node.dtype == f32 else self._byte(node) if node.dtype in RANGES else node
        return self._moved(node) if isinstance(node, Alu) and node.op in ("add", "sub") else node

    def _number(self, node: Alu) -> Expr:
        """The cast of a byte to f32."""
        if (known := self.sums.get(id(node.args[0]))) is None:
            if node.args[0].dtype in RANGES:
                self.whole[id(node)] = Whole(*RANGES[node.args[0].dtype], node)
            return node
        number, zero = known
        self.kept.append(out := k.add(number, float(zero)) if zero else number)
        self.sums[id(out)] = known
        return out

    def _moved(self, node: Alu) -> Expr:
        """A sum or a difference with a constant, of an integer."""
        x, other = node.args
        if not isinstance(other, Const) or not _is_small(other.value) or not {id(x)} & {*self.sums, *self.whole}:
            return node
        by = int(other.value) if node.op == "add" else -int(other.value)
        number, zero = self.sums.get(id(x), (x, 0))
        if zero + by == 0:
            return number
        if known := self.whole.get(id(x)):
            self.whole[id(node)] = Whole(known.least + by, known.most + by, node)
        return node

    def _byte(self, node: Alu) -> Expr:
        """The cast of a number to a byte."""
        if (found := _rounding(node)) is None:
            return node
        value, lowest = self._of_byte(found), found.least + found.zero == 0
        rounded = k.nearest(_kept(found) if value is None else value, dtype=i32)
        if value is None and not lowest:
            rounded = k.select(k.ne(found.source, found.source), k.const(-found.zero, i32), rounded)
        number = alu("cast", rounded, dtype=f32)
        byte = alu("cast", k.add(rounded, found.zero) if found.zero else rounded, dtype=node.dtype)
        free = k.round(found.value) if lowest and found.source is found.value else number
        self.whole[id(number)], self.sums[id(byte)] = Whole(found.least, found.most, free), (number, found.zero)
        self.kept += (number, byte)
        return byte

    def _of_byte(self, found: Rounding) -> Expr | None:
        """The value to round if it is a function of one integer: a product of that, within limits."""
        steps, e = list[Alu](), found.value
        while (known := self.whole.get(id(e))) is None:
            inner = [x for x in e.args if not isinstance(x, Const)] if isinstance(e, Alu) and e.op in FUNCTIONS else []
            if len(inner) != 1:
                return None
            steps.append(e)  # type: ignore[arg-type]
            (e,) = inner
        integers = results = np.arange(known.least, known.most + 1).astype(np.float32)
        with np.errstate(all="ignore"):
            for step in reversed(steps):
                args = [np.float32(x.value) if isinstance(x, Const) else results for x in step.args]
                results = FUNCTIONS[step.op](*args)
        results = np.clip(np.rint(results), found.least, found.most)
        factor = _factor(integers, results) if steps else None
        return None if factor is None else _limited(k.mul(known.free, factor), float(results[0]), float(results[-1]))


def _is_small(value: float) -> bool:
    return abs(value) <= MOST_ZERO and value == int(value)


def _rounding(node: Alu) -> Rounding | None:
    """The byte as a Rounding; None: it is something else."""
    (x,), (low, high), zero = node.args, RANGES[node.dtype], 0
    while isinstance(x, Alu) and x.op in ("min", "max") and isinstance(c := x.args[1], Const) and _is_small(c.value):
        low, high = (max(low, int(c.value)), high) if x.op == "max" else (low, min(high, int(c.value)))
        x = x.args[0]
    if isinstance(x, Alu) and x.op == "add" and isinstance(c := x.args[1], Const) and _is_small(c.value):
        x, zero = x.args[0], int(c.value)
    if not isinstance(x, Alu) or x.op != "round" or x.dtype != f32 or low >= high:
        return None
    (value,), scale = x.args, 1.0
    source = value
    if isinstance(value, Alu) and value.op == "div" and isinstance(c := value.args[1], Const) and SCALES[0] < c.value < SCALES[1]:
        source, scale = value.args[0], float(c.value)
    return Rounding(value, low - zero, high - zero, zero, source, scale)


def _kept(found: Rounding) -> Expr:
    """The value within the limits, near which it rounds to them; NaN becomes the lower one."""
    parts = None if found.source is found.value else _reciprocal(found.scale, found.least, found.most)
    if parts is None:
        return _limited(found.value, float(found.least), float(found.most))
    low, high = (float(np.float32(edge * found.scale)) for edge in (found.least, found.most))
    x = _limited(found.source, low, high)
    return k.fma(x, parts[0], k.mul(x, parts[1]))


def _limited(x: Expr, low: float, high: float) -> Expr:
    while isinstance(x, Alu) and isinstance(c := x.args[-1], Const):  # other limits, further out
        if not ((x.op == "max" and c.value <= low) or (x.op == "min" and c.value >= high)):
            break
        x = x.args[0]
    least = k.const(low, f32)
    return k.min(k.select(k.lt(least, x), x, least), high)


@lru_cache(1024)
def _reciprocal(scale: float, least: int, most: int) -> tuple[float, float] | None:
    """(high, low): x * high + (x * low), with one rounding of each product and the sum, rounds to the same integers as x / scale.
    None: it does not, for some x."""
    high = np.float32(1 / scale)
    low = np.float32((1 - scale * float(high)) / scale)
    middle = ((np.arange(least, most) + 0.5) * scale).astype(np.float32)
    x = (middle.view(np.int32)[:, None] + NEAR).view(np.float32)
    total, right = x.astype(np.float64) * np.float64(high) + (x * low), np.rint(x / np.float32(scale))
    found = [np.rint((total * (1 + way * SURE)).astype(np.float32)) for way in (-1, 0, 1)]
    return (float(high), float(low)) if all((right == each).all() for each in found) else None


def _factor(integers: np.ndarray, results: np.ndarray) -> float | None:
    """A factor c for which c * n, between the first and the last result, rounds to the result of every integer n; None: none."""
    first, last, n, wanted = results[0], results[-1], integers.astype(np.float64), results.astype(np.float64)
    with np.errstate(all="ignore"):
        above, below = (wanted - 0.5) / n, (wanted + 0.5) / n  # where it is not the first, or not the last one
    lows = [*above[(n > 0) & (wanted > first)], *below[(n < 0) & (wanted < last)]]
    highs = [*below[(n > 0) & (wanted < last)], *above[(n < 0) & (wanted > first)]]
    if not lows or not highs or not 0 < (low := max(lows)) <= (high := min(highs)):
        return None
    factor = np.float32((low + high) / 2)
    return float(factor) if (np.rint(np.clip(factor * integers, first, last)) == results).all() else None

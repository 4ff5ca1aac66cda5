"""Kernels as text: what was printed is read back to an equal kernel, and any other text is an error that names the line."""

from __future__ import annotations

import random
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from small_programs import convolution

from rlx.errors import ParseError
from rlx.ir import kernel as K
from rlx.ir.dtype import DTYPES, bool_, f32, f64, i32
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import kernel_key, print_kernel


def same(a: Any, b: Any) -> bool:
    """Whether two kernels are equal but for the names of variables and buffers, and share the same parts."""
    partner: dict[int, Any] = {}
    todo = [(a, b)]
    while todo:
        x, y = todo.pop()
        if type(x) is not type(y):
            return False
        if isinstance(x, tuple):
            if len(x) != len(y):
                return False
            todo += zip(x, y)
        elif is_dataclass(x) and not isinstance(x, type) and hasattr(type(x), "__slots__"):
            if id(x) in partner and not isinstance(x, (K.Const, K.View)):
                if partner[id(x)] is not y:
                    return False
                continue
            partner[id(x)] = y
            skip = {"name"} if isinstance(x, (K.Var, K.Buffer, K.Local)) else {"known"} if isinstance(x, K.Kernel) else set()
            todo += [(getattr(x, f.name), getattr(y, f.name)) for f in fields(x) if f.name not in skip]
        elif x != y and not (x != x and y != y):
            return False
    return True


def everything() -> K.Kernel:
    """A kernel with every record, and with what is awkward to write: odd names, NaNs, shared indices, an empty loop."""
    k = K.k
    x, y, table = K.Buffer("in", f32, 640), K.Buffer("out", f32, 640, True), K.Buffer("t", i32, 40)
    row, scratch = K.Local("l", f32, 8, per_row=True), K.Local("s", f64, 3)
    g, i, j, n = K.Var("g"), K.Var("i"), K.Var("j"), K.Var("n")
    total, last, kept = K.Var("r", f32), K.Var("c", f32), K.Var("x", bool_)
    at = k.add(k.mul(g, 64), i)  # shared: stands in a load and in a store
    inside = k.lt(k.cast(i, i32), K.Load(table, g))
    loaded = K.Load(x, at, kept)
    first, rank, held, origin = K.Var("first"), K.Var("rank"), K.Var("held", f32), K.Var("origin")
    body = (
        K.Let(kept, k.and_(inside, k.ne(K.const(-0.0, f32), K.const(float("nan"), f32)))),
        K.Check(inside, 1),
        K.Loop(j, 0, ()),
        K.Loop(
            n, 3, (K.Store(scratch, n, k.cast(loaded, f64)),), True,
            (K.Reduce(total, "max", loaded), K.Reduce(first, "argmin", k.neg(loaded))),
            (K.Carry(last, K.const(float("inf"), f32), k.add(last, loaded)),),
        ),
        K.Sort(
            n, 3, 2, k.cast(K.Load(scratch, n), f32), True, rank, held, origin,
            (K.Store(scratch, k.rem(origin, 3), k.cast(held, f64)),),
        ),
        K.Sort(j, 1, 1, k.add(j, first), False, n, origin, rank, ()),
        K.Store(y, at, k.select(kept, k.add(total, last), K.const(1e-45, f32)), kept),
    )  # fmt: skip
    return K.Kernel("a name", (x, y, table), (row, scratch), ((g, 10),), (K.Loop(i, 64, body, True),), ("sum", "two words"))


def test_every_record_reads_back() -> None:
    kernel = everything()
    text = print_kernel(kernel)
    assert same(kernel, parse_kernel(text)) and print_kernel(parse_kernel(text)) == text
    assert kernel_key(kernel) == text.split("\n", 1)[1] and text.startswith('kernel "a name" of sum "two words"\n')


def test_a_contraction_reads_back() -> None:
    k = K.k
    x, w, y = K.Buffer("x", f32, 64), K.Buffer("w", f32, 96), K.Buffer("y", f32, 24, True)
    row, scale = K.Local("mean", f32, 1, per_row=True), K.Local("scale", f32, 8, per_row=True)
    r, c, n, i, j = (K.Var(name) for name in "rcnij")
    total, acc = K.Var("total", f32), K.Var("acc", f32)
    read = K.Load(x, k.add(k.mul(r, 16), c))
    summed = K.Loop(n, 16, (), True, (K.Reduce(total, "add", K.Load(x, k.add(k.mul(r, 16), n))),))
    a = K.Computed(r, c, k.mul(read, K.Load(row, K.const(0))), f32, (summed, K.Store(row, K.const(0), total)))
    for b in (K.Operand(w, K.const(0), panel=8, group=2), K.Operand(w, K.const(2), -6, 1), K.Operand(w, K.const(0), 1, 6, 4)):
        stores = (K.Store(y, k.add(k.mul(i, 6), j), k.neg(acc)), K.Store(scale, j, acc))
        rows = (K.Loop(n, 6, (K.Store(y, n, K.Load(scale, n)),)),)
        body = K.Contract(i, j, 4, 6, 16, a, b, acc, stores, rows)
        kernel = K.Kernel("product", (x, w, y), (row, scale), (), (body,), ("matmul",), (K.Limit(i, K.const(3)),))
        text = print_kernel(kernel)
        assert same(kernel, parse_kernel(text)) and print_kernel(parse_kernel(text)) == text
        with pytest.raises(ParseError, match="the operand is 4 x 16, found 5 x 16"):
            parse_kernel(text.replace("< 4:", "< 5:"))


def test_rows_and_columns_in_levels_read_back() -> None:
    text = print_kernel(kernel := convolution())
    assert "[0; 4, 1; rows 4 to 36, 2 to 90; columns 6 to 18] @" in text
    assert same(kernel, parse_kernel(text)) and print_kernel(parse_kernel(text)) == text
    reversed_order = "; columns 6 to 18; rows 4 to 36"
    for wrong, message in (("; rows 0 to 36", "at least one step"), (reversed_order, "']'"), ("; rows", "steps")):
        with pytest.raises(ParseError, match=message):
            parse_kernel(text.replace("; rows 4 to 36, 2 to 90; columns 6 to 18", wrong))


def test_a_long_chain_is_printed_and_read_without_recursion() -> None:
    x, y = K.Buffer("x", f32, 1), K.Buffer("y", f32, 5000, True)
    value: K.Expr = K.Load(x, K.const(0))
    g = K.Var("g")
    at: K.Expr = g
    for n in range(3000):
        value, at = K.k.mul(value, value), K.k.add(at, n + 1)
    kernel = K.Kernel("chain", (x, y), (), ((g, 5),), (K.Store(y, at, value),))
    text = print_kernel(kernel)
    assert len(text) < 200_000 and same(kernel, parse_kernel(text))


def test_nan_keeps_its_bits() -> None:
    y = K.Buffer("y", f64, 1, True)
    odd = K.Const(float.fromhex("inf") - float.fromhex("inf"), f64)
    kernel = K.Kernel("nan", (y,), (), (), (K.Store(y, K.const(0), odd),))
    again = parse_kernel(print_kernel(kernel))
    assert again.body[0].value.value.hex() == "nan" and print_kernel(again) == print_kernel(kernel)


SORT = "sort i3 < 4:\n    value t0\n  then value v5:f32 from i6 to i4\n    b0[i4] = v5"
BAD = [
    ("b0[g2] = t0", "b0[g2] = t9", "line 5: t9 is not defined above"),
    ("b0[g2] = t0", "b1[g2] = t0", "line 5: the argument b1 is not written"),
    ("b0[g2] = t0", "b0[t0] = t0", "line 5: an index is index, found f32"),
    ("b0[g2] = t0", "b0[g2] = g2", "line 5: a value for b0 is f32, found index"),
    ("b0[g2] = t0", "b7[g2] = t0", "line 5: no buffer is called b7"),
    ("b0[g2] = t0", "b0[g2] = t0 if t0", "line 5: a guard is bool, found f32"),
    ("b0[g2] = t0", "  b0[g2] = t0", "line 5: the line is indented by 2 steps, expected 1"),
    ("b0[g2] = t0", "b0[g2] = add(t0):f32", "line 5: add takes 2 operands, found 1"),
    ("b0[g2] = t0", "b0[g2] = add(t0, g2):f32", "line 5: add of f32, index does not give f32"),
    ("b0[g2] = t0", "b0[g2] = plus(t0, t0):f32", "line 5: no scalar op is called 'plus'"),
    ("b0[g2] = t0", "b0[g2] = 1.5", "line 5: 1.5 is not of dtype index"),
    ("b0[g2] = t0", "b0[g2] = 2:bool", "line 5: 2 is not of dtype bool"),
    ("b0[g2] = t0", "check true:bool else 7", "line 5: no error has the code 7"),
    ("b0[g2] = t0", "native exchange(what=3) b0[0; 8; 1] = b1[0; 8; 1]", "line 5: attribute what of exchange takes one of"),
    ("b0[g2] = t0", "native nothing(a=3) b0[0; 8; 1] = b1[0; 8; 1]", "line 5: no op is called 'nothing'"),
    ("b0[g2] = t0", "native nothing() b0[0; 8; 1] = b1[0; 8, 2; 1]", "line 5: 2 dims have as many strides, found 1"),
    ("b0[g2] = t0", "for g3 < 4:\n    reduce r9:f32 = argmax t0", "line 6: the result of argmax is index, r9 is f32"),
    ("b0[g2] = t0", "for g3 < 4:\n    reduce r9 = argmin true:bool", "line 6: argmin takes numbers, found bool"),
    ("b0[g2] = t0", "for g3 < 4:\n    reduce r9 = argmean t0", "line 6: expected one of add, and, argmax, argmin"),
    ("b0[g2] = t0", "sort i3 < 4:\n    b0[i3] = t0\n    value t0", "line 7: a Store is where only names"),
    ("b0[g2] = t0", "sort i3 < 4:\n    value t0", "line 7: expected then value"),
    ("b0[g2] = t0", SORT.replace("t0", "true:bool"), "line 6: sort takes numbers, found bool"),
    ("b0[g2] = t0", SORT.replace("v5:f32", "v5:i32"), "line 7: v5 is i32, the values are f32"),
    ("b0[g2] = t0", SORT.replace("i6", "i6:i32"), "line 7: i6 is index, found i32"),
    ("b0[g2] = t0", SORT.replace("sort i3", "sort i3:i64"), "line 5: i3 is index, found i64"),
    ("b0[g2] = t0", SORT.replace("to i4", "at i4"), "line 7: expected 'to', found 'at'"),
    ("b0[g2] = t0", "for g3:f32 < 4:", "line 5: g3 is index, found f32"),
    ("b0[g2] = t0", SORT.replace("then", "  then"), "line 7: expected then value"),
    ("b0[g2] = t0", "for g3 < 4", "line 5: expected ':'"),
    ("b0[g2] = t0", "for g3 < -4:", "line 5: the number of iterations is at least 0"),
    ("b0[g2] = t0", "b0[g2] = t0\n  limit q < 4", "line 6: expected a statement"),
    ("b0[g2] = t0", "b0[g2] = " + "add(" * 40, "line 5: ops nested more than 32 deep"),
    ("t0 = b1[g2]", "limit q < 4\n  t0 = b1[g2]", "line 4: no loop or grid of the kernel has the variable q"),
    ("t0 = b1[g2]", "t0 = b1[g2]\n  t0 = b1[g2]", "line 5: the name t0 is taken"),
    ("f32[8])", "f99[8])", "line 3: expected a dtype"),
    ("grid", "grit", "line 3: expected 'grid'"),
    ("kernel", "colonel", "line 2: expected kernel NAME"),
    ("}", "", "line 6: expected '}'"),
    ("}", "}\n}", "line 7: expected nothing after the kernel"),
]
COPY = "\nkernel copy of identity\n(inout b0: f32[8], b1: f32[8]) grid (g2 < 8) {\n  t0 = b1[g2]\n  b0[g2] = t0\n}"


@pytest.mark.parametrize("old,new,expected", BAD, ids=[f"{n} {new[:30].strip()}" for n, (_, new, _) in enumerate(BAD)])
def test_malformed_text_is_a_parse_error_with_its_line(old: str, new: str, expected: str) -> None:
    assert print_kernel(parse_kernel(COPY)) == COPY.strip()
    assert old in COPY
    with pytest.raises(ParseError, match=re.escape(expected)):
        parse_kernel(COPY.replace(old, new, 1))


def test_any_damage_is_a_parse_error_or_another_kernel() -> None:
    draw = random.Random(7)
    text = print_kernel(everything())
    for _ in range(3000):
        at, size = draw.randrange(len(text)), draw.choice((0, 1, 1, 2, 10))
        new = draw.choice(["", "0", "-", "(", ")", "[", "]", ":", "t0", "g0", "\n", "  ", '"', "\\", "9" * 30, *DTYPES])
        damaged = text[:at] + new + text[at + size :]
        try:
            parse_kernel(damaged)
        except ParseError as e:
            assert re.match(r"line \d+: ", str(e))
    with pytest.raises(ParseError, match="is a str, got int"):
        parse_kernel(3)  # type: ignore[arg-type]

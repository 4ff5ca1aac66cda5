"""Channels last: ops on permuted operands, and transposes that move down a network."""

import numpy as np
import pytest

from rlx.ir import OPS, Shape, f32
from tests.op_cases import Case


def permuted_operands(case):
    """Numbers of the operands that are permuted with the result."""
    return [i for i, role in enumerate(case.op.roles.ljust(len(case.sample.shapes), "x")) if role == "x"]


def permutable(case):
    """True if these operands have the result's rank."""
    return all(len(case.sample.shapes[i]) == case.expected[0].ndim for i in permuted_operands(case))


CASES = [Case(op, i, f32) for op in OPS.values() if op.permuted is not None for i in range(len(op.samples))]
PERMUTED = [case for case in CASES if permutable(case)]


def turns(rank):
    """Permutations of so many dims: reversed, and rotated both ways."""
    order = tuple(range(rank))
    return {order[::-1], (*order[1:], *order[:1]), (*order[-1:], *order[:-1])}


@pytest.mark.parametrize("case", PERMUTED, ids=repr)
def test_an_op_with_the_attributes_for_permuted_operands_gives_the_permuted_result(case):
    op, arrays = case.op, list(case.inputs.values())
    attrs = op.make_attrs(dict(case.sample.attrs or {}))
    (want,) = case.expected
    operands = permuted_operands(case)
    for axes in turns(want.ndim):
        changed = op.permuted(attrs, axes, *(Shape(a.shape, d) for a, d in zip(arrays, case.dtypes)))
        moved = [a.transpose(axes) if i in operands else a for i, a in enumerate(arrays)]
        found = op.reference(op.make_attrs({**(vars(attrs) if attrs else {}), **changed}), *moved)
        np.testing.assert_array_equal(found, want.transpose(axes))

"""Target: what a compiler may know about a device. Plain facts; holding one touches no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx.ir.dtype import DType

if TYPE_CHECKING:
    from rlx.ir.graph import Node, Value


@dataclass(frozen=True)
class Producer:
    """What a target is told of an operand that could be computed inside of a contraction. `side`: 0 the left, 1 the right one.

    The product is [m, k] @ [k, n] at each of `batch` points; `repeats` of them share the operand. `work`: operations per element.
    """

    side: int
    m: int
    n: int
    k: int
    batch: int
    repeats: int
    dtype: DType
    work: float


@dataclass(frozen=True)
class Target:
    """Facts of one device.

    `dtypes`: names it stores and computes. `natives`: op name -> claim(node) giving None where the backend has a kernel
    of its own for that node, else the reason it has not; ops not in the table are decomposed or lowered to loops.
    `packs`: op name -> pack(node): the second operand of a claimed node, known before runs, in the form its kernel reads.
    `splits`: op name -> split(node): a claimed node in smaller ops, where those are more work at once for `threads`; or None.
    `followed`: claimed ops whose kernel takes what follows it: pointwise ops on its result, and on finished rows; and of those,
    `follows(node)`: whether that is quicker for this node.
    `computes(producer)`: whether a contraction is quicker if it computes that operand where it reads it, compared with a kernel
    that writes the operand to memory first.
    `panel(dtype name)`: columns per packed panel of a contraction's right operand (0: never packed), and how many of its rows
    lie interleaved. Where the operands differ, the names of both: "u8 i8".
    """

    name: str
    dtypes: frozenset[str]
    features: tuple[str, ...] = ()  # instruction-set facts that change generated code; part of every cache key
    vector_bytes: int = 16
    threads: int = 1
    alignment: int = 64  # bytes, of every buffer
    natives: Mapping[str, Callable[[Node], str | None]] = field(default_factory=dict, compare=False)
    packs: Mapping[str, Callable[[Node], Value]] = field(default_factory=dict, compare=False)
    splits: Mapping[str, Callable[[Node], Value | None]] = field(default_factory=dict, compare=False)
    followed: frozenset[str] = frozenset()
    follows: Callable[[Node], bool] = field(default=lambda node: True, compare=False)
    computes: Callable[[Producer], bool] = field(default=lambda producer: False, compare=False)
    panel: Callable[[str], tuple[int, int]] = field(default=lambda dtype: (0, 1), compare=False)

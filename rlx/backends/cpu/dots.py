"""Instructions that add the products of groups of elements to each sum of a vector, and the features that have them.

Kernels ask here by the dtypes of the operands, so one schedule serves VNNI, AVX512-BF16 and the instructions of aarch64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.ir.dtype import DType, u32, u64
from rlx.ir.target import Target
from rlx.records import record

if TYPE_CHECKING:  # targets ask for panels also where compiled programs come from the cache: what writes code is not loaded
    from rlx.host.emit import Emitter, V


@record
class Dot:
    """`group` products for each of `lanes` sums, by the LLVM intrinsic `name` on vectors of `element`, if the target has `needs`.

    `side` 1: lane by lane. 2: a matrix of 2 x 2 sums from two rows of a and two columns of b, a group of each. `signed`: the
    instruction takes no unsigned operand."""

    operands: str
    group: int
    lanes: int
    element: str
    name: str
    needs: tuple[str, ...]
    side: int = 1
    signed: bool = False

    @property
    def word(self) -> DType:
        """A group, as tiles move it."""
        return u32 if self.side == 1 else u64

    def operand(self, e: Emitter, words: V) -> V:
        """A vector of words as the instruction takes it."""
        inner = f"<{self.group * self.lanes // self.side} x {self.element}>"
        return words if words.ty == inner else e.op(inner, f"bitcast {words} to {inner}")

    def add(self, e: Emitter, total: V, a: V, b: V) -> V:
        """total + the products of a and b, words or operands. For `signed`, 128 was subtracted from each u8 of a."""
        a, b = self.operand(e, a), self.operand(e, b)
        suffix = (total.ty, a.ty) if self.needs[0] == "neon" and not self.name.endswith("bfmmla") else ()
        return e.intrinsic(self.name, total, a, b, suffix=suffix, returns=total.ty)


_ALL = (  # of those that a target has, the first
    Dot("bf16", 2, 16, "bfloat", "x86.avx512bf16.dpbf16ps.512", ("avx512bf16",)),
    Dot("bf16", 4, 4, "bfloat", "aarch64.neon.bfmmla", ("neon", "bf16"), side=2),
    Dot("u8 i8", 4, 16, "i8", "x86.avx512.vpdpbusd.512", ("avx512vnni",)),
    Dot("u8 i8", 8, 4, "i8", "aarch64.neon.usmmla", ("neon", "i8mm"), side=2),
    Dot("u8 i8", 4, 4, "i8", "aarch64.neon.usdot", ("neon", "i8mm")),
    Dot("u8 i8", 4, 4, "i8", "aarch64.neon.sdot", ("neon", "dotprod"), signed=True),
)
DOTS = {d.name: d for d in _ALL}
SUMS = {"bf16": "f32", "u8 i8": "i32"}  # operands -> the dtype that their products are summed in


def dot_of(target: Target, operands: str, side: int = 0) -> Dot | None:
    """The instruction for operands of this dtype, or of these two ("u8 i8": left, right); None: the target has none. `side`: only
    one of this kind."""
    found = (d for d in _ALL if d.operands == operands and side in (0, d.side) and set(d.needs) <= set(target.features))
    return next((d for d in found if 4 * d.lanes == target.vector_bytes), None)

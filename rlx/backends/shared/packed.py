"""Products with quantised weights that backends claim: which ones, and the panels in which their kernels read the weights.

With 32 rows to a panel and 32 elements to a turn, a CPU's vectors have a lane for each row, and a warp of a GPU has four adjacent
rows (one 16-byte load) in each lane.
"""

from __future__ import annotations

from rlx.ir.blocks import FORMATS, Panel
from rlx.ir.graph import CONSTANT, PARAM, Node, Value
from rlx.ir.ops.quant_pack import pack_quant

PANEL = 32  # rows of a panel
STEP = 32  # elements per iteration ("turn") of the innermost loop
DTYPES = ("f32", "bf16", "f16")


def claim(node: Node) -> str | None:
    """None if backends have a kernel for this node; else the reason why not."""
    x, packed = node.inputs[:2]
    if x.dtype.name not in DTYPES:
        return f"quantised weights multiply {', '.join(DTYPES)}, not {x.dtype.name}"
    p = panel(node.attrs.format)  # type: ignore[union-attr]
    f, fault = p.plain, p.fault()
    if fault or len(f.q.parts) > 2 or p.each(f.scales) > 2 or p.each(f.mins) > 1:
        return fault or f"no kernel for {f.name}: it has over two parts of an integer, two scales or one min in {STEP} elements"
    if not x.dims or not isinstance(x.dims[-1], int) or x.dims[-1] % f.block:
        return f"columns come in whole blocks of {f.block}, {x.shape} has {x.dims[-1] if x.dims else 'none'}"
    if x.shape.num_elements == 0 or packed.shape.num_elements == 0:
        return "there is nothing to multiply"
    return None if is_known(packed) else "only weights that are params are packed"


def claim_segments(node: Node) -> str | None:
    """The same for segment_matmul; backends that claim it multiply groups of rows of numbers too."""
    x, w, _ = node.inputs
    if x.shape.num_elements == 0 or w.shape.num_elements == 0:
        return "there is nothing to multiply"
    return claim(node) if node.attrs.format else None  # type: ignore[union-attr]


def panel(format: str) -> Panel:
    """The panels that kernels read."""
    return Panel(FORMATS[format], PANEL, STEP)


def is_known(value: Value) -> bool:
    node = value.node
    return node.op in (PARAM, CONSTANT) or (node.op.ahead and all(map(is_known, node.inputs)))


def packs(node: Node, *_: object) -> Value | None:
    """The weights of a claimed node, packed as kernels expect their second operand; None: they are numbers."""
    if not node.attrs.format:  # type: ignore[union-attr]
        return None
    return pack_quant(node.inputs[1], format=node.attrs.format, rows=PANEL, step=STEP)  # type: ignore[union-attr, return-value]


__all__ = ["PANEL", "STEP", "claim", "claim_segments", "is_known", "packs", "panel"]

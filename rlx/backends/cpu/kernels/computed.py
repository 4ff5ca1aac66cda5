"""Cost model for fusion: which operands a contraction computes itself (Target.computes), and which products with quantised
weights take an epilogue (Target.follows). From measured times.

A separate kernel for the operand is divided among the threads, writes the operand, and all threads wait for it. If the operand is
computed, each task evaluates its own rows (right operand: panels), once per group of the other side. The constants were
fitted to `benchmarks/fused_operands.py --force` on one and two threads.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.tiles import BLOCK_ROWS, SCRATCH, plan
from rlx.ir.dtype import f32
from rlx.ir.graph import Node
from rlx.ir.kernel import Buffer, Computed, Contract, Kernel, Operand, Var, const
from rlx.ir.target import Producer, Target

FOLLOWED = 1 << 14  # elements of the result: with 4096 columns, one row gains and sixteen lose
VECTOR_NS = 0.35  # time of one vector operation, including its share of loads and stores
SHARED_NS = 12_000  # work above this is shared by threads
STEP_NS = 50, 800  # overhead of one more step: on one thread, on several
BYTE_NS = 0.02  # per byte of the operand, for writing and reading it


def computes(target: Target, p: Producer) -> bool:
    """Whether the product is faster if it computes this operand."""
    size = p.dtype.itemsize
    elements = p.batch // max(1, p.repeats) * p.k * (p.n if p.side else p.m)
    if not elements * p.m * p.n or (not p.side and min(p.m, BLOCK_ROWS) * p.k * max(size, 2) > SCRATCH):
        return False  # blocks would have to be lower, and would read the other operand more often
    tasks = _tasks(target, p)
    copies = (tasks[0] if p.side else tasks[1] if tasks[0] > 1 else min(tasks[1], target.threads)) * p.repeats
    work = elements * p.work * VECTOR_NS / (target.vector_bytes // 4)
    apart = work / target.threads if work > SHARED_NS else work
    saved = STEP_NS[target.threads > 1] + elements * size * BYTE_NS / target.threads
    return work * copies / min(target.threads, max(1, tasks[2])) <= apart + saved


def follows(node: Node) -> bool:
    """Whether the epilogue of a product with quantised weights is faster than a separate kernel. A separate kernel streams whole
    rows. Panels of PANEL columns touch two cache lines of each row, which measured 2 to 5% slower for many long rows."""
    quantised = node.op.product is not None and node.attrs.format  # type: ignore[union-attr]
    return not quantised or node.shapes[0].num_elements <= FOLLOWED


def _tasks(target: Target, p: Producer) -> tuple[int, int, int]:
    """(blocks of rows, groups of columns, tasks) of the product with that operand."""
    panel, group = target.panel(p.dtype.name)
    acc = Var("acc", p.dtype.compute)
    made = Computed(Var("r"), Var("c"), const(0, f32), p.dtype)
    other = Operand(Buffer("b", p.dtype, p.k * p.n), const(0), p.n, 1, 0 if p.side else panel, 1 if p.side else group)
    left, right = (other, made) if p.side else (made, other)
    contract = Contract(Var("i"), Var("j"), p.m, p.n, p.k, left, right, acc, ())
    found = plan(Kernel("", (), (), ((Var("g"), p.batch),), (contract,)), contract, target)
    return found.blocks, found.groups, found.tasks

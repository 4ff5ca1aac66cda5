"""The CPU as a target of the compiler: the facts of rlx.host.processor, and how weights are packed for its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rlx.backends.cpu.dots import dot_of
from rlx.errors import UnknownDeviceError
from rlx.host import llvm, processor
from rlx.ir.dtype import DTYPES, product
from rlx.ir.kernel import Kernel
from rlx.ir.target import Target

MATRIX = {"bf16": "amx-bf16", "u8 i8": "amx-int8"}  # operands -> the feature of a matrix unit that multiplies them


def panel_of(target: Target, dtype: str, all_columns: int = 0) -> tuple[int, int]:
    """(columns, interleaved rows) of a packed panel. Columns: the width of a register tile of f32 (f64: half); 0: never packed.
    Rows: as many as one instruction sums products of (dots.py). `dtype`, `all_columns`: see Target.panel."""
    columns = 48 if target.vector_bytes == 64 else 16
    if columns == 48 and all_columns in (64, 256):
        columns = 64  # else a last panel of 16 reads all of a for few products
    if MATRIX.get(dtype) in target.features:
        columns = 32  # two blocks of the matrix unit
    operands = [DTYPES[name] for name in dtype.split()]
    total = product(operands[0], operands[-1])  # products are summed in its compute dtype
    floats = columns * 4 // max(4, total.itemsize) if total and total.is_float else 0
    found = columns if dtype == "u8 i8" else floats
    dot = dot_of(target, dtype)
    return found, dot.group if dot else 1


def step_of(target: Target, dtype: str) -> int:
    """See Target.step: those that one instruction sums products of."""
    group = panel_of(target, dtype)[1]
    return group * (16 if MATRIX.get(dtype) in target.features else 1)


def host_target(threads: int | None = None) -> Target:
    """The CPU of this process. `threads` None: the knob RLX_THREADS, else the number of CPUs it may use."""
    return _of_cpu(processor.host_target(threads))


def target_for(triple: str, cpu: str, features: Sequence[str] = (), threads: int = 1) -> Target:
    """Any CPU, also for cross-compilation; as rlx.host.processor.target_for. UnknownDeviceError: LLVM has no such triple."""
    found = _of_cpu(processor.target_for(triple, cpu, features, threads))
    try:
        llvm.check((triple, "generic", ""))
    except llvm.Rejected as fault:
        raise UnknownDeviceError(f"{triple!r} is no triple such as 'aarch64-linux-gnu': {fault}") from fault
    return found


def _of_cpu(target: Target) -> Target:
    panel, order = partial(panel_of, target), partial(_schedule, target)
    step = partial(step_of, target)
    return replace(target, channels_last=True, levels=True, control=True, panel=panel, step=step, schedule=order)


def _schedule(target: Target, kernel: Kernel) -> Kernel:
    from rlx.backends.cpu.schedule import schedule  # not needed where compiled programs come from the cache

    return schedule(kernel, target)

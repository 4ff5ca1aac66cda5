"""Checked mode (CompileOptions(checked=True)): a run that produces a NaN raises an error and changes no state."""

from __future__ import annotations

import numpy as np

from rlx.driver.backend import Executable
from rlx.errors import NumericsError
from rlx.runtime.binding import filled_rows, shaped


def check_numbers(executable: Executable, rows: int | None) -> None:
    """Called between steps and commit. NumericsError: an output or next state contains a NaN. `rows`: the active extent, or
    None."""
    program = executable.program
    named = [(f"output {o.name!r}", o.buffer, o.shape, o.active) for o in program.outputs]
    for step in program.commit:
        source, handle = step.args
        decl = program.buffers[handle]
        named.append((f"the next state of handle {decl.name!r}", source, decl.shape, ()))
    for label, buffer, shape, active in named:
        array = shaped(executable.read(buffer), shape)
        array = array if rows is None else filled_rows(array, active, rows)
        numbers = array.astype(np.float32) if shape.dtype.is_float else array
        if shape.dtype.kind in "fc" and (count := int(np.isnan(numbers).sum())):
            raise NumericsError(f"{program.name}: {label} has {count} NaN of {array.size} elements; no state was changed")

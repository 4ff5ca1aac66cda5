"""A backend outside the package: every kernel as plain C, compiled by the system's C compiler, run step by step.

It shows what a backend needs (docs/add_a_backend.md walks through it), and it is one to debug with: `texts()` is C that can be
read, changed and stepped through. The renderer is the shared C-style one, memory and steps are the shared stepwise executable's.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from rlx.backends.shared.c_dialect import FLAGS, C
from rlx.backends.shared.c_style import render
from rlx.backends.shared.codes import Codes
from rlx.backends.shared.long_sums import long_sums
from rlx.backends.shared.stepwise import StepwiseExecutable
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import CompileError, DeviceUnavailableError
from rlx.ir.dtype import DTYPES
from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import kernel_key
from rlx.ir.program import Program, kernel_labels
from rlx.ir.target import Target

Function = Callable[[ctypes.Array, ctypes.c_int32], None]


@cache
def compiler() -> str | None:
    """The path of a C compiler, if there is one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@dataclass(frozen=True)
class Code:
    """One kernel: its C text, its function in this process, and the bytes of machine code (of all that were compiled with it)."""

    text: str
    function: Function


@dataclass(frozen=True)
class CArtifact:
    """Artifact protocol (rlx.driver.backend)."""

    program: Program
    codes: dict[str, Code]  # by kernel_key

    def texts(self) -> dict[str, str]:
        return {label: self.codes[kernel_key(kernel)].text for kernel, label in kernel_labels(self.program).items()}


class CBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "c"

    def __init__(self) -> None:
        self._codes = Codes(compile_kernels)

    def probe(self) -> dict[str, str | None]:
        return {"c:0": None if compiler() else "there is no C compiler (cc, gcc, clang) on the PATH"}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        if index:
            raise DeviceUnavailableError(f"there is no c:{index}; there is c:0")
        return Target(name="c", dtypes=frozenset(DTYPES), features=(str(compiler()),), schedule=long_sums)

    def process_bytes(self) -> int:
        return 0

    def compile(self, program: Program) -> CArtifact:
        """CompileError: the C compiler refuses a kernel, which is a fault of the renderer."""
        kernels = [s.kernel for steps in program.phases.values() for s in steps]
        return CArtifact(program, self._codes.of(kernels))

    def load(
        self, artifact: CArtifact, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> StepwiseExecutable:  # fmt: skip
        steps = [s for phase in artifact.program.phases.values() for s in phase]
        functions = {id(s.kernel): artifact.codes[kernel_key(s.kernel)].function for s in steps}

        def run_kernel(kernel: Kernel, arrays: Sequence[np.ndarray]) -> int:
            pointers = (ctypes.c_void_p * max(1, len(arrays)))(*(a.ctypes.data for a in arrays))
            status = ctypes.c_int32(0)
            functions[id(kernel)](pointers, ctypes.byref(status))
            return status.value

        return StepwiseExecutable(artifact.program, run_kernel, params, handles, transport)


def compile_kernels(kernels: Sequence[tuple[str, Kernel]]) -> list[Code]:
    """One C file for all of them."""
    names = [f"kernel_{hashlib.sha256(key.encode()).hexdigest()[:16]}" for key, _ in kernels]
    texts = ["" if kernel.collective else render(kernel, C, name) for name, (_, kernel) in zip(names, kernels)]
    library = ctypes.CDLL(None) if not any(texts) else build(C.prelude + "\n".join(texts))
    return [Code(text, getattr(library, name) if text else no_code) for name, text in zip(names, texts)]


def build(source: str) -> ctypes.CDLL:
    """The file compiled and in memory; nothing of it stays on disk."""
    with tempfile.TemporaryDirectory(prefix="rlx-c-") as folder:
        path, made = Path(folder) / "kernels.c", Path(folder) / "kernels.so"
        path.write_text(source)
        command = [str(compiler()), *FLAGS, "-O0", "-shared", "-fPIC", "-o", str(made), str(path), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{' '.join(command)} failed:\n{done.stderr[:3000]}")
        return ctypes.CDLL(str(made))


def no_code(*_: object) -> None:
    raise CompileError("a collective is carried out by the driver; it has no code")

"""The CPU backend: kernels rendered as LLVM IR, compiled to object code, run by a pool of native workers.

Importing this module, asking for a target or probing loads no native library; compiling and loading do (llvmlite).
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlx.backends.cpu.target import host_target
from rlx.driver.params import ParamStore
from rlx.errors import DeviceUnavailableError
from rlx.ir.kernel import Kernel
from rlx.ir.program import Program
from rlx.ir.target import Target

if TYPE_CHECKING:
    from rlx.backends.cpu.emit import Rendered
    from rlx.backends.cpu.executable import CpuArtifact, CpuExecutable
    from rlx.ir.graph import Node

PHASES = ("prepare", "steps", "commit")


class CpuBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "cpu"

    def probe(self) -> dict[str, str | None]:
        return {"cpu:0": None if find_spec("llvmlite") else "llvmlite is not installed: pip install llvmlite"}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        """Facts of this process's CPU. DeviceUnavailableError: `index` is not 0."""
        if index:
            raise DeviceUnavailableError(f"there is no cpu:{index}; all CPUs of this process are cpu:0 (threads=n takes some)")
        return replace(host_target(threads), natives={"attention": _claim_attention})

    def compile(self, program: Program) -> CpuArtifact:
        """Object code of every distinct kernel, once. CompileError: LLVM refuses one, which is a fault of the renderer."""
        from rlx.backends.cpu.executable import CpuArtifact
        from rlx.backends.cpu.jit import compile_object
        from rlx.backends.cpu.render import render

        start = time.perf_counter()
        codes: dict[str, Rendered] = {}  # by kernel key
        names: dict[str, str] = {}
        order: dict[int, int] = {}  # kernel identity -> its code's number
        numbers: dict[str, int] = {}
        for kernel in kernels_of(program):
            key = kernel.key
            if key not in codes:
                codes[key] = render(kernel, program.target, f"rlx_{hashlib.sha256(key.encode()).hexdigest()[:16]}")
                names[key], numbers[key] = kernel.name, len(numbers)
            order[id(kernel)] = numbers[key]
        rendered = time.perf_counter()
        objects = tuple(compile_object(code.text, program.target, names[key]) for key, code in codes.items())
        done = time.perf_counter()
        uses = {phase: tuple(order[id(s.kernel)] for s in getattr(program, phase)) for phase in PHASES}
        timings = {"render_ms": (rendered - start) * 1e3, "llvm_ms": (done - rendered) * 1e3}
        return CpuArtifact(program, tuple(codes.values()), objects, uses, timings)

    def load(self, artifact: CpuArtifact, params: ParamStore | None = None, index: int = 0) -> CpuExecutable:
        """DeviceUnavailableError: the code uses instructions that this CPU lacks, or `index` is not 0."""
        from rlx.backends.cpu.executable import CpuCode, CpuExecutable

        self.target(index)
        return CpuExecutable(CpuCode(artifact), ParamStore() if params is None else params)


def kernels_of(program: Program) -> list[Kernel]:
    """The kernels of all phases in order, each object once."""
    return list({id(s.kernel): s.kernel for phase in PHASES for s in getattr(program, phase)}.values())


def _claim_attention(node: Node) -> str | None:
    from rlx.backends.cpu.kernels import attention

    return attention.claim(node)

"""The CPU backend: kernels rendered as LLVM IR, compiled to object code, run by a pool of worker threads.

Importing this module, asking for a target or probing loads no shared library; compiling and loading do (llvmlite).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlx.backends.cpu import pool
from rlx.backends.cpu.kernels import CLAIMED
from rlx.backends.cpu.target import host_target
from rlx.backends.shared.codes import KEPT, whole
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.errors import DeviceUnavailableError
from rlx.host import calls, llvm
from rlx.host.once import Ahead, Once, at_once, started
from rlx.host.processor import available_threads, missing_features, processor
from rlx.ir.cost import Roofline
from rlx.ir.kernel import Contract, Kernel, Native
from rlx.ir.kernel_text import kernel_key
from rlx.ir.program import Program
from rlx.ir.sections import sections_of
from rlx.ir.target import Target
from rlx.ir.tuning import Tiling
from rlx.records import record

if TYPE_CHECKING:
    from pathlib import Path

    from rlx.backends.cpu.abi import Rendered
    from rlx.backends.cpu.executable import CpuArtifact, CpuExecutable
    from rlx.driver.symmetric import SymmetricTransport

LLVM_LOADED = 38 << 20  # resident bytes of LLVM's library once it is loaded
FIRST_COMPILE = 44 << 20  # bytes a process grows by when it compiles a network: LLVM's library and heap, and graphs
WAITING_NS = 1 << 40  # assumed time of a step that waits for other ranks, so that no run with one counts as short


class CpuBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "cpu"

    def probe(self) -> dict[str, str | None]:
        if sys.platform != "linux":
            return {"cpu:0": f"it needs Linux in this version, and this is {sys.platform}; the device 'ref' computes anywhere"}
        return {"cpu:0": None if find_spec("llvmlite") else "llvmlite is not installed: pip install llvmlite"}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        """Facts of this process's CPU. DeviceUnavailableError: `index` is not 0."""
        if index:
            raise DeviceUnavailableError(f"there is no cpu:{index}; all CPUs of this process are cpu:0 (threads=n takes some)")
        return with_natives(host_target(threads))

    def process_bytes(self) -> int:
        from rlx.backends.cpu import memory

        held = max(0, memory.resident() - memory.allocations()["live_bytes"])
        first = FIRST_COMPILE * (_compiled.misses == 0)
        return held + first + LLVM_LOADED * (not llvm.loaded())

    def warm(self, target: Target) -> Callable[[Kernel, bool], None]:
        """Warming protocol."""
        if not llvm.loaded():
            started(_load_compiler)
        ahead = Ahead(_compiled.held, max(1, available_threads() - 1), _Job.weight, llvm.entered)  # this thread lowers meanwhile
        for name in ("render", "cost"):  # for `_generated`, whose thread would wait for the GIL after each file
            import_module(f"rlx.backends.cpu.{name}")
        return lambda kernel, once: ahead(_Job(kernel_key(kernel), target, (), kernel, once))

    counts_kernels = True

    def compile(
        self, program: Program, tilings: Mapping[str, Tiling] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> CpuArtifact:
        """Object code of every distinct kernel, compiled once per process. `tilings`: by kernel_key, see `axes`.

        CompileError: LLVM rejects a kernel, which is a bug in the renderer."""
        from rlx.backends.cpu.executable import CpuArtifact

        sections = dict(sections_of(program))
        phases = program.every_phase
        kernels = {id(k): k for k in (*(s.kernel for steps in phases.values() for s in steps), *sections.values())}
        keys = {i: kernel_key(kernel) for i, kernel in kernels.items()}
        chosen = {key: tuple(sorted(tiling.items())) for key, tiling in (tilings or {}).items()}
        run = {keys[id(s.kernel)] for phase, steps in phases.items() if phase != "prepare" for s in steps}
        run |= {keys[id(kernel)] for kernel in sections.values()}
        jobs = {i: _Job(keys[i], program.target, chosen.get(keys[i], ()), x, keys[i] not in run) for i, x in kernels.items()}
        slowest_first = sorted(dict.fromkeys(jobs.values()), key=_Job.weight, reverse=True)
        found = dict(zip(slowest_first, at_once(_compiled, slowest_first, progress)))
        made = {job: found[job] for job in jobs.values()}
        coded = {phase: [(s, made[jobs[id(s.kernel)]][0]) for s in steps] for phase, steps in phases.items()}
        alone = {i: made[jobs[id(kernel)]][0] for i, kernel in sections.items()}
        codes, objects = tuple(code for code, *_ in made.values()), tuple(image for _, image, _ in made.values())
        parts = {symbol: image for *_, parts in made.values() for symbol, image in parts.items()}
        return CpuArtifact(program, codes, (*objects, *parts.values()), coded, alone)

    def axes(self, kernel: Kernel, target: Target) -> Mapping[str, tuple[int, ...]]:
        from rlx.backends.cpu.render import axes

        return axes(kernel, target)

    def assembly(self, text: str, target: Target) -> str:
        """Assembling protocol (rlx.driver.backend). Empty for a collective, which has no code."""
        from rlx.host.jit import assembly

        return assembly(text, target) if "define " in text else ""

    def roofline(self, target: Target) -> Roofline:
        """Roofed protocol (rlx.driver.backend)."""
        from rlx.backends.cpu.roofline import roofline  # imported late: it generates code

        return roofline(target)

    def machine(self) -> str:
        return f"{processor()}, {self.compiler()}"

    def compiler(self) -> str:
        return llvm.compiler_version()

    def to_parts(self, artifact: CpuArtifact) -> tuple[Any, list[bytes]]:
        at = {code: i for i, code in enumerate(artifact.codes)}
        codes = [(c.symbol, c.tasks, c.scratch_bytes, c.work_ns, c.may_fail, c.streamed, c.keeps) for c in artifact.codes]
        coded = {phase: [at[code] for _, code in steps] for phase, steps in artifact.coded.items()}
        sections = [(i, at[code]) for i, code in artifact.sections.items()]
        return {"codes": codes, "coded": coded, "sections": sections}, list(artifact.objects)

    def from_parts(self, program: Program, code: Any, parts: Sequence[bytes], texts: Callable[[], dict[str, str]]) -> CpuArtifact:
        from rlx.backends.cpu.abi import Rendered
        from rlx.backends.cpu.executable import CpuArtifact

        made = [Rendered(symbol, "", *whole(rest)) for symbol, *rest in code["codes"]]
        coded = {
            phase: [(s, made[i]) for s, i in zip(steps, whole(code["coded"][phase]), strict=True)]
            for phase, steps in program.every_phase.items()
        }
        if len(made) > len(parts) or not all(isinstance(c.symbol, str) for c in made):
            raise ValueError(f"{len(parts)} objects for {len(made)} kernels, or symbols that are no names")
        if beyond := [c.symbol for steps in coded.values() for s, c in steps if c.streamed > len(s.args)]:
            raise ValueError(f"{beyond[0]} is fetched a buffer ahead that it does not have")
        sections = {range(len(program.prepare))[i]: made[at] for i, at in (whole(row) for row in code["sections"])}
        return CpuArtifact(program, tuple(made), tuple(parts), coded, sections, texts)

    def missing(self, features: Sequence[str], index: int = 0) -> Sequence[str]:
        return missing_features(features)

    def export(self, artifact: CpuArtifact, weights: Mapping[int, Any], extent: tuple[str, int] | None, folder: Path) -> Path:
        from rlx.backends.cpu.export import export

        return export(artifact, weights, extent, folder)

    def load(
        self, artifact: CpuArtifact, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> CpuExecutable:  # fmt: skip
        """DeviceUnavailableError: the code uses instructions that this CPU lacks, or `index` is not 0."""
        from rlx.backends.cpu.executable import CpuCode, CpuExecutable

        self.target(index)
        return CpuExecutable(CpuCode(artifact), params or ParamStore(), handles or HandleStore(), transport)


def _load_compiler() -> None:
    """Load LLVM, and generate the code that runs and calls every program."""
    with suppress(Exception):  # the compile raises it again
        llvm.load()
        pool.run_address()
        if calls.refusal() is None:
            calls.library()


@record
class _Job:
    """A kernel to compile. Jobs that give the same code are equal. `once`: it runs when params are set, and not in runs."""

    key: str
    target: Target
    tiling: tuple[tuple[str, int], ...]
    kernel: Kernel = field(compare=False)
    once: bool = False

    def weight(self) -> tuple[int, int]:
        """The order of the times that LLVM takes: up to 40 ms for a claimed op, 20 for a contraction, and less for loops."""
        kinds = (2 * isinstance(s, Native) + isinstance(s, Contract) for s in self.kernel.body)
        return max(kinds, default=0), len(self.key)


def _generated(job: _Job) -> tuple[Rendered, bytes, dict[str, bytes]]:
    """The code of a kernel, its object code, and that of the functions which it may share with others."""
    from rlx.backends.cpu.abi import Rendered
    from rlx.backends.cpu.cost import estimated_ns, may_fail
    from rlx.backends.cpu.render import render
    from rlx.host.emit import quick
    from rlx.host.jit import compile_object
    from rlx.host.parts import parted

    if job.kernel.collective:  # the executable supplies its function; the run waits: other threads need the GIL
        return Rendered("", f"; {job.kernel.collective.attrs}\n", 1, work_ns=WAITING_NS), b"", {}
    if job.kernel.flow:  # its rows are those of its bodies; how long they take depends on data
        return Rendered("", f"; {job.kernel.flow}\n", 1, work_ns=WAITING_NS), b"", {}
    symbol = f"rlx_{hashlib.sha256(job.key.encode()).hexdigest()[:16]}"
    code = render(job.kernel, job.target, symbol, dict(job.tiling))
    floats = all(b.dtype.is_float for b in job.kernel.buffers if not b.writable)  # unpacking bits would take 1.3 to 1.8 times
    torn = " trunc <" in code.text and " zext <" in code.text  # to 16 bits and back: LLVM aborts at 4 to 7 elements if QUICK
    once = job.once and floats and not torn
    text = quick(code.text) if once else code.text
    code = replace(code, text=text, work_ns=estimated_ns(job.kernel, job.target), may_fail=int(may_fail(job.kernel)))
    around, parts = (text, {}) if once else parted(text)
    shared = {symbol: _parts((part, job.target)) for symbol, part in parts.items()}
    return code, compile_object(around, job.target, job.kernel.name, keep=True), shared


def _compiled_part(part: tuple[str, Target]) -> bytes:
    from rlx.host.jit import compile_object

    return compile_object(*part, keep=True)


_compiled = Once(_generated, KEPT)  # ranks may be threads, which ask for the same kernels
_parts = Once(_compiled_part, KEPT)


@record
class _Kernels:
    """A function of a module of rlx.backends.cpu.kernels, imported at the first call."""

    module: str
    name: str

    def __call__(self, *args: Any, **named: Any) -> Any:
        return getattr(import_module(f"rlx.backends.cpu.kernels.{self.module}"), self.name)(*args, **named)


def with_natives(target: Target) -> Target:
    """`target` (any CPU, not only this one) with the claimed ops of this backend."""
    splits: dict[str, Any] = {"attention": partial(_Kernels("attention", "split"), threads=target.threads)}
    splits["dequant_matmul"] = partial(_Kernels("quant", "split"), target=target)
    splits["conv"] = _Kernels("grouped", "split")
    splits |= dict.fromkeys(("matmul", "flatten_matmul", "int8_matmul"), _Kernels("thin", "split"))
    packs = {"conv": _Kernels("grouped", "packs")}
    packs |= dict.fromkeys(("dequant_matmul", "segment_matmul"), _Kernels("quant", "packs"))
    computes = partial(_Kernels("computed", "computes"), target)
    follows, followed = _Kernels("computed", "follows"), frozenset({"attention", "conv", "dequant_matmul", "segment_matmul"})
    return replace(target, natives=NATIVES, packs=packs, splits=splits, computes=computes, followed=followed, follows=follows)


NATIVES = {op: _Kernels(module, "claim") for op, module in CLAIMED.items()}
NATIVES["segment_matmul"] = _Kernels("quant", "claim_segments")

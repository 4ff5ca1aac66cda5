"""The CUDA backend: kernels rendered as CUDA C++, compiled by NVRTC, replayed as CUDA graphs.

Importing this module, asking for a target or compiling needs no GPU; loading does. `pip install rlx[cuda]` brings the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from threading import Thread
from typing import Any

from rlx.backends.cuda import attention, direct, gemv_blocks, gemv_ring, scatter, segments, splits, turned, variances
from rlx.backends.cuda.code import (
    CudaCode,
    capability_of,
    compile_kernels,
    compiler_version,
    kernels_of,
    key_of,
    launches_of,
    order_of,
    ptx,
    shared_bytes,
    support,
)
from rlx.backends.cuda.executable import LAUNCHED, THREADS_EACH, CudaArtifact, CudaExecutable, alone, spaced
from rlx.backends.cuda.fills import spread
from rlx.backends.cuda.gemv import MOST_ROWS
from rlx.backends.cuda.gpu import PORTABLE, Functions, count, gpu, refusal
from rlx.backends.cuda.images import reads_windows
from rlx.backends.cuda.memory import CudaMemory
from rlx.backends.cuda.schedule import ALONE, COLUMN_BYTES, LONG, MULTIPROCESSORS
from rlx.backends.cuda.staging import ShortReads
from rlx.backends.cuda.tensor import pays_to_scale
from rlx.backends.cuda.tensor_rows import PART
from rlx.backends.shared import packed
from rlx.backends.shared.codes import Codes, whole
from rlx.driver.handles import HandleStore
from rlx.driver.memory import MEMORIES
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import DeviceUnavailableError, RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Node
from rlx.ir.kernel import Kernel
from rlx.ir.program import Program
from rlx.ir.sections import sections_of
from rlx.ir.target import Producer, Target

SUPPORT = ("rlx_end", "rlx_feed", "rlx_copy", "rlx_log")  # the kernels of support.h
BLOCKS = 0.75  # large blocks for each multiprocessor that keep the GPU busy: a block runs a point of a reduction
COMPUTED_ROWS, COMPUTED = 2, 40_000  # rows of a product that every block of it computes, and operations for each of them
REST_BYTES = 1 << 20  # of a buffer of a decoding step
ROW_TERMS = 8  # of a product whose rows are reduced in its kernel: a thread loads both operands of each term
COLUMNS = 32  # columns of a block that reduces rows down to one, a lane for each


class CudaBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "cuda"

    def __init__(self) -> None:
        self._codes: dict[tuple[str, int], Codes[CudaCode]] = {}  # by architecture and multiprocessors

    def probe(self) -> dict[str, str | None]:
        if (why := refusal()) is not None:
            return {"cuda:0": why}
        return {f"cuda:{i}": memory_of(i).gpu.refusal for i in range(count())}

    def begin(self, index: int) -> None:
        opened = gpu(index)

        def use() -> None:
            with suppress(RlxError):  # the next use of the GPU raises it again
                opened.use()

        Thread(target=use, name="rlx opens a GPU", daemon=True).start()

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        """DeviceUnavailableError: there is no such GPU. `threads` is not used: a GPU's are its own."""
        found = memory_of(index).gpu
        return target(found.arch, found.facts["multiprocessors"])

    def title(self, index: int) -> str:
        """The GPU in words, for `rlx devices`."""
        return gpu(index).title

    def process_bytes(self) -> int:
        return 0

    counts_kernels = True

    def compile(self, program: Program, progress: Callable[[int, int], None] | None = None) -> CudaArtifact:
        """CompileError: NVRTC rejects a kernel, which is a fault of the renderer."""
        (arch,) = program.target.features
        count = program.target.threads // THREADS_EACH
        codes = self._codes.setdefault((arch, count), Codes(lambda kernels, *say: compile_kernels(kernels, arch, count, *say)))
        apart: dict[int, str] = {}
        launches = launches_of(program, arch, count, lambda launch, why: apart.setdefault(launch[-1][-1], why))
        wanted: dict[str, list[Any]] = {name: [[[s.kernel]] for s in steps] for name, steps in program.phases.items()}
        sections = dict(sections_of(program))
        wanted["sections"] = [[[kernel]] for kernel in sections.values()]
        wanted["steps"] = [kernels_of(launch, program, count) for launch in launches]
        behind = replace(program, steps=program.commit)
        commits = launches_of(behind, arch, count)
        wanted["commit"] = [kernels_of(launch, behind, count) for launch in commits]
        found = codes.of_keys({key_of(stages): stages for launched in wanted.values() for stages in launched}, progress)
        coded = {name: [found[key_of(stages)] for stages in launched] for name, launched in wanted.items()}
        order = {"steps": tuple(map(order_of, launches)), "commit": tuple(map(order_of, commits))}
        return CudaArtifact(program, coded, order, support(arch), dict(zip(sections, coded.pop("sections"))), apart=apart)

    def compiler(self) -> str:
        return compiler_version()

    def assembly(self, text: str, target: Target) -> str:
        """Assembling protocol (rlx.driver.backend): PTX. Empty for a collective, which has no code."""
        return ptx(text, target.features[0]) if "__global__" in text else ""

    def to_parts(self, artifact: CudaArtifact) -> tuple[Any, list[bytes]]:
        at = {code.name: i for i, code in enumerate(artifact.codes)}
        coded = {name: [at[code.name] for code in codes] for name, codes in artifact.coded.items()}
        sections = [(i, at[code.name]) for i, code in artifact.sections.items()]
        codes = [code.described() for code in artifact.codes]
        head = {"codes": codes, "coded": coded, "launches": artifact.launches, "sections": sections}
        return head, [artifact.support, *(code.cubin for code in artifact.codes)]

    def from_parts(
        self, program: Program, code: Any, parts: Sequence[bytes], texts: Callable[[], dict[str, str]]
    ) -> CudaArtifact:
        helpers, *cubins = parts
        made = [CudaCode.read(row, cubin) for row, cubin in zip(code["codes"], cubins, strict=True)]
        coded = {name: [made[i] for i in whole(code["coded"][name])] for name in program.phases}
        launches = {name: tuple(tuple(whole(group)) for group in code["launches"][name]) for name in LAUNCHED}
        for name, steps in program.phases.items():
            groups = launches[name] if name in LAUNCHED else alone(steps)
            if sorted(n for group in groups for n in group) != list(range(len(steps))):
                raise ValueError("the launches are not the steps of the program")
            for group, found in zip(groups, coded[name], strict=True):
                if not steps[group[0]].kernel.collective and not len(found.more) == len(group) == sum(found.stages or (1,)):
                    raise ValueError(f"{found.name} is not the code of {len(group)} kernels")
        sections = {range(len(program.prepare))[i]: made[at] for i, at in (whole(row) for row in code["sections"])}
        return CudaArtifact(program, coded, launches, helpers, sections, texts)

    def missing(self, features: Sequence[str], index: int = 0) -> Sequence[str]:
        """Code for one architecture is not run on another."""
        return () if tuple(features) == self.target(index).features else features

    def load(
        self, artifact: CudaArtifact, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> CudaExecutable:  # fmt: skip
        memory, functions = memory_of(index), Functions()
        count = memory.gpu.facts["multiprocessors"]
        if wider := [c for c in artifact.coded["steps"] if c.table and c.blocks > count]:
            raise DeviceUnavailableError(
                f"{artifact.program.name}: its blocks wait for one another on {wider[0].blocks} multiprocessors, and "
                f"{memory.gpu.title} has {count}: compile it for this GPU"
            )
        run = list(spaced(artifact.coded["steps"], count))
        most = {c.name: c.shared for c in (*artifact.codes, *sorted(run, key=lambda c: c.shared))}
        images = [(c.cubin, c.name, max(c.shared, most[c.name]), c.waiting > 0) for c in artifact.codes if c.cubin]
        carved = any(c.shared in (ALONE, LONG) for c in artifact.codes)
        for image, name, shared, waits in (*images, *((artifact.support, name, 0, False) for name in SUPPORT)):
            functions[name] = memory.gpu.function(image, name, shared, functions, carved or waits)
        for code in (c for c in artifact.codes if c.waiting):
            if (room := count * memory.gpu.resident(functions[code.name], code.threads, most[code.name])) < code.waiting:
                raise DeviceUnavailableError(
                    f"{artifact.program.name}: its blocks wait for one another, {code.waiting} of them, and "
                    f"{memory.gpu.title} runs {room} at once: compile it for this GPU"
                )
        for code in {(c.name, c.shared, c.blocks): c for c in run if c.name in functions}.values():
            if not code.table and memory.gpu.width(functions[code.name]) <= PORTABLE:
                continue
            room = memory.gpu.in_clusters(functions[code.name], code.threads, code.shared)
            if room == 0:
                raise DeviceUnavailableError(
                    f"{artifact.program.name}: {memory.gpu.title} has no room for a cluster of the blocks of {code.name}: "
                    f"compile it for this GPU, or use a whole one"
                )
            if code.table and room is not None and room < code.blocks:
                raise DeviceUnavailableError(
                    f"{artifact.program.name}: its blocks wait for one another, {code.blocks} of them in pairs, and "
                    f"{memory.gpu.title} runs {room} at once: use a whole GPU, none of whose multiprocessors others have"
                )
        if memory.gpu.short is None:
            memory.gpu.short = ShortReads(memory.gpu, memory.gpu.function(artifact.support, "rlx_tell", 0, None))
        return CudaExecutable(artifact, memory, functions, params, handles, transport)


def target(arch: str, multiprocessors: int = MULTIPROCESSORS) -> Target:
    """Facts of a GPU architecture ("sm_90a"), which need not be in this machine."""
    strips = shared_bytes(arch) if capability_of(arch) >= 90 else 0
    products, softmax = partial(turned.packs, arch), partial(splits.softmax, strips)
    return Target(
        name="cuda", dtypes=frozenset(DTYPES), features=(arch,), quick=frozenset({"bf16"}), vector_bytes=16,
        threads=multiprocessors * THREADS_EACH, points_per_thread=BLOCKS / THREADS_EACH, point_elements=4096,
        cache_bytes=8 * COLUMNS, line_bytes=128, row_terms=ROW_TERMS, stores_narrow=True, shares_rows=True,
        channels_last=True, few_kernels=True, rest_bytes=REST_BYTES, alignment=256,
        natives={
            "attention": attention.claim, "conv": direct.claim, "dequant_matmul": packed.claim,
            "segment_matmul": packed.claim_segments,
        },
        packs={
            "conv": direct.packs, "dequant_matmul": packed.packs, "segment_matmul": packed.packs, "matmul": products,
            "int8_matmul": products,
        },
        rows=partial(turned.rows, arch),
        followed=frozenset({"attention", "conv", "dequant_matmul", "segment_matmul"}), computes=_computes,
        pairs=partial(_pairs, arch), factors=pays_to_scale, in_place=partial(reads_windows, arch),
        status_late=True, widens=frozenset(f"{a} {b}" for a in ("f16", "bf16") for b in ("f8e4m3", "f8e5m2")),
        part_columns=PART if arch == "sm_90a" else 0, column_bytes=COLUMN_BYTES, schedule=_scheduled,
        splits={
            "attention": splits.attention, "conv": direct.split, "top_k": splits.top_k, "softmax": softmax,
            "log_softmax": softmax, "variance": variances.split,
        },
        unclaimed={"attention": splits.large_heads},
    )  # fmt: skip


def _scheduled(kernel: Kernel) -> Kernel:
    """Target.schedule."""
    return scatter.scheduled(spread(kernel))


def _computes(producer: Producer) -> bool:
    """A product with very few rows computes them in every block: that costs less than another kernel."""
    cheap = producer.k * producer.work <= COMPUTED
    return producer.side == 0 and producer.m <= COMPUTED_ROWS and producer.batch == 1 and cheap


def _pairs(arch: str, node: Node) -> bool:
    """A product of few rows (gemv_ring.py, gemv_blocks.py), or one whose tiles tensor.py copies in bulk; columns are adjacent."""
    left, right = node.inputs[:2]
    *rows, depth = left.shape.static
    many, columns = math.prod(rows), node.shapes[0].static[-1:]  # two vectors have none
    whole = bool(columns) and columns[0] % (2 * packed.PANEL) == 0
    if node.op.name == "segment_matmul":
        return segments.in_panels(node) and whole if node.attrs.format else (  # type: ignore[union-attr]
            arch == "sm_90a" and many > COMPUTED_ROWS and segments.in_boxes(node)
        )
    if node.op.name == "dequant_matmul":
        return many <= gemv_blocks.MOST_PIECES and whole
    narrow = arch == "sm_90a" and left.dtype == right.dtype and left.dtype.name in ("f16", "bf16")
    few = gemv_ring.takes(many, depth, left.dtype.itemsize) or (whole and gemv_blocks.takes(many, depth))
    return narrow and right.node.op.name == "transpose" and (few or (many > MOST_ROWS * 2 and depth % 8 == 0))


@cache
def memory_of(index: int) -> CudaMemory:
    """Also where rlx.driver.Buffer finds it from now on."""
    made = CudaMemory(index)
    MEMORIES[made.device] = made
    return made


__all__ = ["CudaBackend", "target"]

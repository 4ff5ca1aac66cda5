"""From kernels to machine code of one architecture (cubins), by NVRTC. Needs no GPU."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlx.backends.cuda import attention, direct, flash
from rlx.backends.cuda.binned import BinLaunch, BinWriter, binned
from rlx.backends.cuda.chain import Chain, in_chains
from rlx.backends.cuda.chain_writer import NAME, ChainText, written
from rlx.backends.cuda.columns import ColumnsLaunch, ColumnsWriter, columns
from rlx.backends.cuda.contract import Tile, TileWriter, has_tiles, in_sums, tiled
from rlx.backends.cuda.dialect import prelude
from rlx.backends.cuda.fma import FmaLaunch, FmaWriter, by_fma, by_rows
from rlx.backends.cuda.fragments import FragmentLaunch, FragmentWriter, in_fragments
from rlx.backends.cuda.fronts import Fronted, fronted
from rlx.backends.cuda.gemv import GemvLaunch, GemvWriter, few_rows
from rlx.backends.cuda.gemv_blocks import BlocksLaunch, of_blocks
from rlx.backends.cuda.gemv_ring import RingLaunch, RingWriter, ring_of
from rlx.backends.cuda.gemv_writer import BlocksWriter
from rlx.backends.cuda.groups import Group, Stages, grouped, may_join
from rlx.backends.cuda.images import has_windows
from rlx.backends.cuda.joins import JoinLaunch, JoinWriter, joined
from rlx.backends.cuda.patched import PatchLaunch, PatchWriter, patched
from rlx.backends.cuda.render import WIDE, CudaWriter, arguments_of
from rlx.backends.cuda.replaced import ReplaceLaunch, ReplaceWriter, replacing
from rlx.backends.cuda.scatter import ScatterLaunch, ScatterWriter, scattered
from rlx.backends.cuda.schedule import LARGEST, MULTIPROCESSORS, Launch, TensorMap, as_loops, launch
from rlx.backends.cuda.segments import of_groups, segmented
from rlx.backends.cuda.select import SelectLaunch, SelectWriter, selected
from rlx.backends.cuda.sorts import DigitLaunch, DigitWriter, SortLaunch, SortWriter, sorted_rows
from rlx.backends.cuda.staged import StagedLaunch, StagedWriter, staged
from rlx.backends.cuda.staying import StayingLaunch, StayingWriter, staying
from rlx.backends.cuda.streamed import StreamLaunch, StreamWriter, streamed
from rlx.backends.cuda.strips import StripsLaunch, StripsWriter, strips
from rlx.backends.cuda.tensor import TensorLaunch, on_tensor_cores
from rlx.backends.cuda.tensor_writer import TensorWriter
from rlx.backends.cuda.thresholds import ThresholdLaunch, ThresholdWriter, threshold
from rlx.backends.cuda.transpose import TileLaunch, TileTransposer, in_tiles
from rlx.backends.cuda.warps import WarpLaunch, WarpWriter, on_warps
from rlx.backends.shared.codes import whole
from rlx.backends.shared.contract_loops import without_contract
from rlx.errors import CompileError
from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import kernel_key
from rlx.ir.program import Program
from rlx.records import record

MORE = frozenset({"scratch", "counters", "status", "halt", "early", "slots", "far"})  # arguments of kernels behind the buffers


@record
class CudaCode:
    """One launch: its CUDA C++, its cubin, and how it is launched. `more`: for each of its kernels, arguments behind the buffers.
    `early`: buffers that the last one reads before earlier launches of the run end, if none of them writes these. `experts`: the
    buffer with a matrix for each group, which may be in two tiers (experts.py). `table`, `direct`, `words`: of a chain
    (chain_writer.ChainText), which finds its operands by a table in device memory. `waiting`: as of its Launch."""

    name: str
    text: str
    cubin: bytes
    blocks: int
    threads: int
    shared: int
    scratch: int
    counters: int
    more: tuple[tuple[str, ...], ...]
    maps: tuple[TensorMap, ...] = ()
    early: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()  # of several kernels, how many are in each stage
    experts: tuple[int, ...] = ()
    table: tuple[tuple[int, int], ...] = ()
    direct: tuple[int, ...] = ()
    words: int = 0
    waiting: int = 0

    @property
    def held(self) -> int:
        """Bytes of device memory for the words and the table."""
        return -(-(self.words + 8 * len(self.table)) // 256) * 256

    def described(self) -> list[Any]:
        """All but the text and the cubin, for JSON."""
        maps = [[m.argument, m.offset, m.dtype, m.dims, m.strides, m.box, m.ends, m.steps] for m in self.maps]
        sizes = [self.blocks, self.threads, self.shared, self.scratch, self.counters, self.waiting]
        chained = [[n for entry in self.table for n in entry], self.direct, self.words]
        return [self.name, sizes, self.more, maps, self.early, self.stages, self.experts, chained]

    @staticmethod
    def read(row: Any, cubin: bytes) -> CudaCode:
        """From `described`. ValueError, TypeError: the row is no such thing."""
        name, sizes, more, maps, early, stages, experts, (table, direct, words) = row
        blocks, threads, shared, scratch, counters, *waiting = whole(sizes)  # none in files of earlier versions
        tensors = [
            TensorMap(whole([n])[0], whole([first])[0], dtype, *(tuple(whole(x)) for x in sizes))
            for n, first, dtype, *sizes in maps
        ]
        names = tuple(tuple(map(str, each)) for each in more)
        if not isinstance(name, str) or not {n for each in names for n in each} <= MORE:
            raise ValueError(f"{str(row)[:80]} describes no kernel")
        entries = tuple(zip(whole(table[::2]), whole(table[1::2]), strict=True))
        chained = entries, tuple(whole(direct)), *whole([words])
        known = names, tuple(tensors), tuple(whole(early)), tuple(whole(stages)), tuple(whole(experts)), *chained, *waiting
        return CudaCode(name, "", cubin, blocks, threads, shared, scratch, counters, *known)


BEYOND = 1 << 24  # elements by which the last part of a row may pass its end, at most
SMALL, MIDDLE = 99 << 10, 163 << 10
SHARED_BYTES = {80: MIDDLE, 86: SMALL, 87: MIDDLE, 89: SMALL, 120: SMALL, 121: SMALL}  # of a block, by compute capability


def capability_of(arch: str) -> int:
    return int(arch[3:].rstrip("af"))


def shared_bytes(arch: str) -> int:
    """Bytes of shared memory of a block, at most."""
    return SHARED_BYTES.get(capability_of(arch), LARGEST)


def launch_of(kernel: Kernel, arch: str = "sm_90a", multiprocessors: int = MULTIPROCESSORS) -> Launch:
    kernel, capability, most = by_rows(kernel), capability_of(arch), shared_bytes(arch)
    if of_groups(kernel):
        return segmented(kernel, arch, multiprocessors, most)
    if has_windows(kernel):
        return on_tensor_cores(kernel) or launch(as_loops(without_contract(kernel)), capability >= 90)
    if attention.native_of(kernel):
        few = attention.launch(kernel, multiprocessors, most, clusters=capability >= 90)
        return (flash.launch(kernel, multiprocessors) if arch == "sm_90a" else None) or few
    if conv := direct.conv_of(kernel):
        return direct.launch(kernel, conv)
    blocks = of_blocks(kernel, most=most, boxes=arch == "sm_90a")
    fragments, batch = in_fragments(kernel, multiprocessors, most), any(n > 1 for _, n in kernel.grid)
    ring = ring_of(kernel, multiprocessors, most) if capability >= 90 and not (fragments and batch) else None
    few = ring or fragments or few_rows(kernel, multiprocessors, most)
    if found := (blocks if blocks and blocks.passes == 1 else None) or few:
        return found
    if arch == "sm_90a" and (found := on_tensor_cores(kernel)):
        return found
    packed = None if blocks and blocks.plain else blocks
    other = packed or on_warps(kernel, capability=capability)
    sums = None if other else in_sums(kernel)
    if found := other or (None if sums else by_fma(kernel, multiprocessors, clusters=capability >= 90, most=most)):
        return found
    if has_tiles(kernel) and sums is None:
        return tiled(kernel)
    updates = replacing(kernel) or patched(kernel) or streamed(kernel) or binned(kernel, most) or scattered(kernel)
    sort = selected(kernel, most, multiprocessors) or sorted_rows(kernel, most, multiprocessors)
    if loops := sort or updates or threshold(kernel, multiprocessors) or staged(sums or kernel):
        return loops
    kernel, clusters = as_loops(sums or kernel), capability >= 90
    found = joined(kernel, partial(launch, clusters=clusters))
    found = found or columns(kernel) or strips(kernel, clusters, most) or in_tiles(launch(kernel, clusters))
    return staying(found, most) if clusters else found


def text_of(at: Launch, name: str) -> str:
    """The translation unit of one kernel."""
    own = (Path(__file__).parent / "hopper.h").read_text() if isinstance(at, TensorLaunch) else ""
    own += (Path(__file__).parent / "segments.h").read_text() if at.segments else ""
    text = WRITERS[type(at)](at).function(name)
    assert "rlx_begin();" in text, "every kernel waits for those in front of it"
    return prologue(is_wide(at)) + own + text


def is_wide(at: Launch) -> bool:
    """True if positions take 64 bits."""
    return at.points >= WIDE or any(b.size >= WIDE - BEYOND for b in at.kernel.buffers) or at.blocks * at.threads >= WIDE


def prologue(wide: bool) -> str:
    """The functions that kernels use. `wide`: positions take 64 bits."""
    return f"#define RLX_INDEX_BITS {64 if wide else 32}\n{prelude()}\n"


WRITERS: dict[type[Launch], type[CudaWriter]] = {
    Launch: CudaWriter, ColumnsLaunch: ColumnsWriter, StripsLaunch: StripsWriter, TileLaunch: TileTransposer,
    FmaLaunch: FmaWriter, TensorLaunch: TensorWriter, WarpLaunch: WarpWriter, Tile: TileWriter, JoinLaunch: JoinWriter,
    StagedLaunch: StagedWriter, StayingLaunch: StayingWriter, SortLaunch: SortWriter, DigitLaunch: DigitWriter,
    SelectLaunch: SelectWriter, ThresholdLaunch: ThresholdWriter,
    ScatterLaunch: ScatterWriter, ReplaceLaunch: ReplaceWriter, PatchLaunch: PatchWriter,
    StreamLaunch: StreamWriter, BinLaunch: BinWriter,
    GemvLaunch: GemvWriter, FragmentLaunch: FragmentWriter, BlocksLaunch: BlocksWriter,
    RingLaunch: RingWriter, direct.DirectLaunch: direct.DirectWriter,
    attention.AttentionLaunch: attention.AttentionWriter, flash.FlashLaunch: flash.FlashWriter,
}  # fmt: skip


def launches_of(
    program: Program, arch: str, multiprocessors: int = MULTIPROCESSORS,
    refused: Callable[[Stages, str], object] = lambda launch, why: None,
) -> Sequence[Stages | Chain]:  # fmt: skip
    """The launches of a run. `refused` is told why products of one row and attentions of a token are in no chain."""
    found = [None if s.kernel.collective else launch_of(s.kernel, arch, multiprocessors) for s in program.steps]
    small = [at if at and may_join(at) else None for at in found]
    hopper = int(arch[3:].rstrip("af")) >= 90
    launches = fronted(program, grouped(program, small, clusters=hopper), found)
    return list(in_chains(program, launches, found, multiprocessors, refused)) if hopper else launches


def order_of(launch: Stages | Chain) -> tuple[int, ...]:
    """The steps of a launch."""
    return tuple(n for each in (launch.launches if isinstance(launch, Chain) else [launch]) for stage in each for n in stage)


def kernels_of(launch: Stages | Chain, program: Program, multiprocessors: int) -> Kernels | ChainText:
    """The part of a launch that its code depends on."""
    if isinstance(launch, Chain):
        return written(launch, program, multiprocessors)
    return [[program.steps[n].kernel for n in stage] for stage in launch]


def early_of(at: Launch) -> tuple[int, ...]:
    found = getattr(at, "early", None)
    return found if isinstance(found, tuple) else () if found is None else (found,)


Kernels = Sequence[Sequence[Kernel]]  # stages of a launch


def key_of(stages: Kernels | ChainText) -> str:
    if isinstance(stages, ChainText):
        return repr((stages.text, stages.table))
    return "\n\n".join("\n".join(kernel_key(kernel) for kernel in stage) for stage in stages)


def compile_kernels(
    launches: Sequence[tuple[str, Kernels | ChainText]], arch: str, count: int,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[CudaCode]:  # fmt: skip
    """The code of each launch (by the key_of its kernels), compiled in threads. CompileError: a fault of the renderer.
    `count`: multiprocessors. `progress(done, total)` counts launches."""

    def one(keyed: tuple[str, Kernels | ChainText]) -> CudaCode:
        key, stages = keyed
        name = f"rlx_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        if isinstance(stages, ChainText):
            text = prologue(False) + stages.text.replace(NAME, name)
            sizes = (stages.blocks, stages.threads, stages.shared, 0, 0)
            chained = stages.table, stages.direct, stages.words
            return CudaCode(name, text, cubin(text, arch), *sizes, stages.more, (), (), stages.stages, (), *chained)
        (kernel, *others), *later = stages
        if kernel.collective:
            return CudaCode(name, f"// {kernel.collective.attrs}\n", b"", 0, 0, 0, 0, 0, ())
        if others or later:
            return together(name, stages)
        at = launch_of(kernel, arch, count)
        text, s = text_of(at, name), at.segments
        return CudaCode(
            name, text, cubin(text, arch), at.blocks, at.threads, at.shared, at.scratch, at.counters,
            (tuple(arguments_of(at)),), at.maps, early_of(at), experts=(kernel.buffers.index(s.weights),) if s else (),
            waiting=at.waiting,
        )

    def together(name: str, stages: Kernels) -> CudaCode:
        keys, launches = [list(map(kernel_key, stage)) for stage in stages], [[launch_of(k, arch) for k in x] for x in stages]
        group = (Fronted if isinstance(launches[-1][0], attention.AttentionLaunch) else Group)(keys, launches)
        text = prologue(any(map(is_wide, group.members))) + group.function(name)
        more = tuple(tuple(arguments_of(at)) for at in group.members)
        sizes = (group.blocks, group.threads, group.shared, group.scratch, group.counters)
        early, counts = early_of(group.members[-1]), tuple(map(len, stages))
        return CudaCode(name, text, cubin(text, arch), *sizes, more, early=early, stages=counts)

    import_module("cuda.core")  # before the threads: its import is not safe in several at once

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as threads:
        made: list[CudaCode] = []
        progress(0, len(launches))
        for code in threads.map(one, launches):
            made.append(code)
            progress(len(made), len(launches))
        return made


def compiler_version() -> str:
    """Name and version of the package that brings NVRTC. Loads no library."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12", "cuda-bindings"):
        with suppress(PackageNotFoundError):
            return f"{package} {version(package)}"
    return "NVRTC of unknown version"


@cache
def support(arch: str) -> bytes:
    """The machine code of support.h: kernels of the executable itself."""
    return cubin(prologue(True) + (Path(__file__).parent / "support.h").read_text(), arch)


def ptx(text: str, arch: str) -> str:
    """The same code as PTX, for readers."""
    from cuda.bindings import nvrtc  # type: ignore[reportAttributeAccessIssue]

    def check(found: tuple[Any, ...]) -> Any:
        if int(found[0]):
            raise CompileError(f"NVRTC gives no PTX for {arch}: {found[0]}")
        return found[1] if len(found) > 1 else None

    program = check(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={arch.replace('sm_', 'compute_')}".encode(), b"--std=c++17", b"--fmad=false"]
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        made = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, made))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return made.rstrip(b"\0").decode()


def options_of(arch: str, **more: Any) -> Any:
    """Options of NVRTC. `minimal` leaves out textures and functions of the CUDA runtime, whose declarations take 5 ms."""
    from cuda.core import ProgramOptions  # type: ignore[reportAttributeAccessIssue]

    return ProgramOptions(arch=arch, std="c++17", fma=False, minimal=True, **more)


def cubin(text: str, arch: str) -> bytes:
    from cuda.core import Program  # type: ignore[reportAttributeAccessIssue]

    try:
        options = options_of(arch)
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except Exception as e:
        raise CompileError(f"NVRTC rejects a kernel for {arch}: {str(e)[:3000]}") from e


__all__ = [
    "CudaCode", "Kernels", "capability_of", "compile_kernels", "compiler_version", "cubin", "kernels_of", "key_of", "launch_of",
    "launches_of", "options_of", "order_of", "ptx", "shared_bytes", "support", "text_of", "whole",
]  # fmt: skip

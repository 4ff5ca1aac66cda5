"""Facts of a CPU as a Target: instruction sets, vector width, threads this process may use.

The first two features name the LLVM triple and the baseline CPU, the others the instruction sets that generated code may
use. Code is a function of the Target alone, so an object made on one machine runs on every other with those features.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rlx import knobs
from rlx.errors import CompileError
from rlx.ir.target import Target

DTYPES = frozenset("f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 i8 u64 u32 u16 u8 bool c64".split())
# Instruction sets that change what is generated, by LLVM's names; a baseline CPU implies the ones listed with it.
X86 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vnni")
AMX = ("amx-tile", "amx-bf16", "amx-int8")  # used where RLX_AMX says so and the system lets this process
BASELINES = {"x86-64-v4": X86[:7], "x86-64-v3": X86[:3], "x86-64": ()}
UNLIMITED = 1 << 30  # CPUs, where no quota is set


@cache
def host_features() -> tuple[str, ...]:
    """This machine: "triple=…", "cpu=…" (its x86-64 level, or generic), then the features of X86 (or neon) it has."""
    triple, has = _linux_x86() or _asked_of_llvm()
    if not triple.startswith("x86_64"):
        return f"triple={triple}", "cpu=generic", "neon"
    features = tuple(f for f in X86 if f in has)
    amx = tuple(f for f in AMX if f in has) if knobs.AMX.get() and "avx512bw" in has else ()
    features += amx if amx and _may_use_tiles() else ()
    cpu = next(name for name, needs in BASELINES.items() if set(needs) <= set(features))
    return f"triple={triple}", f"cpu={cpu}", *features


def _linux_x86(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]] | None:
    """(triple, features by LLVM's names) as the kernel says, which costs nothing; None where it does not say."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not cpuinfo.is_file():
        return None
    with cpuinfo.open() as f:
        flags = next((line for line in f if line.startswith("flags")), "").partition(":")[2].split()
    plain = {flag.replace("_", "") for flag in flags}
    found = frozenset(f for f in X86 + AMX if f.replace("-", "") in plain)
    return ("x86_64-unknown-linux-gnu", found) if flags else None


@cache
def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of this machine's CPU, as far as the system says."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _asked_of_llvm() -> tuple[str, frozenset[str]]:
    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    x86 = triple.startswith("x86_64")
    return triple, frozenset(f for f, here in llvm.get_host_cpu_features().items() if here) if x86 else frozenset()


def _may_use_tiles() -> bool:
    """Ask Linux for the registers of AMX, which a process has to before their first use; False: refused, or another system."""
    request, tile_data, system_call = 0x1023, 18, 158  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, arch_prctl on x86-64
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(system_call, request, tile_data) == 0


def host_target(threads: int | None = None) -> Target:
    """The CPU of this process. `threads` None: what the knob RLX_THREADS says, else as many as it may use."""
    return _target(host_features(), threads or knobs.THREADS.get() or available_threads())


def target_for(triple: str, cpu: str, features: Sequence[str] = (), threads: int = 1) -> Target:
    """A CPU that need not be here: `target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",))`. An x86-64 level as `cpu`
    brings its features with it."""
    named = dict.fromkeys((*BASELINES.get(cpu, ()), *features))
    return _target((f"triple={triple}", f"cpu={cpu}", *named), threads)


def machine_of(target: Target) -> tuple[str, str, str]:
    """(triple, cpu, feature string) as LLVM wants them. CompileError: not a CPU target."""
    facts = dict(f.split("=", 1) for f in target.features if "=" in f)
    if "triple" not in facts or "cpu" not in facts:
        raise CompileError(f"target {target.name!r} with features {target.features} names no triple and cpu: not a CPU target")
    return facts["triple"], facts["cpu"], ",".join("+" + f for f in target.features if "=" not in f)


def missing_features(target: Target) -> tuple[str, ...]:
    """What code made for `target` needs and this machine lacks: () where it can run here."""
    here = host_features()
    triple, _, _ = machine_of(target)
    other = () if here[0].startswith(f"triple={triple.split('-')[0]}-") else (f"triple={triple}",)
    return *other, *(f for f in target.features if "=" not in f and f not in here)


def _target(features: tuple[str, ...], threads: int) -> Target:
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(features)
    vector_bytes = 64 if wide else 32 if "avx2" in features else 16
    return Target("cpu", DTYPES, features, vector_bytes, threads)


# -- threads -------------------------------------------------------------------------------------------------------


def usable_cpus() -> int:
    """CPUs in this thread's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """CPUs in this process's affinity mask, but no more than its cgroup quota (rounded up) pays for; at least 1."""
    return max(1, min(usable_cpus(), cgroup_quota()))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs that the cgroups (v1 or v2) of this process and their parents grant; UNLIMITED where none limits it."""
    granted: list[float] = [UNLIMITED]
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux, or /proc not mounted: no quota to read
        return UNLIMITED
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for top in (root, root / "unified") if not controllers else (root / controllers, root / "cpu", root):
            here = top / path.lstrip("/")
            granted += [_quota_of(folder) for folder in (here, *here.parents) if folder.is_relative_to(top)]
    return max(1, math.ceil(min(granted)))


def _quota_of(folder: Path) -> float:
    """CPUs granted by one cgroup folder: cpu.max ("max 100000" or "150000 100000"), or v1's pair of files."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
    except (OSError, ValueError):  # the folder is not mounted here, or has no cpu controller
        return UNLIMITED
    return UNLIMITED if quota == "max" or int(quota) <= 0 else int(quota) / int(period)

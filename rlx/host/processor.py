"""The Target of a CPU: instruction sets, vector width, and the number of threads that this process may use.

The first two features name the LLVM triple and the baseline CPU, the others the instruction sets that generated code may use.
Code depends on the Target alone, so an object compiled on one machine runs on every other one with those features.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from rlx import knobs
from rlx.errors import CompileError, OptionError, UnknownDeviceError
from rlx.ir.target import Target

DTYPES = frozenset("f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 i8 u64 u32 u16 u8 bool c64".split())
# Instruction sets that affect generated code, by LLVM's names.
X86 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vnni", "avx512fp16")
AMX = ("amx-tile", "amx-bf16", "amx-int8")  # used if RLX_AMX is not 0 and the system permits it
# aarch64: where Linux tells a process of each, as (entry of the auxiliary vector: AT_HWCAP or AT_HWCAP2, bit)
ARM = {"neon": (16, 1), "fullfp16": (16, 10), "dotprod": (16, 20), "fp16fml": (16, 23), "i8mm": (26, 13), "bf16": (26, 14)}
LEVELS = {"x86-64-v4": X86[:7], "x86-64-v3": X86[:3], "x86-64": ()}
CPUS = {  # architecture -> LLVM's names of its CPUs that target_for takes -> those of the instruction sets above that they have
    "x86_64": {
        **LEVELS, **dict.fromkeys(("haswell", "skylake", "znver2", "znver3"), X86[:3]), "skylake-avx512": X86[:7],
        **dict.fromkeys(("cascadelake", "icelake-server"), (*X86[:7], "avx512vnni")),
        **dict.fromkeys(("znver4", "znver5"), X86[:9]), "sapphirerapids": X86 + AMX,
    },
    "aarch64": {
        **dict.fromkeys(("cortex-a57", "cortex-a72"), ("neon",)),
        **dict.fromkeys(("cortex-a76", "neoverse-n1"), ("neon", "fullfp16", "dotprod")),
        "apple-m1": ("neon", "fullfp16", "dotprod", "fp16fml"),
        **dict.fromkeys(("neoverse-v1", "neoverse-n2", "neoverse-v2", "apple-m2"), tuple(ARM)),
    },
}  # fmt: skip
MAX_THREADS = 1024
UNLIMITED = 1 << 30  # number of CPUs if no quota is set
REREAD = 1 << 16  # Target.reread of processors with AMX
USUAL_CACHE = 1 << 20  # bytes of second-level cache of a core of a machine that is not this one


@cache
def host_features() -> tuple[str, ...]:
    """This machine: "triple=…", "cpu=…" (its x86-64 level, or generic), then the features of X86 or ARM it has."""
    triple, has = _linux_x86() or _linux_arm() or _asked_of_llvm()
    if not triple.startswith("x86_64"):
        return f"triple={triple}", "cpu=generic", *(f for f in ARM if f in has)
    features = tuple(f for f in X86 if f in has)
    amx = tuple(f for f in AMX if f in has) if knobs.AMX.get() and "avx512bw" in has else ()
    features += amx if amx and _may_use_tiles() else ()
    cpu = next(name for name in LEVELS if set(LEVELS[name]) <= set(features))
    return f"triple={triple}", f"cpu={cpu}", *features


def _linux_x86(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]] | None:
    """(triple, features by LLVM's names) from /proc/cpuinfo, without loading LLVM. None: it is not available."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not cpuinfo.is_file():
        return None
    with cpuinfo.open() as f:
        flags = next((line for line in f if line.startswith("flags")), "").partition(":")[2].split()
    plain = {flag.replace("_", "") for flag in flags}
    found = frozenset(f for f in X86 + AMX if f.replace("-", "") in plain)
    return ("x86_64-unknown-linux-gnu", found) if flags else None


def _linux_arm(told: Callable[[int], int] | None = None) -> tuple[str, frozenset[str]] | None:
    """The same from the auxiliary vector. `told`: the value of one of its entries."""
    if told is None:
        if sys.platform != "linux" or platform.machine() != "aarch64":
            return None
        told = ctypes.CDLL(None).getauxval
        told.restype, told.argtypes = ctypes.c_ulong, [ctypes.c_ulong]  # pyright: ignore
    return "aarch64-unknown-linux-gnu", frozenset(f for f, (entry, bit) in ARM.items() if told(entry) >> bit & 1)


@cache
def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of this machine's CPU, if the system reports it, else its architecture."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


@cache
def core_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of second-level cache that a core of this machine has: its share, where cores have one together. USUAL_CACHE if the
    system does not say."""
    try:
        levels = {(f / "level").read_text().strip(): f for f in caches.glob("index*") if "Instr" not in (f / "type").read_text()}
        kilobytes = int((levels["2"] / "size").read_text().strip().removesuffix("K"))
        cpus = [len(cpu_list((levels[n] / "shared_cpu_list").read_text())) for n in "12"]
        return (kilobytes << 10) * cpus[0] // cpus[1]  # threads of one core share its first level
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return USUAL_CACHE


def cpu_list(text: str) -> list[int]:
    """The numbers in Linux's notation: "0-3,8"."""
    spans = [part.split("-") for part in text.strip().split(",")]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]


def _asked_of_llvm() -> tuple[str, frozenset[str]]:
    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    has = frozenset(f for f, here in llvm.get_host_cpu_features().items() if here)
    return triple, has | {"neon"} if triple.startswith(("aarch64", "arm64")) else has


def _may_use_tiles() -> bool:
    """Request permission for AMX registers, which Linux requires before their first use. False: refused, or not Linux."""
    request, tile_data, system_call = 0x1023, 18, 158  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, arch_prctl on x86-64
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(system_call, request, tile_data) == 0


def host_target(threads: int | None = None) -> Target:
    """The CPU of this process. `threads` None: the value of RLX_THREADS, else as many as the process may use, to MAX_THREADS.
    OptionError: more are asked for."""
    asked = threads or knobs.THREADS.get()
    if asked > MAX_THREADS:
        raise OptionError(f"threads={asked}: give at most {MAX_THREADS:,}; this process may use {available_threads():,} CPUs")
    return _target(host_features(), asked or min(available_threads(), MAX_THREADS), core_cache_bytes())


def fetches_ahead(features: Sequence[str]) -> bool:
    """Whether code that reads or writes large arrays in order should prefetch them. Intel's server cores with AVX512-FP16, whose
    third-level cache is slow, are 1.1 to 1.7 times as fast with it (loops) or 1.1 to 1.4 times (weights of one row, or of
    experts with few); AMD's of Zen 5 as fast as without, or a little slower."""
    return "avx512fp16" in features


def plain_target() -> Target:
    """One thread of any CPU of this process's architecture."""
    triple = host_features()[0].removeprefix("triple=")
    return target_for(triple, "x86-64" if triple.startswith("x86_64") else "generic")


def target_for(triple: str, cpu: str, features: Sequence[str] = (), threads: int = 1) -> Target:
    """Any CPU, not necessarily this one: `target_for("aarch64-linux-gnu", "neoverse-n2")`. `cpu`: one of CPUS, whose features it
    has, or "generic". UnknownDeviceError: it is no such name."""
    cpus = {"generic": (), **CPUS.get(triple.partition("-")[0].replace("arm64", "aarch64"), {})}
    if cpu not in cpus:
        known = f"{', '.join(cpus)}; for another one give generic and its features"
        raise UnknownDeviceError(f"{cpu!r} is not among the CPUs of {triple!r}: {known}")
    named = dict.fromkeys((*cpus[cpu], *features))
    return _target((f"triple={triple}", f"cpu={cpu}", *named), threads)


def machine_of(target: Target) -> tuple[str, str, str]:
    """(triple, cpu, feature string) in LLVM's format. CompileError: not a CPU target."""
    facts = dict(f.split("=", 1) for f in target.features if "=" in f)
    if "triple" not in facts or "cpu" not in facts:
        raise CompileError(f"target {target.name!r} with features {target.features} names no triple and cpu: not a CPU target")
    return facts["triple"], facts["cpu"], ",".join("+" + f for f in target.features if "=" not in f)


def missing_features(features: Sequence[str]) -> tuple[str, ...]:
    """Features (Target.features) that code needs and this machine lacks. Empty: it can run here."""
    here = host_features()
    triple = next((f for f in features if f.startswith("triple=")), "triple=unknown")
    other = () if here[0].startswith(f"{triple.split('-')[0]}-") else (triple,)
    return *other, *(f for f in features if "=" not in f and f not in here)


def _target(features: tuple[str, ...], threads: int, core_cache: int = USUAL_CACHE) -> Target:
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(features)
    vector_bytes = 64 if wide else 32 if "avx2" in features else 16
    reread = REREAD if "amx-tile" in features else 0
    return Target("cpu", DTYPES, features, vector_bytes, threads, core_cache_bytes=core_cache, reread=reread)


# -- threads -------------------------------------------------------------------------------------------------------


def usable_cpus() -> int:
    """CPUs in this thread's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_threads() -> int:
    """CPUs in this process's affinity mask, but at most its cgroup quota (rounded up); at least 1."""
    return max(1, min(usable_cpus(), cgroup_quota()))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """CPU quota of this process's cgroups (v1 or v2) and their parents, rounded up to whole CPUs. UNLIMITED: there is none."""
    try:
        folders = _cgroups(membership.read_text(), root)
    except OSError:  # not Linux, or /proc not mounted: no quota to read
        return UNLIMITED
    return max(1, math.ceil(min(map(_quota_of, folders), default=UNLIMITED)))


@cache
def _cgroups(membership: str, root: Path) -> tuple[str, ...]:
    """The folders of the cgroups that the text of a membership file names, and of their parents. Every compile asks for them."""
    found: list[str] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for top in (root, root / "unified") if not controllers else (root / controllers, root / "cpu", root):
            here = top / path.lstrip("/")
            found += [str(folder) for folder in (here, *here.parents) if folder.is_relative_to(top)]
    return tuple(dict.fromkeys(found))


def _quota_of(folder: str) -> float:
    """CPU quota of one cgroup folder: from cpu.max ("max 100000" or "150000 100000"), or from v1's pair of files."""
    try:
        try:
            quota, period = Path(folder, "cpu.max").read_text().split()
        except FileNotFoundError:
            quota, period = (Path(folder, f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):  # not mounted here, or without a cpu controller
        return UNLIMITED
    return UNLIMITED if quota == "max" or int(quota) <= 0 else int(quota) / int(period)

"""LLVM's code generator, called by any number of threads at once: the C functions of llvmlite's library, without its package.

llvmlite holds one lock around all calls, and importing it takes three times as long as loading its library. LLVM needs no lock
between threads: each has a context and a target machine of its own. The C functions are not a promised interface: VERSIONS of
llvmlite have them as declared here, and with others its classes are used, one thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from rlx.forks import Lock

VERSIONS = ("0.50",)  # of llvmlite
SETTINGS: dict[str, Any] = {"reloc": "pic", "codemodel": "small", "jit": True}  # of the code generator
QUICK = "nounwind noinline optnone"  # attributes of functions that are not loops over much data
# Levels of optimisation, by whether all functions are QUICK. The attributes alone save less: LLVM would still run all passes.
LEVELS = {False: 3, True: 0}
SLOTS = 16  # most threads in LLVM at once

P, Text, Int = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
Out = ctypes.POINTER(P)  # receives a string to be disposed of
LONG = {  # functions that take long: they release the GIL
    "ParseAssembly": (P, P, Text, Out), "VerifyModule": (ctypes.c_bool, P, Out), "DisposeModule": (None, P),
    "TargetMachineEmitToMemory": (P, P, P, Int, Out),
}  # fmt: skip
SHORT = {
    "ContextCreate": (P,), "ContextDispose": (None, P), "SetTarget": (None, P, Text), "SetDataLayout": (None, P, Text),
    "GetBufferStart": (P, P), "GetBufferSize": (ctypes.c_size_t, P), "DisposeMemoryBuffer": (None, P), "DisposeString": (None, P),
    "GetTargetFromTriple": (P, Text, Out), "CreateTargetMachine": (P, P, Text, Text, Text, Int, Text, Text, Int, Int, Text),
    "CreateTargetMachineData": (P, P), "CopyStringRepOfTargetData": (None, P, Out), "DisposeTargetData": (None, P),
    **dict.fromkeys(("InitializeNativeTarget", "InitializeNativeAsmPrinter", "InitializeAllTargetInfos", "InitializeAllTargets",
                     "InitializeAllTargetMCs", "InitializeAllAsmPrinters"), (None,)),
}  # fmt: skip

entered = threading.Event()  # set whenever a thread begins to generate code: it does not need the GIL until that ends
_gate, _inside, _forking = threading.Condition(), set[int](), set[int]()  # numbers of threads that are in LLVM; that fork


class Rejected(Exception):
    """LLVM does not accept a module, or knows no such machine."""


def _pause() -> None:
    """Wait until no thread is inside LLVM: in a forked child, a lock that such a thread holds would never be released."""
    _forking.add(threading.get_ident())
    with _gate:
        _gate.wait_for(lambda: not _inside)


def _resume() -> None:
    """Also after a `_pause` that was interrupted."""
    _forking.discard(threading.get_ident())
    with _gate:
        _gate.notify_all()


def _renew() -> None:
    global _gate
    _gate = threading.Condition()
    _inside.clear()
    _forking.clear()


@contextmanager
def _slot() -> Iterator[None]:
    """A place among the threads in LLVM."""
    try:
        with _gate:
            _gate.wait_for(lambda: not _forking and len(_inside) < SLOTS)
            _inside.add(threading.get_ident())
        yield
    finally:
        with _gate:
            _inside.discard(threading.get_ident())
            _gate.notify_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_renew)


@cache
def compiler_version() -> str:
    """The version of llvmlite, which implies that of LLVM. Found without importing it, if it is installed in the usual way."""
    names = os.listdir(os.path.dirname(folder)) if (folder := _folder()) else []
    found = [n for n in names if n.startswith("llvmlite-") and n.endswith(".dist-info")]
    if len(found) == 1:
        return found[0].removesuffix(".dist-info")
    import llvmlite

    return f"llvmlite-{llvmlite.__version__}"


def _folder() -> str | None:
    spec = find_spec("llvmlite")
    return os.path.dirname(spec.origin) if spec and spec.origin else None


_loading, _functions = Lock(), dict[str, Callable[..., Any]]()


def loaded() -> bool:
    return bool(_functions) or "llvmlite.binding" in sys.modules


def load() -> dict[str, Callable[..., Any]]:
    """Load LLVM. Returns the C functions; empty: they are not known for this version of llvmlite, or it has no such library."""
    with _loading:
        path = os.path.join(_folder() or "", "binding", "libllvmlite.so")
        known = compiler_version().removeprefix("llvmlite-").rpartition(".")[0] in VERSIONS
        if not _functions and known and os.path.isfile(path):
            library = ctypes.CDLL(path, handle=_opened(path))
            made = {}
            for prototype, functions in ((ctypes.CFUNCTYPE, LONG), (ctypes.PYFUNCTYPE, SHORT)):
                for name, (result, *args) in functions.items():
                    made[name] = prototype(result, *args)((f"LLVMPY_{name}", library))
            made["InitializeNativeTarget"]()
            made["InitializeNativeAsmPrinter"]()
            _functions.update(made)
    return _functions


def _opened(path: str) -> int | None:
    """The handle of a library. Relocating LLVM's takes 6 ms, in which `ctypes.CDLL` would keep the GIL; this does not."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = P, (Text, Int)
    return dlopen(path.encode(), os.RTLD_NOW)  # None: it fails again in CDLL, which says why


def _all_quick(text: str) -> bool:
    return 0 < text.count(QUICK) >= text.count("attributes #")


class Machine:
    """Target machines for modules, one for each level of optimisation. One thread at a time uses them."""

    def __init__(self, f: Mapping[str, Callable[..., Any]], triple: str, cpu: str, features: str) -> None:
        """`f`: see `load`. Rejected: LLVM does not know the triple."""
        self._f = f
        self._triple, fault = triple.encode(), P()
        with _loading:  # no thread finds a target of which another has registered a part
            if not (target := f["GetTargetFromTriple"](self._triple, fault)):
                self._string(fault)
                for name in ("TargetInfos", "Targets", "TargetMCs", "AsmPrinters"):  # another architecture than this one
                    f[f"InitializeAll{name}"]()
                target = f["GetTargetFromTriple"](self._triple, fault)
        if not target:
            raise Rejected(self._string(fault))
        reloc, model, jit = SETTINGS.values()
        how = reloc.encode(), model.encode(), False, jit, b""
        named = target, self._triple, cpu.encode(), features.encode()
        self._machines = {level: f["CreateTargetMachine"](*named, level, *how) for level in LEVELS.values()}
        if not all(self._machines.values()):
            raise Rejected(f"there is no machine {triple} {cpu} {features}")
        layout, data = P(), f["CreateTargetMachineData"](self._machines[LEVELS[False]])
        f["CopyStringRepOfTargetData"](data, layout)
        f["DisposeTargetData"](data)
        self._layout = self._string(layout).encode()

    def _string(self, text: ctypes.c_void_p) -> str:
        """The string that a call has put into `text`, which is freed; empty if there is none."""
        found = ctypes.string_at(text.value).decode(errors="replace").strip() if text.value else ""
        self._f["DisposeString"](text)
        text.value = None
        return found

    def code(self, text: str, assembly: bool = False) -> bytes:
        """Object code, or assembly, of a module. Rejected: LLVM does not accept the text."""
        f, fault = self._f, P()
        context, module = f["ContextCreate"](), None  # one context per module, freed with it
        try:
            if not (module := f["ParseAssembly"](context, text.encode(), fault)):
                raise Rejected(self._string(fault))
            f["SetTarget"](module, self._triple)
            f["SetDataLayout"](module, self._layout)
            wrong = f["VerifyModule"](module, fault)
            if (said := self._string(fault)) and wrong:
                raise Rejected(said)
            entered.set()
            machine = self._machines[LEVELS[_all_quick(text)]]
            if not (buffer := f["TargetMachineEmitToMemory"](machine, module, not assembly, fault)):
                raise Rejected(self._string(fault))
            made = ctypes.string_at(f["GetBufferStart"](buffer), f["GetBufferSize"](buffer))
            f["DisposeMemoryBuffer"](buffer)
            return made
        finally:
            if module:
                f["DisposeModule"](module)
            f["ContextDispose"](context)


class PackageMachine:
    """The same by llvmlite's classes, which know the C functions of their version."""

    def __init__(self, triple: str, cpu: str, features: str) -> None:
        """Rejected: LLVM does not know the triple."""
        import llvmlite.binding as binding

        self._binding = binding
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        try:
            make = binding.Target.from_triple(triple).create_target_machine
            self._machines = {n: make(cpu=cpu, features=features, opt=n, **SETTINGS) for n in LEVELS.values()}
        except RuntimeError as fault:
            raise Rejected(str(fault).strip()) from fault
        self.machine = self._machines[LEVELS[False]]

    def code(self, text: str, assembly: bool = False) -> bytes:
        try:
            module = self._binding.parse_assembly(text, self._binding.create_context())
            module.triple, module.data_layout = self.machine.triple, str(self.machine.target_data)
            module.verify()
            machine = self._machines[LEVELS[_all_quick(text)]]
            return machine.emit_assembly(module).encode() if assembly else machine.emit_object(module)
        except RuntimeError as fault:
            raise Rejected(str(fault).strip()) from fault


_idle: defaultdict[tuple[str, str, str], list[Machine | PackageMachine]] = defaultdict(list)  # that no thread uses


def code(text: str, machine: tuple[str, str, str], assembly: bool = False) -> bytes:
    """Object code, or assembly, of a module for (triple, cpu, features). Rejected: LLVM does not accept it."""
    with _machine(machine) as here:
        return here.code(text, assembly)


def check(machine: tuple[str, str, str]) -> None:
    """Rejected: LLVM does not know the triple."""
    with _machine(machine):
        pass


@contextmanager
def _machine(machine: tuple[str, str, str]) -> Iterator[Machine | PackageMachine]:
    with _slot():
        try:
            here = _idle[machine].pop()
        except IndexError:
            here = Machine(functions, *machine) if (functions := load()) else PackageMachine(*machine)
        try:
            yield here
        finally:
            _idle[machine].append(here)

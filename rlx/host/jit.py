"""Compiles LLVM IR text to object code, and loads object code. The only user of llvmlite besides processor.py.

LLVM is loaded at the first compile. Code from the disk cache (rlx.host.disk) runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.errors import CompileError, DeviceUnavailableError
from rlx.host.disk import DiskCache, disk_cache, source_digest
from rlx.host.legal import faults
from rlx.host.link import SUPPORTED, Foreign, Image
from rlx.host.processor import host_target, machine_of, missing_features, plain_target
from rlx.ir.target import Target

if TYPE_CHECKING:
    import llvmlite.binding as llvm

SETTINGS: dict[str, Any] = {"opt": 3, "reloc": "pic", "codemodel": "small", "jit": True}  # of LLVM's code generator

one_at_a_time = threading.RLock()  # only one thread at a time may use LLVM
if hasattr(os, "register_at_fork"):  # a fork waits for a running compile, else the child would wait for the lock for ever
    os.register_at_fork(before=one_at_a_time.acquire, after_in_parent=one_at_a_time.release, after_in_child=one_at_a_time.release)


@cache
def _machine(triple: str, cpu: str, features: str) -> llvm.TargetMachine:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, **SETTINGS)


@cache
def compiler_version() -> str:
    """The version of llvmlite, which implies that of LLVM. Found without importing it, if it is installed in the usual way."""
    spec = find_spec("llvmlite")
    place = Path(spec.origin).parent.parent if spec and spec.origin else None
    found = [n for n in os.listdir(place) if n.startswith("llvmlite-") and n.endswith(".dist-info")] if place else []
    if len(found) == 1:
        return found[0].removesuffix(".dist-info")
    import llvmlite

    return f"llvmlite-{llvmlite.__version__}"


def compile_object(text: str, target: Target, name: str = "", keep: bool = False) -> bytes:
    """Object code of one module. `name`: the kernel, for errors; default: the first function. `keep`: cache it on disk.

    Code is generated without optimiser passes, because renderers write IR in its final form.
    CompileError: LLVM does not accept the text (a bug in the renderer)."""
    disk, _ = disk_cache() if keep else (None, "")
    if disk is None:
        return _emit(text, target, name, lambda machine, module: machine.emit_object(module))
    return _kept(disk, text, target, lambda: compile_object(text, target, name))


own_objects: dict[str, bytes] = {}  # key -> object code of the modules below, made in this process or read from an artifact


def kept_object(name: str, text: Callable[[], str]) -> bytes:
    """Object code of a module that is determined by the package's sources and `name`, for any CPU of this architecture. It is
    cached on disk and comes with artifacts (rlx.runtime.artifact). A hit does not need the module's text."""
    target, disk = plain_target(), disk_cache()[0]
    key = f"{name} {source_digest()} {' '.join(target.features)}"
    if key not in own_objects:
        make = lambda: compile_object(text(), target, name)  # noqa: E731
        own_objects[key] = make() if disk is None else _kept(disk, key, target, make)
    return own_objects[key]


def _kept(disk: DiskCache, source: str, target: Target, make: Callable[[], bytes]) -> bytes:
    given = repr((compiler_version(), SETTINGS, machine_of(target), source))
    key = f"object-{hashlib.sha256(given.encode()).hexdigest()}"
    image, _ = disk.get(key)
    if image is None:
        image = make()
        disk.put(key, [image], sync=False)  # a sync takes 6 ms on a busy disk, and there are many entries
    return image


def assembly(text: str, target: Target) -> str:
    """The same code as assembly text, for debugging and tests."""
    return _emit(text, target, "", lambda machine, module: machine.emit_assembly(module))


def _emit(text: str, target: Target, name: str, emit: Callable[[llvm.TargetMachine, llvm.ModuleRef], Any]) -> Any:
    with one_at_a_time:
        return _emitted(text, target, name, emit)  # a separate function, so that the module is freed before the lock


def _emitted(text: str, target: Target, name: str, emit: Callable[[llvm.TargetMachine, llvm.ModuleRef], Any]) -> Any:
    import llvmlite.binding as llvm

    name = name or next(iter(re.findall(r"^define [^@]*@([\w.]+)", text, re.M)), "module")
    machine = _machine(*machine_of(target))
    if illegal := faults(text, target.features):
        raise CompileError(f"LLVM cannot generate code for kernel {name!r}, a bug in its renderer: {'; '.join(illegal[:3])}")
    try:
        module = llvm.parse_assembly(text, llvm.create_context())  # one context per module, freed with it
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        module.verify()
        return emit(machine, module)
    except RuntimeError as fault:
        raise CompileError(f"LLVM rejected the code of kernel {name!r}: {str(fault).strip()}") from fault


class Library:
    """Object code loaded into memory. It is unloaded with this object, so users of an address must keep the Library alive.

    Undefined symbols of the objects (exp, fmod, PyLong_FromLong …) are resolved in this process, libm included.
    """

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str], stored: bool = False) -> None:
        """`stored`: the objects come from a file. LLVM's linker ends the process where such a file is inconsistent, so it is used
        only on machines for which there is no other."""
        self._code: Image | _Linked
        try:
            self._code = Image(objects, symbols)
        except Foreign as why:
            if stored and SUPPORTED:
                raise CompileError(f"cannot link {', '.join(symbols)}: the object code is not as rlx writes it: {why}") from None
            self._code = _Linked(objects, symbols)
        self._symbols = frozenset(symbols)

    def address(self, symbol: str) -> int:
        """The address of an exported symbol. Valid while this Library lives."""
        if symbol not in self._symbols:
            raise CompileError(f"{symbol} is not among the symbols of this library")
        return self._code.address(symbol)

    def function(self, symbol: str, result: Any, *args: Any) -> Any:
        """The symbol as a ctypes function (which releases the GIL) that keeps this Library alive."""
        call = ctypes.CFUNCTYPE(result, *args)(self.address(symbol))
        setattr(call, "library", self)  # noqa: B010  (ctypes functions take attributes, but are not typed so)
        return call


class _Linked:
    """Objects loaded by LLVM's linker."""

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str]) -> None:
        import llvmlite.binding as llvm

        builder = llvm.JITLibraryBuilder().add_current_process()
        for image in objects:
            builder.add_object_img(image)
        for symbol in symbols:
            builder.export_symbol(symbol)
        with one_at_a_time:
            # One linker per library: a shared one would leak 9 KB per unloaded library, RuntimeDyld (not JITLink) 10 more.
            linker = llvm.create_lljit_compiler(_machine(*machine_of(host_target(1))), use_jit_link=True)
            try:
                self._code = builder.link(linker, "rlx")
            except RuntimeError as fault:
                raise CompileError(f"cannot link {', '.join(symbols) or 'nothing'}: {str(fault).strip()}") from fault
        # Not unloaded at exit: worker threads may still wait inside the code.
        weakref.finalize(self, _unload, self._code, linker).atexit = False

    def address(self, symbol: str) -> int:
        with one_at_a_time:
            return self._code[symbol]


def _unload(code: llvm.ResourceTracker, linker: llvm.LLJIT) -> None:
    with one_at_a_time:
        code.close()
        linker.close()


def load(objects: Sequence[bytes], symbols: Sequence[str], target: Target, stored: bool = False) -> Library:
    """A Library of code compiled for `target`; `stored`: read from a file. DeviceUnavailableError: this CPU lacks instructions
    that it uses."""
    machine_of(target)  # CompileError: not a CPU target
    lacks = missing_features(target.features)
    if lacks:
        raise DeviceUnavailableError(f"the code needs a CPU with {', '.join(lacks)}, which this one lacks; compile it here")
    return Library(objects, symbols, stored)

"""Compiles LLVM IR text to object code, and loads object code. LLVM itself is in rlx.host.llvm.

LLVM is loaded at the first compile. Code from the disk cache (rlx.host.disk) runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlx.errors import CompileError, DeviceUnavailableError
from rlx.forks import Lock
from rlx.host import llvm
from rlx.host.disk import DiskCache, disk_cache, source_digest
from rlx.host.legal import faults
from rlx.host.link import SUPPORTED, Foreign, Image
from rlx.host.processor import host_target, machine_of, missing_features, plain_target
from rlx.ir.target import Target

if TYPE_CHECKING:
    import llvmlite.binding as binding

own_objects: dict[str, bytes] = {}  # key -> object code of kept_object, made in this process or read from an artifact


def compile_object(text: str, target: Target, name: str = "", keep: bool = False) -> bytes:
    """Object code of one module. `name`: the kernel, for errors; default: the first function. `keep`: cache it on disk.

    Code is generated without optimiser passes, because renderers write IR in its final form.
    CompileError: LLVM does not accept the text (a bug in the renderer)."""
    disk, _ = disk_cache() if keep else (None, "")
    if disk is None:
        return _emit(text, target, name)
    return _kept(disk, text, target, lambda: compile_object(text, target, name))


def kept_object(name: str, text: Callable[[], str]) -> bytes:
    """Object code of a module that is determined by the package's sources and `name`, for any CPU of this architecture. It is
    cached on disk and comes with artifacts (rlx.runtime.artifact). A hit does not need the module's text."""
    target, disk = plain_target(), disk_cache()[0]
    key = f"{name} {source_digest()} {' '.join(target.features)}"
    with _making.setdefault(name, Lock()):  # several may be made at once, but each only once
        if key not in own_objects:
            make = lambda: compile_object(text(), target, name)  # noqa: E731
            own_objects[key] = make() if disk is None else _kept(disk, key, target, make)
    return own_objects[key]


_making: dict[str, Lock] = {}


def _kept(disk: DiskCache, source: str, target: Target, make: Callable[[], bytes]) -> bytes:
    given = repr((llvm.compiler_version(), llvm.SETTINGS, llvm.LEVELS, machine_of(target), source))
    key = f"object-{hashlib.sha256(given.encode()).hexdigest()}"
    image, _ = disk.get(key)
    if image is None:
        image = make()
        disk.put(key, [image])
    return image


def assembly(text: str, target: Target) -> str:
    """The same code as assembly text, for debugging and tests."""
    return _emit(text, target, assembly=True).decode()


def _emit(text: str, target: Target, name: str = "", assembly: bool = False) -> bytes:
    name = name or next(iter(re.findall(r"^define [^@]*@([\w.]+)", text, re.M)), "module")
    machine = machine_of(target)
    if illegal := faults(text, target.features):
        raise CompileError(f"LLVM cannot generate code for kernel {name!r}, a bug in its renderer: {'; '.join(illegal[:3])}")
    try:
        return llvm.code(text, machine, assembly)
    except llvm.Rejected as fault:
        raise CompileError(f"LLVM rejected the code of kernel {name!r}: {fault}") from fault


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
    """Objects loaded by LLVM's linker, through llvmlite's classes."""

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str]) -> None:
        import llvmlite.binding as binding

        builder = binding.JITLibraryBuilder().add_current_process()
        for image in objects:
            builder.add_object_img(image)
        for symbol in symbols:
            builder.export_symbol(symbol)
        with _linking:
            # One linker per library: a shared one would leak 9 KB per unloaded library, RuntimeDyld (not JITLink) 10 more.
            linker = binding.create_lljit_compiler(_linked_machine(), use_jit_link=True)
            try:
                self._code = builder.link(linker, "rlx")
            except RuntimeError as fault:
                raise CompileError(f"cannot link {', '.join(symbols) or 'nothing'}: {str(fault).strip()}") from fault
        # Not unloaded at exit: worker threads may still wait inside the code.
        weakref.finalize(self, _unload, self._code, linker).atexit = False

    def address(self, symbol: str) -> int:
        with _linking:
            return self._code[symbol]


_linking = Lock()


@cache
def _linked_machine() -> binding.TargetMachine:
    return llvm.PackageMachine(*machine_of(host_target(1))).machine


def _unload(code: binding.ResourceTracker, linker: binding.LLJIT) -> None:
    with _linking:
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

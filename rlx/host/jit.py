"""LLVM IR text to object code, and object code to addresses. The only user of llvmlite beside target.py.

LLVM is loaded when something is compiled: what was compiled before and kept on disk (rlx.host.disk) runs without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
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
from rlx.host.link import Foreign, Image
from rlx.host.processor import host_target, machine_of, missing_features
from rlx.ir.target import Target

if TYPE_CHECKING:
    import llvmlite.binding as llvm

SETTINGS: dict[str, Any] = {"opt": 3, "reloc": "pic", "codemodel": "small", "jit": True}  # of LLVM's code generator

one_at_a_time = threading.RLock()  # LLVM works for one thread
if hasattr(os, "register_at_fork"):  # a fork waits for a compile under way: its child would wait for ever for the lock
    os.register_at_fork(before=one_at_a_time.acquire, after_in_parent=one_at_a_time.release, after_in_child=one_at_a_time.release)


@cache
def _machine(triple: str, cpu: str, features: str) -> llvm.TargetMachine:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, **SETTINGS)


@cache
def compiler_version() -> str:
    """llvmlite's, which fixes LLVM's; found without loading it where it is installed as usual."""
    spec = find_spec("llvmlite")
    place = Path(spec.origin).parent.parent if spec and spec.origin else None
    found = [n for n in os.listdir(place) if n.startswith("llvmlite-") and n.endswith(".dist-info")] if place else []
    if len(found) == 1:
        return found[0].removesuffix(".dist-info")
    import llvmlite

    return f"llvmlite-{llvmlite.__version__}"


def compile_object(text: str, target: Target, name: str = "", keep: bool = False) -> bytes:
    """Object code of one module. `name`: the kernel, for errors; else the first function's. `keep`: on disk, for later.

    Code is generated from the text as it stands, without optimiser passes: renderers write IR in its final shape.
    CompileError: LLVM does not accept the text (a fault of the renderer)."""
    disk, _ = disk_cache() if keep else (None, "")
    if disk is None:
        return _emit(text, target, name, lambda machine, module: machine.emit_object(module))
    return _kept(disk, text, target, lambda: compile_object(text, target, name))


def kept_object(name: str, text: Callable[[], str], target: Target) -> bytes:
    """Object code of a module that the package's sources, this Python and `name` determine: kept on disk, where it is found
    without its text."""
    disk, _ = disk_cache()
    make = lambda: compile_object(text(), target, name)  # noqa: E731
    return make() if disk is None else _kept(disk, f"{name} {source_digest()} {sys.version}", target, make)


def _kept(disk: DiskCache, source: str, target: Target, make: Callable[[], bytes]) -> bytes:
    given = repr((compiler_version(), SETTINGS, machine_of(target), source))
    key = f"object-{hashlib.sha256(given.encode()).hexdigest()}"
    image, _ = disk.get(key)
    if image is None:
        image = make()
        disk.put(key, [image], sync=False)  # 6 ms each on a busy disk, and there are many
    return image


def assembly(text: str, target: Target) -> str:
    """The same code as assembly text, for people and tests."""
    return _emit(text, target, "", lambda machine, module: machine.emit_assembly(module))


def _emit(text: str, target: Target, name: str, emit: Callable[[llvm.TargetMachine, llvm.ModuleRef], Any]) -> Any:
    with one_at_a_time:
        return _emitted(text, target, name, emit)  # a function of its own: the module is freed before the lock is


def _emitted(text: str, target: Target, name: str, emit: Callable[[llvm.TargetMachine, llvm.ModuleRef], Any]) -> Any:
    import llvmlite.binding as llvm

    name = name or next(iter(re.findall(r"^define [^@]*@([\w.]+)", text, re.M)), "module")
    machine = _machine(*machine_of(target))
    if illegal := faults(text, target.features):
        raise CompileError(f"LLVM has no code for kernel {name!r}, a fault of its renderer: {'; '.join(illegal[:3])}")
    try:
        module = llvm.parse_assembly(text, llvm.create_context())  # its own context: freed with the module
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        module.verify()
        return emit(machine, module)
    except RuntimeError as fault:
        raise CompileError(f"LLVM refused the code of kernel {name!r}: {str(fault).strip()}") from fault


class Library:
    """Object code in memory. Its code stays as long as this object does: whoever keeps an address keeps the Library.

    Undefined symbols of the objects (exp, fmod, PyLong_FromLong …) are found in this process, libm among it.
    """

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str]) -> None:
        self._code: Image | _Linked
        try:
            self._code = Image(objects, symbols)
        except Foreign:
            self._code = _Linked(objects, symbols)
        self._symbols = frozenset(symbols)

    def address(self, symbol: str) -> int:
        """The address of an exported symbol; valid while this Library lives."""
        if symbol not in self._symbols:
            raise CompileError(f"{symbol} is not among the symbols of this library")
        return self._code.address(symbol)

    def function(self, symbol: str, result: Any, *args: Any) -> Any:
        """The symbol as a ctypes function (which releases the GIL) that keeps this Library alive."""
        call = ctypes.CFUNCTYPE(result, *args)(self.address(symbol))
        setattr(call, "library", self)  # noqa: B010  (ctypes functions take attributes, but are not typed so)
        return call


class _Linked:
    """Objects that LLVM's linker has put into memory."""

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str]) -> None:
        import llvmlite.binding as llvm

        builder = llvm.JITLibraryBuilder().add_current_process()
        for image in objects:
            builder.add_object_img(image)
        for symbol in symbols:
            builder.export_symbol(symbol)
        with one_at_a_time:
            # A linker of its own: a shared one would keep 9 KB of each unloaded library, RuntimeDyld (not JITLink) 10 more.
            linker = llvm.create_lljit_compiler(_machine(*machine_of(host_target(1))), use_jit_link=True)
            try:
                self._code = builder.link(linker, "rlx")
            except RuntimeError as fault:
                raise CompileError(f"cannot link {', '.join(symbols) or 'nothing'}: {str(fault).strip()}") from fault
        # At exit nothing is unloaded: native threads may still be parked in the code.
        weakref.finalize(self, _unload, self._code, linker).atexit = False

    def address(self, symbol: str) -> int:
        with one_at_a_time:
            return self._code[symbol]


def _unload(code: llvm.ResourceTracker, linker: llvm.LLJIT) -> None:
    with one_at_a_time:
        code.close()
        linker.close()


def load(objects: Sequence[bytes], symbols: Sequence[str], target: Target) -> Library:
    """A Library of code made for `target`. DeviceUnavailableError: this CPU lacks instructions it uses."""
    lacks = missing_features(target)
    if lacks:
        raise DeviceUnavailableError(f"the code needs a CPU with {', '.join(lacks)}, which this one lacks; compile it here")
    return Library(objects, symbols)

"""LLVM IR text to object code, and object code to addresses. The only user of llvmlite beside target.py."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from rlx.backends.cpu.target import host_features, machine_of, missing_features
from rlx.errors import CompileError, DeviceUnavailableError
from rlx.ir.target import Target

_lock = threading.RLock()
_numbers = itertools.count()


@cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@cache
def _machine(triple: str, cpu: str, features: str) -> llvm.TargetMachine:
    _initialize()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small", jit=True
    )


def compile_object(text: str, target: Target, name: str = "") -> bytes:
    """Object code of one module. `name`: the kernel, for errors; else the first function's.

    Code is generated from the text as it stands, without optimiser passes: renderers write IR in its final shape.
    CompileError: LLVM does not accept the text (a fault of the renderer)."""
    name = name or next(iter(re.findall(r"^define [^@]*@([\w.]+)", text, re.M)), "module")
    with _lock:
        machine = _machine(*machine_of(target))
        try:
            module = llvm.parse_assembly(text, llvm.create_context())  # its own context: freed with the module
            module.triple, module.data_layout = machine.triple, str(machine.target_data)
            module.verify()
            return machine.emit_object(module)
        except RuntimeError as fault:
            raise CompileError(f"LLVM refused the code of kernel {name!r}: {str(fault).strip()}") from fault


def assembly(text: str, target: Target) -> str:
    """The same code as assembly text, for people and tests."""
    with _lock:
        machine = _machine(*machine_of(target))
        module = llvm.parse_assembly(text, llvm.create_context())
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
        return machine.emit_assembly(module)


@cache
def _linker() -> llvm.LLJIT:
    """One per process, never disposed: libraries unload one by one, and at exit the order would be arbitrary."""
    features = host_features()
    facts = dict(f.split("=", 1) for f in features if "=" in f)
    _initialize()
    machine = llvm.Target.from_triple(facts["triple"]).create_target_machine(cpu=facts["cpu"], jit=True)
    return llvm.create_lljit_compiler(machine, use_jit_link=True)  # RuntimeDyld would keep 10 KB of each unloaded library


class Library:
    """Object code in memory. Its code stays as long as this object does: whoever keeps an address keeps the Library.

    Undefined symbols of the objects (exp, fmod, …) are found in this process, libm among it, or in `imports`.
    """

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str], imports: Mapping[str, int] | None = None) -> None:
        builder = llvm.JITLibraryBuilder().add_current_process()
        for image in objects:
            builder.add_object_img(image)
        for symbol in symbols:
            builder.export_symbol(symbol)
        for symbol, address in (imports or {}).items():
            builder.import_symbol(symbol, address)
        with _lock:
            try:
                self._tracker = builder.link(_linker(), f"rlx{next(_numbers)}")
            except RuntimeError as fault:
                raise CompileError(f"cannot link {', '.join(symbols) or 'nothing'}: {str(fault).strip()}") from fault
        self.symbols = tuple(symbols)
        self.nbytes = sum(map(len, objects))

    def address(self, symbol: str) -> int:
        """The address of an exported symbol; valid while this Library lives."""
        return self._tracker[symbol]

    def function(self, symbol: str, result: Any, *args: Any) -> Any:
        """The symbol as a ctypes function (which releases the GIL) that keeps this Library alive."""
        call = ctypes.CFUNCTYPE(result, *args)(self.address(symbol))
        setattr(call, "library", self)  # noqa: B010  (ctypes functions take attributes, but are not typed so)
        return call


def load(objects: Sequence[bytes], symbols: Sequence[str], target: Target) -> Library:
    """A Library of code made for `target`. DeviceUnavailableError: this CPU lacks instructions it uses."""
    lacks = missing_features(target)
    if lacks:
        raise DeviceUnavailableError(f"the code needs a CPU with {', '.join(lacks)}, which this one lacks; compile it here")
    return Library(objects, symbols)

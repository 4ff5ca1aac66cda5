"""Links object code into memory without LLVM, for programs from the disk cache.

Input: ELF objects for x86-64 as LLVM writes them for generated kernels (position independent, no writable data). Output: one
block of executable memory. Calls to other libraries go through a table after the code. Other objects, or those with features
that generated kernels do not use, are left to LLVM's linker (rlx.host.jit).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from rlx.errors import CompileError
from rlx.records import record

_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")  # ident, type, machine, …, section table, …, size of its rows, rows, names
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, row size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_RELOCATION = struct.Struct("<QQq")  # offset, symbol << 32 | type, addend
_X86_64, _RELOCATABLE = 62, 1
_SYMBOLS, _RELOCATIONS, _ZEROS = 2, 4, 8  # section types
_WRITE, _ALLOC = 1, 2  # section flags
_ABSOLUTE, _RELATIVE, _CALL, _TABLE = {1}, {2}, {4}, {9, 41, 42}  # R_X86_64_64; PC32; PLT32; GOTPCREL and its variants
_JUMP = b"\xff\x25"  # jmp [rip + offset]
_SLOT = 16  # bytes per external symbol: its address, then a jump to it


SUPPORTED = sys.platform == "linux" and sys.byteorder == "little" and platform.machine() == "x86_64"


class Foreign(Exception):
    """An object that only LLVM's linker can load."""


@record(repr=False, eq=False, frozen=False)
class _Object:
    """`at`: section index -> offset in the image."""

    raw: bytes
    sections: list[tuple[int, ...]]
    symbols: list[tuple[str, int, int, int]]  # name, binding, section, value
    at: dict[int, int]


class Image:
    """Objects linked into executable memory of this process. The memory is unmapped with this object, but not at exit."""

    def __init__(self, objects: Sequence[bytes], symbols: Sequence[str]) -> None:
        """`symbols`: the symbols for `address`. Foreign: this linker does not support the objects. CompileError: an object is
        inconsistent, or a symbol is undefined."""
        if not SUPPORTED:
            raise Foreign("not Linux on x86-64")
        try:
            self._link([_parsed(raw) for raw in objects])
        except (struct.error, IndexError, KeyError, ValueError, OverflowError) as fault:
            raise CompileError(f"cannot link {', '.join(symbols)}: damaged object code, {fault!r}") from fault
        if missing := [s for s in symbols if s not in self._defined]:
            raise CompileError(f"cannot link {', '.join(missing)}: no object defines it")

    def address(self, symbol: str) -> int:
        return self._base + self._defined[symbol]

    def _link(self, objects: list[_Object]) -> None:
        size = 0
        for o in objects:
            for i, (_, kind, flags, _, offset, nbytes, _, _, alignment, _) in enumerate(o.sections):
                if not flags & _ALLOC or not nbytes:
                    continue
                if flags & _WRITE or kind == _ZEROS or alignment > mmap.PAGESIZE:
                    raise Foreign("writable data")
                if offset + nbytes > len(o.raw):
                    raise IndexError("a section beyond the end")
                if alignment & (alignment - 1):
                    raise ValueError(f"alignment {alignment}")
                o.at[i] = size = -(-size // max(alignment, 1)) * max(alignment, 1)
                size += nbytes
        exported = ((name, o.at[s] + value) for o in objects for name, binding, s, value in o.symbols if binding and s in o.at)
        self._defined = dict(exported)
        if size > 2 * sum(len(o.raw) for o in objects):
            raise IndexError("sections that overlap")
        slots = -(-size // _SLOT) * _SLOT
        outside = {n for o in objects for n, binding, s, _ in o.symbols if n and binding and s == 0} - set(self._defined)
        self._outside = {name: slots + _SLOT * i for i, name in enumerate(sorted(outside))}
        self._base = _pages(total := slots + _SLOT * len(outside) or 1)
        weakref.finalize(self, _libc().munmap, self._base, total).atexit = False
        image = bytearray(total)
        for name, at in self._outside.items():
            struct.pack_into("<Q2si", image, at, _address_of(name), _JUMP, -14)  # the jump ends 14 bytes past its address
        for o in objects:
            for i, at in o.at.items():
                offset, nbytes = o.sections[i][4:6]
                image[at : at + nbytes] = o.raw[offset : offset + nbytes]
        for o in objects:
            for section in o.sections:
                if section[1] == _RELOCATIONS and section[7] in o.at:
                    self._relocate(o, section, image)
        ctypes.memmove(self._base, (ctypes.c_char * total).from_buffer(image), total)
        if _libc().mprotect(self._base, total, mmap.PROT_READ | mmap.PROT_EXEC):
            raise CompileError("the system does not allow generated code: memory cannot be made executable")

    def _relocate(self, o: _Object, section: tuple[int, ...], image: bytearray) -> None:
        start, room = o.at[section[7]], o.sections[section[7]][5]
        for offset, info, addend in _rows(_RELOCATION, o.raw, section):
            name, _, s, value = o.symbols[info >> 32]
            kind = info & 0xFFFFFFFF
            width = 8 if kind in _ABSOLUTE else 4
            if offset + width > room:
                raise IndexError("a relocation beyond its section")
            inside = o.at[s] + value if s else self._defined.get(name)
            if kind in _TABLE or (inside is None and kind not in _CALL):
                raise Foreign("data of other libraries")
            goal = (self._outside[name] + 8 if inside is None else inside) + addend
            if kind in _ABSOLUTE:
                struct.pack_into("<Q", image, start + offset, (self._base + goal) % (1 << 64))
            elif kind in _RELATIVE | _CALL:
                struct.pack_into("<i", image, start + offset, goal - start - offset)
            else:
                raise Foreign(f"relocation {kind}")


def _parsed(raw: bytes) -> _Object:
    magic, wide, little, _, kind, machine, _, _, _, table, _, _, _, _, row, count, _ = _HEADER.unpack_from(raw)
    if (magic, wide, little, kind, machine) != (b"\x7fELF", 2, 1, _RELOCATABLE, _X86_64):
        raise Foreign("not an x86-64 object")
    if row != _SECTION.size:
        raise IndexError("rows of another size")
    sections = [_SECTION.unpack_from(raw, table + i * row) for i in range(count)]
    symbols: list[tuple[str, int, int, int]] = []
    for section in sections:
        if section[1] == _SYMBOLS:
            _, _, _, _, offset, nbytes, *_ = sections[section[6]]
            names = raw[offset : offset + nbytes]
            for name, info, _, where, value, _ in _rows(_SYMBOL, raw, section):
                symbols.append((names[name : names.index(0, name)].decode(), info >> 4, where, value))
    return _Object(raw, sections, symbols, {})


def _rows(row: struct.Struct, raw: bytes, section: tuple[int, ...]) -> list[tuple[int, ...]]:
    offset, nbytes = section[4:6]
    if nbytes % row.size or offset + nbytes > len(raw):
        raise IndexError("a table beyond the end")
    return list(row.iter_unpack(raw[offset : offset + nbytes]))


def _address_of(name: str) -> int:
    for library in _libraries():
        with contextlib.suppress(AttributeError):  # it is not in this one
            return ctypes.cast(library[name], ctypes.c_void_p).value or 0
    raise CompileError(f"cannot link: no library of this process has {name!r}")


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    return ctypes.CDLL(None), ctypes.CDLL("libm.so.6")


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    place = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [*place, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes, libc.mprotect.argtypes = place, [*place, ctypes.c_int]
    return libc


def _pages(nbytes: int) -> int:
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no memory for {nbytes} bytes of code")
    return address


__all__ = ["Foreign", "Image"]

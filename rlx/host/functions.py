"""Generated functions whose bodies are written in Python with an Emitter, and the LLVM IR module that contains them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.host.abi import P
from rlx.host.emit import Emitter, V
from rlx.host.llvm import QUICK

NULL = V("null", "ptr")
EVERYBODY = V("2147483647", "i32")  # number of sleepers that FUTEX_WAKE wakes: all


def fields_of(*structures: type[ctypes.Structure]) -> dict[str, tuple[str, int, int]]:
    """Field name -> LLVM type, byte offset, alignment. Field names must be unique over all structures."""
    return {
        name: ("ptr" if kind is P else f"i{8 * ctypes.sizeof(kind)}", getattr(structure, name).offset, ctypes.alignment(kind))
        for structure in structures
        for name, kind in structure._fields_  # pyright: ignore
    }


class Body(Emitter):
    """The body of one function. `machine`: as platform.machine(). `futex`: number of the futex system call; 0: none."""

    fields: Mapping[str, tuple[str, int, int]] = {}  # name -> LLVM type, byte offset, alignment (fields_of)

    def __init__(self, machine: str = "", futex: int = 0) -> None:
        super().__init__()
        self.machine, self.futex_call = machine, futex

    def at(self, base: V, name: str) -> V:
        return self.gep(base, self.fields[name][1])

    def get(self, base: V, name: str, order: str = "") -> V:
        """Load a field of the structure at `base`, atomically if `order` is given."""
        ty, offset, align = self.fields[name]
        place = self.gep(base, offset)
        return self.load_atomic(ty, place, order) if order else self.load(ty, place, align)

    def put(self, base: V, name: str, value: V | int, order: str = "") -> None:
        ty, offset, align = self.fields[name]
        place, value = self.gep(base, offset), self.const(ty, value)
        self.store_atomic(value, place, order) if order else self.store(value, place, align)

    def change(self, op: str, base: V, name: str, by: V | int) -> V:
        """Update a field atomically. Returns the old value."""
        return self.update_atomic(op, self.at(base, name), self.const(self.fields[name][0], by))

    def pause(self) -> None:
        """The processor's hint for spin loops."""
        if self.machine in ("x86_64", "AMD64"):
            self.intrinsic("x86.sse2.pause", suffix=(), returns="void")
        elif self.machine in ("aarch64", "arm64"):
            self.intrinsic("aarch64.hint", self.const("i32", 1), suffix=(), returns="void")

    def python(self, name: str, returns: str, *args: V) -> V:
        """A call of CPython's C API."""
        self.declare(f"declare {returns} @{name}({', '.join(a.ty for a in args)})")
        return self.call(name, returns, *args)


class Functions:
    """The generated functions of one module."""

    def __init__(self) -> None:
        self._texts: dict[str, Callable[[Any], str]] = {}  # name -> returns the function's text

    def native(self, returns: str, /, **parameters: str) -> Callable[[Callable[..., None]], Callable[..., V]]:
        """Decorator for a Python function that emits the body of a generated function, given its parameters. Functions named
        rlx_… are exported, all others internal."""

        def made(write: Callable[..., None]) -> Callable[..., V]:
            name = write.__name__

            def text(e: Body) -> str:
                write(e, *(V(f"%{p}", ty) for p, ty in parameters.items()))
                if returns == "void":
                    e.ret()
                listed = ", ".join(f"{ty} %{p}" for p, ty in parameters.items())
                return e.function(name, listed, linkage="" if name.startswith("rlx_") else "internal", returns=returns)

            self._texts[name] = text
            return lambda e, *args: e.call(name, returns, *args)

        return made

    def module_text(self, body: Callable[[], Body], without: Sequence[str] = ()) -> str:
        """The module as LLVM IR. `body`: makes an empty function body. `without`: functions to leave out."""
        texts = [text for name, text in self._texts.items() if name not in without]
        bodies = [body() for _ in texts]
        functions = [text(e) for text, e in zip(texts, bodies)]
        declarations = dict.fromkeys(line for e in bodies for line in e.declarations)
        return "\n".join([*declarations, f"attributes #0 = {{ {QUICK} }}", *functions])

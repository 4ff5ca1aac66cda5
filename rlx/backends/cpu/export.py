"""Exports a compiled program as a shared library with a C interface (c/rlx.h), by the system's C compiler.

The library has the kernels' and the executor's machine code, the weights as read-only data, a few hundred lines of C
(c/runtime.c), and the tables that this module writes for it. There is no Python in it.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlx import knobs
from rlx.backends.cpu.abi import ATTEND, MAX_PARTS, Control, Rendered, Run, Step
from rlx.backends.cpu.executable import SCRATCH_ALIGNMENT, CpuArtifact
from rlx.backends.cpu.table import joins, quiet, tasks_after
from rlx.errors import CompileError, DeviceUnavailableError, Unsupported, writing
from rlx.host.builtin import futex_call
from rlx.host.jit import compile_object
from rlx.host.processor import ARM, MAX_THREADS, missing_features, plain_target
from rlx.ir.program import BufferDecl, OutputDecl, Region
from rlx.ir.program import Step as ProgramStep

SOURCES = Path(__file__).with_name("c")
ALIGNMENT = 64  # bytes, of each array in the data of the library
LARGEST = 2_000_000_000  # bytes of data: code of this model reaches it at 32-bit distances
EXPORTED = sorted(set(re.findall(r"\b(rlx_\w+)\(", (SOURCES / "rlx.h").read_text("utf-8"))))
_C_NAMES = {ctypes.c_void_p: "void *", ctypes.c_int64: "int64_t ", ctypes.c_int32: "int32_t ", ctypes.c_int8: "int8_t "}
# LLVM's name -> cpuid leaf, subleaf, word of (eax, ebx, ecx, edx), bit, and the registers that the system must save (XCR0)
VECTORS, MASKS, TILES = 0x6, 0xE6, 0x60000
# On aarch64, the entry of the auxiliary vector in place of a leaf, and the bit.
PROBES = {
    "avx2": (7, 0, 1, 5, VECTORS), "fma": (1, 0, 2, 12, VECTORS), "f16c": (1, 0, 2, 29, VECTORS),
    "avx512f": (7, 0, 1, 16, MASKS), "avx512bw": (7, 0, 1, 30, MASKS), "avx512dq": (7, 0, 1, 17, MASKS),
    "avx512vl": (7, 0, 1, 31, MASKS), "avx512bf16": (7, 1, 0, 5, MASKS), "avx512vnni": (7, 0, 2, 11, MASKS),
    "amx-tile": (7, 0, 3, 24, TILES), "amx-bf16": (7, 0, 3, 22, TILES), "amx-int8": (7, 0, 3, 25, TILES),
    **{f: (entry, 0, 0, bit, 0) for f, (entry, bit) in ARM.items()},
}  # fmt: skip


def export(artifact: CpuArtifact, weights: Mapping[int, np.ndarray], extent: tuple[str, int] | None, folder: Path) -> Path:
    """Write rlx.h and lib<name>.so to `folder`, which exists. Returns the path of the library. `weights`: the bytes of each param
    and prepared buffer that runs read. `extent`: of the options.

    Unsupported: the program has collectives, or more data than a library can have. DeviceUnavailableError: it is code for another
    architecture. CompileError: there is no C compiler, or it fails. OptionError: the disk is full, or refuses writing."""
    program = artifact.program
    if program.collectives:
        raise Unsupported(f"{program.name} exchanges data with other ranks; a C library holds a program of one process")
    if program.bodies:
        raise Unsupported(f"{program.name} has control flow, which a C library has not: compile it with disable=('control',)")
    if lacks := [f for f in missing_features(program.target.features) if f.startswith("triple=")]:
        raise DeviceUnavailableError(f"{program.name} is for {lacks[0].removeprefix('triple=')}: export it on such a machine")
    tables = _Tables(artifact, weights, extent)
    if tables.size > LARGEST:
        raise Unsupported(f"{program.name} has {tables.size} bytes of weights; a library holds {LARGEST} at most: use rlx.load")
    name = f"lib{re.sub(r'[^A-Za-z0-9_]+', '_', program.name)}.so"
    with writing(folder / name), tempfile.TemporaryDirectory() as place:
        build = Path(place)
        (build / "tables.h").write_text(tables.text())
        with (build / "data").open("wb") as f:
            tables.write(f)
        objects = {f"kernel{i}.o": image for i, image in enumerate(artifact.objects) if image}
        for file, content in {**objects, "executor.o": _executor()}.items():
            (build / file).write_bytes(content)
        (build / "exported").write_text(f"{{ global: {' '.join(f'{n};' for n in EXPORTED)} local: *; }};")
        _link(build, [*objects, "executor.o"], name)
        try:
            shutil.copy(build / name, folder / f".{name}")
            shutil.copyfile(SOURCES / "rlx.h", folder / "rlx.h")
            (folder / f".{name}").replace(folder / name)
        finally:
            (folder / f".{name}").unlink(missing_ok=True)
    return folder / name


def _link(build: Path, objects: Sequence[str], name: str) -> None:
    compiler = knobs.CC.get()
    if shutil.which(compiler) is None:
        raise CompileError(
            f"there is no C compiler {compiler!r}, which a C library needs: install gcc or clang, or name one in {knobs.CC.env}"
        )
    command = [
        compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-I", str(build), "-I", str(SOURCES), "-o", name,
        str(SOURCES / "runtime.c"), *objects, "-Wl,--version-script=exported", f"-Wl,-soname,{name}", "-Wl,-z,noexecstack",
        "-Wl,--no-undefined", "-pthread", "-lm",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=build, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{compiler} cannot make {name}: {done.stderr.strip()[-1000:]}")


@cache
def _executor() -> bytes:
    """The executor's machine code without its function for Python. Its names leave rlx_… to the C interface."""
    from rlx.backends.cpu import executor

    text = executor.module_text(platform.machine(), futex_call(), python=False)
    return compile_object(re.sub(r"@rlx_(\w+)", r"@executor_\1", text), plain_target(), "executor", keep=True)


class _Tables:
    """The tables of one program as C, and its data."""

    def __init__(self, artifact: CpuArtifact, weights: Mapping[int, np.ndarray], extent: tuple[str, int] | None) -> None:
        self.artifact, self.program, self.extent = artifact, artifact.program, extent
        self.size, self._data, self._offsets = 0, [], {}
        for b in self.program.buffers:
            found = b.data if b.region is Region.CONSTANT else weights.get(b.id)
            if found is not None:
                self._offsets[b.id] = self.size
                self._data.append(np.ascontiguousarray(found).reshape(-1).view(np.uint8))
                self.size += b.nbytes + -b.nbytes % ALIGNMENT
        self._states = {id: i for i, id in enumerate(self.program.handles)}

    def write(self, file: BinaryIO) -> None:
        """The data that the offsets are in. It is not empty, since C has no empty arrays."""
        for array in self._data:
            file.write(array.data)
            file.write(bytes(-array.size % ALIGNMENT))
        file.write(bytes(ALIGNMENT))

    def text(self) -> str:
        program, codes = self.program, self.artifact.codes
        symbols = [c.symbol for c, image in zip(codes, self.artifact.objects) if image]
        places: list[str] = []
        coded = [*self.artifact.coded["steps"], *self.artifact.coded["commit"]]
        rows, back = self._rows(coded, places), self._rows(self.artifact.coded["abort"], places)
        scratch = -(-max((c.scratch_bytes for c in codes), default=0) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        threads = program.target.threads if any(c.tasks > 1 for c in codes) or any(joins(self.artifact.coded["steps"])) else 1
        inputs = [program.buffers[i] for i in program.inputs if i != program.extent]
        states = [program.buffers[i] for i in program.handles]
        tensors = {"INPUTS": inputs, "OUTPUTS": program.outputs, "STATES": states}
        needs = [f'{{"{f}", {", ".join(map(hex, PROBES[f]))}}}' for f in program.target.features if f in PROBES]
        numbers = {
            "ARENA_BYTES": program.plan.size_bytes, "SCRATCH_BYTES": scratch, "THREADS": threads, "MAX_THREADS": MAX_THREADS,
            "MAX_PARTS": MAX_PARTS, "ATTEND": ATTEND, "DATA_BYTES": self.size, "HAS_EXTENT": int(program.extent is not None),
            "MOST_ROWS": self.extent[1] if self.extent else 0,
        }  # fmt: skip
        return "\n".join([
            *map(_structure, (Step, Run, Control)), _FIXED, *(f"#define {name} {value}" for name, value in numbers.items()),
            f"static const char TITLE[] = {_quoted(program.name)};",
            *(f"Kernel {s};" for s in symbols),
            _table("Feature", "NEEDS", needs), _table("Place", "PLACES", places), _table("Row", "ROWS", rows),
            _table("Row", "UNDO", back), _table("size_t", "SAVED", [str(saved) for saved, _ in program.abort], "0"),
            *(line for name, decls in tensors.items() for line in _tensors(name, decls)),
            _table("Place", "INPUT_PLACES", map(self._place, (b.id for b in inputs))),
            _table("Place", "OUTPUT_PLACES", map(self._place, (o.buffer for o in program.outputs))),
            f"static const Place EXTENT_PLACE = {'{0, 0}' if program.extent is None else self._place(program.extent)};", "",
        ])  # fmt: skip

    def _rows(self, coded: Sequence[tuple[ProgramStep, Rendered]], places: list[str]) -> list[str]:
        """Rows of steps, whose arguments are added to `places`."""
        rows = []
        joined = joins(coded)
        after = tasks_after([code.tasks for _, code in coded], joined)
        for (step, code), rest, short in zip(coded, after, quiet(coded, joined)):
            name = f"{step.kernel.name} ({' '.join(step.kernel.origin)})" if step.kernel.origin else step.kernel.name
            rows.append(f"{{{code.symbol}, {len(places)}, {code.tasks}, {rest}, {code.keeps}, {int(short)}, {_quoted(name)}}}")
            places += map(self._place, step.args)
        return rows

    def _place(self, buffer: int) -> str:
        if buffer in self._states:
            return f"{{IN_STATE, {self._states[buffer]}}}"
        found = self.program.plan.offsets.get(buffer)
        return f"{{IN_DATA, {self._offsets[buffer]}}}" if found is None else f"{{IN_ARENA, {found}}}"


_FIXED = """typedef struct { enum { IN_ARENA, IN_DATA, IN_STATE } kind; size_t offset; } Place;
typedef void Kernel(void **, int64_t, void *, int32_t *);
typedef struct { Kernel *function; size_t first; int64_t tasks, after, again, quiet; const char *name; } Row;
typedef struct { const char *name; unsigned leaf, subleaf, word, bit, saved; } Feature;
int32_t executor_run(Run *);
void executor_work(Control *, int64_t);
void executor_stop(Control *);
int64_t executor_spin(Control *, int64_t);
__asm__(".pushsection .rodata\\n.balign 4096\\nrlx_data:\\n.incbin \\"data\\"\\n.popsection");
extern const char rlx_data[] __attribute__((visibility("hidden")));"""


def _structure(kind: type[ctypes.Structure]) -> str:
    fields = []
    for name, given in ((f[0], f[1]) for f in kind._fields_):
        if issubclass(given, ctypes.Array):
            fields.append(f"{_C_NAMES[given._type_]}{name}[{given._length_}];")
        else:
            fields.append(f"{_C_NAMES[given]}{name};")
    text = f"typedef struct {{ {' '.join(fields)} }} {kind.__name__};"
    return f'{text}\n_Static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind)}, "{kind.__name__}");'


def _table(kind: str, name: str, rows: Iterable[str], last: str = "{0}") -> str:
    return f"static const {kind} {name}[] = {{{', '.join([*rows, last])}}};"


def _tensors(table: str, decls: Iterable[BufferDecl | OutputDecl]) -> Iterable[str]:
    """Arrays of dims, then the table that points to them."""
    rows = []
    for i, (name, shape) in enumerate((d.name, d.shape) for d in decls):
        yield f"static const int64_t {table}_{i}[] = {{{', '.join(map(str, (*shape.static, 0)))}}};"
        rows.append(f'{{{_quoted(name)}, "{shape.dtype.name}", {len(shape.static)}, {table}_{i}, {shape.size_bytes}}}')
    yield _table("rlx_tensor", table, rows)


def _quoted(text: str) -> str:
    """A C string literal of any text, in UTF-8."""
    plain = frozenset(range(32, 127)) - frozenset(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode("utf-8", "replace")) + '"'


__all__ = ["EXPORTED", "export"]

"""Serialisation of compiled programs, and their entries in the disk cache (rlx.host.disk). A cache hit compiles nothing.

An entry has buffers, plan, steps, machine code, constants and the facts for reports. Kernels are read back without their loops,
each as one Native over the buffers that it loads and stores. The format is JSON and raw bytes. Nothing in it is evaluated, and
any inconsistency is a CorruptFileError.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rlx.compiler.check import program_faults
from rlx.compiler.options import CompileOptions
from rlx.driver.backend import Artifact, Backend, Storable
from rlx.errors import CorruptFileError, RlxError, known
from rlx.host.disk import DAMAGED, FRESH, disk_cache, source_digest
from rlx.ir.attrs import FLOW, FlowAttrs, attribute_types
from rlx.ir.body import every_node
from rlx.ir.cost import KernelWork, ProgramWork, program_work
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Active, Graph
from rlx.ir.kernel import Buffer, Kernel, Native, View, loaded_buffers
from rlx.ir.keys import key_facts
from rlx.ir.layout import TiledLayout
from rlx.ir.op import OPS, Kind, fits
from rlx.ir.ops import OWN
from rlx.ir.program import ArenaPlan, BufferDecl, NodeReport, OutputDecl, Program, Region, RouterDecl, Step
from rlx.ir.shape import Shape
from rlx.ir.target import Target
from rlx.ir.text import NESTING
from rlx.ir.tuning import NOT_TUNED, TunedStep, Tuning
from rlx.runtime.report import CacheNote
from rlx.runtime.weights import planned_bytes

FORMAT = 3  # version of the entry format
ADDRESSES = 1 << 47  # bytes that a process can address; a program that needs more is rejected before code is generated
NEIGHBOURS = 8  # entries of the same graph that are compared to find the reason of a miss
_LENGTH = 4  # bytes of the field that holds the head's length


class CacheEntry:
    """The disk cache entry of one compile, and the reason of a miss."""

    def __init__(self, backend: Backend, graph: Graph, target: Target, options: CompileOptions) -> None:
        self._backend, self._target = backend, target
        self._disk, self._why = disk_cache()
        self.name = self._path = ""
        self.work: Callable[[], ProgramWork] | None = None  # of the program read from the cache
        self.tuning = NOT_TUNED  # of the program read from the cache
        if not isinstance(backend, Storable):
            self.disable(f"the device {backend.name} generates no code to store")
        elif self._disk is not None and options.wants_text:
            self.disable("the text of each stage is requested, which needs a compile")
        elif self._disk is not None and (others := sorted({n.op.name for n in every_node(graph.nodes()) if n.op not in OWN})):
            self.disable(f"{known(others)} is declared outside this package, so no cache key can cover it")
        elif self._disk is not None:
            self._given = given_to_compile(backend, graph, target, options)
            key = hashlib.sha256(json.dumps(self._given, sort_keys=True).encode()).hexdigest()
            self.name = f"program-{self._given['graph'][:16]}-{key[:40]}"
            self._path = self._disk.path(self.name)

    def read(self) -> Artifact | None:
        if self._disk is None:
            return None
        content, self._why = self._disk.get(self.name)
        if content is None:
            self._why = self._differences() if self._why == FRESH else self._why
            return None
        try:
            given, artifact, work, tuning = unpack(content, self._backend, self._target)  # type: ignore[arg-type]
            if given != self._given:
                raise CorruptFileError("the entry belongs to another compile")
            self.work, self.tuning = (lambda: work), tuning
            return artifact
        except CorruptFileError:
            return self.discard()

    def discard(self) -> None:
        """The entry cannot be loaded: compile again."""
        self._why, self.work = DAMAGED, None

    def disable(self, why: str) -> None:
        """Do not store this compile."""
        self._disk, self._why = None, why if self._disk is not None else self._why
        self.name = self._path = ""

    def write(self, artifact: Artifact, tuning: Tuning) -> None:
        if self._disk is not None:
            self._disk.put(self.name, pack(artifact, self._backend, self._given, tuning))  # type: ignore[arg-type]

    def note(self, cached: bool) -> CacheNote:
        state = "off" if self._disk is None else "cached" if cached else "compiled"
        return CacheNote(state, self.name, self._path, "" if cached else self._why)

    def _differences(self) -> str:
        """How this compile differs from the most similar entry of the same graph."""
        found: list[str] = []
        with suppress(OSError):  # of a folder that may not be listed
            found = [e.name for e in self._disk.entries() if e.name.startswith(self.name[:-40])] if self._disk else []
        differing: list[list[str]] = []
        for name in found[-NEIGHBOURS:]:
            content, _ = self._disk.get(name, use=False)  # type: ignore[union-attr]
            try:
                old = _split(content or b"")[0]["given"]
                keys = [k for k in {**old, **self._given} if old.get(k) != self._given.get(k)]
                differing.append([f"{k} differs: {old.get(k)} -> {self._given.get(k)}" for k in keys])
            except (CorruptFileError, KeyError, TypeError, AttributeError):
                continue
        return ", ".join(min(differing, key=len)) if differing else FRESH


def given_to_compile(backend: Storable, graph: Graph, target: Target, options: CompileOptions) -> dict[str, str]:
    """Everything that determines the code, as text. The key of an entry is a hash of it."""
    names = "\n".join(f"{n.name}" for n in every_node(graph.nodes()))  # not in the fingerprint, but shown in reports
    facts = {f"{kind} {k}": v for kind, record in (("option", options), ("target", target)) for k, v in key_facts(record).items()}
    facts |= {"rlx": source_digest()}
    facts |= {"graph": graph.fingerprint(), "names": hashlib.sha256(names.encode()).hexdigest()[:16]}
    return {**facts, "compiler": backend.compiler(), "format": str(FORMAT)}


# -- to bytes and back ---------------------------------------------------------------------------------------------


def pack(
    artifact: Artifact, backend: Storable, given: Mapping[str, str], tuning: Tuning = NOT_TUNED, work: ProgramWork | None = None
) -> list[bytes]:
    """The parts of an entry, in order. `given`: as from given_to_compile. `tuning`: the tilings of the steps. `work`: of a run,
    where it is known; otherwise the program has its kernels, not only descriptions of them."""
    program = artifact.program
    texts = artifact.texts()
    different = list(dict.fromkeys(texts.values()))
    where = {text: i for i, text in enumerate(different)}
    code, blobs = backend.to_parts(artifact)
    constants = [np.ascontiguousarray(b.data).tobytes() for b in program.buffers if b.data is not None]
    written = zlib.compress(json.dumps([different, {name: where[t] for name, t in texts.items()}]).encode(), 1)
    parts = [written, *constants, *blobs]
    work = work or program_work(program)
    rows = [(w.kernel, w.read_bytes, w.written_bytes, w.least_bytes, w.flops, w.received_bytes) for w in work.kernels]
    head = {"given": dict(given), "program": _described(program), "code": code, "work": (work.least_bytes, rows)}
    head["tuning"] = (tuning.why, [tuple(vars(s).values()) for s in tuning.steps])
    head["sizes"] = [len(p) for p in parts]
    text = json.dumps(head, separators=(",", ":")).encode()
    return [len(text).to_bytes(_LENGTH, "little"), text, *parts]


def unpack(content: bytes, backend: Storable, target: Target) -> tuple[dict[str, str], Artifact, ProgramWork, Tuning]:
    """The arguments of pack, read back: given_to_compile, the artifact, the work of a run, and the tuning. CorruptFileError: the
    entry is inconsistent."""
    head, parts = _split(content)
    try:
        program, rest = _program(head["program"], target, parts[1:])
        if sum(planned_bytes(program).values()) >= ADDRESSES:
            raise CorruptFileError("no memory has room for the program")
        if bad := program_faults(program, replay=False):
            raise CorruptFileError(f"the program has faults: {bad[0]}")
        artifact = backend.from_parts(program, head["code"], rest, partial(_texts, parts[0]))
        return head["given"], artifact, _work(*head["work"]), _tuning(*head["tuning"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RlxError) as fault:
        raise CorruptFileError(f"not a compiled program: {fault!r:.200}") from fault


def _split(content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """The head, and the parts, whose sizes are in the head."""
    at = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    try:
        head = json.loads(content[_LENGTH:at])
        parts = []
        for size in map(_whole, head["sizes"]):
            parts.append(content[at : at + size])
            at += size
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise CorruptFileError(f"not a compiled program: {fault!r:.200}") from fault
    if at != len(content):
        raise CorruptFileError(f"the parts take {at} bytes, there are {len(content)}")
    return head, parts


def _texts(compressed: bytes) -> dict[str, str]:
    different, names = json.loads(zlib.decompress(compressed))
    return {name: different[i] for name, i in names.items()}


def _described(p: Program) -> dict[str, Any]:
    kernels = {kernel: i for i, kernel in enumerate(dict.fromkeys(s.kernel for steps in p.phases.values() for s in steps))}
    phases = {name: [(kernels[s.kernel], s.args, s.concurrent) for s in steps] for name, steps in p.phases.items()}
    return {
        "name": p.name,
        "buffers": [(b.region.value, _shape(b.shape), b.name, b.data is not None, _tiles(b.layout)) for b in p.buffers],
        "kernels": [_kernel_described(kernel) for kernel in kernels],
        "phases": phases, "saved": [at for at, _ in p.abort],
        "inputs": p.inputs, "params": p.params, "handles": p.handles, "extent": p.extent,
        "outputs": [(o.name, o.buffer, _shape(o.shape), o.active) for o in p.outputs],
        "routers": [(r.buffer, _shape(r.shape), r.experts, r.params, r.active, r.ahead) for r in p.routers],
        "offsets": list(p.plan.offsets.items()),
        "bodies": [_described(body) for body in p.bodies],
        "plan": (p.plan.size_bytes, p.plan.alignment, p.plan.unshared_bytes, p.plan.lower_bound_bytes),
        "nodes": [(n.node, n.op, n.how, n.kernel, n.why) for n in p.nodes],
    }  # fmt: skip


def _kernel_described(kernel: Kernel) -> tuple[Any, ...]:
    loaded = loaded_buffers(kernel)
    op = kernel.collective
    together = None if op is None else (op.op, vars(op.attrs))  # the driver executes it: it has no machine code
    together = (FLOW, vars(kernel.flow)) if kernel.flow else together  # nor has this: its bodies have
    return kernel.name, kernel.origin, [(b.name, b.dtype.name, b.size, b.writable, b in loaded) for b in kernel.buffers], together


def _tiles(layout: TiledLayout | None) -> tuple[Any, ...]:
    return () if layout is None else (layout.shape, layout.parts, layout.cell)


def _shape(shape: Shape) -> tuple[Any, ...]:
    return shape.dtype.name, *shape.static


def _program(d: dict[str, Any], target: Target, parts: Sequence[bytes], depth: int = 0) -> tuple[Program, Sequence[bytes]]:
    """The program, and the remaining parts after its constants. `depth`: how many programs are around it."""
    if depth > NESTING:
        raise ValueError("sub-programs are in each other too deep")
    data = iter(parts)
    buffers = []
    for i, (region, shape, name, constant, tiles) in enumerate(d["buffers"]):
        made = _read_shape(shape)
        array = np.frombuffer(next(data, b""), made.dtype.numpy).reshape(made.static) if constant else None
        layout = tiles and TiledLayout(_ids(tiles[0]), tuple((_whole(a), _whole(s)) for a, s in tiles[1]), _whole(tiles[2]))
        if layout and layout.dims != made.dims:
            raise ValueError(f"the tiles {layout} take {layout.dims}, not {made}")
        buffers.append(BufferDecl(i, Region(region), made, as_text(name), array, layout or None))
    kernels = [_kernel(*row) for row in d["kernels"]]
    phases = {
        name: tuple(Step(kernels[_whole(k)], _ids(args), concurrent is True) for k, args, concurrent in d["phases"][name])
        for name in _PHASES
    }
    size, alignment, unshared, bound = map(_whole, d["plan"])
    plan = ArenaPlan(dict(_ids(pair) for pair in d["offsets"]), size, alignment, unshared, bound)  # type: ignore[arg-type]
    outputs = [(as_text(n), _whole(b), made := _read_shape(s), _actives(made, rows)) for n, b, s, rows in d["outputs"]]
    saved = _ids(d["saved"])
    if any(at >= len(phases["steps"]) for at in saved) or len(saved) != len(phases["abort"]):
        raise ValueError("abort undoes steps that do not exist")
    extent = None if d["extent"] is None else _whole(d["extent"])
    inputs = _ids(d["inputs"])
    if extent is not None and extent not in inputs:
        raise ValueError("the extent is not an input")
    program = Program(
        as_text(d["name"]), target, tuple(buffers), phases["prepare"], phases["steps"], phases["commit"], inputs,
        _ids(d["params"]), _ids(d["handles"]), tuple(OutputDecl(*o) for o in outputs), plan,
        tuple(zip(saved, phases["abort"])), tuple(_router(*row) for row in d["routers"]), extent,
        bodies=tuple(_program(body, target, (), depth + 1)[0] for body in d["bodies"]),
        nodes=tuple(NodeReport(*map(as_text, row)) for row in d["nodes"]),
    )  # fmt: skip
    return program, list(data)


def _router(
    buffer: int, shape: Sequence[Any], experts: int, params: Sequence[str], active: Sequence[Sequence[Any]], ahead: int
) -> RouterDecl:
    made = _read_shape(shape)
    if made.rank != 2 or (ahead and not 0 < _whole(ahead) < made.static[0]):
        raise ValueError(f"a router of {made}, {str(ahead)[:40]} rows of it guesses")
    return RouterDecl(_whole(buffer), made, _whole(experts), tuple(map(as_text, params)), _actives(made, active), _whole(ahead))


def _actives(shape: Shape, rows: Sequence[Sequence[Any]]) -> tuple[Active, ...]:
    found = tuple(Active(*_ids(row)) for row in rows)
    if not all(a.axis < shape.rank and a.inner and a.upper for a in found):
        raise ValueError(f"{shape} has no active axes {found}")
    return found


_PHASES = ("prepare", "steps", "commit", "abort")


def _kernel(name: str, origin: Sequence[str], rows: Sequence[Sequence[Any]], together: Any) -> Kernel:
    """A kernel that is described only by the buffers it loads and stores. A collective is restored completely."""
    buffers = tuple(Buffer(as_text(n), DTYPES[dtype], _whole(size), writable is True) for n, dtype, size, writable, _ in rows)
    loaded = tuple(View(b, (b.size,), (1,)) for b, row in zip(buffers, rows) if row[4] is True)
    stored = tuple(View(b, (b.size,), (1,)) for b in buffers if b.writable)
    native = Native("compiled", None, loaded, stored)
    if together is not None and together[0] == FLOW:
        flow = FlowAttrs(**{k: _tuples(v) for k, v in together[1].items()})
        if not all(fits(getattr(flow, k), hint) for k, hint in attribute_types(FlowAttrs).items()):
            raise ValueError(f"no flow: {str(together)[:100]}")
        native = Native(FLOW, flow, loaded, stored)
    elif together is not None:
        op = OPS[together[0]]
        if op.kind is not Kind.COLLECTIVE or (len(loaded), len(stored)) != (1, 1):
            raise ValueError(f"{together[0]} is not a collective of one operand")
        native = Native(op.name, op.make_attrs(together[1]), loaded, stored)
    return Kernel(as_text(name), buffers, (), (), (native,), tuple(map(as_text, origin)))


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _work(least: Any, rows: Sequence[Sequence[Any]]) -> ProgramWork:
    kernels = []
    for name, read, written, once, flops, received in rows:
        counted = None if flops is None else _whole(flops)
        kernels.append(KernelWork(as_text(name), _whole(read), _whole(written), _whole(once), counted, _whole(received)))
    return ProgramWork(tuple(kernels), _whole(least))


def _tuning(why: Any, rows: Sequence[Sequence[Any]]) -> Tuning:
    steps = []
    for key, how, *pairs, default_ns, tiling_ns, tried in rows:
        tiling, default = (tuple((as_text(name), _whole(value)) for name, value in pair) for pair in pairs)
        numbers = _ids((default_ns, tiling_ns, tried))
        steps.append(TunedStep(as_text(key), as_text(how), tiling, default, *numbers))
    return Tuning(tuple(steps), as_text(why))


def _read_shape(given: Sequence[Any]) -> Shape:
    return _shape_of(as_text(given[0]), _ids(given[1:]))


@lru_cache(256)
def _shape_of(dtype: str, dims: tuple[int, ...]) -> Shape:
    return Shape(dims, DTYPES[dtype])


def _ids(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_whole, given))


def _whole(x: Any) -> int:
    if type(x) is not int or not 0 <= x < 1 << 62:
        raise ValueError(f"{str(x)[:40]!r} is not a number of bytes or elements")
    return x


def as_text(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{str(x)[:40]!r} is not a string")
    return x

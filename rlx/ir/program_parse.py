"""Parser for the text of programs (rlx.ir.program.print_program). The text is untrusted: bad text is a ParseError that names the
line.

The result is well formed: all named buffers, kernels and steps exist, and the arguments of steps match their kernels in number,
size and dtype. rlx.compiler.check checks that a run is sound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from rlx.ir.graph import Active
from rlx.ir.kernel import Kernel, in_kernels
from rlx.ir.kernel_parse import KernelParser
from rlx.ir.layout import TiledLayout
from rlx.ir.program import ArenaPlan, BufferDecl, OutputDecl, Program, Region, RouterDecl, Step
from rlx.ir.shape import Shape
from rlx.ir.target import Target
from rlx.ir.tokens import name_text

PHASES = ("prepare", "steps", "commit", "abort")
MOST_INDENT = 16
REGIONS = {r.value: r for r in Region}


def parse_program(text: str, target: Target, constants: Mapping[str, np.ndarray] | None = None) -> Program:
    """The program for `target` from the full text of `print_program`. `constants`: digest (`digest_of`) -> array, for constants
    that the text names by digest. ParseError, naming the line: bad text, another target, or a missing constant."""
    return _Parser(text, target, constants or {}).program()


def digest_of(data: np.ndarray) -> str:
    """The digest that replaces a large constant in a program's text."""
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()


class _Parser(KernelParser):
    def __init__(self, text: str, target: Target, constants: Mapping[str, np.ndarray]) -> None:
        super().__init__(text, "a program")
        self.target, self.constants = target, constants
        self.decls: list[BufferDecl] = []
        self.offsets: dict[int, int] = {}
        self.kernels: dict[str, Kernel] = {}
        self.indent = 0  # levels of the program's own lines

    def program(self) -> Program:
        found = self.one()
        self.skip_blank()
        return found if self.ended else self.fail("nothing after the phase abort")

    def body(self) -> Program:
        """A sub-program, which has the kernels of the one around it."""
        outside = self.decls, self.offsets, self.indent
        self.decls, self.offsets, self.indent = [], {}, self.depth
        if self.indent > MOST_INDENT:
            self.error("sub-programs are in each other too deep")
        found = self.one()
        self.decls, self.offsets, self.indent = outside
        return found

    def one(self) -> Program:
        self.skip_blank()
        self.expect("program", "program NAME")
        name = self.name("the program's name")
        self.expect("for", "for TARGET")
        if (made_for := self.name("the target's name")) != self.target.name:
            self.error(f"the program is for {made_for}, the target is {self.target.name}")
        self.advance()
        sizes = self.plan()
        while self.kind == "ref":
            self.decl()
        inputs, params, handles = (self.role(role) for role in ("inputs", "params", "handles"))
        extent = self.role("extent")[0] if self.text == "extent" else None
        outputs: list[OutputDecl] = []
        while self.text == "output":
            outputs.append(self.output())
        routers: list[RouterDecl] = []
        while self.text == "router":
            routers.append(self.router())
        while self.text == "kernel":
            self.add_kernel()
        bodies: list[Program] = []
        while self.text == "program":
            bodies.append(self.body())
        phases = [self.phase(phase) for phase in PHASES]
        *others, undone = phases
        prepare, steps, commit = (tuple(step for _, step in phase) for phase in others)
        if wrong := [at for at, _ in undone if not 0 <= at < len(steps)]:
            self.error(f"a step of abort is after step {wrong[0]} of {len(steps)}")
        plan = ArenaPlan(self.offsets, *sizes)
        return Program(
            name, self.target, tuple(self.decls), prepare, steps, commit, inputs, params, handles, tuple(outputs), plan,
            tuple(undone), tuple(routers), extent, tuple(bodies),
        )  # fmt: skip

    def plan(self) -> tuple[int, ...]:
        """arena SIZE bytes, alignment N, unshared N, at least N"""
        self.expect("arena")
        found = [self.count("the arena's size")]
        for mark in (("bytes",), (",", "alignment"), (",", "unshared"), (",", "at", "least")):
            for word in mark:
                self.expect(word)
            if mark != ("bytes",):
                found.append(self.count(mark[-1]))
        self.advance()
        return tuple(found)

    def decl(self) -> None:
        """%ID REGION NAME SHAPE [in tiles …] [@ OFFSET] [= CONSTANT]"""
        if self.next("ref", "a buffer") != f"%{len(self.decls)}":
            self.error(f"buffers are numbered in order; expected %{len(self.decls)}")
        region = self.choose(REGIONS, f"a region ({', '.join(REGIONS)})")
        name, shape = self.name("the buffer's name"), self.static_shape()
        layout = self.tiles() if self.accept("in") else None
        if self.accept("@"):
            self.offsets[len(self.decls)] = self.count("an offset in bytes")
        data = self.data(shape) if region is Region.CONSTANT else None
        self.decls.append(BufferDecl(len(self.decls), region, shape, name, data, layout))
        self.advance()

    def static_shape(self) -> Shape:
        shape = self.shape()
        return shape if shape.is_static else self.error(f"the dims of {shape} are integers in a program")

    def data(self, shape: Shape) -> np.ndarray:
        self.expect("=")
        if not self.accept("sha256"):
            return self.constant([] if self.kind == "end" else self.listed(self.number_text), shape)
        digest = self.name("a digest in a string")
        found = self.constants.get(digest)
        if found is None:
            self.error(f"the constant of digest {digest[:16]}… is not given")
        if found.dtype != shape.dtype.numpy or found.shape != shape.static or digest_of(found) != digest:
            self.error(f"the constant given for digest {digest[:16]}… differs from the {shape} of the text")
        return found

    def tiles(self) -> TiledLayout:
        """tiles PARTS[, N each] of [DIMS]"""
        self.expect("tiles")
        parts, cell = self.attribute(), 1
        if self.accept(","):
            cell = self.count("elements of a cell")
            self.expect("each")
        self.expect("of")
        self.expect("[")
        dims = tuple(self.count("a dim") for _ in self.items("]"))
        pairs = isinstance(parts, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in parts)
        if not pairs or not all(isinstance(x, int) for p in parts for x in p):
            self.error("tiles are pairs of an axis and a step, as ((1, 8), (0, 1), (1, 1))")
        if any(not 0 <= axis < len(dims) or step < 1 for axis, step in parts) or not parts or cell < 1:
            self.error(f"tiles have axes of [{', '.join(map(str, dims))}] and steps of at least 1, found {parts}")
        return TiledLayout(dims, parts, cell)

    # -- references to buffers

    def buffer(self) -> BufferDecl:
        ref = self.next("ref", "a buffer (%N)")
        number = ref[1:]
        if not number.isdigit() or int(number) >= len(self.decls):
            self.error(f"there is no buffer {ref}; there are {len(self.decls)}")
        return self.decls[int(number)]

    def role(self, role: str) -> tuple[int, ...]:
        """ROLE %A, %B …"""
        self.expect(role)
        found = self.listed(lambda: self.buffer().id) if self.kind == "ref" else []
        self.advance()
        return tuple(found) if found or role != "extent" else self.error("extent names a buffer")

    def output(self) -> OutputDecl:
        self.at += 1
        name = self.name("the output's name")
        self.expect("=")
        made = OutputDecl(name, self.buffer().id, self.static_shape(), self.active())
        self.advance()
        return made

    def router(self) -> RouterDecl:
        """router %ID SHAPE [active …] experts N [ahead N] [of PARAM, …]"""
        self.at += 1
        buffer, shape, active = self.buffer().id, self.static_shape(), self.active()
        self.expect("experts")
        experts = self.count("a number of experts")
        ahead = self.count("a number of rows") if self.accept("ahead") else 0
        params = self.listed(lambda: self.name("a param's name")) if self.accept("of") else []
        self.advance()
        return RouterDecl(buffer, shape, experts, tuple(params), active, ahead)

    def active(self) -> tuple[Active, ...]:
        active = list[Active]()
        while self.accept("active"):
            self.expect("(")
            numbers = [self.count("a number of rows") for _ in self.items(")")]
            if len(numbers) != len(Active._fields):
                self.error(f"active rows are ({', '.join(Active._fields)}), found {len(numbers)} numbers")
            active.append(Active(*numbers))
        return tuple(active)

    # -- kernels and steps

    def add_kernel(self) -> None:
        kernel = self.kernel()
        name, n = name_text(kernel.name), 1
        while (label := f"{name}@{n}" if n > 1 else name) in self.kernels:
            n += 1
        self.kernels[label] = kernel

    def phase(self, phase: str) -> list[tuple[int, Step]]:
        """The steps, each with the number of the step that it follows (abort), else 0."""
        self.expect(phase, f"{phase}:")
        self.expect(":")
        self.advance()
        found: list[tuple[int, Step]] = []
        while not self.ended and (self.kind == "end" or self.depth == self.indent + 1):
            if self.kind != "end":
                found.append(self.step(phase))
            self.advance()
        return found

    def step(self, phase: str) -> tuple[int, Step]:
        concurrent, at = self.accept("|"), 0
        if phase == "abort":
            self.expect("after", "after N")
            at = self.count("the number of a step")
        label = name_text(self.name("a kernel's name"))
        if self.accept("@"):
            label += f"@{self.count('the number among kernels of that name')}"
        if label not in self.kernels:
            self.error(f"no kernel is called {label}; there are {', '.join(self.kernels) or 'none'}")
        kernel, args = self.kernels[label], []
        self.expect("(")
        for _ in self.items(")"):
            written, buffer = self.accept("out"), self.buffer()
            if len(args) < len(kernel.buffers):
                self.fits(kernel, len(args), buffer, written)
            args.append(buffer.id)
        if len(args) != len(kernel.buffers):
            self.error(f"{label} takes {len(kernel.buffers)} buffers, found {len(args)}")
        return at, Step(kernel, tuple(args), concurrent)

    def fits(self, kernel: Kernel, n: int, buffer: BufferDecl, written: bool) -> None:
        """ParseError unless `buffer` may be argument number `n`."""
        wants = kernel.buffers[n]
        if wants.writable != written:
            how = "written: write out before it" if wants.writable else "only read: it has no out before it"
            self.error(f"argument {n} of {kernel.name} is {how}")
        dtype, size = in_kernels(buffer.shape.dtype, buffer.shape.num_elements)
        if wants.dtype != dtype or wants.size > size:
            self.error(f"argument {n} of {kernel.name} is {wants.dtype}[{wants.size}], found %{buffer.id} {buffer.shape}")


"""Scatters of few updates into a large tensor: blocks copy a tile each, in vectors, and look at the indices that may select some
of it; then they combine these places with their updates. Rows that indices select as a whole are not copied, nor is a result that
has the memory of the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import BEGIN
from rlx.backends.cuda.scatter import Patch, UpdateWriter, name_pick, patch_of, shares, tile_cells, unclamped, way_of
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import BYTES
from rlx.ir.nest import joined
from rlx.records import record

from rlx.ir.kernel import Kernel, Load, coefficient, is_const, walk  # isort: skip

FEW_THREADS, THREADS, LARGE = 256, 512, 1 << 15  # of a block; the latter for tiles of as many bytes


@record
class PatchLaunch(Launch):
    """`vector`: columns of an update that a thread has at once."""

    patch: Patch | None = None

    @property
    def blocks(self) -> int:
        assert self.patch
        return self.patch.tiles


def patched(kernel: Kernel) -> PatchLaunch | None:
    """The launch of a scatter as a copy with few updates; None: it is something else, or done otherwise."""
    (found, way), patch = way_of(kernel), patch_of(kernel)
    if not found or way != "patched" or not patch or shares(kernel, found):
        return None
    each = found.last.buffer.dtype.itemsize
    if found.of_all:
        grid, body = joined(kernel.grid, kernel.body)
        kernel = replace(kernel, grid=tuple(grid), body=body)
    near = [n for v, n in kernel.grid if coefficient(found.last.index, v) == 1 != n] or [1]
    vector = math.gcd(BYTES // each, near[0]) if found.of_all and patch.inner > 1 else 1
    return PatchLaunch(kernel, 1, THREADS if patch.size * each >= LARGE else FEW_THREADS, vector=vector, patch=patch)


class PatchWriter(UpdateWriter):
    """Tiles are parts of the flat tensor from element `first` on, or of some columns of a line, from place `row` on."""

    launch: PatchLaunch
    headers = ("patched.h",)

    def __init__(self, launch: PatchLaunch) -> None:
        super().__init__(launch)
        assert launch.patch
        self.found, self.patch, self.occupancy = unclamped(self.found), launch.patch, f", {1024 // launch.threads}"
        self.places, self.line_size = self.found.end.extent, self.found.end.extent * self.patch.inner
        self.own = 1 if self.found.of_all else self.patch.columns or self.patch.inner  # columns with indices of their own

    def coordinates(self) -> Iterator[str]:
        p, number, total = self.patch, f"(int){self.block_number}", self.found.last.buffer.size
        if p.columns:
            across, down = -(-p.inner // p.columns), -(-self.places * p.columns // p.size)
            yield f"const int column = {number} % {across} * {p.columns}, outer = {number} / {across * down};"
            yield f"const int row = {number} / {across} % {down} * {p.size // p.columns}, picks = {p.picks};"
            return
        yield f"const int first = {number} * {p.size}, size = min({p.size}, {total} - first), column = 0;"
        yield f"const int outer = first / {self.line_size}, row = first / {p.inner};"
        yield f"const int picks = ((first + size - 1) / {self.line_size} - outer + 1) * {self.found.count * self.own};"

    def begin(self) -> None:
        self.line(BEGIN)

    def body(self) -> None:
        """Functions of elements, picks and cells of the tile, which rlx_patch calls."""
        at, p, found, out = self.launch, self.patch, self.found, self.found.last
        element, kind = CUDA.element(out.buffer.dtype), self.type(found.put.buffer.dtype)
        vector = math.gcd(BYTES // out.buffer.dtype.itemsize, *((p.columns, p.inner) if p.columns else ()))
        with self.alone():
            self.of_elements(vector)
            self.of_picks()
            self.of_cells(kind)
        cells = tile_cells(p, found.of_all)
        fills = str(is_const(found.first.value.index)).lower()  # type: ignore[union-attr]
        groups = -(-min(p.inner, p.size) // at.vector) if found.of_all else 1
        sizes = f"{at.threads}, {vector}, {p.size}, {cells}, {groups}, {at.vector}, {p.picks}, {fills}"
        functions = f"inside, at, cell, look, place, has, begin, added, {self.combined()}, finish"
        self.line(f"rlx_patch<{sizes}, {kind}, {element}>({self.names[out.buffer]}, from, picks, stays, {functions});")

    @contextmanager
    def of(self, name: str, arguments: str, result: str = "") -> Iterator[None]:
        """The function `name` of the kernel."""
        with self.scope([f"const auto {name} = [&]({arguments}){f' -> {result}' * bool(result)} {{"]):
            yield
        self.lines[-1] += ";"

    def of_elements(self, vector: int) -> None:
        p, start, out = self.patch, self.found.first.value, self.names[self.found.last.buffer]
        inside, at = "e < size", "first + e"
        if p.columns:
            inside = f"column + e % {p.columns} < {p.inner} && row + e / {p.columns} < {self.places}"
            at = f"(outer * {self.places} + row + e / {p.columns}) * {p.inner} + column + e % {p.columns}"
        self.line(f"const auto inside = [&](int e) {{ return {inside}; }};")
        self.line(f"const auto at = [&](int e) {{ return {at}; }};")
        of, last = f"(first + e) / {p.inner}", f"(first + e + {vector - 1}) / {p.inner}"
        one = f"{of} == {last} ? {of} - row : -1" if p.inner % vector else f"{of} - row"
        self.line(f"const auto cell = [&](int e) {{ return {one if self.found.of_all else -1}; }};")
        assert isinstance(start, Load)
        read, fills = self.names[start.buffer], is_const(start.index)
        self.line(f"const bool stays = {'false' if fills else f'(const void*){read} == (const void*){out}'};")
        self.line(f"const auto* from = {read}{f' + {self.value(start.index)}' if fills else ''};")

    def of_picks(self) -> None:
        """Pick `id` is that of a line, counted from the tile's first one outside, of its number there, and of a column."""
        p, found, size = self.patch, self.found, self.found.count * self.own
        index = next(x for x in walk((found.check, found.put.index)) if isinstance(x, Load))
        seen, partial = self.type(index.dtype), p.columns and p.inner % p.columns  # whether a tile may have fewer columns
        names = [f"const int pick = id / {self.own} % {found.count}, line = outer + id / {size};"]
        names.append(f"const int c = column{f' + id % {self.own}' * (self.own > 1)};")
        with self.of("look", "int id", seen):
            self.named(*names, f"if (c >= {p.inner}) return 0;" * bool(partial))
            self.line(f"return {self.value(index)};")
        with self.of("place", f"int id, {seen} seen", "int"):
            self.named(*names, f"if (c >= {p.inner}) return -1;" * bool(partial))
            self.memo[id(index)] = "seen"
            self.statement(found.check)
            inside, place = self.value(found.inside), self.value(found.put.index)
            to, most = f"(line * {self.places} + {place}) * {p.inner} + c - first", "size - 1"
            if p.columns:
                to, most = f"({place} - row) * {p.columns} + c - column", f"{p.size - 1}"
            elif found.of_all:
                to, most = f"line * {self.places} + {place} - row", f"(first + size - 1) / {p.inner} - row"
            self.line(f"const int to = {inside} ? {to} : -1;")
            self.line(f"return to >= 0 && to <= {most} ? to : -1;")

    def of_cells(self, kind: str) -> None:
        """A cell is an element, or the part of a row in the tile if indices are the same for all columns."""
        p, found, size = self.patch, self.found, self.launch.vector
        of, has = "at(cell)", "true"
        if found.of_all:
            of = f"max(first, (row + cell) * {p.inner}) + group * {size}"
            has = f"of(cell, group) < min(first + size, (row + cell + 1) * {p.inner})"
        self.line(f"const auto of = [&](int cell, int group) {{ return {of}; }};")
        self.line(f"const auto has = [&](int cell, int group) {{ return {has}; }};")
        names = "const int id = of(cell, group);", f"const int line = id / {self.line_size}, c = id % {p.inner};"
        row, to = f"const int i = id / {p.inner} % {self.places};", f"{kind} (&held)[{size}]"
        self.names[found.start.var] = self.names[found.end.var] = "i"
        with self.of("begin", f"int cell, int group, {to}"):
            self.named(*names, row)
            self.columns((), (found.first.value,))
        with self.of("added", f"int number, int cell, int group, {to}"):
            self.named(*names, f"const int pick = number / {self.own} % {found.count};")
            self.memo[id(found.inside)] = "true"
            self.columns((), (found.update,))
        with self.of("finish", f"int cell, int group, const {to}"):
            self.named(*names, row)
            self.memo[id(found.last.value)] = "held[v]"
            self.columns((found.last,), ())

    def named(self, *lines: str) -> None:
        """Write `lines`, then the coordinates of the grid from `line` and `c`, which are those outside and inside of a line, and
        that of updates from `pick`, if the lines name one."""
        for text in filter(None, lines):
            self.line(text)
        if any(" pick = " in text for text in lines):
            name_pick(self, self.found.picks)
        for v, n in self.kernel.grid:
            step, name = coefficient(self.found.last.index, v) or 1, self.fresh("g")
            number = f"line / {step // self.line_size}" if step > self.patch.inner else f"c / {step}"
            vector = self.launch.vector > 1 and v is self.kernel.grid[-1][0]
            self.line(f"const rlx_index {name}{'_0' * vector} = {f'{number} % {n}' if n > 1 else 0};")
            self.names[v], self.column = name, f"{name}_0"


__all__ = ["PatchLaunch", "PatchWriter", "patched"]

"""Sorts of the CPU: places of few elements are counted, the first of many come out of blocks, and all others go digit by digit.

A key is an unsigned integer that orders as the value does. An item of up to 32 bits has its place in the row below its key, so
that no two are equal and equal values keep their order; wider keys have places as items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlx.ir.dtype import DType, bool_, i32, index_, u32, u64
from rlx.ir.kernel import Carry, Contract, Expr, Kernel, Let, Load, Local, Loop, Reduce, Sort, Stmt, Store, Var, const, k
from rlx.ir.nest import changed, joined, substitute
from rlx.records import record

DIGIT = 8  # bits
LANES = 8  # items in a vector
LONGEST = 640  # row of those in lanes, whose items stay in the first-level cache
# Times in ns on Zen 4, of which only the order matters
EACH, COMPARED = 7, 0.55  # an item whose place is counted, and each vector that it is compared with
EACH_OF_VECTOR = 0.6  # an item of a row that is one vector
MOVED, DIGITS = 0.9, 65  # an item to its place by one digit, and the numbers of all values of a digit
SCANNED, TAKEN = 0.5, 25  # a vector of a block or of the best of blocks, and the next of all from there to its place

# Of rows in lanes, on Zen 5, in narrow and in wide items: a row, two items exchanged, an item made, and one stored
BEGUN, EXCHANGED, FETCHED, STORED = 2.5, (0.09, 0.13), (0.15, 0.25), (0.65, 1.0)


@record
class Line:
    """One row: what is sorted, its values, its items or the keys of wide ones, and room for other Locals."""

    s: Sort
    values: Local
    held: Local
    room: Callable[[str, DType, int], Local]

    @property
    def wide(self) -> bool:
        return self.s.value.dtype.itemsize > 4

    def place(self, item: Expr) -> Expr:
        return k.cast(item if self.wide else k.and_(item, const(2**32 - 1, u64)), index_)

    def digit(self, item: Expr, number: int) -> Expr:
        """The digit of a place value, 0 the lowest."""
        key = Load(self.held, k.cast(item, index_)) if self.wide else item
        shift = DIGIT * number + (0 if self.wide else 32)
        return k.cast(k.and_(k.shr(key, const(shift, u64)), const((1 << DIGIT) - 1, u64)), index_)

    def results(self, place: Expr) -> tuple[Stmt, ...]:
        """The body, for the element that was at `place`."""
        return Let(self.s.origin, place), Let(self.s.held, Load(self.values, self.s.origin)), *self.s.body


def sorts(kernel: Kernel) -> Kernel:
    """The same function without Sort."""
    kernel = rows_in_lanes(kernel)
    kept, per_row = list(kernel.locals), any(isinstance(s, Contract) for s in kernel.body)

    def room(name: str, dtype: DType, size: int) -> Local:
        kept.append(Local(f"{name}{len(kept)}", dtype, size, per_row))
        return kept[-1]

    def change(s: Stmt) -> tuple[Stmt, ...] | None:
        if not isinstance(s, Sort):
            return None
        s = replace(s, body=changed(s.body, change))
        return ordered(s, room) if s.kept else (Loop(s.to, 0, ()),)

    body = changed(kernel.body, change)
    return kernel if body is kernel.body else replace(kernel, locals=tuple(kept), body=body)


def rows_in_lanes(kernel: Kernel) -> Kernel:
    """A kernel that sorts many short rows, with a row in each lane, if that is estimated to be faster: all go through one network
    of exchanges."""
    if not kernel.grid or kernel.locals or kernel.limits or len(kernel.body) != 1 or not isinstance(s := kernel.body[0], Sort):
        return kernel
    (*grid, (row, rows)), (value, *body) = joined(kernel.grid, (Let(s.held, s.value), *s.body))
    stores = [x for x in body if isinstance(x, Store) and x.guard is None]
    if not isinstance(value, Let) or stores != body or not s.kept or not rows or s.n > LONGEST:
        return kernel
    if in_lanes_ns(s, rows) > min(algorithms(s).values()):
        return kernel
    group, lane, wide, size = Var("group"), Var("lane"), s.value.dtype.itemsize > 4, s.n * LANES
    at = k.add(k.mul(group, const(LANES)), lane)
    inside = k.lt(at, const(rows)) if rows % LANES else None
    values, items, places = Local("values", s.value.dtype, size), Local("items", u64, size), Local("places", i32, size)
    slot = lambda i: k.add(k.mul(i, const(LANES)), lane)  # noqa: E731
    key, here = key_of(Load(values, slot(s.i)), s.descending), slot(s.i)
    item = key if wide else k.or_(k.shl(k.cast(key, u64), const(32, u64)), k.cast(s.i, u64))
    number = [Store(places, here, k.cast(s.i, i32))] if wide else []
    found = substitute(value.value, {row: at}, guard=inside)
    fill = Loop(s.i, s.n, (Store(values, here, found), Store(items, here, item), *number))
    passes = [
        Loop(run, count, (Loop(j, length, exchanged(items, places if wide else None, slot(i), slot(k.add(i, const(apart))))),))
        for run, count, j, length, i, apart in merge_exchange(s.n)
    ]  # fmt: skip
    origin = Load(places, slot(s.to)) if wide else k.and_(Load(items, slot(s.to)), const(2**32 - 1, u64))
    results = Let(s.origin, k.cast(origin, index_)), Let(s.held, Load(values, slot(s.origin)))
    out = Loop(s.to, s.kept, (*results, *(replace(substitute(x, {row: at}), guard=inside) for x in stores)))
    lanes = Loop(lane, LANES, (fill, *passes, out), vector=True)
    held = (values, items, places) if wide else (values, items)
    return replace(kernel, locals=held, grid=(*grid, (group, -(-rows // LANES))), body=(lanes,))


def exchanged(items: Local, places: Local | None, low: Expr, high: Expr) -> tuple[Stmt, ...]:
    """Two items in order. Wide ones, of which several may be equal, have places."""
    a, b, p, q = Var("a", u64), Var("b", u64), Var("p", i32), Var("q", i32)
    read = Let(a, Load(items, low)), Let(b, Load(items, high))
    if places is None:
        return *read, Store(items, low, k.min(a, b)), Store(items, high, k.max(a, b))
    swap = k.or_(k.lt(b, a), k.and_(k.eq(a, b), k.lt(q, p)))
    return (
        *read, Let(p, Load(places, low)), Let(q, Load(places, high)),
        Store(items, low, k.select(swap, b, a)), Store(items, high, k.select(swap, a, b)),
        Store(places, low, k.select(swap, q, p)), Store(places, high, k.select(swap, p, q)),
    )  # fmt: skip


def merge_exchange(n: int) -> Iterator[tuple[Var, int, Var, int, Expr, int]]:
    """The passes of K. E. Batcher's sort of n items, as D. E. Knuth gives it (5.2.2, algorithm M): variables and extents of two
    loops, an item, and how far the one is that it is exchanged with. Items come in runs of p; of the last there may be a part."""
    top = p = (1 << (n - 1).bit_length()) // 2
    while p:
        q, r, d = top, 0, p
        while True:
            runs = max(0, (n - d - r + p) // (2 * p))
            first = r + 2 * p * runs
            for count, length, start in ((runs, p, r), (1, n - d - first, first)):
                if count > 0 and length > 0:
                    run, j = Var("run"), Var("j")
                    yield run, count, j, length, k.add(k.add(k.mul(run, const(2 * p)), const(start)), j), d
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2


def in_lanes_ns(s: Sort, rows: int) -> float:
    """Estimated time of a row, where the last of them do not fill their lanes."""
    wide = s.value.dtype.itemsize > 4
    exchanges = sum(count * length for _, count, _, length, _, _ in merge_exchange(s.n))
    time = BEGUN + exchanges * EXCHANGED[wide] + s.n * FETCHED[wide] + s.kept * STORED[wide]
    return time * -(-rows // LANES) * LANES / rows


def algorithms(s: Sort) -> dict[Callable[[Line], tuple[Stmt, ...]], float]:
    """Those that sort one row, with their estimated times."""
    digits, block, n = s.value.dtype.itemsize * 8 // DIGIT, block_of(s.n), s.n
    times: dict[Callable[[Line], tuple[Stmt, ...]], float] = {
        counted: n * ((EACH_OF_VECTOR if n in (1, 2, 4, LANES) else EACH) + -(-n // LANES) * COMPARED),
        by_digits: (digits + 1) * n * MOVED + digits * DIGITS,
    }
    taken = (n + s.kept * (block - (-n // block))) / LANES * SCANNED
    if s.value.dtype.itemsize <= 4:
        times[out_of_blocks] = taken + s.kept * TAKEN
    elif n < 1 << 31:
        times[wide_out_of_blocks] = 2 * (taken + s.kept * TAKEN)
    return times


def ordered(s: Sort, room: Callable[[str, DType, int], Local]) -> tuple[Stmt, ...]:
    times, block = algorithms(s), block_of(s.n)
    chosen, blocks = min(times, key=times.__getitem__), -(-s.n // block)
    line = Line(s, room("values", s.value.dtype, s.n), room("items", u64, blocks * block), room)
    key, value = key_of(Load(line.values, s.i), s.descending), s.value
    item = key if line.wide else k.or_(k.shl(k.cast(key, u64), const(32, u64)), k.cast(s.i, u64))
    fill = (
        Loop(s.i, s.n, (Store(line.values, s.i, value),), vector=True),
        Loop(s.i, s.n, (Store(line.held, s.i, item),), vector=True),
    )
    return (*fill, *chosen(line))


def key_of(value: Expr, descending: bool) -> Expr:
    """An unsigned integer, of 32 or 64 bits, that is less where the value comes earlier. NaN is the greatest value, zeros are
    alike."""
    dtype = value.dtype
    bits, wide = 8 * dtype.itemsize, u64 if dtype.itemsize > 4 else u32
    sign, most = const(1 << (bits - 1), wide), const((1 << bits) - 1, wide)
    if dtype.is_float:
        raw = k.bitcast(k.add(value, const(0, dtype)), dtype=wide)  # -0.0 becomes 0.0
        key = k.select(k.lt(raw, sign), k.or_(raw, sign), k.not_(raw))
        key = k.select(k.ne(value, value), most, key)
    else:
        key = k.and_(k.cast(value, wide), most)
        key = k.xor(key, sign) if dtype.kind == "i" else key
    return k.sub(most, key) if descending else key


def counted(line: Line) -> tuple[Stmt, ...]:
    """The place of an item is the number of items in front of it."""
    s, j, rank, order = line.s, Var("j"), Var("rank"), line.room("order", i32, line.s.n)
    own, other = Load(line.held, s.i), Load(line.held, j)
    before = k.lt(other, own)
    if line.wide:
        before = k.or_(before, k.and_(k.eq(other, own), k.lt(j, s.i)))
    count = Loop(j, s.n, (), vector=True, reduces=(Reduce(rank, "add", k.cast(before, index_)),))
    rank_all = Loop(s.i, s.n, (count, Store(order, rank, k.cast(s.i, i32))))
    return rank_all, Loop(s.to, s.kept, line.results(k.cast(Load(order, s.to), index_)))


def by_digits(line: Line) -> tuple[Stmt, ...]:
    """H. H. Seward's sort by counting, from the lowest digit to the highest; all digits are counted at once."""
    s, digits = line.s, line.s.value.dtype.itemsize * 8 // DIGIT
    numbers, source, target = line.room("numbers", i32, digits << DIGIT), line.held, line.room("moved", u64, s.n)
    d, item, made = Var("d"), Var("item", u64), list[Stmt]()
    if line.wide:
        source = line.room("places", u64, s.n)
        made.append(Loop(s.i, s.n, (Store(source, s.i, k.cast(s.i, u64)),), vector=True))
    made.append(Loop(d, digits << DIGIT, (Store(numbers, d, const(0, i32)),), vector=True))
    of_item = [k.add(line.digit(item, n), const(n << DIGIT)) for n in range(digits)]
    more = (Store(numbers, at, k.add(Load(numbers, at), const(1, i32))) for at in of_item)
    made.append(Loop(s.i, s.n, (Let(item, Load(source, s.i)), *more)))
    for n in range(digits):
        made += moved(line, n, numbers, source, target)
        source, target = target, source
    return *made, Loop(s.to, s.kept, line.results(line.place(Load(source, s.to))))


def moved(line: Line, number: int, numbers: Local, source: Local, target: Local) -> tuple[Stmt, ...]:
    """Items of `source` in `target`, in the order of one digit; `numbers` counts the items of each value and then says where the
    next one goes."""
    d, total, count = Var("d"), Var("total", i32), Var("count", i32)
    here = k.add(d, const(number << DIGIT))
    starts = Let(count, Load(numbers, here)), Store(numbers, here, total)
    sums = Loop(d, 1 << DIGIT, starts, carries=(Carry(total, const(0, i32), k.add(total, count)),))
    item, slot, to = Var("item", u64), Var("slot"), Var("to", i32)
    move = (
        Let(item, Load(source, line.s.i)), Let(slot, k.add(line.digit(item, number), const(number << DIGIT))),
        Let(to, Load(numbers, slot)), Store(target, k.cast(to, index_), item), Store(numbers, slot, k.add(to, const(1, i32))),
    )  # fmt: skip
    return sums, Loop(line.s.i, line.s.n, move)


def block_of(n: int) -> int:
    """Items in a block, a power of two: as many as there are blocks, or up to twice as many."""
    return max(2 * LANES, 1 << ((n - 1).bit_length() + 1) // 2)


def out_of_blocks(line: Line) -> tuple[Stmt, ...]:
    """The least item of every block is kept. The least of those comes next, and its block's least greater one takes its place."""
    s, j, b, block = line.s, Var("j"), Var("b"), block_of(line.s.n)
    blocks, none = -(-s.n // block), const(2**64 - 1, u64)
    heads = line.room("heads", u64, blocks)
    first, least, following, where = Var("first", u64), Var("least", u64), Var("following", u64), Var("where")
    rest = Loop(j, blocks * block - s.n, (Store(line.held, k.add(j, const(s.n)), none),), vector=True)
    head = Reduce(first, "min", Load(line.held, k.add(k.mul(b, const(block)), j)))
    heads_of_all = Loop(b, blocks, (Loop(j, block, (), vector=True, reduces=(head,)), Store(heads, b, first)))
    of_all = Loop(b, blocks, (), vector=True, reduces=(Reduce(least, "min", Load(heads, b)),))
    item = Load(line.held, k.add(k.mul(where, const(block)), j))
    behind = Reduce(following, "min", k.select(k.lt(least, item), item, none))
    take = (
        of_all, Let(where, k.div(line.place(least), const(block))), Loop(j, block, (), vector=True, reduces=(behind,)),
        Store(heads, where, following), *line.results(line.place(least)),
    )  # fmt: skip
    return rest, heads_of_all, Loop(s.to, s.kept, take)


def wide_out_of_blocks(line: Line) -> tuple[Stmt, ...]:
    """The same for keys of which several may be equal: beside the least key of every block its first place is kept, n where the
    block has no more."""
    s, j, b, block = line.s, Var("j"), Var("b"), block_of(line.s.n)
    blocks, none, end = -(-s.n // block), const(2**64 - 1, u64), const(s.n, i32)
    heads, places = line.room("heads", u64, blocks), line.room("places", i32, blocks)
    least, origin = Var("least", u64), Var("origin", i32)

    def store_head(of: Expr, greater: Callable[[Expr, Expr], Expr] | None) -> tuple[Stmt, ...]:
        """The least of a block's items, or of its later ones, and where it is."""
        first, place, at = Var("first", u64), Var("place", i32), k.add(k.mul(of, const(block)), j)
        item, here = Load(line.held, at), k.cast(at, i32)
        later = greater(item, here) if greater else const(True, bool_)
        alike = k.and_(later, k.eq(item, first))
        return (
            Loop(j, block, (), vector=True, reduces=(Reduce(first, "min", k.select(later, item, none)),)),
            Loop(j, block, (), vector=True, reduces=(Reduce(place, "min", k.select(alike, here, end)),)),
            Store(heads, of, first), Store(places, of, place),
        )  # fmt: skip

    rest = Loop(j, blocks * block - s.n, (Store(line.held, k.add(j, const(s.n)), none),), vector=True)
    first_of_all = k.select(k.eq(Load(heads, b), least), Load(places, b), end)
    where = Var("where")
    take = (
        Loop(b, blocks, (), vector=True, reduces=(Reduce(least, "min", Load(heads, b)),)),
        Loop(b, blocks, (), vector=True, reduces=(Reduce(origin, "min", first_of_all),)),
        Let(where, k.div(k.cast(origin, index_), const(block))),
        *store_head(where, lambda item, here: k.or_(k.lt(least, item), k.and_(k.eq(item, least), k.lt(origin, here)))),
        *line.results(k.cast(origin, index_)),
    )
    return rest, Loop(b, blocks, store_head(b, None)), Loop(s.to, s.kept, take)

"""Fusion: which nodes share a kernel. Legalised graph in, groups in execution order out; no kernel is written here.

A group iterates over one space, `dims`. Nodes join the group of a producer when every element they need is the one just
computed (pointwise), or a reduction over the last axis of it (row programs: softmax, norms). The producer may be a
contraction: then the pointwise nodes become its epilogue and the reductions run on each finished row. Nodes read at other
coordinates (under a view, a gather, a reduction over another axis) are absorbed when they have no other reader, and are
recomputed where they are read; otherwise they are written to memory. A contraction absorbs the producers of its operands if
the target's cost estimate says that this is faster (rlx/compiler/operands.py). More than 500 lines, since all steps of the walk
share its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import count

from rlx.compiler.canonicalise import MOST_JOINED
from rlx.compiler.facts import Facts
from rlx.compiler.groups import Group
from rlx.compiler.operands import computable, producer, row_axes
from rlx.compiler.packing import contraction, reduction, widens
from rlx.ir.dtype import bf16
from rlx.ir.graph import Graph, Node, Value, postorder
from rlx.ir.op import Kind
from rlx.ir.shape import contiguous_strides

MAX_NODES = 48  # nodes per kernel: keeps expressions shallow and kernels quick to compile
MAX_EVALUATIONS = 32  # node evaluations per element: a node read at several coordinates is recomputed at each, with its operands
_ANCHORS = (Kind.KERNEL, Kind.CONTRACT, Kind.COLLECTIVE, Kind.CONTROL)
FEW = 4  # elements that a pointwise reader computes again rather than have a kernel do so, where kernels are to be few
MIN_ROWS = 2  # per grid point that the target needs: with fewer, distributing whole rows leaves threads idle
SHARED_ROWS = 32  # of a reader: with more, multiplying takes longer than reading the weights
UNIT_ROWS = 128  # of all readers of bf16 weights: up to there, a matrix unit multiplies them sooner than they are read
REREAD = 1 << 26  # bytes that all of them read so, at most: more take longer than a kernel of its own for the rows


def fuse(facts: Facts) -> list[Group]:
    """The groups of a graph's nodes, in execution order. Options can disable all fusion ("fuse"), "operands" (computed operands
    of contractions), and "followers" (epilogues of claimed ops)."""
    return _Fuser(facts).run()


class _Fuser:
    """Walks the nodes once, operands before users, and keeps the groups acyclic."""

    def __init__(self, facts: Facts) -> None:
        graph, compilation, off = facts.graph, facts.compilation, facts.compilation.options.disable
        self.target, self.places, self.alone = facts.target, facts.places, "fuse" in off
        self.is_native, self.is_static = compilation.is_native, compilation.is_static
        self.joins_rows = facts.target.few_kernels and not self.alone
        self.computes = not self.alone and "operands" not in off
        self.followed = frozenset() if "followers" in off else facts.target.followed
        self.after = dict(facts.before)
        self.updated = {v.node for u in graph.updates for v in (u.result, u.undo) if v is not None}
        self.saved = {u.saved.node for u in graph.updates if u.saved is not None}
        self.nodes = self.in_order(graph)
        exchanges = [n for n in self.nodes if n.op.kind is Kind.COLLECTIVE]
        if len(exchanges) > 1:  # collectives run in graph order, whatever is fused: the same order on every rank
            self.after |= {b: [*self.after.get(b, ()), a] for a, b in zip(exchanges, exchanges[1:])}
            self.nodes = self.in_order(graph)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.group_of: dict[Node, Group] = {}
        self.groups: dict[Group, None] = {}  # in order of creation
        self.numbers = count()
        self.readers: dict[Value, set[Node]] = {}  # result -> the nodes that read it, through views too
        for node in self.nodes:
            for value in self.operands(node):
                self.readers.setdefault(value, set()).add(node)
                if self.places.is_alias(value.node):
                    self.readers.setdefault(self.places.base(value), set()).add(node)
        self.roots = {self.places.base(v) for v in graph.roots()} | {v for n in self.nodes if n.op.observed for v in n.results}

    def run(self) -> list[Group]:
        for node in self.nodes:
            if node.op.kind is not Kind.LEAF and not self.places.is_alias(node):
                self.place(node)
        for group in list(self.groups) if self.joins_rows else ():
            self.read_narrow(group)
        ordered = self.ordered()
        for group in ordered:
            made = [v for n in group.nodes if n not in group.absorbed and not self.places.is_alias(n) for v in n.results]
            group.stores = dict.fromkeys(v for v in made if self.is_stored(v, group))
        return [g for g in ordered if g.stores]

    def in_order(self, graph: Graph) -> list[Node]:
        """All nodes, each after its operands and its extra ordering edges."""
        return postorder((node.results[0] for node in graph.nodes()), before=self.after)[0] if self.after else graph.nodes()

    def operands(self, node: Node) -> tuple[Value, ...]:
        """Values that the node's kernel reads."""
        return () if self.places.is_alias(node) else node.inputs

    # -- placing one node

    def place(self, node: Node) -> None:
        if self.is_native(node) or node in self.updated or node.op.kind in _ANCHORS:
            group = self.start(node, node.shapes[0].static, anchor=node)
            if self.computes and not group.static and self.is_product(node):
                self.absorb_operands(group, node)
            if node in self.updated and self.joins_rows:
                self.absorb(group, node)
                self.absorb_rows(group, node)
        elif node.op.kind is Kind.REDUCE and self.reduces_rows(node):
            self.place_row_reduction(node)
        elif node.op.kind is Kind.POINTWISE:
            self.place_pointwise(node)
        else:
            group = self.start(node, self.places.memory(node.results[0]))
            if not self.alone:
                self.absorb(group, node)
            if self.joins_rows and node.op.name == "concat":
                self.join_rows(group, node)

    def start(self, node: Node, dims: tuple[int, ...], anchor: Node | None = None, form: str = "full") -> Group:
        group = Group(dims, self.is_static(node), anchor, number=next(self.numbers))
        self.groups[group] = None
        self.add(group, node, form)
        return group

    def add(self, group: Group, node: Node, form: str) -> None:
        group.forms[node] = form
        self.group_of[node] = group
        before = [self.producer(value) for value in self.operands(node)]
        before += [self.group_of.get(n) for n in self.after.get(node, ())]
        for other in before:
            if other is not None and other is not group:
                group.reads.add(other)
                other.read_by.add(group)

    def producer(self, value: Value) -> Group | None:
        """The group that computes the value, or the base of which it is a view."""
        return self.group_of.get(self.places.base(value).node)

    def takes(self, group: Group, node: Node) -> bool:
        """True if this node may join the group."""
        return not self.alone and self.is_open(group) and group.static == self.is_static(node) and len(group.forms) < MAX_NODES

    def is_open(self, group: Group) -> bool:
        """True if any node may join: whole-op kernels accept none, claimed ops only if the target supports an epilogue."""
        anchor = group.anchor
        if anchor is not None and self.is_native(anchor):
            return anchor.op.name in self.followed and self.target.follows(anchor)
        return anchor is None or anchor.op.kind is Kind.CONTRACT

    def is_product(self, node: Node) -> bool:
        """True if the node is computed as a Contract."""
        product = node.op.product is not None and node.op.name in self.followed
        return product if self.is_native(node) else node.op.kind is Kind.CONTRACT

    def reduces_rows(self, node: Node) -> bool:
        """True if the node reduces only the last axis, or another one that it keeps, where a kernel may read such lines again."""
        facts, shape, dtype = reduction(node), node.inputs[0].shape.static, node.shapes[0].dtype.compute
        if facts.axes == (len(shape) - 1,):
            return True
        return len(facts.axes) == 1 and facts.keepdims and shape[facts.axes[0]] * dtype.itemsize <= self.target.column_bytes

    def place_row_reduction(self, node: Node) -> None:
        """A reduction over the axis of rows joins, or starts, a row program."""
        value, (axis,) = node.inputs[0], reduction(node).axes
        form = "row" if node.shapes[0].rank == value.rank else "dropped"
        group = self.group_of.get(value.node)
        fits = group and (group.axis == axis or (group.anchor is None and not group.row_reductions()))
        if group and fits and self.takes(group, node) and group.forms[value.node] == "full" and self.rows_allowed(group):
            self.add(group, node, form)
        else:
            self.start(node, value.shape.static, form=form).why = self.why_apart(node)

    def place_pointwise(self, node: Node) -> None:
        """A pointwise node joins a group that computes one of its operands, if possible: the latest one that has an anchor (it
        can take over loops, but not the reverse), or else the latest one."""
        found = {group for value in node.inputs if (group := self.producer(value)) and self.takes(group, node)}
        if self.target.stores_narrow and self.reduced(node) and (widens(node) or self.kept(node)):
            found = {group for group in found if group.anchor is None}  # the reduction computes it of what is stored
        if widens(node):
            found = {group for group in found if not self.read_later(node, group)}
        for group in sorted(found, key=lambda g: (g.anchor is not None, g.number), reverse=True):
            views = self.first_view(group, node) or self.halves(group)
            form = "full" if views else self.fitting_form(group, node)
            if form and self.acyclic(group, node, views):
                if views:
                    group.dims = views[0].shape.static
                    group.forms |= dict.fromkeys(group.forms.keys() - group.absorbed, "viewed")
                for view in views:
                    self.add(group, view.node, "full")
                self.add(group, node, form)
                self.merge_siblings(group, node)
                return
        group = self.start(node, node.shapes[0].static)
        group.why = self.why_apart(node)
        if self.joins_rows and any(v.shape.num_elements <= FEW for v in node.inputs):
            self.absorb(group, node, FEW)

    def read_later(self, node: Node, group: Group) -> bool:
        """True if pointwise nodes of the same dims read the result, one after the other, and the last of them has another operand
        that depends on the group or is not placed yet: its kernel computes them of the operand, which has fewer bytes."""
        value, (x,) = node.results[0], node.inputs
        if self.is_product(x.node) or (group.anchor is None and len(self.readers[x]) == 1):
            return False  # the sums are wider than the result, or nothing else asks for it in memory
        while True:
            readers = self.readers.get(value, set())
            if len(readers) != 1 or value in self.roots:
                return False
            (reader,) = readers
            wide = reader.shapes[0].dtype.itemsize >= value.dtype.itemsize
            if reader.op.kind is not Kind.POINTWISE or reader.shapes[0].dims != value.dims or not wide:
                return False
            if others := self.varying(reader, value):
                made = [self.producer(self.narrow(v)) for v in others]
                return any(g is None or (g is not group and self.reaches(g, group)) for g in made)
            value = reader.results[0]

    def varying(self, node: Node, value: Value | None = None) -> list[Value]:
        """The operands, without `value`, that are not known before a run."""
        others = [v for v in node.inputs if v is not value and not self.is_static(v.node)]
        return [v for v in others if self.places.base(v).node.op.kind is not Kind.LEAF]

    def narrow(self, value: Value) -> Value:
        """The value with fewer bytes from which this one is computed, if it is."""
        node = value.node
        while node.op.kind is Kind.POINTWISE and len(found := self.varying(node)) == 1:
            if widens(node):
                return found[0]
            node = found[0].node
        return value

    def reduced(self, node: Node) -> bool:
        """True if a reduction reads the result."""
        return any(reader.op.kind is Kind.REDUCE for reader in self.readers.get(node.results[0], ()))

    def kept(self, node: Node) -> bool:
        """True if only reductions read the result, and others read all of its operands."""
        if any(reader.op.kind is not Kind.REDUCE for reader in self.readers.get(node.results[0], ())):
            return False
        return all(v in self.roots or self.readers[v] != {node} for v in map(self.places.base, node.inputs))

    def halves(self, group: Group) -> Sequence[Value]:
        """The halves of the columns of a product, if pointwise nodes of their shape are all that reads it, and the target has
        both sums of an element at once."""
        anchor = group.anchor
        if anchor is None or not self.is_product(anchor) or group.forms.keys() - group.absorbed != {anchor}:
            return ()
        if not self.target.pairs(anchor):
            return ()
        result, strides = anchor.results[0], contiguous_strides(anchor.shapes[0].static)
        if not result.dims:
            return ()
        half, read = result.shape.static[-1] // 2, self.readers.get(result, set())
        dims = (*result.dims[:-1], half)
        found = {v: self.places.locate(v)[1] for r in read for v in r.inputs if self.places.base(v) is result}
        fits = len(found) == 2 and all(v.dims == dims and x.strides == strides for v, x in found.items())
        fits = fits and {x.offset for x in found.values()} == {0, half} and not {result, *found} & self.roots
        plain = self.is_native(anchor) or (anchor.inputs[1] not in self.places.tiles and 1 not in group.operands)
        plain = plain and len(contraction(anchor).b_columns) == 1
        each = all(r.op.kind is Kind.POINTWISE and r.shapes[0].dims == dims and not self.is_static(r) for r in read)
        return [*found] if fits and plain and each else ()

    def first_view(self, group: Group, node: Node) -> Sequence[Value]:
        """The view of a claimed op's result that its first follower reads, if the epilogue can run in the space of the view: its
        axes consist of whole axes of the result, the last one in the same place."""
        read = {value for value in node.inputs if self.producer(value) is group}
        (view,), anchor = read if len(read) == 1 else (None,), group.anchor
        if view is None or anchor is None or len(group.forms) > 1 or self.is_product(anchor):
            return ()
        if not self.places.is_alias(view.node):
            return ()
        merged = self.places.merged(view) or [[]]
        fits = (anchor.shapes[0].rank - 1, 1) in merged[-1] and view.shape.static == node.shapes[0].static
        return [view] if fits else ()

    def why_apart(self, node: Node) -> str:
        """Why a node did not join the latest kernel that computes one of its operands; "": there is no such kernel."""
        groups = [group for value in node.inputs if (group := self.group_of.get(value.node)) is not None]
        if not groups or self.alone:
            return "not joined: fusion is left out" if groups else ""
        group = max(groups, key=lambda g: g.number)
        what = "the kernel of " + (group.anchor.op.name if group.anchor else next(iter(group.forms)).op.name)
        if not self.takes(group, node):
            if group.static != self.is_static(node):
                return f"not joined: {what} runs when params are set"
            return f"not joined: {what} " + (f"has {len(group.forms)} nodes" if self.is_open(group) else "takes no others")
        if node.op.kind is Kind.REDUCE or self.fitting_form(group, node) is None:
            return f"not joined: {what} computes {'x'.join(map(str, group.dims))}, and not in the order in which this reads it"
        return f"not joined: another operand depends on {what}"

    def fitting_form(self, group: Group, node: Node) -> str | None:
        """The form in which a pointwise node fits the group's space, or None."""
        dims = node.shapes[0].static
        own = {group.forms[v.node] for v in node.inputs if v.node in group.forms}
        if own & {"dropped", "viewed"}:
            return "dropped" if own == {"dropped"} and dims == group.lines else None
        axis = group.axis
        if dims == group.dims and (own != {"row"} or group.dims[-1:] == (1,) or self.rows_allowed(group)):
            return "full"
        return "row" if own == {"row"} and dims == (*group.dims[:axis], 1, *group.dims[axis + 1 :]) else None

    def rows_allowed(self, group: Group) -> bool:
        """True if a grid point may process whole rows: always in loops; in a contraction if its sums are short enough for
        the target, there are enough rows, and they stay in cache between its panels."""
        if group.anchor is None or not self.is_product(group.anchor):
            return group.anchor is None
        facts, left = contraction(group.anchor), group.anchor.inputs[0].shape.static
        if facts.group >= 0 or math.prod(left[axis] for axis in facts.a_sum) > self.target.row_terms:
            return False  # or, of groups, a task has some of the columns of its rows
        rows, threads = math.prod(group.dims[:-1]), self.target.threads
        enough = threads == 1 or rows >= MIN_ROWS * self.target.points
        readers = min(threads, self.target.points)  # a block of threads reads the weights of its point once
        if enough and threads > 1 and not self.target.few_kernels:
            enough = self.may_read_again(group.anchor.inputs[1], rows, readers)
        fits = group.dims[-1] * group.anchor.shapes[0].dtype.compute.itemsize <= self.target.cache_bytes
        return enough and fits and len(facts.b_columns) == 1

    def may_read_again(self, weights: Value, rows: int, readers: int) -> bool:
        """True if so many readers may each take all weights for its part of the rows: this takes no longer than multiplying them,
        or than a kernel of its own for what follows on the rows."""
        few = rows < SHARED_ROWS * readers
        again = readers * math.prod(weights.shape.static) * weights.dtype.itemsize
        if few and again > REREAD:
            return False
        soon = few or (weights.dtype == bf16 and rows <= UNIT_ROWS)  # multiplying them takes no longer than reading
        return not (soon and self.target.reread) or again <= self.target.reread * rows

    def acyclic(self, group: Group, node: Node, views: Sequence[Value] = ()) -> bool:
        """True if no operand from outside the group depends on the group. `views`: those that are read element by element."""
        for value in self.operands(node):
            producer = self.producer(value)
            if producer is group and value.node not in group.forms and not any(value is v for v in views):
                return False  # read through a view: other elements than the current one
            if producer is not None and producer is not group and self.reaches(producer, group):
                return False
        return True

    def reaches(self, start: Group, goal: Group) -> bool:
        """True if `start` depends on `goal`: a search from both ends, one group at a time, since one end is often near."""
        below, above = {start}, {goal}  # dependencies of start, dependents of goal
        down, up = [start], [goal]
        while down and up:
            new = down.pop().reads - below
            if not above.isdisjoint(new):
                return True
            below |= new
            down += new
            new = up.pop().read_by - above
            if not below.isdisjoint(new):
                return True
            above |= new
            up += new
        return False

    # -- merging and absorbing

    def merge_siblings(self, group: Group, node: Node) -> None:
        """Loop groups that compute operands over the same space are merged into the group too."""
        for value in node.inputs:
            other = self.group_of.get(value.node)
            if other is None or not self.may_join(other, group) or other.dims != group.dims:
                continue
            cyclic = any(g is not group and self.reaches(g, group) for g in other.reads) or any(
                g is not other and self.reaches(g, other) for g in group.reads
            )
            apart = group.anchor is not None or (group.row_reductions() and group.axis != other.axis)
            if cyclic or group in other.reads or (apart and other.row_reductions()):
                continue
            if self.reads_in_step(group, other):
                self.take_over(group, other, absorbed=other.absorbed)
                group.forms = dict(sorted(group.forms.items(), key=lambda item: self.order[item[0]]))

    def may_join(self, other: Group, group: Group) -> bool:
        """True if all of `other`, a loop group, could be computed in `group`."""
        fits = len(other.forms) + len(group.forms) <= MAX_NODES
        return other is not group and other.anchor is None and other.static == group.static and fits

    def reads_in_step(self, group: Group, other: Group) -> bool:
        """True if `group` reads `other` only at the current element: by pointwise nodes, not through a view, and a value
        without the last dim only in readers without it."""
        for node, form in group.forms.items():
            for value in self.operands(node):
                if self.producer(value) is not other:
                    continue
                direct = node.op.kind is Kind.POINTWISE and node not in group.absorbed and value.node in other.forms
                if not direct or (other.forms[value.node] == "dropped") != (form == "dropped"):
                    return False
        return True

    def escapes(self, group: Group, readers: Set[Node]) -> bool:
        """True if a result of the group is needed by others than its nodes and these readers."""
        values = [v for n in group.forms for v in n.results]
        inside = group.forms.keys() | readers
        return not self.roots.isdisjoint(values) or any(self.readers.get(v, inside) - inside for v in values)

    def absorb(self, group: Group, node: Node, most: int | None = None) -> None:
        """Recompute, inside the reader, loop groups that only this node reads, at coordinates of its own; with
        `most`, pointwise ones of so many elements. An update in place reads nothing of the old state but in kernels that run
        before it."""
        for value in node.inputs:
            base = self.places.base(value)
            other = self.group_of.get(base.node)
            if other is None or not self.may_join(other, group) or other.row_reductions():
                continue
            early = not other.forms.keys().isdisjoint(self.after.get(node, ()))
            bigger = node not in self.updated and math.prod(self.places.memory(node.results[0])) > 2 * base.shape.num_elements
            bigger |= node.op.kind is Kind.REDUCE and value.shape.num_elements > base.shape.num_elements  # windows that overlap
            pointwise = all(n.op.kind is Kind.POINTWISE for n in other.forms)
            if self.joins_rows and node.op.name == "concat" and pointwise:
                bigger = False  # each element is computed once
            if self.joins_rows and node.op.name == "gather" and value is node.inputs[1] and base.shape.num_elements > FEW:
                bigger = not pointwise  # a row's index costs little beside the row; a few are computed beside other small kernels
            if self.joins_rows and node.op.name == "copy" and all(n.op.name == "pad" for n in other.forms):
                bigger = False  # asking for each element of a window costs less than a kernel and a padded image
            if most is not None:
                bigger = base.shape.num_elements > most or not pointwise
            moves = {n.op.name for n in other.forms if n.op.kind is not Kind.POINTWISE}
            if node.op.name == "copy" and moves == {"pad"} and self.crosses(value):
                continue  # a copy in another order reads whole lines of memory in both directions, and no zeros between
            if node.op.kind is Kind.REDUCE and any(n.op.kind is Kind.REDUCE for n in other.forms):
                continue  # the first, partial step of a reduction in two steps
            if bigger or early or self.escapes(other, {node}):
                continue
            joined = sum(len(n.inputs) for n in (*group.forms, *other.forms) if n.op.name == "concat")
            if joined <= MOST_JOINED and self.evaluations(node, {*group.forms, *other.forms}) <= MAX_EVALUATIONS:
                self.take_over(group, other, absorbed=set(other.forms))
                group.forms = {**dict.fromkeys(other.forms, "full"), **group.forms}

    def read_narrow(self, group: Group) -> None:
        """Casts to a wider dtype that only this row program reads, as of the scale of a norm, are computed where it reads
        them: for each of its rows, it then reads fewer bytes."""
        if group not in self.groups or group.anchor is not None or not group.row_reductions():
            return
        for value in [v for n in group.forms for v in n.inputs]:
            other = self.producer(value)
            if other is None or other is group or [*other.forms] != [value.node] or not widens(value.node):
                continue
            waits = other.read_by - {group}  # as an update in place, which this group may read
            if group.dims[group.axis :] == value.shape.static and not waits and not self.escapes(other, group.forms.keys()):
                self.take_over(group, other, absorbed={value.node})
                group.forms = {value.node: "full", **group.forms}

    def crosses(self, value: Value) -> bool:
        """True if elements along the last axis are not adjacent."""
        return value.rank > 0 and value.shape.static[-1] > 1 and self.places.locate(value)[1].strides[-1] != 1

    def join_rows(self, group: Group, node: Node) -> None:
        """A row program with one reduction, read only by this concat of parts of its rows, joins its kernel, and computes an
        element where the concat reads it."""
        if not all(n is node or n.op.kind is Kind.POINTWISE for n in group.forms):
            return
        for value in [v for n in group.forms for v in n.inputs]:
            other = self.producer(value)
            if other is None or not self.may_join(other, group) or other.dims != group.dims or len(other.row_reductions()) != 1:
                continue
            if other.axis != len(other.dims) - 1:
                continue
            reads = [v for n in group.forms for v in n.inputs if self.producer(v) in (group, other)]
            if self.escapes(other, group.forms.keys()) or not all(self.of_rows(v) for v in (*reads, *node.results)):
                continue
            own = group.forms
            self.take_over(group, other, absorbed={*other.absorbed, *own} - {node})
            group.forms = {**other.forms, **own}

    def of_rows(self, value: Value) -> bool:
        """True if the value is a part of the rows of its base, in place."""
        base, layout = self.places.locate(value)
        strides = contiguous_strides(base.shape.static)
        same = base.dims[:-1] == value.dims[:-1] and layout.strides == strides
        return same and base.rank > 0 and 0 <= layout.offset < base.shape.static[-1]

    def absorb_operands(self, group: Group, node: Node) -> None:
        """Absorb the loop groups that compute operands of a contraction and have no other readers."""
        facts = contraction(node)
        for side, (value, walked) in enumerate(zip(node.inputs, (facts.a_sum, facts.b_columns))):
            other = self.producer(value)
            if other is None or (side and (value in self.places.tiles or facts.group >= 0)) or not self.may_join(other, group):
                continue
            both = any(self.producer(v) is other for v in node.inputs[:side] + node.inputs[side + 1 :])
            if both or other.axis != len(other.dims) - 1 or self.escapes(other, {node}):
                continue
            fits = computable(value, other.forms, self.places, walked, side)
            fits = fits and self.evaluations(node, {*other.forms}) <= MAX_EVALUATIONS
            if fits and self.target.computes(producer(node, facts, side, other.forms)):
                self.take_operand(group, side, other, value)

    def absorb_rows(self, group: Group, node: Node) -> None:
        """A row program whose rows become rows of an update in place, and are not read elsewhere, joins its kernel."""
        value = node.inputs[1]
        other, base = self.producer(value), self.places.base(value)
        if other is None or not self.may_join(other, group) or not other.row_reductions() or other.axis != len(other.dims) - 1:
            return
        early = not other.forms.keys().isdisjoint(self.after.get(node, ()))
        if early or base.shape.static != other.dims or self.escapes(other, {node}):
            return
        if row_axes(self.places, value, other.forms) is not None:
            self.take_operand(group, 1, other, base)

    def take_operand(self, group: Group, number: int, other: Group, value: Value) -> None:
        """`other` computes operand `number` in the kernel of `group`."""
        other.stores = {self.places.base(value): None}
        group.operands[number], own = other, group.forms
        group.forms = dict.fromkeys(other.forms, "full")
        self.take_over(group, other, absorbed=set(other.forms))
        group.forms = {**dict.fromkeys(other.forms, "full"), **own}

    def evaluations(self, node: Node, inside: set[Node]) -> int:
        """Number of evaluations of nodes `inside` per element of `node`; counting stops soon after MAX_EVALUATIONS."""
        seen, coordinates = {(node, 0)}, count(1)
        todo = list(seen)
        while todo and len(seen) <= MAX_EVALUATIONS:
            reader, at = todo.pop()
            for value in reader.inputs:
                here = at if reader.op.kind is Kind.POINTWISE else next(coordinates)
                if self.places.base(value).node in inside and (value.node, here) not in seen:
                    seen.add((value.node, here))
                    todo.append((value.node, here))
        return len(seen)

    def take_over(self, group: Group, other: Group, absorbed: set[Node]) -> None:
        group.forms.update(other.forms)
        self.group_of.update(dict.fromkeys(other.forms, group))
        group.absorbed |= absorbed
        for g in other.read_by:
            g.reads.discard(other)
            g.reads.add(group)
        for g in other.reads:
            g.read_by.discard(other)
            g.read_by.add(group)
        group.reads = (group.reads | other.reads) - {group, other}
        group.read_by = (group.read_by | other.read_by) - {group, other}
        del self.groups[other]

    # -- results

    def is_stored(self, value: Value, group: Group) -> bool:
        """True if anything outside the group reads the value."""
        return value in self.roots or any(self.group_of.get(reader) is not group for reader in self.readers.get(value, ()))

    def ordered(self) -> list[Group]:
        """Groups in topological order; ties in graph order. Copies kept until the end of the run, of the parts of states
        that are overwritten, may come first, so that one launch can save all of them."""
        done: dict[Group, None] = {}
        groups = sorted(self.groups, key=lambda g: not (self.joins_rows and self.saved & g.forms.keys()))
        stack = list(reversed(groups))
        while stack:
            waiting = sorted((g for g in stack[-1].reads if g not in done), key=lambda g: g.number, reverse=True)
            if waiting and stack[-1] not in done:
                stack += waiting
            else:
                done[stack.pop()] = None
        return list(done)

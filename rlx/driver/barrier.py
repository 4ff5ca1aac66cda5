"""Call: the operation that a rank announces at a barrier, as a few integers that all ranks compare, and as text for errors."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from rlx.driver.reduction import ReduceKind
from rlx.driver.schedule import ALGORITHMS, What
from rlx.errors import CallMismatchError, CollectiveError
from rlx.ir.dtype import DTYPES

# Values of Call.what besides those of collectives (What)
LOADED, RUNNING, ENDING = 1001, 1002, 1003  # a program is loaded, a run starts, a run ends
AGREE = 2001  # rlx.runtime.agree
HELLO = -1  # a transport connects
DETAIL = MappingProxyType({"dtype": 8, "kind": 4, "way": 4, "in_place": 1, "staged": 1, "root": 40})  # bit widths, lowest first


class Call(NamedTuple):
    """The operation that a rank is about to do together with the others. It must be equal on all ranks."""

    what: int = 0  # 0: a plain barrier
    offset: int = 0  # in the heap, bytes
    len: int = 0  # bytes
    detail: int = 0  # for a collective the fields of DETAIL, else a digest


PLAIN = Call()  # a plain barrier
GAVE_UP = Call(1004)  # replaces the next call, once: this rank failed in a common operation


def detail_of(**fields: int) -> int:
    """Call.detail with these fields; the others are 0."""
    found = at = 0
    for name, bits in DETAIL.items():
        value = fields.pop(name, 0)
        assert 0 <= value < 1 << bits, (name, value)
        found, at = found | value << at, at + bits
    assert not fields and at < 64
    return found


def as_call(call: Any) -> Call:
    """`call` as a Call; CallMismatchError if it is none."""
    if not isinstance(call, tuple) or len(call) != len(Call._fields):
        raise CallMismatchError(f"a barrier takes a Call, got {call!r}")
    return Call(*call)


def mismatch(calls: Sequence[Call]) -> CollectiveError:
    """The error of ranks that came to a barrier with different calls. `calls`: by rank. CollectiveError if a rank gave up, else
    CallMismatchError."""
    groups: dict[Call, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    if gone := groups.get(GAVE_UP):
        return CollectiveError(f"rank {', '.join(map(str, gone))} failed in what all do together; its own error says why")
    said = "; ".join(f"rank {', '.join(map(str, ranks))}: {described(call)}" for call, ranks in groups.items())
    return CallMismatchError(f"ranks disagree on the call. {said}")


def described(call: Call) -> str:
    """The call as text. A call that rlx itself never makes is shown as its numbers."""
    place = f"{call.len} bytes at byte {call.offset} of the heap"
    digest = f"{call.detail & (1 << 64) - 1:x}"
    known = {
        PLAIN.what: "barrier()",
        HELLO: f"connect(heap_size={call.len})",
        LOADED: f"load of a graph, collectives {digest} in {place}",
        RUNNING: f"run of a graph, collectives {digest} in {place}",
        ENDING: f"end of a run of a graph, collectives {digest} in {place}",
        AGREE: f"call of a model, arguments {digest}",
    }
    return known.get(call.what) or _collective(call) or f"Call{tuple(call)}"


def _collective(call: Call) -> str | None:
    """For example "all_reduce of f32[64], …". None: the call is not a collective."""
    fields, rest = {}, call.detail
    for name, bits in DETAIL.items():
        fields[name], rest = rest & (1 << bits) - 1, rest >> bits
    dtypes, kinds, ways = list(DTYPES.values()), [None, *ReduceKind], [None, *ALGORITHMS]
    known = fields["dtype"] < len(dtypes) and fields["kind"] < len(kinds) and fields["way"] < len(ways)
    if rest or not known or call.what not in [what.value for what in What]:
        return None
    dtype, kind, way = dtypes[fields["dtype"]], kinds[fields["kind"]], ways[fields["way"]]
    text = f"{What(call.what).name.lower()} of {dtype.name}[{call.len // dtype.itemsize}]"
    text += f", {kind.name}" if kind else f", root {fields['root']}" if call.what == What.BROADCAST else ""
    text += f", scratch at byte {call.offset}" + (", which is the array" if fields["in_place"] else "")
    return text + (f", algorithm {way!r}" if way else "")

"""ONNX's own backend tests, run against rlx.

    python -m tests.onnx_cases                              all kinds: a table by operator, and counts
    python -m tests.onnx_cases --kind node --only 'resize' --failures
    PYTHONPATH=folder-with-another-onnx:. python -m tests.onnx_cases

A case passes, is refused (Unsupported, with the reason), is wrong (other results than expected), or ends in another error. Cases
that need not pass are in tests/onnx_excluded.py. The run fails if another case does not pass, or if one of these does.
"""

from __future__ import annotations

import argparse
import glob
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from rlx.errors import Unsupported
from rlx.frontends.onnx import backend
from tests.onnx_excluded import ANY, excluded

KINDS = ("node", "simple", "real", "pytorch-converted", "pytorch-operator")
LIGHT = "onnx/backend/test/data/light/"
STATES = ("pass", "refused", "wrong", "error")


class Outcome(NamedTuple):
    kind: str
    name: str
    op: str
    state: str
    reason: str
    seconds: float


def cases(kinds: Sequence[str] = KINDS, only: str = "") -> Iterator[tuple[str, Any]]:
    """(kind, test case of onnx) of the cases whose name matches."""
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = load_model_tests(kind=kind)
        yield from ((kind, case) for case in found if re.search(only, case.name))


def model_of(case: Any) -> onnx.ModelProto:
    if case.model is not None:
        return case.model
    return onnx.load(_path(case))


def _path(case: Any) -> str:
    if case.url and case.url.startswith(LIGHT):
        return str(Path(onnx.__file__).parent.parent / case.url)
    return os.path.join(case.model_dir, "model.onnx")


def data_of(case: Any, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    """(inputs, expected outputs) of each data set of a case."""
    if case.data_sets:
        for given, expected in case.data_sets:
            yield [_array(x) for x in given], [_array(x) for x in expected]
    elif case.url and case.url.startswith(LIGHT):
        own = {i.name for i in model.graph.initializer}
        inputs = [Runner.generate_dummy_data(i) for i in model.graph.input if i.name not in own]
        prefix = os.path.splitext(_path(case))[0]
        yield inputs, [numpy_helper.to_array(onnx.load_tensor(f"{prefix}_output_{i}.pb")) for i in range(len(model.graph.output))]
    else:
        for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set*"))):
            yield _stored(folder, "input", model.graph.input), _stored(folder, "output", model.graph.output)


def _array(x: Any) -> Any:
    return numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _stored(folder: str, label: str, infos: Any) -> list[Any]:
    out: list[Any] = []
    for i in range(len(glob.glob(os.path.join(folder, f"{label}_*.pb")))):
        Runner._load_proto(None, os.path.join(folder, f"{label}_{i}.pb"), out, infos[i].type)  # type: ignore[arg-type]
    return out


def run(kind: str, case: Any, device: str = "CPU") -> Outcome:
    """The outcome of one case."""
    start = time.perf_counter()
    model = model_of(case)
    ops = [n.op_type for n in model.graph.node if n.op_type != "Constant"]
    op = case.name.removeprefix("test_").partition("_expanded")[0] if "_expanded" in case.name else ops[0] if ops else "Constant"
    try:
        prepared = backend.prepare(model, device)
        for inputs, expected in data_of(case, model):
            with np.errstate(all="ignore"):
                Runner.assert_similar_outputs(expected, prepared.run(inputs), case.rtol, case.atol)
        state, reason = "pass", ""
    except Unsupported as e:
        state, reason = "refused", str(e)
    except AssertionError as e:
        state, reason = "wrong", " ".join(str(e).split())
    except Exception as e:  # noqa: BLE001  (an outcome)
        state, reason = "error", f"{type(e).__name__}: {' '.join(str(e).split())}"
    return Outcome(kind, case.name, "(expanded)" if "_expanded" in case.name else op, state, reason, time.perf_counter() - start)


def judged(o: Outcome) -> str:
    """The fault of an outcome: it does not pass and is not excluded, or is excluded and passes; "" if there is none."""
    if o.name in ANY and o.state in ("pass", "wrong"):
        return ""
    if (why := excluded(o.name)) is None:
        return "" if o.state == "pass" else f"{o.state:8} {o.name}: {o.reason[:400]}"
    return f"{o.name} passes, and is excluded: {why}" if o.state == "pass" else ""


_todo: list[tuple[str, Any]] = []


def _one(at: int) -> Outcome:
    return run(*_todo[at])


def run_all(todo: Sequence[tuple[str, Any]], jobs: int = 1) -> Iterator[Outcome]:
    """The outcomes, in any order."""
    _todo[:] = todo
    if jobs < 2 or len(todo) < 2:
        yield from map(_one, range(len(todo)))
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_one, range(len(todo)), chunksize=8)


def show(outcomes: Sequence[Outcome], failures: bool) -> None:
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for o in outcomes:
        table[o.op][o.state] += 1
    for op, found in sorted(table.items()):
        if found["pass"] < sum(found.values()) or not failures:
            print(f"{op:36}" + "".join(f"{found[s] or '':>9}" for s in STATES))
    print(f"{'operator':36}" + "".join(f"{s:>9}" for s in STATES))
    if failures:
        print(*filter(None, map(judged, sorted(outcomes))), sep="\n")
    for kind in dict.fromkeys(o.kind for o in outcomes):
        found = Counter(o.state for o in outcomes if o.kind == kind)
        print(f"onnx {onnx.__version__}, {kind}: " + ", ".join(f"{found[s]} {s}" for s in STATES))
    out, faults = (sum(bool(f(o)) for o in outcomes) for f in (lambda o: excluded(o.name), judged))
    print(f"{out} cases are excluded, {faults} are faults")
    slow = sorted(outcomes, key=lambda o: -o.seconds)[:3]
    print(f"{sum(o.seconds for o in outcomes):.0f} s; slowest: " + ", ".join(f"{o.name} {o.seconds:.1f} s" for o in slow))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=(*KINDS, "light"), default=KINDS)
    parser.add_argument("--only", default="", help="a regular expression that a case's name has")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--failures", action="store_true", help="also each case that is a fault, with the reason")
    given = parser.parse_args()
    kinds = ["real" if k == "light" else k for k in given.kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = list(run_all(list(cases(kinds, given.only)), given.jobs))
    show(outcomes, given.failures)
    sys.exit(any(map(judged, outcomes)))


if __name__ == "__main__":
    main()

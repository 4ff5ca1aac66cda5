"""`rlx moe simulate TRACE`: the hit rate of each policy of residency on a recorded trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli import options as o

if TYPE_CHECKING:
    from rlx.runtime.policies import Budget
    from rlx.runtime.simulate import Outcome, Rates
    from rlx.runtime.traces import TraceFile

moe = typer.Typer(no_args_is_help=True, help="Mixture of experts: choose a policy of residency by measurement.")
ExpertTrace = Annotated[
    Path, typer.Argument(help="File that `rlx generate --record-experts` wrote.", metavar="TRACE", show_default=False)
]  # fmt: skip


@moe.callback()
def _group() -> None: ...


@moe.command()
def simulate(
    trace: ExpertTrace,
    budget: Annotated[str, typer.Option(help="Memory of the experts, as 2GB or 1.5GiB, or their number.", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option(help="Only this policy; can be given several times.")] = None,
    refresh: o.Refresh = 1,
    profile: o.ExpertProfile = None,
    resident_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Tokens per second with all experts resident.", show_default="as in the trace")
    ] = None,
    slow_rate: Annotated[
        str | None,
        typer.Option(help="Bytes per second that experts are read at, as 1.5GB.", show_default="as in the trace, or measured"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Replay a trace of a model's routers against each policy of residency, and print hit rates and tokens per second.

    Examples:

        rlx moe simulate trace.moe --budget 2GB

        rlx moe simulate trace.moe --budget 512 --policy lru --policy hysteresis --slow-rate 1.5GB
    """
    from rlx.errors import OptionError
    from rlx.runtime.policies import POLICIES, Budget, policy_of, profile_of
    from rlx.runtime.simulate import Rates, simulate
    from rlx.runtime.traces import TraceFile

    with o.usage():
        amount, start = Budget.of(budget), None
        slow = None if slow_rate is None else Budget.of(slow_rate, "--slow-rate")
        if slow is not None and not slow.in_bytes:
            raise OptionError(f"--slow-rate is bytes per second, as 1.5GB, got {slow_rate!r}")
        policies = {name: policy_of(name) for name in policy or POLICIES}
    file = TraceFile(trace)
    if profile is not None:
        known = TraceFile(profile)
        if known.layers != file.layers:
            raise OptionError(f"{profile} is a trace of {known.model!r} with other layers than those of {file.model!r}")
        start = profile_of(known, file.layers)
    rates = Rates.of(file, resident_rate, slow and float(slow.amount))
    outcomes = simulate(file, amount, rates, tuple(policies), refresh, start)
    (_print_json if as_json else _print)(file, amount, rates, outcomes)


def _residents(file: TraceFile, budget: Budget) -> dict[str, Any]:
    quotas = budget.quotas(file.layers)
    nbytes = sum(n * x.nbytes for n, x in zip(quotas, file.layers))
    whole = sum(x.experts * x.nbytes for x in file.layers)
    return {"quotas": quotas, "experts": sum(x.experts for x in file.layers), "resident_bytes": nbytes, "bytes": whole}


def _print_json(file: TraceFile, budget: Budget, rates: Rates, outcomes: list[Outcome]) -> None:
    rows = [asdict(x) | {"tokens_per_second": x.tokens_per_second} for x in outcomes]
    facts = {"model": file.model, "budget": str(budget), **_residents(file, budget), "rates": asdict(rates)}
    print(json.dumps(facts | {"policies": rows}, indent=2))


def _print(file: TraceFile, budget: Budget, rates: Rates, outcomes: list[Outcome]) -> None:
    from rlx.cli import show
    from rlx.ir.shown import counted, sized

    found = _residents(file, budget)
    held = f"{sum(found['quotas'])} of {found['experts']} experts resident"
    print(o.printable(f"{file.model}: {counted(len(file.layers), 'layer')} with experts; a budget of {budget}: {held}"))
    print(f"{sized(found['resident_bytes'])} of {sized(found['bytes'])}; the rest of the budget is for experts in use")
    print(f"all resident: {rates.sources['resident']}; slow tier: {sized(int(rates.slow))}/s ({rates.sources['slow']})")
    rows = [(x.policy, f"{x.hit_rate:.1%}", f"{x.tokens_per_second:.1f}", sized(x.read), sized(x.fetched)) for x in outcomes]
    show.table("", ("policy", "hits", "tokens/s", "read in front", "read beside"), rows)

"""Experts of a language model: the pool that keeps them within a budget, their weights one by one, and the trace of their use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from os import PathLike

import numpy as np

from rlx.errors import OptionError, Unsupported, as_path, check_writable
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.models.decoder import DecoderConfig
from rlx.runtime import CompiledGraph, ExpertPool, ExpertSource, MemoryPlan
from rlx.runtime.policies import DEFAULT, Budget, policy_of
from rlx.runtime.pool import HasExperts
from rlx.runtime.traces import Forward, MoELayer, TraceWriter


def placed(budget: Budget | int | str | None, policy: str | None, profile: object) -> tuple[Budget | None, str]:
    """The budget and the policy. OptionError: they are none, or there is no budget for the policy or the profile."""
    for name, value in (("expert_policy", policy), ("expert_profile", profile)):
        if value is not None and budget is None:
            raise OptionError(f"{name}={str(value)!r} needs an expert_budget")
    policy_of(chosen := DEFAULT if policy is None else policy)
    return None if budget is None else Budget.of(budget), chosen


class ModelExperts:
    """`pool`: from the first executable on, if there is a budget."""

    def __init__(
        self, config: DecoderConfig, model: str, budget: Budget | int | str | None, policy: str | None,
        profile: str | PathLike[str] | None, record: str | PathLike[str] | None,
    ) -> None:  # fmt: skip
        """OptionError: a wrong budget or policy, or the model has no experts."""
        given = {"expert_budget": budget, "expert_policy": policy, "expert_profile": profile, "record_experts": record}
        if config.experts is None and (names := [name for name, value in given.items() if value is not None]):
            raise OptionError(f"{model} has no experts: {' and '.join(names)} cannot be used with it")
        self._budget, self._policy = placed(budget, policy, profile)
        # whether graphs guess the next layer's experts: a trace has guesses too, for a simulation of the policies that use them
        self.guesses = record is not None or (policy_of(self._policy).guesses and budget is not None)
        self._profile, self._model = profile, model
        self._record = None if record is None else as_path(record, "record_experts")
        check_writable(self._record)
        self._writer: TraceWriter | None = None
        self.pool: ExpertPool | None = None

    def join(self, compiled: HasExperts, tokens: int) -> None:
        """A new executable, before its weights are set, so that only resident experts are read. `tokens`: of the largest forward
        of the model. OptionError: the budget is too small."""
        if self._budget is not None and self.pool is None:
            self.pool = ExpertPool(compiled, self._budget, self._policy, profile=self._profile, tokens=tokens)

    def check_guesses(self, compiled: CompiledGraph) -> None:
        """Unsupported: the policy needs guesses, and this executable for one token makes none."""
        routers = compiled.program().routers
        if self._budget is not None and policy_of(self._policy).guesses and len(routers) > 1 and not routers[0].ahead:
            raise Unsupported(f"{self._model} was saved without guesses, which the policy {self._policy!r} needs: choose another")

    @property
    def share(self) -> float:
        """Of the experts that are read when the model is loaded: the resident ones, or all if others are in pinned memory."""
        if self.pool is None or self.pool.tiers.in_place:
            return 1.0
        return sum(self.pool.policy.quotas) / sum(x.experts for x in self.pool.layers)

    def within(self, plan: MemoryPlan, experts: int) -> dict[str, int]:
        """Bytes by purpose, of a plan in which all of so many experts are resident: what the budget leaves of them."""
        total = dict(plan.regions)
        if self._budget is not None:
            most = self._budget.amount if self._budget.in_bytes else self._budget.amount * plan.expert_bytes // max(1, experts)
            spared = max(0, plan.expert_bytes - most)
            for purpose in ("prepared", "params"):
                total[purpose], spared = max(0, total[purpose] - spared), max(0, spared - total[purpose])
        return total

    def run(self, compiled: CompiledGraph, inputs: Sequence[np.ndarray], batch: int, tokens: int) -> None:
        """One forward, of which the first `tokens` of each sequence are no padding."""
        if self._record is None:
            compiled.run_slots(inputs)
            return
        layers = layers_of(compiled)
        compiled.enable_moe_topk_capture(min(x.top_k for x in layers))
        begun = time.perf_counter()
        compiled.run_slots(inputs)
        chosen = [_rows(c, batch, tokens) for c in compiled.take_moe_topk_capture()]
        seconds, ahead = time.perf_counter() - begun, compiled.take_moe_topk_guesses()
        try:
            slow = compiled.take_moe_residency_stats().offloaded
            measured = seconds, slow.seconds, slow.bytes
        except Unsupported:  # a device that keeps all experts resident
            measured = seconds, 0.0, 0
        if self._writer is None:
            self._writer = TraceWriter(self._record, self._model, layers)
        self._writer.add(Forward(chosen, ahead or None, *measured))


def expert_params(compiled: CompiledGraph) -> set[str]:
    """The params of which each router picks some experts."""
    return {name for router in compiled.program().routers for name in router.params}


def source_of(checkpoint: Checkpoint, name: str) -> ExpertSource:
    """The experts of a param, each read from the model's files when it is needed."""
    return ExpertSource(partial(checkpoint.read_expert, name), name, checkpoint.arrays(name))


def _rows(chosen: np.ndarray, batch: int, tokens: int) -> np.ndarray:
    """Without those of padding."""
    top_k = chosen.shape[-1]
    return chosen.reshape(batch, -1, top_k)[:, :tokens].reshape(-1, top_k)


def layers_of(compiled: CompiledGraph) -> list[MoELayer]:
    """The layers with experts, and the bytes of one expert: packed, on a device that reads experts one by one. Unsupported: there
    are none."""
    sizes = {p.name: p.shape.size_bytes for p in compiled.params}
    program = compiled.program()
    if not program.routers:
        raise Unsupported(f"{program.name} has no layers with experts")
    try:
        packed = {x.name: x.nbytes for x in compiled.expert_tiers().layers}
    except Unsupported:
        packed = {}
    found = []
    for router in program.routers:
        name, top_k = min(router.params, default=""), router.shape.static[-1]
        nbytes = packed.get(name) or sum(sizes[p] for p in router.params) // router.experts
        found.append(MoELayer(name, router.experts, top_k, nbytes))
    return found

"""Mixture of experts at run time: the choices of routers (Capture), and which experts are resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.driver.backend import Executable
from rlx.driver.stream import Pending
from rlx.errors import BindingError, InputShapeError, OptionError, Unsupported, whole

if TYPE_CHECKING:
    from rlx.driver.experts import ExpertTiers, ResidencyStats, Tiered


class Capture:
    """The choices of the routers in the first run after `arm`. They are read from the routers' buffers, which keep them until the
    next run begins: a captured run does nothing more than any other."""

    def __init__(self, executable: Executable) -> None:
        self._executable, self._routers = executable, executable.program.routers
        self._arrays: list[np.ndarray] = []  # choices, and the guesses that follow them
        self.guesses: list[np.ndarray] = []  # beside the choices taken last, of the routers that keep them
        self._ran, self._read, self.armed = False, False, False
        self._later: Pending | None = None

    def arm(self, n: int) -> None:
        """Unsupported, OptionError: see CompiledGraph.enable_moe_topk_capture."""
        check_routers(self._executable)
        n = whole("the number of choices captured for each token", n, 1)
        shapes = [r.shape.static for r in self._routers]
        for at, (_, k) in enumerate(shapes):
            if n > k:
                raise OptionError(f"the router of layer {at} chooses {k} experts for a token, so {n} of them cannot be captured")
        self._arrays = [np.empty((rows, n), np.int32) for rows, _ in shapes]
        self._ran, self._read, self.armed, self._later = False, False, True, None

    @property
    def waiting(self) -> bool:
        """Whether `run` must be called for runs: the choices have not been read yet."""
        return self.armed and not self._read

    def run(self, execute: Callable[[], Pending | None]) -> Pending | None:
        """Begin a run while `waiting`."""
        self.overwriting()
        if self._read:
            return execute()
        self._later = execute()
        self._ran = True
        return self._later

    def overwriting(self) -> None:
        """Another run is about to begin: read the choices now."""
        if self._ran and not self._read:
            self._settle()
            self._read = True

    def take(self) -> list[np.ndarray]:
        check_routers(self._executable)
        if not self.armed:
            raise BindingError("no capture is enabled; call enable_moe_topk_capture before the run")
        if not self._ran:
            raise BindingError("the graph has not run since enable_moe_topk_capture")
        self.overwriting()
        self.armed, found, self._arrays = False, list(zip(self._routers, self._arrays)), []
        self.guesses = [rows[r.tokens :] for r, rows in found if r.ahead]
        return [rows[: r.tokens] for r, rows in found]

    def _settle(self) -> None:
        try:
            if self._later is not None:
                self._later.wait()
        except BaseException:  # it is not the next forward: it failed
            self._ran = False
            raise
        finally:
            self._later = None
        for router, into in zip(self._routers, self._arrays):
            view = self._executable.view(router.buffer)
            ids = self._executable.read(router.buffer) if view is None else view
            np.copyto(into, ids[: len(into), : into.shape[1]])


def check_routers(executable: Executable) -> None:
    """Unsupported: the graph has no mixture of experts."""
    if not executable.program.routers:
        raise Unsupported(f"{executable.program.name} has no router (ops.router, ops.route), so no mixture of experts")


def tiers_of(executable: Executable, device: object) -> ExpertTiers:
    """Unsupported: the graph has no experts, or the device keeps all of them resident."""
    check_routers(executable)
    tiers = tiers_in(executable)
    if tiers is None:
        raise Unsupported(f"{device} has no slow tier: all experts are resident")
    return tiers


def tiered(executable: object) -> Tiered | None:
    """None: the device keeps all experts resident."""
    from rlx.driver.experts import Tiered  # imported late: most programs have no experts

    return executable if isinstance(executable, Tiered) else None


def tiers_in(executable: object) -> ExpertTiers | None:
    """None: the program has no experts, or the device keeps all of them resident."""
    found = tiered(executable)
    return found.tiers if found else None


def set_resident(executable: Executable, device: object, masks: Sequence[object] | None, mask: object = None) -> None:
    """Which experts are resident: `masks`, one for each router of the program, or the same `mask` for all. Nothing changes if a
    mask does not fit."""
    from rlx.driver.experts import mask_of  # imported late: most programs have no experts

    check_routers(executable)
    routers = executable.program.routers
    given = [mask] * len(routers) if masks is None else list(masks)
    if len(given) != len(routers):
        raise InputShapeError(f"{executable.program.name} has {len(routers)} layers with experts, got {len(given)} masks")
    wanted = [mask_of(m, router.experts, f"layer {at}") for at, (m, router) in enumerate(zip(given, routers))]
    if all(m.all() for m in wanted) and not tiers_in(executable):
        return
    tiers = tiers_of(executable, device)
    if tiers.advisor is not None:
        raise BindingError(f"an ExpertPool places the experts of {executable.program.name}: close it before masks are set")
    found = tiered(executable)
    assert found is not None
    layers = found.tier_layers
    for at, (layer, given_mask) in enumerate(zip(layers, wanted)):
        if layer < 0 and not given_mask.all():
            raise Unsupported(f"the experts of layer {at} stay resident: others read their weights too, or they are not apart")
    chosen = dict(zip(layers, wanted))
    tiers.set([chosen.get(n, tiers.resident(n)) for n in range(len(tiers.layers))])


def offloaded(executable: Executable) -> int:
    """Bytes of experts that are not in memory."""
    tiers = tiers_in(executable)
    return tiers.offloaded(b.name for b in executable.program.buffers) if tiers else 0


def take_stats(executable: Executable, device: object) -> ResidencyStats:
    tiers_of(executable, device)
    found = tiered(executable)
    assert found is not None
    return found.take_tier_stats()


__all__ = ["Capture", "check_routers", "offloaded", "set_resident", "take_stats", "tiers_in", "tiers_of"]

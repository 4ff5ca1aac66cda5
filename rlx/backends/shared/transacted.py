"""Runs that change every state or none: steps, agreement of the ranks, commit, and the undoing of updates made in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rlx.backends.shared.loaded import Loaded
from rlx.driver.exchange import Exchanges
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, Memory
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import CollectiveError, IndexRangeError
from rlx.ir.program import Program


class Transacted(Loaded, ABC):
    """The part of an Executable (rlx.driver.backend) that runs. `done`: the steps of a run that precede the one that
    failed."""

    done = 0

    def __init__(
        self, program: Program, params: ParamStore | None, handles: HandleStore | None, memory: Memory,
        transport: SymmetricTransport | None, may_fail: Sequence[bool], constants: Mapping[int, Block] | None = None,
    ) -> None:  # fmt: skip
        """`may_fail`: whether each step of a run has a Check."""
        super().__init__(program, params or ParamStore(), handles or HandleStore(), memory, constants)
        self.exchanges = Exchanges(program, transport, may_fail)

    @abstractmethod
    def execute(self) -> None:
        """All steps, without the commit; sets `done`. IndexRangeError, CollectiveError: a step failed."""

    @abstractmethod
    def commit(self) -> None:
        """Copy the next states to the handles."""

    @abstractmethod
    def undo(self, failed: int) -> None:
        """Undo the in-place updates that were saved by the steps before `failed`."""

    def run(self) -> object:
        self.run_steps()
        if self.exchanges.agreement:
            self._agree()
        self.commit()

    def run_steps(self) -> None:
        self.done = 0
        try:
            self.exchanges.begin()
            self.execute()
        except (IndexRangeError, CollectiveError) as e:
            if isinstance(e, IndexRangeError):
                self.exchanges.give_up()
            self.undo(self.done)
            raise
        finally:
            self.exchanges.release()

    def run_commit(self) -> None:
        self._agree()
        self.commit()

    def run_abort(self) -> None:
        self.exchanges.give_up()
        self.undo(len(self.program.steps))

    def run_refuse(self) -> None:
        self.exchanges.refuse()

    def _agree(self) -> None:
        try:
            self.exchanges.agree()
        except CollectiveError:
            self.undo(len(self.program.steps))
            raise


__all__ = ["Transacted"]

"""Products whose epilogue issues its loads before the main loop, so that nothing waits for them afterwards."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.ir.kernel import Contract, Expr, Load, Store, Var, walk


class AheadWriter(CudaWriter):
    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.held: dict[int, str] = {}  # loads that have been done

    def load_ahead(self, c: Contract, finishes: str, place: Callable[[Contract], object]) -> None:
        """Loads of the epilogue whose places depend on nothing that is computed, for the element that a thread will finish, if it
        `finishes` one. `place` names its row and column."""
        found = {id(x): x for x in walk(c.epilogue) if isinstance(x, Load) and x.guard is None}
        stored = {s.buffer: s.index for s in walk(c.epilogue) if isinstance(s, Store)}
        for x in found.values():
            if not self.known(x.index, c.i, c.j) or stored.get(x.buffer, x.index) is not x.index:
                continue
            name = self.fresh("early")
            self.line(f"{self.type(x.dtype)} {name} = 0;")
            with self.scope([f"if ({finishes}) {{"]):
                place(c)
                self.line(f"{name} = {self.value(x)};")
            self.held[id(x)] = name

    def known(self, e: Expr, *those: Var) -> bool:
        """True if an index follows from the grid and `those` alone."""
        free = {*those, *(v for v, _ in self.kernel.grid)}
        return not any(isinstance(x, Load) or (isinstance(x, Var) and x not in free) for x in walk(e))

    def load(self, e: Load) -> str:
        return self.held.get(id(e)) or super().load(e)


__all__ = ["AheadWriter"]

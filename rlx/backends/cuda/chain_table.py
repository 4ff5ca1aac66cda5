"""The table by which the stages of a chain (chain.py) find their operands, as entries that the executable makes addresses."""

from __future__ import annotations

from rlx.backends.cuda.chain import Chain
from rlx.backends.cuda.render import may_fail
from rlx.ir.program import Program

HEADS, ARGUMENT, WORDS = range(3)  # of an entry: a number, an argument's address, an address of words

Entry = tuple[int, int]


class Operands:
    """The arguments of a chain's steps, in their order: the buffers of each, then `more`. `direct`: those that are arguments of
    the kernel, since a caller may put inputs elsewhere for a run."""

    def __init__(self, chain: Chain, program: Program) -> None:
        self.chain, self.program = chain, program
        self.steps = [n for s in chain.stages for n in s.steps]
        self.more = [tuple(["status"] * may_fail(program.steps[n].kernel) + ["halt"]) for n in self.steps]
        self.direct: list[int] = []
        self._first: dict[int, int] = {}
        count = 0
        for n, names in zip(self.steps, self.more):
            self._first[n] = count
            count += len(program.steps[n].args) + len(names)

    def argument(self, step: int, position: int) -> int:
        return self._first[step] + position

    def named(self, step: int, name: str) -> int:
        """One of `more`."""
        names = self.more[self.steps.index(step)]
        return self._first[step] + len(self.program.steps[step].args) + names.index(name)

    def buffer(self, argument: int) -> int | None:
        """The buffer that an argument is; None: it is one of `more`."""
        for n in self.steps:
            args = self.program.steps[n].args
            if 0 <= argument - self._first[n] < len(args):
                return args[argument - self._first[n]]
        return None

    def words(self, stage: int, buffer: int) -> Entry:
        """The words that a stage writes. The first bits say which mark they have: that of their first use, and whether it changes
        from run to run."""
        first, use = self.chain.areas[stage, buffer]
        return WORDS, 4 * first | (use + 1 & 1) | (self.chain.uses[first] & 1) << 1

    def heard(self, buffer: int) -> Entry:
        writer = next(i for i, s in enumerate(self.chain.stages) if buffer in self.program.steps[s.step].writes)
        return self.words(writer, buffer)


__all__ = ["ARGUMENT", "HEADS", "WORDS", "Entry", "Operands"]

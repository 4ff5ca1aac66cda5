"""How the weights of a product pass through the ring of a chain (chain.py).

A block has whole groups of columns. Of a group the ring has a piece for each part of the row, of which every warp multiplies its
elements. `Columns`: weights of 16 bits, whose columns are adjacent in memory. `Panels`: quantised weights, in panels of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.backends.cuda.blocks import FOLDER, turn_of
from rlx.backends.cuda.gemv_blocks import DIGITS
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.dtype import bf16, f16
from rlx.ir.kernel import Const, Contract, Operand

WARPS, WARP_ELEMENTS, PART = 8, 128, 1024  # that compute; elements of a row that each has of a part of it
UNIT, COLUMN_BYTES = 8, 2 * PART  # plain columns of a piece; bytes of one
SUMS = 64  # columns whose sums meet at once
MOST_ROW = 128 << 10  # bytes of shared memory for a row: more would leave too little for weights
PAD, ZEROS = 32, 128  # bytes behind the digits of a row, which spread them over the banks; zeros for the lanes of a warp


class Pieces(ABC):
    """`unit`: columns of the result of a group. `finished`: those that a block finishes at once. `nbytes`, `piece`, `row`: bytes
    of all weights, of a piece, and of shared memory for the row."""

    unit: int
    finished: int
    nbytes: int
    piece: int
    row: int

    def __init__(self, contract: Contract) -> None:
        assert isinstance(contract.b, Operand)
        self.contract, self.weights = contract, contract.b
        self.both, self.parts = contract.width // contract.n, -(-contract.k // PART)

    @abstractmethod
    def fault(self) -> str | None:
        """The reason why the ring cannot have them; None: it can."""

    @abstractmethod
    def copies(self, how: str, blocks: int) -> str:
        """The function that copies the weights, with its template arguments; the first of them are given."""

    @abstractmethod
    def product(self, how: str, blocks: int) -> str:
        """The function that multiplies, in the same way."""

    def words(self, blocks: int) -> int:
        """Sums that blocks with a share of the same columns tell each other."""
        return 0


class Columns(Pieces):
    def __init__(self, contract: Contract) -> None:
        super().__init__(contract)
        self.unit, self.finished, self.piece = UNIT // self.both, SUMS // self.both, UNIT * COLUMN_BYTES
        self.nbytes, self.row = 2 * contract.width * contract.k, self.parts * COLUMN_BYTES

    def fault(self) -> str | None:
        c, b = self.contract, self.weights
        if b.dtype not in (bf16, f16) or c.a.dtype != b.dtype:
            return "the row and the weights have no common dtype of 16 bits"
        whole = isinstance(b.offset, Const) and int(b.offset.value) % UNIT == b.col_stride % UNIT == 0
        if b.row_stride != 1 or c.k % WARP_ELEMENTS or not whole:
            return f"columns of {c.k} weights are not adjacent, or no multiple of {WARP_ELEMENTS}"
        return None

    def copies(self, how: str, blocks: int) -> str:
        pitch = 2 * self.weights.col_stride
        return f"rlx_chain_feed<{how}, {pitch}ll, {pitch * self.contract.n * (self.both - 1)}ll>"

    def product(self, how: str, blocks: int) -> str:
        return f"rlx_chain_product<{how}, {str(self.weights.dtype == f16).lower()}>"


class Panels(Pieces):
    """The row is multiplied as digits of integers (blocks.h). Shared memory has these; zeros for each warp; the powers of two of
    the elements that a warp has of a part, and the sums of their units."""

    def __init__(self, contract: Contract) -> None:
        super().__init__(contract)
        self.turn = turn_of(self.weights.blocks)
        self.unit = self.finished = PANEL
        self.piece, self.panel = self.bytes_of(PART), self.bytes_of(contract.k)
        self.nbytes = contract.width // PANEL * self.panel
        numbers = self.parts * WARPS * (1 + WARP_ELEMENTS // STEP * self.turn.groups)
        self.row = DIGITS * (self.parts * PART + PAD) + WARPS * ZEROS + 4 * numbers

    def bytes_of(self, elements: int) -> int:
        """Of so many elements of a panel."""
        packed = self.turn.panel.packed
        return elements // packed.block * packed.nbytes

    def fault(self) -> str | None:
        b = self.weights
        if b.exact or not self.turn.exact or self.contract.k % WARP_ELEMENTS:
            return f"{b.blocks} weights are not multiplied as integers, or the row is no multiple of {WARP_ELEMENTS}"
        whole = isinstance(b.offset, Const) and int(b.offset.value) % 16 == 0
        return None if whole else "the weights do not begin at whole 16 bytes"

    def shares(self, blocks: int) -> int:
        """Blocks that compute parts of a panel, of those that are left where every block has as many whole ones. Without a whole
        one its owner waits for the sums of the others, so that a share has more than one part."""
        whole, rest = divmod(self.contract.n // PANEL, blocks)
        return max(1, min(blocks // rest, self.parts if whole else self.parts // 2)) if rest else 1

    def words(self, blocks: int) -> int:
        return self.contract.n // PANEL % blocks * (self.shares(blocks) - 1) * PANEL * self.both

    def copies(self, how: str, blocks: int) -> str:
        return f"rlx_chain_feed_panels<{how}, {self.shares(blocks)}, {self.panel}, {self.piece}, {self.both}>"

    def product(self, how: str, blocks: int) -> str:
        packed = self.turn.panel.packed
        return f"{self.space}::rlx_chain_blocks<{how}, {self.shares(blocks)}, {packed.block // STEP}, {packed.nbytes}>"

    @property
    def space(self) -> str:
        return f"rlx_{self.weights.blocks}"

    @property
    def header(self) -> str:
        """The functions of the format, in a namespace of their own."""
        text = (FOLDER / "chain_blocks.h").read_text()
        return f"namespace {self.space} {{\n{self.turn.body()}{text}}}"


def pieces_of(c: Contract) -> Pieces:
    assert isinstance(c.b, Operand)
    return Panels(c) if c.b.blocks else Columns(c)


__all__ = ["MOST_ROW", "SUMS", "WARPS", "Panels", "Pieces", "pieces_of"]

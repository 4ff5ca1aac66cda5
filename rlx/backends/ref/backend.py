"""The reference backend: a Program executed step by step with numpy, in memory laid out by the arena plan.

It is the test oracle of the compiler. It uses the plan's offsets in one real arena, which is poisoned before each run, so a
wrong plan or a read before a write gives wrong results here too. "ref:0" packs nothing and claims nothing; "ref:1"
packs contraction operands into panels of three columns and runs claimed ops whole.
"""

from __future__ import annotations

from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.long_sums import long_sums, long_totals
from rlx.backends.shared.packed import claim_segments
from rlx.backends.shared.stepwise import StepwiseExecutable
from rlx.driver.backend import KernelTexts
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import DeviceUnavailableError
from rlx.ir.dtype import DTYPES
from rlx.ir.program import Program
from rlx.ir.target import Target

ALIGNMENT = 64
PANELS = ((0, 1), (3, 2))  # columns per packed panel and rows interleaved, by device index
NATIVES = {  # claimed ops, of every device but ref:0
    "attention": lambda node: None,
    "segment_matmul": lambda node: "it decodes no weights" if node.attrs.format else claim_segments(node),
}


class RefBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "ref"

    def probe(self) -> dict[str, str | None]:
        return {f"ref:{i}": None for i in range(len(PANELS))}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        if not 0 <= index < len(PANELS):
            raise DeviceUnavailableError(f"there is no ref:{index}; there are ref:0 to ref:{len(PANELS) - 1}")
        panel = PANELS[index]
        return Target(
            name="ref",
            dtypes=frozenset(DTYPES),
            features=(f"panel={panel}",),
            alignment=ALIGNMENT,
            natives=NATIVES if index else {},
            followed=frozenset(NATIVES),
            levels=index > 0,
            control=True,
            few_kernels=index > 0,
            computes=lambda producer: True,
            pairs=lambda node: True,
            panel=lambda dtype, columns=0: panel,
            schedule=lambda kernel: long_totals(long_sums(kernel)),
        )

    def process_bytes(self) -> int:
        return 0

    def compile(self, program: Program) -> KernelTexts:
        return KernelTexts(program)

    def load(
        self, artifact: KernelTexts, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> StepwiseExecutable:  # fmt: skip
        return StepwiseExecutable(artifact.program, run_kernel, params, handles, transport)

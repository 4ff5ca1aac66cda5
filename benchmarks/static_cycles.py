"""Cycles of the inner loops of products for processors that are not at hand, counted by llvm-mca: nothing is measured.

    python benchmarks/static_cycles.py --mca llvm-mca-19          # Debian: the package llvm-19

For each dtype and core: the loop of the highest tile of a product of 128 x 768 x 768, its multiply instructions, the cycles of
a turn in steady state, and the least that the core's multipliers would take. llvm-mca takes data to be in the first-level cache.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile

from rlx.backends.cpu.kernels import contract, quant
from rlx.backends.cpu.target import target_for
from rlx.host import jit
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DTYPES
from rlx.ir.kernel import Buffer, Contract, Kernel, Operand, Store, Var, const, linear
from rlx.ir.target import Target

TRIPLE = "aarch64-unknown-linux-gnu"
MULTIPLIERS = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4}  # vectors of 128 bits a cycle
MULTIPLY = re.compile(r"^\s+(fmla|bfmmla|usmmla|usdot|sdot|sudot)\s", re.M)
CASES = (("f32", "f32", "f32"), ("bf16", "bf16", "f32"), ("u8", "i8", "i32"), ("q8_0",), ("q4_k",))
M, N, K, TURNS = 128, 768, 768, 100


def kernel(case: tuple[str, ...], target: Target) -> Kernel:
    i, j = Var("i"), Var("j")
    if len(case) == 1:
        form, left, total = FORMATS[case[0]], "f32", "f32"
        b = Buffer("b", DTYPES["u8"], N * K // form.block * form.nbytes)
        right = Operand(b, const(0), 0, 0, blocks=case[0])
    else:
        left, name, total = case
        panel, group = target.panel(left if left == name else f"{left} {name}")
        b = Buffer("b", DTYPES[name], N * K)
        right = Operand(b, const(0), 0, 0, panel, group)
    a, c, acc = Buffer("a", DTYPES[left], M * K), Buffer("c", DTYPES[total], M * N, True), Var("acc", DTYPES[total])
    body = Contract(i, j, M, N, K, Operand(a, const(0), K, 1), right, acc, (Store(c, linear([(i, N), (j, 1)]), acc),))
    return Kernel("product", (a, b, c), (), (), (body,))


def loop(assembly: str) -> str:
    """The innermost loop with the most multiplies."""
    found = re.findall(r"^(\.LBB\w+):.*\n((?:(?!\.LBB).*\n)*?\s+b\.\w+\s+\1\n)", assembly, re.M)
    return max((body for _, body in found), key=lambda body: len(MULTIPLY.findall(body)))


def cycles(mca: str, core: str, code: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".s") as f:
        f.write(code)
        f.flush()
        command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={core}", f"-iterations={TURNS}", f.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.findall(r"^Total Cycles:\s+(\d+)", said, re.M)[0]) / TURNS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mca", default="llvm-mca")
    given = options.parse_args()
    print("| operands | core | instructions of a turn | cycles | least | share |\n| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for core, each in MULTIPLIERS.items():
            features = target_for(TRIPLE, core).features[2:]
            target = target_for(TRIPLE, "generic", features)
            render = quant.render if len(case) == 1 else contract.render
            code = loop(jit.assembly(render(kernel(case, target), target, "product").text, target))
            kinds = MULTIPLY.findall(code)
            what = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            spent, least = cycles(given.mca, core, code), len(kinds) / each
            what = f"{what} of {len(code.splitlines())}"
            print(f"| {' x '.join(case[:2])} | {core} | {what} | {spent:.1f} | {least:.0f} | {least / spent:.0%} |")


if __name__ == "__main__":
    main()


"""LLVM makes code of every kernel for every processor, and what would end the process there is an error before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from code_cases import AFTER, BEFORE, TARGETS, TRIPLE, every, failures

from rlx.backends.cpu.target import target_for
from rlx.errors import CompileError
from rlx.host.emit import ATTRIBUTES, Emitter, V
from rlx.host.jit import assembly, compile_object
from rlx.host.legal import faults
from rlx.host.math import bf16_bits_by_hardware
from rlx.ir.op import OPS, Kind

HERE = Path(__file__).parent
EVERY = 19_001  # one case of so many: 195 for each processor, others for each; `python tests/code_cases.py` takes all


@pytest.mark.parametrize("processor", TARGETS)
def test_kernels_become_code_whatever_stands_beside_an_op(processor: str) -> None:
    first = list(TARGETS).index(processor) * EVERY // len(TARGETS)
    assert not list(failures(range(first, len(every()), EVERY), processor))


def test_cases_have_every_op_and_neighbour() -> None:
    """So that a new op takes part, and stretches of the order are mixed."""
    some = every()[:4000]
    assert {c.op.name for c in every().cases} == {n for n, d in OPS.items() if d.kind is not Kind.LEAF and not d.collective}
    assert {b for _, b, _ in some} == set(BEFORE) and {a for _, _, a in some} == set(AFTER)


CONSTANTS = """
import numpy as np, rlx

def run(build, **inputs):
    g = rlx.Graph("constants")
    g.set_outputs([build(*(g.input(name, a.shape, a.dtype) for name, a in inputs.items()))])
    return rlx.Session("cpu").compile(g).run(inputs)[0].astype(np.float32)

bf16 = rlx.bf16.numpy
x = np.arange(16).astype(bf16)
assert run(lambda x: rlx.pad(x, (0,), (5,), 2.0), x=x).tolist() == [*range(16), *[2] * 5]
assert run(lambda x: rlx.pad(x, (1,), (3,), 3.0), x=x[:0]).tolist() == [3] * 4
assert run(lambda x: rlx.valid_rows(x, rlx.constant(0), axis=1), x=x[:4].reshape(2, 2)).tolist() == [[0, 0]] * 2
g = rlx.Graph("state")
handle = rlx.BufferHandle("s", (2, 2), "bf16")
g.assign(g.handle(handle), rlx.valid_rows(g.input("x", (2, 2), "bf16"), rlx.constant(0), axis=1, fill="1"))
compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions().bind_handle(handle))
compiled.bind_handle("s", np.zeros((2, 2), bf16))
compiled.run({"x": x[:4].reshape(2, 2)})
assert compiled.read_handle("s").astype(np.float32).tolist() == [[1, 1]] * 2
print("all right")
"""


def test_constants_beside_bf16_values() -> None:
    """In a process of its own, which LLVM would end: its combiner made bfloat scalars out of vectors of constants."""
    done = subprocess.run(
        [sys.executable, "-c", CONSTANTS], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE.parent)}
    )
    assert done.returncode == 0 and "all right" in done.stdout, done.stderr[-2000:]


BF16 = target_for(TRIPLE, "x86-64-v4", ("avx512bf16",))
BODY = "define void @f(ptr %p, <16 x float> %x) {{\n  {line}\n  ret void\n}}\n"


@pytest.mark.parametrize(
    "line, says",
    [
        ("%y = fptrunc <16 x float> %x to <16 x bfloat>", "16-bit"),
        ("%y = fadd bfloat 0xR3F80, 0xR3F80", "16-bit"),
        ("%y = bitcast i16 5 to bfloat", "16-bit"),
        ("%y = fadd half 0xH3C00, 0xH3C00", "16-bit"),
        ("%y = load <16 x i1>, ptr %p, align 1", "i1 in memory"),
        ("store i1 true, ptr %p, align 1", "i1 in memory"),
    ],
)
def test_what_llvm_would_abort_on_is_an_error_that_names_the_kernel(line: str, says: str) -> None:
    with pytest.raises(CompileError, match=f"kernel 'the_kernel'.*{says}"):
        compile_object(BODY.format(line=line), BF16, "the_kernel")


@pytest.mark.parametrize("processor", TARGETS)
def test_instructions_by_name_need_their_features(processor: str) -> None:
    text = (
        "declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)\n"
        "define <16 x i16> @f(<16 x float> %x) {\n"
        "  %a = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %x)\n"
        "  %b = bitcast <16 x bfloat> %a to <16 x i16>\n  ret <16 x i16> %b\n}\n"
    )
    found = faults(text, TARGETS[processor].features)
    if processor == "avx512fp16":  # with all that x86 has
        assert not found and compile_object(text, TARGETS[processor])
    else:
        assert found == [f"llvm.x86.avx512bf16.cvtneps2bf16.512 needs {'x86' if processor == 'aarch64' else 'avx512bf16'}"]
    unknown = faults("declare void @llvm.x86.unheard.of()\n", TARGETS[processor].features)
    lacks = "x86" if processor == "aarch64" else "features that this check does not know"
    assert unknown == [f"llvm.x86.unheard.of needs {lacks}"]


@pytest.mark.parametrize("lanes", [8, 16])
def test_one_instruction_tells_whether_numbers_are_subnormal(lanes: int) -> None:
    """In front of every rounding to bf16 by hardware, which flushes them."""
    features = [f for f in TARGETS["avx512fp16"].features if f != "avx512dq"]
    for has, word in ((TARGETS["avx512fp16"].features, "x86.avx512.fpclass"), (features, "is.fpclass")):
        e = Emitter(has)
        e.store(bf16_bits_by_hardware(e, e.load(f"<{lanes} x float>", V("%args", "ptr"), 4)), V("%args", "ptr"), 2)
        e.ret()
        text = "\n".join([*e.declarations, ATTRIBUTES, e.function("f", "ptr %args")])
        assert f"llvm.{word}" in text and not faults(text, has)
        assert ("vfpclassps" in assembly(text, TARGETS["avx512fp16"])) == (word != "is.fpclass")
    text = f"declare <{lanes} x i1> @llvm.x86.avx512.fpclass.ps.{32 * lanes}(<{lanes} x float>, i32)\n"
    assert faults(text, features) == [f"llvm.x86.avx512.fpclass.ps.{32 * lanes} needs avx512dq"]

"""The linker: the same code at work as LLVM's, and no object, however damaged, that reads or writes beyond itself."""

from __future__ import annotations

import ctypes
import platform
import random
import struct
import sys

import numpy as np
import pytest

from rlx.backends.cpu import target as cpu
from rlx.errors import CompileError
from rlx.host import processor
from rlx.host.jit import Library, _Linked, compile_object
from rlx.host.link import Foreign, Image

pytestmark = [
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="elsewhere LLVM links"),
    pytest.mark.usefixtures("own_compilers"),
]
HOST = cpu.host_target(1)
CALLS = """
@table = private constant [4 x double] [double 1.5, double -2.0, double 4.0, double 8.0]
declare double @exp(double)
declare double @cbrt(double)
declare double @other(double)
define internal double @inner(double %x) noinline {
  %y = call double @exp(double %x)
  ret double %y
}
define double @whole(double %x, i64 %at) {
  %a = call double @inner(double %x)
  %b = call double @cbrt(double %a)
  %c = call double @other(double %b)
  %p = getelementptr [4 x double], ptr @table, i64 0, i64 %at
  %t = load double, ptr %p
  %d = fmul double %c, %t
  ret double %d
}
"""
OTHER = "define double @other(double %x) {\n  %y = fadd double %x, 0x3FF3333333333333\n  ret double %y\n}\n"
VECTOR = """
define void @scale(ptr %x) {
  %v = load <8 x float>, ptr %x, align 4
  %w = fmul <8 x float> %v, <float 1.0, float 2.0, float 3.0, float 4.0, float 5.0, float 6.0, float 7.0, float 8.0>
  store <8 x float> %w, ptr %x, align 4
  ret void
}
"""
WRITES = """
@n = global i64 3
define i64 @next() {
  %a = load i64, ptr @n
  %b = add i64 %a, 1
  store i64 %b, ptr @n
  ret i64 %b
}
"""
NEEDS = "declare void @no_such_function()\ndefine void @f() {\n  call void @no_such_function()\n  ret void\n}\n"


def both(objects, symbols):
    return Image(objects, symbols), _Linked(objects, symbols)


def test_calls_tables_and_constants_as_llvm_links_them():
    objects = [compile_object(text, HOST) for text in (CALLS, OTHER, VECTOR)]
    for linked in both(objects, ["whole", "scale"]):
        whole = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_int64)(linked.address("whole"))
        for x in (-1.0, 0.0, 0.7):
            for at, factor in enumerate((1.5, -2.0, 4.0, 8.0)):
                assert whole(x, at) == pytest.approx((np.cbrt(np.exp(x)) + 1.2) * factor, rel=1e-14)
        x = np.arange(1, 9, dtype=np.float32)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(linked.address("scale"))(x.ctypes.data)
        assert x.tolist() == [n * n for n in range(1, 9)]


def test_code_cannot_be_written():
    image = Image([compile_object(OTHER, HOST)], ["other"])
    with open("/proc/self/maps") as f:
        spans = [line.split()[:2] for line in f]
    at = image.address("other")
    (modes,) = [m for span, m in spans if int(span.split("-")[0], 16) <= at < int(span.split("-")[1], 16)]
    assert modes == "r-xp"


def test_what_is_left_to_llvm():
    image = compile_object(WRITES, HOST)
    with pytest.raises(Foreign):
        Image([image], ["next"])
    call = Library([image], ["next"]).function("next", ctypes.c_int64)
    assert [call(), call()] == [4, 5]
    outside = compile_object("@environ = external global ptr\ndefine ptr @get() {\n  ret ptr @environ\n}", HOST)
    with pytest.raises(Foreign):
        Image([outside], ["get"])
    arm = cpu.target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",))
    with pytest.raises(Foreign):
        Image([compile_object(OTHER, arm)], ["other"])


def test_what_is_missing_is_named():
    with pytest.raises(CompileError, match="no library of this process has 'no_such_function'"):
        Image([compile_object(NEEDS, HOST)], ["f"])
    with pytest.raises(CompileError, match="cannot link absent: no object defines it"):
        Image([compile_object(OTHER, HOST)], ["other", "absent"])
    assert Image([], []) is not None


def test_damaged_objects_are_refused_or_stay_within_their_memory():
    """Each is linked, not run. A relocation that reached beyond would break the memory of this process, or be a SystemError."""
    rng, refused = random.Random(7), 0
    raw = compile_object(CALLS + OTHER.replace("@other", "@another"), HOST)
    other = compile_object(OTHER, HOST)
    for turn in range(1500):
        changed = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw))
            changed[at] = rng.randrange(256)
        if turn % 5 == 0:
            del changed[rng.randrange(len(raw)) :]
        if turn % 7 == 0:  # the tables at the end
            at = rng.randrange(len(changed) // 2, len(changed) - 8) if len(changed) > 600 else 0
            changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 2**31, 2**63, 2**64 - 1, len(raw)]))
        try:
            Image([bytes(changed), other], ["whole"])
        except (CompileError, Foreign, MemoryError):
            refused += 1
    assert refused > 300


def test_the_system_tells_what_llvm_tells():
    """But for the matrix unit, which LLVM leaves out on some processors whose system grants it."""
    triple, has = processor._linux_x86() or ("", frozenset())
    theirs, features = processor._asked_of_llvm()
    assert (triple, has - set(processor.AMX)) == (theirs, features & set(processor.X86))


def test_features_are_called_as_llvm_calls_them(tmp_path):
    """By a processor with a matrix unit, whichever this one is."""
    flags = "fpu avx2 fma f16c avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni avx512_fp16 amx_bf16 amx_tile amx_int8"
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Some\nflags\t\t: {flags}\nbugs\t\t: none\n")
    assert processor._linux_x86(tmp_path / "cpuinfo") == ("x86_64-unknown-linux-gnu", frozenset(processor.X86 + processor.AMX))


@pytest.mark.parametrize("text", ["", "processor : 0\n", "flags\t\t: \n"])
def test_a_system_that_does_not_tell(tmp_path, text):
    (tmp_path / "cpuinfo").write_text(text)
    assert processor._linux_x86(tmp_path / "cpuinfo") is None and processor._linux_x86(tmp_path / "none") is None

"""Elementary functions on any number of lanes, as LLVM IR: polynomials for f32, and calls of libm, lane by lane, for f64.

Derivation of the polynomials: least squares in extended precision on 600 Chebyshev points of the reduced range, reweighted
(Lawson) until the largest relative error is minimal. Then the coefficients were rounded to f32 one at a time, lowest power first,
with a refit of the rest after each. Relative error of each polynomial alone:

    exp    e^r, |r| <= ln2/2, degree 6                      3.1e-9
    expm1  r + r^2 q(r), the same r, q of degree 4          1.4e-8
    log    log(1+f) = f - f^2/2 + f^3 P(f), P of degree 8   7.7e-10   f from sqrt(1/2)-1 to sqrt(2)-1
    sin    r + r^3 S(r^2), |r| <= pi/4                      3.7e-9
    cos    1 - r^2/2 + r^4 C(r^2)                           1.1e-10
    erf    -expm1(-a R(a)), R = -log(erfc a)/a, degree 7    3.8e-8    0 <= a <= 3.95
    erf    in 16 parts around a = k/4, each of degree 5     5.2e-8    with AVX-512; half of the instructions of the one above
    tanh   in 16 parts of |x| <= 9.1, each of degree 5      5.4e-8    the same; no division
    exp    1 + r + r^2/2 + r^3/6, |r| <= ln2/32             2.3e-9    with AVX-512, times 2^(n/16) of a table

With the surrounding arithmetic, every function is within 4 ulp of f32 for all inputs, including denormal inputs and results
(tests/test_cpu_math.py sweeps them; measured: exp 0.9, log 0.8, sin and cos 1.6, tanh 2.4, erf 2.2, pow 0.5; with AVX-512
exp 0.7, tanh 1.4, erf 2.1). NaN gives NaN; clamps are written so that they propagate NaN. No step converts a float out of range
to an integer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

from rlx.host.emit import Emitter, V

EXP = (0.0013821304310113192, 0.00836866907775402, 0.04166825860738754, 0.1666652113199234, 0.4999999403953552, 1.0, 1.0)
EXPM1 = (0.001386994612403214, 0.008366253226995468, 0.04166744276881218, 0.1666654646396637, 0.4999999701976776)
LOG = (
    0.06749267876148224, -0.11670097708702087, 0.11883548647165298, -0.12406233698129654, 0.14220358431339264,
    -0.16667988896369934, 0.2000207155942917, -0.25000008940696716, 0.3333331346511841,
)  # fmt: skip
SIN = (-0.00019518614863045514, 0.008332191035151482, -0.16666655242443085)
COS = (2.443066841806285e-05, -0.00138873013202101, 0.04166664555668831)
ERF = (
    4.1598552343202755e-05, -0.00038767384830862284, 0.00127106171566993, 0.00017831053992267698,
    -0.01930176094174385, 0.10280731320381165, 0.6366175413131714,
)  # fmt: skip
# Coefficients by part, one row per power of the distance from the part's origin, highest first: a register each with AVX-512.
ERF_PARTS = (
    (0.140618145, 0.081136018, 0.00834986009, -0.0520653762, -0.0690544397, -0.0469986759, -0.014933967, 0.00650398806,
     0.013029865, 0.0106472699, 0.00612779753, 0.00277133309, 0.00102562981, 0.000317813741, 8.35312239e-05, 0.00059376616),
    (-0.00716979429, 0.126092911, 0.182125673, 0.150654495, 0.0688642114, -0.0052984003, -0.0436288081, -0.0474183969,
     -0.0337332562, -0.0185601953, -0.00959200971, -0.0030021572, -0.00178636506, 6.43048261e-05, 0.000814493047,
     -0.00017835472),
    (-0.375554085, -0.309197724, -0.14648065, 0.0267737489, 0.138371006, 0.167533964, 0.138752222, 0.0901578218, 0.0482229926,
     0.021724537, 0.00835006498, 0.00276030763, 0.000789051352, 0.000195787477, 4.22879493e-05, 7.96751374e-06),
    (-1.46237553e-05, -0.264999002, -0.439388394, -0.482204437, -0.41510129, -0.295659781, -0.178406, -0.0923648253,
     -0.0413451381, -0.0160792265, -0.00543102296, -0.00161673001, -0.000406175939, -0.000100493438, -3.29066497e-05,
     -5.42869259e-07),
    (1.12837923, 1.06001425, 0.87878263, 0.642931104, 0.415107489, 0.236521125, 0.118930288, 0.0527749956, 0.0206669867,
     0.00714231934, 0.00217828411, 0.000586277223, 0.000139253054, 2.91890265e-05, 5.39942675e-06, 8.81432186e-07),
    (0, 0.276326388, 0.520499885, 0.711155653, 0.842700779, 0.92290014, 0.966105163, 0.986671686, 0.995322287, 0.998537302,
     0.999593019, 0.999899387, 0.999977887, 0.999995708, 0.999999285, 0.999999881),
)  # fmt: skip
TANH_FROM = (1.625, 2.125, 2.625, 3.125, 3.875, 4.875, 5.875, 6.875, 8.375, 0, 0.1875, 0.3125, 0.5, 0.75, 1.0, 1.25)
TANH_PARTS = (
    (0.00108769874, 0.00445199618, 0.00235753343, 0.000973231625, 0.000231923608, 3.25209767e-05, 4.35668744e-06,
     5.90679576e-07, -6.38645758e-08, 0.130145669, 0.114761248, 0.0412932485, -0.0257097576, -0.0637366399, -0.0458549783,
     -0.0190965161),
    (-0.0248290505, -0.0150248259, -0.00644487748, -0.00258406182, -0.000600463536, -8.15518215e-05, -1.31316401e-05,
     -2.78067773e-06, -2.88023472e-07, 0.000441907672, 0.116563298, 0.157255679, 0.163735494, 0.0994110778, 0.0287902374,
     -0.0119745014),
    (0.0751786605, 0.0339006856, 0.0134159662, 0.00506877527, 0.00114457635, 0.000155160044, 2.10246399e-05, 2.84538328e-06,
     1.75632309e-07, -0.333354026, -0.288783133, -0.219531402, -0.0942190737, 0.041809123, 0.103597611, 0.108307421),
    (-0.133013114, -0.0539024994, -0.0205558985, -0.0076580313, -0.00171688525, -0.000232768129, -3.0986459e-05,
     -3.93866139e-06, -6.59243469e-08, 2.95513502e-07, -0.178981617, -0.27496922, -0.363428414, -0.378915727, -0.319862396,
     -0.237877294),
    (0.143734202, 0.055463355, 0.0207715034, 0.0076920893, 0.00172148505, 0.000233159953, 3.15567995e-05, 4.27080658e-06,
     2.12625523e-07, 1, 0.965651631, 0.908366799, 0.786447763, 0.59658581, 0.419974357, 0.280414879),
    (0.925346255, 0.971872747, 0.98955977, 0.9961465, 0.999138832, 0.999883413, 0.999984205, 0.999997854, 0.999999881, 0,
     0.185333207, 0.302709728, 0.462117165, 0.635148942, 0.761594176, 0.848283648),
)  # fmt: skip
TANH_BIAS = 0.625  # |x| + this has 16 pairs of exponent and upper two digits of the fraction, up to 9.375: the number of the part
TWO_BY_ROOT_PI, TWO_BY_ROOT_PI_LOW = 1.128379225730896, -5.86353834222458e-08  # R at 0, as two floats

_ROOTS = [math.sqrt(2)]  # of 2: the 2nd, 4th, 8th and 16th; square roots, unlike powers, have the same bits on all machines
while len(_ROOTS) < 4:
    _ROOTS.append(math.sqrt(_ROOTS[-1]))
_POWERS = [math.prod(root for k, root in enumerate(_ROOTS) if n & 8 >> k) for n in range(16)]  # 2^(n/16)
SIXTEENTHS = [ctypes.c_float(x).value for x in _POWERS]
SIXTEENTHS_LOW = [x - near for x, near in zip(_POWERS, SIXTEENTHS)]  # what rounding to f32 takes away
LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
LN2_HIGH, LN2_LOW = 0.693359375, -0.00021219444005469057  # the high part has 9 bits: n * LN2_HIGH is exact for |n| < 2^15
SHIFT = 1.5 * 2.0**23  # x + SHIFT has round(x) in its low bits
SHIFT64 = 1.5 * 2.0**52
HALF_PI_HIGH, HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
REDUCIBLE = 2.0**40  # smaller |x| are reduced by pi/2 in double without loss; libm handles larger ones


# -- conversions ---------------------------------------------------------------------------------------------------


def bf16_bits(e: Emitter, x: V) -> V:
    """float to the bits of a bf16 (i16): nearest even, denormals kept (the hardware instruction flushes them), NaN quiet."""
    bits = _bits(e, x)
    odd = e.bin("and", e.bin("lshr", bits, 16), 1)
    nearest = e.bin("add", e.bin("add", bits, 0x7FFF), odd)
    kept = e.select(e.cmp("uno", x, x), e.bin("or", bits, 0x400000), nearest)
    return e.convert("trunc", e.bin("lshr", kept, 16), "i16")


def bf16_bits_by_hardware(e: Emitter, x: V) -> V:
    """bf16_bits for vectors of 8, 16 or 32 lanes by the hardware instruction. It flushes subnormals: these are recomputed (rare).

    The instruction is called as an intrinsic: LLVM would fold a constant fptrunc to a scalar bfloat, which x86 registers cannot
    hold."""
    parts = [e.shuffle(x, range(n, n + 16)) for n in (0, 16)] if x.lanes == 32 else [x]  # one instruction rounds both
    lanes, name = x.lanes // len(parts), f"cvtne{len(parts) if len(parts) > 1 else ''}ps2bf16.{min(512, 32 * x.lanes)}"
    fast = e.intrinsic(f"x86.avx512bf16.{name}", *reversed(parts), suffix=(), returns=f"<{x.lanes} x bfloat>")
    fast, mask, found = e.convert("bitcast", fast, "i16"), f"<{lanes} x i1>", list[V]()
    for part in parts:
        if "avx512dq" in e.features:  # one instruction; LLVM computes is.fpclass by three
            found.append(e.intrinsic(f"x86.avx512.fpclass.ps.{32 * lanes}", part, V("32", "i32"), suffix=(), returns=mask))
        else:
            found.append(e.intrinsic("is.fpclass", part, V("144", "i32"), suffix=(part.ty,), returns=mask))
    before, subnormal = e.block, reduce(partial(e.bin, "or"), found)
    with e.when(e.intrinsic("vector.reduce.or", subnormal, returns="i1")):
        slow, inside = bf16_bits(e, x), e.block
    return e.phi((fast, before), (slow, inside))


def f8_value(e: Emitter, raw: V, finite: bool) -> V:
    """The float of an f8e4m3 (`finite`: it has no infinities, and one NaN of each sign) or f8e5m2 (the upper half of an f16)."""
    if not finite:
        return f16_value(e, e.bin("shl", e.convert("zext", raw, "i16"), 8))
    wide = e.convert("zext", raw, "i32")
    size = e.bin("and", wide, 0x7F)  # shifted to the exponent and fraction fields of an f32, it is too small by 2^120
    value = e.bin("fmul", _float(e, e.bin("shl", size, 20)), 2.0**120)
    value = e.select(e.cmp("eq", size, 0x7F), float("nan"), value)
    return _float(e, e.bin("or", _bits(e, value), e.bin("shl", e.bin("and", wide, 0x80), 24)))


def f8_bits(e: Emitter, x: V, finite: bool) -> V:
    """float to the bits of an f8e4m3 or f8e5m2 (i8): nearest even; too large becomes NaN (`finite`) or infinite, NaN stays."""
    return _narrowed(e, x, 8, *(3, 7) if finite else (2, 15), finite)


def f16_value(e: Emitter, half: V) -> V:
    """The float of an f16, or of its bits (i16)."""
    if not _lacks_f16(e):
        return e.convert("fpext", e.convert("bitcast", half, "half") if half.scalar == "i16" else half, "float")
    wide = e.convert("zext", half if half.scalar == "i16" else e.convert("bitcast", half, "i16"), "i32")
    size = e.bin("and", wide, 0x7FFF)  # shifted to the exponent and fraction fields of an f32, it is too small by 2^112
    value = _bits(e, e.bin("fmul", _float(e, e.bin("shl", size, 13)), 2.0**112))
    value = e.select(e.cmp("uge", size, 0x7C00), e.bin("or", value, 0x7F800000), value)
    return _float(e, e.bin("or", value, e.bin("shl", e.bin("and", wide, 0x8000), 16)))


def f16_bits(e: Emitter, x: V) -> V:
    """float to the bits of an f16 (i16): nearest even; too large becomes infinite, NaN stays."""
    if not _lacks_f16(e):
        return e.convert("bitcast", e.convert("fptrunc", x, "half"), "i16")
    return _narrowed(e, x, 16, 10, 15)


def _lacks_f16(e: Emitter) -> bool:
    """Whether the processor has no conversions of f16: LLVM would call functions that no library of the process has."""
    return any(f.startswith("triple=x86") for f in e.features) and "f16c" not in e.features


def _narrowed(e: Emitter, x: V, width: int, fraction: int, bias: int, finite: bool = False) -> V:
    """float to the bits of a float of `width` bits. `finite`: it has no infinities, and NaN in place of its greatest value."""
    bits = _bits(e, x)
    size, sign = e.bin("and", bits, 0x7FFFFFFF), e.bin("and", e.bin("lshr", bits, 32 - width), 1 << (width - 1))
    drop = 23 - fraction
    odd = e.bin("and", e.bin("lshr", size, drop), 1)
    nearest = e.bin("add", e.bin("add", size, ((bias - 127) << 23) + (1 << (drop - 1)) - 1), odd)
    normal = e.bin("lshr", nearest, drop)
    # subnormal results: rounded by an addition whose unit in the last place is the least subnormal
    magic = (127 - bias + drop + 1) << 23
    added = e.bin("fadd", _float(e, size), _float(e, e.const(bits.ty, magic)))
    small = e.bin("sub", _bits(e, added), magic)
    out = e.select(e.cmp("ult", size, (128 - bias) << 23), small, normal)
    nan = (1 << (width - 1)) - 1
    out = e.intrinsic("umin", out, e.const(bits.ty, nan if finite else (2 * bias + 1) << fraction))
    far = e.cmp("ugt", size, 0x7F800000) if not finite else e.cmp("uge", size, 0x43F00000)
    out = e.select(far, e.const(bits.ty, nan), out)
    return e.convert("trunc", e.bin("or", out, sign), f"i{width}")


# -- building blocks -----------------------------------------------------------------------------------------------


def _bits(e: Emitter, x: V) -> V:
    return e.convert("bitcast", x, "i64" if x.scalar == "double" else "i32")


def _float(e: Emitter, bits: V) -> V:
    return e.convert("bitcast", bits, "double" if bits.scalar == "i64" else "float")


def polynomial(e: Emitter, x: V, coefficients: Sequence[float]) -> V:
    """Horner's scheme, highest power first."""
    out = e.const(x.ty, coefficients[0])
    for c in coefficients[1:]:
        out = e.fma(out, x, c)
    return out


def _at_most(e: Emitter, x: V, top: float) -> V:
    return e.select(e.cmp("ogt", x, top), top, x)


def _within(e: Emitter, x: V, bottom: float, top: float) -> V:
    x = _at_most(e, x, top)
    return e.select(e.cmp("olt", x, bottom), bottom, x)


def _by_ln2(e: Emitter, x: V, shift: float = SHIFT) -> tuple[V, V]:
    """x = n ln2 + r, n in units of the last place of `shift`: (n + shift, r)."""
    shifted = e.fma(LOG2_E, x, shift)
    n = e.bin("fsub", shifted, shift)
    return shifted, e.fma(-LN2_LOW, n, e.fma(-LN2_HIGH, n, x))


def _power_of_two(e: Emitter, n: V) -> V:
    """2^n of the low bits of an integer, -126 <= n <= 127."""
    return _float(e, e.bin("add", e.bin("shl", n, 23), 0x3F800000))


def _scaled(e: Emitter, x: V, n: V) -> V:
    """x 2^n for an integral n, rounded once, by AVX-512's instruction. Equal to two products of which the first is exact."""
    whole, mask = x.lanes * 32, f"i{max(x.lanes, 8)}"
    rounding = [V("4", "i32")] if whole == 512 else []  # rounding mode of the control register
    return e.external(f"llvm.x86.avx512.mask.scalef.ps.{whole}", x.ty, x, n, V("zeroinitializer", x.ty), V("-1", mask), *rounding)


def _near_zero(e: Emitter, x: V, most: float) -> V:
    """x, no farther from 0 than `most`, by AVX-512's instruction; `most` with some sign if x is NaN."""
    whole, mask = x.lanes * 32, f"i{max(x.lanes, 8)}"
    rounding = [V("4", "i32")] if whole == 512 else []
    nearer = V("2", "i32")  # the smaller magnitude, with the sign of x
    top = e.const(x.ty, most)
    return e.external(
        f"llvm.x86.avx512.mask.range.ps.{whole}", x.ty, x, top, nearer, V("zeroinitializer", x.ty), V("-1", mask), *rounding
    )


def _has_avx512(e: Emitter) -> bool:
    return {"avx512f", "avx512vl", "avx512dq"} <= {*e.features}


def _in_16_lanes(e: Emitter, x: V, function: Callable[[V], V]) -> V:
    """function(x), of a function of 16 lanes."""
    if x.lanes == 16:
        return function(x)
    if x.lanes == 32:
        low, high = (function(e.shuffle(x, range(n, n + 16))) for n in (0, 16))
        return e.shuffle(low, range(32), high)
    if x.ty[0] != "<":
        return e.op(x.ty, f"extractelement {function(e.splat(x, 16))}, i64 0")
    return e.shuffle(function(e.shuffle(x, [n % x.lanes for n in range(16)])), range(x.lanes))


def _of_part(e: Emitter, part: V, table: Sequence[float]) -> V:
    """The element of a table of 16 in each lane, by the low four bits of `part`: one instruction of AVX-512."""
    elements = V("<" + ", ".join(str(e.const("float", x)) for x in table) + ">", "<16 x float>")
    return e.intrinsic("x86.avx512.permvar.sf.512", elements, part, suffix=(), returns=elements.ty)


def _in_parts(e: Emitter, x: V, part: V, tables: Sequence[Sequence[float]]) -> V:
    """Horner's scheme with the coefficients of each lane's part."""
    out = _of_part(e, part, tables[0])
    for table in tables[1:]:
        out = e.fma(out, x, _of_part(e, part, table))
    return out


def _split(e: Emitter, x: V) -> tuple[V, V]:
    """x = 2^n m, both positive, sqrt(1/2) <= m < sqrt(2): (n, an integer, m)."""
    bits = _bits(e, x)
    digits, root_half = (52, 0x3FE6A09E667F3BCD) if x.scalar == "double" else (23, 0x3F3504F3)
    n = e.bin("ashr", e.bin("sub", bits, root_half), digits)
    return n, _float(e, e.bin("sub", bits, e.bin("shl", n, digits)))


def _expm1(e: Emitter, x: V) -> V:
    """e^x - 1 for |x| < 80."""
    n, r = _by_ln2(e, x)
    p = e.fma(e.bin("fmul", r, r), polynomial(e, r, EXPM1), r)
    scale = _power_of_two(e, _bits(e, n))
    return e.fma(scale, p, e.bin("fsub", scale, 1.0))


def libm(e: Emitter, name: str, *args: V) -> V:
    """A libm function of doubles, lane by lane."""
    if args[0].lanes == 1:
        return e.external(name, "double", *args)
    with e.loop(0, args[0].lanes, carried=(V("poison", args[0].ty),)) as loop:
        one = e.external(name, "double", *(e.op("double", f"extractelement {a}, {loop.index}") for a in args))
        loop.next = [e.op(args[0].ty, f"insertelement {loop.carried[0]}, {one}, {loop.index}")]
    return loop.results[0]


# -- functions of f32 ----------------------------------------------------------------------------------------------


def _exp_by_table(e: Emitter, x: V) -> V:
    """2^(n/16) e^r for an integral n: the table's power as two floats, then 2^floor(n/16) by the instruction that scales.

    There is no clamp of x: n may be infinite or NaN, as the result then is; r, NaN there or far off, may be any number."""
    shift = SHIFT / 16  # in steps of 1/16
    shifted, r = _by_ln2(e, x, shift)
    r, part = _near_zero(e, r, 0.5), _bits(e, shifted)
    power = _of_part(e, part, SIXTEENTHS)
    first = e.fma(power, r, _of_part(e, part, SIXTEENTHS_LOW))
    near = e.fma(first, e.fma(e.fma(1 / 6, r, 0.5), r, 1.0), power)
    return _scaled(e, near, e.bin("fsub", _float(e, shifted), shift))


def exp(e: Emitter, x: V) -> V:
    if _has_avx512(e):
        return _in_16_lanes(e, x, partial(_exp_by_table, e))
    shifted, r = _by_ln2(e, _within(e, x, -105.0, 89.0))
    n = e.bin("sub", _bits(e, shifted), _bits(e, e.const(x.ty, SHIFT)))
    half = e.bin("ashr", n, 1)  # two steps: 2^n alone may overflow or be denormal
    near = e.bin("fmul", polynomial(e, r, EXP), _power_of_two(e, half))
    return e.bin("fmul", near, _power_of_two(e, e.bin("sub", n, half)))


def log(e: Emitter, x: V) -> V:
    tiny = e.cmp("olt", x, 2.0**-126)
    n, m = _split(e, e.select(tiny, e.bin("fmul", x, 2.0**23), x))
    exponent = e.bin("fsub", e.convert("sitofp", n, "float"), e.select(tiny, 23.0, e.const(x.ty, 0.0)))
    f = e.bin("fsub", m, 1.0)
    square = e.bin("fmul", f, f)
    small = e.fma(LN2_LOW, exponent, e.bin("fmul", e.bin("fmul", f, square), polynomial(e, f, LOG)))
    out = e.fma(LN2_HIGH, exponent, e.bin("fadd", f, e.fma(-0.5, square, small)))
    out = e.select(e.cmp("uge", x, math.inf), x, out)  # inf and NaN
    out = e.select(e.cmp("olt", x, 0.0), math.nan, out)
    return e.select(e.cmp("oeq", x, 0.0), -math.inf, out)


def _sin_or_cos(e: Emitter, x: V, name: str) -> V:
    """|x| is reduced by multiples of pi/2 in double. Working on |x| gives the right sign of sin, also for -0."""
    magnitude = e.intrinsic("fabs", x)
    wide = e.convert("fpext", magnitude, "double")
    shifted = e.fma(2 / math.pi, wide, SHIFT64)
    n = e.bin("fsub", shifted, SHIFT64)
    r = e.convert("fptrunc", e.fma(-HALF_PI_LOW, n, e.fma(-HALF_PI_HIGH, n, wide)), "float")
    quadrant = e.convert("trunc", _bits(e, shifted), "i32")
    if name == "cos":
        quadrant = e.bin("add", quadrant, 1)
    square = e.bin("fmul", r, r)
    odd = e.fma(e.bin("fmul", r, square), polynomial(e, square, SIN), r)
    even = e.fma(e.bin("fmul", square, square), polynomial(e, square, COS), e.fma(-0.5, square, 1.0))
    swap = e.cmp("ne", e.bin("and", quadrant, 1), 0)
    sign = e.bin("shl", e.bin("and", quadrant, 2), 30)
    if name == "sin":
        sign = e.bin("xor", sign, e.bin("and", _bits(e, x), -(2**31)))
    out = _float(e, e.bin("xor", _bits(e, e.select(swap, even, odd)), sign))
    return _for_large(e, x, magnitude, out, name)


def _for_large(e: Emitter, x: V, magnitude: V, out: V, name: str) -> V:
    """`out`, with libm's result in the lanes where |x| is too large for the reduction (inf included)."""
    large = e.cmp("oge", magnitude, REDUCIBLE)
    some = large if x.lanes == 1 else e.intrinsic("vector.reduce.or", large, returns="i1")
    before = e.block
    with e.when(some):
        slow = e.convert("fptrunc", libm(e, name, e.convert("fpext", x, "double")), "float")
        slow = e.select(large, slow, out)
        inside = e.block
    return e.phi((out, before), (slow, inside))


sin, cos = partial(_sin_or_cos, name="sin"), partial(_sin_or_cos, name="cos")


def tanh(e: Emitter, x: V) -> V:
    """m / (m + 2) with m = e^(2|x|) - 1, which keeps small x exact; with AVX-512 in parts."""
    if _has_avx512(e):
        return _in_16_lanes(e, x, partial(_tanh_in_parts, e))
    a = _at_most(e, e.intrinsic("fabs", x), 9.1)  # beyond: 1 after rounding
    m = _expm1(e, e.bin("fadd", a, a))
    return e.intrinsic("copysign", e.bin("fdiv", m, e.bin("fadd", m, 2.0)), x)


def _tanh_in_parts(e: Emitter, x: V) -> V:
    a = _at_most(e, e.intrinsic("fabs", x), 9.1)
    part = e.bin("lshr", _bits(e, e.bin("fadd", a, TANH_BIAS)), 21)
    out = _in_parts(e, e.bin("fsub", a, _of_part(e, part, TANH_FROM)), part, TANH_PARTS)
    return e.intrinsic("copysign", out, x)


def _erf_in_parts(e: Emitter, x: V) -> V:
    a = _at_most(e, e.intrinsic("fabs", x), 3.87)  # where the last part reaches 1, so that gelu vanishes far below 0
    shifted = e.bin("fadd", a, SHIFT / 4)  # round(4a) in its low bits
    out = _in_parts(e, e.bin("fsub", a, e.bin("fsub", shifted, SHIFT / 4)), _bits(e, shifted), ERF_PARTS)
    return e.intrinsic("copysign", out, x)


def erf(e: Emitter, x: V) -> V:
    if _has_avx512(e):
        return _in_16_lanes(e, x, partial(_erf_in_parts, e))
    a = _at_most(e, e.intrinsic("fabs", x), 3.95)  # beyond: 1 after rounding
    rest = e.fma(polynomial(e, a, ERF), a, TWO_BY_ROOT_PI_LOW)
    inner = e.fma(TWO_BY_ROOT_PI, a, e.bin("fmul", a, rest))
    return e.intrinsic("copysign", _expm1(e, e.op(x.ty, f"fneg {inner}")), x)


def pow(e: Emitter, x: V, y: V) -> V:
    """C's pow, through log2 and exp2 in double, so that a large exponent does not magnify the logarithm's error."""
    wide_x, wide_y = e.convert("fpext", e.intrinsic("fabs", x), "double"), e.convert("fpext", y, "double")
    power = _exp2_double(e, e.bin("fmul", wide_y, _log2_double(e, wide_x)))
    out = e.convert("fptrunc", power, "float")
    whole = e.cmp("oeq", y, e.intrinsic("trunc", y))  # true for infinities
    half = e.bin("fmul", y, 0.5)
    odd = e.bin("and", whole, e.cmp("one", half, e.intrinsic("trunc", half)))
    negative = e.cmp("slt", _bits(e, x), 0)
    fixed = e.bin("or", e.cmp("oeq", e.intrinsic("fabs", x), 1.0), e.cmp("oeq", y, 0.0))
    out = e.select(fixed, 1.0, out)  # log2 or y is 0: 0 times infinity or NaN would give NaN
    out = e.select(e.bin("and", negative, odd), e.op(x.ty, f"fneg {out}"), out)
    finite_negative = e.bin("and", e.cmp("olt", x, 0.0), e.cmp("ogt", x, -math.inf))
    imaginary = e.bin("and", finite_negative, e.cmp("une", y, e.intrinsic("trunc", y)))
    unknown = e.bin("and", e.cmp("uno", x, y), e.bin("and", e.cmp("une", x, 1.0), e.cmp("une", y, 0.0)))
    return e.select(e.bin("or", imaginary, unknown), math.nan, out)


def _log2_double(e: Emitter, x: V) -> V:
    """log2 of a nonnegative float widened to double (-inf for 0), with error 2^-40: 2 atanh(s)/ln2 with s = (m-1)/(m+1)."""
    n, m = _split(e, x)
    s = e.bin("fdiv", e.bin("fsub", m, 1.0), e.bin("fadd", m, 1.0))
    series = polynomial(e, e.bin("fmul", s, s), [2 / LN2 / (2 * i + 1) for i in range(8, -1, -1)])
    out = e.fma(s, series, e.convert("sitofp", e.convert("trunc", n, "i32"), "double"))
    out = e.select(e.cmp("uge", x, math.inf), x, out)
    return e.select(e.cmp("oeq", x, 0.0), -math.inf, out)


def _exp2_double(e: Emitter, x: V) -> V:
    """2^x as a double, with error 2^-38. Beyond f32's range it is 2^-300 or 2^300, which round to 0 and infinity."""
    x = _within(e, x, -300.0, 300.0)
    shifted = e.bin("fadd", x, SHIFT64)
    r = e.bin("fsub", x, e.bin("fsub", shifted, SHIFT64))
    near = polynomial(e, r, [LN2**i / math.factorial(i) for i in range(9, -1, -1)])
    n = e.bin("shl", _bits(e, shifted), 52)
    return e.bin("fmul", near, _float(e, e.bin("add", n, 0x3FF0000000000000)))

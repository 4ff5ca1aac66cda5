/* Scalar operations of the kernel IR that the C family has no operator for, with the meaning that rlx/ir/kernel.py states.

   Put before generated kernels by rlx/backends/shared/c_dialect.py, after the dialect's own lines: they bring fixed-width
   integers, bool, memcpy and the functions of <math.h>, RLX_FN, which stands before every function, and rlx_index with its
   unsigned type rlx_uindex: the integers of positions. */

/* Integers. T: the type; U: unsigned, of the same width; W: unsigned, at least as wide as int, in which arithmetic wraps. */
#define RLX_INTEGER(T, U, W, n, bits, is_signed) \
  RLX_FN T rlx_div_##n(T a, T b) { \
    if (b == 0) return 0; \
    return is_signed && b == (T)-1 ? (T)(0 - (W)a) : (T)(a / b); \
  } \
  RLX_FN T rlx_rem_##n(T a, T b) { return b == 0 || (is_signed && b == (T)-1) ? 0 : (T)(a % b); } \
  RLX_FN T rlx_min_##n(T a, T b) { return b < a ? b : a; } \
  RLX_FN T rlx_max_##n(T a, T b) { return b > a ? b : a; } \
  RLX_FN T rlx_abs_##n(T a) { return a < 0 ? (T)(0 - (W)a) : a; } \
  RLX_FN T rlx_shl_##n(T a, T b) { return (U)b < bits ? (T)((W)a << b) : 0; } \
  RLX_FN T rlx_shr_##n(T a, T b) { return (U)b < bits ? (T)(a >> b) : a < 0 ? (T)-1 : 0; } \
  RLX_FN T rlx_pow_##n(T a, T b) { /* to a negative power: the truncated reciprocal */ \
    W out = 1, square = (W)a; \
    if (b < 0) return a == 1 ? 1 : a == (T)-1 ? (b & 1 ? a : 1) : 0; \
    for (U left = (U)b; left != 0; left >>= 1) { \
      if (left & 1) out *= square; \
      square *= square; \
    } \
    return (T)out; \
  } \
  RLX_FN T rlx_to_##n(double a) { /* truncated, saturated; NaN gives 0 */ \
    const U top = (U)-1 >> is_signed; \
    const double above = (is_signed ? 0.5 : 1.0) * (bits == 64 ? 18446744073709551616.0 : (double)(1ull << (bits % 64))); \
    if (a != a) return 0; \
    if (a >= above) return (T)top; \
    if (a <= (is_signed ? -above : 0.0)) return (T)(is_signed ? top + 1 : 0); \
    return (T)a; \
  }
RLX_INTEGER(int8_t, uint8_t, uint32_t, i8, 8, 1)
RLX_INTEGER(int16_t, uint16_t, uint32_t, i16, 16, 1)
RLX_INTEGER(int32_t, uint32_t, uint32_t, i32, 32, 1)
RLX_INTEGER(int64_t, uint64_t, uint64_t, i64, 64, 1)
RLX_INTEGER(uint8_t, uint8_t, uint32_t, u8, 8, 0)
RLX_INTEGER(uint16_t, uint16_t, uint32_t, u16, 16, 0)
RLX_INTEGER(uint32_t, uint32_t, uint32_t, u32, 32, 0)
RLX_INTEGER(uint64_t, uint64_t, uint64_t, u64, 64, 0)
RLX_INTEGER(rlx_index, rlx_uindex, rlx_uindex, index, (8 * sizeof(rlx_index)), 1)

/* Floats: min and max are NaN where either operand is. */
#define RLX_FLOAT(T, U, n) \
  RLX_FN T rlx_min_##n(T a, T b) { return a != a ? a : b < a || b != b ? b : a; } \
  RLX_FN T rlx_max_##n(T a, T b) { return a != a ? a : b > a || b != b ? b : a; } \
  RLX_FN U rlx_bits_##n(T a) { U out; memcpy(&out, &a, sizeof out); return out; } \
  RLX_FN T rlx_of_bits_##n(U a) { T out; memcpy(&out, &a, sizeof out); return out; }
RLX_FLOAT(float, uint32_t, f32)
RLX_FLOAT(double, uint64_t, f64)

/* double to float, rounded to odd: inexact results end in a 1 bit, so that rounding once more, to a narrow format, is right. */
RLX_FN float rlx_odd(double a) {
  const float near = (float)a;
  if ((double)near == a || a != a) return near;
  return rlx_of_bits_f32((rlx_bits_f32(near) - (fabs((double)near) > fabs(a) ? 1 : 0)) | 1);
}

/* 2 to the power of e, a normal float. */
RLX_FN float rlx_exp2i(int e) { return rlx_of_bits_f32((uint32_t)(127 + e) << 23); }

/* |a|, which is a number, in a narrow format: nearest even; what is `over` or more becomes `over`. */
RLX_FN uint32_t rlx_narrow(float a, int fraction, int bias, uint32_t over) {
  const int drop = 23 - fraction;
  uint32_t u = rlx_bits_f32(a) & 0x7fffffffu;
  if (u < (uint32_t)(128 - bias) << 23) return (uint32_t)rintf(fabsf(a) * rlx_exp2i(bias - 1 + fraction)); /* subnormal */
  u -= (uint32_t)(127 - bias) << 23;
  u = (u + (1u << (drop - 1)) - 1 + (u >> drop & 1)) >> drop;
  return u < over ? u : over;
}

/* The number whose exponent and fraction are `a` in a narrow format. */
RLX_FN float rlx_widen(uint32_t a, int fraction, int bias) {
  if (a >> fraction == 0) return (float)a * rlx_exp2i(1 - bias - fraction);
  return rlx_of_bits_f32((a << (23 - fraction)) + ((uint32_t)(127 - bias) << 23));
}

/* T: memory; half: the sign bit; over: the first pattern past the numbers; nan: a quiet one. f8e4m3 has no infinity. */
#define RLX_NARROW(T, n, fraction, bias, sign, over, nan, has_infinity) \
  RLX_FN T rlx_bits_##n(float a) { \
    const uint32_t half = rlx_bits_f32(a) >> 31 ? sign : 0; \
    return (T)(half | (a != a ? nan : rlx_narrow(a, fraction, bias, over))); \
  } \
  RLX_FN float rlx_of_bits_##n(T a) { \
    const uint32_t rest = a & (sign - 1); \
    const float out = rest < over ? rlx_widen(rest, fraction, bias) : has_infinity && rest == over ? INFINITY : NAN; \
    return a & sign ? -out : out; \
  }
RLX_NARROW(uint16_t, f16, 10, 15, 0x8000u, 0x7c00u, 0x7e00u, 1)
RLX_NARROW(uint8_t, f8e5m2, 2, 15, 0x80u, 0x7cu, 0x7eu, 1)
RLX_NARROW(uint8_t, f8e4m3, 3, 7, 0x80u, 0x7fu, 0x7fu, 0)

/* bf16: the upper half of a float. */
RLX_FN uint16_t rlx_bits_bf16(float a) {
  const uint32_t u = rlx_bits_f32(a);
  return (uint16_t)(a != a ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}
RLX_FN float rlx_of_bits_bf16(uint16_t a) { return rlx_of_bits_f32((uint32_t)a << 16); }


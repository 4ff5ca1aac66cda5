/* What NVRTC does not bring without headers: integer names, RLX_FN, conversions. RLX_INDEX: the integer of positions. */
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#if RLX_INDEX_BITS == 32
typedef int rlx_index;
typedef unsigned int rlx_uindex;
#else
typedef long long rlx_index;
typedef unsigned long long rlx_uindex;
#endif
#define RLX_FN static __device__ __forceinline__
#define NAN __int_as_float(0x7fc00000)
#define INFINITY __int_as_float(0x7f800000)

/* A number as a position: one out of range stays out of range. */
RLX_FN rlx_index rlx_position(int64_t a) {
  return sizeof(rlx_index) == 8 ? a : a > 0x7fffffffLL ? 0x7fffffff : a < -0x7fffffffLL ? -0x7fffffff : (rlx_index)a;
}
RLX_FN rlx_index rlx_position(uint64_t a) { return rlx_position(a >> 63 ? 0x7fffffffffffffffLL : (int64_t)a); }
RLX_FN rlx_index rlx_position(uint32_t a) { return rlx_position((int64_t)a); }

RLX_FN float rlx_wide_f16(uint16_t a) { float out; asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(a)); return out; }
RLX_FN uint16_t rlx_near_f16(float a) { uint16_t out; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(a)); return out; }
RLX_FN float rlx_wide_bf16(uint16_t a) { return __uint_as_float((uint32_t)a << 16); }
/* Element v of a vector; the upper half of a word is one in place, while to take it out first would be an instruction more. */
template <int N> RLX_FN float rlx_wide_bf16(const uint16_t (&a)[N], int v) {
  if constexpr (N % 2) return rlx_wide_bf16(a[v]);
  uint32_t word;
  memcpy(&word, a + v / 2 * 2, sizeof(word));
  return __uint_as_float(v % 2 ? word & 0xffff0000u : word << 16);
}
RLX_FN uint16_t rlx_near_bf16(float a) { uint16_t out; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(a)); return out; }
RLX_FN uint32_t rlx_near_tf32(float a) { uint32_t out; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(a)); return out; }

/* Two 8-bit floats as two f16, and N of them as f32: exact. */
RLX_FN uint32_t rlx_pair_f8e5m2(uint32_t a) { return __byte_perm(a, 0, 0x1404); }
RLX_FN uint32_t rlx_pair_f8e4m3(uint32_t a) {
  uint32_t out;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((uint16_t)a));
  return out;
#else /* the same fraction, an exponent 8 too small; NaN has the largest of both */
  const uint32_t up = __byte_perm(a, 0, 0x1404), rest = up & 0x7f007f00u, nan = (rest + 0x01000100u) & 0x80008000u;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"((up & 0x80008000u) | rest >> 1), "r"(0x5c005c00u));
  return out | (nan - (nan >> 15));
#endif
}
RLX_FN uint32_t rlx_bf16_pair(uint32_t f16) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(rlx_wide_f16((uint16_t)(f16 >> 16))), "f"(rlx_wide_f16((uint16_t)f16)));
  return out;
}
#define RLX_EIGHT(n) \
  template <int N> RLX_FN void rlx_wide_##n(float (&to)[N], const uint8_t (&from)[N]) { \
    _Pragma("unroll") for (int v = 0; v < N; v += 2) { \
      const uint32_t pair = rlx_pair_##n((uint32_t)from[v] | (uint32_t)from[(v + 1) % N] << 8); \
      to[v] = rlx_wide_f16((uint16_t)pair); \
      if (v + 1 < N) to[v + 1] = rlx_wide_f16((uint16_t)(pair >> 16)); \
    } \
  } \
  /* as f16 or bf16 */ \
  template <bool F16, int N> RLX_FN void rlx_put_##n(uint16_t* at, const uint8_t (&from)[N]) { \
    _Pragma("unroll") for (int v = 0; v < N; v += 8) { \
      uint32_t out[4]; \
      _Pragma("unroll") for (int q = 0; q < 4; q++) { \
        out[q] = rlx_pair_##n((uint32_t)from[v + 2 * q] | (uint32_t)from[v + 2 * q + 1] << 8); \
        if (!F16) out[q] = rlx_bf16_pair(out[q]); \
      } \
      *(uint4*)(at + v) = make_uint4(out[0], out[1], out[2], out[3]); \
    } \
  }
RLX_EIGHT(f8e4m3)
RLX_EIGHT(f8e5m2)

/* 1 + erf(x), of which erff(x) + 1 keeps no digits for x < -4. For a = |x|, erfc(a) is 2 to the power of -a times a polynomial in a,
   fitted on [0, 4.5]: off by 8e-8 at most, and by 1e-5 of the result. */
RLX_FN float rlx_erf_plus_1(float x) {
  const float a = fabsf(x);
  float r = 7.142056688e-07f, p;
  r = fmaf(r, a, -1.597577102e-05f), r = fmaf(r, a, 1.518290519e-04f), r = fmaf(r, a, -7.783214096e-04f);
  r = fmaf(r, a, 2.051538788e-03f), r = fmaf(r, a, 2.384539503e-04f), r = fmaf(r, a, -2.796775661e-02f);
  r = fmaf(r, a, 1.484015435e-01f), r = fmaf(r, a, 9.184265733e-01f), r = fmaf(r, a, 1.627908230e+00f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(p) : "f"(-a * r));
  return x < 0 ? p : 2 - p;
}

/* a / (1 + exp(x)), right to 20 bits, for results that are stored in 16. */
RLX_FN float rlx_over_exp_plus_1(float a, float x) {
  float e, out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.442695041f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(1 + e));
  return out;
}

/* exp(x), right to 17 bits or more, for results that are stored in 16. Results below 2^-126 may be flushed to 0, which takes half as
   many instructions. */
RLX_FN float rlx_exp_17(float x) {
  float out;
  asm("ex2.approx.f32 %0, %1;" : "=f"(out) : "f"(x * 1.442695041f));
  return out;
}
RLX_FN float rlx_exp_17_flushed(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.442695041f));
  return out;
}

/* Rounded and widened again. Two numbers at once are converted faster than one, which leaves out another unit. */
RLX_FN float rlx_round_f16(float a) {
  float out;
  asm("{.reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.f32 both, %1, %2; mov.b32 {low, high}, both; cvt.f32.f16 %0, high;}"
    : "=f"(out) : "f"(a), "f"(0.f));
  return out;
}
RLX_FN float rlx_round_bf16(float a) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(a), "f"(0.f));
  return __uint_as_float(out);
}

/* 1 + tanh(a) as 2 / (1 + exp(-2 a)): half the instructions, and no digits are lost where tanh(a) is near -1. */
RLX_FN float rlx_tanh_plus_1(float a) {
  float power, out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a * -2.8853900817779268f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(1 + power));
  return 2 * out;
}

/* a / b towards zero, and the remainder, of integers of at most 16 bits; 0 if b is. (|a| + 1/2) / b is at least 2^-18 of itself away from
   whole numbers, and its product here is off by less than 2^-22. Without branches, a kernel of both computes the quotient once. */
RLX_FN float rlx_short_float(int a) { return __uint_as_float(0x4b400000u + a) - 12582912.0f; } /* the unit of conversions is slower */
RLX_FN int rlx_short_quotient(int a, int b) {
  float by;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(by) : "f"(rlx_short_float(b)));
  const int quotient = (int)((rlx_short_float(a) + (a < 0 ? -0.5f : 0.5f)) * by);
  return b == 0 ? 0 : quotient;
}
RLX_FN int rlx_short_remainder(int a, int b) {
  const int remainder = a - rlx_short_quotient(a, b) * b;
  return b == 0 ? 0 : remainder;
}

/* sum += a @ b: 16 rows by 8 columns, 16 deep, of bf16 or f16. */
template <bool F16 = false> RLX_FN void rlx_multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  if constexpr (F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
  else asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/* Signed arithmetic that wraps, which C++ leaves undefined. W: unsigned, at least as wide as int. */
#define RLX_WRAPS(T, W, n) \
  RLX_FN T rlx_add_##n(T a, T b) { return (T)((W)a + (W)b); } \
  RLX_FN T rlx_sub_##n(T a, T b) { return (T)((W)a - (W)b); } \
  RLX_FN T rlx_mul_##n(T a, T b) { return (T)((W)a * (W)b); } \
  RLX_FN T rlx_fma_##n(T a, T b, T c) { return (T)((W)a * (W)b + (W)c); }
RLX_WRAPS(int8_t, uint32_t, i8)
RLX_WRAPS(int16_t, uint32_t, i16)
RLX_WRAPS(int32_t, uint32_t, i32)
RLX_WRAPS(int64_t, uint64_t, i64)
RLX_WRAPS(uint8_t, uint32_t, u8)
RLX_WRAPS(uint16_t, uint32_t, u16)
RLX_WRAPS(uint32_t, uint32_t, u32)
RLX_WRAPS(uint64_t, uint64_t, u64)
RLX_WRAPS(rlx_index, rlx_uindex, index)

/* The result of a step's Checks, and the flag that stops what follows. */
struct rlx_status { int code, unused; int* halt; };
RLX_FN void rlx_fail(rlx_status* status, int code) {
  if (!status) return; /* undoing repeats checks that have passed */
  status->code = code;
  atomicCAS(status->halt, 0, 1);
}
/* Whether a run on the same states has failed: its block, all of it, does nothing. Kernels that change no state get no flag. */
RLX_FN bool rlx_halted(const int* halt) { return halt && __syncthreads_or(*(const volatile int*)halt); }

/* All threads of a cluster; they see what the others wrote before. */
RLX_FN void rlx_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/* All threads of a cluster; they see what the others wrote before to the shared memory of their own blocks. Ordered like the memory
   of the GPU, with MEMBAR.ALL.GPU, this takes 1.5 us and more. */
RLX_FN void rlx_cluster_shares() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/* Lets the blocks of the next kernel be placed where this one's leave room, once all blocks of this kernel have said so. */
RLX_FN void rlx_start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* The first statement of every kernel: waits until all earlier kernels of the run have ended. The next kernel may be placed before,
   since it waits for this one. */
RLX_FN void rlx_begin() {
  rlx_start_next();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

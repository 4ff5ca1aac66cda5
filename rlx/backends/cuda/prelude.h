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
RLX_FN uint16_t rlx_near_bf16(float a) { uint16_t out; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(a)); return out; }

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

/* The first statement of every kernel: waits until all earlier kernels of the run have ended, then lets the next one be placed on
   multiprocessors that become free, so that only its work is left to start. */
RLX_FN void rlx_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Products of a few rows with weights that pass through rings in shared memory (gemv_blocks.py). */
/* A block's ring in shared memory. From 9.0 on one lane starts a bulk copy of a stage, which completes on the stage's barrier;
   before, a warp copies 16 bytes with each lane at a time. */
struct __align__(64) rlx_ring_map { unsigned long long opaque[16]; };
RLX_FN uint32_t rlx_ring_at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }
#if __CUDA_ARCH__ >= 900
constexpr int RLX_RING_ARRIVALS = 1;
RLX_FN void rlx_ring_expect(uint64_t* filled, int bytes, int lane) {
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(rlx_ring_at(filled)), "r"(bytes) : "memory");
}
RLX_FN void rlx_ring_copy(void* to, const void* from, int bytes, uint64_t* filled, int lane) {
  if (lane) return;
  uint64_t once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
    ::"r"(rlx_ring_at(to)), "l"(from), "r"(bytes), "r"(rlx_ring_at(filled)), "l"(once) : "memory");
}
RLX_FN void rlx_ring_box(void* to, const rlx_ring_map* map, uint64_t* filled, int row, int line, int lane) {
  if (lane) return;
  uint64_t once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile(
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
    ::"r"(rlx_ring_at(to)), "l"(map), "r"(rlx_ring_at(filled)), "r"(0), "r"(row), "r"(line), "l"(once) : "memory");
}
#define RLX_RING_TRY "mbarrier.try_wait"
#else
constexpr int RLX_RING_ARRIVALS = 32;
RLX_FN void rlx_ring_expect(uint64_t*, int, int) {}
RLX_FN void rlx_ring_copy(void* to, const void* from, int bytes, uint64_t* filled, int lane) {
  for (int at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(rlx_ring_at((char*)to + at)), "l"((const char*)from + at) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(rlx_ring_at(filled)) : "memory");
}
#define RLX_RING_TRY "mbarrier.test_wait"
#endif
/* A stage from memory of the host, by a warp, through the L1 cache: copies past it ask the bus for more than twice the bytes. */
RLX_FN void rlx_ring_copy_far(void* to, const void* from, int bytes, uint64_t* filled, int lane) {
#if __CUDA_ARCH__ >= 900
  for (int at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(rlx_ring_at((char*)to + at)), "l"((const char*)from + at) : "memory");
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(rlx_ring_at(filled)) : "memory");
  __syncwarp();
  if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(rlx_ring_at(filled)) : "memory");
#else
  rlx_ring_copy(to, from, bytes, filled, lane);
#endif
}
RLX_FN void rlx_ring_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(rlx_ring_at(barrier)), "r"(arrivals) : "memory");
}
/* Barriers of the stages: behind those of copies those of their uses, by some warps each. */
RLX_FN void rlx_ring_begin(uint64_t* filled, int slots, int users, int lane) {
  if (lane < slots) rlx_ring_init(filled + lane, RLX_RING_ARRIVALS), rlx_ring_init(filled + slots + lane, users);
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}
RLX_FN void rlx_ring_await(uint64_t* filled, int phase) {
  asm volatile(
    "{ .reg .pred done; again: " RLX_RING_TRY ".parity.shared.b64 done, [%0], %1; @done bra out; bra again; out: }"
    ::"r"(rlx_ring_at(filled)), "r"(phase) : "memory");
}
/* A warp has used a stage. True, in its first lane or in all, if all others have. */
RLX_FN bool rlx_ring_used(uint64_t* used, int lane, bool in_all = false) {
  int left = 0;
  __syncwarp();
  if (lane == 0)
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%1]; mbarrier.pending_count.b64 %0, state; }"
      : "=r"(left) : "r"(rlx_ring_at(used)) : "memory");
#if __CUDA_ARCH__ < 900
  in_all = true;
#endif
  if (in_all) left = __shfl_sync(0xffffffffu, left, 0);
  return left == 1;
}

/* 64 elements of the 32 rows of a panel, as a bulk copy brings them: lines of 128 bytes, chunk n of line r at n ^ (r % 8).
   Lane 4 * g + t has rows g + 8 * r, and of each two adjacent chunks, HALVES from the first-th. sum += the
   products. */
template <bool F16, int HALVES, int TILES> RLX_FN void rlx_multiply_lines(
  const unsigned char* lines, int first, int g, int t, const unsigned char* const (&x_at)[TILES], int at, float (&sum)[2][TILES][4]
) {
  #pragma unroll
  for (int half = first; half < first + HALVES; half++) {
    uint4 x[TILES];
    #pragma unroll
    for (int n = 0; n < TILES; n++) x[n] = *(const uint4*)(x_at[n] + at + t * 32 + half * 16);
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const unsigned char* const line = lines + (g + 16 * j) * 128 + (2 * t + half ^ g) * 16;
      const uint4 low = *(const uint4*)line, high = *(const uint4*)(line + 8 * 128);
      #pragma unroll
      for (int n = 0; n < TILES; n++) {
        rlx_multiply<F16>(sum[j][n], low.x, high.x, low.y, high.y, make_uint2(x[n].x, x[n].y));
        rlx_multiply<F16>(sum[j][n], low.z, high.z, low.w, high.w, make_uint2(x[n].z, x[n].w));
      }
    }
  }
}

template <bool F16> RLX_FN uint32_t rlx_near_pair(float low, float high) {
  uint32_t out;
  if constexpr (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
/* Four elements of a column of the product, as PIECES numbers that add up to them in columns `pitch` bytes apart. SWAPPED: in the
   order 0, 2, 1, 3, so that pairs are those of rlx_narrow_pair. */
template <int PIECES, bool F16, bool SWAPPED> RLX_FN void rlx_split_4(unsigned char* to, int pitch, float (&x)[4]) {
  constexpr int A = SWAPPED ? 2 : 1, B = 3 - A;
  #pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    uint2 out = make_uint2(rlx_near_pair<F16>(x[0], x[A]), rlx_near_pair<F16>(x[B], x[3]));
    if constexpr (PIECES > 1) {  // the upper halves, whose difference from the number is exact
      out.x = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[A]), 0x7632);
      out.y = __byte_perm(__float_as_uint(x[B]), __float_as_uint(x[3]), 0x7632);
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const float whole = __uint_as_float(__float_as_uint(x[e]) & 0xffff0000u);
        x[e] = x[e] == whole ? 0.0f : x[e] - whole;
      }
    }
    *(uint2*)(to + piece * pitch) = out;
  }
}

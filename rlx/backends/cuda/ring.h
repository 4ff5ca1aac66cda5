/* Products of a few rows with weights that pass through rings in shared memory (gemv_blocks.py). */
/* A warp's ring in shared memory. From 9.0 on one lane starts bulk copies, which complete on a barrier of their slot; before, all
   lanes copy 16 bytes at a time, and a slot is a group of copies. */
struct __align__(64) rlx_ring_map { unsigned long long opaque[16]; };
#if __CUDA_ARCH__ >= 900
RLX_FN uint32_t rlx_ring_at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }
RLX_FN void rlx_ring_begin(uint64_t* filled, int slots, int lane) {
  if (lane < slots) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(rlx_ring_at(filled + lane)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}
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
RLX_FN void rlx_ring_box(void* to, const rlx_ring_map* map, uint64_t* filled, int element, int row, int lane) {
  if (lane) return;
  uint64_t once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
    ::"r"(rlx_ring_at(to)), "l"(map), "r"(rlx_ring_at(filled)), "r"(element), "r"(row), "l"(once) : "memory");
}
RLX_FN void rlx_ring_end() {}
template <int SLOTS> RLX_FN void rlx_ring_await(uint64_t* filled, int phase) {
  asm volatile(
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @done bra out; bra again; out: }"
    ::"r"(rlx_ring_at(filled)), "r"(phase) : "memory");
}
#else
RLX_FN void rlx_ring_begin(uint64_t*, int, int) {}
RLX_FN void rlx_ring_expect(uint64_t*, int, int) {}
RLX_FN void rlx_ring_copy(void* to, const void* from, int bytes, uint64_t*, int lane) {
  for (int at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
      ::"r"((uint32_t)__cvta_generic_to_shared((char*)to + at)), "l"((const char*)from + at) : "memory");
}
RLX_FN void rlx_ring_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int SLOTS> RLX_FN void rlx_ring_await(uint64_t*, int) {
  asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
  __syncwarp();
}
#endif

/* sum += a @ b: 16 rows by 8 columns, 16 deep, of bf16 or f16. */
template <bool F16 = false> RLX_FN void rlx_multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  if constexpr (F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
  else asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/* 64 elements of the 32 rows of a panel, as a bulk copy brings them: lines of 128 bytes, chunk n of line r at n ^ (r % 8).
   Lane 4 * g + t has rows g + 8 * r, and of each two adjacent chunks. sum += the products. */
template <bool F16, int TILES> RLX_FN void rlx_multiply_lines(
  const unsigned char* lines, int g, int t, const unsigned char* const (&x_at)[TILES], int at, float (&sum)[2][TILES][4]
) {
  #pragma unroll
  for (int half = 0; half < 2; half++) {
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

/* Blocks of a cluster. */
RLX_FN void rlx_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
RLX_FN float rlx_of_block(const float* shared, int block) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(shared), there;
  float out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(out) : "r"(there) : "memory");
  return out;
}

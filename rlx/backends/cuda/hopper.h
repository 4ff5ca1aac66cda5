
/* Asynchronous copies and tensor-core products of compute capability 9.0. */
struct __align__(64) rlx_map { unsigned long long opaque[16]; };

RLX_FN uint32_t rlx_at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }
RLX_FN void rlx_barrier(uint64_t* b, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(rlx_at(b)), "r"(count)); }
RLX_FN void rlx_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(rlx_at(b)), "r"(bytes) : "memory");
}
RLX_FN void rlx_arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(rlx_at(b)) : "memory"); }
RLX_FN void rlx_await(uint64_t* b, int phase) {
  asm volatile(
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @done bra out; bra again; out: }"
    ::"r"(rlx_at(b)), "r"(phase) : "memory");
}
/* Elements at the same place in block `rank` of the cluster. */
RLX_FN float4 rlx_from_block(const float4* at, int rank) {
  float4 out;
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
    : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(rlx_at(at)), "r"(rank));
  return out;
}
/* Two multiplying groups in turns: wait for one's own, and give the other its own. */
RLX_FN void rlx_group_wait(int group) { asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); }
RLX_FN void rlx_group_next(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 + group) : "memory"); }
/* A barrier of the cluster without order of what they write. */
RLX_FN void rlx_meet_cluster() { asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory"); }
template <int N> RLX_FN void rlx_keep() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> RLX_FN void rlx_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

RLX_FN void rlx_prefetch(const rlx_map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

/* A box of a tensor to shared memory; coordinates from the innermost axis out. */
RLX_FN void rlx_load_box(void* to, const rlx_map* map, uint64_t* b, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1) : "memory");
}
RLX_FN void rlx_load_box(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
RLX_FN void rlx_load_box(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
RLX_FN void rlx_load_box(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

/* The same, from memory that is read once: what the L2 cache drops first. */
RLX_FN uint64_t rlx_once() {
  uint64_t once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  return once;
}
RLX_FN void rlx_load_box(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "l"(policy) : "memory");
}

/* Channels of adjacent windows of an image: coordinates of the first one's first pixel, and how far behind it pixels are. */
RLX_FN void rlx_load_windows(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2, uint16_t o0) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2], {%6};"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2), "h"(o0) : "memory");
}
RLX_FN void rlx_load_windows(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2, int c3, uint16_t o0, uint16_t o1) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(o0), "h"(o1) : "memory");
}
RLX_FN void rlx_load_windows(void* to, const rlx_map* map, uint64_t* b, int c0, int c1, int c2, int c3, int c4, uint16_t o0, uint16_t o1, uint16_t o2) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
    ::"r"(rlx_at(to)), "l"(map), "r"(rlx_at(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(o0), "h"(o1), "h"(o2) : "memory");
}

/* The lower half of the matrix descriptor of a tile with 128-byte swizzle; the upper one is the same for all. `leading`: bytes
   between blocks of 64 elements along the contiguous axis of a tile that is not contiguous along the summed one. The same in all
   threads of a warp, as the compiler sees from the shuffle: only so it adds to it in uniform registers, where instructions take
   descriptors from. A move to them for each product takes longer than the product. */
#define RLX_TILES "0x40000040"  /* the upper half: 128-byte swizzle, 1024 bytes between blocks of 8 lines */
RLX_FN uint32_t rlx_tile(const void* at, int leading) {
  return __shfl_sync(0xffffffffu, (rlx_at(at) & 0x3ffff) >> 4 | leading >> 4 << 16, 0);  /* less the block's rank in the cluster */
}
RLX_FN void rlx_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RLX_FN void rlx_products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> RLX_FN void rlx_products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/* Where a row of 64 sums has a column: the first halves of all groups of 8 columns, then the second ones, in an order by which
   neither writes of pairs by 4 rows nor reads of halves by 8 lanes meet in a bank. */
RLX_FN int rlx_staged_at(int row, int column) {
  const int half = column / 4 % 2;
  return row * 64 + half * 32 + (column / 8 ^ row % 4 * 2 + half) * 4 + column % 4;
}
/* Where a column of 64 sums has a row: neither writes of 8 rows by 4 pairs of columns nor reads of many rows meet in a bank. */
RLX_FN int rlx_column_at(int row, int column) { return column * 64 + (row ^ column / 2 % 4 * 8); }
template <int N> RLX_FN void rlx_staged_column(float (&to)[N], const float* staged, int row, int column) {
  #pragma unroll
  for (int v = 0; v < N; v += 4)
    if constexpr (N >= 4) *(float4*)(to + v) = *(const float4*)(staged + rlx_column_at(row + v, column));
    else for (int e = 0; e < N; e++) to[e] = staged[rlx_column_at(row + e, column)];
}
template <int N> RLX_FN void rlx_staged(float (&to)[N], const float* staged, int row, int column) {
  #pragma unroll
  for (int v = 0; v < N; v += 4)
    if constexpr (N >= 4) *(float4*)(to + v) = *(const float4*)(staged + rlx_staged_at(row, column + v));
    else for (int e = 0; e < N; e++) to[e] = staged[rlx_staged_at(row, column + e)];
}

/* Sums over EACH adjacent lanes of N numbers, a power of two of them, at most EACH: this lane's is that of number
   lane % EACH / (EACH / N). */
template <int EACH, int N> RLX_FN float rlx_sums_of_rounds(float (&of)[N]) {
  int count = N;
  #pragma unroll
  for (int by = EACH / 2; by; by /= 2) {
    if (count == 1) {
      of[0] += __shfl_xor_sync(0xffffffffu, of[0], by);
      continue;
    }
    count /= 2;
    #pragma unroll
    for (int n = 0; n < count; n++) {
      const float given = threadIdx.x & by ? of[n] : of[n + count], own = threadIdx.x & by ? of[n + count] : of[n];
      of[n] = own + __shfl_xor_sync(0xffffffffu, given, by);
    }
  }
  return of[0];
}

/* Boxes of results that leave by bulk copies, one lane of a warp's: wait until none of them is read any more. */
RLX_FN void rlx_stored() {
  if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();
}
template <bool F16> RLX_FN uint32_t rlx_rounded(float low, float high) {
  uint32_t out;
  if constexpr (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
RLX_FN void rlx_store_box(const rlx_map* map, const void* from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
    ::"l"(map), "r"(rlx_at(from)), "r"(c0), "r"(c1) : "memory");
}
RLX_FN void rlx_store_box(const rlx_map* map, const void* from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
    ::"l"(map), "r"(rlx_at(from)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
RLX_FN void rlx_store_box(const rlx_map* map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
    ::"l"(map), "r"(rlx_at(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
RLX_FN void rlx_store_box(const rlx_map* map, const void* from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
    ::"l"(map), "r"(rlx_at(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}


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
template <int N> RLX_FN void rlx_keep() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> RLX_FN void rlx_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

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

/* The matrix descriptor of a tile with 128-byte swizzle. `leading`: bytes between blocks of 64 elements along the contiguous axis
   of a tile that is not contiguous along the summed one. */
RLX_FN uint64_t rlx_tile(const void* at, int leading) {
  return (uint64_t)((rlx_at(at) & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
RLX_FN void rlx_products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RLX_FN void rlx_products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> RLX_FN void rlx_products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

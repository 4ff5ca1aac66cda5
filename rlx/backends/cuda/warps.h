
/* Tensor-core products of a warp (mma.sync) and asynchronous copies, from compute capability 8.0 on. */
RLX_FN uint32_t rlx_at(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* 16 bytes to shared memory, of which the first `bytes` are read and the others are zero. */
RLX_FN void rlx_fetch_16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(rlx_at(to)), "l"(from), "r"(bytes) : "memory");
}
RLX_FN void rlx_fetched() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> RLX_FN void rlx_await() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/* Four 8 x 8 matrices, each lane giving the address of one row. TURNED: transposed. */
template <bool TURNED> RLX_FN void rlx_matrices(uint32_t (&out)[4], const void* row) {
  if constexpr (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(rlx_at(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(rlx_at(row)) : "memory");
}
/* 16 rows and 16 steps of the left operand from (row, d) on. ALONG: the tile is [row][d], else [d][row]. */
template <bool ALONG, int PITCH> RLX_FN void rlx_left(uint32_t (&out)[4], const uint16_t* tile, int row, int d) {
  const int lane = threadIdx.x % 32;
  if constexpr (ALONG) rlx_matrices<false>(out, tile + (row + lane % 16) * PITCH + d + lane / 16 * 8);
  else rlx_matrices<true>(out, tile + (d + lane % 8 + lane / 16 * 8) * PITCH + row + lane / 8 % 2 * 8);
}
/* 16 columns and 16 steps of the right operand: two pairs of registers, of 8 columns each. ALONG: the tile is [column][d]. */
template <bool ALONG, int PITCH> RLX_FN void rlx_right(uint32_t (&out)[4], const uint16_t* tile, int column, int d) {
  const int lane = threadIdx.x % 32;
  if constexpr (ALONG) rlx_matrices<false>(out, tile + (column + lane % 8 + lane / 16 * 8) * PITCH + d + lane / 8 % 2 * 8);
  else rlx_matrices<true>(out, tile + (d + lane % 8 + lane / 8 % 2 * 8) * PITCH + column + lane / 16 * 8);
}
#define RLX_PRODUCT(name, T, r, shape) \
  RLX_FN void rlx_product_##name(T (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+" r(d[0]), "+" r(d[1]), "+" r(d[2]), "+" r(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
RLX_PRODUCT(f16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
RLX_PRODUCT(bf16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
RLX_PRODUCT(tf32, float, "f", "m16n8k8.row.col.f32.tf32.tf32.f32")
RLX_PRODUCT(u8_s8, int, "r", "m16n8k32.row.col.s32.u8.s8.s32")
RLX_PRODUCT(s8_s8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")
RLX_PRODUCT(u8_u8, int, "r", "m16n8k32.row.col.s32.u8.u8.s32")
#if __CUDA_ARCH__ >= 890
RLX_PRODUCT(e4m3_e4m3, float, "f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
RLX_PRODUCT(e4m3_e5m2, float, "f", "m16n8k32.row.col.f32.e4m3.e5m2.f32")
RLX_PRODUCT(e5m2_e4m3, float, "f", "m16n8k32.row.col.f32.e5m2.e4m3.f32")
RLX_PRODUCT(e5m2_e5m2, float, "f", "m16n8k32.row.col.f32.e5m2.e5m2.f32")
#endif

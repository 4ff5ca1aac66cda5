/* Sums that blocks tell each other through global memory. */
/* A sum for another block, with a mark. Words are zero between launches. */
RLX_FN void rlx_tell(uint64_t* word, float sum) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"((uint64_t)1 << 32 | __float_as_uint(sum)) : "memory");
}
/* result += the sums in COUNT words, which are `step` words apart, in their order. */
template <int COUNT> RLX_FN void rlx_hear(float& result, uint64_t* word, int step) {
  uint64_t got[COUNT];
  bool all;
  do {
    all = true;
    #pragma unroll
    for (int n = 0; n < COUNT; n++) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(got[n]) : "l"(word + n * step) : "memory");
    #pragma unroll
    for (int n = 0; n < COUNT; n++) all = all && got[n] >> 32;
  } while (!all);
  #pragma unroll
  for (int n = 0; n < COUNT; n++) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word + n * step), "l"((uint64_t)0) : "memory");
    result += __uint_as_float((uint32_t)got[n]);
  }
}

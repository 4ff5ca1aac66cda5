/* `count` adjacent rows of SIZE elements, and the same in shared memory, where there are PITCH elements from one to the next. */
template <int BYTES> RLX_FN void rlx_stage_bytes(void* to, const void* from) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
template <int THREADS, int SIZE, int PITCH, class E> RLX_FN void rlx_stage(E* to, const E* from, int count) {
  constexpr int BYTES = PITCH == SIZE ? 16 : sizeof(E) > 4 ? sizeof(E) : 4, EACH = BYTES / sizeof(E);
  const int whole = count * SIZE / EACH;
  #pragma unroll 4
  for (int n = threadIdx.x; n < whole; n += THREADS) {
    const int at = n * EACH, row = at / SIZE;
    E* const place = to + at + row * (PITCH - SIZE);
    if constexpr (BYTES == 8) *place = from[at];
    else rlx_stage_bytes<BYTES>(place, from + at);
  }
  for (int at = whole * EACH + threadIdx.x; at < count * SIZE; at += THREADS) to[at / SIZE * PITCH + at % SIZE] = from[at];
}
RLX_FN void rlx_staged() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}
template <int THREADS, int SIZE, int PITCH, class E> RLX_FN void rlx_unstage(const E* from, E* to, int count) {
  constexpr int BYTES = PITCH == SIZE ? 16 : sizeof(E) > 4 ? sizeof(E) : 4, EACH = BYTES / sizeof(E);
  typedef typename rlx_chunk<BYTES>::type chunk;
  const int whole = count * SIZE / EACH;
  #pragma unroll 4
  for (int n = threadIdx.x; n < whole; n += THREADS) {
    const int at = n * EACH, row = at / SIZE;
    *(chunk*)(to + at) = *(const chunk*)(from + at + row * (PITCH - SIZE));
  }
  for (int at = whole * EACH + threadIdx.x; at < count * SIZE; at += THREADS) to[at] = from[at / SIZE * PITCH + at % SIZE];
}

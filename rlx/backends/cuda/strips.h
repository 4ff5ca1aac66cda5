
/* Strips: blocks whose lanes have N adjacent columns each, ACROSS of them the columns of a strip, and the others the same ones of
   other rows. */
template <int N, class T, class F> struct rlx_each_column {
  F op;
  __device__ rlx_several<T, N> operator()(rlx_several<T, N> a, rlx_several<T, N> b) const {
    rlx_several<T, N> c;
    #pragma unroll
    for (int v = 0; v < N; v++) c.at[v] = op(a.at[v], b.at[v]);
    return c;
  }
};
/* The values of all rows of a strip, combined, for the columns of each lane. The lanes of a warp with the same columns share these
   out while they exchange halves of them; so each warp tells the others every column once. */
template <int ACROSS, class C, class T, int N, class F>
RLX_FN rlx_several<T, N> rlx_down_strip(C& blocks, int first, rlx_several<T, N> a, T none, F op) {
  constexpr int KEPT = N * ACROSS > 32 ? N * ACROSS / 32 : 1;
  const int lane = threadIdx.x % 32;
  int held = N, from = lane % ACROSS;
  #pragma unroll
  for (int by = 16; by >= ACROSS; by /= 2) {
    const bool halves = held > 1, upper = halves && (lane & by);
    if (halves) held /= 2;
    #pragma unroll
    for (int v = 0; v < N; v++) {
      if (v >= held) break;
      const T mine = upper ? a.at[(v + held) % N] : a.at[v], other = upper || !halves ? a.at[v] : a.at[(v + held) % N];
      a.at[v] = op(mine, rlx_from(other, 32, by));
    }
  }
  rlx_several<T, KEPT> own, nothing;
  #pragma unroll
  for (int v = 0; v < KEPT; v++) own.at[v] = a.at[v], nothing.at[v] = none;
  own = blocks.all(first, own, nothing, rlx_each_column<KEPT, T, F>{op});
  #pragma unroll
  for (int v = 0; v < N; v++) {
    int at = from;
    #pragma unroll
    for (int by = 16, half = N / 2; by >= ACROSS && half >= 1; by /= 2, half /= 2) at += v & half ? by : 0;
    a.at[v] = rlx_from_lane(own.at[v % KEPT], at);
  }
  return a;
}

/* rlx_copy of parts of lines of the cache. What is beside them comes to the second-level cache, too: another cluster reads it soon. */
template <int N> RLX_FN void rlx_copy_near(float* to, const float* from, bool inside) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  if constexpr (N == 16) asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside ? 16 : 0) : "memory");
  else asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(N), "r"(inside ? N : 0) : "memory");
}

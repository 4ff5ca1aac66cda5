
/* Sums of the places from `first` on, ROWS of them at most, and of COLUMNS points, by T threads in shared memory: begin(i), then add(pick,
   sum) for each of `count` picks that place(pick) puts there, in order, then end(i, sum). The threads of a column share its places. */
template <int T, int COLUMNS, int ROWS, class V, class B, class P, class A, class E>
RLX_FN void rlx_scatter(rlx_index first, rlx_index places, int count, bool own, B begin, P place, A add, E end) {
  extern __shared__ __align__(16) unsigned char rlx_shared[];
  V* const sums = (V*)rlx_shared + threadIdx.x % COLUMNS;
  constexpr int CHUNK = 1024, SHARE = T / COLUMNS;
  __shared__ int picks[CHUNK], rows[CHUNK], counts[T / 32], found;
  const int me = threadIdx.x / COLUMNS;
  if (own) {
    #pragma unroll 8
    for (int r = me; r < ROWS && first + r < places; r += SHARE) sums[r * COLUMNS] = begin(first + r);
  }
  for (int from = 0; from < count; from += CHUNK) {
    if (threadIdx.x == 0) found = 0;
    for (int n = from; n < count && n < from + CHUNK; n += T) {
      const int pick = n + threadIdx.x;
      const rlx_index row = pick < count ? place(pick) : -1;
      const bool here = row >= 0 && row < ROWS;
      const unsigned all = __ballot_sync(0xffffffffu, here);
      if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(all);
      __syncthreads();
      int at = found + __popc(all & ((1u << threadIdx.x % 32) - 1)), sum = found;
      for (int w = 0; w < T / 32; w++) {
        if (w < threadIdx.x / 32) at += counts[w];
        sum += counts[w];
      }
      if (here) picks[at] = pick, rows[at] = (int)row;
      __syncthreads();
      if (threadIdx.x == 0) found = sum;
    }
    __syncthreads();
    if (own) {
      #pragma unroll 4
      for (int m = 0; m < found; m++)
        if (rows[m] % SHARE == me) sums[rows[m] * COLUMNS] = add(picks[m], sums[rows[m] * COLUMNS]);
    }
    __syncthreads();
  }
  if (own) {
    #pragma unroll 8
    for (int r = me; r < ROWS && first + r < places; r += SHARE) end(first + r, sums[r * COLUMNS]);
  }
}

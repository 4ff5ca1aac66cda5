
/* Sums of the places from `first` to `end` of C adjacent lines, each with indices of its own, in shared memory: begin(place, sum), then
   op(sum, value) of added(pick, seen, value) for each of `count` picks that place(pick, seen) puts there, in order, where `seen` is
   look(pick), then finish(place, sum). Thread n has column n % C, as the functions do. Threads take T updates at a time. The first one of a cell claims its word of
   CLAIMS, which other cells may have, too; the warp that is first then adds those that lost, in order. */
template <int T, int C, int CLAIMS, class S, class B, class L, class P, class A, class O, class E>
RLX_FN void rlx_stream_picks(S* sums, int first, int end, int count, bool own, B begin, L look, P place, A added, O op, E finish) {
  __shared__ unsigned claims[CLAIMS]; /* of later rounds, numbers are less: none is ever cleared */
  __shared__ int lost[T], counts[T / 32]; /* cells of updates that lost */
  __shared__ S values[T];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cells = own ? (end - first) * C : 0, rounds = (count + T / C - 1) / (T / C);
  const auto pick_of = [&](int round) { return round * (T / C) + (int)threadIdx.x / C; };
  const auto seen_of = [&](int round) { return look(pick_of(round) < count ? pick_of(round) : 0); };
  const auto cell_of = [&](int round, decltype(look(0)) seen) {
    const rlx_index to = own && pick_of(round) < count ? place(pick_of(round), seen) : -1;
    return to >= first && to < end ? (int)(to - first) * C + (int)threadIdx.x % C : -1;
  };
  auto seen = seen_of(0); /* two rounds ahead of the sums, and updates one round ahead */
  for (int n = threadIdx.x; n < CLAIMS; n += T) claims[n] = ~0u;
  #pragma unroll 8
  for (int e = threadIdx.x; e < cells; e += T) {
    S held[1];
    begin(first + e / C, held);
    sums[e] = held[0];
  }
  int cell = cell_of(0, seen);
  S value[1] = {}, after[1] = {};
  if (cell >= 0) added(pick_of(0), seen, value);
  seen = seen_of(1);
  __syncthreads();
  #pragma unroll 1
  for (int round = 0; round < rounds; round++) {
    const int next = cell_of(round + 1, seen);
    if (next >= 0) added(pick_of(round + 1), seen, after);
    seen = seen_of(round + 2);
    const unsigned claim = (unsigned)(rounds - round) * T + threadIdx.x;
    if (cell >= 0) atomicMin(claims + cell % CLAIMS, claim);
    __syncthreads();
    const bool won = cell >= 0 && claims[cell % CLAIMS] == claim, loses = cell >= 0 && !won;
    if (won) sums[cell] = op(sums[cell], value[0]);
    if (__syncthreads_or(loses)) {
      const unsigned losers = __ballot_sync(0xffffffffu, loses);
      if (lane == 0) counts[warp] = __popc(losers);
      __syncthreads();
      int to = __popc(losers & ((1u << lane) - 1)), all = 0;
      #pragma unroll
      for (int w = 0; w < T / 32; w++) {
        if (w < warp) to += counts[w];
        all += counts[w];
      }
      if (loses) lost[to] = cell, values[to] = value[0];
      __syncthreads();
      for (int m = lane; warp == 0 && m - lane < all; m += 32) {
        const int where = m < all ? lost[m] : -1 - lane;
        unsigned same = __match_any_sync(0xffffffffu, where);
        if (m < all && !(same & ((1u << lane) - 1))) {
          S sum = sums[where];
          const S* const mine = values + m - lane;
          if (same == ~0u) { /* loaded ahead of the sums that wait for each other */
            #pragma unroll
            for (int n = 0; n < 32; n++) sum = op(sum, mine[n]);
          } else {
            for (; same; same &= same - 1) sum = op(sum, mine[__ffs(same) - 1]);
          }
          sums[where] = sum;
        }
        __syncwarp();
      }
      __syncthreads();
    }
    cell = next, value[0] = after[0];
  }
  #pragma unroll 8
  for (int e = threadIdx.x; e < cells; e += T) {
    const S held[1] = {sums[e]};
    finish(first + e / C, held);
  }
}

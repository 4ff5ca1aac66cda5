
/* A number of at most 4 bytes as a word, and back. */
template <class S> RLX_FN uint32_t rlx_as_word(S value) {
  uint32_t word = 0;
  memcpy(&word, &value, sizeof(S));
  return word;
}
template <class S> RLX_FN S rlx_of_word(uint32_t word) {
  S value;
  memcpy(&value, &word, sizeof(S));
  return value;
}

/* Combines places with the updates of picks that select them, in the order of the picks. Tiles of T * E picks are sorted by BINS runs of
   WIDTH places; then a block has the sums of a bin. It sorts the picks of the bin, T * MORE at a time, by runs of places that a warp has.
   word(id, look(id)): the place that pick `id` of `total` selects, or -1; added(id): its update; old(place), put(place, value). `scratch`:
   for all picks, with their updates if these have at most 4 bytes, and for where bins begin in tiles. `words`: as for rlx_in_parts. */
template <int T, int E, int MORE, int WIDTH, int BINS, int TILES, class S, class L, class W, class A, class O, class B, class P>
RLX_FN void rlx_in_bins(unsigned char* shared, unsigned char* scratch, unsigned* words, rlx_index places, rlx_index total, bool halted,
                        L look, W word, A added, O op, B old, P put) {
  constexpr int SIZE = T * E, NONE = RLX_DIGITS - 1, MOST = 2048; /* the second: the digit of picks of no place */
  constexpr bool CARRIED = sizeof(S) <= 4;
  static_assert(BINS <= NONE && SIZE < 1 << 16 && TILES <= MOST, "digits of bins, halves of words, steps of a search");
  uint2* const sorted = (uint2*)scratch;
  uint32_t* const starts = (uint32_t*)(sorted + (size_t)TILES * SIZE); /* of a bin in each tile: its first pick, and their number */
  const int me = threadIdx.x, lane = me % 32, warp = me / 32;
  rlx_in_parts(words, TILES, gridDim.x, [&](unsigned part) {
    auto& tile = *(rlx_tile<T, E, uint32_t>*)shared;
    decltype(look(0)) seen[E];
    uint32_t to[E];
    const auto pick = [&](int e) { return (rlx_index)part * SIZE + tile.place(e); };
    #pragma unroll
    for (int e = 0; e < E; e++) { /* all of them, before a check of the first divides the program */
      const rlx_index id = pick(e) < total ? pick(e) : 0;
      seen[e] = look(id);
      if constexpr (CARRIED) tile.below[tile.place(e)] = rlx_as_word<S>(added(id));
      else tile.below[tile.place(e)] = (uint32_t)id;
    }
    #pragma unroll
    for (int e = 0; e < E; e++) to[e] = pick(e) < total ? (uint32_t)word(pick(e), seen[e]) : ~0u;
    int count, lower;
    tile.sort(to, [&](int e) { return to[e] == ~0u ? NONE : (int)(to[e] / WIDTH); }, count, lower);
    if (me < BINS) starts[(size_t)me * TILES + part] = (uint32_t)lower << 16 | count;
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < E; e++) sorted[(size_t)part * SIZE + e * T + me] = make_uint2(tile.keys[e * T + me], tile.below[e * T + me]);
  });
  __shared__ int before[TILES], from[TILES]; /* of a bin, picks in the tiles before, and where that of number 0 would lie */
  constexpr int OWN = (WIDTH + T / 32 - 1) / (T / 32); /* places of a warp */
  S* const sums = (S*)shared;
  auto& tile = *(rlx_tile<T, MORE, uint32_t>*)(shared + (WIDTH * sizeof(S) + 15) / 16 * 16);
  for (int bin = blockIdx.x; bin < BINS; bin += gridDim.x) {
    const rlx_index low = (rlx_index)bin * WIDTH;
    const int cells = halted ? 0 : (int)(low + WIDTH < places ? WIDTH : places - low);
    int all = 0;
    #pragma unroll 8
    for (int e = me; e < cells; e += T) sums[e] = old(low + e);
    for (int first = 0; first < TILES; first += T) {
      const int n = first + me;
      const uint32_t start = n < TILES ? __ldcg(starts + (size_t)bin * TILES + n) : 0;
      int some;
      const int mine = all + rlx_chosen_before<T>(start & 0xffff, some);
      if (n < TILES) before[n] = mine, from[n] = n * SIZE + (int)(start >> 16) - mine;
      all += some;
    }
    __syncthreads();
    const auto find = [&](int pick) { /* in the last tile with no more picks before it */
      int n = 0;
      #pragma unroll
      for (int by = MOST / 2; by > 0; by /= 2)
        if (n + by < TILES && before[n + by] <= pick) n += by;
      return __ldcg(sorted + from[n] + pick);
    };
    #pragma unroll 1
    for (int done = 0; done < all && cells; done += T * MORE) {
      uint32_t to[MORE];
      #pragma unroll
      for (int e = 0; e < MORE; e++) {
        const int pick = done + tile.place(e);
        const uint2 found = find(pick < all ? pick : 0);
        to[e] = pick < all ? found.x - (uint32_t)low : ~0u;
        tile.below[tile.place(e)] = found.y;
      }
      int count, lower;
      tile.sort(to, [&](int e) { return to[e] == ~0u ? NONE : (int)(to[e] / OWN); }, count, lower);
      __syncthreads();
      uint32_t* const lanes = tile.counts[warp]; /* that have places of the same number modulo 256; zeros between steps */
      #pragma unroll
      for (int n = 0; n < RLX_DIGITS; n += 32) lanes[n + lane] = 0;
      __syncwarp();
      const int end = tile.first[warp + 1];
      #pragma unroll 1
      for (int n = tile.first[warp] + lane; n - lane < end; n += 32) {
        const bool has = n < end;
        const int cell = has ? (int)tile.keys[n] : -1, first_cell = rlx_from_lane(cell, 0);
        S value = {};
        if constexpr (CARRIED) value = rlx_of_word<S>(tile.below[has ? n : 0]);
        else if (has) value = added((rlx_index)tile.below[n]);
        if (__all_sync(0xffffffffu, has && cell == first_cell)) {
          S sum = sums[cell];
          #pragma unroll
          for (int other = 0; other < 32; other++) { /* loaded ahead of the sums that wait for each other */
            if constexpr (CARRIED) sum = op(sum, rlx_of_word<S>(tile.below[n - lane + other]));
            else sum = op(sum, rlx_from_lane(value, other));
          }
          __syncwarp();
          if (lane == 0) sums[cell] = sum;
          __syncwarp();
          continue;
        }
        uint32_t* const mine = lanes + cell % RLX_DIGITS;
        if (has) atomicOr(mine, 1u << lane);
        __syncwarp();
        const unsigned turn = has ? __popc(*mine & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (has) *mine = 0;
        const unsigned turns = __reduce_max_sync(0xffffffffu, turn);
        for (unsigned now = 0; now <= turns; now++) {
          if (has && turn == now) sums[cell] = op(sums[cell], value);
          __syncwarp();
        }
      }
      __syncthreads();
    }
    #pragma unroll 8
    for (int e = me; e < cells; e += T) put(low + e, sums[e]);
    __syncthreads();
  }
}

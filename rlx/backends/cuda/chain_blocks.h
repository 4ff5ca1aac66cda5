/* A product of a chain with quantised weights (chain_pieces.py), behind blocks.h in the namespace of a format. As rlx_chain_product, but
   a group is a panel of 32 columns, or one of each product, and the row is three digits of integers (blocks.h): a warp makes those of its
   128 elements of each part of the row, which are multiples of one power of two. A block of weights has INNER turns, BLOCK bytes.
   Blocks that share a panel tell its owner their sums: `shared` [panel][share - 1][product][32 columns]. */
template <
  int N, int K, int SLOTS, bool BOTH, bool NORM, class X, int SHARES, int INNER, int BLOCK, class H, class R, class F, class M,
  class A, class E>
RLX_FN void rlx_chain_blocks(
  rlx_chain& own, const H& hear, const R& ready, const F& fetch, const M& make, const A& ahead, const E& end, uint32_t* shared, uint32_t mark
) {
  constexpr int PARTS = (K + 1023) / 1024, AHEAD = PARTS > 4 ? 2 : PARTS, LAST = K - (PARTS - 1) * 1024, HALVES = BOTH ? 2 : 1;
  constexpr int PITCH = PARTS * 1024 + 32, UNITS = 4 * RLX_GROUPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const rlx_chain_panels<N / 32, PARTS, SHARES> mine;
  const int first = mine.first;
  if (first == mine.WHOLE) return;
  if (threadIdx.x < 32) ahead(mine.panel(first) * 32 + threadIdx.x);
  uint32_t* const told = shared + mine.rest * (SHARES - 1) * HALVES * 32 + threadIdx.x; /* of the first 32 threads */
  unsigned char* const zeros = own.x + 3 * PITCH + warp * 128;
  float *const totals = (float*)(own.x + 3 * PITCH + 8 * 128) + warp * UNITS, *const powers = totals - warp * UNITS + PARTS * 8 * UNITS + warp;
  ((uint32_t*)zeros)[lane] = 0;
  const bool one = g / 4 == t / 2 && g % 4 < 3; /* the lane's weights and its column are of one unit */
  const unsigned char* const digits = one ? own.x + g % 4 * PITCH + t / 2 * (32 / RLX_GROUPS) + t % 2 * 8 + warp * 128 : zeros;
  const int moves = one ? ~0 : 0;
  float kept[2] = {}; /* own sums of a shared column, by the first 32 threads */
  float* const squares = own.squares + own.turn * 8;
  own.turn ^= 1;
  const auto multiplied = [&](int part) { return LAST == 1024 || part < PARTS - 1 || warp * 128 < LAST; };
  const int whole = mine.WHOLE * gridDim.y; /* 1: one loop for all products is faster than code for those that it runs for once */
  #pragma unroll 1
  for (int n = first; n < whole; n++) {
    float* const sums = own.sums + own.half * RLX_CHAIN_SUMS * 8;
    #pragma unroll 1
    for (int half = 0; half < HALVES; half++) {
      const int low = mine.low(n), high = mine.high(n);
      rlx_digit_sums all;
      const auto pieces = [&](int from, int to) {
        #pragma unroll 1
        for (int part = from < low ? low : from; part < (to < high ? to : high); part++) {
          rlx_ring_await(own.filled + own.place, own.phase);
          if (multiplied(part)) {
            const unsigned char* const piece = own.ring + own.place * RLX_PIECE;
            const unsigned char *const block = piece + warp * 4 / INNER * BLOCK, *const at = rlx_turn_at(piece, warp * 4);
            rlx_add_turns<2, 4>(all, block, at, lane, digits + (part * 1024 & moves), totals + part * 8 * UNITS, powers[part * 8]);
          }
          rlx_ring_leave(own.used + own.place, lane);
          if (++own.place == SLOTS) own.place = 0, own.phase ^= 1;
        }
      };
      if (n == first && half == 0) {
        const auto take = [&](int part, int d, const float (&out)[4]) {
          const float power = rlx_digits<4>(own.x + d, PITCH, totals + part * 8 * UNITS + lane * RLX_GROUPS / 8, out, lane);
          if (lane == 0) powers[part * 8] = power;
        };
        const auto batch = [&](int from, int to) {
          __syncwarp();
          pieces(from, to);
        };
        const float square = rlx_chain_row<K, AHEAD, true, X>(hear, ready, fetch, make, take, [](int) {}, batch);
        if (NORM) rlx_chain_square(squares, square);
      } else pieces(0, PARTS);
      rlx_add_units<2>(sums + warp * RLX_CHAIN_SUMS + half * 32 + g * 4, all, lane);
    }
    rlx_sync<256>();
    const int column = threadIdx.x - (n - first) % 8 * 32; /* another warp ends each panel */
    if (column >= 0 && column < 32) {
      float all = sums[column], also = BOTH ? sums[column + 32] : 0;
      #pragma unroll
      for (int w = 1; w < 8; w++) {
        all += sums[w * RLX_CHAIN_SUMS + column];
        if (BOTH) also += sums[w * RLX_CHAIN_SUMS + column + 32];
      }
      if (SHARES == 1 || n >= 0) end(mine.panel(n) * 32 + column, all, also, squares);
      else if (mine.share == 0) kept[0] = all, kept[1] = also;
      else
        for (int half = 0; half < HALVES; half++)
          rlx_tell_word(told + ((mine.share - 1) * HALVES + half) * 32, ::rlx_word(half ? also : all, mark));
    }
    own.half ^= 1;
  }
  if (SHARES > 1 && first < 0 && mine.share == 0 && threadIdx.x < 32) {
    #pragma unroll
    for (int n = 0; n < (SHARES - 1) * HALVES; n++) {
      uint32_t word = ::rlx_hear_word(told + n * 32);
      while (!::rlx_marked(word, mark)) word = ::rlx_hear_word(told + n * 32);
      kept[n % HALVES] += rlx_of_word(word);
    }
    end(mine.panel(-1) * 32 + threadIdx.x, kept[0], kept[1], squares);
  }
}

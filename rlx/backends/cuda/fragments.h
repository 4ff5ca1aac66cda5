/* Products of M rows, at most 8 for each of TILES, whose weights go from memory right into the fragments of tensor cores: lane 4 * g + t
   has what rows g and g + 8 of a left fragment take of them. A lane loads SIZE elements at a time. If columns of weights are contiguous
   (ALONG), it has 8 elements of WIDE columns, which are two products for two of them; else 4 elements of WIDE columns, which are one
   product for two of them: their elements are paired here. Lanes may have the elements of a sum in any order on which they agree. */
template <bool ALONG, int WIDE> struct rlx_fragment {
  static constexpr int LINES = ALONG ? WIDE : 4, EACH = ALONG ? 8 : WIDE; /* of weights in a lane, and elements of each */
  static constexpr int COLUMNS = 8 * WIDE, SUMS = WIDE / 2, DEPTH = ALONG ? 32 : 16, HALVES = ALONG ? 2 : 1; /* of the depth */
};
RLX_FN uint32_t rlx_two(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }

/* The columns of a block, which begin at `start` and are `step` apart: DOWN of its WARPS share the summed axis of `k` elements, AHEAD
   fragments of each in flight, BATCHES times. stage() puts the left operand to `rows`, PITCH elements a row, zeros behind k.
   from(d, column): where a weight is. put(row, column, sum) for each result. */
template <int M, int N, int PITCH, bool ALONG, int SIZE, int WIDE, int WARPS, int DOWN, int AHEAD, int BATCHES, bool F16,
          class G, class A, class P>
RLX_FN void rlx_fragments(const uint16_t* rows, int k, const G& stage, const A& from, const P& put, int start, int step) {
  using part = rlx_fragment<ALONG, WIDE>;
  constexpr int TILES = (M + 7) / 8, COLUMNS = part::COLUMNS, OWN = COLUMNS + 1, EACH = part::EACH;
  __shared__ float parts[WARPS][M][OWN];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, down = warp % DOWN, across = warp / DOWN;
  uint16_t held[AHEAD][part::LINES][EACH];
  const auto depth = [&](int batch, int u) { return ((batch * AHEAD + u) * DOWN + down) * part::DEPTH; };
  const auto fetch = [&](int u, int column, int batch) {
    #pragma unroll
    for (int line = 0; line < part::LINES; line++) {
      #pragma unroll
      for (int n = 0; n < EACH; n += SIZE) {
        const int at = ALONG ? column + line * 8 + g : column + n * 8 + g * SIZE, last = ALONG ? N - 1 : N - SIZE;
        const int d = depth(batch, u) + (ALONG ? n * 4 + t * SIZE : t * 4 + line);
        uint16_t got[SIZE] = {};
        if (d < k) rlx_stream<SIZE>(got, from(d, at < last ? at : last));
        #pragma unroll
        for (int v = 0; v < SIZE; v++) held[u][line][n + v] = got[v];
      }
    }
  };
  #pragma unroll
  for (int u = 0; u < AHEAD; u++) fetch(u, start + across * COLUMNS, 0);
  stage();
  __syncthreads();
  #pragma unroll 1
  for (int first = start; first < N; first += step) {
    float sum[part::SUMS][TILES][4] = {};
    #pragma unroll 1
    for (int batch = 0; batch < BATCHES; batch++) {
      const bool last = batch == BATCHES - 1;
      const int next = last ? first + step : first;
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        uint16_t raw[part::LINES][EACH];
        memcpy(raw, held[u], sizeof(raw));
        if (next < N) fetch(u, next + across * COLUMNS, last ? 0 : batch + 1);
        uint32_t x[TILES][ALONG ? 4 : 2];
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) { /* lanes of rows that are not there have the last one */
          const uint16_t* const row = rows + (tile * 8 + g < M ? tile * 8 + g : M - 1) * PITCH + depth(batch, u);
          uint16_t some[ALONG ? 8 : 4];
          if constexpr (ALONG) {
            #pragma unroll
            for (int n = 0; n < 8; n += SIZE) {
              uint16_t got[SIZE];
              rlx_fetch<SIZE>(got, row + n * 4 + t * SIZE);
              #pragma unroll
              for (int v = 0; v < SIZE; v++) some[n + v] = got[v];
            }
          } else {
            rlx_fetch<4>(some, row + t * 4);
          }
          #pragma unroll
          for (int n = 0; n < (ALONG ? 4 : 2); n++) x[tile][n] = rlx_two(some[2 * n], some[2 * n + 1]);
        }
        #pragma unroll
        for (int n = 0; n < part::SUMS * part::HALVES; n++) {
          const int two = n % part::SUMS * 2, half = n / part::SUMS;
          uint32_t a[4];
          #pragma unroll
          for (int e = 0; e < 4; e++) { /* the second half of them is of later elements, odd ones are of the other column */
            const int c = two + e % 2, d = half * 4 + e / 2 * 2;
            if constexpr (ALONG) a[e] = rlx_two(raw[c][d], raw[c][d + 1]);
            else a[e] = rlx_two(raw[d][c], raw[d + 1][c]);
          }
          #pragma unroll
          for (int tile = 0; tile < TILES; tile++) rlx_multiply<F16>(sum[two / 2][tile], a[0], a[1], a[2], a[3], {x[tile][half * 2], x[tile][half * 2 + 1]});
        }
      }
    }
    #pragma unroll
    for (int n = 0; n < part::SUMS; n++)
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = tile * 8 + t * 2 + e % 2, c = n * 2 + e / 2;
          const int column = ALONG ? c * 8 + g : (c / SIZE * 8 + g) * SIZE + c % SIZE;
          if (row < M) parts[warp][row][column] = sum[n][tile][e];
        }
    if (DOWN > 1) __syncthreads();
    else __syncwarp();
    #pragma unroll 1
    for (int e = down * 32 + lane; e < M * COLUMNS; e += DOWN * 32) {
      const int row = e / COLUMNS, column = e % COLUMNS, to = first + across * COLUMNS + column;
      float all = parts[across * DOWN][row][column];
      #pragma unroll
      for (int w = 1; w < DOWN; w++) all += parts[across * DOWN + w][row][column];
      if (to < N) put(row, to, all);
    }
    if (DOWN > 1) __syncthreads();
    else __syncwarp();
  }
}

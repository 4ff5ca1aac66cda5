/* Columns of a product for a few rows, whose elements the lanes of a warp share: COLUMNS of them at a time, AHEAD loads of SIZE
   elements of each in flight, of which each is replaced as soon as it is used, BATCHES times along the `k` elements. `rows`: the left
   operand, PITCH numbers a row. `from(d, column)`: where an element is. `put(row, column, sum)` for each result, in one lane. Four
   elements are widened at a time: 16 of several columns take too many registers. */
template <int M, int N, int PITCH, int SIZE, class E, int COLUMNS, int AHEAD, int BATCHES, class A, class W, class P>
RLX_FN void rlx_columns(const float* rows, int k, const A& from, const W& wide, const P& put, int start, int step, int lane) {
  constexpr int PART = SIZE < 4 ? SIZE : 4;
  E held[AHEAD][COLUMNS][SIZE];
  const auto fetch = [&](int u, int column, int batch) {
    const int d = ((batch * AHEAD + u) * 32 + lane) * SIZE;
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      if (PITCH > k) { /* zeros, since infinity times the zeros behind a row is NaN */
        for (int v = 0; v < SIZE; v++) held[u][n][v] = 0;
        if (d >= k) continue;
      }
      rlx_stream<SIZE>(held[u][n], from(d, column + n < N ? column + n : N - 1));
    }
  };
  #pragma unroll
  for (int u = 0; u < AHEAD; u++) fetch(u, start, 0);
  for (int column = start; column < N; column += step) {
    float sum[COLUMNS][M] = {};
    #pragma unroll 1
    for (int batch = 0; batch < BATCHES; batch++) {
      const bool last = batch == BATCHES - 1;
      const int next = last ? column + step : column;
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        E raw[COLUMNS][SIZE];
        for (int n = 0; n < COLUMNS; n++) memcpy(raw[n], held[u][n], sizeof(raw[n]));
        if (next < N) fetch(u, next, last ? 0 : batch + 1);
        #pragma unroll
        for (int part = 0; part < SIZE / PART; part++) {
          float w[COLUMNS][PART];
          #pragma unroll
          for (int n = 0; n < COLUMNS; n++) wide(w[n], *(const E(*)[PART])(raw[n] + part * PART));
          #pragma unroll
          for (int r = 0; r < M; r++) {
            float x[PART];
            rlx_fetch<PART>(x, rows + r * PITCH + ((batch * AHEAD + u) * 32 + lane) * PART + part * (PITCH * PART / SIZE));
            for (int n = 0; n < COLUMNS; n++)
              for (int v = 0; v < PART; v++) sum[n][r] = fmaf(x[v], w[n][v], sum[n][r]);
          }
        }
      }
    }
    float mine = 0;
    #pragma unroll
    for (int e = 0; e < COLUMNS * M; e++) {
      float all = sum[e / M][e % M];
      for (int by = 16; by > 0; by /= 2) all += rlx_from(all, 32, by);
      if (lane == e) mine = all;
    }
    if (lane < COLUMNS * M && column + lane / M < N) put(lane % M, column + lane / M, mine);
  }
}
/* The same where rows are contiguous: a lane has SIZE adjacent columns, and the warps share the elements of columns. */
template <int M, int N, int PITCH, int SIZE, class E, class A, class W, class P>
RLX_FN void rlx_rows(const float* rows, int k, const A& from, const W& wide, const P& put, int slot, int warp, int lane) {
  constexpr int WARPS = 8, WIDE = 32 * SIZE;
  const int column = (slot * 32 + lane) * SIZE;
  float sum[M][SIZE] = {};
  if (column < N) {
    #pragma unroll 8
    for (int d = warp; d < k; d += WARPS) {
      E held[SIZE];
      rlx_fetch<SIZE>(held, from(d, column));
      float w[SIZE];
      wide(w, held);
      #pragma unroll
      for (int r = 0; r < M; r++) {
        const float x = rows[r * PITCH + d];
        for (int v = 0; v < SIZE; v++) sum[r][v] = fmaf(x, w[v], sum[r][v]);
      }
    }
  }
  __shared__ float parts[WARPS][M][WIDE];
  for (int r = 0; r < M; r++)
    for (int v = 0; v < SIZE; v++) parts[warp][r][lane * SIZE + v] = sum[r][v];
  __syncthreads();
  for (int e = threadIdx.x; e < M * WIDE; e += WARPS * 32) {
    const int r = e / WIDE, at = e % WIDE;
    if (slot * WIDE + at >= N) continue;
    float all = 0;
    for (int w = 0; w < WARPS; w++) all += parts[w][r][at];
    put(r, slot * WIDE + at, all);
  }
}


/* A convolution by multiply-adds, from the image as it lies: of a window for each channel (EACH), whose V adjacent channels a thread has,
   or of O results that are sums over all CHANNELS, which TEAM threads share, V adjacent ones at a time. A thread has P adjacent places
   along axis A of the image: an element is loaded once for all places of the thread whose windows have it. The generated lines before
   this file give these sizes, and for both axes and a third, D, in front of them: SIZE_ and OUT_, elements of the image and of the
   result; TAPS_, of a window; STRIDE_, between windows; APART_, between elements of a window; LOW_, of the padding; X_ and W_: distances
   in memory. NEAR: channels of the weights are adjacent. */
constexpr int SPAN = (P - 1) * STRIDE_A + (TAPS_A - 1) * APART_A + 1, SUMS = EACH ? V : O;

template <class X, class W> RLX_FN void rlx_add_plane(float (&sums)[P][SUMS], const X* x, const W* w, int a, int b) {
  #pragma unroll ROWS_AT_ONCE
  for (int tb = 0; tb < TAPS_B; tb++) {
    const int ib = b * STRIDE_B - LOW_B + tb * APART_B;
    if (ib < 0 || ib >= SIZE_B) continue;
    float seen[SPAN][V];
    #pragma unroll
    for (int n = 0; n < SPAN; n++) {
      const int ia = a * STRIDE_A - LOW_A + n;
      X got[V] = {};
      if (ia >= 0 && ia < SIZE_A) rlx_fetch<V>(got, x + (rlx_index)ia * X_A + (rlx_index)ib * X_B);
      #pragma unroll
      for (int v = 0; v < V; v++) seen[n][v] = WIDE_X(got[v]);
    }
    #pragma unroll
    for (int ta = 0; ta < TAPS_A; ta++) {
      const W* const weights = w + ta * W_A + tb * W_B;
      if constexpr (EACH) {
        W got[V];
        rlx_fetch<V>(got, weights);
        #pragma unroll
        for (int p = 0; p < P; p++)
          #pragma unroll
          for (int v = 0; v < V; v++) sums[p][v] = fmaf(seen[p * STRIDE_A + ta * APART_A][v], WIDE_W(got[v]), sums[p][v]);
      } else {
        #pragma unroll
        for (int o = 0; o < O; o++) {
          W got[V];
          if constexpr (NEAR) rlx_fetch<V>(got, weights + o * W_O);
          #pragma unroll
          for (int v = 0; v < V; v++) {
            const float weight = WIDE_W(NEAR ? got[v] : weights[v * W_C + o * W_O]);
            #pragma unroll
            for (int p = 0; p < P; p++) sums[p][o] = fmaf(seen[p * STRIDE_A + ta * APART_A][v], weight, sums[p][o]);
          }
        }
      }
    }
  }
}

template <class X, class W> RLX_FN void rlx_add_windows(float (&sums)[P][SUMS], const X* x, const W* w, int d, int a, int b) {
  #pragma unroll 1
  for (int td = 0; td < TAPS_D; td++) {
    const int id = d * STRIDE_D - LOW_D + td * APART_D;
    if (id >= 0 && id < SIZE_D) rlx_add_plane(sums, x + (rlx_index)id * X_D, w + td * W_D, a, b);
  }
}

/* The sums of all channels, of which this thread has every TEAM-th group of V from number `me` on. */
template <class X, class W> RLX_FN void rlx_add_channels(float (&sums)[P][SUMS], const X* x, const W* w, int d, int a, int b, int me) {
  #pragma unroll AT_ONCE
  for (int c = me * V; c < CHANNELS; c += TEAM * V) rlx_add_windows(sums, x + (rlx_index)c * X_C, w + c * W_C, d, a, b);
  if constexpr (LAST) {
    #pragma unroll
    for (int n = 0; n < P * O; n++)
      #pragma unroll
      for (int by = TEAM / 2; by > 0; by /= 2) sums[n / O][n % O] += rlx_from(sums[n / O][n % O], 32, by);
  } else if constexpr (TEAM > 1) { /* a warp each */
    __shared__ float parts[THREADS / 32][P * O][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    #pragma unroll
    for (int n = 0; n < P * O; n++) parts[warp][n][lane] = sums[n / O][n % O];
    __syncthreads();
    if (me > 0) return;
    for (int other = 1; other < TEAM; other++)
      #pragma unroll
      for (int n = 0; n < P * O; n++) sums[n / O][n % O] += parts[warp + other][n][lane];
  }
}

/* put(n, d, a, b, c, values) for each place of the thread. A thread without one computes the last, and does not store. */
template <class X, class W, class B, class F> RLX_FN void rlx_convolution(const X* x, const W* w, const B* bias, F put) {
  constexpr int GROUPS = EACH ? O / V : 1, TIMES_A = (OUT_A + P - 1) / P;
  const int me = LAST ? threadIdx.x % TEAM : threadIdx.x / 32 % TEAM, lane = threadIdx.x / (32 * TEAM) * 32 + threadIdx.x % 32;
  rlx_uindex point = (rlx_uindex)blockIdx.x * (THREADS / TEAM) + (LAST ? threadIdx.x / TEAM : lane);
  const bool own = me == 0 && point < POINTS;
  if (point >= POINTS) point = POINTS - 1;
  const auto next = [&](int count) {
    const int at = point % count;
    point /= count;
    return at;
  };
  int c = LAST ? next(GROUPS) * V : 0, b = LAST ? 0 : next(OUT_B);
  const int a = next(TIMES_A) * P;
  if (LAST) b = next(OUT_B);
  const int d = next(OUT_D);
  if (!LAST) c = next(GROUPS) * V;
  x += (rlx_index)point * X_N;
  float sums[P][SUMS] = {};
  if constexpr (EACH) rlx_add_windows(sums, x + (rlx_index)(c / (O / CHANNELS)) * X_C, w + c * W_O, d, a, b);
  else rlx_add_channels(sums, x, w, d, a, b, me);
  if (!own) return;
  #pragma unroll
  for (int p = 0; p < P; p++) {
    if (a + p >= OUT_A) break;
    #pragma unroll
    for (int v = 0; v < SUMS && BIASED; v++) sums[p][v] += WIDE_BIAS(bias[(c + v) * BIAS]);
    put(point, d, a + p, b, c, sums[p]);
  }
}

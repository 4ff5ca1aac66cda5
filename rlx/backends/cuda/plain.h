
/* Attention by multiply-adds: f32, and heads whose sizes no tensor-core kernel takes. A thread has 8 rows and BLOCK / 16 keys of
   the scores, then the same rows and COLUMNS columns of the sums; the 16 threads of a row are half a warp. The keys of the next
   block arrive while the products with the values run, the values during the scores. */
constexpr int THREADS = TALL * 2, KEYS_EACH = BLOCK / 16;
constexpr int DEPTH = (SIZE + 3) / 4 * 4, PITCH = DEPTH + 4, P_PITCH = BLOCK + 4; /* floats: against bank conflicts */
constexpr int STEP = WIDTH <= 16 ? 1 : WIDTH <= 32 ? 2 : 4, TIMES = (WIDTH + 16 * STEP - 1) / (16 * STEP); /* adjacent columns of a thread */
constexpr int V_PITCH = 16 * STEP * TIMES;

RLX_FN void rlx_copy_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* Keys (or values) n0 to n0 + BLOCK as floats, `pitch` apart; 0 outside [low, end), and from `size` on. */
template <bool CHUNKS, class K, class F> RLX_FN void rlx_stage(float* to, int pitch, int columns, int size, const K* from, const F& at, int n0, int low, int end) {
  if constexpr (CHUNKS) {
    for (int e = threadIdx.x; e < BLOCK * (columns / 4); e += THREADS) {
      const int r = e / (columns / 4), d = e % (columns / 4) * 4, n = n0 + r;
      const bool there = n >= low && n < end && d < size;
      rlx_copy_16(to + r * pitch + d, from + (there ? at(n, d) : 0), there);
    }
  } else {
    for (int e = threadIdx.x; e < BLOCK * columns; e += THREADS) {
      const int r = e / columns, d = e % columns, n = n0 + r;
      to[r * pitch + d] = n >= low && n < end && d < size ? rlx_wide(from[at(n, d)]) : 0;
    }
  }
  asm volatile("cp.async.commit_group;");
}

template <class Q, class K, class M, class F> RLX_FN void rlx_attention_plain(
    const Q* q, const K* k, const K* v, const M* mask, const F& put, int b, int g, int row0, rlx_span span, float* shared) {
  float* const qs = shared;                 /* [TALL][PITCH] */
  float* const ks = qs + TALL * PITCH;      /* [BLOCK][PITCH] */
  float* const vs = ks + BLOCK * PITCH;     /* [BLOCK][V_PITCH] */
  float* const ps = vs + BLOCK * V_PITCH;   /* [TALL][P_PITCH] */
  const int across = threadIdx.x % 16, down = threadIdx.x / 16 * 8;
  const auto key_at = [&](int n, int d) { return K_AT(b, g, n, d); };
  const auto value_at = [&](int n, int d) { return V_AT(b, g, n, d); };
  const auto keys = [&](int n0) { rlx_stage<K_CHUNKS>(ks, PITCH, DEPTH, SIZE, k, key_at, n0, 0, span.end); };
  const auto values = [&](int n0) { rlx_stage<V_CHUNKS>(vs, V_PITCH, V_PITCH, WIDTH, v, value_at, n0, span.low, span.end); };
  int n0 = span.low / BLOCK * BLOCK;
  if (n0 < span.end) keys(n0);
  for (int e = threadIdx.x; e < TALL * DEPTH; e += THREADS) {
    const int r = e / DEPTH, d = e % DEPTH, row = row0 + r;
    qs[r * PITCH + d] = row < GROUP * QUERIES && d < SIZE ? rlx_wide(q[Q_AT(b, g * GROUP + row / QUERIES, row % QUERIES, d)]) : 0;
  }
  float top[8], total[8], sums[8][TIMES][STEP];
  #pragma unroll
  for (int r = 0; r < 8; r++) {
    top[r] = NEVER, total[r] = 0;
    #pragma unroll
    for (int c = 0; c < TIMES * STEP; c++) sums[r][c / STEP][c % STEP] = 0;
  }
  for (; n0 < span.end; n0 += BLOCK) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* the keys are there, and the values of the last block are done with */
    values(n0);
    float s[8][KEYS_EACH];
    #pragma unroll
    for (int r = 0; r < 8; r++)
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) s[r][n] = 0;
    #pragma unroll 2
    for (int d = 0; d < DEPTH; d += 4) {
      float4 y[KEYS_EACH];
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) y[n] = *(const float4*)(ks + (across + n * 16) * PITCH + d);
      #pragma unroll
      for (int r = 0; r < 8; r++) {
        const float4 x = *(const float4*)(qs + (down + r) * PITCH + d);
        #pragma unroll
        for (int n = 0; n < KEYS_EACH; n++) s[r][n] = fmaf(x.x, y[n].x, fmaf(x.y, y[n].y, fmaf(x.z, y[n].z, fmaf(x.w, y[n].w, s[r][n]))));
      }
    }
    const bool all = rlx_all_seen(span, n0, BLOCK);
    #pragma unroll
    for (int r = 0; r < 8; r++) {
      const int row = row0 + down + r;
      float best = top[r];
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) {
        s[r][n] = rlx_score_of(s[r][n]);
        if (!all) s[r][n] = rlx_masked(s[r][n], b, g, row, n0 + across + n * 16, span, mask);
        best = fmaxf(best, s[r][n]);
      }
      #pragma unroll
      for (int by = 8; by > 0; by /= 2) best = fmaxf(best, rlx_from(best, 16, by));
      const float base = best == NEVER ? 0 : best * FACTOR, keep = rlx_exp2(fmaf(top[r], FACTOR, -base));
      float sum = 0;
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) {
        const float p = rlx_exp2(fmaf(s[r][n], FACTOR, -base));
        sum += p, ps[(down + r) * P_PITCH + across + n * 16] = p;
      }
      total[r] = fmaf(total[r], keep, sum), top[r] = best;
      #pragma unroll
      for (int c = 0; c < TIMES * STEP; c++) sums[r][c / STEP][c % STEP] *= keep;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* the values are there, and the keys are done with */
    if (n0 + BLOCK < span.end) keys(n0 + BLOCK);
    #pragma unroll 2
    for (int n = 0; n < BLOCK; n += 4) {
      float p[8][4];
      #pragma unroll
      for (int r = 0; r < 8; r++) *(float4*)p[r] = *(const float4*)(ps + (down + r) * P_PITCH + n);
      #pragma unroll
      for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int c = 0; c < TIMES; c++) {
          float y[STEP];
          rlx_fetch<STEP>(y, vs + (n + i) * V_PITCH + c * 16 * STEP + across * STEP);
          #pragma unroll
          for (int r = 0; r < 8; r++)
            #pragma unroll
            for (int j = 0; j < STEP; j++) sums[r][c][j] = fmaf(p[r][i], y[j], sums[r][c][j]);
        }
    }
  }
  #pragma unroll
  for (int r = 0; r < 8; r++) {
    #pragma unroll
    for (int by = 8; by > 0; by /= 2) total[r] += rlx_from(total[r], 16, by);
    const int row = row0 + down + r;
    if (row >= GROUP * QUERIES) continue;
    const float share = total[r] == 0 ? 0 : 1 / total[r];
    #pragma unroll
    for (int c = 0; c < TIMES; c++)
      #pragma unroll
      for (int j = 0; j < STEP; j += VECTOR) {
        float out[VECTOR];
        for (int i = 0; i < VECTOR; i++) out[i] = total[r] == 0 ? 0 : sums[r][c][j + i] * share;
        const int d = c * 16 * STEP + across * STEP + j;
        if (d < WIDTH) put(b, g * GROUP + row / QUERIES, row % QUERIES, d, out);
      }
  }
}

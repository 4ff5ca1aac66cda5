
/* Attention by multiply-adds: f32, and heads whose sizes no tensor-core kernel takes. A thread has 8 rows, GAP apart, and
   BLOCK / ACROSS keys of the scores, then the same rows and STEP * TIMES columns of the sums. The keys of the next block arrive while
   the products with the values run, the values during the scores. ONE_MASK: all rows of a tile have the same. */
constexpr int THREADS = TALL / 8 * ACROSS, KEYS_EACH = BLOCK / ACROSS, GAP = 32 / ACROSS;
constexpr int DEPTH = (SIZE + 3) / 4 * 4, PITCH = DEPTH | 4, P_PITCH = BLOCK + ACROSS; /* floats: against bank conflicts */
constexpr int TIMES = (WIDTH + ACROSS * STEP - 1) / (ACROSS * STEP); /* STEP adjacent columns of a thread */
constexpr int V_PITCH = ACROSS * STEP * TIMES;
/* How far loops of products are unrolled: more would take the registers of another block, unless there is room for one only. */
constexpr int UNROLLED = (SIZE > 96 || WIDTH > 96) && THREADS > 128 ? 4 : 1;

RLX_FN float rlx_inverse(float a) { float out; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a)); return out; }
RLX_FN void rlx_copy_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* N queries, keys or values from n0 on as floats, PITCH_OF apart; 0 outside [low, end), and from column OWN on. LINEAR: rows are at
   constant distances. A thread copies one place of every STEP_OF-th row, as often as is known here, so that a row's address is a
   constant behind the first one's. */
template <bool CHUNKS, bool LINEAR, int N, int PITCH_OF, int COLUMNS, int OWN, class K, class F> RLX_FN void rlx_stage(
    float* to, const K* from, const F& at, int n0, int low, int end) {
  constexpr int VECTORS = COLUMNS / (CHUNKS ? 4 : 1), STEP_OF = THREADS < VECTORS ? 1 : THREADS / VECTORS;
  #pragma unroll
  for (int first = 0; first < VECTORS; first += THREADS) { /* once, unless THREADS < VECTORS */
    const int r0 = threadIdx.x / VECTORS, d = (first + threadIdx.x - r0 * VECTORS) * (CHUNKS ? 4 : 1);
    if ((THREADS % VECTORS && r0 >= STEP_OF) || d >= COLUMNS) continue;
    const K* const own = from + at(n0 + r0, d);
    const rlx_index row = at(1, 0) - at(0, 0);
    #pragma unroll
    for (int i = 0; i < N; i += STEP_OF) {
      const int r = r0 + i, n = n0 + r;
      if (N % STEP_OF && r >= N) break;
      const bool there = n >= low && n < end && (OWN == COLUMNS || d < OWN);
      const K* const place = LINEAR ? own + i * row : from + at(there ? n : low, d);
      if constexpr (CHUNKS) rlx_copy_16(to + r * PITCH_OF + d, place, there);
      else to[r * PITCH_OF + d] = there ? rlx_wide(*place) : 0;
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
  /* Lanes of a row are two apart: then a load by 16 bytes passes in two turns. */
  const int lane = threadIdx.x % 32, across = lane / 2 % ACROSS, down = threadIdx.x / 32 * (8 * GAP) + (lane / 2 / ACROSS * 2 + lane % 2);
  const auto query_at = [&](int r, int d) { return GROUP == 1 ? Q_AT(b, g, r, d) : Q_AT(b, g * GROUP + r / QUERIES, r % QUERIES, d); };
  const auto key_at = [&](int n, int d) { return K_AT(b, g, n, d); };
  const auto value_at = [&](int n, int d) { return V_AT(b, g, n, d); };
  const auto keys = [&](int n0) { rlx_stage<K_CHUNKS, true, BLOCK, PITCH, DEPTH, SIZE>(ks, k, key_at, n0, 0, span.end); };
  const auto values = [&](int n0) { rlx_stage<V_CHUNKS, true, BLOCK, V_PITCH, V_PITCH, WIDTH>(vs, v, value_at, n0, span.low, span.end); };
  int n0 = span.low / BLOCK * BLOCK;
  rlx_stage<Q_CHUNKS, GROUP == 1, TALL, PITCH, DEPTH, SIZE>(qs, q, query_at, row0, 0, GROUP * QUERIES);
  if (n0 < span.end) keys(n0);
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
    float s[8][KEYS_EACH], given[KEYS_EACH];
    if (ONE_MASK)
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) given[n] = rlx_mask_at(b, g, row0, n0 + across + n * ACROSS, span, mask);
    #pragma unroll
    for (int r = 0; r < 8; r++)
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) s[r][n] = 0;
    #pragma unroll UNROLLED
    for (int d = 0; d < DEPTH; d += 4) {
      float4 y[KEYS_EACH];
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) y[n] = *(const float4*)(ks + (across + n * ACROSS) * PITCH + d);
      #pragma unroll
      for (int r = 0; r < 8; r++) {
        const float4 x = *(const float4*)(qs + (down + r * GAP) * PITCH + d);
        #pragma unroll
        for (int n = 0; n < KEYS_EACH; n++) s[r][n] = fmaf(x.x, y[n].x, fmaf(x.y, y[n].y, fmaf(x.z, y[n].z, fmaf(x.w, y[n].w, s[r][n]))));
      }
    }
    const bool all = rlx_all_seen(span, n0, BLOCK);
    #pragma unroll
    for (int r = 0; r < 8; r++) {
      const int row = ORDERED || (MASKED && !ONE_MASK) ? row0 + down + r * GAP : row0; /* the mask does not depend on the row */
      if (!ONE_MASK && !all)
        #pragma unroll
        for (int n = 0; n < KEYS_EACH; n++) given[n] = rlx_mask_at(b, g, row, n0 + across + n * ACROSS, span, mask);
      float best = top[r];
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) {
        s[r][n] = rlx_score_of(s[r][n]);
        if (!all) s[r][n] = rlx_masked(s[r][n], given[n], row, n0 + across + n * ACROSS, span);
        best = fmaxf(best, s[r][n]);
      }
      #pragma unroll
      for (int by = ACROSS; by > 1; by /= 2) best = fmaxf(best, rlx_from(best, 32, by));
      const float base = best == NEVER ? 0 : best * FACTOR, keep = rlx_exp2(fmaf(top[r], FACTOR, -base));
      float sum = 0;
      #pragma unroll
      for (int n = 0; n < KEYS_EACH; n++) {
        const float p = rlx_exp2(fmaf(s[r][n], FACTOR, -base));
        sum += p, ps[(down + r * GAP) * P_PITCH + across + n * ACROSS] = p;
      }
      total[r] = fmaf(total[r], keep, sum), top[r] = best;
      #pragma unroll
      for (int c = 0; c < TIMES * STEP; c++) sums[r][c / STEP][c % STEP] *= keep;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* the values are there, and the keys are done with */
    if (n0 + BLOCK < span.end) keys(n0 + BLOCK);
    #pragma unroll (UNROLLED > 1 ? UNROLLED : 2)
    for (int n = 0; n < BLOCK; n += 4) {
      float p[8][4];
      #pragma unroll
      for (int r = 0; r < 8; r++) *(float4*)p[r] = *(const float4*)(ps + (down + r * GAP) * P_PITCH + n);
      #pragma unroll
      for (int i = 0; i < 4; i++)
        #pragma unroll
        for (int c = 0; c < TIMES; c++) {
          float y[STEP];
          rlx_fetch<STEP>(y, vs + (n + i) * V_PITCH + c * ACROSS * STEP + across * STEP);
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
    for (int by = ACROSS; by > 1; by /= 2) total[r] += rlx_from(total[r], 32, by);
    const int row = row0 + down + r * GAP;
    if (row >= GROUP * QUERIES) continue;
    const float share = total[r] == 0 ? 0 : rlx_inverse(total[r]);
    #pragma unroll
    for (int c = 0; c < TIMES; c++)
      #pragma unroll
      for (int j = 0; j < STEP; j += VECTOR) {
        float out[VECTOR];
        for (int i = 0; i < VECTOR; i++) out[i] = total[r] == 0 ? 0 : sums[r][c][j + i] * share;
        const int d = c * ACROSS * STEP + across * STEP + j;
        if (d < WIDTH) put(b, g * GROUP + row / QUERIES, row % QUERIES, d, out);
      }
  }
}


/* Attention on tensor cores of compute capability 8.0: blocks of keys arrive while the block before is worked on. */

RLX_FN void rlx_fetch_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
template <bool TURNED> RLX_FN void rlx_matrices(uint32_t (&out)[4], const void* row) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
}
RLX_FN void rlx_products_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NARROW "." NARROW ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
RLX_FN uint32_t rlx_pair(float low, float high) {
  uint32_t out;
  asm("cvt.rn." NARROW "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

/* 4 warps: TALL / 16 of them along the rows, the others along the keys of a block. */
template <class T, class M, class F> RLX_FN void rlx_attention_mma(
    const T* q, const T* k, const T* v, const M* mask, const F& put, int b, int g, int row0, rlx_span span, unsigned char* shared) {
  constexpr int ACROSS = 4 * 16 / TALL, BLOCK = (SIZE > 128 || WIDTH > 128) && ACROSS < 4 ? 32 : 64, OWN = BLOCK / ACROSS;
  constexpr int K_PITCH = SIZE + 8, V_PITCH = WIDTH + 8, STAGE = BLOCK * (K_PITCH + V_PITCH);
  T* const ring = (T*)shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / ACROSS, across = warp % ACROSS;
  const int rows[2] = {row0 + down * 16 + lane / 4, row0 + down * 16 + lane / 4 + 8};
  uint32_t query[SIZE / 16][4];
  #pragma unroll
  for (int d = 0; d < SIZE / 16; d++)
    #pragma unroll
    for (int n = 0; n < 4; n++) {
      const int row = rows[n % 2], at = d * 16 + n / 2 * 8 + lane % 4 * 2;
      const bool there = row < GROUP * QUERIES;
      const int h = g * GROUP + row / QUERIES, m = row % QUERIES;
      const uint32_t low = there ? q[Q_AT(b, h, m, at)].bits : 0, high = there ? q[Q_AT(b, h, m, at + 1)].bits : 0;
      query[d][n] = low | high << 16;
    }
  float top[2] = {NEVER, NEVER}, total[2] = {0, 0}, sums[WIDTH / 8][4];
  #pragma unroll
  for (int c = 0; c < WIDTH / 8; c++) sums[c][0] = sums[c][1] = sums[c][2] = sums[c][3] = 0;

  const auto fetch = [&](int n0, int stage) {
    T* const ks = ring + stage * STAGE;
    T* const vs = ks + BLOCK * K_PITCH;
    for (int e = threadIdx.x; e < BLOCK * (SIZE / 8); e += 128) {
      const int n = n0 + e / (SIZE / 8), d = e % (SIZE / 8) * 8;
      const bool there = n < span.end;
      rlx_fetch_16(ks + e / (SIZE / 8) * K_PITCH + d, k + K_AT(b, g, there ? n : 0, d), there);
    }
    for (int e = threadIdx.x; e < BLOCK * (WIDTH / 8); e += 128) {
      const int n = n0 + e / (WIDTH / 8), d = e % (WIDTH / 8) * 8;
      const bool there = n < span.end && n >= span.low;
      rlx_fetch_16(vs + e / (WIDTH / 8) * V_PITCH + d, v + V_AT(b, g, there ? n : 0, d), there);
    }
    asm volatile("cp.async.commit_group;");
  };
  int n0 = span.low / BLOCK * BLOCK, stage = 0;
  if (n0 < span.end) fetch(n0, 0);
  while (n0 < span.end) {
    const int after = n0 + BLOCK;
    if (after < span.end) {
      fetch(after, stage ^ 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    const T* const ks = ring + stage * STAGE + across * OWN * K_PITCH;
    const T* const vs = ring + stage * STAGE + BLOCK * K_PITCH + across * OWN * V_PITCH;
    float s[OWN / 8][4];
    #pragma unroll
    for (int n = 0; n < OWN / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    #pragma unroll
    for (int d = 0; d < SIZE / 16; d++)
      #pragma unroll
      for (int n = 0; n < OWN / 16; n++) {
        uint32_t keys[4];
        rlx_matrices<false>(keys, ks + (n * 16 + lane / 16 * 8 + lane % 8) * K_PITCH + d * 16 + lane / 8 % 2 * 8);
        rlx_products_16(s[2 * n], query[d], keys[0], keys[1]);
        rlx_products_16(s[2 * n + 1], query[d], keys[2], keys[3]);
      }
    float best[2] = {top[0], top[1]};
    const int first_key = n0 + across * OWN;
    const bool all = rlx_all_seen(span, first_key, OWN);
    #pragma unroll
    for (int n = 0; n < OWN / 8; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        s[n][i] = rlx_score_of(s[n][i]);
        if (!all) s[n][i] = rlx_masked(s[n][i], b, g, rows[i / 2], first_key + n * 8 + lane % 4 * 2 + i % 2, span, mask);
        best[i / 2] = fmaxf(best[i / 2], s[n][i]);
      }
    float keep[2], base[2], sum[2] = {0, 0};
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      best[i] = fmaxf(best[i], rlx_from(best[i], 32, 1));
      best[i] = fmaxf(best[i], rlx_from(best[i], 32, 2));
      base[i] = best[i] == NEVER ? 0 : best[i] * FACTOR;
      keep[i] = rlx_exp2(fmaf(top[i], FACTOR, -base[i])), top[i] = best[i];
    }
    uint32_t weights[OWN / 16][4];
    #pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
      #pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = rlx_exp2(fmaf(s[n][i], FACTOR, -base[i / 2])), sum[i / 2] += s[n][i];
      weights[n / 2][n % 2 * 2] = rlx_pair(s[n][0], s[n][1]);
      weights[n / 2][n % 2 * 2 + 1] = rlx_pair(s[n][2], s[n][3]);
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] = fmaf(total[i], keep[i], sum[i]);
    }
    #pragma unroll
    for (int c = 0; c < WIDTH / 8; c++) sums[c][0] *= keep[0], sums[c][1] *= keep[0], sums[c][2] *= keep[1], sums[c][3] *= keep[1];
    #pragma unroll
    for (int n = 0; n < OWN / 16; n++)
      #pragma unroll
      for (int c = 0; c < WIDTH / 16; c++) {
        uint32_t values[4];
        rlx_matrices<true>(values, vs + (n * 16 + lane / 8 % 2 * 8 + lane % 8) * V_PITCH + c * 16 + lane / 16 * 8);
        rlx_products_16(sums[2 * c], weights[n], values[0], values[1]);
        rlx_products_16(sums[2 * c + 1], weights[n], values[2], values[3]);
      }
    __syncthreads();
    n0 = after, stage ^= 1;
  }

  #pragma unroll
  for (int i = 0; i < 2; i++) {
    total[i] += rlx_from(total[i], 32, 1);
    total[i] += rlx_from(total[i], 32, 2);
  }
  if constexpr (ACROSS > 1) { /* the warps along the keys add up their sums, in their order */
    float* const tops = (float*)shared; /* [ACROSS][TALL] */
    float* const totals = tops + ACROSS * TALL;
    float* const kept = totals + ACROSS * TALL; /* [ACROSS][TALL][WIDTH] */
    const int mine = down * 16 + lane / 4;
    __syncthreads();
    for (int i = 0; i < 2; i++)
      if (lane % 4 == 0) tops[across * TALL + mine + i * 8] = top[i], totals[across * TALL + mine + i * 8] = total[i];
    #pragma unroll
    for (int c = 0; c < WIDTH / 8; c++)
      #pragma unroll
      for (int i = 0; i < 4; i++) kept[(across * TALL + mine + i / 2 * 8) * WIDTH + c * 8 + lane % 4 * 2 + i % 2] = sums[c][i];
    __syncthreads();
    for (int e = threadIdx.x * VECTOR; e < TALL * WIDTH; e += 128 * VECTOR) {
      const int r = e / WIDTH, row = row0 + r;
      if (row >= GROUP * QUERIES) break;
      float best = NEVER, all = 0, sum[VECTOR] = {};
      for (int w = 0; w < ACROSS; w++) best = fmaxf(best, tops[w * TALL + r]);
      const float base = best == NEVER ? 0 : best * FACTOR;
      for (int w = 0; w < ACROSS; w++) {
        const float keep = rlx_exp2(fmaf(tops[w * TALL + r], FACTOR, -base));
        all = fmaf(totals[w * TALL + r], keep, all);
        for (int i = 0; i < VECTOR; i++) sum[i] = fmaf(kept[(w * TALL + r) * WIDTH + e % WIDTH + i], keep, sum[i]);
      }
      for (int i = 0; i < VECTOR; i++) sum[i] = all == 0 ? 0 : sum[i] / all;
      put(b, g * GROUP + row / QUERIES, row % QUERIES, e % WIDTH, sum);
    }
    return;
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = rows[i];
    if (row >= GROUP * QUERIES) break;
    const float share = total[i] == 0 ? 0 : 1 / total[i];
    #pragma unroll
    for (int c = 0; c < WIDTH / 8; c++)
      #pragma unroll
      for (int j = 0; j < 2; j += VECTOR) {
        float out[VECTOR];
        for (int v = 0; v < VECTOR; v++) out[v] = total[i] == 0 ? 0 : sums[c][2 * i + j + v] * share;
        put(b, g * GROUP + row / QUERIES, row % QUERIES, c * 8 + lane % 4 * 2 + j, out);
      }
  }
}

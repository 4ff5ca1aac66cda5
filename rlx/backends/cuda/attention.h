
/* Attention without a matrix of scores in memory: blocks of keys, the softmax carried from block to block (Milakov and
   Gimelshein, 2018). The generated lines before this file give the sizes and strides as constants:

   BATCH, HEADS, SHARED (key heads), QUERIES, KEYS, SIZE (of a head), WIDTH (of a value), GROUP = HEADS / SHARED;
   Q_AT(b, h, m, d), K_AT, V_AT(b, g, n, d), O_AT(b, h, m, d), MASK_AT(b, h, m, n): offsets in elements;
   ORDERED (causal or a window), WINDOW (0: none), POSITIONED, MASKED (0 none, 1 bool, 2 added), SCALE, CAP;
   TALL: rows of a tile. A row is a query of one of the heads that share a key head: row r is query r % QUERIES. */
struct rlx_f16 { uint16_t bits; };
struct rlx_bf16 { uint16_t bits; };
RLX_FN float rlx_wide(float a) { return a; }
RLX_FN float rlx_wide(rlx_f16 a) { return rlx_wide_f16(a.bits); }
RLX_FN float rlx_wide(rlx_bf16 a) { return rlx_wide_bf16(a.bits); }
RLX_FN void rlx_set(float* to, float a) { *to = a; }
RLX_FN void rlx_set(rlx_f16* to, float a) { to->bits = rlx_near_f16(a); }
RLX_FN void rlx_set(rlx_bf16* to, float a) { to->bits = rlx_near_bf16(a); }
#define NEVER (-INFINITY)
#define LOG2E 1.4426950408889634f

struct rlx_span { int low, end, first; }; /* keys [low, end) are seen by some row of the tile; `first`: position of query 0 */

/* `given`: the position of the first query, where POSITIONED. */
RLX_FN rlx_span rlx_keys(int row0, int64_t given, rlx_status* status) {
  int first = KEYS - QUERIES;
  if (POSITIONED) {
    if ((given < 0 || given > KEYS - QUERIES) && status) rlx_fail(status, 1);
    first = given < 0 ? 0 : given > KEYS - QUERIES ? KEYS - QUERIES : (int)given;
  }
  const bool one_head = row0 / QUERIES == (row0 + TALL - 1) / QUERIES;
  const int low_query = one_head ? row0 % QUERIES : 0;
  int high_query = one_head ? row0 % QUERIES + TALL - 1 : QUERIES - 1;
  if (high_query >= QUERIES) high_query = QUERIES - 1;
  rlx_span out = {0, KEYS, first};
  if (POSITIONED) out.end = first + QUERIES;
  if (ORDERED) out.end = first + high_query + 1;
  if (WINDOW) out.low = first + low_query - WINDOW + 1 > 0 ? first + low_query - WINDOW + 1 : 0;
  return out;
}

/* The score of a query and a key, in units of log2, or NEVER where the query does not see the key. */
template <class M> RLX_FN float rlx_score(float dot, int b, int h, int m, int n, const rlx_span& span, const M* mask) {
  float s = dot * SCALE;
  if (CAP > 0) s = CAP * tanhf(s / CAP);
  const int at = span.first + m;
  bool seen = n < span.end;
  if (ORDERED) seen = seen && n <= at && (!WINDOW || n > at - WINDOW);
  #if MASKED == 1
  seen = seen && mask[MASK_AT(b, h, m, n < KEYS ? n : 0)];
#elif MASKED == 2
  s += rlx_wide(mask[MASK_AT(b, h, m, n < KEYS ? n : 0)]);
#endif
  return seen ? s * LOG2E : NEVER;
}

#ifdef FEW
/* -- few rows (a decoding step): bound by reading keys and values ----------------------------------------------------- */

/* 8 warps. LANES lanes have 8 elements each of one key and its value; AHEAD keys are loaded at once, to registers. The keys are
   dealt out to `active` of the PARTS blocks of a key head, STEP at a time. Blocks add up in the order of their parts: the last
   one to finish does it, and leaves the counter zero. */
constexpr int ROWS = GROUP * QUERIES, RECORD = ROWS * (WIDTH + 2); /* sums, greatest scores and totals of all rows */

/* The sum of element `e` over `count` records, relative to the greatest score `best`, and the total of the weights `all`. */
template <bool GLOBAL> RLX_FN float rlx_merged(const float* records, int count, int e, float& best, float& all) {
  const auto get = [](const float* at) { return GLOBAL ? __ldcg(at) : *at; };
  const float* const tops = records + ROWS * WIDTH + e / WIDTH;
  best = NEVER, all = 0;
  for (int w = 0; w < count; w++) best = rlx_max_f32(best, get(tops + w * RECORD));
  const float base = best == NEVER ? 0 : best;
  float sum = 0;
  #pragma unroll 8
  for (int w = 0; w < count; w++) {
    const float keep = exp2f(get(tops + w * RECORD) - base);
    all = fmaf(get(tops + w * RECORD + ROWS), keep, all), sum = fmaf(get(records + w * RECORD + e), keep, sum);
  }
  return sum;
}

template <class Q, class K, class M> RLX_FN void rlx_attention_few(
    const Q* q, const K* k, const K* v, const M* mask, Q* o, int b, int g, int part, rlx_span span, float* shared, float* scratch, unsigned* counters) {
  constexpr int WARPS = 8, THREADS = WARPS * 32, ACROSS = 32 / LANES, STEP = WARPS * ACROSS * AHEAD;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane % LANES * 8;
  const int units = (span.end - span.low + STEP - 1) / STEP, active = units < PARTS ? units : PARTS;
  if (part >= active) return;
  float* const qs = shared; /* [ROWS][LANES * 8] */
  float* const records = qs + ROWS * LANES * 8;
  for (int e = threadIdx.x; e < ROWS * LANES * 8; e += THREADS) {
    const int r = e / (LANES * 8), d = e % (LANES * 8);
    qs[e] = d < SIZE ? rlx_wide(q[Q_AT(b, g * GROUP + r / QUERIES, r % QUERIES, d)]) : 0;
  }
  __syncthreads();
  float top[ROWS], total[ROWS], sums[ROWS][8];
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    top[r] = NEVER, total[r] = 0;
    for (int c = 0; c < 8; c++) sums[r][c] = 0;
  }
  for (int unit = part; unit < units; unit += active) {
    const int first = span.low + unit * STEP + warp * ACROSS + lane / LANES;
    K keys[AHEAD][8], values[AHEAD][8];
    #pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int n = first + u * WARPS * ACROSS < span.end ? first + u * WARPS * ACROSS : span.end - 1;
      rlx_fetch<8>(keys[u], k + K_AT(b, g, n, SIZE == LANES * 8 || at < SIZE ? at : 0));
    }
    #pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int n = first + u * WARPS * ACROSS < span.end ? first + u * WARPS * ACROSS : span.end - 1;
      rlx_fetch<8>(values[u], v + V_AT(b, g, n, WIDTH == LANES * 8 || at < WIDTH ? at : 0));
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float x[8], s[AHEAD], best = top[r];
      *(float4*)x = *(const float4*)(qs + r * LANES * 8 + at), *(float4*)(x + 4) = *(const float4*)(qs + r * LANES * 8 + at + 4);
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        s[u] = 0;
        for (int c = 0; c < 8; c++) s[u] = fmaf(SIZE == LANES * 8 || at < SIZE ? rlx_wide(keys[u][c]) : 0, x[c], s[u]);
      }
      #pragma unroll
      for (int by = LANES / 2; by > 0; by /= 2)
        #pragma unroll
        for (int u = 0; u < AHEAD; u++) s[u] += rlx_from(s[u], 32, by);
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        s[u] = rlx_score(s[u], b, g * GROUP + r / QUERIES, r % QUERIES, first + u * WARPS * ACROSS, span, mask);
        best = rlx_max_f32(best, s[u]);
      }
      const float base = best == NEVER ? 0 : best, keep = exp2f(top[r] - base);
      top[r] = best, total[r] *= keep;
      for (int c = 0; c < 8; c++) sums[r][c] *= keep;
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        s[u] = exp2f(s[u] - base), total[r] += s[u];
        for (int c = 0; c < 8; c++) sums[r][c] = fmaf(s[u], rlx_wide(values[u][c]), sums[r][c]);
      }
    }
  }
  /* each group of LANES lanes leaves a record: a warp ACROSS of them */
  float* const own = records + (warp * ACROSS + lane / LANES) * RECORD;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < 8; c++)
      if (WIDTH == LANES * 8 || at < WIDTH) own[r * WIDTH + at + c] = sums[r][c];
    if (at == 0) own[ROWS * WIDTH + r] = top[r], own[ROWS * WIDTH + ROWS + r] = total[r];
  }
  __syncthreads();
  float* const mine = scratch + blockIdx.x * RECORD;
  for (int e = threadIdx.x; e < ROWS * WIDTH; e += THREADS) {
    const int r = e / WIDTH;
    float best, all;
    const float sum = rlx_merged<false>(records, WARPS * ACROSS, e, best, all);
    if (active == 1) {
      rlx_set(o + O_AT(b, g * GROUP + r / QUERIES, r % QUERIES, e % WIDTH), all == 0 ? 0 : sum / all);
    } else {
      mine[e] = sum;
      if (e % WIDTH == 0) mine[ROWS * WIDTH + r] = best, mine[ROWS * WIDTH + ROWS + r] = all;
    }
  }
  if (active == 1) return;
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counters + blockIdx.x / PARTS, 1) == active - 1;
    if (last) counters[blockIdx.x / PARTS] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int e = threadIdx.x; e < ROWS * WIDTH; e += THREADS) {
    float best, all;
    const float sum = rlx_merged<true>(scratch + blockIdx.x / PARTS * PARTS * RECORD, active, e, best, all);
    rlx_set(o + O_AT(b, g * GROUP + e / WIDTH / QUERIES, e / WIDTH % QUERIES, e % WIDTH), all == 0 ? 0 : sum / all);
  }
}
#elif !defined NARROW
/* -- by multiply-adds ------------------------------------------------------------------------------------------------- */

/* 4 warps of 4 rows each; a lane has a key of the block for the scores, and columns of the values for the sums. */
template <class Q, class K, class M> RLX_FN void rlx_attention_plain(
    const Q* q, const K* k, const K* v, const M* mask, Q* o, int b, int g, int row0, rlx_span span, float* shared) {
  constexpr int ROWS = TALL / 4, BLOCK = 32, PITCH = (SIZE + 3) / 4 * 4 + 4, COLUMNS = (WIDTH + 31) / 32;
  float* const qs = shared;                /* [TALL][PITCH] */
  float* const ks = qs + TALL * PITCH;     /* [BLOCK][PITCH] */
  float* const vs = ks + BLOCK * PITCH;    /* [BLOCK][COLUMNS * 32] */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < TALL * (PITCH - 4); e += 128) {
    const int r = e / (PITCH - 4), d = e % (PITCH - 4), row = row0 + r;
    qs[r * PITCH + d] = row < GROUP * QUERIES && d < SIZE ? rlx_wide(q[Q_AT(b, g * GROUP + row / QUERIES, row % QUERIES, d)]) : 0;
  }
  float top[ROWS], total[ROWS], sums[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++) {
    top[r] = NEVER, total[r] = 0;
    for (int c = 0; c < COLUMNS; c++) sums[r][c] = 0;
  }
  for (int n0 = span.low / BLOCK * BLOCK; n0 < span.end; n0 += BLOCK) {
    __syncthreads();
    for (int e = threadIdx.x; e < BLOCK * (PITCH - 4); e += 128) {
      const int n = n0 + e / (PITCH - 4), d = e % (PITCH - 4);
      ks[e / (PITCH - 4) * PITCH + d] = n < span.end && d < SIZE ? rlx_wide(k[K_AT(b, g, n, d)]) : 0;
    }
    for (int e = threadIdx.x; e < BLOCK * COLUMNS * 32; e += 128) {
      const int n = n0 + e / (COLUMNS * 32), d = e % (COLUMNS * 32);
      vs[e] = n < span.end && n >= span.low && d < WIDTH ? rlx_wide(v[V_AT(b, g, n, d)]) : 0;
    }
    __syncthreads();
    float s[ROWS];
    for (int r = 0; r < ROWS; r++) s[r] = 0;
    for (int d = 0; d < PITCH - 4; d += 4) {
      const float4 y = *(const float4*)(ks + lane * PITCH + d);
      #pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float4 x = *(const float4*)(qs + (warp * ROWS + r) * PITCH + d);
        s[r] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, s[r]))));
      }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = row0 + warp * ROWS + r;
      const bool there = row < GROUP * QUERIES;
      const float x = there ? rlx_score(s[r], b, g * GROUP + row / QUERIES, row % QUERIES, n0 + lane, span, mask) : NEVER;
      float best = x;
      for (int by = 16; by > 0; by /= 2) best = rlx_max_f32(best, rlx_from(best, 32, by));
      best = rlx_max_f32(best, top[r]);
      const float base = best == NEVER ? 0 : best, keep = exp2f(top[r] - base);
      s[r] = exp2f(x - base);
      float sum = s[r];
      for (int by = 16; by > 0; by /= 2) sum += rlx_from(sum, 32, by);
      total[r] = total[r] * keep + sum, top[r] = best;
      for (int c = 0; c < COLUMNS; c++) sums[r][c] *= keep;
    }
    #pragma unroll 4
    for (int n = 0; n < BLOCK; n++) {
      #pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float p = __shfl_sync(0xffffffffu, s[r], n);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = fmaf(p, vs[n * COLUMNS * 32 + c * 32 + lane], sums[r][c]);
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = row0 + warp * ROWS + r, h = g * GROUP + row / QUERIES, m = row % QUERIES;
    if (row >= GROUP * QUERIES) break;
    const float scale = total[r] == 0 ? 0 : 1 / total[r];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      if (c * 32 + lane < WIDTH) rlx_set(o + O_AT(b, h, m, c * 32 + lane), total[r] == 0 ? 0 : sums[r][c] * scale);
  }
}
#else
/* -- on tensor cores -------------------------------------------------------------------------------------------------- */

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
template <class T, class M> RLX_FN void rlx_attention_tensor(
    const T* q, const T* k, const T* v, const M* mask, T* o, int b, int g, int row0, rlx_span span, unsigned char* shared) {
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
    #pragma unroll
    for (int n = 0; n < OWN / 8; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = rows[i / 2], key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        const bool there = row < GROUP * QUERIES;
        s[n][i] = there ? rlx_score(s[n][i], b, g * GROUP + row / QUERIES, row % QUERIES, key, span, mask) : NEVER;
        best[i / 2] = rlx_max_f32(best[i / 2], s[n][i]);
      }
    float keep[2], base[2], sum[2] = {0, 0};
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      best[i] = rlx_max_f32(best[i], rlx_from(best[i], 32, 1));
      best[i] = rlx_max_f32(best[i], rlx_from(best[i], 32, 2));
      base[i] = best[i] == NEVER ? 0 : best[i];
      keep[i] = exp2f(top[i] - base[i]), top[i] = best[i];
    }
    uint32_t weights[OWN / 16][4];
    #pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
      #pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = exp2f(s[n][i] - base[i / 2]), sum[i / 2] += s[n][i];
      weights[n / 2][n % 2 * 2] = rlx_pair(s[n][0], s[n][1]);
      weights[n / 2][n % 2 * 2 + 1] = rlx_pair(s[n][2], s[n][3]);
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] += rlx_from(sum[i], 32, 1);
      sum[i] += rlx_from(sum[i], 32, 2);
      total[i] = total[i] * keep[i] + sum[i];
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
    for (int e = threadIdx.x; e < TALL * WIDTH; e += 128) {
      const int r = e / WIDTH, row = row0 + r, h = g * GROUP + row / QUERIES, m = row % QUERIES;
      if (row >= GROUP * QUERIES) break;
      float best = NEVER, all = 0, sum = 0;
      for (int w = 0; w < ACROSS; w++) best = rlx_max_f32(best, tops[w * TALL + r]);
      const float base = best == NEVER ? 0 : best;
      for (int w = 0; w < ACROSS; w++) {
        const float keep = exp2f(tops[w * TALL + r] - base);
        all += totals[w * TALL + r] * keep, sum += kept[(w * TALL + r) * WIDTH + e % WIDTH] * keep;
      }
      rlx_set(o + O_AT(b, h, m, e % WIDTH), all == 0 ? 0 : sum / all);
    }
    return;
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = rows[i], h = g * GROUP + row / QUERIES, m = row % QUERIES;
    if (row >= GROUP * QUERIES) break;
    const float scale = total[i] == 0 ? 0 : 1 / total[i];
    #pragma unroll
    for (int c = 0; c < WIDTH / 8; c++) {
      rlx_set(o + O_AT(b, h, m, c * 8 + lane % 4 * 2), total[i] == 0 ? 0 : sums[c][2 * i] * scale);
      rlx_set(o + O_AT(b, h, m, c * 8 + lane % 4 * 2 + 1), total[i] == 0 ? 0 : sums[c][2 * i + 1] * scale);
    }
  }
}
#endif

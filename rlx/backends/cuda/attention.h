
/* Attention without a matrix of scores in memory: blocks of keys, the softmax carried from block to block (Milakov and
   Gimelshein, 2018). The generated lines before this file give the sizes and strides as constants:

   BATCH, HEADS, SHARED (key heads), QUERIES, KEYS, SIZE (of a head), WIDTH (of a value), GROUP = HEADS / SHARED;
   Q_AT(b, h, m, d), K_AT, V_AT(b, g, n, d), O_AT(b, h, m, d), MASK_AT(b, h, m, n): offsets in elements;
   ORDERED (causal or a window), WINDOW (0: none), POSITIONED, MASKED (0 none, 1 bool, 2 added), MASK_OF_KEYS (of any query), SCALE, CAP;
   TALL: rows of a tile. A row is a query of one of the heads that share a key head: row r is query r % QUERIES. */

/* Keys [low, end) are seen by some row of the tile, whose queries are low_query to high_query; `first`: position of query 0. */
struct rlx_span { int low, end, first, low_query, high_query; };

/* `given`: the position of the first query, where POSITIONED. */
RLX_FN rlx_span rlx_keys(int row0, int64_t given, rlx_status* status) {
  int first = KEYS - QUERIES;
  if (POSITIONED) {
    if ((given < 0 || given > KEYS - QUERIES) && status) rlx_fail(status, 1);
    first = given < 0 ? 0 : given > KEYS - QUERIES ? KEYS - QUERIES : (int)given;
  }
  const bool one_head = row0 / QUERIES == (row0 + TALL - 1) / QUERIES;
  const int low_query = one_head ? row0 % QUERIES : 0;
  const int high_query = one_head ? row0 % QUERIES + TALL - 1 : QUERIES - 1;
  rlx_span out = {0, KEYS, first, low_query, high_query};
  if (POSITIONED) out.end = first + QUERIES;
  if (ORDERED) out.end = first + high_query + 1;
  if (WINDOW) out.low = first + low_query - WINDOW + 1 > 0 ? first + low_query - WINDOW + 1 : 0;
  return out;
}

/* Whether tiles with more keys come first: the blocks that begin last decide when all have ended. Not with tensor cores, which are
   faster than memory gives them the keys of all heads at once: there tiles of a head follow each other. */
#ifdef BLOCK
constexpr bool LONGEST_FIRST = ORDERED;
#else
constexpr bool LONGEST_FIRST = false;
#endif

/* The first row of a tile, whose number becomes that of its key head. */
RLX_FN int rlx_row_of(int& tile) {
  constexpr int DOWN = (GROUP * QUERIES + TALL - 1) / TALL, OF_QUERIES = QUERIES / TALL, ALL = BATCH * SHARED;
  const int n = LONGEST_FIRST ? tile / ALL : tile % DOWN;
  tile = LONGEST_FIRST ? tile % ALL : tile / DOWN;
  if (!LONGEST_FIRST) return n * TALL;
  if (QUERIES % TALL) return (DOWN - 1 - n) * TALL; /* of several heads */
  return (n % GROUP * OF_QUERIES + OF_QUERIES - 1 - n / GROUP) * TALL;
}

/* Whether all rows of the tile see all keys from n0 to n0 + count. */
RLX_FN bool rlx_all_seen(const rlx_span& span, int n0, int count) {
  if (MASKED || n0 + count > (ORDERED ? span.first + span.low_query + 1 : span.end)) return false;
  return !WINDOW || n0 > span.first + span.high_query - WINDOW;
}

/* The mask of row `row` and key n, or another element where there is none: without branches, all loads are in flight at once. */
template <class M> RLX_FN float rlx_mask_at(int b, int g, int row, int n, const rlx_span& span, const M* mask) {
#if MASKED
  const int r = row < GROUP * QUERIES ? row : 0, key = n < span.end ? n : 0;
  return rlx_wide(mask[MASK_AT(b, g * GROUP + r / QUERIES, r % QUERIES, key)]);
#else
  return 0;
#endif
}

/* The score of row `row` and key n with masks, `given` that of MASKED. */
RLX_FN float rlx_masked(float s, float given, int row, int n, const rlx_span& span) {
  const int at = span.first + row % QUERIES;
  bool seen = row < GROUP * QUERIES && n < span.end;
  if (ORDERED) seen = seen && n <= at && (!WINDOW || n > at - WINDOW);
  if (MASKED == 1) seen = seen && given != 0;
  if (MASKED == 2) s = fmaf(given, LOG2E, s);
  return seen ? s : NEVER;
}
template <class M> RLX_FN float rlx_masked(float s, int b, int g, int row, int n, const rlx_span& span, const M* mask) {
  return rlx_masked(s, rlx_mask_at(b, g, row, n, span, mask), row, n, span);
}

#ifdef FEW
/* -- few rows (a decoding step): bound by reading keys and values ----------------------------------------------------- */

/* 8 warps. LANES lanes have 8 elements each of one key and its value, AHEAD keys at a time. The keys are dealt out to `active` of
   the PARTS blocks of a key head, STEP at a time; a lane copies its own elements to shared memory, STAGES - 1 steps ahead. Blocks
   add up in the order of their parts: the last one to finish does it, and leaves the counter zero. AREA: bytes of the copies,
   and later of the records. */
constexpr int ROWS = GROUP * QUERIES, WARPS = 8, THREADS = WARPS * 32, ACROSS = 32 / LANES, STEP = WARPS * ACROSS * AHEAD;
constexpr int RECORD = (ROWS * (WIDTH + 2) + 3) / 4 * 4; /* sums, greatest scores and totals of all rows */
constexpr int MOST = WARPS * ACROSS > PARTS ? WARPS * ACROSS : PARTS; /* records that are added up */

/* Adds up `count` records. `weights` [MOST + 2][ROWS] is shared memory; behind the weights of the records are the greatest score and
   the total of each row. `each` gets 4 sums, relative to the greatest score, from element `e` on. */
template <bool GLOBAL, class F> RLX_FN void rlx_add_records(const float* records, int count, float* weights, F each) {
  const auto get = [](const float* at) { return GLOBAL ? __ldcg(at) : *at; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int r = warp; r < ROWS; r += WARPS) {
    const float* const tops = records + ROWS * WIDTH + r;
    float best = NEVER, all = 0;
    for (int p = lane; p < count; p += 32) best = rlx_max_f32(best, get(tops + p * RECORD));
    for (int by = 16; by > 0; by /= 2) best = rlx_max_f32(best, rlx_from(best, 32, by));
    const float base = best == NEVER ? 0 : best;
    for (int p = lane; p < count; p += 32) {
      const float keep = exp2f(get(tops + p * RECORD) - base);
      weights[p * ROWS + r] = keep, all = fmaf(get(tops + p * RECORD + ROWS), keep, all);
    }
    for (int by = 16; by > 0; by /= 2) all += rlx_from(all, 32, by);
    if (lane == 0) weights[MOST * ROWS + r] = best, weights[(MOST + 1) * ROWS + r] = all;
  }
  __syncthreads();
  for (int e = threadIdx.x * 4; e < ROWS * WIDTH; e += THREADS * 4) {
    float4 sum = {0, 0, 0, 0};
    #pragma unroll 8
    for (int p = 0; p < count; p++) {
      const float4* const at = (const float4*)(records + p * RECORD + e);
      const float4 x = GLOBAL ? __ldcg(at) : *at;
      const float keep = weights[p * ROWS + e / WIDTH];
      sum.x = fmaf(x.x, keep, sum.x), sum.y = fmaf(x.y, keep, sum.y), sum.z = fmaf(x.z, keep, sum.z), sum.w = fmaf(x.w, keep, sum.w);
    }
    each(e, sum);
  }
}

/* The sum of s[u] over LANES lanes, in a lane for its own u: the first LANES / AHEAD lanes have u = 0, and so on. */
RLX_FN float rlx_one_of(float (&s)[AHEAD]) {
  #pragma unroll
  for (int by = LANES / 2, many = AHEAD / 2; by > 0; by /= 2, many /= 2) {
    const bool upper = threadIdx.x & by;
    #pragma unroll
    for (int u = 0; u < many; u++) {
      const float give = upper ? s[u] : s[u + many], held = upper ? s[u + many] : s[u];
      s[u] = held + rlx_from(give, 32, by);
    }
    if (many == 0) s[0] += rlx_from(s[0], 32, by);
  }
  return s[0];
}

template <class Q, class K, class M, class F> RLX_FN void rlx_attention_few(
    const Q* q, const K* k, const K* v, const M* mask, const F& put, int b, int g, int part, rlx_span span, float* shared, float* scratch, unsigned* counters) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane % LANES * 8, own_u = lane % LANES / (LANES / AHEAD);
  const int units = (span.end - span.low + STEP - 1) / STEP, wanted = (units + EACH - 1) / EACH, active = wanted < PARTS ? wanted : PARTS;
  if (part >= active) return;
  float* const qs = shared; /* [ROWS][LANES * 8] */
  float* const records = qs + ROWS * LANES * 8;
  float* const weights = records + AREA / 4;
  float top[ROWS], total[ROWS], sums[ROWS][8];
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    top[r] = NEVER, total[r] = 0;
    for (int c = 0; c < 8; c++) sums[r][c] = 0;
  }
  constexpr int CHUNKS = sizeof(K) / 2; /* 16 bytes each of 8 elements */
  uint4* const copies = (uint4*)records + threadIdx.x;
  const int own_key = span.low + warp * ACROSS + lane / LANES;
  const auto fetch = [&](int unit, int stage) {
    #pragma unroll
    for (int u = 0; u < 2 * AHEAD; u++) {
      const int n = own_key + unit * STEP + u % AHEAD * WARPS * ACROSS, there = n < span.end ? n : span.end - 1;
      const K* const from = u < AHEAD ? k + K_AT(b, g, there, SIZE == LANES * 8 || at < SIZE ? at : 0)
                                      : v + V_AT(b, g, there, WIDTH == LANES * 8 || at < WIDTH ? at : 0);
      #pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        rlx_copy<16>((float*)(copies + ((stage * 2 * AHEAD + u) * CHUNKS + c) * THREADS), (const float*)from + 4 * c, true);
    }
  };
  const auto fetched = [&](int stage, int u, K (&to)[8]) {
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) ((uint4*)to)[c] = copies[((stage * 2 * AHEAD + u) * CHUNKS + c) * THREADS];
  };
  #pragma unroll
  for (int stage = 0; stage < STAGES - 1 || stage == 0; stage++) {
    if (part + stage * active < units) fetch(part + stage * active, stage);
    rlx_copies_end();
  }
  for (int e = threadIdx.x; e < ROWS * LANES * 8; e += THREADS) {
    const int r = e / (LANES * 8), d = e % (LANES * 8);
    qs[e] = d < SIZE ? rlx_wide(q[Q_AT(b, g * GROUP + r / QUERIES, r % QUERIES, d)]) : 0;
  }
  __syncthreads();
  for (int unit = part, stage = 0; unit < units; unit += active, stage = stage + 1 == STAGES ? 0 : stage + 1) {
    const int first = own_key + unit * STEP;
    if (STAGES > 1 ? unit + (STAGES - 1) * active < units : unit != part)
      fetch(unit + (STAGES - 1) * active, stage ? stage - 1 : STAGES - 1);
    rlx_copies_end();
    rlx_copies_wait<STAGES - 1>();
    __align__(16) K keys[AHEAD][8], values[AHEAD][8];
    #pragma unroll
    for (int u = 0; u < AHEAD; u++) fetched(stage, u, keys[u]), fetched(stage, AHEAD + u, values[u]);
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float x[8], s[AHEAD];
      *(float4*)x = *(const float4*)(qs + r * LANES * 8 + at), *(float4*)(x + 4) = *(const float4*)(qs + r * LANES * 8 + at + 4);
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        s[u] = 0;
        for (int c = 0; c < 8; c++) s[u] = fmaf(SIZE == LANES * 8 || at < SIZE ? rlx_wide(keys[u][c]) : 0, x[c], s[u]);
      }
      float score = rlx_masked(rlx_score_of(rlx_one_of(s)) * FACTOR, b, g, r, first + own_u * WARPS * ACROSS, span, mask), best = score;
      #pragma unroll
      for (int by = LANES / 2; by >= LANES / AHEAD; by /= 2) best = fmaxf(best, rlx_from(best, 32, by));
      best = fmaxf(best, top[r]);
      const float base = best == NEVER ? 0 : best, keep = rlx_exp2(top[r] - base), p = rlx_exp2(score - base);
      top[r] = best, total[r] = fmaf(total[r], keep, p);
      for (int c = 0; c < 8; c++) sums[r][c] *= keep;
      #pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        const float weight = __shfl_sync(~0u, p, u * (LANES / AHEAD), LANES);
        for (int c = 0; c < 8; c++) sums[r][c] = fmaf(weight, rlx_wide(values[u][c]), sums[r][c]);
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; r++)
    #pragma unroll
    for (int by = LANES / 2; by >= LANES / AHEAD; by /= 2) total[r] += rlx_from(total[r], 32, by);
  __syncthreads(); /* records take the place of copies */
  /* each group of LANES lanes leaves a record: a warp ACROSS of them */
  float* const own = records + (warp * ACROSS + lane / LANES) * RECORD;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < 8; c++)
      if (WIDTH == LANES * 8 || at < WIDTH) own[r * WIDTH + at + c] = sums[r][c];
    if (at == 0) own[ROWS * WIDTH + r] = top[r], own[ROWS * WIDTH + ROWS + r] = total[r];
  }
  __syncthreads();
  const auto result = [&](int e, float4 sum) {
    const float all = weights[(MOST + 1) * ROWS + e / WIDTH], scale = all == 0 ? 0 : 1 / all;
    const float out[4] = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
    for (int i = 0; i < 4; i++) put(b, g * GROUP + e / WIDTH / QUERIES, e / WIDTH % QUERIES, e % WIDTH + i, out + i);
  };
  if (active == 1) return rlx_add_records<false>(records, WARPS * ACROSS, weights, result);
  float* const mine = scratch + blockIdx.x * RECORD;
  rlx_add_records<false>(records, WARPS * ACROSS, weights, [&](int e, float4 sum) { *(float4*)(mine + e) = sum; });
  if (threadIdx.x < 2 * ROWS) mine[ROWS * WIDTH + threadIdx.x] = weights[MOST * ROWS + threadIdx.x];
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
  rlx_add_records<true>(scratch + blockIdx.x / PARTS * PARTS * RECORD, active, weights, result);
}
#endif

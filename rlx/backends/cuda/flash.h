
/* Attention by warp groups of compute capability 9.0. One warp group copies; each of the GROUPS others has 64 rows: queries of a head,
   or of PACK heads that share a key head. Where such tiles are few, the PARTS blocks of a cluster each have a part of the keys of one.

   Scores of a block of keys come from shared memory, stay in registers, and are the left operand of the product with the values.
   The softmax of a block runs while the tensor cores do the product of the block before it, and, where groups take turns
   (rlx_turn), the products of another group. The lines before this file give the constants of attention.h, and
   GROUPS, BLOCK (keys), STAGES (of the ring), PACK, PARTS, DRAWN, HEAD_BAND (packs of heads walked together), VECTOR (of a store),
   rlx_scores(s, q, k, add): s = q @ kT (+ s), 16 deep, and rlx_values(sums, p, v, add): sums = p @ v (+ sums), 16 keys. */
constexpr int TILE_ROWS = 64 * GROUPS, EACH = 64 / PACK, TILE_QUERIES = EACH * GROUPS; /* EACH: queries of a group */
constexpr int DOWN = (QUERIES + TILE_QUERIES - 1) / TILE_QUERIES, PACKS = BATCH * HEADS / PACK, TILES = PACKS * DOWN;
constexpr int SIZE_PARTS = (SIZE + 63) / 64, WIDTH_PARTS = (WIDTH + 63) / 64; /* of 64 elements: 128 bytes of a row */
constexpr int Q_PART = TILE_ROWS * 128, KV_PART = BLOCK * 128;
constexpr int Q_BYTES = SIZE_PARTS * Q_PART, K_BYTES = SIZE_PARTS * KV_PART, V_BYTES = WIDTH_PARTS * KV_PART;
constexpr int CHUNK = 32, PITCH = CHUNK + 4; /* columns staged for stores, floats between staged rows */
constexpr int JOINED = WIDTH + 4; /* floats of a row that the blocks of a cluster add up: its sums, the largest score, their total */
static_assert(PACK == 1 || !MASKED, "a mask is of one head");

RLX_FN void rlx_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
RLX_FN void rlx_pass(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory"); }
RLX_FN void rlx_group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 5) : "memory"); }
RLX_FN void rlx_groups_sync() { asm volatile("bar.sync 8, %0;" ::"n"(GROUPS * 128) : "memory"); }
RLX_FN uint32_t rlx_pair(float low, float high) {
  uint32_t out;
  asm("cvt.rn." NARROW "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
/* Registers that asynchronous products have written are not read before this. */
template <int N> RLX_FN void rlx_ready(float (&x)[N]) {
  #pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(x[n])::"memory");
}

/* A tile: TILE_QUERIES queries from row0 on of heads h to h + PACK of batch b; row r of a group is query r / PACK of head r % PACK.
   They see keys [low, end), of those that are the block's; `first`: position of query 0. */
struct rlx_queries { int b, h, row0, low, end, first; };

/* The tile of a block after tile n; -1: there are no more. Where tiles differ in their keys (DRAWN), a block draws it from a counter:
   each until it gets none, so that the last draw of all is known, and leaves the counter zero. Else blocks take turns. */
RLX_FN int rlx_next(int n, unsigned* drawn) {
  if (DRAWN) {
    n = atomicAdd(drawn, 1);
    if (n == TILES - 1) *drawn = 0;
  }
  n += gridDim.x / PARTS;
  return n < TILES ? n : -1;
}
/* Within a band of heads, whose keys stay in the L2 cache, tiles with more keys come first. */
RLX_FN rlx_queries rlx_tile_at(int n) {
  const int band = n / (HEAD_BAND * DOWN) * HEAD_BAND, rest = n - band * DOWN;
  const int heads = PACKS - band < HEAD_BAND ? PACKS - band : HEAD_BAND, down = rest / heads, head = (band + rest % heads) * PACK;
  return {head / HEADS, head % HEADS, (ORDERED ? DOWN - 1 - down : down) * TILE_QUERIES, 0, KEYS, KEYS - QUERIES};
}
template <class S> RLX_FN rlx_queries rlx_tile_of(int n, const S& start, rlx_status* status) {
  rlx_queries out = rlx_tile_at(n);
  if (POSITIONED) {
    const int64_t given = start(out.b);
    if ((given < 0 || given > KEYS - QUERIES) && status) rlx_fail(status, 1);
    out.first = given < 0 ? 0 : given > KEYS - QUERIES ? KEYS - QUERIES : (int)given;
    out.end = out.first + QUERIES;
  }
  const int high = out.row0 + TILE_QUERIES < QUERIES ? out.row0 + TILE_QUERIES : QUERIES;
  if (ORDERED) out.end = out.first + high;
  if (WINDOW && out.first + out.row0 - WINDOW + 1 > 0) out.low = (out.first + out.row0 - WINDOW + 1) / BLOCK * BLOCK;
  if (PARTS > 1) {
    const int count = (out.end - out.low + BLOCK - 1) / BLOCK, part = blockIdx.x % PARTS;
    const int next = out.low + count * (part + 1) / PARTS * BLOCK;
    out.low += count * part / PARTS * BLOCK, out.end = next < out.end ? next : out.end;
  }
  return out;
}

struct rlx_ring { unsigned char *q, *k, *v; int* tile; uint64_t *q_full, *q_empty, *k_full, *k_empty, *v_full, *v_empty; };

template <class S> RLX_FN void rlx_flash_copies(
    const rlx_ring& r, const rlx_map* map_q, const rlx_map* map_k, const rlx_map* map_v, const S& start, unsigned* drawn,
    rlx_status* status) {
  int turn = 0, round = 0;
  const auto no_queries = [&] { if (round > 0) rlx_await(r.q_empty, (round - 1) & 1); };
  for (int n = blockIdx.x / PARTS; n >= 0; n = rlx_next(n, drawn), round++) {
    rlx_queries t = rlx_tile_at(n);
    const auto keys = [&](int n0) {
      const int s = turn % STAGES;
      if (turn >= STAGES) rlx_await(r.k_empty + s, (turn / STAGES - 1) & 1);
      rlx_expect(r.k_full + s, K_BYTES);
      for (int p = 0; p < SIZE_PARTS; p++) rlx_load_box(r.k + s * K_BYTES + p * KV_PART, map_k, r.k_full + s, p * 64, n0, t.h / GROUP, t.b);
    };
    /* the first keys are seen wherever the queries are: no wait for the position */
    constexpr bool AHEAD = POSITIONED && !WINDOW && PARTS == 1;
    if (AHEAD) keys(0);
    t = rlx_tile_of(n, start, status);
    if (!AHEAD && t.low < t.end) keys(t.low);
    no_queries(); /* of the tile before, whose last sums are still to come */
    *r.tile = n;
    rlx_expect(r.q_full, SIZE_PARTS * TILE_QUERIES * PACK * 128);
    for (int p = 0; p < SIZE_PARTS; p++)
      for (int g = 0; g < GROUPS; g++)
        rlx_load_box(r.q + p * Q_PART + g * 64 * 128, map_q, r.q_full, p * 64, 0, t.row0 + g * EACH, t.h / PACK, t.b);
    for (int n0 = t.low; n0 < t.end; n0 += BLOCK, turn++) {
      const int s = turn % STAGES;
      if (n0 > t.low) keys(n0);
      if (turn >= STAGES) rlx_await(r.v_empty + s, (turn / STAGES - 1) & 1);
      rlx_expect(r.v_full + s, V_BYTES);
      for (int p = 0; p < WIDTH_PARTS; p++) rlx_load_box(r.v + s * V_BYTES + p * KV_PART, map_v, r.v_full + s, p * 64, n0, t.h / GROUP, t.b);
    }
  }
  if (PARTS > 1) return; /* blocks of a cluster have one tile */
  no_queries();
  *r.tile = -1;
  rlx_arrive(r.q_full);
}

#define KEYS_LOOKED_UP (MASKED == 1 && MASK_OF_KEYS)
/* Where all queries see the same keys of a block: bit 8 * (c % 4) + j of word c / 4 for this thread's column 8 * c + j. */
template <class M> RLX_FN void rlx_look(uint32_t (&seen)[BLOCK / 32], const rlx_queries& t, int n0, const M* mask) {
#if KEYS_LOOKED_UP
  #pragma unroll
  for (int w = 0; w < BLOCK / 32; w++) {
    const int n = n0 + w * 32 + threadIdx.x % 32;
    seen[w] = __ballot_sync(~0u, n < t.end && mask[MASK_AT(t.b, t.h, 0, n)]) >> threadIdx.x % 4 * 2;
  }
#endif
}

/* Scores become NEVER where a query does not see a key. A thread has columns 8 * c + lane % 4 * 2 + {0, 1} of rows `row` and row + 8
   of its group, whose first query is m0. */
template <class M> RLX_FN void rlx_hide(
    float (&s)[BLOCK / 2], const rlx_queries& t, int n0, int m0, int row, const uint32_t (&keys)[BLOCK / 32], const M* mask) {
  const int column = n0 + threadIdx.x % 4 * 2;
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int m = m0 + (row + i * 8) / PACK, at = t.first + m;
    const int end = (ORDERED && at + 1 < t.end ? at + 1 : t.end) - column, low = WINDOW ? at - WINDOW + 1 - column : 0;
    #pragma unroll
    for (int c = 0; c < BLOCK / 8; c++)
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[c * 4 + i * 2 + j];
#if KEYS_LOOKED_UP
        bool seen = keys[c / 4] >> (c % 4 * 8 + j) & 1;
#else
        bool seen = c * 8 + j < end && (!WINDOW || c * 8 + j >= low);
#endif
#if MASKED && !KEYS_LOOKED_UP
        const int query = m < QUERIES ? m : 0, n = column + c * 8 + j < KEYS ? column + c * 8 + j : 0;
#if MASKED == 1
        seen = seen && mask[MASK_AT(t.b, t.h, query, n)];
#else
        x = fmaf(rlx_wide(mask[MASK_AT(t.b, t.h, query, n)]), LOG2E, x);
#endif
#endif
        x = seen ? x : NEVER;
      }
  }
}

/* Scores to weights, with the largest score and the sum of each row so far; `keep`: the factor of earlier sums. */
template <class M> RLX_FN void rlx_weights(
    float (&s)[BLOCK / 2], float (&top)[2], float (&total)[2], float (&keep)[2], const rlx_queries& t, int n0, int m0, int row,
    const uint32_t (&keys)[BLOCK / 32], const M* mask) {
  #pragma unroll
  for (int n = 0; n < BLOCK / 2; n++) s[n] = rlx_score_of(s[n]);
  const int first = t.first + m0; /* the position of the group's first query */
  const int every = ORDERED ? first + 1 : t.end; /* keys that all rows of the group see, if they are not too early */
  if (MASKED || n0 + BLOCK > every || (WINDOW && n0 <= first + EACH - 1 - WINDOW)) rlx_hide(s, t, n0, m0, row, keys, mask);
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    float best[2] = {top[i], s[i * 2 + 1]}; /* two chains */
    #pragma unroll
    for (int c = 0; c < BLOCK / 8; c++) best[0] = fmaxf(best[0], s[c * 4 + i * 2]), best[1] = fmaxf(best[1], s[c * 4 + i * 2 + 1]);
    best[0] = fmaxf(best[0], best[1]);
    best[0] = fmaxf(best[0], rlx_from(best[0], 32, 1));
    best[0] = fmaxf(best[0], rlx_from(best[0], 32, 2));
    const float base = best[0] == NEVER ? 0 : best[0] * FACTOR;
    keep[i] = rlx_exp2(fmaf(top[i], FACTOR, -base)), top[i] = best[0];
    float sum[2] = {0, 0};
    #pragma unroll
    for (int c = 0; c < BLOCK / 8; c++)
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[c * 4 + i * 2 + j];
        x = rlx_exp2(fmaf(x, FACTOR, -base)), sum[j] += x;
      }
    total[i] = fmaf(total[i], keep[i], sum[0] + sum[1]);
  }
}

/* The blocks of a cluster have the keys of the same rows in parts. Each adds up the sums of some rows, in the order of the keys. */
template <class F> RLX_FN void rlx_join(
    float* own, const float (&sums)[WIDTH / 2], const float (&top)[2], const float (&total)[2], const rlx_queries& t, int group,
    const F& put, bool stopped) {
  const int row0 = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  constexpr int COLUMNS = VECTOR > 4 ? VECTOR : 4, ACROSS = WIDTH / COLUMNS; /* of a thread; threads of a row */
  rlx_groups_sync(); /* the ring is read no more */
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    float* const to = own + (row0 + i * 8) * JOINED;
    #pragma unroll
    for (int c = 0; c < WIDTH / 8; c++) *(float2*)(to + c * 8 + column) = make_float2(sums[c * 4 + i * 2], sums[c * 4 + i * 2 + 1]);
    if (column == 0) *(float4*)(to + WIDTH) = make_float4(top[i], total[i], 0, 0);
  }
  rlx_cluster_barrier();
  for (int e = threadIdx.x - 128; !stopped && e < (TILE_ROWS + PARTS - 1) / PARTS * ACROSS; e += GROUPS * 128) {
    const int row = e / ACROSS * PARTS + blockIdx.x % PARTS, d = e % ACROSS * COLUMNS;
    const int r = row % 64, m = t.row0 + row / 64 * EACH + r / PACK;
    if (row >= TILE_ROWS || r >= EACH * PACK || m >= QUERIES) continue;
    const float* const from = own + row * JOINED;
    float4 known[PARTS], sum[COLUMNS / 4] = {};
    float best = NEVER, all = 0;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) known[p] = rlx_from_block((const float4*)(from + WIDTH), p), best = fmaxf(best, known[p].x);
    const float base = best == NEVER ? 0 : best * FACTOR;
    #pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float keep = rlx_exp2(fmaf(known[p].x, FACTOR, -base));
      all = fmaf(known[p].y, keep, all);
      #pragma unroll
      for (int c = 0; c < COLUMNS / 4; c++) {
        const float4 x = rlx_from_block((const float4*)(from + d) + c, p);
        sum[c].x = fmaf(x.x, keep, sum[c].x), sum[c].y = fmaf(x.y, keep, sum[c].y);
        sum[c].z = fmaf(x.z, keep, sum[c].z), sum[c].w = fmaf(x.w, keep, sum[c].w);
      }
    }
    const float scale = all == 0 ? 0 : 1 / all;
    float out[COLUMNS];
    #pragma unroll
    for (int c = 0; c < COLUMNS / 4; c++)
      out[c * 4] = sum[c].x * scale, out[c * 4 + 1] = sum[c].y * scale, out[c * 4 + 2] = sum[c].z * scale,
               out[c * 4 + 3] = sum[c].w * scale;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c += VECTOR) put(t.b, t.h + r % PACK, m, d + c, out + c);
  }
  rlx_meet_cluster(); /* none ends while others read its memory */
}

/* Values of keys that no query of the tile sees become 0: a product of 0 and NaN is NaN. */
RLX_FN void rlx_clear(unsigned char* v, const rlx_queries& t, int n0, int group) {
  const int low = WINDOW ? t.first + t.row0 - WINDOW + 1 : 0;
  for (int e = threadIdx.x % 128; e < V_BYTES / 16; e += 128) {
    const int n = n0 + e / 8 % BLOCK;
    if (n < low || n >= t.end) *(uint4*)(v + e * 16) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  rlx_group_sync(group);
}

RLX_FN void rlx_all_scores(float (&s)[BLOCK / 2], const unsigned char* q, const unsigned char* k) {
  const uint32_t queries = rlx_tile(q, 0), keys = rlx_tile(k, 0);  /* in units of 16 bytes */
  rlx_products_begin();
  #pragma unroll
  for (int d = 0; d < (SIZE + 15) / 16; d++) /* behind SIZE the boxes have zeros */
    rlx_scores(s, queries + d / 4 * (Q_PART / 16) + d % 4 * 2, keys + d / 4 * (KV_PART / 16) + d % 4 * 2, d > 0);
  rlx_products_end();
}
RLX_FN void rlx_all_values(float (&sums)[WIDTH / 2], const uint32_t (&p)[BLOCK / 16][4], const unsigned char* v, bool add) {
  const uint32_t values = rlx_tile(v, KV_PART);
  rlx_products_begin();
  #pragma unroll
  for (int n = 0; n < BLOCK / 16; n++) rlx_values(sums, p[n], values + n * (2048 / 16), add || n > 0);
  rlx_products_end();
}
RLX_FN void rlx_narrow(uint32_t (&p)[BLOCK / 16][4], const float (&s)[BLOCK / 2]) {
  #pragma unroll
  for (int n = 0; n < BLOCK / 4; n++) p[n / 4][n % 4] = rlx_pair(s[n * 2], s[n * 2 + 1]);
}

template <class S, class M, class F> RLX_FN void rlx_flash_sums(
    const rlx_ring& r, float* staged, const S& start, const M* mask, const F& put, bool stopped) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128 - 1, 0);  /* in a uniform register */
  const unsigned char* const q = r.q + group * 64 * 128;
  const auto release = [&](uint64_t* b) { if (lane == 0) rlx_arrive(b); };
  if (GROUPS > 1 && group == GROUPS - 1) rlx_pass(0);
  int turn = 0;
  for (int round = 0;; round++) {
    rlx_await(r.q_full, round & 1);
    const int n = __reduce_min_sync(0xffffffffu, *r.tile); /* in a uniform register */
    if (n < 0) return;
    const rlx_queries t = rlx_tile_of(n, start, (rlx_status*)0);
    const int m0 = t.row0 + group * EACH, row = warp * 16 + lane / 4;
    float top[2] = {NEVER, NEVER}, total[2] = {0, 0}, keep[2], sums[WIDTH / 2], s[BLOCK / 2];
    uint32_t keys[BLOCK / 32];
    uint32_t p[BLOCK / 16][4];
    const auto values = [&](int n0, int before) { /* begin the product of p with the values of the block from n0 on */
      unsigned char* const v = r.v + before % STAGES * V_BYTES;
      rlx_await(r.v_full + before % STAGES, before / STAGES & 1);
      if (POSITIONED && (n0 + BLOCK > t.end || (WINDOW && n0 == t.low))) rlx_clear(v, t, n0, group);
      rlx_all_values(sums, p, v, n0 > t.low);
    };
    const auto scores = [&] {
      rlx_await(r.k_full + turn % STAGES, turn / STAGES & 1);
      rlx_all_scores(s, q, r.k + turn % STAGES * K_BYTES);
    };
    if (t.low >= t.end) {
      release(r.q_empty);
      #pragma unroll
      for (int c = 0; c < WIDTH / 2; c++) sums[c] = 0;
    } else {
      scores();
      rlx_look(keys, t, t.low, mask);
      rlx_products_wait<0>();
      rlx_ready(s);
      release(r.k_empty + turn % STAGES);
      rlx_weights(s, top, total, keep, t, t.low, m0, row, keys, mask);
      rlx_narrow(p, s);
      turn++;
      int n0 = t.low + BLOCK;
      for (; n0 < t.end; n0 += BLOCK, turn++) {
        if (GROUPS > 1) rlx_turn(group);
        scores();
        values(n0 - BLOCK, turn - 1);
        if (GROUPS > 1) rlx_pass((group + 1) % GROUPS);
        rlx_look(keys, t, n0, mask);
        rlx_products_wait<1>();
        rlx_ready(s);
        release(r.k_empty + turn % STAGES);
        rlx_weights(s, top, total, keep, t, n0, m0, row, keys, mask);
        rlx_products_wait<0>();
        rlx_ready(sums);
        release(r.v_empty + (turn - 1) % STAGES);
        rlx_narrow(p, s);
        #pragma unroll
        for (int c = 0; c < WIDTH / 2; c++) sums[c] *= keep[c / 2 % 2];
      }
      release(r.q_empty);
      values(n0 - BLOCK, turn - 1);
      rlx_products_wait<0>();
      rlx_ready(sums);
      release(r.v_empty + (turn - 1) % STAGES);
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] += rlx_from(total[i], 32, 1);
      total[i] += rlx_from(total[i], 32, 2);
      keep[i] = 1 / total[i];
    }
    if constexpr (PARTS > 1) { /* of one tile */
      rlx_join((float*)r.k, sums, top, total, t, group, put, stopped);
      return;
    }
    #pragma unroll
    for (int c = 0; c < WIDTH / 2; c++) sums[c] = total[c / 2 % 2] == 0 ? 0 : sums[c] * keep[c / 2 % 2];
    #pragma unroll
    for (int chunk = 0; chunk < WIDTH; chunk += CHUNK) { /* through shared memory, so that stores are vectors */
      #pragma unroll
      for (int c = 0; c < CHUNK && chunk + c < WIDTH; c += 8) {
        float* const to = staged + lane / 4 * PITCH + c + lane % 4 * 2;
        const float* const from = sums + (chunk + c) / 2;
        *(float2*)to = make_float2(from[0], from[1]), *(float2*)(to + 8 * PITCH) = make_float2(from[2], from[3]);
      }
      __syncwarp();
      #pragma unroll 1
      for (int e = lane * VECTOR; e < 16 * CHUNK; e += 32 * VECTOR) {
        const int at = warp * 16 + e / CHUNK, m = m0 + at / PACK, d = chunk + e % CHUNK;
        if (at < EACH * PACK && m < QUERIES && d < WIDTH) put(t.b, t.h + at % PACK, m, d, staged + e / CHUNK * PITCH + e % CHUNK);
      }
      __syncwarp();
    }
  }
}

template <class S, class M, class F> RLX_FN void rlx_flash(
    const rlx_map* map_q, const rlx_map* map_k, const rlx_map* map_v, unsigned char* shared, const S& start, const M* mask,
    const F& put, unsigned* drawn, rlx_status* status, const int* halt) {
  const bool stopped = rlx_halted(halt);
  if (PARTS == 1 && stopped) { /* no block of a cluster ends before the others have read its memory */
    if (DRAWN && threadIdx.x == 0) while (rlx_next(0, drawn) >= 0) {} /* others may have begun before the run failed */
    return;
  }
  rlx_ring r;
  r.q = shared, r.k = r.q + Q_BYTES, r.v = r.k + STAGES * K_BYTES;
  float* const staged = (float*)(r.v + STAGES * V_BYTES);
  r.q_full = (uint64_t*)(staged + 4 * GROUPS * 16 * PITCH), r.q_empty = r.q_full + 1;
  r.k_full = r.q_empty + 1, r.k_empty = r.k_full + STAGES, r.v_full = r.k_empty + STAGES, r.v_empty = r.v_full + STAGES;
  r.tile = (int*)(r.v_empty + STAGES);
  if (threadIdx.x == 0) {
    rlx_barrier(r.q_full, 1), rlx_barrier(r.q_empty, 4 * GROUPS);
    for (int s = 0; s < STAGES; s++) {
      rlx_barrier(r.k_full + s, 1), rlx_barrier(r.k_empty + s, 4 * GROUPS);
      rlx_barrier(r.v_full + s, 1), rlx_barrier(r.v_empty + s, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (KEPT > 0) rlx_keep<KEPT>();
    if (threadIdx.x == 0) rlx_flash_copies(r, map_q, map_k, map_v, start, drawn, status);
  } else {
    if constexpr (TAKEN > 0) rlx_take<TAKEN>();
    rlx_flash_sums(r, staged + (threadIdx.x / 32 - 4) * 16 * PITCH, start, mask, put, stopped);
  }
}

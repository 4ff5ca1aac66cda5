
/* -- few rows from narrow keys and values on tensor cores: a decoding step -------------------------------------------- */

/* WARPS warps, 16 keys of each at a time, in registers; those of the next 16 are on their way meanwhile. The PARTS blocks of a cluster
   share the keys of a key head; every warp that had some sends its sums to the block that adds up their columns. Of a long cache
   SHARES clusters have the keys: the last one to finish adds up what they left in `scratch`, in their order, and leaves the counter
   zero. Rows 0 to 7 of a tile are rounded, rows 8 to 15 the same rows' remainders: q and weights keep 16 bits. A lane (row = lane / 4,
   t = lane % 4) loads 16 bytes of a key at a time, which are what it multiplies: the summed axis in the order in which they are in
   memory. With values of more than 128 columns, SIDES warps have the same keys, and columns of their own. */
constexpr int ROWS = GROUP * QUERIES, THREADS = WARPS * 32, UNIT = 16, SLICE = WIDTH / PARTS, ENDS = ROWS * SLICE / 4;
constexpr int SIDES = WIDTH > 128 ? 2 : 1, SLOTS = WARPS / SIDES, RECORDS = PARTS * SLOTS;
constexpr int STEPS = SIZE / 16, WIDE_STEPS = WIDTH / SIDES / 64;

RLX_FN uint32_t rlx_pair(rlx_bf16, float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
RLX_FN uint32_t rlx_pair(rlx_f16, float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
/* Two numbers rounded, and the remainders. */
template <class K> RLX_FN void rlx_two(float a, float b, uint32_t& rounded, uint32_t& rest) {
  rounded = rlx_pair(K{}, a, b);
  const K low = {(uint16_t)rounded}, high = {(uint16_t)(rounded >> 16)};
  rest = rlx_pair(K{}, a - rlx_wide(low), b - rlx_wide(high));
}
RLX_FN void rlx_product(rlx_bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { rlx_product_bf16(d, a, b0, b1); }
RLX_FN void rlx_product(rlx_f16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { rlx_product_f16(d, a, b0, b1); }

RLX_FN void rlx_load_16(uint32_t (&to)[4], const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) : "memory");
}
/* To a place of that block's shared memory. Its barrier counts the bytes: a barrier of the cluster, with what it orders, would wait for
   all memory of the GPU. */
RLX_FN void rlx_send(uint32_t at, uint32_t sent, int block, float4 x) {
  if (PARTS > 1) asm volatile(
    "{ .reg .b32 there, then; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 then, %2, %1;"
    " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3,%4,%5,%6}, [then]; }"
    :: "r"(at), "r"(block), "r"(sent), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
  else asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" :: "r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

/* `early`: keys and values may be loaded before `ready`, but for the rows that it writes where FRONTS. */
template <class Q, class K, class M, class F, class S, class R> RLX_FN void rlx_attention_decode(
    const Q* q, const K* k, const K* v, const M* mask, const F& put, int b, int g, int part, const S& span_of, const R& ready,
    bool early, rlx_status* status, unsigned char* shared, float4* scratch, unsigned* counters) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  uint4* const queries = (uint4*)shared; /* [STEPS][32 lanes] */
  float* const records = (float*)(queries + STEPS * 32); /* [RECORDS][ROWS][SLICE]; then [RECORDS][ROWS] greatest scores, totals */
  float* const tops = records + RECORDS * ROWS * SLICE;
  __shared__ __align__(8) uint64_t barrier; /* of what blocks of the cluster send this one */
  const uint32_t sent = rlx_at(&barrier);
  if (PARTS > 1) {
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(sent) : "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); /* the others' memory is there from their start on */
  }
  const int record = warp % SLOTS * PARTS + part % PARTS, share = part / PARTS, column = warp / SLOTS * (WIDTH / SIDES);
  rlx_span span;
  int units, active, first, step; /* of the clusters, those that have keys; of the warp, its first unit and the way to the next */
  constexpr int AHEAD = SIDES > 1 || KEYS <= RECORDS * SHARES * UNIT ? 1 : 2; /* as registers allow, if a warp has several units */
  uint32_t held[AHEAD][STEPS / 2][2][4], values[WIDE_STEPS][4][4];
  const auto load_keys = [&](int unit, uint32_t (&keys)[STEPS / 2][2][4]) {
    if (unit >= units) return;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int n = span.low + unit * UNIT + row + 8 * h;
      const K* const from = k + K_AT(b, g, n < span.end ? n : span.end - 1, 8 * t);
      #pragma unroll
      for (int i = 0; i < STEPS / 2; i++) rlx_load_16(keys[i][h], from + 32 * i);
    }
  };
  const auto load_values = [&](int unit) {
    if (unit >= units) return;
    #pragma unroll
    for (int h = 0; h < 4; h++) {
      const int n = span.low + unit * UNIT + 2 * t + h % 2 + h / 2 * 8;
      const K* const from = v + V_AT(b, g, n < span.end ? n : span.end - 1, column + 8 * row);
      #pragma unroll
      for (int i = 0; i < WIDE_STEPS; i++) rlx_load_16(values[i][h], from + 64 * i);
    }
  };
  const auto find = [&]() {
    span = span_of(0);
    units = (span.end - span.low + UNIT - 1) / UNIT, active = (units + RECORDS - 1) / RECORDS;
    active = active < 1 ? 1 : active < SHARES ? active : SHARES;
    first = share < active ? record * active + share : units, step = RECORDS * active;
  };
  if (early) find(), load_keys(first, held[0]), load_values(first);
  const bool stopped = ready();
  if (!early) find();
  if (!early || (FRONTS && span.low + (first + 1) * UNIT > span.first)) load_keys(first, held[0]), load_values(first);
  span_of(status);
  for (int e = threadIdx.x; e < STEPS * 32; e += THREADS) { /* 4 elements of row e % 8 */
    const int r = e % 8, d = e / 8 * 4;
    float x[4];
    #pragma unroll
    for (int c = 0; c < 4; c++) x[c] = r < ROWS ? rlx_wide(q[Q_AT(b, g * GROUP + r / QUERIES, r % QUERIES, d + c)]) : 0;
    uint4 two;
    rlx_two<K>(x[0], x[1], two.x, two.y), rlx_two<K>(x[2], x[3], two.z, two.w);
    queries[(d / 32 * 2 + d / 4 % 2) * 32 + r * 4 + d / 8 % 4] = two;
  }
  __syncthreads();
  float top = NEVER, total = 0, sums[WIDE_STEPS * 8][4] = {};
  const auto add = [&](int unit, const uint32_t (&keys)[STEPS / 2][2][4]) {
    float s[2][2][4] = {};
    #pragma unroll
    for (int i = 0; i < STEPS / 2; i++) {
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 two = queries[(i * 2 + half) * 32 + lane];
        const uint32_t a[4] = {two.x, two.y, two.z, two.w};
        #pragma unroll
        for (int h = 0; h < 2; h++) rlx_product(K{}, s[h][half], a, keys[i][h][2 * half], keys[i][h][2 * half + 1]);
      }
    }
    if (AHEAD == 1) load_keys(unit + step, held[0]);
    float x[2][2], best = top;
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float(&own)[2][4] = s[e / 2];
      const float dot = own[0][e % 2] + own[1][e % 2] + (own[0][e % 2 + 2] + own[1][e % 2 + 2]);
      const int n = span.low + unit * UNIT + e / 2 * 8 + 2 * t + e % 2;
      x[e / 2][e % 2] = rlx_masked(rlx_score_of(dot) * FACTOR, b, g, row, n, span, mask);
      best = fmaxf(best, x[e / 2][e % 2]);
    }
    best = fmaxf(best, rlx_from(best, 32, 1)), best = fmaxf(best, rlx_from(best, 32, 2));
    const float base = best == NEVER ? 0 : best, keep = rlx_exp2(top - base);
    top = best, total *= keep;
    uint32_t a[4];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const float p0 = rlx_exp2(x[h][0] - base), p1 = rlx_exp2(x[h][1] - base);
      total += p0 + p1;
      rlx_two<K>(p0, p1, a[2 * h], a[2 * h + 1]);
    }
    if (unit != first)
      #pragma unroll
      for (int j = 0; j < WIDE_STEPS * 8; j++)
        #pragma unroll
        for (int c = 0; c < 4; c++) sums[j][c] *= keep;
    #pragma unroll
    for (int i = 0; i < WIDE_STEPS; i++) {
      const uint32_t(&rows)[4][4] = values[i];
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const int word = j / 2, halves = j % 2 ? 0x7632 : 0x5410;
        rlx_product(K{}, sums[i * 8 + j], a, __byte_perm(rows[0][word], rows[1][word], halves), __byte_perm(rows[2][word], rows[3][word], halves));
      }
    }
    load_values(unit + step);
  };
  for (int unit = first; unit < units; unit += AHEAD * step) {
    if (AHEAD > 1) load_keys(unit + step, held[AHEAD - 1]);
    add(unit, held[0]);
    if (AHEAD == 1 || unit + step >= units) continue;
    load_keys(unit + 2 * step, held[0]);
    add(unit + step, held[AHEAD - 1]);
  }
  total += rlx_from(total, 32, 1), total += rlx_from(total, 32, 2);
  if (PARTS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (SHARES > 1 && share >= active) return;
  const int of_share = (units - share + active - 1) / active, count = of_share < RECORDS ? of_share : RECORDS, own = lane % 8;
  if (PARTS > 1 && threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(sent), "r"(count * ROWS * (SLICE + 4) * 4) : "memory");
  if (first < units && row < ROWS) {
    #pragma unroll
    for (int e = 0; e < WIDE_STEPS * 4; e++) { /* 4 columns each */
      const int j = e / 4 * 8 + e % 2 * 4, c = e / 2 % 2, d = column + e / 4 * 64 + 16 * t + 8 * c + e % 2 * 4;
      const float4 sum = {sums[j][c] + sums[j][c + 2], sums[j + 1][c] + sums[j + 1][c + 2], sums[j + 2][c] + sums[j + 2][c + 2],
                          sums[j + 3][c] + sums[j + 3][c + 2]};
      rlx_send(rlx_at(records + (record * ROWS + row) * SLICE + d % SLICE), sent, d / SLICE, sum);
    }
    #pragma unroll
    for (int to = t; to < PARTS; to += 4)
      if (warp < SLOTS) rlx_send(rlx_at(tops + (record * ROWS + row) * 4), sent, to, make_float4(top, total, 0, 0));
  }
  if (PARTS == 1) __syncthreads();
  else for (uint32_t done = 0; !done;)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(sent), "r"(0) : "memory");
  /* 8 lanes add up 4 columns of a row */
  const auto finish = [&](int e, int lane, float4 sum, float all) { /* lane < 0: one has all 4 */
    const int r = e / (SLICE / 4), d = part % PARTS * SLICE + e % (SLICE / 4) * 4;
    const float scale = all == 0 ? 0 : 1 / all, out[4] = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
    #pragma unroll
    for (int i = 0; i < 4; i += VECTOR)
      if ((lane < 0 || lane == i) && !stopped) put(b, g * GROUP + r / QUERIES, r % QUERIES, d + i, out + i);
  };
  float4* const left = scratch + ((blockIdx.x / (PARTS * SHARES) * PARTS + part % PARTS) * SHARES) * ENDS * 2; /* by every share */
  for (int e0 = warp * 4; e0 < ENDS; e0 += WARPS * 4) {
    const bool there = e0 + lane / 8 < ENDS;
    const int e = there ? e0 + lane / 8 : e0, r = e / (SLICE / 4), d = e % (SLICE / 4) * 4;
    float best = NEVER, all = 0;
    float4 sum = {0, 0, 0, 0};
    #pragma unroll
    for (int n = own; n < RECORDS; n += 8)
      if (n < count) best = fmaxf(best, tops[(n * ROWS + r) * 4]);
    for (int by = 4; by > 0; by /= 2) best = fmaxf(best, rlx_from(best, 32, by));
    const float base = best == NEVER ? 0 : best;
    #pragma unroll
    for (int n = own; n < RECORDS; n += 8) {
      if (n >= count) continue;
      const float2 known = *(const float2*)(tops + (n * ROWS + r) * 4);
      const float4 x = *(const float4*)(records + (n * ROWS + r) * SLICE + d);
      const float keep = exp2f(known.x - base);
      all = fmaf(known.y, keep, all);
      sum.x = fmaf(x.x, keep, sum.x), sum.y = fmaf(x.y, keep, sum.y), sum.z = fmaf(x.z, keep, sum.z), sum.w = fmaf(x.w, keep, sum.w);
    }
    for (int by = 4; by > 0; by /= 2) {
      all += rlx_from(all, 32, by);
      sum.x += rlx_from(sum.x, 32, by), sum.y += rlx_from(sum.y, 32, by), sum.z += rlx_from(sum.z, 32, by), sum.w += rlx_from(sum.w, 32, by);
    }
    if (there && (SHARES == 1 || active == 1)) finish(e, own, sum, all);
    else if (there && own < 2) left[(share * ENDS + e) * 2 + own] = own ? make_float4(best, all, 0, 0) : sum;
  }
  if (SHARES == 1 || active == 1) return;
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* const counter = counters + blockIdx.x / (PARTS * SHARES) * PARTS + part % PARTS;
    last = atomicAdd(counter, 1) == active - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int e = threadIdx.x; e < ENDS; e += THREADS) {
    float4 sum = __ldcg(left + e * 2), known = __ldcg(left + e * 2 + 1);
    for (int n = 1; n < active; n++) {
      const float4 x = __ldcg(left + (n * ENDS + e) * 2), more = __ldcg(left + (n * ENDS + e) * 2 + 1);
      const float best = fmaxf(known.x, more.x), base = best == NEVER ? 0 : best, keep = exp2f(known.x - base), part = exp2f(more.x - base);
      sum = make_float4(fmaf(x.x, part, sum.x * keep), fmaf(x.y, part, sum.y * keep), fmaf(x.z, part, sum.z * keep), fmaf(x.w, part, sum.w * keep));
      known = make_float4(best, fmaf(more.y, part, known.y * keep), 0, 0);
    }
    finish(e, -1, sum, known.y);
  }
}

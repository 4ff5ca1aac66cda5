/* The products and attentions of a token in one launch (chain.py): a block for each multiprocessor, whose last warp copies weights
   ahead through a ring in shared memory while eight warps compute one stage after the other. */
constexpr int RLX_CHAIN_SUMS = 64;        /* columns whose sums meet at once */

/* The state of a thread that computes. `x`: shared memory for the row of a product, and for attention. `sums` [2][8 warps][columns]
   and `squares` [2][8] are used in turns, so that one barrier separates reuse. */
struct rlx_chain {
  unsigned char *ring, *x;
  uint64_t *filled, *used;
  float *sums, *squares;
  int place, phase;
  unsigned turn : 1, half : 1, met : 1; /* `met`: phase of the barrier of `pair` */
  uint64_t* pair; /* of two blocks that share the keys of a head: a barrier, behind it a share that the other one sends */
};

/* Warps that compute take registers that those that copy do not need. */
template <bool MORE> RLX_FN void rlx_chain_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}

/* -- words: numbers that blocks tell each other through global memory. The last bit of the fraction is a mark, which differs from the
   one that the same word had before, so a reader sees whether a word has come. --------------------------------------------------- */
RLX_FN uint32_t rlx_word(float x, uint32_t mark) { return (__float_as_uint(x) & ~1u) | mark; }
RLX_FN float rlx_of_word(uint32_t word) { return __uint_as_float(word & ~1u); }
RLX_FN void rlx_tell_word(uint32_t* at, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
/* COPIES of a word, `pitch` words apart: each is polled by some of the blocks. */
template <int COPIES> RLX_FN void rlx_tell_words(uint32_t* at, int pitch, uint32_t word) {
  #pragma unroll
  for (int n = 0; n < COPIES; n++) rlx_tell_word(at + n * pitch, word);
}
RLX_FN uint4 rlx_hear_words(const uint32_t* at) {
  uint4 got;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(at) : "memory");
  return got;
}
RLX_FN uint32_t rlx_hear_word(const uint32_t* at) {
  uint32_t got;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(got) : "l"(at) : "memory");
  return got;
}
RLX_FN bool rlx_marked(uint32_t got, uint32_t mark) { return !((got ^ mark) & 1); }
RLX_FN bool rlx_marked(uint4 got, uint32_t mark) { return !(((got.x ^ mark) | (got.y ^ mark) | (got.z ^ mark) | (got.w ^ mark)) & 1); }
/* An entry of the table: an address of words, with its first mark, and whether the mark changes from run to run. */
RLX_FN uint32_t* rlx_words_at(uint64_t entry) { return (uint32_t*)(entry & ~7ull); }
RLX_FN uint32_t rlx_mark_of(uint64_t entry, uint32_t run) { return (uint32_t)(entry ^ (entry >> 1 & run)) & 1; }

/* Elements of narrow floats as types of their own. */
struct rlx_f16 { uint16_t bits; };
struct rlx_bf16 { uint16_t bits; };
RLX_FN float rlx_wide(float a) { return a; }
RLX_FN float rlx_wide(rlx_f16 a) { return rlx_wide_f16(a.bits); }
RLX_FN float rlx_wide(rlx_bf16 a) { return rlx_wide_bf16(a.bits); }
RLX_FN float rlx_over(float a) { float out; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a)); return out; }
RLX_FN float rlx_over_sqrt(float a) { float out; asm("rsqrt.approx.f32 %0, %1;" : "=f"(out) : "f"(a)); return out; }

/* -- products ------------------------------------------------------------------------------------------------------------------- */
/* The first of GROUPS groups of columns that a block computes. */
template <int GROUPS> RLX_FN int rlx_chain_first(unsigned block) { return (int)((unsigned)GROUPS * block / RLX_CHAIN_BLOCKS); }

/* The copies of the weights of a block, by one warp: WINDOW pieces are in flight, PACE cycles apart. */
struct rlx_chain_copies { int place, round, count, landed; long long next; };
template <int SLOTS, int WINDOW, int PACE> RLX_FN void rlx_chain_await_slot(rlx_chain_copies& own, uint64_t* filled, uint64_t* used) {
  if (own.round) rlx_ring_await(used + own.place, (own.round - 1) & 1);
  constexpr int MOST = WINDOW < SLOTS ? WINDOW : SLOTS; /* a slot's phase says which of two copies has landed, no more */
  while (own.count - own.landed >= MOST) rlx_ring_await(filled + own.landed % SLOTS, own.landed / SLOTS & 1), own.landed++;
  if (PACE) {
    while (clock64() < own.next);
    own.next = clock64() + PACE;
  }
}
template <int SLOTS> RLX_FN void rlx_chain_copied(rlx_chain_copies& own) {
  own.count++;
  if (++own.place == SLOTS) own.place = 0, own.round++;
}
/* Pieces of 1024 elements of 8 columns of 16 bits, PITCH bytes from column to column, OTHER to those of a second product with the same
   row. */
template <int N, int K, int SLOTS, int WINDOW, int PACE, long long PITCH, long long OTHER>
RLX_FN void rlx_chain_feed(rlx_chain_copies& own, unsigned char* ring, uint64_t* filled, uint64_t* used, const unsigned char* weights) {
  constexpr int UNIT = OTHER ? 4 : 8, PARTS = (K + 1023) / 1024, LAST = (K - (PARTS - 1) * 1024) * 2;
  constexpr bool WHOLE = K == 1024 && PITCH == 2048; /* the columns of a piece are adjacent in memory */
  const int lane = threadIdx.x % 32, last = rlx_chain_first<N / UNIT>(blockIdx.x + 1);
  #pragma unroll 1
  for (int group = rlx_chain_first<N / UNIT>(blockIdx.x); group < last; group++) {
    const unsigned char* const from = weights + (long long)(group * UNIT + lane % UNIT) * PITCH + lane / UNIT * OTHER;
    #pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
      const int bytes = part == PARTS - 1 ? LAST : 2048;
      rlx_chain_await_slot<SLOTS, WINDOW, PACE>(own, filled, used);
      rlx_ring_expect(filled + own.place, 8 * bytes, lane);
      __syncwarp();
      if (WHOLE ? lane < 8 && lane % UNIT == 0 : lane < 8)
        rlx_ring_copy(ring + own.place * RLX_PIECE + lane * 2048, from + part * 2048, WHOLE ? UNIT * 2048 : bytes, filled + own.place, 0);
      rlx_chain_copied<SLOTS>(own);
    }
  }
}
/* The panels of a block, of GROUPS in all: as many whole ones as every block has, and a share of the parts of one of the rest, which it
   computes first. The owner of a panel has share 0 of its SHARES, the blocks in front of it the others; it ends the panel's columns. */
template <int GROUPS, int PARTS, int SHARES> struct rlx_chain_panels {
  static constexpr int WHOLE = GROUPS / RLX_CHAIN_BLOCKS, REST = GROUPS % RLX_CHAIN_BLOCKS;
  const int behind = RLX_CHAIN_BLOCKS - 1 - blockIdx.x; /* blocks; owners are counted from the last one */
  const int rest = ((behind + 1) * REST - 1) / RLX_CHAIN_BLOCKS; /* the last panel whose owner is this block or one behind */
  const int share = behind - rest * RLX_CHAIN_BLOCKS / (REST ? REST : 1), first = REST && share < SHARES ? -1 : 0;
  /* Panel n of the block, from `first` on; -1: the one of the rest. */
  __device__ int panel(int n) const { return n < 0 ? WHOLE * RLX_CHAIN_BLOCKS + rest : blockIdx.x * WHOLE + n; }
  __device__ int low(int n) const { return SHARES > 1 && n < 0 ? PARTS * share / SHARES : 0; }
  __device__ int high(int n) const { return SHARES > 1 && n < 0 ? PARTS * (share + 1) / SHARES : PARTS; }
};
/* Pieces of PART bytes, 1024 elements, of a panel of PANEL bytes. HALVES 2: panels of a second product take turns with those of the
   first one. */
template <int N, int K, int SLOTS, int WINDOW, int PACE, int SHARES, int PANEL, int PART, int HALVES>
RLX_FN void rlx_chain_feed_panels(rlx_chain_copies& own, unsigned char* ring, uint64_t* filled, uint64_t* used, const unsigned char* weights) {
  constexpr int PARTS = (K + 1023) / 1024, GROUPS = N / 32;
  const int lane = threadIdx.x % 32;
  const rlx_chain_panels<GROUPS, PARTS, SHARES> mine;
  #pragma unroll 1
  for (int turn = mine.first * HALVES; turn < mine.WHOLE * HALVES; turn++) {
    const int n = turn < 0 ? -1 : turn / HALVES, half = turn & HALVES - 1, high = mine.high(n);
    const unsigned char* const from = weights + (long long)(mine.panel(n) + half * GROUPS) * PANEL;
    #pragma unroll 1
    for (int part = mine.low(n); part < high; part++) {
      const int bytes = part == PARTS - 1 ? PANEL - part * PART : PART;
      rlx_chain_await_slot<SLOTS, WINDOW, PACE>(own, filled, used);
      rlx_ring_expect(filled + own.place, bytes, lane);
      __syncwarp();
      rlx_ring_copy(ring + own.place * RLX_PIECE, from + part * PART, bytes, filled + own.place, lane);
      rlx_chain_copied<SLOTS>(own);
    }
  }
}

/* Of 8 columns of a piece, 128 elements each: the elements that lane 4 * g + t has of a column are one 16-byte word, whose 4 parts are operand a
   of mma.sync as they are: row g is column g / 2 by parts 0 and 2, row g + 8 the same column by parts 1 and 3, of half g % 2 of
   the elements. Column 2 * half + n of operand b is the row's parts n and n + 2, which follow each other in shared memory. */
struct rlx_chain_sum { float low[4], high[4]; }; /* of columns 0 to 3, 4 to 7 */
template <bool F16> RLX_FN void rlx_chain_multiply(rlx_chain_sum& sum, const uint4 (&w)[4], const uint2 (&x)[2]) {
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    rlx_multiply<F16>(sum.low, w[i].x, w[i].y, w[i].z, w[i].w, x[i]);
    rlx_multiply<F16>(sum.high, w[i + 2].x, w[i + 2].y, w[i + 2].z, w[i + 2].w, x[i]);
  }
}
RLX_FN void rlx_chain_weights(uint4 (&w)[4], uint32_t at) {
  #pragma unroll
  for (int n = 0; n < 4; n++)
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(w[n].x), "=r"(w[n].y), "=r"(w[n].z), "=r"(w[n].w) : "r"(at + n / 2 * 4 * 2048 + n % 2 * 128) : "memory");
}

/* A warp hears its 128 elements of each part of a row of K, AHEAD parts at a time, while the next ones are on their way. take(part, d, out): four
   elements, from d on; each(part): behind those of a part; batch(from, to): behind those of some parts. ONE: the loop over batches stays
   a loop, so that the code of all stages is in the cache. Returns what `make` has added up in this lane. */
template <int K, int AHEAD, bool ONE, class X, class H, class R, class F, class M, class T, class P, class B>
RLX_FN float rlx_chain_row(const H& hear, const R& ready, const F& fetch, const M& make, const T& take, const P& each, const B& batch) {
  constexpr int PARTS = (K + 1023) / 1024, LAST = K - (PARTS - 1) * 1024;
  const int first = threadIdx.x / 32 * 128 + threadIdx.x % 32 * 4;
  float square = 0;
  uint4 heard[AHEAD], next[AHEAD];
  X held[AHEAD], more[AHEAD];
  const auto has = [&](int part) { return LAST == 1024 || part < PARTS - 1 || threadIdx.x / 32 * 128 < LAST; };
  const auto start = [&](int part, uint4& to, X& with) {
    const int d = part * 1024 + first;
    if (has(part)) to = hear(d), fetch(with, d);
  };
  #pragma unroll
  for (int n = 0; n < AHEAD; n++) start(n, heard[n], held[n]);
  int parts = PARTS;
  if (ONE) asm volatile("" : "+r"(parts));
  #pragma unroll 1
  for (int at = 0; at < parts; at += AHEAD) {
    if (PARTS > AHEAD)
      #pragma unroll
      for (int n = 0; n < AHEAD; n++)
        if (at + AHEAD + n < PARTS) start(at + AHEAD + n, next[n], more[n]);
    #pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int part = at + n, d = part * 1024 + first;
      if (PARTS % AHEAD && part >= PARTS) break;
      if (has(part)) {
        while (!ready(heard[n])) heard[n] = hear(d);
        float out[4];
        make(held[n], heard[n], out, square);
        take(part, d, out);
      }
      each(part);
    }
    batch(at, PARTS - at < AHEAD ? PARTS : at + AHEAD);
    if (PARTS > AHEAD)
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) heard[n] = next[n], held[n] = more[n];
  }
  return square;
}
/* A norm's sum of each warp. */
RLX_FN void rlx_chain_square(float* squares, float square) {
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) square += rlx_from(square, 32, by);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
}

/* One row by a block's columns of weights. A warp has 128 elements of each 1024 of the row: it hears them itself and waits for no other warp
   before its sums meet theirs. hear(d): words of four elements from d on; fetch(x, d): what else is needed of them; make(x, heard, out,
   squares): the elements, and what a norm adds up; ahead(j): before products, by the thread that will end column j; end(j, sum, sum of
   column j of the second product, the norm's sum of every warp, whether it stores). */
template <int N, int K, int SLOTS, bool BOTH, bool NORM, class X, bool F16, class H, class R, class F, class M, class A, class E>
RLX_FN void rlx_chain_product(
  rlx_chain& own, const H& hear, const R& ready, const F& fetch, const M& make, const A& ahead, const E& end
) {
  constexpr int UNIT = BOTH ? 4 : 8, PARTS = (K + 1023) / 1024, AHEAD = PARTS < 4 ? PARTS : 4, LAST = K - (PARTS - 1) * 1024;
  constexpr int SPAN = RLX_CHAIN_SUMS / 8, STEP = RLX_CHAIN_SUMS * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = rlx_chain_first<N / UNIT>(blockIdx.x), last = rlx_chain_first<N / UNIT>(blockIdx.x + 1);
  if (first == last) return;
  const int many = last - first < SPAN ? last - first : SPAN;
  if (threadIdx.x < many * UNIT) ahead(first * UNIT + threadIdx.x);
  const uint32_t row = rlx_ring_at(own.x) + warp * 256, made_at = row + lane / 2 * 16 + lane % 2 * 4;
  const uint32_t x_at = row + g / 2 % 2 * 64 + t * 16 + g % 2 * 8;
  const uint32_t weights = rlx_ring_at(own.ring) + g / 2 * 2048 + warp * 256 + g % 2 * 64 + t * 16;
  const bool lower = lane % 8 == 0, kept = lower || lane % 8 == 5; /* lanes that keep a sum: of column g / 2, of column 4 + g / 2 */
  const int place = warp * RLX_CHAIN_SUMS + (lower ? 0 : 4) + g / 2;
  float* const squares = own.squares + own.turn * 8;
  own.turn ^= 1;
  int summed = 0, begun = first;
  uint2 x[2]; /* what the lane multiplies; of a row of one part the same for all columns */
  const auto multiplied = [&](int part) { return LAST == 1024 || part < PARTS - 1 || warp * 128 < LAST; };
  const auto multiply = [&](int group) {
    rlx_chain_sum sum = {};
    const auto piece = [&](int part, bool anew) {
      uint4 w[4];
      rlx_ring_await(own.filled + own.place, own.phase);
      if (multiplied(part)) {
        rlx_chain_weights(w, weights + own.place * RLX_PIECE);
        if (anew)
          #pragma unroll
          for (int i = 0; i < 2; i++)
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[i].x), "=r"(x[i].y) : "r"(x_at + part * 2048 + i * 128) : "memory");
        rlx_chain_multiply<F16>(sum, w, x);
      }
      rlx_ring_leave(own.used + own.place, lane);
      if (++own.place == SLOTS) own.place = 0, own.phase ^= 1;
    };
    if (group == first) {
      const auto take = [&](int part, int d, const float (&out)[4]) {
        const uint32_t low = rlx_near_pair<F16>(out[0], out[1]), high = rlx_near_pair<F16>(out[2], out[3]);
        asm volatile("st.shared.u32 [%0], %1; st.shared.u32 [%0 + 8], %2;" ::"r"(made_at + part * 2048), "r"(low), "r"(high) : "memory");
        __syncwarp();
      };
      const float square = rlx_chain_row<K, AHEAD, false, X>(
        hear, ready, fetch, make, take, [&](int part) { piece(part, true); }, [](int, int) {});
      if (NORM) rlx_chain_square(squares, square);
    } else {
      #pragma unroll 1
      for (int part = 0; part < PARTS; part++) piece(part, PARTS > 1);
    }
    const float low = sum.low[0] + sum.low[3], high = sum.high[0] + sum.high[3], mine = lower ? low : high;
    const float theirs = rlx_from(lower ? high : low, 32, 5);
    if (kept) own.sums[own.half * STEP + place + summed * 8] = mine + theirs;
  };
  /* The end of columns runs once before words come, on whatever is there, and stores nothing: its code is in the cache when it counts. */
  int group = first - 1;
  asm volatile("" : "+r"(group)); /* so that no code is made for that turn alone */
  #pragma unroll 1
  for (; group < last; group++) {
    const bool live = group >= first;
    if (live) {
      multiply(group);
      if (++summed < SPAN && group < last - 1) continue;
      rlx_sync<256>();
    }
    if (threadIdx.x < (live ? summed : many) * UNIT) {
      const float* const from = own.sums + own.half * STEP + threadIdx.x / UNIT * 8 + threadIdx.x % UNIT;
      float all = from[0], also = BOTH ? from[4] : 0;
      #pragma unroll
      for (int w = 1; w < 8; w++) {
        all += from[w * RLX_CHAIN_SUMS];
        if (BOTH) also += from[w * RLX_CHAIN_SUMS + 4];
      }
      end(begun * UNIT + threadIdx.x, all, also, squares, live);
    }
    if (live) own.half ^= 1, summed = 0, begun = group + 1;
  }
}
/* The sum of a norm over the row. */
RLX_FN float rlx_chain_total(const float* squares) {
  float all = squares[0];
  #pragma unroll
  for (int w = 1; w < 8; w++) all += squares[w];
  return all;
}

/* -- attention of one query ----------------------------------------------------------------------------------------------------- */
/* A block has one head of queries and every SPLITS-th of the keys in use; LANES lanes have 8 elements each of a key and its value, AHEAD
   keys at a time, the first of them loaded before the query is known. T states the sizes. */
template <class T> struct rlx_chain_keys { uint4 k[T::AHEAD], v[T::AHEAD]; };
/* Keys [low, end) are in memory, key `end` is new; this lane's are `first` and each `step`-th behind it. */
struct rlx_chain_share { int low, end, split, active, first, step; };

RLX_FN float rlx_exp2_of(float a) { float out; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a)); return out; }
template <class T> RLX_FN rlx_chain_share rlx_chain_share_of(int position, int window, int split) {
  constexpr int GROUPS = 256 / T::LANES, EACH = T::AHEAD * GROUPS;
  const int low = window && position - window + 1 > 0 ? position - window + 1 : 0, wanted = (position - low + EACH) / EACH;
  const int active = wanted < T::SPLITS ? wanted : T::SPLITS;
  return {low, position, split, active, low + split * GROUPS + (int)threadIdx.x / T::LANES, active * GROUPS};
}
RLX_FN uint4 rlx_chain_16(const void* from) {
  uint4 got;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(from) : "memory");
  return got;
}
template <class T, class E> RLX_FN void rlx_chain_load(rlx_chain_keys<T>& to, const E* k, const E* v, const rlx_chain_share& of) {
  const int at = threadIdx.x % T::LANES * 8;
  #pragma unroll
  for (int n = 0; n < T::AHEAD; n++) {
    const int key = of.first + n * of.step;
    const bool there = key < of.end && at < T::SIZE;
    to.k[n] = there ? rlx_chain_16(k + (long long)key * T::K_ROW + at) : make_uint4(0, 0, 0, 0);
    to.v[n] = there ? rlx_chain_16(v + (long long)key * T::V_ROW + at) : make_uint4(0, 0, 0, 0);
  }
}
template <class T> RLX_FN void rlx_chain_wide(float (&to)[8], uint4 from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  #pragma unroll
  for (int n = 0; n < 4; n++) {
    to[2 * n] = T::F16 ? rlx_wide_f16((uint16_t)words[n]) : __uint_as_float(words[n] << 16);
    to[2 * n + 1] = T::F16 ? rlx_wide_f16((uint16_t)(words[n] >> 16)) : __uint_as_float(words[n] & 0xffff0000u);
  }
}

/* The softmax so far: greatest score, sum of weights, weighted sum of 8 elements. Scores are in units of log2. */
struct rlx_chain_soft { float top, total, sums[8]; };
/* With keys `step` apart, of which the newest is `room` behind the first one. */
template <class T> RLX_FN void rlx_chain_use(rlx_chain_soft& to, const rlx_chain_keys<T>& held, const float (&q)[8], int room, int step) {
  constexpr int N = T::AHEAD;
  const uint4 (&k)[N] = held.k, (&v)[N] = held.v;
  float scores[N], best = to.top;
  const auto in_use = [&](int n) { return n * step <= room; };
  #pragma unroll
  for (int n = 0; n < N; n++) {
    float wide[8], a = 0, b = 0;
    rlx_chain_wide<T>(wide, k[n]);
    #pragma unroll
    for (int e = 0; e < 4; e++) a = fmaf(q[e], wide[e], a), b = fmaf(q[e + 4], wide[e + 4], b);
    scores[n] = a + b;
  }
  #pragma unroll
  for (int by = T::LANES / 2; by > 0; by /= 2)
    #pragma unroll
    for (int n = 0; n < N; n++) scores[n] += rlx_from(scores[n], 32, by);
  #pragma unroll
  for (int n = 0; n < N; n++) scores[n] = in_use(n) ? T::score(scores[n]) : -1e30f, best = fmaxf(best, scores[n]);
  const float keep = rlx_exp2_of(to.top - best);
  to.top = best, to.total *= keep;
  #pragma unroll
  for (int e = 0; e < 8; e++) to.sums[e] *= keep;
  #pragma unroll
  for (int n = 0; n < N; n++) {
    const float p = in_use(n) ? rlx_exp2_of(scores[n] - best) : 0;
    float wide[8];
    rlx_chain_wide<T>(wide, v[n]);
    to.total += p;
    #pragma unroll
    for (int e = 0; e < 8; e++) to.sums[e] = fmaf(p, wide[e], to.sums[e]);
  }
}

RLX_FN void rlx_chain_copy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(rlx_ring_at(to)), "l"(from) : "memory");
}
/* Adds `count` of N shares to one: each has an element that is not divided yet, a greatest score and a total. */
template <int N> RLX_FN void rlx_chain_join(
  const float (&outs)[N], const float (&tops)[N], const float (&totals)[N], int count, float& out, float& top, float& total
) {
  float best = top;
  #pragma unroll
  for (int n = 0; n < N; n++)
    if (n < count) best = fmaxf(best, tops[n]);
  const float own = rlx_exp2_of(top - best);
  out *= own, total *= own, top = best;
  #pragma unroll
  for (int n = 0; n < N; n++) {
    if (n >= count) continue;
    const float keep = rlx_exp2_of(tops[n] - best);
    out = fmaf(keep, outs[n], out), total = fmaf(keep, totals[n], total);
  }
}
/* `q`, `k_new`, `v_new`: the query and the newest row, in shared memory. Thread d of the first SIZE returns element d of the block's share
   before it is divided, and the greatest score and the total. */
template <class T, class Q, class E> RLX_FN void rlx_chain_attend(
  rlx_chain_keys<T>& held, const E* k, const E* v, const Q* q, const E* k_new, const E* v_new, const rlx_chain_share& of, float* sums,
  unsigned char* later, float& out, float& top, float& total
) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane % T::LANES * 8;
  float *const tops = sums + 8 * T::SIZE, *const totals = tops + 8, query[8];
  #pragma unroll
  for (int e = 0; e < 8; e++) query[e] = at < T::SIZE ? rlx_wide(q[at + e]) : 0;
  rlx_chain_soft soft = {-1e30f, 0, {}};
  int room = of.end - of.first, left = of.end + 1 - of.low; /* from this lane's key to the newest; keys of all blocks */
  uint4* const own = (uint4*)later + threadIdx.x; /* this thread's elements of the next turn: k, then v */
  while (true) {
    const int next = room - T::AHEAD * of.step;
    left -= T::AHEAD * of.step;
    const auto there = [&](int n) { return n * of.step < next && at < T::SIZE; };
    if (left > 0)
      #pragma unroll
      for (int n = 0; n < T::AHEAD; n++) {
        const long long key = of.end - next + n * of.step;
        if (there(n)) rlx_chain_copy(own + n * 256, k + key * T::K_ROW + at), rlx_chain_copy(own + (T::AHEAD + n) * 256, v + key * T::V_ROW + at);
      }
    #pragma unroll
    for (int n = 0; n < T::AHEAD; n++)
      if (n * of.step == room && at < T::SIZE) held.k[n] = *(const uint4*)(k_new + at), held.v[n] = *(const uint4*)(v_new + at);
    rlx_chain_use(soft, held, query, room, of.step);
    if (left <= 0) break;
    asm volatile("cp.async.wait_all;" ::: "memory");
    #pragma unroll
    for (int n = 0; n < T::AHEAD; n++)
      held.k[n] = there(n) ? own[n * 256] : make_uint4(0, 0, 0, 0), held.v[n] = there(n) ? own[(T::AHEAD + n) * 256] : make_uint4(0, 0, 0, 0);
    room = next;
  }
  #pragma unroll
  for (int by = T::LANES; by < 32; by *= 2) {
    const float other = rlx_from(soft.top, 32, by), best = fmaxf(soft.top, other), mine = rlx_exp2_of(soft.top - best), theirs = rlx_exp2_of(other - best);
    soft.total = soft.total * mine + rlx_from(soft.total, 32, by) * theirs, soft.top = best;
    #pragma unroll
    for (int e = 0; e < 8; e++) soft.sums[e] = soft.sums[e] * mine + rlx_from(soft.sums[e], 32, by) * theirs;
  }
  if (lane < T::LANES && at < T::SIZE) {
    *(float4*)(sums + warp * T::SIZE + at) = make_float4(soft.sums[0], soft.sums[1], soft.sums[2], soft.sums[3]);
    *(float4*)(sums + warp * T::SIZE + at + 4) = make_float4(soft.sums[4], soft.sums[5], soft.sums[6], soft.sums[7]);
  }
  if (lane == 0) tops[warp] = soft.top, totals[warp] = soft.total;
  rlx_sync<256>();
  if (threadIdx.x >= T::SIZE) return;
  float tops_of[8], totals_of[8], outs[8];
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    const float4 a = ((const float4*)tops)[n], b = ((const float4*)totals)[n];
    tops_of[4 * n] = a.x, tops_of[4 * n + 1] = a.y, tops_of[4 * n + 2] = a.z, tops_of[4 * n + 3] = a.w;
    totals_of[4 * n] = b.x, totals_of[4 * n + 1] = b.y, totals_of[4 * n + 2] = b.z, totals_of[4 * n + 3] = b.w;
  }
  #pragma unroll
  for (int w = 0; w < 8; w++) outs[w] = sums[w * T::SIZE + threadIdx.x];
  out = 0, top = -1e30f, total = 0;
  rlx_chain_join(outs, tops_of, totals_of, 8, out, top, total);
}

/* The second block of a pair (a cluster) writes its share into the shared memory of the first one. Elements, greatest score, total: a
   barrier there counts their bytes. */
template <int SIZE> RLX_FN void rlx_chain_send(const rlx_chain& own, float out, float top, float total) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(rlx_ring_at(own.pair)));
  const auto send = [&](int n, float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
      ::"r"(there + 16 + n * 4), "r"(__float_as_uint(value)), "r"(there) : "memory");
  };
  if (threadIdx.x < SIZE) send(threadIdx.x, out);
  if (threadIdx.x < 2) send(SIZE + threadIdx.x, threadIdx.x ? total : top);
}
template <int SIZE> RLX_FN void rlx_chain_receive(rlx_chain& own, float& out, float& top, float& total) {
  if (threadIdx.x == 0) rlx_ring_expect(own.pair, (SIZE + 2) * 4, 0);
  asm volatile(
    "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; @done bra out; bra again; out: }"
    ::"r"(rlx_ring_at(own.pair)), "r"(own.met) : "memory");
  own.met ^= 1;
  if (threadIdx.x >= SIZE) return;
  const float* const sent = (const float*)(own.pair + 2);
  const float outs[1] = {sent[threadIdx.x]}, tops[1] = {sent[SIZE]}, totals[1] = {sent[SIZE + 1]};
  rlx_chain_join(outs, tops, totals, 1, out, top, total);
}
/* The shares of a head meet in the first SIZE threads of its first block: those of pairs first. `area`: [pairs - 1][SIZE + 4] words of this
   head. True in that block. */
template <class T> RLX_FN bool rlx_chain_meet(rlx_chain& own, const rlx_chain_share& of, uint32_t* area, uint32_t mark, float& out, float& top, float& total) {
  constexpr int PITCH = T::SIZE + 4;
  if (T::SPLITS == 1) return true;
  const int other = of.split ^ 1;
  if (of.split > other) {
    if (of.split < of.active) rlx_chain_send<T::SIZE>(own, out, top, total);
    return false;
  }
  if (other < of.active) rlx_chain_receive<T::SIZE>(own, out, top, total);
  if (of.split) {
    uint32_t* const told = area + (of.split / 2 - 1) * PITCH;
    if (threadIdx.x < T::SIZE) rlx_tell_word(told + threadIdx.x, rlx_word(out, mark));
    if (threadIdx.x < 4) rlx_tell_word(told + T::SIZE + threadIdx.x, rlx_word(threadIdx.x % 2 ? total : top, mark));
    return false;
  }
  if (threadIdx.x >= T::SIZE) return true;
  constexpr int MOST = T::SPLITS > 2 ? T::SPLITS / 2 - 1 : 1;
  const int others = (of.active - 1) / 2;
  uint4 ends[MOST];
  uint32_t words[MOST];
  const auto hear = [&](int n) { ends[n] = rlx_hear_words(area + n * PITCH + T::SIZE), words[n] = rlx_hear_word(area + n * PITCH + threadIdx.x); };
  #pragma unroll
  for (int n = 0; n < MOST; n++)
    if (n < others) hear(n);
  float outs[MOST], tops[MOST], totals[MOST];
  #pragma unroll
  for (int n = 0; n < MOST; n++) {
    if (n >= others) continue;
    while (!rlx_marked(ends[n], mark) || !rlx_marked(words[n], mark)) hear(n);
    outs[n] = rlx_of_word(words[n]), tops[n] = rlx_of_word(ends[n].x), totals[n] = rlx_of_word(ends[n].y);
  }
  rlx_chain_join(outs, tops, totals, others, out, top, total);
  return true;
}

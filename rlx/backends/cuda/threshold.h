
/* The threshold of a line: the greatest key such that elements from there on are `want`, or with BITS (where a value counts as itself)
   sum to it. Keys are looked for by their digits, the highest first: each block of a line adds up its part of it by a digit, in shared
   memory, and the blocks add up their bins in global memory, where all of them find the bin of the threshold. Once that has few elements,
   they are listed, and the block that comes last does the other digits of these. Sums are of integers, so that no order matters: values are
   rounded to 2^-BITS of the power of two below `want`, and greater ones count as that. */
template <int T, int N, int PARTS, int PART, int BITS, class W> struct rlx_threshold {
  static constexpr int DIGIT = BITS ? 11 : 12, BINS = 1 << DIGIT, EACH = BINS / T, FEW = 4096, FEWER = BITS ? 64 : 128;
  static constexpr int HEAD = 4, TURN = BITS ? 2 * BINS : BINS; /* words: in front of the bins, and of those of a digit */
  static_assert(FEWER <= T && T <= FEW && BINS % T == 0, "a thread has an element of a few, and bins");
  unsigned* words; /* of the line, zero before and after: blocks that met, that have left, elements listed; bins of each digit */
  unsigned* memory; /* for the list of the line */
  int part;
  float want;
  W goal, total; /* what is still to be reached, of the `total` of the bin that it is in */
  int exponent; /* of an element whose fraction is as many units */
  unsigned *low, *high; /* the sums of bins in shared memory, and what is beyond 32 bits */

  /* NaN is never counted, and where the threshold is -inf, it does not matter what is. */
  static __device__ bool counted(float x) { return x > (BITS ? 0.f : -INFINITY); }
  static __device__ unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.f); /* there is one zero */
    return BITS ? bits : bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
  }
  __device__ void aim() {
    if constexpr (BITS) {
      const unsigned bits = __float_as_uint(want);
      exponent = (int)(bits >> 23) + (want == INFINITY ? 64 : 0) - (BITS - 23); /* finite ones do not reach infinity */
      goal = want == want ? (W)(bits & 0x7fffffu | 0x800000u) << (BITS - 23) : ~(W)0;
    } else {
      goal = want <= (float)N ? (W)ceilf(want) : (W)N + 1;
    }
  }
  __device__ W weight(unsigned key) const {
    if (!BITS) return 1;
    if (__uint_as_float(key) >= want) return (W)(__float_as_uint(want) & 0x7fffffu | 0x800000u) << (BITS ? BITS - 23 : 0);
    const int power = key >> 23, by = max(power, 1) - exponent;
    const unsigned fraction = key & 0x7fffffu | (power ? 0x800000u : 0);
    const int down = min(-by, 25);
    return by >= 0 ? (W)fraction << by : (W)(fraction + (1u << (down - 1)) >> down);
  }
  __device__ void add(int bin, unsigned key) {
    if constexpr (BITS) {
      const W some = weight(key);
      if (!some) return;
      const unsigned below = (unsigned)some, before = atomicAdd(low + bin, below), above = (unsigned)(some >> 32) + (before + below < below);
      if (above) atomicAdd(high + bin, above);
    } else {
      atomicAdd(low + bin, 1u);
    }
  }
  /* take(key) for each element of this block that counts. */
  template <int U, int S, class F, class G> __device__ void each(F values, G take) const {
    const int end = min(part * PART + PART, N);
    for (int start = part * PART + (int)threadIdx.x * S; start < end; start += U * T * S) {
      float x[U][S];
      #pragma unroll
      for (int u = 0; u < U; u++) values(min(start + u * T * S, end - S), x[u]);
      #pragma unroll
      for (int u = 0; u < U; u++)
        #pragma unroll
        for (int s = 0; s < S; s++)
          if (start + u * T * S < end && counted(x[u][s])) take(key_of(x[u][s]));
    }
  }
  /* Adds the bins of this block to those of the line, and waits for the other blocks. */
  __device__ void exchange(unsigned* bins, int turn) {
    for (int n = threadIdx.x; n < BINS; n += T) {
      const W some = BITS ? (W)((unsigned long long)high[n] << 32 | low[n]) : (W)low[n];
      if (some) atomicAdd((W*)bins + n, some);
    }
    rlx_meet(words, (turn + 1) * PARTS);
  }
  /* The bin in which the goal is reached, the last bin first; -1: all together fall short. `far`: bins in global memory, or null. */
  __device__ int walk(const unsigned* far) {
    __shared__ W sums[T / 32], left_of, total_of;
    __shared__ int found;
    const int me = threadIdx.x, lane = me % 32, warp = me / 32, first = BINS - (me + 1) * EACH;
    W own[EACH], all = 0;
    if (far) {
      uint4 got[EACH * sizeof(W) / 16];
      #pragma unroll
      for (int n = 0; n < EACH * (int)sizeof(W) / 16; n++) got[n] = __ldcg((const uint4*)((const W*)far + first) + n);
      memcpy(own, got, sizeof(own));
    } else {
      unsigned lows[EACH], highs[EACH] = {};
      rlx_fetch<EACH>(lows, low + first);
      if constexpr (BITS) rlx_fetch<EACH>(highs, high + first);
      #pragma unroll
      for (int e = 0; e < EACH; e++) own[e] = (W)((unsigned long long)highs[e] << 32 | lows[e]);
    }
    #pragma unroll
    for (int e = 0; e < EACH; e++) all += own[e];
    W before = all;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const W below = rlx_up(before, 32, by);
      if (lane >= by) before += below;
    }
    if (me == 0) found = -1;
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    before -= all;
    #pragma unroll
    for (int w = 0; w < T / 32; w++) before += w < warp ? sums[w] : 0;
    if (before < goal && goal - before <= all) {
      W left = goal - before;
      bool here = false;
      #pragma unroll
      for (int e = EACH - 1; e >= 0; e--) {
        if (!here && left <= own[e]) found = first + e, left_of = left, total_of = own[e], here = true;
        if (!here) left -= own[e];
      }
    }
    __syncthreads();
    goal = left_of, total = total_of;
    return found;
  }
  /* Whether this block is the last of its line to leave. */
  __device__ bool last() {
    __threadfence();
    __syncthreads();
    const bool mine = threadIdx.x == 0 && atomicAdd(words + 1, 1u) == PARTS - 1;
    return __syncthreads_or(mine);
  }
  /* Whether this block has the elements that all blocks have listed. */
  __device__ bool join(unsigned* list, int& found) {
    __shared__ unsigned before;
    const int me = threadIdx.x;
    if (me == 0) before = atomicAdd(words + 2, (unsigned)found);
    __syncthreads();
    for (int n = me; n < found; n += T) memory[before + n] = list[n];
    if (!last()) return false;
    __threadfence();
    list[me] = __ldcg(memory + me); /* as likely as not one of them: it does not wait for their number */
    found = (int)__ldcg(words + 2);
    for (int n = T + me; n < found; n += T) list[n] = __ldcg(memory + n);
    return true;
  }
  /* The threshold among a few elements: a thread has each, and adds up those that are no less. */
  __device__ unsigned pick(const unsigned* list, int found) const {
    __shared__ unsigned best;
    const int me = threadIdx.x;
    if (me == 0) best = 0;
    __syncthreads();
    if (me < found) {
      W sum = 0;
      for (int n = 0; n < found; n++) sum += list[n] >= list[me] ? weight(list[n]) : 0;
      if (sum >= goal) atomicMax(&best, list[me]);
    }
    __syncthreads();
    return BITS ? best | 0x80000000u : best;
  }
  /* Whether this block has the threshold, as a key of which order is that of floats; 0: the line falls short. */
  template <int U, int S, class F> __device__ bool run(unsigned& key, F values) {
    __shared__ __align__(16) unsigned lows[BINS], highs[BITS ? BINS : 4], list[FEW];
    __shared__ int count;
    const int me = threadIdx.x;
    unsigned prefix = 0;
    int turn = 0, found = 0, above = 32, shift = 20;
    bool listed = false, left = false;
    low = lows, high = highs;
    if (me == 0) count = 0;
    aim();
    #pragma unroll 1
    for (;;) {
      for (int n = me; n < BINS; n += T) {
        low[n] = 0;
        if (BITS) high[n] = 0;
      }
      __syncthreads();
      const auto put = [&](unsigned key) {
        if (above == 32 || key >> above == prefix) add(key >> shift & (1u << (above - shift)) - 1, key);
      };
      if (listed)
        for (int n = me; n < found; n += T) put(list[n]);
      else
        each<U, S>(values, put);
      __syncthreads();
      unsigned* const far = PARTS > 1 && !listed ? words + HEAD + turn * TURN : nullptr;
      if (far) exchange(far, turn++);
      const int bin = walk(far);
      key = 0;
      if (bin < 0) break;
      prefix = (above == 32 ? 0 : prefix << (above - shift)) | (unsigned)bin;
      key = BITS ? prefix << shift | 0x80000000u : prefix << shift;
      if (shift == 0) break;
      if (!listed && total <= FEW * weight(prefix << shift)) { /* the least of its elements */
        each<U, S>(values, [&](unsigned key) {
          if (key >> shift == prefix) list[atomicAdd(&count, 1)] = key;
        });
        __syncthreads();
        found = count;
        if (PARTS > 1 && !join(list, found)) return false;
        listed = left = true;
        if (found <= FEWER) {
          key = pick(list, found);
          break;
        }
      }
      above = shift, shift = max(shift - DIGIT, 0);
    }
    if (PARTS > 1 && !left && !last()) return false;
    if (PARTS > 1)
      for (int n = me; n < HEAD + turn * TURN; n += T) words[n] = 0;
    return true;
  }
};

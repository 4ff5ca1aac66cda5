
/* Sorting a row by a team of T threads. A key orders as its value does, NaN last, -0 and 0 alike; below it is the position, so that equal
   values keep their order, and whether a zero is negative. */
template <int BYTES> struct rlx_key_of { typedef uint32_t type; };
template <> struct rlx_key_of<8> { typedef unsigned long long type; };
template <class V> struct __align__(2 * sizeof(typename rlx_key_of<sizeof(V)>::type)) rlx_key {
  typedef typename rlx_key_of<sizeof(V)>::type bits_t;
  bits_t bits;
  uint32_t below;
  __device__ bool operator<(const rlx_key& b) const {
    if constexpr (sizeof bits == 4) return ((unsigned long long)bits << 32 | below) < ((unsigned long long)b.bits << 32 | b.below);
    return bits < b.bits || (bits == b.bits && below < b.below);
  }
  static __device__ rlx_key last() { return {(bits_t)-1, 0xffffffffu}; }
};
template <bool DESCENDING, class V> RLX_FN rlx_key<V> rlx_to_key(V value, int at) {
  typedef typename rlx_key<V>::bits_t bits_t;
  constexpr bits_t sign = (bits_t)1 << (8 * sizeof(bits_t) - 1);
  constexpr bool real = (V)0.5 != (V)0, is_signed = (V)-1 < (V)0;
  bits_t bits;
  bool negative_zero = false;
  if constexpr (real) {
    memcpy(&bits, &value, sizeof bits);
    negative_zero = bits == sign;
    if (value == 0) bits = 0;
    bits = value != value ? (bits_t)-1 : bits & sign ? ~bits : bits | sign;
  } else {
    bits = (bits_t)value ^ (is_signed ? sign : 0);
  }
  return {DESCENDING ? ~bits : bits, (uint32_t)at << 1 | negative_zero};
}
template <bool DESCENDING, class V> RLX_FN V rlx_of_key(rlx_key<V> key) {
  typedef typename rlx_key<V>::bits_t bits_t;
  constexpr bits_t sign = (bits_t)1 << (8 * sizeof(bits_t) - 1);
  constexpr bool real = (V)0.5 != (V)0, is_signed = (V)-1 < (V)0;
  bits_t bits = DESCENDING ? ~key.bits : key.bits;
  if constexpr (real) {
    bits = bits & sign ? bits ^ sign : ~bits;
    if (key.below & 1) bits = sign;
    V value;
    memcpy(&value, &bits, sizeof value);
    return value;
  } else {
    return (V)(bits ^ (is_signed ? sign : 0));
  }
}
RLX_FN unsigned long long rlx_lane(unsigned long long a, int by) { return __shfl_xor_sync(0xffffffffu, a, by); }
RLX_FN uint32_t rlx_lane(uint32_t a, int by) { return __shfl_xor_sync(0xffffffffu, a, by); }
template <class V> RLX_FN rlx_key<V> rlx_lane(rlx_key<V> a, int by) { return {rlx_lane(a.bits, by), rlx_lane(a.below, by)}; }
template <class K> RLX_FN void rlx_keep(K& own, const K& other, bool least) { if ((other < own) == least) own = other; }
template <class K> RLX_FN void rlx_order(K& a, K& b) {
  if (b < a) { const K c = a; a = b; b = c; }
}

/* K. E. Batcher's bitonic network with all comparisons in one direction: each merge of two sorted halves first compares elements at
   equal distances from its ends. A warp holds a chunk of 32 * E, adjacent ones in a lane. */
template <int E, class K> RLX_FN void rlx_flip(K (&k)[E], int size) {
  if (size <= E) {
    #pragma unroll
    for (int e = 0; e < E; e++)
      if ((e ^ (size - 1)) > e) rlx_order(k[e], k[e ^ (size - 1)]);
    return;
  }
  const bool least = !(threadIdx.x % 32 & size / E / 2);
  if constexpr (E == 1) {
    rlx_keep(k[0], rlx_lane(k[0], size - 1), least);
  } else {
    #pragma unroll
    for (int e = 0; e < E / 2; e++) {
      const K low = rlx_lane(k[E - 1 - e], size / E - 1), high = rlx_lane(k[e], size / E - 1);
      rlx_keep(k[e], low, least);
      rlx_keep(k[E - 1 - e], high, least);
    }
  }
}
template <int E, class K> RLX_FN void rlx_strides(K (&k)[E], int from) {
  #pragma unroll
  for (int by = from; by > 0; by /= 2) {
    #pragma unroll
    for (int e = 0; e < E; e++) {
      if (by >= E) rlx_keep(k[e], rlx_lane(k[e], by / E), !(threadIdx.x % 32 & by / E));
      else if (!(e & by)) rlx_order(k[e], k[e ^ by]);
    }
  }
}
RLX_FN int rlx_spread(int i) { return i + i / 8; } /* no two lanes of a chunk are in the same bank */

/* key(i) for i below `count`, sorted, in `keys`, at rlx_spread of their places; whole chunks are written, for `all` keys at least. */
template <int T, int E, class K, class G> RLX_FN void rlx_sort_keys(K* keys, int me, G key, int count, int all) {
  constexpr int CHUNK = 32 * E;
  const int END = (all + CHUNK - 1) / CHUNK * CHUNK;
  K k[E];
  for (int first = me / 32 * CHUNK; first < END; first += T * E) {
    const int own = first + threadIdx.x % 32 * E;
    #pragma unroll
    for (int e = 0; e < E; e++) k[e] = own + e < count ? key(own + e) : K::last();
    #pragma unroll
    for (int size = 2; size <= CHUNK; size *= 2) {
      rlx_flip(k, size);
      rlx_strides(k, size / 4);
    }
    #pragma unroll
    for (int e = 0; e < E; e++) keys[rlx_spread(own + e)] = k[e];
  }
  for (int size = 2 * CHUNK; size < 2 * END; size *= 2) {
    for (int by = size / 2; by >= CHUNK; by /= 2) {
      __syncthreads();
      for (int n = me; ; n += T) {
        const int low = n / by * 2 * by + n % by, high = by == size / 2 ? low + size - 1 - 2 * (n % by) : low + by;
        if (low >= END) break;
        if (high < END) rlx_order(keys[rlx_spread(low)], keys[rlx_spread(high)]);
      }
    }
    __syncthreads();
    for (int first = me / 32 * CHUNK; first < END; first += T * E) {
      const int own = first + threadIdx.x % 32 * E;
      #pragma unroll
      for (int e = 0; e < E; e++) k[e] = keys[rlx_spread(own + e)];
      rlx_strides(k, CHUNK / 2);
      #pragma unroll
      for (int e = 0; e < E; e++) keys[rlx_spread(own + e)] = k[e];
    }
  }
  if (T > 32) __syncthreads();
  else __syncwarp();
}
/* The keys of value(i) for `count` i from `start` on, N at most, sorted in the same way. */
template <int T, int E, int N, bool DESCENDING, class V, class F>
RLX_FN void rlx_sort(rlx_key<V>* keys, int me, F value, int start = 0, int count = N) {
  rlx_sort_keys<T, E>(keys, me, [&](int i) { return rlx_to_key<DESCENDING, V>(value(start + i), start + i); }, count, N);
}

/* A key in memory that other blocks write: not in the L1 cache. */
template <class V> RLX_FN rlx_key<V> rlx_far_key(const rlx_key<V>* at) {
  rlx_key<V> key;
  if constexpr (sizeof(key) == 8) {
    const uint2 got = __ldcg((const uint2*)at);
    memcpy(&key, &got, 8);
  } else {
    const uint4 got = __ldcg((const uint4*)at);
    memcpy(&key, &got, 16);
  }
  return key;
}
/* How many of the first `d` keys of a merge come from `a`, of `na`; the others are from `b`, of `nb`. A warp tries 32 at a time. */
template <class V> RLX_FN int rlx_split(const rlx_key<V>* a, int na, const rlx_key<V>* b, int nb, int d) {
  int low = d > nb ? d - nb : 0, high = d < na ? d : na;
  while (low < high) {
    const int step = (high - low + 31) / 32, at = low + threadIdx.x % 32 * step;
    const bool more = at < high && rlx_far_key(a + at) < rlx_far_key(b + d - 1 - at);
    const int count = __popc(__ballot_sync(0xffffffffu, more));
    if (count == 0) break;
    high = low + count * step < high ? low + count * step : high;
    low += (count - 1) * step + 1;
  }
  return low;
}
/* Tells the blocks of a line that this one has come here; waits until `goal` of them have, here or earlier. */
RLX_FN void rlx_arrive(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
RLX_FN void rlx_await(const unsigned* counter, unsigned goal) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < goal);
  }
  __syncthreads();
}
RLX_FN void rlx_meet(unsigned* counter, unsigned goal) {
  rlx_arrive(counter);
  rlx_await(counter, goal);
}
/* Sorts N keys by PARTS blocks, a run of T * E of each: sort(first) leaves the run from `first` on sorted in `keys`, emit(first) gets that
   part of all of them there. Sorted runs are merged in pairs, from one half of `memory` into the other: a block finds which keys become
   its part of a run, and each thread E of these. `counter` is zero before and after. */
template <int T, int E, int PARTS, class K, class S, class F>
RLX_FN void rlx_merge(K* keys, K* memory, int part, unsigned* counter, S sort, F emit) {
  constexpr int C = T * E, ALL = PARTS * C;
  __shared__ int split[2];
  const int me = threadIdx.x, own = part * C;
  K *from = memory, *to = memory + ALL;
  const auto put = [&](K* at) {
    for (int n = me; n < C; n += T) at[n] = keys[rlx_spread(n)];
    __syncthreads();
  };
  sort(own);
  put(from + own);
  unsigned meetings = 0;
  for (int run = C; run < ALL; run *= 2) {
    rlx_meet(counter, ++meetings * PARTS);
    const int base = own / (2 * run) * 2 * run, first = own - base, left = ALL - base;
    const int na = run < left ? run : left, nb = 2 * run < left ? run : left - na;
    const K *a = from + base, *b = a + na;
    if (me < 64) {
      const int found = rlx_split(a, na, b, nb, first + me / 32 * C);
      if (me % 32 == 0) split[me / 32] = found;
    }
    __syncthreads();
    const int start = split[0], mine = split[1] - start;
    for (int n = me; n < C; n += T) keys[rlx_spread(n)] = rlx_far_key(n < mine ? a + start + n : b + first - start + n - mine);
    __syncthreads();
    int low = me * E > C - mine ? me * E - (C - mine) : 0, high = me * E < mine ? me * E : mine;
    while (low < high) {
      const int at = (low + high) / 2;
      if (keys[rlx_spread(at)] < keys[rlx_spread(mine + me * E - 1 - at)]) low = at + 1;
      else high = at;
    }
    K k[E];
    int other = mine + me * E - low;
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const bool less = other >= C || (low < mine && keys[rlx_spread(low)] < keys[rlx_spread(other)]);
      k[e] = keys[rlx_spread(less ? low++ : other++)];
    }
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < E; e++) keys[rlx_spread(me * E + e)] = k[e];
    __syncthreads();
    if (2 * run < ALL) put(to + own);
    else emit(own), __syncthreads();
    K* const next = from;
    from = to, to = next;
  }
  if (me == 0 && atomicAdd(counter, 1) == (meetings + 1) * PARTS - 1) *counter = 0;
}

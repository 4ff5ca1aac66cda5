
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
};
template <class V> RLX_FN rlx_key<V> rlx_last_key() { return {(typename rlx_key<V>::bits_t)-1, 0xffffffffu}; }
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

/* The keys of value(i) for i < N, sorted, in `keys`, at rlx_spread of their places. Shared memory has room for whole chunks. */
template <int T, int E, int N, bool DESCENDING, class V, class F> RLX_FN void rlx_sort(rlx_key<V>* keys, int me, F value) {
  constexpr int CHUNK = 32 * E, END = (N + CHUNK - 1) / CHUNK * CHUNK;
  rlx_key<V> k[E];
  for (int first = me / 32 * CHUNK; first < END; first += T * E) {
    const int own = first + threadIdx.x % 32 * E;
    #pragma unroll
    for (int e = 0; e < E; e++) k[e] = own + e < N ? rlx_to_key<DESCENDING, V>(value(own + e), own + e) : rlx_last_key<V>();
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

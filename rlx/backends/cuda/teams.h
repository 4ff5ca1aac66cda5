
/* Teams: T threads of a block that share a grid point, a power of two. A team is part of a warp, or the whole block. */
template <class V> struct rlx_wide_of { typedef V type; };
template <> struct rlx_wide_of<bool> { typedef int type; };
template <> struct rlx_wide_of<int8_t> { typedef int type; };
template <> struct rlx_wide_of<uint8_t> { typedef int type; };
template <> struct rlx_wide_of<int16_t> { typedef int type; };
template <> struct rlx_wide_of<uint16_t> { typedef int type; };
template <class V> RLX_FN V rlx_from(V a, int lanes, int by) {
  return (V)__shfl_xor_sync(0xffffffffu, (typename rlx_wide_of<V>::type)a, by, lanes);
}
template <class V> RLX_FN V rlx_up(V a, int lanes, int by) {
  return (V)__shfl_up_sync(0xffffffffu, (typename rlx_wide_of<V>::type)a, by, lanes);
}

/* op over the values of the team, in an order that depends on T alone; every thread gets the result. */
template <int T, class V, class F> RLX_FN V rlx_reduce(V a, F op) {
  constexpr int lanes = T < 32 ? T : 32;
  #pragma unroll
  for (int by = lanes / 2; by > 0; by /= 2) a = op(a, rlx_from(a, lanes, by));
  if constexpr (T > 32) {
    constexpr int warps = T / 32;
    __shared__ V parts[warps];
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = a;
    __syncthreads();
    a = parts[threadIdx.x % warps];
    #pragma unroll
    for (int by = warps / 2; by > 0; by /= 2) a = op(a, rlx_from(a, 32, by));
  }
  return a;
}

/* The combination of the values of all earlier threads of the team, `start` first; `total` becomes that of all of them. */
template <int T, class V, class F> RLX_FN V rlx_scan(V a, V& total, F op) {
  constexpr int lanes = T < 32 ? T : 32;
  const int lane = threadIdx.x % lanes;
  V sum = a;
  #pragma unroll
  for (int by = 1; by < lanes; by *= 2) {
    const V below = rlx_up(sum, lanes, by);
    if (lane >= by) sum = op(below, sum);
  }
  V before = rlx_up(sum, lanes, 1), start = total;
  if constexpr (T > 32) {
    constexpr int warps = T / 32;
    __shared__ V parts[warps];
    __syncthreads();
    if (lane == 31) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int w = 0; w < threadIdx.x / 32; w++) start = op(start, parts[w]);
    for (int w = 0; w < warps; w++) total = op(total, parts[w]);
  } else {
    total = op(total, (V)__shfl_sync(0xffffffffu, (typename rlx_wide_of<V>::type)sum, lanes - 1, lanes));
  }
  return lane == 0 ? start : op(start, before);
}

/* The same where the threads of a team are the lanes of equal number of T warps. */
template <int T, class V, class F> RLX_FN V rlx_reduce_down(V a, F op) {
  __shared__ V parts[T][32];
  const int lane = threadIdx.x % 32;
  __syncthreads();
  parts[threadIdx.x / 32][lane] = a;
  __syncthreads();
  a = parts[0][lane];
  for (int w = 1; w < T; w++) a = op(a, parts[w][lane]);
  return a;
}
template <int T, class V, class F> RLX_FN V rlx_scan_down(V a, V& total, F op) {
  __shared__ V parts[T][32];
  const int lane = threadIdx.x % 32;
  __syncthreads();
  parts[threadIdx.x / 32][lane] = a;
  __syncthreads();
  V start = total;
  for (int w = 0; w < T; w++) {
    if (w == threadIdx.x / 32) start = total;
    total = op(total, parts[w][lane]);
  }
  return start;
}
/* Memory of a point whose neighbours are those of the lanes of a warp. */
template <class E> struct rlx_spaced {
  E* at;
  __device__ E& operator[](rlx_index i) const { return at[i * 32]; }
};

/* V consecutive elements at an address that is a multiple of their bytes (of 16, if they are more). */
template <int N> struct rlx_chunk;
template <> struct rlx_chunk<1> { typedef unsigned char type; };
template <> struct rlx_chunk<2> { typedef unsigned short type; };
template <> struct rlx_chunk<4> { typedef unsigned int type; };
template <> struct rlx_chunk<8> { typedef uint2 type; };
template <> struct rlx_chunk<16> { typedef uint4 type; };
template <int V, class E> RLX_FN void rlx_fetch(E (&out)[V], const E* at) {
  constexpr int bytes = V * sizeof(E) < 16 ? V * sizeof(E) : 16;
  typedef typename rlx_chunk<bytes>::type chunk;
  #pragma unroll
  for (int n = 0; n < V * (int)sizeof(E) / bytes; n++) {
    const chunk got = ((const chunk*)at)[n];
    memcpy((char*)out + n * bytes, &got, bytes);
  }
}
/* The same for elements that no other block reads: a load that stays where it stands in the program. */
template <int V, class E> RLX_FN void rlx_stream(E (&out)[V], const E* at) {
  if constexpr (V * sizeof(E) == 16) {
    uint4 got;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "l"(at));
    memcpy(out, &got, 16);
  } else {
    rlx_fetch<V>(out, at);
  }
}
template <int V, class E> RLX_FN void rlx_put(E* at, const E (&values)[V]) {
  constexpr int bytes = V * sizeof(E) < 16 ? V * sizeof(E) : 16;
  typedef typename rlx_chunk<bytes>::type chunk;
  #pragma unroll
  for (int n = 0; n < V * (int)sizeof(E) / bytes; n++) {
    chunk put;
    memcpy(&put, (const char*)values + n * bytes, bytes);
    ((chunk*)at)[n] = put;
  }
}

/* The first extreme element: its value and position (-1: none yet). NaN beats every number. */
template <class V> struct rlx_place { V value; rlx_index at; };
template <class V> RLX_FN rlx_place<V> rlx_from(rlx_place<V> a, int lanes, int by) {
  return {rlx_from(a.value, lanes, by), rlx_from(a.at, lanes, by)};
}
/* The next element of the same thread, after all that `a` is of. */
template <bool LARGEST, class V> RLX_FN void rlx_next(rlx_place<V>& a, V value, rlx_index at) {
  const bool worse = LARGEST ? value <= a.value : a.value <= value;
  if (a.at < 0 || (!worse && a.value == a.value)) a = {value, at};
}
template <bool LARGEST, class V> RLX_FN rlx_place<V> rlx_first(rlx_place<V> a, rlx_place<V> b) {
  if (a.at < 0 || b.at < 0) return b.at < 0 ? a : b;
  const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
  const bool tie = (nan_a && nan_b) || a.value == b.value;
  if (tie) return a.at < b.at ? a : b;
  if (nan_a || nan_b) return nan_a ? a : b;
  return (LARGEST ? b.value > a.value : b.value < a.value) ? b : a;
}

/* Asynchronous copies of N bytes to shared memory, zeros where not `inside`. They are waited for in groups: all but the last K. */
template <int N> RLX_FN void rlx_copy(float* to, const float* from, bool inside) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  if constexpr (N == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside ? 16 : 0) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(N), "r"(inside ? N : 0) : "memory");
}
RLX_FN void rlx_copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int K> RLX_FN void rlx_copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(K) : "memory"); }


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
template <class V> RLX_FN V rlx_from_lane(V a, int lane) { return (V)__shfl_sync(0xffffffffu, (typename rlx_wide_of<V>::type)a, lane); }

/* The least and the greatest, NaN if either is. */
template <class V> RLX_FN V rlx_min(V a, V b) { return a != a ? a : b < a || b != b ? b : a; }
template <class V> RLX_FN V rlx_max(V a, V b) { return a != a ? a : b > a || b != b ? b : a; }
RLX_FN float rlx_min(float a, float b) { float out; asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b)); return out; }
RLX_FN float rlx_max(float a, float b) { float out; asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b)); return out; }

/* A barrier of the T threads of a team, which may be fewer than those of the block. */
template <int T> RLX_FN void rlx_sync() {
  if constexpr (T <= 32) __syncwarp();
  else asm volatile("bar.sync 0, %0;" ::"n"(T) : "memory");
}

/* op over the values of the team, in an order that depends on T alone; every thread gets the result. */
template <int T, class V, class F> RLX_FN V rlx_reduce(V a, F op) {
  constexpr int lanes = T < 32 ? T : 32;
  #pragma unroll
  for (int by = lanes / 2; by > 0; by /= 2) a = op(a, rlx_from(a, lanes, by));
  if constexpr (T > 32) {
    constexpr int warps = T / 32;
    __shared__ V parts[warps];
    rlx_sync<T>();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = a;
    rlx_sync<T>();
    if constexpr ((warps & (warps - 1)) == 0) {
      a = parts[threadIdx.x % warps];
      #pragma unroll
      for (int by = warps / 2; by > 0; by /= 2) a = op(a, rlx_from(a, 32, by));
    } else {
      a = parts[0];
      #pragma unroll
      for (int warp = 1; warp < warps; warp++) a = op(a, parts[warp]);
    }
  }
  return a;
}

/* The sum of `own` over the threads of the team before this one, and over `all` of them. */
template <int T> RLX_FN int rlx_chosen_before(int own, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = rlx_up(before, 32, by);
    if (lane >= by) before += below;
  }
  all = rlx_from_lane(before, 31);
  before -= own;
  if constexpr (T > 32) {
    __shared__ int counts[T / 32];
    rlx_sync<T>();
    if (lane == 0) counts[warp] = all;
    rlx_sync<T>();
    all = 0;
    #pragma unroll
    for (int w = 0; w < T / 32; w++) {
      before += w < warp ? counts[w] : 0;
      all += counts[w];
    }
  }
  return before;
}

/* Values of adjacent columns. */
template <class T, int N> struct rlx_several { T at[N]; };

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

/* A line of which each of PARTS teams has a part. Each tells the others the total of its part, in words of 32 bits of a value and a
   mark, and adds those of the parts before: of its group of parts by a sum in a fixed order, of earlier groups as told by the last
   team of the group in front. Words are zero between launches. A block waits for blocks that started earlier only. Along a line of more
   parts than a team has threads, one warp of a block hears for all, and groups of 32 have totals, too, which one part more waits for:
   of all blocks that wait, each asks for few words, or none of them would be told in time. */
template <int T, int LANES, int PARTS> struct rlx_line {
  static constexpr int WARPS = LANES > 1 ? T : T / 32, GROUP = LANES > 1 && PARTS > 4 * T ? 4 * T : T; /* parts of a group */
  unsigned long long* words; /* `size` of them, of which the last one counts the blocks that have heard all they need */
  int size, part;
  unsigned heard = 0; /* of thread 0: those before */

  static __device__ int me() { return LANES > 1 ? threadIdx.x / 32 : threadIdx.x % T; }
  static __device__ int column() { return LANES > 1 ? threadIdx.x % 32 : 0; }
  template <class V> __device__ void tell(int slot, V value) {
    uint32_t bits[(sizeof(V) + 3) / 4] = {};
    memcpy(bits, &value, sizeof(V));
    #pragma unroll
    for (int n = 0; n < (sizeof(V) + 3) / 4; n++)
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(words + ((slot * (int)((sizeof(V) + 3) / 4) + n) * LANES + column())), "l"((1ull << 32) | bits[n]) : "memory");
  }
  template <class V> __device__ V hear(int slot) {
    constexpr int WORDS = (sizeof(V) + 3) / 4;
    uint32_t bits[WORDS];
    for (bool told = false; !told;) { /* all words are on their way at once */
      unsigned long long got[WORDS];
      #pragma unroll
      for (int n = 0; n < WORDS; n++)
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(got[n]) : "l"(words + ((slot * WORDS + n) * LANES + column())) : "memory");
      told = true;
      #pragma unroll
      for (int n = 0; n < WORDS; n++) told = told && got[n] >> 32, bits[n] = (uint32_t)got[n];
    }
    V value;
    memcpy(&value, bits, sizeof(V));
    return value;
  }

  /* `sums`: for each round the sum of this thread's elements, then the total before them. The rounds of a warp are adjacent. */
  template <int R, class V, class F> __device__ void scan(V (&sums)[R], V start, V none, F op) {
    const int lane = threadIdx.x % 32;
    V own = none;
    #pragma unroll
    for (int n = 0; n < R; n++) {
      V sum = sums[n], before = none;
      if constexpr (LANES == 1) {
        #pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const V below = rlx_up(sum, 32, by);
          if (lane >= by) sum = op(below, sum);
        }
        before = rlx_up(sum, 32, 1);
        if (lane == 0) before = none;
        sum = rlx_from_lane(sum, 31);
      }
      sums[n] = op(own, before);
      own = op(own, sum);
    }
    V mine = none;
    if constexpr (WARPS > 1) {
      __shared__ V totals[WARPS][LANES];
      totals[threadIdx.x / 32][column()] = own;
      __syncthreads();
      own = none;
      for (int w = 0; w < WARPS; w++) {
        if (w == threadIdx.x / 32) mine = own;
        own = op(own, totals[w][column()]);
      }
    }
    if constexpr (PARTS > 1) start = before(start, own, none, op);
    start = op(start, mine);
    #pragma unroll
    for (int n = 0; n < R; n++) sums[n] = op(start, sums[n]);
  }
  /* `start` and all earlier parts, where this one sums to `own`. */
  template <class V, class F> __device__ V before(V start, V own, V none, F op) {
    if constexpr (LANES == 1 && PARTS > T) return before_in_line(start, own, none, op);
    if (me() == 0) tell(part, own);
    const int group = part / GROUP, earlier = part % GROUP;
    V sum = none;
    for (int slot = me(); slot < earlier; slot += T) sum = op(sum, hear<V>(group * GROUP + slot));
    if (group > 0) start = hear<V>(PARTS + group);
    sum = reduce(sum, op);
    leave();
    start = op(start, sum);
    if (earlier == GROUP - 1 && me() == 0) tell(PARTS + group + 1, op(start, own));
    return start;
  }

  template <class V, class F> __device__ V before_in_line(V start, V own, V none, F op) {
    constexpr int GROUPS = (PARTS + 31) / 32;
    __shared__ V heard_start;
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, group = part / 32, earlier = part % 32, many = group / 32, groups = group % 32;
      if (lane == 0) tell(part, own);
      V sum = rlx_reduce<32>(lane < earlier ? hear<V>(group * 32 + lane) : none, op);
      if (earlier == 31 && lane == 0) tell(PARTS + group, op(sum, own));
      sum = op(rlx_reduce<32>(lane < groups ? hear<V>(PARTS + many * 32 + lane) : none, op), sum);
      if (many > 0) start = hear<V>(PARTS + GROUPS + many);
      start = op(start, sum);
      if (earlier == 31 && groups == 31 && lane == 0) tell(PARTS + GROUPS + many + 1, op(start, own));
      if (lane == 0) heard_start = start;
    }
    __syncthreads();
    leave();
    return heard_start;
  }

  /* The values of all parts, combined. `first`: of the words. */
  template <class V, class F> __device__ V all(int first, V own, V none, F op) {
    give(first, own);
    return gather(first, none, op);
  }
  template <class V> __device__ void give(int first, V own) {
    rlx_line here = {words + first, 0, part};
    if (me() == 0) here.tell(part, own);
  }
  template <class V, class F> __device__ V gather(int first, V none, F op) {
    rlx_line here = {words + first, 0, part};
    V sum = none;
    for (int slot = me(); slot < PARTS; slot += T) sum = op(sum, here.template hear<V>(slot));
    return reduce(sum, op);
  }
  /* Whether this block is the last of its line to come here, after it gave its values: the others are not needed any more. */
  __device__ bool last() {
    leave();
    return __syncthreads_or(threadIdx.x == 0 && heard == PARTS - 1);
  }
  template <class V, class F> static __device__ V reduce(V a, F op) {
    if constexpr (LANES > 1) return rlx_reduce_down<T>(a, op);
    else return rlx_reduce<T>(a, op);
  }

  /* After a barrier behind the last word that is heard; its latency is that of the stores in front of `forget`, by which the last block
     of the line clears the words. */
  __device__ void leave() {
    if (threadIdx.x == 0) heard = atomicAdd((unsigned*)(words + size - 1), 1u);
  }
  __device__ void forget() {
    if (threadIdx.x >= 32 || __shfl_sync(0xffffffffu, heard, 0) != PARTS - 1) return;
    for (int n = threadIdx.x; n < size - 1; n += 32) words[n] = 0;
    if (threadIdx.x == 0) *(unsigned*)(words + size - 1) = 0;
  }
};

RLX_FN void rlx_await_bytes(uint32_t barrier, uint32_t odd) {
  for (uint32_t done = 0; !done;)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(odd) : "memory");
}

/* The same where the PARTS blocks are a cluster: each writes its totals into the shared memory of the others, whose barriers count the
   bytes. (A barrier of the cluster that orders memory would wait for all memory of the GPU.) SIZE: words of a line. */
template <int T, int LANES, int PARTS, int SIZE> struct rlx_cluster {
  static constexpr int EACH = 4 * LANES * PARTS, SITES = SIZE / EACH; /* words of a total, as of rlx_line; totals */
  int part;
  uint32_t ready = 0; /* barriers, of 8 bytes */

  /* Before the others write here; `join` before this block writes there, at its first totals. */
  __device__ void start() {
    __shared__ __align__(8) uint64_t barriers[SITES];
    ready = (uint32_t)__cvta_generic_to_shared(barriers);
    if (threadIdx.x == 0) {
      for (int n = 0; n < SITES; n++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready + 8 * n) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  }
  __device__ void join() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
  /* op over the values of all threads of the line, in an order that is the same in all of them. */
  template <class V, class F> __device__ V all(int first, V own, V none, F op) {
    const int site = first / EACH;
    constexpr int WARPS = LANES > 1 ? T : T / 32, WORDS = (sizeof(V) + 3) / 4;
    __shared__ V totals[WARPS][LANES];
    __shared__ uint32_t told[PARTS][LANES][WORDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = LANES > 1 ? lane : 0;
    const uint32_t mine = ready + 8 * site;
    if constexpr (LANES == 1) own = rlx_reduce<32>(own, op);
    totals[warp][column] = own;
    if (site == 0) join();
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mine), "r"(PARTS * LANES * WORDS * 4) : "memory");
    __syncthreads();
    if constexpr (LANES == 1) {
      if (warp == 0) {
        own = rlx_reduce<WARPS>(totals[lane % WARPS][0], op);
        if (lane < PARTS) tell(own, told[part][0], mine, lane);
      }
    } else {
      for (int block = warp; block < PARTS; block += WARPS) {
        V sum = totals[0][lane];
        for (int w = 1; w < WARPS; w++) sum = op(sum, totals[w][lane]);
        tell(sum, told[part][lane], mine, block);
      }
    }
    rlx_await_bytes(mine, 0);
    V sum = none;
    #pragma unroll
    for (int block = 0; block < PARTS; block++) {
      V value;
      memcpy(&value, told[block][column], sizeof(V));
      sum = op(sum, value);
    }
    return sum;
  }
  template <class V> static __device__ void tell(V value, const uint32_t* at, uint32_t barrier, int block) {
    uint32_t bits[(sizeof(V) + 3) / 4] = {}, there, then;
    memcpy(bits, &value, sizeof(V));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((uint32_t)__cvta_generic_to_shared(at)), "r"(block));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(then) : "r"(barrier), "r"(block));
    for (int n = 0; n < (sizeof(V) + 3) / 4; n++)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there + 4 * n), "r"(bits[n]), "r"(then) : "memory");
  }
  __device__ void leave() {}
  __device__ void forget() {}
};

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
  } else if constexpr (V * sizeof(E) == 8) {
    uint2 got;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(got.x), "=r"(got.y) : "l"(at));
    memcpy(out, &got, 8);
  } else {
    rlx_fetch<V>(out, at);
  }
}
/* Elements that are read again: registers keep them, and not the numbers that were computed from them. */
template <int R, int V, class E> RLX_FN void rlx_again(E (&held)[R][V]) {
  uint32_t words[R][V * sizeof(E) / 4];
  memcpy(words, held, sizeof(held));
  #pragma unroll
  for (int n = 0; n < R * V * (int)sizeof(E) / 4; n++) asm volatile("" : "+r"((&words[0][0])[n]));
  memcpy(held, words, sizeof(held));
}
/* Vectors of a row, all of whose loads should be on their way before one is used: the first word of each waits for the last vector,
   or the assembler, to save registers, would use the first vectors before it loads the last. `none` is 0, which it does not know. */
template <int R, int V, class E> RLX_FN void rlx_together(E (&held)[R][V], uint32_t none) {
  static_assert(V * sizeof(E) >= 4, "a vector has a word");
  uint32_t last, word;
  memcpy(&last, held[R - 1], 4);
  #pragma unroll
  for (int n = 0; n + 1 < R; n++) memcpy(&word, held[n], 4), word |= last & none, memcpy(held[n], &word, 4);
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

/* Stores those of V consecutive elements, from element `first` of a line of `count` on, that are in the line. */
template <int V, class E> RLX_FN void rlx_put_inside(E* at, const E (&values)[V], rlx_index first, rlx_index count) {
  if (first >= 0 && first + V <= count) return rlx_put<V>(at, values);
  #pragma unroll
  for (int v = 0; v < V; v++) if (first + v >= 0 && first + v < count) at[v] = values[v];
}

/* The first extreme element: its value and position, which may be negative. NaN beats every number. */
constexpr rlx_index RLX_NOWHERE = -(1 << 30);
template <class V> struct rlx_place { V value; rlx_index at; };
template <class V> RLX_FN rlx_place<V> rlx_from(rlx_place<V> a, int lanes, int by) {
  return {rlx_from(a.value, lanes, by), rlx_from(a.at, lanes, by)};
}
/* The next element of the same thread, after all that `a` is of. */
template <bool LARGEST, class V> RLX_FN void rlx_next(rlx_place<V>& a, V value, rlx_index at) {
  const bool worse = LARGEST ? value <= a.value : a.value <= value;
  if (a.at == RLX_NOWHERE || (!worse && a.value == a.value)) a = {value, at};
}
/* The same for adjacent elements, `at` the first of them: which one it was is found by rlx_is, once it is known to be the best. */
template <bool LARGEST, int N, class V> RLX_FN void rlx_next(rlx_place<V>& a, const V (&values)[N], rlx_index at) {
  V best = values[0];
  #pragma unroll
  for (int v = 1; v < N; v++) best = LARGEST ? rlx_max(best, values[v]) : rlx_min(best, values[v]);
  rlx_next<LARGEST>(a, best, at);
}
template <class V> RLX_FN bool rlx_is(V a, V best) { return a == best || (a != a && best != best); }
template <bool LARGEST, class V> RLX_FN rlx_place<V> rlx_first(rlx_place<V> a, rlx_place<V> b) {
  if (a.at == RLX_NOWHERE || b.at == RLX_NOWHERE) return b.at == RLX_NOWHERE ? a : b;
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

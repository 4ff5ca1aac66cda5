
/* Rows of clusters that stay: a thread copies its own elements of parameters and of rows, N at once, and waits for no other thread
   before it reads them. */
template <int N, class E> RLX_FN void rlx_bring(E* to, const E* from) {
  constexpr int bytes = N * sizeof(E) < 16 ? N * sizeof(E) : 16;
  #pragma unroll
  for (int n = 0; n < N * (int)sizeof(E) / bytes; n++) rlx_copy<bytes>((float*)((char*)to + n * bytes), (const float*)((const char*)from + n * bytes), true);
}
/* Two words for a place in the shared memory of a block of the cluster, which counts their bytes. */
RLX_FN void rlx_tell(uint32_t place, uint32_t a, uint32_t b, uint32_t ready) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(place), "r"(a), "r"(b), "r"(ready) : "memory");
}
struct rlx_pair { float first, second; };

/* Values of all threads of the PARTS blocks of a cluster, combined again and again. A block has VECTORS vectors of SIZE elements of a
   row, the last one LAST. Each warp writes its own value into the shared memory of every block, so that no barrier of a block is on
   the way. There are two places for them: a warp that comes to the next but one has heard all warps at the next one, and they had
   read those here before. */
template <int T, int PARTS, int VECTORS, int LAST, int SIZE> struct rlx_staying {
  static constexpr int WARPS = T / 32, ALL = PARTS * WARPS, EACH = (ALL + 31) / 32;
  int part;
  unsigned* rows; /* how many rows have been drawn, and how many clusters are done */
  unsigned begun; /* rows that clusters have without drawing them */
  unsigned drawn = 0, next = 0; /* rows: the one that thread 0 of the first block has drawn, and what all threads have heard of it */
  uint32_t ready = 0, told = 0, count = 0; /* addresses of barriers, of 8 bytes, and of values; how often values were combined */
  float mine, by_mine, elements[EACH]; /* elements of a thread, and of the warps whose values it reads */
  double by_warp; /* so that the mean of equal elements is what they are */

  __device__ void start() {
    __shared__ __align__(8) uint64_t barriers[2];
    __shared__ __align__(8) uint2 values[2][ALL + 1];
    ready = (uint32_t)__cvta_generic_to_shared(barriers), told = (uint32_t)__cvta_generic_to_shared(values);
    if (threadIdx.x == 0) {
      for (int n = 0; n < 2; n++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready + 8 * n) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    const int vectors = part == PARTS - 1 ? LAST : VECTORS, me = threadIdx.x, warp = of_warp(part, me / 32);
    const int own = vectors / T + (me < vectors % T);
    mine = own * SIZE, by_mine = 1.f / (own ? own * SIZE : 1), by_warp = 1. / (warp ? warp : 1);
    for (int n = 0; n < EACH; n++) elements[n] = n * 32 + me % 32 < ALL ? of_warp((n * 32 + me % 32) / WARPS, (n * 32 + me % 32) % WARPS) : 0;
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
  /* The next but one row of this cluster: one that no cluster has yet. So none waits for the slowest at the end. */
  __device__ void draw() {
    if (part == 0 && threadIdx.x == 0) drawn = begun + atomicAdd(rows, 1);
  }
  __device__ void forget(unsigned clusters) {
    if (part != 0 || threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(rows + 1, 1) == clusters - 1) rows[0] = rows[1] = 0;
  }
  static __device__ int of_warp(int block, int warp) {
    const int vectors = block == PARTS - 1 ? LAST : VECTORS, rest = vectors % T - 32 * warp;
    return (vectors / T * 32 + (rest < 0 ? 0 : rest < 32 ? rest : 32)) * SIZE;
  }
  /* Where the values of all warps are, each of two words. */
  __device__ uint32_t heard(const uint32_t (&own)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t mine = ready + 8 * (count & 1), here = told + 8 * (ALL + 1) * (count & 1), odd = count++ >> 1 & 1;
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mine), "r"(8 * ALL + 8) : "memory");
    const unsigned row = warp == 0 ? __shfl_sync(~0u, drawn, 0) : 0;
    if (lane < PARTS) {
      uint32_t there, then;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here + 8 * (part * WARPS + warp)), "r"(lane));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(then) : "r"(mine), "r"(lane));
      rlx_tell(there, own[0], own[1], then);
      if (part == 0 && warp == 0) rlx_tell(there + 8 * ALL, row, 0, then);
    }
    rlx_await_bytes(mine, odd);
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(next) : "r"(here + 8 * ALL) : "memory");
    return here;
  }
  static __device__ uint2 value_at(uint32_t here, int n) {
    uint2 got;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(got.x), "=r"(got.y) : "r"(here + 8 * (n * 32 + threadIdx.x % 32)) : "memory");
    return got;
  }
  template <class V, class F> __device__ V all(int, V own, V none, F op) {
    static_assert(sizeof(V) <= 8, "a value has two words");
    uint32_t bits[2] = {};
    own = rlx_reduce<32>(own, op);
    memcpy(bits, &own, sizeof(V));
    const uint32_t here = heard(bits);
    V sum = none;
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      if (ALL % 32 && n * 32 + threadIdx.x % 32 >= ALL) break;
      const uint2 got = value_at(here, n);
      V value;
      memcpy(&value, &got, sizeof(V));
      sum = op(sum, value);
    }
    return rlx_reduce<32>(sum, op);
  }
  /* The sum of elements, and that of squares of what they are away from their mean. Those of a thread are `away` from its first one in
     all, `squares` the squares of that. The first one is as far from the mean of the row as some elements are, so that no more digits
     are lost than by the sum of so few squares. */
  __device__ rlx_pair moments(float first, float away, float squares) {
    const auto add = [](double a, double b) -> double { return a + b; };
    const auto near = [](float a, float b) -> float { return a + b; };
    const float mean = (float)(rlx_reduce<32>((double)mine * first + away, add) * by_warp);
    const float off = (first - mean) + away * by_mine, whole = __fmaf_rn(-away * by_mine, away, squares);
    const float own = rlx_reduce<32>(__fmaf_rn(mine * off, off, squares < INFINITY ? whole : squares), near);
    const uint32_t here = heard({__float_as_uint(mean), __float_as_uint(own)});
    uint2 got[EACH];
    double sum = 0;
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      got[n] = ALL % 32 && n * 32 + threadIdx.x % 32 >= ALL ? make_uint2(0, 0) : value_at(here, n);
      sum += (double)elements[n] * __uint_as_float(got[n].x);
    }
    rlx_pair all = {(float)rlx_reduce<32>(sum, add), 0};
    const float middle = all.first / (float)(((PARTS - 1) * VECTORS + LAST) * SIZE);
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const float off = __uint_as_float(got[n].x) - middle;
      all.second += __fmaf_rn(elements[n] * off, off, __uint_as_float(got[n].y));
    }
    all.second = rlx_reduce<32>(all.second, near);
    return all;
  }
  /* A number that is near the greatest of a warp. */
  static __device__ float near(float& top) {
    top = rlx_reduce<32>(top, [](float a, float b) -> float { return rlx_max(a, b); });
    return top == -INFINITY ? 0 : top;
  }
  /* The greatest element, and the sum of exponentials of what all are away from it; those of a thread are `total` from `near`. */
  __device__ rlx_pair exponentials(float top, float near, float total) {
    const auto add = [](double a, double b) -> double { return a + b; };
    const auto most = [](float a, float b) -> float { return rlx_max(a, b); };
    const uint32_t here = heard({__float_as_uint(top), __float_as_uint((float)rlx_reduce<32>((double)total, add))});
    uint2 got[EACH];
    rlx_pair all = {-INFINITY, 0};
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      got[n] = ALL % 32 && n * 32 + threadIdx.x % 32 >= ALL ? make_uint2(0xff800000u, 0) : value_at(here, n);
      all.first = rlx_max(all.first, __uint_as_float(got[n].x));
    }
    all.first = rlx_reduce<32>(all.first, most);
    double sum = 0;
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const float of = __uint_as_float(got[n].y);
      sum += of == 0 ? 0 : (double)of * expf(__uint_as_float(got[n].x) - all.first);
    }
    all.second = (float)rlx_reduce<32>(sum, add);
    return all;
  }
  __device__ void leave() {}
};

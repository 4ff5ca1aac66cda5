
/* Products of tiles in f32 by multiply-adds. The constants before this file: a block computes ROWS x COLUMNS sums, each of its
   GROUPS groups of threads from its share of every slice of DEPTH elements of the summed axis; a thread has DOWN x ACROSS sums.
   PARTS blocks of a cluster share the summed axis. STAGES slices are in shared memory, the summed axis outermost. */
constexpr int MEMBERS = ROWS / DOWN * (COLUMNS / ACROSS), THREADS = MEMBERS * GROUPS, WARPS = THREADS / 32, OWN = DEPTH / GROUPS;

/* An asynchronous copy of N bytes over constant distances in bytes, zeros where not `inside`. */
template <int N, int TO, int FROM> RLX_FN void rlx_copy_by(uint32_t to, const float* from, bool inside) {
  if constexpr (N == 16) asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16, %4;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM), "r"(inside ? 16 : 0) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0 + %2], [%1 + %3], 4, %4;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM), "r"(inside ? 4 : 0) : "memory");
}

/* The slices of an operand that is SIZE rows (or columns) of a block wide, of EXTENT in all, SIDE elements apart; elements along
   the summed axis are STEP apart. WIDE: adjacent rows are copied by 4. A thread's copies are at constant distances. */
template <int SIZE, rlx_index EXTENT, rlx_index SIDE, rlx_index STEP, rlx_index LENGTH, bool WIDE> struct rlx_slices {
  static constexpr int EACH = WIDE ? 4 : 1, PITCH = SIZE + 4, STAGE = DEPTH * PITCH, ALL = SIZE / EACH * DEPTH;
  static constexpr int LINE = SIZE / EACH, PACKS = DEPTH / 8, LINES = THREADS / LINE; /* lines at once */
  static constexpr bool ALONG = STEP == 1 && !WIDE; /* a warp copies 8 elements of 4 rows: whole sectors, and no bank twice */
  static constexpr int COUNT = ALONG || !LINES ? (ALL + THREADS - 1) / THREADS : (DEPTH + LINES - 1) / (LINES ? LINES : 1);
  static_assert(!ALONG || WARPS % PACKS == 0 || PACKS % WARPS == 0, "warps share the packs of a slice evenly");
  const float* from;
  int place, depth;

  RLX_FN constexpr int place_of(int n) {
    if (ALONG) return WARPS >= PACKS ? n * (4 * WARPS / PACKS) : n / (PACKS / WARPS) * 4;
    return THREADS >= LINE ? 0 : n % (LINE / THREADS) * THREADS * EACH;
  }
  RLX_FN constexpr int depth_of(int n) {
    if (ALONG) return WARPS >= PACKS ? 0 : n % (PACKS / WARPS) * WARPS * 8;
    return THREADS >= LINE ? n * (THREADS / LINE) : n / (LINE / THREADS);
  }
  __device__ __forceinline__ rlx_slices(const float* base, rlx_index first, rlx_index k0) {
    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    if (ALONG) place = warp / PACKS * 4 + lane / 8, depth = warp % PACKS * 8 + lane % 8;
    else place = me % LINE * EACH, depth = LINES && me >= LINES * LINE ? DEPTH : me / LINE; /* threads of no whole line copy nothing */
    from = base + (first + place) * SIDE + (k0 + depth) * STEP;
  }
  /* Start the copies of a slice, of which `left` elements of the summed axis exist, and go to the next one. */
  __device__ __forceinline__ void fetch(float* to, rlx_index left) {
    copy<0>((uint32_t)__cvta_generic_to_shared(to + depth * PITCH + place), left);
    from += DEPTH * STEP;
  }
  template <int N> __device__ __forceinline__ void copy(uint32_t to, rlx_index left) {
    if constexpr (N < COUNT) {
      constexpr int by = place_of(N), down = depth_of(N), at = 4 * (down * PITCH + by);
      constexpr long long distance = 4ll * (by * SIDE + down * STEP);
      constexpr bool fits = EXTENT >= SIZE && distance < 1 << 23; /* into an instruction */
      const bool inside = LENGTH % DEPTH == 0 || depth + down < left;
      if ((ALL % THREADS == 0 && (ALONG || !LINES || THREADS % LINE == 0)) || (place + by < SIZE && depth + down < DEPTH)) {
        if constexpr (fits) {
          rlx_copy_by<4 * EACH, at, distance>(to, from, inside);
        } else { /* what is read twice is not used */
          const rlx_index side = EXTENT >= SIZE || place + by + EACH <= EXTENT ? by : EXTENT - EACH - place;
          rlx_copy_by<4 * EACH, at, 0>(to, from + side * SIDE + down * STEP, inside);
        }
      }
      copy<N + 1>(to, left);
    }
  }
};

/* Chunks of 4, BETWEEN elements apart. */
template <int BETWEEN, int N> RLX_FN void rlx_chunks(float (&to)[N], const float* from) {
  #pragma unroll
  for (int n = 0; n < N; n += 4) {
    const float4 got = *(const float4*)(from + n / 4 * BETWEEN);
    to[n] = got.x, to[n + 1] = got.y, to[n + 2] = got.z, to[n + 3] = got.w;
  }
}

/* The sums of `steps` slices, of which `length` elements exist. The operands of the next products are loaded during each.
   `row`, `column`: the thread's first ones. */
template <class A, class B> RLX_FN void rlx_multiply(float (&sum)[DOWN][ACROSS], A a, B b, float* ring, int row, int column, int steps, rlx_index length) {
  constexpr int STAGE = A::STAGE + B::STAGE;
  const auto fetch = [&](int stage, int step) {
    if (step < steps) {
      float* const to = ring + stage * STAGE;
      a.fetch(to, length - step * DEPTH), b.fetch(to + A::STAGE, length - step * DEPTH);
    }
    rlx_copies_end();
  };
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s, s);
  int stage = 0, next = STAGES - 1;
  float x[2][DOWN], y[2][ACROSS];
  const int skip = GROUPS == 1 ? 0 : threadIdx.x / MEMBERS * OWN;
  const float* left = ring + skip * A::PITCH + row;
  const float* right = ring + A::STAGE + skip * B::PITCH + column;
  rlx_copies_wait<STAGES - 2>();
  __syncthreads();
  rlx_chunks<16>(x[0], left), rlx_chunks<32>(y[0], right);
  #pragma unroll 1
  for (int step = 0; step < steps; step++) {
    #pragma unroll
    for (int d = 0; d < OWN; d++) {
      if (d == OWN - 1) {
        rlx_copies_wait<STAGES - 2>();
        __syncthreads(); /* the next slice is there, and this one is done with */
        const int by = stage == STAGES - 1 ? (1 - STAGES) * STAGE : STAGE;
        left += by, right += by, stage = stage == STAGES - 1 ? 0 : stage + 1;
      }
      rlx_chunks<16>(x[(d + 1) % 2], left + (d + 1) % OWN * A::PITCH);
      rlx_chunks<32>(y[(d + 1) % 2], right + (d + 1) % OWN * B::PITCH);
      if (d == 0) fetch(next, step + STAGES - 1), next = next == STAGES - 1 ? 0 : next + 1;
      #pragma unroll
      for (int r = 0; r < DOWN; r++)
        #pragma unroll
        for (int t = 0; t < ACROSS; t++) {
          const int s = r % 2 ? ACROSS - 1 - t : t; /* back and forth: each product shares an operand with the one before */
          sum[r][s] = fmaf(x[d % 2][r], y[d % 2][s], sum[r][s]);
        }
    }
  }
  rlx_copies_wait<0>();
}

/* FULL tiles of a block each; behind them SHARING blocks share the STEPS slices of each of LEFT tiles evenly. */
struct rlx_piece { int tile, begin, end; }; /* slices [begin, end) of a tile */
template <int FULL, int LEFT, int SHARING, int STEPS> struct rlx_tiles {
  RLX_FN int first(int block) { return (int)((long long)LEFT * STEPS * (block - FULL) / SHARING); } /* slice of all leftover ones */

  /* The n-th piece of a block, the last one first, for which others may wait. Empty: there are no more. */
  RLX_FN rlx_piece piece(int block, int n) {
    if (block < FULL) return {block, 0, n ? 0 : STEPS};
    const int low = first(block), high = first(block + 1), tile = (high - 1) / STEPS - n, start = tile * STEPS;
    if (start + STEPS <= low) return {0, 0, 0};
    return {FULL + tile, low > start ? low - start : 0, high < start + STEPS ? high - start : STEPS};
  }

  /* Leaves the sums of a piece for the block that has its tile's last one, or adds what was left for this block, from the piece in
     front to the first one: it waits for blocks with lower numbers, which have been placed before. `counters`: 1 where sums are left.
     Returns true if this block's were. */
  RLX_FN bool join(float (&sum)[DOWN][ACROSS], const rlx_piece& piece, float4* scratch, unsigned* counters) {
    constexpr int EACH = DOWN * ACROSS / 4;
    if (piece.end < STEPS) {
      float4* const to = scratch + (size_t)(blockIdx.x - FULL) * (EACH * THREADS) + threadIdx.x;
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const float* const from = &sum[e / (ACROSS / 4)][e % (ACROSS / 4) * 4];
        __stcg(to + e * THREADS, make_float4(from[0], from[1], from[2], from[3]));
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(counters + (blockIdx.x - FULL)) : "memory");
      }
      return true;
    }
    const int start = (piece.tile - FULL) * STEPS;
    for (int block = blockIdx.x, low = start + piece.begin; low > start;) {
      low = first(--block);
      unsigned* const counter = counters + (block - FULL);
      if (threadIdx.x == 0) {
        unsigned there;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
        while (!there);
        *counter = 0;
      }
      __syncthreads();
      const float4* const from = scratch + (size_t)(block - FULL) * (EACH * THREADS) + threadIdx.x;
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const float4 got = __ldcg(from + e * THREADS);
        float* const to = &sum[e / (ACROSS / 4)][e % (ACROSS / 4) * 4];
        to[0] += got.x, to[1] += got.y, to[2] += got.z, to[3] += got.w;
      }
    }
    return false;
  }
};

/* Sums of several groups (and blocks of a cluster) meet in shared memory: [GROUPS][ROWS][COLUMNS]. */
RLX_FN void rlx_leave(const float (&sum)[DOWN][ACROSS], float* ring, int row, int column) {
  __syncthreads(); /* the slices are done with */
  float* const to = ring + threadIdx.x / MEMBERS * (ROWS * COLUMNS) + row * COLUMNS + column;
  #pragma unroll
  for (int r = 0; r < DOWN; r++)
    #pragma unroll
    for (int s = 0; s < ACROSS; s += 4)
      *(float4*)(to + (r % 4 + r / 4 * 16) * COLUMNS + s / 4 * 32) = make_float4(sum[r][s], sum[r][s + 1], sum[r][s + 2], sum[r][s + 3]);
  if (PARTS > 1) rlx_cluster_shares();
  else __syncthreads();
}
/* Chunks of N adjacent ones, of block `rank` of the cluster. */
template <int N> RLX_FN void rlx_of_block(float (&to)[N], const float* at, int rank) {
  if constexpr (PARTS == 1) return rlx_fetch<N>(to, at);
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((uint32_t)__cvta_generic_to_shared(at)), "r"(rank));
  if constexpr (N == 4) asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(there));
  else
    #pragma unroll
    for (int v = 0; v < N; v++) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(to[v]) : "r"(there + 4 * v));
}
/* Sums of adjacent elements in the order of the summed axis: of the groups of a block, then of the blocks. */
template <int N> RLX_FN void rlx_meet(float (&to)[N], const float* ring, int at) {
  float got[PARTS][GROUPS][N];
  #pragma unroll
  for (int p = 0; p < PARTS; p++)
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) rlx_of_block<N>(got[p][g], ring + g * (ROWS * COLUMNS) + at, p);
  #pragma unroll
  for (int v = 0; v < N; v++) {
    to[v] = 0;
    #pragma unroll
    for (int n = 0; n < PARTS * GROUPS; n++) to[v] += got[n / GROUPS][n % GROUPS][v];
  }
}

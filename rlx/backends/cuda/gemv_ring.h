/* A block's ring of weights that one warp fills and all others use (gemv_ring.py). */
/* A warp has read what it needs of a slot. */
RLX_FN void rlx_ring_leave(uint64_t* used, int lane) {
  __syncwarp();
  if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(rlx_ring_at(used)) : "memory");
}

/* The first statement of a block: its last warp copies `count` columns of K bytes, PITCH bytes apart, in pieces of COLUMNS columns and
   RUN bytes of each, with WINDOW pieces in flight. OTHER, if not zero: bytes to as many columns again, of which each piece has half of
   its own. True for that warp, when all copies have started. Only `early` ones do so before earlier kernels have ended, with EARLY
   pieces in flight until `waited`: behind more, what the kernel in front loads, and its end, would wait. */
template <int SLOTS, int EARLY, int WINDOW, int COLUMNS, int RUN, int K, long long PITCH, long long OTHER> RLX_FN bool rlx_ring_copies(
  unsigned char* ring, uint64_t* filled, uint64_t* used, volatile int* waited, const unsigned char* from, int count, bool early
) {
  constexpr int PARTS = (K + RUN - 1) / RUN, LAST = K - (PARTS - 1) * RUN, BOTH = OTHER ? 2 : 1, HALF = COLUMNS / BOTH;
  constexpr bool WHOLE = K == RUN && K == PITCH; /* the columns of a piece are adjacent in memory */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  rlx_start_next();
  if (warp == 8) rlx_ring_begin(filled, SLOTS, 8, lane), *waited = !early;
  __syncthreads();
  if (warp != 8) return false;
  if (!early) rlx_begin();
  const int pieces = (count + HALF - 1) / HALF * PARTS, half = lane / HALF, column = lane % HALF;
  #pragma unroll 1
  for (int i = 0, place = 0, round = 0, landed = 0; i < pieces; i++) {
    const int at = i / PARTS * HALF, part = i % PARTS, many = count - at < HALF ? count - at : HALF;
    const int bytes = part == PARTS - 1 ? LAST : RUN;
    if (round) rlx_ring_await(used + place, (round - 1) & 1);
    while (i - landed >= (*waited ? WINDOW : EARLY)) rlx_ring_await(filled + landed % SLOTS, landed / SLOTS & 1), landed++;
    unsigned char* const to = ring + place * COLUMNS * RUN;
    rlx_ring_expect(filled + place, BOTH * many * bytes, lane);
    __syncwarp();
    const unsigned char* const first = from + half * OTHER + (at + column) * PITCH + part * RUN;
    if (half < BOTH && (WHOLE ? column == 0 : column < many))
      rlx_ring_copy(to + lane * RUN, first, WHOLE ? many * bytes : bytes, filled + place, 0);
    if (++place == SLOTS) place = 0, round++;
  }
  return true;
}

static __device__ constexpr int rlx_ring_power(int n) { return n <= 1 ? 1 : 2 * rlx_ring_power((n + 1) / 2); }
/* The sums of N numbers over the lanes of a warp, N a power of two: lane n * (32 / N) gets number n. */
template <int BY = 16, int N> RLX_FN float rlx_sum_lanes(const float (&a)[N], int lane) {
  if constexpr (N > 1) {
    float half[N / 2];
    #pragma unroll
    for (int n = 0; n < N / 2; n++) {
      const float kept = lane & BY ? a[n + N / 2] : a[n], given = lane & BY ? a[n] : a[n + N / 2];
      half[n] = kept + rlx_from(given, 32, BY);
    }
    return rlx_sum_lanes<BY / 2>(half, lane);
  } else {
    float all = a[0];
    #pragma unroll
    for (int by = BY; by > 0; by /= 2) all += rlx_from(all, 32, by);
    return all;
  }
}

/* sums[warp][column][row]: over the elements x[row][q] of this thread by those of `count` columns, in pieces of COLUMNS of them for
   each team of WARPS warps. SPAN: columns of `sums`. */
template <int SLOTS, int COLUMNS, int WARPS, int K, int SPAN, class E, int M, int AHEAD, int SIZE, class F>
RLX_FN void rlx_ring_sums(
  const unsigned char* ring, uint64_t* filled, uint64_t* used, int& place, int& phase, const float (&x)[M][AHEAD][SIZE],
  const F& wide, int count, float* sums, int me
) {
  constexpr int RUN = WARPS * 32 * SIZE, WIDE = COLUMNS * (8 / WARPS), EACH = COLUMNS * M, ALL = rlx_ring_power(EACH);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp / WARPS * COLUMNS;
  #pragma unroll 1
  for (int column = 0; column < count; column += WIDE) {
    float sum[ALL] = {};
    #pragma unroll
    for (int q = 0; q < AHEAD; q++) {
      rlx_ring_await(filled + place, phase);
      const E* const run = (const E*)ring + (place * WIDE + own) * RUN + me * SIZE;
      if (K == RUN * AHEAD || q < AHEAD - 1 || q * RUN + me * SIZE < K) {
        E raw[COLUMNS][SIZE];
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) rlx_fetch<SIZE>(raw[n], run + n * RUN);
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          float w[SIZE];
          wide(w, raw[n]);
          #pragma unroll
          for (int r = 0; r < M; r++)
            #pragma unroll
            for (int v = 0; v < SIZE; v++) sum[n * M + r] = fmaf(x[r][q][v], w[v], sum[n * M + r]);
        }
      }
      rlx_ring_leave(used + place, lane);
      if (++place == SLOTS) place = 0, phase ^= 1;
    }
    const float all = rlx_sum_lanes(sum, lane);
    const int e = lane / (32 / ALL);
    if (lane % (32 / ALL) == 0 && e < EACH) sums[(warp % WARPS * SPAN + column + own) * M + e] = all;
  }
}
/* The elements of x that a lane multiplies, of a run of which a lane has SIZE: those of two chunks of 8, as pairs. Lane 4 * g + t has
   part g % (SIZE / 2) of its warp's elements of a column, and there chunks t and t + 4, in turn with its neighbours, so that eight lanes
   read different banks of shared memory. */
template <bool F16, int SIZE> RLX_FN void rlx_ring_spread(uint2 (&pairs)[4], const float (&x)[SIZE], int lane) {
  const int g = lane / 4, t = lane % 4;
  uint32_t own[SIZE / 2], got[2];
  #pragma unroll
  for (int n = 0; n < SIZE / 2; n++) own[n] = rlx_near_pair<F16>(x[2 * n], x[2 * n + 1]);
  #pragma unroll
  for (int n = 0; n < 8; n++) {
    const int chunk = g % (SIZE / 2) * 8 + (n / 4 * 4 + t ^ g % 2 * 4), from = chunk * (8 / SIZE) + n % 4 / (SIZE / 2);
    got[n % 2] = __shfl_sync(0xffffffffu, own[n % (SIZE / 2)], from);
    if (n % 2) pairs[n / 2] = make_uint2(got[0], got[1]);
  }
}

/* The same for one row in the dtype of the weights, on tensor cores. Rows g and g + 8 of their left operand are the lanes' parts of
   columns g / PARTS and, half of a piece on, of another one; column g of the right operand has the elements of x for these, so that sums
   stand on two diagonals of the result. */
template <int SLOTS, int COLUMNS, int SPAN, bool F16, int AHEAD, int SIZE> RLX_FN void rlx_ring_tensor(
  const unsigned char* ring, uint64_t* filled, uint64_t* used, int& place, int& phase, const float (&x)[1][AHEAD][SIZE], int count,
  float* sums
) {
  constexpr int RUN = 8 * 32 * SIZE * 2, PARTS = SIZE / 2, HALF = COLUMNS / 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint2 pairs[AHEAD][4];
  #pragma unroll
  for (int q = 0; q < AHEAD; q++) rlx_ring_spread<F16>(pairs[q], x[0][q], lane);
  const unsigned char* const own = ring + g / PARTS * RUN + warp * (RUN / 8) + g % PARTS * 128;
  const int chunks[2] = {(t ^ g % 2 * 4) * 16, (t + 4 ^ g % 2 * 4) * 16};
  #pragma unroll 1
  for (int column = 0; column < count; column += COLUMNS) {
    float sum[2][4] = {};
    #pragma unroll
    for (int q = 0; q < AHEAD; q++) {
      rlx_ring_await(filled + place, phase);
      uint4 w[2][2];
      #pragma unroll
      for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int half = 0; half < 2; half++) w[i][half] = *(const uint4*)(own + (place * COLUMNS + half * HALF) * RUN + chunks[i]);
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        rlx_multiply<F16>(sum[0], w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, pairs[q][2 * i]);
        rlx_multiply<F16>(sum[1], w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, pairs[q][2 * i + 1]);
      }
      rlx_ring_leave(used + place, lane);
      if (++place == SLOTS) place = 0, phase ^= 1;
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) { /* lane 4 * g + g / 2 has the sum of row g */
      float all = g % 2 ? sum[0][2 * half + 1] + sum[1][2 * half + 1] : sum[0][2 * half] + sum[1][2 * half];
      all += rlx_from(all, 32, 4);
      if (PARTS == 4) all += rlx_from(all, 32, 9);
      if (t == g / 2 && g % PARTS == 0) sums[warp * SPAN + column + half * HALF + g / PARTS] = all;
    }
  }
}
/* A sum of WARPS warps, whose parts are PITCH numbers apart. */
template <int WARPS, int PITCH> RLX_FN float rlx_ring_total(const float* sums) {
  float all = *sums;
  #pragma unroll
  for (int w = 1; w < WARPS; w++) all += sums[w * PITCH];
  return all;
}

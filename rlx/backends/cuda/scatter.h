
/* Runs work(part) for parts that blocks take as they start, so that no block waits for one that cannot start. Returns when all parts of
   all `blocks` are done. `words`: three, zero between launches. */
template <class F> RLX_FN void rlx_in_parts(unsigned* words, unsigned parts, unsigned blocks, F work) {
  unsigned *const taken = words, *const made = taken + 1, *const left = taken + 2;
  __shared__ unsigned part;
  while (true) {
    if (threadIdx.x == 0) part = atomicAdd(taken, 1u);
    __syncthreads();
    if (part >= parts) break;
    work(part);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(made, 1u);
  }
  if (threadIdx.x == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(made) : "memory");
    while (seen < parts);
    if (atomicAdd(left, 1u) == blocks - 1) *taken = 0, *made = 0, *left = 0;
  }
  __syncthreads();
}

/* Marks the picks of each block's places, of which each of `groups` runs of `tiles` blocks has `rows`: a bit of its WORDS for GRAIN picks. */
template <int T, int WORDS, int GRAIN, class L, class P>
RLX_FN void rlx_mark(unsigned* marks, unsigned block, unsigned blocks, int count, int rows, int tiles, int groups, L look, P place) {
  constexpr int PART = 4 * T;
  rlx_in_parts(marks + (size_t)blocks * WORDS, (count + PART - 1) / PART, blocks, [&](unsigned part) {
    #pragma unroll
    for (int n = 0; n < PART / T; n++) {
      const int pick = part * PART + n * T + threadIdx.x;
      const rlx_index at = pick < count ? place(pick, look(pick)) : -1;
      for (int g = 0; g < groups && at >= 0; g++)
        atomicOr(marks + ((size_t)g * tiles + at / rows) * WORDS + pick / GRAIN / 32, 1u << pick / GRAIN % 32);
    }
  });
}

/* The picks of a block's places, ROOM at most, as rlx_scatter describes them. `next`: of the same row; `head`, `last`: of each row; -1:
   none. */
template <int T, int MOST, int WORDS, int GRAIN, class L, class P> struct rlx_picks {
  static constexpr int ROOM = 2048;
  int *picks, *listed; /* listed: groups of picks with a mark */
  short *rows, *next, *head, *last;
  const unsigned* marks;
  int count;
  L look;
  P place;

  /* Finds the picks of places from `low` to `high`, from pick number `from` on, EACH of a thread at once, until there is no more room.
     Returns where it ended. */
  template <int EACH> __device__ __forceinline__ int find(int low, int high, int from) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ int counts[2][T / 32];
    int found = 0, turn = 0, at = 0, many = 0; /* of the picks to look at, `many` from `from` on or as listed, those in front of number `at` are done */
    const auto number = [&](int n) { return WORDS ? listed[n / GRAIN] * GRAIN + n % GRAIN : from + n; };
    __syncthreads();
    for (int r = threadIdx.x; r < high - low; r += T) head[r] = last[r] = -1;
    while (at == many && from < count) {
      int after = count;
      at = 0, many = count - from;
      if (WORDS) {
        __shared__ int before_next;
        const int begun = from / (32 * GRAIN), word = begun + threadIdx.x;
        unsigned bits = 0;
        if (word < WORDS) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(marks + word) : "memory");
        if (threadIdx.x == 0) bits &= ~0u << from / GRAIN % 32;
        int all, to = rlx_chosen_before<T>(__popc(bits), all);
        const bool fits = to + __popc(bits) <= ROOM;
        const int words = __syncthreads_count(fits); /* the first ones */
        if (threadIdx.x == words) before_next = to;
        for (; fits && bits; bits &= bits - 1) listed[to++] = word * 32 + __ffs(bits) - 1;
        __syncthreads();
        many = (words < T ? before_next : all) * GRAIN, after = (begun + words) * 32 * GRAIN;
      }
      for (; at < many; at += T * EACH, turn ^= 1) {
        const auto own = [&](int n) {
          const int next = at + (warp * EACH + n) * 32 + lane;
          return next < many ? number(next) : count;
        };
        int row[EACH], sum = 0;
        decltype(look(0)) seen[EACH]; /* all of them, before a check of the first divides the program */
        #pragma unroll
        for (int n = 0; n < EACH; n++) seen[n] = look(own(n) < count ? own(n) : 0);
        unsigned here[EACH];
        #pragma unroll
        for (int n = 0; n < EACH; n++) {
          const rlx_index place_of = own(n) < count ? place(own(n), seen[n]) : -1;
          row[n] = place_of >= low && place_of < high ? (int)place_of - low : -1;
        }
        #pragma unroll
        for (int n = 0; n < EACH; n++) here[n] = __ballot_sync(0xffffffffu, row[n] >= 0), sum += __popc(here[n]);
        if (lane == 0) counts[turn][warp] = sum;
        __syncthreads();
        int to = found, all = 0;
        #pragma unroll 2
        for (int w = 0; w < T / 32; w++) {
          if (w < warp) to += counts[turn][w];
          all += counts[turn][w];
        }
        if (found + all > ROOM) break;
        #pragma unroll
        for (int n = 0; n < EACH; n++) {
          const int mine = to + __popc(here[n] & ((1u << lane) - 1));
          if (row[n] >= 0) picks[mine] = own(n), rows[mine] = (short)row[n];
          to += __popc(here[n]);
        }
        found += all;
      }
      from = at < many ? number(at) : after;
      if (at >= many) at = many;
    }
    __syncthreads();
    if (found == 0 && threadIdx.x == 0) picks[0] = 0; /* rows without picks load an update, too */
    if (warp == 0) {
      for (int m = lane; m - lane < found; m += 32) {
        const int row = m < found ? rows[m] : -1 - lane;
        const unsigned same = __match_any_sync(0xffffffffu, row), below = same & ((1u << lane) - 1);
        if (row >= 0) {
          const int before = below ? m - lane + 31 - __clz(below) : last[row];
          if (before < 0) head[row] = (short)m;
          else next[before] = (short)m;
        }
        __syncwarp();
        if (row >= 0 && same >> lane == 1) last[row] = (short)m, next[m] = -1;
        __syncwarp();
      }
    }
    __syncthreads();
    return from < count ? from : count;
  }
};

/* Sums of the places from `first` to `end`, MOST at most, of V adjacent columns for each thread: a block of T threads has C groups of
   columns, and R places at once. begin(i, sum), then op(sum, values) of added(pick, values) for each of `count` picks that place(pick,
   look(pick)) puts there, in order, AHEAD loaded at a time, then finish(i, sum). The picks of all places are found first, where a thread
   looks at LOOKS of them at once; if there is no room for them, those of R places at a time. With WORDS, `marks` has a bit for each GRAIN picks of which one of the places has some. */
template <int T, int C, int R, int V, int AHEAD, int LOOKS, int MOST, int WORDS, int GRAIN, class S, class B, class L, class P, class A, class O, class E>
RLX_FN void rlx_scatter(int first, int end, int count, unsigned* marks, bool own, B begin, L look, P place, A added, O op, E finish) {
  constexpr int ROOM = 2048, ROWS = T / C, U = R / ROWS;
  __shared__ int picks[ROOM], listed[WORDS ? ROOM : 1];
  __shared__ short rows[ROOM], next[ROOM], head[MOST], last[MOST];
  rlx_picks<T, MOST, WORDS, GRAIN, L, P> all = {picks, listed, rows, next, head, last, marks, count, look, place};
  bool whole = end - first > R;
  for (int low = first; low < end;) {
    const int high = low + R < end ? low + R : end;
    int seen = count;
    if (!whole || low == first) seen = all.template find<LOOKS>(low, whole ? end : high, 0);
    if (whole && seen < count) {
      whole = false;
      continue;
    }
    S sum[U][V];
    int m[U];
    const auto row = [&](int u) { return low + u * ROWS + (int)threadIdx.x / C; };
    const auto start = [&] {
      #pragma unroll
      for (int u = 0; u < U; u++) begin(row(u) < high ? row(u) : high - 1, sum[u]);
    };
    const auto left = [&] {
      int most = -1;
      #pragma unroll
      for (int u = 0; u < U; u++) most = max(most, m[u]);
      return most;
    };
    /* One pick or more of each row. Of one, all rows load at once, also those that have none left: no branch divides the loads. */
    const auto step = [&](int any) {
      S more[AHEAD][U][V];
      int now[AHEAD][U];
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        #pragma unroll
        for (int u = 0; u < U; u++) {
          now[n][u] = m[u];
          if (AHEAD > 1 && m[u] < 0) continue;
          added(picks[m[u] < 0 ? any : m[u]], more[n][u]);
          if (m[u] >= 0) m[u] = next[m[u]];
        }
      }
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        #pragma unroll
        for (int u = 0; u < U; u++) {
          if (now[n][u] < 0) continue;
          for (int v = 0; v < V; v++) sum[u][v] = op(sum[u][v], more[n][u][v]);
        }
      }
    };
    const auto listed_first = [&] {
      #pragma unroll
      for (int u = 0; u < U; u++) m[u] = own && row(u) < high ? head[row(u) - (whole ? first : low)] : -1;
    };
    listed_first();
    start(), step(max(left(), 0)); /* all of these loads are on their way at once */
    while (true) {
      for (int any; (any = left()) >= 0;) step(any);
      if (whole || seen == count) break;
      seen = all.template find<2>(low, high, seen); /* few at once, beside the sums */
      listed_first();
    }
    #pragma unroll
    for (int u = 0; u < U; u++)
      if (own && row(u) < high) finish(row(u), sum[u]);
    low += R;
  }
  for (int word = threadIdx.x; word < WORDS; word += T) marks[word] = 0;
}


static __device__ constexpr int rlx_power(int n) { return n <= 1 ? 1 : 2 * rlx_power((n + 1) / 2); }
/* Sorts `count` numbers, which are different and no ~0, by T threads. There is room for a power of two of them. */
template <int T> RLX_FN void rlx_sort_keys(unsigned* keys, int count) {
  int all = 1;
  while (all < count) all *= 2;
  for (int n = count + threadIdx.x; n < all; n += T) keys[n] = ~0u;
  __syncthreads();
  for (int run = 2; run <= all; run *= 2)
    for (int by = run / 2; by > 0; by /= 2) {
      for (int n = threadIdx.x; n < all / 2; n += T) {
        const int low = 2 * n - (n & (by - 1)), high = low + by;
        const unsigned a = keys[low], b = keys[high];
        if ((a > b) == !(low & run)) keys[low] = b, keys[high] = a;
      }
      __syncthreads();
    }
}

/* Copies a tile of SIZE elements of E to `out`, V at a time, and combines those of its CELLS that picks select with their updates, which
   sums of S hold meanwhile, in order. Picks are numbers below PICKS, those of one cell from least to greatest. A cell has GROUPS groups of
   COLUMNS elements, of which has(cell, group) are in the tile. inside(e), at(e): of the tile's element e, whether it has that, and the
   place in the tensor. cell(e): that of all V elements from e on, which are not copied if it is selected; -1: several cells. `from`:
   the tensor that is copied, or one number if that FILLS it; what is there already `stays`. look(pick) reads an index, and
   place(pick, that) is the cell, or -1. */
template <int T, int V, int SIZE, int CELLS, int GROUPS, int COLUMNS, int PICKS, bool FILLS, class S,
          class E, class I, class A, class C, class L, class P, class H, class B, class U, class O, class Z>
RLX_FN void rlx_patch(E* out, const E* from, int picks, bool stays, I inside, A at, C cell, L look, P place, H has, B begin, U added,
                      O op, Z finish) {
  constexpr int AHEAD = COLUMNS > 8 ? 1 : 4, EACH = PICKS < 8 * T ? (PICKS + T - 1) / T : 8, WORDS = CELLS / 32 + 1;
  constexpr bool ALONE = GROUPS * COLUMNS == 1 && sizeof(S) <= sizeof(unsigned); /* updates that one of the keys' words has room for */
  constexpr int ROOM = rlx_power(PICKS), ONCE = COLUMNS > 8 ? 1 : COLUMNS > 4 ? 2 : 4; /* cells of one pick that a thread has at once */
  constexpr int TURN = SIZE / (T * V) < 8 ? SIZE / (T * V) : 8, TURNS = SIZE / (T * V * TURN);
  static_assert(TURNS * TURN * T * V == SIZE && (unsigned long long)CELLS * PICKS <= ~0u, "whole turns, and keys of 32 bits");
  __shared__ unsigned hit[WORDS], twice[WORDS]; /* bits of cells that are selected, and of those that several picks select */
  __shared__ __align__(16) unsigned keys[PICKS], again[ROOM]; /* cells and picks: all, as they are found; those of cells with several */
  __shared__ int found, repeated;
  E kept[TURN][V];
  const auto is = [](const unsigned* bits, int n) { return bits[n / 32] >> n % 32 & 1; };
  const auto element = [&](int turn, int n) { return ((turn * TURN + n) * T + (int)threadIdx.x) * V; };
  const auto load = [&](int turn) { /* without a branch: the first elements of the tensor in place of those that it has not */
    #pragma unroll
    for (int n = 0; n < TURN && !stays; n++) {
      const int place = inside(element(turn, n) + V - 1) ? at(element(turn, n)) : 0;
      if constexpr (FILLS) for (int v = 0; v < V; v++) kept[n][v] = *from;
      else rlx_stream(kept[n], from + place);
    }
  };
  load(0); /* on its way while the picks are looked at */
  for (int n = threadIdx.x; n < WORDS; n += T) hit[n] = twice[n] = 0;
  if (threadIdx.x == 0) found = repeated = 0;
  __syncthreads();
  for (int first = threadIdx.x; first - (int)threadIdx.x < picks; first += T * EACH) {
    decltype(look(0)) seen[EACH]; /* all of them, before a check of the first divides the program */
    #pragma unroll
    for (int n = 0; n < EACH; n++) seen[n] = look(first + n * T < picks ? first + n * T : 0);
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int to = first + n * T < picks ? (int)place(first + n * T, seen[n]) : -1;
      if (to < 0) continue;
      const unsigned bit = 1u << to % 32;
      if (atomicOr(hit + to / 32, bit) & bit) atomicOr(twice + to / 32, bit);
      keys[atomicAdd(&found, 1)] = (unsigned)to * PICKS + first + n * T;
    }
  }
  __syncthreads();
  for (int turn = 0; !stays; load(turn)) {
    #pragma unroll
    for (int n = 0; n < TURN; n++) {
      const int e = element(turn, n);
      if (inside(e + V - 1)) {
        const int to = cell(e);
        if (to < 0 || !is(hit, to)) rlx_put<V>(out + at(e), kept[n]);
        continue;
      }
      #pragma unroll 1
      for (int v = 0; v < V && inside(e + v); v++) out[at(e + v)] = from[FILLS ? 0 : at(e + v)]; /* the end of the tensor */
    }
    if (++turn == TURNS) break;
  }
  const int all = found;
  if (all == 0) return;
  __syncthreads(); /* the copy, which some threads now change in other places than they wrote */
  const auto patch = [&](int to, int group, int length, const unsigned* picked) {
    S sum[COLUMNS], more[AHEAD][COLUMNS];
    begin(to, group, sum);
    for (int m = 0; m < length; m += AHEAD) {
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) if (m + n < length) added(picked[m + n] % PICKS, to, group, more[n]);
      #pragma unroll
      for (int n = 0; n < AHEAD; n++)
        for (int v = 0; v < COLUMNS && m + n < length; v++) sum[v] = op(sum[v], more[n][v]);
    }
    finish(to, group, sum);
  };
  for (int first = threadIdx.x; first < all * GROUPS; first += T * ONCE) {
    S sum[ONCE][COLUMNS], more[ONCE][COLUMNS];
    unsigned key[ONCE];
    int group[ONCE];
    bool own[ONCE];
    #pragma unroll
    for (int n = 0; n < ONCE; n++) { /* the first of all in place of those that are not patched here: no branch divides the loads */
      const int id = first + n * T;
      key[n] = keys[id < all * GROUPS ? id / GROUPS : 0], group[n] = id % GROUPS;
      const bool several = is(twice, key[n] / PICKS);
      own[n] = id < all * GROUPS && !several && has(key[n] / PICKS, group[n]);
      if (id < all * GROUPS && several && group[n] == 0) again[atomicAdd(&repeated, 1)] = key[n];
      if (!own[n]) key[n] = keys[0], group[n] = 0;
    }
    #pragma unroll
    for (int n = 0; n < ONCE; n++) {
      begin(key[n] / PICKS, group[n], sum[n]);
      added(key[n] % PICKS, key[n] / PICKS, group[n], more[n]);
    }
    #pragma unroll
    for (int n = 0; n < ONCE; n++) {
      for (int v = 0; v < COLUMNS; v++) sum[n][v] = op(sum[n][v], more[n][v]);
      if (own[n]) finish(key[n] / PICKS, group[n], sum[n]);
    }
  }
  __syncthreads();
  rlx_sort_keys<T>(again, repeated);
  S* const values = (S*)keys; /* where many select one cell, all threads load its updates, and one adds them */
  if constexpr (ALONE) {
    #pragma unroll 4
    for (int n = threadIdx.x; n < repeated; n += T) {
      S one[COLUMNS];
      added(again[n] % PICKS, again[n] / PICKS, 0, one);
      values[n] = one[0];
    }
    __syncthreads();
  }
  for (int id = threadIdx.x; id < repeated * GROUPS; id += T) {
    const int first = id / GROUPS, group = id % GROUPS, to = again[first] / PICKS;
    if ((first && again[first - 1] / PICKS == to) || !has(to, group)) continue;
    int length = 1;
    while (first + length < repeated && again[first + length] / PICKS == to) length++;
    if constexpr (ALONE) {
      S sum[COLUMNS];
      begin(to, group, sum);
      #pragma unroll 8
      for (int m = 0; m < length; m++) sum[0] = op(sum[0], values[first + m]);
      finish(to, group, sum);
    } else {
      patch(to, group, length, again + first);
    }
  }
}

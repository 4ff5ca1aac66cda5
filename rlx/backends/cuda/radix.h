
/* Sorting a line by the 8-bit digits of its keys, the lowest first. As in A. Adinets and D. Merrill, "Onesweep: A Faster Least Significant
   Digit Radix Sort for GPUs" (2022), warps rank the keys of a tile, which is sorted in shared memory, so that keys of a digit are stored
   side by side. All blocks of a line run at once, so they meet to learn how many keys the others have, and look at no chain of tiles. */
constexpr int RLX_DIGITS = 256, RLX_GROUP = 16; /* blocks whose counts are added up */

/* The lanes whose digit is the same, by four instructions for a bit; C++ takes seven. */
RLX_FN unsigned rlx_same(int digit) {
  unsigned same = 0xffffffffu;
  #pragma unroll
  for (int bit = 0; bit < 8; bit++) {
    unsigned those;
    asm volatile("{ .reg .pred set; and.b32 %0, %1, %2; setp.ne.u32 set, %0, 0; vote.sync.ballot.b32 %0, set, 0xffffffff; @!set not.b32 %0, %0; }"
      : "=&r"(those) : "r"(digit), "r"(1 << bit));
    same &= those;
  }
  return same;
}

/* An f16 as the upper half of a float that orders like it, and back. */
RLX_FN float rlx_raise(float a) { return a != a ? a : __uint_as_float((uint32_t)rlx_near_f16(a) << 16); }
RLX_FN float rlx_lower(float a) { return rlx_wide_f16((uint16_t)(__float_as_uint(a) >> 16)); }

/* A key as a B: of floats whose lower half is 0, the upper half. */
template <bool DESCENDING, class B, class V> RLX_FN B rlx_to_bits(V value, int at, uint32_t& below) {
  const rlx_key<V> key = rlx_to_key<DESCENDING, V>(value, at);
  below = key.below;
  return (B)(key.bits >> 8 * (sizeof key.bits - sizeof(B)));
}
template <bool DESCENDING, class B, class V> RLX_FN V rlx_of_bits(B bits, uint32_t below) {
  typedef typename rlx_key<V>::bits_t bits_t;
  const V value = rlx_of_key<DESCENDING, V>({(bits_t)bits << 8 * (sizeof(bits_t) - sizeof(B)), below});
  if constexpr (sizeof(B) < sizeof(V)) return __uint_as_float(__float_as_uint(value) & 0xffff0000u);
  else return value;
}

/* The digits by which keys differ. As signed numbers, all of them are between -2^n and 2^n: above that their bits are those of the sign,
   and 2^n is added to them, in digit `top`. */
template <class B> struct rlx_needed {
  static constexpr int BITS = 8 * sizeof(B);
  static constexpr B SIGN = (B)1 << (BITS - 1);
  B differ = 0, size = 0;
  int top = BITS / 8 - 1, add = 0;

  __device__ void see(B bits, B other) {
    differ |= bits ^ other;
    size |= (bits & SIGN ? bits : (B)~bits) ^ SIGN;
  }
  /* Of all keys, once all were seen. `least`: bits of a number. */
  __device__ void decide(int least) {
    const int found = 64 - __clzll((long long)size), n = found > least ? found : least;
    if (n / 8 >= top) return;
    top = n / 8;
    add = 1 << n % 8;
  }
  __device__ bool needs(int digit) const { return digit <= top && (differ >> 8 * digit & 255) != 0; }
  /* The last digit that is needed, `least` if none is. */
  __device__ int last(int least) const {
    int found = top;
    while (found > least && !needs(found)) found--;
    return found;
  }
  __device__ int digit(B bits, int n) const { return (int)(bits >> 8 * n) + (n == top ? add : 0) & 255; }
};

/* A tile of T * E keys in shared memory. A warp reads its keys side by side. */
template <int T, int E, class B> struct rlx_tile {
  B keys[T * E];
  uint32_t below[T * E], counts[T / 32][RLX_DIGITS]; /* the latter: keys of each warp with a digit, then those of warps before */
  int first[RLX_DIGITS], away[RLX_DIGITS]; /* keys with lower digits; places from a key in the tile to that in the line */

  static __device__ int place(int e) { return threadIdx.x / 32 * 32 * E + e * 32 + threadIdx.x % 32; }

  /* Sorts by digit(e), and the keys of a digit as they were; what is below each key is at its place, or being copied there. Thread n
     gets how many keys have digit n, and how many have a lower one. */
  template <class G> __device__ void sort(const B (&bits)[E], G digit, int& count, int& lower) {
    const int me = threadIdx.x, lane = me % 32;
    uint32_t* const own = counts[me / 32];
    #pragma unroll
    for (int n = lane; n < RLX_DIGITS; n += 32) own[n] = 0;
    __syncwarp();
    uint32_t ranks[(E + 1) / 2] = {}; /* of 16 bits, for which there is room in registers */
    const auto rank = [&](int e) { return (int)(ranks[e / 2] >> e % 2 * 16 & 0xffff); };
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const int d = digit(e);
      const unsigned same = rlx_same(d);
      const int before = __popc(same & ((1u << lane) - 1));
      const unsigned found = own[d] + before;
      ranks[e / 2] |= found << e % 2 * 16;
      __syncwarp();
      if (before == 0) own[d] = found + __popc(same);
      __syncwarp();
    }
    __syncthreads();
    count = 0;
    if (me < RLX_DIGITS) {
      #pragma unroll
      for (int w = 0; w < T / 32; w++) {
        const int some = counts[w][me];
        counts[w][me] = count;
        count += some;
      }
    }
    int all;
    lower = rlx_chosen_before<T>(count, all);
    if (me < RLX_DIGITS) first[me] = lower;
    rlx_copies_wait<0>();
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const int d = digit(e), more = first[d] + own[d];
      ranks[e / 2] += more << e % 2 * 16;
      keys[rank(e)] = bits[e];
    }
    uint32_t under[E];
    #pragma unroll
    for (int e = 0; e < E; e++) under[e] = below[place(e)];
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < E; e++) below[rank(e)] = under[e];
  }
};

/* Sorts a line of N keys, at most a tile, by one block. */
template <int T, int E, int N, bool DESCENDING, class B, class V, class F, class S>
RLX_FN void rlx_sort_tile(rlx_tile<T, E, B>& tile, F value, S emit) {
  B bits[E];
  rlx_needed<B> needed;
  #pragma unroll
  for (int e = 0; e < E; e++) {
    const int n = tile.place(e), at = n < N ? n : N - 1;
    bits[e] = rlx_to_bits<DESCENDING, B, V>(value(at), at, tile.below[n]);
  }
  if (threadIdx.x == 0) tile.keys[0] = bits[0];
  __syncthreads();
  const B other = tile.keys[0];
  #pragma unroll
  for (int e = 0; e < E; e++) needed.see(bits[e], other);
  const auto both = [](B a, B b) { return (B)(a | b); };
  needed.differ = rlx_reduce<T>(needed.differ, both);
  needed.size = rlx_reduce<T>(needed.size, both);
  needed.decide(0);
  const int end = needed.last(0);
  for (int digit = 0; digit <= end; digit++) {
    if (digit < end && !needed.needs(digit)) continue;
    int count, lower;
    tile.sort(bits, [&](int e) { return tile.place(e) < N ? needed.digit(bits[e], digit) : RLX_DIGITS - 1; }, count, lower);
    __syncthreads();
    if (digit == end) break;
    #pragma unroll
    for (int e = 0; e < E; e++) bits[e] = tile.keys[tile.place(e)];
  }
  #pragma unroll
  for (int e = 0; e < E; e++) {
    const int n = e * T + threadIdx.x;
    if (n < N) emit(n, rlx_of_bits<DESCENDING, B, V>(tile.keys[n], tile.below[n]), tile.below[n] >> 1);
  }
}

/* Counts of a line's blocks: how many keys with each digit a block has, and a group of blocks. `words`, which are zero before and after:
   a counter, the digits that keys differ by, and the counts of groups, for one digit and the next in turn. */
template <int T, int PARTS> struct rlx_counts {
  static constexpr int GROUPS = (PARTS + RLX_GROUP - 1) / RLX_GROUP, HEAD = 8, WORDS = HEAD + 2 * GROUPS * RLX_DIGITS;
  unsigned *words, *rows; /* the latter: of each block */
  int part;
  unsigned meetings = 0;

  __device__ unsigned* table(int turn) { return words + HEAD + turn % 2 * GROUPS * RLX_DIGITS; }
  __device__ void tell(int turn, int count) {
    const int me = threadIdx.x, mine = part / RLX_GROUP * RLX_DIGITS + me;
    if (me < RLX_DIGITS) {
      rows[part * RLX_DIGITS + me] = count;
      atomicAdd(table(turn) + mine, (unsigned)count);
      if (turn > 0 && part % RLX_GROUP == 0) table(turn + 1)[mine] = 0; /* of the digit before */
    }
    rlx_arrive(words);
  }
  /* For thread n, the place of this block's first key with digit n. */
  __device__ int hear(int turn) {
    const int me = threadIdx.x, group = part / RLX_GROUP;
    int before = 0, all = 0, unused;
    rlx_await(words, ++meetings * PARTS);
    if (me < RLX_DIGITS) {
      #pragma unroll
      for (int n = 0; n < RLX_GROUP - 1; n++)
        if (n < part % RLX_GROUP) before += __ldcg(rows + (group * RLX_GROUP + n) * RLX_DIGITS + me);
      #pragma unroll
      for (int n = 0; n < GROUPS; n++) {
        const int some = __ldcg(table(turn) + n * RLX_DIGITS + me);
        before += n < group ? some : 0;
        all += some;
      }
    }
    return rlx_chosen_before<T>(all, unused) + before;
  }
  __device__ void meet() { rlx_meet(words, ++meetings * PARTS); }
  template <class B> __device__ void combine(rlx_needed<B>& needed) {
    const auto both = [](B a, B b) { return (B)(a | b); };
    needed.differ = rlx_reduce<T>(needed.differ, both);
    needed.size = rlx_reduce<T>(needed.size, both);
    unsigned long long* const seen = (unsigned long long*)(words + 2);
    if (threadIdx.x == 0) {
      atomicOr(seen, (unsigned long long)needed.differ);
      atomicOr(seen + 1, (unsigned long long)needed.size);
    }
    meet();
    needed.differ = (B)__ldcg(seen);
    needed.size = (B)__ldcg(seen + 1);
  }
  __device__ void leave() {
    __syncthreads();
    const bool last = threadIdx.x == 0 && atomicAdd(words, 1) == (meetings + 1) * PARTS - 1;
    if (__syncthreads_or(last))
      for (int n = threadIdx.x; n < WORDS; n += T) words[n] = 0;
  }
};

/* Sorts a line of N keys by PARTS blocks, TILES tiles of each. For each digit, a block counts its keys (of one tile, where they are
   ranked), and learns where those go; `memory` has room for all keys twice, once if they have two digits, and for the counts. */
template <int T, int E, int N, int PARTS, int TILES, bool DESCENDING, class B, class V, class F, class S>
RLX_FN void rlx_sort_digits(rlx_tile<T, E, B>& tile, unsigned char* memory, int part, unsigned* words, F value, S emit) {
  constexpr int SIZE = T * E, ALL = PARTS * TILES * SIZE;
  constexpr bool LONG = sizeof(B) > 2;
  constexpr size_t HALF = (size_t)ALL * (sizeof(B) + sizeof(uint32_t));
  rlx_counts<T, PARTS> counts = {words, (unsigned*)(memory + (1 + LONG) * HALF), part};
  rlx_needed<B> needed;
  const int me = threadIdx.x, own = part * TILES * SIZE;
  uint32_t unused;
  const B other = LONG ? rlx_to_bits<DESCENDING, B, V>(value(0), 0, unused) : 0;
  int digit = 0, end = sizeof(B) - 1;
  for (int turn = 0;; turn++) {
    const B* const from = (const B*)(memory + (turn + 1) % 2 * HALF);
    B* const to = (B*)(memory + turn % 2 * HALF);
    const uint32_t* const from_below = (const uint32_t*)(from + ALL);
    uint32_t* const to_below = (uint32_t*)(to + ALL);
    if constexpr (TILES > 1) {
      uint32_t* const mine = tile.counts[me / 32];
      __syncthreads();
      for (int n = me % 32; n < RLX_DIGITS; n += 32) mine[n] = 0;
      __syncwarp();
      for (int first = own; first < own + TILES * SIZE && first < N; first += SIZE) {
        B bits[E];
        if (turn == 0) {
          #pragma unroll
          for (int e = 0; e < E; e++) {
            const int at = first + e * T + me;
            bits[e] = rlx_to_bits<DESCENDING, B, V>(value(at < N ? at : N - 1), 0, unused);
          }
        } else {
          #pragma unroll
          for (int e = 0; e < E; e++) bits[e] = __ldcg(from + first + e * T + me);
        }
        #pragma unroll
        for (int e = 0; e < E; e++)
          if (first + e * T + me < N) atomicAdd(mine + needed.digit(bits[e], digit), 1u);
      }
      __syncthreads();
      int count = 0;
      if (me < RLX_DIGITS)
        for (int w = 0; w < T / 32; w++) count += tile.counts[w][me];
      counts.tell(turn, count);
    }
    int next = 0; /* for thread n, the place of the next key with digit n */
    for (int first = own; first < own + TILES * SIZE && first < N; first += SIZE) {
      B bits[E];
      if (TILES > 1) __syncthreads();
      if (turn == 0) {
        #pragma unroll
        for (int e = 0; e < E; e++) {
          const int n = tile.place(e), at = first + n;
          bits[e] = rlx_to_bits<DESCENDING, B, V>(value(at < N ? at : N - 1), at, tile.below[n]);
          if (LONG) needed.see(bits[e], other);
        }
      } else {
        for (int n = 4 * me; n < SIZE; n += 4 * T)
          rlx_copy<16>((float*)(tile.below + n), (const float*)(from_below + first + n), true);
        rlx_copies_end();
        #pragma unroll
        for (int e = 0; e < E; e++) bits[e] = __ldcg(from + first + tile.place(e));
      }
      int count, lower;
      const auto digit_of = [&](int e) { return first + tile.place(e) < N ? needed.digit(bits[e], digit) : RLX_DIGITS - 1; };
      tile.sort(bits, digit_of, count, lower);
      if (first == own) {
        const int spare = SIZE > N - first && me == RLX_DIGITS - 1 ? SIZE - (N - first) : 0;
        if (TILES == 1) counts.tell(turn, count - spare);
        next = counts.hear(turn);
      }
      if (me < RLX_DIGITS) tile.away[me] = next - lower;
      next += count;
      __syncthreads();
      #pragma unroll
      for (int e = 0; e < E; e++) {
        const int n = e * T + me;
        if (first + n >= N) continue;
        const B key = tile.keys[n];
        const uint32_t under = tile.below[n];
        const int at = n + tile.away[needed.digit(key, digit)];
        if (digit == end) emit(at, rlx_of_bits<DESCENDING, B, V>(key, under), under >> 1);
        else to[at] = key, to_below[at] = under;
      }
    }
    if (digit == end) break;
    if (LONG && turn == 0) {
      counts.combine(needed);
      needed.decide(8); /* the first digit is done */
      end = needed.last(1);
    } else {
      counts.meet();
    }
    do digit++;
    while (digit < end && !needed.needs(digit));
  }
  counts.leave();
}

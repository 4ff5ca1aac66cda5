
/* Sorting a line by the 8-bit digits of its keys, the lowest first. As in A. Adinets and D. Merrill, "Onesweep: A Faster Least
   Significant Digit Radix Sort for GPUs" (2022), warps rank the keys of a tile, which is sorted in shared memory, so that keys of a
   digit are stored side by side. All blocks of a line run at once: they meet to learn how many keys the others have, and follow no
   chain of tiles. */
constexpr int RLX_DIGITS = 256, RLX_GROUP = 16; /* blocks whose counts are added up */

/* The lanes whose digit is the same, by four instructions for a bit; C++ takes seven. */
RLX_FN unsigned rlx_same(int digit) {
  unsigned same = 0xffffffffu;
  #pragma unroll
  for (int bit = 0; bit < 8; bit++) {
    unsigned those;
    asm volatile(
      "{ .reg .pred set; and.b32 %0, %1, %2; setp.ne.u32 set, %0, 0;"
      "vote.sync.ballot.b32 %0, set, 0xffffffff; @!set not.b32 %0, %0; }" : "=&r"(those) : "r"(digit), "r"(1 << bit));
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

/* The digits of keys. As signed numbers, all keys are between -2^n and 2^n: above that their bits are those of the sign, and 2^n
   is added to them, in digit `top`. */
struct rlx_digits {
  int top, add = 0;
  unsigned needed = 0xff; /* a bit for each digit by which keys differ */

  __device__ bool needs(int digit) const { return needed >> digit & 1; }
  __device__ int last(int least) const { return max(31 - __clz(needed), least); }
  template <class B> __device__ int operator()(B bits, int n) const { return (int)(bits >> 8 * n) + (n == top ? add : 0) & 255; }
};
template <class B> struct rlx_seen {
  static constexpr B SIGN = (B)1 << (8 * sizeof(B) - 1);
  B differ = 0, size = 0;

  __device__ void see(B bits, B other) {
    differ |= bits ^ other;
    size |= (bits & SIGN ? bits : (B)~bits) ^ SIGN;
  }
  /* Of all keys that the block has seen. */
  template <int T> __device__ void reduce() {
    const auto both = [](B a, B b) { return (B)(a | b); };
    differ = rlx_reduce<T>(differ, both);
    size = rlx_reduce<T>(size, both);
  }
  /* Of numbers of at least so many bits. */
  __device__ rlx_digits digits(int least) const {
    const int n = max(64 - __clzll((long long)size), least), top = min(n / 8, (int)sizeof(B) - 1);
    rlx_digits found = {top, n / 8 < (int)sizeof(B) - 1 ? 1 << n % 8 : 0, 0};
    for (int digit = 0; digit <= top; digit++) found.needed |= (unsigned)((differ >> 8 * digit & 255) != 0) << digit;
    return found;
  }
};

/* A tile of T * E keys in shared memory. A warp has keys that are side by side. */
template <int T, int E, class B> struct rlx_tile {
  B keys[T * E];
  uint32_t below[T * E], counts[T / 32][RLX_DIGITS]; /* the latter: keys of each warp with a digit, then those of warps before */
  int first[RLX_DIGITS], away[RLX_DIGITS]; /* keys with lower digits; places from a key in the tile to that in the line */

  static __device__ int place(int e) { return threadIdx.x / 32 * 32 * E + e * 32 + threadIdx.x % 32; }

  /* Sorts by digit(e), and the keys of a digit as they were; what is below each key is at its place, or being copied there.
     Thread n gets how many keys have digit n, and how many have a lower one. */
  template <class G> __device__ void sort(const B (&bits)[E], G digit, int& count, int& lower) {
    const int me = threadIdx.x, lane = me % 32;
    uint32_t* const own = counts[me / 32];
    #pragma unroll
    for (int n = 0; n < RLX_DIGITS; n += 32) own[n + lane] = 0;
    __syncwarp();
    uint32_t ranks[(E + 1) / 2] = {}; /* of 16 bits, for which there is room in registers */
    const auto rank = [&](int e) { return ranks[e / 2] >> e % 2 * 16 & 0xffff; };
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
      const int d = digit(e);
      ranks[e / 2] += first[d] + own[d] << e % 2 * 16;
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
  rlx_seen<B> seen;
  #pragma unroll
  for (int e = 0; e < E; e++) {
    const int n = tile.place(e), at = n < N ? n : N - 1;
    bits[e] = rlx_to_bits<DESCENDING, B, V>(value(at), at, tile.below[n]);
  }
  if (threadIdx.x == 0) tile.keys[0] = bits[0];
  __syncthreads();
  const B other = tile.keys[0];
  #pragma unroll
  for (int e = 0; e < E; e++) seen.see(bits[e], other);
  seen.template reduce<T>();
  const rlx_digits digits = seen.digits(0);
  const int end = digits.last(0);
  for (int digit = 0; digit <= end; digit++) {
    if (digit < end && !digits.needs(digit)) continue;
    int count, lower;
    tile.sort(bits, [&](int e) { return tile.place(e) < N ? digits(bits[e], digit) : RLX_DIGITS - 1; }, count, lower);
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

/* Counts of a line's blocks: how many keys with each digit a block has, and a group of blocks. `words`, which are zero before and
   after: a counter, what was seen of all keys, and the counts of groups, for one digit and the next in turn. */
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
  /* Meets, and gets what all blocks have seen. */
  template <class B> __device__ void combine(rlx_seen<B>& seen) {
    unsigned long long* const all = (unsigned long long*)(words + 2);
    seen.template reduce<T>();
    if (threadIdx.x == 0) {
      atomicOr(all, (unsigned long long)seen.differ);
      atomicOr(all + 1, (unsigned long long)seen.size);
    }
    meet();
    seen.differ = (B)__ldcg(all);
    seen.size = (B)__ldcg(all + 1);
  }
  __device__ void leave() {
    __syncthreads();
    const bool last = threadIdx.x == 0 && atomicAdd(words, 1) == (meetings + 1) * PARTS - 1;
    if (__syncthreads_or(last))
      for (int n = threadIdx.x; n < WORDS; n += T) words[n] = 0;
  }
};

/* Sorts a line of N keys by PARTS blocks, TILES tiles of each. For each digit, a block counts its keys (those of one tile as they
   are ranked), and learns where they go. `memory` has room for all keys twice, once if they have two digits, and for the counts. */
template <int T, int E, int N, int PARTS, int TILES, bool DESCENDING, class B, class V> struct rlx_parted_sort {
  static constexpr int SIZE = T * E, RANGE = TILES * SIZE, ALL = PARTS * RANGE;
  static constexpr bool LONG = sizeof(B) > 2;
  static constexpr size_t HALF = (size_t)ALL * (sizeof(B) + sizeof(uint32_t)), KEYS = (1 + LONG) * HALF;
  rlx_tile<T, E, B>& tile;
  unsigned char* memory;
  rlx_counts<T, PARTS> counts;

  /* For thread n, how many keys of this block have digit n. `from`: null where they are values. */
  template <class F, class G> __device__ int count(int own, const B* from, F value, G digit_of) {
    const int me = threadIdx.x;
    uint32_t* const mine = tile.counts[me / 32];
    __syncthreads();
    for (int n = 0; n < RLX_DIGITS; n += 32) mine[n + me % 32] = 0;
    __syncwarp();
    #pragma unroll 1
    for (int first = own; first < own + RANGE && first < N; first += SIZE) {
      B bits[E];
      load(bits, [](int e) { return e * T + (int)threadIdx.x; }, first, from, value, [](int, uint32_t) {});
      #pragma unroll
      for (int e = 0; e < E; e++)
        if (first + e * T + me < N) atomicAdd(mine + digit_of(bits[e]), 1u);
    }
    __syncthreads();
    int all = 0;
    if (me < RLX_DIGITS)
      for (int w = 0; w < T / 32; w++) all += tile.counts[w][me];
    return all;
  }
  /* Keys `first` + place(e); those of values, with what is below them, are also for keep(e, below). */
  template <class G, class F, class H>
  __device__ void load(B (&bits)[E], G place, int first, const B* from, F value, H keep) {
    if (from) {
      #pragma unroll
      for (int e = 0; e < E; e++) bits[e] = __ldcg(from + first + place(e));
    } else {
      #pragma unroll
      for (int e = 0; e < E; e++) {
        const int at = first + place(e);
        uint32_t below;
        bits[e] = rlx_to_bits<DESCENDING, B, V>(value(at < N ? at : N - 1), at, below);
        keep(e, below);
      }
    }
  }
  /* Sorts by one digit; put(place, key, what is below it) stores. */
  template <class F, class G, class P, class W>
  __device__ void sort(int turn, const B* from, F value, G digit_of, P put, W see) {
    const uint32_t* const from_below = (const uint32_t*)(from + ALL);
    const int me = threadIdx.x, own = counts.part * RANGE;
    int next = 0; /* for thread n, the place of the next key with digit n */
    if constexpr (TILES > 1) counts.tell(turn, count(own, from, value, digit_of));
    #pragma unroll 1
    for (int first = own; first < own + RANGE && first < N; first += SIZE) {
      B bits[E];
      if (TILES > 1) __syncthreads();
      if (from)
        for (int n = 4 * me; n < SIZE; n += 4 * T)
          rlx_copy<16>((float*)(tile.below + n), (const float*)(from_below + first + n), true);
      rlx_copies_end();
      const auto place = [&](int e) { return tile.place(e); };
      load(bits, place, first, from, value, [&](int e, uint32_t below) { tile.below[place(e)] = below, see(bits[e]); });
      int some, lower;
      tile.sort(bits, [&](int e) { return first + tile.place(e) < N ? digit_of(bits[e]) : RLX_DIGITS - 1; }, some, lower);
      if (first == own) {
        const int spare = SIZE > N - first && me == RLX_DIGITS - 1 ? SIZE - (N - first) : 0;
        if (TILES == 1) counts.tell(turn, some - spare);
        next = counts.hear(turn);
      }
      if (me < RLX_DIGITS) tile.away[me] = next - lower;
      next += some;
      __syncthreads();
      #pragma unroll
      for (int e = 0; e < E; e++) {
        const int n = e * T + me;
        if (first + n < N) put(n + tile.away[digit_of(tile.keys[n])], tile.keys[n], tile.below[n]);
      }
    }
  }
  template <class F, class S> __device__ void run(F value, S emit) {
    rlx_digits digits = {sizeof(B) - 1};
    int turn = 0, digit = 0, end = sizeof(B) - 1;
    rlx_seen<B> seen;
    uint32_t unused;
    const auto digit_of = [&](B bits) { return digits(bits, digit); };
    const auto store = [&](int at, B key, uint32_t under) {
      B* const to = (B*)(memory + turn % 2 * HALF);
      to[at] = key, ((uint32_t*)(to + ALL))[at] = under;
    };
    const B other = LONG ? rlx_to_bits<DESCENDING, B, V>(value(0), 0, unused) : 0;
    #pragma unroll 1
    for (; digit <= end; digit++) {
      if (digit < end && !digits.needs(digit)) continue;
      const B* const from = turn == 0 ? nullptr : (const B*)(memory + (turn + 1) % 2 * HALF);
      sort(turn, from, value, digit_of, [&](int at, B key, uint32_t under) {
        if (digit == end) emit(at, rlx_of_bits<DESCENDING, B, V>(key, under), under >> 1);
        else store(at, key, under);
      }, [&](B bits) { if (LONG) seen.see(bits, other); });
      if (LONG && turn == 0) {
        counts.combine(seen);
        digits = seen.digits(8); /* the first one is done */
        end = digits.last(1);
      } else if (digit < end) {
        counts.meet();
      }
      turn++;
    }
    counts.leave();
  }
};


/* The first KEPT keys of a line, in order, while its elements are read once. A sample has GROUPS groups of SPAN adjacent elements. Of
   their first keys, number RANK is most probably behind the KEPT first of the line, and not far: keys up to there are collected, ROOM at
   most, and sorted. Where they are too few or too many, another sample is taken. Keys differ, if only in their positions, so equal
   elements do no harm, and results do not depend on samples. PARTS blocks have a part of the line each, and all take the same sample;
   the one that comes last sorts what all have found. `values(at, x)` loads adjacent elements. */
template <int T, int E, int N, int KEPT, int GROUPS, int SPAN, int RANK, int ROOM, int PARTS, int PART, bool DESCENDING, class V>
struct rlx_selection {
  typedef rlx_key<V> K;
  K *keys, *memory; /* in shared memory; in global memory, of the line */
  unsigned* words;  /* of the line, zero before and after: blocks that came, keys that they found */
  int part;

  /* The first key of a group, which is somewhere in its share of the line. */
  template <class G> static __device__ K sampled(int group, unsigned turn, G value) {
    constexpr unsigned STARTS = N - SPAN + 1;
    unsigned hash = (turn * GROUPS + group + 1) * 0x9e3779b1u;
    hash = (hash ^ hash >> 15) * 0x85ebca6bu;
    const int start = (int)(((unsigned long long)group * STARTS + __umulhi(hash ^ hash >> 13, STARTS)) / GROUPS);
    K first = K::last();
    #pragma unroll
    for (int n = 0; n < SPAN; n++) {
      const K key = rlx_to_key<DESCENDING, V>(value(start + n), start + n);
      if (key < first) first = key;
    }
    return first;
  }
  /* Collects keys of elements from `first` to `end`, not behind `last`. A thread looks at U times S adjacent elements at once, and
     loads those again that it may take, which are few. */
  template <int U, int S, class G, class F> __device__ void collect(int& count, K last, int first, int end, G value, F values) {
    const V bound = rlx_of_key<DESCENDING, V>(last);
    for (int start = first + threadIdx.x * S; start < end; start += U * T * S) {
      V x[U][S];
      #pragma unroll
      for (int u = 0; u < U; u++) values(min(start + u * T * S, end - S), x[u]);
      unsigned some = 0;
      #pragma unroll
      for (int u = 0; u < U; u++)
        #pragma unroll
        for (int s = 0; s < S; s++) some |= (unsigned)(DESCENDING ? !(x[u][s] < bound) : !(bound < x[u][s])) << (u * S + s);
      for (; some; some &= some - 1) {
        const int bit = __ffs(some) - 1, at = start + bit / S * T * S + bit % S;
        if (at >= end) break;
        const K key = rlx_to_key<DESCENDING, V>(value(at), at);
        if (last < key) continue;
        const int n = atomicAdd(&count, 1);
        if (n < ROOM) keys[rlx_spread(n)] = key;
      }
    }
    __syncthreads();
  }
  /* The keys that all blocks of the line have found; -1: others are still to come. */
  __device__ int join(int found) {
    __shared__ int before, last;
    const int me = threadIdx.x;
    if (me == 0) before = atomicAdd(words + 1, found);
    __syncthreads();
    for (int n = me; n < found && before + n < ROOM; n += T) memory[before + n] = keys[rlx_spread(n)];
    __threadfence();
    __syncthreads();
    if (me == 0) last = atomicAdd(words, 1) == PARTS - 1;
    __syncthreads();
    if (!last) return -1;
    __threadfence();
    found = __ldcg(words + 1);
    __syncthreads();
    if (me < 2) words[me] = 0;
    return found;
  }
  /* Whether this block has the keys, sorted. */
  template <int U, int S, class G, class F> __device__ bool run(G value, F values) {
    __shared__ int count;
    const int me = threadIdx.x;
    int first = part * PART, end = min(first + PART, N), found = 0;
    bool far = PARTS > 1;
    for (unsigned turn = 0;; turn++) {
      if (me == 0) count = 0;
      rlx_sort_keys<T, E>(keys, me, [&](int n) { return sampled(n, turn, value); }, GROUPS, GROUPS);
      const K last = keys[rlx_spread(RANK - 1)];
      __syncthreads();
      collect<U, S>(count, last, first, end, value, values);
      found = count;
      if (PARTS > 1 && turn == 0 && (found = join(found)) < 0) return false;
      if (KEPT <= found && found <= ROOM) break;
      first = 0, end = N, far = false;
      __syncthreads();
    }
    rlx_sort_keys<T, E>(keys, me, [&](int n) { return far ? rlx_far_key(memory + n) : keys[rlx_spread(n)]; }, found, found);
    return true;
  }
};

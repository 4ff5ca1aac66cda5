
/* Tiles of ROWS rows of groups (segments.py). before[g]: tiles of the groups in front of g; the last one: of all. `rows(g)`: rows of
   a group. slot[g]: the number of its matrix, from `slots`; null: they are in order. */
template <int GROUPS, int ROWS, class C> RLX_FN void rlx_list_tiles(int* before, int* slot, const int* slots, const C& rows) {
  constexpr int EACH = (GROUPS + 31) / 32; /* a lane has adjacent groups */
  if (threadIdx.x < 32) {
    int tiles[EACH], own = 0;
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int g = threadIdx.x * EACH + n;
      if (g < GROUPS) slot[g] = slots ? slots[g] : g;
      tiles[n] = g < GROUPS ? (rows(g) + ROWS - 1) / ROWS : 0;
      own += tiles[n];
    }
    int all = own;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, all, by);
      if (threadIdx.x >= by) all += other;
    }
    if (threadIdx.x == 31) before[GROUPS] = all;
    all -= own;
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int g = threadIdx.x * EACH + n;
      if (g < GROUPS) before[g] = all;
      all += tiles[n];
    }
  }
  __syncthreads();
}
/* The group of a tile: the last one with no more tiles in front. */
template <int GROUPS> RLX_FN int rlx_group_of_tile(const int* before, int tile) {
  int low = 0, high = GROUPS;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (before[middle] <= tile) low = middle;
    else high = middle;
  }
  return low;
}


/* Replaces the places that picks select; of several picks of one place, the last of its line counts. Each place has a word, zero between
   launches, that gets the greatest number of those picks, plus 1; then the place takes that pick's update. Pick `id` of `total` is
   number(id) of its line, and word(id, look(id)) is that of its place, or -1. old(id), update(id, number), put(id, value): of place `id`. */
template <int T, int EACH, class L, class W, class N, class O, class U, class P>
RLX_FN void rlx_replace(unsigned* words, rlx_uindex places, rlx_uindex total, bool halted, L look, W word, N number, O old, U update, P put) {
  constexpr int PART = EACH * T;
  rlx_in_parts(words + places, (total + PART - 1) / PART, gridDim.x, [&](unsigned part) {
    const rlx_uindex first = (rlx_uindex)part * PART + threadIdx.x;
    decltype(look(0)) seen[EACH]; /* all of them, before a check of the first divides the program */
    #pragma unroll
    for (int n = 0; n < EACH; n++) seen[n] = look(first + n * T < total ? first + n * T : 0);
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const rlx_uindex id = first + n * T;
      const rlx_index to = id < total ? word(id, seen[n]) : -1;
      if (to >= 0) atomicMax(words + to, (unsigned)number(id) + 1);
    }
  });
  for (rlx_uindex at = blockIdx.x * PART + threadIdx.x; at < places; at += gridDim.x * PART) {
    unsigned chosen[EACH];
    decltype(old(0)) value[EACH];
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const rlx_uindex id = at + n * T < places ? at + n * T : at;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(chosen[n]) : "l"(words + id) : "memory");
      value[n] = old(id);
    }
    #pragma unroll
    for (int n = 0; n < EACH; n++)
      if (chosen[n]) value[n] = update(at + n * T < places ? at + n * T : at, chosen[n] - 1);
    #pragma unroll
    for (int n = 0; n < EACH; n++) {
      const rlx_uindex id = at + n * T;
      if (id >= places) continue;
      if (chosen[n]) words[id] = 0;
      if (!halted) put(id, value[n]);
    }
  }
}


/* Quantised blocks on tensor cores: weights as exact small integers in bf16. */
/* Where the bytes of a turn come from: global memory, by loads that stay where they stand in the program, or shared memory. */
struct rlx_far {
  static __device__ __forceinline__ void dwords(uint32_t (&a)[4], const void* at) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "l"(at));
  }
  static __device__ __forceinline__ void halves(uint2& a, const void* at) { asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(a.x), "=r"(a.y) : "l"(at)); }
  static __device__ __forceinline__ void bytes(uint32_t& a, const void* at) { asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(a) : "l"(at)); }
};
struct rlx_near {
  static __device__ __forceinline__ void dwords(uint32_t (&a)[4], const void* at) {
    const uint4 all = *(const uint4*)at;
    a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
  }
  static __device__ __forceinline__ void halves(uint2& a, const void* at) { a = *(const uint2*)at; }
  static __device__ __forceinline__ void bytes(uint32_t& a, const void* at) { a = *(const uint32_t*)at; }
};

RLX_FN void rlx_wide_4(float (&a)[4], uint2 halves) {
  a[0] = rlx_wide_f16((uint16_t)halves.x), a[1] = rlx_wide_f16((uint16_t)(halves.x >> 16));
  a[2] = rlx_wide_f16((uint16_t)halves.y), a[3] = rlx_wide_f16((uint16_t)(halves.y >> 16));
}

// Here are the functions of the format (rlx.backends.cuda.blocks).

/* A pair of bf16 from bytes PAIR and PAIR + 2 of four unsigned integers q. Below eight bits it is RLX_LESS + (q - zero), since
   128 + q is the bf16 with the bits 0x4300 | q; eight bits are those of signed integers, whose highest selects what is
   subtracted. */
template <int PAIR> RLX_FN uint32_t rlx_narrow_pair(uint32_t four) {
  if constexpr (RLX_BITS < 8) return __byte_perm(four, 0x43434343u, PAIR ? 0x4341 : 0x4240);
  static_assert(RLX_BITS < 8 || RLX_ZERO == 128, "eight bits are those of signed integers");
  const uint32_t wide = __byte_perm(four, 0, PAIR ? 0x4341 : 0x4240);
  const uint32_t q = (wide & 0x007f007fu) | 0x43004300u, less = (~wide & 0x00800080u) | 0xc300c300u;
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(0x3f803f80u), "r"(less));
  return out;
}
/* One half of a turn: parts[2 x 16 rows of the panel] += weights @ x. Element e of a lane's sums: row e / 2 of its four, column
   e % 2 of its two. */
template <int HALF, int TILES> RLX_FN void rlx_half(const rlx_turn& turn, int t, const uint2 (&x)[TILES], float (&parts)[2][TILES][4]) {
  #pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32_t low = rlx_word<HALF>(turn, 2 * j, t), high = rlx_word<HALF>(turn, 2 * j + 1, t);
    const uint32_t a0 = rlx_narrow_pair<0>(low), a1 = rlx_narrow_pair<0>(high);
    const uint32_t a2 = rlx_narrow_pair<1>(low), a3 = rlx_narrow_pair<1>(high);
    #pragma unroll
    for (int n = 0; n < TILES; n++) rlx_multiply(parts[j][n], a0, a1, a2, a3, x[n]);
  }
}
/* less += -RLX_LESS times the sums of x, which the integers have too much. */
template <int TILES> RLX_FN void rlx_too_much(const uint2 (&x)[TILES], float (&less)[TILES][4]) {
  constexpr uint32_t a = (0x8000u | 0x4300u | (RLX_LESS - 128)) * 0x10001u;
  #pragma unroll
  for (int n = 0; n < TILES; n++) rlx_multiply(less[n], a, a, a, a, x[n]);
}
template <int TILES> RLX_FN void rlx_scale(float (&sum)[2][TILES][4], const float (&by)[4], const float (&parts)[2][TILES][4]) {
  #pragma unroll
  for (int e = 0; e < 8 * TILES; e++) {
    float& all = sum[e / 4 % 2][e / 8][e % 4];
    all = fmaf(by[e / 2 % 4], parts[e / 4 % 2][e / 8][e % 4], all);
  }
}

/* sum += the products of a turn. x_at: the lane's columns of the other operand, as bf16; at: bytes to this turn. */
template <int TILES> RLX_FN void rlx_multiply_turn(
  const rlx_turn& turn, const rlx_numbers& by, int t, const unsigned char* const (&x_at)[TILES], int at, float (&sum)[2][TILES][4]
) {
  float scale[RLX_GROUPS][4], least[4];
  rlx_factors(turn, by, scale, least);
  uint2 x[2][TILES];
  #pragma unroll
  for (int n = 0; n < TILES; n++) {
    if constexpr (RLX_GROUPS == 1) {  // adjacent runs
      const uint4 both = *(const uint4*)(x_at[n] + at + t * 16);
      x[0][n] = make_uint2(both.x, both.y), x[1][n] = make_uint2(both.z, both.w);
    } else {
      for (int half = 0; half < 2; half++) x[half][n] = *(const uint2*)(x_at[n] + at + rlx_run(half, t) * 8);
    }
  }
  float less[TILES][4] = {}, parts[2][TILES][4];
  const auto begin = [&]() {
    #pragma unroll
    for (int e = 0; e < 8 * TILES; e++) parts[e / 4 % 2][e / 8][e % 4] = less[e / 8][e % 4];
  };
  if constexpr (RLX_LESS) rlx_too_much(x[0], less);
  if constexpr (RLX_GROUPS == 2) {
    begin();
    rlx_half<0>(turn, t, x[0], parts);
    rlx_scale(sum, scale[0], parts);
    #pragma unroll
    for (int e = 0; e < 4 * TILES; e++) less[e / 4][e % 4] = 0;
    if constexpr (RLX_LESS) rlx_too_much(x[1], less);
    begin();
    rlx_half<1>(turn, t, x[1], parts);
    rlx_scale(sum, scale[1], parts);
  } else {
    if constexpr (RLX_LESS) rlx_too_much(x[1], less);
    begin();
    rlx_half<0>(turn, t, x[0], parts);
    rlx_half<1>(turn, t, x[1], parts);
    rlx_scale(sum, scale[0], parts);
  }
  if constexpr (RLX_MINS) {  // of factors divided by RLX_LESS
    #pragma unroll
    for (int e = 0; e < 8 * TILES; e++) {
      float& all = sum[e / 4 % 2][e / 8][e % 4];
      all = fmaf(least[e / 2 % 4], less[e / 8][e % 2], all);
    }
  }
}

/* -- one row, as integers: 8-bit products --------------------------------------------------------------------------------

   An element of the left operand is a multiple X of a power of two, that of 256 elements, with |X| < 2^22, and X three signed digits to
   the base 256: three of the four columns of a unit, which is what has a scale of its own. The columns of the product are those of two units, with
   zeros in the other's turns, so that the sums of both are scaled at once. */
/* For a warp: waits until a slot has been filled for the first time. False, at once, when earlier kernels have ended. */
RLX_FN bool rlx_ring_paced(uint64_t* filled, volatile int* waited) {
  int landed = 0;
  while (!landed && !*waited)
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], 0; selp.s32 %0, 1, 0, done; }"
      : "=r"(landed) : "r"(rlx_ring_at(filled)) : "memory");
  return __shfl_sync(0xffffffffu, landed, 0);
}
RLX_FN void rlx_multiply_bytes(int (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
/* parts: the products of SPREAD units, whose turns begin at `at`. Lanes with t < 2 have weights of the first unit, the others those of
   the second one, so that few lanes read a bank of shared memory at once. x: the lane's digits, zeros if its column is of the other
   unit. */
template <int PART> RLX_FN void rlx_multiply_part(const unsigned char* at, int lane, const unsigned char* x, int (&parts)[2][4]) {
  uint32_t words[2][4];
  rlx_unit_words<PART>(words, at, lane);
  const uint2 digits = *(const uint2*)(x + PART * 16);
  #pragma unroll
  for (int j = 0; j < 2; j++)
    rlx_multiply_bytes(parts[j], words[0][2 * j], words[0][2 * j + 1], words[1][2 * j], words[1][2 * j + 1], digits);
}
template <int SPREAD> RLX_FN void rlx_multiply_units(const unsigned char* at, int lane, const unsigned char* x, int (&parts)[2][4]) {
  if constexpr (SPREAD == 2 && RLX_GROUPS == 1) at += lane % 4 / 2 * RLX_TURN_BYTES;
  rlx_multiply_part<0>(at, lane, x, parts);
  if constexpr (RLX_GROUPS == 1) rlx_multiply_part<2 - RLX_GROUPS>(at, lane, x, parts);
}
/* What lanes add to the sums of a panel: `sum` of their columns and four rows; of the multiples of the sums of X, which go to the
   first column, `less` of rows 2 * (t % 2) and the next. */
struct rlx_digit_sums { float sum[2][1][4] = {}, less[2] = {}; };

/* TURNS turns from `at` on, in `block` (the first one, if each turn is a block), of elements that are multiples of `power`. `totals`:
   the sums of x in their units. The units of a block are scaled as integers. */
template <int SPREAD, int TURNS> RLX_FN void rlx_add_turns(
  rlx_digit_sums& all, const unsigned char* block, const unsigned char* at, int lane, const unsigned char* x, const float* totals, float power
) {
  constexpr int STEP = SPREAD < RLX_GROUPS ? 1 : SPREAD / RLX_GROUPS;
  const int unit = lane % 4 * SPREAD / 4;
  int sums[2][4] = {};
  float less[2] = {}, scale[4], least[2];
  const auto add = [&](const unsigned char* numbers, const int (&by)[2][4]) {
    rlx_block_factors(numbers, lane, scale, least);
    for (int r = 0; r < 4; r++) scale[r] *= power;
    #pragma unroll
    for (int i = 0; i < 8; i++) all.sum[i / 4][0][i % 4] = fmaf(scale[i / 2], (float)by[i / 4][i % 4], all.sum[i / 4][0][i % 4]);
    if constexpr (RLX_HAS_LESS)
      for (int r = 0; r < 2; r++) all.less[r] = fmaf(least[r], less[r], all.less[r]);
  };
  #pragma unroll
  for (int v = 0; v < TURNS; v += STEP) {
    int parts[2][4] = {};
    rlx_multiply_units<SPREAD>(at + v * RLX_TURN_BYTES, lane, x + v * 32, parts);
    const float total = totals[v * RLX_GROUPS + unit];
    if constexpr (RLX_SCALED) {
      int scales[4];
      rlx_unit_factors(at + (v + unit / RLX_GROUPS) * RLX_TURN_BYTES + unit % RLX_GROUPS * 32, lane, scales, least);
      #pragma unroll
      for (int i = 0; i < 8; i++) sums[i / 4][i % 4] += scales[i / 2] * parts[i / 4][i % 4];
      for (int r = 0; r < 2; r++) less[r] = fmaf(least[r], total, less[r]);
    } else {
      less[0] = less[1] = total;
      add(block + (v + unit) * RLX_TURN_BYTES, parts);
    }
  }
  if constexpr (RLX_SCALED) add(block, sums);
}
/* A warp's sums of a lane's four rows, over the digits of both units: to[0] to to[3]. */
template <int SPREAD> RLX_FN void rlx_add_units(float* to, const rlx_digit_sums& all, int lane) {
  const bool odd = lane % 2; /* lanes with the last of three digits, and what is less of the last two rows */
  float sum[4];
  #pragma unroll
  for (int row = 0; row < 4; row++) {
    const float* const digits = all.sum[row / 2][0] + row % 2 * 2;
    sum[row] = odd ? digits[0] * 65536 : fmaf(digits[1], 256, digits[0]);
    if (RLX_HAS_LESS && odd == row / 2) sum[row] += all.less[row % 2];
    sum[row] += rlx_from(sum[row], 32, 1);
    if constexpr (SPREAD == 2) sum[row] += rlx_from(sum[row], 32, 2);
  }
  if (lane % 4 == 0) *(float4*)to = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/* The power of two of which elements with a magnitude of at most `most` are multiples below 2^22, and its inverse. */
RLX_FN float rlx_unit(float most, float& inverse) {
  const int bits = __float_as_uint(most) >> 23 & 255, e = bits < 26 ? 26 : bits > 254 ? 254 : bits;
  inverse = __uint_as_float(275 - e << 23);
  return most < INFINITY ? __uint_as_float(e - 21 << 23) : most;
}
/* The digits of N adjacent elements, 8 or 4, each digit `pitch` bytes from the one before, as multiples of a power of two, which is
   returned: the one of the elements of the warp. `total`: the sum of their unit, which several lanes hold. */
template <int N> RLX_FN float rlx_digits(unsigned char* to, int pitch, float* total, const float (&x)[N], int lane) {
  constexpr int LANES = 32 / RLX_GROUPS / N;
  float most = 0, inverse;
  #pragma unroll
  for (int e = 0; e < N; e++) most = rlx_max_f32(most, fabsf(x[e]));
  uint32_t bits; /* of numbers that are not negative: they have the numbers' order, with NaN behind all */
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(bits) : "r"(__float_as_uint(most)));
  const float unit = rlx_unit(__uint_as_float(bits), inverse);
  uint32_t all = 0, digits[3][N / 4];
  #pragma unroll
  for (int four = 0; four < N / 4; four++) {
    uint32_t shifted[4];  // digits with 128 added
    #pragma unroll
    for (int e = 0; e < 4; e++) {  // rounded by the addition of 1.5 * 2^23, whose bits are 0x4b400000
      shifted[e] = __float_as_uint(fmaf(x[four * 4 + e], inverse, 12582912.0f)) + (0x808080u - 0x4b400000u);
      all += shifted[e];
    }
    const uint32_t a = __byte_perm(shifted[0], shifted[1], 0x5140), b = __byte_perm(shifted[2], shifted[3], 0x5140);
    const uint32_t high = __byte_perm(__byte_perm(shifted[0], shifted[1], 0x0062), __byte_perm(shifted[2], shifted[3], 0x0062), 0x5410);
    digits[0][four] = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
    digits[1][four] = __byte_perm(a, b, 0x7632) ^ 0x80808080u;
    digits[2][four] = high ^ 0x80808080u;
  }
  #pragma unroll
  for (int n = 0; n < 3; n++)
    if constexpr (N == 8) *(uint2*)(to + n * pitch) = make_uint2(digits[n][0], digits[n][1]);
    else *(uint32_t*)(to + n * pitch) = digits[n][0];
  #pragma unroll
  for (int by = LANES / 2; by > 0; by /= 2) all += rlx_from(all, 32, by);
  if (lane % LANES == 0) *total = (float)(int)(all - 32u / RLX_GROUPS * 0x808080u) * unit;
  return unit;
}

/* A pair of bf16 from bytes 2 * PAIR and the next of four unsigned integers q: q - zero. */
template <int PAIR> RLX_FN uint32_t rlx_adjacent_pair(uint32_t four) {
  constexpr uint32_t one = 0x3f803f80u, less = (0x8000u | 0x4300u | (RLX_LESS - 128)) * 0x10001u;
  uint32_t out;
  if constexpr (RLX_BITS < 8) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(__byte_perm(four, 0x43434343u, PAIR ? 0x4342 : 0x4140)), "r"(one), "r"(less));
  } else { /* as rlx_narrow_pair */
    const uint32_t wide = __byte_perm(four, 0, PAIR ? 0x4342 : 0x4140);
    const uint32_t q = (wide & 0x007f007fu) | 0x43004300u, high = (~wide & 0x00800080u) | 0xc300c300u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(one), "r"(high));
  }
  return out;
}

/* The weights of a turn, rounded to f16 or bf16, in lines of 128 bytes for each row of the panel: chunk n of 16 bytes of line r is at
   n ^ (r % 8). `chunk`: where the turn begins. To bf16, scales and mins are rounded, too: two weights at a time take three
   instructions instead of nine. f16 has too small a range for that. */
template <bool F16> RLX_FN void rlx_decode_turn(const rlx_turn& turn, int lane, unsigned char* lines, int chunk) {
  float scale[RLX_GROUPS][4], least[4];
  rlx_factors(turn, rlx_wide_numbers(turn, 1.0f), scale, least);
  const auto weights = [&](uint32_t four, float by, float less) {
    if constexpr (!F16) {
      const uint32_t both = rlx_near_pair<false>(by, by), end = RLX_MINS ? rlx_near_pair<false>(-less, -less) : 0x80008000u;
      uint2 out;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out.x) : "r"(rlx_adjacent_pair<0>(four)), "r"(both), "r"(end));
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out.y) : "r"(rlx_adjacent_pair<1>(four)), "r"(both), "r"(end));
      return out;
    } else {
      float w[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const float q = __uint_as_float(__byte_perm(four, 0x4b000000u, 0x7440 + i)) - (8388608.0f + RLX_ZERO);
        w[i] = by * q;
        if constexpr (RLX_MINS) w[i] -= less;
      }
      return make_uint2(rlx_near_pair<F16>(w[0], w[1]), rlx_near_pair<F16>(w[2], w[3]));
    }
  };
  #pragma unroll
  for (int row = 0; row < 4; row++) {
    const int t = lane % 4, line = lane / 4 * 4 + row;
    uint2 runs[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t four = half ? rlx_word<1>(turn, row, t) : rlx_word<0>(turn, row, t);
      runs[half] = weights(four, scale[half % RLX_GROUPS][row], least[row]);
    }
    if constexpr (RLX_GROUPS == 1) {  // adjacent runs
      *(uint4*)(lines + line * 128 + (chunk + t ^ line % 8) * 16) = make_uint4(runs[0].x, runs[0].y, runs[1].x, runs[1].y);
    } else {
      for (int half = 0; half < 2; half++)
        *(uint2*)(lines + line * 128 + (chunk + rlx_run(half, t) / 2 ^ line % 8) * 16 + t % 2 * 8) = runs[half];
    }
  }
}

RLX_FN void rlx_clear_turn(int lane, unsigned char* lines, int chunk) {
  for (int n = 0; n < 4; n++) *(uint4*)(lines + lane * 128 + (chunk + n ^ lane % 8) * 16) = make_uint4(0, 0, 0, 0);
}

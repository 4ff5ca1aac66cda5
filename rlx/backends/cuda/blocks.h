
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

   An element of the left operand is a multiple X of a power of two, with |X| < 2^22, and X three signed digits to the base 256:
   three columns, of the C = 8 / SPREAD columns of a unit, which is what has a scale of its own. The columns of the product are
   those of SPREAD units, with zeros in all turns of the others, so that the sums of all units are scaled at once. */
RLX_FN void rlx_multiply_bytes(int (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}
/* sum += the products of SPREAD units. The first is in turn n of `block`, whose numbers are `by` unless each turn has its own.
   x_own: the digit of lane / 4 among the C, from that turn on; zeros: 32 bytes; totals: the sums of X in units from that turn on. */
template <int SPREAD, bool OWN> RLX_FN void rlx_multiply_units(
  const unsigned char* block, int n, const rlx_numbers& by, int lane, const unsigned char* x_own, const unsigned char* zeros,
  const float* totals, float (&sum)[2][1][4]
) {
  constexpr int C = 8 / SPREAD, TURNS = SPREAD / RLX_GROUPS;
  const int t = lane % 4, own = lane / 4 / C, unit = 2 * t / C;
  int parts[2][4] = {};
  #pragma unroll
  for (int v = 0; v < TURNS; v++) {
    rlx_turn turn;
    rlx_load_integers<rlx_near>(turn, rlx_turn_at(block, n + v), lane);
    uint2 x;
    if constexpr (RLX_GROUPS == 1) {
      x = *(const uint2*)((own == v ? x_own + v * 32 : zeros) + t * 8);
    } else {
      const uint32_t four = *(const uint32_t*)(x_own + v * 32 + own % 2 * 16 + t * 4);
      x = make_uint2(own == 2 * v ? four : 0, own == 2 * v + 1 ? four : 0);
    }
    #pragma unroll
    for (int j = 0; j < 2; j++)
      rlx_multiply_bytes(parts[j], rlx_word<0>(turn, 2 * j, t), rlx_word<0>(turn, 2 * j + 1, t),
        rlx_word<1>(turn, 2 * j, t), rlx_word<1>(turn, 2 * j + 1, t), x);
  }
  float scale[4], less[4];
  rlx_unit_factors<OWN>(block, n + unit / RLX_GROUPS, unit % RLX_GROUPS, lane, by, scale, less);
  const float total = 2 * t % C == 0 ? totals[unit] : 0;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float& all = sum[i / 4][0][i % 4];
    all = fmaf(scale[i / 2], (float)parts[i / 4][i % 4], all);
    if (i % 2 == 0 && RLX_HAS_LESS) all = fmaf(less[i / 2], total, all);
  }
}
/* The sums of both units, in the lanes of the first one. */
template <int SPREAD> RLX_FN void rlx_add_units(float (&sum)[2][1][4]) {
  constexpr int C = 8 / SPREAD;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float& all = sum[i / 4][0][i % 4];
    if (C == 4) all += rlx_from(all, 32, 2);
  }
}

/* The power of two of which elements with a magnitude of at most `most` are multiples below 2^22, and its inverse. */
RLX_FN float rlx_unit(float most, float& inverse) {
  const int bits = __float_as_uint(most) >> 23 & 255, e = bits < 26 ? 26 : bits > 254 ? 254 : bits;
  inverse = __uint_as_float(275 - e << 23);
  return most < INFINITY ? __uint_as_float(e - 21 << 23) : most;
}
/* The digits of four adjacent elements, each digit `pitch` bytes from the one before; the sum of their unit, which 8 / RLX_GROUPS
   lanes hold. */
RLX_FN void rlx_digits_4(unsigned char* to, int pitch, float* total, const float (&x)[4], float inverse, int lane) {
  int all = 0;
  uint32_t digits[4];
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    const int one = __float2int_rn(x[e] * inverse);
    all += one, digits[e] = (uint32_t)(one + 0x808080) ^ 0x808080u;
  }
  const uint32_t a = __byte_perm(digits[0], digits[1], 0x5140), b = __byte_perm(digits[2], digits[3], 0x5140);
  *(uint32_t*)to = __byte_perm(a, b, 0x5410);
  *(uint32_t*)(to + pitch) = __byte_perm(a, b, 0x7632);
  *(uint32_t*)(to + 2 * pitch) = __byte_perm(__byte_perm(digits[0], digits[1], 0x0062), __byte_perm(digits[2], digits[3], 0x0062), 0x5410);
  for (int by = 4 / RLX_GROUPS; by > 0; by /= 2) all += rlx_from(all, 32, by);
  if (lane % (8 / RLX_GROUPS) == 0) *total = (float)all;
}

/* The weights of a turn, rounded to f16 or bf16, in lines of 128 bytes for each row of the panel: chunk n of 16 bytes of line r is at
   n ^ (r % 8). `chunk`: where the turn begins. */
template <bool F16> RLX_FN void rlx_decode_turn(const rlx_turn& turn, int lane, unsigned char* lines, int chunk) {
  float scale[RLX_GROUPS][4], least[4];
  rlx_factors(turn, rlx_wide_numbers(turn, 1.0f), scale, least);
  #pragma unroll
  for (int row = 0; row < 4; row++) {
    const int t = lane % 4, line = lane / 4 * 4 + row;
    uint2 runs[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t four = half ? rlx_word<1>(turn, row, t) : rlx_word<0>(turn, row, t);
      float w[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const float q = __uint_as_float(__byte_perm(four, 0x4b000000u, 0x7440 + i)) - (8388608.0f + RLX_ZERO);
        w[i] = scale[half % RLX_GROUPS][row] * q;
        if constexpr (RLX_MINS) w[i] -= least[row];
      }
      runs[half] = make_uint2(rlx_near_pair<F16>(w[0], w[1]), rlx_near_pair<F16>(w[2], w[3]));
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


/* Quantised blocks on tensor cores: weights as exact small integers in bf16. */
/* Loads that stay where they stand in the program. */
RLX_FN void rlx_load_dwords(uint32_t (&a)[4], const void* at) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "l"(at));
}
RLX_FN void rlx_load_halves(uint2& a, const void* at) { asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(a.x), "=r"(a.y) : "l"(at)); }
RLX_FN void rlx_load_bytes(uint32_t& a, const void* at) { asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(a) : "l"(at)); }
RLX_FN void rlx_wide_4(float (&a)[4], uint2 halves) {
  a[0] = rlx_wide_f16((uint16_t)halves.x), a[1] = rlx_wide_f16((uint16_t)(halves.x >> 16));
  a[2] = rlx_wide_f16((uint16_t)halves.y), a[3] = rlx_wide_f16((uint16_t)(halves.y >> 16));
}

// Here are the functions of the format (rlx.backends.cuda.blocks).

/* A pair of bf16 from bytes 2 * PAIR and 2 * PAIR + 1 of four unsigned integers, less ZERO. 128 + q is the bf16 with the bits
   0x4300 | q below 128; of eight bits the highest selects what is subtracted. */
template <int BITS, int ZERO, int PAIR> RLX_FN uint32_t rlx_narrow_pair(uint32_t four) {
  uint32_t q, less, out;
  if constexpr (BITS < 8) {
    q = __byte_perm(four, 0x43434343u, PAIR ? 0x4342 : 0x4140);
    less = 0xc300c300u + ZERO * 0x10001u;  // -(128 + ZERO)
  } else {
    static_assert(ZERO == 128, "eight bits are those of signed integers");
    const uint32_t wide = __byte_perm(four, 0, PAIR ? 0x4342 : 0x4140);
    q = (wide & 0x007f007fu) | 0x43004300u, less = (~wide & 0x00800080u) | 0xc300c300u;
  }
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(q), "r"(0x3f803f80u), "r"(less));
  return out;
}

/* sum += a @ b: 16 rows by 8 columns, 16 deep. */
RLX_FN void rlx_multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/* One half of a turn: parts[2 x 16 rows of the panel] += weights @ x. Element e of a lane's sums: row e / 2 of its four, column
   e % 2 of its two. */
template <int HALF, int TILES> RLX_FN void rlx_half(
  const rlx_turn& turn, int t, const unsigned char* const (&x_at)[TILES], int at, float (&parts)[2][TILES][4], float (&total)[TILES][4]
) {
  uint2 x[TILES];
  #pragma unroll
  for (int n = 0; n < TILES; n++) x[n] = *(const uint2*)(x_at[n] + at + rlx_run(HALF, t) * 8);
  #pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32_t low = rlx_word<HALF>(turn, 2 * j, t), high = rlx_word<HALF>(turn, 2 * j + 1, t);
    const uint32_t a0 = rlx_narrow_pair<RLX_BITS, RLX_ZERO, 0>(low), a1 = rlx_narrow_pair<RLX_BITS, RLX_ZERO, 0>(high);
    const uint32_t a2 = rlx_narrow_pair<RLX_BITS, RLX_ZERO, 1>(low), a3 = rlx_narrow_pair<RLX_BITS, RLX_ZERO, 1>(high);
    #pragma unroll
    for (int n = 0; n < TILES; n++) rlx_multiply(parts[j][n], a0, a1, a2, a3, x[n]);
  }
  if constexpr (RLX_MINS) {
    const uint32_t one = 0x3f803f80u;
    #pragma unroll
    for (int n = 0; n < TILES; n++) rlx_multiply(total[n], one, one, one, one, x[n]);
  }
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
  float scale[RLX_GROUPS][4], least[4], total[TILES][4] = {}, parts[2][TILES][4] = {};
  rlx_factors(turn, by, scale, least);
  rlx_half<0, TILES>(turn, t, x_at, at, parts, total);
  if constexpr (RLX_GROUPS == 2) {
    float more[2][TILES][4] = {};
    rlx_half<1, TILES>(turn, t, x_at, at, more, total);
    rlx_scale(sum, scale[1], more);
  } else {
    rlx_half<1, TILES>(turn, t, x_at, at, parts, total);
  }
  rlx_scale(sum, scale[0], parts);
  if constexpr (RLX_MINS) {
    #pragma unroll
    for (int e = 0; e < 8 * TILES; e++) {
      float& all = sum[e / 4 % 2][e / 8][e % 4];
      all = fmaf(-least[e / 2 % 4], total[e / 8][e % 2], all);
    }
  }
}

template <bool F16> RLX_FN uint32_t rlx_near_pair(float low, float high) {
  uint32_t out;
  if constexpr (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

/* The weights of a turn, rounded to f16 or bf16, in lines of 128 bytes for each row of the panel: chunk n of 16 bytes of line r is at
   n ^ (r % 8). `chunk`: where the turn begins. */
template <bool F16> RLX_FN void rlx_decode_turn(const rlx_turn& turn, int lane, unsigned char* lines, int chunk) {
  float scale[RLX_GROUPS][4], least[4];
  rlx_factors(turn, rlx_wide_numbers(turn), scale, least);
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

/* Blocks of a cluster. */
RLX_FN void rlx_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
RLX_FN float rlx_of_block(const float* shared, int block) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(shared), there;
  float out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(out) : "r"(there) : "memory");
  return out;
}

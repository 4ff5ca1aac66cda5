
/* What kernels of attention share: elements of narrow floats as types of their own, and scores. A score times FACTOR is in units of
   log2; a key that a query does not see has the score NEVER. */
struct rlx_f16 { uint16_t bits; };
struct rlx_bf16 { uint16_t bits; };
RLX_FN float rlx_wide(unsigned char a) { return a; }
RLX_FN float rlx_wide(float a) { return a; }
RLX_FN float rlx_wide(rlx_f16 a) { return rlx_wide_f16(a.bits); }
RLX_FN float rlx_wide(rlx_bf16 a) { return rlx_wide_bf16(a.bits); }
#define NEVER (-INFINITY)
#define LOG2E 1.4426950408889634f
constexpr bool FOLDED = CAP == 0.f && MASKED != 2 && SCALE > 0.f; /* products of q and k are scores: exp2 takes the scale */
constexpr float FACTOR = FOLDED ? SCALE * LOG2E : 1.f;

RLX_FN float rlx_exp2(float a) { float out; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(a)); return out; }

/* The score of a product of q and k, before masks. */
RLX_FN float rlx_score_of(float dot) {
  if (FOLDED) return dot;
  float s = dot * SCALE;
#ifdef NARROW
  if (CAP > 0.f) s = CAP - __fdividef(2 * CAP, rlx_exp2(s * (2 * LOG2E / CAP)) + 1); /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
#else
  if (CAP > 0.f) s = CAP * tanhf(s / CAP);
#endif
  return s * LOG2E;
}

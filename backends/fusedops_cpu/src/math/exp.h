// exp and powers of two, on float32 lanes.
// The coefficients: tools/fit_functions.py; accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include "simd/several.h"

namespace fusedops {
namespace {

constexpr float MAGIC = 0x1.8p23f;  // a sum with it rounds to a whole number
constexpr float LN_2 = 0.693147181f, LOG2_E = 1.44269504f;
constexpr float NO_POWER = -127.001f * LN_2;  // the exponent becomes -127, whichever way the process rounds

constexpr float ROUNDS = VECTOR_BYTES >= 32 ? MAGIC / LANES : MAGIC;  // to a multiple of 1 / LANES
// x * LOG2_E + ROUNDS for x >= NO_POWER or NaN. AVX-512 rounds it to nearest, whichever way the process does.
// Otherwise, where the process rounds down, up or towards zero (fesetround), a multiple is one step away: the
// polynomials are still exact to 2^-19 there, but below -127 there is no power.
INLINE vfloat rounded_exponent(vfloat x) {
#if VECTOR_BYTES == 64
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return (vfloat)_mm512_fmadd_round_ps((__m512)x, (__m512)all(LOG2_E), (__m512)all(ROUNDS), NEAREST);
#else
  return at_least(ROUNDS - 127, x * LOG2_E + ROUNDS);
#endif
}
template <class V>
INLINE Two<V> rounded_exponent(Two<V> x) {
  return {rounded_exponent(x.a), rounded_exponent(x.b)};
}

#if VECTOR_BYTES >= 32
// Two to a multiple of 1 / LANES: its fraction selects one of LANES factors, which lie in one vector. That leaves so
// little to a polynomial that the third degree is enough: 7 and 4 multiplications for the two functions, instead of 11
// and 8 with a polynomial alone.
constexpr int TABLE_BITS = LANES == 16 ? 4 : 3;

struct alignas(64) PowerTable {
  uint32_t bits[LANES] = {};
  constexpr PowerTable() {
    constexpr uint32_t POWERS[16] = {0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d3, 0x3f9837f0, 0x3f9ef532,
                                     0x3fa5fed7, 0x3fad583f, 0x3fb504f3, 0x3fbd08a4, 0x3fc5672a, 0x3fce248c,
                                     0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d};  // 2**(i / 16)
    for (uint32_t i = 0; i < LANES; i++) bits[i] = POWERS[i * (16 / LANES)] - (i << (23 - TABLE_BITS));
  }
};
constexpr PowerTable POWER_TABLE;

// Coefficients, that of the lowest degree first; r is at most ln(2) / 2 / LANES, f at most 1 / 2 / LANES.
constexpr float EXP_8[] = {0.500064472f, 0.1666685841f};       // (exp(r) - 1 - r) / r^2
constexpr float EXP_16[] = {0.5000161574f, 0.1666671846f};     // the same
constexpr float EXP_NARROW_16[] = {1.0000585f, 0.5000021f};    // (exp(r) - 1) / r
constexpr float EXP2_8[] = {0.2402576298f, 0.0554962218f};     // (2^f - 1 - f ln(2)) / f^2
constexpr float EXP2_16[] = {0.240234288f, 0.05550213649f};    // the same
constexpr float EXP2_NARROW_16[] = {0.69318776f, 0.2402275f};  // (2^f - 1) / f
constexpr const float *EXP = LANES == 16 ? EXP_16 : EXP_8, *EXP2 = LANES == 16 ? EXP2_16 : EXP2_8;

// 2**n for multiples n of 1 / LANES in [-126, 128), from n + ROUNDS; 0 for -127, less than 2**-126 between.
INLINE vfloat power_of_two(vfloat n_rounded) {
  vuint table;
  memcpy(&table, POWER_TABLE.bits, sizeof table);
  const vuint n = bits_as<vuint>(n_rounded);
  return bits_as<vfloat>(selected(table, n) + (n << (23 - TABLE_BITS)));  // the shift adds the fraction too: see above
}
template <class V>
INLINE Two<V> power_of_two(Two<V> n_rounded) {
  return {power_of_two(n_rounded.a), power_of_two(n_rounded.b)};
}

// exp(x) for x <= 0 or NaN. Below the smallest normal number, results are smaller than that number; 0 from x = -88.1
// on.
template <class V>
INLINE V exp_nonpositive(V x) {
  const V c = at_least(NO_POWER, x);  // the power is 0
  const V n = rounded_exponent(c), k = n - ROUNDS;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  V p = r * EXP[1] + EXP[0];
  p = p * (r * r) + r;
  const V power = power_of_two(n);
  return power * p + power;
}

// The same with fewer operations, to |x| / 20 units in the last place more: for sums in which exp(0) is a term. NARROW:
// to 2^-20.
template <bool NARROW = false, class V>
INLINE V exp_of_difference(V x) {
  const V c = at_least(NO_POWER, x);
  const V n = rounded_exponent(c), r = c - (n - ROUNDS) * LN_2, power = power_of_two(n);
  if constexpr (NARROW && LANES == 16) return power * ((r * EXP_NARROW_16[1] + EXP_NARROW_16[0]) * r) + power;
  const V p = r * EXP[1] + EXP[0];
  return power * (p * (r * r) + r) + power;
}

// 2**w for w in [-127, 127.8] or NaN; below the smallest normal number, results are smaller than that number, and 0 at
// -127. NARROW: exact to 2^-21 with AVX-512.
template <bool NARROW = false, class V>
INLINE V exp2_within(V w) {
  const V n = w + ROUNDS, f = w - (n - ROUNDS);
  V p;
  if constexpr (NARROW && LANES == 16) {
    p = f * EXP2_NARROW_16[1] + EXP2_NARROW_16[0];
  } else {
    p = f * EXP2[1] + EXP2[0];
    p = p * f + LN_2;
  }
  const V power = power_of_two(n);
  return power * (p * f) + power;
}
#else
// Coefficients, that of the lowest degree first; r is at most ln(2) / 2, f at most 1 / 2.
constexpr float EXP[] = {0.4999999208f, 0.1666642017f, 0.04166822557f, 0.008374815798f,
                         0.001383684613f};  // (exp(r) - 1 - r) / r^2
constexpr float EXP2[] = {0.6931472057f,   0.2402264689f,   0.05550328777f,
                          0.009618488957f, 0.001339993121f, 0.0001534581216f};  // (2^f - 1) / f

// 2**n for whole n in [-127, 128], from n + MAGIC: 0 and inf at the ends.
INLINE vfloat power_of_two(vfloat n_magic) {
  return bits_as<vfloat>((bits_as<vuint>(n_magic) + (127u - 0x4b400000u)) << 23);
}
template <class V>
INLINE Two<V> power_of_two(Two<V> n_magic) {
  return {power_of_two(n_magic.a), power_of_two(n_magic.b)};
}

// exp(x) for x <= 0 or NaN. Results below the smallest normal number are flushed to 0 from x = -87.7 on.
template <class V>
INLINE V exp_nonpositive(V x) {
  const V c = at_least(NO_POWER, x);
  const V n = rounded_exponent(c), k = n - MAGIC;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  const V r2 = r * r;  // coefficients in pairs: a shorter chain of dependent operations than Horner's form
  V p = r2 * EXP[4] + (r * EXP[3] + EXP[2]);
  p = p * r2 + (r * EXP[1] + EXP[0]);
  p = p * r2 + (r + 1.0f);
  return p * power_of_two(n);
}

template <bool NARROW = false, class V>
INLINE V exp_of_difference(V x) {
  return exp_nonpositive(x);
}

// 2**w for w in [-127, 127] or NaN: 0 below -126.5.
template <bool NARROW = false, class V>
INLINE V exp2_within(V w) {
  const V n = w + MAGIC, f = w - (n - MAGIC), f2 = f * f;
  V p = f2 * EXP2[5] + (f * EXP2[4] + EXP2[3]);
  p = p * f2 + (f * EXP2[2] + EXP2[1]);
  p = p * f2 + (f * EXP2[0] + 1.0f);
  return p * power_of_two(n);
}
#endif

}  // namespace
}  // namespace fusedops

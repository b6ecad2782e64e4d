// exp, the normal distribution function and GELU with its derivative, on float32 lanes.
// Accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include <limits>

#include "several.h"

namespace fusedops {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// A double that float32 cannot hold becomes infinite; the conversion itself would be undefined.
inline float to_float(double value) {
  constexpr double MAX = std::numeric_limits<float>::max();
  return value > MAX ? INF : value < -MAX ? -INF : float(value);
}

constexpr float MAGIC = 0x1.8p23f;  // a sum with it rounds to a whole number
constexpr float LN_2 = 0.693147181f, LOG2_E = 1.44269504f;

// 2**n for whole n in [-127, 128], from n + MAGIC: 0 and inf at the ends.
INLINE vfloat whole_power_of_two(vfloat n_magic) {
  return bits_as<vfloat>((bits_as<vuint>(n_magic) + (127u - 0x4b400000u)) << 23);
}

#if VECTOR_BYTES >= 32
// Two to a multiple of 1 / LANES: its fraction selects one of LANES factors, which lie in one vector. That leaves so
// little to a polynomial that the third degree is enough: 7 and 4 multiplications for the two functions, instead of 11
// and 8 with a polynomial alone.
constexpr int TABLE_BITS = LANES == 16 ? 4 : 3;
constexpr float ROUNDS = MAGIC / LANES;  // a sum with it rounds to a multiple of 1 / LANES

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
  const V c = at_least(-127 * LN_2, x);  // the power is 0
  const V n = c * LOG2_E + ROUNDS, k = n - ROUNDS;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  V p = r * (LANES == 16 ? 0.1666671846f : 0.1666685841f) + (LANES == 16 ? 0.5000161574f : 0.500064472f);
  p = p * (r * r) + r;
  const V power = power_of_two(n);
  return power * p + power;
}

// 2**w for w in [-127, 127.9] or NaN; below the smallest normal number, results are smaller than that number, and 0 at
// -127.
template <class V>
INLINE V exp2_within(V w) {
  const V n = w + ROUNDS, f = w - (n - ROUNDS);
  V p = f * (LANES == 16 ? 0.05550213649f : 0.0554962218f) + (LANES == 16 ? 0.240234288f : 0.2402576298f);
  p = p * f + 0.693147181f;
  const V power = power_of_two(n);
  return power * (p * f) + power;
}
#else
INLINE vfloat power_of_two(vfloat n_magic) { return whole_power_of_two(n_magic); }
template <class V>
INLINE Two<V> power_of_two(Two<V> n_magic) {
  return {power_of_two(n_magic.a), power_of_two(n_magic.b)};
}

// exp(x) for x <= 0 or NaN. Results below the smallest normal number are flushed to 0 from x = -87.7 on.
template <class V>
INLINE V exp_nonpositive(V x) {
  const V c = at_least(-88.0f, x);
  const V n = c * LOG2_E + MAGIC, k = n - MAGIC;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  const V r2 = r * r;  // coefficients in pairs: a shorter chain of dependent operations than Horner's form
  V p = r2 * 0.001383684613f + (r * 0.008374815798f + 0.04166822557f);
  p = p * r2 + (r * 0.1666642017f + 0.4999999208f);
  p = p * r2 + (r + 1.0f);
  return p * power_of_two(n);
}

// 2**w for w in [-127, 127.5] or NaN: 0 below -126.5.
template <class V>
INLINE V exp2_within(V w) {
  const V n = w + MAGIC, f = w - (n - MAGIC), f2 = f * f;
  V p = f2 * 0.0001534581216f + (f * 0.001339993121f + 0.009618488957f);
  p = p * f2 + (f * 0.05550328777f + 0.2402264689f);
  p = p * f2 + (f * 0.6931472057f + 1.0f);
  return p * power_of_two(n);
}
#endif

// 1 / d for d in [1, 2**126] or NaN, to 0.6 units in the last place.
INLINE vfloat reciprocal(vfloat d) {
#if VECTOR_BYTES == 64
  const vfloat estimate = (vfloat)_mm512_rcp14_ps((__m512)d);  // to 2^-14; one step of Newton's method squares that
  return estimate * (1.0f - d * estimate) + estimate;
#else
  return 1.0f / d;
#endif
}

// tanh(u) = -e / (2 + e) for u >= 0, with e = exp(-2 * u) - 1 computed without the difference.
INLINE vfloat tanh_of(vfloat u) {
  const vint sign = bits_as<vint>(u) & INT32_MIN;
  const vfloat w = max(all(-40.0f), bits_as<vfloat>(bits_as<vint>(u) & INT32_MAX) * (-2.0f * LOG2_E));
  const vfloat n = w + MAGIC, f = w - (n - MAGIC), f2 = f * f;
  vfloat p = f2 * 0.0001534581216f + (f * 0.001339993121f + 0.009618488957f);
  p = p * f2 + (f * 0.05550328777f + 0.2402264689f);
  const vfloat power = whole_power_of_two(n), e = power * (p * f2 + f * 0.6931472057f) + (power - 1.0f);
  return bits_as<vfloat>((bits_as<vint>(e / (e + 2.0f)) & INT32_MAX) | sign);
}

template <class V>
INLINE Two<V> reciprocal(Two<V> d) {
  return {reciprocal(d.a), reciprocal(d.b)};
}

// Phi(u), the distribution function of the normal distribution; density is exp(-u * u / 2). With x = |u| / sqrt(2),
// erfc(x) * exp(x * x) is a polynomial in 1 / (1 + 0.45 * x), to 1e-9.
constexpr float NORMAL_END = 13.2689f;  // from here on, density and Phi(-u) are 0
template <class V>
INLINE V normal_cdf(V u, V& density) {
  const V m = at_most(NORMAL_END, magnitude(u));
  density = exp2_within(m * m * (-0.5f * LOG2_E));
  const V t = reciprocal(m * (0.45f * 0.70710678f) + 1.0f), t2 = t * t;
  V p = t2 * (0.5f * 0.09256983814f) + (t * (0.5f * -0.4941052593f) + 0.5f * 0.8571696073f);
  p = p * t2 + (t * (0.5f * -0.3758046842f) + 0.5f * 0.4601717157f);
  p = p * t2 + (t * (0.5f * 0.2010090537f) + 0.5f * 0.2589897296f);
  const V tail = p * t * density;  // Phi(-|u|)
  return where_positive(u, 1.0f - tail, tail);
}

// 0.5 * (1 + tanh(z)) = 1 / (1 + 2**w), where z = sqrt(2 / pi) * (u + 0.044715 * u**3) and w = u * (A + B * u * u).
constexpr float TANH_A = -2.0f * 0.7978845608f * LOG2_E, TANH_B = 0.044715f * TANH_A;

template <bool TANH, class V>
INLINE V gelu(V u) {
  if constexpr (TANH) {
    const V w = u * (u * u * TANH_B + TANH_A);
    const V factor = reciprocal(exp2_within(at_most(126.0f, at_least(-127.0f, w))) + 1.0f);
    return u * zero_above(126.0f, w, factor);
  } else {
    V density;
    return u * normal_cdf(u, density);
  }
}

// Returns gelu(u) / u, and the derivative of gelu at u.
template <bool TANH, class V>
INLINE V gelu_factor(V u, V& derivative) {
  if constexpr (TANH) {
    u = at_most(10.0f, at_least(-10.0f, u));  // beyond, the derivative is 0 or 1; within, |w| < 127
    const V q = u * u;
    const V e = exp2_within(u * (q * TANH_B + TANH_A));
    const V s = reciprocal(e + 1.0f);
    const V dw = u * (q * (3 * TANH_B * LN_2) + TANH_A * LN_2);  // u * dw/du * ln(2)
    derivative = s - s * dw * (e * s);                           // e * s is 1 - s without cancellation
    return s;
  } else {
    u = at_most(NORMAL_END, at_least(-NORMAL_END, u));
    V density;
    const V cdf = normal_cdf(u, density);
    derivative = cdf + u * density * 0.3989422804f;
    return cdf;
  }
}

template <bool TANH, class V>
INLINE V gelu_derivative(V u) {
  V derivative;
  gelu_factor<TANH>(u, derivative);
  return derivative;
}

}  // namespace
}  // namespace fusedops

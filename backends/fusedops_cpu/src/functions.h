// exp, the normal distribution function and GELU with its derivative, on float32 lanes.
// Accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include <limits>

#include "vector.h"

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
INLINE vfloat power_of_two(vfloat n_magic) {
  return bits_as<vfloat>((bits_as<vuint>(n_magic) + (127u - 0x4b400000u)) << 23);
}

// exp(x) for x <= 0 or NaN. Results below the smallest normal number are flushed to 0 from x = -87.7 on.
INLINE vfloat exp_nonpositive(vfloat x) {
  vfloat c = max(all(-88.0f), x);
  vfloat n = c * LOG2_E + MAGIC, k = n - MAGIC;
  vfloat r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  vfloat r2 = r * r;  // coefficients in pairs: a shorter chain of dependent operations than Horner's form
  vfloat p = r2 * 0.001383684613f + (r * 0.008374815798f + 0.04166822557f);
  p = p * r2 + (r * 0.1666642017f + 0.4999999208f);
  p = p * r2 + (r + 1.0f);
  return p * power_of_two(n);
}

// 2**w for w in [-127, 128] or NaN: 0 below -126.5, inf above 127.5.
INLINE vfloat exp2_within(vfloat w) {
  vfloat n = w + MAGIC, f = w - (n - MAGIC);
  vfloat f2 = f * f;
  vfloat p = f2 * 0.0001534581216f + (f * 0.001339993121f + 0.009618488957f);
  p = p * f2 + (f * 0.05550328777f + 0.2402264689f);
  p = p * f2 + (f * 0.6931472057f + 1.0f);
  return p * power_of_two(n);
}

// tanh(u) = -e / (2 + e) for u >= 0, with e = exp(-2 * u) - 1 computed without the difference.
INLINE vfloat tanh_of(vfloat u) {
  const vint sign = bits_as<vint>(u) & INT32_MIN;
  const vfloat w = max(all(-40.0f), bits_as<vfloat>(bits_as<vint>(u) & INT32_MAX) * (-2.0f * LOG2_E));
  const vfloat n = w + MAGIC, f = w - (n - MAGIC), f2 = f * f;
  vfloat p = f2 * 0.0001534581216f + (f * 0.001339993121f + 0.009618488957f);
  p = p * f2 + (f * 0.05550328777f + 0.2402264689f);
  const vfloat power = power_of_two(n), e = power * (p * f2 + f * 0.6931472057f) + (power - 1.0f);
  return bits_as<vfloat>((bits_as<vint>(e / (e + 2.0f)) & INT32_MAX) | sign);
}

// Phi(u), the distribution function of the normal distribution; density is exp(-u * u / 2). With x = |u| / sqrt(2),
// erfc(x) * exp(x * x) is a polynomial in 1 / (1 + 0.45 * x), to 1e-9.
INLINE vfloat normal_cdf(vfloat u, vfloat& density) {
  vfloat magnitude = bits_as<vfloat>(bits_as<vint>(u) & 0x7fffffff);
  density = exp2_within(max(all(-127.0f), u * u * (-0.5f * LOG2_E)));
  vfloat t = 1.0f / (magnitude * (0.45f * 0.70710678f) + 1.0f);
  vfloat t2 = t * t;
  vfloat p = t2 * 0.09256983814f + (t * -0.4941052593f + 0.8571696073f);
  p = p * t2 + (t * -0.3758046842f + 0.4601717157f);
  p = p * t2 + (t * 0.2010090537f + 0.2589897296f);
  vfloat tail = p * t * (density * 0.5f);  // Phi(-|u|)
  return u > 0.0f ? 1.0f - tail : tail;
}

// 0.5 * (1 + tanh(z)) = 1 / (1 + 2**w), where z = sqrt(2 / pi) * (u + 0.044715 * u**3) and w = u * (A + B * u * u).
constexpr float TANH_A = -2.0f * 0.7978845608f * LOG2_E, TANH_B = 0.044715f * TANH_A;

template <bool TANH>
INLINE vfloat gelu(vfloat u) {
  if constexpr (TANH) {
    vfloat w = u * (u * u * TANH_B + TANH_A);
    return u / (exp2_within(min(all(128.0f), max(all(-127.0f), w))) + 1.0f);
  } else {
    vfloat density;
    return u * normal_cdf(u, density);
  }
}

// Returns gelu(u) / u, and the derivative of gelu at u.
template <bool TANH>
INLINE vfloat gelu_factor(vfloat u, vfloat& derivative) {
  if constexpr (TANH) {
    u = min(all(10.0f), max(all(-10.0f), u));  // beyond, the derivative is 0 or 1; within, |w| < 127
    vfloat q = u * u;
    vfloat e = exp2_within(u * (q * TANH_B + TANH_A));
    vfloat s = 1.0f / (e + 1.0f);
    vfloat dw = u * (q * (3 * TANH_B * LN_2) + TANH_A * LN_2);  // u * dw/du * ln(2)
    derivative = s - s * dw * (e * s);                          // e * s is 1 - s without cancellation
    return s;
  } else {
    u = min(all(15.0f), max(all(-15.0f), u));
    vfloat density, cdf = normal_cdf(u, density);
    derivative = cdf + u * density * 0.3989422804f;
    return cdf;
  }
}

template <bool TANH>
INLINE vfloat gelu_derivative(vfloat u) {
  vfloat derivative;
  gelu_factor<TANH>(u, derivative);
  return derivative;
}

}  // namespace
}  // namespace fusedops

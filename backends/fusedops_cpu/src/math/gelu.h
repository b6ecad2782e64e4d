// GELU and its derivative, on float32 lanes.
#pragma once

#include "math/normal.h"

namespace fusedops {
namespace {

// 0.5 * (1 + tanh(z)) = 1 / (1 + 2**w), where z = sqrt(2 / pi) * (u + 0.044715 * u**3) and w = u * (A + B * u * u).
constexpr float TANH_A = -2.0f * 0.7978845608f * LOG2_E, TANH_B = 0.044715f * TANH_A;

template <bool TANH, bool NARROW = false, class V>
INLINE V gelu(V u) {
  if constexpr (TANH) {
    const V w = u * (u * u * TANH_B + TANH_A);
    const V factor = reciprocal(exp2_within<NARROW>(at_most(126.0f, at_least(-127.0f, w))) + 1.0f);
    return u * zero_above(126.0f, w, factor);
  } else {
    V density;  // u * Phi(u) is u - u * Phi(-u) for u > 0; inf and -inf give inf and NaN
    const V m = at_least(-NORMAL_END, negative_magnitude(u));
    return normal_cdf<NARROW>(m, density) * at_most(u, m) + positive_part(u);
  }
}

// Returns gelu(u) / u, and the derivative of gelu at u.
template <bool TANH, bool NARROW = false, class V>
INLINE V gelu_factor(V u, V& derivative) {
  if constexpr (TANH) {
    u = at_most(10.0f, at_least(-10.0f, u));  // beyond, the derivative is 0 or 1; within, |w| < 127
    const V q = u * u;
    const V e = exp2_within<NARROW>(u * (q * TANH_B + TANH_A));
    const V s = reciprocal(e + 1.0f);
    const V dw = u * (q * (3 * TANH_B * LN_2) + TANH_A * LN_2);  // u * dw/du * ln(2)
    derivative = s - s * dw * (e * s);                           // e * s is 1 - s without cancellation
    return s;
  } else {
    u = at_most(NORMAL_END, at_least(-NORMAL_END, u));
    V density;
    const V tail = normal_cdf<NARROW>(negative_magnitude(u), density), cdf = where_positive(u, 1.0f - tail, tail);
    derivative = cdf + u * density * 0.3989422804f;
    return cdf;
  }
}

template <bool TANH, bool NARROW = false, class V>
INLINE V gelu_derivative(V u) {
  V derivative;
  gelu_factor<TANH, NARROW>(u, derivative);
  return derivative;
}

}  // namespace
}  // namespace fusedops

// tanh, sigmoid and silu, on float32 lanes.
// The coefficients: tools/fit_functions.py; accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include "math/exp.h"

namespace fusedops {
namespace {

// (tanh(u) / u - 1) / u^2 for |u| < 0.55, by powers of u^2: the relative error of tanh is 2^-24.7.
constexpr float TANH[] = {-0.333329466f, 0.133207242f, -0.0526717598f, 0.0164374758f};

// The polynomial for |u| < 0.55; above, 1 - 2 * e / (1 + e) with e = exp(-2 * |u|).
template <class V>
INLINE V tanh_of(V u) {
  const V q = u * u, m = negative_magnitude(u), e = exp_of_difference(m * 2.0f);
  V p = (q * TANH[3] + TANH[2]) * (q * q) + (q * TANH[1] + TANH[0]);
  p = p * q + 1.0f;
  const V rest = e * reciprocal(e * 0.5f + 0.5f);
  return where_positive(m + 0.55f, p * u, where_positive(u, 1.0f - rest, rest - 1.0f));
}

// ---- silu and sigmoid ----

// g * sigmoid(g), the act of GateFunction for silu, bit for bit unless NARROW: for results of 16 bits.
template <bool NARROW = false, class V>
INLINE V silu_of(V g) {
  const V w = g * -LOG2_E, e = exp2_within<NARROW>(at_most(126.0f, at_least(-127.0f, w)));
  return zero_above(126.0f, w, g * reciprocal(e + 1.0f));
}

// act(g) and its derivative: with s = sigmoid(g), f * s and s * (base + f * (1 - s)), where f is g and base 1 for silu,
// and f is 1 and base 0 for sigmoid.
struct GateFunction {
  int32_t silu;  // all bits, or none
  float base;

  struct Value {
    vfloat act, slope;
  };
  INLINE Value operator()(vfloat g) const {
    const vfloat w = g * -LOG2_E, e = exp2_within(at_most(126.0f, at_least(-127.0f, w)));
    const vfloat s = zero_above(126.0f, w, reciprocal(e + 1.0f));
    const vfloat f = (vint{} | silu) ? zero_above(126.0f, w, g) : all(1.0f);  // where s is 0: -inf * 0 would be NaN
    return {f * s, s * (at_most(1e30f, f) * (e * s) + base)};                 // and so would be inf * 0, of an f of inf
  }
};

inline GateFunction gate_function(bool sigmoid) { return {sigmoid ? 0 : -1, sigmoid ? 0.0f : 1.0f}; }

}  // namespace
}  // namespace fusedops

// f(gate) * up, where f is the sigmoid-weighted gate of SwiGLU or GELU, and its gradients, on float32 lanes.
#pragma once

#include "api.h"
#include "chunks.h"
#include "math/exp.h"
#include "math/finite.h"
#include "math/gelu.h"
#include "simd/several.h"

namespace fusedops {
namespace {

struct Settings {
  float limit, alpha, offset, exponent;
  bool limited;
  template <class Call>
  explicit Settings(const Call& call)
      : limit(call.limit == call.limit ? to_float(call.limit) : INF),
        alpha(to_float(call.alpha)),
        offset(to_float(call.offset)),
        exponent(to_finite(call.alpha * -double(LOG2_E))),
        limited(call.limit == call.limit) {}
};

// gate * sigmoid(alpha * gate) * (up + offset), where gate <= limit and |up| <= limit by a clamp.
class Swish {
 public:
  explicit Swish(const Settings& s)
      : limit_(s.limit), alpha_(s.alpha), offset_(s.offset), exponent_(s.exponent), unlimited_(s.limited ? 0 : -1) {}

  template <class V>
  INLINE V operator()(V gate, V up) const {
    const Parts<V> p(*this, gate);
    return p.gate * p.sigmoid * (clamped(up) + offset_);
  }

  // The gradients pass at the bounds of the clamp.
  template <class V>
  INLINE void gradients(V grad, V gate, V up, V& dgate, V& dup) const {
    const Parts<V> p(*this, gate);
    const V swish = p.gate * p.sigmoid, slope = p.sigmoid + swish * (p.rest * alpha_);
    dgate = where_within(gate, grad * (clamped(up) + offset_) * slope);
    dup = where_within(magnitude(up), grad * swish);
  }

 private:
  template <class V>
  struct Parts {
    V gate, sigmoid, rest;  // rest: 1 - sigmoid
    INLINE Parts(const Swish& f, V given) {
      const V clamped = at_most(f.limit_, given), w = clamped * f.exponent_;
      const V e = exp2_within(at_most(126.0f, at_least(-127.0f, w)));
      gate = zero_above(126.0f, w, clamped);  // where the sigmoid is 0: -inf * 0 would be NaN
      sigmoid = zero_above(126.0f, w, reciprocal(e + 1.0f));
      rest = e * sigmoid;
    }
  };
  template <class V>
  INLINE V clamped(V up) const {
    return at_least(-limit_, at_most(limit_, up));
  }
  INLINE vfloat where_within(vfloat x, vfloat y) const { return (x <= limit_) | unlimited_ ? y : vfloat{}; }
  template <class V>
  INLINE Two<V> where_within(Two<V> x, Two<V> y) const {
    return {where_within(x.a, y.a), where_within(x.b, y.b)};
  }

  float limit_, alpha_, offset_, exponent_;
  int32_t unlimited_;
};

// gelu(gate) * up. A gate below -32, -inf included, gives 0.
template <bool TANH, bool NARROW>
class Gelu {
 public:
  explicit Gelu(const Settings&) {}

  template <class V>
  INLINE V operator()(V gate, V up) const {
    return gelu<TANH, NARROW>(at_least(-32.0f, gate)) * up;
  }

  template <class V>
  INLINE void gradients(V grad, V gate, V up, V& dgate, V& dup) const {
    V derivative;
    const V factor = gelu_factor<TANH, NARROW>(gate, derivative);
    dgate = grad * up * derivative;
    dup = grad * at_least(-32.0f, gate) * factor;
  }
};

// bfloat16 is read by these loops themselves: stores of what a loop before them reads take longer than the conversion.
template <class T>
using Forward = void (*)(const Settings&, const T* gate, const T* up, float* y, int64_t n);
template <class T>
using Backward = void (*)(const Settings&, const T* grad, const T* gate, const T* up, float* dgate, float* dup,
                          int64_t n);

template <class T, class Function>
void compute(const Settings& settings, const T* gate, const T* up, float* y, int64_t n) {
  const Function f(settings);
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    store(y + i, f(load_ahead(gate + i, lanes), load_ahead(up + i, lanes)), lanes);
  });
}

template <class T, class Function>
void compute_gradients(const Settings& settings, const T* grad, const T* gate, const T* up, float* dgate, float* dup,
                       int64_t n) {
  const Function f(settings);
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    auto g = load_ahead(gate + i, lanes), dg = g, du = g;
    f.gradients(load_ahead(grad + i, lanes), g, load_ahead(up + i, lanes), dg, du);
    if (dgate) store(dgate + i, dg, lanes);
    if (dup) store(dup + i, du, lanes);
  });
}

template <class T>
const Forward<T> FORWARD[] = {compute<T, Swish>, compute<T, Gelu<true, is_narrow<T>>>,
                              compute<T, Gelu<false, is_narrow<T>>>};
template <class T>
const Backward<T> BACKWARD[] = {compute_gradients<T, Swish>, compute_gradients<T, Gelu<true, is_narrow<T>>>,
                                compute_gradients<T, Gelu<false, is_narrow<T>>>};

// ---- Interleaved gate and up ----

// Writes whole vectors.
template <class T>
NOINLINE void unzip(const T* pairs, int64_t n, float* gate, float* up) {
  each(n, [=](int64_t i, auto lanes) {
    vfloat g, u;
    load_pairs(pairs + 2 * i, lanes, g, u);
    store(gate + i, g);
    store(up + i, u);
  });
}

template <class T>
NOINLINE void zip(T* pairs, int64_t n, const float* gate, const float* up) {
  each(n, [=](int64_t i, auto lanes) { store_pairs(pairs + 2 * i, load(gate + i), load(up + i), lanes); });
}

}  // namespace
}  // namespace fusedops

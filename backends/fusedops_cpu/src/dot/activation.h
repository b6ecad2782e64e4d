// The activations behind a product, and their gradients, on parts of rows in float32.
#pragma once

#include <algorithm>

#include "elementwise/gated.h"

namespace fusedops {
namespace {

template <class Call>
bool is_gated(const Call& call) {
  return call.activation <= GELU_ERF;
}

// The settings of a call that has none beside its activation, an Ungated.
struct PlainActivation {
  int64_t activation, interleaved = 0;
  double limit = INF, alpha = 1, offset = 0;
};

// On a part of a row.
class ActivationPass {
 public:
  static constexpr int64_t CHUNK = 512;  // numbers of a part, at most

  template <class Call>
  explicit ActivationPass(const Call& call)
      : code_(call.activation), gated_(is_gated(call)), interleaved_(gated_ && call.interleaved), settings_(call) {
    std::fill(ones_, ones_ + CHUNK, 1.0f);
  }
  bool interleaved() const { return interleaved_; }
  bool gated() const { return gated_; }

  // y[0..n) of n numbers, and of as many of up, where it is gated.
  void forward(const float* gate, const float* up, float* y, int64_t n) const {
    if (code_ < RELU) return FORWARD<float>[code_ % 3](settings_, gate, gated_ ? up : ones_, y, n);
    const bool squared = code_ == SQUARED_RELU;
    each(n, [=](int64_t i, auto lanes) {
      const vfloat v = positive_part(load(gate + i, lanes));
      store(y + i, squared ? v * v : v, lanes);
    });
  }

  void backward(const float* grad, const float* gate, const float* up, float* dgate, float* dup, int64_t n) const {
    if (code_ < RELU)
      return BACKWARD<float>[code_ % 3](settings_, grad, gate, gated_ ? up : ones_, dgate, gated_ ? dup : nullptr, n);
    const bool squared = code_ == SQUARED_RELU;
    each(n, [=](int64_t i, auto lanes) {
      const vfloat g = load(gate + i, lanes);
      const vfloat slope = squared ? positive_part(g) * 2.0f : where_positive(g, all(1.0f), vfloat{});
      store(dgate + i, load(grad + i, lanes) * slope, lanes);
    });
  }

 private:
  int64_t code_;
  bool gated_, interleaved_;
  Settings settings_;
  float ones_[CHUNK];
};

INLINE void add_to(float* sum, const float* terms, int64_t n) {
  each(n, [=](int64_t i, auto lanes) { store(sum + i, load(sum + i, lanes) + load(terms + i, lanes), lanes); });
}

}  // namespace
}  // namespace fusedops

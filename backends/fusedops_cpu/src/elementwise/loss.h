// Rows of logits in chunks that stay in the L1 cache: their exponentials, and the gradient of a loss.
//
// Each lane has its own largest number so far, and the sum of the exponentials beside it; the lanes are joined at the
// end of the row. While a chunk is computed, the next one is fetched.
#pragma once

#include <algorithm>
#include <cmath>

#include "api.h"
#include "chunks.h"
#include "math/exp.h"
#include "math/finite.h"
#include "simd/several.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 1024;
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// ---- Chunks of float32 ----

// Where the chunk after this one is in memory.
struct Ahead {
  const char* next;
  int64_t size;  // of an element
  template <class Lanes>
  INLINE void fetch(int64_t i, Lanes) const {
    for (int64_t at = 0; at < Lanes::most * size; at += 64) __builtin_prefetch(next + i * size + at);
  }
};

// The sum of exp(z - top) in each lane.
struct Exponentials {
  vfloat tops = all(LOWEST), sums = {};  // not -inf: -inf - -inf is NaN

  template <class T>
  NOINLINE void add(const T* z, int64_t n, Ahead ahead) {
    vfloat top = tops, chunk = {};
    each_group<Several>(
        n, [&](int64_t i, auto lanes) { top = max(joined_max(where_loaded(load(z + i, lanes), lanes, LOWEST)), top); });
    each_group<Pair>(n, [&](int64_t i, auto lanes) {
      ahead.fetch(i, lanes);
      chunk += joined_sum(exp_of_difference(where_loaded(load(z + i, lanes), lanes, -INF) - top));
    });
    sums = sums * exp_nonpositive(tops - top) + chunk;
    tops = top;
  }
  float top() const { return max_of(tops); }
  float sum() const { return sum_of(sums * exp_nonpositive(tops - top())); }
};

// The sum of the differences of n numbers from `origin`.
template <class T>
NOINLINE double sum_of_chunk(const T* z, int64_t n, float origin) {
  vfloat sums = {};
  each_group<Pair>(
      n, [&](int64_t i, auto lanes) { sums += joined_sum(where_loaded(load(z + i, lanes) - origin, lanes, 0)); });
  return sum_of(sums);
}

// The gradient of z in a row is `factor` * exp(z - origin) - `spread`, and `hit` less at the target.
struct RowGradient {
  float origin, factor, spread, hit = 0, cap = 0;
};

template <class T>
NOINLINE void gradient_of_chunk(const T* x, float* d, int64_t n, RowGradient row, Ahead ahead) {
  each_group<Several>(n, [=](int64_t i, auto lanes) {
    ahead.fetch(i, lanes);
    store(d + i, exp_of_difference<is_narrow<T>>(load(x + i, lanes) - row.origin) * row.factor - row.spread, lanes);
  });
}

template <class T>
INLINE float number_at(const T* p) {
  return load(p, Part{1})[0];
}

// The loss of a row from its exponentials, its number at the target and the mean of its numbers.
NOINLINE double loss_of_row(double smoothing, double z_loss, const Exponentials& row, float z_target, double mean,
                            double& lse) {
  const float top = row.top();
  const double log_sum = std::log(double(row.sum()));
  lse = top + log_sum;
  // differences from the largest number: lse and the numbers may be large beside the loss
  double loss = log_sum - (1 - smoothing) * (double(z_target) - top);
  if (smoothing != 0) loss -= smoothing * (mean - top);
  if (z_loss != 0) loss += z_loss * lse * lse;
  return loss;
}

}  // namespace
}  // namespace fusedops

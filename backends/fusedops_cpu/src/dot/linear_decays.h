// The decays of a chunk of linear attention, and the products of its positions that they weight.
//
// Each weight is a product of the factors exp(decay) between two positions, and never a quotient of two: where decays
// are at most 0 nothing overflows, and -inf gives 0 without NaN. Two positions s <= t have the factors after s, up to
// t.
#pragma once

#include <cmath>

#include "math/exp.h"
#include "simd/several.h"
#include "tile/chunk_products.h"

namespace fusedops {
namespace {

// exp(x), the number of the C library where x > 0.
INLINE vfloat factor_of(vfloat x) {
  vfloat factors = exp_nonpositive(x);
  bool grows = false;
  for (int i = 0; i < LANES; i++) grows = grows || x[i] > 0.0f;
  if (grows)
    for (int i = 0; i < LANES; i++) factors[i] = std::exp(x[i]);
  return factors;
}

// The sum of the products of two rows, in one order.
INLINE float dot(const float* x, const float* y, int64_t n) {
  vfloat sums = {};
  each(n, [&](int64_t i, auto lanes) { sums = sums + load(x + i, lanes) * load(y + i, lanes); });
  return sum_of(sums);
}

// With a decay for each head, `start` and `end` are factors of positions, else of the rows of the state at each of
// them.
class Decays {
 public:
  Decays(int64_t rows, bool by_row, bool with_gradients, Parts& parts)
      : by_row_(by_row), rows_(rows), stride_(by_row ? stride_of(rows) : 1) {
    const int64_t all = CHUNK * stride_;
    start = parts.take(all), end = parts.take(all);
    if (by_row) {
      factor_ = parts.take(all), span_ = parts.take(all), later_ = parts.take(all), earlier_ = parts.take(all);
      panels_ = parts.take(panels_floats(CHUNK, rows));
    } else {
      weights_ = parts.take(CHUNK * CHUNK);
    }
    if (!with_gradients) return;
    grad = parts.take(all);
    if (by_row) {
      of_later_ = parts.take(all), of_earlier_ = parts.take(all);
    } else {
      between_ = parts.take(CHUNK * CHUNK);
    }
  }
  float *start, *end;  // the factors up to each position, and those after it
  float* grad;         // the gradient of the decays, at each position as `start`

  int64_t stride() const { return stride_; }

  // Reads the decays of a head, which are `step` apart; null: 0.
  NOINLINE void fill(const float* decay, int64_t step, int64_t count) {
    count_ = count;
    if (by_row_) {
      for (int64_t t = 0; t < count; t++)
        each(rows_, [&](int64_t i, auto lanes) {
          const vfloat f = factor_of(load(decay + t * step + i, lanes));
          store(factor_ + t * stride_ + i, f);
          store(start + t * stride_ + i, t ? load(start + (t - 1) * stride_ + i) * f : f);
        });
      for (int64_t t = count - 1; t >= 0; t--)
        each(rows_, [&](int64_t i, auto) {
          const int64_t at = t * stride_ + i, next = at + stride_;
          store(end + at, t + 1 < count ? load(end + next) * load(factor_ + next) : all(1.0f));
        });
      return;
    }
    for (int64_t t = 0; t < count; t++) {
      const float f = decay ? std::exp(decay[t * step]) : 1.0f;
      float* row = weights_ + t * CHUNK;
      if (t) each(t, [&](int64_t s, auto lanes) { store(row + s, load(row - CHUNK + s, lanes) * f, lanes); });
      row[t] = 1.0f;
      start[t] = t ? start[t - 1] * f : f;
    }
    memcpy(end, weights_ + (count - 1) * CHUNK, count * sizeof(float));
  }

  // Starts the gradient of the decays.
  void clear_gradient() {
    memset(grad, 0, count_ * stride_ * sizeof(float));
    if (!by_row_) memset(between_, 0, count_ * CHUNK * sizeof(float));
  }

  // to = x times some factors of each position, `start` or `end`, and `sign`.
  NOINLINE void scale(const float* factors, const float* x, float* to, int64_t stride, float sign = 1.0f) const {
    for (int64_t t = 0; t < count_; t++)
      each(rows_, [&](int64_t i, auto) {
        const vfloat f = by_row_ ? load(factors + t * stride_ + i) : all(factors[t]);
        store(to + t * stride + i, load(x + t * stride + i) * f * sign);
      });
  }

  // Returns a state that the decays of the whole chunk have passed, as a term of a sum: it goes from `from` to `to`.
  NOINLINE Into passed(const float* from, float* to, int64_t stride) const {
    const float* const last = start + (count_ - 1) * stride_;
    if (!by_row_) return {to, stride, from, last[0]};
    for (int64_t i = 0; i < rows_; i++)
      each(stride, [&](int64_t j, auto) { store(to + i * stride + j, load(from + i * stride + j) * last[i]); });
    return added_to(to, stride);
  }

  // to (count, CHUNK) = the weighted products of the rows of x with those of k up to each; if `strict`, without a row's
  // own, and times -1. 0 above the diagonal. With a decay for each head, `plain` has the products without weights.
  NOINLINE void products(const float* x, const float* k, const float* plain, int64_t stride, bool strict, float* to) {
    for (int64_t first = 0; by_row_ && first < count_; first += BLOCK_POSITIONS) {
      const int64_t n = block(first, x, k, stride);
      if (first)
        product({later_, stride}, n, turned(earlier_, stride, first, rows_, panels_), first, rows_,
                {to + first * CHUNK, CHUNK});
      for (int64_t t = first; t < first + n; t++) own_products(x + t * stride, k, stride, t, first, to + t * CHUNK);
    }
    const float sign = sign_of(strict);
    const float* const from = by_row_ ? to : plain;
    for (int64_t t = 0; t < count_; t++) {
      const int64_t n = t + !strict;
      each(n, [&](int64_t s, auto lanes) {
        const vfloat weight = by_row_ ? all(sign) : load(weights_ + t * CHUNK + s) * sign;
        store(to + t * CHUNK + s, load(from + t * CHUNK + s) * weight, lanes);
      });
      memset(to + t * CHUNK + n, 0, (CHUNK - n) * sizeof(float));
    }
  }

  // Passes the gradient of weighted products on: with a decay for each head, to `sums`, that of the plain products;
  // else to dx and dk, those of x and k. Adds to the gradient of the decays. `of` is overwritten.
  NOINLINE void products_gradient(float* of, const float* products, const float* x, const float* k, int64_t stride,
                                  bool strict, float* sums, float* dx, float* dk) {
    const float sign = sign_of(strict);
    for (int64_t t = 0; t < count_; t++) {
      const int64_t n = t + !strict, row = t * CHUNK;
      if (by_row_) {
        each(n, [&](int64_t s, auto lanes) { store(of + row + s, load(of + row + s) * sign, lanes); });
        std::fill(of + row + n, of + row + CHUNK, 0.0f);
      } else {
        each(n, [&](int64_t s, auto lanes) {
          const int64_t at = row + s;
          const vfloat g = load(of + at);
          store(between_ + at, load(between_ + at) + g * load(products + at), lanes);
          store(sums + at, load(sums + at) + g * load(weights_ + at) * sign, lanes);
        });
      }
    }
    for (int64_t first = 0; by_row_ && first < count_; first += BLOCK_POSITIONS) {
      const int64_t n = block(first, x, k, stride);
      if (first) earlier_gradient(of, first, n, stride, dx, dk);
      for (int64_t t = first; t < first + n; t++) own_gradient(of + t * CHUNK, x, k, stride, t, first, dx, dk);
    }
  }

  // to += `of` times `start` and `sign`, the gradient of x from that of x times both; adds to that of the decays.
  NOINLINE void gradient_up_to(const float* x, float* of, int64_t stride, float* to, float sign) {
    float sums[CHUNK], sum = 0;
    scaled_gradient(start, x, of, stride, to, sign, sums);
    if (by_row_) return add_up_to(x, of, stride, 0, count_);
    for (int64_t t = count_ - 1; t >= 0; t--) grad[t] += sum += sums[t];
  }
  // The same with `end`.
  NOINLINE void gradient_after(const float* x, float* of, int64_t stride, float* to) {
    float sums[CHUNK], sum = 0;
    scaled_gradient(end, x, of, stride, to, 1.0f, sums);
    if (by_row_) return add_after(x, of, stride, count_);
    for (int64_t t = 0; t < count_; sum += sums[t++]) grad[t] += sum;
  }

  // Adds a state after the decays times its gradient: to all decays of the chunk.
  NOINLINE void add_whole(const float* state, const float* of_state, int64_t stride, int64_t columns) {
    const float* const last = start + (count_ - 1) * stride_;
    float sum = 0;
    for (int64_t i = 0; i < rows_; i++) {
      const float own = last[by_row_ ? i : 0] * dot(state + i * stride, of_state + i * stride, columns);
      sum += own;
      if (by_row_)
        for (int64_t t = 0; t < count_; t++) grad[t * stride_ + i] += own;
    }
    if (!by_row_)
      for (int64_t t = 0; t < count_; t++) grad[t] += sum;
  }

  // Adds what is between the pairs of positions, to the decays of heads.
  NOINLINE void finish_gradient() {
    if (by_row_) return;
    float sums[CHUNK] = {};  // of the pairs of each position with those from t on
    for (int64_t t = count_ - 1; t >= 0; t--) {
      vfloat total = {};
      each(t, [&](int64_t s, auto lanes) {
        const vfloat sum = load(sums + s, lanes) + load(between_ + t * CHUNK + s, lanes);
        store(sums + s, sum, lanes);
        total = total + sum;
      });
      grad[t] += sum_of(total);
    }
  }

 private:
  static constexpr int64_t BLOCK_POSITIONS = 16;  // whose pairs have their products one by one

  // Computes the rows of a block's positions with the factors from its start on, and the earlier rows of k with those
  // up to there. Returns the number of positions.
  NOINLINE int64_t block(int64_t first, const float* x, const float* k, int64_t stride) {
    const int64_t n = std::min(BLOCK_POSITIONS, count_ - first), before = first - BLOCK_POSITIONS;
    each(rows_, [&](int64_t i, auto) {
      vfloat f = all(1.0f);
      for (int64_t s = first - 1; s >= std::max<int64_t>(0, before); s--) {
        store(span_ + s * stride_ + i, f);
        store(earlier_ + s * stride + i, f * load(k + s * stride + i));
        f = f * load(factor_ + s * stride_ + i);
      }
      for (int64_t s = 0; s < before; s++) {
        const vfloat span = load(span_ + s * stride_ + i) * f;
        store(span_ + s * stride_ + i, span);
        store(earlier_ + s * stride + i, span * load(k + s * stride + i));
      }
      f = all(1.0f);
      for (int64_t t = 0; t < n; t++) {
        f = f * load(factor_ + (first + t) * stride_ + i);
        store(later_ + t * stride + i, f * load(x + (first + t) * stride + i));
      }
    });
    return n;
  }

  NOINLINE void own_products(const float* x, const float* k, int64_t stride, int64_t t, int64_t first,
                             float* to) const {
    vfloat sums[BLOCK_POSITIONS] = {};
    each(rows_, [&](int64_t i, auto lanes) {
      vfloat row = load(x + i, lanes);
      for (int64_t s = t; s >= first; s--) {
        sums[s - first] = sums[s - first] + row * load(k + s * stride + i, lanes);
        row = row * load(factor_ + s * stride_ + i, lanes);
      }
    });
    for (int64_t s = first; s <= t; s++) to[s] = sum_of(sums[s - first]);
  }

  NOINLINE void own_gradient(const float* of, const float* x, const float* k, int64_t stride, int64_t t, int64_t first,
                             float* dx, float* dk) {
    each(rows_, [&](int64_t i, auto lanes) {
      const vfloat row = load(x + t * stride + i, lanes);
      vfloat f = all(1.0f), sum = {}, pairs[BLOCK_POSITIONS];
      for (int64_t s = t; s >= first; s--) {
        const vfloat key = f * load(k + s * stride + i, lanes) * of[s];
        float* to = dk + s * stride + i;
        store(to, load(to) + f * row * of[s]);
        sum = sum + key;
        pairs[s - first] = key * row;
        f = f * load(factor_ + s * stride_ + i, lanes);
      }
      store(dx + t * stride + i, load(dx + t * stride + i) + sum);
      sum = vfloat{};
      for (int64_t s = first; s < t; s++) {
        sum = sum + pairs[s - first];
        float* to = grad + (s + 1) * stride_ + i;
        store(to, load(to) + sum);
      }
    });
  }

  // Adds `of` times factors and `sign` to `to`. With factors of rows it overwrites `of`, else `sums` become those of
  // the products with x.
  INLINE void scaled_gradient(const float* factors, const float* x, float* of, int64_t stride, float* to, float sign,
                              float* sums) const {
    for (int64_t t = 0; t < count_; t++) {
      vfloat sum = {};
      each(rows_, [&](int64_t i, auto lanes) {
        const int64_t at = t * stride + i;
        const vfloat own = load(of + at, lanes) * (by_row_ ? load(factors + t * stride_ + i) : all(factors[t])) * sign;
        store(to + at, load(to + at) + own);
        if (by_row_) {
          store(of + at, own);
        } else {
          sum = sum + own * load(x + at, lanes);
        }
      });
      sums[t] = sum_of(sum);
    }
  }

  // The gradients of the pairs of a block's positions and those before it.
  NOINLINE void earlier_gradient(const float* of, int64_t first, int64_t n, int64_t stride, float* dx, float* dk) {
    const float* const own = of + first * CHUNK;
    product({own, CHUNK}, n, {earlier_, stride}, rows_, first, {of_later_, stride});
    product({own, CHUNK, true}, first, {later_, stride}, rows_, n, {of_earlier_, stride});
    each(rows_, [&](int64_t i, auto) {
      vfloat f = all(1.0f);
      for (int64_t t = 0; t < n; t++) {
        f = f * load(factor_ + (first + t) * stride_ + i);
        float* to = dx + (first + t) * stride + i;
        store(to, load(to) + f * load(of_later_ + t * stride + i));
      }
      for (int64_t s = 0; s < first; s++) {
        float* to = dk + s * stride + i;
        store(to, load(to) + load(span_ + s * stride_ + i) * load(of_earlier_ + s * stride + i));
      }
    });
    add_up_to(later_, of_later_, stride, first, n);
    add_after(earlier_, of_earlier_, stride, first);
  }

  // Adds the products x * y of each position to the gradient of the decays up to it.
  NOINLINE void add_up_to(const float* x, const float* y, int64_t stride, int64_t first, int64_t count) {
    float* const to = grad + first * stride_;
    each(rows_, [&](int64_t i, auto) {
      vfloat sum = {};
      for (int64_t t = count - 1; t >= 0; t--) {
        sum = sum + load(x + t * stride + i) * load(y + t * stride + i);
        store(to + t * stride_ + i, load(to + t * stride_ + i) + sum);
      }
    });
  }
  // The same, to that of the decays after it.
  NOINLINE void add_after(const float* x, const float* y, int64_t stride, int64_t last) {
    each(rows_, [&](int64_t i, auto) {
      vfloat sum = {};
      for (int64_t t = 0; t < last; t++) {
        store(grad + t * stride_ + i, load(grad + t * stride_ + i) + sum);
        sum = sum + load(x + t * stride + i) * load(y + t * stride + i);
      }
    });
  }

  static float sign_of(bool strict) { return strict ? -1.0f : 1.0f; }

  const bool by_row_;
  const int64_t rows_, stride_;
  int64_t count_ = 0;
  float *factor_, *span_, *later_, *earlier_, *panels_, *weights_, *of_later_, *of_earlier_, *between_;
};

}  // namespace
}  // namespace fusedops

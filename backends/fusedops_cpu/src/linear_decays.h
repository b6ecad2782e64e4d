// The decays of a chunk of linear attention, and the products of its positions that they weight.
//
// Each weight is a product of the factors exp(decay) between two positions, and never a quotient of two: where decays
// are at most 0 nothing overflows, and -inf gives 0 without NaN. Two positions s <= t have the factors after s, up to
// t.
#pragma once

#include <cmath>

#include "chunk_products.h"
#include "functions.h"

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
      : by_row_(by_row), rows_(rows), stride_(by_row ? tile_columns(rows) : 1) {
    const int64_t positions = tile_rows(CHUNK), all = positions * stride_;
    start = parts.take(all), end = parts.take(all);
    if (by_row) {
      factor_ = parts.take(all), span_ = parts.take(all), later_ = parts.take(all), earlier_ = parts.take(all);
    } else {
      weights_ = parts.take(positions * CHUNK);
      if (weights_) memset(weights_, 0, positions * CHUNK * sizeof(float));
    }
    if (!with_gradients) return;
    grad = parts.take(all);
    if (by_row) {
      of_later_ = parts.take(all), of_earlier_ = parts.take(all);
    } else {
      between_ = parts.take(positions * CHUNK);
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

  // Multiplies the rows of a state by the factors of the whole chunk.
  NOINLINE void pass(float* state, int64_t stride) const {
    const float* const last = start + (count_ - 1) * stride_;
    for (int64_t i = 0; i < rows_; i++) {
      const float f = last[by_row_ ? i : 0];
      each(stride,
           [&](int64_t j, auto lanes) { store(state + i * stride + j, load(state + i * stride + j) * f, lanes); });
    }
  }

  // to (count, CHUNK) = the weighted products of the rows of x with those of k up to each; without a row's own if
  // `strict`. 0 above the diagonal.
  NOINLINE void products(const float* x, const float* k, int64_t stride, bool strict, float* to, float* panels) {
    const Matrix left{x, stride}, right{k, stride};
    if (by_row_) {
      for (int64_t first = 0; first < count_; first += BLOCK_POSITIONS) {
        const int64_t n = block(first, x, k, stride);
        if (first)
          product(Matrix{later_, stride}.rows(), n, Matrix{earlier_, stride}.rows(), first, rows_, to + first * CHUNK,
                  CHUNK, false, panels);
        for (int64_t t = first; t < first + n; t++) own_products(x + t * stride, k, stride, t, first, to + t * CHUNK);
      }
    } else {
      product(left.rows(), count_, right.rows(), count_, rows_, to, CHUNK, false, panels, WHOLE_SQUARE, true);
    }
    for (int64_t t = 0; t < count_; t++) {
      float* row = to + t * CHUNK;
      const int64_t n = t + !strict;
      if (!by_row_)
        each(n, [&](int64_t s, auto lanes) {
          store(row + s, load(row + s, lanes) * load(weights_ + t * CHUNK + s, lanes), lanes);
        });
      memset(row + n, 0, (CHUNK - n) * sizeof(float));
    }
  }

  // Adds to dx and dk the gradients of x and k from that of their weighted products, and to that of the decays. `of` is
  // 0 above the diagonal; it is overwritten.
  NOINLINE void products_gradient(float* of, const float* products, const float* x, const float* k, int64_t stride,
                                  float* dx, float* dk, float* panels) {
    if (by_row_) {
      for (int64_t first = 0; first < count_; first += BLOCK_POSITIONS) {
        const int64_t n = block(first, x, k, stride);
        if (first) earlier_gradient(of, first, n, stride, dx, dk, panels);
        for (int64_t t = first; t < first + n; t++) own_gradient(of + t * CHUNK, x, k, stride, t, first, dx, dk);
      }
      return;
    }
    for (int64_t t = 0; t < count_; t++)
      each(t + 1, [&](int64_t s, auto lanes) {
        const int64_t at = t * CHUNK + s;
        const vfloat g = load(of + at, lanes);
        store(between_ + at, load(between_ + at, lanes) + g * load(products + at, lanes), lanes);
        store(of + at, g * load(weights_ + at, lanes), lanes);
      });
    const Matrix grad_of{of, CHUNK};
    product(grad_of.rows(), count_, Matrix{k, stride}.transposed(), rows_, count_, dx, stride, true, panels, LOWER);
    product(grad_of.transposed(), count_, Matrix{x, stride}.transposed(), rows_, count_, dk, stride, true, panels,
            UPPER);
  }

  // Adds the products x * y of each position to the gradient of the decays up to it: of rows with `start`.
  void add_up_to(const float* x, const float* y, int64_t stride) { add_up_to(x, y, stride, 0, count_); }
  // The same, to that of the decays after it: of rows with `end`.
  void add_after(const float* x, const float* y, int64_t stride) { add_after(x, y, stride, count_); }

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

  // The gradients of the pairs of a block's positions and those before it.
  NOINLINE void earlier_gradient(const float* of, int64_t first, int64_t n, int64_t stride, float* dx, float* dk,
                                 float* panels) {
    const Matrix grad_of{of + first * CHUNK, CHUNK};
    product(grad_of.rows(), n, Matrix{earlier_, stride}.transposed(), rows_, first, of_later_, stride, false, panels);
    product(grad_of.transposed(), first, Matrix{later_, stride}.transposed(), rows_, n, of_earlier_, stride, false,
            panels);
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

  NOINLINE void add_up_to(const float* x, const float* y, int64_t stride, int64_t first, int64_t count) {
    float* const to = grad + first * stride_;
    if (!by_row_) {
      float sum = 0;
      for (int64_t t = count - 1; t >= 0; t--) to[t] += sum += dot(x + t * stride, y + t * stride, rows_);
      return;
    }
    each(rows_, [&](int64_t i, auto) {
      vfloat sum = {};
      for (int64_t t = count - 1; t >= 0; t--) {
        sum = sum + load(x + t * stride + i) * load(y + t * stride + i);
        store(to + t * stride_ + i, load(to + t * stride_ + i) + sum);
      }
    });
  }

  NOINLINE void add_after(const float* x, const float* y, int64_t stride, int64_t last) {
    if (!by_row_) {
      float sum = 0;
      for (int64_t t = 0; t < last; t++) {
        grad[t] += sum;
        sum += dot(x + t * stride, y + t * stride, rows_);
      }
      return;
    }
    each(rows_, [&](int64_t i, auto) {
      vfloat sum = {};
      for (int64_t t = 0; t < last; t++) {
        store(grad + t * stride_ + i, load(grad + t * stride_ + i) + sum);
        sum = sum + load(x + t * stride + i) * load(y + t * stride + i);
      }
    });
  }

  const bool by_row_;
  const int64_t rows_, stride_;
  int64_t count_ = 0;
  float *factor_, *span_, *later_, *earlier_, *weights_, *of_later_, *of_earlier_, *between_;
};

}  // namespace
}  // namespace fusedops

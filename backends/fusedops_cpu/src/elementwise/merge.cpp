// out = wa * a + wb * b and lse = log(exp(lse_a) + exp(lse_b)), with wa = exp(lse_a - lse) and wb = exp(lse_b - lse),
// and the gradients. A part whose lse is -inf is not read: it adds nothing, whatever it holds.
#include <cmath>

#include "api.h"
#include "math/finite.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

// The weights of a row. None of a part without keys.
struct Weights {
  float a, b, lse;
  bool has_a, has_b;
};

// 1 / (1 + exp(x)), by the exponential of a number that is not positive: the smaller weight keeps its digits.
inline float falling(float x) {
  if (x <= 0) return 1.0f / (1.0f + std::exp(x));
  const float e = std::exp(-x);
  return e / (1.0f + e);
}

inline Weights weights_of(float lse_a, float lse_b) {
  const bool has_a = lse_a != -INF, has_b = lse_b != -INF;
  if (!has_b) return {has_a ? 1.0f : 0.0f, 0.0f, lse_a, has_a, false};
  if (!has_a) return {0.0f, 1.0f, lse_b, false, true};
  const float difference = lse_a - lse_b, top = std::max(lse_a, lse_b);
  const float lse = difference != difference ? lse_a + lse_b : top + std::log1p(std::exp(-std::abs(difference)));
  return {falling(-difference), falling(difference), lse, true, true};
}

// The rows of a call, each by its place in out_a, out_b and out.
struct Rows {
  const MergeSizes& sizes;

  int64_t count() const { return sizes.batch * sizes.heads * sizes.positions; }
  struct Place {
    int64_t batch, head, position;
    int64_t in(const MergeStrides& s) const { return batch * s.batch + head * s.head + position * s.position; }
  };
  // Calls f(row, place) for the rows of a block, whose places follow each other.
  template <class F>
  INLINE void each_row(int64_t begin, int64_t end, F f) const {
    const int64_t heads = sizes.heads, positions = sizes.positions;
    Place place{begin / (heads * positions), begin / positions % heads, begin % positions};
    for (int64_t row = begin; row < end; row++) {
      f(row, place);
      if (++place.position < positions) continue;
      place.position = 0;
      if (++place.head < heads) continue;
      place.head = 0;
      place.batch++;
    }
  }
  // Calls f(begin, end) for blocks of rows, in any thread.
  template <class F>
  void each_block(F f) const {
    const int64_t rows = count(), of_block = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, sizes.columns));
    run_blocks(divide_up(rows, of_block),
               [=](int64_t block) { f(block * of_block, std::min(rows, (block + 1) * of_block)); });
  }
};

// to = weight * from, or 0 where a part has no keys.
template <class T>
NOINLINE void scale_row(int64_t n, const T* from, float weight, bool has, T* to) {
  each(n, [=](int64_t i, auto lanes) { store(to + i, has ? load(from + i, lanes) * weight : vfloat{}, lanes); });
}

template <class T>
Status forward(const MergeForward& call) {
  const Rows rows{call.sizes};
  const MergeForward* c = &call;
  rows.each_block([=](int64_t begin, int64_t end) {
    const int64_t n = c->sizes.columns;
    rows.each_row(begin, end, [=](int64_t row, Rows::Place at) {
      const Weights w = weights_of(c->lse_a[row], c->lse_b[row]);
      const T* a = (const T*)c->out_a + at.in(c->sizes.of_a);
      const T* b = (const T*)c->out_b + at.in(c->sizes.of_b);
      T* out = (T*)c->out + at.in(c->sizes.of_out);
      c->lse[row] = w.lse;
      if (!w.has_a || !w.has_b) return scale_row(n, w.has_a ? a : b, 1.0f, w.has_a || w.has_b, out);
      each(n,
           [=](int64_t i, auto lanes) { store(out + i, load(a + i, lanes) * w.a + load(b + i, lanes) * w.b, lanes); });
    });
  });
  return OK;
}

template <class T>
Status backward(const MergeBackward& call) {
  const Rows rows{call.sizes};
  const MergeBackward* c = &call;
  rows.each_block([=](int64_t begin, int64_t end) {
    const int64_t n = c->sizes.columns;
    rows.each_row(begin, end, [=](int64_t row, Rows::Place at) {
      const Weights w = weights_of(c->lse_a[row], c->lse_b[row]);
      const T* grad = (const T*)c->grad + at.in(c->sizes.of_out);
      if (c->da) scale_row(n, grad, w.a, w.has_a, (T*)c->da + at.in(c->of_da));
      if (c->db) scale_row(n, grad, w.b, w.has_b, (T*)c->db + at.in(c->of_db));
      if (!c->dlse_a && !c->dlse_b) return;
      float moved = 0;
      if (w.has_a && w.has_b) {
        const T* a = (const T*)c->out_a + at.in(c->sizes.of_a);
        const T* b = (const T*)c->out_b + at.in(c->sizes.of_b);
        moved = sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) {
          return load(grad + i, lanes) * (load(a + i, lanes) - load(b + i, lanes));
        }));
      }
      const float g = c->grad_lse[row];
      if (c->dlse_a) c->dlse_a[row] = w.has_a ? w.a * (w.b * moved + g) : 0.0f;
      if (c->dlse_b) c->dlse_b[row] = w.has_b ? w.b * (g - w.a * moved) : 0.0f;
    });
  });
  return OK;
}

bool fits(const MergeSizes& sizes) {
  return sizes.batch >= 0 && sizes.heads >= 0 && sizes.positions >= 0 && sizes.columns >= 0;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_merge_forward(const MergeForward* call) {
  if (!fits(call->sizes)) return INVALID;
  const int64_t rows = Rows{call->sizes}.count();
  if (!rows) return OK;
  if (!call->lse_a || !call->lse_b || !call->lse) return INVALID;
  if (call->sizes.columns && (!call->out_a || !call->out_b || !call->out)) return INVALID;
  use_huge_pages(call->out, rows * call->sizes.columns, call->sizes.dtype);
  return with_dtype(call->sizes.dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

FUSEDOPS_EXPORT int fusedops_merge_backward(const MergeBackward* call) {
  if (!fits(call->sizes)) return INVALID;
  const int64_t rows = Rows{call->sizes}.count();
  if (!rows) return OK;
  if (!call->lse_a || !call->lse_b || !call->grad_lse) return INVALID;
  if (call->sizes.columns && (!call->out_a || !call->out_b || !call->grad)) return INVALID;
  for (void* result : {call->da, call->db}) use_huge_pages(result, rows * call->sizes.columns, call->sizes.dtype);
  return with_dtype(call->sizes.dtype, [=](auto element) { return backward<decltype(element)>(*call); });
}

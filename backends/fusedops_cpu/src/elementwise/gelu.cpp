// y = gelu(x + bias), and the gradients of x and bias from grad, x and bias.
#include "math/gelu.h"

#include "api.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

template <class T, bool TANH, bool BIAS>
Status forward(const GeluForward& call) {
  const T* x = (const T*)call.x;
  T* y = (T*)call.y;
  const int64_t count = call.count, width = BIAS ? wide_row(count, call.columns) : count;
  const BiasRow row(call.bias, call.dtype, call.columns, width);
  if (row.failed()) return OUT_OF_MEMORY;
  const float* bias = row.data();
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    each_stretch(block * BLOCK, std::min(count, (block + 1) * BLOCK), width,
                 [&](int64_t at, int64_t column, int64_t n) {
                   produce(y + at, n, [&](int64_t i, auto lanes) {
                     auto u = load_ahead(x + at + i, lanes);
                     if constexpr (BIAS) u = u + load(bias + column + i, lanes);
                     return gelu<TANH, is_narrow<T>>(u);
                   });
                 });
  });
  return OK;
}

template <class T, bool TANH, bool BIAS>
Status backward(const GeluBackward& call) {
  const T *grad = (const T*)call.grad, *x = (const T*)call.x;
  T* dx = (T*)call.dx;
  const int64_t count = call.count, width = BIAS ? wide_row(count, call.columns) : count;
  const BiasRow row(call.bias, call.dtype, call.columns, width);
  if (row.failed()) return OUT_OF_MEMORY;
  const float* bias = row.data();
  auto du_at = [=](int64_t at, int64_t column, int64_t i, auto lanes) {
    auto u = load_ahead(x + at + i, lanes);
    if constexpr (BIAS) u = u + load(bias + column + i, lanes);
    return load_ahead(grad + at + i, lanes) * gelu_derivative<TANH, is_narrow<T>>(u);
  };
  if constexpr (BIAS) {
    if (call.dbias) {
      return column_sums(count, call.columns, width, call.dtype, call.dbias,
                         [=](int64_t begin, int64_t end, float* sums) {
                           T unwanted[COLUMNS_AT_ONCE];  // dx: a loop of its own for the sums alone is large
                           each_stretch(begin, end, width, [&](int64_t at, int64_t column, int64_t n) {
                             produce(dx ? dx + at : unwanted, n, [&](int64_t i, auto lanes) {
                               const auto du = du_at(at, column, i, lanes);
                               store(sums + column + i, load(sums + column + i, lanes) + du, lanes);
                               return du;
                             });
                           });
                         });
    }
  }
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    each_stretch(block * BLOCK, std::min(count, (block + 1) * BLOCK), width,
                 [&](int64_t at, int64_t column, int64_t n) {
                   produce(dx + at, n, [&](int64_t i, auto lanes) { return du_at(at, column, i, lanes); });
                 });
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_gelu_forward(const GeluForward* call) {
  if (!call->count) return OK;
  if (!call->x || !call->y || (call->bias && call->columns < 1)) return INVALID;
  use_huge_pages(call->y, call->count, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    if (call->tanh) return call->bias ? forward<T, true, true>(*call) : forward<T, true, false>(*call);
    return call->bias ? forward<T, false, true>(*call) : forward<T, false, false>(*call);
  });
}

FUSEDOPS_EXPORT int fusedops_gelu_backward(const GeluBackward* call) {
  if (!call->count) return OK;
  if (!call->grad || !call->x || (call->bias && call->columns < 1)) return INVALID;
  if (!call->dx && !(call->bias && call->dbias)) return OK;
  use_huge_pages(call->dx, call->count, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    if (call->tanh) return call->bias ? backward<T, true, true>(*call) : backward<T, true, false>(*call);
    return call->bias ? backward<T, false, true>(*call) : backward<T, false, false>(*call);
  });
}

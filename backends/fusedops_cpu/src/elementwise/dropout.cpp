// y = dropout(x + bias) or residual + dropout(x + bias), and the gradients of x and bias from grad and the seed.
#include "api.h"
#include "elementwise/philox.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

INLINE vfloat keep_only(vfloat v, const int32_t* keep) {  // a dropped inf or NaN becomes 0, as any other value
  vint mask;
  memcpy(&mask, keep, sizeof mask);
  return bits_as<vfloat>(bits_as<vint>(v) & mask);
}
template <class V>
INLINE Two<V> keep_only(Two<V> v, const int32_t* keep) {
  return {keep_only(v.a, keep), keep_only(v.b, keep + Two<V>::lanes / 2)};
}

template <class T, bool BIAS, bool RESIDUAL, bool DROPS>
Status forward(const DropoutForward& call) {
  const T *x = (const T*)call.x, *residual = (const T*)call.residual;
  T* y = (T*)call.y;
  const int64_t count = call.count, width = BIAS ? wide_row(count, call.columns) : count;
  const BiasRow row(call.bias, call.dtype, call.columns, width);
  if (row.failed()) return OUT_OF_MEMORY;
  const float *bias = row.data(), scale = float(call.scale);
  const Philox philox(DROPS ? *call.seed : 0, uint32_t(call.threshold));
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    int32_t keep[Philox::BUFFER];
    constexpr int64_t CHUNK = DROPS ? Philox::CHUNK : BLOCK;
    for (int64_t begin = block * BLOCK, last = std::min(count, begin + BLOCK); begin < last; begin += CHUNK) {
      int64_t end = std::min(last, begin + CHUNK);
      if constexpr (DROPS) philox.fill(begin, end - begin, keep);
      each_stretch(begin, end, width, [&](int64_t at, int64_t column, int64_t n) {
        produce<true>(y + at, n, [&](int64_t i, auto lanes) {
          auto u = load(x + at + i, lanes);
          if constexpr (BIAS) u = u + load(bias + column + i, lanes);
          if constexpr (DROPS) u = keep_only(u, keep + (at - begin) + i) * scale;
          if constexpr (RESIDUAL) u = u + load(residual + at + i, lanes);
          return u;
        });
      });
    }
  });
  return OK;
}

template <class T, bool DROPS>
Status backward(const DropoutBackward& call) {
  const T* grad = (const T*)call.grad;
  T* dx = (T*)call.dx;
  const int64_t count = call.count;
  const float scale = float(call.scale);
  const Philox philox(DROPS ? *call.seed : 0, uint32_t(call.threshold));
  auto work = [=](int64_t begin, int64_t last, int64_t width, float* sums, auto with_sums) {
    int32_t keep[Philox::BUFFER];
    while (begin < last) {
      int64_t first = begin & ~int64_t(3), end = DROPS ? std::min(last, first + Philox::CHUNK) : last;
      if constexpr (DROPS) philox.fill(first, end - first, keep);
      each_stretch(begin, end, width, [&](int64_t at, int64_t column, int64_t n) {
        auto du_and_sum = [&](int64_t i, auto lanes) {
          auto du = load(grad + at + i, lanes);
          if constexpr (DROPS) du = keep_only(du, keep + (at - first) + i) * scale;
          if constexpr (decltype(with_sums)::value)
            store(sums + column + i, load(sums + column + i, lanes) + du, lanes);
          return du;
        };
        if (dx) {
          produce<true>(dx + at, n, du_and_sum);
        } else {
          each(n, du_and_sum);
        }
      });
      begin = end;
    }
  };
  if (call.dbias) {
    const int64_t width = wide_row(count, call.columns);
    return column_sums(
        count, call.columns, width, call.dtype, call.dbias,
        [=](int64_t begin, int64_t end, float* sums) { work(begin, end, width, sums, std::true_type{}); });
  }
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    work(block * BLOCK, std::min(count, (block + 1) * BLOCK), count, nullptr, std::false_type{});
  });
  return OK;
}

// Calls f with std::true_type or std::false_type.
template <class F>
auto with_flag(bool flag, F f) {
  return flag ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_dropout_forward(const DropoutForward* call) {
  if (!call->count) return OK;
  if (!call->x || !call->y || (call->bias && call->columns < 1)) return INVALID;
  use_huge_pages(call->y, call->count, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return with_flag(call->bias, [=](auto bias) {
      return with_flag(call->residual, [=](auto residual) {
        return with_flag(call->threshold ? call->seed : nullptr, [=](auto drops) {
          return forward<T, decltype(bias)::value, decltype(residual)::value, decltype(drops)::value>(*call);
        });
      });
    });
  });
}

FUSEDOPS_EXPORT int fusedops_dropout_backward(const DropoutBackward* call) {
  if (!call->count || (!call->dx && !call->dbias)) return OK;
  if (!call->grad || (call->dbias && call->columns < 1)) return INVALID;
  use_huge_pages(call->dx, call->count, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return call->seed && call->threshold ? backward<T, true>(*call) : backward<T, false>(*call);
  });
}

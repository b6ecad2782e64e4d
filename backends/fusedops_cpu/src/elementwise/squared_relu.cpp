// y = relu(x) ** 2, and its gradient 2 * grad * relu(x).
#include "api.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

template <class T, bool GRAD>
Status compute(const SquaredRelu& call) {
  const T *grad = (const T*)call.grad, *x = (const T*)call.x;
  T* out = (T*)call.out;
  const int64_t count = call.count;
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    const int64_t begin = block * BLOCK, n = std::min(count - begin, BLOCK);
    produce(out + begin, n, [&](int64_t i, auto lanes) {
      const auto u = positive_part(load_ahead(x + begin + i, lanes));
      if constexpr (GRAD) return (u + u) * load_ahead(grad + begin + i, lanes);
      return u * u;
    });
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_squared_relu(const SquaredRelu* call) {
  if (!call->count) return OK;
  if (!call->x || !call->out) return INVALID;
  use_huge_pages(call->out, call->count, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return call->grad ? compute<T, true>(*call) : compute<T, false>(*call);
  });
}

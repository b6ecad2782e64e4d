// Attention of few queries: out = softmax(scale * q k^T) v over the keys that a query sees, and lse, the logarithm of
// the sum of exponentials (see dot/attention_few.h).
#include "dot/attention_few.h"

namespace fusedops {
namespace {

// Keys and values that are one stride apart.
template <class T>
struct Strided {
  using Key = T;
  struct Rows {
    const T* first;
    int64_t stride;
    INLINE const T* operator[](int64_t i) const { return first + i * stride; }
    INLINE Rows from(int64_t i) const { return {first + i * stride, stride}; }
  };
  struct Part {
    const Strided& of;
    const AttentionRows& rows;
    const int64_t pair, start;
    Part(const Strided& of, const AttentionRows& rows, int64_t pair, int64_t start, int64_t)
        : of(of), rows(rows), pair(pair), start(start) {}
    Rows keys(int64_t head) const {
      return Rows{of.k + rows.key_offset(pair * rows.together + head), rows.call.k_position}.from(start);
    }
    Rows values(int64_t head) const {
      return Rows{of.v + rows.value_offset(pair * rows.together + head), rows.call.v_position}.from(start);
    }
    void scale_scores(int64_t, float*, int64_t, int64_t) const {}
    void scale_weights(int64_t, float*, int64_t, int64_t) const {}
  };
  const T *k, *v;
};

template <class T>
Status forward(const AttentionForward& of) {
  return run_rows(of, Strided<T>{(const T*)of.k, (const T*)of.v}, products_of(of.sizes) <= SMALL ? 1 : INT64_MAX);
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_attention_forward(const AttentionForward* call) {
  if (!fits(*call)) return INVALID;
  return with_dtype(call->sizes.dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

// Chunks of elements that stay in the L1 cache: read as float32, computed, rounded and written. So a kernel has one
// loop for each function, and one for each dtype, instead of one for each combination.
#pragma once

#include "simd/several.h"

namespace fusedops {
namespace {

// Returns n numbers as float32: p itself, or the buffer with them.
template <class T>
INLINE const float* widened(const T* p, int64_t n, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return p;
  } else {
    each_group<Pair>(n, [=](int64_t i, auto lanes) { store(buffer + i, load_ahead(p + i, lanes)); });
    return buffer;
  }
}

// The type that loops read instead of T. A copy of them for bfloat16 is worth its size from AVX2 on.
template <class T>
using Readable = std::conditional_t<std::is_same_v<T, bfloat16> && VECTOR_BYTES >= 32, bfloat16, float>;

template <class T>
NOINLINE const float* widened_apart(const T* p, int64_t n, float* buffer) {
  return widened(p, n, buffer);
}

// Returns n numbers of that type: p itself, or the buffer with them.
template <class T>
INLINE const Readable<T>* readable(const T* p, int64_t n, float* buffer) {
  if constexpr (std::is_same_v<Readable<T>, T>) {
    return p;
  } else {
    return widened_apart(p, n, buffer);
  }
}

template <class T>
INLINE void rounded(T* p, int64_t n, const float* values, bool streams_p) {
  if ((const void*)p == (const void*)values) return;  // computed in place
  if (streams_p) {
    each_group<Pair>(n, [=](int64_t i, auto lanes) { store_or_stream<true>(p + i, load(values + i, lanes), lanes); });
  } else {
    each_group<Pair>(n, [=](int64_t i, auto lanes) { store(p + i, load(values + i, lanes), lanes); });
  }
}

// Where results of a chunk are computed: in place, or in the buffer that is rounded or streamed afterwards.
template <class T>
INLINE float* place(T* p, float* buffer, bool streams_p) {
  if constexpr (std::is_same_v<T, float>)
    if (!streams_p) return p;
  return p ? buffer : nullptr;
}

}  // namespace
}  // namespace fusedops

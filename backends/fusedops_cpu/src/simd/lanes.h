// Shuffles of lanes, and sums over the lanes of a vector.
#pragma once

#include "simd/types.h"

#if VECTOR_BYTES == 64
#include "simd/avx512.h"
#elif VECTOR_BYTES == 32
#include "simd/avx2.h"
#else
#include "simd/v128.h"
#endif

namespace fusedops {
namespace {

// ---- Shuffles ----

#ifdef __clang__
template <class Order, class V, int... I>
INLINE V shuffled(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, Order::at(I)...);
}
#endif

// Lane i is lane Order::at(i) of a followed by b.
template <class Order, class V>
INLINE V shuffled(V a, V b) {
  constexpr int COUNT = sizeof(V) / 4;
#ifdef __clang__
  return shuffled<Order>(a, b, std::make_integer_sequence<int, COUNT>{});
#else
  decltype(a == b) order = {};
  for (int i = 0; i < COUNT; i++) order[i] = Order::at(i);
  return __builtin_shuffle(a, b, order);
#endif
}
template <int FIRST>
struct From {
  static constexpr int at(int i) { return FIRST + i; }
};

// ---- Reductions of one vector, in one order ----

template <int WIDTH>
INLINE float sum_of_first(vfloat v) {  // of the first 2 * WIDTH lanes
  if constexpr (WIDTH == 0) {
    return v[0];
  } else {
    return sum_of_first<WIDTH / 2>(v + shuffled<From<WIDTH>>(v, v));
  }
}
INLINE float sum_of(vfloat v) { return sum_of_first<LANES / 2>(v); }

template <int WIDTH>
INLINE float max_of_first(vfloat v) {  // of the first 2 * WIDTH lanes
  if constexpr (WIDTH == 0) {
    return v[0];
  } else {
    return max_of_first<WIDTH / 2>(max(shuffled<From<WIDTH>>(v, v), v));
  }
}
INLINE float max_of(vfloat v) { return max_of_first<LANES / 2>(v); }

// Of two rows whose numbers differ in bit S alone: both with that bit of the row and of the lane swapped.
template <int S>
struct Lower {
  static constexpr int at(int i) { return i & S ? LANES + i - S : i; }
};
template <int S>
struct Upper {
  static constexpr int at(int i) { return i & S ? LANES + i : i + S; }
};

}  // namespace
}  // namespace fusedops

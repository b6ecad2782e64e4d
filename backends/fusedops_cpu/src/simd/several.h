// Several vectors that are computed side by side. The functions of math/ are long chains of dependent operations:
// of one vector after the other, the operations that wait fill the processor's scheduler, and half of its units idle
// (GELU in bfloat16 on Zen 4: 0.27 ns an element instead of 0.40).
#pragma once

#include "simd/vector.h"

namespace fusedops {
namespace {

template <class V>
struct Two {
  V a, b;
  static constexpr int lanes = 2 * int(sizeof(V) / sizeof(float));
};

template <class V>
INLINE Two<V> operator+(Two<V> x, Two<V> y) {
  return {x.a + y.a, x.b + y.b};
}
template <class V>
INLINE Two<V> operator-(Two<V> x, Two<V> y) {
  return {x.a - y.a, x.b - y.b};
}
template <class V>
INLINE Two<V> operator*(Two<V> x, Two<V> y) {
  return {x.a * y.a, x.b * y.b};
}
template <class V>
INLINE Two<V> operator+(Two<V> x, float y) {
  return {x.a + y, x.b + y};
}
template <class V>
INLINE Two<V> operator-(Two<V> x, float y) {
  return {x.a - y, x.b - y};
}
template <class V>
INLINE Two<V> operator*(Two<V> x, float y) {
  return {x.a * y, x.b * y};
}
template <class V>
INLINE Two<V> operator/(Two<V> x, float y) {
  return {x.a / y, x.b / y};
}
template <class V>
INLINE Two<V> operator-(Two<V> x, vfloat y) {
  return {x.a - y, x.b - y};
}
template <class V>
INLINE Two<V> operator-(float x, Two<V> y) {
  return {x - y.a, x - y.b};
}

// Of two operands of which one is NaN, these return x (NEON: NaN).
INLINE vfloat at_least(float low, vfloat x) { return max(all(low), x); }
INLINE vfloat at_most(float high, vfloat x) { return min(all(high), x); }
template <class V>
INLINE Two<V> at_least(float low, Two<V> x) {
  return {at_least(low, x.a), at_least(low, x.b)};
}
template <class V>
INLINE Two<V> at_most(float high, Two<V> x) {
  return {at_most(high, x.a), at_most(high, x.b)};
}

INLINE vfloat at_most(vfloat high, vfloat x) { return min(high, x); }
template <class V>
INLINE Two<V> at_most(Two<V> high, Two<V> x) {
  return {at_most(high.a, x.a), at_most(high.b, x.b)};
}

template <class V>
INLINE Two<V> positive_part(Two<V> x) {
  return {positive_part(x.a), positive_part(x.b)};
}

template <class V>
INLINE Two<V> reciprocal(Two<V> d) {
  return {reciprocal(d.a), reciprocal(d.b)};
}

INLINE vfloat magnitude(vfloat x) { return bits_as<vfloat>(bits_as<vint>(x) & INT32_MAX); }
template <class V>
INLINE Two<V> magnitude(Two<V> x) {
  return {magnitude(x.a), magnitude(x.b)};
}

INLINE vfloat negative_magnitude(vfloat x) { return bits_as<vfloat>(bits_as<vint>(x) | INT32_MIN); }
template <class V>
INLINE Two<V> negative_magnitude(Two<V> x) {
  return {negative_magnitude(x.a), negative_magnitude(x.b)};
}

// 0 where x > limit; y where x is NaN.
INLINE vfloat zero_above(float limit, vfloat x, vfloat y) { return x > limit ? vfloat{} : y; }
template <class V>
INLINE Two<V> zero_above(float limit, Two<V> x, Two<V> y) {
  return {zero_above(limit, x.a, y.a), zero_above(limit, x.b, y.b)};
}

INLINE vfloat where_positive(vfloat x, vfloat y, vfloat z) { return x > 0.0f ? y : z; }
template <class V>
INLINE Two<V> where_positive(Two<V> x, Two<V> y, Two<V> z) {
  return {where_positive(x.a, y.a, z.a), where_positive(x.b, y.b, z.b)};
}

INLINE vfloat joined_sum(vfloat x) { return x; }
template <class V>
INLINE vfloat joined_sum(Two<V> x) {
  return joined_sum(x.a) + joined_sum(x.b);
}
INLINE vfloat joined_max(vfloat x) { return x; }
template <class V>
INLINE vfloat joined_max(Two<V> x) {
  return max(joined_max(x.a), joined_max(x.b));
}

// ---- Memory and loops ----

// The lanes of several vectors.
template <class V>
struct Group {
  static constexpr bool full = true;
  static constexpr int lanes = V::lanes, most = lanes;
};
using Pair = Group<Two<vfloat>>;
#if VECTOR_BYTES == 64  // which has 32 registers
using Several = Group<Two<Two<vfloat>>>;
#else
using Several = Pair;
#endif

template <class T>
INLINE void load_into(const T* p, vfloat& v) {
  v = load(p);
}
template <class T, class V>
INLINE void load_into(const T* p, Two<V>& v) {
  load_into(p, v.a);
  load_into(p + Two<V>::lanes / 2, v.b);
}
template <class T, class V>
INLINE V load(const T* p, Group<V>) {
  V v;
  load_into(p, v);
  return v;
}
template <class T, class V>
INLINE V load_ahead(const T* p, Group<V> lanes) {
  for (int i = 0; i < V::lanes; i += 64 / int(sizeof(T))) __builtin_prefetch((const char*)(p + i) + 2048);
  return load(p, lanes);
}

// v, or `absent` in the lanes that a load did not cover.
template <class V, class Lanes>
INLINE V where_loaded(V v, Lanes lanes, float absent) {
  if constexpr (Lanes::full) {
    return v;
  } else {
    return lanes_below(lanes.n) ? v : all(absent);
  }
}

template <class T>
INLINE void store(T* p, Two<vfloat> v) {
  store_two(p, v.a, v.b);
}
template <class T, class V>
INLINE void store(T* p, Two<Two<V>> v) {
  store(p, v.a);
  store(p + Two<V>::lanes, v.b);
}
template <class T, class V>
INLINE void store(T* p, V v, Group<V>) {
  store(p, v);
}
template <class T>
INLINE void stream(T* p, Two<vfloat> v) {
  stream_two(p, v.a, v.b);
}

// Calls f(index, lanes) for n elements, with a group of vectors at a time. AVX-512 has loads and stores of a part of a
// vector that are as fast as those of a whole one, and needs no third copy of f; for SSE and NEON the gain is not worth
// a third copy.
template <class Lanes, class F>
INLINE void each_group(int64_t n, F f) {
  int64_t i = 0;
#if VECTOR_BYTES >= 32
  for (; i + Lanes::lanes <= n; i += Lanes::lanes) f(i, Lanes{});
#endif
#if VECTOR_BYTES == 64
  for (; i < n; i += LANES) f(i, Part{int(n - i < LANES ? n - i : LANES)});
#else
  for (; i + LANES <= n; i += LANES) f(i, Full{});
  if (i < n) f(i, Part{int(n - i)});
#endif
}

// y[0..n) = f(index, lanes). 16-bit results are rounded in a loop of their own: one chain of operations as long as both
// fills the processor's reorder window, and there are too few registers for both in AVX2 (GELU: 0.85 of the time).
// SHORT: where f is a few operations, one loop takes less (dropout's backward: 0.9 of the time).
template <bool SHORT = false, class T, class F>
INLINE void produce(T* y, int64_t n, F f) {
  if constexpr (std::is_same_v<T, float> || SHORT) {
    using Lanes = std::conditional_t<std::is_same_v<T, float>, Several, Pair>;
    each_group<Lanes>(n, [&](int64_t i, auto lanes) { store(y + i, f(i, lanes), lanes); });
  } else {
    constexpr int64_t CHUNK = 256;
    float wide[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
      const int64_t count = n - at < CHUNK ? n - at : CHUNK;
      each_group<Several>(count, [&](int64_t i, auto lanes) { store(wide + i, f(at + i, lanes)); });
      each_group<Pair>(count, [&](int64_t i, auto lanes) { store(y + at + i, load(wide + i, lanes), lanes); });
    }
  }
}

}  // namespace
}  // namespace fusedops

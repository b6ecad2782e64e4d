// Loads and stores, which convert float32, bfloat16 and float16 to and from float32 lanes.
#pragma once

#include "simd/lanes.h"

namespace fusedops {
namespace {

// True for results that are rounded to so few bits that an error of 2^-18 before does not count.
template <class T>
constexpr bool is_narrow = std::is_same_v<T, bfloat16>;

INLINE vuint16 narrow(vfloat v, bfloat16) { return narrow_16(rounded_to_high_half(v) >> 16); }

template <class T>
INLINE vfloat rounded_to(vfloat v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return widen(narrow(v, T{}), T{});
  }
}

INLINE vfloat load(const float* p) {
  vfloat v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }

template <class T>
INLINE vfloat load(const T* p) {
  vuint16 h;
  memcpy(&h, p, sizeof h);
  return widen(h, T{});
}
template <class T>
INLINE void store(T* p, vfloat v) {
  vuint16 h = narrow(v, T{});
  memcpy(p, &h, sizeof h);
}

// Stores two vectors.
template <class T>
INLINE void store_two(T* p, vfloat a, vfloat b) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const vuint16_two packed = narrow_two(a, b);
    memcpy(p, &packed, sizeof packed);
  } else {
    store(p, a);
    store(p + LANES, b);
  }
}

// The lanes that a load or store covers: all of them; the first n; or the first n of a whole vector of memory that may
// be read and written, where the other lanes are read and written as 0.
struct Full {
  static constexpr bool full = true;
  static constexpr int most = LANES;
};
struct Part {
  static constexpr bool full = false;
  static constexpr int most = LANES;
  int n;
};
struct Cut {
  static constexpr bool full = false;
  int n;
};

template <class T>
NOINLINE vfloat load_each(const T* p, int n) {
  T values[LANES] = {};
  for (int i = 0; i < n; i++) values[i] = p[i];
  return load(values);
}
template <class T>
NOINLINE void store_each(T* p, vfloat v, int n) {
  T values[LANES];
  store(values, v);
  for (int i = 0; i < n; i++) p[i] = values[i];
}

template <class T>
INLINE vfloat load(const T* p, Full) {
  return load(p);
}
template <class T>
INLINE vfloat load(const T* p, Part lanes) {
  if constexpr (HAS_MASKED_LOADS<T>) {
    return load_first(p, lanes.n);
  } else {
    return load_each(p, lanes.n);
  }
}
template <class T>
INLINE vfloat load(const T* p, Cut lanes) {
  return lanes_below(lanes.n) ? load(p) : vfloat{};
}
template <class T>
INLINE void store(T* p, vfloat v, Full) {
  store(p, v);
}
template <class T>
INLINE void store(T* p, vfloat v, Part lanes) {
  if constexpr (HAS_MASKED_LOADS<T>) {
    store_first(p, v, lanes.n);
  } else {
    store_each(p, v, lanes.n);
  }
}
template <class T>
INLINE void store(T* p, vfloat v, Cut lanes) {
  store(p, lanes_below(lanes.n) ? v : vfloat{});
}

// ---- Stores past the caches ----

// For a tensor that is larger than the caches: memory is not read before it is written. Full vectors of aligned memory
// only; other cores see the values after stream_end().
template <class T>
INLINE void stream(T* p, vfloat v) {
  stream_16(p, narrow(v, T{}));
}
// Streams a whole vector of 16-bit numbers, to memory that is aligned to half a vector.
template <class T>
INLINE void stream_bits(T* p, vuint bits) {
  vuint16 halves[2];
  memcpy(halves, &bits, sizeof bits);
  for (int i = 0; i < 2; i++) stream_16(p + i * LANES, halves[i]);
}
template <class T>
INLINE void stream_two(T* p, vfloat a, vfloat b) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    stream_bits(p, bits_as<vuint>(narrow_two(a, b)));
  } else {
    stream(p, a);
    stream(p + LANES, b);
  }
}

template <bool STREAMS, class T, class V, class Lanes>
INLINE void store_or_stream(T* p, V v, Lanes lanes) {
  if constexpr (STREAMS && Lanes::full) {
    stream(p, v);
  } else {
    store(p, v, lanes);
  }
}

// True where stream() may write rows of `columns` numbers at p, and is faster than a store: a third of the time of a
// kernel that reads one tensor and writes one.
template <class T>
inline bool streams(const T* p, int64_t rows, int64_t columns) {
  constexpr int64_t BYTES = 32 << 20, STEP = LANES * sizeof(T);
  return p && rows * columns >= BYTES / int64_t(sizeof(T)) && columns % LANES == 0 && uintptr_t(p) % STEP == 0;
}

// ---- Pairs: numbers at the even positions of memory and at the odd ones ----

template <int FIRST>
struct EverySecond {
  static constexpr int at(int i) { return 2 * i + FIRST; }
};
template <int FIRST>
struct Alternating {
  static constexpr int at(int i) { return FIRST + i / 2 + i % 2 * LANES; }
};

INLINE void load_pairs(const float* p, Full, vfloat& even, vfloat& odd) {
  const vfloat a = load(p), b = load(p + LANES);
  even = shuffled<EverySecond<0>>(a, b);
  odd = shuffled<EverySecond<1>>(a, b);
}
template <bool STREAMS = false>
INLINE void store_pairs(float* p, vfloat even, vfloat odd, Full lanes) {
  store_or_stream<STREAMS>(p, shuffled<Alternating<0>>(even, odd), lanes);
  store_or_stream<STREAMS>(p + LANES, shuffled<Alternating<LANES / 2>>(even, odd), lanes);
}
template <class T>
INLINE void load_pairs(const T* p, Full, vfloat& even, vfloat& odd) {
  vuint pairs;
  memcpy(&pairs, p, sizeof pairs);
  if constexpr (std::is_same_v<T, bfloat16>) {
    even = bits_as<vfloat>(pairs << 16);
    odd = bits_as<vfloat>(pairs & 0xffff0000u);
    return;
  }
  even = widen(narrow_16(pairs & 0xffff), T{});
  odd = widen(narrow_16(pairs >> 16), T{});
}
template <bool STREAMS = false, class T>
INLINE void store_pairs(T* p, vfloat even, vfloat odd, Full) {
  vuint pairs;
  if constexpr (std::is_same_v<T, bfloat16>) {
    pairs = (rounded_to_high_half(even) >> 16) | (rounded_to_high_half(odd) & 0xffff0000u);
  } else {
    pairs = widen_16(narrow(even, T{})) | widen_16(narrow(odd, T{})) << 16;
  }
  if constexpr (STREAMS) {
    stream_bits(p, pairs);
  } else {
    memcpy(p, &pairs, sizeof pairs);
  }
}
template <class T>
NOINLINE void load_pairs(const T* p, Part lanes, vfloat& even, vfloat& odd) {
  T values[2 * LANES] = {};
  for (int i = 0; i < 2 * lanes.n; i++) values[i] = p[i];
  load_pairs(values, Full{}, even, odd);
}
template <bool STREAMS = false, class T>
NOINLINE void store_pairs(T* p, vfloat even, vfloat odd, Part lanes) {
  T values[2 * LANES];
  store_pairs(values, even, odd, Full{});
  for (int i = 0; i < 2 * lanes.n; i++) p[i] = values[i];
}

// Load, with a prefetch 2 KiB ahead. The hardware prefetcher stops at the end of a page; where an element takes many
// instructions it does not catch up (GELU backward: 0.8 of the time). Where it takes few, the prefetch costs 1.1 times.
template <class T, class Lanes>
INLINE vfloat load_ahead(const T* p, Lanes lanes) {
  __builtin_prefetch((const char*)p + 2048);
  return load(p, lanes);
}

// Keeps a vector that was loaded, where each product would load it again.
INLINE void keep_in_register(vfloat& v) {
#if defined(__aarch64__)
  asm("" : "+w"(v));
#elif defined(__x86_64__) || defined(_M_X64)
  asm("" : "+v"(v));
#endif
}

}  // namespace
}  // namespace fusedops

// Vectors of 32-bit lanes on GCC/Clang vector extensions, one source for every instruction set.
// Loads and stores convert float32, bfloat16 and float16 to and from float32 lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns of its own _mm512_undefined_ps (GCC bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__F16C__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE inline __attribute__((noinline))  // for what runs once a row: a quarter of the library's size

namespace fusedops {
namespace {

constexpr int LANES = VECTOR_BYTES / 4;

typedef float vfloat __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vuint64 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vuint16 __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t vuint16_two __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t vbyte __attribute__((vector_size(VECTOR_BYTES / 4)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// True for results that are rounded to so few bits that an error of 2^-18 before does not count.
template <class T>
constexpr bool is_narrow = std::is_same_v<T, bfloat16>;

template <class To, class From>
INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

INLINE vfloat all(float value) { return vfloat{} + value; }

// ---- The operations that need an intrinsic: GCC 12 compiles the generic forms to several instructions ----

// Of two operands of which one is NaN, max and min return b (NEON: NaN).
#if VECTOR_BYTES == 64
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vuint widen_16(vuint16 h) { return (vuint)_mm512_cvtepu16_epi32(bits_as<__m256i>(h)); }
INLINE vuint16 narrow_16(vuint v) { return bits_as<vuint16>(_mm512_cvtepi32_epi16((__m512i)v)); }
INLINE vint widen_8(vbyte b) { return (vint)_mm512_cvtepu8_epi32(bits_as<__m128i>(b)); }
INLINE vuint selected(vuint table, vuint index) {  // by the low bits of each index
  return (vuint)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table);
}
#elif VECTOR_BYTES == 32
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vuint widen_16(vuint16 h) { return (vuint)_mm256_cvtepu16_epi32(bits_as<__m128i>(h)); }
INLINE vuint16 narrow_16(vuint v) {  // the values fit into 16 bits, so that packus does not saturate
  return bits_as<vuint16>(
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
}
INLINE vint widen_8(vbyte b) { return (vint)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(b))); }
INLINE vuint selected(vuint table, vuint index) {  // by the low bits of each index
  return (vuint)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)index);
}
#else
#if defined(__SSE4_1__)
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm_min_ps((__m128)a, (__m128)b); }
#elif defined(__aarch64__)
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)vminq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
INLINE vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
#endif
INLINE vuint widen_16(vuint16 h) { return __builtin_convertvector(h, vuint); }
INLINE vuint16 narrow_16(vuint v) { return __builtin_convertvector(v, vuint16); }
#if defined(__SSE4_1__)
INLINE vint widen_8(vbyte b) { return (vint)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bits_as<int32_t>(b))); }
#else
INLINE vint widen_8(vbyte b) { return __builtin_convertvector(b, vint); }
#endif
#endif

// ---- Conversions: round to nearest even; NaN stays NaN ----

INLINE vfloat widen(vuint16 h, bfloat16) {
#if VECTOR_BYTES == 64  // one instruction: each number moves to the high half of its lane, the low half becomes 0
  const vuint16_two places = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                              0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const __m512i all = _mm512_castsi256_si512(bits_as<__m256i>(h));
  return (vfloat)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)places, all);
#else
  return bits_as<vfloat>(widen_16(h) << 16);
#endif
}

// bfloat16 in the high half of each lane; the low half may hold anything. Of a NaN, the high half of v: all arithmetic
// returns a quiet NaN, whose mark is there.
INLINE vuint rounded_to_high_half(vfloat v) {
#if VECTOR_BYTES == 64
  const __m512i b = (__m512i)v;
  const __mmask16 number = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, b, _mm512_set1_epi32(0x10000));
  const __m512i down = _mm512_mask_add_epi32(b, number, b, _mm512_set1_epi32(0x7fff));
  return (vuint)_mm512_mask_add_epi32(down, odd, b, _mm512_set1_epi32(0x8000));
#else
  const vuint b = bits_as<vuint>(v), rounded = b + 0x7fff + ((b >> 16) & 1);
  return rounded | bits_as<vuint>(v != v);
#endif
}

INLINE vuint16 narrow(vfloat v, bfloat16) { return narrow_16(rounded_to_high_half(v) >> 16); }

INLINE vfloat widen(vuint16 h, float16) {
#if VECTOR_BYTES == 64
  return (vfloat)_mm512_cvtph_ps(bits_as<__m256i>(h));
#elif VECTOR_BYTES == 32
  return (vfloat)_mm256_cvtph_ps(bits_as<__m128i>(h));
#else
  vuint u = widen_16(h);
  vfloat v = bits_as<vfloat>((u & 0x7fff) << 13) * 0x1p112f;  // the product also normalises subnormal numbers
  vuint special = (u & 0x7c00) == 0x7c00 ? vuint{} + 0x7f800000u : vuint{};
  return bits_as<vfloat>(bits_as<vuint>(v) | special | ((u & 0x8000) << 16));
#endif
}

INLINE vuint16 narrow(vfloat v, float16) {
#if VECTOR_BYTES == 64
  return bits_as<vuint16>(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR_BYTES == 32
  return bits_as<vuint16>(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  vuint b = bits_as<vuint>(v), sign = b & 0x80000000u, magnitude = b ^ sign;
  vuint normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
  vuint subnormal = bits_as<vuint>(bits_as<vfloat>(magnitude) + 0x1p-1f) - 0x3f000000u;  // the sum rounds at 2^-24
  vuint r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x47800000u ? (magnitude > 0x7f800000u ? vuint{} + 0x7e00u : vuint{} + 0x7c00u) : r;
  return narrow_16(r | (sign >> 16));
#endif
}

template <class T>
INLINE vfloat rounded_to(vfloat v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return widen(narrow(v, T{}), T{});
  }
}

// ---- Memory ----

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

// Two vectors in bfloat16.
#if VECTOR_BYTES >= 32
INLINE vuint16_two narrow_two(vfloat a, vfloat b) {
  const vuint x = rounded_to_high_half(a), y = rounded_to_high_half(b);
#if VECTOR_BYTES == 64
  // a list: clang computes a loop that fills the vector anew each time
  const vuint16_two odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (vuint16_two)_mm512_permutex2var_epi16((__m512i)x, (__m512i)odd, (__m512i)y);
#else
  const __m256i of_lanes = _mm256_packus_epi32((__m256i)(x >> 16), (__m256i)(y >> 16));
  return (vuint16_two)_mm256_permute4x64_epi64(of_lanes, 0xd8);
#endif
}
#endif

// Stores two vectors.
template <class T>
INLINE void store_two(T* p, vfloat a, vfloat b) {
#if VECTOR_BYTES >= 32
  if constexpr (std::is_same_v<T, bfloat16>) {
    const vuint16_two packed = narrow_two(a, b);
    memcpy(p, &packed, sizeof packed);
    return;
  }
#endif
  store(p, a);
  store(p + LANES, b);
}

INLINE vint lanes_below(int n) {
  vint index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  return index < n;
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
#if VECTOR_BYTES == 64
  const uint32_t mask = (1u << lanes.n) - 1;
  if constexpr (std::is_same_v<T, float>) {
    return (vfloat)_mm512_maskz_loadu_ps(__mmask16(mask), p);
  } else {
    return widen(bits_as<vuint16>(_mm256_maskz_loadu_epi16(__mmask16(mask), p)), T{});
  }
#else
#if VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, float>) return (vfloat)_mm256_maskload_ps(p, (__m256i)lanes_below(lanes.n));
#endif
  return load_each(p, lanes.n);
#endif
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
#if VECTOR_BYTES == 64
  const uint32_t mask = (1u << lanes.n) - 1;
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(p, __mmask16(mask), (__m512)v);
  } else {
    _mm256_mask_storeu_epi16(p, __mmask16(mask), bits_as<__m256i>(narrow(v, T{})));
  }
#else
#if VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, float>) return _mm256_maskstore_ps(p, (__m256i)lanes_below(lanes.n), (__m256)v);
#endif
  store_each(p, v, lanes.n);
#endif
}
template <class T>
INLINE void store(T* p, vfloat v, Cut lanes) {
  store(p, lanes_below(lanes.n) ? v : vfloat{});
}

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
  decltype(a == b) order;
  for (int i = 0; i < COUNT; i++) order[i] = Order::at(i);
  return __builtin_shuffle(a, b, order);
#endif
}
template <int FIRST>
struct From {
  static constexpr int at(int i) { return FIRST + i; }
};

// ---- Stores past the caches ----

// For a tensor that is larger than the caches: memory is not read before it is written. Full vectors of aligned memory
// only; other cores see the values after stream_end().
INLINE void stream(float* p, vfloat v) {
#if VECTOR_BYTES == 64
  _mm512_stream_ps(p, (__m512)v);
#elif VECTOR_BYTES == 32
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE4_1__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}
template <class T>
INLINE void stream(T* p, vfloat v) {
#if VECTOR_BYTES == 64
  _mm256_stream_si256((__m256i*)p, bits_as<__m256i>(narrow(v, T{})));
#elif VECTOR_BYTES == 32
  _mm_stream_si128((__m128i*)p, bits_as<__m128i>(narrow(v, T{})));
#elif defined(__SSE4_1__)
  _mm_stream_si64((long long*)p, bits_as<int64_t>(narrow(v, T{})));
#else
  store(p, v);
#endif
}
// Streams a whole vector of 16-bit numbers, to memory that is aligned to half a vector.
template <class T>
INLINE void stream_bits(T* p, vuint bits) {
  vuint16 halves[2];
  memcpy(halves, &bits, sizeof bits);
  for (int i = 0; i < 2; i++) {
#if VECTOR_BYTES == 64
    _mm256_stream_si256((__m256i*)p + i, bits_as<__m256i>(halves[i]));
#elif VECTOR_BYTES == 32
    _mm_stream_si128((__m128i*)p + i, bits_as<__m128i>(halves[i]));
#elif defined(__SSE4_1__)
    _mm_stream_si64((long long*)p + i, bits_as<int64_t>(halves[i]));
#else
    memcpy(p + i * LANES, &halves[i], sizeof halves[i]);
#endif
  }
}
template <class T>
INLINE void stream_two(T* p, vfloat a, vfloat b) {
#if VECTOR_BYTES >= 32
  if constexpr (std::is_same_v<T, bfloat16>) return stream_bits(p, (vuint)narrow_two(a, b));
#endif
  stream(p, a);
  stream(p + LANES, b);
}
INLINE void stream_end() {
#if defined(__SSE4_1__)
  _mm_sfence();
#endif
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

// ---- Loops ----

// Calls f(index, lanes) for n elements.
template <class F>
INLINE void each(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, Full{});
  if (i < n) f(i, Part{int(n - i)});
}

// Calls f(index, lanes) for the first n elements of a row of `columns`. The last call covers a whole vector where the
// row has one, so that the elements after the first n are written as 0.
template <class F>
INLINE void each_of_row(int64_t n, int64_t columns, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, Full{});
  if (i == n) return;
  if (i + LANES <= columns) {
    f(i, Cut{int(n - i)});
  } else {
    f(i, Part{int(n - i)});
  }
}

// The number of elements that each_of_row(n, columns, store) writes.
INLINE int64_t written_of_row(int64_t n, int64_t columns) {
  int64_t whole = (n + LANES - 1) / LANES * LANES;
  return whole <= columns ? whole : n;
}

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

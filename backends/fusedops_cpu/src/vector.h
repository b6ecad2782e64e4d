// Vectors of 32-bit lanes on GCC/Clang vector extensions, one source for every instruction set.
// Loads and stores convert float32, bfloat16 and float16 to and from float32 lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

namespace fusedops {
namespace {

constexpr int LANES = VECTOR_BYTES / 4;

typedef float vfloat __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vuint64 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vuint16 __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint8_t vbyte __attribute__((vector_size(VECTOR_BYTES / 4)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

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
#elif VECTOR_BYTES == 32
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vuint widen_16(vuint16 h) { return (vuint)_mm256_cvtepu16_epi32(bits_as<__m128i>(h)); }
INLINE vuint16 narrow_16(vuint v) {  // the values fit into 16 bits, so that packus does not saturate
  return bits_as<vuint16>(
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
}
INLINE vint widen_8(vbyte b) { return (vint)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(b))); }
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
INLINE vint widen_8(vbyte b) { return __builtin_convertvector(b, vint); }
#endif

// ---- Conversions: round to nearest even; NaN stays NaN ----

INLINE vfloat widen(vuint16 h, bfloat16) { return bits_as<vfloat>(widen_16(h) << 16); }

INLINE vuint16 narrow(vfloat v, bfloat16) {
  vuint b = bits_as<vuint>(v);
  vuint rounded = b + 0x7fff + ((b >> 16) & 1);
  rounded = v == v ? rounded : vuint{} + 0x7fc00000u;
  return narrow_16(rounded >> 16);
}

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

INLINE vint lanes_below(int n) {
  vint index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  return index < n;
}

// The lanes that a load or store covers: all of them; the first n; or the first n of a whole vector of memory that may
// be read and written, where the other lanes are read and written as 0.
struct Full {
  static constexpr bool full = true;
};
struct Part {
  static constexpr bool full = false;
  int n;
};
struct Cut {
  static constexpr bool full = false;
  int n;
};

template <class T>
INLINE vfloat load(const T* p, Full) {
  return load(p);
}
template <class T>
INLINE vfloat load(const T* p, Part lanes) {
  T values[LANES] = {};
  for (int i = 0; i < lanes.n; i++) values[i] = p[i];
  return load(values);
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
  T values[LANES];
  store(values, v);
  for (int i = 0; i < lanes.n; i++) p[i] = values[i];
}
template <class T>
INLINE void store(T* p, vfloat v, Cut lanes) {
  store(p, lanes_below(lanes.n) ? v : vfloat{});
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

// y[0..n) = f(index, lanes). 16-bit results are rounded in a loop of their own: one chain of operations as long as both
// fills the processor's reorder window (bfloat16 GELU: 0.61 ns an element instead of 0.81).
template <class T, class F>
INLINE void produce(T* y, int64_t n, F f) {
  if constexpr (std::is_same_v<T, float>) {
    each(n, [&](int64_t i, auto lanes) { store(y + i, f(i, lanes), lanes); });
  } else {
    constexpr int64_t CHUNK = 256;
    float wide[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
      int64_t count = n - at < CHUNK ? n - at : CHUNK;
      each(count, [&](int64_t i, auto lanes) { store(wide + i, f(at + i, lanes)); });
      each(count, [&](int64_t i, auto lanes) { store(y + at + i, load(wide + i), lanes); });
    }
  }
}

// ---- Reductions of one vector, in one order ----

INLINE float sum_of(vfloat v) {
  float t[LANES];
  store(t, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) t[i] += t[i + width];
  return t[0];
}

INLINE float max_of(vfloat v) {
  float result = v[0];
  for (int i = 1; i < LANES; i++) result = v[i] > result ? v[i] : result;
  return result;
}

}  // namespace
}  // namespace fusedops

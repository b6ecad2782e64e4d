// Codes of 8 bits as lanes: bytes, int8, and float8 of 4 bits of exponent and 3 of fraction (float8_e4m3fn).
#pragma once

#include <limits>

#include "simd/memory.h"

namespace fusedops {
namespace {

struct float8 {
  uint8_t bits;
};

// LANES bytes, without and with a sign.
INLINE vint load_bytes(const uint8_t* p) {
  vbyte b;
  memcpy(&b, p, sizeof b);
  return widen_8(b);
}
// Of n bytes, and `other` in the lanes after them.
INLINE vint load_bytes(const uint8_t* p, int n, uint8_t other) {
#if VECTOR_BYTES == 64
  return (vint)_mm512_cvtepu8_epi32(_mm_mask_loadu_epi8(_mm_set1_epi8(char(other)), __mmask16((1u << n) - 1), p));
#else
  uint8_t bytes[LANES];
  memset(bytes, other, sizeof bytes);
  for (int i = 0; i < n; i++) bytes[i] = p[i];
  return load_bytes(bytes);
#endif
}
INLINE vint load_signed(const uint8_t* p) {
#if VECTOR_BYTES == 64
  return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif VECTOR_BYTES == 32
  return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return (load_bytes(p) ^ 128) - 128;
#endif
}

// 2**-8 of the numbers of LANES codes of e4m3, exactly: their bits as those of a float16. Not of NaN.
INLINE vfloat small_e4m3(const uint8_t* p) {
#if VECTOR_BYTES == 64
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  return (vfloat)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff))));
#elif VECTOR_BYTES == 32
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return (vfloat)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbfff))));
#else
  return widen(narrow_16(bits_as<vuint>(load_signed(p) << 7 & 0xbfff)), float16{});
#endif
}

INLINE vfloat load(const int8_t* p) { return __builtin_convertvector(load_signed((const uint8_t*)p), vfloat); }
INLINE vfloat load(const float8* p) {
  const auto* codes = (const uint8_t*)p;
  const vint is_nan = (load_bytes(codes) & 0x7f) == 0x7f;
  return is_nan ? all(std::numeric_limits<float>::quiet_NaN()) : small_e4m3(codes) * 256.0f;
}
INLINE vfloat load(const int8_t* p, Full) { return load(p); }
INLINE vfloat load(const float8* p, Full) { return load(p); }
template <class T>
NOINLINE vfloat load_first_codes(const T* p, int n) {
  T codes[LANES] = {};
  memcpy(codes, p, n);
  return load(codes);
}
INLINE vfloat load(const int8_t* p, Part lanes) { return load_first_codes(p, lanes.n); }
INLINE vfloat load(const float8* p, Part lanes) { return load_first_codes(p, lanes.n); }

typedef int8_t vint8 __attribute__((vector_size(LANES)));

// Half to even, of magnitudes below 2^22.
INLINE vint rounded_to_integers(vfloat v) {
  constexpr float WHOLE = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number
  return bits_as<vint>(v + WHOLE) - bits_as<int32_t>(WHOLE);
}

// The codes of LANES numbers of magnitudes up to 127, or 448. NaN is 0 as int8.
INLINE void store_codes(int8_t* p, vfloat v) {
  const vint codes = rounded_to_integers(v) & vint(v == v);
  const vint8 narrow = __builtin_convertvector(codes, vint8);
  memcpy(p, &narrow, sizeof narrow);
}
INLINE void store_codes(float8* p, vfloat v) {
  const vuint bits = bits_as<vuint>(v), magnitude = bits & 0x7fffffff;
  // the exponent has another bias, and the 20 bits that are dropped are rounded half to even
  const vuint normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
  const float place = 16384.0f;  // a sum with it is rounded to the multiples of 2^-9 that are below 2^-6
  const vuint small = bits_as<vuint>(bits_as<vfloat>(magnitude) + place) - bits_as<uint32_t>(place);
  const vuint codes = vint(magnitude) < 121 << 23 ? small : normal;
  const vint signed_codes = vint((v == v ? codes : vuint{} + 0x7f) | (bits >> 24 & 0x80));
  const vint8 narrow = __builtin_convertvector(signed_codes, vint8);
  memcpy(p, &narrow, sizeof narrow);
}

}  // namespace
}  // namespace fusedops

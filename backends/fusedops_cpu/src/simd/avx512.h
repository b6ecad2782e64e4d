// The operations of vector.h that need intrinsics, for AVX-512 (x86-64-v4).
#pragma once

#include "simd/types.h"

namespace fusedops {
namespace {

INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vfloat positive_part(vfloat x) { return max(vfloat{}, x); }
INLINE vfloat reciprocal(vfloat d) {
  const vfloat estimate = (vfloat)_mm512_rcp14_ps((__m512)d);  // to 2^-14; one step of Newton's method squares that
  return estimate * (1.0f - d * estimate) + estimate;
}
INLINE vuint selected(vuint table, vuint index) {
  return (vuint)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table);
}

// ---- Conversions ----

INLINE vuint widen_16(vuint16 h) { return (vuint)_mm512_cvtepu16_epi32(bits_as<__m256i>(h)); }
INLINE vuint16 narrow_16(vuint v) { return bits_as<vuint16>(_mm512_cvtepi32_epi16((__m512i)v)); }
INLINE vint widen_8(vbyte b) { return (vint)_mm512_cvtepu8_epi32(bits_as<__m128i>(b)); }

INLINE vfloat widen(vuint16 h, bfloat16) {
  // one instruction: each number moves to the high half of its lane, the low half becomes 0
  const vuint16_two places = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                              0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const __m512i all = _mm512_castsi256_si512(bits_as<__m256i>(h));
  return (vfloat)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)places, all);
}
INLINE vuint rounded_to_high_half(vfloat v) {
  const __m512i b = (__m512i)v;
  const __mmask16 number = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, b, _mm512_set1_epi32(0x10000));
  const __m512i down = _mm512_mask_add_epi32(b, number, b, _mm512_set1_epi32(0x7fff));
  return (vuint)_mm512_mask_add_epi32(down, odd, b, _mm512_set1_epi32(0x8000));
}
INLINE vuint16_two narrow_two(vfloat a, vfloat b) {
  const vuint x = rounded_to_high_half(a), y = rounded_to_high_half(b);
  // a list: clang computes a loop that fills the vector anew each time
  const vuint16_two odd = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (vuint16_two)_mm512_permutex2var_epi16((__m512i)x, (__m512i)odd, (__m512i)y);
}

INLINE vfloat widen(vuint16 h, float16) { return (vfloat)_mm512_cvtph_ps(bits_as<__m256i>(h)); }
INLINE vuint16 narrow(vfloat v, float16) {
  return bits_as<vuint16>(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

// ---- Memory ----

template <class T>
constexpr bool HAS_MASKED_LOADS = true;

INLINE uint32_t first_lanes(int n) { return (1u << n) - 1; }
INLINE vfloat load_first(const float* p, int n) { return (vfloat)_mm512_maskz_loadu_ps(__mmask16(first_lanes(n)), p); }
template <class T>
INLINE vfloat load_first(const T* p, int n) {
  return widen(bits_as<vuint16>(_mm256_maskz_loadu_epi16(__mmask16(first_lanes(n)), p)), T{});
}
INLINE void store_first(float* p, vfloat v, int n) { _mm512_mask_storeu_ps(p, __mmask16(first_lanes(n)), (__m512)v); }
template <class T>
INLINE void store_first(T* p, vfloat v, int n) {
  _mm256_mask_storeu_epi16(p, __mmask16(first_lanes(n)), bits_as<__m256i>(narrow(v, T{})));
}

INLINE void stream(float* p, vfloat v) { _mm512_stream_ps(p, (__m512)v); }
INLINE void stream_16(void* p, vuint16 v) { _mm256_stream_si256((__m256i*)p, bits_as<__m256i>(v)); }
INLINE void stream_end() { _mm_sfence(); }

}  // namespace
}  // namespace fusedops

// The operations of vector.h that need intrinsics, for AVX2 with F16C (x86-64-v3).
#pragma once

#include "simd/types.h"

namespace fusedops {
namespace {

INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vfloat positive_part(vfloat x) { return max(vfloat{}, x); }
INLINE vfloat reciprocal(vfloat d) { return 1.0f / d; }
INLINE vuint selected(vuint table, vuint index) {
  return (vuint)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)index);
}

// ---- Conversions ----

INLINE vuint widen_16(vuint16 h) { return (vuint)_mm256_cvtepu16_epi32(bits_as<__m128i>(h)); }
INLINE vuint16 narrow_16(vuint v) {  // the values fit into 16 bits, so that packus does not saturate
  return bits_as<vuint16>(
      _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
}
INLINE vint widen_8(vbyte b) { return (vint)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(b))); }

INLINE vfloat widen(vuint16 h, bfloat16) { return bits_as<vfloat>(widen_16(h) << 16); }
INLINE vuint rounded_to_high_half(vfloat v) {
  const vuint b = bits_as<vuint>(v), rounded = b + 0x7fff + ((b >> 16) & 1);
  return rounded | bits_as<vuint>(v != v);
}
INLINE vuint16_two narrow_two(vfloat a, vfloat b) {
  const vuint x = rounded_to_high_half(a), y = rounded_to_high_half(b);
  const __m256i of_lanes = _mm256_packus_epi32((__m256i)(x >> 16), (__m256i)(y >> 16));
  return (vuint16_two)_mm256_permute4x64_epi64(of_lanes, 0xd8);
}

INLINE vfloat widen(vuint16 h, float16) { return (vfloat)_mm256_cvtph_ps(bits_as<__m128i>(h)); }
INLINE vuint16 narrow(vfloat v, float16) {
  return bits_as<vuint16>(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

// ---- Memory ----

template <class T>
constexpr bool HAS_MASKED_LOADS = std::is_same_v<T, float>;

INLINE vfloat load_first(const float* p, int n) { return (vfloat)_mm256_maskload_ps(p, (__m256i)lanes_below(n)); }
INLINE void store_first(float* p, vfloat v, int n) { _mm256_maskstore_ps(p, (__m256i)lanes_below(n), (__m256)v); }

INLINE void stream(float* p, vfloat v) { _mm256_stream_ps(p, (__m256)v); }
INLINE void stream_16(void* p, vuint16 v) { _mm_stream_si128((__m128i*)p, bits_as<__m128i>(v)); }
INLINE void stream_end() { _mm_sfence(); }

}  // namespace
}  // namespace fusedops

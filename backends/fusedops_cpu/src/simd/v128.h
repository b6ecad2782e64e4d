// The operations of vector.h that need intrinsics, for vectors of 128 bits: SSE4.1 (x86-64-v2), NEON, or none of both.
#pragma once

#include "simd/types.h"

namespace fusedops {
namespace {

#if defined(__SSE4_1__)
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)_mm_min_ps((__m128)a, (__m128)b); }
INLINE vfloat positive_part(vfloat x) { return max(vfloat{}, x); }
#else
#if defined(__aarch64__)
INLINE vfloat max(vfloat a, vfloat b) { return (vfloat)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vfloat min(vfloat a, vfloat b) { return (vfloat)vminq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
INLINE vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
#endif
INLINE vfloat positive_part(vfloat x) { return x < 0.0f ? vfloat{} : x; }
#endif
INLINE vfloat reciprocal(vfloat d) { return 1.0f / d; }

// ---- Conversions ----

INLINE vuint widen_16(vuint16 h) { return __builtin_convertvector(h, vuint); }
INLINE vuint16 narrow_16(vuint v) { return __builtin_convertvector(v, vuint16); }
#if defined(__SSE4_1__)
INLINE vint widen_8(vbyte b) { return (vint)_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bits_as<int32_t>(b))); }
#else
INLINE vint widen_8(vbyte b) { return __builtin_convertvector(b, vint); }
#endif

INLINE vfloat widen(vuint16 h, bfloat16) { return bits_as<vfloat>(widen_16(h) << 16); }
INLINE vuint rounded_to_high_half(vfloat v) {
  const vuint b = bits_as<vuint>(v), rounded = b + 0x7fff + ((b >> 16) & 1);
  return rounded | bits_as<vuint>(v != v);
}
INLINE vuint16_two narrow_two(vfloat a, vfloat b) {
  const vuint16 low = narrow_16(rounded_to_high_half(a) >> 16), high = narrow_16(rounded_to_high_half(b) >> 16);
  vuint16_two both;
  memcpy(&both, &low, sizeof low);
  memcpy((char*)&both + sizeof low, &high, sizeof high);
  return both;
}

INLINE vfloat widen(vuint16 h, float16) {
  vuint u = widen_16(h);
  vfloat v = bits_as<vfloat>((u & 0x7fff) << 13) * 0x1p112f;  // the product also normalises subnormal numbers
  vuint special = (u & 0x7c00) == 0x7c00 ? vuint{} + 0x7f800000u : vuint{};
  return bits_as<vfloat>(bits_as<vuint>(v) | special | ((u & 0x8000) << 16));
}
INLINE vuint16 narrow(vfloat v, float16) {
  vuint b = bits_as<vuint>(v), sign = b & 0x80000000u, magnitude = b ^ sign;
  vuint normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
  vuint subnormal = bits_as<vuint>(bits_as<vfloat>(magnitude) + 0x1p-1f) - 0x3f000000u;  // the sum rounds at 2^-24
  vuint r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x47800000u ? (magnitude > 0x7f800000u ? vuint{} + 0x7e00u : vuint{} + 0x7c00u) : r;
  return narrow_16(r | (sign >> 16));
}

// ---- Memory ----

template <class T>
constexpr bool HAS_MASKED_LOADS = false;

#if defined(__SSE4_1__)
INLINE void stream(float* p, vfloat v) { _mm_stream_ps(p, (__m128)v); }
INLINE void stream_16(void* p, vuint16 v) { _mm_stream_si64((long long*)p, bits_as<int64_t>(v)); }
INLINE void stream_end() { _mm_sfence(); }
#else
INLINE void stream(float* p, vfloat v) { memcpy(p, &v, sizeof v); }
INLINE void stream_16(void* p, vuint16 v) { memcpy(p, &v, sizeof v); }
INLINE void stream_end() {}
#endif

}  // namespace
}  // namespace fusedops

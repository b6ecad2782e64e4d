// Codes of 8 bits as float32 lanes: int8, and float8 of 4 bits of exponent and 3 of fraction (float8_e4m3fn).
#pragma once

#include <limits>

#include "simd/memory.h"

namespace fusedops {
namespace {

struct float8 {
  uint8_t bits;
};

INLINE vuint load_codes(const void* p) {
  vbyte b;
  memcpy(&b, p, sizeof b);
  return (vuint)widen_8(b);
}
INLINE vfloat load(const int8_t* p) { return __builtin_convertvector((vint)(load_codes(p) << 24) >> 24, vfloat); }
// The bits as those of a float16 with the sign: 2^-8 of the number, exactly, but for NaN, which has all bits set.
INLINE vfloat load(const float8* p) {
  const vuint bits = load_codes(p);
  const vfloat value = widen(narrow_16((bits & 0x80) << 8 | (bits & 0x7f) << 7), float16{}) * 256.0f;
  return (bits & 0x7f) == 0x7f ? all(std::numeric_limits<float>::quiet_NaN()) : value;
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

}  // namespace
}  // namespace fusedops

// Masks of bytes: non-zero = masked out.
#pragma once

#include "simd/vector.h"

namespace fusedops {
namespace {

INLINE vint masked_lanes(const uint8_t* mask, Full) {
  vbyte m;
  memcpy(&m, mask, sizeof m);
  return widen_8(m) != 0;
}
INLINE vint masked_lanes(const uint8_t* mask, Cut) { return masked_lanes(mask, Full{}); }
INLINE vint masked_lanes(const uint8_t* mask, Part lanes) {
  uint8_t values[LANES] = {};
  for (int i = 0; i < lanes.n; i++) values[i] = mask[i];
  return masked_lanes(values, Full{});
}

}  // namespace
}  // namespace fusedops

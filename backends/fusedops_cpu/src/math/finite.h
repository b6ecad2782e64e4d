// Numbers of a call, which are doubles, as float32.
#pragma once

#include <limits>

namespace fusedops {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// A double that float32 cannot hold becomes infinite; the conversion itself would be undefined.
inline float to_float(double value) {
  constexpr double MAX = std::numeric_limits<float>::max();
  return value > MAX ? INF : value < -MAX ? -INF : float(value);
}

// The same, but the largest number where that becomes infinite: its product with 0 is 0.
inline float to_finite(double value) {
  constexpr float MAX = std::numeric_limits<float>::max();
  const float x = to_float(value);
  return x > MAX ? MAX : x < -MAX ? -MAX : x;
}

}  // namespace
}  // namespace fusedops

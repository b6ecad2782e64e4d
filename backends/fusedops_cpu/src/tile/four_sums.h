// The sums over the lanes of vectors, four at a time: each four lanes are added one by one, and then to what was
// before.
#pragma once

#include "tile/products.h"

namespace fusedops {
namespace {

constexpr int FOUR = 4;  // lanes

// The sums over the lanes of four vectors, in the first four lanes: added to those of `before` where `adds`.
INLINE vfloat four_sums(vfloat* vectors, vfloat before, bool adds) {
  transpose<FOUR>(vectors);
  const vfloat sums = vectors[0] + vectors[1] + vectors[2] + vectors[3];
  vfloat total = adds ? before + sums : sums;
  if constexpr (LANES > 4) total += shuffled<From<4>>(sums, sums);
  if constexpr (LANES > 8) total += shuffled<From<8>>(sums, sums), total += shuffled<From<12>>(sums, sums);
  return total;
}

// Writes the first `count` of them, or adds them to what is there.
INLINE void write_sums(vfloat* vectors, float* to, bool adds, int64_t count = FOUR) {
  vfloat before{};
  if (adds) memcpy(&before, to, count * sizeof(float));
  const vfloat total = four_sums(vectors, before, adds);
  memcpy(to, &total, count * sizeof(float));
}

}  // namespace
}  // namespace fusedops

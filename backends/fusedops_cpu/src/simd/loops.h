// Loops over the elements of memory.
#pragma once

#include "simd/memory.h"

namespace fusedops {
namespace {

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

}  // namespace
}  // namespace fusedops

// Products of the matrices of a chunk of positions, in float32 and in buffers, where they are: their rows are whole
// tiles apart, and a result has room for whole tiles.
#pragma once

#include "tile/products.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 32;   // positions: with 64, training took 1.1 times as long
constexpr int64_t TERMS = 128;  // at once: TILE_COLUMNS columns of them fit into the L1 cache
static_assert(CHUNK % TILE_COLUMNS == 0 && CHUNK <= TERMS);

// The rows of a result with room for whole tiles.
inline int64_t whole_rows(int64_t rows) { return round_up(rows, 4); }
// The floats from one row to the next: an odd number of cache lines, as else a few columns would share few sets of a
// cache.
inline int64_t stride_of(int64_t columns) { return (divide_up(round_up(columns, TILE_COLUMNS), 16) | 1) * 16; }

// The first operand of a product: its rows are the rows of a matrix, or, if `turned`, the columns of one.
struct Left {
  const float* data;
  int64_t stride;
  bool turned = false;
};

// The second one: term k of column n is at n / TILE_COLUMNS * panel + k * step + n % TILE_COLUMNS.
struct Right {
  const float* data;
  int64_t step, panel = TILE_COLUMNS;  // a matrix whose rows are the terms
};

// The floats of the panels of a matrix whose columns are the terms.
inline int64_t panels_floats(int64_t columns, int64_t terms) {
  return divide_up(columns, TILE_COLUMNS) * panel_floats<TILE_COLUMNS>(terms);
}
// Packs a matrix whose columns are the terms.
NOINLINE Right turned(const float* data, int64_t stride, int64_t columns, int64_t terms, float* panels) {
  pack_as<TILE_COLUMNS, float>({data, FLOAT32, stride, true}, 0, columns, 0, terms, panels);
  return {panels, TILE_COLUMNS, panel_floats<TILE_COLUMNS>(terms)};
}

// Where a product goes: to = keep * from + product, or with null the product alone. Both have rows `stride` apart.
struct Into {
  float* to;
  int64_t stride;
  const float* from = nullptr;
  float keep = 1.0f;
};
inline Into added_to(float* to, int64_t stride) { return {to, stride, to}; }

// The terms that the rows of a square operand have, or the rows and columns of a result.
enum Part_of : int { WHOLE_SQUARE, LOWER, UPPER };

// Computes M rows of TILE_COLUMNS columns.
template <int M, bool TURNED>
NOINLINE void tile_in_place(const float* a, int64_t stride, const float* b, int64_t step, int64_t depth,
                            const Into& into) {
  vfloat sums[M][2] = {};
  const float* rows[4] = {a, a + 3 * stride, a + 6 * stride, a + 9 * stride};  // three rows for each: few registers
  for (int64_t k = 0; k < depth; k++, b += step) {
    const vfloat left = load(b), right = load(b + LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const float x = TURNED ? a[m] : rows[m / 3][m % 3 * stride];
      sums[m][0] += left * x;
      sums[m][1] += right * x;
    }
    if (TURNED) {
      a += stride;
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) rows[i]++;
    }
  }
  float* to = into.to;
  const float* from = into.from;
#pragma GCC unroll 16
  for (int m = 0; m < M; m++, to += into.stride) {
    if (from) {
      sums[m][0] += load(from) * into.keep;
      sums[m][1] += load(from + LANES) * into.keep;
      from += into.stride;
    }
    store(to, sums[m][0]);
    store(to + LANES, sums[m][1]);
  }
}

template <bool TURNED>
INLINE void tile_in_place(int64_t rows, const float* a, int64_t stride, const float* b, int64_t step, int64_t depth,
                          const Into& into) {
  constexpr int MOST = TILE_ROWS < 8 ? TILE_ROWS : 8;
  if (rows > 8) return tile_in_place<TILE_ROWS, TURNED>(a, stride, b, step, depth, into);
  if (rows > 4) return tile_in_place<MOST, TURNED>(a, stride, b, step, depth, into);
  if (rows > 2) return tile_in_place<4, TURNED>(a, stride, b, step, depth, into);
  return tile_in_place<TILE_ROWS == 6 ? 2 : 4, TURNED>(a, stride, b, step, depth, into);
}

// The product of `rows` rows of a and `columns` columns of b. LOWER `terms_of`: row i of a has the terms to i alone;
// UPPER: those from i on. With `lower`, no more than the lower triangle of the result is wanted. Whole tiles of it are
// written. Of up to TILE_ROWS rows, b may be what is written.
NOINLINE void product(const Left& a, int64_t rows, const Right& b, int64_t columns, int64_t terms, Into into,
                      Part_of terms_of = WHOLE_SQUARE, bool lower = false) {
  int64_t start = 0;
  do {
    const int64_t end = std::min(terms, start + TERMS);
    for (int64_t n = 0; n < columns; n += TILE_COLUMNS)
      for (int64_t m = 0; m < rows; m += TILE_ROWS) {
        if (lower && m + TILE_ROWS <= n) continue;
        const int64_t first = terms_of == UPPER ? std::min(m, end) : start;
        const int64_t last = terms_of == LOWER ? std::min(m + TILE_ROWS, end) : end;
        const int64_t at = m * into.stride + n;
        const Into own{into.to + at, into.stride, into.from ? into.from + at : nullptr, into.keep};
        const float* right = b.data + n / TILE_COLUMNS * b.panel + first * b.step;
        if (a.turned) {
          tile_in_place<true>(rows - m, a.data + first * a.stride + m, a.stride, right, b.step, last - first, own);
        } else {
          tile_in_place<false>(rows - m, a.data + m * a.stride + first, a.stride, right, b.step, last - first, own);
        }
      }
    into.from = into.to;
    into.keep = 1.0f;
    start = end;
  } while (start < terms);
}

// Parts of one buffer, each of whole cache lines. Of a null buffer, the parts are null, and their sizes are added up.
class Parts {
 public:
  explicit Parts(float* buffer) : buffer_((float*)((uintptr_t(buffer) + 63) / 64 * 64)) {}
  float* take(int64_t floats) {
    float* part = buffer_ ? buffer_ + floats_ - 16 : nullptr;
    floats_ += round_up(floats, 16);
    return part;
  }
  int64_t floats() const { return floats_; }

 private:
  float* buffer_;
  int64_t floats_ = 16;  // what the alignment may take
};

}  // namespace
}  // namespace fusedops

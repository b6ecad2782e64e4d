// Products of the matrices of a chunk of positions, in float32 and in buffers: their rows are whole vectors apart, and
// a result has room for whole tiles.
#pragma once

#include "products.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 64;   // positions
constexpr int64_t TERMS = 128;  // of a panel: one of each operand fit into the L1 cache

inline int64_t tile_rows(int64_t rows) { return round_up(rows, TILE_ROWS); }
inline int64_t tile_columns(int64_t columns) { return round_up(columns, TILE_COLUMNS); }

// A matrix in a buffer; each row is multiplied by its factor, if there are factors.
struct Matrix {
  const float* data;
  int64_t stride;
  const float* factors = nullptr;

  Operand rows() const { return {data, FLOAT32, stride, true, nullptr, factors}; }         // its columns are the terms
  Operand transposed() const { return {data, FLOAT32, stride, false, nullptr, factors}; }  // its rows are the terms
};

// The terms that the rows of a square operand have, or the rows and columns of a result.
enum Part_of : int { WHOLE_SQUARE, LOWER, UPPER };

// The floats of the panels of an operand of `rows` rows.
template <int WIDTH>
inline int64_t operand_floats(int64_t rows) {
  return round_up(rows, WIDTH) / WIDTH * panel_floats<WIDTH>(TERMS);
}
inline int64_t panels_floats(int64_t rows, int64_t columns) {
  return operand_floats<TILE_ROWS>(rows) + operand_floats<TILE_COLUMNS>(columns);
}

// c = a b^T, or c + a b^T where `adds`. LOWER `terms_of`: row i of a has the terms to i alone; UPPER: those from i on.
// With `lower`, no more than the lower triangle of c is wanted. Whole tiles of c are written.
NOINLINE void product(const Operand& a, int64_t rows, const Operand& b, int64_t columns, int64_t terms, float* c,
                      int64_t stride, bool adds, float* panels, Part_of terms_of = WHOLE_SQUARE, bool lower = false) {
  if (!terms && !adds) memset(c, 0, rows * stride * sizeof(float));
  for (int64_t start = 0; start < terms; start += TERMS) {
    const int64_t depth = std::min(TERMS, terms - start);
    float* right = panels + operand_floats<TILE_ROWS>(rows);
    pack_as<TILE_ROWS, float>(a, 0, rows, start, depth, panels);
    pack_as<TILE_COLUMNS, float>(b, 0, columns, start, depth, right);
    for (int64_t n = 0; n < columns; n += TILE_COLUMNS, right += panel_floats<TILE_COLUMNS>(depth)) {
      const float* left = panels;
      for (int64_t m = 0; m < rows; m += TILE_ROWS, left += panel_floats<TILE_ROWS>(depth)) {
        if (lower && m + TILE_ROWS <= n) continue;
        const int64_t first = terms_of == UPPER ? std::min(std::max<int64_t>(0, m - start), depth) : 0;
        const int64_t last = terms_of == LOWER ? std::min(std::max<int64_t>(0, m + TILE_ROWS - start), depth) : depth;
        tile_of(rows - m, left + first * TILE_ROWS, right + first * TILE_COLUMNS, std::max<int64_t>(0, last - first),
                c + m * stride + n, stride, adds || start);
      }
    }
  }
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

// A block of a product of two operands, in a buffer of the caller.
#pragma once

#include "tile/pairs.h"

namespace fusedops {
namespace {

// Some rows of the second operand: columns of C.
struct Columns {
  const Operand* operand;
  int64_t first, count;
};

// A buffer for blocks of C, and for what is packed: the first operand whole where it is small, so that a second one
// with contiguous terms is read row by row to the end, as memory gives it fastest.
template <class Kind>
class Block {
 public:
  // For blocks of so many rows or fewer.
  Block(int64_t rows, int64_t terms) : most_(round_up(rows, TILE_ROWS)), terms_(terms) {
    depth_ = most_ * terms <= WHOLE * Kind::TERMS ? std::max<int64_t>(1, terms) : SLICE;
  }
  // The floats of the buffer for these columns, in parts that are each padded to TILE_COLUMNS.
  int64_t floats(int64_t columns) const {
    return most_ * columns + packed_rows() + columns / TILE_COLUMNS * panel<TILE_COLUMNS>(SLICE);
  }

  // Computes a block of C at the start of the buffer: `rows` rows of a from `first` on, and the columns of each part
  // one after another. Returns the number of columns: that from one row to the next.
  int64_t compute(const Operand& a, int64_t first, int64_t rows, const Columns* parts, int64_t count,
                  float* buffer) const {
    int64_t width = 0;
    for (int64_t p = 0; p < count; p++) width += round_up(parts[p].count, TILE_COLUMNS);
    float *packed = buffer + most_ * width, *panels = packed + packed_rows();
    if (!terms_) memset(buffer, 0, rows * width * sizeof(float));
    for (int64_t start = 0; start < terms_; start += depth_) {
      const int64_t end = std::min(terms_, start + depth_);
      for (int64_t term = start; term < end; term += SLICE)
        Kind::template pack<TILE_ROWS>(a, first, rows, term, std::min(SLICE, end - term),
                                       packed + rows_before(term - start));
      float* c = buffer;
      for (int64_t p = 0; p < count; p++) {
        const int64_t n = parts[p].count, at_once = parts[p].operand->terms_contiguous ? TILE_COLUMNS : n;
        for (int64_t column = 0; column < n; column += at_once)
          add({parts[p].operand, parts[p].first + column, std::min<int64_t>(at_once, n - column)}, rows, start, end,
              packed, panels, c + column, width, next_rows(parts, count, p, column + at_once));
        c += round_up(n, TILE_COLUMNS);
      }
    }
    return width;
  }

 private:
  static constexpr int64_t WHOLE = 65536;  // floats

  // The rows in memory of the columns from `column` of a part on: of this part, of the next one, or, after the last, of
  // the first part's next columns, which the next block has. Null: the terms are not contiguous. For Ahead alone.
  static const char* next_rows(const Columns* parts, int64_t count, int64_t part, int64_t column) {
    if (!parts[part].operand->terms_contiguous) return nullptr;
    if (column < parts[part].count) return rows_of(parts[part], column);
    return part + 1 < count ? rows_of(parts[part + 1], 0) : rows_of(parts[0], parts[0].count);
  }
  static const char* rows_of(const Columns& part, int64_t column) {
    return (const char*)part.operand->row(part.first + column, 0);
  }

  template <int WIDTH>
  static int64_t panel(int64_t terms) {
    return panel_floats<WIDTH>(divide_up(terms, Kind::TERMS));
  }
  // The floats of the packed rows of so many terms, of which all slices but the last are whole.
  int64_t rows_before(int64_t terms) const { return terms / SLICE * (most_ / TILE_ROWS) * panel<TILE_ROWS>(SLICE); }
  int64_t packed_rows() const { return rows_before(round_up(depth_, SLICE)); }

  void add(const Columns& part, int64_t rows, int64_t start, int64_t end, const float* packed, float* panels, float* c,
           int64_t width, const char* next) const {
    for (int64_t term = start; term < end; term += SLICE) {
      const int64_t terms = std::min(SLICE, end - term), steps = divide_up(terms, Kind::TERMS);
      const float *from = packed + rows_before(term - start), *before = term > 0 ? c : nullptr;
      Ahead ahead{(const char*)panels};
      if (next)
        ahead = ahead_of(next, part.operand->bytes(TILE_COLUMNS), term, terms, divide_up(rows, TILE_ROWS), steps);
      if (rows <= 2 && part.operand->terms_contiguous) {
        const int64_t at_once = part.operand->has_codes() ? TILE_COLUMNS : LANES;
        for (int64_t n = 0; n < part.count; n += at_once) {
          const int64_t count = std::min(at_once, part.count - n);
          const Target target{before ? c + n : nullptr, width, c + n, width, false};
          if (rows == 1) {
            Kind::template tile_of_terms<1>(*part.operand, part.first + n, count, term, terms, from, target, ahead);
          } else {
            Kind::template tile_of_terms<2>(*part.operand, part.first + n, count, term, terms, from, target, ahead);
          }
          ahead.next += part.operand->bytes(at_once * terms);
        }
        continue;
      }
      Kind::template pack<TILE_COLUMNS>(*part.operand, part.first, part.count, term, terms, panels);
      for (int64_t n = 0; n < part.count; n += TILE_COLUMNS)
        for (int64_t m = 0; m < rows; m += TILE_ROWS) {
          float* to = c + m * width + n;
          Kind::tile(rows - m, from + m / TILE_ROWS * panel<TILE_ROWS>(terms),
                     panels + n / TILE_COLUMNS * panel<TILE_COLUMNS>(terms), steps,
                     {term > 0 ? to : nullptr, width, to, width, false}, ahead);
          ahead.next += ahead.bytes * steps;
        }
    }
  }

  int64_t most_, terms_, depth_;
};

}  // namespace
}  // namespace fusedops

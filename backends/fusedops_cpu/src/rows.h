// Rows: a bias or weight of one row in float32, and sums over rows for its gradient.
#pragma once

#include <algorithm>

#include "api.h"
#include "parallel.h"
#include "simd/vector.h"

namespace fusedops {
namespace {

// Short rows are taken several at a time, as one wide row whose bias repeats, so that the inner loops are long.
inline int64_t wide_row(int64_t count, int64_t columns) {
  constexpr int64_t WIDE = 1024;
  return columns * std::max<int64_t>(1, std::min(WIDE, count / 4) / columns);
}

// Calls f(at, column, count) for the stretches of elements begin..end that lie in one row of `width`.
template <class F>
INLINE void each_stretch(int64_t begin, int64_t end, int64_t width, F f) {
  int64_t column = begin % width;
  for (int64_t at = begin; at < end;) {
    int64_t count = std::min(end - at, width - column);
    f(at, column, count);
    at += count;
    column = 0;
  }
}

// The sum of f(index, lanes) over a row, lane by lane, in an order that depends on n alone. Four sums at a time, as
// each addition waits for the one before; in chunks, so that the sum of a long row is as exact as that of a short one.
template <class Sums, class F>
INLINE Sums sums_of_row(int64_t n, F f) {
  constexpr int64_t CHUNK = 16384;
  Sums total = {};
  for (int64_t at = 0; at < n; at += CHUNK) {
    const int64_t end = std::min(n, at + CHUNK);
    Sums s0 = {}, s1 = {}, s2 = {}, s3 = {};
    int64_t i = at;
    for (; i + 4 * LANES <= end; i += 4 * LANES) {
      s0 = s0 + f(i, Full{});
      s1 = s1 + f(i + LANES, Full{});
      s2 = s2 + f(i + 2 * LANES, Full{});
      s3 = s3 + f(i + 3 * LANES, Full{});
    }
    each(end - i, [&](int64_t j, auto lanes) { s0 = s0 + f(i + j, lanes); });
    total = total + ((s0 + s1) + (s2 + s3));
  }
  return total;
}

// Loads a row of numbers as float32.
NOINLINE void load_as(int64_t dtype, const void* values, float* row, int64_t columns) {
  with_dtype(dtype, [=](auto element) {
    auto* from = (const decltype(element)*)values;
    each(columns, [=](int64_t i, auto lanes) { store(row + i, load(from + i, lanes), lanes); });
  });
}

// The bias in float32, repeated to the width of a wide row.
class BiasRow {
 public:
  BiasRow(const void* bias, int64_t dtype, int64_t columns, int64_t width)
      : buffer_(bias && (width > columns || dtype != FLOAT32) ? width : 0) {
    float* row = buffer_.data();
    const bool as_it_is = width == columns && dtype == FLOAT32;
    data_ = as_it_is ? (const float*)bias : row;
    failed_ = bias && !data_;
    if (!row) return;
    load_as(dtype, bias, row, columns);
    for (int64_t at = columns; at < width; at += columns) memcpy(row + at, row, columns * sizeof(float));
  }
  bool failed() const { return failed_; }
  const float* data() const { return data_; }

 private:
  FloatBuffer buffer_;
  const float* data_;
  bool failed_;
};

// `offset` + the values of a row, in float32; where there are no values, `absent` for each.
class FloatRow {
 public:
  FloatRow(const void* values, int64_t dtype, int64_t columns, float absent, float offset)
      : as_it_is_(values && dtype == FLOAT32 && offset == 0), buffer_(as_it_is_ ? 0 : columns) {
    float* row = buffer_.data();
    data_ = as_it_is_ ? (const float*)values : row;
    failed_ = columns && !data_;
    if (!row) return;
    if (!values) {
      std::fill(row, row + columns, absent);
      return;
    }
    load_as(dtype, values, row, columns);
    if (offset != 0)
      each(columns, [=](int64_t i, auto lanes) { store(row + i, load(row + i, lanes) + offset, lanes); });
  }
  bool failed() const { return failed_; }
  const float* data() const { return data_; }

 private:
  bool as_it_is_;
  FloatBuffer buffer_;
  const float* data_;
  bool failed_;
};

// Stores a row of float32 numbers in another dtype.
NOINLINE void store_as(int64_t dtype, void* out, const float* row, int64_t columns) {
  with_dtype(dtype, [=](auto element) {
    auto* to = (decltype(element)*)out;
    each(columns, [=](int64_t i, auto lanes) { store(to + i, load(row + i, lanes), lanes); });
  });
}

// Rows cut into parts, each with a sum of its own, in a way that depends on the shape alone.
struct RowParts {
  int64_t rows, count;
  RowParts(int64_t rows, int64_t columns) : rows(rows) {
    const int64_t rows_of_part = std::max<int64_t>(2, BLOCK / std::max<int64_t>(1, columns));
    count = std::max<int64_t>(1, std::min<int64_t>(128, rows / rows_of_part));
  }
  int64_t begin(int64_t part) const { return rows * part / count; }
};

// Adds the parts, of `width` sums each, to the first, in order.
NOINLINE void add_parts(float* sums, int64_t parts, int64_t width) {
  constexpr int64_t CHUNK = 2048;
  const int64_t chunks = divide_up(width, CHUNK);
  run_blocks(chunks, parts * width <= BLOCK ? 1 : workers_for(chunks), [=](int64_t chunk, int64_t) {
    const int64_t first = chunk * CHUNK, n = std::min(CHUNK, width - first);
    for (int64_t part = 1; part < parts; part++) {
      float *mine = sums + first, *other = mine + part * width;
      each(n, [=](int64_t i, auto lanes) { store(mine + i, load(mine + i, lanes) + load(other + i, lanes), lanes); });
    }
  });
}

NOINLINE void finish_column_sums(float* sums, int64_t parts, int64_t width, int64_t columns, int64_t dtype, void* out) {
  add_parts(sums, parts, width);
  for (int64_t at = columns; at < width; at += columns)
    for (int64_t i = 0; i < columns; i++) sums[i] += sums[at + i];
  store_as(dtype, out, sums, columns);
}

// Sums of columns in an order that depends on the shape alone, not on the number of threads: the wide rows are cut into
// `parts`, and the columns into chunks whose sums stay in the L1 cache; the parts are added in order.
// f(begin, end, sums) adds the elements begin..end, which lie in `width` columns, to sums[column]; of a row it gets
// COLUMNS_AT_ONCE or fewer.
constexpr int64_t COLUMNS_AT_ONCE = 4096;
template <class F>
Status column_sums(int64_t count, int64_t columns, int64_t width, int64_t dtype, void* out, F f) {
  constexpr int64_t CHUNK = COLUMNS_AT_ONCE;
  int64_t rows = divide_up(count, width), parts = std::max<int64_t>(1, std::min<int64_t>(128, rows / 32));
  int64_t chunks = divide_up(width, CHUNK), blocks = parts * chunks;
  FloatBuffer buffer(parts * width);
  float* sums = buffer.data();
  if (!sums) return OUT_OF_MEMORY;
  run_blocks(blocks, count <= BLOCK ? 1 : workers_for(blocks), [=](int64_t block, int64_t) {
    int64_t part = block / chunks, first = block % chunks * CHUNK, last = std::min(width, first + CHUNK);
    int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
    float* mine = sums + part * width;
    memset(mine + first, 0, (last - first) * sizeof(float));
    if (chunks == 1) {
      f(begin * width, std::min(count, end * width), mine);
    } else {
      for (int64_t row = begin; row < end; row++) f(row * width + first, std::min(count, row * width + last), mine);
    }
  });
  finish_column_sums(sums, parts, width, columns, dtype, out);
  return OK;
}

}  // namespace
}  // namespace fusedops

// Elementwise kernels with a bias of one row: the bias in float32, and sums over rows for its gradient.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "vector.h"

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

// The bias in float32, repeated to the width of a wide row.
class BiasRow {
 public:
  template <class T>
  BiasRow(const T* bias, int64_t columns, int64_t width)
      : buffer_(bias && (width > columns || !std::is_same_v<T, float>) ? width : 0) {
    float* row = buffer_.data();
    if constexpr (std::is_same_v<T, float>) {
      data_ = row ? row : bias;
      if (row) memcpy(row, bias, columns * sizeof(float));
      failed_ = bias && width > columns && !row;
    } else {
      data_ = row;
      if (row) each(columns, [&](int64_t i, auto lanes) { store(row + i, load(bias + i, lanes), lanes); });
      failed_ = bias && !row;
    }
    for (int64_t at = columns; row && at < width; at += columns) memcpy(row + at, row, columns * sizeof(float));
  }
  bool failed() const { return failed_; }
  const float* data() const { return data_; }

 private:
  FloatBuffer buffer_;
  const float* data_;
  bool failed_;
};

// Sums of columns in an order that depends on the shape alone, not on the number of threads: the wide rows are cut into
// `parts`, and the columns into chunks whose sums stay in the L1 cache; the parts are added in order.
// f(begin, end, sums) adds the elements begin..end, which lie in `width` columns, to sums[column].
template <class T, class F>
Status column_sums(int64_t count, int64_t columns, int64_t width, T* out, F f) {
  constexpr int64_t CHUNK = 4096;
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
  for (int64_t part = 1; part < parts; part++) {
    const float* other = sums + part * width;
    each(width, [&](int64_t i, auto lanes) { store(sums + i, load(sums + i, lanes) + load(other + i, lanes), lanes); });
  }
  for (int64_t at = columns; at < width; at += columns)
    for (int64_t i = 0; i < columns; i++) sums[i] += sums[at + i];
  each(columns, [&](int64_t i, auto lanes) { store(out + i, load(sums + i, lanes), lanes); });
  return OK;
}

}  // namespace
}  // namespace fusedops

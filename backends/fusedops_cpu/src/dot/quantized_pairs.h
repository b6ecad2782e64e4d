// y = x @ W.T + bias for many rows of bfloat16 and a packed weight of integers with a scale for each run of them.
//
// Integers of 8 bits are exact in bfloat16: the sum of a run is one of pairs of products (tile/pairs.h), twice as fast
// as those of float32, and then it is multiplied by the scale. A minimum is multiplied by the sum of the run of x. The
// weights are those of the format, but they are added in another order than for few rows.
#pragma once

#include <atomic>

#include "dot/activation.h"
#include "dot/packed_products.h"
#include "rows.h"
#include "tile/pairs.h"
#include "tile/scaled.h"

namespace fusedops {
namespace {

#if VECTOR_BYTES == 64

constexpr int64_t MANY_OF_PAIRS = 48;  // rows of x
constexpr int PAIR_ROWS = 6;           // rows of x of a tile: beside its sums are those of a run

// The products of a tile of x and of TILE_COLUMNS rows of the weight, written to (PAIR_ROWS, TILE_COLUMNS), or added.
// From one run of `numbers` to the next are the scales and the minima of the rows of the weight.
template <int STEPS, bool HAS_M>
__attribute__((target("avx512bf16"))) NOINLINE void tile_of_runs(const float* x, const float* sums_of_x,
                                                                 const float* weight, const float* numbers,
                                                                 int64_t runs, float* to, bool adds) {
  vfloat total[PAIR_ROWS][2] = {};
  for (; runs; runs--, numbers += 2 * TILE_COLUMNS, sums_of_x += PAIR_ROWS) {
    __m512 sums[PAIR_ROWS][2] = {};
    for (int k = 0; k < STEPS; k++, x += PAIR_ROWS, weight += TILE_COLUMNS) {
      const __m512bh left = (__m512bh)load(weight), right = (__m512bh)load(weight + LANES);
#pragma GCC unroll 6
      for (int m = 0; m < PAIR_ROWS; m++) {
        const __m512bh of_row = (__m512bh)_mm512_set1_ps(x[m]);
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], left, of_row);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], right, of_row);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const vfloat d = load(numbers + i * LANES), minimum = load(numbers + TILE_COLUMNS + i * LANES);
#pragma GCC unroll 6
      for (int m = 0; m < PAIR_ROWS; m++) {
        total[m][i] += (vfloat)sums[m][i] * d;
        if (HAS_M) total[m][i] += minimum * sums_of_x[m];
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < PAIR_ROWS; m++, to += TILE_COLUMNS) {
    store(to, adds ? load(to) + total[m][0] : total[m][0]);
    store(to + LANES, adds ? load(to + LANES) + total[m][1] : total[m][1]);
  }
}

// Unpacks a part of a row: integers, and d and m of its runs, which are written to every second TILE_COLUMNS floats.
template <class Format>
NOINLINE void unpack_integers(const PackedWeight& weight, int64_t row, int64_t first, int64_t count, uint16_t* to,
                              float* numbers) {
  const uint8_t* from = weight.codes + row * weight.row_bytes + first / Format::WEIGHTS * Format::BYTES;
  for (const uint16_t* end = to + count; to < end; from += Format::BYTES) {
    uint8_t of_integers[Format::BYTES];
    memcpy(of_integers, from, Format::BYTES);
    Format::set_to_integers(of_integers);
    const typename Format::Block block(of_integers);
    for (int c = 0; c < Format::WEIGHTS / Format::CHUNK; c++) {
      const typename Format::Chunk chunk(block, c);
#pragma GCC unroll 4
      for (int i = 0; i < Format::CHUNK; i += LANES, to += LANES) {
        const vuint16 high = narrow_16(bits_as<vuint>(chunk.at(i)) >> 16);
        memcpy(to, &high, sizeof high);
      }
    }
    Affine runs[Format::WEIGHTS / Format::RUN];
    Format::numbers_of(from, runs);
    for (const Affine& run : runs) {
      numbers[0] = run.d, numbers[TILE_COLUMNS] = run.m;
      numbers += 2 * TILE_COLUMNS;
    }
  }
}

// What a format has of its own: the weights of a run, and whether that has a minimum.
struct OfRuns {
  int64_t run;
  bool has_m;
  decltype(&unpack_integers<Q8_0>) unpack;
  decltype(&tile_of_runs<16, false>) tile;
};
template <class Format>
OfRuns of_runs() {
  return {Format::RUN, Format::HAS_M, unpack_integers<Format>, tile_of_runs<Format::RUN / 2, Format::HAS_M>};
}

class OfPairs {
 public:
  OfPairs(const QuantizedForward& call, const OfRuns& format)
      : call_(call), format_(format), parts_(divide_up(call.columns, DEPTH)), depth_(std::min(call.columns, DEPTH)) {
    height_ = round_up(divide_up(call.rows, divide_up(call.rows, MOST_ROWS)), PAIR_ROWS);
  }
  int64_t blocks_of_rows() const { return divide_up(call_.rows, height_); }
  int64_t panels() const { return divide_up(call_.outputs, TILE_COLUMNS); }
  // Of a block of rows of x, and of a worker.
  int64_t floats_of_x() const { return parts_ * floats_of_part(); }
  int64_t floats() const { return height_ * TILE_COLUMNS + panel<TILE_COLUMNS>() + codes() + numbers(); }

  // Packs a piece of a part of a block of rows of x, with the sums of its runs.
  int64_t pieces() const { return parts_ * divide_up(height_, ROWS_OF_PIECE); }
  void pack_x(int64_t block, int64_t piece, float* to) const {
    const int64_t part = piece % parts_, begin = piece / parts_ * ROWS_OF_PIECE;
    const int64_t row = block * height_, first = part * DEPTH, count = terms(part);
    const int64_t rows = std::min({height_, call_.rows - row, begin + ROWS_OF_PIECE});
    const Operand x{call_.x, BFLOAT16, call_.columns, true};
    to += part * floats_of_part() + begin / PAIR_ROWS * floats_of_tile();
    for (int64_t m = begin; m < rows; m += PAIR_ROWS, to += floats_of_tile()) {
      const int64_t some = std::min<int64_t>(PAIR_ROWS, rows - m);
      Pairs::pack<PAIR_ROWS>(x, row + m, some, first, count, to);
      if (!format_.has_m) continue;
      float* sums = to + panel<PAIR_ROWS>();
      for (int64_t i = 0; i < some; i++) {
        const auto* of_row = (const bfloat16*)x.row(row + m + i, first);
        for (int64_t run = 0; run < count / format_.run; run++) {
          vfloat sum{};
          for (int64_t at = 0; at < format_.run; at += LANES) sum += load(of_row + run * format_.run + at);
          sums[run * PAIR_ROWS + i] = sum_of(sum);
        }
      }
    }
  }
  // Writes the results of a block of rows and TILE_COLUMNS columns.
  void compute(int64_t block, int64_t number, const float* x, const float* bias, float* sums) const {
    const int64_t row = block * height_, rows = std::min(height_, call_.rows - row);
    const int64_t column = number * TILE_COLUMNS, columns = std::min<int64_t>(TILE_COLUMNS, call_.outputs - column);
    float *const packed = sums + height_ * TILE_COLUMNS, *const numbers_of_runs = packed + panel<TILE_COLUMNS>();
    auto* const codes_of_rows = (uint16_t*)(numbers_of_runs + numbers());
    if (!parts_) std::fill(sums, packed, 0.0f);
    if (columns < TILE_COLUMNS) std::fill(numbers_of_runs, numbers_of_runs + numbers(), 0.0f);
    for (int64_t part = 0; part < parts_; part++, x += floats_of_part()) {
      const int64_t count = terms(part);
      for (int64_t n = 0; n < columns; n++)
        format_.unpack(call_.weight, column + n, part * DEPTH, count, codes_of_rows + n * depth_, numbers_of_runs + n);
      Pairs::pack<TILE_COLUMNS>({codes_of_rows, BFLOAT16, depth_, true}, 0, columns, 0, count, packed);
      const float* of_tile = x;
      for (int64_t m = 0; m < rows; m += PAIR_ROWS, of_tile += floats_of_tile())
        format_.tile(of_tile, of_tile + panel<PAIR_ROWS>(), packed, numbers_of_runs, count / format_.run,
                     sums + m * TILE_COLUMNS, part > 0);
    }
    auto* y = (bfloat16*)call_.y + row * call_.outputs + column;
    for (int64_t m = 0; m < rows; m++, sums += TILE_COLUMNS, y += call_.outputs) {
      if (bias) add_to(sums, bias + column, columns);
      store_as(BFLOAT16, y, sums, columns);
    }
  }

 private:
  static constexpr int64_t DEPTH = PackedProducts::DEPTH, MOST_ROWS = 528, ROWS_OF_PIECE = 8 * PAIR_ROWS;

  int64_t terms(int64_t part) const { return std::min(DEPTH, call_.columns - part * DEPTH); }
  int64_t runs() const { return depth_ / format_.run; }
  template <int WIDTH>
  int64_t panel() const {
    return panel_floats<WIDTH>(depth_ / 2);
  }
  int64_t floats_of_tile() const { return panel<PAIR_ROWS>() + PAIR_ROWS * runs(); }
  int64_t floats_of_part() const { return height_ / PAIR_ROWS * floats_of_tile(); }
  int64_t numbers() const { return 2 * TILE_COLUMNS * runs(); }
  int64_t codes() const { return TILE_COLUMNS * depth_ / 2; }

  QuantizedForward call_;
  OfRuns format_;
  int64_t parts_, depth_, height_;
};

// True where sums of runs cannot overflow: no number is inf, NaN or 2^100 or more.
inline bool is_moderate(const uint16_t* x, int64_t count) {
  std::atomic<bool> found{false};
  run_blocks(divide_up(count, BLOCK), [=, &found](int64_t block) {
    const int64_t first = block * BLOCK, n = std::min(BLOCK, count - first);
    uint16_t most = 0;
    for (int64_t i = 0; i < n; i++) most = std::max<uint16_t>(most, x[first + i] & 0x7fff);
    if (most >= (127 + 100) << 7) found.store(true, std::memory_order_relaxed);
  });
  return !found.load();
}

Status forward_of_pairs(const QuantizedForward& call, const OfRuns& format) {
  constexpr int64_t MOST_PACKED = 1 << 21;  // floats of x that are packed at a time
  const OfPairs pairs(call, format);
  const FloatRow bias(call.bias, call.bias_dtype, call.bias ? call.outputs : 0, 0.0f, 0.0f);
  const int64_t of_rows = pairs.blocks_of_rows(), panels = pairs.panels(), floats = pairs.floats_of_x();
  const int64_t pieces = pairs.pieces();
  const int64_t at_once = std::max<int64_t>(1, std::min(of_rows, MOST_PACKED / std::max<int64_t>(1, floats)));
  const int64_t workers = workers_for(panels);
  const FloatBuffer x(at_once * floats);
  const Scratch scratch(workers, pairs.floats());
  if (bias.failed() || scratch.failed() || !x.data()) return OUT_OF_MEMORY;
  const OfPairs* of_call = &pairs;
  const Scratch* buffers = &scratch;
  float* const packed = x.data();
  const float* added = call.bias ? bias.data() : nullptr;
  for (int64_t first = 0; first < of_rows; first += at_once) {
    const int64_t count = std::min(at_once, of_rows - first);
    run_blocks(count * pieces,
               [=](int64_t at) { of_call->pack_x(first + at / pieces, at % pieces, packed + at / pieces * floats); });
    run_blocks(count * panels, workers, [=](int64_t at, int64_t worker) {
      of_call->compute(first + at / panels, at % panels, packed + at / panels * floats, added, buffers->of(worker));
    });
  }
  return OK;
}

#endif

}  // namespace
}  // namespace fusedops

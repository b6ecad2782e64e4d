// y = x @ W.T + bias for a packed weight W (outputs, columns), and the gradient of x.
//
// A sum over the columns is one vector of sums, weight after weight, for each part of DEPTH columns; the parts are
// added in order. Every function here sums so, and that of linear.cpp for many rows: the bits of a row of y do not
// depend on the other rows, nor on threads. Where they may depend on the number of rows, many are added in another
// order (linear.cpp, quantized_pairs.h), and so is one with codes of e4m3.
#include <algorithm>

#include "dot/packed_products.h"
#include "dot/quantized_pairs.h"
#include "rows.h"
#include "tile/four_sums.h"
#include "tile/scaled.h"

namespace fusedops {
namespace {

constexpr int64_t DEPTH = PackedProducts::DEPTH, OUTPUTS = PackedProducts::OUTPUTS, ROWS = PackedProducts::ROWS;
constexpr int64_t FUSED_ROWS = VECTOR_BYTES == 64 ? 8 : 4;  // rows of x whose sums stay in registers
// Rows of x for which a weight is unpacked for each FUSED_ROWS; for more it is unpacked once, to memory.
constexpr int64_t FEW_ROWS = VECTOR_BYTES >= 32 ? 2 * FUSED_ROWS : FUSED_ROWS;

// The least products of two numbers that a worker gets: 40 to 50 us of work with one row of x. Between two calls of a
// token the threads fall asleep, and to wake one takes longer than half of a smaller call: with 2 threads a token of
// SmolLM2-135M, which is 211 calls, waits 11 times in place of 171.
constexpr int64_t PRODUCTS = 1 << 19, PRODUCTS_AWAKE = 1 << 15;  // awake: with a team

inline int64_t workers_of(int64_t products, int64_t blocks) {
  return std::min(std::max<int64_t>(products / (has_team() ? PRODUCTS_AWAKE : PRODUCTS), 1), workers_for(blocks));
}

// Writes or adds the sums of the first `count` of N vectors for each row, to sums (rows, OUTPUTS). Not inlined: beside
// a loop that needs all registers, GCC 12 keeps vectors of the loop in memory.
template <int N>
NOINLINE void write_all_sums(const vfloat (*vectors)[N], int64_t rows, int64_t count, float* sums, bool adds) {
  for (int64_t m = 0; m < rows; m++, sums += OUTPUTS) {
    vfloat four[FOUR] = {};
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) four[n] = vectors[m][n];
    write_sums(four, sums, adds, count);
  }
}

// ---- Few rows: each weight is multiplied where it is unpacked ----

template <class T, int N>
struct OfRows {
  T each[N];
};
// f(0), f(1), ...
template <class F, int... I>
INLINE auto of_rows(F f, std::integer_sequence<int, I...>) {
  return OfRows<decltype(f(0)), sizeof...(I)>{{f(I)...}};
}

// The products of the first `rows` of M rows of x and the first `count` of N rows of the weight, to sums (M, OUTPUTS).
// The rows of the weight take turns: no sum waits for the one before.
template <class Format, int M, int N>
INLINE void products(const float* x, int64_t rows, int64_t columns, const PackedWeight& weight, int64_t output,
                     int64_t count, float* sums) {
  constexpr std::make_integer_sequence<int, N> turns;
  const float* row[M];  // of fewer than M rows, the last one several times
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) row[m] = x + std::min<int64_t>(m, rows - 1) * columns;
  for (int64_t first = 0; first < columns; first += DEPTH) {
    vfloat total[M][N] = {};
    const int64_t end = std::min(columns, first + DEPTH);
    typename Format::template Memory<N> memory;
    const typename Format::template Rows<N> from(weight, output, count == N, first, end - first, &memory);
    for (int64_t at = first, b = 0; at < end; b++) {
      // the next rows: at the end of a row the processor has hardly begun to read ahead by itself (up to 1.7 times)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) from.prefetch(n + N, b);
      const auto blocks = of_rows(
          [&](int n) __attribute__((always_inline)) { return typename Format::Block(from.block(n, b)); }, turns);
      for (int c = 0; c < Format::WEIGHTS / Format::CHUNK; c++, at += Format::CHUNK) {
        const auto chunks = of_rows(
            [&](int n) __attribute__((always_inline)) { return typename Format::Chunk(blocks.each[n], c); }, turns);
        if constexpr (M == 1 && VECTOR_BYTES < 64) {  // too few registers for what all rows of the weight need
#pragma GCC unroll 4
          for (int n = 0; n < N; n++)
#pragma GCC unroll 16
            for (int i = 0; i < Format::CHUNK; i += LANES) total[0][n] += chunks.each[n].at(i) * load(row[0] + at + i);
          continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i < Format::CHUNK; i += LANES) {
          vfloat w[N];
#pragma GCC unroll 4
          for (int n = 0; n < N; n++) w[n] = chunks.each[n].at(i);
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            const vfloat values = load(row[m] + at + i);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) total[m][n] += w[n] * values;
          }
        }
      }
    }
    vfloat vectors[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) vectors[m][n] = total[m][n];
    write_all_sums<N>(vectors, std::min<int64_t>(M, rows), count, sums, first > 0);
  }
}

#if VECTOR_BYTES == 64
// ---- One row, codes of e4m3: the products of the columns of one scale are added up, and multiplied by it once ----

// True where the largest number is neither so large nor so small that a sum without scales is not exact enough.
NOINLINE bool is_between(const float* x, int64_t columns) {
  vint most = {};
  each(columns, [&](int64_t i, auto lanes) {
    const vint size = bits_as<vint>(load(x + i, lanes)) & INT32_MAX;
    most = size > most ? size : most;
  });
  const __m512i least = _mm512_set1_epi32(bits_as<int32_t>(0x1p-40f));
  const __m512i end = _mm512_set1_epi32(bits_as<int32_t>(0x1p100f));
  return _mm512_cmpgt_epi32_mask((__m512i)most, least) && !_mm512_cmpge_epi32_mask((__m512i)most, end);
}

// The product of a row of x and `count` of FOUR rows of the weight. Its bits are not those of more rows. False where a
// weight, a code times its scale, may be no finite number: the sum is then that of such weights.
NOINLINE bool products_of_fp8(const float* x, int64_t columns, const PackedWeight& weight, int64_t output,
                              int64_t count, float* sums) {
  const uint8_t* codes[FOUR];
  for (int64_t n = 0; n < FOUR; n++) codes[n] = weight.codes + (output + std::min(n, count - 1)) * weight.row_bytes;
  const int64_t ahead = FOUR * weight.row_bytes;
  const bool alike = line_of(weight, output) == line_of(weight, output + count - 1);
  const int64_t step = std::min(weight.group, DEPTH);
  float scales[FOUR][DEPTH / 32 + LANES];
  vint large = {};
  vfloat total[FOUR] = {};
  for (int64_t first = 0; first < columns; first += step) {
    if (!first || (first % DEPTH == 0 && weight.group < columns))
      for (int64_t n = 0; n < (alike ? 1 : FOUR); n++) {
        const int64_t part = std::min(DEPTH, columns - first);
        scales_of_row<32>(weight, output + std::min(n, count - 1), first, part, Fp8Codes::FACTOR, scales[n], nullptr);
        each(part / 32, [&](int64_t i, auto lanes) { large |= ~(magnitude(load(scales[n] + i, lanes)) < 0x1p108f); });
      }
    const int64_t end = std::min(columns, first + step);
    vfloat part[FOUR] = {};
    for (int64_t at = first; at < end; at += 32) {
      if (at % 64 == 0)
#pragma GCC unroll 4
        for (int n = 0; n < FOUR; n++) __builtin_prefetch(codes[n] + ahead + at);
      const vfloat low = load(x + at), high = load(x + at + LANES);
#pragma GCC unroll 4
      for (int n = 0; n < FOUR; n++) {
        const float one = 1;
        const Fp8Codes::Chunk chunk(codes[n] + at, &one);
        part[n] += chunk.number(0) * low;
        part[n] += chunk.number(LANES) * high;
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < FOUR; n++) total[n] += part[n] * scales[alike ? 0 : n][first % DEPTH / 32];
  }
  for (int n = 0; n < FOUR; n++)
    if (Fp8Codes::may_have_nan(codes[n], columns / 32)) total[n] = all(bits_as<float>(uint32_t(0x7fc00000)));
  write_sums(total, sums, false, count);
  return !_mm512_test_epi32_mask((__m512i)large, (__m512i)large);
}
#endif

// ---- Many rows: a tile of M rows of x and N unpacked rows of the weight ----

template <int M, int N>
INLINE void add_tile(const float* x, int64_t columns, const float* weights, int64_t count, float* sums, bool adds) {
  vfloat total[M][N] = {};
  for (int64_t at = 0; at < count; at += LANES) {
    vfloat rows[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) rows[m] = load(x + m * columns + at);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const vfloat w = load(weights + n * DEPTH + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) total[m][n] += w * rows[m];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    vfloat four[FOUR] = {};
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) four[n] = total[m][n];
    write_sums(four, sums + m * OUTPUTS, adds, N);
  }
}

constexpr int HEIGHT = VECTOR_BYTES == 64 ? 6 : 3, TILE_OUTPUTS = FOUR;

// The tiles of M rows of x for some rows of the weight.
template <int M>
NOINLINE void add_tiles(const float* x, int64_t columns, const float* weights, int64_t outputs, int64_t count,
                        float* sums, bool adds) {
  int64_t n = 0;
  for (; n + TILE_OUTPUTS <= outputs; n += TILE_OUTPUTS)
    add_tile<M, TILE_OUTPUTS>(x, columns, weights + n * DEPTH, count, sums + n, adds);
  for (; n < outputs; n++) add_tile<M, 1>(x, columns, weights + n * DEPTH, count, sums + n, adds);
}

// Rows of x as float32, in the order of the codes.
template <Order ORDER>
class OrderedRows {
 public:
  OrderedRows(const void* x, int64_t dtype, int64_t count)
      : rows_(x, dtype, count, 0.0f, 0.0f), buffer_(SAME ? 0 : count) {
    if (SAME || failed()) return;
    const float* from = rows_.data();
    float* to = buffer_.data();
    const int64_t blocks = divide_up(count, BLOCK);
    run_blocks(blocks, workers_for(blocks), [=](int64_t block, int64_t) {
      const int64_t first = block * BLOCK;
      reorder<ORDER, false>(from + first, to + first, std::min<int64_t>(BLOCK, count - first));
    });
  }
  bool failed() const { return rows_.failed() || (!SAME && rows_.data() && !buffer_.data()); }
  const float* data() const { return SAME ? rows_.data() : buffer_.data(); }

 private:
  static constexpr bool SAME = ORDER == Order::PLAIN;
  static_assert(BLOCK % 32 == 0);
  FloatRow rows_;
  FloatBuffer buffer_;
};

template <class Format>
struct Product {
  const float* x;
  const PackedWeight& weight;
  const float* bias;  // null for none
  int64_t columns;

  // The sums of some rows of x and of the weight, (rows, OUTPUTS); `weights`: a buffer for an unpacked part.
  void sums_of(int64_t row, int64_t row_count, int64_t output, int64_t count, float* sums, float* weights) const {
    if (!columns) std::fill(sums, sums + row_count * OUTPUTS, 0.0f);
    const float* rows_of_x = x + row * columns;
    if (row_count <= FEW_ROWS) {
      for (int64_t m = 0; m < row_count; m += FUSED_ROWS)
        add_fused(rows_of_x + m * columns, std::min(FUSED_ROWS, row_count - m), output, count, sums + m * OUTPUTS);
      return;
    }
    for (int64_t first = 0; first < columns; first += DEPTH) {
      const int64_t depth = std::min(DEPTH, columns - first);
      for (int64_t n = 0; n < count; n++) unpack<Format>(weight, output + n, first, depth, weights + n * DEPTH);
      const float* part = rows_of_x + first;
      int64_t m = 0;
      for (; m + HEIGHT <= row_count; m += HEIGHT)
        add_tiles<HEIGHT>(part + m * columns, columns, weights, count, depth, sums + m * OUTPUTS, first > 0);
      for (; m + 2 <= row_count; m += 2)
        add_tiles<2>(part + m * columns, columns, weights, count, depth, sums + m * OUTPUTS, first > 0);
      if (m < row_count)
        add_tiles<1>(part + m * columns, columns, weights, count, depth, sums + m * OUTPUTS, first > 0);
    }
  }

  void add_fused(const float* some, int64_t row_count, int64_t output, int64_t count, float* sums) const {
    if (row_count == 1) return add_products<1, 4>(some, row_count, output, count, sums);
    if (row_count == 2) return add_products<2, 2>(some, row_count, output, count, sums);
    if (row_count <= 4) return add_products<4, 2>(some, row_count, output, count, sums);
    add_products<FUSED_ROWS, 2>(some, row_count, output, count, sums);
  }
  template <int M, int N>
  NOINLINE void add_products(const float* some, int64_t row_count, int64_t output, int64_t count, float* sums) const {
    for (int64_t n = 0, done; n < count; n += done) {
      done = n + N <= count ? N : 1;  // of fewer than N rows one at a time, which is read as each of N
      products<Format, M, N>(some, row_count, columns, weight, output + n, done, sums + n);
    }
  }
};

// PackedProducts::sums
template <class Format>
NOINLINE void sums_of(const PackedWeight& weight, const float* x, int64_t columns, int64_t rows, int64_t output,
                      int64_t count, float* sums, float* buffer) {
  Product<Format>{x, weight, nullptr, columns}.sums_of(0, rows, output, count, sums, buffer);
}

template <class Format>
Status forward(const QuantizedForward& call, bool in_order) {
  const int64_t rows = call.rows, columns = call.columns, outputs = call.outputs;
  if (columns % Format::WEIGHTS) return INVALID;
  const OrderedRows<Format::ORDER> x(call.x, call.dtype, rows * columns);
  const FloatRow bias(call.bias, call.bias_dtype, call.bias ? outputs : 0, 0.0f, 0.0f);
  if (takes_packed_weight(rows, outputs, columns)) {
    if (x.failed() || bias.failed()) return OUT_OF_MEMORY;
    const float* added = call.bias ? bias.data() : nullptr;
    return linear_of_packed(x.data(), call.weight, unpack<Format>, added, call.y, call.dtype, rows, outputs, columns,
                            in_order);
  }
  const int64_t panels = divide_up(outputs, OUTPUTS), parts = divide_up(rows, ROWS), blocks = panels * parts;
  const bool few = rows <= FEW_ROWS;
  const int64_t rows_of_block = std::min(rows, ROWS);
  const int64_t workers = workers_of(rows * columns * outputs, blocks);
  const int64_t sums_size = rows_of_block * OUTPUTS, size = sums_size + (few ? 0 : OUTPUTS * DEPTH);
  const Scratch scratch(workers, size);
  if (x.failed() || bias.failed() || scratch.failed()) return OUT_OF_MEMORY;
  const Product<Format> product{x.data(), call.weight, call.bias ? bias.data() : nullptr, columns};
#if VECTOR_BYTES == 64
  const bool alone = is_fp8<Format> && in_order && rows == 1 && columns && is_between(x.data(), columns);
#else
  const bool alone = false;
#endif
  uint8_t* y = (uint8_t*)call.y;
  const int64_t dtype = call.dtype, itemsize = dtype == FLOAT32 ? 4 : 2;
  const Scratch* buffers = &scratch;
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    const int64_t output = block / parts * OUTPUTS, count = std::min(OUTPUTS, outputs - output);
    const int64_t row = block % parts * ROWS, row_count = std::min(ROWS, rows - row);
    float* sums = buffers->of(worker);
    bool done = alone;
#if VECTOR_BYTES == 64
    for (int64_t n = 0; alone && n < count; n += FOUR)
      done &=
          products_of_fp8(product.x, columns, product.weight, output + n, std::min<int64_t>(FOUR, count - n), sums + n);
#endif
    if (!done) {
      sums_of<Format>(product.weight, product.x + row * columns, columns, row_count, output, count, sums,
                      sums + sums_size);
    }
    for (int64_t m = 0; m < row_count; m++) {
      float* mine = sums + m * OUTPUTS;
      if (product.bias)
        for (int64_t i = 0; i < count; i++) mine[i] += product.bias[output + i];
      store_as(dtype, y + ((row + m) * outputs + output) * itemsize, mine, count);
    }
  });
  return OK;
}

// ---- The gradient of x: the rows of the weight, each times its number of grad, are added in order ----

constexpr int64_t COLUMNS = PackedProducts::COLUMNS, GRADIENT_ROWS = PackedProducts::GRADIENT_ROWS;
constexpr int GRADIENT_TILE = VECTOR_BYTES == 64 ? 8 : 4;

// Adds count rows of the weight, each times its number in M rows of grad, to sums (M, COLUMNS): N vectors of columns.
template <int M, int N>
INLINE void add_outer(const float* grad, int64_t outputs, const float* weights, int64_t count, float* sums) {
  vfloat total[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) total[m][v] = load(sums + m * COLUMNS + v * LANES);
  for (int64_t n = 0; n < count; n++) {
    vfloat w[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) w[v] = load(weights + n * COLUMNS + v * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const float g = grad[m * outputs + n];
#pragma GCC unroll 4
      for (int v = 0; v < N; v++) total[m][v] += w[v] * g;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < N; v++) store(sums + m * COLUMNS + v * LANES, total[m][v]);
}

template <int M>
NOINLINE void add_outers(const float* grad, int64_t outputs, const float* weights, int64_t count, int64_t columns,
                         float* sums) {
  for (int64_t at = 0; at < columns; at += 2 * LANES) add_outer<M, 2>(grad, outputs, weights + at, count, sums + at);
}

// PackedProducts::gradient
template <class Format>
NOINLINE void gradient_of(const PackedWeight& weight, const float* grad, int64_t outputs, int64_t rows, int64_t first,
                          int64_t width, float* sums, float* buffer) {
  std::fill(sums, sums + rows * COLUMNS, 0.0f);
  for (int64_t output = 0; output < outputs; output += OUTPUTS) {
    const int64_t count = std::min(OUTPUTS, outputs - output);
    for (int64_t n = 0; n < count; n++) unpack<Format>(weight, output + n, first, width, buffer + n * COLUMNS);
    int64_t m = 0;
    for (; m + GRADIENT_TILE <= rows; m += GRADIENT_TILE)
      add_outers<GRADIENT_TILE>(grad + m * outputs + output, outputs, buffer, count, width, sums + m * COLUMNS);
    for (; m < rows; m++) add_outers<1>(grad + m * outputs + output, outputs, buffer, count, width, sums + m * COLUMNS);
  }
  if (Format::ORDER == Order::PLAIN) return;
  for (int64_t m = 0; m < rows; m++) reorder<Format::ORDER, true>(sums + m * COLUMNS, sums + m * COLUMNS, width);
}

template <class Format>
Status backward(const QuantizedBackward& call) {
  const int64_t rows = call.rows, columns = call.columns, outputs = call.outputs;
  if (columns % Format::WEIGHTS) return INVALID;
  const FloatRow grad(call.grad, call.dtype, rows * outputs, 0.0f, 0.0f);
  const int64_t panels = divide_up(columns, COLUMNS), parts = divide_up(rows, GRADIENT_ROWS), blocks = panels * parts;
  const int64_t workers = workers_of(rows * columns * outputs, blocks);
  const int64_t sums_size = std::min(rows, GRADIENT_ROWS) * COLUMNS;
  const Scratch scratch(workers, sums_size + OUTPUTS * COLUMNS);
  if (grad.failed() || scratch.failed()) return OUT_OF_MEMORY;
  const PackedWeight& weight = call.weight;
  const float* g = grad.data();
  uint8_t* dx = (uint8_t*)call.dx;
  const int64_t dtype = call.dtype, itemsize = dtype == FLOAT32 ? 4 : 2;
  const Scratch* buffers = &scratch;
  run_blocks(blocks, workers, [=, &weight](int64_t block, int64_t worker) {
    const int64_t first = block / parts * COLUMNS, width = std::min(COLUMNS, columns - first);
    const int64_t row = block % parts * GRADIENT_ROWS, row_count = std::min(GRADIENT_ROWS, rows - row);
    float *sums = buffers->of(worker), *weights = sums + sums_size;
    gradient_of<Format>(weight, g + row * outputs, outputs, row_count, first, width, sums, weights);
    for (int64_t m = 0; m < row_count; m++)
      store_as(dtype, dx + ((row + m) * columns + first) * itemsize, sums + m * COLUMNS, width);
  });
  return OK;
}

}  // namespace

PackedProducts packed_products(int64_t format) {
  return with_format(format, [](auto of) {
    using Format = decltype(of);
    constexpr bool plain = Format::ORDER == Order::PLAIN;
    return PackedProducts{Format::WEIGHTS, plain ? nullptr : reorder<Format::ORDER, false>, sums_of<Format>,
                          gradient_of<Format>};
  });
}
}  // namespace fusedops

using namespace fusedops;

static int quantized_of(const QuantizedForward* call, bool in_order) {
  if (call->rows < 0 || call->columns < 0 || call->outputs < 0) return INVALID;
  if (!call->rows || !call->outputs) return OK;
  if (!call->y || (call->columns && (!call->x || !call->weight.codes))) return INVALID;
#if VECTOR_BYTES == 64
  const bool takes_pairs = in_order && call->dtype == BFLOAT16 && call->weight.format < 8 && has_pairs();
  if (takes_pairs && call->rows >= MANY_OF_PAIRS && call->columns &&
      is_moderate((const uint16_t*)call->x, call->rows * call->columns))
    return with_block_format(call->weight.format, [=](auto format) {
      using Format = decltype(format);
      return call->columns % Format::WEIGHTS ? INVALID : forward_of_pairs(*call, of_runs<Format>());
    });
#endif
  return with_format(call->weight.format, [=](auto format) { return forward<decltype(format)>(*call, in_order); });
}

FUSEDOPS_EXPORT int fusedops_quantized_forward(const QuantizedForward* call) { return quantized_of(call, false); }
FUSEDOPS_EXPORT int fusedops_quantized_in_order(const QuantizedForward* call) { return quantized_of(call, true); }

FUSEDOPS_EXPORT int fusedops_quantized_backward(const QuantizedBackward* call) {
  if (call->rows < 0 || call->columns < 0 || call->outputs < 0) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->dx || (call->outputs && (!call->grad || !call->weight.codes))) return INVALID;
  return with_format(call->weight.format, [=](auto format) { return backward<decltype(format)>(*call); });
}

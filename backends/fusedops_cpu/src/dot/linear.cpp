// y = activation(x @ W.T + bias) in float32. No copy of the weight is kept from one call to the next.
//
// A sum has LANES sums for each part of DEPTH terms, each of every LANES-th term. They are added to the sum one by one.
// For few rows they are the lanes of a vector, and the weight is read where it lies; for many they follow one another.
// So the bits of a row depend neither on the other rows nor on threads.
#include "dot/activation.h"
#include "tile/products.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

namespace fusedops {
namespace {

constexpr int64_t DEPTH = 1024;  // terms of a part: with AT_ONCE rows of the weight and of x, what the L1 cache holds
constexpr int64_t ROWS = 256;    // of x of a block of work: a part of them stays in the L2 cache
constexpr int64_t MANY = 48;     // rows of x for which the weight is packed
constexpr int64_t COLUMNS = 128, LEAST_COLUMNS = 32;  // rows of the weight of a block of work
constexpr int64_t PRODUCTS = 1 << 20;                 // of a worker, at least: some 20 us
#if defined(__aarch64__)
constexpr int SUMS = 16;  // vectors of a tile
#else
constexpr int SUMS = VECTOR_BYTES == 64 ? 16 : 8;
#endif
constexpr int AT_ONCE = 4;  // rows of the weight of a tile, of 3 rows of x or more

// Writes the sums over the lanes of COUNT vectors, or adds them to what is there.
template <int COUNT>
INLINE void write_sums(const vfloat* vectors, float* to, bool adds) {
#pragma GCC unroll 4
  for (int at = 0; at < COUNT; at += LANES) {
    vfloat rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = at + i < COUNT ? vectors[at + i] : vfloat{};
    transpose(rows);
    const Part part{at + LANES <= COUNT ? LANES : COUNT % LANES};
    vfloat total = adds ? load(to + at, part) + rows[0] : rows[0];
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) total += rows[i];
    store(to + at, total, part);
  }
}

// The products of M rows of x and N rows of the weight, (M, N), to sums.
template <int M, int N>
NOINLINE void dots(const float* x, int64_t x_row, const float* weight, int64_t weight_row, int64_t terms, float* sums,
                   bool adds) {
  vfloat total[M * N] = {};
  auto add = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
    vfloat w[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) w[n] = load(weight + n * weight_row + k, lanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const vfloat row = load(x + m * x_row + k, lanes);
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) total[m * N + n] += row * w[n];
    }
  };
  int64_t k = 0;
  for (; k + LANES <= terms; k += LANES) add(k, Full{});
  if (k < terms) add(k, Part{int(terms - k)});
  write_sums<M * N>(total, sums, adds);
}

// ---- Many rows: the weight is packed, TILE_COLUMNS rows at a time, with the terms in the order of the lanes ----

constexpr int TALL = VECTOR_BYTES == 64 ? 6 : 3;  // rows of x of a tile

// The floats of the terms of one lane.
inline int64_t lane_floats(int64_t terms) { return divide_up(terms, LANES) * TILE_COLUMNS + LANES; }

// Packs a part of some rows of the weight. The lanes beyond the last row hold what nothing reads.
NOINLINE void pack_lanes(const float* weight, int64_t weight_row, int64_t rows, int64_t terms, float* to) {
  const int64_t lane = lane_floats(terms);
  for (int64_t first = 0; first < TILE_COLUMNS; first += LANES) {
    const float* row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = weight + std::min(first + i, rows - 1) * weight_row;
    float* step = to + first;
    auto pack = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
      vfloat values[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) values[i] = load(row[i] + k, lanes);
      transpose(values);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(step + i * lane, values[i]);
      step += TILE_COLUMNS;
    };
    int64_t k = 0;
    for (; k + LANES <= terms; k += LANES) pack(k, Full{});
    if (k < terms) pack(k, Part{int(terms - k)});
  }
}

// The products of M rows of x and what is packed, (M, TILE_COLUMNS), to sums, or added to what is there.
template <int M>
NOINLINE void dots_of_lanes(const float* x, int64_t x_row, const float* packed, int64_t terms, float* sums, bool adds) {
  vfloat total[M][2] = {};
  if (adds)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) total[m][half] = load(sums + m * TILE_COLUMNS + half * LANES);
  const float* rows[2] = {x, x + 3 * x_row};  // three rows for each: few registers
  for (int lane = 0; lane < LANES; lane++) {
    vfloat of_lane[M][2] = {};
    const float* column = packed + lane * lane_floats(terms);
    for (int64_t k = lane; k < terms; k += LANES, column += TILE_COLUMNS) {
      const vfloat left = load(column), right = load(column + LANES);
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        const float value = rows[m / 3][m % 3 * x_row + k];
        of_lane[m][0] += left * value;
        of_lane[m][1] += right * value;
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) total[m][0] += of_lane[m][0], total[m][1] += of_lane[m][1];
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) store(sums + m * TILE_COLUMNS + half * LANES, total[m][half]);
}

struct Linear {
  LinearForward call;
  ActivationPass activation;
  int64_t height, width = COLUMNS;  // of a block of work
  int64_t at_once;                  // columns whose sums are next to each other, (rows, at_once)

  explicit Linear(const LinearForward& call)
      : call(call), activation(PlainActivation{std::max<int64_t>(SILU, call.activation)}) {
    height = divide_up(call.rows, divide_up(call.rows, ROWS));  // equal ones
    at_once = height >= MANY ? TILE_COLUMNS : height > 2 ? AT_ONCE : SUMS / height;
    while (width > LEAST_COLUMNS && blocks() < std::min(most_workers(), 4 * workers_for(INT64_MAX))) width /= 2;
  }
  int64_t panels() const { return divide_up(call.columns, width); }
  int64_t blocks() const { return divide_up(call.rows, height) * panels(); }
  int64_t most_workers() const { return std::max<int64_t>(1, call.rows * call.columns * call.terms / PRODUCTS); }
  int64_t floats() const { return height * width + LANES * lane_floats(std::min(DEPTH, call.terms)); }

  // Writes the results of a block.
  void compute(int64_t block, float* sums) const {
    const int64_t row = block / panels() * height, column = block % panels() * width;
    const int64_t rows = std::min(height, call.rows - row), columns = std::min(width, call.columns - column);
    if (!call.terms) std::fill(sums, sums + height * width, 0.0f);
    for (int64_t term = 0; term < call.terms; term += DEPTH)
      for (int64_t n = 0; n < columns; n += at_once)
        add({call.x + row * call.terms + term, call.weight + (column + n) * call.weight_row + term, rows,
             std::min(at_once, columns - n), std::min(DEPTH, call.terms - term), sums + n * rows, term > 0},
            sums + height * width);
    for (int64_t m = 0; m < rows; m++) {
      float line[COLUMNS];
      for (int64_t n = 0; n < columns; n += at_once) {
        const int64_t count = std::min(at_once, columns - n);
        // those of a part of a group are (count, rows), unless they are packed
        const bool apart = count < at_once && at_once < TILE_COLUMNS;
        for (int64_t i = 0; i < count; i++) line[n + i] = sums[n * rows + (apart ? i * rows + m : m * at_once + i)];
      }
      finish(line, (row + m) * call.columns + column, column, columns);
    }
  }

 private:
  struct Group {
    const float *x, *weight;
    int64_t rows, columns, terms;
    float* sums;
    bool adds;
  };

  void add(const Group& group, float* packed) const {
    if (at_once == TILE_COLUMNS) return add_packed(group, packed);
    if (group.columns == at_once) {
      if (at_once == AT_ONCE) return add_rows<AT_ONCE>(group);
      return at_once == SUMS ? add_rows<SUMS>(group) : add_rows<SUMS / 2>(group);
    }
    Group one = group;
    for (int64_t n = 0; n < group.columns; n++, one.weight += call.weight_row, one.sums += group.rows) add_rows<1>(one);
  }

  template <int N>
  void add_rows(const Group& group) const {
    constexpr int MOST = SUMS / (N < AT_ONCE ? AT_ONCE : N);
    auto call_dots = [&](auto rows, int64_t m) __attribute__((always_inline)) {
      dots<rows, N>(group.x + m * call.terms, call.terms, group.weight, call.weight_row, group.terms,
                    group.sums + m * N, group.adds);
    };
    int64_t m = 0;
    for (; m + MOST <= group.rows; m += MOST) call_dots(std::integral_constant<int, MOST>{}, m);
    if constexpr (MOST > 2)
      for (; m + 2 <= group.rows; m += 2) call_dots(std::integral_constant<int, 2>{}, m);
    if (m < group.rows) call_dots(std::integral_constant<int, 1>{}, m);
  }

  void add_packed(const Group& group, float* packed) const {
    pack_lanes(group.weight, call.weight_row, group.columns, group.terms, packed);
    auto call_dots = [&](auto rows, int64_t m) __attribute__((always_inline)) {
      dots_of_lanes<rows>(group.x + m * call.terms, call.terms, packed, group.terms, group.sums + m * TILE_COLUMNS,
                          group.adds);
    };
    int64_t m = 0;
    for (; m + TALL <= group.rows; m += TALL) call_dots(std::integral_constant<int, TALL>{}, m);
    for (; m < group.rows; m++) call_dots(std::integral_constant<int, 1>{}, m);
  }

  void finish(float* line, int64_t at, int64_t column, int64_t columns) const {
    if (call.bias) add_to(line, call.bias + column, columns);
    if (call.activation < 0) {
      memcpy(call.y + at, line, columns * sizeof(float));
    } else {
      activation.forward(line, nullptr, call.y + at, columns);
    }
  }
};

Status forward(const LinearForward& call) {
  const Linear linear(call);
  const int64_t workers = std::min(linear.most_workers(), workers_for(linear.blocks()));
  const Scratch scratch(workers, linear.floats());
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  const Linear* of_call = &linear;
  run_blocks(linear.blocks(), workers,
             [=](int64_t block, int64_t worker) { of_call->compute(block, buffers->of(worker)); });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int64_t fusedops_is_amd() {
#if defined(__x86_64__) || defined(_M_X64)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541;  // "Auth", of AuthenticAMD
#else
  return 0;
#endif
}

FUSEDOPS_EXPORT int fusedops_linear_forward(const LinearForward* call) {
  if (call->rows < 0 || call->columns < 0 || call->terms < 0) return INVALID;
  if (call->activation >= 0 && (call->activation < SILU || call->activation > SQUARED_RELU)) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->y || (call->terms && (!call->x || !call->weight))) return INVALID;
  use_huge_pages(call->y, call->rows * call->columns, FLOAT32);
  return forward(*call);
}

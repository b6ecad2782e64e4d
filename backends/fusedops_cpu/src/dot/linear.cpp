// y = activation(x @ W.T + bias) in float32. No copy of the weight is kept from one call to the next.
//
// A sum has LANES sums for each part of its terms, each of every LANES-th term. Four of them at a time are added one by
// one, and what that gives to the sum before. For few rows of x they are the lanes of a vector, and the weight is read
// where it lies; for many they follow one another. So the bits of a row depend neither on other rows nor on threads.
// Where they may depend on the number of rows, the terms of a part are added in their order for many rows: 0.92 of the
// time.
#include "dot/activation.h"
#include "dot/packed_products.h"
#include "processor.h"
#include "rows.h"
#include "tile/four_sums.h"
#include "tile/products.h"

namespace fusedops {
namespace {

// terms of a part, at most: with AT_ONCE rows of the weight and TALL of x, what an L1 cache of 32 KiB holds
constexpr int64_t DEPTH = 768;
// rows of x of a block of work, that are packed and that are not: a part of them stays in the L2 cache
constexpr int64_t ROWS = 256, ROWS_AS_THEY_LIE = VECTOR_BYTES == 32 ? 72 : ROWS;
// rows of x for which both are packed: of several parts, and of one (with AVX2, packing them gains nothing); and for
// which a packed weight is unpacked
constexpr int64_t MANY = VECTOR_BYTES == 32 ? 96 : 48;
constexpr int64_t MANY_OF_ONE_PART = VECTOR_BYTES == 32 ? INT64_MAX : VECTOR_BYTES == 64 ? 256 : MANY;
constexpr int64_t MANY_UNPACKED = 48, MANY_UNPACKED_OF_ONE_PART = VECTOR_BYTES == 64 ? 256 : MANY_UNPACKED;
// Rows of x for which terms are added in order, of several parts and of one; of a block of work; and of what one worker
// packs at a time.
constexpr int64_t MANY_IN_ORDER = 96, MANY_IN_ORDER_OF_ONE_PART = 256;
constexpr int64_t ROWS_IN_ORDER = 22 * TILE_ROWS, ROWS_OF_PIECE = 4 * TILE_ROWS;
constexpr int64_t MOST_PACKED = 1 << 20;              // floats of x that are packed at a time
constexpr int64_t COLUMNS = 128, LEAST_COLUMNS = 32;  // rows of the weight of a block of work
constexpr int64_t PRODUCTS = 1 << 20;                 // of a worker, at least: some 20 us
constexpr int AT_ONCE = 4;                            // rows of the weight of a tile; of one or two rows of x, more
#if defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32, not 16
#else
constexpr bool MANY_REGISTERS = VECTOR_BYTES == 64;
#endif
constexpr int TALL = MANY_REGISTERS ? 6 : 3;  // rows of x of a tile, at most
// Rows of the weight of a tile of one or two rows of x. 16 rows that are a multiple of 4 KiB apart do not fit into the
// ways of an L1 cache, and with AVX2 a line is read twice.
constexpr int OF_ONE_ROW = MANY_REGISTERS ? 16 : 8, OF_TWO_ROWS = MANY_REGISTERS ? 8 : AT_ONCE;

// Some rows of x and of the weight, and where their products go, or what they are added to.
struct DotRows {
  const float *x, *weight;
  int64_t x_row, weight_row, rows, terms;
  float* sums;
  int64_t sums_row;
  bool adds;
};

// The products of M rows of x, from row m on, and N of the weight. It asks for the same terms of ASKS rows at `ahead`.
template <int M, int N, int ASKS>
NOINLINE void dots(const DotRows& group, int64_t m, const float* ahead) {
  const int64_t x_row = group.x_row, weight_row = group.weight_row;
  const float *x = group.x + m * x_row, *weight = group.weight;
  vfloat total[M * N] = {};
  auto add = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
    vfloat rows[M];
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
      rows[i] = load(x + i * x_row + k, lanes);
      if (M > 1) keep_in_register(rows[i]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < ASKS; n++) __builtin_prefetch(ahead + n * weight_row + k, 0, 2);
#pragma GCC unroll 16
    for (int n = 0; n < N; n++) {
      vfloat w = load(weight + n * weight_row + k, lanes);
      if (M > 1) keep_in_register(w);
#pragma GCC unroll 6
      for (int i = 0; i < M; i++) total[i * N + n] += rows[i] * w;
    }
  };
  int64_t k = 0;
  for (; k + LANES <= group.terms; k += LANES) add(k, Full{});
  if (k < group.terms) add(k, Part{int(group.terms - k)});
  float* sums = group.sums + m * group.sums_row;
#pragma GCC unroll 6
  for (int i = 0; i < M; i++, sums += group.sums_row)
#pragma GCC unroll 4
    for (int n = 0; n < N; n += FOUR) write_sums(total + i * N + n, sums + n, group.adds);
}

template <int N, int MOST>
INLINE void dots_of(int64_t rows, const DotRows& group, int64_t m, int64_t asks, const float* ahead) {
  if constexpr (MOST > 1)
    if (rows < MOST) return dots_of<N, MOST - 1>(rows, group, m, asks, ahead);
  if constexpr (N == AT_ONCE) {
    if (asks == 4) return dots<MOST, N, 4>(group, m, ahead);
    if (asks == 1) return dots<MOST, N, 1>(group, m, ahead);
  }
  dots<MOST, N, 0>(group, m, ahead);
}

// The products of all rows of x and N of the weight, in tiles of equal heights. The first tiles ask for the rows of the
// weight after these.
template <int N>
void dots_of_rows(const DotRows& group) {
  constexpr int MOST = N == OF_ONE_ROW ? 1 : N == AT_ONCE ? TALL : 2;
  const int64_t tiles = divide_up(group.rows, MOST);
  int64_t asks = tiles > 3 ? 1 : 4;  // one after another: a weight in memory 0.92 to 0.96 of the time
  const float* ahead = group.weight + N * group.weight_row;
  for (int64_t tile = 0; tile < tiles; tile++, ahead += asks * group.weight_row) {
    if (tile * asks == 4) asks = 0;
    const int64_t m = tile * group.rows / tiles;
    dots_of<N, MOST>((tile + 1) * group.rows / tiles - m, group, m, asks, ahead);
  }
}

// ---- Many rows: both are packed, with the terms in the order of the lanes ----

// The steps of a lane, and the floats from one lane of some packed rows to the next.
inline int64_t steps_of(int64_t terms) { return divide_up(terms, LANES); }
template <int WIDTH>
inline int64_t lane_floats(int64_t rows, int64_t terms) {
  return round_up(rows, WIDTH) * steps_of(terms) + LANES;
}

// Packs a part of some rows, WIDTH at a time. Terms beyond the last are 0; rows beyond it hold what nothing reads.
// A vector may reach beyond WIDTH: what it writes there is written again by the next one, or lies between two lanes.
template <int WIDTH>
NOINLINE void pack_lanes(const float* from, int64_t row, int64_t rows, int64_t terms, float* to) {
  const int64_t lane = lane_floats<WIDTH>(rows, terms);
  for (int64_t start = 0; start < rows; start += WIDTH, to += WIDTH * steps_of(terms))
    for (int64_t first = 0; first < WIDTH; first += LANES) {
      const float* of_rows[LANES];
      for (int i = 0; i < LANES; i++) of_rows[i] = from + std::min(start + first + i, rows - 1) * row;
      float* step = to + first;
      auto pack = [&](int64_t k, auto lanes) __attribute__((always_inline)) {
        vfloat values[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) values[i] = load(of_rows[i] + k, lanes);
        transpose(values);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) store(step + i * lane, values[i]);
        step += WIDTH;
      };
      int64_t k = 0;
      for (; k + LANES <= terms; k += LANES) pack(k, Full{});
      if (k < terms) pack(k, Part{int(terms - k)});
    }
}

struct Linear {
  LinearForward call;
  ActivationPass activation;
  int64_t height, width;                        // of a block of work
  int64_t parts, depth = 0;                     // of the terms, and how many each has
  const PackedWeight* packed_weight = nullptr;  // in place of call.weight: with its function, and the dtype of y
  Unpack unpack = nullptr;
  int64_t dtype = FLOAT32;
  bool in_order;  // of the terms

  explicit Linear(const LinearForward& call, bool in_order)
      : call(call), activation(PlainActivation{std::max<int64_t>(SILU, call.activation)}), in_order(in_order) {
    parts = divide_up(call.terms, DEPTH);
    if (parts) depth = round_up(divide_up(call.terms, parts), LANES);
    set_block(in_order ? ROWS_IN_ORDER : ROWS);
    if (!packs()) set_block(ROWS_AS_THEY_LIE);
  }
  Linear(const LinearForward& call, const PackedWeight& weight, Unpack unpack, int64_t dtype, bool in_order)
      : Linear(call, in_order) {
    packed_weight = &weight, this->unpack = unpack, this->dtype = dtype;
    set_block(in_order ? ROWS_IN_ORDER : ROWS);
    parts = divide_up(call.terms, PackedProducts::DEPTH), depth = std::min(call.terms, PackedProducts::DEPTH);
  }
  void set_block(int64_t most_rows) {
    height = divide_up(call.rows, divide_up(call.rows, most_rows));  // equal ones
    if (in_order) height = round_up(height, TILE_ROWS);
    const int64_t workers = std::min(most_workers(), workers_for(INT64_MAX));
    const auto most_columns = [&](int64_t each) { return divide_up(blocks_of(each), workers) * each; };  // of a worker
    width = COLUMNS;
    while (width > LEAST_COLUMNS &&
           (blocks() < std::min(most_workers(), 4 * workers) || most_columns(width / 2) < most_columns(width)))
      width /= 2;
  }
  int64_t panels() const { return divide_up(call.columns, width); }
  int64_t blocks() const { return blocks_of(width); }
  int64_t blocks_of(int64_t of_width) const { return divide_up(call.rows, height) * divide_up(call.columns, of_width); }
  int64_t most_workers() const { return std::max<int64_t>(1, call.rows * call.columns * call.terms / PRODUCTS); }
  bool packs() const { return unpack || in_order || height >= (parts > 1 ? MANY : MANY_OF_ONE_PART); }
  // Of a worker: its sums, those of four lanes, and some rows of the weight.
  int64_t floats() const {
    if (!packs()) return height * width + AT_ONCE * depth;
    const int64_t unpacked = unpack ? TILE_COLUMNS * depth : 0;
    if (in_order) return padded_rows() * width + panel_floats<TILE_COLUMNS>(depth) + unpacked;
    return padded_rows() * (width + TILE_COLUMNS) + LANES * lane_floats<TILE_COLUMNS>(1, depth) + unpacked;
  }
  // Of a block of rows of x that are packed.
  int64_t floats_of_x() const { return packs() ? parts * floats_of_part() : 0; }

  int64_t pieces() const { return parts * pieces_of_part(); }
  void pack_x(int64_t block, int64_t number, float* to) const {
    const int64_t part = number / pieces_of_part(), first = number % pieces_of_part() * ROWS_OF_PIECE;
    const int64_t row = block * height, rows = std::min(height, call.rows - row) - first;
    const int64_t term = part * depth, terms = terms_from(term);
    to += part * floats_of_part();
    if (!in_order) return pack_lanes<TILE_ROWS>(call.x + row * call.terms + term, call.terms, rows, terms, to);
    const Operand x{call.x, FLOAT32, call.terms, true};
    to += first / TILE_ROWS * panel_floats<TILE_ROWS>(terms);
    pack<TILE_ROWS>(x, row + first, std::min(rows, ROWS_OF_PIECE), term, terms, to);
  }
  // Writes the results of a block.
  void compute(int64_t block, const float* packed_x, float* sums) const {
    const int64_t row = block / panels() * height, column = block % panels() * width;
    const int64_t rows = std::min(height, call.rows - row), columns = std::min(width, call.columns - column);
    if (!parts) std::fill(sums, sums + height * width, 0.0f);
    for (int64_t part = 0; part < parts; part++) {
      if (in_order) {
        add_in_order(packed_x + part * floats_of_part(), row, rows, column, columns, part * depth, sums);
      } else if (packs()) {
        add_packed(packed_x + part * floats_of_part(), rows, column, columns, part * depth, sums);
      } else {
        add(row, rows, column, columns, part * depth, sums);
      }
    }
    const int64_t written = writes_to_y(columns) ? rows / TILE_ROWS * TILE_ROWS : 0;
    for (int64_t m = written; m < rows; m++)
      finish(sums + m * width, (row + m) * call.columns + column, column, columns);
  }

 private:
  int64_t pieces_of_part() const { return in_order ? divide_up(height, ROWS_OF_PIECE) : 1; }
  int64_t padded_rows() const { return round_up(height, TILE_ROWS); }
  int64_t floats_of_part() const {
    return in_order ? height / TILE_ROWS * panel_floats<TILE_ROWS>(depth)
                    : LANES * lane_floats<TILE_ROWS>(height, depth);
  }
  // True where the whole tiles of a block of whole panels are written to y as they are.
  bool writes_to_y(int64_t columns) const {
    return in_order && columns % TILE_COLUMNS == 0 && call.activation < 0 && dtype == FLOAT32;
  }
  int64_t terms_from(int64_t term) const { return std::min(depth, call.terms - term); }

  // Computes the products of a part of the terms, or adds them.
  void add(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t term, float* sums) const {
    const int64_t terms = terms_from(term);
    DotRows group{
        call.x + row * call.terms + term, nullptr, call.terms, call.weight_row, rows, terms, sums, width, term > 0};
    int64_t n = 0;
    auto add_columns = [&](auto count) __attribute__((always_inline)) {
      for (; n + count <= columns; n += count) {
        group.weight = call.weight + (column + n) * call.weight_row + term;
        group.sums = sums + n;
        dots_of_rows<count>(group);
      }
    };
    if (rows == 1) add_columns(std::integral_constant<int, OF_ONE_ROW>{});
    if (rows == 2) add_columns(std::integral_constant<int, OF_TWO_ROWS>{});
    add_columns(std::integral_constant<int, AT_ONCE>{});
    if (n == columns) return;
    float* last = sums + height * width;  // a copy of the last rows, as many as a tile has
    for (int64_t i = 0; i < AT_ONCE; i++) {
      const float* from = call.weight + (column + std::min(n + i, columns - 1)) * call.weight_row + term;
      memcpy(last + i * depth, from, terms * sizeof(float));
    }
    group.weight = last, group.weight_row = depth, group.sums = sums + n;
    dots_of_rows<AT_ONCE>(group);
  }

  void add_packed(const float* x, int64_t rows, int64_t column, int64_t columns, int64_t term, float* sums) const {
    const int64_t terms = terms_from(term), steps = steps_of(terms), tiles = divide_up(rows, TILE_ROWS);
    const int64_t x_lane = lane_floats<TILE_ROWS>(rows, terms), w_lane = lane_floats<TILE_COLUMNS>(1, terms);
    float *fours = sums + padded_rows() * width, *packed = fours + padded_rows() * TILE_COLUMNS;
    float* const unpacked = packed + LANES * lane_floats<TILE_COLUMNS>(1, depth);
    for (int64_t n = 0; n < columns; n += TILE_COLUMNS) {
      const int64_t count = std::min<int64_t>(TILE_COLUMNS, columns - n);
      Ahead ahead{(const char*)unpacked};
      if (unpack) {
        for (int64_t i = 0; i < count; i++) unpack(*packed_weight, column + n + i, term, terms, unpacked + i * depth);
        pack_lanes<TILE_COLUMNS>(unpacked, depth, count, terms, packed);
      } else {
        const float* from = call.weight + (column + n) * call.weight_row;
        pack_lanes<TILE_COLUMNS>(from + term, call.weight_row, count, terms, packed);
        ahead = ahead_of(from + TILE_COLUMNS * call.weight_row, TILE_COLUMNS * sizeof(float), term, terms,
                         LANES * tiles, steps);
      }
      for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t m = tile * TILE_ROWS;
          float *to = sums + m * width + n, *four = fours + m * TILE_COLUMNS;
          Target target{lane % FOUR ? four : nullptr, TILE_COLUMNS, four, TILE_COLUMNS, false};
          if (lane % FOUR == FOUR - 1) target = {four, TILE_COLUMNS, to, width, term > 0 || lane >= FOUR};
          tile_of(rows - m, x + lane * x_lane + m * steps, packed + lane * w_lane, steps, target, ahead);
          ahead.next += ahead.bytes * steps;
        }
    }
  }

  void add_in_order(const float* x, int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t term,
                    float* sums) const {
    const int64_t terms = terms_from(term), tiles = divide_up(rows, TILE_ROWS);
    const bool is_last = writes_to_y(columns) && term + terms == call.terms;
    float *packed = sums + padded_rows() * width, *const unpacked = packed + panel_floats<TILE_COLUMNS>(depth);
    for (int64_t n = 0; n < columns; n += TILE_COLUMNS) {
      const int64_t first = column + n, count = std::min<int64_t>(TILE_COLUMNS, columns - n);
      Ahead ahead{(const char*)unpacked};
      if (unpack) {
        for (int64_t i = 0; i < count; i++) unpack(*packed_weight, first + i, term, terms, unpacked + i * depth);
        pack<TILE_COLUMNS>({unpacked, FLOAT32, depth, true}, 0, count, 0, terms, packed);
      } else {
        const Operand weight{call.weight, FLOAT32, call.weight_row, true};
        pack<TILE_COLUMNS>(weight, first, count, term, terms, packed);
        ahead = ahead_of(weight.row(first + TILE_COLUMNS, 0), TILE_COLUMNS * sizeof(float), term, terms, tiles, terms);
      }
      float bias[TILE_COLUMNS] = {};
      if (call.bias) std::copy_n(call.bias + first, count, bias);
      for (int64_t m = 0; m < rows; m += TILE_ROWS) {
        float* const to = sums + m * width + n;
        Target target{term ? to : bias, term ? width : 0, to, width, false};
        if (is_last && rows - m >= TILE_ROWS)
          target.to = call.y + (row + m) * call.columns + first, target.row = call.columns;
        tile_of(rows - m, x + m / TILE_ROWS * panel_floats<TILE_ROWS>(terms), packed, terms, target, ahead);
        ahead.next += ahead.bytes * terms;
      }
    }
  }

  void finish(float* line, int64_t at, int64_t column, int64_t columns) const {
    if (call.bias && !in_order) add_to(line, call.bias + column, columns);
    if (call.activation < 0) {
      store_as(dtype, (uint8_t*)call.y + at * size_of(dtype), line, columns);
    } else {
      activation.forward(line, nullptr, call.y + at, columns);
    }
  }
};

Status forward(const Linear& linear) {
  const int64_t panels = linear.panels(), of_rows = linear.blocks() / panels, pieces = linear.pieces();
  const int64_t workers = std::min(linear.most_workers(), workers_for(linear.blocks()));
  const int64_t floats = linear.floats_of_x();
  const int64_t at_once = floats ? std::max<int64_t>(1, std::min(of_rows, MOST_PACKED / floats)) : of_rows;
  const Scratch scratch(workers, linear.floats());
  const FloatBuffer x(at_once * floats);
  if (scratch.failed() || (floats && !x.data())) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  const Linear* of_call = &linear;
  float* const packed = x.data();
  for (int64_t first = 0; first < of_rows; first += at_once) {
    const int64_t count = std::min(at_once, of_rows - first);
    if (packed)
      run_blocks(count * pieces, std::min(workers, count * pieces), [=](int64_t at, int64_t) {
        of_call->pack_x(first + at / pieces, at % pieces, packed + at / pieces * floats);
      });
    run_blocks(count * panels, std::min(workers, count * panels), [=](int64_t at, int64_t worker) {
      of_call->compute(first * panels + at, packed + at / panels * floats, buffers->of(worker));
    });
  }
  return OK;
}

}  // namespace

bool takes_packed_weight(int64_t rows, int64_t columns, int64_t terms) {
  return terms && rows >= (terms > PackedProducts::DEPTH ? MANY_UNPACKED : MANY_UNPACKED_OF_ONE_PART) &&
         columns >= TILE_COLUMNS;
}
Status linear_of_packed(const float* x, const PackedWeight& weight, Unpack unpack, const float* bias, void* y,
                        int64_t dtype, int64_t rows, int64_t columns, int64_t terms, bool in_order) {
  return forward(Linear({x, nullptr, bias, (float*)y, rows, columns, terms, 0, -1}, weight, unpack, dtype, in_order));
}
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int64_t fusedops_is_amd() { return is_amd(); }

static int linear_of(const LinearForward* call, bool in_order) {
  if (call->rows < 0 || call->columns < 0 || call->terms < 0) return INVALID;
  if (call->activation >= 0 && (call->activation < SILU || call->activation > SQUARED_RELU)) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->y || (call->terms && (!call->x || !call->weight))) return INVALID;
  use_huge_pages(call->y, call->rows * call->columns, FLOAT32);
  const int64_t many = call->terms > DEPTH ? MANY_IN_ORDER : MANY_IN_ORDER_OF_ONE_PART;
  return forward(Linear(*call, in_order && call->terms && call->rows >= many));
}

FUSEDOPS_EXPORT int fusedops_linear_forward(const LinearForward* call) { return linear_of(call, false); }
FUSEDOPS_EXPORT int fusedops_linear_in_order(const LinearForward* call) { return linear_of(call, true); }

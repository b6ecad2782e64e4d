// What forward and backward of experts share: the routed rows by expert, the work on them, the activations.
//
// A routed row is one choice of a token. A choice outside [0, experts) is a sentinel: its row counts for nothing.
#pragma once

#include "dot/activation.h"
#include "dot/packed_products.h"
#include "once.h"
#include "rows.h"
#include "tile/block.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 264;     // rows of one expert in a block of work: whole tiles
constexpr int64_t COLUMNS = 512;  // columns of a product in a block of work
static_assert(COLUMNS <= ActivationPass::CHUNK);
constexpr int64_t PANEL = 1 << 22;  // numbers between the products of a panel, at most, unless one expert has more
constexpr int64_t FEW_ROWS = 48;    // so few rows of each expert have narrower blocks, so that each thread has some
constexpr int64_t FEW_COLUMNS = 64;

// The kind of products with packed weights, and such a weight of one expert, of (outputs, columns).
struct Packed {
  using Number = float;
  static constexpr int64_t DTYPE = FLOAT32;
};
struct PackedOperand {
  const PackedProducts* products;
  PackedWeight weight;
  int64_t outputs, columns;
  bool of_inputs;  // as it multiplies inputs, else gradients of outputs
};
struct PackedColumns {
  const PackedOperand* operand;
  int64_t first, count;
};

// As of other kinds; the rows are float32 and follow each other, and inputs are in the order of the codes.
template <>
class Block<Packed> {
 public:
  Block(int64_t rows, int64_t) : most_(rows) {}
  int64_t floats(int64_t columns) const { return most_ * (columns + PackedProducts::COLUMNS) + PackedProducts::BUFFER; }
  int64_t compute(const Operand& a, int64_t first, int64_t rows, const PackedColumns* parts, int64_t count,
                  float* buffer) const {
    int64_t width = 0;
    for (int64_t p = 0; p < count; p++) width += round_up(parts[p].count, TILE_COLUMNS);
    float *sums = buffer + most_ * width, *weights = sums + most_ * PackedProducts::COLUMNS, *c = buffer;
    const float* x = (const float*)a.row(first, 0);
    for (int64_t p = 0; p < count; c += round_up(parts[p].count, TILE_COLUMNS), p++) {
      const PackedOperand& of = *parts[p].operand;
      const int64_t step = of.of_inputs ? PackedProducts::OUTPUTS : PackedProducts::COLUMNS;
      for (int64_t at = 0; at < parts[p].count; at += step) {
        const int64_t from = parts[p].first + at, n = std::min(step, parts[p].count - at);
        if (of.of_inputs) {
          of.products->sums(of.weight, x, of.columns, rows, from, n, sums, weights);
        } else {
          of.products->gradient(of.weight, x, of.outputs, rows, from, n, sums, weights);
        }
        for (int64_t m = 0; m < rows; m++) memcpy(c + m * width + at, sums + m * step, n * sizeof(float));
      }
    }
    return width;
  }

 private:
  int64_t most_;
};

struct Piece {
  int64_t expert, first, count;  // rows in the order by expert
};

// Some experts with all their rows.
struct Panel {
  const Piece* pieces;
  int64_t count, first, rows, most;  // most: the rows of the largest piece
};

template <class Call>
int64_t expert_of(const Call& call, int64_t row) {
  const int64_t e =
      call.index_bytes == 8 ? read_once((const int64_t*)call.index + row) : read_once((const int32_t*)call.index + row);
  return e >= 0 && e < call.experts ? e : call.experts;
}

// The routed rows in the order by expert; of one expert, in their own order. Sentinels come last.
template <class Call>
class Route {
 public:
  explicit Route(const Call& call, int64_t rows_of_piece = ROWS)
      : call_(call),
        rows_of_piece_(rows_of_piece),
        all_(call.tokens * call.choices),
        rows_(3 * all_ + call.experts + 2),
        factors_(all_),
        pieces_(call.experts + all_ / rows_of_piece + 1) {
    if (failed()) return;
    order = rows_.data(), token = order + all_, expert = token + all_, begins = expert + all_;
    factor = factors_.data();
    std::fill(begins, begins + call.experts + 2, 0);
    for (int64_t row = 0; row < all_; row++) begins[(expert[row] = expert_of(call, row)) + 1]++;
    for (int64_t e = 0; e <= call.experts; e++) begins[e + 1] += begins[e];
    for (int64_t row = 0; row < all_; row++) order[begins[expert[row]]++] = row;
    for (int64_t e = call.experts; e > 0; e--) begins[e] = begins[e - 1];
    begins[0] = 0;
    for (int64_t i = 0; i < all_; i++) token[i] = order[i] / call.choices;
    with_dtype(call.weights_dtype, [&](auto element) {
      auto* weights = (const decltype(element)*)call.weights;
      for (int64_t i = 0; i < all_; i++) factor[i] = load(weights + order[i], Part{1})[0];
    });
  }
  bool failed() const { return !rows_.data() || (all_ && !factors_.data()) || !pieces_.data(); }
  int64_t rows() const { return begins[call_.experts]; }

  // Calls f(panel) for the panels, until it returns an error. `width`: the numbers of a row between the products.
  template <class F>
  Status each_panel(int64_t width, F f) const {
    const int64_t most = std::max(rows_of_piece_, PANEL / std::max<int64_t>(1, width));
    Panel panel{pieces_.data(), 0, 0, 0, 0};
    for (int64_t e = 0; e < call_.experts; e++) {
      const int64_t first = begins[e], count = begins[e + 1] - first;
      if (panel.rows && panel.rows + count > most) {
        if (const Status status = f(panel)) return status;
        panel = {pieces_.data(), 0, first, 0, 0};
      }
      for (int64_t at = 0; at < count; at += rows_of_piece_) {
        const Piece piece{e, first + at, std::min(rows_of_piece_, count - at)};
        pieces_.data()[panel.count++] = piece;
        panel.most = std::max(panel.most, piece.count);
      }
      panel.rows += count;
    }
    return panel.rows ? f(panel) : OK;
  }

  // token: by the order; expert: of each row, sentinels have the number of experts; begins: of the rows of each expert,
  // and of the sentinels
  int64_t *order, *token, *expert, *begins;
  float* factor;  // the weight of each row

 private:
  const Call& call_;
  int64_t rows_of_piece_, all_;
  Buffer<int64_t> rows_;
  FloatBuffer factors_;
  Buffer<Piece> pieces_;
};

// The columns of an up-projection, 2 * inner or inner.
template <class Call>
int64_t width_of_up(const Call& call) {
  return is_gated(call) ? 2 * call.inner : call.inner;
}

// The weight of an expert, (outputs, inputs), or transposed: as it multiplies inputs, and as it multiplies gradients of
// outputs.
template <class Call>
Operand weight_of(const Call& call, const void* weight, int64_t dtype, int64_t expert, int64_t outputs, int64_t inputs,
                  bool of_inputs) {
  const void* data = (const uint8_t*)weight + expert * outputs * inputs * size_of(dtype);
  const bool transposed = call.transposed;
  return {data, dtype, transposed ? outputs : inputs, transposed != of_inputs};
}

// The weights of all experts, each as an operand of products: as it multiplies inputs, or gradients of outputs.
struct OperandWeights {
  const PackedWeight *packed_up = nullptr, *packed_down = nullptr;  // of MXFP4, in products of pairs
  const uint16_t* order_of_up() const { return packed_up ? order_of_terms(*packed_up) : nullptr; }
  const uint16_t* order_of_down() const { return packed_down ? order_of_terms(*packed_down) : nullptr; }
  using Columns = fusedops::Columns;
  static constexpr int64_t PIECE = ROWS, GRADIENT_PIECE = ROWS, GRADIENT_COLUMNS = FEW_COLUMNS;
  template <class Call>
  Operand up(const Call& call, int64_t expert, bool of_inputs) const {
    if (packed_up) return operand_of_codes(*packed_up, expert * width_of_up(call));
    return weight_of(call, call.up, call.up_dtype, expert, width_of_up(call), call.width, of_inputs);
  }
  template <class Call>
  Operand down(const Call& call, int64_t expert, bool of_inputs) const {
    if (packed_down) return operand_of_codes(*packed_down, expert * call.width);
    return weight_of(call, call.down, call.down_dtype, expert, call.width, call.inner, of_inputs);
  }
};
class PackedWeights {
 public:
  using Columns = PackedColumns;
  static constexpr int64_t PIECE = PackedProducts::ROWS, GRADIENT_PIECE = PackedProducts::GRADIENT_ROWS;
  static constexpr int64_t GRADIENT_COLUMNS = PackedProducts::COLUMNS;  // so that blocks begin at those of the format
  PackedWeights(const PackedWeight& up, const PackedWeight& down)
      : up_(up), down_(down), of_up_(packed_products(up.format)), of_down_(packed_products(down.format)) {}

  template <class Call>
  bool fit(const Call& call) const {
    return call.width % of_up_.weights == 0 && call.inner % of_down_.weights == 0;
  }
  const PackedProducts& of_up() const { return of_up_; }
  const PackedProducts& of_down() const { return of_down_; }
  template <class Call>
  PackedOperand up(const Call& call, int64_t expert, bool of_inputs) const {
    const int64_t outputs = width_of_up(call);
    return {&of_up_, of_expert(up_, expert, outputs), outputs, call.width, of_inputs};
  }
  template <class Call>
  PackedOperand down(const Call& call, int64_t expert, bool of_inputs) const {
    return {&of_down_, of_expert(down_, expert, call.width), call.width, call.inner, of_inputs};
  }

 private:
  static PackedWeight of_expert(PackedWeight weight, int64_t expert, int64_t outputs) {
    const int64_t lines = weight.scale_rows ? divide_up(outputs, weight.scale_rows) : 1;
    const int64_t dtype = weight.scale_dtype, scale = dtype == FLOAT32                        ? 4
                                                      : dtype == BFLOAT16 || dtype == FLOAT16 ? 2
                                                                                              : 1;
    weight.codes += expert * outputs * weight.row_bytes;
    if (weight.scales) weight.scales = (const uint8_t*)weight.scales + expert * lines * weight.groups * scale;
    if (weight.global_scale) weight.global_scale += expert;
    if (weight.zeros) weight.zeros += expert * lines * weight.groups;
    return weight;
  }

  PackedWeight up_, down_;
  PackedProducts of_up_, of_down_;
};

// The rows of a tensor that products read: row i of the order by expert is row i - base of the operand.
struct RowsOfPanel {
  Operand operand;
  int64_t base;
};

// Rows of a panel as float32, one after another, in the order of the codes if `reorder` is not null.
template <class Route>
void gather(const Route& route, const Panel& panel, const void* tensor, int64_t dtype, int64_t width,
            void (*reorder)(const float*, float*, int64_t), float* to) {
  const int64_t of_block = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, width));
  run_blocks(divide_up(panel.rows, of_block), [&](int64_t block) {
    for (int64_t row = block * of_block; row < std::min(panel.rows, (block + 1) * of_block); row++) {
      float* out = to + row * width;
      load_as(dtype, (const uint8_t*)tensor + route.token[panel.first + row] * width * size_of(dtype), out, width);
      if (reorder) reorder(out, out, width);
    }
  });
}

// The columns of a block, of all its parts: `least` or more.
inline int64_t columns_of_block(const Panel& panel, int64_t columns, int64_t least) {
  if (panel.most > FEW_ROWS) return COLUMNS;
  const int64_t wanted = 4 * workers_for(INT64_MAX);
  int64_t width = COLUMNS / 2;
  while (width > least && panel.count * divide_up(columns, width) < wanted) width /= 2;
  return width;
}

// Runs f(piece, first, columns, block, buffer) for the blocks of `columns` columns of each piece of a panel; the buffer
// is for a block of so many parts of so many columns, and of so many terms.
template <class Kind, class F>
Status each_block(const Panel& panel, int64_t columns, int64_t parts, int64_t terms, F f, int64_t least = FEW_COLUMNS) {
  if (!columns) return OK;
  const int64_t width = columns_of_block(panel, columns * parts, least) / parts;
  const int64_t blocks = divide_up(columns, width), count = blocks * panel.count;
  const bool alone = panel.rows * columns * parts * terms <= 8 * BLOCK;  // less than what waking a thread costs
  const int64_t workers = alone ? 1 : workers_for(count);
  const Block<Kind> product(panel.most, terms);
  const Scratch scratch(workers, product.floats((width + TILE_COLUMNS) * parts));
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  run_blocks(count, workers, [=](int64_t block, int64_t worker) {
    const int64_t first = block % blocks * width;
    f(panel.pieces[block / blocks], first, std::min(width, columns - first), product, buffers->of(worker));
  });
  return OK;
}

// The terms that the factors of LoRA of a weight add to the products of the rows of a panel.
class Added {
 public:
  // For a weight of so many inputs and outputs; of_inputs: as it multiplies inputs, else gradients of outputs.
  Added(const LoraFactors& factors, double scale, const Panel& panel, int64_t inputs, int64_t outputs, bool of_inputs,
        bool wanted = true)
      : there_(wanted && factors.rank > 0),
        columns_(of_inputs ? outputs : inputs),
        factors_(factors),
        scale_((float)scale),
        inputs_(inputs),
        outputs_(outputs),
        of_inputs_(of_inputs),
        thin_(there_ ? panel.rows * factors.rank : 0),
        sums_(there_ ? panel.rows * columns_ : 0) {}

  // Computes the products of rows with one factor, times the scale, and of these with the other one.
  Status compute(const Panel& panel, const RowsOfPanel& rows) const {
    if (!there_ || !columns_) return OK;
    if (const Status status = compute_thin(panel, rows)) return status;
    if (!sums_.data()) return OUT_OF_MEMORY;
    const RowsOfPanel thin{thin_rows(), panel.first};
    return product(panel, thin, factors_.rank, columns_, !of_inputs_, 1.0f, sums_.data());
  }
  Status compute_thin(const Panel& panel, const RowsOfPanel& rows) const {
    if (!there_) return OK;
    if (!thin_.data()) return OUT_OF_MEMORY;
    return product(panel, rows, of_inputs_ ? inputs_ : outputs_, factors_.rank, of_inputs_, scale_, thin_.data());
  }
  // Adds the terms [first, first + n) of a row of the panel to c.
  void add(float* c, int64_t row, int64_t first, int64_t n) const {
    if (there_) add_to(c, sums_.data() + row * columns_ + first, n);
  }
  // (rows, rank), as rows of a product; terms: as the columns of one are, else as its terms.
  Operand thin_rows(int64_t first = 0, bool terms = true) const {
    return {thin_.data() + first * factors_.rank, FLOAT32, factors_.rank, terms};
  }

 private:
  // scale * rows @ a factor: A for inputs, and for the rows of the other one B. Both as (outputs, terms).
  Status product(const Panel& panel, const RowsOfPanel& rows, int64_t terms, int64_t columns, bool by_a, float scale,
                 float* to) const {
    const LoraFactors f = factors_;
    const int64_t stride = by_a ? inputs_ : f.rank, size = f.rank * (by_a ? inputs_ : outputs_);
    const int64_t dtype = by_a ? f.a_dtype : f.b_dtype;
    const uint8_t* data = (const uint8_t*)(by_a ? f.a : f.b);
    const bool contiguous = of_inputs_;
    return each_block<Floats>(
        panel, columns, 1, terms,
        [=](const Piece& piece, int64_t first, int64_t n, const Block<Floats>& block, float* buffer) {
          const Operand weight{data + piece.expert * size * size_of(dtype), dtype, stride, contiguous};
          const Columns part{&weight, first, n};
          const int64_t row_of_c = block.compute(rows.operand, piece.first - rows.base, piece.count, &part, 1, buffer);
          for (int64_t m = 0; m < piece.count; m++) {
            const float* c = buffer + m * row_of_c;
            float* out = to + (piece.first - panel.first + m) * columns + first;
            each(n, [=](int64_t i, auto lanes) { store(out + i, load(c + i, lanes) * scale, lanes); });
          }
        });
  }

  bool there_;
  int64_t columns_;
  LoraFactors factors_;
  float scale_;
  int64_t inputs_, outputs_;
  bool of_inputs_;
  FloatBuffer thin_, sums_;
};

// True where the products are those of bfloat16: the activations and their gradients are then rounded to it once.
template <class Call>
bool in_pairs(const Call& call) {
  return has_pairs() && call.dtype == BFLOAT16 && call.up_dtype == BFLOAT16 && call.down_dtype == BFLOAT16;
}

template <class Call>
bool fits(const Call& call) {
  return call.tokens >= 0 && call.choices >= 0 && call.experts >= 0 && call.width >= 0 && call.inner >= 0 &&
         call.activation >= 0 && call.activation <= SQUARED_RELU;
}

}  // namespace
}  // namespace fusedops

// The gradients of experts.
//
// On a panel: the activations again with their gradients, those of the inputs of each row, which are added to those of
// its token, and those of the weights. A weight's gradient is one sum over the rows of its expert.
#include "dot/experts.h"

namespace fusedops {
namespace {

template <class Kind, class Weights>
class BackwardPass {
 public:
  explicit BackwardPass(const ExpertsBackward& call, const Weights& weights)
      : call_(call),
        weights_(weights),
        route_(call, Weights::GRADIENT_PIECE),
        activation_(call),
        down_bias_(call.down_bias, call.down_bias_dtype, call.down_bias ? call.experts * call.width : 0, 0.0f, 0.0f),
        of_inputs_(call.dx && call.dtype != FLOAT32 ? call.tokens * call.width : 0),
        of_weights_(call.dweights ? call.tokens * call.choices : 0) {}

  Status run() {
    const int64_t rows = call_.tokens * call_.choices, inputs = call_.dx ? call_.tokens * call_.width : 0;
    if (route_.failed() || down_bias_.failed() || (inputs && !of_inputs()) ||
        (rows && !of_weights_.data() && call_.dweights))
      return OUT_OF_MEMORY;
    if (call_.dweights) std::fill(of_weights_.data(), of_weights_.data() + rows, 0.0f);
    each_of_inputs([sums = of_inputs()](int64_t first, int64_t n) { memset(sums + first, 0, n * sizeof(float)); });
    clear_experts_without_rows();
    const int64_t between = call_.inner + width_of_up(call_) + (inputs ? call_.width : 0);
    const Status status = route_.each_panel(between, [this](const Panel& panel) { return compute(panel); });
    if (status) return status;
    if (call_.dweights) store_as(call_.weights_dtype, call_.dweights, of_weights_.data(), rows);
    if (call_.dtype == FLOAT32) return OK;
    each_of_inputs([this](int64_t first, int64_t n) {
      store_as(call_.dtype, (uint8_t*)call_.dx + first * size_of(call_.dtype), of_inputs() + first, n);
    });
    return OK;
  }

 private:
  using Number = typename Kind::Number;
  using Block = fusedops::Block<Kind>;
  using Columns = typename Weights::Columns;
  static constexpr bool PACKED = std::is_same_v<Kind, Packed>;
  static constexpr int64_t ADDED = 128;  // columns that a thread adds to the gradients of inputs

  // Of the rows of a panel: their activations, times the weight of the row, and the gradients of their up-projections;
  // for each block of columns the products that make the gradient of a row's weight.
  struct Rows {
    Number *a, *dh;
    float* products;
    int64_t blocks;
  };

  Status compute(const Panel& panel) {
    const int64_t inner = call_.inner, width = width_of_up(call_), blocks = divide_up(inner, FEW_COLUMNS);
    const Buffer<Number> a(panel.rows * inner), dh(panel.rows * width);
    const FloatBuffer products(panel.rows * blocks), gathered(PACKED ? panel.rows * call_.width : 0);
    if (inner && (!a.data() || !dh.data() || !products.data())) return OUT_OF_MEMORY;
    if (PACKED && call_.width && !gathered.data()) return OUT_OF_MEMORY;
    const Rows rows{a.data(), dh.data(), products.data(), blocks};
    RowsOfPanel grad{grads(0, true), 0};
    if constexpr (PACKED) {
      gather(route_, panel, call_.grad, call_.dtype, call_.width, nullptr, gathered.data());
      grad = {{gathered.data(), FLOAT32, call_.width, true}, panel.first};
    }
    const Added of_down(call_.down_lora, call_.lora_scale, panel, inner, call_.width, false);
    Status status = of_down.compute(panel, {grads(0, true), 0});
    if (status) return status;
    status = each_block<Kind>(
        panel, inner, 1, call_.width,
        [&](const Piece& piece, const auto&... of_block) {
          activations(piece, of_block..., grad, from(rows, piece.first - panel.first), piece.first - panel.first,
                      of_down);
        },
        Weights::GRADIENT_COLUMNS);
    if (status) return status;
    if (call_.dweights) sum_products(panel, rows);
    const RowsOfPanel dhs{{dh.data(), Kind::DTYPE, width, true}, panel.first};
    const Added of_up(call_.up_lora, call_.lora_scale, panel, call_.width, width, false, call_.dx || call_.dup_a);
    if ((status = call_.dx ? of_up.compute(panel, dhs) : of_up.compute_thin(panel, dhs))) return status;
    if (call_.dx) {
      if ((status = inputs(panel, rows, of_up))) return status;
    }
    if ((status = factors(panel, rows, of_up, of_down))) return status;
    return weights(panel, rows);
  }

  // The gradients of the factors: of each the sum over the rows of its expert, of which one side is thin.
  Status factors(const Panel& panel, const Rows& rows, const Added& of_up, const Added& of_down) const {
    const int64_t inner = call_.inner, columns = call_.width, width = width_of_up(call_);
    const Operand x{call_.x, call_.dtype, columns, true, route_.token}, a{rows.a, Kind::DTYPE, inner, true};
    const Added thin_x(call_.up_lora, call_.lora_scale, panel, columns, width, true, call_.dup_b);
    const Added thin_a(call_.down_lora, call_.lora_scale, panel, inner, columns, true, call_.ddown_b);
    if (const Status s = thin_x.compute_thin(panel, {x, 0})) return s;
    if (const Status s = thin_a.compute_thin(panel, {a, panel.first})) return s;
    const LoraFactors &up = call_.up_lora, &down = call_.down_lora;
    return each_expert(panel, [&](int64_t e, int64_t first, int64_t count) {
      const int64_t at = first - panel.first;
      const Operand inputs{call_.x, call_.dtype, columns, false, route_.token + first};
      const Operand dh{rows.dh + at * width, Kind::DTYPE, width, false};
      const Operand activated{rows.a + at * inner, Kind::DTYPE, inner, false};
      const auto sum = [&](const Operand& one, int64_t outputs, const Operand& other, int64_t terms, void* result,
                           int64_t dtype) {
        return weight<Floats>(one, outputs, other, terms, count, of_expert(result, dtype, e, outputs * terms), dtype);
      };
      if (const Status s = sum(of_up.thin_rows(at, false), up.rank, inputs, columns, call_.dup_a, up.a_dtype)) return s;
      if (const Status s = sum(dh, width, thin_x.thin_rows(at, false), up.rank, call_.dup_b, up.b_dtype)) return s;
      if (const Status s = sum(of_down.thin_rows(at, false), down.rank, activated, inner, call_.ddown_a, down.a_dtype))
        return s;
      return sum(grads(first, false), columns, thin_a.thin_rows(at, false), down.rank, call_.ddown_b, down.b_dtype);
    });
  }

  // Calls f(expert, first row, rows) for the experts of a panel, until it returns an error.
  template <class F>
  Status each_expert(const Panel& panel, F f) const {
    for (int64_t p = 0; p < panel.count;) {
      const int64_t e = panel.pieces[p].expert, first = route_.begins[e], count = route_.begins[e + 1] - first;
      while (p < panel.count && panel.pieces[p].expert == e) p++;
      if (const Status status = f(e, first, count)) return status;
    }
    return OK;
  }

  // The sums of the gradients of inputs, (tokens, width).
  float* of_inputs() const { return call_.dtype == FLOAT32 ? (float*)call_.dx : of_inputs_.data(); }

  // Runs f(first, n) for stretches of them, if they are asked for.
  template <class F>
  void each_of_inputs(F f) const {
    const int64_t n = call_.dx ? call_.tokens * call_.width : 0;
    run_blocks(divide_up(n, BLOCK), [=](int64_t block) { f(block * BLOCK, std::min(BLOCK, n - block * BLOCK)); });
  }

  Rows from(const Rows& rows, int64_t first) const {
    return {rows.a + first * call_.inner, rows.dh + first * width_of_up(call_), rows.products + first * rows.blocks,
            rows.blocks};
  }

  // The rows of grad, of those of an expert from `first` on.
  Operand grads(int64_t first, bool terms) const {
    return {call_.grad, call_.dtype, call_.width, terms, route_.token + first};
  }

  void activations(const Piece& piece, int64_t first, int64_t n, const Block& block, float* buffer,
                   const RowsOfPanel& grad, const Rows& rows, int64_t at, const Added& added) const {
    const int64_t inner = call_.inner, width = width_of_up(call_);
    const auto weight = weights_.down(call_, piece.expert, false);
    const Columns part{&weight, first, n};
    const int64_t row_of_c = block.compute(grad.operand, piece.first - grad.base, piece.count, &part, 1, buffer);
    const bool pairs = activation_.interleaved(), halves = activation_.gated() && !pairs;
    for (int64_t m = 0; m < piece.count; m++) {
      float gate[COLUMNS + LANES], other[COLUMNS + LANES], activated[COLUMNS + LANES], both[2 * COLUMNS];
      float *da = buffer + m * row_of_c, *a = activated;
      Number* dh = rows.dh + m * width;
      const int64_t row = piece.first + m;
      if (pairs) {
        load_hidden(row, 2 * first, 2 * n, both);
        unzip(both, n, gate, other);
      } else {
        load_hidden(row, first, n, gate);
        if (halves) load_hidden(row, inner + first, n, other);
      }
      activation_.forward(gate, other, a, n);
      added.add(da, at + m, first, n);
      if (call_.dweights) add_products(da, a, first, n, rows.products + m * rows.blocks);
      const float factor = route_.factor[row];
      each(n, [=](int64_t i, auto lanes) {
        store(da + i, load(da + i, lanes) * factor, lanes);
        store(a + i, load(a + i, lanes) * factor, lanes);
      });
      store_as(Kind::DTYPE, rows.a + m * inner + first, a, n);
      activation_.backward(da, gate, other, gate, other, n);
      if (pairs) {
        zip(both, n, gate, other);
        store_as(Kind::DTYPE, dh + 2 * first, both, 2 * n);
      } else {
        store_as(Kind::DTYPE, dh + first, gate, n);
        if (halves) store_as(Kind::DTYPE, dh + inner + first, other, n);
      }
    }
  }

  void load_hidden(int64_t row, int64_t first, int64_t n, float* to) const {
    const int64_t at = row * width_of_up(call_) + first;
    load_as(call_.dtype, (const uint8_t*)call_.hidden + at * size_of(call_.dtype), to, n);
  }

  // The sum of the products of each FEW_COLUMNS columns: the same sums whatever the blocks are.
  static void add_products(const float* da, const float* a, int64_t first, int64_t n, float* products) {
    for (int64_t at = 0; at < n; at += FEW_COLUMNS) {
      vfloat sum = {};
      each(std::min(FEW_COLUMNS, n - at),
           [&](int64_t i, auto lanes) { sum += load(da + at + i, lanes) * load(a + at + i, lanes); });
      products[(first + at) / FEW_COLUMNS] = sum_of(sum);
    }
  }

  void sum_products(const Panel& panel, const Rows& rows) const {
    for (int64_t p = 0; p < panel.count; p++) {
      const Piece& piece = panel.pieces[p];
      const float* bias = call_.down_bias ? down_bias_.data() + piece.expert * call_.width : nullptr;
      for (int64_t row = piece.first; row < piece.first + piece.count; row++) {
        const float* products = rows.products + (row - panel.first) * rows.blocks;
        float sum = 0;
        for (int64_t block = 0; block < rows.blocks; block++) sum += products[block];
        if (bias) sum += product_with_grad(bias, route_.token[row]);
        of_weights_.data()[route_.order[row]] = sum;
      }
    }
  }

  float product_with_grad(const float* bias, int64_t token) const {
    return with_dtype(call_.dtype, [=](auto element) {
      const auto* grad = (const decltype(element)*)call_.grad + token * call_.width;
      vfloat sum = {};
      each(call_.width, [&](int64_t i, auto lanes) { sum += load(grad + i, lanes) * load(bias + i, lanes); });
      return sum_of(sum);
    });
  }

  // Adds the gradients of the inputs of a panel to those of their tokens.
  Status inputs(const Panel& panel, const Rows& rows, const Added& added) const {
    const int64_t columns = call_.width, width = width_of_up(call_);
    const FloatBuffer buffer(panel.rows * columns);
    float* terms = buffer.data();
    if (columns && !terms) return OUT_OF_MEMORY;
    const Status status = each_block<Kind>(
        panel, columns, 1, width,
        [&](const Piece& piece, const auto&... of_block) {
          const int64_t at = piece.first - panel.first;
          inputs(piece, of_block..., rows.dh + at * width, terms + at * columns, at, added);
        },
        Weights::GRADIENT_COLUMNS);
    if (status) return status;
    const int64_t blocks = divide_up(columns, ADDED), *token = route_.token + panel.first;
    float* sums = of_inputs();
    run_blocks(blocks, panel.rows * columns <= BLOCK ? 1 : workers_for(blocks), [=](int64_t block, int64_t) {
      const int64_t first = block * ADDED, n = std::min(ADDED, columns - first);
      for (int64_t row = 0; row < panel.rows; row++)
        add_to(sums + token[row] * columns + first, terms + row * columns + first, n);
    });
    return OK;
  }

  void inputs(const Piece& piece, int64_t first, int64_t n, const Block& block, float* buffer, const Number* dh,
              float* terms, int64_t at, const Added& added) const {
    const int64_t width = width_of_up(call_);
    const Operand grad{dh, Kind::DTYPE, width, true};
    const auto weight = weights_.up(call_, piece.expert, false);
    const Columns part{&weight, first, n};
    const int64_t row_of_c = block.compute(grad, 0, piece.count, &part, 1, buffer);
    for (int64_t m = 0; m < piece.count; m++) {
      memcpy(terms + m * call_.width + first, buffer + m * row_of_c, n * sizeof(float));
      added.add(terms + m * call_.width + first, at + m, first, n);
    }
  }

  // ---- The gradients of weights and biases ----

  Status weights(const Panel& panel, const Rows& rows) const {
    const int64_t width = width_of_up(call_);
    return each_expert(panel, [&](int64_t e, int64_t first, int64_t count) {
      const int64_t at = first - panel.first;
      const Operand x{call_.x, call_.dtype, call_.width, false, route_.token + first};
      const Operand grad = grads(first, false);
      const Operand dh{rows.dh + at * width, Kind::DTYPE, width, false};
      const Operand a{rows.a + at * call_.inner, Kind::DTYPE, call_.inner, false};
      if constexpr (!PACKED) {
        const int64_t up_dtype = call_.up_dtype, down_dtype = call_.down_dtype;
        void* dup = of_expert(call_.dup, up_dtype, e, width * call_.width);
        void* ddown = of_expert(call_.ddown, down_dtype, e, call_.inner * call_.width);
        const Status s = call_.transposed ? weight<Kind>(x, call_.width, dh, width, count, dup, up_dtype)
                                          : weight<Kind>(dh, width, x, call_.width, count, dup, up_dtype);
        if (s) return s;
        const Status t = call_.transposed ? weight<Kind>(a, call_.inner, grad, call_.width, count, ddown, down_dtype)
                                          : weight<Kind>(grad, call_.width, a, call_.inner, count, ddown, down_dtype);
        if (t) return t;
      }
      if (const Status s = bias(dh, nullptr, width, count, call_.dup_bias, call_.up_bias_dtype, e)) return s;
      const float* factors = route_.factor + first;
      return bias(grad, factors, call_.width, count, call_.ddown_bias, call_.down_bias_dtype, e);
    });
  }

  // The part of an expert in a gradient of so many numbers for each.
  static void* of_expert(void* gradient, int64_t dtype, int64_t expert, int64_t numbers) {
    return gradient ? (uint8_t*)gradient + expert * numbers * size_of(dtype) : nullptr;
  }

  // The products of two sets of rows, (outputs, inputs).
  template <class Of>
  static Status weight(const Operand& of_outputs, int64_t outputs, const Operand& of_inputs, int64_t inputs,
                       int64_t terms, void* result, int64_t dtype) {
    if (!result || !outputs || !inputs) return OK;
    const int64_t across = divide_up(inputs, COLUMNS), blocks = divide_up(outputs, ROWS) * across;
    const int64_t workers = outputs * inputs * terms <= 8 * BLOCK ? 1 : workers_for(blocks);
    const fusedops::Block<Of> product(std::min(ROWS, outputs), terms);
    const Scratch scratch(workers, product.floats(std::min(COLUMNS, inputs) + TILE_COLUMNS));
    if (scratch.failed()) return OUT_OF_MEMORY;
    const Scratch* buffers = &scratch;
    const Operand *rows = &of_outputs, *columns = &of_inputs;
    run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
      const int64_t row = block / across * ROWS, count = std::min(ROWS, outputs - row);
      const int64_t column = block % across * COLUMNS;
      const fusedops::Columns part{columns, column, std::min(COLUMNS, inputs - column)};
      float* c = buffers->of(worker);
      const int64_t row_of_c = product.compute(*rows, row, count, &part, 1, c);
      for (int64_t m = 0; m < count; m++)
        store_as(dtype, (uint8_t*)result + ((row + m) * inputs + column) * size_of(dtype), c + m * row_of_c,
                 part.count);
    });
    return OK;
  }

  // The sums of the columns of some rows, times their factors if given, in slices that are added in order.
  Status bias(const Operand& rows, const float* factors, int64_t width, int64_t count, void* result, int64_t dtype,
              int64_t expert) const {
    if (!result || !width) return OK;
    const FloatBuffer buffer(3 * width);
    float *total = buffer.data(), *part = total + width, *row = part + width;
    if (!total) return OUT_OF_MEMORY;
    std::fill(total, total + width, 0.0f);
    for (int64_t first = 0; first < count; first += SLICE) {
      std::fill(part, part + width, 0.0f);
      for (int64_t at = first; at < std::min(count, first + SLICE); at++) {
        load_as(rows.dtype, rows.row(at, 0), row, width);
        const float factor = factors ? factors[at] : 1.0f;
        each(width, [=](int64_t i, auto lanes) {
          store(part + i, load(part + i, lanes) + load(row + i, lanes) * factor, lanes);
        });
      }
      add_to(total, part, width);
    }
    store_as(dtype, (uint8_t*)result + expert * width * size_of(dtype), total, width);
    return OK;
  }

  void clear_experts_without_rows() const {
    const int64_t width = width_of_up(call_);
    const struct {
      void* gradient;
      int64_t bytes;  // of an expert
    } all[] = {{call_.dup, width * call_.width * size_of(call_.up_dtype)},
               {call_.ddown, call_.inner * call_.width * size_of(call_.down_dtype)},
               {call_.dup_bias, width * size_of(call_.up_bias_dtype)},
               {call_.ddown_bias, call_.width * size_of(call_.down_bias_dtype)},
               {call_.dup_a, call_.up_lora.rank * call_.width * size_of(call_.up_lora.a_dtype)},
               {call_.dup_b, call_.up_lora.rank * width * size_of(call_.up_lora.b_dtype)},
               {call_.ddown_a, call_.down_lora.rank * call_.inner * size_of(call_.down_lora.a_dtype)},
               {call_.ddown_b, call_.down_lora.rank * call_.width * size_of(call_.down_lora.b_dtype)}};
    for (int64_t e = 0; e < call_.experts; e++) {
      if (route_.begins[e + 1] > route_.begins[e]) continue;
      for (const auto& each : all)
        if (each.gradient) memset((uint8_t*)each.gradient + e * each.bytes, 0, each.bytes);
    }
  }

  const ExpertsBackward& call_;
  const Weights weights_;
  const Route<ExpertsBackward> route_;
  const ActivationPass activation_;
  const FloatRow down_bias_;
  const FloatBuffer of_inputs_, of_weights_;
};

}  // namespace
}  // namespace fusedops

using namespace fusedops;

// True where the tensors of tokens are there that a call needs.
static bool has_tokens(const ExpertsBackward& call) {
  const bool routed = call.tokens && call.choices, wide = call.width;
  return !(routed && (!call.index || !call.weights || (wide && (!call.grad || !call.x))));
}
static bool needs_weights(const ExpertsBackward& call) {
  return call.tokens && call.choices && call.width && call.inner && call.experts;
}

FUSEDOPS_EXPORT int fusedops_experts_backward(const ExpertsBackward* call) {
  if (!fits(*call) || !has_tokens(*call)) return INVALID;
  if (needs_weights(*call) && (!call->up || !call->down || !call->hidden)) return INVALID;
  const int64_t weights = call->experts * call->inner * call->width;
  if (call->dup) use_huge_pages(call->dup, call->activation <= GELU_ERF ? 2 * weights : weights, call->up_dtype);
  if (call->ddown) use_huge_pages(call->ddown, weights, call->down_dtype);
  return in_pairs(*call) ? BackwardPass<Pairs, OperandWeights>(*call, {}).run()
                         : BackwardPass<Floats, OperandWeights>(*call, {}).run();
}

FUSEDOPS_EXPORT int fusedops_quantized_experts_backward(const QuantizedExpertsBackward* given) {
  const ExpertsBackward* call = &given->call;
  if (!fits(*call) || !has_tokens(*call)) return INVALID;
  if (needs_weights(*call) && (!given->up.codes || !given->down.codes || !call->hidden)) return INVALID;
  const PackedWeights weights(given->up, given->down);
  return weights.fit(*call) ? BackwardPass<Packed, PackedWeights>(*call, weights).run() : INVALID;
}

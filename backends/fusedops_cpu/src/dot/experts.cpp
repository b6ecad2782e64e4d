// Experts: y[t] = the sum over the choices of a token of weight * down(activation(up(x[t]))).
//
// Three passes over a panel of experts: the up-projection with its activation, the down-projection with the weight of
// each row, and, after all panels, the sum of each token's rows in their order. Where all tensors have bfloat16, or the
// weights codes of MXFP4, and the processor multiplies it, the activations are rounded to it once.
#include "dot/experts.h"

namespace fusedops {
namespace {

template <class Kind, class Weights>
class ForwardPass {
 public:
  explicit ForwardPass(const ExpertsForward& call, const Weights& weights)
      : call_(call),
        weights_(weights),
        route_(call, Weights::PIECE),
        activation_(call),
        up_bias_(call.up_bias, call.up_bias_dtype, call.up_bias ? call.experts * width_of_up(call) : 0, 0.0f, 0.0f),
        down_bias_(call.down_bias, call.down_bias_dtype, call.down_bias ? call.experts * call.width : 0, 0.0f, 0.0f),
        slots_(call.tokens * call.choices * call.width) {}

  Status run() {
    use_huge_pages(slots_.data(), call_.tokens * call_.choices * call_.width, FLOAT32);
    const bool slots = slots_.data() || !call_.choices || !call_.width;
    if (route_.failed() || up_bias_.failed() || down_bias_.failed() || !slots) return OUT_OF_MEMORY;
    const Status status = route_.each_panel(call_.inner, [this](const Panel& panel) { return compute(panel); });
    if (status) return status;
    clear_hidden_of_sentinels();
    return sum_of_choices();
  }

 private:
  using Number = typename Kind::Number;
  using Block = fusedops::Block<Kind>;
  using Columns = typename Weights::Columns;
  static constexpr bool PACKED = std::is_same_v<Kind, Packed>;

  Status compute(const Panel& panel) {
    const Buffer<Number> activated(panel.rows * call_.inner);
    const FloatBuffer gathered(PACKED ? panel.rows * call_.width : 0);
    if ((call_.inner && !activated.data()) || (PACKED && call_.width && !gathered.data())) return OUT_OF_MEMORY;
    Number* a = activated.data();
    RowsOfPanel x{{call_.x, call_.dtype, call_.width, true, route_.token}, 0};
    if constexpr (PACKED) {
      gather(route_, panel, call_.x, call_.dtype, call_.width, weights_.of_up().reorder, gathered.data());
      x = {{gathered.data(), FLOAT32, call_.width, true}, panel.first};
    } else {
      x.operand.order = weights_.order_of_up();
    }
    const int64_t parts = activation_.gated() ? 2 : 1, width = call_.width, inner = call_.inner;
    const Added of_up(call_.up_lora, call_.lora_scale, panel, width, width_of_up(call_), true);
    const Added of_down(call_.down_lora, call_.lora_scale, panel, inner, width, true);
    const RowsOfPanel tokens{{call_.x, call_.dtype, width, true, route_.token}, 0};
    Status status = of_up.compute(panel, tokens);
    if (status) return status;
    // activations in their own order, for the factors of down, where those of the codes have another one
    const bool apart = PACKED && call_.down_lora.rank > 0;
    const FloatBuffer natural(apart ? panel.rows * inner : 0);
    float* plain = natural.data();
    if (apart && inner && !plain) return OUT_OF_MEMORY;
    status = each_block<Kind>(panel, inner, parts, width, [&](const Piece& piece, const auto&... of_block) {
      up(piece, of_block..., x, a, plain, panel.first, of_up);
    });
    if (status) return status;
    const Operand rows = apart ? Operand{plain, FLOAT32, inner, true} : Operand{a, Kind::DTYPE, inner, true};
    if ((status = of_down.compute(panel, {rows, panel.first}))) return status;
    return each_block<Kind>(panel, width, 1, inner, [&](const Piece& piece, const auto&... of_block) {
      down(piece, of_block..., a, panel.first, of_down);
    });
  }

  // The activations [first, first + n) of the rows of a piece, to those of its panel, a and, if it is not null, plain.
  void up(const Piece& piece, int64_t first, int64_t n, const Block& block, float* buffer, const RowsOfPanel& x,
          Number* a, float* plain, int64_t first_of_panel, const Added& added) const {
    const int64_t at = piece.first - first_of_panel;
    const int64_t width = width_of_up(call_), inner = call_.inner;
    const auto weight = weights_.up(call_, piece.expert, true);
    const bool pairs = activation_.interleaved(), halves = activation_.gated() && !pairs;
    const Columns parts[] = {{&weight, pairs ? 2 * first : first, pairs ? 2 * n : n}, {&weight, inner + first, n}};
    const int64_t row_of_c = block.compute(x.operand, piece.first - x.base, piece.count, parts, halves ? 2 : 1, buffer);
    const float* bias = call_.up_bias ? up_bias_.data() + piece.expert * width : nullptr;
    for (int64_t m = 0; m < piece.count; m++) {
      float *c = buffer + m * row_of_c, *second = c + round_up(n, TILE_COLUMNS);
      added.add(c, at + m, parts[0].first, parts[0].count);
      if (halves) added.add(second, at + m, inner + first, n);
      if (bias) add_to(c, bias + parts[0].first, parts[0].count);
      keep(c, piece.first + m, parts[0].first, parts[0].count);
      if (halves) {
        if (bias) add_to(second, bias + inner + first, n);
        keep(second, piece.first + m, inner + first, n);
      }
      float gate[COLUMNS + LANES], other[COLUMNS + LANES];
      if (pairs) unzip(c, n, gate, other);
      activation_.forward(pairs ? gate : c, pairs ? other : second, c, n);
      if (plain) memcpy(plain + (at + m) * inner + first, c, n * sizeof(float));
      if constexpr (PACKED)
        if (const auto reorder = weights_.of_down().reorder) {
          reorder(c, a + (at + m) * inner + first, n);
          continue;
        }
      store_as(Kind::DTYPE, a + (at + m) * inner + first, c, n);
    }
  }

  // Stores a stretch of an up-projection where it is saved.
  void keep(const float* values, int64_t row, int64_t first, int64_t n) const {
    if (!call_.hidden) return;
    const int64_t at = row * width_of_up(call_) + first;
    store_as(call_.dtype, (uint8_t*)call_.hidden + at * size_of(call_.dtype), values, n);
  }

  void down(const Piece& piece, int64_t first, int64_t n, const Block& block, float* buffer, const Number* a,
            int64_t first_of_panel, const Added& added) const {
    const int64_t at = piece.first - first_of_panel;
    Operand activated{a + at * call_.inner, Kind::DTYPE, call_.inner, true};
    if constexpr (!PACKED) activated.order = weights_.order_of_down();
    const auto weight = weights_.down(call_, piece.expert, true);
    const Columns part{&weight, first, n};
    const int64_t row_of_c = block.compute(activated, 0, piece.count, &part, 1, buffer);
    const float* bias = call_.down_bias ? down_bias_.data() + piece.expert * call_.width + first : nullptr;
    for (int64_t m = 0; m < piece.count; m++) {
      float* c = buffer + m * row_of_c;
      const int64_t row = route_.order[piece.first + m];
      float* slot = slots_.data() + row * call_.width + first;
      const float factor = route_.factor[piece.first + m];
      added.add(c, at + m, first, n);
      if (bias) add_to(c, bias, n);
      each(n, [=](int64_t i, auto lanes) { store(slot + i, load(c + i, lanes) * factor, lanes); });
    }
  }

  void clear_hidden_of_sentinels() const {
    const int64_t row = width_of_up(call_) * size_of(call_.dtype), rows = call_.tokens * call_.choices;
    if (call_.hidden) memset((uint8_t*)call_.hidden + route_.rows() * row, 0, (rows - route_.rows()) * row);
  }

  // y[t] = the sum of the rows of the choices of a token, in their order; sentinels have none.
  Status sum_of_choices() const {
    const int64_t width = call_.width, choices = call_.choices, tokens = call_.tokens;
    if (!width) return OK;
    const int64_t of_block = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, width * choices));
    const int64_t blocks = divide_up(tokens, of_block), workers = workers_for(blocks);
    const Scratch scratch(workers, width);
    if (scratch.failed()) return OUT_OF_MEMORY;
    const Scratch* buffers = &scratch;
    run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
      float* sum = buffers->of(worker);
      for (int64_t t = block * of_block; t < std::min(tokens, (block + 1) * of_block); t++) {
        std::fill(sum, sum + width, 0.0f);
        for (int64_t row = t * choices; row < (t + 1) * choices; row++)
          if (route_.expert[row] < call_.experts) add_to(sum, slots_.data() + row * width, width);
        store_as(call_.dtype, (uint8_t*)call_.y + t * width * size_of(call_.dtype), sum, width);
      }
    });
    return OK;
  }

  const ExpertsForward& call_;
  const Weights weights_;
  const Route<ExpertsForward> route_;
  const ActivationPass activation_;
  const FloatRow up_bias_, down_bias_;
  const FloatBuffer slots_;
};

}  // namespace
}  // namespace fusedops

using namespace fusedops;

// True where the tensors of tokens are there that a call needs.
static bool has_tokens(const ExpertsForward& call) {
  const bool routed = call.choices, wide = call.width;
  return !(wide && (!call.y || (routed && !call.x))) && !(routed && (!call.index || !call.weights));
}
static bool needs_weights(const ExpertsForward& call) {
  return call.choices && call.width && call.experts && call.inner;
}

FUSEDOPS_EXPORT int fusedops_experts_forward(const ExpertsForward* call) {
  if (!fits(*call)) return INVALID;
  if (!call->tokens) return OK;
  if (!has_tokens(*call) || (needs_weights(*call) && (!call->up || !call->down))) return INVALID;
  const OperandWeights weights;
  return in_pairs(*call) ? ForwardPass<PairsOf<true>, OperandWeights>(*call, weights).run()
                         : ForwardPass<Floats, OperandWeights>(*call, weights).run();
}

FUSEDOPS_EXPORT int fusedops_quantized_experts_forward(const QuantizedExpertsForward* given) {
  const ExpertsForward* call = &given->call;
  if (!fits(*call)) return INVALID;
  if (!call->tokens) return OK;
  if (!has_tokens(*call) || (needs_weights(*call) && (!given->up.codes || !given->down.codes))) return INVALID;
  const PackedWeights weights(given->up, given->down);
  if (!weights.fit(*call)) return INVALID;
  if (has_pairs() && call->dtype == BFLOAT16 && is_mxfp4(given->up) && is_mxfp4(given->down))
    return ForwardPass<PairsOf<true>, OperandWeights>(*call, {&given->up, &given->down}).run();
  return ForwardPass<Packed, PackedWeights>(*call, weights).run();
}

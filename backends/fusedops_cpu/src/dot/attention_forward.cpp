// out = softmax(scale * q k^T) v over the keys that a query sees, and lse, the logarithm of the sum of exponentials.
//
// A row has of each part of the keys the sum of the values, each weighed by exp(score - top), and the sum of the
// weights; the parts are joined in order. So the bits of a row depend on its query, and on the keys and what it sees of
// them: not on other rows, nor on who computes the parts. Sums have their terms in order, and weights of hidden keys
// are 0: keys that all rows of a tile hide are left out, and change no bits.
#include "dot/attention_scores.h"
#include "dot/select_keys.h"  // here, as it has the same instances of products

namespace fusedops {
namespace {

template <class T, class Kind>
class Forward {
 public:
  Forward(const AttentionForward& of)
      : of_(of),
        rows_(of.sizes, of.mask),
        call_(of.sizes),
        room_(round_up(std::max<int64_t>(1, of.sizes.value_size), WIDTH)),
        q_panel_(panel_floats<TILE_ROWS>(steps_of<Kind>(call_.size))),
        k_panel_(panel_floats<WIDTH>(steps_of<Kind>(call_.size))) {}

  static constexpr int64_t MOST = MOST_ROWS;
  // The floats of a worker's buffer for blocks of so many rows, beside their values.
  int64_t floats(int64_t rows) const {
    return rows / TILE_ROWS * q_panel_ + PART / WIDTH * k_panel_ + v_floats() + 2 * TILE_ROWS * STRIDE +
           TILE_ROWS * room_ + PART / 4;
  }
  int64_t room() const { return room_; }
  const AttentionRows& layout() const { return rows_; }

  // Computes rows [first, first + count) of a pair over the parts [begin, end).
  void compute(int64_t pair, int64_t first, int64_t count, int64_t begin, int64_t end, float* buffer, State* states,
               float* values) const {
    const Seen of_mask = rows_.seen_by_mask(pair), all = rows_.seen(first, first + count - 1, of_mask);
    for (int64_t r = 0; r < count; r++) states[r] = {-INF, 0.0f, false, false};
    Block block{};
    block.pair = pair, block.first = first, block.count = count, block.of_mask = of_mask;
    block.q = buffer, block.k = block.q + round_up(count, TILE_ROWS) / TILE_ROWS * q_panel_;
    block.v = block.k + PART / WIDTH * k_panel_, block.scores = block.v + v_floats();
    block.narrow = block.scores + TILE_ROWS * STRIDE, block.sums = block.narrow + TILE_ROWS * STRIDE;
    block.hidden = (uint8_t*)(block.sums + TILE_ROWS * room_);
    pack_queries(block);
    for (int64_t part = begin; part < end; part++) {
      block.start = part * PART, block.keys = std::min(PART, call_.keys - block.start);
      if (block.start >= all.end || block.start + block.keys <= all.begin) continue;
      block.packed = 0, block.v_is_packed = false;
      const T* v = values_of(block);
      block.v_is_finite = !rows_.hides() || is_finite(v, call_.v_position, block.keys, call_.value_size);
      for (int64_t m = 0; m < count; m += TILE_ROWS)
        add_keys(block, m, std::min<int64_t>(TILE_ROWS, count - m), states + m, values + m * room_);
    }
  }

  void finish(int64_t pair, int64_t first, int64_t count, const State* states, const float* values) const {
    rows_.finish<T>(pair, first, count, states, values, room_, of_.out, of_.lse);
  }

 private:
  // A block of rows, and a part of the keys.
  struct Block {
    int64_t pair, first, count;
    Seen of_mask;
    float *q, *k, *v, *scores, *narrow, *sums;
    uint8_t* hidden;
    int64_t start, keys;
    uint32_t packed;  // a bit for each panel of keys
    bool v_is_packed, v_is_finite;
  };

  int64_t v_floats() const { return room_ / WIDTH * panel_floats<WIDTH>(steps_of<Kind>(PART)); }
  const T* values_of(const Block& block) const {
    return (const T*)of_.v + rows_.value_offset(block.pair) + block.start * call_.v_position;
  }

  void pack_queries(const Block& block) const {
    int64_t places[MOST_ROWS];
    for (int64_t r = 0; r < block.count; r++) {
      const Place at = rows_.place(block.pair, block.first + r);
      places[r] = at.batch * call_.q_batch + at.head * call_.q_head + at.query * call_.q_position;
    }
    Kind::template pack<TILE_ROWS>({of_.q, call_.dtype, 1, true, places}, 0, block.count, 0, call_.size, block.q);
  }
  const float* panel_of_keys(Block& block, int64_t panel) const {
    float* to = block.k + panel * k_panel_;
    if (block.packed >> panel & 1) return to;
    block.packed |= 1 << panel;
    const T* k = (const T*)of_.k + rows_.key_offset(block.pair) + block.start * call_.k_position;
    Kind::template pack<WIDTH>({k, call_.dtype, call_.k_position, true}, panel * WIDTH,
                               std::min(WIDTH, block.keys - panel * WIDTH), 0, call_.size, to);
    return to;
  }
  void pack_values(const Block& block) const {
    Kind::template pack<WIDTH>({values_of(block), call_.dtype, call_.v_position, false}, 0, call_.value_size, 0,
                               block.keys, block.v);
  }

  // Joins a part of the keys to a tile of rows.
  void add_keys(Block& block, int64_t m, int64_t count, State* states, float* values) const {
    const int64_t first = block.first + m, start = block.start;
    const Seen of_part = {start, start + block.keys};
    const Seen seen = both(rows_.seen(first, first + count - 1, block.of_mask), of_part);
    if (seen.none()) return;
    const int64_t low = (seen.begin - start) / WIDTH * WIDTH, high = round_up(seen.end - start, WIDTH);
    const float* q = block.q + m / TILE_ROWS * q_panel_;
    for (int64_t at = low; at < high; at += WIDTH)
      Kind::tile(count, q, panel_of_keys(block, at / WIDTH), steps_of<Kind>(call_.size),
                 {nullptr, 0, block.scores + at, STRIDE, false});
    State of_rows[TILE_ROWS];
    const uint8_t* last = nullptr;
    for (int64_t r = 0; r < count; r++) {
      Seen of_row = both(rows_.seen(first + r, block.of_mask), of_part);
      of_row = {of_row.begin - start, of_row.end - start};
      if (rows_.has_mask()) {
        const Place at = rows_.place(block.pair, first + r);
        if (last != rows_.mask_of(at)) rows_.mask_row(at, start, block.keys, block.hidden);
        last = rows_.mask_of(at);
      }
      of_rows[r] =
          weigh(block.scores + r * STRIDE, low, high, of_row, rows_.has_mask() ? block.hidden : nullptr, rows_.scale);
    }
    const float* weights = block.scores;
    if constexpr (Kind::TERMS == 2) {
      for (int64_t r = 0; r < count; r++)
        round_row(block.scores + r * STRIDE + low, high - low, block.narrow + (r * STRIDE + low) / 2);
      weights = block.narrow;
    }
    if (!block.v_is_packed) pack_values(block);
    block.v_is_packed = true;
    if (block.v_is_finite) {
      weighed_values(block, count, weights, low, high);
    } else {
      for (int64_t r = 0; r < count; r++) {
        // 0 * NaN is NaN: the values of keys that the row hides become 0
        const Seen of_row = rows_.seen(first + r, block.of_mask);
        if (rows_.has_mask()) rows_.mask_row(rows_.place(block.pair, first + r), start, block.keys, block.hidden);
        pack_values(block);
        for (int64_t key = 0; key < block.keys; key++)
          if (key + start < of_row.begin || key + start >= of_row.end || (rows_.has_mask() && block.hidden[key]))
            zero_term<Kind>(block.v, call_.value_size, block.keys, key);
        float* all_sums = block.sums;
        block.sums += r * room_;
        weighed_values(block, 1, weights + r * STRIDE / Kind::TERMS, low, high);
        block.sums = all_sums;
      }
      block.v_is_packed = false;
    }
    for (int64_t r = 0; r < count; r++) join(states[r], values + r * room_, of_rows[r], block.sums + r * room_, room_);
  }

  void weighed_values(const Block& block, int64_t count, const float* weights, int64_t low, int64_t high) const {
    const int64_t begin = low / Kind::TERMS, end = steps_of<Kind>(std::min(high, block.keys));
    const int64_t panel = panel_floats<WIDTH>(steps_of<Kind>(block.keys));
    for (int64_t column = 0; column < call_.value_size; column += WIDTH)
      Kind::template tile<1, STRIDE / Kind::TERMS>(count, weights + begin,
                                                   block.v + column / WIDTH * panel + begin * WIDTH, end - begin,
                                                   {nullptr, 0, block.sums + column, room_, false});
  }

  const AttentionForward& of_;
  const AttentionRows rows_;
  const AttentionSizes& call_;
  const int64_t room_, q_panel_, k_panel_;
};

template <class T, class Kind>
Status forward(const AttentionForward& of) {
  const Forward<T, Kind> attention(of);
  const AttentionSizes& call = of.sizes;
  const int64_t rows = attention.layout().rows, pairs = call.batch * call.key_heads;
  const int64_t products = pairs * rows * call.keys * (call.size + call.value_size);
  const int64_t threads = products <= SMALL ? 1 : workers_for(int64_t(1) << 30);
  int64_t block = std::min(MOST_ROWS, round_up(rows, TILE_ROWS));
  while (threads > 1 && block > 4 * TILE_ROWS && pairs * divide_up(rows, block) < 4 * threads)
    block = round_up(block / 2, TILE_ROWS);
  const bool few = pairs * divide_up(rows, block) < 4 * threads && block <= 4 * TILE_ROWS;
  return run_pass(attention, block, threads, threads > 1 && few && attention.layout().parts > 1);
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_attention_tiles(const AttentionForward* call) {
  if (!fits(*call)) return INVALID;
  const int64_t dtype = call->sizes.dtype;
  if (dtype == BFLOAT16 && has_pairs()) return forward<bfloat16, Pairs>(*call);
  return with_dtype(dtype, [=](auto element) { return forward<decltype(element), Floats>(*call); });
}

FUSEDOPS_EXPORT int fusedops_select_keys(const SelectKeys* call) {
  if (call->batch <= 0 || call->queries <= 0 || call->heads <= 0 || call->keys <= 0 || call->count <= 0) return INVALID;
  if (!call->weights || !call->index || (call->size && !(call->q && call->k))) return INVALID;
  return select(*call);
}

// The gradients of attention, from the scores again: p = exp(scores - lse), dp = grad v^T,
// ds = scale * p * (dp - sum(out * grad) + grad_lse), dq = ds k, dk = ds^T q, dv = p^T grad.
//
// The rows of a pair are cut into chunks by the sizes of the call alone. A chunk has its own dq, and for each part of
// the keys a sum for dk and dv, which it adds to those of the chunks before it, after they have: so no bits depend on
// the number of threads. Sums have their terms in order, and p and ds of hidden keys are 0: keys that all rows of a
// tile hide are left out.
//
// p of a row add up to 1 where lse is of the same scores. A score of some hundreds that is a sum in another order
// differs by its last bit, by which p is wrong in proportion, where it should be 1, too. So where lse is of other
// scores (of_few), p is divided by its own sum, and sum(out * grad) is that of p * dp.
#include <thread>

#include "dot/attention_scores.h"

namespace fusedops {
namespace {

constexpr int64_t ITEMS = 64;        // pairs and chunks, at least, where there are rows enough
constexpr int64_t LEAST_ROWS = 384;  // of a chunk, where there are several
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t MOST_KEPT = 1 << 21;  // floats of p and dp of a chunk, from the sums of its rows to the gradients

// Where a tensor of rows begins, and the elements from one batch, head and query to the next.
struct RowsAt {
  const void* data;
  const int64_t* strides;
  int64_t of(const Place& at) const { return at.batch * strides[0] + at.head * strides[1] + at.query * strides[2]; }
};

template <class T, class Kind>
class Backward {
  static constexpr bool PAIRED = Kind::TERMS == 2;

 public:
  explicit Backward(const AttentionBackward& of)
      : of_(of),
        rows_(of.sizes, of.mask),
        call_(of.sizes),
        q_{of.q, &of.sizes.q_batch},
        grad_{of.grad, &of.sizes.out_batch},
        room_(room_of(call_.size)),
        value_room_(room_of(call_.value_size)),
        block_(call_.size + call_.value_size > 160 ? BLOCK_ROWS / 2 : BLOCK_ROWS),
        adds_up_(of.of_few && rows_.parts > 1) {
    const int64_t pairs = call_.batch * call_.key_heads;
    chunks_ = std::max<int64_t>(1, std::min(divide_up(ITEMS, pairs), rows_.rows / LEAST_ROWS));
    chunk_ = round_up(divide_up(rows_.rows, chunks_), block_);
    chunks_ = divide_up(rows_.rows, chunk_);
    kept_rows_ = round_up(std::min(rows_.rows, chunk_), TILE_ROWS);
    keeps_ = adds_up_ && (rows_.rows <= TILE_ROWS || 2 * rows_.parts * kept_rows_ * STRIDE <= MOST_KEPT);
  }

  int64_t chunks() const { return chunks_; }
  int64_t parts() const { return rows_.parts; }
  // The floats of dk and dv of all keys of a pair.
  int64_t floats_of_keys() const { return call_.keys * (call_.size + call_.value_size); }

  // The floats of a worker's buffer.
  int64_t floats() const {
    Item item{};
    return lay_out(item, nullptr);
  }

  // Computes a chunk of a pair: dq, and dk and dv, or their sums with those of the chunks before it, in `sums`, where
  // there are several. added: for each part of the keys, how many chunks of the pair are in its sums. Whoever computes
  // the chunks before must have begun.
  void compute(int64_t pair, int64_t chunk, float* buffer, float* sums, std::atomic<int64_t>* added) const {
    Item item{};
    lay_out(item, buffer);
    item.pair = pair, item.chunk = chunk, item.first = chunk * chunk_,
    item.count = std::min(chunk_, rows_.rows - item.first);
    item.of_mask = rows_.seen_by_mask(pair);
    start(item);
    const Seen all = rows_.seen(item.first, item.first + item.count - 1, item.of_mask);
    if (adds_up_) add_up(item, all);
    for (int64_t part = 0; part < rows_.parts; part++) {
      begin_part(item, part);
      memset(item.dk, 0, item.keys * room_ * sizeof(float));
      memset(item.dv, 0, item.keys * value_room_ * sizeof(float));
      if (item.start < all.end && item.start + item.keys > all.begin) {
        pack_keys(item);
        for (int64_t m = 0; m < item.count; m += block_) add_block(item, m, std::min(block_, item.count - m));
      }
      if (chunks_ == 1) {
        write(item.pair, item.start, item.keys, item.dk, room_, item.dv, value_room_);
      } else {
        add_keys(item, sums, added[part]);
      }
    }
    if (of_.dq) write_queries(item);
  }

 private:
  // A chunk of rows, and a part of the keys; the buffers of a worker.
  struct Item {
    int64_t pair, chunk, first, count;
    Seen of_mask;
    int64_t start, keys;
    bool k_is_finite, rows_are_finite;
    float *dq, *delta, *lse;              // of all rows of the chunk
    float *k, *v, *k_terms, *dk, *dv;     // of the part: k and v as columns, k as terms
    float *q, *grad, *q_terms, *g_terms;  // of a block of rows
    float *p, *ds, *p_pairs, *ds_pairs, *ds_rows;
    float *all_p, *all_ds;  // of a block, or of all rows and parts where they are kept
    Sums* sums;             // of all rows of the chunk, where they are added up before
    uint8_t *hidden, *row_is_finite;
  };

  static int64_t room_of(int64_t size) { return round_up(std::max<int64_t>(1, size), WIDTH); }
  static int64_t row_panel(int64_t size) { return panel_floats<TILE_ROWS>(steps_of<Kind>(size)); }
  static int64_t key_panel(int64_t size) { return panel_floats<WIDTH>(steps_of<Kind>(size)); }

  int64_t lay_out(Item& item, float* buffer) const {
    int64_t floats = 0;
    const auto take = [&](float*& to, int64_t count) {
      to = buffer + floats;
      floats += round_up(count, LANES);
    };
    const int64_t padded = chunk_ + TILE_ROWS, keys = PART + TILE_ROWS, tiles = block_ / TILE_ROWS;
    take(item.dq, padded * room_), take(item.delta, padded), take(item.lse, padded);
    take(item.k, PART / WIDTH * key_panel(call_.size)), take(item.v, PART / WIDTH * key_panel(call_.value_size));
    take(item.k_terms, room_ / WIDTH * key_panel(PART));
    take(item.dk, keys * room_), take(item.dv, keys * value_room_);
    take(item.q, tiles * row_panel(call_.size)), take(item.grad, tiles * row_panel(call_.value_size));
    take(item.q_terms, room_ / WIDTH * key_panel(block_)), take(item.g_terms, value_room_ / WIDTH * key_panel(block_));
    // whole tiles, as a product may write more rows than it has
    const int64_t wide = keeps_ ? rows_.parts * kept_rows_ : PAIRED ? TILE_ROWS : block_;
    const int64_t narrow = PAIRED ? block_ / 2 * STRIDE : 0;
    take(item.all_p, wide * STRIDE), take(item.all_ds, wide * STRIDE);
    take(item.p_pairs, narrow), take(item.ds_pairs, narrow), take(item.ds_rows, narrow);
    float *hidden, *finite, *sums;
    take(hidden, PART / 4), take(finite, divide_up(padded, 4)), take(sums, adds_up_ ? 2 * padded : 0);
    item.hidden = (uint8_t*)hidden, item.row_is_finite = (uint8_t*)finite, item.sums = (Sums*)sums;
    return floats;
  }

  void start(Item& item) const {
    memset(item.dq, 0, round_up(item.count, TILE_ROWS) * room_ * sizeof(float));
    item.rows_are_finite = true;
    const RowsAt saved{of_.out, &of_.saved_batch};
    for (int64_t r = 0; r < item.count; r++) {
      const Place at = rows_.place(item.pair, item.first + r);
      const T *out = (const T*)saved.data + saved.of(at), *grad = (const T*)grad_.data + grad_.of(at);
      const int64_t number = (at.batch * call_.heads + at.head) * call_.queries + at.query;
      vfloat sums = {};
      if (!of_.of_few)
        each(call_.value_size, [&](int64_t i, auto lanes) { sums += load(out + i, lanes) * load(grad + i, lanes); });
      item.delta[r] = sum_of(sums) - (of_.grad_lse ? of_.grad_lse[number] : 0.0f);
      item.lse[r] = of_.lse[number];
      item.row_is_finite[r] = !rows_.hides() || (is_finite(grad, 0, 1, call_.value_size) &&
                                                 is_finite((const T*)q_.data + q_.of(at), 0, 1, call_.size));
      item.rows_are_finite &= item.row_is_finite[r];
    }
  }

  const T* keys_of(const Item& item) const {
    return (const T*)of_.k + rows_.key_offset(item.pair) + item.start * call_.k_position;
  }
  void begin_part(Item& item, int64_t part) const {
    item.start = part * PART, item.keys = std::min(PART, call_.keys - item.start);
  }
  void begin_block(Item& item, int64_t m) const {
    const int64_t at = keeps_ ? (item.start / PART * kept_rows_ + m) * STRIDE : 0;
    item.p = item.all_p + at, item.ds = item.all_ds + at;
  }
  void pack_columns(const Item& item) const {
    const T* v = (const T*)of_.v + rows_.value_offset(item.pair) + item.start * call_.v_position;
    Kind::template pack<WIDTH>({keys_of(item), call_.dtype, call_.k_position, true}, 0, item.keys, 0, call_.size,
                               item.k);
    Kind::template pack<WIDTH>({v, call_.dtype, call_.v_position, true}, 0, item.keys, 0, call_.value_size, item.v);
  }
  void pack_keys(Item& item) const {
    if (!keeps_) pack_columns(item);
    item.k_is_finite = !rows_.hides() || is_finite(keys_of(item), call_.k_position, item.keys, call_.size);
    pack_terms_of_keys(item);
  }
  void pack_terms_of_keys(const Item& item) const {
    Kind::template pack<WIDTH>({keys_of(item), call_.dtype, call_.k_position, false}, 0, call_.size, 0, item.keys,
                               item.k_terms);
  }

  Seen seen_in_part(const Item& item, int64_t first, int64_t last) const {
    const Seen seen =
        both(rows_.seen(item.first + first, item.first + last, item.of_mask), {item.start, item.start + item.keys});
    return {seen.begin - item.start, seen.end - item.start};
  }

  // Adds the block of rows [m, m + count) of a chunk and a part of the keys.
  void add_block(Item& item, int64_t m, int64_t count) const {
    const Seen seen = seen_in_part(item, m, m + count - 1);
    if (seen.none()) return;
    const int64_t low = seen.begin / WIDTH * WIDTH, high = round_up(seen.end, WIDTH);
    begin_block(item, m);
    pack_rows_of_block(item, m, count, !keeps_, true);
    Seen of_tiles[BLOCK_ROWS / TILE_ROWS];
    for (int64_t r = 0; r < count; r += TILE_ROWS) {
      const int64_t rows = std::min<int64_t>(TILE_ROWS, count - r);
      const Seen tile = tile_of(item, m + r, m + r + rows - 1, low);
      of_tiles[r / TILE_ROWS] = tile;
      compute_tile(item, m, r, rows, tile, {low, high});
      if (of_.dq && !tile.none()) add_to_queries(item, m, r, rows, tile);
    }
    if (of_.dk)
      add_to_keys(item, count, {low, high}, of_tiles, PAIRED ? item.ds_pairs : item.ds, item.q_terms, call_.size,
                  item.dk, room_);
    if (of_.dv)
      add_to_keys(item, count, {low, high}, of_tiles, PAIRED ? item.p_pairs : item.p, item.g_terms, call_.value_size,
                  item.dv, value_room_);
    for (int64_t r = 0; r < count && !item.rows_are_finite; r++)
      if (!item.row_is_finite[m + r]) add_row_to_keys(item, m, r, seen);
  }

  void pack_rows_of_block(const Item& item, int64_t m, int64_t count, bool as_rows, bool as_terms) const {
    int64_t of_q[BLOCK_ROWS], of_grad[BLOCK_ROWS];
    for (int64_t r = 0; r < count; r++) {
      const Place at = rows_.place(item.pair, item.first + m + r);
      of_q[r] = q_.of(at), of_grad[r] = grad_.of(at);
    }
    const auto pack_both = [&](const void* data, const int64_t* places, int64_t size, float* rows, float* terms) {
      if (as_rows) Kind::template pack<TILE_ROWS>({data, call_.dtype, 1, true, places}, 0, count, 0, size, rows);
      if (!as_terms) return;
      Kind::template pack<WIDTH>({data, call_.dtype, 1, false, places}, 0, size, 0, count, terms);
      for (int64_t r = 0; r < count && !item.rows_are_finite; r++)
        if (!item.row_is_finite[m + r]) zero_term<Kind>(terms, size, count, r);
    };
    pack_both(q_.data, of_q, call_.size, item.q, item.q_terms);
    pack_both(grad_.data, of_grad, call_.value_size, item.grad, item.g_terms);
  }

  // The whole panels of a part that some of the rows [first, last] see; `low` where they see none.
  Seen tile_of(const Item& item, int64_t first, int64_t last, int64_t low) const {
    const Seen seen = seen_in_part(item, first, last);
    return seen.none() ? Seen{low, low} : Seen{seen.begin / WIDTH * WIDTH, round_up(seen.end, WIDTH)};
  }
  // Copies the mask of a row of the chunk, unless that of the row before, `last`, is the same.
  const uint8_t* hidden_of(const Item& item, int64_t row, const uint8_t*& last) const {
    if (!rows_.has_mask()) return nullptr;
    const Place at = rows_.place(item.pair, item.first + row);
    if (last != rows_.mask_of(at)) rows_.mask_row(at, item.start, item.keys, item.hidden);
    last = rows_.mask_of(at);
    return item.hidden;
  }

  // Computes scores and dp of the rows [r, r + rows) of a block.
  void multiply(const Item& item, int64_t r, int64_t rows, Seen tile, float* scores, float* dp) const {
    const float* q = item.q + r / TILE_ROWS * row_panel(call_.size);
    const float* grad = item.grad + r / TILE_ROWS * row_panel(call_.value_size);
    for (int64_t at = tile.begin; at < tile.end; at += WIDTH) {
      Kind::tile(rows, q, item.k + at / WIDTH * key_panel(call_.size), steps_of<Kind>(call_.size),
                 {nullptr, 0, scores + at, STRIDE, false});
      Kind::tile(rows, grad, item.v + at / WIDTH * key_panel(call_.value_size), steps_of<Kind>(call_.value_size),
                 {nullptr, 0, dp + at, STRIDE, false});
    }
  }

  // Adds up the sums of each row over all parts. p and dp are kept, or computed again.
  void add_up(Item& item, Seen all) const {
    std::fill(item.sums, item.sums + item.count, Sums{});
    for (int64_t part = all.begin / PART; part < divide_up(all.end, PART); part++) {
      begin_part(item, part);
      pack_columns(item);
      for (int64_t m = 0; m < item.count; m += block_) {
        const int64_t count = std::min(block_, item.count - m);
        if (seen_in_part(item, m, m + count - 1).none()) continue;
        begin_block(item, m);
        pack_rows_of_block(item, m, count, true, false);
        for (int64_t r = 0; r < count; r += TILE_ROWS) {
          const int64_t rows = std::min<int64_t>(TILE_ROWS, count - r);
          const Seen tile = tile_of(item, m + r, m + r + rows - 1, 0);
          float *p = item.p + r * STRIDE, *dp = item.ds + r * STRIDE;
          multiply(item, r, rows, tile, p, dp);
          Sums sums[TILE_ROWS];
          weigh_rows(item, m + r, rows, tile, p, dp, sums);
          for (int64_t i = 0; i < rows; i++) item.sums[m + r + i] = item.sums[m + r + i] + sums[i];
        }
      }
    }
  }
  // Turns the scores of rows into p; all rows before their sums are used, so that no row waits for those of another.
  void weigh_rows(const Item& item, int64_t first, int64_t rows, Seen tile, float* p, const float* dp,
                  Sums* sums) const {
    const uint8_t* last = nullptr;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t row = first + i;
      sums[i] = tile.none()
                    ? Sums{}
                    : weigh_by(p + i * STRIDE, dp + i * STRIDE, tile.begin, tile.end, seen_in_part(item, row, row),
                               hidden_of(item, row, last), rows_.scale, item.lse[row]);
    }
  }

  // Computes p and ds of the rows [r, r + rows) of a block that begins at row m; 0 in the rest of `all`, and in LANES
  // after it, of which a tile of keys may have some.
  void compute_tile(Item& item, int64_t m, int64_t r, int64_t rows, Seen tile, Seen all) const {
    float *p = item.p + (PAIRED ? 0 : r * STRIDE), *ds = item.ds + (PAIRED ? 0 : r * STRIDE);
    if (!keeps_) multiply(item, r, rows, tile, p, ds);
    Sums sums[TILE_ROWS];
    if (of_.of_few && !keeps_) weigh_rows(item, m + r, rows, tile, p, ds, sums);
    const Sums* sums_of_rows = adds_up_ ? item.sums + m + r : sums;
    const uint8_t* last = nullptr;
    for (int64_t i = 0; i < rows; i++) {
      float *of_p = p + i * STRIDE, *of_ds = ds + i * STRIDE;
      const int64_t row = m + r + i;
      const uint8_t* hidden = hidden_of(item, row, last);
      const Seen seen = seen_in_part(item, row, row);
      if (of_.of_few) {
        const float factor = sums_of_rows[i].factor(), delta = item.delta[row] + sums_of_rows[i].products * factor;
        differentiate<true>(of_p, of_ds, tile.begin, tile.end, seen, hidden, rows_.scale, factor, delta);
      } else {
        differentiate<false>(of_p, of_ds, tile.begin, tile.end, seen, hidden, rows_.scale, item.lse[row],
                             item.delta[row]);
      }
      for (float* each : {of_p, of_ds}) {
        std::fill(each + all.begin, each + tile.begin, 0.0f);
        std::fill(each + tile.end, each + all.end + LANES, 0.0f);
      }
    }
    if constexpr (PAIRED) {
      const int64_t n = all.end - all.begin;
      for (float* each : {p, ds})
        if (rows % 2) std::fill(each + rows * STRIDE + all.begin, each + rows * STRIDE + all.end + LANES, 0.0f);
      for (int64_t i = 0; i < rows; i += 2) {
        const int64_t from = i * STRIDE + all.begin, to = (r + i) / 2 * STRIDE + all.begin;
        round_rows(p + from, p + from + STRIDE, n + LANES, item.p_pairs + to);
        round_rows(ds + from, ds + from + STRIDE, n + LANES, item.ds_pairs + to);
      }
      for (int64_t i = 0; i < rows; i++)
        round_row(ds + i * STRIDE + all.begin, n, item.ds_rows + ((r + i) * STRIDE + all.begin) / 2);
    }
  }

  void add_to_queries(Item& item, int64_t m, int64_t r, int64_t rows, Seen tile) const {
    const float* ds = (PAIRED ? item.ds_rows : item.ds) + r * STRIDE / Kind::TERMS;
    float* dq = item.dq + (m + r) * room_;
    if (item.k_is_finite) return products_of_keys(item, rows, ds, tile, dq);
    for (int64_t i = 0; i < rows; i++) {  // 0 * NaN is NaN: keys that the row hides become 0
      const int64_t row = m + r + i;
      const Seen seen = seen_in_part(item, row, row);
      if (rows_.has_mask())
        rows_.mask_row(rows_.place(item.pair, item.first + row), item.start, item.keys, item.hidden);
      for (int64_t key = 0; key < item.keys; key++)
        if (key < seen.begin || key >= seen.end || (rows_.has_mask() && item.hidden[key]))
          zero_term<Kind>(item.k_terms, call_.size, item.keys, key);
      products_of_keys(item, 1, ds + i * STRIDE / Kind::TERMS, tile, dq + i * room_);
      pack_terms_of_keys(item);
    }
  }
  void products_of_keys(const Item& item, int64_t rows, const float* ds, Seen tile, float* dq) const {
    const int64_t begin = tile.begin / Kind::TERMS, end = steps_of<Kind>(std::min(tile.end, item.keys));
    const int64_t panel = key_panel(item.keys);
    for (int64_t column = 0; column < call_.size; column += WIDTH)
      Kind::template tile<1, STRIDE / Kind::TERMS>(rows, ds + begin,
                                                   item.k_terms + column / WIDTH * panel + begin * WIDTH, end - begin,
                                                   {nullptr, 0, dq + column, room_, true});
  }

  // Adds the products of the rows of a block to those keys of [all.begin, all.end) that their tiles see.
  void add_to_keys(const Item& item, int64_t count, Seen all, const Seen* of_tiles, const float* weights,
                   const float* terms, int64_t size, float* to, int64_t room) const {
    const int64_t panel = key_panel(count), tiles = divide_up(count, TILE_ROWS);
    for (int64_t key = all.begin; key < std::min(all.end, item.keys); key += TILE_ROWS) {
      const int64_t keys = std::min<int64_t>(TILE_ROWS, item.keys - key);
      int64_t first = 0, last = tiles;
      while (first < last &&
             (of_tiles[first].none() || of_tiles[first].end <= key || of_tiles[first].begin >= key + keys))
        first++;
      while (first < last &&
             (of_tiles[last - 1].none() || of_tiles[last - 1].end <= key || of_tiles[last - 1].begin >= key + keys))
        last--;
      const int64_t begin = first * TILE_ROWS / Kind::TERMS;
      const int64_t end = steps_of<Kind>(std::min(last * TILE_ROWS, count));
      for (int64_t column = 0; column < size; column += WIDTH)
        Kind::template tile<STRIDE, 1>(keys, weights + begin * STRIDE + key,
                                       terms + column / WIDTH * panel + begin * WIDTH, end - begin,
                                       {nullptr, 0, to + key * room + column, room, true});
    }
  }

  // Adds a row that is not finite, to the keys that it sees alone.
  void add_row_to_keys(const Item& item, int64_t m, int64_t r, Seen seen) const {
    const Place at = rows_.place(item.pair, item.first + m + r);
    seen = both(seen, seen_in_part(item, m + r, m + r));
    if (rows_.has_mask()) rows_.mask_row(at, item.start, item.keys, item.hidden);
    const T *q = (const T*)q_.data + q_.of(at), *grad = (const T*)grad_.data + grad_.of(at);
    for (int64_t key = seen.begin; key < seen.end; key++) {
      if (rows_.has_mask() && item.hidden[key]) continue;
      const float p = weight(item.p, item.p_pairs, r, key), ds = weight(item.ds, item.ds_pairs, r, key);
      float *dk = item.dk + key * room_, *dv = item.dv + key * value_room_;
      each(call_.size, [=](int64_t i, auto lanes) { store(dk + i, load(dk + i) + load(q + i, lanes) * ds); });
      each(call_.value_size, [=](int64_t i, auto lanes) { store(dv + i, load(dv + i) + load(grad + i, lanes) * p); });
    }
  }
  static float weight(const float* wide, const float* pairs, int64_t r, int64_t key) {
    if (!PAIRED) return wide[r * STRIDE + key];
    const uint32_t bits = ((const uint16_t*)pairs)[2 * (r / 2 * STRIDE + key) + r % 2];
    return bits_as<float>(bits << 16);
  }

  void write_queries(const Item& item) const {
    for (int64_t r = 0; r < item.count; r++) {
      const Place at = rows_.place(item.pair, item.first + r);
      T* to = (T*)of_.dq + at.batch * of_.dq_batch + at.head * of_.dq_head + at.query * of_.dq_position;
      const float* row = item.dq + r * room_;
      each(call_.size, [=](int64_t i, auto lanes) { store(to + i, load(row + i), lanes); });
    }
  }
  // Adds dk and dv of a part to the sums of the chunks before, once they are there. The last chunk writes the results.
  void add_keys(const Item& item, float* sums, std::atomic<int64_t>& added) const {
    const int64_t size = call_.size, value_size = call_.value_size;
    float *of_k = sums + item.start * size, *of_v = sums + call_.keys * size + item.start * value_size;
    while (added.load(std::memory_order_acquire) != item.chunk) std::this_thread::yield();
    for (int64_t key = 0; key < item.keys; key++) {
      add(of_k + key * size, item.dk + key * room_, size, item.chunk);
      add(of_v + key * value_size, item.dv + key * value_room_, value_size, item.chunk);
    }
    if (item.chunk == chunks_ - 1) write(item.pair, item.start, item.keys, of_k, size, of_v, value_size);
    added.store(item.chunk + 1, std::memory_order_release);
  }
  void write(int64_t pair, int64_t first, int64_t keys, const float* dk, int64_t k_row, const float* dv,
             int64_t v_row) const {
    const int64_t batch = pair / call_.key_heads, head = pair % call_.key_heads;
    T* of_k = (T*)of_.dk + batch * of_.dk_batch + head * of_.dk_head + first * of_.dk_position;
    T* of_v = (T*)of_.dv + batch * of_.dv_batch + head * of_.dv_head + first * of_.dv_position;
    for (int64_t key = 0; key < keys; key++) {
      const float *from_k = dk + key * k_row, *from_v = dv + key * v_row;
      T *to_k = of_k + key * of_.dk_position, *to_v = of_v + key * of_.dv_position;
      if (of_.dk) each(call_.size, [=](int64_t i, auto lanes) { store(to_k + i, load(from_k + i, lanes), lanes); });
      if (of_.dv)
        each(call_.value_size, [=](int64_t i, auto lanes) { store(to_v + i, load(from_v + i, lanes), lanes); });
    }
  }
  static void add(float* to, const float* from, int64_t n, bool is_there) {
    each(n, [=](int64_t i, auto lanes) {
      store(to + i, is_there ? load(to + i, lanes) + load(from + i, lanes) : load(from + i, lanes), lanes);
    });
  }

  const AttentionBackward& of_;
  const AttentionRows rows_;
  const AttentionSizes& call_;
  const RowsAt q_, grad_;
  const int64_t room_, value_room_, block_;
  const bool adds_up_;
  bool keeps_;
  int64_t chunks_, chunk_, kept_rows_;
};

template <class T, class Kind>
Status backward(const AttentionBackward& of) {
  const Backward<T, Kind> gradients(of);
  const Backward<T, Kind>* g = &gradients;
  const AttentionSizes& call = of.sizes;
  const int64_t pairs = call.batch * call.key_heads, chunks = g->chunks(), items = pairs * chunks;
  const int64_t products = call.batch * call.heads * call.queries * call.keys * call.size * 5;
  const int64_t workers = products <= SMALL ? 1 : workers_for(items);
  const int64_t of_keys = chunks > 1 ? g->floats_of_keys() : 0, parts = chunks > 1 ? g->parts() : 0;
  const FloatBuffer of_pairs(pairs * of_keys);
  const Buffer<std::atomic<int64_t>> of_parts(pairs * parts);
  const Scratch scratch(workers, g->floats());
  if (scratch.failed() || (chunks > 1 && !(of_pairs.data() && of_parts.data()))) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  float* sums = of_pairs.data();
  std::atomic<int64_t>*added = of_parts.data(), next(0), *next_item = &next;
  for (int64_t i = 0; i < pairs * parts; i++) new (added + i) std::atomic<int64_t>(0);
  // in order, so that the chunks that one waits for have begun
  run_blocks(workers, workers, [=](int64_t, int64_t worker) {
    for (int64_t item; (item = next_item->fetch_add(1)) < items;) {
      const int64_t pair = item % pairs, chunk = item / pairs;
      g->compute(pair, chunk, buffers->of(worker), sums + pair * of_keys, added + pair * parts);
    }
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_attention_backward(const AttentionBackward* call) {
  const AttentionSizes& sizes = call->sizes;
  if (!fits(sizes) || !call->lse || (sizes.size && !(call->q && call->k)) ||
      (sizes.value_size && !(call->v && call->grad && call->out)))
    return INVALID;
  if (sizes.dtype == BFLOAT16 && has_pairs()) return backward<bfloat16, Pairs>(*call);
  return with_dtype(sizes.dtype, [=](auto element) { return backward<decltype(element), Floats>(*call); });
}

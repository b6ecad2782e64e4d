// The keys of the best scores of each query: sums over heads of weight * relu(scale * q k^T), in float32.
//
// Some queries at a time: all their heads are the rows of a tile, which is multiplied with panels of keys. A score is
// computed from its query and its key alone, in the order of the heads, so that a choice does not depend on the other
// queries, nor on the number of threads. The best are found by counting digits of the scores' bits.
#pragma once

#include <algorithm>
#include <cstring>

#include "dot/attention.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t HEADS = 192;            // of a block, about
constexpr int64_t MOST_SCORES = 1 << 18;  // of a block of several queries
constexpr int64_t SHARED = 32 * WIDTH;    // keys of a block where threads share the queries

// The order of numbers as that of integers: 0 is a key that is not seen, below -inf; NaN is above all.
INLINE uint32_t rank_of(float score) {
  if (score != score) return UINT32_MAX;
  const uint32_t bits = bits_as<uint32_t>(score + 0.0f);  // -0 is 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Writes the indices of the `count` largest ranks but 0 of n, the lowest of equal ones.
NOINLINE void choose(const uint32_t* ranks, int64_t n, int64_t count, int32_t* index) {
  int64_t seen = 0, ties = 0, written = 0;
  for (int64_t i = 0; i < n; i++) seen += ranks[i] != 0;
  uint32_t least = 0, known = 0;  // the rank of the last one, of which `known` bits are
  if (seen > count) {
    ties = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
      int64_t counts[256] = {};
      for (int64_t i = 0; i < n; i++)
        if ((ranks[i] & known) == least) counts[ranks[i] >> shift & 255]++;
      uint32_t digit = 255;
      while (counts[digit] < ties) ties -= counts[digit--];
      least |= digit << shift, known |= uint32_t(255) << shift;
    }
  }
  for (int64_t i = 0; i < n && written < count; i++)
    if (ranks[i] > least || (ranks[i] == least && ties > 0 && ties--)) index[written++] = int32_t(i);
  std::fill(index + written, index + count, -1);
}

class Selection {
 public:
  explicit Selection(const SelectKeys& call)
      : call_(call),
        row_(round_up(call.keys, WIDTH)),
        panel_(panel_floats<TILE_ROWS>(call.size)),
        scale_(to_float(call.scale)) {
    const int64_t heads = std::max<int64_t>(1, call.heads);
    queries_ = std::max<int64_t>(1, std::min({HEADS / heads, MOST_SCORES / row_, call.queries}));
    blocks_ = divide_up(call.queries, queries_);
  }

  int64_t items() const { return call_.batch * blocks_; }
  int64_t parts(int64_t item) const { return divide_up(end_of(block(item).end - 1), SHARED); }
  int64_t products() const { return call_.batch * call_.queries * call_.heads * call_.keys * call_.size; }
  // The floats of a block: its scores, its heads in panels, and their weights.
  int64_t block_floats() const { return queries_ * row_ + tiles() * panel_ + queries_ * call_.heads + LANES; }
  // The floats of a worker beside: a panel of keys, and its products with all heads.
  int64_t floats() const { return panel_floats<WIDTH>(call_.size) + tiles() * TILE_ROWS * WIDTH; }

  void start(int64_t item, float* memory) const {
    const Block of = block(item);
    const int64_t rows = (of.end - of.first) * call_.heads;
    float *panels = memory + queries_ * row_, *weights = panels + tiles() * panel_;
    const int64_t place = (of.batch * call_.queries + of.first) * call_.heads;
    load_as(call_.weights_dtype, (const char*)call_.weights + place * size_of(call_.weights_dtype), weights, rows);
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      int64_t places[TILE_ROWS];
      const int64_t count = std::min<int64_t>(TILE_ROWS, rows - row);
      for (int64_t i = 0; i < count; i++)
        places[i] = of.batch * call_.q_batch + (of.first + (row + i) / call_.heads) * call_.q_query +
                    (row + i) % call_.heads * call_.q_head;
      Floats::pack<TILE_ROWS>({call_.q, call_.dtype, 1, true, places}, 0, count, 0, call_.size,
                              panels + row / TILE_ROWS * panel_);
    }
  }

  // Computes the scores of a block for a part of the keys.
  void score(int64_t item, int64_t part, float* memory, float* buffer) const {
    const Block of = block(item);
    const int64_t queries = of.end - of.first, rows = queries * call_.heads;
    const float *panels = memory + queries_ * row_, *weights = panels + tiles() * panel_;
    float* products = buffer + panel_floats<WIDTH>(call_.size);
    const void* k = (const char*)call_.k + of.batch * call_.k_batch * size_of(call_.dtype);
    const int64_t end = std::min((part + 1) * SHARED, end_of(of.end - 1));
    for (int64_t key = part * SHARED; key < end; key += WIDTH) {
      Floats::pack<WIDTH>({k, call_.dtype, call_.k_key, true}, key, std::min(WIDTH, call_.keys - key), 0, call_.size,
                          buffer);
      for (int64_t row = 0; row < rows; row += TILE_ROWS)
        Floats::tile(std::min<int64_t>(TILE_ROWS, rows - row), panels + row / TILE_ROWS * panel_, buffer, call_.size,
                     {nullptr, 0, products + row * WIDTH, WIDTH, false});
      for (int64_t query = 0; query < queries; query++)
        add_heads(products + query * call_.heads * WIDTH, weights + query * call_.heads, memory + query * row_ + key);
    }
  }

  void finish(int64_t item, float* memory) const {
    const Block of = block(item);
    for (int64_t query = of.first; query < of.end; query++) {
      float* scores = memory + (query - of.first) * row_;
      auto* ranks = (uint32_t*)scores;
      const int64_t end = end_of(query);
      const uint8_t* mask = call_.mask ? call_.mask + of.batch * call_.mask_batch + query * call_.mask_query : nullptr;
      for (int64_t i = 0; i < end; i++) {
        float score;
        memcpy(&score, scores + i, sizeof score);
        ranks[i] = mask && mask[i * call_.mask_key] ? 0 : rank_of(score);
      }
      choose(ranks, end, call_.count, call_.index + (of.batch * call_.queries + query) * call_.count);
    }
  }

 private:
  struct Block {
    int64_t batch, first, end;  // queries
  };
  Block block(int64_t item) const {
    const int64_t first = item % blocks_ * queries_;
    return {item / blocks_, first, std::min(call_.queries, first + queries_)};
  }
  int64_t tiles() const { return divide_up(queries_ * call_.heads, TILE_ROWS); }
  // The keys that a query may see: those before.
  int64_t end_of(int64_t query) const { return std::max<int64_t>(0, std::min(call_.keys, query + call_.high + 1)); }

  void add_heads(const float* products, const float* weights, float* scores) const {
    vfloat left = {}, right = {};
    for (int64_t head = 0; head < call_.heads; head++, products += WIDTH) {
      left += positive_part(load(products) * scale_) * weights[head];
      right += positive_part(load(products + LANES) * scale_) * weights[head];
    }
    store(scores, left), store(scores + LANES, right);
  }

  const SelectKeys& call_;
  const int64_t row_, panel_;
  const float scale_;
  int64_t queries_, blocks_;
};

Status select(const SelectKeys& call) {
  const Selection selection(call);
  const Selection* of = &selection;
  const int64_t items = selection.items();
  const int64_t threads = selection.products() <= SMALL ? 1 : workers_for(INT32_MAX);
  const bool shares = threads > 1 && items < 4 * threads;  // threads share a block
  const int64_t of_block = selection.block_floats(), floats = selection.floats();
  const int64_t workers = shares ? threads : std::min(threads, items);
  const Scratch blocks(shares ? 1 : workers, of_block), buffers(workers, floats);
  if (blocks.failed() || buffers.failed()) return OUT_OF_MEMORY;
  const Scratch *all_blocks = &blocks, *all_buffers = &buffers;
  if (shares) {
    float* memory = blocks.of(0);
    for (int64_t item = 0; item < items; item++) {
      selection.start(item, memory);
      const int64_t parts = selection.parts(item);
      if (parts)
        run_blocks(parts, std::min(threads, parts),
                   [=](int64_t part, int64_t worker) { of->score(item, part, memory, all_buffers->of(worker)); });
      selection.finish(item, memory);
    }
    return OK;
  }
  run_blocks(items, workers, [=](int64_t item, int64_t worker) {
    float* memory = all_blocks->of(worker);
    of->start(item, memory);
    for (int64_t part = 0; part < of->parts(item); part++) of->score(item, part, memory, all_buffers->of(worker));
    of->finish(item, memory);
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

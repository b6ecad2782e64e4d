// What the functions of attention share: which keys a row sees, and what it has of them.
//
// A row is one query of one head. The rows of a pair, which is a batch and a key head, are all query heads of the first
// query, then those of the second one; a pair of some key heads together has the rows of each one after those of the
// one before. The keys are cut into parts of PART from the first one on.
#pragma once

#include <algorithm>
#include <cmath>

#include "api.h"
#include "math/exp.h"
#include "math/finite.h"
#include "parallel.h"
#include "simd/masks.h"
#include "simd/several.h"
#include "tile/pairs.h"

namespace fusedops {
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t PART = 256;             // keys
constexpr int64_t STRIDE = PART + LANES;  // from one row of scores to the next: not a power of two
constexpr int64_t WIDTH = TILE_COLUMNS;   // keys of a panel
constexpr int64_t MOST_ROWS = 16 * 12;    // of a block: whole tiles
constexpr int64_t SMALL = 200000;         // products that one thread computes while others would wake

static_assert(MOST_ROWS % TILE_ROWS == 0 && PART % WIDTH == 0);

// The keys that a row may see by its position: [begin, end).
struct Seen {
  int64_t begin, end;
  bool none() const { return begin >= end; }
};

// What a row has of some keys. sum: of exp(score - top), or of exp(score) where every score is -inf.
struct State {
  float top, sum;
  bool sees, has_nan;
};

INLINE float exp_of(float x) { return exp_nonpositive(all(x))[0]; }
INLINE float weight_of(float top, float new_top) { return top == new_top ? 1.0f : exp_of(top - new_top); }

// Joins the keys of `from` to those before them. room: whole vectors.
NOINLINE void join(State& to, float* values, const State& from, const float* others, int64_t room) {
  if (!from.sees) return;
  if (!to.sees) {
    to = from;
    memcpy(values, others, room * sizeof(float));
    return;
  }
  const float top = std::max(to.top, from.top), a = weight_of(to.top, top), b = weight_of(from.top, top);
  for (int64_t i = 0; i < room; i += LANES) store(values + i, load(values + i) * a + load(others + i) * b);
  to = {top, to.sum * a + from.sum * b, true, to.has_nan || from.has_nan};
}

INLINE float lse_of(const State& state) {
  if (!state.sees || (state.top == -INF && !state.has_nan)) return -INF;
  if (state.has_nan) return NOT_A_NUMBER;
  return state.top == INF ? INF : state.top + std::log(state.sum);
}

INLINE Seen both(Seen a, Seen b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

struct Place {
  int64_t batch, head, query;
};

class AttentionRows {
 public:
  AttentionRows(const AttentionSizes& call, const uint8_t* mask, int64_t together = 1)
      : call(call),
        together(together),
        group(call.heads / call.key_heads),
        rows_of_head(group * call.queries),
        rows(rows_of_head * together),
        pairs(call.batch * call.key_heads / together),
        parts(divide_up(call.keys, PART)),
        scale(to_float(call.scale)),
        is_banded(call.low > -call.queries || call.high < call.keys - 1),
        mask_(mask),
        one_mask_(mask && !call.mask_query && (!call.mask_head || group * together == 1)) {}

  Place place(int64_t pair, int64_t row) const {
    const int64_t key_head = pair * together + row / rows_of_head, of_head = row % rows_of_head;
    return {key_head / call.key_heads, key_head % call.key_heads * group + of_head % group, of_head / group};
  }
  // Of a key head of all batches, which is a pair where it is alone.
  int64_t key_offset(int64_t head) const {
    return head / call.key_heads * call.k_batch + head % call.key_heads * call.k_head;
  }
  int64_t value_offset(int64_t head) const {
    return head / call.key_heads * call.v_batch + head % call.key_heads * call.v_head;
  }

  // The keys that some of the rows [first, last] may see by their positions, and by a mask that all rows share.
  Seen seen(int64_t first, int64_t last, Seen of_mask) const {
    const bool of_one_head = first / rows_of_head == last / rows_of_head;
    const int64_t low = of_one_head ? first % rows_of_head / group : 0;
    const int64_t high = of_one_head ? last % rows_of_head / group : call.queries - 1;
    return both({low + call.low, high + call.high + 1}, of_mask);
  }
  Seen seen(int64_t row, Seen of_mask) const { return seen(row, row, of_mask); }

  // All keys but those at the ends that a mask hides from all rows of a pair.
  Seen seen_by_mask(int64_t pair) const {
    Seen all{0, call.keys};
    if (!one_mask_) return all;
    const uint8_t* mask = mask_of(place(pair, 0));
    while (all.begin < all.end && mask[all.begin * call.mask_key]) all.begin++;
    while (all.begin < all.end && mask[(all.end - 1) * call.mask_key]) all.end--;
    return all;
  }

  bool has_mask() const { return mask_; }
  bool hides() const { return mask_ || is_banded; }

  // Copies the mask of a row for n keys from `start` on. Returns the address of what it has copied.
  const uint8_t* mask_row(const Place& at, int64_t start, int64_t n, uint8_t* to) const {
    const uint8_t* mask = mask_of(at) + start * call.mask_key;
    if (call.mask_key == 1) {
      memcpy(to, mask, n);
    } else {
      for (int64_t i = 0; i < n; i++) to[i] = mask[i * call.mask_key];
    }
    return mask;
  }
  const uint8_t* mask_of(const Place& at) const {
    return mask_ + at.batch * call.mask_batch + at.head * call.mask_head + at.query * call.mask_query;
  }

  // Writes out and lse of rows [first, first + count) of a pair. Of a row are `room` values.
  template <class T>
  void finish(int64_t pair, int64_t first, int64_t count, const State* states, const float* values, int64_t room,
              void* outs, float* lses) const {
    for (int64_t r = 0; r < count; r++) {
      const Place at = place(pair, first + r);
      T* out = (T*)outs + at.batch * call.out_batch + at.head * call.out_head + at.query * call.out_position;
      const State& state = states[r];
      const float factor = 1.0f / state.sum, *row = values + r * room;
      const float absent = state.sees ? NOT_A_NUMBER : 0.0f;
      const bool has_values = state.sees && state.sum != 0;
      each(call.value_size, [=](int64_t i, auto lanes) {
        store(out + i, has_values ? load(row + i, lanes) * factor : all(absent), lanes);
      });
      lses[(at.batch * call.heads + at.head) * call.queries + at.query] = lse_of(state);
    }
  }

  const AttentionSizes& call;
  const int64_t together, group, rows_of_head, rows, pairs, parts;
  const float scale;
  const bool is_banded;  // a position may hide a key

 private:
  const uint8_t* mask_;
  const bool one_mask_;  // all rows of a pair have the same
};

inline bool fits(const AttentionSizes& call) {
  return call.key_heads > 0 && call.heads % call.key_heads == 0 && call.keys > 0 && call.batch > 0 && call.queries > 0;
}
inline bool fits(const AttentionForward& of) {
  const AttentionSizes& call = of.sizes;
  return fits(call) && of.lse && (!call.size || (of.q && of.k)) && (!call.value_size || (of.v && of.out));
}

// Computes all rows by a pass, `block` of them at a time, and writes out and lse. by_parts: each part of the keys is
// computed by itself, where there are few blocks for the threads, and the parts are joined in order.
template <class Pass>
Status run_pass(const Pass& pass, int64_t block, int64_t threads, bool by_parts) {
  const Pass* a = &pass;
  const AttentionRows& layout = pass.layout();
  const int64_t rows = layout.rows, parts = layout.parts, room = pass.room(), blocks = divide_up(rows, block);
  const int64_t items = layout.pairs * blocks;
  const int64_t steps = by_parts ? parts : 1, work = items * steps;
  const int64_t kept = block * room, floats = pass.floats(block), workers = std::min(threads, work);
  const Scratch scratch(workers, floats + kept);
  FloatBuffer values_of_parts(by_parts ? work * kept : 0);
  Buffer<State> states_of_parts(by_parts ? work * block : 0);
  float* values = values_of_parts.data();
  State* states = states_of_parts.data();
  if (scratch.failed() || (by_parts && !(values && states))) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  run_blocks(work, workers, [=](int64_t at, int64_t worker) {
    const int64_t item = at / steps, pair = item / blocks, first = item % blocks * block;
    const int64_t count = std::min(block, rows - first), part = at % steps;
    float* buffer = buffers->of(worker);
    if (by_parts)
      return a->compute(pair, first, count, part, part + 1, buffer, states + at * block, values + at * kept);
    State own[Pass::MOST];
    a->compute(pair, first, count, 0, parts, buffer, own, buffer + floats);
    a->finish(pair, first, count, own, buffer + floats);
  });
  for (int64_t item = 0; by_parts && item < items; item++) {
    const int64_t first = item % blocks * block, count = std::min(block, rows - first);
    State* mine = states + item * parts * block;
    float* sums = values + item * parts * kept;
    for (int64_t part = 1; part < parts; part++)
      for (int64_t r = 0; r < count; r++)
        join(mine[r], sums + r * room, mine[part * block + r], sums + part * kept + r * room, room);
    a->finish(item / blocks, first, count, mine, sums);
  }
  return OK;
}

// True where no number is inf or NaN.
template <class T>
NOINLINE bool is_finite(const T* rows, int64_t stride, int64_t count, int64_t size) {
  vfloat zeros = {};
  for (int64_t row = 0; row < count; row++)
    each(size, [&](int64_t i, auto lanes) { zeros += load(rows + row * stride + i, lanes) * 0.0f; });
  return sum_of(zeros) == 0;
}

template <class Kind>
INLINE int64_t steps_of(int64_t terms) {
  return divide_up(terms, Kind::TERMS);
}

// Makes one of `terms` terms 0 in panels of so many columns.
template <class Kind>
NOINLINE void zero_term(float* panels, int64_t columns, int64_t terms, int64_t term) {
  float* at = panels + term / Kind::TERMS * WIDTH;
  for (int64_t column = 0; column < columns; column += WIDTH, at += panel_floats<WIDTH>(steps_of<Kind>(terms))) {
    if (Kind::TERMS == 2) {
      for (int64_t i = 0; i < WIDTH; i++) ((uint16_t*)at)[2 * i + term % 2] = 0;
    } else {
      std::fill(at, at + WIDTH, 0.0f);
    }
  }
}

}  // namespace
}  // namespace fusedops

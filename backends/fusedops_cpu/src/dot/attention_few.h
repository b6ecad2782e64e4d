// Attention of few queries: keys and values are read once for all heads that share them, as they are in memory.
//
// A row has of each part of the keys the sum of the values, each weighed by exp(score - top), and the sum of the
// weights; the parts are joined in order. So the bits of a row depend on its query, the keys and what it sees of them
// alone: not on other rows, nor on who computes the parts.
//
// Memory is a type whose Part has the keys and the values of a part: keys[i] and values[i] are where a number of
// Memory::Key is, and from(i) leaves i of them out. scale_scores and scale_weights multiply by their scales.
#pragma once

#include "dot/attention.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 32;  // of a block

// ---- Products ----

// One vector with the sum of each of LANES vectors.
template <int S = 1>
INLINE vfloat sums_of(vfloat* v) {
  if constexpr (S == LANES) {
    return v[0];
  } else {
    for (int i = 0; i < LANES; i += 2 * S)
      v[i] = shuffled<Lower<S>>(v[i], v[i + S]) + shuffled<Upper<S>>(v[i], v[i + S]);
    return sums_of<2 * S>(v);
  }
}

// scores[m * row + (0..LANES)) = the products of M vectors, `room` floats apart and padded with 0, with those of n
// keys, at most LANES.
template <int M, class Keys>
NOINLINE void scores_of(const float* q, int64_t room, Keys keys, int64_t n, int64_t size, float* scores, int64_t row) {
  vfloat products[M][LANES];
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < LANES; i += 2) {
    if (i >= n) {
      for (int m = 0; m < M; m++) products[m][i] = products[m][i + 1] = vfloat{};
      continue;
    }
    const auto *key = keys[i], *next = keys[std::min(i + 1, n - 1)];
    vfloat sums[M][2] = {};
    const auto add = [&](int64_t d, auto lanes) {
      const vfloat x = load(key + d, lanes), y = load(next + d, lanes);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vfloat of_query = load(q + m * room + d);
        sums[m][0] += x * of_query;
        sums[m][1] += y * of_query;
      }
    };
    for (int64_t d = 0; d < whole; d += LANES) add(d, Full{});
    if (whole < size) add(whole, Part{int(size - whole)});
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      products[m][i] = sums[m][0];
      products[m][i + 1] = sums[m][1];
    }
  }
  for (int m = 0; m < M; m++) store(scores + m * row, sums_of(products[m]));
}

// values[m] += the sum over n keys of weights[m * row + key] * v[key], but for keys that are hidden: 0 * NaN is NaN.
template <int M, class Values>
NOINLINE void add_values(const float* weights, const uint8_t* hidden, int64_t row, Values v, int64_t n, int64_t size,
                         float* values, int64_t room) {
  constexpr int VECTORS = VECTOR_BYTES == 64 ? 4 : 2;
  const auto columns = [=](int64_t at, auto lanes, auto vectors) {
    constexpr int COUNT = decltype(vectors)::value;
    vfloat sums[M][COUNT];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < COUNT; c++) sums[m][c] = load(values + m * room + at + c * LANES);
    for (int64_t key = 0; key < n; key++) {
      if (hidden && hidden[key]) continue;
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        const vfloat x = load(v[key] + at + c * LANES, lanes);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m][c] += x * weights[m * row + key];
      }
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < COUNT; c++) store(values + m * room + at + c * LANES, sums[m][c]);
  };
  int64_t at = 0;
  for (; at + VECTORS * LANES <= size; at += VECTORS * LANES)
    columns(at, Full{}, std::integral_constant<int, VECTORS>{});
  for (; at < size; at += LANES)
    columns(at, Part{int(std::min<int64_t>(size - at, LANES))}, std::integral_constant<int, 1>{});
}

// Calls f(row, number) for all rows, four, two or one at a time.
template <class F>
INLINE void each_few(int64_t rows, F f) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) f(row, std::integral_constant<int, 4>{});
  if (row + 2 <= rows) f(row, std::integral_constant<int, 2>{}), row += 2;
  if (row < rows) f(row, std::integral_constant<int, 1>{});
}

// add_values for all rows, of which each may hide other keys.
template <class Values>
NOINLINE void add_values_of_rows(int64_t rows, const float* weights, const uint8_t* hidden, int64_t row, Values v,
                                 int64_t n, int64_t size, float* values, int64_t room) {
  each_few(rows, [=](int64_t first, auto number) {
    constexpr int M = decltype(number)::value;
    const uint8_t* hides = hidden ? hidden + first * row : nullptr;
    bool alike = true;
    for (int m = 1; m < M && hides; m++) alike &= !memcmp(hides, hides + m * row, n);
    const float* w = weights + first * row;
    if (alike) return add_values<M>(w, hides, row, v, n, size, values + first * room, room);
    for (int m = 0; m < M; m++)
      add_values<1>(w + m * row, hides + m * row, row, v, n, size, values + (first + m) * room, room);
  });
}

template <class Memory>
class Attention : public AttentionRows {
 public:
  Attention(const AttentionForward& of, const Memory& memory)
      : AttentionRows(of.sizes, of.mask),
        room_(divide_up(std::max(call.size, call.value_size), LANES) * LANES),
        of_(of),
        memory_(memory) {}

  static constexpr int64_t MOST = ROWS;
  const AttentionRows& layout() const { return *this; }
  int64_t room() const { return room_; }
  // The floats of a worker's buffer, beside the values of the rows.
  int64_t floats(int64_t rows) const { return rows * (2 * room_ + PART) + rows * PART / 4; }

  // Computes rows [first, first + count) of a pair of a batch and a key head over the parts [begin, end).
  void compute(int64_t pair, int64_t first, int64_t count, int64_t begin, int64_t end, float* buffer, State* states,
               float* values) const {
    float *q = buffer, *of_part = q + ROWS * room_, *weights = of_part + ROWS * room_;
    auto* hidden = (uint8_t*)(weights + ROWS * PART);
    const Seen some = seen(first, first + count - 1, {0, call.keys});
    for (int64_t r = 0; r < count; r++) {
      const Place at = place(pair, first + r);
      const int64_t place_of_q = at.batch * call.q_batch + at.head * call.q_head + at.query * call.q_position;
      std::fill(q + r * room_, q + (r + 1) * room_, 0.0f);
      load_as(call.dtype, (const char*)of_.q + place_of_q * size_of(call.dtype), q + r * room_, call.size);
      states[r] = {-INF, 0.0f, false, false};
    }
    bool first_part = true;
    for (int64_t part = begin; part < end; part++) {
      const int64_t start = part * PART, n = std::min(PART, call.keys - start);
      if (start >= some.end || start + n <= some.begin) continue;
      const typename Memory::Part in_memory(memory_, *this, pair, start, n);
      for (int64_t at = 0; at < n; at += LANES)
        each_few(count, [=, keys = in_memory.keys.from(at)](int64_t row, auto number) {
          scores_of<decltype(number)::value>(q + row * room_, room_, keys, std::min<int64_t>(LANES, n - at), call.size,
                                             weights + row * PART + at, PART);
        });
      for (int64_t r = 0; r < count; r++) in_memory.scale_scores(weights + r * PART, n);
      State part_states[ROWS];
      bool some_hidden = false;
      for (int64_t r = 0; r < count; r++) some_hidden |= hide(pair, first + r, start, n, hidden + r * PART);
      for (int64_t r = 0; r < count; r++)
        part_states[r] = weigh(weights + r * PART, some_hidden ? hidden + r * PART : nullptr, n);
      for (int64_t r = 0; r < count; r++) in_memory.scale_weights(weights + r * PART, n);
      float* into = first_part ? values : of_part;
      std::fill(into, into + count * room_, 0.0f);
      constexpr int64_t AT_ONCE = 64;  // keys, whose values stay in the L1 cache for all rows
      for (int64_t at = 0; at < n; at += AT_ONCE)
        add_values_of_rows(count, weights + at, some_hidden ? hidden + at : nullptr, PART, in_memory.values.from(at),
                           std::min(AT_ONCE, n - at), call.value_size, into, room_);
      for (int64_t r = 0; r < count; r++) {
        if (first_part) {
          states[r] = part_states[r];
        } else {
          join(states[r], values + r * room_, part_states[r], of_part + r * room_, room_);
        }
      }
      first_part = false;
    }
  }

  void finish(int64_t pair, int64_t first, int64_t count, const State* states, const float* values) const {
    with_dtype(call.dtype, [=](auto element) {
      AttentionRows::finish<decltype(element)>(pair, first, count, states, values, room_, of_.out, of_.lse);
    });
  }

  // Writes for each of n keys from `start` on whether a row does not see it. True where it does not see all.
  bool hide(int64_t pair, int64_t row, int64_t start, int64_t n, uint8_t* hidden) const {
    if (!hides()) return false;
    const Seen keys = seen(row, {0, call.keys});
    const int64_t begin = std::min(std::max<int64_t>(0, keys.begin - start), n);
    const int64_t end = std::min(std::max(begin, keys.end - start), n);
    if (has_mask()) {
      mask_row(place(pair, row), start, n, hidden);
    } else {
      memset(hidden, 0, n);
    }
    memset(hidden, 1, begin);
    memset(hidden + end, 1, n - end);
    return has_mask() || begin > 0 || end < n;
  }

  // Turns the scores of n keys into weights.
  State weigh(float* scores, const uint8_t* hidden, int64_t n) const {
    vfloat tops = all(-INF);
    vint nans = {}, sees = {};
    each_cut(n, [&](int64_t i, auto lanes) {
      vfloat s = load(scores + i) * scale;
      vint out = hidden ? masked_lanes(hidden + i, lanes) : vint{};
      if constexpr (!decltype(lanes)::full) out = out | ~lanes_below(lanes.n);
      s = out ? all(-INF) : s;
      store(scores + i, s);
      nans |= s != s, sees |= ~out;
      tops = max(s, tops);
    });
    State state{max_of(tops), 0.0f, any(sees), any(nans)};
    const float base = state.top == -INF ? 0.0f : state.top;
    vfloat sums = {};
    each_cut(n, [&](int64_t i, auto) {
      const vfloat e = exp_nonpositive(load(scores + i) - base);
      store(scores + i, e);
      sums += e;
    });
    state.sum = sum_of(sums);
    return state;
  }

 private:
  const int64_t room_;
  const AttentionForward& of_;
  const Memory& memory_;

  // Calls f for whole vectors, the last one with the number of its lanes below n.
  template <class F>
  static INLINE void each_cut(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, Full{});
    if (i < n) f(i, Part{int(n - i)});
  }
  static bool any(vint v) {
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= v[i];
    return bits;
  }
};

// The rows of a call, on at most `threads` threads.
template <class Memory>
Status run_rows(const AttentionForward& of, const Memory& memory, int64_t threads) {
  const AttentionSizes& call = of.sizes;
  const Attention<Memory> attention(of, memory);
  const int64_t items = call.batch * call.key_heads * divide_up(attention.rows, ROWS);
  const int64_t workers = std::min(threads, workers_for(items * attention.parts));
  return run_pass(attention, ROWS, workers, workers > 1 && items < 4 * workers);
}

// The products of numbers of a call of run_rows.
inline int64_t products_of(const AttentionSizes& call) {
  return call.batch * call.heads * call.queries * call.keys * (call.size + call.value_size);
}

}  // namespace
}  // namespace fusedops

// Attention of few queries: keys and values are read once for all heads that share them, as they are in memory.
//
// A row has of each part of the keys the sum of the values, each weighed by exp(score - top), and the sum of the
// weights; the parts are joined in order. So the bits of a row depend on its query, the keys and what it sees of them
// alone: not on other rows, nor on who computes the parts.
//
// Memory is a type whose Part has the keys and the values of a part: keys(head)[i] and values(head)[i] are where
// numbers of Memory::Key are, and from(i) leaves i of them out; the first head of the pair is 0. scale_scores and
// scale_weights multiply some rows of a head by their scales.
//
// Where the numbers of all heads lie side by side for each key, some key heads are computed together: memory is read in
// its order, a little ahead of its use. Head after head, each would take some cache lines of each page of memory, and
// wait for them (8,192 keys of 8 heads on Zen 3: twice the time).
#pragma once

#include "dot/attention.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 32;     // of a block
constexpr int64_t AT_ONCE = 32;  // keys, whose numbers stay in the caches for all rows

// ---- Products ----

// One vector with the sum of each of LANES vectors.
template <int S = 1>
INLINE vfloat sums_of(vfloat* v) {
  if constexpr (S == LANES) {
    return v[0];
  } else {
#pragma GCC unroll 8
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
  const auto columns = [=](int64_t at, auto lanes, auto vectors) __attribute__((always_inline)) {
    constexpr int COUNT = decltype(vectors)::value;
    vfloat sums[M][COUNT];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) sums[m][c] = load(values + m * room + at + c * LANES);
    for (int64_t key = 0; key < n; key++) {
      if (hidden && hidden[key]) continue;
      vfloat w[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) w[m] = all(weights[m * row + key]);
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        vfloat x = load(v[key] + at + c * LANES, lanes);
        keep_in_register(x);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m][c] += x * w[m];
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
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
  Attention(const AttentionForward& of, const Memory& memory, int64_t together = 1)
      : AttentionRows(of.sizes, of.mask, together),
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
      ask_for_keys(in_memory, 0, std::min(n, AT_ONCE));
      for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t end = std::min(n, at + AT_ONCE);
        each_head(count, [&](int64_t head, int64_t row, int64_t rows) {
          const auto keys = in_memory.keys(head);
          for (int64_t i = at; i < end; i += LANES) {
            const int64_t share = head * AT_ONCE + i - at, next = share / together, after = (share + LANES) / together;
            if (end < n) {
              ask_for_keys(in_memory, end + next, std::min(n, end + after));
            } else {
              ask_for_values(in_memory, next, std::min(n, after));
            }
            each_few(rows, [=, q = q + row * room_, to = weights + row * PART + i](int64_t r, auto number) {
              scores_of<decltype(number)::value>(q + r * room_, room_, keys.from(i), std::min<int64_t>(LANES, end - i),
                                                 call.size, to + r * PART, PART);
            });
          }
        });
      }
      each_head(count, [&](int64_t head, int64_t row, int64_t rows) {
        in_memory.scale_scores(head, weights + row * PART, rows, n);
      });
      State part_states[ROWS];
      bool some_hidden = false;
      for (int64_t r = 0; r < count; r++) some_hidden |= hide(pair, first + r, start, n, hidden + r * PART);
      for (int64_t r = 0; r < count; r++)
        part_states[r] = weigh(weights + r * PART, some_hidden ? hidden + r * PART : nullptr, n);
      each_head(count, [&](int64_t head, int64_t row, int64_t rows) {
        in_memory.scale_weights(head, weights + row * PART, rows, n);
      });
      float* into = first_part ? values : of_part;
      std::fill(into, into + count * room_, 0.0f);
      for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t end = std::min(n, at + AT_ONCE);
        each_head(count, [&](int64_t head, int64_t row, int64_t rows) {
          const int64_t next = AT_ONCE * head / together, after = AT_ONCE * (head + 1) / together;
          ask_for_values(in_memory, end + next, std::min(n, end + after));
          const int64_t place = row * PART + at;
          add_values_of_rows(rows, weights + place, some_hidden ? hidden + place : nullptr, PART,
                             in_memory.values(head).from(at), end - at, call.value_size, into + row * room_, room_);
        });
      }
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

  // Calls f(head, row, rows) for the key heads of `count` rows. Some heads together have all their rows.
  template <class F>
  INLINE void each_head(int64_t count, F f) const {
    const int64_t rows = together == 1 ? count : rows_of_head;
    for (int64_t head = 0; head < together; head++) f(head, head * rows, rows);
  }

  // Asks memory for the numbers of keys [begin, end) of a part, unless those of a head lie side by side: the processor
  // reads these ahead itself.
  void ask_for_keys(const typename Memory::Part& part, int64_t begin, int64_t end) const {
    if (call.k_position != call.size) ask_for(part.keys(0), call.k_head, call.size, begin, end);
  }
  void ask_for_values(const typename Memory::Part& part, int64_t begin, int64_t end) const {
    if (call.v_position != call.value_size) ask_for(part.values(0), call.v_head, call.value_size, begin, end);
  }
  template <class Rows>
  NOINLINE void ask_for(Rows rows, int64_t next_head, int64_t size, int64_t begin, int64_t end) const {
    constexpr int64_t IN_LINE = 64 / int64_t(sizeof(typename Memory::Key));
    asm volatile("");  // without it, GCC takes a call of this function for one without effect
    for (int64_t i = begin; i < end; i++)
      for (int64_t head = 0; head < together; head++)
        for (int64_t d = 0; d < size; d += IN_LINE) __builtin_prefetch(rows[i] + head * next_head + d, 0, 2);
  }

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

// How many key heads to compute together, for so many threads.
inline int64_t heads_together(const AttentionSizes& call, int64_t threads) {
  const bool side_by_side = call.k_position > call.k_head && call.v_position > call.v_head;
  const int64_t rows = call.heads / call.key_heads * call.queries, parts = divide_up(call.keys, PART);
  int64_t most = side_by_side ? std::min(call.key_heads, ROWS / rows) : 1;
  const auto leaves_idle = [&] { return threads > 1 && call.batch * (call.key_heads / most) * parts < 4 * threads; };
  while (most > 1 && (call.key_heads % most || leaves_idle())) most--;
  return std::max<int64_t>(1, most);
}

// The rows of a call, on at most `threads` threads.
template <class Memory>
Status run_rows(const AttentionForward& of, const Memory& memory, int64_t threads) {
  const AttentionSizes& call = of.sizes;
  threads = std::min(
      threads, workers_for(call.batch * call.key_heads * divide_up(call.heads / call.key_heads * call.queries, ROWS) *
                           divide_up(call.keys, PART)));
  const Attention<Memory> attention(of, memory, heads_together(call, threads));
  const int64_t items = attention.pairs * divide_up(attention.rows, ROWS);
  return run_pass(attention, ROWS, threads, threads > 1 && items < 4 * threads);
}

// The products of numbers of a call of run_rows.
inline int64_t products_of(const AttentionSizes& call) {
  return call.batch * call.heads * call.queries * call.keys * (call.size + call.value_size);
}

}  // namespace
}  // namespace fusedops

// out = softmax(scale * q k^T) v over the keys that a query sees, and lse, the logarithm of the sum of exponentials.
//
// A row is one query of one head. The keys are cut into parts of PART, and a row has of each part the sum of the
// values, each weighed by exp(score - top), and the sum of the weights; the parts are joined in order. So the bits of a
// row depend on its query, the keys and what it sees of them alone: not on other rows, nor on who computes the parts.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "math/exp.h"
#include "math/finite.h"
#include "parallel.h"
#include "simd/masks.h"

namespace fusedops {
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t PART = 256;      // keys
constexpr int64_t ROWS = 32;       // of a block: of the heads of one key head, all queries of each one after another
constexpr int64_t SMALL = 200000;  // products that one thread computes while others would wake

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
template <int M, class T>
NOINLINE void scores_of(const float* q, int64_t room, const T* k, int64_t key_stride, int64_t n, int64_t size,
                        float* scores, int64_t row) {
  vfloat products[M][LANES];
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < LANES; i += 2) {
    if (i >= n) {
      for (int m = 0; m < M; m++) products[m][i] = products[m][i + 1] = vfloat{};
      continue;
    }
    const T *key = k + i * key_stride, *next = k + std::min(i + 1, n - 1) * key_stride;
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
template <int M, class T>
NOINLINE void add_values(const float* weights, const uint8_t* hidden, int64_t row, const T* v, int64_t key_stride,
                         int64_t n, int64_t size, float* values, int64_t room) {
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
        const vfloat x = load(v + key * key_stride + at + c * LANES, lanes);
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
template <class T>
NOINLINE void add_values_of_rows(int64_t rows, const float* weights, const uint8_t* hidden, int64_t row, const T* v,
                                 int64_t key_stride, int64_t n, int64_t size, float* values, int64_t room) {
  each_few(rows, [=](int64_t first, auto number) {
    constexpr int M = decltype(number)::value;
    const uint8_t* hides = hidden ? hidden + first * row : nullptr;
    bool alike = true;
    for (int m = 1; m < M && hides; m++) alike &= !memcmp(hides, hides + m * row, n);
    const float* w = weights + first * row;
    if (alike) return add_values<M>(w, hides, row, v, key_stride, n, size, values + first * room, room);
    for (int m = 0; m < M; m++)
      add_values<1>(w + m * row, hides + m * row, row, v, key_stride, n, size, values + (first + m) * room, room);
  });
}

// ---- Rows ----

// What a row has of some keys. sum: of exp(score - top), or of exp(score) where every score is -inf.
struct State {
  float top, sum;
  bool sees, has_nan;
};

INLINE float exp_of(float x) { return exp_nonpositive(all(x))[0]; }
INLINE float weight_of(float top, float new_top) { return top == new_top ? 1.0f : exp_of(top - new_top); }

// Joins the keys of `from` to those before them.
INLINE void join(State& to, float* values, const State& from, const float* others, int64_t room) {
  if (!from.sees) return;
  if (!to.sees) {
    to = from;
    std::copy(others, others + room, values);
    return;
  }
  const float top = std::max(to.top, from.top), a = weight_of(to.top, top), b = weight_of(from.top, top);
  each(room, [=](int64_t i, auto lanes) {
    store(values + i, load(values + i, lanes) * a + load(others + i, lanes) * b, lanes);
  });
  to = {top, to.sum * a + from.sum * b, true, to.has_nan || from.has_nan};
}

INLINE float lse_of(const State& state) {
  if (!state.sees || (state.top == -INF && !state.has_nan)) return -INF;
  if (state.has_nan) return NOT_A_NUMBER;
  return state.top == INF ? INF : state.top + std::log(state.sum);
}

// The keys that the query of a row may see by its position: [begin, end).
struct Seen {
  int64_t begin, end;
};

struct Place {
  int64_t batch, head, query;
};

template <class T>
class Attention {
 public:
  Attention(const AttentionSizes& call, const void* q, const void* k, const void* v, const uint8_t* mask)
      : call(call),
        group(call.heads / call.key_heads),
        rows(group * call.queries),
        room(divide_up(std::max(call.size, call.value_size), LANES) * LANES),
        parts(divide_up(call.keys, PART)),
        blocks(divide_up(rows, ROWS)),
        scale(to_float(call.scale)),
        is_banded(call.low > -call.queries || call.high < call.keys - 1),
        q_((const T*)q),
        k_((const T*)k),
        v_((const T*)v),
        mask_(mask) {}

  Place place(int64_t pair, int64_t row) const {
    const int64_t head = pair % call.key_heads * group + row / call.queries;
    return {pair / call.key_heads, head, row % call.queries};
  }

  const T* keys_of(int64_t pair) const {
    return k_ + pair / call.key_heads * call.k_batch + pair % call.key_heads * call.k_head;
  }
  const T* values_of(int64_t pair) const {
    return v_ + pair / call.key_heads * call.v_batch + pair % call.key_heads * call.v_head;
  }

  Seen seen(int64_t query) const {
    return {std::max<int64_t>(0, query + call.low), std::min(call.keys, query + call.high + 1)};
  }

  // The floats of a worker's buffer.
  int64_t floats() const { return ROWS * (3 * room + PART) + ROWS * PART / 4; }

  // Computes rows [first, first + count) of a pair of a batch and a key head over the parts [begin, end).
  void compute(int64_t pair, int64_t first, int64_t count, int64_t begin, int64_t end, float* buffer, State* states,
               float* values) const {
    float *q = buffer, *of_part = q + ROWS * room, *weights = of_part + ROWS * room;
    auto* hidden = (uint8_t*)(weights + ROWS * PART);
    int64_t low = call.keys, high = 0;
    for (int64_t r = 0; r < count; r++) {
      const Place at = place(pair, first + r);
      const T* row = q_ + at.batch * call.q_batch + at.head * call.q_head + at.query * call.q_position;
      std::fill(q + r * room, q + (r + 1) * room, 0.0f);
      each(call.size, [=](int64_t i, auto lanes) { store(q + r * room + i, load(row + i, lanes), lanes); });
      const Seen keys = seen(at.query);
      low = std::min(low, keys.begin), high = std::max(high, keys.end);
      states[r] = {-INF, 0.0f, false, false};
    }
    const T *k = keys_of(pair), *v = values_of(pair);
    bool first_part = true;
    for (int64_t part = begin; part < end; part++) {
      const int64_t start = part * PART, n = std::min(PART, call.keys - start);
      if (start >= high || start + n <= low) continue;
      const T *keys = k + start * call.k_position, *of_keys = v + start * call.v_position;
      for (int64_t at = 0; at < n; at += LANES)
        each_few(count, [=](int64_t row, auto number) {
          scores_of<decltype(number)::value>(q + row * room, room, keys + at * call.k_position, call.k_position,
                                             std::min<int64_t>(LANES, n - at), call.size, weights + row * PART + at,
                                             PART);
        });
      State part_states[ROWS];
      bool some_hidden = false;
      for (int64_t r = 0; r < count; r++) some_hidden |= hide(place(pair, first + r), start, n, hidden + r * PART);
      for (int64_t r = 0; r < count; r++)
        part_states[r] = weigh(weights + r * PART, some_hidden ? hidden + r * PART : nullptr, n);
      float* into = first_part ? values : of_part;
      std::fill(into, into + count * room, 0.0f);
      constexpr int64_t AT_ONCE = 64;  // keys, whose values stay in the L1 cache for all rows
      for (int64_t at = 0; at < n; at += AT_ONCE)
        add_values_of_rows(count, weights + at, some_hidden ? hidden + at : nullptr, PART,
                           of_keys + at * call.v_position, call.v_position, std::min(AT_ONCE, n - at), call.value_size,
                           into, room);
      for (int64_t r = 0; r < count; r++) {
        if (first_part) {
          states[r] = part_states[r];
        } else {
          join(states[r], values + r * room, part_states[r], of_part + r * room, room);
        }
      }
      first_part = false;
    }
  }

  // Writes rows [first, first + count) of a pair.
  void finish(int64_t pair, int64_t first, int64_t count, const State* states, const float* values, void* outs,
              float* lses) const {
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

  // Writes for each of n keys from `start` on whether the row does not see it. True where it does not see all.
  bool hide(const Place& at, int64_t start, int64_t n, uint8_t* hidden) const {
    const Seen keys = seen(at.query);
    const int64_t begin = std::min(std::max<int64_t>(0, keys.begin - start), n);
    const int64_t end = std::max(begin, keys.end - start);
    const bool cut = begin > 0 || end < n;
    if (!mask_ && !is_banded) return false;
    if (!mask_) {
      memset(hidden, 0, n);
    } else {
      const uint8_t* mask = mask_ + at.batch * call.mask_batch + at.head * call.mask_head + at.query * call.mask_query +
                            start * call.mask_key;
      for (int64_t i = 0; i < n; i++) hidden[i] = mask[i * call.mask_key] != 0;
    }
    if (cut) {
      memset(hidden, 1, begin);
      if (end < n) memset(hidden + end, 1, n - end);
    }
    return cut || mask_;
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

  const AttentionSizes& call;
  const int64_t group, rows, room, parts, blocks;
  const float scale;
  const bool is_banded;  // a position may hide a key

 private:
  const T *q_, *k_, *v_;
  const uint8_t* mask_;

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

template <class T>
Status forward(const AttentionForward& of) {
  const AttentionSizes& call = of.sizes;
  const Attention<T> attention(call, of.q, of.k, of.v, of.mask);
  const Attention<T>* a = &attention;
  void* out = of.out;
  float* lse = of.lse;
  const int64_t pairs = call.batch * call.key_heads, items = pairs * a->blocks, parts = a->parts;
  const int64_t products = items * std::min(ROWS, a->rows) * call.keys * (call.size + call.value_size);
  const int64_t workers = products <= SMALL ? 1 : workers_for(items * parts);
  const int64_t kept = ROWS * a->room;
  const Scratch scratch(workers, a->floats());
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  if (workers == 1 || items >= 4 * workers) {
    run_blocks(items, std::min(items, workers), [=](int64_t item, int64_t worker) {
      const int64_t first = item % a->blocks * ROWS, count = std::min(ROWS, a->rows - first);
      float* buffer = buffers->of(worker);
      State states[ROWS];
      float* values = buffer + a->floats() - kept;
      a->compute(item / a->blocks, first, count, 0, parts, buffer, states, values);
      a->finish(item / a->blocks, first, count, states, values, out, lse);
    });
    return OK;
  }
  // one thread for each part
  FloatBuffer of_parts(items * parts * kept);
  Buffer<State> states_of_parts(items * parts * ROWS);
  float* values = of_parts.data();
  State* states = states_of_parts.data();
  if (!values || !states) return OUT_OF_MEMORY;
  run_blocks(items * parts, workers, [=](int64_t at, int64_t worker) {
    const int64_t item = at / parts, part = at % parts, first = item % a->blocks * ROWS;
    a->compute(item / a->blocks, first, std::min(ROWS, a->rows - first), part, part + 1, buffers->of(worker),
               states + at * ROWS, values + at * kept);
  });
  for (int64_t item = 0; item < items; item++) {
    const int64_t first = item % a->blocks * ROWS, count = std::min(ROWS, a->rows - first);
    State* mine = states + item * parts * ROWS;
    float* sums = values + item * parts * kept;
    for (int64_t part = 1; part < parts; part++)
      for (int64_t r = 0; r < count; r++)
        join(mine[r], sums + r * a->room, mine[part * ROWS + r], sums + part * kept + r * a->room, a->room);
    a->finish(item / a->blocks, first, count, mine, sums, out, lse);
  }
  return OK;
}

// The gradients of one pair of a batch and a key head, from the scores again: p = softmax(scores), dp = grad v^T,
// ds = scale * p * (dp - sum(p * dp) + grad_lse), dq = ds k, dk = ds^T q, dv = p^T grad.
template <class T>
class Gradients {
 public:
  Gradients(const AttentionBackward& of)
      : of_(of), a_(of.sizes, of.q, of.k, of.v, of.mask), width_(divide_up(a_.call.keys, LANES) * LANES) {}

  int64_t floats() const { return a_.rows * (3 * a_.room + 2 * width_) + divide_up(a_.rows * width_, 4); }

  void compute(int64_t pair, float* buffer) const {
    const AttentionSizes& call = a_.call;
    const int64_t rows = a_.rows, room = a_.room, keys = call.keys, width = width_;
    float *q = buffer, *grad = q + rows * room, *dq = grad + rows * room, *p = dq + rows * room, *ds = p + rows * width;
    auto* hidden = (uint8_t*)(ds + rows * width);
    std::fill(q, p, 0.0f);
    bool some_hidden = false;
    for (int64_t r = 0; r < rows; r++) {
      const Place at = a_.place(pair, r);
      const T* of_q = (const T*)of_.q + at.batch * call.q_batch + at.head * call.q_head + at.query * call.q_position;
      const T* of_out =
          (const T*)of_.grad + at.batch * call.out_batch + at.head * call.out_head + at.query * call.out_position;
      each(call.size, [=](int64_t i, auto lanes) { store(q + r * room + i, load(of_q + i, lanes), lanes); });
      each(call.value_size, [=](int64_t i, auto lanes) { store(grad + r * room + i, load(of_out + i, lanes), lanes); });
      some_hidden |= a_.hide(at, 0, keys, hidden + r * width);
    }
    const T *k = a_.keys_of(pair), *v = a_.values_of(pair);
    for (int64_t at = 0; at < keys; at += LANES)
      each_few(rows, [=](int64_t row, auto number) {
        constexpr int M = decltype(number)::value;
        const int64_t n = std::min<int64_t>(LANES, keys - at);
        scores_of<M>(q + row * room, room, k + at * call.k_position, call.k_position, n, call.size,
                     p + row * width + at, width);
        scores_of<M>(grad + row * room, room, v + at * call.v_position, call.v_position, n, call.value_size,
                     ds + row * width + at, width);
      });
    for (int64_t r = 0; r < rows; r++)
      of_scores(a_.place(pair, r), p + r * width, ds + r * width, some_hidden ? hidden + r * width : nullptr);
    const uint8_t* hides = some_hidden ? hidden : nullptr;
    if (of_.dq) {
      add_values_of_rows(rows, ds, hides, width, k, call.k_position, keys, call.size, dq, room);
      for (int64_t r = 0; r < rows; r++) {
        const Place at = a_.place(pair, r);
        T* out = (T*)of_.dq + at.batch * of_.dq_batch + at.head * of_.dq_head + at.query * of_.dq_position;
        each(call.size, [=](int64_t i, auto lanes) { store(out + i, load(dq + r * room + i, lanes), lanes); });
      }
    }
    const int64_t batch = pair / call.key_heads, head = pair % call.key_heads;
    if (of_.dk)
      sums_of_rows(ds, hides, q, call.size, (T*)of_.dk + batch * of_.dk_batch + head * of_.dk_head, of_.dk_position);
    if (of_.dv)
      sums_of_rows(p, hides, grad, call.value_size, (T*)of_.dv + batch * of_.dv_batch + head * of_.dv_head,
                   of_.dv_position);
  }

 private:
  // Turns the scores of a row into p, and dp into ds. Of hidden keys, which nothing reads, they are any numbers.
  void of_scores(const Place& at, float* p, float* ds, const uint8_t* hidden) const {
    const AttentionSizes& call = a_.call;
    const State state = a_.weigh(p, hidden, call.keys);
    const float factor = state.sum == 0 ? NOT_A_NUMBER : 1.0f / state.sum;
    vfloat sums = {};
    each(call.keys, [&](int64_t i, auto lanes) {
      const vfloat weights = load(p + i, lanes) * factor;
      store(p + i, weights, lanes);
      const vfloat terms = weights * load(ds + i, lanes);
      sums += hidden ? (masked_lanes(hidden + i, lanes) ? vfloat{} : terms) : terms;
    });
    const float of_lse = !of_.grad_lse ? 0 : of_.grad_lse[(at.batch * call.heads + at.head) * call.queries + at.query];
    const float shift = of_lse - sum_of(sums), scale = a_.scale;
    each(call.keys, [=](int64_t i, auto lanes) {
      store(ds + i, (load(ds + i, lanes) + shift) * load(p + i, lanes) * scale, lanes);
    });
  }

  // out[key] = the sum over rows of weights[row][key] * values[row], but for rows that do not see the key.
  void sums_of_rows(const float* weights, const uint8_t* hidden, const float* values, int64_t size, T* out,
                    int64_t stride) const {
    const int64_t rows = a_.rows, room = a_.room, width = width_;
    for (int64_t key = 0; key < a_.call.keys; key++)
      each(size, [=](int64_t i, auto lanes) {
        vfloat sum = {};
        for (int64_t r = 0; r < rows; r++) {
          if (hidden && hidden[r * width + key]) continue;
          sum += load(values + r * room + i, lanes) * weights[r * width + key];
        }
        store(out + key * stride + i, sum, lanes);
      });
  }

  const AttentionBackward& of_;
  const Attention<T> a_;
  const int64_t width_;  // of a row of scores
};

template <class T>
Status backward(const AttentionBackward& call) {
  const Gradients<T> gradients(call);
  const int64_t pairs = call.sizes.batch * call.sizes.key_heads;
  const int64_t products =
      call.sizes.batch * call.sizes.heads * call.sizes.queries * call.sizes.keys * call.sizes.size * 5;
  const int64_t workers = products <= SMALL ? 1 : workers_for(pairs);
  const Scratch scratch(workers, gradients.floats());
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  const Gradients<T>* g = &gradients;
  run_blocks(pairs, workers, [=](int64_t pair, int64_t worker) { g->compute(pair, buffers->of(worker)); });
  return OK;
}

bool fits(const AttentionSizes& call) {
  return call.key_heads > 0 && call.heads % call.key_heads == 0 && call.keys > 0 && call.batch > 0 && call.queries > 0;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_attention_forward(const AttentionForward* call) {
  const AttentionSizes& sizes = call->sizes;
  if (!fits(sizes) || !call->lse || (sizes.size && !(call->q && call->k)) ||
      (sizes.value_size && !(call->v && call->out)))
    return INVALID;
  return with_dtype(sizes.dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

FUSEDOPS_EXPORT int fusedops_attention_backward(const AttentionBackward* call) {
  const AttentionSizes& sizes = call->sizes;
  if (!fits(sizes) || (sizes.size && !(call->q && call->k)) || (sizes.value_size && !(call->v && call->grad)))
    return INVALID;
  return with_dtype(sizes.dtype, [=](auto element) { return backward<decltype(element)>(*call); });
}

// One chunk of linear attention: what its positions write into the state, and the state after it.
#pragma once

#include "dot/linear_decays.h"
#include "rows.h"

namespace fusedops {
namespace {

inline bool are_sizes(const LinearAttention& call) {
  if (call.positions < 0 || call.rows < 0 || call.columns < 0 || call.key_heads < 0) return false;
  return !call.heads || (call.key_heads && call.heads % call.key_heads == 0);
}
inline bool has_no_state(const LinearAttention& call) {
  return !call.heads || !call.columns || (!call.bounds && !call.batch);
}

// Positions of one value head: the elements of q, k and v there, and from one position to the next.
struct Head {
  int64_t position, count, key_head, head;
};

// The buffers of a worker. A matrix of positions has rows `key_stride`, `value_stride` or CHUNK apart, and a state has
// them `value_stride` apart.
class Chunk {
 public:
  Chunk(const LinearAttention& call, bool with_gradients, Parts& parts)
      : call_(call),
        rows(call.rows),
        columns(call.columns),
        key_stride(stride_of(call.rows)),
        value_stride(stride_of(call.columns)),
        decays(call.rows, call.by_row, with_gradients, parts) {
    const int64_t keys = CHUNK * key_stride, values = CHUNK * value_stride, square = CHUNK * CHUNK;
    q = parts.take(keys), own_k_ = parts.take(keys), own_v_ = parts.take(values),
    u = call.beta ? parts.take(values) : own_v_;
    started = parts.take(2 * keys), ended = parts.take(keys), beta = parts.take(CHUNK), own_kk_ = parts.take(square);
    qk_ = parts.take(square), pairs = parts.take(square), scores = parts.take(square), solved_ = parts.take(square);
    panels = parts.take(panels_floats(std::max(rows, CHUNK), std::max(rows, columns)));
    k = own_k_, v = own_v_, kk = own_kk_;
  }
  int64_t state_floats() const { return whole_rows(rows) * value_stride; }
  int64_t key_floats() const { return CHUNK * key_stride; }
  int64_t value_floats() const { return CHUNK * value_stride; }

  // Loads a state of a tensor, its rows next to each other; null: zeros.
  NOINLINE void load_state(const float* from, float* to) const {
    memset(to, 0, state_floats() * sizeof(float));
    for (int64_t i = 0; from && i < rows; i++)
      memcpy(to + i * value_stride, from + i * columns, columns * sizeof(float));
  }
  NOINLINE void store_state(const float* from, float* to) const {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * columns, from + i * value_stride, columns * sizeof(float));
  }

  // Loads the keys of some positions, normalized, and the queries, normalized and scaled, and computes their products
  // with the keys: they are the same for all value heads.
  NOINLINE void load_keys(const Head& head, bool with_k, bool with_q) {
    const int64_t step = call_.key_heads * rows, first = head.position * step + head.key_head * rows;
    for (int64_t t = 0; t < head.count; t++) {
      const int64_t at = first + t * step, ahead = at + AHEAD * step;
      if (with_k) prefetch(call_.k, ahead, rows), load_row(call_.k, at, k + t * key_stride, 1.0f);
      if (with_q) prefetch(call_.q, ahead, rows), load_row(call_.q, at, q + t * key_stride, float(call_.scale));
    }
    with_k = with_k && call_.beta;
    if (call_.by_row || !(with_k || with_q)) return;
    const Right keys = turned(k, key_stride, head.count, rows, panels);
    if (with_k) product({k, key_stride}, head.count, keys, head.count, rows, {kk, CHUNK}, WHOLE_SQUARE, true);
    if (with_q) product({q, key_stride}, head.count, keys, head.count, rows, {qk_, CHUNK}, WHOLE_SQUARE, true);
  }
  // Loads the decays and betas, and the values where they are wanted.
  NOINLINE void load_values(const Head& head, bool with_v = true) {
    count = head.count;
    if (with_v) load_of_values(call_.v, head, v);
    const int64_t at = head.position * call_.heads + head.head, of_decay = call_.by_row ? rows : 1;
    decays.fill(call_.decay ? call_.decay + at * of_decay : nullptr, call_.heads * of_decay, count);
    if (call_.beta)
      for (int64_t t = 0; t < count; t++) beta[t] = call_.beta[at + t * call_.heads];
  }
  // Loads rows of a tensor with the shape of v.
  NOINLINE void load_of_values(const void* from, const Head& head, float* to) const {
    const int64_t step = call_.heads * columns, first = head.position * step + head.head * columns;
    with_dtype(call_.dtype, [&](auto element) {
      auto* p = (const decltype(element)*)from + first;
      for (int64_t t = 0; t < head.count; t++) {
        prefetch(from, first + (t + AHEAD) * step, columns);
        each(columns, [&](int64_t j, auto lanes) { store(to + t * value_stride + j, load(p + t * step + j, lanes)); });
      }
    });
  }
  NOINLINE void store_of_values(const float* from, const Head& head, void* to) const {
    const int64_t step = call_.heads * columns, first = head.position * step + head.head * columns;
    with_dtype(call_.dtype, [&](auto element) {
      auto* p = (decltype(element)*)to + first;
      for (int64_t t = 0; t < head.count; t++)
        each(columns,
             [&](int64_t j, auto lanes) { store(p + t * step + j, load(from + t * value_stride + j), lanes); });
    });
  }

  // Computes u, what each position writes for its key, from the state before the chunk; v becomes v - H.T k with beta.
  NOINLINE void write(const float* state) {
    if (!call_.beta) return;
    start_keys();
    product({started_k(), key_stride}, count, {state, value_stride}, columns, rows, added_to(v, value_stride));
    load_pairs();
    solve(false, v);
    load_written();
  }
  // Loads the pairs, times -1.
  void load_pairs() { decays.products(k, k, kk, key_stride, true, pairs); }
  // Loads u from the v that write() left.
  void load_written() { times_beta(v, u); }

  // The rows of the second half of a buffer of `started` or of its gradient are of the keys, times -1.
  int64_t half() const { return whole_rows(count); }
  float* started_k() const { return started + half() * key_stride; }
  void start_keys() { decays.scale(decays.start, k, started_k(), key_stride, -1.0f); }
  void start_queries() {
    decays.scale(decays.start, q, started, key_stride);
    decays.products(q, k, qk_, key_stride, false, scores);
  }

  // Computes the rows of out, after write().
  NOINLINE void read(const float* state, float* out) {
    start_queries();
    product({started, key_stride}, count, {state, value_stride}, columns, rows, {out, value_stride});
    product({scores, CHUNK}, count, {u, value_stride}, columns, count, added_to(out, value_stride), LOWER);
  }

  // Computes the state after the chunk, after write().
  NOINLINE void advance(const float* from, float* to) {
    decays.scale(decays.end, k, ended, key_stride);
    product({ended, key_stride, true}, rows, {u, value_stride}, columns, count, decays.passed(from, to, value_stride));
  }

  // Solves z = x + pairs (beta z), or with the transposed pairs, in the place of x: block by block, each by the inverse
  // of what is in it.
  NOINLINE void solve(bool transposed, float* z) {
    for (int64_t t = 0; t < count; t++)
      each(t, [&](int64_t s, auto) {
        const vfloat factor = transposed ? all(beta[t]) : load(beta + s);
        store(solved_ + t * CHUNK + s, load(pairs + t * CHUNK + s) * factor);
      });
    const int64_t blocks = divide_up(count, TILE_ROWS);
    for (int64_t number = 0; number < blocks; number++) {
      const int64_t first = (transposed ? blocks - 1 - number : number) * TILE_ROWS;
      const int64_t n = std::min<int64_t>(TILE_ROWS, count - first), after = first + n;
      const Into own = added_to(z + first * value_stride, value_stride);
      if (transposed && after < count) {
        product({solved_ + after * CHUNK + first, CHUNK, true}, n, {z + after * value_stride, value_stride}, columns,
                count - after, own);
      } else if (!transposed && first) {
        product({solved_ + first * CHUNK, CHUNK}, n, {z, value_stride}, columns, first, own);
      }
      float inverse[TILE_ROWS * LANES] = {};
      invert(solved_ + first * CHUNK + first, n, inverse);
      product({inverse, LANES, transposed}, n, {own.to, value_stride}, columns, n, {own.to, value_stride});
    }
  }

  // to = beta times the rows of x.
  NOINLINE void times_beta(const float* x, float* to) const {
    for (int64_t t = 0; t < count; t++)
      each(columns,
           [&](int64_t j, auto) { store(to + t * value_stride + j, load(x + t * value_stride + j) * beta[t]); });
  }

 private:
  const LinearAttention& call_;

 public:
  const int64_t rows, columns, key_stride, value_stride;
  Decays decays;
  int64_t count = 0;
  float *q, *u, *pairs, *scores, *started, *ended, *beta, *panels;
  float *k, *v, *kk;  // may be set to other buffers

 private:
  float *own_k_, *own_v_, *own_kk_, *qk_, *solved_;

  // Inverts the unit matrix less what `pairs` has below its diagonal.
  static NOINLINE void invert(const float* pairs, int64_t n, float* to) {
    static_assert(TILE_ROWS <= LANES);
    vfloat rows[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++) {
      if (i >= n) break;
      vfloat row = {};
      row[i] = 1.0f;
#pragma GCC unroll 16
      for (int j = 0; j < i; j++) row = row + rows[j] * pairs[i * CHUNK + j];
      rows[i] = row;
      store(to + i * LANES, row);
    }
  }

  // Loads a row of q or k, times a factor.
  INLINE void load_row(const void* from, int64_t at, float* to, float factor) const {
    with_dtype(call_.dtype, [&](auto element) {
      auto* p = (const decltype(element)*)from + at;
      each(rows, [&](int64_t i, auto lanes) { store(to + i, load(p + i, lanes)); });
    });
    if (call_.normalize) factor *= rnorm_of(to, rows);
    if (factor != 1.0f) each(rows, [&](int64_t i, auto) { store(to + i, load(to + i) * factor); });
  }

 public:
  // Asks for a row ahead of time, as each is in a page of its own. It may be beyond the tensor.
  template <bool WRITES = false>
  INLINE void prefetch(const void* from, int64_t at, int64_t n) const {
    const int64_t size = size_of(call_.dtype);
    for (int64_t byte = 0; byte < n * size; byte += 64)
      __builtin_prefetch((const void*)(uintptr_t(from) + at * size + byte), WRITES);
  }

  // The factor that normalizes a row of q or k.
  static float rnorm_of(const float* row, int64_t rows) { return 1.0f / std::sqrt(dot(row, row, rows) + 1e-6f); }
};

}  // namespace
}  // namespace fusedops

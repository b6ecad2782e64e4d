// One chunk of linear attention: what its positions write into the state, and the state after it.
#pragma once

#include "linear_decays.h"
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
        key_stride(tile_columns(call.rows)),
        value_stride(tile_columns(call.columns)),
        decays(call.rows, call.by_row, with_gradients, parts) {
    const int64_t positions = tile_rows(CHUNK), keys = positions * key_stride, values = positions * value_stride;
    q = parts.take(keys), k = parts.take(keys), v = parts.take(values), u = call.beta ? parts.take(values) : v;
    started_ = parts.take(keys), pairs = parts.take(positions * CHUNK), scores = parts.take(positions * CHUNK);
    ended_ = parts.take(keys), beta = parts.take(CHUNK), minus_ = parts.take(CHUNK);
    const int64_t most = std::max({rows, columns, CHUNK});
    panels = parts.take(panels_floats(most, most));
    if (minus_) std::fill(minus_, minus_ + CHUNK, -1.0f);
  }
  int64_t state_floats() const { return tile_rows(rows) * value_stride; }

  // Loads a state of a tensor, its rows next to each other; null: zeros.
  NOINLINE void load_state(const float* from, float* to) const {
    memset(to, 0, state_floats() * sizeof(float));
    for (int64_t i = 0; from && i < rows; i++)
      memcpy(to + i * value_stride, from + i * columns, columns * sizeof(float));
  }
  NOINLINE void store_state(const float* from, float* to) const {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * columns, from + i * value_stride, columns * sizeof(float));
  }

  // Loads the keys of some positions, normalized, and the queries, normalized and scaled, where they are wanted.
  NOINLINE void load_keys(const Head& head, bool with_q) {
    const int64_t step = call_.key_heads * rows, first = head.position * step + head.key_head * rows;
    for (int64_t t = 0; t < head.count; t++) {
      const int64_t ahead = first + (t + AHEAD) * step;
      prefetch(call_.k, ahead, rows);
      if (with_q) prefetch(call_.q, ahead, rows);
      load_row(call_.k, first + t * step, k + t * key_stride, 1.0f);
      if (with_q) load_row(call_.q, first + t * step, q + t * key_stride, float(call_.scale));
    }
  }
  // Loads the values, decays and betas.
  NOINLINE void load_values(const Head& head) {
    count = head.count;
    load_of_values(call_.v, head, v);
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
    decays.products(k, k, key_stride, true, pairs, panels);
    decays.scale(decays.start, k, started_, key_stride, -1.0f);
    product(Matrix{started_, key_stride}.rows(), count, Matrix{state, value_stride}.transposed(), columns, rows, v,
            value_stride, true, panels);
    solve(false, v, u);
  }

  // Computes the rows of out, after write().
  NOINLINE void read(const float* state, float* out) {
    decays.products(q, k, key_stride, false, scores, panels);
    decays.scale(decays.start, q, started_, key_stride);
    product(Matrix{started_, key_stride}.rows(), count, Matrix{state, value_stride}.transposed(), columns, rows, out,
            value_stride, false, panels);
    product(Matrix{scores, CHUNK}.rows(), count, Matrix{u, value_stride}.transposed(), columns, count, out,
            value_stride, true, panels, LOWER);
  }

  // Computes the state after the chunk, after write().
  NOINLINE void advance(float* state) {
    decays.pass(state, value_stride);
    decays.scale(decays.end, k, ended_, key_stride);
    product(Matrix{ended_, key_stride}.transposed(), rows, Matrix{u, value_stride}.transposed(), columns, count, state,
            value_stride, true, panels);
  }

  // Solves z = x - pairs (beta z), or with the transposed pairs, in the place of x; `written` becomes beta z.
  NOINLINE void solve(bool transposed, float* z, float* written) {
    const int64_t blocks = divide_up(count, TILE_ROWS);
    for (int64_t number = 0; number < blocks; number++) {
      const int64_t first = (transposed ? blocks - 1 - number : number) * TILE_ROWS;
      const int64_t n = std::min<int64_t>(TILE_ROWS, count - first), after = first + n;
      float* own = z + first * value_stride;
      if (transposed && after < count) {
        const Matrix others{pairs + after * CHUNK + first, CHUNK, minus_};
        product(others.transposed(), n, Matrix{written + after * value_stride, value_stride}.transposed(), columns,
                count - after, own, value_stride, true, panels);
      } else if (!transposed && first) {
        const Matrix others{pairs + first * CHUNK, CHUNK, minus_};
        product(others.rows(), n, Matrix{written, value_stride}.transposed(), columns, first, own, value_stride, true,
                panels);
      }
      solve_block(transposed, first, n, own, written + first * value_stride);
    }
  }

 private:
  const LinearAttention& call_;

 public:
  const int64_t rows, columns, key_stride, value_stride;
  Decays decays;
  int64_t count = 0;
  float *q, *k, *v, *u, *pairs, *scores, *beta, *panels;

 private:
  float *started_, *ended_, *minus_;

  NOINLINE void solve_block(bool transposed, int64_t first, int64_t n, float* z, float* written) const {
    each(columns, [&](int64_t j, auto) {
      vfloat done[TILE_ROWS];
      for (int64_t i = 0; i < n; i++) {
        const int64_t t = transposed ? n - 1 - i : i;
        vfloat sum = load(z + t * value_stride + j);
        for (int64_t before = 0; before < i; before++) {
          const int64_t s = transposed ? n - 1 - before : before, row = transposed ? s : t, column = transposed ? t : s;
          sum = sum - done[before] * pairs[(first + row) * CHUNK + first + column];
        }
        store(z + t * value_stride + j, sum);
        done[i] = sum * beta[first + t];
        store(written + t * value_stride + j, done[i]);
      }
    });
  }

  // Asks for a row ahead of time, as each is in a page of its own. It may be beyond the tensor.
  INLINE void prefetch(const void* from, int64_t at, int64_t n) const {
    const int64_t size = size_of(call_.dtype);
    for (int64_t byte = 0; byte < n * size; byte += 64)
      __builtin_prefetch((const void*)(uintptr_t(from) + at * size + byte));
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
  // The factor that normalizes a row of q or k.
  static float rnorm_of(const float* row, int64_t rows) { return 1.0f / std::sqrt(dot(row, row, rows) + 1e-6f); }
};

}  // namespace
}  // namespace fusedops

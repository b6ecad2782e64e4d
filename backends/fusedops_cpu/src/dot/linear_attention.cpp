// Linear attention forward: in chunks, or for FEW positions one after another, when the state of a head is read and
// written once, in columns that fit into the L1 cache. Its gradients: linear_attention_backward.cpp.
#include "dot/linear_attention.h"

namespace fusedops {
namespace {

constexpr int64_t FEW = 8;                            // positions
constexpr int64_t TOGETHER = 8;                       // value heads, whose states stay in the L2 cache
constexpr int64_t WIDTH = LANES > 32 ? LANES : 32;    // columns of a block of a state: 128 rows are 16 KiB
constexpr int VECTORS = WIDTH / LANES;                // of a row of a block
constexpr int ROWS = VECTORS >= 8 ? 1 : 8 / VECTORS;  // at once: 8 sums, as each addition waits for the one before

// What a worker has in float32: `rows` is a multiple of ROWS, those past the end are 0.
struct Numbers {
  float *q, *k;             // (FEW, rows), normalized; q scaled
  float *factor, *decayed;  // (FEW, rows) of a decay of each row: exp(decay), and k times it
  float* state;             // (rows, WIDTH)
  static int64_t floats(int64_t rows) { return rows * (4 * FEW + WIDTH); }
  Numbers(float* memory, int64_t rows)
      : q(memory),
        k(q + FEW * rows),
        factor(k + FEW * rows),
        decayed(factor + FEW * rows),
        state(decayed + FEW * rows) {}
};

template <class T>
struct Heads {
  LinearAttention call;
  void* out;
  float* states;
  int64_t rows;      // padded
  int64_t together;  // value heads of one key head at once

  // Computes some value heads of one key head of one sequence.
  NOINLINE void operator()(int64_t n, int64_t first, int64_t last, float* memory) const {
    const int64_t start = call.bounds ? call.bounds[n] : n * call.positions;
    const int64_t end = call.bounds ? call.bounds[n + 1] : start + call.positions;
    const int64_t size = call.rows * call.columns, at = (n * call.heads + first) * size;
    const float* from = call.initial ? call.initial + at : nullptr;
    float* to = states + at;
    if (end - start > FEW) return in_chunks(start, end, first, last, from, to, memory);
    for (int64_t head = first; head < last; head++, to += size) {
      one_by_one(start, end - start, head, from, to, memory);
      if (from) from += size;
    }
  }

  static int64_t floats(const LinearAttention& call, int64_t rows, int64_t together) {
    Parts parts(nullptr);
    const Chunk chunk(call, false, parts);
    return std::max(Numbers::floats(rows), parts.floats() + together * chunk.state_floats() + chunk.value_floats());
  }

 private:
  NOINLINE void in_chunks(int64_t position, int64_t end, int64_t first, int64_t last, const float* from, float* to,
                          float* memory) const {
    Parts parts(memory);
    Chunk chunk(call, false, parts);
    const int64_t size = call.rows * call.columns, of_state = chunk.state_floats();
    float* const states = parts.take(together * of_state);
    float* const rows_of_out = parts.take(chunk.value_floats());
    for (int64_t n = 0; n < last - first; n++)
      chunk.load_state(from ? from + n * size : nullptr, states + n * of_state);
    for (; position < end; position += CHUNK) {
      Head here{position, std::min(CHUNK, end - position), first / (call.heads / call.key_heads), first};
      chunk.load_keys(here, true, true);
      for (float* state = states; here.head < last; here.head++, state += of_state) {
        chunk.load_values(here);
        chunk.write(state);
        chunk.read(state, rows_of_out);
        chunk.store_of_values(rows_of_out, here, out);
        chunk.advance(state, state);
      }
    }
    for (int64_t n = 0; n < last - first; n++) chunk.store_state(states + n * of_state, to + n * size);
  }

  // Computes a few positions of one value head.
  NOINLINE void one_by_one(int64_t position, int64_t count, int64_t head, const float* from, float* to,
                           float* memory) const {
    if (count <= 0) {
      const int64_t size = call.rows * call.columns;
      if (from)
        std::copy(from, from + size, to);
      else
        std::fill(to, to + size, 0.0f);
      return;
    }
    const Numbers numbers(memory, rows);
    prepare(numbers, position, count, head);
    for (int64_t column = 0; column < call.columns; column += WIDTH) {
      const int64_t columns = std::min(WIDTH, call.columns - column);
      Stretch stretch{numbers, position, count, head, column, columns, numbers.state, WIDTH, numbers.state, WIDTH};
      // a block of one position is read where it is, and written where it goes
      const bool in_place = count == 1 && from && columns == WIDTH && rows == call.rows;
      if (in_place) {
        stretch.from = from + column, stretch.to = to + column;
        stretch.from_step = stretch.to_step = call.columns;
      } else {
        take(numbers, from ? from + column : nullptr, columns);
      }
      if (call.by_row) {
        call.beta ? block<true, true>(stretch) : block<true, false>(stretch);
      } else {
        call.beta ? block<false, true>(stretch) : block<false, false>(stretch);
      }
      if (in_place) continue;
      for (int64_t i = 0; i < call.rows; i++)
        each(columns, [&](int64_t j, auto lanes) {
          store(to + i * call.columns + column + j, load(numbers.state + i * WIDTH + j, lanes), lanes);
        });
    }
  }

  // Some columns of the state for some positions.
  struct Stretch {
    const Numbers& numbers;
    int64_t position, count, head, column, columns;
    const float* from;  // the state before the first position
    int64_t from_step;
    float* to;  // after the last one
    int64_t to_step;
  };

  // Loads a block of a state; null: zeros.
  INLINE void take(const Numbers& numbers, const float* from, int64_t columns) const {
    memset(numbers.state, 0, rows * WIDTH * sizeof(float));
    if (!from) return;
    for (int64_t i = 0; i < call.rows; i++)
      each(columns, [&](int64_t j, auto lanes) {
        store(numbers.state + i * WIDTH + j, load(from + i * call.columns + j, lanes), lanes);
      });
  }

  NOINLINE void prepare(const Numbers& numbers, int64_t position, int64_t count, int64_t head) const {
    const int64_t key = head / (call.heads / call.key_heads), step = call.key_heads * call.rows;
    const T* q = (const T*)call.q + position * step + key * call.rows;
    const T* k = (const T*)call.k + position * step + key * call.rows;
    for (int64_t t = 0; t < count; t++) {
      row(q + t * step, numbers.q + t * rows, float(call.scale));
      row(k + t * step, numbers.k + t * rows, 1.0f);
      if (!call.by_row) continue;
      const float* decay = call.decay + ((position + t) * call.heads + head) * call.rows;
      for (int64_t i = 0; i < rows; i++) {
        numbers.factor[t * rows + i] = i < call.rows ? std::exp(decay[i]) : 0.0f;
        numbers.decayed[t * rows + i] = numbers.factor[t * rows + i] * numbers.k[t * rows + i];
      }
    }
  }

  // Loads a row of q or k, times a factor.
  INLINE void row(const T* from, float* to, float factor) const {
    std::fill(to + call.rows, to + rows, 0.0f);
    float squares = 0;
    each(call.rows, [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
    if (call.normalize) {
      vfloat sum = {};
      each(call.rows, [&](int64_t i, auto lanes) {
        const vfloat v = load(to + i, lanes);
        sum = sum + v * v;
      });
      for (int i = 0; i < LANES; i++) squares += sum[i];
      factor = factor / std::sqrt(squares + 1e-6f);
    }
    if (factor != 1.0f)
      each(call.rows, [&](int64_t i, auto lanes) { store(to + i, load(to + i, lanes) * factor, lanes); });
  }

  // Without the pragmas GCC keeps the sums in memory: one position of 16 heads of 128 took 53 us, with them 43.
  template <bool BY_ROW, bool BETA>
  NOINLINE void block(const Stretch& stretch) const {
    const Numbers& numbers = stretch.numbers;
    const int64_t position = stretch.position, head = stretch.head, columns = stretch.columns;
    const int64_t step = call.heads * call.columns, first = position * step + head * call.columns + stretch.column;
    const T* v = (const T*)call.v + first;
    T* out = (T*)this->out + first;
    float* const to = stretch.to;
    const float* from = stretch.from;
    int64_t from_step = stretch.from_step;
    const int64_t to_step = stretch.to_step;
    for (int64_t t = 0; t < stretch.count; t++) {
      const int64_t at = (position + t) * call.heads + head;
      const float* const q = numbers.q + t * rows;
      const float* const k = numbers.k + t * rows;
      const float* const factors = BY_ROW ? numbers.factor + t * rows : nullptr;
      const float factor = BY_ROW || !call.decay ? 1.0f : std::exp(call.decay[at]);
      float values[WIDTH] = {};
      each(columns, [&](int64_t j, auto lanes) { store(values + j, load(v + t * step + j, lanes), lanes); });
      vfloat u[VECTORS];
#pragma GCC unroll 8
      for (int w = 0; w < VECTORS; w++) u[w] = load(values + w * LANES);
      if constexpr (BETA) {
        vfloat sums[ROWS][VECTORS] = {};
        const float* const keys = BY_ROW ? numbers.decayed + t * rows : k;
        for (int64_t i = 0; i < rows; i += ROWS)
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int w = 0; w < VECTORS; w++)
              sums[r][w] = sums[r][w] + load(from + (i + r) * from_step + w * LANES) * keys[i + r];
        const float beta = call.beta[at];
#pragma GCC unroll 8
        for (int w = 0; w < VECTORS; w++) {
          vfloat sum = sums[0][w];
#pragma GCC unroll 8
          for (int r = 1; r < ROWS; r++) sum = sum + sums[r][w];
          u[w] = (u[w] - (BY_ROW ? sum : sum * factor)) * beta;
        }
      }
      vfloat sums[ROWS][VECTORS] = {};
      for (int64_t i = 0; i < rows; i += ROWS)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
          for (int w = 0; w < VECTORS; w++) {
            const vfloat before = load(from + (i + r) * from_step + w * LANES);
            const vfloat h = before * (BY_ROW ? factors[i + r] : factor) + u[w] * k[i + r];
            store(to + (i + r) * to_step + w * LANES, h);
            sums[r][w] = sums[r][w] + h * q[i + r];
          }
#pragma GCC unroll 8
      for (int w = 0; w < VECTORS; w++) {
        vfloat sum = sums[0][w];
#pragma GCC unroll 8
        for (int r = 1; r < ROWS; r++) sum = sum + sums[r][w];
        store(values + w * LANES, sum);
      }
      each(columns, [&](int64_t j, auto lanes) { store(out + t * step + j, load(values + j, lanes), lanes); });
      from = to;
      from_step = to_step;
    }
  }
};

template <class T>
Status forward(const LinearAttentionForward& all) {
  const LinearAttention& call = all.inputs;
  const int64_t count = call.bounds ? call.sequences : call.batch;
  const int64_t rows = divide_up(std::max<int64_t>(call.rows, 1), ROWS) * ROWS;
  if (call.bounds) {  // positions of no sequence are 0
    const int64_t step = call.heads * call.columns, last = call.bounds[call.sequences];
    memset((void*)all.out, 0, call.bounds[0] * step * sizeof(T));
    memset((void*)((T*)all.out + last * step), 0, (call.positions - last) * step * sizeof(T));
  }
  const int64_t work = call.positions * call.heads * call.rows * call.columns * (call.bounds ? 1 : call.batch);
  // the value heads of a key head share its products, but all threads have work
  const int64_t group = call.heads / call.key_heads, keys = std::max<int64_t>(1, count * call.key_heads);
  int64_t parts = std::max<int64_t>(divide_up(group, TOGETHER), divide_up(4 * workers_for(keys * group), keys));
  if (call.positions <= FEW || parts > group) parts = group;
  const int64_t together = divide_up(group, parts), tasks = count * call.key_heads * divide_up(group, together);
  const int64_t workers = work <= BLOCK ? 1 : workers_for(tasks);
  const Scratch scratch(workers, Heads<T>::floats(call, rows, together));
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Heads<T> heads{call, all.out, all.state, rows, together};
  const Scratch* const memory = &scratch;
  run_blocks(tasks, workers, [=](int64_t task, int64_t worker) {
    const int64_t group = heads.call.heads / heads.call.key_heads, parts = divide_up(group, heads.together);
    const int64_t key = task / parts, first = key % heads.call.key_heads * group + task % parts * heads.together;
    const int64_t last = std::min(first + heads.together, (key % heads.call.key_heads + 1) * group);
    heads(key / heads.call.key_heads, first, last, memory->of(worker));
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_linear_attention_forward(const LinearAttentionForward* call) {
  const LinearAttention& inputs = call->inputs;
  if (!are_sizes(inputs)) return INVALID;
  if (has_no_state(inputs)) return OK;
  return with_dtype(inputs.dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

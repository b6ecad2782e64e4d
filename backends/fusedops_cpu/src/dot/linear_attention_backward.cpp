// The gradients of linear attention, chunk by chunk from the last one. The states before each chunk are computed again
// first: what is kept is one state for each chunk of a sequence, not for each position, and of the heads at work alone.
//
// The value heads of one key head are cut into parts, whose number depends on the numbers of heads alone; the gradients
// of q and k are added up in the order of the heads. So the bits do not depend on the number of threads.
#include "dot/linear_attention.h"

namespace fusedops {
namespace {

constexpr int64_t ENOUGH = 16;  // parts of all key heads: for as many threads

// The buffers of a worker beside those of a chunk. Those of both halves have, for each position, a row of the query or
// of out, and a row of the key or of what the delta rule reads for it.
struct Gradients {
  float *du, *dq, *dk, *dbeta, *ended, *pairs;
  float *grad, *started, *plain_pairs;  // of both halves
  Gradients(const Chunk& chunk, Parts& parts) {
    const int64_t keys = CHUNK * chunk.key_stride, values = chunk.value_floats(), square = CHUNK * CHUNK;
    du = parts.take(values), dq = parts.take(keys), dk = parts.take(keys), dbeta = parts.take(CHUNK);
    ended = parts.take(keys), grad = parts.take(2 * values), started = parts.take(2 * keys);
    pairs = parts.take(square), plain_pairs = parts.take(2 * square);
  }
};

class Backward {
 public:
  explicit Backward(const LinearAttentionBackward& call) : call_(call), in_(call.inputs) {
    group_ = in_.heads / in_.key_heads;
    const int64_t parts = std::min(group_, std::max<int64_t>(1, ENOUGH / in_.key_heads));
    of_part_ = divide_up(group_, parts);
    parts_ = divide_up(group_, of_part_);
    int64_t longest = in_.positions;
    if (in_.bounds) {
      longest = 0;
      for (int64_t n = 0; n < in_.sequences; n++) longest = std::max(longest, in_.bounds[n + 1] - in_.bounds[n]);
    }
    most_chunks_ = std::max<int64_t>(1, divide_up(longest, CHUNK));
  }

  Status run() {
    const int64_t sequences = in_.bounds ? in_.sequences : in_.batch, tasks = sequences * in_.key_heads * parts_;
    const int64_t all = in_.batch * in_.positions * in_.key_heads * parts_ * in_.rows;
    const bool sums = parts_ > 1 && (call_.dq || call_.dk) && all;
    const FloatBuffer dq(sums ? all : 0), dk(sums ? all : 0);
    if (sums && (!dq.data() || !dk.data())) return OUT_OF_MEMORY;
    dq_parts_ = dq.data(), dk_parts_ = dk.data();
    Parts parts(nullptr);
    const Chunk chunk(in_, true, parts);
    const Gradients gradients(chunk, parts);
    const int64_t kept = of_part_ * ((most_chunks_ + 1) * chunk.state_floats() + most_chunks_ * kept_values(chunk)) +
                         most_chunks_ * kept_keys(chunk);
    const int64_t work = in_.batch * in_.positions * in_.heads * in_.rows * in_.columns;
    const int64_t workers = work <= BLOCK / 4 ? 1 : workers_for(tasks);
    const Scratch scratch(workers, parts.floats() + kept);
    if (scratch.failed()) return OUT_OF_MEMORY;
    const Backward* const self = this;
    const Scratch* const memory = &scratch;
    run_blocks(tasks, workers, [=](int64_t task, int64_t worker) {
      const int64_t part = task % self->parts_, key_head = task / self->parts_ % self->in_.key_heads;
      self->heads(task / self->parts_ / self->in_.key_heads, key_head, part, memory->of(worker));
    });
    if (sums) add_parts();
    return OK;
  }

 private:
  // Computes the gradients of some value heads of one key head in one sequence.
  NOINLINE void heads(int64_t n, int64_t key_head, int64_t part, float* memory) const {
    Parts parts(memory);
    Chunk chunk(in_, true, parts);
    const Gradients to(chunk, parts);
    const int64_t first = key_head * group_ + part * of_part_;
    const int64_t last = std::min(first + of_part_, (key_head + 1) * group_);
    const int64_t start = in_.bounds ? in_.bounds[n] : n * in_.positions;
    const int64_t end = in_.bounds ? in_.bounds[n + 1] : start + in_.positions;
    const int64_t chunks = divide_up(end - start, CHUNK), size = chunk.state_floats();
    const int64_t of_state = in_.rows * in_.columns;
    float* const states = parts.take((last - first) * (chunks + 1) * size);  // by head; of the last, its gradient
    const int64_t of_values = kept_values(chunk), of_keys = kept_keys(chunk);
    float* const values = parts.take((last - first) * chunks * of_values);
    float* const keys = parts.take(chunks * of_keys);
    for (int64_t head = first; head < last; head++) {
      float* const state = states + (head - first) * (chunks + 1) * size;
      const int64_t at = (n * in_.heads + head) * of_state;
      chunk.load_state(in_.initial ? in_.initial + at : nullptr, state);
      chunk.load_state(call_.grad_state ? call_.grad_state + at : nullptr, state + chunks * size);
    }
    for (int64_t number = 0; number < chunks; number++) {
      const bool is_last = number + 1 == chunks;
      Head here{start + number * CHUNK, std::min(CHUNK, end - start - number * CHUNK), key_head, first};
      take(chunk, keys + number * of_keys);
      chunk.load_keys(here, true, false);
      for (; here.head < last && (in_.beta || !is_last); here.head++) {
        float* const state = states + ((here.head - first) * (chunks + 1) + number) * size;
        if (of_values) chunk.v = values + ((here.head - first) * chunks + number) * of_values;
        chunk.load_values(here);
        chunk.write(state);
        if (!is_last) chunk.advance(state, state + size);
      }
    }
    for (int64_t number = chunks - 1; number >= 0; number--) {
      const int64_t position = start + number * CHUNK;
      Head here{position, std::min(CHUNK, end - position), key_head, first};
      take(chunk, keys + number * of_keys);
      chunk.load_keys(here, false, true);
      memset(to.dq, 0, here.count * chunk.key_stride * sizeof(float));
      memset(to.dk, 0, here.count * chunk.key_stride * sizeof(float));
      memset(to.plain_pairs, 0, 2 * CHUNK * CHUNK * sizeof(float));
      for (; here.head < last; here.head++) {
        float* const own = states + (here.head - first) * (chunks + 1) * size;
        if (of_values) chunk.v = values + ((here.head - first) * chunks + number) * of_values;
        chunk.load_values(here, !of_values);
        chunk.load_of_values(call_.grad, here, to.grad);
        of_chunk(chunk, to, own + number * size, own + chunks * size);
        store_gradients(chunk, to, here);
      }
      of_plain_pairs(chunk, to);
      here.head = first;
      store_keys(chunk, call_.dq, dq_parts_, to.dq, here, part);
      store_keys(chunk, call_.dk, dk_parts_, to.dk, here, part);
    }
    for (int64_t head = first; call_.dinitial && head < last; head++)
      chunk.store_state(states + ((head - first) * (chunks + 1) + chunks) * size,
                        call_.dinitial + (n * in_.heads + head) * of_state);
  }

  // The floats that are kept of a chunk: for each value head what write() leaves in v, and the keys and their products.
  int64_t kept_values(const Chunk& chunk) const { return in_.beta ? chunk.value_floats() : 0; }
  int64_t kept_keys(const Chunk& chunk) const { return chunk.key_floats() + CHUNK * CHUNK; }
  static void take(Chunk& chunk, float* kept) { chunk.k = kept, chunk.kk = kept + chunk.key_floats(); }

  // Computes the gradients of a chunk of one head, from the state before it and, in place, that of the state after it.
  NOINLINE void of_chunk(Chunk& chunk, const Gradients& to, const float* state, float* dstate) const {
    const int64_t count = chunk.count, rows = chunk.rows, columns = chunk.columns, half = chunk.half();
    const int64_t keys = chunk.key_stride, values = chunk.value_stride, of_both = in_.beta ? half + count : count;
    Decays& decays = chunk.decays;
    float* const of_read = to.grad + half * values;
    decays.clear_gradient();
    chunk.start_queries();
    if (in_.beta) {
      chunk.start_keys(), chunk.load_pairs(), chunk.load_written();
      clear_between(chunk.started, keys, count, half), clear_between(to.grad, values, count, half);
    }

    // of u: from the rows of out, and from the state after the chunk
    product({chunk.scores, CHUNK, true}, count, {to.grad, values}, columns, count, {to.du, values}, UPPER);
    decays.scale(decays.end, chunk.k, chunk.ended, keys);
    product({chunk.ended, keys}, count, {dstate, values}, columns, rows, added_to(to.du, values));
    if (in_.beta) {
      chunk.solve(true, to.du);
      for (int64_t t = 0; t < count; t++) to.dbeta[t] = dot(chunk.v + t * values, to.du + t * values, columns);
      chunk.times_beta(to.du, of_read);
    }

    // of q and k: from the state after the chunk, from that before it, and from the products of both
    product({chunk.u, values}, count, turned(dstate, values, rows, columns, chunk.panels), rows, columns,
            {to.ended, keys});
    decays.gradient_after(chunk.k, to.ended, keys, to.dk);
    if (in_.decay) decays.add_whole(state, dstate, values, columns);
    product({to.grad, values}, of_both, turned(state, values, rows, columns, chunk.panels), rows, columns,
            {to.started, keys});
    decays.gradient_up_to(chunk.q, to.started, keys, to.dq, 1.0f);
    if (in_.beta) decays.gradient_up_to(chunk.k, to.started + half * keys, keys, to.dk, -1.0f);
    of_pairs(chunk, to);

    product({chunk.started, keys, true}, rows, {to.grad, values}, columns, of_both,
            decays.passed(dstate, dstate, values));
    if (in_.decay) decays.finish_gradient();
  }

  // Computes the gradients of the scores, and of the pairs of the delta rule, from those of what is read with them.
  NOINLINE void of_pairs(Chunk& chunk, const Gradients& to) const {
    const int64_t count = chunk.count, values = chunk.value_stride;
    const Right written = turned(chunk.u, values, count, chunk.columns, chunk.panels);
    for (int64_t of_keys = 0; of_keys <= (in_.beta ? 1 : 0); of_keys++) {
      product({to.grad + of_keys * chunk.half() * values, values}, count, written, count, chunk.columns,
              {to.pairs, CHUNK}, WHOLE_SQUARE, true);
      chunk.decays.products_gradient(to.pairs, of_keys ? chunk.pairs : chunk.scores, of_keys ? chunk.k : chunk.q,
                                     chunk.k, chunk.key_stride, of_keys, to.plain_pairs + of_keys * CHUNK * CHUNK,
                                     of_keys ? to.dk : to.dq, to.dk);
    }
  }

  // Adds the gradients of q and k from those of their products without weights, which all heads have added up.
  NOINLINE void of_plain_pairs(const Chunk& chunk, const Gradients& to) const {
    if (in_.by_row) return;
    const int64_t count = chunk.count, rows = chunk.rows, keys = chunk.key_stride;
    const Right k{chunk.k, keys}, q{chunk.q, keys};
    const Into dq = added_to(to.dq, keys), dk = added_to(to.dk, keys);
    const float* const of_keys = to.plain_pairs + CHUNK * CHUNK;
    product({to.plain_pairs, CHUNK}, count, k, rows, count, dq, LOWER);
    product({to.plain_pairs, CHUNK, true}, count, q, rows, count, dk, UPPER);
    if (!in_.beta) return;
    product({of_keys, CHUNK}, count, k, rows, count, dk, LOWER);
    product({of_keys, CHUNK, true}, count, k, rows, count, dk, UPPER);
  }

  // Sets the rows between both halves to 0.
  static void clear_between(float* halves, int64_t stride, int64_t count, int64_t half) {
    std::fill(halves + count * stride, halves + half * stride, 0.0f);
  }

  // Writes the gradients of v, decay and beta.
  NOINLINE void store_gradients(const Chunk& chunk, const Gradients& to, const Head& here) const {
    const float* const dv = in_.beta ? to.grad + chunk.half() * chunk.value_stride : to.du;
    if (call_.dv) chunk.store_of_values(dv, here, call_.dv);
    const int64_t at = here.position * in_.heads + here.head, width = in_.by_row ? in_.rows : 1;
    for (int64_t t = 0; t < here.count; t++) {
      if (call_.dbeta) call_.dbeta[at + t * in_.heads] = to.dbeta[t];
      if (call_.ddecay)
        memcpy(call_.ddecay + (at + t * in_.heads) * width, chunk.decays.grad + t * chunk.decays.stride(),
               width * sizeof(float));
    }
  }

  // Writes the gradients of q or k, or those of one part of the heads.
  NOINLINE void store_keys(const Chunk& chunk, void* to, float* of_parts, const float* sums, const Head& here,
                           int64_t part) const {
    for (int64_t t = 0; to && t < here.count; t++) {
      const int64_t row = (here.position + t) * in_.key_heads + here.key_head;
      const int64_t ahead = (row + AHEAD * in_.key_heads) * in_.rows;
      if (!of_parts) chunk.prefetch<true>(to, ahead, in_.rows);
      if (!of_parts && in_.normalize) chunk.prefetch(to == call_.dq ? in_.q : in_.k, ahead, in_.rows);
      const float* const from = sums + t * chunk.key_stride;
      if (of_parts) {
        memcpy(of_parts + (row * parts_ + part) * in_.rows, from, in_.rows * sizeof(float));
      } else {
        store_key(to, row, from);
      }
    }
  }

  // Writes the gradient of a row of q or k from that of its normalized and scaled numbers.
  NOINLINE void store_key(void* to, int64_t row, const float* grad) const {
    const bool of_q = to == call_.dq;
    const float scale = of_q ? float(in_.scale) : 1.0f;
    with_dtype(in_.dtype, [&](auto element) {
      using T = decltype(element);
      const T* x = (const T*)(of_q ? in_.q : in_.k) + row * in_.rows;
      T* dx = (T*)to + row * in_.rows;
      vfloat squares = {}, products = {};
      if (in_.normalize)
        each(in_.rows, [&](int64_t i, auto lanes) {
          const vfloat value = load(x + i, lanes);
          squares = squares + value * value;
          products = products + value * load(grad + i, lanes);
        });
      const float rnorm = in_.normalize ? 1.0f / std::sqrt(sum_of(squares) + 1e-6f) : 1.0f;
      const float along = sum_of(products) * rnorm * rnorm * scale, factor = rnorm * scale;
      each(in_.rows, [&](int64_t i, auto lanes) {
        vfloat value = load(grad + i, lanes) * factor;
        if (in_.normalize) value = value - load(x + i, lanes) * rnorm * along;
        store(dx + i, value, lanes);
      });
    });
  }

  // Adds up the gradients of q and k of all parts.
  void add_parts() const {
    const int64_t first = in_.bounds ? in_.bounds[0] : 0;
    const int64_t last = in_.bounds ? in_.bounds[in_.sequences] : in_.batch * in_.positions;
    const Backward* const self = this;
    const int64_t rows = (last - first) * in_.key_heads, of_block = std::max<int64_t>(1, BLOCK / in_.rows);
    run_blocks(divide_up(rows, of_block), [=](int64_t block) {
      const int64_t start = first * self->in_.key_heads;
      for (int64_t row = block * of_block; row < std::min(rows, (block + 1) * of_block); row++) {
        if (self->call_.dq) self->add_parts_of(self->call_.dq, self->dq_parts_, start + row);
        if (self->call_.dk) self->add_parts_of(self->call_.dk, self->dk_parts_, start + row);
      }
    });
  }
  NOINLINE void add_parts_of(void* to, float* of_parts, int64_t row) const {
    float* const sums = of_parts + row * parts_ * in_.rows;
    for (int64_t part = 1; part < parts_; part++)
      each(in_.rows, [&](int64_t i, auto lanes) {
        store(sums + i, load(sums + i, lanes) + load(sums + part * in_.rows + i, lanes), lanes);
      });
    store_key(to, row, sums);
  }

  const LinearAttentionBackward& call_;
  const LinearAttention& in_;
  int64_t group_, of_part_, parts_, most_chunks_;
  float *dq_parts_ = nullptr, *dk_parts_ = nullptr;
};

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_linear_attention_backward(const LinearAttentionBackward* call) {
  const LinearAttention& inputs = call->inputs;
  if (!are_sizes(inputs)) return INVALID;
  if (!inputs.heads || (!inputs.bounds && !inputs.batch)) return OK;
  return Backward(*call).run();
}

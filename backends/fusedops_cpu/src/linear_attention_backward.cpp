// The gradients of linear attention, chunk by chunk from the last one. The states before each chunk are computed again
// first: what is kept is one state for each chunk of a sequence, not for each position, and of the heads at work alone.
//
// The value heads of one key head are cut into parts, whose number depends on the numbers of heads alone; the gradients
// of q and k are added up in the order of the heads. So the bits do not depend on the number of threads.
#include "linear_attention.h"

namespace fusedops {
namespace {

constexpr int64_t ENOUGH = 16;  // parts of all key heads: for as many threads

// The buffers of a worker beside those of a chunk.
struct Gradients {
  float *grad, *du, *dv, *dq, *dk, *read, *dq_sum, *dk_sum, *pairs, *dbeta;
  Gradients(const Chunk& chunk, Parts& parts) {
    const int64_t positions = tile_rows(CHUNK), keys = positions * chunk.key_stride;
    const int64_t values = positions * chunk.value_stride;
    grad = parts.take(values), du = parts.take(values), dv = parts.take(values);
    dq = parts.take(keys), dk = parts.take(keys), read = parts.take(keys);
    dq_sum = parts.take(keys), dk_sum = parts.take(keys);
    pairs = parts.take(positions * CHUNK), dbeta = parts.take(CHUNK);
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
    const int64_t states = of_part_ * (most_chunks_ + 1) * chunk.state_floats();
    const int64_t work = in_.batch * in_.positions * in_.heads * in_.rows * in_.columns;
    const int64_t workers = work <= BLOCK / 4 ? 1 : workers_for(tasks);
    const Scratch scratch(workers, parts.floats() + states);
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
    for (int64_t head = first; head < last; head++) {
      float* state = states + (head - first) * (chunks + 1) * size;
      const int64_t at = (n * in_.heads + head) * of_state;
      chunk.load_state(in_.initial ? in_.initial + at : nullptr, state);
      for (int64_t number = 0; number + 1 < chunks; number++, state += size) {
        const Head here{start + number * CHUNK, CHUNK, key_head, head};
        chunk.load_keys(here, false);
        chunk.load_values(here);
        chunk.write(state);
        memcpy(state + size, state, size * sizeof(float));
        chunk.advance(state + size);
      }
      float* const dstate = states + ((head - first) * (chunks + 1) + chunks) * size;
      chunk.load_state(call_.grad_state ? call_.grad_state + at : nullptr, dstate);
    }
    for (int64_t number = chunks - 1; number >= 0; number--) {
      const int64_t position = start + number * CHUNK;
      Head here{position, std::min(CHUNK, end - position), key_head, first};
      chunk.load_keys(here, true);
      memset(to.dq_sum, 0, here.count * chunk.key_stride * sizeof(float));
      memset(to.dk_sum, 0, here.count * chunk.key_stride * sizeof(float));
      for (; here.head < last; here.head++) {
        float* const own = states + (here.head - first) * (chunks + 1) * size;
        chunk.load_values(here);
        chunk.load_of_values(call_.grad, here, to.grad);
        of_chunk(chunk, to, own + number * size, own + chunks * size);
        add(to.dq, to.dq_sum, here.count * chunk.key_stride);
        add(to.dk, to.dk_sum, here.count * chunk.key_stride);
        store_gradients(chunk, to, here);
      }
      here.head = first;
      store_keys(chunk, call_.dq, dq_parts_, to.dq_sum, here, part);
      store_keys(chunk, call_.dk, dk_parts_, to.dk_sum, here, part);
    }
    for (int64_t head = first; call_.dinitial && head < last; head++)
      chunk.store_state(states + ((head - first) * (chunks + 1) + chunks) * size,
                        call_.dinitial + (n * in_.heads + head) * of_state);
  }

  // Computes the gradients of a chunk of one head, from the state before it and, in place, that of the state after it.
  NOINLINE void of_chunk(Chunk& chunk, const Gradients& to, const float* state, float* dstate) const {
    const int64_t count = chunk.count, rows = chunk.rows, columns = chunk.columns;
    const int64_t keys = chunk.key_stride, values = chunk.value_stride;
    Decays& decays = chunk.decays;
    float* const panels = chunk.panels;
    const Matrix grad{to.grad, values}, u{chunk.u, values}, before{state, values}, after{dstate, values};
    chunk.write(state);
    decays.clear_gradient();
    decays.products(chunk.q, chunk.k, keys, false, chunk.scores, panels);

    // of u: from the rows of out, and from the state after the chunk
    product(Matrix{chunk.scores, CHUNK}.transposed(), count, grad.transposed(), columns, count, to.du, values, false,
            panels, UPPER);
    decays.scale(decays.end, chunk.k, to.read, keys);
    product(Matrix{to.read, keys}.rows(), count, after.transposed(), columns, rows, to.du, values, true, panels);

    // of q and k: from the state before the chunk, from that after it, and from the products of both
    product(grad.rows(), count, before.rows(), rows, columns, to.dq, keys, false, panels);
    decays.scale(decays.start, to.dq, to.dq, keys);
    if (in_.decay) decays.add_up_to(chunk.q, to.dq, keys);
    product(u.rows(), count, after.rows(), rows, columns, to.dk, keys, false, panels);
    decays.scale(decays.end, to.dk, to.dk, keys);
    if (in_.decay) decays.add_after(chunk.k, to.dk, keys);
    if (in_.decay) decays.add_whole(state, dstate, values, columns);
    product(grad.rows(), count, u.rows(), count, columns, to.pairs, CHUNK, false, panels, WHOLE_SQUARE, true);
    clear_above(to.pairs, count, 1);
    decays.products_gradient(to.pairs, chunk.scores, chunk.q, chunk.k, keys, to.dq, to.dk, panels);

    decays.pass(dstate, values);
    decays.scale(decays.start, chunk.q, to.read, keys);
    product(Matrix{to.read, keys}.transposed(), rows, grad.transposed(), columns, count, dstate, values, true, panels);
    if (in_.beta) of_delta_rule(chunk, to, before, dstate);
    if (in_.decay) decays.finish_gradient();
  }

  // The same for what the delta rule reads from the state.
  NOINLINE void of_delta_rule(Chunk& chunk, const Gradients& to, const Matrix& before, float* dstate) const {
    const int64_t count = chunk.count, rows = chunk.rows, columns = chunk.columns;
    const int64_t keys = chunk.key_stride, values = chunk.value_stride;
    Decays& decays = chunk.decays;
    float* const panels = chunk.panels;
    chunk.solve(true, to.du, to.dv);
    for (int64_t t = 0; t < count; t++) to.dbeta[t] = dot(chunk.v + t * values, to.du + t * values, columns);
    float minus[CHUNK];
    std::fill(minus, minus + CHUNK, -1.0f);
    const Matrix dread{to.dv, values, minus};
    product(dread.rows(), count, before.rows(), rows, columns, to.read, keys, false, panels);
    decays.scale(decays.start, to.read, to.read, keys);
    if (in_.decay) decays.add_up_to(chunk.k, to.read, keys);
    add(to.read, to.dk, count * keys);
    product(dread.rows(), count, Matrix{chunk.u, values}.rows(), count, columns, to.pairs, CHUNK, false, panels,
            WHOLE_SQUARE, true);
    clear_above(to.pairs, count, 0);
    decays.products_gradient(to.pairs, chunk.pairs, chunk.k, chunk.k, keys, to.dk, to.dk, panels);
    decays.scale(decays.start, chunk.k, to.read, keys);
    product(Matrix{to.read, keys}.transposed(), rows, dread.transposed(), columns, count, dstate, values, true, panels);
  }

  // Sets what each row has after its first t + more numbers to 0.
  static void clear_above(float* pairs, int64_t count, int64_t more) {
    for (int64_t t = 0; t < count; t++) std::fill(pairs + t * CHUNK + t + more, pairs + (t + 1) * CHUNK, 0.0f);
  }

  static void add(const float* x, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, load(to + i) + load(x + i));
  }

  // Writes the gradients of v, decay and beta.
  NOINLINE void store_gradients(const Chunk& chunk, const Gradients& to, const Head& here) const {
    if (call_.dv) chunk.store_of_values(in_.beta ? to.dv : to.du, here, call_.dv);
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

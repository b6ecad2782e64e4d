// Attention to the keys that each query chooses, and its gradients.
//
// The keys of a query that a position or a mask hides are left out, and the others are those of pages of one key: so a
// row is what the functions of dot/attention_few.h make of these keys in the order of the indices, whatever the other
// rows are. A key is read once for the heads that share it.
//
// In backward, p and ds of some queries are kept. Then each part of the keys adds up its gradients over these queries,
// in the order of queries, indices and heads: no bits depend on the number of threads.
#pragma once

#include <atomic>

#include "dot/attention_few.h"
#include "once.h"

namespace fusedops {
namespace {

constexpr int64_t QUERIES = 8;            // of a block
constexpr int64_t KEPT_FLOATS = 1 << 20;  // of the queries between both steps of backward

// The rows of a call that see the same keys: some heads of a query that share a key head.
class ChosenRows {
 public:
  ChosenRows(const AttentionSizes& call, const ChosenKeys& keys, const uint8_t* mask)
      : call(call),
        chosen(keys),
        group(call.heads / call.key_heads),
        heads(mask && call.mask_head && group > 1 ? 1 : group),
        room(divide_up(std::max<int64_t>(1, std::max(call.size, call.value_size)), LANES) * LANES),
        row(round_up(std::max<int64_t>(1, keys.count), LANES) + LANES),
        mask_(mask) {}

  // Writes the keys that `heads` heads from `head` on see. Returns their number, -1 where an index is no key.
  int64_t keys_of(int64_t batch, int64_t head, int64_t query, int64_t* to) const {
    const int64_t place = batch * chosen.batch + head / group * chosen.head + query * chosen.query;
    const int64_t low = query + call.low, high = query + call.high;
    const uint8_t* mask =
        mask_ ? mask_ + batch * call.mask_batch + head * call.mask_head + query * call.mask_query : nullptr;
    int64_t n = 0;
    for (int64_t i = 0; i < chosen.count; i++) {
      const int64_t at = place + i * chosen.key;
      const int64_t key = chosen.bytes == 8 ? read_once((const int64_t*)chosen.indices + at)
                                            : read_once((const int32_t*)chosen.indices + at);
      if (key < -1 || key >= call.keys) return -1;
      if (key < 0 || key < low || key > high || (mask && mask[key * call.mask_key])) continue;
      to[n++] = key;
    }
    return n;
  }
  int64_t products() const {
    return call.batch * call.heads * call.queries * chosen.count * (call.size + call.value_size);
  }
  int64_t key_offset(int64_t batch, int64_t head) const { return batch * call.k_batch + head / group * call.k_head; }
  int64_t value_offset(int64_t batch, int64_t head) const { return batch * call.v_batch + head / group * call.v_head; }
  int64_t query_offset(int64_t batch, int64_t head, int64_t query) const {
    return batch * call.q_batch + head * call.q_head + query * call.q_position;
  }
  int64_t out_offset(int64_t batch, int64_t head, int64_t query) const {
    return batch * call.out_batch + head * call.out_head + query * call.out_position;
  }
  int64_t lse_offset(int64_t batch, int64_t head, int64_t query) const {
    return (batch * call.heads + head) * call.queries + query;
  }

  const AttentionSizes& call;
  const ChosenKeys& chosen;
  const int64_t group, heads, room, row;  // row: floats of the scores of a row

 private:
  const uint8_t* mask_;
};

// The sizes of a call of the functions of few queries for one query and `n` keys.
inline AttentionSizes sizes_of_query(const ChosenRows& rows, int64_t n) {
  AttentionSizes sizes{};
  const AttentionSizes& call = rows.call;
  sizes.dtype = call.dtype, sizes.batch = sizes.queries = sizes.key_heads = 1, sizes.heads = rows.heads;
  sizes.keys = n, sizes.size = call.size, sizes.value_size = call.value_size;
  sizes.q_head = call.q_head, sizes.out_head = call.out_head;
  sizes.low = -1, sizes.high = n, sizes.scale = call.scale;
  return sizes;
}

// Keys and values of a head, in pages of one.
inline PagedAttention pages_of_head(const ChosenRows& rows, const void* k, const void* v, int64_t batch, int64_t head) {
  PagedAttention pages{};
  const AttentionSizes& call = rows.call;
  const int64_t itemsize = size_of(call.dtype);
  pages.k = (const char*)k + rows.key_offset(batch, head) * itemsize;
  pages.v = (const char*)v + rows.value_offset(batch, head) * itemsize;
  pages.page = 1, pages.k_page = call.k_position, pages.v_page = call.v_position;
  return pages;
}

template <class T>
Status sparse_forward(const SparseAttention& of) {
  const ChosenRows layout(of.sizes, of.chosen, of.mask);
  const ChosenRows* rows = &layout;
  const AttentionSizes& call = of.sizes;
  const int64_t groups = call.heads / layout.heads, blocks = divide_up(call.queries, QUERIES);
  const int64_t items = call.batch * groups * blocks;
  const int64_t workers = layout.products() <= SMALL ? 1 : workers_for(items);
  const int64_t table = 2 * std::max<int64_t>(1, of.chosen.count), kept = ROWS * layout.room;
  const int64_t floats = ROWS * (2 * layout.room + PART) + ROWS * PART / 4;
  const Scratch memory(workers, table + kept + floats + layout.heads);
  if (memory.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &memory;
  const SparseAttention* a = &of;
  std::atomic<int> failed{OK}, *failure = &failed;
  run_blocks(items, workers, [=](int64_t item, int64_t worker) {
    const AttentionSizes& call = a->sizes;
    const int64_t batch = item / blocks / groups, head = item / blocks % groups * rows->heads;
    const int64_t itemsize = size_of(call.dtype), first_query = item % blocks * QUERIES;
    auto* keys = (int64_t*)buffers->of(worker);
    float *values = buffers->of(worker) + table, *buffer = values + kept, *lse = buffer + floats;
    const PagedAttention pages = pages_of_head(*rows, a->k, a->v, batch, head);
    const Paged<T> in_memory{pages, keys, {}, {}};
    for (int64_t query = first_query; query < std::min(call.queries, first_query + QUERIES); query++) {
      const int64_t n = rows->keys_of(batch, head, query, keys);
      if (n < 0) return failure->store(NO_SUCH_KEY);
      AttentionForward one{};
      one.q = (const char*)a->q + rows->query_offset(batch, head, query) * itemsize;
      one.sizes = sizes_of_query(*rows, n);
      const Attention<Paged<T>> attention(one, in_memory);
      void* out = (char*)a->out + rows->out_offset(batch, head, query) * itemsize;
      for (int64_t first = 0; first < rows->heads; first += ROWS) {
        const int64_t count = std::min(ROWS, rows->heads - first);
        State states[ROWS];
        attention.compute(0, first, count, 0, attention.parts, buffer, states, values);
        attention.AttentionRows::template finish<T>(0, first, count, states, values, attention.room(), out, lse);
      }
      for (int64_t r = 0; r < rows->heads; r++) a->lse[rows->lse_offset(batch, head + r, query)] = lse[r];
    }
  });
  return Status(failed.load());
}

// One key head of a batch entry, or one head of it where heads have masks of their own.
class SparseGradients {
 public:
  explicit SparseGradients(const SparseAttentionBackward& of)
      : of_(of), rows_(of.sizes, of.chosen, of.mask), call_(of.sizes) {
    of_query_ = rows_.heads * (2 * rows_.row + 2 * rows_.room) + 2 * std::max<int64_t>(1, of.chosen.count);
    queries_ = std::min(call_.queries, std::max<int64_t>(1, KEPT_FLOATS / of_query_));
  }

  Status run() {
    const int64_t products = 3 * rows_.products(), keys = call_.keys;
    const int64_t most = products <= SMALL ? 1 : workers_for(INT32_MAX);
    const int64_t pointers = 2 * std::max<int64_t>(1, of_.chosen.count) * 2;  // floats of two tables of addresses
    const Scratch scratch(most, pointers + rows_.heads * rows_.room);
    const FloatBuffer kept(queries_ * of_query_), sums(keys * (call_.size + call_.value_size) + 1);
    const Buffer<int64_t> numbers(queries_);
    if (scratch.failed() || !kept.data() || !sums.data() || !numbers.data()) return OUT_OF_MEMORY;
    std::atomic<int> failed{OK}, *failure = &failed;
    const SparseGradients* self = this;
    float *of_queries = kept.data(), *of_keys = sums.data();
    int64_t* counts = numbers.data();
    const Scratch* buffers = &scratch;
    const int64_t groups = call_.heads / rows_.heads, shared = rows_.group / rows_.heads;
    for (int64_t at = 0; at < call_.batch * groups; at++) {
      const int64_t batch = at / groups, head = at % groups * rows_.heads;
      if (at % groups % shared == 0) memset(of_keys, 0, keys * (call_.size + call_.value_size) * sizeof(float));
      for (int64_t first = 0; first < call_.queries; first += queries_) {
        const int64_t count = std::min(queries_, call_.queries - first);
        run_blocks(
            divide_up(count, QUERIES), std::min(most, divide_up(count, QUERIES)), [=](int64_t block, int64_t worker) {
              for (int64_t i = block * QUERIES; i < std::min(count, (block + 1) * QUERIES); i++) {
                counts[i] =
                    self->of_query(batch, head, first + i, of_queries + i * self->of_query_, buffers->of(worker));
                if (counts[i] < 0) counts[i] = 0, failure->store(NO_SUCH_KEY);
              }
            });
        const int64_t parts = std::min(keys, most == 1 ? 1 : 2 * most);
        run_blocks(parts, std::min(most, parts), [=](int64_t part, int64_t) {
          self->add_to_keys(keys * part / parts, keys * (part + 1) / parts, count, counts, of_queries, of_keys);
        });
      }
      if (at % groups % shared == shared - 1) {
        const int64_t key_head = head / rows_.group, blocks = divide_up(keys, PART);
        run_blocks(blocks, std::min(most, blocks), [=](int64_t block, int64_t) {
          self->write(batch, key_head, block * PART, std::min(keys, (block + 1) * PART), of_keys);
        });
      }
    }
    return Status(failed.load());
  }

 private:
  // What is kept of a query: p, ds, q and grad of its rows, and the keys.
  struct Kept {
    float *p, *ds, *q, *grad;
    int64_t* keys;
  };
  Kept kept_of(float* of_query) const {
    const int64_t scores = rows_.heads * rows_.row, numbers = rows_.heads * rows_.room;
    return {of_query, of_query + scores, of_query + 2 * scores, of_query + 2 * scores + numbers,
            (int64_t*)(of_query + 2 * scores + 2 * numbers)};
  }

  // Computes p, ds and dq of a query. Returns the number of its keys.
  int64_t of_query(int64_t batch, int64_t head, int64_t query, float* memory, float* buffer) const {
    const Kept kept = kept_of(memory);
    const int64_t n = rows_.keys_of(batch, head, query, kept.keys), room = rows_.room, row = rows_.row;
    if (n < 0) return n;
    const void** keys = (const void**)buffer;
    const void** values = keys + std::max<int64_t>(1, of_.chosen.count);
    float* dq = buffer + 4 * std::max<int64_t>(1, of_.chosen.count);
    for (int64_t i = 0; i < n; i++) {
      keys[i] = at(of_.k, rows_.key_offset(batch, head) + kept.keys[i] * call_.k_position);
      values[i] = at(of_.v, rows_.value_offset(batch, head) + kept.keys[i] * call_.v_position);
    }
    std::fill(kept.q, kept.q + 2 * rows_.heads * room, 0.0f);
    for (int64_t r = 0; r < rows_.heads; r++) {
      load_as(call_.dtype, at(of_.q, rows_.query_offset(batch, head + r, query)), kept.q + r * room, call_.size);
      load_as(call_.dtype, at(of_.grad, rows_.out_offset(batch, head + r, query)), kept.grad + r * room,
              call_.value_size);
    }
    multiply(kept.q, keys, n, call_.size, kept.p);
    multiply(kept.grad, values, n, call_.value_size, kept.ds);
    AttentionForward one{};
    one.sizes = sizes_of_query(rows_, n);
    const PagedAttention pages{};
    const Paged<float> in_memory{pages, kept.keys, {}, {}};
    const Attention<Paged<float>> attention(one, in_memory);  // weights have no dtype
    for (int64_t r = 0; r < rows_.heads && n; r++) {
      float *p = kept.p + r * row, *ds = kept.ds + r * row;
      const State state = attention.weigh(p, nullptr, n);
      const float factor = 1.0f / state.sum, scale = attention.scale;
      vfloat sums = {};
      each(n, [&](int64_t i, auto lanes) {
        const vfloat weights = load(p + i, lanes) * factor;
        store(p + i, weights, lanes);
        sums += weights * load(ds + i, lanes);
      });
      const float of_lse = of_.grad_lse ? of_.grad_lse[rows_.lse_offset(batch, head + r, query)] : 0.0f;
      const float delta = sum_of(sums) - of_lse;
      each(n, [=](int64_t i, auto lanes) {
        store(ds + i, (load(ds + i, lanes) - delta) * load(p + i, lanes) * scale, lanes);
      });
    }
    if (!of_.dq) return n;
    std::fill(dq, dq + rows_.heads * room, 0.0f);
    with_dtype(call_.dtype, [=](auto element) {
      using Rows = typename Paged<decltype(element)>::Rows;
      for (int64_t at = 0; at < n; at += AT_ONCE)
        add_values_of_rows(rows_.heads, kept.ds + at, nullptr, row, Rows{(const decltype(element)**)keys + at},
                           std::min(AT_ONCE, n - at), call_.size, dq, room);
    });
    for (int64_t r = 0; r < rows_.heads; r++)
      store_as(call_.dtype,
               (void*)at(of_.dq, batch * of_.dq_batch + (head + r) * of_.dq_head + query * of_.dq_position),
               dq + r * room, call_.size);
    return n;
  }

  const void* at(const void* tensor, int64_t offset) const {
    return (const char*)tensor + offset * size_of(call_.dtype);
  }
  void multiply(const float* numbers, const void** keys, int64_t n, int64_t size, float* products) const {
    const int64_t room = rows_.room, row = rows_.row;
    with_dtype(call_.dtype, [=](auto element) {
      const typename Paged<decltype(element)>::Rows rows{(const decltype(element)**)keys};
      for (int64_t at = 0; at < n; at += LANES)
        each_few(rows_.heads, [=](int64_t r, auto number) {
          scores_of<decltype(number)::value>(numbers + r * room, room, rows.from(at), std::min<int64_t>(LANES, n - at),
                                             size, products + r * row + at, row);
        });
    });
  }

  // Adds what some queries have for the keys [begin, end).
  void add_to_keys(int64_t begin, int64_t end, int64_t count, const int64_t* counts, float* of_queries,
                   float* of_keys) const {
    float *dk = of_keys, *dv = of_keys + call_.keys * call_.size;
    for (int64_t query = 0; query < count; query++) {
      const Kept kept = kept_of(of_queries + query * of_query_);
      for (int64_t i = 0; i < counts[query]; i++) {
        const int64_t key = kept.keys[i];
        if (key < begin || key >= end) continue;
        if (of_.dk) add_rows(kept.ds + i, kept.q, call_.size, dk + key * call_.size);
        if (of_.dv) add_rows(kept.p + i, kept.grad, call_.value_size, dv + key * call_.value_size);
      }
    }
  }
  void add_rows(const float* weights, const float* numbers, int64_t size, float* to) const {
    each(size, [=](int64_t d, auto lanes) {
      vfloat sums = load(to + d, lanes);
      for (int64_t r = 0; r < rows_.heads; r++) sums += load(numbers + r * rows_.room + d) * weights[r * rows_.row];
      store(to + d, sums, lanes);
    });
  }

  void write(int64_t batch, int64_t head, int64_t begin, int64_t end, const float* of_keys) const {
    const float *dk = of_keys, *dv = of_keys + call_.keys * call_.size;
    const int64_t of_k = batch * of_.dk_batch + head * of_.dk_head, of_v = batch * of_.dv_batch + head * of_.dv_head;
    for (int64_t key = begin; key < end; key++) {
      if (of_.dk)
        store_as(call_.dtype, (void*)at(of_.dk, of_k + key * of_.dk_position), dk + key * call_.size, call_.size);
      if (of_.dv)
        store_as(call_.dtype, (void*)at(of_.dv, of_v + key * of_.dv_position), dv + key * call_.value_size,
                 call_.value_size);
    }
  }

  const SparseAttentionBackward& of_;
  const ChosenRows rows_;
  const AttentionSizes& call_;
  int64_t of_query_, queries_;
};

inline bool fits(const AttentionSizes& call, const ChosenKeys& chosen) {
  return fits(call) && (chosen.bytes == 4 || chosen.bytes == 8) && chosen.count >= 0 &&
         (!chosen.count || chosen.indices);
}

}  // namespace
}  // namespace fusedops

// Attention of packed sequences whose keys and values are in pages, in their own dtype or in codes of 8 bits.
//
// Each sequence is one call of the functions of dot/attention_few.h: codes are read where they lie, once for all heads
// that share them. The scale of a key multiplies its score, that of a value its weight. And attention to chosen keys,
// here too, as it has the same instances of these functions.
#include <atomic>

#include "simd/codes.h"
// after the loads of codes, which it uses
#include "dot/attention_few.h"

namespace fusedops {
namespace {

// The scales of the numbers of a cache; null: none.
struct Scales {
  const float* first;
  int64_t page, token, head;
};

// Multiplies each of some rows of n numbers, PART apart, by the scales at `offset`.
NOINLINE void multiply_rows(float* to, int64_t rows, const float* const* scales, int64_t offset, int64_t n) {
  float of_head[PART + LANES];
  for (int64_t i = 0; i < n; i++) of_head[i] = scales[i][offset];
  for (int64_t row = 0; row < rows; row++)
    each(n, [=, to = to + row * PART, from = of_head](int64_t i, auto lanes) {
      store(to + i, load(to + i, lanes) * load(from + i, lanes), lanes);
    });
}

template <class T>
struct Paged {
  using Key = T;
  struct Rows {
    const T* const* each;
    int64_t offset = 0;
    INLINE const T* operator[](int64_t i) const { return each[i] + offset; }
    INLINE Rows from(int64_t i) const { return {each + i, offset}; }
  };
  struct Part {
    const Paged& of;
    const int64_t first_head;
    const T *of_keys[PART], *of_values[PART];  // of head 0
    const float *key_scales[PART], *value_scales[PART];

    Part(const Paged& of, const AttentionRows& rows, int64_t pair, int64_t start, int64_t n)
        : of(of), first_head(pair * rows.together % rows.call.key_heads) {
      const PagedAttention& call = of.call;
      int64_t place = start / call.page, token = start % call.page;
      for (int64_t i = 0; i < n; i++) {
        const int64_t page = of.table[place];
        of_keys[i] = (const T*)call.k + page * call.k_page + token * call.k_token;
        of_values[i] = (const T*)call.v + page * call.v_page + token * call.v_token;
        if (of.k_scale.first) {
          key_scales[i] = of.k_scale.first + page * of.k_scale.page + token * of.k_scale.token;
          value_scales[i] = of.v_scale.first + page * of.v_scale.page + token * of.v_scale.token;
        }
        if (++token == call.page) place++, token = 0;
      }
    }
    Rows keys(int64_t head) const { return {of_keys, (first_head + head) * of.call.k_head}; }
    Rows values(int64_t head) const { return {of_values, (first_head + head) * of.call.v_head}; }
    void scale_scores(int64_t head, float* scores, int64_t rows, int64_t n) const {
      if (of.k_scale.first) multiply_rows(scores, rows, key_scales, (first_head + head) * of.k_scale.head, n);
    }
    void scale_weights(int64_t head, float* weights, int64_t rows, int64_t n) const {
      if (of.k_scale.first) multiply_rows(weights, rows, value_scales, (first_head + head) * of.v_scale.head, n);
    }
  };
  const PagedAttention& call;
  const int64_t* table;  // of the sequence
  Scales k_scale, v_scale;
};

}  // namespace
}  // namespace fusedops

#include "dot/attention_sparse.h"

namespace fusedops {
namespace {

// The sizes of a sequence; its queries and keys are those of a batch of 1.
AttentionSizes sizes_of(const PagedAttention& call, int64_t sequence) {
  const int64_t queries = call.bounds[sequence + 1] - call.bounds[sequence], keys = call.lengths[sequence];
  AttentionSizes sizes{};
  sizes.dtype = call.dtype, sizes.batch = 1, sizes.heads = call.heads, sizes.key_heads = call.key_heads;
  sizes.queries = queries, sizes.keys = keys, sizes.size = call.size, sizes.value_size = call.value_size;
  sizes.q_head = call.q_head, sizes.q_position = call.q_token;
  sizes.k_head = call.k_head, sizes.k_position = call.k_token;
  sizes.v_head = call.v_head, sizes.v_position = call.v_token;
  sizes.out_head = call.value_size, sizes.out_position = call.heads * call.value_size;
  const int64_t diagonal = call.causal == 1 ? 0 : keys - queries;
  sizes.low = call.left < 0 ? -queries : diagonal - call.left;
  sizes.high = call.causal ? diagonal : call.right < 0 ? keys : diagonal + call.right;
  sizes.scale = call.scale;
  return sizes;
}

template <class T>
Status run_sequence(const PagedAttention& call, const AttentionSizes& sizes, int64_t sequence, int64_t threads) {
  const int64_t first = call.bounds[sequence], itemsize = size_of(call.dtype);
  AttentionForward of{};
  of.q = (const char*)call.q + first * call.q_token * itemsize;
  of.out = (char*)call.out + first * sizes.out_position * itemsize;
  float* lse = call.lse + first * call.heads;
  FloatBuffer by_head(sizes.heads * sizes.queries);
  if (!by_head.data()) return OUT_OF_MEMORY;
  of.lse = by_head.data();
  of.sizes = sizes;
  const Paged<T> memory{call,
                        call.table + sequence * call.columns,
                        {call.k_scale, call.k_scale_page, call.k_scale_token, call.k_scale_head},
                        {call.v_scale, call.v_scale_page, call.v_scale_token, call.v_scale_head}};
  const Status status = run_rows(of, memory, threads);
  for (int64_t i = 0; i < sizes.queries; i++)
    for (int64_t head = 0; head < sizes.heads; head++) lse[i * sizes.heads + head] = of.lse[head * sizes.queries + i];
  return status;
}

template <class T>
Status run(const PagedAttention& call) {
  int64_t total = 0;
  for (int64_t i = 0; i < call.sequences; i++) total += products_of(sizes_of(call, i));
  const int64_t threads = total <= SMALL ? 1 : workers_for(total / SMALL + 1);
  // one that takes longer than half of a thread's share has all threads, the others one each
  const int64_t most = threads == 1 ? INT64_MAX : total / (2 * threads);
  for (int64_t i = 0; i < call.sequences; i++) {
    const AttentionSizes sizes = sizes_of(call, i);
    if (products_of(sizes) <= most) continue;
    const Status status = run_sequence<T>(call, sizes, i, threads);
    if (status != OK) return status;
  }
  std::atomic<int> failed{OK};
  const PagedAttention* all_of = &call;
  std::atomic<int>* failure = &failed;
  run_blocks(call.sequences, std::min(threads, call.sequences), [=](int64_t i, int64_t) {
    const AttentionSizes sizes = sizes_of(*all_of, i);
    if (!sizes.queries || !sizes.keys || products_of(sizes) > most) return;
    const Status status = run_sequence<T>(*all_of, sizes, i, 1);
    if (status != OK) failure->store(status);
  });
  return Status(failed.load());
}

bool has_pages(const PagedAttention& call) {
  for (int64_t i = 0; i < call.sequences; i++) {
    const int64_t* table = call.table + i * call.columns;
    for (int64_t at = 0; at < divide_up(call.lengths[i], call.page); at++)
      if (table[at] < 0 || table[at] >= call.pages) return false;
  }
  return true;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_paged_attention(const PagedAttention* call) {
  if (call->key_heads <= 0 || call->heads % call->key_heads || call->page <= 0) return INVALID;
  if (!call->lse || (call->size && (!call->q || !call->k)) || (call->value_size && (!call->v || !call->out)))
    return INVALID;
  if (!has_pages(*call)) return NO_SUCH_PAGE;
  switch (call->key_dtype) {
    case INT8:
      return run<int8_t>(*call);
    case FLOAT8:
      return run<float8>(*call);
    default:
      return with_dtype(call->key_dtype, [=](auto element) { return run<decltype(element)>(*call); });
  }
}

FUSEDOPS_EXPORT int fusedops_sparse_attention(const SparseAttention* call) {
  const AttentionSizes& sizes = call->sizes;
  if (!fits(sizes, call->chosen) || !call->lse || (sizes.size && !(call->q && call->k)) ||
      (sizes.value_size && !(call->v && call->out)))
    return INVALID;
  return with_dtype(sizes.dtype, [=](auto element) { return sparse_forward<decltype(element)>(*call); });
}

FUSEDOPS_EXPORT int fusedops_sparse_attention_backward(const SparseAttentionBackward* call) {
  const AttentionSizes& sizes = call->sizes;
  if (!fits(sizes, call->chosen) || (sizes.size && !(call->q && call->k)) ||
      (sizes.value_size && !(call->v && call->grad)))
    return INVALID;
  return SparseGradients(*call).run();
}

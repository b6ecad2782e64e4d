// The exported functions. Each takes the address of one struct, whose fields have 8 bytes each. structs.py reads the
// structs from here: const pointers are tensors that are read, other pointers those that are written.
// Tensors are contiguous unless a field gives strides. Each function returns a Status.
#pragma once

#include <cstdint>

#include "export.h"
#include "simd/vector.h"

namespace fusedops {

enum DTypeCode : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, FLOAT8 = 4 };
enum ScaleType : int64_t { E8M0 = 8, E4M3 = 9 };  // of a byte, of a PackedWeight
inline int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : dtype < INT8 ? 2 : 1; }

constexpr int64_t MAX_DIMS = 16;  // of a masked softmax

struct SoftmaxForward {
  const void* x;        // (rows, sk)
  const uint8_t* mask;  // non-zero = masked out; null: none
  void* y;              // (rows, sk)
  int64_t dtype, rows, sq, sk, causal;
  double scale;
  int64_t dims, mask_dims;  // followed in memory by the shape of x, the shape of mask and the strides of mask, in
                            // bytes; mask broadcasts to x, and the stride of its last dimension is 0 or 1
  const int64_t* shapes() const { return (const int64_t*)(this + 1); }
};

struct SoftmaxBackward {
  const void *grad, *y;  // (rows, sk)
  void* dx;              // (rows, sk)
  int64_t dtype, rows, sq, sk, causal;
  double scale;
};

// q (batch, heads, queries, size), k and v (batch, key_heads, keys, size and value_size), with the elements from one
// batch, head and position to the next; the last dimension is contiguous. Query i sees the keys from i + low to i +
// high.
struct AttentionSizes {
  int64_t dtype, batch, heads, key_heads, queries, keys, size, value_size;
  int64_t q_batch, q_head, q_position, k_batch, k_head, k_position, v_batch, v_head, v_position;
  int64_t out_batch, out_head, out_position, mask_batch, mask_head, mask_query, mask_key, low, high;
  double scale;
};

struct AttentionForward {
  const void *q, *k, *v;
  const uint8_t* mask;  // non-zero = masked out; null: none
  void* out;            // (batch, heads, queries, value_size)
  float* lse;           // (batch, heads, queries)
  AttentionSizes sizes;
};

// Of packed sequences, with keys in pages. causal: 0: not, 1: upper left, 2: lower right. left and right: of a window,
// -1: none.
struct PagedAttention {
  const void* q;                            // (tokens, heads, size)
  const void *k, *v;                        // (pages, page, key_heads, size or value_size)
  const int64_t *bounds, *lengths, *table;  // (sequences + 1), (sequences), (sequences, columns)
  const float *k_scale, *v_scale;           // (pages, page, key_heads), or null
  void* out;                                // (tokens, heads, value_size)
  float* lse;                               // (tokens, heads)
  int64_t dtype, key_dtype, sequences, columns, pages, page, heads, key_heads, size, value_size;
  int64_t q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head;
  int64_t k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head;
  int64_t causal, left, right;
  double scale;
};

// Rows of keys and values into pages: as they are, or as codes of 8 bits with a scale for each token and head, which is
// written, or else is read by its strides.
struct StoreKv {
  const void *k, *v;         // (tokens, heads, size or value_size)
  const int64_t* slots;      // (tokens), page * number + offset, or -1
  void *k_cache, *v_cache;   // (pages, page, heads, size or value_size)
  float *k_scale, *v_scale;  // null: of a cache of the dtype of k
  int64_t dtype, cache_dtype, tokens, pages, page, heads, size, value_size, writes_k_scale, writes_v_scale;
  int64_t k_token, k_head, v_token, v_head;
  int64_t k_cache_page, k_cache_token, k_cache_head, v_cache_page, v_cache_token, v_cache_head;
  int64_t k_scale_page, k_scale_token, k_scale_head, v_scale_page, v_scale_token, v_scale_head;
};

struct AttentionBackward {
  const void *q, *k, *v;
  const uint8_t* mask;
  const void *grad, *out;       // grad: of out, by the strides of out in sizes
  const float *grad_lse, *lse;  // (batch, heads, queries) twice; grad_lse: null: 0
  void *dq, *dk, *dv;           // null: not wanted
  AttentionSizes sizes;
  int64_t dq_batch, dq_head, dq_position, dk_batch, dk_head, dk_position, dv_batch, dv_head, dv_position;
  int64_t saved_batch, saved_head, saved_position;  // of out
  int64_t of_few;  // 1: lse is from fusedops_attention_forward, whose scores are not those of backward to the last bit
};

// The keys that each query may see: (batch, 1 or key_heads, queries, count), each once, in any order; -1: none.
struct ChosenKeys {
  const void* indices;
  int64_t bytes, count, batch, head, query, key;  // bytes: 4 of int32, 8 of int64; elements from one to the next
};

struct SparseAttention {
  const void *q, *k, *v;
  const uint8_t* mask;  // non-zero = masked out; null: none
  void* out;            // (batch, heads, queries, value_size)
  float* lse;           // (batch, heads, queries)
  ChosenKeys chosen;
  AttentionSizes sizes;
};

struct SparseAttentionBackward {
  const void *q, *k, *v;
  const uint8_t* mask;
  const void* grad;       // of out, by the strides of out in sizes
  const float* grad_lse;  // (batch, heads, queries); null: 0
  void *dq, *dk, *dv;     // null: not wanted
  ChosenKeys chosen;
  AttentionSizes sizes;
  int64_t dq_batch, dq_head, dq_position, dk_batch, dk_head, dk_position, dv_batch, dv_head, dv_position;
};

// The `count` keys of each query with the largest sums over heads of weight * relu(scale * q k^T): by rising index, -1
// after the last. Of equal sums those of the lowest indices; NaN is larger than any number. Query i sees the keys up to
// i + high that the mask does not hide.
struct SelectKeys {
  const void *q, *k, *weights;  // (batch, queries, heads, size), (batch, keys, size), (batch, queries, heads)
  const uint8_t* mask;          // (batch, queries, keys), non-zero = not seen; null: none
  int32_t* index;               // (batch, queries, count)
  int64_t dtype, weights_dtype, batch, queries, heads, keys, size, count;
  int64_t q_batch, q_query, q_head, k_batch, k_key, mask_batch, mask_query, mask_key, high;
  double scale;
};

struct GeluForward {
  const void *x, *bias;  // bias: (columns), or null
  void* y;
  int64_t dtype, count, columns, tanh;
};

struct GeluBackward {
  const void *grad, *x, *bias;
  void *dx, *dbias;  // null: not wanted
  int64_t dtype, count, columns, tanh;
};

struct DropoutForward {
  const void *x, *bias, *residual;  // bias: (columns), or null; residual: null for none
  void* y;
  const uint64_t* seed;  // null, or a threshold of 0: nothing is dropped
  int64_t dtype, count, columns, threshold;
  double scale;
};

struct DropoutBackward {
  const void* grad;
  void *dx, *dbias;  // null: not wanted
  const uint64_t* seed;
  int64_t dtype, count, columns, threshold;
  double scale;
};

struct NormForward {
  const void *x, *residual, *weight, *bias;  // (rows, columns) twice; (columns) twice. Null for none, but x
  void *y, *s;                               // (rows, columns); s = x + residual, null without a residual
  float *means, *rstds;                      // (rows); null: not wanted
  int64_t dtype, weight_dtype, bias_dtype, rows, columns, centered;
  double eps, offset;  // offset: added to the weight
};

struct NormBackward {
  const void *grad, *grad_s, *s, *weight;  // grad_s: null for none
  const float *means, *rstds;              // means: null for RMSNorm
  void *dx, *dresidual, *dweight, *dbias;  // null: not wanted
  int64_t dtype, weight_dtype, bias_dtype, rows, columns;
  double offset;
};

enum Activation : int64_t { SWISH = 0, GELU_TANH = 1, GELU_ERF = 2 };

struct GatedForward {
  const void *gate, *up;                                       // up: null where gate has interleaved pairs of both
  void* y;                                                     // (rows, columns)
  int64_t dtype, rows, columns, activation, gate_row, up_row;  // elements from one row of gate, or up, to the next
  double limit, alpha, offset;                                 // of SWISH; limit: NaN for none
};

struct GatedBackward {
  const void *grad, *gate, *up;
  void *dgate, *dup;  // null: not wanted; dgate has pairs of both where gate has
  int64_t dtype, rows, columns, activation, gate_row, up_row, gradient_row;
  double limit, alpha, offset;
};

// weight: null for none. The norm is that of `groups` parts of a row, of `columns` each.
struct GatedNormForward {
  const void *x, *gate, *weight;  // (rows, groups * columns) twice; (groups * columns)
  void* y;                        // (rows, groups * columns)
  float* rstds;                   // (rows, groups); null: not wanted
  int64_t dtype, weight_dtype, rows, groups, columns, x_row,
      gate_row;                 // elements from one row of x, or gate, to the next
  int64_t gate_first, sigmoid;  // sigmoid: 0 for silu
  double eps, offset;           // offset: added to the weight
};

struct GatedNormBackward {
  const void *grad, *x, *gate, *weight;
  const float* rstds;
  void *dx, *dgate, *dweight;  // null: not wanted
  int64_t dtype, weight_dtype, rows, groups, columns, x_row, gate_row, gate_first, sigmoid;
  double offset;
};

// A scale, shift or gate beside rows (batch, tokens, columns): elements from one batch and token to the next, 0 where
// it repeats. Its columns are next to each other.
struct Repeated {
  const void* values;  // null for none
  int64_t dtype, batch, token;
};

// shared: (columns), a sum over all rows; by batch: (batch, columns); by token: (batch, tokens, columns), in float32.
enum GradientForm : int64_t { SHARED = 0, BY_BATCH = 1, BY_TOKEN = 2 };
struct RepeatedGradient {
  void* values;  // null: not wanted
  int64_t form;
};

// s = rows + y * act(gate), or rows; z = (norm(s) * weight + bias) * (offset + scale) + shift.
struct ModulatedForward {
  const void *rows, *y, *weight, *bias;  // (batch, tokens, columns) twice; (columns) twice. Null for none, but rows
  void *z, *s;                           // z: null without a norm, s: null without y
  float *means, *rstds;                  // (batch, tokens); null: not wanted. A mean is 0 for RMSNorm
  Repeated scale, shift, gate;
  int64_t dtype, weight_dtype, bias_dtype, batch, tokens, columns, centered;
  int64_t gate_by_row, tanh;  // gate_by_row: a gate has one number for a row
  double eps, offset;
};

struct ModulatedBackward {
  const void *grad_z, *grad_s, *s, *y, *weight, *bias;  // grad_z: null without a norm; grad_s: null for none
  const float *means, *rstds;                           // means: null for RMSNorm
  void *ds, *dy, *dweight, *dbias;                      // null: not wanted
  RepeatedGradient dscale, dshift, dgate;
  Repeated scale, shift, gate;
  int64_t dtype, weight_dtype, bias_dtype, batch, tokens, columns, gate_by_row, tanh;
  double offset;
};

// x (batch, groups * channels, positions); by_channel: (batch, positions, groups * channels) in memory.
struct GroupNormSizes {
  int64_t dtype, weight_dtype, bias_dtype, batch, groups, channels, positions, by_channel, silu;
};

struct GroupNormForward {
  const void *x, *weight, *bias;  // weight, bias: (groups * channels); null for none
  void* y;
  float *means, *rstds;  // (batch, groups); null: not wanted
  GroupNormSizes sizes;
  double eps;
};

struct GroupNormBackward {
  const void *grad, *x, *weight, *bias;
  const float *means, *rstds;
  void *dx, *dweight, *dbias;  // null: not wanted
  GroupNormSizes sizes;
};

// x (batch, channels, length), with the elements from one batch, channel and position to the next. Positions are next
// to each other, or channels: then x_channel is 1, and by_channel. Each batch is a sequence, or batch is 1 and there
// are bounds.
struct ConvSizes {
  int64_t dtype, weight_dtype, bias_dtype, batch, channels, length, width, sequences, silu, by_channel;
  int64_t x_batch, x_channel, x_position, y_batch, y_channel, y_position;  // y: of the result, y or dx
};

// weight (channels, width); bias (channels), null: none. before (sequences, channels, width - 1): the inputs before
// each sequence, null: zeros. bounds (sequences + 1): of packed sequences, null: none.
struct ConvForward {
  const void *x, *weight, *bias, *before;
  const int64_t* bounds;
  void *y, *state;  // state (sequences, channels, width - 1), null: not wanted
  ConvSizes sizes;
};

struct ConvBackward {
  const void *grad, *x, *weight, *bias, *before;
  const int64_t* bounds;
  const void* grad_state;                // null: 0
  void *dx, *dweight, *dbias, *dbefore;  // null: not wanted
  ConvSizes sizes;
  int64_t grad_batch, grad_channel, grad_position;
};

// Elements from one entry to the next.
struct MergeStrides {
  int64_t batch, head, position;
};

struct MergeSizes {
  int64_t dtype, batch, heads, positions, columns;
  MergeStrides of_a, of_b, of_out;  // of_out: of the gradient of out in backward
};

struct MergeForward {
  const void *out_a, *out_b;   // (batch, heads, positions, columns), the last dim contiguous
  const float *lse_a, *lse_b;  // (batch, heads, positions)
  void* out;
  float* lse;
  MergeSizes sizes;
};

struct MergeBackward {
  const void* grad;
  const float* grad_lse;
  const void *out_a, *out_b;
  const float *lse_a, *lse_b;
  void *da, *db;           // null: not wanted
  float *dlse_a, *dlse_b;  // likewise
  MergeSizes sizes;
  MergeStrides of_da, of_db;
};

// Head h has the rows of key head h / (heads / key_heads). With `bounds`, of packed sequences, batch is 1, and states
// are those of `sequences`.
struct LinearAttention {
  const void *q, *k, *v;                // (batch, positions, key_heads, rows) twice; (batch, positions, heads, columns)
  const float *decay, *beta, *initial;  // (batch, positions, heads), decay with `rows` where by_row; null: none
  const int64_t* bounds;                // (sequences + 1), checked; null: none
  int64_t dtype, batch, positions, key_heads, heads, rows, columns, sequences, by_row, normalize;
  double scale;
};

struct LinearAttentionForward {
  LinearAttention inputs;
  void* out;     // (batch, positions, heads, columns)
  float* state;  // (batch or sequences, heads, rows, columns), as initial
};

struct LinearAttentionBackward {
  LinearAttention inputs;
  const void* grad;         // of out
  const float* grad_state;  // null: 0
  void *dq, *dk, *dv;       // null: not wanted. With bounds, what belongs to no sequence is not written
  float *ddecay, *dbeta, *dinitial;
};

enum Reduction : int64_t { NONE = 0, SUM = 1, MEAN = 2, MEAN_BY = 3 };  // MEAN_BY: divides by the denominator

// Row r of x begins at element r / inner_rows * outer_stride + r % inner_rows * row_stride.
struct CrossEntropy {
  int64_t dtype, rows, columns, inner_rows, outer_stride, row_stride, ignore_index, reduction;
  double label_smoothing, z_loss, softcap, denominator;  // softcap: 0 for none
};

struct CrossEntropyForward {
  const void* x;          // (rows, columns)
  const int64_t* target;  // (rows)
  float *loss, *lse;      // loss: (rows), or one number with a reduction; lse: (rows), null: not wanted
  CrossEntropy settings;
};

struct CrossEntropyBackward {
  const float* grad;  // the shape of loss
  const void* x;
  const float* lse;
  const int64_t* target;
  void* dx;  // (rows, columns), contiguous
  CrossEntropy settings;
};

// c = a b^T, or c + a b^T where `adds`, in float32. Operands are (rows, terms) and (columns, terms); the elements of a
// row are next to each other where `by_terms`, else those of a term. a_stride, b_stride: from one row, or term, to the
// next.
struct LinearProduct {
  const void *a, *b;
  float* c;  // (rows, columns), contiguous
  int64_t rows, columns, terms, a_dtype, a_stride, a_by_terms, b_dtype, b_stride, b_by_terms, adds;
  int64_t in_bfloat16;  // 1: both operands are, and their products are those of pairs.h
};

// y = activation(x @ weight.T + bias), in float32: x (rows, terms), weight (columns, terms) whose rows are weight_row
// apart, bias (columns).
struct LinearForward {
  const float *x, *weight, *bias;  // bias: null for none
  float* y;                        // (rows, columns)
  int64_t rows, columns, terms, weight_row;
  int64_t activation;  // an Ungated, or -1 for none
};

// A chunk of rows of logits, to which a bias is added. A function with gradients overwrites them with their own, which
// are float32, or bfloat16 in the first half of each row.
struct LogitRows {
  float* x;               // (rows, columns)
  const float* bias;      // (columns); null: none
  const int64_t* target;  // (rows), in [0, columns)
  int64_t gradient_dtype, rows, columns;
  double softcap;  // 0 for none
};

struct LinearLoss {
  LogitRows logits;
  const float* scale;  // (rows): the gradient is that of the sum of scale * loss; null: 1
  float* loss;         // (rows)
  int64_t gradient;    // 0: the logits stay as they are
  double label_smoothing, z_loss;
};

struct LinearLogProbs {
  LogitRows logits;             // of a distribution: divided by the temperature after the softcap
  float *logp, *entropy, *lse;  // (rows); entropy: null: not wanted
  double temperature;
};

struct LinearLogProbsBackward {
  LogitRows logits;
  const float *grad_logp, *grad_entropy;  // (rows); grad_entropy: null: 0
  double temperature;
};

// q or k, with the elements from one batch, head and position to the next. The last dimension is contiguous.
// heads: 0 for none.
struct RotaryTensor {
  const void* x;
  void* y;
  int64_t dtype, heads, x_batch, x_head, x_position, x_element, y_batch, y_head, y_position;
};

struct Rotary {
  const void *cos, *sin;  // (batches, positions, pairs)
  int64_t cos_dtype, sin_dtype, batches, positions, columns, pairs, interleaved;
  int64_t cos_batch, cos_position, sin_batch, sin_position;
  double sign;  // -1: by the opposite angles
  RotaryTensor tensors[2];
};

// format: a number of with_format. Scales, where they are a tensor of their own, are of `group` columns and of
// `scale_rows` rows (0: of all), `groups` in a line of them.
constexpr int64_t MXFP4_GGUF_CODES = 8, MXFP4_CODES = 10;
struct PackedWeight {
  const uint8_t* codes;       // (outputs, row_bytes)
  const void* scales;         // or null
  const float* global_scale;  // one, which divides the scales; or null
  const uint8_t* zeros;       // as the scales; or null
  int64_t format, row_bytes, scale_dtype, groups, group, scale_rows;
};

struct QuantizedForward {
  const void* x;        // (rows, columns)
  PackedWeight weight;  // (outputs, columns)
  const void* bias;     // (outputs), or null
  void* y;              // (rows, outputs)
  int64_t dtype, bias_dtype, rows, columns, outputs;
};

struct QuantizedBackward {
  const void* grad;     // (rows, outputs)
  PackedWeight weight;  // (outputs, columns)
  void* dx;             // (rows, columns)
  int64_t dtype, rows, columns, outputs;
};

struct Int8Linear {
  const void* x;              // (rows, columns); INT8, or a dtype of floating numbers
  const float* x_scale;       // (rows), or null: that of each row
  const int8_t* weight;       // (outputs, columns), weight_row apart
  const float* weight_scale;  // (outputs), scale_step floats apart
  const void *bias, *smooth;  // (outputs), (columns), or null
  void* y;                    // (rows, outputs)
  int64_t dtype, bias_dtype, smooth_dtype, y_dtype, rows, columns, outputs, weight_row, scale_step;
};

enum Score : int64_t { SOFTMAX_SCORE = 0, SIGMOID_SCORE = 1, SQRT_SOFTPLUS_SCORE = 2, TOPK_SOFTMAX_SCORE = 3 };

struct Routing {
  int64_t dtype, bias_dtype, rows, columns, k, score, groups, top_groups, by_two, normalize, index_is_long;
  double eps, scale;
};

struct RoutingForward {
  const void *x, *bias, *index;  // (rows, columns); (columns), or null; (rows, k), or null: experts are chosen
  float* weights;                // (rows, k)
  int64_t* chosen;               // (rows, k)
  Routing settings;
};

struct RoutingBackward {
  const float* grad;  // (rows, k)
  const void* x;
  const int64_t* chosen;
  void* dx;
  Routing settings;
};

// The log probability of a sampled token: none, among all tokens, or among those that the filters keep.
enum TokenLogProb : int64_t { NO_LOG_PROB = 0, UNFILTERED = 1, FILTERED = 2 };

struct Sample {
  const void* logits;                            // (rows, columns)
  const float *temperature, *top_p, *min_p;      // (rows) each; null for none
  const int64_t *top_k, *seed, *position;        // (rows) each; top_k: null for none
  const uint8_t* mask;                           // non-zero = not allowed; null for none
  int64_t* token;                                // (rows)
  float* log_prob;                               // (rows); 0 without one
  int64_t dtype, rows, columns, mask_row, kind;  // mask_row: bytes from one row of mask to the next; a TokenLogProb
};

// The weights, biases and choices of experts. For each activation that is not gated, a number of 3 or more.
enum Ungated : int64_t { SILU = 3, PLAIN_GELU_TANH = 4, PLAIN_GELU_ERF = 5, RELU = 6, SQUARED_RELU = 7 };

// The factors of LoRA of a weight of all experts; null without.
struct LoraFactors {
  const void *a, *b;  // (experts, rank, inputs), (experts, outputs, rank)
  int64_t a_dtype, b_dtype, rank;
};

struct ExpertsForward {
  const void *x, *index, *weights;  // (tokens, width), (tokens, choices) twice; index: int64 or int32
  const void *up, *down;            // (experts, 2 * inner or inner, width), (experts, width, inner); see transposed
  const void *up_bias, *down_bias;  // (experts, 2 * inner or inner), (experts, width); null for none
  void *y, *hidden;  // (tokens, width); (tokens * choices, 2 * inner or inner) by expert, or null: not wanted
  int64_t dtype, index_bytes, weights_dtype, up_dtype, down_dtype, up_bias_dtype, down_bias_dtype;
  int64_t tokens, choices, experts, width, inner;
  int64_t activation, interleaved, transposed;  // activation: an Activation, for gate and up, or an Ungated
  double limit, alpha, offset;                  // of SWISH; limit: NaN for none
  LoraFactors up_lora, down_lora;
  double lora_scale;
};

struct ExpertsBackward {
  const void* grad;  // (tokens, width)
  const void *x, *index, *weights;
  const void *up, *down;
  const void *down_bias, *hidden;
  void *dx, *dweights, *dup, *ddown, *dup_bias, *ddown_bias;  // null: not wanted
  void *dup_a, *dup_b, *ddown_a, *ddown_b;                    // of the factors, likewise
  int64_t dtype, index_bytes, weights_dtype, up_dtype, down_dtype, up_bias_dtype, down_bias_dtype;
  int64_t tokens, choices, experts, width, inner;
  int64_t activation, interleaved, transposed;
  double limit, alpha, offset;
  LoraFactors up_lora, down_lora;
  double lora_scale;
};

// The same with packed weights: up and down of the call are null.
struct QuantizedExpertsForward {
  ExpertsForward call;
  PackedWeight up, down;  // of the first expert, which those of the others follow
};

struct QuantizedExpertsBackward {
  ExpertsBackward call;
  PackedWeight up, down;
};

// Calls f with a value of the element type.
template <class F>
auto with_dtype(int64_t dtype, F f) {
  switch (dtype) {
    case FLOAT32:
      return f(float{});
    case BFLOAT16:
      return f(bfloat16{});
    default:
      return f(float16{});
  }
}

}  // namespace fusedops

FUSEDOPS_EXPORT void fusedops_use_threads(void* parallel_for, void* get_num_threads);
// The number of this header with which the library was compiled (structs.py).
FUSEDOPS_EXPORT int64_t fusedops_header();
// 1 where products of bfloat16 are compiled, and this processor has their instruction.
FUSEDOPS_EXPORT int64_t fusedops_multiplies_bfloat16();
FUSEDOPS_EXPORT int64_t fusedops_is_amd();
FUSEDOPS_EXPORT int fusedops_softmax_forward(const fusedops::SoftmaxForward* call);
FUSEDOPS_EXPORT int fusedops_softmax_backward(const fusedops::SoftmaxBackward* call);
FUSEDOPS_EXPORT int fusedops_attention_forward(const fusedops::AttentionForward* call);
FUSEDOPS_EXPORT int fusedops_attention_tiles(const fusedops::AttentionForward* call);
FUSEDOPS_EXPORT int fusedops_paged_attention(const fusedops::PagedAttention* call);
FUSEDOPS_EXPORT int fusedops_store_kv(const fusedops::StoreKv* call);
FUSEDOPS_EXPORT int fusedops_attention_backward(const fusedops::AttentionBackward* call);
FUSEDOPS_EXPORT int fusedops_sparse_attention(const fusedops::SparseAttention* call);
FUSEDOPS_EXPORT int fusedops_sparse_attention_backward(const fusedops::SparseAttentionBackward* call);
FUSEDOPS_EXPORT int fusedops_select_keys(const fusedops::SelectKeys* call);
FUSEDOPS_EXPORT int fusedops_merge_forward(const fusedops::MergeForward* call);
FUSEDOPS_EXPORT int fusedops_merge_backward(const fusedops::MergeBackward* call);
FUSEDOPS_EXPORT int fusedops_gelu_forward(const fusedops::GeluForward* call);
FUSEDOPS_EXPORT int fusedops_gelu_backward(const fusedops::GeluBackward* call);
FUSEDOPS_EXPORT int fusedops_dropout_forward(const fusedops::DropoutForward* call);
FUSEDOPS_EXPORT int fusedops_dropout_backward(const fusedops::DropoutBackward* call);
FUSEDOPS_EXPORT int fusedops_norm_forward(const fusedops::NormForward* call);
FUSEDOPS_EXPORT int fusedops_norm_backward(const fusedops::NormBackward* call);
FUSEDOPS_EXPORT int fusedops_gated_forward(const fusedops::GatedForward* call);
FUSEDOPS_EXPORT int fusedops_gated_backward(const fusedops::GatedBackward* call);
FUSEDOPS_EXPORT int fusedops_gated_norm_forward(const fusedops::GatedNormForward* call);
FUSEDOPS_EXPORT int fusedops_gated_norm_backward(const fusedops::GatedNormBackward* call);
FUSEDOPS_EXPORT int fusedops_modulated_forward(const fusedops::ModulatedForward* call);
FUSEDOPS_EXPORT int fusedops_modulated_backward(const fusedops::ModulatedBackward* call);
FUSEDOPS_EXPORT int fusedops_group_norm_forward(const fusedops::GroupNormForward* call);
FUSEDOPS_EXPORT int fusedops_group_norm_backward(const fusedops::GroupNormBackward* call);
FUSEDOPS_EXPORT int fusedops_conv_forward(const fusedops::ConvForward* call);
FUSEDOPS_EXPORT int fusedops_conv_backward(const fusedops::ConvBackward* call);
FUSEDOPS_EXPORT int fusedops_linear_attention_forward(const fusedops::LinearAttentionForward* call);
FUSEDOPS_EXPORT int fusedops_linear_attention_backward(const fusedops::LinearAttentionBackward* call);
FUSEDOPS_EXPORT int fusedops_cross_entropy_forward(const fusedops::CrossEntropyForward* call);
FUSEDOPS_EXPORT int fusedops_cross_entropy_backward(const fusedops::CrossEntropyBackward* call);
FUSEDOPS_EXPORT int fusedops_linear_forward(const fusedops::LinearForward* call);
FUSEDOPS_EXPORT int fusedops_linear_in_order(const fusedops::LinearForward* call);
FUSEDOPS_EXPORT int fusedops_linear_product(const fusedops::LinearProduct* call);
FUSEDOPS_EXPORT int fusedops_linear_loss(const fusedops::LinearLoss* call);
FUSEDOPS_EXPORT int fusedops_linear_log_probs(const fusedops::LinearLogProbs* call);
FUSEDOPS_EXPORT int fusedops_linear_log_probs_backward(const fusedops::LinearLogProbsBackward* call);
FUSEDOPS_EXPORT int fusedops_rotary(const fusedops::Rotary* call);
FUSEDOPS_EXPORT int fusedops_quantized_forward(const fusedops::QuantizedForward* call);
FUSEDOPS_EXPORT int fusedops_quantized_in_order(const fusedops::QuantizedForward* call);
FUSEDOPS_EXPORT int fusedops_quantized_backward(const fusedops::QuantizedBackward* call);
FUSEDOPS_EXPORT int fusedops_int8_linear(const fusedops::Int8Linear* call);
FUSEDOPS_EXPORT int fusedops_routing_forward(const fusedops::RoutingForward* call);
FUSEDOPS_EXPORT int fusedops_routing_backward(const fusedops::RoutingBackward* call);
FUSEDOPS_EXPORT int fusedops_sample(const fusedops::Sample* call);
FUSEDOPS_EXPORT int fusedops_experts_forward(const fusedops::ExpertsForward* call);
FUSEDOPS_EXPORT int fusedops_experts_backward(const fusedops::ExpertsBackward* call);
FUSEDOPS_EXPORT int fusedops_quantized_experts_forward(const fusedops::QuantizedExpertsForward* call);
FUSEDOPS_EXPORT int fusedops_quantized_experts_backward(const fusedops::QuantizedExpertsBackward* call);

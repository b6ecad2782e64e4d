// y = f(gate) * up, where f is the sigmoid-weighted gate of SwiGLU or GELU, and the gradients of gate and up.
//
// The elements pass in chunks that stay in the L1 cache: read as float32, computed, rounded and written. So there is
// one loop for each function, and one for each dtype and layout, instead of one for each combination.
#include "elementwise/gated.h"

#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 256;

template <class T>
INLINE T* moved(T* p, int64_t count) {
  return p ? p + count : p;
}

// Calls f(at, row, column, count) for the chunks of all rows.
template <class F>
void each_chunk(int64_t rows, int64_t columns, F f) {
  const int64_t count = rows * columns;
  run_blocks(divide_up(count, BLOCK), [=](int64_t block) {
    each_stretch(block * BLOCK, std::min(count, (block + 1) * BLOCK), columns,
                 [&](int64_t at, int64_t column, int64_t n) {
                   for (int64_t i = 0; i < n; i += CHUNK)
                     f(at + i, (at - column) / columns, column + i, std::min(CHUNK, n - i));
                 });
    stream_end();
  });
}

template <class T>
Status forward(const GatedForward& call) {
  const T *gate = (const T*)call.gate, *up = (const T*)call.up;
  T* y = (T*)call.y;
  const int64_t gate_row = call.gate_row, up_row = call.up_row;
  const Settings settings(call);
  const auto compute = FORWARD<Readable<T>>[call.activation];
  const auto compute_pairs = FORWARD<float>[call.activation];
  const bool streams_y = streams(y, call.rows, call.columns);
  each_chunk(call.rows, call.columns, [=](int64_t at, int64_t row, int64_t column, int64_t n) {
    float g_buffer[CHUNK], u_buffer[CHUNK], y_buffer[CHUNK];
    float* result = place(y + at, y_buffer, streams_y);
    if (up) {
      compute(settings, readable(gate + row * gate_row + column, n, g_buffer),
              readable(up + row * up_row + column, n, u_buffer), result, n);
    } else {
      unzip(gate + row * gate_row + 2 * column, n, g_buffer, u_buffer);
      compute_pairs(settings, g_buffer, u_buffer, result, n);
    }
    rounded(y + at, n, result, streams_y);
  });
  return OK;
}

template <class T>
Status backward(const GatedBackward& call) {
  const T *grad = (const T*)call.grad, *gate = (const T*)call.gate, *up = (const T*)call.up;
  T *dgate = (T*)call.dgate, *dup = (T*)call.dup;
  const int64_t gate_row = call.gate_row, up_row = call.up_row, gradient_row = call.gradient_row;
  const Settings settings(call);
  const auto compute = BACKWARD<Readable<T>>[call.activation];
  const auto compute_pairs = BACKWARD<float>[call.activation];
  const bool streams_d = streams(dgate, call.rows, call.columns) && (!dup || streams(dup, call.rows, call.columns));
  each_chunk(call.rows, call.columns, [=](int64_t at, int64_t row, int64_t column, int64_t n) {
    float d_buffer[CHUNK], g_buffer[CHUNK], u_buffer[CHUNK], dg_buffer[CHUNK], du_buffer[CHUNK];
    if (!up) {
      unzip(gate + row * gate_row + 2 * column, n, g_buffer, u_buffer);
      const float* d = widened_apart(grad + at, n, d_buffer);
      compute_pairs(settings, d, g_buffer, u_buffer, dg_buffer, du_buffer, n);
      zip(dgate + row * gradient_row + 2 * column, n, dg_buffer, du_buffer);
      return;
    }
    T *dg = moved(dgate, row * gradient_row + column), *du = moved(dup, row * gradient_row + column);
    float *dg_result = place(dg, dg_buffer, streams_d), *du_result = place(du, du_buffer, streams_d);
    compute(settings, readable(grad + at, n, d_buffer), readable(gate + row * gate_row + column, n, g_buffer),
            readable(up + row * up_row + column, n, u_buffer), dg_result, du_result, n);
    if (dg) rounded(dg, n, dg_result, streams_d);
    if (du) rounded(du, n, du_result, streams_d);
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_gated_forward(const GatedForward* call) {
  if (!call->rows || !call->columns) return OK;
  if (!call->gate || !call->y || call->activation < 0 || call->activation > GELU_ERF) return INVALID;
  use_huge_pages(call->y, call->rows * call->columns, call->dtype);
  return with_dtype(call->dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

FUSEDOPS_EXPORT int fusedops_gated_backward(const GatedBackward* call) {
  if (!call->rows || !call->columns || (!call->dgate && !call->dup)) return OK;
  if (!call->grad || !call->gate || call->activation < 0 || call->activation > GELU_ERF) return INVALID;
  if (!call->up && !call->dgate) return INVALID;
  const int64_t spanned = (call->rows - 1) * call->gradient_row + call->columns * (call->up ? 1 : 2);
  for (void* result : {call->dgate, call->dup}) use_huge_pages(result, spanned, call->dtype);
  return with_dtype(call->dtype, [=](auto element) { return backward<decltype(element)>(*call); });
}

// y = f(gate) * up, where f is the sigmoid-weighted gate of SwiGLU or GELU, and the gradients of gate and up.
//
// The elements pass in chunks that stay in the L1 cache: read as float32, computed, rounded and written. So there is
// one loop for each function, and one for each dtype and layout, instead of one for each combination.
#include "api.h"
#include "chunks.h"
#include "functions.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 256;

// ---- The functions, on float32 ----

struct Settings {
  float limit, alpha, offset, exponent;
  bool limited;
  template <class Call>
  explicit Settings(const Call& call)
      : limit(call.limit == call.limit ? to_float(call.limit) : INF),
        alpha(to_float(call.alpha)),
        offset(to_float(call.offset)),
        exponent(to_finite(call.alpha * -double(LOG2_E))),
        limited(call.limit == call.limit) {}
};

// gate * sigmoid(alpha * gate) * (up + offset), where gate <= limit and |up| <= limit by a clamp.
class Swish {
 public:
  explicit Swish(const Settings& s)
      : limit_(s.limit), alpha_(s.alpha), offset_(s.offset), exponent_(s.exponent), unlimited_(s.limited ? 0 : -1) {}

  template <class V>
  INLINE V operator()(V gate, V up) const {
    const Parts<V> p(*this, gate);
    return p.gate * p.sigmoid * (clamped(up) + offset_);
  }

  // The gradients pass at the bounds of the clamp.
  template <class V>
  INLINE void gradients(V grad, V gate, V up, V& dgate, V& dup) const {
    const Parts<V> p(*this, gate);
    const V swish = p.gate * p.sigmoid, slope = p.sigmoid + swish * (p.rest * alpha_);
    dgate = where_within(gate, grad * (clamped(up) + offset_) * slope);
    dup = where_within(magnitude(up), grad * swish);
  }

 private:
  template <class V>
  struct Parts {
    V gate, sigmoid, rest;  // rest: 1 - sigmoid
    INLINE Parts(const Swish& f, V given) {
      const V clamped = at_most(f.limit_, given), w = clamped * f.exponent_;
      const V e = exp2_within(at_most(126.0f, at_least(-127.0f, w)));
      gate = zero_above(126.0f, w, clamped);  // where the sigmoid is 0: -inf * 0 would be NaN
      sigmoid = zero_above(126.0f, w, reciprocal(e + 1.0f));
      rest = e * sigmoid;
    }
  };
  template <class V>
  INLINE V clamped(V up) const {
    return at_least(-limit_, at_most(limit_, up));
  }
  INLINE vfloat where_within(vfloat x, vfloat y) const { return (x <= limit_) | unlimited_ ? y : vfloat{}; }
  template <class V>
  INLINE Two<V> where_within(Two<V> x, Two<V> y) const {
    return {where_within(x.a, y.a), where_within(x.b, y.b)};
  }

  float limit_, alpha_, offset_, exponent_;
  int32_t unlimited_;
};

// gelu(gate) * up. A gate below -32, -inf included, gives 0.
template <bool TANH, bool NARROW>
class Gelu {
 public:
  explicit Gelu(const Settings&) {}

  template <class V>
  INLINE V operator()(V gate, V up) const {
    return gelu<TANH, NARROW>(at_least(-32.0f, gate)) * up;
  }

  template <class V>
  INLINE void gradients(V grad, V gate, V up, V& dgate, V& dup) const {
    V derivative;
    const V factor = gelu_factor<TANH, NARROW>(gate, derivative);
    dgate = grad * up * derivative;
    dup = grad * at_least(-32.0f, gate) * factor;
  }
};

// bfloat16 is read by these loops themselves: stores of what a loop before them reads take longer than the conversion.
template <class T>
using Forward = void (*)(const Settings&, const T* gate, const T* up, float* y, int64_t n);
template <class T>
using Backward = void (*)(const Settings&, const T* grad, const T* gate, const T* up, float* dgate, float* dup,
                          int64_t n);

template <class T, class Function>
void compute(const Settings& settings, const T* gate, const T* up, float* y, int64_t n) {
  const Function f(settings);
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    store(y + i, f(load_ahead(gate + i, lanes), load_ahead(up + i, lanes)), lanes);
  });
}

template <class T, class Function>
void compute_gradients(const Settings& settings, const T* grad, const T* gate, const T* up, float* dgate, float* dup,
                       int64_t n) {
  const Function f(settings);
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    auto g = load_ahead(gate + i, lanes), dg = g, du = g;
    f.gradients(load_ahead(grad + i, lanes), g, load_ahead(up + i, lanes), dg, du);
    if (dgate) store(dgate + i, dg, lanes);
    if (dup) store(dup + i, du, lanes);
  });
}

template <class T>
const Forward<T> FORWARD[] = {compute<T, Swish>, compute<T, Gelu<true, is_narrow<T>>>,
                              compute<T, Gelu<false, is_narrow<T>>>};
template <class T>
const Backward<T> BACKWARD[] = {compute_gradients<T, Swish>, compute_gradients<T, Gelu<true, is_narrow<T>>>,
                                compute_gradients<T, Gelu<false, is_narrow<T>>>};

// ---- The dtypes and layouts ----

template <class T>
NOINLINE void unzip(const T* pairs, int64_t n, float* gate, float* up) {
  each(n, [=](int64_t i, auto lanes) {
    vfloat g, u;
    load_pairs(pairs + 2 * i, lanes, g, u);
    store(gate + i, g);
    store(up + i, u);
  });
}

template <class T>
NOINLINE void zip(T* pairs, int64_t n, const float* gate, const float* up) {
  each(n, [=](int64_t i, auto lanes) { store_pairs(pairs + 2 * i, load(gate + i), load(up + i), lanes); });
}

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

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
        exponent(to_float(call.alpha * -double(LOG2_E))),
        limited(call.limit == call.limit) {}
};

// gate * sigmoid(alpha * gate) * (up + offset), where gate <= limit and |up| <= limit by a clamp.
class Swish {
 public:
  explicit Swish(const Settings& s)
      : limit_(s.limit), alpha_(s.alpha), offset_(s.offset), exponent_(s.exponent), unlimited_(s.limited ? 0 : -1) {}

  INLINE vfloat operator()(vfloat gate, vfloat up) const {
    const Parts p(*this, gate);
    return p.gate * p.sigmoid * (clamped(up) + offset_);
  }

  // The gradients pass at the bounds of the clamp.
  INLINE void gradients(vfloat grad, vfloat gate, vfloat up, vfloat& dgate, vfloat& dup) const {
    const Parts p(*this, gate);
    const vfloat swish = p.gate * p.sigmoid, slope = p.sigmoid + alpha_ * swish * p.rest;
    dgate = (gate <= limit_) | unlimited_ ? grad * (clamped(up) + offset_) * slope : vfloat{};
    dup = (max(up, -up) <= limit_) | unlimited_ ? grad * swish : vfloat{};
  }

 private:
  struct Parts {
    vfloat gate, sigmoid, rest;  // rest: 1 - sigmoid
    INLINE Parts(const Swish& f, vfloat given) {
      const vfloat clamped = min(all(f.limit_), given), w = clamped * f.exponent_;
      const vfloat e = exp2_within(min(all(126.0f), max(all(-127.0f), w)));
      gate = w > 126.0f ? vfloat{} : clamped;  // where the sigmoid is 0: -inf * 0 would be NaN
      sigmoid = 1.0f / (e + 1.0f);
      rest = e * sigmoid;
    }
  };
  INLINE vfloat clamped(vfloat up) const { return max(all(-limit_), min(all(limit_), up)); }

  float limit_, alpha_, offset_, exponent_;
  int32_t unlimited_;
};

// gelu(gate) * up. A gate below -32, -inf included, gives 0.
template <bool TANH>
class Gelu {
 public:
  explicit Gelu(const Settings&) {}

  INLINE vfloat operator()(vfloat gate, vfloat up) const { return gelu<TANH>(max(all(-32.0f), gate)) * up; }

  INLINE void gradients(vfloat grad, vfloat gate, vfloat up, vfloat& dgate, vfloat& dup) const {
    vfloat derivative, factor = gelu_factor<TANH>(gate, derivative);
    dgate = grad * up * derivative;
    dup = grad * max(all(-32.0f), gate) * factor;
  }
};

typedef void (*Forward)(const Settings&, const float* gate, const float* up, float* y, int64_t n);
typedef void (*Backward)(const Settings&, const float* grad, const float* gate, const float* up, float* dgate,
                         float* dup, int64_t n);

template <class Function>
void compute(const Settings& settings, const float* gate, const float* up, float* y, int64_t n) {
  const Function f(settings);
  each(n,
       [=](int64_t i, auto lanes) { store(y + i, f(load_ahead(gate + i, lanes), load_ahead(up + i, lanes)), lanes); });
}

template <class Function>
void compute_gradients(const Settings& settings, const float* grad, const float* gate, const float* up, float* dgate,
                       float* dup, int64_t n) {
  const Function f(settings);
  each(n, [=](int64_t i, auto lanes) {
    vfloat dg, du;
    f.gradients(load_ahead(grad + i, lanes), load_ahead(gate + i, lanes), load_ahead(up + i, lanes), dg, du);
    if (dgate) store(dgate + i, dg, lanes);
    if (dup) store(dup + i, du, lanes);
  });
}

const Forward FORWARD[] = {compute<Swish>, compute<Gelu<true>>, compute<Gelu<false>>};
const Backward BACKWARD[] = {compute_gradients<Swish>, compute_gradients<Gelu<true>>, compute_gradients<Gelu<false>>};

// ---- The dtypes and layouts ----

template <class T>
INLINE void unzip(const T* pairs, int64_t n, float* gate, float* up) {
  each(n, [=](int64_t i, auto lanes) {
    vfloat g, u;
    load_pairs(pairs + 2 * i, lanes, g, u);
    store(gate + i, g);
    store(up + i, u);
  });
}

template <class T>
INLINE void zip(T* pairs, int64_t n, const float* gate, const float* up) {
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
  const Forward compute = FORWARD[call.activation];
  const bool streams_y = streams(y, call.rows, call.columns);
  each_chunk(call.rows, call.columns, [=](int64_t at, int64_t row, int64_t column, int64_t n) {
    float g_buffer[CHUNK], u_buffer[CHUNK], y_buffer[CHUNK];
    const float *g = g_buffer, *u = u_buffer;
    if (up) {
      g = widened(gate + row * gate_row + column, n, g_buffer);
      u = widened(up + row * up_row + column, n, u_buffer);
    } else {
      unzip(gate + row * gate_row + 2 * column, n, g_buffer, u_buffer);
    }
    float* result = place(y + at, y_buffer, streams_y);
    compute(settings, g, u, result, n);
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
  const Backward compute = BACKWARD[call.activation];
  const bool streams_d = streams(dgate, call.rows, call.columns) && (!dup || streams(dup, call.rows, call.columns));
  each_chunk(call.rows, call.columns, [=](int64_t at, int64_t row, int64_t column, int64_t n) {
    float d_buffer[CHUNK], g_buffer[CHUNK], u_buffer[CHUNK], dg_buffer[CHUNK], du_buffer[CHUNK];
    const float* d = widened(grad + at, n, d_buffer);
    if (!up) {
      unzip(gate + row * gate_row + 2 * column, n, g_buffer, u_buffer);
      compute(settings, d, g_buffer, u_buffer, dg_buffer, du_buffer, n);
      zip(dgate + row * gradient_row + 2 * column, n, dg_buffer, du_buffer);
      return;
    }
    const float *g = widened(gate + row * gate_row + column, n, g_buffer),
                *u = widened(up + row * up_row + column, n, u_buffer);
    T *dg = moved(dgate, row * gradient_row + column), *du = moved(dup, row * gradient_row + column);
    float *dg_result = place(dg, dg_buffer, streams_d), *du_result = place(du, du_buffer, streams_d);
    compute(settings, d, g, u, dg_result, du_result, n);
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

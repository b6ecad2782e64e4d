// The cross entropy of rows of logits and their targets, and the gradient of the logits.
//
// A row passes in chunks that stay in the L1 cache, so that its numbers are read from memory once.
#include "elementwise/loss.h"
#include "math/sigmoid.h"
#include "once.h"
#include "rows.h"

namespace fusedops {
namespace {

// ---- Chunks of capped logits ----

NOINLINE void cap_chunk(const float* x, float* z, int64_t n, float cap) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) { store(z + i, tanh_of(load(x + i, lanes) / cap) * cap); });
}

NOINLINE void gradient_of_capped_chunk(const float* x, float* d, int64_t n, RowGradient row) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    const auto tanh = tanh_of(load(x + i, lanes) / row.cap);
    const auto dz = exp_nonpositive(tanh * row.cap - row.origin) * row.factor - row.spread;
    store(d + i, dz * (1.0f - tanh * tanh), lanes);
  });
}

NOINLINE float hit_of_target(float x, RowGradient row) {
  if (row.cap == 0) return row.hit;
  const float tanh = tanh_of(all(x) / row.cap)[0];
  return row.hit * (1 - tanh * tanh);
}

// ---- Rows ----

struct Settings {
  int64_t rows, columns, inner_rows, outer_stride, row_stride, ignore_index, reduction;
  double smoothing, z_loss;
  float cap;
  explicit Settings(const CrossEntropy& call)
      : rows(call.rows),
        columns(call.columns),
        inner_rows(call.inner_rows),
        outer_stride(call.outer_stride),
        row_stride(call.row_stride),
        ignore_index(call.ignore_index),
        reduction(call.reduction),
        smoothing(call.label_smoothing),
        z_loss(call.z_loss),
        cap(to_float(call.softcap)) {}

  INLINE int64_t place_of_row(int64_t row) const {
    return row / inner_rows * outer_stride + row % inner_rows * row_stride;
  }

  template <class F>
  void each_row(F f) const {
    const int64_t rows_of_block = std::max<int64_t>(1, BLOCK / columns), all_rows = rows;
    run_blocks(divide_up(rows, rows_of_block), [=](int64_t block) {
      for (int64_t row = block * rows_of_block; row < std::min(all_rows, (block + 1) * rows_of_block); row++) f(row);
      stream_end();
    });
  }
};

// What "mean" divides the sum by; 1 for "sum" and "none".
inline double divisor(const CrossEntropy& call, const int64_t* target) {
  if (call.reduction == MEAN_BY) return to_float(call.denominator);
  if (call.reduction != MEAN) return 1;
  int64_t counted = 0;
  for (int64_t row = 0; row < call.rows; row++) counted += target[row] != call.ignore_index;
  return double(std::max<int64_t>(1, counted));
}

// lse of a row whose sum is NaN: inf where no number is NaN.
template <class T>
NOINLINE float special_lse(const T* x, int64_t n, float cap) {
  bool is_nan = cap != 0;
  for (int64_t i = 0; i < n; i++) {
    const float v = number_at(x + i);
    is_nan |= v != v;
  }
  return is_nan ? NOT_A_NUMBER : INF;
}

// The row functions for the dtypes have one signature; what is around them exists once.
typedef float (*ForwardRow)(const Settings& s, const void* x, int64_t at, int64_t target, float& row_lse);
typedef void (*BackwardRow)(const void* x, int64_t x_at, void* dx, int64_t dx_at, int64_t columns, int64_t target,
                            RowGradient row, bool streams_dx);

template <class T>
float forward_row(const Settings& s, const void* logits, int64_t first, int64_t target, float& row_lse) {
  const T* x = (const T*)logits + first;
  Exponentials row;
  double total = 0;  // of the differences from a number of the row, all of which may be large beside them
  float origin = 0;
  const auto add = [&](const auto* z, int64_t at, int64_t n) {
    row.add(z, n, {(const char*)(x + at + CHUNK), sizeof(T)});
    if (s.smoothing == 0) return;
    if (const float first = number_at(z); at == 0 && std::isfinite(first)) origin = first;
    total += sum_of_chunk(z, n, origin);
  };
  for (int64_t at = 0; at < s.columns; at += CHUNK) {
    const int64_t n = std::min(CHUNK, s.columns - at);
    float buffer[CHUNK];
    if (s.cap == 0) {
      add(readable(x + at, n, buffer), at, n);
    } else {
      cap_chunk(widened_apart(x + at, n, buffer), buffer, n, s.cap);
      add((const float*)buffer, at, n);
    }
  }
  const bool valid = target >= 0 && target < s.columns;
  float z_target = valid ? number_at(x + target) : NOT_A_NUMBER;
  if (s.cap != 0) z_target = tanh_of(all(z_target) / s.cap)[0] * s.cap;
  double lse;
  const double loss = loss_of_row(s.smoothing, s.z_loss, row, z_target, total / double(s.columns) + origin, lse);
  row_lse = lse == lse ? to_float(lse) : special_lse(x, s.columns, s.cap);
  return to_float(loss);
}

// True where a target that is not ignored is no class.
bool is_one_outside(const CrossEntropy& call, const int64_t* target) {
  bool outside = false;
  for (int64_t row = 0; row < call.rows; row++) {
    outside |= (target[row] != call.ignore_index) & ((uint64_t)target[row] >= (uint64_t)call.columns);
  }
  return outside;
}

Status forward(const CrossEntropyForward& call) {
  const Settings s(call.settings);
  const ForwardRow loss_of =
      with_dtype(call.settings.dtype, [](auto element) -> ForwardRow { return forward_row<decltype(element)>; });
  const void* x = call.x;
  const int64_t* target = call.target;
  if (is_one_outside(call.settings, target)) return TARGET_OUTSIDE;
  const FloatBuffer buffer(s.reduction == NONE ? 0 : s.rows);
  float *losses = s.reduction == NONE ? call.loss : buffer.data(), *lses = call.lse;
  if (s.rows && !losses) return OUT_OF_MEMORY;
  s.each_row([=](int64_t row) {
    float lse = 0;
    const int64_t place = read_once(target + row);
    losses[row] = place == s.ignore_index ? 0 : loss_of(s, x, s.place_of_row(row), place, lse);
    if (lses) lses[row] = lse;
  });
  if (s.reduction == NONE) return OK;
  double total = 0;
  for (int64_t row = 0; row < s.rows; row++) total += losses[row];
  *call.loss = to_float(total / divisor(call.settings, target));
  return OK;
}

template <class T>
void backward_row(const void* logits, int64_t x_at, void* gradient, int64_t dx_at, int64_t columns, int64_t target,
                  RowGradient row, bool streams_dx) {
  const T* x = (const T*)logits + x_at;
  T* dx = (T*)gradient + dx_at;
  for (int64_t at = 0; at < columns; at += CHUNK) {
    const int64_t n = std::min(CHUNK, columns - at);
    float x_buffer[CHUNK], d_buffer[CHUNK];
    float* d = place(dx + at, d_buffer, streams_dx);
    if (row.cap == 0) {
      gradient_of_chunk(readable(x + at, n, x_buffer), d, n, row, {(const char*)(x + at + CHUNK), sizeof(T)});
    } else {
      gradient_of_capped_chunk(widened_apart(x + at, n, x_buffer), d, n, row);
    }
    if (target >= at && target < at + n) d[target - at] -= hit_of_target(number_at(x + target), row);
    rounded(dx + at, n, d, streams_dx);
  }
}

Status backward(const CrossEntropyBackward& call) {
  const Settings s(call.settings);
  const BackwardRow gradient_of =
      with_dtype(call.settings.dtype, [](auto element) -> BackwardRow { return backward_row<decltype(element)>; });
  const bool streams_dx = with_dtype(
      call.settings.dtype, [&](auto element) { return streams((const decltype(element)*)call.dx, s.rows, s.columns); });
  const void* x = call.x;
  void* dx = call.dx;
  const int64_t *target = call.target, size = call.settings.dtype == FLOAT32 ? 4 : 2;
  const float *grad = call.grad, *lses = call.lse;
  const double divided_by = divisor(call.settings, target);
  const bool grad_of_rows = s.reduction == NONE;
  s.each_row([=](int64_t row) {
    const int64_t place = read_once(target + row), at = row * s.columns;
    if (place == s.ignore_index) {
      memset((char*)dx + at * size, 0, s.columns * size);
      return;
    }
    const bool valid = place >= 0 && place < s.columns;
    const double scale = valid ? grad[grad_of_rows ? row : 0] / divided_by : NOT_A_NUMBER;
    const double factor = s.z_loss != 0 ? scale * (1 + 2 * s.z_loss * lses[row]) : scale;  // lse may be infinite
    const RowGradient gradient{lses[row], to_float(factor), to_float(scale * s.smoothing / double(s.columns)),
                               to_float(scale * (1 - s.smoothing)), s.cap};
    gradient_of(x, s.place_of_row(row), dx, at, s.columns, place, gradient, streams_dx);
  });
  return OK;
}

bool fits(const CrossEntropy& call) {
  return call.rows >= 0 && call.columns >= 1 && call.inner_rows >= 1 && call.reduction >= NONE &&
         call.reduction <= MEAN_BY;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_cross_entropy_forward(const CrossEntropyForward* call) {
  const CrossEntropy& settings = call->settings;
  if (!fits(settings) || (settings.rows && (!call->x || !call->target))) return INVALID;
  if (!call->loss) return settings.rows || settings.reduction != NONE ? INVALID : OK;
  return forward(*call);
}

FUSEDOPS_EXPORT int fusedops_cross_entropy_backward(const CrossEntropyBackward* call) {
  const CrossEntropy& settings = call->settings;
  if (!settings.rows) return OK;
  if (!fits(settings) || !call->grad || !call->x || !call->lse || !call->target || !call->dx) return INVALID;
  use_huge_pages(call->dx, settings.rows * settings.columns, settings.dtype);
  return backward(*call);
}

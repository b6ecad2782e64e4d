// Chunks of rows of the logits of a linear layer, between the products: what is wanted of each row, and the gradient of
// the logits in place. A row stays in the L2 cache from the first reading to the last writing.
#include "loss.h"
#include "parallel.h"

namespace fusedops {
namespace {

// z = softcap * tanh((x + bias) / softcap), or x + bias.
NOINLINE void z_of_chunk(const float* x, const float* bias, float* z, int64_t n, float cap) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    auto v = load(x + i, lanes);
    if (bias) v = v + load(bias + i, lanes);
    if (cap != 0) v = tanh_of(v / cap) * cap;
    store(z + i, v, lanes);
  });
}

// d, the gradient of z, becomes that of x + bias.
NOINLINE void add_slope(const float* z, float* d, int64_t n, float cap) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    const auto tanh = load(z + i, lanes) / cap;
    store(d + i, load(d + i, lanes) * (1.0f - tanh * tanh), lanes);
  });
}

// One row; the functions of a chunk get its z: where the logits are z, these are read without a copy.
template <class T>
struct LogitRow {
  T* x;
  const float* bias;
  int64_t columns;
  float cap;

  LogitRow(const LogitRows& rows, int64_t row)
      : x((T*)rows.x + row * rows.columns), bias(rows.bias), columns(rows.columns), cap(to_float(rows.softcap)) {}

  template <class F>
  INLINE void with_z(int64_t at, int64_t n, float* buffer, F f) const {
    if (!bias && cap == 0) {
      f(readable(x + at, n, buffer));
    } else {
      z_of_chunk(widened_apart(x + at, n, buffer), bias ? bias + at : nullptr, buffer, n, cap);
      f((const float*)buffer);
    }
  }

  // Calls f(z, at, n) for each chunk.
  template <class F>
  INLINE void each_chunk(F f) const {
    float buffer[CHUNK];
    for (int64_t at = 0; at < columns; at += CHUNK) {
      const int64_t n = std::min(CHUNK, columns - at);
      with_z(at, n, buffer, [&](const auto* z) { f(z, at, n); });
    }
  }

  // Calls f(z, d, at, n) for each chunk, which writes the gradient of z to d; that of the logits replaces them. That of
  // the target is `hit` less.
  template <class F>
  INLINE void each_gradient(int64_t target, float hit, F f) const {
    float buffer[CHUNK], gradient[CHUNK];
    for (int64_t at = 0; at < columns; at += CHUNK) {
      const int64_t n = std::min(CHUNK, columns - at);
      with_z(at, n, buffer, [&](const auto* z) {
        float* d = cap == 0 ? place(x + at, gradient, false) : gradient;
        f(z, d, at, n);
        if (target >= at && target < at + n) d[target - at] -= hit;
        if (cap != 0) add_slope((const float*)z, d, n, cap);
        rounded(x + at, n, d, false);
      });
    }
  }

  INLINE Ahead after(int64_t at) const { return {(const char*)(x + at + CHUNK), sizeof(T)}; }

  // z of one column.
  float z_at(int64_t column) const {
    float z[CHUNK];
    with_z(column, 1, z, [&](const auto* found) { z[0] = number_at(found); });
    return z[0];
  }
};

// True where all targets are columns.
bool has_targets(const LogitRows& rows) {
  bool all = true;
  for (int64_t row = 0; row < rows.rows; row++) all &= (uint64_t)rows.target[row] < (uint64_t)rows.columns;
  return all;
}

// Calls f for each row, which has its own results: the threads change nothing.
template <class F>
void each_row(const LogitRows& rows, F f) {
  const int64_t at_once = std::max<int64_t>(1, BLOCK / rows.columns), count = rows.rows;
  run_blocks(divide_up(count, at_once), [=](int64_t block) {
    for (int64_t row = block * at_once; row < std::min(count, (block + 1) * at_once); row++) f(row);
  });
}

bool fits(const LogitRows& rows) {
  return rows.rows >= 0 && rows.columns >= 1 && (!rows.rows || (rows.x && rows.target));
}

typedef float (*LossOfRow)(const LinearLoss& call, int64_t row, int64_t target, float scale);

// Returns the loss of a row.
template <class T>
float loss_of(const LinearLoss& call, int64_t row_number, int64_t target, float scale) {
  const LogitRow<T> row(call.logits, row_number);
  const double smoothing = call.label_smoothing, z_loss = call.z_loss;
  Exponentials exponentials;
  double total = 0;  // of the differences from a number of the row, all of which may be large beside them
  float origin = 0;
  row.each_chunk([&](const auto* z, int64_t at, int64_t n) {
    exponentials.add(z, n, row.after(at));
    if (smoothing == 0) return;
    if (const float first = number_at(z); at == 0 && std::isfinite(first)) origin = first;
    total += sum_of_chunk(z, n, origin);
  });
  double lse;
  const double mean = total / double(row.columns) + origin;
  const double loss = loss_of_row(smoothing, z_loss, exponentials, row.z_at(target), mean, lse);
  if (!call.gradient) return to_float(loss);
  const double factor = z_loss != 0 ? scale * (1 + 2 * z_loss * lse) : scale;  // lse may be infinite
  // the exponentials of differences from the largest number are more exact than of those from lse
  const RowGradient gradient{exponentials.top(), to_float(factor / exponentials.sum()),
                             to_float(scale * smoothing / double(row.columns))};
  row.each_gradient(target, to_float(scale * (1 - smoothing)), [=](const auto* z, float* d, int64_t at, int64_t n) {
    gradient_of_chunk(z, d, n, gradient, row.after(at));
  });
  return to_float(loss);
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_linear_loss(const LinearLoss* call) {
  const LogitRows rows = call->logits;
  if (!fits(rows) || (rows.rows && !call->loss)) return INVALID;
  if (!has_targets(rows)) return TARGET_OUTSIDE;
  const LossOfRow loss_of_row =
      with_dtype(rows.dtype, [](auto element) -> LossOfRow { return loss_of<decltype(element)>; });
  each_row(rows, [=](int64_t row) {
    const int64_t target =
        std::min(std::max<int64_t>(0, rows.target[row]), rows.columns - 1);  // another thread may write
    call->loss[row] = loss_of_row(*call, row, target, call->scale ? call->scale[row] : 1.0f);
  });
  return OK;
}

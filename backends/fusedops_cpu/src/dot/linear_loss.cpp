// Chunks of rows of the logits of a linear layer, between the products: what is wanted of each row, and the gradient of
// the logits in place. A row stays in the L2 cache from the first reading to the last writing.
#include "elementwise/loss.h"
#include "math/sigmoid.h"
#include "once.h"
#include "parallel.h"

namespace fusedops {
namespace {

// z = softcap * tanh((x + bias) / softcap) / temperature; without a softcap (x + bias) / temperature.
NOINLINE void z_of_chunk(const float* x, const float* bias, float* z, int64_t n, float cap, float temperature) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    auto v = load(x + i, lanes);
    if (bias) v = v + load(bias + i, lanes);
    if (cap != 0) v = tanh_of(v / cap) * cap;
    if (temperature != 1) v = v / temperature;
    store(z + i, v, lanes);
  });
}

// d, the gradient of the capped logits, becomes that of x + bias. cap: in units of z.
NOINLINE void add_slope(const float* z, float* d, int64_t n, float cap) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    const auto tanh = load(z + i, lanes) / cap;
    store(d + i, load(d + i, lanes) * (1.0f - tanh * tanh), lanes);
  });
}

// One row; the functions of a chunk get its z: where the logits are z, these are read without a copy.
struct LogitRow {
  float* x;
  const float* bias;
  int64_t columns;
  float cap, temperature;

  LogitRow(const LogitRows& rows, int64_t row, double temperature = 1)
      : x(rows.x + row * rows.columns),
        bias(rows.bias),
        columns(rows.columns),
        cap(to_float(rows.softcap)),
        temperature(to_float(temperature)) {}

  template <class F>
  INLINE void with_z(int64_t at, int64_t n, float* buffer, F f) const {
    const float* z = x + at;
    if (bias || cap != 0 || temperature != 1) {
      z_of_chunk(z, bias ? bias + at : nullptr, buffer, n, cap, temperature);
      z = buffer;
    }
    f(z);
  }

  // Calls f(z, at, n) for each chunk.
  template <class F>
  INLINE void each_chunk(F f) const {
    float buffer[CHUNK];
    for (int64_t at = 0; at < columns; at += CHUNK) {
      const int64_t n = std::min(CHUNK, columns - at);
      with_z(at, n, buffer, [&](const float* z) { f(z, at, n); });
    }
  }

  // Calls f(z, d, at, n) for each chunk, which writes the gradient of the capped logits to d; that of the logits
  // replaces them, as T from the start of the row: a narrow chunk is behind the logits that are still to be read. That
  // of the target is `hit` less.
  template <class T, class F>
  INLINE void each_gradient(int64_t target, float hit, F f) const {
    float buffer[CHUNK], gradient[CHUNK];
    T* to = (T*)x;
    for (int64_t at = 0; at < columns; at += CHUNK) {
      const int64_t n = std::min(CHUNK, columns - at);
      with_z(at, n, buffer, [&](const float* z) {
        float* d = cap == 0 ? place(to + at, gradient, false) : gradient;
        f(z, d, at, n);
        if (target >= at && target < at + n) d[target - at] -= hit;
        if (cap != 0) add_slope(z, d, n, cap / temperature);
        rounded(to + at, n, d, false);
      });
    }
  }

  INLINE Ahead after(int64_t at) const { return {(const char*)(x + at + CHUNK), sizeof(float)}; }

  // z of one column.
  float z_at(int64_t column) const {
    float z[CHUNK];
    with_z(column, 1, z, [&](const float* found) { z[0] = *found; });
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
  if (rows.gradient_dtype != FLOAT32 && rows.gradient_dtype != BFLOAT16) return false;
  return rows.rows >= 0 && rows.columns >= 1 && (!rows.rows || (rows.x && rows.target));
}

typedef float (*LossOfRow)(const LinearLoss& call, int64_t row, int64_t target, float scale);

// Returns the loss of a row.
template <class T>
float loss_of(const LinearLoss& call, int64_t row_number, int64_t target, float scale) {
  const LogitRow row(call.logits, row_number);
  const double smoothing = call.label_smoothing, z_loss = call.z_loss;
  Exponentials exponentials;
  double total = 0;  // of the differences from a number of the row, all of which may be large beside them
  float origin = 0;
  row.each_chunk([&](const float* z, int64_t at, int64_t n) {
    exponentials.add(z, n, row.after(at));
    if (smoothing == 0) return;
    if (const float first = *z; at == 0 && std::isfinite(first)) origin = first;
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
  row.each_gradient<T>(target, to_float(scale * (1 - smoothing)), [=](const float* z, float* d, int64_t at, int64_t n) {
    gradient_of_chunk(z, d, n, gradient, row.after(at));
  });
  return to_float(loss);
}

// ---- Log probabilities and entropies ----

constexpr float LEAST = -1e4f;  // a logarithm whose exponential is 0; finite, as 0 times -inf is NaN

// The sum of exp(z - top) * (z - top).
NOINLINE float weighted_sum_of_chunk(const float* z, int64_t n, float top) {
  vfloat sums = {};
  each_group<Pair>(n, [&](int64_t i, auto lanes) {
    const auto l = at_most(0.0f, at_least(LEAST, where_loaded(load(z + i, lanes), lanes, -INF) - top));
    sums += joined_sum(exp_nonpositive(l) * l);
  });
  return sum_of(sums);
}

// With l = log(p), the gradient is p * (of_entropy * (l + entropy) + of_p).
struct LogProbGradient {
  float top, log_sum, of_p, of_entropy, entropy;
};

NOINLINE void log_prob_gradient_of_chunk(const float* z, float* d, int64_t n, LogProbGradient row, Ahead ahead) {
  each_group<Pair>(n, [=](int64_t i, auto lanes) {
    ahead.fetch(i, lanes);
    const auto l = at_most(0.0f, at_least(LEAST, (load(z + i, lanes) - row.top) - row.log_sum));
    const auto p = exp_nonpositive(l);  // the factors may be large: their sum is too, and then no p makes it small
    store(d + i, p * (l + row.entropy) * row.of_entropy + p * row.of_p, lanes);
  });
}

struct RowStatistics {
  double top, log_sum, entropy;
};

RowStatistics statistics_of(const LogitRow& row, bool with_entropy) {
  Exponentials exponentials;
  row.each_chunk([&](const float* z, int64_t at, int64_t n) { exponentials.add(z, n, row.after(at)); });
  const float top = exponentials.top(), sum = exponentials.sum();
  const double log_sum = std::log(double(sum));
  double weighted = 0;
  if (with_entropy)
    row.each_chunk([&](const float* z, int64_t, int64_t n) { weighted += weighted_sum_of_chunk(z, n, top); });
  return {top, log_sum, log_sum - weighted / sum};
}

void log_prob_of(const LinearLogProbs& call, int64_t row_number, int64_t target) {
  const LogitRow row(call.logits, row_number, call.temperature);
  const RowStatistics statistics = statistics_of(row, call.entropy);
  call.logp[row_number] = to_float(double(row.z_at(target)) - statistics.top - statistics.log_sum);
  call.lse[row_number] = to_float(statistics.top + statistics.log_sum);
  if (call.entropy) call.entropy[row_number] = to_float(statistics.entropy);
}

template <class T>
void log_prob_gradient_of(const LinearLogProbsBackward& call, int64_t row_number, int64_t target) {
  const LogitRow row(call.logits, row_number, call.temperature);
  const float hit = call.grad_logp[row_number] / row.temperature;
  const float of_entropy = call.grad_entropy ? -call.grad_entropy[row_number] / row.temperature : 0;
  // of these logits: beside lse and entropy of others, whose roundings differ, p - 1 of a sure target would not be 0
  const RowStatistics statistics = statistics_of(row, of_entropy != 0);
  const LogProbGradient gradient{to_float(statistics.top), to_float(statistics.log_sum), -hit, of_entropy,
                                 of_entropy != 0 ? to_float(statistics.entropy) : 0};
  row.each_gradient<T>(target, -hit, [=](const float* z, float* d, int64_t at, int64_t n) {
    log_prob_gradient_of_chunk(z, d, n, gradient, row.after(at));
  });
}

// Calls f(row, target) for each row.
template <class F>
int each_target(const LogitRows& rows, F f) {
  if (!has_targets(rows)) return TARGET_OUTSIDE;
  each_row(rows, [=](int64_t row) {
    f(row, std::min(std::max<int64_t>(0, read_once(rows.target + row)), rows.columns - 1));
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_linear_loss(const LinearLoss* call) {
  const LogitRows rows = call->logits;
  if (!fits(rows) || (rows.rows && !call->loss)) return INVALID;
  const LossOfRow loss_of_row = rows.gradient_dtype == BFLOAT16 ? &loss_of<bfloat16> : &loss_of<float>;
  return each_target(rows, [=](int64_t row, int64_t target) {
    call->loss[row] = loss_of_row(*call, row, target, call->scale ? call->scale[row] : 1.0f);
  });
}

FUSEDOPS_EXPORT int fusedops_linear_log_probs(const LinearLogProbs* call) {
  const LogitRows& rows = call->logits;
  if (!fits(rows) || (rows.rows && (!call->logp || !call->lse))) return INVALID;
  return each_target(rows, [=](int64_t row, int64_t target) { log_prob_of(*call, row, target); });
}

FUSEDOPS_EXPORT int fusedops_linear_log_probs_backward(const LinearLogProbsBackward* call) {
  const LogitRows& rows = call->logits;
  if (!fits(rows) || (rows.rows && !call->grad_logp)) return INVALID;
  const auto gradient_of_row =
      rows.gradient_dtype == BFLOAT16 ? &log_prob_gradient_of<bfloat16> : &log_prob_gradient_of<float>;
  return each_target(rows, [=](int64_t row, int64_t target) { gradient_of_row(*call, row, target); });
}

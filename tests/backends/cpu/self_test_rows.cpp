// Norms and gated activations of the self test, beside double arithmetic.
#include "self_test.h"

// The mean (of LayerNorm) and 1 / sqrt(mean square + eps) of a row of s.
static void moments(const Tensor& s, int64_t at, int64_t n, bool centered, double& mean, double& rstd) {
  double sum = 0, squares = 0;
  for (int64_t j = 0; j < n; j++) sum += s.at(at + j);
  mean = centered ? sum / n : 0;
  for (int64_t j = 0; j < n; j++) squares += (s.at(at + j) - mean) * (s.at(at + j) - mean);
  rstd = 1 / std::sqrt(squares / n + 1e-2);
}

static void test_norm(int64_t dtype, int64_t rows, int64_t columns, bool centered, bool add, int64_t weight_dtype) {
  const int64_t count = rows * columns;
  Tensor x = random_tensor(dtype, count), residual = random_tensor(dtype, count), grad = random_tensor(dtype, count);
  Tensor grad_s = random_tensor(dtype, count), weight = random_tensor(weight_dtype, columns);
  Tensor bias = random_tensor(dtype, columns), y(dtype, count), s(dtype, count), dx(dtype, count);
  Tensor dresidual(dtype, count), dweight(weight_dtype, columns), dbias(dtype, columns);
  std::vector<float> means(rows), rstds(rows);
  NormForward forward{x.data(),
                      add ? residual.data() : nullptr,
                      weight.data(),
                      centered ? bias.data() : nullptr,
                      y.data(),
                      add ? s.data() : nullptr,
                      centered ? means.data() : nullptr,
                      rstds.data(),
                      dtype,
                      weight_dtype,
                      dtype,
                      rows,
                      columns,
                      centered,
                      1e-2,
                      0.5};
  CHECK(fusedops_norm_forward(&forward) == OK, "norm");
  Tensor& given = add ? s : x;
  NormBackward backward{grad.data(),
                        add ? grad_s.data() : nullptr,
                        given.data(),
                        weight.data(),
                        centered ? means.data() : nullptr,
                        rstds.data(),
                        dx.data(),
                        add ? dresidual.data() : nullptr,
                        dweight.data(),
                        centered ? dbias.data() : nullptr,
                        dtype,
                        weight_dtype,
                        dtype,
                        rows,
                        columns,
                        0.5};
  CHECK(fusedops_norm_backward(&backward) == OK, "norm backward");
  const double tolerance = 8 * x.tolerance();
  std::vector<double> weight_sums(columns), bias_sums(columns);
  for (int64_t row = 0; row < rows; row++) {
    double mean, rstd, sum = 0, product = 0;
    const int64_t at = row * columns;
    moments(given, at, columns, centered, mean, rstd);
    auto normal = [&](int64_t j) { return (given.at(at + j) - mean) * rstd; };
    auto scaled = [&](int64_t j) { return grad.at(at + j) * (weight.at(j) + 0.5); };
    for (int64_t j = 0; j < columns; j++) sum += centered ? scaled(j) : 0, product += scaled(j) * normal(j);
    for (int64_t j = 0; j < columns; j++) {
      const double want = normal(j) * (weight.at(j) + 0.5) + (centered ? bias.at(j) : 0);
      CHECK(close(y.at(at + j), want, tolerance), "norm of %lld: %g, not %g", (long long)columns, y.at(at + j), want);
      if (add) {
        const double total = x.at(at + j) + residual.at(at + j);
        CHECK(close(s.at(at + j), total, x.tolerance()), "sum %g, not %g", s.at(at + j), total);
      }
      const double slope = rstd * (scaled(j) - normal(j) * product / columns - sum / columns);
      const double all = slope + (add ? grad_s.at(at + j) : 0);
      CHECK(close(dx.at(at + j), all, 10 * tolerance), "norm backward %g, not %g", dx.at(at + j), all);
      CHECK(!add || dresidual.at(at + j) == dx.at(at + j), "gradient of the residual");
      weight_sums[j] += grad.at(at + j) * normal(j), bias_sums[j] += grad.at(at + j);
    }
  }
  for (int64_t j = 0; j < columns; j++) {
    const double bound = 50 * std::max(x.tolerance(), weight.tolerance());
    CHECK(close(dweight.at(j), weight_sums[j], bound), "dweight %g, not %g", dweight.at(j), weight_sums[j]);
    if (centered) CHECK(close(dbias.at(j), bias_sums[j], bound), "dbias %g, not %g", dbias.at(j), bias_sums[j]);
  }
}

void test_norms(int64_t dtype, int64_t rows, int64_t columns) {
  for (int centered = 0; centered < 2; centered++)
    for (int add = 0; add < 2; add++) test_norm(dtype, rows, columns, centered, add, add ? FLOAT32 : dtype);
}

enum Form { TWO, HALVES, PAIRS };

static void test_gate(int64_t dtype, int64_t rows, int64_t columns, Activation activation, Form form) {
  const int64_t count = rows * columns;
  const double k = std::sqrt(2 / M_PI), limit = 1.5, alpha = 1.25, offset = 1;
  Tensor packed = random_tensor(dtype, 2 * count), grad = random_tensor(dtype, count), y(dtype, count);
  Tensor dpacked(dtype, 2 * count);
  const int64_t size = dtype == FLOAT32 ? 4 : 2;
  // where gate and up of an element are in `packed`: two tensors one after the other, halves of rows, or pairs
  auto gate_at = [&](int64_t i) { return form == TWO ? i : form == PAIRS ? 2 * i : i / columns * columns + i; };
  auto up_at = [&](int64_t i) { return form == TWO ? count + i : form == PAIRS ? 2 * i + 1 : gate_at(i) + columns; };
  auto place = [&](Tensor& t, int64_t at) { return (void*)((char*)t.data() + at * size); };
  const int64_t row = form == HALVES ? 2 * columns : columns;
  const int64_t call_rows = form == PAIRS ? 1 : rows, call_columns = form == PAIRS ? count : columns;
  GatedForward forward{packed.data(), form == PAIRS ? nullptr : place(packed, up_at(0)),
                       y.data(),      dtype,
                       call_rows,     call_columns,
                       activation,    row,
                       row,           limit,
                       alpha,         offset};
  CHECK(fusedops_gated_forward(&forward) == OK, "gated");
  GatedBackward backward{grad.data(),
                         packed.data(),
                         form == PAIRS ? nullptr : place(packed, up_at(0)),
                         dpacked.data(),
                         form == PAIRS ? nullptr : place(dpacked, up_at(0)),
                         dtype,
                         call_rows,
                         call_columns,
                         activation,
                         row,
                         row,
                         row,
                         limit,
                         alpha,
                         offset};
  CHECK(fusedops_gated_backward(&backward) == OK, "gated backward");
  for (int64_t i = 0; i < count; i++) {
    const double gate = packed.at(gate_at(i)), up = packed.at(up_at(i));
    double value, slope, factor = up, passes_gate = 1, passes_up = 1;
    if (activation == SWISH) {
      const double g = std::min(gate, limit), sigmoid = 1 / (1 + std::exp(-alpha * g));
      factor = std::max(-limit, std::min(limit, up)) + offset;
      passes_gate = gate <= limit, passes_up = std::fabs(up) <= limit;
      value = g * sigmoid, slope = sigmoid * (1 + alpha * g * (1 - sigmoid));
    } else {
      const double t = std::tanh(k * gate * (1 + 0.044715 * gate * gate));
      const double cdf = activation == GELU_TANH ? 0.5 * (1 + t) : 0.5 * std::erfc(-gate * std::sqrt(0.5));
      value = gate * cdf;
      slope = cdf + gate * (activation == GELU_TANH ? 0.5 * (1 - t * t) * k * (1 + 3 * 0.044715 * gate * gate)
                                                    : std::exp(-0.5 * gate * gate) / std::sqrt(2 * M_PI));
    }
    const double g = grad.at(i), tolerance = 4 * y.tolerance();
    CHECK(close(y.at(i), value * factor, tolerance), "gated(%g, %g) = %g", gate, up, y.at(i));
    CHECK(close(dpacked.at(gate_at(i)), passes_gate * g * factor * slope, 4 * tolerance), "d gate at %g", gate);
    CHECK(close(dpacked.at(up_at(i)), passes_up * g * value, 4 * tolerance), "d up at %g", gate);
  }
}

void test_gated(int64_t dtype, int64_t rows, int64_t columns) {
  for (Activation activation : {SWISH, GELU_TANH, GELU_ERF})
    for (Form form : {TWO, HALVES, PAIRS}) test_gate(dtype, rows, columns, activation, form);
}

static void test_gated_norm(int64_t dtype, int64_t rows, int64_t columns, int64_t groups, bool first, bool sigmoid) {
  const int64_t width = groups * columns, count = rows * width, stride = width + 3;  // rows of gate are apart
  Tensor x = random_tensor(dtype, count), gate = random_tensor(dtype, rows * stride),
         grad = random_tensor(dtype, count);
  Tensor weight = random_tensor(dtype, width), y(dtype, count), dx(dtype, count), dgate(dtype, count);
  Tensor dweight(dtype, width);
  std::vector<float> rstds(rows * groups);
  GatedNormForward forward{x.data(), gate.data(), weight.data(), y.data(), rstds.data(), dtype,   dtype, rows,
                           groups,   columns,     width,         stride,   first,        sigmoid, 1e-2,  0.5};
  CHECK(fusedops_gated_norm_forward(&forward) == OK, "gated norm");
  GatedNormBackward backward{grad.data(),  x.data(),       gate.data(), weight.data(), rstds.data(), dx.data(),
                             dgate.data(), dweight.data(), dtype,       dtype,         rows,         groups,
                             columns,      width,          stride,      first,         sigmoid,      0.5};
  CHECK(fusedops_gated_norm_backward(&backward) == OK, "gated norm backward");
  const double tolerance = 16 * x.tolerance();
  std::vector<double> sums(width);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++) {
      const int64_t at = row * width + group * columns, gate_at = row * stride + group * columns;
      auto s = [&](int64_t j) { return 1 / (1 + std::exp(-gate.at(gate_at + j))); };
      auto act = [&](int64_t j) { return sigmoid ? s(j) : s(j) * gate.at(gate_at + j); };
      auto slope = [&](int64_t j) { return s(j) * (sigmoid ? 1 - s(j) : 1 + gate.at(gate_at + j) * (1 - s(j))); };
      auto z = [&](int64_t j) { return x.at(at + j) * (first ? act(j) : 1); };
      auto scale = [&](int64_t j) { return weight.at(group * columns + j) + 0.5; };
      auto g = [&](int64_t j) { return grad.at(at + j) * (first ? 1 : act(j)); };
      double squares = 0, product = 0;
      for (int64_t j = 0; j < columns; j++) squares += z(j) * z(j);
      const double rstd = 1 / std::sqrt(squares / columns + 1e-2);
      for (int64_t j = 0; j < columns; j++) product += g(j) * scale(j) * z(j) * rstd;
      for (int64_t j = 0; j < columns; j++) {
        const double normal = z(j) * rstd, want = normal * scale(j) * (first ? 1 : act(j));
        CHECK(close(y.at(at + j), want, tolerance), "gated norm %g, not %g", y.at(at + j), want);
        const double dz = rstd * (g(j) * scale(j) - normal * product / columns), all = dz * (first ? act(j) : 1);
        CHECK(close(dx.at(at + j), all, 10 * tolerance), "gradient of x %g, not %g", dx.at(at + j), all);
        const double of_gate = (first ? dz * x.at(at + j) : grad.at(at + j) * normal * scale(j)) * slope(j);
        CHECK(close(dgate.at(at + j), of_gate, 10 * tolerance), "of gate %g, not %g", dgate.at(at + j), of_gate);
        sums[group * columns + j] += g(j) * normal;
      }
    }
  for (int64_t j = 0; j < width; j++)
    CHECK(close(dweight.at(j), sums[j], 50 * x.tolerance()), "dweight %g, not %g", dweight.at(j), sums[j]);
}

void test_gated_norms(int64_t dtype, int64_t rows, int64_t columns) {
  for (int64_t groups : {1, 3})
    for (bool first : {false, true})
      for (bool sigmoid : {false, true}) test_gated_norm(dtype, rows, columns, groups, first, sigmoid);
}

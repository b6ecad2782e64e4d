// Cross entropy, the chunks of linear_cross_entropy and rotary embedding of the self test, beside double arithmetic.
#include "self_test.h"

static void test_loss(int64_t dtype, int64_t rows, int64_t columns, double smoothing, double softcap, int64_t gap) {
  const double z_loss = smoothing / 10;
  const int64_t stride = columns + gap;  // of a cut of a wider tensor, without its last elements
  Tensor x = random_tensor(dtype, rows * stride - gap), dx(dtype, rows * columns);
  std::vector<int64_t> target(rows);
  for (int64_t row = 0; row < rows; row++) target[row] = row % 5 == 3 ? -100 : (row * 7919) % columns;
  std::vector<float> loss(rows), lse(rows), grad(rows);
  for (auto& g : grad) g = random_value();
  CrossEntropy settings{
      dtype, rows, columns, (rows + 1) / 2, (rows + 1) / 2 * stride, stride, -100, NONE, smoothing, z_loss, softcap, 1};
  CrossEntropyForward forward{x.data(), target.data(), loss.data(), lse.data(), settings};
  for (int64_t outside : {columns, int64_t(-1)}) {
    if (!rows) continue;
    std::swap(target[rows - 1], outside);
    CHECK(fusedops_cross_entropy_forward(&forward) == TARGET_OUTSIDE, "a target out of range");
    std::swap(target[rows - 1], outside);
  }
  CHECK(fusedops_cross_entropy_forward(&forward) == OK, "cross entropy");
  CrossEntropyBackward backward{grad.data(), x.data(), lse.data(), target.data(), dx.data(), settings};
  CHECK(fusedops_cross_entropy_backward(&backward) == OK, "cross entropy backward");
  auto capped = [=](double v) { return softcap ? softcap * std::tanh(v / softcap) : v; };
  double total = 0;
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * stride, place = target[row];
    if (place == -100) {
      CHECK(loss[row] == 0 && lse[row] == 0 && dx.at(row * columns) == 0, "an ignored row");
      continue;
    }
    double sum = 0, mean = 0;
    for (int64_t j = 0; j < columns; j++) {
      sum += std::exp(capped(x.at(at + j)));
      mean += capped(x.at(at + j)) / columns;
    }
    const double log_sum = std::log(sum);
    CHECK(close(lse[row], log_sum, 2e-6), "lse %g, not %g", lse[row], log_sum);
    const double want =
        log_sum - (1 - smoothing) * capped(x.at(at + place)) - smoothing * mean + z_loss * log_sum * log_sum;
    CHECK(close(loss[row], want, 4e-6), "loss %g, not %g", loss[row], want);
    total += want, counted++;
    for (int64_t j = 0; j < columns; j++) {
      const double z = capped(x.at(at + j)), slope = softcap ? 1 - z * z / softcap / softcap : 1;
      const double p = std::exp(z - log_sum) * (1 + 2 * z_loss * log_sum);
      const double d = grad[row] * slope * (p - smoothing / columns - (j == place) * (1 - smoothing));
      CHECK(close(dx.at(row * columns + j), d, 2 * x.tolerance()), "d %g, not %g", dx.at(row * columns + j), d);
    }
  }
  if (rows > 6) return;
  forward.settings.reduction = MEAN;
  CHECK(fusedops_cross_entropy_forward(&forward) == OK, "a mean");
  CHECK(close(loss[0], total / std::max<int64_t>(1, counted), 4e-6), "mean %g, not %g", loss[0], total);
}

static void test_linear_loss(int64_t dtype, int64_t rows, int64_t columns, double smoothing, double softcap) {
  const double z_loss = smoothing / 10;
  const bool scaled = smoothing != 0;
  const Tensor x = random_tensor(FLOAT32, rows * columns);
  std::vector<float> d = x.wide;
  const double tolerance = Tensor(dtype, 0).tolerance();
  int64_t unknown = FLOAT16;
  std::vector<int64_t> target(rows);
  std::vector<float> loss(rows), scale(rows), bias(columns);
  for (int64_t row = 0; row < rows; row++) target[row] = (row * 7919) % columns;
  for (auto& each : scale) each = scaled ? random_value() : 1;
  for (auto& each : bias) each = scaled ? random_value() : 0;
  LinearLoss call{{d.data(), scaled ? bias.data() : nullptr, target.data(), dtype, rows, columns, softcap},
                  scaled ? scale.data() : nullptr,
                  loss.data(),
                  0,
                  smoothing,
                  z_loss};
  for (int64_t outside : {columns, int64_t(-1)}) {
    if (!rows) continue;
    std::swap(target[rows - 1], outside);
    CHECK(fusedops_linear_loss(&call) == TARGET_OUTSIDE, "a target out of range");
    std::swap(target[rows - 1], outside);
  }
  CHECK(fusedops_linear_loss(&call) == OK, "linear loss");
  const std::vector<float> before = loss;
  CHECK(d == x.wide, "a logit was written");
  call.gradient = 1;
  std::swap(call.logits.gradient_dtype, unknown);
  CHECK(fusedops_linear_loss(&call) == INVALID, "a gradient of float16");
  std::swap(call.logits.gradient_dtype, unknown);
  CHECK(fusedops_linear_loss(&call) == OK, "linear loss with gradients");
  CHECK(before == loss, "the losses changed");
  const auto d_at = [&](int64_t row, int64_t j) {
    if (dtype == FLOAT32) return d[row * columns + j];
    return bits_as<float>(uint32_t(((const uint16_t*)d.data())[2 * row * columns + j]) << 16);
  };
  for (int64_t row = 0; row < rows; row++) {
    std::vector<double> z(columns);
    double sum = 0, mean = 0;
    for (int64_t j = 0; j < columns; j++) {
      const double v = x.at(row * columns + j) + bias[j];
      z[j] = softcap ? softcap * std::tanh(v / softcap) : v;
      sum += std::exp(z[j]);
      mean += z[j] / columns;
    }
    const double log_sum = std::log(sum);
    const double want = log_sum - (1 - smoothing) * z[target[row]] - smoothing * mean + z_loss * log_sum * log_sum;
    CHECK(close(loss[row], want, 4e-6), "loss %g, not %g", loss[row], want);
    for (int64_t j = 0; j < columns; j++) {
      const double slope = softcap ? 1 - z[j] * z[j] / softcap / softcap : 1;
      const double p = std::exp(z[j] - log_sum) * (1 + 2 * z_loss * log_sum);
      const double want = scale[row] * slope * (p - smoothing / columns - (j == target[row]) * (1 - smoothing));
      CHECK(close(d_at(row, j), want, 2 * tolerance), "d %g, not %g", d_at(row, j), want);
    }
  }
}

static void test_linear_product(int64_t dtype, int64_t rows, int64_t columns, int64_t terms, bool in_bfloat16) {
  const int64_t b_dtype = in_bfloat16 ? BFLOAT16 : FLOAT32;
  Tensor a = random_tensor(dtype, rows * terms), b = random_tensor(b_dtype, columns * terms);
  for (int64_t form = 0; form < 4; form++) {
    const bool a_by_terms = form & 1, b_by_terms = form & 2;
    const int64_t a_stride = a_by_terms ? terms : rows, b_stride = b_by_terms ? terms : columns;
    std::vector<float> c(rows * columns);
    LinearProduct call{a.data(), b.data(),   c.data(), rows,     columns,    terms, dtype,
                       a_stride, a_by_terms, b_dtype,  b_stride, b_by_terms, 0,     in_bfloat16};
    for (call.adds = 0; call.adds < 2; call.adds++) CHECK(fusedops_linear_product(&call) == OK, "linear product");
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < columns; j++) {
        double sum = 0;
        for (int64_t k = 0; k < terms; k++)
          sum += a.at(a_by_terms ? i * terms + k : k * rows + i) * b.at(b_by_terms ? j * terms + k : k * columns + j);
        CHECK(std::fabs(c[i * columns + j] - 2 * sum) < 2e-5 * (terms + 1), "%g, not %g", c[i * columns + j], 2 * sum);
      }
    call.in_bfloat16 = 1, call.b_dtype = FLOAT32;
    CHECK(!rows || !columns || !terms || fusedops_linear_product(&call) == INVALID, "a float32 as bfloat16");
  }
}

void test_losses(int64_t dtype, int64_t rows, int64_t columns) {
  for (double softcap : {0.0, 3.0})
    for (double smoothing : {0.0, 0.2})
      if (dtype != FLOAT16) test_linear_loss(dtype, rows, columns, smoothing, softcap);
  for (int64_t terms : {0, 71, 2100})  // of several parts
    for (const bool in_bfloat16 : {false, true}) {
      if (in_bfloat16 && (dtype != BFLOAT16 || !fusedops_multiplies_bfloat16())) continue;
      if (rows * columns * terms < 100000) test_linear_product(dtype, rows, columns, terms, in_bfloat16);
    }
  for (double softcap : {0.0, 3.0})
    for (int64_t gap : {0, 5}) test_loss(dtype, rows, columns, gap ? 0.2 : 0, softcap, gap);
}

static void test_rotation(int64_t dtype, int64_t angle_dtype, int64_t positions, int64_t columns, int64_t pairs,
                          bool interleaved, bool heads_inside) {
  const int64_t batches = 2, heads[] = {3, 1};
  Tensor cos = random_tensor(angle_dtype, batches * positions * pairs);
  Tensor sin = random_tensor(angle_dtype, positions * pairs);  // one batch
  Tensor x[] = {random_tensor(dtype, batches * positions * columns * heads[0]),
                random_tensor(dtype, batches * positions * columns * heads[1])};
  Tensor y[] = {Tensor(dtype, x[0].size()), Tensor(dtype, x[1].size())};
  for (double sign : {1.0, -1.0}) {
    Rotary call{cos.data(),  sin.data(),        angle_dtype, angle_dtype, batches, positions, columns, pairs,
                interleaved, positions * pairs, pairs,       0,           pairs,   sign,      {}};
    for (int i = 0; i < 2; i++) {
      const int64_t n = heads[i], batch = n * positions * columns;
      // x has the other order of heads and positions than y
      const int64_t x_head = heads_inside ? positions * columns : columns,
                    y_head = heads_inside ? columns : positions * columns;
      call.tensors[i] = {x[i].data(),
                         y[i].data(),
                         dtype,
                         n,
                         batch,
                         x_head,
                         heads_inside ? columns : n * columns,
                         batch,
                         y_head,
                         heads_inside ? n * columns : columns};
    }
    CHECK(fusedops_rotary(&call) == OK, "rotary");
    for (int i = 0; i < 2; i++) {
      const RotaryTensor& t = call.tensors[i];
      for (int64_t row = 0; row < batches * positions * t.heads; row++) {
        const int64_t b = row / positions / t.heads, p = row / t.heads % positions, h = row % t.heads;
        const int64_t from = b * t.x_batch + h * t.x_head + p * t.x_position;
        const int64_t to = b * t.y_batch + h * t.y_head + p * t.y_position;
        for (int64_t j = 0; j < pairs; j++) {
          const int64_t first = interleaved ? 2 * j : j, second = interleaved ? 2 * j + 1 : j + pairs;
          const double c = cos.at((b * positions + p) * pairs + j), s = sign * sin.at(p * pairs + j);
          const double v1 = x[i].at(from + first), v2 = x[i].at(from + second);
          CHECK(close(y[i].at(to + first), v1 * c - v2 * s, 2 * x[i].tolerance()), "first of pair %d", int(j));
          CHECK(close(y[i].at(to + second), v2 * c + v1 * s, 2 * x[i].tolerance()), "second of pair %d", int(j));
        }
        for (int64_t j = 2 * pairs; j < columns; j++)
          CHECK(y[i].at(to + j) == x[i].at(from + j), "element %d passes through", int(j));
      }
    }
  }
}

void test_rotations(int64_t dtype) {
  for (int64_t angle_dtype : {FLOAT32, BFLOAT16, FLOAT16})
    for (int form = 0; form < 4; form++)
      for (int64_t columns : {1, 2, 7, 32, 64, 200}) {
        test_rotation(dtype, angle_dtype, 1, columns, columns / 2, form & 1, form & 2);
        test_rotation(dtype, angle_dtype, 90, columns, columns / 3, form & 1, form & 2);
      }
}

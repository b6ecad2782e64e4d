// Experts of the self test, beside double arithmetic.
#include "self_test.h"

namespace {

struct Sizes {
  int64_t tokens, choices, experts, width, inner;
};

double activation_of(int64_t code, double gate, double up, double& dgate, double& dup) {
  const double c = std::sqrt(2 / M_PI), u = gate, t = std::tanh(c * (u + 0.044715 * u * u * u));
  const double s = 1 / (1 + std::exp(-u)), cdf = 0.5 * std::erfc(-u / std::sqrt(2.0));
  double f = 0, df = 0;
  switch (code < RELU ? code % 3 : code) {
    case SWISH:
      f = u * s, df = s + u * s * (1 - s);
      break;
    case GELU_TANH:
      f = 0.5 * u * (1 + t), df = 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * c * (1 + 3 * 0.044715 * u * u);
      break;
    case GELU_ERF:
      f = u * cdf, df = cdf + u * std::exp(-u * u / 2) / std::sqrt(2 * M_PI);
      break;
    case RELU:
      f = u > 0 ? u : 0, df = u > 0;
      break;
    default:
      f = u > 0 ? u * u : 0, df = u > 0 ? 2 * u : 0;
  }
  if (code > GELU_ERF) up = 1;
  dgate = df * up, dup = f;
  return f * up;
}

// The arguments, the results of the library, and the sums in double.
class Experts {
 public:
  Experts(int64_t dtype, Sizes n, int64_t activation, bool interleaved, bool transposed)
      : n(n),
        activation(activation),
        rows_of_up(activation <= GELU_ERF ? 2 * n.inner : n.inner),
        interleaved(interleaved),
        transposed(transposed),
        x(random_tensor(dtype, n.tokens * n.width)),
        grad(random_tensor(dtype, n.tokens * n.width)),
        weights(random_tensor(dtype, n.tokens * n.choices)),
        up(random_tensor(dtype, n.experts * rows_of_up * n.width)),
        down(random_tensor(dtype, n.experts * n.width * n.inner)),
        up_bias(random_tensor(dtype, n.experts * rows_of_up)),
        down_bias(random_tensor(dtype, n.experts * n.width)),
        index(n.tokens * n.choices) {
    for (Tensor* each : {&up, &down})  // so that results are about 1
      for (int64_t i = 0; i < each->size(); i++) each->set(i, float(each->at(i)) / 8);
    for (size_t i = 0; i < index.size(); i++) index[i] = i % 7 == 3 ? -1 : int64_t(i * i) % (n.experts + 1);
    if (n.experts > 1)  // one expert has most of the rows, one has none
      for (size_t i = 0; i < index.size(); i++) index[i] = index[i] == 1 ? 0 : i % 3 ? index[i] : 0;
  }

  void check() {
    run();
    std::vector<double> dx(x.size()), dup(up.size()), ddown(down.size()), dup_bias(up_bias.size());
    std::vector<double> ddown_bias(down_bias.size()), y_sums(x.size()), of_weights(weights.size());
    for (int64_t t = 0; t < n.tokens; t++)
      for (int64_t k = 0; k < n.choices; k++) {
        const int64_t row = t * n.choices + k, e = index[row];
        if (e >= 0 && e < n.experts) of_weights[row] = add_row(t, row, e, y_sums, dx, dup, ddown, dup_bias, ddown_bias);
      }
    compare("y", y, y_sums), compare("dx", of_x, dx), compare("dup", of_up, dup), compare("ddown", of_down, ddown);
    compare("dweights", dweights, of_weights), compare("dup_bias", of_up_bias, dup_bias),
        compare("ddown_bias", of_down_bias, ddown_bias);
  }

 private:
  void compare(const char* name, const Tensor& got, const std::vector<double>& expected) const {
    double size = 1;
    for (double each : expected) size = std::max(size, std::fabs(each) / 8);
    for (int64_t i = 0; i < got.size(); i++)
      CHECK(std::fabs(got.at(i) - expected[i]) <= 60 * x.tolerance() * (size + std::fabs(expected[i])),
            "experts: dtype %d, activation %d, interleaved %d, transposed %d, %d tokens: %s %d: %g, %g", int(x.dtype),
            int(activation), int(interleaved), int(transposed), int(n.tokens), name, int(i), got.at(i), expected[i]);
  }

  int64_t at_up(int64_t e, int64_t r, int64_t h) const {
    return e * rows_of_up * n.width + (transposed ? h * rows_of_up + r : r * n.width + h);
  }
  int64_t at_down(int64_t e, int64_t h, int64_t i) const {
    return e * n.inner * n.width + (transposed ? i * n.width + h : h * n.inner + i);
  }

  // Adds a routed row to the sums; returns the gradient of its weight.
  double add_row(int64_t t, int64_t row, int64_t e, std::vector<double>& y_sums, std::vector<double>& dx,
                 std::vector<double>& dup, std::vector<double>& ddown, std::vector<double>& dup_bias,
                 std::vector<double>& ddown_bias) const {
    std::vector<double> h(rows_of_up), a(n.inner), dh(rows_of_up), da(n.inner);
    for (int64_t r = 0; r < rows_of_up; r++) {
      h[r] = up_bias.at(e * rows_of_up + r);
      for (int64_t i = 0; i < n.width; i++) h[r] += up.at(at_up(e, r, i)) * x.at(t * n.width + i);
    }
    const double factor = weights.at(row);
    double dweight = 0;
    for (int64_t o = 0; o < n.width; o++) ddown_bias[e * n.width + o] += factor * grad.at(t * n.width + o);
    const bool gated = activation <= GELU_ERF;
    for (int64_t i = 0; i < n.inner; i++) {
      const int64_t gate = gated && interleaved ? 2 * i : i, other = interleaved ? 2 * i + 1 : n.inner + i;
      double dgate, dother;
      a[i] = activation_of(activation, h[gate], gated ? h[other] : 1, dgate, dother);
      for (int64_t o = 0; o < n.width; o++) {
        da[i] += down.at(at_down(e, o, i)) * grad.at(t * n.width + o);
        ddown[at_down(e, o, i)] += factor * grad.at(t * n.width + o) * a[i];
      }
      dweight += da[i] * a[i];
      dh[gate] = factor * da[i] * dgate;
      if (gated) dh[other] = factor * da[i] * dother;
    }
    for (int64_t o = 0; o < n.width; o++) {
      double out = down_bias.at(e * n.width + o);
      dweight += out * grad.at(t * n.width + o);
      for (int64_t i = 0; i < n.inner; i++) out += down.at(at_down(e, o, i)) * a[i];
      y_sums[t * n.width + o] += factor * out;
    }
    for (int64_t r = 0; r < rows_of_up; r++) {
      dup_bias[e * rows_of_up + r] += dh[r];
      for (int64_t i = 0; i < n.width; i++) {
        dx[t * n.width + i] += up.at(at_up(e, r, i)) * dh[r];
        dup[at_up(e, r, i)] += dh[r] * x.at(t * n.width + i);
      }
    }
    return dweight;
  }

  void run() {
    const int64_t d = x.dtype;
    ExpertsForward forward{x.data(),
                           index.data(),
                           weights.data(),
                           up.data(),
                           down.data(),
                           up_bias.data(),
                           down_bias.data(),
                           y.data(),
                           hidden.data(),
                           d,
                           8,
                           d,
                           d,
                           d,
                           d,
                           d,
                           n.tokens,
                           n.choices,
                           n.experts,
                           n.width,
                           n.inner,
                           activation,
                           interleaved,
                           transposed,
                           NAN,
                           1,
                           0};
    CHECK(fusedops_experts_forward(&forward) == OK, "experts");
    ExpertsBackward backward{grad.data(),
                             x.data(),
                             index.data(),
                             weights.data(),
                             up.data(),
                             down.data(),
                             down_bias.data(),
                             hidden.data(),
                             of_x.data(),
                             dweights.data(),
                             of_up.data(),
                             of_down.data(),
                             of_up_bias.data(),
                             of_down_bias.data(),
                             d,
                             8,
                             d,
                             d,
                             d,
                             d,
                             d,
                             n.tokens,
                             n.choices,
                             n.experts,
                             n.width,
                             n.inner,
                             activation,
                             interleaved,
                             transposed,
                             NAN,
                             1,
                             0};
    CHECK(fusedops_experts_backward(&backward) == OK, "experts backward");
  }

  Sizes n;
  int64_t activation, rows_of_up, interleaved, transposed;
  Tensor x, grad, weights, up, down, up_bias, down_bias;
  std::vector<int64_t> index;
  Tensor y{x.dtype, x.size()}, hidden{x.dtype, n.tokens * n.choices * rows_of_up}, of_x{x.dtype, x.size()};
  Tensor dweights{x.dtype, weights.size()}, of_up{x.dtype, up.size()}, of_down{x.dtype, down.size()};
  Tensor of_up_bias{x.dtype, up_bias.size()}, of_down_bias{x.dtype, down_bias.size()};
};

}  // namespace

void test_experts(int64_t dtype) {
  for (int64_t activation = SWISH; activation <= SQUARED_RELU; activation++)
    for (int form = 0; form < 4; form++)
      if (!(form & 1) || activation <= GELU_ERF)
        Experts(dtype, {5, 3, 3, 19, 21}, activation, form & 1, form & 2).check();
  // pieces of several sizes of one expert; operands that are packed whole and in parts
  Experts(dtype, {400, 1, 3, 300, 37}, SWISH, false, false).check();
  Experts(dtype, {1, 1, 1, 3, 1}, SWISH, true, true).check();
  Experts(dtype, {0, 2, 2, 3, 4}, SWISH, false, true).check();
}

// The choice of experts, its weights and its gradient, beside a sort of doubles.
#include <algorithm>

#include "self_test.h"

static double score_of(int64_t score, double z) {
  if (score == SIGMOID_SCORE) return 1 / (1 + std::exp(-z));
  return score == SQRT_SOFTPLUS_SCORE ? std::sqrt(std::log1p(std::exp(z))) : z;
}

static void test_routing(int64_t dtype, int64_t columns, int64_t k, int64_t score, int64_t groups, bool given) {
  const int64_t rows = 11, width = columns / groups, top_groups = divide_up(groups, 2);
  if (k > width * top_groups || columns % groups || (groups > 1 && width < 2)) return;
  Tensor x = random_tensor(dtype, rows * columns), bias = random_tensor(dtype, columns), dx(dtype, rows * columns);
  std::vector<float> weights(rows * k), grad(rows * k, 1.0f);
  std::vector<int64_t> chosen(rows * k), index(rows * k);
  for (int64_t i = 0; i < rows * k; i++) index[i] = i * 7 % columns;
  const Routing settings{dtype, dtype, rows, columns, k, score, groups, top_groups, 1, 1, 1, 1e-20, 2.5};
  RoutingForward call{x.data(), bias.data(), given ? index.data() : nullptr, weights.data(), chosen.data(), settings};
  CHECK(fusedops_routing_forward(&call) == OK, "routing of %d", int(columns));
  for (int64_t row = 0; row < rows; row++) {
    const auto at = [&](int64_t e) { return x.at(row * columns + e); };
    double top = -INFINITY, total = 0, sum = 0;
    for (int64_t e = 0; e < columns; e++) top = std::max(top, at(e));
    for (int64_t e = 0; e < columns; e++) total += std::exp(at(e) - top);
    const bool exponential = score == SOFTMAX_SCORE || score == TOPK_SOFTMAX_SCORE;
    const auto weight_of = [&](int64_t e) {
      return exponential ? std::exp(at(e) - top) / total : score_of(score, at(e));
    };
    const auto choice_of = [&](int64_t e) { return (score == TOPK_SOFTMAX_SCORE ? at(e) : weight_of(e)) + bias.at(e); };
    std::vector<bool> taken(columns);
    for (int64_t j = 0; j < k; j++) {
      const int64_t e = chosen[row * k + j];
      CHECK(e >= 0 && e < columns && (given ? e == index[row * k + j] : !taken[e]), "expert %d", int(e));
      taken[e] = true;
      sum += weight_of(e);
    }
    for (int64_t e = 0; e < columns && !given && groups == 1; e++)
      CHECK(taken[e] || choice_of(e) <= choice_of(chosen[row * k + k - 1]) + 1e-5, "expert %d is left out", int(e));
    for (int64_t j = 0; j < k; j++)
      CHECK(close(weights[row * k + j], 2.5 * weight_of(chosen[row * k + j]) / sum, 1e-5), "weight %d", int(j));
  }
  RoutingBackward back{grad.data(), x.data(), chosen.data(), dx.data(), settings};
  CHECK(fusedops_routing_backward(&back) == OK, "gradient of %d", int(columns));
  // equal gradients of weights that are normalized add up to 0
  for (int64_t i = 0; i < rows * columns; i++) CHECK(std::fabs(dx.at(i)) < 1e-3, "gradient %g", dx.at(i));
  index[0] = columns;
  call.index = index.data();
  CHECK(fusedops_routing_forward(&call) == OK && weights[0] != weights[0], "a number of no expert");
  back.chosen = index.data();
  CHECK(fusedops_routing_backward(&back) == OK && dx.at(0) != dx.at(0), "its gradient");
}

void test_routings(int64_t dtype) {
  for (int64_t columns : {1, 2, 7, 16, 33, 256})
    for (int64_t k : {1, 2, 5, 33})
      for (int64_t score : {SOFTMAX_SCORE, SIGMOID_SCORE, SQRT_SOFTPLUS_SCORE, TOPK_SOFTMAX_SCORE})
        for (int64_t groups : {1, 4})
          for (bool given : {false, true}) test_routing(dtype, columns, k, score, groups, given);
}

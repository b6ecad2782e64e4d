// The choice of experts for each row of logits, the weights of the chosen, and the gradient of the logits.
//
// A row is read once. Its scores are computed in whole vectors, with the rest of the last one filled, so that equal
// logits have equal scores: another loop for the end of a row might round otherwise. Numbers are chosen by their bits
// as integers, in which NaN is the largest; an expert takes the place of another only where its integer is larger, so
// that a tie stays with the lowest index.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "math/exp.h"
#include "math/finite.h"
#include "once.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

INLINE int64_t whole_vectors(int64_t n) { return divide_up(n, LANES) * LANES; }

// An integer in the order of the numbers: 0 and -0 are equal, NaN is the largest.
INLINE vint order_of(vfloat x) {
  const vint bits = bits_as<vint>(x + 0.0f);
  const vint ordered = bits < 0 ? bits ^ INT32_MAX : bits;
  return x == x ? ordered : vint{} + INT32_MAX;
}
INLINE int32_t order_of_one(float x) { return order_of(all(x))[0]; }

// The largest of what is offered, in falling order. Of equal ones the first that was offered comes first.
struct Largest {
  int32_t* orders;
  int64_t* places;
  int64_t k, count;

  Largest(int32_t* orders, int64_t* places, int64_t k) : orders(orders), places(places), k(k), count(0) {}

  INLINE void offer(int32_t order, int64_t place) {
    if (count == k && order <= orders[k - 1]) return;
    insert(order, place);
  }
  INLINE void offer_all(const int32_t* row, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) offer(row[i], i);
  }
  NOINLINE void insert(int32_t order, int64_t place) {
    int64_t at = count == k ? k - 1 : count++;
    for (; at > 0 && orders[at - 1] < order; at--) {
      orders[at] = orders[at - 1];
      places[at] = places[at - 1];
    }
    orders[at] = order;
    places[at] = place;
  }
};

// ---- Scores of n numbers, a multiple of LANES ----

// exp(z - top) of numbers of which `n` count, and returns 1 over their sum. NaN for a row with NaN or inf.
NOINLINE float exponentials(const float* z, float* s, int64_t n) {
  const int64_t size = whole_vectors(n);
  vfloat tops = all(LOWEST), sums = {};
  for (int64_t i = 0; i < size; i += LANES) tops = max(load(z + i), tops);
  const float top = max_of(tops);
  for (int64_t i = 0; i < size; i += LANES) {
    const vfloat e = exp_nonpositive(load(z + i) - top);
    store(s + i, e);
    sums += e;
  }
  return 1.0f / sum_of(sums);
}

NOINLINE void softmax(const float* z, float* s, int64_t n) {
  const float factor = exponentials(z, s, n);
  for (int64_t i = 0; i < n; i += LANES) store(s + i, load(s + i) * factor);
}

INLINE vfloat sigmoid_of(vfloat z) {
  const vfloat e = exp_nonpositive(negative_magnitude(z));
  return (z >= 0.0f ? all(1.0f) : e) / (1.0f + e);
}

// log(1 + e) for e in [0, 1], as 2 * atanh(e / (2 + e)).
INLINE vfloat log_of_one_and(vfloat e) {
  const vfloat u = e / (2.0f + e), q = u * u;
  vfloat p = q * (1 / 15.0f) + 1 / 13.0f;
  p = p * q + 1 / 11.0f;
  p = p * q + 1 / 9.0f;
  p = p * q + 1 / 7.0f;
  p = p * q + 1 / 5.0f;
  p = p * q + 1 / 3.0f;
  return u * 2.0f * (p * q + 1.0f);
}

NOINLINE void sigmoid(const float* z, float* s, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(s + i, sigmoid_of(load(z + i)));
}

NOINLINE void sqrt_softplus(const float* z, float* s, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    const vfloat x = load(z + i), e = exp_nonpositive(negative_magnitude(x));
    const vfloat softplus = positive_part(x) + log_of_one_and(e);
    for (int lane = 0; lane < LANES; lane++) s[i + lane] = std::sqrt(softplus[lane]);
  }
}

void scores(int64_t score, const float* z, float* s, int64_t n) {
  if (score == SOFTMAX_SCORE) return softmax(z, s, n);
  if (score == SIGMOID_SCORE) return sigmoid(z, s, n);
  return sqrt_softplus(z, s, n);
}

// The memory of one worker: rows of E numbers, rows of k, and the best of k experts or of all groups.
struct RowScratch {
  int64_t* places;
  float *z, *s, *choices, *picked, *z_picked, *slopes, *gradient;
  int32_t *orders, *best;

  static int64_t most_best(const Routing& call) { return whole_vectors(std::max(call.k, call.groups)); }
  static int64_t size(const Routing& call) {
    return 3 * most_best(call) + 4 * whole_vectors(call.columns) + 4 * whole_vectors(call.k);
  }
  RowScratch(float* memory, const Routing& call) {
    const int64_t columns = whole_vectors(call.columns), k = whole_vectors(call.k), best_size = most_best(call);
    const auto take = [&](int64_t count) {
      float* taken = memory;
      memory += count;
      return taken;
    };
    places = (int64_t*)take(2 * best_size);  // first: malloc's alignment
    best = (int32_t*)take(best_size);
    z = take(columns);
    s = take(columns);
    choices = take(columns);
    orders = (int32_t*)take(columns);
    picked = take(k);
    z_picked = take(k);
    slopes = take(k);
    gradient = take(k);
  }
};

// Fills the rest of the last vector.
INLINE void fill_end(float* values, int64_t n, float value) {
  for (int64_t i = n; i < whole_vectors(n); i++) values[i] = value;
}

void load_row(const Routing& call, const void* logits, int64_t row, float* z) {
  const int64_t n = call.columns;
  with_dtype(call.dtype, [=](auto element) {
    auto* x = (const decltype(element)*)logits + row * n;
    each(n, [=](int64_t i, auto lanes) { store(z + i, load(x + i, lanes), lanes); });
  });
  fill_end(z, n, -INF);
}

// True where all of the row's experts are in [0, E).
INLINE bool are_experts(const Routing& call, const int64_t* chosen) {
  bool fit = true;
  for (int64_t j = 0; j < call.k; j++) fit &= (uint64_t)chosen[j] < (uint64_t)call.columns;
  return fit;
}

// The scores of the chosen: of all numbers for a softmax, else of those of the chosen alone.
void pick(const Routing& call, const RowScratch& a, const int64_t* chosen, bool has_scores) {
  const int64_t k = call.k;
  for (int64_t j = 0; j < k; j++) a.z_picked[j] = a.z[chosen[j]];
  fill_end(a.z_picked, k, -INF);
  if (has_scores) {
    for (int64_t j = 0; j < k; j++) a.picked[j] = a.s[chosen[j]];
  } else if (call.score == TOPK_SOFTMAX_SCORE) {
    softmax(a.z_picked, a.picked, k);
  } else {
    scores(call.score, a.z_picked, a.picked, k);
  }
}

// ---- The choice ----

// The sum of the two best of a group, or the best, as an integer in their order.
int32_t score_of_group(const Routing& call, const float* choices, const int32_t* orders, int64_t first, int64_t width) {
  int32_t best[2];
  int64_t places[2];
  Largest two(best, places, call.by_two ? 2 : 1);
  two.offer_all(orders, first, first + width);
  const float score = choices[places[0]];
  return order_of_one(call.by_two ? score + choices[places[1]] : score);
}

// Writes the experts of a row, from the numbers by which they are compared.
NOINLINE void choose(const Routing& call, const RowScratch& a, const float* choices, int64_t* chosen) {
  const int64_t columns = call.columns;
  for (int64_t i = 0; i < columns; i += LANES) {
    const vint order = order_of(load(choices + i));
    memcpy(a.orders + i, &order, sizeof order);
  }
  if (call.groups == 1 || call.groups == call.top_groups) {
    Largest all(a.best, chosen, call.k);
    all.offer_all(a.orders, 0, columns);
    return;
  }
  const int64_t width = columns / call.groups;
  Largest groups(a.best, a.places, call.top_groups);
  for (int64_t g = 0; g < call.groups; g++) groups.offer(score_of_group(call, choices, a.orders, g * width, width), g);
  std::sort(a.places, a.places + groups.count);
  Largest all(a.best, chosen, call.k);
  for (int64_t g = 0; g < groups.count; g++) {
    all.offer_all(a.orders, a.places[g] * width, (a.places[g] + 1) * width);
  }
}

// Calls f(row, scratch) for each row.
template <class F>
Status each_row(const Routing& call, F f) {
  const int64_t rows_of_block = std::max<int64_t>(1, BLOCK / 8 / call.columns), rows = call.rows;
  const int64_t blocks = divide_up(rows, rows_of_block), workers = workers_for(blocks), size = RowScratch::size(call);
  const FloatBuffer buffer(workers * size);
  float* memory = buffer.data();
  if (!memory) return OUT_OF_MEMORY;
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    const RowScratch scratch(memory + worker * size, call);
    for (int64_t row = block * rows_of_block; row < std::min(rows, (block + 1) * rows_of_block); row++) f(row, scratch);
  });
  return OK;
}

// ---- Rows ----

void forward_row(const RoutingForward& call, const float* bias, const RowScratch& a, int64_t row) {
  const Routing& s = call.settings;
  const int64_t k = s.k;
  float* weights = call.weights + row * k;
  int64_t* chosen = call.chosen + row * k;
  load_row(s, call.x, row, a.z);
  const bool given = call.index, has_scores = s.score == SOFTMAX_SCORE || (!given && s.score != TOPK_SOFTMAX_SCORE);
  if (has_scores) scores(s.score, a.z, a.s, s.columns);
  if (given) {
    for (int64_t j = 0; j < k; j++) {
      chosen[j] = s.index_is_long ? read_once((const int64_t*)call.index + row * k + j)
                                  : read_once((const int32_t*)call.index + row * k + j);
    }
    if (!are_experts(s, chosen)) {
      std::fill(weights, weights + k, NOT_A_NUMBER);
      return;
    }
  } else {
    const float* from = has_scores ? a.s : a.z;
    float* choices = (float*)from;
    if (bias) {
      choices = a.choices;
      for (int64_t i = 0; i < s.columns; i += LANES) store(choices + i, load(from + i) + load(bias + i));
    }
    choose(s, a, choices, chosen);
  }
  pick(s, a, chosen, has_scores);
  float total = 1;
  if (s.normalize) {
    total = 0;
    for (int64_t j = 0; j < k; j++) total += a.picked[j];
    total += to_float(s.eps);
  }
  const float scale = to_float(s.scale);
  for (int64_t j = 0; j < k; j++) weights[j] = (s.normalize ? a.picked[j] / total : a.picked[j]) * scale;
}

Status forward(const RoutingForward& call) {
  const Routing& s = call.settings;
  const FloatBuffer buffer(call.bias ? whole_vectors(s.columns) : 0);
  float* bias = buffer.data();
  if (call.bias && !bias) return OUT_OF_MEMORY;
  if (bias) {
    load_as(s.bias_dtype, call.bias, bias, s.columns);
    fill_end(bias, s.columns, 0);
  }
  const RoutingForward* whole = &call;
  return each_row(s, [=](int64_t row, const RowScratch& scratch) { forward_row(*whole, bias, scratch, row); });
}

// The gradient of the scores of the chosen, from that of the weights.
void picked_gradient(const Routing& call, const RowScratch& a, const float* grad, float* gradient) {
  const float scale = to_float(call.scale);
  for (int64_t j = 0; j < call.k; j++) gradient[j] = grad[j] * scale;
  if (!call.normalize) return;
  float total = 0, moved = 0;
  for (int64_t j = 0; j < call.k; j++) total += a.picked[j];
  total += to_float(call.eps);
  for (int64_t j = 0; j < call.k; j++) moved += gradient[j] * (a.picked[j] / total);
  for (int64_t j = 0; j < call.k; j++) gradient[j] = (gradient[j] - moved) / total;
}

// The derivatives of the scores of the chosen.
void slopes_of(const Routing& call, const RowScratch& a) {
  for (int64_t i = 0; i < call.k; i += LANES) {
    const vfloat z = load(a.z_picked + i), e = exp_nonpositive(negative_magnitude(z)), below = 1.0f / (1.0f + e);
    if (call.score == SIGMOID_SCORE) {
      store(a.slopes + i, e * below * below);
    } else {
      const vfloat y = load(a.picked + i), half = (z >= 0.0f ? below : e * below) * 0.5f;
      store(a.slopes + i, y == 0.0f ? vfloat{} : half / y);
    }
  }
}

// The gradient of a row of logits, in float32.
NOINLINE void gradient_of_row(const RoutingBackward& call, const RowScratch& a, int64_t row, float* d) {
  const Routing& s = call.settings;
  const int64_t k = s.k;
  int64_t* chosen = a.places;
  for (int64_t j = 0; j < k; j++) chosen[j] = read_once(call.chosen + row * k + j);
  if (!are_experts(s, chosen)) {
    std::fill(d, d + s.columns, NOT_A_NUMBER);
    return;
  }
  const bool of_all = s.score == SOFTMAX_SCORE;
  load_row(s, call.x, row, a.z);
  if (of_all) softmax(a.z, a.s, s.columns);
  pick(s, a, chosen, of_all);
  picked_gradient(s, a, call.grad + row * k, a.gradient);
  const float* g = a.gradient;
  float moved = 0;
  if (of_all || s.score == TOPK_SOFTMAX_SCORE) {
    for (int64_t j = 0; j < k; j++) moved += g[j] * a.picked[j];
  } else {
    slopes_of(s, a);
  }
  if (of_all) {
    // a score of 0 times an infinite sum is NaN, as by the formula
    for (int64_t i = 0; i < s.columns; i += LANES) store(d + i, load(a.s + i) * -moved);
    for (int64_t j = 0; j < k; j++) d[chosen[j]] += a.picked[j] * g[j];
    return;
  }
  std::fill(d, d + s.columns, 0.0f);
  for (int64_t j = 0; j < k; j++) {
    d[chosen[j]] += s.score == TOPK_SOFTMAX_SCORE ? a.picked[j] * (g[j] - moved) : g[j] * a.slopes[j];
  }
}

Status backward(const RoutingBackward& call) {
  const RoutingBackward* whole = &call;
  return each_row(call.settings, [=](int64_t row, const RowScratch& a) {
    const Routing& s = whole->settings;
    gradient_of_row(*whole, a, row, a.choices);
    store_as(s.dtype, (char*)whole->dx + row * s.columns * (s.dtype == FLOAT32 ? 4 : 2), a.choices, s.columns);
  });
}

bool fits(const Routing& s) {
  const bool group = s.groups >= 1 && s.top_groups >= 1 && s.top_groups <= s.groups && s.columns % s.groups == 0;
  return s.rows >= 0 && s.columns >= 1 && s.k >= 1 && s.k <= s.columns && s.score >= SOFTMAX_SCORE &&
         s.score <= TOPK_SOFTMAX_SCORE && group && s.k <= s.columns / s.groups * s.top_groups &&
         (s.groups == 1 || s.columns / s.groups >= (s.by_two ? 2 : 1));
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_routing_forward(const RoutingForward* call) {
  if (!call->settings.rows) return OK;
  if (!fits(call->settings) || !call->x || !call->weights || !call->chosen) return INVALID;
  return forward(*call);
}

FUSEDOPS_EXPORT int fusedops_routing_backward(const RoutingBackward* call) {
  if (!call->settings.rows) return OK;
  if (!fits(call->settings) || !call->grad || !call->x || !call->chosen || !call->dx) return INVALID;
  use_huge_pages(call->dx, call->settings.rows * call->settings.columns, call->settings.dtype);
  return backward(*call);
}

// What becomes of the scores of a row and a part of the keys: weights, or the gradients of scores. Keys are computed in
// whole panels [low, high), of which the row sees those in `seen` that `hidden`, if not null, does not hide.
#pragma once

#include "dot/attention.h"

namespace fusedops {
namespace {

using Panel = Two<vfloat>;
inline Panel load_panel(const float* p) { return {load(p), load(p + LANES)}; }
inline void store_panel(float* p, Panel v) { store(p, v.a), store(p + LANES, v.b); }

// The keys of a panel that a row does not see: all bits.
struct Hidden {
  vint a, b;
  Panel replaced(Panel v, float by) const { return {a ? all(by) : v.a, b ? all(by) : v.b}; }
};

// Calls f(i, hides, hidden) for each panel; `hides` is a constant: false where nothing is hidden by position or mask.
template <class F>
INLINE void each_panel(int64_t low, int64_t high, Seen seen, const uint8_t* hidden, F f) {
  const auto by_mask = [=](int64_t i) {
    return Hidden{masked_lanes(hidden + i, Full{}), masked_lanes(hidden + i + LANES, Full{})};
  };
  const auto cut = [=](int64_t i) {
    const int begin = int(seen.begin - i), end = int(seen.end - i);
    Hidden out{lanes_below(begin) | ~lanes_below(end), lanes_below(begin - LANES) | ~lanes_below(end - LANES)};
    if (hidden) {
      const Hidden masked = by_mask(i);
      out.a |= masked.a, out.b |= masked.b;
    }
    f(i, std::true_type{}, out);
  };
  const int64_t whole = std::min(high, round_up(std::max(low, seen.begin), WIDTH));
  int64_t i = low;
  for (; i < whole; i += WIDTH) cut(i);
  if (hidden) {
    for (; i + WIDTH <= seen.end; i += WIDTH) f(i, std::true_type{}, by_mask(i));
  } else {
    for (; i + WIDTH <= seen.end; i += WIDTH) f(i, std::false_type{}, Hidden{});
  }
  for (; i < high; i += WIDTH) cut(i);
}

// Turns scores into weights, exp(score - top).
NOINLINE State weigh(float* scores, int64_t low, int64_t high, Seen seen, const uint8_t* hidden, float scale) {
  Panel tops{all(-INF), all(-INF)};
  each_panel(low, high, seen, hidden, [&](int64_t i, auto hides, Hidden out) {
    Panel s = load_panel(scores + i) * scale;
    if (decltype(hides)::value) s = out.replaced(s, -INF);
    store_panel(scores + i, s);
    tops = {max(s.a, tops.a), max(s.b, tops.b)};
  });
  State state{max_of(max(tops.a, tops.b)), 0.0f, !seen.none(), false};
  if (state.top == INF)
    for (int64_t i = low; i < high; i++) state.has_nan |= scores[i] != scores[i];
  const float base = state.top == -INF ? 0.0f : state.top;
  Panel sums = {};
  for (int64_t i = low; i < high; i += WIDTH) {
    const Panel e = exp_nonpositive(load_panel(scores + i) - base);
    store_panel(scores + i, e);
    sums = sums + e;
  }
  state.sum = sum_of(sums.a + sums.b);
  if (state.top != INF) state.has_nan = state.sum != state.sum;
  if (hidden && state.top == -INF && !state.has_nan) {
    state.sees = false;
    for (int64_t i = seen.begin; i < seen.end; i++) state.sees |= !hidden[i];
  }
  return state;
}

// exp(score - lse). lse may come from another kernel: of large scores, the difference of both roundings is no small
// number.
INLINE Panel weights_of(const float* scores, float scale, float lse) {
  return exp_nonpositive(at_most(0.0f, load_panel(scores) * scale - lse));
}

// The sums of p and p * dp of a row: 1 and sum(out * grad), but for what is rounded differently.
struct Sums {
  float p, products;
  INLINE Sums operator+(const Sums& other) const { return {p + other.p, products + other.products}; }
  INLINE float factor() const { return p > 0 ? 1 / p : 1; }
};

// Turns scores into p = exp(score - lse), 0 where the row sees nothing.
NOINLINE Sums weigh_by(float* scores, const float* dp, int64_t low, int64_t high, Seen seen, const uint8_t* hidden,
                       float scale, float lse) {
  Panel sums = {}, products = {};
  each_panel(low, high, seen, hidden, [&](int64_t i, auto hides, Hidden out) {
    Panel p = weights_of(scores + i, scale, lse), product = p * load_panel(dp + i);
    if (decltype(hides)::value) p = out.replaced(p, 0.0f), product = out.replaced(product, 0.0f);
    store_panel(scores + i, p);
    sums = sums + p, products = products + product;
  });
  return {sum_of(sums.a + sums.b), sum_of(products.a + products.b)};
}

// Turns scores into p = exp(score - lse), or WEIGHED, what weigh_by has made of them, into p times a factor; and dp
// into ds = scale * p * (dp - delta): 0 where the row sees nothing.
template <bool WEIGHED>
NOINLINE void differentiate(float* scores, float* dp, int64_t low, int64_t high, Seen seen, const uint8_t* hidden,
                            float scale, float lse_or_factor, float delta) {
  each_panel(low, high, seen, hidden, [=](int64_t i, auto hides, Hidden out) {
    Panel p = WEIGHED ? load_panel(scores + i) * lse_or_factor : weights_of(scores + i, scale, lse_or_factor);
    Panel ds = (load_panel(dp + i) - delta) * p * scale;
    if (decltype(hides)::value) p = out.replaced(p, 0.0f), ds = out.replaced(ds, 0.0f);
    store_panel(scores + i, p);
    store_panel(dp + i, ds);
  });
}

}  // namespace
}  // namespace fusedops

// What the forward and the backward of the causal convolution share: the inputs before a sequence, sequences, tiles.
#pragma once

#include "api.h"
#include "math/sigmoid.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t MOST_TAPS = 8;

// The positions of one sequence, and its number: a batch, or a packed sequence.
struct Sequence {
  int64_t number, begin, end;
  int64_t length() const { return end - begin; }
};

// Calls f(sequence) for each sequence of a batch, and rest(begin, end) for the positions of none.
template <class F, class G>
INLINE void each_sequence(const ConvSizes& sizes, const int64_t* bounds, int64_t batch, F f, G rest) {
  if (!bounds) return f(Sequence{batch, 0, sizes.length});
  if (bounds[0]) rest(0, bounds[0]);
  for (int64_t n = 0; n < sizes.sequences; n++) f(Sequence{n, bounds[n], bounds[n + 1]});
  if (bounds[sizes.sequences] < sizes.length) rest(bounds[sizes.sequences], sizes.length);
}

inline bool are_bounds(const ConvSizes& sizes, const int64_t* bounds) {
  if (!bounds) return sizes.sequences == sizes.batch;
  if (sizes.batch != 1 || sizes.sequences < 0 || bounds[0] < 0) return false;
  for (int64_t n = 0; n < sizes.sequences; n++)
    if (bounds[n] > bounds[n + 1]) return false;
  return bounds[sizes.sequences] <= sizes.length;
}

inline bool are_sizes(const ConvSizes& sizes, const int64_t* bounds) {
  const bool fit = sizes.width >= 2 && sizes.width <= MOST_TAPS && sizes.batch >= 0 && sizes.channels >= 0;
  return fit && sizes.length >= 0 && are_bounds(sizes, bounds);
}

// Input `index` of one channel of a sequence, from -(width - 1): those below 0 are before it.
template <class T>
INLINE T input_at(const T* x, int64_t step, const T* before, int64_t width, int64_t index) {
  if (index >= 0) return x[index * step];
  return before ? before[width - 1 + index] : T{};
}

// ---- Three or four numbers for each of LANES channels, next to each other in memory ----

// Lane i is number COUNT * i + K of two vectors, where they have it.
template <int COUNT, int K>
struct InFirstTwo {
  static constexpr int at(int i) { return COUNT * i + K < 2 * LANES ? COUNT * i + K : 0; }
};
// The same of three, from the result of the first two and the third.
template <int COUNT, int K>
struct InThird {
  static constexpr int at(int i) { return COUNT * i + K < 2 * LANES ? i : COUNT * i + K - LANES; }
};
template <int COUNT, class T>
INLINE void load_apart(const T* p, Full, vfloat* numbers) {
  if constexpr (COUNT == 4) {
    vfloat even[2], odd[2];
    for (int half = 0; half < 2; half++) load_pairs(p + half * 2 * LANES, Full{}, even[half], odd[half]);
    numbers[0] = shuffled<EverySecond<0>>(even[0], even[1]), numbers[2] = shuffled<EverySecond<1>>(even[0], even[1]);
    numbers[1] = shuffled<EverySecond<0>>(odd[0], odd[1]), numbers[3] = shuffled<EverySecond<1>>(odd[0], odd[1]);
  } else {
    const vfloat a = load(p), b = load(p + LANES), c = load(p + 2 * LANES);
    numbers[0] = shuffled<InThird<3, 0>>(shuffled<InFirstTwo<3, 0>>(a, b), c);
    numbers[1] = shuffled<InThird<3, 1>>(shuffled<InFirstTwo<3, 1>>(a, b), c);
    numbers[2] = shuffled<InThird<3, 2>>(shuffled<InFirstTwo<3, 2>>(a, b), c);
  }
}
template <int COUNT, class T>
NOINLINE void load_apart(const T* p, Part lanes, vfloat* numbers) {
  T values[COUNT * LANES] = {};
  for (int i = 0; i < COUNT * lanes.n; i++) values[i] = p[i];
  load_apart<COUNT>(values, Full{}, numbers);
}

// Lane j of vector V of three: number (V * LANES + j) % 3 of channel (V * LANES + j) / 3, from the first two numbers.
template <int V>
struct FromFirstTwo {
  static constexpr int at(int j) {
    const int e = V * LANES + j;
    return e % 3 == 2 ? 0 : e % 3 * LANES + e / 3;
  }
};
template <int V>
struct FromLast {
  static constexpr int at(int j) {
    const int e = V * LANES + j;
    return e % 3 == 2 ? LANES + e / 3 : j;
  }
};
template <class T>
INLINE void store_together(T* p, Full, const vfloat* numbers) {
  const vfloat a = numbers[0], b = numbers[1], c = numbers[2];
  store(p, shuffled<FromLast<0>>(shuffled<FromFirstTwo<0>>(a, b), c));
  store(p + LANES, shuffled<FromLast<1>>(shuffled<FromFirstTwo<1>>(a, b), c));
  store(p + 2 * LANES, shuffled<FromLast<2>>(shuffled<FromFirstTwo<2>>(a, b), c));
}
template <class T>
NOINLINE void store_together(T* p, Part lanes, const vfloat* numbers) {
  T values[3 * LANES];
  store_together(values, Full{}, numbers);
  for (int i = 0; i < 3 * lanes.n; i++) p[i] = values[i];
}

// Channels whose numbers at some positions stay in the L1 cache, and what there is for them: the weight by tap, each in
// a row of `count` floats, and the bias.
template <int64_t MOST>
struct Channels {
  int64_t first, count;
  alignas(64) float taps[MOST_TAPS * MOST];
  const float* bias;

  Channels(const float* weight, const float* biases, int64_t first, int64_t count, int64_t width)
      : first(first), count(count), bias(biases + first) {
    for (int64_t w = 0; w < width; w++)
      for (int64_t c = 0; c < count; c++) taps[w * count + c] = weight[(first + c) * width + w];
  }
};

// The input of each tap of a stretch of channels at one position of a sequence: rows of x, or of `edge`, which has the
// width - 1 inputs before the sequence.
template <class T>
struct TapRows {
  const T* of[MOST_TAPS];
  INLINE TapRows(const T* x, int64_t step, const T* edge, int64_t count, int64_t width, int64_t index) {
    for (int64_t w = 0; w < width; w++) {
      const int64_t at = index - (width - 1) + w;
      of[w] = at >= 0 ? x + at * step : edge + (width - 1 + at) * count;
    }
  }
};

// Fills `edge`, (width - 1) rows of `count`, from the inputs before a sequence, or zeros.
template <class T>
INLINE void fill_edge(const T* before, int64_t count, int64_t kept, T* edge) {
  if (!before) {
    memset((void*)edge, 0, kept * count * sizeof(T));
    return;
  }
  for (int64_t c = 0; c < count; c++)
    for (int64_t k = 0; k < kept; k++) edge[k * count + c] = before[c * kept + k];
}

// The sum of the taps and the bias for a vector of channels.
template <int WIDTH, class T, class Lanes>
INLINE vfloat sum_of_taps(const TapRows<T>& rows, const float* taps, const float* bias, int64_t count, int64_t width,
                          int64_t i, Lanes lanes) {
  vfloat z = load(bias + i, lanes);
  const int64_t n = WIDTH ? WIDTH : width;
  for (int64_t w = 0; w < n; w++) z = z + load(rows.of[w] + i, lanes) * load(taps + w * count + i, lanes);
  return z;
}

// The sum of the taps and the bias for a vector of positions of one channel; inputs: those of the first tap.
template <int WIDTH, class T, class Lanes>
INLINE vfloat sum_of_taps(const T* inputs, const float* weight, float bias, int64_t width, int64_t i, Lanes lanes) {
  vfloat z = all(bias);
  const int64_t n = WIDTH ? WIDTH : width;
  for (int64_t w = 0; w < n; w++) z = z + load(inputs + i + w, lanes) * weight[w];
  return z;
}

}  // namespace
}  // namespace fusedops

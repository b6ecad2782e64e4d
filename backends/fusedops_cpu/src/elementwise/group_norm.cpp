// y = act((x - mean) * rstd * weight + bias), mean and rstd of each group of channels of a sample, and the gradients.
// Backward is of float32: other dtypes are converted in chunks that stay in the L1 cache. Sums are added chunk by
// chunk, or part by part of the positions, in an order that depends on the sizes alone.
#include <cmath>

#include "api.h"
#include "math/finite.h"
#include "math/sigmoid.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t CHUNK = 2048;
constexpr int64_t GROUP_AHEAD = 1 << 20;  // bytes of a group, for which there is room in the caches of a core

// The numbers of a tensor, a stretch at a time.
struct Numbers {
  void* values;
  int64_t dtype;
  const float* read(int64_t at, int64_t n, float* buffer) const {
    if (dtype == FLOAT32) return (const float*)values + at;
    load_as(dtype, (const char*)values + 2 * at, buffer, n);
    return buffer;
  }
  float* place(int64_t at, float* buffer) const { return dtype == FLOAT32 ? (float*)values + at : buffer; }
  void finish(int64_t at, int64_t n, const float* buffer) const {
    if (dtype != FLOAT32) store_as(dtype, (char*)values + 2 * at, buffer, n);
  }
};
inline Numbers numbers(const void* values, int64_t dtype) { return {(void*)values, dtype}; }

// The mean of some numbers, and the sum of the squares of their differences from it.
struct Moments {
  float count = 0, mean = 0, squares = 0;

  void add(Moments other) {  // Chan, Golub & LeVeque 1983
    if (other.count == 0) return;
    const float share = other.count / (count + other.count), difference = other.mean - mean;
    mean += difference * share;
    squares += other.squares + difference * difference * (count * share);
    count += other.count;
  }
};

template <class T>
NOINLINE Moments moments_of(const T* x, int64_t n) {
  const float mean =
      sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) { return load(x + i, lanes); })) / float(n);
  const float squares = sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) {
    vfloat v = load(x + i, lanes) - mean;
    if constexpr (!decltype(lanes)::full) v = lanes_below(lanes.n) ? v : vfloat{};
    return v * v;
  }));
  return {float(n), mean, squares};
}

// The means, and the sums of squares about them, of MANY vectors of channels of `count` positions of n channels.
template <int MANY, class T, class Lanes>
INLINE void moments_of_vectors(const T* x, int64_t n, int64_t count, float* means, float* squares, Lanes lanes) {
  vfloat mean[MANY] = {}, square[MANY] = {};
  for (int64_t p = 0; p < count; p++)
    for (int i = 0; i < MANY; i++) mean[i] += load(x + p * n + i * LANES, lanes);
  for (int i = 0; i < MANY; i++) mean[i] /= all(float(count));
  for (int64_t p = 0; p < count; p++)
    for (int i = 0; i < MANY; i++) {
      const vfloat apart = load(x + p * n + i * LANES, lanes) - mean[i];
      square[i] += apart * apart;
    }
  for (int i = 0; i < MANY; i++) {
    store(means + i * LANES, mean[i], lanes);
    store(squares + i * LANES, square[i], lanes);
  }
}
template <class T>
NOINLINE void moments_of_channels(const T* x, int64_t n, int64_t count, float* means, float* squares) {
  constexpr int MANY = 4;  // each addition waits for the one before
  int64_t c = 0;
  for (; c + MANY * LANES <= n; c += MANY * LANES)
    moments_of_vectors<MANY>(x + c, n, count, means + c, squares + c, Full{});
  each(n - c, [=](int64_t i, auto lanes) {
    moments_of_vectors<1>(x + c + i, n, count, means + c + i, squares + c + i, lanes);
  });
}

template <class V>
struct Channel {
  V mean, rstd, weight, bias, product, sum;  // the last two, of backward: the means of m * n and of m in the group
};

// The numbers of one channel, for all positions of a stretch.
struct OneChannel {
  Channel<float> channel;
  template <class Lanes>
  INLINE Channel<float> at(int64_t, Lanes) const {
    return channel;
  }
};

// Those of all channels, for one position: six rows of `channels` floats.
struct AllChannels {
  const float* rows;
  int64_t n;
  template <class Lanes>
  INLINE auto at(int64_t c, Lanes lanes) const {
    const float* r = rows + c;
    return Channel<decltype(load(r, lanes))>{load(r, lanes),         load(r + n, lanes),     load(r + 2 * n, lanes),
                                             load(r + 3 * n, lanes), load(r + 4 * n, lanes), load(r + 5 * n, lanes)};
  }
};

// The normalized number, and the gradient before the activation.
struct Pair2 {
  vfloat normal, grad;
};
template <bool SILU, class C>
INLINE Pair2 through(vfloat grad, vfloat x, const C& c) {
  const vfloat normal = (x - c.mean) * c.rstd;
  if constexpr (SILU) grad *= gate_function(false)(normal * c.weight + c.bias).slope;
  return {normal, grad};
}

// Asks memory for what lies `ahead` numbers after x, which the next stretches wait for: here, arithmetic takes the
// time.
template <bool SILU, class T, class Channels>
NOINLINE void forward_stretch(const T* x, T* y, int64_t n, Channels channels, int64_t ahead = 0) {
  produce<!SILU>(y, n, [=](int64_t i, auto lanes) {
    const auto c = channels.at(i, lanes);
    if (SILU && ahead)
      for (int at = 0; at < lanes.most; at += 64 / int(sizeof(T))) __builtin_prefetch(x + ahead + i + at, 0, 2);
    const auto z = (load(x + i, lanes) - c.mean) * (c.rstd * c.weight) + c.bias;
    if constexpr (SILU) {
      return silu_of<sizeof(T) == 2>(z);
    } else {
      return z;
    }
  });
}

template <bool SILU, class Channels>
NOINLINE void backward_stretch(const float* grad, const float* x, float* dx, int64_t n, Channels channels) {
  each(n, [=](int64_t i, auto lanes) {
    const auto c = channels.at(i, lanes);
    const Pair2 v = through<SILU>(load(grad + i, lanes), load(x + i, lanes), c);
    store(dx + i, (v.grad * c.weight - v.normal * c.product - c.sum) * c.rstd, lanes);
  });
}

struct TwoSums {
  vfloat first, second;
  INLINE TwoSums operator+(TwoSums other) const { return {first + other.first, second + other.second}; }
};

// Adds to the sums of grad * normal and of grad: of one channel, or of each.
template <bool SILU>
NOINLINE void add_sums(const float* grad, const float* x, int64_t n, OneChannel channels, float* products,
                       float* sums) {
  const TwoSums found = sums_of_row<TwoSums>(n, [=](int64_t i, auto lanes) {
    const Pair2 v = through<SILU>(load(grad + i, lanes), load(x + i, lanes), channels.channel);
    return TwoSums{v.grad * v.normal, v.grad};
  });
  *products += sum_of(found.first), *sums += sum_of(found.second);
}
template <bool SILU>
NOINLINE void add_sums(const float* grad, const float* x, int64_t n, AllChannels channels, float* products,
                       float* sums) {
  each(n, [=](int64_t i, auto lanes) {
    const Pair2 v = through<SILU>(load(grad + i, lanes), load(x + i, lanes), channels.at(i, lanes));
    store(products + i, load(products + i, lanes) + v.grad * v.normal, lanes);
    store(sums + i, load(sums + i, lanes) + v.grad, lanes);
  });
}

// ---- Calls ----

struct Call {
  GroupNormSizes sizes;
  int64_t samples, groups, of_group, positions, n, row;  // n: channels; row: the numbers of a group
  const float *weight, *bias;

  Call(const GroupNormSizes& s, const float* weight, const float* bias)
      : sizes(s),
        samples(s.batch),
        groups(s.groups),
        of_group(s.channels),
        positions(s.positions),
        n(groups * of_group),
        row(of_group * positions),
        weight(weight),
        bias(bias) {}

  // Parts of the positions of a sample, where channels are next to each other.
  int64_t parts() const {
    return std::max<int64_t>(1, std::min<int64_t>(256, positions / std::max<int64_t>(1, BLOCK / 2 / n)));
  }
  // The positions of part `block % parts()` of sample `block / parts()`, counted over all samples.
  std::pair<int64_t, int64_t> positions_of(int64_t block) const {
    const int64_t sample = block / parts() * positions, part = block % parts();
    return {sample + positions * part / parts(), sample + positions * (part + 1) / parts()};
  }
  // Positions of a chunk there, and floats of a buffer for one.
  int64_t at_once() const { return std::max<int64_t>(1, CHUNK / n); }
  int64_t buffer() const { return std::max(CHUNK, n); }

  // Calls f(first position, count) for the chunks of one part; a chunk is whole positions.
  template <class F>
  void each_chunk(int64_t block, F f) const {
    const auto [first, last] = positions_of(block);
    const int64_t most = at_once();
    for (int64_t p = first; p < last; p += most) f(p, std::min(most, last - p));
  }

  // Calls f(channel of the group, at, n) for the stretches of a group whose positions are next to each other.
  template <class F>
  void each_stretch(int64_t group, F f) const {
    for (int64_t c = 0; c < of_group; c++)
      for (int64_t p = 0; p < positions; p += CHUNK)
        f(c, group * row + c * positions + p, std::min(CHUNK, positions - p));
  }

  void fill(float* row, int64_t g, float value) const {
    std::fill(row + g * of_group, row + (g + 1) * of_group, value);
  }
};

// The moments of each group, from those of its channels.
void moments_of_groups(const Call& call, int64_t count, const float* means, const float* squares, Moments* moments) {
  for (int64_t g = 0; g < call.groups; g++) {
    float mean = 0, square = 0;
    const int64_t first = g * call.of_group, last = first + call.of_group;
    for (int64_t c = first; c < last; c++) mean += means[c];
    mean /= float(call.of_group);
    for (int64_t c = first; c < last; c++) square += squares[c] + (means[c] - mean) * (means[c] - mean) * float(count);
    moments[g] = {float(count * call.of_group), mean, square};
  }
}

template <bool SILU>
Status forward(const GroupNormForward& given, const Call& call) {
  const int64_t dtype = call.sizes.dtype, n = call.n, groups = call.groups, parts = call.parts();
  // calls f(numbers of x, numbers of y) of their dtype, from a place on
  const auto with_numbers = [&](int64_t at, auto f) {
    return with_dtype(dtype, [&](auto element) {
      using T = decltype(element);
      return f((const T*)given.x + at, (T*)given.y + at);
    });
  };
  const float eps = to_float(given.eps);
  const auto rstd_of = [&](Moments all) { return 1.0f / std::sqrt(all.squares / float(call.row) + eps); };
  const bool by_channel = call.sizes.by_channel;
  const int64_t blocks = by_channel ? call.samples * parts : call.samples * groups, workers = workers_for(blocks);
  if (!by_channel) {
    run_blocks(blocks, workers, [&](int64_t at, int64_t) {
      Moments all;
      for (int64_t i = 0; i < call.row; i += CHUNK) {
        const int64_t count = std::min(CHUNK, call.row - i);
        all.add(with_numbers(at * call.row + i, [=](auto* x, auto*) { return moments_of(x, count); }));
      }
      const float rstd = rstd_of(all);
      const int64_t first = at % groups * call.of_group;
      const int64_t ahead = call.row * size_of(dtype) <= GROUP_AHEAD ? call.row : 0;  // the next group
      call.each_stretch(at, [&](int64_t c, int64_t i, int64_t count) {
        const OneChannel channel{{all.mean, rstd, call.weight[first + c], call.bias[first + c], 0, 0}};
        with_numbers(i, [=](auto* x, auto* y) { forward_stretch<SILU>(x, y, count, channel, ahead); });
      });
      if (given.means) given.means[at] = all.mean;
      if (given.rstds) given.rstds[at] = rstd;
    });
    return OK;
  }
  const Scratch scratch(workers, 2 * n);
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Buffer<Moments> moments(blocks * groups);
  const FloatBuffer rows(call.samples * 6 * n);
  if (!moments.data() || !rows.data()) return OUT_OF_MEMORY;
  run_blocks(blocks, workers, [&](int64_t block, int64_t worker) {
    float *means = scratch.of(worker), *squares = means + n;
    const auto [first, last] = call.positions_of(block);
    with_numbers(first * n, [=](auto* x, auto*) { moments_of_channels(x, n, last - first, means, squares); });
    moments_of_groups(call, last - first, means, squares, moments.data() + block * groups);
  });
  for (int64_t sample = 0; sample < call.samples; sample++) {
    float* mine = rows.data() + sample * 6 * n;
    std::fill(mine + 4 * n, mine + 6 * n, 0.0f);
    memcpy(mine + 2 * n, call.weight, n * sizeof(float));
    memcpy(mine + 3 * n, call.bias, n * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
      Moments all;
      for (int64_t part = 0; part < parts; part++) all.add(moments.data()[(sample * parts + part) * groups + g]);
      const float rstd = rstd_of(all);
      call.fill(mine, g, all.mean);
      call.fill(mine + n, g, rstd);
      if (given.means) given.means[sample * groups + g] = all.mean;
      if (given.rstds) given.rstds[sample * groups + g] = rstd;
    }
  }
  run_blocks(blocks, workers, [&](int64_t block, int64_t) {
    const AllChannels channels{rows.data() + block / parts * 6 * n, n};
    const auto [first, last] = call.positions_of(block);
    with_numbers(first * n, [=](auto* x, auto* y) {
      for (int64_t i = 0; i < (last - first) * n; i += n) forward_stretch<SILU>(x + i, y + i, n, channels);
    });
  });
  return OK;
}

template <bool SILU>
Status backward(const GroupNormBackward& given, const Call& call) {
  const int64_t dtype = call.sizes.dtype, n = call.n, groups = call.groups, buffer = call.buffer();
  const Numbers grad = numbers(given.grad, dtype), x = numbers(given.x, dtype), dx = numbers(given.dx, dtype);
  const bool by_channel = call.sizes.by_channel;
  const int64_t parts = by_channel ? call.parts() : 1;
  const int64_t blocks = by_channel ? call.samples * parts : call.samples * groups, workers = workers_for(blocks);
  const Scratch scratch(workers, 3 * buffer);
  const FloatBuffer of_parts(call.samples * parts * 2 * n);  // the sums for weight, then those for bias
  const FloatBuffer rows(by_channel ? call.samples * 6 * n : 0);
  float* sums = of_parts.data();
  if (scratch.failed() || !sums || (by_channel && !rows.data())) return OUT_OF_MEMORY;
  std::fill(sums, sums + call.samples * parts * 2 * n, 0.0f);
  // the means over a group of m * n and of m, from the sums of its channels
  const auto means_of = [&](const float* mine, int64_t g, float& product, float& sum) {
    product = sum = 0;
    for (int64_t c = g * call.of_group; c < (g + 1) * call.of_group; c++)
      product += mine[c] * call.weight[c], sum += mine[n + c] * call.weight[c];
    product /= float(call.row), sum /= float(call.row);
  };
  if (!by_channel) {
    run_blocks(blocks, workers, [&](int64_t at, int64_t worker) {
      float *of_x = scratch.of(worker), *of_grad = of_x + buffer, *out = of_grad + buffer;
      const int64_t g = at % groups, first = g * call.of_group;
      float* mine = sums + at / groups * 2 * n;
      OneChannel channel{{given.means[at], given.rstds[at], 0, 0, 0, 0}};
      const auto in_channel = [&](int64_t c) {
        channel.channel.weight = call.weight[first + c], channel.channel.bias = call.bias[first + c];
        return channel;
      };
      call.each_stretch(at, [&](int64_t c, int64_t i, int64_t count) {
        const float *from = x.read(i, count, of_x), *d = grad.read(i, count, of_grad);
        add_sums<SILU>(d, from, count, in_channel(c), mine + first + c, mine + n + first + c);
      });
      if (!given.dx) return;
      means_of(mine, g, channel.channel.product, channel.channel.sum);
      call.each_stretch(at, [&](int64_t c, int64_t i, int64_t count) {
        const float *from = x.read(i, count, of_x), *d = grad.read(i, count, of_grad);
        float* to = dx.place(i, out);
        backward_stretch<SILU>(d, from, to, count, in_channel(c));
        dx.finish(i, count, to);
      });
    });
  } else {
    for (int64_t sample = 0; sample < call.samples; sample++) {
      float* mine = rows.data() + sample * 6 * n;
      memcpy(mine + 2 * n, call.weight, n * sizeof(float));
      memcpy(mine + 3 * n, call.bias, n * sizeof(float));
      for (int64_t g = 0; g < groups; g++) {
        call.fill(mine, g, given.means[sample * groups + g]);
        call.fill(mine + n, g, given.rstds[sample * groups + g]);
        call.fill(mine + 4 * n, g, 0);
        call.fill(mine + 5 * n, g, 0);
      }
    }
    const auto each_position = [&](int64_t block, int64_t worker, auto f) {  // f(grad, x, dx): rows of channels
      float *of_x = scratch.of(worker), *of_grad = of_x + buffer, *out = of_grad + buffer;
      call.each_chunk(block, [&](int64_t p, int64_t count) {
        const int64_t at = p * n;
        const float *from = x.read(at, count * n, of_x), *d = grad.read(at, count * n, of_grad);
        float* to = given.dx ? dx.place(at, out) : out;
        if (!f(d, from, to, count)) return;
        dx.finish(at, count * n, to);
      });
    };
    run_blocks(blocks, workers, [&](int64_t block, int64_t worker) {
      const AllChannels channels{rows.data() + block / parts * 6 * n, n};
      float* mine = sums + block * 2 * n;
      each_position(block, worker, [&](const float* d, const float* from, float*, int64_t count) {
        for (int64_t i = 0; i < count * n; i += n) add_sums<SILU>(d + i, from + i, n, channels, mine, mine + n);
        return false;
      });
    });
    for (int64_t sample = 0; sample < call.samples; sample++) {
      float *mine = sums + sample * parts * 2 * n, *of_sample = rows.data() + sample * 6 * n;
      add_parts(mine, parts, 2 * n);
      for (int64_t g = 0; g < groups; g++) {
        float product, sum;
        means_of(mine, g, product, sum);
        call.fill(of_sample + 4 * n, g, product);
        call.fill(of_sample + 5 * n, g, sum);
      }
    }
    if (given.dx)
      run_blocks(blocks, workers, [&](int64_t block, int64_t worker) {
        const AllChannels channels{rows.data() + block / parts * 6 * n, n};
        each_position(block, worker, [&](const float* d, const float* from, float* to, int64_t count) {
          for (int64_t i = 0; i < count * n; i += n) backward_stretch<SILU>(d + i, from + i, to + i, n, channels);
          return true;
        });
      });
  }
  for (int64_t sample = 1; sample < call.samples; sample++) {
    const float* other = sums + sample * parts * 2 * n;
    for (int64_t i = 0; i < 2 * n; i++) sums[i] += other[i];
  }
  if (given.dweight) store_as(call.sizes.weight_dtype, given.dweight, sums, n);
  if (given.dbias) store_as(call.sizes.bias_dtype, given.dbias, sums + n, n);
  return OK;
}

bool is_invalid(const GroupNormSizes& s) { return s.batch < 0 || s.groups < 1 || s.channels < 0 || s.positions < 0; }

// Calls f(call), unless there is no number.
template <class F>
int with_call(const GroupNormSizes& s, const void* weight, const void* bias, void* result, F f) {
  const int64_t count = s.batch * s.groups * s.channels * s.positions;
  if (is_invalid(s)) return INVALID;
  if (!count) return OK;
  use_huge_pages(result, count, s.dtype);
  const FloatRow weights(weight, s.weight_dtype, s.groups * s.channels, 1.0f, 0.0f);
  const FloatRow biases(bias, s.bias_dtype, s.groups * s.channels, -0.0f, 0.0f);
  if (weights.failed() || biases.failed()) return OUT_OF_MEMORY;
  return f(Call(s, weights.data(), biases.data()));
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_group_norm_forward(const GroupNormForward* given) {
  return with_call(given->sizes, given->weight, given->bias, given->y, [=](const Call& call) {
    if (!given->x || !given->y) return INVALID;
    return call.sizes.silu ? forward<true>(*given, call) : forward<false>(*given, call);
  });
}

FUSEDOPS_EXPORT int fusedops_group_norm_backward(const GroupNormBackward* given) {
  return with_call(given->sizes, given->weight, given->bias, given->dx, [=](const Call& call) {
    if (!given->grad || !given->x || !given->means || !given->rstds) return INVALID;
    return call.sizes.silu ? backward<true>(*given, call) : backward<false>(*given, call);
  });
}

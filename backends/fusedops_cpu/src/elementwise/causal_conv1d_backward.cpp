// The gradients of the causal convolution. With h = grad * act'(z), z the sum of the taps, which is computed again:
// dx[p] = sum over w of weight[w] * h[p + width - 1 - w], dweight[w] = sum of h[s] * x[s - (width - 1) + w], and the
// sum of h for the bias. The sums of a batch and a channel are added position by position, then batch by batch: their
// order does not depend on threads.
#include "elementwise/convolution.h"

namespace fusedops {
namespace {

constexpr int64_t TILE = 128;    // channels
constexpr int64_t CHUNK = 1024;  // positions whose numbers stay in the L1 cache, and whose sums are one addend

template <class T, int WIDTH>
struct Backward {
  ConvBackward call;
  const float *weight, *bias;
  float* sums;  // (batch, channels, width + 1)
  int64_t width, kept;

  const T* before(int64_t sequence, int64_t channel) const {
    return of_state((const T*)call.before, sequence, channel);
  }
  template <class S>
  S* of_state(S* states, int64_t sequence, int64_t channel) const {
    return states ? states + (sequence * call.sizes.channels + channel) * kept : nullptr;
  }
  float* sums_of(int64_t batch, int64_t channel) const {
    return sums + (batch * call.sizes.channels + channel) * (width + 1);
  }
  static INLINE float number(const T* p) { return load(p, Part{1})[0]; }
  static INLINE void put(T* p, float value) { store(p, all(value), Part{1}); }
  static INLINE vfloat slope(vfloat z) { return gate_function(false)(z).slope; }

  // ---- Positions next to each other ----

  struct Buffers {
    float inputs[CHUNK + 2 * MOST_TAPS + LANES], h[CHUNK + MOST_TAPS + LANES];
  };

  NOINLINE void row(int64_t batch, int64_t channel) const {
    const ConvSizes& sizes = call.sizes;
    const T* x = (const T*)call.x + batch * sizes.x_batch + channel * sizes.x_channel;
    const T* grad = (const T*)call.grad + batch * call.grad_batch + channel * call.grad_channel;
    T* dx = call.dx ? (T*)call.dx + batch * sizes.y_batch + channel * sizes.y_channel : nullptr;
    float taps[MOST_TAPS], total[MOST_TAPS + 1] = {};
    for (int64_t w = 0; w < width; w++) taps[w] = weight[channel * width + w];
    each_sequence(
        sizes, call.bounds, batch,
        [&](Sequence s) {
          sequence(s, channel, x + s.begin, grad + s.begin, dx ? dx + s.begin : nullptr, taps, total);
        },
        [&](int64_t begin, int64_t end) {
          if (dx) memset((void*)(dx + begin), 0, (end - begin) * sizeof(T));
        });
    memcpy(sums_of(batch, channel), total, (width + 1) * sizeof(float));
  }

  INLINE void sequence(Sequence s, int64_t channel, const T* x, const T* grad, T* dx, const float* taps,
                       float* total) const {
    Buffers buffers;
    float *inputs = buffers.inputs, *h = buffers.h;
    const T *own = before(s.number, channel), *last = of_state((const T*)call.grad_state, s.number, channel);
    T* dbefore = of_state((T*)call.dbefore, s.number, channel);
    const int64_t length = s.length(), taps_count = width, most = kept;
    const bool silu = call.sizes.silu;
    if (!length && dbefore)
      for (int64_t k = 0; k < kept; k++) dbefore[k] = last ? last[k] : T{};
    for (int64_t at = 0; at < length; at += CHUNK) {
      const int64_t n = std::min(CHUNK, length - at), more = std::min(kept, length - at - n), all_h = n + more;
      // the inputs from the first tap of the first position on
      const int64_t absent = at ? 0 : kept;
      for (int64_t i = 0; i < absent; i++) inputs[i] = own ? number(own + i) : 0.0f;
      const T* from = x + at - kept + absent;
      float* to = inputs + absent;
      each(kept + all_h - absent, [=](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
      const T* g = grad + at;
      const float offset = bias[channel];
      each(all_h, [=](int64_t i, auto lanes) {
        const vfloat own = load(g + i, lanes);
        store(h + i, silu ? own * slope(sum_of_taps<WIDTH>(inputs, taps, offset, taps_count, i, lanes)) : own, lanes);
      });
      for (int64_t w = 0; w < width; w++)
        total[w] += sum_of(sums_of_row<vfloat>(
            n, [=](int64_t i, auto lanes) { return load(h + i, lanes) * load(inputs + i + w, lanes); }));
      total[width] += sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) { return load(h + i, lanes); }));
      if (!at && dbefore)
        for (int64_t k = 0; k < kept; k++) {
          float sum = k >= length && last ? number(last + k - length) : 0.0f;
          for (int64_t w = 0; w <= k; w++) sum += k - w < n ? taps[w] * h[k - w] : 0.0f;
          put(dbefore + k, sum);
        }
      if (!dx) continue;
      T* out = dx + at;
      const int64_t whole = std::max<int64_t>(0, std::min(n, length - kept - at));  // positions with every tap
      each(whole, [=](int64_t i, auto lanes) {
        vfloat sum = load(h + i + most, lanes) * taps[0];
        for (int64_t w = 1; w < (WIDTH ? WIDTH : taps_count); w++) sum = sum + load(h + i + most - w, lanes) * taps[w];
        store(out + i, sum, lanes);
      });
      for (int64_t p = at + whole; p < at + n; p++) {
        float sum = last ? number(last + p - (length - kept)) : 0.0f;
        for (int64_t w = std::max<int64_t>(0, p + kept - length + 1); w < width; w++)
          sum += taps[w] * h[p - at + kept - w];
        put(dx + p, sum);
      }
    }
  }

  // ---- Channels next to each other ----

  struct Sums {
    alignas(64) float chunk[(MOST_TAPS + 1) * TILE], total[(MOST_TAPS + 1) * TILE];
    INLINE void add(int64_t count) {
      each(count, [this](int64_t i, auto lanes) {
        store(total + i, load(total + i, lanes) + load(chunk + i, lanes), lanes);
        store(chunk + i, vfloat{}, lanes);
      });
    }
  };

  NOINLINE void tile(int64_t batch, const Channels<TILE>& channels) const {
    const ConvSizes& sizes = call.sizes;
    const int64_t first = channels.first, count = channels.count;
    const T* x = (const T*)call.x + batch * sizes.x_batch + first;
    const T* grad = (const T*)call.grad + batch * call.grad_batch + first;
    T* dx = call.dx ? (T*)call.dx + batch * sizes.y_batch + first : nullptr;
    Sums of_tile;
    memset(&of_tile, 0, sizeof of_tile);
    each_sequence(
        sizes, call.bounds, batch,
        [&](Sequence s) {
          const int64_t at = s.begin;
          lines(s, channels, x + at * sizes.x_position, grad + at * call.grad_position,
                dx ? dx + at * sizes.y_position : nullptr, of_tile);
        },
        [&](int64_t begin, int64_t end) {
          for (int64_t p = begin; dx && p < end; p++) memset((void*)(dx + p * sizes.y_position), 0, count * sizeof(T));
        });
    of_tile.add((width + 1) * count);
    for (int64_t c = 0; c < count; c++)
      for (int64_t w = 0; w <= width; w++) sums_of(batch, first + c)[w] = of_tile.total[w * count + c];
  }

  INLINE void lines(Sequence s, const Channels<TILE>& channels, const T* x, const T* grad, T* dx, Sums& of_tile) const {
    const ConvSizes& sizes = call.sizes;
    const int64_t count = channels.count, length = s.length(), n = width;
    const bool silu = sizes.silu;
    alignas(64) float ring[MOST_TAPS * TILE], out[TILE];  // h of the newest positions
    T edge[(MOST_TAPS - 1) * TILE];
    fill_edge(before(s.number, channels.first), count, kept, edge);
    const T* last = of_state((const T*)call.grad_state, s.number, channels.first);
    T* dbefore = of_state((T*)call.dbefore, s.number, channels.first);
    const float *taps = channels.taps, *offset = channels.bias;
    float* chunk = of_tile.chunk;
    for (int64_t at = 0; at < length + kept; at++) {
      if (at < length) {
        const TapRows<T> rows(x, sizes.x_position, edge, count, width, at);
        const T* g = grad + at * call.grad_position;
        float* newest = ring + at % width * count;
        each(count, [=](int64_t i, auto lanes) {
          const vfloat own = load(g + i, lanes);
          const vfloat h = silu ? own * slope(sum_of_taps<WIDTH>(rows, taps, offset, count, n, i, lanes)) : own;
          store(newest + i, h, lanes);
          const int64_t last_tap = WIDTH ? WIDTH : n;
          for (int64_t w = 0; w < last_tap; w++) {
            float* sum = chunk + w * count + i;
            store(sum, load(sum, lanes) + h * load(rows.of[w] + i, lanes), lanes);
          }
          float* sum = chunk + last_tap * count + i;
          store(sum, load(sum, lanes) + h, lanes);
        });
        if (at % CHUNK == CHUNK - 1) of_tile.add((width + 1) * count);
      }
      // the gradient of the input width - 1 positions before this one
      if (at < kept ? !dbefore : !dx) continue;
      const int64_t first_tap = std::max<int64_t>(0, at - length + 1), taps_end = std::min(width, at + 1);
      const float* h[MOST_TAPS];
      for (int64_t w = first_tap; w < taps_end; w++) h[w] = ring + (at - w) % width * count;
      const bool whole = taps_end - first_tap == width;
      each(count, [=, &out](int64_t i, auto lanes) {
        vfloat sum = {};
        if (whole) {
          for (int64_t w = 0; w < (WIDTH ? WIDTH : n); w++)
            sum = sum + load(h[w] + i, lanes) * load(taps + w * count + i, lanes);
        } else {  // beside an end of the sequence
          for (int64_t w = first_tap; w < taps_end; w++)
            sum = sum + load(h[w] + i, lanes) * load(taps + w * count + i, lanes);
        }
        store(out + i, sum, lanes);
      });
      if (at >= length && last)
        for (int64_t c = 0; c < count; c++) out[c] += number(last + c * kept + at - length);
      if (at < kept) {
        for (int64_t c = 0; c < count; c++) put(dbefore + c * kept + at, out[c]);
      } else {
        T* to = dx + (at - kept) * sizes.y_position;
        each(count, [=, &out](int64_t i, auto lanes) { store(to + i, load(out + i, lanes), lanes); });
      }
    }
  }

  void run() const {
    const ConvSizes& sizes = call.sizes;
    const int64_t elements = sizes.batch * sizes.channels * std::max<int64_t>(1, sizes.length);
    const bool few = elements <= BLOCK / 4;
    const Backward& self = *this;
    if (!sizes.by_channel) {
      const int64_t rows = sizes.batch * sizes.channels, blocks = rows;
      run_blocks(blocks, few ? 1 : workers_for(blocks), [&self](int64_t row, int64_t) {
        self.row(row / self.call.sizes.channels, row % self.call.sizes.channels);
      });
    } else {
      const int64_t tiles = divide_up(sizes.channels, TILE), blocks = sizes.batch * tiles;
      run_blocks(blocks, few ? 1 : workers_for(blocks), [&self, tiles](int64_t block, int64_t) {
        const int64_t first = block % tiles * TILE, all = self.call.sizes.channels;
        self.tile(block / tiles,
                  Channels<TILE>(self.weight, self.bias, first, std::min(TILE, all - first), self.width));
      });
    }
    add_parts(sums, sizes.batch, sizes.channels * (width + 1));
  }
};

template <class T, int WIDTH>
Status backward(const ConvBackward& call) {
  const ConvSizes& sizes = call.sizes;
  const int64_t width = sizes.width, channels = sizes.channels;
  const FloatRow weight(call.weight, sizes.weight_dtype, channels * width, 0.0f, 0.0f);
  const FloatRow bias(call.bias, sizes.bias_dtype, channels, 0.0f, 0.0f);
  const FloatBuffer buffer(std::max<int64_t>(1, sizes.batch) * channels * (width + 1)), dense(channels * width);
  float *sums = buffer.data(), *packed = dense.data();
  if (weight.failed() || bias.failed() || !sums || !packed) return OUT_OF_MEMORY;
  if (!sizes.batch) memset(sums, 0, channels * (width + 1) * sizeof(float));
  Backward<T, WIDTH>{call, weight.data(), bias.data(), sums, width, width - 1}.run();
  for (int64_t c = 0; c < channels; c++) memcpy(packed + c * width, sums + c * (width + 1), width * sizeof(float));
  if (call.dweight) store_as(sizes.weight_dtype, call.dweight, packed, channels * width);
  for (int64_t c = 0; c < channels; c++) packed[c] = sums[c * (width + 1) + width];
  if (call.dbias) store_as(sizes.bias_dtype, call.dbias, packed, channels);
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_conv_backward(const ConvBackward* call) {
  const ConvSizes& sizes = call->sizes;
  if (!are_sizes(sizes, call->bounds)) return INVALID;
  if (!sizes.channels) return OK;
  const int64_t elements = sizes.batch * sizes.channels * sizes.length;
  if (!call->weight || (elements && (!call->x || !call->grad))) return INVALID;
  if (call->dx) use_huge_pages(call->dx, elements, sizes.dtype);
  return with_dtype(sizes.dtype, [=](auto element) {
    using T = decltype(element);
    return call->sizes.width == 4 ? backward<T, 4>(*call) : backward<T, 0>(*call);
  });
}

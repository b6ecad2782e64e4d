// The causal convolution of each channel: y[s] = act(bias + sum over w of weight[w] * x[s - (width - 1) + w]), and the
// state after each sequence. Vectors are of positions of one channel where these are next to each other in memory, else
// of channels at one position. Its gradients: causal_conv1d_backward.cpp.
#include "elementwise/convolution.h"

namespace fusedops {
namespace {

constexpr int64_t TILE = 512;                    // channels
constexpr int64_t HEAD = LANES < 8 ? 8 : LANES;  // positions whose taps may lie before the sequence; keeps alignment

// The branches on silu and on stores past the caches take nothing beside the arithmetic, and versions of the loops
// without them take three quarters of the library's part.
INLINE vfloat activated(vfloat z, bool silu) { return silu ? silu_of(z) : z; }

template <class T, int WIDTH>
struct Forward {
  ConvForward call;
  const float *weight, *bias;
  int64_t width, kept;
  bool silu, streams_y;

  const T* before(int64_t sequence, int64_t channel) const {
    return call.before ? (const T*)call.before + (sequence * call.sizes.channels + channel) * kept : nullptr;
  }

  template <class Lanes>
  static INLINE void put(T* p, vfloat v, Lanes lanes, bool streams) {
    if (streams) {
      store_or_stream<true>(p, v, lanes);
    } else {
      store(p, v, lanes);
    }
  }

  // The last inputs of a sequence.
  void keep(Sequence s, int64_t channel, const T* x) const {
    if (!call.state) return;
    T* state = (T*)call.state + (s.number * call.sizes.channels + channel) * kept;
    const int64_t step = call.sizes.x_position;
    const T* own = before(s.number, channel);
    for (int64_t k = 0; k < kept; k++) state[k] = input_at(x, step, own, width, s.length() - kept + k);
  }

  // ---- Positions next to each other ----

  INLINE void stretch(const T* inputs, T* out, int64_t n, const float* taps, float offset, bool streams) const {
    const int64_t count = width;
    const bool act = silu;
    each(n, [=](int64_t i, auto lanes) {
      put(out + i, activated(sum_of_taps<WIDTH>(inputs, taps, offset, count, i, lanes), act), lanes, streams);
    });
  }

  NOINLINE void row(int64_t batch, int64_t channel) const {
    const ConvSizes& sizes = call.sizes;
    const T* x = (const T*)call.x + batch * sizes.x_batch + channel * sizes.x_channel;
    T* y = (T*)call.y + batch * sizes.y_batch + channel * sizes.y_channel;
    float taps[MOST_TAPS];
    for (int64_t w = 0; w < width; w++) taps[w] = weight[channel * width + w];
    each_sequence(
        sizes, call.bounds, batch,
        [&](Sequence s) {
          const T* own = before(s.number, channel);
          const T* from = x + s.begin;
          T* to = y + s.begin;
          const int64_t n = s.length(), head = std::min(n, HEAD);
          T edge[MOST_TAPS + HEAD];
          for (int64_t i = 0; i < kept + head; i++) edge[i] = input_at(from, 1, own, width, i - kept);
          stretch(edge, to, head, taps, bias[channel], false);
          if (n > head) stretch(from + head - kept, to + head, n - head, taps, bias[channel], streams_y);
          keep(s, channel, from);
        },
        [&](int64_t begin, int64_t end) { memset((void*)(y + begin), 0, (end - begin) * sizeof(T)); });
  }

  // ---- Channels next to each other ----

  INLINE void line(const TapRows<T>& rows, const Channels<TILE>& channels, T* out) const {
    const int64_t count = channels.count, n = width;
    const float *taps = channels.taps, *offset = channels.bias;
    const bool act = silu, streams = streams_y;
    each(count, [=](int64_t i, auto lanes) {
      put(out + i, activated(sum_of_taps<WIDTH>(rows, taps, offset, count, n, i, lanes), act), lanes, streams);
    });
  }

  // Positions `first`.. of `count` of the channels.
  NOINLINE void tile(int64_t batch, const Channels<TILE>& channels, int64_t first, int64_t last) const {
    const ConvSizes& sizes = call.sizes;
    const T* x = (const T*)call.x + batch * sizes.x_batch + channels.first;
    T* y = (T*)call.y + batch * sizes.y_batch + channels.first;
    T edge[(MOST_TAPS - 1) * TILE];
    each_sequence(
        sizes, call.bounds, batch,
        [&](Sequence s) {
          const T* from = x + s.begin * sizes.x_position;
          if (!first && call.state)
            for (int64_t c = 0; c < channels.count; c++) keep(s, channels.first + c, from + c);
          const int64_t begin = std::max(s.begin, first), end = std::min(s.end, last);
          if (begin >= end) return;
          if (begin - s.begin < kept) fill_edge(before(s.number, channels.first), channels.count, kept, edge);
          for (int64_t p = begin; p < end; p++) {
            const TapRows<T> rows(from, sizes.x_position, edge, channels.count, width, p - s.begin);
            line(rows, channels, y + p * sizes.y_position);
          }
        },
        [&](int64_t begin, int64_t end) {
          for (int64_t p = std::max(begin, first); p < std::min(end, last); p++)
            memset((void*)(y + p * sizes.y_position), 0, channels.count * sizeof(T));
        });
  }

  // ---- One token, four taps ----

  // A vector of channels at a time, whose three inputs before and four weights are taken apart in registers.
  NOINLINE void token(int64_t batch, int64_t first, int64_t last) const {
    const ConvSizes& sizes = call.sizes;
    const T *x = (const T*)call.x + batch * sizes.x_batch, *own = before(batch, 0);
    T *y = (T*)call.y + batch * sizes.y_batch, *state = (T*)call.state;
    if (state) state += batch * sizes.channels * kept;
    const float *rows = weight, *offset = bias;
    const bool act = silu;
    each(last - first, [=](int64_t i, auto lanes) {
      const int64_t c = first + i;
      vfloat taps[4], inputs[4] = {{}, {}, {}, load(x + c, lanes)};
      load_apart<4>(rows + 4 * c, lanes, taps);
      if (own) load_apart<3>(own + 3 * c, lanes, inputs);
      vfloat z = load(offset + c, lanes);
      for (int w = 0; w < 4; w++) z = z + inputs[w] * taps[w];
      store(y + c, activated(z, act), lanes);
      if (state) store_together(state + 3 * c, lanes, inputs + 1);
    });
  }

  void run() const {
    const ConvSizes& sizes = call.sizes;
    const int64_t positions = std::max<int64_t>(1, sizes.length);  // without one, a state may still be wanted
    const int64_t elements = sizes.batch * sizes.channels * positions;
    const Forward& self = *this;
    if (!sizes.by_channel) {
      const int64_t rows = sizes.batch * sizes.channels, of_block = std::max<int64_t>(1, BLOCK / positions);
      const int64_t blocks = divide_up(rows, of_block);
      run_blocks(blocks, elements <= BLOCK ? 1 : workers_for(blocks), [&self, rows, of_block](int64_t block, int64_t) {
        const int64_t channels = self.call.sizes.channels;
        for (int64_t row = block * of_block; row < std::min(rows, (block + 1) * of_block); row++)
          self.row(row / channels, row % channels);
        stream_end();
      });
      return;
    }
    if constexpr (WIDTH == 4) {
      if (sizes.length == 1 && !call.bounds) {
        const int64_t of_block = BLOCK / 8, parts = divide_up(sizes.channels, of_block), blocks = sizes.batch * parts;
        run_blocks(blocks, elements <= BLOCK ? 1 : workers_for(blocks),
                   [&self, parts, of_block](int64_t block, int64_t) {
                     const int64_t first = block % parts * of_block;
                     self.token(block / parts, first, std::min(self.call.sizes.channels, first + of_block));
                   });
        return;
      }
    }
    const int64_t tiles = divide_up(sizes.channels, TILE), of_part = std::max<int64_t>(64, 2 * BLOCK / TILE);
    const int64_t parts = divide_up(positions, of_part), blocks = sizes.batch * tiles * parts;
    run_blocks(
        blocks, elements <= BLOCK ? 1 : workers_for(blocks), [&self, tiles, parts, of_part](int64_t block, int64_t) {
          const ConvSizes& sizes = self.call.sizes;
          const int64_t part = block / tiles % parts, first = block % tiles * TILE;
          const Channels<TILE> channels(self.weight, self.bias, first, std::min(TILE, sizes.channels - first),
                                        self.width);
          self.tile(block / (tiles * parts), channels, part * of_part, std::min(sizes.length, (part + 1) * of_part));
          stream_end();
        });
  }
};

template <class T, int WIDTH>
Status forward(const ConvForward& call) {
  const ConvSizes& sizes = call.sizes;
  const FloatRow weight(call.weight, sizes.weight_dtype, sizes.channels * sizes.width, 0.0f, 0.0f);
  const FloatRow bias(call.bias, sizes.bias_dtype, sizes.channels, 0.0f, 0.0f);
  if (weight.failed() || bias.failed()) return OUT_OF_MEMORY;
  const bool in_memory =
      !call.bounds && (sizes.by_channel ? streams((T*)call.y, sizes.batch * sizes.length, sizes.channels)
                                        : streams((T*)call.y, sizes.batch * sizes.channels, sizes.length));
  Forward<T, WIDTH>{call, weight.data(), bias.data(), sizes.width, sizes.width - 1, sizes.silu != 0, in_memory}.run();
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_conv_forward(const ConvForward* call) {
  const ConvSizes& sizes = call->sizes;
  if (!are_sizes(sizes, call->bounds) || (sizes.channels && !call->weight)) return INVALID;
  const int64_t elements = sizes.batch * sizes.channels * sizes.length;
  if (elements && (!call->x || !call->y)) return INVALID;
  if (!elements && !call->state) return OK;
  use_huge_pages(call->y, elements, sizes.dtype);
  return with_dtype(sizes.dtype, [=](auto element) {
    using T = decltype(element);
    return call->sizes.width == 4 ? forward<T, 4>(*call) : forward<T, 0>(*call);
  });
}

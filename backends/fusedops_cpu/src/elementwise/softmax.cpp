// y = softmax(where(masked, -inf, scale * x)) over rows, and its gradient from y.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "math/exp.h"
#include "math/finite.h"
#include "parallel.h"
#include "simd/masks.h"
#include "simd/several.h"

namespace fusedops {
namespace {

constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// The leading dimensions of x with the strides of the mask along them, 0 where it broadcasts.
struct MaskLayout {
  int64_t dims, sizes[MAX_DIMS], strides[MAX_DIMS];
  bool column_stride;  // false: the mask has one value for all columns of a row

  // Returns false where the mask does not broadcast to x: nothing is read out of bounds, whatever the caller passes.
  bool set(const SoftmaxForward& call) {
    const int64_t *x_shape = call.shapes(), *shape = x_shape + call.dims, *stride = shape + call.mask_dims;
    if (call.dims < 1 || call.dims > MAX_DIMS || call.mask_dims < 0 || call.mask_dims > call.dims) return false;
    int64_t missing = call.dims - call.mask_dims, rows = 1;
    dims = call.dims - 1;
    for (int64_t d = 0; d < dims; d++) {
      int64_t size = d < missing ? 1 : shape[d - missing];
      if (size != 1 && size != x_shape[d]) return false;
      sizes[d] = x_shape[d];
      strides[d] = size == 1 ? 0 : stride[d - missing];
      rows *= x_shape[d];
    }
    int64_t last_size = call.mask_dims ? shape[call.mask_dims - 1] : 1;
    int64_t last_stride = last_size == 1 ? 0 : stride[call.mask_dims - 1];
    column_stride = last_stride;
    return rows == call.rows && x_shape[dims] == call.sk && (last_size == 1 || last_size == call.sk) &&
           (last_stride == 0 || last_stride == 1);
  }
};

// The place in the mask of each row: an odometer over the leading dimensions.
class MaskRows {
 public:
  MaskRows(const MaskLayout& layout, int64_t row) : layout_(layout) {
    for (int64_t d = layout_.dims - 1; d >= 0; d--) {
      index_[d] = row % layout_.sizes[d];
      row /= layout_.sizes[d];
      offset_ += index_[d] * layout_.strides[d];
    }
  }
  int64_t offset() const { return offset_; }
  INLINE void next() {
    for (int64_t d = layout_.dims - 1; d >= 0; d--) {
      offset_ += layout_.strides[d];
      if (++index_[d] < layout_.sizes[d]) return;
      offset_ -= layout_.sizes[d] * layout_.strides[d];
      index_[d] = 0;
    }
  }

 private:
  const MaskLayout& layout_;
  int64_t index_[MAX_DIMS], offset_ = 0;
};

// One row: the first n of sk columns, and 0 after them. `buffer` holds sk + LANES floats.
template <class T, bool MASKED>
INLINE void softmax_row(const T* x, const uint8_t* mask, T* y, float* buffer, int64_t n, int64_t sk, float scale) {
  vfloat tops = all(-INF);
  each_of_row(n, sk, [&](int64_t i, auto lanes) {
    vfloat t = load(x + i, lanes) * scale;
    if constexpr (MASKED) t = masked_lanes(mask + i, lanes) ? all(-INF) : t;
    if constexpr (!decltype(lanes)::full) t = lanes_below(lanes.n) ? t : all(-INF);
    store(buffer + i, t);
    tops = max(t, tops);
  });
  float top = max_of(tops);
  Two<vfloat> sums = {};
  int64_t at = 0;
  for (; at + Pair::lanes <= n; at += Pair::lanes) {
    const auto e = exp_nonpositive(load(buffer + at, Pair{}) - top);
    store(buffer + at, e);
    sums = sums + e;
  }
  for (; at < n; at += LANES) {
    const vfloat e = exp_nonpositive(load(buffer + at) - top);
    store(buffer + at, e);
    sums.a += e;
  }
  const float sum = sum_of(sums.a + sums.b);
  if (__builtin_expect(sum != sum, 0)) {  // NaN, inf, or nothing above -inf: NaN where not masked, 0 where masked
    each_of_row(n, sk, [&](int64_t i, auto lanes) {
      vfloat v = all(NOT_A_NUMBER);
      if constexpr (MASKED) v = masked_lanes(mask + i, lanes) ? vfloat{} : v;
      store(y + i, v, lanes);
    });
  } else {
    const float factor = 1.0f / sum;
    int64_t done = 0;
    for (; done + Pair::lanes <= n; done += Pair::lanes) store(y + done, load(buffer + done, Pair{}) * factor);
    each_of_row(n - done, sk - done,
                [&](int64_t i, auto lanes) { store(y + done + i, load(buffer + done + i) * factor, lanes); });
  }
  int64_t written = written_of_row(n, sk);
  if (written < sk) memset((void*)(y + written), 0, (sk - written) * sizeof(T));
}

template <class T, bool MASKED>
Status forward(const SoftmaxForward& call) {
  const T* x = (const T*)call.x;
  T* y = (T*)call.y;
  const int64_t rows = call.rows, sq = call.sq, sk = call.sk, rows_of_block = std::max<int64_t>(1, BLOCK / sk);
  const int64_t blocks = divide_up(rows, rows_of_block), workers = workers_for(blocks), room = sk + LANES;
  const bool causal = call.causal;
  const float scale = to_float(call.scale);
  FloatBuffer buffers(workers * room);
  float* buffer_of_workers = buffers.data();
  if (!buffer_of_workers) return OUT_OF_MEMORY;
  const uint8_t* mask = call.mask;
  MaskLayout layout;
  if (MASKED && !layout.set(call)) return INVALID;
  const MaskLayout* layout_address = &layout;  // not a copy of 280 bytes for each worker
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    int64_t begin = block * rows_of_block, end = std::min(rows, begin + rows_of_block);
    float* buffer = buffer_of_workers + worker * room;
    if constexpr (!MASKED) {
      for (int64_t row = begin; row < end; row++) {
        int64_t n = causal ? std::min(sk, row % sq + 1) : sk;
        softmax_row<T, false>(x + row * sk, nullptr, y + row * sk, buffer, n, sk, scale);
      }
    } else {
      MaskRows mask_rows(*layout_address, begin);
      for (int64_t row = begin; row < end; row++, mask_rows.next()) {
        int64_t n = causal ? std::min(sk, row % sq + 1) : sk;
        const uint8_t* mask_row = mask + mask_rows.offset();
        if (layout_address->column_stride) {
          softmax_row<T, true>(x + row * sk, mask_row, y + row * sk, buffer, n, sk, scale);
        } else if (*mask_row) {
          memset((void*)(y + row * sk), 0, sk * sizeof(T));
        } else {
          softmax_row<T, false>(x + row * sk, nullptr, y + row * sk, buffer, n, sk, scale);
        }
      }
    }
  });
  return OK;
}

// dx = scale * y * (grad - sum(grad * y)), which is 0 where y is.
template <class T>
Status backward(const SoftmaxBackward& call) {
  const T *grad = (const T*)call.grad, *y = (const T*)call.y;
  T* dx = (T*)call.dx;
  const int64_t rows = call.rows, sq = call.sq, sk = call.sk, rows_of_block = std::max<int64_t>(1, BLOCK / sk);
  const bool causal = call.causal;
  const float scale = to_float(call.scale);
  run_blocks(divide_up(rows, rows_of_block), [=](int64_t block) {
    for (int64_t row = block * rows_of_block; row < std::min(rows, (block + 1) * rows_of_block); row++) {
      int64_t n = causal ? std::min(sk, row % sq + 1) : sk, i = 0;
      const T *g = grad + row * sk, *p = y + row * sk;
      T* d = dx + row * sk;
      vfloat s0 = {}, s1 = {}, s2 = {}, s3 = {};  // four sums: each addition waits for the one before
      for (; i + 4 * LANES <= n; i += 4 * LANES) {
        s0 += load(g + i) * load(p + i);
        s1 += load(g + i + LANES) * load(p + i + LANES);
        s2 += load(g + i + 2 * LANES) * load(p + i + 2 * LANES);
        s3 += load(g + i + 3 * LANES) * load(p + i + 3 * LANES);
      }
      each_of_row(n - i, sk - i, [&](int64_t j, auto lanes) { s0 += load(g + i + j, lanes) * load(p + i + j, lanes); });
      float dot = sum_of((s0 + s1) + (s2 + s3));
      each_of_row(n, sk, [&](int64_t j, auto lanes) {
        store(d + j, (load(g + j, lanes) - dot) * load(p + j, lanes) * scale, lanes);
      });
      int64_t written = written_of_row(n, sk);
      if (written < sk) memset((void*)(d + written), 0, (sk - written) * sizeof(T));
      // (grad - dot) * 0, where causal masks too, is NaN in a row with NaN
      if (__builtin_expect(dot - dot != 0, 0)) {
        each_of_row(sk - n, sk - n, [&](int64_t j, auto lanes) { store(d + n + j, all(NOT_A_NUMBER), lanes); });
      }
    }
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_softmax_forward(const SoftmaxForward* call) {
  if (!call->rows || !call->sk) return OK;
  if (!call->x || !call->y || call->sq < 1) return INVALID;
  use_huge_pages(call->y, call->rows * call->sk, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return call->mask ? forward<T, true>(*call) : forward<T, false>(*call);
  });
}

FUSEDOPS_EXPORT int fusedops_softmax_backward(const SoftmaxBackward* call) {
  if (!call->rows || !call->sk) return OK;
  if (!call->grad || !call->y || !call->dx || call->sq < 1) return INVALID;
  use_huge_pages(call->dx, call->rows * call->sk, call->dtype);
  return with_dtype(call->dtype, [=](auto element) { return backward<decltype(element)>(*call); });
}

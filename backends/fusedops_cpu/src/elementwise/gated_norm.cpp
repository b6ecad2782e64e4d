// y = rms_norm(x) * act(gate), or rms_norm(x * act(gate)) where GATE_FIRST, and the gradients. The norm is that of each
// of several groups of a row. Each row is read once; its second use finds it in the cache.
#include <cmath>

#include "api.h"
#include "math/finite.h"
#include "math/sigmoid.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

// The groups of rows of one call, their weight in float32.
template <class T, bool GATE_FIRST>
struct Rows {
  const T *x, *gate;
  const float* weight;
  int64_t groups, columns, x_row, gate_row;  // columns: of a group
  GateFunction activation;

  template <class Call>
  Rows(const Call& call, const float* weight)
      : x((const T*)call.x),
        gate((const T*)call.gate),
        weight(weight),
        groups(call.groups),
        columns(call.columns),
        x_row(call.x_row),
        gate_row(call.gate_row),
        activation(gate_function(call.sigmoid)) {}

  // The numbers of one group of a row: x, the activation of the gate, and what is normalized.
  struct Numbers {
    vfloat x;
    GateFunction::Value gate;
    INLINE vfloat normed() const { return GATE_FIRST ? x * gate.act : x; }
  };
  struct Group {
    const T *x, *gate;
    const float* weight;
    GateFunction activation;
    template <class Lanes>
    INLINE Numbers operator()(int64_t i, Lanes lanes) const {
      return {load(x + i, lanes), activation(load(gate + i, lanes))};
    }
  };
  INLINE Group group(int64_t row, int64_t at) const {
    const int64_t first = at * columns;
    return {x + row * x_row + first, gate + row * gate_row + first, weight + first, activation};
  }
};

template <class T, bool GATE_FIRST>
struct Forward {
  Rows<T, GATE_FIRST> rows;
  T* y;
  float* rstds;  // null: not wanted
  float eps;
  bool streams_y;

  NOINLINE void operator()(int64_t row) const {
    for (int64_t at = 0; at < rows.groups; at++) {
      const auto group = rows.group(row, at);
      const int64_t n = rows.columns, index = row * rows.groups + at;
      const float squares = sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) {
        const vfloat v = GATE_FIRST ? group(i, lanes).normed() : load(group.x + i, lanes);
        return v * v;
      }));
      const float rstd = 1.0f / std::sqrt(squares / float(n) + eps);
      if (streams_y) {
        finish<true>(group, y + index * n, rstd);
      } else {
        finish<false>(group, y + index * n, rstd);
      }
      if (rstds) rstds[index] = rstd;
    }
  }

 private:
  template <bool STREAMS, class Group>
  INLINE void finish(Group group, T* out, float rstd) const {
    const int64_t x_next = rows.x_row, gate_next = rows.gate_row;
    each(rows.columns, [=](int64_t i, auto lanes) {
      if constexpr (STREAMS) {  // so that memory is read and written at the same time, row after row
        __builtin_prefetch(group.x + x_next + i);
        __builtin_prefetch(group.gate + gate_next + i);
      }
      const auto v = group(i, lanes);
      const vfloat normal = v.normed() * rstd * load(group.weight + i, lanes);
      store_or_stream<STREAMS>(out + i, GATE_FIRST ? normal : normal * v.gate.act, lanes);
    });
  }
};

template <class T, bool GATE_FIRST>
Status forward(const GatedNormForward& call) {
  const int64_t width = call.groups * call.columns;
  const FloatRow weight(call.weight, call.weight_dtype, width, 1.0f, to_float(call.offset));
  if (weight.failed()) return OUT_OF_MEMORY;
  const Forward<T, GATE_FIRST> norm{
      {call, weight.data()}, (T*)call.y, call.rstds, to_float(call.eps), streams((T*)call.y, call.rows, width)};
  const int64_t rows = call.rows, rows_of_block = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, width));
  run_blocks(divide_up(rows, rows_of_block), [=](int64_t block) {
    for (int64_t row = block * rows_of_block; row < std::min(rows, (block + 1) * rows_of_block); row++) norm(row);
    stream_end();
  });
  return OK;
}

// With z = what is normalized, n = z * rstd, the gradient of n by g, which is grad, or grad * act(gate), and
// m = g * weight, the gradient of z is rstd * (m - n * mean(m * n)).
template <class T, bool GATE_FIRST>
struct Backward {
  Rows<T, GATE_FIRST> rows;
  const T* grad;
  const float* rstds;
  T *dx, *dgate;  // null: not wanted

  // dweight: the sums for the gradient of the weight, to which the row is added; null: not wanted.
  NOINLINE void operator()(int64_t row, float* dweight) const {
    for (int64_t at = 0; at < rows.groups; at++)
      group(row * rows.groups + at, rows.group(row, at), dweight ? dweight + at * rows.columns : nullptr);
  }

 private:
  template <class Group>
  INLINE void group(int64_t index, Group numbers, float* sums) const {
    const int64_t n = rows.columns, first = index * n;
    const float rstd = rstds[index];
    float product = 0;  // the mean of m * n
    if (dx || (GATE_FIRST && dgate)) {
      const float sum = sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) {
        const auto v = numbers(i, lanes);
        const vfloat g = of_normal(load(grad + first + i, lanes), v.gate.act);
        return g * load(numbers.weight + i, lanes) * (v.normed() * rstd);
      }));
      product = sum / float(n);
    }
    each(n, [=](int64_t i, auto lanes) {
      const int64_t at = first + i;
      const auto v = numbers(i, lanes);
      const vfloat w = load(numbers.weight + i, lanes), d = load(grad + at, lanes), normal = v.normed() * rstd;
      const vfloat g = of_normal(d, v.gate.act), dz = (g * w - normal * product) * rstd;
      if (sums) store(sums + i, load(sums + i, lanes) + g * normal, lanes);
      if (dx) store(dx + at, GATE_FIRST ? dz * v.gate.act : dz, lanes);
      if (dgate) store(dgate + at, (GATE_FIRST ? dz * v.x : d * (normal * w)) * v.gate.slope, lanes);
    });
  }

  static INLINE vfloat of_normal(vfloat d, vfloat act) { return GATE_FIRST ? d : d * act; }
};

template <class T, bool GATE_FIRST>
Status backward(const GatedNormBackward& call) {
  const int64_t width = call.groups * call.columns;
  const FloatRow weight(call.weight, call.weight_dtype, width, 1.0f, to_float(call.offset));
  if (weight.failed()) return OUT_OF_MEMORY;
  const Backward<T, GATE_FIRST> norm{
      {call, weight.data()}, (const T*)call.grad, call.rstds, (T*)call.dx, (T*)call.dgate};
  const RowParts parts(call.rows, width);
  const int64_t of_part = call.dweight ? width : 0;
  const FloatBuffer buffer(parts.count * of_part);
  float* sums = buffer.data();
  if (!sums && of_part) return OUT_OF_MEMORY;
  run_blocks(parts.count, [=](int64_t part) {
    float* mine = of_part ? sums + part * of_part : nullptr;
    if (mine) memset(mine, 0, of_part * sizeof(float));
    for (int64_t row = parts.begin(part); row < parts.begin(part + 1); row++) norm(row, mine);
  });
  add_parts(sums, parts.count, of_part);
  if (of_part) store_as(call.weight_dtype, call.dweight, sums, width);
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_gated_norm_forward(const GatedNormForward* call) {
  if (call->rows < 0 || call->groups < 1 || call->columns < 0) return INVALID;
  if (!call->rows || (!call->columns && !call->rstds)) return OK;
  if (call->columns && (!call->x || !call->gate || !call->y)) return INVALID;
  use_huge_pages(call->y, call->rows * call->groups * call->columns, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return call->gate_first ? forward<T, true>(*call) : forward<T, false>(*call);
  });
}

FUSEDOPS_EXPORT int fusedops_gated_norm_backward(const GatedNormBackward* call) {
  if (call->rows < 0 || call->groups < 1 || call->columns < 0) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->grad || !call->x || !call->gate || !call->rstds) return INVALID;
  for (void* result : {call->dx, call->dgate})
    use_huge_pages(result, call->rows * call->groups * call->columns, call->dtype);
  return with_dtype(call->dtype, [=](auto element) {
    using T = decltype(element);
    return call->gate_first ? backward<T, true>(*call) : backward<T, false>(*call);
  });
}

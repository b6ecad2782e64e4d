// y = (q @ W.T) * x_scale * weight_scale + bias, q the rows of x rounded to 8 bits, and W of 8 bits.
//
// A sum of integers has no order: it is exact in 32 bits, whichever instruction adds the products. All other steps are
// roundings of IEEE 754 float32, as fusedops/ops/quantized/int8_linear.py has them: no product is fused with a sum.
#include <algorithm>
#include <cmath>

#include "rows.h"
#include "simd/codes.h"
#include "tile/integers.h"

namespace fusedops {
namespace {

constexpr int64_t FEW = 8;     // rows of x for which the weight is read where it lies
constexpr int64_t ROWS = 256;  // of x of a block of work
// The least numbers of the weight that a worker reads, or multiplies with 16 rows of x: 20 us or more.
constexpr int64_t NUMBERS = 1 << 19;
constexpr float MOST = 127.0f;

typedef int16_t vint16 __attribute__((vector_size(2 * LANES)));

INLINE vint load_int8(const int8_t* p) {
  vint8 v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vint);
}
template <class Integer>
INLINE void store_as_integers(Integer* p, vint v) {
  const auto narrow = __builtin_convertvector(v, std::conditional_t<sizeof(Integer) == 1, vint8, vint16>);
  memcpy(p, &narrow, sizeof narrow);
}
inline int32_t sum_of(vint v) {
  int32_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

// Rows of x in integers, each padded with 0 to whole vectors, with the scale and the sum of each.
template <class Kind>
struct IntegerRows {
  using Integer = typename Kind::Integer;
  Buffer<int32_t> units, sums;
  FloatBuffer scales;
  int64_t row_units;

  IntegerRows(int64_t rows, int64_t columns)
      : units(rows * round_up(divide_up(columns, Kind::TERMS), LANES)),
        sums(rows),
        scales(rows),
        row_units(round_up(divide_up(columns, Kind::TERMS), LANES)) {}
  bool failed() const { return (row_units && !units.data()) || !sums.data() || !scales.data(); }

  void set_int8(int64_t row, const int8_t* from, int64_t columns, float scale) const {
    Integer* to = (Integer*)(units.data() + row * row_units);
    vint sum{};
    int64_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
      const vint v = load_int8(from + k);
      sum += v;
      store_as_integers(to + k, v);
    }
    int32_t total = sum_of(sum);
    for (; k < columns; k++) total += to[k] = from[k];
    finish(row, to, columns, total, scale);
  }

  // `numbers`: (round_up(columns, LANES)), the row in float32, which this may write; `given`: a scale, or null.
  void round(int64_t row, float* numbers, const float* smooth, int64_t columns, const float* given) const {
    Integer* to = (Integer*)(units.data() + row * row_units);
    for (int64_t k = columns; k < round_up(columns, LANES); k++) numbers[k] = 0.0f;
    if (smooth)
      each(columns, [=](int64_t k, auto lanes) {
        store(numbers + k, load(numbers + k, lanes) / load_smooth(smooth + k, lanes), lanes);
      });
    vint largest{};  // as integers, magnitudes have their order, and those of inf and NaN are the largest
    for (int64_t k = 0; k < columns; k += LANES) {
      const vint bits = bits_as<vint>(load(numbers + k)) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
    const bool finite = most < 0x7f800000;
    const float scale = !finite ? NAN : given ? *given : bits_as<float>(most) / MOST;
    if (!(std::fabs(scale) > 0)) {
      std::fill(to, to + columns, Integer(0));
      return finish(row, to, columns, 0, scale);
    }
    const vfloat divisor = all(scale);
    vint sum{};
    for (int64_t k = 0; k < columns; k += LANES) {  // the last vector reaches into the padding
      const vfloat v = max(min(load(numbers + k) / divisor, all(MOST)), all(-MOST));
      const vint q = rounded_to_integers(v);
      sum += q;
      store_as_integers(to + k, q);
    }
    finish(row, to, columns, sum_of(sum), scale);
  }

 private:
  template <class Lanes>
  static INLINE vfloat load_smooth(const float* p, Lanes lanes) {  // 1 beyond the last, not 0: 0 / 0 is slow
    return load(p, lanes) + (lanes_below(lanes.n) ? vfloat{} : all(1.0f));
  }
  static vfloat load_smooth(const float* p, Full) { return load(p); }
  void finish(int64_t row, Integer* to, int64_t columns, int32_t sum, float scale) const {
    std::fill(to + columns, to + row_units * Kind::TERMS, Integer(0));
    sums.data()[row] = sum;
    scales.data()[row] = scale;
  }
};

template <class Kind>
Status run(const Int8Linear& call) {
  const int64_t rows = call.rows, columns = call.columns, outputs = call.outputs;
  const IntegerRows<Kind> q(rows, columns);
  const FloatRow bias(call.bias, call.bias_dtype, call.bias ? outputs : 0, 0.0f, 0.0f);
  const FloatRow smooth(call.smooth, call.smooth_dtype, call.smooth ? columns : 0, 0.0f, 0.0f);
  if (q.failed() || bias.failed() || smooth.failed()) return OUT_OF_MEMORY;

  const int64_t row_workers = rows * columns <= BLOCK ? 1 : workers_for(rows);
  const Scratch numbers(row_workers, round_up(columns, LANES) + LANES);
  if (numbers.failed()) return OUT_OF_MEMORY;
  const IntegerRows<Kind>* integers = &q;
  const Scratch* of_numbers = &numbers;
  const float* divisors = call.smooth ? smooth.data() : nullptr;
  run_blocks(rows, row_workers, [=](int64_t row, int64_t worker) {
    const float* given = call.x_scale ? call.x_scale + row : nullptr;
    if (call.dtype == INT8) return integers->set_int8(row, (const int8_t*)call.x + row * columns, columns, *given);
    float* mine = of_numbers->of(worker);
    load_as(call.dtype, (const char*)call.x + row * columns * (call.dtype == FLOAT32 ? 4 : 2), mine, columns);
    integers->round(row, mine, divisors, columns, given);
  });

  const bool few = rows <= FEW;
  const int64_t panels = divide_up(outputs, Kind::PANEL), parts = divide_up(rows, ROWS), blocks = panels * parts;
  const int64_t work = outputs * std::max<int64_t>(columns, 1) * divide_up(rows, 16);
  const int64_t workers = std::min(std::max<int64_t>(work / NUMBERS, 1), workers_for(blocks));
  const int64_t sums_size = std::min(rows, ROWS) * Kind::PANEL, depth = std::min<int64_t>(columns, Kind::DEPTH);
  const Scratch scratch(workers, sums_size + Kind::PANEL + LANES + (few ? 0 : Kind::units_of_panel(depth)));
  if (scratch.failed()) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  const float* added = call.bias ? bias.data() : nullptr;
  const int64_t itemsize = call.y_dtype == FLOAT32 ? 4 : 2;
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    const int64_t output = block / parts * Kind::PANEL, count = std::min<int64_t>(Kind::PANEL, outputs - output);
    const int64_t row = block % parts * ROWS, row_count = std::min(ROWS, rows - row);
    int32_t* sums = (int32_t*)buffers->of(worker);
    float* scales = (float*)(sums + sums_size);
    const int32_t* units = integers->units.data() + row * integers->row_units;
    const int8_t* weight = call.weight + output * call.weight_row;
    if (few) {
      Kind::few_rows({units, integers->row_units, row_count, weight, call.weight_row, count, columns, sums});
    } else {
      Kind::many_rows({units, integers->row_units, row_count, weight, call.weight_row, count, columns, sums},
                      (int32_t*)scales + Kind::PANEL + LANES);
    }
    for (int64_t n = 0; n < count; n++) scales[n] = call.weight_scale[(output + n) * call.scale_step];
    for (int64_t m = 0; m < row_count; m++) {
      const int32_t* mine = sums + m * Kind::PANEL;
      const int32_t offset = int32_t(Kind::OFFSET * uint32_t(integers->sums.data()[row + m]));  // modulo 2^32
      const vfloat scale = all(integers->scales.data()[row + m]);
      char* to = (char*)call.y + ((row + m) * outputs + output) * itemsize;
      with_dtype(call.y_dtype, [=](auto element) {
        auto* y = (decltype(element)*)to;
        each(count, [=](int64_t n, auto lanes) {
          vint sum;
          memcpy(&sum, mine + n, sizeof sum);
          vfloat value = rounded(rounded(__builtin_convertvector(sum - offset, vfloat) * scale) * load(scales + n));
          if (added) value += load(added + output + n, lanes);
          store(y + n, value, lanes);
        });
      });
    }
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_int8_linear(const Int8Linear* call) {
  if (call->rows < 0 || call->columns < 0 || call->outputs < 0) return INVALID;
  if (!call->rows || !call->outputs) return OK;
  if (!call->y || !call->weight_scale || (call->columns && (!call->x || !call->weight))) return INVALID;
  if (call->dtype == INT8 && !call->x_scale) return INVALID;
#if VECTOR_BYTES == 64
  if (has_vnni()) return run<Bytes>(*call);
#endif
  return run<Pairs16>(*call);
}

// s = rows + y * act(gate), and z = (norm(s) * weight + bias) * (offset + scale) + shift, either of them alone or both,
// and the gradients. What repeats over rows is converted to float32 once for the rows that it repeats for.
#include <cmath>

#include "api.h"
#include "math/finite.h"
#include "math/sigmoid.h"
#include "rows.h"

namespace fusedops {
namespace {

inline const void* values_at(const Repeated& repeated, int64_t batch, int64_t token) {
  if (!repeated.values) return nullptr;
  const int64_t at = batch * repeated.batch + token * repeated.token;
  return (const char*)repeated.values + at * (repeated.dtype == FLOAT32 ? 4 : 2);
}

// One worker's rows of float32: factor = weight * (offset + scale), scale = offset + scale, added = bias * scale +
// shift and gate = act(gate), of the row that was asked for last.
class Vectors {
 public:
  static constexpr int64_t COUNT = 4;

  template <class Call>
  Vectors(const Call& call, const float* weight, const float* bias, float* memory)
      : factor(memory),
        scale(memory + call.columns),
        added(memory + 2 * call.columns),
        gate(memory + 3 * call.columns),
        columns_(call.columns),
        by_row_(call.gate_by_row),
        tanh_(call.tanh),
        offset_(to_float(call.offset)),
        weight_(weight),
        bias_(bias),
        of_scale_(call.scale),
        of_shift_(call.shift),
        of_gate_(call.gate) {}

  void take(int64_t batch, int64_t token) {
    const void *scales = values_at(of_scale_, batch, token), *shifts = values_at(of_shift_, batch, token);
    if (scales && (scales != scales_ || shifts != shifts_)) modulate(scales, shifts);
    scales_ = scales, shifts_ = shifts;
    const void* gates = values_at(of_gate_, batch, token);
    if (gates && gates != gates_) open(gates);
    gates_ = gates;
  }

  float *factor, *scale, *added, *gate;

 private:
  NOINLINE void modulate(const void* scales, const void* shifts) {
    load_as(of_scale_.dtype, scales, scale, columns_);
    if (shifts) {
      load_as(of_shift_.dtype, shifts, added, columns_);
    } else {
      std::fill(added, added + columns_, -0.0f);  // a sum with it changes nothing
    }
    const float *w = weight_, *b = bias_, offset = offset_;
    float *f = factor, *m = scale, *a = added;
    each(columns_, [=](int64_t i, auto lanes) {
      const vfloat v = load(m + i, lanes) + offset;
      store(m + i, v, lanes);
      store(f + i, w ? v * load(w + i, lanes) : v, lanes);
      if (b) store(a + i, load(b + i, lanes) * v + load(a + i, lanes), lanes);
    });
  }

  NOINLINE void open(const void* gates) {
    float* g = gate;
    const int64_t n = by_row_ ? 1 : columns_;
    load_as(of_gate_.dtype, gates, g, n);
    if (tanh_) each(n, [=](int64_t i, auto lanes) { store(g + i, tanh_of(load(g + i, lanes)), lanes); });
    if (by_row_) std::fill(g, g + columns_, g[0]);
  }

  int64_t columns_;
  bool by_row_, tanh_;
  float offset_;
  const float *weight_, *bias_;
  Repeated of_scale_, of_shift_, of_gate_;
  const void *scales_ = nullptr, *shifts_ = nullptr, *gates_ = nullptr;
};

template <class T>
struct Forward {
  const T *x, *y;
  T *z, *s;
  float *means, *rstds;
  int64_t columns;
  float eps;
  bool centered;

  template <bool STREAMS>
  NOINLINE void row(int64_t row, const Vectors& vectors) const {
    const int64_t n = columns, at = row * n;
    if (!z) {
      each(n, [=, gate = vectors.gate](int64_t i, auto lanes) {
        ahead(at + i);
        store_or_stream<STREAMS>(s + at + i, summed(at + i, gate + i, lanes), lanes);
      });
      return;
    }
    const T* rows = s ? s + at : x + at;
    float mean = 0;
    if (s || centered) {
      const float total = sum_of(sums_of_row<vfloat>(n, [=, gate = vectors.gate](int64_t i, auto lanes) {
        if (!s) return load(x + at + i, lanes);
        const vfloat v = rounded_to<T>(summed(at + i, gate + i, lanes));  // the norm is that of the rounded sum
        store(s + at + i, v, lanes);
        return v;
      }));
      if (centered) mean = total / float(n);
    }
    const float squares = sum_of(sums_of_row<vfloat>(n, [=](int64_t i, auto lanes) {
      vfloat v = load(rows + i, lanes) - mean;
      if constexpr (!decltype(lanes)::full) v = lanes_below(lanes.n) ? v : vfloat{};
      return v * v;
    }));
    const float rstd = 1.0f / std::sqrt(squares / float(n) + eps);
    each_group<Pair>(n, [=, factor = vectors.factor, added = vectors.added](int64_t i, auto lanes) {
      ahead(at + i);
      const auto v = (load(rows + i, lanes) - mean) * rstd;
      store_or_stream<STREAMS>(z + at + i, v * load(factor + i, lanes) + load(added + i, lanes), lanes);
    });
    if (means) means[row] = mean;
    if (rstds) rstds[row] = rstd;
  }

 private:
  template <class Lanes>
  INLINE vfloat summed(int64_t at, const float* gate, Lanes lanes) const {
    return load(y + at, lanes) * load(gate, lanes) + load(x + at, lanes);
  }

  INLINE void ahead(int64_t at) const {  // so that memory is read and written at the same time, row after row
    __builtin_prefetch(x + at + columns);
    if (y) __builtin_prefetch(y + at + columns);
  }
};

template <class T>
Status forward(const ModulatedForward& call) {
  const int64_t columns = call.columns, tokens = call.tokens, rows = call.batch * tokens;
  const FloatRow weight(call.weight, call.weight_dtype, call.weight ? columns : 0, 1.0f, 0.0f);
  const FloatRow bias(call.bias, call.bias_dtype, call.bias ? columns : 0, 0.0f, 0.0f);
  const int64_t rows_of_block = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, columns));
  const int64_t blocks = divide_up(rows, rows_of_block), workers = workers_for(blocks);
  const Scratch scratch(workers, Vectors::COUNT * columns + 1);  // a gate by row has one number without columns too
  if (weight.failed() || bias.failed() || scratch.failed()) return OUT_OF_MEMORY;
  T* out = (T*)(call.z ? call.z : call.s);
  const bool streams_out = streams(out, rows, columns);
  const Forward<T> norm{(const T*)call.rows, (const T*)call.y, (T*)call.z,         (T*)call.s,         call.means,
                        call.rstds,          columns,          to_float(call.eps), bool(call.centered)};
  run_blocks(
      blocks, workers,
      [&call, &scratch, &weight, &bias, norm, rows, rows_of_block, tokens, streams_out](int64_t block, int64_t worker) {
        Vectors vectors(call, weight.data(), bias.data(), scratch.of(worker));
        for (int64_t row = block * rows_of_block; row < std::min(rows, (block + 1) * rows_of_block); row++) {
          vectors.take(row / tokens, row % tokens);
          if (streams_out) {
            norm.template row<true>(row, vectors);
          } else {
            norm.template row<false>(row, vectors);
          }
        }
        stream_end();
      });
  return OK;
}

// The sums over the rows of one part; null: not wanted. With m = grad_z * factor and the normalized row n, ds is
// rstd * (m - n * mean(m * n) - mean(m)) + grad_s; the last mean is 0 for RMSNorm.
struct Sums {
  float *normal, *grad;     // of grad_z * n, and of grad_z
  float* gated;             // of ds * y
  float *weighted, *based;  // of grad_z * scale * n, and of grad_z * scale
};

template <class T>
struct Backward {
  const T *grad_z, *grad_s, *s, *y;
  const float *means, *rstds, *weight, *bias;
  T *ds, *dy;
  float *dscale, *dshift, *dgate, *gate_of_row;  // the first three: by token; the last: the sums of ds * y of each row
  int64_t columns;
  bool tanh, needs_ds;

  static constexpr int AT_ONCE = 4;  // rows: a sum is read and written once for so many

  NOINLINE void rows(int64_t first, int count, const Vectors& vectors, Sums sums) const {
    struct Row {
      int64_t at;
      float mean, rstd, product, sum;
    };
    struct {
      Row row[AT_ONCE];
    } group;
    for (int k = 0; k < count; k++) group.row[k] = {(first + k) * columns, 0, 0, 0, 0};
    const float *factor = vectors.factor, *scale = vectors.scale, *gate = vectors.gate;
    if (grad_z)
      for (int k = 0; k < count; k++) {
        Row& row = group.row[k];
        const int64_t index = row.at / columns;
        row.mean = means ? means[index] : 0;
        row.rstd = rstds[index];
        if (needs_ds) row_means(row, factor);
      }
    struct {
      vfloat of_gate[AT_ONCE];
    } totals = {};
    each(columns, [=, call = *this, &totals](int64_t i, auto lanes) {  // a copy: no store can change what it holds
      vfloat normal = {}, grad = {}, gated = {};
      for (int k = 0; k < count; k++) {
        const Row& row = group.row[k];
        const int64_t at = row.at + i;
        vfloat d = call.grad_s ? load(call.grad_s + at, lanes) : vfloat{};
        if (call.grad_z) {
          const vfloat g = load(call.grad_z + at, lanes), n = (load(call.s + at, lanes) - row.mean) * row.rstd;
          normal += g * n;
          grad += g;
          if (call.needs_ds) d += (g * load(factor + i, lanes) - n * row.product - row.sum) * row.rstd;
          if (call.dscale) {
            vfloat u = call.weight ? n * load(call.weight + i, lanes) : n;
            if (call.bias) u += load(call.bias + i, lanes);
            store(call.dscale + at, g * u, lanes);
          }
          if (call.dshift) store(call.dshift + at, g, lanes);
        }
        if (call.ds) store(call.ds + at, d, lanes);
        if (call.y) {
          const vfloat a = load(gate + i, lanes), product = d * load(call.y + at, lanes);
          if (call.dy) store(call.dy + at, d * a, lanes);
          gated += product;
          if (call.gate_of_row) totals.of_gate[k] += product;
          if (call.dgate) store(call.dgate + at, call.tanh ? product * (1.0f - a * a) : product, lanes);
        }
      }
      add(sums.normal, i, normal, lanes);
      add(sums.grad, i, grad, lanes);
      add(sums.gated, i, gated, lanes);
      if (sums.weighted) add(sums.weighted, i, normal * load(scale + i, lanes), lanes);
      if (sums.based) add(sums.based, i, grad * load(scale + i, lanes), lanes);
    });
    if (gate_of_row)
      for (int k = 0; k < count; k++)
        gate_of_row[first + k] = sum_of(totals.of_gate[k]) * (tanh ? 1.0f - gate[0] * gate[0] : 1.0f);
  }

 private:
  template <class Row>
  INLINE void row_means(Row& row, const float* factor) const {
    const int64_t at = row.at;
    const float mean = row.mean, rstd = row.rstd;
    struct TwoSums {
      vfloat first, second;
      INLINE TwoSums operator+(TwoSums other) const { return {first + other.first, second + other.second}; }
    };
    const TwoSums sums = sums_of_row<TwoSums>(columns, [=](int64_t i, auto lanes) {
      const vfloat m = load(grad_z + at + i, lanes) * load(factor + i, lanes);
      return TwoSums{m * ((load(s + at + i, lanes) - mean) * rstd), m};
    });
    row.product = sum_of(sums.first) / float(columns);
    if (means) row.sum = sum_of(sums.second) / float(columns);
  }

  template <class Lanes>
  static INLINE void add(float* sums, int64_t i, vfloat v, Lanes lanes) {
    if (sums) store(sums + i, load(sums + i, lanes) + v, lanes);
  }
};

// Writes the gradient of what repeats over rows, by batch or shared, from the sums of each batch: f(batch, row) makes a
// row of it in float32.
template <class F>
void write_gradient(const RepeatedGradient& gradient, int64_t dtype, int64_t batches, int64_t columns, float* memory,
                    F f) {
  if (!gradient.values || gradient.form == BY_TOKEN) return;
  float *row = memory, *total = memory + columns;
  if (gradient.form == SHARED) std::fill(total, total + columns, 0.0f);
  for (int64_t batch = 0; batch < batches; batch++) {
    f(batch, row);
    if (gradient.form == SHARED) {
      each(columns,
           [=](int64_t i, auto lanes) { store(total + i, load(total + i, lanes) + load(row + i, lanes), lanes); });
    } else {
      store_as(dtype, (char*)gradient.values + batch * columns * (dtype == FLOAT32 ? 4 : 2), row, columns);
    }
  }
  if (gradient.form == SHARED) store_as(dtype, gradient.values, total, columns);
}

template <class T>
Status backward(const ModulatedBackward& call) {
  const int64_t columns = call.columns, tokens = call.tokens, batches = call.batch;
  const FloatRow weight(call.weight, call.weight_dtype, call.weight ? columns : 0, 1.0f, 0.0f);
  const FloatRow bias(call.bias, call.bias_dtype, call.bias ? columns : 0, 0.0f, 0.0f);
  const auto by = [](const RepeatedGradient& g, int64_t form) { return g.values && (g.form == BY_TOKEN) == form; };
  const bool by_row = call.dgate.values && call.gate_by_row;
  const bool wants_normal = by(call.dscale, false), wants_gated = by(call.dgate, false) && !by_row;
  const bool wants_grad = by(call.dshift, false) || (wants_normal && call.bias);
  const bool wants[] = {wants_normal, wants_grad, wants_gated, bool(call.dweight), bool(call.dbias)};
  int64_t place[5], count = 0;
  for (int k = 0; k < 5; k++) place[k] = wants[k] ? count++ : -1;
  const RowParts parts(tokens, columns);
  const int64_t of_batch = parts.count, width = count * columns, workers = workers_for(batches * of_batch);
  const Scratch scratch(workers, Vectors::COUNT * columns + 1);  // a gate by row has one number without columns too
  const FloatBuffer sums(batches * of_batch * width), rows_of_gate(by_row ? batches * tokens : 0);
  if (weight.failed() || bias.failed() || scratch.failed() || (width && !sums.data()) ||
      (by_row && !rows_of_gate.data()))
    return OUT_OF_MEMORY;
  const auto sums_of = [&](int64_t part, int k) {
    return place[k] < 0 ? nullptr : sums.data() + part * width + place[k] * columns;
  };
  float* gate_of_row = !by_row                       ? nullptr
                       : call.dgate.form == BY_TOKEN ? (float*)call.dgate.values
                                                     : rows_of_gate.data();
  const auto by_token = [&](const RepeatedGradient& g) { return by(g, true) ? (float*)g.values : nullptr; };
  const Backward<T> norm{(const T*)call.grad_z,
                         (const T*)call.grad_s,
                         (const T*)call.s,
                         (const T*)call.y,
                         call.means,
                         call.rstds,
                         call.weight ? weight.data() : nullptr,
                         call.bias ? bias.data() : nullptr,
                         (T*)call.ds,
                         (T*)call.dy,
                         by_token(call.dscale),
                         by_token(call.dshift),
                         by_row ? nullptr : by_token(call.dgate),
                         gate_of_row,
                         columns,
                         bool(call.tanh),
                         call.ds || call.dy || call.dgate.values};
  const bool in_fours = !call.scale.token && !call.gate.token;
  run_blocks(batches * of_batch, workers, [&](int64_t block, int64_t worker) {
    const int64_t batch = block / of_batch, part = block % of_batch, last = parts.begin(part + 1);
    const Sums mine{sums_of(block, 0), sums_of(block, 1), sums_of(block, 2), sums_of(block, 3), sums_of(block, 4)};
    if (width) memset(sums.data() + block * width, 0, width * sizeof(float));
    Vectors vectors(call, norm.weight, norm.bias, scratch.of(worker));
    for (int64_t token = parts.begin(part); token < last;) {
      const int count = in_fours ? int(std::min<int64_t>(Backward<T>::AT_ONCE, last - token)) : 1;
      vectors.take(batch, token);
      norm.rows(batch * tokens + token, count, vectors, mine);
      token += count;
    }
  });
  if (width)
    for (int64_t batch = 0; batch < batches; batch++)
      add_parts(sums.data() + batch * of_batch * width, of_batch, width);
  Vectors vectors(call, norm.weight, norm.bias, scratch.of(0));
  const FloatBuffer two_rows(2 * columns);
  float* memory = two_rows.data();
  if (!memory) return OUT_OF_MEMORY;
  const auto copied = [&](int k) {
    return [&, k](int64_t batch, float* row) { memcpy(row, sums_of(batch * of_batch, k), columns * sizeof(float)); };
  };
  write_gradient(call.dscale, call.scale.dtype, batches, columns, memory, [&](int64_t batch, float* row) {
    const float *normal = sums_of(batch * of_batch, 0), *grad = sums_of(batch * of_batch, 1);
    const float *w = norm.weight, *b = norm.bias;
    each(columns, [=](int64_t i, auto lanes) {
      vfloat v = load(normal + i, lanes);
      if (w) v *= load(w + i, lanes);
      if (b) v += load(grad + i, lanes) * load(b + i, lanes);
      store(row + i, v, lanes);
    });
  });
  write_gradient(call.dshift, call.shift.dtype, batches, columns, memory, copied(1));
  if (wants_gated)
    write_gradient(call.dgate, call.gate.dtype, batches, columns, memory, [&](int64_t batch, float* row) {
      vectors.take(batch, 0);
      const float *gated = sums_of(batch * of_batch, 2), *gate = vectors.gate;
      const bool tanh = call.tanh;
      each(columns, [=](int64_t i, auto lanes) {
        const vfloat v = load(gated + i, lanes), a = load(gate + i, lanes);
        store(row + i, tanh ? v * (1.0f - a * a) : v, lanes);
      });
    });
  if (by_row)
    write_gradient(call.dgate, call.gate.dtype, batches, 1, memory, [&](int64_t batch, float* row) {
      const float* values = gate_of_row + batch * tokens;
      row[0] = sum_of(sums_of_row<vfloat>(tokens, [=](int64_t i, auto lanes) { return load(values + i, lanes); }));
    });
  write_gradient({call.dweight, SHARED}, call.weight_dtype, batches, columns, memory, copied(3));
  write_gradient({call.dbias, SHARED}, call.bias_dtype, batches, columns, memory, copied(4));
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_modulated_forward(const ModulatedForward* call) {
  if (call->batch < 0 || call->tokens < 0 || call->columns < 0) return INVALID;
  if (!call->batch || !call->tokens || (!call->columns && !call->rstds)) return OK;
  const bool gated = call->y;
  if (call->columns && (!call->rows || gated != bool(call->s) || gated != bool(call->gate.values))) return INVALID;
  if (call->columns && ((!call->z && !gated) || (call->z && !call->scale.values))) return INVALID;
  const int64_t rows = call->batch * call->tokens;
  for (void* result : {call->z, call->s}) use_huge_pages(result, rows * call->columns, call->dtype);
  return with_dtype(call->dtype, [=](auto element) { return forward<decltype(element)>(*call); });
}

FUSEDOPS_EXPORT int fusedops_modulated_backward(const ModulatedBackward* call) {
  if (call->batch < 0 || call->tokens < 0 || call->columns < 0) return INVALID;
  if (!call->batch || !call->tokens || !call->columns) return OK;
  if (call->grad_z ? !call->s || !call->rstds || !call->scale.values : !call->grad_s) return INVALID;
  if (bool(call->y) != bool(call->gate.values)) return INVALID;
  const int64_t rows = call->batch * call->tokens;
  for (void* result : {call->ds, call->dy}) use_huge_pages(result, rows * call->columns, call->dtype);
  return with_dtype(call->dtype, [=](auto element) { return backward<decltype(element)>(*call); });
}

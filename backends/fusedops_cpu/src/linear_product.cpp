// The products of a linear layer and its gradients on a chunk of rows, in blocks of the result.
//
// The terms of an element are cut into parts, whose sums are added in order. The parts depend on the number of terms
// alone: so the bits of an element depend neither on the other elements nor on the number of threads. Where the result
// has few blocks, several parts of a block are computed at a time.
#include "products.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 256, COLUMNS = 512;  // of a block
constexpr int64_t PART = 256;                 // terms that are added in registers: 0.94 of the time of DEPTH's 64
constexpr int64_t FEW = 16;                   // blocks, and the most parts
constexpr int64_t LEAST_TERMS = 1024;         // of a part
constexpr int64_t MOST_SUMS = 1 << 20;        // floats of the sums of the parts that are computed at a time

struct Division {
  int64_t across, blocks, terms_of_part, parts, at_once;
  explicit Division(const LinearProduct& call)
      : across(divide_up(call.columns, COLUMNS)), blocks(divide_up(call.rows, ROWS) * across) {
    terms_of_part = round_up(std::max(LEAST_TERMS, divide_up(call.terms, FEW)), PART);
    parts = std::max<int64_t>(1, divide_up(call.terms, terms_of_part));
    at_once = std::min({parts, divide_up(FEW, blocks), MOST_SUMS / (call.rows * call.columns)});
  }
};

Operand from_term(const void* data, int64_t dtype, int64_t stride, bool by_terms, int64_t term) {
  return {(const uint8_t*)data + term * (by_terms ? 1 : stride) * size_of(dtype),
          dtype,
          stride,
          by_terms,
          nullptr,
          nullptr};
}

// Writes rows of n numbers that are `width` apart to rows that are `row` apart, or adds them there.
void write(const float* from, int64_t width, int64_t rows, int64_t n, float* to, int64_t row, bool adds) {
  for (int64_t m = 0; m < rows; m++, from += width, to += row)
    each(n, [=](int64_t i, auto lanes) {
      store(to + i, adds ? load(to + i, lanes) + load(from + i) : load(from + i), lanes);
    });
}

Status product(const LinearProduct& call) {
  const Division cut(call);
  const int64_t size = call.rows * call.columns;
  const bool side_by_side = cut.at_once > 1;
  const int64_t work = cut.blocks * (side_by_side ? cut.at_once : 1);
  const int64_t workers = size * call.terms <= 8 * BLOCK ? 1 : workers_for(work);
  const FloatBuffer sums(side_by_side ? cut.at_once * size : 0);
  const int64_t rows_at_once = std::min(ROWS, call.rows), columns_at_once = std::min(COLUMNS, call.columns);
  const Block whole(rows_at_once, cut.terms_of_part, PART);
  const Block last(rows_at_once, call.terms - (cut.parts - 1) * cut.terms_of_part, PART);  // has fewer terms
  const int64_t padded = columns_at_once + TILE_COLUMNS;
  const Scratch scratch(workers, std::max(whole.floats(padded), last.floats(padded)));
  if (scratch.failed() || (side_by_side && !sums.data())) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  float* const of_parts = sums.data();
  const LinearProduct* from = &call;
  const auto compute = [=](int64_t block, int64_t part, int64_t worker, float* to, bool adds) {
    const int64_t row = block / cut.across * ROWS, column = block % cut.across * COLUMNS;
    const int64_t term = part * cut.terms_of_part, rows = std::min(ROWS, from->rows - row);
    const int64_t columns = std::min(COLUMNS, from->columns - column);
    const Operand a = from_term(from->a, from->a_dtype, from->a_stride, from->a_by_terms, term);
    const Operand b = from_term(from->b, from->b_dtype, from->b_stride, from->b_by_terms, term);
    const Columns of_b{&b, column, columns};
    float* c = buffers->of(worker);
    const int64_t width = (part == cut.parts - 1 ? last : whole).compute(a, row, rows, &of_b, 1, c);
    write(c, width, rows, columns, to + row * from->columns + column, from->columns, adds);
  };
  if (!side_by_side) {
    run_blocks(work, workers, [=](int64_t block, int64_t worker) {
      for (int64_t part = 0; part < cut.parts; part++) compute(block, part, worker, from->c, from->adds || part > 0);
    });
    return OK;
  }
  for (int64_t start = 0; start < cut.parts; start += cut.at_once) {
    const int64_t parts = std::min(cut.at_once, cut.parts - start);
    run_blocks(cut.blocks * parts, std::min(workers, cut.blocks * parts), [=](int64_t at, int64_t worker) {
      const int64_t part = at / cut.blocks;
      compute(at % cut.blocks, start + part, worker, of_parts + part * size, false);
    });
    const bool adds = from->adds || start > 0;
    run_blocks(divide_up(size, BLOCK / 8), [=](int64_t stretch) {
      const int64_t first = stretch * (BLOCK / 8), n = std::min(BLOCK / 8, size - first);
      each(n, [=](int64_t i, auto lanes) {
        auto total = load(of_parts + first + i, lanes);
        if (adds) total = load(from->c + first + i, lanes) + total;
        for (int64_t part = 1; part < parts; part++) total += load(of_parts + part * size + first + i, lanes);
        store(from->c + first + i, total, lanes);
      });
    });
  }
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_linear_product(const LinearProduct* call) {
  if (call->rows < 0 || call->columns < 0 || call->terms < 0) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->c || (call->terms && (!call->a || !call->b))) return INVALID;
  if (!call->adds) use_huge_pages(call->c, call->rows * call->columns, FLOAT32);
  return product(*call);
}

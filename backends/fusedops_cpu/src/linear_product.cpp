// The products of a linear layer and its gradients on a chunk of rows, in blocks of the result.
//
// Where the result has few blocks, the terms are cut into parts, whose sums are added in order. Blocks and parts depend
// on the shape alone, so that the bits of a result do not depend on the number of threads.
#include "products.h"
#include "rows.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 256, COLUMNS = 512;  // of a block
constexpr int64_t PART = 256;                 // terms that are added in registers: 0.94 of the time of DEPTH's 64
constexpr int64_t FEW = 16;                   // blocks
constexpr int64_t LEAST_TERMS = 1024;         // of a part
constexpr int64_t MOST_SUMS = 1 << 20;        // floats of the sums of parts

struct Division {
  int64_t across, blocks, parts, terms_of_part;
  explicit Division(const LinearProduct& call)
      : across(divide_up(call.columns, COLUMNS)), blocks(divide_up(call.rows, ROWS) * across) {
    const int64_t most = std::min(call.terms / LEAST_TERMS, MOST_SUMS / (call.rows * call.columns));
    parts = std::max<int64_t>(1, std::min(divide_up(FEW, blocks), most));
    terms_of_part = round_up(std::max<int64_t>(1, divide_up(call.terms, parts)), PART);
    parts = std::max<int64_t>(1, divide_up(call.terms, terms_of_part));
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

Status product(const LinearProduct& call) {
  const Division cut(call);
  const int64_t work = cut.blocks * cut.parts, size = call.rows * call.columns;
  const int64_t workers = size * call.terms <= 8 * BLOCK ? 1 : workers_for(work);
  const FloatBuffer sums(cut.parts > 1 ? cut.parts * size : 0);
  const int64_t rows_at_once = std::min(ROWS, call.rows), columns_at_once = std::min(COLUMNS, call.columns);
  const Block whole(rows_at_once, cut.terms_of_part, PART);
  const Block last(rows_at_once, call.terms - (cut.parts - 1) * cut.terms_of_part, PART);  // has fewer terms
  const int64_t padded = columns_at_once + TILE_COLUMNS;
  const Scratch scratch(workers, std::max(whole.floats(padded), last.floats(padded)));
  if (scratch.failed() || (cut.parts > 1 && !sums.data())) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  float* const of_parts = sums.data();
  const LinearProduct* from = &call;
  run_blocks(work, workers, [=](int64_t at, int64_t worker) {
    const int64_t part = at / cut.blocks, row = at % cut.blocks / cut.across * ROWS, term = part * cut.terms_of_part;
    const int64_t column = at % cut.across * COLUMNS, rows = std::min(ROWS, from->rows - row);
    const int64_t columns = std::min(COLUMNS, from->columns - column);
    const Operand a = from_term(from->a, from->a_dtype, from->a_stride, from->a_by_terms, term);
    const Operand b = from_term(from->b, from->b_dtype, from->b_stride, from->b_by_terms, term);
    const Columns of_b{&b, column, columns};
    float* c = buffers->of(worker);
    const int64_t width = (part == cut.parts - 1 ? last : whole).compute(a, row, rows, &of_b, 1, c);
    float* to = (of_parts ? of_parts + part * from->rows * from->columns : from->c) + row * from->columns + column;
    const bool adds = from->adds && !of_parts;
    for (int64_t m = 0; m < rows; m++, c += width, to += from->columns)
      each(columns, [=](int64_t i, auto lanes) {
        store(to + i, adds ? load(to + i, lanes) + load(c + i) : load(c + i), lanes);
      });
  });
  if (!of_parts) return OK;
  const int64_t stretches = divide_up(size, BLOCK / 8);
  run_blocks(stretches, [=](int64_t stretch) {
    const int64_t first = stretch * (BLOCK / 8), n = std::min(BLOCK / 8, size - first);
    each(n, [=](int64_t i, auto lanes) {
      vfloat total = from->adds ? load(from->c + first + i, lanes) : vfloat{};
      for (int64_t part = 0; part < cut.parts; part++) total += load(of_parts + part * size + first + i, lanes);
      store(from->c + first + i, total, lanes);
    });
  });
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

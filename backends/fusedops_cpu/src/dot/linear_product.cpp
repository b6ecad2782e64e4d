// The products of a linear layer and its gradients on a chunk of rows, in blocks of the result.
//
// The terms of an element are cut into parts, whose sums are added in order. The parts depend on the number of terms
// alone: so the bits of an element depend neither on the other elements nor on the number of threads. Where the result
// has few blocks, several parts of a block are computed at a time.
#include "rows.h"
#include "tile/pairs.h"
#include "tile/products.h"

namespace fusedops {
namespace {

constexpr int64_t ROWS = 264, COLUMNS = 512;  // of a block: whole tiles
constexpr int64_t FEW = 16;                   // blocks, and the most parts
constexpr int64_t LEAST_TERMS = 1024;         // of a part
constexpr int64_t MOST_SUMS = 1 << 20;        // floats of the sums of the parts that are computed at a time
constexpr int64_t MOST_PACKED = 1 << 22;      // floats of an operand that is packed once for all blocks

struct Division {
  int64_t across, blocks, terms_of_part, parts, at_once;
  explicit Division(const LinearProduct& call)
      : across(divide_up(call.columns, COLUMNS)), blocks(divide_up(call.rows, ROWS) * across) {
    terms_of_part = round_up(std::max(LEAST_TERMS, divide_up(call.terms, FEW)), SLICE);
    parts = divide_up(call.terms, terms_of_part);
    at_once = std::min({parts, divide_up(FEW, blocks), MOST_SUMS / (call.rows * call.columns)});
  }
};

// One operand, which is packed in slices of terms, each in panels of WIDTH rows.
template <class Kind, int WIDTH>
class Packed {
 public:
  Packed(const Operand& from, int64_t count, int64_t terms) : from_(from), count_(count), terms_(terms) {}

  static int64_t panel(int64_t terms) { return panel_floats<WIDTH>(divide_up(terms, Kind::TERMS)); }
  // The floats of a slice of so many rows.
  static int64_t floats(int64_t count) { return divide_up(count, WIDTH) * panel(SLICE); }
  int64_t floats() const { return divide_up(terms_, SLICE) * floats(count_); }
  bool by_terms() const { return from_.terms_contiguous; }

  // Packs all slices to a buffer, which the next calls of `slice` read.
  void pack_all(float* to) {
    const Packed each = *this;
    run_blocks(divide_up(terms_, SLICE), [=](int64_t slice) {
      each.slice(0, each.count_, slice * SLICE, std::min(SLICE, each.terms_ - slice * SLICE),
                 to + slice * each.floats(each.count_));
    });
    all_ = to;
  }
  // Returns `count` rows of the slice from `term` on, which are packed to the buffer unless all are packed already.
  const float* slice(int64_t first, int64_t count, int64_t term, int64_t terms, float* buffer) const {
    if (all_) return all_ + term / SLICE * floats(count_) + first / WIDTH * panel(terms);
    const Operand& from = from_;
    Kind::template pack<WIDTH>(from, first, count, term, terms, buffer);
    return buffer;
  }
  bool is_packed() const { return all_; }
  // What the tiles of a panel ask for: a part of the next panel's rows in the order of their addresses. Of 16 and 64
  // rows, exactly the terms of the next panel, which are apart, took 1.1 times as long.
  Ahead next(int64_t row, int64_t term, int64_t terms, int64_t tiles, const float* panel) const {
    if (!by_terms() || is_packed()) return {(const char*)panel};
    return ahead_of(from_.row(row, 0), from_.bytes(TILE_COLUMNS), term, terms, tiles, divide_up(terms, Kind::TERMS));
  }

 private:
  Operand from_;
  int64_t count_, terms_;
  const float* all_ = nullptr;
};

// A call whose operands may be packed.
template <class Kind>
struct Product {
  LinearProduct call;
  Division cut;
  Packed<Kind, TILE_ROWS> a;
  Packed<Kind, TILE_COLUMNS> b;

  explicit Product(const LinearProduct& call)
      : call(call),
        cut(call),
        a({call.a, call.a_dtype, call.a_stride, bool(call.a_by_terms)}, call.rows, call.terms),
        b({call.b, call.b_dtype, call.b_stride, bool(call.b_by_terms)}, call.columns, call.terms) {}

  int64_t floats_of_sums() const { return round_up(std::min(ROWS, call.rows), TILE_ROWS) * columns_at_once(); }
  int64_t floats_of_a() const { return a.is_packed() ? 0 : a.floats(std::min(ROWS, call.rows)); }
  int64_t floats() const {
    return floats_of_sums() + floats_of_a() + (b.is_packed() ? 0 : b.floats(columns_at_once()));
  }

  // Computes a block of the sums of a part, and writes them to `c`, or adds them there.
  void compute(int64_t block, int64_t part, float* buffer, float* c, bool adds) const {
    const int64_t row = block / cut.across * ROWS, rows = std::min(ROWS, call.rows - row);
    const int64_t column = block % cut.across * COLUMNS, columns = std::min(COLUMNS, call.columns - column);
    const int64_t begin = part * cut.terms_of_part, end = std::min(call.terms, begin + cut.terms_of_part);
    float *of_a = buffer + floats_of_sums(), *of_b = of_a + floats_of_a();
    // where its terms are contiguous, b is packed a panel at a time, which stays in the L1 cache
    const int64_t at_once = b.by_terms() && !b.is_packed() ? TILE_COLUMNS : columns;
    c += row * call.columns + column;
    for (int64_t term = begin; term < end; term += SLICE) {
      const int64_t terms = std::min(SLICE, end - term), steps = divide_up(terms, Kind::TERMS);
      const float* left = a.slice(row, rows, term, terms, of_a);
      float* sums = buffer;  // tile by tile
      for (int64_t start = 0; start < columns; start += at_once) {
        const float* right = b.slice(column + start, std::min(at_once, columns - start), term, terms, of_b);
        for (int64_t n = start; n < std::min(start + at_once, columns); n += TILE_COLUMNS, right += b.panel(terms)) {
          Ahead ahead = b.next(column + n + TILE_COLUMNS, term, terms, divide_up(rows, TILE_ROWS), right);
          for (int64_t m = 0; m < rows; m += TILE_ROWS, sums += TILE_ROWS * TILE_COLUMNS) {
            const bool last = term + terms == end, whole = rows - m >= TILE_ROWS && columns - n >= TILE_COLUMNS;
            float* to = c + m * call.columns + n;
            Target target{term > begin ? sums : nullptr, TILE_COLUMNS, sums, TILE_COLUMNS, false};
            if (last && whole) target = {target.before, TILE_COLUMNS, to, call.columns, adds};
            Kind::tile(rows - m, left + m / TILE_ROWS * a.panel(terms), right, steps, target, ahead);
            ahead.next += ahead.bytes * steps;
            if (last && !whole) write(sums, rows - m, columns - n, to, adds);
          }
        }
      }
    }
  }

 private:
  int64_t columns_at_once() const { return round_up(std::min(COLUMNS, call.columns), TILE_COLUMNS); }

  void write(const float* sums, int64_t rows, int64_t columns, float* to, bool adds) const {
    for (int64_t m = 0; m < std::min<int64_t>(rows, TILE_ROWS); m++, sums += TILE_COLUMNS, to += call.columns)
      each(std::min<int64_t>(columns, TILE_COLUMNS), [=](int64_t i, auto lanes) {
        store(to + i, adds ? load(to + i, lanes) + load(sums + i) : load(sums + i), lanes);
      });
  }
};

template <class Kind>
Status product(const LinearProduct& call) {
  Product<Kind> of_call(call);
  const Division& cut = of_call.cut;
  const int64_t size = call.rows * call.columns;
  const bool packs_a = call.rows <= ROWS && cut.blocks > 1 && of_call.a.floats() <= MOST_PACKED;
  const bool packs_b = call.rows > ROWS && of_call.b.floats() <= MOST_PACKED;
  const FloatBuffer of_a(packs_a ? of_call.a.floats() : 0), of_b(packs_b ? of_call.b.floats() : 0);
  if ((packs_a && !of_a.data()) || (packs_b && !of_b.data())) return OUT_OF_MEMORY;
  if (packs_a) of_call.a.pack_all(of_a.data());
  if (packs_b) of_call.b.pack_all(of_b.data());
  const bool side_by_side = cut.at_once > 1;
  const int64_t work = cut.blocks * (side_by_side ? cut.at_once : 1);
  const int64_t workers = size * call.terms <= 8 * BLOCK ? 1 : workers_for(work);
  const FloatBuffer sums(side_by_side ? cut.at_once * size : 0);
  const Scratch scratch(workers, of_call.floats());
  if (scratch.failed() || (side_by_side && !sums.data())) return OUT_OF_MEMORY;
  const Scratch* buffers = &scratch;
  float* const of_parts = sums.data();
  const Product<Kind>* from = &of_call;
  float* const c = call.c;
  if (!side_by_side) {
    const bool adds = call.adds;
    run_blocks(work, workers, [=](int64_t block, int64_t worker) {
      for (int64_t part = 0; part < from->cut.parts; part++)
        from->compute(block, part, buffers->of(worker), c, adds || part > 0);
    });
    return OK;
  }
  for (int64_t start = 0; start < cut.parts; start += cut.at_once) {
    const int64_t parts = std::min(cut.at_once, cut.parts - start), blocks = cut.blocks;
    run_blocks(blocks * parts, std::min(workers, blocks * parts), [=](int64_t at, int64_t worker) {
      const int64_t part = at / blocks;
      from->compute(at % blocks, start + part, buffers->of(worker), of_parts + part * size, false);
    });
    const bool adds = call.adds || start > 0;
    run_blocks(divide_up(size, BLOCK / 8), [=](int64_t stretch) {
      const int64_t first = stretch * (BLOCK / 8), n = std::min(BLOCK / 8, size - first);
      each(n, [=](int64_t i, auto lanes) {
        auto total = load(of_parts + first + i, lanes);
        if (adds) total = load(c + first + i, lanes) + total;
        for (int64_t part = 1; part < parts; part++) total += load(of_parts + part * size + first + i, lanes);
        store(c + first + i, total, lanes);
      });
    });
  }
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int64_t fusedops_multiplies_bfloat16() { return has_pairs(); }

FUSEDOPS_EXPORT int fusedops_linear_product(const LinearProduct* call) {
  if (call->rows < 0 || call->columns < 0 || call->terms < 0) return INVALID;
  if (!call->rows || !call->columns) return OK;
  if (!call->c || (call->terms && (!call->a || !call->b))) return INVALID;
  if (!call->adds) use_huge_pages(call->c, call->rows * call->columns, FLOAT32);
  if (!call->terms) {
    if (!call->adds) memset(call->c, 0, call->rows * call->columns * sizeof(float));
    return OK;
  }
  if (!call->in_bfloat16) return product<Floats>(*call);
  if (call->a_dtype != BFLOAT16 || call->b_dtype != BFLOAT16 || !has_pairs()) return INVALID;
  return product<Pairs>(*call);
}

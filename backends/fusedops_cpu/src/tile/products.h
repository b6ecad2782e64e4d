// Products of matrices in float32: C = A B^T, whose operands may have gathered rows and any dtype.
//
// Both are packed, a slice of terms at a time, into panels that a tile of C in registers reads in order. A sum has its
// slices added in order, and in a slice its terms: the bits of an element depend on its terms and their number alone,
// not on the other elements nor on how C is cut into blocks.
#pragma once

#include <algorithm>

#include "api.h"
#include "parallel.h"
#include "simd/vector.h"

namespace fusedops {
namespace {

constexpr int64_t SLICE = 256;  // terms that are added in registers: 0.94 of the time of 64
constexpr int TILE_ROWS = VECTOR_BYTES == 64 ? 12 : VECTOR_BYTES == 32 ? 6 : 4, TILE_COLUMNS = 2 * LANES;
constexpr int64_t AHEAD = 4;  // rows

// One operand: its elements (i, k), where k is the term. In memory one of both is contiguous, the other has a stride.
struct Operand {
  const void* data;
  int64_t dtype;
  int64_t stride;  // in elements
  bool terms_contiguous;
  const int64_t* places = nullptr;  // of the strided one: its rows in memory, or null: as they come
  const uint16_t* order = nullptr;  // of 32 terms, in which products of pairs take them, or null
  const uint8_t* scales = nullptr;  // of MXFP4_CODES, (rows, groups)
  int64_t groups = 0;

  // A packed weight (tile/pairs_of_codes.h), whose dtype is its format.
  bool has_codes() const { return dtype >= MXFP4_GGUF_CODES; }
  // What so many elements take.
  int64_t bytes(int64_t count) const { return has_codes() ? count / 2 : count * size_of(dtype); }

  const void* row(int64_t at, int64_t first) const {
    return (const uint8_t*)data + ((places ? places[at] : at) * stride + first) * size_of(dtype);
  }
};

// What a loop asks memory for while it computes: the processor has few requests open at once, and those that came one
// after another would wait. So it is spread over the steps, and in the order of the addresses.
struct Ahead {
  const char* next;
  int64_t bytes = 0;  // of a step of a tile: two cache lines at most

  INLINE void step() {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + 64, 0, 2);
    next += bytes;
  }
  template <int BYTES>
  INLINE void block() {
#pragma GCC unroll 16
    for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(next + at, 0, 2);
    next += BYTES;
  }
};
struct Nothing {
  INLINE void step() const {}
};
// A part of the memory of the TILE_COLUMNS rows at `next`, which follow one another, for tiles of so many steps: as
// much as the terms from `term` on take. Tiles of all terms ask for all of it.
inline Ahead ahead_of(const void* next, int64_t of_term, int64_t term, int64_t terms, int64_t tiles, int64_t steps) {
  return {(const char*)next + term * of_term, std::min<int64_t>(128, terms * of_term / (tiles * steps))};
}

// All bits one after another transpose COUNT rows, in each COUNT lanes.
template <int S, int COUNT>
INLINE void swap_bit(vfloat* rows) {
  if constexpr (S < COUNT) {
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) {
      if (i & S) continue;
      const vfloat a = rows[i], b = rows[i + S];
      rows[i] = shuffled<Lower<S>>(a, b);
      rows[i + S] = shuffled<Upper<S>>(a, b);
    }
  }
}
template <int COUNT = LANES>
INLINE void transpose(vfloat* rows) {
  swap_bit<1, COUNT>(rows);
  swap_bit<2, COUNT>(rows);
  swap_bit<4, COUNT>(rows);
  swap_bit<8, COUNT>(rows);
}

// Packs `count` rows of contiguous terms, at most LANES, to the lanes of `depth` vectors WIDTH apart; lanes beyond hold
// what nothing reads. A vector may reach beyond WIDTH: what it writes there is written again by the next one.
template <int WIDTH, class T>
NOINLINE void pack_terms(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
  const T* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = (const T*)from.row(first + (i < count ? i : 0), term);
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) {
    vfloat values[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) values[i] = load(rows[i] + k);
    transpose(values);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(to + (k + i) * WIDTH, values[i]);
  }
  if (k == depth) return;
  vfloat values[LANES];
  for (int i = 0; i < LANES; i++) values[i] = load(rows[i] + k, Part{int(depth - k)});
  transpose(values);
  for (int i = 0; i < depth - k; i++) store(to + (k + i) * WIDTH, values[i]);
}

// Packs `count` contiguous numbers of each of `depth` terms, to panels of WIDTH that are `panel` floats apart. All
// panels take turns: rows in memory may be a power of two apart, and what the caches would then lose is read once. Rows
// are asked for AHEAD of time: each may be in a page of its own (few rows of C: twice as fast).
template <int WIDTH, class T>
NOINLINE void pack_rows(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to,
                        int64_t panel) {
  for (int64_t k = 0; k < depth; k++, to += WIDTH) {
    const T* row = (const T*)from.row(term + k, first);
    if (k + AHEAD < depth) {
      const char* ahead = (const char*)from.row(term + k + AHEAD, first);
      for (int64_t at = 0; at < count * int64_t(sizeof(T)); at += 64) __builtin_prefetch(ahead + at);
    }
    float* of_panel = to;
    for (int64_t start = 0; start < count; start += WIDTH, of_panel += panel) {
#pragma GCC unroll 2
      for (int at = 0; at < WIDTH; at += LANES) {
        const int64_t n = count - start - at;
        if (n <= 0) break;
        store(of_panel + at, n >= LANES ? load(row + start + at) : load(row + start + at, Part{int(n)}));
      }
    }
  }
}

// The floats from one panel of so many terms to the next: not a multiple of what one way of a cache holds.
template <int WIDTH>
INLINE int64_t panel_floats(int64_t depth) {
  return WIDTH * depth + LANES;
}

// Packs rows [first, first + count) of an operand of one dtype to panels of WIDTH.
template <int WIDTH, class T>
INLINE void pack_as(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
  const int64_t panel = panel_floats<WIDTH>(depth);
  if (!from.terms_contiguous) return pack_rows<WIDTH, T>(from, first, count, term, depth, to, panel);
  for (int64_t start = 0; start < count; start += WIDTH, to += panel)
    for (int64_t at = start; at < std::min(start + WIDTH, count); at += LANES)
      pack_terms<WIDTH, T>(from, first + at, std::min({count, start + WIDTH, at + LANES}) - at, term, depth,
                           to + at - start);
}
template <int WIDTH>
NOINLINE void pack(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
  with_dtype(from.dtype, [&](auto element) { pack_as<WIDTH, decltype(element)>(from, first, count, term, depth, to); });
}

// Where the sums of a tile go: to `to`, whose rows are `row` apart, added to `before` where that is not null, and then
// to what is there where `adds`.
struct Target {
  const float* before;
  int64_t before_row;
  float* to;
  int64_t row;
  bool adds;

  // Asks for what is written after the sums: it may be in memory, past the caches.
  template <int M>
  INLINE void fetch() const {
    for (int m = 0; m < M; m++)
      for (int at = 0; at < TILE_COLUMNS; at += 16) __builtin_prefetch(to + m * row + at, 1);
  }
  INLINE void write(int m, int at, vfloat sums) const {
    if (before) sums = load(before + m * before_row + at) + sums;
    float* p = to + m * row + at;
    store(p, adds ? load(p) + sums : sums);
  }
};

// Computes the products of M rows and a panel of TILE_COLUMNS. From one term of the rows to the next are TERM floats,
// from one row to the next ROW: of a panel, or of a block in memory, in either order.
template <int M, int TERM = TILE_ROWS, int ROW = 1, class Asks = Nothing>
NOINLINE void tile(const float* a, const float* b, int64_t depth, const Target& c, Asks ahead = {}) {
  vfloat sums[M][2] = {};
  c.fetch<M>();
  for (int64_t k = 0; k < depth; k++, a += TERM, b += TILE_COLUMNS) {
    ahead.step();
    const vfloat left = load(b), right = load(b + LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      sums[m][0] += left * a[m * ROW];
      sums[m][1] += right * a[m * ROW];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    c.write(m, 0, sums[m][0]);
    c.write(m, LANES, sums[m][1]);
  }
}

// Computes the products of M rows, as pack has them, and `count` rows of contiguous terms, at most LANES, which no
// panel holds: they are read once. The sums are those of tile.
template <int M, class T>
NOINLINE void tile_of_terms(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth,
                            const float* a, const Target& c, Ahead ahead) {
  const T* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = (const T*)from.row(first + (i < count ? i : 0), term);
  vfloat sums[M] = {};
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) {
    vfloat values[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) values[i] = load(rows[i] + k);
    ahead.block<LANES * LANES * sizeof(T)>();
    transpose(values);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, a += TILE_ROWS) {
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) sums[m] += values[i] * a[m];
    }
  }
  if (k < depth) {
    vfloat values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = load(rows[i] + k, Part{int(depth - k)});
    transpose(values);
    for (int i = 0; i < depth - k; i++, a += TILE_ROWS)
      for (int m = 0; m < M; m++) sums[m] += values[i] * a[m];
  }
  for (int m = 0; m < M; m++) c.write(m, 0, sums[m]);
}

// Calls `call` with the constant number of rows of the smallest tile for so many.
template <class Call>
INLINE void with_tile_rows(int64_t rows, const Call& call) {
  switch (rows) {
    case 1:
      return call(std::integral_constant<int, 1>{});
    case 2:
      return call(std::integral_constant<int, 2>{});
    case 3:
    case 4:
      return call(std::integral_constant<int, 4>{});
    default:
      if (TILE_ROWS > 8 && rows > 8) return call(std::integral_constant<int, TILE_ROWS>{});
      if (TILE_ROWS > 6 && rows > 6) return call(std::integral_constant<int, (TILE_ROWS < 8 ? TILE_ROWS : 8)>{});
      return call(std::integral_constant<int, (TILE_ROWS < 6 ? TILE_ROWS : 6)>{});
  }
}

template <int TERM = TILE_ROWS, int ROW = 1, class Asks = Nothing>
INLINE void tile_of(int64_t rows, const float* a, const float* b, int64_t depth, const Target& c, Asks ahead = {}) {
  with_tile_rows(rows, [&](auto most) { tile<most, TERM, ROW>(a, b, depth, c, ahead); });
}

}  // namespace
}  // namespace fusedops

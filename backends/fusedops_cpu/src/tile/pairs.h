// Two kinds of products: of float32, and of bfloat16 by the instruction vdpbf16ps of AVX512-BF16, which adds the
// products of two terms to a sum in float32.
//
// Of bfloat16, a step of a sum has a pair of terms, packed into the 32 bits that a float has otherwise: so both have
// the same panels. Beside the last of an odd number of terms is 0. The instruction takes numbers below 2^-126 for 0,
// returns 0 for them, and rounds to nearest whatever the mode is. inf and NaN are those of IEEE 754.
#pragma once

#include "processor.h"
#include "tile/pairs_of_codes.h"
#include "tile/products.h"

namespace fusedops {
namespace {

// Products of float32: a step of a sum has one term.
struct Floats {
  static constexpr int64_t TERMS = 1;  // of a step
  static constexpr int64_t DTYPE = FLOAT32;
  using Number = float;

  template <int WIDTH>
  static void pack(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
    fusedops::pack<WIDTH>(from, first, count, term, depth, to);
  }
  template <int TERM = TILE_ROWS, int ROW = 1, class Asks = Nothing>
  static void tile(int64_t rows, const float* a, const float* b, int64_t steps, const Target& c, Asks ahead = {}) {
    tile_of<TERM, ROW>(rows, a, b, steps, c, ahead);
  }
  template <int M>
  static void tile_of_terms(const Operand& b, int64_t first, int64_t count, int64_t term, int64_t depth, const float* a,
                            const Target& c, Ahead ahead) {
    with_dtype(b.dtype, [&](auto element) {
      fusedops::tile_of_terms<M, decltype(element)>(b, first, count, term, depth, a, c, ahead);
    });
  }
};

#if VECTOR_BYTES == 64

// True where the processor has the instruction, and is an AMD. An Intel Xeon (Emerald Rapids) begins one in two cycles,
// in which it does two times as many products of float32: with pairs, attention took 1.6 times as long, and experts 1.7
// times. Asked for once: a virtual machine answers in microseconds.
inline bool ask_for_pairs() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return is_amd() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
const bool HAS_PAIRS = ask_for_pairs();
inline bool has_pairs() { return HAS_PAIRS; }

// Packs `count` rows of contiguous terms, at most LANES, to the lanes of vectors WIDTH floats apart, as pack_terms.
// ORDERED: their terms may have an order.
template <int WIDTH, bool ORDERED>
NOINLINE void pack_pairs_of_terms(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth,
                                  float* to) {
  const uint16_t* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = (const uint16_t*)from.row(first + (i < count ? i : 0), term);
  int64_t k = 0;
  for (; k + 2 * LANES <= depth; k += 2 * LANES, to += LANES * WIDTH) {
    vfloat values[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) values[i] = load((const float*)(rows[i] + k));
    if (ORDERED && from.order)
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        values[i] = (vfloat)_mm512_permutexvar_epi16(_mm512_load_si512(from.order), (__m512i)values[i]);
    transpose(values);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(to + i * WIDTH, values[i]);
  }
  if (k == depth) return;
  const uint32_t mask = (uint32_t(1) << (depth - k)) - 1;
  vfloat values[LANES];
  for (int i = 0; i < LANES; i++) values[i] = (vfloat)_mm512_maskz_loadu_epi16(mask, rows[i] + k);
  transpose(values);
  for (int i = 0; i < (depth - k + 1) / 2; i++) store(to + i * WIDTH, values[i]);
}

// Packs `count` contiguous numbers of each of `depth` terms, to panels of WIDTH, as pack_rows.
template <int WIDTH>
NOINLINE void pack_pairs_of_rows(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth,
                                 float* to, int64_t panel) {
  for (int64_t k = 0; k < depth; k += 2, to += WIDTH) {
    const uint16_t* row = (const uint16_t*)from.row(term + k, first);
    const bool odd = k + 1 == depth;
    const uint16_t* next = odd ? row : (const uint16_t*)from.row(term + k + 1, first);
    for (int64_t ahead = k + AHEAD; ahead < std::min(k + AHEAD + 2, depth); ahead++) {
      const char* p = (const char*)from.row(term + ahead, first);
      for (int64_t at = 0; at < 2 * count; at += 64) __builtin_prefetch(p + at);
    }
    float* of_panel = to;
    for (int64_t start = 0; start < count; start += WIDTH, of_panel += panel) {
#pragma GCC unroll 2
      for (int at = 0; at < WIDTH; at += LANES) {
        const int64_t n = count - start - at;
        if (n <= 0) break;
        const __mmask16 mask = n >= LANES ? 0xffff : (1 << n) - 1;
        const vuint low = (vuint)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + start + at));
        const __mmask16 of_next = odd ? 0 : mask;
        const vuint high = (vuint)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(of_next, next + start + at));
        store(of_panel + at, (vfloat)(low | high << 16));
      }
    }
  }
}

// As tile.
template <int M, int TERM, int ROW, class Asks>
__attribute__((target("avx512bf16"))) NOINLINE void tile_of_pairs(const float* a, const float* b, int64_t steps,
                                                                  const Target& c, Asks ahead) {
  __m512 sums[M][2] = {};
  c.fetch<M>();
  for (int64_t k = 0; k < steps; k++, a += TERM, b += TILE_COLUMNS) {
    ahead.step();
    const __m512bh left = (__m512bh)load(b), right = (__m512bh)load(b + LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const __m512bh of_row = (__m512bh)_mm512_set1_ps(a[m * ROW]);
      sums[m][0] = _mm512_dpbf16_ps(sums[m][0], left, of_row);
      sums[m][1] = _mm512_dpbf16_ps(sums[m][1], right, of_row);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    c.write(m, 0, (vfloat)sums[m][0]);
    c.write(m, LANES, (vfloat)sums[m][1]);
  }
}

// As tile_of_terms.
template <int M>
__attribute__((target("avx512bf16"))) NOINLINE void pairs_of_terms(const Operand& from, int64_t first, int64_t count,
                                                                   int64_t term, int64_t depth, const float* a,
                                                                   const Target& c, Ahead ahead) {
  const uint16_t* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = (const uint16_t*)from.row(first + (i < count ? i : 0), term);
  __m512 sums[M] = {};
  int64_t k = 0;
  for (; k + 2 * LANES <= depth; k += 2 * LANES) {
    vfloat values[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) values[i] = load((const float*)(rows[i] + k));
    ahead.block<LANES * LANES * sizeof(float)>();
    transpose(values);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++, a += TILE_ROWS) {
#pragma GCC unroll 4
      for (int m = 0; m < M; m++)
        sums[m] = _mm512_dpbf16_ps(sums[m], (__m512bh)values[i], (__m512bh)_mm512_set1_ps(a[m]));
    }
  }
  if (k < depth) {
    const uint32_t mask = (uint32_t(1) << (depth - k)) - 1;
    vfloat values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = (vfloat)_mm512_maskz_loadu_epi16(mask, rows[i] + k);
    transpose(values);
    for (int i = 0; i < (depth - k + 1) / 2; i++, a += TILE_ROWS)
      for (int m = 0; m < M; m++)
        sums[m] = _mm512_dpbf16_ps(sums[m], (__m512bh)values[i], (__m512bh)_mm512_set1_ps(a[m]));
  }
  for (int m = 0; m < M; m++) c.write(m, 0, (vfloat)sums[m]);
}

// Rounds n numbers, whole panels, to bfloat16: those of a row, or of two rows whose numbers take turns. Numbers below
// 2^-126 become 0.
__attribute__((target("avx512bf16"))) NOINLINE void round_row(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 2 * LANES, to += LANES)
    store(to, (vfloat)_mm512_cvtne2ps_pbh((__m512)load(from + i + LANES), (__m512)load(from + i)));
}
__attribute__((target("avx512bf16"))) NOINLINE void round_rows(const float* even, const float* odd, int64_t n,
                                                               float* to) {
  const vuint16_two turns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  for (int64_t i = 0; i < n; i += LANES) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)load(odd + i), (__m512)load(even + i));
    store(to + i, (vfloat)_mm512_permutexvar_epi16((__m512i)turns, both));
  }
}

// Products of bfloat16; CODES: an operand of TILE_COLUMNS may be a packed weight.
template <bool CODES>
struct PairsOf {
  static constexpr int64_t TERMS = 2;
  static constexpr int64_t DTYPE = BFLOAT16;
  using Number = bfloat16;

  template <int WIDTH>
  static void pack(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
    const int64_t panel = panel_floats<WIDTH>(divide_up(depth, 2));
    if constexpr (CODES && WIDTH == TILE_COLUMNS)
      if (from.has_codes()) {
        for (int64_t at = 0; at < count; at += LANES)
          pack_codes<WIDTH>(from, first + at, std::min<int64_t>(LANES, count - at), term, depth,
                            to + at / WIDTH * panel + at % WIDTH);
        return;
      }
    if (!from.terms_contiguous) return pack_pairs_of_rows<WIDTH>(from, first, count, term, depth, to, panel);
    for (int64_t start = 0; start < count; start += WIDTH, to += panel)
      for (int64_t at = start; at < std::min(start + WIDTH, count); at += LANES)
        pack_pairs_of_terms<WIDTH, CODES>(from, first + at, std::min({count, start + WIDTH, at + LANES}) - at, term,
                                          depth, to + at - start);
  }
  template <int TERM = TILE_ROWS, int ROW = 1, class Asks = Nothing>
  static void tile(int64_t rows, const float* a, const float* b, int64_t steps, const Target& c, Asks ahead = {}) {
    with_tile_rows(rows, [&](auto most) { tile_of_pairs<most, TERM, ROW>(a, b, steps, c, ahead); });
  }
  template <int M>
  static void tile_of_terms(const Operand& b, int64_t first, int64_t count, int64_t term, int64_t depth, const float* a,
                            const Target& c, Ahead ahead) {
    if (!CODES || !b.has_codes()) return pairs_of_terms<M>(b, first, count, term, depth, a, c, ahead);
    if constexpr (CODES) products_of_codes<M>(b, first, count, term, depth, a, c, ahead);
  }
};

#else

template <bool CODES>
struct PairsOf : Floats {};  // never called
inline void round_row(const float*, int64_t, float*) {}
inline void round_rows(const float*, const float*, int64_t, float*) {}
inline bool has_pairs() { return false; }

#endif

using Pairs = PairsOf<false>;

}  // namespace
}  // namespace fusedops

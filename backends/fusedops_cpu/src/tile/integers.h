// Exact sums of products of 8-bit integers, in 32 bits.
//
// A lane of a vector has some terms of a sum, which one instruction multiplies and adds: four of 8 bits (Bytes), by
// vpdpbusd of AVX512-VNNI, or two that are widened to 16 bits (Pairs16), by vpmaddwd. vpdpbusd takes one operand
// without a sign: that is the weight plus 128, and 128 times the sum of q is subtracted at the end. (vpmaddubsw of
// AVX2, which takes such operands too, saturates.)
//
// For few rows of q, terms lie along a vector, and the weight is read where it lies. For many, each lane has another
// row of the weight, packed into panels, and q is broadcast.
#pragma once

#include <algorithm>

#include "tile/products.h"

#if VECTOR_BYTES == 64
#include <cpuid.h>
#endif

namespace fusedops {
namespace {

// Rows of q in units of 32 bits, padded with 0 to whole vectors; rows of the weight; and their sums, Kind::PANEL apart.
struct IntegerProduct {
  const int32_t* q;
  int64_t q_row, rows;
  const int8_t* weight;
  int64_t weight_row, outputs, columns;
  int32_t* sums;
};

INLINE vint load_units(const int32_t* p) {
  vint v;
  memcpy(&v, p, sizeof v);
  return v;
}

// The first n numbers of a vector of the weight, then 0.
template <class Kind>
NOINLINE vint load_first_numbers(const int8_t* p, int64_t n) {
  int8_t numbers[LANES * Kind::TERMS] = {};
  memcpy(numbers, p, n);
  return Kind::load(numbers);
}

// The sums over the lanes of each of four vectors.
INLINE void write_lane_sums(vint* vectors, int32_t* to) {
  vfloat rows[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) rows[i] = bits_as<vfloat>(vectors[i]);
  transpose<4>(rows);
  vint total = bits_as<vint>(rows[0]) + bits_as<vint>(rows[1]) + bits_as<vint>(rows[2]) + bits_as<vint>(rows[3]);
  const vint sums = total;
  if constexpr (LANES > 4) total += shuffled<From<4>>(sums, sums);
  if constexpr (LANES > 8) total += shuffled<From<8>>(sums, sums), total += shuffled<From<12>>(sums, sums);
  memcpy(to, &total, 4 * sizeof *to);
}

// The products of M rows of q, from row m on, and N of the weight, from row n on.
template <class Kind, int M, int N>
INLINE void dots(const IntegerProduct& p, int64_t m, int64_t n) {
  constexpr int64_t STEP = LANES * Kind::TERMS;
  const int32_t* q = p.q + m * p.q_row;
  const int8_t* weight = p.weight + n * p.weight_row;
  vint total[M * N] = {};
  int64_t k = 0;
  for (; k + STEP <= p.columns; k += STEP, q += LANES) {
    vint w[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) w[i] = Kind::load(weight + i * p.weight_row + k);
#pragma GCC unroll 16
    for (int j = 0; j < M; j++) {
      const vint row = load_units(q + j * p.q_row);
#pragma GCC unroll 16
      for (int i = 0; i < N; i++) Kind::add_products(total[j * N + i], w[i], row);
    }
  }
  if (k < p.columns)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      const vint last = load_first_numbers<Kind>(weight + i * p.weight_row + k, p.columns - k);
#pragma GCC unroll 16
      for (int j = 0; j < M; j++) Kind::add_products(total[j * N + i], last, load_units(q + j * p.q_row));
    }
#pragma GCC unroll 16
  for (int j = 0; j < M; j++)
#pragma GCC unroll 2
    for (int i = 0; i < N; i += 4) {
      int32_t* to = p.sums + (m + j) * Kind::PANEL + n + i;
      if constexpr (N >= 4) {
        write_lane_sums(total + j * N + i, to);
      } else {
        vint one[4] = {total[j * N]};
        int32_t sums[4];
        write_lane_sums(one, sums);
        *to = sums[0];
      }
    }
}

// Calls f with the number of rows of a tile, at most MOST, as a constant.
template <int MOST, class F>
INLINE void with_rows(int64_t rows, F f) {
  if constexpr (MOST > 1)
    if (rows < MOST) return with_rows<MOST - 1>(rows, f);
  f(std::integral_constant<int, MOST>{});
}

template <class Kind>
void products_of_few(const IntegerProduct& p) {
  if (p.outputs < 4) {
    for (int64_t m = 0; m < p.rows; m++)
      for (int64_t n = 0; n < p.outputs; n++) Kind::template tile_of_few<1, 1>(p, m, n);
    return;
  }
  const int64_t tiles = divide_up(p.rows, Kind::TALL);
  for (int64_t n = 0; n < p.outputs; n += 4) {
    if (p.rows == 1 && n + 8 <= p.outputs) {
      Kind::template tile_of_few<1, 8>(p, 0, n);
      n += 4;
      continue;
    }
    n = std::min(n, p.outputs - 4);  // some of the last four may be there already
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = tile * p.rows / tiles, count = (tile + 1) * p.rows / tiles - m;
      with_rows<Kind::TALL>(count, [&](auto most) { Kind::template tile_of_few<decltype(most)::value, 4>(p, m, n); });
    }
  }
}

// Packs a part of the rows of the weight: step by step, the units of PANEL rows. Rows beyond the last repeat it.
template <class Kind>
NOINLINE void pack_panel(const IntegerProduct& p, int64_t first, int64_t depth, int32_t* panel) {
  constexpr int64_t STEP = LANES * Kind::TERMS;
  for (int64_t group = 0; group < Kind::PANEL; group += LANES) {
    const int8_t* rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = p.weight + std::min(group + i, p.outputs - 1) * p.weight_row + first;
    for (int64_t k = 0; k < depth; k += STEP) {
      vfloat units[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        units[i] = bits_as<vfloat>(k + STEP <= depth ? Kind::load(rows[i] + k)
                                                     : load_first_numbers<Kind>(rows[i] + k, depth - k));
      transpose(units);
      int32_t* to = panel + k / Kind::TERMS * Kind::PANEL + group;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) memcpy(to + i * Kind::PANEL, &units[i], sizeof units[i]);
    }
  }
}

// The products of M rows of q and a panel; sums that are there already are added.
template <class Kind, int M>
INLINE void panel_products(const int32_t* q, int64_t q_row, const int32_t* panel, int64_t steps, bool adds,
                           int32_t* sums) {
  constexpr int N = Kind::PANEL / LANES;
  vint total[M * N] = {};
  if (adds)
#pragma GCC unroll 32  // as everywhere here: an array with an index that is not constant stays in memory
    for (int i = 0; i < M * N; i++) total[i] = load_units(sums + i * LANES);
  for (int64_t step = 0; step < steps; step++, panel += Kind::PANEL) {
    vint w[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) w[i] = load_units(panel + i * LANES);
#pragma GCC unroll 16
    for (int j = 0; j < M; j++) {
      const vint unit = vint{} + q[j * q_row + step];
#pragma GCC unroll 16
      for (int i = 0; i < N; i++) Kind::add_products(total[j * N + i], w[i], unit);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < M * N; i++) memcpy(sums + i * LANES, &total[i], sizeof total[i]);
}

template <class Kind>
void products_of_many(const IntegerProduct& p, int32_t* panel) {
  if (!p.columns) std::fill(p.sums, p.sums + p.rows * Kind::PANEL, 0);
  for (int64_t first = 0; first < p.columns; first += Kind::DEPTH) {
    const int64_t depth = std::min<int64_t>(Kind::DEPTH, p.columns - first);
    pack_panel<Kind>(p, first, depth, panel);
    const int64_t steps = divide_up(depth, Kind::TERMS), tiles = divide_up(p.rows, Kind::TALL);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = tile * p.rows / tiles, count = (tile + 1) * p.rows / tiles - m;
      const int32_t* q = p.q + m * p.q_row + first / Kind::TERMS;
      with_rows<Kind::TALL>(count, [&](auto most) {
        Kind::template tile_of_many<decltype(most)::value>(q, p.q_row, panel, steps, first > 0,
                                                           p.sums + m * Kind::PANEL);
      });
    }
  }
}

// The sizes of both kinds, whose TARGET allows their instruction.
#define INTEGER_KIND(NAME, TARGET, NUMBER, TERMS_OF_UNIT, MOST_ROWS, OFFSET_OF_WEIGHT)                           \
  using Integer = NUMBER;                                                                                        \
  static constexpr int TERMS = TERMS_OF_UNIT;                                                                    \
  static constexpr uint32_t OFFSET = OFFSET_OF_WEIGHT;                                                           \
  static constexpr int TALL = MOST_ROWS; /* rows of q of a tile */                                               \
  static constexpr int64_t PANEL = VECTOR_BYTES == 64 ? 64 : 4 * LANES;                                          \
  static constexpr int64_t DEPTH = 4096; /* terms that are packed at a time */                                   \
  static int64_t units_of_panel(int64_t depth) { return round_up(divide_up(depth, TERMS), LANES) * PANEL; }      \
  template <int M, int N>                                                                                        \
  TARGET NOINLINE static void tile_of_few(const IntegerProduct& p, int64_t m, int64_t n) {                       \
    dots<NAME, M, N>(p, m, n);                                                                                   \
  }                                                                                                              \
  template <int M>                                                                                               \
  TARGET NOINLINE static void tile_of_many(const int32_t* q, int64_t q_row, const int32_t* panel, int64_t steps, \
                                           bool adds, int32_t* sums) {                                           \
    panel_products<NAME, M>(q, q_row, panel, steps, adds, sums);                                                 \
  }                                                                                                              \
  static void few_rows(const IntegerProduct& p) { products_of_few<NAME>(p); }                                    \
  static void many_rows(const IntegerProduct& p, int32_t* panel) { products_of_many<NAME>(p, panel); }

struct Pairs16 {
  INTEGER_KIND(Pairs16, , int16_t, 2, VECTOR_BYTES == 64 ? 4 : 2, 0)

  static INLINE vint load(const int8_t* p) {
#if VECTOR_BYTES == 64
    return (vint)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif VECTOR_BYTES == 32
    return (vint)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
    return (vint)vmovl_s8(vld1_s8(p));
#else
    return (vint)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
#endif
  }
  static INLINE void add_products(vint& sums, vint weight, vint q) {
#if VECTOR_BYTES == 64
    sums += (vint)_mm512_madd_epi16((__m512i)weight, (__m512i)q);
#elif VECTOR_BYTES == 32
    sums += (vint)_mm256_madd_epi16((__m256i)weight, (__m256i)q);
#elif defined(__aarch64__)
    const int16x8_t w = (int16x8_t)weight, x = (int16x8_t)q;
    sums += (vint)vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(x)), vmull_high_s16(w, x));
#else
    sums += (vint)_mm_madd_epi16((__m128i)weight, (__m128i)q);
#endif
  }
};

#if VECTOR_BYTES == 64

// True where the processor has vpdpbusd. Asked for once: a virtual machine answers in microseconds.
inline bool ask_for_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
}
const bool HAS_VNNI = ask_for_vnni();
inline bool has_vnni() { return HAS_VNNI; }

struct Bytes {
  INTEGER_KIND(Bytes, __attribute__((target("avx512vnni"))), int8_t, 4, 6, 128)

  static INLINE vint load(const int8_t* p) {
    vuint v;
    memcpy(&v, p, sizeof v);
    return (vint)(v ^ 0x80808080u);
  }
  // GCC inlines the intrinsic into no function without the target, as dots; of this it knows nothing.
  static INLINE void add_products(vint& sums, vint weight, vint q) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weight), "v"(q));
  }
};

#endif

#undef INTEGER_KIND

}  // namespace
}  // namespace fusedops

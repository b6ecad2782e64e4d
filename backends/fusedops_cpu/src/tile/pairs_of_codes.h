// Pairs of bfloat16 numbers out of weights of MXFP4: a code of E2M1 times a power of two is a number of bfloat16.
//
// Four bytes of each of LANES rows go to the lane of their row, and both halves of a lane give their next code at a
// time, which is looked up in one table. From its numbers a power of two is taken by a subtraction of exponents. So the
// terms of a pair are some apart, and the other operand's terms are put in that order (order_of_terms).
#pragma once

#include "tile/products.h"

namespace fusedops {
namespace {

constexpr int64_t OF_BLOCK = 32;  // terms with one power

// True where rows of such a weight may be an Operand of pairs.
inline bool is_mxfp4(const PackedWeight& weight) {
  if (weight.format == MXFP4_GGUF_CODES) return true;
  return weight.format == MXFP4_CODES && weight.scale_dtype == E8M0 && weight.group == OF_BLOCK &&
         weight.scale_rows == 1 && !weight.global_scale;
}
// The rows of the weight from `row` on, as they multiply inputs.
inline Operand operand_of_codes(const PackedWeight& weight, int64_t row) {
  const auto* scales = (const uint8_t*)weight.scales;
  return {weight.codes + row * weight.row_bytes,           weight.format, weight.row_bytes, true, nullptr, nullptr,
          scales ? scales + row * weight.groups : nullptr, weight.groups};
}

// The terms of a block, pair by pair: as those of a lane, which are in the halves of bytes.
struct TermsOfBlock {
  uint16_t terms[OF_BLOCK];
  constexpr explicit TermsOfBlock(bool gguf) : terms{} {
    for (int k = 0; k < OF_BLOCK / 2; k++)
      for (int of = 0; of < 2; of++) {
        const int byte = k / 4 * 4 + of * 2 + k % 4 / 2, half = k % 2;
        terms[2 * k + of] = gguf ? byte + 16 * half : 2 * byte + half;
      }
  }
};
alignas(64) constexpr TermsOfBlock OF_HUB(false), OF_GGUF(true);
inline const uint16_t* order_of_terms(const PackedWeight& weight) {
  return (weight.format == MXFP4_GGUF_CODES ? OF_GGUF : OF_HUB).terms;
}

#if VECTOR_BYTES == 64

// The terms [term, term + depth) of LANES rows, at most SLICE, whole blocks. Lanes beyond `count` have the last row.
class CodesOfRows {
 public:
  INLINE CodesOfRows(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth)
      : in_blocks_(from.dtype == MXFP4_GGUF_CODES), bytes_(in_blocks_ ? 17 : 16) {
    const int64_t blocks = depth / OF_BLOCK, before = term / OF_BLOCK;
    uint64_t powers[LANES];  // a byte for each block
    for (int i = 0; i < LANES; i++) {
      const int64_t row = first + std::min<int64_t>(i, count - 1);
      codes_[i] = (const uint8_t*)from.data + row * from.stride + before * bytes_ + in_blocks_;
      const uint8_t* scales = in_blocks_ ? codes_[i] - 1 : from.scales + row * from.groups + before;
      if (!in_blocks_ && blocks == 8) {
        memcpy(&powers[i], scales, sizeof powers[i]);
        continue;
      }
      powers[i] = 0x7f7f7f7f7f7f7f7f;
      for (int64_t b = 0; b < blocks; b++) ((uint8_t*)&powers[i])[b] = scales[b * (in_blocks_ ? bytes_ : 1)];
    }
    low_ = _mm512_loadu_si512(powers), high_ = _mm512_loadu_si512(powers + LANES / 2);
  }

  // The LANES pairs of terms of the next block, each of all rows.
  INLINE void next(vfloat* pairs) {
    const __m512i power =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(low_)), _mm512_cvtepi64_epi32(high_), 1);
    low_ = _mm512_srli_epi64(low_, 8), high_ = _mm512_srli_epi64(high_, 8);
    const __m512i excess = _mm512_sub_epi32(_mm512_set1_epi32(252), _mm512_and_si512(power, _mm512_set1_epi32(255)));
    // the numbers of the table are larger by so many powers; by more than 250, or fewer than 0, not all are normal
    if (_mm512_cmpgt_epu32_mask(excess, _mm512_set1_epi32(250))) return slowly(power, pairs);
    const __m512i of_both = _mm512_or_si512(_mm512_slli_epi32(excess, 7), _mm512_slli_epi32(excess, 23));
    __m512i z[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      z[q] = _mm512_castsi128_si512(bytes_of(q));
      z[q] = _mm512_inserti32x4(z[q], bytes_of(4 + q), 1);
      z[q] = _mm512_inserti32x4(z[q], bytes_of(8 + q), 2);
      z[q] = _mm512_inserti32x4(z[q], bytes_of(12 + q), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    const __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    // four bytes of each row
    const __m512i fours[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d),
                              _mm512_unpackhi_epi64(c, d)};
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)NUMBERS));
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) {
      // both halves of a lane in the same turn; of an index, the lookup takes five bits, for two tables
      const __m512i index = _mm512_srli_epi16(fours[k / 4], k % 4 * 4);
      const __m512i large = _mm512_permutexvar_epi16(index, numbers);
      pairs[k] = (vfloat)_mm512_subs_epu16(large, of_both);  // of zero, zero
    }
    at_ += bytes_;
  }

 private:
  // times 2^125
  alignas(32) static constexpr uint16_t NUMBERS[16] = {0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
                                                       0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};

  bool in_blocks_;  // of GGUF: a power and its codes
  int64_t bytes_;   // from the codes of a block to the next
  const uint8_t* codes_[LANES];
  int64_t at_ = 0;
  __m512i low_, high_;  // the powers of the next blocks, in the low bytes

  INLINE __m128i bytes_of(int row) const { return _mm_loadu_si128((const __m128i*)(codes_[row] + at_)); }
  // As next, by float32, which has subnormal numbers, inf and NaN.
  NOINLINE void slowly(__m512i powers, vfloat* pairs) {
    uint32_t power[LANES];
    _mm512_storeu_si512(power, powers);
    for (int i = 0; i < LANES; i++) {
      const uint32_t e = power[i] & 255, half = e < 2 ? 0x00200000u << e : (e - 1) << 23;
      const float scale = bits_as<float>(e == 255 && !in_blocks_ ? 0x7fc00000 : half);
      for (int k = 0; k < LANES; k++) {
        uint32_t pair = 0;
        for (int of = 0; of < 2; of++) {
          const int code = codes_[i][at_ + k / 4 * 4 + of * 2 + k % 4 / 2] >> k % 2 * 4 & 15;
          const float twice = bits_as<float>(uint32_t(NUMBERS[code]) << 16) * 0x1p-124f;
          pair |= bits_as<uint32_t>(twice * scale) >> 16 << 16 * of;
        }
        memcpy((uint32_t*)(pairs + k) + i, &pair, sizeof pair);
      }
    }
    at_ += bytes_;
  }
};

// As pack_pairs_of_terms.
template <int WIDTH>
NOINLINE void pack_codes(const Operand& from, int64_t first, int64_t count, int64_t term, int64_t depth, float* to) {
  CodesOfRows rows(from, first, count, term, depth);
  for (int64_t at = 0; at < depth; at += OF_BLOCK, to += LANES * WIDTH) {
    vfloat pairs[LANES];
    rows.next(pairs);
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) store(to + k * WIDTH, pairs[k]);
  }
}

// As tile_of_terms, of TILE_COLUMNS rows, at most: a product of pairs waits for the one before, so two sums take turns.
template <int M>
__attribute__((target("avx512bf16"))) NOINLINE void products_of_codes(const Operand& from, int64_t first, int64_t count,
                                                                      int64_t term, int64_t depth, const float* a,
                                                                      const Target& c, Ahead ahead) {
  CodesOfRows rows[2] = {{from, first, std::min<int64_t>(LANES, count), term, depth},
                         {from, first + LANES, count - LANES, term, depth}};
  __m512 sums[2][M] = {};
  for (int64_t at = 0; at < depth; at += OF_BLOCK, a += LANES * TILE_ROWS) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      vfloat pairs[LANES];
      rows[n].next(pairs);
      ahead.block<LANES * OF_BLOCK / 2>();
#pragma GCC unroll 16
      for (int k = 0; k < LANES; k++) {
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
          sums[n][m] = _mm512_dpbf16_ps(sums[n][m], (__m512bh)pairs[k], (__m512bh)_mm512_set1_ps(a[k * TILE_ROWS + m]));
      }
    }
  }
  for (int m = 0; m < M; m++) {
    c.write(m, 0, (vfloat)sums[0][m]);
    if (count > LANES) c.write(m, LANES, (vfloat)sums[1][m]);
  }
}

#endif

}  // namespace
}  // namespace fusedops

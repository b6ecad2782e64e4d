// The keep mask of dropout: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// Key: low and high 32 bits of the seed. Counter: low and high 32 bits of index / 4, 0, 0. The element at `index` takes
// output word index % 4, and is kept where that word is at least the threshold.
#pragma once

#include "simd/vector.h"

namespace fusedops {
namespace {

INLINE vuint64 multiply_low_halves(vuint64 a, vuint64 b) {
#if VECTOR_BYTES == 64
  return (vuint64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif VECTOR_BYTES == 32
  return (vuint64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE4_1__)
  return (vuint64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (vuint64)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

class Philox {
 public:
  // The elements of one call of fill; more of them, and the memory has nothing to do meanwhile.
  static constexpr int64_t CHUNK = 192;
  static constexpr int STEP = 2 * LANES;  // elements of LANES / 2 counters, one counter in each 64-bit lane
  static constexpr int SIDE_BY_SIDE = 3;  // steps at a time: each waits for its own products
  static constexpr int64_t BUFFER = CHUNK + (SIDE_BY_SIDE + 1) * STEP;

  Philox(uint64_t seed, uint32_t threshold) : threshold_(threshold) {
    for (uint32_t i = 0; i < 10; i++) {
      key_[i][0] = vuint64{} + (uint32_t(seed) + i * 0x9E3779B9u);
      key_[i][1] = vuint64{} + (uint32_t(seed >> 32) + i * 0xBB67AE85u);
    }
  }

  // Writes the masks of `count` <= CHUNK elements from `start`, a multiple of 4: all bits set where kept. `out` has
  // BUFFER elements; those after `count` hold no mask.
  NOINLINE void fill(int64_t start, int64_t count, int32_t* out) const {
    int64_t counter = start / 4, end = counter + (count + 3) / 4, turn = ((counter >> 32) + 1) << 32;
    if (__builtin_expect(end > turn, 0)) {  // the counter's high word changes: once in 2**34 elements
      int64_t before = (turn - counter) * 4;
      int32_t rest[BUFFER];
      fill_same_high_word(counter, before, out);
      fill_same_high_word(turn, count - before, rest);
      memcpy(out + before, rest, (count - before) * sizeof *out);
      return;
    }
    fill_same_high_word(counter, count, out);
  }

 private:
  static constexpr uint64_t M0 = 0xD2511F53u;

  // Operands of the first three rounds, in which little is left to compute: two words of the counter are 0, and its
  // high word is the same number in all lanes, so that the first word after round 1 and its product are too.
  struct First {
    vuint64 k1, k2, k3;
  };

  INLINE First first_rounds(uint32_t high) const {
    uint64_t product = uint64_t(high ^ uint32_t(key_[0][0][0])) * M0;
    return {key_[0][1], vuint64{} + ((product >> 32) ^ key_[1][1][0]), vuint64{} + (uint32_t(product) ^ key_[2][1][0])};
  }

  static INLINE vuint64 counters() {  // in the order that the interleavings at the end of step() undo
    vuint64 c;
    for (int i = 0; i < LANES / 2; i++) c[i] = (i & 1) * (LANES / 4) + i / 2;
    return c;
  }

  void fill_same_high_word(int64_t counter, int64_t count, int32_t* out) const {
    First first = first_rounds(uint32_t(counter >> 32));
    // the products of the counters' low words, which do not wrap, grow by the same number from one vector to the next
    vuint64 products = (counters() + uint64_t(uint32_t(counter))) * M0;
    constexpr int K = SIDE_BY_SIDE;
    for (int64_t i = 0; i < count; i += K * STEP, products += uint64_t(K * LANES / 2) * M0)
      step<K>(products, first, out + i);
  }

  // The masks of K * STEP elements. The high half of a lane may hold anything: no instruction is spent on clearing it.
  template <int K>
  INLINE void step(vuint64 product, const First& first, int32_t* out) const {
    const vuint64 m0 = vuint64{} + M0, m1 = vuint64{} + 0xCD9E8D57u;
    vuint64 c0[K], c2[K], low1[K], low3[K], p[K], q[K];
#pragma GCC unroll 4
    for (int k = 0; k < K; k++, product += uint64_t(LANES / 2) * M0) {
      low1[k] = multiply_low_halves((product >> 32) ^ first.k1, m1);
      c0[k] = (low1[k] >> 32) ^ key_[1][0];
      c2[k] = product ^ first.k2;
    }
#pragma GCC unroll 8
    for (int i = 2; i < 10; i++) {
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) {
        p[k] = multiply_low_halves(c0[k], m0);
        q[k] = multiply_low_halves(c2[k], m1);
      }
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) {
        c0[k] = (q[k] >> 32) ^ (low1[k] ^ key_[i][0]);
        c2[k] = (p[k] >> 32) ^ (i == 2 ? first.k3 : low3[k] ^ key_[i][1]);
        low1[k] = q[k], low3[k] = p[k];
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
      vuint64 words01 = pair(c0[k], q[k]), words23 = pair(c2[k], p[k]), x, y;
#if VECTOR_BYTES == 64
      x = (vuint64)_mm512_unpacklo_epi64((__m512i)words01, (__m512i)words23);
      y = (vuint64)_mm512_unpackhi_epi64((__m512i)words01, (__m512i)words23);
#elif VECTOR_BYTES == 32
      x = (vuint64)_mm256_unpacklo_epi64((__m256i)words01, (__m256i)words23);
      y = (vuint64)_mm256_unpackhi_epi64((__m256i)words01, (__m256i)words23);
#else
      x = vuint64{words01[0], words23[0]};
      y = vuint64{words01[1], words23[1]};
#endif
      vint kept_x = kept(bits_as<vuint>(x)), kept_y = kept(bits_as<vuint>(y));
      memcpy(out + 2 * k * LANES, &kept_x, VECTOR_BYTES);
      memcpy(out + (2 * k + 1) * LANES, &kept_y, VECTOR_BYTES);
    }
  }

  static INLINE vuint64 pair(vuint64 low, vuint64 high) {
#if VECTOR_BYTES == 32
    return (vuint64)_mm256_blend_epi32((__m256i)low, (__m256i)(high << 32), 0xaa);
#else
    return (low & 0xffffffffu) | (high << 32);
#endif
  }

  INLINE vint kept(vuint words) const {
    vuint threshold = vuint{} + threshold_;
#if VECTOR_BYTES == 64
    return (vint)_mm512_movm_epi32(_mm512_cmpge_epu32_mask((__m512i)words, (__m512i)threshold));
#endif
    return (vint)((words > threshold ? words : threshold) == words);
  }

  vuint64 key_[10][2];
  uint32_t threshold_;
};

}  // namespace
}  // namespace fusedops

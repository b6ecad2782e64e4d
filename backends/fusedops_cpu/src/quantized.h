// Packed weights: the block formats of GGUF files, and their values as float32 vectors.
//
// A row is blocks one after another, and a block is runs of 32 weights. A format has WEIGHTS and BYTES of a block, and
//   template <class F> static void run(const uint8_t* block, int r, F f);
// which calls f(index, values) for the vectors of run r in order: lane i is the value of weight 32 * r + index + i,
// exactly as fusedops.quantization.dequantize has it. d and m are float16 numbers of a block, q the integer of a
// weight.
#pragma once

#include "api.h"
#include "vector.h"

namespace fusedops {
namespace {

INLINE vfloat to_floats(vint v) { return __builtin_convertvector(v, vfloat); }

// LANES bytes, without and with a sign.
INLINE vint load_bytes(const uint8_t* p) {
  vbyte b;
  memcpy(&b, p, sizeof b);
  return widen_8(b);
}
INLINE vint load_signed(const uint8_t* p) {
#if VECTOR_BYTES == 64
  return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif VECTOR_BYTES == 32
  return (vint)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return (load_bytes(p) ^ 128) - 128;
#endif
}

// The float16 number at p; the low lane of a vector, which has the conversion of every instruction set.
INLINE float half_at(const uint8_t* p) {
#if VECTOR_BYTES >= 32
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
#else
  vuint16 bits = {};
  memcpy(&bits, p, sizeof(uint16_t));
  return widen(bits, float16{})[0];
#endif
}

INLINE vint lane_numbers() {
  vint index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  return index;
}

constexpr int RUN = 32;

// Calls f(index, q) for 32 numbers of 4 bits: the low halves of 16 bytes, then the high ones.
template <class F>
INLINE void each_nibble(const uint8_t* data, F f) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += LANES) f(i, load_bytes(data + i) & 15);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += LANES) f(16 + i, load_bytes(data + i) >> 4);
}

// 16 where the bit of weight index + i is set, else 0.
INLINE vint fifth_bits(uint32_t bits, int index) {
  const vint bit = vint{} + int32_t(bits);
#if VECTOR_BYTES >= 32 || defined(__aarch64__)
  return ((bit >> (lane_numbers() + index)) & 1) << 4;
#else  // no shift by another count in each lane
  vint mask;
  for (int i = 0; i < LANES; i++) mask[i] = int32_t(1u << (index + i));
  return ((bit & mask) != 0) & 16;
#endif
}

struct Q8_0 {
  static constexpr int64_t WEIGHTS = 32, BYTES = 34;
  template <class F>
  INLINE static void run(const uint8_t* block, int, F f) {
    const float d = half_at(block);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i += LANES) f(i, to_floats(load_signed(block + 2 + i)) * d);
  }
};

struct Q4_0 {
  static constexpr int64_t WEIGHTS = 32, BYTES = 18;
  template <class F>
  INLINE static void run(const uint8_t* block, int, F f) {
    const float d = half_at(block);
    each_nibble(block + 2, [&](int i, vint q) __attribute__((always_inline)) { f(i, to_floats(q - 8) * d); });
  }
};

struct Q4_1 {
  static constexpr int64_t WEIGHTS = 32, BYTES = 20;
  template <class F>
  INLINE static void run(const uint8_t* block, int, F f) {
    const float d = half_at(block), m = half_at(block + 2);
    each_nibble(block + 4, [&](int i, vint q) __attribute__((always_inline)) { f(i, to_floats(q) * d + m); });
  }
};

struct Q5_0 {
  static constexpr int64_t WEIGHTS = 32, BYTES = 22;
  template <class F>
  INLINE static void run(const uint8_t* block, int, F f) {
    const float d = half_at(block);
    uint32_t high;
    memcpy(&high, block + 2, sizeof high);
    each_nibble(block + 6, [&](int i, vint q)
                               __attribute__((always_inline)) { f(i, to_floats((q | fifth_bits(high, i)) - 16) * d); });
  }
};

struct Q5_1 {
  static constexpr int64_t WEIGHTS = 32, BYTES = 24;
  template <class F>
  INLINE static void run(const uint8_t* block, int, F f) {
    const float d = half_at(block), m = half_at(block + 2);
    uint32_t high;
    memcpy(&high, block + 4, sizeof high);
    each_nibble(block + 8, [&](int i, vint q)
                               __attribute__((always_inline)) { f(i, to_floats(q | fifth_bits(high, i)) * d + m); });
  }
};

// The scale and the minimum of run i of 32 weights of Q4_K and Q5_K, numbers of 6 bits in 12 bytes. Bytes 0 to 3 and 4
// to 7 have those of the first four runs, and in their high 2 bits the high bits of the last four, whose low 4 bits are
// the halves of bytes 8 to 11.
INLINE void scale_and_minimum(const uint8_t* packed, int i, float& scale, float& minimum) {
  if (i < 4) {
    scale = float(packed[i] & 63);
    minimum = float(packed[i + 4] & 63);
  } else {
    scale = float((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
    minimum = float((packed[i + 4] >> 4) | (packed[i] >> 6) << 4);
  }
}

struct Q4_K {
  static constexpr int64_t WEIGHTS = 256, BYTES = 144;
  template <class F>
  INLINE static void run(const uint8_t* block, int r, F f) {
    float scale, minimum;
    scale_and_minimum(block + 4, r, scale, minimum);
    scale *= half_at(block), minimum *= half_at(block + 2);
    const uint8_t* data = block + 16 + r / 2 * RUN;  // the low halves of 32 bytes are one run, the high ones the next
    const int shift = r % 2 * 4;
#pragma GCC unroll 8
    for (int i = 0; i < RUN; i += LANES) f(i, to_floats((load_bytes(data + i) >> shift) & 15) * scale - minimum);
  }
};

struct Q5_K {
  static constexpr int64_t WEIGHTS = 256, BYTES = 176;
  template <class F>
  INLINE static void run(const uint8_t* block, int r, F f) {
    float scale, minimum;
    scale_and_minimum(block + 4, r, scale, minimum);
    scale *= half_at(block), minimum *= half_at(block + 2);
    const uint8_t *data = block + 48 + r / 2 * RUN, *fifth = block + 16;  // bit r of byte i: of weight i of run r
    const int shift = r % 2 * 4;
#pragma GCC unroll 8
    for (int i = 0; i < RUN; i += LANES) {
      const vint low = (load_bytes(data + i) >> shift) & 15, high = (load_bytes(fifth + i) >> r) & 1;
      f(i, to_floats(low | high << 4) * scale - minimum);
    }
  }
};

struct Q6_K {
  static constexpr int64_t WEIGHTS = 256, BYTES = 210;
  template <class F>
  INLINE static void run(const uint8_t* block, int r, F f) {
    // of four runs, the low 4 bits are the low halves of 64 bytes, then the high ones; the high 2 bits are in 32 bytes
    const uint8_t *low = block + r / 4 * 64 + r % 2 * RUN, *high = block + 128 + r / 4 * RUN;
    const int8_t* scales = (const int8_t*)block + 192 + 2 * r;
    const float d = half_at(block + 208), first = d * float(scales[0]), second = d * float(scales[1]);
    const int low_shift = r % 4 / 2 * 4, high_shift = r % 4 * 2;
#pragma GCC unroll 8
    for (int i = 0; i < RUN; i += LANES) {
      const vint q = (load_bytes(low + i) >> low_shift) & 15, top = (load_bytes(high + i) >> high_shift) & 3;
      f(i, to_floats((q | top << 4) - 32) * (i < 16 ? first : second));
    }
  }
};

// Calls f with a value of the format's type.
template <class F>
auto with_format(int64_t format, F f) {
  switch (format) {
    case 0:
      return f(Q8_0{});
    case 1:
      return f(Q4_0{});
    case 2:
      return f(Q4_1{});
    case 3:
      return f(Q5_0{});
    case 4:
      return f(Q5_1{});
    case 5:
      return f(Q4_K{});
    case 6:
      return f(Q5_K{});
    default:
      return f(Q6_K{});
  }
}

// The float32 values of the weights [first, first + count) of a row; whole blocks.
template <class Format>
NOINLINE void unpack(const uint8_t* row, int64_t first, int64_t count, float* to) {
  const uint8_t* block = row + first / Format::WEIGHTS * Format::BYTES;
  for (int64_t at = 0; at < count; at += Format::WEIGHTS, block += Format::BYTES)
    for (int r = 0; r < Format::WEIGHTS / RUN; r++)
      Format::run(block, r, [=](int i, vfloat w) __attribute__((always_inline)) { store(to + at + r * RUN + i, w); });
}

}  // namespace
}  // namespace fusedops

// Packed weights: the block formats of GGUF files, and their values as float32 vectors.
//
// A row is blocks one after another, of WEIGHTS weights in BYTES bytes, and a block is chunks of CHUNK weights. A
// format has a type Block, with what all chunks of a block need, and a type Chunk(block, number), whose at(i) is a
// vector: lane l is the value of weight i + l of the chunk, exactly as fusedops.quantization.dequantize has it. d and m
// are float16 numbers of a block, q the integer of a weight.
#pragma once

#include "api.h"
#include "simd/codes.h"
#include "simd/vector.h"

namespace fusedops {
namespace {

// The order of the codes of 32 columns, see tile/scaled.h.
enum class Order { PLAIN, PAIRS, SWAPPED_PAIRS, EIGHTS };

INLINE vfloat to_floats(vint v) { return __builtin_convertvector(v, vfloat); }

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

struct Affine {
  float d, m;
  INLINE vfloat operator()(vfloat q) const { return q * d + m; }
};
// The float16 numbers at p, of d, and after it, of m.
INLINE Affine halves_at(const uint8_t* p) {
#if VECTOR_BYTES >= 32
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
  return {both[0], both[1]};
#else
  return {half_at(p), half_at(p + 2)};
#endif
}

INLINE vint lane_numbers() {
  vint index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  return index;
}

// The values of the numbers of 4 bits as a function of them: one vector is the table of all 16, where it has as many
// lanes. Nothing but the low 4 bits of an index counts.
template <class Value>
class FourBits {
 public:
#if VECTOR_BYTES == 64
  INLINE explicit FourBits(Value value) : table_(bits_as<vuint>(value(to_floats(lane_numbers())))) {}
  INLINE vfloat at(vint q) const { return bits_as<vfloat>(selected(table_, bits_as<vuint>(q))); }

 private:
  vuint table_;
#else
  INLINE explicit FourBits(Value value) : value_(value) {}
  INLINE vfloat at(vint q) const { return value_(to_floats(q & 15)); }

 private:
  Value value_;
#endif
};

// The same of 5 bits, the fifth of which are bits of their own.
template <class Value>
class FiveBits {
 public:
#if VECTOR_BYTES == 64
  INLINE explicit FiveBits(Value value)
      : low_((__m512)value(to_floats(lane_numbers()))), high_((__m512)value(to_floats(lane_numbers() + 16))) {}
  // Bit i of `fifth` is that of lane 0, and so on.
  INLINE vfloat at(vint q, uint32_t fifth, int i = 0) const {
    const __m512 low = _mm512_permutexvar_ps((__m512i)q, low_);
    return (vfloat)_mm512_mask_permutexvar_ps(low, __mmask16(fifth >> i), (__m512i)q, high_);
  }

 private:
  __m512 low_, high_;
#else
  INLINE explicit FiveBits(Value value) : value_(value) {}
  INLINE vfloat at(vint q, uint32_t fifth, int i) const { return at(q, fifth_bits(fifth, i)); }
  INLINE vfloat at(vint q, vint fifth) const { return value_(to_floats((q & 15) | fifth)); }  // each 0 or 16

 private:
  // 16 where bit i + lane is set, else 0.
  INLINE static vint fifth_bits(uint32_t bits, int i) {
    const vint bit = vint{} + int32_t(bits);
#if VECTOR_BYTES >= 32 || defined(__aarch64__)
    return ((bit >> (lane_numbers() + i)) & 1) << 4;
#else  // no shift by another count in each lane
    vint mask;
    for (int lane = 0; lane < LANES; lane++) mask[lane] = int32_t(1u << (i + lane));
    return ((bit & mask) != 0) & 16;
#endif
  }
  Value value_;
#endif
};

template <int ZERO>
struct Centred {
  float d;
  INLINE vfloat operator()(vfloat q) const { return (q - float(ZERO)) * d; }
};

// 32 numbers of 4 bits in 16 bytes are the low halves of the bytes, then the high ones.
INLINE vint nibbles(const uint8_t* data, int i) {
  return i < 16 ? load_bytes(data + i) : load_bytes(data + i - 16) >> 4;
}
INLINE uint32_t bits_at(const uint8_t* p) {
  uint32_t bits;
  memcpy(&bits, p, sizeof bits);
  return bits;
}

// A format of blocks that have all of their weights' numbers. Runs of RUN weights have one d and one m.
template <int OF_BLOCK, int BYTES_OF_BLOCK, bool WITH_M = false, int OF_RUN = 32>
struct BlocksOf {
  static constexpr int WEIGHTS = OF_BLOCK, BYTES = BYTES_OF_BLOCK, RUN = OF_RUN;
  static constexpr Order ORDER = Order::PLAIN;
  static constexpr bool HAS_M = WITH_M;
  // d and m of each run, and a change of a block by which its values become the integers themselves: of blocks that
  // begin with d, and m after it.
  INLINE static void numbers_of(const uint8_t* block, Affine* runs) {
    runs[0] = WITH_M ? halves_at(block) : Affine{half_at(block), 0};
  }
  INLINE static void set_to_integers(uint8_t* block) {
    const uint16_t one_and_zero[] = {0x3c00, 0};
    memcpy(block, one_and_zero, WITH_M ? 4 : 2);
  }
  template <int N>
  struct Memory {};
  // N rows of the weight, `step` rows apart, from column `first` on.
  template <int N>
  class Rows {
   public:
    INLINE Rows(const PackedWeight& weight, int64_t row, int64_t step, int64_t first, int64_t, Memory<N>*)
        : row_bytes_(step * weight.row_bytes),
          ahead_(weight.row_bytes),
          from_(weight.codes + row * weight.row_bytes + first / WEIGHTS * BYTES) {}
    INLINE const uint8_t* block(int n, int64_t b) const { return from_ + n * row_bytes_ + b * BYTES; }
    INLINE void prefetch(int n, int64_t b) const {
      for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from_ + n * ahead_ + b * BYTES + i);
    }

   private:
    int64_t row_bytes_, ahead_;
    const uint8_t* from_;
  };
};

struct Q8_0 : BlocksOf<32, 34> {
  static constexpr int CHUNK = 32;
  using Block = const uint8_t*;
  struct Chunk {
    const uint8_t* data;
    float d;
    INLINE Chunk(const Block& block, int) : data(block + 2), d(half_at(block)) {}
    INLINE vfloat at(int i) const { return to_floats(load_signed(data + i)) * d; }
  };
};

struct Q4_0 : BlocksOf<32, 18> {
  static constexpr int CHUNK = 32;
  using Block = const uint8_t*;
  struct Chunk {
    const uint8_t* data;
    FourBits<Centred<8>> values;
    INLINE Chunk(const Block& block, int) : data(block + 2), values(Centred<8>{half_at(block)}) {}
    INLINE vfloat at(int i) const { return values.at(nibbles(data, i)); }
  };
};

struct Q4_1 : BlocksOf<32, 20, true> {
  static constexpr int CHUNK = 32;
  using Block = const uint8_t*;
  struct Chunk {
    const uint8_t* data;
    FourBits<Affine> values;
    INLINE Chunk(const Block& block, int) : data(block + 4), values(halves_at(block)) {}
    INLINE vfloat at(int i) const { return values.at(nibbles(data, i)); }
  };
};

struct Q5_0 : BlocksOf<32, 22> {
  static constexpr int CHUNK = 32;
  using Block = const uint8_t*;
  struct Chunk {
    const uint8_t* data;
    uint32_t fifth;
    FiveBits<Centred<16>> values;
    INLINE Chunk(const Block& block, int)
        : data(block + 6), fifth(bits_at(block + 2)), values(Centred<16>{half_at(block)}) {}
    INLINE vfloat at(int i) const { return values.at(nibbles(data, i), fifth, i); }
  };
};

struct Q5_1 : BlocksOf<32, 24, true> {
  static constexpr int CHUNK = 32;
  using Block = const uint8_t*;
  struct Chunk {
    const uint8_t* data;
    uint32_t fifth;
    FiveBits<Affine> values;
    INLINE Chunk(const Block& block, int) : data(block + 8), fifth(bits_at(block + 4)), values(halves_at(block)) {}
    INLINE vfloat at(int i) const { return values.at(nibbles(data, i), fifth, i); }
  };
};

// The scales and minima of the eight runs of 32 weights of Q4_K and Q5_K, numbers of 6 bits in 12 bytes, times two
// float16 numbers before them. Bytes 0 to 3 and 4 to 7 have those of the first four runs, and in their high 2 bits the
// high bits of the last four, whose low 4 bits are the halves of bytes 8 to 11.
struct ScalesAndMinima {
  const uint8_t* block;
  float of_run[16];  // the scales, then the minima with the other sign

  INLINE explicit ScalesAndMinima(const uint8_t* block) : block(block) {
    const uint32_t a = bits_at(block + 4), b = bits_at(block + 8), c = bits_at(block + 12);
    const uint32_t bits[4] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030), b & 0x3f3f3f3f,
                              (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
    uint8_t numbers[16];
    memcpy(numbers, bits, sizeof bits);
    const vfloat d = all(half_at(block)), m = all(-half_at(block + 2));
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += LANES)
      store(of_run + i, to_floats(load_bytes(numbers + i)) * (lane_numbers() + i < 8 ? d : m));
  }
  INLINE Affine of(int run) const { return {of_run[run], of_run[8 + run]}; }

  INLINE static void numbers_of(const uint8_t* block, Affine* runs) {
    const ScalesAndMinima all(block);
    for (int i = 0; i < 8; i++) runs[i] = all.of(i);
  }
  INLINE static void set_to_integers(uint8_t* block) {
    const uint32_t bits[] = {0x3c00, 0x01010101, 0, 0x01010101};
    memcpy(block, bits, sizeof bits);
  }
};

struct Q4_K : BlocksOf<256, 144, true> {
  static constexpr int CHUNK = 64;
  using Block = ScalesAndMinima;
  INLINE static void numbers_of(const uint8_t* block, Affine* runs) { Block::numbers_of(block, runs); }
  INLINE static void set_to_integers(uint8_t* block) { Block::set_to_integers(block); }
  struct Chunk {  // the low halves of 32 bytes are one run, the high ones the next
    const uint8_t* data;
    FourBits<Affine> first, second;
    INLINE Chunk(const Block& block, int c)
        : data(block.block + 16 + 32 * c), first(block.of(2 * c)), second(block.of(2 * c + 1)) {}
    INLINE vfloat at(int i) const {
      return i < 32 ? first.at(load_bytes(data + i)) : second.at(load_bytes(data + i - 32) >> 4);
    }
  };
};

struct Q5_K : BlocksOf<256, 176, true> {
  static constexpr int CHUNK = 64;
  using Block = ScalesAndMinima;
  INLINE static void numbers_of(const uint8_t* block, Affine* runs) { Block::numbers_of(block, runs); }
  INLINE static void set_to_integers(uint8_t* block) { Block::set_to_integers(block); }
  struct Chunk {  // as of Q4_K; bit r of byte i is the fifth one of weight i of run r
    const uint8_t *data, *fifth;
    int c;
    FiveBits<Affine> first, second;
    INLINE Chunk(const Block& block, int c)
        : data(block.block + 48 + 32 * c),
          fifth(block.block + 16),
          c(c),
          first(block.of(2 * c)),
          second(block.of(2 * c + 1)) {}
    INLINE vfloat at(int i) const {
      return i < 32 ? first.at(load_bytes(data + i), fifth_of(i, 2 * c))
                    : second.at(load_bytes(data + i - 32) >> 4, fifth_of(i - 32, 2 * c + 1));
    }

   private:
#if VECTOR_BYTES == 64
    INLINE uint32_t fifth_of(int i, int run) const {
      return _mm_test_epi8_mask(_mm_loadu_si128((const __m128i*)(fifth + i)), _mm_set1_epi8(char(1 << run)));
    }
#else
    INLINE vint fifth_of(int i, int run) const { return ((load_bytes(fifth + i) >> run) & 1) << 4; }
#endif
  };
};

struct Q6_K : BlocksOf<256, 210, false, 16> {
  static constexpr int CHUNK = 64;
  INLINE static void numbers_of(const uint8_t* block, Affine* runs) {
    for (int i = 0; i < 16; i++) runs[i] = {float(int8_t(block[192 + i])) * half_at(block + 208), 0};
  }
  INLINE static void set_to_integers(uint8_t* block) {
    memset(block + 192, 1, 16);
    BlocksOf::set_to_integers(block + 208);
  }
  // The numbers as bytes, and the scale of each 16.
  struct Block {
    uint8_t q[256];
    float scales[16];

    INLINE explicit Block(const uint8_t* block) {
      // of four runs of 32, the low 4 bits are the low halves of 64 bytes, then the high ones; the high 2 bits are in
      // 32 bytes. Shifts move bits to the next byte too, where no mask has them.
      constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f, HIGH = 0x3030303030303030;
      for (int half = 0; half < 2; half++, block += 64)
#pragma GCC unroll 2
        for (int i = 0; i < 32; i += int(sizeof(vbits))) {
          const vbits a = load_bits(block + i), b = load_bits(block + 32 + i);
          const vbits high = load_bits(block + 128 - 32 * half + i);
          uint8_t* to = q + 128 * half + i;
          store_centred(to, (a & LOW) | (high << 4 & HIGH));
          store_centred(to + 32, (b & LOW) | (high << 2 & HIGH));
          store_centred(to + 64, (a >> 4 & LOW) | (high & HIGH));
          store_centred(to + 96, (b >> 4 & LOW) | (high >> 2 & HIGH));
        }
      block += 64;  // the scales
      const float d = half_at(block + 16);
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += LANES) store(scales + i, to_floats(load_signed(block + i)) * d);
    }

   private:
    typedef uint64_t vbits __attribute__((vector_size(VECTOR_BYTES < 32 ? VECTOR_BYTES : 32)));
    typedef uint8_t vbytes __attribute__((vector_size(sizeof(vbits))));
    INLINE static vbits load_bits(const uint8_t* p) {
      vbits bits;
      memcpy(&bits, p, sizeof bits);
      return bits;
    }
    INLINE static void store_centred(uint8_t* to, vbits bits) {
      const vbytes centred = bits_as<vbytes>(bits) - 32;
      memcpy(to, &centred, sizeof centred);
    }
  };
  struct Chunk {
    const uint8_t* q;
    const float* scales;
    INLINE Chunk(const Block& block, int c) : q(block.q + CHUNK * c), scales(block.scales + CHUNK / 16 * c) {}
    INLINE vfloat at(int i) const { return to_floats(load_signed(q + i)) * scales[i / 16]; }
  };
};

// Calls f with a value of the format's type.
template <class F>
auto with_block_format(int64_t format, F f) {
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

}  // namespace
}  // namespace fusedops

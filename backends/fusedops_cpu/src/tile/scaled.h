// Packed weights whose scales are a tensor of their own, and the formats of GGUF with codes of E2M1: their values as
// float32 vectors, as tile/quantized.h has those of the other formats.
//
// The two codes of a byte are often those of neighbouring columns. A vector has the low halves of bytes, or the high
// ones: so rows of x are put in the order of the codes first (Order), which changes no product, and gradients back.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rows.h"
#include "tile/quantized.h"

namespace fusedops {
namespace {

// The column of each number of 32 in the order of the codes.
template <Order ORDER>
INLINE int column_of(int i) {
  if (ORDER == Order::PAIRS) return 2 * (i % 16) + i / 16;
  if (ORDER == Order::SWAPPED_PAIRS) return 2 * (i % 16) + 1 - i / 16;
  if (ORDER == Order::EIGHTS) return (i / 8 == 1 || i / 8 == 2 ? 24 - i / 8 * 8 : i / 8 * 8) + i % 8;
  return i;
}
// To the order of the codes, or back from it: whole 32 numbers. `from` and `to` may be the same.
template <Order ORDER, bool BACK>
NOINLINE void reorder(const float* from, float* to, int64_t count) {
  for (int64_t at = 0; at < count; at += 32) {
    float numbers[32];
    memcpy(numbers, from + at, sizeof numbers);
    for (int i = 0; i < 32; i++) {
      const int column = column_of<ORDER>(i);
      to[at + (BACK ? column : i)] = numbers[BACK ? i : column];
    }
  }
}

constexpr int64_t PART = 1024;  // columns whose scales are read at once

// Some scales that follow each other, through a function; up to LANES numbers more are written.
template <class F>
INLINE void scales_at(const PackedWeight& weight, int64_t index, int64_t count, float* scales, F scaled) {
  const int64_t dtype = weight.scale_dtype;
  if (dtype != E8M0 && dtype != E4M3)
    return with_dtype(dtype, [=](auto element) {
      auto* from = (const decltype(element)*)weight.scales + index;
      each(count, [=](int64_t i, auto lanes) { store(scales + i, scaled(load(from + i, lanes)), lanes); });
    });
  const uint8_t* from = (const uint8_t*)weight.scales + index;
  const auto some = [=](int64_t i, vint code) {
    if (dtype == E8M0) {
      const vint bits = code == 0 ? vint{} + 0x00400000 : code == 255 ? vint{} + 0x7fc00000 : code << 23;
      return store(scales + i, scaled(bits_as<vfloat>(bits)));
    }
    const vint half = (code << 7 & 0x3f80) | (code << 8 & 0x8000);
    const vfloat number = widen(narrow_16(bits_as<vuint>(half)), float16{}) * 256.0f;
    store(scales + i, scaled((code & 0x7f) == 0x7f ? all(bits_as<float>(uint32_t(0x7fc00000))) : number));
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) some(i, load_bytes(from + i));
  if (i < count) some(i, load_bytes(from + i, int(count - i), 127));  // 1, and NaN: a product of neither is subnormal
}

// Writes the numbers of the groups of [first, first + count), each for its parts of PER columns, of which `left`
// columns are of the first; up to LANES numbers more are written.
template <int PER, class T>
INLINE void each_group(const T* numbers, int64_t group, int64_t left, int64_t count, float* to) {
  for (int64_t at = 0; at < count; numbers++, left = group) {
    const int64_t n = std::min(left, count - at) / PER;
    const vfloat value = all(float(*numbers));
    for (int64_t i = 0; i < n; i += LANES) store(to + i, value);
    to += n, at += n * PER;
  }
}

#if VECTOR_BYTES >= 32
// The same from a vector that has all of the numbers, for groups of 2**n parts, or one group.
template <int PER>
INLINE void each_group(vfloat numbers, int64_t group, int64_t left, int64_t count, float* to) {
  const int bits = left >= count ? 31 : __builtin_ctzll(group / PER);
  const vint first = lane_numbers() + int(left >= count ? 0 : (group - left) / PER);
  for (int64_t i = 0; i < count / PER; i += LANES)
    store(to + i, bits_as<vfloat>(selected(bits_as<vuint>(numbers), bits_as<vuint>((first + int(i)) >> bits))));
}
#endif

// The line of the scales of a row.
INLINE int64_t line_of(const PackedWeight& weight, int64_t row) {
  return weight.scale_rows <= 1 ? row * weight.scale_rows : row / weight.scale_rows;
}

// The scales, each of PER columns, of [first, first + count) of a row, times `factor`; and the codes of 0. A row of
// these takes about as long as the products of a fifth of its codes with one row of x.
template <int PER>
NOINLINE void scales_of_row(const PackedWeight& weight, int64_t row, int64_t first, int64_t count, float factor,
                            float* scales, float* zeros) {
  const int64_t group = weight.group;
  const bool alone = group == PER;  // without divisions by a group, which take about as long as the scales
  const int64_t number = alone ? first / PER : group >= count && first < group ? 0 : first / group;
  const int64_t begin = line_of(weight, row) * weight.groups + number, left = (number + 1) * group - first;
  const int64_t groups = alone ? count / PER : left >= count ? 1 : 1 + divide_up(count - left, group);
  const float divisor = weight.global_scale ? *weight.global_scale : 1.0f;
  const auto scaled = [=](vfloat v) {
    if (divisor != 1) v /= all(divisor);
    return factor == 1 ? v : v * factor;
  };
  const bool of_numbers = weight.scale_dtype != E8M0 && weight.scale_dtype != E4M3;
  const auto of_power = [=] { return ((group / PER) & (group / PER - 1)) == 0; };
  if (VECTOR_BYTES >= 32 && of_numbers && groups <= LANES && (groups == 1 || of_power())) {
#if VECTOR_BYTES >= 32
    const vfloat numbers = with_dtype(weight.scale_dtype, [&](auto element) {
      return load((const decltype(element)*)weight.scales + begin, Part{int(groups)});
    });
    each_group<PER>(scaled(numbers), group, left, count, scales);
#endif
  } else {
    float buffer[PART / PER + LANES];
    float* numbers = alone ? scales : buffer;
    scales_at(weight, begin, groups, numbers, scaled);
    if (!alone) each_group<PER>(numbers, group, left, count, scales);
  }
  if (!zeros) return;
  if (weight.zeros) {
    each_group<PER>(weight.zeros + begin, group, left, count, zeros);
  } else {
    for (int64_t i = 0; i < count / PER; i += LANES) store(zeros + i, all(8.0f));
  }
}

// Codes of 4 bits as integers: (q - zero) * scale.
struct CentredAt {
  float zero, d;
  INLINE vfloat operator()(vfloat q) const { return (q - zero) * d; }
};
struct Int4Codes {
  static constexpr int BYTES = 16, PER = 32;
  static constexpr Order ORDER = Order::PAIRS;
  static constexpr bool HAS_ZEROS = true, HAS_NAN = false;
  static constexpr float FACTOR = 1;
  struct Chunk {
    const uint8_t* codes;
    FourBits<CentredAt> values;
    INLINE Chunk(const uint8_t* codes, const float* scales, float zero)
        : codes(codes), values(CentredAt{zero, *scales}) {}
    INLINE vfloat at(int i) const { return values.at(nibbles(codes, i)); }
  };
};

// Codes of 4 bits as E2M1: twice its numbers are integers, so the scales are halved.
alignas(16) constexpr int8_t E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
template <int SCALES>
struct E2M1Codes {
  static constexpr int BYTES = 16, PER = 32 / SCALES;
  static constexpr Order ORDER = Order::PAIRS;
  static constexpr bool HAS_ZEROS = false, HAS_NAN = false;
  static constexpr float FACTOR = 0.5f;
#if VECTOR_BYTES == 64
  struct Chunk {
    const uint8_t* codes;
    const float* scales;
    vuint table;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0)
        : codes(codes), scales(scales), table(bits_as<vuint>(numbers() * (SCALES == 1 ? *scales : 1.0f))) {}
    INLINE static vfloat numbers() { return to_floats(load_signed((const uint8_t*)E2M1_TWICE)); }
    INLINE vfloat at(int i) const {
      const vfloat values = bits_as<vfloat>(selected(table, bits_as<vuint>(nibbles(codes, i))));
      if constexpr (SCALES == 1) return values;
      return values * (lane_numbers() < 8 ? all(scales[0]) : all(scales[1]));  // of eight bytes
    }
  };
#else
  struct Chunk {
    int8_t q[32];  // the low halves of the bytes, then the high ones
    const float* scales;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0) : scales(scales) {
#if VECTOR_BYTES >= 32
      const __m128i table = _mm_load_si128((const __m128i*)E2M1_TWICE), low = _mm_set1_epi8(15);
      const __m128i bytes = _mm_loadu_si128((const __m128i*)codes);
      _mm_storeu_si128((__m128i*)q, _mm_shuffle_epi8(table, _mm_and_si128(bytes, low)));
      _mm_storeu_si128((__m128i*)(q + 16), _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
#else
      for (int i = 0; i < 16; i++) q[i] = E2M1_TWICE[codes[i] & 15], q[16 + i] = E2M1_TWICE[codes[i] >> 4];
#endif
    }
    INLINE vfloat at(int i) const {
      const vfloat integers = to_floats(load_signed((const uint8_t*)q + i));
      if constexpr (SCALES == 1) return integers * *scales;
      return integers * scales[i / 8 % 2];  // of eight bytes
    }
  };
#endif
};

// Codes of 4 bits as indices of any 16 numbers.
alignas(64) constexpr float NF4_NUMBERS[16] = {
    -1.0f,         -0.696192801f, -0.525073051f, -0.394917488f, -0.284441382f, -0.184773430f, -0.0910500363f, 0.0f,
    0.0795802996f, 0.160930201f,  0.246112302f,  0.337915242f,  0.440709829f,  0.562617004f,  0.722956836f,   1.0f};
struct Nf4Codes {
  static constexpr int BYTES = 16, PER = 32;
  static constexpr Order ORDER = Order::SWAPPED_PAIRS;
  static constexpr bool HAS_ZEROS = false, HAS_NAN = false;
  static constexpr float FACTOR = 1;
  struct Chunk {
    const uint8_t* codes;
#if VECTOR_BYTES == 64
    vuint table;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0)
        : codes(codes), table(bits_as<vuint>(load(NF4_NUMBERS) * *scales)) {}
    INLINE vfloat at(int i) const { return bits_as<vfloat>(selected(table, bits_as<vuint>(nibbles(codes, i)))); }
#elif VECTOR_BYTES == 32
    __m256 low, high;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0)
        : codes(codes), low((__m256)(load(NF4_NUMBERS) * *scales)), high((__m256)(load(NF4_NUMBERS + 8) * *scales)) {}
    INLINE vfloat at(int i) const {
      const __m256i q = (__m256i)nibbles(codes, i);
      const __m256 top = (__m256)_mm256_slli_epi32(q, 28);
      return (vfloat)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, q), _mm256_permutevar8x32_ps(high, q), top);
    }
#else
    float d;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0) : codes(codes), d(*scales) {}
    INLINE vfloat at(int i) const {
      const vint q = nibbles(codes, i) & 15;
      vfloat numbers;
      for (int lane = 0; lane < LANES; lane++) numbers[lane] = NF4_NUMBERS[q[lane]];
      return numbers * d;
    }
#endif
  };
};

// Codes of e4m3, read as 2**-8 of their numbers.
struct Fp8Codes {
  static constexpr int BYTES = 32, PER = 32;
  static constexpr Order ORDER = Order::PLAIN;
  static constexpr bool HAS_ZEROS = false, HAS_NAN = true;
  static constexpr float FACTOR = 256;
  INLINE static bool has_nan(const uint8_t* codes) {
    uint64_t found = 0;
    for (int i = 0; i < 4; i++) {
      uint64_t bytes;
      memcpy(&bytes, codes + 8 * i, sizeof bytes);
      const uint64_t zero = ~(bytes | 0x8080808080808080);  // a byte of 0 for each NaN
      found |= (zero - 0x0101010101010101) & ~zero & 0x8080808080808080;
    }
    return found;
  }
  // True where one of 32 * count codes is NaN, or where no vectors search for it.
  NOINLINE static bool may_have_nan(const uint8_t* codes, int64_t count) {
#if VECTOR_BYTES == 64
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    __m512i most = sign;
#pragma GCC unroll 4
    for (int64_t i = 0; i < count / 2; i++)
      most = _mm512_max_epu8(most, _mm512_or_si512(_mm512_loadu_si512(codes + 64 * i), sign));
    const __m256i last = _mm256_loadu_si256((const __m256i*)codes + (count - 1));
    most = _mm512_max_epu8(most, _mm512_or_si512(_mm512_zextsi256_si512(last), sign));
    return _mm512_cmpeq_epi8_mask(most, _mm512_set1_epi8(-1));
#elif VECTOR_BYTES == 32
    const __m256i sign = _mm256_set1_epi8(char(0x80));
    __m256i most = sign;
    for (int64_t i = 0; i < count; i++)
      most = _mm256_max_epu8(most, _mm256_or_si256(_mm256_loadu_si256((const __m256i*)codes + i), sign));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8(-1)));
#else
    return true;
#endif
  }
  // Makes the scale of each 32 codes with a NaN NaN: a sum with it is.
  INLINE static void mark_nan(const uint8_t* codes, int64_t count, float* scales) {
    if (!may_have_nan(codes, count)) return;
    for (int64_t i = 0; i < count; i++)
      if (has_nan(codes + 32 * i)) scales[i] = bits_as<float>(uint32_t(0x7fc00000));
  }
  struct Chunk {
    float d;
#if VECTOR_BYTES == 64
    __m512i halves;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0) : d(*scales) {
      const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes));
      halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(short(0xbfff)));
    }
    INLINE vfloat at(int i) const { return number(i) * d; }
    INLINE vfloat number(int i) const {  // 2**-8 of it
      const __m256i half = i ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves);
      return (vfloat)_mm512_cvtph_ps(half);
    }
#else
    const uint8_t* codes;
    INLINE Chunk(const uint8_t* codes, const float* scales, float = 0) : d(*scales), codes(codes) {}
    INLINE vfloat at(int i) const { return small_e4m3(codes + i) * d; }
#endif
  };
};

// A format with a tensor of scales: blocks of 32 columns, which is a part of each group.
template <class Codes>
struct Scaled : Codes {
  static constexpr int WEIGHTS = 32, CHUNK = 32;
  static constexpr int64_t SCALES = PART / Codes::PER, BLOCK_SCALES = 32 / Codes::PER;
  struct Block {
    const uint8_t* codes;
    const float* scales;
    float zero;
  };
  struct Chunk : Codes::Chunk {
    INLINE Chunk(const Block& block, int) : Codes::Chunk(block.codes, block.scales, block.zero) {}
  };
  // What N rows have in memory: not in Rows, which stays in registers.
  template <int N>
  struct Memory {
    float scales[N][SCALES + LANES], zeros[N][Codes::HAS_ZEROS ? SCALES + LANES : 1];
  };
  // N rows of the weight, `step` rows apart, from column `first` on: at most PART columns.
  template <int N>
  class Rows {
   public:
    INLINE Rows(const PackedWeight& weight, int64_t row, int64_t step, int64_t first, int64_t count, Memory<N>* memory)
        : row_bytes_(step * weight.row_bytes),
          ahead_(weight.row_bytes),
          from_(weight.codes + row * weight.row_bytes + first / 32 * Codes::BYTES),
          scales_(memory->scales[0]),
          zeros_(memory->zeros[0]) {
      for (int n = 0; n < N; n++) {
        if (n && weight.scale_rows != 1 && !Codes::HAS_ZEROS &&
            line_of(weight, row + n * step) == line_of(weight, row + (n - 1) * step))
          memcpy(memory->scales[n], memory->scales[n - 1], sizeof memory->scales[n]);
        else
          scales_of_row<Codes::PER>(weight, row + n * step, first, count, Codes::FACTOR, memory->scales[n],
                                    Codes::HAS_ZEROS ? memory->zeros[n] : nullptr);
      }
      // of rows that are added up; one row alone is unpacked
      if constexpr (Codes::HAS_NAN && N > 1)
        for (int n = 0; n < N; n++) Codes::mark_nan(from_ + n * row_bytes_, count / 32, memory->scales[n]);
    }
    INLINE Block block(int n, int64_t b) const {
      return {from_ + n * row_bytes_ + b * Codes::BYTES, scales_ + n * (SCALES + LANES) + b * BLOCK_SCALES,
              Codes::HAS_ZEROS ? zeros_[n * (SCALES + LANES) + b] : 0.0f};
    }
    INLINE void prefetch(int n, int64_t b) const {
      if (b % (64 / Codes::BYTES) == 0) __builtin_prefetch(from_ + n * ahead_ + b * Codes::BYTES);
    }

   private:
    int64_t row_bytes_, ahead_;
    const uint8_t* from_;
    const float *scales_, *zeros_;
  };
};

// Twice 2**(e - 128), that is 2**(e - 127), of a byte is a scale of E2M1; of gguf no byte is NaN.
struct MXFP4_GGUF : BlocksOf<32, 17> {
  static constexpr Order ORDER = Order::PLAIN;
  struct Block {
    const uint8_t* codes;
    float scale;
    INLINE explicit Block(const uint8_t* block) : codes(block + 1) {
      const uint32_t e = *block, bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
      scale = bits_as<float>(bits);
    }
  };
  static constexpr int CHUNK = 32;
  struct Chunk : E2M1Codes<1>::Chunk {
    INLINE Chunk(const Block& block, int) : E2M1Codes<1>::Chunk(block.codes, &block.scale) {}
  };
};

// Four bytes of unsigned e4m3, each of the 8 bytes of a run, whose low halves come first.
struct NVFP4_GGUF : BlocksOf<64, 36> {
  static constexpr Order ORDER = Order::EIGHTS;
  struct Block {
    const uint8_t* codes;
    float scales[4];
    INLINE explicit Block(const uint8_t* block) : codes(block + 4) {
      for (int i = 0; i < 4; i++) scales[i] = block[i] == 0x7f ? 0.0f : half_of(block[i] & 0x7fu);
    }
    // 0xff has the number that 0x7f would have
    INLINE static float half_of(uint32_t size) {
      return size < 8 ? float(size) * 0x1p-10f : bits_as<float>((size << 20) + (119u << 23));
    }
  };
  static constexpr int CHUNK = 32;
  struct Chunk : E2M1Codes<2>::Chunk {
    INLINE Chunk(const Block& block, int c) : E2M1Codes<2>::Chunk(block.codes + 16 * c, block.scales + 2 * c) {}
  };
};

template <class Format>
constexpr bool is_fp8 = std::is_same<Format, Scaled<Fp8Codes>>::value;

// Calls f with a value of the format's type.
template <class F>
auto with_format(int64_t format, F f) {
  switch (format) {
    case MXFP4_GGUF_CODES:
      return f(MXFP4_GGUF{});
    case 9:
      return f(NVFP4_GGUF{});
    case MXFP4_CODES:
      return f(Scaled<E2M1Codes<1>>{});
    case 11:
      return f(Scaled<E2M1Codes<2>>{});
    case 12:
      return f(Scaled<Fp8Codes>{});
    case 13:
      return f(Scaled<Int4Codes>{});
    case 14:
      return f(Scaled<Nf4Codes>{});
    default:
      return with_block_format(format, f);
  }
}

// The float32 values of the columns [first, first + count) of a row, in the order of the codes: whole blocks. A
// processor does not foresee a read of parts of rows: those of the row AHEAD are prefetched.
template <class Format>
NOINLINE void unpack(const PackedWeight& weight, int64_t row, int64_t first, int64_t count, float* to) {
  constexpr int AHEAD = 8;
  for (int64_t part = 0; part < count; part += PART) {
    const int64_t columns = std::min(PART, count - part);
    typename Format::template Memory<1> memory;
    const typename Format::template Rows<1> rows(weight, row, 0, first + part, columns, &memory);
    for (int64_t b = 0; b * Format::WEIGHTS < columns; b++) {
      rows.prefetch(AHEAD, b);
      const typename Format::Block block(rows.block(0, b));
      for (int c = 0; c < Format::WEIGHTS / Format::CHUNK; c++, to += Format::CHUNK) {
        const typename Format::Chunk chunk(block, c);
#pragma GCC unroll 16
        for (int i = 0; i < Format::CHUNK; i += LANES) store(to + i, chunk.at(i));
        if constexpr (is_fp8<Format>)
          if (Format::has_nan(block.codes))
            for (int i = 0; i < 32; i++)
              if ((block.codes[i] & 0x7f) == 0x7f) to[i] = bits_as<float>(uint32_t(0x7fc00000));
      }
    }
  }
}

}  // namespace
}  // namespace fusedops

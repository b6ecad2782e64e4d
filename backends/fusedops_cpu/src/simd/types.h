// Vectors of 32-bit lanes on GCC/Clang vector extensions: their types, of the widest that the compiler may use.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns of its own _mm512_undefined_ps (GCC bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__F16C__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE inline __attribute__((noinline))  // for what runs once a row: a quarter of the library's size

namespace fusedops {
namespace {

constexpr int LANES = VECTOR_BYTES / 4;

typedef float vfloat __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vuint64 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vuint16 __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t vuint16_two __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t vbyte __attribute__((vector_size(VECTOR_BYTES / 4)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

INLINE vfloat all(float value) { return value - vfloat{}; }  // a sum with 0 would make 0 of -0

// A product that is rounded: without the barrier a sum of it may be fused.
template <class V>
INLINE V rounded(V product) {
#if defined(__x86_64__) && VECTOR_BYTES == 64
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

INLINE vint lanes_below(int n) {
  vint index;
  for (int i = 0; i < LANES; i++) index[i] = i;
  return index < n;
}

}  // namespace
}  // namespace fusedops

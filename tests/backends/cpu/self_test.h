// What the self test's files share: a check that counts, tensors, random numbers.
#pragma once

#include <cmath>
#include <cstdio>
#include <vector>

#include "api.h"
#include "parallel.h"

using namespace fusedops;

extern int failures;
#define CHECK(condition, ...)                              \
  if (!(condition)) {                                      \
    failures++;                                            \
    printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
    printf(__VA_ARGS__);                                   \
    printf("\n");                                          \
  }

// A tensor of one of the dtypes in a buffer of its exact size.
struct Tensor {
  int64_t dtype;
  std::vector<float> wide;
  std::vector<uint16_t> narrow;
  Tensor(int64_t dtype, int64_t count) : dtype(dtype), wide(dtype ? 0 : count), narrow(dtype ? count : 0) {}
  int64_t size() const { return int64_t(dtype ? narrow.size() : wide.size()); }
  void* data() { return dtype ? (void*)narrow.data() : (void*)wide.data(); }
  double at(int64_t i) const {
    if (dtype == FLOAT32) return wide[i];
    if (dtype == BFLOAT16) return bits_as<float>(uint32_t(narrow[i]) << 16);
    int exponent = (narrow[i] >> 10) & 31, mantissa = narrow[i] & 1023;
    double value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                   : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                  : std::ldexp(mantissa, -24);
    return narrow[i] >> 15 ? -value : value;
  }
  void set(int64_t i, float value) {
    float lanes[LANES] = {value};
    uint16_t half[LANES];
    if (dtype == FLOAT32) {
      wide[i] = value;
      return;
    }
    if (dtype == BFLOAT16) store((bfloat16*)half, load(lanes));
    if (dtype == FLOAT16) store((float16*)half, load(lanes));
    narrow[i] = half[0];
  }
  double tolerance() const { return dtype == FLOAT32 ? 2e-6 : dtype == BFLOAT16 ? 8e-3 : 1e-3; }
};

float random_value();  // in [-4, 4)
inline Tensor random_tensor(int64_t dtype, int64_t count) {
  Tensor t(dtype, count);
  for (int64_t i = 0; i < count; i++) t.set(i, random_value());
  return t;
}
inline bool close(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance * (1 + std::fabs(b)); }

void test_norms(int64_t dtype, int64_t rows, int64_t columns);
void test_gated(int64_t dtype, int64_t rows, int64_t columns);
void test_gated_norms(int64_t dtype, int64_t rows, int64_t columns);
void test_losses(int64_t dtype, int64_t rows, int64_t columns);
void test_linears();
void test_quantized(int64_t dtype);
void test_routings(int64_t dtype);
void test_rotations(int64_t dtype);
void test_experts(int64_t dtype);
void test_attentions(int64_t dtype);
void test_convolutions(int64_t dtype);
void test_linear_attentions(int64_t dtype);
void test_merges(int64_t dtype, int64_t rows, int64_t columns);

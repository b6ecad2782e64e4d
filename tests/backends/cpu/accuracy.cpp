// Prints the largest error of a function of math/ over the float32 numbers, every STEP-th of them.
//   accuracy FUNCTION STEP     FUNCTION: exp, exp_of_difference, exp2, tanh, gelu_tanh, gelu_erf, derivative_tanh,
//                              derivative_erf; followed by _narrow: the form for bfloat16
//   accuracy bits          the number of float16 numbers, and of keep masks, that scalar code has otherwise
// Output of a function: the largest error in units in the last place of the exact result, with its argument; the
// largest error in units of 2^-23, of GELU divided by |u|, with its argument; the number of wrong results at NaN,
// infinities and zeros.
//
// The first is over u >= -1 for GELU and u >= -0.5 for its derivative (which is 0 at -0.75). Below, GELU falls to 0 as
// exp(-u * u / 2), where the rounding of the exponent alone costs u * u / 2 units in the last place; a form by 1 + tanh
// or 1 + erf, with functions that are exact to 1 unit in the last place, has an error of 1 to 2 of the second unit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "elementwise/philox.h"
#include "math/exp.h"
#include "math/gelu.h"
#include "math/sigmoid.h"

using namespace fusedops;

static double exact(const char* name, double u) {
  const double k = std::sqrt(2 / M_PI);
  if (!strcmp(name, "exp") || !strcmp(name, "exp_of_difference")) return std::exp(u);
  if (!strcmp(name, "exp2")) return std::exp2(u);
  if (!strcmp(name, "tanh")) return std::tanh(u);
  if (!strcmp(name, "gelu_tanh")) return u / (1 + std::exp(-2 * k * (u + 0.044715 * u * u * u)));
  if (!strcmp(name, "gelu_erf")) return 0.5 * u * std::erfc(-u * std::sqrt(0.5));
  if (!strcmp(name, "derivative_tanh")) {
    double s = 1 / (1 + std::exp(-2 * k * (u + 0.044715 * u * u * u)));
    return s + u * s * (1 - s) * 2 * k * (1 + 3 * 0.044715 * u * u);
  }
  return 0.5 * std::erfc(-u * std::sqrt(0.5)) + u * std::exp(-0.5 * u * u) / std::sqrt(2 * M_PI);
}

template <bool NARROW>
static vfloat computed(const char* name, vfloat u) {
  if (!strcmp(name, "exp")) return exp_nonpositive(u);
  if (!strcmp(name, "exp_of_difference")) return exp_of_difference<NARROW>(u);
  if (!strcmp(name, "exp2")) return exp2_within<NARROW>(u);
  if (!strcmp(name, "tanh")) return tanh_of(u);
  if (!strcmp(name, "gelu_tanh")) return gelu<true, NARROW>(u);
  if (!strcmp(name, "gelu_erf")) return gelu<false, NARROW>(u);
  if (!strcmp(name, "derivative_tanh")) return gelu_derivative<true, NARROW>(u);
  return gelu_derivative<false, NARROW>(u);
}
static vfloat computed(const char* name, bool narrow, vfloat u) {
  return narrow ? computed<true>(name, u) : computed<false>(name, u);
}

static double ulp(double value) {
  int exponent;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

static int wrong_specials(const char* name, bool narrow) {
  const float inf = INFINITY;
  int wrong = 0;
  auto at = [&](float value) {
    float x[LANES];
    for (float& lane : x) lane = value;  // all(value) would turn -0 into 0
    return float(computed(name, narrow, load(x))[0]);
  };
  wrong += !std::isnan(at(NAN));
  if (!strcmp(name, "exp") || !strcmp(name, "exp_of_difference")) {
    wrong += !(at(0.0f) == 1) + !(at(-0.0f) == 1) + !(at(-inf) == 0) + !(at(-1e-40f) == 1) + !(at(-3e38f) == 0);
  } else if (!strcmp(name, "exp2")) {
    wrong += !(at(0.0f) == 1) + !(at(-127) == 0);
  } else if (!strcmp(name, "tanh")) {
    wrong += !(at(0.0f) == 0 && !std::signbit(at(0.0f))) + !(at(-0.0f) == 0 && std::signbit(at(-0.0f)));
    wrong += !(at(inf) == 1) + !(at(-inf) == -1);
  } else if (!strncmp(name, "gelu", 4)) {
    wrong += !(at(0.0f) == 0 && !std::signbit(at(0.0f))) + !(at(-0.0f) == 0 && std::signbit(at(-0.0f)));
    wrong += !(at(inf) == inf) + !std::isnan(at(-inf));  // -inf * 0, as torch's formula gives
  } else {
    wrong += !(at(0.0f) == 0.5f) + !(at(inf) == 1) + !(std::fabs(at(-inf)) < 1e-30f);
  }
  return wrong;
}

static float of_float16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                     : std::ldexp(mantissa, -24);
  return float(bits >> 15 ? -size : size);
}

static int wrong_float16() {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 65536; bits++) {
    float16 memory[LANES] = {}, stored[LANES];
    memory[0].bits = uint16_t(bits);
    const vfloat value = load(memory);
    const float want = of_float16(uint16_t(bits));
    store(stored, value);
    const bool is_nan = want != want;
    wrong += is_nan ? value[0] == value[0] || (stored[0].bits & 0x7c00) != 0x7c00
                    : value[0] != want || stored[0].bits != bits;
  }
  return wrong;
}

static uint32_t scalar_philox(uint64_t seed, uint64_t index) {
  uint32_t c[4] = {uint32_t(index / 4), uint32_t((index / 4) >> 32), 0, 0}, k0 = uint32_t(seed);
  uint32_t k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
    c[0] = uint32_t(b >> 32) ^ c[1] ^ k0, c[1] = uint32_t(b), c[2] = uint32_t(a >> 32) ^ c[3] ^ k1, c[3] = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c[index % 4];
}

static int wrong_masks() {
  int wrong = 0;
  for (uint64_t seed : {uint64_t(1), ~uint64_t(4), (uint64_t(1) << 40) + 7})
    for (int64_t start : {int64_t(0), int64_t(4096), (int64_t(1) << 34) - 96, (int64_t(1) << 36) + 8}) {
      int32_t keep[Philox::BUFFER];
      Philox(seed, 1u << 30).fill(start, 190, keep);
      for (int i = 0; i < 190; i++) wrong += (keep[i] != 0) != (scalar_philox(seed, uint64_t(start + i)) >= 1u << 30);
    }
  return wrong;
}

int main(int, char** argv) {
  if (!strcmp(argv[1], "bits")) return printf("%d %d\n", wrong_float16(), wrong_masks()), 0;
  char name[32] = {};
  strncpy(name, argv[1], sizeof name - 1);
  char* narrow = strstr(name, "_narrow");
  if (narrow) *narrow = 0;
  const uint64_t step = strtoull(argv[2], nullptr, 10);
  double low = -INFINITY, high = INFINITY;
  if (!strcmp(name, "exp") || !strcmp(name, "exp_of_difference")) low = -110, high = 0;
  if (!strcmp(name, "exp2")) low = -126.49, high = 127.49;
  double worst = 0, worst_at = 0, absolute = 0, absolute_at = 0;
  for (uint64_t bits = 0; bits < (1ull << 32); bits += step * LANES) {
    float x[LANES];
    int count = 0;
    for (int i = 0; i < LANES && bits + i * step < (1ull << 32); i++) {
      float value = bits_as<float>(uint32_t(bits + i * step));
      if (std::isfinite(value) && value >= low && value <= high) x[count++] = value;
    }
    if (!count) continue;
    for (int i = count; i < LANES; i++) x[i] = x[0];
    vfloat y = computed(name, narrow, load(x));
    for (int i = 0; i < count; i++) {
      double want = exact(name, x[i]), error = std::fabs(double(y[i]) - want);
      if (std::isnan(y[i])) error = INFINITY;
      if (want == want && std::fabs(want) < 3.4e38) {
        bool counts = !strncmp(name, "exp", 3) || x[i] >= (name[0] == 'g' ? -1 : -0.5);
        double relative = counts ? error / ulp(want) : 0;
        if (std::fabs(want) < 0x1p-126 && error <= 0x1p-126) relative = 0;  // flushed to 0: allowed
        if (relative > worst) worst = relative, worst_at = x[i];
        double scaled = error * 0x1p23 / (strncmp(name, "gelu", 4) ? 1 : std::fabs(x[i]));
        if (strncmp(name, "exp2", 4) && std::fabs(x[i]) > 1e-30 && scaled > absolute)
          absolute = scaled, absolute_at = x[i];
      }
    }
  }
  printf("%.3f %.9g %.3g %.9g %d\n", worst, worst_at, absolute, absolute_at, wrong_specials(name, narrow));
}

// exp, the normal distribution function and GELU with its derivative, on float32 lanes.
// Accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include <limits>

#include "several.h"

namespace fusedops {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// A double that float32 cannot hold becomes infinite; the conversion itself would be undefined.
inline float to_float(double value) {
  constexpr double MAX = std::numeric_limits<float>::max();
  return value > MAX ? INF : value < -MAX ? -INF : float(value);
}

// The same, but the largest number where that becomes infinite: its product with 0 is 0.
inline float to_finite(double value) {
  constexpr float MAX = std::numeric_limits<float>::max();
  const float x = to_float(value);
  return x > MAX ? MAX : x < -MAX ? -MAX : x;
}

constexpr float MAGIC = 0x1.8p23f;  // a sum with it rounds to a whole number
constexpr float LN_2 = 0.693147181f, LOG2_E = 1.44269504f;

#if VECTOR_BYTES >= 32
// Two to a multiple of 1 / LANES: its fraction selects one of LANES factors, which lie in one vector. That leaves so
// little to a polynomial that the third degree is enough: 7 and 4 multiplications for the two functions, instead of 11
// and 8 with a polynomial alone.
constexpr int TABLE_BITS = LANES == 16 ? 4 : 3;
constexpr float ROUNDS = MAGIC / LANES;  // a sum with it rounds to a multiple of 1 / LANES

struct alignas(64) PowerTable {
  uint32_t bits[LANES] = {};
  constexpr PowerTable() {
    constexpr uint32_t POWERS[16] = {0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d3, 0x3f9837f0, 0x3f9ef532,
                                     0x3fa5fed7, 0x3fad583f, 0x3fb504f3, 0x3fbd08a4, 0x3fc5672a, 0x3fce248c,
                                     0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d};  // 2**(i / 16)
    for (uint32_t i = 0; i < LANES; i++) bits[i] = POWERS[i * (16 / LANES)] - (i << (23 - TABLE_BITS));
  }
};
constexpr PowerTable POWER_TABLE;

// 2**n for multiples n of 1 / LANES in [-126, 128), from n + ROUNDS; 0 for -127, less than 2**-126 between.
INLINE vfloat power_of_two(vfloat n_rounded) {
  vuint table;
  memcpy(&table, POWER_TABLE.bits, sizeof table);
  const vuint n = bits_as<vuint>(n_rounded);
  return bits_as<vfloat>(selected(table, n) + (n << (23 - TABLE_BITS)));  // the shift adds the fraction too: see above
}
template <class V>
INLINE Two<V> power_of_two(Two<V> n_rounded) {
  return {power_of_two(n_rounded.a), power_of_two(n_rounded.b)};
}

// exp(x) for x <= 0 or NaN. Below the smallest normal number, results are smaller than that number; 0 from x = -88.1
// on.
template <class V>
INLINE V exp_nonpositive(V x) {
  const V c = at_least(-127 * LN_2, x);  // the power is 0
  const V n = c * LOG2_E + ROUNDS, k = n - ROUNDS;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  V p = r * (LANES == 16 ? 0.1666671846f : 0.1666685841f) + (LANES == 16 ? 0.5000161574f : 0.500064472f);
  p = p * (r * r) + r;
  const V power = power_of_two(n);
  return power * p + power;
}

// The same with fewer operations, to |x| / 20 units in the last place more: for sums in which exp(0) is a term. NARROW:
// to 2^-20.
template <bool NARROW = false, class V>
INLINE V exp_of_difference(V x) {
  const V c = at_least(-127 * LN_2, x);
  const V n = c * LOG2_E + ROUNDS, r = c - (n - ROUNDS) * LN_2, power = power_of_two(n);
  if constexpr (NARROW && LANES == 16) return power * ((r * 0.5000021f + 1.0000585f) * r) + power;
  const V p = r * (LANES == 16 ? 0.1666671846f : 0.1666685841f) + (LANES == 16 ? 0.5000161574f : 0.500064472f);
  return power * (p * (r * r) + r) + power;
}

// 2**w for w in [-127, 127.9] or NaN; below the smallest normal number, results are smaller than that number, and 0 at
// -127. NARROW: exact to 2^-21 with AVX-512.
template <bool NARROW = false, class V>
INLINE V exp2_within(V w) {
  const V n = w + ROUNDS, f = w - (n - ROUNDS);
  V p;
  if constexpr (NARROW && LANES == 16) {
    p = f * 0.2402275f + 0.69318776f;
  } else {
    p = f * (LANES == 16 ? 0.05550213649f : 0.0554962218f) + (LANES == 16 ? 0.240234288f : 0.2402576298f);
    p = p * f + 0.693147181f;
  }
  const V power = power_of_two(n);
  return power * (p * f) + power;
}
#else
// 2**n for whole n in [-127, 128], from n + MAGIC: 0 and inf at the ends.
INLINE vfloat power_of_two(vfloat n_magic) {
  return bits_as<vfloat>((bits_as<vuint>(n_magic) + (127u - 0x4b400000u)) << 23);
}
template <class V>
INLINE Two<V> power_of_two(Two<V> n_magic) {
  return {power_of_two(n_magic.a), power_of_two(n_magic.b)};
}

// exp(x) for x <= 0 or NaN. Results below the smallest normal number are flushed to 0 from x = -87.7 on.
template <class V>
INLINE V exp_nonpositive(V x) {
  const V c = at_least(-88.0f, x);
  const V n = c * LOG2_E + MAGIC, k = n - MAGIC;
  V r = c - k * 0.693359375f;  // ln(2) in two parts; the first has few bits, so that the product is exact
  r = r + k * 2.12194440e-4f;
  const V r2 = r * r;  // coefficients in pairs: a shorter chain of dependent operations than Horner's form
  V p = r2 * 0.001383684613f + (r * 0.008374815798f + 0.04166822557f);
  p = p * r2 + (r * 0.1666642017f + 0.4999999208f);
  p = p * r2 + (r + 1.0f);
  return p * power_of_two(n);
}

template <bool NARROW = false, class V>
INLINE V exp_of_difference(V x) {
  return exp_nonpositive(x);
}

// 2**w for w in [-127, 127.5] or NaN: 0 below -126.5.
template <bool NARROW = false, class V>
INLINE V exp2_within(V w) {
  const V n = w + MAGIC, f = w - (n - MAGIC), f2 = f * f;
  V p = f2 * 0.0001534581216f + (f * 0.001339993121f + 0.009618488957f);
  p = p * f2 + (f * 0.05550328777f + 0.2402264689f);
  p = p * f2 + (f * 0.6931472057f + 1.0f);
  return p * power_of_two(n);
}
#endif

// 1 / d for d in [0.5, 2**126] or NaN, to 0.6 units in the last place.
INLINE vfloat reciprocal(vfloat d) {
#if VECTOR_BYTES == 64
  const vfloat estimate = (vfloat)_mm512_rcp14_ps((__m512)d);  // to 2^-14; one step of Newton's method squares that
  return estimate * (1.0f - d * estimate) + estimate;
#else
  return 1.0f / d;
#endif
}

template <class V>
INLINE Two<V> reciprocal(Two<V> d) {
  return {reciprocal(d.a), reciprocal(d.b)};
}

// A polynomial for |u| < 0.55, whose relative error is 2^-24.7; above, 1 - 2 * e / (1 + e) with e = exp(-2 * |u|).
template <class V>
INLINE V tanh_of(V u) {
  const V q = u * u, m = negative_magnitude(u), e = exp_of_difference(m * 2.0f);
  V p = (q * 0.0164374758f - 0.0526717598f) * (q * q) + (q * 0.133207242f - 0.333329466f);
  p = p * q + 1.0f;
  const V rest = e * reciprocal(e * 0.5f + 0.5f);
  return where_positive(m + 0.55f, p * u, where_positive(u, 1.0f - rest, rest - 1.0f));
}

// ---- silu and sigmoid ----

// act(g) and its derivative: with s = sigmoid(g), f * s and s * (base + f * (1 - s)), where f is g and base 1 for silu,
// and f is 1 and base 0 for sigmoid.
struct GateFunction {
  int32_t silu;  // all bits, or none
  float base;

  struct Value {
    vfloat act, slope;
  };
  INLINE Value operator()(vfloat g) const {
    const vfloat w = g * -LOG2_E, e = exp2_within(at_most(126.0f, at_least(-127.0f, w)));
    const vfloat s = zero_above(126.0f, w, reciprocal(e + 1.0f));
    const vfloat f = (vint{} | silu) ? zero_above(126.0f, w, g) : all(1.0f);  // where s is 0: -inf * 0 would be NaN
    return {f * s, s * (at_most(1e30f, f) * (e * s) + base)};                 // and so would be inf * 0, of an f of inf
  }
};

inline GateFunction gate_function(bool sigmoid) { return {sigmoid ? 0 : -1, sigmoid ? 0.0f : 1.0f}; }

// ---- The normal distribution ----

constexpr float NORMAL_END = 13.2689f;  // density and Phi(-NORMAL_END) are 0

// Phi(u) * exp(u * u / 2) for u in [-NORMAL_END, 0] or NaN. NARROW: exact to 2^-18.
#if VECTOR_BYTES == 64
// The interval is cut where 1 - u passes a quarter of its power of two: the bits of 1 - u select one of 16 polynomials
// in the distance from the cut, which are exact to 0.8 units in the last place; NARROW: in 1 - u. Selections take units
// of the processor that multiplications leave idle.
struct alignas(64) NormalTable {
  float coefficients[6][16] = {
      {0.261578292f, 0.20578067f, 0.168101996f, 0.14133133f, 0.12151394f, 0.0944106355f, 0.0769193023f, 0.0647793114f,
       0.0558934771f, 0.0437987894f, 0.03597489f, 0.0305094142f, 0.5f, 0.414032102f, 0.349618822f, 0.30023247f},
      {-0.13736324f, -0.0902710035f, -0.0627381653f, -0.0456139036f, -0.0343998745f, -0.0212995652f, -0.0143457074f,
       -0.0102663767f, -0.00768773537f, -0.00475314166f, -0.00321848318f, -0.00231989194f, -0.398941994f, -0.295434088f,
       -0.224132776f, -0.17376788f},
      {0.0620897412f, 0.0351803601f, 0.0213100724f, 0.0136470636f, 0.00914972927f, 0.00460412074f, 0.00259469752f,
       0.00159026554f, 0.00103808439f, 0.000509851787f, 0.000285656977f, 0.00017540947f, 0.249986827f, 0.170079648f,
       0.118772246f, 0.084950991f},
      {-0.0249347799f, -0.0124405557f, -0.00668131653f, -0.00382106891f, -0.00228157104f, -0.000950979127f,
       -0.000454009423f, -0.00024027763f, -0.000135914815f, -5.36422194e-05f, -2.50262856e-05f, -1.31893639e-05f,
       -0.132754728f, -0.0841819495f, -0.0548469089f, -0.0366454571f},
      {0.00865115598f, 0.00388479815f, 0.00188448967f, 0.000977577409f, 0.000497084984f, 0.000177054259f,
       7.32384433e-05f, 3.40249899e-05f, 1.57918421e-05f, 5.17156468e-06f, 2.0518471e-06f, 9.85088036e-07f,
       0.0607210025f, 0.0362908095f, 0.0222947039f, 0.0140543766f},
      {-0.00199319585f, -0.000831522339f, -0.000375080563f, -0.000181205207f, -6.86730709e-05f, -2.19670655e-05f,
       -8.20962578e-06f, -3.46800357e-06f, -1.15344028e-06f, -3.3219203e-07f, -1.17376977e-07f, -6.91279567e-08f,
       -0.0199405942f, -0.0114063499f, -0.00670594675f, -0.00404575281f},
  };
  float narrow[5][16] = {
      {1.07266521f, 0.948856235f, 0.83701241f, 0.740018189f, 0.623816788f, 0.504483521f, 0.418499321f, 0.3550134f,
       0.288597137f, 0.22782056f, 0.187400877f, 0.16957894f, 1.326828f, 1.28126585f, 1.2263751f, 1.16571867f},
      {-0.867269874f, -0.667770267f, -0.517774582f, -0.406390637f, -0.292308241f, -0.195743635f, -0.137936637f,
       -0.101426318f, -0.0687602907f, -0.0441261157f, -0.0305281375f, -0.0252800863f, -1.4810518f, -1.33495307f,
       -1.18824303f, -1.04928875f},
      {0.352188498f, 0.231387571f, 0.155842766f, 0.107826136f, 0.0657566488f, 0.0363936387f, 0.021798918f,
       0.0139167914f, 0.00788201578f, 0.00413004123f, 0.00241210242f, 0.00183245912f, 0.928725779f, 0.752677858f,
       0.605418384f, 0.485920012f},
      {-0.0729420409f, -0.0403651707f, -0.0234308355f, -0.0142213777f, -0.00731491297f, -0.00333865895f,
       -0.00169867277f, -0.000941595004f, -0.000445271784f, -0.000190785897f, -9.41880789e-05f, -6.57288474e-05f,
       -0.322674304f, -0.228194401f, -0.162405536f, -0.116682969f},
      {0.00613968447f, 0.00283861882f, 0.00141309993f, 0.000750032137f, 0.00032413294f, 0.000121818666f, 5.2617379e-05f,
       2.53204653e-05f, 9.98748146e-06f, 3.50211326e-06f, 1.46247578e-06f, 9.38402195e-07f, 0.0481722876f,
       0.0291187298f, 0.0180811211f, 0.0115138097f},
  };
};
constexpr NormalTable NORMAL_TABLE;

template <int N>
INLINE vfloat selected_polynomial(const float (&coefficients)[N][LANES], vuint index, vfloat x) {
  vfloat p = {};
#pragma GCC unroll 6
  for (int i = N - 1; i >= 0; i--) {
    vuint table;
    memcpy(&table, coefficients[i], sizeof table);
    const vfloat coefficient = bits_as<vfloat>(selected(table, index));
    p = i == N - 1 ? coefficient : p * x + coefficient;
  }
  return p;
}

template <bool NARROW>
INLINE vfloat normal_quotient(vfloat u) {
  const vfloat z = 1.0f - u;
  const vuint bits = bits_as<vuint>(z), index = bits >> 21;
  if constexpr (NARROW) return selected_polynomial(NORMAL_TABLE.narrow, index, z);
  return selected_polynomial(NORMAL_TABLE.coefficients, index, z - bits_as<vfloat>(bits & 0xffe00000u));
}
template <bool NARROW, class V>
INLINE Two<V> normal_quotient(Two<V> u) {
  return {normal_quotient<NARROW>(u.a), normal_quotient<NARROW>(u.b)};
}
#else
// With x = -u / sqrt(2), erfc(x) * exp(x * x) is a polynomial in 1 / (1 + 0.45 * x), to 1e-9.
template <bool NARROW, class V>
INLINE V normal_quotient(V u) {
  const V t = reciprocal(1.0f - u * (0.45f * 0.70710678f)), t2 = t * t;
  V p = t2 * (0.5f * 0.09256983814f) + (t * (0.5f * -0.4941052593f) + 0.5f * 0.8571696073f);
  p = p * t2 + (t * (0.5f * -0.3758046842f) + 0.5f * 0.4601717157f);
  p = p * t2 + (t * (0.5f * 0.2010090537f) + 0.5f * 0.2589897296f);
  return p * t;
}
#endif

// Phi(u), the distribution function, for u as above; density is exp(-u * u / 2).
template <bool NARROW, class V>
INLINE V normal_cdf(V u, V& density) {
  density = exp2_within<NARROW>(u * u * (-0.5f * LOG2_E));
  return normal_quotient<NARROW>(u) * density;
}

// 0.5 * (1 + tanh(z)) = 1 / (1 + 2**w), where z = sqrt(2 / pi) * (u + 0.044715 * u**3) and w = u * (A + B * u * u).
constexpr float TANH_A = -2.0f * 0.7978845608f * LOG2_E, TANH_B = 0.044715f * TANH_A;

template <bool TANH, bool NARROW = false, class V>
INLINE V gelu(V u) {
  if constexpr (TANH) {
    const V w = u * (u * u * TANH_B + TANH_A);
    const V factor = reciprocal(exp2_within<NARROW>(at_most(126.0f, at_least(-127.0f, w))) + 1.0f);
    return u * zero_above(126.0f, w, factor);
  } else {
    V density;  // u * Phi(u) is u - u * Phi(-u) for u > 0; inf and -inf give inf and NaN
    const V m = at_least(-NORMAL_END, negative_magnitude(u));
    return normal_cdf<NARROW>(m, density) * at_most(u, m) + positive_part(u);
  }
}

// Returns gelu(u) / u, and the derivative of gelu at u.
template <bool TANH, bool NARROW = false, class V>
INLINE V gelu_factor(V u, V& derivative) {
  if constexpr (TANH) {
    u = at_most(10.0f, at_least(-10.0f, u));  // beyond, the derivative is 0 or 1; within, |w| < 127
    const V q = u * u;
    const V e = exp2_within<NARROW>(u * (q * TANH_B + TANH_A));
    const V s = reciprocal(e + 1.0f);
    const V dw = u * (q * (3 * TANH_B * LN_2) + TANH_A * LN_2);  // u * dw/du * ln(2)
    derivative = s - s * dw * (e * s);                           // e * s is 1 - s without cancellation
    return s;
  } else {
    u = at_most(NORMAL_END, at_least(-NORMAL_END, u));
    V density;
    const V tail = normal_cdf<NARROW>(negative_magnitude(u), density), cdf = where_positive(u, 1.0f - tail, tail);
    derivative = cdf + u * density * 0.3989422804f;
    return cdf;
  }
}

template <bool TANH, bool NARROW = false, class V>
INLINE V gelu_derivative(V u) {
  V derivative;
  gelu_factor<TANH, NARROW>(u, derivative);
  return derivative;
}

}  // namespace
}  // namespace fusedops

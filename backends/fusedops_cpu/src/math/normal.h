// The normal distribution function, on float32 lanes.
// The coefficients: tools/fit_functions.py; accuracy over all float32 values: tests/backends/cpu/accuracy.cpp.
#pragma once

#include "math/exp.h"

namespace fusedops {
namespace {

// density and Phi(-NORMAL_END) are 0: the exponent of density is -126.9993, and -127 rounded to nearest, or down
constexpr float NORMAL_END = 13.2687f;

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
// With x = -u / sqrt(2) and t = 1 / (1 + 0.45 * x), erfc(x) * exp(x * x) / 2 is a polynomial in t, to 1e-9: that of its
// powers from t on.
constexpr float ERFC[] = {0.5f * 0.2589897296f, 0.5f * 0.2010090537f,  0.5f * 0.4601717157f, -0.5f * 0.3758046842f,
                          0.5f * 0.8571696073f, -0.5f * 0.4941052593f, 0.5f * 0.09256983814f};
template <bool NARROW, class V>
INLINE V normal_quotient(V u) {
  const V t = reciprocal(1.0f - u * (0.45f * 0.70710678f)), t2 = t * t;
  V p = t2 * ERFC[6] + (t * ERFC[5] + ERFC[4]);
  p = p * t2 + (t * ERFC[3] + ERFC[2]);
  p = p * t2 + (t * ERFC[1] + ERFC[0]);
  return p * t;
}
#endif

// Phi(u), the distribution function, for u as above; density is exp(-u * u / 2).
template <bool NARROW, class V>
INLINE V normal_cdf(V u, V& density) {
  density = exp2_within<NARROW>(u * u * (-0.5f * LOG2_E));
  return normal_quotient<NARROW>(u) * density;
}

}  // namespace
}  // namespace fusedops

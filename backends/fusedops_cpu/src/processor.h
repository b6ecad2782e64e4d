// Whose processor this is.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

namespace fusedops {
namespace {

inline bool is_amd() {
#if defined(__x86_64__) || defined(_M_X64)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == 0x68747541;  // "Auth", of AuthenticAMD
#else
  return false;
#endif
}

}  // namespace
}  // namespace fusedops

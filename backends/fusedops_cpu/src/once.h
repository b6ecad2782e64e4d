// Numbers of a tensor that select memory: another thread may write them at any time. Each is read once, here, to a
// local variable or to memory of the library, and what is checked is what is used. A compiler may otherwise read memory
// again between the check and the use.
#pragma once

namespace fusedops {
namespace {

template <class T>
inline T read_once(const T* p) {
  return *(const volatile T*)p;
}

}  // namespace
}  // namespace fusedops

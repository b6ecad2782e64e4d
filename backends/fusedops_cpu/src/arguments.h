// The arguments of a launcher's call, as a call is compared with a remembered one.
#pragma once

#include "python.h"

namespace fusedops::launch {

constexpr int MOST_DIMS = 8, MOST_ARGUMENTS = 24;
constexpr int32_t CPU = 0;  // of c10::DeviceType

// A tensor's metadata: type, dtype, layout, device, sizes and strides; or the value of another argument.
struct Argument {
  Object* type;
  Object* value;         // of what is no tensor; owned by a remembered call
  void* implementation;  // of a tensor; it is not compared, and not valid in a remembered call
  int32_t dtype, device_type, device_index;
  int64_t dim, sizes[MOST_DIMS], strides[MOST_DIMS];
  bool is_dense() const;  // its elements lie without gaps, its dims in any order
};

// Reads an argument. False where a call with it is not remembered.
bool read(Object*, Argument&);

// The arguments of a call. False where the call is not remembered.
struct Arguments {
  Size count;
  Argument each[MOST_ARGUMENTS];
  bool read(Object* const* objects, Size count);
  bool are_like(const Arguments&) const;
  // A remembered call owns the values of its arguments.
  void retain_values() const;
  void release_values() const;
};

}  // namespace fusedops::launch

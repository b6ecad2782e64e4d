// A call's arguments as they are compared, and the calls that a function remembers.
#pragma once

#include "python.h"

namespace fusedops {

constexpr int MOST_DIMS = 8, MOST_ARGUMENTS = 16, MOST_CALLS = 8;
constexpr int32_t CPU = 0;  // of c10::DeviceType

// A tensor's metadata: type, dtype, layout, device, sizes and strides; or the value of another argument.
struct Argument {
  Object* type;
  Object* value;         // of what is no tensor; owned by a remembered call
  void* implementation;  // of a tensor; it is not compared, and not valid in a remembered call
  int32_t dtype, device_type, device_index;
  int64_t dim, sizes[MOST_DIMS], strides[MOST_DIMS];
  bool is_contiguous() const;
};

// Reads an argument. False where a call with it is not remembered.
bool read(Object*, Argument&);

// The arguments of a call. False where the call is not remembered.
struct Arguments {
  Argument each[MOST_ARGUMENTS];
  Size count;
  bool read(Object* const* objects, Size count);
};

// A remembered call, with what a kind of memory adds to it.
struct Call {
  Size count;
  int users;     // of this call: the memory, and whoever runs it
  void* recipe;  // what the memory keeps with it, from malloc; or null
  void (*clear)(void* recipe);
  Argument* arguments() { return (Argument*)(this + 1); }
};
void release(Call*);

struct Memory {
  int64_t calls;  // ever remembered; the newest MOST_CALLS are kept
  Call* kept[MOST_CALLS];
  Call* find(const Arguments&);
  // False where there is no memory left; the recipe is the caller's then.
  bool add(const Arguments&, void* recipe, void (*clear)(void*));
  void clear();
};

}  // namespace fusedops

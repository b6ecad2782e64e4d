// The functions of Python and torch that a launcher calls, and the objects that it names.
//
// No header of either is included, so one file serves every version of both: their functions are passed in as
// addresses. Python's are of its stable ABI or as stable, torch's are the C functions that it exports for compiled
// models. docs/cpu.md has the time that this saves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "export.h"

namespace fusedops::launch {

struct Object;
using Size = intptr_t;

// In the order of PYTHON in native.py.
struct Python {
  Object* (*get_attribute)(Object* of, Object* name);
  void* (*as_pointer)(Object* integer);
  long long (*as_integer)(Object*);
  double (*as_double)(Object*);
  Object* (*new_integer)(long long);
  const char* (*bytes)(Object*);
  Object* (*type_of)(Object*);
  int (*compare)(Object*, Object*, int operation);
  void (*retain)(Object*);
  void (*release)(Object*);
  Object* (*error)();  // borrowed; null: none
  void (*clear_error)();
  Object* (*no_memory)();  // sets the exception
  Object* (*call)(Object* function, Object* const* arguments, size_t count, Object* keywords);
  Object* (*new_tuple)(Size);
  int (*set_item)(Object* tuple, Size, Object* owned);
  Object* (*item)(Object* tuple, Size);  // borrowed
  Size (*tuple_size)(Object*);
  Object* (*new_capsule)(void*, const char* name, void (*destroy)(Object*));
  void* (*content)(Object* capsule, const char* name);
  Object* (*new_function)(void* definition, Object* self, Object* module);
  void* (*release_lock)();
  void (*take_lock)(void*);
};

// In the order of TORCH in native.py. A tensor is passed as the address of an at::Tensor, which is one pointer, to
// its implementation; `_cdata` is that pointer.
struct Torch {
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*layout)(void*, int32_t*);
  int32_t (*device_type)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*dim)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*data_ptr)(void*, void**);
};

// In the order of _set_up in native.py.
struct Names {
  Object *none, *no, *tensor, *parameter, *tuple, *floating;
  Object *cdata, *dtype, *device;         // names of attributes
  Object *is_neg, *empty, *empty_on_cpu;  // functions of tensors; the last two make one
  Object* values[6];                      // types whose values do not change
};

extern Python python;
extern Torch torch;
extern Names names;

// PyMethodDef of a function that takes an array of arguments
struct Definition {
  const char* name;
  Object* (*function)(Object* self, Object* const* arguments, Size count);
  int flags;
  const char* doc;
};
constexpr int FAST_CALL = 0x80;  // METH_FASTCALL

// The type of an object, borrowed: the object keeps it.
inline Object* type_of(Object* object) {
  Object* type = python.type_of(object);
  python.release(type);
  return type;
}

inline Object* retained(Object* object) {
  python.retain(object);
  return object;
}

}  // namespace fusedops::launch

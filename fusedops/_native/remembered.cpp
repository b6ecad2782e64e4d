// A check of a call's arguments that remembers the calls it took: a call like one of them is not checked again.
//
// The check is a Python function of the arguments, and returns None for a call that it takes. What it reads of a tensor
// is its metadata: type, dtype, layout, device, sizes and strides. Of other arguments it reads the value.
//
// No header of Python or torch is included, so one file serves every version of both: their functions are passed in as
// addresses. Python's are of its stable ABI, torch's are the C functions that it exports for compiled models.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef _WIN32
#define FUSEDOPS_EXPORT extern "C" __declspec(dllexport)
#else
#define FUSEDOPS_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace fusedops {
namespace {

struct Object;
using Size = intptr_t;

// In the order of PYTHON in __init__.py.
struct Python {
  Object* (*get_attribute)(Object* of, Object* name);
  void* (*as_pointer)(Object* integer);
  Object* (*type_of)(Object*);
  int (*compare)(Object*, Object*, int operation);
  void (*retain)(Object*);
  void (*release)(Object*);
  void (*clear_error)();
  Object* (*no_memory)();  // sets the exception
  Object* (*call)(Object* function, Object* args, Object* keywords);
  Object* (*new_tuple)(Size);
  int (*set_item)(Object* tuple, Size, Object* owned);
  Object* (*item)(Object* tuple, Size);
  Size (*tuple_size)(Object*);
  Object* (*new_capsule)(void*, const char* name, void (*destroy)(Object*));
  void* (*content)(Object* capsule, const char* name);
  Object* (*new_function)(void* definition, Object* self, Object* module);
};

// In the order of TORCH in __init__.py. A tensor is passed as the address of an at::Tensor, which is one pointer, to
// its implementation; `_cdata` is that pointer.
struct Torch {
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*layout)(void*, int32_t*);
  int32_t (*device_type)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*dim)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
};

// In the order of _set_up in __init__.py.
struct Names {
  Object *none, *tensor, *parameter, *tuple, *cdata;
  Object* values[6];  // types whose values do not change
};

Python python;
Torch torch;
Names names;

// Returns the address of a tensor's implementation; null with an exception for what is no tensor.
void* implementation_of(Object* tensor) {
  Object* address = python.get_attribute(tensor, names.cdata);
  if (!address) return nullptr;
  void* implementation = python.as_pointer(address);
  python.release(address);
  return implementation;
}

constexpr int MOST_DIMS = 8, MOST_ARGUMENTS = 16, MOST_CALLS = 8;
constexpr int EQUAL = 2, STRIDED = 0;  // of Python's comparisons, of c10::Layout
constexpr const char* CAPSULE = "fusedops.remembered";

struct Argument {
  Object* type;
  Object* value;  // of what is no tensor; owned by a remembered call
  int32_t dtype, device_type, device_index;
  int64_t dim, sizes[MOST_DIMS], strides[MOST_DIMS];
};

struct Call {
  Size count;
  Argument* arguments() { return (Argument*)(this + 1); }
};

struct Memory {
  Object* check;
  int64_t calls;  // ever remembered; the newest MOST_CALLS are kept
  Call* kept[MOST_CALLS];
};

bool is_value(Object* type) {
  for (Object* each : names.values) {
    if (type == each) return true;
  }
  return false;
}

Object* type_of(Object* object) {
  Object* type = python.type_of(object);
  python.release(type);  // the object keeps it
  return type;
}

// Reads an argument. False where a call with it is not remembered.
bool read(Object* object, Argument& argument) {
  argument.type = type_of(object);
  argument.value = nullptr;
  if (argument.type != names.tensor && argument.type != names.parameter) {
    argument.value = object;
    if (argument.type != names.tuple) return is_value(argument.type);
    for (Size i = 0, count = python.tuple_size(object); i < count; i++) {
      if (!is_value(type_of(python.item(object, i)))) return false;
    }
    return true;
  }
  void* implementation = implementation_of(object);
  if (!implementation) {
    python.clear_error();
    return false;
  }
  void* tensor = &implementation;
  int32_t layout;
  int64_t *sizes, *strides;
  if (torch.layout(tensor, &layout) || layout != STRIDED) return false;
  if (torch.dtype(tensor, &argument.dtype) || torch.device_type(tensor, &argument.device_type)) return false;
  if (torch.device_index(tensor, &argument.device_index)) return false;
  if (torch.dim(tensor, &argument.dim) || argument.dim > MOST_DIMS) return false;
  // a nested tensor has no sizes
  if (torch.sizes(tensor, &sizes) || torch.strides(tensor, &strides)) return false;
  memcpy(argument.sizes, sizes, argument.dim * sizeof(int64_t));
  memcpy(argument.strides, strides, argument.dim * sizeof(int64_t));
  return true;
}

bool are_equal(Object* a, Object* b) {
  if (a == b) return true;
  const int result = python.compare(a, b, EQUAL);
  if (result < 0) python.clear_error();
  return result == 1;
}

bool are_like(const Argument& a, const Argument& b) {
  if (a.type != b.type) return false;
  if (!a.value) {
    return a.dtype == b.dtype && a.device_type == b.device_type && a.device_index == b.device_index && a.dim == b.dim &&
           !memcmp(a.sizes, b.sizes, a.dim * sizeof(int64_t)) && !memcmp(a.strides, b.strides, a.dim * sizeof(int64_t));
  }
  if (a.type != names.tuple) return are_equal(a.value, b.value);
  const Size count = python.tuple_size(a.value);
  if (count != python.tuple_size(b.value)) return false;
  for (Size i = 0; i < count; i++) {  // (1, 0) and (True, False) are equal, and not alike
    Object *x = python.item(a.value, i), *y = python.item(b.value, i);
    if (x != y && (type_of(x) != type_of(y) || !are_equal(x, y))) return false;
  }
  return true;
}

bool are_like(const Argument* a, const Argument* b, Size count) {
  for (Size i = 0; i < count; i++) {
    if (!are_like(a[i], b[i])) return false;
  }
  return true;
}

void forget(Call* call) {
  if (!call) return;
  for (Size i = 0; i < call->count; i++) {
    if (call->arguments()[i].value) python.release(call->arguments()[i].value);
  }
  free(call);
}

void remember(Memory& memory, const Argument* arguments, Size count) {
  auto* call = (Call*)malloc(sizeof(Call) + count * sizeof(Argument));
  if (!call) return;
  call->count = count;
  memcpy(call->arguments(), arguments, count * sizeof(Argument));
  for (Size i = 0; i < count; i++) {
    if (arguments[i].value) python.retain(arguments[i].value);
  }
  Call*& place = memory.kept[memory.calls++ % MOST_CALLS];
  Call* before = place;
  place = call;
  forget(before);
}

Object* check(Object* self, Object* const* objects, Size count) {
  auto& memory = *(Memory*)python.content(self, CAPSULE);
  Argument arguments[MOST_ARGUMENTS];
  bool readable = count <= MOST_ARGUMENTS;
  for (Size i = 0; readable && i < count; i++) readable = read(objects[i], arguments[i]);
  if (readable) {
    for (Call* call : memory.kept) {
      if (call && call->count == count && are_like(call->arguments(), arguments, count)) {
        python.retain(names.none);
        return names.none;
      }
    }
  }
  Object* args = python.new_tuple(count);
  if (!args) return nullptr;
  for (Size i = 0; i < count; i++) {
    python.retain(objects[i]);
    python.set_item(args, i, objects[i]);
  }
  Object* violated = python.call(memory.check, args, nullptr);
  python.release(args);
  if (violated == names.none && readable) remember(memory, arguments, count);
  return violated;
}

void destroy(Object* capsule) {
  auto* memory = (Memory*)python.content(capsule, CAPSULE);
  for (Call* call : memory->kept) forget(call);
  python.release(memory->check);
  free(memory);
}

// PyMethodDef of a function that takes an array of arguments
struct Definition {
  const char* name;
  Object* (*function)(Object* self, Object* const* arguments, Size count);
  int flags;
  const char* doc;
};
constexpr int FAST_CALL = 0x80;  // METH_FASTCALL

Definition definition = {"check", check, FAST_CALL, "Return the violated constraint, or None."};

}  // namespace
}  // namespace fusedops

FUSEDOPS_EXPORT void fusedops_set_up(const fusedops::Python* p, const fusedops::Torch* t, const fusedops::Names* n) {
  fusedops::python = *p, fusedops::torch = *t, fusedops::names = *n;
}

// Returns `check` with a memory, a new reference; null with an exception where there is no memory.
FUSEDOPS_EXPORT fusedops::Object* fusedops_remembered(fusedops::Object* check) {
  using namespace fusedops;
  auto* memory = (Memory*)calloc(1, sizeof(Memory));
  if (!memory) return python.no_memory();
  memory->check = check;
  python.retain(check);
  Object* capsule = python.new_capsule(memory, CAPSULE, destroy);
  if (!capsule) return nullptr;
  Object* function = python.new_function(&definition, capsule, nullptr);
  python.release(capsule);  // the function keeps it
  return function;
}

// Writes what is read of a tensor: dim, sizes, strides. False for one that is not read.
FUSEDOPS_EXPORT int32_t fusedops_read(fusedops::Object* tensor, int64_t* out) {
  fusedops::Argument argument;
  if (!read(tensor, argument) || argument.value) return 0;
  *out = argument.dim;
  memcpy(out + 1, argument.sizes, argument.dim * sizeof(int64_t));
  memcpy(out + 1 + argument.dim, argument.strides, argument.dim * sizeof(int64_t));
  return 1;
}

#include "arguments.h"

#include <cstring>

namespace fusedops::launch {

Python python;
Torch torch;
Names names;

namespace {

constexpr int EQUAL = 2, STRIDED = 0;  // of Python's comparisons, of c10::Layout

bool is_value(Object* type) {
  for (Object* each : names.values) {
    if (type == each) return true;
  }
  return false;
}

// Compares two values of one type. Numbers are equal where their bits are: -0.0 is not 0.0.
bool are_equal(Object* a, Object* b) {
  if (a == b) return true;
  if (type_of(a) == names.floating) {
    const double x = python.as_double(a), y = python.as_double(b);
    return !memcmp(&x, &y, sizeof x);
  }
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

// Returns the address of a tensor's implementation; null with an exception for what is no tensor.
void* implementation_of(Object* tensor) {
  Object* address = python.get_attribute(tensor, names.cdata);
  if (!address) return nullptr;
  void* implementation = python.as_pointer(address);
  python.release(address);
  return implementation;
}

}  // namespace

bool Argument::is_dense() const {
  int64_t count = 1;
  for (int64_t i = 0; i < dim; i++) count *= sizes[i];
  if (count < 2) return true;
  for (int64_t expected = 1; expected < count;) {
    int64_t found = 0;
    while (found < dim && (sizes[found] < 2 || strides[found] != expected)) found++;
    if (found == dim) return false;
    expected *= sizes[found];
  }
  return true;
}

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
  argument.implementation = implementation_of(object);
  if (!argument.implementation) {
    python.clear_error();
    return false;
  }
  void* tensor = &argument.implementation;
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

bool Arguments::read(Object* const* objects, Size given) {
  count = given;
  if (count > MOST_ARGUMENTS) return false;
  for (Size i = 0; i < count; i++) {
    if (!launch::read(objects[i], each[i])) return false;
  }
  return true;
}

bool Arguments::are_like(const Arguments& others) const {
  if (count != others.count) return false;
  for (Size i = 0; i < count; i++) {
    if (!launch::are_like(each[i], others.each[i])) return false;
  }
  return true;
}

void Arguments::retain_values() const {
  for (Size i = 0; i < count; i++) {
    if (each[i].value) python.retain(each[i].value);
  }
}

void Arguments::release_values() const {
  for (Size i = 0; i < count; i++) {
    if (each[i].value) python.release(each[i].value);
  }
}

}  // namespace fusedops::launch

// The range of the numbers in a tensor, such as the classes of a loss: torch's own functions take 3 us for a few.

#include "arguments.h"

namespace fusedops {
namespace {

constexpr int32_t INT64 = 4;                 // of c10::ScalarType
constexpr int64_t MOST_NUMBERS = 64 * 1024;  // which one thread reads; torch has more

// The arguments: a tensor, and an integer. Returns True where all numbers are in [0, integer), else False: one is
// not, or the tensor is not read here.
Object* within(Object*, Object* const* objects, Size count) {
  Argument tensor;
  if (count != 2 || !read(objects[0], tensor) || tensor.value) return retained(names.no);
  if (tensor.dtype != INT64 || tensor.device_type != CPU || !tensor.is_contiguous()) return retained(names.no);
  const long long end = python.as_integer(objects[1]);
  if (end == -1 && python.error()) {  // a symbolic number
    python.clear_error();
    return retained(names.no);
  }
  int64_t numbers = 1;
  for (int64_t i = 0; i < tensor.dim; i++) numbers *= tensor.sizes[i];
  if (!numbers) return retained(names.yes);
  void* address;
  if (numbers > MOST_NUMBERS || torch.data_ptr(&tensor.implementation, &address) || !address) return retained(names.no);
  bool outside = false;
  for (int64_t i = 0; i < numbers; i++) outside |= (uint64_t)((const int64_t*)address)[i] >= (uint64_t)end;
  return retained(outside ? names.no : names.yes);
}

Definition definition = {"within", within, FAST_CALL, "Return True where all numbers of a tensor are in [0, end)."};

}  // namespace
}  // namespace fusedops

FUSEDOPS_EXPORT fusedops::Object* fusedops_within() {
  return fusedops::python.new_function(&fusedops::definition, nullptr, nullptr);
}

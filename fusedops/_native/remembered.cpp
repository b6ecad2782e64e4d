// A check of a call's arguments that remembers the calls it took: a call like one of them is not checked again.
//
// The check is a Python function of the arguments, and returns None for a call that it takes. It reads nothing but what
// Argument has.

#include <cstdlib>

#include "arguments.h"

namespace fusedops {
namespace {

constexpr const char* CAPSULE = "fusedops.remembered";

struct Check {
  Memory memory;
  Object* check;
};

Object* check(Object* self, Object* const* objects, Size count) {
  auto& check = *(Check*)python.content(self, CAPSULE);
  Arguments arguments;
  const bool readable = arguments.read(objects, count);
  if (readable && check.memory.find(arguments)) return retained(names.none);
  Object* violated = python.call(check.check, objects, count, nullptr);
  if (violated == names.none && readable) check.memory.add(arguments, nullptr, nullptr);
  return violated;
}

void destroy(Object* capsule) {
  auto* check = (Check*)python.content(capsule, CAPSULE);
  check->memory.clear();
  python.release(check->check);
  free(check);
}

Definition definition = {"check", check, FAST_CALL, "Return the violated constraint, or None."};

}  // namespace
}  // namespace fusedops

// Returns `check` with a memory, a new reference; null with an exception where there is no memory.
FUSEDOPS_EXPORT fusedops::Object* fusedops_remembered(fusedops::Object* function) {
  using namespace fusedops;
  auto* check = (Check*)calloc(1, sizeof(Check));
  if (!check) return python.no_memory();
  check->check = retained(function);
  Object* capsule = python.new_capsule(check, CAPSULE, destroy);
  if (!capsule) return nullptr;
  Object* result = python.new_function(&definition, capsule, nullptr);
  python.release(capsule);  // the function keeps it
  return result;
}

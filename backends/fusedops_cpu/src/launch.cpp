// A launcher that remembers the calls it made: a call like one of them runs without Python, but for the allocation of
// its results.
//
// The launcher is a Python function. It returns a LibraryCall (struct_call.py): a function of the library, the fields
// of the struct whose address that function takes, and the results; or, for a call that needs no function, the results.
// A call is remembered where all that it reads are arguments of the launcher, and all that it writes are its results.

#include <cstdlib>
#include <cstring>

#include "arguments.h"

namespace fusedops::launch {
namespace {

constexpr const char* CAPSULE = "fusedops_cpu.launcher";
constexpr int MOST_FIELDS = 64, MOST_RESULTS = 12, MOST_CALLS = 8;

union Field {
  void* pointer;
  int64_t integer;
  double number;
};

// A field that has the address of a tensor.
struct Slot {
  int field, tensor;  // tensor: the place of an argument, or of a result
  bool is_result;
  int64_t offset;  // in bytes
};

struct Result {
  enum { NONE, ARGUMENT, NEW } kind;
  int argument;         // its place
  bool is_empty;        // it has no elements
  bool is_on_cpu;       // torch has a function for these that is twice as fast
  Object* creation[4];  // of a new tensor: sizes, strides, dtype, device; owned
};

// What is to be done for a call that is like a remembered one.
struct Recipe {
  int32_t (*function)(const Field*);
  int fields, slots, results;
  bool is_single;  // the result is no tuple
  Field values[MOST_FIELDS];
  Slot slot[MOST_FIELDS];
  Result result[MOST_RESULTS];
};

struct Call {
  int users;  // the memory, and whoever runs it
  Arguments arguments;
  Recipe recipe;
};

void clear(Recipe& recipe) {
  for (Result& result : recipe.result) {
    for (Object* each : result.creation) {
      if (each) python.release(each);
    }
  }
}

void release(Call* call) {
  if (!call || --call->users) return;
  call->arguments.release_values();
  clear(call->recipe);
  free(call);
}

struct Launcher {
  Object *function, *library_call;  // library_call: the type
  int64_t calls;                    // ever remembered; the newest MOST_CALLS are kept
  Call* kept[MOST_CALLS];

  Call* find(const Arguments& arguments) {
    for (Call* call : kept) {
      if (call && call->arguments.are_like(arguments)) return call;
    }
    return nullptr;
  }

  void keep(Call* call) {
    Call*& place = kept[calls++ % MOST_CALLS];
    Call* before = place;
    place = call;
    release(before);
  }
};

// Sets the address of a tensor's first element. False for what has none, without an exception: a tensor with elements
// whose storage was freed has the address null, which is that of None for a C function.
bool address_of(const Argument& tensor, void** address) {
  void* implementation = tensor.implementation;
  if (torch.data_ptr(&implementation, address)) return false;
  bool is_empty = false;
  for (int64_t i = 0; !*address && i < tensor.dim; i++) is_empty |= !tensor.sizes[i];
  return *address || is_empty;
}

int place_of(Object* object, Object* const* objects, Size count) {
  for (Size i = 0; i < count; i++) {
    if (objects[i] == object) return (int)i;
  }
  return -1;
}

// True where no tensor is given for two parameters: a field that has its address could be either's in another call.
bool are_distinct(Object* const* objects, const Arguments& arguments) {
  for (Size i = 1; i < arguments.count; i++) {
    if (!arguments.each[i].value && place_of(objects[i], objects, i) >= 0) return false;
  }
  return true;
}

int32_t run(int32_t (*function)(const Field*), const Field* values) {
  void* state = python.release_lock();
  const int32_t status = function(values);
  python.take_lock(state);
  return status;
}

// Packs the fields of a call, and notes in the recipe where they come from. False for what Python's own packing has to
// refuse. `is_general`: the recipe serves every call that is like this one.
bool pack(Object* function, Object* fields, Object* const* objects, Size count, Recipe& recipe, bool& is_general) {
  recipe.function = (int32_t (*)(const Field*))python.as_pointer(python.item(function, 0));
  const char* kinds = python.bytes(python.item(function, 1));
  recipe.fields = (int)python.tuple_size(fields);
  if (!kinds || recipe.fields > MOST_FIELDS || (size_t)recipe.fields != strlen(kinds)) return false;
  for (int i = 0; i < recipe.fields; i++) {
    Object* value = python.item(fields, i);
    Field& field = recipe.values[i];
    if (kinds[i] == 'q') {
      field.integer = python.as_integer(value);
      if (field.integer == -1 && python.error()) return false;
      continue;
    }
    if (kinds[i] == 'd') {
      field.number = python.as_double(value);
      if (field.number == -1 && python.error()) return false;
      continue;
    }
    field.pointer = nullptr;
    if (value == names.none) continue;
    int64_t offset = 0;
    if (type_of(value) == names.tuple) {  // a tensor, and an offset in bytes
      if (python.tuple_size(value) != 2) return false;
      offset = python.as_integer(python.item(value, 1));
      if (offset == -1 && python.error()) return false;
      value = python.item(value, 0);
    }
    Argument tensor;
    if (!read(value, tensor) || tensor.value || !address_of(tensor, &field.pointer)) return false;
    field.pointer = (char*)field.pointer + offset;
    const bool is_written = kinds[i] == 'w';
    const int place = is_written ? -1 : place_of(value, objects, count);
    is_general &= is_written || place >= 0;
    recipe.slot[recipe.slots++] = {i, place, is_written, offset};
  }
  return true;
}

Object* tuple_of(const int64_t* values, int64_t count) {
  Object* tuple = python.new_tuple(count);
  for (int64_t i = 0; tuple && i < count; i++) python.set_item(tuple, i, python.new_integer(values[i]));
  return tuple;
}

// Notes how a result is made. False where a call like this one has to run in Python.
bool note_result(Object* object, Object* const* objects, const Arguments& arguments, Result& result) {
  result = {Result::NONE, -1, false, false, {}};
  if (object == names.none) return true;
  result.argument = place_of(object, objects, arguments.count);
  result.kind = Result::ARGUMENT;
  if (result.argument >= 0) return true;
  Argument tensor;
  if (!read(object, tensor) || tensor.value || !tensor.is_dense()) return false;
  result.kind = Result::NEW;
  result.is_on_cpu = tensor.device_type == CPU;
  for (int64_t i = 0; i < tensor.dim; i++) result.is_empty |= !tensor.sizes[i];
  result.creation[0] = tuple_of(tensor.sizes, tensor.dim);
  result.creation[1] = tuple_of(tensor.strides, tensor.dim);
  result.creation[2] = python.get_attribute(object, names.dtype);
  result.creation[3] = python.get_attribute(object, names.device);
  for (Object* each : result.creation) {
    if (each) continue;
    python.clear_error();
    return false;
  }
  return true;
}

// Notes how the results are made, and which of them each written field is. False as for one result. Every new result
// has to be written.
bool note_results(Object* results, Object* fields, Object* const* objects, const Arguments& arguments, Recipe& recipe) {
  recipe.is_single = type_of(results) != names.tuple;
  recipe.results = recipe.is_single ? 1 : (int)python.tuple_size(results);
  if (recipe.results > MOST_RESULTS) return false;
  Object* each[MOST_RESULTS];
  bool is_written[MOST_RESULTS] = {};
  for (int i = 0; i < recipe.results; i++) {
    each[i] = recipe.is_single ? results : python.item(results, i);
    if (!note_result(each[i], objects, arguments, recipe.result[i])) return false;
  }
  for (int i = 0; i < recipe.slots; i++) {
    Slot& slot = recipe.slot[i];
    if (!slot.is_result) continue;
    Object* value = python.item(fields, slot.field);
    slot.tensor = place_of(type_of(value) == names.tuple ? python.item(value, 0) : value, each, recipe.results);
    if (slot.tensor < 0 || recipe.result[slot.tensor].kind != Result::NEW) return false;
    is_written[slot.tensor] = true;
  }
  for (int i = 0; i < recipe.results; i++) {
    const Result& result = recipe.result[i];
    if (result.kind == Result::NEW && !is_written[i] && !result.is_empty) return false;
  }
  return true;
}

// Runs what the launcher returned, and remembers it where it can be. A new reference, or null with an exception.
Object* run_first(Launcher& launcher, Object* returned, Object* const* objects, const Arguments* arguments) {
  Object *function = python.item(returned, 0), *fields = python.item(returned, 1), *results = python.item(returned, 2);
  auto* call = (Call*)calloc(1, sizeof(Call));
  if (!call) return python.no_memory();
  call->users = 1;
  bool is_general = arguments && are_distinct(objects, *arguments);
  if (!pack(function, fields, objects, arguments ? arguments->count : 0, call->recipe, is_general)) {
    release(call);
    python.clear_error();
    return python.call(python.item(function, 2), &returned, 1, nullptr);
  }
  if (const int32_t status = run(call->recipe.function, call->recipe.values)) {
    release(call);
    Object* number = python.new_integer(status);
    if (!number) return nullptr;
    Object* nothing = python.call(python.item(function, 3), &number, 1, nullptr);
    python.release(number);
    return nothing;
  }
  if (is_general && note_results(results, fields, objects, *arguments, call->recipe)) {
    call->arguments = *arguments;
    call->arguments.retain_values();
    launcher.keep(call);
  } else {
    release(call);
  }
  return retained(results);
}

Object* new_result(const Result& result) {
  if (result.is_on_cpu) return python.call(names.empty_on_cpu, result.creation, 3, nullptr);
  return python.call(names.empty, result.creation, 4, nullptr);
}

// Runs a remembered call for other arguments like its own. Null without an exception where Python has to run it.
Object* run_again(const Recipe& recipe, Object* const* objects, const Arguments& arguments) {
  Field values[MOST_FIELDS];
  Object* made[MOST_RESULTS];
  int count = 0;
  memcpy(values, recipe.values, recipe.fields * sizeof(Field));
  bool ran = false;
  for (; count < recipe.results; count++) {
    const Result& result = recipe.result[count];
    made[count] = result.kind == Result::NONE       ? retained(names.none)
                  : result.kind == Result::ARGUMENT ? retained(objects[result.argument])
                                                    : new_result(result);
    if (!made[count]) break;
  }
  if (count == recipe.results) {
    ran = true;
    for (int i = 0; ran && i < recipe.slots; i++) {
      const Slot& slot = recipe.slot[i];
      Argument result;
      if (slot.is_result) {
        ran = read(made[slot.tensor], result);
      } else {  // a view that stands for its negative has the metadata of any other
        Object* is_negative = python.call(names.is_neg, &objects[slot.tensor], 1, nullptr);
        ran = is_negative == names.no;
        if (is_negative) python.release(is_negative);
      }
      void*& address = values[slot.field].pointer;
      ran = ran && address_of(slot.is_result ? result : arguments.each[slot.tensor], &address);
      address = (char*)address + slot.offset;
    }
    ran = ran && !run(recipe.function, values);
  }
  Object* results = nullptr;
  if (ran && recipe.is_single) results = retained(made[0]);
  if (ran && !recipe.is_single && (results = python.new_tuple(count))) {
    for (int i = 0; i < count; i++) python.set_item(results, i, retained(made[i]));
  }
  for (int i = 0; i < count; i++) python.release(made[i]);
  return results;
}

Object* launch(Object* self, Object* const* objects, Size count) {
  auto& launcher = *(Launcher*)python.content(self, CAPSULE);
  Arguments arguments;
  const bool readable = arguments.read(objects, count);
  if (Call* call = readable ? launcher.find(arguments) : nullptr) {
    call->users++;  // Python code may run, and add other calls
    Object* results = run_again(call->recipe, objects, arguments);
    release(call);
    if (results || python.error()) return results;
  }
  Object* returned = python.call(launcher.function, objects, count, nullptr);
  if (!returned || type_of(returned) != launcher.library_call) return returned;
  Object* results = run_first(launcher, returned, objects, readable ? &arguments : nullptr);
  python.release(returned);
  return results;
}

void destroy(Object* capsule) {
  auto* launcher = (Launcher*)python.content(capsule, CAPSULE);
  for (Call* call : launcher->kept) release(call);
  python.release(launcher->function);
  python.release(launcher->library_call);
  free(launcher);
}

Definition definition = {"launch", launch, FAST_CALL, "Run the call that the function returns."};

}  // namespace
}  // namespace fusedops::launch

// Returns a function that runs what the launcher returns, a new reference; null with an exception where there is no
// memory.
FUSEDOPS_EXPORT void* fusedops_launcher(void* function, void* library_call) {
  using namespace fusedops::launch;
  auto* launcher = (Launcher*)calloc(1, sizeof(Launcher));
  if (!launcher) return python.no_memory();
  launcher->function = retained((Object*)function);
  launcher->library_call = retained((Object*)library_call);
  Object* capsule = python.new_capsule(launcher, CAPSULE, destroy);
  if (!capsule) return nullptr;
  Object* result = python.new_function(&definition, capsule, nullptr);
  python.release(capsule);  // the function keeps it
  return result;
}

FUSEDOPS_EXPORT void fusedops_set_up_launchers(const void* python_functions, const void* torch_functions, const void* objects) {
  using namespace fusedops::launch;
  python = *(const Python*)python_functions;
  torch = *(const Torch*)torch_functions;
  names = *(const Names*)objects;
}

// Writes what is read of a tensor: dim, sizes, strides. False for one that is not read.
FUSEDOPS_EXPORT int32_t fusedops_read(void* tensor, int64_t* out) {
  using namespace fusedops::launch;
  Argument argument;
  if (!read((Object*)tensor, argument) || argument.value) return 0;
  *out = argument.dim;
  memcpy(out + 1, argument.sizes, argument.dim * sizeof(int64_t));
  memcpy(out + 1 + argument.dim, argument.strides, argument.dim * sizeof(int64_t));
  return 1;
}

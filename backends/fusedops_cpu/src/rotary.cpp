// The rotation of pairs of elements of q and k by angles whose cosines and sines are given; the gradient is the
// rotation by the opposite angles.
//
// A block is some positions of one batch: all heads of q and k share their cosines and sines, in float32.
#include "api.h"
#include "parallel.h"
#include "rows.h"

namespace fusedops {
namespace {

// A row of `columns` elements: the first 2 * pairs rotate, the others are copied.
struct Row {
  int64_t columns, pairs;
  float sign;
};
typedef void (*RotateRow)(Row row, const void* x, void* y, const float* cos, const float* sin);

template <class T>
INLINE void copy_rest(Row row, const T* x, T* y) {
  const int64_t turned = 2 * row.pairs;
  if (row.columns > turned) memcpy((void*)(y + turned), x + turned, (row.columns - turned) * sizeof(T));
}

template <class T, bool STREAMS>
void rotate_halves(Row row, const void* from, void* to, const float* cos, const float* sin) {
  const T* x = (const T*)from;
  T* y = (T*)to;
  each(row.pairs, [=](int64_t i, auto lanes) {
    const vfloat a = load(x + i, lanes), b = load(x + row.pairs + i, lanes);
    const vfloat c = load(cos + i, lanes), s = load(sin + i, lanes) * row.sign;
    store_or_stream<STREAMS>(y + i, a * c - b * s, lanes);
    store_or_stream<STREAMS>(y + row.pairs + i, b * c + a * s, lanes);
  });
  copy_rest(row, x, y);
}

template <class T>
void rotate_pairs(Row row, const void* from, void* to, const float* cos, const float* sin) {
  const T* x = (const T*)from;
  T* y = (T*)to;
  each(row.pairs, [=](int64_t i, auto lanes) {
    vfloat a, b;
    load_pairs(x + 2 * i, lanes, a, b);
    const vfloat c = load(cos + i, lanes), s = load(sin + i, lanes) * row.sign;
    store_pairs(y + 2 * i, a * c - b * s, b * c + a * s, lanes);
  });
  copy_rest(row, x, y);
}

RotateRow function_of(const Rotary& call, const RotaryTensor& t) {
  const int64_t rows = call.batches * call.positions * t.heads;
  return with_dtype(t.dtype, [&](auto element) -> RotateRow {
    using T = decltype(element);
    if (call.interleaved) return rotate_pairs<T>;
    const bool in_memory = call.pairs % LANES == 0 && streams((const T*)t.y, rows, call.columns);
    return in_memory ? rotate_halves<T, true> : rotate_halves<T, false>;
  });
}

// The cosines, or sines, of some positions.
struct Angles {
  const float* values;
  int64_t stride;  // from one position to the next
};

// Rotates the rows of one tensor at n positions of a batch, in the order of y in memory.
void rotate(const RotaryTensor& t, RotateRow function, Row row, int64_t batch, int64_t position, int64_t n, Angles cos,
            Angles sin) {
  const int64_t size = t.dtype == FLOAT32 ? 4 : 2;
  const char* x = (const char*)t.x + (batch * t.x_batch + position * t.x_position) * size;
  char* y = (char*)t.y + (batch * t.y_batch + position * t.y_position) * size;
  const bool by_head = t.y_head >= t.y_position;
  const int64_t outer = by_head ? t.heads : n, inner = by_head ? n : t.heads;
  for (int64_t o = 0; o < outer; o++) {
    for (int64_t i = 0; i < inner; i++) {
      const int64_t head = by_head ? o : i, p = by_head ? i : o;
      function(row, x + (head * t.x_head + p * t.x_position) * size, y + (head * t.y_head + p * t.y_position) * size,
               cos.values + p * cos.stride, sin.values + p * sin.stride);
    }
  }
}

// The angles of n positions where they are, or in the buffer as float32.
Angles angles(const void* values, int64_t dtype, int64_t at, int64_t stride, int64_t n, int64_t pairs, float* buffer) {
  if (dtype == FLOAT32) return {(const float*)values + at, stride};
  for (int64_t p = 0; p < n; p++) load_as(dtype, (const uint16_t*)values + at + p * stride, buffer + p * pairs, pairs);
  return {buffer, pairs};
}

Status rotate_all(const Rotary& call) {
  const RotaryTensor &q = call.tensors[0], &k = call.tensors[1];
  const int64_t elements = call.columns * (q.heads + k.heads);  // of one position
  if (!elements) return OK;
  const int64_t n = std::min(call.positions, std::max<int64_t>(1, BLOCK / elements));
  const int64_t blocks_of_batch = divide_up(call.positions, n), blocks = call.batches * blocks_of_batch;
  // an element takes 0.4 ns: for a few, waking a thread takes longer
  const bool few = call.batches * call.positions * elements <= 2 * BLOCK;
  const int64_t workers = few ? 1 : workers_for(blocks), room = n * call.pairs;
  const bool as_it_is = call.cos_dtype == FLOAT32 && call.sin_dtype == FLOAT32;
  const FloatBuffer buffer(as_it_is ? 0 : workers * 2 * room);
  float* buffers = buffer.data();
  if (!as_it_is && room && !buffers) return OUT_OF_MEMORY;
  const RotateRow functions[] = {function_of(call, q), function_of(call, k)};
  const Row row{call.columns, call.pairs, float(call.sign)};
  const Rotary* address = &call;  // not a copy for each worker
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    const Rotary& c = *address;
    const int64_t batch = block / blocks_of_batch, first = block % blocks_of_batch * n;
    const int64_t count = std::min(n, c.positions - first);
    float *cos_buffer = as_it_is ? nullptr : buffers + worker * 2 * room,
          *sin_buffer = as_it_is ? nullptr : cos_buffer + room;
    const Angles cos = angles(c.cos, c.cos_dtype, batch * c.cos_batch + first * c.cos_position, c.cos_position, count,
                              c.pairs, cos_buffer);
    const Angles sin = angles(c.sin, c.sin_dtype, batch * c.sin_batch + first * c.sin_position, c.sin_position, count,
                              c.pairs, sin_buffer);
    for (int i = 0; i < 2; i++)
      if (c.tensors[i].heads) rotate(c.tensors[i], functions[i], row, batch, first, count, cos, sin);
    stream_end();
  });
  return OK;
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_rotary(const Rotary* call) {
  if (!call->batches || !call->positions || !call->columns) return OK;
  if (call->pairs < 0 || 2 * call->pairs > call->columns) return INVALID;
  if (call->pairs && (!call->cos || !call->sin)) return INVALID;
  for (const RotaryTensor& t : call->tensors)
    if (t.heads && (!t.x || !t.y)) return INVALID;
  for (const RotaryTensor& t : call->tensors)
    use_huge_pages(t.y, call->batches * t.heads * call->positions * call->columns, t.dtype);
  return rotate_all(*call);
}

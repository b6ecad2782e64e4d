// The rotation of pairs of elements of q and k by angles whose cosines and sines are given; the gradient is the
// rotation by the opposite angles.
//
// A block is some positions of one batch: all heads of q and k share their cosines and sines, in float32.
#include "api.h"
#include "parallel.h"
#include "rows.h"
#include "simd/several.h"

namespace fusedops {
namespace {

// Rows of `columns` elements: the first 2 * pairs rotate, the others are copied. Steps: from one row to the next, in
// elements.
struct Rows {
  int64_t count, columns, pairs, x_step, y_step, cos_step, sin_step;
  float sign;
};
typedef void (*RotateRows)(const Rows& rows, const void* x, void* y, const float* cos, const float* sin);

// Calls f(x, y, cos, sin, pairs, sign) for each row.
template <class T, class F>
INLINE void each_row(const Rows& given, const void* from, void* to, const float* cos, const float* sin, F f) {
  const Rows rows = given;
  const T* x = (const T*)from;
  T* y = (T*)to;
  const int64_t turned = 2 * rows.pairs, rest = (rows.columns - turned) * sizeof(T);
  const int64_t bytes = rows.columns * sizeof(T), ahead = std::max<int64_t>(1, 2048 / bytes) * rows.x_step;
  for (int64_t i = 0; i < rows.count; i++) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)(x + ahead) + at);
    f(x, y, cos, sin, rows.pairs, rows.sign);
    if (rest > 0) memcpy((void*)(y + turned), x + turned, rest);
    x += rows.x_step, y += rows.y_step, cos += rows.cos_step, sin += rows.sin_step;
  }
}

template <class T, bool STREAMS>
void rotate_halves(const Rows& rows, const void* from, void* to, const float* cos, const float* sin) {
  each_row<T>(rows, from, to, cos, sin,
              [](const T* x, T* y, const float* cos, const float* sin, int64_t n, float sign) {
                each_group<Pair>(n, [=](int64_t i, auto lanes) {
                  const auto a = load(x + i, lanes), b = load(x + n + i, lanes);
                  const auto c = load(cos + i, lanes), s = load(sin + i, lanes) * sign;
                  store_or_stream<STREAMS>(y + i, a * c - b * s, lanes);
                  store_or_stream<STREAMS>(y + n + i, b * c + a * s, lanes);
                });
              });
}

template <class T, bool STREAMS>
void rotate_pairs(const Rows& rows, const void* from, void* to, const float* cos, const float* sin) {
  each_row<T>(rows, from, to, cos, sin,
              [](const T* x, T* y, const float* cos, const float* sin, int64_t n, float sign) {
                each(n, [=](int64_t i, auto lanes) {
                  vfloat a, b;
                  load_pairs(x + 2 * i, lanes, a, b);
                  const vfloat c = load(cos + i, lanes), s = load(sin + i, lanes) * sign;
                  store_pairs<STREAMS>(y + 2 * i, a * c - b * s, b * c + a * s, lanes);
                });
              });
}

RotateRows function_of(const Rotary& call, const RotaryTensor& t) {
  const int64_t rows = call.batches * call.positions * t.heads;
  return with_dtype(t.dtype, [&](auto element) -> RotateRows {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, float16>)
      return call.interleaved ? rotate_pairs<T, false> : rotate_halves<T, false>;
    const bool in_memory = call.pairs % LANES == 0 && streams((const T*)t.y, rows, call.columns);
    if (call.interleaved) return in_memory ? rotate_pairs<T, true> : rotate_pairs<T, false>;
    return in_memory ? rotate_halves<T, true> : rotate_halves<T, false>;
  });
}

// The cosines, or sines, of some positions.
struct Angles {
  const float* values;
  int64_t stride;  // from one position to the next
};

// Copies a head of n positions whose elements are apart in memory, as those of a transposed gradient, to rows.
template <class T>
INLINE void gather(const RotaryTensor& t, const void* from, int64_t n, int64_t columns, void* to) {
  const T* x = (const T*)from;
  T* y = (T*)to;
  for (int64_t i = 0; i < columns; i++, x += t.x_element)
    for (int64_t p = 0; p < n; p++) y[p * columns + i] = x[p * t.x_position];
}

// Rotates the rows of one tensor at n positions of a batch, in the order of y in memory. `room`: of the rows of a head,
// where the elements of x are apart.
void rotate(const RotaryTensor& t, RotateRows function, Rows rows, int64_t batch, int64_t position, int64_t n,
            Angles cos, Angles sin, float* room) {
  const int64_t size = t.dtype == FLOAT32 ? 4 : 2;
  const char* x = (const char*)t.x + (batch * t.x_batch + position * t.x_position) * size;
  char* y = (char*)t.y + (batch * t.y_batch + position * t.y_position) * size;
  const bool apart = t.x_element != 1;
  if (apart || t.y_head >= t.y_position) {
    rows.count = n, rows.x_step = apart ? rows.columns : t.x_position, rows.y_step = t.y_position;
    rows.cos_step = cos.stride, rows.sin_step = sin.stride;
    for (int64_t head = 0; head < t.heads; head++) {
      const void* of_head = x + head * t.x_head * size;
      if (apart && size == 4) gather<uint32_t>(t, of_head, n, rows.columns, room);
      if (apart && size == 2) gather<uint16_t>(t, of_head, n, rows.columns, room);
      function(rows, apart ? room : of_head, y + head * t.y_head * size, cos.values, sin.values);
    }
  } else {
    rows.count = t.heads, rows.x_step = t.x_head, rows.y_step = t.y_head, rows.cos_step = rows.sin_step = 0;
    for (int64_t p = 0; p < n; p++)
      function(rows, x + p * t.x_position * size, y + p * t.y_position * size, cos.values + p * cos.stride,
               sin.values + p * sin.stride);
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
  // Blocks are longer than elsewhere where there are many: a block reads as many stretches of memory as there are
  // heads.
  const int64_t all = call.batches * call.positions * elements;
  const int64_t of_block = std::max(BLOCK, std::min(4 * BLOCK, all / 32));
  const bool apart = (q.heads && q.x_element != 1) || (k.heads && k.x_element != 1);
  const int64_t least = apart ? 64 : 1;  // positions: elements that are apart are next to those of other positions
  const int64_t n = std::min(call.positions, std::max(least, of_block / elements));
  const int64_t blocks_of_batch = divide_up(call.positions, n), blocks = call.batches * blocks_of_batch;
  // an element takes 0.4 ns: for a few, waking a thread takes longer
  const bool few = all <= 2 * BLOCK;
  const int64_t workers = few ? 1 : workers_for(blocks), room = n * call.pairs;
  const bool as_it_is = call.cos_dtype == FLOAT32 && call.sin_dtype == FLOAT32;
  const FloatBuffer buffer(as_it_is ? 0 : workers * 2 * room), rows_buffer(apart ? workers * n * call.columns : 0);
  float *buffers = buffer.data(), *rows_buffers = rows_buffer.data();
  if ((!as_it_is && room && !buffers) || (apart && !rows_buffers)) return OUT_OF_MEMORY;
  const RotateRows functions[] = {function_of(call, q), function_of(call, k)};
  Rows rows{};
  rows.columns = call.columns, rows.pairs = call.pairs, rows.sign = float(call.sign);
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
    float* of_worker = apart ? rows_buffers + worker * n * c.columns : nullptr;
    for (int i = 0; i < 2; i++)
      if (c.tensors[i].heads) rotate(c.tensors[i], functions[i], rows, batch, first, count, cos, sin, of_worker);
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

// New keys and values into the pages of a cache: as they are, or in codes of 8 bits.
//
// The steps of a code are roundings of IEEE 754 float32, as fusedops/ops/attention/store_kv.py has them.
#include <algorithm>
#include <cstring>

#include "rows.h"
#include "simd/codes.h"
#include "simd/several.h"

namespace fusedops {
namespace {

// The rows of k or of v, and where they go.
struct Side {
  const char* from;
  int64_t token, head, size;
  char* cache;
  int64_t page, offset, cache_head;
  float* scale;
  int64_t scale_page, scale_token, scale_head;
  bool writes_scale;
};

template <class Code>
void store_row(const float* numbers, int64_t size, float most, float scale, Code* to) {
  if (scale == 0) {
    memset(to, 0, size);
    return;
  }
  const vfloat divisor = all(scale);
  for (int64_t i = 0; i < size; i += LANES) {  // the last vector reaches into the padding
    const vfloat v = load(numbers + i) / divisor;
    Code codes[LANES];
    store_codes(codes, at_most(most, at_least(-most, v)));
    memcpy(to + i, codes, std::min<int64_t>(LANES, size - i));
  }
}

float largest_of(const float* numbers, int64_t size) {
  vint largest{};  // as integers, magnitudes have their order, and those of inf and NaN are the largest
  for (int64_t i = 0; i < size; i += LANES) {
    const vint bits = bits_as<vint>(load(numbers + i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t most = 0;
  for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
  return bits_as<float>(most);
}

// `numbers`: for a row in float32, up to whole vectors.
void store_token(const StoreKv& call, const Side& side, int64_t token, float* numbers) {
  const int64_t place = call.slots[token], page = place / call.page, offset = place % call.page;
  const int64_t from_bytes = size_of(call.dtype);
  for (int64_t head = 0; head < call.heads; head++) {
    const char* from = side.from + (token * side.token + head * side.head) * from_bytes;
    const int64_t at = page * side.page + offset * side.offset + head * side.cache_head;
    if (!side.scale) {
      memcpy(side.cache + at * from_bytes, from, side.size * from_bytes);
      continue;
    }
    load_as(call.dtype, from, numbers, side.size);
    for (int64_t i = side.size; i < round_up(side.size, LANES); i++) numbers[i] = 0.0f;
    const float most = call.cache_dtype == INT8 ? 127.0f : 448.0f;
    float* scale = side.scale + page * side.scale_page + offset * side.scale_token + head * side.scale_head;
    if (side.writes_scale) *scale = largest_of(numbers, side.size) / most;
    if (call.cache_dtype == INT8)
      store_row(numbers, side.size, most, *scale, (int8_t*)side.cache + at);
    else
      store_row(numbers, side.size, most, *scale, (float8*)side.cache + at);
  }
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

FUSEDOPS_EXPORT int fusedops_store_kv(const StoreKv* call) {
  const int64_t places = call->pages * call->page;
  if (call->tokens && !call->slots) return INVALID;
  for (int64_t i = 0; i < call->tokens; i++)
    if (call->slots[i] < -1 || call->slots[i] >= places) return NO_SUCH_SLOT;
  if (!call->tokens || !call->heads || !places) return OK;
  if (call->size && (!call->k || !call->k_cache)) return INVALID;
  if (call->value_size && (!call->v || !call->v_cache)) return INVALID;
  const Side sides[] = {
      {(const char*)call->k, call->k_token, call->k_head, call->size, (char*)call->k_cache, call->k_cache_page,
       call->k_cache_token, call->k_cache_head, call->k_scale, call->k_scale_page, call->k_scale_token,
       call->k_scale_head, call->writes_k_scale != 0},
      {(const char*)call->v, call->v_token, call->v_head, call->value_size, (char*)call->v_cache, call->v_cache_page,
       call->v_cache_token, call->v_cache_head, call->v_scale, call->v_scale_page, call->v_scale_token,
       call->v_scale_head, call->writes_v_scale != 0},
  };
  const int64_t of_token = std::max<int64_t>(1, call->heads * (call->size + call->value_size));
  const int64_t tokens = std::max<int64_t>(1, BLOCK / of_token);
  const int64_t blocks = divide_up(call->tokens, tokens), workers = workers_for(blocks);
  const Scratch rows(workers, round_up(std::max(call->size, call->value_size), LANES) + LANES);
  if (rows.failed()) return OUT_OF_MEMORY;
  const Side* of_sides = sides;
  const Scratch* memory = &rows;
  run_blocks(blocks, workers, [=](int64_t block, int64_t worker) {
    const int64_t end = std::min(call->tokens, (block + 1) * tokens);
    for (int64_t token = block * tokens; token < end; token++)
      if (call->slots[token] >= 0)
        for (int side = 0; side < 2; side++) store_token(*call, of_sides[side], token, memory->of(worker));
  });
  return OK;
}

// A token for each row of logits: of those that the filters keep, the one with the largest sum of its logit and a noise
// that depends on the seed, the position and the token alone.
//
// All numbers that select a token are computed as fusedops/ops/sampling/formulas.py has them, bit for bit: no product
// is fused with a sum (see product()), and sums of probabilities are of integers. What the filters drop leaves the
// row, in order, so that each filter has less to read. A token whose largest possible score is below the best one has
// no noise computed.
#include <algorithm>
#include <cmath>

#include "elementwise/loss.h"
#include "elementwise/philox.h"
#include "once.h"
#include "parallel.h"
#include "simd/masks.h"

namespace fusedops {
namespace {

constexpr float UNIT = 0x1p40f;  // a probability of 1 in sums

template <class V>
INLINE V product(V a, V b) {
  return rounded(a * b);
}
INLINE vfloat product(vfloat a, float b) { return product(a, all(b)); }

// The polynomial by Horner's rule, the coefficient of the highest degree first.
template <int N>
INLINE vfloat polynomial(vfloat x, const float (&coefficients)[N]) {
  vfloat y = all(coefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < N; i++) y = product(y, x) + coefficients[i];
  return y;
}

constexpr float LN_2_HIGH = 0.693359375f, LN_2_LOW = -2.12194440e-4f;
constexpr float LOG_OF[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                            -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                            2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
constexpr float EXP_OF[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                            4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr int32_t SQRT_HALF_BITS = 0x3f3504f3;

// exp(d) for d <= 0; 0 below -87.
INLINE vfloat exponential(vfloat d) {
  constexpr float ROUNDING = 12582912.0f;
  const vfloat c = max(d, all(-87.0f)), rounded = product(c, 1.44269504f) + ROUNDING, n = rounded - ROUNDING;
  const vfloat r = (c - product(n, LN_2_HIGH)) - product(n, LN_2_LOW);
  const vfloat e = (product(polynomial(r, EXP_OF), product(r, r)) + r) + 1.0f;
  const vint power = (bits_as<vint>(rounded) + (127 - 0x4b400000)) << 23;
  return d >= -87.0f ? e * bits_as<vfloat>(power) : vfloat{};
}

// x = 2^e * (1 + f).
struct Split {
  vfloat e, f;
};
INLINE Split split(vfloat x) {
  const vint bits = bits_as<vint>(x), e = (bits - SQRT_HALF_BITS) >> 23;
  return {__builtin_convertvector(e, vfloat), bits_as<vfloat>(bits - (e << 23)) - 1.0f};
}
INLINE vfloat logarithm(Split x) {
  const vfloat f2 = product(x.f, x.f);
  vfloat y = product(product(x.f, f2), polynomial(x.f, LOG_OF));
  y = y + product(x.e, LN_2_LOW);
  y = y - product(f2, 0.5f);
  return (x.f + y) + product(x.e, LN_2_HIGH);
}

// -log(-log(u)), u = (word + 1/2) / 2^32.
INLINE vfloat noise_of(vuint words) {
  const vint bits = bits_as<vint>(words), near_one = bits >> 31;
  const vfloat v = (__builtin_convertvector(bits ^ near_one, vfloat) + 0.5f) * 0x1p-32f;  // u, or 1 - u
  const Split of_v = split(v);
  const vint small = v < 0.2928932f;
  const vfloat e = small ? vfloat{} : all(-1.0f), f = small ? -v : 1.0f - v * 2.0f;
  const vfloat minus_log = -logarithm({near_one ? e : of_v.e, near_one ? f : of_v.f});
  return -logarithm(split(minus_log));
}
constexpr float LARGEST_NOISE = 22.9f;  // 33 log(2) is 22.87

// ---- The words of Philox for blocks of tokens ----

template <int FIRST>
struct AlternatingPairs {
  static constexpr int at(int i) { return i / 2 % 2 * LANES + FIRST + i / 4 * 2 + i % 2; }
};

struct Words {
  static constexpr int TOKENS = 64;
  static constexpr int COUNTERS = LANES / 2, VECTORS = TOKENS / 4 / COUNTERS;
  uint64_t seed, position;

  INLINE void fill(uint64_t block, uint32_t* words) const {
    vuint64 c0[VECTORS], c1[VECTORS] = {}, c2[VECTORS], c3[VECTORS], first;
    for (int i = 0; i < COUNTERS; i++) first[i] = block * (TOKENS / 4) + i;
    const vuint64 m0 = vuint64{} + 0xD2511F53u, m1 = vuint64{} + 0xCD9E8D57u;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      c0[v] = first + uint64_t(v * COUNTERS);
      c2[v] = vuint64{} + (position & 0xffffffffu);
      c3[v] = vuint64{} + (position >> 32);
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {  // the high half of a lane may hold anything
        const vuint64 p = multiply_low_halves(c0[v], m0), q = multiply_low_halves(c2[v], m1);
        c0[v] = (q >> 32) ^ c1[v] ^ uint64_t(k0);
        c2[v] = (p >> 32) ^ c3[v] ^ uint64_t(k1);
        c1[v] = q, c3[v] = p;
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      const vuint a = bits_as<vuint>((c0[v] & 0xffffffffu) | (c1[v] << 32));
      const vuint b = bits_as<vuint>((c2[v] & 0xffffffffu) | (c3[v] << 32));
      const vuint low = shuffled<AlternatingPairs<0>>(a, b), high = shuffled<AlternatingPairs<LANES / 2>>(a, b);
      memcpy(words + 2 * v * LANES, &low, sizeof low);
      memcpy(words + (2 * v + 1) * LANES, &high, sizeof high);
    }
  }
};

// The best token so far. Of equal scores that of the lower id.
struct Best {
  float score = -INF;
  int64_t token = -1;
  INLINE void offer(float candidate, int64_t id) {
    if (candidate > score || (candidate == score && id < token)) score = candidate, token = id;
  }
};

// ---- The row: what is left of it, in order ----

struct Row {
  float* z;      // the logits of those that are left
  int32_t* ids;  // theirs
  int64_t n;
  float top, factor;

  // Calls f(vector of exp(d), index, lanes).
  INLINE vfloat difference(int64_t i) const { return product(load(z + i) - top, factor); }

  template <class Keep>
  INLINE void keep(Keep keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
      const float value = z[i];
      const int32_t id = ids[i];
      if (!keep(value, i)) continue;
      z[kept] = value;
      ids[kept++] = id;
    }
    n = kept;
  }
  void fill_end() {
    for (int64_t i = n; i < divide_up(n, LANES) * LANES; i++) z[i] = -INF;
  }
};

// An unsigned integer in the order of the numbers, of which none is -0.
INLINE uint32_t key_of(float z) {
  const uint32_t bits = bits_as<uint32_t>(z);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest key of which all numbers with it or a larger one weigh at least `needed`, and the weight of the larger.
struct Limit {
  uint32_t key;
  int64_t above;
};

// Counts weights by 11, 11 and 10 bits of the keys; those of the bin that has the limit are left for the next bits.
// weight(i) is at least 0, and all of them weigh at least `needed`.
template <class Weight>
NOINLINE Limit limit_of(const Row& row, int64_t needed, int64_t* bins, int32_t* left, Weight weight) {
  constexpr int SHIFTS[] = {21, 10, 0}, BINS[] = {2048, 2048, 1024};
  uint32_t prefix = 0;
  int64_t above = 0, count = row.n;
  for (int pass = 0; pass < 3; pass++) {
    const int shift = SHIFTS[pass], last = BINS[pass] - 1;
    std::fill(bins, bins + BINS[pass], 0);
    const auto index = [&](int64_t j) { return pass ? int64_t(left[j]) : j; };
    for (int64_t j = 0; j < count; j++) bins[key_of(row.z[index(j)]) >> shift & last] += weight(index(j));
    int bin = last;
    for (; bin > 0 && above + bins[bin] < needed; bin--) above += bins[bin];
    int64_t kept = 0;
    for (int64_t j = 0; j < count; j++) {
      const int32_t i = int32_t(index(j));
      left[kept] = i;
      kept += int(key_of(row.z[i]) >> shift & last) == bin;
    }
    count = kept;
    prefix = prefix << (pass == 2 ? 10 : 11) | uint32_t(bin);
  }
  return {prefix, above};
}

INLINE int64_t units_of(float e) { return int64_t(e * UNIT); }

struct Memory {
  float *z, *e;
  int32_t *ids, *left;
  int64_t* bins;

  static int64_t padded(int64_t columns) { return divide_up(columns, Words::TOKENS) * Words::TOKENS; }
  static int64_t size(int64_t columns) { return 4 * padded(columns) + 2 * 2048; }
  Memory(float* memory, int64_t columns) {
    const int64_t each = padded(columns);
    bins = (int64_t*)memory;  // first: malloc's alignment
    z = memory + 2 * 2048;
    e = z + each;
    ids = (int32_t*)(e + each);
    left = ids + each;
  }
};

// Reads a row: the allowed logits, -inf for the others and after the end. Returns false where one is NaN or inf.
template <class T>
NOINLINE bool read_row(const T* x, const uint8_t* mask, int64_t n, float* z, float& top) {
  vint right = vint{} - 1;
  vfloat tops = all(-INF);
  each(n, [&](int64_t i, auto lanes) {
    const vfloat v = where_loaded(load(x + i, lanes) + 0.0f, lanes, -INF);  // not -0
    right &= v < INF;
    const vfloat allowed = mask ? (masked_lanes(mask + i, lanes) ? all(-INF) : v) : v;
    store(z + i, allowed);  // there is room for whole vectors
    tops = max(allowed, tops);
  });
  for (int64_t i = divide_up(n, LANES) * LANES; i < Memory::padded(n); i++) z[i] = -INF;
  top = max_of(tops);
  bool all_right = true;
  for (int lane = 0; lane < LANES; lane++) all_right &= right[lane] != 0;
  return all_right;
}

// The first token with the largest logit.
NOINLINE int64_t first_of(const float* z, float top) {
  for (int64_t i = 0;; i += LANES) {
    const vint same = load(z + i) == top;
    for (int lane = 0; lane < LANES; lane++)
      if (same[lane]) return i + lane;
  }
}

// The token with the best score of a row with all its tokens in order, -inf for those that are out.
NOINLINE int64_t best_of_all(const Row& row, int64_t columns, const Words& words) {
  constexpr int TOKENS = Words::TOKENS;
  alignas(64) uint32_t block_words[TOKENS];
  Best best;
  const auto offer_block = [&](int64_t block, bool anyway) {
    const float* z = row.z + block * TOKENS;
    vfloat tops = load(z);
    for (int i = LANES; i < TOKENS; i += LANES) tops = max(load(z + i), tops);
    const float largest = product(all(max_of(tops)) - row.top, row.factor)[0];
    if (!anyway && !(largest + LARGEST_NOISE >= best.score)) return;
    words.fill(block, block_words);
    if (!anyway) {
      // the smallest u of a better token, and less, for the roundings of both
      const double needed = double(best.score) - double(largest) - 1e-4;
      const double u = std::exp(-std::exp(-needed)) * 4294967296.0 - 2;
      const vuint least = vuint{} + (u > 0 ? uint32_t(u) : 0u);
      vint enough = {};
      for (int i = 0; i < TOKENS; i += LANES) {
        vuint w;
        memcpy(&w, block_words + i, sizeof w);
        enough |= w >= least;
      }
      bool any = false;
      for (int lane = 0; lane < LANES; lane++) any |= enough[lane] != 0;
      if (!any) return;
    }
    for (int i = 0; i < TOKENS; i += LANES) {
      vuint w;
      memcpy(&w, block_words + i, sizeof w);
      const vfloat score = product(load(z + i) - row.top, row.factor) + noise_of(w);
      for (int lane = 0; lane < LANES; lane++)
        if (score[lane] >= best.score && score[lane] > -INF) best.offer(score[lane], block * TOKENS + i + lane);
    }
  };
  offer_block(first_of(row.z, row.top) / TOKENS, true);
  for (int64_t block = 0; block * TOKENS < columns; block++) offer_block(block, false);
  return best.token;
}

// The same for a row of few tokens: those of one block of words have them computed once.
NOINLINE int64_t best_of_few(const Row& row, const Words& words) {
  alignas(64) uint32_t block_words[Words::TOKENS];
  Best best;
  int64_t block = -1;
  for (int64_t i = 0; i < row.n; i++) {
    const float d = product(all(row.z[i]) - row.top, row.factor)[0];
    if (!(d + LARGEST_NOISE >= best.score)) continue;
    if (row.ids[i] / Words::TOKENS != block) words.fill(block = row.ids[i] / Words::TOKENS, block_words);
    const float score = d + noise_of(vuint{} + block_words[row.ids[i] % Words::TOKENS])[0];
    if (score > -INF) best.offer(score, row.ids[i]);
  }
  return best.token;
}

NOINLINE void exponentials_of(const Row& row, float* e) {
  for (int64_t i = 0; i < row.n; i += LANES) store(e + i, exponential(row.difference(i)));
}

// The log probability of a token among all, as linear_log_probs computes it.
template <class T>
NOINLINE float log_prob_of(const T* x, int64_t n, int64_t token, float temperature) {
  Exponentials exponentials;
  float z[CHUNK];
  const auto read = [&](int64_t at, int64_t count) {
    each_group<Pair>(count, [&](int64_t i, auto lanes) {
      auto v = load(x + at + i, lanes);
      if (temperature != 1) v = v / temperature;
      store(z + i, v, lanes);
    });
  };
  for (int64_t at = 0; at < n; at += CHUNK) {
    const int64_t count = std::min(CHUNK, n - at);
    read(at, count);
    exponentials.add(z, count, Ahead{(const char*)(x + at + CHUNK), sizeof(T)});
  }
  const double top = exponentials.top(), log_sum = std::log(double(exponentials.sum()));
  read(token, 1);
  return to_float(double(z[0]) - top - log_sum);
}

template <class T>
void sample_row(const Sample& call, int64_t number, const Memory& memory) {
  const int64_t columns = call.columns;
  const T* x = (const T*)call.logits + number * columns;
  const uint8_t* mask = call.mask ? call.mask + number * call.mask_row : nullptr;
  const float temperature = call.temperature ? read_once(call.temperature + number) : 1.0f;
  const float p = call.top_p ? read_once(call.top_p + number) : 1.0f;
  const float m = call.min_p ? read_once(call.min_p + number) : 0.0f;
  const int64_t k = call.top_k ? read_once(call.top_k + number) : 0;
  call.token[number] = -1;
  call.log_prob[number] = call.kind == NO_LOG_PROB ? 0.0f : NOT_A_NUMBER;
  Row row{memory.z, memory.ids, columns, 0, 1};
  const bool right = read_row(x, mask, columns, row.z, row.top) && row.top > -INF && temperature >= 0 &&
                     temperature < INF && p > 0 && p <= 1 && m >= 0 && m <= 1 && k >= 0;
  if (!right) return;
  if (temperature == 0) {
    call.token[number] = first_of(row.z, row.top);
    call.log_prob[number] = 0;
    return;
  }
  if (temperature != 1) {
    constexpr float LEAST = std::numeric_limits<float>::min(), MOST = std::numeric_limits<float>::max();
    row.factor = std::min(std::max(1.0f / temperature, LEAST), MOST);
  }
  const Words words{uint64_t(read_once(call.seed + number)), uint64_t(read_once(call.position + number))};
  const bool is_cut = (k > 0 && k < columns) || p < 1 || m > 0;
  int64_t token;
  float* e = memory.e;
  if (is_cut) {
    for (int64_t i = 0; i < columns; i++) row.ids[i] = int32_t(i);
    row.keep([](float z, int64_t) { return z > -INF; });
    if (k > 0 && k < row.n) {
      const Limit limit = limit_of(row, k, memory.bins, memory.left, [](int64_t) { return int64_t(1); });
      row.keep([=](float z, int64_t) { return key_of(z) >= limit.key; });
    }
    row.fill_end();
    if (p < 1) {
      exponentials_of(row, e);
      int64_t total = 0;
      for (int64_t i = 0; i < row.n; i++) total += units_of(e[i]);
      const int64_t needed = std::max<int64_t>(1, int64_t(std::ceil(double(p) * double(total))));
      const Limit limit = limit_of(row, needed, memory.bins, memory.left, [=](int64_t i) { return units_of(e[i]); });
      int64_t before = limit.above;  // of those that are equal, until the sum is reached
      row.keep([&](float z, int64_t i) {
        const uint32_t key = key_of(z);
        if (key != limit.key) return key > limit.key;
        const bool is_needed = before < needed;
        before += units_of(e[i]);
        return is_needed;
      });
      row.fill_end();
    }
    if (m > 0) {
      exponentials_of(row, e);
      row.keep([=](float, int64_t i) { return e[i] >= m; });
      row.fill_end();
    }
  }
  if (!is_cut) {
    token = best_of_all(row, columns, words);
  } else if (row.n < columns / 8) {
    token = best_of_few(row, words);
  } else {  // back to their places
    std::fill(e, e + Memory::padded(columns), -INF);
    for (int64_t i = 0; i < row.n; i++) e[row.ids[i]] = row.z[i];
    const Row spread{e, nullptr, columns, row.top, row.factor};
    token = best_of_all(spread, columns, words);
  }
  call.token[number] = token;
  if (call.kind == UNFILTERED) {
    call.log_prob[number] = log_prob_of(x, columns, token, temperature);
  } else if (call.kind == FILTERED) {
    if (!is_cut) row.n = columns;
    exponentials_of(row, memory.e);
    int64_t total = 0;
    for (int64_t i = 0; i < row.n; i++) total += units_of(memory.e[i]);
    const float chosen = load((const T*)x + token, Part{1})[0];
    const float d = product(all(chosen) - row.top, row.factor)[0];
    call.log_prob[number] = to_float(double(d) - std::log(double(total) / double(UNIT)));
  }
}

}  // namespace
}  // namespace fusedops

using namespace fusedops;

int fusedops_sample(const Sample* call) {
  const Sample& c = *call;
  if (c.rows < 0 || c.columns < 1) return INVALID;
  if (c.rows == 0) return OK;
  if (!c.logits || !c.seed || !c.position || !c.token || !c.log_prob) return INVALID;
  const int64_t workers = c.rows * c.columns <= BLOCK ? 1 : workers_for(c.rows), size = Memory::size(c.columns);
  const Scratch scratch(workers, size);
  if (scratch.failed()) return OUT_OF_MEMORY;
  run_blocks(c.rows, workers, [&](int64_t row, int64_t worker) {
    const Memory memory(scratch.of(worker), c.columns);
    with_dtype(c.dtype, [&](auto element) { sample_row<decltype(element)>(c, row, memory); });
  });
  return OK;
}

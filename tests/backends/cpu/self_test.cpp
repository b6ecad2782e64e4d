// Calls every exported function on buffers without a spare byte, with three threads, and compares with double
// arithmetic and a scalar Philox. Built with sanitizers by test_sources.py, and for other instruction sets.
#include "self_test.h"

#include <thread>

#include "elementwise/philox.h"

int failures = 0;

static uint32_t thread_count = 3;
static int threads(uint32_t* count) { return *count = thread_count, 0; }
static int run_threads(int64_t begin, int64_t end, int64_t, ParallelBody body, void* context) {
  std::vector<std::thread> pool;
  for (int64_t i = begin; i < end; i++) pool.emplace_back(body, i, i + 1, context);
  for (auto& thread : pool) thread.join();
  return 0;
}

static void scalar_philox(uint64_t seed, uint64_t counter, uint32_t* out) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; i++) {
    uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    uint32_t n0 = uint32_t(b >> 32) ^ c1 ^ k0, n2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b), c3 = uint32_t(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
static bool kept(uint64_t seed, int64_t index, uint32_t threshold) {
  uint32_t words[4];
  scalar_philox(seed, uint64_t(index) / 4, words);
  return words[index % 4] >= threshold;
}

static uint32_t random_state = 1;
float random_value() { return int32_t(random_state = random_state * 1664525u + 1013904223u) * (4.0f / 2147483648.0f); }

static void test_philox() {
  for (uint64_t seed : {uint64_t(1), ~uint64_t(4), (uint64_t(1) << 40) + 7})
    for (int64_t start : {int64_t(0), int64_t(4096), (int64_t(1) << 34) - 96, (int64_t(1) << 36) + 8}) {
      Philox philox(seed, 1u << 30);
      std::vector<int32_t> keep(Philox::BUFFER);
      philox.fill(start, 190, keep.data());
      int wrong = 0;
      for (int i = 0; i < 190; i++) wrong += (keep[i] != 0) != kept(seed, start + i, 1u << 30);
      CHECK(!wrong, "%d of 190 masks from %lld", wrong, (long long)start);
    }
}

static void test_conversions() {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    Tensor half(FLOAT16, 1);
    half.narrow[0] = uint16_t(bits);
    float16 memory[LANES] = {};
    memory[0].bits = uint16_t(bits);
    float value = load(memory)[0];
    CHECK(value == half.at(0) || (value != value && half.at(0) != half.at(0)), "float16 %x is read as %g", bits, value);
    half.set(0, value);
    CHECK(half.narrow[0] == bits || (value != value && (half.narrow[0] & 0x7c00) == 0x7c00), "float16 %x", bits);
  }
}

static void test_softmax(int64_t dtype, int64_t sq, int64_t sk, bool causal, int mask_form) {
  const int64_t heads = 2, rows = heads * sq;
  Tensor x = random_tensor(dtype, rows * sk), y(dtype, rows * sk), grad = random_tensor(dtype, rows * sk),
         dx(dtype, rows * sk);
  // of (2, sq, sk): the whole, one row for each head, one value a row
  std::vector<uint8_t> mask(mask_form == 1 ? rows * sk : mask_form == 2 ? heads * sk : rows);
  for (auto& m : mask) m = uint8_t(random_value() > 1 ? 2 : 0);
  struct {
    SoftmaxForward call;
    int64_t shapes[9];
  } forward = {{x.data(), mask_form ? mask.data() : nullptr, y.data(), dtype, rows, sq, sk, causal, 0.5, 3, 3},
               {heads, sq, sk, heads, mask_form == 2 ? 1 : sq, mask_form == 3 ? 1 : sk,
                mask_form == 2   ? sk
                : mask_form == 3 ? sq
                                 : sq * sk,
                mask_form == 3 ? 1 : sk, 1}};
  CHECK(fusedops_softmax_forward(&forward.call) == OK, "softmax");
  SoftmaxBackward backward{grad.data(), y.data(), dx.data(), dtype, rows, sq, sk, causal, 0.5};
  CHECK(fusedops_softmax_backward(&backward) == OK, "softmax backward");
  for (int64_t row = 0; row < rows; row++) {
    auto masked = [&](int64_t j) {
      if (causal && j > row % sq) return true;
      if (!mask_form) return false;
      return mask[mask_form == 1 ? row * sk + j : mask_form == 2 ? row / sq * sk + j : row] != 0;
    };
    double sum = 0, dot = 0;
    for (int64_t j = 0; j < sk; j++) {
      sum += masked(j) ? 0 : std::exp(0.5 * x.at(row * sk + j));
      dot += grad.at(row * sk + j) * y.at(row * sk + j);
    }
    for (int64_t j = 0; j < sk; j++) {
      int64_t i = row * sk + j;
      double want = masked(j) ? 0 : std::exp(0.5 * x.at(i)) / sum;
      CHECK(masked(j) ? y.at(i) == 0 : close(y.at(i), want, x.tolerance()), "sk %lld: %g, not %g", (long long)sk,
            y.at(i), want);
      double slope = 0.5 * y.at(i) * (grad.at(i) - dot);
      CHECK(close(dx.at(i), slope, x.tolerance()), "sk %lld: slope %g, not %g", (long long)sk, dx.at(i), slope);
    }
  }
}

static void test_rows(int64_t dtype, int64_t rows, int64_t columns, bool with_bias) {
  const int64_t count = rows * columns;
  const double k = std::sqrt(2 / M_PI);
  Tensor x = random_tensor(dtype, count), bias = random_tensor(dtype, columns), grad = random_tensor(dtype, count);
  Tensor residual = random_tensor(dtype, count), y(dtype, count), dx(dtype, count), dbias(dtype, columns);
  const void* b = with_bias ? bias.data() : nullptr;
  for (int tanh = 0; tanh < 2; tanh++) {
    GeluForward forward{x.data(), b, y.data(), dtype, count, columns, tanh};
    GeluBackward backward{grad.data(), x.data(), b, dx.data(), dbias.data(), dtype, count, columns, tanh};
    CHECK(fusedops_gelu_forward(&forward) == OK && fusedops_gelu_backward(&backward) == OK, "gelu");
    std::vector<double> sums(columns);
    for (int64_t i = 0; i < count; i++) {
      double u = x.at(i) + (b ? bias.at(i % columns) : 0), t = std::tanh(k * u * (1 + 0.044715 * u * u));
      double cdf = tanh ? 0.5 * (1 + t) : 0.5 * std::erfc(-u * std::sqrt(0.5));
      double slope = cdf + u * (tanh ? 0.5 * (1 - t * t) * k * (1 + 3 * 0.044715 * u * u)
                                     : std::exp(-0.5 * u * u) / std::sqrt(2 * M_PI));
      CHECK(close(y.at(i), u * cdf, x.tolerance()), "gelu(%g) = %g, not %g", u, y.at(i), u * cdf);
      CHECK(close(dx.at(i), grad.at(i) * slope, 4 * x.tolerance()), "gelu'(%g) = %g, not %g", u, dx.at(i),
            grad.at(i) * slope);
      sums[i % columns] += grad.at(i) * slope;
    }
    for (int64_t j = 0; b && j < columns; j++)
      CHECK(close(dbias.at(j), sums[j], 50 * x.tolerance()), "dbias %g, not %g", dbias.at(j), sums[j]);
  }
  const uint64_t seed = 12345;
  const int64_t threshold = int64_t(1) << 30;
  for (int with_residual = 0; with_residual < 2; with_residual++) {
    DropoutForward forward{
        x.data(),  b,      with_residual ? residual.data() : nullptr, y.data(), &seed, dtype, count, columns,
        threshold, 4 / 3.0};
    CHECK(fusedops_dropout_forward(&forward) == OK, "dropout");
    for (int64_t i = 0; i < count; i++) {
      double u = kept(seed, i, uint32_t(threshold)) ? (x.at(i) + (b ? bias.at(i % columns) : 0)) * 4 / 3 : 0;
      double want = u + (with_residual ? residual.at(i) : 0);
      CHECK(close(y.at(i), want, x.tolerance()), "dropout %g, not %g", y.at(i), want);
    }
  }
  DropoutBackward backward{grad.data(), dx.data(), dbias.data(), &seed, dtype, count, columns, threshold, 4 / 3.0};
  CHECK(fusedops_dropout_backward(&backward) == OK, "dropout backward");
  std::vector<double> sums(columns);
  for (int64_t i = 0; i < count; i++) {
    double du = kept(seed, i, uint32_t(threshold)) ? grad.at(i) * 4 / 3 : 0;
    CHECK(close(dx.at(i), du, x.tolerance()), "dropout backward %g, not %g", dx.at(i), du);
    sums[i % columns] += du;
  }
  for (int64_t j = 0; j < columns; j++)
    CHECK(close(dbias.at(j), sums[j], 50 * x.tolerance()), "dbias %g, not %g", dbias.at(j), sums[j]);
}

static void test_invalid() {
  float value = 1;
  uint8_t mask = 0;
  GeluForward gelu{nullptr, nullptr, &value, FLOAT32, 1, 0, 1};
  CHECK(fusedops_gelu_forward(&gelu) == INVALID, "no x");
  NormForward norm{&value, &value, nullptr, nullptr, &value, nullptr, nullptr, nullptr, 0, 0, 0, 1, 1, 0, 1e-5, 0};
  CHECK(fusedops_norm_forward(&norm) == INVALID, "a residual without s");
  GatedForward gated{&value, &value, &value, FLOAT32, 1, 1, 3, 1, 1, 0, 1, 0};
  CHECK(fusedops_gated_forward(&gated) == INVALID, "an unknown activation");
  int64_t target = 0;
  CrossEntropyForward loss{&value, &target, &value, nullptr, {FLOAT32, 1, 1, 1, 0, 1, -100, 4, 0, 0, 0, 1}};
  CHECK(fusedops_cross_entropy_forward(&loss) == INVALID, "an unknown reduction");
  Rotary rotary{&value, &value, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1, {}};
  CHECK(fusedops_rotary(&rotary) == INVALID, "more pairs than the row has");
  rotary.pairs = 1, rotary.tensors[1] = {nullptr, &value, FLOAT32, 1, 2, 2, 2, 2, 2, 2};
  CHECK(fusedops_rotary(&rotary) == INVALID, "no x");
  struct {
    SoftmaxForward call;
    int64_t shapes[6];
  } softmax = {{&value, &mask, &value, FLOAT32, 1, 1, 1, 0, 1, 2, 2}, {1, 1, 1, 2, 2, 1}};
  CHECK(fusedops_softmax_forward(&softmax.call) == INVALID, "a mask that does not broadcast");
}

int main() {
  fusedops_use_threads((void*)run_threads, (void*)threads);
  test_philox();
  test_conversions();
  test_invalid();
  test_linears();
  for (int64_t dtype : {FLOAT32, BFLOAT16, FLOAT16}) {
    for (int64_t sk : {1, 2, 3, 15, 16, 17, 33, 67, 130})
      for (int causal = 0; causal < 2; causal++)
        for (int mask_form = 0; mask_form < 4; mask_form++) test_softmax(dtype, 5, sk, causal, mask_form);
    test_softmax(dtype, 300, 131, true, 1);  // several blocks
    for (int64_t columns : {1, 3, 16, 37, 1000, 4099})
      for (int64_t rows : {1, 2, 9, 70}) {
        for (int with_bias = 0; with_bias < 2; with_bias++) test_rows(dtype, rows, columns, with_bias);
        test_norms(dtype, rows, columns);
        test_gated(dtype, rows, columns);
        test_gated_norms(dtype, rows, columns);
        test_merges(dtype, rows, columns);
        test_losses(dtype, rows, columns);
      }
    test_rotations(dtype);
    test_quantized(dtype);
    test_routings(dtype);
    test_experts(dtype);
    test_attentions(dtype);
    test_convolutions(dtype);
    test_linear_attentions(dtype);
  }
  printf("vectors of %d bytes, structs of", VECTOR_BYTES);
  // in the order of the functions of api.h
  for (size_t size : {sizeof(SoftmaxForward),
                      sizeof(SoftmaxBackward),
                      sizeof(AttentionForward),  // of few queries
                      sizeof(AttentionForward),  // in tiles
                      sizeof(AttentionBackward),
                      sizeof(MergeForward),
                      sizeof(MergeBackward),
                      sizeof(GeluForward),
                      sizeof(GeluBackward),
                      sizeof(DropoutForward),
                      sizeof(DropoutBackward),
                      sizeof(NormForward),
                      sizeof(NormBackward),
                      sizeof(GatedForward),
                      sizeof(GatedBackward),
                      sizeof(GatedNormForward),
                      sizeof(GatedNormBackward),
                      sizeof(ConvForward),
                      sizeof(ConvBackward),
                      sizeof(LinearAttentionForward),
                      sizeof(LinearAttentionBackward),
                      sizeof(CrossEntropyForward),
                      sizeof(CrossEntropyBackward),
                      sizeof(LinearForward),
                      sizeof(LinearProduct),
                      sizeof(LinearLoss),
                      sizeof(LinearLogProbs),
                      sizeof(LinearLogProbsBackward),
                      sizeof(Rotary),
                      sizeof(QuantizedForward),
                      sizeof(QuantizedBackward),
                      sizeof(RoutingForward),
                      sizeof(RoutingBackward),
                      sizeof(ExpertsForward),
                      sizeof(ExpertsBackward)})
    printf(" %d", int(size));
  printf(" bytes, %d failures\n", failures);
  return failures != 0;
}

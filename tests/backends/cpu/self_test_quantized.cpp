// Packed weights of every format, beside a scalar one that reads bit after bit.
#include "self_test.h"

struct Packing {
  int64_t weights, bytes, places;  // of a block; of its float16 numbers
  int64_t place[2];
};
static const Packing FORMATS[] = {{32, 34, 1, {0}},      {32, 18, 1, {0}},    {32, 20, 2, {0, 2}},
                                  {32, 22, 1, {0}},      {32, 24, 2, {0, 2}}, {256, 144, 2, {0, 2}},
                                  {256, 176, 2, {0, 2}}, {256, 210, 1, {208}}};
enum { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

static double half_of(const uint8_t* p) {
  Tensor half(FLOAT16, 1);
  half.narrow[0] = uint16_t(p[0] | p[1] << 8);
  return half.at(0);
}

// The number of 6 bits of a run: of the scales (which = 0) or of the minima (1) of Q4_K and Q5_K.
static int six_bits(const uint8_t* p, int run, int which) {
  if (run < 4) return p[run + 4 * which] & 63;
  return (p[run + 4] >> 4 * which & 15) | (p[run - 4 + 4 * which] >> 6) << 4;
}

static double weight_of(int format, const uint8_t* block, int i) {
  const double d = half_of(block), m = half_of(block + 2);
  const auto nibble = [&](const uint8_t* data) { return data[i % 16] >> i / 16 * 4 & 15; };
  const auto bit = [&](const uint8_t* data, int n) { return (data[n / 8] >> n % 8 & 1) << 4; };
  const int run = i / 32, at = i % 32;
  if (format == Q8_0) return d * int8_t(block[2 + i]);
  if (format == Q4_0) return d * (nibble(block + 2) - 8);
  if (format == Q4_1) return float(d * nibble(block + 4) + m);
  if (format == Q5_0) return d * ((nibble(block + 6) | bit(block + 2, i)) - 16);
  if (format == Q5_1) return float(d * (nibble(block + 8) | bit(block + 4, i)) + m);
  if (format == Q6_K) {
    const int half = i / 128, part = run % 4;
    const int low = block[64 * half + 32 * (part % 2) + at] >> part / 2 * 4 & 15;
    const int high = block[128 + 32 * half + at] >> 2 * part & 3;
    return half_of(block + 208) * int8_t(block[192 + i / 16]) * ((low | high << 4) - 32);
  }
  const uint8_t* data = block + (format == Q4_K ? 16 : 48) + run / 2 * 32;
  const int q = (data[at] >> run % 2 * 4 & 15) | (format == Q5_K ? (block[16 + at] >> run & 1) << 4 : 0);
  return float(d * six_bits(block + 4, run, 0) * q - m * six_bits(block + 4, run, 1));
}

static void test_quantized(int format, int64_t dtype, int64_t rows, int64_t columns, int64_t outputs) {
  const Packing& of = FORMATS[format];
  const int64_t row_bytes = columns / of.weights * of.bytes;
  std::vector<uint8_t> packed(outputs * row_bytes);
  for (auto& byte : packed) byte = uint8_t(int(random_value() * 64 + 256));
  for (int64_t block = 0; block < int64_t(packed.size()); block += of.bytes)
    for (int64_t i = 0; i < of.places; i++) packed[block + of.place[i] + 1] &= 0xac;  // magnitudes below 1/8
  Tensor x = random_tensor(dtype, rows * columns), grad = random_tensor(dtype, rows * outputs);
  Tensor y(dtype, rows * outputs), dx(dtype, rows * columns), bias = random_tensor(FLOAT32, outputs);
  QuantizedForward forward{x.data(), packed.data(), bias.data(), y.data(), dtype,
                           FLOAT32,  format,        rows,        columns,  outputs};
  QuantizedBackward backward{grad.data(), packed.data(), dx.data(), dtype, format, rows, columns, outputs};
  CHECK(fusedops_quantized_forward(&forward) == OK && fusedops_quantized_backward(&backward) == OK, "quantized");
  std::vector<double> weights(outputs * columns);
  for (int64_t i = 0; i < outputs * columns; i++)
    weights[i] = weight_of(format, packed.data() + i / of.weights * of.bytes, int(i % of.weights));
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t n = 0; n < outputs; n++) {
      double want = bias.at(n), size = std::fabs(want);
      for (int64_t k = 0; k < columns; k++) {
        const double term = x.at(row * columns + k) * weights[n * columns + k];
        want += term, size += std::fabs(term);
      }
      const double got = y.at(row * outputs + n);
      CHECK(std::fabs(got - want) <= x.tolerance() * size, "format %d, rows %d: %g, not %g", format, int(rows), got,
            want);
    }
    for (int64_t k = 0; k < columns; k++) {
      double want = 0, size = 0;
      for (int64_t n = 0; n < outputs; n++) {
        const double term = grad.at(row * outputs + n) * weights[n * columns + k];
        want += term, size += std::fabs(term);
      }
      const double got = dx.at(row * columns + k);
      CHECK(std::fabs(got - want) <= x.tolerance() * size, "format %d, rows %d: slope %g, not %g", format, int(rows),
            got, want);
    }
  }
}

void test_quantized(int64_t dtype) {
  for (int format = Q8_0; format <= Q6_K; format++) {
    for (int64_t rows : {1, 2, 3, 7, 13, 21}) test_quantized(format, dtype, rows, FORMATS[format].weights, 7);
    test_quantized(format, dtype, 5, 1280, 35);  // two parts, two panels
    test_quantized(format, dtype, 99, 256, 5);
  }
}

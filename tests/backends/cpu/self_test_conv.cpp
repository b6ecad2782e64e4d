// The causal convolution of the self test, beside double arithmetic: both orders in memory, packed sequences, states.
#include "self_test.h"

namespace {

struct Conv {
  int64_t dtype, batch, channels, length, width;
  bool by_channel, silu;
  std::vector<int64_t> bounds;  // empty: each batch is a sequence

  int64_t kept() const { return width - 1; }
  int64_t sequences() const { return bounds.empty() ? batch : int64_t(bounds.size()) - 1; }
  int64_t begin(int64_t n) const { return bounds.empty() ? 0 : bounds[n]; }
  int64_t end(int64_t n) const { return bounds.empty() ? length : bounds[n + 1]; }
  int64_t batch_of(int64_t n) const { return bounds.empty() ? n : 0; }
  int64_t at(int64_t b, int64_t c, int64_t p) const {
    return b * channels * length + (by_channel ? p * channels + c : c * length + p);
  }
  ConvSizes sizes() const {
    const int64_t step = by_channel ? 1 : length, position = by_channel ? channels : 1, all = channels * length;
    return {dtype, dtype,      dtype, batch, channels, length, width, sequences(),
            silu,  by_channel, all,   step,  position, all,    step,  position};
  }
};

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

void test_conv(const Conv& c) {
  const int64_t count = c.batch * c.channels * c.length, kept = c.kept(), states = c.sequences() * c.channels * kept;
  Tensor x = random_tensor(c.dtype, count), grad = random_tensor(c.dtype, count);
  Tensor weight = random_tensor(c.dtype, c.channels * c.width), bias = random_tensor(c.dtype, c.channels);
  Tensor before = random_tensor(c.dtype, states), grad_state = random_tensor(c.dtype, states);
  Tensor y(c.dtype, count), state(c.dtype, states), dx(c.dtype, count), dbefore(c.dtype, states);
  Tensor dweight(c.dtype, c.channels * c.width), dbias(c.dtype, c.channels);
  const int64_t* bounds = c.bounds.empty() ? nullptr : c.bounds.data();
  ConvForward forward{x.data(), weight.data(), bias.data(), before.data(), bounds, y.data(), state.data(), c.sizes()};
  CHECK(fusedops_conv_forward(&forward) == OK, "convolution");
  ConvBackward backward{grad.data(),
                        x.data(),
                        weight.data(),
                        bias.data(),
                        before.data(),
                        bounds,
                        grad_state.data(),
                        dx.data(),
                        dweight.data(),
                        dbias.data(),
                        dbefore.data(),
                        c.sizes(),
                        0,
                        0,
                        0};
  backward.grad_batch = backward.sizes.x_batch;
  backward.grad_channel = backward.sizes.x_channel;
  backward.grad_position = backward.sizes.x_position;
  CHECK(fusedops_conv_backward(&backward) == OK, "convolution backward");
  const double tolerance = 64 * x.tolerance();
  std::vector<double> weight_sums(c.channels * c.width), bias_sums(c.channels);
  for (int64_t n = 0; n < c.sequences(); n++)
    for (int64_t channel = 0; channel < c.channels; channel++) {
      const int64_t length = c.end(n) - c.begin(n), of_state = (n * c.channels + channel) * kept;
      auto place = [&](int64_t p) { return c.at(c.batch_of(n), channel, c.begin(n) + p); };
      auto input = [&](int64_t p) { return p >= 0 ? x.at(place(p)) : before.at(of_state + kept + p); };
      auto tap = [&](int64_t w) { return weight.at(channel * c.width + w); };
      std::vector<double> h(length), inputs(kept + length);  // of the inputs before, then of x
      for (int64_t p = 0; p < length; p++) {
        double z = bias.at(channel);
        for (int64_t w = 0; w < c.width; w++) z += tap(w) * input(p - kept + w);
        const double s = sigmoid(z), want = c.silu ? z * s : z;
        CHECK(close(y.at(place(p)), want, tolerance), "convolution %g, not %g", y.at(place(p)), want);
        h[p] = grad.at(place(p)) * (c.silu ? s * (1 + z * (1 - s)) : 1);
        for (int64_t w = 0; w < c.width; w++) {
          inputs[p + w] += tap(w) * h[p];
          weight_sums[channel * c.width + w] += h[p] * input(p - kept + w);
        }
        bias_sums[channel] += h[p];
      }
      for (int64_t k = 0; k < kept; k++) {
        CHECK(state.at(of_state + k) == input(length - kept + k), "state %g", state.at(of_state + k));
        inputs[length + k] += grad_state.at(of_state + k);
      }
      for (int64_t p = 0; p < length; p++)
        CHECK(close(dx.at(place(p)), inputs[kept + p], tolerance), "dx %g, not %g", dx.at(place(p)), inputs[kept + p]);
      for (int64_t k = 0; k < kept; k++) {
        const double got = dbefore.at(of_state + k);
        CHECK(close(got, inputs[k], tolerance), "gradient before %g, not %g", got, inputs[k]);
      }
    }
  if (bounds)
    for (int64_t p = c.bounds.back(); p < c.length; p++)
      for (int64_t channel = 0; channel < c.channels; channel++)
        CHECK(y.at(c.at(0, channel, p)) == 0 && dx.at(c.at(0, channel, p)) == 0, "a position of no sequence");
  const double bound = 200 * x.tolerance() * (1 + std::sqrt(double(c.batch * c.length)));
  for (int64_t i = 0; i < c.channels * c.width; i++)
    CHECK(close(dweight.at(i), weight_sums[i], bound), "dweight %g, not %g", dweight.at(i), weight_sums[i]);
  for (int64_t i = 0; i < c.channels; i++)
    CHECK(close(dbias.at(i), bias_sums[i], bound), "dbias %g, not %g", dbias.at(i), bias_sums[i]);
}

}  // namespace

void test_convolutions(int64_t dtype) {
  for (bool by_channel : {false, true})
    for (bool silu : {false, true})
      for (int64_t width : {2, 4, 7}) {
        for (int64_t length : {1, 3, 40}) test_conv({dtype, 2, 21, length, width, by_channel, silu, {}});
        test_conv({dtype, 1, 5, 40, width, by_channel, silu, {0, 3, 3, 4, 30, 38}});
      }
  test_conv({dtype, 2, 3, 2500, 4, false, true, {}});  // several chunks
  test_conv({dtype, 1, 600, 130, 4, true, true, {}});  // several tiles and parts
  test_conv({dtype, 1, 5, 2500, 4, true, false, {}});
}

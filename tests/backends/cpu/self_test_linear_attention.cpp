// Linear attention of the self test, beside the recurrence in double arithmetic, one position after another.
#include <algorithm>

#include "self_test.h"

namespace {

struct Linear {
  int64_t dtype, batch, positions, key_heads, heads, rows, columns;
  bool decays, by_row, replaces, normalize;
  std::vector<int64_t> bounds;  // empty: each batch is a sequence

  int64_t sequences() const { return bounds.empty() ? batch : int64_t(bounds.size()) - 1; }
  int64_t begin(int64_t n) const { return bounds.empty() ? n * positions : bounds[n]; }
  int64_t end(int64_t n) const { return bounds.empty() ? (n + 1) * positions : bounds[n + 1]; }
};

using Doubles = std::vector<double>;

// Results beside wanted numbers, by the largest of these.
void compare(const char* name, const Tensor& got, const Doubles& want, double tolerance) {
  double largest = 0, error = 0;
  for (double x : want) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < want.size(); i++) error = std::max(error, std::fabs(got.at(i) - want[i]));
  CHECK(error <= tolerance * (1 + largest), "linear attention, %s: error %g of %g", name, error, largest);
}

class Test {
 public:
  explicit Test(const Linear& c)
      : c(c),
        q(tensor(c.dtype, of_keys())),
        k(tensor(c.dtype, of_keys())),
        v(tensor(c.dtype, of_values())),
        grad(tensor(c.dtype, of_values())),
        decay(tensor(FLOAT32, of_betas() * (c.by_row ? c.rows : 1))),
        beta(tensor(FLOAT32, of_betas())),
        initial(tensor(FLOAT32, of_states())),
        grad_state(tensor(FLOAT32, of_states())) {
    for (auto& x : decay.wide) x = x < -0.95f ? -INFINITY : -std::fabs(x);
  }

  void run() {
    Tensor out(c.dtype, of_values()), state(FLOAT32, of_states()), dq(c.dtype, of_keys()), dk(c.dtype, of_keys());
    Tensor dv(c.dtype, of_values()), ddecay(FLOAT32, decay.size()), dbeta(FLOAT32, of_betas());
    Tensor dinitial(FLOAT32, of_states());
    const int64_t* bounds = c.bounds.empty() ? nullptr : c.bounds.data();
    float *decays = c.decays ? decay.wide.data() : nullptr, *betas = c.replaces ? beta.wide.data() : nullptr;
    const LinearAttention inputs{q.data(), k.data(),  v.data(),      decays,      betas,       initial.wide.data(),
                                 bounds,   c.dtype,   c.batch,       c.positions, c.key_heads, c.heads,
                                 c.rows,   c.columns, c.sequences(), c.by_row,    c.normalize, 0.25};
    const LinearAttentionForward forward{inputs, out.data(), state.wide.data()};
    CHECK(fusedops_linear_attention_forward(&forward) == OK, "linear attention");
    const LinearAttentionBackward backward{inputs,
                                           grad.data(),
                                           grad_state.wide.data(),
                                           dq.data(),
                                           dk.data(),
                                           dv.data(),
                                           c.decays ? ddecay.wide.data() : nullptr,
                                           c.replaces ? dbeta.wide.data() : nullptr,
                                           dinitial.wide.data()};
    CHECK(fusedops_linear_attention_backward(&backward) == OK, "linear attention backward");
    for (int64_t n = 0; n < c.sequences(); n++)
      for (int64_t head = 0; head < c.heads; head++) of_head(n, head);
    const double tolerance = 40 * q.tolerance(), of_float = 8e-5;
    compare("out", out, want_out, tolerance);
    compare("state", state, want_state, of_float);
    compare("dq", dq, want_dq, tolerance);
    compare("dk", dk, want_dk, tolerance);
    compare("dv", dv, want_dv, tolerance);
    if (c.decays) compare("ddecay", ddecay, want_ddecay, of_float);
    if (c.replaces) compare("dbeta", dbeta, want_dbeta, of_float);
    compare("dinitial", dinitial, want_dinitial, of_float);
  }

 private:
  static Tensor tensor(int64_t dtype, int64_t count) {
    Tensor t(dtype, count);
    for (int64_t i = 0; i < count; i++) t.set(i, random_value() / 4);
    return t;
  }
  int64_t of_betas() const { return c.batch * c.positions * c.heads; }
  int64_t of_keys() const { return c.batch * c.positions * c.key_heads * c.rows; }
  int64_t of_values() const { return of_betas() * c.columns; }
  int64_t of_states() const { return c.sequences() * c.heads * c.rows * c.columns; }

  double rnorm(const Tensor& x, int64_t at) const {
    double sum = 1e-6;
    for (int64_t i = 0; i < c.rows; i++) sum += x.at(at + i) * x.at(at + i);
    return c.normalize ? 1 / std::sqrt(sum) : 1;
  }
  double factor(int64_t at, int64_t i) const {
    return c.decays ? std::exp(decay.at(c.by_row ? at * c.rows + i : at)) : 1;
  }
  // Adds to dx the gradient of a row that is divided by its norm.
  void add_normalized(const Tensor& x, int64_t at, const Doubles& g, Doubles& dx) const {
    const double r = rnorm(x, at);
    double along = 0;
    for (int64_t i = 0; i < c.rows; i++) along += g[i] * x.at(at + i) * r;
    for (int64_t i = 0; i < c.rows; i++) dx[at + i] += (g[i] - (c.normalize ? x.at(at + i) * r * along : 0)) * r;
  }

  void of_head(int64_t n, int64_t head) {
    const int64_t R = c.rows, C = c.columns, size = R * C, start = c.begin(n), length = c.end(n) - start;
    const int64_t of_state = (n * c.heads + head) * size, key_head = head / (c.heads / c.key_heads);
    auto key_of = [&](int64_t t) { return ((start + t) * c.key_heads + key_head) * R; };
    auto beta_of = [&](int64_t t) { return (start + t) * c.heads + head; };
    Doubles states((length + 1) * size), difference(length * C);
    for (int64_t e = 0; e < size; e++) states[e] = initial.at(of_state + e);
    for (int64_t t = 0; t < length; t++) {
      const double rk = rnorm(k, key_of(t)), rq = rnorm(q, key_of(t)) * 0.25;
      double *before = &states[t * size], *after = before + size;
      for (int64_t j = 0; j < C; j++) {
        double u = v.at(beta_of(t) * C + j), sum = 0;
        for (int64_t i = 0; c.replaces && i < R; i++)
          u -= factor(beta_of(t), i) * before[i * C + j] * k.at(key_of(t) + i) * rk;
        difference[t * C + j] = u;
        if (c.replaces) u *= beta.at(beta_of(t));
        for (int64_t i = 0; i < R; i++) {
          after[i * C + j] = factor(beta_of(t), i) * before[i * C + j] + k.at(key_of(t) + i) * rk * u;
          sum += after[i * C + j] * q.at(key_of(t) + i) * rq;
        }
        want_out[beta_of(t) * C + j] = sum;
      }
    }
    Doubles d(size);
    for (int64_t e = 0; e < size; e++) {
      want_state[of_state + e] = states[length * size + e];
      d[e] = grad_state.at(of_state + e);
    }
    for (int64_t t = length - 1; t >= 0; t--) {
      const double rk = rnorm(k, key_of(t)), rq = rnorm(q, key_of(t)) * 0.25;
      const double *before = &states[t * size], *after = before + size, b = c.replaces ? beta.at(beta_of(t)) : 1;
      Doubles gq(R), gk(R), du(C);
      for (int64_t j = 0; j < C; j++) {
        const double g = grad.at(beta_of(t) * C + j);
        for (int64_t i = 0; i < R; i++) {
          gq[i] += after[i * C + j] * g * 0.25;
          d[i * C + j] += q.at(key_of(t) + i) * rq * g;
          du[j] += k.at(key_of(t) + i) * rk * d[i * C + j];
          gk[i] += d[i * C + j] * b * difference[t * C + j];
        }
        want_dbeta[beta_of(t)] += du[j] * difference[t * C + j];
        want_dv[beta_of(t) * C + j] = du[j] * b;
        for (int64_t i = 0; i < R; i++) {
          const double f = factor(beta_of(t), i), decayed = f * before[i * C + j];
          if (c.replaces) {
            gk[i] -= decayed * du[j] * b;
            d[i * C + j] -= k.at(key_of(t) + i) * rk * du[j] * b;
          }
          want_ddecay[c.by_row ? beta_of(t) * R + i : beta_of(t)] += decayed * d[i * C + j];
          d[i * C + j] *= f;
        }
      }
      add_normalized(q, key_of(t), gq, want_dq);
      add_normalized(k, key_of(t), gk, want_dk);
    }
    for (int64_t e = 0; e < size; e++) want_dinitial[of_state + e] = d[e];
  }

  Linear c;
  Tensor q, k, v, grad, decay, beta, initial, grad_state;
  Doubles want_out = Doubles(v.size()), want_state = Doubles(initial.size()), want_dq = Doubles(q.size()),
          want_dk = Doubles(q.size()), want_dv = Doubles(v.size()), want_ddecay = Doubles(decay.size()),
          want_dbeta = Doubles(beta.size()), want_dinitial = Doubles(initial.size());
};

}  // namespace

void test_linear_attentions(int64_t dtype) {
  for (int kind = 0; kind < 6; kind++) {
    const bool decays = kind >= 2, by_row = kind >= 4, replaces = kind % 2;
    for (int64_t positions : {1, 7, 70})
      Test({dtype, 2, positions, 1, 2, 5, 19, decays, by_row, replaces, replaces, {}}).run();
    Test({dtype, 1, 140, 2, 4, 33, 3, decays, by_row, replaces, true, {0, 3, 3, 70, 140}}).run();
  }
  Test({dtype, 1, 9, 1, 20, 3, 2, true, false, true, true, {}}).run();  // parts of the heads of a key head
}

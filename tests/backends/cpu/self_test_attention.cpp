// Attention of few queries, in tiles, and the gradients, beside the formula in doubles.
#include <algorithm>

#include "self_test.h"

namespace {

struct Sizes {
  int64_t batch, heads, key_heads, queries, keys, size, value_size;
};

// Whether a row sees a key; a mask has one row for all heads of a batch, and in it a dead row.
struct Seen {
  const uint8_t* mask;
  int64_t queries, keys, low, high;
  bool at(int64_t batch, int64_t query, int64_t key) const {
    if (key < query + low || key > query + high) return false;
    return !mask || !mask[(batch * queries + query) * keys + key];
  }
};

void test_attention(int64_t dtype, const Sizes& s, bool in_tiles, bool masked, int64_t low, int64_t high) {
  const int64_t rows = s.batch * s.heads * s.queries, of_keys = s.batch * s.key_heads * s.keys;
  const double scale = 0.3, tolerance = dtype == FLOAT32 ? 1e-5 : dtype == BFLOAT16 ? 3e-2 : 4e-3;
  Tensor q = random_tensor(dtype, rows * s.size), k = random_tensor(dtype, of_keys * s.size);
  Tensor v = random_tensor(dtype, of_keys * s.value_size), grad = random_tensor(dtype, rows * s.value_size);
  Tensor out(dtype, rows * s.value_size), dq(dtype, rows * s.size), dk(dtype, of_keys * s.size);
  Tensor dv(dtype, of_keys * s.value_size);
  std::vector<float> lse(rows), grad_lse(rows);
  for (float& each : grad_lse) each = random_value();
  std::vector<uint8_t> mask(s.batch * s.queries * s.keys);
  for (uint8_t& each : mask) each = random_value() > 1;
  if (masked) std::fill(mask.begin(), mask.begin() + s.keys, 1);
  const Seen seen{masked ? mask.data() : nullptr, s.queries, s.keys, low, high};
  for (int64_t b = 0; b < s.batch && masked; b++)  // a key that no row sees may hold anything
    for (int64_t key = 0; key < s.keys; key++) {
      bool is_seen = false;
      for (int64_t i = 0; i < s.queries; i++) is_seen |= seen.at(b, i, key);
      for (int64_t h = 0; h < s.key_heads && !is_seen; h++) {
        k.set(((b * s.key_heads + h) * s.keys + key) * s.size, NAN);
        v.set(((b * s.key_heads + h) * s.keys + key) * s.value_size, INFINITY);
      }
    }
  const auto strides = [](int64_t heads, int64_t length, int64_t width, int64_t* to) {
    to[0] = heads * length * width, to[1] = length * width, to[2] = width;
  };
  AttentionSizes sizes{};
  sizes.dtype = dtype, sizes.batch = s.batch, sizes.heads = s.heads, sizes.key_heads = s.key_heads;
  sizes.queries = s.queries, sizes.keys = s.keys, sizes.size = s.size, sizes.value_size = s.value_size;
  strides(s.heads, s.queries, s.size, &sizes.q_batch);
  strides(s.key_heads, s.keys, s.size, &sizes.k_batch);
  strides(s.key_heads, s.keys, s.value_size, &sizes.v_batch);
  strides(s.heads, s.queries, s.value_size, &sizes.out_batch);
  sizes.mask_batch = s.queries * s.keys, sizes.mask_query = s.keys, sizes.mask_key = 1;
  sizes.low = low, sizes.high = high, sizes.scale = scale;
  const AttentionForward call{q.data(), k.data(), v.data(), seen.mask, out.data(), lse.data(), sizes};
  const int status = in_tiles ? fusedops_attention_tiles(&call) : fusedops_attention_forward(&call);
  CHECK(status == OK, "attention of %d keys", int(s.keys));
  AttentionBackward back{};
  back.out = out.data(), back.lse = lse.data(), back.of_few = !in_tiles;
  strides(s.heads, s.queries, s.value_size, &back.saved_batch);
  back.q = q.data(), back.k = k.data(), back.v = v.data(), back.mask = seen.mask, back.grad = grad.data();
  back.grad_lse = grad_lse.data(), back.dq = dq.data(), back.dk = dk.data(), back.dv = dv.data(), back.sizes = sizes;
  strides(s.heads, s.queries, s.size, &back.dq_batch);
  strides(s.key_heads, s.keys, s.size, &back.dk_batch);
  strides(s.key_heads, s.keys, s.value_size, &back.dv_batch);
  CHECK(fusedops_attention_backward(&back) == OK, "its gradients of %d keys", int(s.keys));

  std::vector<double> want_dk(of_keys * s.size), want_dv(of_keys * s.value_size);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t b = row / s.queries / s.heads, head = row / s.queries % s.heads, i = row % s.queries;
    const int64_t first = (b * s.key_heads + head / (s.heads / s.key_heads)) * s.keys;
    std::vector<double> p(s.keys), dp(s.keys);
    double top = -INFINITY, sum = 0, inner = 0;
    const auto dot = [](const Tensor& x, int64_t at, const Tensor& y, int64_t from, int64_t n) {
      double total = 0;
      for (int64_t d = 0; d < n; d++) total += x.at(at * n + d) * y.at(from * n + d);
      return total;
    };
    for (int64_t key = 0; key < s.keys; key++) {
      p[key] = seen.at(b, i, key) ? scale * dot(q, row, k, first + key, s.size) : -INFINITY;
      top = std::max(top, p[key]);
    }
    for (double& each : p) sum += each = top == -INFINITY ? 0 : std::exp(each - top);
    const double want = top == -INFINITY ? -INFINITY : top + std::log(sum);
    CHECK(lse[row] == want || close(lse[row], want, 1e-5), "lse of row %d is %g, not %g", int(row), lse[row], want);
    for (int64_t key = 0; key < s.keys; key++) {
      p[key] = sum ? p[key] / sum : 0;
      dp[key] = p[key] ? dot(grad, row, v, first + key, s.value_size) : 0;
      inner += p[key] * dp[key];
    }
    for (int64_t d = 0; d < s.value_size; d++) {
      double value = 0;
      for (int64_t key = 0; key < s.keys; key++) {
        if (!p[key]) continue;
        value += p[key] * v.at((first + key) * s.value_size + d);
        want_dv[(first + key) * s.value_size + d] += p[key] * grad.at(row * s.value_size + d);
      }
      CHECK(close(out.at(row * s.value_size + d), value, tolerance), "out of row %d", int(row));
    }
    for (int64_t d = 0; d < s.size; d++) {
      double gradient = 0;
      for (int64_t key = 0; key < s.keys; key++) {
        if (!p[key]) continue;
        const double ds = scale * p[key] * (dp[key] - inner + grad_lse[row]);
        gradient += ds * k.at((first + key) * s.size + d);
        want_dk[(first + key) * s.size + d] += ds * q.at(row * s.size + d);
      }
      CHECK(close(dq.at(row * s.size + d), gradient, 10 * tolerance), "dq of row %d", int(row));
    }
  }
  for (size_t i = 0; i < want_dk.size(); i++) CHECK(close(dk.at(i), want_dk[i], 10 * tolerance), "dk %d", int(i));
  for (size_t i = 0; i < want_dv.size(); i++) CHECK(close(dv.at(i), want_dv[i], 10 * tolerance), "dv %d", int(i));
}

}  // namespace

void test_attentions(int64_t dtype) {
  const Sizes few[] = {{1, 1, 1, 1, 1, 1, 1},    {2, 6, 2, 3, 17, 33, 9},  {1, 5, 1, 4, 300, 16, 40},
                       {1, 2, 2, 1, 257, 8, 64}, {1, 40, 1, 2, 5, 3, 3},   {2, 2, 1, 25, 35, 33, 40},
                       {1, 1, 1, 70, 270, 5, 9}, {1, 8, 1, 101, 40, 12, 5}};
  for (const Sizes& s : few)
    for (bool in_tiles : {false, true})
      for (bool masked : {false, true}) {
        test_attention(dtype, s, in_tiles, masked, -s.queries, s.keys);
        test_attention(dtype, s, in_tiles, masked, s.keys - s.queries - 2, s.keys - s.queries);
      }
}

// Rows of two parts of one attention, with gaps between the rows of the second part; some have no keys in one or both.
void test_merges(int64_t dtype, int64_t rows, int64_t columns) {
  const int64_t count = rows * columns, stride = columns + 3;
  Tensor a = random_tensor(dtype, count), b = random_tensor(dtype, rows * stride), grad = random_tensor(dtype, count);
  Tensor out(dtype, count), da(dtype, count), db(dtype, count);
  std::vector<float> lse_a(rows), lse_b(rows), lse(rows), grad_lse(rows), dlse_a(rows), dlse_b(rows);
  for (int64_t row = 0; row < rows; row++) {
    lse_a[row] = row % 3 == 1 ? -INFINITY : 40 * random_value();
    lse_b[row] = row % 4 == 1 ? -INFINITY : lse_a[row] == -INFINITY ? random_value() : lse_a[row] + random_value();
    grad_lse[row] = random_value();
  }
  const MergeStrides dense{count, count, columns};
  const MergeSizes sizes{dtype, 1, 1, rows, columns, dense, {0, 0, stride}, dense};
  const MergeForward forward{a.data(), b.data(), lse_a.data(), lse_b.data(), out.data(), lse.data(), sizes};
  CHECK(fusedops_merge_forward(&forward) == OK, "merge");
  const MergeBackward backward{grad.data(),  grad_lse.data(), a.data(),  b.data(),      lse_a.data(),
                               lse_b.data(), da.data(),       db.data(), dlse_a.data(), dlse_b.data(),
                               sizes,        dense,           dense};
  CHECK(fusedops_merge_backward(&backward) == OK, "merge backward");
  const double tolerance = 4 * a.tolerance();
  for (int64_t row = 0; row < rows; row++) {
    const bool has_a = lse_a[row] != -INFINITY, has_b = lse_b[row] != -INFINITY;
    const double x = lse_a[row], y = lse_b[row];
    const double wa = !has_a ? 0 : has_b ? 1 / (1 + std::exp(y - x)) : 1, wb = has_b ? 1 - wa : 0;
    const double all = has_a && has_b ? std::max(x, y) + std::log1p(std::exp(-std::fabs(x - y))) : has_a ? x : y;
    CHECK(all == lse[row] || close(lse[row], all, 1e-6), "lse %g, not %g", lse[row], all);
    double moved = 0, size = 0;
    for (int64_t j = 0; j < columns; j++) {
      const double va = a.at(row * columns + j), vb = b.at(row * stride + j), g = grad.at(row * columns + j);
      const double want = wa * va + wb * vb, got = out.at(row * columns + j);
      CHECK(close(got, want, tolerance), "merge %g, not %g", got, want);
      CHECK(close(da.at(row * columns + j), wa * g, tolerance), "da %g, not %g", da.at(row * columns + j), wa * g);
      CHECK(close(db.at(row * columns + j), wb * g, tolerance), "db %g, not %g", db.at(row * columns + j), wb * g);
      moved += g * (va - vb), size += std::fabs(g * (va - vb));
    }
    const double of_a = wa * (grad_lse[row] + wb * moved), of_b = wb * (grad_lse[row] - wa * moved);
    CHECK(std::fabs(dlse_a[row] - of_a) <= 4e-6 * (4 + size), "dlse_a %g, not %g", dlse_a[row], of_a);
    CHECK(std::fabs(dlse_b[row] - of_b) <= 4e-6 * (4 + size), "dlse_b %g, not %g", dlse_b[row], of_b);
  }
}

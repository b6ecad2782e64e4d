// linear for numbers of rows on either side of each of its ways, beside sums in double; and rows beside others.
#include "self_test.h"

static void test_linear(int64_t rows, int64_t columns, int64_t terms, int64_t activation) {
  const int64_t weight_row = terms + 3;  // a slice of a larger weight, whose last row ends with its terms
  Tensor x = random_tensor(FLOAT32, rows * terms), bias = random_tensor(FLOAT32, columns);
  Tensor weight = random_tensor(FLOAT32, (columns - 1) * weight_row + terms), y(FLOAT32, rows * columns);
  LinearForward call{x.wide.data(), weight.wide.data(), bias.wide.data(), y.wide.data(), rows, columns,
                     terms,         weight_row,         activation};
  CHECK(fusedops_linear_forward(&call) == OK, "linear");
  for (int64_t row = 0; row < rows; row++)
    for (int64_t n = 0; n < columns; n++) {
      double want = bias.at(n), size = std::fabs(want);
      for (int64_t k = 0; k < terms; k++) {
        const double term = x.at(row * terms + k) * weight.at(n * weight_row + k);
        want += term, size += std::fabs(term);
      }
      if (activation == RELU) want = std::max(0.0, want);
      const double got = y.at(row * columns + n);
      CHECK(std::fabs(got - want) <= 2e-6 * size, "%d, %d, %d: %g, not %g", int(rows), int(columns), int(terms), got,
            want);
    }
  Tensor alone(FLOAT32, columns);
  const int64_t last = rows - 1;
  LinearForward one{x.wide.data() + last * terms,
                    weight.wide.data(),
                    bias.wide.data(),
                    alone.wide.data(),
                    1,
                    columns,
                    terms,
                    weight_row,
                    activation};
  CHECK(fusedops_linear_forward(&one) == OK, "linear");
  for (int64_t n = 0; n < columns; n++)
    CHECK(alone.wide[n] == y.wide[last * columns + n], "row %d of %d rows has other bits alone", int(last), int(rows));
}

void test_linears() {
  for (const int64_t rows : {1, 2, 3, 7, 47, 48, 53, 257})
    for (const int64_t columns : {1, 5, 33, 131}) test_linear(rows, columns, columns == 33 ? 1101 : 37, -1);
  test_linear(9, 40, 70, RELU);
}

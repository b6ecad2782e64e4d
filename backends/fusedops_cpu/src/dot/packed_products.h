// The products of rows with a packed weight, as a table of functions for its format: dot/quantized.cpp has them.
#pragma once

#include "api.h"
#include "parallel.h"

namespace fusedops {

// Writes the float32 values of some columns of a row of a packed weight, in the order of its codes.
using Unpack = void (*)(const PackedWeight& weight, int64_t row, int64_t first, int64_t count, float* to);

struct PackedProducts {
  static constexpr int64_t DEPTH = 1024;  // columns of a part of a sum: a multiple of each block
  static constexpr int64_t OUTPUTS = 32;  // rows of the weight of a block of work; unpacked 128 KiB, which stay in L2
  static constexpr int64_t ROWS = 96;     // rows of x of a block of work
  static constexpr int64_t COLUMNS = 256, GRADIENT_ROWS = 64;  // of a block of gradients: a block of each format
  static constexpr int64_t BUFFER = OUTPUTS * DEPTH;           // floats, for the unpacked weights of either

  int64_t weights;  // of a block of the format
  // Puts whole 32 numbers in the order of the codes; null where that is the order of the columns.
  void (*reorder)(const float* from, float* to, int64_t count);
  // The sums of some rows of x, (rows, columns) in the order of the codes, and rows of the weight: (rows, OUTPUTS).
  void (*sums)(const PackedWeight& weight, const float* x, int64_t columns, int64_t rows, int64_t output, int64_t count,
               float* sums, float* buffer);
  // Of rows of grad, (rows, outputs), the gradients of `width` columns of x from `first` on: (rows, COLUMNS).
  void (*gradient)(const PackedWeight& weight, const float* grad, int64_t outputs, int64_t rows, int64_t first,
                   int64_t width, float* sums, float* buffer);
};
PackedProducts packed_products(int64_t format);

// y = x @ W.T + bias for so many rows of x that x and W are worth packing (dot/linear.cpp): W is unpacked for each
// block of rows of x. x has the order of the codes. The bits are those of PackedProducts::sums, unless `in_order`.
bool takes_packed_weight(int64_t rows, int64_t columns, int64_t terms);
Status linear_of_packed(const float* x, const PackedWeight& weight, Unpack unpack, const float* bias, void* y,
                        int64_t dtype, int64_t rows, int64_t columns, int64_t terms, bool in_order);

}  // namespace fusedops

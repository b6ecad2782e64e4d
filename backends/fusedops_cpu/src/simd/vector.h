// Vectors of 32-bit lanes, one source for every instruction set: what a kernel needs is in these files.
//
//   types.h      the types, bits_as, all, lanes_below
//   avx512.h, avx2.h, v128.h      one of them: the operations below, which need intrinsics, as GCC 12 compiles the
//                generic forms to several instructions
//   memory.h     loads and stores, which convert float32, bfloat16 and float16 to and from float32 lanes
//   lanes.h      shuffles, and sums over the lanes of a vector
//   loops.h      loops over the elements of memory
//
//   max(a, b), min(a, b)        of two operands of which one is NaN: b (NEON: NaN)
//   positive_part(x)            x where it is positive, -0 or NaN; else 0
//   reciprocal(d)               1 / d for d in [0.5, 2**126] or NaN, to 0.6 units in the last place
//   selected(table, index)      lanes of a table, by the low bits of each index (AVX2 and AVX-512)
//   widen_16, narrow_16         16-bit numbers without a sign to and from 32-bit lanes
//   widen_8                     bytes without a sign to 32-bit lanes
//   widen(h, T), narrow(v, T)   to and from bfloat16 and float16: round to nearest even; NaN stays NaN
//   rounded_to_high_half(v)     bfloat16 in the high half of each lane; the low half may hold anything. Of a NaN, the
//                               high half of v: all arithmetic returns a quiet NaN, whose mark is there
//   narrow_two(a, b)            two vectors in bfloat16
//   load_first, store_first     the first n lanes, where HAS_MASKED_LOADS
//   stream(p, v), stream_16, stream_end   see memory.h
#pragma once

#include "simd/lanes.h"
#include "simd/loops.h"
#include "simd/memory.h"

// Tiles of a matrix product in float32, with their sums in registers.
//
// Each output is one chain of fused multiply-adds in the order of the inner dimension: its bits
// depend neither on the number of rows nor on how the product is cut into tiles.

#ifndef PALLAS_KERNELS_TILES_H_
#define PALLAS_KERNELS_TILES_H_

#include <cstdint>
#include <utility>

#include "vectors.h"

constexpr int W = kWide;
constexpr int kTile = W == 16 ? 8 : 4;  // rows of x that are multiplied together
constexpr int kVectors = 3;             // kTile * kVectors sums fit the registers

// total[r] (+)= sum over i of x[r][i] * b[i], for R rows of kVectors vectors; rows of total are
// kStride apart. `lines` lines of `ahead` are prefetched every 4 steps. `Number` is float or a type
// that loads as floats.
template <int kStride, int R, typename Number, typename Ahead>
void multiply(const float* __restrict x, int64_t x_stride, const Number* __restrict b,
              int64_t b_stride, int64_t depth, bool first, float* __restrict total, Ahead& ahead,
              int lines) {
  Float<W> sum[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v)
      sum[r][v] = first ? Float<W>{} : load<W>(total + r * kStride + v * W);
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    Float<W> column[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      column[v] = load<W>(b + i * b_stride + v * W);
      if constexpr (W == 8) keep_in_register(column[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Float<W> a = x[r * x_stride + i] - Float<W>{};  // plus zero would be an addition: -0
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] += a * column[v];
        if constexpr (W == 8) keep_in_register(sum[r][v]);
      }
    }
    asm volatile("" ::: "memory");  // keeps the compiler from mixing steps and spilling the sums
  };
  int64_t i = 0;
  for (; i + 4 <= depth; i += 4) {
    for (int l = 0; l < lines; ++l) ahead.fetch_line();
    step(i);
    step(i + 1);
    step(i + 2);
    step(i + 3);
  }
#pragma GCC unroll 1
  for (; i < depth; ++i) step(i);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) store(total + r * kStride + v * W, sum[r][v]);
}

template <int kStride, typename Number, typename Ahead, int... r>
auto multiply_for(int rows, std::integer_sequence<int, r...>) {
  static constexpr decltype(&multiply<kStride, 1, Number, Ahead>) table[] = {
      multiply<kStride, r + 1, Number, Ahead>...};
  return table[rows - 1];
}

// Calls `multiply` for 1 to kTile rows.
template <int kStride, typename Number, typename Ahead>
void multiply_rows(int rows, const float* x, int64_t x_stride, const Number* b, int64_t b_stride,
                   int64_t depth, bool first, float* total, Ahead& ahead, int lines) {
  constexpr auto counts = std::make_integer_sequence<int, kTile>();
  multiply_for<kStride, Number, Ahead>(rows, counts)(x, x_stride, b, b_stride, depth, first, total,
                                                     ahead, lines);
}

#endif  // PALLAS_KERNELS_TILES_H_

// Tiles of a matrix product, with their sums in registers, in float32.
//
// Each output is one chain of fused multiply-adds in the order of the inner dimension: its bits
// depend neither on the number of rows nor on how the product is cut into tiles.

#ifndef PALLAS_KERNELS_TILES_H_
#define PALLAS_KERNELS_TILES_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#include "vectors.h"

constexpr int W = kWide;
constexpr int kTile = W == 16 ? 8 : 4;  // rows of x that are multiplied together
constexpr int kVectors = 3;             // kTile * kVectors sums fit the registers

// sum[r] += x[r * x_stride] * column, for one column of floats or of pairs.
template <int R, typename X, typename Column>
[[gnu::always_inline]] inline void add_products(Float<W> (&sum)[R][kVectors], const X* x,
                                                int64_t x_stride, Column (&column)[kVectors]) {
  if constexpr (W == 8)
    for (int v = 0; v < kVectors; ++v) keep_in_register(column[v]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const auto a = broadcast<W>(x + r * x_stride);
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = multiply_add<W>(a, column[v], sum[r][v]);
      if constexpr (W == 8) keep_in_register(sum[r][v]);
    }
  }
  asm volatile("" ::: "memory");  // keeps the compiler from mixing steps and spilling the sums
}

// total[r] (+)= sum over i of x[r][i] * b[i], for R rows of kVectors vectors; rows of total are
// kStride apart. `lines` lines of `ahead` are prefetched every 4 steps. b has floats, or pairs of
// adjacent rows; x has floats, or pairs if b has. `depth` counts rows of b.
template <int kStride, int R, typename X, typename Number, typename Ahead>
void multiply(const X* __restrict x, int64_t x_stride, const Number* __restrict b, int64_t b_stride,
              int64_t depth, bool first, float* __restrict total, Ahead& ahead, int lines) {
  constexpr bool kWidens = std::is_same<X, float>::value && std::is_same<Number, Pair>::value;
  Float<W> sum[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v)
      sum[r][v] = first ? Float<W>{} : load<W>(total + r * kStride + v * W);
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    const Number* row = b + i * b_stride;
    if constexpr (kWidens) {
      Float<W> column[kVectors];
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) column[v] = (Float<W>)(load<W>(row + v * W) << 16);
      add_products(sum, x + 2 * i, x_stride, column);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) column[v] = (Float<W>)(load<W>(row + v * W) & ~0xffff);
      add_products(sum, x + 2 * i + 1, x_stride, column);
    } else {
      decltype(load<W>(b)) column[kVectors];
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) column[v] = load<W>(row + v * W);
      add_products(sum, x + i, x_stride, column);
    }
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

template <int kStride, typename X, typename Number, typename Ahead, int... r>
auto multiply_for(int rows, std::integer_sequence<int, r...>) {
  static constexpr decltype(&multiply<kStride, 1, X, Number, Ahead>) table[] = {
      multiply<kStride, r + 1, X, Number, Ahead>...};
  return table[rows - 1];
}

// Calls `multiply` for 1 to kTile rows.
template <int kStride, typename X, typename Number, typename Ahead>
void multiply_rows(int rows, const X* x, int64_t x_stride, const Number* b, int64_t b_stride,
                   int64_t depth, bool first, float* total, Ahead& ahead, int lines) {
  constexpr auto counts = std::make_integer_sequence<int, kTile>();
  multiply_for<kStride, X, Number, Ahead>(rows, counts)(x, x_stride, b, b_stride, depth, first,
                                                        total, ahead, lines);
}

#endif  // PALLAS_KERNELS_TILES_H_

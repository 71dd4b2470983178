// Vectors of W floats, in the compiler's own notation (GCC 12 or newer, clang).

#ifndef PALLAS_KERNELS_VECTORS_H_
#define PALLAS_KERNELS_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <utility>

// Floats in the widest vector that the machine has; two registers' worth on NEON.
#ifdef __AVX512F__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif

template <int W>
struct Simd {
  typedef float Float __attribute__((vector_size(4 * W)));
  typedef int32_t Int __attribute__((vector_size(4 * W)));
};
template <int W>
using Float = typename Simd<W>::Float;
template <int W>
using Int = typename Simd<W>::Int;

template <int W>
inline Float<W> load(const float* from) {
  Float<W> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <typename Vector>
inline void store(float* to, Vector x) {
  std::memcpy(to, &x, sizeof(x));
}

// One step of a transposition: swaps the off-diagonal step x step squares.
template <int step, int W, int... lane>
inline void transpose_step(Float<W>* x, std::integer_sequence<int, lane...>) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & step) continue;
    const Float<W> a = x[i], b = x[i + step];
    x[i] = __builtin_shufflevector(a, b, (lane & step ? W + lane - step : lane)...);
    x[i + step] = __builtin_shufflevector(a, b, (lane & step ? W + lane : lane + step)...);
  }
}

// Lane j of x[i] becomes lane i of x[j], for W vectors.
template <int W>
inline void transpose_square(Float<W>* x) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  transpose_step<1, W>(x, lanes);
  transpose_step<2, W>(x, lanes);
  transpose_step<4, W>(x, lanes);
  if constexpr (W > 8) transpose_step<8, W>(x, lanes);
}

#endif  // PALLAS_KERNELS_VECTORS_H_

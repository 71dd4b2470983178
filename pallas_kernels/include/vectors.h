// Vectors of W floats as vector extensions of the compiler (GCC 12 or newer, clang).

#ifndef PALLAS_KERNELS_VECTORS_H_
#define PALLAS_KERNELS_VECTORS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Floats in the machine's widest vector; in two registers on NEON.
#ifdef __AVX512F__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif

template <int W>
struct Simd {
  typedef float Float __attribute__((vector_size(4 * W)));
  typedef int32_t Int __attribute__((vector_size(4 * W)));
  typedef int16_t Short __attribute__((vector_size(2 * W)));
  typedef uint16_t Halves __attribute__((vector_size(2 * W)));
  typedef int8_t Signed __attribute__((vector_size(W)));
  typedef uint8_t Unsigned __attribute__((vector_size(W)));
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

// One bfloat16 number: the upper half of a float.
struct Bfloat16 {
  uint16_t bits;
};

template <int W>
inline Float<W> load(const Bfloat16* from) {
  typename Simd<W>::Halves x;
  std::memcpy(&x, from, sizeof(x));
  return (Float<W>)(__builtin_convertvector(x, Int<W>) << 16);
}

// Two bfloat16 numbers: `even` and `odd` of adjacent inner elements of a product.
struct Pair {
  uint16_t even, odd;
};

template <int W>
inline Int<W> load(const Pair* from) {
  Int<W> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// A number, or a pair, in all lanes.
template <int W>
inline Float<W> broadcast(const float* x) {
  return *x - Float<W>{};  // plus zero would change -0
}
template <int W>
inline Int<W> broadcast(const Pair* x) {
  int32_t both;
  std::memcpy(&both, x, sizeof(both));
  return both - Int<W>{};
}

template <int W>
inline Float<W> multiply_add(Float<W> a, Float<W> b, Float<W> sum) {
  return sum + a * b;
}

#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;

// Of pairs: one product after the other, without rounding in between. Subnormal numbers are zeros.
template <int W>
inline Float<W> multiply_add(Int<W> a, Int<W> b, Float<W> sum) {
  static_assert(W == 16);
  return (Float<W>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Rounds 16 floats to pairs.
inline void store(Pair* to, Float<16> x) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded, sizeof(rounded));
}
#else
constexpr bool kMultipliesPairs = false;
#endif

// One float8_e4m3fn number.
struct Float8 {
  uint8_t bits;
};

// Widens to four times the width, which GCC 12 does one element at a time if it is asked to at once.
template <int W, typename Bytes>
inline Int<W> widened(const void* from) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(from));
    constexpr bool is_signed = std::is_same<Bytes, typename Simd<W>::Signed>::value;
    return (Int<W>)(is_signed ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
  }
#endif
  Bytes x;
  std::memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(__builtin_convertvector(x, typename Simd<W>::Short), Int<W>);
}

template <int W>
inline Float<W> load(const int8_t* from) {
  return __builtin_convertvector((widened<W, typename Simd<W>::Signed>(from)), Float<W>);
}

// NaN loads as 480; the scale of a vector with a NaN is NaN itself.
template <int W>
inline Float<W> load(const Float8* from) {
  const Int<W> x = widened<W, typename Simd<W>::Unsigned>(from);
  const Int<W> magnitude = x & 0x7f;
  // 2^(exponent - 7) (1 + mantissa / 8); with an exponent of 0, 2^-6 mantissa / 8.
  Float<W> y = (Float<W>)((magnitude << 20) + (120 << 23));
  y = magnitude < 8 ? y + y - 0x1p-6f : y;
  return (Float<W>)((Int<W>)y | (x & 0x80) << 24);
}

// With AVX2, keeps the compiler from loading x again for each use, as an operand of a multiply-add. A
// core does two of these and two loads in a cycle, so that its loads would be the limit.
template <typename Vector>
inline void keep_in_register(Vector& x) {
#if defined(__AVX2__)
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

template <typename Vector>
inline void store(float* to, Vector x) {
  std::memcpy(to, &x, sizeof(x));
}

// Does one step of a transposition: swaps the off-diagonal step x step squares.
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

// Transposes W vectors: lane j of x[i] becomes lane i of x[j].
template <int W>
inline void transpose_square(Float<W>* x) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  transpose_step<1, W>(x, lanes);
  transpose_step<2, W>(x, lanes);
  transpose_step<4, W>(x, lanes);
  if constexpr (W > 8) transpose_step<8, W>(x, lanes);
}

#endif  // PALLAS_KERNELS_VECTORS_H_

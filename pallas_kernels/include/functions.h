// Functions of whole vectors: reductions over their lanes, and the exponential.

#ifndef PALLAS_KERNELS_FUNCTIONS_H_
#define PALLAS_KERNELS_FUNCTIONS_H_

#include <utility>

#include "vectors.h"

// Lane l of the result is lane l ^ step of x.
template <int step, int W, int... lane>
inline Float<W> swapped(Float<W> x, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, x, (lane ^ step)...);
}

template <int W, int step = W / 2>
inline float largest(Float<W> x) {
  if constexpr (step == 0) return x[0];
  else {
    const Float<W> other = swapped<step, W>(x, std::make_integer_sequence<int, W>());
    return largest<W, step / 2>(x < other ? other : x);
  }
}

template <int W, int step = W / 2>
inline float sum(Float<W> x) {
  if constexpr (step == 0) return x[0];
  else {
    return sum<W, step / 2>(x + swapped<step, W>(x, std::make_integer_sequence<int, W>()));
  }
}

// Lane l of the result is the sum of lanes l and l ^ step of a, or of b where l & step.
template <int step, int W, int... lane>
inline Float<W> sum_swapped(Float<W> a, Float<W> b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane & step ? W + lane : lane)...) +
         __builtin_shufflevector(a, b, (lane & step ? W + lane - step : lane + step)...);
}

// Adds up groups of `step` lanes of n vectors in which every step-th lane belongs to one of `step`
// sums: lane l of the result is sum l % (n * step). With step = 1 and n = W, lane l is the sum of
// x[l], by halves: each half of its lanes is added up first.
template <int W, int n, int step = 1>
inline Float<W> sums(const Float<W>* x) {
  if constexpr (n == 1) return x[0];
  else {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
    return sum_swapped<n / 2 * step, W>(sums<W, n / 2, step>(x), sums<W, n / 2, step>(x + n / 2),
                                        lanes);
  }
}

// Cephes' expf: at most 2 ulp off for x in [-87, 88], e^-87 below, NaN for NaN.
template <int W>
inline Float<W> exponential(Float<W> x) {
  const Float<W> least = Float<W>{} - 87.0f;
  x = x < least ? least : x;
  const Float<W> magic = Float<W>{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  const Float<W> shifted = x * 1.44269504088896341f + magic;
  const Float<W> n = shifted - magic;
  const Float<W> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Float<W> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  return y * (Float<W>)(((Int<W>)shifted - (Int<W>)magic + 127) << 23);
}

#endif  // PALLAS_KERNELS_FUNCTIONS_H_

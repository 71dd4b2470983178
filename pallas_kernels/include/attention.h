// Products of queries with keys, and of weights with values, for a block of keys. Queries and keys are
// numbers, or both pairs of bfloat16 numbers; `dim` counts these.
//
// A score is the sum of W numbers, by halves (`sums`); number l is one chain of fused multiply-adds
// over l, l + W, l + 2 W ... of head_dim. A weighted sum is one chain over keys. So a query has the
// same bits whether its keys are transposed or not, and whichever queries are computed with it.

#ifndef PALLAS_KERNELS_ATTENTION_H_
#define PALLAS_KERNELS_ATTENTION_H_

#include <cstdint>
#include <type_traits>

#include "functions.h"
#include "vectors.h"

constexpr int kBlock = 64;                     // keys per step of the online softmax
constexpr int kChunk = kWide == 16 ? 4 : 2;    // vectors of head_dim that `accumulate` holds
constexpr int kAbreast = kWide == 16 ? 4 : 2;  // keys that `score` multiplies together
constexpr int64_t kLine = 64;                  // bytes of a cache line

// Vectors of `length` numbers; number i is vector at[i] of those that begin at `first`.
template <typename T>
struct Vectors {
  const T* first;
  const int64_t* at;
  int64_t length;

  const T* operator[](int i) const { return first + at[i] * length; }
  Vectors from(int i) const { return {first, at + i, length}; }
  explicit operator bool() const { return at != nullptr; }

  void prefetch(int begin, int end) const {
    for (int i = begin; i < end; ++i) {
      const char* line = reinterpret_cast<const char*>((*this)[i]);
      for (int64_t b = 0; b < length * int64_t{sizeof(T)}; b += kLine)
        __builtin_prefetch(line + b, 0, 2);
    }
  }
};

// Calls f for runs of up to four of `count` items, with the first and the (static) number of a run.
template <typename F>
inline void by_fours(int count, F&& f) {
  int i = 0;
  for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>());
  if (count - i == 3) f(i, std::integral_constant<int, 3>());
  if (count - i == 2) f(i, std::integral_constant<int, 2>());
  if (count - i == 1) f(i, std::integral_constant<int, 1>());
}

// Prefetches the line at x + d, once. It goes to L2, since too few misses can be under way to L1.
template <int W, typename T>
inline void prefetch_part(const T* x, int64_t d) {
  if (W * int64_t{sizeof(T)} >= kLine || d * int64_t{sizeof(T)} % kLine == 0)
    __builtin_prefetch(x + d, 0, 2);
}

// logits[m][s] = q[m] . k[s], for R queries and W keys. Prefetches as many vectors of `ahead`.
template <int W, int R, typename Q, typename T>
void score(const Q* q, Vectors<T> k, Vectors<T> ahead, float* logits) {
  constexpr int groups = W / kAbreast;
  const int64_t dim = k.length;
  Float<W> partial[R][groups];
  for (int g = 0; g < groups; ++g) {
    const T *key[kAbreast], *later[kAbreast];
#pragma GCC unroll 4
    for (int i = 0; i < kAbreast; ++i) {
      key[i] = k[g * kAbreast + i];
      later[i] = ahead[g * kAbreast + i];
    }
    Float<W> x[R][kAbreast] = {};
    for (int64_t d = 0; d < dim; d += W) {
      decltype(load<W>(q)) a[kAbreast], b[R];
#pragma GCC unroll 4
      for (int i = 0; i < kAbreast; ++i) {
        a[i] = load<W>(key[i] + d);
        prefetch_part<W>(later[i], d);
      }
#pragma GCC unroll 4
      for (int m = 0; m < R; ++m) b[m] = load<W>(q + m * dim + d);
      asm volatile("" ::: "memory");  // keeps the compiler from loading them again for each product
#pragma GCC unroll 4
      for (int m = 0; m < R; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < kAbreast; ++i) x[m][i] = multiply_add<W>(b[m], a[i], x[m][i]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) partial[m][g] = sums<W, kAbreast>(x[m]);
  }
  for (int m = 0; m < R; ++m) store(logits + m * kBlock, sums<W, groups, kAbreast>(partial[m]));
}

// out[d][i] = k[i][d] for W keys; rows of `out` are 2 W long. Prefetches W vectors of `ahead`.
template <int W, typename T>
void transpose(Vectors<T> k, Vectors<T> ahead, float* out) {
  for (int64_t d = 0; d < k.length; d += W) {
    Float<W> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      x[i] = (Float<W>)load<W>(k[i] + d);
      prefetch_part<W>(ahead[i], d);
    }
    transpose_square<W>(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(out + (d + i) * 2 * W, x[i]);
  }
}

// x[m][v] = the sum of `count` numbers, from number `first`, of each of the products of R queries
// with 2 W transposed keys.
template <int W, int R, int first, int count, typename Q>
inline void add_up(const Q* q, const float* keys, int64_t dim, Float<W> (*x)[2]) {
  if constexpr (count > 1) {
    Float<W> y[R][2];
    add_up<W, R, first, count / 2>(q, keys, dim, x);
    add_up<W, R, first + count / 2, count / 2>(q, keys, dim, y);
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) x[m][0] += y[m][0], x[m][1] += y[m][1];
  } else {
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) x[m][0] = x[m][1] = Float<W>{};
    for (int64_t d = first; d < dim; d += W) {
      using Numbers = decltype(load<W>(q));
      const auto a = (Numbers)load<W>(keys + d * 2 * W), b = (Numbers)load<W>(keys + d * 2 * W + W);
#pragma GCC unroll 4
      for (int m = 0; m < R; ++m) {
        const Numbers query = broadcast<W>(q + m * dim + d);
        x[m][0] = multiply_add<W>(query, a, x[m][0]);
        x[m][1] = multiply_add<W>(query, b, x[m][1]);
      }
    }
  }
}

// The same as `score`, for 2 W keys that are transposed.
template <int W, int R, typename Q>
void score_transposed(const Q* q, const float* keys, int64_t dim, float* logits) {
  Float<W> x[R][2];
  add_up<W, R, 0, W>(q, keys, dim, x);
  for (int m = 0; m < R; ++m) {
    store(logits + m * kBlock, x[m][0]);
    store(logits + m * kBlock + W, x[m][1]);
  }
}

// out[m] = kept[m] * out[m] + sum over s of weights[m][s] * v[s], for R queries and C vectors
// from d.
// Prefetches the same part of vectors of `ahead`, if any.
template <int W, int R, int C, typename T>
void accumulate(const float* weights, Vectors<T> v, Vectors<T> ahead, int begin, int end,
                const float* kept, int64_t d, float* out) {
  const int64_t dim = v.length;
  Float<W> x[R][C];
#pragma GCC unroll 4
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) x[m][c] = kept[m] * load<W>(out + m * dim + d + c * W);
  for (int s = begin; s < end; ++s) {
    const T* from = v[s] + d;
    if (ahead) {
      const char* line = reinterpret_cast<const char*>(ahead[s] + d);
#pragma GCC unroll 4
      for (int b = 0; b < C * W * int{sizeof(T)}; b += kLine) __builtin_prefetch(line + b, 0, 2);
    }
    Float<W> value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = load<W>(from + c * W);
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) {
      const float weight = weights[m * kBlock + s];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) x[m][c] += weight * value[c];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + m * dim + d + c * W, x[m][c]);
}

// The same for all of head_dim and `count` queries.
template <int W, typename T>
void accumulate_all(const float* logits, Vectors<T> v, Vectors<T> ahead, int begin, int end,
                    const float* kept, int count, float* out) {
  const int64_t dim = v.length;
  by_fours(count, [&](int m, auto n) {
    const float* weights = logits + m * kBlock;
    const Vectors<T> fetched = m == 0 ? ahead : Vectors<T>{};
    float* to = out + m * dim;
    int64_t d = 0;
    for (; d + kChunk * W <= dim; d += kChunk * W)
      accumulate<W, n, kChunk>(weights, v, fetched, begin, end, kept + m, d, to);
    if (kChunk > 2 && d + 2 * W <= dim) {
      accumulate<W, n, 2>(weights, v, fetched, begin, end, kept + m, d, to);
      d += 2 * W;
    }
    if (d < dim) accumulate<W, n, 1>(weights, v, fetched, begin, end, kept + m, d, to);
  });
}

#endif  // PALLAS_KERNELS_ATTENTION_H_

// Norms, gated activations and log-sum-exp on the CPU, as XLA custom calls (float32), row by row.
//
// What a row becomes depends on the row alone, in an order of operations that its length fixes.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ffi.h"
#include "functions.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int W = kWide;
constexpr int64_t kTogether = 1 << 13;  // numbers of an item

// The sum of f over x, W numbers at a time, in an order that n alone fixes. The last vector is
// filled with `rest`, of which f adds nothing.
template <typename F>
inline float sum_over(const float* x, int64_t n, float rest, F f) {
  Float<W> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) sums[j] += f(load<W>(x + i + j * W));
  for (; i + W <= n; i += W) sums[0] += f(load<W>(x + i));
  if (i < n) {
    float end[W];
    std::fill_n(end, W, rest);
    std::copy(x + i, x + n, end);
    sums[1] += f(load<W>(end));
  }
  return sum<W>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void norm_row(const float* x, const float* scale, int64_t n, float eps, float offset, float* y) {
  const float total = sum_over(x, n, 0.0f, [](Float<W> a) { return a * a; });
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  int64_t i = 0;
  for (; i + W <= n; i += W)
    store(y + i, load<W>(x + i) * factor * (load<W>(scale + i) + offset));
  for (; i < n; ++i) y[i] = x[i] * factor * (scale[i] + offset);
}

void layer_norm_row(const float* x, const float* scale, const float* bias, int64_t n, float eps,
                    float* y) {
  const float count = static_cast<float>(n);
  const float mean = sum_over(x, n, 0.0f, [](Float<W> a) { return a; }) / count;
  const float squares = sum_over(x, n, mean, [mean](Float<W> a) {
    const Float<W> away = a - mean;
    return away * away;
  });
  const float factor = 1.0f / std::sqrt(squares / count + eps);
  int64_t i = 0;
  for (; i + W <= n; i += W)
    store(y + i, (load<W>(x + i) - mean) * factor * load<W>(scale + i) + load<W>(bias + i));
  for (; i < n; ++i) y[i] = (x[i] - mean) * factor * scale[i] + bias[i];
}

float log_sum_exp_row(const float* x, int64_t n) {
  Float<W> tops = Float<W>{} - __builtin_inff();
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const Float<W> a = load<W>(x + i);
    tops = tops < a ? a : tops;
  }
  float top = largest<W>(tops);
  for (; i < n; ++i) top = top < x[i] ? x[i] : top;
  if (!std::isfinite(top)) {  // infinity, or nothing but minus infinity and NaN
    float total = 0.0f;
    for (i = 0; i < n; ++i) total += std::exp(x[i]);
    return std::log(total);
  }
  // exp of what is far below the largest is e^-87, which vanishes beside its 1.
  const float total = sum_over(x, n, -__builtin_inff(),
                               [top](Float<W> a) { return exponential<W>(a - top); });
  return top + std::log(total);
}

inline Float<W> silu(Float<W> x) {
  const Float<W> infinite = Float<W>{} + __builtin_inff();
  const Float<W> e = -x > 88.0f ? infinite : exponential<W>(-x);
  return x * (1.0f / (1.0f + e));  // NaN for minus infinity, as in XLA
}

void gate_row(const float* gate, const float* up, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, silu(load<W>(gate + i)) * load<W>(up + i));
  if (i == n) return;
  float ends[2][W] = {};
  std::copy(gate + i, gate + n, ends[0]);
  std::copy(up + i, up + n, ends[1]);
  store(ends[0], silu(load<W>(ends[0])) * load<W>(ends[1]));
  std::copy_n(ends[0], n - i, y + i);
}

// Calls f for every row, some of them together.
template <typename F>
void for_each_row(ffi::ThreadPool& pool, int64_t rows, int64_t width, F f) {
  const int64_t together = std::max<int64_t>(1, kTogether / std::max<int64_t>(width, 1));
  const int64_t items = (rows + together - 1) / together;
  for_each_item(pool, items, items, [=](int64_t item, const NextItem&) {
    for (int64_t row = item * together; row < std::min(rows, (item + 1) * together); ++row) f(row);
  });
}

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Halves = ffi::Buffer<ffi::F32, 3>;
using Vector = ffi::Buffer<ffi::F32, 1>;

ffi::Error rms_norm(ffi::ThreadPool pool, Matrix x, Vector scale, ffi::Result<Matrix> y, float eps,
                    float offset) {
  const float *from = x.typed_data(), *by = scale.typed_data();
  float* to = y->typed_data();
  const int64_t n = x.dimensions()[1];
  for_each_row(pool, x.dimensions()[0], n, [=](int64_t row) {
    norm_row(from + row * n, by, n, eps, offset, to + row * n);
  });
  return ffi::Error::Success();
}

ffi::Error layer_norm(ffi::ThreadPool pool, Matrix x, Vector scale, Vector bias,
                      ffi::Result<Matrix> y, float eps) {
  const float *from = x.typed_data(), *by = scale.typed_data(), *plus = bias.typed_data();
  float* to = y->typed_data();
  const int64_t n = x.dimensions()[1];
  for_each_row(pool, x.dimensions()[0], n, [=](int64_t row) {
    layer_norm_row(from + row * n, by, plus, n, eps, to + row * n);
  });
  return ffi::Error::Success();
}

ffi::Error log_sum_exp(ffi::ThreadPool pool, Matrix x, ffi::Result<Vector> y) {
  const float* from = x.typed_data();
  float* to = y->typed_data();
  const int64_t n = x.dimensions()[1];
  for_each_row(pool, x.dimensions()[0], 4 * n,
               [=](int64_t row) { to[row] = log_sum_exp_row(from + row * n, n); });
  return ffi::Error::Success();
}

ffi::Error gated_silu(ffi::ThreadPool pool, Halves x, ffi::Result<Matrix> y) {
  const float* from = x.typed_data();
  float* to = y->typed_data();
  const int64_t n = x.dimensions()[2];
  for_each_row(pool, x.dimensions()[0], 4 * n, [=](int64_t row) {
    gate_row(from + 2 * row * n, from + (2 * row + 1) * n, n, to + row * n);
  });
  return ffi::Error::Success();
}

}  // namespace

HANDLER(RmsNorm, rms_norm, "eps", "offset")

HANDLER(LayerNorm, layer_norm, "eps")

HANDLER(LogSumExp, log_sum_exp)

HANDLER(GatedSilu, gated_silu)

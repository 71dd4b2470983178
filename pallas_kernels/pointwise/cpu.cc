// Norms and gated activations on the CPU, as XLA custom calls (float32): one pass over their rows.
//
// What a row becomes depends on the row alone, in an order of operations that its length fixes.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "functions.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int W = kWide;
constexpr int64_t kTogether = 1 << 13;  // numbers of an item

void norm_row(const float* x, const float* scale, int64_t n, float eps, float offset, float* y) {
  Float<W> sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      const Float<W> a = load<W>(x + i + j * W);
      sums[j] += a * a;
    }
  for (; i + W <= n; i += W) {
    const Float<W> a = load<W>(x + i);
    sums[0] += a * a;
  }
  float total = sum<W>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + W <= n; i += W)
    store(y + i, load<W>(x + i) * factor * (load<W>(scale + i) + offset));
  for (; i < n; ++i) y[i] = x[i] * factor * (scale[i] + offset);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNorm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Vector>()
                                  .Ret<Matrix>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatedSilu, gated_silu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Halves>()
                                  .Ret<Matrix>());

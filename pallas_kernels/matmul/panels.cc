// Matrix products with a weight in panels on the CPU, as an XLA custom call. Rows of x and sums are
// float32; the weight is float32 or bfloat16, as the macro PANELS says (float or Pair). Each is a
// library of its own, as most processes need only one.
//
// A panel is kPanel columns of the weight in one run of memory, [k, kPanel], in bfloat16 as pairs of
// adjacent rows, [k / 2, kPanel]; see panels.py. A thread takes a panel for up to kRows rows of x, and
// goes down it kDepth rows at a time: such a block of the panel stays in L1 while tiles of x are
// multiplied with it, and the next one is prefetched meanwhile. So the weight is read from memory
// once for every kRows rows of x, without a copy. tiles.h promises that a row's bits are its own.
//
// Where the processor multiplies pairs (AVX512-BF16), rows of x are rounded to bfloat16, too. Elsewhere
// numbers of the weight are widened as they are loaded.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "computed_rows.h"
#include "ffi.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

namespace {

using Number = PANELS;
constexpr bool kIsPaired = std::is_same<Number, Pair>::value;
using X = std::conditional_t<kMultipliesPairs, Number, float>;
constexpr int64_t kOfNumber = kIsPaired ? 2 : 1;              // inner elements of a Number
constexpr int64_t kOfX = std::is_same<X, Pair>::value ? 2 : 1;  // and of an X

constexpr int kPanel = 48;              // columns; panels.py has the same number
constexpr int kPart = kVectors * W;     // columns of a tile: all of a panel, or half of them
constexpr int64_t kDepth = W == 16 ? 144 : 96;  // maximum of rows of a block, a multiple of 4
constexpr int64_t kRows = 256;          // maximum of rows of x of an item
constexpr int64_t kWorthAThread = 1 << 18;  // multiply-adds per additional thread
constexpr int64_t kRoundsTogether = 1 << 16;  // numbers of x that are rounded by one thread
static_assert(kPanel % kPart == 0);

struct Problem {
  ComputedRows rows;
  const X* x = nullptr;  // [m, width], of the computed rows
  const Number* panels;  // [count, depth, kPanel]
  float* y;              // [all rows, n]
  int64_t m, k, n, count;

  int64_t width() const { return k / kOfX; }
  int64_t depth() const { return k / kOfNumber; }
  int64_t row_blocks() const { return (m + kRows - 1) / kRows; }
  const Number* panel(int64_t item) const { return panels + item % count * depth() * kPanel; }
};

// Prefetches a block of a panel into L2, one cache line per call. It goes through the quarters of the
// block in turns: the processor's own prefetcher then has time to get the next lines of each.
class Ahead {
 public:
  Ahead(const Number* at, int64_t rows) : at_(at), quarter_(at ? rows * kPanel / 4 : 0) {}

  void fetch_line() {
    if (offset_ >= quarter_) return;
    __builtin_prefetch(at_ + turn_ * quarter_ + offset_, 0, 2);
    if (++turn_ == 4) turn_ = 0, offset_ += kLine;
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(Number);
  const Number* at_;
  int64_t quarter_, turn_ = 0, offset_ = 0;
};

// Prefetches a panel's columns of `count` computed rows of y.
inline void prefetch_for_writing(const Problem& p, int64_t first, int count, int64_t n0) {
  for (int r = 0; r < count; ++r)
    for (int c = 0; c < kPanel; c += 16)
      __builtin_prefetch(p.y + p.rows[first + r] * p.n + n0 + c, 1);
}

void product(const Problem& p, int64_t item, const NextItem& next) {
  const int64_t m0 = item / p.count * kRows, n0 = item % p.count * kPanel;
  const int64_t rows = std::min(kRows, p.m - m0), tiles = (rows + kTile - 1) / kTile;
  const int64_t all = p.depth(), blocks = (all + kDepth - 1) / kDepth;
  const int64_t most = ((all + blocks - 1) / blocks + 3) / 4 * 4;
  alignas(64) static thread_local float total[kRows * kPanel];
  // Each tile's share of the cache lines of 4 rows of a panel.
  const int64_t calls = tiles * (kPanel / kPart);
  constexpr int kLines = 4 * kPanel * sizeof(Number) / 64;
  const int lines = static_cast<int>((kLines + calls - 1) / calls);
  const Number* panel = p.panel(item);
  const auto y = [&](int64_t r) { return p.y + p.rows[m0 + r] * p.n + n0; };
  for (int64_t k0 = 0; k0 < all; k0 += most) {
    const int64_t depth = std::min(most, all - k0);
    const Number *b = panel + k0 * kPanel, *after = b + depth * kPanel;
    if (k0 + most >= all) {  // the first block of the panel that this thread takes next, probably
      const int64_t other = next;
      after = other < p.count * p.row_blocks() ? p.panel(other) : nullptr;
    }
    Ahead ahead(after, std::min(most, all));
    const X* x = p.x + m0 * p.width() + k0 * kOfNumber / kOfX;
    for (int part = 0; part < kPanel; part += kPart)
      for (int64_t r = 0; r < rows; r += kTile) {
        const int count = static_cast<int>(std::min<int64_t>(kTile, rows - r));
        if (part == 0 && k0 + most >= all) prefetch_for_writing(p, m0 + r, count, n0);
        multiply_rows<kPanel>(count, x + r * p.width(), p.width(), b + part, kPanel, depth, k0 == 0,
                              total + r * kPanel + part, ahead, lines);
      }
  }
  const int64_t columns = std::min<int64_t>(kPanel, p.n - n0);
  if (columns < kPanel) {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(total + r * kPanel, columns, y(r));
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 6
    for (int c = 0; c < kPanel; c += W) store(y(r) + c, load<W>(total + r * kPanel + c));
}

// Returns the computed rows of x, for a `Problem::x` of the last argument's type.
const float* inputs(ffi::ThreadPool&, const Problem& p, const float* x, const float*) {
  return p.rows.of(x, p.k);
}

#ifdef __AVX512BF16__
// Rounds the computed rows of x from `first` on.
void round_rows(const Problem& p, const float* x, int64_t first, int64_t rows, Pair* to) {
  for (int64_t row = first; row < first + rows; ++row) {
    const float* from = x + p.rows[row] * p.k;
    Pair* out = to + row * p.width();
    int64_t i = 0;
    for (; i + W <= p.k; i += W) store(out + i / 2, load<W>(from + i));
    if (i == p.k) continue;
    float rest[W] = {};
    Pair rounded[W / 2];
    std::copy_n(from + i, p.k - i, rest);
    store(rounded, load<W>(rest));
    std::copy_n(rounded, (p.k - i) / 2, out + i / 2);
  }
}

const Pair* inputs(ffi::ThreadPool& pool, const Problem& p, const float* x, const Pair*) {
  static thread_local std::vector<Pair> scratch;
  if (scratch.size() < size_t(p.m * p.width())) scratch.resize(p.m * p.width());
  Pair* to = scratch.data();
  const int64_t rows = std::max<int64_t>(1, kRoundsTogether / p.k);
  for_each_item(pool, (p.m + rows - 1) / rows, pool.num_threads(),
                [=](int64_t item, const NextItem&) {
                  round_rows(p, x, item * rows, std::min(rows, p.m - item * rows), to);
                });
  return to;
}
#endif

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Panels = ffi::Buffer<kIsPaired ? ffi::BF16 : ffi::F32, 3>;

ffi::Error panel_matmul(ffi::ThreadPool pool, Matrix x, Panels panels, Computed computed,
                        ffi::Result<Matrix> y) {
  Problem p{ComputedRows(computed, x.dimensions()[0])};
  p.panels = static_cast<const Number*>(panels.untyped_data());
  p.y = y->typed_data();
  p.m = p.rows.count();
  p.k = x.dimensions()[1];
  p.n = y->dimensions()[1];
  p.count = panels.dimensions()[0];
  if (p.k % kOfNumber || panels.dimensions()[1] != p.depth() ||
      panels.dimensions()[2] != kPanel * kOfNumber || p.count != (p.n + kPanel - 1) / kPanel)
    return ffi::Error::InvalidArgument("panel_matmul: the panels do not fit x and y");
  p.x = inputs(pool, p, x.typed_data(), p.x);
  p.rows.clear_others(p.y, p.n);
  const int64_t threads = 1 + p.m * p.k * p.n / kWorthAThread;
  for_each_item(pool, p.count * p.row_blocks(), threads,
                [p](int64_t item, const NextItem& next) { product(p, item, next); });
  return ffi::Error::Success();
}

}  // namespace

HANDLER(PanelMatmul, panel_matmul)

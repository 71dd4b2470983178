// Matrix products of few rows with large weights on the CPU, as an XLA custom call (float32).
//
// The weight is cut into panels of kPanel columns, and adjacent panels form a strip. A thread takes
// a strip, goes down it one block of rows at a time, and multiplies tiles of kTile rows of x with
// each panel of the block, with sums in registers; meanwhile it prefetches the next block. So the
// weight is read from memory once, in long runs, for any number of rows of x. With many rows, or a
// transposed weight, a panel of the block is first copied into the order of its use. With few rows
// of x, reading the weight takes the time: a strip is then read row by row, and the sums are in L1.
//
// Each output is one chain of fused multiply-adds in the order of the inner dimension: its bits
// depend neither on the number of rows nor on how the work is cut or divided among threads.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "computed_rows.h"
#include "ffi.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int kPanel = kVectors * W;    // columns
constexpr int kRows = 128;              // maximum of rows of x of an item
constexpr int kFew = 8;                 // maximum of rows of x for which a strip is streamed
constexpr int kAbreast = 4;             // rows of the weight that are streamed together
constexpr int kPacksFrom = 64;          // minimum of rows of x for which the weight is copied

// A block of the weight, in panels and rows. It fits L2 if it is multiplied in place; a panel of it
// fits L1 if that is copied first. Rows of a transposed weight are read in longer runs.
struct Block {
  int64_t width, depth;
};
constexpr Block kInPlace = {16, 64}, kPacked = {4, 128}, kTransposed = {1, 576};

constexpr int64_t kWorthAThread = 1 << 18;  // multiply-adds per additional thread

struct Problem {
  ComputedRows rows;
  const float* x;  // [m, k], of the computed rows
  const float* w;  // [k, n], or [n, k] if transposed
  float* y;        // [all rows, n]
  int64_t m, k, n;
  bool transposed;

  // How the work is cut.
  bool streams;               // at most kFew rows of x, and a weight that is not transposed
  bool packs;                 // a panel is copied before it is used
  int64_t depth;              // rows of a block
  int64_t width;              // panels of a strip
  int64_t strips, row_blocks;  // an item is a strip for kRows rows of x

  void cut(int64_t threads);
  int64_t first_column(int64_t item) const { return item % strips * width * kPanel; }
  int64_t first_row(int64_t item) const { return item / strips * kRows; }
  int64_t items() const { return strips * row_blocks; }
};

void Problem::cut(int64_t threads) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  streams = m <= kFew && !transposed;
  packs = transposed || m >= kPacksFrom;
  const Block most = transposed ? kTransposed : packs ? kPacked : kInPlace;
  width = std::clamp<int64_t>(panels / (streams ? threads : 2 * threads), 1, most.width);
  const int64_t blocks = (k + most.depth - 1) / most.depth;
  depth = ((k + blocks - 1) / blocks + W - 1) / W * W;
  strips = (panels + width - 1) / width;
  row_blocks = (m + kRows - 1) / kRows;
}

// Prefetches a block of the weight into L2, one cache line per call.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Problem& p, int64_t column, int64_t k0) {
    const int64_t columns = std::min(p.width * kPanel, p.n - column);
    const int64_t depth = std::min(p.depth, p.k - k0);
    at_ = p.transposed ? p.w + column * p.k + k0 : p.w + k0 * p.n + column;
    rows_ = p.transposed ? columns : depth;
    width_ = p.transposed ? depth : columns;
    stride_ = p.transposed ? p.k : p.n;
  }

  void fetch_line() {
    if (rows_ == 0) return;
    __builtin_prefetch(at_ + offset_, 0, 2);
    offset_ += 16;
    if (offset_ >= width_) {
      offset_ = 0;
      at_ += stride_;
      --rows_;
    }
  }

 private:
  const float* at_ = nullptr;
  int64_t rows_ = 0, width_ = 0, stride_ = 0, offset_ = 0;
};

// packed[i][c] = w[k0 + i][n0 + c], with zeros past the last column.
void pack(const Problem& p, int64_t n0, int64_t k0, int64_t depth, float* packed) {
  const int64_t columns = std::min<int64_t>(kPanel, p.n - n0);
  if (!p.transposed) {
    if (columns == kPanel) {
      for (int64_t i = 0; i < depth; ++i)
#pragma GCC unroll 3
        for (int v = 0; v < kVectors; ++v)
          store(packed + i * kPanel + v * W, load<W>(p.w + (k0 + i) * p.n + n0 + v * W));
      return;
    }
    for (int64_t i = 0; i < depth; ++i) {
      std::copy_n(p.w + (k0 + i) * p.n + n0, columns, packed + i * kPanel);
      std::fill_n(packed + i * kPanel + columns, kPanel - columns, 0.0f);
    }
    return;
  }
  const float* from = p.w + n0 * p.k + k0;
  int64_t done = 0;
  if (columns == kPanel) {
    for (; done + W <= depth; done += W)
      for (int v = 0; v < kVectors; ++v) {
        Float<W> x[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = load<W>(from + (v * W + i) * p.k + done);
        transpose_square<W>(x);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(packed + (done + i) * kPanel + v * W, x[i]);
      }
  }
  for (int64_t i = done; i < depth; ++i)
    for (int64_t c = 0; c < kPanel; ++c)
      packed[i * kPanel + c] = c < columns ? from[c * p.k + i] : 0.0f;
}

// y = x * w for R rows of x and a strip of columns, its rows read kAbreast at a time.
template <int R>
void stream(const Problem& p, int64_t first, int64_t columns) {
  alignas(64) float total[R][kInPlace.width * kPanel] = {};
  const auto add_rows = [&](auto depth, int64_t k0) __attribute__((always_inline)) {
    const float* w = p.w + k0 * p.n + first;
    Float<W> a[R][depth], b[depth];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < depth; ++i) a[r][i] = p.x[r * p.k + k0 + i] - Float<W>{};
    int64_t c = 0;
    for (; c + W <= columns; c += W) {
#pragma GCC unroll 4
      for (int i = 0; i < depth; ++i) {
        __builtin_prefetch(w + (i + depth) * p.n + c, 0, 2);
        b[i] = load<W>(w + i * p.n + c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Float<W> sum = load<W>(total[r] + c);
#pragma GCC unroll 4
        for (int i = 0; i < depth; ++i) sum += a[r][i] * b[i];
        store(total[r] + c, sum);
      }
    }
    for (; c < columns; ++c)
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < depth; ++i) total[r][c] += a[r][i][0] * w[i * p.n + c];
  };
  int64_t k0 = 0;
  for (; k0 + kAbreast <= p.k; k0 += kAbreast) add_rows(std::integral_constant<int, kAbreast>(), k0);
  for (; k0 < p.k; ++k0) add_rows(std::integral_constant<int, 1>(), k0);
  for (int r = 0; r < R; ++r) std::copy_n(total[r], columns, p.y + p.rows[r] * p.n + first);
}

using Stream = decltype(&stream<1>);
template <int... r>
Stream stream_of(int rows, std::integer_sequence<int, r...>) {
  static constexpr Stream table[] = {stream<r + 1>...};
  return table[rows - 1];
}

// Computes an item. next() is the one that this thread takes next, probably.
template <typename Next>
void product(const Problem& p, int64_t item, Next next) {
  const int64_t first = p.first_column(item), m0 = p.first_row(item);
  if (p.streams) {
    const int64_t columns = std::min(p.width * kPanel, p.n - first);
    return stream_of(p.m, std::make_integer_sequence<int, kFew>())(p, first, columns);
  }
  const int64_t rows = std::min<int64_t>(kRows, p.m - m0), tiles = (rows + kTile - 1) / kTile;
  const int64_t panels = std::min(p.width, (p.n - first + kPanel - 1) / kPanel);
  static thread_local std::vector<float> scratch;
  const size_t needed = p.depth * kPanel + panels * rows * kPanel + 16;
  if (scratch.size() < needed) scratch.resize(needed);
  auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  float* packed = reinterpret_cast<float*>(aligned);  // [depth, kPanel]
  float* total = packed + p.depth * kPanel;           // [panels, rows, kPanel]
  // Each tile's share of the cache lines of 4 rows of a panel.
  const int lines = static_cast<int>((4 * kPanel / 16 + tiles - 1) / tiles);
  for (int64_t k0 = 0; k0 < p.k; k0 += p.depth) {
    const int64_t depth = std::min<int64_t>(p.depth, p.k - k0);
    Ahead ahead;
    if (k0 + p.depth < p.k) {
      ahead = Ahead(p, first, k0 + p.depth);
    } else if (const int64_t other = next(); other < p.items()) {
      ahead = Ahead(p, p.first_column(other), 0);
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t n0 = first + panel * kPanel;
      const float* b = p.w + k0 * p.n + n0;
      int64_t b_stride = p.n;
      if (p.packs || n0 + kPanel > p.n) {
        pack(p, n0, k0, depth, packed);
        b = packed, b_stride = kPanel;
      }
      for (int64_t r = 0; r < rows; r += kTile) {
        const int count = static_cast<int>(std::min<int64_t>(kTile, rows - r));
        multiply_rows<kPanel>(count, p.x + (m0 + r) * p.k + k0, p.k, b, b_stride, depth, k0 == 0,
                              total + (panel * rows + r) * kPanel, ahead, lines);
      }
    }
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t n0 = first + panel * kPanel, columns = std::min<int64_t>(kPanel, p.n - n0);
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(total + (panel * rows + r) * kPanel, columns, p.y + p.rows[m0 + r] * p.n + n0);
  }
}

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Stack = ffi::Buffer<ffi::F32, 3>;
using Sizes = ffi::Buffer<ffi::S32, 1>;

ffi::Error matmul(ffi::ThreadPool pool, Matrix x, Matrix w, Computed computed,
                  ffi::Result<Matrix> y, bool transposed) {
  Problem p{ComputedRows(computed, x.dimensions()[0])};
  p.w = w.typed_data();
  p.y = y->typed_data();
  p.m = p.rows.count();
  p.k = x.dimensions()[1];
  p.x = p.rows.of(x.typed_data(), p.k);
  p.n = y->dimensions()[1];
  p.rows.clear_others(p.y, p.n);
  if (p.m == 0) return ffi::Error::Success();
  p.transposed = transposed;
  p.cut(pool.num_threads());
  const int64_t threads = 1 + p.m * p.k * p.n / kWorthAThread;
  for_each_item(pool, p.items(), threads, [p](int64_t item, const NextItem& next) {
    product(p, item, [&next] { return next.load(); });
  });
  return ffi::Error::Success();
}

// Groups of adjacent rows of x, each times its own matrix; zeros for rows after the last group.
ffi::Error grouped_matmul(ffi::ThreadPool pool, Matrix x, Stack w, Sizes sizes,
                          ffi::Result<Matrix> y) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1];
  const int64_t matrices = w.dimensions()[0];
  if (w.dimensions()[1] != k || w.dimensions()[2] != n || sizes.dimensions()[0] != matrices)
    return ffi::Error::InvalidArgument("grouped_matmul: the matrices do not fit x and y");
  std::vector<Problem> groups;
  std::vector<int64_t> ends;  // of the groups' items
  int64_t row = 0;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    const int64_t rows = std::clamp<int64_t>(sizes.typed_data()[matrix], 0, m - row);
    if (rows == 0) continue;
    Problem p{ComputedRows(rows)};
    p.x = x.typed_data() + row * k;
    p.w = w.typed_data() + matrix * k * n;
    p.y = y->typed_data() + row * n;
    p.m = rows, p.k = k, p.n = n;
    p.transposed = false;
    p.cut(pool.num_threads());
    ends.push_back((ends.empty() ? 0 : ends.back()) + p.items());
    groups.push_back(p);
    row += rows;
  }
  std::fill(y->typed_data() + row * n, y->typed_data() + m * n, 0.0f);
  if (groups.empty()) return ffi::Error::Success();
  const int64_t count = ends.back(), threads = 1 + row * k * n / kWorthAThread;
  for_each_item(pool, count, threads, [groups, ends](int64_t item, const NextItem& next) {
    const int64_t group = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    const int64_t first = group == 0 ? 0 : ends[group - 1];
    product(groups[group], item - first, [&next, first] { return next.load() - first; });
  });
  return ffi::Error::Success();
}

}  // namespace

HANDLER(Matmul, matmul, "transposed")

HANDLER(GroupedMatmul, grouped_matmul)

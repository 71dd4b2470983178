// The products and gates of a step of a gated cell, for gated_cell/cpu.cc.
//
// The inputs of the product are first gathered beside each other. Then a thread takes a strip of
// kPanel columns of the states for at most kRows rows: it multiplies these rows with the panel of
// each gate, whose sums stay in L2, and computes the new states from them. The weight should fit L2.
// With many rows, a block of a panel is copied into the order of its use before it is multiplied.
//
// tiles.h promises that a row's bits are its own; the gates are computed for each number alone.

#ifndef PALLAS_KERNELS_GATES_H_
#define PALLAS_KERNELS_GATES_H_

#include <algorithm>
#include <cstdint>

#include "ffi.h"
#include "functions.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int kPanel = kVectors * W;  // columns
constexpr int64_t kDepth = 128;       // maximum of rows of a block of a panel
constexpr int64_t kRows = 32;         // maximum of rows of an item
constexpr int64_t kLeastRows = 16;    // minimum of them, if there are as many
constexpr int64_t kPacksFrom = 16;    // minimum of rows for which the weight is copied
constexpr int kMaxGates = 5;
constexpr int64_t kWorthAThread = 1 << 23;  // multiply-adds per additional thread: about 100 us
constexpr int64_t kLeastOfATeam = 8;        // kLeastRows of threads that are together already

// cpu.py has the same numbers.
enum Kind { kLstm = 0, kTreeLeaf = 1, kTreeInternal = 2, kLookup = 3 };
constexpr int kNumGates[] = {4, 3, 5, 0};
constexpr int kNumCarried[] = {1, 0, 2, 0};

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Index = ffi::Buffer<ffi::S32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Flags = ffi::Buffer<ffi::U8, 1>;

// Rows of an array, by their numbers; none if the array has no rows.
struct Rows {
  const float* values = nullptr;  // [num, width]
  const int32_t* index = nullptr;
  int64_t num = 0, width = 0, count = 0;

  Rows() = default;
  Rows(Matrix values, Index index)
      : values(values.typed_data()),
        index(index.typed_data()),
        num(values.dimensions()[0]),
        width(values.dimensions()[1]),
        count(index.element_count()) {}

  // A number out of range reads the nearest row, as in XLA: one bad token must not end a batch.
  const float* row(int64_t i) const {
    return values + std::clamp<int64_t>(index[i], 0, num - 1) * width;
  }

  bool fits(int64_t batch) const { return num > 0 && count == batch; }

  // Whether rows i and j are the same row of the array, or there are none.
  bool is_same(int64_t i, int64_t j) const { return num == 0 || index[i] == index[j]; }
};

struct Problem {
  int kind;
  const float* x;     // [m, k]
  const float* w;     // [k, gates * hidden], or null if `packed` has it
  const float* packed;  // [strips, gates, k, kPanel], with zeros past the last column
  const float* bias;  // [gates * hidden]
  const float* const* added;       // for each row [gates * hidden]; null for none
  const float* const* carried[2];  // for each row [hidden]
  float *h, *c;  // [m, hidden]
  int64_t m, k, hidden;
  int64_t rows_of_item;
  // The first `known` rows of the weight may be multiplied ahead, for rows of several steps: their
  // sums are in `sums` [strips, gates, num_sums, kPanel], of which row 0 is that of this step, and
  // `x` is [m, k - known]. Null if nothing was.
  float* sums;
  int64_t known, num_sums;

  int gates() const { return kNumGates[kind]; }
  int64_t columns() const { return gates() * hidden; }
  int64_t strips() const { return (hidden + kPanel - 1) / kPanel; }
  int64_t row_blocks() const { return (m + rows_of_item - 1) / rows_of_item; }
};

// Nothing is prefetched: the weight is in L2.
struct Nothing {
  void fetch_line() {}
};

inline Float<W> sigmoid(Float<W> x) {
  const Float<W> infinite = Float<W>{} + __builtin_inff();
  const Float<W> e = -x > 88.0f ? infinite : exponential<W>(-x);
  return 1.0f / (1.0f + e);
}

// Cephes' tanhf: a polynomial near zero, where 1 - 2 / (e^2x + 1) would lose bits.
inline Float<W> tanh_of(Float<W> x) {
  const Float<W> size = x < 0.0f ? -x : x, z = x * x;
  const Float<W> infinite = Float<W>{} + __builtin_inff();
  const Float<W> e = size > 44.0f ? infinite : exponential<W>(size + size);
  const Float<W> far = 1.0f - 2.0f / (1.0f + e);
  Float<W> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Float<W> near = p * z * x + x;
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}

// The first `num` of W numbers, and zeros.
inline Float<W> load_some(const float* from, int64_t num) {
  if (num >= W) return load<W>(from);
  alignas(64) float some[W] = {};
  std::copy_n(from, num, some);
  return load<W>(some);
}

inline void store_some(float* to, Float<W> x, int64_t num) {
  if (num >= W) return store(to, x);
  alignas(64) float some[W];
  store(some, x);
  std::copy_n(some, num, to);
}

// Computes `num` numbers of the new states of a row, from column `at` on, from its gates.
inline void finish(const Problem& p, int64_t row, int64_t at, int64_t num, const Float<W>* gate) {
  float *h = p.h + row * p.hidden + at, *c = p.c + row * p.hidden + at;
  const auto carried = [&](int i) { return load_some(p.carried[i][row] + at, num); };
  Float<W> state, out;
  if (p.kind == kLstm) {
    state = sigmoid(gate[1]) * carried(0) + sigmoid(gate[0]) * tanh_of(gate[2]);
    out = gate[3];
  } else if (p.kind == kTreeLeaf) {
    state = sigmoid(gate[0]) * tanh_of(gate[2]);
    out = gate[1];
  } else {
    state = sigmoid(gate[0]) * tanh_of(gate[4]) + sigmoid(gate[1]) * carried(0) +
            sigmoid(gate[2]) * carried(1);
    out = gate[3];
  }
  store_some(c, state, num);
  store_some(h, sigmoid(out) * tanh_of(state), num);
}

// packed[i][j] = w[k0 + i][n0 + j], with zeros past the last column.
void pack(const Problem& p, int64_t n0, int64_t k0, int64_t depth, float* packed) {
  const int64_t n = p.columns(), columns = std::min<int64_t>(kPanel, n - n0);
  for (int64_t i = 0; i < depth; ++i) {
    const float* from = p.w + (k0 + i) * n + n0;
    float* to = packed + i * kPanel;
    if (columns == kPanel) {
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) store(to + v * W, load<W>(from + v * W));
    } else {
      std::copy_n(from, columns, to);
      std::fill_n(to + columns, kPanel - columns, 0.0f);
    }
  }
}

void step(const Problem& p, int64_t item) {
  const int64_t at = item % p.strips() * kPanel, m0 = item / p.strips() * p.rows_of_item;
  const int64_t rows = std::min(p.rows_of_item, p.m - m0), n = p.columns();
  const int64_t width = std::min<int64_t>(kPanel, p.hidden - at);
  alignas(64) static thread_local float packed[kDepth * kPanel];
  alignas(64) static thread_local float own_sums[kMaxGates * kRows * kPanel];
  const int64_t known = p.sums ? p.known : 0, num_sums = p.sums ? p.num_sums : kRows;
  float* total = own_sums;
  if (p.sums) total = p.sums + (at / kPanel * p.gates() * num_sums + m0) * kPanel;
  const float* x = p.x + m0 * (p.k - known) - known;
  Nothing nothing;
  for (int gate = 0; gate < p.gates(); ++gate) {
    const int64_t n0 = gate * p.hidden + at;
    for (int64_t k0 = known; k0 < p.k; k0 += kDepth) {
      const int64_t depth = std::min(kDepth, p.k - k0);
      const float* b = p.packed ? p.packed + ((at / kPanel * p.gates() + gate) * p.k + k0) * kPanel
                                : p.w + k0 * n + n0;
      int64_t b_stride = p.packed ? kPanel : n;
      if (!p.packed && (rows >= kPacksFrom || n0 + kPanel > n)) {
        pack(p, n0, k0, depth, packed);
        b = packed, b_stride = kPanel;
      }
      for (int64_t r = 0; r < rows; r += kTile) {
        const int count = static_cast<int>(std::min<int64_t>(kTile, rows - r));
        multiply_rows<kPanel>(count, x + r * (p.k - known) + k0, p.k - known, b, b_stride, depth,
                              k0 == 0, total + (gate * num_sums + r) * kPanel, nothing, 0);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* added = p.added ? p.added[m0 + r] : nullptr;
    for (int64_t j = 0; j < width; j += W) {
      const int64_t num = std::min<int64_t>(W, width - j);
      Float<W> gates[kMaxGates];
      for (int gate = 0; gate < p.gates(); ++gate) {
        const int64_t n0 = gate * p.hidden + at + j;
        const float* sums = total + (gate * num_sums + r) * kPanel + j;
        gates[gate] = load<W>(sums) + load_some(p.bias + n0, num);
        if (added) gates[gate] += load_some(added + n0, num);
      }
      finish(p, m0 + r, at + j, num, gates);
    }
  }
}

// Multiplies an item of the rows `x` [num_sums, known] with the first rows of the packed weight.
void multiply_ahead(const Problem& p, const float* x, int64_t item) {
  const int64_t strip = item % p.strips(), m0 = item / p.strips() * kRows;
  const int64_t rows = std::min(kRows, p.num_sums - m0);
  Nothing nothing;
  for (int64_t part = strip * p.gates(); part < (strip + 1) * p.gates(); ++part)
    for (int64_t k0 = 0; k0 < p.known; k0 += kDepth)
      for (int64_t r = m0; r < m0 + rows; r += kTile)
        multiply_rows<kPanel>(static_cast<int>(std::min<int64_t>(kTile, m0 + rows - r)),
                              x + r * p.known + k0, p.known, p.packed + (part * p.k + k0) * kPanel,
                              kPanel, std::min(kDepth, p.known - k0), k0 == 0,
                              p.sums + (part * p.num_sums + r) * kPanel, nothing, 0);
}

// Divides the rows into items, of whole tiles: two threads share them.
void share_rows(Problem& p, int64_t least) {
  p.rows_of_item = std::clamp((p.m / 2 + kTile - 1) / kTile * kTile, least, kRows);
}

// Computes all rows, on several threads if they are many.
void compute(ffi::ThreadPool& pool, Problem p) {
  share_rows(p, kLeastRows);
  const int64_t threads = 1 + p.m * p.k * p.columns() / kWorthAThread;
  for_each_item(pool, p.strips() * p.row_blocks(), threads,
                [p](int64_t item, const NextItem&) { step(p, item); });
}

}  // namespace

#endif  // PALLAS_KERNELS_GATES_H_

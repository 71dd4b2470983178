// Steps of a gated cell on the CPU, as XLA custom calls (float32): their products, and their gates.
//
// The inputs of the product are first gathered beside each other. Then a thread takes a strip of
// kPanel columns of the states for at most kRows rows: it multiplies these rows with the panel of
// each gate, whose sums stay in L2, and computes the new states from them. The weight should fit L2.
// With many rows, a block of a panel is copied into the order of its use before it is multiplied.
// GatedCell computes one step, and equal rows at its end, with which tasks are padded, once.
// GatedTasks computes several steps, one after the other, whose states lie in one array.
//
// tiles.h promises that a row's bits are its own; the gates are computed for each number alone.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "functions.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kPanel = kVectors * W;  // columns
constexpr int64_t kDepth = 128;       // maximum of rows of a block of a panel
constexpr int64_t kRows = 32;         // maximum of rows of an item
constexpr int64_t kLeastRows = 16;    // minimum of them, if there are as many
constexpr int64_t kPacksFrom = 16;    // minimum of rows for which the weight is copied
constexpr int kMaxGates = 5;
constexpr int64_t kWorthAThread = 1 << 23;  // multiply-adds per additional thread: about 100 us

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
  alignas(64) static thread_local float total[kMaxGates * kRows * kPanel];
  Nothing nothing;
  for (int gate = 0; gate < p.gates(); ++gate) {
    const int64_t n0 = gate * p.hidden + at;
    for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
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
        multiply_rows<kPanel>(count, p.x + (m0 + r) * p.k + k0, p.k, b, b_stride, depth, k0 == 0,
                              total + (gate * kRows + r) * kPanel, nothing, 0);
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
        const float* sums = total + (gate * kRows + r) * kPanel + j;
        gates[gate] = load<W>(sums) + load_some(p.bias + n0, num);
        if (added) gates[gate] += load_some(added + n0, num);
      }
      finish(p, m0 + r, at + j, num, gates);
    }
  }
}

// Computes all rows, on several threads if they are many.
void compute(ffi::ThreadPool& pool, Problem p) {
  // Two threads share the rows, in whole tiles.
  p.rows_of_item = std::clamp((p.m / 2 + kTile - 1) / kTile * kTile, kLeastRows, kRows);
  const int64_t threads = 1 + p.m * p.k * p.columns() / kWorthAThread;
  for_each_item(pool, p.strips() * p.row_blocks(), threads,
                [p](int64_t item, const NextItem&) { step(p, item); });
}

ffi::Error gated_cell(ffi::ThreadPool pool, Matrix first, Index first_index, Matrix second,
                      Index second_index, Matrix w, Vector bias, Matrix added, Index added_index,
                      Matrix carried, Index carried_index, Matrix other, Index other_index,
                      ffi::Result<Matrix> h, ffi::Result<Matrix> c, int32_t kind) {
  const Rows parts[] = {Rows(first, first_index), Rows(second, second_index)};
  Problem p{};
  if (kind < kLstm || kind > kTreeInternal)
    return ffi::Error::InvalidArgument("gated_cell: the kind is unknown");
  p.kind = kind;
  p.w = w.typed_data();
  p.bias = bias.typed_data();
  const Rows added_rows(added, added_index);
  const Rows carried_rows[] = {Rows(carried, carried_index), Rows(other, other_index)};
  p.h = h->typed_data();
  p.c = c->typed_data();
  p.m = h->dimensions()[0];
  p.hidden = h->dimensions()[1];
  p.k = w.dimensions()[0];
  bool fits = w.dimensions()[1] == p.columns() &&
              static_cast<int64_t>(bias.element_count()) == p.columns();
  int64_t k = 0;
  for (const Rows& part : parts) {
    if (part.num == 0) continue;
    fits = fits && part.fits(p.m);
    k += part.width;
  }
  fits = fits && k == p.k;
  if (added_rows.num)
    fits = fits && added_rows.fits(p.m) && added_rows.width == p.columns();
  for (int i = 0; i < kNumCarried[kind]; ++i)
    fits = fits && carried_rows[i].fits(p.m) && carried_rows[i].width == p.hidden;
  if (!fits) return ffi::Error::InvalidArgument("gated_cell: the operands do not fit");

  // A task is padded with equal rows at its end: one of them is computed, and the others copied.
  const int64_t batch = p.m;
  const auto repeats = [&](int64_t r) {
    for (const Rows& rows : {parts[0], parts[1], added_rows, carried_rows[0], carried_rows[1]})
      if (!rows.is_same(r - 1, r)) return false;
    return true;
  };
  while (p.m > 1 && repeats(p.m - 1)) --p.m;

  static thread_local std::vector<float> x;
  static thread_local std::vector<const float*> at[3];
  x.resize(p.m * p.k);
  for (int64_t r = 0; r < p.m; ++r) {
    float* to = x.data() + r * p.k;
    for (const Rows& part : parts)
      if (part.num) to = std::copy_n(part.row(r), part.width, to);
  }
  const Rows* pointed[] = {&carried_rows[0], &carried_rows[1], &added_rows};
  for (int i = 0; i < 3; ++i) {
    at[i].resize(pointed[i]->num ? p.m : 0);
    for (size_t r = 0; r < at[i].size(); ++r) at[i][r] = pointed[i]->row(r);
  }
  p.x = x.data();
  p.carried[0] = at[0].data(), p.carried[1] = at[1].data();
  p.added = at[2].empty() ? nullptr : at[2].data();
  compute(pool, p);
  for (float* state : {p.h, p.c})
    for (int64_t r = p.m; r < batch; ++r)
      std::copy_n(state + (p.m - 1) * p.hidden, p.hidden, state + r * p.hidden);
  return ffi::Error::Success();
}

// Numbers of a packed weight on every machine: those of the widest panel, of 48 columns.
constexpr int64_t kWidest = 48;
static_assert(kWidest % kPanel == 0);
int64_t packed_size(const Problem& p) {
  return (p.hidden + kWidest - 1) / kWidest * kWidest * p.gates() * p.k;
}

// Copies a weight [k, gates * hidden] into the order in which `step` reads it.
ffi::Error pack_gates(Matrix w, ffi::Result<Vector> out, int32_t kind) {
  Problem p{};
  p.kind = kind;
  p.w = w.typed_data();
  p.k = w.dimensions()[0];
  p.hidden = w.dimensions()[1] / p.gates();
  if (static_cast<int64_t>(out->element_count()) != packed_size(p))
    return ffi::Error::InvalidArgument("pack_gates: the size is another");
  float* to = out->typed_data();
  std::fill_n(to, out->element_count(), 0.0f);
  for (int64_t at = 0; at < p.hidden; at += kPanel) {
    const int64_t width = std::min<int64_t>(kPanel, p.hidden - at);
    for (int gate = 0; gate < p.gates(); ++gate)
      for (int64_t i = 0; i < p.k; ++i, to += kPanel)
        std::copy_n(p.w + i * p.columns() + gate * p.hidden + at, width, to);
  }
  return ffi::Error::Success();
}

// What the columns of a row of a task have; cpu.py has the same order. A negative column is none.
enum Columns { kFirst, kSecond, kOne, kOther, kToken, kWord, kNewH, kNewC, kNumColumns };
constexpr int32_t kOfToken = -1;  // a part of the product that is the token's row of the table
constexpr uint8_t kFinite = 1;

inline bool is_finite(const float* from, int64_t num) {
  Float<W> sum{};
  for (int64_t i = 0; i < num; i += W) {
    const Float<W> x = load_some(from + i, num - i);
    sum += x - x;  // 0, or NaN
  }
  bool finite = true;
  for (int i = 0; i < W; ++i) finite = finite && sum[i] == 0.0f;
  return finite;
}

// Runs tasks in their order. All rows of a task are read before any of its results is written.
//
// states [slots, hidden] is changed in place. A row has the numbers of what it reads and writes, in
// `columns`, and in its last column the number of its task, which does not decrease; it is negative
// for rows after the last task. A token is in `tokens` at a slot, or in the row itself if the slot
// is negative. A row whose results go to the slot `trash` is not computed. After the tasks, the
// states at the slots `reads` are copied to `values`, up to the first negative slot.
//
// The new states of kLookup are the token's rows of `table` and of `added`, without a product.
ffi::Error gated_tasks(ffi::ThreadPool pool, Matrix states, Index tokens,
                       Table rows, Index reads, Vector packed, Vector bias, Matrix table,
                       Matrix added, ffi::Result<Matrix> new_states,
                       ffi::Result<Flags> flags, ffi::Result<Matrix> values, int32_t kind, int32_t trash,
                       ffi::Span<const int32_t> columns) {
  Problem p{};
  const int64_t num = rows.dimensions()[0], width = rows.dimensions()[1];
  const int64_t slots = states.dimensions()[0];
  if (kind < kLstm || kind > kLookup || columns.size() != kNumColumns || slots == 0)
    return ffi::Error::InvalidArgument("gated_tasks: the kind or the columns are unknown");
  p.kind = kind;
  p.packed = packed.typed_data();
  p.bias = bias.typed_data();
  p.hidden = states.dimensions()[1];
  bool fits = flags->dimensions()[0] == num &&
              static_cast<int64_t>(bias.element_count()) == p.columns();
  int64_t k = 0;
  for (int part : {kFirst, kSecond}) {
    if (columns[part] >= 0) k += p.hidden;
    if (columns[part] == kOfToken) k += table.dimensions()[1];
  }
  p.k = k;
  fits = fits && static_cast<int64_t>(packed.element_count()) == packed_size(p);
  const bool looks_up = kind == kLookup, adds = added.dimensions()[0] > 0 && !looks_up;
  fits = fits && (!adds || added.dimensions()[1] == p.columns());
  if (looks_up)
    for (const Matrix& rows_of_tokens : {table, added})
      fits = fits && rows_of_tokens.dimensions()[0] > 0 &&
             rows_of_tokens.dimensions()[1] == p.hidden && columns[kToken] >= 0;
  for (int i = 0; i < kNumCarried[kind]; ++i) fits = fits && columns[kOne + i] >= 0;
  for (int32_t column : columns) fits = fits && column < width - 1;
  const int64_t num_reads = reads.element_count();
  fits = fits && values->dimensions()[0] == num_reads && values->dimensions()[1] == p.hidden;
  if (!fits) return ffi::Error::InvalidArgument("gated_tasks: the operands do not fit");

  float* const state = new_states->typed_data();
  if (state != states.typed_data()) std::copy_n(states.typed_data(), slots * p.hidden, state);
  std::fill_n(flags->typed_data(), num, kFinite);
  const auto state_of = [&](int32_t slot) {
    return state + std::clamp<int64_t>(slot, 0, slots - 1) * p.hidden;
  };
  // A number out of range reads the nearest row, as in XLA.
  const auto row_of = [](const Matrix& matrix, int32_t number) {
    const int64_t count = matrix.dimensions()[0], size = matrix.dimensions()[1];
    return matrix.typed_data() + std::clamp<int64_t>(number, 0, count - 1) * size;
  };
  static thread_local std::vector<float> x, h, c;
  static thread_local std::vector<const float*> at[3];
  static thread_local std::vector<int64_t> live;
  const auto row = [&](int64_t r) { return rows.typed_data() + r * width; };
  for (int64_t begin = 0, end; begin < num && row(begin)[width - 1] >= 0; begin = end) {
    live.clear();
    for (end = begin; end < num && row(end)[width - 1] == row(begin)[width - 1]; ++end)
      if (row(end)[columns[kNewH]] != trash || row(end)[columns[kNewC]] != trash)
        live.push_back(end);
    p.m = live.size();
    if (p.m == 0) continue;
    x.resize(p.m * p.k), h.resize(p.m * p.hidden), c.resize(p.m * p.hidden);
    for (auto& pointers : at) pointers.resize(p.m);
    p.x = x.data(), p.h = h.data(), p.c = c.data();
    for (int64_t i = 0; i < p.m; ++i) {
      const int32_t* own = row(live[i]);
      int32_t token = 0;
      if (columns[kToken] >= 0) {
        token = own[columns[kToken]];
        if (token >= 0) token = tokens.typed_data()[token];
        else token = own[columns[kWord]];
      }
      if (looks_up) {
        std::copy_n(row_of(table, token), p.hidden, p.h + i * p.hidden);
        std::copy_n(row_of(added, token), p.hidden, p.c + i * p.hidden);
        continue;
      }
      float* to = x.data() + i * p.k;
      for (int part : {kFirst, kSecond}) {
        if (columns[part] >= 0) to = std::copy_n(state_of(own[columns[part]]), p.hidden, to);
        if (columns[part] == kOfToken)
          to = std::copy_n(row_of(table, token), table.dimensions()[1], to);
      }
      for (int j = 0; j < kNumCarried[kind]; ++j) at[j][i] = state_of(own[columns[kOne + j]]);
      if (adds) at[2][i] = row_of(added, token);
    }
    p.carried[0] = at[0].data(), p.carried[1] = at[1].data();
    p.added = adds ? at[2].data() : nullptr;
    if (!looks_up) compute(pool, p);
    for (int64_t i = 0; i < p.m; ++i) {
      const float *new_h = p.h + i * p.hidden, *new_c = p.c + i * p.hidden;
      if (!is_finite(new_h, p.hidden) || !is_finite(new_c, p.hidden))
        flags->typed_data()[live[i]] = 0;
      std::copy_n(new_h, p.hidden, state_of(row(live[i])[columns[kNewH]]));
      std::copy_n(new_c, p.hidden, state_of(row(live[i])[columns[kNewC]]));
    }
  }
  const int32_t* read = reads.typed_data();
  for (int64_t i = 0; i < num_reads && read[i] >= 0; ++i)
    std::copy_n(state_of(read[i]), p.hidden, values->typed_data() + i * p.hidden);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatedCell, gated_cell,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Arg<Matrix>()
                                  .Arg<Vector>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Ret<Matrix>()
                                  .Ret<Matrix>()
                                  .Attr<int32_t>("kind"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GatedTasks, gated_tasks,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<Index>()
                                  .Arg<Table>()
                                  .Arg<Index>()
                                  .Arg<Vector>()
                                  .Arg<Vector>()
                                  .Arg<Matrix>()
                                  .Arg<Matrix>()
                                  .Ret<Matrix>()
                                  .Ret<Flags>()
                                  .Ret<Matrix>()
                                  .Attr<int32_t>("kind")
                                  .Attr<int32_t>("trash")
                                  .Attr<ffi::Span<const int32_t>>("columns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackGates, pack_gates,
                              ffi::Ffi::Bind()
                                  .Arg<Matrix>()
                                  .Ret<Vector>()
                                  .Attr<int32_t>("kind"));

// Steps of a gated cell on the CPU, as XLA custom calls (float32): their products, and their gates,
// which gates.h computes.
//
// GatedCell computes one step, and equal rows at its end, with which tasks are padded, once.
// GatedTasks computes several steps, one after the other, whose states lie in one array.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi.h"
#include "gates.h"
#include "team.h"

namespace {

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

constexpr int64_t kMostAhead = 128;        // maximum of rows whose tokens are multiplied together
// Multiply-adds of a call per additional thread: about 1 ms. In shorter calls, a thread that has
// begun an item and loses its core to the host's own threads costs more than it brings.
constexpr int64_t kWorthATeam = 1 << 26;

// What the threads of a call do together: a step, or the products of tokens for several steps.
struct Phase {
  Problem p;
  const float* ahead = nullptr;  // [num_sums, known]

  void run(int64_t item) const { ahead ? multiply_ahead(p, ahead, item) : step(p, item); }
};

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
  const auto row = [&](int64_t r) { return rows.typed_data() + r * width; };
  // The rows that are computed, and where those of each task begin.
  static thread_local std::vector<const int32_t*> live;
  static thread_local std::vector<int64_t> begins;
  live.clear(), begins.clear();
  for (int64_t r = 0, last = -1; r < num && row(r)[width - 1] >= 0; ++r) {
    if (row(r)[columns[kNewH]] == trash && row(r)[columns[kNewC]] == trash) continue;
    if (row(r)[width - 1] != last || begins.empty()) begins.push_back(live.size());
    last = row(r)[width - 1];
    live.push_back(row(r));
  }
  begins.push_back(live.size());
  const auto token_of = [&](const int32_t* own) {
    if (columns[kToken] < 0) return 0;
    const int32_t slot = own[columns[kToken]];
    return slot < 0 ? own[columns[kWord]] : tokens.typed_data()[slot];
  };
  const int64_t num_live = live.size(), num_tasks = begins.size() - 1;
  // What tokens decide is multiplied for several tasks at once: one of few rows would read all of
  // the weight for them.
  const bool can_be_ahead = columns[kFirst] == kOfToken && columns[kSecond] >= 0;
  const int64_t known = can_be_ahead ? table.dimensions()[1] : 0;
  static thread_local std::vector<float> x, x_ahead, sums, h, c, last_h;
  static thread_local std::vector<const float*> at[3];
  // Whether the rows of a task go on from those of the task before it, in the same slots: then its
  // states are in `last_h` and `c`, and were not written to `state`.
  const auto goes_on = [&](int64_t task) {
    const int64_t m = begins[task] - begins[task - 1];
    if (kind != kLstm || task == num_tasks || begins[task + 1] - begins[task] != m) return false;
    for (int64_t i = begins[task]; i < begins[task + 1]; ++i) {
      const int32_t *now = live[i], *before = live[i - m];
      const int32_t slot_h = before[columns[kNewH]], slot_c = before[columns[kNewC]];
      if (now[columns[kNewH]] != slot_h || now[columns[kNewC]] != slot_c || slot_h == slot_c ||
          now[columns[kOne]] != slot_c)
        return false;
      for (int part : {kFirst, kSecond})
        if (columns[part] >= 0 && now[columns[part]] != slot_h) return false;
    }
    return true;
  };
  const bool only_h = (columns[kFirst] >= 0) + (columns[kSecond] >= 0) == 1;
  bool stays = false;
  Team<Phase> team(pool, looks_up ? 1 : 1 + num_live * p.k * p.columns() / kWorthATeam, Phase{p});
  for (int64_t group = 0, next; group < num_tasks; group = next) {
    const int64_t first = begins[group];
    for (next = group + 1; next < num_tasks && begins[next + 1] - first <= kMostAhead;) ++next;
    const bool is_ahead = can_be_ahead && next > group + 1;
    p.known = is_ahead ? known : 0;
    p.num_sums = begins[next] - first;
    if (is_ahead) {
      x_ahead.resize(p.num_sums * known);
      sums.resize(p.strips() * p.gates() * p.num_sums * kPanel);
      for (int64_t i = 0; i < p.num_sums; ++i)
        std::copy_n(row_of(table, token_of(live[first + i])), known, x_ahead.data() + i * known);
      p.sums = sums.data();
      team.work() = {p, x_ahead.data()};
      team.run(p.strips() * ((p.num_sums + kRows - 1) / kRows));
    }
    for (int64_t task = group; task < next; ++task) {
      const int32_t* const* own = live.data() + begins[task];
      p.m = begins[task + 1] - begins[task];
      if (stays) h.swap(last_h);
      x.resize(p.m * (p.k - p.known)), h.resize(p.m * p.hidden), c.resize(p.m * p.hidden);
      for (auto& pointers : at) pointers.resize(p.m);
      // The rows of the product are the states alone.
      const bool reads_last = stays && only_h && p.k - p.known == p.hidden;
      p.x = reads_last ? last_h.data() : x.data(), p.h = h.data(), p.c = c.data();
      p.sums = is_ahead ? sums.data() + (begins[task] - first) * kPanel : nullptr;
      float* to = x.data();
      for (int64_t i = 0; i < p.m; ++i) {
        const int32_t token = token_of(own[i]);
        if (looks_up) {
          std::copy_n(row_of(table, token), p.hidden, p.h + i * p.hidden);
          std::copy_n(row_of(added, token), p.hidden, p.c + i * p.hidden);
          continue;
        }
        for (int part : {kFirst, kSecond}) {
          if (columns[part] >= 0 && !reads_last)
            to = std::copy_n(stays ? last_h.data() + i * p.hidden : state_of(own[i][columns[part]]),
                             p.hidden, to);
          if (columns[part] == kOfToken && !is_ahead)
            to = std::copy_n(row_of(table, token), table.dimensions()[1], to);
        }
        for (int j = 0; j < kNumCarried[kind]; ++j)
          at[j][i] = stays ? p.c + i * p.hidden : state_of(own[i][columns[kOne + j]]);
        if (adds) at[2][i] = row_of(added, token);
      }
      p.carried[0] = at[0].data(), p.carried[1] = at[1].data();
      p.added = adds ? at[2].data() : nullptr;
      if (!looks_up) {
        share_rows(p, team.is_alone() ? kLeastRows : kLeastOfATeam);
        team.work() = {p, nullptr};
        team.run(p.strips() * p.row_blocks());
      }
      stays = goes_on(task + 1);
      for (int64_t i = 0; i < p.m; ++i) {
        const float *new_h = p.h + i * p.hidden, *new_c = p.c + i * p.hidden;
        if (!is_finite(new_h, p.hidden) || !is_finite(new_c, p.hidden))
          flags->typed_data()[(own[i] - rows.typed_data()) / width] = 0;
        if (stays) continue;
        std::copy_n(new_h, p.hidden, state_of(own[i][columns[kNewH]]));
        std::copy_n(new_c, p.hidden, state_of(own[i][columns[kNewC]]));
      }
    }
  }
  const int32_t* read = reads.typed_data();
  for (int64_t i = 0; i < num_reads && read[i] >= 0; ++i)
    std::copy_n(state_of(read[i]), p.hidden, values->typed_data() + i * p.hidden);
  return ffi::Error::Success();
}

}  // namespace

HANDLER(GatedCell, gated_cell, "kind")

HANDLER(GatedTasks, gated_tasks, "kind", "trash", "columns")

HANDLER(PackGates, pack_gates, "kind")

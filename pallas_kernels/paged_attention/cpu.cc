// Paged attention on the CPU, as an XLA custom call: float32 queries, pages in float32, bfloat16 or,
// with scales, in int8 or float8_e4m3fn. api.py states the contract.
//
// A work item is a run of consecutive queries of one row, with all query heads of some KV heads. It
// goes through the keys that its queries see in blocks of kBlock positions, aligned to position 0,
// with an online softmax (Milakov and Gimelshein, arXiv:1805.02867). Few queries read keys and
// values once, in the order of memory: values are prefetched while their keys are multiplied, and
// the next keys while values are. For many queries, keys are transposed once in registers. The
// operations for one query, and their order, depend neither on the rest of the batch nor on how its
// row is cut into items: a block that a query does not see multiplies its sums by 1 and adds 0.
// Where the processor multiplies pairs of bfloat16 numbers, queries of such keys are rounded to them.
// Other narrow elements become floats when they are loaded, values of many queries once for all of them;
// the scale of a key multiplies its scores, and that of a value its weights.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "ffi.h"
#include "functions.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int kTileRows = 96;      // maximum of (query, head) pairs of an item, if group allows
constexpr float kMasked = -1e30f;  // used for minus infinity; kMasked - kMasked is not NaN
constexpr int64_t kWorthAThread = 1 << 19;  // multiply-adds per additional thread

constexpr int kConvertsAbove = 4;    // queries for which narrow values are converted only once
constexpr int kTransposesAbove = 8;  // queries for which keys are transposed

// An item has up to kHeadsTogether KV heads, which are beside each other in a page, if a thread has
// kRowsAThread rows or more.
constexpr int64_t kHeadsTogether = 8, kRowsAThread = 4;

template <int W, int... lane>
inline Int<W> count_from(int32_t first, std::integer_sequence<int, lane...>) {
  return Int<W>{lane...} + first;
}

template <int W>
inline Float<W> hyperbolic_tangent(Float<W> x) {
  const Float<W> most = Float<W>{} + 10.0f;
  x = x < -most ? -most : x;
  x = x > most ? most : x;
  const Float<W> e = exponential<W>(x + x);
  return (e - 1.0f) / (e + 1.0f);
}

struct Problem {
  const float* q;                    // [tokens, heads, head_dim]
  const void *k, *v;                 // [layers * pages, kv_heads, page_size, head_dim]
  const float *k_scales, *v_scales;  // [layers * pages, kv_heads, page_size]; floats have none
  int64_t first_page;                // of the layer
  const int32_t *query_start, *query_length, *first_position, *context_length, *page_table;
  const float* slopes;  // [heads], or null
  const float* biases;  // [heads, distances], or null
  const float* sinks;   // [heads], or null
  float* out;           // [tokens, heads, head_dim]
  int64_t tokens, heads, kv_heads, group, head_dim, num_pages, page_size, rows, table_width;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  int64_t distances;      // of biases; longer ones have the last entry
};

// The biases of W keys, of which the first is `distance` positions before the query.
template <int W>
Float<W> by_distance(const float* biases, int64_t distances, int64_t distance) {
  if (distance - (W - 1) >= distances - 1) return Float<W>{} + biases[distances - 1];
  Float<W> x = {};
  for (int i = 0; i < W; ++i)
    x[i] = biases[std::clamp<int64_t>(distance - i, 0, distances - 1)];
  return x;
}

struct Item {
  int32_t row, kv_head, heads, first, queries;  // first: index in its row of the first query
  int64_t start, end;                           // range of positions that some query may see
  int64_t cost;                                 // approximate number of multiply-adds
};

// Where the keys and values at kBlock positions are, in numbers of keys from those of `kv_head`. A
// position that the item may not see has the place of one that it may.
struct Block {
  int64_t at[kBlock];
};

// Fills `block` with the places of the positions from `base` on, and prefetches their scales.
template <bool is_scaled>
void locate(const Problem& p, const Item& item, int64_t base, Block* block) {
  const int begin = static_cast<int>(std::max<int64_t>(item.start - base, 0));
  const int end = static_cast<int>(std::min<int64_t>(item.end - base, kBlock));
  const int32_t* table = p.page_table + item.row * p.table_width;
  for (int s = begin; s < end;) {
    const int64_t page = (base + s) / p.page_size, offset = (base + s) % p.page_size;
    const int64_t head = (p.first_page + table[page]) * p.kv_heads + item.kv_head;
    const int64_t at = head * p.page_size + offset;
    const int run = static_cast<int>(std::min<int64_t>(p.page_size - offset, end - s));
    for (int i = 0; i < run; ++i) block->at[s + i] = at + i;
    if constexpr (is_scaled)
      for (int h = 0; h < item.heads; ++h)
        for (int i = 0; i < run; i += kLine / sizeof(float)) {
          __builtin_prefetch(p.k_scales + at + h * p.page_size + i);
          __builtin_prefetch(p.v_scales + at + h * p.page_size + i);
        }
    s += run;
  }
  std::fill(block->at, block->at + begin, block->at[begin]);
  std::fill(block->at + end, block->at + kBlock, block->at[begin]);
}

// Copies the scales of W keys, which are mostly beside each other.
template <int W>
inline void load_scales(const float* scales, const int64_t* at, float* to) {
  bool is_run = true;
  for (int i = 1; i < W; ++i) is_run &= at[i] == at[0] + i;
  if (is_run) return store(to, load<W>(scales + at[0]));
  for (int i = 0; i < W; ++i) to[i] = scales[at[i]];
}

// Keys of a block that an item may see, and the multiples of vectors around them.
struct Span {
  int begin, end, from, to;
};

// Makes weights of the scores of `count` queries, and adds these to their totals. `kept` is what
// remains of earlier sums, since the maximum grew. `position` is that of the first query, from the
// block's start.
template <int W, bool is_scaled>
void weigh(const Problem& p, int64_t first_head, int64_t position, int count, const Span& span,
           const float* k_scales, const float* v_scales, float* logits, float* maximum,
           float* total, float* kept) {
  for (int m = 0; m < count; ++m) {
    const int64_t at = position + m / p.group;  // of the query
    const int first = p.window ? std::max<int64_t>(span.begin, at - p.window + 1) : span.begin;
    const int last = static_cast<int>(std::min<int64_t>(span.end, at + 1));
    const int64_t head = first_head + m % p.group;
    const float* biases = p.biases ? p.biases + head * p.distances : nullptr;
    const float slope = p.slopes ? p.slopes[head] : 0.0f;
    float* row = logits + m * kBlock;
    Float<W> highest = Float<W>{} + kMasked;
    for (int s = span.from; s < span.to; s += W) {
      Float<W> x = load<W>(row + s);
      if constexpr (is_scaled) x *= load<W>(k_scales + s);
      const Int<W> key = count_from<W>(s, std::make_integer_sequence<int, W>());
      if (p.soft_cap > 0) x = p.soft_cap * hyperbolic_tangent<W>(x / p.soft_cap);
      if (biases) x += by_distance<W>(biases, p.distances, at - s);
      if (p.slopes) x += slope * __builtin_convertvector(key - static_cast<int32_t>(at), Float<W>);
      if (s < first || s + W > last) x = (key >= first) & (key < last) ? x : Float<W>{} + kMasked;
      store(row + s, x);
      highest = highest < x ? x : highest;
    }
    const float before = maximum[m], top = std::max(before, largest<W>(highest));
    maximum[m] = top;
    kept[m] = before == top ? 1.0f : exponential<W>(Float<W>{} + (before - top))[0];
    Float<W> added = {};
    for (int s = span.from; s < span.to; s += W) {
      Float<W> x = exponential<W>(load<W>(row + s) - top);
      const Int<W> key = count_from<W>(s, std::make_integer_sequence<int, W>());
      if (s < first || s + W > last) x = (key >= first) & (key < last) ? x : Float<W>{};
      added += x;
      if constexpr (is_scaled) x *= load<W>(v_scales + s);
      store(row + s, x);
    }
    store(total + m * W, kept[m] * load<W>(total + m * W) + added);
  }
}

// Computes an item. `after` is the one that this thread computes next, probably, or null.
template <int W, typename T, bool is_paired = false>
void attend(const Problem& p, const Item& item, const Item* after) {
  using Key = std::conditional_t<is_paired, Pair, T>;
  using Q = std::conditional_t<is_paired, Pair, float>;
  constexpr bool is_narrow = !std::is_same<T, float>::value, is_scaled = sizeof(T) == 1;
  const int64_t dim = p.head_dim, width = is_paired ? dim / 2 : dim;  // width: of keys and queries
  const int count = item.queries * static_cast<int>(p.group);
  const int64_t position = int64_t{p.first_position[item.row]} + item.first;
  const int64_t token = int64_t{p.query_start[item.row]} + item.first;
  static thread_local std::vector<float> scratch;
  const bool transposes = count > kTransposesAbove;
  const int step = transposes ? 2 * W : W;  // keys that are scored together
  const bool converts = is_narrow && count > kConvertsAbove;
  const size_t needed = item.heads * count * (2 * dim + W + 1) + count * (kBlock + 1) +
                        (transposes ? dim * 2 * W : 0) + (converts ? kBlock * dim : 0) + 16;
  if (scratch.size() < needed) scratch.resize(needed);
  auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  float* keys = reinterpret_cast<float*>(aligned);         // [dim, 2 W] if it transposes
  float* values = keys + (transposes ? dim * 2 * W : 0);   // [kBlock, dim] if it converts
  float* logits = values + (converts ? kBlock * dim : 0);  // [count, kBlock], then the weights
  float* totals = logits + count * kBlock;                 // [heads, count, W]
  float* space = totals + item.heads * count * W;          // of queries
  float* all_out = space + item.heads * count * dim;       // [heads, count, dim]
  float* maxima = all_out + item.heads * count * dim;      // [heads, count]
  float* kept = maxima + item.heads * count;               // [count]
  Q* all_q = reinterpret_cast<Q*>(space);                  // [heads, count, width]
  for (int h = 0; h < item.heads; ++h)
    for (int i = 0; i < item.queries; ++i) {
      const float* from = p.q + ((token + i) * p.heads + (item.kv_head + h) * p.group) * dim;
      Q* to = all_q + (h * count + i * p.group) * width;
      if constexpr (is_paired) {
        for (int64_t d = 0; d < p.group * dim; d += W)
          store(to + d / 2, load<W>(from + d) * p.scale);
      } else {
        for (int64_t d = 0; d < p.group * dim; ++d) to[d] = from[d] * p.scale;
      }
    }
  std::fill_n(all_out, item.heads * count * dim, 0.0f);
  std::fill_n(totals, item.heads * count * W, 0.0f);
  std::fill_n(maxima, item.heads * count, kMasked);

  int64_t every[kBlock];
  for (int i = 0; i < kBlock; ++i) every[i] = i;
  Block blocks[2], *block = &blocks[0], *next = &blocks[1];
  const int64_t first_base = item.start / kBlock * kBlock;
  if (item.start < item.end) locate<is_scaled>(p, item, first_base, block);
  for (int64_t base = first_base; base < item.end; base += kBlock) {
    const int begin = static_cast<int>(std::max<int64_t>(item.start - base, 0));
    const int end = static_cast<int>(std::min<int64_t>(item.end - base, kBlock));
    const int from = begin / step * step, to = (end + step - 1) / step * step;
    bool has_next = true;
    if (base + kBlock < item.end) locate<is_scaled>(p, item, base + kBlock, next);
    else if (after && after->start < after->end)
      locate<is_scaled>(p, *after, after->start / kBlock * kBlock, next);
    else has_next = false;
    for (int h = 0; h < item.heads; ++h) {
      const int64_t first_head = (item.kv_head + h) * p.group;
      const int64_t shift = h * p.page_size;  // from the places of `kv_head`
      const T* all_k = static_cast<const T*>(p.k);
      const T* first_k = all_k + shift * dim;
      const Vectors<Key> k = {reinterpret_cast<const Key*>(first_k), block->at, width};
      const Vectors<T> v = {static_cast<const T*>(p.v) + shift * dim, block->at, dim};
      const Vectors<Key> v_ahead = {reinterpret_cast<const Key*>(v.first), block->at, width};
      // The keys after these ones.
      const Vectors<T> next_k = h + 1 < item.heads
                                    ? Vectors<T>{first_k + p.page_size * dim, block->at, dim}
                                    : Vectors<T>{all_k, has_next ? next->at : nullptr, dim};
      float k_scales[kBlock], v_scales[kBlock];
      if constexpr (is_scaled)
        for (int s = from; s < to; s += W) {
          load_scales<W>(p.k_scales + shift, block->at + s, k_scales + s);
          load_scales<W>(p.v_scales + shift, block->at + s, v_scales + s);
        }
      const Q* q = all_q + h * count * width;
      float* out = all_out + h * count * dim;
      for (int s = from; s < to; s += step) {
        if (transposes) {
          transpose<W>(k.from(s), v_ahead.from(s), keys);
          transpose<W>(k.from(s + W), v_ahead.from(s + W), keys + W);
          by_fours(count, [&](int m, auto n) {
            score_transposed<W, n>(q + m * width, keys, width, logits + m * kBlock + s);
          });
        } else {
          by_fours(count, [&](int m, auto n) {
            score<W, n>(q + m * width, k.from(s), v_ahead.from(s), logits + m * kBlock + s);
          });
        }
      }
      weigh<W, is_scaled>(p, first_head, position - base, count, {begin, end, from, to}, k_scales,
                          v_scales, logits, maxima + h * count, totals + h * count * W, kept);
      if (converts) {
        for (int i = begin; i < end; ++i) {
          if (next_k) next_k.prefetch(i, i + 1);
          for (int64_t d = 0; d < dim; d += W) store(values + i * dim + d, load<W>(v[i] + d));
        }
        const Vectors<float> converted = {values, every, dim};
        accumulate_all<W>(logits, converted, Vectors<float>{}, begin, end, kept, count, out);
      } else {
        accumulate_all<W>(logits, v, next_k, begin, end, kept, count, out);
      }
      if (h + 1 == item.heads && has_next) {
        next_k.prefetch(0, begin);
        next_k.prefetch(end, kBlock);
      }
    }
    std::swap(block, next);
  }

  for (int h = 0; h < item.heads; ++h)
    for (int m = 0; m < count; ++m) {
      const int64_t head = (item.kv_head + h) * p.group + m % p.group;
      float weight = sum<W>(load<W>(totals + (h * count + m) * W));
      if (p.sinks) {  // past e^88, the share of the keys is 0 in any case
        const float above = std::min(p.sinks[head] - maxima[h * count + m], 88.0f);
        weight += exponential<W>(Float<W>{} + above)[0];
      }
      const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;  // zeros if no key is seen
      const float* from = all_out + (h * count + m) * dim;
      float* to = p.out + ((token + m / p.group) * p.heads + head) * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * inverse;
    }
}

template <typename T>
void attend_in_widest(const Problem& p, const Item& item, const Item* after) {
  constexpr bool may_pair = kMultipliesPairs && std::is_same<T, Bfloat16>::value;
  if (may_pair && p.head_dim % (2 * kWide) == 0) attend<kWide, T, may_pair>(p, item, after);
  else if (p.head_dim % kWide == 0) attend<kWide, T>(p, item, after);
  else attend<8, T>(p, item, after);
}

using Attend = void (*)(const Problem&, const Item&, const Item*);

template <typename T>
constexpr ffi::DataType kType = ffi::F32;
template <>
constexpr ffi::DataType kType<Bfloat16> = ffi::BF16;
template <>
constexpr ffi::DataType kType<int8_t> = ffi::S8;
template <>
constexpr ffi::DataType kType<Float8> = ffi::F8E4M3FN;

// Returns the function for pages of this element type; null for other types. Each dtype of pages is
// a library, as all of them take three times as long to compile.
Attend attend_for(ffi::DataType type) {
  return type == kType<PAGES> ? attend_in_widest<PAGES> : nullptr;
}

// The state that the threads share.
struct Plan {
  Problem problem;
  Attend attend;
  std::vector<Item> items;
};

// Fills `items` and zeroes the output of tokens in no row. Returns an error in the rows, or "".
std::string plan(const Problem& p, int64_t threads, std::vector<Item>& items) {
  const int64_t tile = std::max<int64_t>(1, kTileRows / p.group);
  const int64_t rows = std::count_if(p.query_length, p.query_length + p.rows,
                                     [](int32_t length) { return length > 0; });
  const int64_t together = rows >= kRowsAThread * threads ? kHeadsTogether : 1;
  std::vector<bool> owned(p.tokens);
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t start = p.query_start[row], length = p.query_length[row];
    const int64_t position = p.first_position[row], context = p.context_length[row];
    if (length == 0) continue;
    const auto wrong = [&](const char* what) { return "row " + std::to_string(row) + ": " + what; };
    if (length < 0 || start < 0 || start + length > p.tokens) return wrong("queries out of range");
    if (position < 0 || position + length > INT32_MAX) return wrong("positions out of range");
    if (std::min(context, position + length) > p.table_width * p.page_size)
      return wrong("keys past the end of the page table");
    for (int64_t token = start; token < start + length; ++token) {
      if (owned[token]) return wrong("shares queries with another row");  // two threads would write
      owned[token] = true;
    }
    for (int64_t first = 0; first < length; first += tile) {
      const int64_t queries = std::min(tile, length - first);
      const int64_t end = std::min(context, position + first + queries);
      const int64_t earliest = p.window ? std::max<int64_t>(0, position + first - p.window + 1) : 0;
      const int64_t begin = std::max<int64_t>(0, std::min(earliest, end));
      for (int64_t page = begin / p.page_size; page * p.page_size < end; ++page) {
        const int32_t id = p.page_table[row * p.table_width + page];
        if (id < 0 || id >= p.num_pages) return wrong("page id out of range");
      }
      const int64_t most = queries * p.group > kTransposesAbove ? 1 : together;
      for (int64_t head = 0; head < p.kv_heads; head += most) {
        const int64_t heads = std::min(most, p.kv_heads - head);
        items.push_back({static_cast<int32_t>(row), static_cast<int32_t>(head),
                         static_cast<int32_t>(heads), static_cast<int32_t>(first),
                         static_cast<int32_t>(queries), begin, end,
                         (end - begin) * heads * (queries * p.group + 4) * p.head_dim});
      }
    }
  }
  for (int64_t token = 0; token < p.tokens; ++token)
    if (!owned[token]) std::fill_n(p.out + token * p.heads * p.head_dim, p.heads * p.head_dim, 0.0f);
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return "";
}

using Tokens = ffi::Buffer<ffi::F32, 3>;
using Scales = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32, 1>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Scalar = ffi::Buffer<ffi::S32, 0>;
using ByHead = ffi::Buffer<ffi::F32, 1>;

ffi::Error paged_attention(ffi::ThreadPool pool, Tokens q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           Scales k_scales, Scales v_scales, Scalar layer, Ints query_start,
                           Ints query_length, Ints first_position, Ints context_length,
                           Table page_table, ByHead slopes, ByHead sinks,
                           ffi::Result<Tokens> out, float scale, float soft_cap, int32_t window) {
  const auto cache = k.dimensions();  // [layers, pages, kv_heads, page_size, head_dim]
  const int64_t at = *layer.typed_data();
  if (at < 0 || at >= cache[0])
    return ffi::Error::InvalidArgument("paged_attention: layer out of range");
  auto shared = std::make_shared<Plan>();
  shared->attend = attend_for(k.element_type());
  if (!shared->attend)
    return ffi::Error::InvalidArgument("paged_attention: dtype of pages is not supported");
  Problem& p = shared->problem;
  p.q = q.typed_data();
  p.k = k.untyped_data();
  p.v = v.untyped_data();
  p.k_scales = k_scales.typed_data();
  p.v_scales = v_scales.typed_data();
  p.first_page = at * cache[1];
  p.query_start = query_start.typed_data();
  p.query_length = query_length.typed_data();
  p.first_position = first_position.typed_data();
  p.context_length = context_length.typed_data();
  p.page_table = page_table.typed_data();
  // One number a head is a slope; more are biases.
  const int64_t a_head = slopes.element_count() / q.dimensions()[1];
  p.slopes = a_head == 1 ? slopes.typed_data() : nullptr;
  p.biases = a_head > 1 ? slopes.typed_data() : nullptr;
  p.distances = a_head;
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.out = out->typed_data();
  p.tokens = q.dimensions()[0];
  p.heads = q.dimensions()[1];
  p.kv_heads = cache[2];
  p.group = p.heads / p.kv_heads;
  p.head_dim = cache[4];
  p.num_pages = cache[1];
  p.page_size = cache[3];
  p.rows = page_table.dimensions()[0];
  p.table_width = page_table.dimensions()[1];
  p.scale = scale;
  p.soft_cap = soft_cap;
  p.window = window;
  const std::string error = plan(p, pool.num_threads(), shared->items);
  if (!error.empty()) return ffi::Error::InvalidArgument("paged_attention: " + error);

  int64_t cost = 0;
  for (const Item& item : shared->items) cost += item.cost;
  const int64_t count = shared->items.size();
  const auto body = [shared, count](int64_t i, const NextItem& next) {
    const int64_t after = next;
    const Item* items = shared->items.data();
    shared->attend(shared->problem, items[i], after < count ? items + after : nullptr);
  };
  for_each_item(pool, count, 1 + cost / kWorthAThread, body);
  return ffi::Error::Success();
}

}  // namespace

HANDLER(PagedAttention, paged_attention, "scale", "soft_cap", "window")

// Paged attention on the CPU, as an XLA custom call: float32 queries, pages in float32 or, with
// scales, in int8 or float8_e4m3fn. api.py states the contract.
//
// A work item is a run of consecutive queries of one row, with all query heads of one KV head. It
// goes through the keys that its queries see in blocks of kBlock positions, aligned to position 0,
// with an online softmax (Milakov and Gimelshein, arXiv:1805.02867). Keys are transposed once in
// registers, so that scores are vectors over keys, and weights times values are vectors over
// head_dim. The operations for one query, and their order, depend neither on the rest of the batch
// nor on how its row is cut into items: a block that a query does not see multiplies its sums by 1
// and adds 0. Elements of 8 bits become floats when they are loaded, values of many queries once for
// all of them; the scale of a key multiplies its scores, and that of a value its weights.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "functions.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kBlock = 64;         // keys per step of the online softmax
constexpr int kTileRows = 96;      // maximum of (query, head) pairs of an item, if group allows
constexpr float kMasked = -1e30f;  // used for minus infinity; kMasked - kMasked is not NaN
constexpr int64_t kWorthAThread = 1 << 19;  // multiply-adds per additional thread

constexpr int kConvertsAbove = 4;  // queries for which values of 8 bits are converted only once

constexpr int kChunk = kWide == 16 ? 4 : 2;  // vectors of head_dim that `accumulate` holds

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

// out[d][i] = rows[i][d] for W rows; rows of `out` are 2 W long. Prefetches `ahead`.
template <int W, typename T>
void transpose(const T* const* rows, const T* const* ahead, int64_t head_dim, float* out) {
  for (int64_t d = 0; d < head_dim; d += W) {
    Float<W> x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      x[i] = load<W>(rows[i] + d);
      __builtin_prefetch(ahead[i] + d, 0, 3);
    }
    transpose_square<W>(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(out + (d + i) * 2 * W, x[i]);
  }
}

// logits[m][s] = q[m] . k[s], for R queries and 2 W keys.
template <int W, int R>
void score(const float* q, const float* keys, int64_t head_dim, float* logits) {
  Float<W> x[R][2] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    const Float<W> a = load<W>(keys + d * 2 * W), b = load<W>(keys + d * 2 * W + W);
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) {
      x[m][0] += q[m * head_dim + d] * a;
      x[m][1] += q[m * head_dim + d] * b;
    }
  }
  for (int m = 0; m < R; ++m) {
    store(logits + m * kBlock, x[m][0]);
    store(logits + m * kBlock + W, x[m][1]);
  }
}

// out[m] = kept[m] * out[m] + sum over s of weights[m][s] * v[s], for R queries and C vectors from d.
template <int W, int R, int C, typename T>
void accumulate(const float* weights, const T* const* v, const T* const* ahead, int begin, int end,
                const float* kept, int64_t d, int64_t head_dim, float* out) {
  Float<W> x[R][C];
  for (int m = 0; m < R; ++m)
    for (int c = 0; c < C; ++c) x[m][c] = kept[m] * load<W>(out + m * head_dim + d + c * W);
  for (int s = begin; s < end; ++s) {
    Float<W> value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      value[c] = load<W>(v[s] + d + c * W);
      if (ahead) __builtin_prefetch(ahead[s] + d + c * W, 0, 3);
    }
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) {
      const float weight = weights[m * kBlock + s];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) x[m][c] += weight * value[c];
    }
  }
  for (int m = 0; m < R; ++m)
    for (int c = 0; c < C; ++c) store(out + m * head_dim + d + c * W, x[m][c]);
}

// Calls f for runs of up to four of `count` items, with the first and the (static) number of a run.
template <typename F>
inline void by_fours(int count, F&& f) {
  int i = 0;
  for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>());
  if (count - i == 3) f(i, std::integral_constant<int, 3>());
  if (count - i == 2) f(i, std::integral_constant<int, 2>());
  if (count - i == 1) f(i, std::integral_constant<int, 1>());
}

// The same for all of head_dim and `count` queries; the first queries prefetch `ahead`, if any.
template <int W, typename T>
void accumulate_all(const float* logits, const T* const* v, const T* const* ahead, int begin,
                    int end, const float* kept, int count, int64_t dim, float* out) {
  by_fours(count, [&](int m, auto n) {
    const float* weights = logits + m * kBlock;
    const T* const* fetched = m == 0 ? ahead : nullptr;
    float* to = out + m * dim;
    int64_t d = 0;
    for (; d + kChunk * W <= dim; d += kChunk * W)
      accumulate<W, n, kChunk>(weights, v, fetched, begin, end, kept + m, d, dim, to);
    if (kChunk > 2 && d + 2 * W <= dim) {
      accumulate<W, n, 2>(weights, v, fetched, begin, end, kept + m, d, dim, to);
      d += 2 * W;
    }
    if (d < dim) accumulate<W, n, 1>(weights, v, fetched, begin, end, kept + m, d, dim, to);
  });
}

struct Problem {
  const float* q;                    // [tokens, heads, head_dim]
  const void *k, *v;                 // [layers * pages, kv_heads, page_size, head_dim]
  const float *k_scales, *v_scales;  // [layers * pages, kv_heads, page_size]; floats have none
  int64_t first_page;                // of the layer
  const int32_t *query_start, *query_length, *first_position, *context_length, *page_table;
  const float* slopes;  // [heads], or null
  const float* biases;  // [heads, distances], or null
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
  int32_t row, kv_head, first, queries;  // first: index in its row of the first query
  int64_t start, end;                    // range of positions of keys that some query may see
  int64_t cost;                          // approximate number of multiply-adds
};

// Keys and values at kBlock positions; zeros for those that the item may not see.
template <typename T>
struct Block {
  const T *k[kBlock], *v[kBlock];
  float k_scales[kBlock], v_scales[kBlock];
};

template <int W, typename T>
void attend(const Problem& p, const Item& item) {
  constexpr bool is_scaled = !std::is_same<T, float>::value;
  const int64_t dim = p.head_dim;
  const int count = item.queries * static_cast<int>(p.group);
  const int64_t position = int64_t{p.first_position[item.row]} + item.first;
  const int64_t token = int64_t{p.query_start[item.row]} + item.first;
  const int64_t first_head = item.kv_head * p.group;
  const int32_t* table = p.page_table + item.row * p.table_width;
  static thread_local std::vector<float> scratch;
  const bool converts = is_scaled && count > kConvertsAbove;
  const size_t needed = count * (2 * dim + kBlock + W + 2) + dim * 2 * W + dim +
                        (converts ? kBlock * dim : 0) + 16;
  if (scratch.size() < needed) scratch.resize(needed);
  auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  float* keys = reinterpret_cast<float*>(aligned);  // [dim, 2 W]
  float* values = keys + dim * 2 * W;               // [kBlock, dim] if it converts
  float* logits = values + (converts ? kBlock * dim : 0);  // [count, kBlock], then the weights
  float* total = logits + count * kBlock;           // [count, W]
  float* q = total + count * W;                     // [count, dim]
  float* out = q + count * dim;                     // [count, dim]
  float* maximum = out + count * dim;               // [count]
  float* kept = maximum + count;                    // [count]
  float* zeros = kept + count;                      // [dim]
  for (int i = 0; i < item.queries; ++i) {
    const float* from = p.q + ((token + i) * p.heads + first_head) * dim;
    for (int64_t d = 0; d < p.group * dim; ++d) q[i * p.group * dim + d] = from[d] * p.scale;
  }
  std::fill_n(out, count * dim, 0.0f);
  std::fill_n(total, count * W, 0.0f);
  std::fill_n(maximum, count, kMasked);
  std::fill_n(zeros, dim, 0.0f);

  const auto locate = [&](int64_t base, Block<T>* block) {
    const int begin = static_cast<int>(std::max<int64_t>(item.start - base, 0));
    const int end = static_cast<int>(std::min<int64_t>(item.end - base, kBlock));
    if constexpr (is_scaled) {
      std::fill_n(block->k_scales, kBlock, 0.0f);
      std::fill_n(block->v_scales, kBlock, 0.0f);
    }
    std::fill_n(block->k, kBlock, reinterpret_cast<const T*>(zeros));
    std::fill_n(block->v, kBlock, reinterpret_cast<const T*>(zeros));
    for (int s = begin; s < end;) {
      const int64_t page = (base + s) / p.page_size, offset = (base + s) % p.page_size;
      const int64_t head = (p.first_page + table[page]) * p.kv_heads + item.kv_head;
      int64_t at = head * p.page_size + offset;
      const int run = static_cast<int>(std::min<int64_t>(p.page_size - offset, end - s));
      for (int i = 0; i < run; ++i, ++s, ++at) {
        block->k[s] = static_cast<const T*>(p.k) + at * dim;
        block->v[s] = static_cast<const T*>(p.v) + at * dim;
        if constexpr (is_scaled) {
          block->k_scales[s] = p.k_scales[at];
          block->v_scales[s] = p.v_scales[at];
        }
      }
    }
  };
  const float* rows[kBlock];  // of values
  for (int i = 0; i < kBlock; ++i) rows[i] = values + i * dim;
  Block<T> blocks[2], *block = &blocks[0], *next = &blocks[1];
  const int64_t first_base = item.start / kBlock * kBlock;
  locate(first_base, block);
  for (int64_t base = first_base; base < item.end; base += kBlock) {
    const int begin = static_cast<int>(std::max<int64_t>(item.start - base, 0));
    const int end = static_cast<int>(std::min<int64_t>(item.end - base, kBlock));
    locate(base + kBlock, next);
    const int from = begin / (2 * W) * (2 * W), to = (end + 2 * W - 1) / (2 * W) * (2 * W);
    for (int s = from; s < to; s += 2 * W) {
      transpose<W>(block->k + s, next->k + s, dim, keys);
      transpose<W>(block->k + s + W, next->k + s + W, dim, keys + W);
      by_fours(count, [&](int m, auto n) {
        score<W, n>(q + m * dim, keys, dim, logits + m * kBlock + s);
      });
    }
    for (int m = 0; m < count; ++m) {
      const int64_t at = position + m / p.group - base;  // of the query, from the block's start
      const int first = p.window ? std::max<int64_t>(begin, at - p.window + 1) : begin;
      const int last = static_cast<int>(std::min<int64_t>(end, at + 1));
      const float* biases = p.biases ? p.biases + (first_head + m % p.group) * p.distances : nullptr;
      const float slope = p.slopes ? p.slopes[first_head + m % p.group] : 0.0f;
      float* row = logits + m * kBlock;
      Float<W> highest = Float<W>{} + kMasked;
      for (int s = from; s < to; s += W) {
        Float<W> x = load<W>(row + s);
        if constexpr (is_scaled) x *= load<W>(block->k_scales + s);
        const Int<W> key = count_from<W>(s, std::make_integer_sequence<int, W>());
        if (p.soft_cap > 0) x = p.soft_cap * hyperbolic_tangent<W>(x / p.soft_cap);
        if (biases) x += by_distance<W>(biases, p.distances, at - s);
        if (p.slopes) x += slope * __builtin_convertvector(key - static_cast<int32_t>(at), Float<W>);
        if (s < first || s + W > last) x = (key >= first) & (key < last) ? x : Float<W>{} + kMasked;
        store(row + s, x);
        highest = highest < x ? x : highest;
      }
      const float before = maximum[m];
      maximum[m] = std::max(before, largest<W>(highest));
      kept[m] = before == maximum[m] ? 1.0f : exponential<W>(Float<W>{} + (before - maximum[m]))[0];
      Float<W> added = {};
      for (int s = from; s < to; s += W) {
        Float<W> x = exponential<W>(load<W>(row + s) - maximum[m]);
        const Int<W> key = count_from<W>(s, std::make_integer_sequence<int, W>());
        if (s < first || s + W > last) x = (key >= first) & (key < last) ? x : Float<W>{};
        added += x;
        if constexpr (is_scaled) x *= load<W>(block->v_scales + s);
        store(row + s, x);
      }
      store(total + m * W, kept[m] * load<W>(total + m * W) + added);
    }
    if (converts) {
      for (int i = begin; i < end; ++i)
        for (int64_t d = 0; d < dim; d += W) {
          store(values + i * dim + d, load<W>(block->v[i] + d));
          __builtin_prefetch(next->v[i] + d, 0, 3);
        }
      accumulate_all<W, float>(logits, rows, nullptr, begin, end, kept, count, dim, out);
    } else {
      accumulate_all<W, T>(logits, block->v, next->v, begin, end, kept, count, dim, out);
    }
    std::swap(block, next);
  }

  float* to = p.out + (token * p.heads + first_head) * dim;
  for (int m = 0; m < count; ++m) {
    const float weight = sum<W>(load<W>(total + m * W));
    const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;  // zeros if no key is seen
    float* result = to + (m / p.group * p.heads + m % p.group) * dim;
    for (int64_t d = 0; d < dim; ++d) result[d] = out[m * dim + d] * inverse;
  }
}

template <typename T>
void attend_in_widest(const Problem& p, const Item& item) {
  if (p.head_dim % kWide == 0) attend<kWide, T>(p, item);
  else attend<8, T>(p, item);
}

using Attend = void (*)(const Problem&, const Item&);

// Returns the function for pages of this element type; null for other types.
Attend attend_for(ffi::DataType type) {
  if (type == ffi::F32) return attend_in_widest<float>;
  if (type == ffi::S8) return attend_in_widest<int8_t>;
  if (type == ffi::F8E4M3FN) return attend_in_widest<Float8>;
  return nullptr;
}

// The state that the threads share.
struct Plan {
  Problem problem;
  Attend attend;
  std::vector<Item> items;
};

// Fills `items` and zeroes the output of tokens in no row. Returns an error in the rows, or "".
std::string plan(const Problem& p, std::vector<Item>& items) {
  const int64_t tile = std::max<int64_t>(1, kTileRows / p.group);
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
      for (int32_t head = 0; head < p.kv_heads; ++head)
        items.push_back({static_cast<int32_t>(row), head, static_cast<int32_t>(first),
                         static_cast<int32_t>(queries), begin, end,
                         (end - begin) * (queries * p.group + 4) * p.head_dim});
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
using Slopes = ffi::Buffer<ffi::F32, 1>;

ffi::Error paged_attention(ffi::ThreadPool pool, Tokens q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           Scales k_scales, Scales v_scales, Scalar layer, Ints query_start,
                           Ints query_length, Ints first_position, Ints context_length,
                           Table page_table, Slopes slopes, ffi::Result<Tokens> out, float scale,
                           float soft_cap, int32_t window) {
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
  const std::string error = plan(p, shared->items);
  if (!error.empty()) return ffi::Error::InvalidArgument("paged_attention: " + error);

  int64_t cost = 0;
  for (const Item& item : shared->items) cost += item.cost;
  for_each_item(pool, shared->items.size(), 1 + cost / kWorthAThread, [shared](int64_t i, const NextItem&) {
    shared->attend(shared->problem, shared->items[i]);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Tokens>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Scales>()
                                  .Arg<Scales>()
                                  .Arg<Scalar>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Table>()
                                  .Arg<Slopes>()
                                  .Ret<Tokens>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window"));
